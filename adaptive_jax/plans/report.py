"""Size and coverage of a corpus's vocabulary at several cuts, and the work of the bands it may be given.

    python -m adaptive_jax.data.vocabulary penn_treebank
    python -m adaptive_jax.data.vocabulary text_files --path=my_corpus --threshold=3 --width=512 --bands=3

Two tables go to stdout. The first folds rare words into <unk>, by count or down to a size: how many words stay, and which
share of the tokens of each split is kept or lost. The second cuts the vocabulary of --threshold and --limit into bands:
where an adaptive softmax has least work, beside the bands of Baevski & Auli (2019).
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from absl import flags

from adaptive_jax import command
from adaptive_jax.data.corpora import load as corpora
from adaptive_jax.data.vocabulary.words import EOS, UNKNOWN, Vocabulary
from adaptive_jax.errors import InputError, check_at_least
from adaptive_jax.plans import cutoffs as planner

THRESHOLDS = (1, 2, 3, 5, 10, 20, 50, 100)
LIMITS = (1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000)
BANDS = (2, 3, 4, 5)
DEFAULTS = planner.Layer()
UNSAFE = f"It has no {UNKNOWN}, so it cannot encode the other splits: train with data.threshold=2 or a data.limit."
NOTE = """\
* least work, of bands of --smallest={:,} words or more. Work says nothing of accuracy: on WikiText-103, bands of 20K/40K/200K
and of 10K/60K/190K words reached perplexity 19.79, 5K/155K/100K 20.06, 60K/100K/100K 20.52, and four, 20K/40K/60K/140K, 20.53
(Baevski & Auli 2019, Table 8)."""


class Cut(NamedTuple):
    """A vocabulary cut by threshold or limit.

    size: words left, `<eos>` and, where there is one, `<unk>` included.
    coverage: share of the tokens counted that are not `<unk>`.
    lost: share of the tokens of each other split that become or are `<unk>`.
    """

    size: int
    coverage: float
    lost: dict[str, float]


def cut(whole: Vocabulary, times: Mapping[str, np.ndarray], threshold: int = 1, limit: int = 0) -> Cut:
    """What `Vocabulary.build` with this threshold and limit would keep, without building it.

    whole: all words of the train split, and `<unk>`, of count 0 if the text has none.
    times: for each other split `[V]`, how often it has each word of `whole`; words that are not there count as `<unk>`.
    """
    always = [whole.index[EOS], whole.index[UNKNOWN]]
    ranked = np.delete(np.arange(len(whole)), always)
    kept = int(np.searchsorted(-whole.counts[ranked], -threshold, side="right"))
    unknown = bool(whole.counts[always[1]])
    if limit and kept + 1 + (unknown or kept < len(ranked)) > limit:
        kept = limit - 2
    inside = np.append(ranked[:kept], always[0])

    def share(counts):
        return float(counts[inside].sum() / counts.sum())

    lost = {split: 1 - share(counts) for split, counts in times.items()}
    return Cut(kept + 1 + (unknown or kept < len(ranked)), share(whole.counts), lost)


def count(corpus: str, path: str = "", **where) -> tuple[Vocabulary, dict[str, np.ndarray]]:
    """The vocabulary of a corpus, uncut, with `<unk>`; and how often the other splits that are there have each word.

    where: further arguments of `corpora.load`. Raises InputError as that does.
    """
    words = corpora.load(corpus, path, splits=(), **where).vocabulary
    whole = Vocabulary.build({UNKNOWN: 0} | dict(zip(words.words, words.counts.tolist(), strict=True)))
    there = [split for split in corpora.splits_of(corpus, path) if split != "train"]
    if not there:
        return whole, {}
    ids = corpora.load(corpus, path, vocabulary=whole, splits=there, **where).ids
    return whole, {split: np.bincount(ids[split], minlength=len(whole)) for split in there}


def cuts_table(whole: Vocabulary, times: Mapping[str, np.ndarray], threshold: int, limit: int) -> str:
    """A line for every usual threshold and size, and for the one chosen, which is marked."""
    rows = [(t, 0) for t in THRESHOLDS] + [(1, size) for size in LIMITS if size < len(whole)]
    chosen = threshold, limit
    rows = rows if chosen in rows else [*rows, chosen]
    lines = []
    for row in rows:
        what = f"threshold {row[0]:,}" * (row[0] > 1 or not row[1]) + f" limit {row[1]:,}" * bool(row[1])
        size, coverage, lost = cut(whole, times, *row)
        shares = [f"{share:.2%}" for share in (coverage, *lost.values())]
        lines.append([("* " if row == chosen else "  ") + what.strip(), f"{size:,}", *shares])
    return _table(["  cut", "words", "train covered", *(f"{split} <unk>" for split in times)], lines)


def bands_table(
    paper: tuple[int, int] | None, counts: np.ndarray, bands: Sequence[int], layer: planner.Layer, smallest: int = 1
) -> str:
    """A line for the full softmax, for the cheapest cutoffs of each number of bands, and for the paper's bands.

    The line of least work is marked. Raises InputError as `planner.propose`.

    paper: `planner.paper_cutoffs`, or None for no such line.
    counts: `[V]`, of the words in order.
    """
    choices = [("full softmax", ())]
    choices += [(f"{n} bands", planner.propose(counts, n, layer, smallest, paper or ())[0]) for n in bands]
    if paper:
        choices.append(("paper's" if paper in planner.PAPERS.values() else "as paper's", paper))
    work = [planner.cost(counts, cutoffs, layer) for _, cutoffs in choices]
    lines = []
    for (name, cutoffs), flops in zip(choices, work, strict=True):
        shares = " ".join(f"{share:.1%}" for share in planner.band_shares(counts, cutoffs))
        size = planner.parameters(len(counts), cutoffs, layer)
        line = [" ".join(f"{c:,}" for c in cutoffs) or "-", shares, f"{flops / 1e6:,.2f}", f"{flops / work[0]:.1%}"]
        against = f"{flops / work[-1]:.1%}" if paper else "-"
        lines.append([("* " if flops == min(work) else "  ") + name, *line, against, f"{size / 1e6:,.2f}M"])
    header = ["  bands", "cutoffs", "tokens in each", "MFLOP/token", "of full", "of paper's", "parameters"]
    return _table(header, lines)


def _fits(words, bands, layer):
    try:
        layer.widths(bands)
    except InputError:
        return False
    return bands <= words


def _table(header, rows):
    """Columns set apart by two spaces; all but the first are set to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in [header, *rows]
    )


