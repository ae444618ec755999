"""Reads the collectives of a partitioned program: bytes, participants, and overlap with kernels."""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Sequence

import numpy as np

from solrl_jax.planning.hlo import Instruction, Module
from solrl_jax.planning.kernels import FREE, collective

_MESH = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}"  # noqa: E501
)
_PARTS = re.compile(r"'(\w+)'(?::\((\d+)\)(\d+))?")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective operation of a compiled program.

    Attributes:
        kind: Its operation, e.g. "all-gather".
        size: The bytes of the array where it is whole: the result of an all-gather, and the
            operands of every other kind.
        groups: The numbers of the devices that take part, group by group. Those of a
            "collective-permute" are its pairs of a source and a target.
        times: The number of runs in one call of the program.
        overlaps: Whether other kernels run between its start and the point where its result is
            needed.
    """

    kind: str
    size: float
    groups: tuple[tuple[int, ...], ...]
    times: int
    overlaps: bool

    @property
    def ways(self) -> int:
        """The number of devices in one group, which is the same for all groups."""
        return len(self.groups[0])

    @property
    def sent(self) -> float:
        """The bytes that a device sends in one run: in a ring, `size` times (n - 1) / n for n
        devices in a group; twice that for an "all-reduce"; and `size` for a "collective-permute".
        """
        if self.kind == "collective-permute":
            return self.size
        return self.size * (2 if self.kind == "all-reduce" else 1) * (self.ways - 1) / self.ways

    def crossing(self, devices: int) -> float:
        """Returns the part of `sent`, in bytes, that leaves the host in one run; 0 within a host.

        The devices of a host share equally the bytes that the host has to receive. The group that
        spans most hosts decides.

        Args:
            devices: The number of devices per host. They have consecutive numbers.
        """
        hosts = max(len({i // devices for i in group}) for group in self.groups)
        if self.kind == "collective-permute":
            return self.size if hosts > 1 else 0.0
        members = self.ways / hosts
        return self.size * (2 if self.kind == "all-reduce" else 1) * (hosts - 1) / hosts / members


def collectives(module: Module, devices: int) -> list[Collective]:
    """Returns the collectives of a program in the order in which they run. Groups of one device
    move nothing and are left out.

    A collective in a loop is returned once, with its number of runs.

    Args:
        module: The parsed text of the compiled program.
        devices: The number of devices that the program runs on, on all hosts together. A collective
            that names no groups has one group of all of them.
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
    """Yields the asynchronous starts of a computation between which and their end a kernel runs.

    Args:
        steps: The instructions of the computation in their order. Starts of other asynchronous
            operations and instructions that only name data (`FREE`) are no kernels.
    """
    ran = 0
    before = dict[Instruction, int]()
    for step in steps:
        if step.opcode.endswith("-start"):
            before[step] = ran
        elif step.opcode.endswith("-done"):
            if ran > before[step.operands[0]]:
                yield step.operands[0]
        elif step.opcode not in FREE:
            ran += 1


def _groups(step: Instruction, kind: str, devices: int) -> tuple[tuple[int, ...], ...]:
    """Returns the numbers of the devices that take part in a collective, group by group.

    Args:
        step: The instruction. Its attributes have the groups as axes of a mesh, as sizes with a
            permutation, or listed. Without any, all devices are one group.
        kind: The kind of collective. A "collective-permute" has pairs of a source and a target.
        devices: The number of all devices.
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
    """Returns groups that are given as axes of a mesh, as tuples of device numbers.

    Args:
        axes: The axes of the mesh with their sizes, e.g. "'x'=4,'y'=2".
        order: The sizes, separated by commas, of the array of consecutive numbers that gives the
            order of the devices. None: the devices have the order of their numbers.
        permutation: The permutation of the axes of that array, or None.
        group_axes: The axes along which groups lie, e.g. "'y'". A part of an axis is written
            'x':(2)2: x is reshaped to (2, 2, rest) in row-major order, and groups lie along the
            second of these axes.
    """
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", axes)}
    numbers = _numbers(order or str(math.prod(sizes.values())), permutation)
    parts: list[tuple[str, int, int]] = []  # axes divided where a part of one is chosen
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
    """Returns the device numbers from 0 in the order that HLO writes as sizes and a permutation.

    Args:
        order: The sizes, separated by commas, of the array of consecutive numbers.
        permutation: The permutation of its axes, separated by commas, or None.

    Returns:
        An integer array of these sizes, with its axes permuted.
    """
    shape = _integers(order)
    numbers = np.arange(math.prod(shape)).reshape(shape)
    return numbers.transpose(_integers(permutation)) if permutation else numbers


def _integers(text: str) -> list[int]:
    """Parses integers that are separated by commas.

    Args:
        text: The integers. ValueError for an empty text.

    Returns:
        The integers in their order, at least one.
    """
    return [int(n) for n in text.split(",")]
