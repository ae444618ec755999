"""`models.layers.attention_fp8`: E4M3 against the formula in float64, which networks take it, and
what a GPU is asked for.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from solrl_jax.config.presets import resolve
from solrl_jax.errors import InputError
from solrl_jax.models.checks import check_attention
from solrl_jax.models.layers.attention_fp8 import E4M3, PROBABILITY_SCALE, attention_fp8
from solrl_jax.models.layers.softmax_attention import JointAttention, SelfAttention
from solrl_jax.models.locate import open_model
from solrl_jax.quant.lazy import LazyActivation, cast_saturating
from tests.cases import first_is_quick
from tests.parity import relative

B = 2
T = 7
S = 33
N = 3
H = 16


def rounded(x):
    return np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)


def operands(scale=1.0):
    rng = np.random.default_rng(0)
    return [scale * rng.standard_normal((B, n, N, H)) for n in (T, S, S)]


def formula(q, k, v):
    """Written out in float64, rounded where cuDNN rounds."""
    logits = np.einsum("btnh,bsnh->bnts", rounded(q), rounded(k)) / np.sqrt(H)
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    weights = rounded(PROBABILITY_SCALE * powers)
    weights /= PROBABILITY_SCALE * powers.sum(-1, keepdims=True)
    return np.einsum("bnts,bsnh->btnh", weights, rounded(v))


@pytest.mark.slow
@pytest.mark.parametrize("scale", first_is_quick([1.0, 4.0, 1e-2]))
def test_operands_probabilities_and_result_are_in_e4m3(scale):
    arrays = operands(scale)
    out = attention_fp8(*(cast_saturating(jnp.asarray(a, jnp.float32), E4M3) for a in arrays))
    assert out.dtype == E4M3
    exact = formula(*arrays)
    ours = np.asarray(out).astype(np.float64)
    near = (
        np.abs(ours - exact) <= 2.0**-4 * np.abs(exact) + 2.0**-10
    )  # half a unit of E4M3, normal and subnormal
    assert near.all()
    assert (ours == rounded(exact)).mean() > 0.99  # float32 rounds few of them to the other side


@pytest.mark.slow
def test_probabilities_keep_their_bits_down_to_a_sixteen_thousandth():
    """One key is near, and 32 are far: E4M3 without a factor would make 0 of those below 2^-10."""
    q = np.zeros((1, 1, 1, H))
    k = np.zeros((1, S, 1, H))
    q[..., 0] = 4.0
    k[0, 1:, 0, 0] = np.log(2.0**-12) * np.sqrt(H) / 4
    v = np.full((1, S, 1, H), 16.0)
    v[0, 0] = 0
    out = attention_fp8(*(jnp.asarray(a, jnp.float32).astype(E4M3) for a in (q, k, v)))
    assert relative(np.asarray(out).astype(np.float32), formula(q, k, v)) < 0.06
    assert formula(q, k, v).min() > 16 * 2.0**-8


def test_large_values_saturate():
    big = cast_saturating(jnp.asarray([1e4, -500.0, 448.0, 0.1]), E4M3)
    np.testing.assert_array_equal(np.asarray(big).astype(np.float32)[:3], [448, -448, 448])
    assert np.isnan(
        np.asarray(cast_saturating(jnp.asarray([np.nan]), E4M3)).astype(np.float32)
    ).all()


@pytest.mark.parametrize("joint", [False, True])
def test_a_network_takes_it_where_it_is_asked_for(joint):
    make = JointAttention if joint else SelfAttention
    attend = make(32, H, normed=True, rngs=nnx.Rngs(0), **({} if joint else {"projected": True}))
    x = jnp.asarray(np.random.default_rng(1).standard_normal((B, S, 32)), jnp.bfloat16)
    streams = [LazyActivation.from_array(x)] * (2 if joint else 1)

    def run(fp8_attention):
        outputs = jax.jit(lambda: attend(*streams, fp8_attention=fp8_attention))()
        return jax.tree.leaves(outputs)

    baseline = run(False)
    eight = run(True)
    for a, b in zip(baseline, eight, strict=True):
        assert a.dtype == b.dtype == jnp.bfloat16
        assert 1e-3 < relative(b.astype(jnp.float32), a.astype(jnp.float32)) < 0.1
    assert all(np.array_equal(a, b) for a, b in zip(baseline, run(False), strict=True))


@pytest.mark.slow
def test_it_is_refused_where_attention_has_a_mask():
    config = resolve("tiny", ["rollout.explore.attention=fp8"])
    pipelines = {
        name: open_model(resolve("tiny", [f"model={name}"]).model.path)
        for name in ("tiny-sana", "tiny-flux", "tiny-sd3")
    }
    for name in ("tiny-flux", "tiny-sd3"):
        check_attention(config, pipelines[name])
    with pytest.raises(
        InputError,
        match=r"^rollout\.explore\.attention=fp8: not available for SanaPipeline",
    ):
        check_attention(config, pipelines["tiny-sana"])
    check_attention(resolve("tiny"), pipelines["tiny-sana"])
