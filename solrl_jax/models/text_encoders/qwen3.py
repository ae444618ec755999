"""Qwen3's decoder as a text encoder (arXiv 2505.09388, section 2): `Qwen3Model` of transformers in Flax NNX.

A causal transformer. Groups of query heads share keys and values; each head of queries and keys is normalised before it is
rotated. Released pipelines read hidden states from inside it, so the network ends at the last layer that is asked for.
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
from solrl_jax.models.text_encoders.gemma2 import MLP, rotate


@dataclasses.dataclass(frozen=True)
class Qwen3Config(ReleasedConfig):
    """The fields of a `config.json`, of transformers 4 or 5, that the hidden states depend on. The defaults are those of 4B."""

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
        config = super().from_dict(with_rope_theta(cls.network, fields))
        full = ["full_attention"] * config.num_hidden_layers
        for name, accepted in (("use_sliding_window", False), ("layer_types", full)):
            if (value := fields.get(name)) not in (None, accepted):
                raise unsupported(
                    cls.network, name, value, "attention to all tokens before, in every layer"
                )
        return config

    def check(self) -> None:
        self.require_one_of("hidden_act", ("silu",))
        fits = self.num_attention_heads % self.num_key_value_heads == 0
        self.require(
            fits,
            "num_key_value_heads",
            f"a divisor of num_attention_heads={self.num_attention_heads}",
        )
        self.require(self.head_dim % 2 == 0, "head_dim", "an even number (rotary pairs)")


def open_qwen3(folder: Path, config: Qwen3Config, states: Sequence[int]) -> Component:
    """The network in a released folder, up to the last of the hidden states that are asked for (see `Qwen3Model`).

    The files may hold a language-model head and the layers above, which are passed over, and may leave out "model.", with which
    all names begin.
    """
    last = max(states)
    if not 1 <= last < config.num_hidden_layers:
        have = f"num_hidden_layers={config.num_hidden_layers}"
        wanted = f"more than {max(last, 1)}"
        raise ValueError(
            f"{folder / 'config.json'}: {have}; accepted: {wanted}, for the hidden states {tuple(states)}"
        )
    above = ["norm.", *(f"layers.{i}." for i in range(last, config.num_hidden_layers))]
    unused = ("lm_head.", *above, *(f"model.{name}" for name in above))
    return Component.from_builder(
        folder, lambda r: Qwen3Model(config, states, rngs=r), partial(locate_tensors, unused=unused)
    )


class Qwen3Model(nnx.Module):
    """The token table and the decoder's layers.

    states: the hidden states to return, as transformers counts them: state 0 is the embedded tokens, state `i` what the `i`-th
    layer makes, below the last one, which transformers normalises. Layers above the highest are not built.
    """

    def __init__(self, config: Qwen3Config, states: Sequence[int], *, rngs: nnx.Rngs):
        c = config
        self.states = tuple(states)
        self.depth = max(states)
        self.model = nnx.Dict(
            embed_tokens=Embedding(c.vocab_size, c.hidden_size, rngs=rngs),
            layers=stack(self.depth, lambda r: DecoderLayer(c, rngs=r), rngs),
        )

    def __call__(
        self, input_ids: Int[Array, "b l"], attention_mask: Bool[Array, "b l"]
    ) -> Float[Array, "b l kd"]:
        """The `k` hidden states [b, l, k d] that `states` names, side by side in its order, in the dtype of the token table.

        attention_mask: true on tokens, false on the padding after them, which no token sees. Padding sees the tokens: its
        states are those of transformers, too.
        """
        x = self.model.embed_tokens(input_ids)
        position = jnp.arange(input_ids.shape[1])
        mask = (position[:, None] >= position) & attention_mask[:, None, None, :]
        reached = jnp.arange(1, self.depth + 1)[:, None] == jnp.array(self.states)  # [layer, state]

        def apply(
            layer: DecoderLayer, carried: tuple[Array, Array], reached: Bool[Array, " k"]
        ) -> tuple[Array, Array]:
            x = layer(carried[0], mask)
            return x, jnp.where(reached[:, None, None, None], x, carried[1])

        _, kept = scan_blocks(
            self.model.layers, apply, (x, jnp.stack([x] * len(self.states))), reached
        )
        return jnp.concatenate(list(kept), axis=-1)


class DecoderLayer(nnx.Module):
    """Attention, then MLP: both pre-norm, and added to their input. mask: true where a query may look."""

    def __init__(self, c: Qwen3Config, *, rngs: nnx.Rngs):
        self.self_attn = Attention(c, rngs=rngs)
        self.mlp = MLP(c.hidden_size, c.intermediate_size, jax.nn.silu, rngs=rngs)
        self.input_layernorm, self.post_attention_layernorm = (
            RMSNorm(c.hidden_size, eps=c.rms_norm_eps) for _ in range(2)
        )

    def __call__(
        self, x: Float[Array, "b l d"], mask: Bool[Array, "b 1 l l"]
    ) -> Float[Array, "b l d"]:
        x = x + self.self_attn(self.input_layernorm(x), mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions. Each head of queries and keys is normalised on its own."""

    def __init__(self, c: Qwen3Config, *, rngs: nnx.Rngs):
        def linear(n_in, n_out):
            return Linear(n_in, n_out, bias=c.attention_bias, rngs=rngs)

        self.q_proj = linear(c.hidden_size, c.num_attention_heads * c.head_dim)
        self.k_proj, self.v_proj = (
            linear(c.hidden_size, c.num_key_value_heads * c.head_dim) for _ in range(2)
        )
        self.o_proj = linear(c.num_attention_heads * c.head_dim, c.hidden_size)
        self.q_norm, self.k_norm = (RMSNorm(c.head_dim, eps=c.rms_norm_eps) for _ in range(2))
        self.config = c

    def __call__(
        self, x: Float[Array, "b l d"], mask: Bool[Array, "b 1 l l"]
    ) -> Float[Array, "b l d"]:
        c = self.config

        def heads(y):
            return y.reshape(*y.shape[:2], -1, c.head_dim)

        q = self.q_norm(heads(self.q_proj(x)))
        k = self.k_norm(heads(self.k_proj(x)))
        out = attention(
            rotate(q, c.rope_theta), rotate(k, c.rope_theta), heads(self.v_proj(x)), mask
        )
        return self.o_proj(out.reshape(*x.shape[:2], -1))
