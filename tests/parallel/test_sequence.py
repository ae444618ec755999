"""Sequence parallelism: networks whose tokens are sharded over devices, against one device; on
eight CPU devices.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from solrl_jax.config.values import ConfigError
from solrl_jax.errors import InputError
from solrl_jax.models.flux.transformer import FluxConfig, FluxTransformer2DModel
from solrl_jax.models.flux2.transformer import Flux2Config, Flux2Transformer2DModel
from solrl_jax.models.layers.attention import attention
from solrl_jax.models.qwen_image.transformer import QwenImageConfig, QwenImageTransformer2DModel
from solrl_jax.models.sana.transformer import SanaConfig, SanaTransformer2DModel
from solrl_jax.models.sd3.transformer import SD3Config, SD3Transformer2DModel
from solrl_jax.models.wan.transformer import WanConfig, WanTransformer3DModel
from solrl_jax.models.zimage.transformer import ZImageConfig, ZImageTransformer2DModel
from solrl_jax.parallel import sharding
from solrl_jax.quant.sequence_parallel import gather_tokens, shard_tokens
from solrl_jax.rl import experiment as experiments
from tests.small import small_config

SAMPLES = 4
TEXT = 4  # tokens
# In float32, relative to the norm. In matmuls as small as these, XLA chooses kernels by shape.
TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-4
MESH = sharding.make_mesh(2, 1, 2, 2)
HEADS = dict(num_attention_heads=2, attention_head_dim=16)
ROPE = dict(axes_dims_rope=(4, 6, 6))
POOLED = dict(pooled_projection_dim=8, joint_attention_dim=12)
# class, configuration, shape of a latent, names of the inputs after the latent
NETWORKS = {
    "wan": (
        WanTransformer3DModel,
        WanConfig(in_channels=4, out_channels=4, text_dim=12, ffn_dim=40, num_layers=3, **HEADS),
        (3, 4, 8, 4),
        ("text", "timestep"),
    ),
    "sana": (
        SanaTransformer2DModel,
        SanaConfig(
            in_channels=4,
            out_channels=4,
            num_layers=3,
            num_cross_attention_heads=2,
            cross_attention_head_dim=16,
            cross_attention_dim=32,
            caption_channels=12,
            **HEADS,
        ),
        (4, 6, 4),
        ("text", "mask", "timestep"),
    ),
    "flux": (
        FluxTransformer2DModel,
        FluxConfig(
            in_channels=16,
            num_layers=2,
            num_single_layers=2,
            guidance_embeds=False,
            **HEADS,
            **ROPE,
            **POOLED,
        ),
        (8, 8, 4),
        ("text", "pooled", "timestep"),
    ),
    "flux2": (
        Flux2Transformer2DModel,
        Flux2Config(
            in_channels=8,
            num_layers=1,
            num_single_layers=2,
            joint_attention_dim=12,
            axes_dims_rope=(4, 4, 4, 4),
            guidance_embeds=False,
            **HEADS,
        ),
        (4, 4, 8),
        ("text", "timestep"),
    ),
    "sd3": (
        SD3Transformer2DModel,
        SD3Config(
            in_channels=4,
            out_channels=4,
            num_layers=3,
            sample_size=16,
            pos_embed_max_size=8,
            caption_projection_dim=32,
            dual_attention_layers=(0,),
            **HEADS,
            **POOLED,
        ),
        (8, 8, 4),
        ("text", "pooled", "timestep"),
    ),
    "qwen-image": (
        QwenImageTransformer2DModel,
        QwenImageConfig(
            in_channels=16, out_channels=4, num_layers=2, joint_attention_dim=12, **HEADS, **ROPE
        ),
        (8, 8, 4),
        ("text", "mask", "timestep"),
    ),
    "zimage": (
        ZImageTransformer2DModel,
        ZImageConfig(
            in_channels=4,
            dim=32,
            n_layers=2,
            n_refiner_layers=1,
            n_heads=2,
            n_kv_heads=2,
            cap_feat_dim=12,
            axes_dims=(4, 6, 6),
            axes_lens=(128, 64, 64),
        ),
        (8, 8, 4),
        ("text", "mask", "timestep"),
    ),
}


def inputs(shape, names):
    rng = np.random.default_rng(1)
    arrays = {
        "latent": rng.standard_normal((SAMPLES, *shape)),
        "text": rng.standard_normal((SAMPLES, TEXT, 12)),
        "pooled": rng.standard_normal((SAMPLES, 8)),
        "timestep": rng.uniform(0, 1000, SAMPLES),
    }
    arrays = {name: x.astype(np.float32) for name, x in arrays.items()}
    arrays["mask"] = np.arange(TEXT) < np.array([[4], [1], [3], [2]])
    return [arrays[name] for name in ("latent", *names)]


@functools.cache
def network(name):
    kind, config, shape, names = NETWORKS[name]
    model = kind(config, gradient_checkpointing="matmuls", rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(model)
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: jnp.asarray(x + 0.3 * rng.standard_normal(x.shape).astype(np.float32)), params
    )
    return graphdef, params, inputs(shape, names)


def value_and_gradient(graphdef, params, *arrays):
    def loss(params):
        out = nnx.merge(graphdef, params)(*arrays)
        return (out**2).mean(), out

    (_, out), gradient = jax.value_and_grad(loss, has_aux=True)(params)
    return out, gradient


def velocity(graphdef, params, *arrays):
    return nnx.merge(graphdef, params)(*arrays)


def compiled(f, name, mesh):
    graphdef, params, arrays = network(name)
    arrays = jax.device_put(arrays, sharding.rows(mesh))
    params = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
    with jax.set_mesh(mesh):
        program = sharding.jit(functools.partial(f, graphdef))
        return program.lower(params, *arrays).compile(), (params, *arrays)


def difference(got, expected):
    """The norm of the difference over the norm, of all arrays together.

    Some gradients, such as those of biases of keys, are zero but for rounding.
    """

    def norm(tree):
        return np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(tree)))

    return norm(jax.tree.map(np.subtract, got, expected)) / norm(expected)


ONE = sharding.make_mesh(1, 1, devices=jax.devices()[:1])


@pytest.mark.slow
def test_tokens_stay_sharded_and_attention_alone_gathers_them():
    """Wan, with all four axes of the mesh and two samples per group of devices."""
    one, arguments = compiled(velocity, "wan", ONE)
    expected = jax.device_get(one(*arguments))
    program, arguments = compiled(velocity, "wan", MESH)
    assert difference(jax.device_get(program(*arguments)), expected) < TOLERANCE
    text = program.as_text()
    shapes = set(re.findall(r"f32\[([\d,]+)\]", text))
    assert "2,12,40" in shapes  # the MLP of the tokens of one device, half of 24
    assert "2,24,40" not in shapes
    # Along `sequence`, the blocks gather the keys and values of attention, and nothing else.
    along = r"replica_groups=\{\{0,2\},\{1,3\},\{4,6\},\{5,7\}\}"
    collectives = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    matches = re.findall(rf"= f32\[([\d,]+)\]\S* ({collectives})\(.*{along}", text)
    assert set(matches) == {("2,24,2,16", "all-gather")}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_has_the_same_value_and_gradient(name):
    one, arguments = compiled(value_and_gradient, name, ONE)
    expected, expected_gradient = jax.device_get(one(*arguments))
    program, arguments = compiled(value_and_gradient, name, MESH)
    got, gradient = jax.device_get(program(*arguments))
    assert difference(got, expected) < TOLERANCE
    assert difference(gradient, expected_gradient) < GRADIENT_TOLERANCE


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("mesh.sequence=3",), "mesh.sequence=3: must divide the 8 rows of tokens"),
        pytest.param(
            ("mesh.sequence=2", "model.attention=mhla"),
            "model.attention=mhla: not available with",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_tokens_that_cannot_be_sharded_are_refused(overrides, message):
    with pytest.raises(InputError, match=f"^images of 32 x 32 pixels .*: {message}"):
        experiments.build(small_config("unused", *overrides))


BATCH = 4
LENGTH = 24
WIDTH = 24  # three heads


def attend_twice(w, x, text):
    """Attention among tokens, then to a text of which each sample reads another number of
    tokens.
    """

    def run(shared, x, *_):
        w, text = shared

        def heads(y):
            return y.reshape(*y.shape[:2], 3, -1)

        q, k, v = (heads(x @ w[i]) for i in range(3))
        x = x + attention(q, gather_tokens(k), gather_tokens(v)).reshape(x.shape)
        k, v = (heads(text @ w[i]) for i in (1, 2))
        lengths = jnp.array([5, 3, 1, 2], jnp.int32)
        return x + attention(heads(x @ w[0]), k, v, lengths).reshape(x.shape), None

    return shard_tokens(run, (w, text), x)[0]


def attend_jointly(w, x, text):
    """Attention among tokens and a text that every device computes, twice, as in the two-stream
    blocks of FLUX.
    """

    def run(w, x, _, text):
        for _ in range(2):
            length = text.shape[1]
            joined = jnp.concatenate([text, x], axis=1)
            q, k, v = ((joined @ w[i]).reshape(*joined.shape[:2], 3, -1) for i in range(3))
            out = attention(q, gather_tokens(k, start=length), gather_tokens(v, start=length))
            text, x = jnp.split(joined + out.reshape(joined.shape), [length], axis=1)
        return x, text

    x, text = shard_tokens(run, w, x, text=text)
    return jnp.concatenate([text, x], axis=1)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [8, 3])
def test_attention_and_its_gradient_are_the_same_to_the_bit_in_bf16(devices):
    """On eight devices; twelve pairs of a sample and a head do not divide among them. And on three,
    by which a division rounds.
    """
    got, reference = on_one_and_more(attend_twice, LENGTH, devices)
    for y, expected in zip(got, reference, strict=True):
        np.testing.assert_array_equal(y, expected)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [8, 3])
def test_the_gradient_of_a_text_stream_is_rounded_as_on_one_device(devices):
    """The twelve pairs do not divide among eight devices, so the queries of some are repeated, and
    XLA sums matmuls of other shapes in another order. Only few elements may round differently.
    """
    got, reference = on_one_and_more(attend_jointly, 5 + LENGTH, devices)
    for y, expected in zip(got, reference, strict=True):
        y, expected = (np.asarray(a, np.float32) for a in (y, expected))
        assert np.mean(y != expected) < 0.02
        assert difference(y, expected) < 1e-3


def on_one_and_more(f, length, devices):
    """The value and gradients of `f(w, x, text)` in BF16, on several devices and on one.

    `length` is the number of tokens of the value.
    """
    rng = np.random.default_rng(0)
    shapes = ((3, WIDTH, WIDTH), (BATCH, LENGTH, WIDTH), (BATCH, 5, WIDTH), (BATCH, length, WIDTH))
    w, x, text, g = (jnp.asarray(rng.standard_normal(s) / 2, jnp.bfloat16) for s in shapes)

    @sharding.jit
    def pulled(x, text):
        out, vjp = jax.vjp(functools.partial(f, w), x, text)
        return out, *vjp(g)

    reference = jax.device_get(pulled(x, text))
    mesh = sharding.make_mesh(1, 1, 1, devices, devices=jax.devices()[:devices])
    with jax.set_mesh(mesh):
        got = jax.device_get(pulled(*jax.device_put((x, text), sharding.replicated(mesh))))
    return got, reference


def test_whole_parameters_are_not_trained_in_bf16():
    with pytest.raises(ConfigError, match=r"^mesh\.sequence=2: must be 1 where whole"):
        small_config("unused", "mesh.sequence=2", "train.parameters=all")
