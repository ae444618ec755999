"""Parameters that are trained in full: which they are, where they go, and an update against PyTorch in float64."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from solrl_jax.backbone.locate import open_model
from solrl_jax.config.presets import resolve
from solrl_jax.config.values import ConfigError
from solrl_jax.explore.sync import Quantizer, merged
from solrl_jax.numerics.formats import FORMATS
from solrl_jax.numerics.matmul import LowRank, dequantize
from solrl_jax.numerics.randomness import normal, permutations
from solrl_jax.parallel.sharding import make_mesh
from solrl_jax.policy.lora import Targets, attach, find_targets, flatten
from solrl_jax.policy.remat import held
from solrl_jax.policy.state import init_state
from solrl_jax.policy.update import blend, update
from solrl_jax.storage.errors import InputError
from solrl_jax.training import room
from tests.policy.test_update import CONFIG, MESHES, ROWS, SHAPE, SLOTS, STEPS, TOLERANCE, batch_of, norm
from tests.toys import KERNELS, toy_backbone, toy_grid

BLOCK, OUT = KERNELS
TARGETS = {"all": Targets((), KERNELS), "one beside an adapter": Targets((BLOCK,), (OUT,))}


@pytest.fixture(scope="module")
def transformer():
    return open_model("embedded:tiny-sana").transformer


def targets_of(transformer, parameters):
    return find_targets(transformer, resolve("tiny", [f"train.parameters={parameters}"]))


def test_what_is_trained_is_what_the_configuration_names(transformer):
    every, lora = flatten(transformer.abstract("float32")), targets_of(transformer, "adapters")
    assert lora.whole == ()
    assert len(lora.adapted) == 8
    assert targets_of(transformer, "all") == Targets((), tuple(sorted(every)))
    some = targets_of(transformer, "transformer_blocks/(attn1/to_[qk]/kernel|scale_shift_table)")
    q, k = (f"transformer_blocks/attn1/to_{x}/kernel" for x in "qk")
    assert some.whole == (k, q, "transformer_blocks/scale_shift_table")
    assert set(some.adapted) == set(lora.adapted) - {q, k}  # never both


def test_a_pattern_that_matches_nothing_is_refused_with_what_there_is(transformer):
    said = "train.parameters: 'blocks/attn' matches no parameter; there are caption_norm/scale, caption_projection/"
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        targets_of(transformer, "blocks/attn")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("value", "said"),
    [("", "must not be empty"), ("'a(b'", "must be a regular expression"), ("7", "expected text")],
)
def test_a_value_that_is_no_pattern_is_refused(value, said):
    with pytest.raises(ConfigError, match=rf"^train.parameters=.*: {said}"):
        resolve("tiny", [f"train.parameters={value}"])


def test_an_old_policy_that_bf16_could_not_move_is_refused():
    slow = ("train.parameters=all", "policy.decay_type=2")
    with pytest.raises(ConfigError, match=r"policy.decay_type=2: must be 0 or 1, or rollout.precision=fp32, where param"):
        resolve("tiny", slow)
    assert resolve("tiny", (*slow, "rollout.precision=fp32")).policy.decay_type == 2
    assert resolve("tiny", slow[1:]).train.parameters == "adapters"


def test_what_no_device_holds_is_refused_before_anything_is_loaded(transformer, monkeypatch):
    """Six float32 copies divided over two devices, and a gradient: 16 bytes a parameter."""
    pipeline, config = open_model("embedded:tiny-sana"), resolve("tiny", ["train.parameters=all", "mesh.fsdp=2"])
    targets, least = find_targets(transformer, config), 16 * transformer.size
    monkeypatch.setattr(room, "device_memory", lambda: least)
    room.refuse_what_cannot_fit(config, pipeline, targets)
    monkeypatch.setattr(room, "device_memory", lambda: least - 1)
    with pytest.raises(
        InputError, match=r"^train.parameters=all: 0.00\d+ billion parameters in full take .* GB of a device, which"
    ):
        room.refuse_what_cannot_fit(config, pipeline, targets)


def test_auto_counts_what_is_trained_in_full(transformer):
    config = resolve("tiny", ["train.parameters=all", "optimizer.micro_batch=1"])
    one, two = (held(config, open_model("embedded:tiny-sana"), make_mesh(1, n)) for n in (1, 2))
    assert one - two == (2 + 4 * 4) * transformer.size / 2  # the base in BF16, and four float32 copies


def fresh(backbone, targets, config=CONFIG):
    return init_state(jax.random.key(0), backbone.transformer, targets, config.lora, config.optimizer, backbone.mesh)


def test_masters_are_float32_and_the_old_policy_has_the_bases_dtype():
    backbone = toy_backbone(dtype="bfloat16")
    state, base = fresh(backbone, TARGETS["one beside an adapter"]), flatten(backbone.transformer)
    for tree, dtype in ((state.adapters, "float32"), (state.ema, "float32"), (state.old, "bfloat16")):
        assert tree.keys() == {BLOCK, OUT}
        assert tree[BLOCK].keys() == {"a", "b"}
        assert (tree[OUT].dtype, tree[BLOCK]["a"].dtype) == (dtype, "float32")
        np.testing.assert_array_equal(tree[OUT], base[OUT])
    policy = flatten(attach(backbone.transformer, state.adapters, 2.0))
    assert isinstance(policy[BLOCK], LowRank)
    assert policy[OUT].dtype == jnp.bfloat16


def test_a_copy_in_bf16_follows_in_float32_and_is_rounded_once():
    kept, new = jnp.asarray([1.0, 3.0], jnp.bfloat16), jnp.asarray([1 + 2**-7, 3.01], jnp.float32)
    got = blend({"w": kept}, {"w": new}, jnp.float32(0.25))["w"]
    want = (0.25 * np.asarray(kept, np.float64) + 0.75 * np.asarray(new, np.float64)).astype(jnp.bfloat16)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, want)


def test_exploration_quantises_the_arrays_that_are_trained_and_reads_them_elsewhere():
    backbone, form = toy_backbone(), FORMATS["nvfp4"]
    own = {path: leaf + 0.5 for path, leaf in flatten(backbone.transformer).items()}
    policy = flatten(merged(backbone, own, 2.0, (BLOCK,), Quantizer(form.quantize)))
    np.testing.assert_array_equal(dequantize(policy[BLOCK]), dequantize(jax.jit(form.quantize)(own[BLOCK])))
    np.testing.assert_array_equal(policy[OUT], own[OUT])


def torch_update(backbone, trained, old, batch, targets):
    """One step in PyTorch, float64: DiffusionNFT's loss by its formula, autograd, the clip, AdamW. -> trained, loss, norm"""
    import torch

    t = lambda x: torch.tensor(np.array(x, np.float64))
    tree = lambda own: {p: {k: t(v) for k, v in ab.items()} if isinstance(ab, dict) else t(ab) for p, ab in own.items()}
    base, lora, rule, adam = flatten(backbone.transformer), CONFIG.lora, CONFIG.policy, CONFIG.optimizer
    text, grid = t(batch.conditioning["text"])[np.asarray(batch.prompt)], toy_grid(STEPS)
    weight = lambda own, p: t(base[p]) + lora.alpha / lora.rank * own["a"] @ own["b"] if isinstance(own, dict) else own
    own, kept = tree(trained), tree(old)
    leaves = [x for p in targets.adapted + targets.whole for x in (own[p].values() if isinstance(own[p], dict) else [own[p]])]
    for leaf in leaves:
        leaf.requires_grad_()
    along = lambda x: x[:, None, None, None]
    visited, losses = np.asarray(permutations(batch.seeds, "sigmas", STEPS)), []
    for slot in range(SLOTS):
        sigma, time = (along(t(np.asarray(x)[visited[:, slot]])) for x in (grid.sigmas, grid.times))
        x0, noise = t(batch.latents), t(normal(batch.seeds, "training", SHAPE, jnp.full(ROWS, slot)))
        x = (1 - sigma) * x0 + sigma * noise
        hidden = lambda w, x=x, time=time: torch.tanh(x @ w + text[:, None, None] + time / 1000)
        of = lambda w, v, f=hidden: f(w) @ v
        v, v_old, v_ref = (of(*(weight(q[p], p) for p in KERNELS)) for q in (own, kept, tree({p: base[p] for p in KERNELS})))

        def matching(u, x=x, x0=x0, sigma=sigma):
            error = x - sigma * u - x0
            return error.square().mean((1, 2, 3)) / error.abs().mean((1, 2, 3)).clamp(min=1e-5).detach()

        q, b = t(batch.optimality), rule.beta
        pull = q * matching(b * v + (1 - b) * v_old) + (1 - q) * matching((1 + b) * v_old - b * v)
        losses.append(rule.advantage_clip * pull / b + rule.kl_weight * (v - v_ref).square().mean((1, 2, 3)))
    loss = torch.stack(losses).mean()
    loss.backward()
    length = torch.nn.utils.clip_grad_norm_(leaves, adam.max_grad_norm)
    torch.optim.AdamW(leaves, adam.learning_rate, (adam.beta1, adam.beta2), adam.eps, weight_decay=adam.weight_decay).step()
    numbers = jax.tree.map(lambda x: x.detach().numpy(), own)
    return numbers, loss.item(), length.item()


