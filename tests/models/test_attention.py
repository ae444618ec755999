"""`models.layers.attention` against the formula in PyTorch, float64; and which kernel it asks for
where.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from solrl_jax.models.layers import attention as module
from solrl_jax.models.layers.attention import attention, cudnn_fits
from solrl_jax.parallel.sharding import make_mesh, rows
from solrl_jax.quant import compile_target
from tests.cases import first_is_quick
from tests.lowering import traced_for
from tests.parity import relative

B = 2
T = 5
S = 7
N = 6
H = 8


def operands(kv, seed=0):
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return 2 * rng.standard_normal(shape).astype(np.float32)

    return draw(B, T, N, H), draw(B, S, kv, H), draw(B, S, kv, H)


def masks(seed=1):
    full = np.random.default_rng(seed).random((B, N, T, S)) < 0.6
    full[..., 0] = True
    return {
        "none": None,
        "key": full[:1, :1, :1],
        "padding": full[:, :1, :1],
        "shared": full[:, :1],
        "full": full,
    }


def formula(q, k, v, mask, scale, softcap):
    """Softmax attention, written out; float64 tensors."""
    k, v = (t.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for t in (k, v))
    logits = torch.einsum("btnh,bsnh->bnts", q, k) * (H**-0.5 if scale is None else scale)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    logits = logits if mask is None else logits.masked_fill(~torch.tensor(mask), -torch.inf)
    return torch.einsum("bnts,bsnh->btnh", logits.softmax(-1), v)


@pytest.mark.slow
@pytest.mark.parametrize("softcap", first_is_quick([None, 2.0]))
@pytest.mark.parametrize(
    ("kv", "mask"),
    [
        (2, "none"),
        (2, "key"),
        (2, "padding"),
        (2, "shared"),
        (2, "full"),
        (1, "full"),
        (6, "shared"),
    ],
)
def test_values_and_gradients(kv, mask, softcap):
    mask = masks()[mask]
    scale = None if kv == 1 else 0.7
    arrays = operands(kv)
    cotangent = np.random.default_rng(2).standard_normal((B, T, N, H)).astype(np.float32)

    theirs = [torch.tensor(a, dtype=torch.float64, requires_grad=True) for a in arrays]
    out = formula(*theirs, mask, scale, softcap)
    (out * torch.tensor(cotangent)).sum().backward()

    def f(*qkv):
        return attention(
            *qkv, None if mask is None else jnp.asarray(mask), scale=scale, softcap=softcap
        )

    ours, gradients = jax.jit(lambda *qkv: (f(*qkv), jax.vjp(f, *qkv)[1](cotangent)))(*arrays)
    assert relative(ours, out.detach()) < 1e-6
    for g, t in zip(gradients, theirs, strict=True):
        assert relative(g, t.grad) < 3e-6


@pytest.mark.slow
def test_a_cap_far_above_the_logits_changes_nothing_and_a_low_one_much():
    q, k, v = map(jnp.asarray, operands(2))
    plain = attention(q, k, v)
    assert relative(attention(q, k, v, softcap=1e5), plain) < 1e-5
    assert relative(attention(q, k, v, softcap=1.0), plain) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("softcap", first_is_quick([None, 2.0]))
def test_a_query_that_may_look_nowhere_stays_finite(softcap):
    q, k, v = map(jnp.asarray, operands(2))
    mask = jnp.ones((B, 1, T, S), bool).at[0, 0, 1].set(False)

    def f(q, k, v):
        return attention(q, k, v, mask, softcap=softcap)

    mean = np.repeat(v[0].mean(0), N // 2, axis=0)
    np.testing.assert_allclose(f(q, k, v)[0, 1], mean, atol=1e-6)
    for g in jax.grad(lambda *qkv: f(*qkv).sum(), argnums=(0, 1, 2))(q, k, v):
        assert np.isfinite(g).all()


@pytest.mark.parametrize("softcap", first_is_quick([None, 2.0]))
def test_bfloat16_in_bfloat16_out_softmax_in_float32(softcap):
    arrays = [jnp.asarray(a, jnp.bfloat16) for a in operands(2)]
    ours = attention(*arrays, jnp.asarray(masks()["full"]), softcap=softcap)
    exact = attention(
        *(a.astype(jnp.float32) for a in arrays), jnp.asarray(masks()["full"]), softcap=softcap
    )
    assert ours.dtype == jnp.bfloat16
    assert relative(ours, exact) < 2**-7  # weights and output are rounded, logits are not


def shaped(*, dtype=jnp.bfloat16, t=16, s=32, head=64):
    return jax.ShapeDtypeStruct((2, t, 4, head), dtype), jax.ShapeDtypeStruct(
        (2, s, 4, head), dtype
    )


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("kwargs", "plain", "with_bias"),
    [
        ({}, True, True),
        ({"dtype": jnp.float16, "head": 112}, True, True),
        ({"head": 128}, True, True),
        ({"t": 257}, True, False),
        ({"s": 77}, True, False),
        ({"head": 136}, False, False),
        ({"head": 60}, False, False),
    ],
)
def test_when_flash_attention_is_asked_for(kwargs, plain, with_bias, biased):
    with traced_for("gpu"):
        assert cudnn_fits(*shaped(**kwargs), biased=biased) == (with_bias if biased else plain)


@pytest.mark.parametrize(
    ("backend", "dtype"), [("gpu", jnp.float32), ("cpu", jnp.bfloat16), ("tpu", jnp.bfloat16)]
)
def test_flash_attention_is_for_16_bits_on_a_gpu(backend, dtype):
    with traced_for(backend):
        assert not cudnn_fits(*shaped(dtype=dtype), biased=False)


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_the_mesh_says_what_programs_are_traced_for(platform):
    """Under jit and in a mapped function too; without a mesh, JAX's default backend is asked."""
    platforms = []

    def note(x):
        platforms.append(compile_target.platform())
        return x

    devices = jax.sharding.AbstractDevice(device_kind="", num_cores=None, platform=platform)
    mesh = jax.sharding.AbstractMesh((2,), ("x",), abstract_device=devices)
    with jax.sharding.use_abstract_mesh(mesh):
        jax.make_jaxpr(jax.jit(jax.vmap(note)))(np.zeros(2))
    jax.make_jaxpr(note)(1.0)
    assert platforms == [platform, "cpu"]


