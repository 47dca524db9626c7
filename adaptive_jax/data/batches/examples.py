"""Examples: how a split is broken into parts that do not see each other, by fairseq's names of its --sample-break-mode."""

import numpy as np

from adaptive_jax.errors import InputError, check_at_least, check_known

BREAK_MODES = ("none", "complete", "complete_doc", "eos")
PART = 1 << 22  # tokens looked at in one go: ids may be larger than memory


def examples(ids: np.ndarray, eos: int, break_mode: str, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Where the examples of a split start, and how many tokens each has, 1 to `block`.

    ids a b . c . . d e f ., where . is <eos>, block 5:
        none          [a b . c .] [. d e f .]      blocks of the stream, wherever they cut
        complete      [a b . c .] [. d e f .]      as many whole sentences as fit
        complete_doc  [a b . c .] [d e f .]        the same; a document ends at an empty line, which is left out
        eos           [a b .] [c .] [.] [d e f .]  every sentence alone

    A sentence of more than `block` tokens is cut into pieces of `block` tokens, the last of them shorter, and each is an
    example of its own, where fairseq makes one longer row: here, rows have one shape.

    Args:
        ids: int32 [n], an array or whatever has a length and can be sliced; read in parts.

    Returns:
        Starts and lengths, both int32 [examples] (int64 starts from 2^31 tokens on), in the order of ids.

    Raises:
        InputError: an unknown break_mode, an empty split, or one that has nothing but empty lines for complete_doc.
    """
    check_known(f"data.break_mode={break_mode!r}", break_mode, BREAK_MODES)
    check_at_least(1, block=block)
    if not len(ids):
        raise InputError("the split has 0 tokens; give one with at least 1")
    index = np.dtype(np.int32 if len(ids) < 2**31 - block else np.int64)
    if break_mode == "none":
        ends = np.append(np.arange(block, len(ids), block, index), index.type(len(ids)))
    else:
        ends, separators = _sentences(ids, eos, index)
    starts = np.concatenate([index.type([0]), ends[:-1]])
    if break_mode == "complete":
        starts, ends = _filled(starts, ends, block, separators[:0])
    elif break_mode == "complete_doc":
        starts, ends = _filled(starts, ends, block, separators)
        if not len(starts):
            raise InputError("the split has empty lines only; give text, or data.break_mode='eos'")
    return _cut(starts, ends, block)


def ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Runs of whole numbers, one after the other: starts 5 0, counts 2 3 give 5 6 0 1 2, int64 [sum of counts]."""
    begins = np.cumsum(counts, dtype=np.int64) - counts
    return np.repeat(starts - begins, counts) + np.arange(np.sum(counts, dtype=np.int64))


def _sentences(ids, eos, index):
    """Where each sentence ends, and the numbers of those that are an `<eos>` alone."""
    found = [
        (begin + 1 + np.flatnonzero(np.asarray(ids[begin : begin + PART]) == eos)).astype(index)
        for begin in range(0, len(ids), PART)
    ]
    ends = np.concatenate(found)
    separators = np.flatnonzero(np.diff(ends, prepend=index.type(0)) == 1).astype(index)
    # The last sentence of a text that was cut off has no <eos>.
    return np.append(ends, index.type(len(ids))) if not len(ends) or ends[-1] < len(ids) else ends, separators


def _filled(starts, ends, block, separators):
    """Starts and ends of runs of sentences that fit a block, as greedily as fairseq; no run holds a separator."""
    first = np.arange(len(starts), dtype=starts.dtype)
    # For every sentence, the number of the one after the run that would begin with it: one long sentence is a run, too.
    after = np.maximum(np.searchsorted(ends, starts + starts.dtype.type(block), side="right"), first + 1)
    if len(separators):
        limits = np.append(separators, starts.dtype.type(len(starts)))
        after = np.minimum(after, limits[np.searchsorted(separators, first)])
        after[separators] = separators + 1
    walk, jump = [0], memoryview(after)  # whose items come faster than an array's
    while walk[-1] < len(after):
        walk.append(jump[walk[-1]])
    walk = np.array(walk)
    runs = ~np.isin(walk[:-1], separators)
    return starts[walk[:-1][runs]], ends[walk[1:][runs] - 1]


def _cut(starts, ends, block):
    """Starts and lengths of examples, those that are too long in pieces."""
    lengths = ends - starts
    if lengths.max() > block:
        pieces = -(-lengths // block)
        number = ranges(np.zeros_like(pieces), pieces)
        starts, ends = np.repeat(starts, pieces), np.repeat(ends, pieces)
        starts = (starts + number * block).astype(ends.dtype)
        lengths = np.minimum(ends - starts, block)
    return starts, lengths.astype(np.int32)
