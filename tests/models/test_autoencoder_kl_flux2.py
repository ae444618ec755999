"""AutoencoderKLFlux2 against diffusers' own with random weights, and its pipeline's latents;
outputs and gradients to 1e-5.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLFlux2 as TorchAutoencoder
from diffusers import Flux2KleinPipeline
from flax import nnx
from pretrain.networks import to_torch

from solrl_jax.models.flux2.autoencoder import AutoencoderKLFlux2, AutoencoderKLFlux2Config
from solrl_jax.models.loading.component import Component
from solrl_jax.models.loading.weights import locate_decoder_tensors, parameter_table
from tests import carried
from tests.cases import first_is_quick
from tests.models.test_autoencoder_kl import TOLERANCE, error, nchw, nhwc, normal
from tests.parity import from_torch, parameter_count

RELEASED = carried.config(carried.FLUX2_4B, "vae")


def small(widths=(8, 16, 16), **other):
    """The released config, narrower."""
    n = len(widths)
    types = {
        "down_block_types": ["DownEncoderBlock2D"] * n,
        "up_block_types": ["UpDecoderBlock2D"] * n,
    }
    sizes = {
        "block_out_channels": list(widths),
        "norm_num_groups": 8,
        "layers_per_block": 1,
        "latent_channels": 4,
    }
    return RELEASED | types | sizes | other


SMALL = {  # name: (config, height and width of the latent)
    "as released": (small((8, 16, 16, 16), layers_per_block=2), (2, 3)),
    "a narrower decoder": (small(decoder_block_out_channels=[8, 8, 24]), (3, 2)),
    "no convolutions around the latent": (
        small((16, 16), use_quant_conv=False, use_post_quant_conv=False),
        (3, 4),
    ),
    "another epsilon, no attention": (
        small((16,), batch_norm_eps=0.3, mid_block_add_attention=False),
        (2, 5),
    ),
}


def fields_of_theirs(config):
    """Without what the installed version no longer has."""
    return {name: value for name, value in config.items() if name != "force_upcast"}


def torch_model(config, seed=0):
    """diffusers' model with no weight as it was initialized."""
    torch.manual_seed(seed)
    model = TorchAutoencoder(**fields_of_theirs(config)).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim > 1:
                p.normal_(0, p[0].numel() ** -0.5)
            else:
                p.normal_(1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.3)
        model.bn.running_mean.normal_()
        model.bn.running_var.uniform_(0.2, 3.0)
    return model


def tensors(model):
    """Those that decoding reads."""
    unread = ("encoder.", "quant_conv.", "bn.num_batches_tracked")
    return {name: t for name, t in model.state_dict().items() if not name.startswith(unread)}


def build(config):
    c = AutoencoderKLFlux2Config.from_dict(config)
    return c, *nnx.split(nnx.eval_shape(lambda: AutoencoderKLFlux2(c, rngs=nnx.Rngs(0))))


def their_decode(model, latent):
    """As the pipeline's `__call__` ends."""
    deviation = torch.sqrt(model.bn.running_var.view(1, -1, 1, 1) + model.config.batch_norm_eps)
    latent = latent * deviation + model.bn.running_mean.view(1, -1, 1, 1)
    return model.decode(Flux2KleinPipeline._unpatchify_latents(latent)).sample


@pytest.mark.slow
@pytest.mark.parametrize("name", first_is_quick(SMALL))
def test_decode_and_its_gradient_equal_diffusers(name):
    config, size = SMALL[name]
    reference = torch_model(config)
    c, graphdef, state = build(config)
    params = from_torch(state, {name: t.numpy() for name, t in tensors(reference).items()})
    latent = normal(2, 2, *size, c.channels)
    weights = normal(4, 2, *(n * c.compression for n in size), 3)

    @jax.jit
    def everything(p, latent):
        decoded, back = jax.vjp(nnx.merge(graphdef, p).decode, latent)
        return decoded, back(weights)[0]

    z = nchw(latent).requires_grad_()
    decoded = their_decode(reference, z)
    (decoded * nchw(weights)).sum().backward()
    for what, got, want in zip(
        ("image", "d latent"), everything(params, latent), map(nhwc, (decoded, z.grad)), strict=True
    ):
        assert error(want[0], want[1]) > 0.1, (
            f"{what}: nothing is compared, it hardly depends on the input"
        )
        assert error(got, want) < TOLERANCE, what

    back = to_torch(state, params)
    assert back.keys() == tensors(reference).keys()
    assert all(np.array_equal(back[key], t.numpy()) for key, t in tensors(reference).items())


@pytest.mark.slow
def test_files_of_diffusers_load(tmp_path):
    """They have an encoder, and count the batches of training in an integer: both are passed
    over.
    """
    config = small((16,))
    reference = torch_model(config)
    reference.save_pretrained(tmp_path)
    read = AutoencoderKLFlux2Config.read(tmp_path)
    component = Component.from_builder(
        tmp_path, lambda rngs: AutoencoderKLFlux2(read, rngs=rngs), locate_decoder_tensors
    )
    latent = normal(0, 1, 3, 2, 16)
    got = jax.jit(lambda p, z: component(p).decode(z))(component.load(jnp.float32), latent)
    assert error(got, nhwc(their_decode(reference, nchw(latent)))) < TOLERANCE


def test_the_released_network_has_the_released_tensors_and_keeps_shapes():
    c, graphdef, state = build(RELEASED)
    assert parameter_count(state) == 49_620_515
    with torch.device("meta"):
        reference = TorchAutoencoder(**fields_of_theirs(RELEASED))
    expected = {name: tuple(t.shape) for name, t in tensors(reference).items()}
    assert {name: e.torch_shape for e in parameter_table(state) for name in e.names} == expected
    assert (c.compression, c.channels, c.required_dtype) == (16, 128, jnp.float32)
    latent = jax.ShapeDtypeStruct((2, 64, 48, 128), jnp.bfloat16)
    decoded = jax.eval_shape(lambda p, z: nnx.merge(graphdef, p).decode(z), state, latent)
    assert (decoded.shape, decoded.dtype) == ((2, 1024, 768, 3), jnp.bfloat16)


def test_config_fields_and_defaults_are_diffusers():
    theirs = {k: v for k, v in TorchAutoencoder().config.items() if not k.startswith("_")}
    assert dataclasses.asdict(AutoencoderKLFlux2Config()) == theirs | {"force_upcast": False}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scaling_factor": 0.4}, r"unknown config field\(s\) \['scaling_factor'\]"),
        ({"patch_size": [4, 4]}, r"patch_size=\(4, 4\); accepted: \[2, 2\]"),
        (
            {"decoder_block_out_channels": [96, 192]},
            "decoder_block_out_channels=.*a list as long as block_out_channels",
        ),
        (
            {"decoder_block_out_channels": [96, 192, 384, 100]},
            "AutoencoderKLFlux2: decoder_block_out_channels=.*multiples of norm_num_groups=32",
        ),
        (
            {"decoder_block_out_channels": [96, 192, 384, 0]},
            "AutoencoderKLFlux2: decoder_block_out_channels=.*positive multiples",
        ),
        (
            {"up_block_types": ["AttnUpDecoderBlock2D"] * 4},
            "AutoencoderKLFlux2: up_block_types=.*accepted: 'UpDecoderBlock2D'",
        ),
    ],
)
def test_bad_configs_are_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        AutoencoderKLFlux2Config.from_dict(RELEASED | change)
