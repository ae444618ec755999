"""FLUX.1's diffusion transformer (Black Forest Labs, 2024): `FluxTransformer2DModel` of diffusers in Flax NNX.

A multimodal diffusion transformer (arXiv 2403.03206, section 4) with rotary positions (arXiv 2104.09864). In the first blocks,
text and image are two streams (`models.layers.mmdit`). The later blocks treat both as one sequence, and run attention and MLP side by
side (arXiv 2302.05442, section 2). Time, guidance scale and pooled text modulate all blocks. The network predicts the velocity
`v = noise - x0` of a flow.
"""

import dataclasses
from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from solrl_jax.models.layers.linear import Linear
from solrl_jax.models.layers.mmdit import (
    AdaLayerNorm,
    JointBlock,
    Rotate,
    SelfAttention,
    TimeTextEmbedding,
)
from solrl_jax.models.layers.modulation import modulate
from solrl_jax.models.layers.pixel_shuffle import depth_to_space, space_to_depth
from solrl_jax.models.layers.stack import scan_blocks, stack
from solrl_jax.models.loading.config_file import TransformerConfig, unsupported
from solrl_jax.quant.lazy import LazyActivation

PATCH = 2  # latent pixels that a token stands for, each way
THETA = 10000.0  # of the rotary frequencies
Rotation: TypeAlias = tuple[
    np.ndarray, np.ndarray
]  # cosines and sines [positions, head / 2], float32


@dataclasses.dataclass(frozen=True)
class FluxConfig(TransformerConfig):
    network = "FluxTransformer2DModel"

    patch_size: int = 1
    in_channels: int = 64
    out_channels: int | None = None
    num_layers: int = 19
    num_single_layers: int = 38
    attention_head_dim: int = 128
    num_attention_heads: int = 24
    joint_attention_dim: int = 4096
    pooled_projection_dim: int = 768
    guidance_embeds: bool = False
    axes_dims_rope: tuple[int, ...] = (16, 56, 56)

    def check(self) -> None:
        self.require(
            self.patch_size == 1, "patch_size", "1 (latents are packed two by two before it)"
        )
        for name, channels in (
            ("in_channels", self.in_channels),
            ("out_channels", self.features_out),
        ):
            self.require(channels % PATCH**2 == 0, name, f"a positive multiple of {PATCH**2}")
        axes = self.axes_dims_rope
        head = self.attention_head_dim
        fits = (
            len(axes) == 3
            and all(type(a) is int and a > 0 and a % 2 == 0 for a in axes)
            and sum(axes) == head
        )
        self.require(
            fits,
            "axes_dims_rope",
            f"three positive even numbers whose sum is attention_head_dim={head}",
        )


class FluxTransformer2DModel(nnx.Module):
    """The velocity network. remat: what gradients recompute, a key of `models.layers.stack.REMAT`."""

    def __init__(self, config: FluxConfig, *, remat: str = "none", rngs: nnx.Rngs):
        c = config
        d = config.width
        self.config = config
        self.remat = remat
        self.time_text_embed = TimeTextEmbedding(
            d, c.pooled_projection_dim, guided=c.guidance_embeds, rngs=rngs
        )

        def joint(r):
            return JointBlock(d, c.attention_head_dim, modulate, normed=True, rngs=r)

        self.context_embedder = Linear(c.joint_attention_dim, d, rngs=rngs)
        self.x_embedder = Linear(c.in_channels, d, rngs=rngs)
        self.transformer_blocks = stack(c.num_layers, joint, rngs)
        self.single_transformer_blocks = stack(
            c.num_single_layers, lambda r: FluxSingleBlock(c, rngs=r), rngs
        )
        self.norm_out = AdaLayerNorm(d, 2, rngs=rngs)
        self.proj_out = Linear(d, c.features_out, rngs=rngs)

    def __call__(
        self,
        latent: Float[Array, "b h w c"],
        text: Float[Array, "b l joint"],
        pooled: Float[Array, "b e"],
        timestep: Float[Array, " b"],
        guidance: Float[Array, " b"] | None = None,
        *,
        fp8_attention: bool = False,
    ) -> Float[Array, "b h w out"]:
        """The velocity at `latent`, in the dtype of `latent`.

        latent: not packed, c = in_channels / 4; height and width are even. text: T5's states; padding is not masked, as in the
        released pipeline. pooled: CLIP's vector for the whole text. timestep: `1000 sigma`. guidance: the scale itself (3.5,
        say), if and only if the network has `guidance_embeds`.
        Raises ValueError for an odd size, or for a missing or needless guidance.
        """
        (_, height, width, _), dtype = latent.shape, latent.dtype
        if height % PATCH or width % PATCH:
            raise ValueError(
                f"FluxTransformer2DModel: latents of {height} x {width}; accepted: even sizes"
            )
        if self.config.guidance_embeds != (guidance is not None):
            wanted = "a scale" if self.config.guidance_embeds else "None"
            raise unsupported(
                "FluxTransformer2DModel", "guidance", guidance, f"{wanted}, with this config"
            )
        rows = height // PATCH
        columns = width // PATCH
        length = text.shape[1]
        # in float32, because it modulates every token of every block: its rounding error would not average out
        condition = jax.nn.silu(
            self.time_text_embed(timestep, pooled.astype(jnp.float32), guidance)
        ).astype(dtype)
        turn = partial(rotate, rotation=rotary(length, rows, columns, self.config.axes_dims_rope))

        # an image token for each 2 x 2 pixels, row by row
        text = self.context_embedder(text.astype(dtype))
        squares = space_to_depth(latent)
        streams = text, self.x_embedder(squares.reshape(len(latent), -1, squares.shape[-1]))

        def apply(block, streams):
            return block(*streams, condition, turn, fp8_attention=fp8_attention)

        x = jnp.concatenate(
            scan_blocks(self.transformer_blocks, apply, streams, remat=self.remat), axis=1
        )
        x = scan_blocks(
            self.single_transformer_blocks,
            lambda block, x: block(x, condition, turn, fp8_attention),
            x,
            remat=self.remat,
        )
        normed, (scale, shift) = self.norm_out(x[:, length:], condition)
        return depth_to_space(
            self.proj_out(normed.map(modulate, shift, scale)).reshape(
                len(latent), rows, columns, -1
            )
        )


