"""`models.text_encoders.qwen3` against transformers' `Qwen3Model` and `Qwen3ForCausalLM`, float32;
chat templates against its tokenizer.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from safetensors.torch import save_file

from solrl_jax.models.loading.weights import parameter_table
from solrl_jax.models.text_encoders.qwen3 import Qwen3Config, Qwen3Model, open_qwen3
from solrl_jax.models.text_encoders.tokenizers import chat, tokenize
from tests.cases import first_is_quick
from tests.parity import relative
from tests.pipelines import make_qwen_tokenizer

TOLERANCE = 1e-5
VOCAB = 97
LENGTHS = (13, 1, 8, 5)
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
CASES = {  # changes to the config, and the states that are read
    "second to last": ({}, (3,)),
    "three, one twice, out of order": ({}, (3, 1, 1)),
    "tokens and the last before the norm": ({}, (0, 3)),
    "one key head, wide heads": ({"num_key_value_heads": 1, "head_dim": 16}, (3,)),
    "a key head each, narrow heads": ({"num_key_value_heads": 4, "head_dim": 4}, (2, 3)),
    "biases, other rotation": (
        {"attention_bias": True, "rope_parameters": {"rope_type": "default", "rope_theta": 37.0}},
        (3,),
    ),
    "other norm": ({"rms_norm_eps": 1e-2, "tie_word_embeddings": True}, (1, 3)),
    "other sizes": (
        {"hidden_size": 20, "intermediate_size": 12, "num_hidden_layers": 2, "vocab_size": 101},
        (1,),
    ),
}

# What is known of the released configs of Qwen3-4B and 8B, as transformers 4 wrote them.
RELEASED = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2560,
    "initializer_range": 0.02,
    "intermediate_size": 9728,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
LARGE = RELEASED | {"hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False}


def reference_model(seed=0, kind=transformers.Qwen3ForCausalLM, **changes):
    """transformers' model with weights large enough that every token, position and mask shows."""
    model = (
        kind(transformers.Qwen3Config(**SMALL | changes, attn_implementation="eager"))
        .eval()
        .requires_grad_(False)
    )
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        scale = 0.5 if p.ndim == 1 else 1.0 if "embed" in name else 1.5 * p.shape[1] ** -0.5
        p.copy_(scale * torch.randn(p.shape, generator=generator))
    return model


def port(folder, reference, states):
    """Our network, of the files that transformers writes."""
    reference.save_pretrained(folder)
    component = open_qwen3(folder, Qwen3Config.read(folder), states)
    return component(component.load(jnp.float32))


def prompts(seed=1):
    """Token ids and a right-padding mask, lengths 13, 1, 8, 5."""
    ids = np.random.default_rng(seed).integers(1, VOCAB, (len(LENGTHS), max(LENGTHS)))
    return ids, np.arange(max(LENGTHS)) < np.array(LENGTHS)[:, None]


@nnx.jit
def run(model, ids, mask):
    return model(ids, mask)


def expected(reference, ids, mask, states):
    out = reference(
        torch.tensor(ids), attention_mask=torch.tensor(mask).long(), output_hidden_states=True
    ).hidden_states
    return np.concatenate([out[state].numpy() for state in states], axis=-1)


@pytest.mark.slow
@pytest.mark.parametrize("case", first_is_quick(CASES))
def test_hidden_states(case, tmp_path):
    changes, states = CASES[case]
    reference = reference_model(seed=list(CASES).index(case), **changes)
    model = port(tmp_path, reference, states)
    ids, mask = prompts()
    ours = np.asarray(run(model, ids, mask))
    theirs = expected(reference, ids, mask, states)
    assert ours.shape == theirs.shape
    for one, other in zip(
        *(np.split(x, len(states), axis=-1) for x in (ours, theirs)), strict=True
    ):
        assert relative(one, other) < TOLERANCE  # of padding, too

    # padding is never seen ...
    other = np.where(mask, ids, (ids + 1) % VOCAB)
    assert np.array_equal(np.asarray(run(model, other, mask))[mask], ours[mask])
    # ... and each token is by those after it
    other = ids.copy()
    other[:, 0] = (ids[:, 0] + 1) % VOCAB
    moved = np.abs(np.asarray(run(model, other, mask)) - ours).max(-1) / np.abs(ours).max()
    assert (moved[:, :3][mask[:, :3]] > 100 * TOLERANCE).all() or states == (0,)


