"""Caches: distributions over the words that a text has used so far, mixed with the model's own.

    p(w) = λ p_model(w) + (1 − λ) p_cache(w)

    unigram          p_cache(w) = n_w / Σ n_v                          n_w: how often w occurs
                                                                       among the entries
    unigram_softmax  p_cache(w) = exp(n_w) / Σ exp(n_v)                v: all words
    local            p_cache(w) ∝ Σ_i 1[x_i = w] exp(θ h_t · h_i)      Grave, Joulin & Usunier 2017
    unbounded        p_cache(w) ∝ Σ_i 1[x_i = w] K(‖h_t − h_i‖ / r_t)  Grave, Cissé & Joulin 2017

Entry i is a word x_i of the text with the hidden state h_i that predicted it. The entries at word t
are the last `cache_size` before t, in the order of the text, however it was cut into windows and
rows. Without entries the model stands alone. Of the unbounded cache's entries the `neighbours`
nearest to h_t count; r_t is the distance of the farthest of them, and K(u) is exp(−u² / 2). The
search is exact.

GroC 2020 says that its unigram cache "assigns probabilities based on the counts of words", which is
`unigram`; its public code computes `unigram_softmax`, on which its published numbers rest. The
public code of AWD-LSTM leaves out a cache that is not yet full, and the first word of every later
window; here a cache counts from its first entry on.
"""

import functools
from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from adaptive_jax.errors import InputError, check_at_least, check_known
from adaptive_jax.evaluation.nearest import nearest

KINDS = ("unigram", "unigram_softmax", "local", "unbounded")
# Words that are looked up at a time, and entries that they are compared with at a time
QUERIES, BLOCK = 256, 2_048
FAR = 32_768  # entries at a time of an unbounded cache: each time, the nearest ones are sorted
BEYOND = 40  # exp(n) beside exp(n + 40) is nothing in float64
SHOWN = 10_000  # words between two signs of progress


class Cache(NamedTuple):
    """The options of --method=cache.

    Attributes:
        cache: a name of `KINDS`.
        model_weight: λ, the weight of the model's own distribution, above 0 and at most 1. Several:
            all are tried.
        theta: θ of the local cache, which flattens its distribution; 0 counts words. Several: all
            are tried. The defaults of both are those that GroC 2020 chose (section C.4).
        cache_size: entries at most; None: 1,000,000 of the unbounded cache, 10,000 of others.
        neighbours: entries of the unbounded cache that count.
    """

    cache: str = "local"
    model_weight: tuple[float, ...] = (0.966,)
    theta: tuple[float, ...] = (0.5,)
    cache_size: int | None = None
    neighbours: int = 1_024

    def check(self) -> None:
        """Raises InputError for values out of range, or that the kind of cache does not read."""
        check_known(f"cache={self.cache!r}", self.cache, KINDS)
        check_at_least(1, cache_size=self.size(), neighbours=self.neighbours)
        if not self.model_weight or not all(0 < weight <= 1 for weight in self.model_weight):
            raise InputError(
                f"model_weight={list(self.model_weight)} must be above 0 and at most 1, such as"
                " 0.966"
            )
        if not self.theta or not all(0 <= theta < np.inf for theta in self.theta):
            raise InputError(f"theta={list(self.theta)} must be 0 or more and finite, such as 0.5")
        for key, kind in ("theta", "local"), ("neighbours", "unbounded"):
            if self.cache != kind and getattr(self, key) != Cache._field_defaults[key]:
                raise InputError(
                    f"{key} means nothing to cache={self.cache!r}: leave it out, or use"
                    f" cache={kind!r}"
                )

    def size(self) -> int:
        """Entries at most."""
        if self.cache_size is not None:
            return self.cache_size
        return 1_000_000 if self.cache == "unbounded" else 10_000

    def grid(self) -> list[tuple[float, float]]:
        """All pairs of λ and θ to try."""
        return [(weight, theta) for weight in self.model_weight for theta in self.theta]


def mixed(nll: np.ndarray, chances: np.ndarray, model_weight: float) -> np.ndarray:
    """−log(λ p_model + (1 − λ) p_cache), float64 `[tokens]` in nats.

    nll: of the model, `[tokens]`. chances: log p_cache of the targets, `[tokens]`; NaN where the
        cache is empty.
    """
    nll = nll.astype(np.float64)
    if model_weight == 1:
        return nll
    with np.errstate(invalid="ignore"):
        both = -np.logaddexp(np.log(model_weight) - nll, np.log1p(-model_weight) + chances)
    return np.where(np.isnan(chances), nll, both)


