"""Autoencoders by the class of their config, and pipelines that decode with another one than their own, against diffusers'."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import AutoencoderDC, AutoencoderKL

from solrl_jax.models.autoencoders import open_autoencoder, with_autoencoder
from solrl_jax.models.pipeline import open_pipeline
from tests.pipelines import CHANNELS, COMPRESSION, save_pipeline

TOLERANCE = 1e-5
DC = {
    "latent_channels": CHANNELS, "attention_head_dim": 8, "encoder_block_types": "ResBlock", "decoder_block_types": "ResBlock",
    "encoder_block_out_channels": (8, 8, 8), "decoder_block_out_channels": (8, 8, 16), "encoder_layers_per_block": (1, 1, 1),
    "decoder_layers_per_block": (1, 1, 1), "encoder_qkv_multiscales": ((), (), ()), "decoder_qkv_multiscales": ((), (), ()),
    "scaling_factor": 7.0,
}  # fmt: skip
KL = {
    "latent_channels": CHANNELS, "block_out_channels": (8, 8, 8), "norm_num_groups": 4,
    "down_block_types": ("DownEncoderBlock2D",) * 3, "up_block_types": ("UpDecoderBlock2D",) * 3,
    "scaling_factor": 7.0, "shift_factor": 5.0,
}  # fmt: skip
SHALLOW = KL | {name: KL[name][:2] for name in ("block_out_channels", "down_block_types", "up_block_types")}
jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """A SANA pipeline, ours and diffusers'."""
    folder = tmp_path_factory.mktemp("model")
    reference = save_pipeline(folder)
    return open_pipeline(folder), reference


@pytest.mark.parametrize(("network", "config", "dtype"), [(AutoencoderDC, DC, None), (AutoencoderKL, KL, jnp.float32)])
def test_another_decodes_what_the_pipelines_own_scale_leaves(network, config, dtype, opened, tmp_path):
    """Its config's own factors are those of another pipeline, and are not read."""
    pipeline, reference = opened
    torch.manual_seed(0)
    theirs = network(**config).eval()
    theirs.save_pretrained(tmp_path)
    other = with_autoencoder(pipeline, tmp_path)
    assert other.vae_dtype == dtype
    assert (other.compression, other.transformer, other.velocity) == (COMPRESSION, pipeline.transformer, pipeline.velocity)
    latent = np.random.default_rng(1).standard_normal((2, 6, 8, CHANNELS)).astype(np.float32)
    got = np.asarray(jit(other.decode)(other.vae.load(jnp.float32), latent))
    with torch.no_grad():
        scaled = torch.from_numpy(latent).permute(0, 3, 1, 2) / reference.vae.config.scaling_factor
        want = reference.image_processor.postprocess(theirs.decode(scaled, return_dict=False)[0], output_type="np")
    print(f"decode: {np.abs(got - want).max():.1e}, of pictures with a deviation of {want.std():.2f}")
    assert want.std() > 1000 * TOLERANCE
    np.testing.assert_allclose(got, want, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (DC | {"latent_channels": CHANNELS // 2}, f"latent_channels={CHANNELS // 2} does not fit .* want {CHANNELS}"),
        (KL | dict.fromkeys(("down_block_types", "up_block_types", "block_out_channels"), ()), "block_out_channels"),
        (SHALLOW, f"pixels a latent=2 does not fit .* want {COMPRESSION}"),
        ({"_class_name": "AutoencoderTiny"}, "_class_name='AutoencoderTiny'; accepted: AutoencoderDC, AutoencoderKL"),
    ],
)  # fmt: skip
def test_one_for_other_latents_or_of_another_kind_is_refused(config, message, opened, tmp_path):
    kind = "AutoencoderKL" if "norm_num_groups" in config else "AutoencoderDC"
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": kind} | config))
    with pytest.raises(ValueError, match=message):
        with_autoencoder(opened[0], tmp_path)


def test_a_folder_without_a_config_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such file"):
        open_autoencoder(tmp_path)
