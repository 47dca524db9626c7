"""Makes a report: scores the runs, draws the figures, and writes the page and its files."""

import csv
import datetime
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from adaptive_jax.errors import InputError
from adaptive_jax.evaluation.report import page
from adaptive_jax.evaluation.report.charts import (
    difference_charts,
    frequency_charts,
    history_charts,
)
from adaptive_jax.evaluation.report.figures import Chart, check_matplotlib, write_png
from adaptive_jax.evaluation.report.findings import Bins, Finding, bins_of, finding
from adaptive_jax.evaluation.report.frequency import PAPER, check_edges
from adaptive_jax.evaluation.report.sample import Passage
from adaptive_jax.evaluation.report.scores import Wanted, check_same_text, subject
from adaptive_jax.evaluation.report.tables import bins_tables, runs_table, tables_of
from adaptive_jax.files import path_of, replacing

FREQUENCY = (
    "Bins are of how often a word occurs in the training text and are not cumulative: 100 holds"
    " words that occur 11 to 100 times. Vertical lines are 95 % bootstrap intervals over parts of"
    " the text. Losses are in nats a word of the text, whatever the units of a model."
)
SAMPLE = (
    "The stronger the colour, the less the model expected the token. Point at one, or tap it, to"
    " see what the model expected instead. Units of one word stand without a space between them."
)


class Request(NamedTuple):
    """What to report.

    Attributes:
        wanted: the text, and how it is scored.
        edges: largest frequencies of the bins.
        passage: the part of the text to show.
        names: what to call the runs; empty: as their directories.
        output: the page. Figures and numbers go to a directory beside it, `report_files` of
            `report.html`.
    """

    wanted: Wanted = Wanted()
    edges: Sequence[int] = PAPER
    passage: Passage = Passage()
    names: Sequence[str] = ()
    output: Path = Path("report.html")


def report(workdirs: Sequence[Path], request: Request) -> list[Finding]:
    """Reports trained runs on one page, with their figures as PNG and their numbers as CSV beside
    it.

    Each run's scores are computed once and kept in its `eval/`. A second report of the same runs
    opens no model.

    Raises:
        InputError: matplotlib is missing, no run or split there, runs on texts that differ, scores
            that are not finite, or the page cannot be written.
    """
    check_matplotlib()
    check_edges(request.edges)
    files = _files(request.output)
    subjects = [
        subject(workdir, name, request.wanted)
        for workdir, name in zip(workdirs, names_of(workdirs, request.names), strict=True)
    ]
    check_same_text(subjects)
    found = [finding(each, request.wanted.split, request.passage) for each in subjects]
    bins = bins_of(found, request.edges)
    sections, charts = _sections(found, bins, request)
    for chart in charts:
        write_png(chart, files / f"{chart.name}.png")
    for name, lines in tables_of(found, bins).items():
        if lines:
            _write_csv(files / f"{name}.csv", lines)
    _write(
        request.output,
        page.page(*_title(found, request.wanted), sections, _footer(found)).encode(
            errors="replace"
        ),
    )
    return found


def names_of(workdirs: Sequence[Path], given: Sequence[str]) -> list[str]:
    """What to call the runs: the names given, or the last parts of their paths that tell them
    apart.
    """
    if given:
        if len(given) != len(workdirs) or len(set(given)) != len(given):
            raise InputError(
                f"names={','.join(given)} must be one name for each of {len(workdirs)} runs, none"
                " of them twice"
            )
        return list(given)
    parts = [os.path.abspath(path).split("/") for path in workdirs]
    for last in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-last:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    raise InputError(f"{workdirs[0]} or another run is given twice: give each run once")


def _sections(
    found: Sequence[Finding], bins: Bins, request: Request
) -> tuple[list[page.Section], list[Chart]]:
    """The parts of the page, and the figures in them."""
    numbers, reference = {each.name: number for number, each in enumerate(found)}, found[0].name
    frequency, history = frequency_charts(bins, numbers), history_charts(found, numbers)
    differences = difference_charts(bins, numbers, reference) if len(found) > 1 else []
    sections = [page.Section("Runs", "", page.table(runs_table(found, request.wanted.split)))]
    sections.append(page.Section("Loss by frequency", FREQUENCY, page.figures(frequency)))
    if differences:
        text = (
            f"What each word costs in a run less what it costs in {reference}, by its frequency"
            " there."
        )
        sections.append(
            page.Section(f"Difference from {reference}", text, page.figures(differences))
        )
    if history:
        sections.append(page.Section("Training and context", "", page.figures(history)))
    if any(each.sample for each in found):
        passages = (
            page.folded(each.name, page.sample(each.sample), shown=not number)
            for number, each in enumerate(found)
        )
        sections.append(
            page.Section(
                "A passage, coloured by surprisal", SAMPLE, page.scale() + "\n".join(passages)
            )
        )
    tables = "\n".join(map(page.table, bins_tables(bins, reference)))
    sections.append(page.Section("Numbers", "", page.folded("Losses by frequency", tables)))
    return sections, [*frequency, *differences, *history]


def _title(found, wanted):
    """The title of the page and the line below it."""
    names, first = [each.name for each in found], found[0]
    data = first.subject.config["data"]
    place = wanted.data_path or (data["path"] if data["corpus"] == "text_files" else "")
    corpus = path_of(place).name or data["corpus"]
    what = f"{corpus}, {wanted.split} split, {first.result['words']:,} words"
    return (
        ", ".join(names) if len(names) < 4 else f"{names[0]} and {len(names) - 1} other runs"
    ), what


def _footer(found):
    versions = f"jax {jax.__version__}"
    runs = "; ".join(
        f"{each.name}: {each.subject.workdir}, vocabulary {each.subject.vocabulary.digest}"
        for each in found
    )
    return f"Made on {datetime.date.today()} by adaptive_jax ({versions}). {runs}."


def _files(output):
    """The directory of a page's files, made if it is not there.

    Raises:
        InputError: no name of a page, or nothing can be written there.
    """
    if output.suffix not in (".html", ".htm"):
        raise InputError(
            f"output={output} must be the name of a page, such as {output.with_suffix('.html')}"
        )
    files = output.with_name(f"{output.stem}_files")
    try:
        files.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"cannot write {files}: {error.strerror}; give another --output"
        ) from error
    return files


def _write_csv(path: Path, lines: Sequence[Mapping]) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, lines[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    _write(path, text.getvalue().encode(errors="replace"))


def _write(path, content):
    with replacing(path) as file:
        file.write(content)
