"""Plans an iteration of training on a device: memory, kernels, collectives and a roofline time.

The programs that train are lowered for the shapes and shardings of a run, and compiled for devices
that need not be present. Memory is the compiler's own figure. Kernels and collectives are read from
the compiled text, and seconds are roofline bounds.
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

# The part of a device's memory that arrays may take. The rest is for the runtime and the
# libraries, and is lost between buffers.
USABLE = 0.92
COPY = "quantised copy"
ENCODERS = "text encoders"
CONDITIONING = "conditioning"
ROLLOUT = ("sync", "explore", "regenerate")
# The settings with which a stage takes less memory.
SETTINGS = {
    "encode": ("`solrl encode PRESET` beforehand",),
    "sync": ("mesh.fsdp",),
    "explore": ("rollout.per_device_batch_size", "mesh.fsdp", "model.prompt_cache_dir=''"),
    "regenerate": ("rollout.per_device_batch_size", "mesh.fsdp", "model.prompt_cache_dir=''"),
    # Images are decoded a few at a time, whatever the batch size.
    "score": ("mesh.fsdp", "model.prompt_cache_dir=''"),
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
    """The devices of a plan.

    Attributes:
        target: The kind of device, an entry of `targets.TARGETS` with its memory and peak rates.
        count: The number of devices on each host, at least 1.
        hosts: The number of hosts, at least 1.
    """

    target: Target
    count: int = 1
    hosts: int = 1


class Planner:
    """Compiles the programs of one configuration for absent devices.

    `topology.prepare` must be called before, and before JAX is imported.

    Attributes:
        config: The configuration that is planned. Formats that are "auto" mean what they would on
            `where`.
        where: The kind and the number of the devices that the programs are compiled for.
        pipeline: The model without weights, with the gradient checkpointing that training would
            choose.
        device: The kind of device, which decides what "auto" formats mean.
        stages: The programs and arrays of each stage of an iteration, as shapes.
        codes: The quantized copy of the policy that exploration samples with, as placed shapes by
            parameter path, replicated until `place` was called. An empty dict where nothing is
            quantized.
        usable: The bytes of a device's memory that arrays may take, 92% of it.
    """

    def __init__(self, config: Config, where: Devices):
        """Builds the experiment of shapes and the programs of its stages. Compiles nothing.

        Args:
            config: The configuration whose iteration is planned: model, sizes, batches, rewards and
                mesh.
            where: The kind and the number of the devices to compile for.

        Raises:
            InputError: If there is no such topology, the mesh of the configuration needs more
                devices than these or leaves some unused, or the configuration cannot be run.
        """
        self.config = config
        self.where = where
        target = where.target
        mesh = open_mesh(config, topology.devices(target, where.count, where.hosts))
        open_pipeline = partial(
            open_configurations, config.model.path, mhla=mhla_override(config.model)
        )
        self.pipeline = open_for_training(config, mesh, USABLE * target.memory, open_pipeline)
        self.device = DeviceInfo(target.platform, target.kind, target.capability)
        self.stages = Stages(experiment(config, self.pipeline, self.device, mesh))
        self.codes = self.stages.codes()
        self.usable = int(target.memory * USABLE)

    def programs(self, threads: Executor) -> list[tuple[str, Program, Future[Any]]]:
        """Starts to compile all programs of the stages that the run has.

        XLA compiles without Python's lock. `sync` is compiled first, because the other programs
        take the quantized copy with the shardings that it returns; this waits for it, and changes
        `codes`. All programs are lowered before this returns.

        Args:
            threads: Runs the compilations. A compiler error of `sync` is raised by this call, that
                of another program by `result()` of its future.

        Returns:
            The name of the stage, the program and the future of the compiled program, in the order
            of an iteration.
        """
        compilations = []
        for stage in filter(self.stages.has, STAGES):
            for program in self.stages.programs(stage, self.codes):
                compilation = threads.submit(
                    topology.compiled, self.lowered(program), self.where.target
                )
                compilations.append((stage, program, compilation))
                if stage == "sync":
                    self.place(compilation.result())
        return compilations

    def lowered(self, program: Program) -> Any:
        """Lowers a program for the devices, on its mesh. Raises what JAX raises.

        Args:
            program: The program, a jitted function with placed shapes as arguments.

        Returns:
            The lowered program (`jax.stages.Lowered`).
        """
        with jax.set_mesh(program.mesh):
            return topology.lowered(program.function, program.arguments)

    def place(self, sync: Any) -> None:
        """Gives the quantized copy `codes` the shardings with which the compiled `sync` returns it.

        Args:
            sync: The compiled program of the stage "sync".
        """
        self.codes = jax.tree.map(
            lambda x, where: abstract(x, self.stages.mesh, where), self.codes, sync.output_shardings
        )

    def measure(
        self, stage: str, program: Program, compiled: Any, hlo: Path | None = None
    ) -> dict[str, Any]:
        """Returns the figures of one compiled program for one device, as JSON values.

        Args:
            stage: The name of its stage, one of `stages.STAGES`.
            program: The program of that stage. Its name, its arguments and its calls per iteration
                are used.
            compiled: The compiled program (`jax.stages.Compiled`).
            hlo: An existing directory. The compiled text is written to `STAGE-PROGRAM.hlo` in it,
                which replaces such a file. None: it is not written.

        Returns:
            "name" (of the function, e.g. "sample_chunk") and "calls" (per iteration) of the
            program; "memory", the bytes of one device while it runs, by name (the result of
            `memory`, with "peak" among them); and "roofline", the figures of one call ("seconds",
            "split", "kernels", "collectives" and others, the result of `Roofline.summary`).

        Raises:
            RunError: If the disk refuses the text.
            ValueError: If the text cannot be parsed.
        """
        text = compiled.as_text()
        if hlo is not None:
            atomic_write(hlo / f"{stage}-{program.name}.hlo", text)
        figures = roofline.roofline(
            text, self.where.target, self.where.count, self.where.hosts
        ).summary()
        memory = self.memory(stage, program, compiled.memory_analysis())
        return {"name": program.name, "calls": program.calls, "memory": memory, "roofline": figures}

    def parts(self) -> dict[str, Any]:
        """Returns the trees of arrays that stay in memory between programs, as placed shapes.

        They are, by name: "base" (the transformer's frozen parameters), "quantised copy" (the
        quantized layers that exploration samples with; empty if its format quantizes nothing),
        "adapters" (the trainable parameters three times: as they are trained, of the old policy
        that samples, and averaged; with full training these are whole arrays), "optimiser" (its
        state), "text encoders", "vae", "reward networks" and "conditioning" (prompt embeddings, and
        what the reward prepared from the prompts). Parts that a run lacks are empty trees.
        """
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
        """Returns the bytes on a device while a program runs.

        The parts of `parts` that exist then and are no arguments count too. Outside of the stage
        "encode", text encoders count only if `model.prompt_cache_dir` is None; otherwise (also if
        it is "") all prompts were encoded ahead and the encoders freed.

        Args:
            stage: The name of its stage, one of `stages.STAGES`.
            program: The program, whose arguments and whose `meanwhile` (latents that wait during a
                call) are counted.
            analysis: The result of `memory_analysis()` of the compiled program, for one device.

        Returns:
            Bytes by name. `peak` = `held` + `padded` + `temporaries` + `outputs` - `aliased` +
            `code` + the sum of `resident`, and `arguments` = `held` + `repeated` + `padded` -
            `unread`. `held` counts each argument once, `repeated` the arguments that are passed
            more than once, `unread` the arguments that the compiler leaves out, and `padded` the
            padding of a TPU's tiles less `unread`, at least 0. `temporaries`, `outputs` and `code`
            (the machine code) are the compiler's figures, and `aliased` are outputs that take the
            place of arguments. `resident` is a dict of the arrays that are in memory but no
            arguments, by the names of `parts` and "latents"; entries of 0 bytes are left out.
        """
        shapes = arrays(program.arguments)
        distinct = {id(x): x for x in shapes}
        absent = {"encode": (COPY, CONDITIONING), "sync": (COPY,)}.get(stage, ())
        if (
            stage != "encode" and self.config.model.prompt_cache_dir is not None
        ):  # the prompts were encoded ahead, and the encoders freed
            absent = (*absent, ENCODERS)
        parts = {name: tree for name, tree in self.parts().items() if name not in absent} | {
            "latents": program.meanwhile
        }
        others = {
            name: held([x for x in arrays(tree) if id(x) not in distinct])
            for name, tree in parts.items()
        }
        own = {
            "temporaries": analysis.temp_size_in_bytes,
            "outputs": analysis.output_size_in_bytes,
            "code": analysis.generated_code_size_in_bytes,
            "held": held(list(distinct.values())),
            "padded": max(analysis.argument_size_in_bytes - held(shapes), 0),
        }
        aliased = analysis.alias_size_in_bytes
        arguments = analysis.argument_size_in_bytes
        return own | {
            "arguments": arguments,
            "aliased": aliased,
            "repeated": held(shapes) - own["held"],
            "unread": max(held(shapes) - arguments, 0),
            "resident": {name: size for name, size in others.items() if size},
            "peak": sum(own.values()) - aliased + sum(others.values()),
        }


def plan(
    config: Config,
    where: Devices,
    hlo: Path | None = None,
    progress: Callable[[str], None] = lambda doing: None,
) -> dict[str, Any]:
    """Plans an iteration. `topology.prepare` must be called before, and before JAX is imported.

    Compiles on as many threads as this machine has CPU cores. Errors of XLA are raised as they are.

    Args:
        config: The resolved configuration whose iteration is planned.
        where: The kind and the number of the devices that the programs are compiled for.
        hlo: A directory for the compiled texts, `STAGE-PROGRAM.hlo`. It is created if necessary,
            and existing files are replaced. None: they are not written.
        progress: Called with "STAGE: PROGRAM" before each program is measured.

    Returns:
        The plan of one device, as `solrl plan` prints it in JSON. "stages" has for each stage, in
        the order of an iteration, its "name", its "seconds" (a roofline bound of all its calls),
        its "peak" in bytes and its "programs" (one dict each: "name", "calls", "memory" and
        "roofline", the result of `Planner.measure`). "usable" is 92% of the device's memory and
        "peak" the largest peak of a stage, both in bytes, "largest" the name of that stage, "fits"
        whether "peak" is at most "usable", and "too_large" has for each stage that does not fit a
        list of settings that take less memory. "parts" are the bytes of the arrays that stay in
        memory, by name. "faster" has for "explore" and "update" a setting `key=value` with which
        the stage may take less time; it is empty if there is none. "seconds" are those of the
        iteration, and "rollout" those of "sync", "explore" and "regenerate"; if the run
        regenerates, "naive_scaling" is a dict of both for a run that explores in the training
        precision instead. "assumptions" is a list of sentences. "preset", "device" (its name),
        "devices" (on each host), "hosts", "size" (height and width in pixels), "mesh" (the size of
        each axis by name), "exploration" (a sentence on its format) and "remat" (what the update's
        gradient recomputes) describe what was planned.

    Raises:
        InputError: If there are no such devices, the mesh of the configuration needs more devices
            than these or leaves some unused, the configuration cannot be run, or `hlo` cannot be
            written to.
        RunError: If the disk refuses a compiled text.
        ValueError: If a compiled text cannot be parsed.
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
            for _, program, compilation in of_stage:
                progress(f"{stage}: {program.name}")
                programs.append(planner.measure(stage, program, compilation.result(), hlo))
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
    """Returns the shapes among the leaves of a tree, in their order. Other leaves are static
    arguments.

    Args:
        tree: A tree with ShapeDtypeStructs in place of arrays.
    """
    return [x for x in jax.tree.leaves(tree) if isinstance(x, jax.ShapeDtypeStruct)]


