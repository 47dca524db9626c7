"""Trains a row of a paper to its end, and holds its test perplexity against the published one.
`benchmarks.gpu` runs it; the same command resumes.

    python -m benchmarks.gpu_training --row=penn_treebank:awd_sm --data=DIR --workdir=DIR
        [--tiny] [--json=FILE]
"""

import importlib
import json
import subprocess
import sys
from pathlib import Path

from absl import flags

from adaptive_jax.config import commands
from adaptive_jax.errors import InputError

ROOT = Path(__file__).parents[1]
CLOSE = 0.02  # of the published perplexity
TINY = {
    "steps": 4,
    "evaluate_every": 2,
    "checkpoint_every": 2,
    "tokens_per_update": 140,
    "tokens_per_device": 140,
    "body.features": 20,
    "body.widths": (20, 20),
}


def run(script: str, *arguments: str) -> None:
    """Runs a script of the project. Raises InputError if it fails."""
    status = subprocess.run([sys.executable, script, *arguments], cwd=ROOT).returncode
    if status:
        raise InputError(f"{script} ended with status {status}: fix what it reports")


def main(settings) -> None:
    """Trains, scores the test split, and says whether the published number was reached."""
    file, _, row = settings.row.partition(":")
    paper = importlib.import_module(f"configs.{file}").ROWS[row].paper
    workdir = Path(settings.workdir).absolute()
    changes = {"data.path": settings.data, "metrics.tensorboard": False}
    changes |= TINY if settings.tiny else {}
    change = [f"--config.{key}={value}" for key, value in changes.items()]
    run("train.py", f"--config=configs/{file}.py:{row}", f"--workdir={workdir}", *change)
    run("evaluate.py", f"--workdir={workdir}", "--split=test")
    results = sorted((workdir / "eval").glob("test-*.json"), key=lambda path: path.stat().st_mtime)
    result = json.loads(results[-1].read_text())
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    valid = [line["validation/perplexity"] for line in lines if "validation/perplexity" in line]
    numbers = {
        "row": settings.row,
        "updates": lines[-1]["step"],
        "valid": min(valid),
        "published_valid": paper.valid,
        "test": result["perplexity"],
        "published_test": paper.test,
        "verdict": "reached" if result["perplexity"] < (1 + CLOSE) * paper.test else "missed",
    }
    if settings.json:
        Path(settings.json).write_text(json.dumps(numbers, indent=2) + "\n")
    print(
        f"{settings.row}: {numbers['verdict']}: test perplexity {numbers['test']:.2f}, published"
        f" {paper.test}; validation {numbers['valid']:.2f}, published {paper.valid};"
        f" {numbers['updates']:,} updates"
    )


if __name__ == "__main__":
    flags.DEFINE_string("row", None, "FILE:ROW of configs/.", required=True)
    flags.DEFINE_string("data", None, "Directory of its text.", required=True)
    flags.DEFINE_string("workdir", None, "Workdir of the run.", required=True)
    flags.DEFINE_bool("tiny", False, "A very small model and four updates, as a test.")
    flags.DEFINE_string("json", None, "File for the numbers.")
    commands.run(lambda: main(flags.FLAGS))
