"""The NVFP4 format: bits equal to torchao's, and the differences.

Laws of every format: `test_formats.py`.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

from solrl_jax.quant.matmul import dequantize
from solrl_jax.quant.nvfp4 import (
    BLOCK,
    SMALLEST_SCALE,
    pack,
    quantize,
    scale_blocks,
    unpack,
)

FLOOR = 0x08  # bits of the E4M3 number 2^-6, torchao's smallest block scale
GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
HALF_WAY = (GRID[1:] + GRID[:-1]) / 2

quantize_jit = jax.jit(quantize)
dequantize_jit = jax.jit(dequantize)
round_trip = jax.jit(lambda w: dequantize(quantize(w)))
unhurried = settings(
    max_examples=80, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
RULES = {"eager": scale_blocks, "compiled": jax.jit(scale_blocks)}


def ours(x, scale, rule="compiled"):
    """Packed codes and the bits of the block scales."""
    values, scales = RULES[rule](jnp.asarray(x), jnp.asarray(scale, jnp.float32))
    return np.asarray(pack(values.astype(jnp.float4_e2m1fn))), np.asarray(scales).view(np.uint8)


def torchao(x, scale):
    scales, packed = nvfp4_quantize(
        torch.from_numpy(x), BLOCK, torch.from_numpy(np.asarray(scale, np.float32))
    )
    return packed.numpy(), scales.view(torch.uint8).numpy()


def by_the_rule(x, scale):
    """The rule written out in NumPy, without torchao's floor and without XLA's flush of subnormal
    numbers.
    """
    blocks = x.reshape(len(x), -1, BLOCK)
    with np.errstate(over="ignore"):
        scales = np.minimum(np.abs(blocks).max(-1) / np.float32(6) / scale, np.float32(448)).astype(
            ml_dtypes.float8_e4m3fn
        )
        s32 = scales.astype(np.float32)
        reciprocal = np.where(
            s32 > 0, (np.float32(1) / scale) / np.where(s32 > 0, s32, np.float32(1)), np.float32(0)
        )
    codes = (
        np.clip(blocks * reciprocal[..., None], -6, 6)
        .astype(ml_dtypes.float4_e2m1fn)
        .reshape(x.shape)
    )
    encode_packed = codes.view(np.uint8) & 15
    return encode_packed[:, 0::2] | encode_packed[:, 1::2] << 4, scales.view(np.uint8)


def tensor_scale(x):
    return np.abs(x).max() / np.float32(448 * 6)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def zero_blocks():
    x = normal(64, 16, BLOCK, seed=1)
    x[np.random.default_rng(2).random((64, 16)) < 0.3] = 0.0
    return x.reshape(64, -1)


def half_way_values():
    """Every tie between neighboring codes, both signs, at scales that are powers of two (so that
    the ties are exact).
    """
    row = np.concatenate([[6.0], HALF_WAY, [-6.0], -HALF_WAY]).astype(np.float32)
    return np.concatenate([row * np.float32(2.0) ** k for k in range(-5, 9)])[None]


def half_way_scales():
    """Block maxima whose scale is a tie between neighboring E4M3 numbers."""
    x = np.zeros((14, 8, BLOCK), np.float32)
    x[:, :, 0] = 6 * np.outer(2.0 ** np.arange(-6, 8), 1 + (2 * np.arange(8) + 1) / 16)
    return x.reshape(14, -1)


def data():
    rng = np.random.default_rng(3)
    cauchy = rng.standard_cauchy((64, 256)).astype(np.float32)
    lognormal = (
        np.exp(3 * rng.standard_normal((64, 256))) * rng.choice([-1, 1], (64, 256))
    ).astype(np.float32)
    x = normal(64, 256)
    rows = x * np.float32(10.0) ** np.arange(-16, 16).repeat(2).astype(np.float32)[:, None]
    return {
        "normal": (x, tensor_scale(x)),
        "cauchy": (cauchy, tensor_scale(cauchy)),
        "lognormal": (lognormal, tensor_scale(lognormal)),
        "zero blocks": (zero_blocks(), tensor_scale(zero_blocks())),
        "ties of values": (half_way_values(), np.float32(1)),
        "ties of scales": (half_way_scales(), np.float32(1)),
        "above what the scale represents": (x, tensor_scale(x) / np.float32(16)),
        "large": (x * np.float32(1e35), tensor_scale(x * np.float32(1e35))),
        "small": (x * np.float32(1e-30), tensor_scale(x * np.float32(1e-30))),
        "a scale a row": (rows, np.abs(rows).max(1, keepdims=True) / np.float32(448 * 6)),
    }


DATA = data()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("case", DATA)
def test_bits_equal_torchao(case, rule):
    x, scale = DATA[case]
    codes, scales = ours(x, scale, rule)
    their_codes, their_scales = torchao(x, scale)
    compared = their_scales > FLOOR  # the others may have been lifted: the tests below
    assert compared.mean() > 0.6
    np.testing.assert_array_equal(scales[compared], their_scales[compared])

    def by_block(packed):
        return packed.reshape(*scales.shape, BLOCK // 2)

    np.testing.assert_array_equal(by_block(codes)[compared], by_block(their_codes)[compared])
    if not case.startswith("ties"):  # there is something to compare: all codes occur (-0 too)
        assert set(np.concatenate([codes & 15, codes >> 4], axis=None)) == set(range(16))


def test_the_written_out_rule_equals_torchao_where_it_does_not_lift():
    for x, scale in DATA.values():
        codes, scales = by_the_rule(x, scale)
        their_codes, their_scales = torchao(x, scale)
        compared = np.repeat(their_scales > FLOOR, BLOCK // 2, axis=1)
        np.testing.assert_array_equal(
            scales[their_scales > FLOOR], their_scales[their_scales > FLOOR]
        )
        np.testing.assert_array_equal(codes[compared], their_codes[compared])


def test_zeros_have_a_zero_scale_where_torchao_has_its_floor():
    x = np.zeros((4, 64), np.float32)
    x[1, ::2] = -0.0
    for scale in (
        np.float32(0),
        np.float32(1),
    ):  # of an all-zero tensor, and of one with something elsewhere
        codes, scales = ours(x, scale)
        assert not scales.any()
        assert not (codes & 0x77).any()
        assert not round_trip(x.T).any()
    codes, scales = torchao(x, np.float32(1))
    assert (scales == FLOOR).all()
    assert not (codes & 0x77).any()
    _, scales = torchao(x, np.float32(0))
    assert (scales & 0x7F == 0x7F).all()  # NaN: 0 / 0


@pytest.mark.slow
def test_exact_ties_under_other_scales_may_fall_either_way_when_compiled():
    """XLA turns (1 / t) / s into 1 / (t s), one rounding less.

    Only the codes of exact ties may change by that.
    """
    scale = np.float32(1.1)
    row = np.concatenate([[6.0], HALF_WAY, [-6.0], -HALF_WAY]).astype(np.float32)
    x = (
        np.concatenate([row * np.float32(s) for s in (1, 1.125, 1.25, 1.5, 1.875, 448)])[None]
        * scale
    )
    codes, scales = torchao(x, scale)
    for rule, tie in (("eager", False), ("compiled", True)):
        our_codes, our_scales = ours(x, scale, rule)
        np.testing.assert_array_equal(our_scales, scales)
        if not tie:
            np.testing.assert_array_equal(our_codes, codes)

        def value(packed):
            return np.abs(np.asarray(unpack(jnp.asarray(packed))).astype(np.float32)[0])

        away = np.abs(
            np.abs(x[0])
            / np.repeat(scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32)[0], BLOCK)
            / scale
        )
        assert (np.abs(value(our_codes) - away) <= np.abs(away[:, None] - GRID).min(1) + 1e-5).all()


@pytest.mark.parametrize("rule", RULES)
def test_small_blocks_keep_their_resolution_where_torchao_lifts_their_scale(rule):
    """torchao lifts block scales below 2^-6, the smallest normal E4M3 number, to 2^-6; ours go on
    to 2^-9 and then to zero.
    """
    shape = np.array([6, 4, 3, 2, 1.5, 1, 0.5, -0.5, -6, -4, -3, -2, -1.5, -1, 0, -0.0], np.float32)
    factors = [
        448,
        2**-6,
        2**-7,
        2**-8,
        3 * 2**-9,
        2**-9,
        1.5 * 2**-9,
        1.25 * 2**-10,
        2**-10,
        2**-11,
        0,
    ]
    x = np.concatenate([shape * np.float32(f) for f in factors])[None]
    codes, scales = ours(x, 1.0, rule)

    def values(bits):
        return bits.view(ml_dtypes.float8_e4m3fn).astype(np.float32)[0].tolist()

    # 1.5 * 2^-9 is a tie and goes to the even neighbor, 2^-8; 2^-10 is a tie and goes to zero
    assert values(scales) == [448, 2**-6, 2**-7, 2**-8, 3 * 2**-9, 2**-9, 2**-8, 2**-9, 0, 0, 0]
    expected_codes, expected_scales = by_the_rule(x, np.float32(1))
    np.testing.assert_array_equal(codes, expected_codes)
    np.testing.assert_array_equal(scales, expected_scales)

    their_codes, their_scales = torchao(x, np.float32(1))
    assert values(their_scales) == [448] + 10 * [2**-6]

    def block(packed, i):
        return np.asarray(unpack(jnp.asarray(packed.reshape(-1, 8)[i]))).astype(np.float32).tolist()

    exact = shape.tolist()
    assert [block(codes, i) for i in range(6)] == 6 * [exact]  # lossless down to 2^-9
    assert [block(their_codes, i) for i in range(2)] == 2 * [exact]
    # at 2^-8 the lifted scale leaves a quarter of the range: 1.5, 1, 0.75 -> 1, 0.5, 0.375 -> 0.5,
    # 0.25 -> 0, ...
    assert block(their_codes, 3) == [
        1.5,
        1,
        1,
        0.5,
        0.5,
        0,
        0,
        0,
        -1.5,
        -1,
        -1,
        -0.5,
        -0.5,
        0,
        0,
        0,
    ]
    assert block(codes, 9) == 16 * [0]  # a scale that rounds to zero


def test_float32_subnormals_and_too_small_scales_give_zero_where_torchao_resolves_them():
    """XLA on CPU reads subnormal float32 as zero.

    So a scale is used only if its product with any block scale is normal.
    """
    shape = np.array([6, 4, 3, 2, 1.5, 1, 0.5, 0] * 2, np.float32)
    x = (shape.astype(np.float64) * 2.0**-127).astype(np.float32)[
        None
    ]  # 1.5, 1 and 0.5 times this are subnormal
    assert SMALLEST_SCALE > 2.0**-121
    their_codes, their_scales = torchao(x, np.float32(2.0**-121))
    assert (their_scales == FLOOR).all()
    np.testing.assert_array_equal(
        np.asarray(unpack(jnp.asarray(their_codes))).astype(np.float32)[0], shape
    )
    codes, scales = ours(x, 2.0**-121)
    assert not codes.any()
    assert not scales.any()

    # under the smallest usable scale, in a block of the smallest scale, a subnormal value of 0.375
    # would round to 0.5
    scale = np.nextafter(np.float32(SMALLEST_SCALE), np.float32(1))
    x = (np.array([6, 4, 0.375, -0.375] * 4) * 2.0**-9 * scale).astype(np.float32)[None]
    assert 0 < x[0, 2] < np.finfo(np.float32).tiny
    resolved, expected_scales = by_the_rule(x, scale)
    codes, scales = ours(x, scale)
    np.testing.assert_array_equal(scales, expected_scales)

    def value(packed):
        return np.asarray(unpack(jnp.asarray(packed))).astype(np.float32)[0].tolist()

    assert value(resolved) == [6, 4, 0.5, -0.5] * 4
    assert value(codes) == [6, 4, 0, 0] * 4


def test_pack_is_the_inverse_of_unpack_with_the_even_index_in_the_low_nibble():
    every_byte = jnp.arange(256, dtype=jnp.uint8).reshape(2, 128)
    codes = unpack(every_byte)
    assert codes.shape == (2, 256)
    np.testing.assert_array_equal(pack(codes), every_byte)
    one = jnp.zeros(4).at[0].set(0.5).at[3].set(-6).astype(jnp.float4_e2m1fn)
    np.testing.assert_array_equal(pack(one), [0x01, 0xF0])


def representable(k=6, blocks=3, n_out=5, seed=0):
    """Matrices [16 blocks, n_out] of numbers that NVFP4 has: scales 448 in one block, smaller (and
    subnormal) in others.
    """
    rng = np.random.default_rng(seed)
    codes = rng.choice(GRID, (n_out, blocks, BLOCK)) * rng.choice([-1, 1], (n_out, blocks, BLOCK))
    codes[:, :, 3] = (
        6.0  # each block has its largest code, so that its scale is the one it was made with
    )
    scales = rng.choice([448, 416, 13, 1.125, 2**-6, 3 * 2**-9, 2**-9], (n_out, blocks))
    scales[0, 0] = 448
    return (codes * scales[..., None] * 2.0**k).astype(np.float32).reshape(n_out, -1).T


@pytest.mark.parametrize("k", [-30, 0, 6])
def test_the_round_trip_is_exact_on_representable_values(k):
    w = representable(k)
    q = quantize_jit(w)
    assert float(q.tensor_scale) == 2.0**k
    np.testing.assert_array_equal(dequantize_jit(q), w)
    assert len(np.unique(w)) > 50


ORDINARY = st.floats(2.0**-20, 2.0**20, width=32)
SIGNED = st.builds(lambda x, sign: x * sign, ORDINARY, st.sampled_from([-1.0, 1.0])) | st.just(0.0)


@unhurried
@given(arrays(np.float32, (64, 2), elements=SIGNED))
def test_every_code_is_the_nearest_so_a_block_errs_by_half_a_step_at_most(w):
    q = quantize_jit(w)
    scales = np.asarray(q.scales)[:2].astype(np.float64) * float(q.tensor_scale)
    blocks = w.T.reshape(2, -1, BLOCK).astype(np.float64)
    codes = np.asarray(unpack(q.codes)).astype(np.float64)[:2].reshape(blocks.shape)
    assert not np.asarray(q.codes)[2:].any()  # fills up
    live = scales > 0
    scaled = np.clip(np.abs(blocks[live]) / scales[live][:, None], 0, 6)
    nearest = np.abs(scaled[..., None] - GRID).min(-1)
    assert (
        np.abs(scaled - np.abs(codes[live])) <= nearest + 1e-5
    ).all()  # of a step: float32 rounding at a tie
    assert (nearest <= 1).all()
    # a block has no scale only if it is too small for every scale of E4M3
    assert (np.abs(blocks[~live]) <= 6 * 2.0**-10 * float(q.tensor_scale) * (1 + 1e-6)).all()
    assert not codes[~live].any()
