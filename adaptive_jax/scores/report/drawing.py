"""Draws charts with matplotlib: as PNG, as PDF, and as SVG in the colours of the page."""

import io
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from adaptive_jax.errors import of_extra
from adaptive_jax.files import replacing
from adaptive_jax.scores.frequency import short
from adaptive_jax.scores.report.charts import Chart

SIZE = 4.6, 3.3  # inches; text stays readable on a telephone, 370 pixels wide
LEGEND = 0.24  # additional inches for a line of the legend
MARKERS = "osD^vPX*<>"
# Colours of the runs, which repeat with other markers and dashes
COLOURS = ("#0072b2", "#d55e00", "#00875f", "#b8478a", "#a06c00", "#0f8b96", "#6b4fbb", "#8b5a2b")
DASHES = "-", "--", ":", "-."
INK, GRID = "#1b1b1b", "#dddddd"
# The style sheet defines these variables for light and dark mode.
VARIABLES = {INK: "var(--ink)", GRID: "var(--grid)"}
VARIABLES |= {colour: f"var(--run-{number})" for number, colour in enumerate(COLOURS)}
STYLE = {
    "font.size": 10,
    "axes.titlesize": 10,
    "legend.fontsize": 9,
    "pdf.fonttype": 42,  # TrueType, which publishers ask for
    "svg.fonttype": "none",  # keep text as text, to be searched, copied and read by screen readers
    "text.parse_math": False,  # a dollar in a run's name is literal
    "axes.spines.top": False,
    "axes.spines.right": False,
    "savefig.dpi": 200,
    "grid.color": GRID,
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK
    ),
}


def line_style(number: int) -> dict[str, str]:
    """Style of the line of a run: the first eighty differ in marker or colour.

    number: index of the run in the report.
    """
    turn = number // len(COLOURS)
    return {
        "color": COLOURS[number % len(COLOURS)],
        "marker": MARKERS[(number + turn) % len(MARKERS)],
        "linestyle": DASHES[turn % len(DASHES)],
    }


def draw(chart: Chart, numbers: Mapping[str, int], png: Path) -> str:
    """Writes a figure as PNG and, beside it, as PDF, and returns it as an element `<svg>` in the
    page's colours.

    numbers: index of each run in the report, which determines its style.
    """
    with of_extra("figures"):
        import matplotlib
        from matplotlib.figure import Figure
    text = io.StringIO()
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # independent of the user's settings
        matplotlib.rcParams.update(STYLE | {"svg.hashsalt": chart.name})
        runs = {line.run for line in chart.lines}
        rows = -(-len(runs) // 2) if len(numbers) > 1 else 0
        figure = Figure((SIZE[0], SIZE[1] + LEGEND * rows), layout="constrained")
        axes = figure.subplots()
        for order, line in enumerate(chart.lines):
            shift = 0.05 * (order - (len(chart.lines) - 1) / 2)
            _draw_line(axes, chart, line, line_style(numbers[line.run]), shift)
        _draw_axes(axes, chart)
        if rows:
            handles, labels = axes.get_legend_handles_labels()
            handles = dict(zip(labels, handles, strict=True))  # one per run
            place = {"loc": "outside lower center", "ncols": 2, "frameon": False}
            figure.legend(handles.values(), handles, **place)
        for form, dates in ("png", {}), ("pdf", {"CreationDate": None}):
            with replacing(png.with_suffix(f".{form}")) as file:
                figure.savefig(file, format=form, facecolor="white", metadata=dates)
        metadata = {"Date": None, "Creator": None}
        figure.savefig(text, format="svg", transparent=True, metadata=metadata)
    return _for_page(text.getvalue(), chart)


def _for_page(text, chart):
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    # Identifiers that are unique in a figure must be unique in the page.
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{chart.name}-", text)
    for size in "height", "width":
        text = re.sub(rf'(<svg[^>]*?) {size}="[^"]*"', r"\1", text, count=1)
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, variable)
    return text.strip()


def _draw_line(axes, chart, line, style, shift):
    columns = dict(zip(chart.columns, zip(*line.points, strict=True), strict=True))
    x, y = (columns[name] for name in chart.columns[:2])
    if chart.ticks:
        places = list(chart.ticks)
        x = [places.index(label) + shift for label in x]
    style = style | {"markersize": 4.5, "linewidth": 1.4, "label": _label(line.run)}
    if line.thin:
        style |= {"marker": "", "linewidth": 0.8, "alpha": 0.5}
    if "low" not in columns:
        axes.plot(x, y, **style)
        return
    # None, where there is no interval, becomes NaN.
    low, high = np.array([columns["low"], columns["high"]], float)
    errors = np.nan_to_num(np.maximum(0.0, [y - low, high - y]))
    axes.errorbar(x, y, yerr=errors, elinewidth=1, capsize=0, **style)


def _label(run):
    """The name of a run; matplotlib's legends omit labels that begin with an underscore."""
    return f" {run}" if run.startswith("_") else run


def _draw_axes(axes, chart):
    axes.grid(axis="y", linewidth=0.8)
    axes.set_axisbelow(True)
    if any(point[1] < 0 for line in chart.lines for point in line.points):
        axes.axhline(0, color=INK, linewidth=0.8)
    if chart.limits:
        axes.set_ylim(chart.limits)
    if chart.log:
        values = [point[1] for line in chart.lines for point in line.points]
        ratio = max(values) / min(values)
        axes.set_yscale("log", subs=[])
        digits = range(1, 10) if ratio < 10 else (1, 2, 5) if ratio < 1e4 else (1,)
        axes.yaxis.get_major_locator().set_params(subs=digits)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    if chart.ticks:
        size = 9 if len(chart.ticks) < 6 else 8 if len(chart.ticks) < 8 else 7
        axes.set_xticks(range(len(chart.ticks)), chart.ticks.values(), fontsize=size)
    else:
        axes.xaxis.set_major_formatter(lambda value, _: short(round(value)))
        axes.locator_params(axis="x", nbins=6, integer=True)
    axes.set(title=chart.title, xlabel=chart.xlabel, ylabel=chart.ylabel, xmargin=0.05)
