"""LoRA adapters (arXiv 2106.09685) as a flat dictionary beside the frozen base, and the ways to put them onto it.

An adapter tree is `{parameter path: {"a": [..., in, rank], "b": [..., rank, out]}}` in float32. A policy is the base with some
leaves replaced: by `LowRank` leaves, which are exact, for sampling in BF16 and for gradients; by merged `Quantized` leaves for
exploration. No layer knows which policy it belongs to.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array

from solrl_jax.config.values import matches
from solrl_jax.numerics.matmul import LowRank, Quantized

Params = dict[Any, Any]
Adapters = dict[str, dict[str, Array]]


def matching(params: Params, patterns: Sequence[str], field: str) -> list[str]:
    """The paths of `params` that some pattern matches whole, sorted.

    Raises ValueError when a pattern matches nothing (it names the `field` of the config) or something that is no matrix.
    """
    paths = flatten(params)
    found: set[str] = set()
    for pattern in patterns:
        hits = {p for p in paths if matches(pattern, p, field)}
        if not hits:
            kernels = [p for p in paths if p.endswith("kernel")]
            raise ValueError(f"{field}: {pattern!r} matches no parameter; there are {', '.join(kernels)}")
        for p in hits:
            if not p.endswith("/kernel") or paths[p].ndim > 3:
                raise ValueError(
                    f"{field}: {pattern!r} matches {p} of shape {paths[p].shape}; accepted are matrices of linears"
                )
        found |= hits
    return sorted(found)


def init_adapters(key: Array, base: Params, targets: Sequence[str], rank: int) -> Adapters:
    """Adapters on `targets`: A Gaussian of deviation 1 / rank (PEFT's "gaussian"), B zero. They change nothing yet."""
    flat = flatten(base)

    def one(index: int, path: str) -> dict[str, Array]:
        *stack, n_in, n_out = flat[path].shape
        a = jax.random.normal(jax.random.fold_in(key, index), (*stack, n_in, rank), jnp.float32) / rank
        return {"a": a, "b": jnp.zeros((*stack, rank, n_out), jnp.float32)}

    return {path: one(i, path) for i, path in enumerate(targets)}


def attach(base: Params, adapters: Adapters, scale: float, quantized: Mapping[str, Quantized] | None = None) -> Params:
    """The policy's parameters: `LowRank` where there is an adapter, but the merged and quantised leaf where one is given."""
    flat = flatten(base)
    leaves: dict[str, Any] = {path: LowRank(flat[path], ab["a"], ab["b"], scale) for path, ab in adapters.items()}
    return replace(base, leaves | dict(quantized or {}))


def by_layer(f: Callable[..., Any], w: Array, adapter: dict[str, Array] | None, scale: float, *beside: Array) -> Any:
    """`f` of a linear [in, out] with its adapter merged, in float32; of a stack of them, of one after another.

    beside: what else `f` takes of each.
    """

    def layer(matrices: tuple[Array, dict[str, Array], tuple[Array, ...]]) -> Any:
        w, ab, beside = matrices
        w = w.astype(jnp.float32)
        return f(w + scale * ab["a"] @ ab["b"] if ab else w, *beside)

    return (partial(jax.lax.map, layer) if w.ndim == 3 else layer)((w, adapter or {}, beside))


def flatten(params: Params) -> dict[str, Any]:
    """`{"blocks/attn/to_q/kernel": leaf}`: leaves by path."""
    return {"/".join(map(str, path)): leaf for path, leaf in flatten_dict(params).items()}


def replace(params: Params, leaves: Mapping[str, Any]) -> Params:
    """A copy of `params` with the leaves at the given paths replaced."""
    flat = flatten_dict(params, keep_empty_nodes=True)
    return unflatten_dict({path: leaves.get("/".join(map(str, path)), leaf) for path, leaf in flat.items()})
