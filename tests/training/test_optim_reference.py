"""Optimizers and schedules against numbers of other people's code: the public AWD-LSTM on PyTorch,
and fairseq.

Each test is named after the file of `tests/fixtures` that it matches.
"""

import contextlib
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.tree_utils import tree_get, tree_set

from adaptive_jax.config.keys import complete
from adaptive_jax.interop.awd_lstm import parameters_of, settings_of
from adaptive_jax.model.gradients import make_gradients
from adaptive_jax.model.language_model import build
from adaptive_jax.numerics.batch import Batch
from adaptive_jax.optimizers import optim, schedules
from adaptive_jax.optimizers.nt_asgd import descend_and_average
from adaptive_jax.parallel import sharding
from tests.bodies import test_lstm_reference
from tests.bodies.test_lstm_reference import RATES, masks_of

FIXTURES = Path(__file__).parents[1] / "fixtures"
given = test_lstm_reference.given
OPTIM = json.loads((FIXTURES / "awd_lstm" / "optim.json").read_text())["cases"]
TRIGGER = json.loads((FIXTURES / "awd_lstm" / "nt_trigger.json").read_text())["cases"]
PLATEAU = json.loads((FIXTURES / "gcnn" / "plateau_lr.json").read_text())["cases"]


def arrays(file, case):
    with np.load(FIXTURES / "awd_lstm" / f"{file}.npz") as stored:
        return {
            key.removeprefix(f"{case}/"): stored[key]
            for key in stored
            if key.startswith(f"{case}/")
        }


def at(rate, optimizer, **settings):
    """The optimizer at one rate, or at those of a schedule."""
    schedule = rate if callable(rate) else schedules.constant(rate, warmup_steps=0)
    return schedules.scheduled(functools.partial(optimizer, **settings), schedule)


def optimizer_of(settings):
    """Ours with the settings of a case."""
    rate, name, decay = settings["lr"], settings["optimizer"], settings.get("lambd")
    shared = {"clip_norm": settings["clip"], "l2_decay": settings["weight_decay"]}
    if name in ("adam", "sgd"):
        return at(rate, optim.OPTIMIZERS[name], **shared)
    if not decay:
        return at(rate, optim.nt_asgd, nonmono=0, form="torch", **shared)

    # PyTorch's lambd is a decoupled decay, with a rate that falls by a power of the updates done;
    # after `t0` updates and one more, it averages as the paper says.
    def decayed(rate):
        return optax.chain(optax.add_decayed_weights(decay), descend_and_average(rate, 1, "paper"))

    return at(lambda count: rate / (1 + decay * rate * jnp.asarray(count, float)) ** 0.75, decayed)


@pytest.mark.parametrize("case", OPTIM)
def test_optim(case):
    """Fifteen steps on given gradients: parameters, averages and moments after each."""
    settings, data = OPTIM[case], arrays("optim", case)
    with jax.enable_x64(settings["dtype"] == "float64"):
        tolerance = 1e-10 if settings["dtype"] == "float64" else 2e-6
        optimizer = optimizer_of(settings)
        params = [jnp.asarray(data[name], settings["dtype"]) for name in ("p0_init", "p1_init")]
        state, switch = optimizer.init(params), settings.get("lambd") and settings["t0"] + 2
        update = jax.jit(optimizer.update)
        for step in range(settings["steps"]):
            if switch and step == switch:
                state = tree_set(state, switched=jnp.asarray(True))
            gradients = [jnp.asarray(data[name][step], settings["dtype"]) for name in ("g0", "g1")]
            changes, state = update(
                gradients, state, params, scale=data["seq_len"][step] / settings["bptt"]
            )
            params = optax.apply_updates(params, changes)
            compared = {"p": params}
            if settings["optimizer"] == "asgd":
                compared["ax"] = optim.params_to_evaluate(state, params)
            if settings["optimizer"] == "adam":
                compared |= {"exp_avg": tree_get(state, "mu"), "exp_avg_sq": tree_get(state, "nu")}
            for name, ours in compared.items():
                for number, array in enumerate(ours):
                    np.testing.assert_allclose(
                        array, data[f"{name}{number}"][step], rtol=tolerance, atol=tolerance
                    )


