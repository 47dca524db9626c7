"""What a compiled program will do, read from the compiler's text: memory, bytes moved, loops and
collectives.

    report(compiled)["temp_bytes"]      memory besides its arguments and results
    report(compiled)["loops"]           loops, with the bytes that one trip moves

Bytes are those of one device. A loop whose trips are only known on the device counts as one trip.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import jax

from adaptive_jax.training.compiled import memory_of

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
# Instructions that neither read nor write memory, and those whose work is counted where it happens.
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
SLICES, WRITES = ("dynamic-slice", "slice", "gather"), ("dynamic-update-slice", "scatter")
PRODUCTS = {"dot", "convolution", "ragged-dot", "scaled-dot"}
ON_CHIP = re.compile(
    r"\w+\[[\d,<=]*\]\{[^}]*T\([^}]*S\(1\)\}"
)  # an array that a TPU keeps beside its cores, not in its memory
PRODUCT_CALLS = re.compile(r"gemm|matmul|cublas|cudnn\$conv|onednn")
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


def report(compiled: jax.stages.Compiled) -> dict:
    """What the program needs and moves on one device, for JSON.

    Returns:
        temp_bytes, state_bytes: memory of temporary values, and of the arguments; results that
            share the arguments' memory count once, and others as temporary.
        largest: the largest temporary arrays: `bytes` of one, `shape`, `count` and `source`.
        moved_bytes: read and written by all that is no matrix product and no collective, in one
            run.
        collectives: by kind, `count` and `bytes` of one run.
        loops: those of the program in the order of the bytes that they move, each with `source`,
            `trips` (None: only the device knows), `moved_bytes` of one trip, and `hoisted`: bytes
            of the largest array that every trip reads whole.
    """
    state, temporary = memory_of(compiled)
    program = Program(*read(compiled.as_text()))
    return {
        "temp_bytes": temporary,
        "state_bytes": state,
        "largest": program.largest(),
        "moved_bytes": program.moved(program.entry),
        "collectives": program.collectives(),
        "loops": program.loops(),
    }


class Program:
    """A compiled program, as `read` returns it, and its counts."""

    def __init__(self, computations: dict[str, Computation], entry: str):
        self.computations, self.entry, self._moved = computations, entry, {}

    def moved(self, name: str) -> int:
        """Bytes that a computation reads and writes outside products and collectives."""
        if name not in self._moved:
            self._moved[name] = sum(
                self._traffic(one, self.computations[name]) for one in self._lines(name)
            )
        return self._moved[name]

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

    def moved_by(self, source: str) -> int:
        """Bytes that a run of the program moves in instructions whose source has this in it."""
        moving = (
            (one, around, times)
            for one, around, times in self.runs()
            if source in one.source and one.opcode not in AROUND
        )
        return sum(times * self._traffic(one, around) for one, around, times in moving)

    def _lines(self, name):
        return self.computations[name].instructions.values() if name in self.computations else ()

    def _traffic(self, one, around):
        if (
            one.opcode in FREE
            or one.opcode.endswith(("-done", "-update"))
            or one.kind in COLLECTIVES
        ):
            return 0
        if self.is_product(one) and one.opcode not in FUSIONS:
            return 0
        if one.opcode == "custom-call" and "AllocateBuffer" in one.attributes:
            return 0
        if one.opcode == "while":
            return (self.trips(one) or 1) * self.moved(one.called[-1])
        if one.opcode == "conditional":
            return max(map(self.moved, one.called), default=0)
        if one.opcode in ("call", "async-start"):
            return sum(map(self.moved, one.called))
        if one.opcode in FUSIONS:
            inner = self.computations[one.called[0]]
            read = _read(inner)
            written = sum(_written(inner, root) for root in _results(inner))
            dots = [each for each in inner.instructions.values() if self.is_product(each)]
            own = sum(
                dot.bytes + sum(inner.instructions[name].bytes for name in dot.operands)
                for dot in dots
            )
            return max(
                0, read + written - own
            )  # of a product only what the compiler fused into it, such as a mask
        operands = [
            around.instructions[operand]
            for operand in one.operands
            if operand in around.instructions
        ]
        if one.kind in SLICES:
            return 2 * one.bytes
        if one.opcode in WRITES:
            return 2 * operands[-1 if one.opcode == "scatter" else 1].bytes
        if one.kind == "copy":
            return 2 * operands[0].bytes
        return one.bytes + sum(operand.bytes for operand in operands)

    def is_product(self, one: Instruction) -> bool:
        """Whether an instruction is a matrix product, with whatever the compiler fused into it."""
        if one.opcode == "custom-call":
            return bool(PRODUCT_CALLS.search(one.attributes.split("backend_config")[0]))
        inside = one.called if one.opcode in FUSIONS else ()
        return one.opcode in PRODUCTS or any(
            self.is_product(each) for name in inside for each in self._lines(name)
        )

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

    def products(self) -> list[tuple[int, int, int, int]]:
        """Products of two matrices, `[m, k] @ [k, n]`: m, n, k and how often one run of the
        program computes them.
        """
        found = []
        for one, around, times in self.runs():
            inside = self.computations[one.called[0]] if one.opcode in FUSIONS else around
            for each in inside.instructions.values() if inside is not around else [one]:
                result = dimensions(each.shape)[:1]
                if self.is_product(each) and len(result[0]) == 2:
                    left, right = (
                        math.prod(dimensions(inside.instructions[name].shape)[0])
                        for name in each.operands[:2]
                    )
                    found.append(
                        (*result[0], math.isqrt(left * right // math.prod(result[0])), times)
                    )
        return found

    def loops(self) -> list[dict]:
        """The loops, those that move most first; see `report`."""
        found = [
            {
                "source": one.source[-LONG:],
                "trips": self.trips(one),
                "moved_bytes": self.moved(one.called[-1]),
                "hoisted": self.hoisted(one),
                "runs": times,
            }
            for one, _, times in self.runs()
            if one.opcode == "while"
        ]
        return sorted(
            found, key=lambda loop: -loop["moved_bytes"] * (loop["trips"] or 1) * loop["runs"]
        )

    def hoisted(self, loop: Instruction) -> int:
        """Bytes of the largest array that a loop is given, never changes, and reads whole in every
        trip.

        Parameters and residuals of layers are stacked, and a trip reads its own slice of each.
        """
        body = self.computations[loop.called[-1]]
        if (
            body.root.opcode != "tuple"
        ):  # a call or a branch returns the state: what it keeps cannot be seen here
            return 0
        [state] = [one for one in body.instructions.values() if one.opcode == "parameter"]
        most = 0
        for one in body.instructions.values():
            if one.opcode == "get-tuple-element" and one.operands == [state.name]:
                place = int(re.search(r"index=(\d+)", one.attributes)[1])
                if body.root.operands[place] == one.name and not self._sliced(body, one):
                    most = max(most, one.bytes)
        return most

    def _sliced(self, body, one):
        users = [(user, place) for user, place in body.uses(one.name) if user is not body.root]
        return all(self._slices(user, place) for user, place in users)

    def _slices(self, user, place):
        if user.opcode in (*FUSIONS, "async-start") and user.called[0] in self.computations:
            inner = self.computations[user.called[0]]
            [given] = [
                each
                for each in inner.instructions.values()
                if each.opcode == "parameter" and each.operands == [str(place)]
            ]
            return all(self._slices(*use) for use in inner.uses(given.name))
        return user.kind in SLICES and place == 0


def _read(inner):
    """Bytes that a fusion reads of its parameters: what its results need of each, such as a
    slice.
    """
    needed = Counter({result.name: _elements(result) for result in _results(inner)})
    for user in reversed(inner.instructions.values()):
        mine, whole = needed[user.name], _elements(user)
        for place, name in enumerate(user.operands if mine else ()):
            if user.opcode in ("parameter", "constant"):
                continue
            each = _elements(inner.instructions[name])
            if user.opcode in SLICES and place == 0:
                more = mine
            elif user.opcode in WRITES:
                more = each if place else 0  # it writes into the first
            else:
                more = each * mine / whole if each >= whole else mine
            needed[name] = min(each, needed[name] + more)
    parameters = [one for one in inner.instructions.values() if one.opcode == "parameter"]
    return sum(round(one.bytes * needed[one.name] / max(1, _elements(one))) for one in parameters)


def _elements(one):
    return sum(map(math.prod, dimensions(one.shape)))


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


def _written(inner, result):
    """Bytes that a fusion writes of a result: of an array that it writes into, the part that
    changes.
    """
    if result.opcode in WRITES:
        return inner.instructions[result.operands[-1 if result.opcode == "scatter" else 1]].bytes
    return result.bytes
