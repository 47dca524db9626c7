"""The numbers of AWD-LSTM's public code, of torch.nn.LSTM and of torch's optimizers; each test is
named after the file that it reads.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.tree_utils import tree_get, tree_set

from adaptive_jax.bodies.lstm import State, Weights, lstm
from adaptive_jax.config.keys import complete
from adaptive_jax.data.batches import streams
from adaptive_jax.data.batches.windows import Windows, windows
from adaptive_jax.interop.awd_lstm import config_of, parameters_of, settings_of
from adaptive_jax.interop.words import awd_lstm_words, read_corpus
from adaptive_jax.losses import banded, distribution
from adaptive_jax.model.language_model import build, init_params, parameter_shapes
from adaptive_jax.numerics.bands import Band, band_sizes, split_rows
from adaptive_jax.optimizers import optim
from adaptive_jax.scores.cache import Cache, interpolate, log_probs
from tests import refuses
from tests.data.test_streams import batches_of, together
from tests.random_runs import quiet
from tests.reference import awd_lstm, sets
from tests.reference.awd_lstm import AWD_LSTM, Trajectory, at, check_model
from tests.reference.sets import close_to_largest, run_once
from tests.scores.test_caches import log_softmax

given = awd_lstm.given


@pytest.mark.parametrize("case", AWD_LSTM.cases("model_lstm"))
def test_model_lstm(case, given):
    """Windows with carried states; the last word gets a gradient as an input."""
    check_model("model_lstm", case, given)


@pytest.mark.parametrize("case", AWD_LSTM.cases("dropout", has="windows"))
def test_dropout(case, given):
    """Each dropout alone, all of them with both penalties, and then the hidden states of
    evaluation.
    """
    check_model("dropout", case, given)


@pytest.mark.parametrize("case", AWD_LSTM.cases("ar_tar", has="windows"))
def test_ar_tar(case, given):
    """Both penalties, each alone, without dropout, in a window of two steps."""
    check_model("ar_tar", case, given)


def layer_of(arrays, start, bias=None):
    """A layer's weights in our layout; both biases added, or `bias` alone, which gradients
    share.
    """
    biases = ["bias_ih_l0", "bias_hh_l0"]
    if bias:
        np.testing.assert_allclose(*(arrays[start + name] for name in biases), atol=1e-12)
        biases = [bias]
    given = (
        arrays[f"{start}weight_ih_l0"].T,
        arrays[f"{start}weight_hh_l0"].T,
        sum(arrays[start + name] for name in biases),
    )
    return Weights(*map(jnp.asarray, given))


@pytest.mark.parametrize("case", AWD_LSTM.cases("torch_lstm"))
def test_torch_lstm(case):
    """One layer: hidden states, the last state, and the gradients of inputs, first state and
    parameters.
    """
    AWD_LSTM.settings("torch_lstm", case)
    arrays = AWD_LSTM.arrays("torch_lstm", f"{case}/")
    x, pull = (jnp.asarray(arrays[name].swapaxes(0, 1)) for name in ("x", "cotangent"))
    given = (
        x,
        layer_of(arrays, "weight/"),
        State(jnp.asarray(arrays["h0"]), jnp.asarray(arrays["c0"])),
    )

    def both(x, weights, state):
        hidden, vjp, after = jax.vjp(lstm, x, weights, state, has_aux=True)
        return hidden, after, vjp(pull)

    hidden, after, (of_x, of_weights, of_state) = run_once(both, *given)
    np.testing.assert_allclose(hidden, arrays["y"].swapaxes(0, 1), atol=2e-5)
    np.testing.assert_allclose(after.hidden, arrays["hn"], atol=2e-5)
    np.testing.assert_allclose(after.cell, arrays["cn"], atol=2e-5)
    close_to_largest(of_x, arrays["grad_x"].swapaxes(0, 1))
    close_to_largest(of_state.hidden, arrays["grad_h0"])
    close_to_largest(of_state.cell, arrays["grad_c0"])
    close_to_largest(of_weights, layer_of(arrays, "grad/", bias="bias_ih_l0"))


@pytest.mark.parametrize("case", AWD_LSTM.cases("counts_init", has="per_parameter"))
def test_counts_init(case):
    """The numbers of parameters. Where the softmax is split, as for WikiText-103, its classes
    have projections here besides.
    """
    counts = AWD_LSTM.settings("counts_init", case)
    assert len(counts["per_parameter"]) == 2 + 4 * counts["nlayers"] + (not counts["tied"]) + 2 * (
        len(counts["splits"]) > 0
    )
    shapes = {
        name: np.broadcast_to(np.float32(0), shape)
        for name, shape in counts["per_parameter"].items()
    }
    if not counts["tied"]:
        shapes["decoder.weight"] = np.broadcast_to(np.float32(1), shapes["decoder.weight"].shape)
    options = {"splits": [0, *counts["splits"], 10**8]}
    if [cut for cut in counts["splits"] if cut >= counts["ntoken"]]:
        with refuses("splits"):
            config_of(options, shapes, counts["ntoken"])
        return
    shapes = parameter_shapes(build(config_of(options, shapes, counts["ntoken"]), counts["ntoken"]))
    table = {
        name: leaf
        for name, leaf in shapes["output"]["table"].items()
        if not name.startswith("projection_")
    }
    assert len(shapes["output"]["table"]) - len(table) == len(counts["splits"])
    shapes["output"]["table"] = table
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == counts["total_params"]


@pytest.mark.parametrize("case", AWD_LSTM.cases("counts_init", has="parameters"))
def test_counts_init_weights(case):
    """Initial weights: the range, mean and deviation of every tensor of input and body, within
    four standard errors.
    """
    theirs = AWD_LSTM.settings("counts_init", case)
    shapes = {
        name: np.broadcast_to(np.float32(0), each["shape"])
        for name, each in theirs["parameters"].items()
    }
    start = theirs["parameters"]["encoder.weight"]["max"]
    model = build(complete(settings_of(shapes), {"input.init_range": start}), theirs["ntoken"])
    ours = run_once(lambda: init_params(model, 0))

    def expected(statistic):
        values = {
            name: np.full(each["shape"], each[statistic])
            for name, each in theirs["parameters"].items()
        }
        return jax.tree.map(np.max, parameters_of(values))

    lowest, highest, means, deviations = map(expected, ("min", "max", "mean", "std"))
    for group in "input", "body":
        for name, found in ours[group].items():
            low, high = lowest[group][name], highest[group][name]
            ends, spread = [found.min(), found.max()], 0.02 * (high - low)
            np.testing.assert_allclose(ends, [low, high], atol=spread)
            mean, deviation = means[group][name], deviations[group][name]
            error = 4 * deviation * (2 / found.size) ** 0.5
            np.testing.assert_allclose([found.mean(), found.std()], [mean, deviation], atol=error)


def optimizer_of(settings):
    """Ours with the settings of a case; PyTorch's `lambd` is one more L2 decay, after clipping."""
    shared = {"clip_norm": settings["clip"], "l2_decay": settings["weight_decay"]}
    if settings["optimizer"] == "asgd":
        shared["l2_decay"] += settings["lambd"]
        return at(settings["lr"], optim.asgd, form="torch", **shared)
    return at(settings["lr"], optim.OPTIMIZERS[settings["optimizer"]], **shared)


