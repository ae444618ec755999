"""Rank and alpha of the adapters in a LoRA file, in the fields of PEFT's `LoraConfig`.

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
# The initializations for which PEFT also changes the weights of the base.
CHANGES_BASE = ("pissa", "olora", "corda", "loftq")
MAX_ALPHA = 1e30  # a number in JSON may be larger than any float

Table = Sequence[ParameterEntry]  # all parameters of the network that adapters are on


@dataclasses.dataclass(frozen=True)
class LoraSettings:
    """The rank and the alpha of a LoRA (arXiv 2106.09685).

    Attributes:
        rank: The rank of the factors A and B, at least 1.
        alpha: The weight gains `alpha / rank * B A`. Above 0.
    """

    rank: int
    alpha: float

    @property
    def scale(self) -> float:
        """The factor of the product of the LoRA factors: `alpha / rank`."""
        return self.alpha / self.rank


def peft_config(modules: Iterable[str], settings: LoraSettings, table: Table) -> dict[str, Any]:
    """Returns the fields of PEFT's `LoraConfig` for an export.

    Args:
        modules: The diffusers names of the modules that have an adapter, such as
            "transformer_blocks.0.attn.to_q".
        settings: The rank, which becomes "r", and alpha, which becomes "lora_alpha" (an int if it
            is a whole number).
        table: The network's parameters with their names in released files, which give the names of
            all modules.

    Returns:
        The fields by name, as values of JSON: "r", "lora_alpha", "target_modules", and constants
        that say plain LoRA without dropout, biases or patterns ("peft_type", "bias",
        "lora_dropout", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern" and "task_type",
        which is None). "target_modules" is the sorted list of `modules`. PEFT also adapts modules
        whose names end in one of these; if there are such modules, it is a regular expression for
        whole names instead.
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
    """Reads the `LoraConfig` that belongs to a LoRA file: from the `adapter_config.json` beside it
    if PEFT wrote the file, otherwise from its header, where diffusers writes it.

    PEFT's files are recognized by the name `adapter_model.safetensors`, or by PEFT's keys if there
    is an `adapter_config.json`.

    Args:
        file: The safetensors file, whose name and directory say where the configuration is.
        keys: The keys of its tensors. Keys that begin with "base_model.model." are PEFT's.
        metadata: The text entries of its header. diffusers writes `lora_adapter_metadata`.

    Returns:
        The fields by name, such as "r", without the "transformer." that diffusers puts before each;
        None if the file has no such configuration.

    Raises:
        InputError: If the configuration is not a JSON object, does not describe plain LoRA (another
            `peft_type`, DoRA, an initialization that changes the base), or has a missing or invalid
            `lora_alpha` or an invalid pattern; or if `adapter_config.json` is missing beside a file
            with PEFT's name.
    """
    beside = file.with_name(PEFT_CONFIG)
    of_peft = any(key.startswith(PEFT) for key in keys)
    if file.name == PEFT_FILE or (of_peft and beside.is_file()):
        config = _fields(beside, None)
    elif METADATA in metadata:
        fields = _fields(file, metadata[METADATA])
        config = {name.removeprefix(DIFFUSERS): value for name, value in fields.items()}
    else:
        return None
    _check_config(file, config)
    return config


def _fields(file: Path, text: str | None) -> dict[str, Any]:
    """Parses a JSON object with the fields of a `LoraConfig`.

    Args:
        file: The file that the object comes from, for messages; it is read if `text` is None.
        text: The JSON object. None: the whole contents of `file`.

    Returns:
        The fields by name, not checked further.

    Raises:
        InputError: If the file is missing, or the text is not a JSON object.
    """
    if text is None and not file.is_file():
        raise InputError(f"{file}: no such file; an adapter of PEFT has its alpha there")
    try:
        return dict(parse_json(read_text(file) if text is None else text))
    except (OSError, ValueError, TypeError) as error:
        raise InputError(
            f"{file}: its LoRA configuration is not a JSON object ({first_line(error)})"
        ) from error