def faster(planner: Planner, left: dict[str, int]) -> dict[str, str]:
    """Names settings with which stages may take less time.

    For exploration in a format that the device emulates, it is the format "auto". For the update
    with `model.gradient_checkpointing=blocks` it is "matmuls", which saves the outputs of matmuls.
    That takes several times the memory, so it is named only where more than half of the usable
    memory is free. Larger batches are not named, because the time per sample hardly depends on
    them.

    Args:
        planner: The planner. Its exploration format, its kind of device, the usable bytes of one
            device and `model.gradient_checkpointing` are read.
        left: The usable bytes less the peak of each stage, by its name. Only that of "update",
            which must be there, decides.

    Returns:
        The setting `key=value` by stage, "explore" or "update". Empty if there is none.
    """
    explorer = planner.stages.experiment.explorer
    remat = planner.config.model.gradient_checkpointing
    settings = (
        {}
        if explorer.format.is_native(planner.device)
        else {"explore": f"rollout.explore.precision={AUTO}"}
    )
    roomy = left["update"] > planner.usable / 2
    return settings | (
        {"update": "model.gradient_checkpointing=matmuls"} if roomy and remat == "blocks" else {}
    )


def totals(planner: Planner, stages: list[dict[str, Any]]) -> dict[str, Any]:
    """Adds up the seconds of an iteration and of its rollout.

    If the run regenerates, also estimates the family "naive_scaling", which explores in the
    training precision with all steps and scores its candidates once: its rollout takes as many
    batches as exploration has now, each as long as one call of "regenerate", and it scores only the
    explored batches.

    Args:
        planner: Tells how many batches an iteration explores and regenerates on its mesh, to price
            "naive_scaling".
        stages: One dict per stage of the run in the order of an iteration. "name" and "seconds" are
            read, and of "regenerate" also the roofline seconds of one call
            (`["programs"][0]["roofline"]["seconds"]`). "score" must be among them if "regenerate"
            is.

    Returns:
        "seconds", the sum over all stages, and "rollout", that over "sync", "explore" and
        "regenerate". If the run regenerates, also "naive_scaling": a dict with the "seconds" and
        the "rollout" of that family.
    """
    seconds = {stage["name"]: stage["seconds"] for stage in stages}
    rollout = sum(seconds.get(name, 0.0) for name in ROLLOUT)
    figures: dict[str, Any] = {"seconds": sum(seconds.values()), "rollout": rollout}
    regeneration = next(
        (stage["programs"][0] for stage in stages if stage["name"] == "regenerate"), None
    )
    if regeneration is not None:
        sampled_batches, _ = planner.stages.chunks(row_groups(planner.stages.mesh))
        naive = sampled_batches * regeneration["roofline"]["seconds"]
        explored_batches, regenerated_batches = planner.stages.chunks(planner.stages.mesh.size)
        score = seconds["score"] * explored_batches / (explored_batches + regenerated_batches)
        iteration = figures["seconds"] - rollout - seconds["score"] + naive + score
        figures["naive_scaling"] = {"seconds": iteration, "rollout": naive}
    return figures


