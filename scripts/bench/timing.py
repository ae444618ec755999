"""How long things take, how many operations they are, and what they are compared with."""

import argparse
import datetime
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from solrl_jax.numerics.target import planned_for
from solrl_jax.planning.walk import cost
from solrl_jax.storage.files import atomic_write

PACKAGES = ("jax", "jaxlib", "flax")
SQUARES = {"cpu": (512, 1024), "gpu": (4096, 8192, 16384), "tpu": (4096, 8192)}  # sides of what the best rate is looked for in


def seconds(run: Callable[[], Any], repeat: int) -> float:
    """The median time of `repeat` calls after one that compiles; what a call returns is waited for."""
    jax.block_until_ready(run())
    times = []
    for _ in range(repeat):
        began = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def best_matmul_rate(repeat: int) -> float:
    """Operations a second of the fastest square product in BF16 on one device here: what other rates are shares of."""
    rates = []
    for side in SQUARES[jax.devices()[0].platform]:
        x = jnp.full((side, side), 0.01, jnp.bfloat16)
        product = jax.jit(lambda a, b: a @ b)
        rates.append(2 * side**3 / seconds(lambda x=x, product=product: product(x, x), repeat))
    return max(rates)


def operations(function: Callable[..., Any], *arguments: Any) -> int:
    """Of products, attention's among them, in one call of `function`, whatever the format; on one device."""
    with planned_for(jax.devices()[0].platform):  # cuDNN's attention tells no one what it does; what stands in for it does
        program = jax.make_jaxpr(lambda *given: function(*given))(*arguments)
    return round(sum(cost(program, gathers=False, native=True).flops.values()))


def rate(count: int, elapsed: float, best: float) -> dict[str, float]:
    return {"tflops": round(count / elapsed / 1e12, 4), "share_of_best_matmul": round(count / elapsed / best, 4)}


def parser(description: str) -> argparse.ArgumentParser:
    """What all benchmarks take."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("preset", help="as `solrl train` takes it: `flux1_sol_rl_hpsv2`, or `tiny`, which a CPU can run")
    made.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as `solrl train` takes them")
    made.add_argument("--repeat", type=int, default=5, help="times are medians of so many calls (default: 5)")
    made.add_argument("--out", type=Path, help="a JSON file for the result, which is printed as well")
    return made


def facts() -> dict[str, Any]:
    """Where and when a benchmark ran."""
    devices = jax.devices()
    cores = f", {os.cpu_count()} cores" if devices[0].platform == "cpu" else ""
    return {
        "date": datetime.date.today().isoformat(),
        "device": f"{len(devices)} x {devices[0].device_kind}{cores}",
        "versions": {"python": platform.python_version()} | {name: version(name) for name in PACKAGES},
    }


def finish(result: dict[str, Any], out: Path | None) -> None:
    text = json.dumps(facts() | result, indent=2)
    print(text)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(out, text + "\n")
