"""Softmax attention layers: projections to queries, keys and values, attention, output
projection.
"""

from flax import nnx
from jaxtyping import Array, Float, Int

from solrl_jax.models.layers.activation import Activation, as_lazy, concat_features
from solrl_jax.models.layers.ada_layer_norm import EPS
from solrl_jax.models.layers.attention import attention, attention_forward
from solrl_jax.models.layers.attention_fp8 import E4M3, attention_fp8
from solrl_jax.models.layers.feed_forward import silu_gate
from solrl_jax.models.layers.linear import Linear
from solrl_jax.models.layers.norm import RMSNorm
from solrl_jax.models.layers.rotary import Rotation, rotate
from solrl_jax.quant.lazy import LazyActivation, materialize_heads
from solrl_jax.quant.sequence_parallel import gather_tokens


def project_qkv(
    x: LazyActivation,
    to_q: Linear,
    to_k: Linear,
    to_v: Linear,
    norm_q: RMSNorm | None,
    norm_k: RMSNorm | None,
    rotation: Rotation | None,
    start: int,
) -> list[LazyActivation]:
    """Computes queries, keys and values of a sequence, with the heads side by side.

    Queries and keys are projected, then normalized, then rotated. Values are only projected.

    Args:
        x: The tokens that the attention reads [b, s, d].
        to_q: The linear layer that computes the queries of all heads from `x`.
        to_k: The linear layer that computes the keys of all heads from `x`.
        to_v: The linear layer that computes the values of all heads from `x`.
        norm_q: The norm that is applied to each head of the queries. None: no norm.
        norm_k: The norm that is applied to each head of the keys. None: no norm.
        rotation: (cosines, sines) of the rotary angles of all positions: two float32 arrays [b or
            1, positions, head_dim / 2]. None: no rotation.
        start: The position of the first token of `x` in the whole sequence, an index into
            `rotation`.

    Returns:
        A list [queries, keys, values] of lazy activations [b, s, d]. The matmuls are computed now;
        biases, norms and rotations are computed when the attention reads them.
    """
    q = to_q.lazy(x)
    if norm_q is not None:
        q = norm_q.per_head(q)
    k = to_k.lazy(x)
    if norm_k is not None:
        k = norm_k.per_head(k)
    return [rotate(q, rotation, start), rotate(k, rotation, start), to_v.lazy(x)]


def attend(
    head_dim: int,
    *streams: list[LazyActivation],
    key_lengths: Int[Array, " b"] | None = None,
    fp8_attention: bool = False,
    replicated: int | None = None,
) -> Float[Array, "b s d"]:
    """Computes softmax attention over the tokens of one or more streams (such as text and image),
    which form one sequence.

    Under sequence parallelism, the streams and the result hold the tokens of one device, which
    attend to those of all devices. No gradient may be taken of the result with `fp8_attention`, or
    if one of the layers that computed queries, keys and values is quantized.

    Args:
        head_dim: The number of features of one head.
        *streams: One list [queries, keys, values] per stream, in the order of the sequence. Each is
            [b, s_i, d], with heads side by side.
        key_lengths: The number of leading keys of the sequence (of all devices) that each sample
            attends to, at least 1. None: all. With `fp8_attention` it is ignored, and all keys are
            attended to.
        fp8_attention: Whether attention is computed in FP8: queries, keys, values and result are in
            E4M3. No gradient may be taken. Accelerators without FP8 attention compute in BF16 from
            the rounded inputs.
        replicated: The index of the stream, the first or the last one, that sequence parallelism
            does not shard: every device has all of its tokens. None: the tokens of all streams are
            sharded together.

    Returns:
        The attended values [b, sum of s_i, d], heads side by side: in E4M3 if `fp8_attention` is
        set, otherwise in the dtype of the first stream.
    """
    q, k, v = (
        materialize_heads(pieces, head_dim, E4M3 if fp8_attention else None)
        for pieces in zip(*streams, strict=True)
    )
    lengths = [stream[0].num_rows for stream in streams]
    start = lengths[0] if replicated == 0 else 0
    stop = start + (q.shape[1] if replicated is None else q.shape[1] - lengths[replicated])
    k, v = (gather_tokens(x, start, stop) for x in (k, v))
    if fp8_attention:
        out = attention_fp8(q, k, v)
    elif streams[0][0].exact:
        out = attention(q, k, v, key_lengths)
    else:
        out = attention_forward(q, k, v, key_lengths)  # no gradient is taken of quantized layers
    return out.reshape(*q.shape[:2], -1)