class FluxSingleBlock(nnx.Module):
    """A block with one stream, text before image. Attention and MLP read the same input, and one linear reads both results."""

    def __init__(self, c: FluxConfig, *, rngs: nnx.Rngs):
        d = c.width
        self.norm = AdaLayerNorm(d, 3, rngs=rngs)
        self.attn = SelfAttention(d, c.attention_head_dim, normed=True, projected=False, rngs=rngs)
        self.proj_mlp = Linear(d, 4 * d, rngs=rngs)
        self.proj_out = Linear(5 * d, d, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "b s d"],
        condition: Float[Array, "b d"],
        rotate: Rotate,
        fp8_attention: bool,
    ) -> Float[Array, "b s d"]:
        h, (shift, scale, gate) = self.norm(x, condition)
        h = h.map(modulate, shift, scale)
        both = LazyActivation.of(
            self.attn(h, rotate, fp8_attention=fp8_attention), dtype=h.dtype
        ).beside(self.proj_mlp.pending(h).map(jax.nn.gelu))
        return x + gate * self.proj_out(both)


def rotary(length: int, rows: int, columns: int, axes: tuple[int, ...]) -> Rotation:
    """Cosines and sines of the angle of each position: `length` tokens of text, then `rows * columns` of the image, row by row.

    A position has three coordinates: (0, row, column) for the image, and (0, 0, 0) for text, which is thus not rotated.
    axes: how many features of a head each coordinate rotates.
    """
    position = np.zeros((3, length + rows * columns))
    position[1:, length:] = np.indices((rows, columns)).reshape(2, -1)
    return rotation(position, axes, THETA)


def rotation(
    position: Float[np.ndarray, "axes s"], axes: tuple[int, ...], theta: float
) -> Rotation:
    """Cosines and sines of the angles of positions with a coordinate for each of `axes` (arXiv 2104.09864, section 3.3).

    axes: how many features of a head each coordinate rotates, in pairs. theta: of the frequencies.
    """
    # on the host in float64, rounded once, as in the released code
    angle = [
        np.outer(p, theta ** (-np.arange(0, d, 2) / d)) for p, d in zip(position, axes, strict=True)
    ]
    angles = np.concatenate(angle, axis=-1)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rotate(x: LazyActivation, position: int, rotation: Rotation) -> LazyActivation:
    """Rotates queries or keys by the angles of their positions. position: of the first row of `x`."""
    return x.map(turn, *(jnp.asarray(r[None, position : position + x.rows]) for r in rotation))


def turn(
    x: Float[Array, "... d"], cos: Float[Array, "... half"], sin: Float[Array, "... half"]
) -> Float[Array, "... d"]:
    """Rotates each pair of neighbouring features of each head by an angle, in float32 (arXiv 2104.09864, eq. 34).

    x: heads side by side, each of `2 half` features.
    """
    cos = cos[..., None, :]
    sin = sin[..., None, :]
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, cos.shape[-1], 2)
    first, second = jnp.unstack(pairs, axis=-1)
    return (
        jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1)
        .reshape(x.shape)
        .astype(x.dtype)
    )
