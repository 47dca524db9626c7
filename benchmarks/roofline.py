"""The time of a compiled program by the roofline model, for a device that need not be here.

Each kernel takes the longer of its FLOPs at the device's peak and its bytes at the device's
bandwidth (Williams et al. 2009), and kernels run one after another. FLOPs are those of matrix
products, read from the compiler's text; bytes are those of `benchmarks.traffic`. Nothing is timed.
Launches, caches and the choice among kernels for products are left out, and so are the FLOPs of
custom kernels (Pallas, Triton) and of elementwise operations. A loop whose trips only the device
knows counts as one trip.
"""

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from adaptive_jax.errors import check_known
from adaptive_jax.numerics.devices import DEVICES
from benchmarks import traffic
from benchmarks.collectives import ARRAY, CALLERS, Instruction, Program

TPU_SHARE = 0.9  # of the data sheet's peak and bandwidth, assumed


class Rates(NamedTuple):
    """Attainable speeds of a device."""

    flops: float  # of bfloat16 products, per second
    bandwidth: float  # bytes per second


# H100: a product of 8192 x 8192 x 8192 and a copy, measured on one. H200: the same cores, and the
# same share of its bandwidth, rounded down.
RATES = {"h100": Rates(798e12, 3.0e12), "h200": Rates(798e12, 4.0e12)} | {
    name: Rates(TPU_SHARE * DEVICES[name].flops, TPU_SHARE * DEVICES[name].bandwidth)
    for name in ("v5e", "v5p", "v6e")
}


class Kernel(NamedTuple):
    """An instruction of a compiled program that computes or moves something."""

    instruction: Instruction
    times: int  # that one run of the program runs it
    flops: int  # of products, each time
    bytes: int  # read and written in memory, each time

    def seconds(self, rates: Rates) -> float:
        """Time of all its runs."""
        return self.times * max(self.flops / rates.flops, self.bytes / rates.bandwidth)


def rates_of(target: str) -> Rates:
    """The rates of a target as `adaptive_jax.planning.targets` names it, such as "v5e:2x2".

    Raises:
        InputError: a device without rates.
    """
    kind = target.partition(":")[0]
    check_known(f"--target={target}", kind, RATES)
    return RATES[kind]


def kernels(text: str) -> list[Kernel]:
    """The kernels of a program's text, in order."""
    program = Program(text)
    every = (
        Kernel(one, times, flops(one, program.by_name, program), traffic.traffic(one, program))
        for one, times in program.runs()
        if one.opcode not in CALLERS
    )
    return [kernel for kernel in every if kernel.flops or kernel.bytes]


def flops(one: Instruction, operands: Mapping[str, Instruction], program: Program) -> int:
    """FLOPs of the products of an instruction, 2 for each multiplication and addition.

    operands: by name, instructions of the computation that it stands in.
    """
    if one.opcode in ("fusion", "fusion-start"):
        inner = program.computations[one.called[0]]
        by_name = {each.name: each for each in inner}
        return sum(flops(each, by_name, program) for each in inner)
    if one.opcode == "dot":
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", one.rest)[1]
    elif one.opcode == "convolution":
        return 2 * math.prod(_dimensions(one.shape)) * _terms(one, operands)
    elif one.opcode == "custom-call" and (
        match := re.search(r'"lhs_contracting_dimensions":\[([\d",]*)\]', one.rest)
    ):
        contracted = match[1].replace('"', "")
    else:
        return 0
    left = _dimensions(operands[one.inputs[0]].shape)
    terms = math.prod(left[int(dimension)] for dimension in contracted.split(",") if dimension)
    return 2 * math.prod(_dimensions(one.shape)) * terms


def _terms(one, operands):
    """Products that a convolution adds up for each number of its result: a TPU's matrix product is
    a convolution, with a window if it has several contracted dimensions. A batch of products has a
    window over the batch, too, with all but one entry of it between the dilated inputs.
    """
    kernel = re.search(r"dim_labels=\w+_(\w+)->", one.rest)[1]
    channels = _dimensions(operands[one.inputs[1]].shape)[kernel.index("i")]
    window = re.search(r"window=\{([^}]*)\}", one.rest)
    settings = dict(pair.split("=") for pair in window[1].split()) if window else {}
    sizes = [int(size) for size in settings.get("size", "1").split("x")]
    dilations = [int(n) for n in settings.get("lhs_dilate", "x".join("1" * len(sizes))).split("x")]
    hits = (max(1, size // dilation) for size, dilation in zip(sizes, dilations, strict=True))
    return channels * math.prod(hits)


def _dimensions(shape):
    """Sizes of the first array of a shape."""
    return [int(size.lstrip("<=")) for size in ARRAY.search(shape)[2].split(",") if size]