def _check_config(file: Path, config: Mapping[str, Any]) -> None:
    """Checks that a `LoraConfig` is one of plain LoRA. Ranks are checked by `layer_alpha`.

    Args:
        file: The file, for messages.
        config: The fields of the `LoraConfig` by name, from `adapter_config.json` or the header of
            the file.

    Raises:
        InputError: If `peft_type` is not "LORA" (a missing one counts as "LORA") or `use_dora` is
            set; if `init_lora_weights` changes the base (PiSSA, OLoRA, CorDA, LoftQ); if
            `lora_alpha` is missing; if an alpha, also in `alpha_pattern`, is not a number or is
            larger than 1e30 in magnitude; or if `rank_pattern` or `alpha_pattern` is not a mapping
            or has a key that is not a regular expression. An empty or null pattern counts as none.
    """
    if config.get("peft_type", "LORA") != "LORA" or config.get("use_dora"):
        raise InputError(
            f"{file}: accepted is plain LoRA, not peft_type={config.get('peft_type')!r} or DoRA"
        )
    start = config.get("init_lora_weights")
    if str(start).startswith(CHANGES_BASE):
        raise InputError(
            f"{file}: init_lora_weights={start!r}: was trained on another base than the model's "
            "weights"
        )
    for name in ("rank_pattern", "alpha_pattern"):
        pattern = config.get(name) or {}
        if not isinstance(pattern, Mapping):
            raise InputError(
                f"{file}: its configuration has {name}={pattern!r}; accepted is a mapping"
            )
        for key in pattern:
            try:
                re.compile(key)
            except re.error as error:
                raise InputError(
                    f"{file}: its configuration has the {name} {key!r}; accepted is a regular "
                    f"expression ({first_line(error)})"
                ) from error
    alphas = [config.get("lora_alpha"), *(config.get("alpha_pattern") or {}).values()]
    for value in alphas:
        if type(value) not in (int, float) or abs(value) > MAX_ALPHA:
            raise InputError(
                f"{file}: its configuration has lora_alpha={value!r}; accepted is a number"
            )


def layer_alpha(
    file: Path, name: str, rank: int, stated: float | None, config: Mapping[str, Any] | None
) -> float:
    """Finds the alpha of one linear layer of a LoRA file; its weight gains `alpha / rank * B A`.

    The alpha is that of the layer's own key or that of the file's `LoraConfig` (times sqrt(rank)
    with `use_rslora`); if there are both, they must be equal. Without either it is the rank, as in
    diffusers.

    Args:
        file: The file of tensors, for error messages.
        name: The name of the layer in the file, without a prefix such as "transformer.".
            `rank_pattern` and `alpha_pattern` of the configuration are matched with it.
        rank: The rank of its factors A and B, from their shapes.
        stated: The value of its key `alpha`. None: the file has none.
        config: The fields of the file's `LoraConfig`, from `read_config`. None: the file has none.

    Returns:
        The alpha.

    Raises:
        InputError: If the alpha of the key differs from the configured one (with its factor
            sqrt(rank), if any), the alpha is not finite and above 0, or there is a configuration
            whose rank (`r` or `rank_pattern`) is missing or is not `rank`.
    """
    configured = None
    if config is not None:
        expected_rank = _by_pattern(config.get("rank_pattern") or {}, name, config.get("r"))
        if expected_rank != rank:
            raise InputError(
                f"{file}: its configuration has r={expected_rank!r} for {name}, its tensors are of "
                f"rank {rank}"
            )
        configured = float(
            _by_pattern(config.get("alpha_pattern") or {}, name, config["lora_alpha"])
        )
        if config.get("use_rslora"):
            # Rank-stabilised LoRA (arXiv 2312.03732) scales by alpha / sqrt(rank).
            configured *= math.sqrt(rank)
    if stated is not None and configured is not None and stated != configured:
        raise InputError(
            f"{file}: {name} has alpha {stated} by its key and {configured} by the configuration; "
            "they must be equal"
        )
    alpha = configured if stated is None else stated
    if alpha is None:
        return float(rank)
    if not 0 < alpha < math.inf:
        raise InputError(f"{file}: {name} has alpha {alpha}; accepted is a number above 0")
    return alpha


def _by_pattern(pattern: Mapping[str, Any], name: str, default: Any) -> Any:
    """Looks up a module in PEFT's `rank_pattern` or `alpha_pattern`.

    As in PEFT, a key is a regular expression that matches the whole name or the end of it that
    follows a dot, and the first key that matches counts.

    Args:
        pattern: The values by regular expression. `_check_config` has checked the expressions.
        name: The name of the module, such as "transformer_blocks.0.attn.to_q".
        default: The value if no key matches: `r` or `lora_alpha` of the configuration.

    Returns:
        The value of the first key that matches, or the default.
    """
    for key, value in pattern.items():
        if re.fullmatch(rf"(.*\.)?({key})", name):
            return value
    return default
