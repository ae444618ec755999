"""`Experiment`: a configuration made real. What training, evaluation and ranking share, checked and loaded once."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from functools import cache, cached_property, partial

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import UInt32

from solrl_jax.config.schema import Config
from solrl_jax.config.sizes import evaluation_size, training_sizes
from solrl_jax.config.values import Size
from solrl_jax.data.prompts import Prompt, load_instruction, load_prompts
from solrl_jax.diffusion.schedule import Schedule
from solrl_jax.diffusion.seeds import candidate_seeds, key, prompt_uid
from solrl_jax.errors import InputError, in_one_line
from solrl_jax.models.backbone import DTYPES, Backbone, load_backbone
from solrl_jax.models.loading.weights import Params
from solrl_jax.models.locate import mhla_override, open_model
from solrl_jax.models.pipeline import Pipeline
from solrl_jax.parallel import hosts, sharding
from solrl_jax.quant.formats import DeviceInfo, resolve_format, scoring_dtypes
from solrl_jax.rewards.host import trial
from solrl_jax.rewards.protocol import Reward, check_prompts
from solrl_jax.rewards.registry import open_rewards
from solrl_jax.rl.explore.explorer import Explorer
from solrl_jax.rl.explore.linears import quantized_paths
from solrl_jax.rl.explore.option import Calibration
from solrl_jax.rl.generate import PromptBatch, SeedBatch, prepare
from solrl_jax.rl.gradient_checkpointing import open_for_training
from solrl_jax.rl.memory_check import device_memory, refuse_what_cannot_fit
from solrl_jax.rl.sampler import Sampler, Segment
from solrl_jax.rl.state import TrainState, abstract_state, init_state, read_start
from solrl_jax.rl.trainable.trainable import Targets, Trainable, attach, find_targets

CALIBRATION_PROMPTS = 16  # training prompts that levers of exploration measure on, one sample each


@dataclasses.dataclass(frozen=True, eq=False)
class Experiment:
    """The parts of a run that never change."""

    config: Config
    backbone: Backbone
    reward: Reward
    evaluation_reward: Reward  # the reward with what is watched beside it
    targets: Targets  # the parameters that are trained
    quantized: tuple[str, ...]  # paths of the linears that exploration may quantise
    device: DeviceInfo  # all devices of a mesh are of one kind
    train_prompts: list[Prompt]
    test_prompts: list[Prompt]
    size: Size  # height and width of the pictures

    @property
    def scale(self) -> float:
        """The factor of an adapter's product: alpha / rank."""
        return self.config.lora.alpha / self.config.lora.rank

    def with_size(self, size: Size) -> "Experiment":
        """The same with pictures of another size. There is one for each size, so what levers measure on it is measured once."""
        return self if size == self.size else self._others(size)

    @cached_property
    def _others(self) -> Callable[[Size], "Experiment"]:
        return cache(lambda size: dataclasses.replace(self, size=size))

    def for_iteration(self, iteration: int) -> "Experiment":
        """The same with pictures of the size of an iteration, counted from 1.

        Every cycle of iterations goes through all sizes, in a new order, as the run's seed has it: nothing that recurs falls
        on one size alone. A resumed run needs no cursor. Raises InputError for an iteration below 1.
        """
        if not 1 <= iteration < 2**31:
            raise InputError(f"iteration={iteration}: accepted: 1 to {2**31 - 1}")
        sizes = training_sizes(self.config)
        cycle, place = divmod(iteration - 1, len(sizes))
        order = jax.random.permutation(
            jax.random.fold_in(key(self.config.seed, "sizes"), cycle), len(sizes)
        )
        return self.with_size(sizes[int(order[place])])

    @cached_property
    def text_hashes(self) -> dict[str, str]:
        """Hashes of texts that files hold: the prompts in order, with what is known about them, and the instruction."""
        said = {
            "prompts": [(str(p), dict(p.metadata)) for p in self.train_prompts],
            "instruction": self.backbone.instruction,
        }
        return {
            name: hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]
            for name, value in said.items()
        }

    def policy(self, adapters: Trainable) -> Params:
        """The policy of `adapters` in the training precision: the base with the adapters beside it."""
        return attach(self.backbone.transformer, adapters, self.scale)

    def schedule(self, steps: int, start: int | None = 0) -> Schedule:
        """The run's solver and schedule with `steps` steps. start: of the steps that add noise; None: none does (`Schedule.from_config`)."""
        pipeline = self.backbone.pipeline
        tokens = pipeline.image_tokens(*self.size)
        return Schedule.from_config(
            self.config.rollout, steps, tokens, pipeline.embedded_guidance, start, pipeline.mu
        )

    def sampler(self, name: str, adapters: Trainable, steps: int, start: int | None = 0) -> Sampler:
        """What a stage in the training precision rolls out with: regeneration, evaluation, calibration. start: as of `grid`."""
        config = self.config
        backbone = self.backbone
        most = -(
            -config.train.num_prompts
            * config.rollout.candidates
            // sharding.row_groups(backbone.mesh)
        )
        return Sampler(
            name=name,
            segments=(Segment(self.policy(adapters), self.schedule(steps, start)),),
            decoder=backbone.decoder,
            shape=backbone.pipeline.latent_shape(*self.size),
            chunk=min(config.rollout.per_device_batch_size, most),
        )

    @cached_property
    def explorer(self) -> Explorer:
        """How candidates are explored."""
        config = self.config
        prompts = self.train_prompts[:CALIBRATION_PROMPTS]
        calibration = Calibration(
            backbone=self.backbone,
            sampler=self.sampler("calibrate", {}, config.rollout.num_steps),
            prompts=prompts,
            prompt_batch=cache(lambda: self.encode_prompts(prompts)),
            rows=SeedBatch.from_seeds(self.seeds("calibration seeds", prompts, 1)),
            micro_batch=config.optimizer.per_device_batch_size,
        )
        return Explorer(
            explore=config.rollout.explore,
            format=resolve_format(config.rollout.explore.precision, self.device),
            quantized=self.quantized,
            scale=self.scale,
            training_precision=config.rollout.precision,
            make_schedule=self.schedule,
            calibration=calibration,
        )

    def encode_prompts(
        self, prompts: Sequence[Prompt], reward: Reward | None = None
    ) -> PromptBatch:
        """The prompts, encoded, and prepared for `reward` if there is one."""
        return prepare(self.backbone, reward, prompts, self.config.model.max_sequence_length)

    def seeds(
        self,
        stream: str,
        prompts: Sequence[str],
        candidates: int,
        *,
        seed: int | None = None,
        iteration: int = 0,
    ) -> UInt32[np.ndarray, "p n 2"]:
        """As `prompt_seeds`. seed: in place of the run's own."""
        return prompt_seeds(
            self.config.seed if seed is None else seed, stream, prompts, candidates, iteration
        )


