"""`models.flux2.transformer` against diffusers' `Flux2Transformer2DModel`."""

import copy
from functools import reduce

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import Flux2KleinPipeline
from diffusers import Flux2Transformer2DModel as TorchFlux2
from diffusers.models.transformers.transformer_flux2 import Flux2PosEmbed
from flax import nnx
from pretrain.networks import to_torch

from solrl_jax.models.flux2.transformer import Flux2Config, Flux2Transformer2DModel, rotary_table
from solrl_jax.models.loading.weights import parameter_table
from solrl_jax.quant.matmul import LowRank
from tests import carried
from tests.cases import first_is_quick
from tests.parity import from_torch, parameter_count, relative

BASE = dict(
    in_channels=8,
    num_layers=2,
    num_single_layers=2,
    attention_head_dim=16,
    num_attention_heads=2,
    joint_attention_dim=24,
    axes_dims_rope=(4, 4, 4, 4),
    guidance_embeds=False,
)
# config, then height and width of the latent and the number of text tokens
CASES = {
    "klein": ({}, (3, 5, 7)),
    "deeper, one text token": (
        dict(num_layers=3, num_single_layers=4, num_attention_heads=4),
        (2, 7, 1),
    ),
    "other channels out, uneven axes": (
        dict(in_channels=16, out_channels=4, attention_head_dim=32, axes_dims_rope=(2, 8, 18, 4)),
        (4, 4, 12),
    ),
    "other MLPs, one wide head": (
        dict(
            num_attention_heads=1,
            attention_head_dim=64,
            axes_dims_rope=(16, 16, 24, 8),
            mlp_ratio=2.3,
        ),
        (7, 3, 3),
    ),
    "other frequencies, one block of each": (
        dict(num_layers=1, num_single_layers=1, rope_theta=50),
        (6, 2, 30),
    ),
}
TOLERANCE = 1e-5  # largest difference over largest value

RELEASED = carried.config(carried.FLUX2_4B, "transformer")
LARGER = carried.config(carried.FLUX2_9B, "transformer")


def build(overrides: dict, seed: int = 0):
    """A PyTorch network with weights strong enough that every input matters, and ours (graph,
    state, parameters) with them.
    """
    torch.manual_seed(seed)
    theirs = TorchFlux2(**(BASE | overrides)).eval()
    with torch.no_grad():
        for p in theirs.parameters():
            p.copy_(torch.randn_like(p) * (0.7 if p.ndim < 2 else 1.0 / np.sqrt(p[0].numel())))
    graphdef, state = abstract(BASE | overrides)
    return (
        theirs,
        graphdef,
        state,
        from_torch(state, {k: v.numpy() for k, v in theirs.state_dict().items()}),
    )


def abstract(fields: dict):
    config = Flux2Config.from_dict(fields)
    return nnx.split(nnx.eval_shape(lambda: Flux2Transformer2DModel(config, rngs=nnx.Rngs(0))))


