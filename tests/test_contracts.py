"""Contracts of every input, body, table and output, over the dicts in model.py: a new layer is
tested by being listed.
"""

import ast
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax.errors import InvalidRngError
from jax.sharding import PartitionSpec as P

from adaptive_jax.bodies.lstm import LSTM
from adaptive_jax.data.vocabulary.lexicon import lexicon
from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.errors import InputError
from adaptive_jax.inputs.adaptive import AdaptiveInput
from adaptive_jax.inputs.lookup import Lookup
from adaptive_jax.model.gradients import make_gradients
from adaptive_jax.model.language_model import (
    BODIES,
    INPUTS,
    OUTPUTS,
    TABLES,
    build,
    parameter_shapes,
    variable_shapes,
)
from adaptive_jax.numerics.batch import Batch
from adaptive_jax.outputs.output import Output
from adaptive_jax.outputs.tables import OwnTable
from adaptive_jax.parallel import sharding
from adaptive_jax.testing import check_body, check_input, check_output
from tests import refuses
from tests.toys import NoBody, Recurrent, random_params

VOCABULARY, FEATURES, BATCH, TIME = 61, 16, 3, 8
CUTOFFS = (11, 30)
SPELT = {"ab" * (n % 9) + chr(ord("a") + n % 26) + str(n): 1 for n in range(VOCABULARY - 2)}
WORDS = Vocabulary.build({"<eos>": 3, "<unk>": 2} | SPELT)

LEXICON = str(Path(__file__).parent / "fixtures" / "lexicon.jsonl")
# N-grams of i² modulo the words, i < 400: `write` of `adaptive_jax.data.vocabulary.ngrams`
COUNTS = str(Path(__file__).parent / "fixtures" / "ngrams.npz")

SHORT = {"width": 4, "filters": ((1, 6), (3, 8)), "length": 8}
LONG = {"width": 4, "filters": ((2, 12),), "highway_layers": 0, "length": 40}
BLOCKS = {"layers": 2, "heads": 2, "feed_forward": 24}

# Smallest settings of each layer; a layer that is missing here fails
# test_every_layer_is_under_contract.
INPUT = {
    "lookup": [{}, {"width": 8}],
    "adaptive": [
        {"cutoffs": CUTOFFS, "factor": 2},
        {"cutoffs": (7, 20, 40), "factor": 2, "width": 8},
    ],
    "char_cnn": [SHORT, LONG],
    "groc": [
        SHORT | {"strides": (1, 2), "lexicon": LEXICON},
        LONG | {"strides": (), "relations": 0, "combine": "add", "lexicon": LEXICON},
    ],
}
INPUT["ngrams"] = [
    {"words": {"name": "adaptive", **INPUT["adaptive"][0]}, "rows": 41, "row_width": 4},
    {"words": {"name": "char_cnn", **SHORT}, "orders": (3,), "rows": 50, "row_width": 0}
    | {"hashes": 2, "signs": True},
]
INPUT["ngrams"] += [
    {"words": {"name": "lookup"}, "rows": 30, "row_width": 8, "counts": COUNTS} | kind
    for kind in (
        {"kind": "counted"},
        {"kind": "banded", "row_cutoffs": (9,), "row_factor": 2, "hashed_rows": 7},
    )
]
# Words share what they are spelt with, so a gradient for one reaches others.
SPELLING = {"char_cnn", "groc"}
BODY = {
    "transformer": [BLOCKS, BLOCKS | {"final_norm": False, "positions": "alibi"}],
    "gated_conv": [
        {"blocks": ((1, 3, 12), (2, 1, 8, 4, 8, 1, FEATURES))},
        {"blocks": ((2, 4, 12), (1, 2, 12)), "form": "fairseq", "activation": "gtu"}
        | {"weight_norm": False, "output_width": FEATURES},
    ],
    "transformer_post_norm": [
        BLOCKS | {"final_norm": False, "positions": "learned", "max_positions": TIME + 2}
    ],
    "lstm": [{"widths": (12, FEATURES)}],
    "awd_lstm": [{"widths": (FEATURES,), "biases": 2}],
}
TABLE = {
    "own": [{"cutoffs": CUTOFFS, "factor": 2, "bias": True}],
    "tied": [{}],
    "mapped": [
        {"form": "bilinear", "bias": "own"},
        {"depth": 2, "dropout": 0.1, "layer_dropout": 0.2, "bias": "predicted"},
    ],
    "assembled": [{"dropout": 0.1, "bias": "own"}],
    "composed": [
        {"cnn": SHORT, "correction": 5, "bias": "own"},
        {"cnn": LONG, "correction": 0, "bias": "predicted"},
    ],
}
OUTPUT = {
    "softmax": [{}, {"input_dropout": 0.1}],
    "adaptive": [{}, {"tail_dropout": 0.2, "label_smoothing": 0.1}],
    "hierarchical": [{}],
    "sampled": [{"samples": 9}, {"samples": 9, "proposal": "unigram"}],
    "nce": [{"samples": 9}],
    "differentiated": [{}],
}


