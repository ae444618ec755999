"""Weight files: every layout against PyTorch's own layers, every way a component is stored, and
what is said of bad ones.
"""

import io
import json
import re
from typing import ClassVar

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from pretrain import networks
from pretrain.networks import save_component, to_torch
from safetensors.numpy import load_file, save_file

from solrl_jax.errors import RunError
from solrl_jax.models.layers.conv import Conv, DepthwiseConv
from solrl_jax.models.layers.embeddings import Embedding
from solrl_jax.models.layers.linear import Linear
from solrl_jax.models.layers.norm import RMSNorm
from solrl_jax.models.layers.parameter import param
from solrl_jax.models.layers.stack import stack
from solrl_jax.models.loading import tensor_files, weights
from solrl_jax.models.loading.tensor_files import weight_files, without_variants
from solrl_jax.models.loading.weights import load_tensors, locate_tensors, parameter_table
from tests.cases import first_is_quick
from tests.parity import from_torch, parameter_count

FILE = "model.safetensors"


class Ours(nnx.Module):
    """A parameter of every layout: 0-d, vectors, matrices, convolutions, and some of them
    stacked.
    """

    def __init__(self, rngs):
        self.temperature = param(jnp.zeros(()), "temperature")
        self.norm = RMSNorm(5, eps=1e-6)
        self.linear = Linear(3, 4, rngs=rngs)
        self.pointwise = Linear(3, 4, layout="pointwise", bias=False, rngs=rngs)
        self.conv = Conv(2, 6, 3, rngs=rngs)
        self.depthwise = DepthwiseConv(6, 5, bias=False, rngs=rngs)
        self.blocks = stack(
            3,
            lambda r: nnx.Dict(
                first=Linear(3, 4, rngs=r), inner=nnx.Dict(conv=Conv(2, 6, 3, rngs=r))
            ),
            rngs,
        )


class Theirs(torch.nn.Module):
    def __init__(self):
        super().__init__()

        def conv():
            return torch.nn.Conv2d(2, 6, 3, padding=1)

        def block():
            return {"first": torch.nn.Linear(3, 4), "inner": torch.nn.ModuleDict({"conv": conv()})}

        self.temperature = torch.nn.Parameter(torch.tensor(0.0))
        self.norm = torch.nn.RMSNorm(5)
        self.linear = torch.nn.Linear(3, 4)
        self.pointwise = torch.nn.Conv2d(3, 4, 1, bias=False)
        self.conv = conv()
        self.depthwise = torch.nn.Conv2d(6, 6, 5, padding=2, groups=6, bias=False)
        self.blocks = torch.nn.ModuleList([torch.nn.ModuleDict(block()) for _ in range(3)])
        torch.manual_seed(0)
        for p in self.parameters():
            p.requires_grad_(False).normal_()


@pytest.fixture(scope="module")
def theirs():
    return Theirs()


@pytest.fixture(scope="module")
def network():
    return nnx.split(nnx.eval_shape(lambda: Ours(nnx.Rngs(0))))


def numpy_tensors(module):
    return {name: t.numpy() for name, t in module.state_dict().items()}


def flat(params):
    return {
        jax.tree_util.keystr(path): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }


def test_the_table_names_pytorchs_tensors_in_pytorchs_shapes(theirs, network):
    table = {name: e.torch_shape for e in parameter_table(network[1]) for name in e.names}
    assert table == {name: tuple(t.shape) for name, t in theirs.state_dict().items()}
    assert table["temperature"] == ()
    assert parameter_count(network[1]) == sum(p.numel() for p in theirs.parameters())


def test_what_comes_in_goes_out_the_same(theirs, network):
    tensors = numpy_tensors(theirs)
    back = to_torch(network[1], from_torch(network[1], tensors))
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert back[name].shape == tensor.shape, name
        assert back[name].flags.c_contiguous, name
        np.testing.assert_array_equal(back[name], tensor, err_msg=name)


