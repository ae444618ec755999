"""The model on the mesh: how it is found, where its parameters lie, and that where they lie changes nothing (to 1e-5)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from solrl_jax import sharding
from solrl_jax.backbone import EMBEDDED_FOLDER, find_model, load_backbone, pad_rows
from solrl_jax.files import InputError
from tests.pipelines import CHANNELS, MAX_TOKENS, save_pipeline

TOLERANCE = 1e-5  # largest difference over largest value
PROMPTS = ["a red star", "one happy cat left of the green triangle", ""]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_pipeline(folder)
    return folder


@pytest.fixture(scope="module")
def backbones(folder):
    """The same model on one device and on eight, in two groups of which each splits the parameters in four."""
    meshes = sharding.make_mesh(1, 1), sharding.make_mesh(2, 4)
    return [load_backbone(str(folder), "fp32", mesh) for mesh in meshes]


def test_a_model_is_an_embedded_one_or_a_directory(tmp_path):
    assert find_model("embedded:tiny-sana") == EMBEDDED_FOLDER / "tiny-sana"
    assert find_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("embedded:huge", "model.path='embedded:huge': no such embedded pipeline; there are tiny-sana"),
        ("nowhere", "model.path='nowhere': no such directory (and not of the form OWNER/NAME of a hub)"),
        ("./nowhere", "model.path='./nowhere': no such directory"),
        ("/no/where", "model.path='/no/where': no such directory"),
        ("no/where/else", "model.path='no/where/else': no such directory"),
        ("owner/model", "model.path='owner/model': cannot be had from the hub (HF_HUB_OFFLINE is set): "),
    ],
)
def test_a_model_that_is_not_there_is_one_line_that_says_what_was_tried(path, message, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as error:
        find_model(path)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", jnp.float32), ("bf16", jnp.bfloat16)])
def test_every_parameter_has_the_dtype_of_the_precision(precision, dtype, folder):
    backbone = load_backbone(str(folder), precision, sharding.make_mesh(1, 1))
    parts = (backbone.transformer, backbone.text_encoder, backbone.vae)
    assert {leaf.dtype for leaf in jax.tree.leaves(parts)} == {jnp.dtype(dtype)}
    assert backbone.dtype == dtype


def test_large_parameters_are_split_over_fsdp_and_small_ones_are_whole(backbones):
    _, split = backbones
    block = split.transformer["transformer_blocks"]
    large, small = block["ff"]["conv_inverted"]["kernel"], split.transformer["proj_out"]["bias"]
    assert large.sharding.mesh == split.mesh
    assert len(large.addressable_shards) == 8
    assert {shard.data.size for shard in large.addressable_shards} == {large.size // 4}
    assert small.sharding.is_fully_replicated
    for leaf in jax.tree.leaves((split.transformer, split.text_encoder, split.vae)):
        parts = leaf.size // leaf.addressable_shards[0].data.size
        assert parts == (4 if leaf.size >= sharding.SMALLEST_SHARDED else 1), leaf.shape


def relative(ours, theirs) -> float:
    return float(np.abs(np.asarray(ours) - np.asarray(theirs)).max() / np.abs(np.asarray(theirs)).max())


def test_velocity_and_images_do_not_depend_on_the_mesh(backbones):
    rng = np.random.default_rng(0)
    latent = rng.standard_normal((8, 4, 6, CHANNELS)).astype(np.float32)
    rows = np.array([0, 1, 2, 0, 1, 2, 0, 1])
    results = []
    for backbone in backbones:
        encoded = backbone.encode(PROMPTS, MAX_TOKENS)
        of_rows = {name: np.asarray(c)[rows] for name, c in encoded.items()}
        x, conditioning = jax.device_put((latent, of_rows), sharding.rows(backbone.mesh))
        with jax.set_mesh(backbone.mesh):
            velocity = jax.jit(backbone.velocity)(backbone.transformer, x, conditioning, np.float32(700), np.float32(1))
            images = jax.jit(backbone.decode)(backbone.vae, x)
        results.append([np.asarray(x) for x in (encoded["text"], encoded["mask"], velocity, images)])
    (text, mask, velocity, images), (text_split, mask_split, velocity_split, images_split) = results
    print(relative(text_split[mask], text[mask]), relative(velocity_split, velocity), relative(images_split, images))
    np.testing.assert_array_equal(mask, mask_split)
    assert relative(text_split[mask], text[mask]) < TOLERANCE
    assert relative(velocity_split, velocity) < TOLERANCE
    assert relative(images_split, images) < TOLERANCE
    assert images.shape == (8, 16, 24, 3)
    assert np.abs(velocity[0] - velocity[3]).max() > 0.1  # rows differ: none is another's copy


def test_the_time_may_be_one_for_all_or_one_a_row(backbones):
    backbone, _ = backbones
    latent = np.ones((2, 4, 6, CHANNELS), np.float32)
    conditioning = jax.tree.map(lambda c: c[:2], backbone.encode(PROMPTS, MAX_TOKENS))
    run = jax.jit(backbone.velocity)
    one = run(backbone.transformer, latent, conditioning, np.float32(700), np.float32(1))
    each = run(backbone.transformer, latent, conditioning, np.array([700, 300], np.float32), np.float32(1))
    assert relative(each[0], one[0]) < TOLERANCE
    assert relative(each[1], one[1]) > 20 * TOLERANCE


def test_rows_are_padded_with_the_first():
    rows = np.arange(6).reshape(3, 2)
    np.testing.assert_array_equal(pad_rows(rows, 5), [[0, 1], [2, 3], [4, 5], [0, 1], [0, 1]])
    assert pad_rows(rows, 3) is rows