def as_torch(state, settings, step, rates):
    """The state of ASGD before an update: PyTorch averages `t0` updates later, and its rate falls
    by a power of the updates done.
    """
    if 0 < step <= settings["t0"] + 1:
        state = tree_set(state, averaged=jnp.ones(()))
    if step and settings["lambd"]:
        fallen = rates[step - 1] / (1 + settings["lambd"] * rates[step - 1] * step) ** 0.75
        state = tree_set(state, rate=jnp.asarray(fallen))
    return state


@pytest.mark.parametrize("case", AWD_LSTM.cases("optim"))
def test_optim(case):
    """Steps on given gradients: parameters, averages and moments after each, and the rate."""
    settings, data = AWD_LSTM.case("optim", case)
    with jax.enable_x64(settings["dtype"] == "float64"):
        tolerance = 1e-10 if settings["dtype"] == "float64" else 2e-6
        optimizer = optimizer_of(settings)
        parts = range(sum(name.endswith("_init") for name in data))
        params = [jnp.asarray(data[f"p{i}_init"], settings["dtype"]) for i in parts]
        state, update = optimizer.init(params), jax.jit(optimizer.update)
        scales = data["seq_len"] / settings["bptt"]
        np.testing.assert_allclose(settings["lr"] * scales, data["lr"], rtol=1e-12)
        for step in range(settings["steps"]):
            if settings["optimizer"] == "asgd":
                state = as_torch(state, settings, step, data["lr"])
            gradients = [jnp.asarray(data[f"g{i}"][step], settings["dtype"]) for i in parts]
            norm = optax.tree.norm(gradients)
            np.testing.assert_allclose(norm, data["grad_norm"][step], rtol=tolerance)
            changes, state = update(gradients, state, params, scale=scales[step])
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


