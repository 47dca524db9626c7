"""Sparse updates: most of them use stored encodings of words and leave the encoder as it is."""

import functools
import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.tree_utils import tree_get

from adaptive_jax.config.keys import complete
from adaptive_jax.data.vocabulary.lexicon import lexicon
from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.model.composition import encoders
from adaptive_jax.model.language_model import build
from adaptive_jax.numerics.batch import Batch
from adaptive_jax.parallel import sharding
from adaptive_jax.runs.checkpoints import Checkpoints
from adaptive_jax.scores.evaluate import Request, evaluate
from adaptive_jax.training.loop import train
from adaptive_jax.training.sparse import composes, optimizer
from adaptive_jax.training.sparse import sparse as sparse_optimizer
from adaptive_jax.training.state import initial_state, shape_of_state
from adaptive_jax.training.update import UpdateOptions, make_update
from tests import refuses

WORDS = Vocabulary.build({f"w{n}": 100 // n for n in range(1, 20)} | {"<eos>": 99})
LEXICON = str(Path(__file__).parents[1] / "fixtures" / "lexicon.jsonl")
LETTERS = {"width": 3, "filters": ((1, 4), (2, 4)), "highway_layers": 1, "length": 5}
CNN = {f"input.{key}": value for key, value in LETTERS.items()} | {"input.name": "char_cnn"}
BODY = {"body.name": "lstm", "body.features": 8, "body.widths": (8,), "body.dropout": 0.0}
ADAM = {"optimizer.name": "adam", "optimizer.learning_rate": 0.05}
ADAM |= {"optimizer.l2_decay": 0.1, "optimizer.clip_norm": 0.01}
CONSTANT = {"schedule.name": "constant", "schedule.warmup_steps": 0}
TABLE = {"output.name": "softmax", "output.table.bias": "predicted"}
GROC = {"input.name": "groc", "input.strides": (1, 2), "input.lexicon": LEXICON}
MODELS = {
    "groc": CNN | GROC | TABLE | {"output.table.name": "mapped", "output.table.dropout": 0.3},
    "composed": (
        CNN
        | TABLE
        | {"output.table.name": "composed", "output.table.correction": 2}
        | {f"output.table.cnn.{key}": value for key, value in LETTERS.items()}
    ),
    "tied": (
        CNN
        | {"output.name": "adaptive", "output.table.name": "tied"}
        | {"output.table.cutoffs": (4, 9), "output.table.bias": True}
    ),
}
TRAINED = "groc", "composed"  # here; "tied" is trained by a whole run


def config_of(name, **changes):
    return complete(MODELS[name], BODY, ADAM, CONSTANT, {"compose_share": 0.4}, changes)


def batch_of(seed):
    ids = np.random.default_rng(seed).integers(0, len(WORDS), (1, 4, 7)).astype(np.int32)
    return Batch(
        ids[..., :-1],
        ids[..., 1:],
        np.ones((1, 4, 6), np.float32),
        np.arange(4, dtype=np.int32)[None],
    )


@functools.cache
def trajectory(name):
    """States and metrics around four updates of a model: anew, stored, stored, anew."""
    config = config_of(name)
    model, mesh = build(config, len(WORDS)), sharding.device_mesh()
    ours = optimizer(config, model)
    layout = shape_of_state(model, ours, mesh, sparse=True)
    updates = [
        make_update(model, ours, mesh, 0, layout, UpdateOptions(stored=stored))
        for stored in (False, True)
    ]
    known = lexicon(WORDS, model.lexicon_spec())
    state = initial_state(model, ours, 0, layout)
    programs = [update.lower(state, known, batch_of(0)).compile() for update in updates]
    states, metrics = [jax.tree.map(np.array, state)], []
    for step, stored in enumerate((0, 1, 1, 0)):
        state, seen = programs[stored](state, known, batch_of(step))
        states.append(jax.tree.map(np.array, state))
        metrics.append(seen)
    return model, known, states, metrics


def parts_of(model, tree):
    """The arrays of the encoder, and the others."""
    mine = jax.tree.leaves(encoders(model, tree))
    leaves = jax.tree.leaves(tree)
    return [a for a, own in zip(leaves, mine, strict=True) if own], [
        a for a, own in zip(leaves, mine, strict=True) if not own
    ]


@pytest.mark.parametrize("name", TRAINED)
def test_a_stored_update_leaves_the_encoder_and_moves_the_rest(name):
    """Its parameters and Adam's means of their gradients stay bit for bit; every other
    parameter moves.
    """
    model, _, states, _ = trajectory(name)
    for (before, after), stays in zip(
        itertools.pairwise(states), (False, True, True, False), strict=True
    ):
        adam, next_adam = (
            tree_get(state.optimizer, "ScaleByAdamState") for state in (before, after)
        )
        assert after.optimizer.encoded - before.optimizer.encoded == (not stays)
        assert next_adam.count == adam.count + 1
        for old, new in (
            (before.params, after.params),
            (adam.mu, next_adam.mu),
            (adam.nu, next_adam.nu),
        ):
            (encoder, rest), (next_encoder, next_rest) = parts_of(model, old), parts_of(model, new)
            assert len(encoder) >= 8
            assert all(
                np.array_equal(a, b) == stays for a, b in zip(encoder, next_encoder, strict=True)
            )
            assert not any(np.array_equal(a, b) for a, b in zip(rest, next_rest, strict=True))
        assert (
            np.array_equal(*(jax.tree.leaves(state.tables)[0] for state in (before, after)))
            == stays
        )


def test_a_stored_update_computes_with_the_encoder_of_the_last_full_one():
    """Its loss is that of the parameters of now with the encoder's of the last full update,
    before this changed them.
    """
    model, known, states, metrics = trajectory("composed")
    loss = jax.jit(
        lambda params, batch: model.apply({"params": params, "lexicon": known}, batch)[0].nll.mean()
    )
    for step in range(4):
        of = step if step in (0, 3) else 0
        own = encoders(model, states[step].params)
        mixed = jax.tree.map(
            lambda mine, old, new: old if mine else new, own, states[of].params, states[step].params
        )
        expected = float(loss(mixed, jax.tree.map(lambda a: a[0], batch_of(step))))
        assert float(metrics[step]["nll"]) == pytest.approx(expected, rel=2e-6)
        if step in (1, 2):
            now = float(loss(states[step].params, jax.tree.map(lambda a: a[0], batch_of(step))))
            assert abs(now - expected) > 1e-4


def test_adam_counts_for_the_encoder_the_updates_that_it_had():
    """Two full updates with two stored ones between move the encoder as Adam does that saw only
    those two.
    """
    config = config_of("composed", **{"optimizer.clip_norm": None})
    model = build(config, len(WORDS))
    sparse = optimizer(config, model)
    params = trajectory("composed")[2][0].params
    gradients = [jax.tree.map(lambda a, k=k: jnp.cos(k + a), params) for k in range(4)]
    reference = optax.chain(optax.add_decayed_weights(0.1), optax.adam(0.05))

    def ours(params):
        state = sparse.init(params)
        for stored, gradient in zip((False, True, True, False), gradients, strict=True):
            changes, state = sparse.update(gradient, state, params, stored=stored)
            params = optax.apply_updates(params, changes)
        return params

    def theirs(params, *which):
        state = reference.init(params)
        for k in which:
            changes, state = reference.update(gradients[k], state, params)
            params = optax.apply_updates(params, changes)
        return params

    program = jax.jit(
        lambda params: (ours(params), theirs(params, 0, 3), theirs(params, 0, 1, 2, 3))
    )
    made = program.lower(params).compile()(params)
    (encoder, rest), (expected, _), (_, expected_rest) = (parts_of(model, each) for each in made)
    for mine, other in zip(encoder + rest, expected + expected_rest, strict=True):
        np.testing.assert_allclose(mine, other, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["amsgrad", "adafactor", "adan", "sm3"])
def test_an_encoder_is_trained_as_if_alone(name):
    """By optimizers whose state depends on the count of updates, or is a list for each parameter:
    they kept the encoder's moments by the count of all updates, and sm3 ended in a traceback.
    """
    dense = getattr(optax, name)(0.1)
    params = {"encoder": jnp.full((2, 3), 0.5), "rest": jnp.full((3,), 0.3)}
    ours = sparse_optimizer(dense, {"encoder": True, "rest": False})

    def trained(optimizer, params, steps, is_sparse=False):
        state = optimizer.init(params)
        for k in steps:
            gradients = jax.tree.map(lambda a, k=k: jnp.cos(k + a), params)
            extra = {"stored": k in (1, 2)} if is_sparse else {}
            changes, state = optimizer.update(gradients, state, params, **extra)
            params = optax.apply_updates(params, changes)
        return params

    @jax.jit
    def program(params):
        alone = {"encoder": (0, 3, 4), "rest": range(5)}
        apart = {k: trained(dense, {k: params[k]}, steps)[k] for k, steps in alone.items()}
        return trained(ours, params, range(5), is_sparse=True), apart

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), *program(params))


