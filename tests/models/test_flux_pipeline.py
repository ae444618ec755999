"""A FLUX directory opened: what it refuses, and tokens, conditioning and whole images against
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
    generated,
    save_flux_pipeline,
)

TOLERANCE = 1e-5  # largest difference over largest value
IMAGE_TOLERANCE = 1e-4  # of images in 0..1, all steps taken
# An empty prompt, capitals (which T5 tells from small letters and CLIP does not), spaces, more
# tokens than either encoder reads, and unknown words and signs.
PROMPTS = ["", "Red star", " one  happy cat \t", "two small " * 9, "an astronaut's horse, no. 3"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Like FLUX.1-dev and like FLUX.1-schnell: folder and diffusers' own form."""
    root = tmp_path_factory.mktemp("flux")
    schnell = partial(
        save_flux_pipeline, scheduler=pipelines.euler(shift=1.0), seed=1, guidance_embeds=False
    )
    return {
        name: (root / name, save(root / name))
        for name, save in {"dev": save_flux_pipeline, "schnell": schnell}.items()
    }


def test_a_directory_says_what_it_is(folders):
    folder, reference = folders["dev"]
    pipeline = open_pipeline(folder)
    assert (pipeline.kind, pipeline.folder) == ("FluxPipeline", folder)
    assert pipeline.default_size == (reference.default_sample_size * KL_COMPRESSION,) * 2
    assert pipeline.default_max_tokens == reference.tokenizer_2.model_max_length
    assert pipeline.latent_shape(32, 64) == (
        32 // KL_COMPRESSION,
        64 // KL_COMPRESSION,
        KL_CHANNELS,
    )
    assert pipeline.image_tokens(32, 64) == 8 * 16
    assert pipeline.scheduler["use_dynamic_shifting"] is True
    assert pipeline.embedded_guidance
    assert pipeline.vae_dtype == jnp.float32
    names = {
        name: getattr(reference, name) for name in ("transformer", "text_encoder", "text_encoder_2")
    }
    names["vae"] = reference.vae.decoder
    components = {
        "transformer": pipeline.transformer,
        "vae": pipeline.vae,
        **pipeline.text_encoders,
    }
    assert components.keys() == names.keys()
    for name, network in names.items():
        assert components[name].num_parameters == sum(p.numel() for p in network.parameters()), name


@pytest.mark.parametrize("size", [(34, 32), (32, 30), (0, 32)])
def test_sizes_that_are_no_whole_tokens_are_refused(size, folders):
    with pytest.raises(
        ValueError,
        match=rf"size {size[0]}x{size[1]}: this model supports heights in multiples of 4 pixels",
    ):
        open_pipeline(folders["dev"][0]).latent_shape(*size)


@pytest.fixture
def copy(folders, tmp_path):
    """The directory without weights."""
    return shutil.copytree(
        folders["dev"][0], tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors")
    )


def test_opening_needs_no_weights(copy):
    open_pipeline(copy)