def config(
    input=("lookup", {}),
    body=("transformer", BODY["transformer"][0]),
    output=("softmax", {}),
    table=("own", {}),
):
    def group(pair, **more):
        return {"name": pair[0]} | pair[1] | more

    return {
        "dtype": "float32",
        "shard_words": False,
        "input": group(input),
        "body": group(body, features=FEATURES)
        | ({"scaled": False} if input[1].get("scaled") else {}),  # once is enough
        "output": group(output, table=group(table)),
    }


def cases(settings):
    return [
        pytest.param((name, fields), id=f"{name}-{i}")
        for name in settings
        for i, fields in enumerate(settings[name])
    ]


NARROW = ("lookup", {"width": 8})
BANDS = ("adaptive", {"cutoffs": CUTOFFS, "factor": 2})
ONE_BAND = [(NARROW, ("own", {"weight_norm": True})), (NARROW, ("tied", {}))]
SEVERAL = [(NARROW, ("own", TABLE["own"][0])), (BANDS, ("tied", {})), (NARROW, ("tied", {}))]


def on_tables():
    """Every output on tables that it takes, its further settings on the first of them."""
    for output, settings in OUTPUT.items():
        tables = SEVERAL if OUTPUTS[output].many_bands else ONE_BAND
        for i, fields in enumerate(settings):
            for source, table in tables[: 1 if i else None]:
                yield source, (output, fields), table


ADAPTIVE = ("adaptive", {})
OWN_ROWS = [
    *on_tables(),
    (NARROW, ("hierarchical", {"classes": 5}), ("own", {"weight_norm": True})),
    (NARROW, ADAPTIVE, ("own", {"cutoffs": (20,), "factor": 1, "width": 8})),
    (NARROW, ADAPTIVE, ("own", {"cutoffs": tuple(range(6, 55, 6)), "factor": 1, "width": 4})),
    (NARROW, ADAPTIVE, ("tied", {"cutoffs": CUTOFFS, "own_head": True})),
    (BANDS, ADAPTIVE, ("tied", {"share_projections": False, "bias": True})),
    (BANDS, ADAPTIVE, ("tied", {"share_head_projection": True})),
    (NARROW, ("differentiated", {}), ("own", TABLE["own"][0] | {"width": 9, "projected": False})),
]
OWN_ROWS = [
    pytest.param(case, id="-".join(part[0] for part in case) + f"-{i}")
    for i, case in enumerate(OWN_ROWS)
]
COMPOSED = (("char_cnn", SHORT), ("softmax", {}), ("tied", {}))
MAPPED = (("lookup", {}), ("softmax", {}), ("mapped", TABLE["mapped"][1]))
GROC = ("groc", INPUT["groc"][0])
OF_GROC = {"cutoffs": CUTOFFS, "depth": 0, "dropout": 0.1, "bias": "predicted"}
# More, whose output words share parameters.
COMPUTED = [
    COMPOSED,
    (COMPOSED[0], ("softmax", {}), MAPPED[2]),
    MAPPED,
    (("lookup", {}), ("softmax", {}), ("mapped", TABLE["mapped"][0])),
    *((("lookup", {}), ("softmax", {}), ("composed", fields)) for fields in TABLE["composed"]),
    (
        (BANDS[0], BANDS[1] | {"scaled": True}),
        ("softmax", {}),
        ("assembled", TABLE["assembled"][0]),
    ),
    (GROC, ADAPTIVE, ("mapped", OF_GROC)),
    (("ngrams", INPUT["ngrams"][1]), ADAPTIVE, ("tied", {})),
]
MODELS = [*OWN_ROWS, *(pytest.param(case, id=f"computed-{i}") for i, case in enumerate(COMPUTED))]


