"""What a LoRA file says beside its matrices: rank and alpha, in the fields of PEFT's `LoraConfig`.

diffusers writes these fields as JSON into the header of the file, and PEFT into a file beside the
tensors. The matrices are in `lora_files.py`.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from solrl_jax.errors import InputError, first_line
from solrl_jax.models.loading.weights import ParameterEntry
from solrl_jax.storage.readers import parse_json, read_text

PEFT_FILE = "adapter_model.safetensors"
PEFT_CONFIG = "adapter_config.json"
# The prefix of a module name in the keys of each format.
DIFFUSERS = "transformer."
PEFT = "base_model.model."
METADATA = "lora_adapter_metadata"
CHANGES_BASE = (
    "pissa",
    "olora",
    "corda",
    "loftq",
)  # initialisations for which PEFT also changes the weights of the base
MOST_ALPHA = 1e30  # a number in JSON may be larger than any float

Table = Sequence[ParameterEntry]  # all parameters of the network that adapters are on


@dataclasses.dataclass(frozen=True)
class LoraSettings:
    """The rank and the alpha of a LoRA."""

    rank: int
    alpha: float

    @property
    def scale(self) -> float:
        """The factor of the product of the LoRA factors: alpha / rank."""
        return self.alpha / self.rank


def peft_config(modules: Iterable[str], settings: LoraSettings, table: Table) -> dict[str, Any]:
    """The fields of PEFT's `LoraConfig` for an export.

    Args:
        modules: The names of the modules that have an adapter.
        settings: Rank and alpha.
        table: The table of all parameters of the network.
    """
    targets = sorted(modules)
    others = {name.rpartition(".")[0] for e in table for name in e.names} - set(targets)
    # In a list, PEFT takes a name also for the end of a longer one (the final `proj_out` for that
    # of each block). It takes a string for a regular expression that matches whole names.
    ambiguous = any(m.endswith(tuple(f".{t}" for t in targets)) for m in others)
    return {
        "peft_type": "LORA",
        "r": settings.rank,
        "lora_alpha": int(settings.alpha) if float(settings.alpha).is_integer() else settings.alpha,
        "target_modules": "|".join(map(re.escape, targets)) if ambiguous else targets,
        "bias": "none",
        "lora_dropout": 0.0,
        "use_rslora": False,
        "use_dora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
        "task_type": None,
    }


def read_config(
    file: Path, keys: Iterable[str], metadata: Mapping[str, str]
) -> dict[str, Any] | None:
    """Reads the `LoraConfig` of a file.

    Args:
        file: The file of tensors.
        keys: The keys of its tensors, which tell the format.
        metadata: The metadata in its header.

    Returns:
        The fields, or None if the file has no such configuration.

    Raises:
        InputError: If it is not a JSON object, or the file that PEFT writes is missing.
    """
    if any(key.startswith(PEFT) for key in keys) or file.name == PEFT_FILE:
        return _fields(file.with_name(PEFT_CONFIG), None)
    if METADATA not in metadata:
        return None
    return {k.removeprefix(DIFFUSERS): v for k, v in _fields(file, metadata[METADATA]).items()}


def _fields(file: Path, text: str | None) -> dict[str, Any]:
    """Parses the JSON object `text` of the header of `file`, or, if it is None, all of `file`."""
    if text is None and not file.is_file():
        raise InputError(f"{file}: no such file; an adapter of PEFT has its alpha there")
    try:
        return dict(parse_json(read_text(file) if text is None else text))
    except (OSError, ValueError, TypeError) as error:
        raise InputError(
            f"{file}: its LoRA configuration is not a JSON object ({first_line(error)})"
        ) from error


def read_alpha(
    file: Path,
    modules: Iterable[str],
    alphas: Mapping[str, float],
    config: Mapping[str, Any] | None,
    rank: int,
) -> float:
    """Finds the alpha that all modules share.

    Args:
        file: The file of tensors, for error messages.
        modules: The names of the modules that have an adapter.
        alphas: The values of the keys `MODULE.alpha`, by module.
        config: The fields of its `LoraConfig`, if it has one.
        rank: The rank of the adapters, which is the alpha of modules for which none is stated.

    Raises:
        InputError: If modules differ in alpha, or the configuration is not of plain LoRA.
    """
    stated = set(alphas.values())
    if config is None:
        stated |= {float(rank)} if set(modules) - alphas.keys() else set()
    else:
        if config.get("peft_type", "LORA") != "LORA" or config.get("use_dora"):
            raise InputError(
                f"{file}: accepted is plain LoRA, not peft_type={config.get('peft_type')!r} or DoRA"
            )
        if str(start := config.get("init_lora_weights")).startswith(CHANGES_BASE):
            raise InputError(
                f"{file}: init_lora_weights={start!r}: was trained on another base than the model's weights"
            )
        if config.get("r") != rank and not config.get("rank_pattern"):
            raise InputError(
                f"{file}: its configuration has r={config.get('r')!r}, its tensors are of rank {rank}"
            )
        # Rank-stabilised LoRA (arXiv 2312.03732) scales by alpha / sqrt(rank).
        factor = math.sqrt(rank) if config.get("use_rslora") else 1.0
        if not isinstance(pattern := config.get("alpha_pattern") or {}, Mapping):
            raise InputError(
                f"{file}: its configuration has alpha_pattern={pattern!r}; accepted is a mapping"
            )
        for value in (config.get("lora_alpha"), *pattern.values()):
            if type(value) not in (int, float) or abs(value) > MOST_ALPHA:
                raise InputError(
                    f"{file}: its configuration has lora_alpha={value!r}; accepted is a number"
                )
            stated.add(factor * value)
    if len(stated) > 1 or not all(0 < x < math.inf for x in stated):
        raise InputError(
            f"{file}: modules of alpha {', '.join(map(str, sorted(stated)))}; accepted is one, above 0, for all"
        )
    return stated.pop()
