"""Every preset resolves to the paper's numbers, overrides win, and the files and the fields agree."""

import dataclasses
import re
import shutil

import pytest
import yaml

from solrl_jax.config import presets
from solrl_jax.config.presets import describe, from_yaml, known_keys, preset_names, resolve, to_yaml
from solrl_jax.config.schema import ConfigError

FAMILIES = presets.PAPER["family"]
TINY = [("tiny", f"family={family}") for family in FAMILIES]
ALL = [(name,) for name in preset_names() if name != "tiny"] + TINY


# --- what the presets are ---


def test_there_are_48_presets_and_tiny():
    names = preset_names()
    assert len(names) == len(set(names)) == 49
    assert {"tiny", "sana_sol_rl_pickscore", "flux1_naive_scaling_hpsv2", "sd3_diffusionnft_imagereward"} <= set(names)


@pytest.mark.parametrize("preset", ALL, ids="-".join)
def test_every_preset_resolves_and_keeps_the_invariants_of_its_family(preset):
    config = resolve(preset[0], preset[1:])
    family, rollout = config.family, config.rollout
    assert family == (
        preset[1].removeprefix("family=") if preset[0] == "tiny" else re.findall("|".join(FAMILIES), preset[0])[0]
    )
    assert config.preset == preset[0]
    four_bits = "nvfp4_46" if preset[0] == "tiny" else "nvfp4"
    assert rollout.explore.precision == (four_bits if family in ("naive_quant", "sol_rl") else "bf16")
    assert rollout.explore.steps == (6 if family == "sol_rl" else 10)
    assert rollout.steps == 10
    assert rollout.regenerate == (family == "sol_rl")
    assert rollout.candidates == rollout.kept * (1 if family == "diffusionnft" else 4)
    assert config.run.dir == f"runs/{preset[0]}-{family}-seed{config.seed}"
    assert from_yaml(to_yaml(config)) == config


@pytest.mark.parametrize(
    ("model", "size", "solver", "schedule", "shift", "sigmas", "clip", "micro", "eval_steps", "tokens", "path"),
    [
        ("sana", 1024, "euler", "linear", 1.0, 6, 1.0, 16, 40, 300, "Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers"),
        ("sd3", 1024, "dpm2", "sd3", 3.0, 6, 0.002, 4, 40, 128, "stabilityai/stable-diffusion-3.5-large"),
        ("flux1", 512, "dpm2", "flux", 3.0, 4, 1.0, 12, 28, 128, "black-forest-labs/FLUX.1-dev"),
    ],
)
def test_models_have_the_numbers_of_the_recipe(
    model, size, solver, schedule, shift, sigmas, clip, micro, eval_steps, tokens, path
):
    c = resolve(f"{model}_sol_rl_hpsv2")
    assert (c.model.name, c.model.path, c.model.height, c.model.width, c.model.max_tokens) == (model, path, size, size, tokens)
    assert (c.rollout.solver, c.rollout.schedule, c.rollout.shift, c.rollout.guidance) == (solver, schedule, shift, 1.0)
    assert (c.trained_sigmas, c.optimizer.max_grad_norm, c.optimizer.micro_batch, c.eval.steps) == (
        sigmas,
        clip,
        micro,
        eval_steps,
    )


def test_shared_numbers_are_the_papers():
    c = resolve("sana_sol_rl_pickscore")
    assert (c.rollout.candidates, c.rollout.kept, c.train.prompts, c.rollout.selection) == (96, 24, 48, "best_worst")
    assert (c.policy.beta, c.policy.kl_weight, c.policy.advantage_clip, c.policy.decay_type) == (1.0, 1e-4, 5.0, 1)
    assert (c.policy.advantage_mode, c.policy.global_std, c.policy.ema_decay) == ("all", True, 0.9)
    assert (c.lora.rank, c.lora.alpha) == (32, 64.0)
    o = c.optimizer
    assert (o.learning_rate, o.beta1, o.beta2, o.eps, o.weight_decay) == (3e-4, 0.9, 0.999, 1e-8, 1e-4)
    assert (o.steps_per_iteration, c.rollout.precision, c.reward.weights) == (1, "bf16", {"pickscore": 1.0})


