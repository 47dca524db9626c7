"""Sentences: how text is broken, how examples are packed, and that packing changes no token's
loss and no gradient.
"""

import lzma
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptive_jax.config.keys import resolve
from adaptive_jax.data.batches import examples as breaking
from adaptive_jax.data.batches.examples import BREAK_MODES, examples, ranges
from adaptive_jax.data.batches.layouts import Packed, Similar, pack
from adaptive_jax.data.batches.pipeline import Layout, TrainingBatches
from adaptive_jax.data.batches.spans import Spans, fill_rows, permutation, shuffled
from adaptive_jax.model.language_model import build, parameter_shapes
from configs import quickstart
from tests import refuses

EOS, WORDS = 0, 97
LM1B = Path(__file__).parents[3] / "shared" / "data" / "lm1b-heldout" / "valid.txt.xz"
thorough = settings(max_examples=50)


def split(text):
    """Ids of words that are their positions; . is <eos>."""
    return np.array([EOS if word == "." else 100 + k for k, word in enumerate(text)], np.int32)


def test_four_ways_to_break_text():
    """Each mode ends its examples where it says: one that ends elsewhere shows words another
    context.
    """
    text, expected = "ab.c..def.", ("ab.c.|.def.", "ab.c.|.def.", "ab.c.|def.", "ab.|c.|.|def.")
    for mode, parts in zip(BREAK_MODES, expected, strict=True):
        starts, lengths = examples(split(text), EOS, mode, 5)
        pieces = [text[s : s + n] for s, n in zip(starts, lengths, strict=True)]
        assert "|".join(pieces) == parts and starts.dtype == lengths.dtype == np.int32


def slow_examples(ids, mode, longest):
    """Sentence by sentence, as fairseq documents its modes; then what is too long in pieces."""
    sentences, start = [], 0
    for k, token in enumerate(ids):
        if token == EOS or k == len(ids) - 1:
            sentences.append(range(start, k + 1))
            start = k + 1
    if mode == "none":
        runs = [range(k, min(k + longest, len(ids))) for k in range(0, len(ids), longest)]
    elif mode == "eos":
        runs = sentences
    else:
        runs, run = [], range(0)
        for sentence in sentences:
            empty = mode == "complete_doc" and len(sentence) == 1 and ids[sentence[0]] == EOS
            if run and (empty or len(run) + len(sentence) > longest):
                runs.append(run)
                run = range(0)
            if not empty:
                run = range(run.start if run else sentence.start, sentence.stop)
        runs += [run] if run else []
    return [
        (k, min(longest, run.stop - k)) for run in runs for k in range(run.start, run.stop, longest)
    ]


@thorough
@given(
    words=st.lists(st.sampled_from("..a"), min_size=1, max_size=60),
    longest=st.integers(1, 20),
    mode=st.sampled_from(BREAK_MODES),
    part=st.integers(1, 9),
)
def test_breaking_is_that_of_a_plain_loop(words, longest, mode, part):
    """Empty lines at either end, no <eos> at the end, sentences that fit, do not and exceed;
    read in parts of any size.
    """
    ids = split(words)
    slow = slow_examples(ids.tolist(), mode, longest)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(breaking, "CHUNK_TOKENS", part)
        if not slow:
            with refuses("empty lines"):
                examples(ids, EOS, mode, longest)
        else:
            assert (
                list(zip(*(a.tolist() for a in examples(ids, EOS, mode, longest)), strict=True))
                == slow
            )


def slow_pack(lengths, room):
    """Room left in each row after best-fit decreasing, example by example."""
    left = []
    for length in sorted(lengths, reverse=True):
        fits = [room for room in left if room >= length]
        if fits:
            left.remove(min(fits))
        left.append((min(fits) if fits else room) - length)
    return sorted(left)


@thorough
@given(
    room=st.integers(1, 30),
    sizes=st.lists(st.floats(0, 1), min_size=1, max_size=80),
    longest=st.floats(0, 1),
)
def test_packing_is_best_fit_decreasing(room, sizes, longest):
    """Against a slow twin, rows hold every example once and leave as much room: a worse fit would
    cost updates.
    """
    lengths = [1 + int(size * longest * (room - 1)) for size in sizes]
    patterns = pack(np.bincount(lengths, minlength=room + 1), room)
    assert sorted(length for row, count in patterns for length in row * count) == sorted(lengths)
    assert sorted(room - sum(row) for row, count in patterns for _ in range(count)) == slow_pack(
        lengths, room
    )


def test_companions_change_from_epoch_to_epoch():
    """The examples of a length that share a row are drawn anew, as a function of seed and
    epoch.
    """
    layout = Packed(np.arange(60, dtype=np.int32) * 3, np.full(60, 3, np.int32), 9, rows=4)

    def companions(seed, epoch):
        starts, _, rows = layout.spans(np.arange(20), seed, epoch)
        return {frozenset(starts[rows == row].tolist()) for row in range(20)}

    first = companions(5, 0)
    assert companions(5, 0) == first
    assert all(len(first & other) < 4 for other in (companions(5, 1), companions(6, 0)))


