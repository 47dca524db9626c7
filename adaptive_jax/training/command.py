"""Trains a language model.

    python train.py --config=configs/quickstart.py --workdir=runs/quickstart
    python train.py --config=configs/wikitext103.py:adp_t --workdir=runs/x --config.body.layers=8
    python train.py --init_from=runs/x --workdir=runs/y --config.data.path=DIR

The word after the colon picks a row of the paper's table; --config.KEY=VALUE changes any setting.
The same command on the same workdir resumes the run.

Several hosts run the same command. TPU pods, SLURM and mpirun (with mpi4py) connect them;
elsewhere each host adds --coordinator=HOST:PORT --hosts=N --host=I.
"""

import functools
import os
from typing import Annotated, NamedTuple

from adaptive_jax.config import commands
from adaptive_jax.config import flags as config_flags
from adaptive_jax.config.options import Option
from adaptive_jax.errors import InputError

STOPPED = (
    "stopped: the same command resumes from the last checkpoint, or starts anew where there is none"
)


class Train(NamedTuple):
    """Flags of the command.

    Attributes:
        dry_run: Print the plan, write it to workdir/plan.json, and stop.
        target: With --dry_run: a device that need not be present, such as h100 or v5e:2x2, whose
            compiler counts memory.
        hours: How long training may take; short for --config.hours.
        init_from: Workdir of a run whose parameters this one starts from, with a corpus of its own.
            Without --config, it has the config of that run. Short for --config.init_from.
        init_checkpoint: With --init_from: best, latest or the number of updates; short for
            --config.init_checkpoint.
        tune_cpu: On a CPU, train with large pages of memory and two devices, which is faster.
        explain: Print every key of the config, its default and its meaning, and stop; without
            --config and --init_from the page docs/configuration.md.
    """

    dry_run: bool = False
    target: str | None = None
    hours: Annotated[float | None, Option(within="[0, inf)")] = None
    init_from: str | None = None
    init_checkpoint: str | None = None
    tune_cpu: bool = True
    explain: bool = False


def define_flags() -> None:
    """Defines the flags of the command."""
    config_flags.define()
    config_flags.define_options(Train, commands.Workdir, commands.Allow, commands.Hosts)


def main():
    """Trains as the flags say, or prints the plan or the keys."""
    options = config_flags.options(Train)
    keys = "hours", "init_from", "init_checkpoint"  # of the config, which have short flags
    short = {key: value for key in keys if (value := getattr(options, key)) is not None}
    if options.explain:
        from adaptive_jax.config import explain

        if not (config_flags.has_config() or options.init_from):
            return print(explain.page())
        from adaptive_jax.training.finetuning import config_of_origin

        origin = functools.partial(config_of_origin, options.init_from)
        config, _ = config_flags.config(origin if options.init_from else None)
        return print(explain.config(config | short))
    workdir = commands.workdir()
    if options.target is not None:
        if not options.dry_run:
            raise InputError(
                f"--target={options.target} compiles for a device that need not be here: add"
                " --dry_run"
            )
        # Nothing runs, and plugins of absent devices would complain.
        os.environ["JAX_PLATFORMS"] = "cpu"
    tune_cpu = options.tune_cpu and options.target is None
    # After the flags: --help and their errors should not wait for jax.
    from adaptive_jax.parallel import processors

    if tune_cpu:
        processors.use_large_pages()
    from adaptive_jax.parallel import hosts
    from adaptive_jax.training import finetuning, loop
    from adaptive_jax.training.dry_run import dry_run

    origin = functools.partial(finetuning.config_of_origin, options.init_from, workdir)
    config, switched = config_flags.config(origin if options.init_from else None)
    config |= short
    hosts.initialize(*config_flags.options(commands.Hosts))
    if tune_cpu and processors.use_two_devices(config):
        switched = [
            *switched,
            "CPU          two devices share its cores; --tune_cpu=false trains on one",
        ]
    for line in switched:
        hosts.log0(line)
    with hosts.fail_together():
        if options.dry_run:
            dry_run(config, workdir, options.target)
        else:
            row, changed = config_flags.published(config)
            changed += ["hours"] if options.hours else []
            loop.train(config, workdir, (row, changed))
