"""What FLUX.1 and Stable Diffusion 3 have in common: parts of a multimodal diffusion transformer (arXiv 2403.03206, section 4).

Text and image are two streams of tokens with weights of their own. They meet in the attention, as one sequence, text first.
Every block is modulated by one vector for the whole picture: the embedded time and the pooled text.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from solrl_jax.models.layers.attention import attention, attention_forward
from solrl_jax.models.layers.attention_fp8 import E4M3, attention_fp8
from solrl_jax.models.layers.embeddings import TextProjection, TimestepMLP
from solrl_jax.models.layers.linear import Linear
from solrl_jax.models.layers.norm import LayerNorm, RMSNorm
from solrl_jax.quant.lazy import LazyActivation, written

EPS = 1e-6  # of every normalisation
# of a row, or of rows [b, s, d] with vectors [b, 1, d], shift and scale: `x (1 + scale) + shift`
Modulate = Callable[[Array, Array, Array], Array]
Rotate = Callable[
    [LazyActivation, int], LazyActivation
]  # of queries or keys [b, s, d], from the position of the first of them


def unmoved(x: LazyActivation, position: int) -> LazyActivation:
    """Where positions do not turn queries and keys."""
    return x


def attend(
    head: int, *streams: list[LazyActivation], fp8_attention: bool = False
) -> Float[Array, "b s d"]:
    """Attention of queries to keys and values [b, s, d], of streams one after another. head: features of a head.

    Where attention in FP8 is asked for, the result is in FP8.
    """
    q, k, v = (
        written(stretches, head, E4M3 if fp8_attention else None)
        for stretches in zip(*streams, strict=True)
    )
    kernel = (
        attention_fp8 if fp8_attention else attention if streams[0][0].exact else attention_forward
    )
    return kernel(q, k, v).reshape(*q.shape[:2], -1)


class Projections(nnx.Module):
    """Queries, keys and values of one sequence. normed: queries and keys are normalised, each head on its own."""

    def __init__(
        self,
        d: int,
        head: int,
        *,
        normed: bool,
        bias: bool = True,
        eps: float = EPS,
        rngs: nnx.Rngs,
    ):
        self.to_q, self.to_k, self.to_v = (Linear(d, d, bias=bias, rngs=rngs) for _ in range(3))
        self.norm_q, self.norm_k = (RMSNorm(head, eps=eps) if normed else None for _ in range(2))
        self.head = head

    def heads(self, x: LazyActivation, rotate: Rotate, position: int = 0) -> list[LazyActivation]:
        """Queries, keys and values [b, s, d], heads side by side. position: of the first token."""
        return _heads(
            x, rotate, position, (self.to_q, self.norm_q), (self.to_k, self.norm_k), self.to_v
        )


class SelfAttention(Projections):
    """Softmax attention of one sequence to itself. projected: with a linear after it."""

    def __init__(self, d: int, head: int, *, normed: bool, projected: bool, rngs: nnx.Rngs):
        super().__init__(d, head, normed=normed, rngs=rngs)
        self.to_out = nnx.List([Linear(d, d, rngs=rngs)]) if projected else None

    def __call__(
        self, x: LazyActivation, rotate: Rotate = unmoved, *, fp8_attention: bool = False
    ) -> Float[Array, "b s d"]:
        out = attend(self.head, self.heads(x, rotate), fp8_attention=fp8_attention)
        return out if self.to_out is None else self.to_out[0](LazyActivation.of(out, dtype=x.dtype))


class JointAttention(Projections):
    """Softmax attention over text and image as one sequence. The text's weights are those with `add` in their names.

    last: nothing reads the text's output, so it is not computed.
    """

    def __init__(
        self,
        d: int,
        head: int,
        *,
        normed: bool,
        bias: bool = True,
        last: bool = False,
        rngs: nnx.Rngs,
    ):
        super().__init__(d, head, normed=normed, bias=bias, rngs=rngs)

        def linear():
            return Linear(d, d, bias=bias, rngs=rngs)

        self.to_out = nnx.List([linear()])
        self.add_q_proj, self.add_k_proj, self.add_v_proj = (linear() for _ in range(3))
        self.norm_added_q, self.norm_added_k = (
            RMSNorm(head, eps=EPS) if normed else None for _ in range(2)
        )
        self.to_add_out = None if last else linear()

    def __call__(
        self,
        text: LazyActivation,
        image: LazyActivation,
        rotate: Rotate = unmoved,
        *,
        fp8_attention: bool = False,
    ) -> tuple[Float[Array, "b l d"] | None, Float[Array, "b n d"]]:
        """The outputs for text and image."""
        added = (
            (self.add_q_proj, self.norm_added_q),
            (self.add_k_proj, self.norm_added_k),
            self.add_v_proj,
        )
        length = text.rows
        out = attend(
            self.head,
            _heads(text, rotate, 0, *added),
            self.heads(image, rotate, length),
            fp8_attention=fp8_attention,
        )
        from_text = (
            None
            if self.to_add_out is None
            else self.to_add_out(LazyActivation.of(out, (0, length), text.dtype))
        )
        return from_text, self.to_out[0](
            LazyActivation.of(out, (length, out.shape[1]), image.dtype)
        )


def _heads(
    x: LazyActivation,
    rotate: Rotate,
    position: int,
    q: tuple[Linear, RMSNorm | None],
    k: tuple[Linear, RMSNorm | None],
    v: Linear,
) -> list[LazyActivation]:
    normed = [
        linear.pending(x) if norm is None else norm.by_head(linear.pending(x))
        for linear, norm in (q, k)
    ]
    return [*(rotate(y, position) for y in normed), v.pending(x)]


class JointBlock(nnx.Module):
    """One layer of both streams (arXiv 2403.03206, figure 2b).

    dual: the image stream also attends to itself, beside the joint attention (SD3.5 Medium). last: the text stream ends here;
    the image attends to it, but nothing is computed from it (all of SD3). The models round in `modulate` in their own ways.
    """

    def __init__(
        self,
        d: int,
        head: int,
        modulate: Modulate,
        *,
        normed: bool,
        dual: bool = False,
        last: bool = False,
        rngs: nnx.Rngs,
    ):
        self.norm1 = AdaLayerNorm(d, 9 if dual else 6, rngs=rngs)
        self.norm1_context = AdaLayerNorm(d, 2 if last else 6, rngs=rngs)
        self.attn = JointAttention(d, head, normed=normed, last=last, rngs=rngs)
        self.attn2 = (
            SelfAttention(d, head, normed=normed, projected=True, rngs=rngs) if dual else None
        )
        self.norm2, self.norm2_context = (LayerNorm(d, eps=EPS, affine=False) for _ in range(2))
        self.ff = FeedForward(d, rngs=rngs)
        self.ff_context = None if last else FeedForward(d, rngs=rngs)
        self.modulate = modulate

    def __call__(
        self,
        text: Float[Array, "b l d"],
        image: Float[Array, "b n d"],
        condition: Float[Array, "b d"],
        rotate: Rotate = unmoved,
        *,
        fp8_attention: bool = False,
    ) -> tuple[Float[Array, "b l d"], Float[Array, "b n d"]]:
        modulate = self.modulate
        normed, (shift, scale, gate, shift_ff, scale_ff, gate_ff, *second) = self.norm1(
            image, condition
        )
        text_normed, of_text = self.norm1_context(text, condition)
        # (scale, shift) in the last layer, (shift, scale, gate, shift, scale, gate) in all others
        text_shift, text_scale = of_text[:2] if self.ff_context is not None else of_text[::-1]

        from_text, from_image = self.attn(
            text_normed.map(modulate, text_shift, text_scale),
            normed.map(modulate, shift, scale),
            rotate,
            fp8_attention=fp8_attention,
        )
        image = image + gate * from_image
        if self.attn2 is not None:  # reads the block's input, not the sum
            shift, scale, gate = second
            image = image + gate * self.attn2(
                normed.map(modulate, shift, scale), fp8_attention=fp8_attention
            )
        image = image + gate_ff * self.ff(
            self.norm2.pending(image).map(modulate, shift_ff, scale_ff)
        )

        if self.ff_context is None or from_text is None:
            return text, image
        gate, shift_ff, scale_ff, gate_ff = of_text[2:]
        text = text + gate * from_text
        return text + gate_ff * self.ff_context(
            self.norm2_context.pending(text).map(modulate, shift_ff, scale_ff)
        ), image


class FeedForward(nnx.Module):
    """Linear to four times the width, GELU in its tanh form (arXiv 1606.08415, section 2), linear back.

    In PyTorch's list `net`, index 1 is a dropout.
    """

    def __init__(self, d: int, *, rngs: nnx.Rngs):
        layers: dict[str, Any] = {
            "0": nnx.Dict(proj=Linear(d, 4 * d, rngs=rngs)),
            "2": Linear(4 * d, d, rngs=rngs),
        }
        self.net = nnx.Dict(layers)

    def __call__(self, x: LazyActivation) -> Float[Array, "b s d"]:
        return self.net["2"](self.net["0"].proj.pending(x).map(jax.nn.gelu))


class AdaLayerNorm(nnx.Module):
    """adaLN-Zero (arXiv 2212.09748, section 3.2): a layer norm without weights, and vectors to modulate and gate with."""

    def __init__(self, d: int, vectors: int, *, bias: bool = True, rngs: nnx.Rngs):
        self.linear = Linear(d, vectors * d, bias=bias, rngs=rngs)
        self.norm = LayerNorm(d, eps=EPS, affine=False)
        self.vectors = vectors

    def __call__(
        self, x: Float[Array, "b s d"], condition: Float[Array, "b d"]
    ) -> tuple[LazyActivation, list[Float[Array, "b 1 d"]]]:
        """The normalised `x`, not modulated yet, and the vectors. condition: after its SiLU."""
        return self.norm.pending(x), jnp.split(
            self.linear(condition)[:, None], self.vectors, axis=-1
        )


class TimeTextEmbedding(nnx.Module):
    """What modulates the blocks: the sum of the embedded time, the guidance scale (`guided`) and the pooled text."""

    def __init__(self, d: int, pooled: int, *, guided: bool = False, rngs: nnx.Rngs):
        self.timestep_embedder = TimestepMLP(d, rngs=rngs)
        self.guidance_embedder = TimestepMLP(d, rngs=rngs) if guided else None
        self.text_embedder = TextProjection(pooled, d, act=silu, rngs=rngs)

    def __call__(
        self,
        timestep: Float[Array, " b"],
        pooled: Float[Array, "b e"],
        guidance: Float[Array, " b"] | None = None,
    ) -> Float[Array, "b d"]:
        """The condition, in the dtype of `pooled`."""
        embedded = self.timestep_embedder(timestep, pooled.dtype)
        if self.guidance_embedder is not None and guidance is not None:
            embedded = embedded + self.guidance_embedder(
                1000 * guidance.astype(jnp.float32), pooled.dtype
            )
        return embedded + self.text_embedder(pooled)


def silu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """`x sigmoid(x)`, rounded once. All layers read the result through the condition, so rounding errors do not average out."""
    return jax.nn.silu(x.astype(jnp.float32)).astype(x.dtype)
