"""`models.text_encoders.t5` against transformers' `T5EncoderModel` and `UMT5EncoderModel`; and the
bias of `models.layers.attention`, which serves them.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from flax import nnx
from pretrain.networks import to_torch
from transformers.models.t5.modeling_t5 import T5Attention

from solrl_jax.models.layers import attention as attention_module
from solrl_jax.models.layers.attention import attention
from solrl_jax.models.loading.weights import load_tensors, locate_tensors, parameter_table
from solrl_jax.models.text_encoders.t5 import (
    T5Config,
    T5EncoderModel,
    UMT5Config,
    relative_buckets,
)
from tests import carried
from tests.cases import first_is_quick
from tests.lowering import traced_for
from tests.parity import from_torch, parameter_count, relative

TOLERANCE = 1e-5  # largest difference over largest value
BASE = {
    "vocab_size": 61,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "feed_forward_proj": "gated-gelu",
}
# changes to the config, shape of the ids
CASES = {
    "as released": ({}, (2, 13)),
    "heads wider than the model": ({"d_kv": 16, "num_heads": 5, "num_layers": 3}, (2, 7)),
    "heads narrower than the model": ({"d_kv": 4, "num_heads": 3, "d_model": 40}, (1, 9)),
    "few buckets, short reach": (
        {
            "relative_attention_num_buckets": 10,
            "relative_attention_max_distance": 7,
            "layer_norm_epsilon": 0.05,
        },
        (4, 17),
    ),
    "beyond the last bucket": ({"num_layers": 1, "d_ff": 20}, (1, 151)),
}

XXL = carried.config(carried.FLUX, "text_encoder_2")


def reference_model(overrides: dict, seed: int = 0):
    """transformers' model with weights strong enough that every one of them shows, and logits of a
    few units.
    """
    model = (
        transformers.T5EncoderModel(transformers.T5Config(**BASE | overrides))
        .eval()
        .requires_grad_(False)
    )
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=generator)
        if p.ndim == 1:
            p.copy_(1 + 0.3 * noise)
        elif "shared" in name or "relative_attention_bias" in name:
            p.copy_(noise)
        else:  # q carries the factor that the logits lack
            p.copy_(
                noise * p.shape[1] ** -0.5 * (model.config.d_kv**-0.5 if ".q." in name else 1.0)
            )
    return model


def released(reference) -> dict:
    """The tensors that a released file holds: the table of tokens once."""
    tied = {"encoder.embed_tokens.weight"}
    return {name: t for name, t in reference.state_dict().items() if name not in tied}


def port(reference):
    """The state, the graph and parameters of our network with the weights of `reference`."""
    config = T5Config.from_dict(reference.config.to_dict())
    graphdef, state = nnx.split(nnx.eval_shape(lambda: T5EncoderModel(config, rngs=nnx.Rngs(0))))
    params = from_torch(state, {name: t.numpy() for name, t in released(reference).items()})
    return state, graphdef, jax.tree.map(jnp.asarray, params)


def prompts(shape: tuple, seed: int = 1):
    return np.random.default_rng(seed).integers(0, BASE["vocab_size"], shape)


@pytest.mark.parametrize("case", first_is_quick(CASES))
def test_forward_and_input_gradient_equal_transformers(case):
    overrides, shape = CASES[case]
    reference = reference_model(overrides, seed=list(CASES).index(case))
    _, graphdef, params = port(reference)
    ids = prompts(shape)
    cotangent = (
        np.random.default_rng(2)
        .standard_normal((*shape, reference.config.d_model))
        .astype(np.float32)
    )

    @jax.jit
    def run(params, ids):
        model = nnx.merge(graphdef, params)
        _, back = jax.vjp(model.encoder, model.shared(ids))
        return model(ids), back(cotangent)[0]

    x = reference.shared(torch.tensor(ids)).requires_grad_()
    theirs = reference(inputs_embeds=x).last_hidden_state
    (theirs * torch.tensor(cotangent)).sum().backward()
    theirs = theirs.detach().numpy()
    ours, gradient = run(params, ids)
    errors = relative(ours, theirs), relative(gradient, x.grad.numpy())
    print(f"{case}: forward {errors[0]:.1e}, gradient {errors[1]:.1e}")
    assert max(errors) < TOLERANCE

    # the case can fail: each parameter and each token move the output by many tolerances
    leaves, tree = jax.tree.flatten(params)
    for i, leaf in enumerate(leaves):
        other = [*leaves[:i], jnp.roll(leaf, 1, axis=-1), *leaves[i + 1 :]]
        assert relative(run(jax.tree.unflatten(tree, other), ids)[0], theirs) > 300 * TOLERANCE, i
    assert relative(run(params, np.roll(ids, 1, axis=1))[0], theirs) > 1000 * TOLERANCE


def umt5_reference(**changes):
    """transformers' UMT5 with weights strong enough that every one of them shows."""
    model = transformers.UMT5EncoderModel(transformers.UMT5Config(**BASE | changes))
    model.eval().requires_grad_(False)
    torch.manual_seed(3)
    for name, p in model.named_parameters():
        if p.ndim == 1:
            p.normal_(1.0, 0.3)
        elif "shared" in name or "relative_attention_bias" in name:
            p.normal_()
        else:
            p.normal_(0, (p.shape[1] * (model.config.d_kv if ".q." in name else 1)) ** -0.5)
    return model


