"""The page of a report: one HTML file that needs no network and no script. All text from runs
is escaped.
"""

import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from adaptive_jax.evaluation.report.charts import Chart
from adaptive_jax.evaluation.report.drawing import COLOURS, marker, svg
from adaptive_jax.evaluation.report.passage import Token

STYLE = Path(__file__).with_name("style.css")
# No script and nothing from elsewhere, whatever text a page shows.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
SIGNS = dict(zip("osD^vPX*<>", "●■◆▲▼✚✖★◀▶", strict=True))
MOST_BITS, MOST_HEAT = 16, 0.6  # a token of so many bits or more is coloured so much
MILLIONS = lambda number: f"{number / 1e6:.1f}M"
TWO_DIGITS = "{:.2f}".format
# Columns of the table of runs that hold numbers; {split} is that of the report.
NUMBERS = {
    "validation_perplexity": ("Valid", TWO_DIGITS),
    "perplexity": ("{split}", TWO_DIGITS),
    "published_validation_perplexity": ("Paper: valid", TWO_DIGITS),
    "published_perplexity": ("Paper: {split}", TWO_DIGITS),
    "parameters": ("Parameters", MILLIONS),
    "hours": ("Hours", TWO_DIGITS),
    "words_per_second": ("Words/s", "{:,.0f}".format),
    "unknown": ("<unk>", "{:.1%}".format),
    "updates": ("Updates", "{:,}".format),
}


class Section(NamedTuple):
    """A part of the page: a title, a sentence or two, and what follows them, as HTML."""

    title: str
    text: str
    content: str


def page(title: str, subtitle: str, sections: Sequence[Section], footer: str) -> str:
    """The whole file. title, subtitle and footer are texts."""
    parts = [f"<h1>{html.escape(title)}</h1>", f'<p class="muted">{html.escape(subtitle)}</p>']
    for each in sections:
        parts += [
            f"<h2>{html.escape(each.title)}</h2>",
            f"<p>{html.escape(each.text)}</p>" if each.text else "",
            each.content,
        ]
    content = "\n".join(part for part in parts if part)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<link rel="icon" href="data:,">
<title>{html.escape(title)}</title>
<style>
{STYLE.read_text(encoding="utf-8")}</style>
</head>
<body>
<main>
{content}
<footer class="muted">{html.escape(footer)}</footer>
</main>
</body>
</html>
"""


def figures(charts: Sequence[Chart], numbers: Mapping[str, int]) -> str:
    """Figures side by side, each with its title, its legend and a note.

    numbers: of the runs in the report, which choose their colours and markers.
    """
    drawn = []
    for chart in charts:
        title, runs = html.escape(chart.title), dict.fromkeys(line.run for line in chart.lines)
        picture = svg(chart, numbers).replace("<svg", f'<svg role="img" aria-label="{title}"', 1)
        keys = "".join(
            f'<li><span class="key" style="color: var(--run-{numbers[run] % COLOURS})">'
            f"{SIGNS[marker(numbers[run])]}</span>{html.escape(run)}</li>"
            for run in runs
        )
        legend = f'<ul class="legend">{keys}</ul>' if len(runs) > 1 else ""
        head = f"<figcaption><b>{title}</b> {html.escape(chart.note)}</figcaption>"
        drawn.append(f"<figure>\n{head}\n{legend}\n{picture}\n</figure>")
    return '<div class="figures">\n' + "\n".join(drawn) + "\n</div>"


def runs_table(lines: Sequence[Mapping], split: str) -> str:
    """What Table 3 of Baevski & Auli (2019) says of each model, ours in rows; the best
    perplexities stand out. lines: `RunReport.about` of each run.
    """
    words = list(lines[0])[:5]
    shown = {
        key: how for key, how in NUMBERS.items() if any(line[key] is not None for line in lines)
    }
    heads = [column.format(split=split.capitalize()) for column, _ in shown.values()]
    best = {
        key: min(line[key] for line in lines if line[key] is not None)
        for key in ("validation_perplexity", "perplexity")
        if sum(line[key] is not None for line in lines) > 1
    }
    rows = []
    for line in lines:
        cells = [_cell(line[key], "words") for key in words]
        for key, (_, show) in shown.items():
            value = line[key]
            kind = "best" if key in best and value == best[key] else ""
            cells.append(_cell("" if value is None else show(value), kind))
        rows.append(cells)
    caption = "Perplexity is per word of the text, <eos> included."
    return _table(caption, [key.capitalize() for key in words], heads, rows)


def chart_table(chart: Chart) -> str:
    """The values of a chart whose x are bins, a row for each run."""
    rows = []
    for line in chart.lines:
        values = {x: f"{y:.3f}" for x, y, *_ in line.points}
        rows.append([_cell(line.run, "words"), *(_cell(values.get(x, "")) for x in chart.ticks)])
    return _table(f"{chart.title}: {chart.ylabel}", ["Run"], list(chart.ticks), rows)


def _table(caption, words, numbers, rows):
    """A table that scrolls sideways where the page is too narrow; the first columns hold words."""
    head = "".join(
        f'<th scope="col"{kind}>{html.escape(column)}</th>'
        for columns, kind in ((words, ' class="words"'), (numbers, ""))
        for column in columns
    )
    body = "\n".join(f"<tr>{''.join(cells)}</tr>" for cells in rows)
    inner = (
        f"<caption>{html.escape(caption)}</caption>\n<thead><tr>{head}</tr></thead>\n"
        f"<tbody>\n{body}\n</tbody>"
    )
    return f'<div class="wide" tabindex="0">\n<table>{inner}</table>\n</div>'


def _cell(text, kind=""):
    return (
        f'<td class="{kind}">{html.escape(text)}</td>' if kind else f"<td>{html.escape(text)}</td>"
    )


def folded(title: str, content: str, shown: bool = False) -> str:
    """Content that a reader can open and close."""
    tag = "<details open>" if shown else "<details>"
    return f"{tag}<summary>{html.escape(title)}</summary>\n{content}\n</details>"


def sample(tokens: Sequence[Token]) -> str:
    """A passage whose tokens are coloured by surprisal; pointing at one, or tapping it, shows
    what the model expected.
    """
    return f'<div class="sample">{"".join(map(_token, tokens))}</div>'


def scale() -> str:
    """The colours of a passage, explained."""
    return f'<p class="muted">0 bits <span class="scale"></span> {MOST_BITS} bits or more</p>'


def _token(token):
    text = f"<bdi>{html.escape(token.text)}</bdi>"
    shown = '<span class="end">↵</span>' if token.line_end else text
    after = "<br>\n" if token.line_end else "" if token.joined else " "
    if math.isnan(token.bits):
        return shown + after
    heat = MOST_HEAT * min(1.0, token.bits / MOST_BITS)
    likely = "".join(
        f"<span><bdi>{html.escape(other)}</bdi> <i>{probability:.1%}</i></span> "
        for other, probability in token.expected
    )
    about = (
        f"<b>{text}</b> {token.bits:.1f} bits, probability {2**-token.bits:.2%}, rank"
        f" {token.rank:,}; {token.count:,} times in training. Entropy {token.entropy:.1f} bits."
    )
    more = f'<span class="more">{about}<span class="likely">{likely}</span></span>'
    style = f"--heat-share: {heat:.3f}"
    return f'<span class="token" tabindex="0" style="{style}">{shown}{more}</span>{after}'
