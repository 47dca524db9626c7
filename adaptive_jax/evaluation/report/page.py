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
from adaptive_jax.evaluation.report.frequency import short
from adaptive_jax.evaluation.report.passage import Token

STYLE = Path(__file__).with_name("style.css")
# No script and nothing from elsewhere, whatever text a page shows.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
SIGNS = dict(zip("osD^vPX*<>", "●■◆▲▼✚✖★◀▶", strict=True))
MOST_BITS, MOST_HEAT = 16, 0.6  # a token of so many bits or more is coloured so much
TWO_DIGITS = "{:.2f}".format
WORDS = "Run", "Input", "Body", "Output", "Reads"  # columns of words; all others are of numbers
PERPLEXITIES = "validation_perplexity", "perplexity"
# Columns of the table of runs, those first that a narrow page should show; {split} is that of the
# report.
COLUMNS = {
    "run": ("Run", str),
    "validation_perplexity": ("Valid", TWO_DIGITS),
    "perplexity": ("{split}", TWO_DIGITS),
    "published_validation_perplexity": ("Paper: valid", TWO_DIGITS),
    "published_perplexity": ("Paper: {split}", TWO_DIGITS),
    **{name.lower(): (name, str) for name in WORDS[1:]},
    "parameters": ("Parameters", short),
    "hours": ("Hours", lambda hours: f"{hours:.2f}" if hours >= 0.1 else f"{hours:.2g}"),
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
    columns = {
        key: how for key, how in COLUMNS.items() if any(line[key] is not None for line in lines)
    }
    rows, best = [], set()
    for line in lines:
        row = {}
        for key, (head, show) in columns.items():
            head, value = head.format(split=split.capitalize()), line[key]
            row[head] = "" if value is None else show(value)
            known = [other[key] for other in lines if other[key] is not None]
            if key in PERPLEXITIES and len(known) > 1 and value == min(known):
                best.add((len(rows), head))
        rows.append(row)
    return _table("Perplexity is per word of the text, <eos> included.", rows, best)


def chart_table(chart: Chart) -> str:
    """The values of a chart whose x are bins, a row for each run."""
    rows = []
    for line in chart.lines:
        values = {x: f"{y:.3f}" for x, y, *_ in line.points}
        rows.append({"Run": line.run} | {x: values.get(x, "") for x in chart.ticks})
    return _table(f"{chart.title}: {chart.ylabel}", rows)


def _table(caption, rows, best=()):
    """A table that scrolls sideways where the page is too narrow.

    best: cells that stand out, as row and column.
    """
    kinds = {column: ["words"] * (column in WORDS) for column in rows[0]}
    lines = [_cells("th", [(column, kind) for column, kind in kinds.items()])]
    for number, row in enumerate(rows):
        cells = [(row[c], kinds[c] + ["best"] * ((number, c) in best)) for c in kinds]
        lines.append(_cells("td", cells))
    head, *body = lines
    body = "\n".join(body)
    inner = f"<thead>{head}</thead>\n<tbody>\n{body}\n</tbody>"
    caption = f"<caption>{html.escape(caption)}</caption>"
    return f'<div class="wide" tabindex="0">\n<table>{caption}\n{inner}</table>\n</div>'


def _cells(tag, cells):
    scope, parts = ' scope="col"' if tag == "th" else "", []
    for text, kinds in cells:
        kind = f' class="{" ".join(kinds)}"' if kinds else ""
        parts.append(f"<{tag}{scope}{kind}>{html.escape(text)}</{tag}>")
    return f"<tr>{''.join(parts)}</tr>"


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
