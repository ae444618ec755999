"""The model card of a published run: the `README.md` of its repository on the Hugging Face hub.

It states what a reader needs to use and to judge the policy: the base model and its license, the
reward, the settings, held-out scores with standard errors, images before and after, and the command
that trained it.
"""

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from solrl_jax.config.presets import resolve
from solrl_jax.config.schema import Config
from solrl_jax.config.serialization import to_tree
from solrl_jax.config.sizes import evaluation_size
from solrl_jax.config.validation import section_names
from solrl_jax.config.values import ConfigError
from solrl_jax.data.hub_prompts import HUB
from solrl_jax.errors import InputError
from solrl_jax.models.pipeline import Pipeline
from solrl_jax.rl.trainable.lora_files import DIFFUSERS_FILE
from solrl_jax.runs import metrics
from solrl_jax.storage import files, hub
from solrl_jax.storage.readers import parse_json, read_text

# The image in the folder of a published run, and where a run directory has it.
IMAGE = "images/before-after.png"
RUN_IMAGE = "pictures/before-after.png"
# What the folder of a published run may hold.
FILES = {"README.md", "images", "transformer", DIFFUSERS_FILE}
# Settings that the published command leaves out, because they belong to the machine or the
# directory of a run, or, like "version", to the file `config.yaml`.
PLACES = ("run", "mesh", "model.prompt_cache_dir", "reward.paths", "reward.workers", "version")


class License(NamedTuple):
    """The license of a base model, in the fields of a card's metadata.

    Attributes:
        license: The identifier that the hub has for the license, e.g. "apache-2.0"; "other" for a
            license without one.
        license_name: The name of a license without an identifier. None: the license has an
            identifier, or the card of the base model does not name it.
        license_link: The address of the text of such a license, or None as for `license_name`.
    """

    license: str
    license_name: str | None = None
    license_link: str | None = None


def _other_license(name: str, repository: str, file: str) -> License:
    """Returns a license that the hub has no identifier for.

    Args:
        name: The name of the license, as the card of the base model has it in `license_name`.
        repository: The repository of the base model, OWNER/NAME.
        file: The file of that repository with its text.

    Returns:
        The license with the identifier "other", this name, and the address of the file on the hub.
    """
    return License("other", name, f"https://huggingface.co/{repository}/blob/main/{file}")


_SANA = (
    "Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers",
    "Efficient-Large-Model/Sana_600M_512px_diffusers",
    "Efficient-Large-Model/SANA1.5_1.6B_1024px_diffusers",
    "Efficient-Large-Model/SANA1.5_4.8B_1024px_diffusers",
)
_STABILITY = (
    "stabilityai/stable-diffusion-3.5-large",
    "stabilityai/stable-diffusion-3.5-medium",
)
_FLUX = "flux-non-commercial-license"
_BFL = "black-forest-labs"
# The licenses of the models that presets name.
LICENSES = {
    **{name: _other_license("nscl-v2-custom", name, "LICENSE.txt") for name in _SANA},
    **{name: _other_license("stabilityai-ai-community", name, "LICENSE.md") for name in _STABILITY},
    f"{_BFL}/FLUX.1-dev": _other_license(
        "flux-1-dev-non-commercial-license", f"{_BFL}/FLUX.1-dev", "LICENSE.md"
    ),
    f"{_BFL}/FLUX.2-klein-4B": License("apache-2.0"),
    f"{_BFL}/FLUX.2-klein-base-4B": License("apache-2.0"),
    f"{_BFL}/FLUX.2-klein-9B": _other_license(_FLUX, f"{_BFL}/FLUX.2-klein-9B", "LICENSE.md"),
    f"{_BFL}/FLUX.2-klein-base-9B": _other_license(
        _FLUX, f"{_BFL}/FLUX.2-klein-base-9B", "LICENSE.md"
    ),
    "Qwen/Qwen-Image": License("apache-2.0"),
    "Qwen/Qwen-Image-2512": License("apache-2.0"),
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": License("apache-2.0"),
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": License("apache-2.0"),
    "Tongyi-MAI/Z-Image": License("apache-2.0"),
    "Tongyi-MAI/Z-Image-Turbo": License("apache-2.0"),
}


