"""Scores text with a trained model: the log-probability of each line, or the surprisal of each
word.

    python -m adaptive_jax score --workdir=runs/quickstart < text.txt
    python -m adaptive_jax score --workdir=runs/quickstart --words --bits text.txt > words.tsv

Reads files, also .gz, .xz, .bz2 and .zip, or standard input. docs/text.md says more.
"""

import json
import logging
import math
import sys
from collections.abc import Iterable, Iterator
from os.path import exists, expanduser
from typing import Annotated, NamedTuple

import numpy as np

from adaptive_jax.config import commands
from adaptive_jax.config.flags import define_options, options
from adaptive_jax.config.options import NonNegativeInt, Option
from adaptive_jax.data.corpora.line_files import STDIN, TextFiles
from adaptive_jax.errors import InputError, check_known
from adaptive_jax.files import escaped

POSITIONAL = ["[FILE...]"]

NAMES = ("surprisal", "rank", "entropy", "frequency", "unseen")
BIT = math.log(2)  # in nats
OFTEN = 64  # lines after which the bar moves

logger = logging.getLogger(__name__)


class Score(NamedTuple):
    """Flags of the command.

    Attributes:
        checkpoint: best (by validation), latest, or a step.
        words: Print a line for each word instead of each line of text.
        columns: Of each word: surprisal, rank, entropy, frequency, unseen; default: all. Implies
            --words.
        bits: Log-probabilities, surprisal and entropy in bits instead of nats.
        format: Columns separated by tabs, or a JSON object a line.
        context_from: none: lines stand alone; previous: each follows the last; or a FILE.
        window: Tokens the model reads at once; 0: the sequence length it was trained with.
        context: Tokens read again where text is longer than a window; default: half.
        line_buffered: Score each line as it comes; so it is with text that is typed.
    """

    checkpoint: str = "best"
    words: bool = False
    columns: tuple[str, ...] | None = None
    bits: bool = False
    format: Annotated[str, Option(among=("tsv", "jsonl"))] = "tsv"
    context_from: str = "none"
    window: NonNegativeInt = 0
    context: Annotated[int | None, Option(within="[0, inf)")] = None
    line_buffered: bool = False


def define_flags() -> None:
    """Defines the flags of the command."""
    define_options(Score, commands.Workdir, commands.Allow)


def main(*files: str) -> None:
    """Scores these files, or standard input.

    Raises:
        InputError: no run there, text that cannot be read, no text, settings that do not fit; and
            after everything has been printed, a score that is not finite.
    """
    workdir, flags = commands.workdir(), options(Score)
    source, before = TextFiles(files), flags.context_from
    follows = before in ("none", "previous")
    if not (follows or before == STDIN or exists(expanduser(before))):
        choices = "none", "previous", "a file that exists"
        check_known(f"--context_from={before!r}", before, choices)
    context = "" if follows else TextFiles([before]).read()
    from adaptive_jax.text.load import load  # after the flags: their errors do not wait for jax

    model = load(workdir, flags.checkpoint)
    columns = columns_of(model.run.vocabulary, flags)
    eager = flags.line_buffered or source.terminal
    if source.terminal:
        print("type lines of text; Ctrl-D ends", file=sys.stderr, flush=True)

    scores = model.score(
        source,
        before if follows else "none",
        given=context,
        window=flags.window,
        context=flags.context,
        rank_and_entropy=bool({"rank", "entropy"} & set(columns)),
        eager=eager,
    )
    scored = checked(shown(scores, source))
    lines = word_lines(scored, columns, flags) if columns else text_lines(scored, flags)
    out = sys.stdout  # before the bar, which draws what is printed to sys.stdout on its terminal
    for line in lines:
        print(escaped(line, out), file=out, flush=eager)


