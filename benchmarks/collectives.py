"""The collectives of a compiled program: how many run, and the bytes of one device.

They are read from the compiler's text. A loop whose trip count only the device knows counts as one
trip.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import jax

COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)
CALLERS = ("while", "call", "conditional", "async-start")  # instructions that run computations
COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) .*\{$")
INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)")
CALLED = re.compile(
    r"(?:calls|to_apply|body|(?:branch|true|false)_computations?)=(?:\{([^}]*)\}|([%\w.\-]+))"
)
ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\]")


class Instruction(NamedTuple):
    """A line of the compiler's text: a name, the shape of its result, its opcode, and all that
    follows.
    """

    name: str
    shape: str
    opcode: str
    rest: str

    @property
    def operands(self) -> str:
        """The text between the parentheses after the opcode."""
        return re.split(r"\)(?:, |$)", self.rest)[0]

    @property
    def inputs(self) -> list[str]:
        """Names of the instructions whose results it takes."""
        return re.findall(r"%([\w.\-]+)", self.operands)

    @property
    def called(self) -> list[str]:
        """Names of the computations that it runs."""
        names = ",".join("".join(groups) for groups in CALLED.findall(self.rest))
        return [name.strip(" %") for name in names.split(",") if name]


class Program:
    """A compiled program.

    Attributes:
        computations: by name, their instructions in order.
        entry: the name of the one that starts.
        by_name: every instruction of the program.
    """

    def __init__(self, text: str):
        self.computations, self.entry, self.by_name = {}, "", {}
        for line in text.splitlines():
            if opened := COMPUTATION.match(line):
                inside = self.computations[opened[2]] = []
                self.entry = opened[2] if opened[1] else self.entry
            elif match := INSTRUCTION.match(re.sub(r"/\*.*?\*/", "", line)):
                inside.append(Instruction(*match.groups()))
                self.by_name[match[1]] = inside[-1]

    def runs(self, name: str = "", times: int = 1) -> Iterator[tuple[Instruction, int]]:
        """Every instruction that is not inside a fusion, and how often one run of the program,
        or of a computation, runs it.
        """
        for one in self.computations.get(name or self.entry, ()):
            yield one, times
            if one.opcode in CALLERS:
                for called in one.called:
                    yield from self.runs(called, times * trips(one, self.computations))


def collectives(compiled: jax.stages.Compiled) -> list[dict]:
    """By kind: how many collectives one run of the program calls, `count`, and their `bytes`, which
    are those of the operands or of the results, whichever are more.
    """
    return count(compiled.as_text())


def count(text: str) -> list[dict]:
    """`collectives` of a program's text."""
    program, calls, moved = Program(text), Counter(), Counter()
    for one, times in program.runs():
        kind = one.opcode.removesuffix("-start")
        if kind in COLLECTIVES:
            calls[kind] += times
            moved[kind] += times * exchanged(one, program)
    return [{"kind": kind, "count": calls[kind], "bytes": moved[kind]} for kind in calls]


def exchanged(one: Instruction, program: Program) -> int:
    """Bytes of the operands or of the results of a collective, whichever are more."""
    names = [name for name in one.inputs if name in program.by_name]
    given, made = sum(size(program.by_name[name].shape) for name in names), size(one.shape)
    if one.opcode.endswith("-start") and made > given:  # a start returns its operands, too
        made -= given
    return max(given, made)


def size(shape: str) -> int:
    """Bytes of all arrays of a shape: `(f32[8,16]{1,0}, pred[])` has 513."""
    total = 0
    for dtype, dimensions in ARRAY.findall(shape):
        elements = math.prod(int(each.lstrip("<=")) for each in dimensions.split(",") if each)
        bits = 8 if dtype == "pred" else int((re.findall(r"\d+", dtype) or [0])[0])  # f8e4m3fn
        total += math.ceil(elements * bits / 8)
    return total


def trips(loop: Instruction, computations: dict[str, list[Instruction]]) -> int:
    """Trips of a loop that counts from 0; 1 if only the device knows, or if it is none."""
    if loop.opcode != "while":
        return 1
    if known := re.search(r'known_trip_count":\{"n":"(\d+)"', loop.rest):
        return int(known[1])
    # On a TPU only the condition says it, which compares the counter with a constant.
    condition = re.search(r"condition=%?([\w.\-]+)", loop.rest)[1]
    ends = [
        int(one.operands)
        for one in computations.get(condition, ())
        if one.opcode == "constant" and one.shape.startswith("s32[]")
    ]
    return ends[0] if len(ends) == 1 else 1
