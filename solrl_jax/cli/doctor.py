"""`solrl doctor`: reports what this machine supports, and what a preset still requires."""

import contextlib
import ctypes
import dataclasses
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import jax

from solrl_jax import api
from solrl_jax.cli.options import finish, json_option, overrides_argument
from solrl_jax.config.presets import resolve
from solrl_jax.config.schema import Config
from solrl_jax.config.sizes import evaluation_size, training_sizes
from solrl_jax.config.values import ConfigError
from solrl_jax.data.prompts import Prompt, load_prompts
from solrl_jax.errors import InputError, as_input_error, one_line
from solrl_jax.models.backbone import DTYPES
from solrl_jax.models.locate import mhla_override, open_model
from solrl_jax.models.text_encoders.cache import open_cache
from solrl_jax.parallel import sharding
from solrl_jax.planning import device_checks, proposals
from solrl_jax.planning.abstract import open_configurations
from solrl_jax.planning.targets import CUDNN
from solrl_jax.quant.formats import AUTO, FORMATS, DeviceInfo, resolve_format
from solrl_jax.rewards.host import ScoringFailure
from solrl_jax.rewards.judge.settings import open_judge
from solrl_jax.rewards.registry import (
    is_judge,
    open_judge_reward,
    open_rewards,
    reward_names,
)
from solrl_jax.rewards.sources import SOURCES, Converted, Hub, find
from solrl_jax.rl.experiment import (
    check_guidance,
    check_loaded_objective,
    first_device_info,
    fit_prompt_counts,
    open_mesh,
    read_instruction,
    reward_gradients_for,
    select_parameters,
)
from solrl_jax.rl.memory_check import check_memory, device_memory
from solrl_jax.runs.record import PACKAGES
from solrl_jax.storage import hub

EXTRAS = {
    "rewards": "rapidocr",
    "judge": "openai",
    "convert": "torch",
    "wandb": "wandb",
    "stores": "s3fs",
}  # a package that each extra brings
DRIVER = Path("/proc/driver/nvidia/version")  # is there where NVIDIA's driver is loaded


@click.command("doctor")
@click.argument("preset", required=False)
@overrides_argument
@json_option
def command(preset: str | None, overrides: tuple[str, ...], as_json: bool) -> None:
    """Report what this machine supports, and what PRESET still requires.

    On a GPU, also run the kernels of the low-precision formats and of attention for a moment, and
    compare them with plain JAX. For a PRESET, also propose settings for this machine, which
    `solrl train PRESET mesh=auto` takes. Loads no weights and downloads nothing but prompt sets of
    the Hub. Sends a request to the endpoint of each judge that PRESET uses as a reward, and simpler
    ones while it refuses. The exit code is 1 if something is missing or a kernel is wrong.

    \b
    solrl doctor
    solrl doctor flux1_sol_rl_hpsv2 mesh.fsdp=8 reward.paths.hpsv2=weights/hpsv2.safetensors

    \f
    An objective from outside the package is imported. So are reward functions, unless an earlier
    check finds something that is missing or has to be downloaded (`find_missing`). The kernels run
    on the first device only.

    Args:
        preset: The name of a preset; None: only the machine is described.
        overrides: Settings that differ, as `key=value`. "mesh=auto" is ignored.
        as_json: Whether to print one line of JSON in place of text: the result of `machine`, with a
            preset also those of `find_missing` and "proposal" (`proposal`).

    Raises:
        ConfigError: If the preset or an override is invalid.
        InputError: If the user has no home directory.
        SystemExit: With code 1, if something is missing or wrong.
    """
    overrides = tuple(override for override in overrides if override != proposals.MESH_AUTO)
    config = None if preset is None else resolve(preset, overrides)
    summary = machine()
    if config is not None:
        wanted = find_missing(config) | {"proposal": proposal(config)}
        summary |= wanted | {"missing": summary["missing"] + wanted["missing"]}
    finish(summary, as_json, table(summary))
    if missing := summary["missing"]:
        click.echo(f"solrl: {len(missing)} missing, first {one_line(missing[0])}", err=True)
    if wrong := _wrong_kernels(summary):
        click.echo(f"solrl: {len(wrong)} wrong, first {one_line(wrong[0])}", err=True)
    if missing or wrong:
        sys.exit(1)


