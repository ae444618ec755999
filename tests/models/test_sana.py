"""`SanaTransformer2DModel` against diffusers, in float32, to 1e-5."""

import jax
import numpy as np
import pytest
import torch
from diffusers import SanaTransformer2DModel as TorchSana
from flax import nnx
from pretrain.networks import to_torch

from solrl_jax.models.loading.weights import parameter_table
from solrl_jax.models.sana.transformer import SanaConfig, SanaTransformer2DModel
from tests import carried
from tests.cases import first_is_quick
from tests.parity import from_torch, parameter_count, relative

# Heads are 32 wide, as in every released checkpoint: with 8, a query whose few features are nearly
# all cut off by the ReLU divides by almost nothing, and in float32 even PyTorch is 4e-5 from its
# own float64.
BASE = dict(
    in_channels=6,
    out_channels=6,
    num_attention_heads=2,
    attention_head_dim=32,
    num_layers=2,
    num_cross_attention_heads=2,
    cross_attention_head_dim=32,
    cross_attention_dim=64,
    caption_channels=24,
    mlp_ratio=2.5,
    sample_size=8,
)
CASES = {
    "released": {},
    "qk-norm": dict(qk_norm="rms_norm_across_heads"),
    "attention-bias": dict(attention_bias=True, norm_eps=1e-5),
    "patches-and-positions": dict(patch_size=2, interpolation_scale=1.5, num_layers=3),
    "affine-norm": dict(norm_elementwise_affine=True, mlp_ratio=3.0, out_channels=None),
    "unequal-cross-heads": dict(
        num_cross_attention_heads=8, cross_attention_head_dim=8, timestep_scale=0.5
    ),
}
TOLERANCE = 1e-5  # largest difference over largest value


def build(overrides: dict, seed: int = 0):
    """A PyTorch network with weights strong enough that every input matters, and ours with the same
    weights.
    """
    torch.manual_seed(seed)
    theirs = TorchSana(**(BASE | overrides)).eval()
    with torch.no_grad():
        for p in theirs.parameters():
            p.copy_(torch.randn_like(p) * (0.5 if p.ndim < 2 else 1.0 / np.sqrt(p[0].numel())))
    graphdef, state = nnx.split(
        nnx.eval_shape(lambda: SanaTransformer2DModel(config(overrides), rngs=nnx.Rngs(0)))
    )
    params = from_torch(state, {k: v.numpy() for k, v in theirs.state_dict().items()})
    return theirs, jax.jit(lambda *inputs: nnx.merge(graphdef, params)(*inputs)), state, params


def config(overrides: dict) -> SanaConfig:
    return SanaConfig.from_dict(BASE | overrides)


def inputs(height: int = 6, width: int = 8, seed: int = 1):
    rng = np.random.default_rng(seed)
    mask = np.arange(7)[None] < np.array([[7], [3]])  # prompts of different length
    return dict(
        latent=rng.standard_normal((2, height, width, BASE["in_channels"])).astype(np.float32),
        text=rng.standard_normal((2, 7, BASE["caption_channels"])).astype(np.float32),
        mask=mask,
        timestep=np.array([900.0, 130.0], np.float32),
    )


def run_torch(theirs, x, grad: bool = False):
    latent = torch.from_numpy(x["latent"].transpose(0, 3, 1, 2).copy()).requires_grad_(grad)

    def tensor(name):
        return torch.from_numpy(x[name])

    mask = tensor("mask").float()
    out = theirs(
        latent, tensor("text"), tensor("timestep"), encoder_attention_mask=mask, return_dict=False
    )[0]
    if grad:
        (
            out
            * torch.from_numpy(
                cotangent(out.shape[0], *out.shape[2:], out.shape[1]).transpose(0, 3, 1, 2).copy()
            )
        ).sum().backward()
        return latent.grad.numpy().transpose(0, 2, 3, 1)
    return out.detach().numpy().transpose(0, 2, 3, 1)


def cotangent(*shape: int) -> np.ndarray:
    """What the gradients are weighted with: fixed, so that no error of the forward pass enters."""
    return np.random.default_rng(2).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("case", first_is_quick(CASES))
def test_forward_and_input_gradient_equal_diffusers(case):
    theirs, ours, _, _ = build(CASES[case])
    x = inputs()
    want = run_torch(theirs, x)
    got = ours(*x.values())
    assert relative(got, want) < TOLERANCE
    # the case can fail: every input moves the output by many tolerances
    moved = {
        "latent": x["latent"] + 0.01,
        "text": np.roll(x["text"], 1, axis=0),
        "mask": np.roll(x["mask"], 1, axis=0),
        "timestep": x["timestep"] + 5,
    }
    for name, value in moved.items():
        assert relative(ours(*(x | {name: value}).values()), want) > 20 * TOLERANCE, name

    def objective(latent):
        return (ours(latent, *list(x.values())[1:]) * cotangent(*want.shape)).sum()

    assert (
        relative(jax.jit(jax.grad(objective))(x["latent"]), run_torch(theirs, x, grad=True))
        < TOLERANCE
    )


@pytest.mark.slow
def test_another_size_runs_through_the_same_weights():
    theirs, ours, _, _ = build(CASES["patches-and-positions"])
    for height, width in ((8, 8), (4, 10)):
        x = inputs(height, width)
        assert relative(ours(*x.values()), run_torch(theirs, x)) < TOLERANCE


def test_padding_does_not_matter():
    _, ours, _, _ = build({})
    x = inputs()
    changed = x["text"].copy()
    changed[1, 3:] = 7.0
    np.testing.assert_array_equal(ours(*x.values()), ours(*(x | {"text": changed}).values()))


def test_weights_go_out_as_they_came_in():
    theirs, _, state, params = build(CASES["qk-norm"])
    back = to_torch(state, params)
    want = theirs.state_dict()
    assert back.keys() == want.keys()
    for name, tensor in want.items():
        np.testing.assert_array_equal(back[name], tensor.numpy())


@pytest.mark.parametrize(
    ("repository", "count"),
    [
        (carried.SANA, 1_604_462_752),
        (carried.SANA_600M, 591_747_872),
        (carried.SANA15_1600M, 1_604_641_952),
        (carried.SANA15_4800M, 4_721_825_952),
    ],
    ids=["1.6B", "0.6B", "1.5-1.6B", "1.5-4.8B"],
)
def test_released_sizes_have_the_released_names_and_parameter_counts(repository, count):
    fields = carried.config(repository, "transformer")
    with torch.device("meta"):
        reference = TorchSana(**fields)
    full = SanaConfig.from_dict(fields)
    _, state = nnx.split(nnx.eval_shape(lambda: SanaTransformer2DModel(full, rngs=nnx.Rngs(0))))
    ours = {name: e.torch_shape for e in parameter_table(state) for name in e.names}
    assert ours == {name: tuple(t.shape) for name, t in reference.state_dict().items()}
    assert parameter_count(state) == count


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"qk_norm": "l2"}, "qk_norm='l2'; accepted: None, 'rms_norm_across_heads'"),
        ({"num_heads": 3}, r"unknown config field\(s\) \['num_heads'\]"),
        ({"dropout": 0.1}, "dropout=0.1; accepted: 0.0"),
        ({"guidance_embeds": True}, "guidance_embeds=True; accepted: False"),
    ],
)
def test_a_config_this_port_cannot_honour_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        SanaConfig.from_dict(fields)


def test_a_number_of_a_config_may_be_written_as_an_integer():
    assert SanaConfig.from_dict({"dropout": 0}) == SanaConfig()
