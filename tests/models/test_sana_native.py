"""The authors' layout of SANA: the whole list of a released network's names and shapes, and what is
said of other ones.
"""

import dataclasses

import pytest
from flax import nnx

from solrl_jax.models.loading.weights import parameter_table
from solrl_jax.models.sana.native import is_native, mlp_ratio, plan_conversion
from solrl_jax.models.sana.transformer import SanaConfig, SanaTransformer2DModel
from tests.cases import first_is_quick


def native_shapes(
    width=2240, hidden=5600, depth=20, ffn="linear", text=2304, channels=32, patch=1, qk_norm=False
):
    """Written down name by name: `SanaMSLinearFFN_1600M_P1_D20`, unless asked otherwise."""

    def linear(name, *shape):
        return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}

    unit = (1, 1) if ffn == "conv" else ()
    shapes = {
        "pos_embed": (1, (32 // patch) ** 2, width),
        **linear("x_embedder.proj", width, channels, patch, patch),
        **linear("t_embedder.mlp.0", width, 256),
        **linear("t_embedder.mlp.2", width, width),
        **linear("t_block.1", 6 * width, width),
        "y_embedder.y_embedding": (300, text),
        **linear("y_embedder.y_proj.fc1", width, text),
        **linear("y_embedder.y_proj.fc2", width, width),
        "attention_y_norm.weight": (width,),
        "final_layer.scale_shift_table": (2, width),
        **linear("final_layer.linear", patch**2 * channels, width),
    }
    for i in range(depth):
        block = {
            "scale_shift_table": (6, width),
            "attn.qkv.weight": (3 * width, width),
            **linear("attn.proj", width, width),
            **linear("cross_attn.q_linear", width, width),
            **linear("cross_attn.kv_linear", 2 * width, width),
            **linear("cross_attn.proj", width, width),
            **linear(f"mlp.inverted_conv.{ffn}", 2 * hidden, width, *unit),
            **linear("mlp.depth_conv.conv", 2 * hidden, 1, 3, 3),
            f"mlp.point_conv.{ffn}.weight": (width, hidden, *unit),
        }
        for norm in (
            ("attn.q_norm", "attn.k_norm", "cross_attn.q_norm", "cross_attn.k_norm")
            if qk_norm
            else ()
        ):
            block[f"{norm}.weight"] = (width,)
        shapes |= {f"blocks.{i}.{name}": shape for name, shape in block.items()}
    return shapes


def network_shapes(config):
    network = nnx.eval_shape(lambda: SanaTransformer2DModel(config, rngs=nnx.Rngs(0)))
    return {name: e.torch_shape for e in parameter_table(nnx.split(network)[1]) for name in e.names}


NETWORKS = {
    "1.6B, linear MLPs": ({}, SanaConfig(), 1_604_462_752),
    "1.6B": ({"ffn": "conv"}, SanaConfig(), 1_604_462_752),
    "0.6B": (
        {"ffn": "conv", "width": 1152, "hidden": 2880, "depth": 28},
        SanaConfig(
            num_layers=28,
            num_attention_heads=36,
            num_cross_attention_heads=16,
            cross_attention_head_dim=72,
            cross_attention_dim=1152,
        ),
        591_747_872,
    ),
    "hidden width of 5632": (
        {"hidden": 5632},
        SanaConfig(mlp_ratio=5632 / 2240),
        1_604_462_752 + 20 * 32 * (3 * 2240 + 22),
    ),
    "qk norm, patches of 2": (
        {"qk_norm": True, "patch": 2, "depth": 2},
        SanaConfig(qk_norm="rms_norm_across_heads", patch_size=2, num_layers=2),
        None,
    ),
}


@pytest.mark.parametrize("case", first_is_quick(NETWORKS))
def test_a_released_network_is_mapped_whole_onto_the_one_that_its_config_builds(case):
    changes, config, count = NETWORKS[case]
    shapes = native_shapes(**changes)
    assert is_native(shapes)
    # depth, hidden width and norms are the checkpoint's own
    conversion = plan_conversion(
        shapes, dataclasses.replace(config, num_layers=9, mlp_ratio=3.0, qk_norm=None)
    )
    assert conversion.config == config
    assert {p.name: p.shape for p in conversion.parts} == network_shapes(conversion.config)
    assert len({p.name for p in conversion.parts}) == len(conversion.parts)
    assert conversion.ffn == changes.get("ffn", "linear")
    assert conversion.ignored == ("pos_embed", "y_embedder.y_embedding")
    rows = {name: 0 for name in shapes if name not in conversion.ignored}
    for part in conversion.parts:  # every row of every native tensor goes to one place
        assert part.start == rows[part.source]
        rows[part.source] = part.stop
    assert rows == {name: shapes[name][0] for name in rows}
    if count is not None:
        assert conversion.num_parameters == count


@pytest.mark.parametrize("width", [2240, 1152])
def test_the_ratio_of_a_config_gives_every_hidden_width_back(width):
    ratios = {hidden: mlp_ratio(hidden, width) for hidden in range(width, 4 * width)}
    assert all(int(ratio * width) == hidden for hidden, ratio in ratios.items())
    assert ratios[5 * width // 2] == 2.5
    sizes = dict(
        num_attention_heads=width // 32,
        cross_attention_head_dim=width // 4,
        cross_attention_dim=width,
    )
    base = SanaConfig(num_cross_attention_heads=4, **sizes)
    conversion = plan_conversion(native_shapes(width, width + 33, depth=1), base)
    assert network_shapes(conversion.config)["transformer_blocks.0.ff.conv_point.weight"] == (
        width,
        width + 33,
        1,
        1,
    )


def test_a_plain_quotient_would_lose_a_unit():
    assert int(2273 / 2240 * 2240) == 2272


@pytest.mark.parametrize("ffn", ["conv", "linear"])
def test_every_tensor_that_does_not_fit_is_listed_at_once(ffn):
    shapes = native_shapes(depth=3, ffn=ffn)
    del shapes["x_embedder.proj.weight"], shapes["blocks.1.attn.qkv.weight"]
    shapes |= {
        "blocks.0.attn.qkv.bias": (6720,),
        "logvar_linear.weight": (1, 2240),
        f"blocks.2.mlp.point_conv.{ffn}.bias": (2240,),
        "attention_y_norm.weight": (7,),
        f"blocks.2.mlp.inverted_conv.{ffn}.weight": (2240, 11200),
    }
    with pytest.raises(ValueError, match="7 tensor") as error:
        plan_conversion(shapes, SanaConfig())
    unit = ", 1, 1" if ffn == "conv" else ""
    for message in (
        "missing x_embedder.proj.weight (2240, 32, 1, 1); ",
        "missing blocks.1.attn.qkv.weight (6720, 2240); ",
        "unexpected blocks.0.attn.qkv.bias (6720,); ",
        "unexpected logvar_linear.weight (1, 2240); ",
        f"unexpected blocks.2.mlp.point_conv.{ffn}.bias (2240,); ",
        "attention_y_norm.weight has shape (7,), expected (2240,); ",
        f"blocks.2.mlp.inverted_conv.{ffn}.weight has shape (2240, 11200),"
        f" expected (11200, 2240{unit})",
    ):
        assert message in f"{error.value}; "


def test_a_layer_that_is_not_there_and_one_of_the_other_kind():
    shapes = native_shapes(depth=3) | native_shapes(depth=1, ffn="conv")
    moved = {name.replace("blocks.1.", "blocks.7."): shape for name, shape in shapes.items()}
    with pytest.raises(ValueError, match="tensor") as error:
        plan_conversion(moved, SanaConfig())
    assert "missing blocks.1.mlp.inverted_conv.linear.weight (11200, 2240)" in str(error.value)
    assert "unexpected blocks.7.attn.qkv.weight (6720, 2240)" in str(error.value)
    assert "unexpected blocks.0.mlp.point_conv.conv.weight (2240, 5600, 1, 1)" in str(error.value)


def test_only_half_of_the_norms():
    shapes = {
        name: shape
        for name, shape in native_shapes(depth=2, qk_norm=True).items()
        if "cross_attn.q_norm" not in name
    }
    with pytest.raises(
        ValueError, match=r"2 tensor.* missing blocks\.0\.cross_attn\.q_norm\.weight \(2240,\)"
    ):
        plan_conversion(shapes, SanaConfig())


def test_a_base_of_another_width_is_refused():
    with pytest.raises(ValueError, match=r"^has width 128, but the base has 2240$"):
        plan_conversion(native_shapes(width=128, hidden=320, depth=1), SanaConfig())


@pytest.mark.parametrize(
    "names",
    [
        ["visual.transformer.resblocks.0.attn.in_proj_weight", "text_projection"],
        ["blip.visual_encoder.blocks.0.attn.qkv.weight", "mlp.layers.0.weight"],
        ["transformer_blocks.0.ff.conv_inverted.weight"],
        ["blocks.0.attn.qkv.weight", "blocks.0.mlp.fc1.weight"],
        [],
    ],
)
def test_other_checkpoints_are_not_taken_for_it(names):
    assert not is_native(names)
