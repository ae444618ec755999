"""The model on the mesh: how it is found, where its parameters lie, and that where they lie changes
nothing (to 1e-5).
"""

import dataclasses
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from solrl_jax.config.presets import resolve
from solrl_jax.errors import InputError
from solrl_jax.models.autoencoders.tiling import decode_tiled
from solrl_jax.models.backbone import load_backbone
from solrl_jax.models.loading import weights
from solrl_jax.models.locate import EMBEDDED_FOLDER, find_model, pipeline_files
from solrl_jax.models.registry import open_pipeline
from solrl_jax.parallel import sharding
from solrl_jax.rl.generate import decode_chunk
from tests.cases import first_is_quick
from tests.parity import relative
from tests.pipelines import CHANNELS, KL_CHANNELS, MAX_TOKENS, save_flux_pipeline, save_pipeline

TOLERANCE = 1e-5  # largest difference over largest value
PROMPTS = ["a red star", "one happy cat left of the green triangle", ""]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_pipeline(folder)
    return folder


@pytest.fixture(scope="module")
def backbones(folder):
    """The same model on one device and on eight, in two groups of which each splits the parameters
    in four.
    """
    meshes = sharding.make_mesh(1, 1), sharding.make_mesh(2, 4)
    return [load_backbone(str(folder), "fp32", mesh) for mesh in meshes]


def test_a_model_is_an_embedded_one_or_a_directory(tmp_path):
    assert find_model("embedded:tiny-sana") == EMBEDDED_FOLDER / "tiny-sana"
    (tmp_path / "model_index.json").touch()
    assert find_model(str(tmp_path)) == tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    "index", sorted(EMBEDDED_FOLDER.glob("*/model_index.json")), ids=lambda index: index.parent.name
)
def test_an_embedded_pipeline_is_whole_and_has_its_config(index):
    config = resolve("tiny", (f"model={index.parent.name}",))
    assert config.model.path == f"embedded:{index.parent.name}"
    pipeline = open_pipeline(find_model(config.model.path))
    for component in (pipeline.transformer, pipeline.vae, *pipeline.text_encoders.values()):
        component.check_files()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (
            "embedded:huge",
            "model.path='embedded:huge': no such embedded pipeline; accepted: tiny-flux, tiny-sana,"
            " tiny-sd3, tiny-wan",
        ),
        (
            "nowhere",
            "model.path='nowhere': no such directory, and not the name OWNER/NAME of a Hub"
            " repository",
        ),
        ("./nowhere", "model.path='./nowhere': no such directory"),
        ("/no/where", "model.path='/no/where': no such directory"),
        ("no/where/else", "model.path='no/where/else': no such directory"),
        (
            "owner/model",
            "model.path='owner/model': cannot be downloaded from the Hub (HF_HUB_OFFLINE is set): ",
        ),
    ],
)
def test_a_model_that_is_not_there_is_one_line_that_says_what_was_tried(
    path, message, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as error:
        find_model(path)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "dtype"), first_is_quick([("fp32", jnp.float32), ("bf16", jnp.bfloat16)])
)
def test_every_parameter_has_the_dtype_of_the_precision(precision, dtype, folder):
    backbone = load_backbone(str(folder), precision, sharding.make_mesh(1, 1))
    parts = (backbone.transformer, backbone.text_encoders.load_params(), backbone.decoder.params)
    assert {leaf.dtype for leaf in jax.tree.leaves(parts)} == {jnp.dtype(dtype)}
    assert backbone.dtype == dtype


@pytest.mark.parametrize("decoding", first_is_quick([jnp.float32, jnp.bfloat16]))
def test_pictures_are_decoded_in_what_is_asked_for(decoding, folder):
    backbone = load_backbone(
        str(folder), "bf16", sharding.make_mesh(1, 1), decoding=jnp.dtype(decoding)
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(backbone.decoder.params)} == {
        jnp.dtype(decoding)
    }
    assert backbone.decoder.dtype == decoding
    assert {leaf.dtype for leaf in jax.tree.leaves(backbone.transformer)} == {
        jnp.dtype(jnp.bfloat16)
    }


