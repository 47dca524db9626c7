"""Times of several peers in one process, for ratios that a busy machine leaves alone."""

import statistics
import time
from collections.abc import Callable


def interleaved(peers: dict[str, Callable], repeats: int, runs: int = 1) -> dict[str, tuple[float, float]]:
    """Median and least seconds of a run of each peer, a function that ends when its work has.

    Peers take turns, `repeats` times, so that all meet the same disturbances. In its turn each is run once untimed, to take back
    the memory and the cache that the peer before had, and then `runs` times in one go, whose mean is one time.
    """
    seconds = {name: [] for name in peers}
    for run in peers.values():
        run()
    for _ in range(repeats):
        for name, run in peers.items():
            time.sleep(0.3)  # the threads of the peer before may spin for a while, waiting for more work
            run()
            start = time.perf_counter()
            for _ in range(runs):
                run()
            seconds[name].append((time.perf_counter() - start) / runs)
    return {name: (statistics.median(times), min(times)) for name, times in seconds.items()}
