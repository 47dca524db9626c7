"""What can go wrong unseen in the benchmarks: the configs they train, the sections they write,
what they measure.
"""

import importlib.util
import json
import os
import re
import shutil
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaptive_jax.data.corpora.load import load
from adaptive_jax.data.corpora.text import SPLITS, local_texts
from adaptive_jax.errors import InputError
from benchmarks import outputs, preparation, vocabulary_growth


@pytest.fixture
def odd_text(text, tmp_path):
    """A directory of text with rare words, cases, empty lines, odd spaces and no end to its
    last line.
    """
    directory = tmp_path / "odd"
    shutil.copytree(text, directory)
    with (
        (directory / "train.txt").open("a") as train,
        (directory / "valid.txt").open("a", encoding="utf-8") as valid,
    ):
        train.write("Once, once upon T0W1")
        valid.write("\n\n THE t0w1\u2028Zebra\x85the\r\nDr. Who's <unk>\u00a0, <eos>-less")
    return directory


def test_preparation_compares_three_peers(quick_command, odd_text, tmp_path):
    """The two that write ids write the same; a program of fairseq's name is called right, on
    all of the text, unpacked.
    """
    called, program = tmp_path / "called", tmp_path / "bin" / "fairseq-preprocess"
    program.parent.mkdir()
    program.write_text(f"""#!/bin/sh
echo "$@" > {called}
for argument in "$@"; do
    case $argument in --*pref=*) cat "${{argument#*=}}" >> {called};; esac
done
sleep 0.2
""")
    program.chmod(0o755)
    path = {"PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}"}
    done = quick_command(
        "-m", "benchmarks.preparation", f"--path={odd_text}", "--threshold=2", env=path
    )
    assert done.returncode == 0, done.stderr
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in done.stdout.splitlines()
        if line.startswith("|")
    ]
    assert [peer for peer, *_ in cells[2:]] == ["adaptive_jax", "plain loop", "fairseq"]
    assert len({words for _, words, *_ in cells[2:]}) == 1
    assert all(float(cell.replace(",", "")) > 0 for _, *rest in cells[2:] for cell in rest)
    assert "--path=DIR --threshold=2 --repeats=1" in done.stdout
    arguments, content = called.read_bytes().split(b"\n", 1)
    assert re.match(
        rb"--only-source --trainpref=\S+ --validpref=\S+ --testpref=\S+ --destdir=\S+ ", arguments
    )
    assert arguments.endswith(b"--thresholdsrc=2")
    assert content == b"".join(
        (odd_text / f"{name}.txt").read_bytes() for name in ("train", "valid", "test")
    )


def test_the_plain_loop_makes_the_same_ids(odd_text, tmp_path):
    """With a tokeniser and in lower case, too; the words are counted."""
    data = {
        "corpus": "text_files",
        "path": str(odd_text),
        "threshold": 2,
        "tokeniser": "moses",
        "lower": True,
    }
    corpus = load(data | {"cache": str(tmp_path / "ours")})
    (tmp_path / "plain").mkdir()
    preparation.plain_loop(
        local_texts("text_files", str(odd_text), SPLITS), data, tmp_path / "plain"
    )
    made = preparation.ids_in(tmp_path / "plain")
    assert made == preparation.ids_in(tmp_path / "ours")
    assert made[0] == sum(map(len, corpus.ids.values()))


def test_peers_that_make_other_ids_are_not_compared(monkeypatch):
    """Their times would say nothing."""
    monkeypatch.setattr(preparation, "measure", lambda arguments: (1.0, 1))
    made = iter([(10, "a"), (10, "a"), (10, "a"), (10, "b")])
    monkeypatch.setattr(preparation, "ids_in", lambda directory: next(made))
    peers = [preparation.OURS, preparation.PLAIN]
    assert [row["words"] for row in preparation.compare({}, {}, 1, peers)] == [10, 10]
    with pytest.raises(RuntimeError, match="different ids"):
        preparation.compare({}, {}, 1, peers)


