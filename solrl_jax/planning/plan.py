"""Plans an iteration of training on a device: memory, kernels, collectives and a roofline time.

The programs of a training run are lowered for its shapes and shardings, and compiled for devices
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
from solrl_jax.planning.abstract import (
    abstract,
    abstract_experiment,
    bytes_per_device,
    open_configurations,
)
from solrl_jax.planning.phases import PHASES, Phases, Program
from solrl_jax.planning.targets import CUDNN, Target
from solrl_jax.quant.formats import AUTO, DeviceInfo
from solrl_jax.rl.experiment import open_mesh
from solrl_jax.rl.gradient_checkpointing import open_for_training
from solrl_jax.storage import hub
from solrl_jax.storage.files import atomic_write, writable_directory

# The fraction of a device's memory that arrays may take. The rest is for the runtime, the libraries
# and fragmentation.
USABLE = 0.92
COPY = "quantized copy"
ENCODERS = "text encoders"
CONDITIONING = "conditioning"
ROLLOUT = ("sync", "explore", "regenerate")
# The settings that can reduce the memory of a phase.
SETTINGS = {
    "encode": ("`solrl encode PRESET` beforehand",),
    "sync": ("mesh.fsdp",),
    "explore": ("rollout.per_device_batch_size", "mesh.fsdp", "model.prompt_cache_dir=''"),
    "regenerate": ("rollout.per_device_batch_size", "mesh.fsdp", "model.prompt_cache_dir=''"),
    # Images are decoded a few at a time, whatever the batch size.
    "score": ("mesh.fsdp", "model.prompt_cache_dir=''"),
    "targets": ("model.vae_tile_size", "mesh.fsdp", "model.prompt_cache_dir=''"),
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
        hosts: The number of hosts, at least 1. `topology.devices` lists the possible numbers.
    """

    target: Target
    count: int = 1
    hosts: int = 1