@pytest.mark.parametrize("case", AWD_LSTM.cases("nt_trigger"))
def test_nt_trigger(case):
    """Averages begin after the same evaluation of the same history; none after it is compared.

    With a nonmono of 0 the public code stops at the second evaluation; it is refused here.
    """
    settings = AWD_LSTM.settings("nt_trigger", case)
    if not settings["nonmono"]:
        with refuses("nonmono"):
            optim.from_config(complete({"optimizer.name": "nt_asgd", "optimizer.nonmono": 0}))
        return
    state = optim.nt_asgd(1.0, nonmono=settings["nonmono"]).init([jnp.zeros(2)])
    seen = [False]
    for nll in settings["val_losses"]:
        state = optim.after_evaluation(state, nll)
        seen.append(bool(tree_get(state, "switched")))
    switches = [epoch for epoch in range(1, len(seen)) if seen[epoch] != seen[epoch - 1]]
    assert switches == [settings["switch_at_end_of_epoch"]] * (
        settings["switch_at_end_of_epoch"] is not None
    )


@pytest.mark.parametrize("case", AWD_LSTM.cases("train_trajectory"))
def test_train_trajectory(case, given):
    """Losses, norms, parameters, averages and validation losses of the public code, on its
    windows; it switches by itself.
    """
    ours, losses, switched = Trajectory(case, given), [], None
    epochs, switch = ours.data["epoch"], ours.settings["switch_after_update"]
    base = np.where(epochs <= ours.settings.get("when", max(epochs)), 1.0, 0.1)
    rates = ours.settings["lr"] * base * ours.data["drawn"] / ours.settings["bptt"]
    np.testing.assert_allclose(rates, ours.data["lr"], rtol=1e-12)
    # Name of what is stored to the update after which it was
    seen = {}
    for name in ours.data:
        if found := re.match(r"after_(asgd)?(\d+)/", name):
            seen[name.split("/")[0]] = (switch if found[1] else 0) + int(found[2])
    updates = ours.settings["updates"]
    for number in range(updates):
        for name, value in ours.advance(number).items():
            assert float(value) == pytest.approx(ours.data[name][number], rel=1e-4), (name, number)
        for place in [place for place, after in seen.items() if after == number + 1]:
            ours.check(place)
        if number + 1 < updates and epochs[number + 1] > epochs[number]:
            losses.append(ours.validate())
            if switched is None and tree_get(ours.state, "switched", False):
                switched = number + 1
    ours.check("after_final")
    count = sum(leaf.size for leaf in jax.tree.leaves(ours.params))
    assert count == ours.settings["total_params"]
    assert losses == pytest.approx(ours.settings["val_losses"], rel=1e-4)
    assert switched == switch


@pytest.mark.parametrize("case", AWD_LSTM.cases("batching", has="n"))
def test_batching_lengths(case):
    """Lengths of windows from the public code's random numbers, before rounding, and rates."""
    settings, arrays = AWD_LSTM.case("batching", case)
    source = np.random.RandomState(settings["numpy_seed"])
    drawn = [(source.random_sample(), source.standard_normal()) for _ in range(settings["n"])]
    lengths = streams.bptt_lengths(settings["bptt"], *np.array(drawn).T)
    np.testing.assert_array_equal(lengths, arrays["seq_len"])
    np.testing.assert_array_equal(np.array(drawn)[:, 0] < 0.95, arrays["full"])
    np.testing.assert_allclose(lengths / settings["bptt"], arrays["lr_factor"], rtol=1e-12)


@pytest.mark.parametrize("case", AWD_LSTM.cases("batching", has="tokens"))
def test_batching_rows(case):
    """The public code's rows; there the first token of each is not predicted, here it follows
    the one before it in the split.
    """
    settings, rows = AWD_LSTM.case("batching", case)
    ours = batches_of(settings["tokens"], 2 * settings["tokens"], settings["bsz"])
    [[targets, _]], _ = together(ours, 0, 1)
    np.testing.assert_array_equal(targets - targets.min(), rows["result"].T - rows["result"].min())


