"""Z-Image's diffusion transformer (arXiv 2511.22699): `ZImageTransformer2DModel` of diffusers in Flax NNX.

A transformer with one stream: image tokens, then text tokens, with rotary positions along three axes. Two small stacks refine
image and text apart before they meet. Time modulates the scales and gates of every block but those that refine text. Both
sequences are filled up to a multiple of 32 tokens with a learned one, which takes part in the attention.
"""

import dataclasses
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from solrl_jax.models.flux.transformer import turn
from solrl_jax.models.layers.attention import attention, attention_forward
from solrl_jax.models.layers.embeddings import patches, sinusoid, unpatch
from solrl_jax.models.layers.feed_forward import gated
from solrl_jax.models.layers.linear import Linear
from solrl_jax.models.layers.mmdit import Projections
from solrl_jax.models.layers.norm import LayerNorm, RMSNorm
from solrl_jax.models.layers.parameter import param
from solrl_jax.models.layers.stack import scan_blocks, stack
from solrl_jax.models.loading.config_file import ReleasedConfig
from solrl_jax.quant.lazy import LazyActivation, written

Rotation: TypeAlias = tuple[Array, Array]  # cosines and sines [b, s, head / 2], float32

PATCH = 2  # latent pixels that a token stands for, each way
MULTIPLE = 32  # of tokens that a sequence is filled up to
# of the embedded time, at most, and within its MLP
TIME_WIDTH = 256
TIME_HIDDEN = 1024
# of the norms of queries and keys, and of the last norm
HEAD_EPS = 1e-5
FINAL_EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class ZImageConfig(ReleasedConfig):
    """The fields of a released `transformer/config.json`. The defaults are those of diffusers."""

    network = "ZImageTransformer2DModel"

    all_patch_size: tuple[int, ...] = (PATCH,)
    all_f_patch_size: tuple[int, ...] = (1,)
    in_channels: int = 16
    dim: int = 3840
    n_layers: int = 30
    n_refiner_layers: int = 2
    n_heads: int = 30
    n_kv_heads: int = 30
    norm_eps: float = 1e-5
    qk_norm: bool = True
    cap_feat_dim: int = 2560
    siglip_feat_dim: int | None = None
    rope_theta: float = 256.0
    t_scale: float = 1000.0
    axes_dims: tuple[int, ...] = (32, 48, 48)
    axes_lens: tuple[int, ...] = (1024, 512, 512)

    def check(self) -> None:
        self.require(self.all_patch_size == (PATCH,), "all_patch_size", f"[{PATCH}]")
        self.require(self.all_f_patch_size == (1,), "all_f_patch_size", "[1]")
        self.require(self.dim % self.n_heads == 0, "n_heads", f"a divisor of dim={self.dim}")
        self.require(self.n_kv_heads == self.n_heads, "n_kv_heads", f"n_heads={self.n_heads}")
        self.require(
            self.siglip_feat_dim is None,
            "siglip_feat_dim",
            "None (pictures are no part of the prompt)",
        )
        axes = self.axes_dims
        fits = len(axes) == 3 and all(a > 0 and a % 2 == 0 for a in axes) and sum(axes) == self.head
        self.require(
            fits, "axes_dims", f"three positive even numbers whose sum is dim / n_heads={self.head}"
        )
        enough = len(self.axes_lens) == 3 and min(self.axes_lens) > 0 and self.most_tokens > 0
        self.require(
            enough, "axes_lens", f"three positive integers, the first one {MULTIPLE + 2} or more"
        )

    @property
    def head(self) -> int:
        return self.dim // self.n_heads

    @property
    def most_tokens(self) -> int:
        """Of a text: the image comes one position after it, which must be one of those that are stored."""
        return (self.axes_lens[0] - 2) // MULTIPLE * MULTIPLE