@pytest.mark.slow
def test_umt5_has_biases_in_each_layer_and_masks_padding():
    reference = umt5_reference(num_layers=3)
    config = UMT5Config.from_dict(reference.config.to_dict())
    graphdef, state = nnx.split(nnx.eval_shape(lambda: T5EncoderModel(config, rngs=nnx.Rngs(0))))
    tensors = {name: t.numpy() for name, t in released(reference).items()}
    params = from_torch(state, tensors)
    ids = prompts((2, 11))
    mask = np.arange(11) < np.array([11, 4])[:, None]
    run = jax.jit(lambda params, ids, mask: nnx.merge(graphdef, params)(ids, mask))
    got = run(params, ids, mask)
    want = reference(torch.tensor(ids), torch.tensor(mask)).last_hidden_state.numpy()
    print(f"UMT5: {relative(got[mask], want[mask]):.1e}")
    assert relative(got[mask], want[mask]) < TOLERANCE
    # padding is not seen, and each layer's biases are
    np.testing.assert_array_equal(run(params, np.where(mask, ids, 0), mask)[mask], got[mask])
    for layer in range(3):

        def roll(path, leaf, layer=layer):
            if "relative_attention_bias" not in jax.tree_util.keystr(path):
                return leaf
            return leaf.at[layer].set(jnp.roll(leaf[layer], 1, axis=-1))

        other = jax.tree_util.tree_map_with_path(roll, params)
        assert relative(run(other, ids, mask)[mask], want[mask]) > 100 * TOLERANCE, layer
    back = to_torch(state, params)
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(back[name], tensor, err_msg=name)


def test_a_config_of_the_other_kind_is_refused():
    with pytest.raises(ValueError, match="UMT5EncoderModel: model_type='t5'; accepted: 'umt5'"):
        UMT5Config.from_dict(BASE | {"model_type": "t5"})


@pytest.mark.exhaustive
def test_bfloat16_is_as_near_as_torch():
    """Distance of each BF16 network to float32, and ours computes in the dtype of its table."""
    overrides = {"d_model": 64, "d_kv": 16, "d_ff": 160, "num_layers": 4}
    reference = reference_model(overrides, seed=7)
    _, graphdef, params = port(reference)
    ids = prompts((8, 40))
    exact = reference(torch.tensor(ids)).last_hidden_state.numpy()
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    ours = jax.jit(lambda params, ids: nnx.merge(graphdef, params)(ids))(half, ids)
    assert ours.dtype == jnp.bfloat16
    theirs = reference.to(torch.bfloat16)(torch.tensor(ids)).last_hidden_state.float().numpy()

    def distance(y):
        return np.linalg.norm(np.asarray(y, np.float32) - exact) / np.linalg.norm(exact)

    print(f"bfloat16: ours {distance(ours):.2e}, torch {distance(theirs):.2e}")
    assert 1e-4 < distance(ours) < 1.1 * distance(theirs)


@pytest.mark.parametrize(
    ("count", "reach"), [(32, 128), (32, 100), (10, 7), (4, 2), (7, 20), (64, 256), (32, 9)]
)
def test_buckets_equal_transformers(count, reach):
    length = 600
    offset = torch.arange(length) - torch.arange(length)[:, None]
    theirs = T5Attention._relative_position_bucket(
        offset, bidirectional=True, num_buckets=count, max_distance=reach
    )
    ours = relative_buckets(length, count, reach)
    assert np.array_equal(ours, theirs.numpy())
    assert len(np.unique(ours)) > count // 2


def test_a_saved_component_loads(tmp_path):
    """What transformers writes is what we read: the bias under block 0, the table of tokens once;
    and the way back.
    """
    reference = reference_model({})
    reference.save_pretrained(tmp_path)
    state, _, params = port(reference)
    loaded = load_tensors(*locate_tensors(tmp_path, state), jnp.float32)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), loaded, params))
    back = to_torch(state, params)
    assert back.keys() == released(reference).keys()
    assert all(np.array_equal(back[name], t.numpy()) for name, t in released(reference).items())


def test_the_token_table_loads_under_either_of_its_names(tmp_path):
    """Transformers loads a file that has only `encoder.embed_tokens.weight`."""
    reference = reference_model({})
    state, _, params = port(reference)
    tensors = {name: t.clone() for name, t in reference.state_dict().items()}
    del tensors["shared.weight"]
    reference.config.save_pretrained(tmp_path)
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    theirs = transformers.T5EncoderModel.from_pretrained(tmp_path)
    assert torch.equal(theirs.shared.weight, reference.shared.weight)
    ours = load_tensors(*locate_tensors(tmp_path, state), jnp.float32)
    jax.tree.map(np.testing.assert_array_equal, ours, params)


