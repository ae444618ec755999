"""CLIP's text tower alone, as FLUX and Stable Diffusion 3 use it: `CLIPTextModel` and `CLIPTextModelWithProjection` of
transformers in Flax NNX, over the tower of `models.clip`.

The pipelines want the states of all tokens, after the last layer and before it (the choice of SDXL, arXiv 2307.01952, section
2.1, kept by Stable Diffusion 3). Padding is not masked: it comes last, and the tower is causal.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from solrl_jax.models.clip import CLIPTextConfig, TextModel
from solrl_jax.models.layers import Linear, gather


class CLIPTextOutput(NamedTuple):
    """The states of a text tower."""

    penultimate: Float[Array, "b l d"]  # before the last layer, not normalised: `hidden_states[-2]` in transformers
    last: Float[Array, "b l d"]  # after the last layer, normalised
    pooled: Float[Array, "b e"]  # `last` at the end of text; projected, if the model has a projection


class CLIPTextModel(nnx.Module):
    """The text tower."""

    def __init__(self, config: CLIPTextConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.text_model = TextModel(config, rngs=rngs)

    def __call__(self, input_ids: Int[Array, "b l"]) -> CLIPTextOutput:
        """All states, in the dtype of the token table. Each text has an end of text; l is at most `max_position_embeddings`."""
        return encode(self.text_model, input_ids)


class CLIPTextModelWithProjection(nnx.Module):
    """The text tower, and the map to the space that texts and images share."""

    def __init__(self, config: CLIPTextConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.text_model = TextModel(config, rngs=rngs)
        self.text_projection = Linear(config.hidden_size, config.projection_dim, bias=False, rngs=rngs)

    def __call__(self, input_ids: Int[Array, "b l"]) -> CLIPTextOutput:
        """As `CLIPTextModel`, with `pooled` in the shared space."""
        out = encode(self.text_model, input_ids)
        return out._replace(pooled=self.text_projection(out.pooled))


def encode(tower: TextModel, input_ids: Int[Array, "b l"]) -> CLIPTextOutput:
    """All states of a text tower. The scan carries each layer's input beside its output, so no other state is kept."""
    causal = jnp.tril(jnp.ones((input_ids.shape[1],) * 2, bool))[None, None]
    graphdef, params = nnx.split(tower.encoder.layers)

    def step(states: tuple[Array, Array], layer: nnx.State) -> tuple[tuple[Array, Array], None]:
        x, _ = states
        return (nnx.merge(graphdef, gather(layer))(x, causal), x), None

    x = tower.embeddings(input_ids)
    (x, penultimate), _ = jax.lax.scan(step, (x, x), params)
    last = tower.final_layer_norm(x)
    return CLIPTextOutput(penultimate, last, tower.at_end(last, input_ids))
