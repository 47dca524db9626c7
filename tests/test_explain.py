"""The explanation of configs: every key of every class has a meaning, and docs/configuration.md
is up to date.
"""

from pathlib import Path

import pytest

from adaptive_jax import explain
from adaptive_jax.defaults import DEFAULTS, GENERAL, NAMED
from configs import own_text, quickstart

ROOT = Path(__file__).parents[1]


def keys(group, prefix=""):
    """The dotted keys of a group of `DEFAULTS`."""
    return [
        key
        for name, value in group.items()
        for key in (
            keys(value, f"{prefix}{name}.") if isinstance(value, dict) else [f"{prefix}{name}"]
        )
    ]


def test_the_page_is_up_to_date():
    """`python -m adaptive_jax.explain > docs/configuration.md` writes it."""
    assert (ROOT / "docs" / "configuration.md").read_text() == explain.page() + "\n"


def test_every_class_can_be_chosen():
    """The names of the defaults are those of the classes."""
    assert {group: set(names) for group, names in NAMED.items()} == {
        group: set(classes) for group, classes in explain.CHOICES.items()
    }
    assert {
        group for group in DEFAULTS if isinstance(DEFAULTS[group], dict)
    } <= explain.TITLES.keys()


@pytest.mark.parametrize(
    "group, name", [(group, name) for group, names in NAMED.items() for name in names]
)
def test_every_key_has_a_meaning(group, name):
    """Of its own: no two keys of a class share one."""
    meanings = [
        explain.meaning_of(group, key, name)
        for key, value in NAMED[group][name].items()
        if not isinstance(value, dict)
    ]
    assert all(len(meaning) > 10 for meaning in meanings)
    assert len(set(meanings)) == len(meanings)


def test_a_config_explained():
    """Every key with its value, the default where it is another, and the meaning."""
    config = quickstart.get_config().to_dict()
    text = explain.config(config)
    assert all(f"  --config.{key}=" in text for key in keys(config))
    assert f"  --config.steps=600  (default 7500)\n      {GENERAL['steps'][1]}\n" in text
    assert "  --config.seed=0\n" in text and "--config.output.table.share_projections=True" in text


def test_the_commands_that_explain(quick_command):
    """--explain needs no workdir and respects flags; --help names the groups."""
    done = quick_command(
        "train.py", "--config=configs/quickstart.py", "--config.input.name=lookup", "--explain"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (
        "--config.input.name='lookup'" in done.stdout
        and "--config.input.cutoffs" not in done.stdout
    )
    done = quick_command("train.py", "--help")
    assert "steps, seed" in done.stdout and "output, optimizer" in done.stdout


def test_settings_that_are_chosen_are_explained():
    """A config that leaves settings open shows them as None, and the time that they are chosen
    for.
    """
    text = explain.config(own_text.get_config().to_dict())
    assert "  --config.steps=None  (default 7500)\n" in text and "  --config.choose.hours=" in text
