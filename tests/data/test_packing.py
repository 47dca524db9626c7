"""Sentences: how text is broken, how examples are packed, and that packing changes no token's loss and no gradient."""

import lzma
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptive_jax.bodies.transformer import places
from adaptive_jax.data.batches import examples as breaking
from adaptive_jax.data.batches.batching import Rows, lay
from adaptive_jax.data.batches.examples import BREAK_MODES, examples, ranges
from adaptive_jax.data.batches.packing import Packed, Pieces, Similar, pack, permutation, shuffled
from adaptive_jax.devices import sharding
from adaptive_jax.errors import InputError
from adaptive_jax.model import build
from adaptive_jax.training.state import initial_state
from adaptive_jax.training.update import make_update
from configs import quickstart

EOS, WORDS = 0, 97
LM1B = Path(__file__).parents[2] / "shared" / "data" / "lm1b-heldout" / "valid.txt.xz"
thorough = settings(deadline=None, max_examples=150, derandomize=True)


def split(text):
    """Ids of words that are their places, . being <eos>."""
    return np.array([EOS if word == "." else 100 + k for k, word in enumerate(text.split())], np.int32)


@pytest.mark.parametrize("mode, expected", [
    ("none", "a b . c .|. d e f ."), ("complete", "a b . c .|. d e f ."), ("complete_doc", "a b . c .|d e f ."),
    ("eos", "a b .|c .|.|d e f .")])
def test_four_ways_to_break_text(mode, expected):
    words = [*"ab.c..def."]
    starts, lengths = examples(split(" ".join(words)), EOS, mode, 5)
    assert "|".join(" ".join(words[s : s + n]) for s, n in zip(starts, lengths, strict=True)) == expected
    assert starts.dtype == lengths.dtype == np.int32


def slow_examples(ids, mode, block):
    """Sentence by sentence, as fairseq documents its modes; then what is too long in pieces."""
    sentences, start = [], 0
    for k, token in enumerate(ids):
        if token == EOS or k == len(ids) - 1:
            sentences.append(range(start, k + 1))
            start = k + 1
    if mode == "none":
        runs = [range(k, min(k + block, len(ids))) for k in range(0, len(ids), block)]
    elif mode == "eos":
        runs = sentences
    else:
        runs, run = [], range(0)
        for sentence in sentences:
            empty = mode == "complete_doc" and len(sentence) == 1 and ids[sentence[0]] == EOS
            if run and (empty or len(run) + len(sentence) > block):
                runs.append(run)
                run = range(0)
            if not empty:
                run = range(run.start if run else sentence.start, sentence.stop)
        runs += [run] if run else []
    return [(k, min(block, run.stop - k)) for run in runs for k in range(run.start, run.stop, block)]


@thorough
@given(words=st.lists(st.sampled_from("..a"), min_size=1, max_size=60), block=st.integers(1, 20),
       mode=st.sampled_from(BREAK_MODES), part=st.integers(1, 9))
def test_breaking_is_that_of_a_plain_loop(words, block, mode, part):
    """Empty lines at either end, no <eos> at the end, sentences that fit, do not and exceed; read in parts of any size."""
    ids = split(" ".join(words))
    slow = slow_examples(ids.tolist(), mode, block)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(breaking, "PART", part)
        if not slow:
            with pytest.raises(InputError, match="empty lines only"):
                examples(ids, EOS, mode, block)
        else:
            assert list(zip(*(a.tolist() for a in examples(ids, EOS, mode, block)), strict=True)) == slow


def test_ranges():
    assert ranges(np.array([5, 0, 7]), np.array([2, 3, 0])).tolist() == [5, 6, 0, 1, 2]


def slow_pack(lengths, block):
    """Room left in each row after best-fit decreasing, example by example."""
    left = []
    for length in sorted(lengths, reverse=True):
        fits = [room for room in left if room >= length]
        if fits:
            left.remove(min(fits))
        left.append((min(fits) if fits else block) - length)
    return sorted(left)


@thorough
@given(block=st.integers(1, 30), sizes=st.lists(st.floats(0, 1), min_size=1, max_size=80), longest=st.floats(0, 1))
def test_packing_is_best_fit_decreasing(block, sizes, longest):
    lengths = [1 + int(size * longest * (block - 1)) for size in sizes]
    kinds = pack(np.bincount(lengths, minlength=block + 1), block)
    assert sorted(length for row, count in kinds for length in row * count) == sorted(lengths)
    assert sorted(block - sum(row) for row, count in kinds for _ in range(count)) == slow_pack(lengths, block)


