"""`models.vision.clip` against transformers' `CLIPModel`, float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from pretrain.networks import to_torch

from solrl_jax.models.loading.weights import parameter_table
from solrl_jax.models.vision.clip import CLIPConfig, CLIPModel
from tests import carried
from tests.parity import from_torch, parameter_count, relative

TOLERANCE = 1e-5
POSITIONS = 12
EOS = 90
TEXT = {
    "vocab_size": 97,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": POSITIONS,
    "eos_token_id": EOS,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 12,
    "patch_size": 4,
}
GELU = {"hidden_act": "gelu"}
# changes to the text tower, changes to the vision tower, projection_dim
CASES = {
    "quick_gelu, end by id": ({}, {}, 16),
    "gelu": (GELU, GELU, 8),
    "end by highest id": ({"eos_token_id": 2}, {"patch_size": 3}, 16),
    "gelu in one tower only": (
        {"hidden_size": 40, "num_attention_heads": 5},
        GELU | {"num_attention_heads": 4},
        20,
    ),
    "single patch, one layer": (
        {"num_hidden_layers": 1},
        {"num_hidden_layers": 1, "patch_size": 12},
        5,
    ),
    "other epsilon, gray, deep": (
        {"layer_norm_eps": 0.1, "eos_token_id": 2, "num_hidden_layers": 5},
        {"layer_norm_eps": 0.2, "num_channels": 1, "num_hidden_layers": 5},
        16,
    ),
}

VIT_L_14 = carried.config("openai/clip-vit-large-patch14")
VIT_H_14 = carried.config("yuvalkirstain/PickScore_v1")


def reference_model(text, vision, width, seed=0):
    """transformers' model with weights large enough that every token, position, pixel and mask
    shows.
    """
    config = transformers.CLIPConfig(
        text_config=TEXT | text,
        vision_config=VISION | vision,
        projection_dim=width,
        attn_implementation="eager",
    )
    model = transformers.CLIPModel(config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=generator)
        if p.ndim < 2:
            p.copy_((1.0 if "norm" in name and name.endswith("weight") else 0.0) + 0.5 * noise)
        else:
            p.copy_(
                noise
                if "embedding.weight" in name and p.ndim == 2
                else 1.5 * noise / p[0].numel() ** 0.5
            )
    return model


def port(reference):
    config = CLIPConfig.from_dict(reference.config.to_dict())
    graphdef, state = nnx.split(nnx.eval_shape(lambda: CLIPModel(config, rngs=nnx.Rngs(0))))
    tensors = {name: t.numpy() for name, t in reference.state_dict().items()}
    params = from_torch(state, tensors)
    back = to_torch(state, params)
    assert back.keys() == tensors.keys()
    assert all(np.array_equal(back[name], tensors[name]) for name in tensors)
    return nnx.merge(graphdef, jax.tree.map(jnp.asarray, params))


def prompts(lengths, rng, eos=EOS):
    """Token ids and a right-padding mask. Each text ends in `eos`; padding repeats it, as CLIP's
    tokenizer does.
    """
    shape = len(lengths), max(lengths)
    column = np.arange(shape[1])
    lengths = np.array(lengths)[:, None]
    return np.where(column < lengths - 1, rng.integers(3, EOS, shape), eos), column < lengths


def images(model_config, rng, count=3):
    c = model_config.vision_config
    return rng.standard_normal((count, c.image_size, c.image_size, c.num_channels)).astype(
        np.float32
    )


@nnx.jit
def encode_text(model, ids, mask):
    return model.encode_text(ids, mask)


@nnx.jit
def encode_image(model, pixels):
    return model.encode_image(pixels)


@pytest.fixture(scope="module", params=CASES)
def pair(request):
    reference = reference_model(*CASES[request.param], seed=list(CASES).index(request.param))
    return reference, port(reference)


@pytest.mark.slow
def test_text(pair):
    reference, model = pair
    ids, mask = prompts(
        [7, 2, POSITIONS], np.random.default_rng(1)
    )  # as many tokens as positions; fewer: further below
    theirs = reference.get_text_features(
        torch.tensor(ids), torch.tensor(mask).long()
    ).pooler_output.numpy()
    ours = encode_text(model, ids, mask)
    error = relative(ours, theirs)
    print(f"text {error:.1e}", end=" ")
    assert error < TOLERANCE

    other = np.where(mask, ids, 1)  # padding is never seen; each first token is
    assert np.array_equal(encode_text(model, other, mask), ours)
    other = np.concatenate([(ids[:, :1] + 1) % EOS, ids[:, 1:]], axis=1)
    assert (
        np.abs(encode_text(model, other, mask) - ours).max(-1)
        > 1000 * TOLERANCE * np.abs(ours).max()
    ).all()


@pytest.mark.slow
def test_image(pair):
    reference, model = pair
    pixels = images(model.config, np.random.default_rng(2))
    theirs = reference.get_image_features(
        torch.tensor(pixels.transpose(0, 3, 1, 2))
    ).pooler_output.numpy()
    ours = encode_image(model, pixels)
    error = relative(ours, theirs)
    print(f"image {error:.1e}", end=" ")
    assert error < TOLERANCE
    for other in (
        pixels.swapaxes(1, 2),
        np.roll(pixels, 1, axis=1),
    ):  # transposed, moved down by one
        assert (
            np.abs(encode_image(model, other) - ours).max(-1)
            > 1000 * TOLERANCE * np.abs(ours).max()
        ).all()


@pytest.mark.slow
def test_which_token_stands_for_the_text():
    """With an id above the end of text, the two rules differ; each is what transformers does."""
    ids, mask = prompts([8, 6], np.random.default_rng(4))
    ids[:, 3] = EOS + 5
    ids[0, 5] = EOS  # an early end: the first counts
    outputs = {}
    for eos in (EOS, 2):
        reference = reference_model({"eos_token_id": eos}, {}, 16)
        theirs = reference.get_text_features(
            torch.tensor(ids), torch.tensor(mask).long()
        ).pooler_output.numpy()
        outputs[eos] = np.asarray(encode_text(port(reference), ids, mask))
        assert relative(outputs[eos], theirs) < TOLERANCE
    assert relative(outputs[EOS], outputs[2]) > 0.1


@pytest.mark.slow
def test_activation_matters():
    """So that the parity above would show quick_gelu taken for gelu."""
    ids, mask = prompts([7, 2, 5], np.random.default_rng(1))
    quick, exact = (
        port(reference_model({"hidden_act": a}, {}, 16)) for a in ("quick_gelu", "gelu")
    )
    assert (
        relative(encode_text(quick, ids, mask), np.asarray(encode_text(exact, ids, mask)))
        > 100 * TOLERANCE
    )


@pytest.mark.exhaustive
def test_gradient_of_the_pixels():
    reference = reference_model({}, {}, 16, seed=7)
    model = port(reference)
    rng = np.random.default_rng(8)
    pixels = images(model.config, rng)
    cotangent = rng.standard_normal((3, 16)).astype(np.float32)
    x = torch.tensor(pixels.transpose(0, 3, 1, 2)).requires_grad_()
    (reference.get_image_features(x).pooler_output * torch.tensor(cotangent)).sum().backward()
    ours = jax.jit(jax.grad(lambda x: (model.encode_image(x) * cotangent).sum()))(pixels)
    error = relative(ours, x.grad.numpy().transpose(0, 2, 3, 1))
    print(f"gradient: {error:.1e}")
    assert error < TOLERANCE


@pytest.mark.exhaustive
def test_bfloat16_follows_table_and_pixels():
    model = port(reference_model({}, {}, 16))
    ids, mask = prompts([7, 2, 5], np.random.default_rng(1))
    pixels = jnp.asarray(images(model.config, np.random.default_rng(2)))
    exact = [np.asarray(encode_text(model, ids, mask)), np.asarray(encode_image(model, pixels))]
    graphdef, state = nnx.split(model)
    half = nnx.merge(graphdef, jax.tree.map(lambda p: p.astype(jnp.bfloat16), state))
    ours = [encode_text(half, ids, mask), encode_image(half, pixels.astype(jnp.bfloat16))]
    for a, b in zip(ours, exact, strict=True):
        assert a.dtype == jnp.bfloat16
        assert relative(np.asarray(a, np.float32), b) < 0.1


@pytest.mark.parametrize(
    ("fields", "count"), [(VIT_L_14, 427_616_513), (VIT_H_14, 986_109_441)], ids=["L/14", "H/14"]
)
def test_released_size(fields, count):
    config = transformers.CLIPConfig(**fields)
    with torch.device("meta"):
        reference = transformers.CLIPModel(config)
    theirs = {name: tuple(t.shape) for name, t in reference.state_dict().items()}
    ours = CLIPConfig.from_dict(config.to_dict())
    assert ours == CLIPConfig.from_dict(fields)  # what a file leaves out has the same default
    _, state = nnx.split(nnx.eval_shape(lambda: CLIPModel(ours, rngs=nnx.Rngs(0))))
    assert {name: e.torch_shape for e in parameter_table(state) for name in e.names} == theirs
    assert parameter_count(state) == sum(p.numel() for p in reference.parameters()) == count


def test_defaults_are_those_of_transformers():
    assert (
        CLIPConfig.from_dict({})
        == CLIPConfig.from_dict(transformers.CLIPConfig().to_dict())
        == CLIPConfig()
    )


def test_a_tower_of_the_oldest_files_takes_over_whole():
    old = VIT_L_14 | {"text_config_dict": {"hidden_size": 768}, "vision_config_dict": None}
    theirs = transformers.CLIPConfig(**old)
    assert theirs.text_config.eos_token_id == 49407  # not the 2 that text_config says
    assert CLIPConfig.from_dict(old) == CLIPConfig.from_dict(theirs.to_dict())


@pytest.mark.parametrize(
    ("tower", "field", "value"),
    [
        ("text_config", "hidden_act", "relu"),
        ("text_config", "num_attention_heads", 5),
        ("text_config", "eos_token_id", [1, 2]),
        ("text_config", "vocab_size", "many"),
        ("vision_config", "hidden_act", "gelu_new"),
        ("vision_config", "patch_size", 5),
        ("vision_config", "image_size", [12, 24]),
        ("vision_config", "num_hidden_layers", 0),
    ],
)
def test_unsupported_value_of_a_tower_is_named(tower, field, value):
    fields = {"text_config": TEXT, "vision_config": VISION}
    with pytest.raises(ValueError, match=rf"CLIP(Text|Vision)Model: {field}=.*accepted"):
        CLIPConfig.from_dict(fields | {tower: fields[tower] | {field: value}})


@pytest.mark.parametrize(
    ("field", "value"),
    [("model_type", "siglip"), ("projection_dim", None), ("text_config", [1])],
)
def test_unsupported_value_is_named(field, value):
    with pytest.raises(ValueError, match=rf"CLIPModel: {field}=.*accepted"):
        CLIPConfig.from_dict({field: value})


def test_inputs_that_do_not_fit_are_refused():
    config = CLIPConfig.from_dict({"text_config": TEXT, "vision_config": VISION})
    model = nnx.eval_shape(lambda: CLIPModel(config, rngs=nnx.Rngs(0)))

    def text(length):
        return (
            jax.ShapeDtypeStruct((2, length), jnp.int32),
            jax.ShapeDtypeStruct((2, length), bool),
        )

    nnx.eval_shape(CLIPModel.encode_text, model, *text(POSITIONS))
    with pytest.raises(ValueError, match=r"13 tokens; accepted: up to 12"):
        nnx.eval_shape(CLIPModel.encode_text, model, *text(POSITIONS + 1))
    with pytest.raises(ValueError, match=r"images of shape \(12, 16, 3\); accepted: \(12, 12, 3\)"):
        nnx.eval_shape(
            CLIPModel.encode_image, model, jax.ShapeDtypeStruct((2, 12, 16, 3), jnp.float32)
        )
