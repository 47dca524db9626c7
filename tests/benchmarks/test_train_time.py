"""Rows in equal time: an update is timed, and the rows are trained for as many as fit."""

import importlib.util
import json
from types import SimpleNamespace

import pytest

from adaptive_jax.config.rows import Paper, Row
from benchmarks import lines, train_time
from configs import papers, quickstart
from tests import refuses


@pytest.fixture
def flags(settings, tmp_path, monkeypatch):
    """Flags for two rows of a tiny corpus file, "tiny", one of which counts n-grams."""
    flat = quickstart.SETTINGS | quickstart.LAYERS["adp_t"] | settings()
    tables = {"rows": 30, "row_width": 8, "row_cutoffs": (10,), "hashed_rows": 0}
    layers = {"adp_t": flat, "ngrams": papers.with_ngrams(flat, kind="banded", **tables)}
    rows = {"adp_t": Row("adp_t", paper=Paper(hours=30)), "ngrams": Row("ngrams", {}, Paper())}
    file = SimpleNamespace(SETTINGS={}, LAYERS=layers, ROWS=rows)
    monkeypatch.setitem(lines.CORPORA, "tiny", file)
    flags = {"rows": list(rows), "size": "full", "dtype": "", "batch": 16, "repeats": 1}
    flags |= {"count": False, "hours": 0.0, "data": flat["data.path"], "workdir": str(tmp_path)}
    return SimpleNamespace(**flags, figures=str(tmp_path))


def test_rows_train_for_equal_time(flags, tmp_path, capsys):
    """Hours are updates times the seconds of one, which are kept: a row that is resumed on a busy
    machine makes as many. Rows that are there are not timed again.
    """
    flags.count = True
    train_time.main("tiny", flags)
    path = tmp_path / "tiny_full" / "times.json"
    assert all("seconds" not in row for row in json.loads(path.read_text()).values())
    flags.count = False
    train_time.main("tiny", flags)
    times = json.loads(path.read_text())
    assert all(row["seconds"] > 0 for row in times.values()) and times.keys() == {*flags.rows}
    assert "| `adp_t` | 0.00 | 1.00 |" in capsys.readouterr().out
    if not importlib.util.find_spec("matplotlib"):
        return
    for name, seconds in ("adp_t", 2.0), ("ngrams", 3.0):
        times[name]["seconds"] = seconds
    path.write_text(json.dumps(times))
    flags.hours = 12 / 3600
    train_time.main("tiny", flags)
    shown = json.loads((tmp_path / "train_time_tiny_full.json").read_text())
    ends = {row["row"]: round(3600 * row["losses"][-1][0]) for row in shown["rows"]}
    assert ends == {"adp_t": 12, "ngrams": 12}
    steps = json.loads((tmp_path / "tiny_full" / "ngrams" / "config.json").read_text())["steps"]
    assert (steps, (tmp_path / "train_time_tiny_full.png").exists()) == (4, True)


def test_scaled_down_rows_keep_their_proportions():
    """Words of one width become a quarter as wide, as the body does; n-grams stay."""
    sizes = {
        name: train_time.config_of("europarl", name, "cpu")
        for name in ("adp_t", "sm_t", "cnn", "adp_t_ngrams")
    }
    assert {config["body"]["features"] for config in sizes.values()} == {256}
    assert sizes["sm_t"]["input"]["width"] == 128
    assert sizes["adp_t"]["input"] == sizes["adp_t_ngrams"]["input"]["words"]
    assert sizes["adp_t_ngrams"]["input"]["row_width"] == 96
    assert sizes["adp_t"]["output"]["tail_dropout"] == 0


def test_names_that_do_not_exist(flags):
    """One line says which."""
    with refuses("CORPUS=none"):
        train_time.main("none", flags)
    flags.rows = ["none"]
    with refuses("--rows=none"):
        train_time.main("tiny", flags)
