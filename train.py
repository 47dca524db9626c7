"""Trains a language model.

    python train.py --config=configs/quickstart.py --workdir=runs/quickstart
    python train.py --config=configs/wikitext103.py:adp_t --workdir=runs/adp_t
    --config.body.layers=8

The word after the colon picks a row of the paper's table; --config.KEY=VALUE changes any setting.
The same command on the same workdir resumes the run.

Several hosts run the same command; outside TPU pods and SLURM each adds --coordinator=HOST:PORT
--hosts=N --host=I.
"""

import os

from absl import flags

from adaptive_jax import command
from adaptive_jax.errors import InputError

command.define_config()
MEMORY = flags.DEFINE_float(
    "memory",
    80,
    "With --dry_run: GB of memory of an accelerator, to show how 8, 32 and 64 would hold it.",
)
DRY_RUN = flags.DEFINE_bool(
    "dry_run", False, "Print the plan, write it to workdir/plan.json, and stop."
)
TARGET = flags.DEFINE_string(
    "target",
    None,
    "With --dry_run: a device that need not be here, such as h100 or v5e:2x2, whose compiler counts"
    " memory.",
)
HOURS = flags.DEFINE_float(
    "hours", None, "How long training may take; short for --config.hours, or --config.choose.hours."
)
INIT_FROM = flags.DEFINE_string(
    "init_from",
    None,
    "Workdir of a run from whose parameters this one starts, with its own corpus; short for"
    " --config.init_from.",
)
INIT_CHECKPOINT = flags.DEFINE_string(
    "init_checkpoint",
    None,
    "With --init_from: best, latest or the number of updates; short for --config.init_checkpoint.",
)
TUNE_CPU = flags.DEFINE_bool(
    "tune_cpu", True, "On a CPU, train with large pages of memory and two devices, which is faster."
)
EXPLAIN = flags.DEFINE_bool(
    "explain",
    False,
    "Print every key of the config: its value, its default and its meaning; and stop.",
)
command.define_workdir("Directory of this run: config, vocabulary, metrics, checkpoints.")
flags.adopt_module_key_flags(command)  # --help shows them


def main():
    config, switched = command.config()
    if HOURS.value is not None:
        if "choose" in config:
            config["choose"]["hours"] = HOURS.value
        else:
            config["hours"] = HOURS.value
    for flag in INIT_FROM, INIT_CHECKPOINT:
        if flag.value is not None:
            config[flag.name] = flag.value
    if EXPLAIN.value:
        from adaptive_jax import explain

        return print(explain.config(config))
    workdir, others = command.workdir()
    if not 0 < MEMORY.value < 1e9:
        raise InputError(
            f"--memory={MEMORY.value:g} is no memory: give the GB of an accelerator, such as"
            " --memory=80"
        )
    if TARGET.value is not None:
        if not DRY_RUN.value:
            raise InputError(
                f"--target={TARGET.value} compiles for a device that need not be here: add"
                " --dry_run"
            )
        os.environ["JAX_PLATFORMS"] = (
            "cpu"  # nothing runs, and plugins of devices that are not here would complain
        )
    tune_cpu = TUNE_CPU.value and TARGET.value is None
    from adaptive_jax.parallel import processors

    if tune_cpu:
        processors.use_large_pages()
    from adaptive_jax.parallel import hosts
    from adaptive_jax.training import loop
    from adaptive_jax.training.dry_run import dry_run

    hosts.initialize(*others)
    if tune_cpu and processors.use_two_devices(config):
        switched = [
            *switched,
            "CPU          two devices share its cores; --tune_cpu=false trains on one",
        ]
    for line in switched:
        hosts.say(line)
    with hosts.together():
        if DRY_RUN.value:
            dry_run(config, workdir, int(MEMORY.value * 1e9), TARGET.value)
        else:
            row, changed = command.published()
            loop.train(
                config,
                workdir,
                (
                    row,
                    changed + [flag.name for flag in (HOURS, INIT_FROM) if flag.value is not None],
                ),
            )


if __name__ == "__main__":
    command.run(
        main,
        stopped=(
            "stopped: the same command goes on from the last checkpoint, or starts anew where there"
            " is none"
        ),
    )
