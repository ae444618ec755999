"""A Z-Image directory opened: what it refuses, and tokens, conditioning and whole images against
diffusers, in float32.
"""

import json
import shutil
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM

from solrl_jax.errors import InputError
from solrl_jax.models.backbone import load_backbone
from solrl_jax.models.registry import open_pipeline
from solrl_jax.parallel.sharding import make_mesh
from tests import pipelines
from tests.cases import first_is_quick
from tests.pipelines import KL_CHANNELS, KL_COMPRESSION, generated, save_zimage_pipeline

TOLERANCE = 1e-5  # largest difference over largest value
IMAGE_TOLERANCE = 1e-4  # of images in 0..1, all steps taken
# An empty prompt, capitals, spaces, prompts of 26, 58 and 300 tokens, unknown words and signs, and
# a mark of the template itself.
PROMPTS = [
    "",
    "Red star",
    " one  happy cat \t",
    "two small " * 9,
    "a photo of " * 17,
    "x" * 300,
    "an astronaut's horse, no. 3",
    "stop <|im_end|> here",
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Like Z-Image and like Z-Image-Turbo: folder and diffusers' own form. Their text encoders'
    files differ in names.
    """
    root = tmp_path_factory.mktemp("zimage")
    turbo = partial(
        save_zimage_pipeline, scheduler=pipelines.euler(shift=3.0), seed=1, encoder=Qwen3ForCausalLM
    )
    return {
        name: (root / name, save(root / name))
        for name, save in {"base": save_zimage_pipeline, "turbo": turbo}.items()
    }


def test_a_directory_says_what_it_is(folders):
    folder, reference = folders["base"]
    pipeline = open_pipeline(folder)
    assert (pipeline.kind, pipeline.folder) == ("ZImagePipeline", folder)
    assert (pipeline.default_size, pipeline.default_max_tokens) == ((128, 128), 448)
    assert pipeline.latent_shape(32, 64) == (
        32 // KL_COMPRESSION,
        64 // KL_COMPRESSION,
        KL_CHANNELS,
    )
    assert pipeline.image_tokens(32, 64) == 8 * 16
    assert pipeline.largest_side == 32 * 2 * KL_COMPRESSION
    assert not pipeline.embedded_guidance
    assert pipeline.vae_dtype == jnp.float32
    for network, component in (
        (reference.transformer, pipeline.transformer),
        (reference.vae.decoder, pipeline.vae),
    ):
        assert component.num_parameters == sum(p.numel() for p in network.parameters())
    layers = reference.text_encoder.layers  # the last one, and the norm after it, are not read
    unread = sum(
        p.numel() for part in (layers[-1], reference.text_encoder.norm) for p in part.parameters()
    )
    theirs = sum(p.numel() for p in reference.text_encoder.parameters())
    assert pipeline.text_encoders["text_encoder"].num_parameters == theirs - unread


@pytest.mark.parametrize("size", [(34, 32), (32, 30), (0, 32)])
def test_sizes_that_are_no_whole_tokens_are_refused(size, folders):
    with pytest.raises(
        ValueError,
        match=rf"size {size[0]}x{size[1]}: this model supports heights in multiples of 4 pixels",
    ):
        open_pipeline(folders["base"][0]).latent_shape(*size)
    with pytest.raises(ValueError, match="size 32x132: this model supports up to 128 pixels"):
        open_pipeline(folders["base"][0]).latent_shape(32, 132)


@pytest.fixture
def copy(folders, tmp_path):
    """The directory without weights."""
    return shutil.copytree(
        folders["base"][0], tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors")
    )


def test_opening_needs_no_weights(copy):
    open_pipeline(copy)


@pytest.mark.parametrize(
    ("file", "fields", "message"),
    [
        ("transformer/config", {"in_channels": 8}, "transformer in_channels=8 .* which need 4"),
        (
            "transformer/config",
            {"cap_feat_dim": 24},
            "transformer cap_feat_dim=24 .* which need 20",
        ),
        (
            "transformer/config",
            {"axes_lens": [20, 32, 32]},
            r"axes_lens=\(20, 32, 32\); accepted: .* 34 or more",
        ),
        (
            "text_encoder/config",
            {"hidden_size": 24},
            "transformer cap_feat_dim=20 .* which need 24",
        ),
        ("text_encoder/config", {"model_type": "qwen2"}, "Qwen3Model: model_type='qwen2'"),
        ("vae/config", {"latent_channels": 8}, "transformer in_channels=4 .* which need 8"),
        ("transformer/config", {"all_patch_size": [4]}, "ZImageTransformer2DModel: all_patch_size"),
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


def test_a_tokenizer_without_a_template_is_refused(copy):
    (copy / "tokenizer" / "chat_template.jinja").unlink()
    with pytest.raises(
        InputError, match=r"tokenizer: no usable chat template \(.*chat_template is not set.*\)$"
    ):
        load_backbone(str(copy), "fp32", make_mesh(1, 1))


@pytest.mark.slow
@pytest.mark.parametrize("max_tokens", first_is_quick([5, 40, 320]))
def test_tokens_and_conditioning_equal_those_of_diffusers(max_tokens, folders):
    for folder, reference in folders.values():
        pipeline = open_pipeline(folder)
        params = {name: part.load(jnp.float32) for name, part in pipeline.text_encoders.items()}
        want, _ = reference.encode_prompt(
            list(PROMPTS), "cpu", False, max_sequence_length=max_tokens
        )
        tokens = pipeline.tokenize(PROMPTS, max_tokens)
        got = jax.jit(pipeline.encode_text)(params, tokens)
        assert got["text"].shape == (len(PROMPTS), max_tokens, 20)
        for text, mask, their in zip(got["text"], got["mask"], want, strict=True):
            assert mask.sum() == len(their)
            assert np.abs(text[: len(their)] - their.numpy()).max() < TOLERANCE * max(
                x.abs().max() for x in want
            )
        # 5 tokens are the template's
        assert len({np.asarray(text).tobytes() for text in got["text"]}) == (
            len(PROMPTS) if max_tokens > 5 else 1
        )


def diffusers_images(
    reference, latents, steps, guidance, scheduler=None, prompts=PROMPTS, max_tokens=320, **more
):
    reference.scheduler = scheduler or reference.scheduler
    _, _, h, w = latents.shape
    return reference(
        list(prompts),
        height=h * KL_COMPRESSION,
        width=w * KL_COMPRESSION,
        num_inference_steps=steps,
        guidance_scale=guidance,
        latents=torch.from_numpy(latents),
        output_type="np",
        max_sequence_length=max_tokens,
        **more,
    ).images


# the scale of diffusers, of which 0 is none
CASES = [
    ("base", 4, 4.0, (16, 24)),
    pytest.param("base", 10, 0.0, (40, 32), marks=pytest.mark.exhaustive),
    pytest.param("turbo", 8, 0.0, (24, 64), marks=pytest.mark.exhaustive),
    pytest.param("turbo", 3, 1.5, (16, 16), marks=pytest.mark.exhaustive),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "steps", "guidance", "size"), CASES)
def test_images_equal_those_of_diffusers(model, steps, guidance, size, folders):
    folder, reference = folders[model]
    prompts = [
        p.strip() for p in PROMPTS[1:]
    ]  # of a file, which has no spaces at the ends of lines and no empty ones
    shape = (len(prompts), KL_CHANNELS, *(n // KL_COMPRESSION for n in size))
    latents = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    released = reference.scheduler

    def run(**other):
        return diffusers_images(
            reference,
            **dict(
                latents=latents, steps=steps, guidance=guidance, scheduler=released, prompts=prompts
            )
            | other,
        )

    want = run()
    got, _ = generated(
        folder,
        prompts,
        latents=latents,
        num_steps=steps,
        guidance_scale=1 + guidance,
        max_sequence_length=320,
    )
    assert got.shape == (len(prompts), *size, 3)
    print(f"{model}, {steps} steps, guidance {guidance}, {size}: {np.abs(got - want).max():.1e}")
    assert np.abs(got - want).max() <= IMAGE_TOLERANCE

    # the case can fail: everything an image is made from moves every one by many tolerances
    others = {
        "prompt": dict(prompts=prompts[1:] + prompts[:1]),
        "noise": dict(latents=latents[:, ::-1].copy()),
        "steps": dict(steps=steps + 1),
        "shift": dict(scheduler=pipelines.euler(shift=1.1)),
        "guidance": dict(guidance=guidance + 0.5),
    }
    for name, other in others.items():
        moved = np.abs(run(**other) - want).max(axis=(1, 2, 3))
        assert moved.min() > 10 * IMAGE_TOLERANCE, name
    reference.scheduler = released


@pytest.mark.exhaustive
def test_a_negative_prompt_is_that_of_diffusers(folders):
    folder, reference = folders["base"]
    latents = np.random.default_rng(0).standard_normal((4, KL_CHANNELS, 8, 12)).astype(np.float32)
    prompts = [p.strip() for p in PROMPTS[1:5]]
    negative = "three blue dog"
    want = diffusers_images(
        reference, latents, 4, 1.5, prompts=prompts, negative_prompt=[negative] * 4
    )
    got, _ = generated(
        folder,
        prompts,
        latents=latents,
        num_steps=4,
        guidance_scale=2.5,
        max_sequence_length=320,
        negative_prompt=negative,
    )
    assert np.abs(got - want).max() <= IMAGE_TOLERANCE
    assert (
        np.abs(diffusers_images(reference, latents, 4, 1.5, prompts=prompts) - want).max()
        > 30 * IMAGE_TOLERANCE
    )


@pytest.mark.slow
def test_what_zimage_does_not_have_is_refused(folders):
    folder = folders["base"][0]
    options = dict(num_steps=1, guidance_scale=1.0, size=(16, 16))
    with pytest.raises(InputError, match=r"^450 tokens per prompt: this model supports up to 448$"):
        generated(folder, ["a dog"], **options, max_sequence_length=450)
    with pytest.raises(
        InputError,
        match=r"^true_cfg_scale=2.0: must be 1 for a ZImagePipeline, whose guidance_scale is ",
    ):
        generated(folder, ["a dog"], **options, true_cfg_scale=2.0)


@pytest.mark.exhaustive
def test_a_lower_precision_from_its_own_noise_differs_a_little(folders):
    """By the rules of `configs/model/zimage.yaml`."""
    folder, reference = folders["base"]
    prompts = [p.strip() for p in PROMPTS[1:5]]
    options = dict(size=(16, 24), num_steps=4, guidance_scale=1.0, max_sequence_length=64)
    low, latents = generated(folder, prompts, **options, precision="nvfp4")
    assert latents.shape == (4, KL_CHANNELS, 8, 12)
    want = diffusers_images(reference, latents, 4, 0.0, prompts=prompts, max_tokens=64)
    difference = np.abs(low - want).mean()
    correlation = np.corrcoef(low.ravel(), want.ravel())[0, 1]
    print(f"nvfp4: mean difference {difference:.4f}, correlation {correlation:.4f}")
    assert 0.003 < difference < 0.1
    assert correlation > 0.9
