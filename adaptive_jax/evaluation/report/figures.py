"""Figures of a report, drawn by matplotlib: as SVG in the colours of the page, and as PNG."""

import importlib.util
import io
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from adaptive_jax.errors import InputError
from adaptive_jax.evaluation.report.frequency import Bin, short
from adaptive_jax.evaluation.report.history import Context, Curves
from adaptive_jax.files import replacing

SIZE = 4.6, 3.3  # inches; text stays readable where a telephone shows it 370 pixels wide
LEGEND = 0.24  # inches more for a line of the legend in a PNG
MARKERS = "osD^vPX*<>"
COLOURS = 8  # that differ; further runs take them again, with other markers
# matplotlib writes these colours into the SVG, and the page's style sheet says what they are in the
# dark and in the light.
THEMED = {"#010100": "var(--ink)", "#010101": "var(--muted)", "#010102": "var(--grid)"}
THEMED |= {f"#0102{number:02x}": f"var(--run-{number})" for number in range(COLOURS)}
PRINTED = ("#0072b2", "#d55e00", "#00875f", "#b8478a", "#a06c00", "#0f8b96", "#6b4fbb", "#8b5a2b")
STYLE = {
    "font.size": 10,
    "axes.titlesize": 10,
    "legend.fontsize": 8.5,
    "svg.fonttype": "none",  # text stays text: it can be read out, searched and copied
    "text.parse_math": False,  # a dollar in a run's name is a dollar
    "axes.spines.top": False,
    "axes.spines.right": False,
    "savefig.dpi": 200,
}


class Palette(NamedTuple):
    """Colours of text and axes, of less important text, of the grid, and of runs."""

    ink: str
    muted: str
    grid: str
    runs: Sequence[str]


ON_PAGE, ON_PAPER = (
    Palette(*list(THEMED)[:3], list(THEMED)[3:]),
    Palette("#1b1b1b", "#666666", "#dddddd", PRINTED),
)


class Chart(NamedTuple):
    """A figure of the report.

    Attributes:
        name: of its files.
        title, note: what it shows.
        runs: names of the runs in it, and their numbers in the report, which choose colours and
            markers.
        draw: `draw(axes, look)`, where `look(run)` gives matplotlib the line and marker of a run.
    """

    name: str
    title: str
    note: str
    runs: Mapping[str, int]
    draw: Callable


def check_matplotlib() -> None:
    """Raises InputError where matplotlib is not installed."""
    if not importlib.util.find_spec("matplotlib"):
        raise InputError(
            "a report draws its figures with matplotlib, which is not installed: pip install"
            " matplotlib"
        )


def marker(number: int) -> str:
    """The marker of a run: no two of the first eighty have both its marker and its colour."""
    return MARKERS[(number + number // COLOURS) % len(MARKERS)]


def svg(chart: Chart) -> str:
    """The figure without a legend as an element `<svg>` in the page's colours."""
    buffer = io.StringIO()
    _draw(
        chart,
        ON_PAGE,
        legend=False,
        save=lambda figure: figure.savefig(
            buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None}
        ),
    )
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    # Identifiers are unique in a figure, and must be so in the page.
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{chart.name}-", text)
    text = re.sub(
        r'(<svg[^>]*?) width="[^"]*"',
        r"\1",
        re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1),
        count=1,
    )
    for colour, variable in THEMED.items():
        text = text.replace(colour, variable)
    return text.strip()


def write_png(chart: Chart, path: Path) -> None:
    """Writes the figure with its title and a legend."""
    with replacing(path) as file:
        _draw(
            chart,
            ON_PAPER,
            legend=True,
            save=lambda figure: figure.savefig(file, format="png", facecolor="white"),
        )


