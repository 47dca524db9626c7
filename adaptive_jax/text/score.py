"""The command `python -m adaptive_jax score`: reads lines, scores them, and prints what was
asked for.
"""

import itertools
import json
import logging
import math
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from adaptive_jax.data.vocabulary.subwords import Subwords
from adaptive_jax.errors import InputError, check_known
from adaptive_jax.evaluation.unseen import MANY
from adaptive_jax.parallel.progress import Bar
from adaptive_jax.text import nbest
from adaptive_jax.text.files import TextFiles, read_text
from adaptive_jax.text.load import load
from adaptive_jax.text.running import CONTEXTS
from adaptive_jax.text.surprisal import ScoredLine

logger = logging.getLogger(__name__)

COLUMNS = ("surprisal", "rank", "entropy", "frequency", "unseen")
OF_WORDS = COLUMNS[1:]  # what a run of sub-words does not have
BIT = math.log(2)  # in nats
OFTEN = 64  # lines between two looks at the bar


class Asked(NamedTuple):
    """What to score, and how: the flags of their names. files: none for standard input."""

    files: tuple[str, ...]
    checkpoint: str
    context_from: str
    window: int
    context: int | None
    line_buffered: bool


class Form(NamedTuple):
    """What is printed. columns: of words, None for all that the run has."""

    words: bool
    columns: tuple[str, ...] | None
    bits: bool
    format: str


class NBest(NamedTuple):
    """What is done with n-best lists: the flags of their names."""

    weight: float | None
    word_bonus: float
    one_best: bool
    references: str | None
    metric: str


def score(workdir: Path, asked: Asked, form: Form, lists: NBest | None) -> None:
    """Prints the scores of text.

    Raises:
        InputError: no run there, text that cannot be read, no text, settings that do not fit; and
            after everything has been printed, a score that is no number.
    """
    _check(form, lists, asked)
    source = TextFiles(asked.files)
    given = "" if asked.context_from in CONTEXTS else read_text(asked.context_from)
    model = load(workdir, asked.checkpoint)
    columns = _columns(form, model)
    reading = {
        "context_from": asked.context_from if asked.context_from in CONTEXTS else "none",
        "given": given,
        "window": asked.window,
        "context": asked.context,
        "describe": bool({"rank", "entropy"} & set(columns)),
        "eager": asked.line_buffered or source.terminal,
    }
    # Before the bar, which takes sys.stdout for what stands above it.
    printer = _Printer(reading["eager"])
    if source.terminal:
        print("type lines of text; Ctrl-D ends", file=sys.stderr, flush=True)
    tally = _Tally(source)
    try:
        if lists is None:
            lines = _lines_of_words(form, columns) if form.words else _whole_lines(form)
            printer.write(lines(tally.counted(model.score(source, **reading))))
        else:
            printer.write(
                _rescored(source, lambda texts: tally.counted(model.score(texts, **reading)), lists)
            )
    finally:
        tally.bar.close()
    tally.tell()


def _check(form, lists, asked):
    """Checks what needs no run."""
    for column in form.columns or ():
        check_known(f"--columns={column!r}", column, COLUMNS)
    if form.columns is not None and not form.words:
        raise InputError(f"--columns={','.join(form.columns)} is of words: give --words, too")
    if lists is None:
        return
    if form.words or form.format != "tsv" or form.bits:
        raise InputError(
            "--nbest prints n-best lists and weighs nats: leave out --words, --format and --bits"
        )
    if asked.context_from == "previous":
        raise InputError(
            "--context_from=previous is not for --nbest, whose texts are alternatives: give a FILE,"
            " or leave it out"
        )
    if lists.references is None and lists.weight is None:
        raise InputError("--nbest needs --weight=W, or --references=FILE to choose it by")
    if lists.references is not None and (
        lists.weight is not None or lists.word_bonus or lists.one_best
    ):
        raise InputError(
            "--references chooses --weight and --word_bonus, and prints them only: leave --one_best"
            " and these out"
        )


def _columns(form, model):
    if not form.words:
        return ()
    if not isinstance(model.run.vocabulary, Subwords):
        return COLUMNS if form.columns is None else form.columns
    for column in form.columns or ():
        if column in OF_WORDS:
            raise InputError(
                f"--columns={column} is of words, and this run has units of sub-words: leave it out"
            )
    return COLUMNS[:1]


