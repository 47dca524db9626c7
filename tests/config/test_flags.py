"""Config files and the flags that change them, as a user meets them: one line for what is wrong,
and classes that flags switch.
"""

import os
import re
import sys

import pytest
from absl import flags as absl_flags

from adaptive_jax.config import flags
from adaptive_jax.model.language_model import INPUTS, OUTPUTS, TABLES, build, parameter_shapes
from tests import refuses

ERRORS = absl_flags.Error, ValueError  # which InputError is


@pytest.fixture
def parsed(monkeypatch):
    """`parsed("--config.steps=5")`: the config and the said lines of a command line."""

    def parsed(*argv, place="configs/quickstart.py"):
        line = ["train.py", *([] if place is None else [f"--config={place}"]), *argv]
        monkeypatch.setattr(absl_flags, "FLAGS", absl_flags.FlagValues())
        monkeypatch.setattr(sys, "argv", line)
        flags.define()
        assert flags.parse(line) == ["train.py"]
        return flags.config()

    return parsed


def at(config, key):
    """The value of a dotted key."""
    for name in key.split("."):
        config = config[name]
    return config


@pytest.mark.parametrize(
    "argv, key, value",
    [
        (["--config.steps=5"], "steps", 5),
        (["--config.optimizer.learning_rate=2"], "optimizer.learning_rate", 2.0),
        (["--config.optimizer.clip_norm=none"], "optimizer.clip_norm", None),
        (["--config.optimizer.clip_norm=inf"], "optimizer.clip_norm", float("inf")),
        (["--config.data.lower"], "data.lower", True),
        (["--noconfig.metrics.tensorboard"], "metrics.tensorboard", False),
        (["--config.metrics.tensorboard=False"], "metrics.tensorboard", False),
        (["--config.data.path=a=b c"], "data.path", "a=b c"),
        (["--config.data.path=2007"], "data.path", "2007"),
        (["--config.data.path=2007_01"], "data.path", "2007_01"),
        (["--config.data.path=1e5"], "data.path", "1e5"),
        (["--config.init_from=5,6", "--config.init_from=+5"], "init_from", "+5"),
        (["--config.input.cutoffs=(5,9)"], "input.cutoffs", (5, 9)),
        (["--config.input.cutoffs=5,9"], "input.cutoffs", (5, 9)),
        (["--config.input.cutoffs=5"], "input.cutoffs", (5,)),
        (["--config.steps=5", "--config.steps=6"], "steps", 6),
        (["--config.body.name=lstm", "--config.body.widths=32,16"], "body.widths", (32, 16)),
        (["--config.body.widths=8,", "--config.body.name=lstm"], "body.widths", (8,)),
        (
            ["--config.output.table.name=composed", "--config.output.table.cnn.length=9"],
            "output.table.cnn.length",
            9,
        ),
    ],
)
def test_a_flag_sets_a_value(parsed, argv, key, value):
    """Of the type that the key has in its class, stated by the file or not."""
    config, _ = parsed(*argv)
    assert at(config, key) == value and type(at(config, key)) is type(value)


@pytest.mark.parametrize(
    "argv",
    [
        ["--config.steps=5", "--config=configs/quickstart.py:alibi"],
        [
            "--config",
            "configs/quickstart.py",
            "--config.steps=5",
            "-config=configs/quickstart.py:alibi",
        ],
        ["--config=none.py", "--config.steps=5", "--config", "configs/quickstart.py:alibi"],
    ],
)
def test_flags_come_in_any_order(parsed, argv):
    """The last --config counts, before or after flags --config.KEY."""
    config, _ = parsed(*argv, place=None)
    assert (config["steps"], config["body"]["positions"]) == (5, "alibi")
    assert flags.published(config) == (None, [])


