"""An `Experiment`: a configuration made real. What training, evaluation and ranking share, loaded and checked once."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import cache, cached_property, partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, UInt32

from solrl_jax.backbone.backbone import (
    DTYPES,
    Backbone,
    Params,
    Pipeline,
    decoding_with,
    load_backbone,
    open_drafts,
    open_model,
    open_text_encoders,
)  # fmt: skip
from solrl_jax.conditioning.prompts import Prompt, draw_prompts, load_instruction, load_prompts
from solrl_jax.config.schema import Config
from solrl_jax.explore.calibrate import SAMPLES, Bases, preview_grid, principal_inputs
from solrl_jax.explore.linears import quantized_paths
from solrl_jax.explore.monitor import Level, levels
from solrl_jax.numerics.formats import FORMATS, Device, Format, resolve
from solrl_jax.numerics.matmul import Quantized
from solrl_jax.numerics.randomness import candidate_seeds, prompt_uid
from solrl_jax.parallel import sharding
from solrl_jax.parallel.sharding import make_mesh
from solrl_jax.policy.lora import Adapters, attach, matching, merge_and_quantize
from solrl_jax.rewards.host import trial
from solrl_jax.rewards.protocol import Reward
from solrl_jax.rewards.registry import open_rewards
from solrl_jax.rollout.generate import Grid, Relay, prepare
from solrl_jax.storage.errors import InputError

CALIBRATION = 2**31 - 3  # the iteration of its seeds; the two after it are `rank`'s and `evaluate`'s


@partial(sharding.jit, static_argnums=(0, 3, 4, 5))
def quantize_policy(
    mesh: Mesh, base: Params, adapters: Adapters, scale: float, paths: Sequence[str], quantize: Callable[[Array], Quantized],
    bases: Bases | None = None,
) -> dict[str, Quantized]:  # fmt: skip
    """`merge_and_quantize` in one program; the base is read, never copied, and codes are split over devices as weights are."""
    whole = partial(jax.lax.with_sharding_constraint, shardings=sharding.replicated(mesh))
    codes = merge_and_quantize(base, adapters, scale, paths, quantize, bases, whole)
    return jax.lax.with_sharding_constraint(codes, sharding.parameter_sharding(mesh, codes))


@dataclasses.dataclass(frozen=True)
class Experiment:
    """The parts of a run that never change."""

    config: Config
    backbone: Backbone
    drafts: Backbone  # the same, decoding candidates as `rollout.explore.vae` says
    reward: Reward
    evaluated: Reward  # the same with what is watched beside it
    targets: tuple[str, ...]  # parameters with an adapter
    quantized: tuple[str, ...]  # parameters that are quantised while exploring in a format that quantises
    device: Device  # what the mesh is of
    train_prompts: list[Prompt]
    test_prompts: list[Prompt]

    @property
    def scale(self) -> float:
        """What the product of an adapter's two factors is multiplied by: alpha / rank."""
        return self.config.lora.alpha / self.config.lora.rank

    @property
    def format(self) -> Format:
        """What exploration runs in: the format that `rollout.explore.precision` names, or means on these devices."""
        return resolve(self.config.rollout.explore.precision, self.device)

    @property
    def levels(self) -> tuple[Level, ...]:
        """How exploration may be done, from what is configured to the most faithful."""
        rollout = self.config.rollout
        return levels(self.format, rollout.explore.steps, rollout.steps, rollout.precision)

    @property
    def size(self) -> tuple[int, int]:
        return self.config.model.height, self.config.model.width

    def grid(self, steps: int) -> Grid:
        """The run's solver and schedule with `steps` steps."""
        pipeline = self.backbone.pipeline
        return Grid.of(self.config.rollout, steps, pipeline.image_tokens(*self.size), pipeline.embedded_guidance)

    def exploring_grid(self, steps: int, sigmas: str | None = None) -> Grid:
        """The grid that candidates are explored on; sigmas: other ones than `rollout.explore.sigmas` says."""
        rollout = self.config.rollout
        if (sigmas or rollout.explore.sigmas) == "own":
            return self.grid(steps)
        return self._preview_grid(steps) if steps < rollout.steps else self.grid(rollout.steps)

    def policy(self, adapters: Adapters) -> Params:
        """The policy of `adapters`, exactly: the base with the adapters beside it, in the training precision."""
        return attach(self.backbone.transformer, adapters, self.scale)

    def exploring_policy(self, adapters: Adapters, precision: str) -> Params:
        """The policy that explores: the same, or with linears merged and in the format of that name ("sync" in the paper)."""
        quantize = FORMATS[precision].quantize
        if quantize is None:
            return self.policy(adapters)
        base = self.backbone.transformer
        codes = quantize_policy(self.backbone.mesh, base, adapters, self.scale, self.quantized, quantize, self.bases)
        return attach(base, adapters, self.scale, codes)

    def exact_steps(self, precision: str) -> int:
        """How many of a sample's first steps are exact when exploring in that format: none where it quantises nothing."""
        return self.config.rollout.explore.exact_steps if FORMATS[precision].quantize is not None else 0

    def explorer(self, adapters: Adapters, precision: str) -> Params | Relay:
        """`exploring_policy`, after `rollout.explore.exact_steps` steps of the exact one where it is another."""
        exact = self.exact_steps(precision)
        rest = self.exploring_policy(adapters, precision)
        return Relay(self.policy(adapters), rest, exact) if exact else rest

    @property
    def calibration_prompts(self) -> list[Prompt]:
        """Those whose samples `calibrate` looks at; none where there is nothing to calibrate."""
        rollout = self.config.rollout
        previews = rollout.explore.sigmas == "first" and rollout.explore.steps < rollout.steps
        corrects = rollout.explore.correction and self.format.quantize is not None
        return self._sampled[0] if previews or corrects else []

    def calibrate(self) -> None:
        """Measures all that level 0 of `levels` explores with. It would be measured when first asked for, too."""
        self.exploring_grid(self.config.rollout.explore.steps)
        if self.format.quantize is not None:
            jax.block_until_ready(self.bases)

    @cached_property
    def bases(self) -> Bases:
        """What goes past the quantised products, by linear; empty without `rollout.explore.correction`."""
        config, (prompts, seeds) = self.config, self._sampled
        explore = config.rollout.explore
        if not explore.correction:
            return {}
        return principal_inputs(
            self.backbone, self.quantized, explore.correction, self.exploring_grid(explore.steps), explore.exact_steps,
            prepare(self.backbone, None, prompts, config.model.max_tokens), seeds, self.size, config.rollout.chunk,
            config.optimizer.micro_batch,
        )  # fmt: skip

    @property
    def correction_ranks(self) -> dict[str, int]:
        """Of each quantised linear, how many of its inputs' directions go past it; empty where nothing is corrected."""
        if self.format.quantize is None or not self.config.rollout.explore.correction:
            return {}
        return {path: self.bases[path].shape[-1] if path in self.bases else 0 for path in self.quantized}

    @cached_property
    def _preview_grid(self) -> Callable[[int], Grid]:
        """The grid of a preview with so many steps, worked out once."""
        config, (prompts, seeds) = self.config, self._sampled
        prompted = prepare(self.backbone, None, prompts, config.model.max_tokens)
        whole = self.grid(config.rollout.steps)
        return cache(lambda steps: preview_grid(self.backbone, whole, steps, prompted, seeds, self.size, config.rollout.chunk))

    @property
    def _sampled(self) -> tuple[list[Prompt], UInt32[np.ndarray, "p 2"]]:
        """What calibration samples: prompts, and a seed of each."""
        prompts = self.train_prompts[:SAMPLES]
        return prompts, self.seeds(self.config.seed, CALIBRATION, prompts, 1)[:, 0]

    def seeds(self, root: int, iteration: int, prompts: Sequence[str], candidates: int) -> UInt32[np.ndarray, "p n 2"]:
        """The seeds of `candidates` candidates of each prompt, on the host."""
        uids = np.array([prompt_uid(p) for p in prompts], np.uint32)
        return np.asarray(candidate_seeds(np.int32(root), np.int32(iteration), uids, np.arange(candidates)))


