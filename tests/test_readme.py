"""README and docs: the example runs as it is printed; commands run, and every path, module, flag and config key exists."""

import importlib.util
import itertools
import re
import shlex
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import AxisType, PartitionSpec

from adaptive_jax import linear_cross_entropy
from adaptive_jax.defaults import CHOOSE, DEFAULTS, NAMED
from adaptive_jax.workdir.settings import FREE

ROOT = Path(__file__).parents[1]
FILES = ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in FILES}
INSTALL = {"pip", "uv", "tensorboard", "gcloud", "."}  # what a test cannot run
MADE = "runs/", "eval/", "checkpoints/", "shards/", "train/", "clusters/"  # what commands make; metrics begin with train/


def commands(text):
    """The commands of a page as lists of words, from indented blocks and from code within lines; `a && b` are two."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL).replace("\\\n", " ")
    blocks = re.findall(r"^    (?! )(.*)$", text, re.MULTILINE)
    spans = re.findall(r"`([^`]+)`", re.sub(r"^    .*$", "", text, flags=re.MULTILINE))
    lines = [*blocks, *(" ".join(span.split()) for span in spans if re.match(r"(python3? |make |pip |uv )", span))]
    for line in lines:
        words = shlex.split(line, comments=True)
        for second, part in itertools.groupby(words, lambda word: word == "&&"):
            named = list(itertools.dropwhile(lambda word: re.match(r"[A-Z_]+=|srun$", word), part))
            if named and not second:
                yield named


COMMANDS = [(page, words) for page, text in PAGES.items() for words in commands(text)]
PYTHON = [(page, words) for page, words in COMMANDS if words[0] == "python"]


def programs(words):
    """How a command names its program: ["train.py"] or ["-m", "benchmarks.tables"]."""
    return words[1:3] if words[1] == "-m" else words[1:2]


def shown(case):
    return " ".join(case[1]) if isinstance(case, tuple) else str(case)


def keys():
    """Every key of every config, such as "body.layers"."""
    found = {f"choose.{key}" for key in CHOOSE}

    def add(group, settings):
        for key, value in settings.items():
            found.add(f"{group}.{key}".lstrip("."))
            if isinstance(value, dict):
                add(f"{group}.{key}".lstrip("."), value)

    add("", DEFAULTS)
    for group, classes in NAMED.items():
        for settings in classes.values():
            add(group, settings)
    return found


def test_layers_around_a_body_of_ones_own():
    """The code block trains: the loss is finite, its report adds up, and rare words get a gradient."""
    code, *_ = re.findall(r"```python\n(.*?)```", PAGES["README.md"], re.DOTALL)
    # The vocabulary is the example's only cost; a hundredth of it shows the same.
    code = code.replace("267_735", "2_678").replace("20_000, 60_000", "200, 600").replace("30_000", "300").replace(
        "200_000", "2_000")
    names = {}
    exec(code, names)
    assert np.isfinite(names["loss"])
    np.testing.assert_allclose(names["loss"], jnp.sum(names["nll"]), rtol=1e-6)
    tables = names["gradients"]["params"]["embed"]
    assert jnp.abs(tables["table_2"][2_000 - 600]).sum() > 0
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(names["gradients"]))


def test_the_loss_for_models_of_any_kind():
    """The examples give the loss and the gradients of a dense softmax, over any number of devices."""
    names = {"jax": jax, "linen": linen, "nnx": nnx, "AxisType": AxisType, "P": PartitionSpec,
             "linear_cross_entropy": linear_cross_entropy}
    names["equinox"] = equinox = pytest.importorskip("equinox", reason="equinox is not installed: pip install equinox")
    names["haiku"] = haiku = pytest.importorskip("haiku", reason="haiku is not installed: pip install dm-haiku")
    _, *codes = re.findall(r"```python\n(.*?)```", PAGES["README.md"], re.DOTALL)
    exec("\n".join(codes).replace("151_936", "211"), names)  # the vocabulary is the examples' only cost
    tokens, targets = np.array([[1, 210, 3]]), np.array([[210, 3, 0]])
    key = jax.random.key(0)
    linen_model, nnx_model = names["LinenModel"](), names["NnxModel"](nnx.Rngs(0))
    params = jax.jit(linen_model.init)(key, tokens, targets)
    equinox_model = names["EquinoxModel"](equinox.nn.Embedding(211, 8, key=key), equinox.nn.Linear(8, 211, key=key))
    haiku_init, haiku_loss = haiku.without_apply_rng(haiku.transform(lambda *given: names["haiku_model"](*given)))
    haiku_params = haiku_init(key, tokens, targets)
    hidden, table = jnp.ones((3, 8)), jax.random.normal(key, (-(-211 // jax.device_count()) * jax.device_count(), 8))

    def results():
        linen_loss, nnx_loss = (lambda p: linen_model.apply(p, tokens, targets)), lambda m: m(tokens, targets)
        return [
            jax.jit(jax.value_and_grad(linen_loss))(params), nnx.jit(nnx.value_and_grad(nnx_loss))(nnx_model),
            equinox.filter_jit(equinox.filter_value_and_grad(lambda m: m(tokens[0], targets[0])))(equinox_model),
            jax.jit(jax.value_and_grad(haiku_loss))(haiku_params, tokens, targets),
            jax.jit(jax.value_and_grad(names["sharded_loss"], (0, 1)))(hidden, table, targets[0])]

    def dense(hidden, table, targets, *, bias=0.0, axis_name=None, words=211):
        table = table if axis_name is None else jax.lax.all_gather(table, axis_name, tiled=True)
        logits = hidden @ table[:words].T + jnp.broadcast_to(bias, (*hidden.shape[:-1], words))
        total = optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()
        return total if axis_name is None else jax.lax.pmean(total, axis_name)

    ours = results()
    names["linear_cross_entropy"] = dense
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(results()), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_the_commands_are_found():
    """The reader of pages sees blocks, code within lines, continued lines and variables in front."""
    page = "a `python train.py --a=1` b\n\n    X=1 python -m x \\\n        --b    # c\n    make && . d\n"
    assert list(commands(page)) == [["python", "-m", "x", "--b"], ["make"], [".", "d"], ["python", "train.py", "--a=1"]]
    assert {words[0] for _, words in COMMANDS} - INSTALL == {"make", "python", "python3"}
    assert len(PYTHON) > 30


def test_the_first_lines_are_the_two_commands():
    """Everyone, and the continuous integration, begins with these."""
    assert [words for words in commands(PAGES["README.md"])][:2] == [["make", "train"], ["make", "test"]]


@pytest.mark.parametrize("case", [case for case in PYTHON if case[1][1] == "train.py" and "FILE" not in shown(case)], ids=shown)
def test_commands_that_train(case, quick_command, text, tmp_path):
    """Their configs, rows, keys and values are accepted; those that make a plan print it, and --explain its keys."""
    _, words = case
    arguments = [word for word in words[1:] if not word.startswith("--workdir") and word != "..."]
    arguments = [word.replace("=DIR", f"={text}") for word in arguments]
    planned = "--dry_run" in arguments or "configs/own_text.py" in shown(case)
    more = () if "--explain" in arguments else ("--dry_run",) if planned else ("--explain",)
    done = quick_command(*arguments, *more, f"--workdir={tmp_path / 'run'}", f"--config.data.cache={tmp_path / 'cache'}")
    assert (done.returncode, done.stderr) == (0, "")
    assert ("memory       about" if planned else "--config.steps=") in done.stdout


@pytest.mark.parametrize("case", [case for case in PYTHON if case[1][1] == "evaluate.py"], ids=shown)
def test_commands_that_evaluate(case, quick_command, tmp_path):
    """Their flags are accepted: all that is missing is the run."""
    _, words = case
    done = quick_command(*[word for word in words[1:] if not word.startswith("--workdir")], f"--workdir={tmp_path}")
    assert done.returncode == 2
    assert done.stderr == f"error: {tmp_path} holds no run (no config.json): give the --workdir of a run that train.py made\n"


def test_flags(quick_command):
    """The help of every program has the flags that pages give to it, and those that they mention by themselves."""
    helps = {}
    for program in {tuple(programs(words)) for _, words in PYTHON if words[1] != "-c"} - {("-m", "venv")}:
        helps[program] = quick_command(*program, "--help").stdout
        assert "flags:" in helps[program] or "python -m" in helps[program], program
    for page, words in PYTHON:
        for word in words:
            if word.startswith("--") and not word.startswith("--config."):
                flag = word[2:].split("=")[0]
                assert re.search(rf"--(\[no\])?{flag}\b", helps[tuple(programs(words))]), (page, word)
    for page, content in PAGES.items():
        for flag in re.findall(r"`--(\w+)[=`]", content):
            if flag not in ("config", "help", "signal"):  # SLURM has a --signal
                assert any(re.search(rf"--(\[no\])?{flag}\b", text) for text in helps.values()), (page, flag)


def test_paths_modules_and_links():
    """Files that pages name exist, or are what a command makes; links lead to pages and headings."""
    for page, content in PAGES.items():
        here = (ROOT / page).parent
        for path in re.findall(r"`((?:[\w.]+/)*[\w.-]+\.(?:py|md|txt|toml))`", content) + re.findall(r"`((?:\w+/)+\w*)`", content):
            known = [*(name for name in MADE if path.startswith(name)),
                     *(place for place in (ROOT, ROOT / "adaptive_jax", here) if (place / path).exists())]
            files = "train.txt", "valid.txt", "test.txt", "dict.txt", "vocabulary.txt", "clusters.txt"
            assert known or path in files, (page, path)
        for target, heading in re.findall(r"\]\(([^)#]+)(?:#([^)]*))?\)", content):
            if "://" not in target:
                assert (here / target).exists(), (page, target)
                titles = re.findall(r"^#+ (.*)$", (here / target).read_text(), re.MULTILINE) if heading else []
                slugs = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]
                assert not heading or heading in slugs, (page, heading)
    for page, words in PYTHON:
        if words[1] == "-m":
            assert words[2] == "venv" or importlib.util.find_spec(words[2]), (page, words)
        if words[1] == "-c":
            exec(words[2], {})


def test_config_keys():
    """Keys that pages name exist: those after --config or config, those in code such as `body.remat`, and whole groups."""
    known, groups = keys(), {key for key, value in DEFAULTS.items() if isinstance(value, dict)}
    for page, content in PAGES.items():
        named = re.findall(r"--config\.([a-z_.]+)=", content) + re.findall(r"`config\.([a-z_.]+)`", content)
        named += [key for key in re.findall(r"`([a-z_]+\.[a-z_.]+?)(?:=[^`]*)?`", content) if key.split(".")[0] in groups]
        assert not [key for key in named if key not in known and not key.endswith(("json", "jsonl"))], page


def test_settings_that_may_change_when_a_run_is_resumed():
    """The page on runs names every one of them, and groups of which all keys may change."""
    page = " ".join(PAGES["docs/runs.md"].split())
    (named,) = re.findall(r"Settings that change no update may change: (.*?), and the groups (.*?)\. ", page)
    settings, groups = ({*re.findall(r"`([^`]+)`", part)} for part in named)
    assert settings | {f"{group}.{key}" for group in groups for key in DEFAULTS[group]} == FREE


def test_the_pages_are_short_and_use_one_unit():
    """The README takes three minutes, and sizes are in GB or MB."""
    prose = re.sub(r"```.*?```|^(?:    |\|).*$", "", PAGES["README.md"], flags=re.DOTALL | re.MULTILINE)
    assert len(prose.split()) < 1_000
    assert not [page for page, content in PAGES.items() if re.search(r"\b[KMGT]iB\b", content)]
    assert all(f"({page})" in PAGES["README.md"] for page in PAGES if page != "README.md")
