"""Refuses a run whose largest arrays cannot fit into memory, before the model's weights are loaded.

The sizes are computed from shapes alone. They are lower bounds, so a refused run cannot work, with
two exceptions: adapters are counted as if the mesh axes `fsdp` and `tensor` did not divide them,
and a batch of clips is counted with all frames, even if only their first frames are ever decoded. A
run that passes may still not fit; `solrl plan` finds that out by compiling it. Compiling takes
minutes, so a run does not do it by itself.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax

from solrl_jax.config.batch import samples_per_device
from solrl_jax.config.schema import Config
from solrl_jax.config.sizes import evaluation_size, largest_training_size
from solrl_jax.config.values import Size
from solrl_jax.errors import InputError
from solrl_jax.models.pipeline import Pipeline
from solrl_jax.parallel import hosts
from solrl_jax.quant.formats import DeviceInfo, resolve_format
from solrl_jax.rl.explore.continuation import continued_steps, find_query_steps
from solrl_jax.rl.trainable.trainable import TrainedPaths, flatten

# Bytes of a float32.
FLOAT = 4
# Float32 copies of each adapter: trained, old, EMA, gradient, and two moments.
ADAPTER_COPIES = 6
# Float32 copies of each parameter that is trained in full. Sharded over devices: trained, EMA,
# two moments, and the sum of gradients in two parts. Not sharded: the gradient of a micro-batch.
SHARDED_COPIES = 6
WHOLE_COPIES = 1


@dataclasses.dataclass(frozen=True)
class _Request:
    """The smallest memory that the value of a configuration field needs: `value` times `unit`
    bytes, or `saturates_at` times `unit` bytes if that is less.

    Attributes:
        field: The dotted name of the field, e.g. "lora.rank".
        value: The configured value of the field, a count.
        unit: The bytes per unit of the value.
        size: The size of the images or clips whose pixels or latents take the memory, for the
            message: (height, width) in pixels, for clips also the number of frames. None: the
            memory is not for images.
        memory: The available bytes of memory.
        owner: Whose memory it is, for the message: "a host" or "a device".
        saturates_at: The value beyond which the memory no longer grows. None: it always grows.
    """

    field: str
    value: int
    unit: int
    size: Size | None
    memory: float
    owner: str
    saturates_at: int | None = None

    @property
    def needed(self) -> int:
        """The bytes that the configuration field needs: `unit` times `value`, or times
        `saturates_at` if that is less.
        """
        count = self.value if self.saturates_at is None else min(self.value, self.saturates_at)
        return count * self.unit


def check_memory(
    config: Config, pipeline: Pipeline, trained_paths: TrainedPaths, groups: int
) -> None:
    """Checks that none of the largest allocations of a run exceeds the memory for it.

    All processes of a run must call it. Each of these arrays, in float32, must fit by itself:

    * In the memory of the smallest host: the latents of all candidates of an iteration, twice if
      regeneration continues from the configured exploration (`continued_steps`); the latents of an
      evaluation; the images of its grid.
    * In the memory of a device: the kept samples with their recorded states and targets, which
      every device has; six copies of all adapters; one batch of images; and seven copies of the
      parameters that are trained in full, six of them divided over the mesh axes `fsdp` and
      `tensor`.

    Args:
        config: The configuration of the run, whose counts, image sizes, adapter rank and mesh
            decide the bytes.
        pipeline: Gives the shapes of latents and of the transformer's parameters; no weight needs
            to be loaded.
        trained_paths: The paths of the parameters that are trained, with adapters and in full.
        groups: The number of parts that a batch of samples is split into over the mesh
            (`parallel.sharding.row_groups`).

    Raises:
        InputError: For the first of these arrays that is too large. The message names the field,
            the bytes and the memory and, if the field is a count, its largest value that fits.
        RunError: If another process gives no answer.
    """
    shapes = flatten(pipeline.transformer.abstract_params("float32"))
    device = device_memory()
    host = min(hosts.gather_values(hosts.host_memory()))
    for request in _requests(config, pipeline, trained_paths, groups, shapes, host, device):
        if request.needed > request.memory:
            pixels = ""
            if request.size is not None:
                pixels = f" of {' x '.join(map(str, request.size[:2]))} pixels"
                if len(request.size) == 3:
                    pixels += f" and {request.size[2]} frames"
            raise InputError(
                f"{request.field}={request.value}: takes {request.needed / 1e9:.3g} GB{pixels}, "
                f"and {request.owner} has {request.memory / 1e9:.3g} GB; at most "
                f"{int(request.memory // request.unit)} fit"
            )
    trained = sum(math.prod(shapes[path].shape) for path in trained_paths.whole)
    num_shards = config.mesh.fsdp * config.mesh.tensor
    least = FLOAT * trained * (WHOLE_COPIES + SHARDED_COPIES / num_shards)
    if least > device:
        raise InputError(
            f"train.parameters={config.train.parameters}: {trained / 1e9:.3g} billion parameters "
            f"in full take {least / 1e9:.3g} GB of a device, which has {device / 1e9:.3g} GB"
        )


def _requests(
    config: Config,
    pipeline: Pipeline,
    trained_paths: TrainedPaths,
    groups: int,
    shapes: Mapping[str, Any],
    host: int,
    device: float,
) -> list[_Request]:
    """Lists the configuration fields whose value multiplies the size of an array, with the bytes
    that each needs.

    Args:
        config: The configuration of the run, which has the values of the fields and the image
            sizes. For training, the largest of its image sizes counts.
        pipeline: Gives the shape of the latents of an image.
        trained_paths: The paths of the trained parameters. The parameters with adapters decide the
            bytes per unit of `lora.rank`.
        groups: The number of parts that a batch of samples is split into over the mesh.
        shapes: By path, arrays or `jax.ShapeDtypeStruct`s of the parameters.
        host: The bytes of physical memory of the smallest host.
        device: The bytes of memory of one device.

    Returns:
        Always one request (bytes, available memory and text for messages) for each of these six
        fields, in this order. All arrays are float32.

        * In the physical memory of a host: `rollout.candidates` (latents of an iteration, twice if
            regeneration continues from latents of exploration), `eval.num_images_per_prompt`
            (latents of an evaluation) and `eval.num_grid_images` (images of its grid).
        * In the memory of a device: `rollout.kept` (the kept samples, with recorded states and
            targets), `lora.rank` (six copies of the adapters; 0 bytes without adapters) and
            `rollout.per_device_batch_size` (a batch of images, at most a device's share of the
            candidates of an iteration).
    """
    rollout = config.rollout
    evaluation = config.eval
    trained_size = largest_training_size(config)
    evaluated_size = evaluation_size(config)
    device_info = DeviceInfo.from_jax(jax.local_devices()[0])
    format_name = resolve_format(rollout.explore.precision, device_info).name
    # If the regeneration continues from exploration, the intermediate latents are stored as well.
    query_steps = find_query_steps(config, pipeline, trained_size)
    continued = continued_steps(rollout, format_name, rollout.explore.num_steps, query_steps)
    latents_per_candidate = 2 if continued else 1
    # Each kept sample has clean latents; some objectives also need its states.
    latents_per_sample = 1
    if config.algorithm.trains_on == "transitions":
        latents_per_sample += config.num_recorded_steps + 1
    elif config.algorithm.trains_on == "reward_gradients":
        latents_per_sample += 3  # a state, the clean latents predicted there, and a target
    larger_size = max(trained_size, evaluated_size, key=math.prod)
    adapter_values_per_rank = 0
    for path in trained_paths.adapted:
        *stack, n_in, n_out = shapes[path].shape
        adapter_values_per_rank += math.prod(stack) * (n_in + n_out)

    def latent_bytes(size: Size) -> int:
        return FLOAT * math.prod(pipeline.latent_shape(*size))

    def image_bytes(size: Size) -> int:
        return 3 * FLOAT * math.prod(size)

    return [
        _Request(
            field="rollout.candidates",
            value=rollout.candidates,
            unit=config.train.num_prompts * latent_bytes(trained_size) * latents_per_candidate,
            size=trained_size,
            memory=host,
            owner="a host",
        ),
        _Request(
            field="eval.num_images_per_prompt",
            value=evaluation.num_images_per_prompt,
            unit=evaluation.num_prompts * latent_bytes(evaluated_size),
            size=evaluated_size,
            memory=host,
            owner="a host",
        ),
        _Request(
            field="eval.num_grid_images",
            value=evaluation.num_grid_images,
            unit=image_bytes(evaluated_size),
            size=evaluated_size,
            memory=host,
            owner="a host",
            # a grid has at most four images of a prompt
            saturates_at=4 * max(evaluation.num_prompts, config.train.num_prompts),
        ),
        _Request(
            field="rollout.kept",
            value=rollout.kept,
            unit=config.train.num_prompts * latent_bytes(trained_size) * latents_per_sample,
            size=trained_size,
            memory=device,
            owner="a device",
        ),
        _Request(
            field="lora.rank",
            value=config.lora.rank,
            unit=FLOAT * ADAPTER_COPIES * adapter_values_per_rank,
            size=None,
            memory=device,
            owner="a device",
        ),
        _Request(
            field="rollout.per_device_batch_size",
            value=rollout.per_device_batch_size,
            unit=image_bytes(larger_size),
            size=larger_size,
            memory=device,
            owner="a device",
            saturates_at=samples_per_device(config, groups),
        ),
    ]


def device_memory() -> int:
    """Returns the memory of one device in bytes.

    With several hosts, every process must call it. Each looks at its first local device only.

    Returns:
        The bytes that JAX's allocator may use on a device, free or not. If JAX does not report
        them, as on a CPU, the memory of the host. With several hosts, the smallest of all.

    Raises:
        RunError: If another process gives no answer.
    """
    stats = jax.local_devices()[0].memory_stats() or {}
    return min(hosts.gather_values(stats.get("bytes_limit") or hosts.host_memory()))
