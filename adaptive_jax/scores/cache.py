"""Caches: distributions over the words that a text has used so far, mixed with the model's own.

    p(w) = λ p_model(w) + (1 − λ) p_cache(w)

    unigram          p_cache(w) = n_w / Σ n_v                          n_w: how often w occurs
                                                                       among the entries
    unigram_softmax  p_cache(w) = exp(n_w) / Σ exp(n_v)                v: all words
    local            p_cache(w) ∝ Σ_i 1[x_i = w] exp(θ h_t · h_i)      Grave, Joulin & Usunier 2017
    unbounded        p_cache(w) ∝ Σ_i 1[x_i = w] K(‖h_t − h_i‖ / r_t)  Grave, Cissé & Joulin 2017

Entry i is a word x_i of the text with the hidden state h_i that predicted it. The entries at word t
are the last `cache_size` words before t in the text, whatever windows and rows the model read.
Without entries the model's distribution is used alone, except that `unigram_softmax` is uniform.
The unbounded cache uses the `neighbours` entries nearest to h_t, which an exact search finds; r_t
is the distance of the farthest of them, and K(u) is exp(−u² / 2).

GroC 2020 says that its unigram cache "assigns probabilities based on the counts of words", which is
`unigram`; its public code computes `unigram_softmax`, on which its published numbers rest. The
public code of AWD-LSTM leaves out a cache that is not yet full, and the first word of every later
window; here a cache counts from its first entry on.
"""

import functools
from collections.abc import Iterator
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from adaptive_jax.config.options import Option
from adaptive_jax.scores.nearest import nearest, no_neighbours
from adaptive_jax.scores.scoring import Evaluation, Progress

KINDS = ("local", "unbounded", "unigram", "unigram_softmax")
# Queries, and entries, of one matrix product
QUERIES, BLOCK = 256, 2_048
FAR = 32_768  # entries of one product in an unbounded cache, which sorts the nearest of each
BEYOND = 40  # in float64, exp(n) does not change exp(n + 40)
SHOWN = 10_000  # words between updates of the progress bar
Floats = tuple[float, ...]


class Cache(NamedTuple):
    """The options of --method=cache. The defaults of `model_weight` and `theta` are those that
    GroC 2020 chose (section C.4).

    Attributes:
        cache: kind of cache.
        model_weight: λ, the weight of the model's own distribution; several values are all tried.
        theta: θ of --cache=local, which at 0 counts words; several values are all tried.
        cache_size: largest number of entries; by default 10,000, or 1,000,000 for
            --cache=unbounded.
        neighbours: nearest entries that --cache=unbounded uses.
    """

    cache: Annotated[str, Option(among=KINDS)] = "local"
    model_weight: Annotated[Floats, Option(within="(0, 1]")] = (0.966,)
    theta: Annotated[Floats, Option(within="[0, inf)", only=("cache", "local"))] = (0.5,)
    cache_size: Annotated[int | None, Option(within="[1, inf)")] = None
    neighbours: Annotated[int, Option(within="[1, inf)", only=("cache", "unbounded"))] = 1_024

    def size(self) -> int:
        """The largest number of entries."""
        if self.cache_size is not None:
            return self.cache_size
        return 1_000_000 if self.cache == "unbounded" else 10_000


def score(job: Evaluation, options: Cache) -> Iterator[tuple[dict, np.ndarray]]:
    """Yields the scores for all pairs of λ and θ; the model scores the split once."""
    nll, entries, targets = job.counted(hidden=options.cache in ("local", "unbounded"))
    words, progress = len(job.run.vocabulary), job.progress("cache")
    cache_log_probs = log_probs(options, entries, targets, words, progress)
    thetas = {"theta": options.theta} if options.cache == "local" else {}
    yield from interpolations(nll, cache_log_probs, options.model_weight, thetas)


def interpolations(
    nll: np.ndarray,
    log_probs: np.ndarray,
    model_weights: tuple[float, ...],
    options_of_grid: dict[str, tuple[float, ...]],
) -> Iterator[tuple[dict, np.ndarray]]:
    """Yields a model's scores interpolated with each of several distributions, by each weight.

    Args:
        nll: of the model, `[tokens]` in nats, NaN for tokens that do not count.
        log_probs: of the other distributions, `[distributions, tokens that count]`, see
            `interpolate`.
        options_of_grid: the option that distinguishes the distributions, with its values; {} if
            there is one distribution.
    """
    counts = ~np.isnan(nll)
    labels = [{key: value} for key, values in options_of_grid.items() for value in values] or [{}]
    for weight in model_weights:
        for label, other in zip(labels, log_probs, strict=True):
            scored = nll.copy()
            scored[counts] = interpolate(nll[counts], other, weight)
            yield {"model_weight": weight} | label, scored


