"""Parameters that are trained in full: which they are, where they go, and an update against PyTorch
in float64.
"""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from solrl_jax.config.presets import resolve
from solrl_jax.config.values import ConfigError
from solrl_jax.diffusion.seeds import normal, permutations
from solrl_jax.errors import InputError
from solrl_jax.models.backbone import load_backbone
from solrl_jax.models.locate import open_model
from solrl_jax.parallel.sharding import make_mesh
from solrl_jax.quant.formats import FORMATS
from solrl_jax.quant.matmul import LowRank, dequantize
from solrl_jax.rl import memory_check
from solrl_jax.rl.explore.sync import Quantizer, sync_policy
from solrl_jax.rl.gradient_checkpointing import saved_residual_bytes
from solrl_jax.rl.state import init_state
from solrl_jax.rl.trainable.trainable import TrainedPaths, attach, find_trained_paths, flatten
from solrl_jax.rl.update import blend, update
from solrl_jax.runs import generation
from solrl_jax.runs.directory import load_policy, read_target
from solrl_jax.runs.identity import write_config
from tests import states
from tests.rl.test_update import (
    CONFIG,
    MESHES,
    ROWS,
    SHAPE,
    SLOTS,
    STEPS,
    TOLERANCE,
    batch_of,
    norm,
)
from tests.small import small_config
from tests.toys import KERNELS, toy_backbone, toy_grid

BLOCK, OUT = KERNELS
TARGETS = {
    "all": TrainedPaths((), KERNELS),
    "one beside an adapter": TrainedPaths((BLOCK,), (OUT,)),
}


@pytest.fixture(scope="module")
def transformer():
    return open_model("embedded:tiny-sana").transformer


def targets_of(transformer, parameters):
    return find_trained_paths(transformer, resolve("tiny", [f"train.parameters={parameters}"]))


def test_what_is_trained_is_what_the_configuration_names(transformer):
    every = flatten(transformer.abstract_params("float32"))
    lora = targets_of(transformer, "adapters")
    assert lora.whole == ()
    assert len(lora.adapted) == 8
    assert targets_of(transformer, "all") == TrainedPaths((), tuple(sorted(every)))
    some = targets_of(transformer, "transformer_blocks/(attn1/to_[qk]/kernel|scale_shift_table)")
    q, k = (f"transformer_blocks/attn1/to_{x}/kernel" for x in "qk")
    assert some.whole == (k, q, "transformer_blocks/scale_shift_table")
    assert set(some.adapted) == set(lora.adapted) - {q, k}  # never both


def test_a_pattern_that_matches_nothing_is_refused_with_what_there_is(transformer):
    message = (
        "train.parameters: 'blocks/attn' matches no parameter; there are caption_norm/scale, "
        "caption_projection/"
    )
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        targets_of(transformer, "blocks/attn")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("value", "message"),
    [("", "must not be empty"), ("'a(b'", "must be a regular expression"), ("7", "expected text")],
)
def test_a_value_that_is_no_pattern_is_refused(value, message):
    with pytest.raises(ConfigError, match=rf"^train.parameters=.*: {message}"):
        resolve("tiny", [f"train.parameters={value}"])


def test_an_old_policy_that_bf16_could_not_move_is_refused():
    slow = ("train.parameters=all", "algorithm.decay_type=2")
    with pytest.raises(
        ConfigError,
        match=r"algorithm.decay_type=2: must be 0, 1 or 3, or rollout.precision=fp32, "
        r"where whole param",
    ):
        resolve("tiny", slow)
    assert resolve("tiny", (*slow, "rollout.precision=fp32")).algorithm.decay_type == 2
    assert resolve("tiny", slow[1:]).train.parameters == "adapters"


def test_what_no_device_holds_is_refused_before_anything_is_loaded(transformer, monkeypatch):
    """Six float32 copies divided over two devices, and a gradient: 16 bytes a parameter."""
    pipeline = open_model("embedded:tiny-sana")
    config = resolve("tiny", ["train.parameters=all", "mesh.fsdp=2"])
    targets = find_trained_paths(transformer, config)
    least = 16 * transformer.num_parameters
    monkeypatch.setattr(memory_check, "device_memory", lambda: least)
    memory_check.check_memory(config, pipeline, targets, 2)
    monkeypatch.setattr(memory_check, "device_memory", lambda: least - 1)
    with pytest.raises(
        InputError,
        match=r"^train.parameters=all: 0.00\d+ billion parameters in full take .* GB of a device, "
        r"which",
    ):
        memory_check.check_memory(config, pipeline, targets, 2)


