"""Decoding: a model reads tokens one after another into its body's cache and predicts the next
one.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from adaptive_jax.generation.next_token import (
    Grouped,
    NextToken,
    Sample,
    TopK,
    draw,
    draw_among,
    top_k,
)
from adaptive_jax.losses.groups import join
from adaptive_jax.model.on_devices import local_model, on_devices
from adaptive_jax.parallel import sharding
from adaptive_jax.runs.run import Run

# A text is read in pieces of these lengths, so that all texts share a few programs.
PIECES = 512, 64, 8, 1


class Sampling(NamedTuple):
    """Static settings of a draw: each combination compiles a program.

    Attributes:
        k: draw among the k most probable tokens; 0: among all.
        nucleus: draw among the most probable tokens that hold the share `Draw.top_p`.
        banned: ids of tokens that are never drawn.
    """

    k: int = 0
    nucleus: bool = False
    banned: tuple[int, ...] = ()


class Draw(NamedTuple):
    """Settings of a draw that are arguments of its program.

    Attributes:
        key: a random key.
        number: number of the token in its text, from 0.
        power: 1 / temperature.
        top_p: the share of the nucleus; see `next_token.draw_among`.
    """

    key: jax.Array
    number: np.int32
    power: np.float32
    top_p: np.float32


class Decoder:
    """Decodes with a run, the bands of whose output are grouped once.

    Attributes:
        run: the trained model.
        limited: whether a cache has a fixed number of tokens, as a transformer's does.
    """

    def __init__(self, run: Run, tables: dict):
        """tables: composed vectors of all words, see `adaptive_jax.model.composition`; {} for a
        model that composes none.
        """
        self.run, self._tables = run, tables
        self._programs: dict[tuple, Callable] = {}
        self._softmax = self._call(("lay out",), _grouped)
        of_two_rows, of_two_tokens, of_three_rows = (
            jax.tree.map(jnp.shape, jax.eval_shape(functools.partial(run.model.cache, *size)))
            for size in ((2, 1), (2, 2), (3, 1))
        )
        self.limited = of_two_rows != of_two_tokens
        replicated = sharding.replicated(run.mesh)
        self._cache = jax.jit(run.model.cache, static_argnums=(0, 1), out_shardings=replicated)
        self._take = _make_take(of_two_rows, of_three_rows)

    def cache(self, rows: int, length: int) -> object:
        """An empty cache of the body, on the run's devices."""
        return self._cache(rows, length if self.limited else 1)

    def read(self, tokens: np.ndarray, carry: object) -> tuple[jax.Array, object]:
        """Reads tokens `[rows, n]` after `carry`, which is donated. Returns the last hidden states,
        `[rows, features]`, and the next carry.
        """

        def read(apply, tokens, carry):
            hidden, carry = apply(tokens, carry, method="step")
            return hidden[:, -1], carry

        hidden = None
        while rest := tokens.shape[1]:
            length = next(length for length in PIECES if length <= rest)
            piece = np.ascontiguousarray(tokens[:, :length], np.int32)
            hidden, carry = self._call(("read",), read, piece, carry, carries=True)
            tokens = tokens[:, length:]
        return hidden, carry

    def draw(
        self,
        hidden: jax.Array,
        carry: object,
        sampling: Sampling,
        values: Draw,
        fixed: np.ndarray,
    ) -> tuple[Sample, jax.Array, object]:
        """Draws the token after `hidden [rows, features]` and reads it. Returns the tokens, the
        next hidden states and the next carry.

        fixed: int32 `[rows]`, the token of a row that draws none, -1 for rows that draw.
        """

        def draw_and_read(apply, arguments, carry):
            softmax, hidden, (key, number, power, top_p), fixed = arguments
            rows = jnp.arange(len(hidden))
            fold_in = jax.random.fold_in
            keys = jax.vmap(lambda row: fold_in(fold_in(key, row), number))(rows)
            if sampling.k:
                best = top_k(_next_token(apply, softmax, hidden, sampling.banned), sampling.k)
                sample = draw_among(best, keys, power, top_p)
            else:
                log_probs = NextToken(_log_probs(apply, hidden), sampling.banned).log_probs
                if sampling.nucleus:
                    best = top_k(NextToken(log_probs), log_probs.shape[1])
                    sample = draw_among(best, keys, power, top_p)
                else:
                    sample = draw(log_probs, keys, power)
            sample = sample._replace(id=jnp.where(fixed < 0, sample.id, fixed))
            hidden, carry = apply(sample.id[:, None], carry, method="step")
            return sample, hidden[:, 0], carry

        arguments = self._softmax, hidden, values, fixed
        return self._call(("draw", sampling), draw_and_read, arguments, carry, carries=True)

    def top_k(
        self, hidden: jax.Array, k: int, scores: np.ndarray, banned: tuple[int, ...] = ()
    ) -> TopK:
        """The k most probable next tokens of each row of `hidden [rows, features]`.

        scores: of each row, `[rows]` in nats. With several rows, the result is complete only for
            the k tokens of all rows with the highest sums of score and log-probability.
        banned: ids of tokens whose log-probability becomes -inf.
        """

        def rank(apply, arguments):
            softmax, hidden, scores = arguments

            def least(values):
                kth = jax.lax.top_k((values + scores[:, None]).ravel(), k)[0][-1]
                return jnp.maximum(values[:, -1], kth - scores)

            return top_k(_next_token(apply, softmax, hidden, banned), k, least)

        return self._call(("rank", k, banned), rank, (self._softmax, hidden, scores))

    def log_probs(self, hidden: jax.Array) -> jax.Array:
        """Log-probabilities of all tokens after `hidden [rows, features]`, float32 `[rows, V]`."""
        return self._call(("log_probs",), _log_probs, hidden)

    def take(self, carry: object, rows: np.ndarray) -> object:
        """The carry of the selected rows, in their order; rows may repeat."""
        return self._take(carry, np.asarray(rows, np.int32))

    def _call(self, name, function, *arrays, carries=False):
        """Calls `function(apply, *arrays)` on every device; `apply` is the model's, with its
        variables bound. All devices compute the same, since a few rows cannot be divided.

        name: key of the compiled program.
        carries: the last array is donated.
        """
        if name not in self._programs:
            self._programs[name] = _program(function, self.run.model, self.run.mesh, carries)
        run = self.run
        return self._programs[name](run.params, run.lexicon, self._tables, *arrays)