@functools.cache
def _made(key):
    source, output, table = ast.literal_eval(key)
    model = build(config(input=source, output=output, table=table), VOCABULARY)
    return model, {
        "params": random_params(parameter_shapes(model)),
        "lexicon": lexicon(WORDS, model.lexicon_spec()),
    }


def made(case):
    return _made(repr(case))


def run(model, variables, *arrays, **how):
    """`model.apply` as one compiled program: op by op it would compile every operation by
    itself.
    """
    return jax.jit(lambda variables, *arrays: model.apply(variables, *arrays, **how))(
        variables, *arrays
    )


def with_params(variables, params):
    return variables | {"params": params}


def alone_variables(layer, *arrays):
    """A layer's variables: random parameters, and what it wants to know about the words."""
    shapes = jax.eval_shape(layer.init, jax.random.key(0), *arrays)
    return {
        "params": random_params(shapes["params"]),
        "lexicon": lexicon(WORDS, getattr(layer, "lexicon_spec", {})),
    }


def random_batch(rows=BATCH):
    ids = jax.random.randint(jax.random.key(7), (rows, TIME + 1), 0, VOCABULARY)
    return Batch(
        ids[:, :-1],
        ids[:, 1:],
        jax.random.uniform(jax.random.key(8), (rows, TIME)),
        jnp.arange(rows),
    )


def rows_of(tokens, segment_ids=None):
    """A batch to read hidden states from."""
    zeros = jnp.zeros(tokens.shape, jnp.int32)
    return Batch(tokens, zeros, zeros, jnp.arange(len(tokens)), segment_ids)


def hidden_and_targets():
    hidden = jax.random.normal(jax.random.key(2), (VOCABULARY * 2, FEATURES))
    return hidden, jnp.concatenate([jnp.arange(VOCABULARY), jnp.arange(VOCABULARY)[::-1]])


class Plain(Output):
    """An output as small as can be: a softmax whose logits all exist."""

    many_bands = False

    def log_probs(self, hidden):
        """Of all words, `[..., vocabulary]`."""
        return jax.nn.log_softmax(hidden @ self.bands()[0].table.T)


class Nothing(nn.Module):
    """A module that is neither a body nor an output."""

    features: int = FEATURES
    table: nn.Module = None


def test_the_default_loss_sums_in_float32_and_refuses_other_shapes():
    """Strict promotion refused hidden states in bfloat16; targets of fewer axes than the hidden
    states were broadcast in silence.
    """
    output, hidden = Plain(OwnTable(VOCABULARY, FEATURES)), jnp.ones((2, 3, FEATURES), jnp.bfloat16)
    table = jnp.ones((VOCABULARY, FEATURES), jnp.bfloat16)
    variables = {"params": {"table": {"table_0": table}}}
    targets, weights = jnp.zeros((2, 3), jnp.int32), jnp.ones((2, 3))
    with jax.numpy_dtype_promotion("strict"):
        loss = output.apply(variables, hidden, targets, weights, method="loss")
    assert loss.total.dtype == loss.nll.dtype == jnp.float32
    with refuses("targets", "[3]"):
        output.apply(variables, hidden, targets[0], method="loss")


@pytest.mark.parametrize(
    "group, missing", [("body", ["initial_carry"]), ("output", ["nll", "flops"])]
)
def test_an_error_lists_the_methods_that_a_layer_lacks(group, missing):
    """It was an AttributeError in the middle of a run, one method at a time."""
    with pytest.raises(InputError) as error:
        build(config(**{group: (f"{__name__}:Nothing", {})}), VOCABULARY)
    assert all(name in str(error.value) for name in [f"config.{group}.name", *missing])


class Unlearnt(Plain):
    """The last word's row is never read."""

    def log_probs(self, hidden):
        """Of all words, `[..., vocabulary]`."""
        table = self.bands()[0].table
        return jax.nn.log_softmax(hidden @ table.at[-1].set(1.0).T)


class Doubled(Plain):
    """Probabilities sum to 2."""

    def log_probs(self, hidden):
        """Of all words, `[..., vocabulary]`."""
        return super().log_probs(hidden) + jnp.log(2)


class Reversed(Plain):
    """The nll is in another order."""

    def nll(self, hidden, targets):
        """Of each target, the last one first."""
        return super().nll(hidden, targets)[::-1]


