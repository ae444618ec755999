"""Every impossible configuration is refused in one line that helps; text round trips exactly; the batch adds up."""

import dataclasses
import re
import subprocess
import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from solrl_jax.config.batch import describe_batch, effective_batch
from solrl_jax.config.presets import from_yaml, resolve, to_yaml
from solrl_jax.config.schema import Config
from solrl_jax.config.sizes import evaluation_size, largest_training_size, training_sizes
from solrl_jax.config.values import MAX_NUMBER, ConfigError

TINY = resolve("tiny")


def message(preset: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(preset, overrides)
    text = str(caught.value)
    assert "\n" not in text
    return text


# --- refusals ---

BAD = [
    (
        ("rollout.canditates=3",),
        "unknown key 'rollout.canditates': did you mean 'rollout.candidates'?",
    ),
    (
        ("rollout.explore={stepz: 3}",),
        "unknown key 'rollout.explore.stepz': did you mean 'rollout.explore.num_steps'?",
    ),
    (
        ("qqq=1",),
        "unknown key 'qqq': expected one of version, seed, preset, family, model, rollout, reward, algorithm, lora, .*, mesh, run",
    ),
    (
        ("mesh.qqqqqqqqq=1",),
        "unknown key 'mesh.qqqqqqqqq': expected one of mesh.data, mesh.fsdp, mesh.tensor",
    ),
    (("seed.x=1",), "unknown key 'seed.x': did you mean 'seed'?"),
    (("rollout={1: 2}",), "unknown key 'rollout.1': .*"),
    (("foo",), "override 'foo': expected key=value, e.g. train.iterations=100"),
    (("=3",), "override '=3': expected key=value, e.g. train.iterations=100"),
    (("seed=[1",), "override 'seed=[1': not YAML (line 1: .*)"),
    (("run.dir=2024-13-01",), "override 'run.dir=2024-13-01': not YAML (month must be in 1..12.*)"),
    (("preset=x",), "preset='x': is chosen by name, not by an override"),
    (("model=sanna",), "unknown model 'sanna': did you mean 'sana'?"),
    (("family=solrl",), "unknown family 'solrl': did you mean 'sol_rl'?"),
    (
        ("reward=qqq",),
        "unknown reward 'qqq': expected one of aesthetic, clipscore, geneval, hpsv2, .*, pickscore, shapes, tiny-clip",
    ),
    (("train.iterations=x",), "train.iterations='x': expected an integer"),
    (("train.iterations=1.0",), "train.iterations=1.0: expected an integer"),
    (("seed=true",), "seed=True: expected an integer"),
    (("lora.alpha=true",), "lora.alpha=True: expected a number"),
    (("lora.alpha=x",), "lora.alpha='x': expected a number"),
    (("algorithm.beta=.nan",), "algorithm.beta=nan: expected a finite number"),
    (("algorithm.beta=inf",), "algorithm.beta=inf: expected a finite number"),
    (("run.wandb=1",), "run.wandb=1: expected true or false"),
    (("run.dir=1",), "run.dir=1: expected text (in quotes if it looks like a number or a date)"),
    (("model.quantization=abc",), "model.quantization='abc': expected a mapping of its fields"),
    (
        ("model.quantization.modules_to_not_convert=abc",),
        "model.quantization.modules_to_not_convert='abc': expected a list",
    ),
    (
        ("model.quantization.min_width_ratio=-1",),
        "model.quantization.min_width_ratio=-1: must be at least 0",
    ),
    (
        ("rollout.explore.precision=fp4",),
        "rollout.explore.precision='fp4': expected 'auto', .*did you mean .*",
    ),
    (("reward.weights=3",), "reward.weights=3: expected a mapping"),
    (("reward.weights={a: b}",), "reward.weights.a='b': expected a number"),
    (("reward.weights={}",), "reward.weights={}: must not be empty"),
    (("rollout=3", "rollout.kept=2"), "rollout=3: expected a mapping of its fields"),
    (("rollout.solver=eulr",), "rollout.solver='eulr': expected 'euler', .* did you mean 'euler'?"),
    (("rollout.precision=nvfp4",), "rollout.precision='nvfp4': expected 'bf16' or 'fp32'"),
    (("rollout.kept=97",), "rollout.kept=97: must be at most rollout.candidates=96"),
    (("rollout.kept=23",), "rollout.kept=23: must be even with rollout.selection=best_worst"),
    (("rollout.kept=1",), "rollout.kept=1: must be at least 2"),
    (
        ("rollout.explore.num_steps=11",),
        "rollout.explore.num_steps=11: must be at most rollout.num_steps=10",
    ),
    (
        ("rollout.explore.exact_steps=6",),
        "rollout.explore.exact_steps=6: must be less than rollout.explore.num_steps=6",
    ),
    (("rollout.explore.exact_steps=-1",), "rollout.explore.exact_steps=-1: must be at least 0"),
    (
        ("rollout.regenerate=false",),
        "rollout.explore.num_steps=6: must equal rollout.num_steps=10 with rollout.regenerate=false",
    ),
    (
        ("family=naive_scaling", "rollout.num_steps=12"),
        "rollout.explore.num_steps=10: must equal rollout.num_steps=12 with .*=false",
    ),
    (("rollout.noise_level=0.5",), "rollout.noise_level=0.5: must be 0 with rollout.solver=euler"),
    (
        ("rollout.noise_level=1.5", "rollout.solver=ddim"),
        "rollout.noise_level=1.5: must be at most 1",
    ),
    (("rollout.size=512",), "rollout.size=512: expected a list"),
    (("rollout.size=[512]",), "rollout.size.0=[512]: expected [HEIGHT, WIDTH] in pixels"),
    (
        ("rollout.size=[[512,512],[512]]",),
        "rollout.size.1=[512]: expected [HEIGHT, WIDTH] in pixels",
    ),
    (("rollout.size=[512,0]",), "rollout.size.0.1=0: must be at least 1"),
    (("rollout.size=[]",), "rollout.size=[]: must not be empty"),
    (("eval.size=[[512,512]]",), "eval.size=[[512, 512]]: expected [HEIGHT, WIDTH] in pixels"),
    (
        ("rollout.sde_window_size=10",),
        "rollout.sde_window_size=10: must be less than rollout.num_steps=10",
    ),
    (("objective=flow_grp",), "unknown objective 'flow_grp': did you mean 'flow_grpo'?"),
    (
        ("algorithm.objective=ppo",),
        "algorithm.objective='ppo': expected one of nft, awm, dpo, flow_grpo, mix_grpo, dance_grpo",
    ),
    (
        ("algorithm.objective=flow_grpo",),
        "rollout.noise_level=0.0: must be above 0 for the transitions that algorithm.objective=flow_grpo trains on, .* rollout.solver",
    ),
    (
        ("objective=flow_grpo", "family=naive_quant"),
        "rollout.regenerate=False: must be true, or rollout.explore.precision=bf16, .* algorithm.objective=flow_grpo trains on",
    ),
    (
        ("objective=dance_grpo", "family=naive_scaling", "rollout.explore.precision=auto"),
        "rollout.regenerate=False: must be true, .* algorithm.objective=dance_grpo trains on",
    ),
    (
        ("objective=mix_grpo", "algorithm.timestep_fraction=0.5"),
        "algorithm.timestep_fraction=0.5: must be at most 0.4 for .*mix_grpo.*",
    ),
    (
        ("objective=flow_grpo", "explore=best"),
        "rollout.noise_level=0.7: must be 0 with rollout.explore.sigmas=first",
    ),
    (
        ("objective=dpo", "rollout.selection=best", "rollout.kept=5"),
        "rollout.kept=5: must be even for the pairs of algorithm.objective=dpo",
    ),
    (
        ("objective=dpo", "optimizer.per_device_batch_size=7"),
        "optimizer.per_device_batch_size=7: must be even for the pairs of algorithm.objective=dpo",
    ),
    (
        (
            "objective=dpo",
            "train.num_prompts=1",
            "rollout.kept=6",
            "optimizer.steps_per_iteration=12",
        ),
        "optimizer.steps_per_iteration=12: must leave an even number of terms for the pairs of algorithm.objective=dpo",
    ),
    (
        ("rollout.noise_level=0.5", "rollout.solver=ddim", "rollout.explore.sigmas=first"),
        "rollout.noise_level=0.5: must be 0 with rollout.explore.sigmas=first",
    ),
    (("version=1",), "version=1: expected 2"),
    (
        ("rollout.explore.precision=nvfp4_46",),
        "rollout.explore.precision='nvfp4_46': expected 'auto', .*did you mean 'nvfp4'?",
    ),
    (("rollout.explore.audit_every=2",), "unknown key 'rollout.explore.audit_every': .*"),
    (("rollout.explore.vae=x",), "unknown key 'rollout.explore.vae': .*"),
    (("explore=papr",), "unknown explore 'papr': did you mean 'paper'?"),
    (
        ("rollout.explore.min_rank_correlation=0.8", "family=naive_quant"),
        "rollout.explore.min_rank_correlation=0.8: must be null with .*=false, .*",
    ),
    (
        ("rollout.explore.min_rank_correlation=1.5",),
        "rollout.explore.min_rank_correlation=1.5: must be at most 1",
    ),
    (
        ("rollout.explore.correction_rank=-1",),
        "rollout.explore.correction_rank=-1: must be at least 0",
    ),
    (("rollout.explore.sigmas=last",), "rollout.explore.sigmas='last': expected 'own' or 'first'"),
    (
        ("optimizer.steps_per_iteration=7",),
        "optimizer.steps_per_iteration=7: must divide .* sigmas = 6912",
    ),
    (
        ("algorithm.timestep_fraction=0.05",),
        "algorithm.timestep_fraction=0.05: must be at least 1 / rollout.num_steps = 0.1",
    ),
    (("algorithm.timestep_fraction=1.1",), "algorithm.timestep_fraction=1.1: must be at most 1"),
    (
        ("lora.target_modules=['a(b']",),
        "lora.target_modules.0='a(b': must be a regular expression (.*)",
    ),
    (
        ("model.quantization.fused=['[']",),
        "model.quantization.fused.0='[': must be a regular expression (.*)",
    ),
    (("lora.target_modules=[]",), "lora.target_modules=[]: must not be empty"),
    (("mesh.data=0",), "mesh.data=0: must be at least 1, or -1 for all devices left"),
    (("mesh.fsdp=0",), "mesh.fsdp=0: must be at least 1"),
    (("seed=-1",), "seed=-1: must be at least 0"),
    (("algorithm.ema_decay=1",), "algorithm.ema_decay=1: must be below 1"),
    (("algorithm.decay_type=3",), "algorithm.decay_type=3: must be at most 2"),
    (("model.path=",), "model.path='': must not be empty"),
    (
        ("model.prompt_cache_dir=1",),
        "model.prompt_cache_dir=1: expected text (in quotes if it looks like a number or a date)",
    ),
    (("model.vae_tile_size=1.5",), "model.vae_tile_size=1.5: expected an integer"),
    (("model.instruction=",), "model.instruction='': must not be empty"),
    (
        ("lora.rank=0", "foo", "zeed=1"),
        "override 'foo': .*; unknown key 'zeed': did you mean 'seed'?; lora.rank=0: must be .*",
    ),
    (
        ("lora.rank=0", "rollout.kept=97"),
        "rollout.kept=97: must be at most .*=96; lora.rank=0: must be at least 1",
    ),
]


@pytest.mark.parametrize(("overrides", "expected"), BAD, ids=[" ".join(o) for o, _ in BAD])
def test_the_impossible_is_refused_in_one_helpful_line(overrides, expected):
    pattern = re.escape(expected).replace(r"\.\*", ".*")
    assert re.fullmatch(pattern, message("sana_sol_rl_pickscore", *overrides))


AT_LEAST_ONE = [
    "model.height",
    "model.width",
    "model.max_sequence_length",
    "model.vae_tile_size",
    "rollout.explore.num_steps",
    "rollout.num_steps",
    "rollout.per_device_batch_size",
    "rollout.sde_window_size",
    "rollout.sde_window_every",
]
AT_LEAST_ONE += [
    "lora.rank",
    "optimizer.steps_per_iteration",
    "optimizer.per_device_batch_size",
    "train.iterations",
    "train.num_prompts",
]
AT_LEAST_ONE += [
    "eval.num_steps",
    "eval.num_prompts",
    "eval.num_images_per_prompt",
    "run.checkpoint_every",
    "run.keep_checkpoints",
]
POSITIVE = [
    "algorithm.beta",
    "algorithm.clip_range",
    "algorithm.adv_clip_max",
    "algorithm.timestep_fraction",
    "lora.alpha",
]
POSITIVE += ["optimizer.learning_rate", "optimizer.eps", "optimizer.max_grad_norm"]
NOT_NEGATIVE = [
    "rollout.guidance_scale",
    "rollout.true_cfg_scale",
    "algorithm.kl_coef",
    "optimizer.weight_decay",
    "eval.every",
    "eval.num_grid_images",
    "eval.seed",
    "run.keep_best",
]


@pytest.mark.parametrize(
    ("key", "value", "accepted"),
    [(k, 0, "at least 1") for k in AT_LEAST_ONE]
    + [(k, 0, "above 0") for k in POSITIVE]
    + [("rollout.shift", 0, "at least 0.001")]
    + [(k, -1, "at least 0") for k in NOT_NEGATIVE],
)
def test_ranges(key, value, accepted):
    assert message("tiny", f"{key}={value}") == f"{key}={value}: must be {accepted}"


def test_sizes_are_the_models_unless_told_otherwise():
    def sizes(*overrides):
        return (
            training_sizes(c := resolve("flux1_sol_rl_hpsv2", overrides)),
            largest_training_size(c),
            evaluation_size(c),
        )

    assert sizes() == (((512, 512),), (512, 512), (512, 512))
    assert sizes("rollout.size=[256,320]", "eval.size=[1024,768]") == (
        ((256, 320),),
        (256, 320),
        (1024, 768),
    )
    several = ((256, 256), (192, 384), (384, 192))
    assert sizes("rollout.size=[[256,256],[192,384],[384,192]]") == (
        several,
        (192, 384),
        (512, 512),
    )


def test_unknown_preset():
    assert message("tinny") == "unknown preset 'tinny': did you mean 'tiny'?"
    assert (
        message("sana_solrl_pickscore")
        == "unknown preset 'sana_solrl_pickscore': did you mean 'sana_sol_rl_pickscore'?"
    )


def test_sections_made_by_hand_are_checked_too():
    config = resolve("tiny")
    with pytest.raises(
        ConfigError, match=r"rollout.kept=49: must be at most rollout.candidates=48"
    ):
        dataclasses.replace(config.rollout, kept=49)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1
    same = dataclasses.replace(config.rollout, candidates=12)
    assert same.candidates == same.kept  # nothing to select is allowed


@pytest.mark.parametrize(
    "key", ["rollout.per_device_batch_size", "optimizer.per_device_batch_size"]
)
def test_numbers_of_rows_at_once_are_upper_limits(key):
    """They need not divide the rows that there are, and may be more than these."""
    section, field = key.split(".")
    for value in (1, 7, 9216):
        assert (
            getattr(getattr(resolve("sana_sol_rl_pickscore", [f"{key}={value}"]), section), field)
            == value
        )


# --- text ---


def test_text_that_is_not_a_configuration():
    text = to_yaml(resolve("tiny"))
    for bad, expected in [
        ("", "configuration=None: expected a mapping of its fields"),
        ("a: [", "configuration: not YAML (line 1: "),
        (text.replace("seed: 0\n", "", 1), "missing key 'seed'"),
        (text.replace("version: 2\n", "version: 3\n", 1), "version=3: expected 2"),
        (text.replace("version: 2\n", "version: two\n", 1), "version='two': expected 2"),
        (text + "sede: 1\n", "unknown key 'sede': did you mean 'seed'?"),
    ]:
        with pytest.raises(ConfigError, match=re.escape(expected)) as caught:
            from_yaml(bad)
        assert "\n" not in str(caught.value)


# no file's name holds a zero; what looks like the address of a service may be refused
WORDS = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=8
).filter(lambda w: "://" not in w)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31 - 1),
    rate=st.floats(1e-37, MAX_NUMBER),
    weights=st.dictionaries(
        WORDS, st.floats(-1e9, 1e9, width=32, allow_subnormal=False), min_size=1, max_size=3
    ),
    path=WORDS,
)
@example(seed=0, rate=1e-5, weights={"\U00093329\x85": -0.0}, path="\U00093329\x85")
def test_text_round_trip_is_exact(seed, rate, weights, path):
    c = TINY
    optimizer = dataclasses.replace(c.optimizer, learning_rate=rate)
    reward = dataclasses.replace(c.reward, weights=weights)
    prompts = dataclasses.replace(c.prompts, train=path)
    c = dataclasses.replace(c, seed=seed, optimizer=optimizer, reward=reward, prompts=prompts)
    assert from_yaml(to_yaml(c)) == c