def interpolate(nll: np.ndarray, log_probs: np.ndarray, model_weight: float) -> np.ndarray:
    """−log(λ p_model + (1 − λ) p_cache), float64 `[tokens]` in nats.

    nll: of the model, `[tokens]`. log_probs: log p_cache of the targets, `[tokens]`; NaN where the
        cache is empty.
    """
    nll = nll.astype(np.float64)
    if model_weight == 1:
        return nll
    with np.errstate(invalid="ignore"):
        mixed = -np.logaddexp(np.log(model_weight) - nll, np.log1p(-model_weight) + log_probs)
    return np.where(np.isnan(log_probs), nll, mixed)


def log_probs(
    cache: Cache, hidden: np.ndarray | None, targets: np.ndarray, words: int, progress: Progress
) -> np.ndarray:
    """Returns log p_cache of every target given those before it: float64 `[thetas, tokens]`.

    Args:
        hidden: `[tokens, features]`; unigram caches do not read it.
        targets: int32 `[tokens]`.
        words: of the vocabulary.

    Returns:
        −inf for a target that is not in the cache, NaN where the cache is empty. Caches without θ
        have one row.
    """
    if cache.cache == "unigram":
        counts = occurrences(targets, cache.size())
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.log(counts / np.minimum(np.arange(len(targets)), cache.size()))[None]
    if cache.cache == "unigram_softmax":
        counts = occurrences(targets, cache.size())
        return (counts - _log_sums(targets, words, cache.size(), progress))[None]
    return _compare(cache, hidden, targets, progress)


def occurrences(targets: np.ndarray, size: int) -> np.ndarray:
    """Counts each target among the `size` before it: int64 `[tokens]`.

    >>> occurrences(np.array([5, 7, 5, 5, 7]), 2)
    array([0, 0, 1, 1, 0])
    """
    positions = np.arange(len(targets))
    order = np.argsort(targets, kind="stable")
    # Word and position in one number, ascending, so that a word's earlier positions stand to the
    # left of each.
    keys = targets[order].astype(np.int64) * (len(targets) + 1) + positions[order]
    before = np.empty(len(targets), np.int64)
    before[order] = positions
    oldest = targets.astype(np.int64) * (len(targets) + 1) + np.maximum(positions - size, 0)
    return before - np.searchsorted(keys, oldest)


