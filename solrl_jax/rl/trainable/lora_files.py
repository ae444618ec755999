"""LoRA files that other tools read: the safetensors file of diffusers and the directory of PEFT.

Both hold two tensors per linear layer under its released name: `lora_A.weight` [rank, in] and
`lora_B.weight` [out, rank], with two further axes of size one for a 1x1 convolution. They are our
`a` and `b` transposed, one pair per layer where we stack layers. The weight gains
`alpha / rank * B A`. The two formats differ in the keys and in where alpha is:

              key                                     alpha
    diffusers transformer.MODULE.lora_A.weight        JSON in the header's `lora_adapter_metadata`
    PEFT      base_model.model.MODULE.lora_A.weight   `adapter_config.json` beside the tensors

diffusers takes alpha = rank where the header has no metadata. Its SANA and SD3 pipelines refuse the
keys `MODULE.alpha` that other tools write, and so does its FLUX pipeline beside the metadata. Such
keys are read here and not written.
"""

import contextlib
import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from solrl_jax.errors import InputError, RunError, first_line, in_one_line
from solrl_jax.models.loading.tensor_files import STORED_DTYPES, read_header
from solrl_jax.rl.trainable import lora_settings
from solrl_jax.rl.trainable.lora_settings import PEFT_CONFIG, PEFT_FILE, LoraSettings, Table
from solrl_jax.rl.trainable.trainable import Adapter, Trainable
from solrl_jax.storage import files

DIFFUSERS_FILE = "pytorch_lora_weights.safetensors"  # the default name in diffusers
_A = "lora_A.weight"
_B = "lora_B.weight"
_ALPHA = "alpha"
_KEY = re.compile(
    r"(?:transformer\.|base_model\.model\.)?(?P<module>.+)\.(?P<part>lora_[AB]\.weight|alpha)"
)


Tensors = dict[str, np.ndarray]
Shapes = Mapping[str, tuple[int, ...]]  # the shapes of the tensors in a file, by key


def check_target(path: Path, form: Literal["diffusers", "peft"]) -> None:
    """Checks that a LoRA can be exported to a path. The exports call it themselves.

    Args:
        path: The file ("diffusers") or the directory ("peft") to be written.
        form: The format of the export.

    Raises:
        InputError: If the path does not suit the format, or is a directory with other files.
    """
    if form == "diffusers":
        if path.suffix != ".safetensors" or path.is_dir():
            raise InputError(
                f"{path}: a LoRA of diffusers is one file; give it a name that ends in .safetensors"
            )
    elif path.exists() and not path.is_dir():
        raise InputError(f"{path}: is a file; PEFT's format is a directory, name another one")
    elif path.is_dir() and (
        strange := sorted({f.name for f in path.iterdir()} - {PEFT_FILE, PEFT_CONFIG})
    ):
        raise InputError(
            f"{path}: holds {', '.join(strange)}, which an export would remove; name another directory"
        )


def export_diffusers(
    path: Path,
    adapters: Trainable,
    settings: LoraSettings,
    table: Table,
    *,
    dtype: Any = jnp.float32,
    fold: bool = False,
) -> None:
    """Writes a file that `load_lora_weights` of the diffusers pipelines reads.

    Args:
        path: The file to write. It ends in .safetensors and is replaced if it exists.
        adapters: The trainable parameters, which must all be LoRA adapters.
        settings: Rank and alpha.
        table: The table of all parameters of the network.
        dtype: The dtype of the tensors.
        fold: Whether B is multiplied by alpha / rank and alpha is written as the rank, for readers
            that ignore the header.

    Raises:
        InputError: If the adapters do not fit the network, are not finite in `dtype`, or change
            nothing.
    """
    check_target(path, "diffusers")
    lora = _of_lora(adapters)
    if fold:
        lora = {p: {"a": ab["a"], "b": settings.scale * ab["b"]} for p, ab in lora.items()}
        settings = LoraSettings(settings.rank, float(settings.rank))
    modules = _to_modules(lora, settings, table)
    prefix = lora_settings.DIFFUSERS
    config = lora_settings.peft_config(modules, settings, table)
    said = json.dumps({f"{prefix}{k}": v for k, v in config.items()}, indent=2, sort_keys=True)
    with files.atomic(path) as partial:
        _save(partial, path, modules, prefix, dtype, {lora_settings.METADATA: said})