def model_card(
    run: Path,
    config: Config,
    name: str,
    export: Mapping[str, Any],
    pipeline: type[Pipeline],
    *,
    has_image: bool,
    has_adapters: bool,
) -> str:
    """Returns the text of a model card.

    Args:
        run: The run directory. Scores are from its `metrics.jsonl`: those of the first evaluation
            and of the last one up to the exported iteration; without any, the card says that the
            run was not evaluated. Devices and version are from its `run.json`; without it, they are
            left out.
        config: The configuration with which the run was trained.
        name: The repository that the card is for, OWNER/NAME.
        export: The result of `api.export`: "iteration", "rank" and "alpha" (the LoRA settings, also
            of a run without adapters), and "trained_in_full" (a number of arrays) if any parameter
            is trained in full. The card then describes a whole transformer.
        pipeline: The class of the base model's pipeline.
        has_image: Whether the card shows the image `images/before-after.png`, which must then be in
            the folder of the card.
        has_adapters: Whether the folder `transformer` also has a LoRA, for parameters that are not
            trained in full.

    Returns:
        Markdown with metadata in YAML at the top: a description of the weights, the license of the
        base, an example in Python, held-out scores, settings, and the command that trained the run
        (unless `training_command` returns None, as for a preset that no longer exists). Absolute
        paths in settings are cut to their last part.

    Raises:
        InputError: If `metrics.jsonl` is too large to be read.
    """
    whole = bool(export.get("trained_in_full"))
    base = config.model.path
    rewards = " + ".join(config.reward.weights)
    kind = "whole transformer" if whole else "LoRA"
    sections = [
        _front_matter(config, whole),
        f"# {name}",
        f"A {kind} for {_base_link(base)}, trained by reinforcement learning on the reward "
        f"**{rewards}** with solrl_jax, in the framework of "
        f"[Sol-RL](https://arxiv.org/abs/2604.06916), for {export['iteration']} iterations. The "
        "weights are the average (EMA) of the trained policy.",
        _license_sentence(base),
        "## Use",
        _usage(config, name, pipeline, whole, has_adapters),
        "## Held-out scores",
        _scores(run, config, export["iteration"]),
    ]
    if has_image:
        sections += [
            f"![held-out prompts before and after training]({IMAGE})",
            "Held-out prompts from the same noise, before and after training.",
        ]
    sections += ["## Settings", _settings(run, config, export)]
    command = training_command(config)
    if command is not None:
        sections += ["The command, with everything that differs from its preset:", _code(command)]
    return "\n\n".join(sections) + "\n"


def find_license(base: str) -> License | None:
    """Returns the license of a base model, without asking the hub.

    It is apache-2.0 for every "embedded:NAME". Otherwise it is looked up among the models that
    presets name (`LICENSES`), then in the card of the model: in its directory, or in the hub's
    cache.

    Args:
        base: `model.path`: a repository of the hub, a directory, or "embedded:NAME".

    Returns:
        The license; None if it is found in neither place.
    """
    if base.startswith("embedded:"):
        return License("apache-2.0")
    if base in LICENSES:
        return LICENSES[base]
    folder = Path(base) if Path(base).is_dir() else None
    if folder is None and hub.is_name(base):
        folder = hub.find_cached(base, "README.md")
    metadata = hub.read_card(folder, "model") if folder is not None else {}
    identifier = metadata.get("license")
    if not isinstance(identifier, str):
        return None
    return License(identifier, metadata.get("license_name"), metadata.get("license_link"))


