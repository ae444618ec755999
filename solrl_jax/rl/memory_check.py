"""Whether a run fits into memory at all: its largest arrays by arithmetic, before anything is loaded.

The figures are lower bounds: what is refused here cannot run. What passes may still not fit (`solrl plan`).
"""

import math

import jax

from solrl_jax.config.schema import Config
from solrl_jax.config.sizes import evaluation_size, largest_training_size
from solrl_jax.errors import InputError
from solrl_jax.models.pipeline import Pipeline
from solrl_jax.parallel import hosts
from solrl_jax.rl.trainable.trainable import Targets, flatten

# bytes of a float32; of each adapter: trained, old, averaged, gradient, and two moments
FLOAT = 4
COPIES = 6
# Of each parameter that is trained in full: trained, averaged, two moments and the sum of gradients in two parts, which are
# divided over devices; and the gradient of a micro-batch, which is not.
DIVIDED = 6
WHOLE = 1


def refuse_what_cannot_fit(config: Config, pipeline: Pipeline, targets: Targets) -> None:
    """Raises InputError that names the first field whose array alone is larger than the memory that holds it."""
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
    """Bytes of a device here, as its allocator counts them; on a CPU the machine's. The least of all hosts."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return min(hosts.everyones(stats.get("bytes_limit") or hosts.memory()))
