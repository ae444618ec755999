"""`models.zimage.transformer` against diffusers' `ZImageTransformer2DModel`."""

import copy
from functools import reduce

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import ZImageTransformer2DModel as TorchZImage
from flax import nnx
from pretrain.networks import to_torch

from solrl_jax.models.loading.weights import parameter_table
from solrl_jax.models.zimage.transformer import (
    ZImageConfig,
    ZImageTransformer2DModel,
    rotary_tables,
)
from solrl_jax.quant.matmul import LowRank
from tests import carried
from tests.parity import from_torch, parameter_count, relative

BASE = dict(
    in_channels=4,
    dim=48,
    n_layers=2,
    n_refiner_layers=2,
    n_heads=3,
    n_kv_heads=3,
    cap_feat_dim=20,
    axes_dims=(4, 6, 6),
    axes_lens=(200, 16, 16),
)
# config, then height and width of the latent, and how many tokens each text has and is filled up to
CASES = {
    "short texts": ({}, (6, 10), (7, 1, 20), 20),
    "texts of one multiple and of several": ({}, (8, 8), (32, 33, 5, 70), 70),
    "no filling": ({}, (16, 8), (64, 32), 64),
    "one block of each, one token": (dict(n_layers=1, n_refiner_layers=1), (2, 2), (3,), 9),
    "no norm of heads, other epsilons": (dict(qk_norm=False, norm_eps=1e-2), (4, 14), (31, 40), 50),
    "wide, deep": (
        dict(dim=288, n_heads=9, n_kv_heads=9, axes_dims=(8, 12, 12), n_layers=3),
        (4, 6),
        (12, 34),
        40,
    ),
    "other rotation, scale of time, channels": (
        dict(rope_theta=40.0, t_scale=700.0, in_channels=6, cap_feat_dim=36),
        (8, 6),
        (9, 32),
        33,
    ),
    "as many positions as are stored": (dict(axes_lens=(66, 5, 3)), (10, 6), (64, 40), 64),
}
TOLERANCE = 1e-5  # largest difference over largest value

# `transformer/config.json` of Tongyi-MAI/Z-Image
RELEASED = carried.config(carried.ZIMAGE, "transformer")


def build(overrides: dict, seed: int = 0):
    """A PyTorch network with weights strong enough that every input matters, and ours (graph,
    state, parameters) with them.
    """
    torch.manual_seed(seed)
    theirs = TorchZImage(**(BASE | overrides)).eval()
    with torch.no_grad():
        for p in theirs.parameters():
            p.copy_(
                torch.randn_like(p)
                * (0.7 if p.ndim < 2 or len(p) == 1 else 1.0 / np.sqrt(p[0].numel()))
            )
    graphdef, state = abstract(BASE | overrides)
    return (
        theirs,
        graphdef,
        state,
        from_torch(state, {k: v.numpy() for k, v in theirs.state_dict().items()}),
    )


def abstract(fields: dict):
    config = ZImageConfig.from_dict(
        {k: list(v) if isinstance(v, tuple) else v for k, v in fields.items()}
    )
    return nnx.split(nnx.eval_shape(lambda: ZImageTransformer2DModel(config, rngs=nnx.Rngs(0))))


