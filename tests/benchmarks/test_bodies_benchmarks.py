"""The benchmarks of bodies: the models they compare, the tables they print, the runs they
choose.
"""

import math
from types import SimpleNamespace

import jax
import pytest

from adaptive_jax.errors import InputError
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


def test_the_best_rate_is_chosen_for_each_way_to_train():
    """A run that diverged is the worst; with all of them diverged, the first one stands for
    them.
    """
    losses = {
        "both": (90.0, 80.0, 100.0),
        "no clipping": (None, None, 200.0),
        "no weight norm": (None, None, None),
    }
    runs = {
        f"{name}, {rate:g}": {
            "validation": loss,
            "seconds": 61.0,
            "parameters": 1_075_584,
            "curve": [],
        }
        for name, all_losses in losses.items()
        for rate, loss in zip(figures.RATES, all_losses, strict=True)
    }
    assert list(figures.best_rates(runs)) == ["both, 0.1", "no clipping, 0.01", "no weight norm, 1"]
    assert set(runs) == set(figures.FIGURES["training"])
    lines = figures.table(runs).splitlines()
    assert (
        "| both, 0.1 | 80.0 | 61 | 1.08M |" in lines
        and "| no clipping, 1 | diverged | 61 | 1.08M |" in lines
    )
    for name, changes in figures.TRAINING.items():
        config = figures.config_of("training", f"{name}, 0.1", 600, "")
        assert config["optimizer"]["learning_rate"] == 0.1
        assert (config["body"]["weight_norm"], config["optimizer"]["clip_norm"] is None) == (
            name != "no weight norm",
            bool("optimizer.clip_norm" in changes),
        )


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


@pytest.mark.parametrize(
    "main, settings, says",
    [
        (responsiveness.main, {"models": ["lstm"]}, "--models=lstm"),
        (responsiveness.main, {"tokens": 0}, "--tokens=0"),
        (responsiveness.main, {"repeats": 0}, "--repeats=0"),
        (figures.main, {"figures": ["activation"]}, "--figures=activation"),
        (figures.main, {"steps": 0}, "--steps=0"),
    ],
)
def test_flags_that_make_no_sense(main, settings, says):
    """One line that names the flag, before anything runs."""
    given = {"models": [], "tokens": 1, "steps": 1, "repeats": 1, "figures": []} | settings
    with pytest.raises(InputError, match=says):
        main(SimpleNamespace(**given))
