"""A directory of Wan 2.1 or 2.2 opened: what it refuses, and conditioning and whole clips against
diffusers, in float32.
"""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from solrl_jax.errors import InputError
from solrl_jax.models.backbone import load_backbone
from solrl_jax.models.registry import open_pipeline
from solrl_jax.parallel.sharding import make_mesh
from tests.pipelines import (
    KL_CHANNELS,
    euler,
    generated,
    save_wan22_pipeline,
    save_wan_pipeline,
    unipc,
)

TOLERANCE = 1e-5  # largest difference over largest value
CLIP_TOLERANCE = 1e-4  # of frames in 0..1, all steps taken
COMPRESSION = 4  # pixels per latent, of Wan 2.2 twice as many, and frames per latent frame
TOKENS = 24
# an empty one; entities and white space, which are cleaned; curly quotes; one that is cut
PROMPTS = ["", "red  star &amp;amp; cat\n", "a dog\u2019s photo", "two small " * 20]


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wan")
    return folder, save_wan_pipeline(folder)


@pytest.fixture(scope="module")
def opened22(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wan22")
    return folder, save_wan22_pipeline(folder)


def test_a_directory_of_wan_2_2_says_what_it_is(opened22):
    pipeline = open_pipeline(opened22[0])
    assert pipeline.kind == "WanPipeline"
    assert (pipeline.default_size, pipeline.frames_per_second) == ((704, 1280, 121), 24)
    assert (pipeline.temporal_compression, pipeline.compression) == (4, 2 * COMPRESSION)
    assert pipeline.latent_shape(16, 32, 9) == (3, 2, 4, KL_CHANNELS)
    assert pipeline.size_multiples() == (16, 16)


def test_a_directory_says_what_it_is(opened):
    folder, reference = opened
    pipeline = open_pipeline(folder)
    assert (pipeline.kind, pipeline.folder) == ("WanPipeline", folder)
    assert (pipeline.default_size, pipeline.default_max_tokens) == ((480, 832, 81), 512)
    assert pipeline.frames_per_second == 16
    assert (pipeline.temporal_compression, pipeline.compression) == (4, COMPRESSION)
    assert pipeline.latent_shape(16, 32, 9) == (3, 4, 8, KL_CHANNELS)
    assert pipeline.latent_shape(16, 32, 1) == (1, 4, 8, KL_CHANNELS)
    assert pipeline.image_tokens(16, 32, 9) == 3 * 2 * 4
    assert not pipeline.embedded_guidance
    for network, component in (
        (reference.transformer, pipeline.transformer),
        (reference.text_encoder, pipeline.text_encoders["text_encoder"]),
    ):
        assert component.num_parameters == sum(p.numel() for p in network.parameters())


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ((12, 16, 5), "size 12x16: this model supports heights in multiples of 8 pixels"),
        ((16, 16), "size 16x16: this model makes clips; accepted: a height, a width and a number"),
        ((16, 16, 4), "size 16x16x4: this model supports 1 frame plus a multiple of 4"),
        ((16, 16, 0), "size 16x16x0: this model supports 1 frame plus a multiple of 4"),
    ],
)
def test_sizes_that_are_no_whole_tokens_are_refused(size, message, opened):
    with pytest.raises(ValueError, match=message):
        open_pipeline(opened[0]).latent_shape(*size)


