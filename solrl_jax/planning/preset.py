"""Plans the training of a preset on devices that need not be here.

This module imports JAX only when `plan` is called, because the compiler of an absent device is
chosen by environment variables that JAX reads as it is imported.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from solrl_jax.config.presets import resolve
from solrl_jax.config.values import expand_home
from solrl_jax.errors import InputError
from solrl_jax.planning import topology
from solrl_jax.planning.targets import TARGETS
from solrl_jax.storage.files import refuse_existing


def plan(
    preset: str,
    *overrides: str,
    device: str = "h200",
    devices: int = 1,
    hosts: int = 1,
    hlo: str | Path | None = None,
    force: bool = False,
    progress: Callable[[str], None] = lambda program: None,
) -> dict[str, Any]:
    """Predicts memory and time of an iteration, by compiling the programs for the devices.

    Call it before anything imports JAX, in a process that does not train: it sets environment
    variables, after which JAX compiles for absent devices only. No weights are needed. The compiler
    of the devices must be installed (`solrl_jax[plan-cuda]` or `solrl_jax[plan-tpu]`).

    Args:
        preset: The name of a preset, e.g. "flux1_sol_rl_hpsv2".
        *overrides: Settings that differ from the preset, as `key=value`. Later ones win.
        device: The kind of device, a key of `planning.targets.TARGETS`, e.g. "b200".
        devices: The number of devices on each host, at least 1.
        hosts: The number of hosts, at least 1.
        hlo: A directory for the compiled programs as text, `STAGE-PROGRAM.hlo`. It is created if
            necessary, and a leading `~` is expanded. None: they are not written.
        force: Whether `hlo` may already have files `*.hlo`. Files that this plan does not write
            again stay.
        progress: Called with "STAGE: PROGRAM" before each program is measured.

    Returns:
        The plan of one device, as `solrl plan` prints it in JSON: "stages" (for each its "seconds",
        a roofline bound, its "peak" in bytes and its "programs" with kernels and collectives),
        "seconds" of the iteration and of its "rollout", "peak", "usable" and "fits" for its memory
        in bytes, and others that `planning.plan.plan` lists.

    Raises:
        ConfigError: If the preset or an override is invalid.
        InputError: If the device is unknown, `hlo` has files `*.hlo` without `force` or cannot be
            written to, the compiler is not installed, there are no such hosts, or the configuration
            cannot be run on them, e.g. because `mesh.fsdp` does not divide their devices.
        RunError: If the disk refuses a compiled text.
        ValueError: If `hlo` begins with `~USER` and there is no such user.
    """
    config = resolve(preset, overrides)
    if device not in TARGETS:
        raise InputError(f"device={device!r}: expected one of {', '.join(TARGETS)}")
    folder = None if hlo is None else Path(expand_home(str(hlo)))
    refuse_existing("hlo", folder.glob("*.hlo") if folder else (), force)
    topology.prepare(TARGETS[device])  # before JAX is imported
    from solrl_jax.planning.plan import Devices
    from solrl_jax.planning.plan import plan as plan_config

    return plan_config(config, Devices(TARGETS[device], devices, hosts), folder, progress)
