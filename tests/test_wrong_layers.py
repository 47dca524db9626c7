"""Mistaken arguments of the public layers: one line with the value and the cure,
or NaN where ids are not known.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaptive_jax import (
    AWDLSTM,
    LSTM,
    AdaptiveInput,
    AdaptiveSoftmax,
    AssembledTable,
    Band,
    Batch,
    CharacterCNN,
    ComposedTable,
    GatedConv,
    GroC,
    InputError,
    LanguageModel,
    Lookup,
    MappedTable,
    OwnTable,
    TiedTable,
    Transformer,
)
from adaptive_jax.losses import banded
from adaptive_jax.model.language_model import build
from adaptive_jax.numerics.dropout import row_seeds
from adaptive_jax.numerics.layers import Dropout
from adaptive_jax.outputs.differentiated import Differentiated
from adaptive_jax.outputs.sampled import NCE, Sampled
from adaptive_jax.outputs.softmax import Hierarchical
from tests.toys import random_params

WORDS, FEATURES, ROWS, TIME = 20, 8, 2, 3
IDS = np.arange(6, dtype=np.int32).reshape(ROWS, TIME)
HIDDEN = np.linspace(-1, 1, 48, dtype=np.float32).reshape(ROWS, TIME, FEATURES)
BANDS = [Band(np.ones((5, 8), "f")), Band(np.ones((15, 2), "f"), np.ones((2, 8), "f"))]
CLUSTERS = Band(np.ones((1, 8), "f"))
CURES = r"\b(use|pass|choose|make|must be|must have|use) \S|is not one of \w+(, \w+)+"

lookup = functools.partial(Lookup, vocabulary_size=WORDS, features=FEATURES)
adaptive = functools.partial(
    AdaptiveInput, vocabulary_size=WORDS, features=FEATURES, cutoffs=(5, 12), factor=2
)
letters = functools.partial(
    CharacterCNN,
    vocabulary_size=WORDS,
    features=FEATURES,
    width=4,
    filters=((2, 4),),
    highway_layers=0,
    length=5,
)
groc = functools.partial(GroC, WORDS, FEATURES, filters=((2, 4),), strides=(1,), length=5)
own = functools.partial(OwnTable, WORDS, FEATURES)
tied = functools.partial(TiedTable, adaptive())
mapped = functools.partial(MappedTable, source=adaptive(), features=FEATURES)
assembled = functools.partial(AssembledTable, source=adaptive(), features=FEATURES)
softmax = functools.partial(AdaptiveSoftmax, OwnTable(WORDS, FEATURES, (5, 12), factor=2))
full = functools.partial(AdaptiveSoftmax, OwnTable(WORDS, FEATURES))
transformer = functools.partial(Transformer, features=FEATURES, layers=1, heads=2, feed_forward=8)
lstm = functools.partial(LSTM, features=FEATURES, widths=(5, 4))
gated = functools.partial(GatedConv, features=FEATURES, blocks=((1, 1, 6), (2, 3, 6)))
awd = functools.partial(AWDLSTM, FEATURES, (5, 4))
model = LanguageModel(adaptive(), transformer(), AdaptiveSoftmax(tied(features=FEATURES)))


def ids_at(row, column, value):
    ids = IDS.copy()
    ids[row, column] = value
    return ids


def spelling(words):
    lengths = np.ones(words, np.int32)
    return {
        "letters": np.ones((words, 5), np.uint8),
        "symbols": -lengths.astype(np.int8),
        "lengths": lengths,
        "row_of_word": np.arange(words, dtype=np.int32),
    }


def made(layer, *arguments, **how):
    """Parameters and result of a layer, as shapes: nothing is compiled, and what is no tracer
    stays known.
    """
    return jax.eval_shape(
        lambda key: layer.init_with_output(key, *arguments, **how), jax.random.key(0)
    )


def on_a_mesh(layer, method):
    """The method's result inside `shard_map`, as a shape."""
    mesh, cut = jax.make_mesh((1,), ("data",)), jax.sharding.PartitionSpec("data")
    run = functools.partial(made, layer, method=method)
    hidden = jax.device_put(HIDDEN, jax.sharding.NamedSharding(mesh, cut))
    return jax.shard_map(run, mesh=mesh, in_specs=cut, out_specs=cut)(hidden)


def bands(table):
    return made(table, method="bands")


def uncounted():
    params = made(Sampled(own(), 9), HIDDEN, IDS, method="nll")[1]["params"]
    return jax.eval_shape(
        lambda p: Sampled(own(), 9, "unigram").apply({"params": p}, HIDDEN, IDS, method="nll"),
        params,
    )


def built(output, **table):
    output = {"name": output, "table": {"name": "own", "projected": False} | table}
    body = {"name": "gated_conv", "features": FEATURES, "blocks": ((1, 1, 8),)}
    config = {"dtype": "float32", "shard_words": False, "input": {"name": "lookup"}}
    return build(config | {"body": body, "output": output}, WORDS)


def batch(**changes):
    return Batch(IDS, IDS, np.ones(IDS.shape, "f"), np.arange(ROWS))._replace(**changes)


def spelt(words=WORDS, tokens=IDS):
    lexicon = {"spelling": spelling(words)}
    params = made(letters(), IDS)[1]["params"]
    return jax.eval_shape(
        lambda params: letters().apply({"params": params, "lexicon": lexicon}, tokens), params
    )


def core(*softmax, **settings):
    """The core's loss; bands, if not given, are two that fit."""
    seeds = settings.pop("seeds", None)
    softmax, settings = softmax or (BANDS, CLUSTERS), banded.Settings(**settings)
    return jax.eval_shape(
        lambda: banded.loss(HIDDEN, IDS, W, *softmax, settings=settings, seeds=seeds)
    )


W = np.ones(IDS.shape, "f")
loss = functools.partial(made, softmax(), method="loss")
nll = functools.partial(made, softmax(), method="nll")
logs = functools.partial(made, softmax(), method="log_probs")
predict = functools.partial(made, softmax(), method="predict")
call = functools.partial(made, softmax())
cache = transformer().cache

# Values that a field of a layer refuses; the error names field and value.
FIELDS = {
    lookup: {
        "vocabulary_size": [0, 20.5, "20"],
        "features": [0],
        "width": [-4, 2.5],
        "word_dropout": [1],
        "init_range": [-0.1],
        "init_deviation": [-0.1, float("nan"), float("inf")],
    },
    adaptive: {
        "vocabulary_size": [0],
        "features": ["8"],
        "factor": [0, 2.5],
        "width": [-8],
        "word_dropout": [1.5],
    },
    letters: {
        "vocabulary_size": [0],
        "width": [4.5],
        "length": [5.5, 1],
        "filters": [3, (), (3, 64), ((0, 64),), ((1.5, 4),)],
        "highway_layers": [-1],
        "strides": [(1, 2)],
        "activation": ["gelu"],
        "letters": ["latin"],
    },
    groc: {
        "relations": [-1],
        "definition": [2.5],
        "combine": ["sum"],
        "form": ["papers"],
        "share": [16, "x"],
        "init_range": [-1.0, 0],
    },
    tied: {"features": [8.0]},
    mapped: {
        "source": [None],
        "form": ["linear"],
        "activation": ["gelu"],
        "bias": [True],
        "depth": [-1],
        "layer_dropout": [1.0],
    },
    assembled: {"source": [None], "bias": [True], "dropout": [1.0]},
    functools.partial(ComposedTable, letters(), 8): {"correction": [-1], "bias": ["predict"]},
    functools.partial(Hierarchical, own()): {"classes": [-1]},
    functools.partial(Sampled, own()): {"samples": [0], "proposal": ["unigrams"]},
    functools.partial(NCE, own()): {"input_dropout": [1]},
    softmax: {
        "features": [8],  # beside a table
        "bias": [True],
        "label_smoothing": [1.0, -0.1],
        "z_loss": [-1e-4, float("inf")],
        "tail_dropout": [1],
        "input_dropout": ["0.1", float("nan")],
    },
    transformer: {
        "heads": [0],
        "layers": [1.5, True],
        "features": [-8],
        "feed_forward": [None],
        "dropout": [1.5],
        "attention_dropout": [-1],
        "activation_dropout": [1],
        "positions": ["rotary"],
        "max_positions": [0],
        "remat": ["some"],
    },
    lstm: {"features": [0], "widths": [(), 5], "dropout": [1], "biases": [3]},
    awd: {
        "input_dropout": [-1],
        "hidden_dropout": ["0.3"],
        "weight_drop": [1.0],
        "ar": [-2],
        "tar": [float("nan"), "1"],
    },
    gated: {
        "form": ["papers"],
        "activation": ["glue"],
        "features": [0],
        "dropout": [1],
        "output_width": [-1],
    },
    Dropout: {"rate": [2]},
}


def field_cases():
    for layer, fields in FIELDS.items():
        for field, values in fields.items():
            for value in values:
                yield functools.partial(layer, **{field: value}), f"{field}={value!r}"
    for layer in lookup, adaptive, letters, transformer, lstm, gated:
        yield functools.partial(layer, dtype=int), "dtype=int"


# Calls, and what the line of their error must contain.
WRONG = [
    # fields
    (lambda: lookup(dtype="float23"), "dtype=float23"),
    (lambda: adaptive(cutoffs=(5, 20)), "cutoff 20"),
    (lambda: adaptive(cutoffs=5), "cutoffs 5"),
    (lambda: AdaptiveSoftmax(vocabulary_size=9, features=4, cutoffs=np.array([2, 9])), "cutoffs"),
    (lambda: made(adaptive(word_axes="data"), IDS), "word_axes=data must be axes"),
    (lambda: Sampled(own(word_axes="data"), 9), "word_axes=data of table must be ()"),
    (
        lambda: on_a_mesh(AdaptiveSoftmax(own(word_axes="data")), "log_probs"),
        "word_axes=data of table",
    ),
    (
        lambda: on_a_mesh(AdaptiveSoftmax(own(word_axes="data")), "predict"),
        "word_axes=data of table",
    ),
    (lambda: letters(strides=(0,)), "strides=0"),
    (lambda: letters(strides=(1.5,)), "strides must be a whole number, got 1.5"),
    (lambda: letters(strides=2), "strides=2"),
    (lambda: own((30,)), "cutoff 30"),
    (lambda: TiedTable(None, 8), "source=None"),
    (lambda: TiedTable(softmax()), "AdaptiveSoftmax has none"),
    (lambda: bands(tied(16)), "width 16"),
    (lambda: bands(tied(6, share_projections=False, share_head_projection=True)), "width 6"),
    (lambda: bands(tied(8, cutoffs=(3,))), "cutoffs=(3,)"),
    (lambda: bands(mapped()), "one band of width 8"),
    (lambda: bands(mapped(source=lookup(width=4), features=4)), "width 4 and a projection"),
    (lambda: ComposedTable(letters(), 6), "features=6 must be those of the CNN, 8"),
    (lambda: TiedTable(lookup(word_axes="data"), cutoffs=(5,)), "word_axes=data of source"),
    (lambda: bands(mapped(source=lookup(), cutoffs=(30,))), "cutoff 30"),
    (lambda: bands(assembled(features=16)), "width 8"),
    (lambda: made(Hierarchical(own((5,)), classes=3), HIDDEN, IDS, method="nll"), "classes=3"),
    (lambda: made(Hierarchical(own(), classes=21), HIDDEN, IDS, method="nll"), "classes=21"),
    (lambda: built("hierarchical", cutoffs=(5,)), "output.table.projected=False"),
    (lambda: built("adaptive", cutoffs=(5,)), "output.table.projected=False"),
    (lambda: built("softmax", width=4), "output.table.projected=False"),
    (lambda: made(Sampled(own((5,))), HIDDEN, IDS, method="nll"), "its table has 2"),
    (uncounted, "Sampled needs the counts"),
    (
        lambda: made(Sampled(own(), 9), HIDDEN, ids_at(1, 1, 20), W, train=True, method="loss"),
        "targets[1, 1]=20",
    ),
    (lambda: made(NCE(own(), 9), HIDDEN[..., :6], IDS, train=True, method="loss"), "[2, 3, 6]"),
    (lambda: bands(Differentiated(own((5,), projected=False))), "slices of 8, 2"),
    (
        lambda: made(Differentiated(own()), HIDDEN, ids_at(0, 1, -1), W, method="loss"),
        "targets[0, 1]=-1",
    ),
    (lambda: made(Differentiated(own()), HIDDEN[..., :6], IDS, method="nll"), "[2, 3, 6]"),
    (lambda: AdaptiveSoftmax(None), "table=None"),
    (lambda: AdaptiveSoftmax(), "vocabulary_size is missing"),
    (lambda: AdaptiveSoftmax(vocabulary_size=20), "features is missing"),
    (lambda: AdaptiveSoftmax(vocabulary_size=20, features=8, cutoffs=(30,)), "cutoff 30"),
    (lambda: transformer(features=7, heads=1), "7 features"),
    (lambda: LSTM(8, (5, 2.5)), "widths[1]=2.5"),
    (lambda: GatedConv(8, ()), "blocks[0]=()"),
    (lambda: GatedConv(8, (2, 3, 6)), "blocks[0]=2"),
    (lambda: GatedConv(8, ((2, 3, 6), (1, 3))), "blocks[1]=(1, 3)"),
    (lambda: GatedConv(8, ((1, *[1, 6] * 6),)), "1 to 5 layers"),
    (lambda: GatedConv(8, ((2, 0, 6),)), "blocks[0][1]=0"),
    # token ids
    (lambda: made(lookup(), ids_at(1, 2, 20)), "tokens[1, 2]=20"),
    (lambda: made(lookup(), ids_at(0, 1, -1)), "tokens[0, 1]=-1"),
    (lambda: made(lookup(), np.array([3, 2**32 + 3])), "tokens[1]=4294967299"),
    (lambda: made(lookup(), [3, 2**32 + 3]), "tokens[1]=4294967299"),
    (lambda: made(lookup(), [[1, 2], [3, 99]]), "tokens[1, 1]=99"),
    (lambda: made(lookup(), jnp.array([4, 77])), "tokens[1]=77"),
    (lambda: made(lookup(), IDS / 2), "float"),
    (lambda: made(lookup(), IDS > 2), "bool"),
    (lambda: made(lookup(), [[1, 2], [3]]), "[[1, 2], [3]]"),
    (lambda: made(lookup(), "the cat"), "the cat"),
    (lambda: made(lookup(), None), "None"),
    (lambda: made(lookup(), IDS[:0]), "[0, 3]"),
    (lambda: made(adaptive(), ids_at(1, 0, 25)), "tokens[1, 0]=25"),
    (lambda: spelt(tokens=ids_at(0, 0, 21)), "tokens[0, 0]=21"),
    (lambda: spelt(words=7), "[7]"),
    (lambda: made(letters(), [1, 44], method="compose"), "words[1]=44"),
    (lambda: made(letters(), IDS, method="compose"), "[2, 3]"),
    # hidden states, targets and weights
    (lambda: loss(HIDDEN, ids_at(1, 1, 20), W), "targets[1, 1]=20"),
    (lambda: loss(HIDDEN, ids_at(1, 1, -1)), "targets[1, 1]=-1"),
    (lambda: loss(HIDDEN, IDS[:, :2], W), "[2, 2]"),
    (lambda: loss(HIDDEN, HIDDEN[..., 0], W), "float32"),
    (lambda: loss(HIDDEN, IDS, W[0]), "[3]"),
    (lambda: loss(HIDDEN, IDS, "all"), "all"),
    (lambda: loss(HIDDEN, IDS, W * 1j), "complex64"),
    (lambda: loss(HIDDEN[..., :6], IDS, W), "[2, 3, 6]"),
    (lambda: loss([[0.0], [1.0, 2.0]], IDS, W), "[[0.0], [1.0, 2.0]]"),
    (lambda: loss(HIDDEN, IDS, W, [0, 1, 2]), "[3]"),
    (lambda: loss(HIDDEN, IDS, W, [0.0, 1.0]), "float32"),
    (lambda: loss(HIDDEN[:0], IDS[:0], W[:0]), "[0, 3, 8]"),
    (lambda: nll(HIDDEN, ids_at(0, 2, 20)), "targets[0, 2]=20"),
    (lambda: nll(HIDDEN[..., :4], IDS), "[2, 3, 4]"),
    (lambda: call(HIDDEN, IDS, reduction="average"), "reduction='average'"),
    (
        lambda: made(softmax(tail_dropout=0.1), HIDDEN, IDS, reduction="none", train=True),
        "tail_dropout=0.1",
    ),
    (lambda: call(HIDDEN, IDS, reports=("entropy",)), "got 'entropy'"),
    (lambda: call(HIDDEN, IDS, top_k=2), "top_k=2"),
    (lambda: made(full(), HIDDEN, IDS, reports="accuracy"), "reports='accuracy'"),
    (lambda: call(HIDDEN[..., :6], IDS), "[2, 3, 6]"),
    (lambda: predict(np.ones((4, 9), "f")), "[4, 9]"),
    (lambda: logs(np.ones((0, 8), "f")), "[0, 8]"),
    (lambda: core([]), "bands must be a list of one Band(table) or more, got none"),
    (lambda: core(BANDS), "clusters=None"),
    (lambda: core([Band(np.ones((20, 8), "f"))], CLUSTERS), "clusters=Band"),
    (lambda: core(BANDS, Band(np.ones((2, 8), "f"))), "clusters.table=[2, 8]"),
    (lambda: core(BANDS, CLUSTERS._replace(projection=1)), "clusters.projection must be None"),
    (lambda: core([np.ones((20, 8), "f")]), "bands[0] of type ndarray"),
    (
        lambda: core([BANDS[0], BANDS[1]._replace(projection=np.ones((2, 9), "f"))], CLUSTERS),
        "[2, 9]",
    ),
    (lambda: core([BANDS[0]._replace(bias=np.ones(4, "f")), BANDS[1]], CLUSTERS), "[4]"),
    (lambda: core([Band(np.ones(8, "f"))]), "bands[0].table=[8]"),
    (lambda: core(soft_cap=0), "soft_cap=0"),
    (lambda: core(tail_dropout=0.5), "tail_dropout=0.5"),
    (
        lambda: banded.losses(HIDDEN, IDS, W, BANDS, CLUSTERS, banded.Settings(tail_dropout=0.5)),
        "tail_dropout=0.5",
    ),
    (lambda: core(tail_dropout=0.5, seeds=np.ones((5, 2), np.uint32)), "seeds=[5, 2]"),
    (lambda: core(chunk=0), "chunk=0"),
    # vectors, rows and batches
    (lambda: made(transformer(), HIDDEN[..., :6]), "[2, 3, 6]"),
    (lambda: made(transformer(), HIDDEN[0]), "[3, 8]"),
    (lambda: made(transformer(), HIDDEN[:, :0]), "[2, 0, 8]"),
    (lambda: made(transformer(), HIDDEN, (), batch(row_ids=np.arange(3))), "row_ids=[3]"),
    (
        lambda: made(transformer(), HIDDEN, (), batch(segment_ids=IDS[:, 1:])),
        "segment_ids=[2, 2]",
    ),
    (lambda: made(transformer(), HIDDEN, (), batch(segment_ids=W)), "float32"),
    (lambda: made(transformer(), HIDDEN, cache(5, 9)), "5 rows"),
    (lambda: made(transformer(), HIDDEN, cache(ROWS, 2)), "length 2"),
    (lambda: made(gated(), HIDDEN[..., :6]), "[2, 3, 6]"),
    (
        lambda: made(gated(), HIDDEN, gated().initial_carry(ROWS), batch(segment_ids=IDS)),
        "segment_ids",
    ),
    (lambda: made(gated(), HIDDEN, gated().cache(5, 9)), "for 2 rows"),
    (lambda: made(lstm(), HIDDEN[..., :6]), "[2, 3, 6]"),
    (lambda: made(lstm(), HIDDEN, lstm().cache(ROWS, 9), batch(segment_ids=IDS)), "segment_ids"),
    (lambda: made(lstm(), HIDDEN, lstm().cache(5, 9)), "for 2 rows"),
    (lambda: made(lstm(), HIDDEN, lstm().cache(ROWS, 9)[1:]), "for 2 rows"),
    (lambda: made(lstm(), HIDDEN, (0.0, 0.0)), "body.initial_carry"),
    (lambda: gated(blocks=5), "blocks[0]=5"),
    *(
        (lambda body=body, carry=carry: made(body(), HIDDEN, carry), "carry")
        for body in (transformer, gated, lstm)
        for carry in (HIDDEN, batch())
    ),
    (lambda: made(transformer(), HIDDEN, cache(ROWS, 9), batch(reset=np.ones(ROWS))), "reset"),
    (lambda: made(transformer(), HIDDEN, lstm().cache(ROWS, 9)), "got tuple"),
    (lambda: cache(ROWS, -1), "length=-1"),
    (lambda: lstm().initial_carry(2.0), "rows=2.0"),
    (lambda: gated().initial_carry("a"), "rows='a'"),
    (lambda: lookup(dtype=None), "dtype=None"),
    (lambda: TiedTable(AdaptiveInput), "source=AdaptiveInput is a class"),
    (lambda: row_seeds(jax.random.key(0), [0.5]), "float32"),
    (lambda: made(model, batch(inputs=ids_at(0, 1, 50))), "tokens[0, 1]=50"),
    (lambda: made(model, batch(targets=IDS[:1])), "[1, 3]"),
    (lambda: made(model, batch(), [[0], [3]], method="log_probs"), "positions[1, 0]=3"),
    (lambda: made(model, batch(), [[0]], method="log_probs"), "[1, 1]"),
    (
        lambda: made(model.clone(body=transformer(features=16)), batch()),
        "vectors=[2, 3, 8]",
    ),
    (
        lambda: made(model.clone(output=AdaptiveSoftmax(OwnTable(WORDS, 6))), batch()),
        "hidden=[2, 3, 8]",
    ),
    *field_cases(),
]


@pytest.mark.parametrize("call, value", WRONG)
def test_a_mistake_is_one_line_with_the_value_and_the_cure(call, value):
    """Whatever is wrong, the error is InputError's one line."""
    with pytest.raises(InputError) as error:
        call()
    line = str(error.value)
    assert "\n" not in line and len(line) < 200
    name, _, got = value.partition("=")
    assert value in line or (name in line and line.endswith(f", got {got}")), line
    assert re.search(CURES, line), line


def nan_rows(result):
    return np.isnan(np.asarray(result, np.float32)).reshape(ROWS * TIME, -1).all(axis=1).tolist()


LETTERS = {
    "params": jax.tree.map(lambda a: np.ones(a.shape, "f"), made(letters(), IDS)[1]["params"])
}
TABLES = {
    "tables": {"vectors": np.ones((WORDS + 3, FEATURES), "f")}
}  # devices pad tables that they share
INPUTS = {
    "lookup": (lookup(), None),
    "lookup, projected": (lookup(width=4), None),
    "lookup, bfloat16": (lookup(dtype=jnp.bfloat16), None),
    "letters": (letters(), LETTERS | {"lexicon": {"spelling": spelling(WORDS)}}),
    "letters, composed": (letters(), LETTERS | TABLES | {"lexicon": {"spelling": spelling(WORDS)}}),
}


