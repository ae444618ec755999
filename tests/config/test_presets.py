"""Every preset resolves to the numbers of its recipe, and files combine in their order."""

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml

import solrl_jax
from solrl_jax.config import files
from solrl_jax.config.presets import (
    FAMILIES,
    override,
    preset_names,
    preset_rows,
    released_models,
    resolve,
)
from solrl_jax.config.schema import OBJECTIVES
from solrl_jax.config.serialization import from_yaml, to_yaml
from solrl_jax.config.validation import field_names
from solrl_jax.config.values import ConfigError

# Solver steps of distilled models, and how many of them Sol-RL explores with.
DISTILLED = {"flux2-klein-4b": (4, 2), "flux2-klein-9b": (4, 2), "zimage-turbo": (8, 4)}


# --- what the presets are ---


def test_every_released_model_has_16_presets_and_there_is_tiny():
    names = preset_names()
    assert {"sana", "flux1", "sd3"} <= set(released_models())
    assert len(names) == len(set(names)) == 1 + 16 * len(released_models())
    assert {"tiny", "sana_sol_rl_pickscore", "sd3_diffusionnft_imagereward"} <= set(names)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_preset_keeps_the_invariants_of_its_family(family):
    named = [(name, ()) for name in preset_names() if f"_{family}_" in name]
    for name, overrides in [*named, ("tiny", (f"family={family}",))]:
        config = resolve(name, overrides)
        rollout = config.rollout
        explore = rollout.explore
        assert (config.preset, config.family) == (name, family)
        assert explore.precision == ("nvfp4" if family in ("naive_quant", "sol_rl") else "bf16")
        full, part = DISTILLED.get(config.model.name, (10, 6))
        assert explore.num_steps == (part if family == "sol_rl" else full)
        assert rollout.num_steps == full
        options = (explore.sigmas, explore.exact_steps, explore.correction_rank, explore.attention)
        assert options == ("default", 0, 0, "default")  # the paper has no options
        assert rollout.regenerate == (family == "sol_rl")
        assert rollout.candidates == rollout.kept * (1 if family == "diffusionnft" else 4)
        assert config.run.dir == f"runs/{name}-{family}-seed{config.seed}"


def covers_a_model_or_family(name: str) -> bool:
    """Whether a preset is one of those that together have every model and every family once."""
    model, _, rest = name.partition("_")
    return name == "tiny" or rest == "sol_rl_hpsv2" or (model, rest[-5:]) == ("sana", "hpsv2")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if covers_a_model_or_family(name) else pytest.mark.exhaustive)
        for name in preset_names()
    ],
)
def test_a_preset_survives_its_text(name):
    config = resolve(name)
    assert from_yaml(to_yaml(config)) == config


# Height, solver, schedule, shift, trained sigmas, gradient norm, batch size, evaluation steps,
# tokens, and path.
RECIPES = {
    "sana": (
        *(1024, "euler", "linear", 1.0, 6, 1.0, 16, 40, 300),
        "Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers",
    ),
    "sd3": (
        *(1024, "dpm2", "sd3", 3.0, 6, 0.002, 8, 40, 128),
        "stabilityai/stable-diffusion-3.5-large",
    ),
    "sd3-medium": (
        *(512, "dpm2", "sd3", 3.0, 9, 1.0, 24, 40, 128),
        "stabilityai/stable-diffusion-3.5-medium",
    ),
    "sana-600m": (
        *(512, "euler", "linear", 1.0, 6, 1.0, 48, 40, 300),
        "Efficient-Large-Model/Sana_600M_512px_diffusers",
    ),
    "sana-1.5-1.6b": (
        *(1024, "euler", "linear", 1.0, 6, 1.0, 16, 40, 300),
        "Efficient-Large-Model/SANA1.5_1.6B_1024px_diffusers",
    ),
    "sana-1.5-4.8b": (
        *(1024, "euler", "linear", 1.0, 6, 1.0, 8, 40, 300),
        "Efficient-Large-Model/SANA1.5_4.8B_1024px_diffusers",
    ),
    "flux1": (512, "dpm2", "flux", 3.0, 4, 1.0, 12, 28, 128, "black-forest-labs/FLUX.1-dev"),
    "qwen-image": (512, "dpm2", "flux", 1.0, 6, 1.0, 4, 28, 256, "Qwen/Qwen-Image"),
    "qwen-image-2512": (512, "dpm2", "flux", 1.0, 6, 1.0, 4, 28, 256, "Qwen/Qwen-Image-2512"),
    "wan-2.1-1.3b": (
        *(480, "dpm2", "linear", 3.0, 6, 1.0, 2, 20, 512),
        "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
    ),
    "wan-2.2-5b": (
        *(704, "dpm2", "linear", 5.0, 6, 1.0, 2, 20, 512),
        "Wan-AI/Wan2.2-TI2V-5B-Diffusers",
    ),
    "zimage": (1024, "dpm2", "linear", 6.0, 6, 1.0, 8, 28, 128, "Tongyi-MAI/Z-Image"),
    "zimage-turbo": (1024, "euler", "linear", 3.0, 4, 1.0, 8, 8, 128, "Tongyi-MAI/Z-Image-Turbo"),
}


