"""N-grams beside words: vectors against a slow twin, and models whose words are composed."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaptive_jax import AdaptiveInput, InputError, Lookup
from adaptive_jax.config.keys import complete
from adaptive_jax.data.batches.windows import Windows
from adaptive_jax.data.vocabulary.lexicon import lexicon
from adaptive_jax.data.vocabulary.ngrams import count, write
from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.inputs.ngrams import NGrams, ranks_of
from adaptive_jax.model.language_model import build, parameter_shapes
from adaptive_jax.numerics.batch import Batch
from adaptive_jax.parallel.sharding import FSDP, abstract_mesh, parameter_specs
from adaptive_jax.planning.plan import describe
from adaptive_jax.scores.scoring import score_split
from adaptive_jax.text.load import LoadedModel
from tests import refuses
from tests.random_runs import quiet, random_run
from tests.toys import TEXT, HashedNGrams, plan_of, random_params

V, FEATURES, ROWS, TIME = 17, 6, 3, 8
LETTERS = {"width": 4, "filters": ((1, 6), (3, 8)), "length": 8}
WORDS = Vocabulary.build({"<eos>": 30, "<unk>": 20} | {f"w{n}": 19 - n for n in range(V - 2)})
SMALL = {
    "data.corpus": "text_files",
    "batches.layout": "streams",
    "input.name": "ngrams",
    "input.words.name": "char_cnn",
    "input.rows": 40,
    "input.row_width": 8,
    "body.name": "lstm",
    "body.features": 16,
    "body.widths": (16,),
    "output.name": "softmax",
} | {f"input.words.{key}": value for key, value in LETTERS.items()}


def code(words, number):
    """The hash of an n-gram, by whole numbers of Python."""
    value = number * 0x9E3779B9 % 2**32
    for word in words:
        value ^= int(word)
        value = (value ^ value >> 16) * 0x85EBCA6B % 2**32
        value = (value ^ value >> 13) * 0xC2B2AE35 % 2**32
        value ^= value >> 16
    return value


def rows_of(tokens, earlier, segments, orders):
    """For each token, its n-grams by their orders, None where one reaches too far."""
    for row, before, borders in zip(tokens, earlier, segments, strict=True):
        for at in range(TIME):
            text = [*before, *row[: at + 1]]
            same = [*[None] * len(before), *borders[: at + 1]]
            if borders[at] is None:  # the row is one segment, and earlier tokens are of it
                same = [None] * len(text)
            yield [
                tuple(text[-n:])
                if len(text) >= n and min(text[-n:]) >= 0 and {*same[-n:]} == {borders[at]}
                else None
                for n in orders
            ]


@pytest.mark.parametrize("settings", [{}, {"hashes": 2, "signs": True}, {"orders": (4, 2)}])
@pytest.mark.parametrize("cut", [False, True], ids=["row", "segments"])
def test_vectors_are_those_of_words_and_rows_of_ngrams(settings, cut):
    """Every n-gram has its own rows, and none reaches over a border or a word that is missing."""
    layer = NGrams(Lookup(V, FEATURES), rows=23, row_width=4, **settings)
    random = np.random.default_rng(0)
    tokens = random.integers(0, V, (ROWS, TIME))
    earlier = random.integers(-1, V, (ROWS, layer.reach))
    segments = [[1, 1, 1, 2, 3, 3, 0, 0]] * ROWS if cut else [[None] * TIME] * ROWS
    batch = Batch(tokens, tokens, None, None, np.array(segments) if cut else None)
    shapes = jax.eval_shape(layer.init, jax.random.key(0), tokens)
    params = random_params(shapes["params"])
    run = jax.jit(lambda earlier: layer.apply({"params": params}, tokens, batch, earlier=earlier))
    expected = np.array(params["words"]["table"])[tokens].reshape(-1, FEATURES)
    for vector, ngrams in zip(
        expected, rows_of(tokens, earlier, segments, layer.orders), strict=True
    ):
        for n, words in zip(layer.orders, ngrams, strict=True):
            part = params[f"ngrams_{n}"]
            for number in range(layer.hashes) if words else ():
                value = code(words, number)
                sign = -1 if layer.signs and value >> 31 else 1
                vector += sign * np.asarray(part["table_0"][value % 23] @ part["projection_0"])
    np.testing.assert_allclose(run(earlier).reshape(-1, FEATURES), expected, atol=1e-5)
    none = np.full_like(earlier, -1)
    np.testing.assert_array_equal(run(None), run(none))
    lists = batch._replace(segment_ids=segments if cut else None)
    unsigned = jax.jit(layer.apply)({"params": params}, tokens.astype(np.uint16), lists)
    np.testing.assert_array_equal(run(None), unsigned)  # whose -1 would be an id
    with refuses("earlier", str(layer.reach)):
        run(earlier[:, 1:])


KINDS = {
    "counted": {"kind": "counted", "rows": 20},
    "banded": {"kind": "banded", "rows": 20, "row_cutoffs": (5, 11), "row_factor": 2}
    | {"hashed_rows": 9, "hashes": 2, "signs": True},
    "banded, none hashed": {"kind": "banded", "rows": 20, "row_cutoffs": (5,), "hashed_rows": 0},
    "too few": {"kind": "counted", "rows": 90},
}


@pytest.fixture(scope="module")
def counts(tmp_path_factory):
    """The file of n-grams of a text of few words, and the text."""
    text = np.minimum(np.random.default_rng(1).zipf(1.5, 300) - 1, V - 1).astype(np.int32)
    path = tmp_path_factory.mktemp("counts") / "ngrams.npz"
    write(path, WORDS, {order: count(text, V, order, 60, 2) for order in (2, 3)})
    return str(path), text


@pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS)
def test_counted_ngrams_have_the_rows_of_their_ranks(counts, settings):
    """The slow twin looks them up in a dict; others are hashed to the last band, if any."""
    path, text = counts
    layer = NGrams(Lookup(V, FEATURES), row_width=8, counts=path, **settings)
    tokens, random = np.stack([text[:TIME], text[50 : 50 + TIME]]), np.random.default_rng(2)
    tokens = np.concatenate([tokens, random.integers(0, V, (1, TIME))])
    shapes = jax.eval_shape(layer.init, jax.random.key(0), tokens)
    params = random_params(shapes["params"])
    arrays = jax.tree.map(jnp.asarray, lexicon(WORDS, layer.lexicon_spec))
    vectors = jax.jit(layer.apply)({"params": params, "lexicon": arrays}, tokens)
    expected = np.array(params["words"]["table"])[tokens].reshape(-1, FEATURES)
    none = [[]] * ROWS, [[None] * TIME] * ROWS
    ways = collections.Counter()
    for n in layer.orders:
        pairs = collections.Counter(zip(*(text[i:].tolist() for i in range(n)), strict=False))
        ranked = sorted((each for each in pairs if pairs[each] > 1), key=lambda e: (-pairs[e], e))
        ranks = {each: i for i, each in enumerate(ranked[: layer.rows])}
        part = params[f"ngrams_{n}"]
        rows = [part[f"table_{i}"] @ part[f"projection_{i}"] for i in range(len(part) // 2)]
        rows = np.concatenate(rows)
        for vector, (words,) in zip(expected, rows_of(tokens, *none, (n,)), strict=True):
            words = words and tuple(map(int, words))
            ways["none" if words is None else "counted" if words in ranks else "hashed"] += 1
            if words in ranks:
                vector += rows[ranks[words]]
            elif words and len(rows) > layer.rows:
                for number in range(layer.hashes):
                    value = code(words, number)
                    sign = -1 if layer.signs and value >> 31 else 1
                    vector += sign * rows[layer.rows + value % layer.hashed_rows]
    np.testing.assert_allclose(vectors.reshape(-1, FEATURES), expected, atol=1e-5)
    assert min(ways[key] for key in ("none", "counted", "hashed")) > 3
    assert len(rows) == layer.rows + (9 if settings.get("hashed_rows") else 0)


def test_the_search_finds_every_key_and_no_other():
    """At sizes around powers of two, where a search that ends too early misses the last ones."""
    search = jax.jit(ranks_of)
    for size in 1, 2, 3, 4, 7, 8, 9:
        keys = np.array([(i // 3, i) for i in range(size)], np.int32)
        ranks = np.arange(size, dtype=np.int32)[::-1]
        every = np.stack(np.meshgrid(range(-1, 4), range(-1, 10), indexing="ij"), axis=-1)
        rank_of = {
            tuple(key): rank for key, rank in zip(keys.tolist(), ranks.tolist(), strict=True)
        }
        expected = [[rank_of.get(tuple(key), -1) for key in row] for row in every.tolist()]
        counted = np.column_stack([keys, ranks])
        np.testing.assert_array_equal(search(jnp.asarray(every), counted), expected)


def test_a_model_starts_as_that_of_words_alone():
    """Tables start as zeros, whose projections do not: both learn from the first updates on."""
    layer, tokens = NGrams(Lookup(V, FEATURES), rows=5), jnp.arange(V)[None]
    variables = jax.jit(layer.init)(jax.random.key(0), tokens)
    expected = variables["params"]["words"]["table"][tokens]
    np.testing.assert_array_equal(jax.jit(layer.apply)(variables, tokens), expected)
    assert jnp.abs(variables["params"]["ngrams_2"]["projection_0"]).min() > 0


@pytest.fixture(scope="module")
def runs():
    """Models of words that are composed: those read, and all."""
    tables = {"inputs": {}, "all": {"output.table.name": "tied"}}
    return {key: random_run(complete(SMALL | table), WORDS, 3.0) for key, table in tables.items()}


@pytest.mark.parametrize("composed", ["inputs", "all"])
def test_streams_of_composed_words_continue(runs, composed):
    """The rows of composed tables are other numbers than ids: n-grams of rows would be others in
    every batch, and in its carry.
    """
    run, ids = runs[composed], np.arange(40, dtype=np.int32) * 7 % 11 + 3  # not all words
    assert run.model.composed_words() == composed
    whole, _ = score_split(run, ids, Windows(40, 0, "none", "packed", 1), quiet)
    parts, _ = score_split(run, ids, Windows(10, 0, "none", "streams", 1), quiet)
    np.testing.assert_allclose(parts, whole, atol=1e-4)
    before = np.append(run.vocabulary.eos, ids[:-1])  # a text begins after <eos>
    batch = Batch(before[None], ids[None], None, None)
    variables = {"params": run.params, "lexicon": run.lexicon}  # composed where they are read
    loss, _ = jax.jit(run.model.apply)(variables, batch)
    np.testing.assert_allclose(loss.nll[0], whole, atol=1e-4)


def test_text_that_is_written_is_scored_alike(runs):
    """A decoder's tables have all words, and the text before a word is handed on as ids."""
    model = LoadedModel(runs["inputs"])
    options = {"words": 6, "avoid": ("<eos>", "<unk>"), "beams": 3, "samples": 2}
    for text in model.continuations("w1 w5", **options):
        [scored] = model.score([f"w1 w5 {model.decode(text.tokens)}"])
        expected = scored.log_probs[2 : 2 + len(text.tokens)].sum()
        np.testing.assert_allclose(text.log_prob, expected, rtol=1e-4)


