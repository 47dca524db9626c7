"""Equality with numbers that fairseq computed, and torch's adaptive softmax and LSTM.

Weights there are `[out_features, in_features]`; here a projection is `[width, features]`, so that
the input's projections are transposed and the output's are not.
"""

import functools
import itertools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.tree_utils import tree_get

from adaptive_jax import AdaptiveInput, OwnTable, Softmax
from adaptive_jax.bodies.lstm import State as Memory
from adaptive_jax.bodies.lstm import Weights, lstm
from adaptive_jax.bodies.positions import sinusoids
from adaptive_jax.data.batches.windows import Windows, windows
from adaptive_jax.data.vocabulary.on_disk import read_vocabulary
from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.errors import InputError
from adaptive_jax.interop.convert import convert
from adaptive_jax.interop.fairseq import config_of, parameters_of
from adaptive_jax.interop.torch_softmax import from_torch, to_torch
from adaptive_jax.interop.words import read_dictionary
from adaptive_jax.model.language_model import build
from adaptive_jax.numerics.batch import Batch
from adaptive_jax.optimizers import optim, schedules
from adaptive_jax.parallel import sharding
from adaptive_jax.scores.evaluate import Request, evaluate_contexts
from adaptive_jax.training.state import State, shape_of_state
from adaptive_jax.training.update import make_update
from tests import refuses
from tests.reference import sets
from tests.reference.fairseq import (
    FAIRSEQ,
    PAD,
    ReleasedSoftmax,
    Tied,
    converted,
    cycles_until,
    has_no_width,
    head_split,
    move_empty_character,
    numbers_of,
    placed,
    released,
    shape_of,
    softmax_of,
    with_training,
)
from tests.reference.sets import batch_of, close_to_largest


def close(ours, theirs, rtol=2e-5, atol=2e-5):
    np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=atol)


@pytest.mark.parametrize("case", FAIRSEQ.cases("adaptive_softmax"))
def test_adaptive_softmax(case):
    """Log-probabilities, losses and the gradients of the summed loss, through the layers, tied
    and own.
    """
    settings, data = FAIRSEQ.case("adaptive_softmax", case)
    if has_no_width(shape_of(settings, "input_dim")):
        with refuses("factor"):
            softmax_of(settings)
        return
    model, softmax, places = softmax_of(settings)
    params, used = parameters_in(data.under("weight/"), places, settings)
    expected, _ = parameters_in(data.under("grad_nll/"), places, settings)
    assert used == set(data.under("weight/"))
    hidden, targets = jnp.asarray(data["hidden"]), jnp.asarray(data["target"], jnp.int32)

    def loss(params, hidden):
        given = {"params": params}, hidden, targets, jnp.ones(len(targets))
        return model.apply(*given, method=lambda m, *args: softmax(m).loss(*args))

    @jax.jit
    def run(params, hidden):
        log_probs = model.apply(
            {"params": params}, hidden, method=lambda m, h: softmax(m).log_probs(h)
        )
        return log_probs, jax.value_and_grad(loss, (0, 1), has_aux=True)(params, hidden)

    log_probs, ((total, nll), (d_params, d_hidden)) = run(params, hidden)
    close(log_probs, data["log_prob"])
    close(-nll, data["token_log_prob"])
    close(total, data["nll_sum"])
    close_to_largest(d_hidden, data["grad_nll/hidden"], rtol=1e-4)
    assert jax.tree.structure(d_params) == jax.tree.structure(expected)
    close_to_largest(d_params, expected, rtol=1e-4)
    check_head(log_probs, data["head_logits"], settings["cluster_ends"])
    check_criterion(settings, data, params, places)


def parameters_in(arrays, places, settings):
    """Weights, or gradients of them, as a tree of our parameters; the names of those it has."""
    tree, used = placed(arrays, places), set(places)
    if not settings["tied_embedding"]:
        split = head_split(arrays["softmax.head.weight"], settings["cutoff"][0])
        tree["table"] |= split["table"]
        tree["clusters"] = split["clusters"]
        used.add("softmax.head.weight")
    return tree, used


