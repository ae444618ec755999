"""FLUX.1's diffusion transformer (Black Forest Labs, 2024): `FluxTransformer2DModel` of diffusers in Flax NNX.

A multimodal transformer (arXiv 2403.03206, section 4) with rotary positions (arXiv 2104.09864): first blocks in which text and
image have weights of their own and attend jointly, then blocks that treat both as one sequence and run attention beside the
MLP (arXiv 2302.05442, section 2). All are modulated by time, guidance scale and pooled text. It predicts the velocity
`v = noise - x0` of a flow.
"""

import dataclasses
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from solrl_jax.models.attention import attention
from solrl_jax.models.embeddings import TextProjection, TimestepMLP
from solrl_jax.models.layers import LayerNorm, Linear, RMSNorm, scan_blocks, stack

EPS = 1e-6  # of every normalisation
PATCH = 2  # latent pixels a token, each way
THETA = 10000.0  # of the rotary frequencies
Rotation: TypeAlias = tuple[np.ndarray, np.ndarray]  # cosines and sines [positions, head / 2], float32


@dataclasses.dataclass(frozen=True)
class FluxConfig:
    """The fields of a released `transformer/config.json`, under their own names; a file may leave out what has a default."""

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

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "FluxConfig":
        """From a `config.json`. Raises ValueError for a field or value this port does not know."""
        known = {f.name for f in dataclasses.fields(cls)}
        given = {k: v for k, v in fields.items() if not k.startswith("_")}
        if unknown := sorted(given.keys() - known):
            raise ValueError(f"FluxTransformer2DModel: unknown config field(s) {unknown}; known are {sorted(known)}")
        if "axes_dims_rope" in given:
            given["axes_dims_rope"] = tuple(given["axes_dims_rope"])
        config = cls(**given)
        for field in dataclasses.fields(cls):
            value = getattr(config, field.name)
            if field.type is int and (type(value) is not int or value <= 0):
                raise _unsupported(field.name, value, "a positive integer")
        if config.patch_size != 1:
            raise _unsupported("patch_size", config.patch_size, "1 (latents are packed two by two before it)")
        if type(config.guidance_embeds) is not bool:
            raise _unsupported("guidance_embeds", config.guidance_embeds, "true, false")
        for name, channels in (("in_channels", config.in_channels), ("out_channels", config.features_out)):
            if type(channels) is not int or channels <= 0 or channels % PATCH**2:
                raise _unsupported(name, channels, f"a positive multiple of {PATCH**2}")
        axes, head = config.axes_dims_rope, config.attention_head_dim
        if len(axes) != 3 or any(type(a) is not int or a <= 0 or a % 2 for a in axes) or sum(axes) != head:
            raise _unsupported("axes_dims_rope", axes, f"three positive even numbers whose sum is attention_head_dim={head}")
        return config

    @property
    def width(self) -> int:
        return self.num_attention_heads * self.attention_head_dim

    @property
    def features_out(self) -> int:
        return self.in_channels if self.out_channels is None else self.out_channels


def _unsupported(field: str, value: Any, accepted: str) -> ValueError:
    return ValueError(f"FluxTransformer2DModel: {field}={value!r}; accepted: {accepted}")