def _program(function, model, mesh, carries):
    one_model, gather = local_model(model, mesh)

    def local(params, lexicon, tables, arrays):
        variables = {"params": gather(params), "lexicon": lexicon, "tables": tables}
        return function(functools.partial(one_model.apply, variables), *arrays)

    replicated = PartitionSpec()
    local = on_devices(model, mesh, local, (replicated,) * 3, replicated)

    def program(params, lexicon, tables, *arrays):
        return local(params, lexicon, tables, arrays)

    # The carry follows params, lexicon, tables and one more argument.
    return jax.jit(program, donate_argnums=(4,) if carries else ())


def _make_take(of_two_rows, of_three_rows):
    """Returns `take(carry, rows)`, see `Decoder.take`. The row axis of an array is the one whose
    size differs between carries of two and of three rows.
    """

    def take_array(rows, array, *shapes):
        axes = [axis for axis, (a, b) in enumerate(zip(*shapes, strict=True)) if a != b]
        return jnp.take(array, rows, axis=axes[0]) if axes else array

    def take(carry, rows):
        return jax.tree.map(functools.partial(take_array, rows), carry, of_two_rows, of_three_rows)

    return jax.jit(take)


def _log_probs(apply, hidden):
    return apply(hidden, method=lambda model, hidden: model.output.log_probs(hidden))


def _grouped(apply):
    """The softmax with its bands grouped; None without tails. Joining bands copies them."""
    bands, clusters = apply(
        method=lambda model: (model.output.bands(), getattr(model.output, "clusters", None))
    )
    return None if clusters is None else Grouped(*join(bands), clusters)


def _next_token(apply, softmax, hidden, banned):
    if softmax is None:
        return NextToken(_log_probs(apply, hidden), banned)
    return NextToken.banded(hidden, softmax, banned)
