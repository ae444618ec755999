"""Settings for the devices at hand, from plans that were made before: `mesh=auto`.

Compiling a plan takes minutes and the compiler of the device. The package therefore carries the
peak memory and the seconds of plans of released models (`assets/plan_records.json`, which
`scripts/plan_records.py` collects), and proposes the settings of the plan that suits best.
"""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from solrl_jax.config.schema import Config
from solrl_jax.config.sizes import largest_training_size
from solrl_jax.planning.targets import TARGETS

RECORDS = Path(__file__).parents[1] / "assets" / "plan_records.json"
# The override that takes the proposed settings.
MESH_AUTO = "mesh=auto"


class Record(NamedTuple):
    """The plan of a preset with its own batch sizes, for one kind of device.

    Attributes:
        model: The name of the model, `model.name`, e.g. "flux1".
        device: The kind of device, a key of `planning.targets.TARGETS`.
        platform: "gpu" or "tpu".
        devices: The number of devices of all hosts.
        hosts: The number of hosts, among which `devices` are divided equally.
        fsdp: The size of the mesh axis `fsdp` (`mesh.fsdp`): the number of devices that share the
            parameters.
        tensor: The size of the mesh axis `tensor` (`mesh.tensor`): the number of devices that share
            each linear layer; 1: no tensor parallelism.
        size: Height and width of the images in pixels.
        gradient_checkpointing: What the update recomputes, `model.gradient_checkpointing`: "none",
            "matmuls" or "blocks". None: what "auto" chose there.
        update_batch: The number of samples of a device in one micro-batch of the update,
            `optimizer.per_device_batch_size`.
        rollout_batch: The largest number of samples that a device generates at once,
            `rollout.per_device_batch_size`.
        peak: The largest bytes of one device in any phase.
        seconds: Roofline seconds of one iteration by the name of the phase, e.g. "explore"; may be
            empty.
        source: The file of the plan in the repository.
    """

    model: str
    device: str
    platform: str
    devices: int
    hosts: int
    fsdp: int
    tensor: int
    size: tuple[int, int]
    gradient_checkpointing: str | None
    update_batch: int
    rollout_batch: int
    peak: int
    seconds: Mapping[str, float]
    source: str

    @property
    def shards(self) -> int:
        """The number of devices that the base is divided among, `fsdp` times `tensor`."""
        return self.fsdp * self.tensor


class Machine(NamedTuple):
    """The devices that settings are proposed for.

    Attributes:
        platform: "gpu", "tpu" or "cpu".
        kind: JAX's `device_kind`.
        devices: The number of devices of one host.
        memory: The bytes of one device that JAX may use.
    """

    platform: str
    kind: str
    devices: int
    memory: float


class Proposal(NamedTuple):
    """Settings for a machine.

    Attributes:
        settings: The proposed values of fields by their dotted names, e.g. "mesh.fsdp": 8. Empty:
            keep the settings of the preset.
        record: The plan that they were taken from; None for a guess, and without settings.
        reason: One line that says where they come from.
    """

    settings: Mapping[str, Any]
    record: Record | None
    reason: str

    def overrides(self, config: Config) -> list[str]:
        """Returns the settings that differ from a configuration, as `key=value`.

        Args:
            config: The configuration whose present values are compared with the settings.

        Returns:
            The differing settings, e.g. ["mesh.fsdp=8"], in the order of `settings`. Empty if all
            are equal.
        """
        changed = []
        for name, value in self.settings.items():
            section, field = name.split(".")
            if getattr(getattr(config, section), field) != value:
                changed.append(f"{name}={value}")
        return changed


@functools.cache
def load_records() -> tuple[Record, ...]:
    """Returns the plans that the package contains (`assets/plan_records.json`), in the order of
    their file, which is read at the first call alone.
    """
    return tuple(
        Record(**{**entry, "size": tuple(entry["size"])})
        for entry in json.loads(RECORDS.read_text())
    )


