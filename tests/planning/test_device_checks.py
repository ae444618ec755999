"""`planning.device_checks` where kernels are emulated: right ones pass, and planted faults are
named.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

from solrl_jax.planning import device_checks
from solrl_jax.planning.device_checks import (
    BF16_ATTENTION,
    FP8_ATTENTION,
    FP8_MATMUL,
    INT8_MATMUL,
    NVFP4_MATMUL,
    find_problem,
)
from solrl_jax.quant.formats import DeviceInfo
from tests.lowering import cuda_text

CHECKS = (NVFP4_MATMUL, FP8_MATMUL, INT8_MATMUL, BF16_ATTENTION, FP8_ATTENTION)
BLACKWELL = DeviceInfo("gpu", "NVIDIA B200", (10, 0))
HOPPER = DeviceInfo("gpu", "NVIDIA H100", (9, 0))
AMPERE = DeviceInfo("gpu", "NVIDIA A100", (8, 0))


def test_a_device_is_checked_for_the_kernels_that_it_has():
    names = {
        device.kind: [check.name for check in device_checks.checks_for(device)]
        for device in (
            BLACKWELL,
            HOPPER,
            DeviceInfo("gpu", "NVIDIA L40S", (8, 9)),
            AMPERE,
            DeviceInfo("cpu", "cpu"),
            DeviceInfo("tpu", "TPU7x"),
        )
    }
    assert names == {
        "NVIDIA B200": [
            "NVFP4 matmul",
            "FP8 matmul",
            "INT8 matmul",
            "BF16 attention",
            "FP8 attention",
        ],
        "NVIDIA H100": ["FP8 matmul", "INT8 matmul", "BF16 attention", "FP8 attention"],
        "NVIDIA L40S": ["FP8 matmul", "INT8 matmul", "BF16 attention"],
        "NVIDIA A100": ["INT8 matmul", "BF16 attention"],
        "cpu": [],
        "TPU7x": [],
    }


@pytest.mark.slow
def test_emulated_kernels_agree_with_their_twins_within_half_of_the_tolerance():
    strict = [dataclasses.replace(check, tolerance=check.tolerance / 2) for check in CHECKS]
    assert device_checks.run(strict) == dict.fromkeys([check.name for check in CHECKS])


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_a_result_of_zeros_nan_or_other_values_is_named(check):
    def planted(fault):
        """The kernel with a fault in the last of its results."""

        def kernel(*operands):
            *others, last = jax.tree.leaves(check.kernel(*operands))
            return *others, fault(last.astype(jnp.float32))

        return find_problem(dataclasses.replace(check, kernel=kernel))

    assert planted(lambda y: 0 * y) == "returns zeros"
    assert planted(lambda y: y.at[(0,) * y.ndim].set(jnp.nan)) == "returns NaN or infinite values"
    message = planted(lambda y: jnp.roll(y, 1, axis=-1))
    assert re.fullmatch(
        r"differs from plain JAX by 1\.\d of its norm; expected at most .*", message
    )
    assert planted(lambda y: y.at[: len(y) // 8 or 1].mul(1.5)).startswith("differs from plain JAX")


def test_a_result_of_another_shape_is_named():
    check = dataclasses.replace(FP8_MATMUL, kernel=lambda *x: FP8_MATMUL.kernel(*x)[:-1])
    assert re.fullmatch(
        r"returns arrays of shapes \[\(\d+, .*\)\]; expected \[\(\d+, .*\)\]", find_problem(check)
    )


def test_a_twin_that_returns_nan_confirms_no_kernel():
    def twin(*operands):
        return jnp.nan * FP8_MATMUL.twin(*operands)

    message = find_problem(dataclasses.replace(FP8_MATMUL, twin=twin))
    assert message.startswith("differs from plain JAX by nan of its norm")


def test_a_kernel_that_fails_is_reported_with_the_first_line_of_its_error():
    def fail(x, w):
        raise RuntimeError("CUDNN_STATUS_NOT_SUPPORTED\nwith a long trace")

    broken = dataclasses.replace(FP8_MATMUL, kernel=fail)
    assert device_checks.run([broken]) == {"FP8 matmul": "fails: CUDNN_STATUS_NOT_SUPPORTED"}


@pytest.mark.parametrize(
    ("version", "device", "texts"),
    [
        ("9.17.1", HOPPER, ["before 9.18, gradients of attention with padded lengths can be NaN"]),
        ("9.17.1", BLACKWELL, []),
        ("9.18.0", HOPPER, []),
        ("9.24.0", HOPPER, ["9.24 can return zeros from FP8 attention with BF16 output"]),
        ("9.24.3", BLACKWELL, ["9.24 can return zeros from FP8 attention with BF16 output"]),
        ("9.24.0", AMPERE, []),
        ("9.25.0", BLACKWELL, []),
        ("10.1.0", HOPPER, []),
    ],
)
def test_known_faults_of_cudnn_are_named_where_they_occur(version, device, texts):
    lines = device_checks.cudnn_warnings(version, device)
    assert len(lines) == len(texts)
    for line, expected in zip(lines, texts, strict=True):
        assert line.startswith(f"cuDNN {version}: {expected}")


def test_on_a_gpu_the_matmuls_are_those_of_cudnn_and_cublas():
    nvfp4 = cuda_text(jax.jit(NVFP4_MATMUL.kernel), *NVFP4_MATMUL.make_operands())
    assert "@__op$block_scaled_dot(" in nvfp4
    fp8 = cuda_text(jax.jit(FP8_MATMUL.kernel), *FP8_MATMUL.make_operands())
    (product,) = (line for line in fp8.splitlines() if "stablehlo.dot_general" in line)
    assert product.count("f8E4M3FN>") == 2
    int8 = cuda_text(jax.jit(INT8_MATMUL.kernel), *INT8_MATMUL.make_operands())
    (product,) = (line for line in int8.splitlines() if "stablehlo.dot_general" in line)
    assert product.count("xi8>") == 2
