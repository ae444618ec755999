"""Hashes of a run's input files: its texts, its base weights, and the code of its plug-ins.

The configuration names these files, so its fingerprint does not change when their content does. The
hashes are saved with every checkpoint, and a resumed run is refused if its inputs have changed.
"""

import hashlib
import importlib.util
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from solrl_jax.config.schema import Config, is_plugin
from solrl_jax.data.prompts import Prompt
from solrl_jax.errors import InputError
from solrl_jax.models.loading.tensor_files import weight_files
from solrl_jax.models.pipeline import Pipeline
from solrl_jax.rewards.judge.settings import open_judge
from solrl_jax.rewards.registry import entry_points, is_judge, reward_names

# A weight file is hashed by its size, its first bytes (the header of a safetensors file) and blocks
# at equal distances: 24 GB of weights take less than a second.
HEADER_BYTES = 2**20
NUM_BLOCKS = 64
BLOCK_BYTES = 2**14


def hash_inputs(
    config: Config, pipeline: Pipeline, prompts: Sequence[Prompt], instruction: str | None
) -> dict[str, str]:
    """Hashes the inputs that the trained parameters depend on.

    The source files of plug-ins (functions outside of solrl_jax) are read whole, the weight files
    in part. To find the source file of `package.module:function`, `package` is imported, but not
    the module.

    Args:
        config: The configuration, which names the rewards and the objective.
        pipeline: The model, whose weight files are hashed.
        prompts: The training prompts with their metadata, in order.
        instruction: The text before each prompt (not the file that holds it), or None for none.

    Returns:
        Hashes of 16 hexadecimal digits by name:
          * "prompts": the training prompts with their metadata, in order;
          * "instruction": its text, also if it is None;
          * "weights/COMPONENT": for every component of the model (`_weight_folders`) whose
            directory exists;
          * "code/MODULE:FUNCTION": the source file of the objective and of every reward that
            training depends on, if they are plug-ins (`_plugins`) and the file exists;
          * "question/NAME": the question of every judge that training depends on, by its name as a
            reward, e.g. "judge".
        Training depends on the rewards that are trained on or rank candidates.

    Raises:
        FileNotFoundError: If the directory of a component holds no weights, several files none of
            which has a standard name, or not all shards of its index.
        InputError: If the options of a judge are not accepted, or its question cannot be read.
        ValueError: If the index of a component's weight files is damaged.
        ModuleNotFoundError: If the package of a plug-in does not exist.
        OSError: If a file cannot be read.
    """
    texts = [(str(prompt), dict(prompt.metadata)) for prompt in prompts]
    hashes = {
        "prompts": _digest(json.dumps(texts).encode()),
        "instruction": _digest(json.dumps(instruction).encode()),
    }
    for name, folder in _weight_folders(pipeline).items():
        if folder.is_dir():
            hashes[f"weights/{name}"] = _hash_weights(folder)
    for plugin in _plugins(config):
        source = _source_file(plugin)
        if source is not None:
            hashes[f"code/{plugin}"] = _digest(source.read_bytes())
    for name in filter(is_judge, reward_names(config.training_scores)):
        question = open_judge(name, config.reward.options.get(name, {})).question
        hashes[f"question/{name}"] = _digest(question.encode())
    return hashes


def refuse_changed_inputs(
    config: Config, saved: Mapping[str, Any], current: Mapping[str, str]
) -> None:
    """Checks that the inputs of a run are those of its last checkpoint.

    An input that only one of the two has is not compared: older checkpoints lack some, and the text
    encoders may be gone once all prompts are in the cache.

    Args:
        config: The configuration of the run. The message quotes the setting that names the changed
            input.
        saved: The metadata of the checkpoint: hashes of inputs by name, e.g. "prompts" or
            "weights/vae", and the number of its iteration as "iteration".
        current: The hashes of the inputs now, by the same names, from `hash_inputs`.

    Raises:
        InputError: If a hash differs. The message names the first such input in the order of
            `current`.
    """
    for name, value in current.items():
        if saved.get(name, value) != value:
            raise InputError(
                f"{_describe(config, name)} changed since iteration {saved['iteration']}; restore "
                "the file, or continue with the changed one by force=True"
            )