def log_chances(
    cache: Cache,
    hidden: np.ndarray | None,
    targets: np.ndarray,
    words: int,
    progress: Callable[[Iterable, int], Iterable],
) -> np.ndarray:
    """log p_cache of every target given those before it: float64 `[thetas, tokens]`.

    Args:
        hidden: `[tokens, features]`; unigram caches do not read it.
        targets: int32 `[tokens]`.
        words: of the vocabulary.

    Returns:
        −inf for a target that is not in the cache, NaN where the cache is empty. Caches without θ
        have one row.
    """
    if cache.cache == "unigram":
        found = occurrences(targets, cache.size())
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.log(found / np.minimum(np.arange(len(targets)), cache.size()))[None]
    if cache.cache == "unigram_softmax":
        found = occurrences(targets, cache.size())
        return (found - _log_sums(targets, words, cache.size(), progress))[None]
    return _compared(cache, hidden, targets, progress)


def occurrences(targets: np.ndarray, size: int) -> np.ndarray:
    """How often each target occurs among the `size` before it: int64 `[tokens]`.

    >>> occurrences(np.array([5, 7, 5, 5, 7]), 2)
    array([0, 0, 1, 1, 0])
    """
    places = np.arange(len(targets))
    order = np.argsort(targets, kind="stable")
    # Words and places in one number, ascending; what is left of a place in it is the same word's
    # earlier places.
    keys = targets[order].astype(np.int64) * (len(targets) + 1) + places[order]
    before = np.empty(len(targets), np.int64)
    before[order] = places
    oldest = targets.astype(np.int64) * (len(targets) + 1) + np.maximum(places - size, 0)
    return before - np.searchsorted(keys, oldest)


