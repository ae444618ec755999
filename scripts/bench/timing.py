"""How long a computation takes, how many operations it is, and the best rate that this device reaches."""

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
SHORTEST = 0.05  # seconds that are measured
SQUARES = {
    "cpu": (512, 1024),
    "gpu": (4096, 8192, 16384),
    "tpu": (4096, 8192),
}  # sides of the matrices that are multiplied


def seconds(run: Callable[[], Any], repeat: int) -> float:
    """The median time of `repeat` calls, each until its result is there, after a first call that compiles."""
    jax.block_until_ready(run())
    times = []
    for _ in range(repeat):
        began = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def timed(run: Callable[[], Any], repeat: int, most: float = 10.0) -> tuple[float, int]:
    """The median time of a call, and how often it was measured: `repeat` times, or once `most` seconds have passed.

    The first call, which may compile, does not count. Short calls are queued, and measured so many at a time that sending
    them to the device takes none of it.
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
            run()  # what it returns is not kept: two results at a time may not fit
        jax.block_until_ready(run())
        times.append((time.perf_counter() - start) / queued)
    return statistics.median(times), len(times)


def best_matmul_rate(repeat: int, dtype: Any = jnp.bfloat16) -> float:
    """Operations a second of the fastest product of square matrices on one device here."""
    rates = []
    for side in SQUARES[jax.devices()[0].platform]:
        x = jnp.full((side, side), 0.01, dtype)
        product = jax.jit(lambda a, b: a @ b)
        rates.append(2 * side**3 / seconds(lambda x=x, product=product: product(x, x), repeat))
    return max(rates)


def operations(function: Callable[..., Any], *arguments: Any) -> int:
    """The operations of all products in one call of `function`, attention included, in any format, on one device."""
    text = (
        (function if hasattr(function, "lower") else jax.jit(function))
        .lower(*arguments)
        .compile()
        .as_text()
    )
    return round(sum(kernel.times * kernel.operations for kernel in kernels(parse(text or ""))))


def rate(count: int, elapsed: float, best: float) -> dict[str, float]:
    """`count` operations in `elapsed` seconds, beside the best rate of this device."""
    return {
        "tflops": round(count / elapsed / 1e12, 4),
        "share_of_best_matmul": round(count / elapsed / best, 4),
    }


def parser(description: str | None) -> argparse.ArgumentParser:
    """The arguments that all benchmarks of a preset take."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "preset",
        help="as `solrl train` takes it: `flux1_sol_rl_hpsv2`, or `tiny`, which a CPU can run",
    )
    made.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="as `solrl train` takes them"
    )
    made.add_argument(
        "--repeat", type=int, default=5, help="times are medians of this many calls (default: 5)"
    )
    made.add_argument(
        "--out", type=Path, help="a JSON file for the result, which is printed as well"
    )
    return made


def finish(
    result: Mapping[str, Any], out: Path | None, packages: tuple[str, ...] = PACKAGES
) -> None:
    """Prints and writes `result`, with the devices that JAX sees here."""
    devices = jax.devices()
    here = (
        report.cores()
        if devices[0].platform == "cpu"
        else f"{len(devices)} x {devices[0].device_kind}"
    )
    report.finish(result, out, here, packages)
