"""Config files and the flags that change them, as a user meets them: one line for what is
wrong, and classes that flags switch.
"""

import itertools
import os
import re
import sys

import pytest

from adaptive_jax import config_file
from adaptive_jax.defaults import DEFAULTS, NAMED, check_keys
from adaptive_jax.errors import InputError
from adaptive_jax.model.language_model import build, parameter_shapes
from configs import base, quickstart

CONFIG = quickstart.get_config().to_dict()
INPUTS, OUTPUTS, TABLES = NAMED["input"], NAMED["output"], NAMED["output.table"]


def parsed(*argv, config=None):
    """The config and the said lines of a command line."""
    rest, given = config_file.split(argv)
    assert not rest
    return config_file.set_values(CONFIG if config is None else config, given)


def refusal(function, *arguments):
    """The one line of the InputError of a call."""
    with pytest.raises(InputError) as error:
        function(*arguments)
    assert "\n" not in str(error.value)
    return str(error.value)


def at(config, key):
    """The value of a dotted key."""
    for name in key.split("."):
        config = config[name]
    return config


@pytest.mark.parametrize(
    "argv, key, value",
    [
        (["--config.steps=5"], "steps", 5),
        (["-config.steps", "5"], "steps", 5),
        (["--config.optimizer.learning_rate=2"], "optimizer.learning_rate", 2.0),
        (["--config.optimizer.clip_norm=none"], "optimizer.clip_norm", None),
        (["--config.data.lower"], "data.lower", True),
        (["--noconfig.metrics.tensorboard"], "metrics.tensorboard", False),
        (["--config.metrics.tensorboard=False"], "metrics.tensorboard", False),
        (["--config.data.path=a=b c"], "data.path", "a=b c"),
        (["--config.input.cutoffs=(5,9)"], "input.cutoffs", (5, 9)),
        (["--config.input.cutoffs=5,9"], "input.cutoffs", (5, 9)),
        (["--config.input.cutoffs", "5"], "input.cutoffs", (5,)),
        (["--config.steps=5", "--config.steps=6"], "steps", 6),
    ],
)
def test_a_flag_sets_a_value(argv, key, value):
    """Of the type of the key, in all forms of a flag."""
    config, said = parsed(*argv)
    assert at(config, key) == value and type(at(config, key)) is type(value) and said == []


def test_flags_are_taken_out_of_a_command_line():
    """The others stay in order, and nothing after "--" is a flag."""
    assert config_file.split(
        ["train.py", "--config=a.py", "--config.data.lower", "--dry_run", "--", "--config.steps=3"]
    ) == (
        ["train.py", "--config=a.py", "--dry_run", "--", "--config.steps=3"],
        [("data.lower", None)],
    )


@pytest.mark.parametrize(
    "argv, says",
    [
        (["--config.stpes=5"], ["config.stpes", 'Did you mean "steps"']),
        (["--config.body.layrs=5"], ["config.body.layrs", 'Did you mean "layers"']),
        (["--config.bdy.layers=5"], ["config.bdy", 'Did you mean "body"']),
        (["--config.steps.more=5"], ["config.steps is no group"]),
        (["--config.body=5"], ["--config.body is a group", "layers"]),
        (["--config.steps"], ["--config.steps has no value"]),
        (["--config.steps", "--config.seed=3"], ["--config.steps has no value"]),
        (["--config.steps=1.5"], ["config.steps='1.5'", "a whole number"]),
        (["--config.steps=ten"], ["config.steps='ten'", "a whole number"]),
        (["--config.steps=none"], ["config.steps=None", "a whole number"]),
        (["--config.body.dropout=high"], ["config.body.dropout='high'", "a number"]),
        (["--config.body.dropout=nan"], ["config.body.dropout=nan", "a number"]),
        (["--config.data.lower=maybe"], ["config.data.lower='maybe'", "True or False"]),
        (["--noconfig.data.lower=1"], ["--noconfig.data.lower=1", "write --config.data.lower=1"]),
        (["--config.input.cutoffs=a,b"], ["config.input.cutoffs='a,b'", "whole numbers"]),
        (["--config.input.cutoffs=(1.5,3)"], ["config.input.cutoffs=(1.5, 3)", "whole numbers"]),
        (["--config.input.cutoffs=" + "(" * 9999], ["config.input.cutoffs", "whole numbers"]),
        (
            ["--config.input.name=char_cnn", "--config.input.filters=3,4"],
            ["config.input.filters=(3, 4)", "pairs"],
        ),
        (
            ["--config.input.cutoffs=5", "--config.input.cutoffs=9"],
            ["--config.input.cutoffs is given twice", "give it once"],
        ),
        (["--config.input.name=lokup"], ["config.input.name='lokup'", 'Did you mean "lookup"']),
        (["--config.input.name"], ["config.input.name=None", "lookup"]),
        (
            ["--config.input.name=lookup", "--config.input.cutoffs=5"],
            ["config.input.cutoffs", "name, width"],
        ),
    ],
)
def test_a_flag_that_is_refused(argv, says):
    """In one line with the key, the value and the cure."""
    line = refusal(parsed, *argv)
    assert all(part in line for part in says), line