@pytest.mark.parametrize("model", RECIPES)
def test_models_have_the_numbers_of_their_recipe(model):
    config = resolve(f"{model}_sol_rl_hpsv2")
    rollout = config.rollout
    optimizer = config.optimizer
    assert RECIPES[model] == (
        *(config.model.height, rollout.solver, rollout.schedule, rollout.shift),
        *(config.num_train_sigmas, optimizer.max_grad_norm, optimizer.per_device_batch_size),
        *(config.eval.num_steps, config.model.max_sequence_length, config.model.path),
    )
    width = {"wan-2.1-1.3b": 832, "wan-2.2-5b": 1280}.get(model, config.model.height)
    assert (config.model.name, config.model.width) == (model, width)
    assert rollout.guidance_scale == 1.0


def test_shared_numbers_are_the_papers():
    config = resolve("sana_sol_rl_pickscore")
    rollout = config.rollout
    algorithm = config.algorithm
    optimizer = config.optimizer
    assert (rollout.candidates, rollout.kept, rollout.selection) == (96, 24, "best_worst")
    assert (rollout.precision, config.train.num_prompts) == ("bf16", 48)
    assert (algorithm.beta, algorithm.kl_coef, algorithm.adv_clip_max) == (1.0, 1e-4, 5.0)
    assert (algorithm.adv_mode, algorithm.global_std) == ("all", True)
    assert (algorithm.decay_type, algorithm.ema_decay) == (1, 0.9)
    assert (config.lora.rank, config.lora.alpha) == (32, 64.0)
    assert (optimizer.learning_rate, optimizer.steps_per_iteration) == (3e-4, 1)
    assert (optimizer.beta1, optimizer.beta2, optimizer.eps) == (0.9, 0.999, 1e-8)
    assert (optimizer.weight_decay, config.reward.weights) == (1e-4, {"pickscore": 1.0})


# The modules of diffusers whose kernels get an adapter, without the index of their layer, by model.
ATTENTION = {"to_q", "to_k", "to_v", "to_out/0"}
TARGETS = {
    "sana": {f"attn{i}/{name}" for i in (1, 2) for name in ATTENTION},
    "sd3": {
        f"attn/{name}"
        for name in ATTENTION | {"add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"}
    },
    "flux1": {f"attn/{name}" for name in ATTENTION}
    | {f"single attn/{name}" for name in ATTENTION - {"to_out/0"}},
    "flux2-klein-4b": {f"attn/{name}" for name in ATTENTION} | {"single attn/to_qkv_mlp_proj"},
}
TARGETS["qwen-image"] = TARGETS["sd3"]
TARGETS["sd3-medium"] = TARGETS["sd3"]  # as in Flow-GRPO: none on the image's own attention
# All modules of diffusers with a kernel in a layer.
JOINT = [f"attn/{x}" for x in (*ATTENTION, "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")]
JOINT += [f"{ff}/net/{x}" for ff in ("ff", "ff_context") for x in ("0/proj", "2")]
JOINT += ["norm1/linear", "norm1_context/linear"]
SINGLE = ["attn/to_q", "attn/to_k", "attn/to_v", "norm/linear", "proj_mlp", "proj_out"]
MODULES = {
    "sana": [
        *TARGETS["sana"],
        *(f"ff/conv_{x}" for x in ("inverted", "depth", "point")),
    ],
    "qwen-image": [
        *JOINT[:8],
        *(f"{mlp}/net/{x}" for mlp in ("img_mlp", "txt_mlp") for x in ("0/proj", "2")),
        *("img_mod/1", "txt_mod/1"),
    ],
    "sd3": JOINT,
    "sd3-medium": [*JOINT, *(f"attn2/{name}" for name in ATTENTION)],
    "flux1": [*JOINT, *(f"single {name}" for name in SINGLE)],
    "flux2-klein-4b": [
        *JOINT[:8],
        *("ff/linear_in", "ff/linear_out", "single attn/to_qkv_mlp_proj", "single attn/to_out"),
    ],
}