@pytest.mark.parametrize(
    ("file", "fields", "message"),
    [
        ("transformer/config", {"in_channels": 8}, "transformer in_channels=8 .* which need 4"),
        ("transformer/config", {"text_dim": 24}, "transformer text_dim=24 .* which need 32"),
        ("text_encoder/config", {"model_type": "t5"}, "UMT5EncoderModel: model_type='t5'"),
        ("vae/config", {"patch_size": 2}, "AutoencoderKLWan: out_channels=3; accepted: 12"),
        # two transformers, as Wan 2.2 T2V A14B
        (
            "model_index",
            {"transformer_2": ["diffusers", "WanTransformer3DModel"], "boundary_ratio": 0.875},
            r"model_index.json: transformer_2=\['diffusers', 'WanTransformer3DModel'\]; accepted: "
            "None: models with a second transformer",
        ),
        ("model_index", {"boundary_ratio": 0.9}, "boundary_ratio=0.9; accepted: None: models with"),
        ("model_index", {"expand_timesteps": "yes"}, "expand_timesteps='yes'; accepted: true or"),
        # an image as input, by the kind of pipeline, by channels and by features
        (
            "model_index",
            {"_class_name": "WanImageToVideoPipeline"},
            "_class_name='WanImageToVideoPipeline'; accepted: ",
        ),
        ("transformer/config", {"in_channels": 36}, "transformer in_channels=36 .* which need 4"),
        ("transformer/config", {"image_dim": 1280}, "image_dim=1280; accepted: None"),
    ],
)
def test_other_models_of_the_family_are_refused_before_a_weight_is_read(
    file, fields, message, opened, tmp_path
):
    copy = shutil.copytree(
        opened[0], tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors")
    )
    path = copy / f"{file}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with pytest.raises(InputError, match=message) as refused:
        load_backbone(str(copy), "fp32", make_mesh(1, 1))
    assert "\n" not in str(refused.value)


def test_conditioning_equals_that_of_diffusers(opened):
    folder, reference = opened
    pipeline = open_pipeline(folder)
    params = {name: part.load(jnp.float32) for name, part in pipeline.text_encoders.items()}
    want, _ = reference.encode_prompt(
        list(PROMPTS), do_classifier_free_guidance=False, max_sequence_length=TOKENS, device="cpu"
    )
    got = jax.jit(pipeline.encode_text)(params, pipeline.tokenize(PROMPTS, TOKENS))["text"]
    assert got.shape == want.shape == (len(PROMPTS), TOKENS, 32)
    assert (np.asarray(got[0, 1:]) == 0).all()
    assert np.abs(np.asarray(got) - want.numpy()).max() < TOLERANCE * np.abs(want.numpy()).max()
    with pytest.raises(InputError, match="513 tokens per prompt: this model supports up to 512"):
        pipeline.tokenize(PROMPTS, 513)


def diffusers_clips(reference, latents, steps, guidance, prompts, scheduler=None, negative=""):
    reference.scheduler = scheduler or unipc()
    _, _, frames, h, w = latents.shape
    compression = reference.vae.config.scale_factor_spatial
    return reference(
        list(prompts),
        negative_prompt=[negative] * len(prompts),
        height=h * compression,
        width=w * compression,
        num_frames=1 + (frames - 1) * 4,
        num_inference_steps=steps,
        guidance_scale=guidance,
        latents=torch.from_numpy(latents),
        output_type="np",
        max_sequence_length=TOKENS,
    ).frames