class FluxTransformer2DModel(nnx.Module):
    def __init__(self, config: FluxConfig, *, remat: str = "none", rngs: nnx.Rngs):
        c, d = config, config.width
        self.config, self.remat = config, remat
        self.time_text_embed = TimeTextEmbedding(d, c.pooled_projection_dim, guided=c.guidance_embeds, rngs=rngs)
        self.context_embedder = Linear(c.joint_attention_dim, d, rngs=rngs)
        self.x_embedder = Linear(c.in_channels, d, rngs=rngs)
        self.transformer_blocks = stack(c.num_layers, lambda r: FluxBlock(c, rngs=r), rngs)
        self.single_transformer_blocks = stack(c.num_single_layers, lambda r: FluxSingleBlock(c, rngs=r), rngs)
        self.norm_out = AdaLayerNormContinuous(d, rngs=rngs)
        self.proj_out = Linear(d, c.features_out, rngs=rngs)

    def __call__(
        self,
        latent: Float[Array, "b h w c"],
        text: Float[Array, "b l d"],
        pooled: Float[Array, "b e"],
        timestep: Float[Array, " b"],
        guidance: Float[Array, " b"] | None = None,
    ) -> Float[Array, "b h w c"]:
        """The velocity at `latent`, in the dtype of `latent`.

        latent: not packed, `c = in_channels / 4`, even height and width; text: T5's states, padding included, which FLUX does
        not mask; pooled: CLIP's embedding of the text; timestep: `1000 sigma`; guidance: the scale itself (3.5, say), for a
        network with `guidance_embeds` and for no other.
        """
        (_, height, width, _), dtype = latent.shape, latent.dtype
        if height % PATCH or width % PATCH:
            raise ValueError(f"FluxTransformer2DModel: latents of {height} x {width}; accepted: even sizes")
        if self.config.guidance_embeds != (guidance is not None):
            wanted = "a scale" if self.config.guidance_embeds else "None"
            raise ValueError(f"FluxTransformer2DModel: guidance={guidance}; accepted with this config: {wanted}")
        rows, columns, length = height // PATCH, width // PATCH, text.shape[1]
        # float32 until here: it modulates every token of every block, so that its rounding would not average out
        condition = jax.nn.silu(self.time_text_embed(timestep, guidance, pooled)).astype(dtype)
        rotation = rotary(length, rows, columns, self.config.axes_dims_rope)

        image = self.x_embedder(pack(latent))
        text = self.context_embedder(text.astype(dtype))
        text, image = scan_blocks(
            self.transformer_blocks,
            lambda block, streams: block(*streams, condition, rotation),
            (text, image),
            remat=self.remat,
        )
        x = jnp.concatenate([text, image], axis=1)
        x = scan_blocks(self.single_transformer_blocks, lambda block, x: block(x, condition, rotation), x, remat=self.remat)
        return unpack(self.proj_out(self.norm_out(x[:, length:], condition)), rows, columns)


class FluxBlock(nnx.Module):
    """A block of two streams: text and image meet in the attention and nowhere else (arXiv 2403.03206, figure 2b)."""

    def __init__(self, c: FluxConfig, *, rngs: nnx.Rngs):
        d = c.width
        self.norm1, self.norm1_context = (AdaLayerNormZero(d, 6, rngs=rngs) for _ in range(2))
        self.attn = JointAttention(d, c.attention_head_dim, rngs=rngs)
        self.norm2, self.norm2_context = (LayerNorm(d, eps=EPS, affine=False) for _ in range(2))
        self.ff, self.ff_context = (FeedForward(d, rngs=rngs) for _ in range(2))

    def __call__(
        self, text: Float[Array, "b l d"], image: Float[Array, "b n d"], condition: Float[Array, "b d"], rotation: Rotation
    ) -> tuple[Float[Array, "b l d"], Float[Array, "b n d"]]:
        text_in, text_gate, *text_ff = self.norm1_context(text, condition)
        image_in, image_gate, *image_ff = self.norm1(image, condition)
        from_text, from_image = self.attn(text_in, image_in, rotation)
        text, image = text + text_gate * from_text, image + image_gate * from_image
        return (
            _add_feed_forward(text, self.norm2_context, self.ff_context, *text_ff),
            _add_feed_forward(image, self.norm2, self.ff, *image_ff),
        )


def _add_feed_forward(x, norm, ff, shift, scale, gate):
    return x + gate * ff(norm(x) * (1 + scale) + shift)


class FluxSingleBlock(nnx.Module):
    """A block of one stream, text before image: attention and MLP read the same input and leave by one linear."""

    def __init__(self, c: FluxConfig, *, rngs: nnx.Rngs):
        d = c.width
        self.norm = AdaLayerNormZero(d, 3, rngs=rngs)
        self.attn = SelfAttention(d, c.attention_head_dim, rngs=rngs)
        self.proj_mlp = Linear(d, 4 * d, rngs=rngs)
        self.proj_out = Linear(5 * d, d, rngs=rngs)

    def __call__(self, x: Float[Array, "b s d"], condition: Float[Array, "b d"], rotation: Rotation) -> Float[Array, "b s d"]:
        h, gate = self.norm(x, condition)
        both = jnp.concatenate([self.attn(h, rotation), jax.nn.gelu(self.proj_mlp(h), approximate=True)], axis=-1)
        return x + gate * self.proj_out(both)