class QKVProjection(nnx.Module):
    """The linear layers that compute queries, keys and values of one sequence, and norms of queries
    and keys.

    Args:
        d: The number of features of the tokens, and of all heads together, a multiple of
            `head_dim`.
        head_dim: The number of features of one head.
        normed: Whether each head of queries and keys is normalized (RMSNorm).
        bias: Whether the linear layers have biases.
        eps: The epsilon of the norms, 1e-6 by default.
        rngs: Random number generators for the initial weights.
    """

    def __init__(
        self,
        d: int,
        head_dim: int,
        *,
        normed: bool,
        bias: bool = True,
        eps: float = EPS,
        rngs: nnx.Rngs,
    ):
        self.to_q, self.to_k, self.to_v = (Linear(d, d, bias=bias, rngs=rngs) for _ in range(3))
        self.norm_q, self.norm_k = (
            RMSNorm(head_dim, eps=eps) if normed else None for _ in range(2)
        )
        self.head_dim = head_dim

    def project(
        self, x: LazyActivation, rotation: Rotation | None, start: int = 0
    ) -> list[LazyActivation]:
        """Computes queries, keys and values of a sequence. Queries and keys are normalized per
        head, if the layer has norms, then rotated.

        Args:
            x: The sequence [b, s, d].
            rotation: (cosines, sines) of the rotary angles of all positions: two float32 arrays [b
                or 1, positions, head_dim / 2]. None: no rotation.
            start: The position of the first token of `x` in the whole sequence, an index into
                `rotation`.

        Returns:
            A list [queries, keys, values] of lazy activations [b, s, d] with the heads side by
            side. The matmuls are computed now; biases, norms and rotations are computed when the
            attention reads them.
        """
        return project_qkv(
            x, self.to_q, self.to_k, self.to_v, self.norm_q, self.norm_k, rotation, start
        )


class SelfAttention(QKVProjection):
    """Softmax attention of one sequence to itself.

    Args:
        d: The number of features of the tokens, and of all heads together, a multiple of
            `head_dim`.
        head_dim: The number of features of one head.
        normed: Whether each head of queries and keys is normalized (RMSNorm).
        projected: Whether there is an output layer, `to_out[0]`. If not, the call returns the heads
            side by side.
        bias: Whether the linear layers, the output layer included, have biases.
        eps: The epsilon of the norms, 1e-6 by default.
        rngs: Random number generators for the initial weights.
    """

    def __init__(
        self,
        d: int,
        head_dim: int,
        *,
        normed: bool,
        projected: bool = True,
        bias: bool = True,
        eps: float = EPS,
        rngs: nnx.Rngs,
    ):
        super().__init__(d, head_dim, normed=normed, bias=bias, eps=eps, rngs=rngs)
        self.to_out = nnx.List([Linear(d, d, bias=bias, rngs=rngs)]) if projected else None

    def __call__(
        self,
        x: Activation,
        rotation: Rotation | None = None,
        key_lengths: Int[Array, " b"] | None = None,
        *,
        fp8_attention: bool = False,
    ) -> Float[Array, "b s d"]:
        """Applies softmax attention of the tokens to each other, and the output layer if there is
        one. Heads of queries and keys are normalized if the layer has norms, then rotated.

        Args:
            x: The input [b, s, d], an array or a lazy activation (one that is computed when it is
                read). Under sequence parallelism, the s tokens of this device, which attend to
                those of all devices.
            rotation: Cosines and sines of the rotary angles of the s positions: two float32 arrays
                [b or 1, s, head_dim / 2]. None: no rotation.
            key_lengths: The number of leading tokens (of all devices) that each sample attends to,
                at least 1. None: all. With `fp8_attention` it is ignored, and all tokens are
                attended to.
            fp8_attention: Whether attention is computed in FP8: queries, keys, values and result
                are in E4M3. No gradient may be taken. Accelerators without FP8 attention compute in
                BF16 from the rounded inputs.

        Returns:
            The output [b, s, d] in the dtype of `x`; but in E4M3 with `fp8_attention` and without
            an output layer. The input is not added.
        """
        x = as_lazy(x)
        out = attend(
            self.head_dim,
            self.project(x, rotation),
            key_lengths=key_lengths,
            fp8_attention=fp8_attention,
        )
        return out if self.to_out is None else self.to_out[0](as_lazy(out, x.dtype))


