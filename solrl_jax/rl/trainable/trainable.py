"""What is trained, as a flat dictionary beside the frozen base, and the ways to put it onto the base.

For the path of a parameter it holds an adapter (LoRA, arXiv 2106.09685), `{"a": [..., in, rank], "b": [..., rank, out]}` in
float32; or, where the parameter is trained in full, a whole array of its shape. A policy is the base with some leaves replaced:
by `LowRank` leaves, which are exact, for sampling in BF16 and for gradients; by the whole arrays, in the base's dtype; by
merged `Quantized` leaves for exploration. No layer knows which policy it belongs to.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array

from solrl_jax.config.schema import Config
from solrl_jax.models.loading.component import Component
from solrl_jax.models.loading.weights import ParameterEntry, Params, parameter_table
from solrl_jax.quant.matmul import LowRank, Quantized

Adapter = dict[str, Array]  # {"a": ..., "b": ...}
Trainable = Mapping[str, Adapter | Array]


@dataclasses.dataclass(frozen=True)
class Targets:
    """Paths of the parameters that are trained, sorted: by an adapter, and in full. No path is in both."""

    adapted: tuple[str, ...]
    whole: tuple[str, ...] = ()


def find_targets(transformer: Component, config: Config) -> Targets:
    """The parameters that `config.train.parameters` and `config.lora.target_modules` name. Raises ValueError as `matching`.

    A parameter that is trained in full has no adapter. What files may not have, because a configuration adds it to a network,
    is always trained in full.
    """
    params = transformer.abstract_params("float32")
    chosen = config.train.parameters
    field = "train.parameters"
    if chosen == "all":
        return Targets((), tuple(sorted(flatten(params))))
    whole = {
        path for path in flatten(params) if chosen != "adapters" and re.fullmatch(chosen, path)
    }
    if chosen != "adapters" and not whole:
        raise ValueError(
            f"{field}: {chosen!r} matches no parameter; there are {', '.join(sorted(flatten(params)))}"
        )
    whole |= {e.key for e in parameter_table(transformer.state) if e.start is not None}
    adapted = matching(params, config.lora.target_modules, "lora.target_modules")
    return Targets(tuple(path for path in adapted if path not in whole), tuple(sorted(whole)))


def matching(params: Params, patterns: Sequence[str], field: str) -> list[str]:
    """The paths of `params` that some pattern matches whole, sorted.

    Raises ValueError when a pattern matches nothing (it names the `field` of the config) or something that is no matrix.
    """
    paths = flatten(params)
    found: set[str] = set()
    for pattern in patterns:
        hits = {p for p in paths if re.fullmatch(pattern, p)}
        if not hits:
            kernels = [p for p in paths if p.endswith("kernel")]
            raise ValueError(
                f"{field}: {pattern!r} matches no parameter; there are {', '.join(kernels)}"
            )
        for p in hits:
            if not p.endswith("/kernel") or paths[p].ndim > 3:
                raise ValueError(
                    f"{field}: {pattern!r} matches {p} of shape {paths[p].shape}; accepted are matrices of linears"
                )
        found |= hits
    return sorted(found)


def init_adapters(
    key: Array, base: Params, targets: Sequence[str], rank: int
) -> dict[str, Adapter]:
    """Trainable on `targets`: A Gaussian of deviation 1 / rank (PEFT's "gaussian"), B zero. They change nothing yet."""
    flat = flatten(base)

    def one(index: int, path: str) -> dict[str, Array]:
        *stack, n_in, n_out = flat[path].shape
        a = (
            jax.random.normal(jax.random.fold_in(key, index), (*stack, n_in, rank), jnp.float32)
            / rank
        )
        return {"a": a, "b": jnp.zeros((*stack, rank, n_out), jnp.float32)}

    return {path: one(i, path) for i, path in enumerate(targets)}


def attach(
    base: Params,
    adapters: Trainable,
    scale: float,
    quantized: Mapping[str, Quantized] | None = None,
) -> Params:
    """The policy's parameters: `LowRank` where there is an adapter, the whole array where there is one, in the base's dtype;
    but the merged and quantised leaf where one is given.
    """
    flat = flatten(base)

    def leaf(w, own):
        return (
            LowRank(w, own["a"], own["b"], scale) if isinstance(own, dict) else own.astype(w.dtype)
        )

    return replace(
        base,
        {path: leaf(flat[path], own) for path, own in adapters.items()} | dict(quantized or {}),
    )


def within_bounds(trained: Trainable, table: Sequence[ParameterEntry]) -> Trainable:
    """The projection of whole arrays onto the bounds of their parameters, where these have any."""
    bounds = {e.key: e.bounds for e in table if e.bounds is not None}

    def clip(path, own):
        return jnp.clip(own, *bounds[path]) if path in bounds else own

    return {path: clip(path, own) for path, own in trained.items()}


def map_layers(
    f: Callable[..., Any],
    w: Array,
    own: dict[str, Array] | Array | None,
    scale: float,
    *beside: Array,
) -> Any:
    """`f` of a linear [in, out] with what is trained of it, in float32; of a stack of them, of one after another.

    own: its adapter, which is merged, or the array in place of `w`. beside: what else `f` takes of each.
    """
    w, adapter = (w, own or {}) if own is None or isinstance(own, dict) else (own, {})

    def layer(matrices: tuple[Array, dict[str, Array], tuple[Array, ...]]) -> Any:
        w, ab, beside = matrices
        w = w.astype(jnp.float32)
        return f(w + scale * ab["a"] @ ab["b"] if ab else w, *beside)

    return (partial(jax.lax.map, layer) if w.ndim == 3 else layer)((w, adapter, beside))


def flatten(params: Params) -> dict[str, Any]:
    """`{"blocks/attn/to_q/kernel": leaf}`: leaves by path."""
    return {"/".join(map(str, path)): leaf for path, leaf in flatten_dict(params).items()}


def replace(params: Params, leaves: Mapping[str, Any]) -> Params:
    """A copy of `params` with the leaves at the given paths replaced."""
    flat = flatten_dict(params, keep_empty_nodes=True)
    return unflatten_dict(
        {path: leaves.get("/".join(map(str, path)), leaf) for path, leaf in flat.items()}
    )
