"""Trains rows of the papers at their own size, to the end, and holds them against what was
published.

    python -m benchmarks.published --next --home=DIR [--data=DIR]   starts or resumes what is due
    python -m benchmarks.published --stop --home=DIR                stops it, its last update saved
    python -m benchmarks.published                                  draws curves, prints the table

One row trains at a time, in the background and at the lowest priority, from a clone at a fixed
commit with an environment of its own, so that changes of this checkout do not touch it. Its
metrics, thinned to 500 lines, its config, its plan and `result.json` are copied to
benchmarks/published/ROW whenever `--next` is asked, unless a longer curve is there; commit them, so
that a curve survives the machine. `--next` says where the row stands, and evaluates it once it has
ended. `--only=ROW` starts that row; `groc` first needs `DIR/code/.venv/bin/pip install nltk`.
"""

import dataclasses
import importlib
import itertools
import json
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

from absl import flags

from adaptive_jax.config import commands
from adaptive_jax.errors import InputError
from adaptive_jax.files import absolute, path_of
from benchmarks.lines import epochs

ROOT = Path(__file__).parents[1]
KEPT = Path(__file__).with_name("published")
LINES = 500  # of metrics that are kept of a row
ROWS = (  # in the order of training
    "penn_treebank:gcnn_sentences",
    "penn_treebank:lstm_sentences",
    "penn_treebank:groc_tied",
    "penn_treebank:groc_adaptive",
    "penn_treebank:awd_asm",
    "penn_treebank:awd_sm",
    "penn_treebank:groc",
    "penn_treebank:groc_lookup",
    "penn_treebank:groc_bilinear",
    "penn_treebank:groc_deep_residual",
)
NEXT = flags.DEFINE_bool("next", False, "Start or resume the row that is due.")
STOP = flags.DEFINE_bool("stop", False, "Stop the row that trains, after its update.")
HOME = flags.DEFINE_string("home", None, "Directory of clone, environment and runs.")
DATA = flags.DEFINE_string(
    "data", "", "Directory of train.txt, valid.txt and test.txt; empty: download."
)
ONLY = flags.DEFINE_enum("only", None, ROWS, "The row to start; left out: the first that is due.")
FLAGS = flags.DEFINE_multi_string(
    "flag", [], "A further flag of train.py, such as a lexicon's place; the same at every --next."
)


