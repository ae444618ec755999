"""Which linears are quantized: the peers' sets at the released sizes, from shapes alone, and what
the report tells of them.
"""

import dataclasses
import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner
from flax import nnx
from safetensors.numpy import load_file, save_file

from solrl_jax.cli import main
from solrl_jax.config.presets import resolve
from solrl_jax.models.backbone import load_backbone
from solrl_jax.models.flux.transformer import FluxConfig, FluxTransformer2DModel
from solrl_jax.models.locate import EMBEDDED_FOLDER, open_model
from solrl_jax.models.qwen_image.transformer import QwenImageConfig, QwenImageTransformer2DModel
from solrl_jax.models.sana.transformer import SanaConfig, SanaTransformer2DModel
from solrl_jax.models.sd3.transformer import SD3Config, SD3Transformer2DModel
from solrl_jax.models.zimage.transformer import ZImageConfig, ZImageTransformer2DModel
from solrl_jax.parallel.sharding import make_mesh
from solrl_jax.quant.formats import FORMATS
from solrl_jax.quant.matmul import dequantize
from solrl_jax.quant.nvfp4 import quantize
from solrl_jax.rl.explore.quantized_layers import quantized_paths, report, table, totals, why_kept
from solrl_jax.rl.trainable.trainable import flatten

NETWORKS = {  # the released ones, and small ones of the same kind
    "sana": (
        SanaTransformer2DModel,
        SanaConfig,
        {
            "num_layers": 20,
            "num_attention_heads": 70,
            "num_cross_attention_heads": 20,
            "cross_attention_head_dim": 112,
            "cross_attention_dim": 2240,
        },
        {
            "num_layers": 2,
            "num_attention_heads": 4,
            "num_cross_attention_heads": 2,
            "cross_attention_head_dim": 64,
            "cross_attention_dim": 128,
        },
    ),
    "sd3": (
        SD3Transformer2DModel,
        SD3Config,
        {
            "num_layers": 38,
            "num_attention_heads": 38,
            "caption_projection_dim": 2432,
            "qk_norm": "rms_norm",
            "pos_embed_max_size": 192,
            "dual_attention_layers": (),
        },
        {
            "num_layers": 3,
            "num_attention_heads": 2,
            "caption_projection_dim": 128,
            "qk_norm": "rms_norm",
            "pos_embed_max_size": 9,
            "dual_attention_layers": (),
        },
    ),
    "sd3-medium": (
        SD3Transformer2DModel,
        SD3Config,
        {
            "num_layers": 24,
            "num_attention_heads": 24,
            "caption_projection_dim": 1536,
            "qk_norm": "rms_norm",
            "pos_embed_max_size": 384,
            "dual_attention_layers": tuple(range(13)),
        },
        {
            "num_layers": 3,
            "num_attention_heads": 2,
            "caption_projection_dim": 128,
            "qk_norm": "rms_norm",
            "pos_embed_max_size": 9,
            "dual_attention_layers": (0,),
        },
    ),
    "sana-600m": (
        SanaTransformer2DModel,
        SanaConfig,
        {
            "num_layers": 28,
            "num_attention_heads": 36,
            "num_cross_attention_heads": 16,
            "cross_attention_head_dim": 72,
            "cross_attention_dim": 1152,
        },
        {
            "num_layers": 2,
            "num_attention_heads": 2,
            "num_cross_attention_heads": 2,
            "cross_attention_head_dim": 32,
            "cross_attention_dim": 64,
            "qk_norm": "rms_norm_across_heads",
        },
    ),
    "flux1": (
        FluxTransformer2DModel,
        FluxConfig,
        {"guidance_embeds": True},
        {
            "guidance_embeds": True,
            "num_layers": 2,
            "num_single_layers": 2,
            "num_attention_heads": 1,
        },
    ),
    "qwen-image": (
        QwenImageTransformer2DModel,
        QwenImageConfig,
        {},
        {"num_layers": 2, "num_attention_heads": 1},
    ),
    "zimage": (
        ZImageTransformer2DModel,
        ZImageConfig,
        {},
        {"dim": 256, "n_heads": 2, "n_kv_heads": 2, "n_layers": 2},
    ),
}


def shapes(name, small=False):
    """The parameters of a network in BF16, abstract."""
    network, config, *sizes = NETWORKS[name]
    model = nnx.eval_shape(lambda: network(config.from_dict(sizes[small]), rngs=nnx.Rngs(0)))
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), nnx.to_pure_dict(nnx.state(model))
    )