def check_head(log_probs, logits, ends):
    """Words of the head and, as the sum of its words, each cluster are as its scores say."""
    log_probs = np.asarray(log_probs)
    clusters = [
        np.logaddexp.reduce(log_probs[:, first:end], axis=1, keepdims=True)
        for first, end in itertools.pairwise(ends)
    ]
    head = np.concatenate([log_probs[:, : ends[0]], *clusters], axis=1)
    close(head, logits - np.logaddexp.reduce(logits, axis=1, keepdims=True))


def check_criterion(settings, data, params, places):
    """The loss that fairseq trains on, with its fault: padding has none, and of word 1 of a tail
    the term within the tail is lost.
    """
    kind = functools.partial(ReleasedSoftmax, padding=settings["padding_idx"])
    model, softmax, _ = softmax_of(settings, kind)
    targets = jnp.asarray(data["target"], jnp.int32)
    weights = jnp.asarray(data["target"] != settings["padding_idx"], jnp.float32)

    def criterion(params, hidden):
        given = {"params": params}, hidden, targets, weights
        return model.apply(*given, method=lambda m, *args: softmax(m).loss(*args).total)

    total, gradients = jax.jit(jax.value_and_grad(criterion, (0, 1)))(params, data["hidden"])
    np.testing.assert_allclose(total, data["criterion_loss_sum"], rtol=2e-5)
    assert weights.sum() == data["criterion_sample_size"]
    bits = total / weights.sum() / np.log(2)
    np.testing.assert_allclose(bits, data["criterion_loss_base2"], rtol=2e-5)
    if "grad_criterion/hidden" in data:
        expected, _ = parameters_in(data.under("grad_criterion/"), places, settings)
        close_to_largest(gradients, (expected, data["grad_criterion/hidden"]), rtol=1e-4)


@pytest.mark.parametrize(
    "case", FAIRSEQ.cases("adaptive_input", has="output_dim", lacks="init_statistics")
)
def test_adaptive_input(case):
    """Vectors and gradients; the padding row of band 0, which gets no gradient there, is a word
    like any other here.
    """
    settings, data = FAIRSEQ.case("adaptive_input", case)
    shape = shape_of(settings)
    if has_no_width(shape):
        with refuses("factor"):
            AdaptiveInput(**shape)
        return
    model = AdaptiveInput(**shape)
    places = {
        f"embeddings.{i}.{j}.weight": ((f"{name}_{i}",), j == 1)
        for i in range(len(shape["cutoffs"]) + 1)
        for j, name in enumerate(("table", "projection"))
    }
    params = placed({name: data[f"weight/{name}"] for name in places}, places)
    expected = placed({name: data[f"grad/{name}"] for name in places}, places)
    tokens = jnp.asarray(data["tokens"], jnp.int32)

    @jax.jit
    def run(params, cotangent):
        vectors, pull = jax.vjp(lambda p: model.apply({"params": p}, tokens), params)
        return vectors, *pull(cotangent)

    vectors, gradients = run(params, data["cotangent"])
    close(vectors, data["output"])
    gradients["table_0"] = np.array(gradients["table_0"])
    gradients["table_0"][settings["padding_idx"]] = 0.0
    close_to_largest(gradients, expected, rtol=1e-4)


