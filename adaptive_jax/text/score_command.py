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

import numpy as np
from absl import flags

from adaptive_jax.config import commands
from adaptive_jax.errors import InputError, check_known
from adaptive_jax.text.files import STDIN, TextFiles

CHECKPOINT = commands.define_checkpoint()
WORDS = flags.DEFINE_boolean(
    "words", False, "Print a line for each word instead of each line of text."
)
COLUMNS = flags.DEFINE_list(
    "columns",
    None,
    "Of each word: surprisal, rank, entropy, frequency, unseen; default: all. Implies --words.",
)
BITS = flags.DEFINE_boolean(
    "bits", False, "Log-probabilities, surprisal and entropy in bits instead of nats."
)
FORMAT = flags.DEFINE_enum(
    "format", "tsv", ["tsv", "jsonl"], "Columns separated by tabs, or a JSON object a line."
)
CONTEXT_FROM = flags.DEFINE_string(
    "context_from", "none", "none: lines stand alone; previous: each follows the last; or a FILE."
)
WINDOW = flags.DEFINE_integer(
    "window", 0, "Tokens the model reads at once; 0: the sequence length it was trained with."
)
CONTEXT = flags.DEFINE_integer(
    "context", None, "Tokens read again where text is longer than a window; default: half."
)
LINE_BUFFERED = flags.DEFINE_boolean(
    "line_buffered", False, "Score each line as it comes; so it is with text that is typed."
)
commands.define_workdir("Directory of a run that train.py made.", several_hosts=False)
flags.adopt_module_key_flags(commands)  # --help shows them
POSITIONAL = ["[FILE...]"]

NAMES = ("surprisal", "rank", "entropy", "frequency", "unseen")
BIT = math.log(2)  # in nats
OFTEN = 64  # lines after which the bar moves

logger = logging.getLogger(__name__)


def main(*files: str) -> None:
    """Scores these files, or standard input.

    Raises:
        InputError: no run there, text that cannot be read, no text, settings that do not fit; and
            after everything has been printed, a score that is not finite.
    """
    workdir, _ = commands.workdir()
    source, follows = TextFiles(files), CONTEXT_FROM.value in ("none", "previous")
    if not (follows or CONTEXT_FROM.value == STDIN or exists(expanduser(CONTEXT_FROM.value))):
        choices = "none", "previous", "a file that exists"
        check_known(f"--context_from={CONTEXT_FROM.value!r}", CONTEXT_FROM.value, choices)
    context = "" if follows else TextFiles([CONTEXT_FROM.value]).read()
    from adaptive_jax.text.load import load  # after the flags: their errors do not wait for jax

    model = load(workdir, CHECKPOINT.value)
    columns = columns_of(model.run.vocabulary)
    options = {
        "context_from": CONTEXT_FROM.value if follows else "none",
        "given": context,
        "window": WINDOW.value,
        "context": CONTEXT.value,
        "rank_and_entropy": bool({"rank", "entropy"} & set(columns)),
        "eager": LINE_BUFFERED.value or source.terminal,
    }
    if source.terminal:
        print("type lines of text; Ctrl-D ends", file=sys.stderr, flush=True)

    scored = checked(shown(model.score(source, **options), source))
    lines = word_lines(scored, columns) if columns else text_lines(scored)
    out = sys.stdout  # before the bar, which draws what is printed to sys.stdout on its terminal
    for line in lines:
        print(line, file=out, flush=options["eager"])


def columns_of(vocabulary) -> tuple[str, ...]:
    """The columns to print of each word: those of --columns, or all that the run has; none without
    --words.
    """
    from adaptive_jax.data.vocabulary.subwords import Subwords

    if not WORDS.value and COLUMNS.value is None:
        return ()
    names = NAMES[:1] if isinstance(vocabulary, Subwords) else NAMES
    for column in COLUMNS.value or ():
        if column in NAMES and column not in names:
            raise InputError(
                f"--columns={column!r} is not for sub-word units, which this run has: use"
                f" --columns={names[0]}"
            )
        check_known(f"--columns={column!r}", column, names)
    return tuple(COLUMNS.value or names)


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
    from adaptive_jax.evaluation.unseen import MANY

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


def text_lines(scored: Iterable) -> Iterator[str]:
    """A line for each line of text: its log-probability and the line itself; as JSON also its
    words, perplexity and unseen words.
    """
    unit = BIT if BITS.value else 1.0
    for line in scored:
        if FORMAT.value == "tsv":
            yield f"{line.log_prob / unit:.4f}\t{line.text}"
            continue
        of = {"log_prob": line.log_prob / unit, "words": len(line.words)}
        of["perplexity"] = line.perplexity
        if line.unseen is not None:
            of["unseen"] = int(line.unseen.sum())
        yield _json(of | {"text": line.text})


def word_lines(scored: Iterable, columns: tuple[str, ...]) -> Iterator[str]:
    """A line for each word, after a header if they are columns: number of the line, position of
    the word in it, the word, …
    """
    unit, names = BIT if BITS.value else 1.0, ["line", "position", "word", *columns]
    if FORMAT.value == "tsv":
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
            if FORMAT.value == "tsv":
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
