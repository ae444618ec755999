"""Every format: its laws, its bytes, its product, the device that runs it, and the call that CUDA
gets for it.

NVFP4's own codes and scales: `test_nvfp4.py`. The contract that formats share with other leaves:
`test_leaves.py`.
"""

import re
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import get_args

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from flax import nnx
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from solrl_jax.config.presets import resolve as preset
from solrl_jax.config.schema import Precision
from solrl_jax.models.layers.linear import Linear
from solrl_jax.models.layers.stack import scan_blocks, stack
from solrl_jax.models.locate import open_model
from solrl_jax.parallel.sharding import jit, make_mesh, parameter_sharding, rows
from solrl_jax.quant import int8
from solrl_jax.quant.formats import AUTO, FORMATS, DeviceInfo, resolve_format, scoring_dtypes
from solrl_jax.quant.matmul import dequantize, matmul
from solrl_jax.rl.explore.quantized_layers import quantized_paths
from solrl_jax.rl.explore.sync import Quantizer, quantize_policy
from solrl_jax.rl.trainable.trainable import attach, flatten
from tests.lowering import cuda_text, tpu_text

QUANTIZING = [name for name, form in FORMATS.items() if form.quantize]
BLOCK = {"nvfp4": 16, "fp8": 64, "int8": 64}  # values under one scale, of the 64 that are tested
TINY = 2.0**-126
FLOAT32_MAX = float(np.finfo(np.float32).max)
# without shrinking, which takes minutes for arrays: a failure prints the full array
drawn = settings(
    max_examples=25, deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip

quantize = cache(lambda name: jax.jit(FORMATS[name].quantize))
decode = jax.jit(dequantize)
product = jax.jit(matmul)


def round_trip(name, w):
    return np.asarray(decode(quantize(name)(w)))


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def grid(dtype):
    """The magnitudes that a type of four or eight bits has."""
    values = (
        np.arange(256 if dtype == ml_dtypes.float8_e4m3fn else 16, dtype=np.uint8)
        .view(dtype)
        .astype(np.float64)
    )
    return np.unique(np.abs(values[np.isfinite(values)]))


GRIDS = {
    "nvfp4": grid(ml_dtypes.float4_e2m1fn),
    "fp8": grid(ml_dtypes.float8_e4m3fn),
    "int8": np.arange(128.0),
}


# --- laws ---


# the full range of float32; its ends and the numbers around the smallest usable scales are drawn
# often
EDGES = [
    0.0,
    -0.0,
    FLOAT32_MAX,
    -FLOAT32_MAX,
    1e-45,
    TINY,
    -TINY / 2,
    2.0**-106,
    2.0**-124,
    2.0**-118,
    448 * TINY,
    1e-32,
    1.0,
]
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False) | st.sampled_from(EDGES)
ORDINARY = st.floats(2.0**-20, 2.0**20, width=32)
SIGNED = st.builds(lambda x, sign: x * sign, ORDINARY, st.sampled_from([-1.0, 1.0])) | st.just(0.0)


@pytest.mark.parametrize("name", QUANTIZING)
@drawn
@given(arrays(np.float32, (64, 1), elements=FINITE))
def test_finite_input_never_gives_anything_else(name, w):
    assert np.isfinite(round_trip(name, w)).all()
    unit = np.full((1, 64), 1e-3, np.float32)
    assert not np.isnan(product(unit, quantize(name)(w))).any()
    assert not np.isnan(product(w.T, quantize(name)(unit.T))).any()


@pytest.mark.parametrize("name", QUANTIZING)
@drawn
@given(arrays(np.float32, (64, 1), elements=SIGNED), st.integers(-40, 40))
def test_signs_and_powers_of_two_go_through_and_a_second_time_changes_nothing(name, w, k):
    once = quantize(name)(w)
    back = np.asarray(decode(once))
    np.testing.assert_array_equal(round_trip(name, -w), -back)
    np.testing.assert_array_equal(round_trip(name, np.ldexp(w, k)), np.ldexp(back, k))
    twice = quantize(name)(back)
    chex.assert_trees_all_equal(twice.codes, once.codes)

    # equal to the bit, except for the last bit of a float32 scale: amax / 448 times 448 is not
    # always amax, nor is amax / 127 times 127
    def same(scales):
        return np.asarray(scales).astype(np.float64)

    np.testing.assert_allclose(
        same(twice.scales), same(once.scales), rtol=0 if name == "nvfp4" else 2.0**-23
    )


