"""What every input, body, table and output must do, over the dicts in model.py: a new layer is tested by being listed."""

import ast
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.model import BODIES, INPUTS, OUTPUTS, TABLES, build

VOCABULARY, FEATURES, BATCH, TIME = 61, 16, 3, 8
CUTOFFS = (11, 30)
SPELT = {"ab" * (n % 9) + chr(ord("a") + n % 26) + str(n): 1 for n in range(VOCABULARY - 2)}
WORDS = Vocabulary.build({"<eos>": 3, "<unk>": 2} | SPELT)

# Smallest settings of each layer; a layer that is missing here fails test_every_layer_is_under_contract.
INPUT = {
    "lookup": [{}, {"width": 8}],
    "adaptive": [{"cutoffs": CUTOFFS, "factor": 2}, {"cutoffs": (7, 20, 40), "factor": 2, "width": 8}],
    "char_cnn": [
        {"width": 4, "filters": ((1, 6), (3, 8)), "highway_layers": 2, "length": 12},
        {"width": 4, "filters": ((2, 12),), "highway_layers": 0, "length": 40}],
}
SPELLING = {"char_cnn"}  # words share what they are spelt with, so a gradient for one reaches others
BODY = {
    "transformer": [
        {"layers": 2, "heads": 2, "feed_forward": 24},
        {"layers": 1, "heads": 4, "feed_forward": 24, "final_norm": False}],
    "transformer_post_norm": [{"layers": 2, "heads": 2, "feed_forward": 24, "final_norm": False}],
}
TABLE = {
    "own": [{"cutoffs": CUTOFFS, "factor": 2}, {"cutoffs": (20,), "factor": 1, "width": 8}, {}],
    "tied": [{}, {"share_projections": False}, {"share_head_projection": True}, {"cutoffs": CUTOFFS}],
}
OUTPUT = {"softmax": [{}, {"input_dropout": 0.1}], "adaptive": [{}, {"tail_dropout": 0.2, "label_smoothing": 0.1}]}


def config(input=("lookup", {}), body=("transformer", BODY["transformer"][0]), output=("softmax", {}), table=("own", {})):
    def group(pair, **more):
        return {"name": pair[0]} | pair[1] | more

    return {"dtype": "float32", "input": group(input), "body": group(body, features=FEATURES),
            "output": group(output, table=group(table))}


def cases(settings):
    return [pytest.param((name, fields), id=f"{name}-{i}") for name in settings for i, fields in enumerate(settings[name])]


def whole_models():
    """Every output on every table that fits it."""
    for output, fields_list in OUTPUT.items():
        for table, tables in TABLE.items():
            for source in (("lookup", {"width": 8}), ("adaptive", {"cutoffs": CUTOFFS, "factor": 2})):
                for table_fields in tables if source[0] == "adaptive" or table == "tied" else []:
                    cut = bool(table_fields.get("cutoffs")) or (table == "tied" and source[0] == "adaptive")
                    twice = table == "tied" and source[0] == "adaptive" and "cutoffs" in table_fields
                    if (output == "adaptive" or not cut) and not twice:
                        for fields in fields_list:
                            yield (source, (output, fields), (table, table_fields))


OWN_ROWS = [pytest.param(case, id="-".join(part[0] for part in case) + f"-{i}") for i, case in enumerate(whole_models())]
# One more, whose output words are spelt and share all parameters.
MODELS = [*OWN_ROWS, pytest.param((("char_cnn", INPUT["char_cnn"][0]), ("softmax", {}), ("tied", {})), id="composed")]


@functools.cache
def _made(key):
    source, output, table = ast.literal_eval(key)
    model = build(config(input=source, output=output, table=table), WORDS)
    ids = jax.random.randint(jax.random.key(1), (BATCH, TIME), 0, VOCABULARY)
    params = jax.jit(model.init)(jax.random.key(0), ids, ids, jnp.ones(ids.shape))
    return model, params


def made(case):
    return _made(repr(case))


def run(model, params, *arrays, **how):
    """`model.apply` as one compiled program: op by op it would compile every operation by itself."""
    return jax.jit(lambda params, *arrays: model.apply(params, *arrays, **how))(params, *arrays)


def hidden_and_targets():
    hidden = jax.random.normal(jax.random.key(2), (VOCABULARY * 2, FEATURES))
    return hidden, jnp.concatenate([jnp.arange(VOCABULARY), jnp.arange(VOCABULARY)[::-1]])


def test_every_layer_is_under_contract():
    """Each name in model.py has a smallest setting here."""
    assert (set(INPUT), set(BODY), set(TABLE), set(OUTPUT)) == (set(INPUTS), set(BODIES), set(TABLES), set(OUTPUTS))