class JointAttention(QKVProjection):
    """Softmax attention over text and image as one sequence, text first, with separate weights for
    the two (arXiv 2403.03206, section 4).

    The text's layers are `add_q_proj`, `add_k_proj`, `add_v_proj`, `to_add_out`, `norm_added_q` and
    `norm_added_k`, as in diffusers.

    Args:
        d: The number of features of the tokens, and of all heads together, a multiple of
            `head_dim`.
        head_dim: The number of features of one head.
        normed: Whether each head of queries and keys is normalized (RMSNorm).
        bias: Whether the linear layers, the output layers included, have biases.
        last: Whether to leave out the text's output layer, because the text's output is not needed.
        rngs: Random number generators for the initial weights.
    """

    def __init__(
        self,
        d: int,
        head_dim: int,
        *,
        normed: bool,
        bias: bool = True,
        last: bool = False,
        rngs: nnx.Rngs,
    ):
        super().__init__(d, head_dim, normed=normed, bias=bias, rngs=rngs)

        def linear() -> Linear:
            return Linear(d, d, bias=bias, rngs=rngs)

        self.to_out = nnx.List([linear()])
        self.add_q_proj, self.add_k_proj, self.add_v_proj = (linear() for _ in range(3))
        self.norm_added_q, self.norm_added_k = (
            RMSNorm(head_dim, eps=EPS) if normed else None for _ in range(2)
        )
        self.to_add_out = None if last else linear()

    def __call__(
        self,
        text: Activation,
        image: Activation,
        rotation: Rotation | None = None,
        *,
        fp8_attention: bool = False,
    ) -> tuple[Float[Array, "b l d"] | None, Float[Array, "b n d"]]:
        """Applies softmax attention over text and image as one sequence, and a separate output
        layer for each. Heads of queries and keys are normalized if the layer has norms, then
        rotated.

        Args:
            text: The text tokens [b, l, d], an array or a lazy activation (one that is computed
                when it is read).
            image: The image tokens [b, n, d], an array or a lazy activation (one that is computed
                when it is read). Under sequence parallelism, the n tokens of this device, which
                attend to those of all devices; every device has all of the text.
            rotation: Cosines and sines of the rotary angles of the l + n positions, text first: two
                float32 arrays [b or 1, l + n, head_dim / 2]. None: no rotation.
            fp8_attention: Whether attention is computed in FP8: queries, keys, values and result
                are in E4M3. No gradient may be taken. Accelerators without FP8 attention compute in
                BF16 from the rounded inputs.

        Returns:
            The outputs for the text (None if this is the `last` layer) and for the image, each in
            the dtype of its stream. The inputs are not added.
        """
        text = as_lazy(text)
        image = as_lazy(image)
        length = text.num_rows
        text_qkv = project_qkv(
            text,
            self.add_q_proj,
            self.add_k_proj,
            self.add_v_proj,
            self.norm_added_q,
            self.norm_added_k,
            rotation,
            start=0,
        )
        image_qkv = self.project(image, rotation, start=length)
        out = attend(self.head_dim, text_qkv, image_qkv, fp8_attention=fp8_attention, replicated=0)
        text_out = None
        if self.to_add_out is not None:
            text_out = self.to_add_out(LazyActivation.from_array(out, (0, length), text.dtype))
        image_rows = LazyActivation.from_array(out, (length, out.shape[1]), image.dtype)
        return text_out, self.to_out[0](image_rows)


class ParallelAttention(nnx.Module):
    """Self-attention and a SiLU-gated MLP that read the same input (arXiv 2302.05442, section 2),
    without biases.

    A first linear layer computes queries, keys and values and the MLP's gate and value; a second
    one maps the results of attention and MLP together to the output. Each head of queries and keys
    is normalized (RMSNorm).

    Args:
        d: The number of features of the tokens, and of all heads together, a multiple of
            `head_dim`.
        head_dim: The number of features of one head.
        hidden: The hidden width of the MLP, after its gate.
        rngs: Random number generators for the initial weights.
    """

    def __init__(self, d: int, head_dim: int, hidden: int, *, rngs: nnx.Rngs):
        self.to_qkv_mlp_proj = Linear(d, 3 * d + 2 * hidden, bias=False, rngs=rngs)
        self.norm_q, self.norm_k = (RMSNorm(head_dim, eps=EPS) for _ in range(2))
        self.to_out = Linear(d + hidden, d, bias=False, rngs=rngs)
        self.widths = (d, d, d, hidden, hidden)
        self.head_dim = head_dim

    def __call__(
        self, x: Activation, rotation: Rotation, *, fp8_attention: bool = False
    ) -> Float[Array, "b s d"]:
        """Applies self-attention and the MLP to the same input, and maps both results together to
        the output.

        Args:
            x: The input [b, s, d], an array or a lazy activation (one that is computed when it is
                read). Under sequence parallelism, the s tokens of this device, which attend to
                those of all devices.
            rotation: Cosines and sines of the rotary angles of the s positions: two float32 arrays
                [b or 1, s, head_dim / 2].
            fp8_attention: Whether attention is computed in FP8: queries, keys, values and result
                are in E4M3. No gradient may be taken. Accelerators without FP8 attention compute in
                BF16 from the rounded inputs.

        Returns:
            The output [b, s, d] in the dtype of `x`. The input is not added.
        """
        x = as_lazy(x)
        q, k, v, gate, value = self.to_qkv_mlp_proj.lazy(x).split_columns(*self.widths)
        q = rotate(self.norm_q.per_head(q), rotation)
        k = rotate(self.norm_k.per_head(k), rotation)
        attended = attend(self.head_dim, [q, k, v], fp8_attention=fp8_attention)
        hidden = gate.combine(silu_gate, value)
        return self.to_out(concat_features(attended, hidden, dtype=x.dtype))
