"""Parses the text of a compiled program: XLA's HLO after optimisation, partitioning and scheduling.

`compiled.as_text()` prints a program as computations, each a list of instructions in the order in
which they run. The entry computation calls others: a loop calls its body, a conditional its
branches, and a fusion the computation of one kernel.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

BITS = {"pred": 8, "token": 0, "opaque": 0}  # other types say their bits: f32, u8, f4e2m1fn
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_END = re.compile(r"^\}($|, )")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%([\w.\-]+) = ")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_OPERAND = re.compile(r"%([\w.\-]+)")


@dataclasses.dataclass(frozen=True)
class Array:
    """One array in the result of an instruction.

    Attributes:
        kind: The type of an element, as HLO names it, e.g. "bf16".
        shape: The shape on one device.
        space: The memory space; 0 is the device's main memory.
    """

    kind: str
    shape: tuple[int, ...]
    space: int = 0

    @property
    def size(self) -> float:
        """The number of bytes. Elements of four bits are packed."""
        return math.prod(self.shape) * element_bits(self.kind) / 8


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
    """One instruction of a computation.

    Attributes:
        name: Its name.
        opcode: Its operation, e.g. "dot" or "fusion".
        arrays: Its results, one unless the result is a tuple.
        operands: The instructions that it reads.
        literal: The text in parentheses: operands, the value of a constant or the number of a
            parameter.
        attributes: The text after the parentheses.
        is_root: Whether its result is that of the computation.
    """

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    operands: tuple["Instruction", ...] = dataclasses.field(
        repr=False
    )  # what they are made of would be shown, too
    literal: str
    attributes: str
    is_root: bool

    @property
    def size(self) -> float:
        """The bytes of all results in main memory."""
        return sum((a.size for a in self.arrays if a.space == 0), 0.0)

    def text(self, key: str) -> str:
        """Returns a quoted attribute, `key="..."` or `"key":"..."`; "" if there is none."""
        found = re.search(rf'\b{key}"?[=:]\s*"([^"]*)"', self.attributes)
        return found[1] if found else ""

    def integers(self, key: str) -> list[int]:
        """Returns an attribute with a list of integers, `key={1,2}` or `"key":["1","2"]`; [] if
        there is none.
        """
        found = re.search(rf'\b{key}"?[=:]\s*[\[{{]([\d," ]*)[\]}}]', self.attributes)
        return [int(n) for n in re.findall(r"\d+", found[1])] if found else []

    def value(self, key: str) -> str:
        """Returns an unquoted attribute `key=VALUE`, the name of a computation or a number; "" if
        there is none.
        """
        found = re.search(rf"\b{key}=%?([\w.\-]+)", self.attributes)
        return found[1] if found else ""


@dataclasses.dataclass(frozen=True, eq=False)
class Module:
    """A program.

    Attributes:
        computations: The instructions of each computation by its name, in the order in which they
            run.
        entry: The name of the computation that runs first.
    """

    computations: Mapping[str, list[Instruction]]
    entry: str

    def executed(
        self, computation: str | None = None, times: int = 1
    ) -> Iterator[tuple[Instruction, int]]:
        """Yields the instructions that run, each with the number of times.

        Of a conditional, the branch that writes most bytes is taken. A loop of unknown length
        counts as one iteration (see `unknown_loops`).

        Args:
            computation: The name of the computation. None: the entry.
            times: The number of times that the computation runs.
        """
        for step in self.computations[computation or self.entry]:
            if step.opcode == "while":
                yield from self.executed(step.value("body"), times * (self.turns(step) or 1))
            elif step.opcode == "conditional":
                branches = [list(self.executed(name, times)) for name in _branches(step)]
                yield from max(
                    branches, key=lambda branch: sum(n * inner.size for inner, n in branch)
                )
            elif step.opcode in ("call", "async-start"):
                yield from self.executed(step.value("to_apply") or step.value("calls"), times)
            else:
                yield step, times

    def turns(self, loop: Instruction) -> int | None:
        """Returns the number of iterations of a loop; None if it is unknown.

        It is the number that XLA notes, or follows from a condition `counter < constant`, where the
        counter starts at 0 as in `lax.scan`.
        """
        if known := re.search(r'"known_trip_count":\s*\{"n":\s*"(\d+)"', loop.attributes):
            return int(known[1])
        test = self.root(loop.value("condition"))
        counts = (
            test.opcode == "compare"
            and "direction=LT" in test.attributes
            and test.operands[1].opcode == "constant"
        )
        return int(test.operands[1].literal) if counts else None

    def unknown_loops(self) -> int:
        """The number of loops whose number of iterations is unknown."""
        loops = [
            step for steps in self.computations.values() for step in steps if step.opcode == "while"
        ]
        return sum(self.turns(loop) is None for loop in loops)

    def root(self, computation: str) -> Instruction:
        """Returns the instruction whose result is that of a computation, given by name."""
        return next(step for step in self.computations[computation] if step.is_root)


def parse(text: str) -> Module:
    """Parses a module from its text. Raises ValueError without an entry or for an unknown type."""
    computations: dict[str, list[str]] = {}
    entry = ""
    lines = list[str]()
    for line in text.splitlines():
        if head := _COMPUTATION.match(line):
            computations[head[2]] = lines = []
            entry = head[2] if head[1] else entry
        elif _END.match(line):
            lines = []
        elif _INSTRUCTION.match(line):
            lines.append(line)
        elif lines:  # an attribute in several lines
            lines[-1] += line
    if not entry:
        raise ValueError("HLO: no entry computation")
    return Module({name: _instructions(body) for name, body in computations.items()}, entry)


def element_bits(kind: str) -> int:
    """Returns the number of bits of an element of a type. Raises ValueError for an unknown type."""
    size = re.match(r"(?:[suf]|bf|c)(\d+)", kind)
    if kind not in BITS and size is None:
        raise ValueError(f"HLO: element type {kind!r} is not known")
    return int(size[1]) if size else BITS[kind]


def _instructions(lines: list[str]) -> list[Instruction]:
    """Parses the lines of one computation into instructions."""
    made: dict[str, Instruction] = {}
    for line in lines:
        head = _INSTRUCTION.match(line)
        assert head is not None
        rest = line[head.end() :]
        kind_end = _closing(rest) if rest.startswith("(") else rest.index(" ")
        opening = rest.index("(", kind_end)
        closing = opening + _closing(rest[opening:])
        literal = rest[opening + 1 : closing - 1]
        operands = tuple(made[name] for name in _OPERAND.findall(literal) if name in made)
        opcode = rest[kind_end:opening].strip()
        arrays = _arrays(rest[:kind_end])
        made[head[2]] = Instruction(
            head[2], opcode, arrays, operands, literal, rest[closing:], bool(head[1])
        )
    return list(made.values())


def _arrays(text: str) -> tuple[Array, ...]:
    """Parses the type of a result, one array or a tuple of arrays."""
    found = []
    for kind, dims, layout in _ARRAY.findall(text):
        space = re.search(r"S\((\d+)\)", layout)
        shape = tuple(int(n.lstrip("<=")) for n in dims.split(",") if n)
        found.append(Array(kind, shape, int(space[1]) if space else 0))
    return tuple(found)


def _closing(text: str) -> int:
    """Returns the index after the parenthesis that closes the one at the start of `text`."""
    depth = 0
    for found in re.finditer(r"[()]", text):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return found.end()
    raise ValueError(f"HLO: a parenthesis is not closed: {text[:80]!r}")


def _branches(step: Instruction) -> list[str]:
    """Returns the names of the computations that a conditional chooses from."""
    listed = re.search(r"branch_computations=\{([^}]*)\}", step.attributes)
    return (
        _OPERAND.findall(listed[1])
        if listed
        else [step.value("true_computation"), step.value("false_computation")]
    )
