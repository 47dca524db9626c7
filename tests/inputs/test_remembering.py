"""Inputs that read earlier tokens: from outside the package, in rows, segments, streams, windows
and text that is written.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaptive_jax.config.keys import complete
from adaptive_jax.data.batches.windows import Windows
from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.numerics.batch import Batch
from adaptive_jax.scores.scoring import as_stream, score_split
from adaptive_jax.testing import check_input
from adaptive_jax.text.load import LoadedModel
from tests.random_runs import quiet, random_run
from tests.toys import HashedNGrams

WORDS = Vocabulary.build({"<eos>": 30, "<unk>": 20} | {f"w{n}": 19 - n for n in range(17)})
SMALL = {
    "data.corpus": "text_files",
    "batches.sequence_length": 24,
    "input.name": "tests.toys:HashedNGrams",
    "body.features": 16,
    "output.name": "softmax",
}
BODIES = {
    "lstm": {"body.name": "lstm", "body.widths": (12, 16), "batches.layout": "streams"},
    "gated_conv": {"body.name": "gated_conv", "body.blocks": ((2, 3, 16),)},
    "pointwise": {"body.name": "gated_conv", "body.blocks": ((2, 1, 16),)},
    "transformer": {"body.layers": 1, "body.heads": 2, "body.feed_forward": 24},
}


@pytest.fixture(scope="module")
def models():
    """A model of random parameters for each body."""
    return {
        name: LoadedModel(random_run(complete(SMALL | body), WORDS, 3.0))
        for name, body in BODIES.items()
    }


def test_an_input_that_reads_further_back_than_it_says():
    """Writing text gave other numbers than scoring it, in silence: such an input is caught."""
    check_input(HashedNGrams(61, 16))
    for reach in 0, 1:
        with pytest.raises(AssertionError, match=f"more than {reach} earlier tokens"):
            check_input(HashedNGrams(61, 16, reach=reach))


@pytest.mark.parametrize("body", BODIES)
def test_text_that_is_written_is_scored_alike(models, body):
    """Greedily, drawn and by beams, after prompts of no word, one and several."""
    model = models[body]
    for prompt in "", "w3", "w1 w5 w0 w3":
        for options in (
            {"temperature": 0},
            {"temperature": 1.0, "seed": 3, "samples": 2},
            {"beams": 3, "samples": 2},
        ):
            for text in model.continuations(prompt, words=6, avoid=("<eos>", "<unk>"), **options):
                line = f"{prompt} {model.decode(text.tokens)}"
                [scored] = model.score([line])
                begin = len(prompt.split())
                expected = scored.log_probs[begin : begin + len(text.tokens)].sum()
                np.testing.assert_allclose(text.log_prob, expected, rtol=1e-4)
    first, *_ = model.embeddings(["w3", "w5", "w3"])
    np.testing.assert_array_equal(first, model.embeddings(["w3"])[0])  # no word before it


def test_halves_equal_the_whole_and_a_row_that_begins_stands_alone(models):
    """Of a body that carries its state, which the input's tokens go with."""
    run = models["lstm"].run
    tokens = jax.random.randint(jax.random.key(0), (2, 8), 0, len(WORDS))
    zeros, numbers = jnp.zeros((2, 4), jnp.int32), jnp.arange(2)
    hidden = jax.jit(lambda *a: run.model.apply({"params": run.params}, *a, method="hidden"))
    wide = jnp.zeros((2, 8), jnp.int32)
    whole, _ = hidden(Batch(tokens, wide, wide, numbers), run.model.initial_carry(2))
    halves, carry = [], run.model.initial_carry(2)
    for part, reset in (tokens[:, :4], [True, True]), (tokens[:, 4:], [False, True]):
        batch = Batch(part, zeros, zeros, numbers, reset=reset)
        states, carry = hidden(batch, carry)
        halves.append(states)
    alone, _ = hidden(Batch(tokens[:, 4:], zeros, zeros, numbers), ())
    np.testing.assert_allclose(jnp.concatenate(halves, axis=1)[0], whole[0], atol=1e-5)
    np.testing.assert_allclose(halves[1][1], alone[1], atol=1e-5)
    assert not np.allclose(halves[1][0], alone[0], atol=1e-2)
    # A word that the run does not know is no word 0, in the row as in the carry.
    known, halves = jnp.ones((2, 8), bool).at[:, 3].set(False), []
    read = jax.jit(
        lambda batch, carry, known: run.model.apply(
            {"params": run.params}, batch, carry, in_vocabulary=known, method="hidden"
        )
    )
    whole, _ = read(Batch(tokens, wide, wide, numbers), run.model.initial_carry(2), known)
    carry = run.model.initial_carry(2)
    for begin in 0, 4:
        part = slice(begin, begin + 4)
        batch = Batch(tokens[:, part], zeros, zeros, numbers)
        states, carry = read(batch, carry, known[:, part])
        halves.append(states)
    np.testing.assert_allclose(jnp.concatenate(halves, axis=1), whole, atol=1e-5)


def test_a_convolution_carries_on_where_the_context_covers_what_the_input_remembers(models):
    """A context that is shorter than both gave other numbers."""
    run, ids = models["gated_conv"].run, np.arange(60, dtype=np.int32) * 7 % len(WORDS)
    field = run.model.body.receptive_field - 1
    whole, _ = score_split(run, ids, Windows(60, 0, "none", "packed", 1), quiet)
    for context, layout in (field, "packed"), (field + 2, "streams"):
        settings = Windows(20, context, "none", "packed", 2)
        assert as_stream(run.model, settings, len(ids)).layout == layout
        nll, _ = score_split(run, ids, settings, quiet)
        same = np.isclose(nll, whole, atol=1e-4)
        assert same.all() if layout == "streams" else same[: 20 - field].all() and not same.all()


def test_what_is_remembered_keeps_its_dtype(models):
    """Tokens of int64, as under x64, made a carry of int64, which `jax.lax.scan` refuses."""
    run = models["lstm"].run
    with jax.enable_x64(True):
        carry = run.model.apply({"params": run.params}, 2, 4, method="cache")
        step = lambda carry: run.model.apply(
            {"params": run.params}, jnp.zeros((2, 1), jnp.int64), carry, method="step"
        )
        _, after = jax.eval_shape(step, carry)
    assert after.earlier.dtype == carry.earlier.dtype == jnp.int32


def test_a_body_that_reads_one_token_streams_what_the_input_remembers(models):
    """The body has no state, but the input's earlier tokens go from window to window."""
    run, ids = models["pointwise"].run, np.arange(60, dtype=np.int32) * 7 % len(WORDS)
    whole, _ = score_split(run, ids, Windows(60, 0, "none", "packed", 1), quiet)
    windows = Windows(20, 2, "none", "packed", 2)
    assert as_stream(run.model, windows, len(ids)).layout == "streams"
    np.testing.assert_allclose(score_split(run, ids, windows, quiet)[0], whole, atol=1e-4)
