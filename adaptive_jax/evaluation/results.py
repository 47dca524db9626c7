"""Results of evaluations: the lines and the tables that are printed, and the files in eval/."""

import contextlib
import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from adaptive_jax.data.batches.layouts import scored_break_mode
from adaptive_jax.data.batches.windows import Windows
from adaptive_jax.errors import InputError
from adaptive_jax.evaluation import card
from adaptive_jax.files import in_store, replacing
from adaptive_jax.parallel import hosts
from adaptive_jax.workdir.settings import write_json

MEASURED = "nll", "perplexity"  # of a setting in a grid; its other keys are options


def print_result(result: dict, chosen: dict, words: str, settings: Windows) -> None:
    """Prints a result, after a table of all settings if several were tried.

    chosen: the options by which the result's setting differs from others.
    words: the shares of words that the model does not know.
    """
    for line in table(result["grid"]) if "grid" in result else ():
        hosts.log0(line)
    if "open" in result:
        words = f"<unk> {result['unknown']:.1%}" + "".join(
            _part(name, part) for name, part in result["open"].items()
        )
    unigram, method = result["unigram_perplexity"], result["settings"]["method"]
    unit, context = result["vocabulary"]["unit"], f"context {settings.context}"
    if settings.layout == "streams":
        context = _context_of_rows(settings)
    parts = [
        f"{result['split']}: perplexity {result['perplexity']:.2f} ({result['nll']:.4f} nats a"
        f" {unit}) over {result['words']:,} {unit}s"
        + (f", unigram perplexity {unigram:.2f}" if math.isfinite(unigram) else ""),
        *([words] if words else []),
        f"step {result['step']:,}, break_mode {settings.break_mode}, window {settings.window},"
        f" {context}",
    ]
    if method != "plain":
        parts.append(", ".join([f"method {method}", *_labels(chosen)]))
    hosts.log0("; ".join(parts))
    for line in card.lines(result):
        hosts.log0(f"  {line}")


def table(tried: Sequence[dict]) -> Iterator[str]:
    """Lines of a table of perplexities: a row for each value of the option that is named first, a
    column for each setting of the others.
    """
    names = dict.fromkeys(key for line in tried for key in line if key not in MEASURED)
    first, others = next(iter(names), ""), list(names)[1:]
    rows, columns = {}, {}
    for line in tried:
        column = ", ".join(_labels({key: line.get(key) for key in others})) or "perplexity"
        columns[column] = max(14, len(column) + 2)
        rows.setdefault(_text(line.get(first)), {})[column] = f"{line['perplexity']:.2f}"
    width = max([12, len(first), *map(len, rows)])
    yield f"{first:>{width}}" + "".join(f"{head:>{size}}" for head, size in columns.items())
    for row, cells in rows.items():
        yield f"{row:>{width}}" + "".join(
            f"{cells.get(head, ''):>{size}}" for head, size in columns.items()
        )


def _labels(options):
    return [f"{key} {_text(value)}" for key, value in options.items()]


def _text(value):
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def _part(name, part):
    """Describes the words that training knew, or the others."""
    cost = "" if part["perplexity"] is None else f" of perplexity {part['perplexity']:,.2f}"
    return f"; {name} words {part['share']:.1%}{cost}"


def _context_of_rows(settings):
    """Describes the context of tokens of layout "streams"."""
    rows, context = settings.rows, settings.context
    if rows == 1:
        return "each token after all before it"
    before = (
        f"after {context:,} tokens of what came before" if context else "without what came before"
    )
    return f"in {rows:,} rows, of which {rows - 1:,} begin {before} (--rows=1 scores exactly)"


def write(folder: Path, result: dict, nll: np.ndarray) -> None:
    """Writes a result, which has been printed, into a folder: as JSON, as a card in Markdown, and
    the losses of its tokens as NumPy's .npy.

    Raises:
        InputError: it cannot be written.
    """
    path = folder / f"{_name(result)}.json"
    with _write_errors(path):
        if hosts.first():
            write_json(path, result)
            with replacing(path.with_suffix(".md")) as file:
                file.write(card.markdown(result).encode())
            with replacing(path.with_suffix(".npy")) as file:
                np.save(file, nll)
    hosts.log0(str(path))


@contextlib.contextmanager
def _write_errors(path):
    """Turns an OSError of the block into an InputError."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"cannot write {path}: {error.strerror}; the result stands above. To have the file,"
            " make room or get permission to write there, then evaluate again"
        ) from error


def _name(result):
    """Returns the name of a result's files, which differs where text, break mode or method do."""
    settings = result["settings"]
    name = f"{result['split']}-{settings['window']}-{settings['context']}-{result['step']}"
    if "rows" in settings and settings["rows"] > 1:
        name += f"-rows{settings['rows']}"
    if settings["break_mode"] != scored_break_mode(settings["config"]):
        name += f"-{settings['break_mode']}"
    others = {
        key: settings[key]
        for key in ("options", "vocabulary", "uniform", "down_weight", "share")
        if key in settings
    }
    if settings["method"] != "plain" or others:
        name += (
            f"-{settings['method']}-"
            + hashlib.sha256(json.dumps(others, sort_keys=True).encode()).hexdigest()[:8]
        )
    if (given := settings["data_path"]) is not None:
        place = given if in_store(given) else str(Path(given).resolve())
        name += "-" + hashlib.sha256(place.encode()).hexdigest()[:8]
    return name
