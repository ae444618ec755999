"""ImageReward v1.0 (arXiv 2304.05977), `ImageReward` of the package image-reward, in Flax NNX: BLIP (arXiv 2201.12086), a head.

A vision transformer reads the picture. BERT reads the prompt, and attends to the picture's tokens in every layer. The head maps
the state of the prompt's first token to one number. Attributes have the names in the released file.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from solrl_jax.models.layers.attention import attention_forward
from solrl_jax.models.layers.embeddings import Embedding, PatchProjection
from solrl_jax.models.layers.linear import Linear
from solrl_jax.models.layers.norm import LayerNorm
from solrl_jax.models.layers.parameter import param
from solrl_jax.models.layers.stack import scan_blocks, stack
from solrl_jax.models.vision.clip import MLP, gelu
from solrl_jax.models.vision.score_head import ScoreHead

# How the names of tensors begin that the reward does not use: positions 0, 1, 2, ..., and the maps of BLIP's contrastive loss.
UNUSED = ("blip.text_encoder.embeddings.position_ids", "blip.vision_proj.", "blip.text_proj.")
# Mean and standard deviation of the head's output over its training pictures.
MEAN = 0.16717362830052426
DEVIATION = 1.0333394966054072


@dataclasses.dataclass(frozen=True)
class ImageRewardConfig:
    """The sizes of the released network. None of its files holds all of them."""

    image_size: int = 224
    patch_size: int = 16
    vision_width: int = 1024
    vision_layers: int = 24
    vision_heads: int = 16
    vision_eps: float = 1e-6
    text_width: int = 768
    text_layers: int = 12
    text_heads: int = 12
    text_mlp: int = 3072
    text_eps: float = 1e-12
    vocabulary: int = 30524
    positions: int = 512
    tokens: int = 35  # a prompt is cut or padded to this length


class ImageReward(nnx.Module):
    """The reward network."""

    def __init__(self, c: ImageRewardConfig, *, rngs: nnx.Rngs):
        self.blip = nnx.Dict(
            visual_encoder=VisualEncoder(c, rngs=rngs), text_encoder=TextEncoder(c, rngs=rngs)
        )
        self.mlp = ScoreHead(c.text_width, rngs=rngs)

    def __call__(
        self,
        pixels: Float[Array, "b h w 3"],
        input_ids: Int[Array, "b l"],
        mask: Bool[Array, "b l"],
    ) -> Float[Array, " b"]:
        """The standardised reward of each picture for its prompt.

        pixels: pictures of the network's own size, normalised. mask: true on tokens, false on padding.
        """
        text = self.blip.text_encoder(input_ids, mask, self.blip.visual_encoder(pixels))
        return (self.mlp(text[:, 0]) - MEAN) / DEVIATION


class VisualEncoder(nnx.Module):
    """A pre-norm transformer over patches and one class token (arXiv 2010.11929). The text encoder sees all its tokens."""

    def __init__(self, c: ImageRewardConfig, *, rngs: nnx.Rngs):
        d = c.vision_width
        patches = (c.image_size // c.patch_size) ** 2
        self.patch_embed = nnx.Dict(proj=PatchProjection(c.patch_size, 3, d, rngs=rngs))
        self.cls_token = param(jnp.zeros((1, 1, d)), "cls_token")
        self.pos_embed = param(
            0.02 * jax.random.normal(rngs.params(), (1, patches + 1, d)), "pos_embed"
        )
        self.blocks = stack(c.vision_layers, lambda r: VisionBlock(c, rngs=r), rngs)
        self.norm = LayerNorm(d, eps=c.vision_eps)

    def __call__(self, pixels: Float[Array, "b h w 3"]) -> Float[Array, "b n d"]:
        patches = self.patch_embed.proj(pixels)
        patches = patches.reshape(len(pixels), -1, patches.shape[-1])
        first = jnp.broadcast_to(
            self.cls_token.get_value().astype(patches.dtype), (len(pixels), 1, patches.shape[-1])
        )
        x = jnp.concatenate([first, patches], axis=1) + self.pos_embed.get_value().astype(
            patches.dtype
        )
        return self.norm(scan_blocks(self.blocks, lambda block, x: block(x), x))


class VisionBlock(nnx.Module):
    """A pre-norm layer: attention, then MLP, each added to its input."""

    def __init__(self, c: ImageRewardConfig, *, rngs: nnx.Rngs):
        d = c.vision_width
        self.norm1 = LayerNorm(d, eps=c.vision_eps)
        self.norm2 = LayerNorm(d, eps=c.vision_eps)
        self.attn = VisionAttention(d, c.vision_heads, rngs=rngs)
        self.mlp = MLP(d, 4 * d, "gelu", rngs=rngs)

    def __call__(self, x: Float[Array, "b n d"]) -> Float[Array, "b n d"]:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionAttention(nnx.Module):
    """Softmax attention; one linear makes queries, keys and values."""

    def __init__(self, d: int, heads: int, *, rngs: nnx.Rngs):
        self.qkv = Linear(d, 3 * d, rngs=rngs)
        self.proj = Linear(d, d, rngs=rngs)
        self.heads = heads

    def __call__(self, x: Float[Array, "b n d"]) -> Float[Array, "b n d"]:
        q, k, v = jnp.moveaxis(self.qkv(x).reshape(*x.shape[:2], 3, self.heads, -1), 2, 0)
        return self.proj(attention_forward(q, k, v).reshape(x.shape))


class TextEncoder(nnx.Module):
    """BERT (arXiv 1810.04805), a post-norm transformer that looks both ways, with attention to the picture added.

    Tokens and learned positions are added and normalised first.
    """

    def __init__(self, c: ImageRewardConfig, *, rngs: nnx.Rngs):
        self.embeddings = nnx.Dict(
            word_embeddings=Embedding(c.vocabulary, c.text_width, rngs=rngs),
            position_embeddings=Embedding(c.positions, c.text_width, rngs=rngs),
            LayerNorm=LayerNorm(c.text_width, eps=c.text_eps),
        )
        self.encoder = nnx.Dict(layer=stack(c.text_layers, lambda r: TextLayer(c, rngs=r), rngs))

    def __call__(
        self, input_ids: Int[Array, "b l"], mask: Bool[Array, "b l"], image: Float[Array, "b n e"]
    ) -> Float[Array, "b l d"]:
        embed = self.embeddings
        x = embed.word_embeddings(input_ids) + embed.position_embeddings(
            jnp.arange(input_ids.shape[1])
        )
        x = embed.LayerNorm(x).astype(image.dtype)
        return scan_blocks(
            self.encoder.layer, lambda layer, x: layer(x, mask[:, None, None, :], image), x
        )


class TextLayer(nnx.Module):
    """Attention to the text, attention to the picture, MLP."""

    def __init__(self, c: ImageRewardConfig, *, rngs: nnx.Rngs):
        self.attention = TextAttention(c, c.text_width, rngs=rngs)
        self.crossattention = TextAttention(c, c.vision_width, rngs=rngs)
        self.intermediate = nnx.Dict(dense=Linear(c.text_width, c.text_mlp, rngs=rngs))
        self.output = NormedProjection(c.text_mlp, c.text_width, c.text_eps, rngs=rngs)

    def __call__(
        self, x: Float[Array, "b l d"], mask: Bool[Array, "b 1 1 l"], image: Float[Array, "b n e"]
    ) -> Float[Array, "b l d"]:
        x = self.attention(x, x, mask)
        x = self.crossattention(x, image, None)
        return self.output(gelu(self.intermediate.dense(x)), x)


class TextAttention(nnx.Module):
    """Attention from `x` to `source` (`x` itself, or the picture), added to `x`, and the sum normalised."""

    def __init__(self, c: ImageRewardConfig, width: int, *, rngs: nnx.Rngs):
        d = c.text_width
        own = {
            "query": Linear(d, d, rngs=rngs),
            "key": Linear(width, d, rngs=rngs),
            "value": Linear(width, d, rngs=rngs),
        }
        setattr(self, "self", nnx.Dict(own))  # noqa: B010 - its name in the file
        self.output = NormedProjection(d, d, c.text_eps, rngs=rngs)
        self.heads = c.text_heads

    def __call__(
        self,
        x: Float[Array, "b l d"],
        source: Float[Array, "b s e"],
        mask: Bool[Array, "b 1 1 s"] | None,
    ) -> Float[Array, "b l d"]:
        own = getattr(self, "self")  # noqa: B009

        def heads(y):
            return y.reshape(*y.shape[:2], self.heads, -1)

        out = attention_forward(
            heads(own["query"](x)), heads(own["key"](source)), heads(own["value"](source)), mask
        )
        return self.output(out.reshape(x.shape), x)


class NormedProjection(nnx.Module):
    """A linear whose output is added to the stream, and the sum normalised."""

    def __init__(self, n_in: int, n_out: int, eps: float, *, rngs: nnx.Rngs):
        self.dense = Linear(n_in, n_out, rngs=rngs)
        self.LayerNorm = LayerNorm(n_out, eps=eps)

    def __call__(
        self, x: Float[Array, "b l n_in"], stream: Float[Array, "b l n_out"]
    ) -> Float[Array, "b l n_out"]:
        return self.LayerNorm(self.dense(x) + stream)
