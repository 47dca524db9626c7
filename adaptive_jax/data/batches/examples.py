"""Examples: the parts of a split that do not see each other. Break modes have the names of
fairseq's --sample-break-mode.
"""

import numpy as np

from adaptive_jax.errors import InputError

BREAK_MODES = ("none", "complete", "complete_doc", "eos")
CHUNK_TOKENS = 1 << 22  # ids read at a time, since they may be larger than memory


def examples(
    ids: np.ndarray, eos: int, break_mode: str, longest: int
) -> tuple[np.ndarray, np.ndarray]:
    """Breaks a split into examples of 1 to `longest` tokens: returns their starts and lengths.

    ids a b . c . . d e f ., where . is <eos>, longest 5:
        none          [a b . c .] [. d e f .]      cut after every fifth token
        complete      [a b . c .] [. d e f .]      as many whole sentences as fit
        complete_doc  [a b . c .] [d e f .]        the same, but an empty line ends a document and
                                                   is dropped
        eos           [a b .] [c .] [.] [d e f .]  one sentence each

    A sentence of more than `longest` tokens becomes several examples, all but the last of `longest`
    tokens. fairseq makes one longer row of it; here, all rows have the same shape.

    Args:
        ids: int32 `[n]`, an array or anything with a length and slices.

    Returns:
        Starts and lengths, both int32 `[examples]` (starts int64 from 2^31 tokens on), in the order
        of ids.

    Raises:
        InputError: an empty split, or for complete_doc, one with empty lines only.
    """
    check_split(ids)
    index = np.dtype(np.int32 if len(ids) < 2**31 - longest else np.int64)
    if break_mode == "none":
        ends = np.append(np.arange(longest, len(ids), longest, index), index.type(len(ids)))
    else:
        ends, empty_lines = _sentences(ids, eos, index)
    starts = np.concatenate([index.type([0]), ends[:-1]])
    if break_mode in ("complete", "complete_doc"):
        separators = empty_lines if break_mode == "complete_doc" else empty_lines[:0]
        starts, ends = _merge(starts, ends, longest, separators)
    if not len(starts):
        raise InputError("the split has empty lines only: use text, or batches.break_mode=eos")
    return _split(starts, ends, longest)


def check_split(ids: np.ndarray) -> None:
    """Raises InputError for a split without tokens."""
    if not len(ids):
        raise InputError("the split has 0 tokens: use one with at least 1")


def ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Concatenates ranges: starts 5 0, counts 2 3 give 5 6 0 1 2, int64 `[sum of counts]`."""
    begins = np.cumsum(counts, dtype=np.int64) - counts
    return np.repeat(starts - begins, counts) + np.arange(np.sum(counts, dtype=np.int64))


def _sentences(ids, eos, index):
    """The ends of the sentences, and the numbers of those that consist of `<eos>` alone."""
    sentences = []
    for begin in range(0, len(ids), CHUNK_TOKENS):
        chunk = np.asarray(ids[begin : begin + CHUNK_TOKENS])
        sentences.append((begin + 1 + np.flatnonzero(chunk == eos)).astype(index))
    ends = np.concatenate(sentences)
    empty_lines = np.flatnonzero(np.diff(ends, prepend=index.type(0)) == 1).astype(index)
    if not len(ends) or ends[-1] < len(ids):  # the text does not end with `<eos>`
        ends = np.append(ends, index.type(len(ids)))
    return ends, empty_lines


def _merge(starts, ends, longest, separators):
    """Starts and ends of runs of sentences that fit, as greedily as in fairseq, without
    separators.
    """
    first = np.arange(len(starts), dtype=starts.dtype)
    # For every sentence, the number of the sentence after a run that begins with it. One sentence
    # that is too long is a run, too.
    fit = np.searchsorted(ends, starts + starts.dtype.type(longest), side="right")
    after = np.maximum(fit, first + 1)
    if len(separators):
        limits = np.append(separators, starts.dtype.type(len(starts)))
        after = np.minimum(after, limits[np.searchsorted(separators, first)])
        after[separators] = separators + 1
    walk, jump = [0], memoryview(after)  # a memoryview yields items faster than an array
    while walk[-1] < len(after):
        walk.append(jump[walk[-1]])
    walk = np.array(walk)
    keep = ~np.isin(walk[:-1], separators)
    return starts[walk[:-1][keep]], ends[walk[1:][keep] - 1]


def _split(starts, ends, longest):
    """Starts and lengths of examples after those that are too long are split."""
    lengths = ends - starts
    if lengths.max() > longest:
        pieces = -(-lengths // longest)
        number = ranges(np.zeros_like(pieces), pieces)
        starts, ends = np.repeat(starts, pieces), np.repeat(ends, pieces)
        starts = (starts + number * longest).astype(ends.dtype)
        lengths = np.minimum(ends - starts, longest)
    return starts, lengths.astype(np.int32)