def prompt_seeds(
    root: int, stream: str, prompts: Sequence[str], candidates: int, iteration: int = 0
) -> UInt32[np.ndarray, "p n 2"]:
    """The seeds of `candidates` candidates of each prompt, on the host, for a stream of `diffusion.seeds.STREAMS`."""
    uids = np.array([prompt_uid(p) for p in prompts], np.uint32)
    return np.asarray(
        candidate_seeds(np.int32(root), stream, np.int32(iteration), uids, np.arange(candidates))
    )


def build(config: Config, *, force: bool = False) -> Experiment:
    """Checks everything that can be checked cheaply, then loads. Raises InputError in one line.

    force: load also what cannot fit into memory, by the arithmetic of `room`.
    """
    model = config.model
    rollout = config.rollout
    device = local_device()
    decoding, products = scoring_dtypes(rollout.scoring_precision, rollout.precision, device)
    load_reward = open_rewards(config.reward, products)
    train, test = load_prompt_sets(config)
    for field, wanted, there in (
        ("train.num_prompts", config.train.num_prompts, train),
        ("eval.num_prompts", config.eval.num_prompts, test),
    ):
        if wanted > len(there):
            raise InputError(
                f"{field}={wanted}: must be at most the {len(there)} distinct prompts of its file"
            )
    instruction = read_instruction(config)
    hosts.connect(mesh := open_mesh(config))
    reward, evaluated = load_reward(sharding.rows_only(mesh))
    pipeline = open_for_training(
        config, mesh, device_memory(), partial(open_model, model.path, mhla=mhla_override(model))
    )
    # what cannot be scored is found before the weights are loaded
    for field, scored, prompts, sizes in (
        ("prompts.train", reward, train, training_sizes(config)),
        ("prompts.test", evaluated, test, (evaluation_size(config),)),
    ):
        check_prompts(scored, prompts, field)
        for size in {*sizes}:
            _try(scored, prompts[:1], pipeline, size)
    targets, quantized = select_parameters(config, pipeline, device)
    if not force:
        refuse_what_cannot_fit(config, pipeline, targets)
    backbone = load_backbone(
        pipeline,
        rollout.precision,
        mesh,
        cache=model.prompt_cache_dir,
        instruction=instruction,
        tile=model.vae_tile_size,
        decoding=decoding,
    )
    return Experiment(
        config,
        backbone,
        reward,
        evaluated,
        targets,
        quantized,
        device,
        train,
        test,
        training_sizes(config)[0],
    )