@pytest.mark.slow
@pytest.mark.parametrize(("t", "s"), first_is_quick([(5, 7), (6, 7), (5, 8), (6, 8)]))
def test_lengths_are_made_even_for_flash_attention(monkeypatch, t, s):
    """Values and gradients as without, where XLA's attention takes the kernel's place and its
    lengths.
    """
    q, k, v = (
        jnp.concatenate([a, b], 1)[:, :n]
        for a, b, n in zip(operands(2), operands(2, seed=3), (t, s, s), strict=True)
    )

    def f(*qkv):
        return attention(*qkv)

    plain, back = jax.vjp(f, q, k, v)
    calls = []
    kernel = jax.nn.dot_product_attention

    def instead(q, k, v, bias, mask, *, implementation, **more):
        calls.append((implementation, q.shape[1], k.shape[1], v.shape[1]))
        return kernel(q, k, v, bias, mask, implementation="xla", **more)

    monkeypatch.setattr(module, "cudnn_fits", lambda q, k, biased: True)
    monkeypatch.setattr(module, "dot_product_attention", instead)
    padded, padded_back = jax.vjp(f, q, k, v)
    assert calls == [("cudnn", 6, 8, 8)]
    assert relative(padded, plain) < 1e-6
    cotangent = jnp.asarray(np.random.default_rng(2).standard_normal(plain.shape), jnp.float32)
    for ours, theirs in zip(padded_back(cotangent), back(cotangent), strict=True):
        assert relative(ours, theirs) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(("t", "s"), first_is_quick([(5, 7), (6, 8)]))
def test_a_number_of_keys_is_the_mask_of_so_many(monkeypatch, t, s):
    """In XLA's attention, and where flash attention is told the number instead of reading a
    mask.
    """
    q, k, v = (
        jnp.concatenate([a, b], 1)[:, :n]
        for a, b, n in zip(operands(2), operands(2, seed=3), (t, s, s), strict=True)
    )
    count = jnp.array([s, 3], jnp.int32)
    cotangent = jnp.asarray(operands(2, seed=4)[0][:, :1])
    mask = (np.arange(s) < np.array([[s], [3]]))[:, None, None]

    def run(mask, **more):
        return jax.vjp(lambda *qkv: attention(*qkv, mask, **more), q, k, v)

    want, back = run(jnp.asarray(mask))
    for options in ({}, {"softcap": 2.0}):
        np.testing.assert_array_equal(
            run(count, **options)[0], run(jnp.asarray(mask), **options)[0]
        )
    calls = []
    kernel = jax.nn.dot_product_attention

    def instead(q, k, v, bias, mask, *, implementation, **more):
        calls.append(
            (
                implementation,
                bias,
                mask,
                [*more["query_seq_lengths"]],
                [*more["key_value_seq_lengths"]],
            )
        )
        return kernel(q, k, v, bias, mask, implementation="xla", **more)

    monkeypatch.setattr(module, "cudnn_fits", lambda q, k, biased: not biased)
    monkeypatch.setattr(module, "dot_product_attention", instead)
    for attend in (attention, lambda *qkv: module.attention_forward(*qkv)):
        got, got_back = jax.vjp(lambda *qkv, f=attend: f(*qkv, count), q, k, v)
        assert calls.pop() == ("cudnn", None, None, [t, t], [s, 3])
        assert relative(got, want) < 1e-6
        for ours, theirs in zip(
            got_back(cotangent + 0 * got), back(cotangent + 0 * want), strict=True
        ):
            assert relative(ours, theirs) < 1e-6


