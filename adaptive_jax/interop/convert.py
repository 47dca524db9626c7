"""Converts a checkpoint of other code into a workdir; `convert_command` is its command."""

import os
import shlex
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from adaptive_jax.data.corpora.cached import home_of
from adaptive_jax.data.vocabulary.sealed import write_sealed
from adaptive_jax.errors import InputError
from adaptive_jax.interop import awd_lstm_config, fairseq, fairseq_config, fconv, fconv_config
from adaptive_jax.interop.checkpoint import read
from adaptive_jax.interop.words import awd_lstm_words, fairseq_words
from adaptive_jax.workdir.checkpoints import Checkpoints
from adaptive_jax.workdir.settings import check_name, write_json


class Kind(NamedTuple):
    """How checkpoints of one kind are converted.

    Attributes:
        words: `words(WORDS, state)` gives the vocabulary, and the tensors with their rows in its
            order.
        config_of: `config_of(options, state, words)` gives the config.
        parameters_of: `parameters_of(state, config)` gives the parameters.
    """

    words: Callable
    config_of: Callable
    parameters_of: Callable


KINDS = {
    "transformer_lm": Kind(fairseq_words, fairseq_config.config_of, fairseq.parameters_of),
    "fconv_lm": Kind(fairseq_words, fconv_config.config_of, fconv.parameters_of),
    "awd_lstm": Kind(awd_lstm_words, awd_lstm_config.config_of, awd_lstm_config.parameters_of),
}


def convert(checkpoint: str, words: str, workdir: str) -> None:
    """Writes a checkpoint of other code as a workdir: config.json, vocabulary.txt and one
    checkpoint with the parameters.

    Raises:
        InputError: one of the files is wrong, or the workdir is not empty; nothing is written then.
    """
    workdir = home_of(str(workdir), "OUT_WORKDIR").absolute()
    check_name(workdir)
    if workdir.exists() and (not workdir.is_dir() or any(workdir.iterdir())):
        raise InputError(f"{workdir} already exists: give a new directory")
    try:
        loaded = read(Path(checkpoint))
        kind = KINDS[loaded.kind]
        vocabulary, state = kind.words(Path(words), loaded.state)
        config = kind.config_of(loaded.options, state, len(vocabulary))
        params = jax.tree.map(jnp.asarray, kind.parameters_of(state, config))
    except InputError:
        raise
    except (
        Exception
    ) as error:  # options and tensors can have any type and shape, which fails in many ways
        reason = " ".join(f"{type(error).__name__} {error}".split())[:150]
        raise InputError(
            f"cannot convert {checkpoint} ({reason}): it is damaged or of another kind; give"
            " another"
        ) from error

    workdir.parent.mkdir(parents=True, exist_ok=True)
    unfinished = workdir.with_name(f".{workdir.name}.{uuid.uuid4().hex}")
    try:
        unfinished.mkdir()
        write_json(unfinished / "config.json", config)
        write_sealed(vocabulary, unfinished / "vocabulary.txt")
        checkpoints = Checkpoints(unfinished)
        checkpoints.save(loaded.updates, {"params": params}, loaded.nll)
        checkpoints.close()
        os.replace(unfinished, workdir)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    print(
        f"{workdir}: {sum(leaf.size for leaf in jax.tree.leaves(params)):,} parameters,"
        f" {len(vocabulary):,} words"
        + (f", after {loaded.updates:,} updates" if loaded.updates else "")
        + f"\npython evaluate.py --workdir={shlex.quote(str(workdir))} --data_path=DIRECTORY    #"
        " that holds test.txt",
        flush=True,
    )
