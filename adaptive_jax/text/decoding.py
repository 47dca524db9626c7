"""Decoding: a model reads tokens one after another, keeps them in its body's cache, and predicts
the next one.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from adaptive_jax.evaluation.runs import Run
from adaptive_jax.losses.groups import join
from adaptive_jax.model.language_model import LanguageModel, parameter_shapes
from adaptive_jax.numerics.products import full_precision
from adaptive_jax.parallel import sharding
from adaptive_jax.text.next_token import (
    Grouped,
    NextToken,
    Sample,
    TopK,
    draw,
    draw_among,
    top_k,
)

# A text is read in pieces of these lengths, so that texts of all lengths share a few programs.
PIECES = 512, 64, 8, 1


class Sampling(NamedTuple):
    """How the next token is drawn, as far as it needs a program of its own.

    Attributes:
        k: draw among the k most probable tokens; 0: among all.
        nucleus: draw among the most probable tokens that hold a given share.
        banned: ids of tokens that are never drawn.
    """

    k: int = 0
    nucleus: bool = False
    banned: tuple[int, ...] = ()


class Decoder:
    """A run made ready to decode: the bands of its output are laid out.

    Attributes:
        run: the trained model.
        num_clusters: tails of the output; 0 where the probability of any word needs all of them.
        limited: whether a cache holds only as many tokens as it was made for, as a transformer's
            does.
    """

    def __init__(self, run: Run, tables: dict):
        """tables: vectors of all words that are composed, see `adaptive_jax.model.composition`; {}
        for a model that composes none.
        """
        self.run, self._tables = run, tables
        self._sizes, self._bands = _softmax(run, tables)
        self.num_clusters = sum(map(len, self._sizes[1:]))
        one, two = (
            jax.eval_shape(functools.partial(run.model.body.cache, 1, length)) for length in (8, 16)
        )
        self.limited = jax.tree.map(jnp.shape, one) != jax.tree.map(jnp.shape, two)

    def cache(self, rows: int, length: int) -> object:
        """An empty cache of the body, on the run's devices."""
        make = _cache(self.run.model, self.run.mesh, rows, length if self.limited else 1)
        return make()

    def read(self, tokens: np.ndarray, carry: object) -> tuple[jax.Array, object]:
        """Reads tokens `[rows, n]` after `carry`, which is used up: the last hidden states
        `[rows, features]`, the next carry.
        """
        at, hidden = 0, None
        while at < tokens.shape[1]:
            piece = next(length for length in PIECES if length <= tokens.shape[1] - at)
            part = np.ascontiguousarray(tokens[:, at : at + piece], np.int32)
            hidden, carry = _reading(self.run.model, self.run.mesh)(*self._variables, part, carry)
            at += piece
        return hidden, carry

    def draw(
        self, hidden: jax.Array, carry: object, how: Sampling, settings: tuple
    ) -> tuple[Sample, jax.Array, object]:
        """Draws the token after `hidden [rows, features]` and reads it: the tokens, the next hidden
        states and carry.

        settings: a random key, the number of the token, 1 / temperature, and the share of the
            nucleus; see `next_token.draw`.
        """
        program = _sampling(self.run.model, self.run.mesh, self._sizes, how)
        return program(*self._variables, (self._bands, hidden, settings), carry)

    def top_k(
        self, hidden: jax.Array, k: int, scores: np.ndarray, banned: tuple[int, ...] = ()
    ) -> TopK:
        """The k most probable next tokens of each row of `hidden [rows, features]`.

        scores: of each row, `[rows]` in nats. Of several rows, only the k tokens of all that have
            the highest sums of score and log-probability are sure to be there.
        banned: ids of tokens whose log-probability becomes -inf.
        """
        program = _ranking(self.run.model, self.run.mesh, self._sizes, k, banned)
        return program(*self._variables, (self._bands, hidden, scores))

    def take(self, carry: object, rows: np.ndarray) -> object:
        """The carry of some rows, in this order; a row may be taken several times."""
        return _taking(self.run.model)(carry, np.asarray(rows, np.int32))

    @property
    def _variables(self):
        return self.run.params, self.run.lexicon, self._tables


def _softmax(run, tables):
    """Words of each band by group, and their arrays `(groups, clusters)`: made once, since to join
    bands copies them.

    Without tails `((words,),)` and `()`.
    """
    sizes = []

    def lay_out(apply):
        bands, clusters = apply(
            method=lambda model: (model.output.bands(), getattr(model.output, "clusters", None))
        )
        if clusters is None:
            sizes.append(((run.model.input.vocabulary_size,),))
            return ()
        joined, groups = join(bands)
        sizes.append(joined)
        return groups, clusters

    arrays = _mapped(lay_out, run.model, run.mesh)(run.params, run.lexicon, tables)
    return sizes[-1], arrays


