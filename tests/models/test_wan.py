"""`WanTransformer3DModel` against diffusers, in float32, to 1e-5."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import WanTransformer3DModel as TorchWan
from flax import nnx
from pretrain.networks import to_torch

from solrl_jax.models.loading.weights import parameter_table
from solrl_jax.models.wan.transformer import WanConfig, WanTransformer3DModel, rotary_table
from tests import carried
from tests.cases import first_is_quick
from tests.parity import from_torch, parameter_count, relative

BASE = dict(
    num_attention_heads=2,
    attention_head_dim=16,
    in_channels=4,
    out_channels=4,
    text_dim=24,
    ffn_dim=56,
    num_layers=3,
)
CASES = {  # overrides, and the size of the latent
    "frames, odd numbers of tokens": ({}, (3, 6, 10)),
    "one frame, other channels": (dict(in_channels=3, out_channels=5, num_layers=1), (1, 4, 2)),
    "larger patches, no norm before the text": (
        dict(patch_size=[1, 3, 3], cross_attn_norm=False, eps=1e-3, attention_head_dim=14),
        (2, 3, 6),
    ),
}
TOLERANCE = 1e-5  # largest difference over largest value


def reference_model(overrides: dict, seed: int = 0) -> TorchWan:
    """A PyTorch network with weights strong enough that every input matters."""
    torch.manual_seed(seed)
    theirs = TorchWan(**(BASE | overrides)).eval().requires_grad_(False)
    for p in theirs.parameters():
        p.copy_(torch.randn_like(p) * (0.5 if p.ndim < 2 else p[0].numel() ** -0.5))
    return theirs


def port(theirs: TorchWan, overrides: dict):
    """Ours with the weights of `theirs`: (graphdef, abstract state, params)."""
    config = WanConfig.from_dict(BASE | overrides)
    graphdef, state = nnx.split(
        nnx.eval_shape(lambda: WanTransformer3DModel(config, rngs=nnx.Rngs(0)))
    )
    tensors = {k: v.numpy() for k, v in theirs.state_dict().items()}
    return graphdef, state, from_torch(state, tensors)


def inputs(overrides: dict, size: tuple, seed: int = 1) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    fields = BASE | overrides

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    return dict(
        latent=normal(2, *size, fields["in_channels"]),
        text=normal(2, 7, fields["text_dim"]),
        timestep=np.array([900.0, 130.0], np.float32),
    )


def run_torch(theirs: TorchWan, x: dict, cotangent: np.ndarray | None = None) -> np.ndarray:
    """The velocity, or with a `cotangent` the gradient of the latent."""
    latent = torch.from_numpy(np.moveaxis(x["latent"], -1, 1).copy())
    latent.requires_grad_(cotangent is not None)
    with torch.set_grad_enabled(cotangent is not None):
        out = theirs(
            latent,
            torch.from_numpy(x["timestep"]),
            torch.from_numpy(x["text"]),
            return_dict=False,
        )[0]
    if cotangent is None:
        return np.moveaxis(out.numpy(), 1, -1)
    out.backward(torch.from_numpy(np.moveaxis(cotangent, -1, 1).copy()))
    return np.moveaxis(latent.grad.numpy(), 1, -1)


@pytest.mark.slow
@pytest.mark.parametrize("case", first_is_quick(CASES))
def test_forward_and_input_gradient_equal_diffusers(case):
    overrides, size = CASES[case]
    theirs = reference_model(overrides)
    x = inputs(overrides, size)
    graphdef, state, params = port(theirs, overrides)
    want = run_torch(theirs, x)
    cotangent = np.random.default_rng(2).standard_normal(want.shape).astype(np.float32)
    want_gradient = run_torch(theirs, x, cotangent)

    @jax.jit
    def run(params, latent, text, timestep):
        def velocity(latent):
            return nnx.merge(graphdef, params)(latent, text, timestep)

        out, back = jax.vjp(velocity, latent)
        return out, *back(cotangent)

    got, gradient = run(params, **x)
    forward = relative(got, want)
    backward = relative(gradient, want_gradient)
    print(f"{case}: forward {forward:.1e}, gradient {backward:.1e}")
    assert got.dtype == jnp.float32
    assert forward < TOLERANCE
    assert backward < TOLERANCE
    # the comparison sees every input, and the order of the frames
    moved = {"text": np.roll(x["text"], 1, axis=0), "latent": x["latent"] + 0.01}
    moved["timestep"] = x["timestep"] + 5
    if size[0] > 1:
        moved["latent"] = x["latent"][:, ::-1]
    for name, value in moved.items():
        assert relative(run(params, **x | {name: value})[0], want) > 20 * TOLERANCE, name
    back = to_torch(state, params)
    assert back.keys() == theirs.state_dict().keys()
    for name, tensor in theirs.state_dict().items():
        np.testing.assert_array_equal(back[name], tensor.numpy(), err_msg=name)


@pytest.mark.slow
def test_attention_among_the_tokens_runs_in_fp8():
    """The rounding shows, and does no more; the attention to the text alone stays exact."""
    theirs = reference_model({})
    x = jax.tree.map(jnp.asarray, inputs({}, (2, 4, 6)))
    graphdef, _, params = port(theirs, {})

    def run(params, fp8_attention):
        network = nnx.merge(graphdef, params)
        return network(**x, fp8_attention=fp8_attention)

    exact, rounded = (jax.jit(lambda p, on=on: run(p, on))(params) for on in (False, True))
    assert 1e-3 < relative(rounded, exact) < 0.2


@pytest.mark.parametrize("head_dim", [16, 128])
def test_positions_are_those_of_diffusers(head_dim):
    overrides = dict(num_layers=1, attention_head_dim=head_dim)
    rope = TorchWan(**BASE | overrides).rope
    cos, sin = (x[0, :, 0].numpy() for x in rope(torch.zeros(1, 4, 3, 4, 10)))
    dims = WanConfig.from_dict(BASE | overrides).axes_dims
    assert head_dim != 128 or dims == (44, 42, 42)
    for got, want in zip(rotary_table(3, 2, 5, dims), (cos, sin), strict=True):
        np.testing.assert_allclose(got[0], want[:, ::2], atol=1e-6)


@pytest.mark.parametrize(
    ("repository", "count"), [(carried.WAN, 1_418_996_800), (carried.WAN22, 4_999_787_712)]
)
def test_the_released_network_has_the_released_names_and_parameter_count(repository, count):
    released = carried.config(repository, "transformer")
    with torch.device("meta"):
        reference = TorchWan(**released)
        assert WanConfig() == WanConfig.from_dict(dict(TorchWan(num_layers=40).config))
    config = WanConfig.from_dict(released)
    assert config == WanConfig.from_dict(dict(reference.config))
    _, state = nnx.split(nnx.eval_shape(lambda: WanTransformer3DModel(config, rngs=nnx.Rngs(0))))
    theirs = {name: tuple(t.shape) for name, t in reference.state_dict().items()}
    assert {name: e.torch_shape for e in parameter_table(state) for name in e.names} == theirs
    assert parameter_count(state) == count


@pytest.mark.slow
def test_one_timestep_per_sample_is_the_same_for_every_token():
    """Wan 2.2 TI2V has a timestep per token, which is that of the sample where no image is
    given.
    """
    theirs = reference_model({})
    x = inputs({}, (3, 4, 6))
    graphdef, _, params = port(theirs, {})
    got = jax.jit(lambda params, x: nnx.merge(graphdef, params)(**x))(params, x)
    tokens = 3 * 2 * 3
    per_token = np.repeat(x["timestep"][:, None], tokens, axis=1)
    want = run_torch(theirs, x | {"timestep": per_token})
    assert relative(got, want) < TOLERANCE
    per_token[:, :6] = 0  # those of the first frame, as if it were given
    assert relative(got, run_torch(theirs, x | {"timestep": per_token})) > 20 * TOLERANCE


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ((2, 5, 4), "latents of 5 x 4; accepted: multiples of 2"),
        ((1025, 2, 2), "latents of 1025 frames of 2 x 2; accepted: up to 1024 frames"),
    ],
)
def test_a_size_without_tokens_or_positions_is_refused(size, message):
    graphdef, state, _ = port(reference_model({}), {})
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda p, x: nnx.merge(graphdef, p)(**x), state, inputs({}, size))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_heads": 3}, "unknown config field(s) ['num_heads']"),
        ({"patch_size": [2, 2, 2]}, "patch_size=(2, 2, 2); accepted: 1 and twice the same"),
        ({"freq_dim": 128}, "freq_dim=128; accepted: 256"),
        ({"qk_norm": None}, "qk_norm=None; accepted: 'rms_norm_across_heads'"),
        ({"image_dim": 8}, "image_dim=8; accepted: None"),
        ({"added_kv_proj_dim": 8}, "added_kv_proj_dim=8; accepted: None"),
        ({"attention_head_dim": 4}, "attention_head_dim=4; accepted: an even number from 6 on"),
    ],
)
def test_a_config_this_port_cannot_honour_is_refused(fields, message):
    with pytest.raises(ValueError, match=re.escape(f"WanTransformer3DModel: {message}")):
        WanConfig.from_dict(BASE | fields)
