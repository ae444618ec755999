"""The trainable parameters, and how to attach them to the frozen base.

They are a flat dictionary that maps the path of a parameter to a LoRA adapter (arXiv 2106.09685),
that is `{"a": [..., in, rank], "b": [..., rank, out]}` in float32, or to a whole array, if the
parameter is trained in full. A policy is the base with some leaves replaced: by exact `LowRank`
leaves for sampling in BF16 and for gradients, by whole arrays in the dtype of the base, or by
merged `Quantized` leaves for exploration. No layer knows which policy it belongs to.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array

from solrl_jax.config.schema import Config
from solrl_jax.models.loading.component import Component
from solrl_jax.models.loading.weights import ParameterEntry, Params, parameter_table
from solrl_jax.quant.matmul import LowRank, Quantized

Adapter = dict[str, Array]  # the LoRA factors, {"a": ..., "b": ...}
Trainable = Mapping[str, Adapter | Array]


@dataclasses.dataclass(frozen=True)
class TrainedPaths:
    """The parameters that are trained. No path is in both groups.

    Attributes:
        adapted: The paths of the parameters that have a LoRA adapter, sorted, such as
            `transformer_blocks/attn2/to_k/kernel`. A stack of layers has one path.
        whole: The paths of the parameters that are trained in full, sorted. By default none.
    """

    adapted: tuple[str, ...]
    whole: tuple[str, ...] = ()


def find_trained_paths(transformer: Component, config: Config) -> TrainedPaths:
    """Finds the parameters that the configuration trains.

    A parameter has a LoRA adapter or is trained in full, not both: one that both settings name is
    trained in full. Parameters that the configuration adds to the released network (by
    `model.attention`) are always trained in full.

    Args:
        transformer: The transformer; its parameters need not be loaded.
        config: `train.parameters` says which parameters are trained in full: "adapters" (none),
            "all", or a regular expression that must match their whole paths. `lora.target_modules`
            are such expressions for the kernels that get an adapter; with "all" there are no
            adapters, and they play no part.

    Returns:
        The sorted paths of the parameters with adapters and of those trained in full, such as
        `transformer_blocks/attn2/to_k/kernel`.

    Raises:
        ValueError: If `train.parameters` or a LoRA target is a pattern that matches no path, or if
            a LoRA target matches a parameter that is not the kernel of a linear layer.
    """
    params = transformer.abstract_params("float32")
    parameters = config.train.parameters
    field = "train.parameters"
    if parameters == "all":
        return TrainedPaths((), tuple(sorted(flatten(params))))
    whole = {
        path
        for path in flatten(params)
        if parameters != "adapters" and re.fullmatch(parameters, path)
    }
    if parameters != "adapters" and not whole:
        raise ValueError(
            f"{field}: {parameters!r} matches no parameter; there are "
            f"{', '.join(sorted(flatten(params)))}"
        )
    whole |= {e.key for e in parameter_table(transformer.state) if e.initializer is not None}
    adapted = match_kernels(params, config.lora.target_modules, "lora.target_modules")
    return TrainedPaths(tuple(path for path in adapted if path not in whole), tuple(sorted(whole)))


def match_kernels(params: Params, patterns: Sequence[str], field: str) -> list[str]:
    """Returns the paths that match patterns, all of which must be kernels of linear layers.

    Args:
        params: The parameters, or their shapes, a nested dictionary.
        patterns: Regular expressions, each of which must match whole paths.
        field: The field of the configuration that holds the patterns, such as
            "lora.target_modules", for error messages.

    Returns:
        The matching paths, sorted, each once. Empty without patterns.

    Raises:
        ValueError: If a pattern matches no path, or one that does not end in "/kernel" or whose
            parameter has more than three axes.
    """
    paths = flatten(params)
    matched: set[str] = set()
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
                    f"{field}: {pattern!r} matches {p} of shape {paths[p].shape}; must be the "
                    "kernel of a linear layer"
                )
        matched |= hits
    return sorted(matched)


def init_adapters(
    key: Array, base: Params, targets: Sequence[str], rank: int
) -> dict[str, Adapter]:
    """Initializes LoRA adapters that do not change the base yet.

    A is Gaussian with the standard deviation 1 / rank, as PEFT's "gaussian", and B is zero.

    Args:
        key: The key from which the factors A are drawn, a typed key of JAX.
        base: The parameters of the base, or their shapes.
        targets: The paths of the kernels to adapt. The factor A of a path depends on the key and on
            its position here.
        rank: The rank of the adapters, at least 1.

    Returns:
        By path, {"a": [..., in, rank], "b": [..., rank, out]} in float32, with the leading axes of
        the kernel [..., in, out].

    Raises:
        KeyError: If the base has no parameter of a path in `targets`.
    """
    flat = flatten(base)

    def one(index: int, path: str) -> dict[str, Array]:
        *stack, n_in, n_out = flat[path].shape
        a = (
            jax.random.normal(jax.random.fold_in(key, index), (*stack, n_in, rank), jnp.float32)
            / rank
        )
        return {"a": a, "b": jnp.zeros((*stack, rank, n_out), jnp.float32)}

    return {path: one(i, path) for i, path in enumerate(targets)}


def split_adapters(trainable: Trainable) -> tuple[dict[str, Adapter], dict[str, Array]]:
    """Separates the LoRA adapters from the arrays that are trained in full.

    Args:
        trainable: The trainable parameters by path, or a tree of their structure, such as their
            gradients.

    Returns:
        The adapters by path, and the whole arrays by path. Either may be empty.
    """
    adapters = {path: value for path, value in trainable.items() if isinstance(value, dict)}
    arrays = {path: value for path, value in trainable.items() if not isinstance(value, dict)}
    return adapters, arrays


def attach(
    base: Params,
    adapters: Trainable,
    scale: float,
    quantized: Mapping[str, Quantized] | None = None,
) -> Params:
    """Attaches trainable parameters to the base, which gives the parameters of a policy.

    Args:
        base: The parameters of the base. They are not copied.
        adapters: The trainable parameters by path. An adapter becomes a `LowRank` leaf (the base's
            weight and the float32 factors, not merged). A whole array replaces the base's weight
            and is cast to the dtype of that weight.
        scale: The factor of the product of LoRA factors, alpha / rank.
        quantized: Quantized leaves by path, with the adapters merged in, which take precedence over
            `adapters`; paths that the base does not have are ignored. None: there are none.

    Returns:
        A tree of the structure of `base`. Leaves that are neither trained nor quantized are the
        objects of `base` itself.

    Raises:
        KeyError: If a path in `adapters` is not one of the base.
    """
    flat = flatten(base)

    leaves: dict[str, Any] = {}
    for path, adapter in adapters.items():
        w = flat[path]
        if isinstance(adapter, dict):
            leaves[path] = LowRank(w, adapter["a"], adapter["b"], scale)
        else:
            leaves[path] = adapter.astype(w.dtype)
    return replace(base, leaves | dict(quantized or {}))


def within_bounds(trained: Trainable, table: Sequence[ParameterEntry]) -> Trainable:
    """Clips parameters that are trained in full to the bounds that the network declares for them.

    Most parameters have no bounds.

    Args:
        trained: The trainable parameters by path. One that has bounds must be a whole array, not an
            adapter.
        table: The network's parameters (`Backbone.parameter_table`), with the smallest and the
            largest allowed value of those that have bounds.

    Returns:
        The trainable parameters by path. Those without bounds are not copied.
    """
    bounds = {e.key: e.bounds for e in table if e.bounds is not None}

    def clip(path: str, value: Any) -> Any:
        return jnp.clip(value, *bounds[path]) if path in bounds else value

    return {path: clip(path, value) for path, value in trained.items()}


def map_layers(
    f: Callable[..., Any],
    w: Array,
    trained: dict[str, Array] | Array | None,
    scale: float,
    *extra_arrays: Array,
) -> Any:
    """Applies `f` to a weight with its LoRA adapter merged in, in float32.

    A stacked weight is processed one layer at a time, so that no float32 copy of the stack exists.

    Args:
        f: Takes a float32 weight [in, out], and one layer of each of the extra arrays. For
            a stack it is traced, by `jax.lax.map`.
        w: The weight [in, out], or a stack of them [layers, in, out].
        trained: The adapter of the weight, {"a": ..., "b": ...}, the array that replaces the
            weight, or None to take the weight as it is.
        scale: The factor of the product of LoRA factors, alpha / rank.
        *extra_arrays: Further arrays that `f` takes, with a leading axis of layers if `w` has one.

    Returns:
        The result of `f`, any tree of arrays; for a stacked weight the results of all layers,
        stacked along a new leading axis.
    """
    adapter: dict[str, Array] = {}
    if isinstance(trained, dict):
        adapter = trained
    elif trained is not None:
        w = trained

    def layer(matrices: tuple[Array, dict[str, Array], tuple[Array, ...]]) -> Any:
        w, adapter, extra_arrays = matrices
        w = w.astype(jnp.float32)
        if adapter:
            w = w + scale * adapter["a"] @ adapter["b"]
        return f(w, *extra_arrays)

    matrices = (w, adapter, extra_arrays)
    return jax.lax.map(layer, matrices) if w.ndim == 3 else layer(matrices)


def flatten(params: Params) -> dict[str, Any]:
    """Returns the leaves of a tree of parameters by path, such as `blocks/attn/to_q/kernel`.

    Args:
        params: Nested dicts, whose keys are names or numbers (indices of lists). Every other value
            is a leaf, of any kind, which is not copied. Empty dicts are left out.

    Returns:
        The leaves in the order of the dicts' entries, by their keys joined by "/".
    """
    return {"/".join(map(str, path)): leaf for path, leaf in flatten_dict(params).items()}


def replace(params: Params, leaves: Mapping[str, Any]) -> Params:
    """Returns a copy of a tree of parameters in which some leaves are replaced.

    Args:
        params: The tree, nested dicts. It is not changed.
        leaves: The new leaves by path, such as `blocks/attn/to_q/kernel`. Paths that the tree does
            not have are ignored.

    Returns:
        New nested dicts with the keys of the tree. Leaves that are not replaced are not copied.
    """
    flat = flatten_dict(params, keep_empty_nodes=True)
    return unflatten_dict(
        {path: leaves.get("/".join(map(str, path)), leaf) for path, leaf in flat.items()}
    )