@pytest.mark.parametrize("case", TRIGGER)
def test_nt_trigger(case):
    """Averages begin after the same evaluation of the same history; none after it is compared."""
    settings = TRIGGER[case]
    state = optim.nt_asgd(1.0, nonmono=settings["nonmono"]).init([jnp.zeros(2)])
    seen = [False]
    for nll in settings["val_losses"]:
        state = optim.after_evaluation(state, nll)
        seen.append(bool(tree_get(state, "switched")))
    switches = [epoch for epoch in range(1, len(seen)) if seen[epoch] != seen[epoch - 1]]
    assert switches == [settings["switch_at_end_of_epoch"]] * (
        settings["switch_at_end_of_epoch"] is not None
    )


@pytest.mark.parametrize("case", PLATEAU)
def test_plateau_lr(case):
    """The rate of every update, to 1e-12 in float64; fairseq's patience counts one less."""
    settings = PLATEAU[case]
    with jax.enable_x64(True):
        schedule = schedules.Plateau(
            learning_rate=settings["lr"],
            warmup_from=max(settings["warmup_init_lr"], 0.0),
            warmup_steps=settings["warmup_updates"],
            factor=1 / settings["lr_shrink"],
            patience=settings["lr_patience"] + 1,
            threshold=settings["lr_threshold"],
        )
        optimizer, nothing = at(schedule, optax.sgd), jnp.zeros(1)
        state, update = optimizer.init(nothing), jax.jit(optimizer.update)

        def following(state):
            return float(optim.learning_rate(update(nothing, state)[1]))

        rates, at_ends = [], [following(state)]
        for nll in settings["valid_loss"]:
            for _ in range(settings["updates_per_epoch"]):
                _, state = update(nothing, state)
                rates.append(following(state))
            state = optim.after_evaluation(state, nll)
            at_ends.append(following(state))
    assert rates == pytest.approx(settings["lr_after_each_update"], rel=1e-12)
    assert at_ends == pytest.approx(settings["lr_at_start_then_after_each_epoch"], rel=1e-12)


TRAJECTORY = json.loads((FIXTURES / "awd_lstm" / "train_trajectory.json").read_text())["cases"]


class Trajectory:
    """A case of the file, trained by our gradients and our optimizer on its windows.

    All windows are padded to one length, so that one program does for all; the carry after a window
    is found token by token.
    """

    def __init__(self, case, given):
        self.settings, self.data, self.given = (
            TRAJECTORY[case],
            arrays("train_trajectory", case),
            given,
        )
        weights, changes = (
            self.stored("init"),
            {ours: self.settings[theirs] for theirs, ours in RATES.items()},
        )
        self.model = build(complete(settings_of(weights), changes), self.settings["ntokens"])
        self.params = jax.tree.map(jnp.asarray, parameters_of(weights))
        self.carry = jax.tree.map(
            lambda a: a[None], self.model.body.initial_carry(self.data["train_data"].shape[1])
        )
        self.optimizer = self.ours()
        self.state, self.length = self.optimizer.init(self.params), max(self.data["rows"])
        mesh = sharding.device_mesh()
        self.gradients = make_gradients(self.model, mesh, 0)
        self.update, self.read = (
            once(function, sharding.replicated(mesh)) for function in (self.updated, self.carried)
        )
        self.nll = jax.jit(
            lambda params, batch: self.model.apply({"params": params}, batch)[0].nll.mean()
        )

    def ours(self):
        rate, shared = (
            self.settings["lr"],
            {"clip_norm": self.settings["clip"], "l2_decay": self.settings["wdecay"]},
        )
        if "optimizer" not in self.settings:
            nonmono = self.settings["nonmono"]
            return at(rate, optim.nt_asgd, nonmono=nonmono, form="torch", **shared)
        # main.py divides the rate by 10 after the epoch that --when names.
        first = int(np.sum(self.data["epoch"] <= self.settings["when"]))
        return at(lambda count: jnp.where(count < first, rate, rate / 10), optim.adam, **shared)

    def stored(self, place):
        return {
            key.removeprefix(f"{place}/"): array
            for key, array in self.data.items()
            if key.startswith(f"{place}/")
        }

    def updated(self, params, state, carry, batch, scale, masks):
        with self.given(masks) if masks else contextlib.nullcontext():
            step = jnp.zeros((), jnp.int32)
            gradients, _, sums, _ = self.gradients(params, {}, step, batch, carry)
        gradients = jax.tree.map(lambda g: g / sums.tokens, gradients)
        changes, state = self.optimizer.update(gradients, state, params, scale=scale)
        numbers = {"loss": sums.loss, "ce_loss": sums.nll}
        numbers = {name: total / sums.tokens for name, total in numbers.items()} | {
            "grad_norm": optax.global_norm(gradients)
        }
        return optax.apply_updates(params, changes), state, numbers

    def carried(self, params, carry, batch, masks):
        with self.given(masks) if masks else contextlib.nullcontext():
            return self.model.apply(
                {"params": params},
                batch,
                carry,
                train=bool(masks),
                rngs={"dropout": jax.random.key(0)},
                mutable=["penalties"],
                method="hidden",
            )[0][1]

    def advance(self, number):
        """Makes an update; its loss, plain loss and gradient norm."""
        start, rows = (int(self.data[name][number]) for name in ("i", "rows"))
        masks = masks_of(self.stored(f"upd{number}"), self.settings["nlayers"])
        batch = window(self.data["train_data"], start, rows, self.length)
        carry = jax.tree.map(lambda a: a[0], self.carry)
        for time in range(rows):
            token = window(self.data["train_data"], start + time, 1, 1)._replace(
                reset=batch.reset & (time == 0)
            )
            carry = self.read(self.params, carry, jax.tree.map(lambda a: a[0], token), masks)
        scale = jnp.asarray(self.data["drawn"][number] / self.settings["bptt"], jnp.float32)
        self.params, self.state, numbers = self.update(
            self.params, self.state, self.carry, batch, scale, masks
        )
        self.carry = jax.tree.map(lambda a: a[None], carry)
        return numbers

    def validate(self):
        """The validation loss as main.py computes it: over one row more than it predicts."""
        source = self.data["valid_data"]
        batch = jax.tree.map(lambda a: a[0], window(source, 0, len(source) - 1, len(source) - 1))
        nll = (
            float(self.nll(optim.params_to_evaluate(self.state, self.params), batch))
            * (len(source) - 1)
            / len(source)
        )
        self.state = optim.after_evaluation(self.state, nll)
        return nll

    def check(self, place):
        """Parameters, and averages where there are any, to 1e-4 of the largest entry of each."""
        found = self.stored(place)
        averages = {
            key.removeprefix("ax/"): array for key, array in found.items() if key.startswith("ax/")
        }
        close_to_largest(
            self.params,
            parameters_of(
                {key: array for key, array in found.items() if not key.startswith("ax/")}
            ),
        )
        if averages:
            close_to_largest(
                optim.params_to_evaluate(self.state, self.params), parameters_of(averages)
            )


