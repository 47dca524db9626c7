"""The character CNN against a plain one: word by word, every column, every filter tap, in
float64.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaptive_jax.data.vocabulary.spelling import spelling
from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.inputs import letters
from adaptive_jax.inputs.char_cnn import CharacterCNN

# Lengths on both sides of every number of columns that is treated on its own: 8, 16, and the full
# 30.
WORDS = ["<eos>", "<unk>", "a", "ab", "ba", "naïve", "日本", "x" * 7, "y" * 8, "yx" * 4 + "z"]
WORDS += ["q" * 15, "r" * 16, "s" * 17, "t" * 26, "u" * 27, "v" * 28, "w" * 29, "abc" * 10]
WORDS += ["abc" * 10 + "different beyond what is read"]
VOCABULARY = Vocabulary.build({word: 1 for word in WORDS} | {"<eos>": 3})
LENGTH, FEATURES = 30, 5


def module(**fields):
    settings = {"width": 4, "filters": ((1, 3), (2, 4), (4, 5)), "highway_layers": 2}
    settings |= {"length": LENGTH}
    return CharacterCNN(len(VOCABULARY), FEATURES, **settings | fields)


def apply(model, params, *arguments, **how):
    """The module applied with the letters of `VOCABULARY`."""
    lexicon = {"spelling": spelling(VOCABULARY, **model.lexicon_spec["spelling"])}
    return model.apply({"params": params, "lexicon": lexicon}, *arguments, **how)


def random_parameters(model):
    """Parameters of which none is zero, no bias either."""
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros(1, jnp.int32))["params"]
    bits = np.random.default_rng(0)
    return jax.tree.map(lambda a: 0.5 * bits.standard_normal(a.shape).astype("f"), shapes)


def plain(params, word, model):
    """The vector of one word, float64."""
    p = {name: np.asarray(value, np.float64) for name, value in params.items()}
    if word in ("<eos>", "<unk>"):
        return p["symbols"][["<eos>", "<unk>"].index(word)]
    letters = [p["characters"][byte] for byte in word.encode()[: model.length]]
    letters += [np.zeros(model.width)] * (model.length - len(letters))
    pooled = []
    for i, (span, out) in enumerate(model.filters):
        responses = [
            sum(letters[start + tap] @ p[f"filter_{i}"][tap] for tap in range(span))
            + p[f"filter_bias_{i}"]
            for start in range(model.length - span + 1)
        ]
        pooled.append(np.maximum(np.max(responses, axis=0), 0).reshape(out))
    x = np.concatenate(pooled)
    for i in range(model.highway_layers):
        both = x @ p[f"highway_{i}"] + p[f"highway_bias_{i}"]
        new, gate = np.maximum(both[: len(x)], 0), 1 / (1 + np.exp(-both[len(x) :]))
        x = gate * x + (1 - gate) * new
    return x @ p["projection"] + p["projection_bias"]


@pytest.mark.parametrize("fields", [{}, {"filters": ((7, 6),), "highway_layers": 0, "length": 9}])
def test_vectors_are_those_of_the_plain_one(fields):
    """Every word of the vocabulary, short or cut off, ASCII or not."""
    model = module(**fields)
    params = random_parameters(model)
    [band] = jax.jit(lambda p: apply(model, p, method="bands"))(params)
    expected = np.array([plain(params, word, model) for word in VOCABULARY.words])
    np.testing.assert_allclose(band.table, expected, rtol=1e-5, atol=1e-5)


def direct(model, params, tokens):
    """The same vectors without any sharing or loop, which JAX differentiates by itself."""
    words = spelling(VOCABULARY, model.length)
    weights = {
        "characters": jnp.pad(params["characters"], [(1, 0), (0, 0)]),
        "convolutions": [
            (params[f"filter_{i}"], params[f"filter_bias_{i}"]) for i in range(len(model.filters))
        ],
        "highways": [
            (params[f"highway_{i}"], params[f"highway_bias_{i}"])
            for i in range(model.highway_layers)
        ],
        "projection": (params["projection"], params["projection_bias"]),
    }
    places = jnp.asarray(words["row_of_word"])[tokens]
    read, symbol = (
        jnp.asarray(words["letters"], jnp.int32)[places],
        jnp.asarray(words["symbols"])[places],
    )
    reader = letters.Reader((1,) * len(model.filters), "relu", jnp.float32, 1, ())
    vectors, _ = letters.read_letters(reader, weights, read, model.length)
    return jnp.where(symbol[:, None] >= 0, params["symbols"][symbol], vectors)


@jax.jit
@functools.partial(jax.value_and_grad, argnums=1)
def direct_pull(tokens, params, pull):
    """The product of `direct` with `pull` `[words, features]`, and its gradient."""
    return jnp.vdot(direct(module(), params, tokens), pull)


@pytest.mark.parametrize(
    "chunk, tokens, kept",
    [
        (1, [5, 5, 5], 2**30),
        (3, list(range(len(WORDS))), 0),
        (4, [17, 3, 17, 3, 0, 18, 9, 9, 2, 11, 4, 17], 2**30),
        (256, list(range(len(WORDS))), 2**30),
    ],
)
def test_each_distinct_word_once_changes_nothing(monkeypatch, chunk, tokens, kept):
    """Values and gradients equal those of the word-by-position way, for chunks that divide, do not
    divide and exceed.

    So they do whether the products of the highway layers are kept for the backward pass or computed
    anew.
    """
    monkeypatch.setattr(letters, "MAX_SAVED_BYTES", kept)
    monkeypatch.setattr(CharacterCNN, "on_cpu", CharacterCNN.on_cpu._replace(most=chunk))
    model, count = module(), len(tokens)
    params, tokens = random_parameters(model), np.resize(tokens, len(WORDS))
    pull = np.random.default_rng(5).standard_normal((len(WORDS), FEATURES), np.float32)
    pull[count:] = 0  # one program of the slow twin serves every number of tokens

    @jax.jit
    @jax.value_and_grad
    def value(params):
        return jnp.vdot(apply(model, params, jnp.asarray(tokens[:count])), pull[:count])

    ours, gradient = value(params)
    theirs, expected = direct_pull(tokens, params, pull)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), gradient, expected
    )


def test_chunks_are_even():
    """10,000 words in chunks of up to 8,192 would compute 16,384; no chunk exceeds what there is
    room for, and few words are one small chunk.
    """
    sizes = {words: letters.Chunks(8_192, ()).size(words) for words in (0, 1, 300, 8_192, 10_000)}
    assert sizes == {0: 1, 1: 1, 300: 300, 8_192: 8_192, 10_000: 5_120}
    assert [letters.Chunks(3, ()).size(words) for words in (2, 3, 4, 10)] == [2, 3, 3, 3]


@jax.jit
def in_runs(tokens):
    """Tokens by their distinct words, and the runs over these, of 40 words of which 8 are long."""
    spelling = {"letters": jnp.zeros((40, 30)), "lengths": jnp.where(jnp.arange(40) < 32, 4, 20)}
    reader = letters.Reader((1,), "relu", jnp.float32, 8, (8, 16))
    words, index = letters.distinct(tokens, 40, 8)
    return words[index], list(letters.runs(reader, words, spelling))


@pytest.mark.parametrize(
    "tokens, short, long",
    [
        (np.full(64, 7), 1, 0),
        (np.arange(64) % 8, 1, 0),
        (np.arange(64) % 9, 2, 0),
        (np.arange(64) % 40, 4, 1),
        (np.full(64, 39), 0, 1),
    ],
)
def test_work_is_that_of_the_distinct_words(tokens, short, long):
    """A batch of 64 times one word runs one chunk of 8, not 8 of them; and the last 8 of 40
    words are long.
    """
    same, runs = in_runs(tokens)
    np.testing.assert_array_equal(same, tokens)
    assert [int(most) for most, _, _ in runs] == [8, 16, 30]
    assert [int(end) - int(begin) for _, begin, end in runs] == [short, 0, long]


def test_bfloat16_is_near():
    """Computing in bfloat16 gives bfloat16 vectors near the others."""
    params = random_parameters(module())
    tokens = jnp.arange(len(WORDS))
    run = jax.jit(lambda dtype: apply(module(dtype=dtype), params, tokens), static_argnums=0)
    half = run(jnp.bfloat16)
    assert half.dtype == jnp.bfloat16
    whole = np.asarray(run(jnp.float32))
    assert 0 < np.abs(np.asarray(half, "f") - whole).max() < 0.05 * np.abs(whole).max()


@pytest.mark.parametrize("dtype, tolerance", [(jnp.float32, 1e-4), (jnp.bfloat16, 2e-2)])
def test_composed_vectors_are_those_computed_in_place(dtype, tolerance):
    """Looked up in the collection "tables", vectors and table are the same, and so is the
    gradient through `compose`.
    """
    model, words = module(dtype=dtype), jnp.array([3, 9, 17, 1])
    params, rows = random_parameters(model), jnp.array([[2, 0, 2], [1, 3, 3]])
    lexicon = {"spelling": spelling(VOCABULARY, LENGTH)}
    pull = jax.random.normal(jax.random.key(5), (*rows.shape, FEATURES))

    def looked_up(params, words, *arguments, **how):
        tables = apply(model, params, words, method="compose", mutable=["tables"])[1]
        variables = {"params": params, "lexicon": lexicon, **tables}
        return model.apply(variables, *arguments, **how)

    def value(function):
        pulled = lambda p: jnp.vdot(function(p).astype(jnp.float32), pull)
        return jax.value_and_grad(pulled)(params)

    @jax.jit
    def both():
        every = jnp.arange(len(WORDS))
        return (
            value(lambda p: looked_up(p, words, rows)),
            value(lambda p: apply(model, p, words[rows])),
            looked_up(params, every, method="bands"),
            apply(model, params, method="bands"),
        )

    ours, theirs, [composed], [computed] = both()
    # Terms of about 1 cancel in this sum, so its error is theirs.
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-6, atol=2e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=1e-5), ours[1], theirs[1]
    )
    np.testing.assert_array_equal(composed.table, computed.table.astype(jnp.float32))


def test_spelling_is_as_documented():
    """Bytes from 1, nothing for `<eos>` and `<unk>`; shortest words first, found by their
    places.
    """
    arrays = spelling(VOCABULARY, 4)

    def of(word, name):
        return arrays[name][arrays["row_of_word"][VOCABULARY.index[word]]].tolist()

    assert of("ab", "letters") == [98, 99, 0, 0]
    assert of("日本", "letters") == [byte + 1 for byte in "日本".encode()[:4]]
    assert [of(word, "symbols") for word in ("<eos>", "<unk>", "ab")] == [0, 1, -1]
    assert [of(word, "lengths") for word in ("<eos>", "ab", "naïve")] == [0, 2, 4]
    assert (np.diff(arrays["lengths"]) >= 0).all()
