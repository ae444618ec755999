"""`Backbone`: a pipeline together with its loaded parameters on a mesh."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float

from solrl_jax.errors import in_one_line
from solrl_jax.models.checks import check_tile
from solrl_jax.models.decoder import Decoder
from solrl_jax.models.loading.weights import ParameterEntry, Params, parameter_table
from solrl_jax.models.locate import open_model
from solrl_jax.models.pipeline import Conditioning, Pipeline
from solrl_jax.models.text_encoders.cache import open_cache
from solrl_jax.models.text_encoders.encode import TextEncoders
from solrl_jax.parallel import hosts, sharding

# The values of `rollout.precision`.
DTYPES = {"bf16": jnp.dtype(jnp.bfloat16), "fp32": jnp.dtype(jnp.float32)}


@dataclasses.dataclass(frozen=True, eq=False)
class Backbone:
    """A pipeline with its parameters on a mesh.

    Compared by identity, because it is a static argument of jit.

    Attributes:
        pipeline: the model's functions and network structures, which hold no parameters.
        mesh: mesh of the transformer, with the axes `data`, `fsdp` and `tensor`. Text encoders and
            decoder are on the same devices in a mesh whose axis `tensor` is folded into `fsdp`, so
            that rows are split over all devices (`sharding.rows_only`).
        dtype: dtype in which the transformer computes: bfloat16 or float32 (`DTYPES`).
        transformer: the frozen base parameters in this dtype, a nested dictionary by path, sharded
            over the axes `fsdp` and `tensor`. Training never changes them.
        text_encoders: the text encoders, which load their parameters when a prompt is not in the
            cache.
        decoder: the decoder of the autoencoder with its parameters, which maps latents to images.
        instruction: text before every prompt except negative ones, for models that accept one;
            None: no instruction.
    """

    pipeline: Pipeline
    mesh: Mesh
    dtype: jnp.dtype
    transformer: Params
    text_encoders: TextEncoders
    decoder: Decoder
    instruction: str | None = None

    def velocity(
        self,
        params: Params,
        latent: Float[Array, " b *latent"],
        conditioning: Conditioning,
        time: Float[Array, ""] | Float[Array, " b"],
        guidance: Float[Array, ""],
        fp8_attention: bool = False,
    ) -> Float[Array, " b *latent"]:
        """Predicts the velocity `noise - x0` of a policy, in `self.dtype`. For use under jit.

        The sharded parameters are gathered first, except stacks of blocks, which the network
        gathers one layer at a time.

        Args:
            params: parameters of the policy: the tree `self.transformer`, in which any leaf may be
                replaced by a fully trained array, by a base weight with its LoRA adapter
                (`LowRank`), or by a `Quantized` leaf.
            latent: noisy latents, float32, [b, height, width, channels]. They are cast to
                `self.dtype`.
            conditioning: encoded prompts by name, one row per latent, as returned by `encode`: for
                example "text" [b, tokens, features] and "mask" [b, tokens].
            time: `1000 sigma`, in [0, 1000]: one for all latents, or one per latent.
            guidance: guidance scale, a scalar, for networks that take it as an input
                (FLUX.1-dev). Other networks ignore it.
            fp8_attention: whether softmax attention runs in FP8, only where
                `pipeline.attends_in_fp8`: queries, keys, values and result are rounded to E4M3.
                For programs that take no gradient. On TPUs, on GPUs older than Hopper, and on
                other GPUs for head sizes that are no multiple of 16 or above 128, the matmuls run
                in BF16 all the same (`models/layers/attention_fp8.py`).

        Returns:
            The velocity, of the shape of `latent`. One evaluation of the network: classifier-free
            guidance is not applied here.

        Raises:
            ValueError: while tracing, if the network does not support the size of the latents, or
                `fp8_attention` is set for SANA, Qwen-Image or Z-Image.
            KeyError: while tracing, if `pipeline.remat` is not "none", "matmuls" or "blocks".
        """
        time = jnp.broadcast_to(time, latent.shape[:1])
        return self.pipeline.velocity(
            self.pipeline.transformer.gather(params),
            latent.astype(self.dtype),
            conditioning,
            time,
            guidance,
            fp8_attention,
        )

    def encode(
        self, prompts: Sequence[str], max_tokens: int, *, negative: bool = False
    ) -> Conditioning:
        """Encodes prompts, through the cache if there is one, and replicates the result on every
        device.

        Prompts that the cache lacks are computed, which loads the text encoders, and are written to
        the cache. The text encoders stay loaded until `self.text_encoders.release()`. All processes
        of a run must call it with the same arguments.

        Args:
            prompts: one or more prompts.
            max_tokens: number of tokens to which each prompt is padded or cut.
            negative: whether these are negative prompts, which get no instruction. All others get
                `self.instruction`, if there is one.

        Returns:
            The encodings by name, each with one row per prompt in the order of `prompts`,
            replicated over `self.mesh`. The names depend on the model: "text" [prompts, tokens,
            features], and "mask" or "pooled" where the transformer takes them.

        Raises:
            InputError: the tokenizer fails; `max_tokens` is not possible for the model; a file of a
                text encoder is missing, or its tensors are not those of the network by name, shape
                or dtype; or the folder of the cache cannot be created or written, which is checked
                before the text encoders load.
            RunError: an encoding cannot be written to the cache, or another process of the run
                gives no answer for 30 minutes.
            PermissionError: a folder of the cache may not be searched.
        """
        instruction = None if negative else self.instruction
        encoding, _ = self.text_encoders.encode(prompts, max_tokens, instruction)
        return hosts.put(encoding, sharding.replicated(self.mesh))

    def parameter_table(self) -> list[ParameterEntry]:
        """Returns the names and layouts of the transformer's parameters in released files.

        Returns:
            One entry per parameter of the base network, a stack of layers counted once: its path in
            the parameter tree, the PyTorch names of its tensors, and their shape and order of axes.
        """
        return parameter_table(self.pipeline.transformer.state)


def load_backbone(
    model: str | Pipeline,
    precision: str,
    mesh: Mesh,
    *,
    cache: str | None = None,
    instruction: str | None = None,
    tile: int | None = None,
    decoding: jnp.dtype | None = None,
) -> Backbone:
    """Loads a pipeline onto a mesh. Text encoders are only checked; they load when a prompt is not
    in the cache.

    The transformer is placed on `mesh`, and the decoder on the same devices in a mesh whose axis
    `tensor` is folded into `fsdp`. The files of all networks are checked before any is loaded.

    Args:
        model: an open pipeline; or the directory of a diffusers pipeline, `embedded:NAME` for one
            that this package carries, or OWNER/NAME of a hub repository, which is downloaded unless
            it is in the cache. A path is opened with rematerialization "none" and the model's own
            attention.
        precision: dtype in which the transformer and the text encoders compute, "bf16" or "fp32".
        mesh: devices that hold the parameters.
        cache: `model.prompt_cache_dir`, the folder of encoded prompts, in which "~" is expanded; ""
            for the folder `solrl_jax/prompts` in the user's cache directory; None for no cache.
        instruction: text before every prompt but negative ones, for models that accept one; None:
            no instruction.
        tile: `model.vae_tile_size`, side in pixels of the square tiles in which images are decoded,
            a positive multiple of the pixels per latent pixel (`Pipeline.compression`); None: whole
            images.
        decoding: dtype of the autoencoder, even where it was released for another one; None:
            `pipeline.vae_dtype` if the autoencoder works in no other dtype, otherwise that of
            `precision`.

    Returns:
        The backbone, with the parameters of transformer and decoder on the devices.

    Raises:
        InputError: the model is missing, incomplete, not supported or not to be had from the hub; a
            file cannot be read, or its tensors are not those of the network; `tile` is no multiple
            of `Pipeline.compression`; an instruction is given to a model that accepts none; or
            `cache` is a file, or needs a home directory that the user does not have.
        PermissionError: a parent of the folder `cache` may not be searched.
        KeyError: `precision` is neither "bf16" nor "fp32".
    """
    pipeline = open_model(model) if isinstance(model, str) else model
    check_tile(tile, pipeline)
    dtype = DTYPES[precision]
    row_mesh = sharding.rows_only(mesh)
    text_encoders = open_text_encoders(pipeline, precision, row_mesh, cache)
    text_encoders.check_instruction(instruction)
    vae_dtype = decoding or pipeline.vae_dtype or dtype
    with in_one_line():
        # Both are checked before the first one loads, which takes minutes.
        pipeline.transformer.check_files()
        pipeline.vae.check_files()
        transformer = pipeline.transformer.load(dtype, sharding.placement(mesh))
        vae = pipeline.vae.load(vae_dtype, sharding.placement(row_mesh))
    decoder = Decoder(vae, pipeline, vae_dtype, tile)
    return Backbone(pipeline, mesh, dtype, transformer, text_encoders, decoder, instruction)


def open_text_encoders(
    pipeline: Pipeline, precision: str, mesh: Mesh, cache: str | None
) -> TextEncoders:
    """Checks the files of the text encoders, without loading them.

    Args:
        pipeline: the model, whose text encoders and tokenizers are used.
        precision: dtype in which the text encoders compute, "bf16" or "fp32".
        mesh: devices that encode. Its axis `tensor` has the size 1, so that rows are split over all
            devices (`sharding.rows_only`).
        cache: `model.prompt_cache_dir`, the folder of encoded prompts, in which "~" is expanded; ""
            for the folder `solrl_jax/prompts` in the user's cache directory; None for no cache.

    Returns:
        The text encoders, which load their parameters when a prompt is not in the cache.

    Raises:
        InputError: a file is missing or cannot be read; tensors in it are missing, unexpected, or
            of another shape or dtype than the network's; or `cache` is a file, or needs a home
            directory that the user does not have.
        PermissionError: a parent of the folder `cache` may not be searched.
        KeyError: `precision` is neither "bf16" nor "fp32".
    """
    with in_one_line():
        for component in pipeline.text_encoders.values():
            component.check_files()
    return TextEncoders(pipeline, mesh, DTYPES[precision], open_cache(cache))
