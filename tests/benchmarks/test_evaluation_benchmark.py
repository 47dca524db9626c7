"""The benchmark of scoring: its peers compute the same, and its table is of what it measured."""

from types import SimpleNamespace

import pytest

from adaptive_jax.config.keys import resolve
from adaptive_jax.data.batches.windows import Windows
from adaptive_jax.errors import InputError
from adaptive_jax.model.language_model import build
from benchmarks import evaluation
from configs import wikitext103

FLAGS = {
    "window": 8,
    "tokens": 40,
    "repeats": 1,
    "context": ["0", "6"],
    "models": ["gcnn_small"],
    "json": "",
}


def test_a_line(monkeypatch, config):
    """With context, rows of 8 tokens that score 2 read 4 for each; a convolution on streams has
    none.
    """
    small = SimpleNamespace(to_dict=lambda: config())
    monkeypatch.setattr(evaluation.wikitext2, "get_config", lambda name: small)
    line = evaluation.measure("transformer_small", 6, SimpleNamespace(**FLAGS))
    assert (line["reads"], set(line["seconds"])) == (4.0, set(evaluation.PEERS)) and min(
        line["seconds"].values()
    ) > 0
    times = {"seconds": {"evaluate": 2.0, "forward pass": 1.0, "all outputs": 3.0}}
    times |= {"processor": {"evaluate": 4.0, "forward pass": 3.0}}
    cells = evaluation.table([line | times], 40).splitlines()[2]
    assert cells == "| transformer_small | 6 | 4.00 | 20 | 40 | 13 | 0.50 | 1.50 | 0.75 |"
    on_streams = config(**{"batches.layout": "streams", "body.name": "lstm"})
    monkeypatch.setattr(small, "to_dict", lambda: on_streams)
    assert evaluation.measure("awd_small", 6, SimpleNamespace(**FLAGS)) is None


def test_how_far_convolutions_see():
    """As the config file says of the papers' models, which a context of 46 covers."""
    for row, tokens in ("gcnn_8", 25), ("gcnn_14", 47):
        config = resolve(wikitext103.get_config(row))
        model = build(config, config["data"]["vocabulary_size"])
        assert model.body.receptive_field == tokens
    settings = Windows(4_096, 46, "none", "packed", 4)
    assert evaluation.continued(model, settings, 245_569).layout == "streams"
    assert evaluation.continued(model, settings._replace(context=45), 245_569).layout == "packed"


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"models": ["gcnn"]}, "--models=gcnn is not one of .*"),
        ({"context": ["x"]}, "--context=x is no list of whole numbers"),
        ({"tokens": 0}, "--tokens=0 must be 1"),
    ],
)
def test_flags_that_make_no_sense(changes, says):
    """One line that names the flag, before anything runs."""
    with pytest.raises(InputError, match=says) as error:
        evaluation.main(SimpleNamespace(**FLAGS | changes))
    assert "\n" not in str(error.value)