@pytest.mark.parametrize("source", cases(INPUT))
def test_input_is_rows_of_its_table(source):
    """`__call__` equals rows of the table that `bands()` assembles."""
    model = build(config(input=source), WORDS).input
    everything = jnp.arange(VOCABULARY)
    params = jax.jit(model.init)(jax.random.key(0), everything)
    bands = run(model, params, method="bands")
    table = jnp.concatenate([words if projection is None else words @ projection for words, projection in bands])
    assert table.shape == (VOCABULARY, FEATURES)
    tokens = jnp.array([[3, 60, 11, 10], [29, 30, 0, 3]])
    np.testing.assert_allclose(run(model, params, tokens), table[tokens], atol=1e-6)


@pytest.mark.parametrize("source", cases({name: INPUT[name] for name in INPUT if name not in SPELLING}))
def test_input_gradient_reaches_only_the_words_given(source):
    """Rows of the words given, and only those, change when their vectors are pulled."""
    model = build(config(input=source), WORDS).input
    params = jax.jit(model.init)(jax.random.key(0), jnp.arange(VOCABULARY))
    given = jnp.array([2, 12, 45])

    def loss(params):
        return jnp.sum(run(model, params, given) * jax.random.normal(jax.random.key(3), (3, FEATURES)))

    gradient = jax.grad(loss)(params)
    tables = run(model, gradient, method="bands")
    touched = jnp.concatenate([jnp.abs(words).sum(axis=1) > 0 for words, _ in tables])
    assert set(np.flatnonzero(touched)) == set(given.tolist())


@pytest.mark.parametrize("body", cases(BODY))
def test_body_is_causal(body):
    """The hidden state of a position depends on itself and what came before, by gradient, and on nothing after it."""
    model = build(config(body=body), WORDS).body
    vectors = jax.random.normal(jax.random.key(0), (1, TIME, FEATURES))
    params = jax.jit(model.init)(jax.random.key(1), vectors)

    def at(position, vectors):
        pull = jax.random.normal(jax.random.key(2), (FEATURES,))
        return jnp.vdot(run(model, params, vectors)[0][0, position], pull)

    reach = jax.jit(jax.vmap(lambda position: jax.grad(at, argnums=1)(position, vectors)))(jnp.arange(TIME))
    reached = jnp.abs(reach[:, 0]).sum(axis=-1) > 0
    np.testing.assert_array_equal(reached, np.tril(np.ones((TIME, TIME), bool)))


@pytest.mark.parametrize("body", cases(BODY))
def test_body_keeps_segments_apart(body):
    """By gradient, a hidden state depends on what came before it in its segment alone, and each segment is as if alone."""
    model = build(config(body=body), WORDS).body
    segments = jnp.array([[1, 1, 1, 2, 3, 3, 0, 0]])
    vectors = jax.random.normal(jax.random.key(0), (1, TIME, FEATURES))
    params = jax.jit(model.init)(jax.random.key(1), vectors)

    def at(position, vectors):
        pull = jax.random.normal(jax.random.key(2), (FEATURES,))
        return jnp.vdot(run(model, params, vectors, segments=segments)[0][0, position], pull)

    reach = jax.jit(jax.vmap(lambda position: jax.grad(at, argnums=1)(position, vectors)))(jnp.arange(TIME))
    assert jnp.isfinite(reach).all()
    reached = jnp.abs(reach[:, 0]).sum(axis=-1) > 0
    same = np.asarray(segments == segments.T)
    np.testing.assert_array_equal(reached[:6], np.tril(same)[:6])
    hidden, carry = run(model, params, vectors, segments=segments)
    assert carry == ()
    for segment in slice(0, 3), slice(3, 4), slice(4, 6):
        alone, _ = run(model, params, vectors[:, segment])
        np.testing.assert_allclose(hidden[:, segment], alone, atol=2e-5)