def test_every_layout_computes_what_pytorchs_layer_does(theirs, network):
    graphdef, state = network
    ours = nnx.merge(graphdef, from_torch(state, numpy_tensors(theirs)))
    rng = np.random.default_rng(0)
    vectors, image, wide = (
        rng.standard_normal(s).astype(np.float32) for s in ((2, 3), (2, 4, 5, 2), (2, 6, 7, 6))
    )
    pixels = rng.standard_normal((2, 4, 5, 3)).astype(np.float32)

    def nchw(layer, x):
        return layer(torch.from_numpy(x).permute(0, 3, 1, 2)).permute(0, 2, 3, 1).numpy()

    def close(a, b):
        return np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)

    assert float(ours.temperature.get_value()) == float(theirs.temperature)
    close(ours.linear(jnp.asarray(vectors)), theirs.linear(torch.from_numpy(vectors)).numpy())
    close(ours.pointwise(jnp.asarray(pixels)), nchw(theirs.pointwise, pixels))
    close(ours.conv(jnp.asarray(image)), nchw(theirs.conv, image))
    close(ours.depthwise(jnp.asarray(wide)), nchw(theirs.depthwise, wide))
    for i, block in enumerate(theirs.blocks):  # a stack's layers are in order
        kernels = (
            ours.blocks["first"].kernel.get_value(),
            ours.blocks["inner"]["conv"].kernel.get_value(),
        )
        np.testing.assert_array_equal(kernels[0][i], block["first"].weight.numpy().T)
        np.testing.assert_array_equal(
            kernels[1][i], block["inner"]["conv"].weight.numpy().transpose(2, 3, 1, 0)
        )


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_file_of_any_precision_is_cast_to_the_one_wanted(
    stored, dtype, theirs, network, tmp_path
):
    tensors = {name: t.to(stored) for name, t in theirs.state_dict().items()}
    safetensors.torch.save_file(tensors, tmp_path / FILE)
    params = load_tensors(*locate_tensors(tmp_path, network[1]), dtype)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(dtype)}
    want = from_torch(
        network[1], {name: t.float().numpy().astype(dtype) for name, t in tensors.items()}
    )
    got = flat(params)
    want = flat(want)
    assert got.keys() == want.keys()
    for name in want:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)


def save_shards(folder, theirs, index=True):
    """The tensors in two files, their index beside them."""
    tensors = theirs.state_dict()
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    place = {tensor: names[i % 2] for i, tensor in enumerate(tensors)}
    for file in names:
        safetensors.torch.save_file(
            {n: t.clone() for n, t in tensors.items() if place[n] == file}, folder / file
        )
    if index:
        (folder / f"{FILE}.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": place})
        )
    return names


def test_shards_with_an_index_load_as_one_file_does(theirs, network, tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    safetensors.torch.save_file(theirs.state_dict(), tmp_path / "one" / FILE)
    names = save_shards(tmp_path / "two", theirs)
    assert [p.name for p in weight_files(tmp_path / "one")] == [FILE]
    assert [p.name for p in weight_files(tmp_path / "two")] == names
    one, two = (
        flat(load_tensors(*locate_tensors(tmp_path / name, network[1]), jnp.float32))
        for name in ("one", "two")
    )
    assert one.keys() == two.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], two[name], err_msg=name)


VARIANTS = {  # as diffusers and transformers have named them over time
    "one file": ["model.fp16.safetensors"],
    "shards": [
        "model.fp16-00001-of-00002.safetensors",
        "model.fp16-00002-of-00002.safetensors",
        "model.safetensors.index.fp16.json",
    ],
    "shards, older": [
        "model-00001-of-00002.fp16.safetensors",
        "model-00002-of-00002.fp16.safetensors",
        "model.fp16.safetensors.index.json",
    ],
    "an average": ["diffusion_pytorch_model.non_ema.safetensors"],
}


@pytest.mark.parametrize("kind", VARIANTS)
def test_a_variant_is_read_only_where_there_is_nothing_else(kind, theirs, network, tmp_path):
    names = VARIANTS[kind]
    plain = ["diffusion_pytorch_model.safetensors"]
    others = ["config.json", "model.fp16.bin", "model.bin.index.fp16.json", "README.md"]
    assert without_variants([*names, *plain, *others]) == plain
    assert without_variants([*names, *others]) == sorted(names)
    tensors = {name: t + 1 for name, t in theirs.state_dict().items()}
    files = [n for n in names if n.endswith(".safetensors")]
    place = {name: files[i % len(files)] for i, name in enumerate(tensors)}
    for file in files:
        safetensors.torch.save_file(
            {n: t for n, t in tensors.items() if place[n] == file}, tmp_path / file
        )
    if len(names) > 1:
        (tmp_path / names[2]).write_text(json.dumps({"weight_map": place}))
    for other in others:
        (tmp_path / other).write_text("{}")

    def temperature():
        return float(
            load_tensors(*locate_tensors(tmp_path, network[1]), jnp.float32)["temperature"]
        )

    assert [p.name for p in weight_files(tmp_path)] == files
    assert temperature() == float(theirs.temperature) + 1
    save_shards(tmp_path, theirs)
    assert len(weight_files(tmp_path)) == 2
    assert temperature() == float(theirs.temperature)