@pytest.mark.exhaustive
def test_a_long_prompt(tmp_path):
    """Positions up to 512, with the base and the width of heads that are released."""
    reference = reference_model(head_dim=128)
    model = port(tmp_path, reference, (3,))
    ids = np.random.default_rng(0).integers(1, VOCAB, (1, 512))
    mask = np.arange(512)[None] < 400
    assert relative(run(model, ids, mask), expected(reference, ids, mask, (3,))) < TOLERANCE


@pytest.mark.parametrize("kind", [transformers.Qwen3Model, transformers.Qwen3ForCausalLM])
@pytest.mark.parametrize("head", [False, True])
def test_files_with_and_without_a_head(kind, head, tmp_path):
    """Both classes' files hold the same network. What is above the highest state is not read, what
    is below must be there.
    """
    reference = reference_model(kind=kind)
    model = port(tmp_path, reference, (2,))
    tensors = {
        name: t.contiguous()
        for name, t in reference.state_dict().items()
        if head or not name.startswith("lm_head")
    }
    save_file(tensors, file := tmp_path / "model.safetensors")
    ids, mask = prompts()
    theirs = expected(reference, ids, mask, (2,))
    assert relative(run(model, ids, mask), theirs) < TOLERANCE
    component = open_qwen3(tmp_path, Qwen3Config.read(tmp_path), (2,))
    assert len(parameter_table(component.state)) == 12
    assert relative(run(component(component.load(jnp.float32)), ids, mask), theirs) < TOLERANCE

    prefix = "model." if kind is transformers.Qwen3ForCausalLM else ""
    unread = {
        n: t
        for n, t in tensors.items()
        if not n.startswith((f"{prefix}layers.2.", f"{prefix}layers.3.", f"{prefix}norm."))
    }
    save_file(unread, file)
    component.check_files()
    del unread[f"{prefix}layers.1.mlp.up_proj.weight"]
    save_file(unread, file)
    with pytest.raises(
        ValueError,
        match=r"1 tensor\(s\) do not fit the network: missing .*layers.1.mlp.up_proj.weight",
    ):
        component.check_files()
    save_file(tensors | {f"{prefix}layers.20.mlp.up_proj.weight": torch.ones(1)}, file)
    with pytest.raises(ValueError, match=r"unexpected .*layers.20"):
        component.check_files()


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{"rms_norm_eps": 2e-6}, {"rope_parameters": {"rope_type": "default", "rope_theta": 1.1e6}}],
)
def test_each_number_matters(changes, tmp_path):
    """So that the parity above is not blind to it. Inputs are small, so that `eps` shows."""
    ids, mask = prompts()
    outputs = []
    for c in ({}, changes):
        reference = reference_model(**c)
        reference.model.embed_tokens.weight.mul_(1e-3)
        outputs.append(np.asarray(run(port(tmp_path, reference, (3,)), ids, mask)))
    assert relative(*outputs) > 10 * TOLERANCE


@pytest.mark.exhaustive
def test_bfloat16_follows_the_table(tmp_path):
    model = port(tmp_path, reference_model(), (1, 3))
    ids, mask = prompts()
    exact = np.asarray(run(model, ids, mask))
    graphdef, state = nnx.split(model)
    half = nnx.merge(graphdef, jax.tree.map(lambda p: p.astype(jnp.bfloat16), state))
    ours = run(half, ids, mask)
    assert ours.dtype == jnp.bfloat16
    assert relative(np.asarray(ours, np.float32), exact) < 0.1


