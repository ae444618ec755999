"""`Backbone`: a pipeline together with its loaded parameters on a mesh."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float

from solrl_jax.errors import as_input_error
from solrl_jax.models.checks import check_tile
from solrl_jax.models.decoder import Decoder
from solrl_jax.models.loading.weights import ParameterEntry, Params, parameter_table
from solrl_jax.models.locate import open_model
from solrl_jax.models.pipeline import Conditioning, Pipeline
from solrl_jax.models.text_encoders.cache import open_cache
from solrl_jax.models.text_encoders.encode import TextEncoders
from solrl_jax.parallel import hosts, sharding
from solrl_jax.quant.sequence_parallel import replicate_tokens

# The values of `rollout.precision`.
DTYPES = {"bf16": jnp.dtype(jnp.bfloat16), "fp32": jnp.dtype(jnp.float32)}


@dataclasses.dataclass(frozen=True, eq=False)
class Backbone:
    """A model (`Pipeline`) with its loaded parameters on a mesh.

    Backbones compare by identity, because they are static arguments of jit.

    Attributes:
        pipeline: the model's functions and network structures, which hold no parameters.
        mesh: mesh of the transformer, with the axes `data`, `fsdp`, `sequence` and `tensor`. Text
            encoders and decoder use the same devices without sequence and tensor parallelism: every
            device works on its own rows.
        dtype: dtype in which the transformer computes: bfloat16 or float32.
        transformer: the frozen base parameters of the transformer in this dtype: nested
            dictionaries keyed by module name, sharded over the axes `fsdp` and `tensor`. Training
            never changes them.
        text_encoders: the text encoders. They load their parameters when they first encode a prompt
            that is not in the cache (without a cache: any prompt).
        decoder: the decoder of the autoencoder with its parameters. It maps latents to images.
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
        timestep: Float[Array, ""] | Float[Array, " b"],
        guidance: Float[Array, ""],
        fp8_attention: bool = False,
    ) -> Float[Array, " b *latent"]:
        """Predicts the velocity `noise - x0` with given transformer parameters. For use under jit,
        with `self.mesh` set (`jax.set_mesh`).

        This is one evaluation of the network; classifier-free guidance is not applied. Sharded
        parameters are gathered: those of stacked blocks one layer at a time, all others first.

        Args:
            params: parameters with the structure of `self.transformer`. Instead of an array, a leaf
                may be a base weight with its LoRA adapter (`LowRank`) or a quantized weight
                (`Quantized`).
            latent: noisy latents, float32, [b, height, width, channels], or [b, frames, height,
                width, channels] of video models. They are cast to `self.dtype`.
            conditioning: encoded prompts by name, one row per latent, as returned by `encode`: for
                example "text" [b, tokens, features] and "mask" [b, tokens].
            timestep: `1000 sigma`, in [0, 1000]: one for all latents, or one per latent.
            guidance: guidance scale, a scalar, for networks that take it as an input
                (FLUX.1-dev). Other networks ignore it.
            fp8_attention: whether attention is computed in FP8: queries, keys, values and result
                are in E4M3. No gradient may be taken, which is not checked. Accelerators without
                FP8 attention compute in BF16 from the rounded inputs. In Wan, cross-attention stays
                in `self.dtype`. Only where `pipeline.attends_in_fp8` is set.

        Returns:
            The velocity, of the shape of `latent`, in `self.dtype`, gathered over the mesh axis
            `sequence`.

        Raises:
            ValueError: while tracing, if the network does not support `fp8_attention` or the size
                of the latents, or if the mesh axis `sequence` has another size than the network
                accepts. The size of that axis must divide the number of image tokens and, in
                networks with blocks for text and image as one sequence, also the number of text and
                image tokens together. In SANA, it must divide the number of rows of tokens; with
                MHLA, it must be 1.
            KeyError: while tracing, if `pipeline.gradient_checkpointing` is not "none", "matmuls"
                or "blocks".
        """
        timestep = jnp.broadcast_to(timestep, latent.shape[:1])
        velocity = self.pipeline.velocity(
            self.pipeline.transformer.gather(params),
            latent.astype(self.dtype),
            conditioning,
            timestep,
            guidance,
            fp8_attention,
        )
        return replicate_tokens(velocity)

    def encode(
        self, prompts: Sequence[str], max_tokens: int, *, negative: bool = False
    ) -> Conditioning:
        """Encodes prompts, or reads their encodings from the cache.

        If the cache lacks a prompt, or there is no cache, the text encoders are loaded; they stay
        loaded until `self.text_encoders.release()`. New encodings are written to the cache. With a
        cache, the first call also reads the weight files of the text encoders once to hash them,
        unless the cache remembers their hashes. All processes of a run must call this with the same
        arguments.

        Args:
            prompts: one or more prompts.
            max_tokens: number of tokens to which each prompt is padded or cut. For models with both
                CLIP and T5, it applies to T5. Tokens of the instruction are neither counted nor
                returned.
            negative: whether these are negative prompts. If not, `self.instruction` is put before
                each prompt, if there is one.

        Returns:
            Arrays by name, with one row per prompt in the order of `prompts`, replicated over
            `self.mesh`. The names depend on the model. All have "text" [prompts, tokens, features]
            in the dtype of the text encoders, where tokens is `max_tokens` (in Stable Diffusion 3,
            CLIP's tokens come before these). Some also have "mask" [prompts, tokens], bool, or
            "pooled" [prompts, features].

        Raises:
            InputError: `max_tokens` is not possible for the model, the tokenizer fails, a text
                encoder cannot be loaded, or the cache cannot be written.
            PermissionError: a folder of the cache may not be searched.
            RunError: writing an encoding fails, or another process of the run does not answer for
                30 minutes.
        """
        instruction = None if negative else self.instruction
        encoding, _ = self.text_encoders.encode(prompts, max_tokens, instruction)
        return hosts.put(encoding, sharding.replicated(self.mesh))

    def parameter_table(self) -> list[ParameterEntry]:
        """Lists the transformer's parameters with their names and layouts in released files.

        Returns:
            One entry per parameter: its path in the parameter tree, the names of its PyTorch
            tensors, their shape in this package's order of axes, and the kind of weight (`layout`),
            which tells PyTorch's order. A parameter of stacked blocks has one entry for all blocks.
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
    """Loads the transformer and the decoder of a model onto a mesh.

    Text encoders are not loaded until a prompt is encoded that is not in the cache. The headers of
    all networks' files, text encoders included, are checked before any is loaded. All processes of
    a run must call it with the same arguments.

    Args:
        model: an open pipeline, or its name: `embedded:NAME` for one of the small pipelines inside
            this package, the directory of a diffusers pipeline, or else OWNER/NAME of a hub
            repository. The newest revision of a repository is downloaded if it is not in the hub's
            cache; without a network, the newest one in the cache is used. A model given by name
            stores all activations for the backward pass (gradient checkpointing "none").
        precision: dtype in which the transformer and the text encoders compute, "bf16" or "fp32".
        mesh: devices that hold the parameters, with the axes `data`, `fsdp`, `sequence` and
            `tensor`. The decoder is sharded over the same devices, but without sequence and tensor
            parallelism.
        cache: folder of the cache of encoded prompts (`model.prompt_cache_dir`); "~" is expanded.
            "": the folder `solrl_jax/prompts` in the user's cache directory. None: no cache.
        instruction: text before every prompt but negative ones, for models that accept one; None:
            no instruction.
        tile: side, in pixels, of the square tiles in which images are decoded
            (`model.vae_tile_size`): a positive multiple of `Pipeline.compression`, the pixels per
            latent pixel. None: images are decoded whole.
        decoding: dtype in which the autoencoder computes. None: the dtype that it requires
            (`pipeline.vae_dtype`) or, if it requires none, that of `precision`.

    Returns:
        The backbone, with the parameters of transformer and decoder on the devices.

    Raises:
        InputError: If the model is missing, incomplete or not supported, or cannot be downloaded,
            or if one of its files cannot be read or has other tensors than the network. Also if
            `tile` is not a multiple of `Pipeline.compression`, if `instruction` is given but the
            model accepts none, or if `cache` cannot be used as a folder.
        PermissionError: a parent of the folder `cache` may not be searched.
        KeyError: `precision` is neither "bf16" nor "fp32".
    """
    pipeline = open_model(model) if isinstance(model, str) else model
    check_tile(tile, pipeline)
    dtype = DTYPES[precision]
    row_mesh = sharding.row_mesh(mesh)
    text_encoders = open_text_encoders(pipeline, precision, row_mesh, cache)
    text_encoders.check_instruction(instruction)
    vae_dtype = decoding or pipeline.vae_dtype or dtype
    with as_input_error():
        # Both are checked before the first one loads, which takes minutes.
        pipeline.transformer.check_files()
        pipeline.vae.check_files()
        transformer = pipeline.transformer.load(dtype, sharding.parameter_placement(mesh))
        vae = pipeline.vae.load(vae_dtype, sharding.parameter_placement(row_mesh))
    decoder = Decoder(vae, pipeline, vae_dtype, tile)
    return Backbone(pipeline, mesh, dtype, transformer, text_encoders, decoder, instruction)


def open_text_encoders(
    pipeline: Pipeline, precision: str, mesh: Mesh, cache: str | None
) -> TextEncoders:
    """Opens a model's text encoders: checks the headers of their weight files, without loading the
    weights.

    Args:
        pipeline: the model, with its text encoders. Its tokenizers are loaded already.
        precision: dtype in which the text encoders compute, "bf16" or "fp32".
        mesh: devices that encode, as a mesh that `sharding.row_mesh` returns: its axes `sequence`
            and `tensor` have size 1, so that every device works on its own rows.
        cache: folder of the cache of encoded prompts (`model.prompt_cache_dir`); "~" is expanded.
            "": the folder `solrl_jax/prompts` in the user's cache directory. None: no cache.

    Returns:
        The text encoders. They load their parameters when a prompt is encoded that is not in the
        cache.

    Raises:
        InputError: a file is missing, cannot be read or has other tensors than the network; or
            `cache` cannot be used as a folder.
        PermissionError: a parent of the folder `cache` may not be searched.
        KeyError: `precision` is neither "bf16" nor "fp32".
    """
    with as_input_error():
        for component in pipeline.text_encoders.values():
            component.check_files()
    return TextEncoders(pipeline, mesh, DTYPES[precision], open_cache(cache))
