"""What an iteration of training takes on a device: memory, kernels, messages and the least time, by the device's own compiler.

The programs that train are lowered for the shapes and shardings of a run, and compiled for a topology of devices that need not
be here. Memory is the compiler's own figure. Kernels and messages are read from the compiled text. Seconds are a roofline.
"""

import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax

from solrl_jax.config.schema import Config
from solrl_jax.config.sizes import training_sizes
from solrl_jax.models.locate import mhla_override
from solrl_jax.parallel.sharding import row_groups
from solrl_jax.planning import roofline, topology
from solrl_jax.planning.abstract import abstract, experiment, held, open_configurations
from solrl_jax.planning.stages import STAGES, Program, Stages
from solrl_jax.planning.targets import CUDNN, Target
from solrl_jax.quant.formats import AUTO, DeviceInfo
from solrl_jax.rl.experiment import open_mesh
from solrl_jax.rl.gradient_checkpointing import open_for_training
from solrl_jax.storage import hub
from solrl_jax.storage.files import atomic_write, writable_directory

USABLE = 0.92  # of a device's memory: the rest is the runtime's and the libraries', and lost between buffers
COPY = "quantised copy"
ENCODERS = "text encoders"
CONDITIONING = "conditioning"
ROLLOUT = ("sync", "explore", "regenerate")
SETTINGS = {  # what a stage takes less memory with
    "encode": ("`solrl encode PRESET` beforehand",),
    "sync": ("mesh.fsdp",),
    "explore": ("rollout.per_device_batch_size", "mesh.fsdp", "model.prompt_cache_dir=''"),
    "regenerate": ("rollout.per_device_batch_size", "mesh.fsdp", "model.prompt_cache_dir=''"),
    "score": (
        "mesh.fsdp",
        "model.prompt_cache_dir=''",
    ),  # pictures are decoded a few at a time, whatever the chunk
    "evaluate": ("mesh.fsdp", "model.prompt_cache_dir=''", "eval.size"),
    "update": (
        "model.gradient_checkpointing=blocks",
        "optimizer.per_device_batch_size",
        "mesh.fsdp",
        "model.prompt_cache_dir=''",
    ),
}


@dataclasses.dataclass(frozen=True)
class Devices:
    """`count` devices of one kind on each of `hosts` hosts."""

    target: Target
    count: int = 1
    hosts: int = 1