def _report(corpus: str, settings: flags.FlagValues) -> None:
    check_at_least(0, bands=settings.bands, smallest=settings.smallest)
    layer = planner.Layer(features=settings.width, factor=settings.factor, tokens=settings.batch, floor=settings.floor)
    layer.widths(settings.bands or 1)
    where = {"tokeniser": settings.tokeniser, "lower": settings.lower}
    where |= {} if settings.cache is None else {"cache": settings.cache}
    whole, times = count(corpus, settings.path, **where)
    known = {word: n for word, n in zip(whole.words, whole.counts.tolist(), strict=True) if n or word != UNKNOWN}
    vocabulary = Vocabulary.build(known, settings.threshold, settings.limit)
    size = len(vocabulary)
    paper = planner.paper_cutoffs(corpus, size) if _fits(size, 3, layer) else None
    smallest = settings.smallest or planner.smallest_band(size)
    bands = [settings.bands] if settings.bands else [n for n in BANDS if _fits(size // smallest, n, layer)]
    planned = bands_table(paper, vocabulary.counts, bands, layer, smallest)
    tokens = {"train": whole.counts.sum()} | {split: counts.sum() for split, counts in times.items()}
    print(f"{corpus}: tokens, {EOS} included: " + ", ".join(f"{split} {n:,}" for split, n in tokens.items()))
    print(f"\n{cuts_table(whole, times, settings.threshold, settings.limit)}")
    print("* the vocabulary that is cut into bands below")
    if UNKNOWN not in vocabulary.words and any(cut(whole, times).lost.values()):
        print(UNSAFE)
    print(
        f"\nAdaptive softmax of {size:,} words, width {layer.features:,}, factor {layer.factor}, {layer.tokens:,} tokens"
    )
    print(f"at a time; a matrix product of fewer than {layer.floor} rows counts as one of {layer.floor}:")
    print(f"\n{planned}\n{NOTE.format(smallest)}")


def _define() -> flags.FlagValues:
    flags.DEFINE_string("path", "", "Directory with a local copy: train, valid and test as .txt, .txt.xz or .txt.gz.")
    flags.DEFINE_string("cache", None, "Where prepared corpora are kept; default: as in training.")
    flags.DEFINE_string("tokeniser", "none", "none: words stand between white space; or moses.")
    flags.DEFINE_boolean("lower", False, "Make all letters small.")
    flags.DEFINE_integer("threshold", 1, "Keep words seen so often or more.")
    flags.DEFINE_integer("limit", 0, "Size of the whole vocabulary; 0: no limit.")
    flags.DEFINE_integer("width", DEFAULTS.features, "Width of the hidden states and of the first band.")
    flags.DEFINE_integer("bands", 0, f"Bands to propose cutoffs for; 0: each of {BANDS} that fits.")
    flags.DEFINE_integer(
        "smallest", 0, "Words that each band proposed has at least; 0: the share of 10,000 of 267,735."
    )
    flags.DEFINE_integer("factor", DEFAULTS.factor, "How many times narrower each band is than the one before.")
    flags.DEFINE_integer("batch", DEFAULTS.tokens, "Tokens that a device scores at a time.")
    flags.DEFINE_integer("floor", DEFAULTS.floor, "Rows that the smallest matrix product costs as much as.")
    return flags.FLAGS


if __name__ == "__main__":
    settings = _define()
    command.run(lambda corpus: _report(corpus, settings), positional=["CORPUS"])
