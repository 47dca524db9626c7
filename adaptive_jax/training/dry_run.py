"""What is checked before a run, and the dry run, which ends after it: it prints the plan and
writes it down.
"""

from collections.abc import Mapping
from pathlib import Path

import jax

from adaptive_jax.config.keys import check_values, resolve
from adaptive_jax.data.corpora.load import checked_settings
from adaptive_jax.errors import InputError
from adaptive_jax.model.language_model import build
from adaptive_jax.optimizers import optim
from adaptive_jax.parallel import hosts
from adaptive_jax.parallel.speed import gain_of_bfloat16
from adaptive_jax.planning.plan import describe, divide_update, dry_run_lines
from adaptive_jax.planning.targets import topology
from adaptive_jax.training import sparse, targets, writers
from adaptive_jax.training.choice import settle
from adaptive_jax.training.finetuning import check_fits
from adaptive_jax.workdir.settings import (
    at_clusters,
    check_same_run,
    with_origin,
    with_own_files,
    write_json,
)

WORTH = 1.3  # times as fast, from which on bfloat16 is mentioned
ESTIMATE = (
    "estimate     memory; --target=h100 asks the compiler, for that device and others, see"
    " docs/hosts.md"
)


def dry_run(config: dict, workdir: Path, memory: int, target: str | None = None) -> None:
    """Prints the plan of `config` for its published vocabulary, without its corpus; a new workdir
    gets it as plan.json.

    memory: bytes of an accelerator, for the lines about 8, 32 and 64 of them. target: devices to
    compile the update for, see `adaptive_jax.planning.targets`; the plan is then for them.
    """
    config = at_clusters(with_origin(settle(resolve(config), workdir), workdir), workdir)
    check_same_run(workdir, config)
    check_config(
        config := with_own_files(config, workdir), jax.device_count() if target is None else None
    )
    check_fits(config, workdir, build(config, config["data"]["vocabulary_size"]))
    if target is None:
        plan, lines = dry_run_lines(config, jax.device_count(), memory)
        written = plan and plan._asdict()
        hosts.say("\n".join([*lines, *_of_bfloat16(config), ESTIMATE] if plan else lines))
    else:
        written = _compiled(config, target)
    begun = (workdir / "config.json").exists()  # such a run has its own plan
    if written is not None and hosts.first() and not begun:
        write_json(workdir / "plan.json", written)


def _of_bfloat16(config):
    """The line that a user of float32 reads on a CPU that is faster in bfloat16."""
    if jax.default_backend() != "cpu" or config["dtype"] != "float32":
        return []
    gain = gain_of_bfloat16()
    told = (
        f"bfloat16     this CPU multiplies {gain:.1f} times as fast in it: try"
        " --config.dtype=bfloat16, see docs/speed.md"
    )
    return [told] if gain >= WORTH else []


def _compiled(config, name):
    target = topology(name)
    plan = targets.plan_for(target, config)
    hosts.say(f"{describe(plan)}\ncompiling    for {name}: a large model takes minutes")
    counted = targets.counts(target, plan, targets.compile_for(target, config, plan))
    hosts.say("\n".join(targets.describe(target, counted)))
    return plan._asdict() | {"target": counted}


def check_config(config: Mapping, devices: int | None) -> None:
    """Finds what is wrong with layers, optimizer, schedule or update before a long preparation of
    the corpus.

    devices: that share an update; None leaves that unchecked.
    """
    checked_settings(config["data"])
    check_values(config)
    writers.check(config["metrics"])
    cutoffs = *config["input"].get("cutoffs", ()), *config["output"]["table"].get("cutoffs", ())
    words = config["data"]["vocabulary_size"]
    model = build(config, max([words, *(cut + 1 for cut in cutoffs if isinstance(cut, int)), 2]))
    if (
        config["batches"]["layout"] == "streams"
        and jax.eval_shape(lambda: model.body.initial_carry(1)) == ()
    ):
        raise InputError(
            "batches.layout='streams' needs a body that carries its state on, and"
            f" body.name={config['body']['name']!r} does not: give batches.layout=packed, or a body"
            " such as awd_lstm"
        )
    sparse.optimizer(config, model)
    if config["evaluate_every"] == 0 and (group := optim.waits(config)):
        raise InputError(
            f"evaluate_every=0 with {group}.name={config[group]['name']!r}, which waits for"
            " evaluations: give evaluate_every=500"
        )
    if devices is not None:
        divide_update(config, devices)
