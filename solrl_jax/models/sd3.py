"""Stable Diffusion 3's transformer (MMDiT; arXiv 2403.03206, section 4): `SD3Transformer2DModel` of diffusers in Flax NNX.

Image and text tokens are two streams with weights of their own, modulated by time and pooled text (adaLN-Zero, arXiv
2212.09748), that attend as one sequence. It predicts the velocity `v = noise - x0` of a flow.
"""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from solrl_jax.models.attention import attention
from solrl_jax.models.embeddings import PatchProjection, TextProjection, TimestepMLP
from solrl_jax.models.layers import LayerNorm, Linear, RMSNorm, param, scan_blocks, stack

EPS = 1e-6  # of every normalisation here


@dataclasses.dataclass(frozen=True)
class SD3Config:
    """The fields of a released `transformer/config.json`, under their own names; the defaults are diffusers'."""

    sample_size: int = 128
    patch_size: int = 2
    in_channels: int = 16
    num_layers: int = 18
    attention_head_dim: int = 64
    num_attention_heads: int = 18
    joint_attention_dim: int = 4096
    caption_projection_dim: int = 1152
    pooled_projection_dim: int = 2048
    out_channels: int | None = 16
    pos_embed_max_size: int = 96
    dual_attention_layers: tuple[int, ...] = ()
    qk_norm: str | None = None

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "SD3Config":
        """From a `config.json`. Raises ValueError for a field or value this port does not know."""
        known = {f.name: f for f in dataclasses.fields(cls)}
        given = {k: v for k, v in fields.items() if not k.startswith("_")}
        if unknown := sorted(given.keys() - known):
            raise ValueError(f"SD3Transformer2DModel: unknown config field(s) {unknown}; known are {sorted(known)}")
        for name, value in given.items():
            if known[name].type is int and (type(value) is not int or value <= 0):
                raise _unsupported(name, value, "a positive integer")
        dual, out = given.get("dual_attention_layers", ()), given.get("out_channels", cls.out_channels)
        if not isinstance(dual, (list, tuple)) or any(type(i) is not int for i in dual):
            raise _unsupported("dual_attention_layers", dual, "a list of integers")
        if out is not None and (type(out) is not int or out <= 0):
            raise _unsupported("out_channels", out, "a positive integer or None")
        config = cls(**given | {"dual_attention_layers": tuple(dual)})
        if config.qk_norm not in (None, "rms_norm"):
            raise _unsupported("qk_norm", config.qk_norm, "None, 'rms_norm'")
        if config.caption_projection_dim != config.width:  # both streams have the network's width
            accepted = f"num_attention_heads * attention_head_dim = {config.width}"
            raise _unsupported("caption_projection_dim", config.caption_projection_dim, accepted)
        if config.width % 4:
            raise _unsupported("attention_head_dim", config.attention_head_dim, "what makes the width a multiple of 4")
        return config

    @property
    def width(self) -> int:
        return self.num_attention_heads * self.attention_head_dim


def _unsupported(field: str, value: Any, accepted: str) -> ValueError:
    return ValueError(f"SD3Transformer2DModel: {field}={value!r}; accepted: {accepted}")