@pytest.mark.parametrize(
    "argv, says",
    [
        (["--config.stpes=5"], ["config.stpes", 'Did you mean "steps"']),
        (["--config.bdy.layers=5"], ["config.bdy", 'Did you mean "body"']),
        (
            ["--config.steps.more=5"],
            ["config.steps of --config.steps.more", "is not one of metrics"],
        ),
        (["--config.body=5"], ["--config.body is a group"]),
        (["--config.=5"], ["--config. is not a key"]),
        (["--config."], ["--config. is not a key"]),
        (["--config.output.table.cnn.length=9"], ["config.output.table.cnn is not one of name"]),
        (["--config.steps"], ["config.steps=True", "a whole number"]),
        (["--config.steps=1.5"], ["config.steps=1.5", "a whole number"]),
        (["--config.steps=ten"], ["config.steps='ten'", "a whole number"]),
        (["--config.hours=" + "9" * 400], ["config.hours", "at most"]),
        (["--config.body.dropout=high"], ["config.body.dropout='high'", "a number"]),
        (["--config.body.dropout=nan"], ["config.body.dropout='nan'", "a number"]),
        (["--config.data.lower=maybe"], ["config.data.lower='maybe'", "True or False"]),
        (["--config.input.cutoffs=a,b"], ["config.input.cutoffs='a,b'", "whole numbers"]),
        (["--config.input.cutoffs=(1.5,3)"], ["config.input.cutoffs=(1.5, 3)", "whole numbers"]),
        (["--config.input.cutoffs=" + "(" * 9999], ["config.input.cutoffs", "whole numbers"]),
        (
            ["--config.input.name=char_cnn", "--config.input.filters=3,4"],
            ["config.input.filters=(3, 4)", "tuples of whole numbers"],
        ),
        (["--config.input.name=lokup"], ["config.input.name='lokup'", 'Did you mean "lookup"']),
        (["--config.input.name"], ["config.input.name=True", "text, such as"]),
        (
            ["--config.input.name=lookup", "--config.input.cutoffs=5"],
            ["config.input.cutoffs", "name, width"],
        ),
        (["--config.body.name=nowhere.layers:Body"], ["cannot be imported", "PYTHONPATH"]),
        (["--config.body.name=os:sep"], ["'os:sep'", "name a class"]),
    ],
)
def test_a_flag_that_is_refused(parsed, argv, says):
    """In one line with the key, the value and the cure."""
    with refuses(*says, error=ERRORS):
        parsed(*argv)


@pytest.mark.parametrize(
    "argv, said",
    [
        (["--config.input.name=lookup"], "config.input.name=lookup: drops cutoffs"),
        (["--config.input.name=adaptive"], None),
        (["--config.output.name=softmax"], "config.output.name=softmax: keeps tail_dropout=0.0"),
        (
            ["--config.body.name=lstm", "--config.body.widths=8,"],
            "config.body.name=lstm: keeps features=192; drops attention_dropout, feed_forward,"
            " heads, layers",
        ),
    ],
)
def test_lines_about_a_switch(parsed, argv, said):
    """The lines about the keys that are kept and dropped, of those that the file states."""
    assert parsed(*argv)[1] == ([said] if said else [])


def test_a_full_softmax_loses_its_cutoffs(parsed):
    """Nobody else would: a full softmax has no bands, and the row's cutoffs would be refused."""
    config, (said,) = parsed("--config.output.name=softmax", place="configs/wikitext2.py:adp")
    assert config["output"]["table"]["cutoffs"] == () and said.endswith("table.cutoffs")


CHOICES = [
    ("lookup", "softmax", "own"),
    ("lookup", "nce", "assembled"),
    ("adaptive", "softmax", "tied"),
    ("adaptive", "adaptive", "mapped"),
    ("adaptive", "hierarchical", "composed"),
    ("char_cnn", "differentiated", "mapped"),
    ("char_cnn", "adaptive", "composed"),
    ("groc", "sampled", "tied"),
    ("ngrams", "softmax", "tied"),
]


@pytest.mark.parametrize("source, output, table", CHOICES, ids=map("-".join, CHOICES))
def test_three_free_choices(parsed, source, output, table):
    """Flags choose input, output and table freely, in any order; the shapes of the model follow,
    or one line says the cure.
    """
    assert [{*names} for names in zip(*CHOICES, strict=True)] == [{*INPUTS}, {*OUTPUTS}, {*TABLES}]
    chosen = [source, output, table]
    groups = "input", "output", "output.table"
    names = [f"--config.{g}.name={name}" for g, name in zip(groups, chosen, strict=True)]
    small = ["layers=1", "features=16", "heads=2", "feed_forward=16"]
    small = [f"--config.body.{key}" for key in small]
    if source == "char_cnn":
        small += ["--config.input.filters=(1,4),(2,6)", "--config.input.length=8"]
    config, _ = parsed(*names, *small)
    assert [at(config, group)["name"] for group in groups] == chosen
    assert config == parsed(*reversed(names + small))[0]
    if source == "adaptive" and table in ("mapped", "tied"):
        # There is no map of bands of several widths, and no full softmax over them.
        cure = {"mapped": "input.name='lookup'", "tied": "output.name='adaptive'"}[table]
        with refuses(cure):
            build(config, 8_447)
        return
    shapes = parameter_shapes(build(config, 8_447))
    assert ("projection_1" in shapes["input"]) == (source == "adaptive")
    assert ("table" in shapes.get("output", {})) == (table not in ("tied", "assembled"))


FULL = "from configs import quickstart\ndef get_config():\n    config = quickstart.get_config()\n"