def kernel_path(module: str, model: str = "") -> str:
    # SD3 holds its layers in runs of equal ones.
    stack = {"sd3": "0-36/", "sd3-medium": "0-12/"}.get(model, "")
    prefix = "single_" if module.startswith("single ") else ""
    return f"{prefix}transformer_blocks/{stack}{module.removeprefix('single ')}/kernel"


@pytest.mark.parametrize("model", TARGETS)
def test_adapters_are_on_exactly_the_kernels_of_the_recipe(model):
    patterns = resolve(f"{model}_sol_rl_hpsv2").lora.target_modules
    outside = ["proj_out/kernel", "x_embedder/kernel", "transformer_blocks/attn1/to_q/bias"]
    paths = [kernel_path(module, model) for module in MODULES[model]] + outside
    matched = {path for path in paths if any(re.fullmatch(p, path) for p in patterns)}
    assert matched == {kernel_path(module, model) for module in TARGETS[model]}
    assert all(any(re.fullmatch(p, path) for path in matched) for p in patterns)


def test_models_of_one_architecture_share_their_rules():
    for name in ("sana-600m", "sana-1.5-1.6b", "sana-1.5-4.8b"):
        for recipe in ("paper", "fast"):
            config, other = (
                resolve(f"{model}_sol_rl_hpsv2", [f"explore={recipe}"]) for model in (name, "sana")
            )
            assert config.lora == other.lora
            assert config.model.quantization == other.model.quantization
            assert config.rollout.explore == other.rollout.explore
    for field in ("lora", "rollout", "optimizer", "algorithm"):
        one, other = (
            getattr(resolve(f"{name}_sol_rl_hpsv2"), field)
            for name in ("qwen-image", "qwen-image-2512")
        )
        assert one == other
    for name in ("flux2-klein-9b", "flux2-klein-base-4b", "flux2-klein-base-9b"):
        config = resolve(f"{name}_sol_rl_hpsv2")
        other = resolve("flux2-klein-4b_sol_rl_hpsv2")
        assert config.lora == other.lora
        assert config.model.quantization == other.model.quantization
    wan, other = (resolve(f"{name}_sol_rl_hpsv2") for name in ("wan-2.2-5b", "wan-2.1-1.3b"))
    assert wan.lora == other.lora
    assert wan.model.quantization == other.model.quantization


@pytest.mark.parametrize("model", ["tiny-flux", "tiny-sd3"])
def test_the_other_models_of_tiny_go_with_every_family(model):
    for family in FAMILIES:
        config = resolve("tiny", [f"model={model}", f"family={family}"])
        assert (config.model.path, config.train.num_prompts) == (f"embedded:{model}", 12)
        assert config.rollout.kept == (12 if family == "diffusionnft" else 24)


def test_clips_of_tiny_have_a_world_of_their_own():
    for family in FAMILIES:
        config = resolve("tiny", ["model=tiny-wan", f"family={family}"])
        assert config.model.path == "embedded:tiny-wan"
        assert config.reward.weights == {"motion": 1.0}
        assert config.prompts.train == "embedded:motion-train"
        assert config.prompts.test == "embedded:motion-test"
    chosen = resolve("tiny", ["model=tiny-wan", "reward=jpeg_compressibility"])
    assert chosen.reward.weights == {"jpeg_compressibility": 1.0}
    assert chosen.prompts.train == "embedded:motion-train"
    own = resolve("tiny", ["model=tiny-wan", "reward=my_rewards:score"])
    assert own.reward.weights == {"my_rewards:score": 1.0}


