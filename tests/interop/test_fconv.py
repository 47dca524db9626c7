"""Converted gated convolutional networks of fairseq score as fairseq scored them:
tests/fixtures/gcnn, whose files name the cases.

`tests/reference/test_gcnn_code.py` compares all else that the files have.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaptive_jax.errors import InputError
from adaptive_jax.interop.convert import read_checkpoint
from adaptive_jax.interop.fconv import FCONV_LM, config_of, parameters_of
from adaptive_jax.interop.words import fairseq_words
from adaptive_jax.model.language_model import build
from adaptive_jax.numerics.batch import Batch

FIXTURES = Path(__file__).parents[1] / "fixtures" / "gcnn"
DICT, WORDS = FIXTURES / "dict.txt", 240
FILES = "plain_full_legacy", "wiki_adaptive", "bottleneck_full"


def arrays_of(name, batch):
    arrays = np.load(FIXTURES / f"{name.removesuffix('_legacy')}.npz")
    return [
        arrays[f"batch{batch}/{part}"]
        for part in ("src_tokens", "target", "token_log_prob", "nll_sum")
    ]


def loaded(name):
    """A checkpoint and its config."""
    converter, found = read_checkpoint(FIXTURES / f"{name}.pt")
    assert converter is FCONV_LM
    vocabulary, state = fairseq_words(DICT, found.state)
    return found._replace(state=state), config_of(found.options, state, len(vocabulary))


def check_scores(name, state, config):
    """The log-probability of every target of both batches, of which the second has padding on
    either side.
    """
    model, params = build(config, WORDS), parameters_of(state, config)

    def scores(batch):
        hidden, _ = model.apply({"params": params}, batch, method="hidden")
        return -model.apply({"params": params}, hidden, batch.targets, method="nll")

    batches = [arrays_of(name, i) for i in range(2)]
    tokens, targets, expected = (
        np.concatenate([batch[part] for batch in batches]) for part in range(3)
    )
    batch = Batch(tokens.astype(np.int32), targets.astype(np.int32), None, jnp.arange(len(tokens)))
    ours = jax.jit(scores).lower(batch).compile()(batch)
    np.testing.assert_allclose(ours[targets != 1], expected[targets != 1], rtol=2e-5, atol=2e-5)
    totals = [
        -part.sum() for part in np.split(np.where(targets != 1, ours, 0), [len(batches[0][0])])
    ]
    np.testing.assert_allclose(totals, [total for *_, total in batches], rtol=2e-5)
    return params


@pytest.mark.parametrize("name", FILES)
def test_scores(name):
    """Every option and tensor in its place: log-probabilities within 2e-5, and the number of
    parameters.
    """
    found, config = loaded(name)
    params = check_scores(name, found.state, config)
    [case] = json.loads((FIXTURES / f"{name.removesuffix('_legacy')}.json").read_text())[
        "cases"
    ].values()
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == case["parameters"]
    assert found.updates == case["updates_done_before_saving"]


@pytest.mark.parametrize(
    "changes, says",
    [
        (
            {"decoder_layers": "[(16, 4)] * 10 ** 3"},
            ["'[(16, 4)] * 10 ** 3'", "must be a list of layers"],
        ),
        ({"decoder_layers": "[(16, 4)] * 1000000000"}, ["1000000000", "must be a list of layers"]),
        ({"decoder_layers": "open('x')"}, ["open('x')", "must be a list of layers"]),
        ({"decoder_layers": "[(16, 4, 0)]"}, ["1 layers without a residual"]),
        ({"decoder_layers": "[(16, 4, 2)]"}, ["a residual of 2"]),
        (
            {"decoder_layers": "[(16, 4, 0)] * 5 + [(16, 4, 6)]"},
            ["must be a block of 1 to 5 layers"],
        ),
        ({"decoder_layers": "[('a', 4)]"}, ["[('a', 4)]", "must be a list of layers"]),
        (
            {"decoder_attention": "[False, True, False]"},
            ["decoder_attention='[False, True, False]'"],
        ),
        ({"add_bos_token": True}, ["add_bos_token=True"]),
        ({"dropout": "0.1"}, ["dropout='0.1'"]),
    ],
)
def test_an_option_that_cannot_be_converted(changes, says):
    """The message has the option with its value."""
    found, _ = loaded("plain_full_legacy")
    with pytest.raises(InputError) as error:
        config = config_of(found.options | changes, found.state, WORDS)
        build(config, WORDS)
    line = str(error.value)
    assert "\n" not in line and all(part in line for part in says), line
