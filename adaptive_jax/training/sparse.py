"""Sparse updates: most updates use stored encodings of words and leave the encoder as it is
(GroC 2020, section 3.4).
"""

import copy
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import optax

from adaptive_jax.data.batches.rows import bits
from adaptive_jax.errors import InputError
from adaptive_jax.model.composition import encoded_shapes, encoders
from adaptive_jax.model.language_model import LanguageModel, parameter_shapes
from adaptive_jax.training import optim
from adaptive_jax.training.optimizer import Optimizer

STREAM = 5  # of random bits, see `bits`


def composes(seed: int, step: int, share: float) -> bool:
    """Whether update `step`, counted from 1, encodes the words anew; drawn from seed and step,
    and true of the first.
    """
    return step == 1 or share >= 1 or int(bits(seed, step, STREAM).random_raw()) < share * 2**64


def optimizers(config: Mapping, model: LanguageModel) -> list[Optimizer]:
    """A config's optimizer; with sparse updates one for updates that encode words anew, and one for
    the others.

    Both have the same state. The second leaves the parameters of the encoder untouched, weight
    decay included, and what is remembered of their gradients. Adam's correction of its means counts
    for them only the updates that they had. So does the public code on today's PyTorch, whose Adam
    passes over parameters without a gradient and counts for each.

    Raises:
        InputError: a share out of range, or of a model that does not compose all words.
    """
    optimizer, share = optim.from_config(config), config["compose_share"]
    if not 0 < share <= 1:
        raise InputError(
            f"compose_share={share:g} must be above 0 and at most 1: the share of updates that"
            " compose words anew"
        )
    if share == 1:
        return [optimizer]
    encoded_shapes(model)
    return [
        _wrapped(optimizer, encoders(model, parameter_shapes(model)), how)
        for how in (_anew, _still)
    ]


def _wrapped(optimizer, of_encoder, how):
    direction = optax.chain(optimizer.direction, optax.add_decayed_weights(optimizer.decay))
    wrapped = copy.copy(optimizer)
    wrapped.decay, start = 0.0, jnp.zeros((), jnp.int32)
    wrapped.direction = optax.GradientTransformation(
        lambda params: (direction.init(params), start),
        functools.partial(how, direction, of_encoder),
    )
    return wrapped


def _anew(direction, of_encoder, gradients, state, params):
    inner, done = state
    directions, after = direction.update(gradients, inner, params)
    # The same but for the encoder's own count; what is computed twice, the compiler computes once.
    own, _ = direction.update(gradients, _counted(inner, done), params)
    return jax.tree.map(lambda mine, a, b: a if mine else b, of_encoder, own, directions), (
        after,
        done + 1,
    )


def _still(direction, of_encoder, gradients, state, params):
    inner, done = state
    directions, after = direction.update(gradients, inner, params)
    directions = jax.tree.map(
        lambda mine, a: jnp.zeros_like(a) if mine else a, of_encoder, directions
    )
    names = {_names(path) for path, mine in jax.tree.leaves_with_path(of_encoder) if mine}
    after = jax.tree_util.tree_map_with_path(
        lambda path, old, new: old if _names(path) in names else new, inner, after
    )
    return directions, (after, done)


def _names(path):
    """The keys of dicts on a path: of an array that an optimizer keeps for a parameter, those
    of the parameter.
    """
    return tuple(key.key for key in path if isinstance(key, jax.tree_util.DictKey))


def _counted(state, done):
    """The state with another count of updates where Adam keeps one."""
    return jax.tree.map(
        lambda part: part._replace(count=done) if _is_adam(part) else part, state, is_leaf=_is_adam
    )


def _is_adam(state):
    return isinstance(state, optax.ScaleByAdamState)