def export_peft(
    folder: Path,
    adapters: Trainable,
    settings: LoraSettings,
    table: Table,
    *,
    dtype: Any = jnp.float32,
) -> None:
    """Writes a directory that `PeftModel.from_pretrained` reads onto the transformer.

    The directory appears whole, by a rename. An earlier export in its place is replaced.

    Args:
        folder: The directory to write.
        adapters: The trainable parameters, which must all be LoRA adapters.
        settings: Rank and alpha.
        table: The table of all parameters of the network.
        dtype: The dtype of the tensors.

    Raises:
        InputError: As `export_diffusers`, or if the directory holds other files.
    """
    folder = folder.absolute()
    check_target(folder, "peft")
    lora = _of_lora(adapters)
    modules = _to_modules(lora, settings, table)
    config = lora_settings.peft_config(modules, settings, table) | {"inference_mode": True}
    with files.atomic_directory(folder) as filled:
        with files.atomic(filled / PEFT_FILE) as partial:
            _save(partial, folder, modules, lora_settings.PEFT, dtype, {})
        files.atomic_write(
            filled / PEFT_CONFIG, json.dumps(config, indent=2, sort_keys=True) + "\n"
        )


def import_lora(path: Path, table: Table) -> tuple[dict[str, Adapter], LoraSettings]:
    """Reads a LoRA file of diffusers or a LoRA directory of PEFT.

    Names and shapes are checked before any tensor is read. A linear layer that the file does not
    mention gets no adapter. Where the file has only some layers of a stack, both factors of the
    others are zero, which neither changes anything nor trains; an export leaves them out again.

    Args:
        path: The file or the directory.
        table: The table of all parameters of the network that the adapters are for.

    Returns:
        The adapters by path, float32, and their rank and alpha.

    Raises:
        InputError: If keys belong to no linear layer of the network, shapes do not fit, values are
            not finite, or modules differ in rank or alpha. It lists every offender in one line.
    """
    file = _file(path)
    slots = _slots(table)
    with _opened(file) as (shapes, handle):
        modules, alphas, strange = _by_module(shapes, slots)
        if strange:
            raise InputError(
                f"{file}: {len(strange)} key(s) fit no linear of this network: {', '.join(strange)}"
            )
        if not modules:
            raise InputError(f"{file}: holds no adapter (keys that end in .{_A} and .{_B})")
        rank = _check(file, shapes, modules, slots)
        stated = {
            module: float(handle.get_tensor(key).reshape(())) for module, key in alphas.items()
        }
        config = lora_settings.read_config(file, shapes, handle.metadata() or {})
        settings = LoraSettings(
            rank, lora_settings.read_alpha(file, modules.keys(), stated, config, rank)
        )

        def read(keys):
            return {part: handle.get_tensor(key).astype(np.float32) for part, key in keys.items()}

        with np.errstate(over="ignore"):  # values too large for float32 are reported below
            tensors = {module: read(keys) for module, keys in modules.items()}
    if endless := [
        f"{m}.{k} is not finite"
        for m, pair in tensors.items()
        for k, t in pair.items()
        if not np.isfinite(t).all()
    ]:
        raise InputError(f"{file}: {'; '.join(endless)}")
    adapters: dict[str, dict[str, np.ndarray]] = {}
    for module, pair in tensors.items():
        slot = slots[module]
        ab = adapters.setdefault(
            slot.path, {k: np.zeros(s, np.float32) for k, s in slot.shapes(rank).items()}
        )
        for key, part in (("a", _A), ("b", _B)):
            ab[key][slot.layer] = (
                pair[part].reshape(pair[part].shape[:2]).T
            )  # the index () means the whole array
    return {
        p: {k: jnp.asarray(v) for k, v in adapters[p].items()} for p in sorted(adapters)
    }, settings


@dataclasses.dataclass(frozen=True)
class _Slot:
    """Where the adapter of one linear layer of a file lies in our parameters.

    Attributes:
        path: The path of our parameter.
        layer: The index of the layer in a stack, as a tuple of one; () where nothing is stacked.
        layers: The number of layers in the stack, as a tuple of one; () where nothing is stacked.
        n_in: The number of inputs.
        n_out: The number of outputs.
        ones: The trailing axes of size one that a 1x1 convolution has in the file.
    """

    path: str
    layer: tuple[int, ...]
    layers: tuple[int, ...]
    n_in: int
    n_out: int
    ones: tuple[int, ...]

    def shapes(self, rank: int) -> dict[str, tuple[int, ...]]:
        """The shapes of our factors, with all layers of a stack."""
        return {"a": (*self.layers, self.n_in, rank), "b": (*self.layers, rank, self.n_out)}

    def torch_shapes(self, rank: int) -> dict[str, tuple[int, ...]]:
        """The shapes of the factors of one layer in a file, by the end of the key."""
        return {_A: (rank, self.n_in, *self.ones), _B: (self.n_out, rank, *self.ones)}


