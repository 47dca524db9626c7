"""Equality with numbers that fairseq's gated convolutional model computed.

The settings of each case stand in its JSON file; the converter makes configs of them, and maps
fairseq's tensors, and gradients under their names, to ours.
"""

import functools
import itertools
import math
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from adaptive_jax.bodies.gated_conv import Convolution
from adaptive_jax.interop import fconv, torch_files
from adaptive_jax.interop.convert import read_checkpoint
from adaptive_jax.interop.fairseq import SOFTMAX
from adaptive_jax.interop.fconv import layers_of, parameters_of
from adaptive_jax.interop.words import fairseq_words
from adaptive_jax.model.language_model import build, parameter_shapes
from adaptive_jax.numerics import dropout
from adaptive_jax.numerics.batch import Batch
from adaptive_jax.numerics.layers import Dropout
from adaptive_jax.optimizers import optim, schedules
from tests.reference import sets
from tests.reference.sets import close_to_largest, run_once

GCNN = sets.code("gcnn")
LEGACY = GCNN.named("*_legacy.pt")
CASES = [name for name in GCNN.named("*.pt") if name not in LEGACY]
PAD = 1  # fairseq's id of padding; here it is a word like others


def settings_of(name):
    """The one case of a JSON file."""
    [case] = GCNN.cases(name)
    return GCNN.settings(name, case)


def config_of(options, vocabulary_size, blocks=()):
    """The config that the converter makes of the options of a case; blocks: instead of its own."""
    softmax = [] if options["criterion"] == "cross_entropy" else [f"{SOFTMAX}.head"]
    config = fconv.config_of(options, dict.fromkeys(softmax), vocabulary_size)
    return config | {"body": config["body"] | ({"blocks": blocks} if blocks else {})}


def close(ours, theirs, tolerance=2e-5):
    np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance)


def batch_of(inputs, targets):
    """Rows as a batch, in which padding has no weight."""
    inputs, targets = jnp.asarray(inputs, jnp.int32), jnp.asarray(targets, jnp.int32)
    return Batch(inputs, targets, jnp.float32(targets != PAD), jnp.arange(len(inputs)))


def criterion(model, params, batch):
    """fairseq's training loss; hidden states, log-probabilities and convolutions.

    The loss leaves out, as `ignore_index`, the term within a cluster of the cluster's word 1.
    """
    variables = {"params": params}
    (hidden, _), inner = model.apply(
        variables,
        batch,
        method="hidden",
        mutable=["intermediates"],
        capture_intermediates=lambda module, _: isinstance(module, Convolution),
    )
    given = variables, hidden, batch.targets, batch.weights
    total = model.apply(*given, method=lambda m, *given: m.output.loss(*given)).total
    log_probs = model.apply(variables, hidden, method=lambda m, hidden: m.output.log_probs(hidden))
    for first, end in itertools.pairwise((*model.output.table.cutoffs, log_probs.shape[-1])):
        cluster = jax.nn.logsumexp(log_probs[..., first:end], axis=-1)
        left_out = (batch.targets == first + PAD) * batch.weights
        total -= jnp.sum(left_out * (cluster - log_probs[..., first + PAD]))
    return total, (hidden, log_probs, inner["intermediates"]["body"])


def without_padding_row(gradients):
    """fairseq's padding has a vector of zeros that is not trained."""
    table = gradients["input"]["table"].copy()
    table[PAD] = 0
    return gradients | {"input": {"table": table}}


def one_by_one(model, params, tokens):
    """Hidden states of `tokens [rows, time]`, decoded one at a time, and the carry after each."""

    def step(carry, column):
        hidden, carry = model.apply({"params": params}, column[:, None], carry, method="step")
        return carry, (hidden[:, 0], carry)

    _, (hidden, carries) = jax.lax.scan(step, model.body.cache(len(tokens), 0), tokens.T)
    return jnp.swapaxes(hidden, 0, 1), carries


def keeping(masks):
    """`Dropout` keeps what `masks` say, in the order of the calls."""
    masks = iter(masks)

    def keep(call, given, how, context):
        if not isinstance(context.module, Dropout) or not context.module.rate:
            return call(*given, **how)
        return given[0] * next(masks) / (1 - context.module.rate)

    return nn.intercept_methods(keep)


