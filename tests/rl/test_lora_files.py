"""LoRA files against those who read and write them: diffusers' pipelines and PEFT.

Networks are compared in float32.
"""

import copy
import dataclasses
import json
import re
import resource
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import (
    Flux2KleinPipeline,
    Flux2Transformer2DModel,
    FluxPipeline,
    FluxTransformer2DModel,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SanaPipeline,
    SanaTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    WanPipeline,
    WanTransformer3DModel,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from flax import nnx
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from pretrain.networks import to_torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from solrl_jax.config.presets import resolve
from solrl_jax.config.schema import Lora
from solrl_jax.data.prompts import Prompt
from solrl_jax.diffusion.released import read_scheduler
from solrl_jax.diffusion.schedule import Schedule
from solrl_jax.errors import InputError, RunError
from solrl_jax.models.backbone import load_backbone
from solrl_jax.models.flux import transformer as flux
from solrl_jax.models.flux2 import transformer as flux2
from solrl_jax.models.loading.weights import parameter_table
from solrl_jax.models.qwen_image import transformer as qwen_image
from solrl_jax.models.sana import transformer as sana
from solrl_jax.models.sd3 import transformer as sd3
from solrl_jax.models.wan import transformer as wan
from solrl_jax.models.zimage import transformer as zimage
from solrl_jax.parallel.sharding import make_mesh
from solrl_jax.rl.generate import SeedBatch, generate, prepare
from solrl_jax.rl.sampler import Sampler, Segment
from solrl_jax.rl.state import init_state, read_start
from solrl_jax.rl.trainable import lora_files
from solrl_jax.rl.trainable.lora_files import export_diffusers, export_peft, import_lora
from solrl_jax.rl.trainable.lora_settings import LoraSettings
from solrl_jax.rl.trainable.trainable import TrainedPaths, attach, flatten, replace
from tests.cases import first_is_quick
from tests.parity import from_torch
from tests.pipelines import CHANNELS, COMPRESSION, MAX_TOKENS, TRANSFORMER, save_pipeline

TOLERANCE = 2e-5  # largest difference over largest value; without adapters it is 5e-6
IMAGE_TOLERANCE = 1e-3
SETTINGS = LoraSettings(rank=4, alpha=10.0)
# stacked and not, linears and 1x1 convolutions
PATHS = (
    "transformer_blocks/attn1/to_q/kernel",
    "transformer_blocks/attn2/to_k/kernel",
    "transformer_blocks/attn2/to_out/0/kernel",
    "transformer_blocks/ff/conv_inverted/kernel",
    "transformer_blocks/ff/conv_point/kernel",
    "caption_projection/linear_1/kernel",
    "proj_out/kernel",
)
MODULES = (
    r".*attn1\.to_q|.*attn2\.to_k|.*attn2\.to_out\.0|.*conv_inverted|.*conv_point"
    r"|.*caption_projection\.linear_1|proj_out"
)
Q0 = "transformer_blocks.0.attn1.to_q"
Q1 = "transformer_blocks.1.attn1.to_q"


def randomize(base, paths, settings=SETTINGS, seed=0):
    """Trainable whose products are half as large as the weights they are added to."""
    rng = np.random.default_rng(seed)
    flat = flatten(base)

    def draw(path):
        *stack, n_in, n_out = flat[path].shape

        def normal(*shape):
            return rng.standard_normal((*stack, *shape))

        a = normal(n_in, settings.rank)
        b = normal(settings.rank, n_out)
        strength = 0.5 * np.std(flat[path]) / (settings.scale * settings.rank**0.5)
        return {"a": jnp.asarray(a, jnp.float32), "b": jnp.asarray(strength * b, jnp.float32)}

    return {path: draw(path) for path in paths}


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return folder, save_pipeline(folder)


@pytest.fixture(scope="module")
def backbone(reference):
    return load_backbone(str(reference[0]), "fp32", make_mesh(1, 1))


@pytest.fixture(scope="module")
def table(backbone):
    return parameter_table(backbone.pipeline.transformer.state)


@pytest.fixture(scope="module")
def adapters(backbone):
    return randomize(backbone.transformer, PATHS)


RNG = np.random.default_rng(1)
LATENT = RNG.standard_normal((2, 6, 8, CHANNELS)).astype(np.float32)
TEXT = RNG.standard_normal((2, 7, TRANSFORMER["caption_channels"])).astype(np.float32)
MASK = np.arange(7)[None] < np.array([[7], [3]])
TIME = np.array([900.0, 130.0], np.float32)


@pytest.fixture(scope="module")
def ours(backbone):
    """The velocity with adapters; alpha / rank is put into B, so that one program does for all."""
    latent = jnp.asarray(LATENT)
    time = jnp.asarray(TIME)
    conditioning = {"text": jnp.asarray(TEXT), "mask": jnp.asarray(MASK)}

    def policy(ab):
        return attach(backbone.transformer, ab, 1.0)

    run = jax.jit(
        lambda ab: backbone.velocity(policy(ab), latent, conditioning, time, jnp.float32(1))
    )

    def velocity(adapters, settings=SETTINGS):
        return np.asarray(
            run(
                {
                    path: {"a": ab["a"], "b": settings.scale * ab["b"]}
                    for path, ab in adapters.items()
                }
            )
        )

    return velocity


@torch.no_grad()
def theirs(transformer):
    latent, text, time, mask = (
        torch.from_numpy(x) for x in (LATENT.transpose(0, 3, 1, 2).copy(), TEXT, TIME, MASK)
    )
    out = transformer(latent, text, time, encoder_attention_mask=mask.float(), return_dict=False)[0]
    return out.numpy().transpose(0, 2, 3, 1)


def relative(got, want) -> float:
    return float(np.abs(got - want).max() / np.abs(want).max())


def same(got, want):
    assert list(got) == sorted(want)
    for path, ab in want.items():
        for key in ("a", "b"):
            assert got[path][key].dtype == jnp.float32
            np.testing.assert_array_equal(got[path][key], ab[key], err_msg=f"{path} {key}")


def header(file):
    with safe_open(file, "np") as handle:
        return handle.metadata()


def rounded(adapters):
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), adapters)