def _slots(table: Table) -> dict[str, _Slot]:
    """The slot of every linear layer of the network, by its released module name."""
    slots = {}
    for e in table:
        if e.layout in ("linear", "pointwise") and len(e.shape) == 2:
            path = "/".join(map(str, e.path))
            ones = (1, 1) if e.layout == "pointwise" else ()
            for i, name in enumerate(e.names):
                layer, layers = ((i,), (len(e.names),)) if e.stacked else ((), ())
                slots[name.rpartition(".")[0]] = _Slot(path, layer, layers, *e.shape, ones)
    return slots


def _of_lora(adapters: Trainable) -> dict[str, Adapter]:
    """The LoRA adapters. Raises InputError if some parameters are trained in full."""
    if whole := [path for path, own in adapters.items() if not isinstance(own, dict)]:
        raise InputError(
            f"a LoRA does not hold what is trained in full; {len(whole)} parameter(s) are, first {whole[0]}"
        )
    return {path: own for path, own in adapters.items() if isinstance(own, dict)}


def _to_modules(
    adapters: Mapping[str, Adapter], settings: LoraSettings, table: Table
) -> dict[str, Tensors]:
    """Converts adapters to the two matrices of each released module, in the order of PyTorch.

    Layers in which both factors are zero are left out.
    """
    slots = _slots(table)
    out = {}
    host = {path: {k: np.asarray(v) for k, v in ab.items()} for path, ab in adapters.items()}
    if unknown := sorted(host.keys() - {slot.path for slot in slots.values()}):
        raise InputError(f"adapters on what is no linear of this network: {', '.join(unknown)}")
    for module, slot in slots.items():
        if (ab := host.get(slot.path)) is None:
            continue
        for key, shape in slot.shapes(settings.rank).items():
            if ab[key].shape != shape:
                raise InputError(
                    f"adapter {slot.path}: {key} is {list(ab[key].shape)}; this network wants {list(shape)}"
                )
        a = ab["a"][slot.layer]
        b = ab["b"][slot.layer]
        if a.any() or b.any():
            out[module] = {
                _A: a.T.reshape(a.T.shape + slot.ones),
                _B: b.T.reshape(b.T.shape + slot.ones),
            }
    return out


def _save(
    file: Path,
    target: Path,
    modules: Mapping[str, Tensors],
    prefix: str,
    dtype: Any,
    metadata: dict[str, str],
) -> None:
    """Writes tensors to a file and checks them by reading them back.

    Args:
        file: The file to write.
        target: Where the file will appear in the end, for error messages.
        modules: The two matrices of each module.
        prefix: What goes before the module name in a key.
        dtype: The dtype of the tensors in the file.
        metadata: Further entries of the header.

    Raises:
        InputError: If a tensor is not finite in `dtype`, or the adapters change nothing.
        RunError: If the file does not read back as it was written.
    """
    with np.errstate(over="ignore"):  # values too large for `dtype` are reported below
        tensors = {
            f"{prefix}{m}.{part}": t.astype(dtype, order="C")
            for m, pair in modules.items()
            for part, t in pair.items()
        }
    save_file(tensors, file, metadata={"format": "pt"} | metadata)
    with _opened(file) as (shapes, handle):
        read = {key: handle.get_tensor(key) for key in shapes}
    if read.keys() != tensors.keys() or any(
        read[k].tobytes() != t.tobytes() for k, t in tensors.items()
    ):
        raise RunError(f"{target}: does not read back as it was written")
    if endless := sorted(k for k, t in read.items() if not np.isfinite(t).all()):
        raise InputError(
            f"{target}: {len(endless)} adapter(s) are not finite in {jnp.dtype(dtype)}: {', '.join(endless)}"
        )
    pairs = [(read[f"{prefix}{m}.{_A}"], read[f"{prefix}{m}.{_B}"]) for m in modules]
    # A product B A is not zero if a nonzero row of A meets a nonzero column of B.
    if not any(
        (a.reshape(len(a), -1).any(1) & b.reshape(b.shape[:2]).any(0)).any() for a, b in pairs
    ):
        raise InputError(
            f"{target}: nothing to export: these adapters change nothing (every product B A is zero; untrained?)"
        )


