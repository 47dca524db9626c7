"""Nearest neighbours: the words that followed states like this one in another text (kNN-LM,
Khandelwal et al. 2020).

    p(w) = λ p_model(w) + (1 − λ) p_knn(w),    p_knn(w) ∝ Σ_i 1[x_i = w] exp(−‖h_t − h_i‖² / T)

Entry i of a datastore is a word x_i of a text, by default of the train split, with the hidden state
h_i that predicted it. The sum is over the k entries nearest to h_t; the search compares h_t with
all entries. A hidden state is what the output layer reads, of any body; the paper takes the input
of the last feed-forward layer.
"""

import functools
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from adaptive_jax.data.batches.windows import Windows
from adaptive_jax.errors import InputError, check_at_least
from adaptive_jax.evaluation.runs import Run
from adaptive_jax.evaluation.scoring import Extras, Progress, scores
from adaptive_jax.files import in_store
from adaptive_jax.workdir.settings import write_json

# Words that are looked up before the datastore is read again, words at a time among them, and
# entries that they are compared with.
GROUP, QUERIES, BLOCK = 8_192, 256, 65_536


class Neighbours(NamedTuple):
    """The options of --method=knn.

    Attributes:
        model_weight: λ, the weight of the model's own distribution, above 0 and at most 1. Several:
            all are tried. The paper's λ is 1 minus this one, 0.25 on WikiText-103.
        temperature: T, which flattens the distribution over neighbours. Several: all are tried. The
            paper's is 1.
        neighbours: k, entries that count.
        datastore: a directory with a train.txt to take the entries from; empty: the run's own train
            split.
    """

    model_weight: tuple[float, ...] = (0.75,)
    temperature: tuple[float, ...] = (1.0,)
    neighbours: int = 1_024
    datastore: str = ""

    def check(self) -> None:
        """Raises InputError for values out of range."""
        check_at_least(1, neighbours=self.neighbours)
        if not self.model_weight or not all(0 < weight <= 1 for weight in self.model_weight):
            raise InputError(
                f"model_weight={list(self.model_weight)} must be above 0 and at most 1, such as"
                " 0.75"
            )
        if not self.temperature or not all(
            0 < temperature < np.inf for temperature in self.temperature
        ):
            raise InputError(
                f"temperature={list(self.temperature)} must be above 0 and finite, such as 1 or 10"
            )

    def grid(self) -> list[tuple[float, float]]:
        """All pairs of λ and T to try."""
        return [
            (weight, temperature)
            for weight in self.model_weight
            for temperature in self.temperature
        ]


class Datastore(NamedTuple):
    """Entries of a text, in any order, on disk: `keys` float16 `[entries, features]`, hidden
    states; `words` int32 `[entries]`.
    """

    keys: np.ndarray
    words: np.ndarray


def open_datastore(
    folder: Path, run: Run, ids: np.ndarray, windows: Windows, progress: Progress
) -> Datastore:
    """The datastore of a text, as files in `folder`, which are made anew unless they are of these
    parameters and settings.

    ids: int32 `[tokens]` of the text. windows: how it is read.

    Raises:
        InputError: the folder is in object storage or cannot be written, several hosts, or hidden
            states too large for float16.
    """
    if in_store(folder) or jax.process_count() > 1:
        raise InputError(
            f"--method=knn keeps its datastore on one host's disk, in {folder}: copy the run there,"
            " and use one host"
        )
    about = _about(run, ids, windows)
    try:
        if (made := _read(folder, about)) is not None:
            return made
        _make(folder, about, scores(run, ids, windows, Extras(hidden=True), progress), ids)
        return _read(folder, about)
    except OSError as error:
        size = 2 * len(ids) * run.config["body"]["features"]
        raise InputError(
            f"cannot write {folder}: {error.strerror}; make room for a datastore of about"
            f" {size / 1e6:,.0f} MB, or give a smaller text by --datastore=DIR"
        ) from error


def _about(run, ids, windows):
    """What a datastore depends on."""
    text = hashlib.sha256()
    for part in range(0, len(ids), 1 << 20):  # the text may be larger than memory
        text.update(np.ascontiguousarray(ids[part : part + (1 << 20)], np.int32))
    # Elsewhere they change no hidden state.
    rows = windows.rows if windows.layout == "streams" else 0
    return {
        "parameters": fingerprint((run.params, run.lexicon)),
        "vocabulary": run.vocabulary.digest,
        "text": text.hexdigest(),
        "windows": [windows.window, windows.context, windows.break_mode, windows.layout, rows],
    }


def fingerprint(arrays) -> str:
    """A number, as text, that differs when any entry of a tree of arrays does."""

    @jax.jit
    def digests(leaves):
        return [_digest(leaf) for leaf in leaves]

    return hashlib.sha256(
        np.asarray(jax.device_get(digests(jax.tree.leaves(arrays))), np.uint32)
    ).hexdigest()


def _digest(leaf):
    """A hash of an array, uint32: the sum of a hash of each entry with its place."""
    words = lax.bitcast_convert_type(leaf.astype(jnp.float32), jnp.uint32).reshape(-1)
    words = (
        words ^ (jnp.arange(words.size, dtype=jnp.uint32) * jnp.uint32(0x9E3779B1))
    ) * jnp.uint32(0x7FEB352D)
    return jnp.sum((words ^ (words >> 15)) * jnp.uint32(0x846CA68B))


