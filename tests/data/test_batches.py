"""Every token once: training batches of every layout, epochs, shares of hosts, and windows with
context.
"""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptive_jax.data.batches.examples import BREAK_MODES, examples, ranges
from adaptive_jax.data.batches.layouts import check_layout
from adaptive_jax.data.batches.pipeline import Layout, TrainingBatches
from adaptive_jax.data.batches.spans import Spans, fill_rows
from adaptive_jax.data.batches.windows import Windows, windows
from tests import refuses

EOS = 99
CHOICES = [
    ("none", "packed"),
    *((mode, layout) for mode in BREAK_MODES[1:] for layout in ("packed", "similar")),
]
# Sentences of so many words, an empty line among them; the text may end in the middle of one.
TEXTS = st.tuples(st.lists(st.integers(0, 20), min_size=1, max_size=40).filter(any), st.booleans())
thorough = settings(max_examples=40)


def stream(text):
    """Ids of a text in which the id of a word is its position + 1000, and that of <eos> 99."""
    lengths, cut = text
    ids = np.arange(1000, 1000 + sum(lengths) + len(lengths), dtype=np.int32)
    ids[np.cumsum(np.array(lengths) + 1) - 1] = EOS
    return ids[:-1] if cut and len(ids) > 1 and lengths[-1] else ids


def batches_of(ids, mode, layout, length=8, rows=1, microbatches=1):
    return TrainingBatches(ids, EOS, Layout(length, mode, layout), rows, microbatches)


def positions_of(ids, *arguments):
    """As `batches_of`, for a split in which every token is its own position, but which is
    broken where `ids` is.
    """
    batches = batches_of(ids, *arguments)
    batches.ids = np.arange(len(ids), dtype=np.int32)
    return batches


def assert_same(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one, other)


def test_rows_by_example():
    """Inputs are the targets one place earlier, after an EOS: a shift, or padding with a weight,
    would train on other words.
    """
    batches = batches_of(np.arange(5, dtype=np.int32), "none", "packed", 2, 3)
    batch = batches.batch(0, 0)
    order = np.argsort(batch.targets[0, :, 0])
    assert batch.inputs.shape == (1, 3, 2)
    assert batch.inputs[0, order].tolist() == [[EOS, 0], [1, 2], [3, EOS]]
    assert batch.targets[0, order, 0].tolist() == [0, 2, 4]
    assert batch.weights[0, order].tolist() == [[1, 1], [1, 1], [1, 0]]
    assert [x.dtype for x in batch[:4]] == [np.int32, np.int32, np.float32, np.int32]
    assert batch.segment_ids is batch.reset is None
    assert str(batches) == "3 examples in 3 rows of 2 tokens, padding 16.67%"


def test_spans_fill_rows_by_example():
    """Spans stand side by side in their rows, as segments from 1 on: a wrong offset would mix
    sentences.
    """
    spans = Spans(np.array([3, 0, 1]), np.array([2, 1, 4]), np.array([0, 0, 2]))
    batch = fill_rows(np.arange(5, dtype=np.int32), EOS, spans, (3, 4), segmented=True)
    assert batch.inputs.tolist() == [[2, 3, EOS, EOS], [EOS] * 4, [0, 1, 2, 3]]
    assert batch.targets.tolist() == [[3, 4, 0, EOS], [EOS] * 4, [1, 2, 3, 4]]
    assert batch.segment_ids.tolist() == [[1, 1, 2, 0], [0] * 4, [1] * 4]
    assert_same((batch.weights, batch.row_ids), (batch.segment_ids > 0, [0, 1, 2]))


def check_inputs(batch, before, starts, lengths):
    """An input is the token before its target in the split; segments are examples; only these
    have weight.
    """
    counted = batch.weights > 0
    assert [before[k] for k in batch.targets[counted].tolist()] == batch.inputs[counted].tolist()
    if batch.segment_ids is None:
        assert (np.diff(batch.weights, axis=-1) <= 0).all()
        return
    assert ((batch.segment_ids > 0) == counted).all()
    for row, segments in zip(
        np.concatenate(batch.targets), np.concatenate(batch.segment_ids), strict=True
    ):
        for number in range(1, segments.max() + 1):
            example = row[segments == number]
            assert lengths[starts == example[0]] == len(example)
            np.testing.assert_array_equal(np.diff(example), 1)