def test_large_parameters_are_split_over_fsdp_and_small_ones_are_whole(backbones):
    _, split = backbones
    block = split.transformer["transformer_blocks"]
    large = block["ff"]["conv_inverted"]["kernel"]
    small = split.transformer["proj_out"]["bias"]
    assert large.sharding.mesh == split.mesh
    assert len(large.addressable_shards) == 8
    assert {shard.data.size for shard in large.addressable_shards} == {large.size // 4}
    assert small.sharding.is_fully_replicated
    for leaf in jax.tree.leaves(
        (split.transformer, split.text_encoders.load_params(), split.decoder.params)
    ):
        parts = leaf.size // leaf.addressable_shards[0].data.size
        assert parts == (4 if leaf.size >= sharding.SMALLEST_SHARDED else 1), leaf.shape


@pytest.mark.slow
def test_each_parameter_is_placed_as_it_is_read(folder, monkeypatch, backbones):
    """No array of a component is whole on one device first; each lies where `parameter_sharding`
    says.
    """
    monkeypatch.setattr(weights, "CHUNK_BYTES", 4096)
    whole, split = backbones
    monkeypatch.setattr(weights, "device_put", one_device_only(jax.device_put))
    loaded = load_backbone(str(folder), "fp32", split.mesh)
    trees = [
        (b.transformer, b.text_encoders.load_params(), b.decoder.params)
        for b in (whole, split, loaded)
    ]
    assert jax.tree.map(lambda x: x.sharding, trees[2]) == sharding.parameter_sharding(
        split.mesh, trees[2]
    )
    for (path, one), two, three in zip(
        jax.tree_util.tree_leaves_with_path(trees[0]), *map(jax.tree.leaves, trees[1:]), strict=True
    ):
        np.testing.assert_array_equal(one, two, err_msg=jax.tree_util.keystr(path))
        np.testing.assert_array_equal(one, three, err_msg=jax.tree_util.keystr(path))


def one_device_only(device_put):
    def put(x, device):
        assert isinstance(x, np.ndarray)
        assert isinstance(device, jax.Device)
        return device_put(x, device)

    return put


def test_every_component_is_checked_before_the_first_is_loaded(folder, tmp_path, monkeypatch):
    shutil.copytree(folder, tmp_path / "model")
    vae = tmp_path / "model" / "vae" / "diffusion_pytorch_model.safetensors"
    save_file(load_file(vae) | {"stranger": np.zeros(3, np.float32)}, vae)
    monkeypatch.setattr(weights, "load_parameter", lambda *_: pytest.fail("a parameter was placed"))
    with pytest.raises(
        InputError, match=r"vae: 1 tensor\(s\) do not fit the network: unexpected stranger \(3,\)$"
    ):
        load_backbone(str(tmp_path / "model"), "fp32", sharding.make_mesh(1, 1))


SHARDS = ["model.bf16-00001-of-00002.safetensors", "model.bf16-00002-of-00002.safetensors"]
BESIDE = [  # what released repositories hold beside a pipeline
    "README.md",
    ".gitattributes",
    "flux1-dev.safetensors",
    "ae.safetensors",
    "text_encoders/t5xxl_fp16.safetensors",
    "transformer/diffusion_pytorch_model.fp16.safetensors",
    "transformer/diffusion_pytorch_model.bin",
    "vae/diffusion_pytorch_model.safetensors.index.fp16.json",
    "vae/diffusion_pytorch_model.fp16-00001-of-00001.safetensors",
    "text_encoder/pytorch_model.bin.index.json",
    "text_encoder/pytorch_model-00001-of-00001.bin",
    "vae/flax_model.msgpack",
    "onnx/vae/config.json",
    "onnx/vae/model.safetensors",
    "sd3.5_large.safetensors",
    "example.json",
]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def repository(folder, tmp_path_factory):
    """A pipeline as it lies on the hub, its text encoder only as shards of a variant; and the files
    that are of it.
    """
    root = tmp_path_factory.mktemp("repository")
    shutil.copytree(folder, root, dirs_exist_ok=True)
    text = root / "text_encoder"
    tensors = load_file(text / "model.safetensors")
    place = {name: SHARDS[i % 2] for i, name in enumerate(tensors)}
    for file in SHARDS:
        save_file({n: t for n, t in tensors.items() if place[n] == file}, text / file)
    (text / "model.safetensors").unlink()
    (text / "model.safetensors.index.bf16.json").write_text(json.dumps({"weight_map": place}))
    names = sorted(str(f.relative_to(root)) for f in root.rglob("*") if f.is_file())
    for name in BESIDE:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("not of the pipeline")
    return root, names


def test_of_a_repository_only_the_pipeline_is_wanted(repository):
    root, names = repository
    files = [str(f.relative_to(root)) for f in root.rglob("*") if f.is_file()]
    assert len(files) == len(names) + len(BESIDE)
    assert pipeline_files(files) == names
    tokenizer = [
        f"tokenizer_2/{name}"
        for name in ("merges.txt", "spiece.model", "tokenizer_config.json", "vocab.json")
    ]
    assert pipeline_files([*files, *tokenizer]) == sorted([*names, *tokenizer])


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the hub as its client asks of it to download a snapshot of `owner/model`."""

    root = None

    def do_GET(self):
        path = self.path.split("?")[0]
        if path.startswith("/api/models/owner/model/tree/"):
            files = [f for f in self.root.rglob("*") if f.is_file()]
            tree = [
                {
                    "type": "file",
                    "path": str(f.relative_to(self.root)),
                    "size": f.stat().st_size,
                    "oid": f"{i:040x}",
                }
                for i, f in enumerate(files)
            ]
            self.answer(json.dumps(tree).encode())
        elif path.startswith("/api/models/owner/model"):
            self.answer(
                json.dumps(
                    {"_id": "0", "id": "owner/model", "modelId": "owner/model", "sha": COMMIT}
                ).encode()
            )
        elif path.startswith(prefix := f"/owner/model/resolve/{COMMIT}/"):
            name = path.removeprefix(prefix)
            self.answer(
                (self.root / name).read_bytes(),
                ETag=f'"{hash(name) % 2**64:040x}"',
                **{"X-Repo-Commit": COMMIT},
            )
        else:
            self.send_error(404)

    do_HEAD = do_GET

    def answer(self, body, **headers):
        self.send_response(200)
        for key, value in {
            "Content-Length": len(body),
            "Content-Type": "application/json",
            **headers,
        }.items():
            self.send_header(key, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.mark.slow
def test_a_name_of_the_hub_is_downloaded_and_afterwards_found_offline(
    repository, backbones, tmp_path, monkeypatch
):
    root, names = repository
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), type("OurHub", (Hub,), {"root": root})
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:  # in a process of its own: the client reads its environment once
        online = {
            "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
            "HF_HUB_OFFLINE": "0",
            "NO_PROXY": "127.0.0.1",
        }
        code = "from solrl_jax.models.locate import find_model; print(find_model('owner/model'))"
        environment = (
            os.environ | online | {"HF_HUB_CACHE": str(tmp_path), "HF_HOME": str(tmp_path / "home")}
        )
        process = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True
        )
    finally:
        server.shutdown()
        server.server_close()
    assert process.returncode == 0, process.stderr
    snapshot = tmp_path / "models--owner--model" / "snapshots" / COMMIT
    assert process.stdout.strip() == str(snapshot)
    assert sorted(str(f.relative_to(snapshot)) for f in snapshot.rglob("*") if f.is_file()) == names
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    loaded = load_backbone("owner/model", "fp32", sharding.make_mesh(1, 1))
    assert loaded.pipeline.folder == snapshot
    got, want = (b.text_encoders.load_params()["text_encoder"] for b in (loaded, backbones[0]))
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), got, want))


@pytest.mark.slow
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
            velocity = jax.jit(backbone.velocity)(
                backbone.transformer, x, conditioning, np.float32(700), np.float32(1)
            )
            images = decode_chunk(backbone.decoder, x)
        results.append(
            [np.asarray(x) for x in (encoded["text"], encoded["mask"], velocity, images)]
        )
    (text, mask, velocity, images), (text_split, mask_split, velocity_split, images_split) = results
    print(
        relative(text_split[mask], text[mask]),
        relative(velocity_split, velocity),
        relative(images_split, images),
    )
    np.testing.assert_array_equal(mask, mask_split)
    assert relative(text_split[mask], text[mask]) < TOLERANCE
    assert relative(velocity_split, velocity) < TOLERANCE
    assert relative(images_split, images) < TOLERANCE
    assert images.shape == (8, 16, 24, 3)
    assert np.abs(velocity[0] - velocity[3]).max() > 0.1  # rows differ: none is another's copy


@pytest.mark.slow
def test_the_time_may_be_one_for_all_or_one_a_row(backbones):
    backbone, _ = backbones
    latent = np.ones((2, 4, 6, CHANNELS), np.float32)
    conditioning = jax.tree.map(lambda c: c[:2], backbone.encode(PROMPTS, MAX_TOKENS))
    run = jax.jit(backbone.velocity)
    one = run(backbone.transformer, latent, conditioning, np.float32(700), np.float32(1))
    each = run(
        backbone.transformer, latent, conditioning, np.array([700, 300], np.float32), np.float32(1)
    )
    assert relative(each[0], one[0]) < TOLERANCE
    assert relative(each[1], one[1]) > 20 * TOLERANCE


@pytest.mark.exhaustive
def test_an_image_decoded_in_tiles_is_much_like_the_whole_and_needs_much_less_memory(tmp_path):
    save_flux_pipeline(tmp_path)
    whole = load_backbone(str(tmp_path), "fp32", sharding.make_mesh(1, 1))
    latents = np.random.default_rng(0).standard_normal((2, 32, 32, KL_CHANNELS)).astype(np.float32)
    plain = whole.decoder
    tiled = dataclasses.replace(plain, tile=32)
    wide = dataclasses.replace(plain, tile=64)

    def temporary(decoder):
        latent = jax.ShapeDtypeStruct(
            (1, 128, 128, KL_CHANNELS), jnp.float32
        )  # of 256 pixels a side
        return decode_chunk.lower(decoder, latent).compile().memory_analysis().temp_size_in_bytes

    with jax.set_mesh(whole.mesh):
        one, other = (np.asarray(decode_chunk(decoder, latents)) for decoder in (plain, tiled))
        want = jax.jit(
            lambda vae, z: decode_tiled(partial(whole.pipeline.decode, vae), z, 16, 4, 2)
        )(plain.params, latents)
        needed = temporary(plain)
        needed_tiled = temporary(wide)
    np.testing.assert_allclose(other, want, atol=1e-6)
    difference = np.abs(other - one).mean()
    another = np.abs(one[0] - one[1]).mean()
    print(
        f"{difference:.3f}, between two images {another:.3f};"
        f" {needed / 1e6:.0f} MB, in tiles {needed_tiled / 1e6:.0f} MB"
    )
    # not equal: the norms and the attention of a tile see the tile alone
    assert 1e-4 < difference < another / 8
    assert needed_tiled < needed / 8


@pytest.mark.parametrize("tile", [2, 10, 33])
def test_tiles_are_whole_latents(tile, folder):
    with pytest.raises(
        InputError,
        match=rf"^model.vae_tile_size={tile}: must be null or a multiple of 4,"
        " the pixels per latent pixel$",
    ):
        load_backbone(str(folder), "fp32", sharding.make_mesh(1, 1), tile=tile)


def test_rows_are_padded_with_the_first():
    rows = np.arange(6).reshape(3, 2)
    np.testing.assert_array_equal(
        sharding.pad_rows(rows, 5), [[0, 1], [2, 3], [4, 5], [0, 1], [0, 1]]
    )
    assert sharding.pad_rows(rows, 3) is rows
