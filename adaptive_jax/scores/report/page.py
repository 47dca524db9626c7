"""The page of a report: one HTML file without scripts or external resources. All text from runs is
escaped.
"""

import html
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from adaptive_jax.scores.frequency import short
from adaptive_jax.scores.report.charts import Chart
from adaptive_jax.scores.report.passage import Token
from adaptive_jax.scores.scores import perplexity_text

STYLE = Path(__file__).with_name("style.css")
# Allows no script and no external resource, whatever text a page shows
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
MOST_BITS, MOST_HEAT = 16, 0.6  # surprisal of the strongest colour, and its opacity
PERPLEXITIES = "validation_perplexity", "perplexity"
# Heads and formats of the columns of the table of runs, the most important first. Those that `str`
# formats hold words, the others numbers. {split} and {unit} are those of the report.
COLUMNS = {
    "run": ("Run", str),
    "validation_perplexity": ("Valid", perplexity_text),
    "perplexity": ("{split}", perplexity_text),
    "bits_per_character": ("Bits/char", "{:.3f}".format),
    "published_validation_perplexity": ("Paper: valid", perplexity_text),
    "published_perplexity": ("Paper: {split}", perplexity_text),
    **{name.lower(): (name, str) for name in ("Input", "Body", "Output", "Reads")},
    "parameters": ("Parameters", short),
    "hours": ("Hours", lambda hours: f"{hours:.2f}" if hours >= 0.1 else f"{hours:.2g}"),
    "words_per_second": ("{unit}s/s", "{:,.0f}".format),
    "unknown": ("<unk>", "{:.1%}".format),
    "updates": ("Updates", "{:,}".format),
}


class Section(NamedTuple):
    """A part of the page: a title, a short text, and the content as HTML."""

    title: str
    text: str
    content: str


def page(title: str, subtitle: str, sections: Sequence[Section], footer: str) -> str:
    """The HTML file. title, subtitle and footer are plain text."""
    parts = [f"<h1>{html.escape(title)}</h1>", f'<p class="muted">{html.escape(subtitle)}</p>']
    for section in sections:
        parts += [
            f"<h2>{html.escape(section.title)}</h2>",
            f"<p>{html.escape(section.text)}</p>" if section.text else "",
            section.content,
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


def figures(drawn: Sequence[tuple[Chart, str]]) -> str:
    """Figures side by side, each a chart and its `<svg>`, with a note."""
    parts = []
    for chart, svg in drawn:
        picture = svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(chart.title)}"', 1)
        note = html.escape(chart.note)
        parts.append(f"<figure>\n{picture}\n<figcaption>{note}</figcaption>\n</figure>")
    return '<div class="figures">\n' + "\n".join(parts) + "\n</div>"


class Table(NamedTuple):
    """A table of formatted cells.

    Attributes:
        heads: of the columns.
        kinds: of the columns: " words", or "" for numbers.
        rows: the cells of each row.
        best: (row, column) of the cells to highlight.
    """

    heads: list[str]
    kinds: list[str]
    rows: list[list[str]]
    best: set[tuple[int, int]] = set()


def table_of_runs(lines: Sequence[Mapping], split: str, unit: str) -> Table:
    """The table of runs, with the columns of Table 3 of Baevski & Auli (2019); the best
    perplexities are highlighted.

    lines: `RunReport.about` of each run. unit: what perplexity is per, "word" or "token".
    """
    values = {key: [line[key] for line in lines if line[key] is not None] for key in COLUMNS}
    columns = [key for key in COLUMNS if values[key]]
    names = {"split": split.capitalize(), "unit": unit.capitalize()}
    rows = [
        ["" if line[key] is None else COLUMNS[key][1](line[key]) for key in columns]
        for line in lines
    ]
    return Table(
        [COLUMNS[key][0].format_map(names) for key in columns],
        [" words" * (COLUMNS[key][1] is str) for key in columns],
        rows,
        {
            (row, column)
            for column, key in enumerate(columns)
            for row, line in enumerate(lines)
            if key in PERPLEXITIES and len(values[key]) > 1 and line[key] == min(values[key])
        },
    )


