"""`solrl plan`: the list of programs, what a device holds, the figures of a small plan, and error
lines.
"""

import json
import math
import re

import jax
import pytest

from solrl_jax.config.presets import override, resolve
from solrl_jax.errors import InputError
from solrl_jax.parallel import sharding
from solrl_jax.planning import plan as planning
from solrl_jax.planning import topology
from solrl_jax.planning.abstract import abstract, abstract_reward, bytes_per_device
from solrl_jax.planning.phases import PHASES
from solrl_jax.planning.plan import Devices, Planner, arrays
from solrl_jax.planning.targets import TARGETS
from solrl_jax.rl import experiment as experiments
from solrl_jax.rl.experiment import fresh_state
from solrl_jax.rl.explore.sync import quantize_policy
from tests.cli.test_cli import call  # noqa: F401 - a fixture
from tests.small import small_config

FUNCTIONS = {  # of a phase
    "encode": ["encode_chunk"],
    "sync": ["quantize_policy"],
    "explore": ["sample_chunk"],
    "regenerate": ["sample_chunk"],
    "score": ["decode_chunk", "score_images"],
    "update": ["update"],
}


@pytest.fixture
def cpus(monkeypatch):
    """A plan for the CPU devices of this process, whatever device it names."""
    monkeypatch.setattr(
        topology, "devices", lambda target, count, hosts: jax.devices()[: count * hosts]
    )


# --- parts ---


T5 = 4_762_310_656
CLIP_L = 123_060_480
CLIP_G = 694_659_840
GEMMA = 2_614_341_888
KL = 49_545_475
DC = 159_223_171
CLIP_L_PROJECTED = CLIP_L + 768**2
# in 16 bits: the linears of the layers of a reward's network, text and pictures
VIT_H = 12 * (24 * 1024**2 + 32 * 1280**2)
VIT_L = 12 * (12 * 768**2 + 24 * 1024**2)
REWARD_H = 4 * 986_109_441 - 2 * VIT_H
QWEN = 3_921_534_720  # Qwen3-4B without its last layer and the norm after it
# widths of FLUX.1, SD3.5 Large, SANA, Z-Image
D = 3072
S = 2432
N = 2240
Z = 3840
# parameters: of the base, quantized, of an adapter's rank (in + out of every target);
# bytes: encoders, vae, reward
BY_HAND = {
    "flux1_sol_rl_hpsv2": (
        11_901_408_320,
        19 * (8 * D**2 + 2 * 6 * D**2 + 4 * 4 * D**2)
        + 38 * (3 * D**2 + 3 * D**2 + 4 * D**2 + 5 * D**2)
        + 64 * D,
        (19 * 4 + 38 * 3) * 2 * D,
        2 * (T5 + CLIP_L),
        2 * KL,
        REWARD_H,
    ),
    "sd3_sol_rl_pickscore": (
        8_056_627_520,
        38 * 8 * S**2,
        (38 * 8 - 1) * 2 * S,
        2 * (T5 + CLIP_L_PROJECTED + CLIP_G),
        2 * KL,
        REWARD_H,
    ),
    "sana_sol_rl_clipscore": (
        1_604_462_752,
        20 * (2 * N**2 + 5 * N**2 + 2.5 * N**2),
        20 * 8 * 2 * N,
        2 * GEMMA,
        2 * DC,
        4 * 427_616_513 - 2 * VIT_L,
    ),
    "zimage_sol_rl_hpsv2": (
        6_154_908_736,
        34 * (4 * Z**2 + 3 * 8 / 3 * Z**2),
        34 * 4 * 2 * Z,
        2 * QWEN,
        2 * KL,
        REWARD_H,
    ),
}


def by_rule(mesh, tree):
    """Shapes placed as parameters are."""
    return jax.tree.map(
        lambda x, where: abstract(x, mesh, where), tree, sharding.parameter_sharding(mesh, tree)
    )


