"""Sequence parallelism: the tokens of latents are sharded over devices, and attention gathers keys
and values.

Along the mesh axis `sequence`, each device runs the blocks of a network on its own tokens
(`shard_tokens`): all that is computed per token sees no other token, so nothing else changes.
Queries stay where they are, and before each attention every device receives the keys and values of
all tokens (`gather_tokens`). No sum over keys is split, so a token's result does not depend on the
mesh. In the backward pass of attention, devices exchange their tokens of all samples and heads for
all tokens of some samples and heads, so no sum over queries is split either. The gradients of
adapters and of what all devices share are sums over tokens, which are added in float32.

All functions read the mesh of `jax.set_mesh`. If it has no axis `sequence`, or one of size 1,
`shard_tokens`, `gather_tokens` and `replicate_tokens` leave programs as they are. All other public
functions but `tokens_are_sharded` are for use inside `shard_tokens` alone.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Shaped

from solrl_jax.quant.mesh_axes import SEQUENCE, axis_size
from solrl_jax.quant.sharded_kernel import shard_map_kernel

TOKENS = PartitionSpec(None, SEQUENCE)  # of an array [b, tokens, ...]
REPLICATED = PartitionSpec()


def tokens_are_sharded() -> bool:
    """Returns whether the function that is traced runs inside `shard_tokens`, on the tokens of one
    of several devices.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and SEQUENCE in mesh.manual_axes


def shard_tokens(
    f: Callable[[Any, Any, Any, Any], tuple[Any, Any]],
    shared: Any,
    x: Float[Array, "b n d"],
    rotation: Any = None,
    text: Any = None,
    start: int = 0,
) -> tuple[Any, Any]:
    """Runs the blocks of a network with the tokens of latents sharded over the mesh axis
    `sequence`. Without a mesh, or if the axis has size 1, it only calls `f`.

    Args:
        f: A function `f(shared, x, rotation, text)` that returns (tokens, text): as many tokens as
            its `x` has, and the new text, which may depend on `x` through `gather_tokens` alone. It
            may close over the weights of blocks that it scans over, which are replicated.
        shared: A tree of arrays that are replicated, such as modulation vectors.
        x: The tokens that are sharded. Every device gets n / shards consecutive ones.
        rotation: A tree of arrays with one entry per position [b or 1, positions, ...]: the cosines
            and sines of rotary angles. The n entries from `start` on belong to `x` and are sharded
            with it. `f` gets, along the positions: all entries before `start`, its share of these
            n, and all entries from `start + n` on. None: no positions.
        text: An array [b, l, d] of tokens that every device computes completely, such as a text
            stream that is much shorter than the image. None: there are none.
        start: The position of the first token of `x`, an index into `rotation`.

    Returns:
        The tokens [b, n, ...], still sharded along n, and the text that `f` returns. The text is
        that of the first device, and its gradient goes to the first device alone, so that it counts
        once.

    Raises:
        ValueError: While tracing, if the number of shards does not divide n.
    """
    shards = axis_size(SEQUENCE)
    if shards == 1:
        return f(shared, x, rotation, text)
    n = x.shape[1]
    if n % shards:
        raise ValueError(
            f"mesh.sequence={shards}: must divide the {n} tokens that attend to each other"
        )
    stop = start + n

    dtypes = jax.tree.map(lambda x: x.dtype, (shared, text))

    def on_device(x: Array, local_rotation: Any, table: Any, replicated: Any) -> tuple[Any, Any]:
        shared, text = jax.tree.map(lambda x, dtype: x.astype(dtype), replicated, dtypes)

        def join(table: Array, local: Array) -> Array:
            return jnp.concatenate([table[:, :start], local, table[:, stop:]], axis=1)

        x, text = f(shared, x, jax.tree.map(join, table, local_rotation), text)
        return x, jax.tree.map(lambda x: x[None], text)

    local_rotation = jax.tree.map(lambda table: table[:, start:stop], rotation)
    # A replicated output would divide its gradient among the devices. Every device would round its
    # part to BF16 and add it to gradients of keys and values, which the first device alone has.
    x, texts = jax.shard_map(
        on_device,
        in_specs=(TOKENS, TOKENS, REPLICATED, REPLICATED),
        out_specs=(TOKENS, PartitionSpec(SEQUENCE)),
        axis_names={SEQUENCE},
        check_vma=False,
    )(x, local_rotation, rotation, jax.tree.map(_widen, (shared, text)))
    return x, jax.tree.map(lambda x: x[0], texts)


def _widen(x: Array) -> Array:
    """Casts a replicated input of `shard_tokens`, so that its gradients from all devices are added
    in float32. `shard_tokens` casts it back on each device.

    Args:
        x: An array of any dtype.

    Returns:
        The array, in float32 if it has a shorter floating-point dtype.
    """
    short = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
    return x.astype(jnp.float32) if short else x