@pytest.mark.parametrize("case", AWD_LSTM.cases("batching", has="updates"))
def test_batching_epoch_walk(case, monkeypatch):
    """The public code's windows of one epoch, given its lengths. It predicts all tokens of a row
    but the first.
    """
    case, arrays = AWD_LSTM.case("batching", case)
    monkeypatch.setattr(streams, "draw", lambda base, source, count: arrays["drawn"])
    batches = batches_of(case["rows_used"] * case["batch_size"], case["bptt"], case["batch_size"])
    _, [epoch, *_] = together(batches, 0, case["updates"] + 1)
    first = epoch[0][0][0, 0]
    np.testing.assert_array_equal([targets[0, 0] - first for targets, *_ in epoch], arrays["i"])
    np.testing.assert_array_equal([targets.shape[1] for targets, *_ in epoch], arrays["rows"])
    lengths = np.array([time for *_, time in epoch])
    np.testing.assert_allclose(case["base_lr"] * lengths / case["bptt"], arrays["lr"], rtol=1e-12)


@pytest.mark.parametrize("case", AWD_LSTM.cases("batching", has="seq_len"))
def test_batching_windows(case):
    """A window of the public code is one of evaluation here: its inputs, its targets, and where
    it is cut short.
    """
    settings, arrays = AWD_LSTM.case("batching", case)
    begin, length = settings["i"], settings["seq_len"] or settings["bptt"]
    ids, columns = settings["rows_of_source"], arrays["data"].shape[1]
    source = arrays["data"][0, 0] - begin + np.arange(columns * ids).reshape(columns, ids)
    parts = []
    for row in source[:, begin:]:  # each as a split of its own, whose first token is only read
        _, batches = windows(
            row[1:].astype(np.int32), int(row[0]), Windows(length, 0, "none", "streams", 1)
        )
        window, at = next(batches)
        parts.append((window.batch.inputs[0, : len(at)], window.batch.targets[0, : len(at)]))
    inputs, targets = (np.stack(part) for part in zip(*parts, strict=True))
    assert begin + len(inputs[0]) <= ids - 1
    np.testing.assert_array_equal(inputs.T, arrays["data"])
    np.testing.assert_array_equal(targets.T.ravel(), arrays["target"])


@pytest.mark.parametrize("case", AWD_LSTM.cases("corpus"))
def test_corpus(case, tmp_path):
    """Words get ids as they appear in train, valid and test; empty lines end too; the same text
    gives the same tokens.
    """
    case = AWD_LSTM.settings("corpus", case)
    for split, text in case["texts"].items():
        (tmp_path / f"{split}.txt").write_text(text)
    counts = read_corpus(tmp_path)
    assert (
        list(counts) == case["idx2word"]
        and counts == case["counts"]
        and sum(counts.values()) == case["total"]
    )
    table = np.arange(10.0)[:, None]
    vocabulary, state = awd_lstm_words(
        tmp_path, {"encoder.weight": table, "rnns.0.bias": table, "decoder.bias": table[:, 0]}
    )
    theirs = state["encoder.weight"][:, 0].astype(int)
    np.testing.assert_array_equal(state["decoder.bias"], theirs)
    np.testing.assert_array_equal(state["rnns.0.bias"], table)
    for split, text in case["texts"].items():
        ids = vocabulary.encode_lines(text.splitlines())
        assert theirs[ids].tolist() == case[split]
        np.testing.assert_array_equal(
            vocabulary.counts, [case["counts"][case["idx2word"][i]] for i in theirs]
        )


@pytest.mark.parametrize("case", AWD_LSTM.cases("pointer_cache"))
def test_pointer_cache(case):
    """Wherever the public code uses its cache. It leaves out one that is not full, and the
    first word of a later chunk.
    """
    settings, arrays = AWD_LSTM.settings("pointer_cache", case), AWD_LSTM.arrays("pointer_cache")
    used = arrays[f"{case}/cache_used"] == 1
    logits = arrays["hidden"] @ arrays["decoder_weight"].T + arrays["decoder_bias"]
    np.testing.assert_allclose(logits, arrays["logits"], rtol=2e-5, atol=2e-5)
    targets = arrays["source"][1:].astype(np.int32)
    nll = -log_softmax(arrays["logits"])[np.arange(len(targets)), targets]
    cache = Cache(theta=(settings["theta"],), cache_size=settings["window"])
    [chances] = log_probs(cache, arrays["hidden"], targets, logits.shape[1], quiet)
    ours = np.exp(-interpolate(nll, chances, 1 - settings["lambdah"]))
    mixed = np.where(used, ours, np.exp(-nll))
    np.testing.assert_allclose(mixed, arrays[f"{case}/p"], rtol=2e-5)
    loss = -np.log(mixed).sum() / len(arrays["source"])
    np.testing.assert_allclose(loss, arrays[f"{case}/loss"], rtol=2e-5)
    begins = np.cumsum([0, *settings["chunks"][:-1]])
    full = np.arange(len(targets)) > settings["window"]
    np.testing.assert_array_equal(used[full], ~np.isin(np.flatnonzero(full), begins))
    assert not used[~full].any()
    assert (np.abs(ours - np.exp(-nll))[1:] > 0).all()  # ours counts from its first entry on