class ZImageTransformer2DModel(nnx.Module):
    """The velocity network. remat: what gradients recompute, a key of `models.layers.stack.REMAT`."""

    def __init__(self, config: ZImageConfig, *, remat: str = "none", rngs: nnx.Rngs):
        c = config
        d = config.dim
        self.config = config
        self.remat = remat
        features = PATCH**2 * c.in_channels
        time = min(d, TIME_WIDTH)

        def block(modulated):
            return lambda r: Block(c, modulated, rngs=r)

        self.all_x_embedder = nnx.Dict({f"{PATCH}-1": Linear(features, d, rngs=rngs)})
        self.noise_refiner = stack(c.n_refiner_layers, block(True), rngs)
        self.context_refiner = stack(c.n_refiner_layers, block(False), rngs)
        mlp = {
            "0": Linear(TIME_WIDTH, TIME_HIDDEN, rngs=rngs),
            "2": Linear(TIME_HIDDEN, time, rngs=rngs),
        }
        self.t_embedder = nnx.Dict(mlp=nnx.Dict(mlp))
        self.cap_embedder = nnx.List(
            [RMSNorm(c.cap_feat_dim, eps=c.norm_eps), Linear(c.cap_feat_dim, d, rngs=rngs)]
        )
        self.x_pad_token, self.cap_pad_token = (
            param(jnp.zeros((1, d)), name) for name in ("x_pad_token", "cap_pad_token")
        )
        self.layers = stack(c.n_layers, block(True), rngs)
        self.all_final_layer = nnx.Dict({f"{PATCH}-1": FinalLayer(d, features, time, rngs=rngs)})

    def __call__(
        self,
        latent: Float[Array, "b h w c"],
        text: Float[Array, "b l e"],
        mask: Bool[Array, "b l"],
        timestep: Float[Array, " b"],
    ) -> Float[Array, "b h w c"]:
        """The velocity `v = noise - x0` at `latent`, in the dtype of `latent`.

        text: states of Qwen3. mask: true on tokens, false on the padding after them. timestep: `1000 sigma`. The released
        network is told `1 - sigma`, times `t_scale`, and predicts `x0 - noise`.
        Raises ValueError for an odd size, and for more tokens than there are stored positions along an axis.
        """
        (_, height, width, _), c, dtype = latent.shape, self.config, latent.dtype
        rows = height // PATCH
        columns = width // PATCH
        if height % PATCH or width % PATCH or rows > c.axes_lens[1] or columns > c.axes_lens[2]:
            accepted = f"even sizes up to {PATCH * c.axes_lens[1]} x {PATCH * c.axes_lens[2]}"
            raise ValueError(f"{c.network}: latents of {height} x {width}; accepted: {accepted}")
        if text.shape[1] > c.most_tokens:
            raise ValueError(
                f"{c.network}: text of {text.shape[1]} tokens; accepted: up to {c.most_tokens}"
            )
        # of each text's positions: the tokens, and those that fill them up
        seen = -(-mask.sum(-1, dtype=jnp.int32) // MULTIPLE) * MULTIPLE
        of_image, of_text = rotary(c, rows, columns, text.shape[1], seen)

        condition = self._condition(timestep).astype(dtype)
        x = self.all_x_embedder[f"{PATCH}-1"](
            patches(latent, PATCH).reshape(len(latent), rows * columns, -1)
        )
        x = jnp.concatenate([x, self._filling(self.x_pad_token, x, -x.shape[1] % MULTIPLE)], axis=1)
        x = scan_blocks(
            self.noise_refiner,
            lambda block, x: block(x, of_image, None, condition),
            x,
            remat=self.remat,
        )

        norm, linear = self.cap_embedder
        text = linear(norm(text.astype(dtype)))
        text = jnp.where(
            mask[..., None], text, self._filling(self.cap_pad_token, text, text.shape[1])
        )
        text = jnp.concatenate(
            [text, self._filling(self.cap_pad_token, text, -text.shape[1] % MULTIPLE)], axis=1
        )
        text = scan_blocks(
            self.context_refiner, lambda block, x: block(x, of_text, seen), text, remat=self.remat
        )

        seen = x.shape[1] + seen
        both = tuple(
            jnp.concatenate(parts, axis=1) for parts in zip(of_image, of_text, strict=True)
        )
        x = jnp.concatenate([x, text], axis=1)
        x = scan_blocks(
            self.layers, lambda block, x: block(x, both, seen, condition), x, remat=self.remat
        )
        out = self.all_final_layer[f"{PATCH}-1"](x[:, : rows * columns], condition)
        return -unpatch(out, rows, columns, PATCH)

    def _condition(self, timestep: Float[Array, " b"]) -> Float[Array, "b time"]:
        """The embedded time, float32: it modulates every block, so that its rounding error would not average out."""
        time = (1000 - timestep.astype(jnp.float32)) * (self.config.t_scale / 1000)
        mlp = self.t_embedder.mlp
        return mlp["2"](jax.nn.silu(mlp["0"](sinusoid(time))))

    def _filling(
        self, token: nnx.Param, like: Float[Array, "b s d"], count: int
    ) -> Float[Array, "b {count} d"]:
        return jnp.broadcast_to(
            token.get_value().astype(like.dtype), (like.shape[0], count, like.shape[2])
        )


class Block(nnx.Module):
    """Attention, then MLP, each normalised before and after and added to its input. modulated: with scales and gates."""

    def __init__(self, c: ZImageConfig, modulated: bool, *, rngs: nnx.Rngs):
        def norm():
            return RMSNorm(c.dim, eps=c.norm_eps)

        self.attention = Attention(c, rngs=rngs)
        self.feed_forward = FeedForward(c.dim, int(c.dim / 3 * 8), rngs=rngs)
        self.attention_norm1, self.attention_norm2, self.ffn_norm1, self.ffn_norm2 = (
            norm() for _ in range(4)
        )
        time = min(c.dim, TIME_WIDTH)
        self.adaLN_modulation = (
            nnx.List([Linear(time, 4 * c.dim, rngs=rngs)]) if modulated else None
        )

    def __call__(
        self,
        x: Float[Array, "b s d"],
        rotation: Rotation,
        seen: Int[Array, " b"] | None,
        condition: Float[Array, "b time"] | None = None,
    ) -> Float[Array, "b s d"]:
        """seen: how many tokens, from the first, all look at; None: all. condition: the embedded time, for modulated blocks."""
        if self.adaLN_modulation is None or condition is None:
            x = x + self.attention_norm2(
                self.attention(self.attention_norm1.pending(x), rotation, seen)
            )
            return x + self.ffn_norm2(self.feed_forward(self.ffn_norm1.pending(x)))
        scale, gate, scale_ff, gate_ff = jnp.split(
            self.adaLN_modulation[0](condition)[:, None], 4, axis=-1
        )
        h = self.attention_norm1.pending(x).map(jnp.multiply, 1 + scale)
        x = x + jnp.tanh(gate) * self.attention_norm2(self.attention(h, rotation, seen))
        h = self.ffn_norm1.pending(x).map(jnp.multiply, 1 + scale_ff)
        return x + jnp.tanh(gate_ff) * self.ffn_norm2(self.feed_forward(h))


class Attention(Projections):
    """Softmax attention with rotary positions. `qk_norm`: each head of queries and keys is normalised on its own."""

    def __init__(self, c: ZImageConfig, *, rngs: nnx.Rngs):
        super().__init__(c.dim, c.head, normed=c.qk_norm, bias=False, eps=HEAD_EPS, rngs=rngs)
        self.to_out = nnx.List([Linear(c.dim, c.dim, bias=False, rngs=rngs)])

    def __call__(
        self, x: LazyActivation, rotation: Rotation, seen: Int[Array, " b"] | None
    ) -> Float[Array, "b s d"]:
        q, k, v = (
            written([y], self.head) for y in self.heads(x, lambda y, _: y.map(turn, *rotation))
        )
        attend = attention if x.exact else attention_forward
        return self.to_out[0](attend(q, k, v, seen).reshape(*q.shape[:2], -1))


class FeedForward(nnx.Module):
    """A SiLU-gated linear unit (arXiv 2002.05202)."""

    def __init__(self, d: int, hidden: int, *, rngs: nnx.Rngs):
        self.w1, self.w3 = (Linear(d, hidden, bias=False, rngs=rngs) for _ in range(2))
        self.w2 = Linear(hidden, d, bias=False, rngs=rngs)

    def __call__(self, x: LazyActivation) -> Float[Array, "b s d"]:
        return self.w2(self.w1.pending(x).join(gated, self.w3.pending(x)))


class FinalLayer(nnx.Module):
    """A norm without weights, scaled by the time, and a linear to the features of a patch."""

    def __init__(self, d: int, features: int, time: int, *, rngs: nnx.Rngs):
        self.norm_final = LayerNorm(d, eps=FINAL_EPS, affine=False)
        self.linear = Linear(d, features, rngs=rngs)
        self.adaLN_modulation = nnx.Dict({"1": Linear(time, d, rngs=rngs)})

    def __call__(
        self, x: Float[Array, "b n d"], condition: Float[Array, "b time"]
    ) -> Float[Array, "b n features"]:
        scale = 1 + self.adaLN_modulation["1"](jax.nn.silu(condition))[:, None]
        return self.linear(self.norm_final.pending(x).map(jnp.multiply, scale))


def rotary(
    c: ZImageConfig, rows: int, columns: int, length: int, seen: Int[Array, " b"]
) -> tuple[Rotation, Rotation]:
    """Cosines and sines of the angle of each position, of the image and of the text, filled up.

    A position has three coordinates: (i, 0, 0) for the `i`-th position of the text, counted from 1; (seen + 1, row, column) for
    the image, row by row, where `seen` is the number of positions of its text; and (0, 0, 0) for what fills the image up.
    """

    def waves(axis: int, at: np.ndarray) -> np.ndarray:
        """[2, positions, features / 2]: cosines and sines. Angles are rounded to float32 first, as in the released code."""
        frequency = c.rope_theta ** (-np.arange(0, c.axes_dims[axis], 2) / c.axes_dims[axis])
        angle = np.outer(at, frequency).astype(np.float32).astype(np.float64)
        return np.stack([np.cos(angle), np.sin(angle)]).astype(np.float32)

    def still(axes, count):
        return np.concatenate([waves(axis, np.zeros(count)) for axis in axes], axis=-1)

    length = length + -length % MULTIPLE
    (b, count) = (len(seen), rows * columns)
    of_text = np.concatenate([waves(0, np.arange(1, length + 1)), still((1, 2), length)], axis=-1)
    within = np.concatenate(
        [waves(axis, at.ravel()) for axis, at in enumerate(np.indices((rows, columns)), 1)], axis=-1
    )
    after = jnp.asarray(waves(0, np.arange(length + 2)))[:, seen + 1]  # [2, b, features / 2]

    def spread(x, *shape):
        return jnp.broadcast_to(x, (2, b, *shape, x.shape[-1]))

    of_image = jnp.concatenate(
        [spread(after[:, :, None], count), spread(within[:, None], count)], axis=-1
    )
    of_image = jnp.concatenate(
        [of_image, spread(still((0, 1, 2), -count % MULTIPLE)[:, None], -count % MULTIPLE)], axis=2
    )
    return tuple(of_image), tuple(spread(of_text[:, None], length))