class SD3Transformer2DModel(nnx.Module):
    """The blocks are of up to three kinds (see `JointTransformerBlock`). Each run of equal ones is a stack, and
    `transformer_blocks` holds the stacks by the layers they are, first and last: "0-12", "13-22", "23-23"."""

    def __init__(self, config: SD3Config, *, remat: str = "none", rngs: nnx.Rngs):
        c, d = config, config.width
        self.config, self.remat = config, remat
        self.pos_embed = PatchEmbed(c, rngs=rngs)
        self.time_text_embed = TimeTextEmbedding(c, rngs=rngs)
        self.context_embedder = Linear(c.joint_attention_dim, d, rngs=rngs)
        self.transformer_blocks = nnx.Dict(_runs(c, rngs))
        self.norm_out = AdaLayerNorm(d, 2, rngs=rngs)
        self.proj_out = Linear(d, c.patch_size**2 * (c.out_channels or c.in_channels), rngs=rngs)

    def __call__(
        self,
        latent: Float[Array, "b h w c"],
        text: Float[Array, "b l joint"],
        pooled: Float[Array, "b e"],
        timestep: Float[Array, " b"],
    ) -> Float[Array, "b h w c"]:
        """The velocity at `latent`, in the dtype of `latent`.

        text: every token counts, padding too, as in the released pipeline; pooled: one vector for the whole prompt;
        timestep: `1000 sigma`. Raises ValueError for a size that is no whole number of patches or has too many of them.
        """
        (batch, height, width, _), p, dtype = latent.shape, self.config.patch_size, latent.dtype
        x = self.pos_embed(latent)
        condition = silu(self.time_text_embed(timestep, pooled.astype(dtype)))
        streams: Any = (x, self.context_embedder(text.astype(dtype)))
        # by first layer: a run's place in the tree depends on how its key sorts
        for key in sorted(self.transformer_blocks, key=lambda key: int(key.split("-")[0])):
            streams = scan_blocks(
                self.transformer_blocks[key], lambda block, s: block(*s, condition), streams, remat=self.remat
            )
        x, (scale, shift) = self.norm_out(streams[0], condition)
        x = self.proj_out(modulate(x, shift, scale))
        x = x.reshape(batch, height // p, width // p, p, p, -1).transpose(0, 1, 3, 2, 4, 5)
        return x.reshape(batch, height, width, -1)


def _runs(c: SD3Config, rngs: nnx.Rngs) -> dict[str, "JointTransformerBlock"]:
    """A stack for each run of equal layers, under the layers' numbers."""

    def run(layers: list[int], dual: bool, last: bool) -> JointTransformerBlock:
        make = lambda r: JointTransformerBlock(c, dual=dual, last=last, rngs=r)
        return stack(len(layers), make, rngs, first=layers[0])

    kind = lambda i: (i in c.dual_attention_layers, i == c.num_layers - 1)
    grouped = [(list(layers), *of) for of, layers in itertools.groupby(range(c.num_layers), kind)]
    return {f"{layers[0]}-{layers[-1]}": run(layers, dual, last) for layers, dual, last in grouped}


class JointTransformerBlock(nnx.Module):
    """One layer of both streams (arXiv 2403.03206, figure 2b).

    dual: the image stream attends to itself, too, beside the joint attention (SD3.5 Medium). last: the text stream ends
    here: it is attended to, and not continued.
    """

    def __init__(self, c: SD3Config, *, dual: bool, last: bool, rngs: nnx.Rngs):
        d = c.width
        self.norm1 = AdaLayerNorm(d, 9 if dual else 6, rngs=rngs)
        self.norm1_context = AdaLayerNorm(d, 2 if last else 6, rngs=rngs)
        self.attn = JointAttention(c, last=last, rngs=rngs)
        self.attn2 = SelfAttention(c, rngs=rngs) if dual else None
        self.norm2 = LayerNorm(d, eps=EPS, affine=False)
        self.ff = FeedForward(d, rngs=rngs)
        self.norm2_context = LayerNorm(d, eps=EPS, affine=False)
        self.ff_context = None if last else FeedForward(d, rngs=rngs)

    def __call__(
        self, x: Float[Array, "b n d"], text: Float[Array, "b l d"], condition: Float[Array, "b d"]
    ) -> tuple[Float[Array, "b n d"], Float[Array, "b l d"]]:
        normed, (shift, scale, gate, shift_ff, scale_ff, gate_ff, *second) = self.norm1(x, condition)
        text_normed, of_text = self.norm1_context(text, condition)
        # the last layer's text is modulated by (scale, shift), every other by (shift, scale, gate) twice
        text_shift, text_scale = of_text[:2] if self.ff_context is not None else of_text[::-1]

        out, text_out = self.attn(modulate(normed, shift, scale), modulate(text_normed, text_shift, text_scale))
        x = x + gate * out
        if self.attn2 is not None:
            shift, scale, gate = second
            x = x + gate * self.attn2(modulate(normed, shift, scale))  # of what came in, not of what attn made of it
        x = x + gate_ff * self.ff(modulate(self.norm2(x), shift_ff, scale_ff))

        if self.ff_context is None or text_out is None:
            return x, text
        gate, shift_ff, scale_ff, gate_ff = of_text[2:]
        text = text + gate * text_out
        return x, text + gate_ff * self.ff_context(modulate(self.norm2_context(text), shift_ff, scale_ff))


class SelfAttention(nnx.Module):
    """Softmax attention of the image stream to itself."""

    def __init__(self, c: SD3Config, *, rngs: nnx.Rngs):
        d = c.width
        self.head = c.attention_head_dim
        self.to_q, self.to_k, self.to_v = (Linear(d, d, rngs=rngs) for _ in range(3))
        self.norm_q, self.norm_k = _qk_norms(c)
        self.to_out = nnx.List([Linear(d, d, rngs=rngs)])

    def __call__(self, x: Float[Array, "b n d"]) -> Float[Array, "b n d"]:
        q, k, v = (_split(to(x), norm, self.head) for to, norm in (
            (self.to_q, self.norm_q), (self.to_k, self.norm_k), (self.to_v, None)))  # fmt: skip
        return self.to_out[0](attention(q, k, v).reshape(x.shape))


class JointAttention(nnx.Module):
    """Softmax attention over the tokens of both streams, the image's first; each stream has its own projections."""

    def __init__(self, c: SD3Config, *, last: bool, rngs: nnx.Rngs):
        d = c.width
        self.head = c.attention_head_dim
        self.to_q, self.to_k, self.to_v = (Linear(d, d, rngs=rngs) for _ in range(3))
        self.norm_q, self.norm_k = _qk_norms(c)
        self.add_q_proj, self.add_k_proj, self.add_v_proj = (Linear(d, d, rngs=rngs) for _ in range(3))
        self.norm_added_q, self.norm_added_k = _qk_norms(c)
        self.to_out = nnx.List([Linear(d, d, rngs=rngs)])
        self.to_add_out = None if last else Linear(d, d, rngs=rngs)

    def __call__(self, x: Float[Array, "b n d"], text: Float[Array, "b l d"]) -> tuple[Array, Array | None]:
        """Both streams' outputs; the text's is None in the last layer."""
        q, k, v = (
            jnp.concatenate([_split(to(x), norm, self.head), _split(added(text), norm_added, self.head)], axis=1)
            for to, norm, added, norm_added in (
                (self.to_q, self.norm_q, self.add_q_proj, self.norm_added_q),
                (self.to_k, self.norm_k, self.add_k_proj, self.norm_added_k),
                (self.to_v, None, self.add_v_proj, None),
            )
        )
        out = attention(q, k, v)
        out = out.reshape(*out.shape[:2], -1)
        image, rest = out[:, : x.shape[1]], out[:, x.shape[1] :]
        return self.to_out[0](image), None if self.to_add_out is None else self.to_add_out(rest)


class FeedForward(nnx.Module):
    """Two linears with GELU between; in the released list, index 1 is a dropout."""

    def __init__(self, d: int, *, rngs: nnx.Rngs):
        self.net = nnx.Dict({"0": GELU(d, 4 * d, rngs=rngs), "2": Linear(4 * d, d, rngs=rngs)})

    def __call__(self, x: Float[Array, "b n d"]) -> Float[Array, "b n d"]:
        return self.net["2"](self.net["0"](x))


class GELU(nnx.Module):
    """A linear, then GELU in its tanh form (arXiv 1606.08415, section 2)."""

    def __init__(self, n_in: int, n_out: int, *, rngs: nnx.Rngs):
        self.proj = Linear(n_in, n_out, rngs=rngs)

    def __call__(self, x: Float[Array, "b n n_in"]) -> Float[Array, "b n n_out"]:
        return jax.nn.gelu(self.proj(x), approximate=True)


class AdaLayerNorm(nnx.Module):
    """A normalisation without weights, and `chunks` vectors from the conditioning to modulate and gate with."""

    def __init__(self, d: int, chunks: int, *, rngs: nnx.Rngs):
        self.linear = Linear(d, chunks * d, rngs=rngs)
        self.norm = LayerNorm(d, eps=EPS, affine=False)
        self.chunks = chunks

    def __call__(
        self, x: Float[Array, "b n d"], condition: Float[Array, "b d"]
    ) -> tuple[Float[Array, "b n d"], list[Float[Array, "b 1 d"]]]:
        """`x` normalised, not modulated yet, and the vectors. condition: past its SiLU."""
        return self.norm(x), jnp.split(self.linear(condition)[:, None], self.chunks, axis=-1)


class TimeTextEmbedding(nnx.Module):
    """What every block is modulated by: the embedded time plus the projected pooled text."""

    def __init__(self, c: SD3Config, *, rngs: nnx.Rngs):
        self.timestep_embedder = TimestepMLP(c.width, rngs=rngs)
        self.text_embedder = TextProjection(c.pooled_projection_dim, c.width, act=silu, rngs=rngs)

    def __call__(self, timestep: Float[Array, " b"], pooled: Float[Array, "b e"]) -> Float[Array, "b d"]:
        return self.timestep_embedder(timestep, pooled.dtype) + self.text_embedder(pooled)


class PatchEmbed(nnx.Module):
    """Patches to tokens, plus the middle of a stored square of positions, `pos_embed_max_size` a side.

    `pos_embed` is a parameter because released files hold it, under this name; nothing trains it.
    """

    def __init__(self, c: SD3Config, *, rngs: nnx.Rngs):
        self.proj = PatchProjection(c.patch_size, c.in_channels, c.width, rngs=rngs)
        self.pos_embed = param(sincos_square(c.width, c.pos_embed_max_size, c.sample_size // c.patch_size), "pos_embed")
        self.side = c.pos_embed_max_size

    def __call__(self, latent: Float[Array, "b h w c"]) -> Float[Array, "b n d"]:
        (_, height, width, _), p, side = latent.shape, self.proj.patch, self.side
        rows, columns = height // p, width // p
        if height % p or width % p or max(rows, columns) > side:
            raise ValueError(f"SD3Transformer2DModel: latent {height}x{width}; accepted: multiples of {p} up to {p * side}")
        top, left = (side - rows) // 2, (side - columns) // 2
        square = self.pos_embed.get_value().reshape(side, side, -1)
        x = self.proj(latent)
        x = x + square[top : top + rows, left : left + columns].astype(x.dtype)
        return x.reshape(x.shape[0], rows * columns, -1)


def sincos_square(d: int, side: int, base: int) -> Float[Array, "1 n d"]:
    """Sine-cosine positions of a `side` x `side` grid over `[0, base)`: half the features for the column, half for the row.

    Waves of one axis are made on the host in float64; the square, of up to a gigabyte, stays abstract where the network is.
    """
    omega = 1.0 / 10000 ** (np.arange(d // 4) / (d // 4))
    angle = np.outer(np.arange(side) * (base / side), omega)
    waves = jnp.asarray(np.concatenate([np.sin(angle), np.cos(angle)], axis=-1), jnp.float32)
    shape = (side, side, d // 2)
    square = jnp.concatenate([jnp.broadcast_to(waves[None], shape), jnp.broadcast_to(waves[:, None], shape)], axis=-1)
    return square.reshape(1, side * side, d)


def modulate(x: Float[Array, "b n d"], shift: Float[Array, "b 1 d"], scale: Float[Array, "b 1 d"]) -> Float[Array, "b n d"]:
    """`x (1 + scale) + shift`, rounded once."""
    wide = jnp.float32
    return (x.astype(wide) * (1 + scale.astype(wide)) + shift.astype(wide)).astype(x.dtype)


def silu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """`x sigmoid(x)`, rounded once: all layers read what the conditioning makes of it, so its errors do not average out."""
    return jax.nn.silu(x.astype(jnp.float32)).astype(x.dtype)


def _split(x: Float[Array, "b n d"], norm: RMSNorm | None, head: int) -> Float[Array, "b n heads head"]:
    """Heads of a stream's queries, keys or values, each normalised on its own if there is a `norm`."""
    x = x.reshape(*x.shape[:2], -1, head)
    return x if norm is None else norm(x)


def _qk_norms(c: SD3Config) -> tuple[RMSNorm | None, RMSNorm | None]:
    made = lambda: None if c.qk_norm is None else RMSNorm(c.attention_head_dim, eps=EPS)
    return made(), made()
