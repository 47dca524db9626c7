r"""Scores text with a trained model: the log-probability of each line, or the surprisal of each
word.

    python -m adaptive_jax score --workdir=runs/quickstart < text.txt
    python -m adaptive_jax score --workdir=runs/quickstart --words --bits text.txt > words.tsv
    python -m adaptive_jax score --workdir=runs/quickstart --by=word --bits \
        --text_column=sentence items.csv > words.tsv

Reads files, also .gz, .xz, .bz2 and .zip, or standard input. docs/text.md says more.
"""

import json
import math
import re
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
from adaptive_jax.scores.line_options import DOCUMENTS

POSITIONAL = ["[FILE...]"]

PLACES = "start", "end", "text", "file"
NAMES = "surprisal", "rank", "entropy", "frequency", "unseen", *PLACES
WITHOUT_WORDS = "surprisal", *PLACES  # columns of a run of sub-words
WITHOUT_COUNTS = tuple(name for name in NAMES if name != "frequency")  # if words have no counts
BY_WORD = "surprisal", "unseen", *PLACES  # columns of sums over several words of the model
IN_UNITS = "surprisal", "entropy"
BIT = math.log(2)  # in nats
OFTEN = 64  # lines between updates of the progress bar


class Score(NamedTuple):
    """Flags of the command.

    Attributes:
        checkpoint: best (by validation), latest, or a step.
        words: Print a line for each word instead of each line of text, as --by=token.
        by: Unit of an output line: line; token, a word as the model has it; or word, separated by
            white space, punctuation included.
        columns: Columns for each word: surprisal, rank, entropy, frequency, unseen, start, end,
            text, file; default: all. Implies --words.
        bits: Print log-probabilities, surprisal and entropy in bits instead of nats.
        format: Columns separated by tabs, or a JSON object per line.
        text_column: Files are tables, .csv or .tsv, with the texts in this column; the output
            repeats the other columns.
        context_from: none: lines stand alone; previous: each follows the line before it in its
            file; or a FILE that each line follows.
        documents: blank: a blank line ends a document and is not scored; the lines after it see
            nothing before it. none: a blank line is a line like any other.
        window: Tokens the model reads at once; 0: the sequence length it was trained with.
        context: Tokens that a window repeats from the one before, if text is longer than a window;
            default: half a window, or 0 if examples of training saw nothing before them.
        line_buffered: Score each line when it arrives, as with typed text, instead of in batches.
    """

    checkpoint: str = "best"
    words: bool = False
    by: Annotated[str, Option(among=("line", "token", "word"))] = "line"
    columns: tuple[str, ...] | None = None
    bits: bool = False
    format: Annotated[str, Option(among=("tsv", "jsonl"))] = "tsv"
    text_column: str = ""
    context_from: str = "none"
    documents: Annotated[str, Option(among=DOCUMENTS)] = "none"
    window: NonNegativeInt = 0
    context: Annotated[int | None, Option(within="[0, inf)")] = None
    line_buffered: bool = False


def define_flags() -> None:
    """Defines the flags of the command."""
    define_options(Score, commands.Workdir, commands.Allow)