def propose(config: Config, machine: Machine, records: Sequence[Record]) -> Proposal:
    """Proposes mesh, gradient checkpointing and batch sizes for a machine.

    A plan counts if it is of the same model and platform, and its images have at least as many
    pixels. It fits if its peak is at most the memory of a device and its shards divide the number
    of devices. Of those that fit, the one without or with least tensor parallelism is taken; of
    equal ones, one that does not recompute whole blocks, then that with the smallest `fsdp`, then
    one for this kind of device, and last the one that uses most memory. If none fits, the settings
    are a guess: the base divided among all devices, blocks recomputed, and a batch that is scaled
    down from the plan with the least memory.

    Args:
        config: The configuration: its model's name, its largest training size, and
            `train.parameters`.
        machine: The devices to propose for.
        records: The plans to choose from, by default all of the package (`load_records()`).

    Returns:
        The proposal, with the chosen plan as `record`, or None for a guess. `settings` has
        `mesh.fsdp` and both batch sizes per device; from a plan also `mesh.tensor`, and
        `model.gradient_checkpointing` if the plan names one; in a guess also
        `model.gradient_checkpointing` and, for large images, `model.vae_tile_size`. It is empty if
        no plan counts (as for CPUs), and if `train.parameters` is not "adapters", which no record
        covers.
    """
    where = f"{machine.devices} x {machine.kind}, {machine.memory / 1e9:.3g} GB each"
    height, width = largest_training_size(config)
    same_model = [
        record
        for record in records
        if record.model == config.model.name
        and record.platform == machine.platform
        and record.size[0] * record.size[1] >= height * width
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
        if record.peak <= machine.memory and machine.devices % record.shards == 0
    ]
    if not fitting:
        return _guess(config, machine, min(same_model, key=lambda record: record.peak), where)
    best = min(
        fitting,
        key=lambda record: (
            record.tensor,
            record.gradient_checkpointing == "blocks",
            record.fsdp,
            TARGETS[record.device].kind != machine.kind,
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


def _guess(config: Config, machine: Machine, nearest: Record, where: str) -> Proposal:
    """Proposes settings for a machine that no plan fits.

    `mesh.fsdp` is the number of devices of the host, so that the base is divided among all, and
    blocks are recomputed. The batch of the update is that of `nearest`, halved until the peak of
    `nearest` times the same factor is within the memory, but even and at least 2. The batch of the
    rollout is that of `nearest`, at most the batch of the update. Images with a side above 512
    pixels are decoded in tiles of 512. `mesh.tensor` stays.

    Args:
        config: The configuration. Its largest training size decides whether images are decoded in
            tiles.
        machine: The devices to guess for.
        nearest: The plan with the least memory.
        where: The devices in words, for the reason.

    Returns:
        The proposal with these settings and `record` None. Nothing checked whether they fit into
        memory.
    """
    batch = nearest.update_batch
    while batch > 2 and nearest.peak * batch / nearest.update_batch > machine.memory:
        batch //= 2
    batch = max(2, batch - batch % 2)  # objectives that train on pairs need an even batch
    settings: dict[str, Any] = {
        "mesh.fsdp": machine.devices,
        "model.gradient_checkpointing": "blocks",
        "optimizer.per_device_batch_size": batch,
        "rollout.per_device_batch_size": min(batch, nearest.rollout_batch),
    }
    height, width = largest_training_size(config)
    if max(height, width) > 512:
        settings["model.vae_tile_size"] = 512
    reason = (
        f"no plan on record fits {where}: the least is {nearest.peak / 1e9:.3g} GB on "
        f"{nearest.devices} x {nearest.device} ({nearest.source}); these settings are a guess, "
        "which `solrl plan` can check"
    )
    return Proposal(settings, None, reason)


def expand_mesh_auto(
    overrides: Sequence[str], resolve: Callable[[Sequence[str]], Config], machine: Machine
) -> tuple[list[str], str | None]:
    """Replaces the override `mesh=auto` by the settings that are proposed for a machine.

    Args:
        overrides: Overrides `key=value`.
        resolve: Returns the configuration of the user's preset with the overrides that it is given.
            It is called once, with all overrides but `mesh=auto`.
        machine: The devices to propose for.

    Returns:
        With `mesh=auto` among the overrides: the proposed settings followed by the other overrides,
        which win because they come later, and one line that names the settings and where they come
        from. A proposed setting is left out if another override names it or the configuration has
        that value. Otherwise the overrides as they are, and None.

    Raises:
        ConfigError: If the preset or another override is invalid.
    """
    if MESH_AUTO not in overrides:
        return list(overrides), None
    others = [override for override in overrides if override != MESH_AUTO]
    config = resolve(others)
    proposal = propose(config, machine, load_records())
    named = {override.partition("=")[0].strip() for override in others}
    chosen = [
        setting for setting in proposal.overrides(config) if setting.partition("=")[0] not in named
    ]
    settings = " ".join(chosen) or "the preset's own settings"
    return [*chosen, *others], f"{MESH_AUTO}: {settings}: {proposal.reason}"