def test_draws_come_from_seed_and_step_alone():
    """The first update is always full; later ones with the share's probability, otherwise for
    another seed.
    """
    drawn = np.array([[composes(seed, step, 0.3) for step in range(1, 3001)] for seed in (0, 1)])
    assert drawn[:, 0].all()
    assert drawn.mean(axis=1) == pytest.approx([0.3, 0.3], abs=0.03)
    assert 0.3 < np.mean(drawn[0] != drawn[1]) < 0.55
    assert all(composes(0, step, 1.0) for step in range(1, 50))


SPARSE = {"steps": 5, "evaluate_every": 0, "checkpoint_every": 0, "compose_share": 0.3, "seed": 7}
SPARSE |= {"batches.sequence_length": 16, "tokens_per_update": 128, "tokens_per_device": 64}


@pytest.fixture(scope="module")
def sparse(settings):
    """`sparse(steps=3)`: the config of a small run with sparse updates."""

    def sparse(**changes):
        small = {
            k: v
            for k, v in settings().items()
            if not k.startswith(("body.", "input.", "output.", "schedule.", "optimizer."))
        }
        return config_of("tied", **small | SPARSE | changes)

    return sparse


def saved(workdir, config):
    """The last state in a checkpoint, tables and all."""
    model = build(config, 122)
    layout = shape_of_state(model, optimizer(config, model), sharding.device_mesh(), sparse=True)
    checkpoints = Checkpoints(workdir)
    items = checkpoints.restore(checkpoints.latest(), layout.items())
    checkpoints.close()
    return {name: jax.tree.leaves(item) for name, item in items.items()}


