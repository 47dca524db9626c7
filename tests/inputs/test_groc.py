"""GroC's word vectors: the numbers of its public code, and a plain twin that reads words one by
one.

`tests/fixtures/groc_encoder.npz` has enough to test everywhere. Where shared/reference/groc lies
beside the project, its other cases are tested too. No published number rests on those that are left
out: vectors that are multiplied, a highway layer or an LSTM over definitions, and calls for a range
of words or a batch of tokens, which the public code does not use itself.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaptive_jax.data.vocabulary.lexicon import lexicon
from adaptive_jax.data.vocabulary.spelling import spelling
from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.errors import InputError
from adaptive_jax.inputs import groc, letters
from adaptive_jax.inputs.char_cnn import CharacterCNN
from adaptive_jax.inputs.groc import GroC
from adaptive_jax.outputs.computed import ComposedTable

SHARED = Path(__file__).parents[3] / "shared" / "reference" / "groc"
WHOLE = SHARED.is_dir()
with np.load(
    SHARED / "encoder.npz" if WHOLE else Path(__file__).parents[1] / "fixtures" / "groc_encoder.npz"
) as arrays:
    ARRAYS = dict(arrays)
FILTERS = tuple(zip(range(1, 7), (4, 4, 6, 8, 10, 12), strict=True))
CASES = {  # settings other than those of the paper, in small
    "surface": {"relations": 0, "definition": 0},
    "rel_def_concat": {},
    "rel_def_add": {"combine": "add"},
    "rel_def_add_div16": {"combine": "add"},
    "rel_only_add": {"combine": "add", "definition": 0},
    "def_only_add": {"combine": "add", "relations": 0},
    "surface_nohighway_relu": {
        "relations": 0,
        "definition": 0,
        "highway_layers": 0,
        "activation": "relu",
    },
}


def of_code(arrays):
    """Parameters of the public code, or their gradients, by our names."""
    ours = {}
    for name, array in arrays.items():
        parts = name.strip("_").split(".")
        if parts[0] == "char_network":
            ours |= (
                {f"filter_{parts[1]}": array.transpose(2, 1, 0)}
                if array.ndim == 3
                else {f"filter_bias_{parts[1]}": array}
            )
        elif parts[0] == "char_highways":
            ours |= (
                {f"highway_{parts[2]}": array.T}
                if parts[3] == "weight"
                else {f"highway_bias_{parts[2]}": array}
            )
        else:
            plain = {"char_emb": "characters", "char_linear": "projection", "comb_lin": "map"}[
                parts[0]
            ]
            matrix = array if plain == "characters" else array.T
            ours |= {plain: matrix} if parts[-1] == "weight" else {f"{plain}_bias": array}
    return ours


def part(case, kind):
    """Arrays of a case and kind by the rest of their names."""
    prefix = f"{case}/{kind}/"
    return {
        name.removeprefix(prefix): array
        for name, array in ARRAYS.items()
        if name.startswith(prefix)
    }


def rows(table, chunk=500):
    """A table of word ids as ours: -1 for no word; the last of each chunk of words has none, as
    in the public code.
    """
    ids = np.where(table == len(table) - 1, -1, table).astype(np.int32)
    ids[[*range(chunk - 1, len(ids), chunk), -1]] = -1
    return {"words": ids[:-1]}


def misread(characters, read):
    """What the public code's convolutions see, `[words, columns, width]`, in the place of
    `letters.letter_vectors`: it takes the numbers `[columns, width]` of a word's letters for
    `[width, columns]` ones, without transposing them.
    """
    words, columns, width = *read.shape, characters.shape[1]
    return characters[read].reshape(words, width, columns).transpose(0, 2, 1)


@pytest.fixture
def as_the_code(monkeypatch):
    """Filters see letters as in the public code, which puts padding in the middle."""
    monkeypatch.setattr(letters, "letter_vectors", misread)
    monkeypatch.setattr(groc, "SHORT", ())


def hurried(function, *arguments):
    """Each of these programs runs once."""
    return jax.jit(function).lower(*arguments).compile()(*arguments)


def spelt(ids):
    """Letters in the public code's order of words."""
    return {
        "letters": ids.astype(np.int16),
        "lengths": np.full(len(ids), ids.shape[1], np.int32),
        "row_of_word": np.arange(len(ids), dtype=np.int32),
    }


