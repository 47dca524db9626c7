"""Models, dropout masks and training runs of AWD-LSTM's public code, as the reference numbers give
them.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from adaptive_jax.bodies.lstm import State
from adaptive_jax.config.keys import complete
from adaptive_jax.interop.awd_lstm import parameters_of, settings_of
from adaptive_jax.model.gradients import make_gradients
from adaptive_jax.model.language_model import build
from adaptive_jax.numerics import dropout, layers
from adaptive_jax.numerics.layers import Dropout, WeightDropout, WordDropout
from adaptive_jax.optimizers import optim, schedules
from adaptive_jax.parallel import sharding
from tests.reference import sets
from tests.reference.sets import batch_of, close_to_largest, run_once, window

AWD_LSTM = sets.code("awd_lstm")
RATES = {
    "dropoute": "input.word_dropout",
    "dropouti": "body.input_dropout",
    "dropouth": "body.hidden_dropout",
    "dropout": "body.dropout",
    "wdrop": "body.weight_drop",
    "alpha": "body.ar",
    "beta": "body.tar",
}


@pytest.fixture
def given(monkeypatch):
    """`with given(masks):` has dropout layers look up which entries stay, by the layer's name,
    instead of hashing positions.
    """

    @contextlib.contextmanager
    def given(masks):
        asked, left = [None], set(masks)

        def name_of(layer, arguments, settings, context):
            if isinstance(context.module, Dropout | WordDropout | WeightDropout):
                asked[0] = context.module.name
            return layer(*arguments, **settings)

        def look_up(seeds, positions, rate):
            left.discard(asked[0])
            return jnp.asarray(masks[asked[0]] > 0).reshape(*seeds.shape[:-1], -1)[..., positions]

        monkeypatch.setattr(dropout, "keep_mask", look_up)
        monkeypatch.setattr(layers, "keep_mask", look_up)
        with nn.intercept_methods(name_of):
            yield
        assert not left

    return given


def masks_of(arrays, layers):
    """Masks by the names of our layers and in our layout: rows come first, gates are columns."""
    names = {"mask_embed": "drop", "mask_input": "dropout_0", "mask_output": f"dropout_{layers}"}
    names |= {f"mask_hidden{i}": f"dropout_{i + 1}" for i in range(layers)}
    masks = {ours: arrays[name] for name, ours in names.items() if name in arrays}
    masks = {name: mask if name == "drop" else mask.swapaxes(0, 1) for name, mask in masks.items()}
    return masks | {
        f"weight_dropout_{i}": arrays[f"mask_weight{i}"].T
        for i in range(layers)
        if f"mask_weight{i}" in arrays
    }


def loss_of(model, params, batch, carry, train=True):
    """The loss with penalties; the loss alone, penalties, hidden states and the next carry."""
    (hidden, after), sown = model.apply(
        {"params": params},
        batch,
        carry,
        train=train,
        rngs={"dropout": jax.random.key(0)},
        mutable=["penalties"],
        method="hidden",
    )
    result = model.apply(
        {"params": params},
        hidden,
        batch.targets,
        batch.weights,
        method=lambda m, *a: m.output.loss(*a),
    )
    sown = sown.get("penalties", {}).get("body", {})
    terms = {name: jnp.mean(each[0]) for name, each in sown.items()}
    mean = result.total / result.nll.size
    return mean + sum(terms.values()), (mean, terms, hidden, after)


def run(model, params, batch, carry, masks):
    """The result of `loss_of` with these masks; then gradients."""

    def loss(params, carry):
        with masks:
            return loss_of(model, params, batch, carry)

    return run_once(jax.value_and_grad(loss, has_aux=True), params, carry)


def check_model(file, case, given):
    """States, hidden states, both penalties, loss and every gradient of a model with the masks
    of the file.
    """
    settings, arrays = AWD_LSTM.case(file, case)
    weights = dict(arrays.under("weight/"))
    changes = {key: settings.get(name, 0.0) for name, key in RATES.items()}
    model = build(complete(settings_of(weights), changes), settings["ntoken"])
    params = parameters_of(weights)
    layers = len(model.body.widths)
    carry = tuple(State(arrays[f"init_h{i}"], arrays[f"init_c{i}"]) for i in range(layers))
    carry = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), carry)
    first = carry
    for number in range(len(settings["windows"])):
        theirs = arrays.under(f"win{number}/")
        tokens, targets = theirs["tokens"].T, theirs["targets"].T
        batch = batch_of(tokens, targets)
        (loss, (nll, terms, hidden, carry)), gradients = run(
            model, params, batch, carry, given(masks_of(arrays, layers))
        )
        np.testing.assert_allclose(hidden, theirs[f"output{layers - 1}"].swapaxes(0, 1), atol=2e-5)
        for i, state in enumerate(carry):
            np.testing.assert_allclose(state.hidden, theirs[f"new_h{i}"], atol=2e-5)
            np.testing.assert_allclose(state.cell, theirs[f"new_c{i}"], atol=2e-5)
        np.testing.assert_allclose([nll, loss], [theirs["ce_loss_f64"], theirs["loss"]], rtol=2e-6)
        np.testing.assert_allclose(nll, theirs["ce_loss"], rtol=2e-6)
        if "logits" in theirs:
            logits = theirs["logits"].reshape(*theirs["tokens"].shape, -1).swapaxes(0, 1)
            found = model.apply(
                {"params": params}, hidden, method=lambda m, hidden: m.output.log_probs(hidden)
            )
            np.testing.assert_allclose(found, jax.nn.log_softmax(logits), rtol=2e-5, atol=2e-5)
        for ours, name in ("ar", "ar_term"), ("tar", "tar_term"):
            if name in arrays:
                np.testing.assert_allclose(terms.get(ours, 0.0), arrays[name], rtol=1e-5)
        expected = parameters_of(dict(theirs.under("grad/")))
        if np.any(tokens == settings["ntoken"] - 1):
            expected["input"]["table"] = with_last_word(expected["input"]["table"], gradients)
        assert jax.tree.structure(gradients) == jax.tree.structure(expected)
        close_to_largest(gradients, expected)
    if "eval_output" in arrays:
        hidden, _ = model.apply({"params": params}, batch, first, method="hidden")
        flat = hidden.swapaxes(0, 1).reshape(-1, hidden.shape[-1])
        np.testing.assert_allclose(flat, arrays["eval_output"], atol=2e-5)


def with_last_word(theirs, gradients):
    """Their gradient of the table, with ours for the last word: their lookup leaves it out,
    which is a defect of the code.
    """
    ours = np.asarray(gradients["input"]["table"])
    assert np.abs(ours[-1] - theirs[-1]).max() > 1e-2 * np.abs(theirs).max()
    return np.concatenate([theirs[:-1], ours[-1:]])


def at(rate, optimizer, **settings):
    """The optimizer at one rate, or at those of a schedule."""
    schedule = rate if callable(rate) else schedules.constant(rate, warmup_steps=0)
    return schedules.scheduled(functools.partial(optimizer, **settings), schedule)


class Trajectory:
    """A case of the file, trained by our gradients and our optimizer on its windows.

    All windows are padded to one length, so that one program does for all; the carry after a window
    is found token by token.
    """

    def __init__(self, case, given):
        self.settings = AWD_LSTM.settings("train_trajectory", case)
        self.data, self.given = AWD_LSTM.arrays("train_trajectory", f"{case}/"), given
        weights = self.stored("init")
        changes = {ours: self.settings[theirs] for theirs, ours in RATES.items()}
        self.model = build(complete(settings_of(weights), changes), self.settings["ntokens"])
        self.params = jax.tree.map(jnp.asarray, parameters_of(weights))
        self.carry = jax.tree.map(
            lambda a: a[None], self.model.body.initial_carry(self.data["train_data"].shape[1])
        )
        self.optimizer = self.ours()
        self.state, self.length = self.optimizer.init(self.params), max(self.data["rows"])
        mesh = sharding.device_mesh()
        self.gradients = make_gradients(self.model, mesh, 0)
        self.update = once(self.updated, sharding.replicated(mesh))
        self.read = once(self.carried, sharding.replicated(mesh))
        self.nll = jax.jit(
            lambda params, batch: self.model.apply({"params": params}, batch)[0].nll.mean()
        )

    def ours(self):
        rate = self.settings["lr"]
        shared = {"clip_norm": self.settings["clip"], "l2_decay": self.settings["wdecay"]}
        if "optimizer" not in self.settings:
            # With a nonmono of 0 the public code stops before it switches.
            nonmono = self.settings["nonmono"] or 1 + self.settings["updates"]
            return at(rate, optim.nt_asgd, nonmono=nonmono, form="torch", **shared)
        # main.py divides the rate by 10 after the epoch that --when names.
        first = int(np.sum(self.data["epoch"] <= self.settings["when"]))
        return at(lambda count: jnp.where(count < first, rate, rate / 10), optim.adam, **shared)

    def stored(self, place):
        return dict(self.data.under(f"{place}/"))

    def updated(self, params, state, carry, batch, scale, masks):
        with self.given(masks) if masks else contextlib.nullcontext():
            step = jnp.zeros((), jnp.int32)
            gradients, _, sums, _ = self.gradients(params, {}, step, batch, carry, {})
        gradients = jax.tree.map(lambda g: g / sums.tokens, gradients)
        changes, state = self.optimizer.update(gradients, state, params, scale=scale)
        numbers = {"loss": sums.loss / sums.tokens, "ce_loss": sums.nll / sums.tokens}
        numbers["grad_norm"] = optax.tree.norm(gradients)
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
        rows = len(source) - 1
        batch = jax.tree.map(lambda a: a[0], window(source, 0, rows, rows))
        params = optim.params_to_evaluate(self.state, self.params)
        nll = float(self.nll(params, batch)) * rows / len(source)
        self.state = optim.after_evaluation(self.state, nll)
        return nll

    def check(self, place):
        """Parameters, and averages where there are any, to 1e-4 of the largest entry of each."""
        found = self.stored(place)
        averages = dict(self.data.under(f"{place}/ax/"))
        theirs = {key: array for key, array in found.items() if not key.startswith("ax/")}
        close_to_largest(self.params, parameters_of(theirs))
        if averages:
            ours = optim.params_to_evaluate(self.state, self.params)
            close_to_largest(ours, parameters_of(averages))


def once(function, whole):
    """The function compiled once, wherever its arguments come from."""
    compiled = jax.jit(function, out_shardings=whole)
    return lambda *arguments: compiled(*jax.device_put(arguments, whole))