def training_command(config: Config) -> str | None:
    """Returns the command that trains a configuration again, for a shell.

    Settings that belong to the machine or the directory of the run are left out (`PLACES`): the
    sections `run` and `mesh`, `model.prompt_cache_dir`, `reward.paths`, `reward.workers` and
    `version`. Absolute paths are cut to their last part.

    Args:
        config: The configuration with which the run was trained.

    Returns:
        "solrl train PRESET [family=FAMILY] KEY=VALUE ...", quoted for a shell. The family is a file
        of settings in `configs/family`, e.g. "sol_rl"; it is named only if it is not the preset's
        own. The other settings are all those that differ from the preset in that family. None if
        the preset or the family does not exist, or the two do not go together.
    """
    family = f"family={config.family}"
    try:
        preset = resolve(config.preset)
        parts = [config.preset] if preset.family == config.family else [config.preset, family]
        start = to_tree(resolve(config.preset, parts[1:]))
    except ConfigError:
        return None
    for key, value in _changes(start, to_tree(config), ""):
        text = yaml.safe_dump(
            _cut_absolute_paths(value), default_flow_style=True, width=10**6, sort_keys=False
        )
        parts.append(f"{key}={text.removesuffix('...' + chr(10)).strip()}")
    return " ".join(["solrl", "train", *map(shlex.quote, parts)])


def _changes(
    start: Mapping[str, Any], end: Mapping[str, Any], prefix: str
) -> Iterator[tuple[str, Any]]:
    """Yields the settings in which two configurations differ.

    Settings that belong to the machine or the directory of a run (`PLACES`) are left out.

    Args:
        start: The fields of a section of the first configuration by name; inner sections are dicts.
        end: The same fields of that section in the second configuration.
        prefix: The dotted name of the section with a dot at its end; "" for the whole.

    Yields:
        The dotted name of a field that is no section, and its value in `end` (a dict as a whole).
    """
    for key, value in end.items():
        name = f"{prefix}{key}"
        if name in PLACES or value == start[key]:
            continue
        if name in section_names():
            yield from _changes(start[key], value, f"{name}.")
        else:
            yield name, value


def _cut_absolute_paths(value: Any) -> Any:
    """Returns a value of a setting with absolute paths cut to their last part, for publication.

    Args:
        value: A value of JSON, which is not changed. A text that begins with "/" is cut, also in
            lists and in the values of dicts. URLs, and paths within a longer text, stay.
    """
    if isinstance(value, str):
        return Path(value).name if Path(value).is_absolute() else value
    if isinstance(value, list):
        return [_cut_absolute_paths(item) for item in value]
    if isinstance(value, dict):
        return {key: _cut_absolute_paths(item) for key, item in value.items()}
    return value


def _front_matter(config: Config, whole: bool) -> str:
    """Returns the metadata of the card in YAML, between lines of dashes.

    It has the license if one is known, the base model if it can be a repository of the hub
    (`_names_repository`), the library ("diffusers"), the kind of pipeline ("text-to-image" or
    "text-to-video"), tags, and the dataset if the training prompts are from the hub.

    Args:
        config: The configuration with which the run was trained, which names the base model and the
            prompts.
        whole: True: parameters are trained in full, and the relation to the base is "finetune".
            False: a LoRA, whose relation is "adapter" and which gets the tag "lora".
    """
    base = config.model.path
    metadata: dict[str, Any] = {}
    license = find_license(base)
    if license is not None:
        metadata |= {key: value for key, value in license._asdict().items() if value is not None}
    if _names_repository(base):
        metadata["base_model"] = base
        metadata["base_model_relation"] = "finetune" if whole else "adapter"
    metadata["library_name"] = "diffusers"
    task = "text-to-image" if len(evaluation_size(config)) == 2 else "text-to-video"
    metadata["pipeline_tag"] = task
    metadata["tags"] = [task, "solrl_jax", "reinforcement-learning"]
    if not whole:
        metadata["tags"].append("lora")
    prompts = config.prompts.train
    if prompts.startswith(HUB):
        metadata["datasets"] = [prompts.split(":")[1]]
    return f"---\n{yaml.safe_dump(metadata, sort_keys=False)}---"


def _names_repository(base: str) -> bool:
    """Whether `model.path` has the form OWNER/NAME of a repository of the hub, and is not the path
    of an existing directory. The hub is not asked.

    Args:
        base: `model.path`: a repository of the hub, a directory, or "embedded:NAME".
    """
    return not base.startswith("embedded:") and not Path(base).is_dir() and hub.is_name(base)


def _base_link(base: str) -> str:
    """Returns the name of the base model in Markdown, with a link if it can be a repository of the
    hub (`_names_repository`).

    Any other base is shown as code, an absolute path cut to its last part.

    Args:
        base: `model.path`: a repository of the hub, a directory, or "embedded:NAME".
    """
    if _names_repository(base):
        return f"[{base}](https://huggingface.co/{base})"
    return f"`{_cut_absolute_paths(base)}`"