def with_masks(model, params, batch, masks):
    """Hidden states in training with these masks."""
    with keeping(masks):
        hidden, _ = model.apply({"params": params}, batch, train=True, method="hidden")
    return hidden


def loss_with_masks(model, params, hidden, targets, masks):
    """The training loss of the output where it keeps what `masks` say: of its input, and of
    each tail's own tokens in turn.
    """
    inputs, *tails = masks or [None]
    bands = np.searchsorted(model.output.table.cutoffs, targets.ravel(), side="right")
    tables = {}  # by the width of a tail: what each token keeps
    for i, mask in enumerate(tails, start=1):
        tables[mask.shape[1]] = np.zeros((targets.size, mask.shape[1]), bool)
        tables[mask.shape[1]][bands == i] = mask

    def look_up(seeds, positions, rate):
        return jnp.asarray(tables[len(positions)])[seeds[:, 0]]

    numbered = mock.patch.multiple(
        dropout, row_seeds=lambda key, numbers: jnp.stack([numbers, numbers], -1), keep_mask=look_up
    )
    with keeping([] if inputs is None else [inputs.reshape(hidden.shape)]), numbered:
        how = {"train": True, "rngs": {"dropout": jax.random.key(0)}}
        given = {"params": params}, hidden, jnp.asarray(targets, jnp.int32)
        loss = model.apply(*given, **how, method=lambda m, *a, **how: m.output.loss(*a, **how))
    return loss.total


@functools.cache
def computed(name):
    """All that a file has, from our model: one compiled program."""
    case, arrays = settings_of(name), GCNN.arrays(name)
    options, layers = case["model_options"], case["layers_expanded"]
    assert layers_of(options["decoder_layers"]) == [tuple(layer) for layer in layers]
    config = config_of(options, case["vocab_size"])
    single = config_of(options, case["vocab_size"], blocks_single(config["body"]["blocks"]))
    model, unrepeated = build(config, case["vocab_size"]), build(single, case["vocab_size"])
    state = torch_files.read(GCNN.path(f"{name}.pt"))["model"]
    both = batch_of(
        *(
            np.concatenate([arrays[f"batch{i}/{what}"] for i in range(2)])
            for what in ("src_tokens", "target")
        )
    )
    first = jax.tree.map(lambda a: a[: len(arrays["batch0/target"])], both)
    of_first = jnp.arange(len(both.inputs)) < len(first.inputs)
    weights = jnp.stack([both.weights * of_first[:, None], both.weights * ~of_first[:, None]])
    calls = [where for _, _, where in case["dropout_calls (call, p, where)"]]
    masks = [arrays[f"dropout/keep/{i}"] for i in range(len(calls))]
    masks = [
        mask.swapaxes(0, 1) if "[T,B,C]" in where else mask
        for mask, where in zip(masks, calls, strict=True)
    ]
    of_body = (len(layers) + 1 + (options["criterion"] == "cross_entropy")) * bool(
        options["dropout"]
    )

    def program(params, single_params):
        losses = jax.value_and_grad(
            lambda params, weights: criterion(model, params, both._replace(weights=weights)),
            has_aux=True,
        )
        (loss, (hidden, log_probs, inner)), gradients = jax.lax.map(
            functools.partial(losses, params), weights
        )
        hidden, log_probs, inner = jax.tree.map(lambda a: a[0], (hidden, log_probs, inner))
        dropped = with_masks(unrepeated, single_params, first, masks[:of_body])
        return {
            "loss": loss,
            "gradients": gradients,
            "hidden": hidden,
            "log_probs": log_probs,
            "inner": inner,
            "steps": one_by_one(model, params, first.inputs),
            "dropped": dropped,
            "loss_dropped": loss_with_masks(
                model, params, dropped, arrays["batch0/target"], masks[of_body:]
            ),
        }

    return (
        config,
        model,
        arrays,
        run_once(program, parameters_of(state, config), parameters_of(state, single)),
    )


def blocks_single(blocks):
    """The same blocks, none repeated: their layers run without a scan."""
    return tuple((1, *block) for repeat, *block in blocks for _ in range(repeat))


def layers_in(model, tree):
    """Values of each layer in `tree`, parameters or intermediates of the body, first layer
    first.
    """
    for i, run in enumerate(model.body.stages):
        for number in range(run.count):
            for j in range(len(run.layers)):
                layer = tree[f"blocks_{i}"][f"layer_{j}"]
                yield jax.tree.map(
                    lambda a, number=number, run=run: a[number] if run.count > 1 else a, layer
                )


