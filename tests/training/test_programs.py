"""Programs that are compiled ahead, in threads, while a run trains."""

import threading
import time

import pytest

from adaptive_jax.training.programs import AHEAD, Programs


class Lowered:
    """A program that JAX traced; its compiler waits for a signal, fails, or returns at once."""

    def __init__(self, step, signal):
        self.step, self.signal = step, signal

    def compile(self):
        if self.signal:
            assert self.signal.wait(30)
        if self.step < 0:
            raise MemoryError("no room")
        return self.step


def test_each_kind_is_compiled_once_while_the_loop_goes_on():
    """Without threads, the loop would stop at every new length of window; a program for each step
    would be compiled anew.
    """
    signal, lowered = threading.Event(), []

    def lower(step):
        lowered.append(step)
        return Lowered(step, signal)

    with Programs(lambda step: step % 3, lower) as programs:
        assert programs.begin(range(7, 5 + AHEAD)) == 3
        assert lowered == [7, 8, 9]  # and nothing waited
        assert not programs.of(8).done()
        signal.set()
        assert [programs.of(step).result() for step in (7, 8, 9, 10, 3_000)] == [7, 8, 9, 7, 9]
    assert lowered == [7, 8, 9]


def test_only_the_updates_ahead_are_looked_at():
    """A long run has millions of updates; a kind that comes later is compiled when it comes."""
    asked = []
    with Programs(lambda step: asked.append(step) or step > AHEAD, lambda s: Lowered(s, None)) as p:
        p.begin(range(1, 10**9))
        assert asked == list(range(1, AHEAD + 1))
        assert p.of(2 * AHEAD).result() == 2 * AHEAD


def test_errors_reach_the_loop_and_the_end_drops_what_waits():
    """An error of a thread that nobody reads would leave the loop waiting; a run that ends would
    first compile what no update needs.
    """
    failing = Programs(lambda step: step, lambda step: Lowered(step, None))
    with failing, pytest.raises(MemoryError, match="no room"):
        failing.of(-1).result()
    began = []

    class Slow(Lowered):
        def compile(self):
            began.append(self.step)
            time.sleep(0.05)

    with Programs(lambda step: step, lambda step: Slow(step, None)) as programs:
        programs.begin(range(500))
    assert 0 < len(began) < 500
