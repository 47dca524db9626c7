"""Tokens of a chunk and words of a tile, for each softmax and each kind of device.

A chunk of n tokens through a table of V words and width d computes 6 n V d FLOPs: logits, the
gradient of the hidden states and that of the table. Adding the table's gradient to its float32 sum
reads and writes 4 bytes for each of V d numbers. That product alone, 2 n V d FLOPs, takes as long
as its traffic at

    n0 = 4 · peak / bandwidth

tokens: 1,180 on an H100 by its data sheet, 961 on a TPU v5e, 663 on a v5p, 2,239 on a v6e. So on
accelerators chunks have n0 to 2 n0 tokens, and more if that is less than 2^26 logits; up to 4 n0
tokens are one chunk, without a loop or a sum. Of the numbers of chunks in this range, the plan
takes the one with the fewest empty rows, then the smallest. The rule is counted from compiled
programs, not measured (benchmarks/counted_softmax.py). Chunks are smaller if their logits would
take more than a quarter of the device's memory. If not even `LEAST_TOKENS` fit, logits are computed
twice instead of kept, 8 n V d FLOPs, one tile of words at a time.

On CPUs the numbers are measured (benchmarks/outputs.py, benchmarks/full_softmax.py). A chunk has at
most 2^25 float32 logits, 128 MiB, or a quarter of the table's size, if that is more. A long table
is visited one tile of words at a time, because the gradient of a whole chunk would be as large as
the sum it is added to. If fewer than 80 tokens of a long table would fit, chunks keep their size
and logits are computed twice. In bfloat16, whose products need row-major operands, tiles are
transposed once per chunk, and a table whose logits are kept is not divided into tiles: with AMX
that takes half the time or less.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from adaptive_jax.numerics import devices
from adaptive_jax.numerics.devices import Device
from adaptive_jax.numerics.platforms import device_kind, platform

# On a CPU the products of the head, which every token visits, need many rows for full speed. A tail
# has smaller chunks, because its last chunk is computed whole.
HEAD_CHUNK, TAIL_CHUNK = 512, 96
CHUNK_LOGITS = 2**25
TABLE_SHARE = 4
LONG = 2**25  # smallest size of a long table: 128 MiB in float32
LEAST_KEPT = 80  # with fewer tokens per chunk, logits are computed twice
TILE_LOGITS = 2**22

# On accelerators. A tail of 800 tokens loses least to sums and to the empty rows of its last chunk
# at sqrt(2 · 800 · 240) = 620 rows.
FAST_TAIL_CHUNK = 512
FAST_HEAD_CHUNK, FAST_LOGITS = 4096, 2**26  # of short tables
FAST_TILE_LOGITS = 2**26
UNLISTED = Device("", flops=256.0, memory=16e9, bandwidth=1.0)  # n0 is 1,024
MEMORY_SHARE = 4
LEAST_TOKENS = 400
TILE = 128  # rows and columns of a matrix unit


class Plan(NamedTuple):
    """Work sizes of one softmax."""

    tokens: int  # of a chunk, at most
    words: int | None = None  # of a tile; None: all words are one tile
    keeps_logits: bool = True  # of all tiles of a chunk; else they are computed twice


def plan(
    index: int, sizes: Sequence[int], width: int, tokens: int, itemsize: int = 4, chunk=None
) -> Plan:
    """The plan of a group of bands; group 0 is the head, which all tokens visit.

    On a CPU 262,144 words of width 512 have chunks of 128 tokens and tiles of 8,192 words; 10
    million words of width 64 have chunks of 512 tokens, whose logits are computed twice. On an H100
    8,192 tokens are four chunks of 2,048 for all tables of up to 1.7 million words.

    Args:
        sizes, width: rows of each band, and the width of their tables.
        tokens: the largest number of tokens that may visit the group.
        itemsize: bytes per number of the hidden states.
        chunk: tokens of a chunk, if the caller sets them; None: chosen here.
    """
    words, on_device = max(1, *sizes), _on_cpu if platform() == "cpu" else _on_accelerator
    result = on_device(index, words, width, chunk or tokens, itemsize)
    rows = chunk or result.tokens
    if len(sizes) > 1 and not chunk:
        # Twice a band's share of the tokens: bands of a group are similar, and never long.
        share = max(8, 2 ** math.ceil(math.log2(2 * tokens / len(sizes))))
        rows = min(chunk_size(index, words, width), share)
    return result._replace(tokens=min(tokens, rows))


def _on_cpu(index, words, width, tokens, itemsize):
    rows, tile = chunk_size(index, words, width), None
    keeps_logits = rows >= LEAST_KEPT
    if words * width >= LONG and not (keeps_logits and itemsize == 2):
        rows = rows if keeps_logits else (TAIL_CHUNK if index else HEAD_CHUNK)
        tile = max(TILE_LOGITS // max(rows, width) // TILE, 1) * TILE
    return Plan(rows, tile, keeps_logits or tile is None)


def _on_accelerator(index, words, width, tokens, itemsize):
    device = devices.find(device_kind()) or UNLISTED
    fit = int(device.memory / MEMORY_SHARE / (words * (4 + itemsize)))
    if fit < LEAST_TOKENS and words * width >= LONG:
        rows = even_rows(tokens, FAST_TAIL_CHUNK if index else FAST_HEAD_CHUNK)
        tile = max(FAST_TILE_LOGITS // max(rows, width) // TILE, 1) * TILE
        return Plan(rows, tile, False)
    fit = fit // TILE * TILE or max(8, fit)
    if index:
        return Plan(min(FAST_TAIL_CHUNK, fit))
    least = math.ceil(4 * device.flops / device.bandwidth)
    of_short = min(FAST_HEAD_CHUNK, FAST_LOGITS // words)
    if tokens <= min(max(4 * least, of_short), fit):
        return Plan(tokens)
    fewest = math.ceil(tokens / min(max(2 * least, of_short), fit))
    counts = range(fewest, max(tokens // least, fewest) + 1)
    choices = {even_rows(tokens, math.ceil(tokens / count)) for count in counts}
    return Plan(min(choices, key=lambda rows: (math.ceil(tokens / rows) * rows, -rows)))


def chunk_size(index: int, words: int, width: int) -> int:
    """The largest number of tokens of a chunk of a band; band 0 is the head.

    On a CPU 512 for a head of 20,000 words, 96 for a tail.
    """
    if platform() == "cpu":
        fit = max(CHUNK_LOGITS // words, width // TABLE_SHARE)
        return max(8, min(TAIL_CHUNK if index else HEAD_CHUNK, fit))
    rows = min(FAST_TAIL_CHUNK if index else FAST_HEAD_CHUNK, FAST_LOGITS // words)
    return rows // TILE * TILE or max(8, rows)


def even_rows(tokens: int, most: int) -> int:
    """Rows of each chunk that divides `tokens` into chunks of at most `most` rows.

    On a CPU `most`, or all tokens if they are fewer. On an accelerator as few chunks as possible
    share the tokens evenly, in whole tiles of 128: with 4,096 tokens and at most 3,328 rows, two
    chunks have 2,048 rows each.
    """
    if platform() == "cpu" or tokens <= most:
        return min(tokens, most)
    share = math.ceil(tokens / math.ceil(tokens / most))
    return math.ceil(share / TILE) * TILE
