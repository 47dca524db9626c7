"""Nearest neighbours: the words that followed states like this one in another text (kNN-LM,
Khandelwal et al. 2020).

    p(w) = λ p_model(w) + (1 − λ) p_knn(w),    p_knn(w) ∝ Σ_i 1[x_i = w] exp(−‖h_t − h_i‖² / T)

Entry i of a datastore is a word x_i of a text, by default of the train split, with the hidden state
h_i that predicted it. The sum is over the k entries nearest to h_t; the search compares h_t with
all entries. Hidden states are those that the output layer reads; the paper takes the input of the
last feed-forward layer.
"""

import functools
import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from adaptive_jax.config.options import Option, PositiveInt
from adaptive_jax.data.batches.windows import Windows
from adaptive_jax.data.corpora.cached import checksum
from adaptive_jax.errors import InputError, of_extra
from adaptive_jax.files import in_bucket, new_directory
from adaptive_jax.runs.identity import digest, of_scores
from adaptive_jax.runs.run import Run
from adaptive_jax.runs.settings import write_json
from adaptive_jax.scores.cache import Floats, interpolations
from adaptive_jax.scores.nearest import nearest, no_neighbours
from adaptive_jax.scores.scoring import Evaluation, Progress, scores

with of_extra("train"):
    import filelock

logger = logging.getLogger(__name__)
# Queries per pass over the datastore; queries and entries of one matrix product
GROUP, QUERIES, BLOCK = 8_192, 256, 65_536
FIRST = 64  # states that determine the origin: fewer than any usual batch has


class Neighbours(NamedTuple):
    """The options of --method=knn. The paper's λ is 1 minus `model_weight`, 0.25 on WikiText-103;
    its temperature is 1.

    Attributes:
        model_weight: λ, the weight of the model's own distribution; several values are all tried.
        temperature: T, which divides squared distances; several values are all tried.
        neighbours: nearest entries to use.
        datastore: directory with a train.txt to search; empty: the run's train split.
    """

    model_weight: Annotated[Floats, Option(within="(0, 1]")] = (0.75,)
    temperature: Annotated[Floats, Option(within="[1e-6, inf)")] = (1.0,)
    neighbours: PositiveInt = 1_024
    datastore: str = ""


class Datastore(NamedTuple):
    """Hidden states of a text and the words they predicted, on disk, in any order.

    Attributes:
        keys: float16 `[entries, features]`, hidden states less `origin`, because float16 and
            distances lose the digits of states far from 0.
        words: int32 `[entries]`.
        origin: float32 `[features]`, the mean of the first hidden states.
    """

    keys: np.ndarray
    words: np.ndarray
    origin: np.ndarray


