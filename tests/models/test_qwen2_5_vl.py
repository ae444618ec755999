"""`models.text_encoders.qwen2_5_vl` against transformers' `Qwen2_5_VLForConditionalGeneration`,
float32.
"""

import math

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from safetensors.torch import load_file, save_file

from solrl_jax.models.text_encoders.qwen2_5_vl import (
    Qwen2_5_VLTextConfig,
    Qwen2_5_VLTextModel,
    open_qwen2_5_vl,
)
from tests import carried
from tests.cases import first_is_quick
from tests.parity import parameter_count, relative
from tests.pipelines import QWEN_VL_TEXT, QWEN_VL_VISION

TOLERANCE = 1e-5
VOCAB = 97
LENGTHS = (13, 1, 8, 5)
CASES = {
    "as released": {},
    "one key head, other rotation": {
        "num_key_value_heads": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 37.0, "mrope_section": [2, 1, 1]},
    },
    "a key head each, other norm and sizes": {
        "num_key_value_heads": 4,
        "hidden_size": 48,
        "intermediate_size": 20,
        "num_hidden_layers": 3,
        "rms_norm_eps": 1e-2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 2, 2]},
    },
}


def reference_model(seed=0, **changes):
    """transformers' model with weights large enough that every token, position and mask shows."""
    text = QWEN_VL_TEXT | {"vocab_size": VOCAB} | changes
    vision = QWEN_VL_VISION | {"out_hidden_size": text["hidden_size"]}
    config = transformers.Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, attn_implementation="eager"
    )
    model = transformers.Qwen2_5_VLForConditionalGeneration(config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        scale = 0.5 if p.ndim == 1 else 1.0 if "embed" in name else 1.5 * p[0].numel() ** -0.5
        p.copy_(scale * torch.randn(p.shape, generator=generator))
    return model


def port(folder):
    component = open_qwen2_5_vl(folder, Qwen2_5_VLTextConfig.read(folder))
    return component(component.load(jnp.float32))


@nnx.jit
def run(model, ids, mask):
    return model(ids, mask)


@pytest.mark.slow
@pytest.mark.parametrize("case", first_is_quick(CASES))
def test_hidden_states_and_names_of_both_versions_of_transformers(case, tmp_path):
    reference = reference_model(seed=list(CASES).index(case), **CASES[case])
    reference.save_pretrained(tmp_path)
    ids = np.random.default_rng(1).integers(1, VOCAB, (len(LENGTHS), max(LENGTHS)))
    mask = np.arange(max(LENGTHS)) < np.array(LENGTHS)[:, None]
    ours = np.asarray(run(port(tmp_path), ids, mask))
    theirs = (
        reference(
            torch.tensor(ids), attention_mask=torch.tensor(mask).long(), output_hidden_states=True
        )
        .hidden_states[-1]
        .numpy()
    )
    print(f"{case}: {relative(ours[mask], theirs[mask]):.1e}")
    assert relative(ours[mask], theirs[mask]) < TOLERANCE
    # padding is never seen
    other = np.where(mask, ids, (ids + 1) % VOCAB)
    np.testing.assert_array_equal(np.asarray(run(port(tmp_path), other, mask))[mask], ours[mask])

    # the other names: "model.language_model.layers" and "model.layers"
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    newer = any(name.startswith("model.language_model.") for name in tensors)
    renamed = {}
    for name, tensor in tensors.items():
        if newer:
            other = name.replace("model.language_model.", "model.")
            other = other.replace("model.visual.", "visual.")
        else:
            other = name.replace("model.", "model.language_model.", 1)
            other = f"model.{name}" if name.startswith("visual.") else other
        renamed[other] = tensor
    assert renamed.keys() != tensors.keys()
    save_file(renamed, file)
    np.testing.assert_array_equal(np.asarray(run(port(tmp_path), ids, mask))[mask], ours[mask])
    del renamed[
        next(name for name in renamed if name.endswith("q_proj.bias") and "visual" not in name)
    ]
    save_file(renamed, file)
    with pytest.raises(ValueError, match=r"1 tensor\(s\) do not fit the network: missing .*q_proj"):
        port(tmp_path)


def test_the_released_configuration_is_that_of_7b():
    fields = carried.config(carried.QWEN_IMAGE, "text_encoder")
    config = Qwen2_5_VLTextConfig.from_dict(fields)
    assert config == Qwen2_5_VLTextConfig()
    model = nnx.eval_shape(lambda: Qwen2_5_VLTextModel(config, rngs=nnx.Rngs(0)))
    count = parameter_count(nnx.state(model))
    with torch.device("meta"):
        theirs = transformers.Qwen2_5_VLForConditionalGeneration(
            transformers.Qwen2_5_VLConfig(**fields)
        )
    assert count == sum(p.numel() for p in theirs.model.language_model.parameters())
    assert math.isclose(count, 7.07e9, rel_tol=1e-3)


def test_fields_are_read_in_the_forms_of_both_versions():
    flat = {
        **QWEN_VL_TEXT,
        "model_type": "qwen2_5_vl",
        "rope_theta": 5.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
    }
    del flat["rope_parameters"]
    nested = {
        "model_type": "qwen2_5_vl",
        "hidden_size": 999,
        "text_config": {
            **QWEN_VL_TEXT,
            "model_type": "qwen2_5_vl_text",
            "rope_parameters": {"rope_type": "default", "rope_theta": 5.0},
        },
    }
    assert Qwen2_5_VLTextConfig.from_dict(flat) == Qwen2_5_VLTextConfig.from_dict(nested)
    assert Qwen2_5_VLTextConfig.from_dict(flat).rope_theta == 5.0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "qwen2_vl"}, "Qwen2_5_VLTextModel: model_type='qwen2_vl'"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'; accepted: 'silu'"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3; accepted: a divisor"),
        ({"hidden_size": 3580}, "hidden_size=3580; accepted: a multiple"),
        ({"use_sliding_window": True}, "use_sliding_window=True; accepted: full causal"),
        ({"text_config": [1]}, r"text_config=\[1\]; accepted: a mapping"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type='yarn'; accepted: 'default'"),
    ],
)
def test_a_config_this_port_cannot_honour_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Qwen2_5_VLTextConfig.from_dict(fields)
