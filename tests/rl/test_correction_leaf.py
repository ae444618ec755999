"""What goes past a quantized product: exact where nothing is quantized, and worth having where
inputs have few directions.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from solrl_jax.quant.formats import FORMATS
from solrl_jax.quant.matmul import dequantize, matmul
from solrl_jax.rl.explore.options.correction import Corrected, Probe, correct
from tests.cases import first_is_quick
from tests.lowering import cuda_text

ROWS = 96
N_IN = 64
N_OUT = 48
RANK = 8
QUANTIZING = [name for name, form in FORMATS.items() if form.quantize]


def normal(*shape, seed):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


W = normal(N_IN, N_OUT, seed=1) / N_IN**0.5
DIRECTIONS = jnp.linalg.qr(normal(N_IN, N_IN, seed=2))[0]
ENERGY = np.where(
    np.arange(N_IN) < RANK, 4.0, 0.3
)  # of inputs along them: 98 % of it in the first eight
X = normal(ROWS, N_IN, seed=3) * ENERGY @ DIRECTIONS.T
BASIS = DIRECTIONS[:, :RANK]


def relative(got, want):
    got = np.asarray(got, np.float64)
    want = np.asarray(want, np.float64)
    return np.linalg.norm(got - want) / np.linalg.norm(want)


@pytest.mark.parametrize("basis", first_is_quick([BASIS, BASIS.astype(jnp.bfloat16)]))
def test_without_a_format_the_two_products_are_the_whole_one(basis):
    """As `W - U U^T W` has nothing along U, if U is orthonormal; rounded to BF16, off by what it is
    from that.
    """
    w = correct(lambda w: w, W, basis)
    assert (
        relative(w.basis.astype(jnp.float32) @ w.basis_weight.astype(jnp.float32) + w.remainder, W)
        < 1e-6
    )
    error = relative(matmul(X, w), X @ W)
    orthonormal = relative(basis.astype(jnp.float32).T @ basis.astype(jnp.float32), jnp.eye(RANK))
    assert error < max(1e-6, 3 * orthonormal)
    assert relative(X @ w.remainder, X @ W) > 0.1  # the branch matters


@pytest.mark.slow
@pytest.mark.parametrize("name", first_is_quick(QUANTIZING))
def test_a_correction_leaves_a_format_less_to_get_wrong(name):
    plain = FORMATS[name].quantize(W)
    corrected = correct(FORMATS[name].quantize, W, BASIS)
    before, after = (relative(matmul(X, w), X @ W) for w in (plain, corrected))
    wrong = relative(matmul(X, correct(FORMATS[name].quantize, W, DIRECTIONS[:, -RANK:])), X @ W)
    print(f"{name}: {before:.4f}, corrected {after:.4f}, along the smallest directions {wrong:.4f}")
    assert after < before / 4  # 2 % of the energy is left to it, 1/7 of the size
    assert wrong > before / 2
    assert relative(dequantize(corrected), W) < 1.1 * relative(dequantize(plain), W)


@pytest.mark.slow
def test_a_row_is_corrected_alone():
    w = correct(FORMATS["nvfp4"].quantize, W, BASIS.astype(jnp.bfloat16))
    x = X.astype(jnp.bfloat16)
    together = matmul(x, w)
    alone = matmul(x[5:6], w)
    assert alone.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        np.float32(together[5]), np.float32(alone[0]), rtol=2**-7, atol=2**-8
    )
    assert relative(together[5], together[6]) > 0.1


def test_the_remainder_is_multiplied_by_xlas_own_block_scaled_product_on_cuda():
    w = correct(FORMATS["nvfp4"].quantize, W, BASIS)
    text = cuda_text(jax.jit(matmul), X, w)
    assert "@__op$block_scaled_dot(" in text


def test_its_bytes_are_those_of_its_arrays():
    w = correct(FORMATS["nvfp4"].quantize, W, BASIS.astype(jnp.bfloat16))
    assert isinstance(w, Corrected)
    assert w.nbytes == FORMATS["nvfp4"].quantize(W).nbytes + 2 * RANK * (N_IN + N_OUT)


@pytest.mark.slow
def test_the_gradient_of_a_probe_is_its_inputs_second_moment_times_its_basis():
    """Through a scan over layers and a nonlinearity, whatever is differentiated; and a probe
    multiplies as its weight does.
    """
    layers = jnp.stack([normal(N_IN, N_IN, seed=s) / N_IN**0.5 for s in (5, 6, 7)])
    bases = jnp.stack([normal(N_IN, RANK, seed=s) for s in (8, 9, 10)])

    def network(x, weights):
        return jax.lax.scan(lambda x, w: (jnp.tanh(matmul(x, w)), None), x, weights)[0]

    np.testing.assert_array_equal(network(X, Probe(layers, bases)), network(X, layers))
    inputs = X
    want = []
    for w, basis in zip(layers, bases, strict=True):
        want.append(
            np.asarray(inputs, np.float64).T @ np.asarray(inputs, np.float64) @ np.asarray(basis)
        )
        inputs = jnp.tanh(inputs @ w)
    for f in (jnp.sum, lambda y: (y**3).sum(), lambda y: 0.0 * y[0, 0]):
        got = jax.grad(lambda bases, f=f: f(network(X, Probe(layers, bases))))(bases)
        assert relative(got, np.stack(want)) < 1e-5
    assert relative(want[0], want[1]) > 0.1
