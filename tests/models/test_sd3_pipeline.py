"""A Stable Diffusion 3 directory opened: what it refuses, and tokens, conditioning and whole images
against diffusers.
"""

import json
import shutil
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from solrl_jax.errors import InputError
from solrl_jax.models.backbone import load_backbone
from solrl_jax.models.registry import open_pipeline
from solrl_jax.parallel.sharding import make_mesh
from tests import pipelines
from tests.cases import first_is_quick
from tests.pipelines import (
    CLIP_TOKENS,
    KL_CHANNELS,
    KL_COMPRESSION,
    SD3,
    generated,
    save_sd3_pipeline,
)

TOLERANCE = 1e-5  # largest difference over largest value
IMAGE_TOLERANCE = 1e-4  # of images in 0..1, all steps taken
# An empty prompt, capitals (which T5 tells from small letters and CLIP does not), spaces, more
# tokens than any encoder reads, and unknown words and signs.
PROMPTS = ["", "Red star", " one  happy cat \t", "two small " * 9, "an astronaut's horse, no. 3"]
ENCODERS = {
    "text_encoder": "tokenizer",
    "text_encoder_2": "tokenizer_2",
    "text_encoder_3": "tokenizer_3",
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Like SD3.5 Large; and without T5, with blocks like SD3.5 Medium's: folder and diffusers' own
    form.
    """
    root = tmp_path_factory.mktemp("sd3")
    without = partial(
        save_sd3_pipeline, seed=1, with_t5=False, dual_attention_layers=(0,), pos_embed_max_size=12
    )
    return {
        name: (root / name, save(root / name))
        for name, save in {"large": save_sd3_pipeline, "no-t5": without}.items()
    }


@pytest.mark.parametrize("model", ["large", "no-t5"])
def test_a_directory_says_what_it_is(model, folders):
    folder, reference = folders[model]
    pipeline = open_pipeline(folder)
    assert (pipeline.kind, pipeline.folder) == ("StableDiffusion3Pipeline", folder)
    assert pipeline.default_size == (reference.default_sample_size * KL_COMPRESSION,) * 2
    assert pipeline.default_max_tokens == 256
    assert pipeline.latent_shape(16, 32) == (
        16 // KL_COMPRESSION,
        32 // KL_COMPRESSION,
        KL_CHANNELS,
    )
    assert pipeline.image_tokens(16, 32) == 4 * 8
    assert pipeline.scheduler["shift"] == 3.0
    assert not pipeline.embedded_guidance
    assert pipeline.vae_dtype == jnp.float32
    names = {name: getattr(reference, name) for name in ("transformer", *ENCODERS)} | {
        "vae": reference.vae.decoder
    }
    components = {
        "transformer": pipeline.transformer,
        "vae": pipeline.vae,
        **pipeline.text_encoders,
    }
    assert ("text_encoder_3" in components) == (model == "large")
    for name, network in names.items():
        if network is not None:
            buffers = (
                network.pos_embed.pos_embed.numel() if name == "transformer" else 0
            )  # a parameter to us
            assert (
                components[name].num_parameters
                == sum(p.numel() for p in network.parameters()) + buffers
            ), name


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ((34, 32), "size 34x32: this model supports heights in multiples of 4 pixels"),
        ((32, 0), "size 32x0: this model supports heights in multiples of 4 pixels"),
        ((16, 40), "size 16x40: this model supports up to 36 pixels"),
    ],
)
def test_sizes_that_it_cannot_take_are_refused(size, message, folders):
    pipeline = open_pipeline(folders["large"][0])
    with pytest.raises(ValueError, match=message):
        pipeline.latent_shape(*size)
    pipeline.latent_shape(36, 36)


@pytest.fixture
def copy(folders, tmp_path):
    """The directory without weights."""
    return shutil.copytree(
        folders["large"][0], tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors")
    )


def test_opening_needs_no_weights(copy):
    open_pipeline(copy)


@pytest.mark.parametrize(
    ("file", "fields", "message"),
    [
        ("transformer/config", {"in_channels": 8}, "transformer in_channels=8 .* which need 4"),
        ("transformer/config", {"out_channels": 8}, "transformer out_channels=8 .* which need 4"),
        (
            "transformer/config",
            {"joint_attention_dim": 64},
            "transformer joint_attention_dim=64 .* which need 48",
        ),
        (
            "transformer/config",
            {"joint_attention_dim": 39},
            "joint_attention_dim=39; accepted: at least 40",
        ),
        (
            "transformer/config",
            {"pooled_projection_dim": 12},
            "transformer pooled_projection_dim=12 .* which need 32",
        ),
        (
            "text_encoder/config",
            {"projection_dim": 16},
            "transformer pooled_projection_dim=32 .* which need 36",
        ),
        (
            "text_encoder_2/config",
            {"projection_dim": 16},
            "transformer pooled_projection_dim=32 .* which need 28",
        ),
        (
            "text_encoder_2/config",
            {"hidden_size": 64},
            "joint_attention_dim=48; accepted: at least 80",
        ),
        (
            "text_encoder_3/config",
            {"d_model": 32},
            "transformer joint_attention_dim=48 .* which need 32",
        ),
        ("vae/config", {"latent_channels": 8}, "transformer in_channels=4 .* which need 8"),
        (
            "transformer/config",
            {"qk_norm": "layer_norm"},
            "SD3Transformer2DModel: qk_norm='layer_norm'",
        ),
        ("text_encoder_2/config", {"hidden_act": "relu"}, "CLIPTextModel: hidden_act='relu'"),
        (
            "text_encoder_2/config",
            {"max_position_embeddings": 8},
            "tokenizer: model_max_length=9; accepted: up to 8",
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
    "missing", [*ENCODERS, *ENCODERS.values(), "transformer", "vae", "scheduler"]
)
def test_a_missing_component_is_refused_by_name(missing, copy):
    shutil.rmtree(copy / missing)
    with pytest.raises(InputError, match=rf"{copy / missing}[/:]") as refused:
        load_backbone(str(copy), "fp32", make_mesh(1, 1))
    assert "\n" not in str(refused.value)


@pytest.mark.slow
def test_tokenizers_in_their_older_files_are_read(folders, tmp_path):
    """As the released models have them: a vocabulary and merges instead of one `tokenizer.json`."""
    folder = shutil.copytree(
        folders["large"][0], tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors")
    )
    for tokenizer in ("tokenizer", "tokenizer_2"):
        whole = folder / tokenizer / "tokenizer.json"
        parts = json.loads(whole.read_text())["model"]
        whole.unlink()
        (whole.parent / "vocab.json").write_text(json.dumps(parts["vocab"]))
        merges = ["#version: 0.2", *map(" ".join, parts["merges"])]
        (whole.parent / "merges.txt").write_text("\n".join(merges) + "\n")
        config = whole.parent / "tokenizer_config.json"
        old = {
            "add_prefix_space": False,
            "do_lower_case": True,
            "errors": "replace",
            "tokenizer_class": "CLIPTokenizer",
        }
        kept = {
            k: v
            for k, v in json.loads(config.read_text()).items()
            if k.endswith("_token") or k == "model_max_length"
        }
        config.write_text(json.dumps(old | kept))
    got, want = (
        open_pipeline(path).tokenize(PROMPTS, 12) for path in (folder, folders["large"][0])
    )
    for name in want:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)


@pytest.fixture(scope="module", params=["large", "no-t5"])
def encoders(request, folders):
    folder, reference = folders[request.param]
    pipeline = open_pipeline(folder)
    params = {name: part.load(jnp.float32) for name, part in pipeline.text_encoders.items()}
    return pipeline, reference, params, jax.jit(pipeline.encode_text)


@pytest.mark.slow
@pytest.mark.parametrize("max_tokens", first_is_quick([5, 16]))
def test_tokens_and_conditioning_equal_those_of_diffusers(max_tokens, encoders):
    pipeline, reference, params, encode = encoders
    inputs: dict[str, np.ndarray] = {}
    hooks = [
        getattr(reference, name).register_forward_pre_hook(
            lambda _, args, n=name: inputs.update({n: args[0].numpy()})
        )
        for name in params
    ]
    text, _, pooled, _ = reference.encode_prompt(
        PROMPTS,
        None,
        None,
        device="cpu",
        do_classifier_free_guidance=False,
        max_sequence_length=max_tokens,
    )
    for hook in hooks:
        hook.remove()
    tokens = pipeline.tokenize(PROMPTS, max_tokens)
    assert inputs.keys() == params.keys()
    for name in inputs:
        np.testing.assert_array_equal(tokens[name], inputs[name], err_msg=name)

    got = encode(params, tokens)
    for name, want in (("text", text.numpy()), ("pooled", pooled.numpy())):
        error = np.abs(got[name] - want).max() / np.abs(want).max()
        print(f"{name}, {max_tokens} tokens: {error:.1e}")
        assert error < TOLERANCE
        assert (
            np.abs(want - np.roll(want, 1, axis=0)).max(axis=tuple(range(1, want.ndim))).min() > 0.1
        )  # prompts differ
    # what CLIP has no features for, and what T5 would have said, is exactly zero
    assert got["text"].shape == (len(PROMPTS), CLIP_TOKENS + max_tokens, SD3["joint_attention_dim"])
    assert not np.any(got["text"][:, :CLIP_TOKENS, 16 + 24 :])
    assert np.any(got["text"][:, CLIP_TOKENS:]) == ("text_encoder_3" in params)

    # a capital letter is another word to T5 and none to CLIP
    small = pipeline.tokenize([p.lower() for p in PROMPTS], max_tokens)
    for name in params:
        assert (small[name][1] != tokens[name][1]).any() == (name == "text_encoder_3"), name


def diffusers_images(
    reference, latents, steps, guidance, prompts, scheduler, max_tokens=12, negative=""
):
    reference.scheduler = scheduler
    height, width = (n * KL_COMPRESSION for n in latents.shape[2:])
    return reference(
        prompts, height=height, width=width, num_inference_steps=steps, guidance_scale=guidance,
        latents=torch.from_numpy(latents), output_type="np", max_sequence_length=max_tokens,
        negative_prompt=negative,
    ).images  # fmt: skip


CASES = [
    pytest.param("large", 4, 1.0, (16, 24), marks=pytest.mark.exhaustive),
    ("large", 10, 4.5, (24, 16)),
    pytest.param("no-t5", 4, 4.5, (32, 16), marks=pytest.mark.exhaustive),
    pytest.param("no-t5", 10, 1.0, (16, 16), marks=pytest.mark.exhaustive),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "steps", "guidance", "size"), CASES)
def test_images_equal_those_of_diffusers(model, steps, guidance, size, folders):
    folder, reference = folders[model]
    prompts = [p.strip() for p in PROMPTS[1:]]
    shape = (len(prompts), KL_CHANNELS, *(n // KL_COMPRESSION for n in size))
    latents = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    arguments = dict(
        latents=latents,
        steps=steps,
        guidance=guidance,
        prompts=prompts,
        scheduler=pipelines.euler(shift=3.0),
    )
    want = diffusers_images(reference, **arguments)
    got, _ = generated(
        folder,
        prompts,
        latents=latents,
        num_steps=steps,
        guidance_scale=guidance,
        max_sequence_length=12,
    )
    assert got.shape == (len(prompts), *size, 3)
    print(f"{model}, {steps} steps, guidance {guidance}, {size}: {np.abs(got - want).max():.1e}")
    assert np.abs(got - want).max() <= IMAGE_TOLERANCE

    # the case can fail: everything an image is made from moves every one by many tolerances
    others = {
        "prompt": dict(prompts=prompts[1:] + prompts[:1]),
        "noise": dict(latents=latents[:, ::-1].copy()),
        "steps": dict(steps=steps + 1),
        "guidance": dict(guidance=guidance + 0.5),
        "shift": dict(scheduler=pipelines.euler(shift=2.8)),
        "length of text": dict(max_tokens=13),  # as zeros too: nothing masks them
    }
    for name, other in others.items():
        moved = np.abs(diffusers_images(reference, **arguments | other) - want).max(axis=(1, 2, 3))
        assert moved.min() > 30 * IMAGE_TOLERANCE, name


@pytest.mark.exhaustive
def test_a_negative_prompt_is_that_of_diffusers(folders):
    folder, reference = folders["large"]
    latents = np.random.default_rng(0).standard_normal((4, KL_CHANNELS, 8, 12)).astype(np.float32)
    prompts = [p.strip() for p in PROMPTS[1:]]
    negative = "Three blue dog"
    arguments = dict(
        latents=latents,
        steps=4,
        guidance=4.5,
        prompts=prompts,
        scheduler=pipelines.euler(shift=3.0),
    )
    want = diffusers_images(reference, **arguments, negative=negative)
    nothing = diffusers_images(reference, **arguments)
    options = dict(
        num_steps=4, guidance_scale=4.5, max_sequence_length=12, negative_prompt=negative
    )
    got, _ = generated(folder, prompts, latents=latents, **options)
    print(f"{np.abs(got - want).max():.1e}")
    assert np.abs(got - want).max() <= IMAGE_TOLERANCE
    assert np.abs(nothing - want).max(axis=(1, 2, 3)).min() > 30 * IMAGE_TOLERANCE


@pytest.mark.exhaustive
def test_a_lower_precision_from_its_own_noise_differs_a_little(folders):
    folder, reference = folders["large"]
    prompts = [p.strip() for p in PROMPTS[1:]]
    low, latents = generated(
        folder,
        prompts,
        size=(16, 24),
        num_steps=4,
        guidance_scale=1.0,
        max_sequence_length=12,
        precision="nvfp4",
    )
    assert latents.shape == (4, KL_CHANNELS, 8, 12)
    assert abs(latents.std() - 1) < 0.1
    want = diffusers_images(reference, latents, 4, 1.0, prompts, pipelines.euler(shift=3.0))
    difference = np.abs(low - want).mean()
    correlation = np.corrcoef(low.ravel(), want.ravel())[0, 1]
    print(f"nvfp4: mean difference {difference:.4f}, correlation {correlation:.4f}")
    assert 0.003 < difference < 0.1
    assert correlation > 0.9
