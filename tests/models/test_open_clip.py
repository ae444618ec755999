"""OpenCLIP's files in the CLIP network: the table of names, whole; ImageReward's and CLIP's
released sizes.
"""

import itertools

import jax
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from pretrain.networks import to_torch
from safetensors.torch import save_file

from solrl_jax.models.loading.weights import load_tensors, parameter_table
from solrl_jax.models.vision.blip import UNUSED, ImageReward, ImageRewardConfig
from solrl_jax.models.vision.clip import CLIPModel
from solrl_jax.models.vision.open_clip import locate_open_clip_tensors, open_clip_name
from solrl_jax.rewards.clip import HPS
from tests import released
from tests.parity import parameter_count


def table(config):
    _, state = nnx.split(nnx.eval_shape(lambda: CLIPModel(config, rngs=nnx.Rngs(0))))
    return state, parameter_table(state)


def test_every_tensor_arrives_where_transformers_has_it(tmp_path):
    """Numbers that tell every place of every tensor apart, in BF16, of which thirds of the bytes
    are read.
    """
    model = released.save_hps(tmp_path / "hps.safetensors", 0)
    tensors = {}
    for first, (name, t) in enumerate(model.state_dict().items()):
        tensors[name] = (torch.arange(t.numel()) % 251 + first).reshape(t.shape).to(torch.bfloat16)
    save_file(tensors, tmp_path / "hps.safetensors")
    state, _ = table(released.HPS)
    got = to_torch(
        state,
        jax.device_get(
            load_tensors(*locate_open_clip_tensors(tmp_path / "hps.safetensors", state), np.float32)
        ),
    )
    sources = set()
    for name, value in got.items():
        theirs, third = open_clip_name(name)
        whole = tensors[theirs].float().numpy()
        if third is not None:
            whole = np.split(whole, 3)[third]
        np.testing.assert_array_equal(
            value, whole.T if name.endswith("_projection.weight") else whole, err_msg=name
        )
        sources.add(theirs)
    assert sources == set(tensors)


def test_the_released_file_of_hps_would_fit():
    """ViT-H-14 as open_clip itself builds it from its own config, without values."""
    library = released.open_clip()
    fields = library.get_model_config("ViT-H-14")
    with torch.device("meta"):
        theirs = library.model.CLIP(
            fields["embed_dim"], fields["vision_cfg"], fields["text_cfg"], quick_gelu=False
        )
    state, ours = table(HPS)
    shapes = {}
    for name, shape in ((name, e.torch_shape) for e in ours for name in e.names):
        other, third = open_clip_name(name)
        shape = shape if third is None else (3 * shape[0], *shape[1:])
        shapes[other] = shape[::-1] if name.endswith("_projection.weight") else shape
    assert shapes == {name: tuple(t.shape) for name, t in theirs.state_dict().items()}
    assert parameter_count(state) == sum(p.numel() for p in theirs.parameters()) == 986_109_441
    assert (
        fields["vision_cfg"]["width"] // fields["vision_cfg"]["head_width"]
        == HPS.vision_config.num_attention_heads
    )
    assert fields["text_cfg"]["heads"] == HPS.text_config.num_attention_heads


def test_names_by_hand():
    block = "vision_model.encoder.layers.3"
    theirs = "visual.transformer.resblocks.3"
    for third, name in enumerate(("q_proj", "k_proj", "v_proj")):
        assert open_clip_name(f"{block}.self_attn.{name}.bias") == (
            f"{theirs}.attn.in_proj_bias",
            third,
        )
    assert open_clip_name(f"{block}.layer_norm2.weight") == (f"{theirs}.ln_2.weight", None)
    assert open_clip_name("text_model.encoder.layers.0.mlp.fc2.weight") == (
        "transformer.resblocks.0.mlp.c_proj.weight",
        None,
    )


def test_a_name_that_is_none_of_clip_is_refused():
    for name in (
        "text_model.encoder.layers.0.self_attn.q_norm.weights",
        "other.encoder.layers.0.mlp.fc1.weight",
    ):
        with pytest.raises(ValueError, match="CLIP has no such tensor"):
            open_clip_name(name)


def test_image_reward_has_the_released_size():
    """Against BLIP's modules in transformers, of the sizes that the paper's backbone has (ViT-L/16,
    BERT base).
    """
    vision = transformers.BlipVisionConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=24,
        num_attention_heads=16,
        image_size=224,
        patch_size=16,
    )
    text = transformers.BlipTextConfig(
        vocab_size=30524,
        hidden_size=768,
        encoder_hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=12,
        num_attention_heads=12,
        max_position_embeddings=512,
        is_decoder=True,
    )
    with torch.device("meta"):
        seeing = transformers.BlipVisionModel(vision)
        reading = transformers.models.blip.modeling_blip_text.BlipTextModel(
            text, add_pooling_layer=False
        )
    sizes = [768, 1024, 128, 64, 16, 1]
    head = sum((a + 1) * b for a, b in itertools.pairwise(sizes))
    _, state = nnx.split(nnx.eval_shape(lambda: ImageReward(ImageRewardConfig(), rngs=nnx.Rngs(0))))
    theirs = sum(p.numel() for model in (seeing, reading) for p in model.parameters()) + head
    assert parameter_count(state) == theirs == 446_206_689
    assert not any(name.startswith(UNUSED) for e in parameter_table(state) for name in e.names)
