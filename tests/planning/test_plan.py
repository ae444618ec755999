"""`solrl plan`: what it counts, against closed forms, hand-made programs and what arrays really hold; the command, whole."""

import json
import math
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from solrl_jax.config.presets import resolve
from solrl_jax.explore.sync import quantize_policy
from solrl_jax.models.attention import attention
from solrl_jax.numerics.target import planned_for
from solrl_jax.parallel.sharding import make_mesh
from solrl_jax.planning import devices
from solrl_jax.planning import plan as planning
from solrl_jax.planning.abstract import experiment, open_configurations
from solrl_jax.planning.collectives import collectives, partitioned
from solrl_jax.planning.measure import Planner, as_base, held_parts
from solrl_jax.planning.stages import Stages
from solrl_jax.planning.walk import cost
from solrl_jax.training import experiment as experiments
from solrl_jax.training.experiment import fresh_state
from tests.commands.test_cli import call  # noqa: F401 - a fixture
from tests.small import SMALL, small_config

H100 = devices.DEVICES["h100"]


def abstract(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def walked(f, *arguments, gathers=False, native=False):
    return cost(jax.jit(f).trace(*arguments).jaxpr, gathers=gathers, native=native)


# --- the walk ---


def test_operations_of_a_small_network_are_those_of_its_formula():
    """Three layers forwards, again for the gradient, and two products a layer backwards; and a convolution."""
    batch, width, depth = 1024, 256, 3

    def loss(ws, x):
        block = jax.checkpoint(lambda x, w: (jax.nn.gelu(x @ w), None))
        return jax.lax.scan(block, x, ws)[0].astype(jnp.float32).sum()

    train = walked(jax.value_and_grad(loss), abstract(depth, width, width), abstract(batch, width))
    assert train.flops == {"bf16": 4 * depth * 2 * batch * width**2}
    conv = lambda x, k: jax.lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    kernel = abstract(3, 3, 16, 32, dtype=jnp.float32)
    assert walked(conv, abstract(2, 8, 8, 16, dtype=jnp.float32), kernel).flops == {"fp32": 2 * 2 * 8 * 8 * 32 * 3 * 3 * 16}


def test_memory_of_a_small_network_is_what_has_to_be_live():
    """In units of the input: a normalised input is made for the product, which leaves four; GELU is in place; one comes out."""

    def mlp(x, w, v):
        y = x - x.mean(-1, keepdims=True)
        return x + jax.nn.gelu(y @ w) @ v

    unit = 1024 * 256 * 2
    made = walked(mlp, abstract(1024, 256), abstract(256, 1024), abstract(1024, 256))
    assert made.kept == unit
    assert 5 <= made.peak / unit < 5.02  # beside the means
    weights, x = abstract(9, 256, 256), abstract(1024, 256)
    looped = walked(lambda ws, x: jax.lax.scan(lambda x, w: (x @ w, None), x, ws)[0], weights, x)
    layer = 256 * 256 * 2
    assert looped.peak == 2 * unit + layer  # the carry, the next one and a weight, however long the loop
    stacked = walked(lambda ws, x: jax.lax.scan(lambda x, w: (x @ w, x), x, ws)[1], weights, x)
    assert stacked.peak == (9 + 2) * unit + layer


def test_scores_are_held_by_xla_and_not_by_flash_attention():
    q = abstract(2, 512, 4, 64)
    scores, one = 2 * 4 * 512 * 512 * 4, 2 * 512 * 4 * 64 * 2
    assert walked(attention, q, q, q).peak == 1.5 * scores  # float32, and BF16 after the softmax
    with planned_for("gpu"):
        flash = walked(lambda *qkv: attention(*qkv), q, q, q)
        k, mask = abstract(2, 511, 4, 64), abstract(2, 1, 1, 511, dtype=bool)
        odd, masked = walked(lambda *qkv: attention(*qkv), q, k, k), walked(lambda *qkvm: attention(*qkvm), q, k, k, mask)
        gradient = walked(jax.grad(lambda *qkv: attention(*qkv).astype(jnp.float32).sum(), (0, 1, 2)), q, q, q)
    assert flash.peak == one + 2 * 4 * 512 * 4  # the output, a number a query
    assert odd.peak <= flash.peak + 3 * one  # keys and values of even length
    assert masked.peak > scores  # odd lengths and a mask cuDNN does not take
    forwards = 4 * 2 * 4 * 512 * 512 * 64
    assert flash.flops == walked(attention, q, q, q).flops == {"bf16": forwards}
    assert gradient.flops == {"bf16": 3.5 * forwards}


def test_the_stand_in_for_flash_attention_has_its_shapes():
    q, k, mask, bias = abstract(2, 6, 4, 8), abstract(2, 4, 2, 8), abstract(2, 1, 1, 4, dtype=bool), abstract(1, 4, 6, 4)

    def shapes(more):
        def both(q, k, v, more):
            out, back = jax.vjp(lambda *qkv: attention(*qkv, **more), q, k, v)
            return out, back(out)

        batches = jax.tree.map(lambda x: jax.ShapeDtypeStruct((3, *x.shape), x.dtype), (q, k, k))
        return jax.eval_shape(both, q, k, k, more), jax.eval_shape(jax.vmap(both, (0, 0, 0, None)), *batches, more)

    for more in ({}, {"mask": mask}, {"bias": bias}, {"mask": mask, "bias": bias}):
        real = shapes(more)
        with planned_for("gpu"):
            assert shapes(dict(more)) == real


# --- messages ---


def test_messages_of_a_hand_made_program():
    """Four all-reduces in a loop over pairs, one all-gather over all, one permutation; on one host and on four."""
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    spec = PartitionSpec(("a", "b"))

    def one(x):  # [1, 1000] float32 on each device
        again = lambda i, x: jax.lax.pcast(jax.lax.psum(x * 1.5, "b"), "b", to="varying")
        x = jax.lax.fori_loop(0, 5, again, x)
        x = jax.lax.ppermute(x, "a", [(i, (i + 1) % 4) for i in range(4)])
        return jax.lax.all_gather(x, ("a", "b")).sum(0)

    f = jax.jit(jax.shard_map(one, mesh=mesh, in_specs=spec, out_specs=spec))
    _, text = partitioned(f.lower(np.ones((8, 1000), np.float32)), {})
    found = {c.kind: c for c in collectives(text, 8)}
    assert found.keys() == {"all-reduce", "collective-permute", "all-gather"}
    assert {kind: (c.times, c.ways, c.size) for kind, c in found.items() if kind != "collective-permute"} == {
        "all-reduce": (5, 2, 4000),
        "all-gather": (1, 8, 32000),
    }
    assert {kind: c.sent for kind, c in found.items()} == {
        "all-reduce": 4000, "collective-permute": 4000, "all-gather": 28000,
    }  # fmt: skip
    assert all(c.crossing(8) == 0 for c in found.values())
    # two devices a host: pairs stay within; of a gathered array, a host lacks 24000, half of which comes through either device
    assert {kind: c.crossing(2) for kind, c in found.items()} == {
        "all-reduce": 0, "collective-permute": 4000, "all-gather": 12000,
    }  # fmt: skip


# --- parts ---


T5, CLIP_L, CLIP_G, GEMMA, KL, DC = 4_762_310_656, 123_060_480, 694_659_840, 2_614_341_888, 83_819_683, 312_250_275
CLIP_L_PROJECTED = CLIP_L + 768**2
D, S, N = 3072, 2432, 2240  # widths of FLUX.1, SD3.5 Large, SANA
BY_HAND = {  # parameters: of the base, quantised, of an adapter's rank (in + out of every target); bytes: encoders, vae, reward
    "flux1_sol_rl_hpsv2": (
        11_901_408_320,
        19 * (8 * D**2 + 2 * 6 * D**2 + 4 * 4 * D**2) + 38 * (3 * D**2 + 3 * D**2 + 4 * D**2 + 5 * D**2) + 64 * D,
        (19 * 4 + 38 * 3) * 2 * D,
        2 * (T5 + CLIP_L),
        4 * KL,
        4 * 986_109_441,
    ),
    "sd3_sol_rl_pickscore": (
        8_056_627_520, 38 * 8 * S**2, (38 * 8 - 1) * 2 * S, 2 * (T5 + CLIP_L_PROJECTED + CLIP_G), 4 * KL, 4 * 986_109_441,
    ),
    "sana_sol_rl_clipscore": (
        1_604_462_752, 20 * (2 * N**2 + 5 * N**2 + 2.5 * N**2), 20 * 8 * 2 * N, 2 * GEMMA, 2 * DC, 4 * 427_616_513,
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "preset", [pytest.param(p, marks=[] if p.startswith("sd3") else pytest.mark.exhaustive) for p in BY_HAND]
)
def test_parts_agree_with_a_count_by_hand(preset):
    """To 2 %: what is too small to be split, and scales of matrices, are not counted by hand."""
    base, quantized, rank, encoders, vae, reward = BY_HAND[preset]
    wanted = {
        "base": 2 * base, "quantised copy": 4.5 / 8 * quantized, "adapters": 3 * 4 * 32 * rank, "optimiser": 2 * 4 * 32 * rank,
        "text encoders": encoders, "vae": vae, "reward networks": reward,
    }  # fmt: skip
    config = resolve(preset)
    pipeline = open_configurations(config.model.path, config.model.remat)
    for fsdp in (1, 4):
        whole = Stages(experiment(config, pipeline, H100, make_mesh(-1, fsdp)), 8)
        got = held_parts(whole, as_base(whole))
        assert got.keys() == {*wanted, "conditioning"}
        for name, size in wanted.items():
            assert math.isclose(got[name], size / fsdp, rel_tol=0.02), name


def test_parts_are_what_arrays_hold():
    """Of a built experiment, on each of eight devices, to the byte; and the copy lies where `sync` leaves it."""
    config = small_config("unused", "mesh.data=2", "mesh.fsdp=4", "reward=tiny-clip", "rollout.explore.correction=8")
    built = experiments.build(config)
    state, backbone, recipe = fresh_state(built), built.backbone, built.recipe
    quantizer = recipe.quantizer(recipe.format.name)
    assert quantizer.beside.keys() == set(recipe.quantized)  # what the correction keeps is part of the copy
    with jax.set_mesh(backbone.mesh):
        codes = quantize_policy(backbone.mesh, backbone.transformer, state.old, built.scale, recipe.quantized, quantizer)
    trees = {
        "base": backbone.transformer, "quantised copy": codes, "adapters": (state.adapters, state.old, state.ema),
        "optimiser": state.opt_state, "text encoders": backbone.text_encoders.params(), "vae": backbone.decoder.params,
        "reward networks": built.reward.params,
    }  # fmt: skip
    machine = devices.machine("h100", 8, 1, None, None, None, None, None)
    pipeline = open_configurations(config.model.path, config.model.remat)
    planned = Planner(config, machine, pipeline).measure(backbone.mesh, only=()).parts
    held = lambda tree, device: sum(
        s.data.nbytes for x in jax.tree.leaves(tree) for s in x.addressable_shards if s.device == device
    )
    for name, tree in trees.items():
        for device in jax.devices():
            assert planned[name] == held(tree, device), name


# --- stages ---


def test_messages_of_regenerating_are_the_gathered_weights():
    """On 2 x 4 devices: three of every four bytes of what is split, at each step; nothing leaves a host of four."""
    config = small_config("unused", "mesh.data=2", "mesh.fsdp=4")
    machine = devices.machine("h100", 4, 2, None, None, None, None, None)
    planner = Planner(config, machine, open_configurations(config.model.path, config.model.remat))
    mesh = make_mesh(2, 4)
    (stage,) = planner.measure(mesh, only=("regenerate",)).stages
    whole = Stages(experiment(config, planner.pipeline, machine, mesh), 8)
    leaves = jax.tree.leaves((whole.experiment.backbone.transformer, whole.state.old))
    split = sum(x.size * x.dtype.itemsize for x in leaves if not x.sharding.is_fully_replicated)
    assert stage.calls == 1
    assert math.isclose(sum(stage.sent.values()), config.rollout.steps * split * 3 / 4, rel_tol=0.01)
    assert stage.crossing == 0
    assert stage.seconds > sum(stage.sent.values()) / machine.link


def test_exact_steps_are_counted_in_the_precision_that_they_take():
    """Half of the steps: half of what the format multiplies, and as much more in BF16 but for the adapters' own products."""
    flops = {}
    for exact in (0, 1):
        settings = ("rollout.explore.steps=2", f"rollout.explore.exact_steps={exact}", "rollout.explore.precision=nvfp4")
        config, machine = small_config("unused", *settings), devices.machine("b200", 1, 1, None, None, None, None, None)
        planner = Planner(config, machine, open_configurations(config.model.path, config.model.remat))
        (stage,) = planner.measure(make_mesh(1, 1), only=("explore",)).stages
        flops[exact] = stage.flops
    print(flops)
    assert flops[1]["fp4"] == flops[0]["fp4"] / 2 > 0
    more = flops[1]["bf16"] - flops[0]["bf16"]
    assert 1 < more / flops[1]["fp4"] < 1.2


# --- the command ---


@pytest.mark.exhaustive
def test_the_command_plans_a_run_that_does_not_fit(tmp_path):
    """In a process of its own, whose environment has eight devices, for one: nothing is compiled, and nothing is written."""
    settings = [*SMALL, "model.cache=null", "--devices", "1", "--memory", "15MB", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "solrl_jax", "plan", "tiny", *settings],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir())
    summary = json.loads(done.stdout)
    assert all(size == 1 for size in summary["mesh"].values())
    stages = {stage["name"]: stage for stage in summary["stages"]}
    assert list(stages) == ["encode", "sync", "explore", "regenerate", "score", "update"]
    # two prompts of eight candidates, four kept, in chunks of two; and an encoding of the empty prompt
    assert {name: stage["calls"] for name, stage in stages.items()} == {
        "encode": 2, "sync": 1, "explore": 8, "regenerate": 4, "score": 12, "update": 1,
    }  # fmt: skip
    assert all(stage["seconds"] > 0 and stage["peak"] == stage["resident"] + stage["activations"] for stage in stages.values())
    # sixteen rows by two steps, eight by three: the same network but for adapters
    flops = {name: sum(stage["flops"].values()) for name, stage in stages.items()}
    assert 1 < (flops["regenerate"] / 24) / (flops["explore"] / 32) < 1.1
    assert summary["largest"] == "update"
    assert not summary["fits"]
    knobs = {knob["change"]: knob for knob in summary["knobs"]}
    encode = knobs["model.cache=''"]
    assert encode["saves"] == summary["parts"]["text encoders"]
    assert encode["peak"] == summary["peak"] - encode["saves"]
    assert knobs["model.remat=blocks"]["fits"]
    assert 0 < knobs["optimizer.micro_batch=1"]["saves"] < knobs["model.remat=blocks"]["saves"]
    assert "  model.remat=blocks: update 0.01 GB, 0.01 GB less: fits" in planning.table(summary)


def test_parameters_may_be_split_where_they_do_not_fit():
    config = small_config("unused", "mesh.data=-1")
    machine = devices.machine("h100", 8, 1, "10MB", None, None, None, None)
    planner, mesh = Planner(config, machine, open_configurations(config.model.path, "none")), make_mesh(8, 1)
    measured = planner.measure(mesh, messages=False, only=("sync",))
    limit = measured.largest.peak // 2
    knobs = {knob.change: knob for knob in planning.turn(planner, measured, mesh, limit, lambda doing: None)}
    assert knobs["mesh.fsdp=4"].fits
    assert "mesh.fsdp=8" not in knobs  # it goes no further than it must


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["flux2"], "unknown preset 'flux2'"),
        (["tiny", "--devices", "0"], "Invalid value for '--devices': 0 is not in the range x>=1"),
        (["tiny", "--memory", "80XB"], "--memory '80XB': expected a number above 0 and a unit, GB or GiB, e.g. 80GB"),
        (["tiny", "--device", "h101"], "Invalid value for '--device': 'h101' is not one of"),
        (["tiny", "mesh.fsdp=3", "--devices", "8"], "mesh.data=-1, mesh.fsdp=3"),
        (["tiny", "--devices", "9"], "--devices: 9 CPU devices are to be pretended, but JAX has started already"),
        (["tiny", "model.path=owner/name"], "model.path='owner/name': no such directory, not in the hub's cache"),
        (["tiny", "model.height=33"], "size 33x32"),
        (["tiny", "--link-bandwidth", "inf"], "inf is not finite"),
    ],
)
def test_bad_input_is_refused_in_one_line_before_anything_is_compiled(arguments, message, call, monkeypatch):  # noqa: F811
    monkeypatch.setattr(Planner, "measure", lambda *_, **__: pytest.fail("compiled"))
    code, out, error = call("plan", *arguments)
    assert (code, out) == (2, "")
    assert message in error
    assert error.count("\n") == 1


def test_machines():
    assert devices.parse_memory("80GB") == 80e9
    assert devices.parse_memory("1.5 gib") == 1.5 * 2**30
    given = devices.machine("b200", 8, 2, "90GB", 1125.0, 4000.0, None, 25.0)
    assert (given.count, given.memory, given.bf16, given.fp4) == (16, 90e9, 1125e12, 4500e12)
    assert (given.bandwidth, given.link, given.network) == (4e12, 900e9, 25e9)
    for name, row in devices.DEVICES.items():
        assert row.name == name
        assert row.fp8 >= row.bf16 > row.link
