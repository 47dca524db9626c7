"""Trains a language model.

    python train.py --config=configs/quickstart.py --workdir=runs/quickstart
    python train.py --config=configs/wikitext103.py:adp_t --workdir=runs/x --config.body.layers=8

The word after the colon picks a row of the paper's table; --config.KEY=VALUE changes any setting.
The same command on the same workdir resumes the run.

Several hosts run the same command. TPU pods, SLURM, mpirun and indexed jobs of Kubernetes tell them
of each other; elsewhere each adds --coordinator=HOST:PORT --hosts=N --host=I.
"""

import os

from absl import flags

from adaptive_jax.config import commands
from adaptive_jax.config import flags as config_flags
from adaptive_jax.errors import InputError

config_flags.define()
DRY_RUN = flags.DEFINE_bool(
    "dry_run", False, "Print the plan, write it to workdir/plan.json, and stop."
)
TARGET = flags.DEFINE_string(
    "target",
    None,
    "With --dry_run: a device that need not be here, such as h100 or v5e:2x2, whose compiler counts"
    " memory.",
)
HOURS = flags.DEFINE_float("hours", None, "How long training may take; short for --config.hours.")
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
    "Print every key of the config, its default and its meaning, and stop; without --config the"
    " page docs/configuration.md.",
)
commands.define_workdir("Directory of this run: config, vocabulary, metrics, checkpoints.")
flags.adopt_module_key_flags(commands)  # --help shows them
flags.adopt_module_key_flags(config_flags)
STOPPED = (
    "stopped: the same command resumes from the last checkpoint, or starts anew where there is none"
)


def configured():
    """The config with the values of all flags, and the lines of classes that flags switched."""
    config, switched = config_flags.config()
    for flag in HOURS, INIT_FROM, INIT_CHECKPOINT:
        if flag.value is not None:
            config[flag.name] = flag.value
    return config, switched


def main():
    """Trains as the flags say, or prints the plan or the keys."""
    if EXPLAIN.value:
        from adaptive_jax.config import explain

        has_config = flags.FLAGS["config"].value is not None
        return print(explain.config(configured()[0]) if has_config else explain.page())
    workdir, others = commands.workdir()
    if TARGET.value is not None:
        if not DRY_RUN.value:
            raise InputError(
                f"--target={TARGET.value} compiles for a device that need not be here: add"
                " --dry_run"
            )
        # Nothing runs, and plugins of devices that are not here would complain.
        os.environ["JAX_PLATFORMS"] = "cpu"
    tune_cpu = TUNE_CPU.value and TARGET.value is None
    # After the flags: --help and their errors should not wait for jax.
    from adaptive_jax.parallel import processors

    if tune_cpu:
        processors.use_large_pages()
    config, switched = configured()
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
        hosts.log0(line)
    with hosts.fail_together(lambda: loop.resumes(workdir)):
        if DRY_RUN.value:
            dry_run(config, workdir, TARGET.value)
        else:
            row, changed = config_flags.published()
            changed += ["hours"] if HOURS.value else []
            loop.train(config, workdir, (row, changed))
