"""CLIP (arXiv 2103.00020, section 2.4): `CLIPModel` of transformers in Flax NNX, with its text tower and its vision tower.

Both towers are pre-norm transformers. A linear maps the result of each to one shared space, where the cosine between a text
and an image says how well they agree.

FLUX and Stable Diffusion 3 use the text tower alone: `CLIPTextModel`, `CLIPTextModelWithProjection`. They want the states of
all tokens, after the last layer and before it (the choice of SDXL, arXiv 2307.01952, section 2.1, kept by Stable Diffusion 3).
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
from solrl_jax.models.loading.config_file import ReleasedConfig


def quick_gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """`x sigmoid(1.702 x)`, rounded once."""
    x32 = x.astype(jnp.float32)
    return (x32 * jax.nn.sigmoid(1.702 * x32)).astype(x.dtype)


def gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """GELU by the error function, rounded once."""
    return jax.nn.gelu(x.astype(jnp.float32), approximate=False).astype(x.dtype)


ACTIVATIONS = {"quick_gelu": quick_gelu, "gelu": gelu}


@dataclasses.dataclass(frozen=True)
class TowerConfig(ReleasedConfig):
    """The fields that both towers have. The defaults, here and below, are those that a `config.json` may leave out."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    hidden_act: str = "quick_gelu"
    layer_norm_eps: float = 1e-5

    def check(self) -> None:
        self.require_one_of("hidden_act", tuple(ACTIVATIONS))
        fits = self.hidden_size % self.num_attention_heads == 0
        self.require(fits, "num_attention_heads", f"a divisor of hidden_size={self.hidden_size}")


@dataclasses.dataclass(frozen=True)
class CLIPTextConfig(TowerConfig):
    """The text tower's part of a `config.json`, or the whole of a text encoder's own."""

    network = "CLIPTextModel"
    model_type = "clip_text_model"

    hidden_size: int = 512
    intermediate_size: int = 2048
    num_hidden_layers: int = 12
    num_attention_heads: int = 8
    vocab_size: int = 49408
    max_position_embeddings: int = 77
    eos_token_id: int = 49407
    projection_dim: int = 512  # read only where the tower stands alone


@dataclasses.dataclass(frozen=True)
class CLIPVisionConfig(TowerConfig):
    """The vision tower's part of a `config.json`."""

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
        super().check()
        self.require(
            self.image_size % self.patch_size == 0,
            "patch_size",
            f"a divisor of image_size={self.image_size}",
        )


@dataclasses.dataclass(frozen=True)
class CLIPConfig(ReleasedConfig):
    """A released `config.json`, of transformers 4 or 5."""

    network = "CLIPModel"
    model_type = "clip"

    text_config: CLIPTextConfig = CLIPTextConfig()
    vision_config: CLIPVisionConfig = CLIPVisionConfig()
    projection_dim: int = 512

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "CLIPConfig":
        text = CLIPTextConfig.from_dict(_tower(fields, "text_config"))
        vision = CLIPVisionConfig.from_dict(_tower(fields, "vision_config"))
        return super().from_dict({**fields, "text_config": text, "vision_config": vision})


