"""Word vectors that are composed from other parameters: computed once an update or an evaluation, and shared by devices.

A character CNN, and an output table tied to one, have no table among their parameters. Their vectors are a function of few
parameters and of the spelling; computed here, they become the collection "tables", which layers then only look up:

    an update       its microbatches look up the same tables and add up the gradient of the tables; one backward pass through
                    the composition ends the update
    an evaluation   composes once, for the words that occur in the split
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from adaptive_jax.devices import sharding
from adaptive_jax.model import LanguageModel


def make_compose(model: LanguageModel, gather: Callable) -> Callable:
    """Returns `compose(params, lexicon, words, key=None) -> tables`, differentiable in `params`, for use under `shard_map`.

    model, gather: see `sharding.gathering`. key: of the dropout of tables in training; None: none.
    """

    def compose(params, lexicon, words, key=None):
        variables, rngs = {"params": gather(params), "lexicon": lexicon}, {} if key is None else {"dropout": key}
        how = {"method": "compose", "train": key is not None, "rngs": rngs, "mutable": ["tables"]}
        return model.apply(variables, words, **how)[1]["tables"]

    return compose


def compose_shared(compose: Callable, mesh) -> Callable:
    """Returns `compose` for words that all devices need: each device composes its share and gathers those of the others.

    Tables are padded to a multiple of the devices; nothing looks up the padding.
    """
    axes = tuple(axis for axis in sharding.BATCH_AXES if mesh.shape[axis] > 1)
    if not axes:
        return compose

    def shared(params, lexicon, words, key=None):
        share = -(-len(words) // mesh.size)
        words = jnp.pad(words, (0, share * mesh.size - len(words)))
        own = jax.lax.dynamic_slice_in_dim(words, jax.lax.axis_index(axes) * share, share)
        return jax.tree.map(lambda a: jax.lax.all_gather(a, axes, tiled=True), compose(params, lexicon, own, key))

    return shared


def compose_for_update(model: LanguageModel, gather: Callable, mesh) -> Callable:
    """Returns `tables_for(params, lexicon, inputs, key) -> (tables, inputs, pull)`, for use under `shard_map`.

    `key` is that of the update's dropout. `inputs` are a device's token ids of a whole update, in any shape; those returned are
    rows of the tables. `pull` takes a gradient of the tables to one of the parameters. A model that composes nothing has no tables
    and no `pull`.
    """
    which = model.composed_words()
    compose = make_compose(model, gather)

    def tables_for(params, lexicon, inputs, key):
        if which == "none":
            return {}, inputs, None
        if which == "all":
            words, made = jnp.arange(model.input.vocabulary_size), compose_shared(compose, mesh)
        else:
            size = min(inputs.size, model.input.vocabulary_size)
            words, rows = jnp.unique(inputs, return_inverse=True, size=size, fill_value=0)
            inputs, made = rows.reshape(inputs.shape).astype(inputs.dtype), compose
        tables, pull = jax.vjp(lambda params: made(params, lexicon, words, key), params)
        return tables, inputs, lambda gradient: pull(gradient)[0]

    return tables_for
