"""Writes a trained model into a directory, as files of safetensors or as a program of StableHLO."""

import os
import shlex
from collections.abc import Mapping
from pathlib import Path

import jax
from flax import traverse_util

from adaptive_jax.config.keys import allow_flag
from adaptive_jax.data.vocabulary.on_disk import write_with_checksums
from adaptive_jax.files import new_directory, write_bytes
from adaptive_jax.interop.save_run import new_workdir
from adaptive_jax.interop.stablehlo import Shape, make_scorer
from adaptive_jax.parallel import hosts, sharding
from adaptive_jax.runs.parameters import write_tensors
from adaptive_jax.runs.run import Run
from adaptive_jax.runs.settings import EXPORTED, write_json

# Other files of a run about its words
WORD_FILES = "lexicon.jsonl", "lexicon.sha256", "ngrams.npz", "ngrams.sha256"


def export(
    workdir: Path, output: str | os.PathLike, checkpoint: str = "best", shape: Shape | None = None
) -> None:
    """Writes the model of a run into a new directory and prints its size.

    Args:
        output: a new directory.
        checkpoint: "best" by validation, "latest", or a step.
        shape: batch shape of a program of StableHLO; None: write safetensors.

    Raises:
        InputError: no run or checkpoint, an existing directory, or a missing package.
    """
    output = new_workdir(output, "output")
    run = Run.open(workdir, checkpoint)
    params = sharding.on_host(run.params, run.mesh)
    if hosts.first():
        with new_directory(output) as directory:
            _write(run, directory, params, shape)
    hosts.barrier("the export")
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    hosts.log0(
        f"{output}: {count:,} parameters, {len(run.vocabulary):,} words, after {run.step:,} updates"
    )
    if shape is None:
        data = run.config["data"]
        converted = data["corpus"] == "text_files" and not data["path"]
        place = " --data_path=DIRECTORY" if converted else ""
        hosts.log0(
            f"python -m adaptive_jax evaluate --workdir={shlex.quote(str(output))}"
            f"{allow_flag(run.saved_config)}{place} --split=test"
        )


def _write(run: Run, output: Path, params: Mapping, shape: Shape | None) -> None:
    """Writes the words and the files about them, the config and the arrays."""
    write_with_checksums(run.vocabulary, output / "vocabulary.txt")
    metadata = {"step": str(run.step), "vocabulary": run.vocabulary.digest}
    if shape is None:
        for name in WORD_FILES:
            if (run.workdir / name).exists():
                write_bytes(output / name, (run.workdir / name).read_bytes())
        write_json(output / "config.json", run.saved_config)
        write_tensors(output / EXPORTED, traverse_util.flatten_dict(params, sep="."), metadata)
        return
    program, arrays, about = make_scorer(run, params, shape)
    write_bytes(output / "scorer.stablehlo", program)
    write_json(output / "scorer.json", about | {"step": run.step, "config": run.saved_config})
    write_tensors(output / "scorer.safetensors", arrays, metadata)