@pytest.mark.parametrize("name", CASES)
def test_outputs(name):
    """Convolutions, hidden states, log-probabilities and losses, padding on the right and on
    the left among the batches.
    """
    _, model, arrays, found = computed(name)
    count, log_probs = len(arrays["batch0/target"]), np.asarray(found["log_probs"])
    for i, rows in enumerate((slice(count), slice(count, None))):
        expected = arrays.under(f"batch{i}/")
        real = expected["target"] != PAD
        assert real.sum() == expected["sample_size"]
        close(found["hidden"][rows], expected["fc2" if "fc2" in expected else "final_hidden"])
        token = np.take_along_axis(log_probs[rows], expected["target"][..., None], axis=-1)[..., 0]
        close(token[real], expected["token_log_prob"][real])
        nll = -token[real].astype(np.float64)
        np.testing.assert_allclose(nll.sum(), expected["nll_sum"], rtol=1e-6)
        np.testing.assert_allclose(found["loss"][i], expected["criterion_loss_sum"], rtol=1e-6)
        np.testing.assert_allclose(np.exp(nll.mean()), expected["eval_ppl"], rtol=1e-5)
    close(log_probs[:count], arrays["batch0/log_prob"])
    close(log_probs[count], arrays["batch1/log_prob_row0"])
    [entry] = found["inner"]["entry"]["__call__"]
    close(entry[:count], arrays["batch0/layer_in/0"])
    maps = [layer["__call__"][0] for layer in layers_in(model, found["inner"])]
    for i, outputs in enumerate(maps):
        close(outputs[:count], arrays[f"batch0/conv_out/{i}"])
    assert f"batch0/conv_out/{len(maps)}" not in arrays


