"""Loss and gradients of a full softmax, compiled for a device that need not be here, and their time
by `benchmarks.roofline`: `python -m benchmarks.full_softmax --target=h100`.

Programs are made with `ignore_index=None`: with ignored tokens the trips of the loop over chunks
depend on the data, and the counters take an unknown number of trips for one. Columns:

- `ms`, and `/ optax`: the predicted time, and its ratio to optax's of the same size.
- `products`: FLOPs of matrix products, in words x width x tokens. 6 is the least for loss and both
  gradients, 4 for the hidden states' alone (`frozen table`).
- `temp GB`: memory beside arguments and results.
- `chunks`: trips of the loop over chunks of tokens; `kernels`: launches of one run.

linear_cross_entropy is held to bounds, see `excesses`; `--grid` ends with its worst ratio.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from adaptive_jax.errors import InputError
from adaptive_jax.losses.cross_entropy import linear_cross_entropy
from adaptive_jax.planning.targets import Target, topology
from benchmarks import roofline
from benchmarks.full_softmax import Size
from benchmarks.timing import first_line, write_json

OURS, REFERENCE = "linear_cross_entropy", "optax"
CHIPS = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}  # the programs are for one chip
TILE = 128  # rows of a chunk are rounded up to it


SIZES = [
    Size(128_256, 2048, 32_768),
    Size(128_256, 4096, 32_768),
    Size(262_144, 2048, 32_768),
    Size(262_144, 4096, 8192),
    Size(128_256, 4096, 8192),
    Size(262_144, 4096, 512),
]
GRID = [
    Size(words, width, tokens)
    for words in (8000, 32_000, 128_256, 262_144)
    for width in (2048, 4096)
    for tokens in (256, 512, 2048, 8184, 8192, 32_768)
]

# Bounds of linear_cross_entropy: time, as a ratio to optax's, and temporaries where tables are long
# (where they are short, arrays of the hidden states' size count); FLOPs of products, as a ratio to
# the least.
BOUNDED_WORDS, BOUNDED_WIDTHS = (128_256, 262_144), (2048, 4096)
TIME = {"h100": 1.05, "h200": 1.05, "v5p": 1.05, "v5e": 1.12, "v6e": 1.2}  # at 8,192 tokens
TIME_OF_512 = 1.3
PRODUCTS = 1.05


class Row(NamedTuple):
    """Counts of one compiled loss with its gradients."""

    peer: str
    size: Size
    table: str  # its dtype
    frozen: bool  # the gradient of the hidden states alone
    milliseconds: float
    products: float  # FLOPs of products, in words x width x tokens
    temporary: int  # bytes beside arguments and results
    kernels: int  # launches of one run
    chunks: int  # trips of the loop over chunks of tokens
    wide: int  # float32 arrays of the table's shape that are written

    @property
    def rows(self) -> int:
        """Tokens of a chunk."""
        rows = math.ceil(self.size.tokens / self.chunks)
        return rows if self.chunks == 1 else TILE * math.ceil(rows / TILE)


def counted(peer: str, loss: Callable, size: Size, target: Target, table: str, frozen=False) -> Row:
    """Compiles a loss of bfloat16 hidden states with its gradients for a device."""
    mesh = Mesh(np.array(target.devices[:1]), ("data",), axis_types=(AxisType.Auto,))
    words, width, tokens = size
    shapes = ((tokens, width), jnp.bfloat16), ((words, width), table), ((tokens,), jnp.int32)
    sharding = NamedSharding(mesh, P())
    arguments = [jax.ShapeDtypeStruct(*shape, sharding=sharding) for shape in shapes]
    gradient = jax.value_and_grad(loss, 0 if frozen else (0, 1))
    with jax.set_mesh(mesh):
        compiled = jax.jit(gradient).lower(*arguments).compile(target.options)
    kernels = roofline.kernels(compiled.as_text())
    rates = roofline.rates_of(target.name)
    return Row(
        peer,
        size,
        table,
        frozen,
        1e3 * sum(kernel.seconds(rates) for kernel in kernels),
        sum(kernel.times * kernel.flops for kernel in kernels) / math.prod(size),
        compiled.memory_analysis().temp_size_in_bytes,
        sum(kernel.times for kernel in kernels),
        max((kernel.times for kernel in kernels if kernel.flops), default=1),
        sum(f"f32[{words},{width}]" in kernel.instruction.shape for kernel in kernels),
    )


def excesses(row: Row, reference: Row | None, target: str) -> list[str]:
    """The bounds of linear_cross_entropy that a row exceeds, in words."""
    words, width, tokens = row.size
    over, least = [], 4 if row.frozen else 6
    at_8192 = TIME[target.partition(":")[0]]
    bound = {512: TIME_OF_512, 8184: at_8192, 8192: at_8192}.get(tokens, math.inf)
    bounded = words in BOUNDED_WORDS and width in BOUNDED_WIDTHS
    if (
        bounded
        and not row.frozen
        and reference
        and row.milliseconds > bound * reference.milliseconds
    ):
        over.append(f"time > {bound:.2f}")
    if row.products > PRODUCTS * least:
        over.append(f"products > {PRODUCTS * least:.2f}")
    room = 8 * row.rows * words + 4 * words * width
    if bounded and row.temporary > room:
        over.append(f"temporaries > {room / 1e9:.2f} GB")
    if row.frozen and row.wide:
        over.append("float32 arrays of the table's shape")
    return over


TITLE = (
    f"{'words':>8} {'width':>6} {'tokens':>7}  {'peer':34} {'ms':>8} {'/ optax':>8} {'products':>9}"
    f" {'temp GB':>8} {'chunks':>7} {'kernels':>8}"
)


def line(row: Row, reference: Row | None, over: list[str]) -> str:
    """A row for the eye, beneath `TITLE`."""
    ratio = f"{row.milliseconds / reference.milliseconds:.3f}" if reference else ""
    peer = f"{row.peer}, frozen table" if row.frozen else row.peer
    return (
        f"{row.size.words:8,} {row.size.width:6,} {row.size.tokens:7,}  {peer:34}"
        f" {row.milliseconds:8.2f} {ratio:>8} {row.products:9.2f} {row.temporary / 1e9:8.2f}"
        f" {row.chunks:7,} {row.kernels:8,}{'   over: ' * bool(over)}{', '.join(over)}"
    )


def table(sizes, peers, target: Target, dtype: str, frozen: bool) -> Iterator[dict]:
    """Prints and yields a row for each size and peer, optax's first; `frozen` adds rows with the
    gradient of the hidden states alone.
    """
    print(TITLE, flush=True)
    missing = set()
    for size, alone in itertools.product(sizes, (False, True) if frozen else (False,)):
        reference = None
        for name in (REFERENCE, OURS) if alone else peers:
            if name in missing or name not in peers:
                continue
            try:
                row = counted(name, peers[name], size, target, dtype, alone)
            except Exception as error:  # whatever a compiler or a package of others raises
                print(f"{name} is passed over: {first_line(error)}", flush=True)
                missing |= {name} if isinstance(error, ModuleNotFoundError) else set()
                continue
            reference = row if name == REFERENCE else reference
            over = excesses(row, reference, target.name) if name == OURS else []
            print(line(row, reference, over), flush=True)
            numbers = row._asdict() | row.size._asdict() | {"rows": row.rows, "over": over}
            ratio = reference and row.milliseconds / reference.milliseconds
            yield numbers | {"size": None, "target": target.name, "times_optax": ratio}


def sizes_of(texts: list[str]) -> list[Size]:
    """Sizes from texts such as "128256x2048x8192".

    Raises:
        InputError: a text that is no size.
    """
    sizes = []
    for text in texts:
        numbers = text.split("x")
        if len(numbers) != 3 or not all(each.isdecimal() and int(each) for each in numbers):
            raise InputError(f"--sizes={text} must be WORDSxWIDTHxTOKENS, as 128256x2048x8192")
        sizes.append(Size(*map(int, numbers)))
    return sizes


def main(settings, peers: dict[str, Callable]) -> None:
    """Prints the table, or the grid with its worst cell, and writes the JSON."""
    jax.config.update("jax_platforms", "cpu")  # nothing runs
    sizes = sizes_of(settings.sizes) or (GRID if settings.grid else SIZES)
    loss = functools.partial(linear_cross_entropy, ignore_index=None, chunk=settings.chunk)
    rates = roofline.rates_of(settings.target)
    target = topology(CHIPS.get(settings.target, settings.target))
    names = [REFERENCE, OURS, *([] if settings.grid else peers)]
    peers = {name: peers[name] for name in names if name in peers} | {OURS: loss}
    print(
        f"{settings.target}: counted, not measured. {rates.flops / 1e12:,.0f} TFLOP/s,"
        f" {rates.bandwidth / 1e12:.2f} TB/s; hidden bfloat16, table {settings.table},"
        f" ignore_index=None; products in words x width x tokens"
    )
    rows = list(table(sizes, peers, target, settings.table, not settings.grid))
    write_json(settings.json, rows)
    ours = [row for row in rows if row["peer"] == OURS]
    if compared := [row for row in ours if row["times_optax"] and not row["frozen"]]:
        worst = max(compared, key=lambda row: row["times_optax"])
        print(
            f"worst: {worst['times_optax']:.3f} of optax at {worst['words']:,} x"
            f" {worst['width']:,}, {worst['tokens']:,} tokens"
        )
    print(f"{sum(bool(row['over']) for row in ours)} of {len(ours)} rows exceed a bound")
