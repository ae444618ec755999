"""AutoencoderDC against diffusers' own, in float32, with random weights; and the shape of the
released SANA autoencoder.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import AutoencoderDC as TorchAutoencoderDC
from flax import nnx
from pretrain.encoders import AutoencoderDC

from solrl_jax.models.autoencoders.dc import AutoencoderDCConfig, relu_attention
from solrl_jax.models.layers.pixel_shuffle import depth_to_space, space_to_depth
from solrl_jax.models.loading.weights import parameter_table
from tests import carried
from tests.cases import first_is_quick
from tests.parity import from_torch, parameter_count

# Compilation is most of the time here, and half of it LLVM's optimization of small kernels.

RELEASED = carried.config(carried.SANA, "vae")


def small(
    widths=(8, 16, 16),
    layers=(1, 1, 2),
    scales=((), (), (5,)),
    types=("ResBlock", "ResBlock", "EfficientViTBlock"),
    **other,
):
    """A config with the same stages on both sides, unless `other` says more."""
    sides = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in [
            ("block_out_channels", widths),
            ("layers_per_block", layers),
            ("qkv_multiscales", scales),
            ("block_types", types),
        ]
    }
    return {"latent_channels": 4, "attention_head_dim": 8} | sides | other


VIT = "EfficientViTBlock"
SMALL = {  # name: (config, latent height and width)
    "as released": (small(downsample_block_type="Conv", upsample_block_type="interpolate"), (3, 5)),
    "defaults": (small(), (5, 3)),
    "few tokens": (
        small(layers=(1, 2, 1), types=("ResBlock", VIT, VIT), scales=((), (), (5,))),
        (2, 3),
    ),
    "no outer shortcuts": (
        small(
            encoder_out_shortcut=False,
            decoder_in_shortcut=False,
            downsample_block_type="Conv",
            scales=((),) * 3,
        ),
        (3, 4),
    ),
    "activations": (
        small(
            decoder_act_fns=("relu", "silu", "silu"),
            decoder_norm_types=("rms_norm",) * 3,
            decoder_conv_act_fn="silu",
            upsample_block_type="interpolate",
        ),
        (4, 3),
    ),
    "two scales, heads narrower than the width": (
        small(widths=(8, 16), attention_head_dim=6, types=VIT, layers=(1, 1), scales=((), (3, 5))),
        (2, 5),
    ),
    "sides differ": (
        small(
            widths=(8, 8, 32, 32),
            layers=(1, 2, 1, 1),
            scales=((), (), (5,), ()),
            types=("ResBlock", "ResBlock", VIT, VIT),
            decoder_block_out_channels=(8, 16, 32, 16),
            decoder_layers_per_block=(2, 1, 1, 2),
            decoder_block_types="ResBlock",
            decoder_act_fns="relu",
            latent_channels=8,
        ),
        (3, 2),
    ),
}


def torch_model(config, seed=0):
    """diffusers' model with no weight as it was initialized: norms and biases matter too."""
    torch.manual_seed(seed)
    model = TorchAutoencoderDC(**{k: v for k, v in config.items() if not k.startswith("_")}).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim > 1:
                p.normal_(0, p[0].numel() ** -0.5)
            else:
                p.normal_(1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.3)
    return model


def from_reference(model, config):
    """Our model's graph and the reference's weights."""
    c = AutoencoderDCConfig.from_dict(config)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: AutoencoderDC(c, rngs=nnx.Rngs(0))))
    return graphdef, from_torch(state, {k: v.numpy() for k, v in model.state_dict().items()})


def nchw(x):
    return torch.from_numpy(np.array(x)).permute(0, 3, 1, 2).contiguous()


def nhwc(x):
    return x.detach().permute(0, 2, 3, 1).numpy()


def error(ours, reference):
    assert ours.shape == reference.shape
    return np.abs(np.asarray(ours, np.float32) - reference).max() / np.abs(reference).max()


def inputs(config, size, seed=0):
    rng = np.random.default_rng(seed)
    c = AutoencoderDCConfig.from_dict(config)
    pixels = [s * c.spatial_compression for s in size]
    x = rng.normal(size=(2, *pixels, 3))
    z = rng.normal(size=(2, *size, c.latent_channels))
    return x.astype(np.float32), z.astype(np.float32)


@pytest.mark.parametrize("name", first_is_quick(SMALL))
def test_encode_and_decode_agree_with_diffusers(name):
    config, size = SMALL[name]
    reference = torch_model(config)
    graphdef, params = from_reference(reference, config)
    x, z = inputs(config, size)
    both = jax.jit(
        lambda p, x, z: (nnx.merge(graphdef, p).encode(x), nnx.merge(graphdef, p).decode(z))
    )
    encoded, decoded = both(params, x, z)
    with torch.no_grad():
        latents = nhwc(reference._encode(nchw(x)))
        images = nhwc(reference._decode(nchw(z)))
    assert error(encoded, latents) < 1e-5
    assert error(decoded, images) < 1e-5
    for expected in (latents, images):
        assert error(expected[0], expected[1]) > 0.1, (
            "nothing was compared: the output hardly depends on the input"
        )


@pytest.mark.exhaustive
def test_gradient_with_respect_to_the_input_agrees_with_diffusers():
    # linear, quadratic
    config = small(layers=(1, 1, 1), types=("ResBlock", VIT, VIT), scales=((), (), (5,)))
    size = (2, 3)
    reference = torch_model(config, seed=1)
    graphdef, params = from_reference(reference, config)
    x, z = inputs(config, size, seed=1)

    @jax.jit
    def gradients(p, x, z):
        model = nnx.merge(graphdef, p)
        return jax.grad(lambda z: (model.decode(z) * x).sum())(z), jax.grad(
            lambda x: (model.encode(x) * z).sum()
        )(x)

    of_z, of_x = gradients(params, x, z)
    for ours, theirs, value, weight in (
        (of_z, reference._decode, z, x),
        (of_x, reference._encode, x, z),
    ):
        leaf = nchw(value).requires_grad_()
        (theirs(leaf) * nchw(weight)).sum().backward()
        assert error(ours, nhwc(leaf.grad)) < 1e-5


@pytest.mark.exhaustive
def test_bfloat16_stays_bfloat16_and_close():
    config, size = SMALL["few tokens"]
    graphdef, params = from_reference(torch_model(config), config)
    decode = jax.jit(lambda p, z: nnx.merge(graphdef, p).decode(z))
    z = inputs(config, size)[1]
    half = decode(
        jax.tree.map(lambda p: jnp.asarray(p, jnp.bfloat16), params), z.astype(jnp.bfloat16)
    )
    assert half.dtype == jnp.bfloat16
    expected = decode(params, z)
    assert np.linalg.norm(half.astype(jnp.float32) - expected) < 0.03 * np.linalg.norm(expected)


@pytest.mark.parametrize(("tokens", "linear"), [(7, False), (8, False), (9, True)])
def test_attention_is_linear_only_beyond_as_many_tokens_as_features(tokens, linear):
    q, k, v = np.random.default_rng(tokens).normal(size=(3, 2, tokens, 3, 8)).astype(np.float32)
    assert (
        "HIGHEST" in str(jax.make_jaxpr(relu_attention)(q, k, v))
    ) == linear  # only the linear way asks for a precision
    scores = np.einsum("bngd,bmgd->bgnm", np.maximum(q, 0), np.maximum(k, 0))
    expected = np.einsum("bgnm,bmgd->bngd", scores / (scores.sum(-1, keepdims=True) + 1e-15), v)
    np.testing.assert_allclose(jax.jit(relu_attention)(q, k, v), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.exhaustive
def test_linear_attention_sums_in_float32():
    # 4096 ones: a sum held in bfloat16 would stop at 256.
    q = k = jnp.ones((1, 4096, 1, 8), jnp.bfloat16)
    v = jnp.broadcast_to(jnp.arange(8, dtype=jnp.bfloat16), q.shape)
    out = jax.jit(relu_attention)(q, k, v)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(out, np.float32), np.asarray(v, np.float32))


def test_space_to_depth_is_torchs_pixel_unshuffle_and_depth_to_space_its_inverse():
    x = np.random.default_rng(0).normal(size=(2, 4, 6, 5)).astype(np.float32)
    packed = space_to_depth(jnp.asarray(x))
    np.testing.assert_array_equal(packed, nhwc(torch.nn.functional.pixel_unshuffle(nchw(x), 2)))
    np.testing.assert_array_equal(depth_to_space(packed), x)


@pytest.fixture(scope="module")
def released():
    config = AutoencoderDCConfig.from_dict(RELEASED)
    return nnx.eval_shape(lambda: AutoencoderDC(config, rngs=nnx.Rngs(0)))


def test_released_network_has_the_released_tensors(released):
    state = nnx.state(released)
    assert parameter_count(state) == 312_250_275
    assert parameter_count(nnx.state(released.decoder)) == 159_223_171
    with torch.device("meta"):
        reference = TorchAutoencoderDC(
            **{k: v for k, v in RELEASED.items() if not k.startswith("_")}
        )
    expected = {name: tuple(t.shape) for name, t in reference.state_dict().items()}
    assert {name: e.torch_shape for e in parameter_table(state) for name in e.names} == expected
    assert (released.config.spatial_compression, released.config.scaling_factor) == (32, 0.41407)


@pytest.mark.slow
def test_released_network_keeps_shapes_and_dtypes(released):
    graphdef, state = nnx.split(released)
    image, latent = (
        jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((2, 1024, 768, 3), (2, 32, 24, 32))
    )

    def both(p, x, z):
        return (nnx.merge(graphdef, p).encode(x), nnx.merge(graphdef, p).decode(z))

    for out, expected in zip(
        jax.eval_shape(both, state, image, latent), (latent, image), strict=True
    ):
        assert (out.shape, out.dtype) == (expected.shape, expected.dtype)


def test_config_defaults_are_diffusers_and_a_string_stands_for_every_stage():
    ours = dataclasses.asdict(AutoencoderDCConfig())
    theirs = {
        k: v
        for k, v in TorchAutoencoderDC(**small()).config.items()
        if k in ours and k not in small()
    }
    stages = ("decoder_norm_types", "decoder_act_fns")
    assert theirs == {k: ours[k][0] if k in stages else ours[k] for k in theirs}
    assert set(ours) == set(theirs) | set(small())
    assert ours["encoder_block_types"] == ("ResBlock",) * 6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"encoder_depth": 3},
            r"unknown config field\(s\) \['encoder_depth'\]; known are .*'in_channels'",
        ),
        (
            {"encoder_block_types": "ConvNeXt"},
            "encoder_block_types=.*'ConvNeXt'.*'ResBlock', 'EfficientViTBlock'",
        ),
        (
            {"decoder_block_types": ["ResBlock"] * 5 + ["ViT"]},
            "decoder_block_types=.*'ViT'.*'ResBlock', 'EfficientViTBlock'",
        ),
        (
            {"downsample_block_type": "avg"},
            "downsample_block_type='avg'.*'Conv', 'pixel_unshuffle'",
        ),
        (
            {"upsample_block_type": "nearest"},
            "upsample_block_type='nearest'.*'interpolate', 'pixel_shuffle'",
        ),
        (
            {"decoder_norm_types": "batch_norm"},
            "decoder_norm_types=.*'batch_norm'.*accepted: 'rms_norm'",
        ),
        ({"decoder_act_fns": ["silu"] * 5 + ["mish"]}, "decoder_act_fns=.*'mish'.*'silu', 'relu'"),
        ({"decoder_conv_act_fn": "gelu"}, "decoder_conv_act_fn='gelu'.*'silu', 'relu'"),
        ({"decoder_act_fns": ["silu"] * 3}, "decoder_act_fns.*a list of 6"),
        ({"decoder_layers_per_block": [3, 3]}, "decoder_layers_per_block.*a list of 6"),
        (
            {"decoder_layers_per_block": 3},
            "decoder_layers_per_block=3.*a list of integers",
        ),
        (
            {"encoder_layers_per_block": [0, 2, 2, 2, 2, 2]},
            "encoder_layers_per_block.*one layer or more",
        ),
        ({"encoder_qkv_multiscales": [[], [], [], [4], [5], [5]]}, "encoder_qkv_multiscales.*odd"),
        (
            {"encoder_block_out_channels": [128, 256, 512, 512, 1024, 1000]},
            "encoder_block_out_channels.*divide 4 times",
        ),
        (
            {"decoder_block_out_channels": [128, 256, 512, 512, 1024, 0]},
            "decoder_block_out_channels.*positive multiples of 4",
        ),
        ({"latent_channels": 48}, "block_out_channels.*multiple of latent_channels"),
    ],
)
def test_bad_configs_are_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        AutoencoderDCConfig.from_dict(RELEASED | change)


def test_an_image_that_does_not_divide_is_refused():
    config = AutoencoderDCConfig.from_dict(small())
    model = nnx.eval_shape(lambda: AutoencoderDC(config, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"\(8, 10\).*multiples of 4"):
        model.encode(jnp.zeros((1, 8, 10, 3)))