class Louder(Plain):
    """The loss is twice the weighted sum."""

    def loss(self, *arrays, **options):
        """See `Output.loss`."""
        loss = super().loss(*arrays, **options)
        return loss._replace(total=2 * loss.total)


class Mapped(Plain):
    """A layer whose parameters are made when it is called, which no run does first."""

    def setup(self):
        """Makes the layer."""
        self.map = nn.Dense(FEATURES)

    def log_probs(self, hidden):
        """Log-probabilities of all words, `[..., vocabulary]`."""
        return super().log_probs(self.map(hidden))


def test_the_smallest_right_output():
    """It passes every check."""
    check_output(Plain(OwnTable(VOCABULARY, FEATURES)))


@pytest.mark.parametrize(
    "output, fault",
    [
        (Unlearnt, "gradient"),
        (Doubled, "sum to 1"),
        (Reversed, "minus log_probs"),
        (Louder, "weighted sum"),
        (Mapped, "kernel"),
    ],
)
def test_check_output_finds_faults(output, fault):
    """Each of its checks can fail."""
    with pytest.raises(AssertionError, match=fault):
        check_output(output(OwnTable(VOCABULARY, FEATURES)))


class Average(Recurrent):
    """A body whose hidden states see the whole row."""

    def __call__(self, vectors, carry=(), batch=None, *, train=False):
        """Vectors `[rows, time, features]` and their mean."""
        return vectors + jnp.mean(vectors, axis=1, keepdims=True), carry


class Forgetful(LSTM):
    """A body that reads no carry, and may return one where none was given."""

    always: bool = False

    @nn.compact
    def __call__(self, vectors, carry=(), batch=None, *, train=False):
        """See `LSTM`."""
        hidden, _ = super().__call__(vectors, (), batch, train=train)
        return hidden, self.initial_carry(len(vectors)) if self.always or len(carry) else ()


def test_an_input_passes_with_x64():
    """Layers of float32 failed the check where arrays are float64 by default."""
    with jax.enable_x64(True):
        check_input(AdaptiveInput(7, 4, cutoffs=(3,), factor=2))


def test_check_body_and_check_input_find_faults():
    """A body that reads later tokens, forgets its carry or makes one up, and an input whose vectors
    are not those of its table.
    """
    with pytest.raises(AssertionError, match="reads"):
        check_body(Average(FEATURES))
    with pytest.raises(AssertionError, match="halves"):
        check_body(Forgetful(FEATURES, (FEATURES,)))
    with pytest.raises(AssertionError, match="carry after"):
        check_body(Forgetful(FEATURES, (FEATURES,), always=True))
    with pytest.raises(AssertionError, match="segment"):
        check_body(Recurrent(FEATURES))  # which knows resets only

    class Shifted(Lookup):
        """Vectors of the next words."""

        def __call__(self, tokens, batch=None, *, train=False):
            """Vectors `[..., features]` of the next words."""
            return super().__call__((tokens + 1) % self.vocabulary_size)

    with pytest.raises(AssertionError, match="rows of bands"):
        check_input(Shifted(VOCABULARY, FEATURES))


def test_layers_of_other_modules_train():
    """A body and an output that no list of the project names: an update moves every parameter."""
    names = ("tests.toys:Recurrent", {}), (f"{__name__}:Plain", {})
    model = build(config(("adaptive", {}), *names, ("tied", {})), VOCABULARY)
    params, batch = random_params(parameter_shapes(model)), random_batch()
    parts = jax.tree.map(lambda a: a[None], batch)
    gradients = jax.jit(make_gradients(model, sharding.device_mesh(), 0))
    gradient, *_ = gradients(params, {}, jnp.zeros((), jnp.int32), parts, (), {})
    moved = jax.tree.map(lambda a: bool(jnp.abs(a).max() > 0), gradient)
    assert all(jax.tree.leaves(moved)), moved
    # Without weights, each counts 1.
    ones = parts._replace(weights=jnp.ones_like(parts.weights))
    all_count = gradients(params, {}, jnp.zeros((), jnp.int32), ones, (), {})
    without = gradients(params, {}, jnp.int32(0), parts._replace(weights=None), (), {})
    jax.tree.map(np.testing.assert_array_equal, without, all_count)


def test_every_layer_is_under_contract():
    """Each name in model.py has a smallest setting here."""
    assert (set(INPUT), set(BODY), set(TABLE), set(OUTPUT)) == (
        set(INPUTS),
        set(BODIES),
        set(TABLES),
        set(OUTPUTS),
    )