def machine() -> dict[str, Any]:
    """Describes this machine. On a GPU, also tests its kernels (`device_checks`) on the first
    device, which takes a moment.

    It starts JAX's backend, and on a GPU loads cuDNN into the process.

    Returns:
        A dict of JSON values:

        * "versions": the versions of this package, Python and the packages that it needs, by name.
        * "extras": by the name of each optional extra of this package, whether it is installed.
        * "devices": "count" (of all hosts), "memory" (bytes of one; on a CPU, of the machine),
            "platform", "kind" and "capability" (of CUDA; (0, 0) for all others).
        * "formats": by the name of each number format, whether the device runs it natively.
        * "auto": the name of the format that the setting "auto" stands for on this device.
        * "cudnn": the version of cuDNN; None without it.
        * "checks": by the name of each tested kernel None if it is correct, else the problem; {}
            without an NVIDIA GPU.
        * "warnings": sentences on known faults of this cuDNN.
        * "hub" and "prompt_cache": the directories of downloads and of encoded prompts (the default
            one), each with "folder", "free" (bytes) and "writable". "hub" also has "offline":
            whether an environment variable (HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE) forbids
            downloads.
        * "missing": messages: JAX does not see an NVIDIA GPU that is there, or a GPU has no cuDNN
            or one that is too old.

    Raises:
        InputError: If the user has no home directory.
    """
    device = first_device_info()
    cache = open_cache("")
    assert cache is not None
    dnn = cudnn() if device.platform == "gpu" else None
    missing = []
    if device.platform == "cpu" and DRIVER.exists():
        missing.append(
            "JAX does not see the NVIDIA GPU of this machine; expected pip install "
            "'solrl_jax[cuda13]'"
        )
    if device.platform == "gpu" and (
        dnn is None or _version_numbers(dnn) < _version_numbers(CUDNN)
    ):
        missing.append(f"cuDNN {dnn or 'is not found'}; expected {CUDNN} or newer")
    return {
        "versions": {
            "solrl_jax": importlib.metadata.version("solrl_jax"),
            "python": platform.python_version(),
        }
        | {name: importlib.metadata.version(name) for name in PACKAGES},
        "extras": {
            extra: importlib.util.find_spec(package) is not None
            for extra, package in EXTRAS.items()
        },
        "devices": {
            "count": jax.device_count(),
            "memory": device_memory(),
            **dataclasses.asdict(device),
        },
        "formats": {name: form.is_native(device) for name, form in FORMATS.items()},
        "auto": resolve_format(AUTO, device).name,
        "cudnn": dnn,
        "checks": device_checks.run(device_checks.checks_for(device)),
        "warnings": [] if dnn is None else device_checks.cudnn_warnings(dnn, device),
        "hub": {**_folder(_hub_cache()), "offline": hub.offline_variable() is not None},
        "prompt_cache": _folder(cache.folder),
        "missing": missing,
    }


def find_missing(config: Config) -> dict[str, Any]:
    """Finds what this machine lacks to run a configuration. Loads no weights, and downloads nothing
    but prompt sets of the hub that its cache lacks.

    All parts are checked, so that the result names everything that is missing. There is one
    exception: names, options and functions of rewards are checked (and functions imported), and
    prompts by the rewards, only if the objective, the prompts, the instruction, the cache and the
    files of rewards can be used and nothing has to be downloaded. If the configuration uses judges
    (vision-language models behind an HTTP endpoint), each is tested with requests in any case
    (`_probe_judge`). JAX's backend is started.

    Args:
        config: The configuration to check.

    Returns:
        A dict of JSON values:

        * "preset": its name.
        * "weights": bytes of "transformer", "text encoders" and "vae" (`check_sizes`); empty if the
            model is unknown or cannot be trained on this machine.
        * "downloads": names of the hub repositories that the first start will download. If an
            environment variable (HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE) forbids downloads,
            "missing" has them too.
        * "judges": for each judge that answers, by its name, a line with its address and what it
            supports.
        * "adapted": a line for each setting that is lowered because a prompt file has fewer
            prompts.
        * "missing": a message for each problem.
    """
    missing: list[str] = []
    downloads = [*_model_download(config), *_reward_downloads(config)]
    weights: dict[str, int] = {}

    @contextlib.contextmanager
    def noted() -> Iterator[None]:
        try:
            yield
        except (InputError, ConfigError) as error:
            missing.append(str(error))

    with noted():
        check_loaded_objective(config)
    prompts: dict[str, list[Prompt]] = {}
    for field, path in (
        ("prompts.train", config.prompts.train),
        ("prompts.test", config.prompts.test),
    ):
        with noted():
            prompts[field] = load_prompts(path, field)
    adapted: list[str] = []
    if len(prompts) == 2:
        with noted():
            config, adapted = fit_prompt_counts(config, *map(len, prompts.values()))
    with noted():
        read_instruction(config)
    with noted():
        open_cache(config.model.prompt_cache_dir)
    for key, source in _reward_sources(config).items():
        with noted():
            if isinstance(source, Converted):
                find(key, config.reward.paths)
    if not missing and not downloads:
        with noted():
            opened_rewards = open_rewards(
                config.reward,
                explore=config.rollout.explore.reward,
                gradients_for=reward_gradients_for(config),
            )
            opened_rewards.check_sizes((*training_sizes(config), evaluation_size(config)))
            opened_rewards.check_prompts(*prompts.values())
    judges: dict[str, str] = {}
    for name in filter(is_judge, _reward_names(config)):
        with noted():
            judges[name] = _probe_judge(name, config)
    with noted():
        weights |= check_sizes(config)
    with noted():
        if not _model_download(config):
            _check_weights(config.model.path)
    if variable := hub.offline_variable():
        missing += [
            f"{name}: is not in the Hub's cache, and {variable} is set" for name in downloads
        ]
    return {
        "preset": config.preset,
        "weights": weights,
        "downloads": downloads,
        "judges": judges,
        "adapted": adapted,
        "missing": list(dict.fromkeys(missing)),
    }