def _license_sentence(base: str) -> str:
    """Returns the sentence about the license of the base model, with a link to its text if known.

    If no license is known, a second sentence asks whoever publishes the card to add it.

    Args:
        base: `model.path`: a repository of the hub, a directory, or "embedded:NAME".
    """
    license = find_license(base)
    if license is None:
        return (
            "The license of the base applies to these weights. It is not known to the program that "
            "wrote this card: please add it."
        )
    name = license.license_name or license.license
    link = f"[{name}]({license.license_link})" if license.license_link else name
    return f"The license of the base applies to these weights: {link}."


def _usage(
    config: Config,
    name: str,
    pipeline: type[Pipeline],
    whole: bool,
    has_adapters: bool = False,
) -> str:
    """Returns a block of Python that generates an image, or a clip, with diffusers.

    Args:
        config: The configuration of the run. The example loads its `model.path` (an absolute path
            cut to its last part) and has the size and the number of steps of its evaluation, the
            guidance of its rollout, and the number of prompt tokens.
        name: The repository, OWNER/NAME.
        pipeline: The class of the base model's pipeline, which knows the arguments of diffusers.
        whole: Whether parameters are trained in full. The example then loads a transformer, and
            otherwise a LoRA.
        has_adapters: Whether the folder of that transformer also has a LoRA, which the example then
            loads too. Without `whole` it is not read.
    """
    base = str(_cut_absolute_paths(config.model.path))
    height, width, *frames = evaluation_size(config)
    if whole:
        imports = "from diffusers import AutoModel, DiffusionPipeline"
        load = [
            "transformer = AutoModel.from_pretrained(",
            f'    "{name}", subfolder="transformer", torch_dtype=torch.bfloat16',
            ")",
            "pipeline = DiffusionPipeline.from_pretrained(",
            f'    "{base}", transformer=transformer, torch_dtype=torch.bfloat16',
            ').to("cuda")',
        ]
        if has_adapters:
            load += [
                "pipeline.load_lora_weights(",
                f'    "{name}", subfolder="transformer", weight_name="{DIFFUSERS_FILE}"',
                ")",
            ]
    else:
        imports = "from diffusers import DiffusionPipeline"
        load = [
            f'pipeline = DiffusionPipeline.from_pretrained("{base}", torch_dtype=torch.bfloat16)',
            'pipeline.to("cuda")',
            f'pipeline.load_lora_weights("{name}")',
        ]
    rollout = config.rollout
    arguments = pipeline.diffusers_guidance(rollout.guidance_scale, rollout.true_cfg_scale)
    if pipeline.accepts_instruction and config.model.instruction is None:
        arguments["complex_human_instruction"] = None  # by default, diffusers gives a long one
    arguments["max_sequence_length"] = config.model.max_sequence_length
    lines = [
        "import torch",
        imports,
        "",
        *load,
        f"{'clip' if frames else 'image'} = pipeline(",
        '    "a red bicycle leaning against a yellow wall",',
        f"    height={height}, width={width}, num_inference_steps={config.eval.num_steps},",
        *(f"    {argument}={_python(value)}," for argument, value in arguments.items()),
        *(f"    num_frames={count}," for count in frames),
        ").frames[0]" if frames else ").images[0]",
    ]
    return _code("\n".join(lines), "python")


def _python(value: Any) -> str:
    """Formats a number, a text or None as Python source.

    Args:
        value: The value. A text must not contain quotes or backslashes; double quotes are put
            around it. A float has six significant digits, and no decimal point if it is an integer.
    """
    if isinstance(value, str):
        return f'"{value}"'
    return f"{value:g}" if isinstance(value, float) else repr(value)


