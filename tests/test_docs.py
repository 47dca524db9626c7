"""Every block of code of every page: Python runs, and commands run in small or are checked flag by
flag.

Commands that read the run `runs/quickstart` run here, page by page and in the order of the page, on
a quickstart of two updates. The others take minutes or a corpus: they go through the parsers of
their flags, in tests/test_readme.py.
"""

import ast
import gzip
import importlib
import importlib.util
import inspect
import json
import pkgutil
import re
import shlex
import subprocess
import sys
from pathlib import Path
from shutil import rmtree
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import AxisType, PartitionSpec

import adaptive_jax
from adaptive_jax import linear_cross_entropy
from adaptive_jax.config.keys import complete
from adaptive_jax.model.language_model import BODIES, LanguageModel, init_params
from adaptive_jax.scores.evaluate import Request, evaluate
from adaptive_jax.scores.surprisal import ScoredLine
from adaptive_jax.text.load import LoadedModel
from adaptive_jax.training.loop import train
from configs import quickstart
from tests import refuses, test_contracts
from tests.pages import PAGES, ROOT, blocks, python_blocks, reads_quickstart

NEEDS = {"adaptive_jax report": "matplotlib"}  # programs that run where this is installed
OWN_PAGES = {
    "docs/interop.md": "needs safetensors and exported programs; tests/interop runs its code",
    "docs/rl.md": "has a test below",
}
OWN_TESTS = (  # code with a test of its own, below
    *("class MyModel", "linear_cross_entropy", "OneGate", "save_run"),
    *("adaptive_jax.nnx", "torch_softmax", "accumulated", "pyarrow"),
)
DONE = set()  # a command of several pages runs once


def runs(line):
    """True if a line of shell runs here."""
    words = line.split()
    if any(
        name in line and not importlib.util.find_spec(package) for name, package in NEEDS.items()
    ):
        return False
    return words[0] == "printf" or reads_quickstart(words)


def runs_code(code):
    """True if a block of Python runs here; the others have tests of their own."""
    return not any(name in code for name in OWN_TESTS)


def to_run(text):
    """The blocks of a page that run here."""
    return [
        (kind, block)
        for kind, block in blocks(text)
        if (runs if kind == "shell" else runs_code)(block)
    ]


TO_RUN = {
    page: found for page, text in PAGES.items() if page not in OWN_PAGES and (found := to_run(text))
}


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    """A directory like a clone of this repository in which the quickstart has been trained, for
    two updates and in small.
    """
    pytest.importorskip(
        "pythonbible", reason="pythonbible is not installed: pip install pythonbible"
    )
    place = tmp_path_factory.mktemp("place")
    config = quickstart.get_config()
    config.update_from_flattened_dict(
        {
            "steps": 2,
            "body.layers": 1,
            "body.features": 32,
            "body.heads": 2,
            "body.feed_forward": 32,
            "input.width": 32,
            "evaluate_every": 0,
            "schedule.warmup_steps": 1,
            "schedule.cycle_steps": 1,
        }
    )
    train(config, place / "runs" / "quickstart")
    return place


def shell(line, in_process, place):
    """Runs a line, which may have pipes, `< FILE`, `> FILE` and `>> FILE`, and returns what it
    prints.
    """
    printed = ""
    for part in line.split(" | "):
        words = shlex.split(part, comments=True)
        files = {
            sign: place / words[words.index(sign) + 1] for sign in ("<", ">", ">>") if sign in words
        }
        words = words[: min([len(words), *(words.index(sign) for sign in files)])]
        printed = files["<"].read_text() if "<" in files else printed
        if words[0] == "python":
            done = in_process(*words[1:], given=printed)
            assert done.returncode == (
                3 if "--target_perplexity" in line and "above" in done.stderr else 0
            ), done.stderr
            printed = done.stdout
        else:
            printed = subprocess.run(
                words, cwd=place, input=printed, text=True, stdout=subprocess.PIPE, check=True
            ).stdout
        for sign in files.keys() - {"<"}:
            with files[sign].open("w" if sign == ">" else "a") as file:
                file.write(printed)
    return printed


