"""MHLA in SANA against float64 loops over its formulas; with equal weights it is linear attention;
what it begins with.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from solrl_jax.config.presets import resolve
from solrl_jax.config.values import ConfigError
from solrl_jax.errors import InputError
from solrl_jax.models.checks import check_sizes
from solrl_jax.models.layers.mhla import BlockMixing, Mhla, initial_mix, tiling
from solrl_jax.models.loading.weights import parameter_table
from solrl_jax.models.locate import mhla_override, open_model
from solrl_jax.models.sana.transformer import LinearAttention
from solrl_jax.quant.lazy import LazyActivation
from solrl_jax.rl.explore.quantized_layers import why_kept
from solrl_jax.rl.trainable.trainable import (
    TrainedPaths,
    find_trained_paths,
    flatten,
    replace,
    within_bounds,
)
from tests.cases import first_is_quick

# blocks of 3 x 4 tokens
GRID = (6, 8)
HEADS = 2
WIDTH = 16
BLOCKS = 4
TOLERANCE = 1e-6
NORMED = pytest.mark.parametrize("normed", [False, True])
RELEASED = pytest.mark.parametrize("released", [False, True])


def draw(*shape, seed):
    return np.random.default_rng(seed).standard_normal(shape)


def attention(released, normed, blocks=BLOCKS, kind=BlockMixing):
    """The module with random weights, and these in float64 by name."""
    options = dict(normed=False, bias=True, rngs=nnx.Rngs(0))
    if kind is LinearAttention:
        module = kind((WIDTH, WIDTH, WIDTH), HEADS, **options | {"normed": normed})
    else:
        module = kind(
            Mhla(blocks, released, normed),
            tiling(blocks, GRID),
            (WIDTH, WIDTH, WIDTH),
            HEADS,
            **options,
        )
    numbers = {}
    for i, (path, variable) in enumerate(nnx.to_flat_state(nnx.state(module))):
        name = "/".join(map(str, path))
        shape = variable.get_value().shape
        value = draw(*shape, seed=i) / (shape[0] ** 0.5 if len(shape) == 2 else 1)
        numbers[name] = np.abs(value) if name == "mix" else value
        variable.set_value(jnp.asarray(numbers[name], jnp.float32))
        numbers[name] = np.asarray(variable.get_value(), np.float64)
    return module, numbers


def blocks_of(blocks=BLOCKS):
    """For each token in raster order its block, and its position in the block."""
    down, across = {4: (2, 2), 1: (1, 1), 12: (3, 4)}[blocks]
    high = GRID[0] // down
    wide = GRID[1] // across
    where = [
        (r // high * across + c // wide, r % high * wide + c % wide)
        for r in range(GRID[0])
        for c in range(GRID[1])
    ]
    return np.array(where).T


def by_hand(w, x, released, normed, blocks=BLOCKS):
    """The formulas, token by token: [n, d] of one image, float64."""
    n = len(x)
    h = WIDTH // HEADS

    def linear(name, t):
        return t @ w[f"{name}/kernel"] + w[f"{name}/bias"]

    q, k, v = (linear(f"to_{name}", x) for name in "qkv")
    if normed:

        def rms(t, name):
            return t / np.sqrt((t**2).mean(-1, keepdims=True) + 1e-5) * w[f"{name}/scale"]

        q = rms(q, "norm_q")
        k = rms(k, "norm_k")
    block, place = blocks_of(blocks)
    at = {(b, p): t for t, (b, p) in enumerate(zip(block, place, strict=True))}
    out = np.zeros((n, WIDTH))
    for head in range(HEADS):
        cut = slice(head * h, (head + 1) * h)

        def kernel(t, cut=cut):
            return np.maximum(t[:, cut], 0) + 1e-6

        fq = kernel(q)
        fk = kernel(k)
        of_v = v[:, cut]
        inside = [block == b for b in range(blocks)]
        s = [sum(np.outer(fk[t], of_v[t]) for t in np.flatnonzero(members)) for members in inside]
        z = [fk[members].sum(0) for members in inside]
        for t in range(n):
            m = w["mix"][block[t]]
            mixed = sum(m[b] * s[b] for b in range(blocks))
            if released:
                below = sum(m[b] * fq[at[b, place[t]]] @ z[b] for b in range(blocks))
            else:
                below = fq[t] @ sum(m[b] * z[b] for b in range(blocks))
            out[t, cut] = fq[t] @ mixed / (below + 1e-6)
    padded = np.pad(v.reshape(*GRID, WIDTH), ((1, 1), (1, 1), (0, 0)))
    local = sum(
        padded[i : i + GRID[0], j : j + GRID[1]] * w["lepe/kernel"][i, j, 0]
        for i in range(3)
        for j in range(3)
    )
    if released:
        local = local + w["lepe/bias"]
    return linear("to_out/0", out + local.reshape(n, WIDTH))


def run(module, x):
    return np.asarray(
        jax.jit(lambda x: module(LazyActivation.from_array(x), GRID))(jnp.asarray(x, jnp.float32))
    )


@RELEASED
@NORMED
@pytest.mark.parametrize("blocks", first_is_quick([1, 4, 12]))
def test_attention_is_its_formula_in_float64(released, normed, blocks):
    module, numbers = attention(released, normed, blocks)
    x = draw(2, GRID[0] * GRID[1], WIDTH, seed=99)
    want = np.stack([by_hand(numbers, image, released, normed, blocks) for image in x])
    assert np.abs(run(module, x) - want).max() < 1e-5 * np.abs(want).max()


def test_the_two_variants_differ():
    x = draw(1, GRID[0] * GRID[1], WIDTH, seed=99)
    paper, released = (run(attention(variant, False)[0], x) for variant in (False, True))
    assert np.abs(paper - released).max() > 0.1 * np.abs(paper).max()


@pytest.mark.slow
@NORMED
@pytest.mark.parametrize("scale", first_is_quick([1 / 12, 1.0]))
def test_equal_weights_are_linear_attention(normed, scale):
    """SANA's own attention, by the same weights; queries have positive features, so that both
    kernels are one to 1e-6.
    """
    module, _ = attention(False, normed, 12)
    plain, _ = attention(False, normed, kind=LinearAttention)

    def of(module):
        return dict(nnx.to_flat_state(nnx.state(module)))

    shared = {path: value for path, value in of(module).items() if path in of(plain)}
    nnx.update(plain, nnx.from_flat_state(shared.items()))
    for m in (module, plain):
        if normed:
            m.norm_q.scale.set_value(jnp.full(WIDTH, 3.0))
            m.norm_k.scale.set_value(jnp.full(WIDTH, 3.0))
        m.to_q.bias.set_value(jnp.full(WIDTH, 3.0))
        m.to_k.bias.set_value(jnp.full(WIDTH, 3.0))
    module.mix.set_value(jnp.full((12, 12), scale))
    module.lepe.kernel.set_value(jnp.zeros((3, 3, 1, WIDTH)))
    x = draw(2, GRID[0] * GRID[1], WIDTH, seed=5)
    want = run(plain, x)
    assert np.abs(run(module, x) - want).max() < TOLERANCE * np.abs(want).max()
    module.mix.set_value(scale * (1 + 0.1 * jnp.arange(144.0).reshape(12, 12) / 144))
    assert np.abs(run(module, x) - want).max() > 10 * TOLERANCE * np.abs(want).max()


def test_the_first_mixture_falls_with_the_distance_of_blocks():
    two = np.sqrt(2)
    paper = initial_mix((2, 2), False)
    row = np.array([1, 1 - 1 / two, 1 - 1 / two, 0])
    np.testing.assert_allclose(paper[0], row / row.sum(), rtol=1e-12)
    np.testing.assert_allclose(paper.sum(1), 1, rtol=1e-12)
    wide = initial_mix(
        (1, 3), False
    )  # the middle block's farthest neighbor is at 1, that of the others at 2
    np.testing.assert_allclose(wide, [[2 / 3, 1 / 3, 0], [0, 1, 0], [0, 1 / 3, 2 / 3]], atol=1e-12)
    released = initial_mix((1, 3), True)
    np.testing.assert_allclose(
        released, np.array([[2, 1, 0], [1, 2, 1], [0, 1, 2]]) / [3, 4, 3], atol=1e-12
    )
    np.testing.assert_array_equal(initial_mix((1, 1), False), [[1]])


def test_blocks_are_as_square_as_they_can_be():
    assert tiling(16, (32, 32)) == (4, 4)
    assert tiling(16, (64, 16)) == (8, 2)
    assert tiling(16, (16, 64)) == (2, 8)
    assert tiling(6, (4, 9)) == (2, 3)
    assert tiling(10, (10, 10)) == (2, 5)  # (5, 2) is as square: fewer from top to bottom
    with pytest.raises(
        ValueError,
        match=r"^model.mhla_blocks=16: 6 x 10 tokens do not divide into so many equal blocks$",
    ):
        tiling(16, (6, 10))


def configured(*overrides):
    config = resolve("tiny", ["model.attention=mhla", *overrides])
    return config, open_model(config.model.path, mhla=mhla_override(config.model))


@pytest.mark.slow
@RELEASED
def test_a_pipeline_begins_with_what_its_files_do_not_have(released):
    _, pipeline = configured(f"model.mhla_released={str(released).lower()}", "model.mhla_norm=true")
    params = flatten(pipeline.transformer.load(jnp.float32))
    plain = flatten(open_model("embedded:tiny-sana").transformer.load(jnp.float32))
    new = {
        f"transformer_blocks/attn1/{name}"
        for name in ("mix", "lepe/kernel", "norm_q/scale", "norm_k/scale")
    }
    if released:
        new.add("transformer_blocks/attn1/lepe/bias")
        assert not np.asarray(params["transformer_blocks/attn1/lepe/bias"]).any()
    assert params.keys() == plain.keys() | new
    for path, value in plain.items():
        np.testing.assert_array_equal(params[path], value)

    def of(name):
        return np.asarray(params[f"transformer_blocks/attn1/{name}"])

    mix = of("mix")
    lepe = of("lepe/kernel")
    scale = of("norm_q/scale")
    layers = len(mix)
    np.testing.assert_array_equal(
        mix, np.broadcast_to(initial_mix((4, 4), released).astype(np.float32), (layers, 16, 16))
    )
    assert lepe.sum() == (lepe[:, 1, 1] == 1).sum() == released * lepe.shape[0] * lepe.shape[-1]
    np.testing.assert_array_equal(scale, 1)


@pytest.mark.slow
def test_what_it_adds_is_trained_in_full_kept_in_bounds_and_never_quantized():
    config, pipeline = configured()
    new = tuple(f"transformer_blocks/attn1/{name}" for name in ("lepe/kernel", "mix"))
    targets = find_trained_paths(pipeline.transformer, config)
    assert targets == TrainedPaths(
        find_trained_paths(open_model("embedded:tiny-sana").transformer, config).adapted, new
    )
    params = pipeline.transformer.abstract_params(jnp.bfloat16)
    assert (
        not set(new)
        & why_kept(
            params,
            dataclasses.replace(
                config.model.quantization, modules_to_not_convert=(), min_width_ratio=0.0
            ),
        ).keys()
    )
    trained = {path: jnp.asarray([-1.0, 0.5, 2.0]) for path in new}
    trained |= {"x/kernel": {"a": jnp.asarray(-1.0), "b": jnp.asarray(2.0)}}
    kept = within_bounds(trained, parameter_table(pipeline.transformer.state))
    np.testing.assert_array_equal(kept[new[1]], [0, 0.5, 1])
    assert kept[new[0]] is trained[new[0]]
    assert kept["x/kernel"] is trained["x/kernel"]
    released = configured("model.mhla_released=true")[1]
    np.testing.assert_array_equal(
        within_bounds(trained, parameter_table(released.transformer.state))[new[1]], [-1, 0.5, 2]
    )


@pytest.mark.exhaustive
def test_a_network_of_equal_weights_has_sanas_velocities():
    """Of tiny-sana's released weights; and how far the paper's beginning is from them."""
    _, pipeline = configured()
    plain = open_model("embedded:tiny-sana")
    rng = np.random.default_rng(0)
    params = pipeline.transformer.load(jnp.float32)
    sana_params = plain.transformer.load(jnp.float32)
    latent = jnp.asarray(rng.standard_normal((3, 8, 8, pipeline.channels)), jnp.float32)
    width = sana_params["caption_projection"]["linear_1"]["kernel"].shape[0]
    text = {
        "text": jnp.asarray(rng.standard_normal((3, 5, width)), jnp.float32),
        "mask": jnp.ones((3, 5), bool),
    }
    time = jnp.asarray([900.0, 500.0, 100.0])
    one = jnp.float32(1)

    def velocity(p, params):
        return np.asarray(jax.jit(p.velocity)(params, latent, text, time, one))

    want = velocity(plain, sana_params)

    def apart(params):
        return np.linalg.norm(velocity(pipeline, params) - want) / np.linalg.norm(want)

    path = "transformer_blocks/attn1/mix"
    assert (
        apart(replace(params, {path: jnp.full((len(flatten(params)[path]), 16, 16), 1 / 16)}))
        < 1e-5
    )
    assert 0.03 < apart(params) < 0.12


def test_blocks_lie_as_in_an_image_of_the_models_size_and_others_must_divide():
    """m is about places: 4 x 4 blocks stay 4 x 4 blocks, also where 2 x 8 would be squarer."""
    config, pipeline = configured("rollout.size=[[16,48],[32,32]]")
    check_sizes(config, pipeline)
    assert pipeline.latent_shape(16, 48)[:2] == (4, 12)
    config, _ = configured("rollout.size=[[24,32],[32,32]]")
    with pytest.raises(
        InputError,
        match=r"^rollout.size: size 24x32: this model supports heights in multiples of 16 pixels"
        " and widths in multiples of 16$",
    ):
        check_sizes(config, pipeline)


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        (("model.mhla_blocks=0",), ConfigError, "model.mhla_blocks=0: must be at least 1"),
        (
            ("model.attention=linear",),
            ConfigError,
            "model.attention='linear': expected 'default' or 'mhla'",
        ),
        (("model.mhla_released=1",), ConfigError, "model.mhla_released=1: expected true or false"),
        (
            ("model.mhla_blocks=5",),
            InputError,
            "model.mhla_blocks=5: 8 x 8 tokens do not divide into so many equal blocks",
        ),
        (
            ("model=tiny-flux",),
            InputError,
            "tiny-flux is a FluxPipeline; only SanaPipeline has linear attention to replace",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(overrides, error, message):
    with pytest.raises(error, match=re.escape(message)) as raised:
        configured(*overrides)
    assert "\n" not in str(raised.value)
