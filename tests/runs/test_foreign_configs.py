"""Runs that anybody may have written: their config.json may name local files to read, and nothing
is fetched, made, written or run for it.
"""

import json
import shutil
import socket
import sys

import numpy as np
import pytest

from adaptive_jax import load, save_run
from adaptive_jax.config import keys
from adaptive_jax.config.keys import ALL_GROUPS, NAMES, complete, definition, keys_of
from adaptive_jax.config.rows import put
from adaptive_jax.data.vocabulary.ngrams import write
from adaptive_jax.errors import InputError
from adaptive_jax.model.language_model import build, parameter_shapes
from adaptive_jax.runs.settings import read_words
from tests.toys import random_params

MODULES = [f"{group}.name" for group in NAMES]
PATHS = ["data.path", "data.tokenizer", "data.words", "init_from"]
PATHS += ["input.lexicon", "output.clusters"]
OF_NGRAMS = ["input.words.lexicon", "input.counts"]  # paths of runs with counted n-grams
# Texts that are neither, but one of a list, or the name of a checkpoint
OTHER = {"init_checkpoint", "evaluate_break_mode", "data.corpus", "output.proposal", "body.remat"}
NAMES_OF_LISTS = {"activation", "form", "positions", "combine", "letters", "bias", "kind"}
WORDS, COUNTS = ("the", "cat", "<eos>", "sat"), (9, 5, 5, 1)
CONFIG = {
    "data.corpus": "text_files",
    "steps": 1,
    "tokens_per_update": 8,
    "batches.sequence_length": 4,
    "schedule.warmup_steps": 0,
    "input.name": "groc",
    "input.width": 2,
    "input.filters": ((1, 2),),
    "input.strides": (1,),
    "input.length": 5,
    "input.relations": 1,
    "body.name": "lstm",
    "body.features": 4,
    "body.widths": (4,),
    "output.name": "adaptive",
    "output.table.name": "tied",
}

