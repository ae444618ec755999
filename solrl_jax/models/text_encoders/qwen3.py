"""Qwen3's decoder as a text encoder (arXiv 2505.09388, section 2): `Qwen3Model` of transformers in
Flax NNX.

A causal transformer. Groups of query heads share keys and values, and each head of queries and keys
is normalised before it is rotated. Released pipelines read hidden states from inside the network,
which therefore ends at the last layer that is needed.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from solrl_jax.models.layers.attention import attention
from solrl_jax.models.layers.embeddings import Embedding
from solrl_jax.models.layers.linear import Linear
from solrl_jax.models.layers.norm import RMSNorm
from solrl_jax.models.layers.stack import scan_blocks, stack
from solrl_jax.models.loading.component import Component
from solrl_jax.models.loading.config_file import ReleasedConfig, unsupported, with_rope_theta
from solrl_jax.models.loading.weights import locate_tensors
from solrl_jax.models.text_encoders.gemma2 import GatedMLP, rotate


@dataclasses.dataclass(frozen=True)
class Qwen3Config(ReleasedConfig):
    """The fields of a `config.json`, of transformers 4 or 5, that the hidden states depend on.

    The defaults are those of 4B.
    """

    network = "Qwen3Model"
    model_type = "qwen3"

    vocab_size: int = 151936
    hidden_size: int = 2560
    intermediate_size: int = 9728
    num_hidden_layers: int = 36
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1000000.0
    attention_bias: bool = False

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Qwen3Config":
        """Makes a configuration from the contents of a `config.json`.

        Raises ValueError for a field that is not supported, such as sliding attention.
        """
        config = super().from_dict(with_rope_theta(cls.network, fields))
        full_attention = ["full_attention"] * config.num_hidden_layers
        for name, accepted in (("use_sliding_window", False), ("layer_types", full_attention)):
            value = fields.get(name)
            if value is not None and value != accepted:
                raise unsupported(cls.network, name, value, "full causal attention in every layer")
        return config

    def check(self) -> None:
        """Raises ValueError if a field has a value that this port does not support."""
        self.require_one_of("hidden_act", ("silu",))
        self.require(
            self.num_attention_heads % self.num_key_value_heads == 0,
            "num_key_value_heads",
            f"a divisor of num_attention_heads={self.num_attention_heads}",
        )
        self.require(self.head_dim % 2 == 0, "head_dim", "an even number (rotary pairs)")


def open_qwen3(folder: Path, config: Qwen3Config, states: Sequence[int]) -> Component:
    """Opens the network of a released folder, up to the last hidden state that is needed. No weight
    is read.

    The files may also hold a language-model head and the remaining layers, which are ignored.

    Args:
        folder: the text encoder's folder.
        config: its configuration.
        states: indices of the hidden states to return; see `Qwen3Model`.

    Raises:
        ValueError: the network has too few layers.
    """
    last = max(states)
    if not 1 <= last < config.num_hidden_layers:
        raise ValueError(
            f"{folder / 'config.json'}: num_hidden_layers={config.num_hidden_layers}; "
            f"accepted: more than {max(last, 1)}, for the hidden states {tuple(states)}"
        )
    unused = ["norm.", *(f"layers.{i}." for i in range(last, config.num_hidden_layers))]
    # all names in the files may begin with "model."
    prefixes = ("lm_head.", *unused, *(f"model.{name}" for name in unused))
    return Component.from_builder(
        folder,
        lambda rngs: Qwen3Model(config, states, rngs=rngs),
        partial(locate_tensors, unused=prefixes),
    )


class Qwen3Model(nnx.Module):
    """The token embedding and the layers of the decoder, up to the last one that is needed.

    Args:
        config: configuration of the whole network.
        states: indices of the hidden states to return. As in transformers, state 0 is the embedded
            tokens and state i the output of layer i. The output of the last layer, which
            transformers normalises, is not available.
    """

    def __init__(self, config: Qwen3Config, states: Sequence[int], *, rngs: nnx.Rngs):
        self.states = tuple(states)
        self.depth = max(states)
        self.model = nnx.Dict(
            embed_tokens=Embedding(config.vocab_size, config.hidden_size, rngs=rngs),
            layers=stack(self.depth, lambda rngs: DecoderLayer(config, rngs=rngs), rngs),
        )

    def __call__(
        self, input_ids: Int[Array, "b l"], attention_mask: Bool[Array, "b l"]
    ) -> Float[Array, "b l kd"]:
        """Returns the k hidden states in `states`, concatenated along the features, in the token
        embedding's dtype.

        Args:
            input_ids: tokens.
            attention_mask: true on tokens, false on the padding after them, to which no token
                attends. Padding attends to the tokens, so its states equal those of transformers
                too.
        """
        x = self.model.embed_tokens(input_ids)
        position = jnp.arange(input_ids.shape[1])
        mask = (position[:, None] >= position) & attention_mask[:, None, None, :]
        layer_index = jnp.arange(1, self.depth + 1)
        is_output = layer_index[:, None] == jnp.array(self.states)  # [layer, state]

        def apply(
            layer: DecoderLayer, carry: tuple[Array, Array], is_output: Bool[Array, " k"]
        ) -> tuple[Array, Array]:
            x, outputs = carry
            x = layer(x, mask)
            return x, jnp.where(is_output[:, None, None, None], x, outputs)

        outputs = jnp.stack([x] * len(self.states))
        _, outputs = scan_blocks(self.model.layers, apply, (x, outputs), is_output)
        return jnp.concatenate(list(outputs), axis=-1)


class DecoderLayer(nnx.Module):
    """Attention, then a gated MLP. Each is normalised before, and added to its input."""

    def __init__(self, config: Qwen3Config, *, rngs: nnx.Rngs):
        self.self_attn = Attention(config, rngs=rngs)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, jax.nn.silu, rngs=rngs)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def __call__(
        self, x: Float[Array, "b l d"], mask: Bool[Array, "b 1 l l"]
    ) -> Float[Array, "b l d"]:
        """Applies the layer. `mask` is true where a query attends to a key."""
        x = x + self.self_attn(self.input_layernorm(x), mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions.

    Each head of queries and keys is normalised on its own.
    """

    def __init__(self, config: Qwen3Config, *, rngs: nnx.Rngs):
        def linear(n_in, n_out):
            return Linear(n_in, n_out, bias=config.attention_bias, rngs=rngs)

        width = config.hidden_size
        query_width = config.num_attention_heads * config.head_dim
        key_width = config.num_key_value_heads * config.head_dim
        self.q_proj = linear(width, query_width)
        self.k_proj = linear(width, key_width)
        self.v_proj = linear(width, key_width)
        self.o_proj = linear(query_width, width)
        self.q_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.config = config

    def __call__(
        self, x: Float[Array, "b l d"], mask: Bool[Array, "b 1 l l"]
    ) -> Float[Array, "b l d"]:
        """Applies attention. `mask` is true where a query attends to a key."""
        config = self.config

        def heads(y):
            return y.reshape(*y.shape[:2], -1, config.head_dim)

        q = rotate(self.q_norm(heads(self.q_proj(x))), config.rope_theta)
        k = rotate(self.k_norm(heads(self.k_proj(x))), config.rope_theta)
        out = attention(q, k, heads(self.v_proj(x)), mask)
        return self.o_proj(out.reshape(*x.shape[:2], -1))