def assumptions(planner: Planner) -> Iterator[str]:
    """Yields sentences with the assumptions of the figures, without a full stop.

    They are on the usable memory, the text encoders, roofline seconds, what takes no time, and the
    reward networks; and where it applies on several image sizes, larger evaluation images, tuning
    of GPU kernels, overlapping collectives of several devices, and a model whose configuration is
    that of the package, because no files of it are present.

    Args:
        planner: The planner, whose configuration, kind and number of devices and model decide which
            sentences apply.
    """
    where = planner.where
    config = planner.config
    yield (
        f"{USABLE:.0%} of a device's memory are for arrays; JAX takes 75% of a GPU without "
        "XLA_PYTHON_CLIENT_MEM_FRACTION"
    )
    kept = (
        "stay in memory (model.prompt_cache_dir=null)"
        if config.model.prompt_cache_dir is None
        else "encode all prompts of a run, then are freed"
    )
    yield f"text encoders {kept}"
    if len(training_sizes(config)) > 1:
        yield "every iteration has the largest of rollout.size"
    if planner.stages.has("evaluate"):
        yield "an evaluation, whose images are larger, takes no time of an iteration"
    yield (
        "seconds are the least possible: a kernel takes the longer of its operations and its "
        "memory at the public peaks"
    )
    if config.rollout.explore.reward is not None:
        yield "reward.weights scores the candidates too, in place of rollout.explore.reward"
    yield "rewards outside JAX, the host's work, launching kernels and compiling take no time"
    if where.target.platform == "gpu":
        yield (
            f"cuDNN {CUDNN}; no kernel is tuned, since that needs the device; matmuls are cuBLAS's"
        )
    if where.count * where.hosts > 1:
        yield "messages that overlap cost what the program's other kernels do not hide"
    if hub.is_carried(planner.pipeline.folder):
        yield (
            f"{config.model.path}: the configuration that the package contains, because no files "
            "are present"
        )
    yield "reward networks: as released"


