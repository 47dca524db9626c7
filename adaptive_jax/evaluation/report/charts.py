"""The figures of a report. To add one, write a function and name it in `FIGURES`."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from adaptive_jax.evaluation.report.frequency import Bin, by_frequency, short
from adaptive_jax.evaluation.report.runs import RunReport

NATS = "loss, nats a word"
BY_FREQUENCY, DIFFERENCE, TRAINING = "Loss by frequency", "Difference", "Training and context"
SECTIONS = {
    BY_FREQUENCY: (
        "Bins are of how often a word occurs in the training text and are not cumulative: 100"
        " holds words that occur 11 to 100 times. Vertical lines are 95 % bootstrap intervals over"
        " parts of the text. Losses are in nats a word of the text, whatever the units of a model."
    ),
    DIFFERENCE: "What each word costs in a run less what it costs in the first run.",
    TRAINING: "",
}


class Line(NamedTuple):
    """The points of a run. thin: drawn without markers."""

    run: str
    points: Sequence[tuple]
    thin: bool = False


class Chart(NamedTuple):
    """A figure: its numbers, and how they are drawn.

    Attributes:
        name: of its files.
        columns: what a point holds: x, y, the interval of y as "low" and "high" if there is one,
            and anything else that the CSV file is to have.
        ticks: for x that is text: the values in order, and what stands at the axis.
        limits: of the axis of y; None: those of the points.
    """

    name: str
    title: str
    note: str
    section: str
    columns: Sequence[str]
    lines: Sequence[Line]
    xlabel: str
    ylabel: str
    ticks: Mapping[str, str] = {}
    limits: tuple[float, float] | None = None

    def rows(self) -> list[dict]:
        """The numbers, a line of the CSV file each."""
        return [
            {"run": line.run} | dict(zip(self.columns, point, strict=True))
            for line in self.lines
            for point in line.points
        ]


class Scores(NamedTuple):
    """What figures are drawn from. edges: largest frequencies of the bins but the last."""

    runs: Sequence[RunReport]
    edges: Sequence[int]


def by_word(statistic: str, scores: Scores) -> Chart:
    """Loss by the frequency of the word. statistic: "mean" or "median"."""
    bins = {
        run.name: by_frequency(run.words.nll, run.words.counts, scores.edges) for run in scores.runs
    }
    title = f"{statistic.capitalize()} loss by frequency of the word"
    note = _note(statistic, "Figures 2 and 4 of Baevski & Auli (2019).")
    return _of_bins(f"{statistic}_by_word", title, note, BY_FREQUENCY, statistic, bins)


def by_previous(statistic: str, scores: Scores) -> Chart:
    """Loss by the frequency of the word before."""
    bins = {
        run.name: by_frequency(run.words.nll, run.words.before(), scores.edges)
        for run in scores.runs
    }
    title = f"{statistic.capitalize()} loss by frequency of the word before"
    note = _note(statistic, "Figures 3 and 5 of Baevski & Auli (2019).")
    return _of_bins(f"{statistic}_by_previous", title, note, BY_FREQUENCY, statistic, bins)


def difference(statistic: str, scores: Scores) -> Chart:
    """How much more words cost than in the first run, by their frequency there."""
    first, *others = scores.runs
    bins = {
        run.name: by_frequency(run.words.nll - first.words.nll, first.words.counts, scores.edges)
        for run in others
    }
    title = f"{statistic.capitalize()} difference from {first.name}"
    note = "Word by word: below 0 the run is better."
    if statistic == "median":
        note = "Figure 3 of Pappas et al. (2020)."
    return _of_bins(f"{statistic}_difference", title, note, DIFFERENCE, statistic, bins)


def curves(scores: Scores) -> Chart:
    """Learning curves."""
    lines, late = [], []
    for run in scores.runs:
        parts = {split: run.curve(split) for split in ("train", "validation")}
        last = max((step for curve in parts.values() for step, _ in curve), default=0)
        for split, curve in parts.items():
            points = [(step, loss, split) for step, loss in curve]
            lines += [Line(run.name, points, thin=split == "train")] if points else []
            late += [loss for step, loss in curve if step >= last / 10]
    limits = None
    if late:  # the first losses would press all others together
        room = 0.05 * (max(late) - min(late)) + 0.01
        limits = min(late) - room, max(late) + room
    return Chart(
        "curves",
        "Learning curves",
        "Validation with markers; training, with its dropout, as thin lines.",
        TRAINING,
        ("updates", "nll", "split"),
        lines,
        "updates",
        NATS,
        limits=limits,
    )


def contexts(scores: Scores) -> Chart:
    """Perplexity by context, of runs that evaluate.py has scored with several."""
    several = [run for run in scores.runs if len({each[0] for each in run.contexts}) > 1]
    return Chart(
        "contexts",
        "Perplexity by context",
        "As Table 5 of Baevski & Auli (2019): tokens that are read before those that are scored.",
        TRAINING,
        ("context", "perplexity", "window"),
        [Line(run.name, run.contexts) for run in several],
        "tokens of context",
        "perplexity",
    )


FIGURES: list[Callable[[Scores], Chart]] = [
    functools.partial(by_word, "mean"),
    functools.partial(by_previous, "mean"),
    functools.partial(by_word, "median"),
    functools.partial(by_previous, "median"),
    functools.partial(difference, "mean"),
    functools.partial(difference, "median"),
    curves,
    contexts,
]


def charts_of(scores: Scores) -> list[Chart]:
    """All figures that have something to draw."""
    return [chart for figure in FIGURES if (chart := figure(scores)).lines]


def _note(statistic, figures):
    return figures if statistic == "mean" else "Outliers count less than in the mean."


def _of_bins(name, title, note, section, statistic, bins: Mapping[str, list[Bin]]) -> Chart:
    """A chart of means or medians. Below each bin stand the words of the first run."""
    lines, tops = [], {}
    for run, found in bins.items():
        points = []
        for each in found:
            value = getattr(each, statistic)
            low, high = getattr(each, f"{statistic}_interval") or (value, value)
            points.append((each.label, value, low, high, each.words, each.least, each.most))
            tops.setdefault((each.least, each.label), each.words if not lines else 0)
        lines.append(Line(run, points))
    ticks = {label: f"{label}\n{short(words)}" for (_, label), words in sorted(tops.items())}
    columns = "bin", statistic, "low", "high", "words", "least", "most"
    xlabel = "frequency in training; below, words of the text"
    return Chart(name, title, note, section, columns, lines, xlabel, NATS, ticks)
