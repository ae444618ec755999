"""CLIP (arXiv 2103.00020, section 2.4): `CLIPModel` of transformers in Flax NNX, the text tower and the vision tower.

Both are pre-norm transformers and end in a linear map to one shared space, where the cosine between a text and an image says
how well they agree.
"""

import dataclasses
import math
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from solrl_jax.models.attention import attention
from solrl_jax.models.embeddings import PatchProjection
from solrl_jax.models.layers import Embedding, LayerNorm, Linear, param, scan_blocks, stack


def quick_gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    x32 = x.astype(jnp.float32)  # rounded once: in BF16 each of the three steps would be
    return (x32 * jax.nn.sigmoid(1.702 * x32)).astype(x.dtype)


def gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    return jax.nn.gelu(x.astype(jnp.float32), approximate=False).astype(x.dtype)


ACTIVATIONS = {"quick_gelu": quick_gelu, "gelu": gelu}


@dataclasses.dataclass(frozen=True)
class TowerConfig:
    """What both towers have in common. The defaults, here and below, are those that a `config.json` may leave out."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    hidden_act: str = "quick_gelu"
    layer_norm_eps: float = 1e-5

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        """From one tower's part of a `config.json`. Raises ValueError naming a field with an unsupported value."""
        config = cls(**{f.name: fields[f.name] for f in dataclasses.fields(cls) if f.name in fields})
        for field in dataclasses.fields(cls):
            value = getattr(config, field.name)
            if field.type is int and (type(value) is not int or value <= 0):
                raise _unsupported(cls, field.name, value, "a positive integer")
        if config.hidden_act not in ACTIVATIONS:
            raise _unsupported(cls, "hidden_act", config.hidden_act, ", ".join(map(repr, ACTIVATIONS)))
        if config.hidden_size % config.num_attention_heads:
            accepted = f"a divisor of hidden_size={config.hidden_size}"
            raise _unsupported(cls, "num_attention_heads", config.num_attention_heads, accepted)
        return config


@dataclasses.dataclass(frozen=True)
class CLIPTextConfig(TowerConfig):
    hidden_size: int = 512
    intermediate_size: int = 2048
    num_hidden_layers: int = 12
    num_attention_heads: int = 8
    vocab_size: int = 49408
    max_position_embeddings: int = 77
    eos_token_id: int = 49407


@dataclasses.dataclass(frozen=True)
class CLIPVisionConfig(TowerConfig):
    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_channels: int = 3
    image_size: int = 224
    patch_size: int = 32

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        config = super().from_dict(fields)
        if config.image_size % config.patch_size:
            raise _unsupported(cls, "patch_size", config.patch_size, f"a divisor of image_size={config.image_size}")
        return config


@dataclasses.dataclass(frozen=True)
class CLIPConfig:
    """The fields of a released `config.json` on which the two embeddings depend, under their own names."""

    text_config: CLIPTextConfig = CLIPTextConfig()
    vision_config: CLIPVisionConfig = CLIPVisionConfig()
    projection_dim: int = 512

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        """From a `config.json` of transformers 4 or 5. Raises ValueError naming a field with an unsupported value."""
        if (kind := fields.get("model_type", "clip")) != "clip":
            raise _unsupported(cls, "model_type", kind, "'clip'")
        if type(width := fields.get("projection_dim", cls.projection_dim)) is not int or width <= 0:
            raise _unsupported(cls, "projection_dim", width, "a positive integer")
        towers = [_tower(fields, "text_config"), _tower(fields, "vision_config")]
        return cls(CLIPTextConfig.from_dict(towers[0]), CLIPVisionConfig.from_dict(towers[1]), width)


def _tower(fields: dict[str, Any], name: str) -> dict[str, Any]:
    """One tower's fields. The `..._dict` of the oldest files takes over whole, defaults included, as in transformers."""
    old = fields.get(f"{name}_dict")
    return fields.get(name) or {} if old is None else old


