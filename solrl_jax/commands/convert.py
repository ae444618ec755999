"""`solrl convert`: a released torch pickle becomes safetensors, once; a native SANA checkpoint a transformer of diffusers.

The one file that imports PyTorch, and only when it is called: all else reads safetensors, which hold numbers and no code. A
pickle is read with `weights_only`, which runs no code of it, and mapped into memory; each tensor's bytes go from there to the
new file, without a copy of the whole. (Pages of the map count as the process's memory; the system has them back at any time.)
"""

import contextlib
import json
import os
import pickle
import re
import shutil
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from solrl_jax.backbone.locate import pipeline_files
from solrl_jax.commands.options import finish, json_option
from solrl_jax.models import sana_native
from solrl_jax.models.component import Component
from solrl_jax.models.registry import open_pipeline
from solrl_jax.models.sana import SanaConfig, SanaTransformer2DModel
from solrl_jax.models.tensor_files import read_json
from solrl_jax.storage import files
from solrl_jax.storage.errors import InputError, first_line, in_one_line

# under what checkpoints hold their tensors; the first that is there, `state_dict` before `model` as SANA's authors read them
CONTAINERS = ("state_dict", "model", "model_state_dict", "module", "net", "weights", "params")
HARMLESS = (type(None), bool, int, float, str)
DTYPES = {  # of the format, by PyTorch's names; which of them PyTorch has depends on its version
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "complex64": "C64", "bool": "BOOL",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ",
}  # fmt: skip
INSTALL = "pip install 'solrl_jax[convert]'"
INDEX, TRANSFORMER, WEIGHTS = "model_index.json", "transformer", "diffusion_pytorch_model.safetensors"

Tensors = dict[str, Any]  # of torch.Tensor, by name


def convert(file: Path, out: Path, base: Path | None = None, *, force: bool = False) -> dict[str, Any]:
    """Writes the tensors of the pickle `file` to `out`, and says what it did.

    A native SANA checkpoint becomes the directory `out` with a `transformer` in it; with `base`, a pipeline's directory, all of
    a pipeline. Any other becomes the safetensors file `out`, names and dtypes as they were. force: replace what `out` was.
    Raises InputError, and leaves no output, for files that hold more than tensors, or not those that they should.
    """
    _check_paths(file, out, base, force)
    torch = _torch()
    tensors, took, left = _unwrap(file, _load(torch, file), torch)
    _check_tensors(file, tensors, torch)
    summary = {"out": str(out), "took": took, "left_out": left}
    if sana_native.is_native(tensors):
        return summary | _write_sana(file, Path(os.path.abspath(out)), base, tensors)
    if base is not None:
        raise InputError(f"--base {base}: only for native SANA checkpoints, and {file} is none")
    if out.suffix != ".safetensors" or out.is_dir():
        raise InputError(f"--out {out}: the tensors of {file} become one file; give it a name that ends in .safetensors")
    _write(out, tensors)
    return summary | {"kind": "tensors", "tensors": len(tensors), "bytes": out.stat().st_size}


def describe(summary: Mapping[str, Any]) -> str:
    """What `convert` did, in a few lines."""
    lines = [f"took {summary['took']}"] if summary["took"] else []
    left = [*summary["left_out"], *summary.get("ignored", [])]
    lines += [f"left out {', '.join(left)}"] if left else []
    if summary["kind"] == "sana":
        config = summary["config"]
        lines.append(f"SANA of {config['num_layers']} layers, {summary['ffn']} MLPs, {summary['parameters']:,} parameters")
        heads = config["num_cross_attention_heads"]
        lines.append(f"{heads} heads of the attention to the text, as {summary['heads_of']} has them")
    return "\n".join([*lines, f"{summary['tensors']} tensor(s), {summary['bytes'] / 1e9:.2f} GB: {summary['out']}"])


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise InputError(f"convert reads pickles with PyTorch, which is not here: {INSTALL}") from error
    if tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < (2, 6):
        raise InputError(f"PyTorch {torch.__version__} may run code that a pickle holds (CVE-2025-32434): {INSTALL}")
    return torch


def _check_paths(file: Path, out: Path, base: Path | None, force: bool) -> None:
    """Raises InputError for paths that cannot be, or where something would be lost."""
    if not file.is_file():
        raise InputError(f"{file}: no such file")
    if file.suffix == ".safetensors":
        raise InputError(f"{file}: is a safetensors file already")
    if base is not None:
        with in_one_line():
            kind = read_json(base / INDEX).get("_class_name")
        if kind != "SanaPipeline":
            raise InputError(f"--base {base}: {INDEX} has _class_name={kind!r}; accepted: 'SanaPipeline'")
    for path in (file, *([base] if base else [])):
        if out.resolve() in (path.resolve(), *path.resolve().parents):
            raise InputError(f"--out {out}: is or holds {path}, which is read; name another one")
    if os.path.lexists(out) and not force:
        raise InputError(f"--out {out}: exists; name another one, or add --force to replace it")
    if out.is_symlink():
        raise InputError(f"--out {out}: is a link; name what it is to be")


