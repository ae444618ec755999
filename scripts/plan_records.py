"""Collects the plans in `benchmarks/` into the records that `solrl doctor` proposes settings from.

    python scripts/plan_records.py          # writes solrl_jax/assets/plan_records.json
    python scripts/plan_records.py --table  # prints the table of docs/hardware.md

Nothing is compiled. Run it after `benchmarks/plans.json` or `benchmarks/scaling.json` has changed.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from solrl_jax.config.presets import resolve
from solrl_jax.config.sizes import model_size
from solrl_jax.planning.proposals import RECORDS, Machine, load_records, propose
from solrl_jax.planning.targets import TARGETS

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
PHASES = ("explore", "regenerate", "score", "update")


def record(
    preset: str,
    device: str,
    mesh: dict[str, int],
    *,
    devices: int,
    hosts: int,
    checkpointing: str | None,
    peak: float,
    seconds: dict[str, float],
    source: str,
    overrides: Sequence[str] = (),
) -> dict[str, Any]:
    """Returns one record. Batch sizes and image size are those of the preset with the overrides.

    Args:
        preset: The name of the preset that was planned.
        device: The kind of device, a key of `TARGETS`.
        mesh: The planned axes "data", "fsdp" and "tensor"; missing ones are 1.
        devices: The number of devices of all hosts.
        hosts: The number of hosts.
        checkpointing: `model.gradient_checkpointing` as planned; None: "auto" chose it.
        peak: The largest bytes of one device in any phase.
        seconds: Roofline seconds by phase; empty if they were not recorded.
        source: The file of the record.
        overrides: Settings `key=value` that differed from the preset.
    """
    config = resolve(preset, tuple(overrides))
    return {
        "model": config.model.name,
        "device": device,
        "platform": TARGETS[device].platform,
        "devices": devices,
        "hosts": hosts,
        "fsdp": mesh.get("fsdp", 1),
        "tensor": mesh.get("tensor", 1),
        "size": list(model_size(config)),
        "gradient_checkpointing": checkpointing,
        "update_batch": config.optimizer.per_device_batch_size,
        "rollout_batch": config.rollout.per_device_batch_size,
        "peak": round(peak),
        "seconds": {name: round(value, 2) for name, value in seconds.items() if name in PHASES},
        "source": source,
    }


def collect() -> list[dict[str, Any]]:
    """Returns the records of all plans of presets with their own settings, in the order of the
    files.
    """
    records = []
    source = "benchmarks/plans.json"
    for plan in json.loads((BENCHMARKS / "plans.json").read_text())["plans"].values():
        records.append(
            record(
                plan["preset"],
                plan["device"],
                plan["mesh"],
                devices=plan["devices"] * plan["hosts"],
                hosts=plan["hosts"],
                checkpointing=plan["gradient_checkpointing"],
                peak=plan["peak"],
                seconds={phase["name"]: phase["seconds"] for phase in plan["phases"]},
                source=source,
                overrides=plan.get("overrides", ()),
            )
        )
    source = "benchmarks/plan-flux1-h100.json"
    plan = json.loads((BENCHMARKS / "plan-flux1-h100.json").read_text())
    records.append(
        record(
            "flux1_sol_rl_pickscore",
            "h100",
            {},
            devices=1,
            hosts=1,
            checkpointing=plan["gradient_checkpointing"],
            peak=max(plan["peak_gb"].values()) * 1e9,
            seconds={},
            source=source,
        )
    )
    source = "benchmarks/scaling.json"
    for row in json.loads((BENCHMARKS / "scaling.json").read_text())["rows"]:
        if row["devices"] == 1:
            continue  # `plans.json` has it with the reward
        records.append(
            record(
                "flux1_sol_rl_hpsv2",
                row["device"],
                row["mesh"],
                devices=row["devices"],
                hosts=row["hosts"],
                checkpointing=None,
                peak=max(phase["peak"] for phase in row["phases"].values()),
                seconds={name: phase["seconds"] for name, phase in row["phases"].items()},
                source=source,
            )
        )
    return records


# The rows of docs/hardware.md: the hardware, the host that settings are proposed for, the number of
# hosts, and the models. 92 % of a device's memory are for arrays.
SHARE = 0.92
ROWS = (
    ("one 24 GB card", Machine("gpu", "NVIDIA RTX 4090", 1, 24e9 * SHARE), ("sana", "flux1")),
    ("one 40 GB card", Machine("gpu", "NVIDIA A100", 1, 40e9 * SHARE), ("sana", "flux1")),
    (
        "one 80 GB card",
        Machine("gpu", TARGETS["h100"].kind, 1, TARGETS["h100"].memory * SHARE),
        ("sana", "flux1", "sd3", "zimage"),
    ),
    (
        "8 x H100",
        Machine("gpu", TARGETS["h100"].kind, 8, TARGETS["h100"].memory * SHARE),
        ("sana", "flux1"),
    ),
    (
        "8 x B200",
        Machine("gpu", TARGETS["b200"].kind, 8, TARGETS["b200"].memory * SHARE),
        ("sana", "flux1", "sd3", "zimage"),
    ),
    ("TPU v5e-8", Machine("tpu", TARGETS["tpu-v5e"].kind, 8, 16e9 * SHARE), ("sana",)),
    ("TPU v6e-8", Machine("tpu", TARGETS["tpu-v6e"].kind, 8, 32e9 * SHARE), ("sana",)),
)


def table() -> str:
    """Returns the table of docs/hardware.md, with the settings that `mesh=auto` takes."""
    lines = [
        "| hardware | preset | `mesh=auto` sets | planned peak, GB | planned seconds | plan for |",
        "|---|---|---|---|---|---|",
    ]
    for hardware, machine, models in ROWS:
        for model in models:
            preset = f"{model}_sol_rl_pickscore"
            config = resolve(preset)
            chosen = propose(config, machine, load_records())
            settings = " ".join(f"`{setting}`" for setting in chosen.overrides(config))
            plan = chosen.record
            figures = "awaits a plan | awaits a plan | the settings are a guess"
            if plan is not None:
                seconds = f"{sum(plan.seconds.values()):.0f}" if plan.seconds else "not recorded"
                figures = f"{plan.peak / 1e9:.1f} | {seconds} | {plan.devices} x {plan.device}"
            cells = f"{hardware} | `{preset}` | {settings or 'nothing'} | {figures}"
            lines.append(f"| {cells} |")
    return "\n".join(lines)


def main() -> None:
    """Writes the records, one per line, or prints the table."""
    if "--table" in sys.argv:
        print(table())
        return
    lines = ",\n".join(f" {json.dumps(entry)}" for entry in collect())
    RECORDS.write_text(f"[\n{lines}\n]\n")
    print(f"{len(collect())} records -> {RECORDS}")


if __name__ == "__main__":
    main()
