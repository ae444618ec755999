"""Plans the training of a preset on devices that need not be present.

This module imports JAX only when `plan` is called, because `plan` first sets environment variables
for compiling for absent devices, which JAX reads at import.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from solrl_jax.config.presets import resolve
from solrl_jax.errors import InputError
from solrl_jax.planning import topology
from solrl_jax.planning.targets import TARGETS
from solrl_jax.storage.files import refuse_existing
from solrl_jax.storage.stores import local_path


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
    """Predicts memory and time of one training iteration of a preset, on devices that are not
    present.

    The programs are compiled for these devices, which needs their compiler (`pip install
    'solrl_jax[plan-cuda]'` or `[plan-tpu]`), but no weights. Also imports objectives and rewards
    from outside the package, and reads the prompt sets. Data sets of the hub are downloaded unless
    they are in the hub's cache.

    Call it before anything imports JAX (not checked), in a process that does not train. It sets
    environment variables that make JAX run on the CPU.

    Args:
        preset: The name of a preset, e.g. "flux1_sol_rl_hpsv2".
        *overrides: Settings that differ from the preset, as `key=value`. Later ones win.
        device: The kind of device, a key of `planning.targets.TARGETS`, e.g. "b200".
        devices: The number of devices on each host, from 1 to `Target.on_host`. For TPUs, it must
            be the number of JAX devices of 1, 4 or 8 chips (8 only with a two-dimensional torus).
        hosts: The number of hosts, at least 1; a power of two for TPUs.
        hlo: A directory for the compiled programs as text, `PHASE-PROGRAM.hlo`. It is created if
            necessary. None: they are not written.
        force: Whether `hlo` may contain files `*.hlo` already, which may be replaced.
        progress: Called once per program with "PHASE: PROGRAM", before `plan` waits for its
            compilation and analyzes the result. An error that it raises ends the plan.

    Returns:
        A dict of JSON values, as `solrl plan` prints it. All bytes are per device, and all seconds
        are roofline bounds. The docstring of `solrl_jax.planning.plan.plan` lists all keys but
        "overrides". The most important ones are:

        * "seconds" and "rollout": the seconds of an iteration, and of its sample generation.
        * "peak", "usable" and "fits": the bytes that are needed, the bytes that arrays may take,
            and whether the former are within the latter.
        * "phases": a list with a dict per phase: "name", "seconds", "peak" and "programs" (with
            their memory, kernels and collectives).
        * "overrides": the arguments `overrides`.

    Raises:
        ConfigError: If the preset or an override is invalid, or the objective does not allow other
            settings.
        InputError: If the device is unknown, its compiler is not installed, the configuration
            cannot be run on so many devices, or `hlo` cannot be written to, or contains `*.hlo`
            files and `force` is false.
        RunError: If a compiled text cannot be written to the disk.
        jax.errors.JaxRuntimeError: If XLA cannot compile a program.
    """
    config = resolve(preset, overrides)
    if device not in TARGETS:
        raise InputError(f"device={device!r}: expected one of {', '.join(TARGETS)}")
    folder = None if hlo is None else local_path("hlo", hlo)
    refuse_existing("hlo", folder.glob("*.hlo") if folder else (), force)
    topology.prepare(TARGETS[device])  # before JAX is imported
    from solrl_jax.planning.plan import Devices
    from solrl_jax.planning.plan import plan as plan_config

    planned = plan_config(config, Devices(TARGETS[device], devices, hosts), folder, progress)
    return planned | {"overrides": list(overrides)}