def inputs(overrides: dict, size: tuple[int, int], lengths: tuple[int, ...], filled: int) -> dict:
    """Our arguments. Times are such that the last bit of PyTorch's `exp`, which is wrong in two
    frequencies, does not show.
    """
    c = BASE | overrides
    rng = np.random.default_rng(1)
    rows = len(lengths)

    def draw(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    return dict(
        latent=draw(rows, *size, c["in_channels"]),
        text=draw(rows, filled, c["cap_feat_dim"]),
        mask=np.arange(filled) < np.array(lengths)[:, None],
        timestep=np.resize(np.float32([900, 391, 1000]), rows),
    )


def run_torch(theirs, x: dict, cotangent: np.ndarray | None = None, dtype=torch.float32):
    """The velocity, and with a cotangent the gradient of the latent, [b, h, w, c], as the pipeline
    calls the network.
    """
    latent = torch.from_numpy(x["latent"].transpose(0, 3, 1, 2).copy()).to(dtype).requires_grad_()
    texts = [
        torch.from_numpy(text[mask]).to(dtype)
        for text, mask in zip(x["text"], x["mask"], strict=True)
    ]
    time = (1000 - torch.from_numpy(x["timestep"])) / 1000
    out = theirs(list(latent.unsqueeze(2).unbind(0)), time, texts, return_dict=False)[0]
    out = -torch.stack(out).squeeze(2)
    if cotangent is not None:
        (out * torch.from_numpy(cotangent.transpose(0, 3, 1, 2).copy())).sum().backward()
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


def weighting(x: dict) -> np.ndarray:
    """What gradients are weighted with: fixed, so that no error of the forward pass enters."""
    return np.random.default_rng(2).standard_normal(x["latent"].shape).astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[] if case == "short texts" else pytest.mark.exhaustive)
        for case in CASES
    ],
)
def test_output_and_input_gradient_equal_diffusers(case):
    overrides, *shapes = CASES[case]
    theirs, graphdef, state, params = build(overrides)
    x = inputs(overrides, *shapes)
    ours = runner(graphdef)
    cotangent = weighting(x)
    want, want_gradient = run_torch(theirs, x, cotangent)
    got, gradient = ours(params, x, cotangent)
    print(
        f"{case}: output {relative(got, want):.1e},"
        f" gradient {relative(gradient, want_gradient):.1e}"
    )
    assert relative(got, want) < TOLERANCE
    assert relative(gradient, want_gradient) < TOLERANCE
    # the case can fail: every input moves every row of the output by many tolerances
    moved = {"latent": x["latent"] + 0.01, "text": x["text"] + 0.3, "timestep": x["timestep"] - 5}
    for name, value in moved.items():
        rows = np.abs(np.asarray(ours(params, x | {name: value}, cotangent)[0]) - want).max(
            axis=(1, 2, 3)
        )
        assert rows.min() > 100 * TOLERANCE * np.abs(want).max(), name
    # but for what the text is filled up with
    other = x | {"text": np.where(x["mask"][..., None], x["text"], x["text"] + 1)}
    np.testing.assert_array_equal(ours(params, other, cotangent)[0], got)

    back = to_torch(state, params)
    released = theirs.state_dict()
    assert back.keys() == released.keys()
    assert all(np.array_equal(back[name], t.numpy()) for name, t in released.items())


@pytest.mark.exhaustive
def test_each_number_matters():
    """So that the parity above is not blind to it: each moves the output by many tolerances."""
    shapes = CASES["texts of one multiple and of several"][1:]
    _, graphdef, _, params = build({})
    x = inputs({}, *shapes)
    want = jax.jit(lambda params, x: nnx.merge(graphdef, params)(**x))(params, x)
    for changes in (
        {"norm_eps": 1e-3},
        {"rope_theta": 270.0},
        {"t_scale": 1001.0},
        {"axes_dims": (6, 4, 6)},
    ):
        other, _ = abstract(BASE | changes)
        got = jax.jit(lambda params, x, graph: nnx.merge(graph, params)(**x), static_argnums=2)(
            params, x, other
        )
        assert relative(got, want) > 100 * TOLERANCE, changes


@pytest.mark.exhaustive
def test_a_row_does_not_depend_on_the_others_nor_on_the_filling():
    _, graphdef, _, params = build({})
    x = inputs({}, (6, 10), (7, 33, 64), 64)
    run = jax.jit(lambda params, x: nnx.merge(graphdef, params)(**x))
    together = np.asarray(run(params, x))
    for row, length in enumerate((7, 33, 64)):
        alone = {name: value[row : row + 1] for name, value in x.items()}
        alone |= {"text": alone["text"][:, :length], "mask": alone["mask"][:, :length]}
        assert relative(run(params, alone), together[row : row + 1]) < TOLERANCE


@pytest.mark.exhaustive
def test_gradients_of_the_parameters_equal_diffusers():
    overrides, *shapes = CASES["texts of one multiple and of several"]
    theirs, graphdef, state, params = build(overrides, seed=3)
    x = inputs(overrides, *shapes)
    cotangent = weighting(x)
    run_torch(theirs, x, cotangent)
    ours = jax.jit(
        jax.grad(lambda params, x: (nnx.merge(graphdef, params)(**x) * cotangent).sum())
    )(params, x)
    ours = to_torch(state, ours)
    errors = {name: relative(ours[name], p.grad.numpy()) for name, p in theirs.named_parameters()}
    worst = max(errors, key=errors.__getitem__)
    print(f"{worst}: {errors[worst]:.1e}")
    assert errors[worst] < 5 * TOLERANCE, worst