@pytest.mark.slow
@pytest.mark.usefixtures("cpus")
@pytest.mark.parametrize(
    "preset",
    [
        pytest.param(p, marks=[] if p.startswith("sana") else pytest.mark.exhaustive)
        for p in BY_HAND
    ],
)
def test_parts_agree_with_a_count_by_hand(preset):
    """To 2 %: what is too small to be split, and scales of matrices, are not counted by hand."""
    base, quantized, rank, encoders, vae, reward = BY_HAND[preset]
    expected = {
        "base": 2 * base,
        "quantized copy": 4.5 / 8 * quantized,
        "adapters": 3 * 4 * 32 * rank,
        "optimizer": 2 * 4 * 32 * rank,
        "text encoders": encoders,
        "vae": vae,
        "reward networks": reward,
    }
    config = resolve(preset)
    for fsdp in (1, 4):
        planner = Planner(override(config, (f"mesh.fsdp={fsdp}",)), Devices(TARGETS["h100"], fsdp))
        planner.codes = by_rule(planner.phases.mesh, planner.codes)
        got = {name: bytes_per_device(arrays(tree)) for name, tree in planner.parts().items()}
        assert got.keys() == {*expected, "conditioning"}
        for name, size in expected.items():
            assert math.isclose(got[name], size / fsdp, rel_tol=0.02), name


@pytest.mark.usefixtures("cpus")
@pytest.mark.exhaustive
def test_parts_are_what_arrays_hold():
    """Of a built experiment, on each of eight devices, to the byte; and the copy lies where `sync`
    leaves it.
    """
    overrides = (
        "mesh.data=2",
        "mesh.fsdp=4",
        "reward=tiny-clip",
        "rollout.explore.correction_rank=8",
    )
    config = small_config(
        "unused", *overrides, "rollout.scoring_precision=fp32"
    )  # as a CPU's `auto` is
    built = experiments.build(config)
    state = fresh_state(built)
    backbone = built.backbone
    explorer = built.explorer
    quantizer = explorer.quantizer(explorer.format.name)
    assert quantizer.extra_arrays.keys() == set(
        explorer.quantized
    )  # what the correction keeps is part of the copy
    with jax.set_mesh(backbone.mesh):
        codes = quantize_policy(
            backbone.mesh,
            backbone.transformer,
            state.old,
            built.scale,
            explorer.quantized,
            quantizer,
        )
    trees = {
        "base": backbone.transformer,
        "quantized copy": codes,
        "adapters": (state.adapters, state.old, state.ema),
        "optimizer": state.opt_state,
        "text encoders": backbone.text_encoders.load_params(),
        "vae": backbone.decoder.params,
        "reward networks": built.reward.params,
    }
    planner = Planner(config, Devices(TARGETS["h100"], 8))
    (sync,) = planner.phases.programs("sync", {})
    planner.place(planner.lowered(sync).compile())
    planned = {name: bytes_per_device(arrays(tree)) for name, tree in planner.parts().items()}

    def on(tree, device):
        return sum(
            s.data.nbytes
            for x in jax.tree.leaves(tree)
            for s in x.addressable_shards
            if s.device == device
        )

    for name, tree in trees.items():
        for device in jax.devices():
            assert planned[name] == on(tree, device), name


# --- programs ---


@pytest.mark.slow
@pytest.mark.usefixtures("cpus")
@pytest.mark.parametrize(
    ("preset", "missing"),
    [
        ("tiny", ()),
        ("sana_sol_rl_hpsv2", ()),
        ("sana_naive_scaling_hpsv2", ("sync", "regenerate")),
        pytest.param("sana_naive_quant_hpsv2", ("regenerate",), marks=pytest.mark.exhaustive),
        pytest.param(
            "sana_diffusionnft_hpsv2", ("sync", "regenerate"), marks=pytest.mark.exhaustive
        ),
        pytest.param("flux1_sol_rl_hpsv2", (), marks=pytest.mark.exhaustive),
        pytest.param("sd3_sol_rl_pickscore", (), marks=pytest.mark.exhaustive),
    ],
)
def test_programs_of_an_iteration(preset, missing):
    """Their functions, and as many chunks as rows need on each of two devices."""
    planner = Planner(resolve(preset), Devices(TARGETS["b200"], 2))
    phases = planner.phases
    rollout = planner.config.rollout
    prompts = planner.config.train.num_prompts
    has = [name for name in PHASES if phases.has(name)]
    assert has == [name for name in PHASES if name not in (*missing, "evaluate", "targets")]
    programs = {name: phases.programs(name, planner.codes) for name in has}
    assert {name: [program.name for program in of] for name, of in programs.items()} == {
        name: FUNCTIONS[name] for name in has
    }
    rows = 2 * rollout.per_device_batch_size
    drafts = math.ceil(prompts * rollout.candidates / rows)
    redone = math.ceil(prompts * rollout.kept / rows) if "regenerate" in has else 0
    calls = {name: {program.calls for program in of} for name, of in programs.items()}
    assert calls["explore"] == {drafts}
    assert calls.get("regenerate", {0}) == {redone}
    assert calls["score"] == {drafts + redone}
    for program in (program for of in programs.values() for program in of):
        assert all(x.sharding.mesh.size == 2 for x in arrays(program.arguments))