# --- the batch ---


def test_effective_batch_of_the_paper():
    batch = effective_batch(resolve("sana_sol_rl_pickscore"), 8)
    assert (batch["terms"], batch["terms_per_step"]) == (6912, 6912)
    assert batch["terms_per_step_per_device"] * 8 == 6912
    assert (
        batch["accumulation"] * resolve("sana_sol_rl_pickscore").optimizer.per_device_batch_size * 8
        == 6912
    )
    two = effective_batch(resolve("tiny", ["optimizer.steps_per_iteration=2"]), 1)
    assert two["terms_per_step"] * 2 == two["terms"]
    uneven = effective_batch(
        resolve("sana_sol_rl_pickscore", ["optimizer.per_device_batch_size=7"]), 5
    )
    assert (uneven["terms_per_step_per_device"], uneven["accumulation"]) == (
        1383,
        198,
    )  # 6912 terms, filled up to 6930
    assert "48 prompts x 24 kept x 6 sigmas = 6912 terms" in describe_batch(
        resolve("sana_sol_rl_pickscore"), 8
    )


@settings(deadline=None)
@given(hundredths=st.integers(1, 100), steps=st.sampled_from([10, 50, 100, 200]))
@example(hundredths=29, steps=100)
def test_trained_sigmas_are_the_floor_in_exact_arithmetic(hundredths, steps):
    rollout = dataclasses.replace(TINY.rollout, num_steps=steps)
    algorithm = dataclasses.replace(TINY.algorithm, timestep_fraction=hundredths / 100)
    if hundredths * steps < 100:
        with pytest.raises(ConfigError, match=r"algorithm.timestep_fraction"):
            dataclasses.replace(TINY, rollout=rollout, algorithm=algorithm)
        return
    config = dataclasses.replace(TINY, rollout=rollout, algorithm=algorithm)
    assert config.num_train_sigmas == hundredths * steps // 100


def test_neither_module_needs_jax():
    code = "import sys, solrl_jax.config.presets; solrl_jax.config.presets.resolve('tiny'); sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert Config.__dataclass_params__.frozen
