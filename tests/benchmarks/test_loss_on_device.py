"""The benchmark for a GPU, on this CPU: its rows, peers that fail, its arguments."""

import json
import time

import pytest

from benchmarks import loss_on_device
from benchmarks.loss_on_device import Size, Step


def test_rows_are_written_at_once(monkeypatch, tmp_path, capsys):
    """Peers agree with float32, one that fails is a line, and rows are in the file before the
    next is computed.
    """
    file, counts = tmp_path / "rows.jsonl", []

    def broken(hidden, table, targets):
        counts.append(len(file.read_text().splitlines()))
        raise RuntimeError("no such kernel\nTraceback of many lines")

    peers = loss_on_device.jax_peers(32) | {"broken": broken}
    monkeypatch.setattr(loss_on_device, "jax_peers", lambda tokens: peers)
    monkeypatch.setattr(loss_on_device, "SECONDS", 0)
    monkeypatch.setattr(loss_on_device, "STEPS", [Step(False, [Size(24_000, 256, 512)])])
    loss_on_device.main(["--step=0", "--scale=16", f"--json={file}"])
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["peer"] for row in rows] == [*peers] and counts == [len(peers) - 1]
    assert all(row["words"] == 1500 and row["tokens"] == 32 for row in rows)
    assert all(row["errors"] and row["milliseconds"] > 0 for row in rows[:-1])
    assert all(error < 0.01 for row in rows[:-1] for error in row["errors"])
    assert rows[-1]["passed_over"] == "no such kernel"
    assert "broken                passed over: no such kernel\n" in capsys.readouterr().out


def test_no_peer_starts_after_the_end():
    """A case that time does not allow is named, not computed."""
    rows = list(loss_on_device.rows(Step(False, [Size(64, 8, 8)]), "float32", time.monotonic()))
    assert {row["passed_over"] for row in rows} == {"out of time"}


@pytest.mark.parametrize(
    "flag, error",
    [
        ("--scale=0", "--scale=0 must be 1 or more"),
        ("--step=9", "argument --step: invalid choice: 9"),
        ("--step=0", "JAX finds no GPU: try it on a CPU with --scale=64"),
        ("--table=float64", "argument --table: invalid choice"),
    ],
)
def test_invalid_arguments(flag, error, capsys):
    """One line, and status 2."""
    with pytest.raises(SystemExit) as ended:
        loss_on_device.main([flag])
    printed = capsys.readouterr().err
    assert ended.value.code == 2 and printed.startswith(f"error: {error}")
    assert printed.count("\n") == 1
