"""Defaults, checks of values and of rules between fields, sizes and batches."""

import dataclasses
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from solrl_jax.config.batch import describe_batch, effective_batch
from solrl_jax.config.inert import inert_fields
from solrl_jax.config.presets import resolve
from solrl_jax.config.schema import Config, Rollout
from solrl_jax.config.sizes import (
    evaluation_size,
    largest_training_size,
    pixel_shape,
    training_sizes,
)
from solrl_jax.config.values import ConfigError, contains_secret

TINY = resolve("tiny")


def message(preset: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(preset, overrides)
    text = str(caught.value)
    assert "\n" not in text
    return text


# --- defaults ---


def test_the_defaults_are_the_papers_main_preset():
    preset = resolve("sana_sol_rl_pickscore")
    assert dataclasses.replace(preset, run=Config().run) == Config()
    hash(Config())  # a configuration is a static argument of jit


def test_a_configuration_can_be_built_in_python():
    config = Config(rollout=Rollout(candidates=48, kept=12), seed=3)
    assert config.rollout.num_steps == 10
    with pytest.raises(
        ConfigError, match=r"rollout.kept=49: must be at most rollout.candidates=48"
    ):
        Rollout(candidates=48, kept=49)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1
    assert Rollout(candidates=12, kept=12).kept == 12  # nothing to select is allowed


# --- refusals ---

# Overrides of sana_sol_rl_pickscore and the message; ".*" stands for any text.
A_SIZE = "expected [HEIGHT, WIDTH] in pixels, or [HEIGHT, WIDTH, FRAMES]"
BAD = [
    # names
    (
        "rollout.canditates=3",
        "unknown key 'rollout.canditates': did you mean 'rollout.candidates'?",
    ),
    (
        "rollout.explore={num_stepz: 3}",
        "unknown key 'rollout.explore.num_stepz': did you mean 'rollout.explore.num_steps'?",
    ),
    ("qqq=1", "unknown key 'qqq': expected one of version, seed, preset, family, model, .*, run"),
    (
        "mesh.qqqqqqqqq=1",
        "unknown key 'mesh.qqqqqqqqq': expected one of mesh.data, mesh.fsdp, mesh.tensor, "
        "mesh.sequence",
    ),
    ("rollout.foo=1", "unknown key 'rollout.foo': expected one of rollout.candidates, .*"),
    ("rollout.explore.size=1", "unknown key 'rollout.explore.size': did you mean 'rollout.size'?"),
    (
        "rollout.explore.foo=1",
        "unknown key 'rollout.explore.foo': expected one of rollout.explore.precision, .*",
    ),
    ("optimizer.rank=1", "unknown key 'optimizer.rank': did you mean 'lora.rank'?"),
    ("rolout.kept=1", "unknown key 'rolout.kept': did you mean 'rollout.kept'?"),
    ("foo", "override 'foo': expected key=value, e.g. train.iterations=100"),
    ("seed=[1", "override 'seed=[1': not YAML (line 1: .*)"),
    ("preset=x", "preset='x': a preset is chosen by name, not by an override"),
    ("model=sanna", "unknown model 'sanna': did you mean 'sana'?"),
    ("model=https://me:x@host", "unknown model 'https://...@host': expected one of .*"),
    ('model="a\\nb"', "unknown model 'a\\nb': expected one of .*"),
    ("objective=flow_grp", "unknown objective 'flow_grp': did you mean 'flow_grpo'?"),
    ("version=1", "version=1: expected 3"),
    # types
    ("train.iterations=1.0", "train.iterations=1.0: expected an integer"),
    ("seed=true", "seed=True: expected an integer"),
    ("lora.alpha=x", "lora.alpha='x': expected a number"),
    ("algorithm.beta=.nan", "algorithm.beta=nan: expected a finite number"),
    ("run.wandb=1", "run.wandb=1: expected true or false"),
    ("lora.skip_text_encoders=1", "lora.skip_text_encoders=1: expected true or false"),
    (
        "run.dir=1",
        "run.dir=1: expected text (in quotes if it looks like a number or a date)",
    ),
    ("model.quantization=abc", "model.quantization='abc': expected a mapping of its fields"),
    (
        "model.quantization.modules_to_not_convert=abc",
        "model.quantization.modules_to_not_convert='abc': expected a list",
    ),
    ("reward.weights=3", "reward.weights=3: expected a mapping"),
    ("reward.weights='https://me:x@host'", "reward.weights='https://...@host': expected a mapping"),
    ("reward.weights='http://host?sig=x#b@c'", "reward.weights='http://host?sig=...#b@c': .*"),
    (
        "reward.weights='http://host?api-key=x&a=1'",
        "reward.weights='http://host?api-key=...&a=1': expected a mapping",
    ),
    ("reward.weights={a: b}", "reward.weights.a='b': expected a number"),
    # ranges
    ("reward.weights={}", "reward.weights={}: must not be empty"),
    ("model.path=", "model.path='': must not be empty"),
    ("lora.rank=0", "lora.rank=0: must be at least 1"),
    ("optimizer.eps=0", "optimizer.eps=0: must be above 0"),
    ("algorithm.ema_decay=1", "algorithm.ema_decay=1: must be below 1"),
    ("algorithm.timestep_fraction=1.1", "algorithm.timestep_fraction=1.1: must be at most 1"),
    ("mesh.data=0", "mesh.data=0: must be at least 1, or -1 for all devices that are left"),
    (
        "rollout.explore.precision=fp4",
        "rollout.explore.precision='fp4': expected 'auto', .*did you mean .*",
    ),
    (
        "lora.target_modules=['a(b']",
        "lora.target_modules.0='a(b': must be a regular expression (.*)",
    ),
    ("rollout.size=512", "rollout.size=512: expected a list"),
    ("rollout.size=[512]", f"rollout.size.0=[512]: {A_SIZE}"),
    ("eval.size=[[512,512]]", f"eval.size=[[512, 512]]: {A_SIZE}"),
    ("eval.size=[512,512,9,3]", f"eval.size=[512, 512, 9, 3]: {A_SIZE}"),
    ("reward.frames=0", "reward.frames=0: .*"),
    (
        "algorithm.objective=ppo",
        "algorithm.objective='ppo': expected one of nft, awm, opsd, refl, draft, dpo, .*,"
        " or module:function",
    ),
    (
        "reward=http://me:secret@localhost:1/",
        "reward: the URL of a service must contain no user name, password or token, .*",
    ),
    (
        "reward=http://localhost:1/?size=2&api_key=x",
        "reward: the URL of a service must contain no user name, password or token, .*",
    ),
    # rules between fields
    ("rollout.kept=97", "rollout.kept=97: must be at most rollout.candidates=96"),
    ("rollout.kept=23", "rollout.kept=23: must be even with rollout.selection=best_worst"),
    (
        "rollout.explore.num_steps=11",
        "rollout.explore.num_steps=11: must be at most rollout.num_steps=10",
    ),
    (
        "rollout.explore.exact_steps=6",
        "rollout.explore.exact_steps=6: must be less than rollout.explore.num_steps=6",
    ),
    (
        "rollout.regenerate=false",
        "rollout.explore.num_steps=6: must equal rollout.num_steps=10 with .*regenerate=false",
    ),
    (
        "family=naive_quant rollout.explore.min_rank_correlation=0.8",
        "rollout.explore.min_rank_correlation=0.8: must be null with rollout.regenerate=false, .*",
    ),
    ("rollout.noise_level=0.5", "rollout.noise_level=0.5: must be 0 with rollout.solver=euler"),
    (
        "objective=flow_grpo explore=best",
        "rollout.noise_level=0.7: must be 0 with rollout.explore.sigmas=first",
    ),
    ("rollout.sde_window_size=10", "rollout.sde_window_size=10: must be less than .*num_steps=10"),
    (
        "reward.eval_only=[pickscore]",
        "reward.eval_only=['pickscore']: must not name scores of reward.weights, .*",
    ),
    (
        "algorithm.timestep_fraction=0.05",
        "algorithm.timestep_fraction=0.05: must be at least 0.1, so that one of .*num_steps=10 sigmas .*",
    ),
    (  # the message has a value that is accepted
        "rollout.num_steps=7 algorithm.timestep_fraction=0.1",
        "algorithm.timestep_fraction=0.1: must be at least 0.142858, .* of .*num_steps=7 sigmas .*",
    ),
    (
        "optimizer.steps_per_iteration=7",
        "optimizer.steps_per_iteration=7: must divide .* sigmas = 6912",
    ),
    # what objectives need
    (
        "algorithm.objective=flow_grpo",
        "rollout.noise_level=0.0: must be above 0 for the transitions .*=flow_grpo trains on, .*",
    ),
    (
        "objective=flow_grpo rollout.num_steps=1 rollout.explore.num_steps=1 "
        "algorithm.timestep_fraction=1.0",
        "rollout.num_steps=1: must be at least 2 for the transitions .*",
    ),
    (
        "objective=flow_grpo family=naive_quant",
        "rollout.regenerate=False: must be true, or rollout.explore.precision=bf16, .*",
    ),
    (
        "objective=mix_grpo algorithm.timestep_fraction=0.5",
        "algorithm.timestep_fraction=0.5: must be at most 0.4 for .*mix_grpo.*",
    ),
    (
        "objective=dpo rollout.selection=best rollout.kept=5",
        "rollout.kept=5: must be even for the pairs of algorithm.objective=dpo",
    ),
    (
        "objective=dpo optimizer.per_device_batch_size=7",
        "optimizer.per_device_batch_size=7: must be even for the pairs of algorithm.objective=dpo",
    ),
    (
        "objective=dpo train.num_prompts=1 rollout.kept=6 optimizer.steps_per_iteration=12",
        "optimizer.steps_per_iteration=12: must leave an even number of terms per step for .*dpo",
    ),
    # several problems
    (
        "lora.rank=0 foo zeed=1 rollout.kept=97",
        "override 'foo': .*; unknown key 'zeed': .*; rollout.kept=97: .*; lora.rank=0: .*",
    ),
]


@pytest.mark.parametrize(("overrides", "expected"), BAD, ids=[overrides for overrides, _ in BAD])
def test_wrong_values_are_refused_with_field_value_and_what_is_accepted(overrides, expected):
    # Settings contain spaces only before the next key.
    split = re.split(r" (?=[\w.]+=|foo)", overrides)
    pattern = re.escape(expected).replace(r"\.\*", ".*")
    assert re.fullmatch(pattern, message("sana_sol_rl_pickscore", *split))


def test_unknown_presets_are_refused_with_the_nearest_name():
    assert message("tinny") == "unknown preset 'tinny': did you mean 'tiny'?"


# --- sizes and batches ---


def test_sizes_are_the_models_unless_configured():
    def sizes(*overrides):
        config = resolve("flux1_sol_rl_hpsv2", overrides)
        return training_sizes(config), largest_training_size(config), evaluation_size(config)

    assert sizes() == (((512, 512),), (512, 512), (512, 512))
    one = sizes("rollout.size=[256,320]", "eval.size=[1024,768]")
    assert one == (((256, 320),), (256, 320), (1024, 768))
    several = sizes("rollout.size=[[256,256],[192,384],[384,192]]")
    assert several == (((256, 256), (192, 384), (384, 192)), (192, 384), (512, 512))


def test_sizes_of_clips_have_the_models_frames_unless_they_have_their_own():
    def sizes(*overrides):
        config = resolve("wan-2.1-1.3b_sol_rl_hpsv2", ["eval.size=null", *overrides])
        return training_sizes(config), largest_training_size(config), evaluation_size(config)

    assert sizes() == (((480, 832, 17),), (480, 832, 17), (480, 832, 17))
    clips = sizes("rollout.size=[[256,256],[128,128,81]]", "eval.size=[480,832,41]")
    assert clips == (((256, 256, 17), (128, 128, 81)), (128, 128, 81), (480, 832, 41))
    none = sizes("model.frames=null", "eval.size=[64,64]")
    assert none == (((480, 832),), (480, 832), (64, 64))
    assert pixel_shape((4, 6)) == (4, 6, 3)
    assert pixel_shape((4, 6, 9)) == (9, 4, 6, 3)


@pytest.mark.parametrize(
    ("parameters", "refused"),
    [
        ("?model=design&q=keyboard#page=1", False),
        ("?X-Amz-Signature=1", True),
        ("?size=1&sig=2", True),
        ("#api-key", True),
    ],
)
def test_a_secret_is_known_by_the_name_of_its_parameter(parameters, refused):
    assert contains_secret(f"http://localhost:1/score{parameters}") == refused


def test_effective_batch_of_the_paper():
    config = resolve("sana_sol_rl_pickscore")
    batch = effective_batch(config, 8)
    assert (batch["terms"], batch["terms_per_step"]) == (6912, 6912)
    assert batch["terms_per_step_per_device"] * 8 == 6912
    assert batch["accumulation"] * config.optimizer.per_device_batch_size * 8 == 6912
    assert "48 prompts x 24 kept x 6 sigmas = 6912 terms" in describe_batch(config, 8)
    two = effective_batch(resolve("tiny", ["optimizer.steps_per_iteration=2"]), 1)
    assert two["terms_per_step"] * 2 == two["terms"]
    # Batch sizes are upper limits and need not divide the terms: 6912 terms are filled up to 6930.
    config = resolve("sana_sol_rl_pickscore", ["optimizer.per_device_batch_size=7"])
    uneven = effective_batch(config, 5)
    assert (uneven["terms_per_step_per_device"], uneven["accumulation"]) == (1383, 198)


@settings(deadline=None, max_examples=50)
@given(hundredths=st.integers(1, 100), steps=st.sampled_from([10, 50, 100, 200]))
@example(hundredths=29, steps=100)
def test_trained_sigmas_are_the_floor_in_exact_arithmetic(hundredths, steps):
    rollout = dataclasses.replace(TINY.rollout, num_steps=steps)
    algorithm = dataclasses.replace(TINY.algorithm, timestep_fraction=hundredths / 100)
    if hundredths * steps < 100:
        with pytest.raises(ConfigError, match=r"algorithm.timestep_fraction"):
            dataclasses.replace(TINY, rollout=rollout, algorithm=algorithm)
    else:
        config = dataclasses.replace(TINY, rollout=rollout, algorithm=algorithm)
        assert config.num_train_sigmas == hundredths * steps // 100


def test_the_window_of_stochastic_steps_moves_and_starts_again():
    rollout = resolve("sana_sol_rl_hpsv2", ["objective=mix_grpo"]).rollout
    assert rollout.num_sde_steps == 4
    starts = [rollout.window_start(iteration) for iteration in (1, 25, 26, 150, 151)]
    assert starts == [0, 0, 1, 5, 0]
    whole = resolve("sana_sol_rl_hpsv2", ["objective=flow_grpo"]).rollout
    assert (whole.num_sde_steps, whole.window_start(100)) == (9, 0)


# --- fields without effect ---


def test_inert_fields_are_those_of_what_is_switched_off():
    assert inert_fields(TINY) == {
        "model.mhla_blocks",
        "model.mhla_released",
        "model.mhla_norm",
        "rollout.sde_window_size",
        "rollout.sde_window_every",
        "algorithm.clip_range",
        "algorithm.kl_mask_threshold",
        "algorithm.query_sigma",
        "algorithm.last_steps",
        "algorithm.target_radius",
        "algorithm.target_steps",
    }
    opsd = inert_fields(resolve("tiny", ["objective=opsd"]))
    assert "algorithm.timestep_fraction" in opsd
    assert not {"algorithm.beta", "algorithm.query_sigma", "algorithm.target_steps"} & opsd
    refl = inert_fields(resolve("tiny", ["objective=refl"]))
    assert {"algorithm.beta", "algorithm.query_sigma", "algorithm.target_steps"} < refl
    assert "algorithm.last_steps" not in refl
    at_sigma = inert_fields(resolve("tiny", ["objective=refl", "algorithm.last_steps=null"]))
    assert "algorithm.query_sigma" not in at_sigma
    grpo = inert_fields(resolve("flux1_sol_rl_hpsv2", ["objective=mix_grpo"]))
    assert {"rollout.shift", "algorithm.beta"} < grpo
    assert not {"rollout.sde_window_size", "algorithm.clip_range"} & grpo
    dppo = inert_fields(resolve("tiny", ["objective=flow_dppo"]))
    assert "algorithm.clip_range" in dppo
    assert "algorithm.kl_mask_threshold" not in dppo
    plain = inert_fields(resolve("sana_diffusionnft_hpsv2", ["train.parameters=all"]))
    assert {"model.quantization", "rollout.explore.correction_rank", "lora"} < plain
    plugin = inert_fields(resolve("tiny", ["objective=json:dumps"]))
    assert not {"algorithm.beta", "algorithm.clip_range"} & plugin
