"""Every preset resolves to the paper's numbers, overrides win, and the files and the fields agree."""

import dataclasses
import re
import shutil
from pathlib import Path

import pytest
import yaml

import solrl_jax
from solrl_jax.config import migrations, presets
from solrl_jax.config.presets import (
    describe,
    field_names,
    from_yaml,
    override,
    preset_names,
    resolve,
    to_yaml,
)
from solrl_jax.config.schema import OBJECTIVES
from solrl_jax.config.values import ConfigError

FAMILIES = presets.FAMILIES
TINY = [("tiny", f"family={family}") for family in FAMILIES]
# to so many steps, and how many of them Sol-RL explores in
DISTILLED = {"flux2-klein-4b": (4, 2), "flux2-klein-9b": (4, 2), "zimage-turbo": (8, 4)}
ALL = [(name,) for name in preset_names() if name != "tiny"] + TINY


# --- what the presets are ---


def test_every_released_model_has_16_presets_and_there_is_tiny():
    names = preset_names()
    assert {"sana", "flux1", "sd3"} <= set(presets.released_models())
    assert len(names) == len(set(names)) == 1 + 16 * len(presets.released_models())
    assert {
        "tiny",
        "sana_sol_rl_pickscore",
        "flux1_naive_scaling_hpsv2",
        "sd3_diffusionnft_imagereward",
    } <= set(names)


@pytest.mark.parametrize("preset", ALL, ids="-".join)
def test_every_preset_resolves_and_keeps_the_invariants_of_its_family(preset):
    config = resolve(preset[0], preset[1:])
    family = config.family
    rollout = config.rollout
    assert family == (
        preset[1].removeprefix("family=")
        if preset[0] == "tiny"
        else re.findall("|".join(FAMILIES), preset[0])[0]
    )
    assert config.preset == preset[0]
    explore = rollout.explore
    assert explore.precision == ("nvfp4" if family in ("naive_quant", "sol_rl") else "bf16")
    full, part = DISTILLED.get(config.model.name, (10, 6))
    assert explore.num_steps == (part if family == "sol_rl" else full)
    assert (
        explore.sigmas,
        explore.exact_steps,
        explore.correction_rank,
        explore.min_rank_correlation,
    ) == (
        "default",
        0,
        0,
        None,
    )  # the paper's
    assert explore.attention == "default"
    assert rollout.num_steps == full
    assert rollout.regenerate == (family == "sol_rl")
    assert rollout.candidates == rollout.kept * (1 if family == "diffusionnft" else 4)
    assert config.run.dir == f"runs/{preset[0]}-{family}-seed{config.seed}"
    assert from_yaml(to_yaml(config)) == config


@pytest.mark.parametrize(
    (
        "model",
        "size",
        "solver",
        "schedule",
        "shift",
        "sigmas",
        "clip",
        "micro",
        "eval_steps",
        "tokens",
        "path",
    ),
    [
        (
            "sana",
            1024,
            "euler",
            "linear",
            1.0,
            6,
            1.0,
            16,
            40,
            300,
            "Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers",
        ),
        (
            "sd3",
            1024,
            "dpm2",
            "sd3",
            3.0,
            6,
            0.002,
            8,
            40,
            128,
            "stabilityai/stable-diffusion-3.5-large",
        ),
        ("flux1", 512, "dpm2", "flux", 3.0, 4, 1.0, 12, 28, 128, "black-forest-labs/FLUX.1-dev"),
        ("zimage", 1024, "dpm2", "linear", 6.0, 6, 1.0, 8, 28, 128, "Tongyi-MAI/Z-Image"),
        (
            "zimage-turbo",
            1024,
            "euler",
            "linear",
            3.0,
            4,
            1.0,
            8,
            8,
            128,
            "Tongyi-MAI/Z-Image-Turbo",
        ),
    ],
)
def test_models_have_the_numbers_of_the_recipe(
    model, size, solver, schedule, shift, sigmas, clip, micro, eval_steps, tokens, path
):
    c = resolve(f"{model}_sol_rl_hpsv2")
    assert (
        c.model.name,
        c.model.path,
        c.model.height,
        c.model.width,
        c.model.max_sequence_length,
    ) == (
        model,
        path,
        size,
        size,
        tokens,
    )
    assert (c.rollout.solver, c.rollout.schedule, c.rollout.shift, c.rollout.guidance_scale) == (
        solver,
        schedule,
        shift,
        1.0,
    )
    assert (
        c.num_train_sigmas,
        c.optimizer.max_grad_norm,
        c.optimizer.per_device_batch_size,
        c.eval.num_steps,
    ) == (
        sigmas,
        clip,
        micro,
        eval_steps,
    )


