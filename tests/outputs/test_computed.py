"""Tables whose vectors are computed: the numbers of GroC's public code for its baselines, and
dropout that an update shares.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from adaptive_jax.inputs.adaptive import AdaptiveInput
from adaptive_jax.inputs.lookup import Lookup
from adaptive_jax.numerics import dropout
from adaptive_jax.outputs.computed import AssembledTable, ComposedTable, MappedTable

with np.load(Path(__file__).parents[1] / "fixtures" / "groc_tables.npz") as arrays:
    ARRAYS = dict(arrays)
TRAINED = {"layer_dropout": 0.3, "bias": "own"}
CASES = {  # settings of `MappedTable`; the dropout of its source is in the source here
    "bilinear": {"form": "bilinear", "bias": "own"},
    "bilinear_train": {"form": "bilinear"} | TRAINED,
    "deep_residual": {"depth": 4, "activation": "selu", "bias": "own"},
    "deep_residual_train": {"depth": 4, "activation": "selu"} | TRAINED,
    "k1_relu": {"depth": 1, "activation": "relu", "bias": "predicted"},
    "k4_sigmoid": {"depth": 4, "activation": "sigmoid", "bias": "predicted"},
}


class Rows(nn.Module):
    """Vectors that are given, in the place of a CNN."""

    vocabulary_size: int

    def __call__(self, words):
        return jnp.asarray(ARRAYS["convolutional/E_in"])[words]


def part(case, kind=""):
    """Arrays of a case, or a kind of them, by the rest of their names."""
    prefix = f"{case}/{kind}"
    return {
        name.removeprefix(prefix): jnp.asarray(array)
        for name, array in ARRAYS.items()
        if name.startswith(prefix)
    }


def parameters(arrays, bias):
    """Those of the public code, or gradients of them, as a table of ours has them."""
    ours = {"bias": arrays["_bias.weight"][0]}
    if bias == "predicted":
        ours = {"bias": arrays["_bias.bias"][0], "bias_weights": arrays["_bias.weight"].T}
    for name, array in arrays.items():
        if name.startswith("_output_network"):
            _, layer, kind = name.split(".")
            ours |= (
                {f"kernel_{layer}": array.T}
                if kind == "weight"
                else {f"kernel_bias_{layer}": array}
            )
    return ours


@pytest.mark.parametrize("case", CASES)
def test_baselines_and_output(case, monkeypatch):
    """Vectors, biases, losses and gradients of mapped tables, the masks of training given."""
    expected, train = part(case), case.endswith("_train")
    masks = iter(
        [expected[name].ravel() > 0 for name in sorted(expected) if name.startswith("mask_")][4:]
    )
    monkeypatch.setattr(dropout, "keep_mask", lambda *_: next(masks))
    words, features = expected["E_in"].shape
    table = MappedTable(Lookup(words, features), features, **CASES[case])
    hidden, targets = expected["hidden"], expected["target"].ravel()

    def loss(params):
        variables = {"params": params | {"source": {"table": expected["E_in"]}}}
        [(vectors, _, bias)] = table.apply(
            variables, train=train, rngs={"dropout": jax.random.key(0)}, method="bands"
        )
        logits = hidden @ vectors.T + bias[None]
        nll = (
            jax.nn.logsumexp(logits, axis=1)
            - jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
        )
        return nll.mean(), (nll, vectors, bias)

    params = parameters(part(case, "param/"), CASES[case]["bias"])
    (_, (nll, vectors, bias)), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    for ours, theirs in (vectors, "E_out"), (bias, "bias"), (nll, "nll"):
        np.testing.assert_allclose(ours, expected[theirs], atol=2e-5)
    theirs = parameters(part(case, "grad/"), CASES[case]["bias"])
    assert theirs.keys() == gradient.keys()
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), gradient, theirs
    )


def test_baselines_convolutional_correction():
    """A word's correction, mapped by a matrix that words share, is added to what its spelling
    gives.
    """
    params = part("convolutional_correction", "param/")
    corrections, matrix = params["_cnnsoftmax_correction.weight"], params["_cnnsoftmax_M.weight"].T
    table = ComposedTable(Rows(len(corrections)), matrix.shape[1], correction=len(matrix))
    [(vectors, _, _)] = table.apply(
        {"params": {"corrections": corrections, "correction_map": matrix}}, method="bands"
    )
    np.testing.assert_allclose(vectors, ARRAYS["convolutional_correction/E_in"], atol=2e-5)


SHARED = Path(__file__).parents[3] / "shared" / "reference" / "groc"


def of_file(name, case):
    """Arrays of a case of a reference file, and the parameters that it shares with others."""
    with np.load(SHARED / f"{name}.npz") as file:
        homes = json.loads((SHARED / f"{name}.json").read_text())["cases"][case]["param_from"]
        arrays = {
            key.removeprefix(f"{case}/"): file[key]
            for key in file.files
            if key.startswith(f"{case}/")
        }
        return arrays | {f"param/{key}": file[f"{home}/param/{key}"] for key, home in homes.items()}


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs shared/reference/groc")
@pytest.mark.parametrize(
    "case, file",
    [
        ("k0_word_bias", "output"),
        ("k0_predicted_bias", "output"),
        ("k0_train_output_dropout", "output"),
        ("k4_train_locked", "output"),
        ("k2_train_unlocked", "output"),
        ("lookup_table", "baselines"),
        ("lookup_table_train", "baselines"),
        ("tied", "baselines"),
        ("tied_train", "baselines"),
        ("adaptive_tied", "baselines"),
        ("adaptive_tied_train", "baselines"),
        ("adaptive_untied", "baselines"),
    ],
)
def test_output(case, file, monkeypatch):
    """Tables of the reference files that the fixture leaves out: from the hidden states to the
    losses, masks given.

    In training, the public code also drops entries of the vectors that predict biases, so there
    only vectors are compared; and it draws masks of layers anew for every chunk of words, here for
    every 25, whose last has no relations and definition there. An "unlocked" mask is of all
    entries: the function is the same, though no option here draws it.
    """
    arrays, train = of_file(file, case), "_train" in case
    own = {"lookup_table": "_decoder", "tied": "_lookup"}.get(
        case.removesuffix("_train")
    )  # no composed table
    plain = arrays[f"param/{own}.weight"] if own else arrays.get("E_in")
    if file == "output":  # all its cases are of one E; some have it after dropout
        plain = of_file(file, "k0_predicted_bias")["E_in"]
    words, features = plain.shape
    drawn = {
        "k4_train_locked": ("mask_3", "mask_4", "mask_5", "mask_6"),
        "k2_train_unlocked": ("mask_3", "mask_4"),
    }
    masks = iter(
        [arrays[name].squeeze() > 0 for name in drawn.get(case, ("mask_0",) if train else ())]
    )
    monkeypatch.setattr(dropout, "keep_mask", lambda *_: next(masks))
    bias = (
        "own"
        if arrays["param/_decoder.bias" if own else "param/_bias.weight"].size == words
        else "predicted"
    )
    if case.startswith("adaptive"):
        home = "_decoder" if case.endswith("untied") else "_lookup"
        source = AdaptiveInput(words, features, (12, 40))
        params = {f"table_{i}": arrays[f"param/{home}.emb_layers.{i}.weight"] for i in range(3)}
        params |= {f"projection_{i}": arrays[f"param/{home}.emb_projs.{i}"].T for i in range(3)}
        table = AssembledTable(source, features, dropout=0.2 if train else 0.0, bias="own")
    else:
        rates = {
            "k0_train_output_dropout": {"dropout": 0.3},
            "k4_train_locked": {"layer_dropout": 0.5},
        }
        rates |= {"k2_train_unlocked": {"layer_dropout": 0.25}}
        rates = {"dropout": 0.2} if own and train else rates.get(case, {})
        depth, given = (
            int(case[1]) if case[0] == "k" else 0,
            {"activation": "sigmoid"} if case.startswith("k4") else {},
        )
        source, params = Lookup(words, features), {"table": plain}
        table = MappedTable(source, features, depth=depth, bias=bias, **rates | given)
    weights = {
        name.removeprefix("param/"): array
        for name, array in arrays.items()
        if name.startswith("param/")
    }
    weights = weights | ({"_bias.weight": weights["_decoder.bias"][None]} if own else {})
    params = {"source": params} | parameters(weights, bias)
    [(vectors, _, biases)] = table.apply(
        {"params": params}, train=train, rngs={"dropout": jax.random.key(0)}, method="bands"
    )
    same = 24 if case == "k4_train_locked" else words
    np.testing.assert_allclose(
        vectors[:same], arrays.get("E_out", arrays.get("E_in", plain))[:same], atol=2e-5
    )
    if not (train and bias == "predicted"):
        logits = arrays["hidden"] @ np.asarray(vectors).T + np.asarray(biases)
        np.testing.assert_allclose(logits, arrays["logits"], atol=2e-5)
        chosen = np.take_along_axis(logits, arrays["target"].reshape(-1, 1), axis=1)[:, 0]
        np.testing.assert_allclose(
            jax.nn.logsumexp(logits, axis=1) - chosen, arrays["nll"].ravel(), atol=2e-5
        )
    if case == "adaptive_tied":  # the input's vectors are those of the output, scaled like them
        read = AdaptiveInput(words, features, (12, 40), scaled=True)
        embedded = read.apply({"params": params["source"]}, arrays["input"])
        np.testing.assert_allclose(embedded, arrays["embedded"], atol=2e-5)


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs shared/reference/groc")
@pytest.mark.parametrize(
    "case, fields",
    [
        ("bilinear", {"form": "bilinear"}),
        ("deep_residual", {"depth": 2}),
        ("convolutional_correction", {"correction": 16}),
        ("groc_predict_bias", {"depth": 0, "bias": "predicted"}),
    ],
)
def test_init(case, fields):
    """Fresh parameters lie where the public code's do. What belongs to a word, bias or
    correction, starts at 0 here.
    """
    theirs = json.loads((SHARED / "init.json").read_text())["cases"][case]
    source = Lookup(500, 64, init_range=0.05)
    table = (
        ComposedTable(source, 64, **fields)
        if "correction" in fields
        else MappedTable(source, 64, **fields)
    )
    params = jax.jit(lambda: table.init(jax.random.key(0), method="bands")["params"])()
    names = {
        "_lookup.weight": "source",
        "_cnnsoftmax_M.weight": "correction_map",
        "_bias.weight": "bias_weights",
    }
    for i in range(2):
        names |= {
            f"_output_network.{i}.weight": f"kernel_{i}",
            f"_output_network.{i}.bias": f"kernel_bias_{i}",
        }
    compared = 0
    for name, ours in names.items():
        if name not in theirs or (ours not in params and ours != "source"):  # a bias for each word
            continue
        array = params.get(ours, params.get("cnn", {}))
        array = np.asarray(array["table"] if isinstance(array, dict) else array)
        bound = max(-theirs[name]["min"], theirs[name]["max"])
        assert 0.85 * bound < np.abs(array).max() < 1.1 * bound, name
        assert array.std() == pytest.approx(
            theirs[name]["std"], rel=0.05 if array.size > 1000 else 0.25
        ), name
        compared += 1
    assert (
        compared
        == {
            "bilinear": 3,
            "deep_residual": 5,
            "convolutional_correction": 2,
            "groc_predict_bias": 1,
        }[case]
    )


def test_an_update_shares_one_mask_a_layer():
    """What training drops of a table is a function of the key, the same for all words; without
    training nothing is dropped.
    """
    table = MappedTable(Lookup(5, 8), 8, form="bilinear", dropout=0.5)
    params = table.init(jax.random.key(0), method="bands")["params"] | {
        "kernel_0": jnp.eye(8),
        "kernel_bias_0": jnp.zeros(8),
    }
    vectors = params["source"]["table"]

    def drawn(seed, train=True):
        [(made, *_)] = table.apply(
            {"params": params}, train=train, rngs={"dropout": jax.random.key(seed)}, method="bands"
        )
        return np.asarray(made / vectors)

    assert {0.0, 2.0} == set(drawn(0).round(5).ravel())
    np.testing.assert_allclose(drawn(0), np.broadcast_to(drawn(0)[:1], (5, 8)), atol=1e-6)
    assert (drawn(0) != drawn(1)).any()
    np.testing.assert_allclose(drawn(0, train=False), 1.0, atol=1e-6)
