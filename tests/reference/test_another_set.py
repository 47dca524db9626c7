"""Another set of the same format: settings drawn anew, numbers from slow twins in float64.

The tests of the public codes' numbers run on it. A number that one of them holds itself, in place
of reading it from the files, fails here.
"""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util

from adaptive_jax.optimizers import optim
from tests.reference import test_awd_lstm_code as awd_lstm
from tests.reference import test_fairseq_code as fairseq
from tests.reference import test_gcnn_code as gcnn
from tests.reference import test_groc_code as groc
from tests.reference.sets import run_once

DRAWS = pytest.mark.parametrize("seed", (0, 1))


@pytest.fixture
def another(monkeypatch, tmp_path):
    """`another(AWD_LSTM, "optim", settings, arrays)`: the public code's files are one of this
    name, with one case, "drawn".
    """

    def write(code, file, settings, arrays=None, **about):
        content = json.dumps({"cases": {"drawn": settings}, **about})
        (tmp_path / f"{file}.json").write_text(content)
        arrays = traverse_util.flatten_dict({"drawn": arrays or {}}, sep="/")
        np.savez(tmp_path / f"{file}.npz", **arrays)
        for name, value in vars(type(code)(tmp_path)).items():
            monkeypatch.setattr(code, name, value)

    return write


def normal(random, *shape):
    """Numbers that float32 holds exactly."""
    return random.normal(size=shape).astype(np.float32).astype(np.float64)


def descent(random, steps):
    """Two parameters and their gradients, with the norms of all together."""
    shapes = (3, 4), (5,)
    start = [normal(random, *shape) for shape in shapes]
    gradients = [normal(random, steps, *shape) for shape in shapes]
    norms = np.sqrt(sum((g**2).reshape(steps, -1).sum(axis=1) for g in gradients))
    arrays = {f"p{i}_init": array for i, array in enumerate(start)}
    return start, gradients, arrays | {f"g{i}": g for i, g in enumerate(gradients)}, norms


@DRAWS
def test_nag(seed, another):
    """fairseq's rule: decay, momentum and clipping of another strength."""
    random = np.random.RandomState(seed)
    steps, momentum, decay, clip = 3, random.uniform(0.3, 0.9), random.uniform(0.01, 0.1), 0.7
    params, gradients, arrays, norms = descent(random, steps)
    rates = random.uniform(0.2, 0.9, size=steps)
    velocity, seen = [np.zeros_like(p) for p in params], []
    for step, (rate, norm) in enumerate(zip(rates, norms, strict=True)):
        change = rate / rates[max(0, step - 1)]
        for i, p in enumerate(params):
            g = gradients[i][step] * min(1, clip / (norm + 1e-6))
            moved = momentum * change * velocity[i]
            params[i] = p * (1 - rate * decay) + momentum * moved - (1 + momentum) * rate * g
            velocity[i] = moved - rate * g
        seen.append([*params, *velocity])
    after = {
        n: np.stack(a)
        for n, a in zip(("p0", "p1", "v0", "v1"), zip(*seen, strict=True), strict=True)
    }
    settings = {"momentum": momentum, "weight_decay": decay, "clip_norm": clip, "steps": steps}
    another(fairseq.FAIRSEQ, "nag", settings, arrays | after | {"lr": rates, "grad_norm": norms})
    fairseq.test_nesterov("drawn")


