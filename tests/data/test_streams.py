"""Streams: rows that continue from update to update, for training and for evaluation."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptive_jax.data.batches import streams
from adaptive_jax.data.batches.layouts import check_layout
from adaptive_jax.data.batches.pipeline import Layout, TrainingBatches
from adaptive_jax.data.batches.windows import Windows, windows
from adaptive_jax.numerics.batch import Batch
from tests import refuses

EOS = 99
thorough = settings(max_examples=25)


def batches_of(count, length, rows, microbatches=1):
    """Batches of a split whose token k is k + 100."""
    return TrainingBatches(
        np.arange(100, 100 + count, dtype=np.int32),
        EOS,
        Layout(length, "none", "streams"),
        rows,
        microbatches,
    )


def test_rows_that_microbatches_do_not_divide():
    """The fourth row is empty; its reset was missing, an error of NumPy."""
    batch = batches_of(10, 4, rows=3, microbatches=2).batch(0, 0)
    assert batch.reset.shape == (2, 2) and batch.reset.all()
    assert not batch.weights[1, 1].any()


def together(batches, seed, steps):
    """The rows' targets and inputs over so many updates, `[rows, tokens]` without padding, by
    epoch.
    """
    epochs = []
    for step in range(steps):
        batch = Batch(
            *(None if a is None else a.reshape(-1, *a.shape[2:]) for a in batches.batch(seed, step))
        )
        np.testing.assert_array_equal(batch.row_ids, np.arange(len(batch.inputs)))
        assert batch.reset.dtype == bool
        assert batch.reset.all() or not batch.reset.any()
        if batch.reset[0]:
            epochs.append([])
        used = batch.weights[0] > 0
        assert (batch.weights == used).all()
        assert used[: used.sum()].all()
        epochs[-1].append((batch.targets[:, used], batch.inputs[:, used], len(used)))
    return [
        [np.concatenate(parts, axis=1) for parts in list(zip(*epoch, strict=True))[:2]]
        for epoch in epochs
    ], epochs


@thorough
@given(
    count=st.integers(1, 900),
    length=st.integers(1, 80),
    rows=st.integers(1, 6),
    seed=st.integers(0, 2**32),
)
def test_rows_continue_through_the_whole_split(count, length, rows, seed):
    """Every epoch reads every row once, in order, each token after the one before it; fewer
    tokens than rows are left out.
    """
    if count < rows:
        with refuses(f"{count} tokens", f"{rows} rows"):
            batches_of(count, length, rows)
        return
    batches = batches_of(count, length, rows)
    columns = count // rows
    expected = 100 + np.arange(rows * columns).reshape(rows, columns)
    whole, parts = together(batches, seed, 2 * (columns // min(5, length) + 1))
    for targets, inputs in whole[:-1]:
        np.testing.assert_array_equal(targets, expected)
        np.testing.assert_array_equal(inputs, np.where(expected == 100, EOS, expected - 1))
    assert len(whole) > 1
    assert {time for epoch in parts for *_, time in epoch} <= set(
        streams.round_lengths(length, np.arange(4 * length + 40))
    )


def test_a_batch_is_a_function_of_seed_and_step():
    """Walking there or asking at once, in one microbatch or three, on one host or two: the same
    windows; another seed, others.
    """
    walked, late, parts = (
        batches_of(5_000, 20, 6),
        batches_of(5_000, 20, 6),
        batches_of(5_000, 20, 6, microbatches=3),
    )
    all_ = [walked.batch(3, step) for step in range(130)]
    assert sum(batch.reset.all() for batch in all_) > 2
    for step in 129, 41, 0:
        hosts = [parts.batch(3, step, (host, 2)) for host in range(2)]
        for ours, whole in zip(late.batch(3, step), all_[step], strict=True):
            np.testing.assert_array_equal(ours, whole)
        for field in "inputs", "targets", "weights", "row_ids", "reset":
            joined = np.concatenate([getattr(host, field) for host in hosts], axis=1)
            np.testing.assert_array_equal(
                joined.reshape(getattr(all_[step], field)[0].shape), getattr(all_[step], field)[0]
            )
    lengths = [
        [b.inputs.shape[-1] for b in (late.batch(seed, step) for step in range(40))]
        for seed in (3, 4)
    ]
    assert lengths[0] != lengths[1]


def test_lengths_are_drawn_as_published_and_rounded():
    """Rounding to 10 lengths keeps the mean and moves the deviation a little; half of the
    length comes once in twenty.
    """
    source = np.random.Philox(key=np.array([1, 2], np.uint64))
    rounded = streams.draw(70, source, 200_000)
    generator = np.random.default_rng(0)
    exact = streams.bptt_lengths(70, generator.random(200_000), generator.standard_normal(200_000))
    assert abs((rounded < 52).mean() - 0.05) < 2e-3
    assert abs(rounded.mean() - exact.mean()) < 0.1
    assert abs(exact.mean() - 67.75) < 0.1
    assert [round(lengths[lengths > 52].std(), 1) for lengths in (exact, rounded)] == [5.0, 5.4]
    assert set(rounded) <= set(range(14, 99, 7))
    assert np.isin(rounded, (63, 70, 77)).mean() > 0.91


@thorough
@given(base=st.integers(3, 600))
def test_few_lengths_are_compiled(base):
    """The sequence length is one of them; none is below 5, or below a shorter one."""
    lengths = streams.draw(base, np.random.Philox(1), 50_000)
    assert base in lengths
    assert lengths.min() >= min(5, base)
    assert len(set(lengths)) <= 14
    np.testing.assert_array_equal(streams.round_lengths(base, np.array([base])), [base])


@thorough
@given(
    count=st.integers(1, 300),
    window=st.integers(1, 40),
    rows=st.integers(1, 8),
    multiple=st.integers(1, 4),
    context=st.integers(0, 50),
)
def test_evaluation_reads_each_token_once_and_on(count, window, rows, multiple, context):
    """Every token once; row r's windows follow each other; the first window of all resets; rows are
    filled up for devices.

    Every row but the first reads `context` tokens before those that it scores.
    """
    ids, context = np.arange(100, 100 + count, dtype=np.int32), context if rows > 1 else 0
    number, batches = windows(ids, EOS, Windows(window, context, "none", "streams", rows, multiple))
    batches = list(batches)
    assert len(batches) == number
    at = np.concatenate([at for _, at in batches])
    assert sorted(at) == list(range(count))
    read, scored = {}, {}
    for i, (shown, at) in enumerate(batches):
        batch = shown.batch
        assert len(batch.inputs) % multiple == 0
        assert (batch.reset == (i == 0)).all()
        counted = batch.weights > 0
        np.testing.assert_array_equal(batch.targets[counted], ids[at])
        for row, targets in enumerate(
            batch.targets
        ):  # what fills up is EOS, which the split has not
            read.setdefault(row, []).extend(batch.inputs[row, targets != EOS])
            scored.setdefault(row, []).extend(targets[counted[row]])
    assert sum(map(bool, scored.values())) <= min(rows, count)
    for row, inputs in read.items():
        np.testing.assert_array_equal(np.diff(inputs[1:]), 1)
        if scored[row]:
            assert inputs[0] == (EOS if row == 0 else scored[row][0] - 1 - context)
            np.testing.assert_array_equal(np.diff(scored[row]), 1)


def test_settings_that_streams_refuse():
    """Settings that streams would ignore are refused."""
    with refuses("batches.break_mode='eos'", "none"):
        check_layout("eos", "streams")
    with refuses("context=3", "batches.layout='streams'", "--rows=2"):
        windows(np.arange(9), EOS, Windows(4, 3, "none", "streams", 1))
    with refuses("window=0", "context=0"):
        windows(np.arange(9), EOS, Windows(0, 0, "none", "streams", 1))
    with refuses("0 tokens"):
        windows(np.arange(0), EOS, Windows(4, 0, "none", "streams", 1))