@pytest.mark.slow
@pytest.mark.usefixtures("cpus")
def test_the_largest_of_several_sizes_is_planned_and_a_larger_evaluation():
    """Latents of tiny-sana are a quarter of a picture each way."""
    overrides = ["rollout.size=[[16,16],[16,48],[24,24]]", "eval.size=[32,48]", "reward=tiny-clip"]
    planner = Planner(resolve("tiny", overrides), Devices(TARGETS["b200"], 1))

    def programs(phase):
        return planner.phases.programs(phase, planner.codes)

    def side(x):
        return x.shape[1:3]

    assert {side(programs(phase)[0].arguments[3].noise) for phase in ("explore", "regenerate")} == {
        (4, 12)
    }
    assert side(programs("update")[0].arguments[4].latents) == (4, 12)
    assert [
        side(program.arguments[place])
        for program, place in zip(programs("score"), (1, 2), strict=True)
    ] == [
        (4, 12),
        (16, 48),
    ]
    sample, decode, score = programs("evaluate")
    assert (
        side(sample.arguments[3].noise),
        side(decode.arguments[1]),
        side(score.arguments[2]),
    ) == (
        (8, 12),
        (8, 12),
        (32, 48),
    )
    assert sample.arguments[1][0].schedule.steps == planner.config.eval.num_steps
    assert {program.calls for program in (sample, decode, score)} == {0}
    assumptions = list(planning.assumptions(planner))
    assert "every iteration has the largest of rollout.size" in assumptions
    assert "an evaluation, whose images are larger, takes no time of an iteration" in assumptions


@pytest.mark.slow
@pytest.mark.usefixtures("cpus")
@pytest.mark.parametrize(
    ("family", "recording"), [("sol_rl", "regenerate"), ("naive_scaling", "explore")]
)
def test_states_are_kept_for_an_objective_on_an_sdes_steps(family, recording):
    """By the phase whose samples are trained on; the update is given them."""
    planner = Planner(
        resolve("tiny", ["objective=mix_grpo", f"family={family}"]), Devices(TARGETS["b200"], 2)
    )
    phase_states = {}
    for phase in ("explore", "regenerate"):
        if planner.phases.has(phase):
            (program,) = planner.phases.programs(phase, planner.codes)
            with jax.set_mesh(program.mesh):
                phase_states[phase] = program.function.eval_shape(*program.arguments)[1]
    assert {phase for phase, states in phase_states.items() if states is not None} == {recording}
    (update,) = planner.phases.programs("update", {})
    config = planner.config
    states = phase_states[recording].shape
    assert update.arguments[4].states.shape == (
        config.train.num_prompts * config.rollout.kept,
        5,
        *states[2:],
    )
    assert states[1] == 5  # before and after four steps


@pytest.mark.slow
@pytest.mark.usefixtures("cpus")
@pytest.mark.parametrize(("recipe", "continued"), [("best", 1), ("paper", 0)])
def test_regeneration_continues_where_a_run_does(recipe, continued):
    """The latents in between are an output of exploration, and regeneration has fewer steps."""
    planner = Planner(
        resolve("tiny", [f"explore={recipe}", "rollout.explore.precision=nvfp4"]),
        Devices(TARGETS["b200"], 2),
    )
    assert planner.phases.continued == continued
    (explore,), (regenerate,) = (
        planner.phases.programs(phase, planner.codes) for phase in ("explore", "regenerate")
    )
    with jax.set_mesh(explore.mesh):
        latents, _, intermediate = explore.function.eval_shape(*explore.arguments)
    assert (intermediate == latents) if continued else (intermediate is None)
    (segment,) = regenerate.arguments[1]
    steps = planner.config.rollout.num_steps
    assert segment.schedule.table.shape == (steps - continued, 5)


