"""Exported models: read back bit by bit, and computed by the programs in examples/, which do
not know this package.
"""

import ast
import functools
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util

import adaptive_jax
from adaptive_jax.config.keys import resolve
from adaptive_jax.data.corpora.tokenise import tokeniser
from adaptive_jax.data.vocabulary.on_disk import write_with_checksums
from adaptive_jax.files import write_checksums
from adaptive_jax.interop.export import export
from adaptive_jax.interop.stablehlo import Shape
from adaptive_jax.model.composition import Compose
from adaptive_jax.model.language_model import build, parameter_shapes
from adaptive_jax.numerics.batch import Batch
from adaptive_jax.runs.parameters import write_tensors
from adaptive_jax.runs.run import Run
from adaptive_jax.runs.settings import EXPORTED as FILE
from adaptive_jax.runs.settings import read_words, write_json
from adaptive_jax.scores.evaluate import Request, evaluate
from adaptive_jax.scores.report.runs import read_runs
from adaptive_jax.training.finetuning import check_fits, check_origin
from adaptive_jax.training.loop import train
from tests import refuses
from tests.pages import PAGES, python_blocks

pytest.importorskip("safetensors")
pytest.importorskip("flatbuffers")

EXAMPLES = Path(__file__).parents[2] / "examples"
PACKAGES = "numpy", "torch"  # of the examples that compute by formulas
SMALL = {"features": 16, "heads": 2, "feed_forward": 24, "layers": 2}
LETTERS = {
    "input": {"name": "char_cnn", "filters": ((1, 4), (2, 4)), "width": 4, "length": 6},
    "output": {"name": "softmax", "table": {"name": "assembled"}},
}
MODELS = {
    "transformer": {"body": SMALL},
    "lstm of letters": {"body": {"name": "lstm", "features": 16, "widths": (8, 16)}} | LETTERS,
    "narrow convolutions": {
        "body": {"name": "gated_conv", "features": 16, "blocks": ((3, 2, 16),)},
        "dtype": "bfloat16",
    },
    "pairs of words": {  # whose carry starts with words that are missing, not with the word 0
        "input": {"name": "ngrams", "rows": 40, "words": {"name": "lookup"}},
        "body": {"name": "lstm", "features": 16, "widths": (16,)},
        "output": {"name": "softmax"},
    },
}


@pytest.fixture(scope="module")
def exported(trained, tmp_path_factory):
    """The small run as safetensors: to be read, not changed."""
    output = tmp_path_factory.mktemp("exported") / "model"
    export(trained, output)
    return output


@pytest.fixture(scope="module")
def untrained(exported, config, tmp_path_factory):
    """`untrained(body={"layers": 2})`: an exported model with these settings in the groups of
    its config, and random parameters.
    """

    def untrained(**changes):
        folder, settings, words = (
            tmp_path_factory.mktemp("untrained") / "model",
            config(),
            read_words(exported),
        )
        for group, given in changes.items():
            if isinstance(given, dict):
                same = given.get("name", settings[group]["name"]) == settings[group]["name"]
                given = {**(settings[group] if same else {}), **given}
            settings[group] = given
        settings = resolve(settings)
        shapes = traverse_util.flatten_dict(parameter_shapes(build(settings, len(words))), sep=".")
        bits = np.random.default_rng(0)
        arrays = {
            name: 0.3 * bits.standard_normal(shape.shape, np.float32)
            for name, shape in shapes.items()
        }
        write_with_checksums(words, folder / "vocabulary.txt")
        write_json(folder / "config.json", settings)
        write_tensors(folder / FILE, arrays, {"step": "7"})
        return folder

    return untrained