def test_shared_numbers_are_the_papers():
    c = resolve("sana_sol_rl_pickscore")
    assert (c.rollout.candidates, c.rollout.kept, c.train.num_prompts, c.rollout.selection) == (
        96,
        24,
        48,
        "best_worst",
    )
    assert (
        c.algorithm.beta,
        c.algorithm.kl_coef,
        c.algorithm.adv_clip_max,
        c.algorithm.decay_type,
    ) == (
        1.0,
        1e-4,
        5.0,
        1,
    )
    assert (c.algorithm.adv_mode, c.algorithm.global_std, c.algorithm.ema_decay) == (
        "all",
        True,
        0.9,
    )
    assert (c.lora.rank, c.lora.alpha) == (32, 64.0)
    o = c.optimizer
    assert (o.learning_rate, o.beta1, o.beta2, o.eps, o.weight_decay) == (
        3e-4,
        0.9,
        0.999,
        1e-8,
        1e-4,
    )
    assert (o.steps_per_iteration, c.rollout.precision, c.reward.weights) == (
        1,
        "bf16",
        {"pickscore": 1.0},
    )


# What each rule must take and leave; the paths are those of diffusers' modules, the layers of a list without their index.
MATCHES = {
    "sana": {
        "attn1/to_q",
        "attn1/to_k",
        "attn1/to_v",
        "attn1/to_out/0",
        "attn2/to_q",
        "attn2/to_k",
        "attn2/to_v",
    }
    | {"attn2/to_out/0"},
    "sd3": {
        "attn/to_q",
        "attn/to_k",
        "attn/to_v",
        "attn/to_out/0",
        "attn/add_q_proj",
        "attn/add_k_proj",
    }
    | {"attn/add_v_proj", "attn/to_add_out"},
    "flux1": {
        "attn/to_q",
        "attn/to_k",
        "attn/to_v",
        "attn/to_out/0",
        "single attn/to_q",
        "single attn/to_k",
    }
    | {"single attn/to_v"},
    "flux2-klein-4b": {
        "attn/to_q",
        "attn/to_k",
        "attn/to_v",
        "attn/to_out/0",
        "single attn/to_qkv_mlp_proj",
    },
}
MATCHES |= dict.fromkeys(
    ("flux2-klein-9b", "flux2-klein-base-4b", "flux2-klein-base-9b"), MATCHES["flux2-klein-4b"]
)
SANA = [f"attn{i}/to_{x}" for i in "12" for x in ("q", "k", "v", "out/0")] + [
    "ff/conv_inverted",
    "ff/conv_depth",
    "ff/conv_point",
]
JOINT = [
    f"attn/{x}"
    for x in (
        "to_q",
        "to_k",
        "to_v",
        "to_out/0",
        "add_q_proj",
        "add_k_proj",
        "add_v_proj",
        "to_add_out",
    )
] + [
    *(f"{ff}/net/{x}" for ff in ("ff", "ff_context") for x in ("0/proj", "2")),
    *("norm1/linear", "norm1_context/linear"),
]
SINGLE = [
    f"single {x}"
    for x in ("attn/to_q", "attn/to_k", "attn/to_v", "norm/linear", "proj_mlp", "proj_out")
]
FLUX2 = [
    *JOINT[:8],
    "ff/linear_in",
    "ff/linear_out",
    "single attn/to_qkv_mlp_proj",
    "single attn/to_out",
]
KERNELS = {"sana": SANA, "sd3": JOINT, "flux1": JOINT + SINGLE} | {
    name: FLUX2 for name in MATCHES if name.startswith("flux2")
}


def full_path(short: str, model: str = "") -> str:
    single = short.startswith("single ")
    stack = "0-36/" if model == "sd3" else ""  # SD3 holds its layers in runs of equal ones
    return f"{'single_' if single else ''}transformer_blocks/{stack}{short.removeprefix('single ')}/kernel"


