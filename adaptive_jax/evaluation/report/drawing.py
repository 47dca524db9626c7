"""Draws charts by matplotlib: as SVG in the colours of the page, and as PNG."""

import contextlib
import importlib.util
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from adaptive_jax.errors import InputError
from adaptive_jax.evaluation.report.charts import Chart
from adaptive_jax.evaluation.report.frequency import short
from adaptive_jax.files import replacing

SIZE = 4.6, 3.3  # inches; text stays readable where a telephone shows it 370 pixels wide
LEGEND = 0.24  # inches more for a line of the legend in a PNG
MARKERS = "osD^vPX*<>"
COLOURS = 8  # that differ; further runs take them again, with other markers and dashes
DASHES = "-", "--", ":", "-."
# matplotlib writes these colours into the SVG, and the page's style sheet says what they are in the
# dark and in the light.
THEMED = {"#010100": "var(--ink)", "#010102": "var(--grid)"}
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
    """Colours of text and axes, of the grid, and of runs."""

    ink: str
    grid: str
    runs: Sequence[str]


ON_PAGE = Palette(*list(THEMED)[:2], list(THEMED)[2:])
ON_PAPER = Palette("#1b1b1b", "#dddddd", PRINTED)


def check_matplotlib() -> None:
    """Raises InputError where matplotlib is not installed."""
    if not importlib.util.find_spec("matplotlib"):
        raise InputError(
            "a report draws its figures with matplotlib, which is not installed: pip install"
            " 'matplotlib>=3.9'"
        )


def marker(number: int) -> str:
    """The marker of a run: no two of the first eighty have both its marker and its colour."""
    return MARKERS[(number + number // COLOURS) % len(MARKERS)]


def svg(chart: Chart, numbers: Mapping[str, int]) -> str:
    """The figure without a legend as an element `<svg>` in the page's colours.

    numbers: of the runs in the report, which choose their colours and markers.
    """
    file, metadata = io.StringIO(), {"Date": None, "Creator": None}
    with _drawn(chart, numbers, ON_PAGE, legend=False) as figure:
        figure.savefig(file, format="svg", transparent=True, metadata=metadata)
    text = file.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    # Identifiers are unique in a figure, and must be so in the page.
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{chart.name}-", text)
    for size in "height", "width":
        text = re.sub(rf'(<svg[^>]*?) {size}="[^"]*"', r"\1", text, count=1)
    for colour, variable in THEMED.items():
        text = text.replace(colour, variable)
    return text.strip()


def write_png(chart: Chart, numbers: Mapping[str, int], path: Path) -> None:
    """Writes the figure with its title and a legend."""
    with replacing(path) as file, _drawn(chart, numbers, ON_PAPER, legend=True) as figure:
        figure.savefig(file, format="png", facecolor="white")


@contextlib.contextmanager
def _drawn(chart, numbers, palette, legend):
    """A `matplotlib.figure.Figure`, to be saved under the settings that it was drawn with."""
    import matplotlib
    from matplotlib.figure import Figure

    names = "text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"
    settings = STYLE | dict.fromkeys(names, palette.ink)
    settings |= {"grid.color": palette.grid, "svg.hashsalt": chart.name}
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # whatever the user's own settings
        matplotlib.rcParams.update(settings)
        runs = {line.run for line in chart.lines}
        rows = -(-len(runs) // 2) if legend and len(runs) > 1 else 0
        figure = Figure((SIZE[0], SIZE[1] + LEGEND * (rows + legend)), layout="constrained")
        axes = figure.subplots()
        axes.grid(axis="y", linewidth=0.8)
        axes.set_axisbelow(True)
        for order, line in enumerate(chart.lines):
            number = numbers[line.run]
            shift = 0.05 * (order - (len(chart.lines) - 1) / 2)
            look = {"color": palette.runs[number % COLOURS], "marker": marker(number)}
            look["linestyle"] = DASHES[number // COLOURS % len(DASHES)]
            _draw_line(axes, chart, line, look, shift)
        _draw_axes(axes, chart)
        if legend:
            axes.set_title(chart.title)
        if rows:
            handles = axes.get_legend_handles_labels()
            figure.legend(*handles, loc="outside lower center", ncols=2, frameon=False)
        yield figure


def _draw_line(axes, chart, line, look, shift):
    columns = dict(zip(chart.columns, zip(*line.points, strict=True), strict=True))
    x, y = (columns[name] for name in chart.columns[:2])
    if chart.ticks:
        places = list(chart.ticks)
        x = [places.index(label) + shift for label in x]
    if line.thin:
        alone = all(other.thin for other in chart.lines if other.run == line.run)
        label = line.run if alone else None
        look = look | {"marker": "", "label": label, "linewidth": 0.8, "alpha": 0.5}
        axes.plot(x, y, **look)
        return
    look = look | {"markersize": 4.5, "linewidth": 1.4, "label": line.run}
    if "low" not in columns:
        axes.plot(x, y, **look)
        return
    below = [max(0.0, value - low) for value, low in zip(y, columns["low"], strict=True)]
    above = [max(0.0, high - value) for value, high in zip(y, columns["high"], strict=True)]
    axes.errorbar(x, y, yerr=(below, above), elinewidth=1, capsize=0, **look)


def _draw_axes(axes, chart):
    if any(point[1] < 0 for line in chart.lines for point in line.points):
        axes.axhline(0, color=axes.spines["bottom"].get_edgecolor(), linewidth=0.8)
    if chart.limits:
        axes.set_ylim(chart.limits)
    if chart.ticks:
        axes.set_xticks(range(len(chart.ticks)), chart.ticks.values())
    else:
        axes.xaxis.set_major_formatter(lambda value, _: short(round(value)))
        axes.locator_params(axis="x", nbins=6)
    axes.set(xlabel=chart.xlabel, ylabel=chart.ylabel, xmargin=0.05)
