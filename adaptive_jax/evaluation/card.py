"""Parts of a result besides perplexity: bits a character, perplexity by frequency, published
numbers, versions; and the lines that say so.
"""

import contextlib
import importlib.metadata
import itertools
import json
import math
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax
import numpy as np

from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.errors import InputError
from adaptive_jax.evaluation.runs import Run
from adaptive_jax.evaluation.scoring import part_of
from adaptive_jax.workdir.settings import PUBLISHED

PACKAGES = "adaptive_jax", "jax", "flax", "numpy"


def metadata(run: Run, ids: np.ndarray, nll: np.ndarray) -> dict:
    """Returns what a result holds besides the `summary` of its scores.

    Args:
        ids: int32 `[tokens]` of the split.
        nll: `[tokens]` in nats, NaN for tokens that do not count.

    Returns:
        `characters` and `bits_per_character`, see `count_characters`; `bands`, see `by_band`, none
        of words without counts; the `vocabulary`'s size, its `unit` ("word" or "token", which
        losses are per) and its `fingerprint`, which differs when a word, a count or the order
        differs; `versions` of python, of packages and of the device.
    """
    counts = ~np.isnan(nll)
    nll, ids = nll[counts], ids[:][counts]
    characters = count_characters(ids, run.vocabulary)
    bits = float(np.sum(nll, dtype=np.float64)) / math.log(2)
    vocabulary = run.vocabulary
    known = has_counts(vocabulary)
    return {
        "characters": characters,
        "bits_per_character": None if characters is None else bits / characters,
        "bands": by_band(nll, vocabulary.ranks[ids], edges(run)) if known else [],
        "vocabulary": {
            "size": len(vocabulary),
            "fingerprint": vocabulary.digest,
            "unit": vocabulary.unit,
        },
        "versions": _versions(),
    }


def count_characters(ids: np.ndarray, vocabulary: Vocabulary) -> int | None:
    """Characters of a text as the model reads it: those of its words, a space between two words,
    and the end of each line.

    ids: int32 `[tokens]`.

    Returns:
        None if a word is `<unk>`, whose characters are unknown, or if ids are a tokenizer's.
    """
    if not len(ids) or vocabulary.unit == "token" or vocabulary.unk_rate(ids):
        return None
    # The last unit of a word ends with a mark, which is no character of the text.
    marks = 0 if vocabulary.ends_word.all() else 1
    lengths = np.array(
        [sum(byte & 0xC0 != 0x80 for byte in letters) for letters in vocabulary.utf8]
    )
    lengths -= marks * vocabulary.ends_word
    lengths[vocabulary.eos] = 1
    words, is_eos = vocabulary.ends_word[ids], ids == vocabulary.eos
    spaces = np.sum(words[:-1] & ~is_eos[:-1] & ~is_eos[1:])
    return int(np.sum(lengths[ids]) + spaces)


def has_counts(vocabulary: Vocabulary) -> bool:
    """True if the words have counts, which those of a converted list have not."""
    return len(np.unique(vocabulary.counts[vocabulary.counts > 0])) > 1


def edges(run: Run) -> list[int]:
    """Ranks at which bands of the words that training knew begin: the model's cutoffs, or 10,
    100, 1,000 … if it has none or its words are not sorted by frequency.
    """
    own, ranks, known = (), run.vocabulary.ranks, run.num_known_words
    if np.array_equal(ranks, np.arange(len(ranks))):
        own = run.config["output"]["table"].get("cutoffs") or run.config["input"].get("cutoffs")
    tens = (10**power for power in range(1, 10))
    return [0, *(edge for edge in own or tens if edge < known), known]


def by_band(nll: np.ndarray, ranks: np.ndarray, parts: list[int]) -> list[dict]:
    """Share of the tokens, and perplexity a token, of words by how frequent they are in training.

    Args:
        nll: `[tokens]` in nats.
        ranks: `[tokens]`, of the words by frequency.
        parts: ranks, ascending, the most frequent word's being 0: band i has those from `parts[i]`
            to below `parts[i + 1]`.

    Returns:
        For each band `first` and `last`, ranks counted from 1, `share`, and `perplexity`, None of
        no tokens.
    """
    return [
        {"first": begin + 1, "last": end} | part_of(nll, (ranks >= begin) & (ranks < end))
        for begin, end in itertools.pairwise(parts)
    ]


def published(workdir: Path, split: str) -> dict | None:
    """Returns what a paper prints for the row that a run was trained as: `perplexity`, `row`,
    `table` and the keys `changed`; None if there is none.

    Raises:
        InputError: train.py's record of it is damaged.
    """
    path = workdir / PUBLISHED
    if not path.exists():
        return None
    try:
        record = json.loads(path.read_text())
        numbers = {name: record[name] for name in ("validation", "test")}
        paper = {key: record[key] for key in ("row", "table", "changed")}
    except (ValueError, KeyError, TypeError):
        raise InputError(
            f"{path} is damaged: remove it, and results have no published number"
        ) from None
    number = numbers.get(split)  # papers print none of a train split
    return None if number is None else {"perplexity": number} | paper


def lines(result: Mapping) -> Iterator[str]:
    """Yields the printed lines of a result after its first one."""
    bands = [
        f"{band['first']:,}-{band['last']:,} {band['perplexity']:,.2f} ({band['share']:.1%})"
        for band in result["bands"]
        if band["perplexity"] is not None
    ]
    if bands:
        yield f"perplexity by rank: {', '.join(bands)}"
    if result["bits_per_character"] is not None:
        yield (
            f"{result['bits_per_character']:.4f} bits a character over {result['characters']:,}"
            " characters"
        )
    if paper := result.get("published"):
        changed = f"; this run changes {', '.join(paper['changed'])}" if paper["changed"] else ""
        yield (
            f"{paper['table'] or 'the paper'} prints {paper['perplexity']:g} for"
            f" {paper['row']}{changed}"
        )


def _versions():
    versions = {"python": platform.python_version(), "device": jax.devices()[0].device_kind}
    for name in PACKAGES:
        # Not found: this package, where it runs from a clone.
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions
