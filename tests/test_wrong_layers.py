"""What a user can give to the public layers by mistake: one line with the value and the cure,
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
CURES = r"\b(give|choose|make|must be|must have|use) \S|is not one of \w+(, \w+)+"

lookup = functools.partial(Lookup, WORDS, FEATURES)
adaptive = functools.partial(AdaptiveInput, WORDS, FEATURES, (5, 12), factor=2)
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
softmax = functools.partial(AdaptiveSoftmax, OwnTable(WORDS, FEATURES, (5, 12), factor=2))
transformer = functools.partial(Transformer, features=FEATURES, layers=1, heads=2, feed_forward=8)
lstm = functools.partial(LSTM, FEATURES, (5, 4))
gated = functools.partial(GatedConv, FEATURES, ((1, 1, 6), (2, 3, 6)))
awd = functools.partial(AWDLSTM, FEATURES, (5, 4))
model = LanguageModel(adaptive(), transformer(), AdaptiveSoftmax(tied(FEATURES)))


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


def uncounted():
    params = made(Sampled(own(), 9), HIDDEN, IDS, method="nll")[1]["params"]
    return jax.eval_shape(
        lambda p: Sampled(own(), 9, "unigram").apply({"params": p}, HIDDEN, IDS, method="nll"),
        params,
    )


def built(output, table="own", **fields):
    table = {"name": table} | fields
    output = {"name": output, "table": table}
    body = {"name": "gated_conv", "features": FEATURES, "blocks": ((1, 1, 8),)}
    return build(
        {"dtype": "float32", "input": {"name": "lookup"}, "body": body, "output": output}, WORDS
    )


def batch(**changes):
    return Batch(IDS, IDS, np.ones(IDS.shape, "f"), np.arange(ROWS))._replace(**changes)


def spelt(words=WORDS, tokens=IDS):
    lexicon = {"spelling": spelling(words)}
    params = made(letters(), IDS)[1]["params"]
    return jax.eval_shape(
        lambda params: letters().apply({"params": params, "lexicon": lexicon}, tokens), params
    )


def given(*arguments, **settings):
    """The core's loss; bands, if not given, are two that fit."""
    hidden, targets, weights, *softmax = (
        (*arguments, BANDS, CLUSTERS) if len(arguments) < 4 else arguments
    )
    return jax.eval_shape(lambda: banded.loss(hidden, targets, weights, *softmax, **settings))


W = np.ones(IDS.shape, "f")
loss = functools.partial(made, softmax(), method="loss")
nll = functools.partial(made, softmax(), method="nll")
logs = functools.partial(made, softmax(), method="log_probs")
predict = functools.partial(made, softmax(), method="predict")
call = functools.partial(made, softmax())
core = functools.partial(given, HIDDEN)
cache = transformer().cache

# what is wrong: (the call, what its line must contain)
WRONG = {
    # fields
    "lookup, no words": (lambda: Lookup(0, 8), "vocabulary_size=0"),
    "lookup, fractional vocabulary": (lambda: Lookup(20.5, 8), "vocabulary_size=20.5"),
    "lookup, words as text": (lambda: Lookup("20", 8), "vocabulary_size='20'"),
    "lookup, no features": (lambda: Lookup(20, 0), "features=0"),
    "lookup, fractional features": (lambda: Lookup(20, 8.0), "features=8.0"),
    "lookup, negative width": (lambda: lookup(width=-4), "width=-4"),
    "lookup, fractional width": (lambda: lookup(width=2.5), "width=2.5"),
    "lookup, whole dtype": (lambda: lookup(dtype=jnp.int32), "dtype=int32"),
    "lookup, unknown dtype": (lambda: lookup(dtype="float23"), "dtype=float23"),
    "adaptive, no words": (lambda: AdaptiveInput(0, 8, ()), "vocabulary_size=0"),
    "adaptive, fractional vocabulary": (lambda: AdaptiveInput(20.5, 8, ()), "vocabulary_size=20.5"),
    "adaptive, fractional factor": (lambda: adaptive(factor=2.5), "factor=2.5"),
    "adaptive, factor 0": (lambda: adaptive(factor=0), "factor=0"),
    "adaptive, too large a factor": (lambda: adaptive(factor=8), "factor 8"),
    "adaptive, fractional width": (lambda: adaptive(width=4.0), "width=4.0"),
    "adaptive, negative width": (lambda: adaptive(width=-8), "width=-8"),
    "adaptive, features as text": (lambda: AdaptiveInput(20, "8", ()), "features='8'"),
    "adaptive, whole dtype": (lambda: adaptive(dtype=int), "dtype=int"),
    "adaptive, cutoffs fall": (lambda: AdaptiveInput(20, 8, (12, 5)), "5 follows 12"),
    "adaptive, cutoff beyond": (lambda: AdaptiveInput(20, 8, (5, 20)), "cutoff 20"),
    "adaptive, cutoff 0": (lambda: AdaptiveInput(20, 8, (0,)), "0 follows 0"),
    "adaptive, fractional cutoff": (lambda: AdaptiveInput(20, 8, (5.5,)), "(5.5,)"),
    "adaptive, one number": (lambda: AdaptiveInput(20, 8, 5), "cutoffs 5"),
    "adaptive, cutoffs None": (lambda: AdaptiveInput(20, 8, None), "cutoffs None"),
    "letters, fractional width": (lambda: letters(width=4.5), "width=4.5"),
    "letters, fractional length": (lambda: letters(length=5.5), "length=5.5"),
    "letters, no words": (lambda: letters(vocabulary_size=0), "vocabulary_size=0"),
    "letters, short": (lambda: letters(length=1), "length=1"),
    "letters, filters a number": (lambda: letters(filters=3), "filters=3"),
    "letters, fractional filter": (lambda: letters(filters=((1.5, 4),)), "filters=((1.5, 4),)"),
    "letters, negative highways": (lambda: letters(highway_layers=-1), "highway_layers=-1"),
    "letters, whole dtype": (lambda: letters(dtype=jnp.int8), "dtype=int8"),
    "letters, strides of other filters": (lambda: letters(strides=(1, 2)), "strides=(1, 2)"),
    "letters, stride 0": (lambda: letters(strides=(0,)), "strides=0"),
    "letters, activation": (lambda: letters(activation="gelu"), "activation='gelu'"),
    "letters, alphabet": (lambda: letters(letters="latin"), "letters='latin'"),
    "groc, negative relations": (lambda: groc(relations=-1), "relations=-1"),
    "groc, fractional definition": (lambda: groc(definition=2.5), "definition=2.5"),
    "groc, sum": (lambda: groc(combine="sum"), "combine='sum'"),
    "groc, form": (lambda: groc(form="papers"), "form='papers'"),
    "groc, share above 1": (lambda: groc(share=16), "share=16"),
    "groc, lexicon None": (lambda: groc(lexicon=None), "lexicon=None"),
    "groc, negative range": (lambda: groc(init_range=-1.0), "init_range=-1.0"),
    "own, no words": (lambda: OwnTable(0, 8), "vocabulary_size=0"),
    "own, fractional factor": (lambda: own((5,), factor=1.5), "factor=1.5"),
    "own, fractional features": (lambda: OwnTable(20, 8.5), "features=8.5"),
    "own, cutoff beyond": (lambda: own((30,)), "cutoff 30"),
    "tied, no source": (lambda: TiedTable(None, 8), "source=None"),
    "tied, fractional features": (lambda: tied(8.0), "features=8.0"),
    "tied, source without features": (lambda: TiedTable(softmax()), "AdaptiveSoftmax has none"),
    "tied, source of another width": (lambda: made(tied(16), method="bands"), "features=16"),
    "tied, head of another width": (
        lambda: made(tied(6, share_projections=False, share_head_projection=True), method="bands"),
        "features=6",
    ),
    "tied, cut twice": (lambda: made(tied(8, cutoffs=(3,)), method="bands"), "cutoffs=(3,)"),
    "mapped, no source": (lambda: MappedTable(None, 8), "source=None"),
    "mapped, form": (lambda: MappedTable(adaptive(), 8, form="linear"), "form='linear'"),
    "mapped, activation": (
        lambda: MappedTable(adaptive(), 8, activation="gelu"),
        "activation='gelu'",
    ),
    "mapped, bias": (lambda: MappedTable(adaptive(), 8, bias=True), "bias=True"),
    "mapped, negative depth": (lambda: MappedTable(adaptive(), 8, depth=-1), "depth=-1"),
    "mapped, dropout 1": (
        lambda: MappedTable(adaptive(), 8, layer_dropout=1.0),
        "layer_dropout=1.0",
    ),
    "mapped, several bands": (
        lambda: made(MappedTable(adaptive(), 8), method="bands"),
        "one band of width 8",
    ),
    "mapped, cutoff beyond": (
        lambda: made(MappedTable(lookup(), 8, cutoffs=(30,)), method="bands"),
        "cutoff 30",
    ),
    "assembled, no source": (lambda: AssembledTable(None, 8), "source=None"),
    "assembled, bias": (lambda: AssembledTable(adaptive(), 8, bias=True), "bias=True"),
    "assembled, dropout 1": (lambda: AssembledTable(adaptive(), 8, dropout=1.0), "dropout=1.0"),
    "assembled, source of another width": (
        lambda: made(AssembledTable(adaptive(), 16), method="bands"),
        "width 8",
    ),
    "composed, negative correction": (
        lambda: ComposedTable(letters(), 8, correction=-1),
        "correction=-1",
    ),
    "composed, bias": (lambda: ComposedTable(letters(), 8, bias="predict"), "bias='predict'"),
    "hierarchical, -1 classes": (lambda: Hierarchical(own(), classes=-1), "classes=-1"),
    "hierarchical, cut twice": (
        lambda: made(Hierarchical(own((5,)), classes=3), HIDDEN, IDS, method="nll"),
        "classes=3",
    ),
    "hierarchical, more classes than words": (
        lambda: made(Hierarchical(own(), classes=21), HIDDEN, IDS, method="nll"),
        "classes=21",
    ),
    "hierarchical, no projections": (
        lambda: built("hierarchical", cutoffs=(5,), projected=False),
        "output.table.projected=False",
    ),
    "adaptive, no projections": (
        lambda: built("adaptive", cutoffs=(5,), projected=False),
        "output.table.projected=False",
    ),
    "softmax, no projection": (
        lambda: built("softmax", width=4, projected=False),
        "output.table.projected=False",
    ),
    "sampled, no samples": (lambda: Sampled(own(), 0), "samples=0"),
    "sampled, proposal": (lambda: Sampled(own(), 9, "unigrams"), "proposal='unigrams'"),
    "sampled, several bands": (
        lambda: made(Sampled(own((5,))), HIDDEN, IDS, method="nll"),
        "this one has 2",
    ),
    "sampled, no counts": (uncounted, "proposal='unigram'"),
    "sampled, target beyond": (
        lambda: made(Sampled(own(), 9), HIDDEN, ids_at(1, 1, 20), W, train=True, method="loss"),
        "targets[1, 1]=20",
    ),
    "nce, dropout 1": (lambda: NCE(own(), input_dropout=1), "input_dropout=1"),
    "nce, hidden of other width": (
        lambda: made(NCE(own(), 9), HIDDEN[..., :6], IDS, train=True, method="loss"),
        "[2, 3, 6]",
    ),
    "differentiated, wide slices": (
        lambda: made(Differentiated(own((5,), projected=False)), HIDDEN, IDS, method="nll"),
        "slices of 8, 2",
    ),
    "differentiated, target -1": (
        lambda: made(Differentiated(own()), HIDDEN, ids_at(0, 1, -1), W, method="loss"),
        "targets[0, 1]=-1",
    ),
    "differentiated, hidden of other width": (
        lambda: made(Differentiated(own()), HIDDEN[..., :6], IDS, method="nll"),
        "[2, 3, 6]",
    ),
    "softmax, no table": (lambda: AdaptiveSoftmax(None), "table=None"),
    "softmax, neither table nor sizes": (lambda: AdaptiveSoftmax(), "vocabulary_size is missing"),
    "softmax, no features": (lambda: AdaptiveSoftmax(vocabulary_size=20), "features is missing"),
    "softmax, table and features": (lambda: AdaptiveSoftmax(own(), features=8), "features=8"),
    "softmax, table and bias": (lambda: AdaptiveSoftmax(own(), bias=True), "bias=True"),
    "softmax, cutoff beyond": (
        lambda: AdaptiveSoftmax(vocabulary_size=20, features=8, cutoffs=(30,)),
        "cutoff 30",
    ),
    "softmax, smoothing 1": (lambda: softmax(label_smoothing=1.0), "label_smoothing=1.0"),
    "softmax, negative smoothing": (lambda: softmax(label_smoothing=-0.1), "label_smoothing=-0.1"),
    "softmax, negative z_loss": (lambda: softmax(z_loss=-1e-4), "z_loss=-0.0001"),
    "softmax, infinite z_loss": (lambda: softmax(z_loss=float("inf")), "z_loss=inf"),
    "softmax, tail dropout 1": (lambda: softmax(tail_dropout=1), "tail_dropout=1"),
    "softmax, dropout as text": (lambda: softmax(input_dropout="0.1"), "input_dropout='0.1'"),
    "softmax, dropout NaN": (lambda: softmax(input_dropout=float("nan")), "input_dropout=nan"),
    "transformer, heads": (lambda: transformer(heads=3), "3 heads"),
    "transformer, no heads": (lambda: transformer(heads=0), "heads=0"),
    "transformer, fractional layers": (lambda: transformer(layers=1.5), "layers=1.5"),
    "transformer, layers True": (lambda: transformer(layers=True), "layers=True"),
    "transformer, fractional features": (lambda: transformer(features=8.0), "features=8.0"),
    "transformer, negative features": (lambda: transformer(features=-8), "features=-8"),
    "transformer, odd features": (lambda: transformer(features=7, heads=1), "7 features"),
    "transformer, feed_forward None": (lambda: transformer(feed_forward=None), "feed_forward=None"),
    "transformer, dropout 1.5": (lambda: transformer(dropout=1.5), "dropout=1.5"),
    "transformer, attention dropout": (
        lambda: transformer(attention_dropout=-1),
        "attention_dropout=-1",
    ),
    "transformer, positions": (lambda: transformer(positions="rotary"), "positions='rotary'"),
    "transformer, no positions": (lambda: transformer(max_positions=0), "max_positions=0"),
    "transformer, dtype": (lambda: transformer(dtype=jnp.int32), "dtype=int32"),
    "lstm, no widths": (lambda: LSTM(8, ()), "widths=()"),
    "lstm, one number": (lambda: LSTM(8, 5), "widths=5"),
    "lstm, fractional width": (lambda: LSTM(8, (5, 2.5)), "widths[1]=2.5"),
    "lstm, no features": (lambda: LSTM(0, (5,)), "features=0"),
    "lstm, dropout 1": (lambda: lstm(dropout=1), "dropout=1"),
    "lstm, three biases": (lambda: lstm(biases=3), "biases=3"),
    "lstm, whole dtype": (lambda: lstm(dtype=jnp.int32), "dtype=int32"),
    "awd_lstm, input dropout -1": (lambda: awd(input_dropout=-1), "input_dropout=-1"),
    "awd_lstm, hidden dropout as text": (lambda: awd(hidden_dropout="0.3"), "hidden_dropout='0.3'"),
    "awd_lstm, weight drop 1": (lambda: awd(weight_drop=1.0), "weight_drop=1.0"),
    "awd_lstm, negative ar": (lambda: awd(ar=-2), "ar=-2"),
    "awd_lstm, tar NaN": (lambda: awd(tar=float("nan")), "tar=nan"),
    "awd_lstm, tar as text": (lambda: awd(tar="1"), "tar='1'"),
    "gated_conv, form": (lambda: gated(form="papers"), "form='papers'"),
    "gated_conv, activation": (lambda: gated(activation="glue"), "activation='glue'"),
    "gated_conv, no features": (lambda: GatedConv(0, ((1, 3, 6),)), "features=0"),
    "gated_conv, no blocks": (lambda: GatedConv(8, ()), "blocks=()"),
    "gated_conv, one bare block": (lambda: GatedConv(8, (2, 3, 6)), "blocks[0]=2"),
    "gated_conv, no units": (lambda: GatedConv(8, ((2, 3, 6), (1, 3))), "blocks[1]=(1, 3)"),
    "gated_conv, six layers": (lambda: GatedConv(8, ((1, *[1, 6] * 6),)), "1 to 5 layers"),
    "gated_conv, kernel 0": (lambda: GatedConv(8, ((2, 0, 6),)), "blocks[0][1]=0"),
    "gated_conv, fractional units": (lambda: GatedConv(8, ((2, 3, 6.5),)), "blocks[0][2]=6.5"),
    "gated_conv, dropout 1": (lambda: gated(dropout=1), "dropout=1"),
    "gated_conv, negative output": (lambda: gated(output_width=-1), "output_width=-1"),
    "gated_conv, whole dtype": (lambda: gated(dtype=jnp.int32), "dtype=int32"),
    "lookup, word dropout 1": (lambda: lookup(word_dropout=1), "word_dropout=1"),
    "lookup, negative init_range": (lambda: lookup(init_range=-0.1), "init_range=-0.1"),
    "lookup, negative deviation": (lambda: lookup(init_deviation=-0.1), "init_deviation=-0.1"),
    "lookup, deviation NaN": (lambda: lookup(init_deviation=float("nan")), "init_deviation=nan"),
    "lookup, infinite deviation": (lambda: lookup(init_deviation=jnp.inf), "init_deviation=inf"),
    "lookup, two starts": (
        lambda: lookup(init_range=0.1, init_deviation=0.2),
        "init_range=0.1 and init_deviation=0.2",
    ),
    "adaptive, word dropout 1.5": (lambda: adaptive(word_dropout=1.5), "word_dropout=1.5"),
    "dropout 2": (lambda: Dropout(2), "rate=2"),
    # token ids
    "lookup, id beyond": (lambda: made(lookup(), ids_at(1, 2, 20)), "tokens[1, 2]=20"),
    "lookup, negative id": (lambda: made(lookup(), ids_at(0, 1, -1)), "tokens[0, 1]=-1"),
    "lookup, id beyond 32 bits": (
        lambda: made(lookup(), np.array([3, 2**32 + 3])),
        "tokens[1]=4294967299",
    ),
    "lookup, id beyond 32 bits in a list": (
        lambda: made(lookup(), [3, 2**32 + 3]),
        "tokens[1]=4294967299",
    ),
    "lookup, id in a list": (lambda: made(lookup(), [[1, 2], [3, 99]]), "tokens[1, 1]=99"),
    "lookup, id on the device": (lambda: made(lookup(), jnp.array([4, 77])), "tokens[1]=77"),
    "lookup, floats": (lambda: made(lookup(), IDS / 2), "float"),
    "lookup, bools": (lambda: made(lookup(), IDS > 2), "bool"),
    "lookup, ragged": (lambda: made(lookup(), [[1, 2], [3]]), "[[1, 2], [3]]"),
    "lookup, text": (lambda: made(lookup(), "the cat"), "the cat"),
    "lookup, None": (lambda: made(lookup(), None), "None"),
    "lookup, empty": (lambda: made(lookup(), IDS[:0]), "[0, 3]"),
    "adaptive, id beyond": (lambda: made(adaptive(), ids_at(1, 0, 25)), "tokens[1, 0]=25"),
    "adaptive, negative id": (lambda: made(adaptive(), ids_at(1, 0, -3)), "tokens[1, 0]=-3"),
    "adaptive, floats": (lambda: made(adaptive(), IDS * 1.0), "float"),
    "adaptive, empty": (lambda: made(adaptive(), []), "[0]"),
    "letters, id beyond": (lambda: spelt(tokens=ids_at(0, 0, 21)), "tokens[0, 0]=21"),
    "letters, negative id": (lambda: made(letters(), ids_at(0, 0, -21)), "tokens[0, 0]=-21"),
    "letters, other lexicon": (lambda: spelt(words=7), "7 words"),
    "letters, composing an id beyond": (
        lambda: made(letters(), [1, 44], method="compose"),
        "words[1]=44",
    ),
    "letters, composing a table": (lambda: made(letters(), IDS, method="compose"), "[2, 3]"),
    # hidden states, targets and weights
    "loss, target beyond": (lambda: loss(HIDDEN, ids_at(1, 1, 20), W), "targets[1, 1]=20"),
    "loss, target -1": (lambda: loss(HIDDEN, ids_at(1, 1, -1), W), "targets[1, 1]=-1"),
    "loss, target -1, no weights": (lambda: loss(HIDDEN, ids_at(1, 1, -1)), "targets[1, 1]=-1"),
    "loss, targets in other shape": (lambda: loss(HIDDEN, IDS[:, :2], W), "[2, 2]"),
    "loss, targets flat": (lambda: loss(HIDDEN, IDS.ravel(), W), "[6]"),
    "loss, floats for targets": (lambda: loss(HIDDEN, HIDDEN[..., 0], W), "float32"),
    "loss, targets None": (lambda: loss(HIDDEN, None, W), "None"),
    "loss, weights in other shape": (lambda: loss(HIDDEN, IDS, W[0]), "[3]"),
    "loss, weights as text": (lambda: loss(HIDDEN, IDS, "all"), "all"),
    "loss, complex weights": (lambda: loss(HIDDEN, IDS, W * 1j), "complex64"),
    "loss, hidden of other width": (lambda: loss(HIDDEN[..., :6], IDS, W), "[2, 3, 6]"),
    "loss, hidden ragged": (lambda: loss([[0.0], [1.0, 2.0]], IDS, W), "[[0.0], [1.0, 2.0]]"),
    "loss, row ids of other rows": (lambda: loss(HIDDEN, IDS, W, [0, 1, 2]), "[3]"),
    "loss, fractional row ids": (lambda: loss(HIDDEN, IDS, W, [0.0, 1.0]), "float32"),
    "loss, empty": (lambda: loss(HIDDEN[:0], IDS[:0], W[:0]), "[0, 3, 8]"),
    "nll, target beyond": (lambda: nll(HIDDEN, ids_at(0, 2, 20)), "targets[0, 2]=20"),
    "nll, targets in other shape": (lambda: nll(HIDDEN, IDS.T), "[3, 2]"),
    "nll, hidden of other width": (lambda: nll(HIDDEN[..., :4], IDS), "[2, 3, 4]"),
    "call, reduction": (lambda: call(HIDDEN, IDS, reduction="average"), "reduction='average'"),
    "call, dropout of single tokens": (
        lambda: made(softmax(tail_dropout=0.1), HIDDEN, IDS, reduction="none", train=True),
        "tail_dropout=0.1",
    ),
    "call, targets in other shape": (lambda: call(HIDDEN, IDS[:, :2]), "[2, 2]"),
    "call, hidden of other width": (lambda: call(HIDDEN[..., :6], IDS), "[2, 3, 6]"),
    "call, weights in other shape": (
        lambda: call(HIDDEN, IDS, W[0], reduction="none"),
        "[3]",
    ),
    "predict, hidden of other width": (lambda: predict(np.ones((4, 9), "f")), "[4, 9]"),
    "predict, empty": (lambda: predict(np.ones((0, 8), "f")), "[0, 8]"),
    "log_probs, hidden of other width": (lambda: logs(np.ones((4, 9), "f")), "[4, 9]"),
    "log_probs, empty": (lambda: logs(np.ones((0, 8), "f")), "[0, 8]"),
    "core, no bands": (lambda: core(IDS, W, []), "bands=[]"),
    "core, clusters missing": (lambda: core(IDS, W, BANDS), "clusters=None"),
    "core, clusters for one band": (
        lambda: core(IDS, W, [Band(np.ones((20, 8), "f"))], CLUSTERS),
        "clusters=Band",
    ),
    "core, too many clusters": (
        lambda: core(IDS, W, BANDS, Band(np.ones((2, 8), "f"))),
        "clusters.table of shape [2, 8]",
    ),
    "core, a bare table": (
        lambda: core(IDS, W, [np.ones((20, 8), "f")]),
        "bands[0] of type ndarray",
    ),
    "core, soft cap True": (
        lambda: core(IDS, W, settings=banded.Settings(soft_cap=True)),
        "soft_cap=True",
    ),
    "core, projection of other width": (
        lambda: core(
            IDS, W, [BANDS[0], BANDS[1]._replace(projection=np.ones((2, 9), "f"))], CLUSTERS
        ),
        "[2, 9]",
    ),
    "core, bias of other words": (
        lambda: core(IDS, W, [BANDS[0]._replace(bias=np.ones(4, "f")), BANDS[1]], CLUSTERS),
        "[4]",
    ),
    "core, table of one axis": (
        lambda: core(IDS, W, [Band(np.ones(8, "f"))]),
        "bands[0].table of shape [8]",
    ),
    "core, tail dropout 1.5": (
        lambda: core(IDS, W, settings=banded.Settings(tail_dropout=1.5)),
        "tail_dropout=1.5",
    ),
    "core, no seeds": (
        lambda: core(IDS, W, settings=banded.Settings(tail_dropout=0.5)),
        "tail_dropout=0.5",
    ),
    "core, seeds of others": (
        lambda: core(IDS, W, settings=banded.Settings(0.5), seeds=np.ones((5, 2), np.uint32)),
        "seeds of shape [5, 2]",
    ),
    "core, chunk 0": (lambda: core(IDS, W, settings=banded.Settings(chunk=0)), "chunk=0"),
    "core, fractional chunk": (
        lambda: core(IDS, W, settings=banded.Settings(chunk=2.5)),
        "chunk=2.5",
    ),
    "core, negative z_loss": (
        lambda: core(IDS, W, settings=banded.Settings(z_loss=-1.0)),
        "z_loss=-1.0",
    ),
    # vectors, rows and batches
    "transformer, vectors of other width": (
        lambda: made(transformer(), HIDDEN[..., :6]),
        "[2, 3, 6]",
    ),
    "transformer, one row": (lambda: made(transformer(), HIDDEN[0]), "[3, 8]"),
    "transformer, empty": (lambda: made(transformer(), HIDDEN[:, :0]), "[2, 0, 8]"),
    "transformer, ids": (lambda: made(transformer(), IDS), "[2, 3]"),
    "transformer, row ids": (
        lambda: made(transformer(), HIDDEN, (), batch(row_ids=np.arange(3))),
        "row_ids of shape [3]",
    ),
    "transformer, segments": (
        lambda: made(transformer(), HIDDEN, (), batch(segment_ids=IDS[:, 1:])),
        "segment_ids of shape [2",
    ),
    "transformer, fractional segments": (
        lambda: made(transformer(), HIDDEN, (), batch(segment_ids=W)),
        "float32",
    ),
    "transformer, cache of other rows": (
        lambda: made(transformer(), HIDDEN, cache(5, 9)),
        "5 rows",
    ),
    "transformer, full cache": (lambda: made(transformer(), HIDDEN, cache(ROWS, 2)), "length 2"),
    "gated_conv, vectors of other width": (lambda: made(gated(), HIDDEN[..., :6]), "[2, 3, 6]"),
    "gated_conv, segments": (
        lambda: made(gated(), HIDDEN, (), batch(segment_ids=IDS[:, 1:])),
        "segment_ids of shape [2",
    ),
    "gated_conv, segments with a carry": (
        lambda: made(gated(), HIDDEN, gated().initial_carry(ROWS), batch(segment_ids=IDS)),
        "segment_ids",
    ),
    "gated_conv, carry of other rows": (
        lambda: made(gated(), HIDDEN, gated().cache(5, 9)),
        "for 2 rows",
    ),
    "gated_conv, carry of another body": (
        lambda: made(gated(), HIDDEN, lstm().cache(ROWS, 9)),
        "for 2 rows",
    ),
    "lstm, vectors of other width": (lambda: made(lstm(), HIDDEN[..., :6]), "[2, 3, 6]"),
    "lstm, segments": (
        lambda: made(lstm(), HIDDEN, (), batch(segment_ids=IDS[:, 1:])),
        "segment_ids of shape [2",
    ),
    "lstm, segments with a carry": (
        lambda: made(lstm(), HIDDEN, lstm().cache(ROWS, 9), batch(segment_ids=IDS)),
        "segment_ids",
    ),
    "lstm, carry of other rows": (
        lambda: made(lstm(), HIDDEN, lstm().cache(5, 9)),
        "carry of shape [5, 5]",
    ),
    "lstm, carry of other layers": (
        lambda: made(lstm(), HIDDEN, lstm().cache(ROWS, 9)[1:]),
        "1 states",
    ),
    "dropout, row ids": (
        lambda: made(Dropout(0.5), HIDDEN, [0], train=True),
        "row_ids of shape [1]",
    ),
    "row seeds, fractions": (lambda: row_seeds(jax.random.key(0), [0.5]), "float32"),
    "model, input beyond": (lambda: made(model, batch(inputs=ids_at(0, 1, 50))), "tokens[0, 1]=50"),
    "model, target beyond": (
        lambda: made(model, batch(targets=ids_at(0, 1, 50))),
        "targets[0, 1]=50",
    ),
    "model, targets of other rows": (lambda: made(model, batch(targets=IDS[:1])), "[1, 3]"),
    "model, row of ids": (lambda: made(model, batch(inputs=IDS[0])), "[3, 8]"),
    "model, position beyond": (
        lambda: made(model, batch(), [[0], [3]], method="log_probs"),
        "positions[1, 0]=3",
    ),
    "model, positions of one row": (
        lambda: made(model, batch(), [[0]], method="log_probs"),
        "[1, 1]",
    ),
    "model, body of other features": (
        lambda: made(model.clone(body=transformer(features=16)), batch()),
        "vectors of shape [2, 3, 8]",
    ),
    "model, output of other features": (
        lambda: made(model.clone(output=AdaptiveSoftmax(OwnTable(WORDS, 6))), batch()),
        "hidden of shape [2, 3, 8]",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_one_line_with_the_value_and_the_cure(name):
    """Whatever is wrong, the error is InputError's one line."""
    call, value = WRONG[name]
    with pytest.raises(InputError) as error:
        call()
    line = str(error.value)
    assert "\n" not in line and len(line) < 200
    assert value in line and re.search(CURES, line), line


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
    "adaptive": (adaptive(), None),
    "lookup, bfloat16": (lookup(dtype=jnp.bfloat16), None),
    "adaptive, bfloat16": (adaptive(dtype=jnp.bfloat16), None),
    "letters": (letters(), LETTERS | {"lexicon": {"spelling": spelling(WORDS)}}),
    "letters, composed": (letters(), LETTERS | TABLES | {"lexicon": {"spelling": spelling(WORDS)}}),
}


@pytest.mark.parametrize("name", INPUTS)
def test_traced_ids_that_do_not_exist_have_vectors_of_nan(name):
    """Inside jax.jit: the vectors of these tokens, and of no others; so the loss tells."""
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
    assert (
        loss(HIDDEN, ids_at(0, 1, -1), weights)[0].total.shape == ()
    )  # known targets: nothing is refused


def test_without_weights_every_target_counts_once():
    """Weights of None are all ones."""
    run = functools.partial(softmax().apply, output_variables(), HIDDEN, IDS, method="loss")
    ones, none = jax.jit(lambda: (run(W), run()))()
    jax.tree.map(np.testing.assert_array_equal, ones, none)


AS = {"numpy": np.asarray, "list": lambda array: np.asarray(array).tolist()}


@pytest.mark.parametrize("kind", AS)
@pytest.mark.parametrize("method", ["__call__", "hidden", "nll", "log_probs", "step"])
def test_numpy_arrays_and_lists_are_arrays(kind, method):
    """Whatever a model takes, in a function that is compiled and differentiated, parameters of
    numpy among it.
    """
    cast = AS[kind]
    given = Batch(*map(cast, (IDS, IDS[:, ::-1], W, np.arange(ROWS), np.ones_like(IDS))))
    arguments = {
        "__call__": (given,),
        "hidden": (given,),
        "nll": (cast(HIDDEN), cast(IDS)),
        "log_probs": (given, cast(IDS[:, :1] * 0)),
        "step": (cast(IDS), cache(ROWS, 4)),
    }[method]
    same = jax.tree.map(jnp.asarray, arguments, is_leaf=lambda leaf: isinstance(leaf, list))
    params = jax.tree.map(
        lambda a: np.linspace(-1, 1, a.size, dtype="f").reshape(a.shape), made(model, batch())[1]
    )

    def first(params, *arguments):
        return jnp.sum(jax.tree.leaves(model.apply(params, *arguments, method=method))[0])

    def program(first, *arguments):  # its operations; constants stand where they are first used
        text = jax.jit(jax.value_and_grad(first)).lower(*arguments).as_text()
        return sorted(re.sub(r"%\w+", "%", text).splitlines())

    assert program(lambda params: first(params, *arguments), params) == program(
        lambda params: first(params, *same), params
    )
    jax.eval_shape(lambda: first(params, *arguments))
    assert jax.eval_shape(lambda zero: zero + first(params, *arguments), 0.0).shape == ()