@pytest.mark.parametrize("page", TO_RUN)
def test_a_page_runs(page, in_process, place, monkeypatch):
    """Its commands about runs/quickstart end well, and so does its Python, in the order of the
    page.
    """
    monkeypatch.chdir(place)
    names = {}
    for kind, block in TO_RUN[page]:
        if kind == "python":
            exec(block, names)
        elif block not in DONE:
            shell(block, in_process, place)
            DONE.add(block)


def test_nbest_lists_of_the_pages_have_known_words(place):
    """An unknown word of a wrong hypothesis, scored as `<unk>`, won over the right one."""
    words = (place / "runs" / "quickstart" / "vocabulary.txt").read_text().split()
    text = r"\|\|\| ([a-z ]+) \|\|\| AM|\\t-[\d.]+\\t([a-z ]+)|utt-\d ([a-z ]+) \d"
    lines = [" ".join(groups) for groups in re.findall(text, PAGES["docs/text.md"])]
    assert len(lines) == 6 and {word for line in lines for word in line.split()} <= set(words)


def test_raw_text_is_evaluated_as_it_is_scored(place, tmp_path):
    """`evaluate.py --data_path` read raw text at white space, and `score` as the run's corpus."""
    text = "And God said, Let there be light:\n“There was light.”\n\nThe light (it was good)...\n"
    (tmp_path / "test.txt").write_text(text)
    run = place / "runs" / "quickstart"
    evaluated = evaluate(run, Request(data_path=str(tmp_path), window=8, context=4))
    scored = adaptive_jax.load(run).perplexity(text.splitlines(), window=8, context=4)
    assert evaluated["tokens"] == 29 and scored == pytest.approx(evaluated["perplexity"], rel=1e-5)


@pytest.mark.parametrize("form", ["parquet", "json"])
def test_three_lines_read_parquet_and_json_lines(form, tmp_path, monkeypatch):
    """Those of docs/own_data.md: documents of several lines stay apart."""
    pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install pyarrow")
    arrow = importlib.import_module("pyarrow")
    parquet = importlib.import_module("pyarrow.parquet")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "DIR").mkdir()
    rows = [{"text": "a b\nc", "id": 1}, {"text": "d é", "id": 2}]
    if form == "parquet":
        parquet.write_table(arrow.Table.from_pylist(rows), "DIR/part.parquet")
    else:
        (tmp_path / "DIR" / "part.jsonl").write_text("\n".join(map(json.dumps, rows)))
    [code] = [code for code in python_blocks(PAGES["docs/own_data.md"]) if "pyarrow" in code]
    exec(code.replace('"parquet"', repr(form)), {})
    assert (tmp_path / "mine.txt").read_text(encoding="utf-8") == "a b\nc\n\nd é\n\n"


LISTS = """\
a-1 ||| the king ||| LM0= -3 TM= -1 -2 ||| -5 ||| 0-0 1-1
a-1 ||| the king of the earth ||| -7 -4.5
b-x\t-2\tthe sea and the earth
utt-9-1 the earth and the sea 1.5
b-x\t-2.5\tthe sea
utt-9-2 the earth 1.75
utt-9-3 3
a-1 ||| ||| -9
"""


def test_nbest_lists_are_rescored(place, tmp_path, monkeypatch):
    """The program reads lists of three kinds, of which each id is one list; it prefers short texts
    where those are right, as a model does whose words are alike, and writes one text for each id.
    """
    (tmp_path / "runs").symlink_to(place / "runs")
    monkeypatch.chdir(tmp_path)
    for name in "held_out.txt", "lists.txt":
        (tmp_path / name).write_text(LISTS)
    (tmp_path / "right.txt").write_text("utt-9\tthe earth\nb-x\tthe sea\n")
    [code] = [code for code in python_blocks(PAGES["docs/text.md"]) if "held_out" in code]
    names = {}
    exec(code, names)
    lists = {
        "a-1": [(-5, "the king"), (-4.5, "the king of the earth"), (-9, "")],
        "b-x": [(-2, "the sea and the earth"), (-2.5, "the sea")],
        "utt-9": [(-1.5, "the earth and the sea"), (-1.75, "the earth"), (-3, "")],
    }
    found = names["read"](tmp_path / "lists.txt")
    assert {name: [row[:2] for row in rows] for name, rows in found.items()} == lists
    log_prob = next(names["model"].score(["the sea"])).log_prob
    assert found["b-x"][1][2] == pytest.approx(log_prob, abs=1e-4)
    assert names["weight"] > 0
    chosen = (tmp_path / "best.txt").read_text()
    assert chosen.splitlines()[1:] == ["b-x\tthe sea", "utt-9\tthe earth"]
    for words, right, errors in ("kitten", "sitting", 3), ("", "ab", 2), ("ab", "", 2):
        assert names["word_errors"](words, right) == errors