def test_variants_that_cannot_be_chosen_between_are_refused(tmp_path):
    for name in ("model.fp16.safetensors", "model.non_ema.safetensors"):
        (tmp_path / name).touch()
    with pytest.raises(
        FileNotFoundError, match=r"found model\.fp16\.safetensors, model\.non_ema\.safetensors"
    ):
        weight_files(tmp_path)
    for name in ("a.safetensors.index.json", "b.safetensors.index.json"):
        (tmp_path / name).touch()
    with pytest.raises(
        FileNotFoundError, match=r"found a\.safetensors\.index\.json, b\.safetensors\.index\.json"
    ):
        weight_files(tmp_path)


def test_files_that_cannot_be_chosen_between_are_refused(theirs, tmp_path):
    with pytest.raises(
        FileNotFoundError,
        match=r"expected one \.safetensors file or an index of shards, found none",
    ):
        weight_files(tmp_path)
    names = save_shards(tmp_path, theirs, index=False)
    with pytest.raises(FileNotFoundError, match=f"found {names[0]}, {names[1]}"):
        weight_files(tmp_path)


@pytest.mark.parametrize(
    ("present", "read"),
    [
        # transformers reads the single file, also beside an index that names shards that are gone
        (["model.safetensors", "model.safetensors.index.json"], ["model.safetensors"]),
        # diffusers reads the shards of an index
        (
            [
                "diffusion_pytorch_model.safetensors",
                "diffusion_pytorch_model.safetensors.index.json",
            ],
            ["shard.safetensors"],
        ),
        # a LoRA beside the weights, as our own export writes one
        (
            ["diffusion_pytorch_model.safetensors", "pytorch_lora_weights.safetensors"],
            ["diffusion_pytorch_model.safetensors"],
        ),
    ],
)
def test_of_several_files_the_one_is_read_that_transformers_and_diffusers_read(
    present, read, tmp_path
):
    for name in present:
        (tmp_path / name).touch()
        if name.endswith(".json"):
            (tmp_path / name).write_text('{"weight_map": {"weight": "shard.safetensors"}}')
            if "diffusion" in name:
                (tmp_path / "shard.safetensors").touch()
    assert [path.name for path in weight_files(tmp_path)] == read