@pytest.mark.slow
@pytest.mark.usefixtures("cpus")
def test_the_gradient_of_the_reward_is_planned_for_an_objective_that_takes_it():
    """Three gradients of each kept sample; the update is given their targets."""
    overrides = ["objective=opsd", "reward=tiny-clip"]
    planner = Planner(resolve("tiny", overrides), Devices(TARGETS["b200"], 2))
    (program,) = planner.phases.programs("targets", {})
    config = planner.config
    kept = config.train.num_prompts * config.rollout.kept
    latents = program.arguments[3].shape
    assert program.calls == 3 * -(-kept // latents[0])
    with jax.set_mesh(program.mesh):
        rewards, gradient = program.function.eval_shape(*program.arguments)
    assert (rewards.shape, gradient.shape) == (latents[:1], latents)
    (regenerate,) = planner.phases.programs("regenerate", {})
    (update,) = planner.phases.programs("update", {})
    with jax.set_mesh(update.mesh):
        states = regenerate.function.eval_shape(*regenerate.arguments)[1]
        update.function.eval_shape(*update.arguments)
    assert states.shape[1:] == (2, *latents[1:])
    assert update.arguments[4].states.shape == (kept, 2, *latents[1:])
    assert {x.shape for x in update.arguments[4].targets.values()} == {(kept, *latents[1:])}
    assert not Planner(resolve("tiny"), Devices(TARGETS["b200"], 2)).phases.has("targets")


# --- the plan ---


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A plan of `tiny` by the CPU's compiler, and the folder of its compiled texts."""
    folder = tmp_path_factory.mktemp("plan") / "hlo"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            topology, "devices", lambda target, count, hosts: jax.devices()[: count * hosts]
        )
        config = small_config(
            "unused", "mesh.data=-1", "model.prompt_cache_dir=null", "reward=tiny-clip"
        )
        return planning.plan(config, Devices(TARGETS["h200"], 2), folder), folder


@pytest.mark.exhaustive
def test_a_plan_explains_memory_to_the_byte(small):
    summary, _ = small
    phases = [name for name in PHASES if name not in ("targets", "evaluate")]
    assert [phase["name"] for phase in summary["phases"]] == phases
    for phase, row in planning.rows(summary):
        m = row["memory"]
        program_bytes = m["held"] + m["temporaries"] + m["outputs"] - m["aliased"] + m["code"]
        assert m["peak"] == program_bytes + sum(m["resident"].values())
        assert m["arguments"] == m["held"] + m["repeated"] - m["unread"]
        assert min(m["temporaries"], m["outputs"], m["held"], m["repeated"]) >= 0
        elsewhere = set(m["resident"])
        assert ("text encoders" in elsewhere) == (
            phase != "encode"
        )  # nothing is kept of what they say
        assert ("quantized copy" in elsewhere) == (phase == "score")
    (update,) = summary["phases"][-1]["programs"]
    trained = summary["parts"]["adapters"] + summary["parts"]["optimizer"]
    assert update["memory"]["aliased"] >= trained  # the state is donated
    assert summary["peak"] == max(phase["peak"] for phase in summary["phases"])
    assert summary["fits"]
    assert summary["too_large"] == {}


@pytest.mark.exhaustive
def test_a_plan_adds_seconds_up(small):
    """The seconds of a phase are the sum over its programs of calls times seconds of a call. The
    estimate for `naive_scaling` explores with the program that regenerates.
    """
    summary, folder = small
    phases = {phase["name"]: phase for phase in summary["phases"]}
    for phase in phases.values():
        assert phase["seconds"] > 0
        assert phase["seconds"] == pytest.approx(
            sum(p["calls"] * p["roofline"]["seconds"] for p in phase["programs"])
        )
    assert summary["seconds"] == pytest.approx(sum(phase["seconds"] for phase in phases.values()))
    assert summary["rollout"] == pytest.approx(
        sum(phases[name]["seconds"] for name in ("sync", "explore", "regenerate"))
    )
    (explore,) = phases["explore"]["programs"]
    (regenerate,) = phases["regenerate"]["programs"]
    naive = summary["naive_scaling"]
    assert naive["rollout"] == pytest.approx(explore["calls"] * regenerate["roofline"]["seconds"])
    others = phases["encode"]["seconds"] + phases["update"]["seconds"]
    share = explore["calls"] / (explore["calls"] + regenerate["calls"])
    assert naive["seconds"] == pytest.approx(
        others + naive["rollout"] + share * phases["score"]["seconds"]
    )
    assert {path.name for path in folder.iterdir()} == {
        f"{phase}-{name}.hlo" for phase, functions in FUNCTIONS.items() for name in functions
    }


