"""The benchmark of scoring."""

from adaptive_jax.config.keys import resolve
from adaptive_jax.data.batches.windows import Windows
from adaptive_jax.model.language_model import build
from benchmarks import evaluation
from configs import wikitext103


def test_how_far_convolutions_see():
    """As the config file says of the papers' models, which a context of 46 covers."""
    for row, tokens in ("gcnn_8", 25), ("gcnn_14", 47):
        config = resolve(wikitext103.get_config(row))
        model = build(config, config["data"]["vocabulary_size"])
        assert model.body.receptive_field == tokens
    settings = Windows(4_096, 46, "none", "packed", 4)
    assert evaluation.continued(model, settings, 245_569).layout == "streams"
    assert evaluation.continued(model, settings._replace(context=45), 245_569).layout == "packed"
