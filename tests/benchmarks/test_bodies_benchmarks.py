"""The benchmarks of bodies compare models of one size."""

import math

import jax

from adaptive_jax.model.language_model import build, parameter_shapes
from benchmarks import figures, responsiveness


def count(config, part=None):
    shapes = parameter_shapes(build(config, config["data"]["vocabulary_size"]))
    return sum(leaf.size for leaf in jax.tree.leaves(shapes[part] if part else shapes))


def test_activations_have_as_many_parameters():
    """Within 1 %, though gates need a second map of every unit; steps and evaluations fit each
    other.
    """
    configs = [figures.config_of("activations", name, 600, "") for name in figures.ACTIVATIONS]
    sizes = [count(config) for config in configs]
    assert max(sizes) < 1.01 * min(sizes)
    assert all((config["steps"], config["evaluate_every"]) == (600, 60) for config in configs)


def test_bodies_that_read_text_are_those_of_table_4():
    """The transformer's body is as large as the LSTM's, within 1 %; ratios are to the LSTM of
    the same run.
    """
    sizes = {name: count(responsiveness.config_of(name), "body") for name in responsiveness.MODELS}
    assert math.isclose(sizes["transformer"], sizes["lstm_2048"], rel_tol=0.01)
    speeds = {
        measure: {"body": 200.0, "whole": 100.0}
        for measure in ("throughput", "responsiveness", "one by one")
    }
    found = [
        {"model": name, "parameters": {"body": sizes[name]}, **speeds}
        for name in ("lstm_2048", "gcnn_8b")
    ]
    found[1] = found[1] | {"responsiveness": {"body": 4_000.0, "whole": 2_000.0}}
    lines = responsiveness.table(found).splitlines()
    assert "| gcnn_8b | 13.4M | throughput | 200.0 | 100.0 | 1.00 | 1.06 | 1.01 |" in lines
    assert "| gcnn_8b | 13.4M | responsiveness | 4,000.0 | 2,000.0 | 20.00 |  | 20.10 |" in lines
