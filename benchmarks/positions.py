"""Perplexity on longer windows than those of training, by how a transformer knows the order of its
tokens.

    python -m benchmarks.positions [--windows=64,128,256,512] [--split=test]
        [--workdir=runs/positions] [--steps=600]

Trains the quickstart on windows of 64 tokens with sinusoidal and learned positions and with ALiBi
(Press, Smith & Lewis 2022, whose Figure 1 this is in small), and evaluates each model on every
window, without context: a longer window shows a token more of the text before it. Learned positions
end where training ended. When started again, it keeps the runs that are finished. The three runs
take about 6 minutes on 2 cores.
"""

from pathlib import Path

from absl import flags

from adaptive_jax.config import commands
from adaptive_jax.config.keys import resolve
from adaptive_jax.errors import InputError, check_at_least
from adaptive_jax.evaluation.evaluate import Request, evaluate
from adaptive_jax.training.loop import train
from benchmarks.outputs import machine
from configs import quickstart

ROWS = {"sinusoidal": "adp_t", "learned": "learned", "alibi": "alibi"}  # of configs/quickstart.py


def measure(row: str, settings) -> list[float | None]:
    """Trains a row, or resumes its run, and returns the perplexity on every window; None where
    it cannot read so many tokens.
    """
    config, workdir = resolve(quickstart.get_config(row)), Path(settings.workdir) / row
    config["steps"] = settings.steps
    train(config, workdir)
    found = []
    for window in map(int, settings.windows):
        readable = (
            config["body"]["positions"] != "learned" or window <= config["body"]["max_positions"]
        )
        found.append(
            evaluate(workdir, Request(settings.split, window))["perplexity"] if readable else None
        )
    return found


def main(settings) -> None:
    """Prints a table in Markdown: a row for each kind of positions, a column for each window."""
    if not all(window.isdecimal() and int(window) for window in settings.windows):
        raise InputError(
            f"--windows={','.join(settings.windows)}: give lengths of 1 or more, such as"
            " --windows=64,512"
        )
    check_at_least(1, steps=settings.steps)
    rows = {positions: measure(row, settings) for positions, row in ROWS.items()}
    print(
        f"\n{machine()}\n\n| positions |"
        f" {' | '.join(f'window {window}' for window in settings.windows)} |"
    )
    print(f"|---{'|---:' * len(settings.windows)}|")
    for positions, perplexities in rows.items():
        print(
            f"| {positions} |"
            f" {' | '.join('none' if each is None else f'{each:.2f}' for each in perplexities)} |"
        )


if __name__ == "__main__":
    flags.DEFINE_list(
        "windows", ["64", "128", "256", "512"], "Tokens that the models read at once."
    )
    flags.DEFINE_enum("split", "test", ["train", "validation", "test"], "Split to evaluate on.")
    flags.DEFINE_string("workdir", "runs/positions", "Directory for the runs.")
    flags.DEFINE_integer("steps", quickstart.SETTINGS["steps"], "Updates of each run.")
    commands.run(lambda: main(flags.FLAGS), stopped="stopped: the same command resumes")
