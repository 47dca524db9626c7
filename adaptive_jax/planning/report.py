"""Size and coverage of a corpus's vocabulary at several thresholds and sizes, and the work of an
adaptive softmax over its bands.

    python -m adaptive_jax plan penn_treebank
    python -m adaptive_jax plan text_files --path=my_corpus --threshold=3 --width=512 --bands=3

Prints two tables. The first folds rare words into <unk>, below a count or beyond a size: how many
words remain, and which share of the tokens of each split becomes <unk>. The second divides the
vocabulary of --threshold and --limit into bands: where an adaptive softmax has least work, beside
the bands of Baevski & Auli (2019).
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from absl import flags

from adaptive_jax.config.keys import LARGEST
from adaptive_jax.data.corpora.load import load, splits_of
from adaptive_jax.data.vocabulary.words import EOS, UNKNOWN, Vocabulary, check_cut
from adaptive_jax.errors import InputError
from adaptive_jax.planning import cutoffs
from adaptive_jax.planning.cutoffs import Workload

THRESHOLDS = (1, 2, 3, 5, 10, 20, 50, 100)
LIMITS = (1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000)
BANDS = (2, 3, 4, 5)
POSITIONAL = ["CORPUS"]
STOPPED = "stopped: what was prepared is kept; the same command goes on"
DEFAULTS = Workload()
RANGES = {  # of the flags that are numbers, beside those that `check_cut` knows
    **dict.fromkeys(("width", "factor", "batch"), (1, LARGEST)),
    **dict.fromkeys(("smallest", "least_rows"), (0, LARGEST)),
    "bands": (0, 1_000),
}
NO_UNKNOWN = (
    f"It has no {UNKNOWN}, so it cannot encode the other splits: train with data.threshold=2 or a"
    " data.limit."
)
NOTE = """\
* least work, among bands of --smallest={:,} words or more. Work says nothing about accuracy: on
WikiText-103, bands of 20K/40K/200K and of 10K/60K/190K words reached perplexity 19.79, 5K/155K/100K
20.06, 60K/100K/100K 20.52, and the four of 20K/40K/60K/140K 20.53 (Baevski & Auli 2019, Table
8)."""


class Cut(NamedTuple):
    """A vocabulary whose rare words are folded into `<unk>`.

    size: words that remain, with `<eos>` and, if there is one, `<unk>`.
    coverage: share of the tokens counted that are not `<unk>`.
    lost: share of the tokens of each other split that become or are `<unk>`.
    """

    size: int
    coverage: float
    lost: dict[str, float]


def cut(
    words: Vocabulary, others: Mapping[str, np.ndarray], threshold: int = 1, limit: int = 0
) -> Cut:
    """What `words.cut(threshold, limit)` would keep, without building it; arguments as `count`
    returns them.
    """
    special = [words.index[EOS], words.index[UNKNOWN]]
    foldable = np.delete(np.arange(len(words)), special)
    kept = int(np.searchsorted(-words.counts[foldable], -threshold, side="right"))
    unknown = bool(words.counts[special[1]])
    if limit and kept + 1 + (unknown or kept < len(foldable)) > limit:
        kept = limit - 2
    known = np.append(foldable[:kept], special[0])
    coverage, *rest = (
        float(counts[known].sum() / counts.sum()) for counts in (words.counts, *others.values())
    )
    lost = dict(zip(others, (1 - share for share in rest), strict=True))
    return Cut(kept + 1 + (unknown or kept < len(foldable)), coverage, lost)


def count(data: Mapping) -> tuple[Vocabulary, dict[str, np.ndarray]]:
    """All words of a corpus, with `<unk>` even if it never occurs; and for each other split `[V]`
    counts of the same words.

    data: as for `load`, which raises InputError. Words that the train split lacks count as `<unk>`.
    """
    words = load(data, splits=()).vocabulary
    words = Vocabulary.build(
        {UNKNOWN: 0} | dict(zip(words.words, words.counts.tolist(), strict=True))
    )
    splits = [split for split in splits_of(data["corpus"], data["path"]) if split != "train"]
    ids = load(data, vocabulary=words, splits=splits).ids if splits else {}
    return words, {split: np.bincount(ids[split], minlength=len(words)) for split in splits}


def cuts_table(
    words: Vocabulary, others: Mapping[str, np.ndarray], threshold: int, limit: int
) -> str:
    """A line for each usual threshold and size, and one, marked, for the vocabulary of
    `threshold` and `limit`.
    """
    rows = [(t, 0) for t in THRESHOLDS] + [(1, size) for size in LIMITS if size < len(words)]
    chosen = threshold, limit
    lines = []
    for row in rows if chosen in rows else [*rows, chosen]:
        name = f"threshold {row[0]:,}" * (row[0] > 1 or not row[1]) + f" limit {row[1]:,}" * bool(
            row[1]
        )
        size, coverage, lost = cut(words, others, *row)
        shares = [f"{share:.2%}" for share in (coverage, *lost.values())]
        lines.append([("* " if row == chosen else "  ") + name.strip(), f"{size:,}", *shares])
    return _table(
        ["  words kept", "words", "train covered", *(f"{split} <unk>" for split in others)], lines
    )


def bands_table(
    counts: np.ndarray, bands: Sequence[int], workload: Workload, smallest: int, paper: tuple | None
) -> str:
    """A line for the full softmax, for the cheapest cutoffs of each number of bands, and for the
    paper's bands.

    The line of least work is marked. Raises InputError as `cutoffs.propose`.

    counts: `[V]`, how often each word occurs, in order. paper: `cutoffs.paper_cutoffs`, or None for
        no such line.
    """
    choices = {"full softmax": ()}
    choices |= {
        f"{n} bands": cutoffs.propose(counts, n, workload, smallest, paper or ())[0] for n in bands
    }
    if paper:
        choices["paper's" if paper in cutoffs.PAPERS.values() else "as paper's"] = paper
    work = [cutoffs.cost(counts, cuts, workload) for cuts in choices.values()]
    lines = []
    for (name, cuts), flops in zip(choices.items(), work, strict=True):
        shares = " ".join(f"{share:.1%}" for share in cutoffs.band_shares(counts, cuts))
        size = cutoffs.parameters(len(counts), cuts, workload) / 1e6
        line = [
            " ".join(f"{c:,}" for c in cuts) or "-",
            shares,
            f"{flops / 1e6:,.2f}",
            f"{flops / work[0]:.1%}",
        ]
        against = f"{flops / work[-1]:.1%}" if paper else "-"
        lines.append(
            [("* " if flops == min(work) else "  ") + name, *line, against, f"{size:,.2f}M"]
        )
    header = [
        "  bands",
        "cutoffs",
        "tokens in each",
        "MFLOP/token",
        "of full",
        "of paper's",
        "parameters",
    ]
    return _table(header, lines)


def _fits(words, bands, workload):
    try:
        workload.widths(bands)
    except InputError:
        return False
    return bands <= words


def _table(header, rows):
    """Columns separated by two spaces, the first aligned left and the others right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
        for row in [header, *rows]
    )


