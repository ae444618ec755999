"""ImageReward v1.0 (arXiv 2304.05977): BLIP with a head that gives one number, in Flax NNX.

BLIP is arXiv 2201.12086. A vision transformer encodes the image. BERT encodes the prompt and
attends to the image tokens in every layer. The head maps the state of the prompt's first token to
the reward. Attributes have the names of the released file.
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

# Prefixes of tensors in the file that the reward does not use: the positions 0, 1, 2, ..., and the
# projections for BLIP's contrastive loss.
UNUSED = ("blip.text_encoder.embeddings.position_ids", "blip.vision_proj.", "blip.text_proj.")
# Mean and standard deviation of the head's output over ImageReward's training images.
MEAN = 0.16717362830052426
STD = 1.0333394966054072


@dataclasses.dataclass(frozen=True)
class ImageRewardConfig:
    """The sizes of the ImageReward network. The defaults are those of ImageReward v1.0, whose files
    do not hold them all. The values are not checked.

    Attributes:
        image_size: Height and width of images in pixels, a multiple of `patch_size`.
        patch_size: Side of a patch in pixels.
        vision_width: Number of features of an image token, a multiple of `vision_heads`. The MLP
            has four times as many.
        vision_layers: Number of layers of the vision transformer.
        vision_heads: Number of attention heads of the vision transformer.
        vision_eps: Epsilon of the layer norms of the vision transformer.
        text_width: Number of features of a text token, a multiple of `text_heads`.
        text_layers: Number of layers of the text encoder.
        text_heads: Number of attention heads of the text encoder.
        text_mlp: Hidden width of the text encoder's MLPs.
        text_eps: Epsilon of the layer norms of the text encoder.
        vocabulary: Number of tokens that the text encoder knows.
        positions: Greatest number of text tokens, at least `prompt_tokens`.
        prompt_tokens: Number of tokens to which the reward pads or cuts a prompt; not read by the
            network.
    """

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
    prompt_tokens: int = 35


class ImageReward(nnx.Module):
    """The ImageReward network: a vision transformer, a text encoder that attends to the image, and
    a head that maps the state of the first text token to one number.

    Args:
        config: The sizes of the network (`ImageRewardConfig`).
        rngs: Random number generators for the initial parameters.
    """

    def __init__(self, config: ImageRewardConfig, *, rngs: nnx.Rngs):
        self.blip = nnx.Dict(
            visual_encoder=VisualEncoder(config, rngs=rngs),
            text_encoder=BlipTextEncoder(config, rngs=rngs),
        )
        self.mlp = ScoreHead(config.text_width, rngs=rngs)

    def __call__(
        self,
        pixels: Float[Array, "b h w 3"],
        input_ids: Int[Array, "b l"],
        mask: Bool[Array, "b l"],
    ) -> Float[Array, " b"]:
        """Returns the reward of each image for its prompt.

        The head computes it from the state of the prompt's first token. Rewards are standardized:
        they have mean 0 and standard deviation 1 over ImageReward's training images.

        Args:
            pixels: Images of `image_size` by `image_size` pixels, normalized by mean and standard
                deviation per channel (`Preprocessing`).
            input_ids: Token numbers of each image's prompt, which begins with BERT's [CLS]; at most
                `positions` per prompt, which is not checked.
            mask: True on tokens, false on padding, which is not attended to.

        Returns:
            The rewards [b], in the dtype of `pixels`.
        """
        image = self.blip.visual_encoder(pixels)
        text = self.blip.text_encoder(input_ids, mask, image)
        return (self.mlp(text[:, 0]) - MEAN) / STD


class VisualEncoder(nnx.Module):
    """A vision transformer (arXiv 2010.11929) over the patches of an image and one class token.

    It has learned position embeddings, and a norm after the last layer.

    Args:
        config: The sizes of the network (`ImageRewardConfig`).
        rngs: Random number generators for the initial parameters.
    """

    def __init__(self, config: ImageRewardConfig, *, rngs: nnx.Rngs):
        width = config.vision_width
        num_patches = (config.image_size // config.patch_size) ** 2
        self.patch_embed = nnx.Dict(proj=PatchProjection(config.patch_size, 3, width, rngs=rngs))
        self.cls_token = param(jnp.zeros((1, 1, width)), "cls_token")
        positions = 0.02 * jax.random.normal(rngs.params(), (1, num_patches + 1, width))
        self.pos_embed = param(positions, "pos_embed")
        self.blocks = stack(config.vision_layers, lambda rngs: VisionBlock(config, rngs=rngs), rngs)
        self.norm = LayerNorm(width, eps=config.vision_eps)

    def __call__(self, pixels: Float[Array, "b h w 3"]) -> Float[Array, "b n d"]:
        """Returns the states of all tokens: first the class token, then one token per patch, row by
        row.

        Args:
            pixels: Normalized images of `image_size` by `image_size` pixels.

        Returns:
            The states [b, 1 + patches, `vision_width`] after the last norm, in the dtype of
            `pixels`.
        """
        patches = self.patch_embed.proj(pixels)
        dtype = patches.dtype
        width = patches.shape[-1]
        patches = patches.reshape(len(pixels), -1, width)
        class_token = self.cls_token.get_value().astype(dtype)
        class_token = jnp.broadcast_to(class_token, (len(pixels), 1, width))
        x = jnp.concatenate([class_token, patches], axis=1)
        x = x + self.pos_embed.get_value().astype(dtype)
        return self.norm(scan_blocks(self.blocks, lambda block, x: block(x), x))


class VisionBlock(nnx.Module):
    """A layer: attention, then an MLP (four times the width, exact GELU), each with a layer norm
    before it and a residual connection.

    Args:
        config: The sizes of the network (`ImageRewardConfig`).
        rngs: Random number generators for the initial weights.
    """

    def __init__(self, config: ImageRewardConfig, *, rngs: nnx.Rngs):
        width = config.vision_width
        self.norm1 = LayerNorm(width, eps=config.vision_eps)
        self.norm2 = LayerNorm(width, eps=config.vision_eps)
        self.attn = VisionAttention(width, config.vision_heads, rngs=rngs)
        self.mlp = MLP(width, 4 * width, "gelu", rngs=rngs)

    def __call__(self, x: Float[Array, "b n d"]) -> Float[Array, "b n d"]:
        """Applies attention, then the MLP. Each reads a norm of its input, and its result is added
        to the input.

        Args:
            x: The image tokens: batch, tokens, features.

        Returns:
            The image tokens after the layer, of the shape and dtype of `x`.
        """
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionAttention(nnx.Module):
    """Softmax self-attention with one linear layer for queries, keys and values, and an output
    layer.

    Args:
        d: Number of features of a token.
        heads: Number of heads, a divisor of `d`.
        rngs: Random number generators for the initial weights.
    """

    def __init__(self, d: int, heads: int, *, rngs: nnx.Rngs):
        self.qkv = Linear(d, 3 * d, rngs=rngs)
        self.proj = Linear(d, d, rngs=rngs)
        self.heads = heads

    def __call__(self, x: Float[Array, "b n d"]) -> Float[Array, "b n d"]:
        """Applies attention, in which every token attends to all tokens of its image, and the
        output layer. The input is not added.

        Args:
            x: The tokens: batch, tokens, features.

        Returns:
            One output per token, of the shape and dtype of `x`.
        """
        qkv = self.qkv(x).reshape(*x.shape[:2], 3, self.heads, -1)
        q, k, v = jnp.moveaxis(qkv, 2, 0)
        return self.proj(attention_forward(q, k, v).reshape(x.shape))


class BlipTextEncoder(nnx.Module):
    """BERT (arXiv 1810.04805) with cross-attention to the image in every layer.

    Token and position embeddings are added and normalized before the first layer. The
    self-attention is not causal.

    Args:
        config: The sizes of the network (`ImageRewardConfig`).
        rngs: Random number generators for the initial parameters.
    """

    def __init__(self, config: ImageRewardConfig, *, rngs: nnx.Rngs):
        self.embeddings = nnx.Dict(
            word_embeddings=Embedding(config.vocabulary, config.text_width, rngs=rngs),
            position_embeddings=Embedding(config.positions, config.text_width, rngs=rngs),
            LayerNorm=LayerNorm(config.text_width, eps=config.text_eps),
        )
        self.encoder = nnx.Dict(
            layer=stack(config.text_layers, lambda rngs: TextLayer(config, rngs=rngs), rngs)
        )

    def __call__(
        self, input_ids: Int[Array, "b l"], mask: Bool[Array, "b l"], image: Float[Array, "b n e"]
    ) -> Float[Array, "b l d"]:
        """Returns the state of each token after the last layer.

        Args:
            input_ids: Token numbers of the prompts, at most `positions` per prompt, which is not
                checked.
            mask: True on tokens, false on padding, which is not attended to.
            image: Image tokens from `VisualEncoder`. Every text token attends to all of them.

        Returns:
            The states [b, l, `text_width`], those of padding included, in the dtype of `image`.
        """
        embeddings = self.embeddings
        positions = jnp.arange(input_ids.shape[1])
        x = embeddings.word_embeddings(input_ids) + embeddings.position_embeddings(positions)
        x = embeddings.LayerNorm(x).astype(image.dtype)
        key_mask = mask[:, None, None, :]
        return scan_blocks(self.encoder.layer, lambda layer, x: layer(x, key_mask, image), x)


class TextLayer(nnx.Module):
    """A layer: self-attention, cross-attention to the image, then an MLP (exact GELU). The result
    of each is added to its input, and the sum normalized.

    Args:
        config: The sizes of the network (`ImageRewardConfig`).
        rngs: Random number generators for the initial weights.
    """

    def __init__(self, config: ImageRewardConfig, *, rngs: nnx.Rngs):
        self.attention = TextAttention(config, config.text_width, rngs=rngs)
        self.crossattention = TextAttention(config, config.vision_width, rngs=rngs)
        self.intermediate = nnx.Dict(dense=Linear(config.text_width, config.text_mlp, rngs=rngs))
        self.output = NormedProjection(
            config.text_mlp, config.text_width, config.text_eps, rngs=rngs
        )

    def __call__(
        self, x: Float[Array, "b l d"], mask: Bool[Array, "b 1 1 l"], image: Float[Array, "b n e"]
    ) -> Float[Array, "b l d"]:
        """Applies self-attention, cross-attention to the image, then the MLP. The result of each is
        added to its input, and the sum normalized.

        Args:
            x: The text tokens: batch, tokens, features.
            mask: True on tokens, false on padding, which is not attended to.
            image: The image tokens, all of which are attended to.

        Returns:
            The text tokens, of the shape and dtype of `x`.
        """
        x = self.attention(x, x, mask)
        x = self.crossattention(x, image, None)
        return self.output(gelu(self.intermediate.dense(x)), x)


class TextAttention(nnx.Module):
    """Attention of text tokens to text or image tokens, with a residual connection and a norm after
    it.

    Args:
        config: The sizes of the network (`ImageRewardConfig`).
        source_width: Number of features of a token that is attended to.
        rngs: Random number generators for the initial weights.
    """

    def __init__(self, config: ImageRewardConfig, source_width: int, *, rngs: nnx.Rngs):
        width = config.text_width
        projections = nnx.Dict(
            query=Linear(width, width, rngs=rngs),
            key=Linear(source_width, width, rngs=rngs),
            value=Linear(source_width, width, rngs=rngs),
        )
        setattr(self, "self", projections)  # noqa: B010 - its name in the file
        self.output = NormedProjection(width, width, config.text_eps, rngs=rngs)
        self.heads = config.text_heads

    def __call__(
        self,
        x: Float[Array, "b l d"],
        source: Float[Array, "b s e"],
        mask: Bool[Array, "b 1 1 s"] | None,
    ) -> Float[Array, "b l d"]:
        """Applies attention from `x` to `source` and the output layer, adds the result to `x`, and
        normalizes the sum.

        Args:
            x: The text tokens: batch, tokens, features.
            source: The tokens that are attended to: batch, tokens, features. It is `x` for
                self-attention.
            mask: True on the tokens of `source` that may be attended to. None: all of them.

        Returns:
            The normalized sum, of the shape and dtype of `x`.
        """
        projections = getattr(self, "self")  # noqa: B009

        def heads(y):
            return y.reshape(*y.shape[:2], self.heads, -1)

        q = heads(projections.query(x))
        k = heads(projections.key(source))
        v = heads(projections.value(source))
        return self.output(attention_forward(q, k, v, mask).reshape(x.shape), x)


class NormedProjection(nnx.Module):
    """A linear layer with a residual connection and a layer norm after it.

    Args:
        n_in: Number of input features.
        n_out: Number of output features, those of the residual stream.
        eps: Epsilon of the norm.
        rngs: Random number generators for the initial weight.
    """

    def __init__(self, n_in: int, n_out: int, eps: float, *, rngs: nnx.Rngs):
        self.dense = Linear(n_in, n_out, rngs=rngs)
        self.LayerNorm = LayerNorm(n_out, eps=eps)

    def __call__(
        self, x: Float[Array, "b l n_in"], stream: Float[Array, "b l n_out"]
    ) -> Float[Array, "b l n_out"]:
        """Returns `norm(stream + linear(x))`.

        Args:
            x: The input of the linear layer: batch, tokens, features.
            stream: The tokens to which the result is added (the residual stream).

        Returns:
            The new residual stream, of the shape and dtype of `stream`. (`x` has the same dtype.)
        """
        return self.LayerNorm(self.dense(x) + stream)