def table(summary: dict[str, Any]) -> str:
    """Formats a plan for a terminal, in several lines without a line feed at the end.

    It has what was planned, the sizes of the parts, a table of the memory of each program, the
    roofline figures of each program (`roofline.table`), whether the largest stage fits, settings
    for stages that do not fit or may be faster, the seconds of an iteration, and the assumptions.
    Sizes are in GB (10^9 bytes) of one device. Arrays that a program does not take as arguments are
    in the column "elsewhere".

    Args:
        summary: The result of `plan`.

    Returns:
        The lines, joined by line feeds.
    """

    def gb(size):
        return f"{size / 1e9:.2f}"

    mesh = " x ".join(f"{axis} {size}" for axis, size in summary["mesh"].items())
    lines = [
        f"{summary['preset']} on {summary['hosts']} host(s) x {summary['devices']} "
        f"{summary['device']}; mesh {mesh}"
    ]
    lines[0] += "; images of {} x {} pixels".format(*summary["size"])
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
            f"{stage}: {row['name']}, {row['calls']} calls of at least "
            f"{roofline.table(row['roofline'])}",
        ]
    fits = "fits" if summary["fits"] else "does not fit"
    lines += [
        "",
        f"largest: {summary['largest']}, {gb(summary['peak'])} of "
        f"{gb(summary['usable'])} GB: {fits}",
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
        f"an iteration: {summary['seconds']:.3g} s at least ({by_stage}); rollout phase "
        f"{summary['rollout']:.3g} s"
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
    """Yields the programs of a plan in the order of an iteration: the name of the stage, and the
    dict of the program with "name", "calls", "memory" and "roofline".

    Args:
        summary: The result of `plan`, whose "stages" and their "programs" are walked.
    """
    for stage in summary["stages"]:
        for row in stage["programs"]:
            yield stage["name"], row
