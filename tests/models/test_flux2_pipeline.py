"""A FLUX.2-klein directory opened: what it refuses, and tokens, conditioning and whole images
against diffusers, in float32.
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
from tests import pipelines
from tests.cases import first_is_quick
from tests.pipelines import KL_CHANNELS, KL_COMPRESSION, generated, save_flux2_pipeline

TOLERANCE = 1e-5  # largest difference over largest value
IMAGE_TOLERANCE = 2e-5  # of images in 0..1, all steps taken
# outside the autoencoder
COMPRESSION = 2 * KL_COMPRESSION
CHANNELS = 4 * KL_CHANNELS
# An empty prompt, capitals, spaces, more tokens than are read, and unknown words and signs.
PROMPTS = ["", "Red star", " one  happy cat \t", "two small " * 50, "an astronaut's horse, no. 3"]
LONG = "one happy cat and a small dog left of the red star, " * 27  # about 300 tokens


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Distilled and base: folder and diffusers' own form."""
    root = tmp_path_factory.mktemp("flux2")

    def save(name, distilled):
        return (root / name, save_flux2_pipeline(root / name, seed=distilled, distilled=distilled))

    return {"distilled": save("distilled", True), "base": save("base", False)}


@pytest.mark.slow
def test_a_directory_says_what_it_is(folders):
    folder, reference = folders["distilled"]
    pipeline = open_pipeline(folder)
    assert (pipeline.kind, pipeline.folder) == ("Flux2KleinPipeline", folder)
    assert (
        pipeline.default_size == (reference.default_sample_size * 8,) * 2
    )  # of the released autoencoder
    assert pipeline.default_max_tokens == reference.tokenizer_max_length == 512
    assert pipeline.latent_shape(32, 64) == (32 // COMPRESSION, 64 // COMPRESSION, CHANNELS)
    assert pipeline.image_tokens(32, 64) == 8 * 16
    assert pipeline.embedded_guidance
    assert not open_pipeline(folders["base"][0]).embedded_guidance
    assert (
        pipeline.vae_dtype is None
    )  # what this version of diffusers writes does not ask for float32
    components = {"transformer": pipeline.transformer, "vae": pipeline.vae}
    for name, component in components.items():
        tensors = {
            n: t for n, t in getattr(reference, name).state_dict().items() if t.is_floating_point()
        }
        read = [
            t.numel()
            for n, t in tensors.items()
            if name != "vae" or not n.startswith(("encoder.", "quant_conv."))
        ]
        assert component.num_parameters == sum(read), name
    # of the encoder's 28 layers, 27 are read
    layer = sum(p.numel() for p in reference.text_encoder.model.layers[0].parameters())
    whole = sum(p.numel() for p in reference.text_encoder.model.parameters())  # without the head
    assert (
        pipeline.text_encoders["text_encoder"].num_parameters
        == whole - layer - reference.text_encoder.config.hidden_size
    )


@pytest.mark.parametrize("size", [(34, 32), (32, 30), (0, 32)])
def test_sizes_that_are_no_whole_tokens_are_refused(size, folders):
    with pytest.raises(
        ValueError,
        match=rf"size {size[0]}x{size[1]}: this model supports heights in multiples of 4 pixels",
    ):
        open_pipeline(folders["distilled"][0]).latent_shape(*size)


@pytest.fixture
def copy(folders, tmp_path):
    """The directory without weights."""
    return shutil.copytree(
        folders["distilled"][0], tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors")
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
            "transformer joint_attention_dim=32 .* which need 48",
        ),
        (
            "text_encoder/config",
            {"hidden_size": 24},
            "transformer joint_attention_dim=48 .* which need 72",
        ),
        (
            "text_encoder/config",
            {"num_hidden_layers": 20, "layer_types": None},
            r"num_hidden_layers=20; .*\(9, 18, 27\)",
        ),
        ("vae/config", {"latent_channels": 8}, "transformer in_channels=16 .* which need 32"),
        (
            "transformer/config",
            {"guidance_embeds": True},
            "Flux2Transformer2DModel: guidance_embeds=True; accepted: False",
        ),
        ("text_encoder/config", {"model_type": "mistral"}, "Qwen3Model: model_type='mistral'"),
        ("vae/config", {"act_fn": "relu"}, "AutoencoderKLFlux2: act_fn='relu'"),
        (
            "model_index",
            {"is_distilled": 1},
            "model_index.json: is_distilled=1; accepted: True, False",
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


def test_a_tokenizer_without_a_template_is_refused(copy):
    (copy / "tokenizer" / "chat_template.jinja").unlink()
    with pytest.raises(InputError, match=r"tokenizer: no usable chat template \("):
        load_backbone(str(copy), "fp32", make_mesh(1, 1))


@pytest.fixture(scope="module")
def encoders(folders):
    pipeline = open_pipeline(folders["distilled"][0])
    params = {name: part.load(jnp.float32) for name, part in pipeline.text_encoders.items()}
    return pipeline, params, jax.jit(pipeline.encode_text)


@pytest.mark.slow
@pytest.mark.parametrize("max_tokens", first_is_quick([48, 96]))
def test_tokens_and_conditioning_equal_those_of_diffusers(max_tokens, encoders, folders):
    pipeline, params, encode = encoders
    reference = folders["distilled"][1]
    inputs = {}
    hook = reference.text_encoder.register_forward_pre_hook(
        lambda _, args, keywords: inputs.update(keywords), with_kwargs=True
    )
    text, _ = reference.encode_prompt(PROMPTS, device="cpu", max_sequence_length=max_tokens)
    hook.remove()
    tokens = pipeline.tokenize(PROMPTS, max_tokens)
    np.testing.assert_array_equal(tokens["ids"], inputs["input_ids"])
    np.testing.assert_array_equal(tokens["mask"], inputs["attention_mask"])
    assert (tokens["mask"].sum(1) < max_tokens).any()
    assert tokens["mask"][3].all()

    got = encode(params, tokens)["text"]
    want = text.numpy()
    error = np.abs(got - want).max() / np.abs(want).max()
    print(f"{max_tokens} tokens: {error:.1e}")
    assert error < TOLERANCE
    assert np.abs(want - np.roll(want, 1, axis=0)).max(axis=(1, 2)).min() > 0.1  # prompts differ


def diffusers_images(
    reference, latents, steps, guidance, scheduler=None, prompts=PROMPTS, max_tokens=64, **more
):
    reference.scheduler = scheduler or reference.scheduler
    height, width = (n * COMPRESSION for n in latents.shape[2:])
    return reference(
        prompt=prompts,
        height=height,
        width=width,
        num_inference_steps=steps,
        guidance_scale=guidance,
        latents=torch.from_numpy(latents),
        output_type="np",
        max_sequence_length=max_tokens,
        **more,
    ).images


CASES = [
    ("distilled", 4, 1.0, (16, 24)),
    pytest.param("distilled", 10, 1.0, (40, 32), marks=pytest.mark.exhaustive),
    pytest.param("base", 4, 4.0, (24, 16), marks=pytest.mark.exhaustive),
    pytest.param("base", 10, 1.0, (16, 16), marks=pytest.mark.exhaustive),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "steps", "guidance", "size"), CASES)
def test_images_equal_those_of_diffusers(model, steps, guidance, size, folders):
    folder, reference = folders[model]
    shape = (len(PROMPTS) - 1, CHANNELS, *(n // COMPRESSION for n in size))
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
        max_sequence_length=64,
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
        "length of text": dict(max_tokens=96),
        **(
            {"guidance": dict(guidance=5.0 - guidance)} if model == "base" else {}
        ),  # 1.0 for 4.0, 4.0 for 1.0
    }
    for name, other in others.items():
        moved = np.abs(run(**other) - want).max(axis=(1, 2, 3))
        assert moved.min() > 30 * IMAGE_TOLERANCE, name
    reference.scheduler = released
    if model == "distilled" and steps == 4:
        unguided, _ = generated(
            folder,
            prompts,
            latents=latents,
            num_steps=steps,
            guidance_scale=0.0,
            max_sequence_length=64,
        )
        np.testing.assert_array_equal(
            unguided, got
        )  # it is not told the guidance, nor evaluated twice


@pytest.mark.exhaustive
def test_images_of_long_prompts_at_the_released_length_equal_those_of_diffusers(folders):
    folder, reference = folders["base"]
    prompts = ["a", LONG.strip()]
    tokens = open_pipeline(folder).tokenize(prompts, 512)["mask"].sum(1)
    assert tokens[0] < 30
    assert 300 < tokens[1] < 512
    latents = np.random.default_rng(0).standard_normal((2, CHANNELS, 5, 3)).astype(np.float32)
    want = diffusers_images(reference, latents, 2, 3.0, prompts=prompts, max_tokens=512)
    got, _ = generated(
        folder, prompts, latents=latents, num_steps=2, guidance_scale=3.0
    )  # 512 is the default
    print(f"{tokens} tokens: {np.abs(got - want).max():.1e}")
    assert np.abs(got - want).max() <= IMAGE_TOLERANCE
    assert (
        np.abs(
            want[1] - diffusers_images(reference, latents, 2, 3.0, prompts=["a", LONG[:-60]])[1]
        ).max()
        > 0.01
    )


def test_what_the_base_model_does_not_have_is_refused(folders):
    with pytest.raises(
        InputError,
        match=r"^true_cfg_scale=2.0: must be 1 for a Flux2KleinPipeline, whose guidance_scale is ",
    ):
        generated(
            folders["base"][0], ["a dog"], num_steps=1, guidance_scale=1.0, true_cfg_scale=2.0
        )


def test_a_scale_that_the_distilled_model_ignores_is_refused(folders):
    pipeline = open_pipeline(folders["distilled"][0])
    pipeline.check_guidance(0.0, 2.0)
    with pytest.raises(
        InputError, match=r"^rollout\.guidance_scale=4\.0: must be at most 1 for a "
    ):
        pipeline.check_guidance(4.0, 1.0, section="rollout.")


@pytest.mark.exhaustive
def test_a_lower_precision_from_its_own_noise_differs_a_little(folders):
    folder, reference = folders["distilled"]
    prompts = [p.strip() for p in PROMPTS[1:]]
    low, latents = generated(
        folder,
        prompts,
        size=(16, 24),
        num_steps=4,
        guidance_scale=1.0,
        max_sequence_length=64,
        precision="nvfp4",
    )
    assert latents.shape == (4, CHANNELS, 4, 6)
    assert abs(latents.std() - 1) < 0.1
    want = diffusers_images(reference, latents, 4, 1.0, prompts=prompts)
    difference = np.abs(low - want).mean()
    correlation = np.corrcoef(low.ravel(), want.ravel())[0, 1]
    print(f"nvfp4: mean difference {difference:.4f}, correlation {correlation:.4f}")
    assert 0.003 < difference < 0.1
    assert correlation > 0.9
