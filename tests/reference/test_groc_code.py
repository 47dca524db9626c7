"""The numbers of GroC's public code: word vectors, output tables, baselines, evaluation in other
vocabularies and training; each test is named after the file that it reads.
"""

import collections
import functools
import hashlib
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaptive_jax.bodies.lstm import LSTM
from adaptive_jax.config.keys import complete
from adaptive_jax.data.batches.streams import bptt_lengths
from adaptive_jax.data.batches.windows import WindowBatch
from adaptive_jax.data.vocabulary.lexicon import (
    definitions,
    lexicon,
    read_entries,
    relations,
    write_entries,
)
from adaptive_jax.data.vocabulary.spelling import spelling
from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.inputs.groc import GroC
from adaptive_jax.inputs.lookup import Lookup
from adaptive_jax.interop.awd_lstm import parameters_of
from adaptive_jax.model.language_model import build
from adaptive_jax.outputs.computed import ComposedTable, MappedTable
from adaptive_jax.parallel import sharding
from adaptive_jax.scores.cache import Cache, interpolate, log_probs
from adaptive_jax.scores.scoring import make_scorer, mixed_with_uniform
from tests.random_runs import quiet
from tests.reference import groc, sets
from tests.reference import groc_training as training
from tests.reference.groc import (
    GROC,
    adaptive_of,
    corrections_of,
    encoder_of,
    in_order,
    is_ours,
    layers_of,
    lexicon_of,
    masks_in,
    misread,
    needed,
    of_code,
    outer_of,
    params_of,
    table_of,
)
from tests.reference.groc_training import (
    Trajectory,
    assert_same_parameters,
    columns,
    parameters,
    split_of,
)
from tests.reference.sets import batch_of, run_once
from tests.scores.test_caches import log_softmax

as_the_code = groc.as_the_code
DATA = sets.BESIDE.parent / "data"
OURS = [case for case in GROC.cases("encoder") if is_ours(GROC.about("encoder")["cases"][case])]
TABLES = [(file, case) for file in ("output", "baselines") for case in GROC.cases(file)]


def close_gradient(ours, theirs, name, atol=None):
    """1e-4 relative to each entry, or 1e-5 to the largest of its array."""
    atol = 1e-5 * np.abs(theirs).max() if atol is None else atol
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=atol, err_msg=name)


@pytest.mark.parametrize("case", OURS)
def test_encoder(case, as_the_code):
    """Vectors from what the convolutions see onwards, and the gradients of their parameters."""
    settings, arrays = GROC.case("encoder", case)
    model = encoder_of(settings["vocabulary"], settings)
    given = needed(lexicon_of(settings), model)

    def value(params):
        [(vectors, _, _)] = model.apply({"params": params, "lexicon": given}, method="bands")
        return jnp.vdot(vectors, arrays["G"]), vectors

    params = of_code(params_of("encoder", case))
    (scalar, vectors), gradient = run_once(jax.value_and_grad(value, has_aux=True), params)
    np.testing.assert_allclose(vectors, arrays["E"], atol=2e-5)
    np.testing.assert_allclose(scalar, arrays["scalar"], rtol=1e-4)
    expected = of_code(arrays.under("grad/"))
    assert expected and expected.keys() <= gradient.keys()
    for name, array in expected.items():
        close_gradient(gradient[name], array, name)


def test_encoder_letters():
    """Words are spelt in the letters of ELMo, and filters see what they see in the public code."""
    ids, words = GROC.arrays("encoder")["tables/char_ids"], GROC.about("encoder")["words"]
    for case in GROC.cases("encoder"):
        arrays = GROC.arrays("encoder", f"{case}/")
        if "conv_input" in arrays:
            letters = params_of("encoder", case)["_char_emb.weight"]
            seen = misread(jnp.asarray(letters), jnp.asarray(ids))
            np.testing.assert_allclose(seen.transpose(0, 2, 1), arrays["conv_input"], atol=1e-6)
    ours = spelling(Vocabulary(tuple(words), np.ones(len(words), np.int64)), ids.shape[1], True)
    np.testing.assert_array_equal(ours["letters"][ours["row_of_word"]], ids[:-1])


def hashed(shape, seed, scale):
    """The public code's weights of `encoder_full_size`: an integer hash of place and seed."""
    mask = np.uint64(2**32 - 1)
    h = (
        np.arange(np.prod(shape), dtype=np.uint64) + np.uint64(seed) * np.uint64(2654435761)
    ) & mask
    for _ in range(2):
        h = (((h >> np.uint64(16)) ^ h) * np.uint64(0x45D9F3B)) & mask
    h = (h >> np.uint64(16)) ^ h
    return ((h.astype(np.float64) / 2**32 * 2 - 1) * scale).astype(np.float32).reshape(shape)


