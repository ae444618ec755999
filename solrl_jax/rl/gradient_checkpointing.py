"""Resolves `model.gradient_checkpointing`, the gradient checkpointing of the update."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal
from jax.sharding import Mesh

from solrl_jax.config.batch import effective_batch
from solrl_jax.config.schema import Config
from solrl_jax.config.sizes import (
    describe_size,
    evaluation_size,
    largest_training_size,
    training_sizes,
)
from solrl_jax.errors import as_input_error
from solrl_jax.models.backbone import DTYPES
from solrl_jax.models.checks import check_attention, check_sizes
from solrl_jax.models.pipeline import Pipeline
from solrl_jax.parallel import sharding
from solrl_jax.quant.mesh_axes import SEQUENCE
from solrl_jax.rl.state import abstract_state
from solrl_jax.rl.trainable.trainable import attach, find_trained_paths

# The fraction of the memory of a device that the base and the saved residuals may take. The rest is
# for the work of one block, the decoder and the rewards.
SHARE = 0.75


def open_for_training(
    config: Config, mesh: Mesh, memory: float, open_pipeline: Callable[[str], Pipeline]
) -> Pipeline:
    """Opens a pipeline with the gradient checkpointing that the configuration asks for.

    "auto" chooses "matmuls" (the results of matmuls are kept for the backward pass) if the base and
    the kept values need at most 75 % of the memory of a device (`saved_residual_bytes`). Otherwise
    it chooses "blocks" (only the inputs of blocks are kept), without checking that these fit. With
    "auto", and with sequence parallelism, the network is traced, which takes seconds.

    Args:
        config: The configuration of the run. `model.gradient_checkpointing` is "none", "matmuls",
            "blocks" or "auto".
        mesh: The mesh of the run. Used for "auto" and for sequence parallelism.
        memory: The bytes of memory of one device of the mesh. Used for "auto" only.
        open_pipeline: ("none", "matmuls" or "blocks") -> the pipeline with that gradient
            checkpointing, without its weights. It is called a second time if "auto" turns out to be
            "blocks".

    Returns:
        The pipeline, without its weights.

    Raises:
        InputError: If the model does not support a size of images in training or evaluation, or the
            FP8 attention of `rollout.explore`; if `mesh.sequence` does not divide the number of
            tokens of one of these sizes, or the attention of the model does not allow sequence
            parallelism; and, with "auto", if a pattern of the trained parameters matches none or a
            LoRA target is not the kernel of a linear layer. Errors of `open_pipeline` pass through.
    """
    # "auto" is never "none": on a GPU, writing and reading the values between two matmuls takes
    # longer than computing them again.
    automatic = config.model.gradient_checkpointing == "auto"
    pipeline = open_pipeline("matmuls" if automatic else config.model.gradient_checkpointing)
    check_sizes(config, pipeline)
    check_attention(config, pipeline)
    if config.mesh.sequence > 1:
        _check_tokens(config, pipeline, mesh)
    fits = not automatic or saved_residual_bytes(config, pipeline, mesh) <= SHARE * memory
    return pipeline if fits else open_pipeline("blocks")


def _check_tokens(config: Config, pipeline: Pipeline, mesh: Mesh) -> None:
    """Checks that the tokens of all image sizes of a run can be divided over devices.

    The network is traced for each size, which takes seconds.

    Args:
        config: The configuration of the run, with the image sizes of training and evaluation.
        pipeline: The pipeline, without its weights.
        mesh: The mesh of the run, whose axis `sequence` divides the tokens.

    Raises:
        InputError: If `mesh.sequence` does not divide the tokens of a size, or the network's
            attention does not allow it.
    """
    dtype = DTYPES[config.rollout.precision]
    base = pipeline.transformer.abstract_params(dtype)
    time = jax.ShapeDtypeStruct((1,), jnp.float32)
    guidance = jax.ShapeDtypeStruct((), jnp.float32)
    conditioning = _conditioning(pipeline, 1, config)
    for size in {*training_sizes(config), evaluation_size(config)}:
        latents = jax.ShapeDtypeStruct((1, *pipeline.latent_shape(*size)), dtype)
        head = f"{describe_size(size)} pixels (model, rollout.size or eval.size): {{}}"
        with as_input_error(head.format), jax.set_mesh(mesh):
            jax.eval_shape(pipeline.velocity, base, latents, conditioning, time, guidance)


def saved_residual_bytes(config: Config, pipeline: Pipeline, mesh: Mesh) -> float:
    """Estimates the bytes on one device for the base and for the values that the forward pass keeps
    for the gradient (residuals).

    For parameters that are trained in full, four float32 copies (the trained parameters, their EMA
    and two moments) and a float32 gradient are added. The copies of adapters are not counted. The
    forward pass is traced, which takes seconds; nothing is computed or allocated.

    Args:
        config: The configuration of the run. The forward pass has images of its largest training
            size, as many as a device differentiates at once (`optimizer.per_device_batch_size` or,
            if fewer, its share of an optimizer step).
        pipeline: The pipeline, with the gradient checkpointing to be estimated.
        mesh: The mesh of the run. The base and the copies are divided over its axes `fsdp` and
            `tensor`, the residuals over `sequence`, and the gradient is not divided.

    Returns:
        The bytes, as a float.

    Raises:
        InputError: If a pattern of the trained parameters matches none, or a LoRA target is not the
            kernel of a linear layer.
    """
    most = effective_batch(config, sharding.row_groups(mesh))["terms_per_step_per_device"]
    batch_size = min(config.optimizer.per_device_batch_size, most)
    dtype = DTYPES[config.rollout.precision]
    base = pipeline.transformer.abstract_params(dtype)
    with as_input_error():
        trained_paths = find_trained_paths(pipeline.transformer, config)
    adapters = abstract_state(base, trained_paths, config.lora, config.optimizer, mesh).adapters
    latents = jax.ShapeDtypeStruct(
        (batch_size, *pipeline.latent_shape(*largest_training_size(config))), dtype
    )

    def residuals_of(base: Any, adapters: Any, latents: Any, conditioning: Any, time: Any) -> Any:
        def policy(adapters):
            return attach(base, adapters, config.lora.alpha / config.lora.rank)

        def velocity(adapters):
            return pipeline.velocity(policy(adapters), latents, conditioning, time, jnp.float32(1))

        return jax.vjp(velocity, adapters)[1]

    arguments = (
        base,
        adapters,
        latents,
        _conditioning(pipeline, batch_size, config),
        jax.ShapeDtypeStruct((batch_size,), jnp.float32),
    )
    with jax.set_mesh(mesh):
        jaxpr = jax.make_jaxpr(residuals_of)(*arguments).jaxpr
    residuals = {v for v in jaxpr.outvars if not isinstance(v, Literal)} - set(jaxpr.invars)

    def size(shaped):
        return math.prod(shaped.shape) * shaped.dtype.itemsize

    split = mesh.shape["fsdp"] * mesh.shape["tensor"]
    whole = sum(size(value) for value in adapters.values() if not isinstance(value, dict))
    return (
        (sum(map(size, jax.tree.leaves(base))) + 4 * whole) / split
        + whole
        + sum(size(v.aval) for v in residuals) / mesh.shape[SEQUENCE]
    )


def _conditioning(pipeline: Pipeline, batch_size: int, config: Config) -> Any:
    """Returns the shapes of the embeddings of some prompts, found by tracing the text encoders.

    Args:
        pipeline: Its tokenizers are read from disk; its text encoders are only traced.
        batch_size: The number of prompts, which is the leading axis of the shapes.
        config: `model.max_sequence_length` is the number of tokens per prompt, and
            `rollout.precision` the dtype of the text encoders.

    Returns:
        A `jax.ShapeDtypeStruct` with a leading axis of `batch_size` for each array that the text
        encoders return, by name.
    """
    one_prompt = pipeline.tokenize([""], config.model.max_sequence_length)
    tokens = {
        name: jax.ShapeDtypeStruct((batch_size, *x.shape[1:]), x.dtype)
        for name, x in one_prompt.items()
    }
    params = {
        name: part.abstract_params(DTYPES[config.rollout.precision])
        for name, part in pipeline.text_encoders.items()
    }
    return jax.eval_shape(pipeline.encode_text, params, tokens)
