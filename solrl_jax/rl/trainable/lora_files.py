"""Exports LoRA files for diffusers and PEFT, and imports those and the files of other trainers.

Both export formats hold two tensors per linear layer under its released name: `lora_A.weight`
[rank, in] and `lora_B.weight` [out, rank], with two further axes of size one for a 1x1 convolution.
They are `a` and `b` of our adapters, transposed; a stack of layers gives one pair per layer. The
adapter adds `alpha / rank * B A` to the weight. The two formats differ in the keys and in where
alpha is:

              key                                     alpha
    diffusers transformer.MODULE.lora_A.weight        JSON in the header's `lora_adapter_metadata`
    PEFT      base_model.model.MODULE.lora_A.weight   `adapter_config.json` beside the tensors

diffusers takes alpha = rank if the header has no metadata. Its SANA and SD3 pipelines refuse the
keys `MODULE.alpha` that other tools write, and its FLUX pipeline refuses them together with the
metadata. Such keys are read here but not written. The layer names that other programs use are in
`lora_layouts.py`.
"""

import contextlib
import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from solrl_jax.errors import InputError, RunError, as_input_error, first_line
from solrl_jax.models.loading.tensor_files import STORED_DTYPES, read_header
from solrl_jax.rl.trainable import lora_settings
from solrl_jax.rl.trainable.lora_layouts import FileLayer, ParsedKeys, parse_keys
from solrl_jax.rl.trainable.lora_settings import PEFT_CONFIG, PEFT_FILE, LoraSettings, Table
from solrl_jax.rl.trainable.trainable import Adapter, Trainable, split_adapters
from solrl_jax.storage import files

DIFFUSERS_FILE = "pytorch_lora_weights.safetensors"  # the default name in diffusers
_A = "lora_A.weight"
_B = "lora_B.weight"
MAX_LISTED = 5  # keys in an error message

Tensors = dict[str, np.ndarray]
Shapes = Mapping[str, tuple[int, ...]]  # the shapes of the tensors in a file, by key