@pytest.mark.parametrize("case", FAIRSEQ.cases("adaptive_input", has="init_statistics"))
def test_fresh_weights(case):
    """Spread and largest entry of fresh tables and projections are those measured on the
    reference.
    """
    settings = FAIRSEQ.settings("adaptive_input", case)
    shape = shape_of(settings)
    bands, shared = len(shape["cutoffs"]) + 1, settings["tied"] and settings["tie_proj"]
    keys = jax.random.split(jax.random.key(0))
    fresh = {}
    made = jax.jit(AdaptiveInput(**shape).init)(keys[0], np.arange(2))["params"]
    if settings["tied"]:
        tied = Tied(AdaptiveInput(**shape), shared)
        method = lambda m: m.softmax.log_probs(jnp.zeros((1, settings["output_dim"])))
        params = jax.jit(functools.partial(tied.init, method=method))(keys[1])
        softmax = params["params"]["softmax"]
        fresh["softmax.head.class_proj.weight"] = softmax["clusters"]
        for i in range(bands):
            name = f"tail.{i - 1}.0" if i else "head.word_proj.0"
            if (array := softmax.get("table", {}).get(f"projection_{i}")) is not None:
                fresh[f"softmax.{name}.weight"] = array
    else:
        table = OwnTable(**shape | {"width": 0})
        init = functools.partial(Softmax(table).init, method="log_probs")
        own = jax.jit(init)(keys[1], np.zeros((1, settings["output_dim"]), "f"))["params"]
        for i in range(1, bands):
            fresh[f"softmax.tail.{i - 1}.0.weight"] = own["table"][f"projection_{i}"]
            fresh[f"softmax.tail.{i - 1}.2.weight"] = own["table"][f"table_{i}"]
        # There the untied head is one Xavier matrix; here its clusters start as those of a tied
        # head do, twice as wide.
        fresh["softmax.head.weight"] = own["table"]["table_0"]
    for i in range(bands):
        fresh[f"input.embeddings.{i}.0.weight"] = made[f"table_{i}"]
        fresh[f"input.embeddings.{i}.1.weight"] = made[f"projection_{i}"].T
    # What is shared has no statistics of its own.
    left_out = {"softmax.head.word_proj.weight", "softmax.head.word_proj.1.weight"}
    tails = range(bands - 1)
    left_out |= {f"softmax.tail.{i}.2.weight" for i in tails} if settings["tied"] else set()
    left_out |= {f"softmax.tail.{i}.0.weight" for i in tails} if shared else set()
    assert fresh.keys() == settings["init_statistics"].keys() - left_out
    for name, expected in settings["init_statistics"].items():
        if name in fresh:
            values = np.asarray(fresh[name])
            clusters = bands - 1 if name == "softmax.head.weight" else 0
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


@pytest.mark.parametrize("case", FAIRSEQ.cases("positional"))
def test_positional(case):
    """Position 0 is the row after that of padding; sines first, cosines second. A token's position
    is the number of real tokens before it.
    """
    settings, data = FAIRSEQ.settings("positional", case), FAIRSEQ.arrays("positional")
    first = settings["padding_idx"] + 1
    for features in settings["dims"]:
        sequence, table = data[f"sequence_d{features}"], data[f"table_d{features}"]
        ours = sinusoids(jnp.arange(len(sequence)), features)
        close(ours, sequence)
        close(ours, table[first : first + len(sequence)])
    padded = data.under("padded/")
    tokens, rows, vectors = (padded[name] for name in ("tokens", "positions", "embedding"))
    real = tokens != settings["padding_idx"]
    positions = np.cumsum(real, axis=-1) - 1
    np.testing.assert_array_equal(positions[real] + first, rows[real])
    close(sinusoids(jnp.asarray(positions[real]), vectors.shape[-1]), vectors[real])
    assert not vectors[~real].any()
    grown = data["grown/embedding"]
    close(sinusoids(jnp.arange(len(grown)), grown.shape[1]), grown)