@pytest.mark.parametrize(
    ("fields", "count"), [(RELEASED, 4_022_468_096), (LARGE, 7_568_405_504)], ids=["4B", "8B"]
)
def test_released_size(fields, count):
    config = Qwen3Config.from_dict(fields)
    assert (config == Qwen3Config()) == (fields is RELEASED)
    state = nnx.state(nnx.eval_shape(lambda: Qwen3Model(config, (35,), rngs=nnx.Rngs(0))))
    with torch.device("meta"):
        reference = transformers.Qwen3ForCausalLM(transformers.Qwen3Config.from_dict(fields))
    theirs = {
        name: tuple(t.shape)
        for name, t in reference.state_dict().items()
        if name != "lm_head.weight"
    }
    assert sum(map(math.prod, theirs.values())) == count
    below = {
        name: shape
        for name, shape in theirs.items()
        if not name.startswith(("model.layers.35.", "model.norm."))
    }
    assert {name: e.torch_shape for e in parameter_table(state) for name in e.names} == below
    assert (
        Qwen3Config.from_dict(reference.config.to_dict()) == config
    )  # as transformers 5 writes it


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "qwen2"),
        ("hidden_act", "gelu"),
        ("use_sliding_window", True),
        ("num_hidden_layers", 0),
        ("num_key_value_heads", 3),
        ("head_dim", 7),
        ("vocab_size", 12.5),
        ("rope_scaling", 3),
        ("layer_types", ["full_attention", "sliding_attention"] * 2),
    ],
)
def test_unsupported_value_is_named(field, value):
    fields = {name: v for name, v in SMALL.items() if name != "rope_parameters"}
    with pytest.raises(ValueError, match=rf"{field}=.*accepted"):
        Qwen3Config.from_dict(fields | {field: value})
    with pytest.raises(ValueError, match=r"rope_type='yarn'; accepted: 'default'"):
        Qwen3Config.from_dict(fields | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}})


@pytest.mark.parametrize(("states", "more"), [((1, 5), 5), ((4,), 4), ((0,), 1)])
def test_too_few_layers_for_a_state_are_named(states, more, tmp_path):
    """The last state, which has a norm of its own, is none of those that released pipelines
    read.
    """
    message = (
        rf"config.json: num_hidden_layers=4; accepted: more than {more}, for the hidden states \("
    )
    with pytest.raises(ValueError, match=message):
        open_qwen3(tmp_path, Qwen3Config.from_dict(SMALL), states)


PROMPTS = ["a red circle", "", "two stars <|im_end|> above\na small cat ", "x" * 40]


@pytest.mark.parametrize("thinking", [True, False])
def test_tokens_are_those_of_the_released_pipelines(thinking, tmp_path):
    """As `ZImagePipeline` (thinking) and `Flux2KleinPipeline` (not thinking) of diffusers make
    them.
    """
    theirs = make_qwen_tokenizer()
    theirs.save_pretrained(tmp_path)
    conversations = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    options = {"tokenize": False, "add_generation_prompt": True, "enable_thinking": thinking}
    texts = [theirs.apply_chat_template(turn, **options) for turn in conversations]
    assert (
        texts[0]
        == "<|im_start|>user\na red circle<|im_end|>\n<|im_start|>assistant\n"
        + "<think>\n\n</think>\n\n" * (not thinking)
    )
    turns = chat(tmp_path, PROMPTS, enable_thinking=thinking)
    assert turns == texts
    for length in (6, 30, 80):
        expected = theirs(
            texts, padding="max_length", max_length=length, truncation=True, return_tensors="np"
        )
        ours = tokenize(tmp_path, turns, length)
        assert np.array_equal(ours["ids"], expected["input_ids"])
        assert np.array_equal(ours["mask"], expected["attention_mask"].astype(bool))


@pytest.mark.parametrize(
    "template",
    [
        None,
        "{{ messages[0].nothing.at.all }}",
        "{% for %}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception('no\nsuch turn') }}",
        "{% for i in range(1000000) %}{% endfor %}",
    ],
)
def test_a_template_that_fails_is_one_line(template, tmp_path):
    """Also templates that the sandbox of Jinja refuses."""
    tokenizer = make_qwen_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"^[^\n]*: no usable chat template \([^\n]*\)$"):
        chat(tmp_path, ["a cat"])
