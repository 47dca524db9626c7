"""Optimizers that treat an array as a layer, such as muon and lamb, over bodies that stack equal
layers in one array.
"""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import optax

from adaptive_jax.errors import InputError
from adaptive_jax.model.language_model import LanguageModel, parameter_shapes
from adaptive_jax.optimizers import optim


def optimizer_of(config: Mapping, model: LanguageModel) -> optax.GradientTransformationExtraArgs:
    """A config's optimizer for a model.

    Raises:
        InputError: as `optim.from_config`; an optimizer that treats arrays as layers, over stacked
            layers with sparse updates; one whose state no checkpoint can hold.
    """
    found, name = optim.from_config(config), config["optimizer"]["name"]
    if name in optim.OPTIMIZERS:
        return found
    groups = getattr(model.body, "parameter_groups", ())
    stacks = [each for group in groups if group.stacked for each in group.names]
    if stacks and by_array(found):
        if (share := config["compose_share"]) != 1:
            raise InputError(
                f"compose_share={share:g} must be 1 with optimizer.name={name!r} and a body of"
                " stacked layers: use another optimizer"
            )
        found = on_each_layer(found, stacks)
        if optim.params_to_evaluate(jax.eval_shape(found.init, parameter_shapes(model)), None):
            raise InputError(
                f"optimizer.name={name!r} must keep no averages if it treats arrays as layers: use"
                " another"
            )
    state = jax.eval_shape(found.init, parameter_shapes(model))
    if any(a.size == 0 for a in jax.tree.leaves(state)):
        raise InputError(
            f"optimizer.name={name!r} keeps arrays without numbers for this model, which no"
            " checkpoint can hold: use another"
        )
    return found


def by_array(optimizer: optax.GradientTransformation) -> bool:
    """Whether an optimizer changes an array otherwise than it changes its parts."""
    whole, gradient = jax.random.normal(jax.random.key(0), (2, 2, 3, 4))

    def changes(params, gradients):
        # The second update is the first whose rate need not be 0.
        _, state = optimizer.update(gradients, optimizer.init(params), params)
        return jax.tree.leaves(optimizer.update(gradients, state, params)[0])

    [together] = jax.jit(changes)({"a": whole}, {"a": gradient})
    apart = jax.jit(changes)({"a": list(whole)}, {"a": list(gradient)})
    return not jnp.allclose(together, jnp.stack(apart), 1e-4, 0)


def on_each_layer(
    optimizer: optax.GradientTransformation, stacks: Sequence[str]
) -> optax.GradientTransformationExtraArgs:
    """An optimizer that is given layers in place of stacks of them.

    stacks: names of the body's parameters whose first axis counts layers.
    """
    optimizer = optax.with_extra_args_support(optimizer)

    def apart(tree):
        body = dict(tree["body"])
        for name in stacks:
            layers = range(len(jax.tree.leaves(body[name])[0]))
            body[name] = [jax.tree.map(lambda a, i=i: a[i], body[name]) for i in layers]
        return {**tree, "body": body}

    def together(tree):
        body = dict(tree["body"])
        for name in stacks:
            body[name] = jax.tree.map(lambda *layers: jnp.stack(layers), *body[name])
        return {**tree, "body": body}

    def update(gradients, state, params, **extra):
        changes, state = optimizer.update(apart(gradients), state, apart(params), **extra)
        return together(changes), state

    return optax.GradientTransformationExtraArgs(lambda p: optimizer.init(apart(p)), update)
