"""`models.attention` against the formula in PyTorch, float64; and which kernel it asks for where."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from models import attention as module
from models.attention import attention, flash_fits

B, T, S, N, H = 2, 5, 7, 6, 8


def operands(kv, seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: 2 * rng.standard_normal(shape).astype(np.float32)
    return draw(B, T, N, H), draw(B, S, kv, H), draw(B, S, kv, H)


def masks(seed=1):
    full = np.random.default_rng(seed).random((B, N, T, S)) < 0.6
    full[..., 0] = True
    return {"none": None, "key": full[:1, :1, :1], "padding": full[:, :1, :1], "shared": full[:, :1], "full": full}


def formula(q, k, v, mask, scale, softcap):
    """Softmax attention, written out; float64 tensors."""
    k, v = (t.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for t in (k, v))
    logits = torch.einsum("btnh,bsnh->bnts", q, k) * (H**-0.5 if scale is None else scale)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    logits = logits if mask is None else logits.masked_fill(~torch.tensor(mask), -torch.inf)
    return torch.einsum("bnts,bsnh->btnh", logits.softmax(-1), v)


def relative(ours, theirs):
    theirs = np.asarray(theirs)
    return np.abs(np.asarray(ours, np.float64) - theirs).max() / np.abs(theirs).max()


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize(
    ("kv", "mask"), [(2, "none"), (2, "key"), (2, "padding"), (2, "shared"), (2, "full"), (1, "full"), (6, "shared")]
)
def test_values_and_gradients(kv, mask, softcap):
    mask, scale = masks()[mask], None if kv == 1 else 0.7
    arrays = operands(kv)
    cotangent = np.random.default_rng(2).standard_normal((B, T, N, H)).astype(np.float32)

    theirs = [torch.tensor(a, dtype=torch.float64, requires_grad=True) for a in arrays]
    out = formula(*theirs, mask, scale, softcap)
    (out * torch.tensor(cotangent)).sum().backward()

    f = lambda *qkv: attention(*qkv, None if mask is None else jnp.asarray(mask), scale=scale, softcap=softcap)
    ours, gradients = jax.jit(lambda *qkv: (f(*qkv), jax.vjp(f, *qkv)[1](cotangent)))(*arrays)
    assert relative(ours, out.detach()) < 1e-6
    for g, t in zip(gradients, theirs, strict=True):
        assert relative(g, t.grad) < 3e-6


def test_a_cap_far_above_the_logits_changes_nothing_and_a_low_one_much():
    q, k, v = operands(2)
    plain = attention(q, k, v)
    assert relative(attention(q, k, v, softcap=1e5), plain) < 1e-5
    assert relative(attention(q, k, v, softcap=1.0), plain) > 0.1


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_query_that_may_look_nowhere_stays_finite(softcap):
    q, k, v = operands(2)
    mask = jnp.ones((B, 1, T, S), bool).at[0, 0, 1].set(False)
    f = lambda q, k, v: attention(q, k, v, mask, softcap=softcap)
    mean = np.repeat(v[0].mean(0), N // 2, axis=0)
    np.testing.assert_allclose(f(q, k, v)[0, 1], mean, atol=1e-6)
    for g in jax.grad(lambda *qkv: f(*qkv).sum(), argnums=(0, 1, 2))(q, k, v):
        assert np.isfinite(g).all()


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_bfloat16_in_bfloat16_out_softmax_in_float32(softcap):
    arrays = [jnp.asarray(a, jnp.bfloat16) for a in operands(2)]
    ours = attention(*arrays, jnp.asarray(masks()["full"]), softcap=softcap)
    exact = attention(*(a.astype(jnp.float32) for a in arrays), jnp.asarray(masks()["full"]), softcap=softcap)
    assert ours.dtype == jnp.bfloat16
    assert relative(ours, exact) < 2**-7  # weights and output are rounded, logits are not


def shaped(*, dtype=jnp.bfloat16, t=16, s=32, head=64):
    return jax.ShapeDtypeStruct((2, t, 4, head), dtype), jax.ShapeDtypeStruct((2, s, 4, head), dtype)


@pytest.mark.parametrize(
    ("backend", "kwargs", "expected"),
    [
        ("gpu", {}, True),
        ("gpu", {"dtype": jnp.float16, "head": 112}, True),
        ("gpu", {"head": 128}, True),
        ("gpu", {"t": 257}, False),
        ("gpu", {"s": 77}, False),
        ("gpu", {"head": 136}, False),
        ("gpu", {"head": 60}, False),
        ("gpu", {"dtype": jnp.float32}, False),
        ("cpu", {}, False),
        ("tpu", {}, False),
    ],
)
def test_when_flash_attention_is_asked_for(monkeypatch, backend, kwargs, expected):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    assert flash_fits(*shaped(**kwargs)) is expected


@pytest.mark.parametrize(("backend", "implementation"), [("gpu", "cudnn"), ("cpu", "xla"), ("tpu", "xla")])
def test_the_kernel_gets_what_it_wants(monkeypatch, backend, implementation):
    asked = {}

    def record(q, k, v, *, mask, scale, implementation):
        asked.update(mask=mask.shape, scale=scale, implementation=implementation)
        return q

    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(module.jax.nn, "dot_product_attention", record)
    q = jnp.zeros((B, 4, N, H), jnp.bfloat16)
    k = jnp.zeros((B, 10, 2, H), jnp.bfloat16)
    attention(q, k, k, jnp.ones((B, 1, 1, 10), bool))
    shape = (B, N, 4, 10) if implementation == "cudnn" else (B, 1, 1, 10)
    assert asked == {"mask": shape, "scale": H**-0.5, "implementation": implementation}


def test_capped_logits_never_go_to_a_fused_kernel(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(module.jax.nn, "dot_product_attention", None)
    q = jnp.ones((B, 4, N, H), jnp.bfloat16)
    assert attention(q, q, q, softcap=50.0).shape == q.shape
