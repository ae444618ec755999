"""CLIP (arXiv 2103.00020, section 2.4): `CLIPModel` of transformers in Flax NNX.

The text tower and the vision tower are transformers with normalization before each sublayer. A
linear layer maps the result of each to one shared space, where the cosine between a text and an
image says how well they agree.

FLUX.1 and Stable Diffusion 3 use only the text tower (`CLIPTextModel`,
`CLIPTextModelWithProjection`). Both need the state of the end-of-text token. Stable Diffusion 3
also needs the states that all tokens have before the last layer, as SDXL does (arXiv 2307.01952,
section 2.1).
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

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
from solrl_jax.models.loading.config_file import ReleasedConfig, unsupported


def quick_gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns `x sigmoid(1.702 x)`, computed in float32, in the dtype of `x`.

    Args:
        x: Activations of any shape and floating-point dtype.
    """
    x32 = x.astype(jnp.float32)
    return (x32 * jax.nn.sigmoid(1.702 * x32)).astype(x.dtype)


def gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns the exact GELU (by the error function), computed in float32, in the dtype of `x`.

    Args:
        x: Activations of any shape and floating-point dtype.
    """
    return jax.nn.gelu(x.astype(jnp.float32), approximate=False).astype(x.dtype)


# The values of `hidden_act`.
ACTIVATIONS = {"quick_gelu": quick_gelu, "gelu": gelu}


@dataclasses.dataclass(frozen=True)
class TowerConfig(ReleasedConfig):
    """Base class: the configuration fields that CLIP's text tower and vision tower have in common.

    The defaults are those of transformers, for fields that a `config.json` leaves out. The first
    four fields get theirs in the subclasses. The constructor raises ValueError for a value that is
    not supported.

    Attributes:
        hidden_size: Number of features of a token, a multiple of `num_attention_heads`.
        intermediate_size: Hidden width of the MLPs.
        num_hidden_layers: Number of layers.
        num_attention_heads: Number of attention heads.
        hidden_act: Activation of the MLPs: "quick_gelu" or "gelu".
        layer_norm_eps: Epsilon of the layer norms.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    hidden_act: str = "quick_gelu"
    layer_norm_eps: float = 1e-5

    def check(self) -> None:
        """Checks the values of the fields.

        Raises:
            ValueError: If `hidden_act` is neither "quick_gelu" nor "gelu", or if
                `num_attention_heads` does not divide `hidden_size`. The message names the field.
        """
        self.require_one_of("hidden_act", tuple(ACTIVATIONS))
        self.require(
            self.hidden_size % self.num_attention_heads == 0,
            "num_attention_heads",
            f"a divisor of hidden_size={self.hidden_size}",
        )


@dataclasses.dataclass(frozen=True)
class CLIPTextConfig(TowerConfig):
    """The configuration of CLIP's text tower: a part of a CLIP's `config.json`, or the whole file
    of a text encoder.

    The constructor raises ValueError for a value that is not supported. Unknown fields of a file
    are ignored.

    Attributes:
        hidden_size: Number of features of a token, a multiple of `num_attention_heads`.
        intermediate_size: Hidden width of the MLPs.
        num_hidden_layers: Number of layers.
        num_attention_heads: Number of attention heads.
        hidden_act: Activation of the MLPs: "quick_gelu" (the default) or "gelu".
        layer_norm_eps: Epsilon of the layer norms, 1e-5 by default.
        vocab_size: Number of tokens in the vocabulary.
        max_position_embeddings: Greatest number of tokens of a text.
        eos_token_id: Number of the end-of-text token. 2, a wrong value in old files, stands for the
            highest token number that a text has.
        projection_dim: Number of features of the projected state of a
            `CLIPTextModelWithProjection`. `CLIPTextModel` ignores it, and a whole CLIP reads the
            field of this name in `CLIPConfig` instead.
    """

    network = "CLIPTextModel"
    model_type = "clip_text_model"

    hidden_size: int = 512
    intermediate_size: int = 2048
    num_hidden_layers: int = 12
    num_attention_heads: int = 8
    vocab_size: int = 49408
    max_position_embeddings: int = 77
    eos_token_id: int = 49407
    projection_dim: int = 512


