"""The figures of a report. To add one, write a function and name it in `FIGURES`."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from adaptive_jax.scores.frequency import Bin, bin_label, by_frequency, short
from adaptive_jax.scores.report.runs import RunReport
from adaptive_jax.scores.scores import perplexity

BY_FREQUENCY, DIFFERENCE, TRAINING = "Loss by frequency", "Difference", "Training and context"
SECTIONS = {
    BY_FREQUENCY: (
        "Bins group {unit}s by how often they occur in the training text: 1K-10K holds {unit}s"
        " that occur 1,001 to 10,000 times. Vertical lines are 95 % bootstrap intervals"
        " over parts of the text. Losses are in nats a {unit} of the text, whatever the units of a"
        " model."
    ),
    DIFFERENCE: "The loss of each {unit} in a run minus its loss in the first run.",
    TRAINING: "",
}

NATS = "loss, nats a {}"


class Line(NamedTuple):
    """The points of a run. thin: draw a thin line without markers."""

    run: str
    points: Sequence[tuple]
    thin: bool = False


class Chart(NamedTuple):
    """A figure: its numbers and their presentation.

    Attributes:
        name: stem of its files.
        columns: names of a point's values: x, y, the interval of y as "low" and "high" if there is
            one, and any further columns of the CSV file.
        ticks: if x is text, its values in order and their labels on the axis.
        limits: of the y axis; None: those of the points.
        log: whether the y axis is logarithmic.
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
    log: bool = False

    def rows(self) -> list[dict]:
        """The rows of the CSV file, one per point."""
        return [
            {"run": line.run} | dict(zip(self.columns, point, strict=True))
            for line in self.lines
            for point in line.points
        ]


@dataclasses.dataclass(frozen=True)
class FigureData:
    """Data of the figures.

    edges: largest frequencies of the bins but the last. unit: of losses, "word" or "token".
    """

    runs: Sequence[RunReport]
    edges: Sequence[int]
    unit: str

    @functools.cached_property
    def bins(self) -> dict[str, dict[str, list[Bin]]]:
        """Losses binned by the frequency of the word and of the word before, for each run with
        frequencies, and differences from the first run binned by the first run's frequencies.
        """
        values = {"by_word": {}, "by_previous": {}, "difference": {}}
        losses = [run.words.nll(run.nll) for run in self.runs]
        for run, nll in zip(self.runs, losses, strict=True):
            if run.words.counts is not None:
                values["by_word"][run.name] = nll, run.words.counts
                values["by_previous"][run.name] = nll, run.words.counts_before()
        if (counts := self.runs[0].words.counts) is not None:
            for run, nll in zip(self.runs[1:], losses[1:], strict=True):
                values["difference"][run.name] = nll - losses[0], counts
        return {
            figure: {run: by_frequency(*pair, self.edges) for run, pair in runs.items()}
            for figure, runs in values.items()
        }


OUTLIERS = "Outliers count less than in the mean."
BINNED = {  # titles, and notes for each statistic
    "by_word": (
        "by frequency of the {unit}",
        {
            "perplexity": "e to the mean loss; the axis is logarithmic.",
            "mean": "Figures 2 and 4 of Baevski & Auli (2019).",
            "median": OUTLIERS,
        },
    ),
    "by_previous": (
        "by frequency of the {unit} before",
        {"mean": "Figures 3 and 5 of Baevski & Auli (2019).", "median": OUTLIERS},
    ),
    "difference": (
        "difference from the first run",
        {"mean": "Below 0 the run is better.", "median": "Figure 3 of Pappas et al. (2020)."},
    ),
}


def by_bins(statistic: str, figure: str, data: FigureData) -> Chart:
    """A figure of `BINNED` with one statistic: "mean", "median" or "perplexity". The label of a bin
    includes the number of the first run's words in it.
    """
    (title, notes), unit = BINNED[figure], data.unit
    name, ylabel, field, scaled = statistic.capitalize(), NATS.format(unit), statistic, float
    if statistic == "perplexity":
        ylabel, field, scaled = f"perplexity a {unit}", "mean", perplexity
    elif figure == "difference":
        ylabel = f"difference in {ylabel}"
    else:
        name += " loss"
    lines, tops = [], {}
    for run, bins in data.bins[figure].items():
        points = []
        for group in bins:
            value, interval = scaled(getattr(group, field)), getattr(group, f"{field}_interval")
            low, high = map(scaled, interval) if interval else (None, None)
            label = bin_label(group.least, group.most)
            points.append((label, value, low, high, group.words, group.least, group.most))
            tops.setdefault((group.least, label), group.words if not lines else 0)
        lines.append(Line(run, points))
    return Chart(
        f"{statistic}_{figure}",
        f"{name} {title}".format(unit=unit),
        notes[statistic].format(unit=unit),
        DIFFERENCE if figure == "difference" else BY_FREQUENCY,
        ("bin", statistic, "low", "high", "words", "least", "most"),
        lines,
        f"frequency in training; below, {unit}s of the text",
        ylabel,
        {label: f"{label}\n{short(words)}" for (_, label), words in sorted(tops.items())},
        log=statistic == "perplexity",
    )


def curves(data: FigureData) -> Chart:
    """Learning curves."""
    lines, late = [], []
    for run in data.runs:
        parts = {split: run.curve(split) for split in ("train", "validation")}
        last = max((step for curve in parts.values() for step, _ in curve), default=0)
        for split, curve in parts.items():
            points = [(step, loss, split) for step, loss in curve]
            lines += [Line(run.name, points, thin=split == "train")] if points else []
            late += [loss for step, loss in curve if step >= last / 10]
    limits = None
    if late:  # leave out the first losses, which would dwarf all others
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
        NATS.format(data.unit),
        limits=limits,
    )


def contexts(data: FigureData) -> Chart:
    """Perplexity by context, for runs with results of several contexts."""
    several = [run for run in data.runs if len({point[0] for point in run.contexts}) > 1]
    return Chart(
        "contexts",
        "Perplexity by context",
        "As Table 5 of Baevski & Auli (2019): number of tokens read before the scored ones.",
        TRAINING,
        ("context", "perplexity", "window"),
        [Line(run.name, run.contexts) for run in several],
        "tokens of context",
        "perplexity",
    )


FIGURES: list[Callable[[FigureData], Chart]] = [
    *(
        functools.partial(by_bins, statistic, figure)
        for figure, (_, notes) in BINNED.items()
        for statistic in notes
    ),
    curves,
    contexts,
]


def charts_of(data: FigureData) -> list[Chart]:
    """All figures that have something to draw."""
    return [chart for figure in FIGURES if (chart := figure(data)).lines]