def runs_table(table: Table, unit: str) -> str:
    """The table of runs as HTML, which scrolls sideways if the page is too narrow."""
    rows = [[_cell("th", *pair) for pair in zip(table.heads, table.kinds, strict=True)]]
    for i, row in enumerate(table.rows):
        kinds = [kind + " best" * ((i, j) in table.best) for j, kind in enumerate(table.kinds)]
        rows.append([_cell("td", *pair) for pair in zip(row, kinds, strict=True)])
    head, *body = [f"<tr>{''.join(row)}</tr>" for row in rows]
    caption = f"<caption>Perplexity is per {unit} of the text, &lt;eos&gt; included.</caption>"
    inner = f"<thead>{head}</thead>\n<tbody>\n" + "\n".join(body) + "\n</tbody>"
    return f'<div class="wide" tabindex="0">\n<table>{caption}\n{inner}</table>\n</div>'


def markdown(table: Table) -> str:
    """The table in Markdown."""
    rule = ["---" if kind else "---:" for kind in table.kinds]
    rows = [[cell.replace("|", r"\|") for cell in row] for row in (table.heads, *table.rows)]
    return "".join(f"| {' | '.join(row)} |\n" for row in (rows[0], rule, *rows[1:]))


def latex(table: Table) -> str:
    """The table as a `tabular` of the package booktabs, the best perplexities bold."""
    rows = [
        [_latex(cell, (i, j) in table.best) for j, cell in enumerate(row)]
        for i, row in enumerate((table.heads, *table.rows), start=-1)
    ]
    head, *body = [" & ".join(row) + r" \\" for row in rows]
    columns = "".join("l" if kind else "r" for kind in table.kinds)
    parts = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", head, r"\midrule", *body]
    return "\n".join([*parts, r"\bottomrule", r"\end{tabular}", ""])


def _latex(text, bold):
    text = re.sub(r"([&%$#_{}])", r"\\\1", text.replace("\\", "/"))
    for sign, command in ("~", "asciitilde"), ("^", "asciicircum"), ("<", "less"), (">", "greater"):
        text = text.replace(sign, rf"\text{command}{{}}")
    return rf"\textbf{{{text}}}" if bold else text


def _cell(tag, text, kind):
    scope = ' scope="col"' if tag == "th" else ""
    kind = f' class="{kind.strip()}"' if kind else ""
    return f"<{tag}{scope}{kind}>{html.escape(text)}</{tag}>"


def passages(tokens: Mapping[str, Sequence[Token]]) -> str:
    """A passage for each run, which a reader can open and close; the first one is open."""
    scale = f'<p class="muted">0 bits <span class="scale"></span> {MOST_BITS} bits or more</p>'
    parts = [
        f"<details><summary>{html.escape(name)}</summary>\n{sample(passage)}\n</details>"
        for name, passage in tokens.items()
    ]
    return "\n".join([scale, *parts]).replace("<details>", "<details open>", 1)


def sample(tokens: Sequence[Token]) -> str:
    """A passage whose tokens are coloured by surprisal; hovering over a token, or tapping it, shows
    the model's alternatives.
    """
    return f'<div class="sample">{"".join(map(_token, tokens))}</div>'


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
    rank, entropy = "", ""
    if token.rank is not None:
        rank, entropy = f", rank {token.rank:,}", f" Entropy {token.entropy:.1f} bits."
    count = "" if token.count is None else f"; {token.count:,} times in training"
    chance = f"probability {2**-token.bits:.2%}"
    description = f"<b>{text}</b> {token.bits:.1f} bits, {chance}{rank}{count}.{entropy}"
    tooltip = f'<span class="more">{description}<span class="likely">{likely}</span></span>'
    style = f"--heat-share: {heat:.3f}"
    return f'<span class="token" tabindex="0" style="{style}">{shown}{tooltip}</span>{after}'
