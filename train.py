"""Trains a language model.

    python train.py --config=configs/quickstart.py --workdir=runs/quickstart
    python train.py --config=configs/wikitext103.py:adp_t --workdir=runs/adp_t --config.body.layers=8

The word after the colon picks a row of the paper's table; --config.KEY=VALUE changes any setting. The same command on the
same workdir goes on where the run stopped.

Several hosts run the same command; outside TPU pods and SLURM each adds --coordinator=HOST:PORT --hosts=N --host=I.
"""

from pathlib import Path

from absl import flags
from ml_collections import config_flags

from adaptive_jax import command

CONFIG = config_flags.DEFINE_config_file("config", None, "Config file, with :row where it has rows.", lock_config=True)
WORKDIR = flags.DEFINE_string("workdir", None, "Directory of this run: config, vocabulary, metrics, checkpoints.")
MEMORY = flags.DEFINE_float("memory", 80, "With --dry_run: GB of memory of an accelerator, to show how 8, 32 and 64 would hold it.")
DRY_RUN = flags.DEFINE_bool("dry_run", False, "Print the plan, write it to workdir/plan.json, and stop.")
COORDINATOR = flags.DEFINE_string("coordinator", None, "HOST:PORT of host 0; not on TPU pods and under SLURM.")
HOSTS = flags.DEFINE_integer("hosts", None, "Number of hosts, or processes; not on TPU pods and under SLURM.")
HOST = flags.DEFINE_integer("host", None, "Number of this host, from 0; not on TPU pods and under SLURM.")
flags.mark_flags_as_required(["config", "workdir"])
flags.register_validator("workdir", lambda path: "://" not in (path or ""), "must be a directory on a disk that all hosts share")


def main():
    from adaptive_jax.devices import hosts  # after the flags: --help and their errors should not wait for jax
    from adaptive_jax.training import loop

    config, workdir = CONFIG.value.to_dict(), Path(WORKDIR.value)
    hosts.initialize(COORDINATOR.value, HOSTS.value, HOST.value)
    with hosts.together():
        if DRY_RUN.value:
            loop.dry_run(config, workdir, int(MEMORY.value * 1e9))
        else:
            loop.train(config, workdir)


if __name__ == "__main__":
    command.run(main)