@pytest.mark.parametrize("case", GROC.cases("encoder_full_size"))
def test_encoder_full_size(case, as_the_code):
    """Filters of the paper's size: vectors, and gradients by their norms and samples."""
    of_file, case = GROC.arrays("encoder_full_size"), GROC.settings("encoder_full_size", case)
    assert GROC.about("encoder_full_size")["words"] == GROC.about("encoder")["words"]
    sizes, conv, options = case["parameters"], case["conv"], case["options"]
    params = of_code({name: hashed(p["shape"], p["seed"], p["scale"]) for name, p in sizes.items()})
    words, features = of_file["E"].shape
    settings = groc.settings_of_command(options, case | {f"conv_{k}": v for k, v in conv.items()})
    model = encoder_of(words, settings)
    chunk = groc.option(options, "div", 500)
    given = needed(lexicon_of(settings | {"div": chunk}), model)
    # The file says it in words: sum(E * G), G = hash with seed 999, scale 1
    pull = hashed((words, features), 999, 1.0)

    def value(params):
        [(vectors, _, _)] = model.apply({"params": params, "lexicon": given}, method="bands")
        return jnp.vdot(vectors, pull), vectors

    (scalar, vectors), gradient = run_once(jax.value_and_grad(value, has_aux=True), params)
    np.testing.assert_allclose(vectors, of_file["E"], atol=2e-5)
    np.testing.assert_allclose(scalar, of_file["scalar"], rtol=1e-4)
    for name, settings in sizes.items():
        [(ours, _)] = of_code({name: np.zeros(settings["shape"], np.float32)}).items()
        theirs = np.asarray(gradient[ours])
        theirs = theirs if ours == "characters" else theirs.T
        norm, size = of_file[f"grad_norm/{name}"], theirs.size
        np.testing.assert_allclose(np.linalg.norm(theirs), norm, rtol=1e-4, err_msg=name)
        sample = of_file[f"grad_sample/{name}"]
        places = (np.arange(len(sample)) * max(1, size // len(sample))) % size
        np.testing.assert_allclose(
            theirs.ravel()[places], sample, rtol=1e-4, atol=2e-5 * norm, err_msg=name
        )


def composed(settings, params):
    """The vectors that the encoder makes of all words."""
    model = encoder_of(settings["vocabulary"], settings)
    given = needed(lexicon_of(settings), model)

    def vectors(params, given):
        return model.apply({"params": params, "lexicon": given}, method="bands")[0].table

    return run_once(vectors, of_code(params), given)


@pytest.mark.parametrize("file, case", TABLES)
def test_output_and_baselines(file, case, monkeypatch, as_the_code):
    """Vectors, biases, scores, losses and gradients of output tables, masks of training given.

    In training the public code also drops entries of the vectors that predict biases.
    """
    settings, arrays = GROC.case(file, case)
    params, words, train = (
        params_of(file, case),
        settings["vocabulary"],
        settings["mode"] == "train",
    )
    plain = composed(settings, params) if settings["char_emb"] else None
    table, ours = table_of(settings, params, plain)
    chunks, of_bias = masks_in(settings, arrays)
    given = {"lexicon": {"cnn": {"spelling": lexicon_of(settings)["spelling"]}}}
    given = given if settings["cnnsoftmax"] else {}
    hidden, targets = arrays["hidden"], arrays["target"].ravel()
    size = settings["div"] if len(chunks) > 1 else words

    def tables(variables):
        call = {"train": train, "rngs": {"dropout": jax.random.key(0)}}
        if of_bias is None and size == words:
            [(vectors, _, bias)] = table.apply(variables, method="bands", **call)
            return vectors, bias
        parts = [jnp.arange(i, min(i + size, words)) for i in range(0, words, size)]
        made = [table.apply(variables, part, method="vectors", **call) for part in parts]
        vectors, bias = jnp.concatenate(made), variables["params"]["bias"]
        if "bias_weights" in variables["params"]:
            rate = settings["bias_drop"] if of_bias is not None else 0.0
            kept = vectors * (1.0 if of_bias is None else of_bias / (1 - rate))
            bias = jnp.tanh(kept @ variables["params"]["bias_weights"][:, 0] + bias)
        return vectors, bias

    def loss(ours):
        vectors, bias = tables({"params": ours} | given)
        if settings["cnnsoftmax"] and chunks[0]:  # our table has no dropout on them
            vectors *= chunks[0][0][None] / (1 - settings["output_dropout"])
        logits = hidden @ vectors.T + bias[None]
        nll = jax.nn.logsumexp(logits, axis=1) - logits[np.arange(len(targets)), targets]
        return nll.mean(), (vectors, bias, logits, nll)

    if train:
        in_order(monkeypatch, chunks)
    found, gradient = run_once(jax.value_and_grad(loss, has_aux=True), ours)
    mean, (vectors, bias, logits, nll) = found
    if "E_in" in arrays:
        of_input = vectors
        if layers_of(settings):
            mask = chunks[0][0] if train and settings["output_dropout"] else 1.0
            rate = settings["output_dropout"] if train else 0.0
            of_input = ours["source"]["table"] * np.atleast_2d(mask) / (1 - rate)
        np.testing.assert_allclose(of_input, arrays["E_in"], atol=2e-5)
    for array, name in (vectors, "E_out"), (bias, "bias"):
        if name in arrays:
            np.testing.assert_allclose(array, arrays[name], atol=2e-5)
    for array, name in (logits, "logits"), (nll, "nll"), (mean, "loss"):
        np.testing.assert_allclose(array, arrays[name], atol=2e-5)
    check_gradients(settings, gradient, dict(arrays.under("grad/")))


def check_gradients(settings, gradient, theirs):
    """Those of parameters that only the output has."""
    expected = outer_of(theirs)
    if "_decoder.weight" in theirs:
        expected["source"] = {"table": theirs["_decoder.weight"]}
    if settings["adaptiveoutputs"]:
        expected["source"] = adaptive_of(theirs, "_decoder")
    if settings["cnnsoftmax"]:
        expected |= corrections_of(theirs)
    for name, array in expected.items():
        inner = array if isinstance(array, dict) else {"": array}
        for key, each in inner.items():
            mine = gradient[name][key] if key else gradient[name]
            close_gradient(mine, each, f"{name}/{key}", atol=1e-6)


def init_range():
    """The range of fresh weights, which `init.json` gives in words."""
    return groc.option(GROC.about("init")["about"], "init")


def fresh(case, theirs):
    """Fresh parameters of ours, by the public code's names."""
    key, shapes = jax.random.key(0), {name: each["shape"] for name, each in theirs.items()}
    words, features = shapes.get("_lookup.weight", (None, None))
    ours = {}
    if features:
        lookup = Lookup(words, features, init_range=init_range())
        ours["_lookup.weight"] = run_once(lookup.init, key, np.arange(2))["params"]["table"]
    depth = sum(name.startswith("_output") and name.endswith("bias") for name in theirs)
    predicted = "_bias.bias" in shapes
    if depth or predicted:
        features = features or shapes["_bias.weight"][1]
        form = {"form": "bilinear"} if depth == 1 else {"depth": depth}
        form |= {"bias": "predicted"} if predicted else {}
        table = MappedTable(Lookup(words or 5, features), features, **form)
        made = run_once(lambda: table.init(key, method="bands"))["params"]
        for i in range(depth):
            ours[f"_output_network.{i}.weight"] = made[f"kernel_{i}"]
            ours[f"_output_network.{i}.bias"] = made[f"kernel_bias_{i}"]
        if predicted:
            ours["_bias.weight"] = made["bias_weights"]
    if "_char_emb.weight" in shapes and "_cnnsoftmax_M.weight" not in shapes:
        filters = [s for name, s in shapes.items() if re.match(r"_char_network.*weight", name)]
        shape = {"width": shapes["_char_emb.weight"][1], "init_range": init_range()}
        shape |= {"filters": tuple((width, count) for count, _, width in filters)}
        shape |= {"strides": (), "length": max(20, *(s[2] for s in filters))}
        shape["highway_layers"] = sum(
            bool(re.fullmatch(r"_char_highways.*weight", name)) for name in shapes
        )
        model = GroC(5, shapes["_char_linear.weight"][0], lexicon="given", **shape)
        made = run_once(model.init, key, jnp.zeros(1, jnp.int32))["params"]
        ours |= {
            name: made[inner]
            for name, shape in shapes.items()
            for inner in of_code({name: np.zeros(shape, np.float32)})
        }
    if "_cnnsoftmax_M.weight" in shapes:
        width, correction = shapes["_cnnsoftmax_M.weight"]
        table = ComposedTable(Lookup(words, width), width, correction=correction)
        made = run_once(lambda: table.init(key, method="bands"))["params"]
        ours["_cnnsoftmax_M.weight"] = made["correction_map"]
    layers = [name for name in shapes if name.endswith("weight_hh_l0")]
    widths = tuple(shapes[name][1] for name in layers)
    entry = shapes[layers[0].replace("hh", "ih")][1]
    lstm = LSTM(entry, widths, biases=2)
    made = run_once(lambda: lstm.init(key, jnp.zeros((1, 1, entry)), ()))["params"]
    kinds = {"weight_ih": "input", "weight_hh": "recurrent"}
    kinds |= {"bias_ih": "bias", "bias_hh": "recurrent_bias"}
    for i in range(len(widths)):
        for theirs_kind, kind in kinds.items():
            ours[f"_prefix_network.{i}.{theirs_kind}_l0"] = made[f"{kind}_{i}"]
    return ours


@pytest.mark.parametrize("case", GROC.cases("init"))
def test_init(case):
    """Fresh parameters lie where the public code's do. What belongs to a word, bias or correction,
    starts at 0 here, and bands of an adaptive input as their own paper's do.
    """
    theirs = GROC.settings("init", case)
    for name, array in fresh(case, theirs).items():
        array, of = np.asarray(array), theirs[name]
        assert array.size == np.prod(of["shape"])
        if np.abs(array).max() > 1:  # a normal distribution, or biases of gates, which are 1
            assert array.std() == pytest.approx(of["std"], rel=0.05), name
            continue
        bound = max(-of["min"], of["max"])
        assert 0.85 * bound < np.abs(array).max() < 1.1 * bound, name
        few = 0.05 if array.size > 1000 else 0.25
        assert array.std() == pytest.approx(of["std"], rel=few), name


def digest(table):
    return hashlib.sha256(np.ascontiguousarray(table, "<i4").tobytes()).hexdigest()


def test_vocabulary(real_wordnet, tmp_path):
    """Order, letters, relations and definitions of the words of a corpus, exactly."""
    facts, arrays = GROC.about("vocabulary")["facts"], GROC.arrays("vocabulary")
    words = tuple(arrays["words"].tobytes().decode().removesuffix("\n").split("\n"))
    vocabulary = Vocabulary(words, np.arange(len(words), 0, -1))
    if not (DATA / facts["data"]).is_dir():
        pytest.skip(f"needs {DATA / facts['data']}")
    files = [DATA / facts["data"] / f"{name}.txt" for name in ("train", "valid", "test")]
    lines = [line for file in files for line in file.read_text().splitlines()]
    tokens = [word for line in lines for word in (*line.split(), "<eos>")]
    counts = collections.Counter(tokens)  # in order of first appearance
    assert tuple(sorted(reversed(counts), key=counts.__getitem__, reverse=True)) == words
    head = arrays["train_ids_head"]
    assert [vocabulary.index[word] for word in tokens[: len(head)]] == head.tolist()
    spelt = spelling(vocabulary, facts["max_charlen"], True)
    empty = [259, 260] + [261] * (facts["max_charlen"] - 2)
    letters = np.concatenate([spelt["letters"][spelt["row_of_word"]], [empty]])
    assert digest(letters) == facts["sha256_char_ids_int32"]
    entries = tmp_path / "lexicon.jsonl"
    write_entries(entries, read_entries(vocabulary, str(real_wordnet)))
    for name, source, most in (
        ("relations", relations, facts["max_rellen"]),
        ("definitions", definitions, facts["max_deflen"]),
    ):
        ids = source(vocabulary, str(entries), most, "code")["words"]
        empty = np.full((1, most), len(vocabulary))
        table = np.concatenate([np.where(ids < 0, len(vocabulary), ids), empty])
        np.testing.assert_array_equal(table[arrays["rows"]], arrays[name])
        assert digest(table) == facts[f"sha256_{name}_int32"]
        assert (ids[:, 0] >= 0).sum() == facts[f"words_with_a_{name.removesuffix('s')}"]


def domain(case):
    """Settings of a case of `cross_domain`, its arrays, those of its model, and its streams."""
    settings, arrays = GROC.case("cross_domain", case)
    model = GROC.arrays("cross_domain", f"adapted_{settings['model']}/")
    hidden = model["output"].reshape(*model["input"].shape, -1)
    bias = model["bias"].copy()
    if settings["downweight_oov"] > 0:
        bias[model["new_words"]] += math.log(settings["downweight_oov"])
    logits = hidden.astype(np.float64) @ model["E_out"].T + bias
    loss = -arrays["logprob_target"].sum() / hidden.shape[1] / settings["rows_in_stream"]
    np.testing.assert_allclose(loss, float(settings["test_loss"]), rtol=1e-6)
    return settings, arrays, hidden, logits


SCORED = GROC.cases("cross_domain", has="method")
GLOBAL = [case for case in SCORED if GROC.about("cross_domain")["cases"][case].get("global_norm")]


@pytest.mark.parametrize("case", [case for case in SCORED if case not in GLOBAL])
def test_cross_domain(case):
    """Uniform mixing, both caches and down-weighting; each stream has a cache of its own."""
    settings, arrays, hidden, logits = domain(case)
    words, steps = logits.shape[-1], np.arange(len(hidden))
    kinds = {"interpolate_unigram": "unigram_softmax", "interpolate_neural": "local"}
    for stream in range(hidden.shape[1]):
        targets = arrays["target"][:, stream]
        nll = -log_softmax(logits[:, stream])[steps, targets]
        nll = mixed_with_uniform(nll, 1 - settings["lamu"], words)
        if kind := kinds.get(settings["method"]):
            options = {"theta": (settings["theta"],)} if kind == "local" else {}
            cache = Cache(kind, cache_size=settings["cache_size"], **options)
            [chances] = log_probs(cache, hidden[:, stream], targets, words, quiet)
            nll = interpolate(nll, chances, settings["lam"])
        expected = arrays["logprob_target"][:, stream]
        np.testing.assert_allclose(-nll, expected, rtol=2e-5, atol=2e-5)


MODELS = [name.removeprefix("model_") for name in GROC.cases("cross_domain", has="options")]
PLAIN = [
    name for name in MODELS if f"model_{name}/param/_lookup.weight" in GROC.arrays("cross_domain")
]


def model_of(name):
    """The file's settings of a model, its tensors, and the config of its body."""
    about = GROC.settings("cross_domain", f"model_{name}")
    of_groc = GROC.arrays("cross_domain", "model_groc/param/")
    tensors = {key: of_groc[key] for key in about["same_as_model_groc"]}
    tensors |= dict(GROC.arrays("cross_domain", f"model_{name}/param/"))
    options = about["options"]
    width, units = groc.option(options, "emsize", 0), groc.option(options, "nhid", 0)
    layers = groc.option(options, "nlayers", 0)
    body = {"body.name": "lstm", "body.features": width, "body.biases": 2}
    return about, tensors, body | {"body.widths": (*[units] * (layers - 1), width)}


def scored(name):
    """The cases that a model's scorer makes: its own words and the local cache."""
    about = GROC.about("cross_domain")["cases"]
    ways = "interpolate_uniform", "interpolate_neural"
    return [
        case
        for case in SCORED
        if about[case]["model"] == name and about[case]["method"] in ways and case not in GLOBAL
    ]


def rows_of(inputs, targets):
    """Streams as one batch, a row each, which begins anew."""
    return batch_of(inputs, targets)._replace(reset=np.ones(len(inputs), bool))


@pytest.mark.parametrize("name", PLAIN)
def test_cross_domain_of_a_table(name):
    """Hidden states after new words, whose vectors are zeros, and scores of new words, which
    have the uniform share only.
    """
    about, tensors, body = model_of(name)
    vocabularies = GROC.about("cross_domain")["vocabularies"]
    own, every = vocabularies[about["vocabulary"]], vocabularies["d_eval"]
    ids = list(dict.fromkeys([*own, *every]))
    ids, words = np.array([ids.index(word) for word in every], np.int32), len(every)
    names = {"_prefix_network": "rnns", "_lookup": "encoder", "_decoder": "decoder"}
    for theirs, ours in names.items():
        tensors = {key.replace(theirs, ours): array for key, array in tensors.items()}
    table = {"name": "own" if "decoder.weight" in tensors else "tied", "bias": True}
    output = {"output.name": "softmax"} | {
        f"output.table.{key}": each for key, each in table.items()
    }
    model = build(complete({"input.name": "lookup"} | body | output), len(own))
    params = jax.tree.map(jnp.asarray, parameters_of(tensors))
    arrays = GROC.arrays("cross_domain", f"adapted_{name}/")
    assert sorted(arrays["new_words"]) == np.flatnonzero(ids >= len(own)).tolist()
    inputs = ids[arrays["input"].T]
    expected = arrays["output"].reshape(*arrays["input"].shape, -1).swapaxes(0, 1)
    scorer = make_scorer(model, sharding.device_mesh(), 0, len(own), words, hidden=True)
    carry, cases_of = model.body.initial_carry(len(inputs)), scored(name)
    assert cases_of
    for case in cases_of:
        settings = GROC.settings("cross_domain", case)
        targets = ids[GROC.arrays("cross_domain", f"{case}/")["target"].T]
        batch = rows_of(np.where(inputs < len(own), inputs, -1).astype(np.int32), targets)
        first = np.zeros(len(inputs), np.int32)
        (nll, hidden), _ = scorer(params, {}, {}, WindowBatch(batch, first), carry)
        np.testing.assert_allclose(hidden, expected, atol=2e-5)
        if settings["method"] == "interpolate_uniform":
            share = 1 - settings["lamu"]
            mixed = mixed_with_uniform(np.asarray(nll), share, words)
            of_file = GROC.arrays("cross_domain", f"{case}/")["logprob_target"].T
            np.testing.assert_allclose(-mixed, of_file, rtol=2e-5)
            new = targets >= len(own)
            np.testing.assert_allclose(mixed[new], -math.log(share / words))


@pytest.mark.parametrize("name", [name for name in MODELS if name not in PLAIN])
def test_cross_domain_of_composed_models(name, as_the_code, real_wordnet):
    """From the letters and WordNet's words of a union vocabulary to scores of new words,
    down-weighted or not.

    The public code sets the biases of words to 0 in another vocabulary.
    """
    about, tensors, body = model_of(name)
    adapted = GROC.arrays("cross_domain", f"adapted_{name}/")
    every, new = GROC.about("cross_domain")["vocabularies"]["d_eval"], adapted["new_words"]
    words = len(every)
    order = [*(i for i in range(words) if i not in new), *new]  # new words last
    places = np.argsort(order).astype(np.int32)
    vocabulary = Vocabulary(tuple(every[i] for i in order), np.ones(words, np.int64))
    depth = sum(key.startswith("_output_network") and "bias" in key for key in tensors)
    predicted, options = "_bias.bias" in tensors, about["options"]
    how = {"depth": depth, "bias": "predicted" if predicted else "none"}
    how |= {"activation": groc.option(options, "joint_emb_activation", "")} if depth else {}
    encoder = groc.encoder_settings(groc.settings_of_command(options, about))
    layers = {
        "input.name": "groc",
        "input.lexicon": str(real_wordnet),
        **{f"input.{key}": each for key, each in encoder.items()},
        "output.name": "softmax",
        "output.table.name": "mapped",
    } | {f"output.table.{key}": each for key, each in how.items()}
    model = build(complete(layers | body), words)
    inner = {k.replace("_prefix_network", "rnns"): a for k, a in tensors.items() if "_prefix" in k}
    width = body["body.features"]
    inner |= {"encoder.weight": np.zeros((1, width)), "decoder.bias": np.zeros(1)}
    outer = outer_of(tensors)
    table = outer if predicted else {key: a for key, a in outer.items() if key != "bias"}
    params = {"input": of_code(tensors), "body": parameters_of(inner)["body"]}
    params |= {"output": {"table": table}} if table else {}
    known = lexicon(vocabulary, model.lexicon_spec())

    def compose(params):
        variables = {"params": params, "lexicon": known}
        return model.apply(variables, jnp.arange(words), method="compose", mutable=["tables"])[1]

    tables = jax.jit(compose)(params)["tables"]
    vectors = tables["output"]["table"]["vectors"]
    np.testing.assert_allclose(vectors, adapted["E_out"][order], atol=2e-5)
    for case in scored(name):
        settings, arrays = GROC.case("cross_domain", case)
        targets = places[arrays["target"].T]
        batch = rows_of(places[adapted["input"].T], targets)
        weight = settings["downweight_oov"]
        options = {"hidden": True, "down_weight": weight if weight > 0 else 1.0}
        sizes = words - len(new), words
        scorer = make_scorer(model, sharding.device_mesh(), 0, *sizes, **options)
        shown = WindowBatch(batch, np.zeros(len(targets), np.int32))
        carry = model.body.initial_carry(len(targets))
        (nll, hidden), _ = scorer(params, known, tables, shown, carry)
        for stream in range(len(targets)):
            mixed = mixed_with_uniform(np.asarray(nll[stream]), 1 - settings["lamu"], words)
            if settings["method"] == "interpolate_neural":
                cache = Cache(theta=(settings["theta"],), cache_size=settings["cache_size"])
                given = np.asarray(hidden[stream]), targets[stream], words, quiet
                mixed = interpolate(mixed, log_probs(cache, *given)[0], settings["lam"])
            expected = arrays["logprob_target"][:, stream]
            np.testing.assert_allclose(-mixed, expected, rtol=2e-5, atol=2e-5)


RUNS = GROC.cases("train", has="steps")
TUNED = GROC.cases("train", has="adam", lacks="steps")


def of_run(case):
    """The settings of a run, its parameters at the start, and its train and validation rows."""
    run = training.Settings(case)
    batches = run["batch_size"], run.case["eval_batch"]["valid"]
    splits = (split_of(run.case["data"], split) for split in ("train", "valid"))
    rows = [columns(ids, count) for ids, count in zip(splits, batches, strict=True)]
    return run, parameters(run.arrays, "start/"), *rows


def windows_of(arrays):
    return list(zip(*(arrays[name].tolist() for name in ("i", "seq", "lr")), strict=True))


@functools.cache
def plain_run(case):
    """A run without composed vectors, trained to its end, with losses and norms of updates and the
    losses of validation windows.
    """
    run, start, train, valid = of_run(case)
    ours, seen, validation = Trajectory(run, start, run.case["data"], ""), [], []
    updates = windows_of(run.arrays)
    for number, window in enumerate(updates):
        seen.append(ours.advance(train, *window))
        if number + 1 == len(updates) or updates[number + 1][0] == 0:
            carry = ours.carry
            validation += ours.validate(valid)
            ours.carry = carry
    return ours, np.array(seen), validation


PLAIN_RUNS = [case for case in RUNS if not training.Settings(case).composed]


@pytest.mark.parametrize("case", PLAIN_RUNS)
def test_train(case):
    """Lengths of windows and rates, from its random numbers; losses, norms, validation and
    parameters.
    """
    run, _, train, _ = of_run(case)
    arrays, bptt = run.arrays, run["bptt"]
    starts, lengths, drawn = (arrays[name] for name in ("i", "seq", "drawn"))
    source = np.random.RandomState(run["seed"])
    numbers = np.array([(source.random_sample(), source.standard_normal()) for _ in drawn]).T
    np.testing.assert_array_equal(bptt_lengths(bptt, *numbers), drawn)
    np.testing.assert_array_equal(lengths, np.minimum(drawn, len(train) - 1 - starts))
    np.testing.assert_array_equal(starts[1:], np.where(starts[1:] == 0, 0, (starts + lengths)[:-1]))
    np.testing.assert_allclose(arrays["lr"], run["lr"] * drawn / bptt, rtol=1e-6)
    ours, seen, validation = plain_run(case)
    assert len(seen) == run.case["steps"]
    np.testing.assert_allclose(seen[:, 0], arrays["loss"], rtol=1e-4)
    np.testing.assert_allclose(seen[:, 1], arrays["gnorm"], rtol=1e-4)
    np.testing.assert_allclose(validation, arrays["eval_loss"][: len(validation)], rtol=1e-4)
    assert_same_parameters(ours.params, parameters(arrays, "end/"), 1e-3)


@pytest.mark.parametrize("case", [case for case in TUNED if not training.Settings(case).composed])
def test_train_finetune(case):
    """Rows are carried over by word; then the run, with a fresh optimizer."""
    run, [before] = training.Settings(case), PLAIN_RUNS
    old, start = training.Settings(before), parameters(run.arrays, "start/")
    np.testing.assert_array_equal(start["input"]["table"], start["output"]["table"].pop("table_0"))
    vocabularies = GROC.about("cross_domain")["vocabularies"]
    words, own = (vocabularies[each.case["data"]] for each in (run, old))
    both = np.array([(own.index(word), i) for i, word in enumerate(words) if word in own])
    assert len(both) == len(own)
    ended = parameters(old.arrays, "end/")
    for group, name in ("input", "table"), ("output", "bias"):
        theirs, ours = (each[group].get("table", {}) for each in (ended, start))
        theirs, ours = (a if group == "input" else a[name] for a in (theirs, ours))
        np.testing.assert_array_equal(ours[both[:, 1]], theirs[both[:, 0]])
    check_finetuning(Trajectory(run, start, run.case["data"], ""), run, 1e-4)


def check_finetuning(ours, run, tolerance):
    source, start = columns(split_of(run.case["data"], "train"), run["batch_size"]), 0
    names = "seq", "lr", "loss", "gnorm"
    for number, (rows, rate, *expected) in enumerate(
        zip(*(run.arrays[name].tolist() for name in names), strict=True)
    ):
        rows = min(rows, len(source) - 1 - start)
        found = ours.advance(source, start, rows, rate)
        assert found == pytest.approx(expected, rel=tolerance), number
        start += rows


def follow(ours, train, valid):
    """A sparse run pass by pass: which tables it uses, losses and norms."""
    run = ours.settings.arrays
    full = run["rand"] <= ours.settings["char_update_ratio"]
    each = -(-(len(valid) - 1) // ours.bptt)  # windows of a validation
    validated = each * ours.settings["epochs"]
    stored = encoded = ours.run(ours.compose, ours.params)["input"]
    number, validation, tables = 0, [], []
    for at in range(len(full) - (len(run["eval_loss"]) - validated)):  # the test split comes last
        if not run["emb_training"][at]:
            if full[at]:
                stored = ours.run(ours.compose, ours.params)["input"]
            tables.append({"input": stored})
            if len(tables) == each:
                carry = ours.carry
                validation += ours.validate(valid, tables)
                ours.carry, tables = carry, []
            encoded = stored
        else:
            given = None if full[at] else {"input": stored}
            window = int(run["i"][number]), int(run["seq"][number]), float(run["lr"][number])
            numbers = ours.advance(train, *window, given)
            expected = [run["loss"][number], run["gnorm"][number]]
            assert numbers == pytest.approx(expected, rel=5e-4), number
            stored = encoded = ours.tables["input"]
            number += 1
        squares = float(jnp.sum(encoded["vectors"] ** 2))
        assert squares == pytest.approx(run["emb_sum_of_squares"][at], rel=5e-4), at
    assert number == len(run["loss"]) == ours.settings.case["steps"]
    np.testing.assert_allclose(validation, run["eval_loss"][:validated], rtol=1e-4)


@pytest.mark.parametrize("case", [case for case in RUNS if case not in PLAIN_RUNS])
def test_train_sparse(case, as_the_code, real_wordnet):
    """The sparse run, then finetuning on other words. Updates that keep the vectors frozen
    (appendix B.4) keep the encoder still.
    """
    run, start, *rows = of_run(case)
    ratio = run["char_update_ratio"]
    np.testing.assert_array_equal(run.arrays["emb_has_gradient"], run.arrays["rand"] <= ratio)
    rates = run["lr"] * run.arrays["drawn"] / run["bptt"]
    np.testing.assert_allclose(run.arrays["lr"], rates, rtol=1e-6)
    ours = Trajectory(run, start, run.case["data"], real_wordnet)
    follow(ours, *rows)
    assert_same_parameters(ours.params, parameters(run.arrays, "end/"), 1e-3)
    trained = ours.params
    for case in TUNED:
        tuned = training.Settings(case)
        if tuned.composed:
            ours = Trajectory(tuned, trained, tuned.case["data"], real_wordnet)
            found = ours.params["output"]["table"]["bias_weights"].T
            np.testing.assert_allclose(found, tuned.arrays["start/_bias.weight"], atol=1e-3)
            check_finetuning(ours, tuned, 1e-3)


LEFT_OUT = sets.SIZES | {
    "*:E_*": "the vectors themselves are compared",
    "*:no_gradient": "an empty list; with names it holds no number",
    "baselines:bias_drop": "of training, in which biases are not predicted there",
    "*:joint_locked_dropout": "the masks say it",
    "*:fullsoftmax": "the parameters say it",
    "*:tied": "the parameters say it",
    "cross_domain:alpha": "of the sum that is none of ours",
    "cross_domain:global_norm": "of the sum that is none of ours",
    **dict.fromkeys(
        [f"cross_domain:{n}" for n in ("batch", "bptt", "full_steps", "ppl", "steps_predicted")],
        "of losses and targets, which are compared",
    ),
    "encoder:chunks": "the size of a chunk is read",
    "encoder_full_size:*.first_values": "of weights that are made by the file's rule",
    "init:*": "of parameters that start otherwise here, as `test_init` says",
    "train:adam.lr": "the command says it",
    **dict.fromkeys(
        ("train:steps", "train:conv_counts", "train:eval_batch.*"),
        "counts that the runs read as they are made",
    ),
    "encoder*/pooled": "inner values of surface vectors",
    "encoder*/highway_out": "inner values of surface vectors",
    "encoder*/surface": "surface vectors: what is made of them is compared",
    "encoder*/combine_*": "what they make together is compared",
    "encoder_full_size/rows": "rows of inner values",
    "output/*/grad/_char*": "of vectors that `encoder` compares, through a loss",
    "*/grad/_lookup*": "of the input's table; output and LSTM are compared apart",
    "*/grad/_prefix_network*": "of the LSTM, whose gradients awd_lstm's files have",
    **dict.fromkeys(
        ("*/input", "*/embedded", "*/[hc][0T]_*", "*/raw_output_*"),
        "of the LSTM before an output: awd_lstm's files have such LSTMs",
    ),
    "cross_domain/*/logprob_full": "of every word; those of targets are compared",
    "train/*/eval_targets": "sizes of windows that are compared",
    "train/*/start/*": "of the finetuned encoder, which training left as it was",
    "train/*/end/*": "of layers that keep still",
    "param_counts*": "tests/test_configs.py has the counts of the models of the paper",
    "vocabulary.npz": "read where the corpus and WordNet are",
}
NO_LAYER = "products, networks over definitions and parts of a vocabulary, which no layer here has"
APART = {f"encoder/{case}": NO_LAYER for case in GROC.cases("encoder") if case not in OURS}
FILLED = GROC.cases("train", has="command", lacks="adam")
APART |= {f"train/{case}": "as PyTorch before 2.0, whose Adam moves the encoder" for case in FILLED}
ONE_SUM = "words and the cache under one sum, a way that is none of ours"
APART |= {f"cross_domain/{case}": ONE_SUM for case in GLOBAL}
STOPS = GROC.cases("train", has="stops_with")
APART |= {f"train/{case}": "the public code stops with an error" for case in STOPS}
LEFT_OUT |= APART | {f"{case}/*": why for case, why in APART.items()}


def test_all_is_read(request):
    """A case, an array or a file that no test reads would be a number that nothing checks."""
    sets.assert_all_is_read(GROC, request, LEFT_OUT)
