"""`solrl convert`: native SANA checkpoints against diffusers, pickles of every kind, and those that
are refused.
"""

import argparse
import functools
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.torch
import torch
from diffusers import SanaTransformer2DModel
from safetensors import SafetensorError

from solrl_jax.cli import convert as conversion
from solrl_jax.cli.convert import convert
from solrl_jax.errors import InputError, RunError
from solrl_jax.models.registry import open_pipeline
from solrl_jax.models.sana.transformer import SanaConfig
from tests.cli.test_cli import solrl
from tests.parity import relative
from tests.pipelines import CHANNELS, TEXT, TRANSFORMER, save_pipeline

TOLERANCE = 1e-5  # largest difference over largest value
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A SANA pipeline's directory, and diffusers' own form of its transformer."""
    folder = tmp_path_factory.mktemp("base")
    pipeline = save_pipeline(folder, timestep_scale=0.5)
    return folder, pipeline.transformer


def to_native(tensors, ffn, qkv="qkv", kv="kv"):
    """diffusers' tensors as the authors' code has them; qkv, kv: the order in which they are put
    together.
    """
    rename = {
        "patch_embed.proj": "x_embedder.proj",
        "caption_projection.linear_1": "y_embedder.y_proj.fc1",
        "caption_projection.linear_2": "y_embedder.y_proj.fc2",
        "caption_norm": "attention_y_norm",
        "time_embed.emb.timestep_embedder.linear_1": "t_embedder.mlp.0",
        "time_embed.linear": "t_block.1",
        "time_embed.emb.timestep_embedder.linear_2": "t_embedder.mlp.2",
        "proj_out": "final_layer.linear",
        "attn1.to_out.0": "attn.proj",
        "attn2.to_q": "cross_attn.q_linear",
        "attn2.to_out.0": "cross_attn.proj",
        "ff.conv_inverted": f"mlp.inverted_conv.{ffn}",
        "ff.conv_depth": "mlp.depth_conv.conv",
        "ff.conv_point": f"mlp.point_conv.{ffn}",
        "attn1.norm_q": "attn.q_norm",
        "attn1.norm_k": "attn.k_norm",
        "attn2.norm_q": "cross_attn.q_norm",
        "attn2.norm_k": "cross_attn.k_norm",
    }
    native = {}
    for name, tensor in tensors.items():
        head, _, last = name.rpartition(".")
        block = ".".join(head.split(".")[:2]) if head.startswith("transformer_blocks.") else ""
        inner = head.removeprefix(block).removeprefix(".")
        at = f"{block.removeprefix('transformer_')}." if block else ""
        if inner.startswith("attn1.to_") and inner[-1] in "qkv":
            native[f"{at}attn.qkv.{last}"] = torch.cat(
                [tensors[f"{block}.attn1.to_{x}.{last}"] for x in qkv]
            )
        elif inner in ("attn2.to_k", "attn2.to_v"):
            native[f"{at}cross_attn.kv_linear.{last}"] = torch.cat(
                [tensors[f"{block}.attn2.to_{x}.{last}"] for x in kv]
            )
        elif not inner:
            native[f"{at or 'final_layer.'}{last}"] = tensor
        else:
            flat = (
                ffn == "linear"
                and inner in ("ff.conv_inverted", "ff.conv_point")
                and last == "weight"
            )
            native[f"{at}{rename[inner]}.{last}"] = tensor[:, :, 0, 0] if flat else tensor
    width, text = tensors["caption_projection.linear_1.weight"].shape
    return native | {
        "pos_embed": torch.zeros(1, 16, width),
        "y_embedder.y_embedding": torch.randn(300, text),
    }


@pytest.fixture(scope="module")
def forward(base):
    """(parameters of ours -> velocity), compiled once, and diffusers' velocity from the same
    input.
    """
    rng = np.random.default_rng(0)
    latent = rng.standard_normal((2, 6, 4, CHANNELS)).astype(np.float32)
    text = rng.standard_normal((2, 5, TEXT["hidden_size"])).astype(np.float32)
    mask = np.arange(5)[None] < np.array([[5], [3]])
    time = np.array([900.0, 130.0], np.float32)
    network = open_pipeline(base[0]).transformer
    ours = jax.jit(lambda params: network(params)(*map(jnp.asarray, (latent, text, mask, time))))
    t = torch.from_numpy
    with torch.no_grad():
        theirs = base[1](
            t(latent.transpose(0, 3, 1, 2).copy()),
            t(text),
            t(time),
            encoder_attention_mask=t(mask).float(),
        )[0]
    return ours, theirs.numpy().transpose(0, 2, 3, 1)


@pytest.mark.slow
@pytest.mark.parametrize("ffn", [pytest.param("conv", marks=pytest.mark.exhaustive), "linear"])
def test_a_native_checkpoint_computes_what_diffusers_does(ffn, base, forward, tmp_path):
    folder, theirs = base
    ours, want = forward
    velocities = {}
    for orders in (("qkv", "kv"), ("qvk", "kv"), ("kqv", "kv"), ("qkv", "vk")):
        out = tmp_path / "-".join(orders)
        torch.save(
            {"state_dict": to_native(theirs.state_dict(), ffn, *orders), "epoch": 3},
            tmp_path / "sana.pth",
        )
        summary = convert(tmp_path / "sana.pth", out, folder)
        assert (summary["kind"], summary["ffn"], summary["took"]) == ("sana", ffn, "state_dict")
        velocities[orders] = relative(ours(open_pipeline(out).transformer.load(jnp.float32)), want)
    print(velocities)
    assert velocities.pop(("qkv", "kv")) < TOLERANCE
    assert min(velocities.values()) > 1000 * TOLERANCE  # another order is another network

    out = tmp_path / "qkv-kv"
    results = safetensors.torch.load_file(out / WEIGHTS)
    assert results.keys() == theirs.state_dict().keys()
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(results[name], tensor), name
    config = json.loads((out / "transformer" / "config.json").read_text())
    assert SanaConfig.from_dict(config) == SanaConfig.from_dict(
        TRANSFORMER | {"timestep_scale": 0.5}
    )
    assert (
        SanaTransformer2DModel.from_pretrained(out / "transformer").state_dict().keys()
        == results.keys()
    )


def test_qk_norm_and_bf16_are_kept(base, tmp_path):
    torch.manual_seed(1)
    theirs = SanaTransformer2DModel(**TRANSFORMER, qk_norm="rms_norm_across_heads").bfloat16()
    for p in theirs.parameters():
        p.data.normal_()
    torch.save(to_native(theirs.state_dict(), "linear"), tmp_path / "sana.pth")
    summary = convert(tmp_path / "sana.pth", tmp_path / "out", base[0])
    assert summary["config"]["qk_norm"] == "rms_norm_across_heads"
    assert summary["parameters"] == sum(p.numel() for p in theirs.parameters())
    results = safetensors.torch.load_file(tmp_path / "out" / WEIGHTS)
    for name, tensor in theirs.state_dict().items():
        assert results[name].dtype == torch.bfloat16
        assert torch.equal(results[name], tensor), name


def test_what_the_command_says(base, tmp_path, monkeypatch, capsys):
    folder, theirs = base
    torch.save({"model": to_native(theirs.state_dict(), "linear")}, tmp_path / "sana.pth")
    arguments = (
        "convert",
        str(tmp_path / "sana.pth"),
        "--out",
        str(tmp_path / "new" / "out"),
        "--base",
        str(folder),
    )
    code, out, error = solrl(*arguments, monkeypatch=monkeypatch, capsys=capsys)
    assert (code, error) == (0, "")
    parameters = sum(p.numel() for p in theirs.parameters())
    assert out.splitlines()[:3] == [
        "took model",
        "left out pos_embed, y_embedder.y_embedding",
        f"SANA of 2 layers, linear MLPs, {parameters:,} parameters",
    ]
    config = SanaConfig.from_dict(
        json.loads((tmp_path / "new" / "out" / "transformer" / "config.json").read_text())
    )
    code, out, error = solrl(
        *arguments, "--force", "--json", monkeypatch=monkeypatch, capsys=capsys
    )
    summary = json.loads(out)
    assert code == 0
    assert summary["ignored"] == ["pos_embed", "y_embedder.y_embedding"]
    assert SanaConfig.from_dict(summary["config"]) == config


def test_a_base_gives_all_but_the_transformer_and_stays_as_it_was(base, tmp_path):
    folder, theirs = base

    def state():
        return {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in folder.rglob("*")}

    before = state()
    torch.save(to_native(theirs.state_dict(), "linear"), tmp_path / "sana.pth")
    cache = tmp_path / "cache"  # as a hub keeps it: links to the files
    for path in (p for p in folder.rglob("*") if p.is_file()):
        (cache / path.relative_to(folder)).parent.mkdir(parents=True, exist_ok=True)
        (cache / path.relative_to(folder)).symlink_to(path)
    (cache / "README.md").write_text("not a part of it")
    (cache / "vae" / "model.fp16.safetensors").write_text("a variant")
    convert(tmp_path / "sana.pth", tmp_path / "out", cache)

    def names(root):
        return {str(p.relative_to(root)) for p in root.rglob("*") if p.is_file()}

    assert names(tmp_path / "out") == names(folder)
    for name in names(folder) - {WEIGHTS, "transformer/config.json"}:
        ours = tmp_path / "out" / name
        assert not ours.is_symlink()
        assert ours.read_bytes() == (folder / name).read_bytes(), name
        assert ours.samefile(folder / name) == name.endswith(".safetensors"), name
    assert state() == before


def test_what_does_not_fit_is_listed_and_nothing_is_written(base, tmp_path):
    tensors = to_native(base[1].state_dict(), "linear")
    del tensors["blocks.1.attn.qkv.weight"]
    tensors |= {"logvar_linear.bias": torch.zeros(1), "attention_y_norm.weight": torch.zeros(3)}
    torch.save(tensors, tmp_path / "sana.pth")
    with pytest.raises(InputError, match="3 tensor") as error:
        convert(tmp_path / "sana.pth", tmp_path / "out", base[0])
    for message in (
        "sana.pth: ",
        "missing blocks.1.attn.qkv.weight (96, 32)",
        "unexpected logvar_linear.bias (1,)",
        "attention_y_norm.weight has shape (3,), expected (32,)",
    ):
        assert message in str(error.value)
    assert [p.name for p in tmp_path.iterdir()] == ["sana.pth"]


def edit(base, to, file, **fields):
    """A copy of the directory `base`, without weights, with other fields in one of its files."""
    for path in base.rglob("*.json"):
        (to / path.relative_to(base)).parent.mkdir(parents=True, exist_ok=True)
        (to / path.relative_to(base)).write_bytes(path.read_bytes())
    (to / file).write_text(json.dumps(json.loads((to / file).read_text()) | fields))
    return to


@pytest.mark.parametrize(
    ("file", "fields", "message"),
    [
        (
            "model_index.json",
            {"_class_name": "FluxPipeline"},
            "model_index.json has _class_name='FluxPipeline'",
        ),
        (
            "transformer/config.json",
            {"num_attention_heads": 8},
            "sana.pth: has width 32, but the base has 64",
        ),
        ("transformer/config.json", {"qk_norm": "l2"}, "qk_norm='l2'; accepted"),
        (
            "vae/config.json",
            {"latent_channels": 4},
            "{base}: transformer in_channels=8 does not fit",
        ),
        (
            "text_encoder/config.json",
            {"hidden_size": 8},
            "{base}: transformer caption_channels=16 does not fit",
        ),
    ],
)
def test_a_base_that_does_not_fit(file, fields, message, base, tmp_path):
    other = edit(base[0], tmp_path / "base", file, **fields)
    torch.save(to_native(base[1].state_dict(), "linear"), tmp_path / "sana.pth")
    with pytest.raises(InputError) as error:
        convert(tmp_path / "sana.pth", tmp_path / "out", other)
    assert message.format(base=other) in str(error.value)
    assert "\n" not in str(error.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["base", "sana.pth"]


def plain_tensors():
    """Tensors of all kinds: dtypes, tied ones, out of order, parts of others, without axes,
    empty.
    """
    torch.manual_seed(0)
    whole = torch.randn(6, 8)
    names = [
        "float64",
        "float32",
        "float16",
        "bfloat16",
        "int64",
        "int32",
        "int16",
        "int8",
        "uint8",
        "bool",
        "complex64",
        "float8_e4m3fn",
        "float8_e5m2",
    ]
    tensors = {f"of.{name}": whole.abs().to(getattr(torch, name)) for name in names}
    return tensors | {
        "shared.weight": whole,
        "lm_head.weight": whole,
        "turned": whole.T,
        "columns": whole[:, 2:5],
        "scalar": torch.tensor(2.5),
        "none": torch.zeros(0, 3),
        "position_ids": torch.arange(5)[None],
        "parameter": torch.nn.Parameter(torch.randn(3)),
    }


def bits(tensor):
    return (
        tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
    )


CONTAINERS = {  # the pickle, under what it has its tensors, what is left out
    "at the top": (lambda t: t, None, []),
    "beside plain values": (
        lambda t: t | {"epoch": 3, "name": "HPS"},
        None,
        ["epoch (int)", "name (str)"],
    ),
    "of a trainer": (
        lambda t: {
            "epoch": 3,
            "optimizer": {"state": {0: {"m": t["turned"]}}},
            "state_dict": t,
            "ema": dict(t),
            "none": None,
        },
        "state_dict",
        ["epoch (int)", "optimizer (dict)", "ema (dict)", "none (NoneType)"],
    ),
    "twice": (
        lambda t: {"model": {"state_dict": t, "step": 1}},
        "model.state_dict",
        ["model.step (int)"],
    ),
    "of a name of its own": (
        lambda t: {"generator": t, "args": {"lr": 1.0}},
        "generator",
        ["args (dict)"],
    ),
}


@pytest.mark.parametrize("case", CONTAINERS)
@pytest.mark.parametrize("archive", [True, False])
def test_tensors_are_kept_as_they_are(case, archive, tmp_path):
    wrap, took, left_out = CONTAINERS[case]
    tensors = plain_tensors()
    if not archive:  # the older format is older than these
        tensors = {name: t for name, t in tensors.items() if "float8" not in name}
    torch.save(wrap(tensors), tmp_path / "weights.pt", _use_new_zipfile_serialization=archive)
    summary = convert(tmp_path / "weights.pt", tmp_path / "new" / "weights.safetensors")
    assert summary == {
        "out": str(tmp_path / "new" / "weights.safetensors"),
        "took": took,
        "left_out": left_out,
        "kind": "tensors",
        "tensors": len(tensors),
        "bytes": (tmp_path / "new" / "weights.safetensors").stat().st_size,
    }
    copies = safetensors.torch.load_file(tmp_path / "new" / "weights.safetensors")
    assert copies.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (copies[name].dtype, copies[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(bits(copies[name]), bits(tensor)), name
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["weights.safetensors"]


class Code:
    """An object whose pickle runs a command where it is read."""

    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def nested(levels):
    """A tensor inside so many dictionaries, the last one under a key with dots."""
    last = {"a.b.c": {"a": a}}
    return functools.reduce(lambda inner, _: {"model": inner}, range(levels - 1), last)


a = torch.zeros(2)
REFUSED = {
    "too many levels": (nested(9), "its dictionaries are more than 8 levels deep"),
    "code": (
        {"state_dict": {"a": a}, "x": Code("touch ran")},
        "reading it may run code (it asks for posix.system)",
    ),
    "a module": (
        torch.nn.Linear(2, 2),
        "reading it may run code (it asks for torch.nn.modules.linear.Linear)",
    ),
    "settings": (
        {"a": a, "args": argparse.Namespace()},
        "reading it may run code (it asks for argparse.Namespace)",
    ),
    "other entries": (
        {"a": a, "names": ["b"], "inner": {"b": a}, 7: a},
        "3 entries are no named tensors: names (list), inner (dict), 7 (Tensor)",
    ),
    "two of a kind": (
        {"old": {"a": a}, "new": {"a": a}},
        "2 entries are no named tensors: old (dict), new (dict)",
    ),
    "one tensor": (a, "holds one Tensor; accepted is a dictionary of tensors"),
    "a list": ([a], "holds one list; accepted is"),
    "none": ({"epoch": 3}, "holds no tensor; there is epoch (int)"),
    "nothing": ({}, "holds no tensor"),
    "kinds": (
        {"a": a, "s": a.to_sparse(), "c": a.to(torch.complex128)},
        "2 tensor(s) that safetensors cannot hold: s is torch.sparse_coo on cpu,"
        " c is torch.complex128",
    ),
}


def test_a_tensor_may_lie_eight_levels_deep(tmp_path):
    torch.save(nested(8), tmp_path / "weights.pt")
    summary = convert(tmp_path / "weights.pt", tmp_path / "weights.safetensors")
    assert (summary["took"], summary["tensors"]) == ("model." * 7 + "a.b.c", 1)


@pytest.mark.parametrize("archive", [True, False])
@pytest.mark.parametrize("case", REFUSED)
def test_what_holds_more_or_less_than_tensors_is_refused(case, archive, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content, message = REFUSED[case]
    torch.save(content, "weights.pt", _use_new_zipfile_serialization=archive)
    with pytest.raises(InputError) as error:
        convert(Path("weights.pt"), Path("out.safetensors"))
    assert str(error.value).startswith("weights.pt: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert [p.name for p in tmp_path.iterdir()] == ["weights.pt"]  # no output, and no code ran


@pytest.mark.parametrize("content", [b"", b"garbage " * 40, b"PK\x03\x04", "half"])
def test_what_is_no_torch_file_is_refused(content, tmp_path):
    torch.save({"a": torch.randn(1000)}, tmp_path / "weights.pt")
    if content == "half":
        content = (tmp_path / "weights.pt").read_bytes()[:2000]
    (tmp_path / "weights.pt").write_bytes(content)
    with pytest.raises(
        InputError, match=r"weights\.pt: (not a readable torch file|refused)"
    ) as error:
        convert(tmp_path / "weights.pt", tmp_path / "out.safetensors")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out.safetensors").exists()


def test_nothing_is_replaced_unless_asked(tmp_path):
    torch.save({"a": torch.ones(2)}, tmp_path / "weights.pt")
    out = tmp_path / "out.safetensors"
    out.write_text("mine")
    with pytest.raises(
        InputError,
        match=r"out.safetensors: exists; name another one, or replace it with force=True",
    ):
        convert(tmp_path / "weights.pt", out)
    assert out.read_text() == "mine"
    convert(tmp_path / "weights.pt", out, force=True)
    assert safetensors.torch.load_file(out)["a"].tolist() == [1, 1]


def test_paths_that_cannot_be(base, tmp_path):
    file = tmp_path / "weights.pt"
    native = tmp_path / "in" / "sana.pth"
    native.parent.mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("years")
    (tmp_path / "link").symlink_to(tmp_path / "full")
    (tmp_path / "nested" / "vae").mkdir(parents=True)
    (tmp_path / "nested" / "vae" / "notes.txt").write_text("years, too")
    torch.save({"a": torch.ones(2)}, file)
    torch.save(to_native(base[1].state_dict(), "linear"), native)
    safetensors.torch.save_file({"a": torch.ones(2)}, tmp_path / "done.safetensors")
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    for source, out, options, message in (
        (tmp_path / "none", "x.safetensors", {}, "none: no such file"),
        (tmp_path / "done.safetensors", "x.safetensors", {}, "is a safetensors file already"),
        (file, "x", {}, "give it a name that ends in .safetensors"),
        (file, "x.safetensors", {"base": base[0]}, "only for native SANA checkpoints, and"),
        (file, "weights.pt", {"force": True}, "is or holds"),
        (
            native,
            "x.safetensors",
            {"base": base[0]},
            "a native SANA checkpoint becomes a directory; name one",
        ),
        (
            native,
            "x",
            {},
            "is a native SANA checkpoint; name a SANA pipeline of the same width by --base DIR",
        ),
        (native, "x", {"base": tmp_path / "in"}, "model_index.json: no such file"),
        (
            native,
            "weights.pt",
            {"base": base[0], "force": True},
            "a native SANA checkpoint becomes a directory; name one",
        ),
        (native, "in", {"base": base[0], "force": True}, "is or holds"),
        (native, "full", {"base": base[0]}, "exists"),
        (
            native,
            "full",
            {"base": base[0], "force": True},
            "holds thesis.tex, which would be removed",
        ),
        (
            native,
            "nested",
            {"base": base[0], "force": True},
            "holds vae/notes.txt, which would be removed",
        ),
        (native, "link", {"base": base[0], "force": True}, "is a link"),
        (native, str(base[0]), {"base": base[0], "force": True}, "is or holds"),
        (native, str(base[0].parent), {"base": base[0], "force": True}, "is or holds"),
    ):
        with pytest.raises(InputError) as error:
            convert(source, tmp_path / out, **options)
        assert message in str(error.value), out
        assert "\n" not in str(error.value)
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before


@pytest.mark.slow
def test_a_disk_that_says_no_is_one_line_and_what_was_there_stays(base, tmp_path, monkeypatch):
    torch.save(to_native(base[1].state_dict(), "linear"), tmp_path / "sana.pth")
    torch.save({"a": torch.ones(2)}, tmp_path / "weights.pt")
    convert(tmp_path / "sana.pth", tmp_path / "out", base[0])
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()}

    def full(*_):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(conversion, "serialize_file", full)
    for source, out in (
        ("sana.pth", "out"),
        ("sana.pth", "new"),
        ("weights.pt", "new.safetensors"),
    ):
        with pytest.raises(RunError, match=r"^disk full while writing") as error:
            convert(
                tmp_path / source,
                tmp_path / out,
                base[0] if source == "sana.pth" else None,
                force=True,
            )
        assert "\n" not in str(error.value)
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()} == before
    assert len(list(tmp_path.iterdir())) == 3


def test_without_pytorch_or_with_an_old_one_it_says_what_to_install(tmp_path, monkeypatch, capsys):
    (tmp_path / "weights.pt").write_text("")
    arguments = (
        "convert",
        str(tmp_path / "weights.pt"),
        "--out",
        str(tmp_path / "out.safetensors"),
    )
    monkeypatch.setattr(torch, "__version__", "2.5.1+cpu")
    code, out, error = solrl(*arguments, monkeypatch=monkeypatch, capsys=capsys)
    assert (code, out) == (2, "")
    assert error == (
        "solrl: PyTorch 2.5.1+cpu may run code that a pickle holds (CVE-2025-32434):"
        " pip install 'solrl_jax[convert]'\n"
    )
    monkeypatch.setitem(sys.modules, "torch", None)
    code, out, error = solrl(*arguments, monkeypatch=monkeypatch, capsys=capsys)
    assert (code, out) == (2, "")
    assert error == (
        "solrl: convert needs PyTorch, which is not installed: pip install 'solrl_jax[convert]'\n"
    )


@pytest.mark.slow
def test_importing_the_command_imports_no_pytorch():
    code = (
        "import sys, solrl_jax.cli.main, solrl_jax.cli.convert; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="memory is told by /proc/self/status"
)
def test_the_whole_is_never_in_memory(tmp_path):
    def anonymous():
        """Bytes of memory that no file stands behind."""
        line = next(
            line
            for line in Path("/proc/self/status").read_text().splitlines()
            if line.startswith("RssAnon")
        )
        return int(line.split()[1]) * 1024

    tensors = {f"{i}": torch.randn(2**20) for i in range(15)} | {
        "turned": torch.randn(2**10, 2**10).T
    }
    torch.save(tensors, tmp_path / "weights.pt")
    total = sum(t.nbytes for t in tensors.values())
    del tensors
    measurements = []
    is_over = threading.Event()

    def watch():
        while not is_over.wait(0.001):
            measurements.append(anonymous())

    before = anonymous()
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        convert(tmp_path / "weights.pt", tmp_path / "out.safetensors")
    finally:
        is_over.set()
        watcher.join()
    print(
        f"{total / 1e6:.0f} MB in all, {(max(measurements) - before) / 1e6:.1f} MB in memory,"
        f" seen {len(measurements)} times"
    )
    assert len(measurements) > 5
    assert (
        max(measurements) - before < 3 * 2**22
    )  # of 16: the one that is not in a row, and room for what Python does meanwhile
