"""The text tower of `models.vision.clip` against transformers' `CLIPTextModel` and
`CLIPTextModelWithProjection`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from pretrain.networks import save_component, to_torch
from safetensors.numpy import save_file

from solrl_jax.models.loading.weights import load_tensors, locate_tensors, parameter_table
from solrl_jax.models.vision.clip import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection
from tests import carried
from tests.cases import first_is_quick
from tests.parity import from_torch, parameter_count, relative

TOLERANCE = 1e-5  # largest difference over largest value
POSITIONS = 17
EOS = 90
BASE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": POSITIONS,
    "eos_token_id": EOS,
    "projection_dim": 24,
}
# changes to the config, length of the texts, whether with a projection
CASES = {
    "like CLIP-L": ({"eos_token_id": 2}, 17, True),
    "like CLIP-G": ({"eos_token_id": 2, "hidden_act": "gelu", "projection_dim": 32}, 13, True),
    "like CLIP-L of FLUX": ({"eos_token_id": 2}, 11, False),
    "end by id": ({"projection_dim": 40, "num_attention_heads": 8}, 9, True),
    "one layer": ({"num_hidden_layers": 1, "hidden_size": 24}, 7, True),
    "other epsilon, deep": (
        {"layer_norm_eps": 0.1, "num_hidden_layers": 5, "hidden_act": "gelu"},
        8,
        False,
    ),
}
KINDS = {
    True: (transformers.CLIPTextModelWithProjection, CLIPTextModelWithProjection),
    False: (transformers.CLIPTextModel, CLIPTextModel),
}

CLIP_L, CLIP_G = (carried.config(carried.SD3, part) for part in ("text_encoder", "text_encoder_2"))


def reference_model(overrides: dict, projected: bool, seed: int = 0):
    """transformers' model with weights large enough that every one of them shows."""
    config = transformers.CLIPTextConfig(**BASE | overrides)
    model = KINDS[projected][0](config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            if p.ndim < 2:
                p.copy_((1.0 if "norm" in name and name.endswith("weight") else 0.0) + 0.3 * noise)
            else:
                p.copy_(noise if "embedding" in name else 1.2 * noise / p.shape[1] ** 0.5)
    return model


def released(reference) -> dict:
    """Tensors under the names that released files have: transformers 5 dropped a prefix in memory,
    not in files.
    """
    prefix = "text_model."

    def rename(name):
        return name if name.startswith("text_projection") else prefix + name.removeprefix(prefix)

    return {rename(name): t for name, t in reference.state_dict().items()}


def port(reference, projected: bool):
    config = CLIPTextConfig.from_dict(reference.config.to_dict())
    graphdef, state = nnx.split(
        nnx.eval_shape(lambda: KINDS[projected][1](config, rngs=nnx.Rngs(0)))
    )
    params = from_torch(state, {name: t.numpy() for name, t in released(reference).items()})
    return state, graphdef, jax.tree.map(jnp.asarray, params)


@pytest.mark.parametrize("prefix", ["", "text_model."])
def test_files_of_transformers_4_and_5_are_read_alike(prefix, tmp_path):
    reference = reference_model({"eos_token_id": 2}, projected=False)
    state, _, want = port(reference, projected=False)
    tensors = {
        prefix + name.removeprefix("text_model."): t.numpy()
        for name, t in reference.state_dict().items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    got = load_tensors(*locate_tensors(tmp_path, state), jnp.float32)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    odd = "final_layer_norm.bias"  # both spellings in one file are no spelling
    tensors[("" if prefix else "text_model.") + odd] = tensors.pop(prefix + odd)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"do not fit the network: missing text_model\..*; unexpected "
    ):
        load_tensors(*locate_tensors(tmp_path, state), jnp.float32)


def texts(count: int, length: int, seed: int = 1) -> np.ndarray:
    """Each ends in the highest id, at another place, and is filled up with an id like any other."""
    ids = np.random.default_rng(seed).integers(3, EOS, (count, length))
    ids[np.arange(count), length - 1 - np.arange(count) % 4] = EOS
    return ids


def outputs(reference, ids) -> list:
    """penultimate, last, pooled"""
    out = reference(torch.tensor(ids), output_hidden_states=True)
    pooled = out.text_embeds if hasattr(out, "text_embeds") else out.pooler_output
    return [out.hidden_states[-2], out.last_hidden_state, pooled]


@pytest.mark.slow
@pytest.mark.parametrize("case", first_is_quick(CASES))
def test_outputs_and_gradients_equal_transformers(case):
    """The gradient is that of the table of tokens, by each output: rows of it are the inputs."""
    overrides, length, projected = CASES[case]
    reference = reference_model(overrides, projected, seed=list(CASES).index(case))
    _, graphdef, params = port(reference, projected)
    ids = texts(3, length)
    rng = np.random.default_rng(2)
    theirs = outputs(reference, ids)
    cotangents = [rng.standard_normal(t.shape).astype(np.float32) for t in theirs]

    @jax.jit
    def run(params, ids):
        def f(params):
            return tuple(nnx.merge(graphdef, params)(ids))

        out, back = jax.vjp(f, params)

        def rest(i):
            return tuple(c if i == j else jnp.zeros_like(c) for j, c in enumerate(cotangents))

        def table(g):
            return g["text_model"]["embeddings"]["token_embedding"]["embedding"]

        return out, [table(back(rest(i))[0]) for i in range(3)]

    ours, gradients = run(params, ids)
    table = next(p for name, p in reference.named_parameters() if "token_embedding" in name)
    for name, a, b, g, c in zip(
        ("penultimate", "last", "pooled"), ours, theirs, gradients, cotangents, strict=True
    ):
        want = torch.autograd.grad((b * torch.tensor(c)).sum(), table, retain_graph=True)[0].numpy()
        errors = relative(a, b.detach()), relative(g, want)
        print(f"{case}, {name}: forward {errors[0]:.1e}, gradient {errors[1]:.1e}")
        assert max(errors) < TOLERANCE

    # the case can fail: each parameter and token moves the last output by many tolerances, and no
    # output equals another
    theirs = [t.detach().numpy() for t in theirs]
    leaves, tree = jax.tree.flatten(params)
    for i, leaf in enumerate(leaves):
        other = jax.tree.unflatten(
            tree, [*leaves[:i], jnp.roll(leaf, 1, axis=-1), *leaves[i + 1 :]]
        )
        without_influence = (
            leaf is params["text_model"]["encoder"]["layers"]["self_attn"]["k_proj"]["bias"]
        )  # the same on all logits
        assert (
            relative(run(other, ids)[0][2], theirs[2]) > 100 * TOLERANCE
        ) is not without_influence
    other = np.concatenate([(ids[:, :1] + 1) % EOS, ids[:, 1:]], axis=1)
    assert relative(run(params, other)[0][2], theirs[2]) > 300 * TOLERANCE
    assert relative(ours[0], theirs[1]) > 0.1


@pytest.mark.slow
def test_which_token_stands_for_the_text():
    """With an id above the end of text, and with two ends, the two rules differ; each is what
    transformers does.
    """
    ids = texts(3, 10)
    ids[:, 2] = EOS + 5
    ids[0, 5] = EOS
    pooled = {}
    for eos in (EOS, 2):
        reference = reference_model({"eos_token_id": eos}, projected=True)
        _, graphdef, params = port(reference, projected=True)
        pooled[eos] = jax.jit(
            lambda params, ids, graphdef=graphdef: nnx.merge(graphdef, params)(ids).pooled
        )(params, ids)
        assert relative(pooled[eos], outputs(reference, ids)[2].detach()) < TOLERANCE
    assert relative(pooled[EOS], pooled[2]) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("case", first_is_quick(["like CLIP-L", "like CLIP-G"]))
def test_bfloat16_is_as_near_as_torch(case):
    """Distance of each BF16 network to float32, for each output; ours computes in the dtype of its
    table.
    """
    overrides = CASES[case][0] | {
        "hidden_size": 192,
        "intermediate_size": 768,
        "projection_dim": 192,
        "num_hidden_layers": 4,
    }
    reference = reference_model(overrides, projected=True, seed=7)
    _, graphdef, params = port(reference, projected=True)
    ids = texts(32, POSITIONS)
    with torch.no_grad():
        exact = [t.numpy() for t in outputs(reference, ids)]
        theirs = [t.float().numpy() for t in outputs(reference.to(torch.bfloat16), ids)]
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    ours = jax.jit(lambda params, ids: nnx.merge(graphdef, params)(ids))(half, ids)
    for name, a, b, e in zip(ours._fields, ours, theirs, exact, strict=True):

        def distance(y, e=e):
            return np.linalg.norm(np.asarray(y, np.float32) - e) / np.linalg.norm(e)

        print(f"{case}, bfloat16, {name}: ours {distance(a):.2e}, torch {distance(b):.2e}")
        assert a.dtype == jnp.bfloat16
        assert 1e-4 < distance(a) < 1.1 * distance(b)


@pytest.mark.parametrize("projected", [True, False])
def test_a_component_goes_out_as_it_came_in(tmp_path, projected):
    """transformers and we read the same file, under the names of released ones, and transformers
    writes it back under them.
    """
    reference = reference_model({}, projected)
    state, _, params = port(reference, projected)
    save_component(
        tmp_path,
        "model.safetensors",
        reference.config.to_dict(),
        to_torch(state, params),
        jnp.float32,
    )
    theirs, report = type(reference).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for (name, a), b in zip(
        reference.state_dict().items(), theirs.state_dict().values(), strict=True
    ):
        assert torch.equal(a, b), name
    theirs.save_pretrained(tmp_path)
    loaded = load_tensors(*locate_tensors(tmp_path, state), jnp.float32)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), loaded, params))