def example(name):
    """A program of examples/ as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def nll_of(run, ids):
    """The nll `[rows, time]` of ids `[rows, time + 1]` after those before them."""
    batch = Batch(ids[:, :-1], ids[:, 1:], None, np.arange(len(ids)))

    @jax.jit
    def nll(params, lexicon):
        tables = {}
        if run.model.composed_words() != "none":
            tables = Compose(run.model, lambda params: params)(
                params, lexicon, jnp.arange(len(run.vocabulary))
            )
        variables = {"params": params, "lexicon": lexicon, "tables": tables}
        hidden, _ = run.model.apply(variables, batch, method="hidden")
        return run.model.apply(variables, hidden, batch.targets, method="nll")

    return np.asarray(nll(run.params, run.lexicon))


def test_every_command_reads_an_exported_model(trained, exported, tmp_path, capsys):
    """Parameters are equal bit by bit, evaluation gives the same number, and it can be exported
    again.
    """
    run, back = Run.open(trained), Run.open(exported)
    jax.tree.map(
        np.testing.assert_array_equal, jax.device_get(run.params), jax.device_get(back.params)
    )
    assert (run.step, run.config, run.vocabulary.digest) == (
        back.step,
        back.config,
        back.vocabulary.digest,
    )
    *_, logged = [
        json.loads(line)
        for line in (trained / "metrics.jsonl").read_text().splitlines()
        if "validation/nll" in line
    ]
    assert evaluate(exported, Request(split="validation"))["nll"] == pytest.approx(
        logged["validation/nll"], abs=1e-6
    )
    export(exported, tmp_path / "again", checkpoint=str(run.step))
    again = Run.open(tmp_path / "again")
    jax.tree.map(
        np.testing.assert_array_equal, jax.device_get(back.params), jax.device_get(again.params)
    )
    evaluate(exported, Request("validation"))
    [read] = read_runs([exported], ["exported"])  # of a report
    assert np.mean(read.nll) == pytest.approx(logged["validation/nll"], abs=1e-6)
    assert read.result["step"] == run.step and read.about()["hours"] is None
    assert (
        f"again: {sum(a.size for a in jax.tree.leaves(run.params)):,} parameters, 122 words"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize(
    "changes",
    [
        {"body": SMALL},
        {"output": {"table": {"name": "own", "cutoffs": (40, 100), "factor": 2}}},
        {
            "output": {"table": {"name": "tied", "share_projections": False}},
            "body": {"final_norm": False},
        },
    ],
    ids=["tied", "own", "own projections"],
)
def test_examples_give_the_log_probabilities_of_this_package(untrained, changes, package):
    """Those of every word, after every position, for tables tied or not."""
    pytest.importorskip(package)
    folder = untrained(**changes)
    run, ids = Run.open(folder), np.random.default_rng(1).integers(0, 122, 11)
    batch = Batch(ids[None], ids[None], None, np.arange(1))
    apply = jax.jit(functools.partial(run.model.apply, method="log_probs"))
    [ours] = apply({"params": run.params}, batch, np.arange(11)[None])
    module = example(f"{package}_scorer")
    params, config, words = module.load(folder)
    assert list(words) == list(run.vocabulary.words)
    theirs = module.log_probs(params, config, ids.tolist())
    np.testing.assert_allclose(np.asarray(theirs), ours, atol=2e-5)


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize(
    "changes, differences",
    [
        ({"body": {"name": "transformer_post_norm"}}, "body.name"),
        ({"body": {"scaled": False}}, "body.scaled"),
        ({"input": {"cutoffs": ()}}, "one band of words"),
        (MODELS["lstm of letters"], "body.name, input.name"),
        ({"output": {"table": {"name": "tied", "bias": True}}}, "parameters"),
        (
            {"output": {"table": {"name": "own", "cutoffs": (10, 30), "weight_norm": True}}},
            "parameters",
        ),
        (
            {"output": {"table": {"name": "own", "cutoffs": (*range(10, 60, 10),), "factor": 1}}},
            "parameters",
        ),
    ],
)
def test_examples_refuse_models_that_they_would_misread(untrained, changes, differences, package):
    """Readers of a few formulas would score such a model with wrong numbers."""
    pytest.importorskip(package)
    with pytest.raises(SystemExit, match=f"differs in {differences}"):
        example(f"{package}_scorer").load(untrained(**changes))


@pytest.mark.parametrize("name", MODELS)
def test_programs_score_as_this_package(untrained, quick_command, tmp_path, name):
    """A program made for all platforms, in Python or by the command; text longer than its window,
    where the body carries a state.
    """
    folder, output = untrained(**MODELS[name]), tmp_path / "scorer"
    run = Run.open(folder)
    if name == "transformer":
        asked = f"-m adaptive_jax export --workdir={folder} --output={output}"
        done = quick_command(*asked.split(), "--format=stablehlo", "--rows=3", "--window=8")
        assert done.returncode == 0, done.stderr
    else:
        export(folder, output, shape=Shape(rows=3, window=8))
    assert [path.name for path in sorted(output.iterdir())] == [
        "scorer.json",
        "scorer.safetensors",
        "scorer.sha256",
        "scorer.stablehlo",
        "vocabulary.sha256",
        "vocabulary.txt",
    ]
    module = example("stablehlo_scorer")
    program, arrays, about, words = module.load(output)
    assert (about["rows"], about["window"], about["step"], list(words)) == (
        3,
        8,
        7,
        list(run.vocabulary.words),
    )
    assert {"cpu", "cuda", "tpu"} <= set(
        jax.export.deserialize((output / "scorer.stablehlo").read_bytes()).platforms
    )
    carries = name != "transformer"
    lengths, bits = (20, 9, 1) if carries else (9, 4, 1), np.random.default_rng(2)
    texts = [bits.integers(0, 122, length).tolist() for length in lengths]
    log_probs = module.log_probs(program, arrays, about, texts)
    ids = np.zeros((3, max(lengths)), np.int32)
    for row, text in zip(ids, texts, strict=True):
        row[: len(text)] = text
    expected, tolerance = nll_of(run, ids), 0.05 if name.startswith("narrow") else 2e-5
    for row, text in enumerate(texts):
        assert len(log_probs[row]) == len(text) - 1
        np.testing.assert_allclose(-log_probs[row], expected[row, : len(text) - 1], atol=tolerance)
    if "letters" in name:  # composed vectors are stored, what composes them is not
        assert not [key for key in arrays if "filter" in key] and "tables.input.vectors" in arrays
    if name.startswith("lstm"):
        code = "\n".join(python_blocks(PAGES["docs/interop.md"]))
        exec(code.replace("runs/scorer", str(output)), names := {})
        assert names["nll"].shape == (3, 8) and len(names["carry"]) == 4
    assert len(about["carry"]) == {"t": 0, "l": 4, "n": 1, "p": 3}[name[0]]
    wrong = np.full((3, 8), 122, np.int32)
    assert np.isnan(
        program(
            arrays,
            [np.zeros(each["shape"], each["dtype"]) for each in about["carry"]],
            wrong,
            wrong,
        )[0]
    ).all()


def test_examples_score_lines(exported):
    """As commands: the sum over the words of a line and its <eos>."""
    text = "\ufeffthe t1w0 the t1w2\n\nthe t3w1\n"
    asked = [sys.executable, EXAMPLES / "numpy_scorer.py", exported]
    out = subprocess.run(asked, input=text, capture_output=True, text=True, check=True).stdout
    shown = [line.split("\t") for line in out.splitlines()]
    assert [line for _, line in shown] == text.splitlines()
    expected = [line.log_prob for line in adaptive_jax.load(exported).score(text.splitlines())]
    np.testing.assert_allclose([float(nats) for nats, _ in shown], expected, atol=2e-4)


LINES = (
    "\ufeffThe <unk> said",
    "Noah’s ark,\ufeff the_end. <eos>",
    "a <UNK> x<unk> <unk>, İ 12b",
    "हिन्दी भाषा, e\u0301te\u0301 می\u200cخواهم",
)


@pytest.mark.parametrize("name", [*PACKAGES, "stablehlo"])
@pytest.mark.parametrize("kind, lower", [("marks", True), ("none", False)])
def test_examples_separate_words_as_this_package(name, kind, lower):
    """Raw text has the words that a model like the quickstart's was trained on: `<unk>` was three
    of them, and a byte order mark was one.
    """
    if name in PACKAGES:
        pytest.importorskip(name)
    words_of, split = example(f"{name}_scorer").words_of, tokeniser(kind, lower)
    for line in LINES:
        assert words_of(line, {"tokeniser": kind}) == split(line).split()


def test_examples_stand_alone():
    """Without this package; only the one that runs StableHLO has JAX."""
    for path in EXAMPLES.glob("*_scorer.py"):
        tree = ast.parse(path.read_text())
        nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        tops = {
            name.split(".")[0]
            for node in nodes
            for name in (
                [node.module]
                if isinstance(node, ast.ImportFrom)
                else [alias.name for alias in node.names]
            )
        }
        assert tops - sys.stdlib_module_names <= {"numpy", "safetensors"} | {
            path.stem.split("_")[0]
        } | ({"jax"} if "stablehlo" in path.stem else set()), path


def test_wrong_requests(trained, exported, config, tmp_path, monkeypatch):
    """One line each, and nothing is written."""
    for call, says in (
        (lambda: export(trained, exported), "already exists: use a new directory"),
        (lambda: export(tmp_path, tmp_path / "x"), "holds no run (no config.json)"),
        (
            lambda: export(trained, tmp_path / "x", checkpoint="9"),
            "holds no checkpoint '9': it has steps",
        ),
        (
            lambda: export(exported, tmp_path / "x", checkpoint="9"),
            "'9': it is a model exported after 240 updates",
        ),
        (lambda: train(config(), exported), "holds an exported model, which cannot be trained on"),
    ):
        with refuses(says):
            call()
    with refuses("UTF-8 without") as raised:
        export(trained, tmp_path / "[1")
    assert str(raised.value).startswith(f"{tmp_path}/[1 must be ")  # not --workdir, as it said
    model = build(config(), 122)
    check_fits(config(init_from=str(exported)), tmp_path, model)
    with refuses("'3'"):
        check_origin(config(init_from=str(exported), init_checkpoint="3"), tmp_path)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "safetensors.numpy", None)
        with refuses("safetensors", "pip install"):
            export(trained, tmp_path / "x")
    monkeypatch.setitem(sys.modules, "flatbuffers", None)
    with refuses("flatbuffers", "pip install"):
        export(exported, tmp_path / "x", shape=Shape())
    assert not list(tmp_path.iterdir())


def test_damaged_files(untrained):
    """A changed byte, a cut file and parameters of another model are told apart from a run
    without checkpoints.
    """
    folder = untrained()
    content_before, sums = (folder / FILE).read_bytes(), folder / "model.sha256"
    listed, huge = sums.read_bytes(), b"\xff" * 7 + b"\x7f" + content_before[8:]
    for content in (
        content_before[:100],
        huge,
        b"",
        content_before[:-5] + b"\1" + content_before[-4:],
    ):
        (folder / FILE).write_bytes(content)
        with refuses("model.safetensors", "damaged"):
            Run.open(folder)
        if len(content) != len(content_before) or content == huge:  # as if it had been written so
            write_checksums(sums, [folder / FILE])
            with refuses("model.safetensors", "damaged"):
                Run.open(folder)
            sums.write_bytes(listed)
    (folder / FILE).write_bytes(content_before)
    sums.unlink()
    with refuses("model.safetensors", "damaged"):
        Run.open(folder)
    sums.write_bytes(listed)
    settings = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", settings | {"body": settings["body"] | {"layers": 2}})
    with refuses("body.blocks.attended.bias", "(1, 32)", "(2, 32)"):
        Run.open(folder)