@pytest.mark.parametrize(
    "sizes, parts",
    [("20 10 1000", [(0, 4), (4, 6), (6, 40)]), ("21 1 5", [(0, 5), (5, 6), (6, 7)])],
)
def test_texts_are_cut_by_words(tmp_path, sizes, parts):
    """The lines of shell write whole lines until a part has its words, ends of lines included."""
    lines = [f"Line {i} , über\n" for i in range(40)]
    (tmp_path / "news.2007.en.shuffled.gz").write_bytes(gzip.compress("".join(lines).encode()))
    (tmp_path / "wikitext-103-raw").mkdir()
    (tmp_path / "wikitext-103-raw" / "wiki.train.raw").write_text("".join(lines))
    shell = [line for kind, line in blocks(PAGES["docs/corpora.md"]) if kind == "shell"]
    commands = [line for line in shell if line.startswith("mkdir news_2007") or "awk" in line]
    assert len(commands) == 3 and all("2000000" in line for line in commands[1:])
    commands = "\n".join(commands).replace("2000000 2000000 10000000", sizes)
    subprocess.run(
        ["sh", "-ec", commands.replace("2000000", sizes.split()[0])], cwd=tmp_path, check=True
    )
    for name, (begin, end) in zip(("train", "valid", "test"), parts, strict=True):
        assert (tmp_path / "news_2007" / f"{name}.txt").read_text() == "".join(lines[begin:end])
    text = (tmp_path / "wikitext103_raw" / "train.txt").read_text()
    assert text == "".join(lines[: parts[0][1]])


def test_layers_around_a_body_of_ones_own():
    """The code block trains: the loss is finite, and rare words get a gradient."""
    [code] = [code for code in python_blocks(PAGES["README.md"]) if "class MyModel" in code]
    code = small(code).replace("30_000", "300").replace("200_000", "2_000")
    # Operation by operation it would compile for four times as long.
    gradients = "jax.value_and_grad(model.apply)"
    assert gradients in code
    code = code.replace(gradients, f"jax.jit({gradients}, static_argnames='train')")
    names = {}
    exec(code, names)
    assert np.isfinite(names["loss"])
    tables = names["gradients"]["params"]["embed"]
    assert jnp.abs(tables["table_2"][2_000 - 600]).sum() > 0
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(names["gradients"]))


class EndsInDense(linen.Module):
    """A model whose logits are those of a layer that its parameters call lm_head."""

    @linen.compact
    def __call__(self, tokens):
        return linen.Dense(211, name="lm_head")(linen.Embed(211, 8)(tokens))