# What each rule must take and leave; the paths are those of diffusers' modules, the layers of a list without their index.
MATCHES = {
    "sana": {"attn1/to_q", "attn1/to_k", "attn1/to_v", "attn1/to_out/0", "attn2/to_q", "attn2/to_k", "attn2/to_v"}
    | {"attn2/to_out/0"},
    "sd3": {"attn/to_q", "attn/to_k", "attn/to_v", "attn/to_out/0", "attn/add_q_proj", "attn/add_k_proj"}
    | {"attn/add_v_proj", "attn/to_add_out"},
    "flux1": {"attn/to_q", "attn/to_k", "attn/to_v", "attn/to_out/0", "single attn/to_q", "single attn/to_k"}
    | {"single attn/to_v"},
}
SANA = [f"attn{i}/to_{x}" for i in "12" for x in ("q", "k", "v", "out/0")] + [
    "ff/conv_inverted",
    "ff/conv_depth",
    "ff/conv_point",
]
JOINT = [f"attn/{x}" for x in ("to_q", "to_k", "to_v", "to_out/0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")] + [
    *(f"{ff}/net/{x}" for ff in ("ff", "ff_context") for x in ("0/proj", "2")),
    *("norm1/linear", "norm1_context/linear"),
]
SINGLE = [f"single {x}" for x in ("attn/to_q", "attn/to_k", "attn/to_v", "norm/linear", "proj_mlp", "proj_out")]
KERNELS = {"sana": SANA, "sd3": JOINT, "flux1": JOINT + SINGLE}


def full_path(short: str, model: str = "") -> str:
    single = short.startswith("single ")
    stack = "0-36/" if model == "sd3" else ""  # SD3 holds its layers in runs of equal ones
    return f"{'single_' if single else ''}transformer_blocks/{stack}{short.removeprefix('single ')}/kernel"


@pytest.mark.parametrize("model", MATCHES)
def test_adapters_are_on_exactly_the_kernels_of_the_recipe(model):
    patterns = resolve(f"{model}_sol_rl_hpsv2").lora.targets
    outside = [
        "proj_out/kernel",
        "x_embedder/kernel",
        "patch_embed/proj/kernel",
        full_path("attn1/to_q").replace("kernel", "bias"),
    ]
    inside = [full_path(short, model) for short in KERNELS[model]]
    matched = {p for p in [*inside, *outside] if any(re.fullmatch(r, p) for r in patterns)}
    assert matched == {full_path(short, model) for short in MATCHES[model]}
    assert all(any(re.fullmatch(r, p) for p in matched) for r in patterns)