def _try(scored: Reward, prompts: Sequence[Prompt], pipeline: Pipeline, size: Size) -> None:
    """Raises InputError in one line if pictures of that size cannot be scored. Only rewards outside JAX run for it."""
    if scored.score is not None:
        prepared = scored.prepare([*prompts, *prompts])
        pictures, latents = (
            jax.ShapeDtypeStruct((2, *s), np.float32)
            for s in ((*size, 3), pipeline.latent_shape(*size))
        )
        with in_one_line(
            f"pictures of {size[0]} x {size[1]} pixels (model, rollout.size or eval.size): {{}}".format
        ):
            jax.eval_shape(
                scored.score, scored.params, scored.select_inputs(pictures, latents), prepared
            )
    if scored.host is not None:
        trial(scored.host, prompts, size)


def select_parameters(
    config: Config, pipeline: Pipeline, device: DeviceInfo
) -> tuple[Targets, tuple[str, ...]]:
    """The parameters of the pipeline's transformer that are trained, and those that are quantised on such devices.

    Raises InputError for what `config` asks of a pipeline that is of another kind.
    """
    model = config.model
    rollout = config.rollout
    if rollout.true_cfg_scale != 1 and not pipeline.embedded_guidance:
        why = f"a {pipeline.kind}, whose rollout.guidance_scale is classifier-free"
        raise InputError(f"rollout.true_cfg_scale={rollout.true_cfg_scale}: must be 1 for {why}")
    field = "true_cfg_scale" if pipeline.embedded_guidance else "guidance_scale"
    if config.algorithm.trains_on == "transitions" and getattr(rollout, field) != 1:
        why = f"algorithm.objective={config.algorithm.objective}, whose steps are the trained policy's own"
        raise InputError(f"rollout.{field}={getattr(rollout, field)}: must be 1 with {why}")
    shapes = pipeline.transformer.abstract_params(DTYPES[rollout.precision])
    form = resolve_format(rollout.explore.precision, device)
    with in_one_line():
        return find_targets(pipeline.transformer, config), quantized_paths(
            shapes, model.quantization, form
        )


def local_device() -> DeviceInfo:
    """The kind of device that JAX runs on here."""
    return DeviceInfo.from_jax(jax.devices()[0])


def load_prompt_sets(config: Config) -> tuple[list[Prompt], list[Prompt]]:
    """The prompts to train on and those to test on."""
    return load_prompts(config.prompts.train, "prompts.train"), load_prompts(
        config.prompts.test, "prompts.test"
    )


def read_instruction(config: Config) -> str | None:
    """The text that goes before every prompt, if the configuration names a file with one."""
    path = config.model.instruction
    return None if path is None else load_instruction(path, "model.instruction")


def open_mesh(config: Config, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The run's mesh, of all devices or of those given. Raises InputError where they do not come out even."""
    with in_one_line():
        return sharding.make_mesh(**dataclasses.asdict(config.mesh), devices=devices)


def fresh_state(experiment: Experiment) -> TrainState:
    """The state before the first iteration: the base, or the adapters of `lora.path` on it. Raises InputError."""
    config = experiment.config
    backbone = experiment.backbone
    targets = experiment.targets
    start = read_start(config.lora, targets.adapted, backbone.parameter_table())
    root = key(config.seed, "adapters")
    return init_state(
        root,
        backbone.transformer,
        targets,
        config.lora,
        config.optimizer,
        backbone.mesh,
        start=start,
    )


def state_shapes(experiment: Experiment) -> TrainState:
    """The shapes, dtypes and shardings of the state; nothing is allocated."""
    config = experiment.config
    backbone = experiment.backbone
    return abstract_state(
        backbone.transformer, experiment.targets, config.lora, config.optimizer, backbone.mesh
    )
