"""`AutoencoderKLWan` against diffusers, which decodes frame by frame; outputs and gradients to
1e-5. Qwen-Image's autoencoder, the same network for one frame, has its own tests.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan as TorchAutoencoder
from flax import nnx
from pretrain.networks import to_torch

from solrl_jax.models.autoencoders.wan import (
    AutoencoderKLWan,
    AutoencoderKLWanConfig,
    open_autoencoder,
)
from solrl_jax.models.loading.weights import parameter_table
from tests.cases import first_is_quick
from tests.parity import from_torch, parameter_count, relative
from tests.pipelines import WAN_VAE

TOLERANCE = 1e-5
CASES = {  # name: (changes to the config, frames, height and width of the latent)
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
    "another decoder": (
        {
            "decoder_base_dim": 4,
            "temperal_downsample": [True, False],
            "scale_factor_temporal": 2,
        },
        (2, 1, 2),
    ),
}


def torch_model(config, seed=0):
    """diffusers' model with no weight as it was initialised."""
    torch.manual_seed(seed)
    model = TorchAutoencoder(**config).eval().requires_grad_(False)
    for name, p in model.named_parameters():
        if name.endswith("gamma"):
            p.normal_(1.0, 0.3)
        elif p.ndim > 1:
            p.normal_(0, p[0].numel() ** -0.5)
        else:
            p.normal_(0, 0.3)
    return model


def decoded_tensors(model):
    """Those that decoding reads."""
    encoder = ("encoder.", "quant_conv.")
    return {n: t for n, t in model.state_dict().items() if not n.startswith(encoder)}


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def channels_first(x):
    return torch.from_numpy(np.moveaxis(x, -1, 1).copy())


@pytest.mark.parametrize("name", first_is_quick(CASES))
def test_decode_and_its_gradient_equal_diffusers(name):
    changes, size = CASES[name]
    fields = WAN_VAE | changes
    reference = torch_model(fields)
    config = AutoencoderKLWanConfig.from_dict(fields)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: AutoencoderKLWan(config, rngs=nnx.Rngs(0))))
    tensors = {name: t.numpy() for name, t in decoded_tensors(reference).items()}
    params = from_torch(state, tensors)
    latent = normal(2, 2, *size, config.z_dim)
    frames = (size[0] - 1) * config.temporal_compression + 1
    weights = normal(4, 2, frames, *(n * config.spatial_compression for n in size[1:]), 3)

    @jax.jit
    def everything(params, latent):
        def decode(latent):
            return jnp.clip(nnx.merge(graphdef, params).decode(latent), -1, 1)  # as diffusers

        decoded, back = jax.vjp(decode, latent)
        return decoded, back(weights)[0]

    z = channels_first(latent).requires_grad_()
    decoded = reference.decode(z).sample
    (decoded * channels_first(weights)).sum().backward()
    wanted = (np.moveaxis(t.detach().numpy(), 1, -1) for t in (decoded, z.grad))
    for what, got, want in zip(
        ("clip", "d latent"), everything(params, latent), wanted, strict=True
    ):
        print(f"{name}: {what} {relative(got, want):.1e}")
        assert got.shape == want.shape
        assert relative(want[0], want[1]) > 0.1, f"{what}: hardly depends on the input"
        assert relative(got, want) < TOLERANCE, what

    back = to_torch(state, params)
    assert back.keys() == tensors.keys()
    for key, tensor in tensors.items():
        np.testing.assert_array_equal(back[key], tensor, err_msg=key)


def test_files_of_diffusers_load(tmp_path):
    """They have an encoder, which is passed over."""
    reference = torch_model(WAN_VAE)
    reference.save_pretrained(tmp_path)
    component = open_autoencoder(tmp_path, AutoencoderKLWanConfig.read(tmp_path))
    latent = normal(0, 1, 2, 1, 2, 4)
    decode = jax.jit(lambda p, z: jnp.clip(component(p).decode(z), -1, 1))
    got = decode(component.load(jnp.float32), latent)
    want = np.moveaxis(reference.decode(channels_first(latent)).sample.numpy(), 1, -1)
    assert relative(got, want) < TOLERANCE


def test_the_released_network_has_the_released_tensors_and_keeps_shapes():
    config = AutoencoderKLWanConfig()
    graphdef, state = nnx.split(nnx.eval_shape(lambda: AutoencoderKLWan(config, rngs=nnx.Rngs(0))))
    with torch.device("meta"):
        reference = TorchAutoencoder()
    wanted = {name: tuple(t.shape) for name, t in decoded_tensors(reference).items()}
    assert {name: e.torch_shape for e in parameter_table(state) for name in e.names} == wanted
    assert parameter_count(state) == sum(t.numel() for t in decoded_tensors(reference).values())
    latent = jax.ShapeDtypeStruct((2, 21, 60, 104, 16), jnp.bfloat16)
    decoded = jax.eval_shape(lambda p, z: nnx.merge(graphdef, p).decode(z), state, latent)
    assert (decoded.shape, decoded.dtype) == ((2, 81, 480, 832, 3), jnp.bfloat16)


def test_config_fields_and_defaults_are_diffusers():
    theirs = {k: v for k, v in TorchAutoencoder().config.items() if not k.startswith("_")}
    ours = dataclasses.asdict(AutoencoderKLWanConfig())
    assert {k: list(v) if isinstance(v, tuple) else v for k, v in ours.items()} == theirs


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scaling_factor": 0.4}, r"unknown config field\(s\) \['scaling_factor'\]"),
        ({"is_residual": True}, "is_residual=True; accepted: False"),
        ({"patch_size": 2}, "patch_size=2; accepted: None"),
        ({"out_channels": 12}, "out_channels=12; accepted: 3"),
        ({"scale_factor_temporal": 2}, "scale_factor_temporal=2; accepted: 4, which follows from"),
        ({"scale_factor_spatial": 16}, "scale_factor_spatial=16; accepted: 4, which follows from"),
        ({"decoder_base_dim": 3, "dim_mult": [1, 1, 2]}, "dim_mult=.*are even after the first"),
    ],
)
def test_bad_configs_are_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        AutoencoderKLWanConfig.from_dict(WAN_VAE | change)
