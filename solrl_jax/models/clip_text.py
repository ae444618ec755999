"""CLIP's text tower by itself, as FLUX and Stable Diffusion 3 condition on it: `CLIPTextModel` and
`CLIPTextModelWithProjection` of transformers in Flax NNX, over the tower of `models.clip`.

Not only the state at the end of text is wanted, but those of all tokens, before the last layer (the choice of SDXL, arXiv
2307.01952, section 2.1, kept by Stable Diffusion 3) and after it. Padding is not masked: it comes last, the tower is causal.
"""

import dataclasses
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from solrl_jax.models.clip import CLIPTextConfig, TextModel
from solrl_jax.models.layers import Linear, gather


@dataclasses.dataclass(frozen=True)
class CLIPTextEncoderConfig(CLIPTextConfig):
    """The fields of a text encoder's own `config.json`. `projection_dim` is without meaning for `CLIPTextModel`."""

    projection_dim: int = 512

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        """From a `config.json` of transformers 4 or 5. Raises ValueError naming a field with an unsupported value."""
        if (kind := fields.get("model_type", "clip_text_model")) != "clip_text_model":
            raise ValueError(f"{cls.__name__}: model_type={kind!r}; accepted: 'clip_text_model'")
        return super().from_dict(fields)


class CLIPTextOutput(NamedTuple):
    """penultimate: the states that the last layer takes in, not normalised (`hidden_states[-2]` in transformers);
    last: those that it gives out, normalised; pooled: `last` at the end of text, projected where the model has a projection."""

    penultimate: Float[Array, "b l d"]
    last: Float[Array, "b l d"]
    pooled: Float[Array, "b e"]


class CLIPTextModel(nnx.Module):
    def __init__(self, config: CLIPTextEncoderConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.text_model = TextModel(config, rngs=rngs)

    def __call__(self, input_ids: Int[Array, "b l"]) -> CLIPTextOutput:
        """In the dtype of the token table. Each text holds an end of text; no more tokens than `max_position_embeddings`."""
        return encode(self.text_model, input_ids)


class CLIPTextModelWithProjection(nnx.Module):
    def __init__(self, config: CLIPTextEncoderConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.text_model = TextModel(config, rngs=rngs)
        self.text_projection = Linear(config.hidden_size, config.projection_dim, bias=False, rngs=rngs)

    def __call__(self, input_ids: Int[Array, "b l"]) -> CLIPTextOutput:
        """As `CLIPTextModel`, with `pooled` in the space that texts and images share."""
        out = encode(self.text_model, input_ids)
        return out._replace(pooled=self.text_projection(out.pooled))


def encode(tower: TextModel, input_ids: Int[Array, "b l"]) -> CLIPTextOutput:
    """All states of a text tower. The scan carries one layer's input beside its output: no other state is kept."""
    causal = jnp.tril(jnp.ones((input_ids.shape[1],) * 2, bool))[None, None]
    graphdef, params = nnx.split(tower.encoder.layers)

    def step(states, layer):
        x, _ = states
        return (nnx.merge(graphdef, gather(layer))(x, causal), x), None

    x = tower.embeddings(input_ids)
    (x, penultimate), _ = jax.lax.scan(step, (x, x), params)
    last = tower.final_layer_norm(x)
    return CLIPTextOutput(penultimate, last, tower.at_end(last, input_ids))
