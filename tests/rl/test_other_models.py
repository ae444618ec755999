"""One training iteration of FLUX.1 and 2, Stable Diffusion 3, the other models of SANA, Qwen-Image,
Wan 2.1 and 2.2, and Z-Image in miniature, by the recipes of `configs/model`.
"""

from functools import partial
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

from solrl_jax.diffusion.sigmas import flux, sd3, shift_sigmas
from solrl_jax.diffusion.solver import solver_table
from solrl_jax.models.flux2.pipeline import empirical_mu
from solrl_jax.quant.matmul import LowRank, dequantize
from solrl_jax.quant.nvfp4 import NVFP4Tensor
from solrl_jax.rewards import registry as rewards
from solrl_jax.rewards.protocol import Reward, score_images
from solrl_jax.rl import experiment as experiments
from solrl_jax.rl.experiment import Experiment, fresh_state
from solrl_jax.rl.explore.explorer import Explorer
from solrl_jax.rl.explore.sync import quantize_policy
from solrl_jax.rl.generate import decode_chunk, draw_noise, sample_chunk
from solrl_jax.rl.iteration import iterate
from solrl_jax.rl.trainable.trainable import flatten
from solrl_jax.rl.update import update
from tests.pipelines import (
    MAX_TOKENS,
    save_flux2_pipeline,
    save_flux_pipeline,
    save_pipeline,
    save_qwen_image_pipeline,
    save_sd3_pipeline,
    save_wan22_pipeline,
    save_wan_pipeline,
    save_zimage_pipeline,
)
from tests.small import small_config

PROGRAMS = (sample_chunk, decode_chunk, score_images, draw_noise, update, quantize_policy)
# pixels a side, and the tokens that they are
SIZE = 16
TOKENS = 16
FRAMES = 13  # of clips: four latent frames of four tokens
# between meshes
REWARD_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-4

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
]
FLUX_BLOCK = [
    *JOINT,
    "norm1/linear",
    "norm1_context/linear",
    *(f"{ff}/net/{x}" for ff in ("ff", "ff_context") for x in ("0/proj", "2")),
]
ATTENTION = ("to_q", "to_k", "to_v", "to_out/0")
SD3_FF = [f"{ff}/net/{x}" for ff in ("ff", "ff_context") for x in ("0/proj", "2")]
QWEN_FF = [f"{mlp}/net/{x}" for mlp in ("img_mlp", "txt_mlp") for x in ("0/proj", "2")]
ZIMAGE_STACKS = ("layers", "noise_refiner", "context_refiner")
ZIMAGE_ATTENTION = [f"attention/{x}" for x in ("to_q", "to_k", "to_v", "to_out/0")]
WAN_ATTENTION = [f"attn{i}/{x}" for i in (1, 2) for x in ATTENTION]
FLUX2_FF = [f"{ff}/linear_{way}" for ff in ("ff", "ff_context") for way in ("in", "out")]
FLUX_SINGLE = ["attn/to_q", "attn/to_k", "attn/to_v", "norm/linear", "proj_mlp", "proj_out"]


def paths(block: str, names: list[str]) -> set[str]:
    return {f"{block}/{name}/kernel" for name in names}