def replicate_tokens(x: Float[Array, "b ..."]) -> Float[Array, "b ..."]:
    """Constrains an array that was made from sharded tokens to be replicated along the mesh axis
    `sequence`.

    Args:
        x: An array with one entry per sample. The sharding of the samples is left to the
            partitioner; all other axes are replicated over the whole mesh.

    Returns:
        `x` with a sharding constraint; `x` itself if the mesh axis has size 1 or there is no mesh.
    """
    if axis_size(SEQUENCE) == 1:
        return x
    spec = PartitionSpec(PartitionSpec.UNCONSTRAINED, *[None] * (x.ndim - 1))
    return jax.lax.with_sharding_constraint(x, spec)


def gather_tokens(
    x: Float[Array, "b s ..."], start: int = 0, stop: int | None = None
) -> Float[Array, "b tokens ..."]:
    """Gathers the tokens of all devices, inside `shard_tokens`. The gradients of all devices are
    added in float32.

    Args:
        x: An array with one entry per token, along the second axis. The entries from `start` up to
            `stop` are the sharded tokens of this device. Entries before and after them are tokens
            that every device has, such as text.
        start: The first entry that belongs to sharded tokens. Entries before it are kept.
        stop: The entry after the last one that belongs to sharded tokens. Entries from it on are
            kept. None: all entries up to the end are sharded.

    Returns:
        The array with all tokens, in their order; `x` itself outside `shard_tokens`.
    """
    if not tokens_are_sharded():
        return x
    stop = x.shape[1] if stop is None else stop
    gathered = _gather(x[:, start:stop])
    if stop - start == x.shape[1]:
        return gathered
    return jnp.concatenate([x[:, :start], gathered, x[:, stop:]], axis=1)


def neighbor_tokens(
    x: Float[Array, "b n ..."], count: int
) -> tuple[Float[Array, "b count ..."], Float[Array, "b count ..."]]:
    """Fetches the tokens before and after those of this device.

    For use inside `shard_tokens`, where `tokens_are_sharded()` is true.

    Args:
        x: An array with one entry per token of this device, at least `count`.
        count: How many tokens to fetch from each side, at least 1.

    Returns:
        The last `count` entries of the device before and the first `count` entries of the device
        after; zeros where there is no such device.
    """
    return _fetch(1, x[:, -count:]), _fetch(-1, x[:, :count])


def tokens_to_pairs(x: Float[Array, "pairs n ..."]) -> Float[Array, "own tokens ..."]:
    """Exchanges tokens between the devices (an all-to-all). A device has some tokens of every pair
    of a sample and a head, and receives all tokens of some pairs.

    For use in a kernel (`shard_map_kernel`) inside `shard_tokens`.

    Args:
        x: The tokens of this device for all pairs [pairs, n, ...].

    Returns:
        All tokens, in their order, for the pairs of this device [own, tokens, ...]. These pairs are
        consecutive. If the number of pairs is not a multiple of the number of devices, the first
        pairs are repeated at the end.
    """
    return jax.lax.all_to_all(_pad_pairs(x), SEQUENCE, split_axis=0, concat_axis=1, tiled=True)


def pairs_to_tokens(x: Float[Array, "own tokens ..."], pairs: int) -> Float[Array, "{pairs} n ..."]:
    """Reverts `tokens_to_pairs`. A device has all tokens of some pairs of a sample and a head, and
    receives its own tokens of every pair.

    For use in a kernel (`shard_map_kernel`) inside `shard_tokens`.

    Args:
        x: All tokens for the pairs of this device [own, tokens, ...].
        pairs: The number of pairs of all devices, without those that `tokens_to_pairs` repeated.

    Returns:
        The tokens of this device for all pairs [pairs, n, ...].
    """
    return jax.lax.all_to_all(x, SEQUENCE, split_axis=1, concat_axis=0, tiled=True)[:pairs]


def select_own_pairs(x: Shaped[Array, "pairs ..."]) -> Shaped[Array, "own ..."]:
    """Selects the pairs of this device, as `tokens_to_pairs` does. For use in a kernel
    (`shard_map_kernel`) inside `shard_tokens`.

    Args:
        x: One entry per pair of a sample and a head, the same on every device.

    Returns:
        The entries of the pairs of this device. If the number of pairs is not a multiple of the
        number of devices, the last devices get repetitions of the first pairs.
    """
    x = _pad_pairs(x)
    count = len(x) // axis_size(SEQUENCE)
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(SEQUENCE) * count, count)


def gather_on_first(x: Float[Array, "own ..."], pairs: int) -> Float[Array, "{pairs} ..."]:
    """Gathers the entries of all pairs of a sample and a head on the first device of the mesh axis
    `sequence`. For use in a kernel (`shard_map_kernel`) inside `shard_tokens`.

    The entries are the gradient of an array that every device has. JAX adds such a gradient up over
    the devices, so all devices but the first return zeros, which keeps the sum exact.

    Args:
        x: One entry for each pair of this device (`select_own_pairs`).
        pairs: The number of pairs of all devices, without those that `tokens_to_pairs` repeated.

    Returns:
        One entry for each pair; zeros on all devices but the first.
    """
    gathered = jax.lax.all_gather(x, SEQUENCE, axis=0, tiled=True)[:pairs]
    return jnp.where(jax.lax.axis_index(SEQUENCE) == 0, gathered, jnp.zeros_like(gathered))