def rules(name):
    return resolve(f"{name}_sol_rl_hpsv2").model.quantization


def modules(paths):
    """Paths without their common ending and, for SD3, without the range of layers."""
    return {re.sub(r"/\d+-\d+/", "/", path.removesuffix("/kernel")) for path in paths}


ATTENTION = {
    f"attn/{x}"
    for x in (
        "to_q",
        "to_k",
        "to_v",
        "to_out/0",
        "add_q_proj",
        "add_k_proj",
        "add_v_proj",
        "to_add_out",
    )
}
ZIMAGE = {f"attention/{x}" for x in ("to_q", "to_k", "to_v", "to_out/0")} | {
    f"feed_forward/w{i}" for i in (1, 2, 3)
}
PEERS = {  # the modules that are quantized, and how many linears they are in the peers' layout
    "sana": (
        {
            f"transformer_blocks/{x}"
            for x in ("attn2/to_k", "attn2/to_v", "ff/conv_inverted", "ff/conv_point")
        },
        60,
    ),
    "sd3": ({f"transformer_blocks/ff/net/{x}" for x in ("0/proj", "2")}, 76),
    # the authors' rebuttal calls it fully quantized: every linear of the blocks but the modulation
    "sd3-medium": (
        {
            f"transformer_blocks/{x}"
            for x in (
                *ATTENTION,
                *(f"attn2/{x}" for x in ("to_q", "to_k", "to_v", "to_out/0")),
                *(f"{ff}/net/{x}" for ff in ("ff", "ff_context") for x in ("0/proj", "2")),
            )
        },
        24 * 12 - 3 + 13 * 4,
    ),
    "sana-600m": (
        {
            f"transformer_blocks/{x}"
            for x in ("attn2/to_k", "attn2/to_v", "ff/conv_inverted", "ff/conv_point")
        },
        28 * 3,
    ),
    "flux1": (
        {f"transformer_blocks/{x}" for x in ATTENTION | {"norm1/linear", "norm1_context/linear"}}
        | {
            f"transformer_blocks/{ff}/net/{x}"
            for ff in ("ff", "ff_context")
            for x in ("0/proj", "2")
        }
        | {
            f"single_transformer_blocks/{x}"
            for x in ("attn/to_q", "attn/to_k", "attn/to_v", "norm/linear")
        }
        | {f"single_transformer_blocks/{x}" for x in ("proj_mlp", "proj_out")}
        | {"proj_out"},
        19 * 14 + 38 * 6 + 1,
    ),
    # none of the peers knows it: those of the blocks, without what modulates
    "qwen-image": (
        {
            f"transformer_blocks/{x}"
            for x in (
                *ATTENTION,
                *(f"{mlp}/net/{x}" for mlp in ("img_mlp", "txt_mlp") for x in ("0/proj", "2")),
            )
        },
        60 * 12,
    ),
    # none of the peers knows it: those of the blocks, as in FLUX.1, without what modulates
    "zimage": (
        {
            f"{stack}/{x}"
            for stack in ("layers", "noise_refiner", "context_refiner")
            for x in ZIMAGE
        },
        (30 + 2 + 2) * 7,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_released_sizes_quantize_what_the_peers_do(name):
    params = shapes(name)
    (expected, count) = PEERS[name]
    paths = quantized_paths(params, rules(name), FORMATS["nvfp4"])
    assert modules(paths) == expected
    num_quantized = totals(report(params, rules(name), FORMATS["nvfp4"]))["quantized"]
    assert (
        num_quantized - {"sana": 20, "sana-600m": 28}.get(name, 0) == count
    )  # keys and values of SANA's text are one linear there


@pytest.mark.parametrize("name", NETWORKS)
def test_the_same_rules_choose_the_same_modules_in_a_small_network(name):
    assert (
        modules(quantized_paths(shapes(name, small=True), rules(name), FORMATS["nvfp4"]))
        == PEERS[name][0]
    )


@pytest.mark.parametrize("name", ["sana", "sd3", "flux1"])
def test_embedded_pipelines_have_the_rules_of_the_released_ones(name):
    assert resolve("tiny", [f"model=tiny-{name.removesuffix('1')}"]).model.quantization == rules(
        name
    )


def test_each_rule_matters():
    params = shapes("sana")
    mine = rules("sana")

    def chosen(**changes):
        return modules(
            quantized_paths(params, dataclasses.replace(mine, **changes), FORMATS["nvfp4"])
        )

    base = PEERS["sana"][0]
    assert base - chosen(fused=()) == {
        "transformer_blocks/attn2/to_k",
        "transformer_blocks/attn2/to_v",
    }
    narrow = {f"transformer_blocks/{x}" for x in ("attn1/to_out/0", "attn2/to_q", "attn2/to_out/0")}
    assert chosen(min_width_ratio=0.99) - base == narrow
    assert chosen(
        modules_to_not_convert=tuple(s for s in mine.modules_to_not_convert if s != "time_embed")
    ) - base == {"time_embed/linear"}
    assert chosen(modules_to_not_convert=(*mine.modules_to_not_convert, "attn2")) == {
        x for x in base if "ff" in x
    }


def test_reasons_are_told():
    reasons = why_kept(shapes("sana"), rules("sana"))
    assert reasons["transformer_blocks/attn1/to_q/kernel"] == "skip attn1/to_q"
    assert reasons["transformer_blocks/attn2/to_q/kernel"] == "min_dim 2240"
    assert reasons["transformer_blocks/attn2/to_k/kernel"] == ""
    assert not any(
        "patch_embed" in path or "conv_depth" in path for path in reasons
    )  # convolutions
    everything = flatten(shapes("sana"))
    assert all(
        path in reasons
        for path in everything
        if path.endswith("/kernel") and len(everything[path].shape) < 4
    )


@pytest.mark.parametrize("name", ["nvfp4", "fp8", "bf16"])
def test_bytes_before_and_after(name):
    """Of the widest linear of FLUX.1-dev, and in all."""
    rows = report(shapes("flux1"), rules("flux1"), FORMATS[name])
    row = next(row for row in rows if row.path == "single_transformer_blocks/proj_out/kernel")
    assert (row.layers, row.n_in, row.n_out) == (38, 15360, 3072)
    weights = 38 * 15360 * 3072
    assert row.bytes_before == 2 * weights
    scales = {"nvfp4": 38 * 4, "fp8": 38 * 3072 * 4}.get(name, 0)
    assert row.bytes_after == weights * FORMATS[name].bits_per_weight / 8 + scales
    sums = totals(rows)
    assert (
        sums["bytes_before"] - sums["quantized_bytes_before"]
        == sums["bytes_after"] - sums["quantized_bytes_after"]
    )
    if name == "bf16":
        assert sums["quantized"] == 0
        assert {row.reason_kept for row in rows} == {
            "bf16",
            *(f"skip {s}" for s in rules("flux1").modules_to_not_convert),
        }
    else:
        assert sums["quantized_bytes_after"] / sums["quantized_bytes_before"] == pytest.approx(
            FORMATS[name].bits_per_weight / 16,
            rel=2e-3,  # the float32 scales
        )
    lines = table(rows, FORMATS[name]).splitlines()
    assert len(lines) == len(rows) + 1
    assert lines[-1].startswith(
        f"{sums['quantized']} of {sums['linears']} linear layers in {name}: "
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"modules_to_not_convert": ("time_embed", "atn1")},
            r"^model\.quantization\.modules_to_not_convert: 'atn1' is in the name of no linear "
            r"layer; there are .*attn1/to_q",
        ),
        (
            {"fused": ("attn2/to_[kv]",)},
            r"^model\.quantization\.fused: 'attn2/to_\[kv\]' matches no linear layer; "
            r"there are .*attn1/to_q",
        ),
        (
            {"min_width_ratio": 9.0},
            r"^model\.quantization: leaves no linear layer to quantize "
            r"\(.*3 by skip time_embed, .*7 by min_dim 1152.*\)$",
        ),
    ],
)
def test_rules_that_cannot_be_meant_are_refused(changes, message):
    wrong = dataclasses.replace(rules("sana"), **changes)
    with pytest.raises(ValueError, match=message) as error:
        quantized_paths(shapes("sana", small=True), wrong, FORMATS["fp8"])
    assert "\n" not in str(error.value)
    if "min_width_ratio" in changes:  # to one that quantizes nothing it is all the same
        assert quantized_paths(shapes("sana", small=True), wrong, FORMATS["bf16"]) == ()


