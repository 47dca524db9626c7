"""Optimizers and schedules against numbers of other people's code: the public AWD-LSTM on PyTorch, and fairseq.

Each test is named after the file of `tests/fixtures` that it matches.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from adaptive_jax.training import optim, schedules
from adaptive_jax.training.nt_asgd import NtAsgd

FIXTURES = Path(__file__).parents[1] / "fixtures"
OPTIM = json.loads((FIXTURES / "awd_lstm" / "optim.json").read_text())["cases"]
TRIGGER = json.loads((FIXTURES / "awd_lstm" / "nt_trigger.json").read_text())["cases"]
PLATEAU = json.loads((FIXTURES / "gcnn" / "plateau_lr.json").read_text())["cases"]


def arrays(file, case):
    with np.load(FIXTURES / "awd_lstm" / f"{file}.npz") as stored:
        return {key.removeprefix(f"{case}/"): stored[key] for key in stored if key.startswith(f"{case}/")}


def constant(rate):
    return schedules.constant(learning_rate=rate, warmup_from=0.0, warmup_steps=0)


def optimizer_of(settings):
    """Ours with the settings of a case."""
    rate, name = settings["lr"], settings["optimizer"]
    shared = {"clip_norm": settings["clip"], "l2_decay": settings["weight_decay"]}
    if name == "adam":
        return optim.adam(constant(rate), beta1=0.9, beta2=0.999, epsilon=1e-8, decoupled_decay=0.0, **shared)
    if name == "sgd":
        return optim.sgd(constant(rate), **shared)
    if not settings["lambd"]:
        return optim.nt_asgd(constant(rate), nonmono=1, form="torch", **shared)
    # PyTorch's lambd is a decoupled decay, with a rate that falls by a power of the updates done; after `t0` updates and one more,
    # it averages as the paper says.
    falling = schedules.Schedule(lambda count: rate / (1 + settings["lambd"] * rate * jnp.asarray(count, float)) ** 0.75)
    return NtAsgd(optax.chain(optax.identity()), falling, 1, "paper", decay=settings["lambd"])


@pytest.mark.parametrize("case", OPTIM)
def test_optim(case):
    """Fifteen steps on given gradients: parameters, averages and moments after each."""
    settings, data = OPTIM[case], arrays("optim", case)
    with jax.enable_x64(settings["dtype"] == "float64"):
        tolerance = 1e-10 if settings["dtype"] == "float64" else 2e-6
        optimizer = optimizer_of(settings)
        params = [jnp.asarray(data[name], settings["dtype"]) for name in ("p0_init", "p1_init")]
        state, switch = optimizer.init(params), settings.get("t0", 0) + 2 * bool(settings.get("lambd"))
        update = jax.jit(optimizer.update)
        for step in range(settings["steps"]):
            if settings["optimizer"] == "asgd" and step == switch:
                state = state._replace(switched=jnp.asarray(True))
            gradients = [jnp.asarray(data[name][step], settings["dtype"]) for name in ("g0", "g1")]
            changes, state = update(gradients, state, params, jnp.asarray(data["seq_len"][step] / settings["bptt"]))
            params = optax.apply_updates(params, changes)
            compared = {"p": params}
            if settings["optimizer"] == "asgd":
                compared["ax"] = optimizer.params_to_evaluate(state, params)
            if settings["optimizer"] == "adam":
                compared |= {"exp_avg": state[1].mu, "exp_avg_sq": state[1].nu}
            for name, ours in compared.items():
                for number, array in enumerate(ours):
                    np.testing.assert_allclose(array, data[f"{name}{number}"][step], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("case", TRIGGER)
def test_nt_trigger(case):
    """Averages begin after the same evaluation of the same history; none after it is compared."""
    settings = TRIGGER[case]
    optimizer = optim.nt_asgd(constant(1.0), nonmono=settings["nonmono"], form="paper", clip_norm=None, l2_decay=0.0)
    state, switches = optimizer.init([jnp.zeros(2)]), []
    for epoch, nll in enumerate(settings["val_losses"], start=1):
        before, state = bool(state.switched), optimizer.after_evaluation(state, nll)
        if bool(state.switched) != before:
            switches.append(epoch)
    assert switches == [settings["switch_at_end_of_epoch"]] * (settings["switch_at_end_of_epoch"] is not None)


@pytest.mark.parametrize("case", PLATEAU)
def test_plateau_lr(case):
    """The rate of every update, to 1e-12 in float64; fairseq's patience counts one less."""
    settings = PLATEAU[case]
    with jax.enable_x64(True):
        schedule = schedules.plateau(
            learning_rate=settings["lr"], warmup_from=max(settings["warmup_init_lr"], 0.0), warmup_steps=settings["warmup_updates"],
            factor=1 / settings["lr_shrink"], patience=settings["lr_patience"] + 1, threshold=settings["lr_threshold"], divisions=0)
        state, advance, told = schedule.init(), jax.jit(schedule.advance), jax.jit(schedule.after_evaluation)
        rates, at_ends = [], [float(schedule.rate(state))]
        for nll in settings["valid_loss"]:
            for _ in range(settings["updates_per_epoch"]):
                state = advance(state)
                rates.append(float(schedule.rate(state)))
            state = told(state, nll)
            at_ends.append(float(schedule.rate(state)))
    assert rates == pytest.approx(settings["lr_after_each_update"], rel=1e-12)
    assert at_ends == pytest.approx(settings["lr_at_start_then_after_each_epoch"], rel=1e-12)