def test_the_loss_for_models_of_any_kind():
    """The examples give the loss and the gradients of a dense softmax, over any number of
    devices.
    """
    names = {
        "jax": jax,
        "linen": linen,
        "nnx": nnx,
        "AxisType": AxisType,
        "P": PartitionSpec,
        "linear_cross_entropy": linear_cross_entropy,
    }
    names["equinox"] = equinox = pytest.importorskip(
        "equinox", reason="equinox is not installed: pip install equinox"
    )
    names["haiku"] = haiku = pytest.importorskip(
        "haiku", reason="haiku is not installed: pip install dm-haiku"
    )
    pages = "README.md", "docs/adopting.md", "docs/losses.md"
    blocks = [block for page in pages for block in python_blocks(PAGES[page])]
    code = "\n".join(block for block in blocks if "linear_" in block)
    exec(code.replace("151_936", "211"), names)  # the vocabulary is the examples' only cost
    tokens, targets = np.array([[1, 210, 3]]), np.array([[210, 3, 0]])
    key = jax.random.key(0)
    linen_model, nnx_model = names["LinenModel"](), names["NnxModel"](nnx.Rngs(0))
    params = jax.jit(linen_model.init)(key, tokens, targets)
    equinox_model = names["EquinoxModel"](
        equinox.nn.Embedding(211, 8, key=key), equinox.nn.Linear(8, 211, key=key)
    )
    theirs_params = jax.jit(names["Theirs"]().init)(key, tokens)["params"]
    dense_model = EndsInDense()
    dense_params = jax.jit(dense_model.init)(key, tokens)["params"]
    haiku_init, haiku_loss = haiku.without_apply_rng(
        haiku.transform(lambda *given: names["haiku_model"](*given))
    )
    haiku_params = haiku_init(key, tokens, targets)
    hidden, table = (
        jnp.ones((3, 8)),
        jax.random.normal(key, (-(-211 // jax.device_count()) * jax.device_count(), 8)),
    )

    def dense(hidden, table, targets, *, bias=0.0, axis_name=None, words=211, reports=None):
        table = table if axis_name is None else jax.lax.all_gather(table, axis_name, tiled=True)
        logits = hidden @ table[:words].T + jnp.broadcast_to(bias, (*hidden.shape[:-1], words))
        total = optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()
        if reports:
            return total, SimpleNamespace(correct=logits.argmax(axis=-1) == targets)
        return total if axis_name is None else jax.lax.pmean(total, axis_name)

    def with_both(function, jit=jax.jit):
        """The function compiled with our loss and with the dense one: both results."""

        def results(*arguments):
            for loss in linear_cross_entropy, dense:
                names["linear_cross_entropy"] = loss
                yield function(*arguments)

        return jit(lambda *arguments: [*results(*arguments)])

    slopes = lambda loss, *which: with_both(jax.value_and_grad(loss, *which))
    linen_loss = lambda params: linen_model.apply(params, tokens, targets)
    nnx_slopes = nnx.value_and_grad(lambda model: model(tokens, targets))
    equinox_slopes = equinox.filter_value_and_grad(
        lambda model: names["equinox_loss"](model, tokens, targets)
    )
    dense_loss = lambda params: names["dense_loss"](dense_model, params, tokens, targets)
    arrays = hidden, table[:211], targets[0]
    ours, theirs = zip(
        slopes(linen_loss)(params),
        with_both(nnx_slopes, nnx.jit)(nnx_model),
        with_both(equinox_slopes, equinox.filter_jit)(equinox_model),
        slopes(haiku_loss)(haiku_params, tokens, targets),
        with_both(names["loss_and_accuracy"])(*arrays),
        with_both(names["loss_and_gradients"])(*arrays),
        slopes(names["theirs_loss"])(theirs_params, tokens, targets),
        slopes(dense_loss)(dense_params),
        slopes(names["sharded_loss"], (0, 1))(hidden, table, targets[0]),
        strict=True,
    )

    def optax_loss(model, params):
        logits = model.apply({"params": params}, tokens)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    expected = [
        jax.jit(jax.value_and_grad(lambda p, model=model: optax_loss(model, p)))(params)
        for model, params in ((names["Theirs"](), theirs_params), (dense_model, dense_params))
    ]
    for one, other in zip(jax.tree.leaves(ours[-3:-1]), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_the_best_items_for_a_user():
    """They are those of all logits, the best one first."""
    [code] = [code for code in python_blocks(PAGES["docs/large_tables.md"]) if "recommend" in code]
    names = {}
    exec(code.replace("100_000", "31"), names)
    rng = np.random.default_rng(0)
    hidden, items, bias = (jnp.float32(rng.normal(size=shape)) for shape in ((3, 4), (31, 4), 31))
    ids, log_probs = names["recommend"](hidden, items, 5, bias)
    expected, order = jax.lax.top_k(jax.nn.log_softmax(hidden @ items.T + bias[None]), 5)
    np.testing.assert_array_equal(ids, order)
    np.testing.assert_allclose(log_probs, expected, rtol=1e-5)


def small(code):
    """Code with a vocabulary of a hundredth: its only cost."""
    return code.replace("267_735", "2_678").replace("20_000, 60_000", "200, 600")


def test_layers_in_nnx():
    """The code block trains: the loss is finite, and every parameter of the tied table gets a
    gradient.
    """
    [code] = [code for code in python_blocks(PAGES["docs/layers.md"]) if "NnxModel" in code]
    names = {}
    exec(small(code), names)
    assert np.isfinite(names["loss"])
    gradients = nnx.to_pure_dict(names["gradients"])
    assert sorted(gradients) == ["body", "embed", "softmax"]
    assert all(np.any(leaf) for leaf in jax.tree.leaves(gradients))


def test_weights_of_torch():
    """The code block computes torch's mean loss, and gives torch its arrays back."""
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install torch")
    code, _ = python_blocks(PAGES["docs/torch.md"])
    names = {}
    exec(small(code), names)
    hidden, targets = (np.array(names[each]) for each in ("hidden", "targets"))
    with torch.no_grad():
        expected = names["module"](torch.from_numpy(hidden), torch.from_numpy(targets)).loss
    np.testing.assert_allclose(names["loss"], expected, rtol=1e-6)


def test_a_model_of_torch_becomes_a_run_and_back(tmp_path, monkeypatch):
    """The page's program: the run scores what torch computes, and torch gets its numbers back."""
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install torch")
    monkeypatch.chdir(tmp_path)
    _, code = python_blocks(PAGES["docs/torch.md"])
    names = {}
    exec(code, names)
    tokens, targets = ([1, 0, 2, 3, 4, 0, 5], [0, 2, 3, 4, 0, 5, 1])
    with torch.no_grad():
        theirs, again = (
            names[model](torch.tensor([tokens]), torch.tensor([targets]))
            for model in ("model", "again")
        )
    np.testing.assert_allclose(names["line"].log_probs, theirs, rtol=1e-5)
    assert torch.equal(again, theirs)


def test_an_input_starts_from_vectors_of_a_file(tmp_path, monkeypatch, in_process, capsys):
    """The page's program puts the vectors of a file into a run, and training that is given nothing
    but the run starts from them, with its config and its text.
    """
    monkeypatch.chdir(tmp_path)
    for split in "train", "valid", "test":
        Path("DIR").mkdir(exist_ok=True)
        Path("DIR", f"{split}.txt").write_text("the cat sat\nthe cat sat on the mat\n" * 9)
    Path("glove.6B.300d.txt").write_text(f"2 8\ncat{' 0.5' * 8}\nzebra{' 0.1' * 8}\n")
    [code] = [code for code in python_blocks(PAGES["docs/words.md"]) if "read_vectors" in code]
    tiny = '"lstm", "body.features": 8, "body.widths": (8,), "tokens_per_update": 16, '
    tiny += '"steps": 1, "batches.sequence_length": 8, "schedule.name": "constant", '
    tiny += '"schedule.warmup_steps": 0'
    code = code.replace('"lstm"', tiny).replace('"input.width": 300', '"input.width": 8')
    exec(code, {})
    assert "1 of 6 words have vectors, 18.2% of the text" in capsys.readouterr().out
    train = "train.py", "--init_from=runs/glove", "--workdir=runs/tuned"
    train = *train, "--config.optimizer.learning_rate=1e-30"  # which moves nothing
    done = in_process(*train)
    assert done.returncode == 0, done.stderr
    assert "init_from    runs/glove after 0 updates: vectors of 6 of 6 words" in done.stdout
    vectors = adaptive_jax.load("runs/tuned").run.params["input"]["table"]
    words = adaptive_jax.load("runs/tuned").run.vocabulary.index
    np.testing.assert_array_equal(vectors[words["cat"]], np.full(8, 0.5, np.float32))
    rmtree("runs/glove")  # the run resumes without it
    assert in_process(*train).returncode == 0


def test_a_layer_is_added(monkeypatch):
    """The page's body keeps the contract of all bodies, under the name and with the defaults
    that the page gives it.
    """
    monkeypatch.setattr("adaptive_jax.model.language_model.BODIES", dict(BODIES))
    exec("\n".join(python_blocks(PAGES["docs/adding_a_layer.md"])), {})
    assert complete({"body.name": "one_gate"})["body"] == {"name": "one_gate", "features": 256}
    test_contracts.test_body(("one_gate", {}))
    test_contracts.test_body_continues_rows_of_a_stream(("one_gate", {}))


def test_an_output_of_the_pages_trains():
    """A run makes the parameters of an output without calling it: those of an `nn.Dense` were
    missing, so the page's output kept the contract and no run could train it.
    """
    names = {}
    exec("\n".join(python_blocks(PAGES["docs/adding_a_layer.md"])[:2]), names)
    output = names["MixtureOfSoftmaxes"](adaptive_jax.OwnTable(61, 16))
    model = LanguageModel(adaptive_jax.Lookup(61, 16), names["OneGate"](16), output)
    params = jax.eval_shape(lambda: init_params(model, 0))
    assert {"prior", "states"} <= params["output"].keys()
    tokens = jnp.ones((2, 5), jnp.int32)
    batch = adaptive_jax.Batch(tokens, tokens, jnp.ones((2, 5)), None)
    loss, _ = jax.eval_shape(lambda params: model.apply({"params": params}, batch), params)
    assert loss.nll.shape == (2, 5)


@pytest.mark.parametrize("page", ["docs/adopting.md", "docs/losses.md"])
def test_a_section_needs_no_other(page):
    """Readers paste the code of one section: names that another section imported were missing."""
    for section in PAGES[page].split("\n## "):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", "check", "--isolated", "--select=F821", "-"],
            input="\n".join(python_blocks(section)),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout


def test_the_reference_is_whole():
    """It has every name that the package exports, each with a link to where it is defined: read
    as a file, the page was directives alone.
    """
    named = re.findall(
        r"^\.\. auto(?:class|function|exception):: (\w+)", PAGES["docs/api.md"], re.MULTILINE
    )
    assert len(named) == len(set(named))
    assert set(named) >= set(adaptive_jax.__all__)
    links = dict(
        re.findall(r"\[`(?:[a-z_]+\.)*(\w+)`\]\(\.\./([\w/]+\.py)\)", PAGES["docs/api.md"])
    )
    assert links.keys() >= set(named)
    for name in named:
        assert re.search(rf"^(def|class) {name}\b", (ROOT / links[name]).read_text(), re.MULTILINE)


# What the names of code in prose stand for
OBJECTS = {
    "model": LoadedModel,
    "line": ScoredLine,
    "softmax": adaptive_jax.Softmax,
    "body": adaptive_jax.Transformer,
}


def test_code_in_prose_is_of_what_there_is():
    """Names of the package are found, and calls fit what they call: docs/text.md gave `top_k` what
    it did not take, since blocks alone ran.
    """
    names = calls = 0
    for page in PAGES.keys() - {"docs/torch.md"}:  # whose names are those of torch
        prose = re.sub(r"```.*?```|^    .*?$", "", PAGES[page], flags=re.DOTALL | re.MULTILINE)
        for name in re.findall(r"`(adaptive_jax(?:\.\w+)+)[`(]", prose):
            pkgutil.resolve_name(name)
            names += 1
        pattern = rf"`({'|'.join(OBJECTS)})\.(\w+)\(([^`]*)\)`"
        for thing, method, arguments in re.findall(pattern, prose):
            call = ast.parse(f"f({arguments})", mode="eval").body
            keywords = {keyword.arg: None for keyword in call.keywords}
            inspect.signature(getattr(OBJECTS[thing], method)).bind(None, *call.args, **keywords)
            calls += 1
    assert names > 5 and calls > 9


def test_accumulated_gradients_are_those_of_the_whole_batch():
    """The recipe's mean is that of all tokens, where microbatches hold unequal numbers of them."""
    names = {"linear_cross_entropy": linear_cross_entropy, "jax": jax, "jnp": jnp}
    [code] = [code for code in python_blocks(PAGES["docs/adopting.md"]) if "accumulated" in code]
    exec(code, names)
    rng = np.random.default_rng(0)
    params = {"embed": rng.normal(size=(13, 4)), "table": rng.normal(size=(13, 4))}
    params = jax.tree.map(jnp.float32, params)
    tokens, targets = rng.integers(0, 13, (2, 2, 6))
    weights = jnp.float32([[1, 1, 1, 1, 1, 0], [1, 0, 0, 0, 0, 0]])
    batch = {"tokens": tokens, "targets": targets, "weights": weights}

    def mean(params):
        hidden = jnp.tanh(params["embed"][tokens])
        return linear_cross_entropy(hidden, params["table"], targets, weights=weights)

    actual = jax.jit(lambda *a: names["accumulated"](names["loss_sum"], *a))(params, batch)
    expected = jax.jit(jax.value_and_grad(mean))(params)
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto])
def test_nnx_on_a_mesh(axis_type, capsys):
    """The recipe learns to repeat tokens, and prints accuracy and bytes, on both types of axes."""
    names = {"linear_cross_entropy": linear_cross_entropy, "nnx": nnx}
    [code] = [code for code in python_blocks(PAGES["docs/adopting.md"]) if "MeshModel" in code]
    exec(code.replace("151_936", "16"), names)
    tokens = np.tile(np.arange(16, dtype=np.int32), (jax.device_count(), 1))
    names["train_on_mesh"]([(tokens, tokens, np.ones(tokens.shape, np.float32))] * 12, axis_type)
    losses = re.findall(r"Array\(([\d.]+)", capsys.readouterr().out)
    first, last = losses[:2], losses[-2:]
    assert float(last[0]) < float(first[0]) / 2 and float(last[1]) > float(first[1])


SAVED = """
import jax.numpy as jnp, numpy as np
from jax.experimental import serialize_executable
from jax.sharding import AxisType, NamedSharding
from tests.programs import uncached
rng = np.random.default_rng(0)
arrays = [rng.standard_normal(shape).astype("f") for shape in ((8, 8), (24, 8))]
arrays += [np.arange(8), np.float32([1, 2, 0, 1, 1, 1, 1, 1])]
mesh = jax.make_mesh((8,), ("fsdp",), (AxisType.Auto,))
specs = P("fsdp"), P(None, "fsdp"), P("fsdp"), P("fsdp")
placed = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(arrays, specs)]
with jax.set_mesh(mesh), uncached():
    compiled = jax.jit(jax.value_and_grad(loss_on_auto_axes, (0, 1))).lower(*placed).compile()
    again = serialize_executable.deserialize_and_load(*serialize_executable.serialize(compiled))
    results = again(*placed)

def formula(hidden, table):
    losses = -jax.nn.log_softmax(hidden @ table.T)[np.arange(8), arrays[2]]
    return (arrays[3] * losses).sum() / arrays[3].sum()

for one, other in zip(
    jax.tree.leaves(results), jax.tree.leaves(jax.value_and_grad(formula, (0, 1))(*arrays[:2]))
):
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
"""


def test_a_program_on_auto_axes_is_saved(eight):
    """The recipe's compiled step is saved, loaded, and computes loss and gradients; a plain call of
    the loss cannot be saved.
    """
    [code] = [code for code in python_blocks(PAGES["docs/adopting.md"]) if "explicit_axes" in code]
    eight(code + SAVED)


def test_reinforcement_and_distillation_without_logits():
    """Losses and gradients of the page are those of formulas that make all logits."""
    names = {}
    exec("\n".join(python_blocks(PAGES["docs/rl.md"])), names)
    rng = np.random.default_rng(0)
    hidden, table = (jnp.float32(rng.normal(size=shape)) for shape in ((2, 3, 5, 4), (11, 4)))
    tokens = rng.integers(0, 11, (2, 3, 5))
    mask = jnp.float32(rng.integers(0, 2, (2, 3, 5))).at[..., -1].set(1)
    advantages, old, reference = jnp.float32(rng.normal(size=(3, 2, 3, 5))) / 4
    teacher, answers = hidden + 0.5, rng.integers(0, 11, (2, 3, 5, 3))
    wide, wide_table = (jnp.float32(rng.normal(size=shape)) for shape in ((2, 3, 5, 6), (11, 6)))

    def token_log_probs(hidden, table, scale=1.0):
        log_probs = jax.nn.log_softmax(scale * hidden @ table.T)
        chosen = jnp.take_along_axis(log_probs, tokens[..., None], axis=-1)[..., 0]
        return mask * chosen, -(jnp.exp(log_probs) * log_probs).sum(axis=-1)

    def mean(values):
        return (mask * values).sum() / mask.sum()

    def policy_gradient(hidden, table):
        chosen, entropy = token_log_probs(hidden, table, 1 / 0.7)
        return mean(-advantages * chosen - 0.01 * entropy)

    def clipped_policy(hidden, table):
        new, _ = token_log_probs(hidden, table)
        ratio = jnp.exp(new - old)
        gain = jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.2) * advantages)
        return -mean(gain - 0.04 * (jnp.exp(reference - new) - 1 - reference + new))

    def dpo(hidden, table):
        chosen, rejected = token_log_probs(hidden, table)[0].sum(axis=-1) - reference[..., 0]
        return jnp.log1p(jnp.exp(-0.1 * (chosen - rejected))).mean()

    def distillation(hidden, table):
        expected, actual = (jax.nn.log_softmax(each @ table.T) for each in (teacher, hidden))
        expected = jax.lax.stop_gradient(expected)
        return mean((jnp.exp(expected) * (expected - actual)).sum(axis=-1))

    def reverse_distillation(hidden, table):
        expected, actual = (jax.nn.log_softmax(each @ table.T) for each in (teacher, hidden))
        best = jax.lax.top_k(actual, 4)[1]
        of_best = lambda log_probs: jnp.take_along_axis(log_probs, best, axis=-1)
        expected, actual = jax.lax.stop_gradient(of_best(expected)), of_best(actual)
        return mean((jnp.exp(actual) * (actual - expected)).sum(axis=-1))

    def choice(hidden, table):
        return jax.nn.softmax(jnp.take_along_axis(hidden @ table.T, answers, axis=-1))[..., 1].sum()

    def whole_distillation(hidden, table):
        p, q = (jax.nn.softmax(a @ b.T / 2) for a, b in ((wide, wide_table), (hidden, table)))
        from_mixture = sum((a * jnp.log(a / ((p + q) / 2))).sum(axis=-1) for a in (p, q)) / 2
        return mean(0.9 * from_mixture - 0.1 * token_log_probs(hidden, table)[0])

    words, log_probs = names["best_words"](teacher, table, tokens, mask, 11)
    for formula, arguments in (
        (policy_gradient, (tokens, mask, advantages)),
        (clipped_policy, (tokens, mask, advantages, old, reference)),
        (dpo, (tokens, mask, reference[..., 0])),
        (distillation, (words, log_probs, mask)),
        (reverse_distillation, (teacher, table, tokens, mask, 4)),
        (choice, (answers,)),
        (whole_distillation, ((wide, wide_table), tokens, mask)),
    ):
        name = formula.__name__
        options = {"temperature": 0.7} if formula is policy_gradient else {}

        def ours(hidden, table, name=name, arguments=arguments, options=options):
            if name == "whole_distillation":
                return names[name]((hidden, table), *arguments)
            value = names[name](hidden, table, *arguments, **options)
            return value[..., 1].sum() if name == "choice" else value

        actual, expected = (
            jax.jit(jax.value_and_grad(f, (0, 1)))(hidden, table) for f in (ours, formula)
        )
        for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6, err_msg=name)
    with refuses("reduction='none'"):
        jax.grad(
            lambda h: linear_cross_entropy(h, table, tokens, reports=("entropy",))[1].entropy.sum()
        )(hidden)
