"""Optimizers that treat an array as a layer, such as muon and lamb, over bodies that stack equal
layers in one array.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from adaptive_jax.errors import InputError
from adaptive_jax.optimizers import optim

# Optimizers of optax whose change of an array is not that of its parts. A test tries all of optax.
LAYERWISE = {
    "adafactor",  # factors second moments over two axes, clips by an array's root mean square
    "fromage",  # scales by an array's norm
    "galore",  # projects the gradient of a matrix to a low rank
    "lamb",  # scales by an array's norm
    "lars",  # scales by an array's norm
    "muon",  # orthogonalizes a matrix
    "noisy_sgd",  # draws noise by arrays
    "novograd",  # keeps one second moment an array
    "sm3",  # keeps one second moment an index of each axis
}


def optimizer_of(
    config: Mapping, model: Any, shapes: Mapping
) -> optax.GradientTransformationExtraArgs:
    """A config's optimizer for a language model with parameters of these shapes.

    Raises:
        InputError: as `optim.from_config`; an optimizer that treats arrays as layers, over stacked
            layers with sparse updates; one whose state no checkpoint can hold; one of tables beside
            averages, or of a model that has no tables.
    """
    name, tables = config["optimizer"]["name"], config["optimizer"]["tables"]
    optimizer = optim.from_config(config, model.word_tables())
    averages = optim.params_to_evaluate(jax.eval_shape(optimizer.init, shapes), None)
    if tables and averages:
        raise InputError(
            f"optimizer.tables must be empty with optimizer.name={name!r}, which averages, got"
            f" {tables!r}"
        )
    if tables and not model.word_tables():
        raise InputError(
            f"optimizer.tables must be empty with a model that composes its words, got {tables!r}"
        )
    if name in optim.OPTIMIZERS:
        return optimizer
    groups = getattr(model.body, "parameter_groups", ())
    stacks = [path for group in groups if group.stacked for path in group.names]
    if stacks and is_layerwise(name):
        if (share := config["compose_share"]) != 1:
            raise InputError(
                f"compose_share={share:g} must be 1 with optimizer.name={name!r} and stacked layers"
            )
        optimizer = on_each_layer(optimizer, stacks)
        if averages:
            raise InputError(f"optimizer.name={name!r} must not average and treat arrays as layers")
    state = jax.eval_shape(optimizer.init, shapes)
    if any(a.size == 0 for a in jax.tree.leaves(state)):
        raise InputError(
            f"optimizer.name={name!r} keeps empty arrays, which no checkpoint can hold"
        )
    return optimizer


def is_layerwise(name: str) -> bool:
    """True if `optimizer.name` treats an array as a layer: one of `LAYERWISE`, or a function of
    another package with an attribute `layerwise` that is true.
    """
    if name.rpartition(":")[2] in LAYERWISE:
        return True
    return getattr(optim.optimizer_named(name), "layerwise", False)


def on_each_layer(
    optimizer: optax.GradientTransformation, stacks: Sequence[str]
) -> optax.GradientTransformationExtraArgs:
    """An optimizer that gets single layers in place of stacks of them.

    stacks: names of the body's parameters whose first axis counts layers.
    """
    optimizer = optax.with_extra_args_support(optimizer)

    def unstacked(tree):
        body = dict(tree["body"])
        for name in stacks:
            layers = range(len(jax.tree.leaves(body[name])[0]))
            body[name] = [jax.tree.map(lambda a, i=i: a[i], body[name]) for i in layers]
        return {**tree, "body": body}

    def stacked(tree):
        body = dict(tree["body"])
        for name in stacks:
            body[name] = jax.tree.map(lambda *layers: jnp.stack(layers), *body[name])
        return {**tree, "body": body}

    def update(gradients, state, params, **extra):
        changes, state = optimizer.update(unstacked(gradients), state, unstacked(params), **extra)
        return stacked(changes), state

    return optax.GradientTransformationExtraArgs(lambda p: optimizer.init(unstacked(p)), update)