def _reward_names(config: Config) -> list[str]:
    """Returns the names of all rewards that a configuration uses, sorted.

    They are those for training, for evaluations only, and for ranking candidates.

    Args:
        config: The configuration.

    Returns:
        The names, e.g. ["hpsv2", "pickscore"]. A score such as "judge/style" gives the name of its
        reward, "judge".
    """
    explored = config.rollout.explore.reward or {}
    return reward_names((*config.reward.weights, *config.reward.eval_only, *explored))


def _probe_judge(name: str, config: Config) -> str:
    """Tests a judge, a vision-language model behind an HTTP endpoint, with a request for a gray
    image.

    If the endpoint refuses the request, it is sent again without one of its parts: in turn the
    seed, the log-probabilities, the JSON schema and the images, and finally without all of these.
    The test stops at the first answer, so the error can say which request the endpoint accepts.

    Args:
        name: The name of the judge as a reward: "judge" or "judge-NAME".
        config: The configuration, with the options of the judge in `reward.options`.

    Returns:
        A text with the address of the endpoint and the features that it supports.

    Raises:
        InputError: If the options are invalid, the package openai or httpx2 is missing, the
            endpoint does not answer, it refuses the complete request, or the answer cannot be
            turned into a score.
    """
    options = config.reward.options.get(name, {})
    open_judge_reward(name, options, config.reward.workers)
    # Only here, because the package openai may not be installed.
    from solrl_jax.rewards.judge.probe import describe, probe

    judge = open_judge(name, options)
    try:
        support = probe(judge)
    except ScoringFailure as failure:
        raise InputError(f"reward '{name}': {judge.settings.base_url}: {failure}") from None
    if support.problem is not None:
        raise InputError(
            f"reward '{name}': {judge.settings.base_url} {describe(support)}: {support.problem}"
        )
    return f"{judge.settings.base_url} {describe(support)}"


def proposal(config: Config) -> dict[str, Any]:
    """Proposes settings for this machine, those that `solrl train PRESET mesh=auto` would take.

    It starts JAX's backend.

    Args:
        config: The configuration: a preset with its overrides.

    Returns:
        A dict with four entries. "settings": a list of `key=value` that differ from `config`, [] if
        nothing is proposed or nothing differs. Training with `mesh=auto` would not change settings
        that an override names, but the list has them too. "planned": the bytes of one device that a
        plan in the package needs with these settings; None if they are a guess or nothing is
        proposed. "seconds": lower bounds from that plan, by the name of the phase of an iteration;
        {} without a plan, or if it is for another kind of device. "reason": a line on where the
        settings come from, or why there are none.
    """
    here = api.this_machine()
    chosen = proposals.propose(config, here, proposals.load_records())
    record = chosen.record
    same_kind = record is not None and proposals.is_same_kind(record, here)
    return {
        "settings": chosen.overrides(config),
        "planned": None if record is None else record.peak,
        "seconds": dict(record.seconds) if record is not None and same_kind else {},
        "reason": chosen.reason,
    }