class SelfAttention(nnx.Module):
    """Attention over one sequence, without a linear after it."""

    def __init__(self, d: int, head: int, *, rngs: nnx.Rngs):
        self.to_q, self.to_k, self.to_v = (Linear(d, d, rngs=rngs) for _ in range(3))
        self.norm_q, self.norm_k = (RMSNorm(head, eps=EPS) for _ in range(2))
        self.head = head

    def __call__(self, x: Float[Array, "b s d"], rotation: Rotation) -> Float[Array, "b s d"]:
        q, k, v = _heads(self.head, self.to_q(x), self.to_k(x), self.to_v(x))
        return _attend(self.norm_q(q), self.norm_k(k), v, rotation)


class JointAttention(nnx.Module):
    """Attention over text and image as one sequence, text first; each has linears and norms of its own (text's: `add`)."""

    def __init__(self, d: int, head: int, *, rngs: nnx.Rngs):
        self.to_q, self.to_k, self.to_v = (Linear(d, d, rngs=rngs) for _ in range(3))
        self.norm_q, self.norm_k = (RMSNorm(head, eps=EPS) for _ in range(2))
        self.to_out = nnx.List([Linear(d, d, rngs=rngs)])
        self.add_q_proj, self.add_k_proj, self.add_v_proj = (Linear(d, d, rngs=rngs) for _ in range(3))
        self.norm_added_q, self.norm_added_k = (RMSNorm(head, eps=EPS) for _ in range(2))
        self.to_add_out = Linear(d, d, rngs=rngs)
        self.head = head

    def __call__(
        self, text: Float[Array, "b l d"], image: Float[Array, "b n d"], rotation: Rotation
    ) -> tuple[Float[Array, "b l d"], Float[Array, "b n d"]]:
        tq, tk, tv = _heads(self.head, self.add_q_proj(text), self.add_k_proj(text), self.add_v_proj(text))
        iq, ik, iv = _heads(self.head, self.to_q(image), self.to_k(image), self.to_v(image))
        q = jnp.concatenate([self.norm_added_q(tq), self.norm_q(iq)], axis=1)
        k = jnp.concatenate([self.norm_added_k(tk), self.norm_k(ik)], axis=1)
        out, length = _attend(q, k, jnp.concatenate([tv, iv], axis=1), rotation), text.shape[1]
        return self.to_add_out(out[:, :length]), self.to_out[0](out[:, length:])


def _heads(head: int, *arrays: Float[Array, "b s d"]) -> list[Float[Array, "b s n head"]]:
    return [x.reshape(*x.shape[:2], -1, head) for x in arrays]


def _attend(q, k, v, rotation: Rotation) -> Float[Array, "b s d"]:
    """Attention between rotated queries and keys [b, s, n, head], the heads side by side again."""
    return attention(rotate(q, rotation), rotate(k, rotation), v).reshape(*q.shape[:2], -1)


class FeedForward(nnx.Module):
    """Linear to four times the width, GELU, linear back; a dropout that holds nothing is what PyTorch calls `net.1`."""

    def __init__(self, d: int, *, rngs: nnx.Rngs):
        self.net = nnx.Dict({"0": GELU(d, 4 * d, rngs=rngs), "2": Linear(4 * d, d, rngs=rngs)})

    def __call__(self, x: Float[Array, "b s d"]) -> Float[Array, "b s d"]:
        return self.net["2"](self.net["0"](x))


class GELU(nnx.Module):
    """A linear and the GELU in its tanh form (arXiv 1606.08415, section 2)."""

    def __init__(self, n_in: int, n_out: int, *, rngs: nnx.Rngs):
        self.proj = Linear(n_in, n_out, rngs=rngs)

    def __call__(self, x: Float[Array, "b s n_in"]) -> Float[Array, "b s n_out"]:
        return jax.nn.gelu(self.proj(x), approximate=True)