def _pad_pairs(x: Shaped[Array, "pairs ..."]) -> Shaped[Array, "padded ..."]:
    """Repeats entries from the first on, cyclically, until their number is a multiple of the number
    of devices along the mesh axis `sequence`.

    Args:
        x: At least one entry; one per pair of a sample and a head.

    Returns:
        `x` and as few repeated entries as possible.
    """
    padding = -len(x) % axis_size(SEQUENCE)
    return x[jnp.arange(len(x) + padding) % len(x)] if padding else x


@jax.custom_vjp
def _gather(x: Float[Array, "b n ..."]) -> Float[Array, "b tokens ..."]:
    """Gathers the second axis over the mesh axis `sequence`, with a gradient that is added in
    float32.

    Args:
        x: The entries of this device.

    Returns:
        The entries of all devices, in the order of the devices.
    """
    return _all_gather(x)


def _gather_forward(x):
    """Computes the forward pass of `_gather`.

    Args:
        x: The entries of this device [b, n, ...].

    Returns:
        The entries of all devices [b, tokens, ...], and None, because the backward pass needs
        nothing.
    """
    return _all_gather(x), None


def _gather_backward(_, g):
    """Computes the backward pass of `_gather`.

    Args:
        _: None, the residual of `_gather_forward`.
        g: The gradient of the gathered array [b, tokens, ...] that this device computed. The
            gradients of all devices have to be added.

    Returns:
        A tuple with the sum for the entries of this device [b, n, ...], added in float32 and cast
        to the dtype of `g`.
    """
    return (_reduce_scatter(g),)


_gather.defvjp(_gather_forward, _gather_backward)


# A collective in a kernel of its own: in the midst of an automatically partitioned program, XLA
# would first replicate its operand over all other axes of the mesh.
@shard_map_kernel
def _all_gather(x: Array) -> Array:
    """Returns the entries of all devices along the mesh axis `sequence`, concatenated along the
    second axis.

    Args:
        x: The entries of this device [b, n, ...].
    """
    return jax.lax.all_gather(x, SEQUENCE, axis=1, tiled=True)


@shard_map_kernel
def _reduce_scatter(x: Array) -> Array:
    """Adds the arrays of all devices along the mesh axis `sequence` in float32, and returns the
    entries of the sum that belong to this device, in the dtype of `x`.

    Args:
        x: The array that this device adds [b, tokens, ...], with the entries of all devices along
            the second axis.
    """
    parts = x.astype(jnp.float32)
    return jax.lax.psum_scatter(parts, SEQUENCE, scatter_dimension=1, tiled=True).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fetch(distance: int, x: Float[Array, "b n ..."]) -> Float[Array, "b n ..."]:
    """Sends an array to the device that comes `distance` later along the mesh axis `sequence`, and
    receives the array of the device that comes `distance` earlier. The axis does not wrap around.

    Args:
        distance: How many devices further to send the array; negative: to an earlier device.
        x: The array of this device.

    Returns:
        The array that this device receives; zeros if none is sent to it.
    """
    return _send(distance, x)


def _send(distance: int, x: Array) -> Array:
    """Runs the collective of `_fetch`, as a kernel of its own (`shard_map_kernel`).

    Args:
        distance: How many devices further along the mesh axis `sequence` to send the array, without
            wrapping around; negative: to an earlier device.
        x: The array of this device.

    Returns:
        The array that this device receives; zeros if none is sent to it.
    """
    shards = axis_size(SEQUENCE)
    pairs = [(i, i + distance) for i in range(shards) if 0 <= i + distance < shards]
    return shard_map_kernel(lambda x: jax.lax.ppermute(x, SEQUENCE, pairs))(x)


def _fetch_forward(distance, x):
    """Computes the forward pass of `_fetch`.

    Args:
        distance: How many devices further along the mesh axis `sequence` the array is sent;
            negative: to an earlier device.
        x: The array of this device.

    Returns:
        The array that this device receives (zeros if none is sent to it), and None, because the
        backward pass needs nothing.
    """
    return _send(distance, x), None


def _fetch_backward(distance, _, g):
    """Computes the backward pass of `_fetch`: sends gradients in the opposite direction.

    Args:
        distance: How many devices further along the mesh axis `sequence` the array was sent;
            negative: to an earlier device.
        _: None, the residual of `_fetch_forward`.
        g: The gradient of the array that this device received.

    Returns:
        A tuple with the gradient of the array that this device sent; zeros if no device received
        it.
    """
    return (_send(-distance, g),)


_fetch.defvjp(_fetch_forward, _fetch_backward)