def _scores(run: Path, config: Config, iteration: int) -> str:
    """Returns the table of held-out scores before and after training.

    Args:
        run: The run directory. The scores are from its `metrics.jsonl`, a description of the
            evaluation from its `run.json`.
        config: The configuration of the run. The scores in its `reward.eval_only` are marked as not
            trained on, and it says how many images were scored.
        iteration: The exported iteration. Later evaluations are ignored.

    Returns:
        A Markdown table with standard errors and a line about the evaluation. It has one column for
        the first evaluation up to `iteration` and one for the last, or a single one if they are the
        same. The head of a column is "before training" for iteration 0, otherwise "after iteration
        N". Without an evaluation, the result is a sentence that says so.

    Raises:
        InputError: If `metrics.jsonl` is too large to be read.
    """
    rows = [row for row in metrics.read(run) if "eval/reward" in row]
    rows = [row for row in rows if row["iteration"] <= iteration]
    if not rows:
        return "The run was not evaluated."
    evaluations = [rows[0]] if len(rows) == 1 else [rows[0], rows[-1]]
    heads = [f"after iteration {row['iteration']}" for row in evaluations]
    if evaluations[0]["iteration"] == 0:
        heads[0] = "before training"
    suffix = "/standard_error"
    names = [
        key.removeprefix("eval/").removesuffix(suffix)
        for key in evaluations[-1]
        if key.endswith(suffix)
    ]
    lines = [f"| score | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
    for name in names:
        watched = name not in config.reward.weights and any(
            name == reward or name.startswith(f"{reward}/") for reward in config.reward.eval_only
        )
        values = [_with_error(row, f"eval/{name}") for row in evaluations]
        label = f"{name} (not trained on)" if watched else name
        lines.append(f"| {label} | {' | '.join(values)} |")
    facts = _run_facts(run)
    setting = facts.get("evaluation")
    images = config.eval.num_prompts * config.eval.num_images_per_prompt
    note = f"Means over {images} images of held-out prompts, ± one standard error over images"
    note += f" ({setting})." if isinstance(setting, str) else "."
    return "\n".join(lines) + f"\n\n{note}"


def _with_error(row: Mapping[str, Any], key: str) -> str:
    """Returns a score with its standard error as text.

    Args:
        row: A row of `metrics.jsonl`, values by name. A value may be None.
        key: The name of the score in it, e.g. "eval/reward". Its standard error is
            "KEY/standard_error".

    Returns:
        "MEAN ± ERROR" with four decimal places, the mean alone if its standard error is unknown,
        and "-" if the mean is unknown.
    """
    mean = row.get(key)
    error = row.get(f"{key}/standard_error")
    if mean is None:
        return "-"
    return f"{mean:.4f}" if error is None else f"{mean:.4f} ± {error:.4f}"


def _settings(run: Path, config: Config, export: Mapping[str, Any]) -> str:
    """Returns a Markdown table of the settings that matter most for a reader of the card.

    Args:
        run: The run directory. Rows for devices and the version of solrl_jax are from its
            `run.json`, and are left out without it.
        config: The configuration of the run. Rows for preset, reward, objective, trained
            parameters, prompts, candidates, precisions and steps, size, learning rate and seed are
            from it.
        export: The result of `api.export`, of which "trained_in_full" (a number of arrays) or
            else "rank" and "alpha" of the LoRA are shown.
    """
    rollout = config.rollout
    explore = rollout.explore
    weights = ", ".join(f"{name} x {value:g}" for name, value in config.reward.weights.items())
    if config.reward.combine == "advantages":
        weights += ", combined as advantages"
    if export.get("trained_in_full"):
        trained = f"{export['trained_in_full']} parameters in full"
    else:
        trained = f"LoRA of rank {export['rank']}, alpha {export['alpha']:g}"
    height, width, *frames = evaluation_size(config)
    facts = _run_facts(run)
    rows = {
        "preset, family": f"{config.preset}, {config.family}",
        "reward": weights,
        "objective": config.algorithm.objective,
        "trained": trained,
        "training prompts": _cut_absolute_paths(config.prompts.train),
        "per iteration": f"{config.train.num_prompts} prompts x {rollout.candidates} candidates, "
        f"{rollout.kept} kept",
        "exploration": f"{explore.precision}, {explore.num_steps} steps",
        "training samples": f"{rollout.precision}, {rollout.num_steps} steps, {rollout.solver}, "
        f"guidance {rollout.guidance_scale:g}",
        "image size": f"{width} x {height}" + "".join(f", {count} frames" for count in frames),
        "learning rate": f"{config.optimizer.learning_rate:g}",
        "seed": str(config.seed),
        "devices": facts.get("devices"),
        "solrl_jax": facts.get("solrl_jax"),
    }
    lines = ["| setting | value |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in rows.items() if value is not None]
    return "\n".join(lines)


def _run_facts(run: Path) -> Mapping[str, Any]:
    """Returns the content of a run's `run.json`, or {} if it is missing or damaged.

    Args:
        run: The run directory, in which `run.json` is read.
    """
    try:
        facts = parse_json(read_text(run / "run.json"))
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


def finished_after(run: Path) -> int | None:
    """Returns the iteration after which a run finished.

    The run's `pictures/before-after.png` shows the policy after this iteration.

    Args:
        run: The run directory, in which the entry "finished_after_iteration" of `run.json` is read.

    Returns:
        The number of the run's last iteration; None if the latest start of the run has not finished
        it, or if `run.json` is missing or damaged.
    """
    iteration = _run_facts(run).get("finished_after_iteration")
    return iteration if isinstance(iteration, int) else None


def add_card(
    folder: Path,
    run: Path,
    config: Config,
    name: str,
    export: Mapping[str, Any],
    pipeline: type[Pipeline],
) -> None:
    """Adds the model card to a folder with exported weights, and the run's image if there is one.

    The image compares the base model with the policy at the end of the run. It is therefore added
    only if it exists, the run has finished, and its last iteration is exported. Otherwise an older
    image in the folder stays, but the card does not show it.

    Args:
        folder: The folder, which is created if necessary. `README.md` and
            `images/before-after.png` are written in it; existing ones are replaced.
        run: The run directory, which has the image (`pictures/before-after.png`), the scores
            (`metrics.jsonl`) and the devices (`run.json`).
        config: The configuration with which the run was trained.
        name: The repository that the card is for, OWNER/NAME.
        export: The result of `api.export`: "iteration", "rank" and "alpha" (the LoRA settings, also
            of a run without adapters), and "trained_in_full" (a number of arrays) if any parameter
            is trained in full.
        pipeline: The class of the base model's pipeline.

    Raises:
        InputError: If `metrics.jsonl` of the run is too large to be read.
        RunError: If the disk refuses.
    """
    source = run / RUN_IMAGE
    has_image = source.is_file() and finished_after(run) == export["iteration"]
    if has_image:
        with files.disk_errors_as_run_errors(folder / IMAGE):
            files.atomic_write(folder / IMAGE, source.read_bytes())
    has_adapters = (folder / "transformer" / DIFFUSERS_FILE).is_file()
    card = model_card(
        run, config, name, export, pipeline, has_image=has_image, has_adapters=has_adapters
    )
    files.atomic_write(folder / "README.md", card)


def check_replaceable(folder: Path) -> None:
    """Checks that a folder holds nothing but an earlier published run, which may be replaced.

    Args:
        folder: The folder, which need not exist.

    Raises:
        InputError: If it is a file or a link, or holds anything but `README.md`, `images`,
            `transformer` and `pytorch_lora_weights.safetensors`.
    """
    files.refuse_link("out", folder)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"out={folder}: is no directory; name one for the files to upload")
    others = sorted({f.name for f in folder.iterdir()} - FILES) if folder.exists() else []
    if others:
        raise InputError(
            f"out={folder}: holds {', '.join(others)}, which would be removed; name another "
            "directory"
        )


def check_name(name: str) -> None:
    """Checks that a text can name a repository of a user or an organization on the hub.

    Args:
        name: The text that a user gave as the argument `hub`.

    Raises:
        InputError: If it is not of the form OWNER/NAME, or has characters or a length that the hub
            does not allow.
    """
    if not hub.is_name(name):
        raise InputError(f"hub={name!r}: expected the name of a repository, OWNER/NAME")


def _code(text: str, language: str = "sh") -> str:
    """Returns a fenced block of code in Markdown.

    Args:
        text: The code, in one or more lines. It must not have a fence of its own.
        language: The name of its language behind the opening fence, e.g. "python".
    """
    return f"```{language}\n{text}\n```"