@dataclasses.dataclass(frozen=True)
class CLIPVisionConfig(TowerConfig):
    """The configuration of CLIP's vision tower: a part of a CLIP's `config.json`.

    The constructor raises ValueError for a value that is not supported. Unknown fields of a file
    are ignored.

    Attributes:
        hidden_size: Number of features of a token, a multiple of `num_attention_heads`.
        intermediate_size: Hidden width of the MLPs.
        num_hidden_layers: Number of layers.
        num_attention_heads: Number of attention heads.
        hidden_act: Activation of the MLPs: "quick_gelu" (the default) or "gelu".
        layer_norm_eps: Epsilon of the layer norms, 1e-5 by default.
        num_channels: Number of channels of an image.
        image_size: Height and width of images in pixels, a multiple of `patch_size`.
        patch_size: Side of a patch in pixels.
    """

    network = "CLIPVisionModel"
    model_type = "clip_vision_model"

    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_channels: int = 3
    image_size: int = 224
    patch_size: int = 32

    def check(self) -> None:
        """Checks the values of the fields.

        Raises:
            ValueError: If `hidden_act` is neither "quick_gelu" nor "gelu", if `num_attention_heads`
                does not divide `hidden_size`, or if `patch_size` does not divide `image_size`. The
                message names the field.
        """
        super().check()
        self.require(
            self.image_size % self.patch_size == 0,
            "patch_size",
            f"a divisor of image_size={self.image_size}",
        )


@dataclasses.dataclass(frozen=True)
class CLIPConfig(ReleasedConfig):
    """The configuration of a whole CLIP: its `config.json`, of transformers 4 or 5.

    Attributes:
        text_config: The configuration of the text tower.
        vision_config: The configuration of the vision tower.
        projection_dim: Number of features of the space that texts and images share.
    """

    network = "CLIPModel"
    model_type = "clip"

    text_config: CLIPTextConfig = CLIPTextConfig()
    vision_config: CLIPVisionConfig = CLIPVisionConfig()
    projection_dim: int = 512

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "CLIPConfig":
        """Makes a configuration from the contents of a `config.json`, and checks it with both
        towers.

        Missing fields get their defaults, those of a missing or null tower too, and unknown ones
        are ignored.

        Args:
            fields: The contents. The mappings "text_config" and "vision_config" hold the fields of
                the towers; in the oldest files they are called "text_config_dict" and
                "vision_config_dict". A mapping of the older name replaces the newer one as a whole.

        Returns:
            The configuration.

        Raises:
            ValueError: If a field has a type or value that is not supported, a `model_type` is
                present but not "clip" (in a tower, not "clip_text_model" or "clip_vision_model"),
                a tower's fields are not a mapping, or `quantization_config` is set. The message
                names the field.
        """
        text = CLIPTextConfig.from_dict(_tower_fields(fields, "text_config"))
        vision = CLIPVisionConfig.from_dict(_tower_fields(fields, "vision_config"))
        return super().from_dict({**fields, "text_config": text, "vision_config": vision})