NGRAMS = {key.replace("input.", "input.words."): value for key, value in CONFIG.items()}
NGRAMS |= {"input.name": "ngrams", "input.kind": "counted", "input.rows": 4, "input.row_width": 2}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with a lexicon and clusters, and beside it the text that its config names, and one with
    n-grams.
    """
    place = tmp_path_factory.mktemp("run")
    (place / "text").mkdir()
    for split in "train", "valid", "test":
        (place / "text" / f"{split}.txt").write_text("the cat\nthe sat cat\n" * 6)
    lexicon = place / "lexicon.jsonl"
    lexicon.write_text(json.dumps({"word": "cat", "relations": ["sat"]}) + "\n")
    config = complete(CONFIG | {"data.path": str(place / "text"), "input.lexicon": str(lexicon)})
    params = random_params(parameter_shapes(build(config, len(WORDS))))
    save_run(place / "run", config, params, WORDS, COUNTS)
    counts = {order: np.array([[*[0] * order, 3]]) for order in (2, 3)}
    write(place / "ngrams.npz", read_words(place / "run"), counts)
    paths = {"input.words.lexicon": str(lexicon), "input.counts": str(place / "ngrams.npz")}
    config = complete(NGRAMS | {"data.path": str(place / "text")} | paths)
    params = random_params(parameter_shapes(build(config, len(WORDS))))
    save_run(place / "of_ngrams", config, params, WORDS, COUNTS)
    return place


def trapped(run, place, changes):
    """A copy of the run whose config has other values."""
    name = "of_ngrams" if {*OF_NGRAMS} & changes.keys() else "run"
    workdir = shutil.copytree(run / name, place / "run")
    config = json.loads((workdir / "config.json").read_text())
    for key, value in changes.items():
        put(config, key, value)
    (workdir / "config.json").write_text(json.dumps(config))
    return workdir


def test_every_text_of_a_config_is_a_path_a_module_or_one_of_a_list():
    """A new key is put into one of the lists here, so that it gets a trap."""
    texts = {f"{group}.name" for group in NAMES}
    for group in ALL_GROUPS:
        for name in definition(group) if group in NAMES and group != "optimizer" else [None]:
            for key, field in keys_of(group, name).items():
                if field.kind is str and not field.option.among:
                    texts.add(f"{group}.{key}".lstrip("."))
    texts = {text for text in texts if text.rpartition(".")[2] not in NAMES_OF_LISTS}
    assert texts == {*MODULES, *PATHS, *OF_NGRAMS, *OTHER}


@pytest.fixture
def no_network(monkeypatch):
    """Every attempt to reach another machine, which fails."""
    attempts = []

    def refused(*address, **_):
        attempts.append(address)
        raise OSError("no network in this test")

    monkeypatch.setattr(socket, "getaddrinfo", refused)
    monkeypatch.setattr(socket.socket, "connect", refused)
    return attempts


def commands(workdir, run):
    """Command lines that open a run, each with what it reads from stdin."""
    adaptive = "-m", "adaptive_jax"
    text = f"--config.data.path={run / 'text'}"
    counted = (workdir / "ngrams.npz").exists()
    settings = (NGRAMS if counted else CONFIG).items()
    settings = [f"--config.{key}={value}".replace(" ", "") for key, value in settings]
    words = "input.words" if counted else "input"
    config, lexicon = run / "config.py", f"--config.{words}.lexicon={run / 'lexicon.jsonl'}"
    config.write_text("def get_config():\n    return {}\n")
    new = f"--init_from={workdir}", f"--workdir={workdir.with_name('new')}", text
    yield "evaluate.py", f"--workdir={workdir}"
    yield "evaluate.py", f"--workdir={workdir}", "--vocabulary=union", f"--data_path={run / 'text'}"
    yield *adaptive, "score", f"--workdir={workdir}"
    yield *adaptive, "export", f"--workdir={workdir}", f"--output={workdir.with_name('out')}"
    yield "train.py", f"--config={config}", *settings, *new, lexicon
    yield "train.py", *new


def opened(workdir, run, in_process):
    """The messages of the commands that open a run, and of `load`."""
    for line in commands(workdir, run):
        shutil.rmtree(workdir.with_name("new"), ignore_errors=True)
        done = in_process(*line, given="the cat\n")
        assert done.returncode in (0, 2) and "Traceback" not in done.stderr, done.stderr
        yield done.stderr
    try:
        load(workdir)
    except InputError as error:
        yield str(error)


@pytest.mark.parametrize("key", MODULES)
def test_no_module_of_a_config_is_imported(key, run, in_process, tmp_path, monkeypatch):
    """Its code would run in the name of whoever opens the run."""
    monkeypatch.setattr(keys, "_allowed", set())
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "trap.py").write_text(f"open({str(tmp_path / 'sprung')!r}, 'w')\n")
    workdir = trapped(run, tmp_path, {key: "trap:Class"})
    said = [*opened(workdir, run, in_process)]
    assert len(said) == 7 and all("--allow=trap" in line for line in said), said
    assert not (tmp_path / "sprung").exists() and "trap" not in sys.modules


@pytest.mark.parametrize("value", ["{}/made/here", "gs://trap/here"])
@pytest.mark.parametrize("key", [key for key in PATHS + OF_NGRAMS if key != "init_from"])
def test_nothing_is_made_or_fetched_for_a_path_of_a_config(
    key, value, run, in_process, tmp_path, no_network
):
    """A directory that it names was made, and a bucket asked."""
    value = value.format(tmp_path)
    eos = {"data.eos": 2} if key == "data.tokenizer" else {}
    workdir = trapped(run, tmp_path, {key: value, "init_from": value} | eos)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    said = [*opened(workdir, run, in_process)]
    if not eos:  # this run is none of a tokenizer
        assert [*map(bool, said)].count(True) <= 1, said  # the one that would read the path
    assert not no_network and not (tmp_path / "made").exists()
    assert {path.name for path in tmp_path.iterdir()} <= {"run", "new", "out"}
    after = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    assert {path for path in after if after[path] != before.get(path)} <= {run, run / "config.py"}


def test_a_report_imports_and_asks_nothing(run, in_process, tmp_path, no_network, monkeypatch):
    """It reads the config of a result, which is anybody's as well."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install matplotlib")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "trap.py").write_text(f"open({str(tmp_path / 'sprung')!r}, 'w')\n")
    workdir = trapped(run, tmp_path, {"input.lexicon": str(tmp_path / "made")})
    assert in_process("evaluate.py", f"--workdir={workdir}").returncode == 0
    [path] = (workdir / "eval").glob("*.json")
    result = json.loads(path.read_text())
    for key in MODULES:
        put(result["settings"]["config"], key, "trap:Class")
    for key in PATHS:
        put(result["settings"]["config"], key, f"{tmp_path}/made")
    path.write_text(json.dumps(result))
    output = f"--output={tmp_path / 'out' / 'report.html'}"
    done = in_process("-m", "adaptive_jax", "report", workdir, output)
    assert done.returncode == 0, done.stderr
    assert not no_network and "trap" not in sys.modules
    assert {path.name for path in tmp_path.iterdir()} == {"run", "out", "trap.py"}
