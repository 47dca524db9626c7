"""Schedules at the updates where they turn, every optimizer and every schedule, and settings out
of range.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.tree_utils import tree_get

from adaptive_jax.config.keys import complete, keys_of
from adaptive_jax.errors import InputError
from adaptive_jax.model.language_model import build, parameter_shapes
from adaptive_jax.optimizers import layerwise, optim, schedules
from adaptive_jax.parallel import sharding
from adaptive_jax.training import sparse
from adaptive_jax.training.state import State
from adaptive_jax.training.update import _unless_skipped
from tests import refuses
from tests.toys import random_params


def test_the_rate_after_the_last_cycle():
    """It stays the lowest of that cycle."""
    cycles = {"cycle_steps": 4, "cycles": 2, "shrink": 0.5}
    rate = schedules.cosine_cycles(1.0, min_learning_rate=0.01, warmup_steps=2, **cycles)
    assert rate(14) == rate(1_000) == pytest.approx(0.005)


FROM_OPTAX = "lion", "adamw", "adafactor", "muon"


@pytest.mark.parametrize("name", FROM_OPTAX)
def test_an_optimizer_of_optax_is_that_of_optax(name):
    """Three updates of the same rates, bit for bit, and its own default settings; otherwise a name
    would promise what another paper means by it.
    """
    params, gradient = {"a": jnp.ones((3, 4)), "b": jnp.ones(4)}, {"a": jnp.full((3, 4), 0.1)}
    gradient["b"] = -jnp.ones(4)
    theirs = (getattr(optax, name, None) or getattr(optax.contrib, name))(learning_rate=0.1)
    constant = {"schedule.name": "constant", "schedule.warmup_steps": 0}
    named = {"optimizer.name": name, "optimizer.learning_rate": 0.1}
    ours = optim.from_config(complete(named, constant))
    assert {key.split("_")[0] for key in keys_of("optimizer", name)} >= {"learning", "clip", "l2"}
    states, ends = [ours.init(params), theirs.init(params)], [params, params]
    for _ in range(3):
        for i, each in enumerate((ours, theirs)):
            changes, states[i] = jax.jit(each.update)(gradient, states[i], ends[i])
            ends[i] = optax.apply_updates(ends[i], changes)
    jax.tree.map(np.testing.assert_array_equal, *ends)
    assert optim.params_to_evaluate(states[0], params) is params


def own_lamb(learning_rate):
    return optax.lamb(learning_rate)


own_lamb.layerwise = True
OWN = f"{__name__}:own_lamb"


@pytest.mark.slow
def test_layerwise_optimizers_of_optax():
    """The list equals a numeric trial of every optimizer that a config can name, without which one
    of a newer optax would take a stack of layers for a layer.
    """
    constant = {"schedule.name": "constant", "schedule.warmup_steps": 0}
    stack, gradient = jax.random.normal(jax.random.key(0), (2, 2, 3, 4))

    def is_layerwise(name):
        try:
            optimizer = optim.from_config(complete({"optimizer.name": name} | constant))
        except InputError:  # which no config can name
            return False

        def changes(params, gradients):
            _, state = optimizer.update(gradients, optimizer.init(params), params)
            return jax.tree.leaves(optimizer.update(gradients, state, params)[0])

        @jax.jit
        def both():
            return changes(stack, gradient), changes(list(stack), list(gradient))

        [together], apart = both()
        return not jnp.allclose(together, jnp.stack(apart), 1e-4, 0)

    names = optim.OPTIMIZERS | optim.optimizers_of_optax()
    assert set(filter(is_layerwise, names)) == layerwise.LAYERWISE


@pytest.mark.parametrize("name", ["muon", "optax:lamb", OWN, "lion"])
def test_layers_in_a_stack_are_layers(name):
    """An optimizer that treats an array as a layer changes blocks that a body stacks in one array
    as it would change them apart; muon would take their biases for a matrix and their matrices for
    nothing that it knows.
    """
    config = complete(
        {"optimizer.name": name, "optimizer.learning_rate": 0.1}
        | {"schedule.name": "constant", "schedule.warmup_steps": 0}
        | {"body.layers": 3, "body.features": 8, "body.heads": 2, "body.feed_forward": 16}
        | {"input.cutoffs": (20,), "input.width": 8, "output.table.cutoffs": (20,)}
    )
    model = build(config, 40)
    whole, alone = sparse.optimizer(config, model), optim.from_config(config)
    assert layerwise.is_layerwise(name) == (name != "lion")
    params, gradients = (random_params(parameter_shapes(model), seed=seed) for seed in (0, 1))

    def apart(tree):
        blocks = [jax.tree.map(lambda a, i=i: a[i], tree["body"]["blocks"]) for i in range(3)]
        return tree | {"body": tree["body"] | {"blocks": blocks}}

    state = jax.eval_shape(whole.init, params)
    specs = sharding.parameter_specs(state, sharding.abstract_mesh(4, 4), model)
    sizes = {True: 0, False: 0}  # numbers that every device has, and those that are shared
    for array, spec in zip(*map(jax.tree.leaves, (state, specs)), strict=True):
        sizes[not any(spec)] += array.size
    assert sizes[True] < 0.5 * sizes[False]
    changes, _ = jax.jit(whole.update)(gradients, whole.init(params), params)
    expected, _ = jax.jit(alone.update)(apart(gradients), alone.init(apart(params)), apart(params))
    close = functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-6)
    jax.tree.map(close, apart(changes), expected)


def test_a_state_that_no_checkpoint_holds():
    """Told before the first update, and not at the first save, which would lose the run."""
    config = complete({"optimizer.name": "galore"})
    with refuses("'galore'", "checkpoint"):
        sparse.optimizer(config, build(config, 40))


@pytest.mark.parametrize("highest", [0.5, 1.0, 5.0, 30.0])
def test_the_ends_of_a_warm_up(highest):
    """In float32, too: beside the highest rate, the first one was lost."""
    for schedule in schedules.SCHEDULES.values():
        rate = schedule(learning_rate=highest, warmup_from=1e-7, warmup_steps=7)
        assert rate(0) == np.float32(1e-7) and rate(7) == np.float32(highest)


def test_the_inverse_square_root():
    """Linear up to the highest rate, half of it after four times as many updates: d^-0.5
    min(n^-0.5, n w^-1.5) of the paper.
    """
    with jax.enable_x64(True):
        highest = (512 * 4_000) ** -0.5
        rate = schedules.inverse_square_root(
            learning_rate=highest, warmup_from=0.0, warmup_steps=4_000
        )
        for n in 1, 399, 4_000, 4_001, 16_000, 100_000:
            assert rate(jnp.asarray(n)) == pytest.approx(
                512**-0.5 * min(n**-0.5, n * 4_000**-1.5), rel=1e-12
            )


PAIRS = [(optimizer, "constant") for optimizer in optim.OPTIMIZERS]
PAIRS += [("nag", schedule) for schedule in optim.SCHEDULES if schedule != "constant"]


@pytest.mark.parametrize("optimizer, schedule", PAIRS)
def test_any_optimizer_goes_with_any_schedule(optimizer, schedule):
    """The gradient's way at first, by half as much if the rate is scaled by a half; zero rate
    changes nothing.
    """
    names = {"optimizer.name": optimizer, "schedule.name": schedule}
    rates = {"optimizer.learning_rate": 0.1, "schedule.warmup_from": 0.0}
    ours = optim.from_config(complete(names, rates, {"schedule.warmup_steps": 2}))
    params, gradient = {"a": jnp.array([1.0, -2.0])}, {"a": jnp.array([0.1, -0.3])}
    state, moved = ours.init(params), {}
    for step, scale in enumerate((1.0, 1.0, 0.5)):
        moved[step], state = ours.update(gradient, state, params, scale=scale)
        assert float(optim.learning_rate(state)) == pytest.approx(0.05 * step * scale, abs=1e-8)
        state = optim.after_evaluation(state, 3.0)
        assert not optim.ended(state)
        assert optim.params_to_evaluate(state, params)["a"].shape == (2,)
    np.testing.assert_array_equal(moved[0]["a"], [0, 0])
    np.testing.assert_array_equal(np.sign(moved[1]["a"]), [-1, 1])
    # The momentum adds to the change from update to update.
    growth = {"nag": (1 + 0.99 + 0.99**2 + 0.99**3) / (1 + 0.99 + 0.99**2)}.get(optimizer, 1.0)
    # 0.5 of twice the rate.
    np.testing.assert_allclose(moved[2]["a"], growth * moved[1]["a"], rtol=1e-4)


@pytest.mark.parametrize("optimizer", optim.OPTIMIZERS)
def test_parameters_named_as_fields_of_a_state(optimizer):
    """A layer of somebody else may call a parameter "average" or "learning_rate": what is
    evaluated, saved and logged would be Adam's moments of that parameter.
    """
    params = {"average": jnp.ones(2), "learning_rate": jnp.ones(3), "count": jnp.ones(4)}
    ours = optim.from_config(complete({"optimizer.name": optimizer}))
    _, state = ours.update(params, ours.init(params), params)
    assert optim.learning_rate(state) is state.learning_rate
    assert optim.params_to_evaluate(state, params).keys() == params.keys()
    items = State(0, params, state).items()
    assert (items["averages"] == ()) == ("asgd" not in optimizer)
    jax.tree.map(np.testing.assert_array_equal, items["optimizer"].schedule, state.schedule)


def test_decoupled_decay():
    """Every update shrinks parameters by the rate times the decay, beside what the gradient
    does, and not through momentum.
    """
    params, gradient = {"a": jnp.array([1.0, -2.0])}, {"a": jnp.array([0.1, -0.3])}
    flat = {"schedule.name": "constant", "schedule.warmup_steps": 0, "optimizer.learning_rate": 0.5}
    for name in "nag", "adam":
        moved = []
        for decay in 0.0, 0.01:
            changes = {"optimizer.name": name, "optimizer.decoupled_decay": decay}
            ours = optim.from_config(complete(flat | changes))
            state = ours.init(params)
            _, state = ours.update(gradient, state, params)
            changes, _ = ours.update(gradient, state, params)
            moved.append(changes["a"])
        np.testing.assert_allclose(moved[1] - moved[0], -0.5 * 0.01 * params["a"], rtol=1e-4)


def test_averages_of_the_paper():
    """The mean of the parameters at the switch and after each update since; an update that is
    left out does not count.
    """
    settings = {"nonmono": 1, "clip_norm": None, "l2_decay": 0.0}
    ours = schedules.scheduled(
        functools.partial(optim.nt_asgd, **settings), lambda count: 0.5 + 0.1 * count
    )
    params, seen = {"a": jnp.array([1.0, -2.0])}, []
    state = ours.init(params)
    for step in range(6):
        changes, after = ours.update({"a": jnp.full(2, 0.1 * step)}, state, params)
        keep = step != 4
        state = _unless_skipped(keep, after, state)
        if keep:
            params = optax.apply_updates(params, changes)
        for nll in (1.0, 1.0, 2.0)[: 3 * (step == 1)]:
            state = optim.after_evaluation(state, nll)
        if step >= 1 and keep:
            seen.append(params["a"])
        np.testing.assert_allclose(
            optim.params_to_evaluate(state, params)["a"],
            np.mean(seen or [params["a"]], axis=0),
            rtol=1e-6,
        )
    assert tree_get(state, "switched") and int(tree_get(state, "step")) == 6


@pytest.mark.parametrize(
    "optimizer, schedule, setting, value",
    [
        ("nag", "constant", "optimizer.decoupled_decay", -1e-6),
        ("sgd", "constant", "optimizer.clip_norm", 0.0),
        ("sgd", "constant", "optimizer.l2_decay", 1.0),
        ("adam", "constant", "optimizer.epsilon", 0.0),
        ("nt_asgd", "constant", "optimizer.nonmono", 0),
        ("sgd", "constant", "optimizer.learning_rate", 0.0),
        ("sgd", "constant", "schedule.warmup_steps", -1),
        ("sgd", "constant", "schedule.warmup_from", -1.0),
        ("sgd", "constant", "schedule.warmup_from", 2.0),
        ("sgd", "inverse_square_root", "schedule.warmup_steps", 0),
        ("sgd", "plateau", "schedule.factor", 0.5),
        ("sgd", "plateau", "schedule.patience", 0),
        ("sgd", "plateau", "schedule.threshold", 1.0),
        ("sgd", "plateau", "schedule.divisions", -1),
    ],
)
def test_settings_out_of_range(optimizer, schedule, setting, value):
    """One line with the key, its range and its value."""
    changes = {"optimizer.name": optimizer, "schedule.name": schedule, setting: value}
    with refuses(setting, str(value)):
        optim.from_config(complete(changes))


@pytest.mark.parametrize(
    "changes, names",
    [
        ({"optimizer.name": "lion_"}, ("config.optimizer.name='lion_'", '"lion"')),
        ({"optimizer.name": "scale_by_rprop"}, ("nag", "sgd", "adam", "nt_asgd", "adabelief")),
        ({"optimizer.name": "chain"}, ("'chain'", "nag")),
        ({"optimizer.name": "schedule_free_sgd"}, ("'schedule_free_sgd'", "nag")),
        ({"optimizer.name": "optax:scale_by_adam"}, ("learning_rate",)),
        ({"optimizer.name": "rprop"}, ("'rprop'", "rate")),
        ({"optimizer.name": "lbfgs"}, ("'lbfgs'", "'value_fn'")),
        (
            {"optimizer.name": "nt_asgd", "optimizer.form": "papr"},
            ("optimizer.form='papr'", "paper", "torch"),
        ),
        ({"schedule.cycles": 0}, ("schedule.cycles", "0")),
        ({"schedule.cycle_steps": 0}, ("schedule.cycle_steps", "0")),
    ],
)
def test_unknown_optimizers_and_schedules(changes, names):
    """One line, instead of a traceback out of optax."""
    with refuses(*names):
        optim.from_config(complete(changes))