class Planner:
    """Compiles the programs of one configuration. `topology.prepare` comes before, and before JAX is imported."""

    def __init__(self, config: Config, where: Devices):
        """Raises InputError: there is no such topology, the mesh does not divide it, or the configuration cannot be run."""
        self.config = config
        self.where = where
        target = where.target
        mesh = open_mesh(config, topology.devices(target, where.count, where.hosts))
        with topology.tracing():
            open_pipeline = partial(
                open_configurations, config.model.path, mhla=mhla_override(config.model)
            )
            self.pipeline = open_for_training(config, mesh, USABLE * target.memory, open_pipeline)
        self.device = DeviceInfo(target.platform, target.kind, target.capability)
        self.stages = Stages(experiment(config, self.pipeline, self.device, mesh))
        self.codes = self.stages.codes()
        self.usable = int(target.memory * USABLE)

    def programs(self, threads: Executor) -> list[tuple[str, Program, Future[Any]]]:
        """The stage, the program and what compiles it, in the order of an iteration.

        XLA compiles without Python's lock, hence in `threads`. `sync` is waited for: the other programs take the quantised copy
        from where the compiled `sync` leaves it. Raises what XLA raises.
        """
        found = []
        for stage in filter(self.stages.has, STAGES):
            for program in self.stages.programs(stage, self.codes):
                made = threads.submit(topology.compiled, self.lowered(program), self.where.target)
                found.append((stage, program, made))
                if stage == "sync":
                    self.place(made.result())
        return found

    def lowered(self, program: Program) -> Any:
        """A program traced for the devices."""
        with jax.set_mesh(program.mesh):
            return topology.lowered(program.function, program.arguments)

    def place(self, sync: Any) -> None:
        """The quantised copy is from now on where the compiled `sync` leaves it."""
        self.codes = jax.tree.map(
            lambda x, where: abstract(x, self.stages.mesh, where), self.codes, sync.output_shardings
        )

    def measure(
        self, stage: str, program: Program, made: Any, hlo: Path | None = None
    ) -> dict[str, Any]:
        """The figures of one compiled program, for one device. hlo: the folder that its text is written to."""
        text = made.as_text()
        if hlo is not None:
            atomic_write(hlo / f"{stage}-{program.name}.hlo", text)
        figures = roofline.roofline(
            text, self.where.target, self.where.count, self.where.hosts
        ).summary()
        memory = self.memory(stage, program, made.memory_analysis())
        return {"name": program.name, "calls": program.calls, "memory": memory, "roofline": figures}

    def parts(self) -> dict[str, Any]:
        """The arrays that stay in memory between programs."""
        experiment = self.stages.experiment
        state = self.stages.state
        return {
            "base": experiment.backbone.transformer,
            COPY: self.codes,
            "adapters": (state.adapters, state.old, state.ema),
            "optimiser": state.opt_state,
            ENCODERS: self.stages.encoders,
            "vae": experiment.backbone.decoder,
            "reward networks": experiment.reward.params,
            CONDITIONING: (self.stages.conditions, self.stages.prepared),
        }

    def memory(self, stage: str, program: Program, analysis: Any) -> dict[str, Any]:
        """Bytes of a device while a program runs. analysis: the compiler's.

        `peak` = `held` + `padded` + `temporaries` + `outputs` - `aliased` + `code` + the sum of `resident`, and
        `arguments` = `held` + `repeated` + `padded` - `unread`. held: arguments, each array once; repeated: arrays that are
        passed more than once; unread: arguments that the compiler leaves out; padded: what a TPU fills its tiles up with, less
        `unread`; resident: arrays that are not arguments, by part.
        """
        given = arrays(program.arguments)
        once = {id(x): x for x in given}
        absent = {"encode": (COPY, CONDITIONING), "sync": (COPY,)}.get(stage, ())
        if (
            stage != "encode" and self.config.model.prompt_cache_dir is not None
        ):  # encoded ahead, and freed
            absent = (*absent, ENCODERS)
        parts = {name: tree for name, tree in self.parts().items() if name not in absent} | {
            "latents": program.meanwhile
        }
        others = {
            name: held([x for x in arrays(tree) if id(x) not in once])
            for name, tree in parts.items()
        }
        own = {
            "temporaries": analysis.temp_size_in_bytes,
            "outputs": analysis.output_size_in_bytes,
            "code": analysis.generated_code_size_in_bytes,
            "held": held(list(once.values())),
            "padded": max(analysis.argument_size_in_bytes - held(given), 0),
        }
        aliased = analysis.alias_size_in_bytes
        arguments = analysis.argument_size_in_bytes
        return own | {
            "arguments": arguments,
            "aliased": aliased,
            "repeated": held(given) - own["held"],
            "unread": max(held(given) - arguments, 0),
            "resident": {name: size for name, size in others.items() if size},
            "peak": sum(own.values()) - aliased + sum(others.values()),
        }


