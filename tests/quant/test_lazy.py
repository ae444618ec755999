"""`LazyActivation`: the kernel and its reference are one function, bit for bit; and what a
quantized product reads is materialize_heads once.
"""

import re
import warnings
from functools import cache, partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from solrl_jax.models.layers.norm import RMSNorm, layer_norm
from solrl_jax.parallel.sharding import jit
from solrl_jax.quant import compile_target, fp8, int8, nvfp4
from solrl_jax.quant.formats import FORMATS
from solrl_jax.quant.lazy import (
    ColumnView,
    LazyActivation,
    LazyPart,
    cast_saturating,
    fits_tpu_kernel,
    materialize_heads,
    reference,
    tpu_kernel,
    triton_kernel,
)
from solrl_jax.quant.matmul import lazy_matmul, matmul
from tests.cases import first_is_quick
from tests.lowering import cuda_text, tpu_text

B = 2
S = 3
ENCODERS = {
    "nvfp4": nvfp4.encode,
    "fp8": fp8.encode,
    "int8": int8.encode,
    "bf16": lambda parts: ([x.astype(jnp.bfloat16) for x in parts],),
}


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def inputs(n):
    x = normal(B, S, n)
    heavy = np.random.default_rng(1).standard_cauchy((B, S, n)).astype(np.float32)
    with np.errstate(over="ignore"):
        sizes = {
            "zero": x * 0,
            "subnormal": x * np.float32(1e-39),
            "small": x * np.float32(1e-33),
            "huge": x * np.float32(3e38),
        }
    one = x.copy()
    one[0, 1, 3] = np.inf
    return {"normal": x, "heavy-tailed": heavy, "infinite": one, "zero": x * 0, **sizes}


def modulated(x, v):
    norm = partial(layer_norm, eps=1e-6, width=x.shape[-1])
    return [
        LazyActivation.from_array(x)
        .map(norm)
        .map(lambda x, shift, scale: x * (1 + scale) + shift, v, 2 * v)
    ]


def beside(x, v):
    product = LazyActivation.from_array(x[..., :48]).map(
        lambda x, bias: jax.nn.gelu(x + bias, approximate=True), v[..., :48]
    )
    return [product.concat(LazyActivation.from_array(x))]


def a_scale_a_row(x, v):
    return [
        LazyActivation(
            (
                LazyPart(
                    lambda y, row, column: y * row * column, (x, x[..., :1], v[:1]), exact=False
                ),
            ),
            x.dtype,
        )
    ]


def gated(x, v):
    return [
        LazyActivation.from_array(x).map(jax.nn.silu).combine(jnp.multiply, a_scale_a_row(x, v)[0])
    ]


def rms_normed(x, v):
    norm = RMSNorm(x.shape[-1], eps=1e-6)
    norm.scale.set_value(v[0, 0])
    return [norm.scaled(x, 1 + v)]


def fused(x, v):
    product = LazyActivation(
        (LazyPart(lambda y, row: y * row, (x, x[..., 3:4]), exact=False),), x.dtype
    ).map(jnp.add, v)
    _, gate, value, _ = product.split_columns(16, 48, 48, x.shape[-1] - 112)
    return [
        LazyActivation.from_array(x[..., :32]).concat(
            gate.combine(lambda gate, value: jax.nn.sigmoid(gate) * value, value)
        )
    ]


FORMS = {  # from an array and a vector a sample to stretches, and the widths that are tried
    "as it is": (lambda x, v: [LazyActivation.from_array(x)], (48, 128, 144)),
    "modulated norm": (modulated, (128,)),
    "two parts": (beside, (112,)),
    "a scale a row": (a_scale_a_row, (144,)),
    "a gate": (gated, (144,)),
    "RMS norm": (rms_normed, (128,)),
    "some rows": (
        lambda x, v: [LazyActivation.from_array(x, rows=(1, 3)).map(jax.nn.silu)],
        (144,),
    ),
    "columns of a product": (fused, (144,)),
    "two stretches": (
        lambda x, v: [
            LazyActivation.from_array(x).map(jnp.add, v),
            LazyActivation.from_array(x[:, :2]).map(jnp.tanh),
        ],
        (144,),
    ),
}
CASES = [(form, n) for form, (_, widths) in FORMS.items() for n in widths]