@pytest.mark.slow
def test_the_command_lists_them_without_loading_weights(monkeypatch):
    def load(*_):
        raise AssertionError("weights are loaded")

    monkeypatch.setattr("solrl_jax.models.loading.component.Component.load", load)

    def call(*arguments):
        return (
            CliRunner()
            .invoke(main.cli, ["layers", "tiny", *arguments], catch_exceptions=False)
            .output
        )

    summary = json.loads(
        call("--json", "rollout.explore.precision=fp8", "rollout.explore.correction_rank=16")
    )
    of = (
        open_model("embedded:tiny-sana").transformer.abstract_params(jnp.bfloat16),
        rules("sana"),
        FORMATS["fp8"],
    )
    explore = resolve(
        "tiny", ["rollout.explore.correction_rank=16", "rollout.explore.exact_steps=1"]
    ).rollout.explore
    rows = report(*of, explore)
    for row, without in zip(
        rows, report(*of), strict=True
    ):  # two factors of rank 16 a matrix, in BF16
        beside = 0 if row.reason_kept else row.layers * 16 * (row.n_in + row.n_out) * 2
        assert row.bytes_after == without.bytes_after + beside
    assert summary.pop("exploration").startswith("fp8 (")
    assert summary.pop("per_linear") == [dataclasses.asdict(row) | {"errors": []} for row in rows]
    assert summary == totals(rows)
    assert (summary["quantized"], summary["linears"]) == (16, 46)
    text = call()
    assert "conv_point/kernel" in text
    assert "stays: skip attn1/to_q" in text
    assert "16 of 46 linear layers in nvfp4" in text


