"""`solrl convert`: converts torch pickles to safetensors, and native SANA checkpoints to diffusers.

Only this file imports PyTorch, and only when it is called. All others read safetensors, which hold
numbers and no code. A pickle is read with `weights_only`, which runs none of its code. It is mapped
into memory, and its bytes go from there to the new file, so it is never copied as a whole.
"""

import contextlib
import dataclasses
import json
import os
import pickle
import re
import shutil
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from safetensors import SafetensorError, TensorSpec, serialize_file

from solrl_jax.cli.options import PATH, finish, force_option, json_option
from solrl_jax.errors import InputError, as_input_error, first_line
from solrl_jax.models.loading.tensor_files import read_json
from solrl_jax.models.locate import pipeline_files
from solrl_jax.models.registry import open_pipeline
from solrl_jax.models.sana import native
from solrl_jax.models.sana.transformer import SanaConfig
from solrl_jax.storage import files

# Keys under which checkpoints hold their tensors. The first one found is used: SANA's authors read
# `state_dict` before `model`.
CONTAINERS = ("state_dict", "model", "model_state_dict", "module", "net", "weights", "params")
MOST_NESTED = 8  # dictionaries inside each other
MOST_GROWTH = 4  # bytes of tensors per byte of the file
# Types of entries that are left out. Others are refused.
HARMLESS = (type(None), bool, int, float, str)
INSTALL = "pip install 'solrl_jax[convert]'"
INDEX = "model_index.json"
TRANSFORMER = "transformer"
WEIGHTS = "diffusion_pytorch_model.safetensors"

Tensors = dict[str, Any]  # of torch.Tensor, by name


def convert(
    file: Path, out: Path, base: Path | None = None, *, force: bool = False
) -> dict[str, Any]:
    """Writes the tensors of a torch pickle as safetensors, with PyTorch.

    A file of a SANA transformer in the format of SANA's authors (a "native" checkpoint, recognized
    by the names of its tensors) becomes a directory that diffusers can load. Any other file becomes
    one safetensors file with the same tensors.

    Args:
        file: The pickle that `torch.save` wrote: a dictionary of tensors, which may lie under a key
            such as "state_dict".
        out: The file to write, which must end in .safetensors; for a native SANA checkpoint, the
            directory. Missing parent directories are created.
        base: A directory of a SANA pipeline of the same width, in the format of diffusers. Its text
            encoder, autoencoder and scheduler are copied to `out`, and its configuration completes
            that of the transformer. Required for a native SANA checkpoint, and None for all other
            files.
        force: Whether `out` is replaced if it exists. A directory is replaced as a whole, and only
            if each file in it, at any depth, has the path of a file in the new directory.

    Returns:
        A dict with these keys:

        * "out": the path that was written, as text.
        * "took": the key that the tensors were under, e.g. "state_dict"; None if there was none.
        * "left_out": a text "KEY (TYPE)" for each entry that was not written: those beside the
            dictionary of the tensors, and None, booleans, numbers and text in this dictionary.
        * "kind": "sana" for a native SANA checkpoint, else "tensors".
        * "tensors" and "bytes": the number of tensors that were written, and the size of their
            file.
        * Only for SANA: "parameters" (the number of values in all written tensors), "ffn" (the
            layers of the MLPs in the pickle: "conv", 1x1 convolutions, or "linear", linear layers),
            "ignored" (names of tensors that the network does not need) and "config" (the content of
            the transformer's config.json).

    Raises:
        InputError: If a path cannot be used, `out` exists and may not be replaced, PyTorch is
            missing or too old, the pickle may run code, or it does not hold the expected tensors.
            Then `out` is as it was.
        RunError: If the result cannot be written to the disk.
    """
    _check_paths(file, out, base, force)
    torch = _torch()
    tensors, container, left_out = _unwrap(file, _load(torch, file), torch)
    _check_tensors(file, tensors, torch)
    summary = {"out": str(out), "took": container, "left_out": left_out}
    if native.is_native(tensors):
        if base is None:
            raise InputError(
                f"{file}: is a native SANA checkpoint; name a SANA pipeline of the same width by "
                "--base DIR"
            )
        return summary | _write_sana(file, Path(os.path.abspath(out)), base, tensors)
    if base is not None:
        raise InputError(f"--base {base}: only for native SANA checkpoints, and {file} is none")
    if out.suffix != ".safetensors" or out.is_dir():
        raise InputError(
            f"--out {out}: the tensors of {file} become one file; give it a name that ends in "
            ".safetensors"
        )
    _write(out, tensors)
    return summary | {"kind": "tensors", "tensors": len(tensors), "bytes": out.stat().st_size}


