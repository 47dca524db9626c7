"""Compiles the programs of a run's updates in parallel, before the updates that need them."""

import contextlib
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor

import jax

from adaptive_jax.parallel.processors import cores

AHEAD = 1_000  # updates whose programs are compiled from the start on


class Programs(contextlib.AbstractContextManager):
    """The programs of a run's updates: one for each kind of update, such as each shape of batches.

    As many threads as there are cores compile them while the run goes on; JAX traces them in the
    calling thread. When the `with` block exits, programs that no thread has begun are dropped; the
    process waits for the others when it ends.

    Args:
        kind_of: returns the kind of an update.
        lower: traces an update of its kind.
    """

    def __init__(
        self, kind_of: Callable[[int], Hashable], lower: Callable[[int], jax.stages.Lowered]
    ):
        self.kind_of, self.lower, self.programs = kind_of, lower, {}
        self.pool = ThreadPoolExecutor(cores(), "compiler")

    def __exit__(self, *error):
        self.pool.shutdown(wait=False, cancel_futures=True)

    def begin(self, steps: range) -> int:
        """Begins to compile what the first `AHEAD` of these updates need; returns how many."""
        for step in steps[:AHEAD]:
            self.of(step)
        return len(self.programs)

    def of(self, step: int) -> Future:
        """The program of an update; its `result` waits until it is compiled.

        `result` raises what the compiler raises.
        """
        kind = self.kind_of(step)
        if kind not in self.programs:
            self.programs[kind] = self.pool.submit(self.lower(step).compile)
        return self.programs[kind]
