"""LoRA files in the layouts of other programs; diffusers' converters say what their keys mean."""

import re

import numpy as np
import pytest
import torch
from diffusers import (
    Flux2KleinPipeline,
    FluxPipeline,
    QwenImagePipeline,
    WanPipeline,
    ZImagePipeline,
)
from peft import LoraConfig, get_peft_model
from safetensors.numpy import save_file

from solrl_jax.errors import InputError
from solrl_jax.models.loading.weights import parameter_table
from solrl_jax.rl.trainable.lora_files import import_lora
from solrl_jax.rl.trainable.lora_settings import LoraSettings
from tests.rl.test_lora_files import WAN, other

RANK = 4
WIDTH = 32  # of the small networks of `other`
QKV = 3 * WIDTH
MLP = 4 * WIDTH
TOLERANCE = 1e-6  # largest difference of a product B A over its largest value


def make(layers, parts=("lora_A.weight", "lora_B.weight"), alpha=None, rank=RANK):
    """Random factors of layers, {name: (outputs, inputs)}, under the keys of a layout."""
    rng = np.random.default_rng(0)
    tensors = {}
    for name, (n_out, n_in) in layers.items():
        tensors[f"{name}.{parts[0]}"] = rng.standard_normal((rank, n_in)).astype(np.float32)
        tensors[f"{name}.{parts[1]}"] = rng.standard_normal((n_out, rank)).astype(np.float32)
        if alpha is not None:
            dtype = np.int64 if isinstance(alpha, int) else np.float32
            tensors[f"{name}.alpha"] = np.array(alpha, dtype)
    return tensors


def our_products(file, state, **options):
    """The change of every linear layer's weight [out, in] by its diffusers name, without zeros."""
    adapters, settings = import_lora(file, parameter_table(state), **options)
    products = {}
    for entry in parameter_table(state):
        if entry.key not in adapters:
            continue
        a, b = (np.asarray(adapters[entry.key][part]) for part in "ab")
        for layer, name in enumerate(entry.names):
            product = settings.scale * ((a[layer] @ b[layer]) if entry.stacked else a @ b).T
            if product.any():
                products[name.removesuffix(".weight")] = product
    return products


def their_products(pipeline, file):
    """The same by diffusers, which folds alpha into the factors that it converts."""
    tensors = pipeline.lora_state_dict(str(file))
    tensors = tensors[0] if isinstance(tensors, tuple) else tensors
    products = {}
    for key, a in tensors.items():
        if key.endswith("lora_A.weight"):
            b = tensors[key.replace("lora_A", "lora_B")]
            name = key.removeprefix("transformer.").removesuffix(".lora_A.weight")
            products[name] = (b @ a).numpy()
    return products


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, want in theirs.items():
        np.testing.assert_allclose(
            ours[name], want, rtol=0, atol=TOLERANCE * np.abs(want).max(), err_msg=name
        )