@dataclasses.dataclass(frozen=True)
class Target:
    """A row that is trained: where it runs, and what the paper printed."""

    row: str  # FILE:ROW of configs/
    home: Path

    @property
    def name(self) -> str:
        """The name of its directories, such as penn_treebank-groc_tied."""
        return self.row.replace(":", "-")

    @property
    def workdir(self) -> Path:
        """Its workdir."""
        return self.home / self.name

    @property
    def log(self) -> Path:
        """Output of train.py, over all its starts."""
        return self.home / f"{self.name}.log"

    @property
    def command(self) -> tuple[str, ...]:
        """The command that trains it, without places of this machine and further flags."""
        return "python", "train.py", f"--config=configs/{self.row.replace(':', '.py:')}"

    @property
    def paper(self):
        """The published numbers of its config's row."""
        file, row = self.row.split(":")
        return importlib.import_module(f"configs.{file}").ROWS[row].paper

    @property
    def words(self) -> int:
        """The words of its train text."""
        return importlib.import_module(f"configs.{self.row.partition(':')[0]}").WORDS

    def result(self) -> dict:
        """Results that are kept; empty before the first evaluation."""
        path = KEPT / self.name / "result.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def metrics(self) -> list[dict]:
        """All lines of its metrics so far."""
        path = self.workdir / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def ended(self) -> bool:
        """True if training came to its end."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return any(line.startswith(("finished", "stopped early")) for line in lines)


def running(home: Path) -> int | None:
    """The process that trains; None if there is none."""
    path = home / "pid"
    if not path.exists():
        return None
    pid = int(path.read_text())
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, PermissionError):
        return None
    arguments = Path(f"/proc/{pid}/cmdline")  # of another process after a restart of Linux
    return None if arguments.exists() and str(home) not in arguments.read_text() else pid


def stop(home: Path) -> None:
    """Stops what trains, and waits until its last update is saved."""
    if (pid := running(home)) is None:
        return print("nothing trains")
    os.kill(pid, signal.SIGTERM)
    while running(home):
        time.sleep(0.5)
    print(f"stopped process {pid}; --next resumes it")


def command(home: Path, script: str, *arguments: str) -> list[str]:
    """A command of the clone in its own environment, both of which are made first."""
    clone = home / "code"
    if not clone.exists():
        subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    if not (clone / ".venv" / "done").exists():
        subprocess.run([sys.executable, "-m", "venv", clone / ".venv"], check=True)
        install = ["-m", "pip", "install", "--quiet", "-r", "requirements.txt", "-e", "."]
        subprocess.run([clone / ".venv/bin/python", *install], cwd=clone, check=True)
        (clone / ".venv" / "done").touch()
    return [str(clone / ".venv/bin/python"), script, *arguments]


def start(target: Target) -> None:
    """Starts or resumes the training of a row in the background."""
    arguments = [*target.command[2:], f"--workdir={target.workdir}"]
    if DATA.value:
        arguments.append(f"--config.data.path={absolute(path_of(DATA.value))}")
    arguments += FLAGS.value
    train = ["nice", "-n", "19", *command(target.home, "train.py", *arguments)]
    with target.log.open("a") as log:
        process = subprocess.Popen(
            train, cwd=target.home / "code", stdout=log, stderr=log, start_new_session=True
        )
    group = Path(f"/proc/{process.pid}/autogroup")
    if group.exists():  # Linux may share processors among sessions first, and heed nice within one
        group.write_text("19")
    (target.home / "pid").write_text(str(process.pid))
    print(f"{target.row}: started as process {process.pid}; its log is {target.log}")


def evaluate(target: Target) -> float:
    """The test perplexity of a row that has ended, of all its split in one stream, with `<eos>`."""
    arguments = [f"--workdir={target.workdir}", "--split=test"]
    if DATA.value:
        arguments.append(f"--data_path={absolute(path_of(DATA.value))}")
    subprocess.run(
        command(target.home, "evaluate.py", *arguments), cwd=target.home / "code", check=True
    )
    results = sorted(
        (target.workdir / "eval").glob("*.json"), key=lambda path: path.stat().st_mtime
    )
    return json.loads(results[-1].read_text())["perplexity"]


def keep(target: Target) -> dict:
    """Copies what is worth keeping of a run into benchmarks/published, and returns its result. A
    curve that another machine drew further stays.
    """
    lines = target.metrics()
    if not lines or lines[-1]["step"] < target.result().get("updates", 0):
        return target.result()
    evaluations = [line for line in lines if "validation/perplexity" in line]
    updates = [line for line in lines if "train/nll" in line]
    thinned = updates[:: max(1, -(-len(updates) // max(1, LINES - len(evaluations))))]
    directory = KEPT / target.name
    directory.mkdir(parents=True, exist_ok=True)
    shown = sorted(thinned + evaluations, key=lambda line: line["step"])
    (directory / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in shown))
    places = [flag.partition("=")[2] for flag in FLAGS.value if flag != without_path(flag)]
    places += [str(absolute(path_of(DATA.value)))] if DATA.value else []
    for name in "config.json", "plan.json":
        text = (target.workdir / name).read_text().replace(str(target.home), "HOME")
        for place in places:
            text = text.replace(json.dumps(place), '"DIR"')
        (directory / name).write_text(text)
    config = json.loads((directory / "config.json").read_text())
    steps = [0, *(line["step"] for line in updates)]
    seconds = [
        line["train/step_seconds"] * (step - before)
        for line, (before, step) in zip(updates, itertools.pairwise(steps), strict=True)
    ]
    commit = ["git", "-C", str(target.home / "code"), "rev-parse", "--short", "HEAD"]
    result = target.result() | {
        "row": target.row,
        "published": target.paper.test,
        "published_validation": target.paper.valid,
        "valid_perplexity": min((e["validation/perplexity"] for e in evaluations), default=None),
        "epochs": round(epochs(config, lines[-1]["step"], target.words), 1),
        "updates": lines[-1]["step"],
        "hours": round(sum(seconds) / 3600, 2),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPU cores, beside other work",
        "commit": subprocess.run(commit, capture_output=True, text=True, check=True).stdout.strip(),
        "command": " ".join((*target.command, *map(without_path, FLAGS.value))),
        "ended": target.ended(),
    }
    if result["updates"] > target.result().get("updates", 0):
        result.pop("test_perplexity", None)  # of an earlier checkpoint
    if target.ended() and "test_perplexity" not in result:
        result["test_perplexity"] = evaluate(target)
    (directory / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    return result


def without_path(flag: str) -> str:
    """A flag of train.py, its value replaced if that is a place of this machine."""
    name, _, value = flag.partition("=")
    return f"{name}=DIR" if value.startswith(("/", "~", ".")) else flag


def say(result: dict) -> None:
    """One line on where a row stands."""
    if not result:
        return
    test = result.get("test_perplexity")
    print(
        f"{result['row']}: {result['epochs']} epochs, validation {result['valid_perplexity']}"
        f" (published {result['published_validation'] or 'nowhere'}), test {test or 'not yet'}"
        f" (published {result['published']})"
    )


def advance(home: Path) -> None:
    """Keeps and says what there is, and starts or resumes the first row that has not ended. One
    that was stopped and evaluated is left as it is, unless --only names it.
    """
    home.mkdir(parents=True, exist_ok=True)
    busy = running(home)
    for target in (Target(row, home) for row in ([ONLY.value] if ONLY.value else ROWS)):
        result = target.result()
        if not result.get("ended") and (ONLY.value or "test_perplexity" not in result):
            say(keep(target))
            if not target.ended():
                return print(f"process {busy} trains") if busy else start(target)
        else:
            say(target.result())
    print(f"{ONLY.value} has ended" if ONLY.value else "all rows have ended")


def draw() -> None:
    """Draws the curves of all rows with the published numbers as lines, and prints the table."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    results = {path.parent: json.loads(path.read_text()) for path in KEPT.glob("*/result.json")}
    results = {path: each for path, each in results.items() if each["valid_perplexity"]}
    if not results:
        return print(f"nothing in {KEPT}: start with --next --home=DIR")
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    print("| row | published valid / test | ours valid / test | epochs | hours | commit |")
    print("|---|---|---|---:|---:|---|")
    for number, (directory, result) in enumerate(sorted(results.items())):
        lines = [
            json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()
        ]
        curve = [line for line in lines if "validation/perplexity" in line]
        steps = [line["step"] for line in curve]
        losses = [line["validation/perplexity"] for line in curve]
        axes.plot(steps, losses, color=f"C{number}", label=result["row"])
        if result["published_validation"]:
            axes.axhline(result["published_validation"], color=f"C{number}", linestyle=":")
        ours = f"{result['valid_perplexity']:.1f} / "
        test = result.get("test_perplexity")
        ours += f"{test:.1f}" if test else "not ended"
        published = f"{result['published_validation'] or 'none'} / {result['published']}"
        print(
            f"| `{result['row']}` | {published} | {ours} | {result['epochs']} | {result['hours']}"
            f" | {result['commit']} |"
        )
    axes.set(xlabel="updates", ylabel="validation perplexity", yscale="log")
    axes.set_title("Published numbers, dotted, and ours")
    axes.legend()
    figure.savefig(KEPT / "curves.png", dpi=120)
    pyplot.close(figure)


def main():
    if (NEXT.value or STOP.value) and not HOME.value:
        raise InputError("--home is missing: use a directory for clone, environment and runs")
    if STOP.value:
        stop(path_of(HOME.value).resolve())
    elif NEXT.value:
        advance(path_of(HOME.value).resolve())
    else:
        draw()


if __name__ == "__main__":
    commands.run(main)
