"""A SANA directory opened: what it refuses, and tokens, conditioning, velocity and images against
diffusers, in float32.
"""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from solrl_jax.models.registry import open_pipeline
from tests.cases import first_is_quick
from tests.pipelines import (
    CHANNELS,
    COMPRESSION,
    MAX_TOKENS,
    WORDS,
    euler,
    generated,
    save_pipeline,
)

TOLERANCE = 1e-5
PROMPTS = ["", "Star", " one  happy CAT \t", "two " * 30, "an astronaut on a horse"]
# Compilation is most of the time here, and half of it LLVM's optimization of small kernels.


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """Ours and diffusers'; with a scaled time, so that the scale is seen to be read."""
    folder = tmp_path_factory.mktemp("model")
    reference = save_pipeline(folder, timestep_scale=0.5)
    return open_pipeline(folder), reference, folder


def diffusers_prompts(reference, prompts, max_tokens):
    text, mask, nothing, nothing_mask = reference.encode_prompt(
        prompts, max_sequence_length=max_tokens, complex_human_instruction=None, device="cpu"
    )
    return (
        text.numpy(),
        mask.numpy().astype(bool),
        nothing.numpy(),
        nothing_mask.numpy().astype(bool),
    )


def test_a_directory_says_what_it_is(opened):
    pipeline, reference, folder = opened
    assert (pipeline.kind, pipeline.folder) == ("SanaPipeline", folder)
    assert pipeline.default_size == (32, 32)
    assert pipeline.default_max_tokens == MAX_TOKENS
    assert pipeline.latent_shape(32, 64) == (32 // COMPRESSION, 64 // COMPRESSION, CHANNELS)
    assert pipeline.image_tokens(32, 64) == 8 * 16
    assert pipeline.scheduler["flow_shift"] == 3.0
    for ours, theirs in (
        (pipeline.transformer, reference.transformer),
        (pipeline.text_encoders["text_encoder"], reference.text_encoder),
        (pipeline.vae, reference.vae.decoder),
    ):
        assert ours.num_parameters == sum(p.numel() for p in theirs.parameters())
        assert (
            sum(np.prod(x.shape) for x in jax.tree.leaves(ours.abstract_params(jnp.bfloat16)))
            == ours.num_parameters
        )


@pytest.mark.parametrize("size", [(33, 32), (32, 30), (0, 32), (-32, 32)])
def test_sizes_that_are_no_multiples_are_refused(size, opened):
    with pytest.raises(
        ValueError,
        match=rf"size {size[0]}x{size[1]}: this model supports heights in multiples of"
        f" {COMPRESSION} pixels",
    ):
        opened[0].latent_shape(*size)


@pytest.mark.parametrize(
    ("component", "fields", "message"),
    [
        (
            "transformer",
            {"in_channels": 16},
            "transformer in_channels=16 does not fit the other components, which need 8",
        ),
        (
            "transformer",
            {"out_channels": 16},
            "transformer out_channels=16 does not fit the other components, which need 8",
        ),
        (
            "transformer",
            {"caption_channels": 24},
            "transformer caption_channels=24 .* which need 16",
        ),
        ("text_encoder", {"hidden_size": 24}, "transformer caption_channels=16 .* which need 24"),
        (
            "transformer",
            {"cross_attention_dim": 64},
            "transformer cross_attention_dim=64 .* which need 32",
        ),
        ("vae", {"latent_channels": 4}, "transformer in_channels=8 .* which need 4"),
        ("transformer", {"dropout": 0.1}, "SanaTransformer2DModel: dropout=0.1"),
        ("text_encoder", {"model_type": "llama"}, "Gemma2Model: model_type='llama'"),
        ("vae", {"downsample_block_type": "pool"}, "AutoencoderDC: downsample_block_type='pool'"),
    ],
)
def test_components_that_do_not_fit_are_refused_before_a_weight_is_read(
    component, fields, message, opened, tmp_path
):
    folder = tmp_path / "model"
    shutil.copytree(opened[2], folder, ignore=shutil.ignore_patterns("*.safetensors"))
    open_pipeline(folder)  # needs no weights
    config = folder / component / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | fields))
    with pytest.raises(ValueError, match=message):
        open_pipeline(folder)


