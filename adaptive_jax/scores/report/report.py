"""Makes a report: reads the runs, draws the figures, and writes the page and its files."""

import csv
import datetime
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from adaptive_jax.config.options import NonNegativeInt, check
from adaptive_jax.data.corpora.text import SPLIT
from adaptive_jax.errors import InputError
from adaptive_jax.files import path_of, write_bytes
from adaptive_jax.scores.frequency import PAPER, check_edges
from adaptive_jax.scores.report import charts, page
from adaptive_jax.scores.report.drawing import draw
from adaptive_jax.scores.report.passage import Token, read_passage
from adaptive_jax.scores.report.runs import RunReport, read_runs

SAMPLE = (
    "The stronger the colour, the less the model expected the token. Point at one, or tap it, to"
    " see its probability and, where the evaluation kept it (--sample_words), what the model"
    " expected instead. Units of one word stand without a space between them."
)


class ReportOptions(NamedTuple):
    """Options of the command; the fields are flags.

    Attributes:
        output: The page to write; its files go to NAME_files beside it, report_files.
        names: Names of the runs; default: those of their directories.
        bins: Largest frequency in training of each bin of words but the last.
        sample_from: Number of the passage's first word, from 0.
        sample_words: Words of the passage; 0: none.
    """

    output: str = "report.html"
    names: tuple[str, ...] = ()
    bins: tuple[int, ...] = PAPER
    sample_from: NonNegativeInt = 0
    sample_words: NonNegativeInt = 150


def report(
    places: Sequence[Path], options: ReportOptions
) -> tuple[list[RunReport], dict[str, list[Token]]]:
    """Reports trained runs on one page, with their figures as PNG and PDF, their table as Markdown
    and LaTeX and their numbers as CSV beside it.

    places: workdirs of runs, or JSON results of evaluate.py, see `read_runs`.

    Returns:
        The runs, and their passages by name.

    Raises:
        InputError: matplotlib is missing, no result, or results of texts that differ.
        OSError: the page cannot be written.
    """
    check(options)
    check_edges(options.bins)
    output = path_of(options.output)
    names = names_of(places, options.names)
    if output.suffix not in (".html", ".htm"):
        raise InputError(f"output={output} must be the name of a page, such as report.html")
    runs, passages = read_runs(places, names), {}
    if options.sample_words:
        passages = {
            run.name: read_passage(run, options.sample_from, options.sample_words) for run in runs
        }
    files = output.with_name(f"{output.stem}_files")
    lines = [run.about() for run in runs]
    _write_csv(files / "runs.csv", lines)
    numbers = {name: number for number, name in enumerate(names)}
    unit, drawn = runs[0].result["vocabulary"]["unit"], []
    for chart in charts.charts_of(charts.FigureData(runs, options.bins, unit)):
        drawn.append((chart, draw(chart, numbers, files / f"{chart.name}.png")))
        _write_csv(files / f"{chart.name}.csv", chart.rows())
    table = page.table_of_runs(lines, runs[0].result["split"], unit)
    for suffix, form in ("md", page.markdown), ("tex", page.latex):
        write_bytes(files / f"runs.{suffix}", form(table).encode(errors="replace"))
    sections = [page.Section("Runs", _changes(lines), page.runs_table(table, unit))]
    for title, text in charts.SECTIONS.items():
        if inside := [(chart, svg) for chart, svg in drawn if chart.section == title]:
            text = text.format(unit=unit)
            sections.append(page.Section(title, text, page.figures(inside)))
    if options.sample_words:
        _write_csv(files / "sample.csv", _sample_lines(passages))
        title = "A passage, coloured by surprisal"
        sections.append(page.Section(title, SAMPLE, page.passages(passages)))
    text = page.page(*_title(runs), sections, _footer(runs))
    write_bytes(output, text.encode(errors="replace"))
    return runs, passages


def names_of(places: Sequence[Path], names: Sequence[str]) -> list[str]:
    """Names of the runs: `names`, else those of their directories or, if two of these are equal,
    the paths of the runs or of their results.
    """
    paths = [Path(os.path.abspath(path)) for path in places]
    runs = [(path.parent.parent if path.suffix == ".json" else path).name for path in paths]
    names = names or (runs if len(set(runs)) == len(runs) else [*map(str, paths)])
    if not len(names) == len(set(names)) == len(places):
        raise InputError(
            f"names={','.join(names)} must be one name for each of {len(places)} runs, all"
            " different"
        )
    return list(names)


def _changes(lines):
    """A sentence for each run whose config differs from the row of its published numbers."""
    return " ".join(
        f"{line['run']} differs from the paper's row in {line['changed_keys']}."
        for line in lines
        if line["changed_keys"]
    )


def _sample_lines(passages):
    columns = "text", "bits", "rank", "entropy", "count"
    return [
        {"run": name} | {column: getattr(token, column) for column in columns}
        for name, tokens in passages.items()
        for token in tokens
    ]


def _title(runs):
    """The title of the page and the line below it."""
    result, data = runs[0].result, runs[0].config["data"]
    place = result["settings"]["data_path"]
    place = place or (data["path"] if data["corpus"] == "text_files" else "")
    path = path_of(place).resolve() if place else Path()
    corpus = "text of one file" if path.parent.name == SPLIT else path.name or data["corpus"]
    names = ", ".join(run.name for run in runs)
    if len(runs) > 3:
        names = f"{runs[0].name} and {len(runs) - 1} other runs"
    units = f"{result['words']:,} {result['vocabulary']['unit']}s"
    return names, f"{corpus}, {result['split']} split, {units}"


def _footer(runs):
    names = "; ".join(
        f"{run.name}: {run.workdir}, vocabulary {run.result['vocabulary']['fingerprint']}"
        for run in runs
    )
    version = runs[0].result["versions"]["jax"]
    return f"Made on {datetime.date.today()} by adaptive_jax (jax {version}). {names}."


def _write_csv(path: Path, lines: Sequence[Mapping]) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, lines[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    write_bytes(path, text.getvalue().encode(errors="replace"))