@pytest.mark.parametrize("name", QUANTIZING)
@drawn
@given(arrays(np.float32, (64, 1), elements=SIGNED))
def test_what_is_larger_stays_no_smaller(name, w):
    def by_block(x):
        return np.abs(x).T.reshape(-1, BLOCK[name])

    before = by_block(w)
    after = by_block(round_trip(name, w))
    order = np.argsort(before, axis=1, kind="stable")
    assert (np.diff(np.take_along_axis(after, order, 1), axis=1) >= 0).all()


@pytest.mark.parametrize("name", ["fp8", "int8"])  # NVFP4's is in its own file
@drawn
@given(arrays(np.float32, (64, 1), elements=SIGNED))
def test_every_code_is_the_nearest(name, w):
    q = quantize(name)(w)
    unit = np.asarray(dequantize(replace(q, codes=jnp.ones_like(q.codes))), np.float64)
    live = unit > 0
    values = GRIDS[name]
    scaled = np.abs(w[live].astype(np.float64)) / unit[live]
    error = np.abs(scaled - np.abs(np.asarray(decode(q), np.float64)[live]) / unit[live])
    inside = scaled <= values[-1]
    nearest = np.abs(scaled[inside, None] - values).min(-1)
    assert (
        error[inside] <= nearest + 1e-6 * scaled[inside]
    ).all()  # half a step at most; and float32 rounding at a tie
    # values are beyond the largest code by rounding alone; they saturate
    np.testing.assert_allclose(error[~inside], scaled[~inside] - values[-1], rtol=1e-6, atol=1e-4)
    assert (scaled <= values[-1] * (1 + 1e-6)).all()
    assert not w[~live].any()


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_what_a_format_can_say_it_says_exactly(name):
    values = GRIDS[name]
    signed = np.concatenate([values, -values]).astype(np.float32)
    w = np.resize(signed, (-(-len(signed) // 64) * 64, 2)).copy()
    w[:: BLOCK[name] // 2] = values[-1]  # so each scale is known
    w *= np.float32([2.0**-7, 2.0**12])
    np.testing.assert_array_equal(round_trip(name, w), w)
    assert len(np.unique(np.abs(w))) > 0.95 * len(values)


@pytest.mark.parametrize("name", QUANTIZING)
def test_what_is_not_finite_stays_so_and_in_its_own_channel_and_row(name):
    w = normal(64, 4)
    for bad in (np.inf, -np.inf, np.nan):
        spoiled = w.copy()
        spoiled[5, 2] = bad
        assert not np.isfinite(round_trip(name, spoiled)[5, 2])
        if "nvfp4" not in name:  # a matrix of NVFP4 has one float32 scale
            np.testing.assert_array_equal(
                round_trip(name, spoiled)[:, [0, 1, 3]], round_trip(name, w)[:, [0, 1, 3]]
            )
        x = spoiled.T
        q = quantize(name)(normal(64, 8, seed=1))
        got = np.asarray(product(x, q))
        clean = np.asarray(product(w.T, q))
        assert not np.isfinite(got[2]).any()
        np.testing.assert_array_equal(got[[0, 1, 3]], clean[[0, 1, 3]])


@pytest.mark.parametrize("name", QUANTIZING)
def test_nothing_but_zeros_gives_zeros(name):
    w = np.zeros((64, 4), np.float32)
    w[:, 1] = -0.0
    w[:, 2] = 1e-45
    w[::2, 3] = TINY / 2  # subnormal numbers are zeros to XLA
    assert not round_trip(name, w).any()
    w[:, 0] = normal(64)
    assert round_trip(name, w)[:, 0].any()
    assert not round_trip(name, w)[:, 1:].any()


ERRORS = {  # of a matrix and of a product, relative
    "nvfp4": (0.0950, 0.135),
    "fp8": (0.0265, 0.037),
    "int8": (0.0070, 0.0100),
}


@pytest.mark.parametrize("name", ERRORS)
def test_the_error_on_gaussian_numbers_is_that_of_the_format(name):
    x = normal(128, 256, seed=1)
    w = normal(256, 256)

    def relative(got, want):
        return np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2))

    error, of_product = ERRORS[name]
    assert relative(round_trip(name, w), w) == pytest.approx(error, rel=0.02)
    got = np.asarray(product(x, quantize(name)(w)))
    assert relative(got, x.astype(np.float64) @ w) == pytest.approx(of_product, rel=0.03)


# --- against PyTorch ---


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
def test_fp8_bits_equal_pytorchs(scale):
    w = normal(256, 64) * np.float32(scale)
    q = quantize("fp8")(w)
    expected = np.abs(w).max(0) / np.float32(448)
    np.testing.assert_allclose(q.scales, expected, rtol=2.0**-23)
    theirs = (torch.from_numpy(w.T.copy()) / torch.from_numpy(np.array(q.scales))[:, None]).clamp(
        -448, 448
    )
    np.testing.assert_array_equal(
        np.asarray(q.codes).view(np.uint8), theirs.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    )


# --- INT8 against integers ---


def test_int8_products_are_sums_of_integers_scaled_once():
    """The codes and scales by NumPy, the sums in 64 bits, the scales in float64: the product equals
    it up to the rounding of two float32 factors.
    """
    x = normal(9, 4096) * np.logspace(-3, 3, 9, dtype=np.float32)[:, None]
    w = normal(4096, 24, seed=1)
    x[3] = np.sign(x[3])  # every code is the largest, so that sums are as large as they can be
    w[:, 5] = np.sign(x[3])

    def encode(rows):
        scales = np.abs(rows).max(1) / np.float32(127)
        return np.rint(rows * (np.float32(127) / np.abs(rows).max(1))[:, None]), scales

    rows, row_scales = encode(x)
    columns, column_scales = encode(w.T)
    sums = rows.astype(np.int64) @ columns.astype(np.int64).T
    assert sums.max() == 127**2 * 4096  # beyond 2^24, where float32 would have rounded the sum
    scales = np.outer(row_scales.astype(np.float64), column_scales)
    q = quantize("int8")(w)
    np.testing.assert_array_equal(q.codes, columns)
    np.testing.assert_allclose(product(x, q), sums * scales, rtol=3 * 2.0**-24)


def test_int8_sums_do_not_depend_on_their_order():
    """A permutation of the contraction changes no bit, nor does the number of rows."""
    x = normal(16, 512)
    w = normal(512, 32, seed=1)
    order = np.random.default_rng(2).permutation(512)
    whole = np.asarray(product(x, quantize("int8")(w)))
    np.testing.assert_array_equal(product(x[:, order], quantize("int8")(w[order])), whole)
    np.testing.assert_array_equal(product(x[3:4], quantize("int8")(w))[0], whole[3])


def test_int8_refuses_sums_that_could_exceed_int32():
    """133,144 squares of 127 are less than 2^31, one more is not."""
    assert int8.MAX_INPUTS == 133144
    jax.eval_shape(int8.quantize, jax.ShapeDtypeStruct((133144, 1), jnp.float32))
    with pytest.raises(ValueError, match=r"^w has 133145 inputs; INT8 accumulates at most 133144 "):
        jax.eval_shape(int8.quantize, jax.ShapeDtypeStruct((133145, 1), jnp.float32))


# --- leaves ---


@pytest.mark.parametrize(
    ("name", "bits", "more"),
    [("nvfp4", 4.5, 4), ("fp8", 8, 4 * 128), ("int8", 8, 4 * 128)],
)  # more: bytes of float32 scales a matrix of 128 channels, which NVFP4 does not fill up
def test_a_value_takes_the_bits_that_the_format_says(name, bits, more):
    for shape, matrices in (((64, 128), 1), ((3, 64, 128), 3)):
        q = quantize(name)(normal(*shape))
        assert q.nbytes == np.prod(shape) * bits / 8 + more * matrices
        # bytes in the memory of the device (here the CPU): float4 arrays of XLA would take twice as
        # much
        assert sum(array.on_device_size_in_bytes() for array in jax.tree.leaves(q)) == q.nbytes
    assert FORMATS[name].bits_per_weight == bits


@pytest.mark.parametrize("name", QUANTIZING)
def test_a_width_that_is_no_multiple_of_a_block_is_filled_with_zeros(name):
    w = normal(20, 6)
    assert round_trip(name, w).shape == (20, 6)
    np.testing.assert_array_equal(
        round_trip(name, w), round_trip(name, np.pad(w, ((0, 44), (0, 0))))[:20]
    )


@pytest.mark.parametrize("name", QUANTIZING)
def test_bfloat16_is_quantized_as_the_float32_of_the_same_value(name):
    w = jnp.asarray(normal(32, 8), jnp.bfloat16)
    np.testing.assert_array_equal(round_trip(name, w), round_trip(name, w.astype(jnp.float32)))


# --- the product ---


@pytest.mark.parametrize("name", QUANTIZING)
def test_the_product_is_that_of_the_dequantized_operands(name):
    """Each row of activations is quantized like a matrix with one row."""
    x = normal(7, 40) * np.logspace(-3, 3, 7, dtype=np.float32)[:, None]
    w = normal(40, 24, seed=1)
    q = quantize(name)(w)
    operand = round_trip(name, x[..., None])[..., 0]
    got = np.asarray(product(x, q), np.float64)
    matrix = np.asarray(decode(q), np.float64)

    def relative(got, want):
        return np.abs(got - want).max() / np.abs(want).max()

    for row in range(len(x)):
        assert relative(got[row], operand[row].astype(np.float64) @ matrix) < 1e-6
        assert relative(got[row], x[row] @ matrix) > 1e-3  # activations are quantized
        assert relative(got[row], operand[row] @ w) > 1e-3  # and so are weights


@pytest.mark.slow
def test_stacked_leaves_on_eight_devices_compute_what_they_do_on_one():
    """They are merged and quantized on the devices that hold the base, then gathered one layer at a
    time in the scan.
    """
    graphdef, state = nnx.split(stack(3, lambda r: Linear(64, 64, rngs=r), nnx.Rngs(0)))
    base = {"blocks": nnx.to_pure_dict(state)}
    x = normal(16, 64)

    @jit
    def forward(policies, x):
        def through(params):
            return scan_blocks(
                nnx.merge(graphdef, params["blocks"]), lambda block, x: x + block(x), x
            )

        return {name: through(params) for name, params in policies.items()}

    def run(mesh):
        placed = jax.device_put(base, parameter_sharding(mesh, base))
        with jax.set_mesh(mesh):

            def quantized(name):
                return quantize_policy(
                    mesh, placed, {}, 1.0, ("blocks/kernel",), Quantizer(FORMATS[name].quantize)
                )

            policies = {name: attach(placed, {}, 1.0, quantized(name)) for name in QUANTIZING}
            return jax.device_get(
                forward(policies | {"bf16": placed}, jax.device_put(x, rows(mesh)))
            )

    one = run(make_mesh(1, 1, devices=jax.devices()[:1]))
    eight = run(make_mesh(2, 4))
    tensor = run(make_mesh(2, 2, 2))  # products divided by their outputs
    chex.assert_trees_all_equal(eight, one)
    chex.assert_trees_all_equal(tensor, one)
    assert all(np.abs(one[name] - one["bf16"]).max() > 1e-3 for name in QUANTIZING)


# --- programs for CUDA, lowered without a GPU ---


@pytest.fixture(scope="module")
def network():
    """A small SANA without arrays: the pipeline, the shapes of its parameters, the paths that are
    quantized, its inputs.
    """
    pipeline = open_model("embedded:tiny-sana")

    def shape(*s, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(s, dtype)

    params = pipeline.transformer.abstract_params(jnp.bfloat16)
    paths = quantized_paths(params, preset("tiny").model.quantization, FORMATS["nvfp4"])
    conditioning = {"text": shape(2, 24, 64), "mask": shape(2, 24, dtype=bool)}
    inputs = (
        shape(2, *pipeline.latent_shape(32, 32)),
        conditioning,
        shape(2, dtype=jnp.float32),
        shape(dtype=jnp.float32),
    )
    return pipeline, params, paths, inputs


@pytest.fixture(scope="module")
def lowered(network):
    """The forward pass of the network as StableHLO, by format and platform.

    Its four blocks are one scanned body.
    """
    pipeline, params, paths, inputs = network

    @cache
    def lower(name, platform="cuda"):
        quantize = FORMATS[name].quantize
        flat = flatten(params)
        leaves = {path: jax.eval_shape(quantize, flat[path]) for path in paths} if quantize else {}
        velocity = jax.jit(pipeline.velocity)
        arguments = (attach(params, {}, 1.0, leaves), *inputs)
        if platform == "cuda":
            return cuda_text(velocity, *arguments)
        if platform == "tpu":
            return tpu_text(velocity, *arguments)
        return velocity.trace(*arguments).lower(lowering_platforms=(platform,)).as_text()

    return lower


DOT = "stablehlo.dot_general"
CUSTOM = "@__op$block_scaled_dot("
COMPOSITE = 'composite "xla.scaled_dot"'


@pytest.mark.slow
def test_block_scaled_products_lower_to_xlas_custom_call_on_cuda(network, lowered):
    text = lowered("nvfp4")
    assert len(network[2]) == 4
    # one function for each shape; the linears of SANA's text, keys and values, share theirs
    assert (text.count(CUSTOM), text.count(COMPOSITE)) == (3, 0)
    assert (
        text.count(DOT) == lowered("bf16").count(DOT) - 4
    )  # no product of those linears is left in BF16
    assert CUSTOM not in lowered("nvfp4", "cpu")  # no other platform has it


@pytest.mark.parametrize(
    ("name", "platform", "types"),
    [
        ("fp8", "cuda", ["f8E4M3FN", "f8E4M3FN", "bf16"]),
        ("int8", "cuda", ["i8", "i8", "i32"]),
        ("int8", "tpu", ["i8", "i8", "i32"]),
    ],
)
def test_products_lower_to_dots_of_the_formats_operands(network, lowered, name, platform, types):
    """XLA's GEMM rewriter turns a dot of two E4M3 operands into cuBLAS's FP8 GEMM (`MatchFp8Param`,
    gemm_rewriter.cc), and one of two INT8 operands into cuBLAS's INT8 GEMM.
    """
    text = lowered(name, platform)
    operands = [
        re.findall(r"tensor<(?:\d+x)*(\w+)>", line.rsplit(" : ", 1)[1])
        for line in text.splitlines()
        if DOT in line
    ]
    assert operands.count(types) == len(network[2]) == 4
    assert len(operands) == lowered("bf16", platform).count(DOT)


# --- devices ---


CPU = DeviceInfo("cpu", "cpu")
AMD = DeviceInfo("gpu", "AMD Instinct MI300X")
DEVICES = [
    (DeviceInfo("gpu", "NVIDIA B200", (10, 0)), "nvfp4", {"nvfp4", "fp8", "int8"}),
    (DeviceInfo("gpu", "NVIDIA GeForce RTX 5090", (12, 0)), "nvfp4", {"nvfp4", "fp8", "int8"}),
    (DeviceInfo("gpu", "NVIDIA H200", (9, 0)), "fp8", {"fp8", "int8"}),
    (DeviceInfo("gpu", "NVIDIA L40S", (8, 9)), "fp8", {"fp8", "int8"}),
    (DeviceInfo("gpu", "NVIDIA A100", (8, 0)), "int8", {"int8"}),
    (DeviceInfo("gpu", "NVIDIA V100", (7, 0)), "bf16", set()),
    (AMD, "bf16", set()),
    (DeviceInfo("tpu", "TPU7x"), "fp8", {"fp8"}),
    (DeviceInfo("tpu", "TPU v6 lite"), "int8", {"int8"}),
    (DeviceInfo("tpu", "TPU v5"), "int8", {"int8"}),
    (DeviceInfo("tpu", "TPU v5 lite"), "int8", {"int8"}),
    (DeviceInfo("tpu", "TPU v4"), "bf16", set()),
    (CPU, "bf16", set()),
]


@pytest.mark.parametrize(("device", "auto", "native"), DEVICES, ids=[d.kind for d, *_ in DEVICES])
def test_what_a_device_runs_natively_and_what_auto_makes_of_it(device, auto, native):
    assert resolve_format(AUTO, device).name == auto
    assert {name for name in QUANTIZING if FORMATS[name].is_native(device)} == native
    for name, form in FORMATS.items():
        assert resolve_format(name, device) is form
        description = form.describe(device)
        assert description.startswith(f"{name} (")
        assert ("emulated" in description) == (name in QUANTIZING and name not in native)


@pytest.mark.parametrize(
    ("name", "precision", "device", "decoding", "products"),
    [
        ("auto", "bf16", DeviceInfo("gpu", "NVIDIA H200", (9, 0)), "bfloat16", "float16"),
        ("auto", "fp32", DeviceInfo("gpu", "NVIDIA H200", (9, 0)), None, "float32"),
        ("auto", "bf16", DeviceInfo("gpu", "V100", (7, 0)), None, "float32"),
        ("auto", "bf16", DeviceInfo("tpu", "TPU v6e"), "bfloat16", "bfloat16"),
        ("auto", "bf16", DeviceInfo("cpu"), None, "float32"),
        ("half", "fp32", DeviceInfo("cpu"), "bfloat16", "float16"),
        ("fp32", "bf16", DeviceInfo("gpu", "NVIDIA H200", (9, 0)), "float32", "float32"),
    ],
)
def test_what_pictures_are_decoded_and_scored_in(name, precision, device, decoding, products):
    assert scoring_dtypes(name, precision, device) == (
        decoding and jnp.dtype(decoding),
        jnp.dtype(products),
    )


def test_the_facts_of_a_device_are_jaxs():
    def device_info(**facts):
        return DeviceInfo.from_jax(SimpleNamespace(platform="gpu", device_kind="x", **facts))

    assert device_info(compute_capability="10.0").capability == (10, 0)
    assert device_info(compute_capability="gfx942").capability == device_info().capability == (0, 0)
    assert DeviceInfo.from_jax(jax.devices()[0]).platform == "cpu"


def test_every_name_of_the_configuration_is_a_format():
    assert set(get_args(Precision)) == {*FORMATS, AUTO}
