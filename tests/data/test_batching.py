"""Every token once: batches of every kind of rows, epochs, shares of hosts, and windows with context."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptive_jax.data.batches import batching
from adaptive_jax.data.batches.batching import Batch, Rows
from adaptive_jax.data.batches.examples import BREAK_MODES, examples, ranges
from adaptive_jax.data.batches.packing import Pieces
from adaptive_jax.errors import InputError

EOS = 99
TOY = json.loads((Path(__file__).parent / "fixtures" / "context_window.json").read_text())["toy"]
LAYOUTS = [("none", "packed"), *((mode, kind) for mode in BREAK_MODES[1:] for kind in batching.ROWS)]
# Sentences of so many words, an empty line among them; the text may end in the middle of one.
TEXTS = st.tuples(st.lists(st.integers(0, 20), min_size=1, max_size=40).filter(any), st.booleans())
thorough = settings(deadline=None, max_examples=150, derandomize=True)


def tokens(n):
    return np.arange(n, dtype=np.int32)


def stream(text):
    """Ids of a text, in which a word is its place and <eos> 99."""
    lengths, cut = text
    ids = np.arange(1000, 1000 + sum(lengths) + len(lengths), dtype=np.int32)
    ids[np.cumsum(np.array(lengths) + 1) - 1] = EOS
    return ids[:-1] if cut and len(ids) > 1 and lengths[-1] else ids


def rows_of(ids, mode, kind, block=8, rows=1, parts=1):
    return Rows(ids, EOS, block=block, break_mode=mode, kind=kind, rows=rows, parts=parts)


def places_of(ids, mode, kind, **sizes):
    """As `rows_of`, of a split in which every token is its own place, but which is broken where `ids` is."""
    rows = rows_of(ids, mode, kind, **sizes)
    rows.ids = tokens(len(ids))
    return rows


def rows_read(batches):
    """The targets that count, row by row, in the order of the walk."""
    return [row[weights > 0].tolist() for batch in batches for row, weights in zip(
        batch.targets.reshape(-1, batch.targets.shape[-1]), batch.weights.reshape(-1, batch.weights.shape[-1]), strict=True)]


def test_blocks_by_example():
    rows = rows_of(tokens(5), "none", "packed", block=2, rows=3)
    batch = rows.batch(0, 0)
    order = np.argsort(batch.targets[0, :, 0])
    assert batch.inputs.shape == (1, 3, 2)
    assert batch.inputs[0, order].tolist() == [[EOS, 0], [1, 2], [3, EOS]]
    assert batch.targets[0, order, 0].tolist() == [0, 2, 4]
    assert batch.weights[0, order].tolist() == [[1, 1], [1, 1], [1, 0]]
    assert [x.dtype for x in batch[:3]] == [np.int32, np.int32, np.float32]
    assert batch.segments is None
    assert str(rows) == "3 examples in 3 rows of 2 tokens, padding 16.67%"


def slow_lay(ids, pieces, rows, time):
    """Token by token."""
    batch = Batch(*(np.full((rows, time), EOS) for _ in range(2)), *(np.zeros((rows, time)) for _ in range(2)))
    column, number = [0] * rows, [0] * rows
    for start, length, row in zip(*pieces, strict=True):
        number[row] += 1
        for k in range(start, start + length):
            values = EOS if k == 0 else ids[k - 1], ids[k], 1, number[row]
            for array, value in zip(batch, values, strict=True):
                array[row, column[row]] = value
            column[row] += 1
    return batch


@pytest.mark.parametrize("segmented", [True, False])
def test_pieces_are_laid_as_token_by_token(segmented):
    ids = tokens(30)
    pieces = Pieces(np.array([3, 0, 29, 8, 9]), np.array([2, 1, 1, 7, 1]), np.array([0, 0, 0, 2, 3]))
    batch, slow = batching.lay(ids, EOS, pieces, 4, 7, segmented), slow_lay(ids, pieces, 4, 7)
    for fast, plain in zip(batch[: 4 if segmented else 3], slow, strict=False):
        np.testing.assert_array_equal(fast, plain)
    assert (batch.segments is not None) == segmented
    if segmented:
        assert batch.segments.tolist()[0] == [1, 1, 2, 3, 0, 0, 0]


@thorough
@given(text=TEXTS, layout=st.sampled_from(LAYOUTS), block=st.integers(1, 24), seed=st.integers(0, 2**32),
       parts=st.integers(1, 3), hosts=st.integers(1, 4), each=st.integers(1, 3))
def test_an_epoch_loses_and_repeats_no_token(text, layout, block, seed, parts, hosts, each):
    """Any lengths, seed and number of hosts: every epoch holds each token of an example once, and its updates are
    the same in one part or in several, on one host or shared by them."""
    ids, sizes = stream(text), {"block": block, "rows": parts * hosts * each, "parts": parts}
    rows = places_of(ids, *layout, **sizes)
    expected = sorted(ranges(*examples(ids, EOS, layout[0], block)).tolist())
    similar = layout[1] == "similar"
    # So many updates are a whole number of epochs.
    steps = len(rows.layout.updates) if similar else rows.layout.count // math.gcd(rows.layout.count, sizes["rows"])
    batches = [rows.batch(seed, step) for step in range(steps, 2 * steps)]
    read = rows_read(batches)
    assert len(read) % rows.layout.count == 0
    for epoch in range(0, len(read), rows.layout.count):
        assert sorted(k for row in read[epoch : epoch + rows.layout.count] for k in row) == expected

    for step, whole in zip(range(steps, 2 * steps), batches, strict=True):
        assert whole.targets.shape[:2] == (parts, whole.targets[0].shape[0]) and whole.targets.shape[1] % hosts == 0
        assert whole.targets.size <= sizes["rows"] * block
        undivided = places_of(ids, *layout, block=block, rows=sizes["rows"]).batch(seed, step)
        np.testing.assert_array_equal(undivided.targets.reshape(whole.targets.shape), whole.targets)
        shares = [rows.batch(seed, step, (host, hosts)) for host in range(hosts)]
        for name in Batch._fields:
            if (array := getattr(whole, name)) is not None:
                joined = np.concatenate([getattr(share, name) for share in shares], axis=1)
                np.testing.assert_array_equal(joined, array)


@thorough
@given(text=TEXTS, layout=st.sampled_from(LAYOUTS), block=st.integers(1, 24), seed=st.integers(0, 2**32))
def test_an_input_is_the_token_before_its_target(text, layout, block, seed):
    """Throughout the stream, whatever the rows; segments are the examples, and nothing else is weighed."""
    ids = stream(text)
    before = dict(enumerate([EOS, *tokens(len(ids) - 1)]))
    starts, lengths = examples(ids, EOS, layout[0], block)
    rows = places_of(ids, *layout, block=block, rows=2)
    for step in range(4):
        batch = rows.batch(seed, step)
        counted = batch.weights > 0
        assert [before[k] for k in batch.targets[counted]] == batch.inputs[counted].tolist()
        if batch.segments is None:
            assert (np.diff(batch.weights, axis=-1) <= 0).all()
            continue
        assert ((batch.segments > 0) == counted).all()
        for row, segments in zip(batch.targets[0], batch.segments[0], strict=True):
            for number in range(1, segments.max() + 1):
                example = row[segments == number]
                assert lengths[starts == example[0]] == len(example)
                np.testing.assert_array_equal(np.diff(example), 1)


@pytest.mark.parametrize("layout", LAYOUTS, ids="-".join)
def test_a_batch_does_not_depend_on_the_batches_before_it(layout):
    """A run that is continued in the middle of an epoch reads on where it stopped."""
    ids = stream(([3, 0, 9, 17, 2, 2, 5, 1, 0, 8, 30] * 3, False))
    walked, late = (rows_of(ids, *layout, rows=4) for _ in range(2))
    whole = [walked.batch(2, step) for step in range(41)]
    for step in 40, 7:
        for ours, theirs in zip(late.batch(2, step), whole[step], strict=True):
            np.testing.assert_array_equal(ours, theirs)
    assert any(not np.array_equal(whole[0].targets, other.targets) for other in (walked.batch(3, 0), whole[20]))


class Stored:
    """The least that ids can do: a length, slices, and indexing with arrays of whole numbers."""

    def __init__(self, ids):
        self.ids = ids

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, at):
        assert isinstance(at, slice) or np.issubdtype(at.dtype, np.integer)
        return self.ids[at]


@pytest.mark.parametrize("layout", LAYOUTS, ids="-".join)
def test_ids_need_not_be_an_array(layout):
    ids = stream(([3, 0, 9, 17, 2, 5], False))
    for ours, theirs in zip(rows_of(Stored(ids), *layout).batch(0, 1), rows_of(ids, *layout).batch(0, 1), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def read_windows(ids, mode, kind, window, context, rows):
    count, batches = batching.windows(ids, EOS, break_mode=mode, kind=kind, window=window, context=context, rows=rows)
    batches = list(batches)
    assert len(batches) == count
    return batches


@pytest.mark.parametrize("toy", TOY, ids=lambda toy: toy["name"])
def test_windows_score_what_the_reference_scores_with_the_same_context(toy):
    context = toy["context_window"]
    window = toy["tokens_per_sample_after_reduction"] + context
    ids = np.array(toy["stream"], np.int32)
    _, batches = batching.windows(
        ids, toy["eos"], break_mode="none", kind="packed", window=window, context=context, rows=toy["batch_size"])
    rows = [row for batch, _ in batches for row in zip(*batch[:4], strict=True) if row[2].any()]
    assert len(rows) == len(toy["blocks"])
    for (inputs, targets, weights, first), block in zip(rows, toy["blocks"], strict=True):
        columns = np.flatnonzero(weights)
        assert targets[columns].tolist() == block["scored_targets"]
        assert (columns + 1).tolist() == block["n_real_source_tokens_visible_to_each"]
        assert first == columns[0] == block["start_index"]
        assert inputs[1:][: columns[-1]].tolist() == targets[: columns[-1]].tolist()


@pytest.mark.parametrize("n", [1, 7, 8, 9])
@pytest.mark.parametrize(("window", "context"), [(1, 0), (4, 0), (4, 3), (5, 2), (30, 1)])
@pytest.mark.parametrize("rows", [1, 2, 20])
def test_windows_score_every_token_once_within_reach_of_first(n, window, context, rows):
    scored = []
    for (inputs, targets, weights, first, _), at in read_windows(tokens(n), "none", "packed", window, context, rows):
        assert inputs.shape == targets.shape == weights.shape == (rows, window)
        assert (inputs.dtype, weights.dtype, first.dtype) == (np.int32, np.float32, np.int32)
        columns = np.arange(window)
        reach = (columns >= first[:, None]) & (columns < first[:, None] + window - context)
        assert not weights[~reach].any()
        assert (first + window - context <= window).all()
        assert targets[weights == 1].tolist() == at.tolist()
        scored.extend(at.tolist())
    assert scored == list(range(n))


@thorough
@given(text=TEXTS, layout=st.sampled_from(LAYOUTS), window=st.integers(2, 24), context=st.integers(0, 23), rows=st.integers(1, 5))
def test_windows_score_examples_after_their_context(text, layout, window, context, rows):
    """Each token of an example once, in its place; a row shows at most `context` tokens before the example, of the stream."""
    ids = stream(text)
    context = 0 if layout[0] in ("eos", "complete_doc") else min(context, window - 1)
    starts, lengths = examples(ids, EOS, layout[0], window - context)
    scored = []
    for batch, at in read_windows(ids, *layout, window, context, rows):
        assert len(batch.first) % rows == 0 and batch.inputs.shape[1] <= window
        np.testing.assert_array_equal(batch.targets[batch.weights > 0], ids[at])
        scored.extend(at.tolist())
        if context or batch.segments is None:
            for row, weights, first in zip(batch.targets, batch.weights, batch.first, strict=True):
                if weights.any():
                    place = at[0]
                    shown = row[: first + int(weights.sum())]
                    assert first == min(context, place) and place in starts
                    np.testing.assert_array_equal(shown, ids[place - first :][: len(shown)])
                    at = at[int(weights.sum()) :]
    assert sorted(scored) == sorted(ranges(starts, lengths).tolist())


def test_impossible_sizes_are_named():
    ids = tokens(9)
    for window, context, says in (4, 4, "window=4 must be greater than context=4"), (4, -1, "window=4 .* context=-1"):
        with pytest.raises(InputError, match=says):
            read_windows(ids, "none", "packed", window, context, 1)
    with pytest.raises(InputError, match="context=1 .* break_mode='eos' .*give context 0"):
        read_windows(ids, "eos", "packed", 4, 1, 1)
    with pytest.raises(InputError, match="rows=0 must be 1"):
        read_windows(ids, "none", "packed", 4, 1, 0)
    with pytest.raises(InputError, match="block=0 must be 1"):
        rows_of(ids, "none", "packed", block=0)
    with pytest.raises(InputError, match="0 tokens"):
        rows_of(tokens(0), "none", "packed")
    with pytest.raises(InputError, match=r"break_mode='sentence' is not one of none, complete, complete_doc, eos"):
        rows_of(ids, "sentence", "packed")
    with pytest.raises(InputError, match='rows=\'pack\' is not one of packed, similar. Did you mean "packed"'):
        rows_of(ids, "eos", "pack")
    with pytest.raises(InputError, match="seed=-1"):
        rows_of(ids, "none", "packed").batch(-1, 0)
