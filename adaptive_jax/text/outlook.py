"""The distribution of the next word, of which only the head of the softmax is computed, and a
tail when it is asked for.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from adaptive_jax.losses.distribution import of_head, of_member
from adaptive_jax.losses.groups import Member
from adaptive_jax.numerics.bands import Band


class Grouped(NamedTuple):
    """A softmax with tails, its bands as `adaptive_jax.losses.groups.join` groups them.

    Attributes:
        sizes: words of each band by group, the head first.
        groups: the arrays of each group.
        clusters: the tails' rows of the head.
    """

    sizes: tuple[tuple[int, ...], ...]
    groups: tuple[Band, ...]
    clusters: Band


class Outlook:
    """The next word, for rows of hidden states. Made inside `jax.jit`.

    Attributes:
        ids: words of the head, int32 `[n]`, at least one column.
        words: their log-probabilities in nats, float32 `[rows, n]`.
        reached: log-probability of each tail as a whole, `[rows, tails]`; no word of the tail has
            more.
        sizes: words of each tail.
    """

    def __init__(self, words: jax.Array, avoided: Sequence[int] = ()):
        """The distribution of an output without tails.

        Args:
            words: all log-probabilities, float32 `[rows, words]`.
            avoided: ids of words that count as impossible: their log-probability is -inf. Those of
                others stay as they are.
        """
        self.avoided = tuple(avoided)
        if not words.shape[1]:  # a head of tails alone
            words = jnp.full((len(words), 1), -jnp.inf)
        self.ids = jnp.arange(words.shape[1])
        self.words = self._allowed(self.ids, words)
        self.reached, self.sizes = jnp.zeros((len(words), 0)), ()

    @classmethod
    def banded(cls, hidden: jax.Array, softmax: Grouped, avoided: Sequence[int] = ()) -> "Outlook":
        """The distribution of a softmax with tails; hidden `[rows, features]`."""
        count, tails = softmax.sizes[0][0], list(itertools.chain.from_iterable(softmax.sizes[1:]))
        head = of_head(hidden, softmax.groups[0], softmax.clusters)
        outlook = cls(head[:, :count], avoided)
        outlook.reached, outlook.sizes = head[:, count:], tuple(tails)
        outlook._hidden, outlook._softmax = hidden, softmax
        return outlook

    def visit(self, tail: jax.Array, summarise: Callable) -> object:
        """`summarise(ids [n], values [rows, n])` of the words of a tail, whose log-probabilities
        are computed.

        n depends on the tail; the shapes that `summarise` returns must not. Columns that belong to
        a neighbour have -inf.
        """
        sizes, groups, _ = self._softmax
        counts = [len(members) for members in sizes[1:]]
        group_of = [i for i, count in enumerate(counts) for _ in range(count)]
        first_tails = itertools.accumulate(counts, initial=0)
        first_words = itertools.accumulate(map(sum, sizes))

        def reader(group, members, first_tail, first_word):
            def read(tail):
                member = Member(group, members, tail - first_tail)
                values = of_member(self._hidden, group, member)
                values += lax.dynamic_slice_in_dim(self.reached, tail, 1, axis=1)
                ids = first_word + member.first + jnp.arange(values.shape[1])
                return summarise(ids, self._allowed(ids, values))

            return read

        readers = [
            reader(*each)
            for each in zip(groups[1:], sizes[1:], first_tails, first_words, strict=False)
        ]
        return lax.switch(jnp.array(group_of)[tail], readers, tail)

    def masses(self, power: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Bounds of log Σ p^power over the words of each tail, both `[rows, tails]`.

        If n words have the probability P together, the sum lies between P^power and n^(1 - power)
        P^power (Hölder's inequality). So for power 1 it is known.
        """
        if not self.sizes:
            return self.reached, self.reached
        spread = (1 - power) * jnp.log(jnp.array(self.sizes, jnp.float32))[None]
        low, high = (
            power * self.reached + bound
            for bound in (jnp.minimum(spread, 0), jnp.maximum(spread, 0))
        )
        begins = itertools.accumulate(self.sizes[:-1], initial=self._softmax.sizes[0][0])
        lacks = [
            any(first <= word < first + size for word in self.avoided)
            for first, size in zip(begins, self.sizes, strict=True)
        ]
        return jnp.where(jnp.array(lacks)[None], -jnp.inf, low), high

    def _allowed(self, ids, values):
        for word in self.avoided:
            values = jnp.where((ids == word)[None], -jnp.inf, values)
        return values