def test_packed_rows_by_example():
    """Lengths 3 3 2 1 1 in rows of 5."""
    lengths = np.array([1, 3, 2, 3, 1])
    starts = np.cumsum(lengths) - lengths
    layout = Packed(starts, lengths, 5, rows=2)
    assert (layout.count, layout.size) == (2, 10)
    pieces = layout.pieces(np.arange(2), None, 0)
    assert sorted(pieces.lengths[pieces.rows == row].tolist() for row in range(2)) == [[3, 1, 1], [3, 2]]
    assert sorted(layout.pieces(np.arange(2), 3, 1).starts.tolist()) == starts.tolist()


def test_companions_change_from_epoch_to_epoch():
    """Which examples of a length share a row is drawn anew, and is a function of seed and epoch."""
    lengths = np.full(60, 3, np.int32)
    layout = Packed(np.arange(60, dtype=np.int32) * 3, lengths, 9, rows=4)

    def companions(seed, epoch):
        starts, _, rows = layout.pieces(np.arange(20), seed, epoch)
        return {frozenset(starts[rows == row].tolist()) for row in range(20)}

    first = companions(5, 0)
    assert companions(5, 0) == first
    assert all(len(first & other) < 4 for other in (companions(5, 1), companions(6, 0)))


def test_rows_of_similar_length():
    """Rows of few lengths, more of them where they are shorter, and hardly any that could be shorter still."""
    bits = np.random.Generator(np.random.Philox(5))
    lengths = bits.integers(1, 65, 4000).astype(np.int32)
    layout = Similar(np.cumsum(lengths) - lengths, lengths, 64, rows=8)
    assert layout.times == [8, 16, 32, 64]
    seen = []
    for step in range(len(layout.updates)):
        _, numbers, time = layout.update(3, step)
        pieces = layout.pieces(numbers, 3, 0)
        assert len(numbers) % 8 == 0 and 0.75 * 512 <= len(numbers) * time <= 512
        shorter = max((t for t in layout.times if t < time), default=0)
        assert ((pieces.lengths <= time) & (pieces.lengths > shorter)).all()
        seen.append((len(pieces.rows) == len(numbers), time))
    assert sum(not full for full, _ in seen) <= len(layout.times)
    assert [time for _, time in seen] != sorted(time for _, time in seen)


def test_permutation_is_a_fixed_function_of_seed_and_epoch():
    order = permutation(1000, 3, 7)
    assert sorted(order.tolist()) == list(range(1000))
    assert permutation(8, 1, 0).tolist() == [3, 5, 2, 7, 0, 6, 1, 4]
    others = [permutation(1000, 3, 8), permutation(1000, 4, 7), np.arange(1000)]
    assert all((order == other).mean() < 0.05 for other in others)
    with pytest.raises(ValueError, match="read-only"):
        order[0] = 1
    with pytest.raises(InputError, match="seed=-1"):
        permutation(8, -1, 0)


def test_shuffled_keeps_to_kinds():
    """Each kind in some order of its own, none of them that of the rows."""
    order = shuffled(np.array([300, 0, 700]), 3, 7)
    assert sorted(order[:300].tolist()) == list(range(300))
    assert sorted(order[300:].tolist()) == list(range(300, 1000))
    assert (order[300:] - 300 == permutation(700, 3, 7)).mean() < 0.05
    assert shuffled(np.array([2, 6]), 1, 0).tolist() == shuffled(np.array([2, 6]), 1, 0).tolist() != list(range(8))


def test_places_in_segments():
    segments = np.array([[1, 1, 1, 2, 2, 0], [1, 2, 3, 3, 3, 3], [0, 0, 0, 0, 0, 0]])
    assert places(segments).tolist() == [[0, 1, 2, 0, 1, 0], [0, 0, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5]]


@pytest.mark.skipif(not LM1B.exists(), reason="no sample of Billion Word here")
def test_a_sample_of_billion_word_is_packed_with_little_padding():
    with lzma.open(LM1B, "rt", encoding="utf-8") as lines:
        lengths = [len(line.split()) + 1 for line in lines]
    ids = np.ones(sum(lengths), np.int32)
    ids[np.cumsum(lengths) - 1] = EOS
    rows = Rows(ids, EOS, block=512, break_mode="eos", kind="packed", rows=128)
    assert rows.examples == len(lengths) == 12_216
    assert 1 - rows.tokens / rows.layout.size < 0.01
    assert str(rows).startswith("12,216 examples in 631 rows of 512 tokens, padding 0.1")