def _load(torch: Any, file: Path) -> Any:
    """What the pickle holds, tensors mapped from the file where its format (a zip archive, since PyTorch 1.6) allows."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what is refused just after
            return torch.load(file, weights_only=True, mmap=zipfile.is_zipfile(file), map_location="cpu")
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL ([\w.]+)|Unsupported operand \d+", str(error))
        what = f"it asks for {found[1]}" if found and found[1] else found[0] if found else "of an unknown form"
        raise InputError(f"{file}: refused, because reading it may run code ({what}); accepted are tensors alone") from error
    except Exception as error:  # a damaged file raises a dozen unrelated kinds, some with advice that is not ours
        reason = first_line(error).split(". ")[0]
        raise InputError(f"{file}: not a readable torch file ({type(error).__name__}: {reason})") from error


def _unwrap(file: Path, value: Any, torch: Any) -> tuple[Tensors, str | None, list[str]]:
    """The tensors, under which key they were (dots between nested ones; None: at the top), and what is left out beside them.

    Raises InputError listing the entries among the tensors that are neither tensors nor plain numbers and strings.
    """
    took, left = "", []
    while isinstance(value, Mapping) and (key := _container(value, torch)) is not None:
        left += [f"{took}{k} ({type(v).__name__})" for k, v in value.items() if k != key]
        took, value = f"{took}{key}.", value[key]
    if not isinstance(value, Mapping):
        raise InputError(f"{file}: holds one {type(value).__name__}; accepted is a dictionary of tensors")
    strange: list[str] = []
    tensors: Tensors = {}
    for name, entry in value.items():
        if isinstance(entry, torch.Tensor) and isinstance(name, str):
            tensors[name] = entry.detach()
        else:
            (left if isinstance(entry, HARMLESS) else strange).append(f"{took}{name} ({type(entry).__name__})")
    if strange:
        raise InputError(f"{file}: {len(strange)} entries are no named tensors: {', '.join(strange)}")
    if not tensors:
        raise InputError(f"{file}: holds no tensor{'; there is ' + ', '.join(left) if left else ''}")
    return tensors, took.removesuffix(".") or None, left


def _container(value: Mapping[Any, Any], torch: Any) -> str | None:
    """The key below which a checkpoint has its tensors: a known name, or the only one with any; None if they are here."""
    for key in CONTAINERS:
        if isinstance(value.get(key), Mapping):
            return key
    has_tensors = lambda entries: any(isinstance(entry, torch.Tensor) for entry in entries.values())
    inside = [key for key, entry in value.items() if isinstance(entry, Mapping) and has_tensors(entry)]
    return inside[0] if len(inside) == 1 and not has_tensors(value) else None


def _check_tensors(file: Path, tensors: Tensors, torch: Any) -> None:
    """Raises InputError listing the tensors that a safetensors file cannot hold."""
    known = {getattr(torch, name, None) for name in DTYPES}
    strange = [f"{name} is {t.dtype}" for name, t in tensors.items() if t.dtype not in known]
    strange += [f"{name} is {t.layout}" for name, t in tensors.items() if t.layout != torch.strided]
    strange += [f"{name} is on {t.device}" for name, t in tensors.items() if t.device.type != "cpu"]
    if strange:
        raise InputError(f"{file}: {len(strange)} tensor(s) that safetensors cannot hold: {', '.join(strange)}")


def _write_sana(file: Path, out: Path, base: Path | None, tensors: Tensors) -> dict[str, Any]:
    """The directory `out` of a native SANA checkpoint: checked by the network's own loader, then named."""
    with in_one_line(lambda said: f"--base {base}: {said}"):
        config = None if base is None else SanaConfig.from_dict(read_json(base / TRANSFORMER / "config.json"))
    grid = tensors.get(sana_native.POSITIONS)
    try:
        shapes = {name: tuple(t.shape) for name, t in tensors.items()}
        plan = sana_native.plan(shapes, config, grid is not None and bool(grid.any()))
    except ValueError as error:
        raise InputError(f"{file}: {error}") from error
    copied = [] if base is None else _component_files(base)
    _check_directory(out, {TRANSFORMER, *(name.split("/")[0] for name in copied)})
    with _directory(out) as folder:
        files.atomic_write(folder / TRANSFORMER / "config.json", json.dumps(plan.config, indent=2) + "\n")
        for name in copied:
            _copy(Path(base or "", name), folder / name)
        with in_one_line(
            lambda said: said.replace(str(folder), str(base or out))
        ):  # what does not fit is known before the weights are written
            network = _network(folder) if base is None else open_pipeline(folder).transformer
        # parts of tensors are views: still nothing is read
        parts = {p.name: tensors[p.source][p.start : p.stop].reshape(p.shape) for p in plan.parts}
        _write(folder / TRANSFORMER / WEIGHTS, parts)
        with in_one_line(lambda said: said.replace(str(folder), str(out))):
            network.check()
    return {
        "kind": "sana",
        "tensors": len(parts),
        "bytes": (out / TRANSFORMER / WEIGHTS).stat().st_size,
        "parameters": plan.parameters,
        "ffn": plan.ffn,
        "ignored": list(plan.ignored),
        "heads_of": str(base or f"the authors' network of width {plan.config['cross_attention_dim']}"),
        "config": plan.config,
    }