class Planner:
    """Compiles the programs of one configuration for devices that are not present.

    `topology.prepare` must be called before a planner is built, and before JAX is imported.
    `programs` lowers all programs and starts to compile them; it calls `lowered` and `place`.
    Afterwards, `measure` returns the figures of one program, including its memory (`memory`).
    `parts` returns the arrays that stay in memory between programs.

    Attributes:
        config: The configuration that is planned.
        where: The kind and the number of the devices that the programs are compiled for.
        pipeline: The model without weights.
        device: The kind of device as `quant.formats` describes it. It decides which format "auto"
            means.
        phases: Builds the programs of each phase of an iteration, with shapes in place of arrays.
        codes: The quantized weights that exploration samples with, by parameter path, with
            ShapeDtypeStructs for arrays, replicated until `place` is called. An empty dict if
            exploration does not quantize.
        usable: The bytes of a device's memory that arrays may take: 92% of it.
    """

    def __init__(self, config: Config, where: Devices):
        """Builds the experiment, with ShapeDtypeStructs in place of arrays, and its `phases`.
        Compiles nothing.

        Also imports objectives and rewards from outside the package, and reads the prompt sets, for
        which it may download data sets of the hub (`abstract_experiment`).

        Args:
            config: The configuration whose iteration is planned: model, sizes, batches, rewards and
                mesh.
            where: The kind and the number of the devices to compile for.

        Raises:
            InputError: If there is no such topology, the mesh of the configuration needs more
                devices than these or (with `mesh.data=-1`) leaves some unused, the model cannot be
                opened, or the configuration cannot be run.
            ConfigError: If the objective does not allow other settings of the configuration.
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
        self.phases = Phases(abstract_experiment(config, self.pipeline, self.device, mesh))
        self.codes = self.phases.codes()
        self.usable = int(target.memory * USABLE)

    def programs(self, threads: Executor) -> list[tuple[str, Program, Future[Any]]]:
        """Lowers all programs of an iteration, and starts to compile them in threads.

        Also waits for the compilation of the phase "sync", if the run has it, because the shardings
        of its result are needed to lower the programs after it. `place` stores these shardings in
        `codes`.

        Args:
            threads: The executor that runs the compilations.

        Returns:
            One tuple per program, in the order of an iteration and then those of the phase
            "evaluate": the name of its phase, the program, and the future of the compiled program
            (`jax.stages.Compiled`). `result()` of the future raises XLA's error if the program
            cannot be compiled.

        Raises:
            jax.errors.JaxRuntimeError: If XLA cannot compile the phase "sync".
        """
        compilations = []
        for phase in filter(self.phases.has, PHASES):
            for program in self.phases.programs(phase, self.codes):
                compilation = threads.submit(
                    topology.compiled, self.lowered(program), self.where.target
                )
                compilations.append((phase, program, compilation))
                if phase == "sync":
                    self.place(compilation.result())
        return compilations

    def lowered(self, program: Program) -> Any:
        """Lowers a program for the planned devices.

        Args:
            program: The program to lower.

        Returns:
            The lowered program (`jax.stages.Lowered`).
        """
        with jax.set_mesh(program.mesh):
            return topology.lowered(program.function, program.arguments)

    def place(self, sync: Any) -> None:
        """Sets the shardings of the attribute `codes` (the quantized weights) to the output
        shardings of the phase "sync".

        `programs` calls it as soon as that phase is compiled.

        Args:
            sync: The compiled program of the phase "sync" (`jax.stages.Compiled`).
        """
        self.codes = jax.tree.map(
            lambda x, where: abstract(x, self.phases.mesh, where), self.codes, sync.output_shardings
        )

    def measure(
        self, phase: str, program: Program, compiled: Any, hlo: Path | None = None
    ) -> dict[str, Any]:
        """Returns the memory and the time of one compiled program on one device, as JSON values.

        Args:
            phase: The name of its phase, e.g. "explore".
            program: The program before it was compiled.
            compiled: The compiled program (`jax.stages.Compiled`).
            hlo: An existing directory, in which the compiled text is written to
                `PHASE-PROGRAM.hlo`. None: it is not written.

        Returns:
            A dict with these keys:

            * "name": the name of the program's function, e.g. "sample_chunk".
            * "calls": the number of calls per iteration.
            * "memory": a dict of bytes of the device while it runs: "peak", and the parts that make
              it up (see `Planner.memory`).
            * "roofline": a dict of the time and the work of one call: "seconds", "kernels",
              "collectives" and others (see `Roofline.summary`).

        Raises:
            RunError: If the text cannot be written to the disk.
        """
        text = compiled.as_text()
        if hlo is not None:
            atomic_write(hlo / f"{phase}-{program.name}.hlo", text)
        figures = roofline.roofline(
            text, self.where.target, self.where.count, self.where.hosts
        ).summary()
        memory = self.memory(phase, program, compiled.memory_analysis())
        return {"name": program.name, "calls": program.calls, "memory": memory, "roofline": figures}

    def parts(self) -> dict[str, Any]:
        """Returns the arrays that stay in memory from one program to the next, as
        ShapeDtypeStructs.

        Returns:
            A dict of trees. The tree of a part that the run does not have is empty:

            * "base": the frozen parameters of the transformer.
            * "quantized copy": the quantized weights that exploration samples with.
            * "adapters": three versions of the trainable parameters: the current ones, those of the
              old policy (which generates samples), and the EMA.
            * "optimizer": the state of the optimizer.
            * "text encoders", "vae" and "reward networks": the parameters of these networks.
            * "conditioning": the prompt embeddings, and the result of the reward's `prepare`.
        """
        experiment = self.phases.experiment
        state = self.phases.state
        return {
            "base": experiment.backbone.transformer,
            COPY: self.codes,
            "adapters": (state.adapters, state.old, state.ema),
            "optimizer": state.opt_state,
            ENCODERS: self.phases.encoders,
            "vae": experiment.backbone.decoder,
            "reward networks": experiment.reward.params,
            CONDITIONING: (self.phases.conditions, self.phases.prepared),
        }

    def memory(self, phase: str, program: Program, analysis: Any) -> dict[str, Any]:
        """Returns how many bytes of one device are in use while a program runs.

        Args:
            phase: The name of its phase, e.g. "explore".
            program: The program.
            analysis: The result of `memory_analysis()` of the compiled program.

        Returns:
            A dict of bytes:

            * "held": the arguments, including those that the compiler dropped, which stay in memory
              as well. An array that is passed twice counts once.
            * "padded": by how much "arguments" exceeds the bytes of all arguments, because the
              compiler pads them, e.g. to fill a TPU's tiles; 0 if it does not.
            * "temporaries", "outputs" and "code": the temporary buffers, the results, and the
              machine code.
            * "aliased": the outputs that are written over arguments.
            * "resident": a dict of the arrays that are in memory, but are not arguments, with the
              names that `parts` gives them; also "latents" (`Program.other_arrays`). Names with 0
              bytes are left out. With `model.prompt_cache_dir`, text encoders are in memory only
              during "encode".
            * "peak": the sum of "held", "padded", "temporaries", "outputs", "code" and the sizes in
              "resident", less "aliased".
            * "arguments": the compiler's figure for all arguments.
            * "repeated": the bytes of arguments that repeat an earlier one, which "held" does not
              count again.
            * "unread": by how much "arguments" falls short of the bytes of all arguments, because
              the compiler dropped some; 0 if it does not.
        """
        shapes = arrays(program.arguments)
        distinct = {id(x): x for x in shapes}
        # Training makes the copy in "sync", and frees it when all candidates are scored.
        absent: tuple[str, ...] = () if phase in ("explore", "score") else (COPY,)
        if phase == "encode":
            absent = (*absent, CONDITIONING)
        if (
            phase != "encode" and self.config.model.prompt_cache_dir is not None
        ):  # the prompts were encoded ahead, and the encoders freed
            absent = (*absent, ENCODERS)
        parts = {name: tree for name, tree in self.parts().items() if name not in absent} | {
            "latents": program.other_arrays
        }
        others = {
            name: bytes_per_device([x for x in arrays(tree) if id(x) not in distinct])
            for name, tree in parts.items()
        }
        sizes = {
            "temporaries": analysis.temp_size_in_bytes,
            "outputs": analysis.output_size_in_bytes,
            "code": analysis.generated_code_size_in_bytes,
            "held": bytes_per_device(list(distinct.values())),
            "padded": max(analysis.argument_size_in_bytes - bytes_per_device(shapes), 0),
        }
        aliased = analysis.alias_size_in_bytes
        arguments = analysis.argument_size_in_bytes
        return sizes | {
            "arguments": arguments,
            "aliased": aliased,
            "repeated": bytes_per_device(shapes) - sizes["held"],
            "unread": max(bytes_per_device(shapes) - arguments, 0),
            "resident": {name: size for name, size in others.items() if size},
            "peak": sum(sizes.values()) - aliased + sum(others.values()),
        }


def plan(
    config: Config,
    where: Devices,
    hlo: Path | None = None,
    progress: Callable[[str], None] = lambda doing: None,
) -> dict[str, Any]:
    """Predicts memory and time of one training iteration on devices that are not present.

    Compiles the programs of the iteration on all CPU cores. Also imports objectives and rewards
    from outside the package, and reads the prompt sets (`abstract_experiment`).
    `topology.prepare` must be called before, and before JAX is imported.

    Args:
        config: The configuration that is planned.
        where: The kind and the number of the devices.
        hlo: A directory for the compiled texts, `PHASE-PROGRAM.hlo`. It is created if necessary,
            and existing files are replaced. None: they are not written.
        progress: Called once per program with "PHASE: PROGRAM", before the plan waits for its
            compilation and measures it. An error that it raises ends the plan.

    Returns:
        A dict of JSON values. All bytes are per device, and all seconds are roofline bounds:

        * "phases": a list with a dict per phase that has programs: "name" (e.g. "explore"),
          "seconds", "peak" (bytes) and "programs", a list of dicts with "name", "calls", "memory"
          and "roofline" (see `Planner.measure`). It includes "evaluate", with 0 seconds, if the
          images of an evaluation are larger than those of training.
        * "seconds" and "rollout": the seconds of an iteration, and those of its phases "sync",
          "explore" and "regenerate", which generate samples.
        * "naive_scaling": a dict of "seconds" and "rollout" for a run that explores in the training
          precision with all steps and does not regenerate. The key is missing if the planned run
          does not regenerate the kept samples.
        * "peak", "largest", "usable" and "fits": the largest peak of a phase and the name of that
          phase, the bytes that arrays may take (92% of the memory), and whether the peak is within
          this limit.
        * "too_large": for each phase that does not fit, by its name, a list of settings that can
          reduce its memory, e.g. "mesh.fsdp". Empty if all fit.
        * "faster": a dict from the name of a phase ("explore" or "update") to one setting, the text
          `key=value`, that may make this phase faster. Often empty.
        * "parts": bytes of the arrays that stay in memory, e.g. "base" and "adapters".
        * "assumptions": a list of sentences.
        * "preset", "objective", "device", "devices" (per host), "hosts", "size" (a list of height
          and width in pixels, and for clips the number of frames), "mesh" (the sizes of its axes by
          name), "exploration" (its format, as a sentence) and "gradient_checkpointing" (the setting
          in effect, e.g. "blocks"): a description of the planned run.

    Raises:
        InputError: If the devices do not exist or do not match the mesh of the configuration, if
            the configuration cannot be run, or if `hlo` cannot be written to.
        ConfigError: If the objective does not allow other settings of the configuration.
        RunError: If a compiled text cannot be written to the disk.
        jax.errors.JaxRuntimeError: If XLA cannot compile a program.
    """
    planner = Planner(config, where)
    if hlo is not None:
        writable_directory(hlo, "hlo")
    phases = []
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for phase, phase_programs in itertools.groupby(
            planner.programs(threads), key=lambda each: each[0]
        ):
            programs = []
            for _, program, compilation in phase_programs:
                progress(f"{phase}: {program.name}")
                programs.append(planner.measure(phase, program, compilation.result(), hlo))
            seconds = sum(row["calls"] * row["roofline"]["seconds"] for row in programs)
            peak = max(row["memory"]["peak"] for row in programs)
            phases.append({"name": phase, "seconds": seconds, "peak": peak, "programs": programs})
    usable = planner.usable
    largest = max(phases, key=lambda phase: phase["peak"])
    free_bytes = {phase["name"]: usable - phase["peak"] for phase in phases}
    form = planner.phases.experiment.explorer.format
    return {
        "preset": config.preset,
        "objective": config.algorithm.objective,
        "device": where.target.name,
        "devices": where.count,
        "hosts": where.hosts,
        "size": list(planner.phases.experiment.size),
        "usable": usable,
        "mesh": dict(planner.phases.mesh.shape),
        "exploration": form.describe(planner.device),
        "gradient_checkpointing": planner.pipeline.gradient_checkpointing,
        "parts": {name: bytes_per_device(arrays(tree)) for name, tree in planner.parts().items()},
        "phases": phases,
        "largest": largest["name"],
        "peak": largest["peak"],
        "fits": largest["peak"] <= usable,
        "too_large": {
            phase["name"]: list(SETTINGS[phase["name"]])
            for phase in phases
            if phase["peak"] > usable
        },
        "faster": suggest_faster_settings(planner, free_bytes),
        **totals(planner, phases),
        "assumptions": list(assumptions(planner)),
    }


def arrays(tree: Any) -> list[Any]:
    """Returns the ShapeDtypeStructs among the leaves of a tree.

    Args:
        tree: A tree with ShapeDtypeStructs in place of arrays, such as the arguments of a program.
    """
    return [x for x in jax.tree.leaves(tree) if isinstance(x, jax.ShapeDtypeStruct)]


def suggest_faster_settings(planner: Planner, free_bytes: dict[str, int]) -> dict[str, str]:
    """Suggests settings that may make an iteration faster.

    There are two. `rollout.explore.precision=auto` is suggested if the device can only emulate the
    present format. `model.gradient_checkpointing=matmuls` is suggested if the configuration has
    "blocks" (not "auto") and the update leaves more than half of the usable memory free.

    Args:
        planner: The planner, for its configuration, device and usable memory.
        free_bytes: The bytes of the usable memory that each phase leaves free, by the name of the
            phase. "update" must be among them.

    Returns:
        The settings `key=value` by the phase that they make faster, "explore" or "update". May be
        empty.
    """
    explorer = planner.phases.experiment.explorer
    gradient_checkpointing = planner.config.model.gradient_checkpointing
    settings = (
        {}
        if explorer.format.is_native(planner.device)
        else {"explore": f"rollout.explore.precision={AUTO}"}
    )
    roomy = free_bytes["update"] > planner.usable / 2
    return settings | (
        {"update": "model.gradient_checkpointing=matmuls"}
        if roomy and gradient_checkpointing == "blocks"
        else {}
    )


def totals(planner: Planner, phases: list[dict[str, Any]]) -> dict[str, Any]:
    """Adds up the seconds of an iteration.

    If the run regenerates the kept samples, it also estimates an iteration of the method
    "naive_scaling" for comparison. This method samples all candidates in the training precision and
    with all steps, and neither regenerates nor rescores any. Each of its batches takes the roofline
    seconds of a batch of regeneration, scaled up to all steps.

    Args:
        planner: The planner, for the numbers of batches and steps.
        phases: The phases of the iteration in order: dicts with "name", "seconds" and, for
            "regenerate", "programs", a list whose first dict has the seconds of a batch under
            "roofline" and "seconds". If "evaluate" is among them, its seconds must be 0.

    Returns:
        A dict of "seconds" (of the iteration) and "rollout" (of its phases "sync", "explore" and
        "regenerate"). If the run regenerates, also "naive_scaling": a dict of both for that method,
        whose rollout is its sampling alone, and whose score phase has only the explored batches.
    """
    seconds = {phase["name"]: phase["seconds"] for phase in phases}
    rollout = sum(seconds.get(name, 0.0) for name in ROLLOUT)
    figures: dict[str, Any] = {"seconds": sum(seconds.values()), "rollout": rollout}
    regeneration = next(
        (phase["programs"][0] for phase in phases if phase["name"] == "regenerate"), None
    )
    if regeneration is not None:
        sampled_batches, _ = planner.phases.num_batches(row_groups(planner.phases.mesh))
        # "naive_scaling" continues nothing, so its candidates take all steps.
        steps = planner.config.rollout.num_steps
        all_steps = steps / (steps - planner.phases.continued)
        naive = sampled_batches * regeneration["roofline"]["seconds"] * all_steps
        explored_batches, regenerated_batches = planner.phases.num_batches(planner.phases.mesh.size)
        # A groupwise reward of latents has no programs, so there may be no phase "score".
        scored = seconds.get("score", 0.0)
        score = scored * explored_batches / (explored_batches + regenerated_batches)
        iteration = figures["seconds"] - rollout - scored + naive + score
        figures["naive_scaling"] = {"seconds": iteration, "rollout": naive}
    return figures


def assumptions(planner: Planner) -> Iterator[str]:
    """Yields the assumptions behind the figures of a plan, as sentences without full stops.

    For example, the fraction of memory that arrays may take, and the work that is assumed to take
    no time.

    Args:
        planner: The planner. Its configuration and devices decide which sentences apply.
    """
    where = planner.where
    config = planner.config
    yield (
        f"{USABLE:.0%} of a device's memory are for arrays; JAX takes 75% of a GPU without "
        "XLA_PYTHON_CLIENT_MEM_FRACTION"
    )
    encoder_memory = (
        "stay in memory (model.prompt_cache_dir=null)"
        if config.model.prompt_cache_dir is None
        else "encode all prompts of a run, then are freed"
    )
    yield f"text encoders {encoder_memory}; their seconds are for the prompts of one iteration"
    if len(training_sizes(config)) > 1:
        yield "every iteration has the largest of rollout.size"
    if planner.phases.has("evaluate"):
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
        yield "collectives that overlap cost what the program's other kernels do not hide"
    if hub.is_carried(planner.pipeline.folder):
        yield (
            f"{config.model.path}: the configuration that the package contains, because no files "
            "are present"
        )
    yield "reward networks: as released"


def table(summary: dict[str, Any]) -> str:
    """Formats a plan for a terminal.

    The lines show the planned run, the memory of the parts and of each program in GB (10^9 bytes)
    per device, the times of each program, whether the plan fits, and the assumptions.

    Args:
        summary: The plan, as `plan` returns it: a dict with "preset", "device", "parts", "phases",
            "peak", "fits", "seconds", "assumptions" and others.

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
    height, width, *frames = summary["size"]
    kind = f"clips of {frames[0]} frames" if frames else "images"
    lines[0] += f"; {kind} of {height} x {width} pixels"
    lines += [
        f"exploration: {summary['exploration']}",
        f"the update recomputes: {summary['gradient_checkpointing']}",
        "",
        "parts, GB per device",
    ]
    lines += [f"  {name:<16} {gb(size):>8}" for name, size in summary["parts"].items()]
    lines += ["", f"{'GB per device':<27}arguments temporaries outputs aliased elsewhere    peak"]
    for phase, row in rows(summary):
        m = row["memory"]
        name = f"{phase}: {row['name']}"
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
    for phase, row in rows(summary):
        lines += [
            "",
            f"{phase}: {row['name']}, {row['calls']} calls of at least "
            f"{roofline.table(row['roofline'])}",
        ]
    fits = "fits" if summary["fits"] else "does not fit"
    lines += [
        "",
        f"largest: {summary['largest']}, {gb(summary['peak'])} of "
        f"{gb(summary['usable'])} GB: {fits}",
    ]
    lines += [
        f"  {phase} is too large; it takes less with {', '.join(by)}"
        for phase, by in summary["too_large"].items()
    ]
    free_gb = {phase["name"]: gb(summary["usable"] - phase["peak"]) for phase in summary["phases"]}
    lines += [
        f"  {phase} leaves {free_gb[phase]} GB; it may be faster with {by}"
        for phase, by in summary["faster"].items()
    ]
    by_phase = ", ".join(f"{phase['name']} {phase['seconds']:.3g}" for phase in summary["phases"])
    lines += [
        f"an iteration: {summary['seconds']:.3g} s at least ({by_phase}); rollout phase "
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
    """Yields the programs of a plan in the order of an iteration.

    Args:
        summary: The plan, as `plan` returns it. Its entry "phases" is a list of dicts with "name"
            and "programs".

    Yields:
        Pairs of the name of the phase and the dict of the program that `Planner.measure` returned,
        with "name", "calls", "memory" and "roofline".
    """
    for phase in summary["phases"]:
        for row in phase["programs"]:
            yield phase["name"], row
