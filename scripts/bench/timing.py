"""Measures times and matmul rates, and counts operations."""

import argparse
import math
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from bench import report
from solrl_jax.planning.hlo import parse
from solrl_jax.planning.kernels import kernels

PACKAGES = ("jax", "jaxlib", "flax")
SHORTEST = 0.05  # seconds of one measurement at least
# Sizes of the matrices that `best_matmul_rate` multiplies, by platform.
SQUARES = {
    "cpu": (512, 1024),
    "gpu": (4096, 8192, 16384),
    "tpu": (4096, 8192),
}


def seconds(run: Callable[[], Any], repeat: int) -> float:
    """The median time of `repeat` calls that wait for their result, after one that compiles."""
    jax.block_until_ready(run())
    times = []
    for _ in range(repeat):
        began = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def timed(run: Callable[[], Any], repeat: int, most: float = 10.0) -> tuple[float, int]:
    """Measures the time of a call.

    The first call, which may compile, does not count. Short calls are queued, and timed in groups
    that are long enough to hide the dispatch.

    Args:
        run: The call.
        repeat: The number of measurements.
        most: No further measurement starts after this many seconds.

    Returns:
        The median seconds per call, and the number of measurements.
    """
    jax.block_until_ready(run())
    began = time.perf_counter()
    jax.block_until_ready(run())
    once = time.perf_counter() - began
    queued = max(math.ceil(SHORTEST / once), 1)
    times = [once]
    if queued > 1:
        times.clear()
    while len(times) < repeat and (not times or time.perf_counter() - began < most):
        start = time.perf_counter()
        for _ in range(queued - 1):
            run()  # the result is dropped, because two may not fit into memory
        jax.block_until_ready(run())
        times.append((time.perf_counter() - start) / queued)
    return statistics.median(times), len(times)


def best_matmul_rate(repeat: int, dtype: Any = jnp.bfloat16) -> float:
    """The operations per second of the fastest square matmul on one device."""
    rates = []
    for side in SQUARES[jax.devices()[0].platform]:
        x = jnp.full((side, side), 0.01, dtype)
        product = jax.jit(lambda a, b: a @ b)
        rates.append(2 * side**3 / seconds(lambda x=x, product=product: product(x, x), repeat))
    return max(rates)


def operations(function: Callable[..., Any], *arguments: Any) -> int:
    """Counts the operations of all matmuls in one call of a function, per device.

    Attention is included, and so are quantized matmuls.
    """
    text = (
        (function if hasattr(function, "lower") else jax.jit(function))
        .lower(*arguments)
        .compile()
        .as_text()
    )
    return round(sum(kernel.times * kernel.operations for kernel in kernels(parse(text or ""))))


def rate(count: int, elapsed: float, best: float) -> dict[str, float]:
    """The rate of a computation.

    Args:
        count: Its operations.
        elapsed: Its seconds.
        best: The best rate of the device, in operations per second.
    """
    return {
        "tflops": round(count / elapsed / 1e12, 4),
        "share_of_best_matmul": round(count / elapsed / best, 4),
    }


def parser(description: str | None) -> argparse.ArgumentParser:
    """Returns a parser for the arguments that all benchmarks of a preset share."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "preset",
        help="a preset, e.g. `flux1_sol_rl_hpsv2`, or `tiny`, which runs on a CPU",
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="overrides as in `solrl train`"
    )
    parser.add_argument(
        "--repeat", type=int, default=5, help="number of calls whose median is taken (default: 5)"
    )
    parser.add_argument("--out", type=Path, help="JSON file for the result, which is also printed")
    return parser


def finish(
    result: Mapping[str, Any], out: Path | None, packages: tuple[str, ...] = PACKAGES
) -> None:
    """Prints and writes a result, with the devices of JAX. See `report.finish`."""
    devices = jax.devices()
    here = (
        report.cores()
        if devices[0].platform == "cpu"
        else f"{len(devices)} x {devices[0].device_kind}"
    )
    report.finish(result, out, here, packages)
