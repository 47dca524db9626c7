"""Runs of one's own arrays; docs/torch.md and docs/words.md have whole programs, run in
tests/test_docs.py.
"""

import numpy as np
import pytest

from adaptive_jax import load, save_run
from adaptive_jax.config.keys import complete
from adaptive_jax.model.language_model import build, parameter_shapes
from adaptive_jax.runs.settings import read_config
from tests import refuses
from tests.toys import random_params

CONFIG = {"input.name": "lookup", "body.name": "lstm", "body.features": 4, "body.widths": (4,)}
CONFIG |= {"output.name": "softmax", "output.table.name": "tied"}
WORDS, COUNTS = ("the", "<eos>", "cat"), (5, 3, 1)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run and its parameters."""
    workdir = tmp_path_factory.mktemp("saved") / "run"
    save_run(workdir, CONFIG, params := params_of(CONFIG), WORDS, COUNTS)
    return workdir, params


def params_of(config):
    return random_params(parameter_shapes(build(complete(config), len(WORDS))))


def test_the_run_holds_the_arrays_and_makes_another(saved, tmp_path):
    """The arrays come back bit by bit; a whole config, as a run has it, makes the same run and is
    not changed.
    """
    workdir, params = saved
    run = load(workdir).run
    assert run.step == 0 and run.vocabulary.words == WORDS
    config = read_config(workdir)
    again = config | {"data": config["data"] | {"vocabulary_size": 0}}
    save_run(tmp_path / "again", again, run.params, WORDS, COUNTS)
    assert read_config(tmp_path / "again") == config and not again["data"]["vocabulary_size"]
    for ours in run.params, load(tmp_path / "again").run.params:
        np.testing.assert_array_equal(ours["input"]["table"], params["input"]["table"])


def test_arguments_that_do_not_fit(saved, tmp_path):
    """One line each, and nothing is written."""
    _, params = saved
    half = params | {
        "input": {"table": params["input"]["table"][:, :2]},
        "other": {"a": np.ones(1)},
    }
    nan = params | {"input": {"table": np.full((3, 4), np.nan)}}
    for wrong, names in (
        ((CONFIG, half, WORDS, COUNTS), ["input/table", "other/a"]),
        ((CONFIG, {}, WORDS, COUNTS), ["missing"]),
        ((CONFIG, nan, WORDS, COUNTS), ["params", "input.table"]),
        ((CONFIG | {"body.layrs": 3}, params, WORDS, COUNTS), ["config.body.layrs"]),
        ((CONFIG, params, ("the", "<eos>", "the"), COUNTS), ["words", "the"]),
        ((CONFIG, params, ("the", "<eos>", "a b"), COUNTS), ["words", "a b"]),
        ((CONFIG, params, ("the", "eos", "a"), COUNTS), ["words", "eos"]),
        ((CONFIG, params, ("the", "<eos>", 7), COUNTS), ["words", "7"]),
        ((CONFIG | {"data.codes": 9}, params, WORDS, COUNTS), ["words", "sub-words"]),
        ((CONFIG | {"data.tokenizer": "a.model"}, params, WORDS, COUNTS), ["words", "tokenizer"]),
        ((CONFIG | {"data.corpus": "ids"}, params, WORDS, COUNTS), ["words", "ids"]),
        ((CONFIG, params, WORDS, (5, 3)), ["counts"]),
        ((CONFIG, params, WORDS, (5, 3, -1)), ["counts"]),
        ((CONFIG, params, WORDS, (0.5, 0.3, 0.2)), ["counts", "float64"]),
    ):
        with refuses(*names):
            save_run(tmp_path / "new", *wrong)
    with refuses("workdir", "workdir=''"):
        save_run("", CONFIG, params, WORDS, COUNTS)
    with refuses("already exists"):
        save_run(saved[0], CONFIG, params, WORDS, COUNTS)
    assert not [*tmp_path.iterdir()]
