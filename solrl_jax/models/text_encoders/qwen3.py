"""Qwen3's decoder as a text encoder (arXiv 2505.09388, section 2): `Qwen3Model` of transformers in
Flax NNX.

A causal transformer. Groups of query heads share keys and values, and each head of queries and keys
is normalized before it is rotated. Released pipelines read hidden states from inside the network,
which therefore ends at the last layer that is needed.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from solrl_jax.models.layers.embeddings import Embedding
from solrl_jax.models.layers.stack import scan_blocks, stack
from solrl_jax.models.loading.component import Component
from solrl_jax.models.loading.config_file import ReleasedConfig, with_rope_theta
from solrl_jax.models.loading.weights import locate_tensors
from solrl_jax.models.text_encoders.decoder import (
    GroupedQueryAttention,
    PreNormLayer,
    causal_mask,
    require_full_attention,
)


@dataclasses.dataclass(frozen=True)
class Qwen3Config(ReleasedConfig):
    """The configuration of Qwen3: the fields of a `config.json` (of transformers 4 or 5) that its
    hidden states depend on.

    Other fields of the file are ignored, but `from_dict` raises ValueError for those that would
    change the network (another `model_type`, `quantization_config`, sliding attention, a scaled
    rotary embedding). The constructor raises ValueError for a value that is not supported. The
    defaults are those of Qwen3 4B.

    Attributes:
        vocab_size: number of tokens in the vocabulary.
        hidden_size: number of features of a token.
        intermediate_size: hidden width of the MLPs.
        num_hidden_layers: number of layers of the whole network.
        num_attention_heads: number of query heads.
        num_key_value_heads: number of key and value heads, a divisor of `num_attention_heads`.
        head_dim: number of features of one head, an even number.
        hidden_act: "silu", the only supported value.
        rms_norm_eps: epsilon of all norms.
        rope_theta: base of the rotary frequencies.
        attention_bias: whether the linear layers to queries, keys, values and output have biases.
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
        """Makes a configuration from the contents of a `config.json`, and checks it.

        Missing fields get their defaults, and unknown ones are ignored. `rope_theta` may also be
        inside `rope_parameters` (or, if `rope_parameters` is missing or empty, inside
        `rope_scaling`), and takes precedence there.

        Args:
            fields: the contents. They are not changed.

        Returns:
            The configuration.

        Raises:
            ValueError: a field has a type or value that is not supported, `model_type` is present
                but not "qwen3", `quantization_config` is set, the attention of a layer is sliding,
                or the rotary embedding is scaled. The message names the field.
        """
        config = super().from_dict(with_rope_theta(cls.network, fields))
        require_full_attention(cls.network, fields, config.num_hidden_layers)
        return config

    def check(self) -> None:
        """Checks the values of the fields.

        Raises:
            ValueError: `hidden_act` is not "silu"; `num_key_value_heads` does not divide
                `num_attention_heads`; or `head_dim` is odd. The message names the field.
        """
        self.require_one_of("hidden_act", ("silu",))
        self.require(
            self.num_attention_heads % self.num_key_value_heads == 0,
            "num_key_value_heads",
            f"a divisor of num_attention_heads={self.num_attention_heads}",
        )
        self.require(self.head_dim % 2 == 0, "head_dim", "an even number (rotary pairs)")


def open_qwen3(folder: Path, config: Qwen3Config, states: Sequence[int]) -> Component:
    """Opens a released Qwen3 as a text encoder, up to the last hidden state that is needed. No file
    is read.

    Later layers and the language-model head in the files are ignored.

    Args:
        folder: the text encoder's folder, with the weights.
        config: configuration of the whole network.
        states: indices of the hidden states that the network returns. State 0 is the embedded
            tokens, and state i the output of layer i, counted from 1. The largest index is at least
            1 and less than `config.num_hidden_layers`. A negative index, which is not checked,
            returns state 0.

    Returns:
        The network `Qwen3Model` without its parameters, which can be loaded from `folder`.

    Raises:
        ValueError: the largest index is out of range, or `states` is empty.
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
    """Qwen3 as a text encoder: the token embedding and the layers up to the last hidden state that
    is needed.

    Args:
        config: configuration of the whole network (`Qwen3Config`).
        states: indices of the hidden states to return, in any order: state 0 is the embedded
            tokens, and state i the output of layer i, counted from 1, without a norm. The largest
            index, which must be at least 1, is the number of layers that are built. Only
            `open_qwen3` compares it with `config.num_hidden_layers`.
        rngs: random number generators for the initial weights.
    """

    def __init__(self, config: Qwen3Config, states: Sequence[int], *, rngs: nnx.Rngs):
        self.states = tuple(states)
        self.depth = max(states)
        self.model = nnx.Dict(
            embed_tokens=Embedding(config.vocab_size, config.hidden_size, rngs=rngs),
            layers=stack(self.depth, lambda rngs: decoder_layer(config, rngs), rngs),
        )

    def __call__(
        self, input_ids: Int[Array, "b l"], attention_mask: Bool[Array, "b l"]
    ) -> Float[Array, "b l kd"]:
        """Returns the hidden states that the constructor's `states` list, concatenated along the
        features in that order.

        Args:
            input_ids: token numbers, below `vocab_size`, at positions 0 to l - 1.
            attention_mask: true on tokens, false on the padding after them, which is not attended
                to.

        Returns:
            [b, l, k d] for k states of d (`hidden_size`) features, not normalized, in the dtype of
            the token embedding. Padding has states too, the same as in transformers.
        """
        x = self.model.embed_tokens(input_ids)
        mask = causal_mask(attention_mask)
        layer_index = jnp.arange(1, self.depth + 1)
        is_output = layer_index[:, None] == jnp.array(self.states)  # [layer, state]

        def apply(
            layer: PreNormLayer, carry: tuple[Array, Array], is_output: Bool[Array, " k"]
        ) -> tuple[Array, Array]:
            x, outputs = carry
            x = layer(x, mask)
            return x, jnp.where(is_output[:, None, None, None], x, outputs)

        outputs = jnp.stack([x] * len(self.states))
        _, outputs = scan_blocks(self.model.layers, apply, (x, outputs), is_output)
        return jnp.concatenate(list(outputs), axis=-1)


def decoder_layer(config: Qwen3Config, rngs: nnx.Rngs) -> PreNormLayer:
    """Builds one layer. Its attention normalizes each head of queries and keys before it rotates
    them.

    Args:
        config: configuration of the network.
        rngs: random number generators for the initial weights.

    Returns:
        The layer: grouped-query attention, then a SiLU-gated MLP, each after an RMSNorm. It is
        called with tokens and a mask.
    """
    attention = GroupedQueryAttention(
        config.hidden_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        config.rope_theta,
        input_bias=config.attention_bias,
        output_bias=config.attention_bias,
        norm_eps=config.rms_norm_eps,
        rngs=rngs,
    )
    return PreNormLayer(
        attention, config.hidden_size, config.intermediate_size, config.rms_norm_eps, rngs=rngs
    )
