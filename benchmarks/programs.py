"""What a compiled program will do, read from the compiler's text: memory, its largest arrays, and
what crosses devices.

    report(compiled)["temp_bytes"]      memory besides its arguments and results
    report(compiled)["collectives"]     calls and bytes by kind

Bytes are those of one device. A loop whose trips are only known on the device counts as one trip.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import jax

from adaptive_jax.training.compiled import memory_of

# Of dtypes whose name does not say it
BITS = {"pred": 8, "token": 0, "opaque": 0, "c64": 64, "c128": 128}
CALLED = re.compile(
    r"(?:calls|to_apply|body|(?:branch|true|false)_computations?)=(?:\{([^}]*)\}|([%\w.\-]+))"
)
ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\]")
# Instructions that make no array of their own
FREE = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "after-all",
    "add-dependency",
    "partition-id",
    "replica-id",
    "opt-barrier",
    "optimization-barrier",
}
AROUND = ("while", "call", "conditional", "async-start")  # they run others
FUSIONS = ("fusion", "fusion-start")
WRITES = ("dynamic-update-slice", "scatter")  # into an array that is there
# An array that a TPU keeps beside its cores, not in its memory
ON_CHIP = re.compile(r"\w+\[[\d,<=]*\]\{[^}]*T\([^}]*S\(1\)\}")
COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)
LONG = 256  # characters of a name


class Instruction(NamedTuple):
    """A line of the compiler's text."""

    name: str
    shape: str  # of the result; a tuple's in parentheses
    opcode: str
    operands: list[str]  # names
    attributes: str  # the rest of the line

    @property
    def bytes(self) -> int:
        """Of the result."""
        return sum(sizes(self.shape))

    @property
    def called(self) -> list[str]:
        """Names of the computations that it runs."""
        return [
            name.strip(" %")
            for groups in CALLED.findall(self.attributes)
            for name in "".join(groups).split(",")
        ]

    @property
    def source(self) -> str:
        """Where the program's author wrote it, as `jit(update)/…/blocks/attention/dot_general`;
        empty if unknown.
        """
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else ""

    @property
    def condition(self) -> str:
        """The name of the computation that tells whether a loop goes on."""
        return re.search(r"condition=%?([\w.\-]+)", self.attributes)[1]

    @property
    def kind(self) -> str:
        """The opcode; of a half of an asynchronous pair, that of the whole and its ending."""
        return self.opcode.removesuffix("-start").removesuffix("-done")


class Computation(NamedTuple):
    """Instructions by name, in order, and the name of the one that is the result."""

    instructions: dict[str, Instruction]
    root: Instruction


def sizes(shape: str) -> list[int]:
    """Bytes of every array of a shape: `(f32[8,16]{1,0}, pred[])` is [512, 1]."""
    found = []
    for dtype, dimensions in ARRAY.findall(shape):
        elements = math.prod(int(size.lstrip("<=")) for size in dimensions.split(",") if size)
        found.append(math.ceil(elements * _bits(dtype) / 8))
    return found


def _bits(dtype):
    return BITS[dtype] if dtype in BITS else int(re.search(r"\d+", dtype)[0])  # bf16, s32, f8e4m3fn


def read(text: str) -> tuple[dict[str, Computation], str]:
    """The computations of a program by name, and the name of the one that starts."""
    computations, entry, name, lines = {}, "", None, []
    for line in text.splitlines():
        if opened := re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line):
            name, lines = opened[2], []
            entry = name if opened[1] else entry
        elif line.startswith("}") and name is not None:
            root = next((one for one, is_root in lines if is_root), lines[-1][0])
            computations[name], name = Computation({one.name: one for one, _ in lines}, root), None
        elif name is not None and " = " in line:
            lines.append((_instruction(line), line.lstrip().startswith("ROOT ")))
    return computations, entry


def _instruction(line):
    name, rest = re.sub(r"/\*.*?\*/", "", line).strip().removeprefix("ROOT ").split(" = ", 1)
    end = _closing(rest, 0) + 1 if rest[0] == "(" else rest.index(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    opens = rest.index("(")
    closes = _closing(rest, opens)
    given = rest[opens + 1 : closes]
    operands = re.findall(r"%([\w.\-]+)", given) or [
        item.strip() for item in given.split(",") if item
    ]
    return Instruction(name.lstrip("%"), shape, rest[:opens], operands, rest[closes + 1 :])


def _closing(text, start):
    """The place of the parenthesis that closes the one at `start`."""
    depth = 0
    for place in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[place], 0)
        if not depth:
            return place
    return len(text)