@pytest.mark.exhaustive
def test_bfloat16_is_as_near_to_float32_as_that_of_diffusers():
    overrides = dict(
        dim=256,
        n_heads=4,
        n_kv_heads=4,
        axes_dims=(16, 24, 24),
        n_layers=4,
        in_channels=16,
        cap_feat_dim=128,
    )
    theirs, graphdef, _, params = build(overrides)
    # many rows of different conditions, since an error in a condition is one draw a row; times that
    # BF16 holds
    x = inputs(overrides, (8, 12), (16, 33, 5, 60) * 4, 64)
    x["timestep"] = np.resize(np.float32([1000, 500, 250, 125]), 16)
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
    """`LowRank` leaves anywhere among the linears of all stacks act as the merged weights do."""
    _, graphdef, _, params = build({})
    x = inputs({}, (4, 6), (3, 40), 40)
    rng = np.random.default_rng(4)

    def draw(*shape):
        return (0.3 * rng.standard_normal(shape)).astype(np.float32)

    apart = copy.deepcopy(params)
    merged = copy.deepcopy(params)
    for path in (
        ("layers", "attention", "to_q"),
        ("layers", "attention", "to_out", 0),
        ("layers", "feed_forward", "w1"),
        ("layers", "feed_forward", "w2"),
        ("noise_refiner", "attention", "to_v"),
        ("context_refiner", "feed_forward", "w3"),
        ("layers", "adaLN_modulation", 0),
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


def test_released_size_has_the_released_tensors():
    _, state = abstract(RELEASED)
    assert parameter_count(state) == 6_154_908_736
    with torch.device("meta"):
        theirs = TorchZImage(**RELEASED)
    ours = {name: e.torch_shape for e in parameter_table(state) for name in e.names}
    assert ours == {name: tuple(t.shape) for name, t in theirs.state_dict().items()}


@pytest.mark.slow
def test_rotation_at_the_released_size():
    """Positions of text and image, and the largest that are stored."""
    config = ZImageConfig.from_dict(RELEASED)
    rows = 33
    columns = 64
    with torch.device("meta"):
        theirs = TorchZImage(**RELEASED)

    def pad(x, grid, start):
        return theirs._pad_with_ids(x, grid, start, "cpu")[1]

    lengths = np.array([32, 480, 1504])
    (image, text) = rotary_tables(config, rows, columns, 1504, jnp.asarray(lengths))
    for i, length in enumerate(lengths):
        ids = pad(torch.zeros(length, 1), (length, 1, 1), (1, 0, 0))
        of_image = pad(torch.zeros(rows * columns, 1), (1, rows, columns), (length + 1, 0, 0))
        for (cos, sin), want, count in ((text, ids, length), (image, of_image, len(of_image))):
            turn = theirs.rope_embedder(want).numpy()
            np.testing.assert_allclose(cos[i, :count], turn.real, rtol=0, atol=1e-7)
            np.testing.assert_allclose(sin[i, :count], turn.imag, rtol=0, atol=1e-7)
    assert image[0].shape[1] == len(of_image)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_heads": 3}, r"unknown config field\(s\) \['num_heads'\]"),
        ({"all_patch_size": [2, 4]}, r"all_patch_size=\(2, 4\); accepted: \[2\]"),
        ({"all_f_patch_size": [2]}, r"all_f_patch_size=\(2,\); accepted: \[1\]"),
        ({"n_layers": 0}, "n_layers=0; accepted: a positive integer"),
        ({"n_heads": 7}, "n_heads=7; accepted: a divisor of dim=3840"),
        ({"n_kv_heads": 10}, "n_kv_heads=10; accepted: n_heads=30"),
        ({"siglip_feat_dim": 1152}, "siglip_feat_dim=1152; accepted: None"),
        ({"qk_norm": None}, "qk_norm=None; accepted: True, False"),
        ({"axes_dims": [64, 64]}, r"axes_dims=\(64, 64\); accepted: three positive even numbers"),
        ({"axes_dims": [31, 49, 48]}, "accepted: three positive even numbers"),
        ({"axes_dims": [32, 48, 32]}, "whose sum is dim / n_heads=128"),
        ({"axes_lens": [1536, 512]}, "axes_lens=.*; accepted: three positive integers"),
    ],
)
def test_a_config_this_port_cannot_honour_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        ZImageConfig.from_dict(RELEASED | fields)


def test_a_released_config():
    config = ZImageConfig.from_dict(RELEASED)
    assert config == ZImageConfig(axes_lens=(1536, 512, 512))
    assert config.max_text_tokens == 1504
    hash(config)  # static under jit


@pytest.mark.parametrize(
    ("size", "filled", "message"),
    [
        ((6, 9), 8, "latents of 6 x 9; accepted: even sizes up to 32 x 32"),
        ((34, 6), 8, "latents of 34 x 6"),
        ((6, 34), 8, "latents of 6 x 34"),
        ((6, 8), 193, "text of 193 tokens; accepted: up to 192"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(size, filled, message):
    graphdef, state = abstract(BASE)
    x = inputs({}, size, (3,), filled)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda state, x: nnx.merge(graphdef, state)(**x), state, x)