def _draw(chart, palette, legend, save):
    import matplotlib
    from matplotlib.figure import Figure

    ink = {
        key: palette.ink
        for key in ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    }
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # whatever the user's own settings
        matplotlib.rcParams.update(
            STYLE | ink | {"grid.color": palette.grid, "svg.hashsalt": chart.name}
        )
        lines = -(-len(chart.runs) // 2) if legend and len(chart.runs) > 1 else 0
        figure = Figure((SIZE[0], SIZE[1] + LEGEND * (lines + legend)), layout="constrained")
        axes = figure.subplots()
        axes.grid(axis="y", linewidth=0.8)
        axes.set_axisbelow(True)

        def look(run):
            number = chart.runs[run]
            return {
                "color": palette.runs[number % COLOURS],
                "marker": marker(number),
                "markersize": 4.5,
                "linewidth": 1.4,
            }

        chart.draw(axes, look)
        if legend:
            axes.set_title(chart.title)
        if lines:
            figure.legend(
                *axes.get_legend_handles_labels(),
                loc="outside lower center",
                ncols=2,
                frameon=False,
            )
        save(figure)


def by_bins(bins: Mapping[str, Sequence[Bin]], statistic: str, label: str) -> Callable:
    """Draws the means or medians of runs by bin of frequency, with intervals, and the words of the
    first run below each bin.

    statistic: "mean" or "median". label: of the axis of values.
    """
    tops = sorted({(each.least, each.label) for found in bins.values() for each in found})
    places = {top: place for place, top in enumerate(tops)}

    def draw(axes, look):
        first = {(each.least, each.label): each.words for each in next(iter(bins.values()))}
        for number, (run, found) in enumerate(bins.items()):
            shift = 0.05 * (number - (len(bins) - 1) / 2)
            x = [places[each.least, each.label] + shift for each in found]
            y = [getattr(each, statistic) for each in found]
            intervals = [
                getattr(each, f"{statistic}_interval") or (value, value)
                for each, value in zip(found, y, strict=True)
            ]
            below = [max(0.0, value - low) for value, (low, _) in zip(y, intervals, strict=True)]
            above = [max(0.0, high - value) for value, (_, high) in zip(y, intervals, strict=True)]
            axes.errorbar(
                x, y, yerr=(below, above), label=run, elinewidth=1, capsize=0, **look(run)
            )
        if any(
            value < 0
            for found in bins.values()
            for value in (getattr(each, statistic) for each in found)
        ):
            axes.axhline(0, color=axes.spines["bottom"].get_edgecolor(), linewidth=0.8)
        names = [f"{top[1]}\n{short(first.get(top, 0))}" for top in tops]
        axes.set_xticks(range(len(tops)), names)
        axes.set(
            xlabel="frequency in training; below, words of the text", ylabel=label, xmargin=0.05
        )

    return draw


def learning_curves(curves: Mapping[str, Curves]) -> Callable:
    """Draws validation losses, and losses of training as thin lines."""

    def draw(axes, look):
        seen = []
        for run, (train, validation) in curves.items():
            if train:
                thin = {"color": look(run)["color"], "linewidth": 0.8, "alpha": 0.5}
                axes.plot(*zip(*train, strict=True), label=None if validation else run, **thin)
            if validation:
                axes.plot(*zip(*validation, strict=True), label=run, **look(run))
            last = max(step for step, _ in (*train, *validation))
            seen += [loss for step, loss in (*train, *validation) if step >= last / 10]
        room = 0.05 * (max(seen) - min(seen)) + 0.01
        # The first losses would press all others together.
        axes.set_ylim(min(seen) - room, max(seen) + room)
        axes.set(xlabel="updates", ylabel="loss, nats a word")
        axes.xaxis.set_major_formatter(lambda value, _: short(round(value)))
        axes.locator_params(axis="x", nbins=6)

    return draw


def by_context(contexts: Mapping[str, Sequence[Context]]) -> Callable:
    """Draws perplexity against tokens of context."""

    def draw(axes, look):
        for run, found in contexts.items():
            axes.plot(
                [each.context for each in found],
                [each.perplexity for each in found],
                label=run,
                **look(run),
            )
        axes.set(xlabel="tokens of context", ylabel="perplexity")

    return draw
