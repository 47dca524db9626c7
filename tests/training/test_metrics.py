"""Records of a run: metrics.jsonl, TensorBoard, Weights & Biases, lines on the
terminal.
"""

import contextlib
import importlib.util
import io
import json
import math
import re
import struct
import time
import types

import pytest
from rich.console import Console
from tensorboardX.proto.event_pb2 import Event, SessionLog

from adaptive_jax.parallel.progress import Bar, clock
from adaptive_jax.scores.scores import perplexity
from adaptive_jax.training import metrics as module
from adaptive_jax.training.metrics import Interval, Metrics
from adaptive_jax.training.writers import TensorBoard, check
from tests import refuses


def metrics(workdir, speeds=True):
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    names = "words_per_second", "step_seconds", "data_wait", "compile_seconds"
    of_speed = () if speeds else [f"train/{name}" for name in names]
    return [{key: value for key, value in line.items() if key not in of_speed} for line in lines]


def settings(steps=9, tensorboard=False, wandb=False):
    """The part of a config that metrics need."""
    return {"steps": steps, "metrics": {"tensorboard": tensorboard, "wandb": wandb}}


def test_an_interval(trained, monkeypatch):
    """Of two updates of 7 units that end 3 words: words a second are words of the text, losses a
    mean over tokens for each word; waiting is a share of the time, as in every window of a run.
    What a program took to compile is no part of that time.
    """
    times = iter([100.0, 138.0, 138.0, 140.0, 140.0])
    monkeypatch.setattr(module, "time", types.SimpleNamespace(perf_counter=times.__next__))
    interval = Interval(work=1e3, devices=1)
    update = {"nll": 2.0, "loss": 2.0, "tokens": 3.0, "gradient_norm": 1.0, "learning_rate": 0.1}
    interval.add(update, 1)
    interval.add(update | {"nll": 1.5, "tokens": 4.0}, 2)
    interval.waited += 2.0
    interval.leave_out(30.0)
    rates = interval.close()
    assert (rates["data_wait"], rates["words_per_second"]) == (0.25, 3 / 8)
    assert (rates["step_seconds"], rates["compile_seconds"]) == (4, 30)
    assert rates["nll"] == pytest.approx((2 * 3 + 1.5 * 4) / 3)
    assert "utilisation" not in rates  # of a CPU
    interval = Interval(work=1e3, devices=1)
    interval.add(update, 0)
    assert not {"nll", "perplexity", "words_per_second"} & interval.close().keys()  # no word ended
    shares = [line["train/data_wait"] for line in metrics(trained) if "train/data_wait" in line]
    assert len(shares) > 30
    assert all(0 <= share <= 1 for share in shares) and any(shares)


def test_waiting_is_shown_where_it_is_long(tmp_path, capsys):
    """On the terminal from 1 % on; in the files always."""
    shown = Metrics(tmp_path, 0, settings())
    for step, wait in (1, 0.0099), (2, 0.034):
        shown.write(step, "train", {"nll": 1.0, "data_wait": wait})
    shown.close()
    first, second = capsys.readouterr().out.splitlines()
    assert "waiting" not in first
    assert second.endswith("loss 1.000  waiting for data 3%")
    assert [line["train/data_wait"] for line in metrics(tmp_path)] == [0.0099, 0.034]


def scalars(*logs):
    """`{(name, step): value}` of TensorBoard event files in order, read by their record format."""
    values = {}
    for log in logs:
        data = log.read_bytes()
        while data:
            (size,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + size])
            data = data[12 + size + 4 :]
            if event.session_log.status == SessionLog.START:
                values = {
                    (name, step): value
                    for (name, step), value in values.items()
                    if step < event.step
                }
            for value in event.summary.value:
                if value.tag.startswith("config"):
                    continue
                assert (value.tag, event.step) not in values
                values[value.tag, event.step] = value.simple_value
    return values


def test_tensorboard_holds_the_metrics(trained):
    """Every number of metrics.jsonl stands in the event file, under its name and step."""
    (log,) = trained.glob("events.out.tfevents.*")
    expected = {
        (name, line["step"]): value
        for line in metrics(trained)
        for name, value in line.items()
        if name != "step"
    }
    names = "nll perplexity words_per_second step_seconds data_wait learning_rate gradient_norm"
    names += " compile_seconds"
    assert {name for name, _ in expected} == {
        *(f"train/{name}" for name in names.split()),
        "validation/nll",
        "validation/perplexity",
    }
    assert scalars(log) == pytest.approx(expected)