EVERY_LAYER = [
    *({"body": case.values[0]} for case in cases(BODY)),
    *({"input": case.values[0]} for case in cases(INPUT)),
    *(
        dict(zip(("input", "output", "table"), case, strict=True))
        for case in [*on_tables(), *COMPUTED]
    ),
]


def every_class(cases):
    """The cases in which a class of a body, an input, an output or a table comes first."""
    names = set()
    for parts in cases:
        new = {(group, name) for group, (name, _) in parts.items()} - names
        names |= new
        if new:
            yield parts


def trace_gradients(parts):
    """Traces loss and gradients of training, and returns the shapes of parameters."""
    model, batch = build(config(**parts), VOCABULARY), random_batch()
    if "body" not in parts:  # to trace a body again would show nothing new
        model = model.clone(body=NoBody())
    lexical = {"lexicon": lexicon(WORDS, model.lexicon_spec())}

    def loss(params, key):
        how = {"train": True, "rngs": {"dropout": key}, "mutable": ["penalties"]}
        return model.apply(lexical | {"params": params}, batch, **how)[0][0][0]

    params = parameter_shapes(model)
    jax.eval_shape(jax.grad(loss), params, jax.random.key(0))
    return params


@pytest.mark.parametrize("parts", EVERY_LAYER, ids=str)
def test_strict_promotion(parts):
    """A program in which JAX mixes no dtypes by itself may train every layer."""
    with jax.numpy_dtype_promotion("strict"):
        trace_gradients(parts)


@pytest.mark.parametrize("parts", every_class(EVERY_LAYER), ids=str)
def test_parameters_under_x64(parts):
    """They are float32, as those of flax's own layers: most were float64, which doubled memory,
    and the loop of an LSTM was refused.
    """
    with jax.enable_x64(True):
        params = trace_gradients(parts)
    assert {a.dtype for a in jax.tree.leaves(params)} == {jnp.dtype("float32")}


@pytest.mark.parametrize("source", cases(INPUT))
def test_input(source):
    """See `check_input`."""
    layer = build(config(input=source), VOCABULARY).input
    variables = alone_variables(layer, jnp.arange(VOCABULARY)[:, None])
    words = source[1].get("words", {}).get("name", source[0])
    check_input(layer, variables, own_rows=words not in SPELLING)


@pytest.mark.parametrize("body", cases(BODY))
def test_body(body):
    """See `check_body`; and segments are as if alone, whose rows are read in four parts, too."""
    layer = build(config(body=body), VOCABULARY).body
    vectors = jax.random.normal(jax.random.key(0), (1, TIME, FEATURES))
    variables = alone_variables(layer, vectors)
    check_body(layer, variables)
    segments = jnp.array([[1, 1, 1, 2, 3, 3, 0, 0]])
    # What follows a segment does not reach it.
    starts, lengths = (0, 3, 4), (3, 1, 2)
    shifted = jnp.concatenate([jnp.roll(vectors, -start, axis=1) for start in starts])
    apply = jax.jit(layer.apply)
    hidden, _ = apply(variables, vectors, (), rows_of(segments, segments))
    alone, _ = apply(variables, shifted)
    for start, length, row in zip(starts, lengths, alone, strict=True):
        np.testing.assert_allclose(hidden[0, start : start + length], row[:length], atol=2e-5)
    carry, parts = layer.cache(len(starts), TIME + 2), []
    for part in jnp.split(shifted, 4, axis=1):
        states, carry = apply(variables, part, carry)
        parts.append(states)
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), alone, atol=2e-5)