def check_sizes(config: Config) -> dict[str, int]:
    """Computes the sizes of a model's parts, and checks that no single array of training, such as
    the latents of all candidates, is larger than the memory of this host or of a device.

    No weights are needed. JAX's backend is started.

    Args:
        config: The configuration.

    Returns:
        The bytes of "transformer", "text encoders" (together) and "vae" in the dtypes in which they
        are loaded, each as a whole, however many devices share it.

    Raises:
        InputError: If the model's configuration files are neither on this machine nor in this
            package, the settings or the mesh are not possible, or a device's share of the
            transformer, or one array of training, is larger than the memory for it
            (`check_memory`).
    """
    pipeline = open_configurations(config.model.path, mhla=mhla_override(config.model))
    dtype = DTYPES[config.rollout.precision]
    encoders = sum(part.num_parameters for part in pipeline.text_encoders.values())
    part_sizes = {
        "transformer": pipeline.transformer.num_parameters * dtype.itemsize,
        "text encoders": encoders * dtype.itemsize,
    }
    part_sizes["vae"] = pipeline.vae.num_parameters * (pipeline.vae_dtype or dtype).itemsize
    mesh = open_mesh(config)
    memory = device_memory()
    share = part_sizes["transformer"] / (mesh.shape["fsdp"] * mesh.shape["tensor"])
    if share > memory:
        raise InputError(
            f"mesh.fsdp={config.mesh.fsdp}: a device would hold {share / 1e9:.3g} GB of the "
            f"transformer and has {memory / 1e9:.3g} GB; expected more devices and mesh.fsdp, or a "
            "smaller model"
        )
    check_guidance(config, pipeline)
    trained_paths, _ = select_parameters(config, pipeline, first_device_info())
    check_memory(config, pipeline, trained_paths, sharding.row_groups(mesh))
    return part_sizes


def _check_weights(path: str) -> None:
    """Checks that a model's files are all there and contain the tensors of its networks, in their
    shapes. Only headers are read, no weights.

    Args:
        path: The model, as `model.path` names it: a directory, "embedded:NAME", or OWNER/NAME of a
            repository of the hub that is in the local cache.

    Raises:
        InputError: If a file is missing or damaged, a tensor is missing, unexpected or of another
            shape, or the model cannot be opened.
    """
    in_hub = not Path(path).is_dir() and hub.is_name(path)
    pipeline = open_model(str(hub.find_cached(path)) if in_hub else path)
    with as_input_error():
        for component in (pipeline.transformer, pipeline.vae, *pipeline.text_encoders.values()):
            component.check_files()


def _reward_sources(config: Config) -> dict[str, Hub | Converted]:
    """Returns the sources of the released weights of all rewards that a configuration uses: those
    for training, for evaluations only, and for ranking candidates.

    Args:
        config: The configuration.

    Returns:
        A dict by the name of a reward or of a part of it, e.g. "pickscore" or
        "pickscore/tokenizer". The values are repositories of the hub with their files (`Hub`), or
        files that `solrl convert` makes (`Converted`). Rewards without released weights are left
        out. `reward.paths` is not considered.
    """
    names = _reward_names(config)
    return {key: source for key, source in SOURCES.items() if key.split("/")[0] in names}


def _model_download(config: Config) -> list[str]:
    """Returns the hub repository of the model, if the first start has to download it.

    Args:
        config: The configuration.

    Returns:
        A list with the name of the repository. An empty list if the model is a directory, is part
        of this package, or has its `model_index.json` in the local cache.
    """
    path = config.model.path
    return (
        [path]
        if not Path(path).is_dir() and hub.is_name(path) and hub.find_cached(path) is None
        else []
    )


def _reward_downloads(config: Config) -> list[str]:
    """Returns the hub repositories of rewards that the first start has to download.

    Args:
        config: The configuration.

    Returns:
        The names, each once, of the repositories that are not completely in the local cache: those
        that `reward.paths` names (OWNER/NAME, unless there is such a directory), and the released
        ones of rewards that it does not name. Rewards with converted files (`Converted`) have none.
    """
    used = _reward_sources(config)
    paths = config.reward.paths
    given: dict[str, set[str]] = {}
    for key, source in used.items():
        if isinstance(source, Hub):
            given.setdefault(paths.get(key, source.name), set()).update(source.files)

    def absent(name, files):
        return hub.is_name(name) and any(hub.find_cached(name, file) is None for file in files)

    return [
        name for name, files in given.items() if not Path(name).is_dir() and absent(name, files)
    ]


def _wrong_kernels(summary: dict[str, Any]) -> list[str]:
    """Returns a list with a message "KERNEL: PROBLEM" for each kernel that was found to be wrong.

    Args:
        summary: The description of the machine. Its entry "checks" is a dict: the problem of each
            kernel by its name, or None if the kernel is correct.
    """
    return [f"{name}: {problem}" for name, problem in summary["checks"].items() if problem]