@cache
def both(encoder, form):
    def parts(x, v):
        return [pending.parts for pending in FORMS[form][0](x, v)]

    def run(make):
        return jit(lambda x, v: make(ENCODERS[encoder], parts(x, v)))

    return run(reference), run(partial(triton_kernel, interpret=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype", [jnp.bfloat16, pytest.param(jnp.float32, marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize(("form", "n"), CASES)
@pytest.mark.parametrize("encoder", first_is_quick(ENCODERS))
def test_the_kernel_is_its_twin_bit_for_bit(encoder, form, n, dtype):
    of_twin, of_kernel = both(encoder, form)
    v = jnp.asarray(normal(B, 1, n, seed=2), dtype)
    for name, x in inputs(n).items():
        ours = of_kernel(jnp.asarray(x, dtype), v)
        theirs = of_twin(jnp.asarray(x, dtype), v)
        for a, b in zip(ours, theirs, strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            np.testing.assert_array_equal(
                np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8), err_msg=name
            )


TPU_FORMS = {  # of the forms, those of one stretch; with other rows than one, beside
    **{name: form for name, (form, _) in FORMS.items() if name != "two stretches"},
    "a row a sample": lambda x, v: [modulated(x.reshape(-1, 1, x.shape[-1]), v[:1])[0]],
    "the last rows": lambda x, v: [LazyActivation.from_array(x, rows=(2, 3)).map(jnp.add, v)],
    "whole blocks": lambda x, v: [
        LazyActivation.from_array(jnp.tile(x, (1, 150, 1)), rows=(128, 450)).concat(
            modulated(jnp.tile(x, (1, 150, 1))[:, 128:], v)[0]
        )
    ],
    "aligned columns": lambda x, v: (
        LazyActivation.from_array(x).map(jnp.add, v).split_columns(128, 128)[1:]
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("form", TPU_FORMS)
@pytest.mark.parametrize("encoder", first_is_quick(["int8", "fp8", "bf16"]))
def test_the_kernel_for_tpus_is_its_twin_bit_for_bit(encoder, form):
    """Beyond one part, 128 columns lie in the first, as the kernel takes them."""

    def parts(x, v):
        return TPU_FORMS[form](x, v)[0].parts

    def run(make):
        return jit(lambda x, v: make(ENCODERS[encoder], parts(x, v)))

    of_kernel = run(partial(tpu_kernel, interpret=True))
    of_twin = run(lambda encode, parts: reference(encode, [parts]))
    n = 256
    v = jnp.asarray(normal(B, 1, n, seed=2), jnp.bfloat16)
    for name, x in inputs(n).items():
        x = jnp.asarray(x, jnp.bfloat16)
        for a, b in zip(of_kernel(x, v), of_twin(x, v), strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            np.testing.assert_array_equal(
                np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8), err_msg=name
            )


@pytest.mark.slow
def test_on_tpus_one_kernel_writes_what_the_product_reads():
    """And none where a second part would start between two registers."""
    w = FORMATS["int8"].quantize(normal(192, 64, seed=3))

    def network(width, x, v):
        left, right = (LazyActivation.from_array(y).map(jnp.add, y) for y in (x, v))
        both = left.split_columns(width, 128 - width)[0].concat(
            right.split_columns(192 - width, width - 64)[0]
        )
        assert fits_tpu_kernel(int8.encode, both) == (width == 128)
        return lazy_matmul(both, w).value

    x = jax.ShapeDtypeStruct((B, 256, 128), jnp.bfloat16)
    for width, kernels in ((128, 1), (96, 0)):
        text = tpu_text(jax.jit(partial(network, width)), x, x)
        assert text.count("tpu_custom_call") == kernels
        assert re.search(r"dot_general.*: \(tensor<.*xi8>, tensor<.*xi8>\) -> tensor<.*xi32>", text)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nvfp4", "fp8"])
def test_on_tpus_other_formats_are_encoded_by_xla(name):
    """Mosaic has no types of four bits, and TPUs before TPU7x have none of FP8."""
    w = FORMATS[name].quantize(normal(128, 64, seed=3))
    x = jax.ShapeDtypeStruct((B, 256, 128), jnp.bfloat16)
    text = tpu_text(jax.jit(lambda x: lazy_matmul(LazyActivation.from_array(x), w).value), x)
    assert "tpu_custom_call" not in text


def test_a_kernel_for_cuda_is_lowered_without_a_warning():
    """JAX warns when it lowers a kernel, from 0.11 on; the second warning stands for it in older
    versions.
    """
    x = jnp.asarray(normal(B, S, 64), jnp.bfloat16)

    def encode(x):
        return triton_kernel(nvfp4.encode, [LazyActivation.from_array(x).parts])

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert "one_pass" in cuda_text(jax.jit(encode), x)
        warnings.warn(
            "The Pallas Triton backend is deprecated and will be removed",
            DeprecationWarning,
            stacklevel=1,
        )
        warnings.warn("another backend is deprecated", DeprecationWarning, stacklevel=1)
    assert [str(warning.message) for warning in caught] == ["another backend is deprecated"]


@pytest.mark.slow
@pytest.mark.parametrize("normed", [modulated, rms_normed])
def test_a_norm_of_a_row_that_zeros_fill_up_is_that_of_the_row(normed):
    """Its sums run in another order, so that the last bits may differ."""
    x = jnp.asarray(normal(B, S, 144))
    v = jnp.asarray(normal(B, 1, 144, seed=2))

    def encode(parts):
        return (list(parts),)

    ours, theirs = (
        make(encode, [normed(x, v)[0].parts])[0]
        for make in (partial(triton_kernel, interpret=True), reference)
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(theirs, normed(x, v)[0].value, rtol=1e-6, atol=1e-6)


def test_columns_joined_are_the_function_of_the_columns():
    x = jnp.asarray(normal(B, S, 144))
    v = jnp.asarray(normal(B, 1, 144, seed=2))
    y = x * x[..., 3:4] + v
    want = jnp.concatenate([x[..., :32], jax.nn.sigmoid(y[..., 16:64]) * y[..., 64:112]], axis=-1)
    np.testing.assert_allclose(fused(x, v)[0].value, want, rtol=1e-6)
    whole = LazyActivation.from_array(x).split_columns(100, 44)
    assert [part.num_rows for part in whole] == [S, S]
    assert all(part.exact for part in whole)
    assert not fused(x, v)[0].exact
    np.testing.assert_array_equal(jnp.concatenate([part.value for part in whole], axis=-1), x)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nvfp4", "fp8", "int8"])
def test_products_of_one_input_encode_it_once(name):
    x = LazyActivation.from_array(jnp.asarray(normal(B, S, 128)))
    w = FORMATS[name].quantize(normal(128, 64, seed=3))
    calls = []
    original = ENCODERS[name]

    def counted(parts):
        return calls.append(1) or original(parts)

    assert x.encode(counted) is x.encode(counted)
    assert len(calls) == 1
    assert lazy_matmul(x, w).exact is False
    np.testing.assert_array_equal(lazy_matmul(x, w).value, matmul(x.value, w))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nvfp4", "fp8", "int8"])
def test_on_cuda_one_kernel_writes_what_the_product_reads(name):
    w = FORMATS[name].quantize(normal(128, 64, seed=3))
    up = FORMATS[name].quantize(normal(64, 128, seed=4))

    def network(x, v):
        first = (
            lazy_matmul(lazy_matmul(modulated(x, v)[0], up).map(jax.nn.silu), w)
            if x.shape[-1] == 64
            else None
        )
        return materialize_heads([first, first], 16)

    def shape(*s):
        return jax.ShapeDtypeStruct(s, jnp.bfloat16)

    text = cuda_text(jax.jit(network), shape(B, S, 64), shape(B, 1, 64))
    assert (
        text.count("__gpu$xla.gpu.triton") == 3
    )  # the norm's codes, the activation's, and both stretches
    assert (
        "__gpu$xla.gpu.triton"
        not in jax.jit(network).lower(shape(B, S, 64), shape(B, 1, 64)).as_text()
    )


@pytest.mark.parametrize(
    ("name", "capability", "kernels"), [("fp8", "8.0", 0), ("fp8", "9.0", 1), ("int8", "8.0", 1)]
)
def test_a_gpu_that_cannot_convert_to_fp8_takes_the_twin(monkeypatch, name, capability, kernels):
    w = FORMATS[name].quantize(normal(128, 64, seed=3))

    def lower():
        return cuda_text(jax.jit(lambda x: matmul(x, w)), normal(4, 128))

    device = SimpleNamespace(platform="gpu", compute_capability=capability)
    with monkeypatch.context() as patch:
        patch.setattr(compile_target, "first_device", lambda: device)
        assert compile_target.local_triton_converts_fp8() == (capability == "9.0")
        assert lower().count("__gpu$xla.gpu.triton") == kernels


def with_maxima_of_triton(f, *arguments):
    """Evaluates `f` with floating-point maxima and minima that ignore NaN, as Triton computes them,
    which Pallas' interpreter does not show.
    """
    rules = {
        "max": lambda params, x, y: jnp.fmax(x, y),
        "min": lambda params, x, y: jnp.fmin(x, y),
        "clamp": lambda params, low, x, high: jnp.fmin(jnp.fmax(low, x), high),
        "reduce_max": lambda params, x: jnp.nanmax(x, axis=params["axes"]),
    }

    def evaluate(closed, *values):
        known = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        known |= zip(closed.jaxpr.invars, values, strict=True)

        def read(variable):
            return variable.val if hasattr(variable, "val") else known[variable]

        for equation in closed.jaxpr.eqns:
            inputs = [jnp.asarray(read(variable)) for variable in equation.invars]
            rule = rules.get(equation.primitive.name)
            if "jaxpr" in equation.params:
                outputs = evaluate(equation.params["jaxpr"], *inputs)
            elif rule and jnp.issubdtype(inputs[0].dtype, jnp.floating):
                outputs = [rule(equation.params, *inputs)]
            else:
                outputs = equation.primitive.bind(*inputs, **equation.params)
                outputs = outputs if equation.primitive.multiple_results else [outputs]
            known |= zip(equation.outvars, outputs, strict=True)
        return [read(variable) for variable in closed.jaxpr.outvars]

    return evaluate(jax.make_jaxpr(f)(*arguments), *arguments)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nvfp4", "fp8", "int8"])
def test_a_nan_reaches_the_scale_of_its_row_alone_also_in_triton(name):
    x = normal(4, 128)
    x[1, 5] = np.nan
    x[2] = np.nan
    *_, scales = with_maxima_of_triton(lambda x: ENCODERS[name]([x]), x)
    assert np.isnan(np.asarray(scales)).ravel().tolist() == [False, True, True, False]


def test_a_nan_stays_one_in_fp8_also_in_triton():
    x = np.array([np.nan, 1e4, -1e4, 1, np.inf], np.float32)
    (y,) = with_maxima_of_triton(lambda x: cast_saturating(x, jnp.float8_e4m3fn), x)
    np.testing.assert_array_equal(np.asarray(y, np.float32), [np.nan, 448, -448, 1, 448])


@pytest.mark.slow
def test_nibbles_are_the_codes_of_four_bits():
    halfway = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
    near = np.concatenate(
        [
            np.nextafter(halfway, np.float32(0)),
            halfway,
            np.nextafter(halfway, np.float32(9)),
            [0, 6, 1e-30],
        ]
    )
    values = jnp.asarray(np.resize(np.concatenate([near, -near]), 48).astype(np.float32))
    np.testing.assert_array_equal(
        nvfp4.encode_packed(values), nvfp4.pack(values.astype(jnp.float4_e2m1fn))
    )


def test_columns_of_a_product_that_is_filled_up_are_columns_of_it():
    y = jnp.arange(60.0).reshape(2, 3, 10)
    scale = jnp.arange(7.0)[None, None]
    first, second = LazyActivation(
        (LazyPart(jnp.multiply, (ColumnView(y, 0, 7), scale)),), y.dtype
    ).split_columns(3, 4)
    np.testing.assert_array_equal(first.value, (y[..., :7] * scale)[..., :3])
    np.testing.assert_array_equal(second.value, (y[..., :7] * scale)[..., 3:])
    assert second.parts[0].arrays[0].array is y