def main(*files: str) -> None:
    """Scores these files, or standard input.

    Raises:
        InputError: no run, no text or text that cannot be read, or settings that do not fit; after
            everything has been printed, if a score is not finite.
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
        source.texts(flags.text_column),
        before if follows else "none",
        documents=flags.documents,
        given=context,
        window=flags.window,
        context=flags.context,
        rank_and_entropy=bool({"rank", "entropy"} & set(columns)),
        eager=eager,
    )
    scored = with_final_checks(with_progress(scores, source))
    lines = word_lines(scored, columns, flags) if columns else text_lines(scored, flags)
    out = sys.stdout  # before the bar, which draws what is printed to sys.stdout on its terminal
    for line in lines:
        print(escaped(line, out), file=out, flush=eager)


def columns_of(vocabulary, flags: Score) -> tuple[str, ...]:
    """The columns to print for each word: those of --columns, or all available ones; none if the
    output has a line for each line of text.
    """
    if not flags.words and flags.columns is None and flags.by == "line":
        return ()
    names = NAMES if vocabulary.has_counts else WITHOUT_COUNTS
    if vocabulary.mark:
        names = WITHOUT_WORDS
    elif flags.by == "word":
        names = BY_WORD
    for column in flags.columns or ():
        check_known(f"--columns={column!r}", column, names)
    return flags.columns or names


def with_progress(scored: Iterable, source: TextFiles) -> Iterator:
    """Yields the scored lines and shows a bar of the bytes read, if their total is known and the
    output does not go to a terminal.
    """
    from adaptive_jax.parallel.progress import Bar

    bar = Bar(max(1, source.size), visible=source.size > 0 and not sys.stdout.isatty())
    try:
        for number, line in enumerate(scored, start=1):
            if number % OFTEN == 0:
                bar.show(source.done, [f"{number:,} lines"])
            yield line
        bar.show(source.done)
    finally:
        bar.close()


def with_final_checks(scored: Iterable) -> Iterator:
    """Yields the scored lines. After the last one, warns if many words were unseen, and raises
    InputError if there were no lines or a score was not finite.
    """
    from adaptive_jax.scores.unseen import warn_of_unseen

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
    warn_of_unseen(unseen, words)


def text_lines(scored: Iterable, flags: Score) -> Iterator[str]:
    """Yields a line for each line of text: its log-probability and the text; in JSON also the
    number of words, the perplexity and the number of unseen words.
    """
    unit, name = (BIT, "log_prob_bits") if flags.bits else (1.0, "log_prob_nats")
    for number, line in enumerate(scored):
        log_prob = line.log_prob / unit
        if flags.format == "jsonl":
            cells = {"log_prob": log_prob, "words": len(line.words), "perplexity": line.perplexity}
            if line.unseen is not None:
                cells["unseen"] = int(line.unseen.sum())
            cells["text"] = line.text
            _check_distinct([*cells, *line.columns])
            yield _json(cells | line.columns)
        elif flags.text_column:
            if number == 0:
                names = [name, *line.columns, flags.text_column]
                _check_distinct(names)
                yield "\t".join(names)
            cells = *map(_one_line, line.columns.values()), _one_line(line.text)
            yield "\t".join([f"{log_prob:.4f}", *cells])
        else:
            yield f"{log_prob:.4f}\t{line.text}"


def word_lines(scored: Iterable, columns: tuple[str, ...], flags: Score) -> Iterator[str]:
    """Yields a line for each word: the other columns of its table, the number of the line, the
    position of the word in it, the word, and `columns`. TSV begins with a header, which names the
    unit.
    """
    unit, suffix = (BIT, "_bits") if flags.bits else (1.0, "_nats")
    titles = columns
    if flags.format == "tsv":
        titles = [f"{name}{suffix}" if name in IN_UNITS else name for name in columns]
    for count, line in enumerate(scored):
        names = [*line.columns, "line", "position", "word", *titles]
        if count == 0:
            _check_distinct(names)
            if flags.format == "tsv":
                yield "\t".join(names)
        line = line.by_word() if flags.by == "word" else line
        values = {
            "surprisal": -line.log_probs / unit,
            "rank": line.ranks,
            "entropy": None if line.entropies is None else line.entropies / unit,
            "frequency": line.frequencies,
            "unseen": line.unseen,
        }
        values = {name: values[name].tolist() for name in columns if name in values}
        if set(columns) & set(PLACES):
            starts, ends = line.places.T.tolist()
            forms = [line.text[a:b] for a, b in zip(starts, ends, strict=True)]
            files = [line.file] * len(forms)
            values |= {"start": starts, "end": ends, "text": forms, "file": files}
        rows = zip(line.words, *(values[name] for name in columns), strict=True)
        for position, row in enumerate(rows, start=1):
            cells = [*line.columns.values(), line.number, position, *row]
            if flags.format == "tsv":
                yield "\t".join(map(_cell, cells))
            else:
                yield _json(dict(zip(names, cells, strict=True)))


def _check_distinct(names):
    """Raises InputError if two columns have one name."""
    if twice := {name for name in names if names.count(name) > 1}:
        raise InputError(
            f"two columns are called {min(twice)!r}: rename that of the table, or change --columns"
        )


def _cell(value):
    """Formats a value for a cell; a bool is 1 or 0."""
    if isinstance(value, str):
        return _one_line(value)
    return f"{value:.4f}" if isinstance(value, float) else str(int(value))


def _one_line(text):
    """Replaces tabs and line ends, which separate cells, by spaces."""
    return re.sub(r"[\t\r\n]", " ", text or "")


def _json(values):
    """Formats values as a JSON object, with null for infinity, which JSON lacks."""
    for name, value in values.items():
        if isinstance(value, float):
            values[name] = round(value, 6) if math.isfinite(value) else None
    return json.dumps(values, ensure_ascii=False)