@pytest.mark.parametrize("model", MATCHES)
def test_adapters_are_on_exactly_the_kernels_of_the_recipe(model):
    patterns = resolve(f"{model}_sol_rl_hpsv2").lora.target_modules
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
    assert (c.model.path, c.family, c.train.num_prompts) == (f"embedded:{model}", family, 12)
    assert c.rollout.kept == (12 if family == "diffusionnft" else 24)
    assert resolve("tiny", [f"family={family}"]).train.num_prompts == 6


def test_tiny_is_the_embedded_world():
    c = resolve("tiny")
    assert (c.model.path, c.reward.weights) == ("embedded:tiny-sana", {"shapes": 1.0})
    assert (c.prompts.train, c.prompts.test) == ("embedded:shapes-train", "embedded:shapes-test")
    sana = resolve("sana_sol_rl_hpsv2")
    assert (c.lora, c.model.quantization) == (sana.lora, sana.model.quantization)


def test_when_applies_to_its_choice_alone():
    assert (
        resolve("tiny", ["family=diffusionnft"]).rollout.candidates == resolve("tiny").rollout.kept
    )
    assert (
        resolve("tiny", ["family=naive_scaling"]).rollout.candidates
        == resolve("tiny").rollout.candidates
    )
    assert (
        resolve("tiny", ["family=diffusionnft", "rollout.candidates=24"]).rollout.candidates == 24
    )

    # a condition of a file that comes earlier wins over the settings of a later one
    def explored(family):
        return resolve(
            "flux2-klein-4b_sol_rl_hpsv2", [f"family={family}"]
        ).rollout.explore.num_steps

    assert [explored(family) for family in ("sol_rl", "naive_quant")] == [2, 4]
    assert (
        resolve(
            "flux2-klein-4b_sol_rl_hpsv2", ["rollout.explore.num_steps=3"]
        ).rollout.explore.num_steps
        == 3
    )


def test_described_rows():
    rows = describe()
    assert [row["preset"] for row in rows] == preset_names()
    row = next(row for row in rows if row["preset"] == "sd3_sol_rl_clipscore")
    assert row["model"] == "sd3"
    assert (row["candidates"], row["explore"], row["train on"]) == (
        "24-in-96",
        "nvfp4, 6 steps",
        "bf16, 10 steps",
    )


# --- overrides ---


def test_overrides_win_in_order_and_are_yaml():
    c = resolve(
        "tiny",
        [
            *(
                "seed=3",
                "seed=7",
                "optimizer.learning_rate=1e-4",
                "lora.alpha=8",
                "rollout={explore: {steps: 4}, shift: 2}",
            ),
            *("lora.target_modules=['a.*/kernel']", "run.dir='2024'", "eval.every=0"),
        ],
    )
    assert (c.seed, c.optimizer.learning_rate, c.lora.alpha, c.lora.target_modules) == (
        7,
        1e-4,
        8.0,
        ("a.*/kernel",),
    )
    assert isinstance(c.lora.alpha, float)
    assert (
        c.rollout.explore.num_steps,
        c.rollout.explore.precision,
        c.rollout.shift,
        c.run.dir,
    ) == (
        4,
        "nvfp4",
        2.0,
        "2024",
    )
    assert resolve("tiny", ["seed=7", "run.dir="]).run.dir == "runs/tiny-sol_rl-seed7"


@pytest.mark.parametrize("text", ["a #b", "a\\nb", "/x y/'z'", "- ?", "&a b"])
def test_text_without_quotes_is_taken_as_it_is(text):
    assert resolve("tiny", [f"run.dir=x{text}"]).run.dir == f"x{text}"
    assert resolve("tiny", [presets.text_override("run.dir", text)]).run.dir == text
    assert (
        resolve("tiny", [f"run.dir='{text.replace(chr(39), 2 * chr(39))}' # of mine"]).run.dir
        == text
    )