def check_target(path: Path, form: Literal["diffusers", "peft"]) -> None:
    """Checks that a LoRA can be exported to a path. The exports call it themselves.

    Nothing is written, and whether the disk takes the file is not checked.

    Args:
        path: The file ("diffusers") or directory ("peft") to write. A file may exist. A directory
            may exist if it is empty or holds only an earlier export: `adapter_model.safetensors`
            and `adapter_config.json`.
        form: The format of the export: "diffusers" (one file) or "peft" (a directory).

    Raises:
        InputError: With "diffusers", if the path does not end in .safetensors or is a directory.
            With "peft", if the path is a file, or a directory that holds anything else.
    """
    if form == "diffusers":
        if path.suffix != ".safetensors" or path.is_dir():
            raise InputError(
                f"{path}: a LoRA of diffusers is one file; give it a name that ends in .safetensors"
            )
    elif path.exists() and not path.is_dir():
        raise InputError(f"{path}: is a file; PEFT's format is a directory, name another one")
    elif path.is_dir():
        others = sorted({f.name for f in path.iterdir()} - {PEFT_FILE, PEFT_CONFIG})
        if others:
            raise InputError(
                f"{path}: holds {', '.join(others)}, which an export would remove; name another "
                "directory"
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

    The file appears whole, by a rename, after it has been read back and compared; an earlier one
    stays if an error is raised. Layers are left out if A and B are both zero, but not if only B is.

    Args:
        path: The file to write. It ends in .safetensors and is replaced if it exists. Missing
            parent directories are created.
        adapters: The trainable parameters by path, which must all be LoRA adapters.
        settings: Rank and alpha of the adapters, which the header of the file records.
        table: The network's parameters with their names in released files
            (`Backbone.parameter_table`), which become the names in the LoRA file.
        dtype: The dtype of the tensors in the file, e.g. `jnp.float32` (the default) or
            `jnp.bfloat16`.
        fold: Whether B is multiplied by alpha / rank and alpha is written as the rank, for readers
            that ignore the header.

    Raises:
        InputError: If the path does not end in .safetensors or is a directory, a parameter is
            trained in full, the path or shape of an adapter is not that of a linear layer of the
            network, or the adapters are not finite in `dtype` or change nothing: every product B A
            is zero, or there is no adapter.
        RunError: If the disk refuses, or the file does not read back as it was written.
    """
    check_target(path, "diffusers")
    lora = _lora_adapters(adapters)
    if fold:
        lora = {p: {"a": ab["a"], "b": settings.scale * ab["b"]} for p, ab in lora.items()}
        settings = LoraSettings(settings.rank, float(settings.rank))
    modules = _to_modules(lora, settings, table)
    prefix = lora_settings.DIFFUSERS
    config = lora_settings.peft_config(modules, settings, table)
    header = json.dumps({f"{prefix}{k}": v for k, v in config.items()}, indent=2, sort_keys=True)
    with files.atomic(path) as partial:
        _save(partial, path, modules, prefix, dtype, {lora_settings.METADATA: header})


def export_peft(
    folder: Path,
    adapters: Trainable,
    settings: LoraSettings,
    table: Table,
    *,
    dtype: Any = jnp.float32,
) -> None:
    """Writes a directory that `PeftModel.from_pretrained` reads onto the transformer.

    The directory appears whole, by a rename. An earlier export in its place is moved away just
    before and then removed; it stays if an error is raised. Layers are left out if A and B are both
    zero, but not if only B is.

    Args:
        folder: The directory to write. It may exist if it is empty or holds only an earlier export.
            Missing parent directories are created.
        adapters: The trainable parameters by path, which must all be LoRA adapters.
        settings: Rank and alpha of the adapters, which `adapter_config.json` records.
        table: The network's parameters with their names in released files
            (`Backbone.parameter_table`), which become the names in the LoRA file.
        dtype: The dtype of the tensors in the file, e.g. `jnp.float32` (the default) or
            `jnp.bfloat16`.

    Raises:
        InputError: If the path is a file or a directory with other files, a parameter is trained in
            full, the path or shape of an adapter is not that of a linear layer of the network, or
            the adapters are not finite in `dtype` or change nothing: every product B A is zero, or
            there is no adapter.
        RunError: If the disk refuses, or the file does not read back as it was written.
    """
    folder = folder.absolute()
    check_target(folder, "peft")
    lora = _lora_adapters(adapters)
    modules = _to_modules(lora, settings, table)
    config = lora_settings.peft_config(modules, settings, table) | {"inference_mode": True}
    with files.atomic_directory(folder) as filled:
        with files.atomic(filled / PEFT_FILE) as partial:
            _save(partial, folder, modules, lora_settings.PEFT, dtype, {})
        files.atomic_write(
            filled / PEFT_CONFIG, json.dumps(config, indent=2, sort_keys=True) + "\n"
        )


def import_lora(
    path: Path, table: Table, *, skip_text_encoders: bool = False
) -> tuple[dict[str, Adapter], LoraSettings]:
    """Reads a LoRA file of diffusers, kohya, ai-toolkit or ComfyUI, or a LoRA directory of PEFT,
    from disk.

    Names and shapes are checked before any factor is read. Layers under the names of the model's
    authors are converted to those of diffusers: a fused layer, such as queries, keys and values in
    one, is split among several, which share its factor A.

    Args:
        path: The file, or a directory with one: `adapter_model.safetensors`,
            `pytorch_lora_weights.safetensors`, or else its only .safetensors file.
        table: The network's parameters with their names in released files
            (`Backbone.parameter_table`), by which names in the LoRA file are turned into paths.
        skip_text_encoders: Whether adapters of text encoders in the file are ignored. They cannot
            be used here, so otherwise such a file is refused.

    Returns:
        A pair: the adapters by path in sorted order, {"a": [..., in, rank], "b": [..., rank, out]}
        in float32 on the default device, and the rank and alpha that all of them have. A layer for
        which neither its key nor a configuration states an alpha has its rank as alpha.

        A linear layer that the file does not mention has no adapter; where the file has only some
        layers of a stack, the factors of the others are zero. If the layers of the file differ in
        rank or alpha, they are made equal without changing their effect: factors are padded with
        zeros to the largest rank, which is also the returned alpha, and each B is multiplied by the
        alpha / rank that its layer has in the file.

    Raises:
        InputError: If the path or the file cannot be read; if keys belong to no linear layer of the
            network, a factor is missing, shapes are not those of the network's layers, or values
            are not finite; if rank or alpha contradict the file's configuration; or if the file
            holds no adapter. Also for DoRA, trained biases, and adapters of text encoders that are
            not skipped.
    """
    file = _find_file(path)
    slots = _slots(table)
    with _open_file(file) as (shapes, handle):
        parsed_keys = parse_keys(shapes, slots)
        _refuse_other_keys(file, parsed_keys, skip_text_encoders)
        ranks = _check_shapes(file, shapes, parsed_keys.layers, slots)
        config = lora_settings.read_config(file, shapes, handle.metadata() or {})
        alphas = {}
        for name, layer in parsed_keys.layers.items():
            stated = None
            if "alpha" in layer.keys:
                stated = float(handle.get_tensor(layer.keys["alpha"]).reshape(()))
            alphas[name] = lora_settings.layer_alpha(file, name, ranks[name], stated, config)
        with np.errstate(over="ignore"):  # values too large for float32 are reported below
            tensors = {
                name: {
                    part: handle.get_tensor(layer.keys[part]).astype(np.float32) for part in "ab"
                }
                for name, layer in parsed_keys.layers.items()
            }
    nonfinite = [
        parsed_keys.layers[name].keys[part]
        for name, factors in tensors.items()
        for part, tensor in factors.items()
        if not np.isfinite(tensor).all()
    ]
    if nonfinite:
        raise InputError(
            f"{file}: {len(nonfinite)} tensor(s) are not finite: {_list_keys(nonfinite)}"
        )

    rank = max(ranks.values())
    mixed = len(set(ranks.values())) > 1 or len(set(alphas.values())) > 1
    settings = LoraSettings(rank, float(rank) if mixed else next(iter(alphas.values())))
    adapters: dict[str, dict[str, np.ndarray]] = {}
    for name, layer in parsed_keys.layers.items():
        a = tensors[name]["a"].reshape(ranks[name], -1)
        b = tensors[name]["b"].reshape(-1, ranks[name])
        if mixed:
            b = b * np.float32(alphas[name] / ranks[name])
        if layer.has_author_name and name.endswith(("adaLN_modulation.1", "adaLN_modulation_1")):
            b = _swap_shift_and_scale(b, a.shape[1])
        start = 0
        for module in layer.modules:
            slot = slots[module]
            whole = adapters.setdefault(
                slot.path, {k: np.zeros(s, np.float32) for k, s in slot.shapes(rank).items()}
            )
            # `slot.layer` is () for a layer that is not stacked, and then selects the whole array.
            whole["a"][slot.layer][:, : ranks[name]] = a.T
            whole["b"][slot.layer][: ranks[name]] = b[start : start + slot.n_out].T
            start += slot.n_out
    return {
        path: {part: jnp.asarray(factor) for part, factor in adapters[path].items()}
        for path in sorted(adapters)
    }, settings


def _swap_shift_and_scale(b: np.ndarray, n_in: int) -> np.ndarray:
    """Converts the factor B of a modulation layer, read from a file with the names of the model's
    authors, to the order of diffusers: exchanges shift and scale, the halves of its outputs.

    The authors have the shift first, diffusers the scale. A modulation with more parts, such as
    gates too, has the same order in both and is not changed.

    Args:
        b: The factor B, [outputs, rank], of a modulation layer. The caller checks the name.
        n_in: The number of inputs, which is the width of the network. A layer of two parts has 2 *
            n_in outputs.

    Returns:
        The factor with its halves exchanged; `b` itself unless it has 2 * n_in outputs.
    """
    if len(b) != 2 * n_in:
        return b
    return np.concatenate([b[n_in:], b[:n_in]])


def _refuse_other_keys(file: Path, parsed: ParsedKeys, skip_text_encoders: bool) -> None:
    """Checks that a file holds nothing but LoRA factors of the network's linear layers.

    Args:
        file: The path of the file, for messages.
        parsed: The keys of the file, sorted into groups by `parse_keys`.
        skip_text_encoders: Whether keys of text encoders are accepted.

    Raises:
        InputError: For the first of these problems: keys of DoRA; keys of trained biases or whole
            weights; keys that fit no linear layer of the network; keys of text encoders that are
            not skipped; no key of a factor A or B at all. In all cases but the last, the message
            lists up to 5 of the keys.
    """
    where = f"{file} (names of {parsed.layout}):"
    if parsed.dora:
        raise InputError(
            f"{where} is a DoRA, which is not supported; accepted is plain LoRA: "
            f"{_list_keys(parsed.dora)}"
        )
    if parsed.biases:
        raise InputError(
            f"{where} holds trained biases or whole weights, which is not supported; accepted is "
            f"plain LoRA: {_list_keys(parsed.biases)}"
        )
    if parsed.unknown:
        raise InputError(
            f"{where} {len(parsed.unknown)} key(s) fit no linear layer of this network: "
            f"{_list_keys(parsed.unknown)}"
        )
    if parsed.text_encoders and not skip_text_encoders:
        raise InputError(
            f"{where} {len(parsed.text_encoders)} key(s) belong to text encoders, which are not "
            f"adapted here; training can leave them out (lora.skip_text_encoders=true): "
            f"{_list_keys(parsed.text_encoders)}"
        )
    if not any({"a", "b"} & layer.keys.keys() for layer in parsed.layers.values()):
        raise InputError(f"{file}: holds no adapter (keys that end in .{_A} and .{_B})")


def _list_keys(keys: Sequence[str]) -> str:
    """Joins keys by commas for a message.

    Args:
        keys: Keys of tensors, or other names; possibly none.

    Returns:
        The first 5 keys, and "and N more" if there are more.
    """
    more = f" and {len(keys) - MAX_LISTED} more" if len(keys) > MAX_LISTED else ""
    return ", ".join(keys[:MAX_LISTED]) + more


@dataclasses.dataclass(frozen=True)
class _Slot:
    """One linear layer of the network: where a run stores its adapter, and its sizes.

    A LoRA file has an adapter per layer. A run has one per parameter, which may be a stack of
    layers.

    Attributes:
        path: The path of the run's parameter, such as `transformer_blocks/attn/to_q/kernel`. All
            layers of a stack have the same one.
        layer: The index of the layer in its stack, as a tuple of one; () if it is not stacked.
        layers: The number of layers in the stack, as a tuple of one; () if it is not stacked.
        n_in: The number of inputs of the layer.
        n_out: The number of outputs of the layer.
        ones: The trailing axes that the factors have in a LoRA file: (1, 1) for a 1x1 convolution,
            else ().
    """

    path: str
    layer: tuple[int, ...]
    layers: tuple[int, ...]
    n_in: int
    n_out: int
    ones: tuple[int, ...]

    def shapes(self, rank: int) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the factors as the run stores them, with all layers of a stack.

        Args:
            rank: The rank of the adapter, at least 1.

        Returns:
            {"a": ([layers,] n_in, rank), "b": ([layers,] rank, n_out)}.
        """
        return {"a": (*self.layers, self.n_in, rank), "b": (*self.layers, rank, self.n_out)}

    def torch_shapes(self, rank: int) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the factors A and B of one layer as a LoRA file stores them.

        Args:
            rank: The rank of the adapter, at least 1.

        Returns:
            {"a": (rank, n_in), "b": (n_out, rank)}, both followed by `self.ones`: (1, 1) for a 1x1
            convolution, else nothing.
        """
        return {"a": (rank, self.n_in, *self.ones), "b": (self.n_out, rank, *self.ones)}


def _slots(table: Table) -> dict[str, _Slot]:
    """Lists the linear layers of a network, its 1x1 convolutions included.

    Args:
        table: The network's parameters with their names in released files.

    Returns:
        For each layer, by its module name in diffusers, such as `transformer_blocks.0.attn.to_q`,
        the run's parameter that it is part of, its index in a stack, and its sizes. They are in the
        order of the table.
    """
    slots = {}
    for e in table:
        if e.layout in ("linear", "pointwise") and len(e.shape) == 2:
            path = "/".join(map(str, e.path))
            ones = (1, 1) if e.layout == "pointwise" else ()
            for i, name in enumerate(e.names):
                layer, layers = ((i,), (len(e.names),)) if e.stacked else ((), ())
                slots[name.rpartition(".")[0]] = _Slot(path, layer, layers, *e.shape, ones)
    return slots


def _lora_adapters(adapters: Trainable) -> dict[str, Adapter]:
    """Checks that all trainable parameters are LoRA adapters, and returns them.

    Args:
        adapters: The trainable parameters by path: adapters, or whole arrays, which are refused.

    Returns:
        The same adapters, as a new dict.

    Raises:
        InputError: If any parameter is trained in full. The message has the number of such
            parameters and the first path.
    """
    lora, arrays = split_adapters(adapters)
    if arrays:
        raise InputError(
            f"a LoRA cannot hold parameters that are trained in full; {len(arrays)} are, first "
            f"{next(iter(arrays))}"
        )
    return lora


def _to_modules(
    adapters: Mapping[str, Adapter], settings: LoraSettings, table: Table
) -> dict[str, Tensors]:
    """Converts adapters to the matrices of each layer of the released network, in PyTorch's order
    of axes.

    Layers in which both factors are zero are left out.

    Args:
        adapters: The adapters {"a": [..., in, rank], "b": [..., rank, out]} by path.
        settings: Its rank is the one that all adapters must have. Alpha plays no part.
        table: The network's parameters with their names in released files.

    Returns:
        By module name of diffusers, {"lora_A.weight": [rank, in], "lora_B.weight": [out, rank]} in
        the dtype of the adapters, on the host; both with two further axes of size one for a 1x1
        convolution.

    Raises:
        InputError: If the path of an adapter is no linear layer of the network, or a shape differs.
    """
    slots = _slots(table)
    out = {}
    host = {path: {k: np.asarray(v) for k, v in ab.items()} for path, ab in adapters.items()}
    unknown = sorted(host.keys() - {slot.path for slot in slots.values()})
    if unknown:
        raise InputError(
            f"adapters on paths that are no linear layer of this network: {_list_keys(unknown)}"
        )
    for module, slot in slots.items():
        if (ab := host.get(slot.path)) is None:
            continue
        for key, shape in slot.shapes(settings.rank).items():
            if ab[key].shape != shape:
                raise InputError(
                    f"adapter {slot.path}: {key} is {list(ab[key].shape)}; this network wants "
                    f"{list(shape)}"
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
    """Writes the tensors of a LoRA to a file and checks them by reading them back.

    The file is written even if the values are then refused, so `file` should be a temporary one.

    Args:
        file: The path to write to, usually temporary.
        target: The path that error messages name, where the file will appear in the end.
        modules: The two matrices "lora_A.weight" and "lora_B.weight" of each module, by its name.
        prefix: What precedes the module name in a key, such as "transformer.".
        dtype: The dtype of the tensors in the file.
        metadata: Further entries of the header, beside `format: pt`.

    Raises:
        InputError: If a tensor is not finite in `dtype`, or the adapters change nothing: no product
            B A is nonzero.
        RunError: If the file does not read back as it was written. Errors of the disk pass through,
            to be converted by `files.atomic`.
    """
    with np.errstate(over="ignore"):  # values too large for `dtype` are reported below
        tensors = {
            f"{prefix}{m}.{part}": t.astype(dtype, order="C")
            for m, pair in modules.items()
            for part, t in pair.items()
        }
    save_file(tensors, file, metadata={"format": "pt"} | metadata)
    with _open_file(file) as (shapes, handle):
        stored_tensors = {key: handle.get_tensor(key) for key in shapes}
    if stored_tensors.keys() != tensors.keys() or any(
        stored_tensors[k].tobytes() != t.tobytes() for k, t in tensors.items()
    ):
        raise RunError(f"{target}: does not read back as it was written")
    if nonfinite := sorted(k for k, t in stored_tensors.items() if not np.isfinite(t).all()):
        raise InputError(
            f"{target}: {len(nonfinite)} adapter(s) are not finite in {jnp.dtype(dtype)}: "
            f"{', '.join(nonfinite)}"
        )
    pairs = [
        (stored_tensors[f"{prefix}{m}.{_A}"], stored_tensors[f"{prefix}{m}.{_B}"]) for m in modules
    ]
    # A product B A is not zero if a nonzero row of A meets a nonzero column of B.
    if not any(
        (a.reshape(len(a), -1).any(1) & b.reshape(b.shape[:2]).any(0)).any() for a, b in pairs
    ):
        raise InputError(
            f"{target}: nothing to export: these adapters change nothing (every product B A is "
            "zero; untrained?)"
        )


def _find_file(path: Path) -> Path:
    """Finds the safetensors file of a LoRA.

    Args:
        path: The file, or a directory with it.

    Returns:
        The path itself if it is a file. In a directory, `adapter_model.safetensors` or
        `pytorch_lora_weights.safetensors`; without either, the only file that ends in .safetensors.

    Raises:
        InputError: If there is no such path, or the directory has both of these names, or neither
            and not exactly one .safetensors file.
    """
    if path.is_dir():
        candidates = sorted(path.glob("*.safetensors"))
        standard_files = [f for f in candidates if f.name in (PEFT_FILE, DIFFUSERS_FILE)]
        if len(standard_files or candidates) != 1:
            contents = ", ".join(f.name for f in path.iterdir()) or "nothing"
            raise InputError(
                f"{path}: expected one of {PEFT_FILE}, {DIFFUSERS_FILE}, or one .safetensors file; "
                f"found {contents}"
            )
        return (standard_files or candidates)[0]
    if not path.is_file():
        raise InputError(f"{path}: no such file or directory")
    return path


@contextlib.contextmanager
def _open_file(file: Path) -> Iterator[tuple[Shapes, Any]]:
    """Opens a safetensors file for the body of a `with` statement.

    Args:
        file: The path of the safetensors file.

    Yields:
        The shapes of its tensors by key, and an open handle of `safetensors`, whose
        `get_tensor(key)` reads a tensor as a NumPy array.

    Raises:
        InputError: If the file cannot be read, or a tensor has a dtype other than BF16, F16, F32 or
            F64; an alpha, which kohya writes as an integer, may also have I64. Also if the body
            raises SafetensorError, OSError, LookupError, TypeError or AttributeError.
    """
    with as_input_error():
        tensors = read_header(file)
    if refusals := [
        f"{tensor.name} is {tensor.dtype}"
        for tensor in tensors
        if tensor.dtype not in STORED_DTYPES
        and not (tensor.dtype == "I64" and tensor.name.endswith(".alpha"))
    ]:
        raise InputError(f"{file}: {', '.join(refusals)}; accepted: {', '.join(STORED_DTYPES)}")
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


def _check_shapes(
    file: Path, shapes: Shapes, layers: Mapping[str, FileLayer], slots: Mapping[str, _Slot]
) -> dict[str, int]:
    """Checks the shapes of all factors of a LoRA file against the network.

    Args:
        file: The path of the file, for messages.
        shapes: The shapes of its tensors, by key.
        layers: The linear layers of the file and the keys of their tensors, by the name of the
            layer in the file (without a prefix such as "transformer.").
        slots: The linear layers of the network with their sizes, by their diffusers name.

    Returns:
        The rank of each layer, by the names in `layers`.

    Raises:
        InputError: If a factor of a layer is missing or has another shape (B of fused modules has
            the outputs of all), its rank is below 1 or above the largest number of inputs or
            outputs that any layer of the network has, or an alpha has not exactly one element. The
            message has the number of problems and the first 5.
    """
    # No matrix of the network has a higher rank.
    largest = max(max(slot.n_in, slot.n_out) for slot in slots.values())
    ranks = {}
    problems = []
    for name, layer in layers.items():
        missing = [end for part, end in (("a", _A), ("b", _B)) if part not in layer.keys]
        if missing:
            problems.append(f"{name}.{missing[0]} is missing")
            continue
        rank = next(iter(shapes[layer.keys["a"]]), 0)
        ranks[name] = rank
        n_out = sum(slots[module].n_out for module in layer.modules)
        slot = dataclasses.replace(slots[layer.modules[0]], n_out=n_out)
        for part, expected in slot.torch_shapes(rank).items():
            key = layer.keys[part]
            if shapes[key] != expected or not 1 <= rank <= largest:
                limit = "" if 1 <= rank <= largest else f", of a rank from 1 to {largest}"
                problems.append(f"{key} is {list(shapes[key])}, expected {list(expected)}{limit}")
        if "alpha" in layer.keys and math.prod(shapes[layer.keys["alpha"]]) != 1:
            problems.append(f"{layer.keys['alpha']} is not a scalar")
    if problems:
        first = "; ".join(problems[:MAX_LISTED])
        more = f" and {len(problems) - MAX_LISTED} more" if len(problems) > MAX_LISTED else ""
        raise InputError(f"{file}: {len(problems)} tensor(s) do not fit the network: {first}{more}")
    return ranks