def columns_of(vocabulary, flags: Score) -> tuple[str, ...]:
    """The columns to print of each word: those of --columns, or all that the run has; none without
    --words.
    """
    from adaptive_jax.data.vocabulary.subwords import Subwords

    if not flags.words and flags.columns is None:
        return ()
    names = NAMES[:1] if isinstance(vocabulary, Subwords) else NAMES
    for column in flags.columns or ():
        if column in NAMES and column not in names:
            raise InputError(
                f"--columns={column!r} is not for sub-word units, which this run has: use"
                f" --columns={names[0]}"
            )
        check_known(f"--columns={column!r}", column, names)
    return flags.columns or names


def shown(scored: Iterable, source: TextFiles) -> Iterator:
    """The scored lines, with a bar of the bytes read where these are known and the lines that are
    printed do not go to the same terminal.
    """
    from adaptive_jax.parallel.progress import Bar

    bar = Bar(max(1, source.size), shown=source.size > 0 and not sys.stdout.isatty())
    try:
        for number, line in enumerate(scored, start=1):
            if number % OFTEN == 0:
                bar.show(source.done, [f"{number:,} lines"])
            yield line
        bar.show(source.done)
    finally:
        bar.close()


def checked(scored: Iterable) -> Iterator:
    """The scored lines; at their end warns of many unseen words. Raises InputError there for no
    lines, and for scores that are not finite.
    """
    from adaptive_jax.scores.unseen import MANY

    lines = words = unseen = infinite = 0
    for line in scored:
        lines += 1
        words += len(line.words)
        unseen += 0 if line.unseen is None else int(line.unseen.sum())
        infinite += int((~np.isfinite(line.log_probs)).sum())
        yield line
    if not lines:
        raise InputError("there is no text to score: use files, or lines through a pipe")
    if infinite:
        raise InputError(
            f"{infinite:,} of {words:,} words have no finite score: the model has diverged; use"
            " another --checkpoint"
        )
    if unseen > MANY * words:
        logger.warning(
            "%.1f%% of the words are unseen and scored as <unk>: is the text tokenised as in"
            " training?",
            100 * unseen / words,
        )


def text_lines(scored: Iterable, flags: Score) -> Iterator[str]:
    """A line for each line of text: its log-probability and the line itself; as JSON also its
    words, perplexity and unseen words.
    """
    unit = BIT if flags.bits else 1.0
    for line in scored:
        if flags.format == "tsv":
            yield f"{line.log_prob / unit:.4f}\t{line.text}"
            continue
        of = {"log_prob": line.log_prob / unit, "words": len(line.words)}
        of["perplexity"] = line.perplexity
        if line.unseen is not None:
            of["unseen"] = int(line.unseen.sum())
        yield _json(of | {"text": line.text})


def word_lines(scored: Iterable, columns: tuple[str, ...], flags: Score) -> Iterator[str]:
    """A line for each word, after a header if they are columns: number of the line, position of
    the word in it, the word, …
    """
    unit, names = BIT if flags.bits else 1.0, ["line", "position", "word", *columns]
    if flags.format == "tsv":
        yield "\t".join(names)
    for number, line in enumerate(scored, start=1):
        of = {
            "surprisal": -line.log_probs / unit,
            "rank": line.ranks,
            "entropy": None if line.entropies is None else line.entropies / unit,
            "frequency": line.frequencies,
            "unseen": line.unseen,
        }
        rows = zip(line.words, *(of[name].tolist() for name in columns), strict=True)
        for position, (word, *row) in enumerate(rows, start=1):
            if flags.format == "tsv":
                yield "\t".join([str(number), str(position), word, *map(_cell, row)])
            else:
                yield _json(dict(zip(names, [number, position, word, *row], strict=True)))


def _cell(value):
    """A number as text; a truth value is 1 or 0."""
    return f"{value:.4f}" if isinstance(value, float) else str(int(value))


def _json(values):
    """A JSON object of values; null in place of infinity, which JSON does not have."""
    for name, value in values.items():
        if isinstance(value, float):
            values[name] = round(value, 6) if math.isfinite(value) else None
    return json.dumps(values, ensure_ascii=False)