class _Tally:
    """Counts lines and words, shows how far it is, and says at the end what is wrong with them."""

    def __init__(self, source):
        self.source, self.lines, self.words, self.unseen, self.wrong = source, 0, 0, 0, 0
        self.bar = Bar(max(1, source.size), 0, shown=source.size > 0 and not sys.stdout.isatty())

    def counted(self, scored: Iterable[ScoredLine]) -> Iterator[ScoredLine]:
        """The lines, counted."""
        for line in scored:
            self.lines += 1
            self.words += len(line.words)
            self.unseen += 0 if line.unseen is None else int(line.unseen.sum())
            self.wrong += int((~np.isfinite(line.log_probs)).sum())
            if self.lines % OFTEN == 0:
                self.bar.show(self.source.done, [f"{self.words:,} words"])
            yield line
        self.bar.show(self.source.done)

    def tell(self) -> None:
        """Warns of many unseen words. Raises InputError for no text, and for scores that are no
        numbers.
        """
        if not self.lines:
            raise InputError("there is no text to score: give files, or lines through a pipe")
        if self.wrong:
            cure = "the model has diverged; give another --checkpoint"
            raise InputError(f"{self.wrong:,} of {self.words:,} words have no finite score: {cure}")
        if self.unseen > MANY * self.words:
            share = self.unseen / self.words
            logger.warning(
                "%.1f%% of the words are unseen and scored as <unk>: is the text tokenised as in"
                " training?",
                100 * share,
            )


class _Printer:
    """Writes lines to stdout; eager: each at once."""

    def __init__(self, eager):
        self.eager, self.out = eager, sys.stdout

    def write(self, lines: Iterable[str]) -> None:
        """Writes lines as they come."""
        for line in lines:
            self.out.write(line + "\n")
            if self.eager:
                self.out.flush()
        self.out.flush()


def _whole_lines(form):
    """Prints a line of text's log-probability and the line itself; as JSON also its words,
    perplexity and unseen words.
    """
    unit = BIT if form.bits else 1.0

    def printed(scored):
        for line in scored:
            if form.format == "tsv":
                yield f"{line.log_prob / unit:.4f}\t{line.text}"
                continue
            found = {"log_prob": _rounded(line.log_prob / unit), "words": len(line.words)}
            found |= {"perplexity": _rounded(line.perplexity)}
            found |= {} if line.unseen is None else {"unseen": int(line.unseen.sum())}
            yield json.dumps(found | {"text": line.text}, ensure_ascii=False)

    return printed


def _lines_of_words(form, columns):
    """Prints a line for each word, after one of names if they are columns: number of the line,
    of the word in it, the word, …
    """
    unit = BIT if form.bits else 1.0
    names = ["line", "position", "word", *columns]

    def values(line):
        of = {
            "surprisal": -line.log_probs / unit,
            "rank": line.ranks,
            "frequency": line.frequencies,
            "unseen": line.unseen,
        }
        of["entropy"] = None if line.entropies is None else line.entropies / unit
        return zip(line.words, *(of[name].tolist() for name in columns), strict=True)

    def printed(scored):
        if form.format == "tsv":
            yield "\t".join(names)
        for number, line in enumerate(scored, start=1):
            for position, (word, *row) in enumerate(values(line), start=1):
                if form.format == "tsv":
                    yield "\t".join([str(number), str(position), word, *map(_cell, row)])
                else:
                    row = [_rounded(value) if isinstance(value, float) else value for value in row]
                    yield json.dumps(
                        dict(zip(names, [number, position, word, *row], strict=True)),
                        ensure_ascii=False,
                    )

    return printed


def _cell(value):
    """A number as text; whether something is so as 1 or 0."""
    return f"{value:.4f}" if isinstance(value, float) else str(int(value))


def _rounded(value):
    return round(value, 6) if math.isfinite(value) else None  # JSON has no infinity


def _rescored(source, scores, lists):
    """The lines of n-best lists in their new order, or one about the weights that are best for
    them.
    """
    waiting = deque()

    def texts():
        for number, line in enumerate(source, start=1):
            if line.strip():
                waiting.append(nbest.parse(line, number))
                yield waiting[-1].text

    hypotheses = (waiting.popleft()._replace(log_prob=line.log_prob) for line in scores(texts()))
    groups = nbest.lists(hypotheses)
    if lists.references is not None:
        yield from _fitted(list(groups), lists)
        return
    ranked = (nbest.rescored(group, lists.weight, lists.word_bonus) for group in groups)
    if lists.one_best:
        yield from (group[0][1].text for group in ranked)
    else:
        yield from itertools.starmap(nbest.written, itertools.chain.from_iterable(ranked))


def _fitted(groups, lists):
    if not groups:
        return
    references = nbest.references_of(TextFiles([lists.references]), groups)
    found = nbest.fit(groups, references, lists.metric)
    best, before = (
        100 * (value if lists.metric == "wer" else 1 - value)
        for value in (found.value, found.before)
    )
    chosen = f"--weight={found.weight:.6g} --word_bonus={found.word_bonus:.6g}"
    yield f"{chosen}: {lists.metric} {best:.2f} instead of {before:.2f} on {len(groups):,} lists"
