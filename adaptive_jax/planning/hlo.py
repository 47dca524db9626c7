"""The text of XLA's compiled programs (HLO), read into computations and instructions."""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

BITS = {
    "pred": 8,
    "token": 0,
    "opaque": 0,
    "c64": 64,
    "c128": 128,
}  # of dtypes whose name does not say it
CALLED = re.compile(
    r"(?:calls|to_apply|body|(?:branch|true|false)_computations?)=(?:\{([^}]*)\}|([%\w.\-]+))"
)
ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\]")


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

    def uses(self, name: str) -> Iterator[tuple[Instruction, int]]:
        """Instructions that read `name`, seen through bitcasts, each with the place among its
        operands.
        """
        for user in self.instructions.values():
            for place, operand in enumerate(user.operands):
                if operand == name and user.opcode == "bitcast":
                    yield from self.uses(user.name)
                elif operand == name:
                    yield user, place


def dimensions(shape: str) -> list[tuple[int, ...]]:
    """Of every array of a shape: `(f32[8,16]{1,0}, pred[])` is [(8, 16), ()]."""
    return [
        tuple(int(size.lstrip("<=")) for size in found.split(",") if size)
        for _, found in ARRAY.findall(shape)
    ]


def sizes(shape: str) -> list[int]:
    """Bytes of every array of a shape: `(f32[8,16]{1,0}, pred[])` is [512, 1]."""
    dtypes = [dtype for dtype, _ in ARRAY.findall(shape)]
    return [
        math.ceil(math.prod(each) * _bits(dtype) / 8)
        for dtype, each in zip(dtypes, dimensions(shape), strict=True)
    ]


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
