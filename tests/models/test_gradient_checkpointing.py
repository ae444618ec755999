"""Gradient checkpointing changes what the backward pass keeps, never what it computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import print_saved_residuals

from solrl_jax.models.flux.transformer import FluxConfig, FluxTransformer2DModel
from solrl_jax.models.flux2.transformer import Flux2Config, Flux2Transformer2DModel
from solrl_jax.models.layers.norm import rms_norm
from solrl_jax.models.layers.stack import CHECKPOINT_POLICIES, scan_blocks, stack
from solrl_jax.models.sana.transformer import SanaConfig, SanaTransformer2DModel
from solrl_jax.models.sd3.transformer import SD3Config, SD3Transformer2DModel
from solrl_jax.quant.matmul import matmul
from tests.cases import first_is_quick

TOLERANCE = 1e-6  # of the largest gradient: other fusions, the same sums
ROWS = 4
LAYERS = 6
TIME = np.linspace(100.0, 900.0, ROWS, dtype=np.float32)


def draw(*shape):
    return np.random.default_rng(sum(shape)).standard_normal((ROWS, *shape)).astype(np.float32)


FLUX = FluxConfig(
    in_channels=16,
    num_layers=LAYERS,
    num_single_layers=LAYERS,
    attention_head_dim=16,
    num_attention_heads=2,
    joint_attention_dim=12,
    pooled_projection_dim=10,
    axes_dims_rope=(4, 6, 6),
)
FLUX2 = Flux2Config(
    in_channels=4,
    num_layers=LAYERS,
    num_single_layers=LAYERS,
    attention_head_dim=16,
    num_attention_heads=2,
    joint_attention_dim=12,
    axes_dims_rope=(4, 4, 4, 4),
    guidance_embeds=False,
)
SD3 = SD3Config(
    in_channels=4,
    out_channels=4,
    num_layers=LAYERS,
    attention_head_dim=16,
    num_attention_heads=2,
    joint_attention_dim=12,
    caption_projection_dim=32,
    pooled_projection_dim=10,
    pos_embed_max_size=16,
    sample_size=16,
)
SANA = SanaConfig(
    in_channels=4,
    out_channels=4,
    num_attention_heads=4,
    attention_head_dim=8,
    num_layers=LAYERS,
    num_cross_attention_heads=2,
    cross_attention_head_dim=16,
    cross_attention_dim=32,
    caption_channels=12,
    sample_size=16,
)
NETWORKS = {
    "sd3": (
        lambda gradient_checkpointing, r: SD3Transformer2DModel(
            SD3, gradient_checkpointing=gradient_checkpointing, rngs=r
        ),
        (draw(7, 12), draw(10), TIME),
    ),
    "flux": (
        lambda gradient_checkpointing, r: FluxTransformer2DModel(
            FLUX, gradient_checkpointing=gradient_checkpointing, rngs=r
        ),
        (draw(7, 12), draw(10), TIME),
    ),
    "flux2": (
        lambda gradient_checkpointing, r: Flux2Transformer2DModel(
            FLUX2, gradient_checkpointing=gradient_checkpointing, rngs=r
        ),
        (draw(7, 12), TIME),
    ),
    "sana": (
        lambda gradient_checkpointing, r: SanaTransformer2DModel(
            SANA, gradient_checkpointing=gradient_checkpointing, rngs=r
        ),
        (draw(7, 12), np.ones((ROWS, 7), bool), TIME),
    ),
}


WIDTH = 32


class Block(nnx.Module):
    """Two matmuls with a function between them that a gradient needs the input of."""

    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Param(jax.random.normal(rngs(), (WIDTH, 2 * WIDTH)) / WIDTH)
        self.down = nnx.Param(jax.random.normal(rngs(), (2 * WIDTH, WIDTH)) / WIDTH)

    def __call__(self, x):
        return x + matmul(jax.nn.gelu(matmul(x, self.up[...])), self.down[...])


@pytest.mark.slow
def test_a_further_block_keeps_its_input_and_what_is_not_computed_again():
    """By the memory of compiled gradients of six and of two blocks, in float32."""

    def needed(gradient_checkpointing, blocks):
        graphdef, params = nnx.split(stack(blocks, lambda r: Block(r), nnx.Rngs(0)))

        def loss(x, params):
            return scan_blocks(
                nnx.merge(graphdef, params),
                lambda block, x: block(x),
                x,
                gradient_checkpointing=gradient_checkpointing,
            ).sum()

        compiled = jax.jit(jax.grad(loss)).lower(draw(64, WIDTH), params).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    an_input = 4 * ROWS * 64 * WIDTH
    further = {
        gradient_checkpointing: (
            needed(gradient_checkpointing, 6) - needed(gradient_checkpointing, 2)
        )
        / 4
        / an_input
        for gradient_checkpointing in CHECKPOINT_POLICIES
    }
    assert further["blocks"] == pytest.approx(1, abs=0.1)
    # the output of the first matmul, which is twice as wide
    assert further["matmuls"] == pytest.approx(2, abs=0.1)
    assert further["none"] > 4


@pytest.mark.parametrize("name", first_is_quick(NETWORKS))
@pytest.mark.exhaustive
def test_gradients_are_the_same_and_take_less_memory(name):
    make = NETWORKS[name][0]
    conditions = jax.tree.map(jnp.asarray, NETWORKS[name][1])
    gradients = {}
    memory = {}
    for gradient_checkpointing in CHECKPOINT_POLICIES:
        graphdef, params = nnx.split(make(gradient_checkpointing, nnx.Rngs(0)))
        # every parameter counts, those that start at zero too
        params = jax.tree.map(
            lambda p: p + 0.1 * jax.random.normal(jax.random.key(p.size), p.shape), params
        )

        def loss(params, x, g=graphdef):
            return jnp.square(nnx.merge(g, params)(x, *conditions)).mean()

        compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(params, draw(16, 16, 4)).compile()
        memory[gradient_checkpointing] = compiled.memory_analysis().temp_size_in_bytes
        gradients[gradient_checkpointing] = jax.device_get(
            jax.tree.leaves(compiled(params, draw(16, 16, 4)))
        )
    for gradient_checkpointing in ("matmuls", "blocks"):
        for got, want in zip(gradients[gradient_checkpointing], gradients["none"], strict=True):
            assert np.abs(got - want).max() <= TOLERANCE * max(
                np.abs(g).max() for g in gradients["none"]
            )
    assert max(np.abs(g).max() for g in gradients["none"]) > 1e-3
    assert memory["blocks"] < memory["matmuls"] < memory["none"], memory
    assert memory["blocks"] < 0.6 * memory["none"], memory


def test_sums_of_squares_are_kept_only_where_asked_and_change_no_gradient(capsys):
    x = jnp.asarray(draw(3, 8))
    weight = jnp.linspace(0.5, 2.0, 8)

    def norm(keep):
        return jax.checkpoint(
            lambda x: (rms_norm(x, weight, 1e-6, save_squares=keep) ** 3).sum(),
            policy=CHECKPOINT_POLICIES["matmuls"],
            prevent_cse=False,
        )

    np.testing.assert_allclose(jax.grad(norm(True))(x), jax.grad(norm(False))(x), rtol=TOLERANCE)
    for keep in (True, False):
        print_saved_residuals(norm(keep), x)
        assert capsys.readouterr().out.count(f"f32[{ROWS},3,1] ") == keep
