"""FLUX.2's diffusion transformer (Black Forest Labs, 2025): `Flux2Transformer2DModel` of diffusers in Flax NNX.

FLUX.1's two kinds of blocks (`models.flux.transformer`), with four differences. All blocks of a kind share their modulation. The MLPs are
SiLU-gated (arXiv 2002.05202). In a block with one stream, one linear makes queries, keys, values and the MLP's input. Positions
have four coordinates, and the words of the text have positions, too. No linear has a bias. The network predicts the velocity
`v = noise - x0` of a flow, from text alone: reference pictures are not ported.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from solrl_jax.models.flux.transformer import Rotation, rotate, rotation
from solrl_jax.models.layers.embeddings import TimestepMLP
from solrl_jax.models.layers.feed_forward import gated
from solrl_jax.models.layers.linear import Linear
from solrl_jax.models.layers.mmdit import EPS, AdaLayerNorm, JointAttention, Rotate, attend
from solrl_jax.models.layers.modulation import modulate
from solrl_jax.models.layers.norm import LayerNorm, RMSNorm
from solrl_jax.models.layers.stack import scan_blocks, stack
from solrl_jax.models.loading.config_file import TransformerConfig
from solrl_jax.quant.lazy import LazyActivation

ACCEPTED = {
    "patch_size": (1,),
    "timestep_guidance_channels": (256,),
    "eps": (EPS,),
    "guidance_embeds": (False,),
}


@dataclasses.dataclass(frozen=True)
class Flux2Config(TransformerConfig):
    network = "Flux2Transformer2DModel"

    patch_size: int = 1
    in_channels: int = 128
    out_channels: int | None = None
    num_layers: int = 8
    num_single_layers: int = 48
    attention_head_dim: int = 128
    num_attention_heads: int = 48
    joint_attention_dim: int = 15360
    timestep_guidance_channels: int = 256
    mlp_ratio: float = 3.0
    axes_dims_rope: tuple[int, ...] = (32, 32, 32, 32)
    rope_theta: int = 2000
    eps: float = EPS
    guidance_embeds: bool = True

    def check(self) -> None:
        for name, accepted in ACCEPTED.items():
            self.require_one_of(name, accepted)
        axes = self.axes_dims_rope
        head = self.attention_head_dim
        fits = (
            len(axes) == 4
            and all(type(a) is int and a > 0 and a % 2 == 0 for a in axes)
            and sum(axes) == head
        )
        self.require(
            fits,
            "axes_dims_rope",
            f"four positive even numbers whose sum is attention_head_dim={head}",
        )
        self.require(
            self.hidden > 0, "mlp_ratio", "a number that gives the MLP a width of 1 or more"
        )

    @property
    def hidden(self) -> int:
        """The width of the MLPs after their gate."""
        return int(self.width * self.mlp_ratio)


class Flux2Transformer2DModel(nnx.Module):
    """The velocity network. remat: what gradients recompute, a key of `models.layers.stack.REMAT`."""

    def __init__(self, config: Flux2Config, *, remat: str = "none", rngs: nnx.Rngs):
        c = config
        d = config.width
        self.config = config
        self.remat = remat

        def linear(n_in, n_out):
            return Linear(n_in, n_out, bias=False, rngs=rngs)

        self.time_guidance_embed = nnx.Dict(timestep_embedder=TimestepMLP(d, bias=False, rngs=rngs))
        self.double_stream_modulation_img = nnx.Dict(linear=linear(d, 6 * d))
        self.double_stream_modulation_txt = nnx.Dict(linear=linear(d, 6 * d))
        self.single_stream_modulation = nnx.Dict(linear=linear(d, 3 * d))
        self.x_embedder = linear(c.in_channels, d)
        self.context_embedder = linear(c.joint_attention_dim, d)
        self.transformer_blocks = stack(c.num_layers, lambda r: Flux2Block(c, rngs=r), rngs)
        self.single_transformer_blocks = stack(
            c.num_single_layers, lambda r: Flux2SingleBlock(c, rngs=r), rngs
        )
        self.norm_out = AdaLayerNorm(d, 2, bias=False, rngs=rngs)
        self.proj_out = linear(d, c.features_out)

    def __call__(
        self,
        latent: Float[Array, "b h w c"],
        text: Float[Array, "b l joint"],
        timestep: Float[Array, " b"],
        *,
        fp8_attention: bool = False,
    ) -> Float[Array, "b h w out"]:
        """The velocity at `latent`, in the dtype of `latent`.

        latent: one token a latent pixel. text: the encoder's states; padding is not masked, as in the released pipeline.
        timestep: `1000 sigma`.
        """
        (_, height, width, c), dtype, length = latent.shape, latent.dtype, text.shape[1]
        # in float32, because it modulates every token of every block: its rounding error would not average out
        embedded = self.time_guidance_embed.timestep_embedder(timestep, jnp.float32)
        condition = jax.nn.silu(embedded).astype(dtype)

        def vectors(module, count):
            return jnp.split(module.linear(condition)[:, None], count, axis=-1)

        of_image = vectors(self.double_stream_modulation_img, 6)
        of_text = vectors(self.double_stream_modulation_txt, 6)
        of_both = vectors(self.single_stream_modulation, 3)
        turn = partial(rotate, rotation=rotary(length, height, width, self.config))

        streams = (
            self.context_embedder(text.astype(dtype)),
            self.x_embedder(latent.reshape(len(latent), -1, c)),
        )

        def apply(block, streams):
            return block(*streams, of_text, of_image, turn, fp8_attention)

        x = jnp.concatenate(
            scan_blocks(self.transformer_blocks, apply, streams, remat=self.remat), axis=1
        )
        x = scan_blocks(
            self.single_transformer_blocks,
            lambda block, x: block(x, of_both, turn, fp8_attention),
            x,
            remat=self.remat,
        )
        normed, (scale, shift) = self.norm_out(x[:, length:], condition)
        return self.proj_out(normed.map(modulate, shift, scale)).reshape(
            len(latent), height, width, -1
        )


class Flux2Block(nnx.Module):
    """One layer of both streams. of_text, of_image: shift, scale and gate [b, 1, d] of the attention, then of the MLP."""

    def __init__(self, c: Flux2Config, *, rngs: nnx.Rngs):
        self.norm = LayerNorm(c.width, eps=EPS, affine=False)
        self.attn = JointAttention(
            c.width, c.attention_head_dim, normed=True, bias=False, rngs=rngs
        )
        self.ff, self.ff_context = (FeedForward(c, rngs=rngs) for _ in range(2))

    def __call__(
        self,
        text: Float[Array, "b l d"],
        image: Float[Array, "b n d"],
        of_text: list[Array],
        of_image: list[Array],
        rotate: Rotate,
        fp8_attention: bool,
    ) -> tuple[Float[Array, "b l d"], Float[Array, "b n d"]]:
        def modulated(x, shift, scale):
            return self.norm.pending(x).map(modulate, shift, scale)

        read = modulated(text, *of_text[:2]), modulated(image, *of_image[:2])
        from_text, from_image = self.attn(*read, rotate, fp8_attention=fp8_attention)
        assert (
            from_text is not None
        )  # `JointAttention` leaves it out of a network's last block, where nothing reads it
        text = text + of_text[2] * from_text
        image = image + of_image[2] * from_image
        text = text + of_text[5] * self.ff_context(modulated(text, *of_text[3:5]))
        return text, image + of_image[5] * self.ff(modulated(image, *of_image[3:5]))


class FeedForward(nnx.Module):
    """A SiLU-gated MLP. One linear makes the gate and, after it, what is gated."""

    def __init__(self, c: Flux2Config, *, rngs: nnx.Rngs):
        self.linear_in = Linear(c.width, 2 * c.hidden, bias=False, rngs=rngs)
        self.linear_out = Linear(c.hidden, c.width, bias=False, rngs=rngs)
        self.hidden = c.hidden

    def __call__(self, x: LazyActivation) -> Float[Array, "b s d"]:
        gate, value = self.linear_in.pending(x).columns(self.hidden, self.hidden)
        return self.linear_out(gate.join(gated, value))


class Flux2SingleBlock(nnx.Module):
    """A block with one stream, text before image. vectors: shift, scale and gate [b, 1, d]."""

    def __init__(self, c: Flux2Config, *, rngs: nnx.Rngs):
        self.norm = LayerNorm(c.width, eps=EPS, affine=False)
        self.attn = ParallelAttention(c, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "b s d"],
        vectors: list[Float[Array, "b 1 d"]],
        rotate: Rotate,
        fp8_attention: bool,
    ) -> Float[Array, "b s d"]:
        shift, scale, gate = vectors
        return x + gate * self.attn(
            self.norm.pending(x).map(modulate, shift, scale), rotate, fp8_attention
        )


class ParallelAttention(nnx.Module):
    """Attention and a gated MLP side by side (arXiv 2302.05442, section 2): one linear before both, one after."""

    def __init__(self, c: Flux2Config, *, rngs: nnx.Rngs):
        self.to_qkv_mlp_proj = Linear(c.width, 3 * c.width + 2 * c.hidden, bias=False, rngs=rngs)
        self.norm_q, self.norm_k = (RMSNorm(c.attention_head_dim, eps=EPS) for _ in range(2))
        self.to_out = Linear(c.width + c.hidden, c.width, bias=False, rngs=rngs)
        self.config = c

    def __call__(
        self, x: LazyActivation, rotate: Rotate, fp8_attention: bool
    ) -> Float[Array, "b s d"]:
        d = self.config.width
        hidden = self.config.hidden
        q, k, v, gate, value = self.to_qkv_mlp_proj.pending(x).columns(d, d, d, hidden, hidden)
        heads = [rotate(self.norm_q.by_head(q), 0), rotate(self.norm_k.by_head(k), 0), v]
        attended = attend(self.config.attention_head_dim, heads, fp8_attention=fp8_attention)
        return self.to_out(
            LazyActivation.of(attended, dtype=x.dtype).beside(gate.join(gated, value))
        )


def rotary(length: int, rows: int, columns: int, c: Flux2Config) -> Rotation:
    """Cosines and sines of the angle of each position: `length` tokens of text, then `rows * columns` of the image, row by row.

    A position has four coordinates: (0, row, column, 0) for the image, and (0, 0, 0, index) for text. The first one tells
    reference pictures apart.
    """
    position = np.zeros((4, length + rows * columns))
    position[3, :length] = np.arange(length)
    position[1:3, length:] = np.indices((rows, columns)).reshape(2, -1)
    return rotation(position, c.axes_dims_rope, c.rope_theta)
