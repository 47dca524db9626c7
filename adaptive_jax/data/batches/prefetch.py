"""Prefetching for a loop, in a background thread."""

import collections
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor


class Prefetcher:
    """Makes `make(0), make(1), ...` for the `numbers` in order, up to `depth` results ahead of the
    loop that reads them.

        with Prefetcher(batch, range(first, last + 1)) as batches:
            for number, made in batches:
                ...

    One thread makes one result at a time. The loop raises an error of `make` when it reads that
    result. The thread stops when the `with` block exits, after finishing its current result.

    Attributes:
        waited: seconds that the loop waited for the last result it read.
    """

    def __init__(self, make: Callable[[int], object], numbers: Iterable[int], depth: int = 2):
        self.make, self.numbers, self.depth, self.waited = make, iter(numbers), depth, 0.0
        self.pool, self.pending = ThreadPoolExecutor(1, "ahead"), collections.deque()

    def __enter__(self) -> "Prefetcher":
        for _ in range(self.depth):
            self._submit()
        return self

    def __iter__(self) -> Iterator[tuple[int, object]]:
        while self.pending:
            number, future = self.pending.popleft()
            start = time.perf_counter()
            batch = future.result()
            self.waited = time.perf_counter() - start
            self._submit()
            yield number, batch

    def __exit__(self, *error):
        self.pool.shutdown(cancel_futures=True)

    def _submit(self):
        for number in itertools.islice(self.numbers, 1):
            self.pending.append((number, self.pool.submit(self.make, number)))