@pytest.mark.parametrize("case", AWD_LSTM.cases("splitcross"))
def test_splitcross(case):
    """Loss, gradients and log-probabilities. There the k-th split has the k-th tombstone from
    the end; here they are in order.
    """
    settings, arrays = AWD_LSTM.case("splitcross", case)
    splits = tuple(settings["splits"])
    if splits and splits[-1] >= settings["ntoken"]:
        with refuses("cutoff"):
            band_sizes(settings["ntoken"], splits)
        return
    sizes = band_sizes(settings["ntoken"], splits)
    names = ["hiddens", "weight", "bias"] + ["tail_vectors", "tail_bias"] * (len(sizes) > 1)
    targets = arrays["targets"].astype(np.int32)

    def layers(weight, bias, vectors=None, more=None):
        bands = [
            Band(table, None, part)
            for table, part in zip(split_rows(weight, sizes), split_rows(bias, sizes), strict=True)
        ]
        return bands, None if vectors is None else Band(vectors[::-1], None, more[::-1])

    @jax.jit
    def everything(hidden, *params):
        def loss(hidden, *params):
            return banded.loss(
                hidden, targets, jnp.full(len(targets), 1 / len(targets)), *layers(*params)
            )[0]

        values = jax.value_and_grad(loss, argnums=tuple(range(1 + len(params))))(hidden, *params)
        return values, distribution.log_probs(hidden, *layers(*params))

    (loss, gradients), log_probs = everything(*(arrays[name] for name in names))
    np.testing.assert_allclose(loss, arrays["loss"], rtol=1e-6)
    for name, ours in zip(names, gradients, strict=True):
        theirs = arrays[f"grad/{name}"]
        np.testing.assert_allclose(ours, theirs, atol=1e-4 * np.abs(theirs).max(), err_msg=name)
    picked = np.asarray(log_probs)[np.arange(len(targets)), targets]
    np.testing.assert_allclose(-picked.mean(), arrays["loss"], rtol=1e-6)
    if "logprob" in arrays:
        np.testing.assert_allclose(log_probs, arrays["logprob"], atol=2e-5)


LEFT_OUT = sets.SIZES | {
    "batching:m*": "of lengths, which are compared one by one",
    "batching:rows": "with a row that is never predicted",
    "counts_init:decoder_weight_is_encoder_weight": "the tensors say it",
    "counts_init:init_hidden*": "a state of zeros for each layer",
    "nt_trigger:epochs_that_saved": "of losses, which are read",
    "pointer_cache:bptt": "its chunks are read",
    "splitcross:targets_per_split": "of targets, which are read",
    "train_trajectory:*best_val_loss": "of losses, which are compared",
    "train_trajectory:stored_loss": "of losses, which are compared",
    "*/win*/raw_output*": "before dropout, what is after it is compared",
    "*/win*/output?": "those of inner layers make the last ones, which are compared",
    "*/eta_*": "what parameters and averages show",
    "*/mu_*": "what parameters and averages show",
    "*/asgd": "the update after which averages begin is compared",
    "*_float32": "what the public code loses in float32",
}
ZEROS = "vectors of classes, which begin as those of words do here"
LEFT_OUT |= {
    f"counts_init/{case}": ZEROS for case in AWD_LSTM.cases("counts_init", has="tail_bias_all_zero")
}
ALONE = "a kind of dropout alone: models with each are compared"
APART = {f"dropout/{case}": ALONE for case in AWD_LSTM.cases("dropout", has="p")}
ONE_STEP = "no number there; tests/bodies/test_lstm.py has the penalty of one step, 0"
APART |= {f"ar_tar/{case}": ONE_STEP for case in AWD_LSTM.cases("ar_tar", has="tar_is_nan")}
LEFT_OUT |= APART | {f"{case}/*": why for case, why in APART.items()}


def test_all_is_read(request):
    """A case, an array or a file that no test reads would be a number that nothing checks."""
    sets.assert_all_is_read(AWD_LSTM, request, LEFT_OUT)