def test_transformers_reads_the_single_file_too(tmp_path):
    config = transformers.T5Config(
        vocab_size=11, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2
    )
    model = transformers.T5EncoderModel(config)
    model.save_pretrained(tmp_path, max_shard_size="1KB")  # shards and an index
    assert len(weight_files(tmp_path)) > 1
    with torch.no_grad():
        model.shared.weight.fill_(2.0)
    safetensors.torch.save_file(
        {name: t.clone() for name, t in model.state_dict().items()},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    assert [path.name for path in weight_files(tmp_path)] == ["model.safetensors"]
    loaded = transformers.T5EncoderModel.from_pretrained(tmp_path)
    assert bool((loaded.shared.weight == 2.0).all())


def test_pickles_are_named(tmp_path):
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(
        FileNotFoundError, match=r"PyTorch pickles only \(pytorch_model\.bin\); `solrl convert`"
    ):
        weight_files(tmp_path)


def test_an_index_that_names_an_absent_shard_is_refused(theirs, tmp_path):
    names = save_shards(tmp_path, theirs)
    (tmp_path / names[1]).unlink()
    with pytest.raises(FileNotFoundError, match=f"names missing files: {names[1]}"):
        weight_files(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_an_index_that_is_none_is_refused(text, tmp_path):
    (tmp_path / f"{FILE}.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"index\.json: not an index of shards"):
        weight_files(tmp_path)


def test_all_problems_of_a_file_are_listed_at_once_in_one_line(theirs, network, tmp_path):
    tensors = dict(theirs.state_dict())
    del tensors["blocks.1.first.weight"], tensors["temperature"]
    tensors |= {"stranger": torch.zeros(2, 3), "linear.weight": torch.zeros(3, 4)}
    safetensors.torch.save_file(tensors, tmp_path / FILE)
    with pytest.raises(ValueError, match=r"4 tensor\(s\) do not fit") as error:
        load_tensors(*locate_tensors(tmp_path, network[1]), jnp.float32)
    for part in (
        str(tmp_path),
        "missing blocks.1.first.weight (4, 3)",
        "missing temperature ()",
        "unexpected stranger (2, 3)",
        "linear.weight has shape (3, 4), expected (4, 3)",
    ):
        assert part in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.uint8, torch.int64, torch.bool, torch.float8_e4m3fn]
)
def test_a_tensor_that_is_not_of_plain_floating_point_is_refused_by_name(
    dtype, theirs, network, tmp_path
):
    tensors = theirs.state_dict()
    tensors |= {
        name: tensors[name].to(dtype) for name in ("linear.weight", "blocks.2.inner.conv.bias")
    }
    safetensors.torch.save_file(tensors, tmp_path / FILE)
    with pytest.raises(ValueError, match=r"2 tensor\(s\) do not fit") as error:
        locate_tensors(tmp_path, network[1])
    for name in ("linear.weight", "blocks.2.inner.conv.bias"):
        assert re.search(
            rf"{re.escape(name)} is [A-Z0-9_]+, expected one of BF16, F16, F32, F64",
            str(error.value),
        )
    assert "\n" not in str(error.value)


def test_a_tensor_in_two_shards_is_refused(theirs, network, tmp_path):
    first, second = save_shards(tmp_path, theirs)
    both = safetensors.torch.load_file(tmp_path / first) | safetensors.torch.load_file(
        tmp_path / second
    )
    safetensors.torch.save_file(
        {n: t for n, t in both.items() if n != "temperature"}, tmp_path / second
    )
    with pytest.raises(ValueError, match=rf"linear\.weight is both in {first} and in {second}"):
        load_tensors(*locate_tensors(tmp_path, network[1]), jnp.float32)


class Tied(nnx.Module):
    """The parameters beside which older files hold tensors that say nothing."""

    def __init__(self, table: bool, rngs):
        self.norm = RMSNorm(5, eps=1e-6)
        if table:
            self.shared = Embedding(7, 3, rngs=rngs)

            def embeddings():
                return nnx.Dict(embeddings=nnx.Dict(position_embedding=Embedding(4, 3, rngs=rngs)))

            self.text_model = embeddings()
            self.vision_model = embeddings()


def test_what_older_files_repeat_is_passed_over_beside_what_it_repeats_and_nowhere_else(tmp_path):
    old = {
        "encoder.embed_tokens.weight": torch.zeros(7, 3),
        "text_model.embeddings.position_ids": torch.arange(4)[None],
        "vision_model.embeddings.position_ids": torch.arange(4)[None],
    }
    states = [
        nnx.state(nnx.eval_shape(lambda table=table: Tied(table, nnx.Rngs(0))))
        for table in (True, False)
    ]
    full, bare = (
        {name: torch.randn(e.torch_shape) for e in parameter_table(s) for name in e.names}
        for s in states
    )
    assert len(full) == 4
    safetensors.torch.save_file(full | old, tmp_path / FILE)
    params = load_tensors(*locate_tensors(tmp_path, states[0]), jnp.float32)
    np.testing.assert_array_equal(params["shared"]["embedding"], full["shared.weight"].numpy())
    safetensors.torch.save_file(
        full | old | {"decoder.embed_tokens.weight": torch.zeros(7, 3)}, tmp_path / FILE
    )
    with pytest.raises(
        ValueError,
        match=r"1 tensor\(s\) do not fit the network: unexpected decoder.embed_tokens.weight",
    ):
        load_tensors(*locate_tensors(tmp_path, states[0]), jnp.float32)
    safetensors.torch.save_file(bare | old, tmp_path / FILE)
    with pytest.raises(ValueError, match=r"3 tensor\(s\) do not fit") as error:
        load_tensors(*locate_tensors(tmp_path, states[1]), jnp.float32)
    assert all(f"unexpected {name}" in str(error.value) for name in old)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_a_file_cut_short_is_refused(keep, theirs, network, tmp_path):
    whole = safetensors.torch.save(theirs.state_dict())
    (tmp_path / FILE).write_bytes(whole[:keep])
    with pytest.raises(ValueError, match=f"{FILE}: not a readable safetensors file"):
        load_tensors(*locate_tensors(tmp_path, network[1]), jnp.float32)


def test_a_saved_component_is_config_and_weights_in_the_precision_asked_for(
    theirs, network, tmp_path
):
    tensors = numpy_tensors(theirs)
    save_component(tmp_path / "new", FILE, {"width": 3}, tensors, ml_dtypes.bfloat16)
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == ["config.json", FILE]
    assert json.loads((tmp_path / "new" / "config.json").read_text()) == {"width": 3}
    read_by_torch = safetensors.torch.load_file(tmp_path / "new" / FILE)
    for name, t in theirs.state_dict().items():
        assert torch.equal(read_by_torch[name], t.bfloat16()), name
    back = to_torch(
        network[1], load_tensors(*locate_tensors(tmp_path / "new", network[1]), jnp.float32)
    )
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(
            back[name], tensor.astype(ml_dtypes.bfloat16).astype(np.float32), err_msg=name
        )


def test_a_save_that_fails_leaves_what_was_there_and_nothing_else(theirs, tmp_path, monkeypatch):
    tensors = numpy_tensors(theirs)
    save_component(tmp_path, FILE, {"width": 3}, tensors, np.float32)

    def full_disk(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(networks, "save_file", full_disk)
    with pytest.raises(RunError, match="disk full while writing"):
        save_component(
            tmp_path,
            FILE,
            {"width": 4},
            {k: np.asarray(v + 1) for k, v in tensors.items()},
            np.float32,
        )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", FILE]
    assert json.loads((tmp_path / "config.json").read_text()) == {"width": 3}
    np.testing.assert_array_equal(load_file(tmp_path / FILE)["norm.weight"], tensors["norm.weight"])


AXES = ("data", "fsdp")
SPLITS = {  # the axis of a parameter that is split over `fsdp`, counted from its first or its last
    "whole": None,
    "first": 0,
    "last": -1,
    "last but one": -2,
}


class Large(nnx.Module):
    """A parameter of every layout, each axis a multiple of four; some stacked, one in a run of a
    list of several kinds.
    """

    def __init__(self, rngs):
        self.temperature = param(jnp.zeros(()), "temperature")
        self.table = Embedding(24, 8, rngs=rngs)
        self.linear = Linear(12, 8, rngs=rngs)
        self.pointwise = Linear(4, 8, layout="pointwise", bias=False, rngs=rngs)
        self.conv = Conv(4, 8, 4, rngs=rngs)

        def block(r):
            return nnx.Dict(
                linear=Linear(12, 8, rngs=r), conv=Conv(4, 8, 4, rngs=r), norm=RMSNorm(8, eps=1e-6)
            )

        self.blocks = stack(8, block, rngs)
        self.mixed = nnx.Dict(run=stack(4, block, rngs, first=3))


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """The abstract state, a folder of three shards in BF16, and the parameters they hold."""
    folder = tmp_path_factory.mktemp("large")
    rng = np.random.default_rng(0)
    state = nnx.split(nnx.eval_shape(lambda: Large(nnx.Rngs(0))))[1]
    tensors = {
        name: rng.standard_normal(e.torch_shape).astype(ml_dtypes.bfloat16)
        for e in parameter_table(state)
        for name in e.names
    }
    assert "mixed.6.linear.weight" in tensors
    place = {name: f"model-0000{i % 3 + 1}-of-00003.safetensors" for i, name in enumerate(tensors)}
    for file in set(place.values()):
        save_file({n: t for n, t in tensors.items() if place[n] == file}, folder / file)
    (folder / f"{FILE}.index.json").write_text(json.dumps({"weight_map": place}))
    return state, folder, flat(from_torch(state, tensors))


def placement(split, placed=None):
    """On 2 x 4 devices: the axis split over `fsdp`, where a parameter has it and it comes out
    even.
    """
    mesh = jax.make_mesh((2, 4), AXES, (jax.sharding.AxisType.Auto,) * 2)

    def place(path, shape):
        if placed is not None:
            placed[jax.tree_util.keystr(tuple(jax.tree_util.DictKey(p) for p in path))] = shape
        spec = [None] * len(shape)
        if split is not None and -len(shape) <= split < len(shape) and shape[split] % 4 == 0:
            spec[split] = "fsdp"
        return NamedSharding(mesh, PartitionSpec(*spec))

    return place


@pytest.mark.parametrize("part", first_is_quick([1, 500, 2**28]))
@pytest.mark.parametrize("split", SPLITS)
def test_every_shard_of_every_parameter_is_its_part_of_the_tensors(split, part, large, monkeypatch):
    """Whatever axis is split and however small the parts and the reads are; each array lies as
    asked, replicas included.
    """
    state, folder, want = large
    monkeypatch.setattr(weights, "CHUNK_BYTES", part)
    monkeypatch.setattr(tensor_files, "BLOCK_BYTES", 2**22 if part > 500 else 70)
    placed = {}
    place = placement(SPLITS[split], placed)
    params = load_tensors(*locate_tensors(folder, state), jnp.float32, place)
    assert placed == {name: value.shape for name, value in want.items()}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(path)
        assert leaf.sharding == place(tuple(k.key for k in path), leaf.shape), name
        assert leaf.dtype == jnp.float32
        assert len(leaf.addressable_shards) == 8
        for shard in leaf.addressable_shards:
            np.testing.assert_array_equal(
                shard.data, want[name].astype(np.float32)[shard.index], err_msg=name
            )
    kernel = params["blocks"]["linear"]["kernel"]
    assert kernel.addressable_shards[0].data.size == kernel.size // (1 if split == "whole" else 4)


class Counted(io.BufferedReader):
    """A file opened for reading that counts what is read of all such files."""

    reads: ClassVar[list[int]] = []

    def __init__(self, file, mode):
        assert mode == "rb"
        super().__init__(io.FileIO(file))

    def readinto(self, buffer):
        self.reads.append(len(buffer))
        return super().readinto(buffer)


@pytest.fixture
def reads(monkeypatch):
    """The sizes of all reads of tensors."""
    monkeypatch.setattr(Counted, "reads", [])
    monkeypatch.setattr(tensor_files, "open", Counted, raising=False)
    return Counted.reads


@pytest.mark.parametrize("split", SPLITS)
def test_each_byte_is_read_once_a_little_at_a_time(split, large, reads, monkeypatch):
    state, folder, want = large
    monkeypatch.setattr(tensor_files, "BLOCK_BYTES", 256)
    load_tensors(*locate_tensors(folder, state), jnp.float32, placement(SPLITS[split]))
    assert sum(reads) == sum(value.nbytes for value in want.values())
    assert max(reads) == 256


def test_a_process_reads_no_rows_that_its_devices_do_not_hold(large, reads):
    state, folder, want = large
    (entry,) = (e for e in parameter_table(state) if e.path == ("blocks", "linear", "kernel"))
    _, stored = locate_tensors(folder, state)
    index = (
        range(2, 4),
        range(12),
        range(6, 8),
    )  # two of eight layers, a quarter of the rows of each
    (got,) = weights.read_regions(entry, stored, np.dtype(np.float32), [index])
    np.testing.assert_array_equal(
        got, want["['blocks']['linear']['kernel']"][2:4, :, 6:8].astype(np.float32)
    )
    assert sum(reads) == 2 * 2 * 12 * 2


def test_the_host_never_holds_more_than_a_part(large, monkeypatch):
    """The largest buffer that is assembled, for all devices together: `PART`, or one layer where
    that is more.
    """
    state, folder, _ = large
    sizes = []
    read = weights.read_regions

    def watched(e, stored, dtype, parts):
        hosts = read(e, stored, dtype, parts)
        sizes.append((sum(h.nbytes for h in hosts), e.path))
        return hosts

    monkeypatch.setattr(weights, "read_regions", watched)
    monkeypatch.setattr(weights, "CHUNK_BYTES", 1100)
    load_tensors(*locate_tensors(folder, state), jnp.bfloat16, placement(-1))
    by_itself = ("conv", "kernel")  # one tensor, of which no part is a run of the file's rows
    assert 1000 < max(size for size, path in sizes if path != by_itself) <= 1100
    assert [size for size, path in sizes if path == ("blocks", "conv", "kernel")] == [1024] * 8


def test_nothing_is_placed_where_something_does_not_fit(large, tmp_path):
    state, folder, _ = large
    tensors = {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}
    save_file({n: t for n, t in tensors.items() if n != "mixed.6.norm.weight"}, tmp_path / FILE)
    placed = {}
    with pytest.raises(ValueError, match=r"missing mixed\.6\.norm\.weight \(8,\)"):
        load_tensors(*locate_tensors(tmp_path, state), jnp.float32, placement(0, placed))
    assert not placed


def test_a_file_that_shrinks_while_it_is_read_is_refused(large, tmp_path):
    state, folder, _ = large
    tensors = {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}
    save_file(tensors, tmp_path / FILE)
    locations = locate_tensors(tmp_path, state)
    (tmp_path / FILE).write_bytes((tmp_path / FILE).read_bytes()[:-10])
    with pytest.raises(ValueError, match=rf"{FILE}: the file ends within [a-z0-9.]+$"):
        load_tensors(*locations, jnp.float32, placement(0))
