"""Trains a language model.

    python train.py --config=configs/quickstart.py --workdir=runs/quickstart
    python train.py --config=configs/wikitext103.py:adp_t --workdir=runs/adp_t --config.body.layers=8

The word after the colon picks a row of the paper's table; --config.KEY=VALUE changes any setting. The same command on the
same workdir goes on where the run stopped.
"""

from pathlib import Path

from absl import flags
from ml_collections import config_flags

from adaptive_jax import command

CONFIG = config_flags.DEFINE_config_file("config", None, "Config file, with :row where it has rows.", lock_config=True)
WORKDIR = flags.DEFINE_string("workdir", None, "Directory of this run: config, vocabulary, metrics, checkpoints.")
DRY_RUN = flags.DEFINE_bool("dry_run", False, "Print the plan, write it to workdir/plan.json, and stop.")
flags.mark_flags_as_required(["config", "workdir"])


def main():
    from adaptive_jax import training  # after the flags: --help and their errors should not wait for jax

    config, workdir = CONFIG.value.to_dict(), Path(WORKDIR.value)
    if DRY_RUN.value:
        training.dry_run(config, workdir)
    else:
        training.train(config, workdir)


if __name__ == "__main__":
    command.run(main)
