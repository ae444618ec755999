"""Reads the collectives of a partitioned program: bytes, participants, and overlap with kernels."""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Sequence

import numpy as np

from solrl_jax.planning.hlo import Instruction, Module
from solrl_jax.planning.kernels import NO_WORK_OPCODES, collective

_MESH = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}"  # noqa: E501
)
_PARTS = re.compile(r"'(\w+)'(?::\((\d+)\)(\d+))?")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective operation of a compiled program, such as an all-gather.

    Attributes:
        kind: Its operation: "all-gather", "all-reduce", "reduce-scatter", "all-to-all",
            "collective-permute" or "ragged-all-to-all".
        size: The bytes of the arrays on one device: the results of an "all-gather", or the operands
            of any other kind.
        groups: The groups of devices that communicate, each a tuple of device numbers. For a
            "collective-permute" they are pairs of a sender and a receiver.
        times: The number of runs in one call of the program.
        overlaps: Whether kernels run while the data is being sent.
    """

    kind: str
    size: float
    groups: tuple[tuple[int, ...], ...]
    times: int
    overlaps: bool

    @property
    def ways(self) -> int:
        """The number of devices in each group; all groups have the same number. 2 for a
        "collective-permute".
        """
        return len(self.groups[0])

    @property
    def sent(self) -> float:
        """The bytes that one device sends in one run.

        With n devices in a group, it is `size` * (n - 1) / n, as in a ring, where `size` is the
        bytes of the results (of an "all-gather") or of the operands (of any other kind). An
        "all-reduce" sends twice as much, and a "collective-permute" sends `size`.
        """
        if self.kind == "collective-permute":
            return self.size
        return self.size * (2 if self.kind == "all-reduce" else 1) * (self.ways - 1) / self.ways

    def crossing(self, devices: int) -> float:
        """Returns the bytes that one device sends over the network to another host in one run.

        They are a part of all bytes that it sends (`sent`). Let h be the largest number of hosts
        that a group spans, and d the number of its devices on each. The result is `size` * (h - 1)
        / h / d, because the devices of a host share its traffic equally. It is twice as much for an
        "all-reduce". For a "collective-permute", it is `size` if any pair spans two hosts. It is 0
        if no group spans hosts.

        Args:
            devices: The number of devices per host. The devices of a host have consecutive numbers.
        """
        hosts = max(len({i // devices for i in group}) for group in self.groups)
        if self.kind == "collective-permute":
            return self.size if hosts > 1 else 0.0
        members = self.ways / hosts
        return self.size * (2 if self.kind == "all-reduce" else 1) * (hosts - 1) / hosts / members


def collectives(module: Module, devices: int) -> list[Collective]:
    """Returns the collectives of a program in the order in which they run.

    A collective in a loop is returned once, with its number of runs (`Module.executed`).
    Collectives with one device per group are left out.

    Args:
        module: The parsed text of the compiled program.
        devices: The number of devices that the program runs on, on all hosts together.
    """
    starts = {step for steps in module.computations.values() for step in _overlapping_starts(steps)}
    names = {step.value("calls") for step in starts if step.opcode == "async-start"}
    starts |= {step for name in names for step in module.computations[name]}
    operations = []
    for step, times in module.executed():
        kind = collective(step.opcode)
        if kind is not None:
            groups = _groups(step, kind, devices)
            operand_bytes = sum(a.size for operand in step.operands for a in operand.arrays)
            size = operand_bytes * len(groups[0]) if kind == "all-gather" else operand_bytes
            overlaps = step in starts and not re.search(r'"is_sync":\s*true', step.attributes)
            operations.append(Collective(kind, size, groups, times, overlaps))
    return [one for one in operations if one.ways > 1]


def _overlapping_starts(steps: Sequence[Instruction]) -> Iterator[Instruction]:
    """Yields the instructions that start an asynchronous operation that overlaps with a kernel.

    Asynchronous operations, collectives or others such as copies, have one instruction that starts
    them and one that waits for their end. The start is yielded if a kernel, a loop, a conditional,
    a call or a synchronous collective is between the two.

    Args:
        steps: The instructions of one computation in the order in which they run.
    """
    ran = 0
    before = dict[Instruction, int]()
    for step in steps:
        if step.opcode.endswith("-start"):
            before[step] = ran
        elif step.opcode.endswith("-done"):
            # `send` and `recv` have a done, but no instruction with "-start".
            if ran > before.get(step.operands[0], ran):
                yield step.operands[0]
        elif step.opcode not in NO_WORK_OPCODES:
            ran += 1


def _groups(step: Instruction, kind: str, devices: int) -> tuple[tuple[int, ...], ...]:
    """Returns the groups of devices that take part in a collective.

    Args:
        step: The instruction of the collective. If its text names no groups, all devices are one
            group.
        kind: The kind of collective, e.g. "all-gather".
        devices: The number of devices that the program runs on.

    Returns:
        A tuple of device numbers per group; pairs of a sender and a receiver for a
        "collective-permute".
    """
    if kind == "collective-permute":
        pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", step.attributes)
        assert pairs is not None
        return tuple(
            tuple(map(int, pair.split(","))) for pair in re.findall(r"(\d+,\d+)", pairs[1])
        )
    if mesh := _MESH.search(step.attributes):
        return _mesh_groups(*mesh.groups())
    if iota := _IOTA.search(step.attributes):
        return tuple(map(tuple, _numbers(iota[2], iota[3]).reshape(_integers(iota[1])).tolist()))
    groups = re.search(r"replica_groups=\{(\{.*?\})\}", step.attributes)
    if groups is None:  # all
        return (tuple(range(devices)),)
    return tuple(
        tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", groups[1])
    )


def _mesh_groups(
    axes: str, order: str | None, permutation: str | None, group_axes: str
) -> tuple[tuple[int, ...], ...]:
    """Returns the groups of a collective whose HLO text names them by the axes of a device mesh.

    The arguments are the parts of this text. For `mesh['x'=4,'y'=2] {'y'}` the groups are (0, 1),
    (2, 3), (4, 5) and (6, 7): the devices along the axis y.

    Args:
        axes: The names of the axes with their sizes, e.g. "'x'=4,'y'=2".
        order: The shape of an array that is filled with the device numbers from 0, e.g. "2,4". The
            array, transposed by `permutation` and flattened, gives the order of the devices in the
            mesh. None: the devices are in the order of their numbers.
        permutation: The transpose of the axes of this array, e.g. "1,0". None: no transpose.
        group_axes: The axes along which the devices of a group lie, e.g. "'y'". A part of an axis
            is written as 'x':(A)B: the axis x is reshaped to (A, B, rest), and the part is the
            second of these axes.
    """
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", axes)}
    numbers = _numbers(order or str(math.prod(sizes.values())), permutation)
    # All axes, split where a group has a part of one: the name of the axis, the product of the
    # sizes of its earlier parts, and the size of this part.
    parts: list[tuple[str, int, int]] = []
    group_parts = [
        (name, int(before or 1), int(size or sizes[name]))
        for name, before, size in _PARTS.findall(group_axes)
    ]
    for name, size in sizes.items():
        inner = [(before, part) for other, before, part in group_parts if other == name]
        edges = sorted(
            {1, size, *(before for before, _ in inner), *(before * part for before, part in inner)}
        )
        parts += [(name, low, high // low) for low, high in itertools.pairwise(edges)] or [
            (name, 1, 1)
        ]
    along = [
        i
        for i, (name, low, _) in enumerate(parts)
        if any(n == name and b <= low < b * p for n, b, p in group_parts)
    ]
    grid = numbers.reshape([size for _, _, size in parts])
    grid = np.moveaxis(grid, along, range(-len(along), 0))
    return tuple(map(tuple, grid.reshape(-1, math.prod(parts[i][2] for i in along)).tolist()))


def _numbers(order: str, permutation: str | None) -> np.ndarray:
    """Returns an array of device numbers (integers), reshaped and transposed as HLO's text says.

    Args:
        order: The shape of the array before the transpose, e.g. "2,4". It is filled with the
            numbers from 0 in row-major order.
        permutation: The axes of the transpose, e.g. "1,0". None: no transpose.
    """
    shape = _integers(order)
    numbers = np.arange(math.prod(shape)).reshape(shape)
    return numbers.transpose(_integers(permutation)) if permutation else numbers


def _integers(text: str) -> list[int]:
    """Parses integers that are separated by commas, e.g. "2,4".

    Args:
        text: At least one integer.
    """
    return [int(n) for n in text.split(",")]