# --- ours, read by others


@pytest.mark.slow
@pytest.mark.parametrize("case", ["float32", "bfloat16", "folded"])
def test_diffusers_computes_with_our_file_what_we_compute(
    case, reference, table, adapters, ours, tmp_path
):
    pipeline = reference[1]
    file = tmp_path / "new" / "lora.safetensors"
    kwargs = {"float32": {}, "bfloat16": {"dtype": jnp.bfloat16}, "folded": {"fold": True}}[case]
    export_diffusers(file, adapters, SETTINGS, table, **kwargs)
    if case == "folded":  # for readers that know of no header
        save_file(load_file(file), file)
    before = theirs(pipeline.transformer)
    pipeline.load_lora_weights(str(file.parent if case == "bfloat16" else file))
    got = theirs(pipeline.transformer)
    pipeline.unload_lora_weights()
    want = ours(rounded(adapters) if case == "bfloat16" else adapters)
    print(f"{case}: {relative(got, want):.1e}")
    assert relative(got, want) < TOLERANCE
    assert relative(got, before) > 0.1
    # the case can fail: another alpha is another velocity
    assert relative(got, ours(adapters, LoraSettings(SETTINGS.rank, SETTINGS.rank))) > 0.05
    dtype = torch.bfloat16 if case == "bfloat16" else torch.float32
    with safe_open(file, "pt") as handle:
        assert {handle.get_tensor(k).dtype for k in handle.keys()} == {dtype}


@pytest.mark.exhaustive
def test_pictures_of_diffusers_with_our_file_are_ours(
    reference, backbone, table, adapters, tmp_path
):
    prompts = ["a red star", "one happy cat left of the green triangle"]
    steps = 4
    guidance = 3.0
    pipeline = reference[1]
    file = tmp_path / "lora.safetensors"
    noise = np.random.default_rng(2).standard_normal((2, CHANNELS, 8, 8)).astype(np.float32)
    size = (8 * COMPRESSION,) * 2

    def draw():
        return pipeline(
            prompts,
            height=size[0],
            width=size[1],
            num_inference_steps=steps,
            guidance_scale=guidance,
            output_type="np",
            latents=torch.from_numpy(noise),
            use_resolution_binning=False,
            complex_human_instruction=None,
            max_sequence_length=MAX_TOKENS,
        ).images

    export_diffusers(file, adapters, SETTINGS, table)
    before = draw()
    pipeline.load_lora_weights(str(file))
    want = draw()
    pipeline.unload_lora_weights()

    sigmas, times, solver = read_scheduler(backbone.pipeline.scheduler, steps, 64)
    grid = Schedule.from_sigmas(
        sigmas,
        solver,
        embedded_guidance=guidance,
        guidance_scale=guidance,
        timesteps=times,
    )
    segments = (Segment(attach(backbone.transformer, adapters, SETTINGS.scale), grid),)
    sampler = Sampler(
        "sample", segments, backbone.decoder, backbone.pipeline.latent_shape(*size), 2
    )
    rows = SeedBatch(np.arange(2), np.zeros((2, 2), np.uint32), noise.transpose(0, 2, 3, 1))
    prompted = prepare(backbone, None, tuple(map(Prompt, prompts)), MAX_TOKENS)
    got = generate(backbone, sampler, prompted, rows, keep_images=True).images
    print(
        f"images: {np.abs(got - want).max():.1e}; "
        f"LoRA moves them by {np.abs(want - before).max():.2f}"
    )
    assert np.abs(got - want).max() < IMAGE_TOLERANCE
    assert np.abs(want - before).max(axis=(1, 2, 3)).min() > 0.1