BLOCKS = "transformer_blocks"
SINGLE = "single_transformer_blocks"
SANA = (
    paths(BLOCKS, ["attn2/to_k", "attn2/to_v", "ff/conv_inverted", "ff/conv_point"]),
    paths(BLOCKS, [f"attn{i}/{x}" for i in (1, 2) for x in ("to_q", "to_k", "to_v", "to_out/0")]),
)
# What is in NVFP4 while exploring, and what has an adapter; SD3's last block leaves the text where
# it is.
RECIPES = {
    "flux1": (
        paths(BLOCKS, FLUX_BLOCK) | paths(SINGLE, FLUX_SINGLE) | {"proj_out/kernel"},
        paths(BLOCKS, JOINT[:4]) | paths(SINGLE, JOINT[:3]),
    ),
    "sd3": (
        paths(f"{BLOCKS}/0-1", ["ff/net/0/proj", "ff/net/2"])
        | paths(f"{BLOCKS}/2-2", ["ff/net/0/proj", "ff/net/2"]),
        paths(f"{BLOCKS}/0-1", JOINT) | paths(f"{BLOCKS}/2-2", JOINT[:-1]),
    ),
    # the last of three blocks leaves the text where it is; the first has two attentions
    "sd3-medium": (
        paths(f"{BLOCKS}/0-0", [*JOINT, *SD3_FF, *(f"attn2/{x}" for x in ATTENTION)])
        | paths(f"{BLOCKS}/1-1", JOINT + SD3_FF)
        | paths(f"{BLOCKS}/2-2", JOINT[:-1] + SD3_FF[:2]),
        paths(f"{BLOCKS}/0-0", JOINT)
        | paths(f"{BLOCKS}/1-1", JOINT)
        | paths(f"{BLOCKS}/2-2", JOINT[:-1]),
    ),
    "sana-600m": SANA,
    "sana-1.5-1.6b": SANA,
    "sana-1.5-4.8b": SANA,
    "zimage": (
        set().union(
            *(
                paths(s, [*ZIMAGE_ATTENTION, *(f"feed_forward/w{i}" for i in (1, 2, 3))])
                for s in ZIMAGE_STACKS
            )
        ),
        set().union(*(paths(s, ZIMAGE_ATTENTION) for s in ZIMAGE_STACKS)),
    ),
    "qwen-image": (paths(BLOCKS, JOINT + QWEN_FF), paths(BLOCKS, JOINT)),
    "wan-2.1-1.3b": (
        paths("blocks", [*WAN_ATTENTION, "ffn/net/0/proj", "ffn/net/2"]),
        paths("blocks", WAN_ATTENTION),
    ),
    "wan-2.2-5b": (
        paths("blocks", [*WAN_ATTENTION, "ffn/net/0/proj", "ffn/net/2"]),
        paths("blocks", WAN_ATTENTION),
    ),
    "flux2-klein-4b": (
        paths(BLOCKS, JOINT + FLUX2_FF) | paths(SINGLE, ["attn/to_qkv_mlp_proj", "attn/to_out"]),
        paths(BLOCKS, JOINT[:4]) | paths(SINGLE, ["attn/to_qkv_mlp_proj"]),
    ),
}


def qwen_mu(steps: int, tokens: int) -> float:
    return 0.5 + (0.9 - 0.5) / (8192 - 256) * (tokens - 256)


LINEAR = np.append(np.linspace(1, 1 / 3, 3), 0)
SIGMAS = {  # of three steps
    "flux1": flux(3, TOKENS),
    "sd3": sd3(3, 3.0),
    "sd3-medium": sd3(3, 3.0),
    "sana-600m": LINEAR,
    "sana-1.5-1.6b": LINEAR,
    "sana-1.5-4.8b": LINEAR,
    "zimage": np.append(shift_sigmas(np.linspace(1, 1 / 3, 3), 6.0), 0),
    "qwen-image": flux(3, TOKENS, qwen_mu, 0.02),
    "wan-2.1-1.3b": np.append(shift_sigmas(np.linspace(1, 1 / 3, 3), 3.0), 0),
    "wan-2.2-5b": np.append(shift_sigmas(np.linspace(1, 1 / 3, 3), 5.0), 0),
    "flux2-klein-4b": flux(3, TOKENS, empirical_mu),
}
save_sana15_pipeline = partial(save_pipeline, qk_norm="rms_norm_across_heads")
SAVE = {
    "flux1": save_flux_pipeline,
    "sd3": save_sd3_pipeline,
    "sd3-medium": partial(save_sd3_pipeline, dual_attention_layers=(0,)),
    "sana-600m": save_pipeline,
    "sana-1.5-1.6b": save_sana15_pipeline,
    "sana-1.5-4.8b": partial(save_sana15_pipeline, num_layers=3),
    "zimage": save_zimage_pipeline,
    "qwen-image": save_qwen_image_pipeline,
    # With fewer layers, their parameters would be too small to be split over devices.
    "wan-2.1-1.3b": partial(save_wan_pipeline, num_layers=4),
    "wan-2.2-5b": partial(save_wan22_pipeline, num_layers=4),
    "flux2-klein-4b": save_flux2_pipeline,
}
# The queries of the last block's text ask for what nobody reads: nothing flows back to them.
UNREAD = dict.fromkeys(SAVE, frozenset()) | {
    name: paths(f"{BLOCKS}/2-2", ["attn/add_q_proj"]) for name in ("sd3", "sd3-medium")
}