def _describe(config: Config, name: str) -> str:
    """Returns the beginning of the message that an input has changed: its subject and verb.

    Args:
        config: The configuration of the run, from which the setting that names the input is quoted.
        name: The name of the input, as `hash_inputs` gives it: "prompts", "instruction",
            "weights/COMPONENT", "code/MODULE:FUNCTION" or "question/NAME".

    Returns:
        The text up to and including "has" or "have", e.g. "prompts.train='a.txt': its prompts
        have". For code and questions, the setting is named without its value. The caller appends
        "changed since ...".
    """
    kind, _, detail = name.partition("/")
    if kind == "prompts":
        return f"prompts.train={config.prompts.train!r}: its prompts have"
    if kind == "instruction":
        return f"model.instruction={config.model.instruction!r}: its text has"
    if kind == "weights":
        return f"model.path={config.model.path!r}: the weights of {detail} have"
    if kind == "question":
        return f"reward.options.{detail}.prompt: the question has"
    field = "reward.weights"
    if detail == config.algorithm.objective:
        field = "algorithm.objective"
    elif detail not in _reward_functions(config.reward.weights):
        field = "rollout.explore.reward"
    return f"{field}: the source file of {detail} has"


def _weight_folders(pipeline: Pipeline) -> dict[str, Path]:
    """Returns the directory of every component's weights, whether it exists or not.

    Args:
        pipeline: The opened model, whose components know the directory that they are loaded from.

    Returns:
        The directories by name: "transformer", the name of each text encoder's folder in the model
        (e.g. "text_encoder_2"), and "vae".
    """
    components = {"transformer": pipeline.transformer, **pipeline.text_encoders}
    components["vae"] = pipeline.vae
    return {name: component.source for name, component in components.items()}


def _hash_weights(folder: Path) -> str:
    """Hashes the weight files of a component by a sample of their bytes.

    The hash covers the name and size of each file, its first 1 MiB (`HEADER_BYTES`), and 64 blocks
    of 16 KiB, where block i (from 1) ends at i / 64 of the file. A change elsewhere is not noticed.

    Args:
        folder: The directory of the component.

    Returns:
        The first 16 hexadecimal digits of a SHA-256.

    Raises:
        FileNotFoundError: If the directory is missing or holds no weights, if it holds several
            files and none has a standard name of diffusers or transformers, or if a shard is
            missing.
        ValueError: If the index of the weight files cannot be read, or names a file in another
            directory.
        OSError: If a file cannot be read.
    """
    digest = hashlib.sha256()
    for path in weight_files(folder):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            digest.update(file.read(HEADER_BYTES))
            for block in range(1, NUM_BLOCKS + 1):
                file.seek(max(0, size * block // NUM_BLOCKS - BLOCK_BYTES))
                digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()[:16]


def _plugins(config: Config) -> list[str]:
    """Returns the functions outside of the package that training depends on: rewards and objective.

    Args:
        config: The configuration. The rewards that are trained on or rank candidates
            (`Config.training_scores`) and `algorithm.objective` count, if they have the form
            "module:function". Names of rewards that installed packages provide (entry points) are
            first replaced by their functions.

    Returns:
        The functions as "module:function", sorted, each once.
    """
    names = [*_reward_functions(config.training_scores), config.algorithm.objective]
    return sorted({name for name in names if is_plugin(name)})


def _reward_functions(scores: Iterable[str]) -> list[str]:
    """Returns the names of the rewards that give scores, in sorted order, each once.

    In the result, "module:function" takes the place of the name of a reward that an installed
    package provides (an entry point).

    Args:
        scores: Names of scores, as in `reward.weights`, e.g. "shapes/strict".
    """
    installed = entry_points()
    return [installed.get(name, name) for name in reward_names(scores)]


def _source_file(plugin: str) -> Path | None:
    """Returns the file that defines the module of a function outside the package.

    The module itself is not imported, but the packages that contain it are. A module is found if it
    has been imported before, or if `importlib.util.find_spec` finds it.

    Args:
        plugin: The function, as "module:function".

    Returns:
        The file; None if the module is not found or has no file, such as a built-in one or
        `__main__` in a notebook.

    Raises:
        ModuleNotFoundError: If a package that should contain the module does not exist.
    """
    name = plugin.partition(":")[0]
    if name in sys.modules:  # `__main__` has a file, but no spec; in a notebook it has neither
        source = getattr(sys.modules[name], "__file__", None)
    else:
        spec = importlib.util.find_spec(name)
        source = None if spec is None else spec.origin
    return Path(source) if source is not None and Path(source).is_file() else None


def _digest(data: bytes) -> str:
    """Returns the first 16 hexadecimal digits of the SHA-256 of `data`.

    Args:
        data: The bytes to hash, e.g. the content of a file.
    """
    return hashlib.sha256(data).hexdigest()[:16]
