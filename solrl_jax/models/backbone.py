"""`Backbone`: a pipeline's pure functions with the loaded, placed parameters beside them.

What a parameter tree looks like inside is known to `models/` alone: LoRA targets and quantised linears are chosen by path
patterns.
"""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float

from solrl_jax.config.schema import Config
from solrl_jax.config.sizes import evaluated_size, model_size, trained_sizes
from solrl_jax.errors import InputError, in_one_line
from solrl_jax.models.decoder import Decoder
from solrl_jax.models.loading.component import Component as Component
from solrl_jax.models.loading.pipeline import Conditioning as Conditioning
from solrl_jax.models.loading.pipeline import Pipeline as Pipeline
from solrl_jax.models.loading.tensor_files import STORED_DTYPES as STORED_DTYPES
from solrl_jax.models.loading.tensor_files import read_header as read_header
from solrl_jax.models.loading.weights import Entry as Entry
from solrl_jax.models.loading.weights import Params as Params
from solrl_jax.models.loading.weights import entries as entries
from solrl_jax.models.loading.weights import to_torch_order as to_torch_order
from solrl_jax.models.locate import open_model
from solrl_jax.models.text_encoders.cache import open_cache
from solrl_jax.models.text_encoders.encode import TextEncoders
from solrl_jax.parallel import hosts, sharding

DTYPES = {"bf16": jnp.dtype(jnp.bfloat16), "fp32": jnp.dtype(jnp.float32)}


@dataclasses.dataclass(frozen=True, eq=False)  # compared by identity: a static argument of jit
class Backbone:
    """A pipeline with its parameters, on a mesh."""

    pipeline: Pipeline
    mesh: Mesh  # of the transformer; text encoders and decoder lie on its `sharding.rows_only`
    dtype: jnp.dtype  # the networks compute in this dtype
    transformer: Params  # the frozen base, split over fsdp
    text_encoders: TextEncoders
    decoder: Decoder
    instruction: str | None = (
        None  # goes before every prompt but negative ones, for a model that knows instructions
    )

    def velocity(
        self,
        params: Params,
        latent: Float[Array, " b *latent"],
        conditioning: Conditioning,
        time: Float[Array, ""] | Float[Array, " b"],
        guidance: Float[Array, ""],
        fp8_attention: bool = False,
    ) -> Float[Array, " b *latent"]:
        """The policy's velocity in `dtype`; latents come in float32.

        params: the base, any of whose leaves may be replaced. time: in 0..1000, one for all rows or one a row.
        """
        time = jnp.broadcast_to(time, latent.shape[:1])
        return self.pipeline.velocity(
            self.pipeline.transformer.gathered(params),
            latent.astype(self.dtype),
            conditioning,
            time,
            guidance,
            fp8_attention,
        )

    def encode(
        self, prompts: Sequence[str], max_tokens: int, *, negative: bool = False
    ) -> Conditioning:
        """The conditioning of each prompt, on every device. negative: prompts that guidance leads away from."""
        encoding, _ = self.text_encoders.encode(
            prompts, max_tokens, None if negative else self.instruction
        )
        return hosts.put(encoding, sharding.replicated(self.mesh))

    def parameter_table(self) -> list[Entry]:
        """How the transformer's parameters are named and ordered in released files."""
        return entries(self.pipeline.transformer.state)


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
    """Loads a pipeline, open already or named by its path, onto `mesh`. The networks compute in `precision`: bf16 or fp32.

    cache, instruction (its text) and tile: see `config.Model`. decoding: what pictures are decoded in; None: what the
    autoencoder was released for, or `precision`.
    Raises InputError in one line for a model that is absent, incomplete, of an unknown kind, or without one of these features.
    """
    pipeline = open_model(model) if isinstance(model, str) else model
    check_tile(tile, pipeline)
    dtype = DTYPES[precision]
    rows = sharding.rows_only(mesh)
    text_encoders = open_text_encoders(pipeline, precision, rows, cache)
    text_encoders.check_instruction(instruction)
    vae_dtype = decoding or pipeline.vae_dtype or dtype
    with in_one_line():
        for component in (pipeline.transformer, pipeline.vae):
            component.check()  # both, before minutes pass while the first one loads
        transformer = pipeline.transformer.load(dtype, sharding.placement(mesh))
        vae = pipeline.vae.load(vae_dtype, sharding.placement(rows))
    decoder = Decoder(vae, pipeline, vae_dtype, tile)
    return Backbone(pipeline, mesh, dtype, transformer, text_encoders, decoder, instruction)


def check_tile(tile: int | None, pipeline: Pipeline) -> None:
    """Raises InputError for a tile whose side is not a whole number of latents."""
    if tile is not None and tile % pipeline.compression:
        raise InputError(
            f"model.vae_tile_size={tile}: must be a multiple of {pipeline.compression}, the pixels of a latent, or null"
        )


def check_sizes(config: Config, pipeline: Pipeline) -> None:
    """Raises InputError for a size of pictures that the pipeline does not take."""
    fields = {
        "model": (model_size(config),),
        "rollout.size": trained_sizes(config),
        "eval.size": (evaluated_size(config),),
    }
    for field, size in ((field, size) for field, sizes in fields.items() for size in sizes):
        with in_one_line(f"{field}: {{}}".format):
            pipeline.latent_shape(*size)


def check_attention(config: Config, pipeline: Pipeline) -> None:
    """Raises InputError for attention in FP8 where the pipeline has none."""
    if config.rollout.explore.attention == "fp8" and not pipeline.attends_in_fp8:
        raise InputError(
            f"rollout.explore.attention=fp8: {pipeline.kind} attends with a mask, for which there is none in FP8"
        )


def open_text_encoders(
    pipeline: Pipeline, precision: str, mesh: Mesh, cache: str | None
) -> TextEncoders:
    """The text encoders, checked but not loaded. Raises InputError in one line for weights that do not fit."""
    with in_one_line():
        for component in pipeline.text_encoders.values():
            component.check()
    return TextEncoders(pipeline, mesh, DTYPES[precision], open_cache(cache))
