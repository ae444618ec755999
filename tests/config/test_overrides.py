"""Overrides `key=value`: YAML values, text, parts, plug-ins and old names."""

import dataclasses
from inspect import unwrap

import pytest

from solrl_jax.config.overrides import quote_override
from solrl_jax.config.presets import override, resolve
from solrl_jax.config.serialization import from_yaml, to_yaml
from solrl_jax.config.values import ConfigError


def test_later_overrides_win_and_values_are_yaml():
    config = resolve(
        "tiny",
        [
            "seed=3",
            "seed=7",
            "optimizer.learning_rate=1e-4",
            "lora.alpha=8",
            "rollout={explore: {num_steps: 4}, shift: 2}",
            "lora.target_modules=['a.*/kernel']",
            "run.dir='2024'",
        ],
    )
    assert (config.seed, config.optimizer.learning_rate) == (7, 1e-4)
    assert isinstance(config.lora.alpha, float)
    assert config.lora.target_modules == ("a.*/kernel",)
    assert (config.rollout.explore.num_steps, config.rollout.explore.precision) == (4, "nvfp4")
    assert (config.rollout.shift, config.run.dir) == (2.0, "2024")
    assert resolve("tiny", ["seed=7", "run.dir="]).run.dir == "runs/tiny-sol_rl-seed7"


@pytest.mark.parametrize("text", ["a #b", "a\\nb", "/x y/'z'", "- ?", "&a b"])
def test_text_without_quotes_is_taken_as_it_is(text):
    assert resolve("tiny", [f"run.dir=x{text}"]).run.dir == f"x{text}"
    assert resolve("tiny", [quote_override("run.dir", text)]).run.dir == text
    quoted = text.replace("'", "''")
    assert resolve("tiny", [f"run.dir='{quoted}' # a comment"]).run.dir == text


def test_weights_are_replaced_whole_or_changed_by_name():
    both = {"pickscore": 1.0, "hpsv2": 2.0}
    assert resolve("tiny", ["reward.weights={pickscore: 1, hpsv2: 2}"]).reward.weights == both
    changed = resolve("tiny", ["reward.weights.tiny-clip=0.5"]).reward.weights
    assert changed == {"shapes": 1.0, "tiny-clip": 0.5}


def test_parts_are_chosen_for_any_preset():
    config = resolve("sana_sol_rl_pickscore", ["model=flux1", "family=naive_quant", "reward=hpsv2"])
    expected = resolve("flux1_naive_quant_hpsv2")
    assert dataclasses.replace(config, preset=expected.preset, run=expected.run) == expected
    assert resolve("tiny", ["model='tiny-flux'"]).model.name == "tiny-flux"
    weights = resolve("tiny", ["reward.weights={a: 1}", "reward=clipscore"]).reward.weights
    assert weights == {"a": 1.0}


def test_rewards_and_objectives_may_be_functions():
    config = resolve("tiny", ["reward=my_module:score", "objective=my.module:loss"])
    assert config.reward.weights == {"my_module:score": 1.0}
    assert config.algorithm.objective == "my.module:loss"
    assert resolve("tiny", ["algorithm.objective=my.module:loss"]).algorithm == config.algorithm
    assert from_yaml(to_yaml(config)) == config
    last = resolve("tiny", ["objective=my.module:loss", "objective=awm"])
    assert last == resolve("tiny", ["objective=awm"])
    with pytest.raises(ConfigError, match=r"^unknown objective 'my module:loss': expected one of"):
        resolve("tiny", ["objective=my module:loss"])


def test_the_kind_of_an_objective_outside_the_package_is_an_attribute(monkeypatch):
    monkeypatch.setattr("tests.outside.mean.trains_on", "pairs", raising=False)
    config = resolve("tiny", ["objective=tests.outside:mean", "optimizer.per_device_batch_size=7"])
    assert config.algorithm.trains_on == "pairs"
    with pytest.raises(ConfigError, match="per_device_batch_size=7: must be even for the pairs of"):
        config.check_objective()
    assert resolve("tiny", ["objective=tests.outside:time"]).algorithm.trains_on == "samples"