def _file(path: Path) -> Path:
    """The file of tensors at a path, which is that file or a directory with it. Raises
    InputError.
    """
    if path.is_dir():
        found = sorted(path.glob("*.safetensors"))
        named = [f for f in found if f.name in (PEFT_FILE, DIFFUSERS_FILE)]
        if len(named or found) != 1:
            there = ", ".join(f.name for f in path.iterdir()) or "nothing"
            raise InputError(
                f"{path}: expected one of {PEFT_FILE}, {DIFFUSERS_FILE}, or one .safetensors file; found {there}"
            )
        return (named or found)[0]
    if not path.is_file():
        raise InputError(f"{path}: no such file or directory")
    return path


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[tuple[Shapes, Any]]:
    """Opens a safetensors file. Yields the shapes of its tensors and a handle that reads tensors.

    Raises InputError if the file or the dtype of a tensor cannot be read.
    """
    with in_one_line():
        tensors = read_header(file)
    if strange := [
        f"{tensor.name} is {tensor.dtype}"
        for tensor in tensors
        if tensor.dtype not in STORED_DTYPES
    ]:
        raise InputError(f"{file}: {', '.join(strange)}; accepted: {', '.join(STORED_DTYPES)}")
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    try:
        with safe_open(file, framework="numpy") as handle:
            yield shapes, handle
    except (
        SafetensorError,
        OSError,
        LookupError,
        TypeError,
        AttributeError,
    ) as error:  # the last for dtypes that NumPy lacks
        raise InputError(
            f"{file}: not a readable safetensors file ({first_line(error)})"
        ) from error


def _by_module(
    shapes: Shapes, slots: Mapping[str, _Slot]
) -> tuple[dict[str, dict[str, str]], dict[str, str], list[str]]:
    """Sorts the keys of a file by module.

    Returns:
        The keys of the factors by module and part, the key of the alpha by module, and the keys
        that belong to no linear layer or repeat another one.
    """
    modules: dict[str, dict[str, str]] = {}
    alphas: dict[str, str] = {}
    strange = []
    for key, shape in sorted(shapes.items()):
        match = _KEY.fullmatch(key)
        if match is None or match["module"] not in slots:
            strange.append(key)
        elif match["part"] == _ALPHA and math.prod(shape) == 1 and match["module"] not in alphas:
            alphas[match["module"]] = key
        elif match["part"] != _ALPHA and match["part"] not in modules.setdefault(
            match["module"], {}
        ):
            modules[match["module"]][match["part"]] = key
        else:
            strange.append(key)
    return modules, alphas, strange


def _check(
    file: Path, shapes: Shapes, modules: Mapping[str, Mapping[str, str]], slots: Mapping[str, _Slot]
) -> int:
    """The common rank of all modules. Raises InputError that lists the tensors that do not fit."""
    ranks: dict[int, str] = {}  # with a module of it
    most = max(
        max(slot.n_in, slot.n_out) for slot in slots.values()
    )  # no matrix of the network has a higher rank
    problems = []
    for module, keys in modules.items():
        if missing := {_A, _B} - keys.keys():
            problems.append(f"{module}.{missing.pop()} is missing")
            continue
        rank = next(iter(shapes[keys[_A]]), 0)
        ranks.setdefault(rank, module)
        for part, shape in slots[module].torch_shapes(rank).items():
            if (there := shapes[keys[part]]) != shape or not 1 <= rank <= most:
                of_rank = "" if 1 <= rank <= most else f", of a rank from 1 to {most}"
                problems.append(
                    f"{module}.{part} is {list(there)}, expected {list(shape)}{of_rank}"
                )
    if problems:
        raise InputError(
            f"{file}: {len(problems)} tensor(s) do not fit the network: {'; '.join(problems)}"
        )
    if len(ranks) > 1:
        listed = ", ".join(f"{r} ({ranks[r]})" for r in sorted(ranks))
        raise InputError(
            f"{file}: modules of different ranks, {listed}; accepted is one rank for all"
        )
    return next(iter(ranks))
