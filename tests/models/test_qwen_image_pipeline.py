"""A Qwen-Image directory opened: what it refuses, and tokens, conditioning and whole images against
diffusers, in float32.
"""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from solrl_jax.diffusion.sigmas import make_sigmas
from solrl_jax.errors import InputError
from solrl_jax.models.backbone import load_backbone
from solrl_jax.models.qwen_image.pipeline import PREFIX_TOKENS
from solrl_jax.models.registry import open_pipeline
from solrl_jax.parallel.sharding import make_mesh
from tests import pipelines
from tests.cases import first_is_quick
from tests.pipelines import KL_CHANNELS, generated, save_qwen_image_pipeline

TOLERANCE = 1e-5  # largest difference over largest value
IMAGE_TOLERANCE = 1e-4  # of images in 0..1, all steps taken
COMPRESSION = 2
TOKENS = 500  # of the longest prompt: the template is 150 tokens of this vocabulary, of which 34 go

# An empty prompt, capitals, spaces, 300 tokens, unknown words and signs, a mark of the template
# itself, and braces, which a template must not read.
PROMPTS = [
    "",
    "Red star",
    " one  happy cat \t",
    "two small " * 9,
    "x" * 300,
    "an astronaut's {} horse, no. {3}",
    "stop <|im_end|> here",
]


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen")
    return folder, save_qwen_image_pipeline(folder)


def test_a_directory_says_what_it_is(opened):
    folder, reference = opened
    pipeline = open_pipeline(folder)
    assert (pipeline.kind, pipeline.folder) == ("QwenImagePipeline", folder)
    assert (pipeline.default_size, pipeline.default_max_tokens) == ((256, 256), 512)
    assert pipeline.latent_shape(32, 64) == (16, 32, KL_CHANNELS)
    assert pipeline.image_tokens(32, 64) == 8 * 16
    assert not pipeline.embedded_guidance
    assert pipeline.vae_dtype is None
    assert pipeline.shift_terminal == 0.02
    assert pipeline.shift_formula(10, 256) == 0.5
    assert pipeline.shift_formula(4, 8192) == pytest.approx(0.9)
    language = reference.text_encoder.model.language_model
    for network, component in (
        (reference.transformer, pipeline.transformer),
        (language, pipeline.text_encoders["text_encoder"]),
    ):
        assert component.num_parameters == sum(p.numel() for p in network.parameters())


def test_the_schedule_of_training_is_the_released_one(opened):
    pipeline = open_pipeline(opened[0])
    scheduler = opened[1].scheduler
    scheduler.set_timesteps(sigmas=np.linspace(1, 0.1, 10), mu=pipeline.shift_formula(10, 1024))
    sigmas = make_sigmas("flux", 10, 1.0, 1024, pipeline.shift_formula, pipeline.shift_terminal)
    np.testing.assert_allclose(sigmas, scheduler.sigmas, atol=1e-6)


@pytest.mark.parametrize("size", [(34, 32), (32, 30), (0, 32)])
def test_sizes_that_are_no_whole_tokens_are_refused(size, opened):
    with pytest.raises(
        ValueError,
        match=rf"size {size[0]}x{size[1]}: this model supports heights in multiples of 4 pixels",
    ):
        open_pipeline(opened[0]).latent_shape(*size)


@pytest.fixture
def copy(opened, tmp_path):
    """The directory without weights."""
    return shutil.copytree(
        opened[0], tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors")
    )


def test_opening_needs_no_weights(copy):
    open_pipeline(copy)


