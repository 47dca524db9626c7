"""Writes a run from parameters of other programs: a workdir that every command opens."""

import collections
import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from adaptive_jax.data.vocabulary.words import EOS, Vocabulary
from adaptive_jax.errors import InputError
from adaptive_jax.files import local_directory, new_directory
from adaptive_jax.interop.converter import Checkpoint, assign, completed
from adaptive_jax.runs.checkpoints import Checkpoints, quietly
from adaptive_jax.runs.settings import at_clusters, write_json
from adaptive_jax.runs.start import check_name, write_ngrams, write_words


def save_run(
    workdir: str | os.PathLike,
    config: Mapping,
    params: Mapping,
    words: Sequence[str],
    counts: Sequence[int],
) -> None:
    """Writes a new workdir with these parameters, for `adaptive_jax.load`, evaluate.py and
    `train --init_from`, after 0 updates.

        config = {"input.name": "lookup", "body.name": "lstm", "output.name": "softmax"}
        adaptive_jax.save_run("runs/mine", config, params, words, counts)

    Args:
        workdir: a directory that is new or empty.
        config: settings by dotted key, or a whole config; docs/configuration.md has all keys.
        params: arrays by name, as `LanguageModel` has them; they are stored in float32.
        words: in the order of their ids, `<eos>` among them; for cutoffs the most frequent first.
        counts: occurrences of each word in the training text.

    Raises:
        InputError: an unknown key; arrays that do not fit the model of the config or are not
            finite; words that are repeated, have white space or are not whole words; or a workdir
            that is not empty. Nothing is written then.
    """
    workdir, words, counts = new_workdir(workdir, "workdir"), tuple(words), np.asarray(counts)
    counted = collections.Counter(words).items()
    faults = [w for w, n in counted if n > 1 or not isinstance(w, str) or w.split() != [w]]
    if faults or EOS not in words:
        fault = repr(faults[0]) if faults else f"no {EOS}"
        raise InputError(f"words must be distinct, without white space, with {EOS}; got {fault}")
    if counts.shape != (len(words),) or counts.dtype.kind not in "iu" or (counts < 0).any():
        description = f"{counts.dtype} of shape {list(counts.shape)}"
        raise InputError(f"counts must be whole numbers, one for each word, got {description}")
    config = completed(config)
    data = config["data"]
    if data["codes"] or data["tokenizer"] or data["corpus"] == "ids":
        raise InputError(
            "words must be whole words: a run of sub-words or of a tokenizer's ids needs its model,"
            " which save_run does not take"
        )
    data["vocabulary_size"] = len(words)
    config = at_clusters(config, None)
    arrays = traverse_util.flatten_dict(jax.tree.map(np.asarray, dict(params)), sep="/")
    params = assign(arrays, None, config | {"output": config["output"] | {"clusters": ""}})
    vocabulary = Vocabulary(words, counts.astype(np.int64))
    write_run(workdir, config, vocabulary, Checkpoint({}, params), "params")


def new_workdir(place: str | os.PathLike, key: str) -> Path:
    """The absolute path of a new workdir or exported model.

    key: the name of the setting, for messages.

    Raises:
        InputError: the directory is not empty, or Orbax cannot write its name.
    """
    workdir = local_directory(str(place), key).absolute()
    check_name(workdir)
    if workdir.exists() and (not workdir.is_dir() or any(workdir.iterdir())):
        raise InputError(f"{workdir} already exists: use a new directory")
    return workdir


def write_run(
    workdir: Path, config: dict, vocabulary: Vocabulary, checkpoint: Checkpoint, source: str
) -> None:
    """Writes config.json, the words, options as trained.json, and one checkpoint.

    checkpoint: its `state` is the parameters. source: name of their file, for messages.

    Raises:
        InputError: parameters that are not finite; nothing is written then.
    """
    params = jax.tree.map(jnp.asarray, checkpoint.state)
    for path, array in traverse_util.flatten_dict(params, sep=".").items():
        if not jnp.isfinite(array).all():
            raise InputError(f"{source} has numbers that are not finite, in {path}")
    with quietly(), new_directory(workdir) as directory:
        write_words(directory, config, vocabulary)
        write_ngrams(directory, config, vocabulary)
        write_json(directory / "config.json", config)
        if checkpoint.options:
            write_json(directory / "trained.json", checkpoint.options)
        with contextlib.closing(Checkpoints(directory)) as checkpoints:
            checkpoints.save(checkpoint.updates, {"params": params}, checkpoint.nll)
