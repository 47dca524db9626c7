"""GroC's word vectors, and a plain twin that reads words one by one.

The numbers of its public code are compared in tests/reference/test_groc_code.py.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaptive_jax.data.vocabulary.lexicon import lexicon
from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.inputs import letters
from adaptive_jax.inputs.groc import GroC
from tests import refuses

# Lengths on both sides of those that are read apart: 8, 12 and the full 20 letters, two of which
# are marks.
TEXT = ["<eos>", "<unk>", "a", "ab", "naïve", "日本", "e" * 6, "f" * 7, "gh" * 5, "i" * 11]
TEXT += ["k" * 17, "l" * 18, "m" * 19, "no" * 12]
VOCABULARY = Vocabulary.build({word: 1 for word in TEXT} | {"<eos>": 3})
ENTRIES = {  # relations and definition
    "a": (["ab", "a", "nowhere"], "ab naïve ab"),
    "ab": ([], "a"),
    "日本": (["l" * 18], ""),
    "<unk>": (["a"] * 5, "a ab " * 9),
}


@pytest.fixture(scope="module")
def grounded(tmp_path_factory):
    """`grounded(definition=4)`: a layer in small, random parameters and the lexicon of
    `VOCABULARY`.
    """
    path = tmp_path_factory.mktemp("lexicon") / "small.jsonl"
    lines = [
        {"word": word, "relations": related, "definition": text}
        for word, (related, text) in ENTRIES.items()
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def grounded(**fields):
        settings = {
            "lexicon": str(path),
            "width": 4,
            # Strides above, of and below the span, which they divide or not.
            "filters": ((1, 3), (2, 4), (4, 5), (5, 2)),
            "strides": (3, 2, 3, 1),
            "definition": 4,
        }
        model = GroC(len(VOCABULARY), 5, **settings | fields)
        shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros(1, jnp.int32))["params"]
        bits = np.random.default_rng(0)
        params = jax.tree.map(lambda a: bits.normal(0, 0.5, a.shape).astype(np.float32), shapes)
        return model, params, lexicon(VOCABULARY, model.lexicon_spec)

    return grounded


def plain_surface(p, word, model):
    """The surface vector of a word, float64: letter by letter, every response of every filter."""
    read = [259, *(byte + 1 for byte in word.encode()), 260][: model.length]
    read = p["characters"][read + [261] * (model.length - len(read))]
    pooled = []
    for i, ((span, _), stride) in enumerate(zip(model.filters, model.strides, strict=True)):
        starts = range(0, model.length - span + 1, stride)
        pooled.append(
            np.max(
                [np.einsum("sw,swo->o", read[at : at + span], p[f"filter_{i}"]) for at in starts],
                axis=0,
            )
        )
    selu = lambda x: 1.0507009873554805 * np.where(x > 0, x, 1.6732632423543772 * np.expm1(x))
    x = selu(
        np.concatenate(pooled)
        + np.concatenate([p[f"filter_bias_{i}"] for i in range(len(model.filters))])
    )
    both = x @ p["highway_0"] + p["highway_bias_0"]
    gate = 1 / (1 + np.exp(-both[len(x) :]))
    return (gate * x + (1 - gate) * selu(both[: len(x)])) @ p["projection"]


def plain(params, model):
    """The vectors of all words, float64."""
    p = {name: np.asarray(array, np.float64) for name, array in params.items()}
    surface = {word: plain_surface(p, word, model) for word in VOCABULARY.words}
    made = []
    for word in VOCABULARY.words:
        related, text = ENTRIES.get(word, ([], ""))
        lists = (
            [w for w in dict.fromkeys(related) if w in surface][: model.relations],
            text.split()[: model.definition],
        )
        means = [
            np.mean([surface[w] for w in words], axis=0) if words else np.zeros(5)
            for words in lists
        ]
        made.append(np.concatenate([surface[word], *means]) @ p["map"] + p["map_bias"])
    return np.array(made)


def test_vectors_are_those_of_the_plain_one(grounded, monkeypatch):
    """Every word, short or cut off, in the lexicon or not; alone, together, and composed of
    surfaces that were read before.
    """
    monkeypatch.setattr(GroC, "on_cpu", GroC.on_cpu._replace(most=3))
    model, params, entries = grounded()
    expected, some = plain(params, model), jnp.array([3, 0, 9, 3])

    def all_ways(params):
        variables = {"params": params, "lexicon": entries}
        whole = model.apply(variables, method="bands")[0].table
        every, made = jnp.arange(len(VOCABULARY)), {"mutable": ["tables"]}
        read = model.apply(variables, every, method="read", **made)[1]
        composed = model.apply(variables | read, some, method="compose", **made)[1]
        return whole, model.apply(variables, some), composed["tables"]["vectors"]

    whole, alone, composed = jax.jit(all_ways)(params)
    np.testing.assert_allclose(whole, expected, atol=2e-5)
    np.testing.assert_allclose(alone, expected[some], atol=2e-5)
    np.testing.assert_allclose(composed, expected[some], atol=2e-5)


@pytest.mark.parametrize("combine", ["concat", "add"])
def test_stored_surfaces_in_bfloat16(grounded, combine):
    """Surfaces that were read before are float32, and are summed as those that a word reads itself:
    several devices and one gave vectors that differed.
    """
    fields = {"width": 5, "combine": combine, "dtype": jnp.bfloat16}
    model, params, entries = grounded(**fields)
    variables, every = {"params": params, "lexicon": entries}, jnp.arange(len(VOCABULARY))

    def both(variables):
        read = model.apply(variables, every, method="read", mutable=["tables"])[1]
        composed = model.apply(variables | read, every, method="compose", mutable=["tables"])[1]
        return model.apply(variables, every), composed["tables"]["vectors"]

    one, several = jax.jit(both)(variables)
    np.testing.assert_array_equal(one, several.astype(one.dtype))


def test_gradients_are_those_of_every_letter_of_every_chunk(grounded, monkeypatch):
    """Short words by themselves, chunks and products kept change no gradient, whether all words
    are composed or some.
    """
    model, params, entries = grounded(form="code")
    some = jnp.array([3, 0, 9, 3, 5])
    pulls = (
        jax.random.normal(jax.random.key(1), (len(VOCABULARY), 5)),
        jax.random.normal(jax.random.key(2), (5, 5)),
    )

    def value(params):
        variables = {"params": params, "lexicon": entries}
        whole = model.apply(variables, method="bands")[0].table
        alone = model.apply(variables, some) if model.on_cpu.short else whole[some]
        return jnp.vdot(whole, pulls[0]) + jnp.vdot(alone, pulls[1]), alone - whole[some]

    made = []
    for chunk, short, kept in (3, (8, 12), 2**30), (99, (), 0):
        monkeypatch.setattr(GroC, "on_cpu", letters.Chunks(chunk, short))
        monkeypatch.setattr(letters, "MAX_SAVED_BYTES", kept)
        made.append(jax.jit(lambda params: jax.grad(value, has_aux=True)(params))(params))
    for _, apart in made:
        np.testing.assert_allclose(apart, 0, atol=2e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5), made[0][0], made[1][0]
    )
    assert all(np.abs(gradient).max() > 1e-3 for gradient in jax.tree.leaves(made[0][0]))


def test_parameters_do_not_depend_on_the_vocabulary(grounded):
    """Another vocabulary has other arrays and the same parameters, which give a word that it
    shares the same surface vector.
    """
    model, params, _ = grounded(relations=0, definition=0)
    other = Vocabulary.build({"new": 5, "naïve": 4, "<eos>": 9})
    wider = model.clone(vocabulary_size=len(other))
    shapes = jax.eval_shape(wider.init, jax.random.key(0), jnp.zeros(1, jnp.int32))["params"]
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, params)
    for layer, words in (model, VOCABULARY), (wider, other):
        variables = {"params": params, "lexicon": lexicon(words, layer.lexicon_spec)}
        [vector] = jax.jit(layer.apply)(variables, jnp.array([words.index["naïve"]]))
        np.testing.assert_allclose(vector, plain_surface(params, "naïve", model), atol=2e-5)


def test_map_of_few_bits(grounded):
    """In bfloat16, gradients of the map and its bias are summed in float32 and not rounded."""
    model, params, entries = grounded(dtype=jnp.bfloat16)
    tokens = jnp.arange(len(VOCABULARY))
    pulls = jax.random.normal(jax.random.key(1), (len(tokens), 5), jnp.bfloat16)

    def total(params):
        vectors = model.apply({"params": params, "lexicon": entries}, tokens)
        return jnp.sum(pulls.astype(jnp.float32) * vectors.astype(jnp.float32))

    gradient = jax.jit(jax.grad(total))(params)
    np.testing.assert_allclose(gradient["map_bias"], np.sum(pulls, axis=0, dtype="f"), rtol=1e-5)
    assert (gradient["map"] != gradient["map"].astype(jnp.bfloat16)).mean() > 0.9


def test_init():
    """The map starts as torch's layers do, uniform up to 1 / sqrt(what enters), and gates at 1; the
    other parameters are compared in tests/reference/test_groc_code.py.
    """
    model, bound = GroC(5, 64, lexicon="given"), 192**-0.5
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros(1, jnp.int32))["params"]
    assert (np.split(params["highway_bias_0"], 2)[1] == 1).all()
    for name in "map", "map_bias":
        assert 0.8 * bound < np.abs(params[name]).max() <= bound, name
    assert abs(np.std(params["map"]) - bound / 3**0.5) < 0.05 * bound


def test_missing_relations(grounded):
    """Without a lexicon one line says what `apply` needs."""
    model, params, entries = grounded()
    with refuses("GroC", "relations"):
        model.apply(
            {"params": params, "lexicon": {"spelling": entries["spelling"]}},
            jnp.zeros(1, jnp.int32),
        )
