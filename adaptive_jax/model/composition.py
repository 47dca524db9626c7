"""Word vectors that are composed from other parameters: computed once per update or evaluation, and
shared by devices.

A character CNN, and an output table tied to one, have no table among their parameters. Their
vectors are a function of few parameters and of the spelling; computed here, they become the
collection "tables", in which layers look them up:

    update       microbatches look up the same tables and sum the gradients of the tables; then one
                 backward pass through the composition follows
    evaluation   composes once, for the words that occur in the split
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import traverse_util

from adaptive_jax.errors import InputError
from adaptive_jax.model.language_model import LanguageModel, variable_shapes
from adaptive_jax.numerics.layers import word_layer
from adaptive_jax.parallel import sharding


class Compose(NamedTuple):
    """`compose(params, lexicon, words, key=None, stored=None, read=None) -> tables`, differentiable
    in `params`, for use under `shard_map`.

    key: for dropout of tables in training; None: no dropout.
    stored: the part of the tables of all words that was computed earlier, see `encoded`; the rest
        is computed and returned.
    read: the result of `read` for all words, or None.

    Attributes:
        model, gather: see `sharding.gathering`.
    """

    model: LanguageModel
    gather: Callable

    def __call__(self, params, lexicon, words, key=None, stored=None, read=None):
        """See the class."""
        encodings = joined(jax.tree.map(lambda a: a[words], stored or {}), read or {})
        tables = self._run("compose", params, lexicon, words, encodings, key)
        encodings = traverse_util.flatten_dict(encodings)
        return _part(tables, lambda path: path not in encodings)

    def reads(self, words, stored) -> bool:
        """True if the surface vectors of all words are needed, so that `read` should run first."""
        model = self.model
        return (
            hasattr(word_layer(model.input), "read")
            and len(words) >= model.input.vocabulary_size
            and "input" not in (stored or {})
        )

    def read(self, params, lexicon, words):
        """The surface vectors of `words [n]`, stored by the input's method `read`."""
        return self._run("read", params, lexicon, words, {}, None)

    def _run(self, method, params, lexicon, words, tables, key):
        variables = {"params": self.gather(params), "lexicon": lexicon, "tables": tables}
        rngs = {} if key is None else {"dropout": key}
        _, after = self.model.apply(
            variables, words, method=method, train=key is not None, rngs=rngs, mutable=["tables"]
        )
        return after["tables"]


def compose_shared(compose: Compose, mesh) -> Callable:
    """Returns `compose` for words that all devices need: each device composes its share of them and
    gathers the other shares.

    Where vectors depend on the surface vectors of other words, devices first compute and gather
    these, so that each is computed once. Tables are padded to a multiple of the devices; the
    padding is never looked up.
    """
    axes = tuple(axis for axis in sharding.BATCH_AXES if mesh.shape[axis] > 1)
    if not axes:
        return compose

    def gathered(tables):
        return jax.tree.map(lambda a: jax.lax.all_gather(a, axes, tiled=True), tables)

    def shared(params, lexicon, words, key=None, stored=None):
        reads, share = compose.reads(words, stored), -(-len(words) // mesh.size)
        words = jnp.pad(words, (0, share * mesh.size - len(words)))
        share_of_words = jax.lax.dynamic_slice_in_dim(
            words, jax.lax.axis_index(axes) * share, share
        )
        read = gathered(compose.read(params, lexicon, share_of_words)) if reads else {}
        return gathered(compose(params, lexicon, share_of_words, key, stored, read))

    return shared


def compose_for_update(model: LanguageModel, gather: Callable, mesh) -> Callable:
    """Returns `tables_for(params, lexicon, inputs, key, stored=None) -> (tables, ids, inputs,
    pull)`, for use under `shard_map`.

    `key` is the key of the update's dropout. `inputs` are a device's token ids of a whole update,
    of any shape; the returned `inputs` are rows of the tables. `ids` are word ids that the tables
    have beside vectors, for an input that reads earlier tokens. `pull` maps gradients of the tables
    to gradients of the parameters. A model that composes nothing has no tables, and `pull` is None.
    stored: `encoded` of earlier tables of all words; then only the rest is computed and returned.
    """
    composed = model.composed_words()
    compose = Compose(model, gather)

    def tables_for(params, lexicon, inputs, key, stored=None):
        if composed == "none":
            return {}, {}, inputs, None
        if composed == "all":
            words = jnp.arange(model.input.vocabulary_size)
            compose_tables = compose_shared(compose, mesh)
        else:
            size = min(inputs.size, model.input.vocabulary_size)
            words, rows = jnp.unique(inputs, return_inverse=True, size=size, fill_value=0)
            inputs, compose_tables = rows.reshape(inputs.shape).astype(inputs.dtype), compose

        def compose_both(params):
            tables = compose_tables(params, lexicon, words, key, stored)
            return _part(tables, _is_vectors), _part(tables, lambda path: not _is_vectors(path))

        tables, pull, ids = jax.vjp(compose_both, params, has_aux=True)
        return tables, ids, inputs, lambda gradient: pull(gradient)[0]

    return tables_for


def encoded(model: LanguageModel, tables: dict) -> dict:
    """The costly part of composed tables, which is computed from the lexicon.

    The rest, such as a map of the input's table or a predicted bias, is computed from this part.
    """
    composes_output = hasattr(model.output.table, "lexicon_spec")
    return _part(
        tables,
        lambda path: (
            _is_vectors(path)
            and (path[0] == "input" or (composes_output and path[-1] == "vectors"))
        ),
    )


def encoders(model: LanguageModel, params: dict) -> dict:
    """Mask, a tree of bools like `params`, of the parameters that only `encoded` depends on."""
    composes_output = hasattr(model.output.table, "lexicon_spec")
    layer = word_layer(model.input)
    source = ("input",) if layer is model.input else ("input", "words")
    composes_input = hasattr(layer, "compose")

    def serves(path, _):
        if path[: len(source)] == source:
            return composes_input
        of_output = composes_output and path[:2] == ("output", "table")
        return of_output and not path[2].startswith("bias")

    return traverse_util.path_aware_map(serves, params)


def joined(*tables: dict) -> dict:
    """Merges parts of tables."""
    return traverse_util.unflatten_dict(
        {path: a for part in tables for path, a in traverse_util.flatten_dict(part).items()}
    )


@functools.lru_cache(maxsize=8)
def encoded_shapes(model: LanguageModel) -> dict:
    """Shapes of `encoded` for all words; cached dicts, not to be changed.

    Raises:
        InputError: an update does not compose all words.
    """
    if (composed := model.composed_words()) != "all":
        reason = "composes only the words it reads" if composed == "inputs" else "composes none"
        raise InputError(
            "compose_share below 1 stores the composed vectors of all words, and this model"
            f" {reason}: use compose_share=1, or an output table that is composed, such as"
            " output.table.name='tied' with input.name='char_cnn'"
        )

    def compose(variables):
        return model.apply(
            variables, jnp.arange(model.input.vocabulary_size), method="compose", mutable=["tables"]
        )[1]["tables"]

    return encoded(model, jax.eval_shape(compose, variable_shapes(model)))


def _is_vectors(path):
    """True except for word ids, which are whole numbers and have no gradient."""
    return path[-1] != "word_ids"


def _part(tables, keep):
    """The arrays of nested dicts for whose paths `keep(path)` is True."""
    return traverse_util.unflatten_dict(
        {path: a for path, a in traverse_util.flatten_dict(tables).items() if keep(path)}
    )
