"""What the update computes again: never a change of the gradient, and `auto` is what fits into a
device's memory.
"""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from solrl_jax.config.batch import effective_batch
from solrl_jax.config.presets import resolve
from solrl_jax.errors import InputError
from solrl_jax.models.layers.stack import CHECKPOINT_POLICIES
from solrl_jax.models.locate import open_model
from solrl_jax.parallel.sharding import make_mesh
from solrl_jax.quant.matmul import LowRank, dequantize
from solrl_jax.rl.experiment import build
from solrl_jax.rl.gradient_checkpointing import SHARE, open_for_training, saved_residual_bytes
from solrl_jax.rl.objective import TrainingTarget, Velocities
from solrl_jax.rl.objectives.nft import nft_loss
from solrl_jax.rl.trainable.trainable import attach, init_adapters, match_kernels
from tests.small import small_config

TOLERANCE = 1e-5  # of the norm of a gradient; float32
ROWS = 2
SCALE = 2.0
CONFIG = resolve(
    "tiny", ("model=tiny-flux", "rollout.precision=fp32", "model.gradient_checkpointing=auto")
)
MESH = make_mesh(1, 1)
open_flux = cache(partial(open_model, CONFIG.model.path))


def gradient(gradient_checkpointing, policy_of=lambda policy: policy):
    """Of the objective, with respect to the adapters of tiny-flux."""
    pipeline = open_flux(gradient_checkpointing)
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    base = pipeline.transformer.load(jnp.float32)
    fresh = init_adapters(
        jax.random.key(0),
        base,
        match_kernels(base, CONFIG.lora.target_modules, "lora.target_modules"),
        4,
    )
    trained, old = (jax.tree.map(lambda x: draw(*x.shape) / x.shape[-2], fresh) for _ in range(2))
    shapes = jax.eval_shape(pipeline.encode_text, *encoder_arguments(pipeline))
    text = {name: draw(ROWS, *shape.shape[1:]) for name, shape in shapes.items()}
    shape = pipeline.latent_shape(CONFIG.model.height, CONFIG.model.width)
    x0 = draw(ROWS, *shape)
    noise = draw(ROWS, *shape)
    sigma = jnp.asarray([0.3, 0.8])
    x = x0 + sigma[:, None, None, None] * (noise - x0)

    def loss(adapters):
        def velocity(params):
            return pipeline.velocity(params, x, text, 1000 * sigma, jnp.float32(1))

        policies = [policy_of(attach(base, of, SCALE)) for of in (adapters, old)]
        velocities = Velocities(*map(velocity, policies), velocity(base))
        target = TrainingTarget(x, x0, sigma, jnp.asarray([0.9, 0.2]))
        return nft_loss(velocities, target, beta=0.1, kl_coef=0.1, adv_clip_max=5.0)[0].sum()

    return jax.device_get(jax.jit(jax.grad(loss))(trained))


def encoder_arguments(pipeline):
    params = {
        name: part.abstract_params(jnp.float32) for name, part in pipeline.text_encoders.items()
    }
    return params, pipeline.tokenize([""] * ROWS, CONFIG.model.max_sequence_length)


@cache
def dense_gradient():
    """By JAX alone, through whole matrices: no gradient of ours, nothing computed again."""

    def whole(policy):
        return jax.tree.map(
            lambda x: dequantize(x) if isinstance(x, LowRank) else x,
            policy,
            is_leaf=lambda x: isinstance(x, LowRank),
        )

    return gradient("none", whole)


@pytest.mark.exhaustive
@pytest.mark.parametrize("gradient_checkpointing", CHECKPOINT_POLICIES)
def test_the_gradient_of_an_adapted_network_is_that_of_whole_matrices(gradient_checkpointing):
    def norm(tree):
        return np.sqrt(sum(np.square(x, dtype=np.float64).sum() for x in jax.tree.leaves(tree)))

    got = gradient(gradient_checkpointing)
    want = dense_gradient()
    for path, of in want.items():
        for factor, values in of.items():
            assert norm(values) > 1e-6 * norm(want)
            assert norm(got[path][factor] - values) < TOLERANCE * norm(values) + 1e-7 * norm(
                want
            ), (path, factor)


@pytest.mark.slow
def test_auto_keeps_products_where_they_fit():
    none, products, blocks = (
        saved_residual_bytes(CONFIG, open_flux(gradient_checkpointing), MESH)
        for gradient_checkpointing in ("none", "matmuls", "blocks")
    )
    assert none > 1.2 * products > 1.2 * blocks

    def chosen(memory):
        return open_for_training(CONFIG, MESH, memory, open_flux).gradient_checkpointing

    assert [chosen((products + change) / SHARE) for change in (none, 1, -1)] == [
        "matmuls",
        "matmuls",
        "blocks",
    ]


def test_auto_refuses_targets_that_match_nothing_as_other_settings_do():
    config = resolve(
        "tiny",
        (
            "model=tiny-flux",
            "model.gradient_checkpointing=auto",
            "lora.target_modules=[blocks/nothing]",
        ),
    )
    with pytest.raises(InputError, match=r"lora\.target_modules: 'blocks/nothing' matches no"):
        open_for_training(config, MESH, 1e9, open_flux)


@pytest.mark.exhaustive
def test_what_is_kept_grows_with_the_micro_batch_and_the_base_is_divided_over_fsdp():
    def of(*overrides, mesh=MESH):
        return saved_residual_bytes(
            resolve("tiny", ("model=tiny-flux", "rollout.precision=fp32", *overrides)),
            open_flux("blocks"),
            mesh,
        )

    one, two, three = (of(f"optimizer.per_device_batch_size={n}") for n in (1, 2, 3))
    assert two - one == three - two > 0
    all_terms = effective_batch(CONFIG, 1)[
        "terms_per_step_per_device"
    ]  # a micro-batch has no more, whatever it is said to have
    assert of("optimizer.per_device_batch_size=2147483647") == of(
        f"optimizer.per_device_batch_size={all_terms}"
    )
    base = 4 * open_flux("blocks").transformer.num_parameters
    assert base < one < 1.5 * base
    assert (
        of("optimizer.per_device_batch_size=1")
        - of("optimizer.per_device_batch_size=1", mesh=make_mesh(1, 2))
        == base / 2
    )


@pytest.mark.slow
def test_a_run_resolves_auto_and_takes_other_settings_as_they_are():
    assert (
        build(
            small_config("unused", "model.gradient_checkpointing=auto")
        ).backbone.pipeline.gradient_checkpointing
        == "matmuls"
    )  # tiny fits anywhere
    assert (
        build(
            small_config("unused", "model.gradient_checkpointing=blocks")
        ).backbone.pipeline.gradient_checkpointing
        == "blocks"
    )
