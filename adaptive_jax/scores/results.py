"""Results of evaluations: the lines that are printed, and the files in eval/."""

import errno
import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from adaptive_jax.data.batches.layouts import scored_break_mode
from adaptive_jax.data.batches.windows import Windows
from adaptive_jax.data.corpora.cached import checksum
from adaptive_jax.files import replacing
from adaptive_jax.parallel import hosts
from adaptive_jax.runs.identity import digest
from adaptive_jax.runs.settings import write_json
from adaptive_jax.scores import card
from adaptive_jax.scores.scores import perplexity_text

logger = logging.getLogger(__name__)
READ_ONLY = errno.EACCES, errno.EPERM, errno.EROFS
MEASURED = "nll", "perplexity"  # keys of a grid's entries that are not options


def print_result(result: dict, chosen: dict, words: str, settings: Windows) -> None:
    """Prints a result, after a line for each setting if several were tried.

    chosen: the options that distinguish the result's setting from the others.
    words: the shares of unknown and unseen words.
    """
    for line in result.get("grid", ()):
        tried = {key: value for key, value in line.items() if key not in MEASURED}
        hosts.log0(
            f"perplexity {perplexity_text(line['perplexity']):>10}  {', '.join(_labels(tried))}"
        )
    if "open" in result:
        words = f"<unk> {result['unknown']:.1%}"
        for name, part in result["open"].items():
            words += f"; {name} words {part['share']:.1%}"
            if part["perplexity"] is not None:
                words += f" of perplexity {perplexity_text(part['perplexity'])}"
    unigram, without_unk = result["unigram_perplexity"], result["known_perplexity"]
    unit, context = result["vocabulary"]["unit"], f"context {settings.context}"
    if settings.layout == "streams":
        rows = f"{context}, in {settings.rows:,} rows (--rows=1 scores exactly)"
        context = rows if settings.rows > 1 else "each token sees the whole text before it"
    parts = [
        f"{result['split']}: perplexity {perplexity_text(result['perplexity'])}"
        f" ({result['nll']:.4f} nats a {unit}) over {result['words']:,} {unit}s"
        + (f", without <unk> {perplexity_text(without_unk)}" if without_unk is not None else "")
        + (f", unigram perplexity {perplexity_text(unigram)}" if math.isfinite(unigram) else ""),
        *([words] if words else []),
        f"step {result['step']:,}, break_mode {settings.break_mode}, window {settings.window},"
        f" {context}",
    ]
    if (method := result["settings"]["method"]) != "plain":
        options = result["settings"].get("options", {})
        options = {key: v[0] if isinstance(v, list | tuple) else v for key, v in options.items()}
        parts.append(", ".join([f"method {method}", *_labels(options | chosen)]))
    hosts.log0("; ".join(parts))
    for line in card.lines(result):
        hosts.log0(f"  {line}")


def _labels(options):
    return [
        f"{key} {value:g}" if isinstance(value, int | float) else f"{key} {value}"
        for key, value in options.items()
    ]


def write(folder: Path, result: dict, nll: np.ndarray, text: Mapping[str, np.ndarray]) -> None:
    """Writes a result into a folder: the result as JSON, the losses of its tokens as .npy, and the
    arrays about its text as .npz. Warns if the folder is read-only.

    Raises:
        OSError: the files cannot be written for another reason.
    """
    path = folder / f"{_name(result)}.json"
    try:
        if hosts.first():
            path.unlink(missing_ok=True)  # while it exists, the files beside it are complete
            with replacing(path.with_suffix(".npy")) as file:
                np.save(file, nll)
            with replacing(path.with_suffix(".npz")) as file:
                np.savez_compressed(file, **text)
            write_json(path, result | {"checksum": checksum(nll)})
        hosts.log0(str(path))
    except OSError as error:
        if error.errno not in READ_ONLY:
            raise
        logger.warning("%s is read-only: the result is printed, not written", folder)


def _name(result):
    """Returns the stem of a result's file names, which depends on all settings that change it."""
    settings = result["settings"]
    name = f"{result['split']}-{settings['window']}-{settings['context']}-{result['step']}"
    if "rows" in settings and settings["rows"] > 1:
        name += f"-rows{settings['rows']}"
    if settings["break_mode"] != scored_break_mode(settings["config"]):
        name += f"-{settings['break_mode']}"
    keys = "options", "vocabulary", "uniform", "down_weight", "lexicon", "share"
    further = {key: settings[key] for key in keys if key in settings}
    if settings["method"] != "plain" or further:
        name += f"-{settings['method']}-{digest(json.dumps(further, sort_keys=True))[:8]}"
    if (path := settings["data_path"]) is not None:
        name += f"-{digest(str(Path(path).resolve()))[:8]}"
    return name
