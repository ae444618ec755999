"""AutoencoderKL against diffusers' own with random weights, outputs and gradients to 1e-5; its
tiled decoding.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL as TorchAutoencoderKL
from flax import nnx
from pretrain.encoders import AutoencoderKL
from pretrain.networks import to_torch

from solrl_jax.models.autoencoders.kl import AutoencoderKLConfig
from solrl_jax.models.autoencoders.tiling import decode_tiled
from solrl_jax.models.layers.conv import Conv, conv_upsampled
from solrl_jax.models.loading.weights import parameter_table
from tests import carried
from tests.cases import first_is_quick
from tests.parity import from_torch, parameter_count

# Compilation is most of the time here, and half of it LLVM's optimization of small kernels.
TOLERANCE = 1e-5  # largest difference over largest value

RELEASED = carried.config(carried.FLUX, "vae")  # SD3's differs in the two factors
SD1 = {  # the config.json of Stable Diffusion 1's vae, which leaves the rest to the defaults
    "_class_name": "AutoencoderKL",
    "act_fn": "silu",
    "block_out_channels": [128, 256, 512, 512],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "in_channels": 3,
    "latent_channels": 4,
    "layers_per_block": 2,
    "norm_num_groups": 32,
    "out_channels": 3,
    "sample_size": 512,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
}


def small(widths=(16, 32, 32), **other):
    """FLUX.1's config, narrower."""
    n = len(widths)
    types = {
        "down_block_types": ["DownEncoderBlock2D"] * n,
        "up_block_types": ["UpDecoderBlock2D"] * n,
    }
    return (
        RELEASED
        | types
        | {"block_out_channels": list(widths), "norm_num_groups": 8, "layers_per_block": 1}
        | other
    )


SMALL = {  # name: (config, height and width of the image, of the latent)
    "as released": (small((8, 16, 16, 16), layers_per_block=2), (27, 41), (3, 5)),
    "quantization convolutions": (
        small(latent_channels=4, use_quant_conv=True, use_post_quant_conv=True, norm_num_groups=4),
        (13, 22),
        (5, 3),
    ),
    "no attention": (
        small((32, 32), mid_block_add_attention=False, layers_per_block=2, latent_channels=6),
        (7, 10),
        (6, 5),
    ),
    "one stage": (
        small((24,), norm_num_groups=3, layers_per_block=3, latent_channels=5),
        (5, 8),
        (7, 4),
    ),
    "one group, narrowing": (
        small((32, 16, 48), norm_num_groups=1, use_quant_conv=True),
        (19, 14),
        (4, 7),
    ),
    "a group a channel, four colors": (
        small(
            (16, 16),
            norm_num_groups=16,
            in_channels=4,
            out_channels=2,
            use_post_quant_conv=True,
            latent_channels=3,
        ),
        (9, 6),
        (3, 8),
    ),
}


def torch_model(config, seed=0):
    """diffusers' model with no weight as it was initialized: norms and biases matter too."""
    torch.manual_seed(seed)
    model = TorchAutoencoderKL(**{k: v for k, v in config.items() if not k.startswith("_")}).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim > 1:
                p.normal_(0, p[0].numel() ** -0.5)
            else:
                p.normal_(1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.3)
            if "conv_in" in name:
                p.mul_(0.03)  # so little that the epsilon of the first norms matters
    return model


def from_reference(model, config):
    """Our model's graph and the reference's weights."""
    c = AutoencoderKLConfig.from_dict(config)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: AutoencoderKL(c, rngs=nnx.Rngs(0))))
    return graphdef, from_torch(state, {k: v.numpy() for k, v in model.state_dict().items()})


def decoder(config, seed=0):
    """(parameters, latent) -> image, and parameters: diffusers' random ones."""
    graphdef, params = from_reference(torch_model(config, seed), config)
    return lambda p, z: nnx.merge(graphdef, p).decode(z), params


def nchw(x):
    return torch.from_numpy(np.array(x)).permute(0, 3, 1, 2).contiguous()


def nhwc(x):
    return x.detach().float().permute(0, 2, 3, 1).numpy()


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def error(ours, reference):
    assert ours.shape == reference.shape
    return np.abs(np.asarray(ours, np.float32) - reference).max() / np.abs(reference).max()


def distance(x, reference):
    return np.linalg.norm(np.asarray(x, np.float32) - reference) / np.linalg.norm(reference)


@pytest.mark.slow
@pytest.mark.parametrize("name", first_is_quick(SMALL))
def test_encode_and_decode_and_their_gradients_equal_diffusers(name):
    config, pixels, size = SMALL[name]
    c = AutoencoderKLConfig.from_dict(config)
    down = [n // c.spatial_compression for n in pixels]
    image = normal(1, 2, *pixels, c.in_channels)
    latent = normal(2, 2, *size, c.latent_channels)
    weights = (
        normal(3, 2, 2, *down, c.latent_channels),
        normal(4, 2, *(n * c.spatial_compression for n in size), c.out_channels),
    )
    reference = torch_model(config)
    graphdef, params = from_reference(reference, config)

    @jax.jit
    def everything(p, image, latent):
        model = nnx.merge(graphdef, p)
        posterior, back_encode = jax.vjp(model.encode, image)
        decoded, back_decode = jax.vjp(model.decode, latent)
        of_image = back_encode(type(posterior)(*weights[0]))[0]
        return posterior.mean, posterior.logvar, decoded, of_image, back_decode(weights[1])[0]

    x = nchw(image).requires_grad_()
    z = nchw(latent).requires_grad_()
    posterior = reference.encode(x).latent_dist
    decoded = reference.decode(z).sample
    (posterior.mean * nchw(weights[0][0]) + posterior.logvar * nchw(weights[0][1])).sum().backward()
    (decoded * nchw(weights[1])).sum().backward()
    theirs = [nhwc(t) for t in (posterior.mean, posterior.logvar, decoded, x.grad, z.grad)]

    ours = everything(params, image, latent)
    for what, got, want in zip(
        ("mean", "logvar", "image", "d image", "d latent"), ours, theirs, strict=True
    ):
        assert error(want[0], want[1]) > 0.1, (
            f"{what}: nothing is compared, it hardly depends on the input"
        )
        assert error(got, want) < TOLERANCE, what


@pytest.mark.slow
def test_the_logarithm_of_the_variance_is_clamped_as_in_diffusers():
    config = small((8,), layers_per_block=1, latent_channels=2)
    reference = torch_model(config)
    with torch.no_grad():
        reference.encoder.conv_out.bias[2:] = torch.tensor([25.0, -40.0])
    graphdef, params = from_reference(reference, config)
    image = normal(0, 1, 4, 4, 3)
    got = jax.jit(lambda p, x: nnx.merge(graphdef, p).encode(x))(params, image)
    want = nhwc(reference.encode(nchw(image)).latent_dist.logvar)
    assert {want.min(), want.max()} == {-30.0, 20.0}
    np.testing.assert_array_equal(got.logvar, want)


@pytest.mark.exhaustive
def test_bfloat16_is_as_close_to_float32_as_pytorchs():
    config, _, _ = SMALL["as released"]
    config = config | {"block_out_channels": [16, 32, 32, 32]}
    reference = torch_model(config)
    graphdef, params = from_reference(reference, config)
    image = normal(1, 2, 64, 72, 3)
    latent = normal(2, 2, 8, 9, 16)
    with torch.no_grad():
        exact = nhwc(reference._encode(nchw(image))), nhwc(reference._decode(nchw(latent)).sample)
        reference.bfloat16()
        theirs = (
            nhwc(reference._encode(nchw(image).bfloat16())),
            nhwc(reference._decode(nchw(latent).bfloat16()).sample),
        )
    both = jax.jit(
        lambda p, x, z: (
            jnp.concatenate(nnx.merge(graphdef, p).encode(x), -1),
            nnx.merge(graphdef, p).decode(z),
        )
    )
    ours = both(*jax.tree.map(lambda a: jnp.asarray(a, jnp.bfloat16), (params, image, latent)))
    for got, reference_half, want in zip(ours, theirs, exact, strict=True):
        assert got.dtype == jnp.bfloat16
        assert distance(got, want) < 1.1 * distance(reference_half, want)


@pytest.mark.slow
def test_a_convolution_of_squares_is_that_of_repeated_pixels():
    """To the rounding of float32: sums of taps come first."""
    conv = Conv(5, 6, 3, rngs=nnx.Rngs(0))
    conv.bias.set_value(normal(3, 6))
    x = jnp.asarray(normal(4, 2, 7, 4, 5))
    want = conv(x.repeat(2, axis=1).repeat(2, axis=2))
    np.testing.assert_array_equal(conv.apply_upsampled(x), want)  # as it is computed here
    ours = conv_upsampled(x, conv.kernel.get_value()) + conv.bias.get_value()
    np.testing.assert_allclose(ours, want, rtol=0, atol=3e-6)
    assert conv_upsampled(x.astype(jnp.bfloat16), conv.kernel.get_value()).dtype == jnp.bfloat16


@pytest.mark.slow
def test_weights_go_out_as_they_came_in():
    config, _, _ = SMALL["quantization convolutions"]
    reference = torch_model(config)
    graphdef, params = from_reference(reference, config)
    back = to_torch(nnx.state(nnx.merge(graphdef, params)), params)
    want = reference.state_dict()
    assert back.keys() == want.keys()
    for name, tensor in want.items():
        np.testing.assert_array_equal(back[name], tensor.numpy())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "count", "decoder_count"),
    [(RELEASED, 83_819_683, 49_545_475), (SD1, 83_653_863, 49_490_179)],
)
def test_released_networks_have_the_released_tensors(fields, count, decoder_count):
    config = AutoencoderKLConfig.from_dict(fields)
    model = nnx.eval_shape(lambda: AutoencoderKL(config, rngs=nnx.Rngs(0)))
    state = nnx.state(model)
    assert parameter_count(state) == count
    assert parameter_count(nnx.state(model.decoder)) == decoder_count
    with torch.device("meta"):
        reference = TorchAutoencoderKL(**{k: v for k, v in fields.items() if not k.startswith("_")})
    expected = {name: tuple(t.shape) for name, t in reference.state_dict().items()}
    table = [(name, e.torch_shape) for e in parameter_table(state) for name in e.names]
    assert len(table) == len(expected)
    assert dict(table) == expected


@pytest.mark.slow
def test_released_network_keeps_shapes_and_dtypes():
    config = AutoencoderKLConfig.from_dict(RELEASED)
    assert (config.spatial_compression, config.scaling_factor, config.shift_factor) == (
        8,
        0.3611,
        0.1159,
    )
    graphdef, state = nnx.split(nnx.eval_shape(lambda: AutoencoderKL(config, rngs=nnx.Rngs(0))))
    image, latent = (
        jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((2, 1024, 768, 3), (2, 128, 96, 16))
    )

    def both(p, x, z):
        return (nnx.merge(graphdef, p).encode(x), nnx.merge(graphdef, p).decode(z))

    posterior, decoded = jax.eval_shape(both, state, image, latent)
    for out, expected in ((posterior.mean, latent), (posterior.logvar, latent), (decoded, image)):
        assert (out.shape, out.dtype) == (expected.shape, expected.dtype)


def test_config_fields_and_defaults_are_diffusers():
    theirs = {
        k: v
        for k, v in TorchAutoencoderKL(norm_num_groups=32).config.items()
        if not k.startswith("_")
    }
    assert dataclasses.asdict(AutoencoderKLConfig()) == theirs


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"latent_channel": 3},
            r"unknown config field\(s\) \['latent_channel'\]; known are .*'in_channels'",
        ),
        ({"act_fn": "mish"}, "act_fn='mish'.*accepted: 'silu'"),
        (
            {"down_block_types": ["DownEncoderBlock2D"] * 3 + ["AttnDownEncoderBlock2D"]},
            "down_block_types=.*'AttnDown.*accepted: 'DownEnc",
        ),
        (
            {"up_block_types": ["AttnUpDecoderBlock2D"] * 4},
            "up_block_types=.*'AttnUp.*accepted: 'UpDecoderBlock2D'",
        ),
        (
            {"up_block_types": ["UpDecoderBlock2D"] * 3},
            "up_block_types.*a list of 4, one for each of block_out_channels",
        ),
        ({"down_block_types": "DownEncoderBlock2D"}, "down_block_types.*a list of strings"),
        (
            {"block_out_channels": [128, 256, 512, 500]},
            "block_out_channels.*multiples of norm_num_groups=32",
        ),
        (
            {"block_out_channels": [128, 256, 512, 0]},
            "block_out_channels.*positive multiples of norm_num_groups=32",
        ),
        ({"block_out_channels": []}, "block_out_channels.*multiples of norm_num_groups=32"),
        ({"latents_mean": [0.0] * 16}, "latents_mean.*accepted: None"),
        ({"layers_per_block": 0}, "layers_per_block=0.*a positive integer"),
        ({"latent_channels": 16.0}, "latent_channels=16.0.*a positive integer"),
        ({"use_quant_conv": "no"}, "use_quant_conv='no'.*True, False"),
        ({"scaling_factor": None}, "scaling_factor=None.*a number"),
        ({"shift_factor": "0"}, "shift_factor='0'.*a number or None"),
    ],
)
def test_bad_configs_are_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        AutoencoderKLConfig.from_dict(RELEASED | change)