@pytest.mark.parametrize("reward", ["ocr", "geneval"])
def test_rewards_of_tiny_that_cannot_score_shapes_have_their_own_prompts(reward):
    own = resolve("sana_sol_rl_hpsv2", [f"reward={reward}"]).prompts
    for model in ("tiny-sana", "tiny-wan"):
        assert resolve("tiny", [f"model={model}", f"reward={reward}"]).prompts == own


def test_tiny_is_the_embedded_world():
    config = resolve("tiny")
    assert (config.model.path, config.reward.weights) == ("embedded:tiny-sana", {"shapes": 1.0})
    assert config.prompts.train == "embedded:shapes-train"
    assert config.prompts.test == "embedded:shapes-test"
    sana = resolve("sana_sol_rl_hpsv2")
    assert (config.lora, config.model.quantization) == (sana.lora, sana.model.quantization)


def test_the_table_of_presets():
    rows = preset_rows()
    assert [row["preset"] for row in rows] == preset_names()
    row = next(row for row in rows if row["preset"] == "sd3_sol_rl_clipscore")
    assert row == {
        "preset": "sd3_sol_rl_clipscore",
        "model": "sd3",
        "family": "sol_rl",
        "reward": "clipscore",
        "candidates": "24-in-96",
        "explore": "nvfp4, 6 steps",
        "train on": "bf16, 10 steps",
    }


def test_every_objective_has_a_file_of_settings_and_a_module():
    modules = (Path(solrl_jax.__file__).parent / "rl" / "objectives").glob("*.py")
    names = {path.stem for path in modules} - {"__init__"}
    assert set(files.part_files("objective")) == names == set(OBJECTIVES)
    assert resolve("tiny", ["objective=nft"]) == resolve("tiny")
    grpo = resolve("sd3_sol_rl_hpsv2", ["objective=flow_grpo"])
    assert (grpo.rollout.solver, grpo.rollout.noise_level) == ("flow_sde", 0.7)
    assert (grpo.algorithm.kl_coef, grpo.algorithm.clip_range) == (0.01, 1e-4)
    assert (grpo.algorithm.decay_type, grpo.num_train_sigmas) == (0, 9)
    # The small gradient norm of SD3 belongs to its recipe for nft.
    for name, expected in (("nft", 0.002), ("flow_grpo", 1.0), ("awm", 1.0)):
        config = resolve("sd3_sol_rl_hpsv2", [f"objective={name}"])
        assert config.optimizer.max_grad_norm == expected


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_recipe_for_ocr_leaves_other_objectives_their_settings(name):
    plain, ocr = (
        resolve("sana_sol_rl_hpsv2", [f"objective={name}", f"reward={reward}"])
        for reward in ("hpsv2", "ocr")
    )
    assert ocr.optimizer.steps_per_iteration == 2
    expected = (plain.algorithm.beta, plain.algorithm.decay_type)
    if name == "nft":
        expected = (0.1, 2)
    assert (ocr.algorithm.beta, ocr.algorithm.decay_type) == expected


# --- files ---


@pytest.fixture
def configs(tmp_path, monkeypatch):
    """A copy of `configs/` that is read in its place."""
    folder = tmp_path / "configs"
    shutil.copytree(files.CONFIGS, folder)
    monkeypatch.setattr(files, "CONFIGS", folder)
    files.read_file.cache_clear()
    yield folder
    files.read_file.cache_clear()


def test_files_set_only_fields():
    for path in files.CONFIGS.rglob("*.yaml"):
        if path.parent.name == "study":
            continue
        tree = yaml.safe_load(path.read_text())
        composed = tree.pop("compose", {})
        for other_parts in ({}, *composed.get("when", {}).values()):
            for part, name in {**composed, **other_parts}.items():
                assert part == "when" or name in files.part_files(part), path
        conditions = tree.pop("when", {})
        for settings in (tree, *conditions.values()):
            assert set(flatten(settings)) <= set(field_names()), path


def flatten(tree: dict, prefix: str = "") -> list[str]:
    """Dotted names of the fields in a file. The keys of `reward.weights` are no fields."""
    names = []
    for key, value in tree.items():
        name = f"{prefix}{key}"
        is_section = isinstance(value, dict) and name != "reward.weights"
        names += flatten(value, f"{name}.") if is_section else [name]
    return names


