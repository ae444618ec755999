"""JAX's flash attention for TPUs behind `attention`: interpreted on CPUs, against attention that is
written out.
"""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas
from jax.experimental.pallas.ops.tpu import flash_attention as kernel

from solrl_jax.models.layers.attention import attention
from solrl_jax.parallel.sharding import AXES, make_mesh
from solrl_jax.quant import compile_target
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


def operands():
    rng = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(rng.standard_normal((ROWS, length, N, H)), jnp.float32) for length in (T, S, S)
    )
    return q, k, v, jnp.asarray(rng.random((ROWS, 1, 1, S)) < 0.5)


def written_out(q, k, v, mask):
    return jax.nn.dot_product_attention(q, k, v, None, mask, scale=0.1, implementation="xla")


def flash(q, k, v, mask):
    return attention(q, k, v, mask, scale=0.1)


def same(ours, theirs):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * np.abs(b).max())


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

    wanted = mapped(written_out)
    with jax.set_mesh(make_mesh(2, 2, 2)):
        same(jax.jit(lambda: mapped(flash, AXES[:2]))(), wanted)
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
