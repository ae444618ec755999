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
import itertools
import json
import os
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from solrl_jax.planning.hlo import Instruction, Module

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
_FINAL_BUNDLES = re.compile(r"\d+-(.+)-\d+-final_bundles\.txt")
_BUNDLE = re.compile(r"^\s*0x[0-9a-f]+ ", re.MULTILINE)
_LOOP = re.compile(r"scmp\.ge\.s32\.totalorder %s\w+, (\d+)\s*/\* loop exit test \*/")


def identity(kernel: "Instruction") -> tuple[Any, ...]:
    """Returns what decides the bundles of a Pallas kernel: its compiled body, and the types, shapes
    and memory spaces of its results and operands.

    Args:
        kernel: The instruction that runs the kernel.
    """
    operands = tuple(operand.arrays for operand in kernel.operands)
    return kernel.text("body"), kernel.arrays, operands


def kernel_cycles(module: "Module", files: Iterable[Path]) -> dict[tuple[Any, ...], float]:
    """Counts the cycles of one run of each Pallas kernel of a program.

    The compiler schedules identical kernels once, and names the file after one of them.

    Args:
        module: The program.
        files: The files that the compiler wrote for this program, which have the final bundles of
            its kernels by the names of their instructions.

    Returns:
        By the `identity` of a kernel, its scheduled bundles times the steps of its grid, which is
        one loop. Kernels without a file are left out.
    """
    bundles = {
        match[1]: file
        for file in sorted(files, key=lambda file: file.stat().st_mtime)
        if (match := _FINAL_BUNDLES.fullmatch(file.name))
    }
    cycles = {}
    for kernel in itertools.chain.from_iterable(module.computations.values()):
        if _is_pallas(kernel) and kernel.name in bundles:
            text = bundles[kernel.name].read_text()
            grid_steps = max(map(int, _LOOP.findall(text)), default=1)
            cycles[identity(kernel)] = float(len(_BUNDLE.findall(text)) * grid_steps)
    return cycles


def _is_pallas(step: "Instruction") -> bool:
    """Returns whether an instruction runs a kernel that is written in Pallas."""
    from solrl_jax.planning.kernels import TPU_KERNEL

    return step.opcode == "custom-call" and step.text("custom_call_target") == TPU_KERNEL


def step_cycles(
    module: "Module", kernels: Mapping[tuple[Any, ...], float], target: Any, steps: int
) -> dict[str, Any]:
    """Adds up the cycles of a program.

    Args:
        module: The program.
        kernels: The cycles of one run of its Pallas kernels, by their `identity`.
        target: The TPU.
        steps: The number of steps that the program takes.

    Returns:
        The cycles of one step, of its Pallas kernels among them, and the largest groups of
        instructions.

    Raises:
        ValueError: If the cycles of a Pallas kernel are not among `kernels`.
    """
    executed = list(module.executed())
    stated = {s.name: float(m[1]) for s, _ in executed if (m := _CYCLES.search(s.attributes))}
    totals: defaultdict[str, float] = defaultdict(float)
    in_kernels = 0.0
    for step, times in executed:
        cycles = stated.get(step.name, 0.0)
        label = f"{step.opcode} {re.sub(r'[.0-9]+$', '', step.name)}"
        if _is_pallas(step):
            if identity(step) not in kernels:
                raise ValueError(
                    f"{step.name}: the compiler wrote no bundles of this kernel or an identical one"
                )
            num_bytes = sum(a.size for a in step.arrays) + sum(o.size for o in step.operands)
            cycles = max(
                kernels[identity(step)], CLOCKS[target.name] * num_bytes / target.peaks.memory
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
    from solrl_jax.planning.hlo import parse

    config = resolve(preset, ("rollout.explore.precision=auto", *overrides))
    planner = plan.Planner(config, plan.Devices(target, count))
    steps = {"explore": config.rollout.explore.num_steps, "regenerate": config.rollout.num_steps}
    row: dict[str, Any] = {
        "device": device,
        "devices": count,
        "preset": preset,
        "overrides": overrides,
        "format": planner.phases.experiment.explorer.format.name,
        "date": date.today().isoformat(),
        "versions": ", ".join(f"{name} {version(name)}" for name in ("jax", "libtpu")),
    }
    kernels: dict[tuple[Any, ...], float] = {}
    for phase, num_steps in steps.items():
        (program,) = planner.phases.programs(phase, planner.codes)
        # Instructions of both programs may have the same name, so each reads its own files.
        before = set(folder.iterdir())
        module = parse(topology.compiled(planner.lowered(program), target).as_text())
        kernels |= kernel_cycles(module, set(folder.iterdir()) - before)
        row[phase] = step_cycles(module, kernels, target, num_steps)
        print(phase, json.dumps(row[phase], indent=1), flush=True)
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
    arguments = parser.parse_intermixed_args()
    row = measure(arguments.device, arguments.preset, arguments.devices, arguments.overrides)
    print("ratio", row["ratio"])
    record: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.exists() else EMPTY
    keys = ("device", "devices", "preset", "overrides")
    rows = [other for other in record["rows"] if any(other[k] != row[k] for k in keys)]
    record["rows"] = [*rows, row]
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