@pytest.mark.parametrize("name", INPUTS)
def test_traced_ids_that_do_not_exist_have_vectors_of_nan(name):
    """In jax.jit the vectors of these tokens alone are NaN, so that the loss is NaN, too."""
    layer, variables = INPUTS[name]
    variables = variables or jax.tree.map(lambda a: np.ones(a.shape, "f"), made(layer, IDS)[1])
    vectors = jax.jit(layer.apply)(variables, np.array([[0, 19, 20], [-1, 21, 2**31 - 1]]))
    assert vectors.dtype == layer.dtype
    assert nan_rows(vectors) == [False, False, True, True, True, True]


@functools.cache
def output_variables():
    return random_params(
        jax.eval_shape(lambda: softmax().init(jax.random.key(0), HIDDEN, IDS, W, method="loss"))
    )


@jax.jit
def _all_traced(variables, hidden, targets, weights):
    def loss(variables, hidden):
        total, nll = softmax().apply(variables, hidden, targets, weights, method="loss")
        return total, nll

    (total, report), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(variables, hidden)
    return total, report, gradients, softmax().apply(variables, hidden, targets, method="nll")


def both_losses(targets, weights):
    """Total and nll of the loss, its gradients, and `nll` of the same targets, all traced."""
    return _all_traced(output_variables(), HIDDEN, targets, weights)


