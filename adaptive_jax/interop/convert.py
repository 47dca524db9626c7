"""Converts a checkpoint of other code into a workdir; `convert_command` is the command."""

import shlex
from pathlib import Path

import jax

from adaptive_jax.errors import InputError, one_line
from adaptive_jax.interop import torch_files
from adaptive_jax.interop.awd_lstm import AWD_LSTM
from adaptive_jax.interop.converter import Checkpoint, Converter
from adaptive_jax.interop.fairseq import TRANSFORMER_LM
from adaptive_jax.interop.fconv import FCONV_LM
from adaptive_jax.interop.save_run import new_workdir, write_run

CONVERTERS = [AWD_LSTM, FCONV_LM, TRANSFORMER_LM]  # the first that detects a file converts it


def read_checkpoint(path: Path) -> tuple[Converter, Checkpoint]:
    """Reads a checkpoint, and finds its converter by its content.

    Raises:
        InputError: the file is damaged, or no converter detects it.
    """
    content = torch_files.read(path)
    for converter in CONVERTERS:
        if (checkpoint := converter.detect(content)) is not None:
            return converter, checkpoint
    names = ", or ".join(converter.name for converter in CONVERTERS)
    raise InputError(f"{path} holds no model that can be converted: use {names}")


def convert(checkpoint: str, words: str, workdir: str) -> None:
    """Writes a workdir from a checkpoint of other code: config.json, vocabulary.txt, trained.json
    with the options in the checkpoint, and one checkpoint with the parameters.

    Raises:
        InputError: one of the files is wrong, or the workdir is not empty; nothing is written then.
    """
    workdir = new_workdir(workdir, "OUT_WORKDIR")
    try:
        converter, foreign = read_checkpoint(Path(checkpoint))
        vocabulary, state = converter.words(Path(words), foreign.state)
        config = converter.config(foreign.options, state, len(vocabulary))
        params = converter.parameters(state, config)
    except Exception as error:  # options and tensors can have any type and shape
        if isinstance(error, InputError):
            raise
        reason = f"{type(error).__name__} {one_line(error)[:150]}"
        raise InputError(f"cannot convert {checkpoint}, damaged or unknown: {reason}") from error
    write_run(workdir, config, vocabulary, foreign._replace(state=params), checkpoint)
    place = f"--workdir={shlex.quote(str(workdir))} --data_path=DIRECTORY"
    print(
        f"{workdir}: {sum(leaf.size for leaf in jax.tree.leaves(params)):,} parameters,"
        f" {len(vocabulary):,} words"
        + (f", after {foreign.updates:,} updates" if foreign.updates else "")
        + f"\npython -m adaptive_jax evaluate {place}    # that holds test.txt",
        flush=True,
    )