def main(corpus: str) -> None:
    """Prints what the flags ask for."""
    print_report(corpus, flags.FLAGS)


def print_report(corpus: str, flag: flags.FlagValues) -> None:
    """Prints both tables for a corpus and the flags of the command. Raises InputError before
    anything is printed.
    """
    for name, (least, most) in RANGES.items():
        if not least <= getattr(flag, name) <= most:
            raise InputError(f"--{name}={getattr(flag, name)} must be from {least} to {most:,}")
    check_cut(flag.threshold, flag.limit)
    workload = Workload(flag.width, flag.factor, tokens=flag.batch, least_rows=flag.least_rows)
    workload.widths(flag.bands or 1)
    data = {"corpus": corpus, "path": flag.path, "tokeniser": flag.tokeniser, "lower": flag.lower}
    words, others = count(data if flag.cache is None else data | {"cache": flag.cache})
    known = {
        word: n
        for word, n in zip(words.words, words.counts.tolist(), strict=True)
        if n or word != UNKNOWN
    }
    vocabulary = Vocabulary.build(known, flag.threshold, flag.limit)
    size = len(vocabulary)
    paper = cutoffs.paper_cutoffs(corpus, size) if _fits(size, 3, workload) else None
    smallest = flag.smallest or cutoffs.smallest_band(size)
    bands = (
        [flag.bands] if flag.bands else [n for n in BANDS if _fits(size // smallest, n, workload)]
    )
    planned = bands_table(vocabulary.counts, bands, workload, smallest, paper)
    tokens = {"train": words.counts.sum()} | {
        split: counts.sum() for split, counts in others.items()
    }
    print(
        f"{corpus}: tokens, with {EOS}: "
        + ", ".join(f"{split} {n:,}" for split, n in tokens.items())
    )
    print(f"\n{cuts_table(words, others, flag.threshold, flag.limit)}")
    print("* the vocabulary that is divided into bands below")
    if UNKNOWN not in vocabulary.words and any(cut(words, others).lost.values()):
        print(NO_UNKNOWN)
    print(
        f"\nAdaptive softmax of {size:,} words, width {flag.width:,}, factor {flag.factor},"
        f" {flag.batch:,} tokens at a time;"
    )
    print(
        f"a matrix product of fewer than {flag.least_rows} rows counts as one of {flag.least_rows}:"
    )
    print(f"\n{planned}\n{NOTE.format(smallest)}")


def define_flags() -> None:
    """Defines the flags of the command."""
    flags.DEFINE_string(
        "path",
        "",
        "Directory with a local copy: train, valid and test as .txt, .txt.xz or .txt.gz.",
    )
    flags.DEFINE_string("cache", None, "Directory for prepared corpora; default: as in training.")
    flags.DEFINE_string("tokeniser", "none", "none: split at white space; or moses.")
    flags.DEFINE_boolean("lower", False, "Lower-case all words.")
    flags.DEFINE_integer("threshold", 1, "Keep words that occur at least this often.")
    flags.DEFINE_integer("limit", 0, "Size of the whole vocabulary; 0: no limit.")
    flags.DEFINE_integer(
        "width", DEFAULTS.features, "Width of the hidden states and of the first band."
    )
    flags.DEFINE_integer(
        "bands", 0, f"Number of bands to propose cutoffs for; 0: each of {BANDS} that fits."
    )
    flags.DEFINE_integer(
        "smallest",
        0,
        "Words that each proposed band has at least; 0: the proportion 10,000 of 267,735.",
    )
    flags.DEFINE_integer(
        "factor", DEFAULTS.factor, "How many times narrower each band is than the one before."
    )
    flags.DEFINE_integer("batch", DEFAULTS.tokens, "Tokens that a device scores at a time.")
    flags.DEFINE_integer(
        "least_rows",
        DEFAULTS.least_rows,
        "Matrix products of fewer rows count as one of this many.",
    )