@pytest.mark.parametrize("wrong", [-1, WORDS, -(2**31), 2**31 - 1])
def test_a_traced_target_that_does_not_exist_makes_the_loss_nan(wrong):
    """Total and gradients are NaN, and the nll of that token alone."""
    value, report, (of_params, of_hidden), nll = both_losses(ids_at(0, 1, wrong), W)
    assert np.isnan(value)
    assert (
        nan_rows(report)
        == nan_rows(nll)
        == nan_rows(of_hidden)
        == [False, True, False, False, False, False]
    )
    assert all(np.isnan(leaf).any() for leaf in jax.tree.leaves(of_params["params"]["clusters"]))


def test_a_target_of_weight_0_may_be_any_number():
    """Padding of -1: loss and gradients are those of any other target there, and its reported
    nll is 0.
    """
    weights = W.copy()
    weights[0, 1] = 0
    padded, other = (both_losses(ids_at(0, 1, target), weights) for target in (-1, 7))
    assert padded[1][0, 1] == 0 and np.isnan(padded[3][0, 1])
    np.testing.assert_array_equal(np.delete(padded[1], 1), np.delete(other[1], 1))
    jax.tree.map(np.testing.assert_array_equal, padded[0:3:2], other[0:3:2])
    # Targets that are no tracers are not refused there.
    assert loss(HIDDEN, ids_at(0, 1, -1), weights)[0].total.shape == ()


def test_numpy_arrays_and_lists_are_arrays():
    """Whatever a model takes, in a function that is compiled and differentiated, parameters of
    numpy among it.
    """
    params = jax.tree.map(
        lambda a: np.linspace(-1, 1, a.size, dtype="f").reshape(a.shape), made(model, batch())[1]
    )

    def gradient(cast):
        given = Batch(*map(cast, (IDS, IDS[:, ::-1], W, np.arange(ROWS), np.ones_like(IDS))))

        def results(params):
            run = functools.partial(model.apply, params)
            yield run(given)[0].total
            yield jnp.sum(run(cast(HIDDEN), cast(IDS), method="nll"))
            yield jnp.sum(run(given, cast(IDS[:, :1] * 0), method="log_probs"))
            yield jnp.sum(run(cast(IDS), cache(ROWS, 4), method="step")[0])

        return jax.jit(jax.grad(lambda params: sum(results(params))))(params)

    arrays = gradient(jnp.asarray)
    for cast in np.asarray, lambda array: np.asarray(array).tolist():
        jax.tree.map(np.testing.assert_array_equal, gradient(cast), arrays)