def build(config: Config) -> Experiment:
    """Checks everything that can be checked cheaply, then loads. Raises InputError in one line."""
    model, rollout = config.model, config.rollout
    load_reward = open_rewards(config.reward)
    train, test = load_prompt_sets(config)
    for field, wanted, there in (("train.prompts", config.train.prompts, train), ("eval.prompts", config.eval.prompts, test)):
        if wanted > len(there):
            raise InputError(f"{field}={wanted}: must be at most the {len(there)} distinct prompts of its file")
    instruction = read_instruction(config)
    mesh = open_mesh(config)
    reward, evaluated = load_reward(sharding.rows_only(mesh))
    for scored, prompts in ((reward, train[:1]), (evaluated, test[:1])):  # one it cannot score is found before the weights are
        scored.prepare(prompts)
        if scored.host is not None:
            trial(scored.host, prompts, (model.height, model.width))
    pipeline = open_model(model.path, model.remat)
    drafts = open_drafts(pipeline, rollout.explore.vae)
    device = device_facts()
    targets, quantized = linears_of(config, pipeline, device)
    backbone = load_backbone(pipeline, rollout.precision, mesh, cache=model.cache, instruction=instruction, tile=model.tile)
    drafting = decoding_with(backbone, drafts)
    return Experiment(config, backbone, drafting, reward, evaluated, targets, quantized, device, train, test)


