"""`AutoencoderKLQwenImage` for one frame against diffusers, and its pipeline's latents; outputs and
gradients to 1e-5.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLQwenImage as TorchAutoencoder
from flax import nnx
from pretrain.networks import to_torch

from solrl_jax.models.loading.weights import parameter_table
from solrl_jax.models.qwen_image.autoencoder import (
    AutoencoderKLQwenImage,
    AutoencoderKLQwenImageConfig,
    open_autoencoder,
)
from tests import carried
from tests.cases import first_is_quick
from tests.parity import from_torch, parameter_count, relative
from tests.pipelines import QWEN_IMAGE_VAE

TOLERANCE = 1e-5
SMALL = {  # name: (changes to the config, height and width of the latent)
    "as released": (
        {
            "base_dim": 6,
            "dim_mult": [1, 2, 4, 4],
            "num_res_blocks": 2,
            "temperal_downsample": [False, True, True],
        },
        (2, 3),
    ),
    "two resolutions": ({}, (3, 4)),
    "one resolution": ({"dim_mult": [2], "temperal_downsample": []}, (5, 2)),
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
    """Those that decoding one frame reads."""
    return {
        name: t
        for name, t in model.state_dict().items()
        if not name.startswith(("encoder.", "quant_conv.")) and "time_conv" not in name
    }


def their_decode(model, latent):
    """As the pipeline's `__call__` ends, of latents [b, c, h, w]."""
    shape = (1, model.config.z_dim, 1, 1, 1)
    std, mean = (torch.tensor(getattr(model.config, f"latents_{x}")) for x in ("std", "mean"))
    latent = latent[:, :, None] * std.view(shape) + mean.view(shape)
    return model.decode(latent).sample[:, :, 0]


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("name", first_is_quick(SMALL))
def test_decode_and_its_gradient_equal_diffusers(name):
    changes, size = SMALL[name]
    fields = QWEN_IMAGE_VAE | changes
    reference = torch_model(fields)
    config = AutoencoderKLQwenImageConfig.from_dict(fields)
    graphdef, state = nnx.split(
        nnx.eval_shape(lambda: AutoencoderKLQwenImage(config, rngs=nnx.Rngs(0)))
    )
    tensors = {name: t.numpy() for name, t in decoded_tensors(reference).items()}
    params = from_torch(state, tensors)
    latent = normal(2, 2, *size, config.z_dim)
    weights = normal(4, 2, *(n * config.spatial_compression for n in size), 3)

    @jax.jit
    def everything(params, latent):
        def decode(latent):
            image = nnx.merge(graphdef, params).decode(config.unscale(latent))
            return jnp.clip(image, -1, 1)  # as diffusers

        decoded, back = jax.vjp(decode, latent)
        return decoded, back(weights)[0]

    z = torch.from_numpy(latent.transpose(0, 3, 1, 2).copy()).requires_grad_()
    decoded = their_decode(reference, z)
    (decoded * torch.from_numpy(weights.transpose(0, 3, 1, 2).copy())).sum().backward()
    wanted = (t.detach().numpy().transpose(0, 2, 3, 1) for t in (decoded, z.grad))
    for what, got, want in zip(
        ("image", "d latent"), everything(params, latent), wanted, strict=True
    ):
        print(f"{name}: {what} {relative(got, want):.1e}")
        assert relative(want[0], want[1]) > 0.1, f"{what}: hardly depends on the input"
        assert relative(got, want) < TOLERANCE, what

    back = to_torch(state, params)
    assert back.keys() == tensors.keys()
    for key, tensor in tensors.items():
        np.testing.assert_array_equal(back[key], tensor, err_msg=key)


def test_files_of_diffusers_load(tmp_path):
    """They have an encoder and temporal convolutions, which are passed over."""
    reference = torch_model(QWEN_IMAGE_VAE)
    reference.save_pretrained(tmp_path)
    component = open_autoencoder(tmp_path, AutoencoderKLQwenImageConfig.read(tmp_path))
    latent = normal(0, 1, 3, 2, 4)
    decode = jax.jit(lambda p, z: jnp.clip(component(p).decode(z), -1, 1))
    got = decode(component.load(jnp.float32), latent)
    z = torch.from_numpy(latent.transpose(0, 3, 1, 2).copy())
    want = reference.decode(z[:, :, None]).sample[:, :, 0].numpy().transpose(0, 2, 3, 1)
    assert relative(got, want) < TOLERANCE


def test_the_released_network_has_the_released_tensors_and_keeps_shapes():
    fields = carried.config(carried.QWEN_IMAGE, "vae")
    config = AutoencoderKLQwenImageConfig.from_dict(fields)
    assert config == AutoencoderKLQwenImageConfig()
    graphdef, state = nnx.split(
        nnx.eval_shape(lambda: AutoencoderKLQwenImage(config, rngs=nnx.Rngs(0)))
    )
    with torch.device("meta"):
        reference = TorchAutoencoder(**fields)
    wanted = {name: tuple(t.shape) for name, t in decoded_tensors(reference).items()}
    assert {name: e.torch_shape for e in parameter_table(state) for name in e.names} == wanted
    assert parameter_count(state) == sum(t.numel() for t in decoded_tensors(reference).values())
    latent = jax.ShapeDtypeStruct((2, 64, 48, 16), jnp.bfloat16)
    decoded = jax.eval_shape(lambda p, z: nnx.merge(graphdef, p).decode(z), state, latent)
    assert (decoded.shape, decoded.dtype) == ((2, 512, 384, 3), jnp.bfloat16)


def test_config_fields_and_defaults_are_diffusers():
    theirs = {k: v for k, v in TorchAutoencoder().config.items() if not k.startswith("_")}
    ours = dataclasses.asdict(AutoencoderKLQwenImageConfig())
    assert {k: list(v) if isinstance(v, tuple) else v for k, v in ours.items()} == theirs


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scaling_factor": 0.4}, r"unknown config field\(s\) \['scaling_factor'\]"),
        ({"base_dim": 3, "dim_mult": [1, 1]}, "dim_mult=.*are even after the first"),
        ({"temperal_downsample": [True, False]}, "temperal_downsample=.*a list of 1"),
        ({"input_channels": 4}, "input_channels=4; accepted: 3"),
        ({"latents_mean": [0.0]}, r"latents_mean=\(0.0,\); accepted: a list of z_dim=4"),
        ({"latents_std": [1.0, 0.0, 1.0, 1.0]}, "latents_std=.*accepted: positive numbers"),
        ({"latents_std": ["x"]}, "latents_std=.*accepted: a list of numbers"),
    ],
)
def test_bad_configs_are_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        AutoencoderKLQwenImageConfig.from_dict(QWEN_IMAGE_VAE | change)
