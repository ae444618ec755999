"""What a partitioned program moves between devices: the collectives of its HLO text, those in loops as often as they run."""

import contextlib
import dataclasses
import itertools
import math
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

BITS = {"pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "s32": 32, "u32": 32, "s64": 64, "u64": 64}
KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%([\w.\-]+) = (.*?) ([\w\-]+)\((.*)$")
_CALLED = re.compile(r"(?:calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_LOOP = re.compile(r"condition=%?([\w.\-]+), body=%?([\w.\-]+)")
_BOUND = re.compile(r" = s32\[\] constant\((\d+)\)")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}")
_PARTS = re.compile(r"'(\w+)'(?::\((\d+)\)(\d+))?")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One instruction. size: bytes of the whole array, as it is where it is whole; groups: device numbers that take part."""

    kind: str
    size: float
    groups: tuple[tuple[int, ...], ...]
    times: int

    @property
    def ways(self) -> int:
        return len(self.groups[0])

    @property
    def sent(self) -> float:
        """Bytes that a device sends, each time: in a ring all that is not its own; a sum goes round twice."""
        if self.kind == "collective-permute":
            return self.size
        return self.size * (2 if self.kind == "all-reduce" else 1) * (self.ways - 1) / self.ways

    def crossing(self, devices: int) -> float:
        """Of a device's bytes those that leave its host, which has `devices` in a row: the host's share, over its members."""
        hosts = max(len({i // devices for i in group}) for group in self.groups)
        if self.kind == "collective-permute":
            return self.size if hosts > 1 else 0.0
        members = self.ways / hosts
        return self.size * (2 if self.kind == "all-reduce" else 1) * (hosts - 1) / hosts / members


def partitioned(lowered: Any, options: dict[str, Any]) -> tuple[Any, str]:
    """A lowered program compiled, and its HLO text as it was right after it had been partitioned.

    Later the CPU's compiler widens what goes between devices, as no target does: BF16 to float32, E4M3 to float16.
    """
    with tempfile.TemporaryDirectory() as folder, _uncached():
        dump = {"xla_dump_to": folder, "xla_dump_hlo_pass_re": "spmd-partitioning", "xla_dump_hlo_as_text": True}
        compiled = lowered.compile(compiler_options=options | dump)
        (file,) = Path(folder).glob("*.after_spmd-partitioning.*")
        return compiled, file.read_text()


@contextlib.contextmanager
def _uncached() -> Iterator[None]:
    """Without JAX's cache of compiled programs: one that is read from it is not partitioned."""
    before = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # which remembers whether it is used
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def collectives(text: str, count: int) -> list[Collective]:
    """The collectives of an HLO module for `count` devices, as it is right after partitioning."""
    computations, entry = _computations(text)
    times: defaultdict[str, int] = defaultdict(int)

    def visit(name: str, factor: int) -> None:
        times[name] += factor
        for line in computations[name]:
            for other in _CALLED.findall(line) + [n.strip(" %") for m in _BRANCHES.findall(line) for n in m.split(",")]:
                visit(other, factor)
            if loop := _LOOP.search(line):
                visit(loop[2], factor * _turns(computations[loop[1]]))

    visit(entry, 1)
    return [c for name, lines in computations.items() if times[name] for c in _collectives(lines, count, times[name])]


def _turns(condition: list[str]) -> int:
    """How often a loop turns: it counts from 0 up to the one number that its condition holds (as `lax.scan` does)."""
    (bound,) = {int(n) for line in condition for n in _BOUND.findall(line)}
    return bound


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """The lines of each computation, and which is the program's own."""
    computations: dict[str, list[str]] = {}
    entry, lines = "", []
    for line in text.splitlines():
        if head := _COMPUTATION.match(line):
            lines = computations[head[2]] = []
            entry = head[2] if head[1] else entry
        elif " = " in line:
            lines.append(line)
    return computations, entry


def _collectives(lines: list[str], count: int, times: int) -> Iterator[Collective]:
    """Those of one computation; the same of the same operands once."""
    seen = set()
    for line in lines:
        instruction = _INSTRUCTION.match(line)
        if instruction is None or instruction[3] not in KINDS:
            continue
        kind, groups = instruction[3], _groups(line, instruction[3], count)
        operands = re.sub(r"channel_id=\d+|metadata=.*", "", instruction[4])
        if len(groups[0]) > 1 and (kind, operands) not in seen:
            seen.add((kind, operands))
            yield Collective(kind, _size(instruction[2]) * (len(groups[0]) if kind == "reduce-scatter" else 1), groups, times)


def _size(text: str) -> float:
    """Bytes of a shape, which may be a tuple."""
    found = re.findall(r"\b([a-z]+\d*\w*)\[([\d,]*)\]", text)
    return sum(math.prod(map(int, filter(None, dims.split(",")))) * element_bits(kind) / 8 for kind, dims in found)


def element_bits(kind: str) -> int:
    if kind in BITS:
        return BITS[kind]
    size = re.match(r"(?:bf|f|c)(\d+)", kind)
    if size is None:
        raise ValueError(f"HLO: element type {kind!r} is not known")
    return int(size[1])


def _groups(line: str, kind: str, count: int) -> tuple[tuple[int, ...], ...]:
    """Device numbers, group by group."""
    if kind == "collective-permute":
        pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", line)
        assert pairs is not None
        return tuple(tuple(map(int, pair.split(","))) for pair in re.findall(r"(\d+,\d+)", pairs[1]))
    if mesh := _MESH.search(line):
        return _mesh_groups(*mesh.groups())
    if iota := _IOTA.search(line):
        return tuple(map(tuple, _numbers(iota[2], iota[3]).reshape(_ints(iota[1])).tolist()))
    listed = re.search(r"replica_groups=\{(\{.*?\})\}", line)
    if listed is None:  # all
        return (tuple(range(count)),)
    return tuple(tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", listed[1]))


def _mesh_groups(axes: str, order: str | None, transposed: str | None, chosen: str) -> tuple[tuple[int, ...], ...]:
    """Groups along some axes of a mesh, 'x'=4, or parts of axes, 'x':(2)2: those of 2 numbers within whole runs of 2."""
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", axes)}
    count = math.prod(sizes.values())
    numbers = _numbers(order or str(count), transposed)
    parts: list[tuple[str, int, int]] = []  # axes divided where a part of one is chosen
    wanted = [(name, int(before or 1), int(size or sizes[name])) for name, before, size in _PARTS.findall(chosen)]
    for name, size in sizes.items():
        inner = [(before, part) for other, before, part in wanted if other == name]
        edges = sorted({1, size, *(before for before, _ in inner), *(before * part for before, part in inner)})
        parts += [(name, low, high // low) for low, high in itertools.pairwise(edges)] or [(name, 1, 1)]
    along = [i for i, (name, low, _) in enumerate(parts) if any(n == name and b <= low < b * p for n, b, p in wanted)]
    grid = numbers.reshape([size for _, _, size in parts])
    grid = np.moveaxis(grid, along, range(-len(along), 0))
    return tuple(map(tuple, grid.reshape(-1, math.prod(parts[i][2] for i in along)).tolist()))


def _numbers(order: str, transposed: str | None) -> np.ndarray:
    shape = _ints(order)
    numbers = np.arange(math.prod(shape)).reshape(shape)
    return numbers.transpose(_ints(transposed)) if transposed else numbers


def _ints(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]
