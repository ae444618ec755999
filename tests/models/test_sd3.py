"""`SD3Transformer2DModel` against diffusers, in float32, to 1e-5; and in BF16, as close to float32
as diffusers comes.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import SD3Transformer2DModel as TorchSD3
from flax import nnx
from pretrain.networks import to_torch

from solrl_jax.models.layers.embeddings import sincos_positions
from solrl_jax.models.loading.weights import parameter_table
from solrl_jax.models.sd3.transformer import SD3Config, SD3Transformer2DModel
from tests import carried
from tests.cases import first_is_quick
from tests.parity import from_torch, parameter_count, relative

BASE = dict(
    sample_size=8,
    patch_size=2,
    in_channels=4,
    num_layers=3,
    attention_head_dim=8,
    num_attention_heads=4,
    joint_attention_dim=24,
    caption_projection_dim=32,
    pooled_projection_dim=20,
    out_channels=4,
    pos_embed_max_size=9,
    dual_attention_layers=(),
    qk_norm="rms_norm",
)
CASES = {  # overrides, and the size of the latent
    "large": ({}, (6, 10)),
    "medium": (dict(num_layers=4, dual_attention_layers=[0, 1]), (8, 4)),
    "no-qk-norm": (dict(qk_norm=None), (2, 14)),
    "dual-everywhere": (
        dict(dual_attention_layers=(0, 1, 2), patch_size=1, out_channels=None),
        (5, 3),
    ),
    "many-runs": (
        dict(
            num_layers=12,
            dual_attention_layers=(2, 10),
            num_attention_heads=8,
            attention_head_dim=4,
        ),
        (4, 6),
    ),
    "one-layer": (
        dict(
            num_layers=1,
            patch_size=4,
            in_channels=3,
            out_channels=5,
            num_attention_heads=2,
            attention_head_dim=16,
        ),
        (12, 8),
    ),
}
TOLERANCE = 1e-5  # largest difference over largest value


LARGE = carried.config(carried.SD3, "transformer")
MEDIUM = carried.config(carried.SD3_MEDIUM, "transformer")
SD3_MEDIUM = dict(
    num_layers=24,
    num_attention_heads=24,
    caption_projection_dim=1536,
    pos_embed_max_size=192,
    qk_norm=None,
)


def reference_model(overrides: dict, seed: int = 0) -> TorchSD3:
    """A PyTorch network with weights strong enough that every input matters, and stored positions
    that no formula gives.
    """
    torch.manual_seed(seed)
    theirs = TorchSD3(**(BASE | overrides)).eval()
    with torch.no_grad():
        for p in theirs.parameters():
            p.copy_(torch.randn_like(p) * (0.5 if p.ndim < 2 else 1.0 / np.sqrt(p[0].numel())))
        theirs.pos_embed.pos_embed.normal_()
    return theirs


def port(theirs: TorchSD3, overrides: dict):
    """Ours with the weights of `theirs`: (graphdef, abstract state, params)."""
    config = SD3Config.from_dict(BASE | overrides)
    graphdef, state = nnx.split(
        nnx.eval_shape(lambda: SD3Transformer2DModel(config, rngs=nnx.Rngs(0)))
    )
    return (
        graphdef,
        state,
        from_torch(state, {k: v.numpy() for k, v in theirs.state_dict().items()}),
    )


def inputs(overrides: dict, height: int, width: int, seed: int = 1) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    fields = BASE | overrides

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    return dict(
        latent=normal(2, height, width, fields["in_channels"]),
        text=normal(2, 7, fields["joint_attention_dim"]),
        pooled=normal(2, fields["pooled_projection_dim"]),
        timestep=np.array([900.0, 130.0], np.float32),
    )


def run_torch(theirs: TorchSD3, x: dict, cotangent: np.ndarray | None = None) -> np.ndarray:
    """The velocity, or with a `cotangent` the gradient of the latent (parameters keep theirs)."""
    dtype = theirs.proj_out.weight.dtype

    def as_torch(a):
        return torch.from_numpy(np.ascontiguousarray(a)).to(dtype)

    def nhwc(t):
        return t.detach().to(torch.promote_types(dtype, torch.float32)).permute(0, 2, 3, 1).numpy()

    latent = as_torch(x["latent"].transpose(0, 3, 1, 2)).requires_grad_(cotangent is not None)
    with torch.set_grad_enabled(cotangent is not None):
        out = theirs(
            latent,
            as_torch(x["text"]),
            as_torch(x["pooled"]),
            torch.from_numpy(x["timestep"]),
            return_dict=False,
        )[0]
    if cotangent is None:
        return nhwc(out)
    out.backward(as_torch(cotangent.transpose(0, 3, 1, 2)))
    return nhwc(latent.grad)


def weighting(*shape: int) -> np.ndarray:
    """What the gradients are weighted with: fixed, so that no error of the forward pass enters."""
    return np.random.default_rng(2).standard_normal(shape).astype(np.float32)


def check(case: str, by_params: bool = False):
    """Compares the velocity and the latent's gradient; by_params: returns those of the parameters,
    theirs and ours.
    """
    overrides, size = CASES[case]
    theirs = reference_model(overrides)
    x = inputs(overrides, *size)
    graphdef, state, params = port(theirs, overrides)
    want = run_torch(theirs, x)
    cotangent = weighting(*want.shape)
    want_gradient = run_torch(theirs, x, cotangent)

    @jax.jit
    def run(params, latent, text, pooled, timestep):
        def velocity(latent, params=params):
            return nnx.merge(graphdef, params)(latent, text, pooled, timestep)

        out, back = jax.vjp(velocity, *((latent, params) if by_params else (latent,)))
        return out, *back(cotangent)

    got, gradient, *rest = run(params, **x)
    forward = relative(got, want)
    backward = relative(gradient, want_gradient)
    print(f"{case}: forward {forward:.1e}, gradient {backward:.1e}")
    assert got.dtype == jnp.float32
    assert got.shape == (*x["latent"].shape[:3], overrides.get("out_channels", 4) or 4)
    assert forward < TOLERANCE
    assert backward < TOLERANCE
    # the comparison sees every input
    moved = {name: np.roll(x[name], 1, axis=0) for name in ("text", "pooled")}
    moved |= {"latent": x["latent"] + 0.01, "timestep": x["timestep"] + 5}
    for name, value in moved.items():
        assert relative(run(params, **x | {name: value})[0], want) > 20 * TOLERANCE, name
    return dict(theirs.named_parameters()), *(to_torch(state, r) for r in rest)


@pytest.mark.parametrize(
    "case", first_is_quick(["large", "no-qk-norm", "dual-everywhere", "one-layer"])
)
@pytest.mark.exhaustive
def test_forward_and_input_gradient_equal_diffusers(case):
    check(case)


@pytest.mark.slow
def test_forward_and_every_gradient_equal_diffusers():
    """Each tensor's under its own name: no two are taken for each other, and none that matters is
    left out.
    """
    theirs, ours = check("medium", by_params=True)
    assert ours.keys() == theirs.keys() | {"pos_embed.pos_embed"}
    # nobody reads what the text of the last layer asks
    unread = {
        f"transformer_blocks.3.attn.{name}"
        for name in ("add_q_proj.weight", "add_q_proj.bias", "norm_added_q.weight")
    }
    assert {name for name, gradient in ours.items() if not gradient.any()} == unread
    errors = {
        name: relative(ours[name], p.grad.numpy())
        for name, p in theirs.items()
        if name not in unread
    }
    worst = max(errors, key=errors.__getitem__)
    print(f"parameters: at most {errors[worst]:.1e}, by {worst}")
    assert errors[worst] < 5 * TOLERANCE, worst


@pytest.mark.slow
def test_another_size_runs_through_the_same_weights():
    """Positions are cut from the middle, rounded towards the first row and column."""
    theirs = reference_model({})
    graphdef, _, params = port(theirs, {})
    for height, width in ((18, 18), (2, 4)):
        x = inputs({}, height, width)
        got = jax.jit(lambda params, x: nnx.merge(graphdef, params)(**x))(params, x)
        assert relative(got, run_torch(theirs, x)) < TOLERANCE


@pytest.mark.parametrize(("height", "width"), [(20, 4), (4, 20), (5, 4), (4, 7)])
def test_a_size_without_positions_is_refused(height, width):
    graphdef, _, params = port(reference_model({}), {})
    with pytest.raises(
        ValueError, match=f"latents of {height} x {width}; accepted: multiples of 2 up to 18"
    ):
        jax.eval_shape(lambda x: nnx.merge(graphdef, params)(**x), inputs({}, height, width))


@pytest.mark.exhaustive
@pytest.mark.parametrize("dual", [(), (0, 1)], ids=["large", "medium"])
def test_bfloat16_is_as_close_to_float32_as_diffusers(dual):
    overrides = dict(
        num_attention_heads=4,
        attention_head_dim=64,
        caption_projection_dim=256,
        joint_attention_dim=128,
        pooled_projection_dim=64,
        in_channels=16,
        out_channels=16,
        num_layers=4,
        dual_attention_layers=dual,
    )
    run = jax.jit(lambda graphdef, params, x: nnx.merge(graphdef, params)(**x), static_argnums=0)

    def distance(got, want):
        return float(np.linalg.norm(np.asarray(got, np.float32) - want) / np.linalg.norm(want))

    mine = []
    yours = []
    for seed in range(3):
        exact = (
            reference_model(overrides, seed).bfloat16().float()
        )  # BF16 numbers: rounding starts inside the network
        x = inputs(overrides, 16, 18, seed)
        x |= {
            k: np.asarray(jnp.asarray(x[k], jnp.bfloat16), np.float32)
            for k in ("latent", "text", "pooled")
        }
        graphdef, _, params = port(exact, overrides)
        half = jax.tree.map(lambda p: jnp.asarray(p, jnp.bfloat16), params)
        want = run_torch(exact, x)
        got = run(graphdef, half, x | {"latent": jnp.asarray(x["latent"], jnp.bfloat16)})
        assert got.dtype == jnp.bfloat16
        mine.append(distance(got, want))
        yours.append(distance(run_torch(exact.bfloat16(), x), want))
    print(
        f"BF16: {np.round(mine, 5)} against {np.round(yours, 5)},"
        f" ratio {np.mean(mine) / np.mean(yours):.3f}"
    )
    assert 1e-4 < np.mean(mine) <= 1.10 * np.mean(yours)


@pytest.mark.slow
def test_runs_of_equal_layers_share_one_released_list():
    """They run in the order of the list, under its names."""
    overrides, size = CASES["many-runs"]
    theirs = reference_model(overrides)
    x = inputs(overrides, *size)
    graphdef, state, params = port(theirs, overrides)
    assert set(params["transformer_blocks"]) == {"0-1", "2-2", "3-9", "10-10", "11-11"}
    got = jax.jit(lambda params, x: nnx.merge(graphdef, params)(**x))(params, x)
    assert relative(got, run_torch(theirs, x)) < TOLERANCE
    back = to_torch(state, params)
    want = theirs.state_dict()
    assert back.keys() == want.keys()
    for name, tensor in want.items():
        np.testing.assert_array_equal(back[name], tensor.numpy(), err_msg=name)


def test_new_positions_are_those_of_diffusers():
    theirs = TorchSD3(**BASE | dict(num_layers=1, sample_size=12)).pos_embed.pos_embed.numpy()
    side = BASE["pos_embed_max_size"]
    positions = np.arange(side) * (12 // BASE["patch_size"] / side)
    ours = sincos_positions(32, positions, positions).reshape(1, -1, 32)
    assert ours.shape == theirs.shape
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("fields", "count"),
    [(LARGE, 8_056_627_520), (MEDIUM, 2_243_171_520), (SD3_MEDIUM, 2_028_328_000)],
    ids=["3.5-large", "3.5-medium", "3-medium"],
)
def test_released_sizes_have_the_released_names_and_parameter_counts(fields, count):
    """The count is of what PyTorch calls parameters: the stored positions, a buffer there, are not
    in it.
    """
    with torch.device("meta"):
        reference = TorchSD3(**fields)
    config = SD3Config.from_dict(dict(reference.config))
    assert config == SD3Config.from_dict(fields)
    _, state = nnx.split(nnx.eval_shape(lambda: SD3Transformer2DModel(config, rngs=nnx.Rngs(0))))
    theirs = {name: tuple(t.shape) for name, t in reference.state_dict().items()}
    names = [name for e in parameter_table(state) for name in e.names]
    assert len(names) == len(set(names))
    assert {name: e.torch_shape for e in parameter_table(state) for name in e.names} == theirs
    positions = config.pos_embed_max_size**2 * config.width
    assert theirs["pos_embed.pos_embed"] == (1, config.pos_embed_max_size**2, config.width)
    assert (
        parameter_count(state) - positions
        == sum(p.numel() for p in reference.parameters())
        == count
    )


def test_defaults_are_those_of_diffusers():
    with torch.device("meta"):
        fields = dict(TorchSD3(num_layers=18).config)
    assert SD3Config.from_dict({}) == SD3Config.from_dict(fields) == SD3Config()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_heads": 3}, "unknown config field(s) ['num_heads']"),
        ({"qk_norm": "layer_norm"}, "qk_norm='layer_norm'; accepted: None, 'rms_norm'"),
        ({"pos_embed_max_size": None}, "pos_embed_max_size=None; accepted: a positive integer"),
        ({"num_layers": 0}, "num_layers=0; accepted: a positive integer"),
        ({"out_channels": 0}, "out_channels=0; accepted: a positive integer or None"),
        (
            {"caption_projection_dim": 64},
            "caption_projection_dim=64; accepted: num_attention_heads * attention_head_dim = 32",
        ),
        (
            {"attention_head_dim": 5, "num_attention_heads": 6, "caption_projection_dim": 30},
            "attention_head_dim=5; accepted:",
        ),
        (
            {"dual_attention_layers": "0-12"},
            "dual_attention_layers='0-12'; accepted: a list of integers",
        ),
    ],
)
def test_a_config_this_port_cannot_honour_is_refused(fields, message):
    with pytest.raises(ValueError, match=re.escape(f"SD3Transformer2DModel: {message}")):
        SD3Config.from_dict(BASE | fields)