def _read(folder, about):
    """The datastore in a folder, None if there is none of this description."""
    try:
        found = json.loads((folder / "about.json").read_text())
        shape = found.pop("entries"), found.pop("features")
        if found != about:
            return None
        return Datastore(
            np.memmap(folder / "keys", np.float16, "r", shape=shape),
            np.memmap(folder / "words", np.int32, "r", shape=shape[:1]),
        )
    except (FileNotFoundError, ValueError, KeyError):  # of files that are damaged, too
        return None


def _make(folder, about, scored, ids):
    """Writes a datastore beside `folder` and puts it in its place once it is whole."""
    unfinished, entries, features = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}"), 0, 0
    unfinished.mkdir(parents=True)
    try:
        with (unfinished / "keys").open("wb") as keys, (unfinished / "words").open("wb") as words:
            for part in scored:
                with np.errstate(over="ignore"):
                    states = part.hidden.astype(np.float16)
                if not np.isfinite(states).all():
                    largest = float(np.abs(part.hidden).max())
                    raise InputError(
                        f"hidden states of {largest:g} exceed float16, which a datastore holds: use"
                        " --method=cache"
                    )
                keys.write(np.ascontiguousarray(states))
                words.write(np.ascontiguousarray(ids[part.at], np.int32))
                entries, features = entries + len(states), states.shape[1]
        write_json(unfinished / "about.json", about | {"entries": entries, "features": features})
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def log_chances(
    store: Datastore,
    hidden: np.ndarray,
    targets: np.ndarray,
    options: Neighbours,
    progress: Progress,
) -> np.ndarray:
    """log p_knn of every target: float64 `[temperatures, tokens]`; −inf for a word that none of its
    neighbours is.

    hidden: `[tokens, features]`. targets: int32 `[tokens]`. The work is tokens × entries ×
        features, on one device.
    """
    tokens, entries = len(targets), len(store.words)
    group, block = _rounded(min(GROUP, tokens), QUERIES), min(BLOCK, entries)
    visit, temperatures = (
        _visit(min(options.neighbours, entries)),
        jnp.asarray(options.temperature, jnp.float32),
    )
    visits = [(t, i) for t in range(0, tokens, group) for i in range(0, entries, block)]
    found, queries, best = [], None, None
    for t, i in progress(visits, len(visits)):
        if i == 0:
            given = _padded(hidden[t : t + group], group), _padded(targets[t : t + group], group)
            queries = jax.tree.map(
                lambda a: jnp.asarray(a.reshape(-1, QUERIES, *a.shape[1:])), given
            )
            shape = (*queries[1].shape, min(options.neighbours, entries))
            best = jnp.full(shape, -jnp.inf), jnp.zeros(shape, bool)
        part = slice(i, min(i + block, entries))
        best = visit(
            best,
            (_padded(store.keys[part], block), _padded(store.words[part], block), part.stop - i),
            queries,
        )
        if part.stop == entries:
            found.append(
                jax.device_get(_log_shares(best, temperatures)).reshape(len(temperatures), -1)
            )
    return np.concatenate(found, axis=1)[:, :tokens].astype(np.float64)


def _rounded(count, multiple):
    return -(-count // multiple) * multiple


def _padded(array, length):
    return np.pad(array, [(0, length - len(array))] + [(0, 0)] * (array.ndim - 1))


@functools.lru_cache(maxsize=8)
def _visit(neighbours) -> Callable:
    """`visit(best, entries, queries) -> best` with those of the entries that are nearer.

    best: nearness, minus squared distance, `[chunks, queries, neighbours]`, and whether the
    neighbour is the target. entries: keys `[block, features]`, words `[block]`, and how many of
    them there are.
    """

    def visit(best, entries, queries):
        keys, words, used = entries
        keys = keys.astype(jnp.float32)
        squares, valid = (
            jnp.sum(jnp.square(keys), axis=1)[None],
            (jnp.arange(len(keys)) < used)[None],
        )

        def add(each):
            nearness, hit, hidden, targets = each
            hidden = hidden.astype(jnp.float32)
            products = jnp.matmul(hidden, keys.T, precision=lax.Precision.HIGHEST)
            distances = jnp.sum(jnp.square(hidden), axis=1)[:, None] + squares - 2 * products
            new = jnp.where(valid, -jnp.maximum(distances, 0.0), -jnp.inf)
            nearness, which = lax.top_k(jnp.concatenate([nearness, new], axis=1), neighbours)
            hit = jnp.concatenate([hit, words[None] == targets[:, None]], axis=1)
            return nearness, jnp.take_along_axis(hit, which, axis=1)

        return lax.map(add, (*best, *queries))

    return jax.jit(visit, donate_argnums=0)


@jax.jit
def _log_shares(best, temperatures):
    """log p_knn of the targets by temperature: `[temperatures, chunks, queries]`."""
    nearness, hit = best

    def share(temperature):
        weights = jnp.exp((nearness - nearness[..., :1]) / temperature)
        return jnp.log(jnp.where(hit, weights, 0.0).sum(axis=-1)) - jnp.log(weights.sum(axis=-1))

    return lax.map(share, temperatures)
