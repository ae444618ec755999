"""Weight files: every layout against PyTorch's own layers, every way a component is stored, and what is said of bad ones."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.torch
import torch
from flax import nnx
from safetensors.numpy import load_file

from models import weights
from models.layers import Conv, DepthwiseConv, Linear, RMSNorm, param, stack
from models.weights import entries, from_torch, load_component, parameter_count, save_component, to_torch, weight_files

FILE = "model.safetensors"


class Ours(nnx.Module):
    """A parameter of every layout: 0-d, vectors, matrices, convolutions, and some of them stacked."""

    def __init__(self, rngs):
        self.temperature = param(jnp.zeros(()), "temperature")
        self.norm = RMSNorm(5, eps=1e-6)
        self.linear = Linear(3, 4, rngs=rngs)
        self.pointwise = Linear(3, 4, layout="pointwise", bias=False, rngs=rngs)
        self.conv = Conv(2, 6, 3, rngs=rngs)
        self.depthwise = DepthwiseConv(6, 5, bias=False, rngs=rngs)
        self.blocks = stack(3, lambda r: nnx.Dict(first=Linear(3, 4, rngs=r), inner=nnx.Dict(conv=Conv(2, 6, 3, rngs=r))), rngs)


class Theirs(torch.nn.Module):
    def __init__(self):
        super().__init__()
        conv = lambda: torch.nn.Conv2d(2, 6, 3, padding=1)
        block = lambda: {"first": torch.nn.Linear(3, 4), "inner": torch.nn.ModuleDict({"conv": conv()})}
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
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(params)}


def test_the_table_names_pytorchs_tensors_in_pytorchs_shapes(theirs, network):
    table = {name: e.torch_shape for e in entries(network[1]) for name in e.names}
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
    vectors, image, wide = (rng.standard_normal(s).astype(np.float32) for s in ((2, 3), (2, 4, 5, 2), (2, 6, 7, 6)))
    pixels = rng.standard_normal((2, 4, 5, 3)).astype(np.float32)
    nchw = lambda layer, x: layer(torch.from_numpy(x).permute(0, 3, 1, 2)).permute(0, 2, 3, 1).numpy()
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    assert float(ours.temperature.get_value()) == float(theirs.temperature)
    close(ours.linear(vectors), theirs.linear(torch.from_numpy(vectors)).numpy())
    close(ours.pointwise(pixels), nchw(theirs.pointwise, pixels))
    close(ours.conv(image), nchw(theirs.conv, image))
    close(ours.depthwise(wide), nchw(theirs.depthwise, wide))
    for i, block in enumerate(theirs.blocks):  # a stack's layers are in order
        kernels = ours.blocks["first"].kernel.get_value(), ours.blocks["inner"]["conv"].kernel.get_value()
        np.testing.assert_array_equal(kernels[0][i], block["first"].weight.numpy().T)
        np.testing.assert_array_equal(kernels[1][i], block["inner"]["conv"].weight.numpy().transpose(2, 3, 1, 0))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", [jnp.float32, jnp.bfloat16])
def test_a_file_of_any_precision_is_cast_to_the_one_wanted(stored, wanted, theirs, network, tmp_path):
    tensors = {name: t.to(stored) for name, t in theirs.state_dict().items()}
    safetensors.torch.save_file(tensors, tmp_path / FILE)
    params = load_component(tmp_path, network[1], wanted)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(wanted)}
    want = from_torch(network[1], {name: t.float().numpy().astype(wanted) for name, t in tensors.items()})
    got, want = flat(params), flat(want)
    assert got.keys() == want.keys()
    for name in want:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)


def save_shards(folder, theirs, index=True):
    """The tensors in two files, their index beside them."""
    tensors = theirs.state_dict()
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    place = {tensor: names[i % 2] for i, tensor in enumerate(tensors)}
    for file in names:
        safetensors.torch.save_file({n: t.clone() for n, t in tensors.items() if place[n] == file}, folder / file)
    if index:
        (folder / f"{FILE}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": place}))
    return names


def test_shards_with_an_index_load_as_one_file_does(theirs, network, tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    safetensors.torch.save_file(theirs.state_dict(), tmp_path / "one" / FILE)
    names = save_shards(tmp_path / "two", theirs)
    assert [p.name for p in weight_files(tmp_path / "one")] == [FILE]
    assert [p.name for p in weight_files(tmp_path / "two")] == names
    one, two = (flat(load_component(tmp_path / name, network[1], jnp.float32)) for name in ("one", "two"))
    assert one.keys() == two.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], two[name], err_msg=name)


def test_files_that_cannot_be_chosen_between_are_refused(theirs, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"expected one \.safetensors file or an index of shards, found none"):
        weight_files(tmp_path)
    names = save_shards(tmp_path, theirs, index=False)
    with pytest.raises(FileNotFoundError, match=f"found {names[0]}, {names[1]}"):
        weight_files(tmp_path)


def test_an_index_that_names_an_absent_shard_is_refused(theirs, tmp_path):
    names = save_shards(tmp_path, theirs)
    (tmp_path / names[1]).unlink()
    with pytest.raises(FileNotFoundError, match=f"names files that are not there: {names[1]}"):
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
        load_component(tmp_path, network[1], jnp.float32)
    for part in (str(tmp_path), "missing blocks.1.first.weight (4, 3)", "missing temperature ()", "unexpected stranger (2, 3)",
                 "linear.weight has shape (3, 4), expected (4, 3)"):  # fmt: skip
        assert part in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_a_file_cut_short_is_refused(keep, theirs, network, tmp_path):
    whole = safetensors.torch.save(theirs.state_dict())
    (tmp_path / FILE).write_bytes(whole[:keep])
    with pytest.raises(ValueError, match=f"{FILE}: not a readable safetensors file"):
        load_component(tmp_path, network[1], jnp.float32)


def test_a_saved_component_is_config_and_weights_in_the_precision_asked_for(theirs, network, tmp_path):
    tensors = numpy_tensors(theirs)
    save_component(tmp_path / "new", FILE, {"width": 3}, tensors, ml_dtypes.bfloat16)
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == ["config.json", FILE]
    assert json.loads((tmp_path / "new" / "config.json").read_text()) == {"width": 3}
    read_by_torch = safetensors.torch.load_file(tmp_path / "new" / FILE)
    for name, t in theirs.state_dict().items():
        assert torch.equal(read_by_torch[name], t.bfloat16()), name
    back = to_torch(network[1], load_component(tmp_path / "new", network[1], jnp.float32))
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(back[name], tensor.astype(ml_dtypes.bfloat16).astype(np.float32), err_msg=name)


def test_a_save_that_fails_leaves_what_was_there_and_nothing_else(theirs, tmp_path, monkeypatch):
    tensors = numpy_tensors(theirs)
    save_component(tmp_path, FILE, {"width": 3}, tensors, np.float32)

    def full_disk(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weights, "save_file", full_disk)
    with pytest.raises(OSError, match="No space left"):
        save_component(tmp_path, FILE, {"width": 4}, {k: v + 1 for k, v in tensors.items()}, np.float32)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", FILE]
    assert json.loads((tmp_path / "config.json").read_text()) == {"width": 3}
    np.testing.assert_array_equal(load_file(tmp_path / FILE)["norm.weight"], tensors["norm.weight"])
