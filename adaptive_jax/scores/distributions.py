"""Statistics of the distributions that predict tokens: the most probable words, the rank of the
token, and the entropy.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from adaptive_jax.data.batches.windows import Windows
from adaptive_jax.model.language_model import LanguageModel
from adaptive_jax.model.on_devices import local_model, on_devices
from adaptive_jax.runs.run import Run
from adaptive_jax.scores.scoring import LOG_PROBS, scores

TOKENS = 256  # most distributions computed at a time
ALTERNATIVES = 8  # most probable words stored for each token of a passage


class PredictiveStats(NamedTuple):
    """Statistics of the distributions that predict some tokens.

    Attributes:
        words: int32 `[tokens, k]`, the most probable words, the best first.
        log_probs: float32 `[tokens, k]`, log-probabilities of these words in nats.
        rank: int32 `[tokens]`, one more than the words that are more probable than the target.
        entropy: float32 `[tokens]` in nats.
    """

    words: np.ndarray
    log_probs: np.ndarray
    rank: np.ndarray
    entropy: np.ndarray


def predictive_stats(
    run: Run, tables: dict, hidden: np.ndarray, targets: np.ndarray, k: int
) -> PredictiveStats:
    """Statistics of the distributions after hidden states, computed for a few tokens at a time, so
    that `[tokens, vocabulary]` never exists.

    Args:
        tables: composed tables, see `composed`; {} for a model that composes none.
        hidden: `[tokens, features]`, the states that predict the targets.
        targets: int32 `[tokens]`.
        k: number of most probable words to return; fewer if the vocabulary is smaller.
    """
    words = run.model.input.vocabulary_size
    size, k = max(1, min(TOKENS, LOG_PROBS // words)), min(k, words)
    describe, parts = _describer(run.model, run.mesh, k), []
    for begin in range(0, max(1, len(targets)), size):
        states, target_ids = hidden[begin : begin + size], targets[begin : begin + size]
        rest = size - len(target_ids)
        # Pad, so that all parts share one program.
        states = np.pad(states, [(0, rest), (0, 0)])
        target_ids = np.pad(np.minimum(target_ids, words - 1), (0, rest))
        parts.append(jax.device_get(describe(run.params, run.lexicon, tables, states, target_ids)))
    stats = PredictiveStats(
        *(np.concatenate(columns)[: len(targets)] for columns in zip(*parts, strict=True))
    )
    # A word that the model cannot predict ranks behind all others.
    return stats._replace(rank=np.where(targets < words, stats.rank, words + 1))


def passage_stats(
    run: Run, ids: np.ndarray, windows: Windows, tables: tuple, begin: int, end: int
) -> dict[str, np.ndarray]:
    """Predictive distributions of the tokens that count among positions `begin` to `end` − 1.

    Args:
        ids: int32 `[tokens]` of the split.
        tables: the result of `composed(run, ids)`.

    Returns:
        The positions of these tokens, `at`, int64, and the fields of `PredictiveStats`.
    """
    if windows.layout != "streams" or windows.rows == 1:
        # Long enough that examples in the passage are those of the complete split
        ids = ids[: end + 2 * windows.window]
    at, hidden = [], []
    for batch in scores(run, ids, windows, composed_once=tables, hidden=True):
        inside = (batch.positions >= begin) & (batch.positions < end)
        at.append(batch.positions[inside])
        hidden.append(batch.hidden[inside])
    at, hidden = np.concatenate(at), np.concatenate(hidden)
    if not len(at):
        return {"at": at}
    stats = predictive_stats(run, tables[0], hidden, np.asarray(ids)[at], ALTERNATIVES)
    return {"at": at} | stats._asdict()


@functools.lru_cache(maxsize=8)
def _describer(model: LanguageModel, mesh: Mesh, k: int):
    one_model, gather = local_model(model, mesh)

    def describe(params, lexicon, tables, hidden, targets):
        variables = {"params": gather(params), "lexicon": lexicon, "tables": tables}
        log_probs = one_model.apply(
            variables, hidden, method=lambda model, hidden: model.output.log_probs(hidden)
        )
        of_targets = jnp.take_along_axis(log_probs, targets[:, None], axis=1)
        best, words = jax.lax.top_k(log_probs, k)
        rank = 1 + jnp.sum(log_probs > of_targets, axis=1, dtype=jnp.int32)
        # 0 log 0 is 0
        terms = jnp.where(log_probs > -jnp.inf, jnp.exp(log_probs) * log_probs, 0.0)
        return PredictiveStats(words, best, rank, -jnp.sum(terms, axis=1))

    replicated = PartitionSpec()
    return jax.jit(on_devices(model, mesh, describe, (replicated,) * 4, replicated))
