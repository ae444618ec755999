"""Compares an exploring step with a BF16 step on a TPU, in cycles that the compiler estimates.

    python scripts/tpu_cycles.py tpu-v5e flux1_sol_rl_hpsv2 --devices 8 mesh.fsdp=8

It compiles exploration and regeneration for a TPU that need not be present (`solrl_jax[plan-tpu]`),
and adds a row to benchmarks/tpu-cycles.json. The compiler states the estimated cycles of every
instruction, except for kernels written in Pallas. The cycles of such a kernel are the number of
instruction bundles that the compiler schedules for one step of its grid, times the steps; or the
time of its bytes at the peak rate of memory, if that is longer. No collective is counted that the
compiler gives no cycles.
"""

import argparse
import json
import os
import re
import tempfile
from collections import defaultdict
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

RECORD = Path(__file__).resolve().parents[1] / "benchmarks" / "tpu-cycles.json"
# Hz, at which the multipliers of a chip reach its public peak in BF16. They turn the time of a
# kernel's bytes into cycles.
CLOCKS = {"tpu-v5e": 1.5e9, "tpu-v5p": 1.75e9, "tpu-v6e": 1.75e9}
EMPTY: dict[str, Any] = {
    "what": "cycles of an exploring step and of a BF16 step on a TPU, by the compiler's estimate",
    "command": "python scripts/tpu_cycles.py DEVICE PRESET --devices DEVICES OVERRIDES",
    "date": "that of each row",
    "device": "none: compiled on CPU cores",
    "rows": [],
}
LARGEST = 12  # groups of instructions that a record lists
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_BUNDLE = re.compile(r"^\s*0x[0-9a-f]+ ", re.MULTILINE)
_LOOP = re.compile(r"scmp\.ge\.s32\.totalorder %s\w+, (\d+)\s*/\* loop exit test \*/")


def kernel_cycles(folder: Path, name: str) -> float:
    """Counts the cycles of one run of a Pallas kernel.

    Args:
        folder: The folder that the compiler wrote the final bundles of all kernels to.
        name: The name of the kernel's instruction.

    Returns:
        The scheduled bundles times the steps of the kernel's grid, which is one loop.
    """
    files = sorted(
        folder.glob(f"*-{name}-*-final_bundles.txt"), key=lambda file: file.stat().st_mtime
    )
    text = files[-1].read_text()
    return float(len(_BUNDLE.findall(text)) * max(map(int, _LOOP.findall(text)), default=1))


def step_cycles(text: str, folder: Path, target: Any, steps: int) -> dict[str, Any]:
    """Adds up the cycles of a program.

    Args:
        text: The compiled text of the program.
        folder: See `kernel_cycles`.
        target: The TPU.
        steps: The number of steps that the program takes.

    Returns:
        The cycles of one step, of its Pallas kernels among them, and the largest groups of
        instructions.
    """
    from solrl_jax.planning.hlo import parse
    from solrl_jax.planning.kernels import TPU_KERNEL

    module = parse(text)
    executed = [(s, n) for s, n in module.executed()]
    stated = {s.name: float(m[1]) for s, _ in executed if (m := _CYCLES.search(s.attributes))}
    totals: defaultdict[str, float] = defaultdict(float)
    in_kernels = 0.0
    for step, times in executed:
        cycles = stated.get(step.name, 0.0)
        label = f"{step.opcode} {re.sub(r'[.0-9]+$', '', step.name)}"
        if step.opcode == "custom-call" and step.text("custom_call_target") == TPU_KERNEL:
            moved = sum(a.size for a in step.arrays) + sum(o.size for o in step.operands)
            cycles = max(
                kernel_cycles(folder, step.name), CLOCKS[target.name] * moved / target.peaks.memory
            )
            in_kernels += times * cycles / steps
            label = f"kernel {step.text('op_name').rsplit('/', 2)[-2]}"
        shape = ",".join(map(str, step.arrays[0].shape)) if step.arrays else ""
        totals[f"{label} [{shape}]"] += times * cycles / steps
    largest = sorted(totals.items(), key=lambda item: -item[1])[:LARGEST]
    return {
        "cycles": round(sum(totals.values())),
        "kernels": round(in_kernels),
        "largest": {name: round(cycles) for name, cycles in largest},
    }


def measure(device: str, preset: str, count: int, overrides: list[str]) -> dict[str, Any]:
    """Compiles both programs and counts their cycles.

    Args:
        device: The kind of TPU, a key of `planning.targets.TARGETS`.
        preset: The name of a preset.
        count: The number of devices.
        overrides: Overrides of the preset, of the form `key=value`.

    Returns:
        A row of the record.
    """
    folder = Path(tempfile.mkdtemp())
    os.environ["LIBTPU_INIT_ARGS"] = (
        f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true "
        "--xla_jf_dump_llo_pass_label_regex=final_bundles"
    )
    from solrl_jax.config.presets import resolve
    from solrl_jax.planning import topology
    from solrl_jax.planning.targets import TARGETS

    target = TARGETS[device]
    topology.prepare(target)  # before JAX is imported
    from solrl_jax.planning import plan

    config = resolve(preset, ("rollout.explore.precision=auto", *overrides))
    planner = plan.Planner(config, plan.Devices(target, count))
    steps = {"explore": config.rollout.explore.num_steps, "regenerate": config.rollout.num_steps}
    row: dict[str, Any] = {
        "device": device,
        "devices": count,
        "preset": preset,
        "overrides": overrides,
        "format": planner.stages.experiment.explorer.format.name,
        "date": date.today().isoformat(),
        "versions": ", ".join(f"{name} {version(name)}" for name in ("jax", "libtpu")),
    }
    for stage, num_steps in steps.items():
        (program,) = planner.stages.programs(stage, planner.codes)
        executable = topology.compiled(planner.lowered(program), target)
        row[stage] = step_cycles(executable.as_text(), folder, target, num_steps)
        print(stage, json.dumps(row[stage], indent=1), flush=True)
    row["ratio"] = round(row["regenerate"]["cycles"] / row["explore"]["cycles"], 3)
    return row


def main() -> None:
    """Parses the command line; see the module docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("device")
    parser.add_argument("preset")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--devices", type=int, default=1)
    given = parser.parse_intermixed_args()
    row = measure(given.device, given.preset, given.devices, given.overrides)
    print("ratio", row["ratio"])
    record: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.exists() else EMPTY
    keys = ("device", "devices", "preset", "overrides")
    rows = [other for other in record["rows"] if any(other[k] != row[k] for k in keys)]
    record["rows"] = [*rows, row]
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
