"""Results do not depend on the batch, the chunk or the mesh (docs/method.md, section 2); on eight
CPU devices.
"""

import functools

import chex
import jax
import numpy as np
import optax
import pytest

from solrl_jax.errors import InputError
from solrl_jax.parallel.sharding import make_mesh, parameter_sharding
from solrl_jax.rl import experiment as experiments
from solrl_jax.rl.experiment import check_processes, fresh_state
from solrl_jax.rl.generate import SeedBatch, draw_noise, generate
from solrl_jax.rl.iteration import iterate
from solrl_jax.rl.trainable.trainable import flatten
from tests.small import small_config
from tests.toys import toy_experiment

MESHES = {
    "one": ("mesh.data=1",),
    "data=8": ("mesh.data=8",),
    "data=2 fsdp=4": ("mesh.data=2", "mesh.fsdp=4"),
    "data=2 fsdp=2 tensor=2": ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2"),
    "fsdp=8": ("mesh.data=1", "mesh.fsdp=8"),
}
ALL_AXES = "data=2 fsdp=2 tensor=2"
# Every option of exploration: two are calibrated on each mesh, one explores in two segments.
OPTIONS = (
    "rollout.explore.correction_rank=8",
    "rollout.explore.sigmas=first",
    "rollout.explore.exact_steps=1",
)
DIVIDED = [
    ALL_AXES,
    *(
        pytest.param(name, marks=pytest.mark.exhaustive)
        for name in ("data=8", "data=2 fsdp=4", "fsdp=8")
    ),
]
REWARD_TOLERANCE = 1e-5
ADAPTER_TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def built():
    """The experiment on a mesh, by its name in `MESHES`. Each is built once.

    Sixteen terms an iteration: eight micro-batches one after another on one device, two on four
    groups, one on eight.
    """
    return functools.cache(
        lambda name: experiments.build(small_config("unused", *OPTIONS, *MESHES[name]))
    )


def explore(experiment, rows):
    """NVFP4 proxy rewards of some of 24 candidates of a prompt."""
    prompts = experiment.test_prompts[:2]
    explorer = experiment.explorer
    seeds = experiment.seeds("candidate", prompts[:1], 24, seed=0, iteration=1)[0]
    assert explorer.settings[0].precision == "nvfp4"
    sampler = explorer.sampler(fresh_state(experiment).old, explorer.settings[0])
    chosen = SeedBatch(np.zeros(len(rows), int), seeds[rows])
    return generate(
        experiment.backbone,
        sampler,
        experiment.encode_prompts(prompts, experiment.reward),
        chosen,
        experiment.reward,
    ).reward


@pytest.fixture(scope="module")
def everyone(built):
    return explore(built("one"), np.arange(24))


FURTHER = functools.partial(pytest.param, marks=pytest.mark.exhaustive)


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        FURTHER(ALL_AXES, range(24)),
        FURTHER(ALL_AXES, [17]),
        FURTHER(ALL_AXES, [3, 17, 5]),
        *(FURTHER("one", rows) for rows in ([17], [3, 17, 5], range(24))),
    ],
)
def test_a_candidate_scores_the_same_alone_in_company_and_on_any_mesh(name, rows, built, everyone):
    assert np.ptp(everyone) > 100 * REWARD_TOLERANCE  # candidates differ
    np.testing.assert_allclose(
        explore(built(name), np.array(rows)), everyone[np.array(rows)], atol=REWARD_TOLERANCE
    )


def exploring(experiment):
    adapters = jax.tree.map(lambda x: x + 0.01, fresh_state(experiment).old)
    return jax.device_get(flatten(experiment.explorer.policy(adapters, "nvfp4")))


@pytest.fixture(scope="module")
def exploring_on_one(built):
    return exploring(built("one"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", DIVIDED)
def test_the_policy_that_explores_is_the_same_to_the_bit_on_any_mesh(name, built, exploring_on_one):
    """Codes, scales and corrections. A sum in parts rounds differently, and can change a code."""
    policy = exploring(built(name))
    for path in built("one").explorer.quantized:
        chex.assert_trees_all_equal(policy[path], exploring_on_one[path], custom_message=path)


@pytest.mark.parametrize("name", DIVIDED)
@pytest.mark.exhaustive
def test_a_preview_is_fitted_the_same_on_any_mesh(name, built):
    table, one = (built(mesh).explorer.schedule(2).table for mesh in (name, "one"))
    assert np.abs(one - built("one").schedule(2).table).max() > 0.01
    np.testing.assert_array_equal(table, one)


@pytest.mark.exhaustive  # tests/diffusion/test_seeds.py has it for one seed in any batch
def test_initial_noise_is_the_same_to_the_bit(built):
    seeds = built("one").seeds("candidate", ["a red circle"], 24, seed=5, iteration=9)[0]
    whole = None
    for overrides in MESHES.values():
        mesh = small_config("unused", *overrides).mesh
        with jax.set_mesh(make_mesh(mesh.data, mesh.fsdp, mesh.tensor)):
            noise = np.asarray(draw_noise(seeds, (8, 8, 8)))
            alone = np.concatenate(
                [np.asarray(draw_noise(np.repeat(s[None], 8, 0), (8, 8, 8)))[:1] for s in seeds[:3]]
            )
        whole = noise if whole is None else whole
        np.testing.assert_array_equal(noise, whole)
        np.testing.assert_array_equal(alone, whole[:3])
    assert abs(whole.mean()) < 0.05
    assert abs(whole.std() - 1) < 0.05


def two_iterations(experiment):
    """Trainable at the start and at the end, who was kept, the last proxy rewards."""
    assert experiment.config.rollout.precision == "bf16"
    state = fresh_state(experiment)
    kept = []
    start = jax.device_get(state.adapters)
    for iteration in (1, 2):
        state, outcome = iterate(experiment, state, iteration)
        kept.append(outcome.ledger["kept"])
    return start, jax.device_get(state.adapters), kept, outcome.ledger["proxy_reward"]


@pytest.fixture(scope="module")
def on_one(built):
    return two_iterations(built("one"))


def norm(tree):
    return np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(tree)))


