"""`models.text_encoders.gemma2` against transformers' `Gemma2Model`, float32."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from pretrain.networks import to_torch

from solrl_jax.models.loading.weights import parameter_table
from solrl_jax.models.text_encoders.gemma2 import FULL, SLIDING, Gemma2Config, Gemma2Model
from tests import carried
from tests.cases import first_is_quick
from tests.parity import from_torch, parameter_count, relative

TOLERANCE = 1e-5
VOCAB = 97
LENGTHS = (13, 1, 8, 5)
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "query_pre_attn_scalar": 8,
    "sliding_window": 4,
}
CASES = {
    "alternating": {},
    "one key head, wide heads": {
        "num_key_value_heads": 1,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
    },
    "a key head each, low cap": {"num_key_value_heads": 4, "attn_logit_softcapping": 0.8},
    "no cap": {"attn_logit_softcapping": None, "num_hidden_layers": 4},
    "other query scale": {"query_pre_attn_scalar": 3, "attn_logit_softcapping": 5.0},
    "full first, window of one": {"layer_types": [FULL, SLIDING, SLIDING], "sliding_window": 1},
    "full only": {"layer_types": [FULL] * 3},
    "wide window": {"sliding_window": 64, "layer_types": [SLIDING] * 3},
    "biases, other rotation": {
        "attention_bias": True,
        "rms_norm_eps": 1e-2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 37.0},
    },
}

# What transformers 4 wrote for google/gemma-2-2b-it: `rope_theta` by itself, no `layer_types`, two
# activations.
RELEASED = carried.config(carried.SANA, "text_encoder")


def reference_model(seed=0, **changes):
    """transformers' model with weights large enough that every token, position and mask shows."""
    config = transformers.Gemma2Config(**SMALL | changes, attn_implementation="eager")
    model = transformers.Gemma2Model(config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        scale = 0.5 if p.ndim == 1 else 1.0 if "embed" in name else 1.5 * p.shape[1] ** -0.5
        p.copy_(scale * torch.randn(p.shape, generator=generator))
    return model


def port(reference):
    config = Gemma2Config.from_dict(reference.config.to_dict())
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Gemma2Model(config, rngs=nnx.Rngs(0))))
    tensors = {name: t.numpy() for name, t in reference.state_dict().items()}
    params = from_torch(state, tensors)
    back = to_torch(state, params)
    assert back.keys() == tensors.keys()
    assert all(np.array_equal(back[name], tensors[name]) for name in tensors)
    return nnx.merge(graphdef, jax.tree.map(jnp.asarray, params))


def prompts(seed=1):
    """Token ids and a right-padding mask, lengths 13, 1, 8, 5."""
    ids = np.random.default_rng(seed).integers(1, VOCAB, (len(LENGTHS), max(LENGTHS)))
    return ids, np.arange(max(LENGTHS)) < np.array(LENGTHS)[:, None]


@nnx.jit
def run(model, ids, mask):
    return model(ids, mask)


@pytest.mark.slow
@pytest.mark.parametrize("case", first_is_quick(CASES))
def test_hidden_states(case):
    reference = reference_model(seed=list(CASES).index(case), **CASES[case])
    model = port(reference)
    ids, mask = prompts()
    theirs = reference(torch.tensor(ids), torch.tensor(mask).long()).last_hidden_state.numpy()
    ours = np.asarray(run(model, ids, mask))
    error = relative(ours[mask], theirs[mask])
    print(f"{case}: {error:.1e}")
    assert error < TOLERANCE
    assert np.isfinite(ours).all()

    # padding is never seen ...
    other = np.where(mask, ids, (ids + 1) % VOCAB)
    assert np.array_equal(np.asarray(run(model, other, mask))[mask], ours[mask])
    # ... and each token is, by itself and by those after it within reach
    other = ids.copy()
    other[:, 0] = (ids[:, 0] + 1) % VOCAB
    moved = np.abs(np.asarray(run(model, other, mask)) - ours).max(-1) / np.abs(ours).max()
    assert (moved[:, :2][mask[:, :2]] > 1000 * TOLERANCE).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": 5},
        {"attn_logit_softcapping": 5.0},
        {"query_pre_attn_scalar": 9},
        {"layer_types": [FULL] * 3},
    ],
)
def test_each_field_matters(changes):
    """So that the parity above is not blind to it: one step in the field moves the output by many
    tolerances.
    """
    ids, mask = prompts()
    outputs = []
    for c in ({}, changes):
        model = port(reference_model(**{"attn_logit_softcapping": 4.0} | c))
        outputs.append(np.asarray(run(model, ids, mask))[mask])
    assert relative(*outputs) > 100 * TOLERANCE