def test_resolving_leaves_no_trace_on_the_next():
    before = resolve("tiny")
    resolve("tiny", ["reward.weights.ocr=1", "rollout.explore.num_steps=2", "reward=hpsv2"])
    assert resolve("tiny") == before


def test_names_of_version_2_work_with_a_warning_that_names_the_new_one():
    with pytest.warns(FutureWarning, match="policy.kl_weight is now called algorithm.kl_coef"):
        config = resolve("tiny", ["policy.kl_weight=0.5"])
    assert config.algorithm.kl_coef == 0.5
    with pytest.warns(
        FutureWarning, match=r"model.remat is now called model.gradient_checkpointing"
    ):
        config = resolve("tiny", ["model.remat=products"])
    assert config.model.gradient_checkpointing == "matmuls"
    with pytest.warns(FutureWarning, match="rollout=.* is now written"):
        config = resolve("tiny", ["rollout={guidance: 2, explore: {steps: 4}}"])
    assert (config.rollout.guidance_scale, config.rollout.explore.num_steps) == (2.0, 4)


# --- of runs ---


def test_fields_of_a_run_are_changed_and_parts_but_explore_are_refused():
    config = resolve("tiny", ["seed=3", "explore=best"])
    changed = override(
        config,
        ["rollout.explore.num_steps=4", "rollout={shift: 2}", "reward.weights.tiny-clip=0.5"],
    )
    explore = dataclasses.replace(config.rollout.explore, num_steps=4)
    rollout = dataclasses.replace(config.rollout, shift=2.0, explore=explore)
    reward = dataclasses.replace(config.reward, weights={"shapes": 1.0, "tiny-clip": 0.5})
    assert changed == dataclasses.replace(config, rollout=rollout, reward=reward)
    assert override(config, []) == config
    for choice in ("model=sana", "family=sol_rl", "reward=hpsv2", "objective=dpo"):
        with pytest.raises(
            ConfigError, match=f"^{choice}: can be chosen for a preset, not for a run$"
        ):
            override(config, [choice])


@pytest.mark.parametrize("other", [3, None, {"seed": 1}])
def test_an_override_of_a_run_is_text(other):
    with pytest.raises(ConfigError, match="expected text, a preset's name and overrides"):
        unwrap(override)(resolve("tiny"), ["seed=1", other])


def test_a_recipe_brings_the_models_rules_unless_the_user_has_others():
    for preset in ("sana_sol_rl_hpsv2", "sd3_naive_quant_hpsv2", "flux1_sol_rl_hpsv2", "tiny"):
        for recipe in ("paper", "best", "fast"):
            chosen = resolve(preset, [f"explore={recipe}"])
            for other in ("paper", "fast"):
                before = resolve(preset, [f"explore={other}"])
                assert override(before, [f"explore={recipe}"]) == chosen
    paper, fast = (resolve("sana_sol_rl_hpsv2", [f"explore={x}"]).model for x in ("paper", "fast"))
    assert fast.quantization.min_width_ratio == 0 < paper.quantization.min_width_ratio
    mine = resolve("sana_sol_rl_hpsv2", ["model.quantization.min_width_ratio=0.5"])
    assert override(mine, ["explore=fast"]).model.quantization == mine.model.quantization


def test_a_home_directory_is_expanded_in_every_path(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    paths = {
        "run.dir": lambda config: config.run.dir,
        "model.path": lambda config: config.model.path,
        "model.instruction": lambda config: config.model.instruction,
        "model.prompt_cache_dir": lambda config: config.model.prompt_cache_dir,
        "prompts.train": lambda config: config.prompts.train,
        "prompts.test": lambda config: config.prompts.test,
        "lora.path": lambda config: config.lora.path,
        "reward.paths.hpsv2": lambda config: config.reward.paths["hpsv2"],
    }
    config = resolve("tiny", [f"{name}=~/x/{name}" for name in paths])
    for name, get in paths.items():
        assert get(config) == str(tmp_path / "x" / name)
    assert resolve("tiny", ["run.dir=a~/b"]).run.dir == "a~/b"
    with pytest.raises(ConfigError, match=r"^run.dir='~nobody-at-all/x': no home directory of"):
        resolve("tiny", ["run.dir=~nobody-at-all/x"])