@pytest.mark.parametrize(
    ("fields", "projected", "count"),
    [(CLIP_L, False, 123_060_480), (CLIP_L, True, 123_650_304), (CLIP_G, True, 694_659_840)],
    ids=["FLUX", "SD3.5, CLIP-L", "SD3.5, CLIP-G"],
)
def test_released_size(fields, projected, count):
    config = CLIPTextConfig.from_dict(fields)
    with torch.device("meta"):
        reference = KINDS[projected][0](transformers.CLIPTextConfig(**fields))
    assert config == CLIPTextConfig.from_dict(reference.config.to_dict())
    _, state = nnx.split(nnx.eval_shape(lambda: KINDS[projected][1](config, rngs=nnx.Rngs(0))))
    assert parameter_count(state) == count
    theirs = {name: tuple(t.shape) for name, t in released(reference).items()}
    assert {name: e.torch_shape for e in parameter_table(state) for name in e.names} == theirs
    assert "text_model.embeddings.token_embedding.weight" in theirs
    assert ("text_projection.weight" in theirs) is projected


def test_defaults_are_those_of_transformers():
    theirs = CLIPTextConfig.from_dict(transformers.CLIPTextConfig().to_dict())
    assert CLIPTextConfig.from_dict({}) == theirs == CLIPTextConfig()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "clip"),
        ("projection_dim", None),
        ("hidden_act", "relu"),
        ("num_attention_heads", 5),
    ],
)
def test_unsupported_value_is_named(field, value):
    with pytest.raises(ValueError, match=rf"CLIPTextModel: {field}=.*accepted"):
        CLIPTextConfig.from_dict(BASE | {field: value})
