"""Sparse updates: most updates use stored encodings of words and leave the encoder as it is
(GroC 2020, section 3.4).
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax import tree_utils

from adaptive_jax.data.batches.spans import philox
from adaptive_jax.model.composition import encoded_shapes, encoders
from adaptive_jax.model.language_model import LanguageModel, build, parameter_shapes
from adaptive_jax.optimizers import optim
from adaptive_jax.optimizers.layerwise import optimizer_of
from adaptive_jax.planning.plan import Parts

STREAM = 5  # of random bits, see `philox`


class SparseState(NamedTuple):
    """The state of `sparse`."""

    inner: Any  # the optimizer's
    encoded: jax.Array  # updates that encoded words anew


def composes(seed: int, step: int, share: float) -> bool:
    """True if update `step`, counted from 1, encodes the words anew; drawn from seed and step,
    and true of the first.
    """
    return step == 1 or share >= 1 or int(philox(seed, step, STREAM).random_raw()) < share * 2**64


def optimizer(config: Mapping, model: LanguageModel) -> optax.GradientTransformationExtraArgs:
    """A config's optimizer for a model; with sparse updates, `sparse` around it.

    Raises:
        InputError: as `optimizer_of`; a share below 1 of a model that does not compose all
            words.
    """
    shapes, share = parameter_shapes(model), config["compose_share"]
    dense = optimizer_of(config, model, shapes)
    if share == 1:
        return dense
    encoded_shapes(model)
    return sparse(dense, encoders(model, shapes))


def parts_of(config: Mapping, vocabulary_size: int) -> Parts:
    """The layers and the optimizer of a config. Raises InputError as `build` and `optimizer`."""
    model = build(config, vocabulary_size)
    return Parts(model, optimizer(config, model))


def sparse(
    optimizer: optax.GradientTransformation, encoder: Any
) -> optax.GradientTransformationExtraArgs:
    """An optimizer that freezes the encoder in updates with stored encodings, which
    `update(..., stored=True)` makes: no change, no weight decay, moments unchanged.

    A count of updates, by which Adam corrects its moments, is for the encoder the number of updates
    that changed it. The public code does the same on current PyTorch: its Adam skips parameters
    without a gradient and keeps one count for each.

    encoder: which parameters are the encoder's: a tree of booleans.
    """
    optimizer = optax.with_extra_args_support(optimizer)

    def init(params):
        return SparseState(optimizer.init(params), jnp.zeros((), jnp.int32))

    def update(gradients, state, params, *, stored=False, **extra):
        inner, encoded = state
        extra |= {"frozen": encoder} if stored else {}
        changes, after = optimizer.update(gradients, inner, params, **extra)
        if stored:
            of_encoder = jax.tree.map(jnp.zeros_like, changes), inner
        else:  # the same by the encoder's count; the compiler merges what both compute
            of_encoder = optimizer.update(gradients, _with_count(inner, encoded), params, **extra)
        masks = encoder, _moments(optimizer, inner, encoder)
        changes, after = jax.tree.map(
            lambda mask, a, b: a if mask else b, masks, of_encoder, (changes, after)
        )
        return changes, SparseState(after, encoded + (not stored))

    return optax.GradientTransformationExtraArgs(init, update)


def _moments(optimizer, state, encoder):
    """Mask of the arrays of a state that are moments of the encoder: all that it keeps for a
    parameter, except averages, which also count updates that leave the encoder as it is.
    """
    moments = tree_utils.tree_map_params(
        optimizer,
        lambda _, e: e,
        state,
        encoder,
        transform_non_params=lambda _: False,
        # A parameter of another part of the optimizer; a list for each parameter, as sm3 has it.
        is_leaf=lambda a: isinstance(a, optax.MaskedNode | list),
    )
    if tree_utils.tree_get(state, "average", filtering=optim.is_field) is None:
        return moments
    none = jax.tree.map(lambda _: False, encoder)
    return tree_utils.tree_set(moments, optim.is_field, average=none)


def _with_count(state, count):
    """The state of an optimizer with another count of updates, if it has one."""
    for name in "count", "t":  # the field's name in Adam, and in Adan
        if tree_utils.tree_get_all_with_path(state, name, optim.is_field):
            state = tree_utils.tree_set(state, optim.is_field, **{name: count})
    return state
