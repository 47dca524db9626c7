"""Parts of a result besides its sums: perplexity by frequency, published numbers and versions; and
the lines that print them.
"""

import contextlib
import datetime
import importlib.metadata
import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np

from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.runs.settings import PUBLISHED
from adaptive_jax.scores.frequency import Words, bin_label, in_bins
from adaptive_jax.scores.scores import Scores, perplexity_text

PACKAGES = "adaptive_jax", "jax", "flax", "numpy"


def metadata(vocabulary: Vocabulary, words: Words, nll: np.ndarray, edges: Sequence[int]) -> dict:
    """Returns the parts of a result that describe its text, vocabulary and software.

    Args:
        nll: `[tokens]` in nats, NaN for tokens that do not count.
        edges: of bins, see `in_bins`.

    Returns:
        `date`, UTC; `bins`, see `by_bin`; `vocabulary`: its `size`, the `unit` of losses ("word" or
        "token") and a `fingerprint`, which depends on words, counts and order; `versions` of
        python and packages, and the device.
    """
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
        "bins": by_bin(words, nll, edges),
        "vocabulary": {
            "size": len(vocabulary),
            "fingerprint": vocabulary.digest,
            "unit": vocabulary.unit,
        },
        "versions": _versions(),
    }


def by_bin(words: Words, nll: np.ndarray, edges: Sequence[int]) -> list[dict]:
    """Share and perplexity of words by their frequency in training.

    Args:
        nll: `[tokens]` in nats, NaN for tokens that do not count.
        edges: of bins, see `in_bins`.

    Returns:
        For each bin that has words: `least` and `most`, its smallest and largest frequency (None:
        no limit), `words`, `share` and `perplexity`. An empty list if counts are unknown.
    """
    if words.counts is None:
        return []
    scores = Scores(words.ids[words.ends], words.nll(nll))
    scored = ~np.isnan(scores.nll)
    scores = scores.take(scored)
    return [
        {"least": least, "most": most, "words": int(inside.sum())} | scores.part(inside)
        for least, most, inside in in_bins(words.counts[scored], edges)
        if inside.any()
    ]


def published(workdir: Path, split: str) -> dict | None:
    """Returns the published numbers of the row that a run was trained as: `perplexity`, `row`,
    `table`, and `changed`, the keys in which the run differs; None if there are none.
    """
    path = workdir / PUBLISHED
    record = json.loads(path.read_text()) if path.exists() else {}
    if record.get(split) is None:  # papers print none of a train split
        return None
    return {"perplexity": record[split]} | {key: record[key] for key in ("row", "table", "changed")}


def lines(result: Mapping) -> Iterator[str]:
    """Yields the printed lines of a result after its first one."""
    bins = []
    for part in result["bins"]:
        name, share = bin_label(part["least"], part["most"]), f"{part['share']:.1%}"
        bins.append(f"{name} {perplexity_text(part['perplexity'])} ({share})")
    if bins:
        yield f"perplexity by frequency in training: {', '.join(bins)}"
    if result["bits_per_character"] is not None:
        yield (
            f"{result['bits_per_character']:.4f} bits a character, {result['bits_per_byte']:.4f} a"
            f" byte, over {result['characters']:,} characters"
        )
    if words := result.get("text_words"):
        text = perplexity_text(result["perplexity_per_text_word"])
        yield f"perplexity {text} a word of the text, over {words:,} words"
    if paper := result.get("published"):
        changed = f"; this run changes {', '.join(paper['changed'])}" if paper["changed"] else ""
        yield (
            f"{paper['table'] or 'the paper'} prints {paper['perplexity']:g} for"
            f" {paper['row']}{changed}"
        )


def _versions():
    versions = {"python": platform.python_version(), "device": jax.devices()[0].device_kind}
    for name in PACKAGES:
        # This package is not found if it runs from a clone.
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions
