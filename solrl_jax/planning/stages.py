"""The programs of an iteration, in the order of `train.iterate`, with shapes for arrays: those that train, and no others."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from solrl_jax.conditioning.text_encoders import ENCODED_ROWS, encode_chunk
from solrl_jax.explore.lever import shaped_quantizer
from solrl_jax.explore.sync import Quantizer, quantize_policy
from solrl_jax.parallel import sharding
from solrl_jax.parallel.sharding import row_groups
from solrl_jax.planning.abstract import abstract, text_encoders
from solrl_jax.policy.lora import attach, flatten
from solrl_jax.policy.update import PolicyBatch, update
from solrl_jax.rewards.protocol import score_images
from solrl_jax.rollout.generate import Conditions, Rows, decode_chunk, sample_chunk
from solrl_jax.rollout.stage import Leg, Stage
from solrl_jax.training.experiment import Experiment, state_shapes

STAGES = ("encode", "sync", "explore", "regenerate", "score", "update")


@dataclasses.dataclass(frozen=True)
class Program:
    """A jitted function and its arguments, called `calls` times an iteration."""

    mesh: Mesh
    function: Any
    arguments: tuple[Any, ...]
    calls: int
    share: float = 1.0  # of the work of the trace for one device that a device of the planned mesh has
    beside: Any = ()  # arguments that are no part of the model
    donated: Sequence[int] = ()  # numbers of leaves of the arguments that are not static
    results_held: bool = False  # whether what it returns is a part of the model


class Stages:
    """The programs for an experiment of shapes on one mesh, called as often as on another of `groups` groups of rows."""

    def __init__(self, experiment: Experiment, groups: int, tensor: int = 1):
        self.experiment, self.groups, self.tensor = experiment, groups, tensor
        self.mesh = experiment.backbone.mesh
        self.rows_mesh = sharding.rows_only(self.mesh)
        self.state = state_shapes(experiment)
        self.encoders = text_encoders(experiment.backbone)
        self.whole = sharding.replicated(self.mesh)
        everywhere = sharding.replicated(self.rows_mesh)
        self.prepared = abstract(experiment.reward.prepare(experiment.train_prompts), self.rows_mesh, everywhere)
        self.conditions = Conditions(self._encodings(experiment.config.train.prompts), self._encodings(1))

    def has(self, stage: str) -> bool:
        """Whether a run has that stage."""
        if stage == "sync":
            return self.experiment.recipe.format.quantize is not None
        return stage != "regenerate" or self.experiment.config.rollout.regenerate

    def codes(self) -> Any:
        """What `sync` makes, whole on every device; nothing where nothing is quantised."""
        if not self.has("sync"):
            return {}
        with jax.set_mesh(self.mesh):
            made = quantize_policy.eval_shape(*self._sync())
        return abstract(made, self.mesh, self.whole)

    def programs(self, stage: str, codes: Any) -> list[Program]:
        """Of a stage that the run has. codes: the quantised copy."""
        experiment, rollout = self.experiment, self.experiment.config.rollout
        pool, kept = (experiment.config.train.prompts * n for n in (rollout.candidates, rollout.kept))
        chunks = lambda groups: [-(-n // (self._stage.chunk * groups)) for n in (pool, kept * rollout.regenerate)]
        drafts, redone = chunks(self.groups)
        match stage:
            case "encode":
                return [self._encode()]
            case "sync":
                return [Program(self.mesh, quantize_policy, self._sync(), 1, results_held=True)]
            case "explore":
                policy = attach(experiment.backbone.transformer, self.state.old, experiment.scale, codes)
                leg, recipe = Leg(policy, experiment.grid(rollout.explore.steps)), experiment.recipe
                legs = recipe.legs(leg, experiment.policy(self.state.old), recipe.format.name)
                return [self._sample(legs, drafts)]
            case "regenerate":
                return [self._sample(experiment.stage("regenerate", self.state.old, rollout.steps).legs, redone)]
            case "score":
                drafted, redone = chunks(self.groups * self.tensor)
                return self._score(drafted + redone)
        return [self._update()]

    def _encodings(self, count: int) -> Any:
        with jax.set_mesh(self.rows_mesh):
            out = encode_chunk.eval_shape(*self._encode().arguments)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype, sharding=self.whole), out)

    def _encode(self) -> Program:
        backbone, model = self.experiment.backbone, self.experiment.config.model
        mesh, pipeline = self.rows_mesh, backbone.pipeline
        texts = [""] * (ENCODED_ROWS * mesh.size)
        if backbone.instruction is None or pipeline.instruct is None:
            tokens = pipeline.tokenize(texts, model.max_tokens)
        else:
            tokens = pipeline.instruct(texts, model.max_tokens, backbone.instruction)
        placed = abstract(tokens, mesh, sharding.rows(mesh))
        devices = self.groups * self.tensor
        calls = -(-self.experiment.config.train.prompts // (ENCODED_ROWS * devices)) + 1  # and the empty prompt
        return Program(mesh, encode_chunk, (backbone.text_encoders, self.encoders, placed), calls, beside=placed)

    def _sync(self) -> tuple[Any, ...]:
        experiment, recipe = self.experiment, self.experiment.recipe
        base = experiment.backbone.transformer
        assert recipe.format.quantize is not None
        flat = flatten(base)
        weights = {path: jax.ShapeDtypeStruct(flat[path].shape, flat[path].dtype) for path in recipe.quantized}
        quantizer = shaped_quantizer(recipe.explore, Quantizer(recipe.format.quantize), weights)
        quantizer = Quantizer(quantizer.quantize, abstract(quantizer.beside, self.mesh, self.whole))
        return self.mesh, base, self.state.old, experiment.scale, recipe.quantized, quantizer

    @property
    def _stage(self) -> Stage:
        return self.experiment.recipe.calibration.stage

    def _rows(self, mesh: Mesh, shape: tuple[int, ...], dtype: Any) -> Any:
        rows = self._stage.chunk * row_groups(mesh)
        return jax.ShapeDtypeStruct((rows, *shape), dtype, sharding=sharding.rows(mesh))

    def _sample(self, legs: tuple[Leg, ...], calls: int) -> Program:
        noise = self._rows(self.mesh, self._stage.shape, jnp.float32)
        rows = Rows(self._rows(self.mesh, (), jnp.int32), self._rows(self.mesh, (2,), jnp.uint32), noise)
        legs = tuple(Leg(leg.policy, abstract(leg.grid, self.mesh, self.whole)) for leg in legs)
        arguments = (self.experiment.backbone, legs, self.conditions, rows)
        return Program(self.mesh, sample_chunk, arguments, calls, 1 / self.tensor, beside=noise)

    def _score(self, calls: int) -> list[Program]:
        experiment, reward, mesh = self.experiment, self.experiment.reward, self.rows_mesh
        latents = self._rows(mesh, self._stage.shape, jnp.float32)
        images = self._rows(mesh, (experiment.config.model.height, experiment.config.model.width, 3), jnp.float32)
        decode = Program(mesh, decode_chunk, (experiment.backbone.decoder, latents), calls, beside=latents)
        if reward.score is None:
            return [decode]
        arguments = (reward, reward.params, images, self.prepared, self._rows(mesh, (), jnp.int32))
        return [decode, Program(mesh, score_images, arguments, calls, beside=(latents, images))]

    def _update(self) -> Program:
        experiment, config = self.experiment, self.experiment.config
        backbone, grid = experiment.backbone, experiment.grid(config.rollout.steps)
        count = config.train.prompts * config.rollout.kept
        of: Any = lambda shape, dtype: jax.ShapeDtypeStruct((count, *shape), dtype, sharding=self.whole)
        batch = PolicyBatch(
            latents=of(self._stage.shape, jnp.float32),
            optimality=of((), jnp.float32),
            weight=of((), jnp.float32),
            prompt=of((), jnp.int32),
            seeds=of((2,), jnp.uint32),
            conditioning=self.conditions.positive,
        )
        arguments = (backbone, config, self.state, backbone.transformer, batch, abstract(grid, self.mesh, self.whole))
        # the trace for one device goes through all micro-batches
        terms = count * config.trained_sigmas // config.optimizer.steps_per_iteration
        turns = lambda groups: -(-terms // (config.optimizer.micro_batch * groups))
        share = turns(self.groups) / turns(row_groups(self.mesh)) / self.tensor
        donated = range(len(jax.tree.leaves(self.state)))
        samples = dataclasses.replace(batch, conditioning={})
        return Program(self.mesh, update, arguments, 1, share, beside=samples, donated=donated)
