"""Compiles FLUX.1 for many devices and draws how its roofline time scales.

    python scripts/scaling.py b200 --hosts 2 --devices 8 mesh.fsdp=16
    python scripts/scaling.py --draw

The first command adds a row to benchmarks/scaling.json; it needs the compiler of the device (see
`solrl plan --help`). The second one draws docs/scaling.png. Encoding and scoring are omitted,
because there each device has whole networks and samples of its own.
"""

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "benchmarks" / "scaling.json"
PRESET = ("flux1_sol_rl_hpsv2", "rollout.explore.precision=auto")
COLORS = {"h200": "#0072B2", "b200": "#D55E00", "tpu-v5p": "#009E73", "tpu-v6e": "#CC79A7"}
# Marker and line style by phase.
STYLES = {"explore": "o-", "regenerate": "s--", "update": "^:"}
PHASES = ("sync", "explore", "regenerate", "update")


def compiled(
    device: str, hosts: int, count: int, overrides: list[str], phases: list[str]
) -> dict[str, Any]:
    """Compiles the training programs for a mesh of devices.

    Args:
        device: The kind of device, a key of `planning.targets.TARGETS`.
        hosts: The number of hosts.
        count: The number of devices per host.
        overrides: Overrides of the preset, of the form `key=value`.
        phases: The phases to compile.

    Returns:
        A row of the record: the figures of one device in an iteration, by phase.
    """
    from solrl_jax.config.presets import resolve
    from solrl_jax.planning import topology
    from solrl_jax.planning.targets import TARGETS

    target = TARGETS[device]
    topology.prepare(target)  # before JAX is imported
    from solrl_jax.planning import plan

    planner = plan.Planner(
        resolve(PRESET[0], (*PRESET[1:], *overrides)), plan.Devices(target, count, hosts)
    )
    rows = {}
    for phase in filter(planner.phases.has, phases):
        (program,) = planner.phases.programs(phase, planner.codes)
        executable = topology.compiled(planner.lowered(program), target)
        if phase == "sync":
            planner.place(executable)
        rows[phase] = summary(planner.measure(phase, program, executable))
    mesh = {axis: size for axis, size in planner.phases.mesh.shape.items() if size > 1}
    return {
        "device": device,
        "hosts": hosts,
        "devices": count * hosts,
        "mesh": mesh,
        "phases": rows,
    }


def summary(figures: dict[str, Any]) -> dict[str, Any]:
    """Sums up all calls of one program in an iteration.

    Args:
        figures: The measurements of the program by `planning.plan`.

    Returns:
        The seconds, the bytes of the collectives, and the memory, by name.
    """
    calls = figures["calls"]
    roofline = figures["roofline"]
    memory = figures["memory"]

    def total(figure):
        return calls * sum(map(figure, roofline["collectives"]))

    return {
        "calls": calls,
        "seconds": calls * roofline["seconds"],
        "split": {kind: calls * seconds for kind, seconds in roofline["split"].items()},
        "messages": {
            "sent": total(lambda row: row["sent"]),
            "crossing": total(lambda row: row["crossing"]),  # between hosts
            "waited_for": total(lambda row: row["sent"] * (not row["overlaps"])),
            "seconds": total(lambda row: row["seconds"]),
        },
        "temporaries": memory["temporaries"],
        "peak": memory["peak"],
    }


def add(row: dict[str, Any]) -> None:
    """Adds a row to the record, replacing an older one. Phases that the row lacks are kept."""
    record = json.loads(RECORD.read_text())

    def same(other):
        return all(other[key] == row[key] for key in ("device", "hosts", "devices", "mesh"))

    older: dict[str, Any] = next((other for other in record["rows"] if same(other)), {"phases": {}})
    row["phases"] = {
        name: (older["phases"] | row["phases"])[name]
        for name in PHASES
        if name in older["phases"] | row["phases"]
    }
    rows = [other for other in record["rows"] if not same(other)] + [row]
    record["rows"] = sorted(rows, key=lambda r: (r["device"], r["devices"], str(r["mesh"])))
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


def main() -> None:
    """Parses the command line; see the module docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("device", nargs="?")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--devices", type=int, default=1, help="devices per host")
    parser.add_argument("--phases", default=",".join(PHASES))
    parser.add_argument("--draw", action="store_true")
    arguments = parser.parse_intermixed_args()
    if arguments.draw:
        draw()
    else:
        add(
            compiled(
                arguments.device,
                arguments.hosts,
                arguments.devices,
                arguments.overrides,
                arguments.phases.split(","),
            )
        )


def draw() -> None:
    """Plots linear speed, the time that links are busy, and memory against the number of devices.

    Lines show `mesh.fsdp` within a host and `mesh.data` between hosts. Hollow markers show other
    meshes.
    """
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=(11, 3.9), layout="constrained")
    panels = figure.subplots(1, 3)
    # Rows with a key "code" were compiled from an older version.
    rows = [row for row in json.loads(RECORD.read_text())["rows"] if "code" not in row]
    alone = {row["device"]: row["phases"] for row in rows if row["devices"] == 1}
    for row in rows:
        row["plain"] = row["mesh"].get("fsdp", 1) == row["devices"] // row["hosts"]
    for (device, color), (phase, style) in itertools.product(COLORS.items(), STYLES.items()):
        for plain, settings in (
            (True, {"ls": style[1:], "label": f"{device}, {phase}"}),
            (False, {"ls": "", "mfc": "none"}),
        ):
            curve = [
                row
                for row in rows
                if row["device"] == device and row["plain"] == plain and phase in row["phases"]
            ]
            if curve and device in alone:
                values = [
                    share(alone[device][phase], row["phases"][phase], row["devices"])
                    for row in curve
                ]
                for axes, points in zip(panels, zip(*values, strict=True), strict=True):
                    axes.plot(
                        [row["devices"] for row in curve],
                        points,
                        style[0],
                        color=color,
                        ms=5,
                        **settings,
                    )
    titles = (
        "speed, % of one device's for each",
        "links busy, % of the time",
        "peak memory of a device, GB",
    )
    for axes, title in zip(panels, titles, strict=True):
        axes.set_title(title, fontsize=10)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("devices")
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.set_ylim(bottom=0)
    panels[0].legend(fontsize=7, loc="lower left")
    figure.savefig(ROOT / "docs" / "scaling.png", dpi=130)


def share(alone: dict[str, Any], phase: dict[str, Any], devices: int) -> tuple[float, float, float]:
    """The figures of one point of the plot.

    Args:
        alone: The phase on one device.
        phase: The phase on several devices.
        devices: The number of devices.

    Returns:
        The speed in percent of linear speed, the percentage of its time that links are busy, and
        the peak memory in GB.
    """
    busy = phase["messages"]["seconds"] / phase["seconds"]
    return 100 * alone["seconds"] / phase["seconds"] / devices, 100 * busy, phase["peak"] / 1e9


if __name__ == "__main__":
    main()