@pytest.mark.exhaustive
def test_gradient_of_the_embedded_input():
    reference = reference_model(seed=3, attn_logit_softcapping=3.0)
    model = port(reference)
    ids, mask = prompts()
    cotangent = (
        np.random.default_rng(5)
        .standard_normal((*ids.shape, SMALL["hidden_size"]))
        .astype(np.float32)
    )
    cotangent *= mask[..., None]

    x = reference.embed_tokens(torch.tensor(ids)).requires_grad_()
    (
        reference(inputs_embeds=x, attention_mask=torch.tensor(mask)).last_hidden_state
        * torch.tensor(cotangent)
    ).sum().backward()
    embedded = model.embed(jnp.asarray(ids))
    assert relative(embedded, x.detach().numpy()) < 1e-6
    ours = jax.jit(jax.grad(lambda x: (model.decode(x, jnp.asarray(mask)) * cotangent).sum()))(
        embedded
    )
    error = relative(ours, x.grad.numpy())
    print(f"gradient: {error:.1e}")
    assert error < TOLERANCE
    assert not np.asarray(ours)[~mask].any()


@pytest.mark.exhaustive
def test_bfloat16_follows_the_table():
    model = port(reference_model())
    ids, mask = prompts()
    exact = np.asarray(run(model, ids, mask))[mask]
    graphdef, state = nnx.split(model)
    half = nnx.merge(graphdef, jax.tree.map(lambda p: p.astype(jnp.bfloat16), state))
    with jax.numpy_dtype_promotion("strict"):
        ours = run(half, ids, mask)
    assert ours.dtype == jnp.bfloat16
    assert relative(np.asarray(ours, np.float32)[mask], exact) < 0.1


@pytest.mark.parametrize(
    "fields",
    [RELEASED, transformers.Gemma2Config().to_dict()],
    ids=["transformers4", "transformers5"],
)
def test_released_size(fields):
    config = Gemma2Config.from_dict(fields)
    assert dataclasses.replace(config, layer_types=()) == Gemma2Config()
    assert config.attention_types == (SLIDING, FULL) * 13
    _, state = nnx.split(nnx.eval_shape(lambda: Gemma2Model(config, rngs=nnx.Rngs(0))))
    assert parameter_count(state) == 2_614_341_888
    with torch.device("meta"):
        reference = transformers.Gemma2Model(transformers.Gemma2Config())
    theirs = {name: tuple(t.shape) for name, t in reference.state_dict().items()}
    assert {name: e.torch_shape for e in parameter_table(state) for name in e.names} == theirs


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "llama"),
        ("hidden_activation", "relu"),
        ("use_bidirectional_attention", True),
        ("sliding_window", None),
        ("num_hidden_layers", 0),
        ("num_key_value_heads", 3),
        ("head_dim", 7),
        ("vocab_size", 12.5),
        ("layer_types", [FULL, "chunked_attention", FULL]),
    ],
)
def test_unsupported_value_is_named(field, value):
    with pytest.raises(ValueError, match=rf"{field}=.*accepted"):
        Gemma2Config.from_dict(SMALL | {field: value})


def test_unsupported_structure_is_named():
    with pytest.raises(ValueError, match=r"rope_type='yarn'; accepted: 'default'"):
        Gemma2Config.from_dict(
            SMALL | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}
        )
    with pytest.raises(ValueError, match=r"rope_type='linear'"):
        Gemma2Config.from_dict(SMALL | {"rope_scaling": {"type": "linear", "factor": 2.0}})
    with pytest.raises(
        ValueError,
        match=r"layer_types=\('full_attention', 'sliding_attention'\); accepted:"
        " num_hidden_layers=3 of them",
    ):
        Gemma2Config.from_dict(SMALL | {"layer_types": [FULL, SLIDING]})


def test_fields_without_influence_are_passed_over():
    noise = {
        "torch_dtype": "bfloat16",
        "final_logit_softcapping": None,
        "cache_implementation": "hybrid",
        "use_cache": 1,
    }
    assert Gemma2Config.from_dict(SMALL | noise) == Gemma2Config.from_dict(SMALL)
    assert Gemma2Config.from_dict(SMALL).attention_types == (SLIDING, FULL, SLIDING)
