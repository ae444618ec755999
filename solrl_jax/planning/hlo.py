"""Parses the text of a compiled program: XLA's HLO after optimization, partitioning and scheduling.

`compiled.as_text()` prints a program as computations, each a list of instructions in the order in
which they run. The entry computation calls others: a loop calls its body, a conditional its
branches, and a fusion the computation of one kernel.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

# The bits of the types whose names do not contain a number of bits. (f32, u8 and f4e2m1fn do.)
BITS = {"pred": 8, "token": 0, "opaque": 0}
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_END = re.compile(r"^\}($|, )")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%([\w.\-]+) = ")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_OPERAND = re.compile(r"%([\w.\-]+)")


@dataclasses.dataclass(frozen=True)
class ResultArray:
    """One array in the result of an instruction.

    Attributes:
        kind: The type of an element, as HLO names it, e.g. "bf16".
        shape: The shape on one device.
        space: The number of the memory space of the array. 0 is the device's main memory. Others
            are faster on-chip memories, or host memory.
    """

    kind: str
    shape: tuple[int, ...]
    space: int = 0

    @property
    def size(self) -> float:
        """The number of bytes on one device. Two elements of four bits take one byte, so the number
        may be a fraction.

        Raises:
            ValueError: If `kind` is not a type of HLO.
        """
        return math.prod(self.shape) * element_bits(self.kind) / 8


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
    """One instruction of a compiled program.

    It is one line of the text of the program. For example, `%add.1 = f32[8] add(%a, %b),
    metadata={op_name="jit(f)/add"}` has the name "add.1", the opcode "add", one array, two
    operands, the literal "%a, %b", and the attributes `, metadata={op_name="jit(f)/add"}`.

    Attributes:
        name: Its name, without the leading "%".
        opcode: Its operation, e.g. "dot" or "fusion".
        arrays: The types and shapes of its results: one, or any number if it returns a tuple.
        operands: The instructions whose results it reads.
        literal: The text between the parentheses: the operands, the value of a constant, or the
            number of a parameter.
        attributes: The text after the parentheses.
        is_root: Whether its result is the result of its computation.
    """

    name: str
    opcode: str
    arrays: tuple[ResultArray, ...]
    # Without repr=False, their operands would be printed, too.
    operands: tuple["Instruction", ...] = dataclasses.field(repr=False)
    literal: str
    attributes: str
    is_root: bool

    @property
    def size(self) -> float:
        """The bytes of all results in main memory (space 0). Other memory spaces do not count."""
        return sum((a.size for a in self.arrays if a.space == 0), 0.0)

    def text(self, key: str) -> str:
        """Returns the value of a quoted attribute, `key="..."` or `"key":"..."`.

        Args:
            key: The name of the attribute. The first occurrence counts.

        Returns:
            The text between the quotes; "" if there is no such attribute.
        """
        match = re.search(rf'\b{key}"?[=:]\s*"([^"]*)"', self.attributes)
        return match[1] if match else ""

    def integers(self, key: str) -> list[int]:
        """Returns the value of an attribute that is a list of integers, `key={1,2}` or
        `"key":["1","2"]`.

        Args:
            key: The name of the attribute. The first occurrence counts.

        Returns:
            The integers in their order; [] if there is no such attribute.
        """
        match = re.search(rf'\b{key}"?[=:]\s*[\[{{]([\d," ]*)[\]}}]', self.attributes)
        return [int(n) for n in re.findall(r"\d+", match[1])] if match else []

    def value(self, key: str) -> str:
        """Returns the value of an unquoted attribute `key=VALUE`, the name of a computation or a
        number.

        Args:
            key: The name of the attribute. The first occurrence counts.

        Returns:
            The text, without the leading "%" of a name; "" if there is no such attribute.
        """
        match = re.search(rf"\b{key}=%?([\w.\-]+)", self.attributes)
        return match[1] if match else ""


@dataclasses.dataclass(frozen=True, eq=False)
class Module:
    """A compiled program as a set of computations, which are lists of instructions.

    Attributes:
        computations: The instructions of each computation in the order in which they run, by the
            name of the computation. Loops, branches and fusions have computations of their own.
        entry: The name of the computation that the program starts with.
    """

    computations: Mapping[str, list[Instruction]]
    entry: str

    def executed(
        self, computation: str | None = None, times: int = 1
    ) -> Iterator[tuple[Instruction, int]]:
        """Yields each instruction that runs, in order, with its number of runs.

        Loops, conditionals and calls (also asynchronous ones) are replaced by the instructions in
        them. The instructions of a loop's body, but not of its condition, are yielded once, with
        the number of iterations (in nested loops, the product). They are left out if this number is
        0, and a loop whose number of iterations is unknown counts as one iteration. For a
        conditional, the branch that writes most bytes is used. A fusion is yielded as one
        instruction.

        Args:
            computation: The name of the computation to start with. None: the whole program.
            times: The number of runs of that computation. All numbers are multiplied by it.

        Yields:
            Pairs of an instruction and its number of runs.
        """
        for step in self.computations[computation or self.entry]:
            if step.opcode == "while":
                turns = self.trip_count(step)
                if turns is None or turns > 0:
                    yield from self.executed(step.value("body"), times * (turns or 1))
            elif step.opcode == "conditional":
                branches = [list(self.executed(name, times)) for name in _branches(step)]
                yield from max(
                    branches, key=lambda branch: sum(n * inner.size for inner, n in branch)
                )
            elif step.opcode in ("call", "async-start"):
                yield from self.executed(step.value("to_apply") or step.value("calls"), times)
            else:
                yield step, times

    def trip_count(self, loop: Instruction) -> int | None:
        """Returns the number of iterations of a loop, or None if it is unknown.

        It is known if XLA states it (`known_trip_count`), or if the loop runs while a counter is
        below a constant, as the loops of `lax.scan` do. The counter is assumed to rise from 0 by 1.

        Args:
            loop: An instruction with the opcode "while".
        """
        if count := re.search(r'"known_trip_count":\s*\{"n":\s*"(\d+)"', loop.attributes):
            return int(count[1])
        test = self.root(loop.value("condition"))
        counts = (
            test.opcode == "compare"
            and "direction=LT" in test.attributes
            and test.operands[1].opcode == "constant"
        )
        return int(test.operands[1].literal) if counts else None

    def unknown_loops(self) -> int:
        """Returns how many loops in all computations, run or not, have no known `trip_count`."""
        loops = [
            step for steps in self.computations.values() for step in steps if step.opcode == "while"
        ]
        return sum(self.trip_count(loop) is None for loop in loops)

    def root(self, computation: str) -> Instruction:
        """Returns the instruction whose result is the result of a computation.

        Args:
            computation: The name of the computation, a key of `computations`.
        """
        return next(step for step in self.computations[computation] if step.is_root)


def parse(text: str) -> Module:
    """Parses the text of a compiled program.

    Args:
        text: The text that `as_text()` of a compiled JAX program (`jax.stages.Compiled`) returns.

    Returns:
        The program, with all of its computations.

    Raises:
        ValueError: If the text is not that of a compiled program.
    """
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
    """Returns the number of bits of an element of a type.

    Args:
        kind: The type as HLO names it, e.g. "f32", "bf16", "u8", "f8e4m3fn" or "c64" (64 bits in
            all). "pred" has 8 bits; "token" and "opaque" have 0 bits.

    Raises:
        ValueError: If the type is not known.
    """
    size = re.match(r"(?:[suf]|bf|c)(\d+)", kind)
    if kind not in BITS and size is None:
        raise ValueError(f"HLO: element type {kind!r} is not known")
    return int(size[1]) if size else BITS[kind]


def _instructions(lines: list[str]) -> list[Instruction]:
    """Parses the lines of one computation into instructions.

    Args:
        lines: The text of each instruction as XLA prints it, in the order in which they run: with
            its indentation, and "%" before names, e.g. "  ROOT %a.1 = f32[2]{0} add(%x, %y)".

    Returns:
        One instruction per line, in the same order. Their `operands` are earlier `Instruction`s of
        the list; other names are ignored.

    Raises:
        ValueError: If a line has no parentheses after its opcode. They may be empty.
    """
    instructions: dict[str, Instruction] = {}
    for line in lines:
        head = _INSTRUCTION.match(line)
        assert head is not None
        rest = line[head.end() :]
        kind_end = _closing(rest) if rest.startswith("(") else rest.index(" ")
        opening = rest.index("(", kind_end)
        closing = opening + _closing(rest[opening:])
        literal = rest[opening + 1 : closing - 1]
        operands = tuple(
            instructions[name] for name in _OPERAND.findall(literal) if name in instructions
        )
        opcode = rest[kind_end:opening].strip()
        arrays = _arrays(rest[:kind_end])
        instructions[head[2]] = Instruction(
            head[2], opcode, arrays, operands, literal, rest[closing:], bool(head[1])
        )
    return list(instructions.values())


def _arrays(text: str) -> tuple[ResultArray, ...]:
    """Parses the type of a result into its arrays.

    Args:
        text: The type of one array, such as "f32[2,3]{1,0:S(1)}" (float32, shape (2, 3), memory
            space 1), or a tuple of such types in parentheses, which may be nested.

    Returns:
        The arrays from left to right. A text without the type of an array, such as an empty tuple,
        gives (). A dynamic size such as "<=8" counts as its bound.
    """
    arrays = []
    for kind, dims, layout in _ARRAY.findall(text):
        space = re.search(r"S\((\d+)\)", layout)
        shape = tuple(int(n.lstrip("<=")) for n in dims.split(",") if n)
        arrays.append(ResultArray(kind, shape, int(space[1]) if space else 0))
    return tuple(arrays)


def _closing(text: str) -> int:
    """Returns the index after the parenthesis that closes the one at the start of `text`.

    Args:
        text: Text that begins with "(".

    Raises:
        ValueError: If that parenthesis is not closed.
    """
    depth = 0
    for match in re.finditer(r"[()]", text):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.end()
    raise ValueError(f"HLO: a parenthesis is not closed: {text[:80]!r}")


def _branches(step: Instruction) -> list[str]:
    """Returns the names of the computations that a conditional chooses from.

    Args:
        step: An instruction with the opcode "conditional".

    Returns:
        The names of its branches in their order; for a conditional on a boolean, that of the true
        branch and then that of the false one.
    """
    branches = re.search(r"branch_computations=\{([^}]*)\}", step.attributes)
    return (
        _OPERAND.findall(branches[1])
        if branches
        else [step.value("true_computation"), step.value("false_computation")]
    )