def describe(summary: Mapping[str, Any]) -> str:
    """Formats the result of `convert` for a terminal.

    Args:
        summary: The result of `convert`: a dict with "out", "took", "left_out", "kind", "tensors",
            "bytes" and, for SANA, "parameters", "ffn", "ignored" and "config".

    Returns:
        Up to four lines: the key that the tensors were under ("took", unless it is None), the
        entries that were left out (those of "left_out" and "ignored", if any), the SANA network
        (only for SANA), and the number and size of the tensors with the path.
    """
    lines = [f"took {summary['took']}"] if summary["took"] else []
    left_out = [*summary["left_out"], *summary.get("ignored", [])]
    lines += [f"left out {', '.join(left_out)}"] if left_out else []
    if summary["kind"] == "sana":
        layers = summary["config"]["num_layers"]
        lines.append(
            f"SANA of {layers} layers, {summary['ffn']} MLPs, {summary['parameters']:,} parameters"
        )
    return "\n".join(
        [
            *lines,
            f"{summary['tensors']} tensor(s), {summary['bytes'] / 1e9:.2f} GB: {summary['out']}",
        ]
    )


def _torch() -> Any:
    """Imports PyTorch.

    Returns:
        The module `torch`.

    Raises:
        InputError: If PyTorch is not installed or is older than 2.6. Older versions may run code
            that a pickle holds.
    """
    try:
        import torch
    except ImportError as error:
        raise InputError(f"convert needs PyTorch, which is not installed: {INSTALL}") from error
    if tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < (2, 6):
        raise InputError(
            f"PyTorch {torch.__version__} may run code that a pickle holds (CVE-2025-32434): "
            f"{INSTALL}"
        )
    return torch


def _check_paths(file: Path, out: Path, base: Path | None, force: bool) -> None:
    """Checks the paths of `convert` before anything is read, and creates the parent of `out`.

    Args:
        file: The pickle to read.
        out: The file or directory to write.
        base: The directory of a SANA pipeline, or None.
        force: Whether `out` may exist already.

    Raises:
        InputError: If `file` is missing or ends in .safetensors, `base` is not the directory of a
            SANA pipeline, or `out` cannot be used: `out` exists without `force`, is a link (even
            with `force`), or is or contains `file` or `base`, or its parent directory cannot be
            created or written to.
    """
    if not file.is_file():
        raise InputError(f"{file}: no such file")
    if file.suffix == ".safetensors":
        raise InputError(f"{file}: is a safetensors file already")
    if base is not None:
        with as_input_error(lambda message: f"--base {base}: {message}"):
            kind = read_json(base / INDEX).get("_class_name")
        if kind != "SanaPipeline":
            raise InputError(
                f"--base {base}: {INDEX} has _class_name={kind!r}; accepted: 'SanaPipeline'"
            )
    for path in (file, *([base] if base else [])):
        if out.resolve() in (path.resolve(), *path.resolve().parents):
            raise InputError(f"--out {out}: is or holds {path}, which is read; name another one")
    files.refuse_existing("out", [out], force, folders=True)
    if out.is_symlink():
        raise InputError(f"--out {out}: is a link; name the output path itself")
    files.writable_directory(out.absolute().parent, "--out")


def _load(torch: Any, file: Path) -> Any:
    """Loads a pickle with PyTorch, without running code that the pickle may hold.

    Where the file format allows it, the tensors are mapped from the file and take no memory.

    Args:
        torch: The module `torch`.
        file: The pickle.

    Returns:
        The unpickled value, usually a dictionary. Its tensors are on the CPU.

    Raises:
        InputError: If the file is missing or damaged, is a zip archive with compressed entries, or
            cannot be read without running code.
    """
    try:
        if zipfile.is_zipfile(file):
            # PyTorch does not compress. A compressed file could unpack to 1000 times its size.
            with zipfile.ZipFile(file) as archive:
                if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                    raise ValueError("it is compressed, which torch.save does not do")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickles that are refused below
            return torch.load(
                file, weights_only=True, mmap=zipfile.is_zipfile(file), map_location="cpu"
            )
    except pickle.UnpicklingError as error:
        match = re.search(r"GLOBAL ([\w.]+)|Unsupported operand \d+", str(error))
        detail = "of an unknown form"
        if match:
            detail = f"it asks for {match[1]}" if match[1] else match[0]
        raise InputError(
            f"{file}: refused, because reading it may run code ({detail}); accepted are tensors "
            "alone"
        ) from error
    except Exception as error:
        # A damaged file raises a dozen unrelated types, some with advice of PyTorch's that does not
        # apply here. The first sentence is kept.
        reason = first_line(error).split(". ")[0]
        raise InputError(
            f"{file}: not a readable torch file ({type(error).__name__}: {reason})"
        ) from error