def test_a_batch_of_images_is_what_a_device_generates_at_once(monkeypatch):
    """Sixteen candidates are two per device on eight devices, whatever the configured size is."""
    pipeline = open_model("embedded:tiny-sana")
    config = small_config("unused", "rollout.per_device_batch_size=100", "lora.rank=1")
    image = 3 * 4 * 32 * 32
    monkeypatch.setattr(memory_check, "device_memory", lambda: 2 * image)
    memory_check.check_memory(config, pipeline, TrainedPaths(()), 8)
    with pytest.raises(
        InputError,
        match=r"^rollout.per_device_batch_size=100: takes .* and a device .*; at most 2 fit",
    ):
        memory_check.check_memory(config, pipeline, TrainedPaths(()), 4)


def test_latents_must_fit_into_the_smallest_host(monkeypatch):
    pipeline = open_model("embedded:tiny-sana")
    small = [f"eval.{name}=1" for name in ("num_images_per_prompt", "num_prompts")]
    config = small_config(
        "unused", "rollout.candidates=8", "rollout.kept=4", "eval.num_grid_images=0", *small
    )
    candidate = config.train.num_prompts * 4 * math.prod(pipeline.latent_shape(32, 32))
    monkeypatch.setattr(memory_check, "device_memory", lambda: 10**12)
    other = [8 * candidate]
    monkeypatch.setattr(memory_check.hosts, "gather_values", lambda value: [value, *other])
    memory_check.check_memory(config, pipeline, TrainedPaths(()), 1)
    other[0] -= 1
    with pytest.raises(InputError, match=r"^rollout.candidates=8: .* and a host has .*; at most 7"):
        memory_check.check_memory(config, pipeline, TrainedPaths(()), 1)


@pytest.mark.parametrize(("objective", "latents"), [("nft", 1), ("flow_grpo", 4), ("refl", 4)])
def test_every_device_holds_the_samples_that_are_trained_on(objective, latents, monkeypatch):
    """Two prompts with four samples each. Two of three steps are recorded, which is three states;
    a gradient of the reward is taken at one state, and is a target.
    """
    pipeline = open_model("embedded:tiny-sana")
    settings = ("rollout.per_device_batch_size=1", "reward=tiny-clip", "reward.eval_only=[shapes]")
    config = small_config("unused", f"objective={objective}", *settings)
    least = 8 * latents * 4 * math.prod(pipeline.latent_shape(32, 32))
    least = max(least, 3 * 4 * 32 * 32)  # of one image
    monkeypatch.setattr(memory_check, "device_memory", lambda: least)
    memory_check.check_memory(config, pipeline, TrainedPaths(()), 1)
    if latents > 1:
        monkeypatch.setattr(memory_check, "device_memory", lambda: least - 1)
        with pytest.raises(
            InputError, match=r"^rollout.kept=4: takes .* and a device .*; at most 3 fit"
        ):
            memory_check.check_memory(config, pipeline, TrainedPaths(()), 1)


@pytest.mark.slow
def test_auto_counts_what_is_trained_in_full(transformer):
    config = resolve("tiny", ["train.parameters=all", "optimizer.per_device_batch_size=1"])
    one, two = (
        saved_residual_bytes(config, open_model("embedded:tiny-sana"), make_mesh(1, n))
        for n in (1, 2)
    )
    assert (
        one - two == (2 + 4 * 4) * transformer.num_parameters / 2
    )  # the base in BF16, and four float32 copies


def fresh(backbone, targets, config=CONFIG):
    return init_state(
        jax.random.key(0),
        backbone.transformer,
        targets,
        config.lora,
        config.optimizer,
        backbone.mesh,
    )


def test_masters_are_float32_and_the_old_policy_has_the_bases_dtype():
    backbone = toy_backbone(dtype="bfloat16")
    state = fresh(backbone, TARGETS["one beside an adapter"])
    base = flatten(backbone.transformer)
    for tree, dtype in (
        (state.adapters, "float32"),
        (state.ema, "float32"),
        (state.old, "bfloat16"),
    ):
        assert tree.keys() == {BLOCK, OUT}
        assert tree[BLOCK].keys() == {"a", "b"}
        assert (tree[OUT].dtype, tree[BLOCK]["a"].dtype) == (dtype, "float32")
        np.testing.assert_array_equal(tree[OUT], base[OUT])
    policy = flatten(attach(backbone.transformer, state.adapters, 2.0))
    assert isinstance(policy[BLOCK], LowRank)
    assert policy[OUT].dtype == jnp.bfloat16


