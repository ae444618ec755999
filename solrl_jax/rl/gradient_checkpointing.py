"""What the update keeps for its gradient, and what it computes again: `model.gradient_checkpointing`, and what `auto` stands for on a device."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal
from jax.sharding import Mesh

from solrl_jax.config.batch import effective_batch
from solrl_jax.config.schema import Config
from solrl_jax.config.sizes import largest_training_size
from solrl_jax.models.backbone import DTYPES
from solrl_jax.models.checks import check_attention, check_sizes
from solrl_jax.models.pipeline import Pipeline
from solrl_jax.parallel import sharding
from solrl_jax.rl.state import abstract_state
from solrl_jax.rl.trainable.trainable import attach, find_targets

SHARE = 0.75  # of a device's memory, for the base and what is kept; the rest is for one block's work, decoder and rewards


def open_for_training(
    config: Config, mesh: Mesh, memory: float, open_pipeline: Callable[[str], Pipeline]
) -> Pipeline:
    """The pipeline, with a transformer whose gradient recomputes what `model.gradient_checkpointing` says.

    `auto` is `matmuls` where what is `held` fits into `SHARE` of a device's memory, else `blocks`. It depends on shapes and on
    `memory` alone. It is never `none`: to write and read what lies between products takes a GPU longer than to compute it
    again.
    memory: bytes of a device of `mesh`. open_pipeline: opens the pipeline with a key of `models.layers.stack.REMAT`.
    Raises InputError for a size of pictures that the pipeline does not take.
    """
    automatic = config.model.gradient_checkpointing == "auto"
    pipeline = open_pipeline("matmuls" if automatic else config.model.gradient_checkpointing)
    check_sizes(config, pipeline)
    check_attention(config, pipeline)
    fits = not automatic or held(config, pipeline, mesh) <= SHARE * memory
    return pipeline if fits else open_pipeline("blocks")


def held(config: Config, pipeline: Pipeline, mesh: Mesh) -> float:
    """Bytes of a device that hold the base, and what the forward pass of a micro-batch keeps for the gradient.

    Of what is trained in full, also four float32 copies, divided as the base is, and a gradient, which is not.

    The forward pass is traced, which takes seconds. Nothing is computed or allocated.
    """
    most = effective_batch(config, sharding.row_groups(mesh))["terms_per_step_per_device"]
    rows = min(config.optimizer.per_device_batch_size, most)
    dtype = DTYPES[config.rollout.precision]
    base = pipeline.transformer.abstract_params(dtype)
    targets = find_targets(pipeline.transformer, config)
    adapters = abstract_state(base, targets, config.lora, config.optimizer, mesh).adapters
    latents = jax.ShapeDtypeStruct(
        (rows, *pipeline.latent_shape(*largest_training_size(config))), dtype
    )

    def kept(base: Any, adapters: Any, latents: Any, conditioning: Any, time: Any) -> Any:
        def policy(adapters):
            return attach(base, adapters, config.lora.alpha / config.lora.rank)

        def velocity(adapters):
            return pipeline.velocity(policy(adapters), latents, conditioning, time, jnp.float32(1))

        return jax.vjp(velocity, adapters)[1]

    arguments = (
        base,
        adapters,
        latents,
        _conditioning(pipeline, rows, config),
        jax.ShapeDtypeStruct((rows,), jnp.float32),
    )
    with jax.set_mesh(mesh):
        jaxpr = jax.make_jaxpr(kept)(*arguments).jaxpr
    made = {v for v in jaxpr.outvars if not isinstance(v, Literal)} - set(jaxpr.invars)

    def size(shaped):
        return math.prod(shaped.shape) * shaped.dtype.itemsize

    split = mesh.shape["fsdp"] * mesh.shape["tensor"]
    whole = sum(size(own) for own in adapters.values() if not isinstance(own, dict))
    return (
        (sum(map(size, jax.tree.leaves(base))) + 4 * whole) / split
        + whole
        + sum(size(v.aval) for v in made)
    )


def _conditioning(pipeline: Pipeline, rows: int, config: Config) -> Any:
    """The shapes of encoded prompts. An instruction does not change them."""
    of_one = pipeline.tokenize([""], config.model.max_sequence_length)
    tokens = {
        name: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype) for name, x in of_one.items()
    }
    params = {
        name: part.abstract_params(DTYPES[config.rollout.precision])
        for name, part in pipeline.text_encoders.items()
    }
    return jax.eval_shape(pipeline.encode_text, params, tokens)