def cudnn() -> str | None:
    """Loads cuDNN into this process, and returns its version.

    Returns:
        The version, e.g. "9.12.0"; None if there is no cuDNN 9.
    """
    try:
        # JAX has loaded it from its wheel, if it came in one.
        number = int(ctypes.CDLL("libcudnn.so.9").cudnnGetVersion())
    except OSError:
        return None
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def _version_numbers(version: str) -> tuple[int, ...]:
    """Returns the integers of a version, so that versions can be compared.

    Args:
        version: Integers with dots between them, e.g. "9.10.1", which gives (9, 10, 1).
    """
    return tuple(map(int, version.split(".")))


def _hub_cache() -> Path:
    """Returns the directory in which `huggingface_hub` keeps downloads. It need not exist."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _folder(path: Path) -> dict[str, Any]:
    """Describes a directory. If it does not exist, free space and permission are those of the
    nearest directory above it that does.

    Args:
        path: The directory.

    Returns:
        A dict: "folder" (the path as text), "free" (bytes that are free on its disk) and "writable"
        (whether this user may write there).
    """
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    writable = existing.is_dir() and os.access(existing, os.W_OK)
    return {"folder": str(path), "free": shutil.disk_usage(existing).free, "writable": writable}


def table(summary: dict[str, Any]) -> str:
    """Formats the result of `solrl doctor` for a terminal.

    Args:
        summary: The description of the machine, with the keys that `machine` returns, e.g.
            "versions", "devices", "formats", "checks" and "missing". If a preset was given, it also
            has those of `find_missing` ("preset", "weights", "downloads", "judges", "adapted"), and
            "proposal", the result of `proposal`.

    Returns:
        Lines of the form "SUBJECT TEXT". Each wrong kernel has a line with the subject "wrong". The
        last lines have the subject "missing": one for each problem, or a single one with the text
        "nothing".
    """
    versions = summary["versions"]
    devices = summary["devices"]
    emulated = [name for name, native in summary["formats"].items() if not native]
    device = DeviceInfo(devices["platform"], devices["kind"], tuple(devices["capability"]))

    def state(folder):
        return "" if folder["writable"] else ", read-only"

    def where(folder):
        return f"{folder['folder']}, {folder['free'] / 1e9:.0f} GB free{state(folder)}"

    checked = [name for name, problem in summary["checks"].items() if problem is None]
    if summary["checks"]:
        checks = f"{', '.join(checked) or 'no kernel'}: the same as plain JAX"
    else:
        checks = f"nothing to try on {device.kind}; only GPUs have kernels to compare"
    extras = [
        f"{name} {'installed' if is_installed else 'not installed'}"
        for name, is_installed in summary["extras"].items()
    ]
    rows = [
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
        ("devices", f"{devices['count']} x {device.kind}, {devices['memory'] / 1e9:.3g} GB each"),
        ("native", ", ".join(name for name, native in summary["formats"].items() if native)),
        (
            "emulated",
            f"{', '.join(emulated)}: the same values, no faster than bf16"
            if emulated
            else "nothing",
        ),
        ("auto", f"rollout.explore.precision=auto is {FORMATS[summary['auto']].describe(device)}"),
        (
            "cuDNN",
            summary["cudnn"]
            or ("not found" if device.platform == "gpu" else "not used by this device"),
        ),
        ("checks", checks),
        ("Hub cache", where(summary["hub"]) + (", offline" if summary["hub"]["offline"] else "")),
        ("extras", ", ".join(extras)),
        ("prompts", f"encoded ones are kept in {where(summary['prompt_cache'])}"),
    ]
    if summary.get("weights"):
        parts = ", ".join(
            f"{name} {size / 1e9:.3g} GB" for name, size in summary["weights"].items()
        )
        rows.append(
            (
                "weights",
                f"{parts}; `solrl plan {summary['preset']}` says what training takes beside them",
            )
        )
    if proposed := summary.get("proposal"):
        settings = " ".join(proposed["settings"]) or "the preset's own settings"
        rows.append(("mesh=auto", f"{settings}: {proposed['reason']}"))
        if proposed["seconds"]:
            phases = ", ".join(f"{name} {s:.3g} s" for name, s in proposed["seconds"].items())
            rows.append(("planned", f"at least {phases} per iteration on its devices"))
    rows += [("download", f"{name}, at the first start") for name in summary.get("downloads", ())]
    rows += [(name, line) for name, line in summary.get("judges", {}).items()]
    rows += [("adapted", line) for line in summary.get("adapted", ())]
    rows += [("warning", line) for line in summary["warnings"]]
    rows += [("wrong", line) for line in _wrong_kernels(summary)]
    rows += [("missing", line) for line in summary["missing"]] or [("missing", "nothing")]
    return "\n".join(f"{name:10} {one_line(text)}" for name, text in rows)