@pytest.mark.parametrize(
    "missing",
    ["transformer/config.json", "scheduler/scheduler_config.json", "tokenizer", "model_index.json"],
)
def test_an_incomplete_directory_is_refused_by_name(missing, opened, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(opened[2], folder, ignore=shutil.ignore_patterns("*.safetensors"))
    if (folder / missing).is_dir():
        shutil.rmtree(folder / missing)
    else:
        (folder / missing).unlink()
    with pytest.raises(FileNotFoundError, match=missing):
        open_pipeline(folder)


def test_tokens_are_lower_case_stripped_and_padded_on_the_right(opened):
    tokens = opened[0].tokenize(["Red STAR  ", "\tred star", "red", "", "Red " * 20], 5)
    red, star = (4 + WORDS.index(word) for word in ("red", "star"))
    pad = 0
    bos = 1
    assert tokens["ids"].tolist() == [
        [bos, red, star, pad, pad],
        [bos, red, star, pad, pad],
        [bos, red, pad, pad, pad],
        [bos, pad, pad, pad, pad],
        [bos, red, red, red, red],
    ]
    assert tokens["mask"].sum(1).tolist() == [3, 3, 2, 1, 5]
    assert (tokens["ids"].dtype, tokens["mask"].dtype) == (np.int32, bool)


def test_an_empty_instruction_is_no_instruction(opened):
    pipeline = opened[0]
    empty = pipeline.tokenize(["red star"], 5, "")
    for name, expected in pipeline.tokenize(["red star"], 5).items():
        np.testing.assert_array_equal(empty[name], expected)


@pytest.mark.parametrize("max_tokens", first_is_quick([3, MAX_TOKENS, 16]))
def test_tokens_and_conditioning_equal_those_of_diffusers(max_tokens, opened):
    pipeline, reference, _ = opened
    tokens = pipeline.tokenize(PROMPTS, max_tokens)
    inputs = []
    reference.text_encoder.forward, forward = (
        lambda ids, **kw: (inputs.append(ids.numpy()), forward(ids, **kw))[1],
        reference.text_encoder.forward,
    )
    try:
        text, mask, nothing, nothing_mask = diffusers_prompts(reference, PROMPTS, max_tokens)
    finally:
        reference.text_encoder.forward = forward
    np.testing.assert_array_equal(tokens["ids"], inputs[0])
    np.testing.assert_array_equal(tokens["mask"], mask)

    got = jax.jit(pipeline.encode_text)(
        {"text_encoder": pipeline.text_encoders["text_encoder"].load(jnp.float32)}, tokens
    )
    np.testing.assert_array_equal(got["mask"], mask)
    difference = np.abs(np.asarray(got["text"]) - text)[mask].max() / np.abs(text[mask]).max()
    print(f"conditioning, {max_tokens} tokens: {difference:.1e}")
    assert difference < TOLERANCE
    # the empty prompt, the first of these, is what guidance leads away from
    np.testing.assert_array_equal(got["mask"][:1], nothing_mask[:1])
    assert (
        np.abs(np.asarray(got["text"])[0] - nothing[0])[mask[0]].max() / np.abs(text).max()
        < TOLERANCE
    )


def test_velocity_equals_that_of_diffusers(opened):
    pipeline, reference, _ = opened
    rng = np.random.default_rng(0)
    latent = rng.standard_normal((len(PROMPTS), 4, 6, CHANNELS)).astype(np.float32)
    time = np.array([1000, 731, 500, 33, 1], np.float32)
    text, mask, _, _ = diffusers_prompts(reference, PROMPTS, 6)
    run = jax.jit(pipeline.velocity)
    got = run(
        pipeline.transformer.load(jnp.float32),
        latent,
        {"text": text, "mask": mask},
        time,
        np.float32(4.5),
    )
    with torch.no_grad():
        want = (
            reference.transformer(
                torch.from_numpy(latent).permute(0, 3, 1, 2),
                torch.from_numpy(text),
                torch.from_numpy(time) * 0.5,
                encoder_attention_mask=torch.from_numpy(mask).long(),
                return_dict=False,
            )[0]
            .permute(0, 2, 3, 1)
            .numpy()
        )
    difference = np.abs(np.asarray(got) - want).max() / np.abs(want).max()
    print(f"velocity: {difference:.1e}")
    assert difference < TOLERANCE


@pytest.mark.slow
def test_decoding_equals_diffusers_autoencoder_and_postprocessing(opened):
    pipeline, reference, _ = opened
    latent = 2 * np.random.default_rng(1).standard_normal((2, 6, 8, CHANNELS)).astype(np.float32)
    got = np.asarray(jax.jit(pipeline.decode)(pipeline.vae.load(jnp.float32), latent))
    with torch.no_grad():
        scaled = torch.from_numpy(latent).permute(0, 3, 1, 2) / reference.vae.config.scaling_factor
        want = reference.image_processor.postprocess(
            reference.vae.decode(scaled, return_dict=False)[0], output_type="np"
        )
    assert got.shape == (2, 24, 32, 3)
    assert {0.0, 1.0} <= set(want.ravel().tolist())  # both ends are cut off
    print(f"decode: {np.abs(got - want).max():.1e}")
    np.testing.assert_allclose(got, want, atol=TOLERANCE)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("steps", "guidance", "size"), [(4, 4.5, (32, 64)), (10, 1.0, (64, 32))])
def test_images_of_sana_1_5_equal_those_of_diffusers(steps, guidance, size, tmp_path):
    """Queries and keys are normalized, all heads together."""
    qk_norm = "rms_norm_across_heads"
    reference = save_pipeline(tmp_path, scheduler=euler(shift=3.0), qk_norm=qk_norm)
    prompts = ["", *(p.strip() for p in PROMPTS[1:])]
    shape = (len(prompts), CHANNELS, *(n // COMPRESSION for n in size))
    latents = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    want = reference(
        prompts, height=size[0], width=size[1], num_inference_steps=steps, guidance_scale=guidance,
        latents=torch.from_numpy(latents), output_type="np", max_sequence_length=MAX_TOKENS,
        complex_human_instruction=None, use_resolution_binning=False,
    ).images  # fmt: skip
    got, _ = generated(
        tmp_path,
        prompts,
        latents=latents,
        num_steps=steps,
        guidance_scale=guidance,
        max_sequence_length=MAX_TOKENS,
    )
    print(f"{steps} steps, guidance {guidance}, {size}: {np.abs(got - want).max():.1e}")
    assert got.std() > 0.1
    assert np.abs(got - want).max() <= 1e-4