def _unwrap(file: Path, value: Any, torch: Any) -> tuple[Tensors, str | None, list[str]]:
    """Finds the tensors in the value of a pickle, which may lie in dictionaries inside each other.

    Args:
        file: The pickle, which error messages name.
        value: The unpickled value.
        torch: The module `torch`.

    Returns:
        A tuple of three.

        * The tensors by name. If several dictionaries hold tensors, `_container` chooses one.
        * The key that they were under, e.g. "state_dict", with dots between nested keys. None if
            `value` itself is the dictionary of the tensors.
        * A text "KEY (TYPE)", with dots in KEY likewise, for each entry that is left out: those
            beside the dictionary of the tensors, and None, booleans, numbers and text in it.

    Raises:
        InputError: If the value is not a dictionary with tensors, if too many dictionaries lie
            inside each other (`MOST_NESTED`), or if the dictionary of the tensors also holds
            anything but None, booleans, numbers and text, or a tensor whose key is no name. Entries
            beside that dictionary may be of any type.
    """
    prefix = ""
    depth = 0
    left_out = []
    while isinstance(value, Mapping) and (key := _container(value, torch)) is not None:
        depth += 1
        if depth > MOST_NESTED:
            raise InputError(f"{file}: its dictionaries are more than {MOST_NESTED} levels deep")
        left_out += [f"{prefix}{k} ({type(v).__name__})" for k, v in value.items() if k != key]
        prefix = f"{prefix}{key}."
        value = value[key]
    if not isinstance(value, Mapping):
        raise InputError(
            f"{file}: holds one {type(value).__name__}; accepted is a dictionary of tensors"
        )
    tensors = {
        k: v.detach() for k, v in value.items() if isinstance(v, torch.Tensor) and _is_name(k)
    }
    others = {f"{prefix}{k} ({type(v).__name__})": v for k, v in value.items() if k not in tensors}
    if refused := [name for name, v in others.items() if not isinstance(v, HARMLESS)]:
        raise InputError(
            f"{file}: {len(refused)} entries are no named tensors: {', '.join(refused)}"
        )
    left_out += others
    if not tensors:
        raise InputError(
            f"{file}: holds no tensor{'; there is ' + ', '.join(left_out) if left_out else ''}"
        )
    return tensors, prefix.removesuffix(".") or None, left_out


def _is_name(key: Any) -> bool:
    """Returns whether a key can be the name of a tensor in a safetensors file.

    Args:
        key: A key of a dictionary in the pickle. Names are text that UTF-8 can encode, except
            "__metadata__", which safetensors reserves.
    """
    return (
        isinstance(key, str)
        and key != "__metadata__"
        and key.encode(errors="replace").decode() == key
    )


def _container(value: Mapping[Any, Any], torch: Any) -> str | None:
    """Returns the key under which a dictionary holds the dictionary of a checkpoint's tensors.

    Args:
        value: A dictionary in the pickle.
        torch: The module `torch`.

    Returns:
        The first usual key, such as "state_dict" or "model" (`CONTAINERS`), whose value is a
        dictionary, even if that dictionary is empty or `value` holds tensors itself. If there is no
        such key: the only key whose value is a dictionary with at least one tensor, provided that
        `value` itself holds no tensor. Otherwise None.
    """
    if known := [key for key in CONTAINERS if isinstance(value.get(key), Mapping)]:
        return known[0]

    def has_tensors(entries):
        return any(isinstance(entry, torch.Tensor) for entry in entries.values())

    inside = [
        key for key, entry in value.items() if isinstance(entry, Mapping) and has_tensors(entry)
    ]
    return inside[0] if len(inside) == 1 and not has_tensors(value) else None