def test_conditional_settings_apply_to_their_choice_alone():
    assert resolve("tiny", ["family=diffusionnft"]).rollout.candidates == 12
    assert resolve("tiny", ["family=naive_scaling"]).rollout.candidates == 48
    overridden = resolve("tiny", ["family=diffusionnft", "rollout.candidates=24"])
    assert overridden.rollout.candidates == 24
    # A condition in the file of an early part wins over the settings of a later one.
    for family, steps in (("sol_rl", 2), ("naive_quant", 4)):
        config = resolve("flux2-klein-4b_sol_rl_hpsv2", [f"family={family}"])
        assert config.rollout.explore.num_steps == steps


@pytest.mark.parametrize("part", ["model/sana", "family/sol_rl", "explore/paper", "reward/hpsv2"])
def test_files_of_any_part_may_have_conditional_settings(configs, part):
    """Conditional settings follow the unconditional ones of all files."""
    path = configs / f"{part}.yaml"
    plain = path.read_text().partition("\nwhen:")[0]
    conditions = "{model=sana: {seed: 5, lora: {rank: 7}}, family=naive_quant: {seed: 6}}"
    path.write_text(f"{plain}\nseed: 1\nwhen: {conditions}\n")
    config = resolve("sana_sol_rl_hpsv2")
    assert (config.seed, config.lora.rank, config.lora.alpha) == (5, 7, 64.0)
    assert resolve("sana_sol_rl_hpsv2", ["seed=9"]).seed == 9
    presets = {"flux1_sol_rl_hpsv2": 1, "sana_naive_quant_hpsv2": 6, "sana_sol_rl_clipscore": 5}
    for preset, seed in presets.items():
        uses_file = part == "explore/paper" or part.split("/")[1] in preset
        assert resolve(preset).seed == (seed if uses_file else 0), preset


def test_a_condition_that_cannot_hold_is_refused(configs):
    (configs / "mine.yaml").write_text(
        "compose: {model: sana, family: sol_rl, reward: hpsv2}\nwhen: {family=solrl: {seed: 1}}\n"
    )
    assert "mine" in preset_names()
    expected = r"^configs/mine.yaml: unknown condition 'family=solrl' under 'when'$"
    with pytest.raises(ConfigError, match=expected):
        resolve("mine")


def test_a_recipe_has_settings_for_models_and_families_of_presets_and_of_runs(configs):
    (configs / "explore" / "mine.yaml").write_text(
        "rollout: {explore: {sigmas: default, exact_steps: 0, correction_rank: 4}}\n"
        "when: {family=sol_rl: {rollout: {explore: {exact_steps: 2}}},"
        " model=flux1: {rollout: {explore: {num_steps: 5}}}}\n"
    )
    expected = {
        "tiny": (4, 2, 6),
        "sana_naive_quant_hpsv2": (4, 0, 10),
        "flux1_sol_rl_hpsv2": (4, 2, 5),
    }
    for preset, numbers in expected.items():
        chosen = resolve(preset, ["explore=mine"])
        explore = chosen.rollout.explore
        assert (explore.correction_rank, explore.exact_steps, explore.num_steps) == numbers
        assert override(resolve(preset), ["explore=mine"]) == chosen


def test_a_recipe_with_a_condition_that_a_run_does_not_record_is_for_presets_alone(configs):
    paper = (configs / "explore" / "paper.yaml").read_text()
    (configs / "explore" / "mine.yaml").write_text(
        f"{paper}\nwhen: {{reward=hpsv2: {{seed: 4}}}}\n"
    )
    assert resolve("sana_sol_rl_hpsv2", ["explore=mine"]).seed == 4
    assert resolve("sana_sol_rl_clipscore", ["explore=mine"]).seed == 0
    expected = (
        r"^configs/explore/mine.yaml: condition 'reward=hpsv2' .* for a preset, not for a run$"
    )
    with pytest.raises(ConfigError, match=expected):
        override(resolve("sana_sol_rl_hpsv2"), ["explore=mine"])


def test_keys_of_free_fields_keep_their_dots():
    options = {"my.module:score": {"a.b": 1}}
    config = resolve("tiny", ["reward=my.module:score", f"reward.options={json.dumps(options)}"])
    assert config.reward.options == options