def linears_of(config: Config, pipeline: Pipeline, device: Device) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Which parameters of the pipeline's transformer get an adapter, and which are quantised on such devices.

    Raises InputError for what `config` asks of a pipeline that is of another kind.
    """
    model, rollout = config.model, config.rollout
    if rollout.true_guidance != 1 and not pipeline.embedded_guidance:
        why = f"a {pipeline.kind}, whose rollout.guidance is classifier-free"
        raise InputError(f"rollout.true_guidance={rollout.true_guidance}: must be 1 for {why}")
    shapes = pipeline.transformer.shapes(DTYPES[rollout.precision])
    try:
        pipeline.latent_shape(model.height, model.width)
        targets = matching(shapes, config.lora.targets, "lora.targets")
        form = resolve(rollout.explore.precision, device)
        return tuple(targets), quantized_paths(shapes, model.quantize, form, rollout.explore.correction)
    except ValueError as error:
        raise InputError(str(error)) from error


def device_facts() -> Device:
    """What there is to run on; all devices of a mesh are of one kind."""
    return Device.of(jax.devices()[0])


def load_prompt_sets(config: Config) -> tuple[list[Prompt], list[Prompt]]:
    """The prompts to train on and those to test on."""
    return load_prompts(config.prompts.train, "prompts.train"), load_prompts(config.prompts.test, "prompts.test")


def describe_prompts(config: Config) -> dict[str, Any]:
    """How many distinct prompts there are to train and to test on, in which files, and those of the first iteration."""
    train, test = load_prompt_sets(config)
    first = draw_prompts(train, config.seed, 0, min(config.train.prompts, len(train)))
    return {
        "files": dataclasses.asdict(config.prompts),
        "train": len(train),
        "test": len(test),
        "shared": len(set(train) & set(test)),
        "first": [{"prompt": str(p), "metadata": dict(p.metadata)} for p in first],
    }


def read_instruction(config: Config) -> str | None:
    path = config.model.instruction
    return None if path is None else load_instruction(path, "model.instruction")


def open_mesh(config: Config, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The run's mesh, of all devices or of those given. Raises InputError where they do not come out even."""
    try:
        return make_mesh(**dataclasses.asdict(config.mesh), devices=devices)
    except ValueError as error:
        raise InputError(str(error)) from error


def fill_cache(config: Config, progress: Callable[[int], None] = lambda prompts: None) -> dict[str, Any]:
    """Encodes all that a run of `config` will ask of the text encoders, so that it need not load them: both prompt sets and
    the empty prompt. Nothing but the text encoders is loaded. progress: told of prompts done. Returns what `--json` prints."""
    prompts = list(dict.fromkeys([p for prompt_set in load_prompt_sets(config) for p in prompt_set]))
    instruction, mesh, tokens = read_instruction(config), open_mesh(config), config.model.max_tokens
    encoders = open_text_encoders(open_model(config.model.path), config.rollout.precision, mesh, config.model.cache)
    if encoders.cache is None:
        raise InputError("model.cache=None: expected a directory to be filled, or '' for the user's own")
    encoders.check_instruction(instruction)
    empty, encoded = encoders.encode([""], tokens)
    for start in range(0, len(prompts), encoders.chunk):
        part = prompts[start : start + encoders.chunk]
        encoded += encoders.encode(part, tokens, instruction)[1]
        progress(len(part))
    size = sum(x.nbytes for x in empty.values())
    return {"cache": str(encoders.cache.folder), "prompts": len(prompts) + 1, "encoded": encoded, "bytes_each": size}
