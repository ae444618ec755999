"""The contract of every kind of leaf: matmul, matrix, placement, stacks, jit and scan."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from solrl_jax.parallel.sharding import make_mesh, parameter_sharding
from solrl_jax.quant.leaf import Leaf, Quantized
from solrl_jax.quant.matmul import dequantize, matmul, output_partition_specs
from tests.cases import first_is_quick
from tests.quant.leaves import BOUND, EXACT, MAKE, QUANTIZING, normal

ROWS = 24
N_IN = 160
N_OUT = 96
LAYERS = 3
W = normal(N_IN, N_OUT, seed=1)
X = normal(ROWS, N_IN, seed=2)
product = jax.jit(matmul)

every_kind = pytest.mark.parametrize("kind", MAKE)


def relative(got, want):
    got = np.asarray(got, np.float64)
    want = np.asarray(want, np.float64)
    return np.linalg.norm(got - want) / np.linalg.norm(want)


@every_kind
def test_a_leaf_stands_for_its_matrix_and_multiplies_by_it(kind):
    leaf = MAKE[kind](W)
    assert isinstance(leaf, Leaf)
    matrix = dequantize(leaf)
    assert (matrix.shape, matrix.dtype) == (W.shape, jnp.float32)
    bound = BOUND.get(kind, EXACT)
    assert (
        relative(product(X, leaf), np.asarray(X, np.float64) @ np.asarray(matrix, np.float64))
        < bound
    )
    assert isinstance(leaf, Quantized) == (kind in BOUND)
    if kind != "low rank":  # which stands for more than the matrix it is made of
        assert relative(matrix, W) < bound
    assert relative(matrix, W) > 0 or kind in ("probe", "another kind")


@pytest.mark.slow
@every_kind
@pytest.mark.parametrize(
    ("dtype", "of_weight"),
    first_is_quick([(jnp.bfloat16, jnp.float32), (jnp.float32, jnp.float32)]),
)
def test_the_product_has_the_dtype_and_the_leading_axes_of_x(kind, dtype, of_weight):
    leaf = MAKE[kind](W.astype(of_weight))
    x = X.astype(dtype)
    flat = product(x, leaf)
    assert flat.dtype == dtype
    for shape in ((ROWS,), (4, 6), (2, 1, 12)):
        got = product(x.reshape(*shape, N_IN), leaf)
        assert (got.shape, got.dtype) == ((*shape, N_OUT), dtype)
        np.testing.assert_array_equal(got.reshape(ROWS, N_OUT), flat)
    assert dequantize(leaf).dtype == jnp.float32


@every_kind
@pytest.mark.parametrize("size", [0.0, 1e30, 1e-40, 1e-30])
def test_zero_huge_and_subnormal_numbers_give_no_nan(kind, size):
    """1e-40 is a subnormal float32.

    One row, or one column of the weight, is of that size; then all of them.
    """
    for shape, rows in ((slice(0, 1), slice(1, None)), (slice(None), slice(0, 0))):
        x = np.array(X)
        w = np.array(W)
        x[shape] *= np.float32(size)
        w[:, shape] *= np.float32(size)
        for operand, leaf in ((jnp.asarray(x), MAKE[kind](W)), (X, MAKE[kind](jnp.asarray(w)))):
            got = np.asarray(product(operand, leaf))
            matrix = np.asarray(dequantize(leaf))
            assert np.isfinite(got).all()
            assert np.isfinite(matrix).all()
        assert (
            rows == slice(0, 0)
            or np.abs(np.asarray(product(jnp.asarray(x), MAKE[kind](W))))[rows].max() > 1
        )
    np.testing.assert_array_equal(product(jnp.zeros_like(X), MAKE[kind](W)), 0)


@every_kind
def test_a_row_does_not_depend_on_the_other_rows(kind):
    leaf = MAKE[kind](W)
    factors = jnp.asarray([1, 1e3, 1e-3] * (ROWS // 3), jnp.float32)[:, None]
    np.testing.assert_array_equal(product(X, leaf)[::3], product(X * factors, leaf)[::3])
    # alone it is multiplied by another kernel, which adds up in another order
    np.testing.assert_allclose(product(X, leaf)[5:6], product(X[5:6], leaf), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@every_kind
@pytest.mark.parametrize("shape", [(N_IN, 128), (LAYERS, N_IN, 128)])
def test_outputs_are_divided_and_nothing_else(kind, shape):
    leaf = MAKE[kind](normal(*shape, seed=3))
    for ways in (1, 4, 5):
        specs = output_partition_specs(leaf, ways)
        assert jax.tree.structure(specs) == jax.tree.structure(leaf)
        divided = []
        for array, spec in zip(jax.tree.leaves(leaf), jax.tree.leaves(specs), strict=True):
            assert isinstance(spec, PartitionSpec)
            assert len(spec) <= array.ndim
            divided += [array.shape[axis] for axis, name in enumerate(spec) if name is not None]
        if ways != 4:  # five does not divide 128
            assert divided == []
        elif kind == "probe":  # its basis too
            assert divided == [128, 4]
        else:
            assert set(divided) == {128}


@every_kind
def test_placed_on_a_mesh_it_is_the_same_leaf_in_parts(kind):
    leaf = MAKE[kind](W)
    mesh = make_mesh(1, 1, 4, devices=jax.devices()[:4])
    placements = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), output_partition_specs(leaf, 4)
    )
    placed = jax.device_put(leaf, placements)
    chex.assert_trees_all_equal(jax.device_get(placed), jax.device_get(leaf))
    device_bytes = sum(array.addressable_shards[0].data.nbytes for array in jax.tree.leaves(placed))
    assert device_bytes < 0.5 * leaf.nbytes
    of_parameters = parameter_sharding(mesh, {"kernel": leaf})["kernel"]

    def large(tree):
        return [
            x.spec
            for x, a in zip(jax.tree.leaves(tree), jax.tree.leaves(leaf), strict=True)
            if a.size >= 2**12
        ]

    def trimmed(spec):
        return tuple(spec)[: max((i + 1 for i, name in enumerate(spec) if name), default=0)]

    assert [trimmed(s) for s in large(of_parameters)] == [trimmed(s) for s in large(placements)]


@pytest.mark.slow
@every_kind
def test_a_stack_of_layers_is_each_layer(kind):
    """Made at once, scanned over and multiplied a layer at a time."""
    make = jax.jit(MAKE[kind])
    w = normal(LAYERS, N_IN, N_OUT, seed=4) * jnp.asarray([1.0, 100.0, 0.01])[:, None, None]
    stacked = make(w)
    assert dequantize(stacked).shape == w.shape
    scanned = jax.jit(
        lambda leaves: jax.lax.map(lambda leaf: (matmul(X, leaf), dequantize(leaf)), leaves)
    )(stacked)
    for layer in range(LAYERS):
        alone = jax.tree.map(lambda x, layer=layer: x[layer], stacked)
        if kind in QUANTIZING:
            chex.assert_trees_all_equal(alone, make(w[layer]))
        got = jax.tree.map(lambda x, layer=layer: x[layer], scanned)
        want = (product(X, alone), dequantize(alone))
        assert all(relative(a, b) < 10 * EXACT for a, b in zip(got, want, strict=True))
        np.testing.assert_allclose(
            dequantize(stacked)[layer], dequantize(alone), rtol=1e-5, atol=1e-5
        )


@pytest.mark.slow
@every_kind
def test_a_program_may_hold_it_as_an_argument_or_as_a_constant(kind):
    """Packed codes that XLA unpacked while it compiled came out as other codes: the product was off
    by more than itself.
    """
    leaf = MAKE[kind](W)

    def both(x, leaf):
        return (matmul(x, leaf), dequantize(leaf))

    argument = jax.jit(both)(X, leaf)
    constant = jax.jit(lambda x: both(x, leaf))(X)
    eager = both(X, leaf)
    chex.assert_trees_all_close(constant, argument, rtol=1e-6, atol=2e-5)
    chex.assert_trees_all_close(eager, argument, rtol=1e-6, atol=2e-5)


@every_kind
def test_its_shapes_are_known_before_it_is_made(kind):
    leaf = MAKE[kind](W)
    abstract = jax.eval_shape(MAKE[kind], jax.ShapeDtypeStruct(W.shape, W.dtype))
    chex.assert_trees_all_equal_shapes_and_dtypes(abstract, leaf)
    assert type(abstract) is type(leaf)
    assert abstract.nbytes == leaf.nbytes == sum(array.nbytes for array in jax.tree.leaves(leaf))
    assert jax.tree.leaves(output_partition_specs(abstract, 4)) == jax.tree.leaves(
        output_partition_specs(leaf, 4)
    )
    assert jax.eval_shape(matmul, jax.ShapeDtypeStruct(X.shape, jnp.bfloat16), abstract).shape == (
        ROWS,
        N_OUT,
    )
