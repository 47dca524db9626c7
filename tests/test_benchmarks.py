"""The benchmarks' own parts that can go wrong unseen: the configs they train, the sections they write, what they measure."""

import importlib.util
import json
import math
import os
import re
import shutil
import sys

import jax
import numpy as np
import pytest

from adaptive_jax.errors import InputError
from adaptive_jax.plans.costs import plan
from benchmarks import outputs, preparation, rows, vocabulary_growth


@pytest.mark.parametrize("size", rows.SIZES)
def test_rows_differ_only_in_input_and_output(size):
    """Every row is planned at every size, with the same body, updates and schedule; the schedule is as long as the run."""
    configs = [rows.config_of(row, size, "") for row in rows.PAPER]
    for config in configs:
        plan(config, config["data"]["vocabulary_size"], 1)
        rates = config["optimizer"]
        assert config["steps"] == rates["warmup_steps"] + rates["cycle_steps"] * (2 ** rates["cycles"] - 1)
        assert {key: config[key] for key in config if key not in ("input", "output", "data")} == {
            key: configs[0][key] for key in configs[0] if key not in ("input", "output", "data")}
    layers = {repr((config["input"], config["output"], config["data"]["codes"])) for config in configs}
    assert len(layers) == len(rows.PAPER) == 8


def test_a_section_replaces_the_one_of_its_heading(tmp_path):
    """Other sections stay as they are; a new one comes last."""
    path = tmp_path / "RESULTS.md"
    path.write_text("# Results\n\nwords\n\n## One\n\n1\n\n## Two\n\n### Under\n\n2\n")
    rows.write_section(path, "## Three\n\n3\n")
    rows.write_section(path, "## One\n\nnew\n")
    assert path.read_text() == "# Results\n\nwords\n\n## Two\n\n### Under\n\n2\n\n## Three\n\n3\n\n## One\n\nnew\n"


def test_the_table_sets_ours_beside_the_papers():
    """One line a row: ours, then what the paper printed."""
    numbers = {"row": "adp_t", "validation": 123.44, "test": 119.96, "seconds": 61.2, "unigram": 900.0,
               "words_per_second": 20_000.4, "parameters": 2_500_000, "curve": [(1, 9.0)]}
    text = rows.table([numbers], "cpu")
    assert "| `adp_t` | 123.4 | 120.0 | 61 | 20,000 | 2.5M | 19.79 | 20.51 | 30 | 246.9M |" in text.splitlines()
    assert text.startswith(rows.heading("cpu"))


def lines_of(table):
    """Cells of the lines of a Markdown table, by the first."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("|")]
    return {name: rest for name, *rest in cells[2:]}


def words_in(directory, names=("train", "valid", "test")):
    """Words and line ends of text files."""
    text = "".join((directory / f"{name}.txt").read_text() for name in names)
    return len(text.split()) + text.count("\n")


@pytest.fixture
def fairseq(tmp_path, monkeypatch):
    """A program of fairseq-preprocess's name on the PATH, and the file in which it writes how it was called and on what."""
    called = tmp_path / "called"
    program = tmp_path / "bin" / "fairseq-preprocess"
    program.parent.mkdir()
    program.write_text(f"""#!/bin/sh
echo "$@" > {called}
for argument in "$@"; do case $argument in --*pref=*) cat "${{argument#*=}}" >> {called};; esac; done
sleep 0.2
""")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    return called


def test_preparation_compares_three_peers(command, text, fairseq):
    """On the same text, whose words are counted right, and fairseq on all of it, unpacked."""
    done = command("-m", "benchmarks.preparation", f"--path={text}", "--threshold=2")
    assert done.returncode == 0, done.stderr
    found = lines_of(done.stdout)
    assert list(found) == ["adaptive_jax", "plain loop", "fairseq"]
    assert {line[0] for line in found.values()} == {f"{words_in(text):,}"}
    assert all(float(cell.replace(",", "")) > 0 for line in found.values() for cell in line)
    assert "--path=DIR --threshold=2 --repeats=1" in done.stdout
    arguments, content = fairseq.read_text().split("\n", 1)
    assert re.match(r"--only-source --trainpref=\S+ --validpref=\S+ --testpref=\S+ --destdir=\S+ ", arguments)
    assert arguments.endswith("--thresholdsrc=2")
    assert content == "".join((text / f"{name}.txt").read_text() for name in ("train", "valid", "test"))


def test_the_plain_loop_makes_the_same_ids(command, text, tmp_path, fairseq):
    """Of text with rare words, cases, empty lines, odd spaces and no end to its last line; else it would stop."""
    for name in "train", "valid", "test":
        shutil.copy(text / f"{name}.txt", tmp_path)
    with (tmp_path / "train.txt").open("a") as train, (tmp_path / "valid.txt").open("a", encoding="utf-8") as file:
        train.write("Once, once upon T0W1")
        file.write("\n\n THE t0w1\u2028Zebra\x85the\r\nDr. Who's <unk>\u00a0, <eos>-less")
    done = command("-m", "benchmarks.preparation", f"--path={tmp_path}", "--threshold=2", "--tokeniser=moses", "--lower")
    assert done.returncode == 0, done.stderr
    assert list(lines_of(done.stdout)) == ["adaptive_jax", "plain loop"]  # fairseq does not tokenise
    assert not fairseq.exists()


