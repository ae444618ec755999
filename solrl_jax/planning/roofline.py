"""Computes a lower bound of the time of a compiled program: every kernel at a peak rate of the
device.

It is a yardstick for comparing programs, not a prediction (Williams et al. 2009, "Roofline",
doi:10.1145/1498765.1498785): it knows nothing of caches, launch overhead, or how near a library
comes to its peak. A kernel takes the longer of two times: its operations at the peak rate of its
operands' type, and its bytes at the peak rate of memory.
"""

import dataclasses
from collections import defaultdict
from typing import Any

from solrl_jax.planning.hlo import parse
from solrl_jax.planning.kernels import Kernel, kernels, native
from solrl_jax.planning.links import Collective, collectives
from solrl_jax.planning.targets import Target

# What limits the time of kernels and collectives.
KINDS = ("products", "attention", "memory", "links")
LARGEST = 8  # the number of groups of kernels that are listed


@dataclasses.dataclass(frozen=True)
class Roofline:
    """The work of one call of a program on one device.

    Attributes:
        target: The kind of device, whose peak rates turn operations and bytes into seconds.
        on_host: The number of devices per host, which decides what bytes of a collective leave the
            host.
        kernels: The kernels of the program.
        collectives: Its collectives.
        unknown_loops: The number of loops that count as one iteration, because the number of their
            iterations is unknown.
    """

    target: Target
    on_host: int
    kernels: list[Kernel]
    collectives: list[Collective]
    unknown_loops: int

    def peak_seconds(self, kernel: Kernel) -> float:
        """Returns the seconds of the arithmetic operations of all runs of a kernel, at the peak
        rate of its unit. 0 for a kernel that only moves memory.

        Args:
            kernel: A kernel of the program.
        """
        return kernel.times * kernel.operations / getattr(self.target.peaks, kernel.unit)

    def kernel_seconds(self, kernel: Kernel) -> float:
        """Returns the seconds of all runs of a kernel: the longer of the time of its operations and
        the time of its bytes, both at peak rates.

        Args:
            kernel: A kernel of the program.
        """
        return max(
            self.peak_seconds(kernel), kernel.times * kernel.moved / self.target.peaks.memory
        )

    def link_seconds(self, collective: Collective) -> float:
        """Returns the seconds of all runs of a collective, at the peak rates of links and network.

        The bytes that leave the host take the network, the others the links; the two times are
        added.

        Args:
            collective: A collective of the program.
        """
        crossing = collective.crossing(self.on_host)
        return collective.times * (
            max(collective.sent - crossing, 0) / self.target.peaks.link
            + crossing / self.target.peaks.network
        )

    def split(self) -> dict[str, float]:
        """Returns the seconds of one call by what limits them: "products", "attention", "memory"
        (the kinds of kernels) and "links".

        Collectives that overlap with kernels count only for the time that remains after all
        kernels.

        Returns:
            Seconds by "products", "attention", "memory" and "links", 0 where nothing counts. Their
            sum is the bound for one call.
        """
        seconds = dict.fromkeys(KINDS, 0.0)
        for kernel in self.kernels:
            seconds[kernel.kind] += self.kernel_seconds(kernel)
        waiting = sum(self.link_seconds(c) for c in self.collectives if not c.overlaps)
        overlapping = sum(self.link_seconds(c) for c in self.collectives if c.overlaps)
        return seconds | {"links": waiting + max(overlapping - sum(seconds.values()), 0.0)}

    def summary(self) -> dict[str, Any]:
        """Returns all figures of one call on one device as JSON values.

        Returns:
            "seconds", the sum of "split"; "split", the seconds by what limits them ("products",
            "attention", "memory" and "links"); "products_at_peak", the seconds of all operations
            alone; "kernels", the number of runs of all kernels; "native", the number of runs of
            each library function and Pallas kernel by its name; "operations" by arithmetic unit
            (e.g. "bf16"), without units of 0; "memory_traffic", the bytes of main memory that are
            read and written; "collectives", a list of groups with "kind", "overlaps", "count",
            "sent", "crossing" and "seconds"; "largest", the at most 8 groups of kernels that take
            longest, each with "name", "result", "source", "times", "seconds" and "at_peak"; and
            "unknown_loops".
        """
        split = self.split()
        operations = defaultdict[str, float](float)
        for kernel in self.kernels:
            operations[kernel.unit] += kernel.times * kernel.operations
        return {
            "seconds": sum(split.values()),
            "split": split,
            "products_at_peak": sum(map(self.peak_seconds, self.kernels)),
            "kernels": sum(kernel.times for kernel in self.kernels),
            "native": native(self.kernels),
            "operations": {unit: count for unit, count in operations.items() if count},
            "memory_traffic": sum(kernel.times * kernel.moved for kernel in self.kernels),
            "collectives": self._collective_rows(),
            "largest": self._largest(),
            "unknown_loops": self.unknown_loops,
        }

    def _collective_rows(self) -> list[dict[str, Any]]:
        """Returns the collectives of one call, grouped by kind and by whether they overlap.

        Returns:
            For each group, in the order of their first runs: "kind" (e.g. "all-gather"),
            "overlaps", "count" (the number of runs), "sent" (the bytes that a device sends in all
            runs), "crossing" (the part of "sent" that leaves the host), and "seconds".
        """
        alike: defaultdict[tuple[str, bool], list[Collective]] = defaultdict(list)
        for one in self.collectives:
            alike[one.kind, one.overlaps].append(one)
        return [
            {
                "kind": kind,
                "overlaps": overlaps,
                "count": sum(c.times for c in of),
                "sent": sum(c.times * c.sent for c in of),
                "crossing": sum(c.times * c.crossing(self.on_host) for c in of),
                "seconds": sum(map(self.link_seconds, of)),
            }
            for (kind, overlaps), of in alike.items()
        ]

    def _largest(self) -> list[dict[str, Any]]:
        """Returns the kernels that take longest, grouped by name, result and source.

        Returns:
            At most `LARGEST` (8) groups, longest first: "name" (of the kernel, e.g. "__cublas$gemm
            bf16"), "result" (type and shape of its first result), "source" (the JAX operation that
            it comes from), "times" (the number of runs), "seconds" of all runs, and "at_peak", the
            seconds of their operations alone.
        """
        alike: defaultdict[tuple[str, str, str], list[Kernel]] = defaultdict(list)
        for kernel in self.kernels:
            alike[kernel.name, kernel.result, kernel.source].append(kernel)
        rows = [
            {
                "name": name,
                "result": result,
                "source": source,
                "times": sum(k.times for k in of),
                "seconds": sum(map(self.kernel_seconds, of)),
                "at_peak": sum(map(self.peak_seconds, of)),
            }
            for (name, result, source), of in alike.items()
        ]
        return sorted(rows, key=lambda row: -float(row["seconds"]))[:LARGEST]