def test_rows_of_similar_length():
    """Rows of few lengths, more of them where they are shorter, and hardly any that could be
    shorter still.
    """
    bits = np.random.Generator(np.random.Philox(5))
    lengths = bits.integers(1, 65, 4000).astype(np.int32)
    layout = Similar(np.cumsum(lengths) - lengths, lengths, 64, rows=8)
    assert layout.row_lengths == [8, 16, 32, 64]
    seen = []
    for step in range(len(layout.updates)):
        _, numbers, time = layout.update(3, step)
        spans = layout.spans(numbers, 3, 0)
        assert len(numbers) % 8 == 0 and 0.75 * 512 <= len(numbers) * time <= 512
        shorter = max((t for t in layout.row_lengths if t < time), default=0)
        assert ((spans.lengths <= time) & (spans.lengths > shorter)).all()
        seen.append((len(spans.rows) == len(numbers), time))
    assert sum(not full for full, _ in seen) <= len(layout.row_lengths)
    assert [time for _, time in seen] != sorted(time for _, time in seen)


def test_orders_are_fixed_functions_of_seed_and_epoch():
    """`shuffled` gives each group an order of its own, none of them that of `permutation`."""
    order = permutation(1000, 3, 7)
    assert sorted(order.tolist()) == list(range(1000))
    assert permutation(8, 1, 0).tolist() == [3, 5, 2, 7, 0, 6, 1, 4]
    others = [permutation(1000, 3, 8), permutation(1000, 4, 7), np.arange(1000)]
    assert all((order == other).mean() < 0.05 for other in others)
    assert not order.flags.writeable
    groups = shuffled(np.array([300, 0, 700]), 3, 7)
    assert sorted(groups[:300].tolist()) == list(range(300))
    assert sorted(groups[300:].tolist()) == list(range(300, 1000))
    assert (groups[300:] - 300 == permutation(700, 3, 7)).mean() < 0.05
    assert (
        shuffled(np.array([2, 6]), 1, 0).tolist()
        == shuffled(np.array([2, 6]), 1, 0).tolist()
        != list(range(8))
    )


@pytest.mark.skipif(not LM1B.exists(), reason="no sample of Billion Word here")
def test_a_sample_of_billion_word_is_packed_with_little_padding():
    """Padding of real sentences is below 0.2%; it is computed as words are."""
    with lzma.open(LM1B, "rt", encoding="utf-8") as lines:
        lengths = [len(line.split()) + 1 for line in lines]
    ids = np.ones(sum(lengths), np.int32)
    ids[np.cumsum(lengths) - 1] = EOS
    batches = TrainingBatches(ids, EOS, Layout(512, "eos", "packed"), 128)
    assert batches.examples == len(lengths) == 12_216
    assert str(batches).startswith("12,216 examples in 631 rows of 512 tokens, padding 0.1")


def test_packed_sentences_cost_and_teach_what_they_do_alone():
    """Loss of every token and gradient of every parameter; and padding gives numbers too, in
    rows that hold nothing else.
    """
    config = quickstart.get_config()
    config.update_from_flattened_dict(
        {
            "input.cutoffs": (20, 50),
            "body.layers": 1,
            "body.features": 16,
            "body.heads": 2,
            "body.feed_forward": 24,
            "body.dropout": 0.0,
        }
    )
    model = build(resolve(config), WORDS)
    bits = np.random.Generator(np.random.Philox(7))
    lengths = [1, 24, 2, *bits.integers(1, 14, 17)]  # one of a single token, one as long as a row
    ids = bits.integers(1, WORDS, sum(lengths), dtype=np.int32)
    ids[np.cumsum(lengths) - 1] = EOS
    starts, lengths = examples(ids, EOS, "eos", 24)
    layout = Packed(starts, lengths, 24, 8)
    spans = layout.spans(np.arange(layout.count), 1, 0)
    packed = fill_rows(ids, EOS, spans, (24, 24), segmented=True)
    alone = fill_rows(ids, EOS, Spans(starts, lengths, np.arange(20)), (24, 24), segmented=True)
    assert 1 < packed.weights.any(axis=1).sum() < 8 and alone.segment_ids.max() == 1

    def loss(params, batch):
        loss, _ = model.apply({"params": params}, batch)
        return loss.total, loss.nll

    params = jax.tree.map(
        lambda s: bits.normal(0, s.shape[-1] ** -0.5, s.shape).astype(s.dtype),
        parameter_shapes(model),
    )
    program = jax.jit(jax.value_and_grad(loss, has_aux=True)).lower(params, packed)
    learn = program.compile()  # quickly, for it runs thrice
    (total, nll), gradients = learn(params, packed)
    (expected, expected_nll), expected_gradients = learn(params, alone)
    assert np.isfinite(nll).all() and np.isfinite(expected_nll).all()
    np.testing.assert_allclose(total, expected, rtol=1e-5)
    in_order = np.argsort(ranges(spans.starts, spans.lengths))
    nll, expected_nll = (
        np.asarray(nll)[packed.weights > 0][in_order],
        np.asarray(expected_nll)[alone.weights > 0],
    )
    np.testing.assert_allclose(nll, expected_nll, rtol=1e-5)
    scale = max(float(abs(g).max()) for g in jax.tree.leaves(gradients))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * scale),
        gradients,
        expected_gradients,
    )
    # The comparison is not blind: without segments the loss differs.
    (blind, _), _ = learn(params, packed._replace(segment_ids=np.ones_like(packed.segment_ids)))
    assert abs(blind - total) > 0.1