@pytest.mark.parametrize("name", CASES)
def test_gradients(name):
    """Of every parameter, g and v apart; the second batch has those of the table, of `fc1` and
    of an adaptive softmax.
    """
    config, model, arrays, found = computed(name)
    first, second = (dict(arrays.under(f"batch{i}/grad/")) for i in (0, 1))
    ours = [
        without_padding_row(jax.tree.map(lambda a, i=i: np.asarray(a[i]), found["gradients"]))
        for i in (0, 1)
    ]
    close_to_largest(ours[0], parameters_of(first, config), rtol=1e-4)
    expected = parameters_of(first | second, config)
    close_to_largest(ours[1]["input"], expected["input"], rtol=1e-4)
    close_to_largest(ours[1]["body"]["entry"], expected["body"]["entry"], rtol=1e-4)
    if not model.body.output_width:
        close_to_largest(ours[1]["output"], expected["output"], rtol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_one_token_at_a_time(name):
    """Hidden states, and the memory after some tokens; fairseq's also holds the current input."""
    _, model, arrays, found = computed(name)
    buffers = arrays.under("incremental/buffer_after_")
    [tokens] = {key.split("/")[0] for key in buffers}
    hidden, carries = found["steps"]
    if model.body.output_width:
        close(hidden, arrays["batch0/fc2"])
    else:
        close(hidden, arrays["incremental/final_hidden"])
    after = jax.tree.map(lambda a: a[int(tokens) - 1], carries)
    layers = [
        (state if run.count == 1 else jax.tree.map(lambda a, number=number: a[:, number], state))
        for run, state in zip(model.body.stages, after, strict=True)
        for number in range(run.count)
    ]
    memories = [memory for layer in layers for memory in layer]
    for i, memory in enumerate(memories):
        assert (memory is None) == (f"{tokens}/{i}" not in buffers)
        if memory is not None:
            close(memory, buffers[f"{tokens}/{i}"][:, 1:])
    assert len(buffers) == sum(memory is not None for memory in memories)


@pytest.mark.parametrize("name", CASES)
def test_dropout(name):
    """Training with fairseq's masks: of the embedding, of the input of each convolution, after
    `fc2`, in an adaptive softmax. Deep models amplify rounding.
    """
    _, model, arrays, found = computed(name)
    tolerance = 5e-5 if len(settings_of(name)["layers_expanded"]) > 12 else 2e-5
    if not model.body.output_width:
        close(found["dropped"], arrays["dropout/final_hidden"], tolerance)
    np.testing.assert_allclose(found["loss_dropped"], arrays["dropout/loss_sum"], rtol=tolerance)


@pytest.mark.parametrize("name", LEGACY)
def test_legacy(name):
    """The same weights in the older layout are the same tensors, options and updates."""
    (_, old), (_, new) = (
        read_checkpoint(GCNN.path(f"{each}.pt")) for each in (name, name.removesuffix("_legacy"))
    )
    assert old.updates == new.updates and old.state.keys() == new.state.keys()
    jax.tree.map(np.testing.assert_array_equal, old.state, new.state)
    for key in settings_of(name.removesuffix("_legacy"))["model_options"]:
        assert old.options.get(key) == new.options.get(key), key


@pytest.mark.parametrize("name", CASES)
def test_checkpoint(name):
    """Its words are those of the dictionary, its layers those of the case; it has the count of
    parameters and of updates.
    """
    case = settings_of(name)
    converter, found = read_checkpoint(GCNN.path(f"{name}.pt"))
    assert converter is fconv.FCONV_LM
    words, state = fairseq_words(GCNN.path("dict.txt"), found.state)
    assert len(words) == case["vocab_size"]
    config = fconv.config_of(found.options, state, len(words))
    of_case = config_of(case["model_options"], len(words))
    for group in "dtype", "input", "body", "output":
        assert config[group] == of_case[group], group
    params = parameters_of(state, config)
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == case["parameters"]
    assert found.updates == case["updates_done_before_saving"]


@pytest.mark.parametrize("name", GCNN.named("train_*.npz"))
def test_training(name):
    """Updates by `nag`: losses, norms, parameters and momentum."""
    case, arrays = settings_of(name), GCNN.arrays(name)
    config = config_of(case["model_options"], case["vocab_size"])
    model = build(config, case["vocab_size"])
    start = parameters_of(dict(arrays.under("start/")), config)
    settings = {
        "momentum": case["momentum"],
        "clip_norm": case["clip_norm"],
        "decoupled_decay": case["weight_decay"],
    }
    assert set(arrays["lr"]) == {case["lr"]} and len(arrays["lr"]) == case["steps"]
    optimizer = optim.nag(jnp.float32(case["lr"]), **settings)
    inputs, targets = (
        arrays[key].reshape(case["steps"], -1, arrays[key].shape[-1])
        for key in ("src_tokens", "target")
    )

    def program(params):
        def update(state, ids):
            params, optimizer_state = state
            batch = batch_of(*ids)
            loss_of = lambda params: criterion(model, params, batch)[0]
            loss, gradients = jax.value_and_grad(loss_of)(params)
            gradients = jax.tree.map(lambda g: g / batch.weights.sum(), gradients)
            gradients["input"]["table"] = gradients["input"]["table"].at[PAD].set(0)
            changes, optimizer_state = optimizer.update(gradients, optimizer_state, params)
            params = optax.apply_updates(params, changes)
            norms = optax.tree.norm(gradients), optax.tree.norm(params)
            return (params, optimizer_state), (loss, *norms)

        return jax.lax.scan(update, (params, optimizer.init(params)), (inputs, targets))

    (end, optimizer_state), (losses, gradient_norms, norms) = run_once(program, start)
    np.testing.assert_allclose(losses, arrays["loss_sum"], rtol=1e-5)
    counts = np.sum(targets != PAD, axis=(1, 2))
    np.testing.assert_array_equal(counts, arrays["sample_size"])
    np.testing.assert_allclose(losses / counts / np.log(2), arrays["loss_base2"], rtol=1e-5)
    np.testing.assert_allclose(gradient_norms, arrays["grad_norm"], rtol=1e-4)
    np.testing.assert_allclose(norms, arrays["param_norm"], rtol=1e-5)
    jax.tree.map(
        functools.partial(close, tolerance=1e-5),
        end,
        parameters_of(dict(arrays.under("end/")), config),
    )
    # fairseq's momentum holds the rate and the sign; the file has a part of the arrays.
    unknown = {key: np.full_like(value, np.nan) for key, value in arrays.under("end/").items()}
    kept = dict(arrays.under("end_momentum/"))
    expected = parameters_of(unknown | kept, config)
    trace = optax.tree_utils.tree_get(optimizer_state, "trace")
    found = jax.tree.map(lambda a, b: np.where(np.isnan(b), b, -case["lr"] * a), trace, expected)
    jax.tree.map(functools.partial(close, tolerance=1e-5), found, expected)
    assert sum(np.sum(~np.isnan(leaf)) for leaf in jax.tree.leaves(expected)) == sum(
        value.size for value in kept.values()
    )


@pytest.mark.parametrize("name", GCNN.cases("init_stats"))
def test_init_stats(name):
    """Mean squares of initial parameters, g among them; of biases they are 0.

    Two differ: the matrix of a full softmax, Xavier-uniform here, and rows of clusters, which
        fairseq draws with the head's.
    """
    case = GCNN.settings("init_stats", name)
    config = config_of(case, case["vocab_size"])
    squares = {
        key: np.full(stat["shape"], stat["mean"] ** 2 + stat["std"] ** 2)
        for key, stat in case["parameters"].items()
    }
    config["input"]["init_deviation"] = 0.1
    model, ids = build(config, case["vocab_size"]), np.zeros((1, 1), np.int32)
    ours = dict(run_once(model.init, jax.random.key(3, impl="rbg"), batch_of(ids, ids))["params"])
    theirs = parameters_of(squares, config)
    for params in ours, theirs:
        params["output"] = {} if case["criterion"] == "cross_entropy" else params["output"]["table"]
    jax.tree.map(
        lambda a, square: np.testing.assert_allclose(np.mean(a**2), square.mean(), rtol=0.02),
        ours,
        theirs,
    )


PAPER = "paper_table_1_written_as_fairseq_layers"
COUNTS = [
    (entry, case) for entry in ("counts", PAPER) for case in GCNN.cases("parameter_counts", entry)
]


@pytest.mark.parametrize("entry, case", COUNTS)
def test_parameter_counts(entry, case):
    """Of fairseq's three architectures, and of the paper's Table 1 as its layers, with either
    softmax; and how far they see.
    """
    row = GCNN.settings("parameter_counts", case, entry)
    options = {
        "adaptive_softmax_cutoff": ",".join(map(str, (row["cutoffs"] or [])[:-1])),
        "dropout": 0.1,
    } | row
    config = config_of(options, row["vocab_size"])
    model = build(config, row["vocab_size"])
    assert model.body.receptive_field == row["receptive_field"]
    shapes = parameter_shapes(model)
    body = [
        part for part in row["parts"] if part.startswith(("fc1", "convolutions", "residual", "fc2"))
    ]
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes["body"]))
    assert count == sum(row["parts"][part] for part in body)
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes)) == row["total"]


