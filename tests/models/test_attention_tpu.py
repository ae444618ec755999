"""JAX's flash attention for TPUs behind `attention`: interpreted on CPUs, against attention that is
written out.
"""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental import pallas
from jax.experimental.pallas.ops.tpu import flash_attention as kernel

from solrl_jax.models.layers.attention import attention
from solrl_jax.models.layers.attention_tpu import block_size
from solrl_jax.models.layers.heads import heads_first, heads_last, split_heads
from solrl_jax.models.layers.norm import RMSNorm
from solrl_jax.models.layers.rotary import rotate_pairs
from solrl_jax.parallel.sharding import AXES, make_mesh
from solrl_jax.quant import compile_target
from solrl_jax.quant.lazy import LazyActivation
from tests.cases import first_is_quick

# neither length is a multiple of the kernel's tile
ROWS = 4
T = 130
S = 150
N = 2
H = 16


@pytest.fixture(autouse=True)
def tpu(monkeypatch):
    """Programs are traced for TPUs, and the kernel is interpreted."""
    interpreted = types.SimpleNamespace(
        **vars(pallas) | {"pallas_call": functools.partial(pallas.pallas_call, interpret=True)}
    )
    monkeypatch.setattr(kernel, "pl", interpreted)
    monkeypatch.setattr(compile_target, "platform", lambda: "tpu")
    jax.clear_caches()
    yield
    jax.clear_caches()


def operands(t=T, s=S, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((ROWS, n, N, H)), dtype) for n in (t, s, s))
    return q, k, v, jnp.asarray(rng.random((ROWS, 1, 1, s)) < 0.5)


def written_out(q, k, v, mask):
    return jax.nn.dot_product_attention(q, k, v, None, mask, scale=0.1, implementation="xla")


def flash(q, k, v, mask):
    return attention(q, k, v, mask, scale=0.1)


def same(ours, theirs, tolerance=2e-6):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max())


def kernels(f, *arrays):
    """How many kernels a function calls."""
    return str(jax.make_jaxpr(f)(*arrays)).count("pallas_call[")


@pytest.mark.slow
@pytest.mark.parametrize("masked", first_is_quick([True, False]))
def test_values_and_gradients(masked):
    q, k, v, mask = operands()
    mask = mask if masked else None
    weights = jnp.asarray(np.random.default_rng(1).standard_normal(q.shape), jnp.float32)

    def gradients(f):
        return jax.jit(lambda *qkv: jax.vjp(lambda *a: f(*a, mask), *qkv)[1](weights))

    assert kernels(lambda *qkv: flash(*qkv, mask), q, k, v) == 1
    same(jax.jit(flash)(q, k, v, mask), written_out(q, k, v, mask))
    same(gradients(flash)(q, k, v), gradients(written_out)(q, k, v))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("t", "s", "dtype", "tolerance"),
    [
        (T, 800, jnp.float32, 2e-6),  # two blocks of keys
        (800, S, jnp.float32, 2e-6),  # two blocks of queries
        # one block, and three in the backward pass; BF16 has 8 bits
        (1100, 1100, jnp.bfloat16, 2**-7),
    ],
)
def test_several_blocks(t, s, dtype, tolerance):
    q, k, v, mask = operands(t, s, dtype)
    weights = jnp.asarray(np.random.default_rng(1).standard_normal(q.shape), dtype)

    def value_and_gradients(f):
        def run(*qkv):
            value, gradient = jax.vjp(lambda *a: f(*a, mask), *qkv)
            return value, gradient(weights)

        outputs = jax.jit(run)(q, k, v)
        return jax.tree.map(lambda x: np.asarray(x, np.float32), outputs)

    same(value_and_gradients(flash), value_and_gradients(written_out), tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [24, 30])
def test_heads_in_groups_of_rows_are_the_same_heads(rows, monkeypatch):
    x = jnp.arange(2 * rows * 6 * H, dtype=jnp.float32).reshape(2, rows, 6 * H)
    split = split_heads(x, H)
    assert split.shape == ((2, 3, 8, 6, H) if rows == 24 else (2, rows, 6, H))
    np.testing.assert_array_equal(split.reshape(x.shape), x)
    norm = RMSNorm(H, eps=1e-6)
    per_head = norm.per_head(LazyActivation.from_array(x)).value
    np.testing.assert_array_equal(per_head, norm(x.reshape(2, rows, 6, H)).reshape(x.shape))
    if rows == 24:
        first = heads_first(x, H)
        np.testing.assert_array_equal(first, x.reshape(2, rows, 6, H).swapaxes(1, 2))
        np.testing.assert_array_equal(heads_last(first), x)
    angles = jnp.asarray(np.random.default_rng(0).uniform(0, 6, (1, rows, H // 2)), jnp.float32)
    rotated = rotate_pairs(x, jnp.cos(angles), jnp.sin(angles))
    monkeypatch.setattr(compile_target, "platform", lambda: "cpu")
    want = rotate_pairs(x, jnp.cos(angles), jnp.sin(angles))
    np.testing.assert_array_equal(rotated, want)


@given(length=st.integers(1, 40_000), limit=st.integers(1, 12).map(lambda tiles: 128 * tiles))
def test_blocks_are_as_few_as_the_limit_allows(length, limit):
    size = block_size(length, limit)
    assert size % 128 == 0
    assert 128 <= size <= limit
    count = -(-length // size)
    assert count == -(-length // limit)
    assert block_size(count * size, limit) == size


@pytest.mark.slow
def test_each_device_has_its_rows_and_heads():
    """As the update maps it: groups of rows over devices, each with a gradient of its own."""
    arrays = operands()
    groups = [x.reshape(ROWS, 1, *x.shape[1:]) for x in arrays]

    def loss(f, scale, q, k, v, mask):
        return (f(q * scale, k, v, mask) ** 2).sum()

    def mapped(f, axes=None):
        each = jax.value_and_grad(functools.partial(loss, f))
        return jax.vmap(each, in_axes=(None, 0, 0, 0, 0), spmd_axis_name=axes)(
            jnp.float32(1.1), *groups
        )

    expected = mapped(written_out)
    with jax.set_mesh(make_mesh(2, 2, 2)):
        same(jax.jit(lambda: mapped(flash, AXES[:2]))(), expected)
        same(jax.jit(flash)(*arrays), written_out(*arrays))


@pytest.mark.parametrize("change", ["bias", "softcap", "full mask", "shared heads", "odd head"])
def test_what_the_kernel_does_not_take_is_written_out(change):
    q, k, v, mask = operands()
    options = {"bias": {"bias": jnp.zeros((1, N, T, S))}, "softcap": {"softcap": 2.0}}.get(
        change, {}
    )
    if change == "full mask":
        mask = jnp.broadcast_to(mask, (ROWS, 1, T, S))
    if change == "shared heads":
        k = k[:, :, :1]
        v = v[:, :, :1]
    if change == "odd head":
        q, k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, 130 - H))) for x in (q, k, v))
    assert kernels(lambda q, k, v: attention(q, k, v, mask, **options), q, k, v) == 0
