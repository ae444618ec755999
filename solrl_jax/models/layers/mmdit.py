"""The parts that FLUX.1 and Stable Diffusion 3 share: a multimodal diffusion transformer (MMDiT).

Text and image are two streams of tokens with weights of their own (arXiv 2403.03206, section 4).
They meet in the attention, as one sequence, text first. One vector for the whole image modulates
every block: the sum of the embedded timestep and the pooled text.
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from solrl_jax.models.layers.ada_layer_norm import EPS, AdaLayerNorm
from solrl_jax.models.layers.embeddings import TextProjection, TimestepMLP
from solrl_jax.models.layers.feed_forward import FeedForward
from solrl_jax.models.layers.modulation import Modulate, silu_rounding_once
from solrl_jax.models.layers.norm import LayerNorm
from solrl_jax.models.layers.rotary import Rotation
from solrl_jax.models.layers.softmax_attention import JointAttention, SelfAttention


class JointBlock(nnx.Module):
    """A block with two streams, text and image, which have separate weights and attend jointly
    (arXiv 2403.03206, figure 2b).

    Args:
        d: The number of features of the tokens, a multiple of `head_dim`.
        head_dim: The number of features of one attention head.
        modulate: Computes `x (1 + scale) + shift` from (x, shift, scale): `modulate` for FLUX.1,
            which rounds after each operation, or `modulate_rounding_once` for SD3.
        normed: Whether each head of queries and keys is normalized (RMSNorm).
        dual: Whether the image tokens also attend to each other in a second attention, beside the
            joint one (SD3.5 Medium).
        last: Whether the text stream ends in this block (the last one of SD3): the image still
            attends to the text, but the text is not updated.
        rngs: Random number generators for the initial weights.
    """

    def __init__(
        self,
        d: int,
        head_dim: int,
        modulate: Modulate,
        *,
        normed: bool,
        dual: bool = False,
        last: bool = False,
        rngs: nnx.Rngs,
    ):
        self.norm1 = AdaLayerNorm(d, 9 if dual else 6, modulate=modulate, rngs=rngs)
        self.norm1_context = AdaLayerNorm(d, 2 if last else 6, modulate=modulate, rngs=rngs)
        self.attn = JointAttention(d, head_dim, normed=normed, last=last, rngs=rngs)
        self.attn2 = SelfAttention(d, head_dim, normed=normed, rngs=rngs) if dual else None
        self.norm2, self.norm2_context = (LayerNorm(d, eps=EPS, affine=False) for _ in range(2))
        self.ff = FeedForward(d, rngs=rngs)
        self.ff_context = None if last else FeedForward(d, rngs=rngs)
        self.modulate = modulate

    def __call__(
        self,
        text: Float[Array, "b l d"],
        image: Float[Array, "b n d"],
        condition: Float[Array, "b d"],
        rotation: Rotation | None = None,
        *,
        fp8_attention: bool = False,
    ) -> tuple[Float[Array, "b l d"], Float[Array, "b n d"]]:
        """Applies joint attention of text and image, then an MLP to each stream.

        Attention and MLP read modulated norms; their results, times gates, are added to the
        streams. A `dual` block also adds a second attention, among the image tokens alone.

        Args:
            text: The text tokens.
            image: The image tokens; under sequence parallelism, the n tokens of this device. Every
                device has all of the text.
            condition: The vector that modulates the block: the SiLU of the sum of the embedded
                timestep, pooled text and, in FLUX.1-dev, guidance scale.
            rotation: Cosines and sines of the rotary angles of the l + n positions, text first: two
                float32 arrays [b or 1, l + n, head_dim / 2]. None: no rotary positions. The second
                attention has none in any case.
            fp8_attention: Whether all attention is computed in FP8: queries, keys, values and
                result are in E4M3. No gradient may be taken. Accelerators without FP8 attention
                compute in BF16 from the rounded inputs.

        Returns:
            The text tokens (unchanged if the block was built with `last`) and the image tokens
            after the block, each with the shape and dtype of its input.
        """
        image_vectors = self.norm1.vectors(condition)
        shift, scale, gate, shift_ff, scale_ff, gate_ff = image_vectors[:6]
        text_vectors = self.norm1_context.vectors(condition)
        if self.ff_context is None:
            text_scale, text_shift = text_vectors  # the last layer has them in this order
        else:
            text_shift, text_scale = text_vectors[:2]

        text_attended, image_attended = self.attn(
            self.norm1_context(text, text_shift, text_scale),
            self.norm1(image, shift, scale),
            rotation,
            fp8_attention=fp8_attention,
        )
        updated = image + gate * image_attended
        if self.attn2 is not None:  # it reads the block's input, not the sum
            shift, scale, gate = image_vectors[6:]
            attended = self.attn2(self.norm1(image, shift, scale), fp8_attention=fp8_attention)
            updated = updated + gate * attended
        hidden = self.norm2.modulated(updated, shift_ff, scale_ff, self.modulate)
        image = updated + gate_ff * self.ff(hidden)

        if self.ff_context is None or text_attended is None:
            return text, image
        gate, shift_ff, scale_ff, gate_ff = text_vectors[2:]
        text = text + gate * text_attended
        hidden = self.norm2_context.modulated(text, shift_ff, scale_ff, self.modulate)
        return text + gate_ff * self.ff_context(hidden), image


class TimeTextEmbedding(nnx.Module):
    """Computes the condition vector that modulates the blocks: the sum of the embedded timestep,
    the embedded pooled text and, if `guided`, the embedded guidance scale.

    Args:
        d: The number of features of the condition.
        pooled_dim: The number of features of the pooled text.
        guided: Whether the guidance scale is embedded. If not, it is ignored.
        rngs: Random number generators for the initial weights.
    """

    def __init__(self, d: int, pooled_dim: int, *, guided: bool = False, rngs: nnx.Rngs):
        self.timestep_embedder = TimestepMLP(d, rngs=rngs)
        self.guidance_embedder = TimestepMLP(d, rngs=rngs) if guided else None
        self.text_embedder = TextProjection(pooled_dim, d, act=silu_rounding_once, rngs=rngs)

    def __call__(
        self,
        timestep: Float[Array, " b"],
        pooled: Float[Array, "b e"],
        guidance: Float[Array, " b"] | None = None,
    ) -> Float[Array, "b d"]:
        """Computes the condition vector of each sample: the sum of the embedded timestep, pooled
        text and guidance scale.

        Args:
            timestep: `1000 * sigma` of each sample.
            pooled: The pooled text embedding of each prompt.
            guidance: The guidance scale of each sample, for example 3.5 (multiplied by 1000 here).
                None: it is left out, even if the module is `guided`. A module that is not `guided`
                ignores it.

        Returns:
            The condition [b, d] in the dtype of `pooled`. The caller applies SiLU to it.
        """
        embedded = self.timestep_embedder(timestep, pooled.dtype)
        if self.guidance_embedder is not None and guidance is not None:
            scaled = 1000 * guidance.astype(jnp.float32)
            embedded = embedded + self.guidance_embedder(scaled, pooled.dtype)
        return embedded + self.text_embedder(pooled)
