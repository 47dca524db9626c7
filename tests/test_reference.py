"""Equality with numbers that the papers' public code, fairseq, computed.

`tests/fixtures/reference.json` says how each case was set. Weights there are `[out_features,
in_features]`; here a projection is `[width, features]`, so that the input's projections are
transposed and the output's are not.
"""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from adaptive_jax import AdaptiveInput, OwnTable, Softmax, TiedTable
from adaptive_jax.bodies.positions import sinusoids
from adaptive_jax.optimizers import optim, schedules

FIXTURES = Path(__file__).parent / "fixtures"
CASES = json.loads((FIXTURES / "reference.json").read_text())


def arrays(file, case):
    """The arrays of a case, by name."""
    data = np.load(FIXTURES / f"{file}.npz")
    return {
        name.removeprefix(f"{case}/"): data[name]
        for name in data.files
        if name.startswith(f"{case}/")
    }


def close(ours, theirs, rtol=2e-5, atol=2e-5):
    np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=atol)


def close_gradient(ours, theirs):
    """1e-4, relative to each entry or to the largest of its array."""
    close(ours, theirs, rtol=1e-4, atol=1e-4 * np.abs(theirs).max())


class Tied(nn.Module):
    """An adaptive input and an adaptive softmax on its table."""

    input: nn.Module
    share_projections: bool

    def setup(self):
        self.softmax = Softmax(TiedTable(self.input, self.input.features, self.share_projections))


def softmax_of(settings):
    """The module, a function that calls its softmax, and where each reference weight goes: name
    to (path, transposed).
    """
    cutoffs = tuple(cut for cut in settings["cutoff"] if cut < settings["vocab_size"])
    shape = {
        "vocabulary_size": settings["vocab_size"],
        "features": settings["input_dim"],
        "cutoffs": cutoffs,
        "factor": settings["factor"],
    }
    bands = range(len(cutoffs) + 1)
    places = {}
    if settings["tied_embedding"]:
        places["softmax.head.class_proj.weight"] = (("softmax", "clusters"), False)
        for i in bands:
            places[f"input.embeddings.{i}.0.weight"] = (("input", f"table_{i}"), False)
            places[f"input.embeddings.{i}.1.weight"] = (("input", f"projection_{i}"), True)
            if i and not settings["tie_proj"]:
                places[f"softmax.tail.{i - 1}.0.weight"] = (
                    ("softmax", "table", f"projection_{i}"),
                    False,
                )
        return Tied(AdaptiveInput(**shape), settings["tie_proj"]), lambda m: m.softmax, places
    for i in bands[1:]:
        places[f"softmax.tail.{i - 1}.0.weight"] = (("table", f"projection_{i}"), False)
        places[f"softmax.tail.{i - 1}.2.weight"] = (("table", f"table_{i}"), False)
    return Softmax(OwnTable(**shape)), lambda m: m, places


def placed(weights, places):
    """Reference arrays as a tree of our parameters."""
    tree = {}
    for name, (path, transposed) in places.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = jnp.asarray(weights[name].T if transposed else weights[name])
    return tree


def head_split(weights, cutoff):
    """An untied reference head holds the words of band 0 and then the clusters; here they are
    two arrays.
    """
    return {
        "table": {"table_0": jnp.asarray(weights[:cutoff])},
        "clusters": jnp.asarray(weights[cutoff:]),
    }


