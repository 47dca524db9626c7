"""Parts of a result besides perplexity: bits a character, perplexity by frequency, published
numbers, versions; and the lines that say so.
"""

import contextlib
import datetime
import importlib.metadata
import json
import math
import platform
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np

from adaptive_jax.data.vocabulary.words import EOS, Vocabulary
from adaptive_jax.runs.settings import PUBLISHED
from adaptive_jax.scores.frequency import Words, in_bins
from adaptive_jax.scores.scores import Scores, perplexity

PACKAGES = "adaptive_jax", "jax", "flax", "numpy"


def metadata(vocabulary: Vocabulary, words: Words, nll: np.ndarray, edges: Sequence[int]) -> dict:
    """Returns what a result holds besides the `summary` of its scores.

    Args:
        nll: `[tokens]` in nats, NaN for tokens that do not count.
        edges: of bins, see `in_bins`.

    Returns:
        `date`, UTC; `characters` and `bits_per_character`, see `count_characters`, and
        `bits_per_byte`; of a tokenizer's ids `text_words`, see `count_text_words`, and
        `perplexity_per_text_word`; `bins`, see `by_bin`; the `vocabulary`'s size, its `unit`
        ("word" or "token", which losses are per) and its `fingerprint`, which differs when a word,
        a count or the order differs; `versions` of python, of packages and of the device.
    """
    counts = ~np.isnan(nll)
    ids = words.ids[counts]
    characters, size = (count_characters(ids, vocabulary, each) for each in (False, True))
    text_words = count_text_words(ids, vocabulary)
    bits = float(np.sum(nll[counts], dtype=np.float64)) / math.log(2)
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
        "characters": characters,
        "bits_per_character": None if characters is None else bits / characters,
        "bits_per_byte": None if size is None else bits / size,
        "text_words": text_words,
        "perplexity_per_text_word": text_words and perplexity(bits * math.log(2) / text_words),
        "bins": by_bin(words, nll, edges),
        "vocabulary": {
            "size": len(vocabulary),
            "fingerprint": vocabulary.digest,
            "unit": vocabulary.unit,
        },
        "versions": _versions(),
    }


def count_characters(ids: np.ndarray, vocabulary: Vocabulary, of_bytes: bool = False) -> int | None:
    """Characters of a text as the model reads it: those of its words, a space between two words,
    and the end of each line.

    Args:
        ids: int32 `[tokens]`.
        of_bytes: count bytes of UTF-8 instead.

    Returns:
        None if a word is `<unk>`, whose characters are unknown, or of ids without data.tokenizer.
    """
    tokens = vocabulary.unit == "token"
    if not len(ids) or (tokens and not vocabulary.spells) or vocabulary.unk_rate(ids):
        return None
    # The last unit of a word ends with a mark, which is no character of the text.
    marks = 0 if vocabulary.ends_word.all() else 1
    lengths = np.array(
        [sum(of_bytes or byte & 0xC0 != 0x80 for byte in letters) for letters in vocabulary.utf8]
    )
    lengths -= marks * vocabulary.ends_word * (len(vocabulary.mark) if of_bytes else 1)
    lengths[vocabulary.eos] = 1
    words, is_eos = vocabulary.ends_word[ids], ids == vocabulary.eos
    spaces = np.sum(words[:-1] & ~is_eos[:-1] & ~is_eos[1:])
    return int(np.sum(lengths[ids]) + spaces * (not tokens))


def count_text_words(ids: np.ndarray, vocabulary: Vocabulary) -> int | None:
    """White-space words and ends of lines of a tokenizer's ids, int32 `[tokens]`; None of others,
    whose perplexity is per word.
    """
    if vocabulary.unit != "token" or not vocabulary.spells:
        return None
    line_end, spells = vocabulary.index.get(EOS, -1), vocabulary.utf8
    text = b"".join(b"\n" if i == line_end else spells[i] for i in ids.tolist())
    return len(text.split()) + text.count(b"\n")


def by_bin(words: Words, nll: np.ndarray, edges: Sequence[int]) -> list[dict]:
    """Share of the words, and perplexity a word, by how often training has them.

    Args:
        nll: `[tokens]` in nats, NaN for tokens that do not count.
        edges: of bins, see `in_bins`.

    Returns:
        For each bin that has words `least` and `most`, the frequencies in it (None: no limit),
        `words`, `share` and `perplexity`. Nothing of words without counts.
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
    """Returns what a paper prints for the row that a run was trained as: `perplexity`, `row`,
    `table` and the keys `changed`; None if there is none.
    """
    path = workdir / PUBLISHED
    record = json.loads(path.read_text()) if path.exists() else {}
    if record.get(split) is None:  # papers print none of a train split
        return None
    return {"perplexity": record[split]} | {key: record[key] for key in ("row", "table", "changed")}


def lines(result: Mapping) -> Iterator[str]:
    """Yields the printed lines of a result after its first one."""
    bins = [
        f"{_label(part)} {part['perplexity']:,.2f} ({part['share']:.1%})" for part in result["bins"]
    ]
    if bins:
        yield f"perplexity by frequency in training: {', '.join(bins)}"
    if result["bits_per_character"] is not None:
        yield (
            f"{result['bits_per_character']:.4f} bits a character over {result['characters']:,}"
            " characters"
        )
    if result.get("text_words"):
        yield (
            f"{result['bits_per_byte']:.4f} bits a byte; perplexity"
            f" {result['perplexity_per_text_word']:,.2f} a word over {result['text_words']:,} words"
        )
    if paper := result.get("published"):
        changed = f"; this run changes {', '.join(paper['changed'])}" if paper["changed"] else ""
        yield (
            f"{paper['table'] or 'the paper'} prints {paper['perplexity']:g} for"
            f" {paper['row']}{changed}"
        )


def _label(part):
    """Frequencies of a bin: "1-10", "1,001+", "new"."""
    if part["most"] == 0:
        return "new"
    return f"{part['least']:,}" + ("+" if part["most"] is None else f"-{part['most']:,}")


def _versions():
    versions = {"python": platform.python_version(), "device": jax.devices()[0].device_kind}
    for name in PACKAGES:
        # Not found: this package, where it runs from a clone.
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions
