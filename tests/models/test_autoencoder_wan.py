"""The autoencoder of Wan, and that of Qwen-Image, which is the same network for one frame, against
diffusers, which decodes frame by frame; outputs and gradients to 1e-5. The encoder of clips that
`scripts/pretrain` trains, to the same tolerance.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from pretrain import encoders
from pretrain.networks import to_torch

from solrl_jax.models.autoencoders import wan
from solrl_jax.models.loading.weights import parameter_table
from solrl_jax.models.qwen_image import autoencoder as qwen_image
from tests import carried
from tests.cases import first_is_quick
from tests.parity import from_torch, parameter_count, relative
from tests.pipelines import QWEN_IMAGE_VAE, WAN22_VAE, WAN_VAE

TOLERANCE = 1e-5


class Port(NamedTuple):
    """An autoencoder here and in diffusers."""

    network: type
    config: type
    open_autoencoder: Callable
    reference: type
    fields: dict  # a small configuration
    temporal: bool  # whether it decodes clips


WAN = Port(
    wan.AutoencoderKLWan,
    wan.AutoencoderKLWanConfig,
    wan.open_autoencoder,
    diffusers.AutoencoderKLWan,
    WAN_VAE,
    temporal=True,
)
QWEN_IMAGE = Port(
    qwen_image.AutoencoderKLQwenImage,
    qwen_image.AutoencoderKLQwenImageConfig,
    qwen_image.open_autoencoder,
    diffusers.AutoencoderKLQwenImage,
    QWEN_IMAGE_VAE,
    temporal=False,
)
both = pytest.mark.parametrize("port", [WAN, QWEN_IMAGE], ids=["wan", "qwen-image"])
WAN_CASES = {  # name: (changes to the config; frames, height and width of the latent)
    "two temporal upsamplings": ({}, (4, 2, 3)),
    "one frame": ({}, (1, 3, 2)),
    "as released": (
        {
            "base_dim": 6,
            "dim_mult": [1, 2, 4, 4],
            "num_res_blocks": 2,
            "temperal_downsample": [False, True, True],
            "scale_factor_spatial": 8,
        },
        (3, 2, 3),
    ),
    "wide, over three axes": (  # more channels than `wan.NARROW`
        {"base_dim": 72, "dim_mult": [1, 1, 1]},
        (2, 1, 2),
    ),
    "another decoder": (
        {
            "decoder_base_dim": 4,
            "temperal_downsample": [True, False],
            "scale_factor_temporal": 2,
        },
        (2, 1, 2),
    ),
}
WAN22_CASES = {
    "wan 2.2": (WAN22_VAE, (3, 3, 2)),
    "wan 2.2, one frame": (WAN22_VAE, (1, 1, 3)),
    "wan 2.2, as released": (
        WAN22_VAE
        | {
            "base_dim": 5,
            "decoder_base_dim": 8,
            "dim_mult": [1, 2, 4, 4],
            "num_res_blocks": 2,
            "temperal_downsample": [False, True, True],
            "scale_factor_spatial": 16,
        },
        (3, 1, 2),
    ),
}
ENCODED = {  # the same for the encoder: frames, height and width of the clip
    "two temporal downsamplings": ({}, (9, 12, 8)),
    "one": ({"temperal_downsample": [False, True], "scale_factor_temporal": 2}, (5, 8, 8)),
}
QWEN_IMAGE_CASES = {  # the same without frames
    "two resolutions": ({}, (3, 4)),
    "one resolution": ({"dim_mult": [2], "temperal_downsample": []}, (5, 2)),
}


def torch_model(port, fields, seed=0):
    """diffusers' model with no weight as it was initialized."""
    torch.manual_seed(seed)
    model = port.reference(**fields).eval().requires_grad_(False)
    for name, p in model.named_parameters():
        if name.endswith("gamma"):
            p.normal_(1.0, 0.3)
        elif p.ndim > 1:
            p.normal_(0, p[0].numel() ** -0.5)
        else:
            p.normal_(0, 0.3)
    return model


def decoded_tensors(port, model):
    """Those that decoding reads."""
    return {
        name: t
        for name, t in model.state_dict().items()
        if not name.startswith(("encoder.", "quant_conv."))
        and (port.temporal or "time_conv" not in name)
    }


def their_decode(port, model, latent):
    """Of latents with the channels last, on the scale of the autoencoder."""
    z = latent if port.temporal else latent[:, None]
    decoded = model.decode(z.movedim(-1, 1)).sample.movedim(1, -1)
    return decoded if port.temporal else decoded[:, 0]


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def split(port, config):
    return nnx.split(nnx.eval_shape(lambda: port.network(config, rngs=nnx.Rngs(0))))


def check_decode_and_its_gradient(port, changes, size):
    fields = port.fields | changes
    reference = torch_model(port, fields)
    config = port.config.from_dict(fields)
    graphdef, state = split(port, config)
    tensors = {name: t.numpy() for name, t in decoded_tensors(port, reference).items()}
    params = from_torch(state, tensors)
    latent = normal(2, 2, *size, config.z_dim)
    frames = [(count - 1) * config.temporal_compression + 1 for count in size[:-2]]
    weights = normal(4, 2, *frames, *(n * config.spatial_compression for n in size[-2:]), 3)

    @jax.jit
    def everything(params, latent):
        def decode(latent):
            decoded = nnx.merge(graphdef, params).decode(config.unscale(latent))
            return jnp.clip(decoded, -1, 1)  # as diffusers

        decoded, back = jax.vjp(decode, latent)
        return decoded, back(weights)[0]

    z = torch.from_numpy(latent).requires_grad_()
    std, mean = (torch.tensor(getattr(reference.config, f"latents_{x}")) for x in ("std", "mean"))
    decoded = their_decode(port, reference, z * std + mean)
    (decoded * torch.from_numpy(weights)).sum().backward()
    expected = (decoded.detach().numpy(), z.grad.numpy())
    for what, got, want in zip(
        ("images", "d latent"), everything(params, latent), expected, strict=True
    ):
        print(f"{what} {relative(got, want):.1e}")
        assert got.shape == want.shape
        assert relative(want[0], want[1]) > 0.1, f"{what}: hardly depends on the input"
        assert relative(got, want) < TOLERANCE, what

    back = to_torch(state, params)
    assert back.keys() == tensors.keys()
    for key, tensor in tensors.items():
        np.testing.assert_array_equal(back[key], tensor, err_msg=key)


@pytest.mark.slow
@pytest.mark.parametrize("name", first_is_quick(WAN_CASES) + first_is_quick(WAN22_CASES))
def test_decode_of_clips_and_its_gradient_equal_diffusers(name):
    check_decode_and_its_gradient(WAN, *(WAN_CASES | WAN22_CASES)[name])


CHUNKS = {  # name: (changes to the config; frames, height and width; latent frames in a chunk)
    "wan 2.2, fewer in a chunk than allowed": (WAN22_VAE, (5, 2, 1), 3),
    "one by one": (WAN_VAE, (3, 2, 3), 1),
    "all after the first": (WAN_VAE, (4, 2, 2), 9),
    "one frame": (WAN_VAE, (1, 2, 2), 2),
    "over three axes": (WAN_CASES["wide, over three axes"][0], (3, 1, 2), 1),
    "wan 2.2, one by one": (WAN22_VAE, (3, 2, 1), 1),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CHUNKS)
def test_clips_are_decoded_in_chunks_as_they_are_whole(name):
    """Also their gradients, to 1e-5 of the largest value."""
    changes, size, chunk = CHUNKS[name]
    fields = WAN_VAE | changes
    config = WAN.config.from_dict(fields)
    graphdef, state = split(WAN, config)
    tensors = decoded_tensors(WAN, torch_model(WAN, fields))
    params = from_torch(state, {name: t.numpy() for name, t in tensors.items()})
    latent = jnp.asarray(normal(2, 2, *size, config.z_dim))

    @partial(jax.jit, static_argnums=2)
    def everything(params, latent, chunk):
        def decode(latent):
            network = nnx.merge(graphdef, params)
            return network.decode_in_chunks(latent, chunk) if chunk else network.decode(latent)

        decoded, back = jax.vjp(decode, latent)
        return decoded, back(jnp.sin(decoded))[0]

    whole = everything(params, latent, None)
    for got, want in zip(everything(params, latent, chunk), whole, strict=True):
        print(f"{name}: {relative(got, want):.1e}")
        assert got.shape == want.shape
        assert relative(got, want) < TOLERANCE
    if size[0] > 1:  # the last frame depends on latent frames before its own
        others = everything(params, latent.at[:, -2].add(1.0), None)[0]
        assert relative(others[:, -1], whole[0][:, -1]) > 1e-2


def lowered_decoding(frames, chunk, *, gradient=False):
    """The program that decodes a clip of latent frames in chunks (None: at once), not compiled."""
    config = WAN.config.from_dict(WAN_VAE | {"base_dim": 16})
    graphdef, state = split(WAN, config)

    def decode(params, latent):
        network = nnx.merge(graphdef, params)
        return network.decode_in_chunks(latent, chunk) if chunk else network.decode(latent)

    def slope(params, latent):
        return jax.grad(lambda latent: (decode(params, latent) ** 2).mean())(latent)

    latent = jax.ShapeDtypeStruct((1, frames, 8, 8, config.z_dim), jnp.float32)
    return jax.jit(slope if gradient else decode).lower(state, latent)


def test_more_chunks_add_no_convolutions():
    few, many = (lowered_decoding(frames, 1).as_text() for frames in (9, 17))
    assert few.count("stablehlo.convolution") == many.count("stablehlo.convolution") > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("gradient", [False, True])
def test_chunks_save_memory(gradient):
    """Compiled, not run."""
    chunked, whole = (
        lowered_decoding(17, chunk, gradient=gradient).compile().memory_analysis()
        for chunk in (1, None)
    )
    print(f"{whole.temp_size_in_bytes / 1e6:.1f} and {chunked.temp_size_in_bytes / 1e6:.1f} MB")
    assert chunked.temp_size_in_bytes < 0.5 * whole.temp_size_in_bytes


@pytest.mark.slow
@pytest.mark.parametrize("name", first_is_quick(QWEN_IMAGE_CASES))
def test_decode_of_images_and_its_gradient_equal_diffusers(name):
    check_decode_and_its_gradient(QWEN_IMAGE, *QWEN_IMAGE_CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", first_is_quick(ENCODED))
def test_encode_of_clips_equals_diffusers(name):
    """With all parameters of diffusers' autoencoder."""
    changes, size = ENCODED[name]
    fields = WAN_VAE | changes
    reference = torch_model(WAN, fields)
    port = WAN._replace(network=encoders.AutoencoderKLWan)
    graphdef, state = split(port, port.config.from_dict(fields))
    params = from_torch(state, {k: v.numpy() for k, v in reference.state_dict().items()})
    clips = normal(3, 2, *size, 3)
    posterior = jax.jit(lambda p, x: nnx.merge(graphdef, p).encode(x))(params, clips)
    with torch.no_grad():
        theirs = reference.encode(torch.from_numpy(clips).movedim(-1, 1)).latent_dist
    for got, want in ((posterior.mean, theirs.mean), (posterior.logvar, theirs.logvar)):
        want = want.movedim(1, -1).numpy()
        assert got.shape == want.shape
        assert np.ptp(want, axis=1).max() > 0.1, "hardly depends on the frame"
        assert relative(got, want) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [wan.KERNEL, wan.TIME])
