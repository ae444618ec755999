"""What each stage of an iteration takes of a device: three sources, each for what it can be trusted with.

* *parts* (the base, its quantised copy, adapters, encoders, ...): shapes and shardings, exactly;
* *activations, operations, traffic of memory*: the walk over each program's jaxpr (`planning.walk`), traced for one device with
  that device's rows and for the target's kernels: the CPU's compiler holds, fuses and widens what no target would;
* *bytes between devices, and where the quantised copy lies*: the same programs compiled for as many pretended devices
  (`planning.collectives`); partitioning comes before a compiler looks at its target.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from solrl_jax.backbone.backbone import Pipeline
from solrl_jax.config.schema import Config
from solrl_jax.numerics.target import planned_for
from solrl_jax.parallel import sharding
from solrl_jax.parallel.sharding import row_groups
from solrl_jax.planning.abstract import abstract, experiment, held
from solrl_jax.planning.collectives import collectives, partitioned
from solrl_jax.planning.devices import Machine
from solrl_jax.planning.stages import STAGES, Program, Stages
from solrl_jax.planning.walk import Cost, cost

COMPUTE, MOVE = 0.5, 0.7  # fractions of the peak rates that are reached: of products; of memory and of links
QUICK = {  # the code never runs: LLVM need not optimise it
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_allow_excess_precision": False,
}
COPY, ENCODERS, CONDITIONING = "quantised copy", "text encoders", "conditioning"


@dataclasses.dataclass
class Stage:
    """Of one device: bytes, operations and seconds of an iteration."""

    name: str
    resident: int  # of parts
    activations: int = 0  # most bytes that are live at once beside the parts
    calls: int = 0  # of its program, the most called one if there are two
    flops: dict[str, int] = dataclasses.field(default_factory=dict)  # by what is multiplied
    traffic: float = 0.0  # of memory
    sent: dict[str, float] = dataclasses.field(default_factory=dict)  # to other devices, by kind of collective
    crossing: float = 0.0  # to other hosts
    seconds: float = 0.0
    flash: bool = False  # whether any attention is

    @property
    def peak(self) -> int:
        return self.resident + self.activations


@dataclasses.dataclass
class Measured:
    parts: dict[str, int]  # bytes that a device holds
    stages: list[Stage]  # in order

    @property
    def largest(self) -> Stage:
        return max(self.stages, key=lambda stage: stage.peak)


class Planner:
    """Measures one configuration on any mesh of one machine's devices; its programs are traced once."""

    def __init__(self, config: Config, machine: Machine, pipeline: Pipeline):
        self.config, self.machine, self.pipeline = config, machine, pipeline
        self.alone = experiment(config, pipeline, machine, sharding.make_mesh(1, 1, devices=jax.devices()[:1]))
        self._traced: dict[str, list[Any]] = {}
        self._walked: dict[tuple[str, bool], list[Cost]] = {}
        self._partitioned: dict[tuple[str, Any, Mesh], tuple[Any, str]] = {}

    def measure(
        self, mesh: Mesh, progress: Callable[[str], None] = lambda doing: None, *, messages: bool = True,
        only: Sequence[str] = STAGES, parts: dict[str, int] | None = None,
    ) -> Measured:  # fmt: skip
        """messages: whether to find out what moves between devices; else the copy is taken to lie as the base does.

        only: these stages; parts: known already.
        """
        groups, tensor = row_groups(mesh), mesh.shape["tensor"]
        whole = Stages(experiment(self.config, self.pipeline, self.machine, mesh), groups, tensor)
        alone = Stages(self.alone, groups, tensor)
        codes = self._copy(whole, progress) if messages else as_base(whole)
        parts, stages = parts or held_parts(whole, codes), []
        for name in only:
            if alone.has(name):
                progress(f"{name}: operations and memory")
                stages.append(self._stage(name, alone, parts, gathers=mesh.shape["fsdp"] > 1))
        if messages and mesh.size > 1:
            for stage in stages:
                progress(f"{stage.name}: messages between {mesh.size} devices")
                self._add_messages(stage, whole, codes)
        return Measured(parts, stages)

    def _stage(self, name: str, alone: Stages, parts: dict[str, int], *, gathers: bool) -> Stage:
        absent: tuple[str, ...] = (COPY, CONDITIONING) if name == "encode" else ()
        if name != "encode" and self.config.model.cache is not None:  # encoded ahead, and freed
            absent = (ENCODERS,)
        stage = Stage(name, resident=sum(size for part, size in parts.items() if part not in absent))
        programs = alone.programs(name, alone.codes())
        if name not in self._traced:
            with jax.set_mesh(alone.mesh), planned_for(self.machine.platform):
                self._traced[name] = [p.function.trace(*p.arguments).jaxpr for p in programs]
        if (name, gathers) not in self._walked:
            native = self.alone.recipe.format.native(self.alone.device)
            walk = lambda p, jaxpr: cost(jaxpr, gathers=gathers, native=native, donated=p.donated)
            self._walked[name, gathers] = list(map(walk, programs, self._traced[name]))
        for program, one in zip(programs, self._walked[name, gathers], strict=True):
            times = program.calls * program.share
            kept = one.kept if program.results_held else 0
            stage.activations = max(stage.activations, one.peak - kept + held(program.beside))
            stage.calls = max(stage.calls, program.calls)
            for kind, count in one.flops.items():
                stage.flops[kind] = stage.flops.get(kind, 0) + round(count * times)
            stage.traffic += one.traffic * times
            stage.flash |= one.flash
            stage.seconds += times * self._seconds(one)
        return stage

    def _seconds(self, one: Cost) -> float:
        """Of one call: computing or moving its memory, whichever is longer."""
        computing = sum(count / getattr(self.machine, kind) for kind, count in one.flops.items()) / COMPUTE
        return max(computing, one.traffic / self.machine.bandwidth / MOVE)

    def _copy(self, whole: Stages, progress: Callable[[str], None]) -> Any:
        """The quantised copy, as `sync` leaves it on the devices."""
        if not whole.has("sync") or whole.mesh.size == 1:
            return whole.codes()
        progress(f"sync: compiling for {whole.mesh.size} devices")
        (program,) = whole.programs("sync", {})
        placed, _ = self._compiled("sync", program)
        return jax.tree.map(lambda x, where: abstract(x, whole.mesh, where), whole.codes(), placed)

    def _compiled(self, name: str, program: Program) -> tuple[Any, str]:
        """Where a stage's program leaves its results, and its text, partitioned."""
        if (name, program.function, program.mesh) not in self._partitioned:
            with jax.set_mesh(program.mesh), planned_for(self.machine.platform):
                compiled, text = partitioned(program.function.lower(*program.arguments), QUICK)
            self._partitioned[name, program.function, program.mesh] = compiled.output_shardings, text
        return self._partitioned[name, program.function, program.mesh]

    def _add_messages(self, stage: Stage, whole: Stages, codes: Any) -> None:
        for program in whole.programs(stage.name, codes):
            _, text = self._compiled(stage.name, program)
            for found in collectives(text, whole.mesh.size):
                times = found.times * program.calls
                stage.sent[found.kind] = stage.sent.get(found.kind, 0.0) + found.sent * times
                stage.crossing += found.crossing(self.machine.devices) * times
        within = max(sum(stage.sent.values()) - stage.crossing, 0.0)
        stage.seconds += (within / self.machine.link + stage.crossing / self.machine.network) / MOVE


def as_base(whole: Stages) -> Any:
    """The quantised copy, placed by the rule for parameters."""
    codes = whole.codes()
    where = sharding.parameter_sharding(whole.mesh, codes)
    return jax.tree.map(lambda x, place: abstract(x, whole.mesh, place), codes, where)


def held_parts(whole: Stages, codes: Any) -> dict[str, int]:
    """What a device holds of the model and of what is made of it, in bytes."""
    backbone, state = whole.experiment.backbone, whole.state
    parts = {
        "base": backbone.transformer,
        COPY: codes,
        "adapters": (state.adapters, state.old, state.ema),
        "optimiser": state.opt_state,
        ENCODERS: whole.encoders,
        "vae": backbone.decoder,
        "reward networks": whole.experiment.reward.params,
        CONDITIONING: (whole.conditions, whole.prepared),
    }
    return {name: held(tree) for name, tree in parts.items()}