OTHERS = {"ngrams": {"input.words.name": "lookup"}}
OTHERS["toy"] = {"input.name": "tests.toys:HashedNGrams"}


@pytest.mark.parametrize("changes", OTHERS.values(), ids=OTHERS)
def test_a_word_that_is_missing_begins_no_ngram(changes):
    """In a row it was read as the word 0, and in the carry as missing."""
    model = build(complete(SMALL, changes), V)
    params = random_params(parameter_shapes(model))
    hidden = jax.jit(
        lambda tokens: model.apply(
            {"params": params},
            Batch(tokens, tokens, None, None),
            in_vocabulary=jnp.arange(6)[None] != 2,
            method="hidden",
        )[0]
    )
    tokens = jnp.array([[3, 4, 5, 6, 7, 8]])
    np.testing.assert_array_equal(hidden(tokens), hidden(tokens.at[0, 2].set(0)))
    np.testing.assert_array_equal(hidden(tokens), hidden(tokens.astype(jnp.uint16)))


def test_tables_are_sharded_and_planned():
    """As tables of words are: rows over the devices that share a copy, and counted."""
    config = complete(SMALL, OTHERS["ngrams"] | {"input.rows": 64})
    plan = plan_of(config, V, 8)
    numbers = 2 * (64 * 8 + 8 * 16)
    assert plan.ngrams == {"rows": 128, "parameters": numbers, "bytes": 4 * numbers}
    assert "128 rows in the input, 1.3K parameters" in describe(plan, TEXT)
    assert plan.parameters["input"] == numbers + 16 * V
    model = build(config, V)
    specs = parameter_specs(parameter_shapes(model), abstract_mesh(8, 8), model)
    assert specs["input"]["ngrams_3"]["table_0"] == jax.sharding.PartitionSpec(FSDP)
    assert model.word_tables()["input", "ngrams_3", "table_0"] == [64]
    without = plan_of(complete(SMALL, {"input.name": "lookup"}), V)
    assert without.ngrams == {} and "n-grams" not in describe(without, TEXT)


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"orders": (1, 2)}, "orders must be in [2, inf), got 1"),
        ({"orders": (2, 3.5)}, "orders must be a whole number, got 3.5"),
        ({"orders": (2, 2)}, "orders must be different whole numbers, got (2, 2)"),
        ({"orders": ()}, "orders must be different whole numbers, got ()"),
        ({"rows": 0}, "rows must be in [1, inf), got 0"),
        ({"kind": "hasht"}, 'Did you mean "hashed"?'),
        ({"least": 0}, "least must be in [1, inf), got 0"),
        ({"row_cutoffs": (3,)}, "row_cutoffs=(3,) need kind='banded', got kind='hashed'"),
        ({"kind": "banded", "rows": 9, "row_cutoffs": (9,)}, "cutoffs (9, 9) do not increase"),
        ({"kind": "banded", "row_cutoffs": (5, 3)}, "cutoffs (5, 3, 65536) do not increase"),
        ({"hashes": 0}, "hashes must be in [1, inf), got 0"),
        ({"row_width": -1}, "row_width must be in [0, inf), got -1"),
        ({"words": HashedNGrams(V, 4)}, "words must be an input that reads no earlier tokens"),
    ],
)
def test_bad_settings_in_one_line(settings, words):
    """Before anything is compiled."""
    with pytest.raises(InputError) as error:
        NGrams(**{"words": AdaptiveInput(V, FEATURES)} | settings)
    assert words in str(error.value)
