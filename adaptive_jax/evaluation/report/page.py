"""The page of a report: one HTML file that needs no network and no script. All text from runs
is escaped.
"""

import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from adaptive_jax.evaluation.report.figures import COLOURS, Chart, marker, svg
from adaptive_jax.evaluation.report.sample import Token

STYLE = Path(__file__).with_name("style.css")
# No script and nothing from elsewhere, whatever text a page shows.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
SIGNS = dict(zip("osD^vPX*<>", "●■◆▲▼✚✖★◀▶", strict=True))
MOST_BITS, MOST_HEAT = 16, 0.6  # a token of so many bits or more is coloured so much


class Table(NamedTuple):
    """A table of texts.

    words: columns from the left that hold words; the others hold numbers.
    best: for columns in which one value is best, its row.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int = 1
    best: Mapping[int, int] = {}


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


def figures(charts: Sequence[Chart]) -> str:
    """Figures side by side, each with its title, its legend and a note."""
    drawn = "\n".join(map(_figure, charts))
    return f'<div class="figures">\n{drawn}\n</div>'


def _figure(chart):
    several = len(chart.runs) > 1
    drawn = svg(chart).replace(
        "<svg", f'<svg role="img" aria-label="{html.escape(chart.title)}"', 1
    )
    head = f"<figcaption><b>{html.escape(chart.title)}</b> {html.escape(chart.note)}</figcaption>"
    return f"<figure>\n{head}\n{_legend(chart.runs) if several else ''}\n{drawn}\n</figure>"


def _legend(runs):
    keys = (
        '<li><span class="key" style="color:'
        f' var(--run-{number % COLOURS})">{SIGNS[marker(number)]}</span>{html.escape(run)}</li>'
        for run, number in runs.items()
    )
    return f'<ul class="legend">{"".join(keys)}</ul>'


def table(given: Table) -> str:
    """A table that scrolls sideways where the page is too narrow."""
    head = "".join(
        f'<th scope="col"{_kind(given, number)}>{html.escape(column)}</th>'
        for number, column in enumerate(given.columns)
    )
    lines = [_line(given, number, row) for number, row in enumerate(given.rows)]
    caption = f"<caption>{html.escape(given.title)}</caption>" if given.title else ""
    body = "\n".join(lines)
    inner = f"{caption}\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>"
    return f'<div class="wide" tabindex="0">\n<table>{inner}</table>\n</div>'


def _kind(given, column, best=False):
    """The class of a cell."""
    kinds = ["words"] * (column < given.words) + ["best"] * best
    return f' class="{" ".join(kinds)}"' if kinds else ""


def _line(given, number, row):
    kinds = (_kind(given, column, given.best.get(column) == number) for column in range(len(row)))
    cells = zip(kinds, row, strict=True)
    return f"<tr>{''.join(f'<td{kind}>{html.escape(cell)}</td>' for kind, cell in cells)}</tr>"


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
    shown = (
        '<span class="end">↵</span>' if token.line_end else f"<bdi>{html.escape(token.text)}</bdi>"
    )
    after = "<br>\n" if token.line_end else "" if token.joined else " "
    if math.isnan(token.bits):
        return shown + after
    heat = MOST_HEAT * min(1.0, token.bits / MOST_BITS)
    likely = "".join(
        f"<span><bdi>{html.escape(text)}</bdi> <i>{chance:.1%}</i></span> "
        for text, chance in token.expected
    )
    about = (
        f"<b><bdi>{html.escape(token.text)}</bdi></b> {token.bits:.1f} bits, probability"
        f" {2**-token.bits:.2%}, rank {token.rank:,}; {token.count:,} times in training. Entropy"
        f" {token.entropy:.1f} bits."
    )
    more = f'<span class="more">{about}<span class="likely">{likely}</span></span>'
    return (
        '<span class="token" tabindex="0" style="--heat-share:'
        f' {heat:.3f}">{shown}{more}</span>{after}'
    )