# The same in the last layer of a stack alone.
UNREAD_LAST = {"qwen-image": paths(BLOCKS, ["attn/add_q_proj", "attn/to_add_out"])}


def redness() -> Reward:
    """How much more red than blue is in a picture; smooth, so that candidates differ."""

    def score(params, images, prepared):
        return {"reward": (images[..., 0] - images[..., 2]).mean((1, 2))}

    return Reward(None, lambda prompts: np.zeros(len(prompts), np.float32), score)


SHORT = ("rollout.candidates=4", "rollout.kept=2", "rollout.per_device_batch_size=4")


def build(name: str, folder: Path, *overrides: str) -> Experiment:
    """The recipe of `configs/model/NAME.yaml` on the pipeline in `folder`."""
    tokens = 60  # a template takes 27 of them
    if name.startswith(("flux1", "sd3")):
        tokens = 12
    if name.startswith("sana"):
        tokens = MAX_TOKENS
    if name.startswith("qwen"):
        tokens = 200  # most of them the template's
    text = f"model.max_sequence_length={tokens}"
    size = 2 * SIZE if name == "wan-2.2-5b" else SIZE  # its latents are twice as coarse
    of_model = (
        f"model={name}",
        f"model.path={folder}",
        f"model.height={size}",
        f"model.width={size}",
        text,
    )
    if name.startswith("wan"):  # rewards of images score the first frame and the last one
        of_model += (f"model.frames={FRAMES}", "eval.size=null", "reward.frames=2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(
            rewards.REWARDS,
            "redness",
            rewards.JaxEntry(lambda paths: redness()),
        )
        return experiments.build(
            small_config("unused", *of_model, *SHORT, "reward.weights={redness: 1}", *overrides)
        )


OTHERS = [pytest.param(name, marks=pytest.mark.exhaustive) for name in SAVE]


@pytest.fixture(scope="module", params=OTHERS)
def trained(request, tmp_path_factory):
    """Name, experiment, the trees that explored, and after each of two iterations: (state, metrics,
    ledger, traces).
    """
    name = request.param
    folder = tmp_path_factory.mktemp(request.param)
    SAVE[name](folder)
    with pytest.MonkeyPatch.context() as patch:
        experiment = build(name, folder)
        explored = []
        original = Explorer.policy
        patch.setattr(
            Explorer,
            "policy",
            lambda self, adapters, precision: (
                explored.append(original(self, adapters, precision)) or explored[-1]
            ),
        )
        state = fresh_state(experiment)
        outcomes = []
        for iteration in (1, 2):
            state, outcome = iterate(experiment, state, iteration)
            counts = [program._cache_size() for program in PROGRAMS]
            outcomes.append((jax.device_get(state), outcome.metrics, outcome.ledger, counts))
    return name, experiment, explored, outcomes


def test_the_recipe_is_the_models_own(trained):
    name, experiment, _, _ = trained
    solver = "euler" if name.startswith(("sana", "flux2")) else "dpm2"
    assert (experiment.config.model.name, experiment.config.rollout.solver) == (name, solver)
    assert experiment.backbone.pipeline.image_tokens(*experiment.size) == TOKENS
    grid = experiment.schedule(3)
    sigmas = SIGMAS[name]
    np.testing.assert_allclose(grid.sigmas, sigmas[:-1], rtol=1e-6)
    np.testing.assert_array_equal(grid.table, solver_table(solver, sigmas))
    assert not grid.guided


def test_exploration_is_quantized_where_the_rule_says_and_nowhere_else(trained):
    name, experiment, explored, _ = trained
    quantized, targets = RECIPES[name]
    assert set(experiment.trained_paths.adapted) == targets
    base = flatten(experiment.backbone.transformer)
    for params in map(flatten, explored):
        assert {path for path, leaf in params.items() if isinstance(leaf, NVFP4Tensor)} == quantized
        assert {
            path for path, leaf in params.items() if isinstance(leaf, LowRank)
        } == targets - quantized
    first, second = ({path: flatten(params)[path] for path in quantized} for params in explored)
    values = jax.jit(
        lambda tree: jax.tree.map(dequantize, tree, is_leaf=lambda x: isinstance(x, NVFP4Tensor))
    )(first)
    for path in quantized:
        weight = np.asarray(base[path], np.float32)
        error = np.linalg.norm(values[path] - weight) / np.linalg.norm(weight)
        assert 0.05 < error < 0.12, path  # rounded to four bits, and to nothing else
        # the second iteration explores with what the first one learned, merged
        same = np.array_equal(first[path].codes, second[path].codes)
        assert same == (path not in targets or path in UNREAD[name]), path


