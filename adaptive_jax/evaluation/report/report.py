"""Makes a report: reads the runs, draws the figures, and writes the page and its files."""

import csv
import datetime
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import jax

from adaptive_jax.config.options import Option, check
from adaptive_jax.data.corpora.text import SPLIT
from adaptive_jax.errors import InputError
from adaptive_jax.evaluation.evaluate import Request
from adaptive_jax.evaluation.report import charts, page
from adaptive_jax.evaluation.report.drawing import check_matplotlib, draw
from adaptive_jax.evaluation.report.frequency import PAPER, check_edges
from adaptive_jax.evaluation.report.passage import Token, read_passage
from adaptive_jax.evaluation.report.runs import RunReport, check_comparable, read_run
from adaptive_jax.files import path_of, replacing

OUTPUT = "The page to write; its files go to NAME_files beside it, report_files."
NAMES = "What to call the runs; default: the names of their directories."
SAMPLE = (
    "The stronger the colour, the less the model expected the token. Point at one, or tap it, to"
    " see what the model expected instead. Units of one word stand without a space between them."
)


class Job(NamedTuple):
    """Options of the command; its fields are flags.

    Figures and numbers go to a directory beside the page, `report_files` of `report.html`.
    """

    output: Annotated[str, Option(OUTPUT)] = "report.html"
    names: Annotated[tuple[str, ...], Option(NAMES)] = ()
    bins: Annotated[tuple[int, ...], Option("Largest frequency of each bin but the last.")] = PAPER
    sample_from: Annotated[int, Option("First word of the passage to show.", "[0, inf)")] = 0
    sample_words: Annotated[int, Option("Words of the passage; 0: none.", "[0, inf)")] = 150


def report(
    workdirs: Sequence[Path], request: Request, job: Job
) -> tuple[list[RunReport], dict[str, list[Token]]]:
    """Reports trained runs on one page, with their figures as PNG and their numbers as CSV beside
    it. Runs that evaluate.py has scored so already are not scored again.

    request: the text, and how it is scored.

    Returns:
        What was read of the runs, and their passages by name.

    Raises:
        InputError: matplotlib is missing, no run or split there, runs on texts that differ, scores
            that are not finite, or the page cannot be written.
    """
    check_matplotlib()
    check(job)
    check_edges(job.bins)
    if job.sample_from and not job.sample_words:
        raise InputError(
            f"sample_from={job.sample_from} has no effect with sample_words=0: leave one out"
        )
    output = path_of(job.output)
    names = names_of(workdirs, job.names)
    if output.suffix not in (".html", ".htm"):
        raise InputError(f"output={output} must be the name of a page, such as report.html")
    if output.is_dir():
        raise InputError(f"output={output} is a directory: use the name of a new page")
    runs, passages = [], {}
    for workdir, name in zip(workdirs, names, strict=True):
        run, opened = read_run(workdir, name, request, load_parameters=job.sample_words > 0)
        check_comparable([*runs, run])
        runs.append(run)
        if job.sample_words:
            passages[name] = read_passage(run, opened, job.sample_from, job.sample_words)
    files = _files(output)
    lines = [run.about() for run in runs]
    _write_csv(files / "runs.csv", lines)
    numbers = {name: number for number, name in enumerate(names)}
    drawn = []
    for chart in charts.charts_of(charts.Scores(runs, job.bins)):
        drawn.append((chart, draw(chart, numbers, files / f"{chart.name}.png")))
        _write_csv(files / f"{chart.name}.csv", chart.rows())
    unit = runs[0].vocabulary.unit
    table = page.runs_table(lines, request.split, unit)
    sections = [page.Section("Runs", _changes(lines), table)]
    for title, text in charts.SECTIONS.items():
        if inside := [(chart, svg) for chart, svg in drawn if chart.section == title]:
            text = text.format(unit=unit)
            sections.append(page.Section(title, text, page.figures(inside)))
    if job.sample_words:
        _write_csv(files / "sample.csv", _sample_lines(passages))
        title = "A passage, coloured by surprisal"
        sections.append(page.Section(title, SAMPLE, page.passages(passages)))
    text = page.page(*_title(runs, request), sections, _footer(runs))
    _write(output, text.encode(errors="replace"))
    return runs, passages


def names_of(workdirs: Sequence[Path], given: Sequence[str]) -> list[str]:
    """Names of the runs: those given, or those of their directories, or, where two have one
    name, their paths.
    """
    if given and (len(given) != len(workdirs) or len(set(given)) != len(given)):
        raise InputError(
            f"names={','.join(given)} must be one name for each of {len(workdirs)} runs, all"
            " different"
        )
    paths = [os.path.abspath(path) for path in workdirs]
    if len(set(paths)) != len(paths):
        raise InputError(f"{workdirs[0]} or another run is given twice: use each run once")
    names = [os.path.basename(path) for path in paths]
    return list(given) or (names if len(set(names)) == len(names) else paths)


def _changes(lines):
    """Changes of the runs in rows whose published numbers stand beside theirs."""
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


def _title(runs, request):
    """The title of the page and the line below it."""
    data = runs[0].config["data"]
    place = request.data_path or (data["path"] if data["corpus"] == "text_files" else "")
    path = path_of(place).resolve() if place else Path()
    words = runs[0].result["words"]
    corpus = "text of one file" if path.parent.name == SPLIT else path.name or data["corpus"]
    names = ", ".join(run.name for run in runs)
    if len(runs) > 3:
        names = f"{runs[0].name} and {len(runs) - 1} other runs"
    return names, f"{corpus}, {request.split} split, {words:,} {runs[0].vocabulary.unit}s"


def _footer(runs):
    about = "; ".join(
        f"{run.name}: {run.workdir}, vocabulary {run.vocabulary.digest}" for run in runs
    )
    return f"Made on {datetime.date.today()} by adaptive_jax (jax {jax.__version__}). {about}."


def _files(output):
    """The directory of a page's files, made if it is not there.

    Raises:
        OSError: nothing can be written there.
    """
    files = output.with_name(f"{output.stem}_files")
    files.mkdir(parents=True, exist_ok=True)
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