def roofline(text: str, target: Target, on_host: int = 1, hosts: int = 1) -> Roofline:
    """Reads the work of a program from its compiled text.

    Args:
        text: The compiled text, of the program on one device.
        target: The kind of device that the program was compiled for.
        on_host: The number of devices per host. With `hosts` it also tells how many devices take
            part in a collective that names no groups.
        hosts: The number of hosts that the program runs on.

    Returns:
        The kernels and collectives of one call on one device, from which its methods compute times.

    Raises:
        ValueError: If the text cannot be parsed.
    """
    module = parse(text)
    return Roofline(
        target,
        on_host,
        kernels(module),
        collectives(module, on_host * hosts),
        module.unknown_loops(),
    )


def table(summary: dict[str, Any]) -> str:
    """Formats the figures of a program for a terminal, in lines without a line feed at the end.

    The lines are: the seconds in all and of the operations alone; the seconds by what limits them;
    the number of runs of each library function; the collectives; and the kernels that take longest.
    Lines by limit and of kernels also have their part of all seconds in per cent. The sources of
    kernels are cut to their last 60 characters.

    Args:
        summary: The result of `Roofline.summary`.

    Returns:
        The lines, joined by line feeds.
    """
    total = summary["seconds"]

    def row_of(seconds):
        return f"  {seconds:9.3g} s {seconds / total if total else 0:4.0%} "

    lines = [f"{total:.4g} s at the peaks; operations alone {summary['products_at_peak']:.4g} s"]
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