@pytest.mark.parametrize("case", CASES["adaptive_softmax"])
def test_adaptive_softmax(case):
    """Log-probabilities, losses and the gradients of the summed loss, through the layers, tied
    and own.
    """
    settings, data = CASES["adaptive_softmax"][case], arrays("adaptive_softmax", case)
    model, softmax, places = softmax_of(settings)
    weights = {
        name.removeprefix("weight/"): data[name] for name in data if name.startswith("weight/")
    }
    gradients = {
        name.removeprefix("grad_nll/"): data[name] for name in data if name.startswith("grad_nll/")
    }
    expected = placed({name: gradients[name] for name in places}, places)
    params = placed(weights, places)
    used = set(places)
    if not settings["tied_embedding"]:
        cutoff = settings["cutoff"][0]
        for tree, values in ((params, weights), (expected, gradients)):
            split = head_split(values["softmax.head.weight"], cutoff)
            tree["table"] |= split["table"]
            tree["clusters"] = split["clusters"]
        used.add("softmax.head.weight")
    assert used == set(weights)
    hidden, targets = jnp.asarray(data["hidden"]), jnp.asarray(data["target"], jnp.int32)

    def loss(params, hidden):
        return model.apply(
            {"params": params},
            hidden,
            targets,
            jnp.ones(len(targets)),
            method=lambda m, *args: softmax(m).loss(*args),
        )

    log_probs = model.apply({"params": params}, hidden, method=lambda m, h: softmax(m).log_probs(h))
    close(log_probs, data["log_prob"])
    (total, nll), (d_params, d_hidden) = jax.value_and_grad(loss, (0, 1), has_aux=True)(
        params, hidden
    )
    close(-nll, data["token_log_prob"])
    close(total, data["nll_sum"])
    close_gradient(d_hidden, gradients["hidden"])
    assert jax.tree.structure(d_params) == jax.tree.structure(expected)
    jax.tree.map(close_gradient, d_params, expected)


@pytest.mark.parametrize(
    "case", [name for name in CASES["adaptive_input"] if not name.startswith("init_")]
)
def test_adaptive_input(case):
    """Vectors and gradients; the padding row of band 0, which gets no gradient there, is a word
    like any other here.
    """
    settings, data = CASES["adaptive_input"][case], arrays("adaptive_input", case)
    model = AdaptiveInput(
        settings["vocab_size"],
        settings["output_dim"],
        tuple(settings["cutoff"]),
        settings["factor"],
        settings["initial_dim"],
    )
    places = {
        f"embeddings.{i}.{j}.weight": ((f"{name}_{i}",), j == 1)
        for i in range(len(settings["cutoff"]) + 1)
        for j, name in enumerate(("table", "projection"))
    }
    params = placed({name: data[f"weight/{name}"] for name in places}, places)
    expected = placed({name: data[f"grad/{name}"] for name in places}, places)
    tokens = jnp.asarray(data["tokens"], jnp.int32)
    vectors, pull = jax.vjp(lambda p: model.apply({"params": p}, tokens), params)
    close(vectors, data["output"])
    (gradients,) = pull(jnp.asarray(data["cotangent"]))
    gradients["table_0"] = gradients["table_0"].at[settings["padding_idx"]].set(0.0)
    jax.tree.map(close_gradient, gradients, expected)


@pytest.mark.parametrize("case", ["init_untied", "init_tied"])
def test_fresh_weights(case):
    """Spread and largest entry of fresh tables and projections are those measured on the
    reference.
    """
    settings = CASES["adaptive_input"][case]
    shape = {
        "vocabulary_size": settings["vocab_size"],
        "features": settings["output_dim"],
        "cutoffs": tuple(settings["cutoff"]),
        "factor": settings["factor"],
    }
    keys = jax.random.split(jax.random.key(0))
    fresh = {}
    fresh["input"] = AdaptiveInput(**shape).init(keys[0], jnp.arange(2))["params"]
    if settings["tied"]:
        tied = Tied(AdaptiveInput(**shape), True)
        params = tied.init(
            keys[1], method=lambda m: m.softmax.log_probs(jnp.zeros((1, settings["output_dim"])))
        )
        fresh["softmax.head.class_proj.weight"] = params["params"]["softmax"]["clusters"]
    else:
        own = Softmax(OwnTable(**shape)).init(
            keys[1], jnp.zeros((1, settings["output_dim"])), method="log_probs"
        )["params"]
        for i in (1, 2):
            fresh[f"softmax.tail.{i - 1}.0.weight"] = own["table"][f"projection_{i}"]
            fresh[f"softmax.tail.{i - 1}.2.weight"] = own["table"][f"table_{i}"]
        # There the untied head is one Xavier matrix; here its clusters start as those of a tied
        # head do, twice as wide.
        fresh["softmax.head.weight"] = own["table"]["table_0"]
    for i in range(3):
        fresh[f"input.embeddings.{i}.0.weight"] = fresh["input"][f"table_{i}"]
        fresh[f"input.embeddings.{i}.1.weight"] = fresh["input"][f"projection_{i}"].T
    compared = 0
    for name, expected in settings["init_statistics"].items():
        if name in fresh:
            compared += 1
            values = np.asarray(fresh[name])
            clusters = 2 if name == "softmax.head.weight" else 0
            assert list(values.shape) == [expected["shape"][0] - clusters, expected["shape"][1]]
            # Four standard deviations of a standard deviation of so many draws; their padding rows
            # are zeros.
            assert values.std() == pytest.approx(
                expected["std"], rel=0.003 + 4 * (2 * values.size) ** -0.5
            ), name
            normal = ".0.weight" in name and name.startswith("input")
            assert np.abs(values).max() == pytest.approx(
                expected["abs_max"], rel=0.25 if normal else 0.05
            ), name
    assert compared == (7 if settings["tied"] else 11)


