"""Checks a run before it starts; a dry run then prints and writes the plan, and ends."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from adaptive_jax.config.keys import at, word_group
from adaptive_jax.data.corpora.load import checked_settings
from adaptive_jax.data.vocabulary.words import read_words
from adaptive_jax.errors import InputError
from adaptive_jax.files import local_directory
from adaptive_jax.model.language_model import variable_shapes
from adaptive_jax.numerics.batch import Batch
from adaptive_jax.optimizers import optim
from adaptive_jax.parallel import accelerators, hosts
from adaptive_jax.planning import coverage
from adaptive_jax.planning.plan import Parts, check_memory, describe, divide_update, make_plan
from adaptive_jax.runs.identity import check_resumes, of_config
from adaptive_jax.runs.settings import (
    at_clusters,
    begun_config,
    with_origin,
    with_own_files,
    write_json,
)
from adaptive_jax.runs.start import check_place
from adaptive_jax.training import compiled, sparse, writers
from adaptive_jax.training.finetuning import check_fits, check_origin
from adaptive_jax.training.own_text import with_text

logger = logging.getLogger(__name__)
UNKNOWN = (
    "unknown      parameters, work and memory: they depend on data.vocabulary_size, which is 0. Set"
    " it, or train: the plan is printed once the corpus is read"
)
CHOSEN = "rows         on each device are chosen when training starts, as many as its memory holds"
TARGET = "memory       of a whole update: --target=h100 asks the compiler, see docs/hosts.md"


def dry_run(config: dict, workdir: Path, target: str | None = None) -> None:
    """Prints the plan of `config` for its published vocabulary, and coverage and cutoffs where its
    corpus is prepared; a new workdir gets the plan as plan.json.

    target: devices to compile the update for, see `adaptive_jax.planning.targets`; the plan is then
    for them.
    """
    checks = checked(config, workdir, jax.device_count() if target is None else None)
    config = checks.config
    words, place = config["data"]["vocabulary_size"], config["data"]["path"]
    if place and not local_directory(place, "data.path").exists():
        hosts.log0(f"text         data.path={place} does not exist here: training needs it")
    if path := config["data"]["words"]:
        hosts.log0(f"words        {len(read_words(path)):,} of data.words={path}")
    else:
        by_frequency = not checks.saved_config["output"]["clusters"]
        if lines := coverage.describe(config, checks.parts.model, by_frequency):
            hosts.log0(lines)
    if not words:
        if target is not None:
            raise InputError(
                f"--target={target} needs the size of the vocabulary: set data.vocabulary_size"
            )
        return hosts.log0(UNKNOWN)
    parts = checks.parts_for(words)
    if target is not None:
        hosts.log0(f"compiling    for {target}: a large model takes minutes")
        devices, plan, program = compiled.compile_for(target, config, parts)
        counted = compiled.counts(devices, program)
        entries, lines = {"target": counted}, [compiled.describe(devices, counted)]
    else:
        memory = accelerators.memory()
        plan = make_plan(config, parts, jax.device_count(), memory, jax.process_count())
        if memory:  # a CPU may plan for other devices
            check_memory(plan, memory)
        entries, lines = {}, [TARGET]
        if memory and not config["tokens_per_device"]:
            lines.append(CHOSEN)
    hosts.log0("\n".join([describe(plan, config["data"], config["steps"]), *lines]))
    if hosts.first() and not (workdir / "config.json").exists():  # a run that has begun has its own
        write_json(workdir / "plan.json", plan._asdict() | entries)


class Checked(NamedTuple):
    """A run after the checks that need no corpus.

    saved_config: as config.json keeps it. config: as `build` takes it. parts: layers and optimizer
    for a vocabulary that may be smaller.
    """

    saved_config: dict
    config: dict
    parts: Parts

    def parts_for(self, vocabulary_size: int) -> Parts:
        """Layers and optimizer for this many words."""
        if self.parts.model.input.vocabulary_size == vocabulary_size:
            return self.parts
        return sparse.parts_of(self.config, vocabulary_size)


def checked(config: dict, workdir: Path, devices: int | None) -> Checked:
    """Checks a run before the long preparation of its corpus.

    config: complete, see `adaptive_jax.config.keys.resolve`.
    devices: the number that shares an update; None: not checked.

    Raises:
        InputError: what is wrong.
        OSError: see `check_place`.
    """
    check_place(workdir)
    begun = begun_config(workdir)
    config = with_origin(config, begun)
    check_origin(config, workdir)
    if config["own_text"]:
        model = check_config(with_own_files(config, None), devices).model
        config = with_text(config, begun, model)
    config = at_clusters(config, begun)
    check_resumes(workdir, of_config(config))
    config_of_run = with_own_files(config, workdir)
    parts = check_config(config_of_run, devices)
    check_fits(config, workdir, parts.model)
    return Checked(config, config_of_run, parts)


def check_config(config: Mapping, devices: int | None) -> Parts:
    """Checks layers, optimizer, schedule and update; returns layers and optimizer for a vocabulary
    that may be smaller.

    devices: as `checked`.
    """
    checked_settings(config["data"])
    steps, warmup = config["steps"], config["schedule"].get("warmup_steps", 0)
    if warmup > steps:
        raise InputError(f"schedule.warmup_steps must be in [0, {steps}], all steps, got {warmup}")
    writers.check(config["metrics"])
    layers = at(config, word_group(config)), config["output"]["table"]
    cutoffs = [cutoff for layer in layers for cutoff in layer.get("cutoffs", ())]
    # A vocabulary that is not made yet counts as the smallest that the layers accept.
    least = *(cutoff + 1 for cutoff in cutoffs), config["output"].get("classes", 0), 2
    words = max(config["data"]["vocabulary_size"], *least)
    parts = sparse.parts_of(config, words)
    model = parts.model
    if (
        config["batches"]["layout"] == "streams"
        and jax.eval_shape(lambda: model.initial_carry(1)) == ()
    ):
        raise InputError(
            "batches.layout='streams' needs a body that carries its state on, and"
            f" body.name={config['body']['name']!r} does not: use batches.layout=packed, or a body"
            " such as awd_lstm"
        )
    every, group = config["evaluate_every"], optim.waits(config)
    cure = f"use evaluate_every={max(1, min(500, config['steps'] // 10))}"
    if group and not 0 < every < config["steps"]:
        waiting = f"{group}.name={config[group]['name']!r}, which waits for evaluations"
        if every == 0:
            raise InputError(f"evaluate_every=0 with {waiting}: {cure}")
        logger.warning(
            "evaluate_every=%d must be below steps=%d to affect %s", every, config["steps"], waiting
        )
    if config["early_stopping"] and not (config["evaluate_every"] or config["checkpoint_every"]):
        raise InputError(
            f"early_stopping={config['early_stopping']} with evaluate_every=0 and"
            f" checkpoint_every=0, and so without evaluations: {cure}"
        )
    if devices is not None:
        divide_update(config, devices, jax.process_count())
        _trace(model, config["batches"]["sequence_length"])
    return parts


def _trace(model, length):
    """Traces the hidden states of a row, so that layers raise for what they cannot run here."""
    tokens, row = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((1, length), (1,)))
    batch = Batch(tokens, tokens, jax.ShapeDtypeStruct((1, length), jnp.float32), row)

    def hidden(variables, batch, key):
        carry, rngs = model.initial_carry(1), {"dropout": key}
        return model.apply(variables, batch, carry, train=True, rngs=rngs, method="hidden")

    jax.eval_shape(hidden, variable_shapes(model), batch, jax.random.key(0))
