"""The explanation of configs: every key is there, its class says what it means, and
docs/configuration.md is up to date.
"""

import re
from pathlib import Path

import pytest

from adaptive_jax.config import explain
from adaptive_jax.config.keys import ALL_GROUPS, NAMES, definition, keys_of, resolve
from adaptive_jax.runs.settings import flat
from configs import quickstart

ROOT = Path(__file__).parents[2]
# Of classes that refer to others: those say it.
ELSEWHERE = {
    "transformer_post_norm": ("body", "transformer"),
    "awd_lstm": ("body", "lstm"),
    "softmax": ("output", "adaptive"),
    "hierarchical": ("output", "adaptive"),
    "nce": ("output", "sampled"),
    "own": ("input", "adaptive"),
    "adam": ("optimizer", "sgd"),
    "nt_asgd": ("optimizer", "sgd"),
    "asgd": ("optimizer", "sgd"),
}


def test_the_page_is_up_to_date():
    """`python -m adaptive_jax train --explain > docs/configuration.md` writes it."""
    assert (ROOT / "docs" / "configuration.md").read_text() == explain.page() + "\n"


@pytest.mark.parametrize("group", ALL_GROUPS)
def test_every_key_is_explained(group):
    """The docstring of its class, or of the one that it refers to, names it: without one a reader
    of --explain sees a key and no word about it.
    """
    for name in definition(group) if group in NAMES else [None]:
        text = "\n".join([*explain.meanings(group, name), *explain._of_others(group)])
        if name in ELSEWHERE:
            text += "\n".join(explain.meanings(*ELSEWHERE[name]))
        for key in keys_of(group, name):
            assert re.search(rf"^ *(\w+, )*{key}(, \w+)*: ", text, re.MULTILINE), (name, key)


def test_a_config_explained():
    """Every key with its value, and the default where it is another; then the docstring."""
    config = resolve(quickstart.get_config())
    text = explain.config(config)
    assert all(f"  --config.{key}=" in text for key in flat(config))
    assert "  --config.steps=600  (default 7500)\n" in text and "  --config.seed=0\n" in text
    assert "        steps: number of updates.\n" in text


def test_the_commands_that_explain(quick_command):
    """--explain needs no workdir and respects flags; --help names the groups; --hours is short for
    the key that limits time.
    """
    line = "train.py", "--config=configs/quickstart.py", "--config.input.name=lookup", "--hours=2"
    done = quick_command(*line, "--explain")
    assert (done.returncode, done.stderr) == (0, "")
    assert "--config.input.name='lookup'" in done.stdout and "--config.hours=2.0" in done.stdout
    assert "--config.input.cutoffs" not in done.stdout
    done = quick_command("train.py", "--help")
    assert "output, output.table" in " ".join(done.stdout.split())