def _check_tensors(file: Path, tensors: Tensors, torch: Any) -> None:
    """Checks that a safetensors file can hold all tensors of a pickle.

    Args:
        file: The pickle.
        tensors: Its tensors by name.
        torch: The module `torch`.

    Raises:
        InputError: If a tensor is sparse, not on the CPU or of a dtype that safetensors lacks; or
            if the tensors together would take more than four times the size of the pickle, which
            happens if they are views of the same memory.
    """
    if (
        total := sum(t.nbytes for t in tensors.values() if t.layout == torch.strided)
    ) > MOST_GROWTH * file.stat().st_size:
        raise InputError(
            f"{file}: its tensors claim {total} bytes, and the file has {file.stat().st_size}"
        )
    refused = []
    for name, t in tensors.items():
        try:
            if t.layout != torch.strided or t.device.type != "cpu":
                refused.append(f"{name} is {t.layout} on {t.device}")
            else:
                _spec(t)
        except (
            SafetensorError,
            RuntimeError,
        ):  # the latter for nested tensors, which have no shape
            refused.append(f"{name} is {t.dtype}")
    if refused:
        raise InputError(
            f"{file}: {len(refused)} tensor(s) that safetensors cannot hold: {', '.join(refused)}"
        )


def _write_sana(file: Path, out: Path, base: Path, tensors: Tensors) -> dict[str, Any]:
    """Writes a native SANA checkpoint as the directory of a pipeline in the format of diffusers.

    A native checkpoint is one in the format of SANA's authors. The directory appears only when it
    is complete.

    Args:
        file: The pickle, which error messages name.
        out: The directory to write. An existing one is replaced (`_check_directory`).
        base: The directory of a SANA pipeline, from which everything but the transformer is copied.
        tensors: The tensors of the checkpoint by name.

    Returns:
        A part of the result of `convert`: "kind" ("sana"), "tensors" (the number of tensors that
        were written), "bytes" (the size of their file), "parameters" (the number of values in these
        tensors), "ffn" (the layers of the MLPs in the checkpoint: "conv", 1x1 convolutions, or
        "linear", linear layers), "ignored" (names of tensors that the network does not need) and
        "config" (the content of the transformer's config.json).

    Raises:
        InputError: If `base` or the tensors do not fit the network, or if `out` holds files that
            would be lost. Then `out` is as it was.
        RunError: If the directory cannot be written to the disk.
    """
    with as_input_error(lambda message: f"--base {base}: {message}"):
        config = SanaConfig.read(base / TRANSFORMER)
    with as_input_error(lambda message: f"{file}: {message}"):
        plan = native.plan_conversion({name: tuple(t.shape) for name, t in tensors.items()}, config)
    copied = _component_files(base)
    fields = {"_class_name": plan.config.network, **dataclasses.asdict(plan.config)}
    _check_directory(out, {f"{TRANSFORMER}/config.json", f"{TRANSFORMER}/{WEIGHTS}", *copied})
    with files.atomic_directory(out) as folder:
        files.atomic_write(
            folder / TRANSFORMER / "config.json", json.dumps(fields, indent=2) + "\n"
        )
        with files.disk_errors_as_run_errors(out):
            for name, source in copied.items():
                _copy(source, folder / name)
        # checked before the weights are written, which takes long
        with as_input_error(lambda message: message.replace(str(folder), str(base))):
            network = open_pipeline(folder).transformer
        # views: no weight is read yet
        parts = {p.name: tensors[p.source][p.start : p.stop].reshape(p.shape) for p in plan.parts}
        _write(folder / TRANSFORMER / WEIGHTS, parts)
        with as_input_error(lambda message: message.replace(str(folder), str(out))):
            network.check_files()
    return {
        "kind": "sana",
        "tensors": len(parts),
        "bytes": (out / TRANSFORMER / WEIGHTS).stat().st_size,
        "parameters": plan.num_parameters,
        "ffn": plan.ffn,
        "ignored": list(plan.ignored),
        "config": fields,
    }


def _component_files(base: Path) -> dict[str, Path]:
    """Returns the files of a pipeline that loading it needs (`pipeline_files`: configurations,
    tokenizers and safetensors weights), without those of its transformer.

    Args:
        base: The directory of the pipeline.

    Returns:
        A dict from the path of each file within the directory, e.g. "vae/config.json" or
        "model_index.json", to its whole path.
    """
    paths = {path.relative_to(base).as_posix(): path for path in base.rglob("*") if path.is_file()}
    return {
        name: paths[name]
        for name in pipeline_files(list(paths))
        if not name.startswith(f"{TRANSFORMER}/")
    }