@pytest.mark.parametrize(
    "text, row, says",
    [
        ("def get_config(:\n", "", "{path}, line 1: SyntaxError: "),
        ("import nonesuch\n", "", "{path}, line 1: ModuleNotFoundError: No module .*nonesuch"),
        ("x = 1\n", "", "{path} must have a function get_config"),
        ("def get_config():\n    raise SystemExit\n", "", "{path}, line 2: SystemExit"),
        ("def get_config():\n    return 1 / 0\n", "", "{path}, line 2: ZeroDivisionError: "),
        (
            "def get_config():\n    open('/none')\n",
            "",
            "{path}, line 2: FileNotFoundError: .*/none",
        ),
        (
            "def get_config():\n    def f():\n        return f()\n    return f()\n",
            "",
            "{path}, line 3: RecursionError: ",
        ),
        ("def get_config():\n    return 3\n", "", "{path} must .* rows.config.*; got 3"),
        ("def get_config():\n    return {'stpes': 3}\n", "", "{path}: .*stpes.*mean .steps"),
        (FULL + "    config.stpes = 3\n    return config\n", "", "{path}: .*mean .steps"),
        (FULL + "    config.body.layrs = 3\n    return config\n", "", "{path}: .*mean .layers"),
        (
            FULL + "    config.steps = 'ten'\n    return config\n",
            "",
            "{path}: config.steps='ten' must be a whole number",
        ),
        (
            FULL + "    return config.to_dict() | {'body': 'big'}\n",
            "",
            "{path}: config.body='big' must be a group",
        ),
        (FULL + "    return config\n", "big", "{path}: TypeError: .*get_config.* 1 was given"),
        ("def get_config(row):\n    return {}\n", "", "{path}: TypeError: .*missing 1 .* 'row'"),
    ],
)
def test_a_config_file_that_is_refused(parsed, tmp_path, text, row, says):
    """In one line with the file and, where Python knows it, the line."""
    path = tmp_path / "mine.py"
    path.write_text(text)
    with refuses(error=ERRORS) as error:
        parsed(place=f"{path}:{row}" if row else str(path))
    assert re.match(says.replace("{path}", str(path)), str(error.value)), error.value


@pytest.mark.parametrize("flag", ["--config.body.name=lstm", "--config.body.layers=3"])
def test_a_flag_for_a_group_that_is_a_value(parsed, tmp_path, flag):
    """The line names the file; it was a traceback."""
    path = tmp_path / "mine.py"
    path.write_text("def get_config():\n    return {'body': 'big'}\n")
    with refuses(str(path), "config.body='big'", "a group"):
        parsed(flag, place=str(path))


@pytest.mark.parametrize(
    "place, says",
    [
        ("none.py", "--config=none.py cannot be read: No such file or directory; pass"),
        ("", "--config is empty"),
        ("configs", "--config=configs cannot be read: Is a directory"),
        ("a\0b.py", "cannot be read: embedded null byte"),
        ("configs/quickstart.py:", "row '' of configs/quickstart.py"),
        ("configs/quickstart.py:adp_s", 'ngrams, row_wise. Did you mean "adp_t"?'),
    ],
)
def test_a_place_without_a_config(parsed, place, says):
    """An error in one line names the file or the row; a typing error would be a traceback."""
    with refuses(says, error=ERRORS):
        parsed(place=place)


def test_a_config_elsewhere(parsed, tmp_path, monkeypatch):
    """Outside of this clone: it imports the package, its neighbours and `configs`, wherever the
    current directory is; a plain dict of some keys is a config, too, and flags change those.
    """
    (tmp_path / "my_rows.py").write_text("STEPS = 77\n")
    (tmp_path / "mine.py").write_text(
        "import my_rows\nfrom adaptive_jax.config import rows\nfrom configs import papers\n"
        "def get_config(row='a'):\n"
        "    return rows.config({'steps': my_rows.STEPS, 'data.corpus': row})\n"
    )
    (tmp_path / "dict.py").write_text("def get_config():\n    return {'steps': 3, 'data': {}}\n")
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path / "empty")
    config, said = parsed("--config.seed=4", place=os.path.join("..", "mine.py:b"))
    assert (config["steps"], config["data"]["corpus"], config["seed"], said) == (77, "b", 4, [])
    plain = tmp_path / "dict.py"
    assert parsed("--config.steps=5", place=plain)[0]["steps"] == 5
    assert parsed("--config.metrics.wandb", place=plain)[0]["metrics"]["wandb"] is True


def test_a_config_in_the_home_directory(parsed, monkeypatch, tmp_path):
    """Shells expand no ~ after "--config="."""
    (tmp_path / "mine.py").write_text("from configs.quickstart import get_config\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert parsed(place="~/mine.py") == parsed()