def test_memory_is_that_of_the_processes_started():
    """A process and its child hold 100 MiB each, 200 at the same time. One that fails is named
    with its command and status.
    """
    pytest.importorskip("psutil")
    hold = "x = b'1' * (100 << 20); import time"
    both = (
        f"{hold}; import subprocess, sys; subprocess.run([sys.executable, '-c',"
        f" {hold + '; time.sleep(0.5)'!r}])"
    )
    seconds, peak = preparation.measure([sys.executable, "-c", both])
    assert seconds > 0.5 and 200 <= peak / 2**20 < 300
    with pytest.raises(InputError, match="-c exit.3. failed with status 3"):
        preparation.measure([sys.executable, "-c", "exit(3)"])


def test_the_output_layer_against_its_peers():
    """The peers compute the same loss and gradients; work is counted as the targets ask for it."""
    case = outputs.Case(16, 101, (11, 40), tokens=30)
    results = {}
    for name, (compiled, values) in outputs.jax_peers(case).items():
        results[name] = compiled(*values)
    assert list(results) == ["banded", "masked dense", "full softmax"]
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4),
        results["banded"],
        results["masked dense"],
    )
    targets = outputs.arguments(case)[1]
    first, second = ((targets >= 11) & (targets < 40)).sum(), (targets >= 40).sum()
    products = 30 * 13 * 16 + first * (29 * 4 + 4 * 16) + second * (61 * 1 + 1 * 16)
    assert outputs.gflop(case) == pytest.approx(6e-9 * products)
    rows = outputs.measure(case, 1, ["torch", "full softmax"], {"product": outputs.product_peer(8)})
    assert [row["peer"] for row in rows] == ["banded", "masked dense", "product"]
    assert rows[0]["times_banded"] == 1 and rows[-1]["tokens_per_second"] is None
    loss, values = outputs.in_bfloat16(case, *map(jnp.asarray, outputs.arguments(case)[:2]))[
        "bfloat16"
    ]
    np.testing.assert_allclose(jax.jit(loss)(*values), results["banded"][0], rtol=2**-7)


def flags(**given):
    """The flags of `benchmarks.vocabulary_growth`, tiny."""
    return SimpleNamespace(
        **{
            "vocabularies": ["40", "160"],
            "tokens": 8,
            "repeats": 1,
            "skip": ["torch"],
            "json": None,
            "plot": None,
        }
        | given
    )


def test_growth_with_the_vocabulary(tmp_path, capsys):
    """A line for every size and peer, growth beneath, and a plot; peers are left out where they
    would be too large.
    """
    plot = tmp_path / "plot.png" if importlib.util.find_spec("matplotlib") else None
    vocabulary_growth.main(flags(json=tmp_path / "numbers", plot=plot))
    rows = json.loads((tmp_path / "numbers").read_text())
    assert [(row["vocabulary"], row["peer"]) for row in rows] == [
        (words, peer)
        for words in (40, 160)
        for peer in ("banded", "masked dense", "full softmax", "smallest")
    ]
    growth = [rows[at]["seconds"] / rows[at + 3]["seconds"] for at in (0, 4)]
    assert (
        f"banded: {growth[0]:.2f}, {growth[1]:.2f} times the time of banded at 40 words"
        in capsys.readouterr().out
    )
    assert plot is None or plot.stat().st_size > 1000
    assert vocabulary_growth.cutoffs_of(1_070_940) == (10_000, 40_000, 160_000, 640_000)
    assert vocabulary_growth.cutoffs_of(40_000) == (10_000,)
    assert (
        vocabulary_growth.too_large(267_735, 2048) == []
        and len(vocabulary_growth.too_large(535_470, 2048)) == 2
    )


@pytest.mark.parametrize(
    "given, says",
    [
        ({"tokens": 0}, "tokens=0"),
        ({"vocabularies": ["9"]}, "smallest of --vocabularies=9"),
        ({"plot": "nowhere/plot.png"}, "make it first"),
    ],
)
def test_growth_with_bad_flags(given, says):
    """Nothing runs."""
    with pytest.raises(InputError, match=says):
        vocabulary_growth.main(flags(**given))
