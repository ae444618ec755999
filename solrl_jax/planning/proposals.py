"""Proposes settings for the devices at hand from earlier plans: `mesh=auto`.

Compiling a plan takes minutes and the compiler of the device. The package therefore contains the
peak memory and the seconds of plans of released models (`assets/plan_records.json`, which
`scripts/plan_records.py` collects), and proposes the settings of the plan that suits best.
"""

import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from solrl_jax.config.presets import resolve
from solrl_jax.config.schema import Config
from solrl_jax.config.sizes import largest_training_size
from solrl_jax.planning.targets import TARGETS, target_of

RECORDS = Path(__file__).parents[1] / "assets" / "plan_records.json"
# The override that is replaced by the proposed settings.
MESH_AUTO = "mesh=auto"
OTHER_KIND = 0.95  # of a device's memory may be planned for another kind of device


class Record(NamedTuple):
    """The result of an earlier plan: the memory and the seconds of one preset on some devices.

    Attributes:
        model: The name of the model, `model.name`, e.g. "flux1".
        device: The kind of device, a key of `planning.targets.TARGETS`, e.g. "h100".
        platform: "gpu" or "tpu".
        devices: The number of devices on all hosts together.
        hosts: The number of hosts.
        fsdp: The number of devices that share the parameters, `mesh.fsdp`.
        tensor: The number of devices that share each linear layer, `mesh.tensor`; 1: no tensor
            parallelism.
        size: (height, width) of images in pixels, or (height, width, number of frames) of clips.
        gradient_checkpointing: The setting `model.gradient_checkpointing`: "none", "matmuls" or
            "blocks". None: it was "auto".
        update_batch: The loss terms per device in one micro-batch of the update,
            `optimizer.per_device_batch_size`.
        rollout_batch: The samples that a device generates at once, `rollout.per_device_batch_size`.
        peak: The largest number of bytes in use on one device in any phase of the plan.
        seconds: Lower bounds of the seconds per iteration, by the name of the phase, e.g.
            "explore". May be empty.
        source: The file of the plan in the repository.
    """

    model: str
    device: str
    platform: str
    devices: int
    hosts: int
    fsdp: int
    tensor: int
    size: tuple[int, ...]
    gradient_checkpointing: str | None
    update_batch: int
    rollout_batch: int
    peak: int
    seconds: Mapping[str, float]
    source: str

    @property
    def shards(self) -> int:
        """The number of devices that the parameters of the model are divided among: `fsdp` times
        `tensor`.
        """
        return self.fsdp * self.tensor


class Machine(NamedTuple):
    """The devices that settings are proposed for.

    Attributes:
        platform: "gpu", "tpu" or "cpu".
        kind: The kind of device as JAX names it (`jax.Device.device_kind`), e.g. "NVIDIA H200".
        devices: The number of devices of one host, even if there are several hosts.
        memory: The bytes of one device that JAX may use; on a CPU, the memory of the machine.
    """

    platform: str
    kind: str
    devices: int
    memory: float


class Proposal(NamedTuple):
    """Proposed settings for a machine.

    Attributes:
        settings: Values of configuration fields by their dotted names, e.g. {"mesh.fsdp": 8}.
            Empty: nothing is proposed, and the preset stays as it is.
        record: The earlier plan that the settings were taken from. None if they are a guess, or if
            `settings` is empty.
        reason: One line for the user: the origin of the settings, or why there are none.
    """

    settings: Mapping[str, Any]
    record: Record | None
    reason: str

    def overrides(self, config: Config) -> list[str]:
        """Returns the settings that differ from a configuration, as `key=value`.

        Args:
            config: The configuration to compare the settings with.

        Returns:
            The differing settings, e.g. ["mesh.fsdp=8"], in the order of `settings`. Empty if all
            are equal.
        """
        differences = []
        for name, value in self.settings.items():
            section, field = name.split(".")
            if getattr(getattr(config, section), field) != value:
                differences.append(f"{name}={value}")
        return differences