@pytest.mark.slow
def test_a_correction_counts_no_more_directions_than_a_linear_has_inputs():
    """The last projection of tiny-flux has 128 inputs and 32 outputs; it is quantized whatever the
    rank.
    """
    params = open_model("embedded:tiny-flux").transformer.abstract_params(jnp.bfloat16)
    of = params, resolve("tiny", ["model=tiny-flux"]).model.quantization, FORMATS["nvfp4"]
    plain = {row.path: row for row in report(*of)}
    for rank, counted in ((0, 0), (12, 12), (127, 127), (128, 128), (500, 128)):
        explore = resolve("tiny", [f"rollout.explore.correction_rank={rank}"]).rollout.explore
        rows = {row.path: row for row in report(*of, explore)}
        last = rows["proj_out/kernel"]
        assert (last.n_in, last.n_out, last.reason_kept) == (128, 32, "")
        assert last.bytes_after - plain["proj_out/kernel"].bytes_after == 2 * counted * (128 + 32)
        assert {path for path, row in rows.items() if not row.reason_kept} == set(
            quantized_paths(*of)
        )
        assert all(row.bytes_after == row.bytes_before for row in rows.values() if row.reason_kept)


@pytest.mark.exhaustive
def test_the_report_measures_what_each_layer_loses(tmp_path):
    """Against the same sum by NumPy, for blocks of weights with ever heavier tails; a coarser
    format loses more.
    """
    shutil.copytree(EMBEDDED_FOLDER / "tiny-sana", tmp_path / "model")
    path = tmp_path / "model" / "transformer" / "diffusion_pytorch_model.safetensors"
    weights = load_file(path)
    for name in weights:
        if match := re.match(r"transformer_blocks\.(\d+)\..*weight", name):
            weights[name] = np.sign(weights[name]) * abs(weights[name]) ** (1 + int(match[1]))
    save_file(weights, path)

    def measured(precision):
        settings = (f"model.path={tmp_path / 'model'}", f"rollout.explore.precision={precision}")
        out = (
            CliRunner()
            .invoke(
                main.cli,
                ("layers", "tiny", *settings, "--errors", "--json"),
                catch_exceptions=False,
            )
            .stdout
        )
        return {row["path"]: row for row in json.loads(out.splitlines()[-1])["per_linear"]}

    fine = measured("fp8")
    coarse = measured("nvfp4")
    assert {path for path, row in coarse.items() if row["errors"]} == {
        path for path, row in coarse.items() if not row["kept"]
    }
    network = load_backbone(
        open_model(str(tmp_path / "model")), "bf16", make_mesh(1, 1)
    ).transformer
    for path, row in coarse.items():
        if not row["kept"]:
            assert len(row["errors"]) == row["layers"] == 4
            stack = np.asarray(flatten(network)[path], np.float32)
            differences = [np.asarray(dequantize(quantize(jnp.asarray(w)))) - w for w in stack]
            expected = [
                np.linalg.norm(d) / np.linalg.norm(w)
                for d, w in zip(differences, stack, strict=True)
            ]
            np.testing.assert_allclose(
                row["errors"], expected, rtol=2e-3
            )  # ties fall otherwise as programs fuse
            assert min(abs(np.diff(expected))) > 10 * 2e-3 * max(expected)  # layers differ
            assert max(fine[path]["errors"]) < 0.5 * min(row["errors"])
