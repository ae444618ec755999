"""Products divided over the axis `tensor`: equal to the bit, forwards and backwards, and really
divided.
"""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from solrl_jax.models.layers.attention import attention
from solrl_jax.models.layers.stack import gather
from solrl_jax.parallel.sharding import jit, make_mesh, parameter_sharding
from solrl_jax.quant.matmul import LowRank, matmul
from tests.cases import first_is_quick
from tests.quant.leaves import MAKE

ROWS = 24
N_IN = 160
N_OUT = 96


@pytest.fixture(scope="module")
def operands():
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.bfloat16)

    return normal(ROWS, N_IN), normal(N_IN, N_OUT)


def on_mesh(tensor, params, x, f):
    """`f(gathered params, x)` on 2 x 1 x `tensor` devices, and the compiled program."""
    mesh = make_mesh(2, 1, tensor, devices=jax.devices()[: 2 * tensor])
    with jax.set_mesh(mesh):
        placed = jax.device_put(params, parameter_sharding(mesh, params))
        x = jax.device_put(x, NamedSharding(mesh, PartitionSpec(("data", "fsdp"))))
        program = jit(lambda params, x: f(gather(params), x)).lower(placed, x).compile()
        return jax.device_get(program(placed, x)), program.as_text()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("rows", "width", "columns"), first_is_quick([(8, 16, 16), (64, 128, 64), (128, 128, 32)])
)
def test_parts_of_a_product_are_parts_of_the_product(rows, width, columns, dtype):
    """With AMX, XLA chooses kernels by shape.

    With the options of `sharding.jit` it does so only for single rows and sums of some hundred
    terms.
    """
    rng = np.random.default_rng(rows)
    x, w = (
        jnp.asarray(rng.normal(size=shape), dtype) for shape in ((rows, width), (width, columns))
    )
    product = jit(lambda x, w: jnp.matmul(x, w, preferred_element_type=jnp.float32))
    whole = np.asarray(product(x, w))
    half = rows // 2
    np.testing.assert_array_equal(
        np.concatenate([product(x[:half], w), product(x[half:], w)]), whole
    )
    np.testing.assert_array_equal(
        np.hstack(jax.device_get([product(x, part) for part in jnp.split(w, 2, axis=1)])), whole
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["array", *MAKE])
def test_a_product_is_the_same_to_the_bit(kind, operands):
    x, w = operands
    params = {"kernel": w if kind == "array" else MAKE[kind](w)}

    def product(params, x):
        return matmul(x, params["kernel"])

    one, _ = on_mesh(1, params, x, product)
    four, text = on_mesh(4, params, x, product)
    np.testing.assert_array_equal(four, one)
    assert np.abs(np.asarray(one, np.float32)).max() > 10
    columns = [int(n) for n in re.findall(r"= \w+\[\d+,(\d+)\]\S* (?:dot|custom-call)\(", text)]
    outputs = 128 if kind == "nvfp4" else N_OUT  # filled up
    assert outputs // 4 in columns, columns
    assert not {outputs, N_OUT} & {*columns}, columns  # no device computes all outputs
    assert "all-reduce" not in text  # and no sum is divided


def test_gradients_are_the_same_to_the_bit(operands):
    x, w = operands
    params = {"kernel": MAKE["low rank"](w)}

    def gradients(params, x):
        def loss(adapter, x):
            return (
                matmul(x, LowRank(params["kernel"].base, *adapter, 0.5)).astype(jnp.float32) ** 2
            ).sum()

        return jax.grad(loss, argnums=(0, 1))((params["kernel"].a, params["kernel"].b), x)

    one, _ = on_mesh(1, params, x, gradients)
    four, _ = on_mesh(4, params, x, gradients)
    chex.assert_trees_all_equal(four, one)


@pytest.mark.slow
def test_heads_are_divided_and_attend_the_same(operands):
    q, k, v = (
        jnp.asarray(np.random.default_rng(i).normal(size=(2, 10, 8, 16)), jnp.bfloat16)
        for i in range(3)
    )

    def f(params, q):
        return attention(q, params["k"], params["v"])

    def loss(params, q):
        return (f(params, q).astype(jnp.float32) ** 2).sum()

    def both(params, q):
        return (f(params, q), jax.grad(loss, argnums=1)(params, q))

    (one, _), (four, text) = (
        on_mesh(1, {"k": k, "v": v}, q, both),
        on_mesh(4, {"k": k, "v": v}, q, both),
    )
    chex.assert_trees_all_equal(four, one)
    assert re.search(r"f32\[2,10,10\]\S* dot\(", text), (
        "a row, and two of its eight heads, on each device"
    )


def test_an_axis_that_does_not_come_out_even_stays_whole(operands):
    x = operands[0]
    w = operands[1][:, :90]

    def product(params, x):
        return matmul(x, params["kernel"])

    (one, _), (four, _) = (
        on_mesh(1, {"kernel": w}, x, product),
        on_mesh(4, {"kernel": w}, x, product),
    )
    np.testing.assert_array_equal(four, one)
