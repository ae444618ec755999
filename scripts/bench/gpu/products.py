"""The step `products`: the matmuls of the quantized layers of each model, in each format."""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from bench.gpu.measure import Gauge, formats
from bench.gpu.record import Task
from bench.gpu.schedule import PRESETS
from bench.random_weights import SIZE
from solrl_jax.config.presets import resolve
from solrl_jax.config.schema import Config
from solrl_jax.config.sizes import model_size
from solrl_jax.parallel import sharding
from solrl_jax.planning.abstract import open_configurations
from solrl_jax.planning.phases import Program
from solrl_jax.quant.formats import FORMATS
from solrl_jax.quant.matmul import matmul
from solrl_jax.rl.explore.quantized_layers import report

product = sharding.jit(matmul)
_quantized = jax.jit(lambda w, form: FORMATS[form].quantize(w), static_argnums=1)


def products(task: Task) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yields the figures of each shape [in, out] of a model's quantized layers.

    Each shape is measured in BF16 and in each format, for the image tokens of one batch.
    """
    gauge = Gauge.here(task.repeat)
    named = formats(task)
    for model in task.models:
        preset, *chosen = PRESETS[model]
        config = resolve(preset, (*chosen, *task.overrides))
        shapes, tokens = shapes_of(config)
        rows = config.rollout.per_device_batch_size * tokens
        for (n_in, n_out), count in sorted(shapes.items()):
            for form in ("bf16", *named):
                one = partial(measure, gauge, form, (rows, n_in, n_out))
                about = {
                    "model": model,
                    "rows": rows,
                    "in": n_in,
                    "out": n_out,
                    "linears": count,
                    "format": form,
                }
                yield f"{model} {n_in} x {n_out} {form}", lambda one=one, about=about: about | one()


def shapes_of(config: Config) -> tuple[Counter[tuple[int, int]], int]:
    """Counts the quantized layers by shape [in, out]. Also returns the image tokens per image."""
    pipeline = open_configurations(config.model.path)
    shapes = Counter[tuple[int, int]]()
    for linear in report(
        pipeline.transformer.abstract_params(jnp.bfloat16),
        config.model.quantization,
        FORMATS["nvfp4"],
    ):
        if not linear.reason_kept:
            shapes[linear.n_in, linear.n_out] += linear.layers
    return shapes, pipeline.image_tokens(*model_size(config))


def measure(gauge: Gauge, form: str, shape: tuple[int, int, int]) -> dict[str, Any]:
    """Measures a matmul on one device. The quantization of the activations is included.

    Args:
        gauge: The gauge.
        form: The format.
        shape: The rows of the activations, and the input and output width of the weight.
    """
    rows, n_in, n_out = shape
    mesh = sharding.make_mesh(1, 1)
    x = jax.random.normal(jax.random.key(0), (rows, n_in), jnp.bfloat16)
    w = SIZE * jax.random.normal(jax.random.key(1), (n_in, n_out), jnp.bfloat16)
    leaf = w if FORMATS[form].quantize is None else _quantized(w, form)
    x, leaf = jax.device_put((x, leaf), sharding.replicated(mesh))
    figures = gauge.measure(Program(mesh, product, (x, leaf), 1))
    count = 2 * math.prod(shape)
    share = gauge.share_of_peak(form, count, figures["seconds"])
    return figures | {"tflops": count / figures["seconds"] / 1e12, "share_of_peak": share}