KOHYA = ("lora_down.weight", "lora_up.weight")
DOUBLE = {
    "double_blocks.1.img_attn.qkv": (QKV, WIDTH),
    "double_blocks.1.txt_attn.qkv": (QKV, WIDTH),
    "double_blocks.0.img_attn.proj": (WIDTH, WIDTH),
    "double_blocks.0.txt_attn.proj": (WIDTH, WIDTH),
}
FLUX1 = DOUBLE | {
    "double_blocks.0.img_mlp.0": (MLP, WIDTH),
    "double_blocks.0.txt_mlp.2": (WIDTH, MLP),
    "double_blocks.1.img_mod.lin": (6 * WIDTH, WIDTH),
    "single_blocks.1.linear2": (WIDTH, WIDTH + MLP),
    "single_blocks.1.modulation.lin": (3 * WIDTH, WIDTH),
}
FLUX2 = DOUBLE | {
    "single_blocks.0.linear1": (QKV + 6 * WIDTH, WIDTH),
    "single_blocks.0.linear2": (WIDTH, WIDTH + 3 * WIDTH),
    "double_blocks.0.img_mlp.0": (6 * WIDTH, WIDTH),
    "double_blocks.0.txt_mlp.2": (WIDTH, 3 * WIDTH),
    "img_in": (WIDTH, 16),
    "final_layer.linear": (16, WIDTH),
}
QWEN_IMAGE = {
    "transformer_blocks.1.attn.to_q": (WIDTH, WIDTH),
    "transformer_blocks.0.attn.to_out.0": (WIDTH, WIDTH),
    "transformer_blocks.0.attn.add_k_proj": (WIDTH, WIDTH),
    "transformer_blocks.1.attn.to_add_out": (WIDTH, WIDTH),
    "transformer_blocks.0.img_mlp.net.0.proj": (MLP, WIDTH),
    "transformer_blocks.1.txt_mlp.net.2": (WIDTH, MLP),
    "transformer_blocks.1.img_mod.1": (6 * WIDTH, WIDTH),
}
WAN_WIDTH = 16  # of its network of `other`
WAN_BLOCKS = {
    f"blocks.{i}.{layer}": sizes
    for i in range(2)
    for layer, sizes in {
        **{f"self_attn.{x}": (WAN_WIDTH, WAN_WIDTH) for x in "qkvo"},
        **{f"cross_attn.{x}": (WAN_WIDTH, WAN_WIDTH) for x in "qkvo"},
        "ffn.0": (WAN["ffn_dim"], WAN_WIDTH),
        "ffn.2": (WAN_WIDTH, WAN["ffn_dim"]),
    }.items()
}
WAN_OTHERS = {
    "text_embedding.0": (WAN_WIDTH, WAN["text_dim"]),
    "text_embedding.2": (WAN_WIDTH, WAN_WIDTH),
    "time_embedding.0": (WAN_WIDTH, 256),
    "time_embedding.2": (WAN_WIDTH, WAN_WIDTH),
    "time_projection.1": (6 * WAN_WIDTH, WAN_WIDTH),
    "head.head": (4 * WAN["out_channels"], WAN_WIDTH),
}
Z_IMAGE = {
    "layers.1.attention.to_q": (WIDTH, WIDTH),
    "noise_refiner.0.attention.to_out.0": (WIDTH, WIDTH),
}


def kohya(layers):
    return {f"lora_unet_{name.replace('.', '_')}": sizes for name, sizes in layers.items()}


def prefixed(prefix, layers):
    return {prefix + name: sizes for name, sizes in layers.items()}


CASES = {
    "kohya, FLUX.1": ("flux", FluxPipeline, make(kohya(FLUX1), KOHYA, alpha=2.0)),
    "kohya, FLUX.1, without alpha": ("flux", FluxPipeline, make(kohya(FLUX1), KOHYA)),
    "ComfyUI, FLUX.2": (
        "flux2",
        Flux2KleinPipeline,
        make(prefixed("diffusion_model.", FLUX2)),
    ),
    "PEFT on BFL's names, FLUX.2": (
        "flux2",
        Flux2KleinPipeline,
        make(prefixed("base_model.model.", FLUX2)),
    ),
    "ai-toolkit, Z-Image": (
        "zimage",
        ZImagePipeline,
        make(prefixed("diffusion_model.", Z_IMAGE), alpha=3.0),
    ),
    "kohya, Qwen-Image": (
        "qwen-image",
        QwenImagePipeline,
        make(kohya(QWEN_IMAGE), KOHYA, alpha=3.0),
    ),
    "ComfyUI, Qwen-Image": (
        "qwen-image",
        QwenImagePipeline,
        make(prefixed("diffusion_model.", QWEN_IMAGE)),
    ),
    "kohya, Wan": ("wan", WanPipeline, make(kohya(WAN_BLOCKS), KOHYA, alpha=3)),
    "ComfyUI, Wan": (
        "wan",
        WanPipeline,
        make(prefixed("diffusion_model.", WAN_BLOCKS | WAN_OTHERS)),
    ),
    "ai-toolkit, Wan": (
        "wan",
        WanPipeline,
        make(prefixed("diffusion_model.", WAN_BLOCKS), alpha=3.0),
    ),
    "kohya, Z-Image": ("zimage", ZImagePipeline, make(kohya(Z_IMAGE), KOHYA, alpha=3.0)),
}


