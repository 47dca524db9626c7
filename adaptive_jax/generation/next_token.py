"""The k most probable next tokens, found without computing tails of a softmax that cannot hold
them, and draws of the next token.

The head of a softmax with tails gives each tail, a cluster of words, a probability, and no word of
the tail is more probable than that. So a tail that is less probable than the k-th best word holds
none of the k best. Results equal those from all log-probabilities. Everything here runs inside
`jax.jit`.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from adaptive_jax.losses.distribution import of_head, of_member
from adaptive_jax.losses.groups import band_slice
from adaptive_jax.numerics.bands import Band

BLOCK = 512  # tokens of a block: a block is drawn first, then a token in it


class TopK(NamedTuple):
    """The k best tokens of each row, the most probable first; equally probable ones in the order
    of their ids.

    Attributes:
        log_probs: in nats, float32 `[rows, k]`; -inf where there are fewer tokens.
        ids: int32 `[rows, k]`.
        clusters_computed: number of tails whose words were computed, a scalar.
    """

    log_probs: jax.Array
    ids: jax.Array
    clusters_computed: jax.Array


class Sample(NamedTuple):
    """A drawn token for each row.

    Attributes:
        log_prob: in nats, float32 `[rows]`.
        id: int32 `[rows]`.
    """

    log_prob: jax.Array
    id: jax.Array


@struct.dataclass
class Grouped:
    """A softmax with tails, its bands as `adaptive_jax.losses.groups.join` groups them.

    Attributes:
        sizes: words of each band by group, the head first.
        groups: the arrays of each group.
        clusters: the tails' rows of the head.
    """

    sizes: tuple[tuple[int, ...], ...] = struct.field(pytree_node=False)
    groups: tuple[Band, ...]
    clusters: Band


class NextToken:
    """The distribution of the next token, for rows of hidden states.

    Attributes:
        ids: words of the head, int32 `[n]`, at least one column.
        log_probs: their log-probabilities in nats, float32 `[rows, n]`; -inf for banned ones.
        cluster_log_probs: log-probability of each tail as a whole, `[rows, tails]`.
        sizes: words of each tail.
    """

    def __init__(self, log_probs: jax.Array, banned: Sequence[int] = ()):
        """The distribution of an output without tails.

        Args:
            log_probs: of all words, float32 `[rows, words]`.
            banned: ids of words whose log-probability becomes -inf; the others are not normalised
                again.
        """
        self.banned = tuple(banned)
        if not log_probs.shape[1]:  # a head of tails alone
            log_probs = jnp.full((len(log_probs), 1), -jnp.inf)
        self.ids = jnp.arange(log_probs.shape[1])
        self.log_probs = self._allowed(self.ids, log_probs)
        self.cluster_log_probs, self.sizes = jnp.zeros((len(log_probs), 0)), ()

    @classmethod
    def banded(cls, hidden: jax.Array, softmax: Grouped, banned: Sequence[int] = ()) -> "NextToken":
        """The distribution of a softmax with tails; hidden `[rows, features]`."""
        words, tails = softmax.sizes[0][0], tuple(itertools.chain(*softmax.sizes[1:]))
        head = of_head(hidden, softmax.groups[0], softmax.clusters)
        token = cls(head[:, :words], banned)
        token.cluster_log_probs, token.sizes = head[:, words:], tails
        token._hidden, token._softmax = hidden, softmax
        return token

    def best_of_tail(self, tail: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
        """Computes the words of a tail: its k best log-probabilities and their ids, `[rows, k]`
        each. Columns that belong to a neighbouring tail have -inf.
        """
        sizes, groups = self._softmax.sizes, self._softmax.groups
        counts = [len(members) for members in sizes[1:]]
        group_of = [i for i, count in enumerate(counts) for _ in range(count)]
        first_tails = itertools.accumulate(counts, initial=0)
        first_words = itertools.accumulate(map(sum, sizes))

        def read(group, members, first_tail, first_word, tail):
            member = band_slice(group, members, tail - first_tail)
            values = of_member(self._hidden, group, member)
            values += lax.dynamic_slice_in_dim(self.cluster_log_probs, tail, 1, axis=1)
            ids = first_word + member.first + jnp.arange(values.shape[1])
            return _best(ids, self._allowed(ids, values), k)

        readers = [
            functools.partial(read, *arguments)
            for arguments in zip(groups[1:], sizes[1:], first_tails, first_words, strict=False)
        ]
        return lax.switch(jnp.array(group_of)[tail], readers, tail)

    def _allowed(self, ids, log_probs):
        for word in self.banned:
            log_probs = jnp.where((ids == word)[None], -jnp.inf, log_probs)
        return log_probs


def top_k(token: NextToken, k: int, least: Callable = lambda values: values[:, -1]) -> TopK:
    """The k most probable tokens of each row.

    least: a function from the best log-probabilities so far, `[rows, k]`, to the smallest
        log-probability of interest in each row, `[rows]`.
    """
    best, seen = _best(token.ids, token.log_probs, k), jnp.zeros(len(token.sizes), bool)

    def pending(values, seen):
        return (token.cluster_log_probs >= least(values)[:, None]) & ~seen[None]

    def visit(state):
        (values, ids), seen = state
        urgency = token.cluster_log_probs - _finite(least(values))[:, None]
        tail = _most_urgent(pending(values, seen), urgency)
        values_of_tail, ids_of_tail = token.best_of_tail(tail, k)
        values = jnp.concatenate([values, values_of_tail], axis=1)
        ids = jnp.concatenate([ids, ids_of_tail], axis=1)
        values, ids = lax.sort((-values, ids), num_keys=2)
        return (-values[:, :k], ids[:, :k]), seen.at[tail].set(True)

    if token.sizes:
        best, seen = lax.while_loop(
            lambda state: pending(state[0][0], state[1]).any(), visit, (best, seen)
        )
    return TopK(*best, seen.sum())


def draw_among(best: TopK, keys: jax.Array, power: jax.Array, top_p: jax.Array) -> Sample:
    """Draws a token of each row among its best, with probability in proportion to p^power.

    keys: random keys `[rows]`.
    top_p: draw only among the fewest most probable tokens that together hold this share of the
        probability. 1: all, up to rounding.
    """
    scores = jax.nn.log_softmax(power * best.log_probs, axis=1)
    before = jnp.cumsum(jnp.exp(scores), axis=1) - jnp.exp(scores)
    first = jnp.arange(scores.shape[1])[None] == 0
    column = _draw(keys, jnp.where((before < top_p) | first, scores, -jnp.inf))
    return Sample(_columns(best.log_probs, column), _columns(best.ids, column))


def draw(log_probs: jax.Array, keys: jax.Array, power: jax.Array) -> Sample:
    """Draws a token of each row among all, with probability in proportion to p^power; power is
    1 / temperature.

    Draws a block of tokens by its total probability, then a token in it: random numbers for all
    tokens would take longer than their probabilities.

    Args:
        log_probs: in nats, float32 `[rows, tokens]`; -inf for those that are never drawn.
        keys: random keys `[rows]`.
    """
    pad = (0, 0), (0, -log_probs.shape[1] % BLOCK)
    scores = jnp.pad(power * log_probs, pad, constant_values=-jnp.inf)
    blocks = scores.reshape(len(scores), -1, BLOCK)
    number = _draw(_fold(keys, 0), jax.nn.logsumexp(blocks, axis=2))
    block = jnp.take_along_axis(blocks, number[:, None, None], axis=1)[:, 0]
    ids = number * BLOCK + _draw(_fold(keys, 1), block)
    return Sample(_columns(log_probs, ids), ids)


def _best(ids, values, k):
    """The k best of `values [rows, n]` and their ids, padded with -inf."""
    padding = 0, max(0, k - len(ids))
    best, columns = lax.top_k(jnp.pad(values, ((0, 0), padding), constant_values=-jnp.inf), k)
    return best, jnp.pad(ids, padding)[columns]


def _most_urgent(pending, urgency):
    """The most urgent tail among those that are pending, bool `[rows, tails]`, for some row."""
    return jnp.argmax(jnp.where(pending, jnp.maximum(urgency, -1e30), -jnp.inf).max(axis=0))


def _finite(values):
    return jnp.where(jnp.isfinite(values), values, 0)


def _fold(keys, number):
    return jax.vmap(jax.random.fold_in, (0, None))(keys, number)


def _draw(keys, scores):
    """Draws a column of each row of `scores [rows, n]` in proportion to exp(scores)."""
    return jax.vmap(lambda key, row: jax.random.categorical(key, row, mode="high"))(keys, scores)


def _columns(values, columns):
    return jnp.take_along_axis(values, columns[:, None], axis=1)[:, 0]
