"""What a run would need of its devices: memory, operations, messages, time; and what to change where it does not fit.

Nothing is loaded, and no device of the kind needs to be there: shapes are traced and compiled (`planning.measure` says which
number comes from where). Times are estimates, at fixed fractions of the peak rates.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from solrl_jax.config.presets import override
from solrl_jax.config.schema import Config, ConfigError
from solrl_jax.parallel import sharding
from solrl_jax.planning.abstract import open_configurations
from solrl_jax.planning.devices import Machine
from solrl_jax.planning.measure import COMPUTE, ENCODERS, MOVE, Measured, Planner, Stage
from solrl_jax.storage import hub
from solrl_jax.training.experiment import open_mesh

USABLE = 0.92  # of a device's memory: the rest is the runtime's and the libraries', and lost between buffers
PREALLOCATED = 0.75  # of a GPU's memory, by JAX unless it is told otherwise


@dataclasses.dataclass(frozen=True)
class Knob:
    """A change of settings, and what it saves of the largest of the stages that it concerns, in bytes."""

    change: str
    stage: str  # the largest of them with the change
    saves: int
    peak: int
    fits: bool  # all of them


def plan(config: Config, machine: Machine, progress: Callable[[str], None] = lambda stage: None) -> dict[str, Any]:
    """The plan, as `--json` prints it; sizes in bytes, of one device. Raises InputError before anything is compiled.

    progress: told what is being done.
    """
    mesh = open_mesh(config, jax.devices()[: machine.count])
    pipeline = open_configurations(config.model.path, config.model.remat)
    planner = Planner(config, machine, pipeline)
    measured = planner.measure(mesh, progress)
    limit = int(machine.memory * USABLE)
    fits = measured.largest.peak <= limit
    knobs = [] if fits else list(turn(planner, measured, mesh, limit, progress))
    components = {"transformer": pipeline.transformer, **pipeline.text_encoders, "vae": pipeline.vae}
    return {
        "preset": config.preset,
        "device": machine.name,
        "devices": machine.devices,
        "hosts": machine.hosts,
        "memory": machine.memory,
        "usable": limit,
        "mesh": dict(mesh.shape),
        "exploration": planner.alone.recipe.format.describe(planner.alone.device),
        "configurations": str(pipeline.folder),
        "parameters": {name: component.size for name, component in components.items()},
        "parts": measured.parts,
        "stages": [dataclasses.asdict(stage) | {"peak": stage.peak} for stage in measured.stages],
        "largest": measured.largest.name,
        "peak": measured.largest.peak,
        "fits": fits,
        "knobs": [dataclasses.asdict(knob) for knob in knobs],
        "seconds": sum(stage.seconds for stage in measured.stages),
        "assumptions": list(assumptions(planner, measured)),
    }


def turn(planner: Planner, measured: Measured, mesh: Mesh, limit: int, progress: Callable[[str], None]) -> Iterator[Knob]:
    """What could be set otherwise, one thing at a time, each as far as it has to be."""
    config, machine = planner.config, planner.machine
    before = {stage.name: stage.peak for stage in measured.stages}
    over = {name for name, peak in before.items() if peak > limit}

    def knob(change: str, stages: Sequence[Stage]) -> Knob:
        largest = max(stages, key=lambda stage: stage.peak)
        saves = max(before[stage.name] for stage in stages) - largest.peak
        return Knob(change, largest.name, saves, largest.peak, largest.peak <= limit)

    def fsdp(size: int) -> Knob:
        progress(f"with mesh.fsdp={size}")
        axes = dataclasses.asdict(config.mesh) | {"data": -1, "fsdp": size}
        other = sharding.make_mesh(**axes, devices=list(mesh.devices.flat))
        return knob(f"mesh.fsdp={size}", planner.measure(other, messages=False, only=[s.name for s in measured.stages]).stages)

    def tried(change: str, stages: Sequence[str]) -> Knob | None:
        """With a setting that concerns some stages."""
        progress(f"with {change}")
        try:
            other = override(config, (change,))
        except ConfigError:  # a batch that does not divide
            return None
        pipeline = open_configurations(other.model.path, other.model.remat)
        there = Planner(other, machine, pipeline).measure(mesh, messages=False, only=stages, parts=measured.parts)
        return knob(change, there.stages)

    training = [stage for stage in measured.stages if stage.name != "encode"]
    if config.model.cache is None:
        encoders = measured.parts[ENCODERS]
        yield knob("model.cache=''", [dataclasses.replace(s, resident=s.resident - encoders) for s in training])
    elif "encode" in over:
        yield knob(f"solrl encode {config.preset}, beforehand", training)
    now, tensor = mesh.shape["fsdp"], mesh.shape.get("tensor", 1)
    sizes = [n for n in range(2 * now, machine.devices // tensor + 1, now) if machine.devices % (n * tensor) == 0]
    yield from until_it_fits(map(fsdp, sizes))
    if "update" in over and config.model.remat != "blocks":
        yield from until_it_fits([tried("model.remat=blocks", ("update",))])
    for field, value, stages in (
        ("rollout.chunk", config.rollout.chunk, ("explore", "regenerate", "score")),
        ("optimizer.micro_batch", config.optimizer.micro_batch, ("update",)),
        ("model.tile", config.model.tile or min(config.model.height, config.model.width), ("score",)),
    ):
        if over.intersection(stages):
            smaller = (f"{field}={value // by}" for by in (2, 4, 8) if value % by == 0)
            yield from until_it_fits(tried(change, stages) for change in smaller)


def until_it_fits(knobs: Iterable[Knob | None]) -> Iterator[Knob]:
    """The first that fits, else the last."""
    last = None
    for knob in knobs:
        last = knob or last
        if last is not None and last.fits:
            break
    if last is not None:
        yield last


def assumptions(planner: Planner, measured: Measured) -> Iterator[str]:
    """What the figures take for granted."""
    machine, form = planner.machine, planner.alone.recipe.format
    yield f"{USABLE:.0%} of a device's memory are for arrays; the rest is the runtime's and libraries', or lost between buffers"
    if machine.platform == "gpu" and measured.largest.peak > PREALLOCATED * machine.memory:
        yield f"XLA_PYTHON_CLIENT_MEM_FRACTION={USABLE}: by itself JAX takes {PREALLOCATED:.0%} of a GPU"
    kept = "stay, for nothing is kept of what they say (model.cache=null)"
    yield f"text encoders: {kept if planner.config.model.cache is None else 'encode all prompts of a run, then are freed'}"
    yield "activations: of a compiler that fuses arithmetic into what reads it; not compared with a device's yet"
    without = [s.name for s in measured.stages if s.name in ("explore", "regenerate", "update") and not s.flash]
    if machine.platform != "gpu":
        yield "attention: XLA's, which holds the scores"
    elif without:
        taken = "cuDNN's takes BF16, heads up to 128 and, with a mask, even lengths"
        yield f"{', '.join(without)}: XLA holds the scores of attention; {taken}"
    else:
        yield "attention: cuDNN's, which holds the output and a number a query; XLA's, which holds scores, for the rest"
    yield f"exploration: {form.describe(planner.alone.device)}"
    yield f"times: {COMPUTE:.0%} of the peak of products, {MOVE:.0%} of that of memory and links; messages overlap with nothing"
    yield "times: rewards outside JAX, the host's work and compiling count for nothing"
    if hub.is_carried(planner.pipeline.folder):
        yield f"{planner.config.model.path}: the configuration that the package carries, since no files are at hand"
    yield "reward networks: as released"


def table(summary: dict[str, Any]) -> str:
    """The plan for a terminal."""
    gb = lambda size: f"{size / 1e9:.2f}"
    hosts, mesh = summary["hosts"], " x ".join(f"{axis} {size}" for axis, size in summary["mesh"].items())
    where = f"{hosts} host(s) x {summary['devices']} {summary['device']}, {gb(summary['memory'])} GB each; mesh {mesh}"
    lines = [f"{summary['preset']} on {where}", "", "parts, GB a device"]
    lines += [f"  {name:<16} {gb(size):>8}" for name, size in summary["parts"].items()]
    lines += ["", "stage         parts  activations     peak  calls      PFLOP   GB sent  between hosts   seconds"]
    for s in summary["stages"]:
        flops, sent = sum(s["flops"].values()) / 1e15, sum(s["sent"].values())
        lines.append(
            f"{s['name']:<10} {gb(s['resident']):>8} {gb(s['activations']):>12} {gb(s['peak']):>8} {s['calls']:>6}"
            f" {flops:>10.3f} {gb(sent):>9} {gb(s['crossing']):>14} {s['seconds']:>9.1f}"
        )
    kinds = Counter[str]()
    for s in summary["stages"]:
        kinds.update(s["sent"])
    if kinds:
        lines.append("sent, by kind: " + ", ".join(f"{kind} {gb(size)} GB" for kind, size in kinds.items()))
    fits = "fits" if summary["fits"] else "does not fit"
    lines += ["", f"an iteration: about {summary['seconds']:.0f} s"]
    lines.append(f"largest: {summary['largest']}, {gb(summary['peak'])} of {gb(summary['usable'])} GB: {fits}")
    for k in summary["knobs"]:
        fits = "fits" if k["fits"] else "does not fit"
        lines.append(f"  {k['change']}: {k['stage']} {gb(k['peak'])} GB, {gb(k['saves'])} GB less: {fits}")
    return "\n".join([*lines, "", "assumed", *(f"  {line}" for line in summary["assumptions"])])