def _log_sums(targets, words, size, progress):
    """log Σ_v exp(n_v) over all words before each target: float64 `[tokens]`."""
    counts = np.zeros(words, np.int64)
    words_of_count = np.zeros(min(size, len(targets)) + 2)  # how many words occur n times
    words_of_count[0] = words
    most, sums = 0, np.empty(len(targets))
    exponentials = np.exp(-np.arange(BEYOND, dtype=np.float64))

    def add(word, change):
        words_of_count[counts[word]] -= 1
        counts[word] += change
        words_of_count[counts[word]] += 1

    for begin in progress(range(0, len(targets), SHOWN), -(-len(targets) // SHOWN)):
        for t in range(begin, min(begin + SHOWN, len(targets))):
            least = max(0, most - BEYOND + 1)
            frequent = words_of_count[least : most + 1][::-1]
            sums[t] = most + np.log(frequent @ exponentials[: len(frequent)])
            add(targets[t], 1)
            if t >= size:
                add(targets[t - size], -1)
            most = max(most, counts[targets[t]])
            while not words_of_count[most]:
                most -= 1
    return sums


def _compare(cache, hidden, targets, progress):
    """`log_probs` for the caches that compare hidden states, computed on the device."""
    tokens, size = len(targets), min(cache.size(), len(targets))
    block = FAR if cache.cache == "unbounded" else BLOCK
    # A ring buffer, written QUERIES slots at a time, with room so that no entry in use is lost
    slots = -(-(size + QUERIES) // QUERIES) * QUERIES
    slots = -(-slots // block) * block if slots > block else slots
    thetas = jnp.asarray(cache.theta, jnp.float32)
    look_up = _look_up(cache.cache, size, min(cache.neighbours, size))
    store = jnp.zeros((slots, hidden.shape[1]), hidden.dtype), jnp.zeros(slots, jnp.int32)
    results = []
    for begin in progress(range(0, tokens, QUERIES), -(-tokens // QUERIES)):
        part = slice(begin, begin + QUERIES)
        rest = QUERIES - len(targets[part])
        states = np.pad(hidden[part], [(0, rest), (0, 0)])
        words = np.pad(targets[part], (0, rest), constant_values=-1)
        store, log_probs = look_up(store, (states, words), jnp.int32(begin), thetas)
        results.append(log_probs)  # fetched at the end, so that the device need not wait
    return np.concatenate(jax.device_get(results), axis=1)[:, :tokens].astype(np.float64)


@functools.lru_cache(maxsize=8)
def _look_up(kind, size, neighbours):
    """Returns `(store, queries, begin, thetas) -> (store, log p_cache [thetas, queries])`.

    store: hidden states and words of the entries. queries: hidden states and words of the QUERIES
        words from `begin` on, which are looked up and stored.
    """

    def look_up(store, queries, begin, thetas):
        store = tuple(
            lax.dynamic_update_slice_in_dim(old, new, begin % len(old), 0)
            for old, new in zip(store, queries, strict=True)
        )
        slots, last = len(store[1]), begin + QUERIES - 1
        block = min(FAR if kind == "unbounded" else BLOCK, slots)
        # Positions in the text of the slots' words, negative in slots that are not yet in use
        positions = last - (last - jnp.arange(slots)) % slots
        now = (begin + jnp.arange(QUERIES))[:, None]

        def read(number):
            """The keys of a block, a mask of the entries in each query's cache, and one of those
            whose word is its target.
            """
            keys, words, at = (
                lax.dynamic_slice_in_dim(array, number * block, block)
                for array in (*store, positions)
            )
            seen = (at[None] >= jnp.maximum(now - size, 0)) & (at[None] < now)
            return keys, seen, seen & (words[None] == queries[1][:, None])

        blocks = -(-jnp.minimum(last + 1, slots) // block)
        if kind == "unbounded":
            sums, hits = _sums_of_nearest(queries[0], blocks, read, neighbours)
        else:
            sums, hits = _sums_of_powers(queries[0], blocks, read, thetas)
        return store, jnp.where(sums > 0, jnp.log(hits) - jnp.log(sums), jnp.nan)

    return jax.jit(look_up, donate_argnums=0)


def _sums_of_powers(hidden, blocks, read, thetas):
    """Σ exp(θ h_t · h_i) over all entries and over those whose word is the target, up to a common
    factor: `[thetas, queries]` each.
    """

    def visit(number, before):
        most, sums, hits = before
        keys, seen, hit = read(number)
        products = jnp.matmul(
            hidden, keys.T, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
        )
        # θ is not negative, so one maximum serves all thetas.
        now = jnp.maximum(most, jnp.max(products, axis=1, where=seen, initial=-jnp.inf))

        # One θ at a time: [thetas, queries, block] would not fit in memory.
        def add(theta, sums, hits):
            scale = jnp.where(most > -jnp.inf, jnp.exp(theta * (most - now)), 0.0)
            powers = jnp.where(seen, jnp.exp(theta * (products - now[:, None])), 0.0)
            of_hits = jnp.where(hit, powers, 0.0)
            return sums * scale + powers.sum(axis=1), hits * scale + of_hits.sum(axis=1)

        return now, *lax.map(lambda row: add(*row), (thetas, sums, hits))

    zeros = jnp.zeros((len(thetas), len(hidden)))
    return lax.fori_loop(0, blocks, visit, (jnp.full(len(hidden), -jnp.inf), zeros, zeros))[1:]


def _sums_of_nearest(hidden, blocks, read, neighbours):
    """Σ K over the nearest entries and over those of them whose word is the target: `[1, queries]`
    each.
    """

    def visit(number, sums):
        keys, seen, hit = read(number)
        return nearest(sums, hidden, keys, seen, hit)

    nearness, hit = lax.fori_loop(0, blocks, visit, no_neighbours(len(hidden), neighbours))
    valid = nearness > -jnp.inf
    radius = jnp.max(-nearness, axis=1, where=valid, initial=0.0)[:, None]
    kernel = jnp.where(valid, jnp.exp(nearness / jnp.where(radius > 0, 2 * radius, 1.0)), 0.0)
    return kernel.sum(axis=1)[None], jnp.where(hit, kernel, 0.0).sum(axis=1)[None]