def once(function, whole):
    """The function compiled once, wherever its arguments come from."""
    compiled = jax.jit(function, out_shardings=whole)
    return lambda *arguments: compiled(*jax.device_put(arguments, whole))


def window(source, start, rows, length):
    """So many rows of the columns of `source` and padding to `length`, as a batch of one
    microbatch.
    """
    inputs, targets = (
        np.pad(source[i : i + rows].T.astype(np.int32), ((0, 0), (0, length - rows)))[None]
        for i in (start, start + 1)
    )
    ids, weights = (
        np.arange(len(inputs[0]), dtype=np.int32)[None],
        np.broadcast_to(np.arange(length) < rows, inputs.shape),
    )
    return Batch(
        inputs, targets, weights.astype(np.float32), ids, reset=np.full(ids.shape, start == 0)
    )


def close_to_largest(ours, theirs):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-4 * np.abs(b).max()),
        ours,
        theirs,
    )


@pytest.mark.parametrize("case", TRAJECTORY)
def test_train_trajectory(case, given):
    """Losses, norms, parameters, averages and validation losses of the public code, on its
    windows; it switches by itself.
    """
    ours, losses, switched = Trajectory(case, given), [], None
    epochs, updates, switch = (
        ours.data["epoch"],
        *(ours.settings[name] for name in ("updates", "switch_after_update")),
    )
    # Name of what is stored to the update after which it was
    seen = {"after_1": 1} | {f"after_asgd{n}": switch + n for n in (1, 2, 3) if switch}
    for number in range(updates):
        for name, value in ours.advance(number).items():
            assert float(value) == pytest.approx(ours.data[name][number], rel=1e-4), (name, number)
        for place in [
            place
            for place, after in seen.items()
            if after == number + 1 and f"{place}/decoder.bias" in ours.data
        ]:
            ours.check(place)
        if number + 1 < updates and epochs[number + 1] > epochs[number]:
            losses.append(ours.validate())
            if switched is None and tree_get(ours.state, "switched", False):
                switched = number + 1
    ours.check("after_final")
    assert losses == pytest.approx(ours.settings["val_losses"], rel=1e-4)
    assert switched == switch