def _mapped(function, model, mesh, carries=False):
    """A program that calls `function(apply, *arrays)` on every device, where `apply` is the model's
    with its variables.

    The program takes params, lexicon, tables and the arrays. Devices all do the same: the work of a
    few rows cannot be shared.
    carries: the last array is used up.
    """
    shapes, whole = parameter_shapes(model), PartitionSpec()
    local_model, gather = sharding.gathering(model, shapes, mesh)

    def local(params, lexicon, tables, arrays):
        variables = {"params": gather(params), "lexicon": lexicon, "tables": tables}
        return function(functools.partial(local_model.apply, variables), *arrays)

    specs = sharding.parameter_specs(shapes, mesh), whole, whole, whole
    local = jax.shard_map(
        full_precision(local, model.body),
        mesh=mesh,
        in_specs=specs,
        out_specs=whole,
        check_vma=False,
    )

    def program(params, lexicon, tables, *arrays):
        return local(params, lexicon, tables, arrays)

    # 3 and 4 are what follows params, lexicon and tables.
    return jax.jit(program, donate_argnums=(4,) if carries else ())


@functools.lru_cache(maxsize=8)
def _reading(model: LanguageModel, mesh: Mesh) -> Callable:
    def read(apply, tokens, carry):
        hidden, carry = apply(tokens, carry, method="step")
        return hidden[:, -1], carry

    return _mapped(read, model, mesh, carries=True)


@functools.lru_cache(maxsize=8)
def _sampling(model: LanguageModel, mesh: Mesh, sizes: tuple, how: Sampling) -> Callable:
    def sample(apply, given, carry):
        bands, hidden, (key, number, power, top_p) = given
        rows = jnp.arange(len(hidden))
        keys = jax.vmap(lambda row: jax.random.fold_in(jax.random.fold_in(key, row), number))(rows)
        if how.nucleus and not how.k:
            token = NextToken(_log_probs(apply, hidden), how.banned)
            every = top_k(token, token.log_probs.shape[1])
            tails = jnp.int32(sum(map(len, sizes[1:])))
            found = draw_among(every._replace(clusters_computed=tails), keys, power, top_p)
        else:
            token = _next_token(apply, sizes, bands, hidden, how.banned)
            if how.k:
                found = draw_among(top_k(token, how.k), keys, power, top_p)
            else:
                found = draw(token, keys, power)
        hidden, carry = apply(found.id[:, None], carry, method="step")
        return found, hidden[:, 0], carry

    return _mapped(sample, model, mesh, carries=True)


@functools.lru_cache(maxsize=8)
def _ranking(
    model: LanguageModel, mesh: Mesh, sizes: tuple, k: int, banned: tuple[int, ...]
) -> Callable:
    def rank(apply, given):
        bands, hidden, scores = given

        def least(values):
            kth = jax.lax.top_k((values + scores[:, None]).ravel(), k)[0][-1]
            return jnp.maximum(values[:, -1], kth - scores)

        return top_k(_next_token(apply, sizes, bands, hidden, banned), k, least)

    return _mapped(rank, model, mesh)


@functools.lru_cache(maxsize=8)
def _cache(model, mesh, rows, length):
    return jax.jit(
        functools.partial(model.body.cache, rows, length), out_shardings=sharding.replicated(mesh)
    )


@functools.lru_cache(maxsize=8)
def _taking(model):
    """A program that takes rows of a carry; each array's axis of rows is the one whose size
    follows the number of rows.
    """
    two, three = (
        jax.tree.leaves(jax.eval_shape(functools.partial(model.body.cache, rows, 8)))
        for rows in (2, 3)
    )
    pairs = [zip(a.shape, b.shape, strict=True) for a, b in zip(two, three, strict=True)]
    axes = [[axis for axis, (a, b) in enumerate(pair) if a != b] for pair in pairs]

    def take(carry, rows):
        leaves, tree = jax.tree.flatten(carry)
        pairs = zip(leaves, axes, strict=True)
        return tree.unflatten([jnp.take(a, rows, axis=axis[0]) if axis else a for a, axis in pairs])

    return jax.jit(take)


def _next_token(apply, sizes, bands, hidden, banned):
    if len(sizes) > 1:
        return NextToken.banded(hidden, Grouped(sizes, *bands), banned)
    return NextToken(_log_probs(apply, hidden), banned)


def _log_probs(apply, hidden):
    return apply(hidden, method=lambda model, hidden: model.output.log_probs(hidden))