@pytest.mark.exhaustive
def test_a_plan_is_shown_as_a_table_and_as_json(small):
    summary, _ = small
    assert json.loads(json.dumps(summary)) == summary
    text = planning.table(summary)
    for phase, row in planning.rows(summary):
        assert f"{phase}: {row['name']}, {row['calls']} calls of at least " in text
    assert all(line in text for line in summary["assumptions"])
    large = planning.table(
        summary | {"fits": False, "too_large": {"update": planning.SETTINGS["update"]}}
    )
    assert (
        "does not fit\n  update is too large; it takes less with "
        "model.gradient_checkpointing=blocks, optimizer.per_device_batch_size, mesh" in large
    )
    assert summary["faster"] == {"explore": "rollout.explore.precision=auto"}  # NVFP4 on an H200
    assert re.search(
        r"fits\n  explore leaves 13\d\.\d\d GB; "
        r"it may be faster with rollout.explore.precision=auto\n",
        text,
    )


# --- the command ---


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["flux2"], "unknown preset 'flux2'"),
        (
            ["tiny", "--devices", "0"],
            "Invalid value for '--devices': 0 is not in the range 1<=x<=1024",
        ),
        (["tiny", "--device", "h101"], "Invalid value for '--device': 'h101' is not one of"),
        (
            ["tiny", "--device", "h200", "--devices", "9"],
            "--devices=9: a host has at most 8 h200; name more hosts",
        ),
        (
            ["tiny", "--device", "tpu-v6e", "--devices", "3"],
            "--devices=3: a host has 1 or 4 or 8 tpu-v6e; name more hosts",
        ),
    ],
)
def test_bad_input_is_refused_in_one_line(arguments, message, call, monkeypatch):  # noqa: F811
    monkeypatch.setattr(topology, "prepare", lambda target: None)
    refused(call("plan", *arguments), message)


@pytest.mark.usefixtures("cpus")
@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("mesh.fsdp=3", "mesh.data=-1, mesh.fsdp=3"),
        (
            "model.path=owner/name",
            "model.path='owner/name': no such directory, not in the Hub's cache",
        ),
        ("model.height=33", "size 33x32"),
        ("--hlo=/dev/null/texts", "--hlo /dev/null/texts cannot be written: "),
    ],
)
def test_settings_that_no_run_can_have_are_refused_in_one_line(setting, message, call, monkeypatch):  # noqa: F811
    monkeypatch.setattr(topology, "prepare", lambda target: None)
    monkeypatch.setattr(topology, "compiled", lambda *_: pytest.fail("compiled"))
    refused(call("plan", "tiny", setting, "--devices", "8"), message)


def test_a_compiler_that_is_not_installed_is_one_line(call, monkeypatch):  # noqa: F811
    monkeypatch.setattr(topology.importlib.util, "find_spec", lambda name: None)
    refused(call("plan", "tiny", "--device", "b200"), "pip install 'solrl_jax[plan-cuda]'")


def refused(called, message):
    code, out, error = called
    assert (code, out) == (2, "")
    assert message in error
    assert error.count("\n") == 1


def test_options_of_rewards_that_a_plan_leaves_out_are_ignored():
    """`train` takes them; a plan compiles the trained rewards alone."""
    watched = ("reward.eval_only=[geneval]", "reward.options={geneval: {threshold: 0.4}}")
    config = small_config("unused", *watched)
    reward = abstract_reward(config, sharding.make_mesh(1, 1), jax.numpy.float32)
    assert reward.host is None
    misspelt = small_config("unused", "reward.options={genevel: {threshold: 0.4}}")
    with pytest.raises(InputError, match=r"reward\.options: no reward 'genevel'"):
        abstract_reward(misspelt, sharding.make_mesh(1, 1), jax.numpy.float32)