def report(compiled: jax.stages.Compiled) -> dict:
    """What the program needs and moves on one device, for JSON.

    Returns:
        temp_bytes, state_bytes: memory of temporary values, and of the arguments; results that
            share the arguments' memory count once, and others as temporary.
        largest: the largest temporary arrays: `bytes` of one, `shape`, `count` and `source`.
        collectives: by kind, `count` and `bytes` of one run.
    """
    state, temporary = memory_of(compiled)
    program = Program(*read(compiled.as_text()))
    return {
        "temp_bytes": temporary,
        "state_bytes": state,
        "largest": program.largest(),
        "collectives": program.collectives(),
    }


class Program:
    """A compiled program, as `read` returns it, and its counts."""

    def __init__(self, computations: dict[str, Computation], entry: str):
        self.computations, self.entry = computations, entry

    def trips(self, loop: Instruction) -> int | None:
        """Of a loop that counts from 0; None if only the device knows, or for what is no loop."""
        if loop.opcode != "while":
            return None
        if found := re.search(r'known_trip_count":\{"n":"(\d+)"', loop.attributes):
            return int(found[1])
        # On a TPU only the condition says it, which compares the count with a constant.
        ends = [
            one
            for one in self._lines(loop.condition)
            if one.opcode == "constant" and one.shape.startswith("s32[]")
        ]
        return int(ends[0].operands[0]) if len(ends) == 1 else None

    def _lines(self, name):
        return self.computations[name].instructions.values() if name in self.computations else ()

    def runs(
        self, name: str | None = None, times: int = 1
    ) -> Iterator[tuple[Instruction, Computation, int]]:
        """Every instruction that is not inside a fusion, its computation, and how often one run
        of the program runs it.
        """
        for one in self._lines(name or self.entry):
            yield one, self.computations[name or self.entry], times
            if one.opcode in AROUND:
                for called in one.called:
                    yield from self.runs(called, times * (self.trips(one) or 1))

    def largest(self, most: int = 8) -> list[dict]:
        """The largest arrays in memory that the program makes, other than parts of its
        arguments; equal ones once.
        """
        found = defaultdict(list)
        for one, _, _ in self.runs():
            if one.opcode not in (
                *FREE,
                "while",
                "call",
                "conditional",
            ) and not one.opcode.endswith("-done"):
                roots = (
                    _results(self.computations[one.called[0]]) if one.opcode in FUSIONS else [one]
                )
                # What writes into an array that is there makes none.
                shapes = [root.shape for root in roots if root.opcode not in WRITES]
                for dtype, size in ARRAY.findall(ON_CHIP.sub("", " ".join(shapes))):
                    found[f"{dtype}[{size}]"].append(one.source)
        first = sorted(found, key=lambda shape: -sizes(shape)[0])[:most]
        names = {shape: Counter(filter(None, found[shape])).most_common(1) for shape in first}
        return [
            {
                "bytes": sizes(shape)[0],
                "shape": shape,
                "count": len(found[shape]),
                "source": names[shape][0][0][-LONG:] if names[shape] else "",
            }
            for shape in first
        ]

    def collectives(self) -> list[dict]:
        """By kind, how often one run of the program calls them, and with how many bytes: of the
        larger of operands and results.
        """
        counts, bytes_ = Counter(), Counter()
        for one, around, times in self.runs():
            if one.kind in COLLECTIVES and not one.opcode.endswith("-done"):
                given = sum(
                    around.instructions[operand].bytes
                    for operand in one.operands
                    if operand in around.instructions
                )
                made = one.bytes - given * (
                    one.opcode.endswith("-start") and one.bytes > given
                )  # a pair's start returns both
                counts[one.kind] += times
                bytes_[one.kind] += times * max(given, made)
        return [{"kind": kind, "count": counts[kind], "bytes": bytes_[kind]} for kind in counts]


def _results(inner, root=None):
    """The instructions whose results a fusion returns."""
    root = root or inner.root
    if root.opcode not in ("bitcast", "tuple"):
        return [root]
    return [
        result
        for operand in root.operands
        for result in _results(inner, inner.instructions[operand])
    ]