@pytest.mark.parametrize("model", ["tiny-flux", "tiny-sd3"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_other_models_of_tiny_go_with_every_family(model, family):
    c = resolve("tiny", [f"model={model}", f"family={family}"])
    assert (c.model.path, c.family, c.train.prompts) == (f"embedded:{model}", family, 12)
    assert c.rollout.kept == (12 if family == "diffusionnft" else 24)
    assert resolve("tiny", [f"family={family}"]).train.prompts == 6


def test_tiny_is_the_embedded_world():
    c = resolve("tiny")
    assert (c.model.path, c.reward.weights) == ("embedded:tiny-sana", {"shapes": 1.0})
    assert (c.prompts.train, c.prompts.test) == ("embedded:shapes-train", "embedded:shapes-test")
    sana = resolve("sana_sol_rl_hpsv2")
    assert (c.lora, c.model.quantize) == (sana.lora, sana.model.quantize)


def test_when_applies_to_its_choice_alone():
    assert resolve("tiny", ["family=diffusionnft"]).rollout.candidates == resolve("tiny").rollout.kept
    assert resolve("tiny", ["family=naive_scaling"]).rollout.candidates == resolve("tiny").rollout.candidates
    assert resolve("tiny", ["family=diffusionnft", "rollout.candidates=24"]).rollout.candidates == 24


def test_described_rows():
    rows = describe()
    assert [row["preset"] for row in rows] == preset_names()
    row = next(row for row in rows if row["preset"] == "sd3_sol_rl_clipscore")
    assert row["model"] == "sd3"
    assert (row["candidates"], row["explore"], row["train on"]) == ("24-in-96", "nvfp4, 6 steps", "bf16, 10 steps")


# --- overrides ---


def test_overrides_win_in_order_and_are_yaml():
    c = resolve(
        "tiny",
        [
            *("seed=3", "seed=7", "optimizer.learning_rate=1e-4", "lora.alpha=8", "rollout={explore: {steps: 4}, shift: 2}"),
            *("lora.targets=['a.*/kernel']", "run.dir='2024'", "eval.every=0"),
        ],
    )
    assert (c.seed, c.optimizer.learning_rate, c.lora.alpha, c.lora.targets) == (7, 1e-4, 8.0, ("a.*/kernel",))
    assert isinstance(c.lora.alpha, float)
    assert (c.rollout.explore.steps, c.rollout.explore.precision, c.rollout.shift, c.run.dir) == (4, "nvfp4_46", 2.0, "2024")
    assert resolve("tiny", ["seed=7", "run.dir="]).run.dir == "runs/tiny-sol_rl-seed7"


def test_weights_are_replaced_whole_or_changed_by_name():
    assert resolve("tiny", ["reward.weights={pickscore: 1, hpsv2: 2}"]).reward.weights == {"pickscore": 1.0, "hpsv2": 2.0}
    assert resolve("tiny", ["reward.weights.tiny-clip=0.5"]).reward.weights == {"shapes": 1.0, "tiny-clip": 0.5}


def test_parts_are_chosen_for_any_preset():
    c = resolve("sana_sol_rl_pickscore", ["model=flux1", "family=naive_quant", "reward=hpsv2"])
    expected = resolve("flux1_naive_quant_hpsv2")
    assert dataclasses.replace(c, preset="", run=expected.run) == dataclasses.replace(expected, preset="")
    assert resolve("tiny", ["reward=tiny-clip"]).reward.weights == {"tiny-clip": 1.0}
    assert resolve("tiny", ["reward.weights={a: 1}", "reward=clipscore"]).reward.weights == {"a": 1.0}


def test_resolving_leaves_no_trace_on_the_next():
    before = resolve("tiny")
    resolve("tiny", ["reward.weights.ocr=1", "rollout.explore.steps=2", "reward=hpsv2"])
    assert resolve("tiny") == before


# --- files and text ---


def test_files_and_fields_agree():
    """Every field is set by a file, and the files set nothing else."""
    fields = {key for key in known_keys() if not any(other.startswith(f"{key}.") for other in known_keys())}
    given = set()
    for path in presets._configs().rglob("*.yaml"):
        tree = yaml.safe_load(path.read_text())
        assert path.read_text().splitlines()[1].startswith("# "), path
        tree.pop("compose", None)
        trees = [tree, *tree.pop("when", {}).values()]
        given |= {key for tree in trees for key in leaves(tree)}
    assert given | {"preset", "family"} == fields


def leaves(tree: dict, prefix: str = "") -> set[str]:
    inner = lambda key, value: isinstance(value, dict) and key not in ("reward.weights", "reward.paths", "reward.options")
    return {
        leaf
        for name, value in tree.items()
        for leaf in (leaves(value, f"{prefix}{name}.") if inner(prefix + name, value) else {prefix + name})
    }


def test_configs_inside_the_package_come_first(tmp_path, monkeypatch):
    package = tmp_path / "solrl_jax"
    shutil.copytree(presets._configs(), tmp_path / "configs")
    monkeypatch.setattr(presets, "__file__", str(package / "presets.py"))
    assert presets._configs() == tmp_path / "configs"
    shutil.copytree(tmp_path / "configs", package / "configs")
    assert presets._configs() == package / "configs"


def test_a_condition_that_cannot_hold_is_refused(tmp_path, monkeypatch):
    shutil.copytree(presets._configs(), tmp_path / "configs")
    (tmp_path / "configs" / "mine.yaml").write_text(
        "compose: {model: sana, family: sol_rl, reward: hpsv2}\nwhen: {family=solrl: {seed: 1}}\n"
    )
    monkeypatch.setattr(presets, "_configs", lambda: tmp_path / "configs")
    assert "mine" in preset_names()
    with pytest.raises(ConfigError, match=r"^configs/mine.yaml: unknown condition 'family=solrl' under 'when'$"):
        resolve("mine")