def test_every_adapter_learns_and_nothing_is_not_finite(trained):
    name, experiment, _, outcomes = trained
    for state, metrics, ledger, _ in outcomes:
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))
        assert all(np.isfinite(x) for x in metrics.values()), metrics
        assert metrics["nonfinite_rewards"] == 0 < metrics["grad_norm"]
        assert np.ptp(ledger["proxy_reward"]) > 1e-3
        assert ledger["precision"] == "nvfp4"
    assert (
        outcomes[0][1]["loss/kl"] == 0 < outcomes[1][1]["loss/kl"]
    )  # the policy is the base, and then is not
    first, second = (state.adapters for state, *_ in outcomes)
    assert set(first) == set(experiment.trained_paths.adapted)
    for path in first:
        still = {True} if path in UNREAD[name] else {False}
        if path in UNREAD_LAST.get(name, ()):
            still = {False, True}
        b = first[path]["b"]
        assert {bool((layer == 0).all()) for layer in b.reshape(-1, *b.shape[-2:])} == still, path
        assert np.array_equal(second[path]["b"], b) == (path in UNREAD[name]), path


def test_the_second_iteration_compiles_nothing(trained):
    *_, (first, second) = trained
    assert first[3] == second[3]
    assert all(count > 0 for count in first[3])


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "mesh",
    [
        ("mesh.data=2", "mesh.fsdp=4"),
        ("mesh.data=2", "mesh.fsdp=2", "mesh.sequence=2"),
    ],
)
def test_parameters_split_over_devices_train_the_same(mesh, trained):
    """A mesh against one device, one iteration in BF16 and NVFP4.

    The gradient is compared, not the step: where an element of it is next to nothing, Adam makes as
    much of its rounding.
    """
    name, experiment, _, ((state, _, ledger, _), _) = trained
    split = build(name, experiment.backbone.pipeline.folder, *mesh)
    leaves = jax.tree.leaves(split.backbone.transformer)
    local = sum(x.addressable_shards[0].data.nbytes for x in leaves)
    # In networks as small as these, half of the bytes are in arrays too small to be divided.
    divided = 0.5 * (1 - 1 / split.backbone.mesh.shape["fsdp"])
    assert local < (1 - divided) * sum(x.nbytes for x in leaves)
    got, outcome = iterate(split, fresh_state(split), 1)
    np.testing.assert_array_equal(outcome.ledger["kept"], ledger["kept"])
    np.testing.assert_allclose(
        outcome.ledger["proxy_reward"], ledger["proxy_reward"], atol=REWARD_TOLERANCE
    )
    assert np.ptp(ledger["proxy_reward"]) > 100 * REWARD_TOLERANCE

    def moments(state):
        return jax.tree.leaves(optax.tree.get(state.opt_state, "mu"))

    def norm(arrays):
        return np.sqrt(sum(np.sum(np.square(x)) for x in arrays))

    difference = norm(
        [x - y for x, y in zip(jax.device_get(moments(got)), moments(state), strict=True)]
    )
    assert difference < GRADIENT_TOLERANCE * norm(moments(state))


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["diffusionnft", "naive_scaling", "naive_quant"])
@pytest.mark.parametrize("name", SAVE)
def test_every_other_family_trains_it(name, family, tmp_path):
    SAVE[name](tmp_path)
    steps = (
        "rollout.explore.num_steps=3"  # those of the whole schedule, since nothing is made again
    )
    pool = ("rollout.kept=4",) if family == "diffusionnft" else ()
    experiment = build(name, tmp_path, f"family={family}", steps, *pool)
    state, outcome = iterate(experiment, fresh_state(experiment), 1)
    assert outcome.ledger["precision"] == ("nvfp4" if family == "naive_quant" else "bf16")
    assert np.isfinite(outcome.metrics["loss"])
    assert outcome.metrics["grad_norm"] > 0
    learned = {path for path, ab in state.adapters.items() if np.any(jax.device_get(ab["b"]))}
    assert learned == RECIPES[name][1] - UNREAD[name]