def test_an_image_without_one_whole_latent_is_refused():
    config = AutoencoderKLConfig.from_dict(small())
    model = nnx.eval_shape(lambda: AutoencoderKL(config, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"\(8, 3\) pixels: need 4 or more"):
        model.encode(jnp.zeros((1, 8, 3, 3)))


def nearest(latent):
    """A decoder whose every pixel depends on one latent pixel."""
    return latent.repeat(4, axis=1).repeat(4, axis=2) ** 3


@pytest.mark.parametrize(
    ("size", "tile", "overlap"),
    [
        ((16, 16), 8, 0),
        ((17, 9), 8, 2),
        ((23, 31), 8, 3),
        ((12, 5), 6, 5),
        ((7, 30), 7, 1),
        ((5, 6), 8, 4),
        ((9, 10), 4, 3),
    ],
)
def test_tiles_of_a_pointwise_decoder_make_exactly_the_whole(size, tile, overlap):
    latent = normal(0, 2, *size, 3)
    tiled = jax.jit(partial(decode_tiled, nearest, tile=tile, overlap=overlap, compression=4))(
        latent
    )
    np.testing.assert_array_equal(tiled, jax.jit(nearest)(latent))


def test_neighbors_fade_into_each_other_linearly_and_bilinearly_at_corners():
    # a decoder that paints a tile in its own first number: 0, 1, 2 or 3
    def paint(latent):
        return jnp.broadcast_to(latent[:, :1, :1], latent.shape).repeat(2, axis=1).repeat(2, axis=2)

    latent = np.zeros((1, 6, 6, 1), np.float32)
    latent[0, 0, 2, 0] = 1
    latent[0, 2, 0, 0] = 2
    latent[0, 2, 2, 0] = 3
    tiled = jax.jit(partial(decode_tiled, paint, tile=4, overlap=2, compression=2))(latent)[
        0, :, :, 0
    ]
    fade = np.clip((np.arange(12) - 3.5) / 4, 0, 1)  # pixels 4 to 7 belong to both
    np.testing.assert_allclose(tiled, fade[None, :] + 2 * fade[:, None], atol=1e-6)


@pytest.mark.exhaustive
def test_pixels_far_from_the_borders_of_tiles_are_those_of_the_whole():
    kernel = normal(0, 5, 5, 2, 3)

    def decode(z):
        return jax.lax.conv_general_dilated(
            nearest(z), kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    latent = normal(1, 1, 20, 14, 2)
    tiled = jax.jit(partial(decode_tiled, decode, tile=8, overlap=2, compression=4))(latent)
    whole = np.asarray(jax.jit(decode)(latent))
    assert tiled.shape == whole.shape

    # tiles begin at latent rows 0, 6, 12 and columns 0, 6, and end 8 further on: what two share is
    # blended, the rest is not
    def alone(pixels, tiles):
        return [p for p in range(pixels) if not any(0 <= p - 24 * i < 8 for i in range(1, tiles))]

    inside = np.ix_([0], alone(80, 3), alone(56, 2))
    assert error(np.asarray(tiled)[inside], whole[inside]) < 1e-6
    assert error(tiled, whole) > 0.01  # while a tile's border sees zeros where the whole goes on


@pytest.mark.slow
def test_tiled_decoding_is_close_for_the_real_decoder_when_tiles_share_enough():
    decode, params = decoder(small((16, 16), norm_num_groups=2))
    latent = normal(0, 1, 32, 32, 16)

    @jax.jit
    def run(p, latent):
        def tiled(tile, overlap):
            return decode_tiled(partial(decode, p), latent, tile, overlap, 2)

        return decode(p, latent), tiled(16, 0), tiled(24, 16)

    whole, apart, shared = (np.asarray(x) for x in run(params, latent))
    assert (
        distance(shared, whole) < 0.04
    )  # not zero: the norms and the attention of a tile see only the tile
    seam = np.s_[:, 30:34]  # where the tiles that share nothing meet
    assert distance(shared[seam], whole[seam]) < 0.1 * distance(apart[seam], whole[seam])


@pytest.mark.exhaustive
def test_tiled_decoding_needs_the_memory_of_one_tile():
    decode, params = decoder(small((8, 16, 16), mid_block_add_attention=False))
    latent = jax.ShapeDtypeStruct((1, 64, 64, 16), jnp.float32)

    def temporary(f):
        return jax.jit(f).lower(params, latent).compile().memory_analysis().temp_size_in_bytes

    tiled = temporary(lambda p, z: decode_tiled(partial(decode, p), z, 16, 4, 4))
    assert tiled < temporary(decode) / 4


def test_tiled_decoding_keeps_the_dtype():
    out = jax.eval_shape(
        partial(decode_tiled, nearest, tile=4, overlap=1, compression=4),
        jnp.zeros((2, 9, 6, 3), jnp.bfloat16),
    )
    assert (out.shape, out.dtype) == ((2, 36, 24, 3), jnp.bfloat16)