@pytest.mark.parametrize("case", FAIRSEQ.cases("nag"))
def test_nesterov(case):
    """Steps under changing rates, clipped and not: parameters and momentum after every step.

    fairseq's momentum holds the rate and the sign.
    """
    settings, data = FAIRSEQ.case("nag", case)
    rates = jnp.asarray(data["lr"], jnp.float32)
    given = {"momentum": settings["momentum"], "clip_norm": settings["clip_norm"] or None}
    given["decoupled_decay"] = settings["weight_decay"]
    optimizer = schedules.scheduled(functools.partial(optim.nag, **given), lambda step: rates[step])
    params = [jnp.asarray(data["p0_init"]), jnp.asarray(data["p1_init"])]
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    assert len(rates) == settings["steps"]
    for step in range(len(rates)):
        gradients = [jnp.asarray(data["g0"][step]), jnp.asarray(data["g1"][step])]
        close(optax.tree.norm(gradients), data["grad_norm"][step])
        changes, state = update(gradients, state, params)
        params = optax.apply_updates(params, changes)
        momentum = [-rates[step] * array for array in tree_get(state, "trace")]
        for i in range(2):
            close(params[i], data[f"p{i}"][step])
            close(momentum[i], data[f"v{i}"][step])


@pytest.mark.parametrize("case", FAIRSEQ.cases("cosine_lr"))
def test_learning_rates(case):
    """The rate of every update listed, to 1e-9, in float64."""
    settings, data = FAIRSEQ.case("cosine_lr", case)
    warmup, first = settings["warmup_updates"], int(settings["lr_period_updates"])
    first = first if first > 0 else settings["max_update"] - warmup
    updates = warmup + first  # where cycles do not double, only the first is ours
    if settings["t_mult"] == 2:
        updates = int(data["step"].max()) + 1
    cycles = cycles_until(updates, warmup, first)
    with jax.enable_x64(True):
        rate = schedules.cosine_cycles(
            learning_rate=settings["lr"][0],
            min_learning_rate=settings["min_lr"],
            warmup_from=settings["lr_right_after_construction"],
            warmup_steps=warmup,
            cycle_steps=first,
            cycles=cycles,
            shrink=settings["lr_shrink"],
        )
        steps = data["step"][data["step"] < updates]
        assert steps.max() > warmup
        close(jax.vmap(rate)(jnp.asarray(steps)), data["lr"][: len(steps)], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", [name.removeprefix("lm_") for name in FAIRSEQ.named("lm_*.pt")])
def test_outputs_and_gradients(name):
    """Hidden states, log-probabilities, losses and gradients of batches with padding and with
    words that the fault concerns.
    """
    file = f"lm_{name.removesuffix('_legacy')}"
    [case] = FAIRSEQ.cases(file)
    checkpoint, config, model, variables = converted(FAIRSEQ.path(f"lm_{name}.pt"))
    shapes = {key: list(np.shape(checkpoint.state[key])) for key in checkpoint.state}
    if name in file:
        settings = FAIRSEQ.settings(file, case)
        theirs, options = settings["state_dict"], settings["model_options"]
        assert shapes == {key: list(theirs[key]) for key in theirs if key in shapes}
        for key, value in options.items():
            assert checkpoint.options.get(key) == value, key
        # The vector of the empty character is in the bias of its filters.
        empty = options["character_embedding_dim"] * options["character_embeddings"]
        count = sum(leaf.size for leaf in jax.tree.leaves(variables["params"]))
        assert count == settings["n_params"] - empty
        assert checkpoint.updates == settings["updates_done_before_saving"]
        assert model.input.vocabulary_size == settings["vocab_size"]
    batches = FAIRSEQ.arrays(file)
    for i in sorted({key.split("/")[0] for key in batches}):
        data = batches.under(f"{i}/")
        real = data["target"] != PAD
        batch = batch_of(data["src_tokens"], data["target"], real)
        ours = numbers_of(model)(variables, batch)
        close(ours["inner_states"][:, real], data["inner_states"][:, real])
        close(ours["token_log_prob"][real], data["token_log_prob"][real])
        close(-ours["token_log_prob"][real].mean() / np.log(2), data["eval_loss_base2"])
        total = ours["criterion_loss_sum"]
        np.testing.assert_allclose(total, data["criterion_loss_sum"], rtol=2e-5)
        if "log_prob" in data:
            close(ours["log_prob"][real], data["log_prob"][real])
        bits = total / real.sum() / np.log(2)
        assert real.sum() == data["sample_size"]
        np.testing.assert_allclose(bits, data["criterion_loss_base2"], rtol=2e-5)
        np.testing.assert_allclose(2**bits, data["criterion_ppl"], rtol=1e-4)
        if gradients := dict(data.under("grad/")):
            if "decoder.embed_tokens.char_embeddings.weight" in checkpoint.state:
                move_empty_character(gradients, checkpoint.state)
            close_to_largest(ours["gradients"], parameters_of(gradients, config), rtol=1e-4)


@pytest.mark.parametrize("case", FAIRSEQ.cases("train_trajectory"))
def test_train_trajectory(case):
    """Updates from the same weights and batches, with the fault: losses, gradient norms,
    rates and the last parameters.
    """
    data, case = FAIRSEQ.arrays("train_trajectory"), FAIRSEQ.settings("train_trajectory", case)
    options = case["model_options"] | {"arch": case["model_options"]["_name"]}
    # fairseq's decoders of version 3 may have a final norm.
    version = {"decoder.adaptive_softmax.version": np.ones(1), "decoder.version": np.full(1, 3)}
    config = with_training(config_of(options, version, case["vocab_size"]), case)

    def parameters(when):
        return parameters_of(dict(data.under(f"{when}/")), config)

    model = released(build(config, case["vocab_size"]))
    optimizer, mesh = optim.from_config(config), sharding.device_mesh()
    params = jax.tree.map(jnp.asarray, parameters("init"))
    state = State(jnp.zeros((), jnp.int32), params, optimizer.init(params))
    update = make_update(model, optimizer, mesh, 0, shape_of_state(model, optimizer, mesh))
    log = []
    for step in range(case["steps"]):
        parts = [
            [data[f"step{step}/micro{i}/{name}"] for i in range(case["update_freq"])]
            for name in ("src_tokens", "target")
        ]
        inputs, targets = (np.stack(part).astype(np.int32) for part in parts)
        row_ids = np.arange(np.prod(inputs.shape[:2]), dtype=np.int32).reshape(inputs.shape[:2])
        batch = Batch(inputs, targets, (targets != PAD).astype(np.float32), row_ids)
        state, metrics = update(state, {}, sharding.put_batch(mesh, batch, axis=1))
        log.append([metrics[name] for name in ("loss", "gradient_norm", "learning_rate")])
        assert np.sum(targets != PAD) == data["log/sample_size"][step]
    losses, norms, rates = np.array(log).T
    np.testing.assert_array_equal(100 * (norms > case["clip_norm"]), data["log/clip_pct"])
    np.testing.assert_allclose(losses / np.log(2), data["log/loss_base2"], rtol=1e-5)
    np.testing.assert_allclose(norms, data["log/gnorm"], rtol=1e-4)
    highest = case["lr_scheduler"]["lr"][0]  # rates are float32
    for ours, theirs in (rates, "log/lr_used"), (rates[1:], "log/lr_next"):
        np.testing.assert_allclose(ours, data[theirs][: len(ours)], atol=1.2e-7 * highest)
    close_to_largest(state.params, parameters("final"), atol=1e-5)


def test_context_window_of_a_model(tmp_path):
    """The losses that fairseq's own evaluation gave on a text with each context."""
    given = FAIRSEQ.cases("context_window", "eval_lm")
    given = [FAIRSEQ.settings("context_window", case, "eval_lm") for case in given]
    key = lambda case: (case["checkpoint"], case["text"], case["tokens_per_sample_option"])
    for number, (of, of_one) in enumerate(itertools.groupby(sorted(given, key=key), key)):
        (checkpoint, text, window), theirs = of, list(of_one)
        run, directory = tmp_path / f"run{number}", tmp_path / f"text{number}"
        directory.mkdir()
        shutil.copy(FAIRSEQ.path(text), directory / "test.txt")
        convert(str(FAIRSEQ.path(checkpoint)), str(FAIRSEQ.path("dict.txt")), str(run))
        contexts = tuple(case["context_window"] for case in theirs)
        results = evaluate_contexts(run, Request(window=window, data_path=str(directory)), contexts)
        for result, case in zip(results, theirs, strict=True):
            assert result["settings"]["context"] == case["context_window"]
            assert result["words"] == case["n_tokens_scored"]
            close(result["nll"] / np.log(2), case["loss_base2"])
            np.testing.assert_allclose(np.exp(result["nll"]), case["perplexity"], rtol=2e-4)


@pytest.mark.parametrize("case", FAIRSEQ.cases("context_window", "toy"))
def test_context_window(case):
    """Windows score what fairseq's score, with the same context."""
    toy = FAIRSEQ.settings("context_window", case, "toy")
    blocks = [block for batch in toy["batches"] for block in batch]
    context = toy["context_window"]
    window = toy["tokens_per_sample_after_reduction"] + context
    ids = np.array(toy["stream"], np.int32)
    _, batches = windows(
        ids, toy["eos"], Windows(window, context, "none", "packed", toy["batch_size"])
    )
    rows = [
        row
        for (batch, first), _ in batches
        for row in zip(*batch[:3], first, strict=True)
        if row[2].any()
    ]
    assert len(rows) == len(blocks)
    for (inputs, targets, weights, first), block in zip(rows, blocks, strict=True):
        columns = np.flatnonzero(weights)
        assert targets[columns].tolist() == block["scored_targets"]
        assert (columns + 1).tolist() == block["n_real_source_tokens_visible_to_each"]
        assert first == columns[0] == block["start_index"]
        assert inputs[1:][: columns[-1]].tolist() == targets[: columns[-1]].tolist()


@pytest.mark.parametrize("case", FAIRSEQ.cases("dictionary"))
def test_dictionary(case, tmp_path):
    """Ids, counts and encoded lines equal fairseq's; a vocabulary that is built here has the
    words in the same order.
    """
    case = FAIRSEQ.settings("dictionary", case)
    (tmp_path / "dict.txt").write_text(case["dict_txt"])
    vocabulary = read_dictionary(tmp_path / "dict.txt")
    vocabulary.write(tmp_path / "vocabulary.txt")
    vocabulary = read_vocabulary(tmp_path / "vocabulary.txt")
    symbols = ["<eos>" if word == "</s>" else word for word in case["symbols"]]
    assert list(vocabulary.words) == symbols
    assert vocabulary.counts[4:].tolist() == case["counts"][4:]
    assert set(vocabulary.counts[:4]) == {max(case["counts"][4:])}
    lines = FAIRSEQ.about("dictionary")["text_lines"]
    assert len(lines) == len(case["encoded"])
    assert list(map(vocabulary.encode, lines)) == case["encoded"]

    counts = {"<eos>": len(lines)}
    for word in (word for line in lines for word in line.split()):
        counts[word] = counts.get(word, 0) + 1
    built = Vocabulary.build(counts, max(1, case["threshold"]), max(0, case["nwords"] - 2))
    ours = [word for word in built.words if word not in ("<eos>", "<unk>")]
    assert ours == [word for word in symbols[4:] if not word.startswith("madeupword")]


@pytest.mark.parametrize("case", FAIRSEQ.cases("torch_adaptive_log_softmax"))
def test_torch_adaptive_log_softmax(case):
    """Log-probabilities, losses and gradients that torch computed; and the same arrays back."""
    settings, data = FAIRSEQ.case("torch_adaptive_log_softmax", case)
    state, of = dict(data.under("weight/")), {"rtol": 2e-5, "atol": 2e-5}
    if settings["in_features"] < settings["div_value"] ** len(settings["cutoffs"]):
        with pytest.raises(InputError):
            from_torch(state)
        return
    layer, params = from_torch(state)
    assert layer.table.vocabulary_size == settings["n_classes"]
    assert layer.table.cutoffs == tuple(settings["cutoffs"])
    assert layer.table.factor == settings["div_value"]
    jax.tree.map(np.testing.assert_array_equal, to_torch(layer.bind({"params": params})), state)
    hidden, targets = data["input"], data["target"].astype("i")

    @jax.jit
    def run(params, hidden):
        def loss(params, hidden):
            return layer.apply({"params": params}, hidden, targets, reduction="sum")

        variables = {"params": params}
        return (
            layer.apply(variables, hidden, targets),
            layer.apply(variables, hidden, targets, reduction="none"),
            layer.apply(variables, hidden, method="log_probs"),
            layer.apply(variables, hidden, method="predict"),
            jax.grad(loss, (0, 1))(params, hidden),
        )

    mean, each, log_probs, predicted, (d_params, d_hidden) = run(params, hidden)
    np.testing.assert_allclose(mean, data["loss"], **of)
    np.testing.assert_allclose(-each, data["output"], **of)
    np.testing.assert_allclose(log_probs, data["log_prob"], **of)
    np.testing.assert_array_equal(predicted, data["log_prob"].argmax(axis=1))
    gradients = dict(data.under("grad/"))
    expected = gradients.pop("input"), *jax.tree.leaves(from_torch(gradients)[1])
    if settings["head_bias"]:  # torch has none in the tails
        cut = settings["cutoffs"][0]
        bias = d_params["table"]["bias"]
        d_params["table"]["bias"] = bias.at[cut:].set(0)
    close_to_largest((d_hidden, *jax.tree.leaves(d_params)), expected, rtol=1e-4)


@pytest.mark.parametrize("case", FAIRSEQ.cases("torch_lstm"))
def test_torch_lstm(case):
    """Layers on each other: outputs and last states, from zeros and from given states."""
    settings, data = FAIRSEQ.case("torch_lstm", case)
    assert not settings["proj_size"]
    weights = data.under("weight/")

    @jax.jit
    def layers(hidden, states, cells):
        after = []
        for i in range(settings["num_layers"]):
            given = Weights(
                weights[f"weight_ih_l{i}"].T,
                weights[f"weight_hh_l{i}"].T,
                weights[f"bias_ih_l{i}"] + weights[f"bias_hh_l{i}"],
            )
            hidden, state = lstm(hidden, given, Memory(states[i], cells[i]))
            after.append(state)
        return hidden, after

    for end, states in ("_zero_state", np.zeros_like(data["h0"])), ("", data["h0"]):
        cells = data["c0"] if states.any() else states
        hidden, after = layers(data["input"].swapaxes(0, 1), states, cells)
        close(hidden, data[f"output{end}"].swapaxes(0, 1))
        close(np.stack([state.hidden for state in after]), data[f"h_n{end}"])
        close(np.stack([state.cell for state in after]), data[f"c_n{end}"])


LEFT_OUT = sets.SIZES | {
    "adaptive_input/init_note": "an empty array",
    "adaptive_input:init_statistics.*.mean": "0, as those of symmetric distributions",
    "adaptive_input:init_statistics.*.zero_rows": "of padding, which is a word here",
    "adaptive_input:init_statistics.softmax.head.word_proj.*": "shared with the input",
    "adaptive_softmax:dropout": "0 in evaluation",
    "context_window:*": "what the blocks that are compared add up to",
    "cosine_lr:warmup_init_lr": "-1 means the rate after construction, which is read",
    "dictionary:*": "the dictionaries that they make are compared",
    "*:tied_names": "an empty list; with names it holds no number",
}


def test_all_is_read(request):
    """A case, an array or a file that no test reads would be a number that nothing checks."""
    lists = ["context_window/toy", "context_window/eval_lm"]
    sets.assert_all_is_read(FAIRSEQ, request, LEFT_OUT, lists)