@pytest.mark.parametrize("body", cases(BODY))
@pytest.mark.parametrize("first", [1, 3, TIME // 2])
def test_body_with_a_carry_two_parts_equal_the_whole(body, first):
    """Feeding a row in two parts, handing on the carry, gives the hidden states of feeding it whole."""
    model = build(config(body=body), WORDS).body
    vectors = jax.random.normal(jax.random.key(0), (BATCH, TIME, FEATURES))
    params = jax.jit(model.init)(jax.random.key(1), vectors)
    whole, _ = run(model, params, vectors)
    carry = model.empty_carry(BATCH, TIME + 2)
    before, carry = run(model, params, vectors[:, :first], carry)
    after, _ = run(model, params, vectors[:, first:], carry)
    np.testing.assert_allclose(jnp.concatenate([before, after], axis=1), whole, atol=2e-5)


@pytest.mark.parametrize("case", MODELS)
def test_output_is_normalised_and_agrees_with_itself(case):
    """Probabilities of all words sum to one; nll and the untrained loss are minus the log-probability of the target."""
    model, params = made(case)
    hidden, targets = hidden_and_targets()
    log_probs = run(model, params, hidden, method=lambda m, h: m.output.log_probs(h))
    assert log_probs.shape == (len(targets), VOCABULARY)
    np.testing.assert_allclose(jax.nn.logsumexp(log_probs, axis=1), 0.0, atol=2e-6)
    expected = -log_probs[jnp.arange(len(targets)), targets]
    np.testing.assert_allclose(run(model, params, hidden, targets, method="nll"), expected, atol=2e-5)
    weights = jnp.linspace(0, 2, len(targets))
    loss, nll = run(model, params, hidden, targets, weights, method="loss")
    np.testing.assert_allclose(nll, expected, atol=2e-5)
    np.testing.assert_allclose(loss, jnp.sum(weights * expected), rtol=1e-5)


@pytest.mark.parametrize("case", OWN_ROWS)
def test_every_word_gets_a_gradient_as_a_target(case):
    """The row of a word that is the only target is pulled, the first two of each cluster included."""
    model, params = made(case)
    hidden = jax.random.normal(jax.random.key(4), (1, FEATURES))

    @jax.jit
    @jax.vmap
    def pull(word):
        def loss(params):
            return run(model, params, hidden, word[None], jnp.ones(1), method="loss")[0]

        bands = run(model, jax.grad(loss)(params), method=lambda m: m.output.table.bands())
        return jnp.concatenate([jnp.abs(table).sum(axis=1) for table, _ in bands])[word]

    assert (pull(jnp.arange(VOCABULARY)) > 1e-4).all()


@pytest.mark.parametrize("case", MODELS)
def test_shuffling_the_batch_shuffles_the_result(case):
    """nll comes back in the order of the tokens, whatever order they are in."""
    model, params = made(case)
    hidden, targets = hidden_and_targets()
    order = jax.random.permutation(jax.random.key(5), len(targets))
    nll = run(model, params, hidden, targets, method="nll")
    np.testing.assert_allclose(run(model, params, hidden[order], targets[order], method="nll"), nll[order], atol=2e-5)


@pytest.mark.parametrize("case", MODELS)
def test_training_draws_dropout_and_evaluation_does_not(case):
    """With a rate above 0 two keys give two training losses; without training the key is not even asked for."""
    model, params = made(case)
    hidden, targets = hidden_and_targets()
    weights = jnp.ones(targets.shape)

    def loss(seed):
        return run(model, params, hidden, targets, weights, train=True, method="loss",
                           rngs={"dropout": jax.random.key(seed)})[0]

    _, (_, fields), _ = case
    dropped = fields.get("input_dropout", 0) > 0 or (
        fields.get("tail_dropout", 0) > 0 and run(model, params, method=lambda m: len(m.output.table.bands())) > 1)
    assert bool(loss(0) != loss(1)) == dropped


def test_decoding_step_by_step_gives_the_same_hidden_states():
    """LanguageModel.step, one token at a time from an empty carry, equals LanguageModel.hidden of the whole row."""
    model, params = made((("adaptive", {"cutoffs": CUTOFFS, "factor": 2}), ("adaptive", {}), ("tied", {})))
    tokens = jax.random.randint(jax.random.key(0), (BATCH, TIME), 0, VOCABULARY)
    step = jax.jit(lambda token, carry: run(model, params, token, carry, method="step"))
    carry, hidden = model.body.empty_carry(BATCH, TIME), []
    for t in range(TIME):
        state, carry = step(tokens[:, t : t + 1], carry)
        hidden.append(state)
    whole = run(model, params, tokens, method="hidden")
    np.testing.assert_allclose(jnp.concatenate(hidden, axis=1), whole, atol=2e-5)


def test_log_probs_of_positions_builds_no_more_than_asked_for():
    """LanguageModel.log_probs answers for the columns asked for, and no array of all positions and words exists."""
    model, params = made((("adaptive", {"cutoffs": CUTOFFS, "factor": 2}), ("adaptive", {}), ("tied", {})))
    tokens = jax.random.randint(jax.random.key(0), (BATCH, TIME), 0, VOCABULARY)
    positions = jnp.array([[0], [5], [7]])

    def ask(tokens, positions):
        return run(model, params, tokens, positions, method="log_probs")

    everywhere = jnp.broadcast_to(jnp.arange(TIME), (BATCH, TIME))
    expected = jnp.take_along_axis(ask(tokens, everywhere), positions[..., None], axis=1)
    np.testing.assert_allclose(ask(tokens, positions), expected, atol=1e-5)
    text = jax.jit(ask).lower(tokens, positions).as_text()
    assert f"{BATCH}x1x{VOCABULARY}" in text
    assert f"{BATCH * TIME}x{VOCABULARY}" not in text
    assert f"{BATCH}x{TIME}x{VOCABULARY}" not in text