@pytest.mark.parametrize(
    ("file", "fields", "message"),
    [
        ("transformer/config", {"in_channels": 8}, "transformer in_channels=8 .* which need 16"),
        ("transformer/config", {"out_channels": 8}, "transformer out_channels=8 .* which need 4"),
        (
            "transformer/config",
            {"joint_attention_dim": 24},
            "transformer joint_attention_dim=24 .* which need 32",
        ),
        ("text_encoder/config", {"model_type": "qwen3"}, "Qwen2_5_VLTextModel: model_type='qwen3'"),
        ("vae/config", {"input_channels": 4}, "AutoencoderKLQwenImage: input_channels=4"),
        ("scheduler/scheduler_config", {"max_shift": "x"}, "max_shift='x'; accepted: a number"),
        ("scheduler/scheduler_config", {"shift_terminal": 1}, "shift_terminal=1; accepted: None"),
        (
            "scheduler/scheduler_config",
            {"max_image_seq_len": 256},
            "max_image_seq_len=256; accepted: more than base_image_seq_len",
        ),
    ],
)
def test_components_that_do_not_fit_are_refused_before_a_weight_is_read(
    file, fields, message, copy
):
    path = copy / f"{file}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with pytest.raises(InputError, match=message) as refused:
        load_backbone(str(copy), "fp32", make_mesh(1, 1))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "missing", ["text_encoder", "tokenizer", "transformer", "vae", "scheduler"]
)
def test_a_missing_component_is_refused_by_name(missing, copy):
    shutil.rmtree(copy / missing)
    with pytest.raises(InputError, match=rf"{copy / missing}[/:]") as refused:
        load_backbone(str(copy), "fp32", make_mesh(1, 1))
    assert "\n" not in str(refused.value)


@pytest.mark.slow
@pytest.mark.parametrize("max_tokens", first_is_quick([TOKENS, 150, 20]))
def test_tokens_and_conditioning_equal_those_of_diffusers(max_tokens, opened):
    folder, reference = opened
    pipeline = open_pipeline(folder)
    params = {name: part.load(jnp.float32) for name, part in pipeline.text_encoders.items()}
    want, want_mask = reference.encode_prompt(list(PROMPTS), "cpu", max_sequence_length=max_tokens)
    tokens = pipeline.tokenize(PROMPTS, max_tokens)
    assert tokens["ids"].shape == (len(PROMPTS), PREFIX_TOKENS + max_tokens)
    got = jax.jit(pipeline.encode_text)(params, tokens)
    assert got["text"].shape == (len(PROMPTS), max_tokens, 32)
    length = want.shape[1]  # that of the longest prompt, cut
    assert (max_tokens == TOKENS) == (length < max_tokens)
    want_mask = np.ones(want.shape[:2], bool) if want_mask is None else want_mask.numpy() > 0
    np.testing.assert_array_equal(got["mask"][:, :length], want_mask)
    assert not got["mask"][:, length:].any()
    difference = np.abs(np.asarray(got["text"])[:, :length] - want.numpy())[want_mask].max()
    assert difference < TOLERANCE * np.abs(want.numpy()).max()


def diffusers_images(reference, latents, steps, guidance, prompts, scheduler=None, negative=""):
    reference.scheduler = scheduler or pipelines.stretched()
    count, _, h, w = latents.shape
    return reference(
        list(prompts),
        negative_prompt=[negative] * count,
        height=h * COMPRESSION,
        width=w * COMPRESSION,
        num_inference_steps=steps,
        true_cfg_scale=guidance,
        latents=reference._pack_latents(torch.from_numpy(latents), count, KL_CHANNELS, h, w),
        output_type="np",
        max_sequence_length=TOKENS,
    ).images