@pytest.mark.parametrize("case", CASES)
def test_keys_mean_what_diffusers_makes_of_them(case, tmp_path):
    kind, pipeline, tensors = CASES[case]
    file = tmp_path / "lora.safetensors"
    save_file(tensors, file)
    theirs = their_products(pipeline, file)
    assert len(theirs) >= len(tensors) // 3
    assert_same(our_products(file, other(kind).state), theirs)


def test_a_fused_layer_of_flux_is_split_by_outputs(tmp_path):
    """diffusers converts `linear1` at the released width alone."""
    file = tmp_path / "lora.safetensors"
    key = "lora_unet_single_blocks_0_linear1"
    tensors = make({key: (QKV + MLP, WIDTH)}, KOHYA, alpha=2.0)
    save_file(tensors, file)
    whole = 2.0 / RANK * tensors[f"{key}.lora_up.weight"] @ tensors[f"{key}.lora_down.weight"]
    block = "single_transformer_blocks.0"
    names = [f"{block}.attn.to_{part}" for part in "qkv"] + [f"{block}.proj_mlp"]
    parts = np.split(whole, [WIDTH, 2 * WIDTH, 3 * WIDTH])
    assert_same(our_products(file, other("flux").state), dict(zip(names, parts, strict=True)))


def test_a_final_modulation_has_the_scale_first(tmp_path):
    """Released weights are converted so (`swap_scale_shift` of diffusers)."""
    file = tmp_path / "lora.safetensors"
    key = "lora_unet_final_layer_adaLN_modulation_1"
    tensors = make({key: (2 * WIDTH, WIDTH)}, KOHYA)
    save_file(tensors, file)
    shift, scale = np.split(
        tensors[f"{key}.lora_up.weight"] @ tensors[f"{key}.lora_down.weight"], 2
    )
    want = {"norm_out.linear": np.concatenate([scale, shift])}
    assert_same(our_products(file, other("flux").state), want)
    assert_same(their_products(FluxPipeline, file), {
        "norm_out.linear": want["norm_out.linear"]
    })  # fmt: skip


def test_kohyas_names_of_sd3(tmp_path):
    """diffusers reads none of them; they are those of the released single file."""
    file = tmp_path / "lora.safetensors"
    block = "lora_unet_joint_blocks_1"
    tensors = make(
        {
            f"{block}_x_block_attn_qkv": (QKV, WIDTH),
            f"{block}_context_block_attn_qkv": (QKV, WIDTH),
            f"{block}_x_block_attn2_proj": (WIDTH, WIDTH),
            f"{block}_x_block_mlp_fc1": (MLP, WIDTH),
            "lora_unet_joint_blocks_3_context_block_adaLN_modulation_1": (2 * WIDTH, WIDTH),
        },
        KOHYA,
    )
    save_file(tensors, file)

    def product(name):
        return tensors[f"{name}.lora_up.weight"] @ tensors[f"{name}.lora_down.weight"]

    ours = "transformer_blocks.1."
    want = {}
    for side, names in (("x", "to_{}"), ("context", "add_{}_proj")):
        parts = np.split(product(f"{block}_{side}_block_attn_qkv"), 3)
        for letter, part in zip("qkv", parts, strict=True):
            want[f"{ours}attn.{names.format(letter)}"] = part
    want[f"{ours}attn2.to_out.0"] = product(f"{block}_x_block_attn2_proj")
    want[f"{ours}ff.net.0.proj"] = product(f"{block}_x_block_mlp_fc1")
    shift, scale = np.split(product("lora_unet_joint_blocks_3_context_block_adaLN_modulation_1"), 2)
    want["transformer_blocks.3.norm1_context.linear"] = np.concatenate([scale, shift])
    assert_same(our_products(file, other("sd3").state), want)