ON_HOSTS = """
import json
from adaptive_jax.config import commands
from adaptive_jax.config.flags import define_options, options
define_options(commands.Workdir, commands.Hosts)
def main():
    from adaptive_jax.parallel import hosts
    from adaptive_jax.scores.evaluate import Request, evaluate
    from adaptive_jax.training.loop import train
    folder = commands.workdir()
    hosts.initialize(*options(commands.Hosts))
    config, tuned, request = json.loads((folder / "given.json").read_text())
    with hosts.fail_together():
        train(config, folder / "devices")
        train(tuned, folder / "tuned_devices")
        score = evaluate(folder / "devices", Request(**request))["nll"]
    if hosts.first():
        (folder / "score.json").write_text(json.dumps(score))
commands.run(main)
"""


@pytest.mark.slow
def test_a_run_on_other_hosts(sparse, start_hosts, tmp_path):
    """A run on two hosts of two devices, where two share the parameters, makes the updates of one
    device up to rounding, and so does a run that starts from it; an unbounded cache gives the
    score of one device. tests/training/test_resuming.py resumes it exactly.
    """
    assert [composes(7, step, 0.3) for step in range(1, 6)] == [True, False, False, True, False]
    train(sparse(), tmp_path / "whole")
    assert len(saved(tmp_path / "whole", sparse())["tables"]) == 1
    origin = {"init_from": str(tmp_path / "whole"), "init_checkpoint": "latest"}
    tuned = sparse(steps=1, seed=3, init_words="both", **origin)
    train(tuned, tmp_path / "tuned")
    unbounded = {"checkpoint": "latest", "method": "cache", "options": {"cache": "unbounded"}}
    given = [sparse(fsdp=2), tuned | {"fsdp": 2}, unbounded]
    (tmp_path / "given.json").write_text(json.dumps(given))
    processes = start_hosts("-c", ON_HOSTS, f"--workdir={tmp_path}", devices=2)
    (out, err), (_, other_err) = (process.communicate(timeout=200) for process in processes)
    assert [process.returncode for process in processes] == [0, 0], err + other_err
    assert out.count("4 device(s), parameters sharded over 2") == 2
    for one, four in ("whole", "devices"), ("tuned", "tuned_devices"):
        states = (saved(tmp_path / name, sparse()) for name in (four, one))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=3e-5), *states)
    score = evaluate(tmp_path / "whole", Request(**unbounded))["nll"]
    assert json.loads((tmp_path / "score.json").read_text()) == pytest.approx(score, rel=1e-6)


TIED = {"output.name": "softmax", "output.table.name": "tied"}


@pytest.mark.parametrize(
    "share, layers, names",
    [
        (0.0, CNN | TIED, ("compose_share", "0.0")),
        (1.5, CNN | TIED, ("compose_share", "1.5")),
        (0.4, CNN | {"output.table.name": "own"}, ("compose_share", "reads")),
        (0.4, {"input.name": "lookup"} | TIED, ("compose_share=1", "none")),
    ],
)
def test_wrong_shares(share, layers, names):
    """One line says what is wrong and the cure."""
    with refuses(*names):
        config = complete(layers, BODY, {"compose_share": share})
        optimizer(config, build(config, len(WORDS)))