def test_weights_are_replaced_whole_or_changed_by_name():
    assert resolve("tiny", ["reward.weights={pickscore: 1, hpsv2: 2}"]).reward.weights == {
        "pickscore": 1.0,
        "hpsv2": 2.0,
    }
    assert resolve("tiny", ["reward.weights.tiny-clip=0.5"]).reward.weights == {
        "shapes": 1.0,
        "tiny-clip": 0.5,
    }


def test_parts_are_chosen_for_any_preset():
    c = resolve("sana_sol_rl_pickscore", ["model=flux1", "family=naive_quant", "reward=hpsv2"])
    expected = resolve("flux1_naive_quant_hpsv2")
    assert dataclasses.replace(c, preset="", run=expected.run) == dataclasses.replace(
        expected, preset=""
    )
    assert resolve("tiny", ["reward=tiny-clip"]).reward.weights == {"tiny-clip": 1.0}
    assert resolve("tiny", ["reward.weights={a: 1}", "reward=clipscore"]).reward.weights == {
        "a": 1.0
    }


def test_resolving_leaves_no_trace_on_the_next():
    before = resolve("tiny")
    resolve("tiny", ["reward.weights.ocr=1", "rollout.explore.num_steps=2", "reward=hpsv2"])
    assert resolve("tiny") == before


def test_an_objective_has_a_file_of_settings_and_a_file_of_code():
    files = {path.stem for path in (presets._configs() / "objective").glob("*.yaml")}
    code = {
        path.stem for path in (presets._configs().parent / "rl" / "objectives").glob("*.py")
    } - {"__init__"}
    assert files == code == set(OBJECTIVES)
    assert resolve("tiny", ["objective=nft"]) == resolve("tiny")
    grpo = resolve("sd3_sol_rl_hpsv2", ["objective=flow_grpo"])
    assert (grpo.rollout.solver, grpo.rollout.noise_level, grpo.algorithm.decay_type) == (
        "flow_sde",
        0.7,
        0,
    )
    assert (grpo.algorithm.kl_coef, grpo.algorithm.clip_range, grpo.num_train_sigmas) == (
        0.01,
        1e-4,
        9,
    )

    # the limit of SD3's gradients is of its recipe for nft
    def clip(name):
        return resolve("sd3_sol_rl_hpsv2", [f"objective={name}"]).optimizer.max_grad_norm

    assert [clip(name) for name in ("nft", "flow_grpo", "mix_grpo", "dance_grpo", "awm")] == [
        0.002,
        1.0,
        1.0,
        1.0,
        1.0,
    ]
    assert resolve("tiny", ["objective=awm"]).algorithm.ema_decay == 0.99


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_recipe_for_ocr_leaves_other_objectives_their_settings(name):
    plain, ocr = (
        resolve("sana_sol_rl_hpsv2", [f"objective={name}", f"reward={reward}"])
        for reward in ("hpsv2", "ocr")
    )
    assert ocr.optimizer.steps_per_iteration == 2
    settings = (ocr.algorithm.beta, ocr.algorithm.decay_type)
    assert settings == (
        (0.1, 2) if name == "nft" else (plain.algorithm.beta, plain.algorithm.decay_type)
    )


# --- files and text ---


def test_files_and_fields_agree():
    """Every field is set by a file, and the files set nothing else; but plans of studies, which are no presets."""
    fields = {
        key
        for key in field_names()
        if not any(other.startswith(f"{key}.") for other in field_names())
    }
    given = set()
    for path in presets._configs().rglob("*.yaml"):
        if path.parent.name == "study":
            continue
        tree = yaml.safe_load(path.read_text())
        assert path.read_text().splitlines()[1].startswith("# "), path
        tree.pop("compose", None)
        trees = [tree, *tree.pop("when", {}).values()]
        given |= {key for tree in trees for key in leaves(tree)}
    assert given | {"preset", "family"} == fields


def leaves(tree: dict, prefix: str = "") -> set[str]:
    def inner(key, value):
        return isinstance(value, dict) and key not in (
            "reward.weights",
            "reward.paths",
            "reward.options",
        )

    return {
        leaf
        for name, value in tree.items()
        for leaf in (
            leaves(value, f"{prefix}{name}.") if inner(prefix + name, value) else {prefix + name}
        )
    }