def test_an_evaluation_that_is_repeated_stands_once(tmp_path):
    """A run that is resumed twice from the same checkpoint scores again what was left out
    before it.
    """
    for _ in range(3):
        shown = Metrics(tmp_path, 4, settings())
        shown.write(4, "validation", {"nll": 1.0})
        shown.close()
    assert [line["step"] for line in metrics(tmp_path)] == [4]


def test_json_has_no_infinity(tmp_path):
    """An infinite perplexity is written as null, which every JSON reader knows, and a run that
    wrote one is resumed.
    """
    for first in 0, 1:
        shown = Metrics(tmp_path, first, settings(steps=2))
        shown.write(first + 1, "validation", {"nll": 1.0, "perplexity": math.inf})
        shown.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "Infinity" not in text and text.count('"validation/perplexity": null') == 2


PARTS = ["loss 4.412", "perplexity 82.5", "14,300 words/s", "lr 0.25", "waiting for data 3%"]


def terminal(width):
    return Console(width=width, force_terminal=True, file=io.StringIO(), legacy_windows=False)


def written(console):
    """The lines drawn so far, without colours."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())
    return [line for line in re.split(r"[\r\n]+", text) if line.strip()]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_bar_fits_the_terminal(width):
    """On one line, with what matters most, the rate among it: a bar of 20 columns hid the rate and
    its unit on a terminal of 80; what is said stands above it, neither wrapped nor cut;
    after the last step it shows the time passed.
    """
    console = terminal(width)
    bar = Bar(602, 600, PARTS, console)
    bar.show(601)
    bar.progress.refresh()
    running = written(console)[-1]
    assert re.match(r"601/602 (━+╸ )?loss 4.412", running) and len(running) <= width
    assert ("━" in running) == (width >= 100)
    assert "  ".join(PARTS[: 2 if width == 60 else 3 if width == 80 else 5]) in running
    said = "step 602/7,500  validation  " + "x" * 200
    bar.say(said)
    assert said in written(console)
    bar.show(602)
    bar.close()
    assert re.fullmatch(r"602/602 (━+ )?.* 0:00:00", written(console)[-1].rstrip())


def test_the_bar_of_a_run_with_hours():
    """Its ETA is the limit, where the steps would take longer."""
    console = terminal(120)
    bar = Bar(1_000_000, 0, console=console, limit=7_300)
    for step in 1, 2:
        time.sleep(0.02)
        bar.show(step)
    bar.progress.refresh()
    bar.close()
    assert "2:01:" in console.file.getvalue()


def test_output_without_a_terminal():
    """A log says now and then how far a long evaluation is, and training says nothing more."""
    for every, lines in (0.0, ["neighbours  1/2", "neighbours  2/2"]), (60.0, []), (None, []):
        console = Console(file=io.StringIO(), force_terminal=False)
        bar = Bar(2, 0, ["neighbours"], console, every=every)
        for step in 1, 2:
            bar.show(step)
        bar.close()
        assert console.file.getvalue().split("\n")[:-1] == lines


def test_hours_minutes_and_seconds():
    """Fractions of a second are dropped."""
    assert [clock(seconds) for seconds in (0, 107.9, 3_600)] == ["0:00:00", "0:01:47", "1:00:00"]


BEST = "best validation perplexity 7.39 at update 4"


@pytest.mark.parametrize(
    "first, reason, expected",
    [
        (0, "finished", f"finished: 6 updates in 0:00:00; {BEST}"),
        (4, "stopped early", f"stopped early: 6 updates, the last 2 in 0:00:00; {BEST}"),
        (6, "finished", f"finished: 6 updates; {BEST}"),
    ],
)
def test_a_run_that_ends_says_so(first, reason, expected, tmp_path, capsys):
    """With its time, its best evaluation, also one of an earlier process, and the command that
    evaluates. An infinite loss is not the best one.
    """
    workdir = tmp_path / "a run"
    workdir.mkdir()
    for done, updates in (0, range(first + 1)), (first, range(first + 1, 7)):
        shown = Metrics(workdir, done, settings(6))
        for step in updates:
            nll = {2: 3.0, 4: 2.0, 5: math.inf, 6: 2.5}.get(step)
            if nll is not None:
                losses = {"nll": nll, "perplexity": perplexity(nll)}
                shown.write(step, "validation", losses)
        shown.close()
    capsys.readouterr()
    shown.finish(6, reason)
    assert capsys.readouterr().out.splitlines() == [
        expected,
        f"evaluate:  python -m adaptive_jax evaluate --workdir='{workdir}' --split=test",
    ]


MANY = {"nll": 2.0, "gradient_norm": 0.5, "words_per_second": 1234.5}
MANY |= {"update/norm": math.nan, "skipped": 2}


def test_metrics_go_to_all_files_and_some_to_the_terminal(tmp_path, capsys):
    """A number that is not finite is null in JSON and no point of a curve; words a second are of
    tokens, where losses are.
    """
    shown = Metrics(tmp_path, 0, settings(tensorboard=True), unit="token")
    shown.write(3, "train", MANY)
    shown.close()
    assert capsys.readouterr().out == "step 3/9  train  loss 2.000  1,234 tokens/s  2 skipped\n"
    named = {f"train/{name}": value for name, value in MANY.items()}
    assert metrics(tmp_path) == [{"step": 3} | named | {"train/update/norm": None}]
    (log,) = tmp_path.glob("events.out.tfevents.*")
    assert scalars(log) == {(name, 3): value for name, value in named.items() if value == value}


def test_text_without_spaces_shows_tokens(tmp_path, capsys):
    """An interval in which no word ends printed `loss inf` and `0 words/s`."""
    update = {"nll": 3.0, "tokens": 50.0, "learning_rate": 0.1, "gradient_norm": 1.0}
    shown = Metrics(tmp_path, 0, settings())
    for step, words in (1, 0), (2, 1), (3, 40):
        interval = Interval(1.0, 1)
        interval.add(update, words)
        shown.write(step, "train", interval.close())
    shown.write(3, "validation", {"nll": 690.0, "perplexity": 3e299, "bits_per_character": 7.25})
    shown.close()
    first, second, third, fourth = capsys.readouterr().out.splitlines()
    for line in first, second:
        assert "train  3.000 nats a token" in line and "tokens/s" in line
    assert "inf" not in first and "perplexity" not in second and "train  loss 3.750" in third
    assert fourth.endswith("loss 690.000  perplexity 3.0e+299  7.250 bits a character")
    lines = metrics(tmp_path)
    assert "train/nll" not in lines[0] and lines[1]["train/nll"] == 150


def test_tensorboard_has_the_config_as_text(tmp_path):
    """Curves of runs were told apart by the names of their directories alone."""
    Metrics(tmp_path, 0, settings(tensorboard=True)).close()
    (log,) = tmp_path.glob("events.out.tfevents.*")
    assert b"    steps: 9\n" in log.read_bytes()


def test_tensorboard_is_a_switch(tmp_path):
    """Switched on later, it shows the run from its start; after a resume no step stands twice."""
    for first, on in (0, False), (2, True), (3, True):
        shown = Metrics(tmp_path, first, settings(tensorboard=on))
        for step in range(first + 1, first + 4):
            shown.write(step, "train", {"nll": float(10 * first + step)})
        shown.close()
        assert bool(list(tmp_path.glob("events.out.tfevents.*"))) == on
    assert [line["train/nll"] for line in metrics(tmp_path)] == [1, 2, 23, 34, 35, 36]
    logs = sorted(tmp_path.glob("events.out.tfevents.*"), key=lambda log: log.stat().st_mtime_ns)
    assert list(scalars(*logs).values()) == [1, 2, 23, 34, 35, 36]


def test_a_full_disk_is_an_error(small_disk):
    """Not an end of a thread, after which the run would wait for it for ever."""
    board = TensorBoard(small_disk, False, [], {})
    with contextlib.suppress(OSError), (small_disk / "other").open("wb", 0) as other:
        while other.write(bytes(4096)):
            pass
    with pytest.raises(OSError, match="No space left"):
        for step in range(1000):
            board.write(step, {f"train/{name}": 1.0 for name in range(9)})
    (small_disk / "other").unlink()
    board.close()


def test_a_missing_package_is_named(monkeypatch):
    """Where a config is checked, before anything is written."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with refuses("pip install wandb", "--config.metrics.wandb=False"):
        check(settings(wandb=True)["metrics"])
    check(settings()["metrics"])


def test_weights_and_biases(tmp_path, monkeypatch):
    """Offline, with the real package: a resumed run continues under the same id, and says what
    it was configured with.
    """
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    seen = []
    for first in 0, 3:
        shown = Metrics(tmp_path, first, settings(wandb=True))
        shown.write(first + 3, "train", MANY)
        seen.append((wandb.run.id, wandb.run.project, wandb.run.name, dict(wandb.run.config)))
        shown.close()
    name = (tmp_path / "wandb" / "id").read_text()
    assert seen == 2 * [(name, "adaptive_jax", tmp_path.name, settings(wandb=True))]
    files = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2
    deadline = time.monotonic() + 30  # a process of its own writes them
    while not all(b"train/gradient_norm" in file.read_bytes() for file in files):
        assert time.monotonic() < deadline
        time.sleep(0.1)
