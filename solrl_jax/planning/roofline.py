"""Computes a lower bound of the time of a compiled program: every kernel at a peak rate of the
device.

A kernel takes the longer of two times: its operations at the peak rate of its operands' type, and
its bytes at the peak rate of memory. See Williams et al. 2009, "Roofline",
doi:10.1145/1498765.1498785. The bound serves to compare programs. It is not a prediction, because
it ignores caches, launch overhead, and how closely a library approaches the peak rates.
"""

import dataclasses
from collections import defaultdict
from typing import Any

from solrl_jax.planning.hlo import parse
from solrl_jax.planning.kernels import Kernel, count_library_kernels, kernels
from solrl_jax.planning.links import Collective, collectives
from solrl_jax.planning.targets import Target

# The parts into which the time of kernels and collectives is split.
KINDS = ("matmuls", "attention", "memory", "links")
LARGEST = 8  # the number of groups of kernels that are listed


@dataclasses.dataclass(frozen=True)
class Roofline:
    """The work of one call of a compiled program on one device. The methods compute lower bounds of
    the time that this work takes.

    Attributes:
        target: The kind of device, with its peak rates.
        devices_per_host: The number of devices per host. Traffic between hosts takes the network.
        kernels: The kernels that the program runs.
        collectives: The collectives that the program runs.
        unknown_loops: The number of loops whose number of iterations is unknown. Each counts as one
            iteration.
    """

    target: Target
    devices_per_host: int
    kernels: list[Kernel]
    collectives: list[Collective]
    unknown_loops: int

    def peak_seconds(self, kernel: Kernel) -> float:
        """Returns a lower bound of the seconds of a kernel's arithmetic, over all of its runs.

        It is the time of its operations at the peak rate of its arithmetic unit; 0 for a kernel of
        the kind "memory".

        Args:
            kernel: A kernel of the program.
        """
        return kernel.times * kernel.operations / getattr(self.target.peaks, kernel.unit)

    def kernel_seconds(self, kernel: Kernel) -> float:
        """Returns a lower bound of the seconds of a kernel, over all of its runs.

        It is the longer of two times: that of its arithmetic at the peak rate of its unit, and that
        of its memory traffic at the peak rate of the memory.

        Args:
            kernel: A kernel of the program.
        """
        return max(
            self.peak_seconds(kernel), kernel.times * kernel.moved / self.target.peaks.memory
        )

    def link_seconds(self, collective: Collective) -> float:
        """Returns a lower bound of the seconds of a collective, over all of its runs.

        The bytes for other hosts go over the network, and all others over the links within the
        host. Both move at peak rates, one after the other.

        Args:
            collective: A collective of the program.
        """
        crossing = collective.crossing(self.devices_per_host)
        return collective.times * (
            max(collective.sent - crossing, 0) / self.target.peaks.link
            + crossing / self.target.peaks.network
        )

    def split(self) -> dict[str, float]:
        """Splits the seconds of one call by kind of work.

        Returns:
            A dict of the seconds of "matmuls" (and convolutions), "attention", "memory" (all other
            kernels) and "links" (collectives). Their sum is the lower bound for one call. The time
            of collectives that overlap with kernels counts only as far as their total exceeds the
            total of all kernels.
        """
        seconds = dict.fromkeys(KINDS, 0.0)
        for kernel in self.kernels:
            seconds[kernel.kind] += self.kernel_seconds(kernel)
        waiting = sum(self.link_seconds(c) for c in self.collectives if not c.overlaps)
        overlapping = sum(self.link_seconds(c) for c in self.collectives if c.overlaps)
        return seconds | {"links": waiting + max(overlapping - sum(seconds.values()), 0.0)}

    def summary(self) -> dict[str, Any]:
        """Returns all figures of one call on one device, as JSON values.

        Returns:
            A dict with these keys:

            * "seconds": the lower bound for one call.
            * "split": a dict of its parts: seconds of "matmuls" (convolutions too), "attention",
              "memory" (all other kernels) and "links" (collectives; see `split`).
            * "operations_at_peak": the seconds of the arithmetic alone, that of attention too.
            * "kernels": the number of runs of all kernels, an integer.
            * "native": a dict of the numbers of runs of library functions, Pallas kernels, and
              matmuls and convolutions outside of fusions, by the name of the kernel
              (`kernels.count_library_kernels`).
            * "operations": arithmetic operations by unit, e.g. {"bf16": 1e12}.
            * "memory_traffic": bytes of main memory that are read and written.
            * "collectives": a list of dicts, one per kind of collective and value of "overlaps":
              "kind", "overlaps" (whether kernels run meanwhile), "count" (the number of runs),
              "sent" (the bytes that one device sends in all runs), "crossing" (the part of "sent"
              that goes to another host) and "seconds" (the lower bound for all runs, also of those
              that overlap with kernels).
            * "largest": a list of dicts for the 8 groups of kernels that take longest. Kernels of
              equal name, result and source are one group: "name", "result" (type and shape of the
              first result), "source" (the operation of JAX that they came from), "times" (the
              number of runs), "seconds" (of all runs) and "at_peak" (the seconds of the arithmetic
              alone).
            * "unknown_loops": the number of loops whose number of iterations is unknown. Each
              counts as one iteration.
        """
        split = self.split()
        operations = defaultdict[str, float](float)
        for kernel in self.kernels:
            operations[kernel.unit] += kernel.times * kernel.operations
        return {
            "seconds": sum(split.values()),
            "split": split,
            "operations_at_peak": sum(map(self.peak_seconds, self.kernels)),
            "kernels": sum(kernel.times for kernel in self.kernels),
            "native": count_library_kernels(self.kernels),
            "operations": {unit: count for unit, count in operations.items() if count},
            "memory_traffic": sum(kernel.times * kernel.moved for kernel in self.kernels),
            "collectives": self._collective_rows(),
            "largest": self._largest(),
            "unknown_loops": self.unknown_loops,
        }

    def _collective_rows(self) -> list[dict[str, Any]]:
        """Returns the collectives of one call of the program, grouped by kind and by whether they
        overlap with kernels.

        Returns:
            One dict per group, in the order of their first runs: "kind" (e.g. "all-gather"),
            "overlaps" (whether kernels run meanwhile), "count" (the number of runs), "sent" (the
            bytes that one device sends in all runs), "crossing" (the part of "sent" that goes to
            another host) and "seconds" (the lower bound for all runs).
        """
        groups: defaultdict[tuple[str, bool], list[Collective]] = defaultdict(list)
        for collective in self.collectives:
            groups[collective.kind, collective.overlaps].append(collective)
        return [
            {
                "kind": kind,
                "overlaps": overlaps,
                "count": sum(c.times for c in collectives),
                "sent": sum(c.times * c.sent for c in collectives),
                "crossing": sum(c.times * c.crossing(self.devices_per_host) for c in collectives),
                "seconds": sum(map(self.link_seconds, collectives)),
            }
            for (kind, overlaps), collectives in groups.items()
        ]

    def _largest(self) -> list[dict[str, Any]]:
        """Returns the groups of kernels that take longest. Kernels of equal name, result and source
        are one group.

        Returns:
            At most 8 dicts, longest first: "name" (e.g. "__cublas$gemm bf16"), "result" (type and
            shape of the first result), "source" (the JAX operation that they were compiled from),
            "times" (the number of runs), "seconds" (of all runs) and "at_peak" (the seconds of the
            arithmetic alone).
        """
        groups: defaultdict[tuple[str, str, str], list[Kernel]] = defaultdict(list)
        for kernel in self.kernels:
            groups[kernel.name, kernel.result, kernel.source].append(kernel)
        rows = [
            {
                "name": name,
                "result": result,
                "source": source,
                "times": sum(k.times for k in kernels),
                "seconds": sum(map(self.kernel_seconds, kernels)),
                "at_peak": sum(map(self.peak_seconds, kernels)),
            }
            for (name, result, source), kernels in groups.items()
        ]
        return sorted(rows, key=lambda row: -float(row["seconds"]))[:LARGEST]