def test_positions():
    """Position 0 is row 2 of the released table; sines first, cosines second."""
    data = np.load(FIXTURES / "positional.npz")
    close(sinusoids(jnp.arange(51), 64), data["d64"])
    close(sinusoids(jnp.arange(0, 51, 10), 1024), data["d1024"])


@pytest.mark.parametrize("case", CASES["nag"])
def test_nesterov(case):
    """Twenty steps under changing rates, clipped and not: parameters after every step."""
    settings, data = CASES["nag"][case], arrays("nag", case)
    rates = jnp.asarray(data["lr"], jnp.float32)
    given = {"momentum": settings["momentum"], "clip_norm": settings["clip_norm"] or None}
    optimizer = schedules.scheduled(functools.partial(optim.nag, **given), lambda step: rates[step])
    params = [jnp.asarray(data["p0_init"]), jnp.asarray(data["p1_init"])]
    state = optimizer.init(params)
    assert len(rates) == settings["steps"] == 20
    for step in range(20):
        gradients = [jnp.asarray(data["g0"][step]), jnp.asarray(data["g1"][step])]
        changes, state = optimizer.update(gradients, state, params)
        params = optax.apply_updates(params, changes)
        for ours, theirs in zip(params, ("p0", "p1"), strict=True):
            close(ours, data[theirs][step])


SCHEDULES = {  # case: cycles, updates compared
    "readme_wiki103": (1, 286_000),
    "paper_wiki103": (4, 286_000),
    "period_from_max_update": (1, 1_000),
    "small_doubling": (5, 260),
    "small_shrinking": (1, 30),  # its cycles do not double, so only the first is ours
}


@pytest.mark.parametrize("case", CASES["cosine_lr"])
def test_learning_rates(case):
    """The rate of every update listed, to 1e-9, in float64; after the last cycle fairseq begins
    another and we do not.
    """
    settings, data = CASES["cosine_lr"][case], arrays("cosine_lr", case)
    cycles, updates = SCHEDULES[case]
    first = int(settings["lr_period_updates"])
    with jax.enable_x64(True):
        rate = schedules.cosine_cycles(
            learning_rate=settings["lr"][0],
            min_learning_rate=settings["min_lr"],
            warmup_from=settings["lr_right_after_construction"],
            warmup_steps=settings["warmup_updates"],
            cycle_steps=first if first > 0 else settings["max_update"] - settings["warmup_updates"],
            cycles=cycles,
            shrink=settings["lr_shrink"],
        )
        steps = data["step"][data["step"] < updates]
        assert len(steps) >= 30
        close(jax.vmap(rate)(jnp.asarray(steps)), data["lr"][: len(steps)], rtol=1e-9, atol=1e-9)