def plan(
    config: Config,
    where: Devices,
    hlo: Path | None = None,
    progress: Callable[[str], None] = lambda doing: None,
) -> dict[str, Any]:
    """The plan, as `solrl plan` prints it in JSON; of one device.

    hlo: a folder for the compiled texts, `STAGE-PROGRAM.hlo`; progress: told what is being done. Raises InputError.
    """
    planner = Planner(config, where)
    if hlo is not None:
        writable_directory(hlo, "hlo")
    stages = []
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for stage, of_stage in itertools.groupby(
            planner.programs(threads), key=lambda each: each[0]
        ):
            programs = []
            for _, program, made in of_stage:
                progress(f"{stage}: {program.name}")
                programs.append(planner.measure(stage, program, made.result(), hlo))
            seconds = sum(row["calls"] * row["roofline"]["seconds"] for row in programs)
            peak = max(row["memory"]["peak"] for row in programs)
            stages.append({"name": stage, "seconds": seconds, "peak": peak, "programs": programs})
    usable = planner.usable
    largest = max(stages, key=lambda stage: stage["peak"])
    left = {stage["name"]: usable - stage["peak"] for stage in stages}
    form = planner.stages.experiment.explorer.format
    return {
        "preset": config.preset,
        "device": where.target.name,
        "devices": where.count,
        "hosts": where.hosts,
        "size": list(planner.stages.experiment.size),
        "usable": usable,
        "mesh": dict(planner.stages.mesh.shape),
        "exploration": form.describe(planner.device),
        "remat": planner.pipeline.remat,
        "parts": {name: held(arrays(tree)) for name, tree in planner.parts().items()},
        "stages": stages,
        "largest": largest["name"],
        "peak": largest["peak"],
        "fits": largest["peak"] <= usable,
        "too_large": {
            stage["name"]: list(SETTINGS[stage["name"]])
            for stage in stages
            if stage["peak"] > usable
        },
        "faster": faster(planner, left),
        **totals(planner, stages),
        "assumptions": list(assumptions(planner)),
    }


def arrays(tree: Any) -> list[Any]:
    """The shapes among the leaves; other leaves are static arguments."""
    return [x for x in jax.tree.leaves(tree) if isinstance(x, jax.ShapeDtypeStruct)]


def faster(planner: Planner, left: dict[str, int]) -> dict[str, str]:
    """By stage, the setting with which it may take less time, if there is one. left: bytes that a stage leaves free.

    To keep what products make takes several times the memory of `model.gradient_checkpointing=blocks`, so it is named where half is free. Larger
    chunks and micro-batches are not among them: the least time of a row hardly depends on how many run at once.
    """
    explorer = planner.stages.experiment.explorer
    remat = planner.config.model.gradient_checkpointing
    found = (
        {}
        if explorer.format.is_native(planner.device)
        else {"explore": f"rollout.explore.precision={AUTO}"}
    )
    roomy = left["update"] > planner.usable / 2
    return found | (
        {"update": "model.gradient_checkpointing=matmuls"} if roomy and remat == "blocks" else {}
    )


def totals(planner: Planner, stages: list[dict[str, Any]]) -> dict[str, Any]:
    """Seconds of the iteration and of the rollout phase; the same of `naive_scaling` where this run regenerates.

    `naive_scaling` explores in BF16 with all steps, which is the program that regenerates, and scores its candidates once.
    """
    seconds = {stage["name"]: stage["seconds"] for stage in stages}
    rollout = sum(seconds.get(name, 0.0) for name in ROLLOUT)
    found: dict[str, Any] = {"seconds": sum(seconds.values()), "rollout": rollout}
    regenerated = next(
        (stage["programs"][0] for stage in stages if stage["name"] == "regenerate"), None
    )
    if regenerated is not None:
        drafts, _ = planner.stages.chunks(row_groups(planner.stages.mesh))
        naive = drafts * regenerated["roofline"]["seconds"]
        scored, redone = planner.stages.chunks(planner.stages.mesh.size)
        score = seconds["score"] * scored / (scored + redone)
        iteration = found["seconds"] - rollout - seconds["score"] + naive + score
        found["naive_scaling"] = {"seconds": iteration, "rollout": naive}
    return found