@pytest.mark.parametrize(
    ("prefix", "parts"),
    [
        ("base_model.model.", ("lora_A.default.weight", "lora_B.default.weight")),
        ("transformer.", ("lora.down.weight", "lora.up.weight")),
        ("transformer.", ("lora_down.weight", "lora_up.weight")),
        ("", ("lora_A.weight", "lora_B.weight")),
    ],
)
def test_older_names_of_the_factors(prefix, parts, tmp_path):
    file = tmp_path / "lora.safetensors"
    name = "transformer_blocks.0.attn.to_q"
    tensors = make({f"{prefix}{name}": (WIDTH, WIDTH)}, parts)
    save_file(tensors, file)
    product = tensors[f"{prefix}{name}.{parts[1]}"] @ tensors[f"{prefix}{name}.{parts[0]}"]
    assert_same(our_products(file, other("flux").state), {name: product})


def test_ranks_and_alphas_by_pattern_mean_what_peft_makes_of_them(tmp_path):
    net = other("flux")
    config = LoraConfig(
        r=8,
        lora_alpha=4,
        target_modules=["to_q", "to_k", "to_v"],
        rank_pattern={"to_q": 3, "single_transformer_blocks.1.attn.to_k": 5},
        alpha_pattern={"to_k": 7, "absent": 9},
        init_lora_weights=False,
    )
    torch.manual_seed(0)
    model = get_peft_model(net.torch, config)
    model.save_pretrained(tmp_path)
    want = {
        name.removeprefix("base_model.model."): module.get_delta_weight("default").detach().numpy()
        for name, module in model.named_modules()
        if hasattr(module, "lora_A")
    }
    got = our_products(tmp_path, net.state)
    assert_same(got, want)
    _, settings = import_lora(tmp_path, parameter_table(net.state))
    assert settings == LoraSettings(8, 8.0)


def test_a_pattern_for_the_only_module_is_its_alpha(tmp_path):
    net = other("flux")
    config = LoraConfig(
        r=4,
        lora_alpha=4,
        target_modules=r"transformer_blocks\.0\.attn\.to_q",
        alpha_pattern={"to_q": 8},
    )
    get_peft_model(net.torch, config).save_pretrained(tmp_path)
    _, settings = import_lora(tmp_path, parameter_table(net.state))
    assert settings == LoraSettings(4, 8.0)


def test_adapters_of_text_encoders_are_reported_and_left_out_on_request(tmp_path):
    file = tmp_path / "lora.safetensors"
    name = "transformer_blocks.0.attn.to_q"
    layers = {f"transformer.{name}": (WIDTH, WIDTH)}
    text = {"text_encoder.text_model.encoder.layers.0.self_attn.q_proj": (8, 8)}
    save_file(make(layers | text), file)
    state = other("flux").state
    with pytest.raises(InputError, match=r"2 key\(s\) belong to text encoders, .*q_proj"):
        import_lora(file, parameter_table(state))
    assert our_products(file, state, skip_text_encoders=True).keys() == {name}


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("dora_scale", r"\(names of diffusers\): is a DoRA, which is not supported"),
        ("lora_magnitude_vector", "is a DoRA"),
        ("lora_B.bias", "holds trained biases or whole weights"),
        ("diff", "holds trained biases or whole weights"),
    ],
)
def test_other_kinds_of_adapters_are_refused_by_name(extra, message, tmp_path):
    file = tmp_path / "lora.safetensors"
    name = "transformer.transformer_blocks.0.attn.to_q"
    tensors = make({name: (WIDTH, WIDTH)}) | {f"{name}.{extra}": np.ones(WIDTH, np.float32)}
    save_file(tensors, file)
    with pytest.raises(InputError, match=message):
        import_lora(file, parameter_table(other("flux").state))


def test_a_refusal_names_five_keys_and_how_many_more(tmp_path):
    file = tmp_path / "lora.safetensors"
    save_file(make({f"lora_unet_stranger_{i}": (8, 8) for i in range(300)}, KOHYA), file)
    with pytest.raises(
        InputError, match=r"\(names of kohya\): 600 key\(s\) fit no linear"
    ) as error:
        import_lora(file, parameter_table(other("flux").state))
    assert re.search(r"and 595 more$", str(error.value))
    assert len(str(error.value)) < 500