@pytest.fixture
def configs(tmp_path, monkeypatch):
    """A copy of `configs/` that is read in its place."""
    folder = tmp_path / "configs"
    shutil.copytree(presets._configs(), folder)
    monkeypatch.setattr(presets, "_configs", lambda: folder)
    presets._read.cache_clear()
    yield folder
    presets._read.cache_clear()


def test_configs_are_inside_the_package():
    assert presets._configs() == Path(solrl_jax.__file__).parent / "configs"
    assert (presets._configs() / "base.yaml").is_file()


def test_a_condition_that_cannot_hold_is_refused(configs):
    (configs / "mine.yaml").write_text(
        "compose: {model: sana, family: sol_rl, reward: hpsv2}\nwhen: {family=solrl: {seed: 1}}\n"
    )
    assert "mine" in preset_names()
    with pytest.raises(
        ConfigError, match=r"^configs/mine.yaml: unknown condition 'family=solrl' under 'when'$"
    ):
        resolve("mine")


def settings_of(path: Path) -> str:
    """A file of a part without its conditions."""
    return path.read_text().partition("\nwhen:")[0] + "\n"


@pytest.mark.parametrize("part", ["model/sana", "family/sol_rl", "explore/paper", "reward/hpsv2"])
def test_the_file_of_any_part_may_have_settings_for_one_choice_of_another(configs, part):
    """They follow the file's own settings; the file of a later part and the preset's own follow them."""
    path = configs / f"{part}.yaml"
    path.write_text(
        settings_of(path)
        + "seed: 1\nwhen: {model=sana: {seed: 5, lora: {rank: 7}}, family=naive_quant: {seed: 6}}\n"
    )
    config = resolve("sana_sol_rl_hpsv2")
    assert (config.seed, config.lora.rank) == (5, 7)
    assert config.lora.alpha == 64.0  # the others of the section stay
    assert resolve("sana_sol_rl_hpsv2", ["seed=9"]).seed == 9
    for other in ("flux1_sol_rl_hpsv2", "sana_naive_quant_hpsv2", "sana_sol_rl_clipscore"):
        chosen = all(name in other for name in part.split("/")[1:]) or part == "explore/paper"
        expected = {
            "flux1_sol_rl_hpsv2": 1,
            "sana_naive_quant_hpsv2": 6,
            "sana_sol_rl_clipscore": 5,
        }[other]
        assert resolve(other).seed == (expected if chosen else 0), other


def test_a_condition_in_the_file_of_a_part_that_cannot_hold_is_refused(configs):
    path = configs / "explore" / "paper.yaml"
    path.write_text(settings_of(path) + "when: {sampler=sana: {seed: 5}}\n")
    with pytest.raises(
        ConfigError,
        match=r"^configs/explore/paper.yaml: unknown condition 'sampler=sana' under 'when'$",
    ):
        resolve("tiny")


# --- recipes of exploration ---

LEVERS = (
    "rollout.explore.sigmas=first",
    "rollout.explore.exact_steps=1",
    "rollout.explore.correction_rank=8",
)


def test_the_papers_recipe_turns_every_lever_off():
    for preset in ("tiny", "sana_sol_rl_hpsv2"):
        plain = resolve(preset)
        levers = resolve(preset, LEVERS)
        assert resolve(preset, ["explore=paper"]) == plain != levers
        assert (
            resolve(preset, ["explore=paper", *LEVERS])
            == resolve(preset, [*LEVERS, "explore=paper"])
            == levers
        )
        assert override(levers, ["explore=paper"]) == plain
        assert override(levers, ["explore=paper", LEVERS[1]]) == resolve(preset, [LEVERS[1]])