def sentences():
    """A split of short sentences, one of 1 token and one as long as a row among them."""
    bits = np.random.Generator(np.random.Philox(7))
    lengths = [1, 24, 2, *bits.integers(1, 14, 17)]
    ids = bits.integers(1, WORDS, sum(lengths), dtype=np.int32)
    ids[np.cumsum(lengths) - 1] = EOS
    return ids


def packed_and_plain():
    """The same sentences twice, as `[1, rows, 24]`: packed, and one a row; and the place in the split of each token."""
    ids = sentences()
    starts, lengths = examples(ids, EOS, "eos", 24)
    packed = Packed(starts, lengths, 24, 8)
    assert 1 < packed.count < 8
    both = [(packed.pieces(np.arange(packed.count), 1, 0), 8, True), (Pieces(starts, lengths, np.arange(20)), 24, False)]
    for pieces, rows, segmented in both:
        batch = lay(ids, EOS, pieces, rows, 24, segmented)
        yield jax.tree.map(lambda a: a[None], batch), ranges(*pieces[:2])


def tiny_model():
    config = quickstart.get_config()
    config.update_from_flattened_dict({
        "input.cutoffs": (20, 50), "body.layers": 2, "body.features": 16, "body.heads": 2, "body.feed_forward": 24,
        "body.dropout": 0.0})
    return build(config.to_dict(), WORDS)


def hurried(function, *arguments):
    """Compiled without care, as a program is that runs once."""
    return function.lower(*arguments).compile(compiler_options={"xla_backend_optimization_level": 0})


def check_packed_equals_plain():
    """Loss and gradients of an update, which plain descent at rate 1 shows. Run in this process, and in one of 8 devices."""
    mesh, model, optimizer = sharding.device_mesh(), tiny_model(), optax.sgd(1.0)
    state = initial_state(model, optimizer, 0, mesh)
    before = jax.device_get(state)
    update = make_update(model, optimizer, lambda step: 1.0, mesh, seed=0)
    programs = {}

    def one_update(batch):
        batch = sharding.put_share(mesh, batch, axis=1)
        state = jax.device_put(before, sharding.whole(mesh))
        if batch.segments is None or not programs:
            programs[batch.segments is None] = hurried(update, state, batch)
        state, numbers = programs[batch.segments is None](state, batch)
        return numbers, jax.tree.map(lambda old, new: old - np.asarray(new), before.params, state.params)

    (packed, _), (plain, _) = packed_and_plain()
    (ours, gradients), (theirs, expected) = one_update(packed), one_update(plain)
    assert ours["tokens"] == theirs["tokens"] == len(sentences())
    np.testing.assert_allclose(ours["nll"], theirs["nll"], rtol=1e-5)
    assert ours["gradient_norm"] > 0.1
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), gradients, expected)
    # What is compared is not blind: rows of one segment each have another loss.
    blind, _ = one_update(packed._replace(segments=np.ones_like(packed.segments)))
    assert abs(blind["nll"] - ours["nll"]) > 1e-3


def test_packed_sentences_train_as_sentences_alone():
    check_packed_equals_plain()


def test_packed_sentences_train_alike_on_eight_devices(command):
    done = command("-c", "import sys; sys.path += ['tests', '.']; import test_packing; test_packing.check_packed_equals_plain();"
                   "import jax; print(jax.device_count(), 'devices')", devices=8)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("8 devices\n")


def test_every_token_costs_what_it_costs_alone():
    """Token by token; and padding gives numbers too, even in rows that hold nothing else."""
    model, losses = tiny_model(), []
    ids = np.zeros((1, 2), np.int32)
    start = jax.random.key(0), ids, ids, np.ones((1, 2), np.float32)
    params = hurried(jax.jit(model.init), *start)(*start)
    for batch, at in packed_and_plain():
        batch = jax.tree.map(lambda a: a[0], batch)
        assert not batch.weights.any(axis=1).all()
        _, nll = hurried(jax.jit(model.apply), params, *batch)(params, *batch)
        assert np.isfinite(nll).all()
        losses.append(np.asarray(nll)[batch.weights > 0][np.argsort(at)])
    np.testing.assert_allclose(*losses, rtol=1e-5)