def _tower(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    """One tower's fields. The oldest files have a `..._dict`, which replaces all of them, as in transformers."""
    old = fields.get(f"{name}_dict")
    return fields.get(name) or {} if old is None else old


class CLIPModel(nnx.Module):
    """Both towers, and the maps from each to the shared space."""

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
        self.logit_scale = param(
            jnp.asarray(math.log(1 / 0.07)), "logit_scale"
        )  # logarithm of the cosines' factor

    def encode_text(
        self, input_ids: Int[Array, "b l"], attention_mask: Bool[Array, "b l"]
    ) -> Float[Array, "b e"]:
        """Texts in the shared space, not normalised, in the dtype of the token table.

        attention_mask: true on tokens, false on padding. l is at most `max_position_embeddings`.
        """
        return self.text_projection(self.text_model(input_ids, attention_mask))

    def encode_image(self, pixels: Float[Array, "b h w c"]) -> Float[Array, "b e"]:
        """Images in the shared space, not normalised, in the dtype of `pixels`.

        pixels: images of the tower's own size, normalised by the mean and deviation of CLIP's training pictures.
        """
        return self.visual_projection(self.vision_model(pixels))


class CLIPTextOutput(NamedTuple):
    """The states of a text tower."""

    penultimate: Float[
        Array, "b l d"
    ]  # before the last layer, not normalised: `hidden_states[-2]` in transformers
    last: Float[Array, "b l d"]  # after the last layer, normalised
    pooled: Float[
        Array, "b e"
    ]  # `last` at the end of text; projected, if the model has a projection


class CLIPTextModel(nnx.Module):
    """The text tower alone. Padding is not masked: it comes last, and the tower is causal."""

    def __init__(self, config: CLIPTextConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.text_model = TextModel(config, rngs=rngs)

    def __call__(self, input_ids: Int[Array, "b l"]) -> CLIPTextOutput:
        """All states, in the dtype of the token table. Each text has an end of text; l is at most `max_position_embeddings`."""
        tower = self.text_model
        mask = causal(input_ids.shape[1])
        x = tower.embeddings(input_ids)

        # each layer's input is carried beside its output, so that no other state is kept
        def apply(layer, states):
            return (layer(states[0], mask), states[0])

        x, penultimate = scan_blocks(tower.encoder.layers, apply, (x, x))
        last = tower.final_layer_norm(x)
        return CLIPTextOutput(penultimate, last, tower.at_end(last, input_ids))


class CLIPTextModelWithProjection(CLIPTextModel):
    """The text tower, and the map to the space that texts and images share: `pooled` lies in it."""

    def __init__(self, config: CLIPTextConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.text_projection = Linear(
            config.hidden_size, config.projection_dim, bias=False, rngs=rngs
        )

    def __call__(self, input_ids: Int[Array, "b l"]) -> CLIPTextOutput:
        out = super().__call__(input_ids)
        return out._replace(pooled=self.text_projection(out.pooled))


class TextModel(nnx.Module):
    """A causal transformer over tokens. The end-of-text token, which sees all others, stands for the text."""

    def __init__(self, c: CLIPTextConfig, *, rngs: nnx.Rngs):
        self.config = c
        self.embeddings = TextEmbeddings(c, rngs=rngs)
        self.encoder = encoder(c, rngs)
        self.final_layer_norm = LayerNorm(c.hidden_size, eps=c.layer_norm_eps)

    def __call__(
        self, input_ids: Int[Array, "b l"], attention_mask: Bool[Array, "b l"]
    ) -> Float[Array, "b d"]:
        mask = causal(input_ids.shape[1]) & attention_mask[:, None, None, :]
        x = scan_blocks(
            self.encoder.layers, lambda layer, x: layer(x, mask), self.embeddings(input_ids)
        )
        return self.final_layer_norm(self.at_end(x, input_ids))

    def at_end(self, x: Float[Array, "b l d"], input_ids: Int[Array, "b l"]) -> Float[Array, "b d"]:
        """The vector at each text's first end-of-text token."""
        # Files older than transformers 4.31 give a wrong id, 2. Their end of text is the token with the highest id.
        end = self.config.eos_token_id
        position = jnp.argmax(input_ids if end == 2 else input_ids == end, axis=-1)
        return jnp.take_along_axis(x, position[:, None, None], axis=1)[:, 0]


class VisionModel(nnx.Module):
    """A transformer over patches and one class token. The class token stands for the image."""

    def __init__(self, c: CLIPVisionConfig, *, rngs: nnx.Rngs):
        self.embeddings = VisionEmbeddings(c, rngs=rngs)
        self.pre_layrnorm = LayerNorm(
            c.hidden_size, eps=c.layer_norm_eps
        )  # spelled so in the released files
        self.encoder = encoder(c, rngs)
        self.post_layernorm = LayerNorm(c.hidden_size, eps=c.layer_norm_eps)

    def __call__(self, pixels: Float[Array, "b h w c"]) -> Float[Array, "b d"]:
        x = scan_blocks(
            self.encoder.layers,
            lambda layer, x: layer(x, None),
            self.pre_layrnorm(self.embeddings(pixels)),
        )
        return self.post_layernorm(x[:, 0])


class TextEmbeddings(nnx.Module):
    """Tokens plus learned positions."""

    def __init__(self, c: CLIPTextConfig, *, rngs: nnx.Rngs):
        self.token_embedding = Embedding(c.vocab_size, c.hidden_size, rngs=rngs)
        self.position_embedding = Embedding(c.max_position_embeddings, c.hidden_size, rngs=rngs)
        self.positions = c.max_position_embeddings

    def __call__(self, input_ids: Int[Array, "b l"]) -> Float[Array, "b l d"]:
        length = input_ids.shape[1]
        if length > self.positions:  # JAX would clamp the index, without an error
            raise ValueError(f"CLIPModel: {length} tokens; there are {self.positions} positions")
        x = self.token_embedding(input_ids)
        return x + self.position_embedding(jnp.arange(length)).astype(x.dtype)


class VisionEmbeddings(nnx.Module):
    """One class token and one token a patch, row by row, plus learned positions."""

    def __init__(self, c: CLIPVisionConfig, *, rngs: nnx.Rngs):
        self.patch_embedding = PatchProjection(
            c.patch_size, c.num_channels, c.hidden_size, bias=False, rngs=rngs
        )
        self.position_embedding = Embedding(
            (c.image_size // c.patch_size) ** 2 + 1, c.hidden_size, rngs=rngs
        )
        self.class_embedding = param(
            jax.random.normal(rngs.params(), (c.hidden_size,)), "class_embedding"
        )
        self.image = (c.image_size, c.image_size, c.num_channels)

    def __call__(self, pixels: Float[Array, "b h w c"]) -> Float[Array, "b n d"]:
        if pixels.shape[1:] != self.image:
            raise ValueError(
                f"CLIPModel: images of shape {pixels.shape[1:]}; accepted: {self.image}"
            )
        first = self.class_embedding.get_value().astype(pixels.dtype)
        first = jnp.broadcast_to(first, (len(pixels), 1, *first.shape))
        patches = self.patch_embedding(pixels)
        x = jnp.concatenate([first, patches.reshape(len(pixels), -1, patches.shape[-1])], axis=1)
        return x + self.position_embedding(jnp.arange(x.shape[1])).astype(x.dtype)


def encoder(c: TowerConfig, rngs: nnx.Rngs) -> nnx.Dict:
    """The layers of a tower, under their name in the released files."""
    return nnx.Dict(layers=stack(c.num_hidden_layers, lambda r: EncoderLayer(c, rngs=r), rngs))


def causal(length: int) -> Bool[Array, "1 1 l l"]:
    """True where a query may look: at itself and at what is before it."""
    return jnp.tril(jnp.ones((length, length), bool))[None, None]


class EncoderLayer(nnx.Module):
    """A pre-norm layer: attention, then MLP, each added to its input."""

    def __init__(self, c: TowerConfig, *, rngs: nnx.Rngs):
        self.self_attn = Attention(c, rngs=rngs)
        self.layer_norm1 = LayerNorm(c.hidden_size, eps=c.layer_norm_eps)
        self.mlp = MLP(c.hidden_size, c.intermediate_size, c.hidden_act, rngs=rngs)
        self.layer_norm2 = LayerNorm(c.hidden_size, eps=c.layer_norm_eps)

    def __call__(
        self, x: Float[Array, "b l d"], mask: Bool[Array, "#b 1 l l"] | None
    ) -> Float[Array, "b l d"]:
        x = x + self.self_attn(self.layer_norm1(x), mask)
        return x + self.mlp(self.layer_norm2(x))


class Attention(nnx.Module):
    """Softmax attention of one sequence to itself."""

    def __init__(self, c: TowerConfig, *, rngs: nnx.Rngs):
        d = c.hidden_size
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            Linear(d, d, rngs=rngs) for _ in range(4)
        )
        self.heads = c.num_attention_heads

    def __call__(
        self, x: Float[Array, "b l d"], mask: Bool[Array, "#b 1 l l"] | None
    ) -> Float[Array, "b l d"]:
        def heads(y):
            return y.reshape(*y.shape[:2], self.heads, -1)

        out = attention_forward(
            heads(self.q_proj(x)), heads(self.k_proj(x)), heads(self.v_proj(x)), mask
        )
        return self.out_proj(out.reshape(x.shape))


class MLP(nnx.Module):
    """Two linears with an activation between them."""

    def __init__(self, d: int, hidden: int, act: str, *, rngs: nnx.Rngs):
        self.fc1 = Linear(d, hidden, rngs=rngs)
        self.fc2 = Linear(hidden, d, rngs=rngs)
        self.act = act

    def __call__(self, x: Float[Array, "b l d"]) -> Float[Array, "b l d"]:
        return self.fc2(ACTIVATIONS[self.act](self.fc1(x)))