def untrained_run(folder, precision):
    """A run directory with `train.parameters=all` and a checkpoint before the first step.

    Returns:
        The configuration, and the EMA in the checkpoint.
    """
    overrides = ("train.parameters=all", f"rollout.precision={precision}")
    config = small_config(folder, *overrides)
    write_config(folder, config)
    backbone = load_backbone(config.model.path, precision, make_mesh(1, 1))
    state = fresh(backbone, find_trained_paths(backbone.pipeline.transformer, config), config)
    states.save(folder / "checkpoints", 1, state, {})
    return config, state.ema


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [("bf16", "fp32"), pytest.param("fp32", "bf16", marks=pytest.mark.exhaustive)],
)
def test_a_policy_is_loaded_in_another_precision_than_it_was_trained_in(tmp_path, saved, loaded):
    _, ema = untrained_run(tmp_path, saved)
    # as `solrl eval RUN rollout.precision=...` gives it
    config, run = read_target(str(tmp_path), (f"rollout.precision={loaded}",), None, trust=True)
    backbone = load_backbone(config.model.path, loaded, make_mesh(1, 1))
    policy, iteration = load_policy(run, config, backbone)
    assert iteration == 1
    jax.tree.map(np.testing.assert_array_equal, policy, ema)
    weights = flatten(attach(backbone.transformer, policy, 1.0))
    assert {leaf.dtype for leaf in weights.values()} == {backbone.dtype}


@pytest.mark.exhaustive
def test_a_run_that_trains_all_in_bf16_generates_in_float32(tmp_path):
    untrained_run(tmp_path, "bf16")
    request = generation.Request(model=str(tmp_path), prompts=("a red circle",), precision="fp32")
    images = generation.generate_images(request).images
    assert np.isfinite(images).all()
    assert images.std() > 0.01


def test_a_copy_in_bf16_follows_in_float32_and_is_rounded_once():
    kept = jnp.asarray([1.0, 3.0], jnp.bfloat16)
    new = jnp.asarray([1 + 2**-7, 3.01], jnp.float32)
    got = blend({"w": kept}, {"w": new}, jnp.float32(0.25))["w"]
    want = (0.25 * np.asarray(kept, np.float64) + 0.75 * np.asarray(new, np.float64)).astype(
        jnp.bfloat16
    )
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, want)


@pytest.mark.slow
def test_exploration_quantizes_the_arrays_that_are_trained_and_reads_them_elsewhere():
    backbone = toy_backbone()
    form = FORMATS["nvfp4"]
    parameters = {path: leaf + 0.5 for path, leaf in flatten(backbone.transformer).items()}
    policy = flatten(sync_policy(backbone, parameters, 2.0, (BLOCK,), Quantizer(form.quantize)))
    np.testing.assert_array_equal(
        dequantize(policy[BLOCK]), dequantize(jax.jit(form.quantize)(parameters[BLOCK]))
    )
    np.testing.assert_array_equal(policy[OUT], parameters[OUT])