class AdaLayerNormZero(nnx.Module):
    """A layer norm whose shift and scale are linear in the condition, as are the vectors it hands on (arXiv 2212.09748, 3.2).

    `vectors` counts both: 3 are (shift, scale, gate), 6 are these and (shift, scale, gate) of the feed-forward.
    """

    def __init__(self, d: int, vectors: int, *, rngs: nnx.Rngs):
        self.linear = Linear(d, vectors * d, rngs=rngs)
        self.norm = LayerNorm(d, eps=EPS, affine=False)
        self.vectors = vectors

    def __call__(self, x: Float[Array, "b s d"], condition: Float[Array, "b d"]) -> list[Array]:
        """The modulated `x` [b, s, d], then the vectors after shift and scale, [b, 1, d] each; `condition` is activated."""
        shift, scale, *others = jnp.split(self.linear(condition)[:, None], self.vectors, axis=-1)
        return [self.norm(x) * (1 + scale) + shift, *others]


class AdaLayerNormContinuous(nnx.Module):
    """The last norm: as `AdaLayerNormZero` without gates, but the scale comes before the shift."""

    def __init__(self, d: int, *, rngs: nnx.Rngs):
        self.linear = Linear(d, 2 * d, rngs=rngs)
        self.norm = LayerNorm(d, eps=EPS, affine=False)

    def __call__(self, x: Float[Array, "b s d"], condition: Float[Array, "b d"]) -> Float[Array, "b s d"]:
        scale, shift = jnp.split(self.linear(condition)[:, None], 2, axis=-1)
        return self.norm(x) * (1 + scale) + shift


class TimeTextEmbedding(nnx.Module):
    """The condition of every block: time, guidance scale (distilled networks) and pooled text, embedded and summed; float32."""

    def __init__(self, d: int, pooled: int, *, guided: bool, rngs: nnx.Rngs):
        self.timestep_embedder = TimestepMLP(d, rngs=rngs)
        self.guidance_embedder = TimestepMLP(d, rngs=rngs) if guided else None
        self.text_embedder = TextProjection(pooled, d, act=jax.nn.silu, rngs=rngs)

    def __call__(
        self, timestep: Float[Array, " b"], guidance: Float[Array, " b"] | None, pooled: Float[Array, "b e"]
    ) -> Float[Array, "b d"]:
        embedded = self.timestep_embedder(timestep, jnp.float32)
        if self.guidance_embedder is not None and guidance is not None:
            embedded = embedded + self.guidance_embedder(1000 * guidance.astype(jnp.float32), jnp.float32)
        return embedded + self.text_embedder(pooled.astype(jnp.float32))


def pack(latent: Float[Array, "b h w c"]) -> Float[Array, "b n 4*c"]:
    """One token for each 2 x 2 pixels, row by row; its features are ordered (channel, dy, dx)."""
    b, h, w, c = latent.shape
    x = latent.reshape(b, h // PATCH, PATCH, w // PATCH, PATCH, c).transpose(0, 1, 3, 5, 2, 4)
    return x.reshape(b, (h // PATCH) * (w // PATCH), c * PATCH**2)


def unpack(tokens: Float[Array, "b n 4*c"], rows: int, columns: int) -> Float[Array, "b h w c"]:
    """The inverse of `pack`."""
    b, _, features = tokens.shape
    x = tokens.reshape(b, rows, columns, features // PATCH**2, PATCH, PATCH).transpose(0, 1, 4, 2, 5, 3)
    return x.reshape(b, rows * PATCH, columns * PATCH, features // PATCH**2)


def rotary(length: int, rows: int, columns: int, axes: tuple[int, ...]) -> Rotation:
    """Cosines and sines of the angles of each position: `length` of text, then `rows * columns` of the image, row by row.

    A position is (0, row, column), for text (0, 0, 0), so that text is not rotated. `axes` says how many features of a head
    each of the three coordinates turns.
    """
    # on the host in float64, as the released code has it, and rounded once
    position = np.zeros((3, length + rows * columns))
    position[1:, length:] = np.indices((rows, columns)).reshape(2, -1)
    angle = [np.outer(p, THETA ** (-np.arange(0, d, 2) / d)) for p, d in zip(position, axes, strict=True)]
    angles = np.concatenate(angle, axis=-1)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rotate(x: Float[Array, "b s n head"], rotation: Rotation) -> Float[Array, "b s n head"]:
    """Turns each pair of neighbouring features by the angle of its position (arXiv 2104.09864, eq. 34); float32 inside."""
    cos, sin = (r[:, None] for r in rotation)
    first, second = jnp.moveaxis(x.astype(jnp.float32).reshape(*x.shape[:-1], -1, 2), -1, 0)
    turned = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.reshape(x.shape).astype(x.dtype)