def _tower_fields(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Returns the fields of one tower from the `config.json` of a whole CLIP.

    They are under `name`, or in the oldest files under `name` followed by "_dict". If that is there
    and not None, `name` is ignored.

    Args:
        fields: Contents of the whole `config.json`.
        name: "text_config" or "vision_config".

    Returns:
        The fields, unchecked; {} if the file has none or null.

    Raises:
        ValueError: If they are not a mapping.
    """
    tower = fields.get(f"{name}_dict")
    if tower is None:
        tower = fields.get(name) or {}
    if not isinstance(tower, Mapping):
        raise unsupported(CLIPConfig.network, name, tower, "a mapping")
    return dict(tower)


class CLIPModel(nnx.Module):
    """A whole CLIP: text tower, vision tower, and their projections to a shared space (methods
    `encode_text` and `encode_image`).

    It is made for scoring. Its attention (`attention_forward`) saves memory on GPUs, but a gradient
    evaluates the attention a second time.

    The scalar parameter `logit_scale` is the logarithm of the factor by which cosines between texts
    and images are multiplied.

    Args:
        config: The configuration (`CLIPConfig`).
        rngs: Random number generators for the initial parameters.
    """

    def __init__(self, config: CLIPConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.text_model = TextModel(config.text_config, rngs=rngs)
        self.vision_model = VisionModel(config.vision_config, rngs=rngs)
        self.text_projection = Linear(
            config.text_config.hidden_size, config.projection_dim, bias=False, rngs=rngs
        )
        self.visual_projection = Linear(
            config.vision_config.hidden_size, config.projection_dim, bias=False, rngs=rngs
        )
        # logarithm of the factor of the cosines
        self.logit_scale = param(jnp.asarray(math.log(1 / 0.07)), "logit_scale")

    def encode_text(
        self, input_ids: Int[Array, "b l"], attention_mask: Bool[Array, "b l"]
    ) -> Float[Array, "b e"]:
        """Maps texts to the shared space of texts and images.

        Args:
            input_ids: Token numbers, at most `max_position_embeddings` per text. Each text has an
                end-of-text token.
            attention_mask: True on tokens, false on padding, which is not attended to.

        Returns:
            One vector per text, [b, `projection_dim`], not normalized, in the dtype of the token
            embedding.

        Raises:
            ValueError: If there are more than `max_position_embeddings` tokens per text, padding
                included.
        """
        return self.text_projection(self.text_model(input_ids, attention_mask))

    def encode_image(self, pixels: Float[Array, "b h w c"]) -> Float[Array, "b e"]:
        """Maps images to the shared space of texts and images.

        Args:
            pixels: Images of `image_size` by `image_size` pixels, normalized by mean and standard
                deviation per channel (`Preprocessing`).

        Returns:
            One vector per image, [b, `projection_dim`], not normalized, in the dtype of `pixels`.

        Raises:
            ValueError: If the images have another size or number of channels.
        """
        return self.visual_projection(self.vision_model(pixels))


class CLIPTextOutput(NamedTuple):
    """The hidden states of CLIP's text tower for b texts of l tokens.

    Attributes:
        penultimate: States before the last layer, [b, l, d], without a norm: `hidden_states[-2]` in
            transformers.
        last: States after the last layer and its norm, [b, l, d].
        pooled: One state per text: `last` at the first end-of-text token, [b, d], or its
            projection, [b, `projection_dim`], if the model has one.
    """

    penultimate: Float[Array, "b l d"]
    last: Float[Array, "b l d"]
    pooled: Float[Array, "b e"]


class CLIPTextModel(nnx.Module):
    """CLIP's text tower alone.

    Padding needs no mask, because it follows the text and the attention is causal.

    Args:
        config: The configuration (`CLIPTextConfig`). `projection_dim` has no effect.
        rngs: Random number generators for the initial parameters.
    """

    def __init__(self, config: CLIPTextConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.text_model = TextModel(config, rngs=rngs)

    def __call__(self, input_ids: Int[Array, "b l"]) -> CLIPTextOutput:
        """Returns the hidden states of texts, in the dtype of the token embedding.

        Args:
            input_ids: Token numbers, at most `max_position_embeddings` per text. Each text has an
                end-of-text token (`eos_token_id` of the configuration), and padding follows it. The
                attention is causal, so padding needs no mask.

        Returns:
            A `CLIPTextOutput`: `penultimate` [b, l, `hidden_size`], the states before the last
            layer, without a norm; `last` [b, l, `hidden_size`], the states after the last layer and
            its norm; and `pooled` [b, `hidden_size`], `last` at each text's first end-of-text
            token.

        Raises:
            ValueError: If there are more than `max_position_embeddings` tokens per text, padding
                included.
        """
        tower = self.text_model
        mask = causal_mask(input_ids.shape[1])
        x = tower.embeddings(input_ids)

        # The input of each layer is carried beside its output, so that no other state is kept.
        def apply(layer, states):
            x, _ = states
            return (layer(x, mask), x)

        x, penultimate = scan_blocks(tower.encoder.layers, apply, (x, x))
        last = tower.final_layer_norm(x)
        return CLIPTextOutput(penultimate, last, tower.at_end_of_text(last, input_ids))


class CLIPTextModelWithProjection(CLIPTextModel):
    """CLIP's text tower, whose pooled state is projected to the space that texts and images share.

    Args:
        config: The configuration (`CLIPTextConfig`). `projection_dim` is the number of features of
            the projected state.
        rngs: Random number generators for the initial parameters.
    """

    def __init__(self, config: CLIPTextConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.text_projection = Linear(
            config.hidden_size, config.projection_dim, bias=False, rngs=rngs
        )

    def __call__(self, input_ids: Int[Array, "b l"]) -> CLIPTextOutput:
        """Returns the hidden states of texts, in the dtype of the token embedding.

        Args:
            input_ids: Token numbers, at most `max_position_embeddings` per text. Each text has an
                end-of-text token (`eos_token_id` of the configuration), and padding follows it. The
                attention is causal, so padding needs no mask.

        Returns:
            A `CLIPTextOutput`: `penultimate` [b, l, `hidden_size`], the states before the last
            layer, without a norm; `last` [b, l, `hidden_size`], the states after the last layer and
            its norm; and `pooled` [b, `projection_dim`], the projection of `last` at each text's
            first end-of-text token, not normalized.

        Raises:
            ValueError: If there are more than `max_position_embeddings` tokens per text, padding
                included.
        """
        output = super().__call__(input_ids)
        return output._replace(pooled=self.text_projection(output.pooled))


class TextModel(nnx.Module):
    """CLIP's text transformer. It is causal, so the state of the end-of-text token stands for the
    whole text.

    Args:
        config: The configuration of the tower (`CLIPTextConfig`).
        rngs: Random number generators for the initial parameters.
    """

    def __init__(self, config: CLIPTextConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embeddings = TextEmbeddings(config, rngs=rngs)
        self.encoder = make_encoder(config, rngs)
        self.final_layer_norm = LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def __call__(
        self, input_ids: Int[Array, "b l"], attention_mask: Bool[Array, "b l"]
    ) -> Float[Array, "b d"]:
        """Returns the state of each text's first end-of-text token, after the final layer norm.

        Args:
            input_ids: Token numbers, at most `max_position_embeddings` per text. Each text has an
                end-of-text token.
            attention_mask: True on tokens, false on padding, which is not attended to.

        Returns:
            One state per text, [b, `hidden_size`], in the dtype of the token embedding.

        Raises:
            ValueError: If there are more than `max_position_embeddings` tokens per text, padding
                included.
        """
        mask = causal_mask(input_ids.shape[1]) & attention_mask[:, None, None, :]
        x = self.embeddings(input_ids)
        x = scan_blocks(self.encoder.layers, lambda layer, x: layer(x, mask), x)
        return self.final_layer_norm(self.at_end_of_text(x, input_ids))

    def at_end_of_text(
        self, x: Float[Array, "b l d"], input_ids: Int[Array, "b l"]
    ) -> Float[Array, "b d"]:
        """Selects the state of each text's first end-of-text token.

        If `eos_token_id` is 2, this token is the first one with the highest number in the text.
        Otherwise, a text without an end-of-text token gives the state of its first token.

        Args:
            x: States of all tokens.
            input_ids: The token numbers of each text.

        Returns:
            One state per text, in the dtype of `x`.
        """
        end = self.config.eos_token_id
        # Files older than transformers 4.31 have a wrong id, 2. Their end-of-text token is the one
        # with the highest id.
        is_end = input_ids if end == 2 else input_ids == end
        position = jnp.argmax(is_end, axis=-1)
        return jnp.take_along_axis(x, position[:, None, None], axis=1)[:, 0]


class VisionModel(nnx.Module):
    """CLIP's vision transformer over the patches of an image and one class token, whose state
    stands for the image. It has a layer norm before its first layer and one at the end.

    Args:
        config: The configuration of the tower (`CLIPVisionConfig`).
        rngs: Random number generators for the initial parameters.
    """

    def __init__(self, config: CLIPVisionConfig, *, rngs: nnx.Rngs):
        self.embeddings = VisionEmbeddings(config, rngs=rngs)
        # the spelling of the released files
        self.pre_layrnorm = LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.encoder = make_encoder(config, rngs)
        self.post_layernorm = LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def __call__(self, pixels: Float[Array, "b h w c"]) -> Float[Array, "b d"]:
        """Returns the state of each image's class token, after the final layer norm.

        Args:
            pixels: Images of `image_size` by `image_size` pixels, normalized by mean and standard
                deviation per channel (`Preprocessing`).

        Returns:
            One state per image, [b, `hidden_size`], in the dtype of `pixels`.

        Raises:
            ValueError: If the images have another size or number of channels.
        """
        x = self.pre_layrnorm(self.embeddings(pixels))
        x = scan_blocks(self.encoder.layers, lambda layer, x: layer(x, None), x)
        return self.post_layernorm(x[:, 0])


class TextEmbeddings(nnx.Module):
    """Token embeddings plus learned position embeddings.

    Args:
        config: The configuration of the tower (`CLIPTextConfig`).
        rngs: Random number generators for the initial tables.
    """

    def __init__(self, config: CLIPTextConfig, *, rngs: nnx.Rngs):
        width = config.hidden_size
        self.max_length = config.max_position_embeddings
        self.token_embedding = Embedding(config.vocab_size, width, rngs=rngs)
        self.position_embedding = Embedding(self.max_length, width, rngs=rngs)

    def __call__(self, input_ids: Int[Array, "b l"]) -> Float[Array, "b l d"]:
        """Embeds each token as the sum of its token embedding and its position embedding.

        Args:
            input_ids: Token numbers of the positions 0 to l - 1.

        Returns:
            One vector per token, [b, l, `hidden_size`], in the dtype of the token embedding.

        Raises:
            ValueError: If there are more than `max_position_embeddings` tokens per text, padding
                included.
        """
        length = input_ids.shape[1]
        if length > self.max_length:  # JAX would clamp the index without an error
            raise ValueError(f"CLIPModel: {length} tokens; accepted: up to {self.max_length}")
        x = self.token_embedding(input_ids)
        return x + self.position_embedding(jnp.arange(length)).astype(x.dtype)


class VisionEmbeddings(nnx.Module):
    """Embeds images as one class token and one token per patch, row by row, plus learned position
    embeddings.

    Args:
        config: The configuration of the tower (`CLIPVisionConfig`).
        rngs: Random number generators for the initial parameters.
    """

    def __init__(self, config: CLIPVisionConfig, *, rngs: nnx.Rngs):
        width = config.hidden_size
        num_patches = (config.image_size // config.patch_size) ** 2
        self.patch_embedding = PatchProjection(
            config.patch_size, config.num_channels, width, bias=False, rngs=rngs
        )
        self.position_embedding = Embedding(num_patches + 1, width, rngs=rngs)
        self.class_embedding = param(jax.random.normal(rngs.params(), (width,)), "class_embedding")
        self.image_shape = (config.image_size, config.image_size, config.num_channels)

    def __call__(self, pixels: Float[Array, "b h w c"]) -> Float[Array, "b n d"]:
        """Embeds images as tokens, with their position embeddings added.

        Args:
            pixels: Images of `image_size` by `image_size` pixels with `num_channels` channels.

        Returns:
            First the class token, then the patches, row by row: [b, 1 + patches, `hidden_size`], in
            the dtype of `pixels`.

        Raises:
            ValueError: If the images have another size or number of channels.
        """
        if pixels.shape[1:] != self.image_shape:
            raise ValueError(
                f"CLIPModel: images of shape {pixels.shape[1:]}; accepted: {self.image_shape}"
            )
        batch = len(pixels)
        class_token = self.class_embedding.get_value().astype(pixels.dtype)
        class_token = jnp.broadcast_to(class_token, (batch, 1, *class_token.shape))
        patches = self.patch_embedding(pixels)
        patches = patches.reshape(batch, -1, patches.shape[-1])
        x = jnp.concatenate([class_token, patches], axis=1)
        return x + self.position_embedding(jnp.arange(x.shape[1])).astype(x.dtype)


def make_encoder(config: TowerConfig, rngs: nnx.Rngs) -> nnx.Dict:
    """Builds the layers of a tower.

    Args:
        config: The configuration of the tower.
        rngs: Random number generators for the initial parameters.

    Returns:
        A module with the single entry "layers" (as in released files): one `EncoderLayer` whose
        parameters have a leading axis of layers, for `scan_blocks`.
    """
    layers = stack(config.num_hidden_layers, lambda rngs: EncoderLayer(config, rngs=rngs), rngs)
    return nnx.Dict(layers=layers)


def causal_mask(length: int) -> Bool[Array, "1 1 l l"]:
    """Returns a causal mask: True where the key is at the query's position or before it.

    Args:
        length: Number l of tokens.

    Returns:
        A Boolean array [1, 1, queries, keys].
    """
    return jnp.tril(jnp.ones((length, length), bool))[None, None]


class EncoderLayer(nnx.Module):
    """A layer: attention, then an MLP, each with a layer norm before it and a residual connection.

    Args:
        config: The configuration of the tower (`TowerConfig`).
        rngs: Random number generators for the initial weights.
    """

    def __init__(self, config: TowerConfig, *, rngs: nnx.Rngs):
        width = config.hidden_size
        self.self_attn = Attention(config, rngs=rngs)
        self.layer_norm1 = LayerNorm(width, eps=config.layer_norm_eps)
        self.mlp = MLP(width, config.intermediate_size, config.hidden_act, rngs=rngs)
        self.layer_norm2 = LayerNorm(width, eps=config.layer_norm_eps)

    def __call__(
        self, x: Float[Array, "b l d"], mask: Bool[Array, "#b 1 l l"] | None
    ) -> Float[Array, "b l d"]:
        """Applies attention, then the MLP. Each reads a norm of its input, and its result is added
        to the input.

        Args:
            x: The tokens: batch, tokens, features.
            mask: True where a query (third axis) attends to a key (last axis), for every head.
                None: all keys.

        Returns:
            The tokens after the layer, of the shape and dtype of `x`.
        """
        x = x + self.self_attn(self.layer_norm1(x), mask)
        return x + self.mlp(self.layer_norm2(x))


class Attention(nnx.Module):
    """Softmax self-attention with separate linear layers for queries, keys, values and the output.

    Args:
        config: The configuration of the tower (`TowerConfig`).
        rngs: Random number generators for the initial weights.
    """

    def __init__(self, config: TowerConfig, *, rngs: nnx.Rngs):
        width = config.hidden_size
        self.q_proj = Linear(width, width, rngs=rngs)
        self.k_proj = Linear(width, width, rngs=rngs)
        self.v_proj = Linear(width, width, rngs=rngs)
        self.out_proj = Linear(width, width, rngs=rngs)
        self.heads = config.num_attention_heads

    def __call__(
        self, x: Float[Array, "b l d"], mask: Bool[Array, "#b 1 l l"] | None
    ) -> Float[Array, "b l d"]:
        """Applies self-attention and the output layer. The input is not added.

        Args:
            x: The tokens: batch, tokens, features.
            mask: True where a query (third axis) attends to a key (last axis), for every head.
                None: all keys.

        Returns:
            One output per token, of the shape and dtype of `x`.
        """

        def heads(y):
            return y.reshape(*y.shape[:2], self.heads, -1)

        q = heads(self.q_proj(x))
        k = heads(self.k_proj(x))
        v = heads(self.v_proj(x))
        return self.out_proj(attention_forward(q, k, v, mask).reshape(x.shape))


class MLP(nnx.Module):
    """Two linear layers with an activation between them.

    Args:
        d: Number of input and output features.
        hidden: Number of hidden features.
        activation: "quick_gelu" or "gelu".
        rngs: Random number generators for the initial weights.
    """

    def __init__(self, d: int, hidden: int, activation: str, *, rngs: nnx.Rngs):
        self.fc1 = Linear(d, hidden, rngs=rngs)
        self.fc2 = Linear(hidden, d, rngs=rngs)
        self.activation = ACTIVATIONS[activation]

    def __call__(self, x: Float[Array, "b l d"]) -> Float[Array, "b l d"]:
        """Applies the two linear layers and the activation to each token. The input is not added.

        Args:
            x: The tokens: batch, tokens, features.

        Returns:
            One output per token, of the shape and dtype of `x`.
        """
        return self.fc2(self.activation(self.fc1(x)))