@pytest.mark.parametrize("case", GCNN.cases("plateau_lr"))
def test_plateau_lr(case):
    """The rate of every update, to 1e-12 in float64; fairseq's patience counts one less."""
    settings = GCNN.settings("plateau_lr", case)
    with jax.enable_x64(True):
        schedule = schedules.Plateau(
            learning_rate=settings["lr"],
            warmup_from=max(settings["warmup_init_lr"], 0.0),
            warmup_steps=settings["warmup_updates"],
            factor=1 / settings["lr_shrink"],
            patience=settings["lr_patience"] + 1,
            threshold=settings["lr_threshold"],
        )
        optimizer, nothing = schedules.scheduled(optax.sgd, schedule), jnp.zeros(1)
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


LEFT_OUT = sets.SIZES | {
    "*:cutoffs": "the options, which the converter reads, say them",
    "*:has_residual_projection": "the tensors say it",
    "*:residual_offsets": "with the layers, which are compared",
    "*:layers_expanded": "the options, which the converter reads, say them",
    "*:incremental_worst_abs_difference": "of fairseq from itself",
    "*:state_dict.*": "shapes of tensors, which are converted",
    "*:update_freq": "an update's rows are one batch here",
    "init_stats:parameters.*": "mean and deviation are compared",
    "parameter_counts:overrides.*": "the same options stand in the row",
    "parameter_counts:parts.*": "those of the body, and the sum of all, are compared",
    "*/embed": "rows of the table that it names",
    "*/layer_in/*": "made of the convolution before it, which is compared; the first is, too",
    "*/final_hidden": "before `fc2`, what `fc2` makes of it is compared",
}


def test_all_is_read(request):
    """A case, an array or a file that no test reads would be a number that nothing checks."""
    sets.assert_all_is_read(
        GCNN, request, LEFT_OUT, [f"parameter_counts/{e}" for e in ("counts", PAPER)]
    )