@pytest.mark.parametrize(
    "body", [case for case in cases(BODY) if not case.values[0][0].startswith("transformer")]
)
def test_body_continues_rows_of_a_stream(body):
    """From the carry of a stream two parts equal the whole, row by row; a row that is reset
    equals one that stands alone.
    """
    layer = build(config(body=body), VOCABULARY).body
    vectors = jax.random.normal(jax.random.key(0), (BATCH, TIME, FEATURES))
    variables, apply = alone_variables(layer, vectors), jax.jit(layer.apply)
    assert all(len(a) == BATCH for a in jax.tree.leaves(layer.initial_carry(BATCH)))
    whole, _ = apply(variables, vectors)
    reset = jnp.array([False, True, False])
    batch = rows_of(jnp.zeros((BATCH, TIME // 2), jnp.int32))._replace(reset=reset)
    first, second = jnp.split(vectors, 2, axis=1)
    before, carry = apply(variables, first, layer.initial_carry(BATCH), batch)
    after, _ = apply(variables, second, carry, batch)
    fresh, _ = apply(variables, second, layer.initial_carry(BATCH), batch)
    np.testing.assert_allclose(before, whole[:, : TIME // 2], atol=2e-5)
    expected = jnp.where(reset[:, None, None], fresh, whole[:, TIME // 2 :])
    np.testing.assert_allclose(after, expected, atol=2e-5)


def loss_of(model, variables, *arrays, **how):
    method = lambda m, *arrays: m.output.loss(*arrays, train="rngs" in how)
    return model.apply(variables, *arrays, method=method, **how)


@pytest.mark.parametrize("case", MODELS)
def test_output(case):
    """See `check_output`; the first two words of each cluster are among those that learn."""
    model, variables = made(case)
    check_output(model, variables, own_rows=case not in COMPUTED, part=lambda model: model.output)


@pytest.mark.parametrize("case", MODELS)
def test_training_draws_dropout_and_evaluation_does_not(case):
    """With a rate above 0 two keys give two training losses; without one, training does not
    even ask for a key.
    """
    model, variables = made(case)
    hidden, targets = hidden_and_targets()

    def loss(**rngs):
        given = hidden, targets, jnp.ones(targets.shape)
        return loss_of(model, variables, *given, rngs=rngs).total

    _, (_, fields), (_, table) = case
    bands = jax.eval_shape(lambda: model.apply(variables, method=lambda m: m.output.table.bands()))
    rates = [fields.get("input_dropout", 0), table.get("dropout", 0)]
    rates += [fields.get("tail_dropout", 0)] if len(bands) > 1 else []
    if not any(rates) and "samples" not in fields:
        # Asking for a key that was not given would be an error.
        assert jax.eval_shape(loss).shape == ()
        return
    with pytest.raises(InvalidRngError):
        jax.eval_shape(loss)
    drawn = jax.jit(lambda seed: loss(dropout=jax.random.key(seed)))
    assert drawn(0) != drawn(1)


ADP_T = (BANDS, ADAPTIVE, ("tied", {}))
CNN = (COMPOSED[0], ADAPTIVE, ("own", BANDS[1]))


def test_log_probs_of_positions_builds_no_more_than_asked_for():
    """LanguageModel.log_probs answers for the columns asked for, and no array of all positions
    and words exists.
    """
    model, variables = made(ADP_T)
    tokens = jax.random.randint(jax.random.key(0), (BATCH, TIME), 0, VOCABULARY)
    positions = jnp.array([[0], [5], [7]])

    def ask(tokens, positions):
        return run(model, variables, rows_of(tokens), positions, method="log_probs")

    everywhere = jnp.broadcast_to(jnp.arange(TIME), (BATCH, TIME))
    expected = jnp.take_along_axis(ask(tokens, everywhere), positions[..., None], axis=1)
    np.testing.assert_allclose(ask(tokens, positions), expected, atol=1e-5)
    text = jax.jit(ask).lower(tokens, positions).as_text()
    assert f"{BATCH}x1x{VOCABULARY}" in text
    assert f"{BATCH * TIME}x{VOCABULARY}" not in text
    assert f"{BATCH}x{TIME}x{VOCABULARY}" not in text


@pytest.mark.parametrize(
    "case, which",
    [
        pytest.param(ADP_T, "none", id="none"),
        pytest.param(CNN, "inputs", id="inputs"),
        pytest.param(MAPPED, "all", id="mapped"),
        pytest.param(COMPUTED[1], "all", id="mapped and composed"),
        pytest.param(COMPUTED[-2], "all", id="groc"),
        pytest.param(COMPUTED[-1], "all", id="n-grams"),
        pytest.param((COMPUTED[-1][0], *CNN[1:]), "inputs", id="n-grams, inputs"),
        pytest.param((GROC, *CNN[1:]), "inputs", id="groc, inputs"),
    ],
)
def test_gradients_of_microbatches_are_those_of_the_loss(case, which):
    """The slow twin differentiates one loss of all rows, every vector composed where it is used."""
    model, variables = made(case)
    assert model.composed_words() == which
    if case not in (ADP_T, CNN):  # to compile a body again would show nothing new
        model = model.clone(body=NoBody())
        variables = with_params(
            variables,
            {name: group for name, group in variables["params"].items() if name != "body"},
        )
    batch, key = random_batch(rows=4), jax.random.fold_in(jax.random.key(0), 0)  # seed and step
    parts = jax.tree.map(lambda a: a.reshape(2, -1, *a.shape[1:]), batch)

    def loss(params):
        result, _ = model.apply(
            with_params(variables, params), batch, train=True, rngs={"dropout": key}
        )
        return result.total

    @jax.jit
    def both(params):
        gradients = make_gradients(model, sharding.device_mesh(), 0)
        return jax.value_and_grad(loss)(params), gradients(
            params, variables["lexicon"], jnp.zeros((), jnp.int32), parts, (), {}
        )

    (expected, gradient), (ours, _, sums, _) = both(variables["params"])
    np.testing.assert_allclose(sums.loss, expected, rtol=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), ours, gradient
    )


def program(case, vocabulary_size, microbatches=4):
    """The gradients' jaxpr for a vocabulary of this size, and the body of its loop over
    microbatches.
    """
    source, output, table = case
    model = build(config(input=source, output=output, table=table), vocabulary_size)
    ids = jax.ShapeDtypeStruct((microbatches, BATCH, TIME), jnp.int32)
    batch = Batch(
        ids,
        ids,
        jax.ShapeDtypeStruct(ids.shape, jnp.float32),
        jax.ShapeDtypeStruct(ids.shape[:2], jnp.int32),
    )
    variables = variable_shapes(model)
    gradients = make_gradients(model, sharding.device_mesh(), 0)
    arguments = (
        variables["params"],
        variables["lexicon"],
        jax.ShapeDtypeStruct((), jnp.int32),
        batch,
        (),
        {},
    )
    whole = jax.jit(gradients).trace(*arguments)
    [loop] = [
        eqn
        for eqn in whole.jaxpr.eqns[0].params["jaxpr"].eqns
        if eqn.primitive.name == "scan" and eqn.params["length"] == microbatches
    ]
    return whole.lower().as_text(), str(loop.params["jaxpr"])


@pytest.mark.parametrize("case", [CNN, COMPOSED], ids=["cnn", "composed"])
def test_letters_are_neither_in_the_program_nor_read_by_every_microbatch(case):
    """A hundred times as many words make no larger program, and composition happens outside the
    loop over microbatches.
    """
    small, loop = program(case, VOCABULARY)
    large, _ = program(case, 100 * VOCABULARY)
    assert len(large) < 1.02 * len(small)
    assert "ui8" in small and "u8[" not in loop


# Every body, and every kind of operation with a gradient of its own
SHARED = [
    ("transformer", ("ngrams", INPUT["ngrams"][0]), ADAPTIVE, ("tied", {})),
    ("gated_conv", ("char_cnn", SHORT), ("sampled", {"samples": 9}), ("own", {})),
    ("transformer_post_norm", NARROW, ("differentiated", {}), ("own", TABLE["own"][0])),
    ("lstm", GROC, ADAPTIVE, ("mapped", OF_GROC)),
    ("awd_lstm", *COMPOSED),
]
PROGRAM = """
import functools, json
import jax, numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import NamedSharding, PartitionSpec as P
from tests.test_contracts import BODY, SHARED, VOCABULARY, WORDS, build, config, lexicon
from tests.test_contracts import parameter_shapes, random_batch, random_params

mesh, found = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4]), {}
for body, source, output, table in SHARED:
    layers = config(source, (body, BODY[body][0]), output, table)
    model, batch = build(layers, VOCABULARY), random_batch(8)
    params = random_params(parameter_shapes(model))

    def loss(params, lexicon, batch, model=model):
        how = {"train": True, "rngs": {"dropout": jax.random.key(0)}, "mutable": ["penalties"]}
        (found, _), _ = model.apply({"params": params, "lexicon": lexicon}, batch, **how)
        return found.total

    def on_mesh(params, specs, model):
        def on_one_device(*given):
            total, gradient = jax.value_and_grad(functools.partial(loss, model=model))(*given)
            return jax.lax.psum(total, "data"), gradient

        specs = specs, P(), P("data")
        run = jax.shard_map(on_one_device, mesh=mesh, in_specs=specs, out_specs=(P(), specs[0]))
        shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
        total, gradient = jax.jit(run)(*jax.device_put((params, *given[1:]), shardings))
        both = *map(jax.tree.leaves, (gradient, want[1])),
        apart = [np.abs(np.asarray(a)[*map(slice, b.shape)] - b).max() for a, b in zip(*both)]
        return [abs(float(total / want[0]) - 1), float(np.max(apart))]

    given = params, lexicon(WORDS, model.lexicon_spec()), batch
    want = jax.jit(jax.value_and_grad(loss))(*given)
    found[body] = on_mesh(params, P(), model)
    if body == "transformer":  # and with tables cut by words, filled up by rows that are no word
        flat = flatten_dict(params)
        specs = {path: P("data") if path in model.word_tables() else P() for path in flat}
        rows = {path: [(0, -len(a) % 4)] for path, a in flat.items() if specs[path]}
        how = {"constant_values": 7}  # what stands there does not count
        padded = flat | {path: np.pad(flat[path], rows[path] + [(0, 0)], **how) for path in rows}
        cut = map(unflatten_dict, (padded, specs))
        found["by words"] = on_mesh(*cut, model.over_words(("data",)))
print(json.dumps(found))
"""


def test_models_in_a_shard_map_of_ones_own(eight):
    """With `check_vma`, which is on unless it is turned off, and parameters that all devices share:
    JAX sums their gradients. Without casts of what is shared it refuses every layer whose gradient
    is written by hand, in words of its own.
    """
    errors = json.loads(eight(PROGRAM))
    assert {*errors} == {*BODIES, "by words"}
    assert all(total < 2e-6 and apart < 2e-5 for total, apart in errors.values()), errors


def test_a_long_row_in_a_shard_map_of_ones_own():
    """Attention of more than 1,024 tokens, whose stages have several chunks, has a backward
    pass there: what chunks add up varied.
    """
    body = build(config(), VOCABULARY).body
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    params = parameter_shapes(build(config(), VOCABULARY))["body"]

    def slope(params, vectors):
        return jax.grad(lambda v: body.apply({"params": params}, v)[0].sum())(vectors)

    run = jax.shard_map(slope, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))
    cut = jax.NamedSharding(mesh, P("data"))
    vectors = jax.ShapeDtypeStruct((1, 1_200, FEATURES), jnp.float32, sharding=cut)
    assert jax.eval_shape(run, params, vectors).shape == vectors.shape


@pytest.mark.parametrize(
    "output, table",
    [
        (("sampled", {"samples": 9}), {"width": 4, "bias": True}),
        (("differentiated", {}), TABLE["own"][0] | {"bias": True}),
    ],
    ids=["sampled", "differentiated"],
)
def test_hidden_states_of_weight_0_may_be_nan(output, table):
    """Loss and gradients of outputs that JAX differentiates, as of all others; in float16, tables
    and projections learn from tokens of small weights, too.
    """
    model, variables = made((NARROW, output, ("own", table)))
    hidden, targets = (each[:6] for each in hidden_and_targets())
    weights = jnp.ones(6).at[2].set(0)

    @jax.jit
    def slopes(params, hidden, weights):
        def loss(params, hidden):
            how = {"rngs": {"dropout": jax.random.key(1)}}
            given = with_params(variables, params), hidden, targets, weights
            return loss_of(model, *given, **how).total

        total, (of_params, of_hidden) = jax.value_and_grad(loss, (0, 1))(params, hidden)
        return total, of_params["output"]["table"], of_hidden

    given = variables["params"], hidden, weights
    right = slopes(*given)
    with_nan = slopes(given[0], hidden.at[2].set(jnp.nan), weights)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), with_nan, right)
    assert "projection_0" in right[1] or "projection_1" in right[1]
    half = hidden.astype(jnp.float16)
    with jax.numpy_dtype_promotion("strict"):
        _, small, _ = slopes(given[0], half, 1e-9 * weights)
        narrow = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (given[0], hidden))
        jax.eval_shape(slopes, *narrow, weights)
    for one, other in zip(*map(jax.tree.leaves, (small, right[1])), strict=True):
        assert np.linalg.norm(1e9 * one - other) < 1e-2 * np.linalg.norm(other)
    assert all(
        np.isfinite(a).all() for a in jax.tree.leaves(slopes(given[0], half, 1e-36 * weights))
    )
