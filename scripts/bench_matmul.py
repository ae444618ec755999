"""Products of a model's linears in each format, compared with BF16 in the same run.

    python scripts/bench_matmul.py flux1_sol_rl_hpsv2 --rows 4 --out benchmarks/matmul-h200.json
    python scripts/bench_matmul.py tiny --formats nvfp4,fp8

For every shape of a quantised linear: activations of the image tokens of --rows pictures, in BF16, times a weight of that shape
in the format. Activations are quantised as part of the call. `times_bf16` above 1 is faster than BF16.
"""

import math
from collections import Counter

import jax
import jax.numpy as jnp
from bench.timing import best_matmul_rate, finish, parser, rate, seconds

from solrl_jax.config.presets import resolve
from solrl_jax.config.schema import Config
from solrl_jax.explore.linears import report
from solrl_jax.numerics.formats import FORMATS
from solrl_jax.numerics.matmul import matmul
from solrl_jax.parallel import sharding
from solrl_jax.planning.abstract import open_configurations
from solrl_jax.training.experiment import device_facts

product = sharding.jit(matmul)


def shapes_of(config: Config) -> tuple[Counter[tuple[int, int]], int]:
    """How many linears of each shape [in, out] are quantised, and how many image tokens a picture has."""
    pipeline = open_configurations(config.model.path, config.model.remat)
    shapes = Counter[tuple[int, int]]()
    for linear in report(pipeline.transformer.shapes(jnp.bfloat16), config.model.quantize, FORMATS["nvfp4"]):
        if not linear.kept:
            shapes[linear.n_in, linear.n_out] += linear.layers
    return shapes, pipeline.image_tokens(config.model.height, config.model.width)


def measure(shape: tuple[int, int], rows: int, formats: list[str], best: float, repeat: int) -> dict:
    """Seconds and rates of one product in each format. shape: of the weight, [in, out]; best: operations a second."""
    x = jax.random.normal(jax.random.key(0), (rows, shape[0]), jnp.bfloat16)
    w = 0.02 * jax.random.normal(jax.random.key(1), shape, jnp.bfloat16)
    count, results = 2 * rows * math.prod(shape), {}
    for name in ["bf16", *formats]:
        quantize = FORMATS[name].quantize
        leaf = w if quantize is None else jax.jit(quantize)(w)
        elapsed = seconds(lambda leaf=leaf: product(x, leaf), repeat)
        results[name] = {"seconds": elapsed} | rate(count, elapsed, best)
    for result in results.values():
        result["times_bf16"] = round(results["bf16"]["seconds"] / result["seconds"], 3)
    return results


def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--rows", type=int, default=4, help="pictures at once (default: 4)")
    options.add_argument("--formats", default="fp8,nvfp4,mxfp8,mxfp4")
    args = options.parse_args(arguments)
    config, formats = resolve(args.preset, tuple(args.overrides)), args.formats.split(",")
    shapes, tokens = shapes_of(config)
    best = best_matmul_rate(args.repeat)
    finish(
        {
            "preset": args.preset,
            "rows": args.rows * tokens,
            "formats": {name: FORMATS[name].describe(device_facts()) for name in formats},
            "best_matmul_tflops": round(best / 1e12, 4),
            "linears": [
                {"in": n_in, "out": n_out, "count": count}
                | {"by_format": measure((n_in, n_out), args.rows * tokens, formats, best, args.repeat)}
                for (n_in, n_out), count in sorted(shapes.items())
            ],
        },
        args.out,
    )


if __name__ == "__main__":
    main()
