"""Decides which linear layers exploration quantizes, and reports why the others are not quantized.

The rules of `config.Quantization` are applied to the shapes of a network: names to skip, and a
smallest width, as in the public recipe of the paper. `configs/model/` has the rules of each model.
A linear layer is a parameter `.../kernel` of shape [in, out], or [layers, in, out] in a stack. A
name in the rules is a part of a path.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from solrl_jax.config.schema import Explore, Quantization
from solrl_jax.parallel import sharding
from solrl_jax.quant.formats import Format
from solrl_jax.quant.leaf import nbytes
from solrl_jax.quant.matmul import dequantize
from solrl_jax.rl.explore.options.registry import shaped_quantizer
from solrl_jax.rl.explore.sync import Quantizer
from solrl_jax.rl.trainable.trainable import Params, Trainable, flatten, map_layers

Shaped = Array | jax.ShapeDtypeStruct


@dataclasses.dataclass(frozen=True)
class LinearLayer:
    """What exploration does with one parameter that is a linear layer or a stack of them.

    Attributes:
        path: The path of the kernel, such as `transformer_blocks/attn2/to_k/kernel`. A stack of
            layers has one.
        layers: The number of layers in the stack; 1 if it is not a stack.
        n_in: The number of inputs of one layer.
        n_out: The number of outputs of one layer.
        reason_kept: Why the parameter stays in the training precision, or "" if it is quantized.
            "skip NAME": NAME of `modules_to_not_convert` is a part of its path. "min_dim WIDTH":
            the larger of its inputs and outputs, those of fused layers together, is at most WIDTH.
            Otherwise the name of an exploration format that quantizes nothing.
        bytes_before: The bytes of the parameter in the training precision, all layers together.
        bytes_after: The bytes that it takes during exploration, all layers together.
        errors: For each layer, |quantized - exact| / |exact| in the Frobenius norm. Empty if it was
            not measured.
    """

    path: str
    layers: int
    n_in: int
    n_out: int
    reason_kept: str
    bytes_before: int
    bytes_after: int
    errors: tuple[float, ...] = ()


def quantized_paths(params: Params, rules: Quantization, form: Format) -> tuple[str, ...]:
    """Finds the linear layers that may be quantized: all but those that a rule keeps in the
    training precision.

    A layer is kept if its path contains a name in `modules_to_not_convert`, or if its width (the
    larger of its numbers of inputs and outputs) is at most `min_width_ratio` times the width of the
    network (`why_kept`).

    Args:
        params: The parameters of the network, or their shapes.
        rules: The section `model.quantization` of the configuration.
        form: The exploration format. It only decides whether an empty result is an error.

    Returns:
        The paths of the kernels, joined by "/", sorted, such as
        `transformer_blocks/attn2/to_k/kernel`. A stack of layers has one path, without an index;
        where a list has blocks of several kinds, the path has the first and the last block of each
        stack, as in `transformer_blocks/0-12/attn/to_k/kernel`.

    Raises:
        ValueError: If a name in `modules_to_not_convert` or a pattern in `fused` matches no linear
            layer, if the network has none, or if the format quantizes and the rules keep every
            layer.
    """
    reasons = why_kept(params, rules)
    if all(reasons.values()) and form.quantize:
        counts = Counter(reasons.values())
        summary = ", ".join(f"{count} by {reason}" for reason, count in counts.items())
        raise ValueError(f"model.quantization: leaves no linear layer to quantize ({summary})")
    return tuple(path for path, reason in reasons.items() if not reason)


def why_kept(params: Params, rules: Quantization) -> dict[str, str]:
    """Says for each linear layer which rule, if any, keeps it in the training precision.

    A layer is kept if its path contains a name in `modules_to_not_convert` as a substring. It is
    also kept if it is narrow: if its width, the larger of its numbers of inputs and outputs, is at
    most `min_width_ratio` times the width of the network. The width of the network is the smallest
    width, not counting fusion, of the layers in stacked blocks, kept or not (of all layers if
    nothing is stacked).

    Args:
        params: The parameters of the network, or their shapes. At least one linear layer.
        rules: The section `model.quantization` of the configuration: `modules_to_not_convert`,
            `min_width_ratio`, and `fused`. `fused` has regular expressions for the paths of layers
            that are one layer in the released implementation, such as keys and values. The outputs
            of layers in the same module that match the same expression count together.

    Returns:
        By path, sorted: "skip NAME" with the first name that is in the path; "min_dim WIDTH" with
        `min_width_ratio` times the width of the network, such as "min_dim 998.4"; or "" for a
        layer that is not kept.

    Raises:
        ValueError: If a name or an expression of the rules matches no linear layer, or the network
            has none.
    """
    kernels = _linear_kernels(params)
    for name in rules.modules_to_not_convert:
        if not any(name in path for path in kernels):
            raise ValueError(
                f"model.quantization.modules_to_not_convert: {name!r} is in the name of no linear "
                f"layer; there are {', '.join(kernels)}"
            )
    for pattern in rules.fused:
        if not any(re.fullmatch(pattern, path) for path in kernels):
            raise ValueError(
                f"model.quantization.fused: {pattern!r} matches no linear layer; there are "
                f"{', '.join(kernels)}"
            )
    widths = _widths(kernels, rules.fused)
    # The width of the network: the narrowest layer of the stacked blocks maps it to itself.
    block_kernels = [kernel for kernel in kernels.values() if len(kernel.shape) == 3]
    network_width = min(max(kernel.shape[-2:]) for kernel in block_kernels or kernels.values())
    min_width = rules.min_width_ratio * network_width

    reasons = {}
    for path in kernels:
        matches = [name for name in rules.modules_to_not_convert if name in path]
        if matches:
            reasons[path] = f"skip {matches[0]}"
        elif widths[path] <= min_width:
            reasons[path] = f"min_dim {min_width:g}"
        else:
            reasons[path] = ""
    return reasons


def report(
    params: Params, rules: Quantization, form: Format, explore: Explore | None = None
) -> list[LinearLayer]:
    """Describes every linear layer: whether it is quantized, and its bytes before and after.

    Nothing is loaded or computed.

    Args:
        params: The parameters of the network, or their shapes, in the training precision.
        rules: The section `model.quantization` of the configuration, which decides what is kept in
            the training precision.
        form: The exploration format, which determines the bytes. If it quantizes nothing, all
            layers are kept, and the reason is its name for layers that no rule keeps.
        explore: The section `rollout.explore` of the configuration. Its options may store further
            arrays for each quantized weight, which count in the bytes. None: no options.

    Returns:
        One entry per parameter (a layer or a stack of layers), sorted by path. `errors`, the
        quantization errors, is empty; `with_errors` adds it.

    Raises:
        ValueError: If a name or an expression of the rules matches no linear layer, or the network
            has none.
    """
    kernels = _linear_kernels(params)
    reasons = why_kept(params, rules)
    shapes = {
        path: jax.ShapeDtypeStruct(kernel.shape, kernel.dtype)
        for path, kernel in kernels.items()
        if not reasons[path]
    }
    quantizer = None
    if form.quantize is not None:
        quantizer = Quantizer(form.quantize)
        if explore is not None:
            quantizer = shaped_quantizer(explore, quantizer, shapes)
    layers = []
    for path, kernel in kernels.items():
        *stack, n_in, n_out = kernel.shape
        before = nbytes(kernel)
        if quantizer is None:
            reason = reasons[path] or form.name
            after = before
        elif reasons[path]:
            reason = reasons[path]
            after = before
        else:
            reason = ""
            after = _quantized_bytes(quantizer, path, shapes[path])
        num_layers = stack[0] if stack else 1
        layers.append(LinearLayer(path, num_layers, n_in, n_out, reason, before, after))
    return layers


def _quantized_bytes(quantizer: Quantizer, path: str, shape: jax.ShapeDtypeStruct) -> int:
    """Computes the bytes of a quantized parameter from its shape alone.

    Args:
        quantizer: The function that quantizes a weight, and its extra arrays (or shapes) by path.
        path: The path of the parameter, by which its extra arrays are found.
        shape: The shape [in, out] or [layers, in, out] and the dtype of the parameter.

    Returns:
        The bytes of all arrays of the quantized leaf: codes, scales and what options add.
    """

    def quantize(w: Array, *extra_arrays: Array) -> Any:
        return map_layers(quantizer.quantize, w, None, 1.0, *extra_arrays)

    return nbytes(jax.eval_shape(quantize, shape, *quantizer.extra_arrays.get(path, ())))


def with_errors(
    layers: Sequence[LinearLayer], params: Params, adapters: Trainable, scale: float, form: Format
) -> list[LinearLayer]:
    """Adds to a report the error that quantization causes in each matrix.

    The error is that of the format alone, without exploration options.

    Args:
        layers: The report: the entries that the function `report` returns for these parameters.
        params: The parameters of the base, as arrays, on whose devices the errors are computed.
        adapters: The trainable parameters by path. An adapter is merged first, and an array that is
            trained in full takes the place of the base's.
        scale: The factor of the product of LoRA factors, alpha / rank.
        form: The exploration format. It must quantize if a layer of the report is quantized.

    Returns:
        The entries in their order, with `errors` of quantized parameters: |quantized - exact| /
        |exact| of each layer in the Frobenius norm, computed in float32, NaN for a matrix of zeros.
        Parameters that are not quantized keep their entries, without errors.

    Raises:
        AssertionError: If a layer of the report is quantized, but the format quantizes nothing.
        KeyError: If a quantized layer of the report is not in `params`.
    """

    def error(w: Array) -> Array:
        assert form.quantize is not None
        return jnp.linalg.norm(dequantize(form.quantize(w)) - w) / jnp.linalg.norm(w)

    measure = sharding.jit(lambda w, adapter: jnp.atleast_1d(map_layers(error, w, adapter, scale)))
    flat = flatten(params)
    measured = []
    for layer in layers:
        if not layer.reason_kept:
            errors = measure(flat[layer.path], adapters.get(layer.path))
            layer = dataclasses.replace(layer, errors=tuple(map(float, errors)))
        measured.append(layer)
    return measured


def totals(layers: Sequence[LinearLayer]) -> dict[str, int]:
    """Sums up a report.

    Args:
        layers: The entries of `report`; without any, all sums are 0.

    Returns:
        Integers by name: the number of linear layers ("linears", each layer of a stack counts) and
        of quantized ones ("quantized"); the bytes of all before and after ("bytes_before",
        "bytes_after"); and the bytes of the quantized ones ("quantized_bytes_before",
        "quantized_bytes_after").
    """
    quantized = [layer for layer in layers if not layer.reason_kept]
    return {
        "linears": sum(layer.layers for layer in layers),
        "quantized": sum(layer.layers for layer in quantized),
        "bytes_before": sum(layer.bytes_before for layer in layers),
        "bytes_after": sum(layer.bytes_after for layer in layers),
        "quantized_bytes_before": sum(layer.bytes_before for layer in quantized),
        "quantized_bytes_after": sum(layer.bytes_after for layer in quantized),
    }


def table(layers: Sequence[LinearLayer], form: Format) -> str:
    """Formats a report for a terminal: one line per parameter, then one line of totals.

    Args:
        layers: The entries of `report`, at least one, with or without errors.
        form: The exploration format that the report was made for, which is named in the lines.

    Returns:
        The lines, joined by line feeds. The line of a parameter has its path, layers and widths,
        its bytes before and after, and the format or why it is kept; the last line has the number
        of quantized layers and the bytes of all.

    Raises:
        ValueError: If there is no entry.
    """
    width = max(len(layer.path) for layer in layers)
    lines = [_line(layer, form, width) for layer in layers]
    sums = totals(layers)
    quantized = _format_change(sums["quantized_bytes_before"], sums["quantized_bytes_after"])
    all_layers = _format_change(sums["bytes_before"], sums["bytes_after"])
    lines.append(
        f"{sums['quantized']} of {sums['linears']} linear layers in {form.name}: {quantized}; "
        f"all linear layers {all_layers}"
    )
    return "\n".join(lines)


def _line(layer: LinearLayer, form: Format, width: int) -> str:
    """Formats the line of one parameter in `table`.

    Args:
        layer: The entry of the parameter.
        form: The exploration format, whose name is shown for a quantized layer.
        width: The number of columns for the path.

    Returns:
        The path; the shape as "LAYERS x IN -> OUT"; the size in MB (10^6 bytes) before and after;
        and the outcome for the parameter: "stays: REASON", or the name of the format and, if errors
        were measured, "error SMALLEST to LARGEST" over its layers.
    """
    shape = f"{layer.layers} x {layer.n_in} -> {layer.n_out}"
    if layer.reason_kept:
        outcome = f"stays: {layer.reason_kept}"
    elif layer.errors:
        outcome = f"{form.name}, error {min(layer.errors):.4f} to {max(layer.errors):.4f}"
    else:
        outcome = form.name
    size = f"{_format_megabytes(layer.bytes_before)} -> {_format_megabytes(layer.bytes_after)}"
    return f"{layer.path:<{width}}  {shape:>22}  {size}  {outcome}"


def _linear_kernels(params: Params) -> dict[str, Any]:
    """Returns the kernels of all linear layers: parameters whose path ends in "/kernel" and that
    have two axes, or three, which always count as a stack.

    Args:
        params: The parameters of the network, or their shapes.

    Returns:
        The kernels by path, sorted.
    """
    flat = flatten(params)
    return {
        path: flat[path]
        for path in sorted(flat)
        if path.endswith("/kernel") and len(flat[path].shape) in (2, 3)
    }


def _widths(kernels: Mapping[str, Shaped], fused: Sequence[str]) -> dict[str, int]:
    """Computes the width of each linear layer: the larger of its numbers of inputs and outputs.

    Args:
        kernels: The kernels [in, out] or [layers, in, out] by path, as arrays or shapes.
        fused: Regular expressions of whole paths, for layers that are one layer in the released
            implementation, such as keys and values. Layers of the same module (the path without its
            last two parts) that match the same pattern count as one layer with all their outputs. A
            layer that matches several patterns counts for the first.

    Returns:
        The widths by path. The outputs of a fused layer are those of all layers that it is fused
        with; its inputs are its own.
    """

    def group(path: str) -> Any:
        for pattern in fused:
            if re.fullmatch(pattern, path):
                return path.rsplit("/", 2)[0], pattern
        return path

    outputs: Counter[Any] = Counter()
    for path, kernel in kernels.items():
        outputs[group(path)] += kernel.shape[-1]
    return {path: max(kernel.shape[-2], outputs[group(path)]) for path, kernel in kernels.items()}


def _format_change(before: int, after: int) -> str:
    """Formats two sizes for a line of totals, as "1.000 MB -> 0.300 MB" (1 MB is 10^6 bytes).

    Args:
        before: The size before quantization, in bytes.
        after: The size after it, in bytes.
    """
    return f"{_format_megabytes(before).strip()} -> {_format_megabytes(after).strip()}"


def _format_megabytes(size: int) -> str:
    """Formats a size in MB (10^6 bytes) with three decimals, such as "     1.000 MB", padded on the
    left to 13 characters in all.

    Args:
        size: The size in bytes.
    """
    return f"{size / 1e6:10.3f} MB"
