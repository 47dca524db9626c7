"""Every token once: blocks, epochs, and windows with context."""

import json
from pathlib import Path

import numpy as np
import pytest

from adaptive_jax.data import batching
from adaptive_jax.errors import InputError

EOS = 99
TOY = json.loads((Path(__file__).parent / "fixtures" / "context_window.json").read_text())["toy"]


def tokens(n):
    return np.arange(n, dtype=np.int32)


def test_blocks_by_example():
    batch = batching.blocks(tokens(5), EOS, 2, np.array([2, 0]))
    assert batch.targets[0, 0] == 4
    assert batch.inputs[0, 0] == 3
    assert batch.targets[1].tolist() == [0, 1]
    assert batch.inputs[1].tolist() == [EOS, 0]
    assert batch.weights.tolist() == [[1, 0], [1, 1]]
    assert [x.dtype for x in batch] == [np.int32, np.int32, np.float32]


@pytest.mark.parametrize("n", [1, 5, 6, 7])
@pytest.mark.parametrize("block", [1, 3, 10])
def test_each_token_is_a_target_once_after_the_token_before_it(n, block):
    batch = batching.blocks(tokens(n), EOS, block, np.arange(-(-n // block)))
    counted = batch.weights == 1
    assert batch.targets[counted].tolist() == list(range(n))
    assert batch.inputs[counted].tolist() == [EOS, *range(n - 1)]


def test_permutation_is_a_fixed_function_of_seed_and_epoch():
    order = batching.permutation(1000, 3, 7)
    assert sorted(order.tolist()) == list(range(1000))
    assert batching.permutation(8, 1, 0).tolist() == [3, 5, 2, 7, 0, 6, 1, 4]
    others = [batching.permutation(1000, 3, 8), batching.permutation(1000, 4, 7), np.arange(1000)]
    assert all((order == other).mean() < 0.05 for other in others)
    with pytest.raises(ValueError, match="read-only"):
        order[0] = 1
    with pytest.raises(InputError, match="seed=-1"):
        batching.permutation(8, -1, 0)


@pytest.mark.parametrize("rows", [1, 3, 4, 11])
def test_epochs_lose_and_repeat_nothing_even_inside_a_batch(rows):
    ids, block = tokens(14), 4  # 4 blocks, the last half empty
    epochs = 3 * rows  # a whole number of batches
    batches = [batching.training_batch(ids, EOS, block, rows, 5, step) for step in range(epochs * 4 // rows)]
    rows_seen = [row[weights == 1] for b in batches for row, weights in zip(b.targets, b.weights, strict=True)]
    orders = []
    for epoch in range(epochs):
        of_epoch = rows_seen[4 * epoch : 4 * epoch + 4]
        assert sorted(np.concatenate(of_epoch).tolist()) == list(range(14))
        orders.append(tuple(row[0] for row in of_epoch))
    assert len(set(orders)) > 1


def test_a_batch_does_not_depend_on_the_batches_before_it():
    ids = tokens(101)
    late = batching.training_batch(ids, EOS, 7, 4, 2, 40)
    batching.permutation.cache_clear()
    for step in range(40):
        batching.training_batch(ids, EOS, 7, 4, 2, step)
    np.testing.assert_array_equal(late.targets, batching.training_batch(ids, EOS, 7, 4, 2, 40).targets)


@pytest.mark.parametrize("toy", TOY, ids=lambda toy: toy["name"])
def test_windows_score_what_the_reference_scores_with_the_same_context(toy):
    context = toy["context_window"]
    window = toy["tokens_per_sample_after_reduction"] + context
    ids = np.array(toy["stream"], np.int32)
    batches = batching.windows(ids, toy["eos"], window, context, toy["batch_size"])
    rows = [row for batch in batches for row in zip(*batch, strict=True) if row[2].any()]
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
    for inputs, targets, weights, first in batching.windows(tokens(n), EOS, window, context, rows):
        assert inputs.shape == targets.shape == weights.shape == (rows, window)
        assert (inputs.dtype, weights.dtype, first.dtype) == (np.int32, np.float32, np.int32)
        columns = np.arange(window)
        reach = (columns >= first[:, None]) & (columns < first[:, None] + window - context)
        assert not weights[~reach].any()
        assert (first + window - context <= window).all()
        scored.extend(targets[weights == 1].tolist())
    assert scored == list(range(n))


def test_impossible_sizes_are_named():
    with pytest.raises(InputError, match="window=4 must be greater than context=4"):
        next(batching.windows(tokens(9), EOS, 4, 4, 1))
    with pytest.raises(InputError, match=r"window=4 .* context=-1"):
        next(batching.windows(tokens(9), EOS, 4, -1, 1))
    with pytest.raises(InputError, match="rows=0 must be 1"):
        next(batching.windows(tokens(9), EOS, 4, 1, 0))
    with pytest.raises(InputError, match="block=0 must be 1"):
        batching.training_batch(tokens(9), EOS, 0, 1, 0, 0)
    with pytest.raises(InputError, match="0 tokens"):
        batching.training_batch(tokens(0), EOS, 4, 1, 0, 0)
