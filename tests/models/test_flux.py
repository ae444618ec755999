"""`models.flux.transformer` against diffusers' `FluxTransformer2DModel`."""

import copy
from functools import reduce

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import FluxPipeline
from diffusers import FluxTransformer2DModel as TorchFlux
from diffusers.models.transformers.transformer_flux import FluxPosEmbed
from flax import nnx
from pretrain.networks import to_torch

from solrl_jax.models.flux.transformer import FluxConfig, FluxTransformer2DModel, rotary_table
from solrl_jax.models.layers.pixel_shuffle import depth_to_space, space_to_depth
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
    pooled_projection_dim=20,
    axes_dims_rope=(4, 6, 6),
)
# config, then height and width of the latent and the number of text tokens
CASES = {
    "schnell": ({}, (6, 10, 7)),
    "dev": (dict(guidance_embeds=True), (10, 4, 5)),
    "deeper, one text token": (
        dict(num_layers=3, num_attention_heads=4, guidance_embeds=True),
        (2, 14, 1),
    ),
    "other channels out, uneven axes": (
        dict(in_channels=16, out_channels=4, attention_head_dim=32, axes_dims_rope=(2, 8, 22)),
        (8, 8, 12),
    ),
    "one wide head": (
        dict(
            num_attention_heads=1,
            attention_head_dim=64,
            axes_dims_rope=(16, 24, 24),
            num_single_layers=3,
        ),
        (14, 6, 3),
    ),
    "one block of each, one token": (
        dict(num_layers=1, num_single_layers=1, guidance_embeds=True),
        (2, 2, 9),
    ),
}
TOLERANCE = 1e-5  # largest difference over largest value

# `transformer/config.json` of black-forest-labs/FLUX.1-dev, -schnell
RELEASED = carried.config(carried.FLUX, "transformer")


def build(overrides: dict, seed: int = 0):
    """A PyTorch network with weights strong enough that every input matters, and ours (graph,
    state, parameters) with them.
    """
    torch.manual_seed(seed)
    theirs = TorchFlux(**(BASE | overrides)).eval()
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
    config = FluxConfig.from_dict(fields)
    return nnx.split(nnx.eval_shape(lambda: FluxTransformer2DModel(config, rngs=nnx.Rngs(0))))