def test_a_quantized_checkpoint_is_refused_by_name():
    with pytest.raises(ValueError, match="quantized checkpoints are not read"):
        T5Config.from_dict(BASE | {"quantization_config": {"load_in_4bit": True}})


def test_released_size():
    config = T5Config.from_dict(XXL)
    with torch.device("meta"):
        reference = transformers.T5EncoderModel(transformers.T5Config(**XXL))
    assert config == T5Config.from_dict(reference.config.to_dict())
    _, state = nnx.split(nnx.eval_shape(lambda: T5EncoderModel(config, rngs=nnx.Rngs(0))))
    assert parameter_count(state) == 4_762_310_656
    theirs = {name: tuple(t.shape) for name, t in released(reference).items()}
    assert {name: e.torch_shape for e in parameter_table(state) for name in e.names} == theirs
    assert "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight" in theirs


def test_defaults_are_those_of_transformers():
    """But for the layers between, which no pipeline has as transformers would make them where a
    file does not say.
    """
    gated = {"feed_forward_proj": "gated-gelu"}
    assert (
        T5Config.from_dict(gated)
        == T5Config.from_dict(transformers.T5Config(**gated).to_dict())
        == T5Config(**gated)
    )
    with pytest.raises(ValueError, match="feed_forward_proj='relu'; accepted: 'gated-gelu'"):
        T5Config.from_dict({})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "umt5"),
        ("is_decoder", True),
        ("feed_forward_proj", "gated-silu"),
        ("dense_act_fn", "gelu"),
        ("is_gated_act", False),
        ("num_layers", 0),
        ("d_kv", 6.5),
        ("relative_attention_num_buckets", 3),
        ("relative_attention_max_distance", 8),
    ],
)
def test_unsupported_value_is_named(field, value):
    with pytest.raises(ValueError, match=rf"T5EncoderModel: {field}=.*accepted"):
        T5Config.from_dict(BASE | {field: value})


B = 2
T = 5
S = 7
N = 6
H = 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kv", "shape", "masked"), [(6, (1, N), True), (2, (B, 1), False), (2, (B, N), True)]
)
def test_attention_bias_and_its_gradient(kv, shape, masked):
    rng = np.random.default_rng(3)

    def draw(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    arrays = [draw(B, T, N, H), draw(B, S, kv, H), draw(B, S, kv, H), draw(*shape, T, S)]
    mask = rng.random((B, 1, T, S)) < 0.6 if masked else np.ones((1, 1, 1, S), bool)
    mask[..., 0] = True
    cotangent = draw(B, T, N, H)

    q, k, v, bias = theirs = [
        torch.tensor(a, dtype=torch.float64, requires_grad=True) for a in arrays
    ]
    logits = torch.einsum("btnh,bsnh->bnts", q, k.repeat_interleave(N // kv, dim=2))
    weights = (logits + bias).masked_fill(~torch.tensor(mask), -torch.inf).softmax(-1)
    out = torch.einsum("bnts,bsnh->btnh", weights, v.repeat_interleave(N // kv, dim=2))
    (out * torch.tensor(cotangent)).sum().backward()

    def f(q, k, v, bias):
        return attention(q, k, v, jnp.asarray(mask), scale=1.0, bias=bias)

    ours, gradients = jax.jit(lambda *a: (f(*a), jax.vjp(f, *a)[1](cotangent)))(*arrays)
    assert relative(ours, out.detach()) < 1e-6
    for g, t in zip(gradients, theirs, strict=True):
        assert relative(g, t.grad) < 3e-6
    assert relative(jax.jit(f)(*arrays[:3], -arrays[3]), out.detach()) > 0.1


@pytest.mark.parametrize(
    ("backend", "expected"),
    [("gpu", ((1, N, 4, 10), "bfloat16")), ("cpu", ((1, N, 4, 10), "float32"))],
)
def test_the_kernel_gets_the_bias_it_wants(monkeypatch, backend, expected):
    call = {}

    def record(q, k, v, bias, mask, **others):
        call.update(bias=(bias.shape, str(bias.dtype)))
        return q

    monkeypatch.setattr(attention_module, "dot_product_attention", record)
    q = jnp.zeros((B, 4, N, H), jnp.bfloat16)
    k = jnp.zeros((B, 10, N, H), jnp.bfloat16)
    bias = jnp.zeros((1, 1, 4, 10), jnp.float16)
    with traced_for(backend):
        jax.eval_shape(lambda q, k, bias: attention(q, k, k, bias=bias), q, k, bias)
    assert call == {"bias": expected}