def _unsupported(cls: type, field: str, value: Any, accepted: str) -> ValueError:
    return ValueError(f"{cls.__name__}: {field}={value!r}; accepted: {accepted}")


class CLIPModel(nnx.Module):
    def __init__(self, config: CLIPConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.text_model = TextModel(config.text_config, rngs=rngs)
        self.vision_model = VisionModel(config.vision_config, rngs=rngs)
        self.text_projection = Linear(config.text_config.hidden_size, config.projection_dim, bias=False, rngs=rngs)
        self.visual_projection = Linear(config.vision_config.hidden_size, config.projection_dim, bias=False, rngs=rngs)
        self.logit_scale = param(jnp.asarray(math.log(1 / 0.07)), "logit_scale")  # of the cosines, a logarithm

    def encode_text(self, input_ids: Int[Array, "b l"], attention_mask: Bool[Array, "b l"]) -> Float[Array, "b e"]:
        """Texts to the shared space, not normalised; in the dtype of the token table.

        attention_mask: true (or 1) on tokens, false on padding. There are at most `max_position_embeddings` positions.
        """
        return self.text_projection(self.text_model(input_ids, attention_mask))

    def encode_image(self, pixels: Float[Array, "b h w c"]) -> Float[Array, "b e"]:
        """Images, already resized and normalised, to the shared space, not normalised; in the dtype of `pixels`."""
        return self.visual_projection(self.vision_model(pixels))


class TextModel(nnx.Module):
    """A causal transformer over tokens; the end-of-text token, having seen all others, stands for the text."""

    def __init__(self, c: CLIPTextConfig, *, rngs: nnx.Rngs):
        self.config = c
        self.embeddings = TextEmbeddings(c, rngs=rngs)
        self.encoder = Encoder(c, rngs=rngs)
        self.final_layer_norm = LayerNorm(c.hidden_size, eps=c.layer_norm_eps)

    def __call__(self, input_ids: Int[Array, "b l"], attention_mask: Bool[Array, "b l"]) -> Float[Array, "b d"]:
        length = input_ids.shape[1]
        causal = jnp.tril(jnp.ones((length, length), bool))
        x = self.encoder(self.embeddings(input_ids), causal & attention_mask.astype(bool)[:, None, None, :])
        return self.final_layer_norm(self.at_end(x, input_ids))

    def at_end(self, x: Float[Array, "b l d"], input_ids: Int[Array, "b l"]) -> Float[Array, "b d"]:
        """The vectors at the first end-of-text tokens."""
        # Files older than transformers 4.31 say 2 there, which is wrong: their end of text is the highest id.
        end = self.config.eos_token_id
        position = jnp.argmax(input_ids if end == 2 else input_ids == end, axis=-1)
        return jnp.take_along_axis(x, position[:, None, None], axis=1)[:, 0]


class VisionModel(nnx.Module):
    """A transformer over patches and one class token, which stands for the image."""

    def __init__(self, c: CLIPVisionConfig, *, rngs: nnx.Rngs):
        self.embeddings = VisionEmbeddings(c, rngs=rngs)
        self.pre_layrnorm = LayerNorm(c.hidden_size, eps=c.layer_norm_eps)  # spelled so in the released files
        self.encoder = Encoder(c, rngs=rngs)
        self.post_layernorm = LayerNorm(c.hidden_size, eps=c.layer_norm_eps)

    def __call__(self, pixels: Float[Array, "b h w c"]) -> Float[Array, "b d"]:
        x = self.encoder(self.pre_layrnorm(self.embeddings(pixels)), None)
        return self.post_layernorm(x[:, 0])


class TextEmbeddings(nnx.Module):
    def __init__(self, c: CLIPTextConfig, *, rngs: nnx.Rngs):
        self.token_embedding = Embedding(c.vocab_size, c.hidden_size, rngs=rngs)
        self.position_embedding = Embedding(c.max_position_embeddings, c.hidden_size, rngs=rngs)
        self.positions = c.max_position_embeddings

    def __call__(self, input_ids: Int[Array, "b l"]) -> Float[Array, "b l d"]:
        length = input_ids.shape[1]
        if length > self.positions:  # an index out of bounds would be clamped, silently
            raise ValueError(f"CLIPModel: {length} tokens; there are {self.positions} positions")
        x = self.token_embedding(input_ids)
        return x + self.position_embedding(jnp.arange(length)).astype(x.dtype)


class VisionEmbeddings(nnx.Module):
    def __init__(self, c: CLIPVisionConfig, *, rngs: nnx.Rngs):
        self.patch_embedding = PatchProjection(c.patch_size, c.num_channels, c.hidden_size, bias=False, rngs=rngs)
        self.position_embedding = Embedding((c.image_size // c.patch_size) ** 2 + 1, c.hidden_size, rngs=rngs)
        self.class_embedding = param(jax.random.normal(rngs.params(), (c.hidden_size,)), "class_embedding")
        self.image = (c.image_size, c.image_size, c.num_channels)

    def __call__(self, pixels: Float[Array, "b h w c"]) -> Float[Array, "b n d"]:
        """One token for the class, then one a patch, row by row."""
        if pixels.shape[1:] != self.image:
            raise ValueError(f"CLIPModel: images of shape {pixels.shape[1:]}; accepted: {self.image}")
        first = self.class_embedding.get_value().astype(pixels.dtype)
        first = jnp.broadcast_to(first, (len(pixels), 1, *first.shape))
        patches = self.patch_embedding(pixels)
        x = jnp.concatenate([first, patches.reshape(len(pixels), -1, patches.shape[-1])], axis=1)
        return x + self.position_embedding(jnp.arange(x.shape[1])).astype(x.dtype)


class Encoder(nnx.Module):
    def __init__(self, c: TowerConfig, *, rngs: nnx.Rngs):
        self.layers = stack(c.num_hidden_layers, lambda r: EncoderLayer(c, rngs=r), rngs)

    def __call__(self, x: Float[Array, "b l d"], mask: Bool[Array, "b 1 l l"] | None) -> Float[Array, "b l d"]:
        return scan_blocks(self.layers, lambda layer, x: layer(x, mask), x)


class EncoderLayer(nnx.Module):
    def __init__(self, c: TowerConfig, *, rngs: nnx.Rngs):
        self.self_attn = Attention(c, rngs=rngs)
        self.layer_norm1 = LayerNorm(c.hidden_size, eps=c.layer_norm_eps)
        self.mlp = MLP(c, rngs=rngs)
        self.layer_norm2 = LayerNorm(c.hidden_size, eps=c.layer_norm_eps)

    def __call__(self, x: Float[Array, "b l d"], mask: Bool[Array, "b 1 l l"] | None) -> Float[Array, "b l d"]:
        x = x + self.self_attn(self.layer_norm1(x), mask)
        return x + self.mlp(self.layer_norm2(x))


class Attention(nnx.Module):
    def __init__(self, c: TowerConfig, *, rngs: nnx.Rngs):
        d = c.hidden_size
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (Linear(d, d, rngs=rngs) for _ in range(4))
        self.heads = c.num_attention_heads

    def __call__(self, x: Float[Array, "b l d"], mask: Bool[Array, "b 1 l l"] | None) -> Float[Array, "b l d"]:
        heads = lambda y: y.reshape(*y.shape[:2], self.heads, -1)
        out = attention(heads(self.q_proj(x)), heads(self.k_proj(x)), heads(self.v_proj(x)), mask)
        return self.out_proj(out.reshape(x.shape))


class MLP(nnx.Module):
    def __init__(self, c: TowerConfig, *, rngs: nnx.Rngs):
        self.fc1 = Linear(c.hidden_size, c.intermediate_size, rngs=rngs)
        self.fc2 = Linear(c.intermediate_size, c.hidden_size, rngs=rngs)
        self.act = c.hidden_act

    def __call__(self, x: Float[Array, "b l d"]) -> Float[Array, "b l d"]:
        return self.fc2(ACTIVATIONS[self.act](self.fc1(x)))