@pytest.mark.parametrize(
    "argv, said",
    [
        (
            ["--config.input.name=lookup"],
            "config.input.name=lookup: has no cutoffs, factor, scaled",
        ),
        (["--config.input.name=adaptive"], None),
        (
            ["--config.output.table.name=own"],
            (
                "config.output.table.name=own: takes factor=4, width=0, projected=True; has no"
                " share_projections, share_head_projection, own_head"
            ),
        ),
        (
            ["--config.body.name=transformer_post_norm"],
            (
                "config.body.name=transformer_post_norm: keeps layers=2, features=192, heads=4,"
                " feed_forward=768, attention_dropout=0.0"
            ),
        ),
    ],
)
def test_what_a_switch_says(argv, said):
    """What is kept of the config's own values, what is new and what is not used any more."""
    assert parsed(*argv)[1] == ([said] if said else [])


@pytest.mark.parametrize("group", NAMED)
def test_a_switch_keeps_what_both_have(group):
    """Values that the config sets stay if the new class has the key; the other keys are its
    defaults. So there and back.
    """
    for old, new in itertools.product(NAMED[group], NAMED[group]):
        config = base.config({f"{group}.name": old}).to_dict()
        own = {key: value + 8 for key, value in NAMED[group][old].items() if type(value) is int}
        at(config, group).update(own)
        switched = at(parsed(f"--config.{group}.name={new}", config=config)[0], group)
        assert switched == {"name": new} | NAMED[group][new] | {
            key: own[key] for key in own if key in NAMED[group][new]
        }


CHOICES = list(itertools.product(INPUTS, OUTPUTS, TABLES))


@pytest.mark.parametrize("source, output, table", CHOICES, ids=map("-".join, CHOICES))
def test_three_free_choices(source, output, table):
    """Flags choose input, output and table freely, in any order; the shapes of the model
    follow, or one line says the cure.
    """
    names = [
        f"--config.input.name={source}",
        f"--config.output.name={output}",
        f"--config.output.table.name={table}",
    ]
    small = [
        "--config.body.layers=1",
        "--config.body.features=16",
        "--config.body.heads=2",
        "--config.body.feed_forward=16",
    ]
    small += (
        ["--config.input.filters=(1,4),(2,6)", "--config.input.length=8"]
        if source == "char_cnn"
        else []
    )
    config, _ = parsed(*names, *small)
    assert [
        config["input"]["name"],
        config["output"]["name"],
        config["output"]["table"]["name"],
    ] == [source, output, table]
    assert config == parsed(*reversed(names + small))[0]
    if source == "adaptive" and (
        table == "mapped" or (output in ("softmax", "sampled", "nce") and table == "tied")
    ):
        # There is no map of bands of several widths, and no full softmax over them.
        assert {"mapped": "input.name='lookup'", "tied": "output.name='adaptive'"}[
            table
        ] in refusal(build, config, 8_447)
        return
    shapes = parameter_shapes(build(config, 8_447))
    assert ("projection_1" in shapes["input"]) == (source == "adaptive")
    assert ("table" in shapes.get("output", {})) == (table not in ("tied", "assembled"))


FULL = "from configs import quickstart\ndef get_config():\n    config = quickstart.get_config()\n"


