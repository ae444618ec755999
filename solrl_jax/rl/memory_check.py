"""Refuses a run whose largest arrays cannot fit into memory, before anything is loaded.

The sizes are computed from shapes alone and are lower bounds: a run that is refused here cannot
work. A run that passes may still not fit, which `solrl plan` finds out by compiling it. That takes
minutes, so a run does not do it by itself.
"""

import math

import jax

from solrl_jax.config.schema import Config
from solrl_jax.config.sizes import evaluation_size, largest_training_size
from solrl_jax.errors import InputError
from solrl_jax.models.pipeline import Pipeline
from solrl_jax.parallel import hosts
from solrl_jax.rl.trainable.trainable import Targets, flatten

# Bytes of a float32.
FLOAT = 4
# Copies of each adapter: trained, old, averaged, gradient, and two moments.
COPIES = 6
# Copies of each parameter that is trained in full. Divided over devices: trained, averaged, two
# moments and the sum of gradients in two parts. Not divided: the gradient of a micro-batch.
DIVIDED = 6
WHOLE = 1


def refuse_what_cannot_fit(config: Config, pipeline: Pipeline, targets: Targets) -> None:
    """Raises InputError for the first field whose array alone is larger than its memory.

    Args:
        config: The configuration of the run.
        pipeline: Its shapes are read; it need not be loaded.
        targets: The parameters that are trained.

    Raises:
        InputError: It names the field, the size, the memory and the largest value that fits.
    """
    rollout = config.rollout
    shown = config.eval
    trained = largest_training_size(config)
    evaluated = evaluation_size(config)

    def latent(size):
        return FLOAT * math.prod(pipeline.latent_shape(*size))

    def picture(size):
        return 3 * FLOAT * math.prod(size)

    shapes = flatten(pipeline.transformer.abstract_params("float32"))
    of_rank = sum(
        math.prod(shape[:-2]) * (shape[-2] + shape[-1])
        for shape in (shapes[path].shape for path in targets.adapted)
    )
    chunk = min(rollout.per_device_batch_size, config.train.num_prompts * rollout.candidates)
    device = device_memory()
    host = hosts.memory()
    larger = max(trained, evaluated, key=math.prod)
    for field, value, each, size, memory, whose in (
        (
            "rollout.candidates",
            rollout.candidates,
            config.train.num_prompts * latent(trained),
            trained,
            host,
            "this host",
        ),
        (
            "eval.num_images_per_prompt",
            shown.num_images_per_prompt,
            shown.num_prompts * latent(evaluated),
            evaluated,
            host,
            "this host",
        ),
        (
            "eval.num_grid_images",
            shown.num_grid_images,
            picture(evaluated),
            evaluated,
            host,
            "this host",
        ),
        ("lora.rank", config.lora.rank, FLOAT * COPIES * of_rank, None, device, "a device"),
        ("rollout.per_device_batch_size", chunk, picture(larger), larger, device, "a device"),
    ):
        if value * each > memory:
            pixels = "" if size is None else f" of {size[0]} x {size[1]} pixels"
            takes = (
                f"takes {value * each / 1e9:.3g} GB{pixels}, and {whose} has {memory / 1e9:.3g} GB"
            )
            raise InputError(f"{field}={value}: {takes}; at most {int(memory // each)} fit")
    trained = sum(math.prod(shapes[path].shape) for path in targets.whole)
    least = FLOAT * trained * (WHOLE + DIVIDED / (config.mesh.fsdp * config.mesh.tensor))
    if least > device:
        takes = (
            f"{trained / 1e9:.3g} billion parameters in full take {least / 1e9:.3g} GB of a device"
        )
        raise InputError(
            f"train.parameters={config.train.parameters}: {takes}, which has {device / 1e9:.3g} GB"
        )


def device_memory() -> int:
    """The bytes of memory of one device, as its allocator counts them; on a CPU, of the machine.

    With several hosts it is the smallest of all.
    """
    stats = jax.local_devices()[0].memory_stats() or {}
    return min(hosts.everyones(stats.get("bytes_limit") or hosts.memory()))