@pytest.mark.parametrize("tensor", [1, 2])
def test_lengths_lie_where_their_rows_do(monkeypatch, tensor):
    """And are mapped as they are: JAX's partitioning of the kernel takes them as they come."""
    placed = {}

    def instead(q, k, v, bias, mask, *, query_seq_lengths, key_value_seq_lengths, **more):
        for name, x in {
            "queries": q,
            "lengths": query_seq_lengths,
            "keys": key_value_seq_lengths,
        }.items():
            jax.debug.inspect_array_sharding(x, callback=partial(placed.__setitem__, name))
        return q

    monkeypatch.setattr(module, "cudnn_fits", lambda q, k, biased: True)
    monkeypatch.setattr(module, "dot_product_attention", instead)
    mesh = make_mesh(8 // tensor, 1, tensor)
    x = jax.ShapeDtypeStruct((8, 5, 4, 8), jnp.bfloat16, sharding=rows(mesh))
    with jax.set_mesh(mesh):
        jax.jit(lambda q, k, v: attention(2 * q, k, v)).lower(x, x, x).compile()
    shares = {
        name: where.shard_shape(x.shape[:1] if name != "queries" else (8, 6, 4, 8))[0]
        for name, where in placed.items()
    }
    assert shares == {"queries": tensor, "lengths": tensor, "keys": tensor}


@pytest.mark.parametrize(
    ("backend", "implementation"), [("gpu", "cudnn"), ("cpu", "xla"), ("tpu", "xla")]
)
def test_the_kernel_gets_what_it_wants(monkeypatch, backend, implementation):
    call = {}

    def record(q, k, v, bias, mask, *, scale, implementation, **lengths):
        assert not any(n is not None for n in lengths.values())
        call.update(mask=mask.shape, scale=scale, implementation=implementation)
        return q

    monkeypatch.setattr(module, "dot_product_attention", record)
    q = jnp.zeros((B, 4, N, H), jnp.bfloat16)
    k = jnp.zeros((B, 10, 2, H), jnp.bfloat16)
    with traced_for(backend):
        jax.eval_shape(attention, q, k, k, jnp.ones((B, 1, 1, 10), bool))
    shape = (B, N, 4, 10) if implementation == "cudnn" else (B, 1, 1, 10)
    assert call == {"mask": shape, "scale": H**-0.5, "implementation": implementation}


def test_capped_logits_never_go_to_a_fused_kernel(monkeypatch):
    monkeypatch.setattr(module, "dot_product_attention", None)
    q = jnp.ones((B, 4, N, H), jnp.bfloat16)
    with traced_for("gpu"):
        out = jax.eval_shape(lambda q: attention(q, q, q, softcap=50.0), q)
    assert out.shape == q.shape


@pytest.mark.slow
@pytest.mark.parametrize("masked", [True, False])
def test_the_forward_kernel_has_the_gradient_of_the_other(masked):
    q, k, v = map(jnp.asarray, operands(N))
    mask = jnp.arange(S) < jnp.asarray([3, S])[:, None, None, None] if masked else None
    weights = np.random.default_rng(3).standard_normal(q.shape).astype(np.float32)

    def total(attend, q, k, v):
        return (weights * attend(q, k, v, mask)).sum()

    gradients = [
        jax.jit(jax.grad(partial(total, attend), (0, 1, 2)))(q, k, v)
        for attend in (module.attention_forward, attention)
    ]
    for got, expected in zip(*gradients, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-7)
        assert np.abs(expected).max() > 0


def test_the_forward_kernel_takes_a_mask_of_each_head(monkeypatch):
    """Equal to XLA's attention within rounding, with one mask for all heads and with several."""
    kernel = jax.nn.dot_product_attention

    def run_by_xla(*operands, implementation, **more):
        assert implementation == "cudnn"
        return kernel(*operands, implementation="xla", **more)

    rng = np.random.default_rng(5)
    q, k, v = (jnp.asarray(x) for x in operands(N))
    masks = [
        jnp.asarray(rng.random((B, n, q.shape[1], k.shape[1])) < 0.7).at[..., 0].set(True)
        for n in (1, N)
    ]
    expected = [attention(q, k, v, mask) for mask in masks]
    monkeypatch.setattr(module, "cudnn_fits", lambda q, k, biased: True)
    monkeypatch.setattr(module, "dot_product_attention", run_by_xla)
    for mask, reference in zip(masks, expected, strict=True):
        assert relative(module.attention_forward(q, k, v, mask), reference) < 1e-6