@pytest.mark.parametrize(
    "text, row, says",
    [
        ("def get_config(:\n", "", "{path}, line 1: SyntaxError: "),
        (
            "import nonesuch\n",
            "",
            "{path}, line 1: ModuleNotFoundError: No module named 'nonesuch'",
        ),
        ("x = 1\n", "", "{path} has no function get_config"),
        ("get_config = 3\n", "", "{path} has no function get_config"),
        ("def get_config():\n    raise SystemExit\n", "", "{path}, line 2: SystemExit"),
        (
            "def get_config():\n    return 1 / 0\n",
            "",
            "{path}, line 2: ZeroDivisionError: division by zero",
        ),
        (
            "def get_config():\n    def f():\n        return f()\n    return f()\n",
            "",
            "{path}, line 3: RecursionError: ",
        ),
        (
            "def get_config():\n    return 3\n",
            "",
            "{path}, line 1: get_config returns 3, no config",
        ),
        ("def get_config():\n    pass\n", "", "{path}, line 1: get_config returns None, no config"),
        (
            "def get_config():\n    return {'steps': 3}\n",
            "",
            "{path}, line 1: .*config.input is missing",
        ),
        (
            FULL + "    return config.to_dict() | {'stpes': 3}\n",
            "",
            '{path}, line 2: .*config.stpes .*Did you mean "steps"',
        ),
        (FULL + "    config.stpes = 3\n    return config\n", "", '{path}, line .*"steps"'),
        (
            FULL + "    config.body.unlock()\n    config.body.layrs = 3\n    return config\n",
            "",
            '{path}, .*"layers"',
        ),
        (
            FULL + "    del config.steps\n    return config\n",
            "",
            "{path}, line 2: .*config.steps is missing: its default is 7500",
        ),
        (
            FULL + "    del config.data.corpus\n    return config\n",
            "",
            "{path}, line 2: .*config.data.corpus is missing",
        ),
        (
            FULL + "    del config.batches\n    return config\n",
            "",
            "{path}, line 2: .*config.batches is missing",
        ),
        (
            FULL + "    del config.body\n    return config\n",
            "",
            "{path}, line 2: .*config.body is missing",
        ),
        (
            FULL + "    config.steps = 'ten'\n    return config\n",
            "",
            "{path}, line 4: TypeError: .*steps",
        ),
        (
            FULL + "    return config.to_dict() | {'steps': 'ten'}\n",
            "",
            "{path}, line 2: .*config.steps='ten' must be a whole number",
        ),
        (
            FULL + "    return config.to_dict() | {'steps': 1.5}\n",
            "",
            "{path}, line 2: .*config.steps=1.5 must be a whole number",
        ),
        (
            FULL + "    return config.to_dict() | {'body': 'big'}\n",
            "",
            "{path}, line 2: .*config.body='big' must be a group",
        ),
        (
            (
                "from configs import base\ndef get_config():\n    return base.config({'body.layrs':"
                " 3})\n"
            ),
            "",
            '{path}, line 3: config.body.layrs .*Did you mean "layers"',
        ),
        (
            FULL + "    return config\n",
            "big",
            "--config={path}:big: {path} has no rows; give --config={path}",
        ),
        (
            "def get_config(row):\n    return {}\n",
            "",
            "--config={path} names no row, .*; give --config={path}:ROW",
        ),
    ],
)
def test_a_config_file_that_is_refused(tmp_path, text, row, says):
    """In one line with the file and, where Python knows it, the line."""
    path = tmp_path / "mine.py"
    path.write_text(text)
    line = refusal(config_file.read, f"{path}:{row}" if row else str(path))
    pattern = says.replace("{path}", str(path))
    assert re.match(pattern, line), line


@pytest.mark.parametrize(
    "place, says",
    [
        ("none.py", "--config=none.py: there is no such file; give --config=configs/NAME.py"),
        ("", "--config is empty"),
        ("configs", "--config=configs cannot be read: Is a directory"),
        ("a\0b.py", "cannot be read: embedded null byte"),
        ("configs/quickstart.py:", "row '' of configs/quickstart.py"),
        (
            "configs/quickstart.py:adp_s",
            (
                "row 'adp_s' of configs/quickstart.py is not one of adp_t, learned, alibi. Did you"
                ' mean "adp_t"?'
            ),
        ),
    ],
)
def test_a_place_without_a_config(place, says):
    """In one line."""
    assert says in refusal(config_file.read, place)


def test_a_config_elsewhere_imports_its_neighbours(tmp_path, monkeypatch):
    """Those beside it and `configs`, wherever the current directory is; afterwards the path is
    as before.
    """
    (tmp_path / "my_rows.py").write_text("STEPS = 77\n")
    (tmp_path / "mine.py").write_text(
        "import my_rows\nfrom configs import base\ndef get_config(row='a'):\n"
        "    return base.config({'steps': my_rows.STEPS, 'data.corpus': row}).to_dict()\n"
    )
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    before = list(sys.path)
    config, said = config_file.read(os.path.join("..", "mine.py:b"), [("seed", "4")])
    assert (config["steps"], config["data"]["corpus"], config["seed"], said) == (77, "b", 4, [])
    assert sys.path == before


def test_a_complete_dict_is_a_config():
    """Lists of a JSON file become tuples, whole numbers become rates, and nothing else changes."""
    config = check_keys(
        DEFAULTS | {"keep_every_hours": 1, "input": DEFAULTS["input"] | {"cutoffs": [3, 5]}}
    )
    assert config["input"]["cutoffs"] == (3, 5) and type(config["keep_every_hours"]) is float
    assert check_keys(config) == config