@DRAWS
@pytest.mark.parametrize("name", ("sgd", "adam", "asgd"))
def test_optim(name, seed, another):
    """torch's rules: rate, lengths, clipping, both decays and the start of averages."""
    random, steps = np.random.RandomState(seed), 5
    settings = {"lr": random.uniform(0.1, 0.5), "weight_decay": random.uniform(0.01, 0.1)}
    settings |= {"optimizer": name, "clip": 0.6, "steps": steps, "bptt": 9, "dtype": "float64"}
    t0, lambd = settings["t0"], settings["lambd"] = (
        (seed, 0.05 * seed) if name == "asgd" else (0, 0)
    )
    params, gradients, arrays, norms = descent(random, steps)
    lengths = random.randint(4, 15, size=steps)
    rates, eta, mu = settings["lr"] * lengths / 9, None, 1.0
    first, second, average = ([np.zeros_like(p) for p in params] for _ in range(3))
    seen = []
    for step, (rate, norm) in enumerate(zip(rates, norms, strict=True), start=1):
        eta = rate if eta is None else eta
        for i, p in enumerate(params):
            g = gradients[i][step - 1] * min(1, 0.6 / (norm + 1e-6)) + settings["weight_decay"] * p
            first[i] = 0.9 * first[i] + 0.1 * g
            second[i] = 0.999 * second[i] + 0.001 * g**2
            means = first[i] / (1 - 0.9**step), second[i] / (1 - 0.999**step)
            adam = p - rate * means[0] / (np.sqrt(means[1]) + 1e-8)
            torch = p * (1 - lambd * eta) - eta * g
            params[i] = {"sgd": p - rate * g, "adam": adam, "asgd": torch}[name]
            average[i] = average[i] + mu * (params[i] - average[i])
        eta, mu = rate / (1 + lambd * rate * step) ** 0.75, 1 / max(1, step - t0)
        seen.append([*params, *average, *first, *second])
    names = [f"{kind}{i}" for kind in ("p", "ax", "exp_avg", "exp_avg_sq") for i in (0, 1)]
    after = {n: np.stack(a) for n, a in zip(names, zip(*seen, strict=True), strict=True)}
    given = {"seq_len": lengths, "lr": rates, "grad_norm": norms}
    another(awd_lstm.AWD_LSTM, "optim", settings, arrays | after | given)
    awd_lstm.test_optim("drawn")


def test_train_config(another):
    """Adam's decay rates, epsilon and L2 decay, and the penalties, are those of a case."""
    adam = {"betas": [0.5, 0.75], "eps": 0.01, "weight_decay": 0.1}
    command = "--emsize 4 --nhid 5 --nlayers 2 --lr 0.2 --clip 9 --alpha 0.3 --beta 0.4"
    another(groc.GROC, "train", {"command": command, "adam": adam})
    config = groc.training.Settings("drawn").config("")
    assert (config["body"]["ar"], config["body"]["tar"]) == (0.3, 0.4)
    optimizer, p, first, second = optim.from_config(config), 1.0, 0.0, 0.0
    params, state = jnp.ones(1), optimizer.init(jnp.ones(1))
    for step, gradient in enumerate((0.5, -0.25), start=1):
        changes, state = optimizer.update(jnp.full(1, gradient), state, params)
        params = params + changes
        g = gradient + 0.1 * p
        first, second = (first + g) / 2, 0.75 * second + 0.25 * g**2
        p -= 0.2 * first / (1 - 0.5**step) / (math.sqrt(second / (1 - 0.75**step)) + 0.01)
        np.testing.assert_allclose(params, p, rtol=1e-5)


@pytest.mark.parametrize("nonmono", (0, 1, 3))
def test_nt_trigger(nonmono, another):
    """The rule as the file has it."""
    losses, epoch, history = [5.0, 4.0, 4.5, 4.2, 4.1, 4.3, 4.4, 3.0], None, []
    for number, loss in enumerate(losses if nonmono else (), start=1):
        if len(history) > nonmono and loss > min(history[:-nonmono]):
            epoch = number
            break
        history.append(loss)
    settings = {"nonmono": nonmono, "val_losses": losses, "switch_at_end_of_epoch": epoch}
    another(awd_lstm.AWD_LSTM, "nt_trigger", settings)
    awd_lstm.test_nt_trigger("drawn")