def score(job: Evaluation, options: Neighbours) -> Iterator[tuple[dict, np.ndarray]]:
    """Yields the scores for all pairs of λ and T; one search finds the neighbours for all of them.

    Raises:
        InputError: the datastore holds the text to be scored; or as `open_datastore`.
    """
    text = job.train(options.datastore or None)
    if np.array_equal(text[: len(job.ids)], job.ids):
        raise InputError(
            "the datastore holds the text to be scored, so each word would find itself: use another"
            " --split or --datastore=DIR"
        )
    windows = job.windows
    # As many rows as in training: with one row, the model would read one window at a time.
    if windows.layout == "streams":
        config = job.run.config
        rows = config["tokens_per_update"] // config["batches"]["sequence_length"]
        windows = windows._replace(rows=max(1, min(rows, len(text) // (4 * windows.window))))
        if windows.rows == 1:  # its state holds everything before
            windows = windows._replace(context=0)
    name = "datastore"
    if options.datastore:
        name += f"-{digest(options.datastore)[:8]}"
    store = open_datastore(job.run.workdir, name, job.run, text, windows, job.progress("datastore"))
    nll, states, targets = job.counted()
    knn_log_probs = log_probs(store, states, targets, options, job.progress("neighbours"))
    temperatures = {"temperature": options.temperature}
    yield from interpolations(nll, knn_log_probs, options.model_weight, temperatures)


def open_datastore(
    workdir: Path, name: str, run: Run, ids: np.ndarray, windows: Windows, progress: Progress
) -> Datastore:
    """Opens the datastore of a text, files in `eval/NAME` of a run's workdir. Makes it again if the
    files are missing, damaged, or of other parameters or settings.

    ids: int32 `[tokens]` of the text. windows: those in which the model reads it.

    Raises:
        InputError: the workdir is in a bucket or cannot be written, there are several hosts, or
            hidden states exceed float16.
    """
    folder = workdir / "eval" / name
    if in_bucket(folder) or jax.process_count() > 1:
        raise InputError(
            f"--method=knn keeps its datastore on one host's disk, in {folder}: copy the run there,"
            " and use one host"
        )
    description = _description(run, ids, windows)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # A second evaluation waits for the first one and reads its datastore.
        with filelock.FileLock(folder.with_name(".datastore.lock")):
            if (store := _read(folder, description)) is not None:
                return store
            with new_directory(folder) as unfinished:
                scored = scores(run, ids, windows, progress, hidden=True)
                _write(unfinished, description, scored, ids)
                store = _read(unfinished, description)
                # Remove an outdated or damaged one; rmtree does not follow links.
                shutil.rmtree(os.path.realpath(folder), ignore_errors=True)
            return store
    except OSError as error:
        size = 2 * len(ids) * run.config["body"]["features"]
        raise InputError(
            f"cannot write {folder}: {error.strerror}; make room for a datastore of about"
            f" {size / 1e6:,.0f} MB, or use a smaller text by --datastore=DIR"
        ) from error


def _description(run, ids, windows):
    """The parameters, text and settings that determine a datastore."""
    # In other layouts the number of rows changes no hidden state.
    rows = windows.rows if windows.layout == "streams" else 0
    return {
        "states": of_scores(run.step, run.identity, run.vocabulary, ids),
        "lexicon": digest(*jax.tree.leaves(run.lexicon)),
        "windows": [windows.window, windows.context, windows.break_mode, windows.layout, rows],
    }


def _read(folder, description):
    """Returns the datastore in a folder; None if there is none with this description."""
    try:
        stored = json.loads((folder / "about.json").read_text())
        shape, sums = (stored.pop("entries"), stored.pop("features")), stored.pop("checksums")
        if stored != description:
            return None
        store = Datastore(
            np.memmap(folder / "keys", np.float16, "r", shape=shape),
            np.memmap(folder / "words", np.int32, "r", shape=shape[:1]),
            np.fromfile(folder / "origin", np.float32),
        )
    except (FileNotFoundError, ValueError, KeyError):  # missing or damaged files
        return None
    for name, array in store._asdict().items():
        if checksum(array) != sums[name]:
            logger.warning("%s is damaged, so the datastore is made again", folder / name)
            return None
    return store


def _write(folder, description, scored, ids):
    """Writes the files of a datastore into an empty folder."""
    entries, origin = 0, None
    with (folder / "keys").open("wb") as keys, (folder / "words").open("wb") as words:
        for part in scored:
            if origin is None:
                # The size of a batch must not change it, or devices and --rows would change scores.
                origin = np.mean(part.hidden[:FIRST], axis=0, dtype=np.float32)
            with np.errstate(over="ignore"):
                states = (part.hidden - origin).astype(np.float16)
            if not np.isfinite(states).all():
                largest = float(np.abs(part.hidden).max())
                raise InputError(
                    f"hidden states of {largest:g} exceed float16, which a datastore holds: use"
                    " --method=cache"
                )
            keys.write(np.ascontiguousarray(states))
            words.write(np.ascontiguousarray(ids[part.positions], np.int32))
            entries += len(states)
    origin.tofile(folder / "origin")
    kinds = {"keys": np.float16, "words": np.int32, "origin": np.float32}
    files = {name: np.memmap(folder / name, kind, "r") for name, kind in kinds.items()}
    sums = {name: checksum(array) for name, array in files.items()}
    sizes = {"entries": entries, "features": len(origin)}
    write_json(folder / "about.json", description | sizes | {"checksums": sums})


def log_probs(
    store: Datastore,
    hidden: np.ndarray,
    targets: np.ndarray,
    options: Neighbours,
    progress: Progress,
) -> np.ndarray:
    """Returns log p_knn of every target: float64 `[temperatures, tokens]`; −inf for a target that
    is not among its neighbours' words.

    The work is tokens × entries × features, on one device.

    hidden: `[tokens, features]`. targets: int32 `[tokens]`.
    """
    tokens, entries = len(targets), len(store.words)
    group, block = -(-min(GROUP, tokens) // QUERIES) * QUERIES, min(BLOCK, entries)
    neighbours, temperatures = min(options.neighbours, entries), np.float32(options.temperature)
    visits = [(t, i) for t in range(0, tokens, group) for i in range(0, entries, block)]
    parts, queries, best = [], None, None
    for t, i in progress(visits, len(visits)):
        if i == 0:
            part = slice(t, t + group)
            queries = tuple(
                jnp.asarray(_padded(a, group).reshape(-1, QUERIES, *a.shape[1:]))
                for a in (hidden[part] - store.origin, targets[part])
            )
            best = no_neighbours(*queries[1].shape, neighbours)
        part = slice(i, min(i + block, entries))
        keys, words = _padded(store.keys[part], block), _padded(store.words[part], block)
        best = _visit(best, (keys, words, part.stop - i), queries)
        if part.stop == entries:
            shares = jax.device_get(_log_shares(best, temperatures))
            parts.append(shares.reshape(len(temperatures), -1))
    return np.concatenate(parts, axis=1)[:, :tokens].astype(np.float64)


def _padded(array, length):
    return np.pad(array, [(0, length - len(array))] + [(0, 0)] * (array.ndim - 1))


@functools.partial(jax.jit, donate_argnums=0)
def _visit(best, entries, queries):
    """Merges a block of entries into `best`, the nearest so far.

    best: `Nearest` of `[chunks, queries, neighbours]`. entries: keys `[block, features]`, words
        `[block]`, and the number of entries before padding. queries: states and targets, in chunks.
    """
    keys, words, used = entries
    valid = (jnp.arange(len(keys)) < used)[None]

    def add(chunk):
        best, (hidden, targets) = chunk
        return nearest(best, hidden, keys, valid, words[None] == targets[:, None])

    return lax.map(add, (best, queries))


@jax.jit
def _log_shares(best, temperatures):
    """log p_knn of the targets at each temperature: `[temperatures, chunks, queries]`."""
    nearness, hit = best

    def share(temperature):
        weights = jnp.exp((nearness - nearness[..., :1]) / temperature)
        return jnp.log(jnp.where(hit, weights, 0.0).sum(axis=-1)) - jnp.log(weights.sum(axis=-1))

    return lax.map(share, temperatures)