@pytest.mark.parametrize("case", [case for case in CASES if f"{case}/E" in ARRAYS])
def test_encoder(case, as_the_code):
    """Vectors from what the convolutions see onwards, and, where the path of gradients is
    another, these.
    """
    words, features = ARRAYS[f"{case}/E"].shape
    settings = {"lexicon": "given", "mean": "most", "filters": FILTERS} | CASES[case]
    model = GroC(words, features, **settings)
    chunk = 16 if case.endswith("div16") else 500
    given = {"spelling": spelt(ARRAYS["tables/char_ids"][:-1])}
    given |= {
        name: rows(ARRAYS[f"tables/{name}"], chunk)
        for name in ("relations", "definitions")
        if name in model.lexicon_spec
    }
    params = of_code(part("surface", "param") | part(case, "param"))
    params = {
        name: array
        for name, array in params.items()
        if model.highway_layers or not name.startswith("highway")
    }

    def value(params):
        [(vectors, _, _)] = model.apply({"params": params, "lexicon": given}, method="bands")
        return jnp.vdot(vectors, ARRAYS[f"{case}/G"]), vectors

    pulled = case not in ("rel_def_add_div16", "rel_only_add", "def_only_add")
    (_, vectors), gradient = hurried(
        jax.value_and_grad(value, has_aux=True) if pulled else lambda p: (value(p), {}), params
    )
    np.testing.assert_allclose(vectors, ARRAYS[f"{case}/E"], atol=2e-5)
    if not pulled:
        return
    expected = of_code(part(case, "grad"))
    assert expected and expected.keys() <= gradient.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(
            gradient[name], array, rtol=1e-4, atol=1e-5 * np.abs(array).max(), err_msg=name
        )


def test_encoder_letters():
    """Words are spelt in the letters of ELMo, and the fixture above shows filters what the
    public code does.
    """
    ids, count = ARRAYS["tables/char_ids"], len(ARRAYS["surface/conv_input"])
    seen = misread(
        jnp.asarray(part("surface", "param")["_char_emb.weight"]), jnp.asarray(ids[:count])
    )
    np.testing.assert_allclose(seen.transpose(0, 2, 1), ARRAYS["surface/conv_input"], atol=1e-6)
    words = [
        "<eos>",
        "<unk>",
        "the",
        "café",
        "東京",
        "antidisestablishmentarianism",
        "<S>",
        "</S>",
        "domestic_dog",
    ]
    known = json.loads((SHARED / "encoder.json").read_text())["words"] if WHOLE else None
    ours = spelling(
        Vocabulary(tuple(known or words), np.ones(len(known or words), np.int64)), 20, True
    )
    read = ours["letters"][ours["row_of_word"]]
    if known:
        np.testing.assert_array_equal(read, ids[:-1])
    else:
        assert read[0].tolist() == [259, *(byte + 1 for byte in b"<eos>"), 260, *[261] * 13]
        assert [row[:3].tolist() for row in read[6:8]] == [[259, 257, 260], [259, 258, 260]]
        assert read[5].tolist() == [259, *(byte + 1 for byte in b"antidisestablishmen")]


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