def assumptions(planner: Planner) -> Iterator[str]:
    """What the figures take for granted."""
    where = planner.where
    config = planner.config
    yield f"{USABLE:.0%} of a device's memory are for arrays; JAX takes 75% of a GPU without XLA_PYTHON_CLIENT_MEM_FRACTION"
    kept = (
        "stay in memory (model.prompt_cache_dir=null)"
        if config.model.prompt_cache_dir is None
        else "encode all prompts of a run, then are freed"
    )
    yield f"text encoders {kept}"
    if len(training_sizes(config)) > 1:
        yield "every iteration has the largest of rollout.size"
    if planner.stages.has("evaluate"):
        yield "an evaluation, whose pictures are larger, takes no time of an iteration"
    yield "seconds are the least possible: a kernel takes the longer of its operations and its memory at the public peaks"
    yield "rewards outside JAX, the host's work, launching kernels and compiling take no time"
    if where.target.platform == "gpu":
        yield f"cuDNN {CUDNN}; no kernel is tuned, since that needs the device; products are cuBLAS's"
    if where.count * where.hosts > 1:
        yield "messages that overlap cost what the program's other kernels do not hide"
    if hub.is_carried(planner.pipeline.folder):
        yield f"{config.model.path}: the configuration that the package carries, because no files are at hand"
    yield "reward networks: as released"


def table(summary: dict[str, Any]) -> str:
    """The plan for a terminal."""

    def gb(size):
        return f"{size / 1e9:.2f}"

    mesh = " x ".join(f"{axis} {size}" for axis, size in summary["mesh"].items())
    lines = [
        f"{summary['preset']} on {summary['hosts']} host(s) x {summary['devices']} {summary['device']}; mesh {mesh}"
    ]
    lines[0] += "; pictures of {} x {} pixels".format(*summary["size"])
    lines += [
        f"exploration: {summary['exploration']}",
        f"the update recomputes: {summary['remat']}",
        "",
        "parts, GB a device",
    ]
    lines += [f"  {name:<16} {gb(size):>8}" for name, size in summary["parts"].items()]
    lines += ["", f"{'GB a device':<27}arguments temporaries outputs aliased elsewhere    peak"]
    for stage, row in rows(summary):
        m = row["memory"]
        name = f"{stage}: {row['name']}"
        sizes = (
            m["arguments"],
            m["temporaries"],
            m["outputs"],
            m["aliased"],
            sum(m["resident"].values()),
            m["peak"],
        )
        lines.append(
            f"{name:<27}"
            + "".join(f"{gb(n):>{w}}" for n, w in zip(sizes, (9, 12, 8, 8, 10, 8), strict=True))
        )
    for stage, row in rows(summary):
        lines += [
            "",
            f"{stage}: {row['name']}, {row['calls']} calls of at least {roofline.table(row['roofline'])}",
        ]
    fits = "fits" if summary["fits"] else "does not fit"
    lines += [
        "",
        f"largest: {summary['largest']}, {gb(summary['peak'])} of {gb(summary['usable'])} GB: {fits}",
    ]
    lines += [
        f"  {stage} is too large; it takes less with {', '.join(by)}"
        for stage, by in summary["too_large"].items()
    ]
    left = {stage["name"]: gb(summary["usable"] - stage["peak"]) for stage in summary["stages"]}
    lines += [
        f"  {stage} leaves {left[stage]} GB; it may be faster with {by}"
        for stage, by in summary["faster"].items()
    ]
    by_stage = ", ".join(f"{stage['name']} {stage['seconds']:.3g}" for stage in summary["stages"])
    lines += [
        f"an iteration: {summary['seconds']:.3g} s at least ({by_stage}); rollout phase {summary['rollout']:.3g} s"
    ]
    if naive := summary.get("naive_scaling"):
        times = naive["seconds"] / summary["seconds"]
        rollout = naive["rollout"] / summary["rollout"]
        lines.append(
            f"naive_scaling: {naive['seconds']:.3g} s, {times:.2f} times; "
            f"rollout phase {naive['rollout']:.3g} s, {rollout:.2f} times"
        )
    return "\n".join([*lines, "", "assumed", *(f"  {line}" for line in summary["assumptions"])])


def rows(summary: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The programs of a plan, each with the name of its stage."""
    for stage in summary["stages"]:
        for row in stage["programs"]:
            yield stage["name"], row