@pytest.mark.parametrize("preset", ALL, ids="-".join)
def test_recipes_go_with_every_preset_and_leave_all_but_exploration(preset):
    plain = resolve(preset[0], preset[1:])
    best = resolve(preset[0], [*preset[1:], "explore=best"])
    assert override(plain, ["explore=best"]) == best
    assert override(best, ["explore=paper"]) == plain
    explore = best.rollout.explore
    assert (
        dataclasses.replace(plain, rollout=dataclasses.replace(plain.rollout, explore=explore))
        == best
    )
    fast = override(plain, ["explore=fast"])
    quantize = fast.model.quantization
    attends = dataclasses.replace(plain.rollout.explore, attention=fast.rollout.explore.attention)
    rollout = dataclasses.replace(plain.rollout, explore=attends)
    assert (
        dataclasses.replace(
            plain, model=dataclasses.replace(plain.model, quantization=quantize), rollout=rollout
        )
        == fast
    )
    assert (quantize == plain.model.quantization) == (plain.model.name not in ("sana", "sd3"))
    assert (attends.attention == "fp8") == (plain.model.name in ("flux1", "sd3"))
    assert override(fast, ["explore=best"]) == best
    quantises = plain.family in ("naive_quant", "sol_rl")
    assert (explore.correction_rank > 0) == quantises
    assert (explore.sigmas == "first") == (explore.exact_steps > 0) == (plain.family == "sol_rl")


@pytest.mark.parametrize("model", ["sana", "sd3"])
def test_the_papers_recipe_has_the_models_own_rule(model):
    own = yaml.safe_load(
        (Path(presets.__file__).parents[1] / "configs" / "model" / f"{model}.yaml").read_text()
    )
    assert dataclasses.asdict(resolve(f"{model}_sol_rl_hpsv2").model.quantization) == {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in ({"fused": []} | own["model"]["quantization"]).items()
    }


def test_a_recipe_has_settings_for_models_and_families_of_presets_and_of_runs(configs):
    (configs / "explore" / "mine.yaml").write_text(
        "rollout: {explore: {sigmas: default, exact_steps: 0, correction_rank: 4}}\n"
        "when: {family=sol_rl: {rollout: {explore: {exact_steps: 2}}}, model=flux1: {rollout: {explore: {num_steps: 5}}}}\n"
    )

    def explored(config):
        return tuple(
            getattr(config.rollout.explore, name)
            for name in ("correction_rank", "exact_steps", "num_steps")
        )

    for preset, expected in (
        ("tiny", (4, 2, 6)),
        ("sana_naive_quant_hpsv2", (4, 0, 10)),
        ("flux1_sol_rl_hpsv2", (4, 2, 5)),
    ):
        assert (
            explored(resolve(preset, ["explore=mine"]))
            == explored(override(resolve(preset), ["explore=mine"]))
            == expected
        )
    with pytest.raises(ConfigError, match=r"^unknown explore 'min': did you mean 'mine'\?$"):
        override(resolve("tiny"), ["explore=min"])


def test_a_recipe_with_a_condition_that_a_run_does_not_record_is_for_presets_alone(configs):
    paper = settings_of(configs / "explore" / "paper.yaml")
    (configs / "explore" / "mine.yaml").write_text(
        f"{paper}when: {{reward=hpsv2: {{rollout: {{explore: {{correction_rank: 4}}}}}}}}\n"
    )
    assert resolve("sana_sol_rl_hpsv2", ["explore=mine"]).rollout.explore.correction_rank == 4
    assert resolve("sana_sol_rl_clipscore", ["explore=mine"]).rollout.explore.correction_rank == 0
    with pytest.raises(
        ConfigError,
        match=r"^configs/explore/mine.yaml: condition 'reward=hpsv2' .* for a preset, not for a run$",
    ):
        override(resolve("sana_sol_rl_hpsv2"), ["explore=mine"])


def test_of_a_run_fields_are_changed_and_other_parts_are_refused():
    config = resolve("tiny", ["seed=3", *LEVERS])
    changed = override(
        config,
        ["rollout.explore.num_steps=4", "rollout={shift: 2}", "reward.weights.tiny-clip=0.5"],
    )
    rollout = dataclasses.replace(
        config.rollout, shift=2.0, explore=dataclasses.replace(config.rollout.explore, num_steps=4)
    )
    reward = dataclasses.replace(config.reward, weights={"shapes": 1.0, "tiny-clip": 0.5})
    assert changed == dataclasses.replace(config, rollout=rollout, reward=reward)
    assert override(config, []) == config
    for part in ("model=sana", "family=sol_rl", "reward=hpsv2", "objective=dpo"):
        with pytest.raises(
            ConfigError, match=f"^{part}: can be chosen for a preset, not for a run$"
        ):
            override(config, [part])


# --- older versions ---


def test_a_configuration_states_its_version():
    assert resolve("tiny").version == migrations.VERSION == 3