def difference(a, b):
    return norm(jax.tree.map(np.subtract, a, b))


def check_same_training(ours, on_one):
    """The same candidates were kept, and the adapters are the same but for rounding."""
    start, one, kept_by_one, scored_by_one = on_one
    _, adapters, kept, scored = ours
    np.testing.assert_array_equal(kept, kept_by_one)
    np.testing.assert_allclose(scored, scored_by_one, atol=REWARD_TOLERANCE)
    # there was something to learn
    assert difference(one, start) / norm(one) > 1000 * ADAPTER_TOLERANCE
    assert difference(adapters, one) / norm(one) < ADAPTER_TOLERANCE


@pytest.mark.slow
def test_a_toy_keeps_the_same_candidates_and_ends_with_the_same_adapters():
    """In float32, exploring in NVFP4, on a mesh with all axes and on one device."""
    ours, on_one = (two_iterations(toy_experiment(mesh=mesh)) for mesh in ((2, 2, 2), (1, 1)))
    check_same_training(ours, on_one)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [*MESHES][1:])
def test_training_keeps_the_same_candidates_and_ends_with_the_same_adapters(
    name, built, on_one, capfd
):
    """In BF16, exploring in NVFP4."""
    capfd.readouterr()
    ours = two_iterations(built(name))
    # XLA warns if it replicates an array because it knows no way from one division to another. It
    # must not do so to a gradient. It may to a quantized layer, if a share of it is not of whole
    # blocks. (With a warm cache there are no warnings.)
    warnings = [
        line for line in capfd.readouterr().err.splitlines() if "full rematerialization" in line
    ]
    assert not [line for line in warnings if "jit(quantize_policy)" not in line]
    check_same_training(ours, on_one)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["data=2 fsdp=4", "data=8", "fsdp=8"])
def test_training_in_full_ends_with_the_same_parameters_whose_state_is_split_as_the_weights(name):
    """In BF16 with float32 masters: every parameter but one stack, which has an adapter."""
    extra = (
        "train.parameters=(?!transformer_blocks/attn2/to_q/kernel).*",
        "optimizer.max_grad_norm=10",
    )
    experiment, alone = (
        experiments.build(small_config("unused", *extra, *MESHES[mesh])) for mesh in (name, "one")
    )
    (_, got, kept, _), (start, one, kept_by_one, _) = (
        two_iterations(experiment),
        two_iterations(alone),
    )
    np.testing.assert_array_equal(kept, kept_by_one)
    assert difference(one, start) / norm(one) > 1000 * ADAPTER_TOLERANCE
    assert difference(got, one) / norm(one) < ADAPTER_TOLERANCE
    state = fresh_state(experiment)
    path = "transformer_blocks/ff/conv_inverted/kernel"
    base = flatten(experiment.backbone.transformer)[path]
    for tree in (
        state.adapters,
        state.old,
        state.ema,
        *(optax.tree.get(state.opt_state, of) for of in ("mu", "nu")),
    ):
        assert tree[path].sharding == base.sharding
    assert (state.old[path].dtype, state.adapters[path].dtype) == (base.dtype, np.float32)


@pytest.mark.slow
def test_fsdp_splits_what_is_large_and_nothing_else(built):
    experiment = built("data=2 fsdp=4")
    kernel = experiment.backbone.transformer["transformer_blocks"]["ff"]["conv_inverted"]["kernel"]
    assert kernel.addressable_shards[0].data.size * 4 == kernel.size
    bias = experiment.backbone.transformer["proj_out"]["bias"]
    assert bias.addressable_shards[0].data.size == bias.size
    adapters = fresh_state(experiment).adapters["transformer_blocks/attn1/to_q/kernel"]["a"]
    assert adapters.addressable_shards[0].data.size * 4 == adapters.size


@pytest.mark.parametrize(("data", "fsdp", "tensor"), [(3, 4, 1), (16, 1, 1), (-1, 3, 1), (2, 2, 3)])
def test_a_mesh_that_does_not_come_out_even_is_refused(data, fsdp, tensor):
    with pytest.raises(
        ValueError, match=f"mesh.data={data}, mesh.fsdp={fsdp}, mesh.tensor={tensor}"
    ):
        make_mesh(data, fsdp, tensor)


def test_minus_one_takes_what_is_left():
    assert dict(make_mesh(-1, 2).shape) == {"data": 4, "fsdp": 2, "sequence": 1, "tensor": 1}
    assert parameter_sharding(make_mesh(1, 1), {"w": np.zeros((64, 128))})["w"].is_fully_replicated


def test_a_mesh_that_leaves_a_process_without_a_device_is_refused():
    """All devices here are those of process 0, so that process 1 could place no array."""
    mesh = make_mesh(2, 1)
    check_processes(mesh, 1)
    with pytest.raises(InputError, match=r"mesh\.data=2, .* leaves process 1 without a device"):
        check_processes(mesh, 2)