def _network(folder: Path) -> Component:
    """The transformer in `folder`, by its config alone."""
    config = SanaConfig.from_dict(read_json(folder / TRANSFORMER / "config.json"))
    return Component.of(folder / TRANSFORMER, lambda rngs: SanaTransformer2DModel(config, rngs=rngs))


def _component_files(base: Path) -> list[str]:
    """What of a pipeline's directory makes it one, except for the transformer; names relative to it."""
    names = [path.relative_to(base).as_posix() for path in base.rglob("*") if path.is_file()]
    return [name for name in pipeline_files(names) if not name.startswith(f"{TRANSFORMER}/")]


def _check_directory(out: Path, names: set[str]) -> None:
    """Raises InputError if `out` is no name for a directory, or a directory with more in it than `names`."""
    if out.suffix == ".safetensors" or (out.exists() and not out.is_dir()):
        raise InputError(f"--out {out}: a native SANA checkpoint becomes a directory; name one")
    if out.is_dir() and (strange := sorted({path.name for path in out.iterdir()} - names)):
        raise InputError(f"--out {out}: holds {', '.join(strange)}, which would be removed; name another directory")


@contextlib.contextmanager
def _directory(out: Path) -> Iterator[Path]:
    """A directory to fill, which becomes `out` as a whole, in place of what `out` was; nothing is left of a failure."""
    temporary, replaced = (out.with_name(prefix + out.name) for prefix in (files.PARTIAL, files.REMOVING))
    with files.writing(out):
        for left in (temporary, replaced):  # by a conversion that was killed
            shutil.rmtree(left, ignore_errors=True)
        try:
            temporary.mkdir(parents=True)
            yield temporary
            files.publish(temporary, out, replaced=replaced)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _copy(source: Path, target: Path) -> None:
    """Weights get a second name where the file system can, and take no room; all else, which people edit, is copied."""
    target.parent.mkdir(parents=True, exist_ok=True)
    source = source.resolve()  # a hub cache holds links
    if target.suffix == ".safetensors":
        with contextlib.suppress(OSError):
            os.link(source, target)
            return
    shutil.copyfile(source, target)
    files.sync(target)


def _write(path: Path, tensors: Tensors) -> None:
    """A safetensors file, tensor by tensor: no more than one is in memory, and one only if it does not lie in a row.

    Tensors that shared memory each get bytes of their own. (The library's own writer takes all tensors at once.)
    """
    # wide elements first, as the library does it, so that each tensor starts at a multiple of its element's size
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        t = tensors[name]
        start, end = end, end + t.numel() * t.element_size()
        dtype = DTYPES[str(t.dtype).removeprefix("torch.")]
        header[name] = {"dtype": dtype, "shape": list(t.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with files.atomic(path) as partial, partial.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            stream.write(_bytes(tensors[name]))


def _bytes(tensor: Any) -> memoryview:
    """A tensor's numbers in the order of its axes, as bytes: NumPy does not know all dtypes."""
    import torch

    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


@click.command("convert")
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="A .safetensors file; for SANA, a directory.")
@click.option("--base", type=click.Path(path_type=Path), help="SANA: a pipeline's directory, whose other parts are added.")
@click.option("--force", is_flag=True, help="Replace what is there.")
@json_option
def command(file: Path, out: Path, base: Path | None, force: bool, as_json: bool) -> None:
    """Turn a torch pickle (.pth, .pt, .bin, .ckpt) into safetensors, once; a native SANA checkpoint into a transformer.

    \b
    solrl convert HPS_v2.1_compressed.pt --out HPS_v2.1.safetensors
    solrl convert SANA_LinearFFN.pth --out sana-linear --base Sana_1600M_1024px_BF16_diffusers
    """
    summary = convert(file, out, base, force=force)
    finish(summary, as_json, describe(summary))