CASES = [
    (4, 3.0, (3, 4, 8)),  # 9 frames
    pytest.param(10, 1.0, (2, 8, 4), marks=pytest.mark.exhaustive),
    pytest.param(10, 5.0, (1, 4, 4), marks=pytest.mark.exhaustive),
]


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "guidance", "size"), CASES)
def test_clips_equal_those_of_diffusers(steps, guidance, size, opened):
    folder, reference = opened
    shape = (len(PROMPTS), KL_CHANNELS, *size)
    latents = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    arguments = dict(latents=latents, steps=steps, guidance=guidance, prompts=PROMPTS)
    want = diffusers_clips(reference, **arguments)
    got, _ = generated(
        folder,
        PROMPTS,
        latents=latents,
        num_steps=steps,
        guidance_scale=guidance,
        max_sequence_length=TOKENS,
    )
    frames = 1 + 4 * (size[0] - 1)
    assert got.shape == want.shape == (len(PROMPTS), frames, 4 * size[1], 4 * size[2], 3)
    print(f"{steps} steps, guidance {guidance}, {size}: {np.abs(got - want).max():.1e}")
    assert np.abs(got - want).max() <= CLIP_TOLERANCE

    # the case can fail: everything a clip is made from moves every one by many tolerances
    others = {
        "prompt": dict(prompts=PROMPTS[1:] + PROMPTS[:1]),
        "noise": dict(latents=latents[:, ::-1].copy()),
        "steps": dict(steps=steps + 1),
        "shift": dict(scheduler=unipc(flow_shift=5.0)),
        "guidance": dict(guidance=1.2 if guidance > 1 else 2.0),
    }
    if guidance > 1:
        others["negative prompt"] = dict(negative="three blue dog")
    for name, other in others.items():
        moved = np.abs(diffusers_clips(reference, **arguments | other) - want).max(
            axis=(1, 2, 3, 4)
        )
        # The first prompt is empty, like the negative one, so guidance changes nothing there.
        assert moved[1:].min() > 10 * CLIP_TOLERANCE, name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("guidance", "size"),
    [
        (3.0, (2, 4, 2)),  # 5 frames
        pytest.param(1.0, (3, 2, 4), marks=pytest.mark.exhaustive),
        pytest.param(3.0, (1, 2, 2), marks=pytest.mark.exhaustive),
    ],
)
def test_clips_of_wan_2_2_equal_those_of_diffusers(guidance, size, opened22):
    """diffusers gives the network a timestep per token."""
    folder, reference = opened22
    assert reference.config.expand_timesteps
    prompts = PROMPTS[1:3]
    shape = (len(prompts), KL_CHANNELS, *size)
    latents = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    arguments = dict(latents=latents, steps=4, guidance=guidance, prompts=prompts)
    want = diffusers_clips(reference, **arguments, scheduler=unipc(flow_shift=5.0))
    options = dict(num_steps=4, guidance_scale=guidance, max_sequence_length=TOKENS)
    got, _ = generated(folder, prompts, latents=latents, **options)
    frames = 1 + 4 * (size[0] - 1)
    assert got.shape == want.shape == (len(prompts), frames, 8 * size[1], 8 * size[2], 3)
    print(f"guidance {guidance}, {size}: {np.abs(got - want).max():.1e}")
    assert np.abs(got - want).max() <= CLIP_TOLERANCE
    moved = diffusers_clips(reference, **arguments)  # with the shift of Wan 2.1
    assert np.abs(moved - want).max() > 10 * CLIP_TOLERANCE


@pytest.mark.exhaustive
def test_the_euler_scheduler_of_the_pipeline_is_that_of_diffusers(tmp_path):
    """The type hint of diffusers' pipeline; no release has it."""
    reference = save_wan_pipeline(tmp_path, euler(shift=3.0))
    latents = np.random.default_rng(0).standard_normal((1, KL_CHANNELS, 2, 4, 4))
    latents = latents.astype(np.float32)
    want = diffusers_clips(reference, latents, 3, 2.0, ["red star"], euler(shift=3.0))
    options = dict(num_steps=3, guidance_scale=2.0, max_sequence_length=TOKENS)
    got, _ = generated(tmp_path, ["red star"], latents=latents, **options)
    assert np.abs(got - want).max() <= CLIP_TOLERANCE


@pytest.mark.exhaustive
def test_sizes_of_clips_are_those_of_the_request(opened):
    folder = opened[0]
    options = dict(num_steps=1, max_sequence_length=TOKENS)
    images, latents = generated(folder, ["red star"], size=(8, 16, 5), **options)
    assert images.shape == (1, 5, 8, 16, 3)
    assert latents.shape == (1, KL_CHANNELS, 2, 2, 4)
    tiled, _ = generated(folder, ["red star"], latents=latents, vae_tile_size=8, **options)
    assert tiled.shape == images.shape
    for arguments, message in (
        (dict(size=(8, 16, 6)), "size 8x16x6: this model supports 1 frame plus a multiple of 4"),
        (
            dict(size=(8, 16, 9), latents=latents),
            "size=8x16x9: the given latents are those of 8x16x5",
        ),
        (dict(latents=latents[:, :, 0]), r"expected float32 \[N, C, t, h, w\] with N = 1"),
        (dict(size=(8, 16, 5, 5)), r"expected \[HEIGHT, WIDTH\] in pixels"),
    ):
        with pytest.raises(InputError, match=message):
            generated(folder, ["red star"], **options, **arguments)