CASES = [
    (4, 4.0, (16, 24)),
    pytest.param(10, 1.0, (20, 12), marks=pytest.mark.exhaustive),
    pytest.param(10, 2.5, (12, 28), marks=pytest.mark.exhaustive),
]


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "guidance", "size"), CASES)
def test_images_equal_those_of_diffusers(steps, guidance, size, opened):
    folder, reference = opened
    prompts = ["", *(p.strip() for p in PROMPTS[1:])]
    shape = (len(prompts), KL_CHANNELS, *(n // COMPRESSION for n in size))
    latents = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    arguments = dict(latents=latents, steps=steps, guidance=guidance, prompts=prompts)
    want = diffusers_images(reference, **arguments)
    got, _ = generated(
        folder,
        prompts,
        latents=latents,
        num_steps=steps,
        guidance_scale=guidance,
        max_sequence_length=TOKENS,
    )
    assert got.shape == (len(prompts), *size, 3)
    print(f"{steps} steps, guidance {guidance}, {size}: {np.abs(got - want).max():.1e}")
    assert np.abs(got - want).max() <= IMAGE_TOLERANCE

    # the case can fail: everything an image is made from moves every one by many tolerances
    others = {
        "prompt": dict(prompts=prompts[1:] + prompts[:1]),
        "noise": dict(latents=latents[:, ::-1].copy()),
        "steps": dict(steps=steps + 1),
        "shift": dict(scheduler=pipelines.stretched(max_shift=2.0, base_shift=1.0)),
        "terminal": dict(scheduler=pipelines.stretched(shift_terminal=0.1)),
        # at larger scales, the fixed norm leaves little to change
        "guidance": dict(guidance=1.2 if guidance > 1 else 2.0),
    }
    if guidance > 1:
        others["negative prompt"] = dict(negative="three blue dog")
    for name, other in others.items():
        moved = np.abs(diffusers_images(reference, **arguments | other) - want).max(axis=(1, 2, 3))
        # The first prompt is empty, like the negative one, so guidance changes nothing there.
        assert moved[1:].min() > 10 * IMAGE_TOLERANCE, name


@pytest.mark.exhaustive
def test_a_negative_prompt_is_that_of_diffusers(opened):
    folder, reference = opened
    latents = np.random.default_rng(0).standard_normal((2, KL_CHANNELS, 8, 12)).astype(np.float32)
    prompts = ["Red star", "two small cat"]
    negative = "three blue dog"
    want = diffusers_images(reference, latents, 4, 3.0, prompts, negative=negative)
    got, _ = generated(
        folder,
        prompts,
        latents=latents,
        num_steps=4,
        guidance_scale=3.0,
        max_sequence_length=TOKENS,
        negative_prompt=negative,
    )
    assert np.abs(got - want).max() <= IMAGE_TOLERANCE


def test_guidance_keeps_the_norm_of_each_token(opened):
    pipeline = open_pipeline(opened[0])
    rng = np.random.default_rng(0)
    positive, negative = jnp.asarray(rng.standard_normal((2, 1, 4, 6, KL_CHANNELS)), jnp.float32)
    guided = np.asarray(pipeline.guide(positive, negative, jnp.float32(4.0)))
    plain = np.asarray(negative + 4 * (positive - negative))
    positive = np.asarray(positive)

    def squares(x):
        return x.reshape(1, 2, 2, 3, 2, KL_CHANNELS).transpose(0, 1, 3, 2, 4, 5).reshape(6, -1)

    np.testing.assert_allclose(
        np.linalg.norm(squares(guided), axis=1),
        np.linalg.norm(squares(positive), axis=1),
        rtol=1e-5,
    )
    ratio = squares(guided) / squares(plain)
    np.testing.assert_allclose(ratio, np.broadcast_to(ratio[:, :1], ratio.shape), rtol=1e-4)


@pytest.mark.slow
def test_what_qwen_image_does_not_have_is_refused(opened):
    folder = opened[0]
    options = dict(num_steps=1, guidance_scale=1.0, size=(16, 16))
    with pytest.raises(InputError, match=r"^1025 tokens per prompt: this model supports up to"):
        generated(folder, ["a dog"], **options, max_sequence_length=1025)
    with pytest.raises(
        InputError,
        match=r"^true_cfg_scale=2.0: must be 1 for a QwenImagePipeline, whose guidance_scale is ",
    ):
        generated(folder, ["a dog"], **options, true_cfg_scale=2.0)
