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

from adaptive_jax.config.keys import LARGEST
from adaptive_jax.data.corpora.load import load, splits_of
from adaptive_jax.data.vocabulary.words import EOS, UNKNOWN, Vocabulary, check_cut
from adaptive_jax.errors import InputError, of_extra
from adaptive_jax.planning import cutoffs
from adaptive_jax.planning.cutoffs import Workload

with of_extra("train"):
    from absl import flags

THRESHOLDS = (1, 2, 3, 5, 10, 20, 50, 100)
LIMITS = (1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000)
BANDS = (2, 3, 4, 5)
POSITIONAL = ["CORPUS"]
STOPPED = "stopped: what was prepared is kept; the same command resumes"
DEFAULTS = Workload()
RANGES = dict.fromkeys(("width", "factor"), (1, LARGEST))
RANGES |= {"smallest": (0, LARGEST), "bands": (0, 1_000)}
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
    unknown: share of the tokens of each split that become or are `<unk>`.
    """

    size: int
    unknown: dict[str, float]


def cut(splits: Mapping[str, np.ndarray], words: Vocabulary, threshold: int, limit: int = 0) -> Cut:
    """What `words.cut(threshold, limit)` would keep, without building it; `count` returns the other
    arguments.
    """
    special = [words.index[EOS], words.index[UNKNOWN]]
    foldable = np.delete(np.arange(len(words)), special)
    kept = int(np.searchsorted(-words.counts[foldable], -threshold, side="right"))
    has_unknown = bool(words.counts[special[1]])
    if limit and kept + 1 + (has_unknown or kept < len(foldable)) > limit:
        kept = limit - 2
    known = np.append(foldable[:kept], special[0])
    unknown = {split: float(1 - n[known].sum() / n.sum()) for split, n in splits.items()}
    return Cut(kept + 1 + (has_unknown or kept < len(foldable)), unknown)


def count(data: Mapping) -> tuple[dict[str, np.ndarray], Vocabulary]:
    """`[V]` counts of each split, train first, of all words of its train split, with `<unk>` even
    if it never occurs; and these words.

    data: as for `load`, which raises InputError. Words that the train split lacks count as `<unk>`.
    """
    words = load(data, splits=()).vocabulary
    words = Vocabulary.build(
        {UNKNOWN: 0} | dict(zip(words.words, words.counts.tolist(), strict=True))
    )
    others = [split for split in splits_of(data["corpus"], data["path"]) if split != "train"]
    ids = load(data, vocabulary=words, splits=others).ids if others else {}
    counts = {split: np.bincount(ids[split], minlength=len(words)) for split in others}
    return {"train": words.counts} | counts, words


def cuts_table(
    splits: Mapping[str, np.ndarray], words: Vocabulary, threshold: int, limit: int
) -> str:
    """A line for each usual threshold and size, and one, marked, for the vocabulary of
    `threshold` and `limit`.
    """
    chosen = threshold, limit
    cuts = [(t, 0) for t in THRESHOLDS] + [(1, size) for size in LIMITS if size < len(words)]
    lines = []
    for row in cuts if chosen in cuts else [*cuts, chosen]:
        name = f"threshold {row[0]:,}" if row[0] > 1 or not row[1] else ""
        name += f" limit {row[1]:,}" if row[1] else ""
        size, unknown = cut(splits, words, *row)
        shares = [f"{share:.2%}" for share in unknown.values()]
        lines.append([("* " if row == chosen else "  ") + name.strip(), f"{size:,}", *shares])
    return _table(["  words kept", "words", *(f"{split} <unk>" for split in splits)], lines)


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
    for n in bands:
        choices[f"{n} bands"], _ = cutoffs.propose(counts, n, workload, smallest, paper or ())
    if paper:
        choices["paper's" if paper in cutoffs.PAPERS.values() else "as paper's"] = paper
    work = {name: cutoffs.cost(counts, cuts, workload) for name, cuts in choices.items()}
    full, least, lines = work["full softmax"], min(work.values()), []
    for name, cuts in choices.items():
        shares = cutoffs.band_shares(counts, cuts)
        lines.append(
            [
                ("* " if work[name] == least else "  ") + name,
                " ".join(f"{cut:,}" for cut in cuts) or "-",
                " ".join(f"{share:.1%}" for share in shares),
                f"{work[name] / 1e6:,.2f}",
                f"{work[name] / full:.1%}",
                f"{cutoffs.parameters(len(counts), cuts, workload) / 1e6:,.2f}M",
            ]
        )
    columns = ["cutoffs", "tokens in each", "MFLOP/token", "of full", "parameters"]
    return _table(["  bands", *columns], lines)


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
    if corpus == "ids":
        raise InputError(
            "plan ids has no vocabulary to choose, it is the tokenizer's: use the name of a corpus"
            " of text; training on own ids chooses bands by itself"
        )
    workload = Workload(flag.width, flag.factor)
    workload.widths(flag.bands or 1)
    data = {"corpus": corpus, "path": flag.path, "tokeniser": flag.tokeniser, "lower": flag.lower}
    splits, words = count(data)
    known = dict(zip(words.words, words.counts.tolist(), strict=True))
    if not known[UNKNOWN]:
        del known[UNKNOWN]
    vocabulary = Vocabulary.build(known, flag.threshold, flag.limit)
    size = len(vocabulary)

    def fits(bands, of):
        return bands <= of and workload.features >= workload.factor ** (bands - 1)

    paper = cutoffs.paper_cutoffs(corpus, size) if fits(3, size) else None
    smallest = flag.smallest or cutoffs.smallest_band(size)
    bands = [flag.bands] if flag.bands else [n for n in BANDS if fits(n, size // smallest)]
    planned = bands_table(vocabulary.counts, bands, workload, smallest, paper)
    tokens = ", ".join(f"{split} {counts.sum():,}" for split, counts in splits.items())
    print(f"{corpus}: tokens, with {EOS}: {tokens}\n")
    print(cuts_table(splits, words, flag.threshold, flag.limit))
    print("* the vocabulary that is divided into bands below")
    if UNKNOWN not in vocabulary.words and any(cut(splits, words, 1).unknown.values()):
        print(NO_UNKNOWN)
    print(f"\nAdaptive softmax of {size:,} words, width {flag.width:,}, factor {flag.factor}:\n")
    print(f"{planned}\n{NOTE.format(smallest)}")


def define_flags() -> None:
    """Defines the flags of the command."""
    text, number = flags.DEFINE_string, flags.DEFINE_integer
    text("path", "", "A local copy: train, valid and test as .txt, .txt.xz or .txt.gz.")
    text("tokeniser", "none", "none: split at white space; or moses.")
    flags.DEFINE_boolean("lower", False, "Lower-case all words.")
    number("threshold", 1, "Keep words that occur at least this often.")
    number("limit", 0, "Size of the whole vocabulary; 0: no limit.")
    number("width", DEFAULTS.features, "Width of the hidden states and of the first band.")
    number("factor", DEFAULTS.factor, "How many times narrower each band is than the one before.")
    number("bands", 0, f"Number of bands to propose cutoffs for; 0: each of {BANDS} that fits.")
    number("smallest", 0, "Words that each proposed band has at least; 0: 3.7% of the vocabulary.")
