"""Work ahead of a loop: the order, errors, and that no thread outlives the loop."""

import threading
import types

import pytest

from adaptive_jax.data.batches import prefetch
from adaptive_jax.data.batches.prefetch import Prefetcher


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_results_come_in_order_and_no_further_than_depth_ahead(depth, count):
    """An order that differs trains on other rows; going further ahead fills memory."""
    made = []

    def make(number):
        made.append(number)
        return number * number

    with Prefetcher(make, range(3, 3 + count), depth) as results:
        read = []
        for number, square in results:
            assert len(made) <= len(read) + 1 + depth
            read.append((number, square))
    assert read == [(k, k * k) for k in range(3, 3 + count)]
    assert made == [k for k, _ in read]


@pytest.mark.parametrize("depth", [1, 3])
def test_it_works_while_the_loop_does(depth):
    """As many as its depth are made before the loop asks for them: otherwise this would wait for
    ever.
    """
    done = {number: threading.Event() for number in range(6)}
    with Prefetcher(lambda number: done[number].set(), range(6), depth) as results:
        for number, _ in results:
            assert done[min(number + depth, 5)].wait(60)


def test_waiting_is_measured(monkeypatch):
    """A result that the loop asks for 5 seconds too early has been waited for 5, and one that
    lay ready for none.
    """
    clock, asked, ready = [0.0], threading.Event(), threading.Event()

    def look():
        asked.set()
        return clock[0]

    def make(number):
        if number == 0:
            assert asked.wait(60)
            clock[0] += 5.0
        else:
            ready.set()

    monkeypatch.setattr(prefetch, "time", types.SimpleNamespace(perf_counter=look))
    with Prefetcher(make, range(2)) as results:
        waited = []
        for _ in results:
            waited.append(results.waited)
            assert ready.wait(60)
    assert waited == [5.0, 0.0]


def test_an_error_is_raised_where_its_result_would_have_been_read():
    """Results before the error are read first, so a run saves what it may."""
    read = []
    with (
        pytest.raises(ZeroDivisionError),
        Prefetcher(lambda number: 1 / (2 - number), range(9)) as results,
    ):
        for number, _ in results:
            read.append(number)
    assert read == [0, 1]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_no_thread_outlives_the_loop(error):
    """A batch that was not begun when the loop ended is never made."""
    before, made, going = threading.active_count(), [], threading.Event()

    def make(number):
        if number:
            going.wait(60)
        made.append(number)

    with pytest.raises(error), Prefetcher(make, range(100), depth=3) as results:
        for _ in results:
            going.set()
            raise error
    assert threading.active_count() == before
    assert made[0] == 0 and len(made) <= 4