@functools.cache
def load_records() -> tuple[Record, ...]:
    """Returns the results of earlier plans that the package contains (`assets/plan_records.json`).

    The file is read once per process.
    """
    return tuple(
        Record(**{**entry, "size": tuple(entry["size"])})
        for entry in json.loads(RECORDS.read_text())
    )


def propose(config: Config, machine: Machine, records: Sequence[Record]) -> Proposal:
    """Proposes mesh, gradient checkpointing and batch sizes for a machine, from earlier plans.

    It considers plans of the same model on the same platform (GPU or TPU; a CPU has none) for at
    least as many pixels, in all frames. A plan fits if two conditions hold. It needs no more memory
    per device than the machine has, or, if the plan is for another kind of device, 95 % of that.
    Its `mesh.fsdp` times its `mesh.tensor`, times `mesh.sequence`
    of the configuration, divides the number of devices. If `mesh.tensor` or `mesh.sequence` of the
    configuration is above 1, both are kept, so a plan also needs the same `mesh.tensor`.

    Among the plans that fit, these criteria choose the one that is probably fastest, the most
    important criterion first: the least tensor parallelism, a `model.gradient_checkpointing` other
    than "blocks", the smallest `mesh.fsdp`, the same kind of device, the largest peak memory. If
    plans are considered but none fits, the settings are a guess that saves as much memory as
    possible.

    Args:
        config: The configuration to propose for. Its model, largest image size, mesh and
            `train.parameters` are used.
        machine: The devices to propose for.
        records: The earlier plans to choose from, e.g. `load_records()`.

    Returns:
        The proposal. Its settings are `mesh.fsdp`, `optimizer.per_device_batch_size` and
        `rollout.per_device_batch_size`. A plan adds `mesh.tensor` and, unless the plan itself had
        "auto", `model.gradient_checkpointing`. A guess adds `model.gradient_checkpointing="blocks"`
        and, for images above 512 pixels in height or width, `model.vae_tile_size=512`. The settings
        are empty if no plan is considered, or if the configuration trains parameters other than
        adapters.
    """
    where = f"{machine.devices} x {machine.kind}, {machine.memory / 1e9:.3g} GB each"
    size = largest_training_size(config)
    height, width = size[:2]
    same_model = [
        record
        for record in records
        if record.model == config.model.name
        and record.platform == machine.platform
        and math.prod(record.size) >= math.prod(size)
    ]
    if config.train.parameters != "adapters":
        parameters = f"train.parameters={config.train.parameters}"
        return Proposal({}, None, f"no plan on record has {parameters}")
    if not same_model:
        return Proposal(
            {}, None, f"no plan on record of {config.model.name} at {width} x {height} for {where}"
        )
    fitting = [
        record
        for record in same_model
        if record.peak <= _memory_for(record, machine)
        and machine.devices % (record.shards * config.mesh.sequence) == 0
        and (_devices_per_sample(config) == 1 or record.tensor == config.mesh.tensor)
    ]
    if not fitting:
        return _guess(config, machine, min(same_model, key=lambda record: record.peak), where)
    best = min(
        fitting,
        key=lambda record: (
            record.tensor,
            record.gradient_checkpointing == "blocks",
            record.fsdp,
            not is_same_kind(record, machine),
            -record.peak,
        ),
    )
    settings: dict[str, Any] = {
        "mesh.fsdp": best.fsdp,
        "mesh.tensor": best.tensor,
        "optimizer.per_device_batch_size": best.update_batch,
        "rollout.per_device_batch_size": best.rollout_batch,
    }
    if best.gradient_checkpointing is not None:
        settings["model.gradient_checkpointing"] = best.gradient_checkpointing
    reason = (
        f"planned {best.peak / 1e9:.3g} GB on {best.devices} x {best.device} ({best.source}), of "
        f"{where}"
    )
    return Proposal(settings, best, reason)


def _memory_for(record: Record, machine: Machine) -> float:
    """Returns the bytes that the peak of an earlier plan may have on a device of a machine.

    That is the memory of the device, less a margin for a plan of another kind of device, because
    the compiler may allocate more where it compiles for this kind.

    Args:
        record: The earlier plan.
        machine: The devices that settings are proposed for.
    """
    return machine.memory * (1.0 if is_same_kind(record, machine) else OTHER_KIND)


