"""Figures of RESULTS.md, drawn from the numbers that lie beside them as JSON.

    python -m benchmarks.figures [NAME...]

`benchmarks.tables`, `outputs`, `ngrams` and `train_time` write NAME.json and draw NAME.png. A
figure of a table has a panel of test perplexity for each corpus, with a line for each row of the
table and, where there are, the published numbers beside ours; then curves of the losses by updates,
where the JSON has them. Times are in the tables alone: other work ran beside most of them.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from adaptive_jax.config import commands
from adaptive_jax.errors import check_known
from adaptive_jax.runs.settings import write_json
from adaptive_jax.scores.report.drawing import line_style

HERE = Path(__file__).parent
DOT, LINE = 0.26, 1.4  # inches of a row of dots, and of all that stands around them
GRAPH = 3.4  # inches of a panel of curves


def write(path: Path, numbers: Mapping) -> None:
    """Writes the numbers of a figure, and draws it beside them as PNG.

    path: of the JSON. numbers: `kind`, "table" or "growth", and what `table` or `growth` reads.
    """
    write_json(path, dict(numbers))
    draw(path)


def draw(path: Path) -> None:
    """Draws the figure of a JSON file as PNG beside it."""
    numbers = json.loads(path.read_text())
    figure = {"table": table, "growth": growth}[numbers["kind"]](numbers)
    figure.savefig(path.with_suffix(".png"), dpi=110)


def table(numbers: Mapping):
    """Test perplexities of a table, and losses where there are any.

    numbers: `title`; `measure`, what the dots are; `by`, what the curves are by; and `rows`, each
        with its `corpus`, its name `row`, `value` (None of a run that diverged), the published
        number `paper` or None, and `losses`, pairs of a number of updates and a loss.
    """
    from matplotlib.figure import Figure

    corpora = {}
    for row in numbers["rows"]:
        corpora.setdefault(row["corpus"], []).append(row)
    several = {
        name: [row for row in rows if len(row.get("losses", ())) > 1]
        for name, rows in corpora.items()
    }
    published = any(row["paper"] is not None for row in numbers["rows"])
    columns = 1 + published + any(several.values())
    sizes = [
        max(LINE + DOT * len(rows), GRAPH * bool(several[name])) for name, rows in corpora.items()
    ]
    figure = Figure((3.2 + 3.4 * columns, sum(sizes) + 0.3), layout="constrained")
    figure.suptitle(numbers["title"], fontsize=11)
    grid = figure.subplots(len(corpora), columns, squeeze=False, height_ratios=sizes)
    for (name, rows), axes in zip(corpora.items(), grid, strict=True):
        dots(axes[0], rows, "value", f"ours, {name}: {numbers['measure']}")
        if published:
            dots(axes[1], rows, "paper", "published", labels=False)
        if any(several.values()):
            curves(axes[-1], rows, several[name], numbers["by"])
    return figure


def dots(axes, rows: Sequence[Mapping], key: str, xlabel: str, labels: bool = True) -> None:
    """A dot for each row that has a number, the first row at the top."""
    for number, row in enumerate(rows):
        if row[key] is not None:
            axes.plot(
                row[key], number, **line_style(number) | {"linestyle": "none", "markersize": 6}
            )
        elif key == "value":
            axes.text(0.02, number, "diverged", transform=axes.get_yaxis_transform(), va="center")
    axes.set(xlabel=xlabel, xmargin=0.08, ylim=(len(rows) - 0.5, -0.5))
    names = [row["row"] for row in rows] if labels else [""] * len(rows)
    axes.set_yticks(range(len(rows)), names, fontsize=9)
    axes.grid(alpha=0.3)


def curves(axes, rows, drawn, by: str) -> None:
    """Losses by updates; the dots beside have the same colours and markers."""
    for row in drawn:
        steps, losses = zip(*row["losses"], strict=True)
        axes.plot(
            steps, losses, **line_style(rows.index(row)) | {"markersize": 4, "linewidth": 1.2}
        )
    axes.set(xlabel=by, ylabel="loss, nats a word")
    axes.grid(alpha=0.3)


def growth(numbers: Mapping):
    """Time and memory of output layers against the size of the vocabulary.

    numbers: `title`, and `rows`, each with `vocabulary`, the `peer`, `times_smallest` and
        `megabytes`, None where it was not measured.
    """
    from matplotlib.figure import Figure

    figure, rows = Figure((11, 4.2), layout="constrained"), numbers["rows"]
    figure.suptitle(numbers["title"], fontsize=10)
    time_axes, memory_axes = figure.subplots(1, 2)
    for number, peer in enumerate(dict.fromkeys(row["peer"] for row in rows)):
        of_peer = [row for row in rows if row["peer"] == peer]
        # Peers that make the same arrays need the same memory: a later line is broken and hollow.
        style = line_style(number) | {"linewidth": 1.6, "markersize": 7, "label": peer}
        style |= {"linestyle": ("-", "--")[number % 2], "fillstyle": ("full", "none")[number % 2]}
        for axes, key in (time_axes, "times_smallest"), (memory_axes, "megabytes"):
            points = [(row["vocabulary"], row[key]) for row in of_peer if row[key] is not None]
            axes.plot(*zip(*points, strict=True), **style)
    unit = f"time (1: {rows[0]['peer']} at {rows[0]['vocabulary']:,} words)"
    for axes, ylabel in (time_axes, unit), (memory_axes, "memory, MB"):
        axes.set(xscale="log", yscale="log", xlabel="words in the vocabulary", ylabel=ylabel)
        axes.grid(alpha=0.3)
    handles = time_axes.get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=4, frameon=False)
    return figure


def main(*names: str) -> None:
    """Draws the named figures, or all that have their numbers here."""
    paths = {path.stem: path for path in sorted(HERE.glob("*.json"))}
    figures = {name: path for name, path in paths.items() if "kind" in json.loads(path.read_text())}
    for name in names:
        check_known(f"NAME={name}", name, figures)
    for name in names or figures:
        draw(figures[name])
        print(figures[name].with_suffix(".png").name)


if __name__ == "__main__":
    commands.run(main, positional=["[NAME...]"])