def started(backbone, targets):
    """A state whose three policies differ from the base and from each other."""
    state = fresh(backbone, targets)
    noise = lambda tree, seed: jax.tree.map(
        lambda x: x + 0.3 * np.random.default_rng(seed).standard_normal(x.shape).astype(np.float32), tree
    )
    return dataclasses.replace(state, adapters=noise(state.adapters, 1), old=noise(state.old, 2), ema=noise(state.ema, 3))


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("which", TARGETS)
def test_an_update_is_that_of_pytorch_in_float64(which, mesh):
    """On one device and on meshes; micro-batches that do not come out even."""
    backbone, targets = toy_backbone(*MESHES[mesh]), TARGETS[which]
    start, batch = started(backbone, targets), batch_of(backbone)
    before, old, ema = jax.device_get((start.adapters, start.old, start.ema))
    want, loss, length = torch_update(backbone, before, old, batch, targets)
    config = dataclasses.replace(CONFIG, optimizer=dataclasses.replace(CONFIG.optimizer, micro_batch=4))
    with jax.set_mesh(backbone.mesh):
        state, metrics = update(backbone, config, start, backbone.transformer, batch, toy_grid(STEPS))
    state, metrics = jax.device_get((state, metrics))
    assert length > 2 * CONFIG.optimizer.max_grad_norm  # the clip counts
    assert metrics["loss"] == pytest.approx(loss, rel=TOLERANCE)
    assert metrics["grad_norm"] == pytest.approx(length, rel=TOLERANCE)
    apart = lambda a, b: norm(jax.tree.map(lambda x, y: np.asarray(x, np.float64) - y, a, b))
    assert apart(state.adapters, want) < 1e-4 * apart(before, want)  # of the step that AdamW took
    follow = lambda kept, decay: jax.tree.map(lambda k, n: decay * k + (1 - decay) * n, kept, want)
    assert apart(state.ema, follow(ema, 2 / 11)) < TOLERANCE * norm(ema)
    assert apart(state.old, follow(old, 0.001)) < TOLERANCE * norm(old)
    assert jax.tree.leaves(optax.tree.get(state.opt_state, "mu"))[0].dtype == np.float32
