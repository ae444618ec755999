"""`solrl encode`: fills the cache of encoded prompts."""

from collections.abc import Callable
from typing import Any

import click

from solrl_jax.cli.options import bar, finish, json_option, overrides_argument
from solrl_jax.config.presets import resolve
from solrl_jax.config.schema import Config
from solrl_jax.errors import InputError
from solrl_jax.models.backbone import open_text_encoders
from solrl_jax.models.locate import open_model
from solrl_jax.parallel import sharding
from solrl_jax.rl.experiment import load_prompt_sets, open_mesh, read_instruction


@click.command("encode")
@click.argument("preset")
@overrides_argument
@json_option
def command(preset: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Fill the cache with PRESET's encoded prompts. Training then never loads the text encoders.

    \b
    solrl encode flux1_sol_rl_pickscore model.prompt_cache_dir=/data/prompts

    \f
    Encodes all training and test prompts that the cache lacks (`fill_cache`). The model and prompt
    sets of the hub are downloaded unless they are in the hub's cache.

    Args:
        preset: The name of a preset.
        overrides: Settings that differ, as `key=value`.
        as_json: Whether to print the result as one line of JSON in place of text.

    Raises:
        ConfigError: If the preset or an override is invalid.
        InputError: If `model.prompt_cache_dir` is None, or the model or a prompt file cannot be
            used.
        RunError: If the cache cannot be written.
    """
    with bar(None, "encode", "prompt") as progress:
        summary = fill_cache(resolve(preset, overrides), progress.update)
    size = f"{summary['bytes_each'] / 1e6:.2g} MB each"
    finish(
        summary,
        as_json,
        f"{summary['prompts']} prompts, {summary['encoded']} new, {size}: {summary['cache']}",
    )


def fill_cache(
    config: Config, progress: Callable[[int], None] = lambda prompts: None
) -> dict[str, Any]:
    """Encodes all training and test prompts of a configuration and keeps them in its cache.

    The text of `model.instruction`, if it is set, is put before each prompt. Also encodes the empty
    prompt, which guidance needs, without the instruction. Prompts that are in the cache with this
    instruction are not encoded again. Only the text encoders of the model are loaded. The model and
    prompt sets of the hub are downloaded if necessary.

    Args:
        config: The configuration. `model.prompt_cache_dir` names the directory of the cache.
        progress: Called after each batch with the number of its prompts, those in the cache
            included. The empty prompt is not reported. The default does nothing.

    Returns:
        A dict: "cache" (the directory as text), "prompts" (the number of distinct prompts, with the
        empty one), "encoded" (how many of them were not in the cache) and "bytes_each" (the bytes
        of the arrays of one encoded prompt).

    Raises:
        InputError: If `model.prompt_cache_dir` is None, or the model, a file or the cache cannot be
            used, or the model takes no instruction and there is one.
        RunError: If an encoded prompt cannot be written to the disk.
    """
    prompts = list(
        dict.fromkeys([p for prompt_set in load_prompt_sets(config) for p in prompt_set])
    )
    instruction = read_instruction(config)
    mesh = sharding.row_mesh(open_mesh(config))  # as a run encodes them, to the bit
    tokens = config.model.max_sequence_length
    encoders = open_text_encoders(
        open_model(config.model.path), config.rollout.precision, mesh, config.model.prompt_cache_dir
    )
    if encoders.cache is None:
        raise InputError(
            "model.prompt_cache_dir=None: expected a directory to be filled, or '' for the one in "
            "the user's cache directory"
        )
    encoders.check_instruction(instruction)
    empty, encoded = encoders.encode([""], tokens)
    for start in range(0, len(prompts), encoders.prompts_per_chunk):
        part = prompts[start : start + encoders.prompts_per_chunk]
        encoded += encoders.encode(part, tokens, instruction)[1]
        progress(len(part))
    size = sum(x.nbytes for x in empty.values())
    return {
        "cache": str(encoders.cache.folder),
        "prompts": len(prompts) + 1,
        "encoded": encoded,
        "bytes_each": size,
    }
