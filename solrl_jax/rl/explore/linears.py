"""Which linears are quantised, and why the others are not: the rules of `config.Quantization` on a network's shapes.

A linear is a parameter `.../kernel` [in, out], or [layers, in, out] in a stack. A name in the rules is a part of a path. The
rules are those of the paper's public recipe, names to skip and a smallest width; `configs/model/` has their numbers.
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
class Linear:
    """A row of the report: `layers` matrices [n_in, n_out] under one path."""

    path: str
    layers: int
    n_in: int
    n_out: int
    kept: str  # why it stays as it is; '' if it is quantised
    bytes_before: int
    bytes_after: int
    errors: tuple[
        float, ...
    ] = ()  # of each layer's matrix, |quantised - exact| / |exact|; empty where not measured


def quantized_paths(params: Params, rules: Quantization, form: Format) -> tuple[str, ...]:
    """The paths that the rules leave to be quantised, sorted. params: arrays or their shapes, as in all functions here.

    Raises ValueError, in one line, for names that no linear has, and for rules that leave nothing to a `form` that quantises.
    """
    reasons = why_kept(params, rules)
    if all(reasons.values()) and form.quantize:
        told = ", ".join(
            f"{count} by {reason}" for reason, count in Counter(reasons.values()).items()
        )
        raise ValueError(f"model.quantization: leaves no linear to quantise ({told})")
    return tuple(path for path, reason in reasons.items() if not reason)


def why_kept(params: Params, rules: Quantization) -> dict[str, str]:
    """For each linear, sorted by path, the rule that keeps it in the training precision; "" if none does."""
    linears = _linears(params)
    for name in rules.modules_to_not_convert:
        if not any(name in path for path in linears):
            raise ValueError(
                f"model.quantization.modules_to_not_convert: {name!r} is in no linear's name; there are {', '.join(linears)}"
            )
    for pattern in rules.fused:
        if not any(re.fullmatch(pattern, path) for path in linears):
            raise ValueError(
                f"model.quantization.fused: {pattern!r} matches no linear; there are {', '.join(linears)}"
            )
    widths = _widths(linears, rules.fused)
    # The blocks are stacked. Their narrowest linear goes from the network's width to itself.
    stacked = [leaf for leaf in linears.values() if len(leaf.shape) == 3] or linears.values()
    width = min(max(leaf.shape[-2:]) for leaf in stacked)

    def reason(path: str) -> str:
        if names := [name for name in rules.modules_to_not_convert if name in path]:
            return f"skip {names[0]}"
        return (
            f"min_dim {rules.min_width_ratio * width:g}"
            if widths[path] <= rules.min_width_ratio * width
            else ""
        )

    return {path: reason(path) for path in linears}


def report(
    params: Params, rules: Quantization, form: Format, explore: Explore | None = None
) -> list[Linear]:
    """Every linear: quantised to `form` or not and why, and the bytes it takes before and after. Loads and computes nothing.

    explore: counts what exploration options (`rl/explore/options/`) keep beside the codes.
    """
    reasons = why_kept(params, rules)
    rows = []
    linears = _linears(params)
    shapes = {
        path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        for path, leaf in linears.items()
        if not reasons[path]
    }
    quantizer = None if form.quantize is None else Quantizer(form.quantize)
    if quantizer is not None and explore is not None:
        quantizer = shaped_quantizer(explore, quantizer, shapes)
    for path, leaf in linears.items():
        (*stack, n_in, n_out), before = leaf.shape, nbytes(leaf)
        kept = reasons[path]
        after = before
        if quantizer is None:
            kept = kept or form.name
        elif not kept:

            def quantized(w, *beside, f=quantizer.quantize):
                return map_layers(f, w, None, 1.0, *beside)

            after = nbytes(jax.eval_shape(quantized, shapes[path], *quantizer.beside.get(path, ())))
        rows.append(Linear(path, stack[0] if stack else 1, n_in, n_out, kept, before, after))
    return rows


def with_errors(
    rows: Sequence[Linear], params: Params, adapters: Trainable, scale: float, form: Format
) -> list[Linear]:
    """The report with what quantising costs each matrix, adapters merged (Frobenius norms, in float32)."""
    norm = jnp.linalg.norm

    def error(w: Array) -> Array:
        assert form.quantize is not None
        return norm(dequantize(form.quantize(w)) - w) / norm(w)

    measure = sharding.jit(lambda w, adapter: jnp.atleast_1d(map_layers(error, w, adapter, scale)))
    flat = flatten(params)

    def measured(path):
        return tuple(map(float, measure(flat[path], adapters.get(path))))

    return [
        row if row.kept else dataclasses.replace(row, errors=measured(row.path)) for row in rows
    ]


def totals(rows: Sequence[Linear]) -> dict[str, int]:
    """Linears, a layer of a stack being one, and bytes."""
    chosen = [row for row in rows if not row.kept]
    return {
        "linears": sum(row.layers for row in rows),
        "quantized": sum(row.layers for row in chosen),
        "bytes_before": sum(row.bytes_before for row in rows),
        "bytes_after": sum(row.bytes_after for row in rows),
        "quantized_bytes_before": sum(row.bytes_before for row in chosen),
        "quantized_bytes_after": sum(row.bytes_after for row in chosen),
    }


def table(rows: Sequence[Linear], form: Format) -> str:
    """The report for a terminal."""
    path = max(len(row.path) for row in rows)

    def errors(row):
        return f", error {min(row.errors):.4f} to {max(row.errors):.4f}" if row.errors else ""

    def told(row):
        return f"stays: {row.kept}" if row.kept else form.name + errors(row)

    def shape(row):
        return f"{row.layers} x {row.n_in} -> {row.n_out}"

    lines = [
        f"{row.path:<{path}}  {shape(row):>22}  {_mb(row.bytes_before)} -> {_mb(row.bytes_after)}  {told(row)}"
        for row in rows
    ]
    sums = totals(rows)

    def change(what):
        return f"{_mb(sums[what + '_before']).strip()} -> {_mb(sums[what + '_after']).strip()}"

    counts = f"{sums['quantized']} of {sums['linears']} linears in {form.name}"
    return "\n".join(
        [*lines, f"{counts}: {change('quantized_bytes')}; all linears {change('bytes')}"]
    )


def _linears(params: Params) -> dict[str, Any]:
    flat = flatten(params)
    return {
        path: flat[path]
        for path in sorted(flat)
        if path.endswith("/kernel") and len(flat[path].shape) in (2, 3)
    }


def _widths(linears: Mapping[str, Shaped], fused: Sequence[str]) -> dict[str, int]:
    """The larger side of each linear; those side by side that one pattern matches count as one, with all their outputs."""

    def group(path):
        return next(
            ((path.rsplit("/", 2)[0], p) for p in fused if re.fullmatch(p, path)),
            path,
        )

    outputs: Counter[Any] = Counter()
    for path, leaf in linears.items():
        outputs[group(path)] += leaf.shape[-1]
    return {path: max(leaf.shape[-2], outputs[group(path)]) for path, leaf in linears.items()}


def _mb(size: int) -> str:
    return f"{size / 1e6:10.3f} MB"