def inputs(overrides: dict, sizes: tuple[int, int, int], rows: int = 2) -> dict:
    """Our arguments; the times are float32 products with 1000, as diffusers takes them itself."""
    height, width, length = sizes
    c = BASE | overrides
    rng = np.random.default_rng(1)

    def draw(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    return dict(
        latent=draw(rows, height, width, c["in_channels"] // 4),
        text=draw(rows, length, c["joint_attention_dim"]),
        pooled=draw(rows, c["pooled_projection_dim"]),
        timestep=np.float32(1000) * np.resize(np.float32([0.9, 0.13]), rows),
        guidance=np.resize(np.float32([3.5, 1.0]), rows) if c.get("guidance_embeds") else None,
    )


def run_torch(theirs, x: dict, cotangent: np.ndarray | None = None, dtype=torch.float32):
    """Output, and with a cotangent the gradient of the latent, [b, h, w, c], through the pipeline's
    own packing.
    """
    (b, height, width, c), tensor = (
        x["latent"].shape,
        lambda a: torch.from_numpy(np.asarray(a)).to(dtype),
    )
    latent = tensor(x["latent"].transpose(0, 3, 1, 2).copy()).requires_grad_()
    out = theirs(
        FluxPipeline._pack_latents(latent, b, c, height, width),
        tensor(x["text"]),
        tensor(x["pooled"]),
        torch.from_numpy(x["timestep"] / np.float32(1000)).to(dtype),
        img_ids=FluxPipeline._prepare_latent_image_ids(
            b, height // 2, width // 2, "cpu", torch.float32
        ),
        txt_ids=torch.zeros(x["text"].shape[1], 3),
        guidance=None if x["guidance"] is None else tensor(x["guidance"]),
        return_dict=False,
    )[0]
    out = FluxPipeline._unpack_latents(out, height, width, 1)
    if cotangent is not None:
        (out * tensor(cotangent.transpose(0, 3, 1, 2).copy())).sum().backward()
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
    channels = (c.get("out_channels") or c["in_channels"]) // 4
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
    # the case can fail: every input moves the output by many tolerances
    moved = {
        "latent": x["latent"] + 0.01,
        "text": x["text"] + 0.1,
        "pooled": x["pooled"] + 0.1,
        "timestep": x["timestep"] + 5,
    }
    if x["guidance"] is not None:
        moved["guidance"] = x["guidance"] + 0.01
    for name, value in moved.items():
        assert relative(ours(params, x | {name: value}, cotangent)[0], want) > 100 * TOLERANCE, name

    back = to_torch(state, params)
    released = theirs.state_dict()
    assert back.keys() == released.keys()
    assert all(np.array_equal(back[name], t.numpy()) for name, t in released.items())


@pytest.mark.exhaustive
def test_gradients_of_the_parameters_equal_diffusers():
    overrides, sizes = CASES["dev"]
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
    # the largest is that of the guidance embedder's first weight, which sees the sinusoids of 3500
    # themselves
    assert errors[worst] < 5 * TOLERANCE, worst


@pytest.mark.exhaustive
def test_bfloat16_is_as_near_to_float32_as_that_of_diffusers():
    overrides = dict(
        in_channels=64,
        num_layers=3,
        num_single_layers=3,
        num_attention_heads=4,
        attention_head_dim=64,
        axes_dims_rope=(16, 24, 24),
        joint_attention_dim=128,
        guidance_embeds=True,
    )
    theirs, graphdef, _, params = build(overrides)
    # Many rows of different conditions, since an error in a condition is one draw a row. Times and
    # scales are such as BF16 holds: diffusers rounds them to the dtype of the latent, we do not.
    rows = 16
    x = inputs(overrides, (8, 12, 16), rows=rows)
    x["timestep"] = np.resize(np.float32([1000, 500, 250, 125]), rows)
    x["guidance"] = np.resize(np.float32([4, 1, 8, 0.5, 2]), rows)
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


@pytest.mark.slow
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
    single = ("single_transformer_blocks",)
    for path in (
        (*double, "to_out", 0),
        (*double, "add_k_proj"),
        ("transformer_blocks", "ff_context", "net", "2"),
        (*single, "attn", "to_q"),
        (*single, "proj_out"),
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


@pytest.mark.parametrize(("guided", "count"), [(True, 11_901_408_320), (False, 11_891_178_560)])
def test_released_sizes_have_the_released_tensors(guided, count):
    fields = RELEASED | {"guidance_embeds": guided}
    _, state = abstract(fields)
    assert parameter_count(state) == count
    with torch.device("meta"):
        theirs = TorchFlux(**{k: v for k, v in fields.items() if not k.startswith("_")})
    ours = {name: e.torch_shape for e in parameter_table(state) for name in e.names}
    assert ours == {name: tuple(t.shape) for name, t in theirs.state_dict().items()}


def test_rotation_at_the_released_size():
    rows = 33
    columns = 64
    length = 5
    axes = (16, 56, 56)
    image = FluxPipeline._prepare_latent_image_ids(1, rows, columns, "cpu", torch.float32)
    theirs = FluxPosEmbed(theta=10000, axes_dim=axes)(torch.cat([torch.zeros(length, 3), image]))
    for ours, want in zip(rotary_table(length, rows, columns, axes), theirs, strict=True):
        assert ours.dtype == np.float32
        np.testing.assert_allclose(
            ours[0], want[:, ::2].numpy(), rtol=0, atol=1e-7
        )  # they hold each angle twice


def test_packing_is_the_pipelines():
    latent = np.random.default_rng(0).standard_normal((2, 6, 10, 3)).astype(np.float32)
    theirs = FluxPipeline._pack_latents(
        torch.from_numpy(latent.transpose(0, 3, 1, 2).copy()), 2, 3, 6, 10
    )
    packed = space_to_depth(jnp.asarray(latent)).reshape(len(latent), -1, 4 * latent.shape[-1])
    np.testing.assert_array_equal(packed, theirs.numpy())
    np.testing.assert_array_equal(depth_to_space(packed.reshape(len(latent), 3, 5, -1)), latent)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_heads": 3}, r"unknown config field\(s\) \['num_heads'\]"),
        ({"patch_size": 2}, "patch_size=2; accepted: 1"),
        ({"num_layers": 0}, "num_layers=0; accepted: a positive integer"),
        ({"guidance_embeds": None}, "guidance_embeds=None; accepted: True, False"),
        ({"in_channels": 6}, "in_channels=6; accepted: a positive multiple of 4"),
        ({"out_channels": 0}, "out_channels=0; accepted: a positive integer or None"),
        (
            {"axes_dims_rope": [16, 56]},
            r"axes_dims_rope=\(16, 56\); accepted: three positive even numbers",
        ),
        ({"axes_dims_rope": [15, 57, 56]}, "accepted: three positive even numbers"),
        ({"axes_dims_rope": [16, 24, 24]}, "whose sum is attention_head_dim=128"),
    ],
)
def test_a_config_this_port_cannot_honour_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        FluxConfig.from_dict(RELEASED | fields)


def test_a_released_config_may_hold_null_and_a_list():
    config = FluxConfig.from_dict(RELEASED | {"out_channels": None, "axes_dims_rope": [16, 56, 56]})
    assert config == FluxConfig.from_dict(RELEASED) == FluxConfig(guidance_embeds=True)
    hash(config)  # static under jit


@pytest.mark.parametrize(
    ("guided", "changes", "message"),
    [
        (True, {"guidance": None}, "guidance=None; accepted: a scale, with this config"),
        (False, {"guidance": np.ones(2, np.float32)}, "accepted: None, with this config"),
        (
            False,
            {"latent": np.zeros((2, 6, 9, 2), np.float32)},
            "latents of 6 x 9; accepted: even sizes",
        ),
    ],
)
def test_inputs_that_do_not_fit_are_refused(guided, changes, message):
    overrides = {"guidance_embeds": guided}
    graphdef, state = abstract(BASE | overrides)
    x = inputs(overrides, (6, 8, 3)) | changes
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda state, x: nnx.merge(graphdef, state)(**x), state, x)