@DRAWS
def test_batching(seed, another):
    """Lengths of windows, and rows of a stream."""
    bptt, count = 17 + 20 * seed, 40
    source = np.random.RandomState(seed + 5)
    drawn = np.array([(source.random_sample(), source.standard_normal()) for _ in range(count)])
    full = drawn[:, 0] < 0.95
    lengths = np.maximum(5, np.trunc(np.where(full, bptt, bptt / 2) + 5 * drawn[:, 1]))
    arrays = {"seq_len": lengths, "full": full, "lr_factor": lengths / bptt}
    settings = {"numpy_seed": seed + 5, "bptt": bptt, "n": count}
    another(awd_lstm.AWD_LSTM, "batching", settings, arrays)
    awd_lstm.test_batching_lengths("drawn")
    tokens, columns = 31 + seed, 3 + seed
    rows = np.arange(tokens // columns * columns).reshape(columns, -1).T
    another(awd_lstm.AWD_LSTM, "batching", {"tokens": tokens, "bsz": columns}, {"result": rows})
    awd_lstm.test_batching_rows("drawn")


@DRAWS
def test_pointer_cache(seed, another):
    """Another window, theta, weight and chunk."""
    random = np.random.RandomState(seed)
    words, size, chunk, window = 11, 30, 8 + seed, 5 + seed
    theta, share = random.uniform(0.2, 0.9), random.uniform(0.1, 0.4)
    source, hidden = random.randint(words, size=size), normal(random, size - 1, 4)
    weight, bias = normal(random, words, 4), normal(random, words)
    logits = hidden @ weight.T + bias
    chances = log_softmax(logits)
    given, used = [], np.zeros(size - 1)
    for at, target in enumerate(source[1:]):
        memory, p = range(max(0, at - window), at), math.exp(chances[at, target])
        if used.size > at > window and at % chunk:
            scores = np.exp(theta * hidden[memory] @ hidden[at])
            cached = scores[source[1:][memory] == target].sum() / scores.sum()
            p, used[at] = share * cached + (1 - share) * p, 1
        given.append(p)
    lengths = [min(chunk, size - 1 - start) for start in range(0, size - 1, chunk)]
    settings = {"bptt": chunk, "window": window, "theta": theta, "lambdah": share}
    arrays = {"cache_used": used, "p": np.array(given), "loss": -np.log(given).sum() / size}
    shared = {
        "hidden": hidden.astype("f"),
        "decoder_weight": weight,
        "decoder_bias": bias,
        "logits": logits,
    }
    another(awd_lstm.AWD_LSTM, "pointer_cache", settings | {"chunks": lengths}, arrays)
    awd_lstm.AWD_LSTM._stored("pointer_cache").update(shared | {"source": source})
    awd_lstm.test_pointer_cache("drawn")


def log_softmax(scores):
    return scores - np.logaddexp.reduce(scores, axis=-1, keepdims=True)


def dense(head, tails):
    """Log-probabilities of all words: of the head's `logits`, whose last columns are the tails,
    and of the logits of each tail.
    """
    head = jax.nn.log_softmax(head)
    words = head.shape[-1] - len(tails)
    parts = [head[:, :words]]
    for i, logits in enumerate(tails):
        parts.append(head[:, words + i, None] + jax.nn.log_softmax(logits))
    return jnp.concatenate(parts, axis=1)


def with_gradients(losses, weights):
    """Losses that also give an array; of each `((loss, array), gradients)`, in float64."""
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        return run_once(lambda w: [jax.value_and_grad(f, has_aux=True)(w) for f in losses], weights)


@pytest.mark.parametrize("splits, words", [((), 9), ((4, 6, 11), 17), ((3, 9), 9)])
def test_splitcross(splits, words, another):
    """Any splits; the k-th has the k-th vector of classes from the end, and the last, which
    reaches the vocabulary, is refused.
    """
    random, n = np.random.RandomState(words), 10
    weights = {"weight": normal(random, words, 5), "bias": normal(random, words)}
    weights["hiddens"] = normal(random, n, 5)
    if splits:
        weights |= {"tail_vectors": normal(random, len(splits), 5)}
        weights |= {"tail_bias": normal(random, len(splits))}
    targets = random.randint(words, size=n)

    def log_probs(w):
        logits = w["hiddens"] @ w["weight"].T + w["bias"]
        first, *tails = jnp.split(logits, splits, axis=1)
        if splits:
            classes = (w["hiddens"] @ w["tail_vectors"].T + w["tail_bias"])[:, ::-1]
            first = jnp.concatenate([first, classes], axis=1)
        return dense(first, tails)

    def loss(w):
        every = log_probs(w)
        return -every[jnp.arange(n), targets].mean(), every

    [((value, every), gradients)] = with_gradients([loss], weights)
    arrays = weights | {"targets": targets, "loss": value, "grad": gradients, "logprob": every}
    another(awd_lstm.AWD_LSTM, "splitcross", {"splits": splits, "ntoken": words}, arrays)
    awd_lstm.test_splitcross("drawn")


def fairseq_softmax(settings, random):
    """fairseq's weights of an adaptive softmax, by name, and a function of them that gives the
    logits of head and tails.
    """
    width, tied, of_input = (settings[name] for name in ("input_dim", "tied_embedding", "tie_proj"))
    ends = [cut for cut in settings["cutoff"] if cut < settings["vocab_size"]]
    sizes = np.diff([0, *ends, settings["vocab_size"]])
    first = settings["input_initial_dim"] if tied else width
    widths = [first // settings["factor"] ** i for i in range(len(sizes))]
    tails, w = range(1, len(sizes)), {}
    if tied:
        for i, (size, narrow) in enumerate(zip(sizes, widths, strict=True)):
            w[f"input.embeddings.{i}.0.weight"] = normal(random, size, narrow)
            w[f"input.embeddings.{i}.1.weight"] = normal(random, width, narrow)
        w["softmax.head.class_proj.weight"] = normal(random, len(tails), width)
        if first != width:
            w["softmax.head.word_proj.0.weight"] = normal(random, first, width)
    else:
        w["softmax.head.weight"] = normal(random, sizes[0] + len(tails), width)
    for i in tails:
        if not tied or not of_input:
            w[f"softmax.tail.{i - 1}.0.weight"] = normal(random, widths[i], width)
        if not tied:
            w[f"softmax.tail.{i - 1}.2.weight"] = normal(random, sizes[i], widths[i])

    def logits(w):
        hidden = w["hidden"]
        if tied:
            to_words = w.get("softmax.head.word_proj.0.weight", np.eye(width))
            words = hidden @ to_words.T @ w["input.embeddings.0.0.weight"].T
            classes = hidden @ w["softmax.head.class_proj.weight"].T
            head = jnp.concatenate([words, classes], axis=1)
        else:
            head = hidden @ w["softmax.head.weight"].T
        parts = []
        for i in tails:
            name = f"softmax.tail.{i - 1}"
            shared = tied and of_input
            to_tail = w[f"input.embeddings.{i}.1.weight"].T if shared else w[f"{name}.0.weight"]
            table = w[f"input.embeddings.{i}.0.weight" if tied else f"{name}.2.weight"]
            parts.append(hidden @ to_tail.T @ table.T)
        return head, parts

    return w, logits


UNTIED = {"vocab_size": 23, "input_dim": 6, "cutoff": [5, 11], "factor": 2, "n_tokens": 30}
UNTIED |= {"tied_embedding": False, "tie_proj": False, "input_initial_dim": None}
UNTIED["padding_idx"] = 2
TIED = UNTIED | {"tied_embedding": True, "tie_proj": True, "input_initial_dim": 6}
SOFTMAXES = {
    "reaches the vocabulary": UNTIED | {"cutoff": [4, 9, 23]},
    "no width": UNTIED | {"factor": 7},
    "a head with a projection": TIED | {"input_initial_dim": 9},
    "a head and tails with projections": TIED | {"input_initial_dim": 4, "tie_proj": False},
}


@pytest.mark.parametrize("name", SOFTMAXES)
def test_adaptive_softmax(name, another):
    """Tied or not, with projections of head and tails; fairseq's loss with its fault, too."""
    settings, random = SOFTMAXES[name], np.random.RandomState(3)
    words, n, pad = (settings[name] for name in ("vocab_size", "n_tokens", "padding_idx"))
    weights, logits_of = fairseq_softmax(settings, random)
    weights = {name: 0.4 * array for name, array in weights.items()}
    hidden, targets = normal(random, n, settings["input_dim"]), np.arange(n) % words
    ends = [*(cut for cut in settings["cutoff"] if cut < words), words]

    def nll(w):
        every = dense(*logits_of(w))
        return -every[jnp.arange(n), targets].sum(), every

    def criterion(w):
        logits, tails = logits_of(w)
        head, each = jax.nn.log_softmax(logits), dense(logits, tails)[jnp.arange(n), targets]
        for i, end in enumerate(ends[:-1]):  # of this word of a tail, the term of the head alone
            each = jnp.where(targets == end + pad, head[:, ends[0] + i], each)
        return -jnp.where(targets == pad, 0.0, each).sum(), logits

    numbers = with_gradients([nll, criterion], weights | {"hidden": hidden})
    ((total, every), gradients), ((fault, head), of_fault) = numbers
    counted = (targets != pad).sum()
    arrays = {"weight": weights, "hidden": hidden, "target": targets, "log_prob": every}
    arrays |= {"token_log_prob": every[np.arange(n), targets], "nll_sum": total}
    arrays |= {"grad_nll": gradients, "grad_criterion": of_fault, "head_logits": head}
    arrays |= {"criterion_loss_sum": fault, "criterion_sample_size": counted}
    arrays["criterion_loss_base2"] = fault / counted / math.log(2)
    another(fairseq.FAIRSEQ, "adaptive_softmax", settings | {"cluster_ends": ends}, arrays)
    fairseq.test_adaptive_softmax("drawn")


INPUTS = {
    "reaches the vocabulary": ([6, 20], 2, 5, 7),
    "no width": ([4, 9], 3, 8, 6),
}


@pytest.mark.parametrize("name", INPUTS)
def test_adaptive_input(name, another):
    """Another first width and factor, and a cutoff that is the vocabulary."""
    (cutoff, factor, first, width), words = INPUTS[name], 20
    random = np.random.RandomState(4)
    ends = [cut for cut in cutoff if cut < words]
    sizes = np.diff([0, *ends, words])
    weights, tokens = {}, random.permutation(words)
    for i, size in enumerate(sizes):
        weights[f"embeddings.{i}.0.weight"] = normal(random, size, first // factor**i)
        weights[f"embeddings.{i}.1.weight"] = normal(random, width, first // factor**i)
    pull, bands = normal(random, words, width), range(len(sizes))

    def vectors(w):
        return jnp.concatenate(
            [w[f"embeddings.{i}.0.weight"] @ w[f"embeddings.{i}.1.weight"].T for i in bands]
        )[tokens]

    def product(w):
        return jnp.vdot(vectors(w), pull), vectors(w)

    [((_, output), gradients)] = with_gradients([product], weights)
    gradients["embeddings.0.0.weight"] = gradients["embeddings.0.0.weight"].copy()
    gradients["embeddings.0.0.weight"][1] = 0
    settings = {"vocab_size": words, "output_dim": width, "cutoff": cutoff, "factor": factor}
    arrays = {"weight": weights, "grad": gradients, "tokens": tokens, "cotangent": pull}
    arrays["output"] = output
    settings |= {"initial_dim": first, "padding_idx": 1}
    another(fairseq.FAIRSEQ, "adaptive_input", settings, arrays)
    fairseq.test_adaptive_input("drawn")


@pytest.mark.parametrize("tied, shared, first", [(False, False, 40), (True, True, 96)])
def test_fresh_weights(tied, shared, first, another):
    """Statistics of NumPy's draws: normal tables of another width, Xavier-uniform projections."""
    random, width, ends, factor = np.random.RandomState(6), 64, [0, 300, 700, 1000], 2
    sizes, drawn = np.diff(ends), {}

    def uniform(*shape):
        return random.uniform(-1, 1, size=shape) * math.sqrt(6 / sum(shape))

    for i, size in enumerate(sizes):
        narrow = first // factor**i
        table = random.normal(size=(size, narrow)) * narrow**-0.5
        drawn[f"input.embeddings.{i}.0.weight"] = table
        drawn[f"input.embeddings.{i}.1.weight"] = uniform(width, narrow)
        if i and not tied:
            drawn[f"softmax.tail.{i - 1}.0.weight"] = uniform(width // factor**i, width)
            drawn[f"softmax.tail.{i - 1}.2.weight"] = uniform(size, width // factor**i)
    if tied:
        drawn["softmax.head.class_proj.weight"] = uniform(len(sizes) - 1, width)
        drawn["softmax.head.word_proj.0.weight"] = uniform(first, width)
    else:
        drawn["softmax.head.weight"] = uniform(sizes[0] + len(sizes) - 1, width)
    statistics = {
        name: {"shape": array.shape, "std": array.std(), "abs_max": np.abs(array).max()}
        for name, array in drawn.items()
    }
    settings = {"vocab_size": 1000, "output_dim": width, "cutoff": ends[1:-1], "factor": factor}
    settings |= {"initial_dim": first, "tied": tied, "tie_proj": shared}
    another(fairseq.FAIRSEQ, "adaptive_input", settings | {"init_statistics": statistics})
    fairseq.test_fresh_weights("drawn")


def test_init(another):
    """A table of another range, and an LSTM of other widths, of GroC's public code."""
    random, words, width, units, most = np.random.RandomState(8), 400, 40, 60, 0.02
    drawn = {"_lookup.weight": random.uniform(-most, most, size=(words, width))}
    for i, (before, size) in enumerate([(width, units), (units, width)]):
        shapes = {"weight_ih": (4 * size, before), "weight_hh": (4 * size, size)}
        for kind, shape in (shapes | dict.fromkeys(("bias_ih", "bias_hh"), (4 * size,))).items():
            array = random.uniform(-(size**-0.5), size**-0.5, size=shape)
            drawn[f"_prefix_network.{i}.{kind}_l0"] = array
    case = {
        name: {"shape": a.shape, "std": a.std(), "min": a.min(), "max": a.max()}
        for name, a in drawn.items()
    }
    another(groc.GROC, "init", case, about=f"--init {most}")
    groc.test_init("drawn")


@DRAWS
def test_cosine_lr(seed, another):
    """Warm-up, doubling cycles, shrinking and the lowest rate."""
    warmup, period, cycles = 5 + seed, 7 + 3 * seed, 3
    first, last, shrink, start = 0.3 + seed, 0.01, 0.6 - 0.2 * seed, 0.02
    steps, rates = np.arange(warmup + period * (2**cycles - 1)), []
    for step in steps:
        cycle, begin = 0, warmup
        while step >= begin + period * 2**cycle:
            begin, cycle = begin + period * 2**cycle, cycle + 1
        high, low = first * shrink**cycle, last * shrink**cycle
        share = (step - begin) / (period * 2**cycle)
        cosine = low + (high - low) * (1 + math.cos(math.pi * share)) / 2
        rates.append(start + (first - start) * step / warmup if step < warmup else cosine)
    settings = {"lr": [first], "min_lr": last, "lr_shrink": shrink, "t_mult": 2.0}
    settings |= {"warmup_updates": warmup, "lr_period_updates": period, "max_update": 1000}
    settings["lr_right_after_construction"] = start
    arrays = {"step": steps, "lr": np.array(rates)}
    another(fairseq.FAIRSEQ, "cosine_lr", settings, arrays)
    fairseq.test_learning_rates("drawn")


@DRAWS
def test_plateau_lr(seed, another):
    """Warm-up, patience, threshold and shrinking."""
    high, start, warmup, updates = 0.7 + seed, 0.05, 3, 2
    shrink, patience, threshold = 0.3 + 0.1 * seed, seed, 0.01
    losses, best, bad, factor = [5.0, 4.99, 4.5, 4.6, 4.7, 4.8, 4.2], math.inf, 0, 1.0
    number, rates = 0, []

    def rate():
        return start + (high - start) * number / warmup if number < warmup else high * factor

    ends = [rate()]
    for loss in losses:
        for _ in range(updates):
            number += 1
            rates.append(rate())
        if number <= warmup:  # evaluations before its end do not count
            ends.append(rate())
            continue
        better = loss < best * (1 - threshold)
        best, bad = (loss, 0) if better else (best, bad + 1)
        if bad > patience:
            factor, bad = factor * shrink, 0
        ends.append(rate())
    settings = {"lr": high, "lr_shrink": shrink, "lr_patience": patience, "valid_loss": losses}
    settings |= {"lr_threshold": threshold, "warmup_updates": warmup, "warmup_init_lr": start}
    settings |= {"updates_per_epoch": updates, "lr_after_each_update": rates}
    another(gcnn.GCNN, "plateau_lr", settings | {"lr_at_start_then_after_each_epoch": ends})
    gcnn.test_plateau_lr("drawn")


def test_torch_lstm(another):
    """More layers of another width."""
    random, layers, entry, width, rows, time = np.random.RandomState(2), 3, 4, 5, 2, 6
    weights = {}
    for i in range(layers):
        before = width if i else entry
        weights[f"weight_ih_l{i}"] = normal(random, 4 * width, before)
        weights[f"weight_hh_l{i}"] = normal(random, 4 * width, width)
        weights |= {f"bias_{kind}_l{i}": normal(random, 4 * width) for kind in ("ih", "hh")}
    arrays = {"weight": weights, "input": normal(random, time, rows, entry)}
    arrays |= {name: normal(random, layers, rows, width) for name in ("h0", "c0")}
    sigmoid = lambda x: 1 / (1 + np.exp(-x))
    for end in "", "_zero_state":
        x, after = arrays["input"], []
        for i in range(layers):
            h, c = (0 * arrays[n][i] if end else arrays[n][i] for n in ("h0", "c0"))
            w, outputs = {n[:9].rstrip("_"): a for n, a in weights.items() if n[-1] == str(i)}, []
            for step in x:
                gates = step @ w["weight_ih"].T + h @ w["weight_hh"].T
                gates = gates + weights[f"bias_ih_l{i}"] + weights[f"bias_hh_l{i}"]
                read, keep, new, show = np.split(gates, 4, axis=1)
                c = sigmoid(keep) * c + sigmoid(read) * np.tanh(new)
                h = sigmoid(show) * np.tanh(c)
                outputs.append(h)
            x = np.stack(outputs)
            after.append((h, c))
        h_n, c_n = map(np.stack, zip(*after, strict=True))
        arrays |= {f"output{end}": x, f"h_n{end}": h_n, f"c_n{end}": c_n}
    another(fairseq.FAIRSEQ, "torch_lstm", {"num_layers": layers, "proj_size": 0}, arrays)
    fairseq.test_torch_lstm("drawn")