@pytest.mark.slow
def test_peft_computes_with_our_directory_what_we_compute(
    reference, table, adapters, ours, tmp_path
):
    export_peft(tmp_path / "lora", adapters, SETTINGS, table)
    model = PeftModel.from_pretrained(
        copy.deepcopy(reference[1].transformer), str(tmp_path / "lora")
    )
    got = theirs(model)
    want = ours(adapters)
    print(f"peft: {relative(got, want):.1e}")
    assert relative(got, want) < TOLERANCE
    assert relative(got, theirs(reference[1].transformer)) > 0.1
    loaded = {n.rpartition(".lora_A.")[0] for n, _ in model.named_parameters() if ".lora_A." in n}
    assert len(loaded) == 2 * 5 + 2  # five in each of two blocks, and the two beside them
    assert sorted(p.name for p in tmp_path.iterdir()) == ["lora"]
    assert sorted(p.name for p in (tmp_path / "lora").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


# --- theirs, read by us


def fill(model, seed=3):
    """Random numbers in both factors of every adapter of a torch model, as strong as in
    `randomize`.
    """
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if hasattr(module, "lora_A") and len(module.lora_A):
            (scale,) = module.scaling.values()
            for name, p in module.named_parameters():
                if "lora_A" in name or "lora_B" in name:
                    p.data = torch.randn(p.shape, generator=generator)
                if "lora_B" in name:
                    p.data *= 0.5 * module.base_layer.weight.std() / (scale * p.shape[1] ** 0.5)


@pytest.mark.parametrize(
    "case",
    ["pipeline", "pipeline without metadata", "transformer", "peft", "peft, rank-stabilised"],
)
def test_we_compute_with_their_file_what_they_compute(case, reference, table, ours, tmp_path):
    transformer = copy.deepcopy(reference[1].transformer)
    config = LoraConfig(r=3, lora_alpha=7, target_modules=MODULES, use_rslora="stabilised" in case)
    folder = tmp_path / "lora"
    alpha = 7.0
    if case.startswith("peft"):
        transformer = get_peft_model(transformer, config)
        fill(transformer)
        transformer.save_pretrained(folder)
        alpha *= 3**0.5 if config.use_rslora else 1
        read = folder / "adapter_model.safetensors"
    else:
        transformer.add_adapter(config)
        fill(transformer)
        if case == "transformer":
            transformer.save_lora_adapter(folder)
        else:
            metadata = transformer.peft_config["default"].to_dict() if case == "pipeline" else None
            SanaPipeline.save_lora_weights(
                folder,
                get_peft_model_state_dict(transformer),
                transformer_lora_adapter_metadata=metadata,
            )
        if case == "pipeline without metadata":  # what diffusers then makes of it is what counts
            alpha = 3.0
            transformer = copy.deepcopy(reference[1].transformer)
            transformer.load_lora_adapter(str(folder / "pytorch_lora_weights.safetensors"))
        read = folder / "pytorch_lora_weights.safetensors"
    adapters, settings = import_lora(folder, table)
    assert set(adapters) == set(PATHS)
    assert settings.rank == 3
    assert settings.alpha == pytest.approx(alpha, rel=1e-12)
    got = ours(adapters, settings)
    want = theirs(transformer)
    print(f"{case}: {relative(got, want):.1e}")
    assert relative(got, want) < TOLERANCE
    assert relative(want, theirs(reference[1].transformer)) > 0.05
    assert relative(want, ours(adapters, LoraSettings(3, 2 * alpha))) > 0.05
    same(import_lora(read, table)[0], adapters)  # the file itself will do


# --- both ways


@pytest.mark.parametrize("export", [export_diffusers, export_peft])
@pytest.mark.parametrize("settings", [SETTINGS, LoraSettings(4, 0.7)])
def test_a_round_trip_is_exact(export, settings, table, adapters, tmp_path):
    paths = [tmp_path / name for name in ("one.safetensors", "two.safetensors")]
    export(paths[0], adapters, settings, table)
    got, file_settings = import_lora(paths[0], table)
    same(got, adapters)
    assert file_settings == settings
    export(paths[1], got, file_settings, table)
    same(import_lora(paths[1], table)[0], adapters)
    # the second file says what the first does (but for the order of its header, which safetensors
    # does not fix)
    one, two = (path / "adapter_model.safetensors" if path.is_dir() else path for path in paths)
    assert header(one) == header(two)
    if export is export_peft:
        assert len({(path / "adapter_config.json").read_bytes() for path in paths}) == 1


def test_layers_that_a_file_has_not_are_zeros_and_are_left_out_again(table, adapters, tmp_path):
    file = tmp_path / "lora.safetensors"
    export_diffusers(file, {PATHS[0]: adapters[PATHS[0]]}, SETTINGS, table)
    metadata = header(file)
    tensors = {k: v for k, v in load_file(file).items() if "blocks.1." in k}
    assert sorted(tensors) == [f"transformer.{Q1}.lora_A.weight", f"transformer.{Q1}.lora_B.weight"]
    save_file(tensors, file, metadata=metadata)
    got, settings = import_lora(file, table)
    assert settings == SETTINGS
    assert set(got) == {PATHS[0]}
    for key, whole in adapters[PATHS[0]].items():
        np.testing.assert_array_equal(got[PATHS[0]][key][1], whole[1])
        assert not got[PATHS[0]][key][0].any()
    export_diffusers(file, got, settings, table)
    assert load_file(file).keys() == tensors.keys()


# --- a run that starts from a file


def start_of(backbone, file, **changes):
    """What `lora.path` of that file does: (the adapters read, the first state, the state without a
    file).
    """
    targets = TrainedPaths((*PATHS, "transformer_blocks/attn1/to_k/kernel"))
    lora = Lora(
        **{"rank": 4, "alpha": 10.0, "target_modules": ("unused",), "path": str(file)} | changes
    )
    optimizer = resolve("tiny").optimizer
    key = jax.random.key(5)
    start = read_start(lora, targets.adapted, backbone.parameter_table())
    rest = (backbone.transformer, targets, lora, optimizer, backbone.mesh)
    return start, init_state(key, *rest, start=start), init_state(key, *rest)


@pytest.mark.slow
def test_a_run_starts_from_the_file_in_all_three_policies(backbone, table, adapters, tmp_path):
    file = tmp_path / "lora.safetensors"
    export_diffusers(file, adapters, SETTINGS, table)
    start, state, fresh = start_of(backbone, file)
    assert set(start) == set(PATHS)
    for tree in (state.adapters, state.old, state.ema):
        assert tree.keys() == fresh.adapters.keys()
        same({path: tree[path] for path in sorted(PATHS)}, adapters)
        for path in tree.keys() - set(PATHS):  # a target that the file has not: as without a file
            np.testing.assert_array_equal(tree[path]["a"], fresh.adapters[path]["a"])
            assert tree[path]["a"].any()
            assert not tree[path]["b"].any()
    buffers = [
        leaf.unsafe_buffer_pointer()
        for tree in (state.adapters, state.old, state.ema)
        for leaf in jax.tree.leaves(tree)
    ]
    assert len(buffers) == len(set(buffers))  # the state is donated
    assert jax.tree.structure(state) == jax.tree.structure(fresh)


@pytest.mark.slow
def test_layers_that_the_file_has_not_start_where_they_can_learn(
    backbone, table, adapters, tmp_path
):
    file = tmp_path / "lora.safetensors"
    path = PATHS[0]
    export_diffusers(file, {path: adapters[path]}, SETTINGS, table)
    tensors = {k: v for k, v in load_file(file).items() if "blocks.1." in k}
    tensors[f"transformer.{Q1}.lora_B.weight"][:] = 0  # no change, but A is there to learn from
    save_file(tensors, file, metadata=header(file))
    _, state, fresh = start_of(backbone, file)
    got = state.adapters[path]
    want = fresh.adapters[path]
    np.testing.assert_array_equal(got["a"][0], want["a"][0])
    assert np.abs(got["a"][0]).max() > 0.1
    np.testing.assert_array_equal(got["a"][1], adapters[path]["a"][1])
    assert not got["b"].any()


def test_a_file_that_is_not_the_runs_is_refused_with_both_values(
    backbone, table, adapters, tmp_path
):
    file = tmp_path / "lora.safetensors"
    export_diffusers(file, adapters, SETTINGS, table)
    refused(
        r"lora.path='.*lora.safetensors': is of rank 4, but lora.rank=8; they must be equal",
        start_of,
        backbone,
        file,
        rank=8,
    )
    both = (
        "is of rank 4, but lora.rank=2, and of alpha 10.0, but lora.alpha=4.0; they must be equal"
    )
    refused(both, start_of, backbone, file, rank=2, alpha=4.0)
    refused(
        "lora.path='/nowhere': /nowhere: no such file or directory", start_of, backbone, "/nowhere"
    )
    other = "transformer_blocks/attn2/to_q/kernel"
    export_diffusers(file, adapters | randomize(backbone.transformer, [other]), SETTINGS, table)
    refused(
        "has adapters on parameters that lora.target_modules and train.parameters do not adapt: "
        f"{other}$",
        start_of,
        backbone,
        file,
    )
    assert read_start(Lora(rank=1, alpha=1.0, target_modules=("a",), path=None), [], table) == {}


# --- FLUX, SD3, SANA-1.5, Qwen-Image, Wan, Z-Image: other names, layers that differ within a list,
# and a last linear that is named like each block's

FLUX = {
    "in_channels": 16,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 12,
    "pooled_projection_dim": 10,
    "axes_dims_rope": (4, 4, 8),
}
SD3 = {
    "sample_size": 8,
    "patch_size": 2,
    "in_channels": 4,
    "num_layers": 4,
    "attention_head_dim": 8,
    "num_attention_heads": 4,
    "caption_projection_dim": 32,
    "joint_attention_dim": 12,
    "pooled_projection_dim": 10,
    "out_channels": 4,
    "pos_embed_max_size": 8,
    "dual_attention_layers": (1, 2),
    "qk_norm": "rms_norm",
}
SANA15 = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 4,
    "attention_head_dim": 8,
    "num_layers": 2,
    "num_cross_attention_heads": 2,
    "cross_attention_head_dim": 16,
    "cross_attention_dim": 32,
    "caption_channels": 12,
    "sample_size": 8,
    "qk_norm": "rms_norm_across_heads",
}
FLUX2 = {
    "in_channels": 16,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 12,
    "axes_dims_rope": (4, 4, 4, 4),
    "guidance_embeds": False,
}
QWEN_IMAGE = {
    "in_channels": 16,
    "out_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 12,
    "axes_dims_rope": (4, 6, 6),
}
ZIMAGE = {
    "in_channels": 4,
    "dim": 32,
    "n_layers": 2,
    "n_refiner_layers": 1,
    "n_heads": 2,
    "n_kv_heads": 2,
    "cap_feat_dim": 12,
    "axes_dims": [4, 6, 6],
    "axes_lens": [80, 8, 8],
}


