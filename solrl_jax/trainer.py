"""The loop around `train.iterate`: resuming, evaluating, recording, saving. Knows paths and clocks; knows no algorithm.

run.dir/config.yaml             the resolved configuration
run.dir/run.json                versions, devices, what is native and what is emulated
run.dir/metrics.jsonl, .csv     one row an iteration (0: before training), and TensorBoard's files
run.dir/ledger/                 every candidate of every iteration, Parquet
run.dir/checkpoints/000010/     the state after iteration 10
run.dir/pictures/               fixed prompts and seeds before, during and after; the reward curve
"""

import hashlib
import importlib.metadata
import json
import platform
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import yaml

from solrl_jax import checkpoint, files, ledger, pictures
from solrl_jax.config import Config, batch_line
from solrl_jax.evaluate import evaluate, sample_grid
from solrl_jax.experiment import Experiment, build
from solrl_jax.files import InputError, atomic_write
from solrl_jax.metrics import Metrics
from solrl_jax.metrics import read as read_metrics
from solrl_jax.policy.lora import Adapters
from solrl_jax.presets import from_yaml, to_yaml
from solrl_jax.progress import Interrupted, Reporter
from solrl_jax.state import TrainState, abstract_state, init_state, read_start
from solrl_jax.train import iterate

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "transformers")


def run(config: Config, report: Reporter) -> dict[str, Any]:
    """Trains, or goes on with, the run that `config` describes; returns what `--json` prints.

    An interruption saves the last whole iteration and returns with "interrupted" true. Raises InputError for what the user
    can mend, RunError when the run failed for another reason.
    """
    folder = files.writable_directory(config.run.dir)
    with files.only_user(folder):
        _refuse_another_run(folder, config)
        experiment = build(config)
        state, done = _restore(experiment, folder, report)
        atomic_write(folder / "config.yaml", to_yaml(config))  # the directory is this run's once all input has been accepted
        _describe(experiment, folder, done, report)
        with Metrics(
            folder, tensorboard=config.run.tensorboard, wandb=config.run.wandb, resume_after=done if done else -1
        ) as metrics:
            ledger.discard_after(folder / "ledger", done)
            try:
                state, done = _loop(experiment, folder, state, done, metrics, report)
                interrupted = False
            except Interrupted as stop:
                state, done, interrupted = stop.state, stop.done, True
                if done:
                    _save(folder, config, state, done)
                    report.line(f"interrupted: saved after iteration {done}; the same command goes on from there")
                else:
                    report.line("interrupted before the end of the first iteration: nothing to save")
            metrics.write_csv()
        if not interrupted:
            _finish(experiment, folder, state)
        return _summary(folder, done, interrupted)


def _loop(experiment: Experiment, folder: Path, state: TrainState, done: int, metrics: Metrics, report: Reporter):
    """From iteration `done` + 1 to the last."""
    config = experiment.config
    report.start(config.train.iterations, done)
    try:
        if done == 0:
            metrics.log(0, _evaluate(experiment, folder, state.ema, 0, report))
        while done < config.train.iterations:
            after, outcome = iterate(experiment, state, done + 1, report.stage)
            state, done = after, done + 1
            ledger.write(folder / "ledger", done, outcome.ledger)
            row = outcome.metrics
            last = done == config.train.iterations
            if last or (config.eval.every and done % config.eval.every == 0):
                row = row | _evaluate(experiment, folder, state.ema, done, report)
            metrics.log(done, row)
            report.iteration(done, row)
            if last or done % config.run.checkpoint_every == 0:
                _save(folder, config, state, done)
        return state, done
    except KeyboardInterrupt:
        raise Interrupted(state, done) from None
    finally:
        report.stop()


def _evaluate(experiment: Experiment, folder: Path, ema: Adapters, done: int, report: Reporter) -> dict[str, float]:
    """Scores of the averaged policy on the test prompts, and its picture."""
    config, policy = experiment.config, experiment.policy(ema)
    total = config.eval.prompts * config.eval.images_per_prompt
    report.stage("evaluate", total, 0)
    result = evaluate(experiment, policy, lambda rows: report.stage("evaluate", total, rows))
    if config.eval.grid:
        images, prompts = sample_grid(experiment, policy)
        captions = [p for p in prompts for _ in range(images.shape[1])]
        pictures.save_grid(
            folder / "pictures" / f"iteration-{done:06d}.png", images.reshape(-1, *images.shape[2:]), images.shape[1], captions
        )
    scores = {f"eval/{name}": mean for name, mean in result.means.items()}
    errors = {f"eval/{name}/standard_error": error for name, error in result.errors.items()}
    report.line(
        f"evaluation after iteration {done}: "
        + ", ".join(f"{name} {mean:.3f} ± {result.errors[name]:.3f}" for name, mean in result.means.items())
    )
    return scores | errors


def _refuse_another_run(folder: Path, config: Config) -> None:
    """Checks that a run that is there is this one. What may change between starts: lengths, logging, devices."""
    path = folder / "config.yaml"
    if path.exists():
        there = from_yaml(path.read_text())
        if fingerprint(there) != fingerprint(config):
            changed = ", ".join(_differences(yaml.safe_load(to_yaml(there)), yaml.safe_load(to_yaml(config))))
            raise InputError(f"run.dir={str(folder)!r} holds another run ({changed}); name another directory, or remove it")


