"""Measures a training program: its seconds, kernels and memory.

Each is compared with what the plan derives from the compiled text.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from bench.gpu.record import Task
from bench.timing import timed
from solrl_jax.planning.abstract import bytes_per_device
from solrl_jax.planning.hlo import parse
from solrl_jax.planning.kernels import count_library_kernels, kernels, unit
from solrl_jax.planning.phases import Program
from solrl_jax.planning.roofline import roofline
from solrl_jax.planning.targets import Target, target_of
from solrl_jax.quant.formats import FORMATS
from solrl_jax.rl.experiment import first_device_info

# Formats in the order of the memory that they take, because a high-water mark only rises.
DEFAULT = ("nvfp4", "fp8")
LARGEST = 3  # number of kernels that are listed


def formats(task: Task) -> list[str]:
    """Returns the quantizing formats to measure: the requested ones, or the native ones."""
    here = first_device_info()
    return list(task.formats) or [name for name in DEFAULT if FORMATS[name].is_native(here)]


def over(measured: float | None, planned: float | None) -> float | None:
    """Returns the ratio of a measured to a planned figure. None if either is unknown."""
    return round(measured / planned, 3) if measured and planned else None


def all_finite(tree: Any) -> bool:
    """Whether all floating-point numbers in a tree of arrays are finite."""
    arrays = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
    return all(bool(_finite(x)) for x in arrays)


@jax.jit
def _finite(x: jax.Array) -> jax.Array:
    return jnp.isfinite(x.astype(jnp.float32)).all()


@dataclasses.dataclass(frozen=True)
class Gauge:
    """Measures programs on the devices of this machine.

    Attributes:
        repeat: The number of calls whose median is taken.
        target: The public peaks of the device. None: unknown.
    """

    repeat: int
    target: Target | None

    @classmethod
    def here(cls, repeat: int) -> "Gauge":
        """Returns a gauge for the devices of JAX."""
        return cls(repeat, target_of(jax.devices()[0].device_kind))

    def measure(self, program: Program, run: Callable[[], Any] | None = None) -> dict[str, Any]:
        """Measures a call of a program whose arguments are arrays.

        Args:
            program: The program.
            run: Calls it. Needed if repeated calls need more than that, e.g. new arguments after a
                donation. None: call the function with its arguments.

        Returns:
            The figures of the program by name.
        """
        with jax.set_mesh(program.mesh):
            began = time.perf_counter()
            executable = program.function.lower(*program.arguments).compile()
            compiled = time.perf_counter() - began
            memory = self.memory(executable.memory_analysis())
            call = run or (lambda: program.function(*program.arguments))
            finite = all_finite(call())
            seconds, measurements = timed(call, self.repeat)
        text = executable.as_text()
        return {
            "seconds": seconds,
            "measurements": measurements,
            "compile_seconds": round(compiled, 2),
            "calls": program.calls,
            "finite": finite,
            **self.plan(text, program.mesh.size, seconds),
            "memory": memory(),
        }

    def plan(self, text: str, devices: int, seconds: float) -> dict[str, Any]:
        """Compares a measurement with the roofline.

        Args:
            text: The compiled text.
            devices: The number of devices.
            seconds: The measured time.

        Returns:
            The native kernels, the rate, the roofline time, and `ratio`, the measured over the
            roofline time.
        """
        all_kernels = kernels(parse(text))
        count = sum(kernel.times * kernel.operations for kernel in all_kernels)
        figures: dict[str, Any] = {
            "native": count_library_kernels(all_kernels),
            "tflops": count / seconds / 1e12,
            "plan": None,
            "ratio": None,
        }
        if self.target is None:
            return figures
        plan = roofline(text, self.target, devices).summary()
        kept = {
            name: plan[name]
            for name in ("seconds", "split", "operations_at_peak", "kernels", "unknown_loops")
        }
        return figures | {
            "plan": kept | {"largest": plan["largest"][:LARGEST]},
            "ratio": over(seconds, plan["seconds"]),
        }

    def memory(self, analysis: Any) -> Callable[[], dict[str, Any]]:
        """Starts a measurement of the memory of the first device. Call it before a program runs.

        `planned` is the peak as a plan adds it up (`planning.plan.Planner.memory`), for the arrays
        that exist now. `peak` is the high-water mark of the allocator, or None if the program did
        not raise it; it covers the whole life of the process.

        Args:
            analysis: The memory analysis of the compiled program.

        Returns:
            A function to call after the program has run. It returns bytes by name.
        """
        device = jax.devices()[0]
        live_bytes = bytes_per_device(
            [x for x in jax.live_arrays() if device in x.sharding.device_set]
        )
        program_bytes = (
            analysis.temp_size_in_bytes
            + analysis.output_size_in_bytes
            + analysis.generated_code_size_in_bytes
        )
        planned = live_bytes + program_bytes - analysis.alias_size_in_bytes

        def mark():
            return (device.memory_stats() or {}).get("peak_bytes_in_use")

        in_use = (device.memory_stats() or {}).get("bytes_in_use")
        before = mark()

        def after() -> dict[str, Any]:
            peak = mark()
            risen = peak if peak is not None and peak > (before or 0) else None
            return {
                "held": live_bytes,
                "in_use": in_use,
                "planned": planned,
                "peak": risen,
                "ratio": over(risen, planned),
            }

        return after

    def share_of_peak(self, form: str, count: float, seconds: float) -> float | None:
        """Returns the share of the device's public peak rate, or None if that is unknown.

        Args:
            form: The format of the matmul.
            count: Its operations.
            seconds: Its time.
        """
        if self.target is None:
            return None
        element = {"nvfp4": "f4", "fp8": "f8", "int8": "s8", "bf16": "bf16", "fp32": "f32"}[form]
        return round(count / seconds / getattr(self.target.peaks, unit(element)), 4)