def roofline(text: str, target: Target, devices_per_host: int = 1, hosts: int = 1) -> Roofline:
    """Reads the work of a program from its compiled text.

    Args:
        text: The text that `as_text()` of the compiled program returns.
        target: The kind of device that the program was compiled for.
        devices_per_host: The number of devices per host. Traffic between hosts takes the network.
        hosts: The number of hosts that the program runs on. Neither number is checked against the
            text.

    Returns:
        The kernels and collectives of one call on one device, with their numbers of runs. Loops
        whose number of iterations is unknown count as one iteration (`unknown_loops`).

    Raises:
        ValueError: If the text cannot be parsed.
    """
    module = parse(text)
    return Roofline(
        target,
        devices_per_host,
        kernels(module),
        collectives(module, devices_per_host * hosts),
        module.unknown_loops(),
    )


def table(summary: dict[str, Any]) -> str:
    """Formats the figures of a program for a terminal.

    The lines show the total seconds, the seconds per kind of work, the runs of library functions,
    the collectives, and the kernels that take longest.

    Args:
        summary: The figures, as `Roofline.summary` returns them: a dict with "seconds", "split",
            "operations_at_peak", "native", "collectives", "largest" and others.

    Returns:
        The lines, joined by line feeds.
    """
    total = summary["seconds"]

    def row_of(seconds):
        return f"  {seconds:9.3g} s {seconds / total if total else 0:4.0%} "

    lines = [f"{total:.4g} s at the peaks; operations alone {summary['operations_at_peak']:.4g} s"]
    lines += [f"{row_of(seconds)}{kind}" for kind, seconds in summary["split"].items() if seconds]
    lines += [f"  {count:9} x {name}" for name, count in sorted(summary["native"].items())]
    for row in summary["collectives"]:
        how = "asynchronous" if row["overlaps"] else "synchronous"
        lines.append(
            f"  {row['count']:9} x {row['kind']}, {how}: "
            f"{row['sent'] / 1e9:.3g} GB sent, {row['seconds']:.3g} s"
        )
    for row in summary["largest"]:
        lines.append(
            f"{row_of(row['seconds'])}{row['times']} x {row['name']} "
            f"{row['result']} {row['source'][-60:]}"
        )
    return "\n".join(lines)