def fingerprint(config: Config) -> str:
    """Names everything that the trained adapters depend on; equal fingerprints may resume one another."""
    tree = yaml.safe_load(to_yaml(config))
    for key in ("run", "eval", "mesh", "preset", "prompts"):
        tree.pop(key)
    tree["train"].pop("iterations")
    tree["model"].pop("cache")  # what is read from it is what would be computed, to the bit
    tree["prompts"] = config.prompts.train
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:16]


def _differences(there: dict, here: dict, prefix: str = "") -> list[str]:
    out = []
    for key in there.keys() | here.keys():
        a, b = there.get(key), here.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            out += _differences(a, b, f"{prefix}{key}.")
        elif a != b and f"{prefix}{key}".split(".")[0] not in ("run", "eval", "mesh") and prefix + key != "model.cache":
            out.append(f"{prefix}{key}: {a!r} there, {b!r} here")
    return sorted(out)


def _restore(experiment: Experiment, folder: Path, report: Reporter) -> tuple[TrainState, int]:
    """The state to go on from, and how many iterations it has behind it."""
    config, base, mesh = experiment.config, experiment.backbone.transformer, experiment.backbone.mesh
    targets = list(experiment.targets)
    abstract = abstract_state(base, targets, config.lora, config.optimizer, mesh)
    restored = checkpoint.restore_latest(folder / "checkpoints", abstract, {"fingerprint": fingerprint(config)})
    if restored is None:
        start = read_start(config.lora, targets, experiment.backbone.parameter_table())
        return init_state(jax.random.key(config.seed), base, targets, config.lora, config.optimizer, mesh, start=start), 0
    state, meta, warnings = restored
    for warning in warnings:
        report.line(warning)
    report.line(f"resuming after iteration {meta['iteration']}")
    return state, meta["iteration"]


def _save(folder: Path, config: Config, state: TrainState, done: int) -> None:
    """The key of the run is its seed, and the cursor through the prompts is the iteration: both are named for the reader."""
    meta = {"fingerprint": fingerprint(config), "key": config.seed, "prompt_cursor": done * config.train.prompts}
    checkpoint.save(folder / "checkpoints", done, state, meta, keep=config.run.keep_checkpoints)


def _describe(experiment: Experiment, folder: Path, done: int, report: Reporter) -> None:
    """Says and records what runs where."""
    config, mesh, backbone = experiment.config, experiment.backbone.mesh, experiment.backbone
    device, pipeline = jax.devices()[0], backbone.pipeline
    native = device.platform == "gpu" and float(getattr(device, "compute_capability", "0")) >= 10.0
    precision = config.rollout.explore.precision
    how = {"nvfp4": "native block-scaled products" if native else "no FP4 units here: expanded exactly, not faster"}
    facts = {
        "solrl_jax": importlib.metadata.version("solrl_jax"),
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in PACKAGES},
        "devices": f"{mesh.size} x {device.device_kind}",
        "mesh": dict(mesh.shape),
        "exploration": f"{precision} ({how.get(precision, 'native')})",
        "parameters": {"transformer": pipeline.transformer.size, **{name: c.size for name, c in pipeline.text_encoders.items()},
                       "vae": pipeline.vae.size},
        "adapted": list(experiment.targets),
        "quantized": list(experiment.quantized),
        "started_after_iteration": done,
    }  # fmt: skip
    atomic_write(folder / "run.json", json.dumps(facts, indent=2) + "\n")
    report.line(f"{config.preset}: {config.model.name}, {config.family}, {'+'.join(config.reward.weights)} -> {folder}")
    report.line(f"devices: {facts['devices']}, mesh {facts['mesh']}; exploration in {facts['exploration']}")
    report.line(batch_line(config, mesh.size))


def _finish(experiment: Experiment, folder: Path, state: TrainState) -> None:
    """The pictures that tell the run: before and after, and the curves."""
    if experiment.config.eval.grid:
        unchanged = jax.tree.map(jnp.zeros_like, state.ema)  # the base, through the program that is compiled already
        before, prompts = sample_grid(experiment, experiment.policy(unchanged))
        after, _ = sample_grid(experiment, experiment.policy(state.ema))
        pictures.save_before_after(folder / "pictures" / "before-after.png", before, after, prompts)
    rows = read_metrics(folder)
    name = next(iter(experiment.config.reward.weights))
    strict = {"strict success, held-out": f"eval/{name}/strict"} if any(f"eval/{name}/strict" in row for row in rows) else {}
    pictures.save_curve(
        folder / "pictures" / "reward.png", rows,
        {"explored pool": "pool/reward", "kept, as trained on": "kept/reward", "held-out prompts": "eval/reward"} | strict,
        {"Spearman, proxy and regenerated": "fidelity/spearman"}, labels=("reward", "fidelity"), title=folder.name,
    )  # fmt: skip


def _summary(folder: Path, done: int, interrupted: bool) -> dict[str, Any]:
    rows = [row for row in read_metrics(folder) if "eval/reward" in row]
    scores = lambda row: {k: v for k, v in row.items() if k.startswith("eval/")}
    return {
        "run": str(folder),
        "iterations": done,
        "interrupted": interrupted,
        "before": scores(rows[0]) if rows else {},
        "after": scores(rows[-1]) if rows else {},
    }