def test_a_narrow_convolution_equals_one_over_three_axes(kernel):
    conv = wan.CausalConv(5, 7, kernel, rngs=nnx.Rngs(0))
    conv.bias.set_value(jnp.asarray(normal(1, 7)))
    clips = jnp.asarray(normal(0, 2, 4, 6, 5, 5))
    time, *sides = kernel

    @jax.jit
    def over_three_axes(x, weight, bias):
        return bias + jax.lax.conv_general_dilated(
            x,
            weight,
            window_strides=(1, 1, 1),
            padding=[(time - 1, 0), *((side // 2, side // 2) for side in sides)],
            dimension_numbers=("NDHWC", "DHWIO", "NDHWC"),
            precision=jax.lax.Precision.HIGHEST,
        )

    want = over_three_axes(clips, conv.kernel.get_value(), conv.bias.get_value())
    assert relative(conv(clips), want) < 1e-6
    # Frames are not interchangeable: the convolution is causal.
    np.testing.assert_array_equal(conv(clips)[:, :2], conv(clips[:, :2]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "port",
    [WAN, WAN._replace(fields=WAN22_VAE), QWEN_IMAGE],
    ids=["wan", "wan 2.2", "qwen-image"],
)
def test_files_of_diffusers_load(port, tmp_path):
    """They have an encoder and, for images too, temporal convolutions, which are passed over."""
    reference = torch_model(port, port.fields)
    reference.save_pretrained(tmp_path)
    component = port.open_autoencoder(tmp_path, port.config.read(tmp_path))
    latent = normal(0, 1, *((2, 1, 2) if port.temporal else (3, 2)), 4)
    decode = jax.jit(lambda p, z: jnp.clip(component(p).decode(z), -1, 1))
    got = decode(component.load(jnp.float32), latent)
    want = their_decode(port, reference, torch.from_numpy(latent))
    assert relative(got, want) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("port", "repository", "defaults", "size", "decoded_size"),
    [  # the defaults of a configuration are those of Wan 2.1 and of Qwen-Image
        (WAN, carried.WAN, True, (21, 60, 104), (81, 480, 832)),
        (WAN, carried.WAN22, False, (31, 44, 80), (121, 704, 1280)),
        (QWEN_IMAGE, carried.QWEN_IMAGE, True, (64, 48), (512, 384)),
    ],
    ids=["wan", "wan 2.2", "qwen-image"],
)
def test_the_released_network_has_the_released_tensors_and_keeps_shapes(
    port, repository, defaults, size, decoded_size
):
    fields = carried.config(repository, "vae")
    config = port.config.from_dict(fields)
    assert (config == port.config()) == defaults
    graphdef, state = split(port, config)
    with torch.device("meta"):
        reference = port.reference.from_config(fields)
    tensors = decoded_tensors(port, reference)
    expected = {name: tuple(t.shape) for name, t in tensors.items()}
    assert {name: e.torch_shape for e in parameter_table(state) for name in e.names} == expected
    assert parameter_count(state) == sum(t.numel() for t in tensors.values())
    latent = jax.ShapeDtypeStruct((2, *size, config.z_dim), jnp.bfloat16)
    decoded = jax.eval_shape(lambda p, z: nnx.merge(graphdef, p).decode(z), state, latent)
    assert (decoded.shape, decoded.dtype) == ((2, *decoded_size, 3), jnp.bfloat16)


@both
def test_config_fields_and_defaults_are_diffusers(port):
    theirs = {k: v for k, v in port.reference().config.items() if not k.startswith("_")}
    ours = dataclasses.asdict(port.config())
    assert {k: list(v) if isinstance(v, tuple) else v for k, v in ours.items()} == theirs


@pytest.mark.parametrize(
    ("port", "change", "message"),
    [
        (WAN, {"scaling_factor": 0.4}, r"unknown config field\(s\) \['scaling_factor'\]"),
        (WAN, {"out_channels": 12}, "out_channels=12; accepted: 3, which follows from patch_size"),
        (WAN, {"patch_size": 2}, "out_channels=3; accepted: 12, which follows from patch_size"),
        (
            WAN,
            {"is_residual": True, "dim_mult": [1, 2, 3]},
            "dim_mult=.*accepted: with is_residual, each entry from the third on divides 4 times",
        ),
        (WAN, {"scale_factor_temporal": 2}, "scale_factor_temporal=2; accepted: 4, which follows"),
        (WAN, {"scale_factor_spatial": 16}, "scale_factor_spatial=16; accepted: 4, which follows"),
        (
            WAN,
            {"decoder_base_dim": 3, "dim_mult": [1, 1, 2]},
            "dim_mult=.*are even after the first",
        ),
        (QWEN_IMAGE, {"base_dim": 3, "dim_mult": [1, 1]}, "dim_mult=.*are even after the first"),
        (QWEN_IMAGE, {"temperal_downsample": [True, False]}, "temperal_downsample=.*a list of 1"),
        (QWEN_IMAGE, {"input_channels": 4}, "input_channels=4; accepted: 3"),
        (
            QWEN_IMAGE,
            {"latents_mean": [0.0]},
            r"latents_mean=\(0.0,\); accepted: a list of z_dim=4",
        ),
        (
            QWEN_IMAGE,
            {"latents_std": [1.0, 0.0, 1.0, 1.0]},
            "latents_std=.*accepted: positive numbers",
        ),
        (QWEN_IMAGE, {"latents_std": ["x"]}, "latents_std=.*accepted: a list of numbers"),
    ],
)
def test_bad_configs_are_refused_by_name(port, change, message):
    with pytest.raises(ValueError, match=message):
        port.config.from_dict(port.fields | change)
