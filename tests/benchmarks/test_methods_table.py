"""The table of ways to score: its models can be built, and its ways exist."""

from adaptive_jax.evaluation.methods import METHODS, prepared
from adaptive_jax.model.language_model import build
from benchmarks import methods_table


def test_models_and_ways_exist():
    """Every model can be built, every way has options that its method takes, and a stream has
    no context.
    """
    found = methods_table.models()
    assert len({model.name for model in found}) == len(found) == 3
    for model in found:
        build(model.config, model.config["data"]["vocabulary_size"])
        assert {way.method for way in model.ways} == METHODS.keys()
        for way in model.ways:
            assert all(callable(prepared(way.method, options)) for options in way.candidates())
            assert not way.context or model.config["batches"]["layout"] != "streams"