@pytest.mark.skipif(not WHOLE, reason="needs shared/reference/groc")
def test_encoder_full_size(as_the_code):
    """The paper's 1024 filters: vectors, and gradients by their norms and samples."""
    of_file = dict(np.load(SHARED / "encoder_full_size.npz"))
    sizes = json.loads((SHARED / "encoder_full_size.json").read_text())["cases"]["full"][
        "parameters"
    ]
    params = of_code({name: hashed(p["shape"], p["seed"], p["scale"]) for name, p in sizes.items()})
    words, features = of_file["E"].shape
    model = GroC(words, features, lexicon="given", mean="most")
    given = {"spelling": spelt(ARRAYS["tables/char_ids"][:-1])}
    given |= {name: rows(ARRAYS[f"tables/{name}"]) for name in ("relations", "definitions")}
    pull = hashed((words, features), 999, 1.0)

    def value(params):
        [(vectors, _, _)] = model.apply({"params": params, "lexicon": given}, method="bands")
        return jnp.vdot(vectors, pull), vectors

    (_, vectors), gradient = hurried(jax.value_and_grad(value, has_aux=True), params)
    np.testing.assert_allclose(vectors, of_file["E"], atol=2e-5)
    for name, settings in sizes.items():
        [(ours, _)] = of_code({name: np.zeros(settings["shape"], np.float32)}).items()
        theirs = np.asarray(gradient[ours])
        theirs = (
            theirs.transpose(2, 1, 0)
            if theirs.ndim == 3
            else theirs
            if ours == "characters"
            else theirs.T
        )
        norm, size = of_file[f"grad_norm/{name}"], theirs.size
        np.testing.assert_allclose(np.linalg.norm(theirs), norm, rtol=1e-4, err_msg=name)
        places = (np.arange(40) * max(1, size // 40)) % size
        sample = of_file[f"grad_sample/{name}"]
        np.testing.assert_allclose(
            theirs.ravel()[places], sample, rtol=1e-4, atol=2e-5 * norm, err_msg=name
        )


@pytest.mark.skipif(not WHOLE, reason="needs shared/reference/groc")
@pytest.mark.parametrize("correction", [0, 7])
def test_baselines_convolutional(correction, monkeypatch, as_the_code):
    """The output of the row "convolutional": the same encoder, with a correction for every word."""
    case = "convolutional_correction" if correction else "convolutional"
    of_file, cases = (
        dict(np.load(SHARED / "baselines.npz")),
        json.loads((SHARED / "baselines.json").read_text())["cases"],
    )
    given = {
        name: of_file[f"{home}/param/{name}"] for name, home in cases[case]["param_from"].items()
    }
    words, features = of_file[f"{case}/E_in"].shape
    cnn = CharacterCNN(words, features, 16, FILTERS, 1, 20, (1, 1, 2, 3, 4, 5), "selu", "elmo")
    table = ComposedTable(cnn, features, correction=correction)
    params = {
        "cnn": of_code({name: array for name, array in given.items() if name.startswith("_char")})
    }
    if correction:
        params |= {
            "corrections": given["_cnnsoftmax_correction.weight"],
            "correction_map": given["_cnnsoftmax_M.weight"].T,
        }
    monkeypatch.setattr(CharacterCNN._encode, "__defaults__", ((),))
    letters_of = {"cnn": {"spelling": spelt(ARRAYS["tables/char_ids"][:-1])}}
    [(vectors, _, _)] = hurried(
        lambda params: table.apply({"params": params, "lexicon": letters_of}, method="bands"),
        params,
    )
    np.testing.assert_allclose(vectors, of_file[f"{case}/E_in"], atol=2e-5)


# Lengths on both sides of those that are read apart: 8, 12 and the full 20 letters, two of which
# are marks.
TEXT = [
    "<eos>",
    "<unk>",
    "a",
    "ab",
    "naïve",
    "日本",
    "e" * 6,
    "f" * 7,
    "gh" * 5,
    "i" * 11,
    "k" * 17,
    "l" * 18,
    "m" * 19,
    "no" * 12,
]
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
            "filters": ((1, 3), (2, 4), (4, 5)),
            "strides": (1, 2, 3),
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
    monkeypatch.setattr(groc, "CHUNK", 3)
    model, params, given = grounded()
    expected, some = plain(params, model), jnp.array([3, 0, 9, 3])

    def all_ways(params):
        variables = {"params": params, "lexicon": given}
        whole = model.apply(variables, method="bands")[0].table
        read = model.apply(
            variables, jnp.arange(len(VOCABULARY)), method="read", mutable=["tables"]
        )[1]
        composed = model.apply(variables | read, some, method="compose", mutable=["tables"])[1][
            "tables"
        ]["vectors"]
        return whole, model.apply(variables, some), composed

    whole, alone, composed = hurried(all_ways, params)
    np.testing.assert_allclose(whole, expected, atol=2e-5)
    np.testing.assert_allclose(alone, expected[some], atol=2e-5)
    np.testing.assert_allclose(composed, expected[some], atol=2e-5)


def test_gradients_are_those_of_every_letter_of_every_chunk(grounded, monkeypatch):
    """Short words by themselves, chunks and products kept change no gradient, whether all words
    are composed or some.
    """
    model, params, given = grounded(mean="most")
    some = jnp.array([3, 0, 9, 3, 5])
    pulls = (
        jax.random.normal(jax.random.key(1), (len(VOCABULARY), 5)),
        jax.random.normal(jax.random.key(2), (5, 5)),
    )

    def value(params):
        variables = {"params": params, "lexicon": given}
        whole = model.apply(variables, method="bands")[0].table
        alone = model.apply(variables, some) if groc.SHORT else whole[some]
        return jnp.vdot(whole, pulls[0]) + jnp.vdot(alone, pulls[1]), alone - whole[some]

    made = []
    for chunk, short, kept in (3, (8, 12), 2**30), (99, (), 0):
        monkeypatch.setattr(groc, "CHUNK", chunk)
        monkeypatch.setattr(groc, "SHORT", short)
        monkeypatch.setattr(letters, "MOST_KEPT", kept)
        made.append(hurried(lambda params: jax.grad(value, has_aux=True)(params), params))
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
        given = {"params": params, "lexicon": lexicon(words, layer.lexicon_spec)}
        [vector] = hurried(
            lambda given, word, layer=layer: layer.apply(given, word),
            given,
            jnp.array([words.index["naïve"]]),
        )
        np.testing.assert_allclose(vector, plain_surface(params, "naïve", model), atol=2e-5)


# Of init.json's groc_predict_bias: uniform ones; torch's defaults are 1/sqrt(what enters)
BOUNDS = {
    "projection": 0.05,
    "highway_0": 0.05,
    "map": 192**-0.5,
    "map_bias": 192**-0.5,
    **{f"filter_{i}": 0.05 for i in range(6)},
    **{f"filter_bias_{i}": (16 * (i + 1)) ** -0.5 for i in range(6)},
}


def test_init():
    """Fresh parameters lie where the public code's do."""
    model = GroC(5, 64, lexicon="given")
    params = hurried(model.init, jax.random.key(0), jnp.zeros(1, jnp.int32))["params"]
    params = {name: np.asarray(array) for name, array in params.items()}
    assert params["characters"].shape == (262, 16) and abs(params["characters"].std() - 1) < 0.05
    new, gate = np.split(params["highway_bias_0"], 2)
    assert (gate == 1).all() and 0.9 / 32 < np.abs(new).max() <= 1 / 32
    for name, bound in BOUNDS.items():
        assert 0.8 * bound < np.abs(params[name]).max() <= bound, name
        if params[name].size > 1000:
            assert abs(params[name].std() - bound / 3**0.5) < 0.05 * bound, name
    assert params.keys() == BOUNDS.keys() | {"characters", "highway_bias_0"}


def test_what_it_needs_is_asked_for(grounded):
    """Without a lexicon one line says what `apply` needs."""
    model, params, given = grounded()
    with pytest.raises(InputError, match="groc needs relations, definitions of words: apply"):
        model.apply(
            {"params": params, "lexicon": {"spelling": given["spelling"]}}, jnp.zeros(1, jnp.int32)
        )