def _check_directory(out: Path, names: set[str]) -> None:
    """Checks that a directory contains no files but those that will be written there.

    Args:
        out: The directory to replace. It need not exist.
        names: The paths, within it, of the files that it will contain, e.g. "vae/config.json".

    Raises:
        InputError: If `out` or a folder in it contains another file (other folders without files
            are accepted), or if `out` is a file or ends in .safetensors, as files do.
    """
    if out.suffix == ".safetensors" or (out.exists() and not out.is_dir()):
        raise InputError(f"--out {out}: a native SANA checkpoint becomes a directory; name one")
    present = {path.relative_to(out).as_posix() for path in out.rglob("*") if not path.is_dir()}
    if refused := sorted(present - names):
        others = f" and {len(refused) - 3} more" if len(refused) > 3 else ""
        raise InputError(
            f"--out {out}: holds {', '.join(refused[:3])}{others}, which would be removed; name "
            "another directory"
        )


def _copy(source: Path, target: Path) -> None:
    """Copies a file, and creates the directories above the copy.

    If `target` ends in .safetensors, it becomes a hard link to the file where possible, which takes
    no space. Otherwise the content is copied, and synced to the disk.

    Args:
        source: The file to copy. If it is a link, the file that it leads to is copied.
        target: The path of the copy, which should not exist yet.

    Raises:
        OSError: If the copy cannot be written to the disk.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    source = source.resolve()  # a hub cache holds links
    if target.suffix == ".safetensors":
        with contextlib.suppress(OSError):
            os.link(source, target)
            return
    shutil.copyfile(source, target)
    files.sync(target)


def _write(path: Path, tensors: Tensors) -> None:
    """Writes tensors to a safetensors file. The file appears only when it is complete.

    Args:
        path: The file to write. An existing one is replaced.
        tensors: PyTorch tensors on the CPU, by the names that they get in the file. They may share
            memory. Those that are not contiguous are first copied in memory, all of them at once.

    Raises:
        RunError: If the file cannot be written to the disk.
    """
    whole = {name: t.contiguous() for name, t in tensors.items()}
    with files.atomic(path) as partial:
        serialize_file({name: _spec(t) for name, t in whole.items()}, partial, {"format": "pt"})


def _spec(t: Any) -> TensorSpec:
    """Describes a tensor of PyTorch so that safetensors can write it without a copy.

    Args:
        t: A contiguous tensor on the CPU. It must stay alive while the result is used.

    Returns:
        The description: dtype, shape, memory address and number of bytes.

    Raises:
        SafetensorError: If safetensors lacks the dtype.
    """
    dtype = str(t.dtype).removeprefix("torch.")
    return TensorSpec(dtype=dtype, shape=t.shape, data_ptr=t.data_ptr(), data_len=t.nbytes)


@click.command("convert")
@click.argument("file", metavar="FILE", type=PATH)
@click.option(
    "--out", required=True, type=PATH, help="Output file, .safetensors; for SANA, a directory."
)
@click.option(
    "--base", type=PATH, help="For SANA: a pipeline's directory, whose other components are added."
)
@force_option
@json_option
def command(file: Path, out: Path, base: Path | None, force: bool, as_json: bool) -> None:
    """Convert a torch pickle (.pth, .pt, .bin, .ckpt) to safetensors.

    A native SANA checkpoint becomes a pipeline of diffusers.

    \b
    solrl convert HPS_v2.1_compressed.pt --out weights/HPS_v2.1_compressed.safetensors
    solrl convert SANA_LinearFFN.pth --out sana-linear --base Sana_1600M_1024px_BF16_diffusers

    \f
    Args:
        file: The pickle to read.
        out: The safetensors file to write, or for a native SANA checkpoint a directory.
        base: The directory of a SANA pipeline of equal width, of which all components but the
            transformer are copied to `out`. Required for a native SANA checkpoint, and None for all
            other files.
        force: Whether existing files are replaced.
        as_json: Whether to print the result of `convert` as one line of JSON in place of text.

    Raises:
        InputError: If a path cannot be used or exists without `force`, PyTorch is missing or too
            old, reading the file might run code, `base` is missing or given for another kind of
            file, the dictionary of the tensors has entries other than tensors and plain values, or
            the tensors of a native SANA checkpoint do not fit the network.
        RunError: If the result cannot be written to the disk.
    """
    summary = convert(file, out, base, force=force)
    finish(summary, as_json, describe(summary))
