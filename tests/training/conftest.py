"""Five runs that were never stopped, shared by the tests of training."""

import functools

import pytest

from adaptive_jax.training.loop import train

# A checkpoint and an evaluation now and then, and in the middle of an epoch of 391 rows.
STEPS = {"steps": 8, "log_every": 1, "evaluate_every": 2, "checkpoint_every": 3, "keep": 9}
CONSTANT = {"schedule.name": "constant", "schedule.warmup_steps": 0}
LSTM = {"body.name": "lstm", "output.table.name": "tied"}
RUNS = {
    "transformer": (
        {"tokens_per_device": 64, "output.tail_dropout": 0.2, "body.dropout": 0.2}
        | {"body.attention_dropout": 0.1, "body.activation_dropout": 0.1}
    ),
    "streams": (
        {"batches.layout": "streams", "batches.sequence_length": 60}
        | {"tokens_per_update": 480, "tokens_per_device": 480}
        | LSTM
        | {"input.name": "lookup", "output.name": "softmax"}
        | {"body.widths": (32,), "body.features": 32, "body.dropout": 0.1}
        | CONSTANT
        | {"optimizer.learning_rate": 0.1}
    ),
    # Composes all words anew in updates 1, 4 and 6: a stop after 4 falls between two that share
    # tables.
    "sparse": (
        {"seed": 7, "compose_share": 0.3, "tokens_per_update": 128, "tokens_per_device": 64}
        | {"input.name": "char_cnn", "input.width": 3, "input.filters": ((1, 4), (2, 4))}
        | {"input.highway_layers": 1, "input.length": 5}
        | LSTM
        | {"body.widths": (8,), "body.features": 8}
        | {"output.name": "adaptive", "output.table.cutoffs": (4, 9)}
        | CONSTANT
        | {"optimizer.name": "adam", "optimizer.learning_rate": 0.05}
    ),
    "sub-words": {"data.codes": 60, "data.vocabulary_size": 400},
    "similar": (
        {"batches.layout": "similar", "batches.break_mode": "eos"}
        | {"batches.sequence_length": 64, "tokens_per_device": 256}
    ),
}


@pytest.fixture(scope="session")
def run_config(config, with_layers):
    """`run_config("streams", steps=3)`: the config of one of `RUNS` with these changes."""

    def run_config(name, **changes):
        changes = STEPS | RUNS[name] | changes
        return with_layers(changes) if "body.name" in changes else config(**changes)

    return run_config


@pytest.fixture(scope="session")
def uninterrupted(run_config, tmp_path_factory):
    """`uninterrupted("streams")`: the workdir of a run of `RUNS` that was trained to its end: to be
    read, not changed.
    """

    @functools.cache
    def uninterrupted(name):
        workdir = tmp_path_factory.mktemp("uninterrupted") / name
        train(run_config(name), workdir)
        return workdir

    return uninterrupted