def _log_sums(targets, words, size, progress):
    """log Σ_v exp(n_v) over all words before each target: float64 `[tokens]`."""
    counts, having = np.zeros(words, np.int64), np.zeros(min(size, len(targets)) + 2)
    having[0] = words  # words that occur so many times
    most, sums = 0, np.empty(len(targets))
    exponentials = np.exp(-np.arange(BEYOND, dtype=np.float64))

    def add(word, one):
        having[counts[word]] -= 1
        counts[word] += one
        having[counts[word]] += 1

    for begin in progress(range(0, len(targets), SHOWN), -(-len(targets) // SHOWN)):
        for t in range(begin, min(begin + SHOWN, len(targets))):
            least = max(0, most - BEYOND + 1)
            sums[t] = most + np.log(
                having[least : most + 1][::-1] @ exponentials[: most + 1 - least]
            )
            add(targets[t], 1)
            if t >= size:
                add(targets[t - size], -1)
            most = max(most, counts[targets[t]])
            while not having[most]:
                most -= 1
    return sums


def _compared(cache, hidden, targets, progress):
    """`log_chances` of the caches that compare hidden states, on the device."""
    tokens, size = len(targets), min(cache.size(), len(targets))
    # Slots are written in turn, QUERIES at a time, so that no entry that counts is overwritten.
    slots, block = (
        -(-(size + QUERIES) // QUERIES) * QUERIES,
        FAR if cache.cache == "unbounded" else BLOCK,
    )
    slots = -(-slots // block) * block if slots > block else slots
    thetas = jnp.asarray(cache.theta, jnp.float32)
    look_up = (
        _unbounded(size, min(cache.neighbours, size))
        if cache.cache == "unbounded"
        else _local(size)
    )
    store = (
        jnp.zeros((slots, hidden.shape[1]), hidden.dtype),
        jnp.zeros(slots, jnp.int32),
        jnp.full(slots, -1, jnp.int32),
    )
    found, before = [], None
    for begin in progress(range(0, tokens, QUERIES), -(-tokens // QUERIES)):
        part = slice(begin, begin + QUERIES)
        rest = QUERIES - len(targets[part])
        given = (
            np.pad(hidden[part], [(0, rest), (0, 0)]),
            np.pad(targets[part], (0, rest), constant_values=-1),
        )
        store, chances = look_up(store, given, jnp.int32(begin), thetas)
        if before is not None:
            found.append(jax.device_get(before))
        before = chances
    found.append(jax.device_get(before))
    return np.concatenate(found, axis=1)[:, :tokens].astype(np.float64)


def _stored(store, given, begin):
    """The store with the new entries in it, and how many of its slots are in use."""
    keys, words, places = store
    hidden, targets = given
    at = begin % len(keys)
    keys = lax.dynamic_update_slice_in_dim(keys, hidden, at, 0)
    words = lax.dynamic_update_slice_in_dim(words, targets, at, 0)
    places = lax.dynamic_update_slice_in_dim(
        places, begin + jnp.arange(QUERIES, dtype=jnp.int32), at, 0
    )
    return (keys, words, places), jnp.minimum(begin + QUERIES, len(keys))


def _blocks(store, given, begin, size, block):
    """The number of blocks in use, `read(number) -> (products [queries, block], (keys, words,
    places))`, and `counts(places)`.

    counts: which of the places `[1 or queries, n]` each query may see, bool `[queries, n]`.
    """
    store, used = store
    now = (begin + jnp.arange(QUERIES, dtype=jnp.int32))[:, None]
    block = min(block, len(store[0]))

    def read(number):
        keys, words, places = (
            lax.dynamic_slice_in_dim(array, number * block, block) for array in store
        )
        products = jnp.matmul(
            given[0], keys.T, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
        )
        return products, (keys, words, places)

    return (
        -(-used // block),
        read,
        lambda places: (places >= jnp.maximum(now - size, 0)) & (places < now),
    )


@functools.lru_cache(maxsize=8)
def _local(size):
    """Looks words up in a local cache: `(store, given, begin, thetas) -> (store, log p_cache
    [thetas, queries])`.
    """

    def look_up(store, given, begin, thetas):
        new = _stored(store, given, begin)
        count, read, counts = _blocks(new, given, begin, size, BLOCK)

        def visit(number, before):
            most, sums, hits = before
            products, (_, words, places) = read(number)
            valid = counts(places[None])
            hit = valid & (words[None] == given[1][:, None])
            # θ is not negative, so that one maximum serves all of them.
            now = jnp.maximum(most, jnp.max(products, axis=1, where=valid, initial=-jnp.inf))

            # Of all θ in turn: [thetas, queries, block] would not fit.
            def add(theta, sums, hits):
                scale = jnp.where(most > -jnp.inf, jnp.exp(theta * (most - now)), 0.0)
                powers = jnp.where(valid, jnp.exp(theta * (products - now[:, None])), 0.0)
                return sums * scale + powers.sum(axis=1), hits * scale + jnp.where(
                    hit, powers, 0.0
                ).sum(axis=1)

            return now, *lax.map(lambda each: add(*each), (thetas, sums, hits))

        zeros = jnp.zeros((len(thetas), QUERIES))
        _, sums, hits = lax.fori_loop(0, count, visit, (jnp.full(QUERIES, -jnp.inf), zeros, zeros))
        return new[0], jnp.where(sums > 0, jnp.log(hits) - jnp.log(sums), jnp.nan)

    return jax.jit(look_up, donate_argnums=0)


@functools.lru_cache(maxsize=8)
def _unbounded(size, neighbours):
    """As `_local`, for an unbounded cache, which has no θ."""

    def look_up(store, given, begin, thetas):
        new = _stored(store, given, begin)
        count, read, counts = _blocks(new, given, begin, size, FAR)
        length = jnp.sum(jnp.square(given[0].astype(jnp.float32)), axis=1)[:, None]

        def visit(number, best):
            products, (keys, words, places) = read(number)
            squares = jnp.sum(jnp.square(keys.astype(jnp.float32)), axis=1)

            def near(products, which):
                distances = jnp.maximum(length + squares[which] - 2 * products, 0.0)
                return jnp.where(counts(places[which]), -distances, -jnp.inf)

            return nearest(best, products, near, lambda which: words[which] == given[1][:, None])

        none = jnp.full((QUERIES, neighbours), -jnp.inf), jnp.zeros((QUERIES, neighbours), bool)
        nearness, hit = lax.fori_loop(0, count, visit, none)
        valid = nearness > -jnp.inf
        radius = jnp.max(-nearness, axis=1, where=valid, initial=0.0)[:, None]
        kernel = jnp.where(valid, jnp.exp(nearness / jnp.where(radius > 0, 2 * radius, 1.0)), 0.0)
        sums, hits = kernel.sum(axis=1), jnp.where(hit, kernel, 0.0).sum(axis=1)
        return new[0], jnp.where(sums > 0, jnp.log(hits) - jnp.log(sums), jnp.nan)[None]

    return jax.jit(look_up, donate_argnums=0)