def test_peers_that_make_other_ids_are_not_compared(monkeypatch):
    """Their times would say nothing."""
    monkeypatch.setattr(preparation, "measure", lambda arguments: (1.0, 1))
    made = iter([(10, "a"), (10, "a"), (10, "a"), (10, "b")])
    monkeypatch.setattr(preparation, "ids_in", lambda directory: next(made))
    peers = [preparation.OURS, preparation.PLAIN]
    assert [row["words"] for row in preparation.compare({}, [], 1, peers, 1)] == [10, 10]
    with pytest.raises(RuntimeError, match="other ids"):
        preparation.compare({}, [], 1, peers, 1)


@pytest.mark.parametrize("how", ["psutil", "ru_maxrss"])
def test_memory_is_that_of_the_processes_started(monkeypatch, how):
    """A process and its child hold 100 MiB each: 200 at the same time, of which ru_maxrss sees the larger part."""
    if how == "psutil":
        pytest.importorskip("psutil")
    else:
        monkeypatch.setitem(sys.modules, "psutil", None)
    assert preparation.memory_by() == how
    hold = "x = b'1' * (100 << 20); import time"
    both = f"{hold}; import subprocess, sys; subprocess.run([sys.executable, '-c', {hold + '; time.sleep(0.5)'!r}])"
    seconds, peak = preparation.measure([sys.executable, "-c", both])
    assert seconds > 0.5
    # ru_maxrss begins with the memory of the process that forks, this one, whatever that has grown to.
    low, high = (200, 300) if how == "psutil" else (100, math.inf)
    assert low <= peak / 2**20 < high


@pytest.mark.parametrize("arguments, says", [
    ([], "--path"), (["--path=nowhere"], "nowhere is not a directory"), (["--path={text}", "--repeats=0"], "repeats=0")])
def test_preparation_with_bad_input(command, text, arguments, says):
    """One line and status 2."""
    done = command("-m", "benchmarks.preparation", *(argument.format(text=text) for argument in arguments))
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"error: .+\n", done.stderr) and says in done.stderr, done.stderr


def test_a_peer_that_fails_is_named():
    """With its command and status; what it said stands above."""
    with pytest.raises(InputError, match="-c exit.3. ended with status 3"):
        preparation.measure([sys.executable, "-c", "exit(3)"])


def test_the_output_layer_against_its_peers():
    """The peers compute the same loss and gradients; work is counted as the targets ask for it."""
    case = outputs.Case(16, 101, (11, 40), tokens=30)
    results = {}
    for name, (compiled, values) in outputs.jax_peers(case).items():
        results[name] = compiled(*values)
    assert list(results) == ["banded", "masked dense", "full softmax"]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), results["banded"], results["masked dense"])
    targets = outputs.arguments(case)[1]
    first, second = ((targets >= 11) & (targets < 40)).sum(), (targets >= 40).sum()
    products = 30 * 13 * 16 + first * (29 * 4 + 4 * 16) + second * (61 * 1 + 1 * 16)
    assert outputs.gflop(case) == pytest.approx(6e-9 * products)
    rows = outputs.measure(case, 1, ["torch", "full softmax"], {"product": outputs.product_peer(8)})
    assert [row["peer"] for row in rows] == ["banded", "masked dense", "product"]
    assert rows[0]["times_banded"] == 1 and rows[-1]["tokens_per_second"] is None


def test_growth_with_the_vocabulary(command, tmp_path):
    """A line for every size and peer, growth beneath, and a plot; peers are left out where they would be too large."""
    plot = [f"--plot={tmp_path / 'plot.png'}"] if importlib.util.find_spec("matplotlib") else []
    done = command("-m", "benchmarks.vocabulary_growth", "--vocabularies=40,160", "--tokens=8", "--repeats=1", "--skip=torch",
                   f"--json={tmp_path / 'numbers'}", *plot)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "numbers").read_text())
    assert [(row["vocabulary"], row["peer"]) for row in rows] == [
        (words, peer) for words in (40, 160) for peer in ("banded", "masked dense", "full softmax", "smallest")]
    growth = [rows[at]["seconds"] / rows[at + 3]["seconds"] for at in (0, 4)]
    assert f"banded: {growth[0]:.2f}, {growth[1]:.2f} times the time of banded at 40 words" in done.stdout
    assert not plot or (tmp_path / "plot.png").stat().st_size > 1000
    assert vocabulary_growth.cutoffs_of(1_070_940) == (10_000, 40_000, 160_000, 640_000)
    assert vocabulary_growth.cutoffs_of(40_000) == (10_000,)
    assert vocabulary_growth.too_large(267_735, 2048) == [] and len(vocabulary_growth.too_large(535_470, 2048)) == 2


@pytest.mark.parametrize("module, argument, says", [
    ("outputs", "--sizes=tiny", "--sizes=tiny is not one of small, large"),
    ("vocabulary_growth", "--tokens=0", "tokens=0"), ("vocabulary_growth", "--plot=nowhere/plot.png", "make it first")])
def test_output_benchmarks_with_bad_input(command, module, argument, says):
    """One line and status 2."""
    done = command("-m", f"benchmarks.{module}", argument)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"error: .+\n", done.stderr) and says in done.stderr, done.stderr