WAN = {
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 12,
    "ffn_dim": 24,
    "num_layers": 2,
}


@dataclasses.dataclass
class Other:
    """A network of PyTorch, ours beside it, and a few numbers to run it on."""

    torch: torch.nn.Module
    state: nnx.State
    params: dict
    pipeline: object
    inputs: dict


def other(kind) -> Other:
    torch.manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))

    text = {
        "encoder_hidden_states": draw(1, 5, 12),
        "pooled_projections": draw(1, 10),
        "timestep": torch.tensor([0.4]),
    }
    if kind == "flux":
        network = FluxTransformer2DModel(**FLUX)

        def make():
            return flux.FluxTransformer2DModel(flux.FluxConfig.from_dict(FLUX), rngs=nnx.Rngs(0))

        inputs = text | {
            "hidden_states": draw(1, 6, 16),
            "img_ids": draw(6, 3),
            "txt_ids": torch.zeros(5, 3),
        }
        parts = ("scheduler", "vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
        pipeline = FluxPipeline(transformer=network, **dict.fromkeys(parts))
    elif kind == "flux2":
        network = Flux2Transformer2DModel(**FLUX2)

        def make():
            return flux2.Flux2Transformer2DModel(
                flux2.Flux2Config.from_dict(FLUX2), rngs=nnx.Rngs(0)
            )

        inputs = {name: text[name] for name in ("encoder_hidden_states", "timestep")}
        inputs |= {
            "hidden_states": draw(1, 6, 16),
            "img_ids": draw(6, 4),
            "txt_ids": torch.zeros(5, 4),
        }
        pipeline = Flux2KleinPipeline(
            transformer=network, **dict.fromkeys(("scheduler", "vae", "text_encoder", "tokenizer"))
        )
    elif kind == "qwen-image":
        network = QwenImageTransformer2DModel(**QWEN_IMAGE)

        def make():
            return qwen_image.QwenImageTransformer2DModel(
                qwen_image.QwenImageConfig.from_dict(QWEN_IMAGE), rngs=nnx.Rngs(0)
            )

        inputs = {name: text[name] for name in ("encoder_hidden_states", "timestep")}
        inputs |= {"hidden_states": draw(1, 6, 16), "img_shapes": [[(1, 2, 3)]]}
        pipeline = QwenImagePipeline(
            transformer=network, **dict.fromkeys(("scheduler", "vae", "text_encoder", "tokenizer"))
        )
    elif kind == "sana-1.5":
        network = SanaTransformer2DModel(**SANA15)

        def make():
            return sana.SanaTransformer2DModel(sana.SanaConfig.from_dict(SANA15), rngs=nnx.Rngs(0))

        inputs = {name: text[name] for name in ("encoder_hidden_states", "timestep")}
        inputs |= {"hidden_states": draw(1, 4, 8, 8)}
        pipeline = SanaPipeline(
            transformer=network, **dict.fromkeys(("scheduler", "vae", "text_encoder", "tokenizer"))
        )
    elif kind == "wan":
        network = WanTransformer3DModel(**WAN)

        def make():
            return wan.WanTransformer3DModel(wan.WanConfig.from_dict(WAN), rngs=nnx.Rngs(0))

        inputs = {name: text[name] for name in ("encoder_hidden_states", "timestep")}
        inputs |= {"hidden_states": draw(1, 4, 2, 4, 6)}
        pipeline = WanPipeline(
            transformer=network, **dict.fromkeys(("scheduler", "vae", "text_encoder", "tokenizer"))
        )
    elif kind == "zimage":
        network = ZImageTransformer2DModel(**ZIMAGE)

        def make():
            return zimage.ZImageTransformer2DModel(
                zimage.ZImageConfig.from_dict(ZIMAGE), rngs=nnx.Rngs(0)
            )

        inputs = {"x": [draw(4, 1, 8, 6)], "t": torch.tensor([0.4]), "cap_feats": [draw(5, 12)]}
        pipeline = ZImagePipeline(
            transformer=network, **dict.fromkeys(("scheduler", "vae", "text_encoder", "tokenizer"))
        )
    else:
        network = SD3Transformer2DModel(**SD3)

        def make():
            return sd3.SD3Transformer2DModel(sd3.SD3Config.from_dict(SD3), rngs=nnx.Rngs(0))

        inputs = text | {"hidden_states": draw(1, 4, 8, 8)}
        parts = (
            "scheduler",
            "vae",
            *(f"{part}{i}" for part in ("text_encoder", "tokenizer") for i in ("", "_2", "_3")),
        )
        pipeline = StableDiffusion3Pipeline(transformer=network, **dict.fromkeys(parts))
    network.eval().requires_grad_(False)
    for p in network.parameters():
        p.copy_(torch.randn_like(p) * (0.5 if p.ndim < 2 else p[0].numel() ** -0.5))
    state = nnx.split(nnx.eval_shape(make))[1]
    names = {name for e in parameter_table(state) for name in e.names}
    tensors = {k: v.numpy().copy() for k, v in network.state_dict().items() if k in names}
    return Other(network, state, from_torch(state, tensors), pipeline, inputs)


@torch.no_grad()
def run(network, inputs):
    return network(**inputs, return_dict=False)[0][0].numpy()


TARGETS = {
    "flux": r"transformer_blocks/attn/(to_[qkv]|add_[qkv]_proj|to_out/0|to_add_out)/kernel"
    r"|single_transformer_blocks/attn/to_[qkv]/kernel|proj_out/kernel",
    "sd3": r"transformer_blocks/[^/]+/(attn2?/(to_[qkv]|add_[qkv]_proj|to_out/0|to_add_out)"
    r"|ff/net/2)/kernel|proj_out/kernel",
    "flux2": r"transformer_blocks/(attn/(to_[qkv]|add_[qkv]_proj|to_out/0|to_add_out)"
    r"|ff(_context)?/linear_(in|out))/kernel"
    r"|single_transformer_blocks/attn/to_(qkv_mlp_proj|out)/kernel|proj_out/kernel",
    "qwen-image": r"transformer_blocks/(attn/(to_[qkv]|add_[qkv]_proj|to_out/0|to_add_out)"
    r"|(img|txt)_mlp/net/(0/proj|2)|img_mod/1)/kernel|proj_out/kernel",
    "sana-1.5": r"transformer_blocks/attn[12]/(to_[qkv]|to_out/0)/kernel",
    "wan": r"blocks/(attn[12]/(to_[qkv]|to_out/0)|ffn/net/(0/proj|2))/kernel|proj_out/kernel",
    "zimage": r"(layers|noise_refiner|context_refiner)/"
    r"(attention/(to_[qkv]|to_out/0)|feed_forward/w[123]|adaLN_modulation/0)/kernel",
}
REFUSED = {  # what pipelines say of keys MODULE.alpha
    "flux": "network_alphas.*metadata.*cannot",
    "flux2": "Invalid adapter checkpoint",
    "sd3": "Invalid LoRA check",
    "qwen-image": "Target modules .* not found",
    "sana-1.5": "Invalid LoRA check",
    "wan": "Invalid LoRA check",
    "zimage": "Target modules .* not found",
}
COUNTS = {
    "flux": 2 * 8 + 2 * 3 + 1,
    "flux2": 2 * 12 + 2 * 2 + 1,
    "sd3": 4 * 9 - 1 + 2 * 4 + 1,
    "qwen-image": 2 * 13 + 1,
    "sana-1.5": 2 * 8,
    "wan": 2 * 10 + 1,
    "zimage": 2 * 8 + 8 + 7,
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", first_is_quick(TARGETS))
def test_other_pipelines_read_our_file_as_the_merged_weights(kind, tmp_path):
    """Merged by us and given to PyTorch through the table of released names, which is tested for
    itself.
    """
    net = other(kind)
    table = parameter_table(net.state)
    base = run(net.torch, net.inputs)
    flat = flatten(net.params)
    paths = [p for p in flat if re.fullmatch(TARGETS[kind], p)]
    adapters = randomize(net.params, paths)
    merged = replace(
        net.params,
        {
            p: np.asarray(flat[p]) + SETTINGS.scale * np.asarray(ab["a"]) @ np.asarray(ab["b"])
            for p, ab in adapters.items()
        },
    )
    network = copy.deepcopy(net.torch)
    network.load_state_dict(
        {k: torch.from_numpy(v) for k, v in to_torch(net.state, merged).items()}, strict=False
    )
    want = run(network, net.inputs)

    file = tmp_path / "lora.safetensors"
    folder = tmp_path / "peft"
    export_diffusers(file, adapters, SETTINGS, table)
    export_peft(folder, adapters, SETTINGS, table)
    for source in (file, folder):
        got, settings = import_lora(source, table)
        same(got, adapters)
        assert settings == SETTINGS
    peft = PeftModel.from_pretrained(copy.deepcopy(net.torch), str(folder))
    adapted = {n.rpartition(".lora_A.")[0] for n, _ in peft.named_parameters() if ".lora_A." in n}
    # not one more: `single_transformer_blocks.N.proj_out` ends as the last linear's name does
    assert len(adapted) == len(load_file(file)) // 2 == COUNTS[kind]
    with warnings.catch_warnings(
        action="error"
    ):  # PEFT's way to say that the header names other modules than there are
        net.pipeline.load_lora_weights(str(file))
    for got in (run(net.torch, net.inputs), run(peft, net.inputs)):
        print(f"{kind}: {relative(got, want):.1e}")
        assert relative(got, want) < TOLERANCE
    assert relative(want, base) > 0.1
    adapter_metadata = net.torch.peft_config["default_0"].to_dict()
    loaded = get_peft_model_state_dict(net.torch, adapter_name="default_0")
    net.pipeline.save_lora_weights(
        tmp_path, loaded, transformer_lora_adapter_metadata=adapter_metadata
    )
    got, settings = import_lora(tmp_path / lora_files.DIFFUSERS_FILE, table)
    same(got, adapters)
    assert settings == SETTINGS
    net.pipeline.unload_lora_weights()

    # keys MODULE.alpha: FLUX's pipeline reads them, though not beside the header's alpha, and so do
    # we; others refuse them
    tensors = load_file(file)
    metadata = header(file)
    tensors |= {
        f"{m}.alpha": np.array(SETTINGS.alpha, np.float32)
        for m in {k.partition(".lora_")[0] for k in tensors}
    }
    for file_metadata in (None, metadata):
        save_file(tensors, file, metadata=file_metadata)
        got, settings = import_lora(file, table)
        same(got, adapters)
        assert settings == SETTINGS
        if kind == "flux" and file_metadata is None:
            net.pipeline.load_lora_weights(str(file))
            assert relative(run(net.torch, net.inputs), want) < TOLERANCE
            net.pipeline.unload_lora_weights()
        else:
            with pytest.raises(ValueError, match=REFUSED[kind]):
                net.pipeline.load_lora_weights(str(file))


def test_sanas_pipeline_refuses_keys_of_alpha_which_we_read(reference, table, tmp_path):
    file = tmp_path / "lora.safetensors"
    save_file({f"transformer.{k}": v for k, v in valid(**{f"{Q0}.alpha": EIGHT}).items()}, file)
    assert import_lora(file, table)[1] == LoraSettings(4, 8.0)
    with pytest.raises(ValueError, match="Invalid LoRA checkpoint"):
        reference[1].load_lora_weights(str(file))


# --- what is refused


def refused(message, call, *args, **kwargs):
    with pytest.raises(InputError) as error:
        call(*args, **kwargs)
    assert re.search(message, str(error.value)), str(error.value)
    assert "\n" not in str(error.value)
    return str(error.value)


def valid(**changes):
    """The tensors of one layer of one linear of `TRANSFORMER`, without a prefix."""

    def ones(*shape):
        return np.ones(shape, np.float32)

    return {f"{Q0}.lora_A.weight": ones(4, 32), f"{Q0}.lora_B.weight": ones(32, 4)} | changes


def without(tensors, *keys):
    return {k: v for k, v in tensors.items() if k not in keys}


def ONES(*shape):
    return np.ones(shape, np.float32)


EIGHT = np.array(8, np.float32)
BAD = {
    "keys of nobody": (
        valid(**{"other.q.lora_A.weight": ONES(4, 8), "norm.scale": ONES(1)}),
        None,
        r"2 key\(s\) fit no linear layer of this network: norm.scale, other.q.lora_A.weight",
    ),
    "not a linear": (
        {
            "patch_embed.proj.lora_A.weight": ONES(4, 8, 1, 1),
            "patch_embed.proj.lora_B.weight": ONES(32, 4, 1, 1),
        },
        None,
        r"2 key\(s\) fit no linear layer of this network: patch_embed.proj.lora_A",
    ),
    "said twice": (
        valid(**{f"transformer.{Q0}.lora_A.weight": ONES(4, 32)}),
        None,
        r"1 key\(s\) .*lora_A.weight",
    ),
    "half a pair": (
        without(valid(), f"{Q0}.lora_B.weight"),
        None,
        r"1 tensor\(s\) .*0.attn1.to_q.lora_B.weight is missing",
    ),
    "shapes": (
        {f"{Q0}.lora_A.weight": ONES(4, 31), f"{Q0}.lora_B.weight": ONES(32, 5)},
        None,
        r"2 tensor\(s\) .*lora_A.weight is \[4, 31\], expected \[4, 32\]; "
        r".*lora_B.weight is \[32, 5\], expected \[32, 4\]",
    ),
    "no rank": (
        {f"{Q0}.lora_A.weight": ONES(0, 32), f"{Q0}.lora_B.weight": ONES(32, 0)},
        None,
        r"2 tensor\(s\) do not fit",
    ),
    "not finite": (
        valid(**{f"{Q0}.lora_B.weight": np.full((32, 4), np.nan, np.float32)}),
        None,
        r"1 tensor\(s\) are not finite: .*lora_B.weight",
    ),
    "two values of alpha": (
        valid(**{f"{Q0}.alpha": EIGHT}),
        {"r": 4, "lora_alpha": 2},
        "alpha 8.0 by its key and 2.0 by",
    ),
    "no alpha": (valid(), {"r": 4}, "lora_alpha=None; accepted is a number"),
    "alpha of 0": (
        valid(),
        {"r": 4, "lora_alpha": 0},
        "to_q has alpha 0.0; accepted is a number above 0",
    ),
    "another rank": (
        valid(),
        {"r": 8, "lora_alpha": 8},
        "r=8 for .*to_q, its tensors are of rank 4",
    ),
    "DoRA": (valid(), {"r": 4, "lora_alpha": 8, "use_dora": True}, "accepted is plain LoRA"),
    "another kind": (
        valid(),
        {"r": 4, "lora_alpha": 8, "peft_type": "LOKR"},
        "not peft_type='LOKR'",
    ),
    "a pattern that is no expression": (
        valid(),
        {"r": 4, "lora_alpha": 8, "alpha_pattern": {"to_q(": 8}},
        r"the alpha_pattern 'to_q\('; accepted is a regular expression",
    ),
    "nothing": ({}, None, "holds no adapter"),
    "an alpha alone": ({f"{Q0}.alpha": EIGHT}, None, "holds no adapter"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_file_that_does_not_fit_is_one_line_that_says_why(case, table, tmp_path):
    tensors, config, message = BAD[case]
    file = tmp_path / "lora.safetensors"
    metadata = None
    if config is not None:
        metadata = {
            "lora_adapter_metadata": json.dumps({f"transformer.{k}": v for k, v in config.items()})
        }
    save_file(tensors, file, metadata=metadata)
    assert str(file) in refused(message, import_lora, file, table)


def test_the_file_that_those_were_made_from_is_accepted(table, tmp_path):
    save_file(valid(), tmp_path / "lora.safetensors")
    got, settings = import_lora(tmp_path, table)  # the only file of a directory
    assert settings == LoraSettings(4, 4.0)
    assert float(got[PATHS[0]]["a"].sum()) == 4 * 32


def test_what_is_no_lora_file_is_said_in_one_line(table, tmp_path):
    refused("nowhere: no such file or directory", import_lora, tmp_path / "nowhere", table)
    refused(
        "expected one of adapter_model.safetensors, .* found nothing", import_lora, tmp_path, table
    )
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(b"no")
    refused("bad.safetensors: not a readable safetensors file", import_lora, bad, table)
    (tmp_path / "other.safetensors").write_bytes(b"no")
    refused("found (bad|other).safetensors, (bad|other).safetensors", import_lora, tmp_path, table)
    save_file({f"base_model.model.{k}": v for k, v in valid().items()}, bad)
    named = tmp_path / "adapter_model.safetensors"
    bad.rename(named)
    refused(
        "adapter_config.json: no such file; an adapter of PEFT has its alpha there",
        import_lora,
        named,
        table,
    )
    named.rename(bad)
    (tmp_path / "adapter_config.json").write_text("[1]")
    refused(
        "adapter_config.json: its LoRA configuration is not a JSON object", import_lora, bad, table
    )
    save_file(valid(), bad, metadata={"lora_adapter_metadata": "{"})
    refused("bad.safetensors: its LoRA configuration is not a JSON object", import_lora, bad, table)


@pytest.mark.slow
@pytest.mark.parametrize("export", [export_diffusers, export_peft])
def test_an_export_that_would_change_nothing_leaves_nothing(export, table, adapters, tmp_path):
    path = tmp_path / "lora.safetensors"

    def zero(key):
        return {p: ab | {key: jnp.zeros_like(ab[key])} for p, ab in adapters.items()}

    apart = {  # A and B are not zero, their product is
        PATHS[0]: {
            "a": jnp.zeros((2, 32, 4)).at[:, :, 0].set(1),
            "b": jnp.zeros((2, 4, 32)).at[:, 1].set(1),
        }
    }
    for nothing in (zero("a"), zero("b"), {}, apart):
        refused(
            "lora.safetensors: nothing to export: these adapters change nothing",
            export,
            path,
            nothing,
            SETTINGS,
            table,
        )
    large = jax.tree.map(lambda x: x + 1e30, adapters)
    endless = r"24 adapter\(s\) are not finite in float16: .*0.attn1.to_q.lora_A.weight"
    refused(endless, export, path, large, SETTINGS, table, dtype=jnp.float16)
    assert not list(tmp_path.iterdir())
    export(path, adapters, SETTINGS, table)
    before = import_lora(path, table)
    refused("nothing to export", export, path, zero("b"), SETTINGS, table)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    same(import_lora(path, table)[0], before[0])


@pytest.mark.parametrize("export", [export_diffusers, export_peft])
def test_a_file_that_does_not_read_back_as_written_does_not_appear(
    export, table, adapters, tmp_path, monkeypatch
):
    def lossy(tensors, file, metadata):
        save_file(dict(list(tensors.items())[:-1]), file, metadata=metadata)

    monkeypatch.setattr(lora_files, "save_file", lossy)
    with pytest.raises(RunError, match=r"lora.safetensors: does not read back as it was written"):
        export(tmp_path / "lora.safetensors", adapters, SETTINGS, table)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("export", [export_diffusers, export_peft])
def test_a_file_that_is_larger_than_the_process_may_write_is_one_line(
    export, table, adapters, tmp_path
):
    """safetensors raises an error of its own, with the system's words in its text."""
    most, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        with pytest.raises(
            RunError, match=r"^file larger than allowed while writing [^\n]*\.safetensors$"
        ):
            export(tmp_path / "lora.safetensors", adapters, SETTINGS, table)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    assert not list(tmp_path.iterdir())


def test_a_second_export_takes_the_place_of_the_first(table, adapters, tmp_path):
    for export, path in (
        (export_diffusers, tmp_path / "a.safetensors"),
        (export_peft, tmp_path / "b"),
    ):
        export(path, adapters, SETTINGS, table)
        export(path, {PATHS[0]: adapters[PATHS[0]]}, LoraSettings(4, 3.0), table)
        got, settings = import_lora(path, table)
        same(got, {PATHS[0]: adapters[PATHS[0]]})
        assert settings.alpha == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.safetensors", "b"]


def test_an_export_to_where_it_cannot_go_is_refused(table, adapters, tmp_path):
    refused(
        "one file; give it a name that ends in .safetensors",
        export_diffusers,
        tmp_path / "lora",
        adapters,
        SETTINGS,
        table,
    )
    (tmp_path / "notes.txt").write_text("mine")
    refused(
        "holds notes.txt, which an export would remove",
        export_peft,
        tmp_path,
        adapters,
        SETTINGS,
        table,
    )
    refused("notes.txt: is a file", export_peft, tmp_path / "notes.txt", adapters, SETTINGS, table)
    file = tmp_path / "lora.safetensors"
    refused(
        "no linear layer of this network: blocks/q/kernel",
        export_diffusers,
        file,
        {"blocks/q/kernel": {}},
        SETTINGS,
        table,
    )
    message = (
        r"adapter caption_projection/linear_1/kernel: a is \[16, 4\]; this network wants \[16, 3\]"
    )
    refused(message, export_diffusers, file, adapters, LoraSettings(3, 3.0), table)
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]