def torch_update(backbone, trained, old, batch, targets):
    """One step in PyTorch, float64: DiffusionNFT's loss by its formula, autograd, the clip, AdamW.
    -> trained, loss, norm
    """
    import torch

    def t(x):
        return torch.tensor(np.array(x, np.float64))

    def tree(parameters):
        return {
            p: {k: t(v) for k, v in ab.items()} if isinstance(ab, dict) else t(ab)
            for p, ab in parameters.items()
        }

    base = flatten(backbone.transformer)
    lora = CONFIG.lora
    rule = CONFIG.algorithm
    adam = CONFIG.optimizer
    text = t(batch.conditioning["text"])[np.asarray(batch.prompt)]
    grid = toy_grid(STEPS)

    def weight(value, p):
        return (
            t(base[p]) + lora.alpha / lora.rank * value["a"] @ value["b"]
            if isinstance(value, dict)
            else value
        )

    policy = tree(trained)
    kept = tree(old)
    leaves = [
        x
        for p in targets.adapted + targets.whole
        for x in (policy[p].values() if isinstance(policy[p], dict) else [policy[p]])
    ]
    for leaf in leaves:
        leaf.requires_grad_()

    def along(x):
        return x[:, None, None, None]

    visited = np.asarray(permutations(batch.seeds, "sigmas", STEPS))
    losses = []
    for slot in range(SLOTS):
        sigma, time = (
            along(t(np.asarray(x)[visited[:, slot]])) for x in (grid.sigmas, grid.timesteps)
        )
        x0 = t(batch.latents)
        noise = t(normal(batch.seeds, "training", SHAPE, jnp.full(ROWS, slot)))
        x = (1 - sigma) * x0 + sigma * noise

        def hidden(w, x=x, time=time):
            return torch.tanh(x @ w + text[:, None, None] + time / 1000)

        def of(w, v, f=hidden):
            return f(w) @ v

        v, v_old, v_ref = (
            of(*(weight(q[p], p) for p in KERNELS))
            for q in (policy, kept, tree({p: base[p] for p in KERNELS}))
        )

        def matching(u, x=x, x0=x0, sigma=sigma):
            error = x - sigma * u - x0
            return (
                error.square().mean((1, 2, 3))
                / error.abs().mean((1, 2, 3)).clamp(min=1e-5).detach()
            )

        q = t(batch.optimality)
        b = rule.beta
        pull = q * matching(b * v + (1 - b) * v_old) + (1 - q) * matching((1 + b) * v_old - b * v)
        losses.append(
            rule.adv_clip_max * pull / b + rule.kl_coef * (v - v_ref).square().mean((1, 2, 3))
        )
    loss = torch.stack(losses).mean()
    loss.backward()
    length = torch.nn.utils.clip_grad_norm_(leaves, adam.max_grad_norm)
    torch.optim.AdamW(
        leaves,
        adam.learning_rate,
        (adam.beta1, adam.beta2),
        adam.eps,
        weight_decay=adam.weight_decay,
    ).step()
    numbers = jax.tree.map(lambda x: x.detach().numpy(), policy)
    return numbers, loss.item(), length.item()


def started(backbone, targets):
    """A state whose three policies differ from the base and from each other."""
    state = fresh(backbone, targets)

    def noise(tree, seed):
        return jax.tree.map(
            lambda x: (
                x + 0.3 * np.random.default_rng(seed).standard_normal(x.shape).astype(np.float32)
            ),
            tree,
        )

    return dataclasses.replace(
        state, adapters=noise(state.adapters, 1), old=noise(state.old, 2), ema=noise(state.ema, 3)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("which", "mesh"),
    [
        ("all", "one"),
        ("one beside an adapter", "data=2 tensor=2"),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (
                ("all", "data=2 fsdp=2"),
                ("all", "data=2 tensor=2"),
                ("one beside an adapter", "one"),
                ("one beside an adapter", "data=2 fsdp=2"),
            )
        ),
    ],
)
def test_an_update_is_that_of_pytorch_in_float64(which, mesh):
    """On one device and on meshes; micro-batches that do not come out even."""
    backbone = toy_backbone(*MESHES[mesh])
    targets = TARGETS[which]
    start = started(backbone, targets)
    batch = batch_of(backbone)
    before, old, ema = jax.device_get((start.adapters, start.old, start.ema))
    want, loss, length = torch_update(backbone, before, old, batch, targets)
    config = dataclasses.replace(
        CONFIG, optimizer=dataclasses.replace(CONFIG.optimizer, per_device_batch_size=4)
    )
    with jax.set_mesh(backbone.mesh):
        state, metrics = update(
            backbone, config, start, backbone.transformer, batch, toy_grid(STEPS)
        )
    state, metrics = jax.device_get((state, metrics))
    assert length > 2 * CONFIG.optimizer.max_grad_norm  # the clip counts
    assert metrics["loss"] == pytest.approx(loss, rel=TOLERANCE)
    assert metrics["grad_norm"] == pytest.approx(length, rel=TOLERANCE)

    def apart(a, b):
        return norm(jax.tree.map(lambda x, y: np.asarray(x, np.float64) - y, a, b))

    assert apart(state.adapters, want) < 1e-4 * apart(before, want)  # of the step that AdamW took

    def follow(kept, decay):
        return jax.tree.map(lambda k, n: decay * k + (1 - decay) * n, kept, want)

    assert apart(state.ema, follow(ema, 2 / 11)) < TOLERANCE * norm(ema)
    assert apart(state.old, follow(old, 0.001)) < TOLERANCE * norm(old)
    assert jax.tree.leaves(optax.tree.get(state.opt_state, "mu"))[0].dtype == np.float32