@pytest.mark.parametrize(
    ("file", "fields", "message"),
    [
        ("transformer/config", {"in_channels": 32}, "transformer in_channels=32 .* which need 16"),
        (
            "transformer/config",
            {"out_channels": 32},
            "transformer out_channels=32 .* which need 16",
        ),
        (
            "transformer/config",
            {"joint_attention_dim": 32},
            "transformer joint_attention_dim=32 .* which need 24",
        ),
        (
            "transformer/config",
            {"pooled_projection_dim": 12},
            "transformer pooled_projection_dim=12 .* which need 16",
        ),
        (
            "text_encoder/config",
            {"hidden_size": 24},
            "transformer pooled_projection_dim=16 .* which need 24",
        ),
        (
            "text_encoder_2/config",
            {"d_model": 32},
            "transformer joint_attention_dim=24 .* which need 32",
        ),
        ("vae/config", {"latent_channels": 8}, "transformer in_channels=16 .* which need 32"),
        ("transformer/config", {"patch_size": 2}, "FluxTransformer2DModel: patch_size=2"),
        ("text_encoder/config", {"model_type": "bert"}, "CLIPTextModel: model_type='bert'"),
        ("text_encoder_2/config", {"model_type": "umt5"}, "T5EncoderModel: model_type='umt5'"),
        ("vae/config", {"act_fn": "relu"}, "AutoencoderKL: act_fn='relu'"),
        (
            "tokenizer/tokenizer_config",
            {"model_max_length": 77},
            "tokenizer: model_max_length=77; accepted: up to 9",
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
    "missing",
    [
        "text_encoder",
        "text_encoder_2",
        "tokenizer",
        "tokenizer_2",
        "transformer",
        "vae",
        "scheduler",
    ],
)
def test_a_missing_component_is_refused_by_name(missing, copy):
    shutil.rmtree(copy / missing)
    with pytest.raises(InputError, match=rf"{copy / missing}[/:]") as refused:
        load_backbone(str(copy), "fp32", make_mesh(1, 1))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("missing", ["text_encoder", "text_encoder_2"])
def test_missing_weights_of_a_text_encoder_are_refused_by_name(missing, folders, tmp_path):
    shutil.copytree(folders["dev"][0], tmp_path / "model")
    (tmp_path / "model" / missing / "model.safetensors").unlink()
    with pytest.raises(InputError, match=rf"model/{missing}: expected one .safetensors file"):
        load_backbone(str(tmp_path / "model"), "fp32", make_mesh(1, 1))


@pytest.fixture(scope="module")
def encoders(folders):
    pipeline = open_pipeline(folders["dev"][0])
    return (
        pipeline,
        {name: part.load(jnp.float32) for name, part in pipeline.text_encoders.items()},
        jax.jit(pipeline.encode_text),
    )


@pytest.mark.slow
@pytest.mark.parametrize("max_tokens", first_is_quick([5, 16]))
def test_tokens_and_conditioning_equal_those_of_diffusers(max_tokens, encoders, folders):
    pipeline, params, encode = encoders
    reference = folders["dev"][1]
    inputs: dict[str, np.ndarray] = {}
    hooks = [
        getattr(reference, name).register_forward_pre_hook(
            lambda _, args, n=name: inputs.update({n: args[0].numpy()})
        )
        for name in ("text_encoder", "text_encoder_2")
    ]
    text, pooled, _ = reference.encode_prompt(PROMPTS, device="cpu", max_sequence_length=max_tokens)
    for hook in hooks:
        hook.remove()
    tokens = pipeline.tokenize(PROMPTS, max_tokens)
    assert tokens["clip"].shape == (len(PROMPTS), CLIP_TOKENS)
    np.testing.assert_array_equal(tokens["clip"], inputs["text_encoder"])
    np.testing.assert_array_equal(tokens["t5"], inputs["text_encoder_2"])

    got = encode(params, tokens)
    for name, want in (("text", text.numpy()), ("pooled", pooled.numpy())):
        error = np.abs(got[name] - want).max() / np.abs(want).max()
        print(f"{name}, {max_tokens} tokens: {error:.1e}")
        assert error < TOLERANCE
        assert (
            np.abs(want - np.roll(want, 1, axis=0)).max(axis=tuple(range(1, want.ndim))).min() > 0.1
        )  # prompts differ

    # a capital letter is another word to T5 and none to CLIP
    small = pipeline.tokenize([p.lower() for p in PROMPTS], max_tokens)
    assert (small["t5"][1] != tokens["t5"][1]).any()
    np.testing.assert_array_equal(small["clip"], tokens["clip"])


def diffusers_images(
    reference, latents, steps, guidance, scheduler=None, prompts=PROMPTS, max_tokens=12, **more
):
    reference.scheduler = scheduler or reference.scheduler
    n, channels, h, w = latents.shape
    noise = torch.from_numpy(latents)
    return reference(
        prompts,
        height=h * KL_COMPRESSION,
        width=w * KL_COMPRESSION,
        num_inference_steps=steps,
        guidance_scale=guidance,
        latents=reference._pack_latents(noise, n, channels, h, w),
        output_type="np",
        max_sequence_length=max_tokens,
        **more,
    ).images


CASES = [
    ("dev", 4, 3.5, (16, 24)),
    pytest.param("dev", 10, 1.0, (40, 32), marks=pytest.mark.exhaustive),
    pytest.param("schnell", 4, 1.0, (24, 16), marks=pytest.mark.exhaustive),
    pytest.param("schnell", 10, 1.0, (16, 16), marks=pytest.mark.exhaustive),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "steps", "guidance", "size"), CASES)
def test_images_equal_those_of_diffusers(model, steps, guidance, size, folders):
    folder, reference = folders[model]
    shape = (len(PROMPTS) - 1, KL_CHANNELS, *(n // KL_COMPRESSION for n in size))
    latents = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    prompts = [
        p.strip() for p in PROMPTS[1:]
    ]  # of a file, which has no spaces at the ends of lines
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
        "shift": dict(
            scheduler=pipelines.dynamic(base_shift=0.6)
            if model == "dev"
            else pipelines.euler(shift=1.1)
        ),
        "length of text": dict(max_tokens=13),
        **(
            {"guidance": dict(guidance=4.5 - guidance)} if model == "dev" else {}
        ),  # 1.0 for 3.5, 3.5 for 1.0
    }
    for name, other in others.items():
        moved = np.abs(run(**other) - want).max(axis=(1, 2, 3))
        assert moved.min() > 30 * IMAGE_TOLERANCE, name
    reference.scheduler = released
    if model == "schnell" and steps == 4:
        unguided, _ = generated(
            folder,
            prompts,
            latents=latents,
            num_steps=steps,
            guidance_scale=0.0,
            max_sequence_length=12,
        )
        np.testing.assert_array_equal(
            unguided, got
        )  # it is not told the guidance, nor evaluated twice


@pytest.mark.exhaustive
def test_classifier_free_guidance_beside_the_embedded_is_that_of_diffusers(folders):
    folder, reference = folders["dev"]
    latents = np.random.default_rng(0).standard_normal((4, KL_CHANNELS, 8, 12)).astype(np.float32)
    prompts = [p.strip() for p in PROMPTS[1:]]
    negative = "three blue dog"

    def ask(scale, negative, guidance=3.5):
        return diffusers_images(
            reference,
            latents,
            4,
            guidance,
            prompts=prompts,
            true_cfg_scale=scale,
            negative_prompt=[negative] * 4,
        )

    want = ask(2.5, negative)
    options = dict(num_steps=4, guidance_scale=3.5, true_cfg_scale=2.5, max_sequence_length=12)
    got, _ = generated(folder, prompts, latents=latents, **options, negative_prompt=negative)
    print(f"{np.abs(got - want).max():.1e}")
    assert np.abs(got - want).max() <= IMAGE_TOLERANCE
    without, _ = generated(
        folder, prompts, latents=latents, **options
    )  # away from the empty prompt
    assert np.abs(without - ask(2.5, "")).max() <= IMAGE_TOLERANCE
    for other in (
        ask(1.0, negative),
        ask(3.0, negative),
        ask(2.5, ""),
        ask(2.5, negative, guidance=1.0),
    ):
        assert np.abs(other - want).max(axis=(1, 2, 3)).min() > 30 * IMAGE_TOLERANCE


def test_what_flux_does_not_have_is_refused(folders):
    folder = folders["dev"][0]
    options = dict(num_steps=1, guidance_scale=3.5)
    with pytest.raises(
        InputError,
        match=r"^negative_prompt='a cat': has no effect without true_cfg_scale above 1; it is 1.0$",
    ):
        generated(folder, ["a dog"], **options, negative_prompt="a cat")
    with pytest.raises(InputError, match=r"^instruction: not supported by FluxPipeline; "):
        generated(folder, ["a dog"], **options, instruction="Photo of")
    with pytest.raises(InputError, match=r"^guidance_scale=3.5: must be at most 1 for FLUX.1-schn"):
        generated(folders["schnell"][0], ["a dog"], **options)


@pytest.mark.exhaustive
def test_a_lower_precision_from_its_own_noise_differs_a_little(folders):
    folder, reference = folders["dev"]
    prompts = [p.strip() for p in PROMPTS[1:]]
    low, latents = generated(
        folder,
        prompts,
        size=(16, 24),
        num_steps=4,
        guidance_scale=3.5,
        max_sequence_length=12,
        precision="nvfp4",
    )
    assert latents.shape == (4, KL_CHANNELS, 8, 12)
    assert abs(latents.std() - 1) < 0.1
    want = diffusers_images(reference, latents, 4, 3.5, prompts=prompts)
    difference = np.abs(low - want).mean()
    correlation = np.corrcoef(low.ravel(), want.ravel())[0, 1]
    print(f"nvfp4: mean difference {difference:.4f}, correlation {correlation:.4f}")
    assert 0.003 < difference < 0.1
    assert correlation > 0.9


def test_blocks_of_text_encoders_are_gathered_a_layer_at_a_time(monkeypatch, tmp_path):
    """What `Component.gathered` gathers whole is everything but the stacks, wherever they lie."""
    save_flux_pipeline(tmp_path)
    t5 = open_pipeline(tmp_path).text_encoders["text_encoder_2"]
    params = t5.abstract_params(jnp.float32)
    whole = []
    monkeypatch.setattr(
        "solrl_jax.models.loading.component.gather", lambda tree: whole.append(tree) or tree
    )
    assert t5.gather(params) == params

    def ids(tree):
        return {id(leaf) for leaf in jax.tree.leaves(tree)}

    assert ids(whole) == ids(params) - ids(params["encoder"]["block"]) != ids(params)