def inputs(overrides: dict, sizes: tuple[int, int, int], rows: int = 2) -> dict:
    """Our arguments; the times are float32 products with 1000, as diffusers takes them itself."""
    height, width, length = sizes
    c = BASE | overrides
    rng = np.random.default_rng(1)

    def draw(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    return dict(
        latent=draw(rows, height, width, c["in_channels"]),
        text=draw(rows, length, c["joint_attention_dim"]),
        timestep=np.float32(1000) * np.resize(np.float32([0.9, 0.13]), rows),
    )


def run_torch(theirs, x: dict, cotangent: np.ndarray | None = None, dtype=torch.float32):
    """Output, and with a cotangent the gradient of the latent, [b, h, w, c], with the pipeline's
    own packing and positions.
    """
    height, width = x["latent"].shape[1:3]
    latent = torch.from_numpy(x["latent"].transpose(0, 3, 1, 2).copy()).to(dtype).requires_grad_()
    text = torch.from_numpy(x["text"]).to(dtype)
    image_ids = Flux2KleinPipeline._prepare_latent_ids(latent)
    out = theirs(
        Flux2KleinPipeline._pack_latents(latent),
        text,
        torch.from_numpy(x["timestep"] / np.float32(1000)).to(dtype),
        img_ids=image_ids,
        txt_ids=Flux2KleinPipeline._prepare_text_ids(text),
        guidance=None,
        return_dict=False,
    )[0]
    out = Flux2KleinPipeline._unpack_latents_with_ids(out, image_ids, height, width)
    if cotangent is not None:
        (out * torch.from_numpy(cotangent.transpose(0, 3, 1, 2).copy()).to(dtype)).sum().backward()
    results = (out, latent.grad) if cotangent is not None else (out,)
    return tuple(t.detach().double().numpy().transpose(0, 2, 3, 1) for t in results)


def runner(graphdef):
    """Our output and the gradient of the latent; compiled once a shape."""

    def run(params, x, cotangent):
        def forward(latent):
            return nnx.merge(graphdef, params)(**(x | {"latent": latent}))

        out, pull = jax.vjp(forward, x["latent"])
        return out, *pull(cotangent)

    return jax.jit(run)


def weighting(overrides: dict, sizes: tuple[int, int, int]) -> np.ndarray:
    """What gradients are weighted with: fixed, so that no error of the forward pass enters."""
    c = BASE | overrides
    channels = c.get("out_channels") or c["in_channels"]
    return np.random.default_rng(2).standard_normal((2, *sizes[:2], channels)).astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("case", first_is_quick(CASES))
def test_output_and_input_gradient_equal_diffusers(case):
    overrides, sizes = CASES[case]
    theirs, graphdef, state, params = build(overrides)
    x = inputs(overrides, sizes)
    cotangent = weighting(overrides, sizes)
    ours = runner(graphdef)
    want, want_gradient = run_torch(theirs, x, cotangent)
    got, gradient = ours(params, x, cotangent)
    print(
        f"{case}: output {relative(got, want):.1e},"
        f" gradient {relative(gradient, want_gradient):.1e}"
    )
    assert relative(got, want) < TOLERANCE
    assert relative(gradient, want_gradient) < TOLERANCE
    # the case can fail: every input moves the output by many tolerances, and so does the order of
    # its tokens
    moved = {
        "latent": [x["latent"] + 0.01, x["latent"][:, ::-1], x["latent"][:, :, ::-1]],
        "text": [x["text"] + 1.0, x["text"][:, ::-1] if sizes[2] > 1 else 2 * x["text"]],
        "timestep": [x["timestep"] + 5],
    }
    for name, values in moved.items():
        for value in values:
            assert (
                relative(ours(params, x | {name: value}, cotangent)[0], want) > 100 * TOLERANCE
            ), name

    back = to_torch(state, params)
    released = theirs.state_dict()
    assert back.keys() == released.keys()
    assert all(np.array_equal(back[name], t.numpy()) for name, t in released.items())


@pytest.mark.exhaustive
def test_gradients_of_the_parameters_equal_diffusers():
    overrides, sizes = CASES["klein"]
    theirs, graphdef, state, params = build(overrides, seed=3)
    x = inputs(overrides, sizes)
    cotangent = weighting(overrides, sizes)
    run_torch(theirs, x, cotangent)
    ours = jax.jit(
        jax.grad(lambda params, x: (nnx.merge(graphdef, params)(**x) * cotangent).sum())
    )(params, x)
    ours = to_torch(state, ours)
    errors = {name: relative(ours[name], p.grad.numpy()) for name, p in theirs.named_parameters()}
    worst = max(errors, key=errors.__getitem__)
    print(f"{worst}: {errors[worst]:.1e}")
    # the largest is that of the first weight, which sees the sinusoids of 900 themselves
    assert errors[worst] < 5 * TOLERANCE, worst


@pytest.mark.exhaustive
def test_bfloat16_is_as_near_to_float32_as_that_of_diffusers():
    overrides = dict(
        in_channels=32,
        num_layers=3,
        num_single_layers=3,
        num_attention_heads=4,
        attention_head_dim=64,
        axes_dims_rope=(16, 16, 16, 16),
        joint_attention_dim=128,
    )
    theirs, graphdef, _, params = build(overrides)
    # Many rows of different conditions, since an error in a condition is one draw a row. Times are
    # such as BF16 holds: diffusers rounds them to the dtype of the latent, we do not.
    rows = 16
    x = inputs(overrides, (4, 6, 16), rows=rows)
    x["timestep"] = np.resize(np.float32([1000, 500, 250, 125]), rows)
    exact = run_torch(theirs, x)[0]
    half = run_torch(theirs.bfloat16(), x, dtype=torch.bfloat16)[0]
    params = jax.tree.map(lambda p: jnp.asarray(p, jnp.bfloat16), params)
    x["latent"] = jnp.asarray(x["latent"], jnp.bfloat16)
    ours = jax.jit(lambda params, x: nnx.merge(graphdef, params)(**x))(params, x)
    assert ours.dtype == jnp.bfloat16

    def distance(out):
        return float(np.linalg.norm(np.asarray(out, np.float64) - exact) / np.linalg.norm(exact))

    print(f"distance to float32: ours {distance(ours):.5f}, PyTorch's {distance(half):.5f}")
    assert distance(ours) <= 1.10 * distance(half)


@pytest.mark.exhaustive
def test_adapters_are_leaves():
    """`LowRank` leaves anywhere among the linears of both stacks act as the merged weights do."""
    _, graphdef, _, params = build({})
    x = inputs({}, (4, 6, 3))
    rng = np.random.default_rng(4)

    def draw(*shape):
        return (0.3 * rng.standard_normal(shape)).astype(np.float32)

    apart = copy.deepcopy(params)
    merged = copy.deepcopy(params)
    double = ("transformer_blocks", "attn")
    single = ("single_transformer_blocks", "attn")
    for path in (
        (*double, "to_out", 0),
        (*double, "add_k_proj"),
        ("transformer_blocks", "ff_context", "linear_in"),
        (*single, "to_qkv_mlp_proj"),
        (*single, "to_out"),
        ("proj_out",),
    ):
        linear, one, other = (
            reduce(lambda node, key: node[key], path, tree) for tree in (params, apart, merged)
        )
        base = linear["kernel"]
        *layers, n_in, n_out = base.shape
        a = draw(*layers, n_in, 2)
        b = draw(*layers, 2, n_out)
        one["kernel"] = LowRank(jnp.asarray(base), jnp.asarray(a), jnp.asarray(b), 0.5)
        other["kernel"] = base + 0.5 * a @ b
    run = jax.jit(lambda params, x: nnx.merge(graphdef, params)(**x))
    want = np.asarray(run(merged, x))
    assert relative(run(apart, x), want) < TOLERANCE
    assert relative(run(params, x), want) > 1000 * TOLERANCE


@pytest.mark.parametrize(("fields", "count"), [(RELEASED, 3_875_544_576), (LARGER, 9_078_581_248)])
def test_released_sizes_have_the_released_tensors(fields, count):
    _, state = abstract(fields)
    assert parameter_count(state) == count
    with torch.device("meta"):
        theirs = TorchFlux2(**{k: v for k, v in fields.items() if not k.startswith("_")})
    ours = {name: e.torch_shape for e in parameter_table(state) for name in e.names}
    assert ours == {name: tuple(t.shape) for name, t in theirs.state_dict().items()}


def test_rotation_at_the_released_size():
    rows = 33
    columns = 64
    length = 512
    image = Flux2KleinPipeline._prepare_latent_ids(torch.zeros(1, 128, rows, columns))[0]
    text = Flux2KleinPipeline._prepare_text_ids(torch.zeros(1, length, 8))[0]
    theirs = Flux2PosEmbed(theta=2000, axes_dim=(32, 32, 32, 32))(torch.cat([text, image]))
    for ours, want in zip(
        rotary_table(length, rows, columns, Flux2Config.from_dict(RELEASED)), theirs, strict=True
    ):
        assert ours.dtype == np.float32
        np.testing.assert_allclose(
            ours[0], want[:, ::2].numpy(), rtol=0, atol=1e-7
        )  # they hold each angle twice


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_heads": 3}, r"unknown config field\(s\) \['num_heads'\]"),
        ({"patch_size": 2}, "patch_size=2; accepted: 1"),
        ({"eps": 1e-5}, "eps=1e-05; accepted: 1e-06"),
        ({"timestep_guidance_channels": 128}, "timestep_guidance_channels=128; accepted: 256"),
        ({"num_layers": 0}, "num_layers=0; accepted: a positive integer"),
        ({"guidance_embeds": True}, "guidance_embeds=True; accepted: False"),
        ({"out_channels": 0}, "out_channels=0; accepted: a positive integer or None"),
        (
            {"mlp_ratio": 1e-9},
            "mlp_ratio=1e-09; accepted: a number that gives the MLP a width of 1 or more",
        ),
        (
            {"axes_dims_rope": [16, 56, 56]},
            r"axes_dims_rope=\(16, 56, 56\); accepted: four positive even numbers",
        ),
        ({"axes_dims_rope": [31, 33, 32, 32]}, "accepted: four positive even numbers"),
        ({"axes_dims_rope": [16, 24, 24, 8]}, "whose sum is attention_head_dim=128"),
    ],
)
def test_a_config_this_port_cannot_honour_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Flux2Config.from_dict(RELEASED | fields)


def test_a_released_config_may_hold_null_and_a_list():
    config = Flux2Config.from_dict(
        RELEASED | {"out_channels": None, "axes_dims_rope": [32, 32, 32, 32]}
    )
    assert config == Flux2Config.from_dict(RELEASED)
    hash(config)  # static under jit