def is_same_kind(record: Record, machine: Machine) -> bool:
    """Returns whether an earlier plan is for the kind of device that a machine has.

    Args:
        record: The earlier plan.
        machine: The devices that settings are proposed for.
    """
    return target_of(machine.kind) == TARGETS[record.device]


def _devices_per_sample(config: Config) -> int:
    """Returns the number of devices that compute each sample together: `mesh.tensor` times
    `mesh.sequence`.
    """
    return config.mesh.tensor * config.mesh.sequence


def _guess(config: Config, machine: Machine, nearest: Record, where: str) -> Proposal:
    """Proposes settings for a machine that no earlier plan fits, to save as much memory as
    possible.

    `mesh.fsdp` is the number of devices of the host, divided by `mesh.tensor` and `mesh.sequence`
    of the configuration, rounded down, and at least 1. The backward pass recomputes whole blocks.
    The batch size of the update is halved until memory in proportion to it would fit, and rounded
    down to an even number, at least 2. The batch size of the rollout is that of `nearest`, but at
    most this batch size of the update. Images of more than 512 pixels in height or width are
    decoded in tiles of 512. Whether the result fits is not known.

    Args:
        config: The configuration. Its largest image size and its mesh are used.
        machine: The devices to propose for.
        nearest: The plan with the least memory. Its batch sizes are the starting point.
        where: A description of the devices, for the text of `reason`.

    Returns:
        The proposal, with None as its `record`.
    """
    batch = nearest.update_batch
    while batch > 2 and nearest.peak * batch / nearest.update_batch > machine.memory:
        batch //= 2
    batch = max(2, batch - batch % 2)  # objectives that train on pairs need an even batch
    settings: dict[str, Any] = {
        "mesh.fsdp": max(1, machine.devices // _devices_per_sample(config)),
        "model.gradient_checkpointing": "blocks",
        "optimizer.per_device_batch_size": batch,
        "rollout.per_device_batch_size": min(batch, nearest.rollout_batch),
    }
    if max(largest_training_size(config)[:2]) > 512:
        settings["model.vae_tile_size"] = 512
    reason = (
        f"no plan on record fits {where}: the least is {nearest.peak / 1e9:.3g} GB on "
        f"{nearest.devices} x {nearest.device} ({nearest.source}); these settings are a guess, "
        "which `solrl plan` can check"
    )
    return Proposal(settings, None, reason)


def expand_mesh_auto(
    preset: str, overrides: Sequence[str], find_machine: Callable[[], Machine]
) -> tuple[list[str], str | None]:
    """Replaces the override `mesh=auto` by the settings that are proposed for a machine.

    Args:
        preset: The name of the user's preset.
        overrides: The user's overrides `key=value`, with or without `mesh=auto`.
        find_machine: A function that returns the devices to propose for. It is called once, and
            only if `mesh=auto` is among the overrides, because it may start JAX's backend.

    Returns:
        A pair:
          1. The new list of overrides: the proposed settings that no other override names and that
             differ from the preset with the other overrides, followed by these overrides.
          2. One line for the user: the settings and their origin, or why there are none.
        Without `mesh=auto`, the pair is the unchanged overrides, which are not checked, and None.

    Raises:
        ConfigError: If, with `mesh=auto`, the preset or an override is invalid.
    """
    if MESH_AUTO not in overrides:
        return list(overrides), None
    others = [override for override in overrides if override != MESH_AUTO]
    config = resolve(preset, others)
    proposal = propose(config, find_machine(), load_records())
    override_names = {override.partition("=")[0].strip() for override in others}
    mesh_settings = [
        setting
        for setting in proposal.overrides(config)
        if setting.partition("=")[0] not in override_names
    ]
    settings = " ".join(mesh_settings) or "the preset's own settings"
    return [*mesh_settings, *others], f"{MESH_AUTO}: {settings}: {proposal.reason}"