@thorough
@given(
    text=TEXTS,
    choice=st.sampled_from(CHOICES),
    length=st.integers(1, 24),
    seed=st.integers(0, 2**32),
    microbatches=st.integers(1, 3),
    hosts=st.integers(1, 4),
    each=st.integers(1, 3),
)
def test_an_epoch_loses_and_repeats_no_token(text, choice, length, seed, microbatches, hosts, each):
    """Any lengths, seed and number of hosts: every epoch holds each token of an example once, and
    its updates are the same in one microbatch or in several, on one host or shared by them.
    """
    ids, rows = stream(text), microbatches * hosts * each
    batches = positions_of(ids, *choice, length, rows, microbatches)
    undivided = positions_of(ids, *choice, length, rows)
    starts, lengths = examples(ids, EOS, choice[0], length)
    before = [EOS, *range(len(ids) - 1)]
    count = batches.layout.count
    # So many updates are a whole number of epochs.
    steps = (
        len(batches.layout.updates) if choice[1] == "similar" else count // math.gcd(count, rows)
    )
    read = []
    for step in range(steps, 2 * steps):
        batch = batches.batch(seed, step)
        check_inputs(batch, before, starts, lengths)
        assert len(batch.targets) == microbatches and batch.targets.size <= rows * length
        assert batch.row_ids.ravel().tolist() == list(range(batch.row_ids.size))
        full = undivided.batch(seed, step)
        assert_same(*((x for x in (y.ravel() for y in z if y is not None)) for z in (full, batch)))
        shares = [batches.batch(seed, step, (host, hosts)) for host in range(hosts)]
        assert_same(
            (np.concatenate(x, axis=1) for x in zip(*shares, strict=True) if x[0] is not None),
            (x for x in batch if x is not None),
        )
        read += [
            row[weights > 0] for row, weights in zip(full.targets[0], full.weights[0], strict=True)
        ]
    assert len(read) % count == 0
    for epoch in range(0, len(read), count):
        assert sorted(np.concatenate(read[epoch : epoch + count])) == sorted(
            ranges(starts, lengths)
        )


@pytest.mark.parametrize("choice", CHOICES, ids="-".join)
def test_a_batch_does_not_depend_on_the_batches_before_it(choice):
    """A run that resumes in the middle of an epoch reads on where it stopped; seed and epoch
    change the order.
    """
    ids = stream(([3, 0, 9, 17, 2, 2, 5, 1, 0, 8, 30] * 3, False))
    walked, late = (batches_of(ids, *choice, 8, 4) for _ in range(2))
    batches = [walked.batch(2, step) for step in range(41)]
    for step in 40, 7:
        assert_same(late.batch(2, step)[:4], batches[step][:4])
    layout = walked.layout
    epoch = len(layout.updates) if hasattr(layout, "updates") else layout.count
    for other in walked.batch(3, 0), walked.batch(2, epoch):
        assert not np.array_equal(batches[0].targets, other.targets)


@thorough
@given(
    text=TEXTS,
    choice=st.sampled_from(CHOICES),
    window=st.integers(1, 30),
    context=st.integers(0, 29),
    rows=st.integers(1, 20),
)
def test_windows_score_examples_after_their_context(text, choice, window, context, rows):
    """Each token of an example once, within reach of `first`; a row shows at most `context`
    tokens before the example.
    """
    ids = stream(text)
    context = 0 if choice[0] in ("eos", "complete_doc") else min(context, window - 1)
    starts, lengths = examples(ids, EOS, choice[0], window - context)
    count, batches = windows(ids, EOS, Windows(window, context, *choice, rows))
    batches, scored = list(batches), []
    assert len(batches) == count
    for (batch, first), at in batches:
        more, time = len(first), batch.inputs.shape[1]
        assert (batch.inputs.dtype, batch.weights.dtype, first.dtype) == (
            np.int32,
            np.float32,
            np.int32,
        )
        assert more % rows == 0 and time <= window and batch.row_ids.tolist() == list(range(more))
        columns = np.arange(time) - first[:, None]
        assert (
            not batch.weights[(columns < 0) | (columns >= window - context)].any()
            and first.max() <= context
        )
        np.testing.assert_array_equal(batch.targets[batch.weights > 0], ids[at])
        scored.extend(at.tolist())
        for row, weights, begin in (
            zip(*batch[1:3], first, strict=True) if batch.segment_ids is None else ()
        ):
            if weights.any():
                assert begin == min(context, at[0]) and at[0] in starts
                shown = row[: begin + int(weights.sum())]
                np.testing.assert_array_equal(shown, ids[at[0] - begin :][: len(shown)])
                at = at[int(weights.sum()) :]
    expected = ranges(starts, lengths).tolist()
    assert (scored if context or choice[0] == "none" else sorted(scored)) == expected
    for ((batch, _), at), ((more, _), same) in zip(
        batches, windows(ids, EOS, Windows(window, context, *choice, rows, 3))[1], strict=True
    ):  # on 3 devices: the same rows, and empty ones
        count = len(batch.inputs)
        assert len(more.inputs) % 3 == 0 and not more.weights[count:].any()
        np.testing.assert_array_equal(same, at)
        np.testing.assert_array_equal(more.inputs[:count], batch.inputs)


def test_impossible_settings_are_named():
    """A setting out of range is an error that names it, not batches without tokens."""
    ids, good = np.arange(9, dtype=np.int32), Windows(4, 1, "none", "packed", 1)
    for wrong, names in [
        ({"context": 4}, "window=4 context=4"),
        ({"context": -1}, "window=4 context=-1"),
        ({"break_mode": "eos"}, "context=1 batches.break_mode='eos'"),
        ({"rows": 0}, "rows"),
    ]:
        with refuses(*names.split()):
            windows(ids, EOS, good._replace(**wrong))
    with refuses("batches.break_mode='sentence'", "complete_doc"):
        check_layout("sentence", "packed")
    with refuses("0 tokens"):
        batches_of(ids[:0], "none", "packed")
