"""The likeliest next words, and draws of the next word, without the tails of a softmax that cannot
matter.

A softmax with tails gives each tail a probability in its head, and no word of a tail has more than
its tail. So the head alone often decides:

    top k     a tail less probable than the k-th best word holds none of the k best
    a draw    Gumbel noise decides between the head and each tail as a whole (Maddison, Tarlow &
              Minka 2014), so only the tail that wins is computed; then a word is drawn in it
    top p     a draw counts if the words before it, the most probable first, hold less than p
              together; else another is drawn. What the tails before it hold as a whole mostly
              settles that

The results are those of all log-probabilities. A tail that is computed counts as opened. Everything
here runs inside `jax.jit`.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from adaptive_jax.text.outlook import Outlook


class Best(NamedTuple):
    """The k best words of each row, the most probable first; equally probable ones in the order of
    their ids.

    Attributes:
        values: log-probabilities in nats, float32 `[rows, k]`; -inf where there are fewer words.
        ids: int32 `[rows, k]`.
        opened: tails that were computed, a scalar.
    """

    values: jax.Array
    ids: jax.Array
    opened: jax.Array


class Drawn(NamedTuple):
    """A word of each row.

    Attributes:
        value: its log-probability in nats, float32 `[rows]`.
        id: int32 `[rows]`.
        opened: tails that were computed, a scalar; one that was computed twice counts twice.
    """

    value: jax.Array
    id: jax.Array
    opened: jax.Array


class _Bounds(NamedTuple):
    """Bounds of log Σ p^power over the words of each tail, `[rows, tails]`; equal for a tail
    that has been opened.
    """

    low: jax.Array
    high: jax.Array

    def set(self, tail, value):
        return _Bounds(*(bound.at[:, tail].set(value) for bound in self))


def top_k(outlook: Outlook, k: int, least: Callable = lambda values: values[:, -1]) -> Best:
    """The k most probable words of each row.

    least: from the best values so far, `[rows, k]`, to the log-probability `[rows]` that a word
        needs to matter.
    """
    found, seen = _best(outlook.ids, outlook.words, k), jnp.zeros(len(outlook.sizes), bool)

    def pending(values, seen):
        return (outlook.reached >= least(values)[:, None]) & ~seen[None]

    def visit(state):
        (values, ids), seen = state
        tail = _most(pending(values, seen), outlook.reached - _finite(least(values))[:, None])
        more = outlook.visit(tail, lambda ids, values: _best(ids, values, k))
        joint = [jnp.concatenate(pair, axis=1) for pair in zip((values, ids), more, strict=True)]
        values, ids = lax.sort((-joint[0], joint[1]), num_keys=2)
        return (-values[:, :k], ids[:, :k]), seen.at[tail].set(True)

    if outlook.sizes:
        found, seen = lax.while_loop(
            lambda state: pending(state[0][0], state[1]).any(), visit, (found, seen)
        )
    return Best(*found, seen.sum())


def draw_among(best: Best, keys: jax.Array, power: jax.Array, top_p: jax.Array) -> Drawn:
    """A word of each row among its best, with probability in proportion to p^power.

    keys: random keys `[rows]`.
    top_p: of the best, only the first count that hold this share of the probability together. 1:
        all.
    """
    scores = jax.nn.log_softmax(power * best.values, axis=1)
    before = jnp.cumsum(jnp.exp(scores), axis=1) - jnp.exp(scores)
    first = jnp.arange(scores.shape[1])[None] == 0
    column = _draw(keys, jnp.where((before < top_p) | first, scores, -jnp.inf))
    return Drawn(_at(best.values, column), _at(best.ids, column), best.opened)


def draw(
    outlook: Outlook, keys: jax.Array, power: jax.Array, top_p: jax.Array | None = None
) -> Drawn:
    """A word of each row, with probability in proportion to p^power; power is 1 / temperature.

    keys: random keys `[rows]`.
    top_p: draw among the fewest words, the most probable first, that hold at least this share of Σ
        p^power. None: among all.
    """
    bounds = _Bounds(*outlook.masses(power))
    if top_p is None:
        return _draw_any(outlook, keys, power, bounds)[0]

    def again(state):
        drawn, bounds, done, attempt = state
        new, bounds = _draw_any(outlook, _fold(keys, attempt), power, bounds)
        inside, bounds, opened = _inside(outlook, new, power, (bounds, jnp.log(top_p)))
        kept = Drawn(
            *(jnp.where(done, old, now) for old, now in zip(drawn[:2], new[:2], strict=True)),
            drawn.opened,
        )
        return (
            kept._replace(opened=drawn.opened + new.opened + opened),
            bounds,
            done | inside,
            attempt + 1,
        )

    rows = len(outlook.words)
    nothing = Drawn(jnp.zeros(rows), jnp.zeros(rows, jnp.int32), jnp.zeros((), jnp.int32))
    return lax.while_loop(
        lambda state: ~state[2].all(), again, (nothing, bounds, jnp.zeros(rows, bool), 0)
    )[0]


def _draw_any(outlook, keys, power, bounds):
    """A word of each row among all, and what is known of the tails then.

    Each of head and tails has the score log Σ p^power + Gumbel noise, and the highest wins; for a
    tail that is not open, the upper bound takes the place of the sum.
    """
    noise = jax.vmap(lambda key: jax.random.gumbel(key, (1 + len(outlook.sizes),)))(_fold(keys, 0))

    def drawn_in(ids, values, number):
        column = _draw(_fold(keys, 1 + number), power * values)
        return jax.nn.logsumexp(power * values, axis=1), _at(values, column), ids[column]

    mass, value, word = drawn_in(outlook.ids, outlook.words, 0)
    if not outlook.sizes:
        return Drawn(value, word, jnp.zeros((), jnp.int32)), bounds

    def pending(state):
        score, _, bounds, seen = state
        return (bounds.high + noise[:, 1:] > score[:, None]) & ~seen[None]

    def visit(state):
        score, drawn, bounds, seen = state
        tail = _most(pending(state), bounds.high + noise[:, 1:] - _finite(score)[:, None])
        mass, value, word = outlook.visit(tail, lambda ids, values: drawn_in(ids, values, 1 + tail))
        new = mass + noise[:, 1 + tail]
        drawn = [
            jnp.where(new > score, now, old) for old, now in zip(drawn, (value, word), strict=True)
        ]
        return jnp.maximum(score, new), drawn, bounds.set(tail, mass), seen.at[tail].set(True)

    state = mass + noise[:, 0], [value, word], bounds, jnp.zeros(len(outlook.sizes), bool)
    _, drawn, bounds, seen = lax.while_loop(lambda state: pending(state).any(), visit, state)
    return Drawn(*drawn, seen.sum()), bounds


def _inside(outlook, drawn, power, known):
    """Whether the words before each row's word hold less than a share of Σ p^power: bool `[rows]`;
    bounds; tails opened.

    known: bounds of the tails, and the logarithm of the share.
    """
    (bounds, share), none = known, jnp.zeros(len(outlook.sizes), bool)

    def before(ids, values):
        # The drawn word's own value may be rounded in another way here.
        value, others = drawn.value[:, None], ids[None] != drawn.id[:, None]
        first = (values > value) | ((values == value) & (ids[None] < drawn.id[:, None]))
        return jax.nn.logsumexp(jnp.where(first & others, power * values, -jnp.inf), axis=1)

    own, whole = before(outlook.ids, outlook.words), jax.nn.logsumexp(power * outlook.words, axis=1)
    may = outlook.reached >= drawn.value[:, None]  # else no word of the tail comes before
    held = _Bounds(jnp.full(may.shape, -jnp.inf), jnp.where(may, bounds.high, -jnp.inf))

    def less(held, bounds, low, high):
        """For each row: log of what is held before, less log of the share of all."""
        total = jax.nn.logsumexp(jnp.concatenate([whole[:, None], bounds[high]], axis=1), axis=1)
        return (
            jax.nn.logsumexp(jnp.concatenate([own[:, None], held[low]], axis=1), axis=1)
            < share + total
        )

    def pending(state):
        held, bounds, seen = state
        decided = less(held, bounds, 1, 0) | ~less(held, bounds, 0, 1)
        matters = (held.low < held.high) | (bounds.low < bounds.high)
        return matters & ~decided[:, None] & ~seen[None]

    def visit(state):
        held, bounds, seen = state
        tail = _most(pending(state), bounds.high)

        def summarise(ids, values):
            return before(ids, values), jax.nn.logsumexp(power * values, axis=1)

        inner, mass = outlook.visit(tail, summarise)
        return held.set(tail, inner), bounds.set(tail, mass), seen.at[tail].set(True)

    if outlook.sizes:
        held, bounds, none = lax.while_loop(
            lambda state: pending(state).any(), visit, (held, bounds, none)
        )
    return less(held, bounds, 1, 0) | jnp.isnan(drawn.value), bounds, none.sum()


def _best(ids, values, k):
    """The k best of `values [rows, n]` and their ids, filled up with -inf."""
    more = max(0, k - len(ids))
    best, columns = lax.top_k(jnp.pad(values, ((0, 0), (0, more)), constant_values=-jnp.inf), k)
    return best, jnp.pad(ids, (0, more))[columns]


def _most(pending, urgency):
    """The tail that is pending for some row, bool `[rows, tails]`, and most urgent."""
    return jnp.argmax(jnp.where(pending, jnp.maximum(urgency, -1e30), -jnp.inf).max(axis=0))


def _finite(values):
    return jnp.where(jnp.isfinite(values), values, 0)


def _fold(keys, number):
    return jax.vmap(jax.random.fold_in, (0, None))(keys, number)


def _draw(keys, scores):
    """A column of each row of `scores [rows, n]`, with probability in proportion to its
    exponential.
    """
    return jax.vmap(lambda key, row: jax.random.categorical(key, row, mode="high"))(keys, scores)


def _at(values, columns):
    return jnp.take_along_axis(values, columns[:, None], axis=1)[:, 0]
