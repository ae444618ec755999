"""The programs of a training iteration, to be compiled for a plan without any arrays."""

import copy
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from solrl_jax.config.sizes import evaluation_size, pixel_shape
from solrl_jax.models.text_encoders.encode import encode_chunk
from solrl_jax.parallel import sharding
from solrl_jax.parallel.sharding import row_groups
from solrl_jax.planning.abstract import abstract, shaped, text_encoders
from solrl_jax.rewards.protocol import score_images
from solrl_jax.rl.experiment import Experiment, state_shapes
from solrl_jax.rl.explore.continuation import continued_steps
from solrl_jax.rl.explore.options.registry import shaped_quantizer
from solrl_jax.rl.explore.sync import Quantizer, quantize_policy
from solrl_jax.rl.generate import Conditions, SeedBatch, decode_chunk, sample_chunk
from solrl_jax.rl.reward_gradient import (
    gradient_decoder,
    reward_gradient,
    samples_per_call,
    try_targets,
)
from solrl_jax.rl.sampler import Sampler, Segment, shift_steps
from solrl_jax.rl.trainable.trainable import attach, flatten
from solrl_jax.rl.update import PolicyBatch, update

PHASES = ("encode", "sync", "explore", "regenerate", "score", "targets", "update", "evaluate")


@dataclasses.dataclass(frozen=True)
class Program:
    """A jitted function and the arguments that training calls it with, as shapes.

    Attributes:
        mesh: The mesh that the function runs on. It must be set (`jax.set_mesh`) when the function
            is lowered.
        function: The jitted function, e.g. `sample_chunk`.
        arguments: Its arguments in order, with a ShapeDtypeStruct in place of every array.
        calls: The number of calls in one training iteration. 0 for programs of an evaluation.
        other_arrays: A tree of ShapeDtypeStructs for further arrays that are in memory during a
            call, but are not arguments.
    """

    mesh: Mesh
    function: Any
    arguments: tuple[Any, ...]
    calls: int
    other_arrays: Any = ()

    @property
    def name(self) -> str:
        """The name of the function, e.g. "sample_chunk"."""
        return self.function.__name__


class Phases:
    """Builds the programs of a training iteration from an experiment of ShapeDtypeStructs.

    The phases are:

      - "encode": encodes the prompts.
      - "sync": quantizes the policy.
      - "explore": generates all candidates, with the quantized policy if there is a "sync", else in
        the training precision.
      - "regenerate": generates the kept candidates again in the training precision.
      - "score": decodes and scores samples.
      - "targets": takes the gradient of the reward for the kept samples, if the objective trains on
        it.
      - "update": updates the trainable parameters.
      - "evaluate": generates the images of an evaluation, decodes and scores them. It is not part
        of an iteration.

    Attributes:
        experiment: The experiment, as `abstract_experiment` builds it.
        mesh: The mesh of the transformer and of the update.
        rows_mesh: The mesh for encoding and scoring, with the same devices, but without tensor and
            sequence parallelism: samples are split over all of them.
        state: The training state (`rl.state.TrainState`), with ShapeDtypeStructs for arrays.
        encoders: The parameters of the text encoders, as ShapeDtypeStructs. The keys are their
            folders in the pipeline, e.g. "text_encoder".
        replicated: The sharding of arrays that are replicated on all devices of `mesh`.
        prepared: The prompts of an iteration as the reward's `prepare` returns them, e.g. their
            tokens, with ShapeDtypeStructs for arrays.
        conditions: The embeddings of the iteration's prompts (`cond`) and of the empty prompt
            (`uncond`), an `rl.generate.Conditions` of ShapeDtypeStructs.
    """

    def __init__(self, experiment: Experiment):
        """Computes the shapes that several programs share. Compiles nothing, but calls the reward's
        `prepare` on the prompts.

        Args:
            experiment: The experiment with a ShapeDtypeStruct in place of every array, as
                `abstract_experiment` builds it.
        """
        self.experiment = experiment
        self.mesh = experiment.backbone.mesh
        self.rows_mesh = sharding.row_mesh(self.mesh)
        self.state = state_shapes(experiment)
        self.encoders = text_encoders(experiment.backbone)
        self.replicated = sharding.replicated(self.mesh)
        everywhere = sharding.replicated(self.rows_mesh)
        self.prepared = abstract(
            experiment.reward.prepare(experiment.train_prompts), self.rows_mesh, everywhere
        )
        self.conditions = shaped(
            Conditions, self._encodings(experiment.config.train.num_prompts), self._encodings(1)
        )

    def has(self, phase: str) -> bool:
        """Returns whether the plan includes a phase.

        False for "sync" if exploration does not quantize, for "regenerate" if the run does not
        regenerate, for "targets" if the objective does not train on reward gradients, and for
        "evaluate" if its images have no more pixels, in all frames, than those of training. True
        for all other phases.

        Args:
            phase: The name of the phase, one of `PHASES`.
        """
        if phase == "sync":
            return self.experiment.explorer.format.quantize is not None
        if phase == "targets":
            return self.experiment.config.algorithm.trains_on == "reward_gradients"
        if phase == "evaluate":  # else its programs take no more than those of the other phases
            return math.prod(evaluation_size(self.experiment.config)) > math.prod(
                self.experiment.size
            )
        return phase != "regenerate" or self.experiment.config.rollout.regenerate

    def codes(self) -> Any:
        """Returns the shapes of the quantized weights that the phase "sync" produces.

        Returns:
            A dict by parameter path, e.g. "blocks/attn/to_q/kernel", of quantized tensors with
            ShapeDtypeStructs for arrays, replicated on all devices (the compiled program may shard
            them, see `Planner.place`). Empty if exploration does not quantize.
        """
        if not self.has("sync"):
            return {}
        with jax.set_mesh(self.mesh):
            leaves = quantize_policy.eval_shape(*self._sync())
        return abstract(leaves, self.mesh, self.replicated)

    @property
    def continued(self) -> int:
        """The number of first steps that regeneration skips, because it starts from the latents
        that exploration reached after the same steps; 0 if it starts from noise.
        """
        rollout = self.experiment.config.rollout
        return continued_steps(
            rollout,
            self.experiment.explorer.format.name,
            rollout.explore.num_steps,
            self.experiment.query_steps,
        )

    def num_batches(self, groups: int) -> tuple[int, int]:
        """Returns how many batches of samples one iteration explores and regenerates.

        Args:
            groups: The number of devices, or groups of devices, that a batch is divided among. Each
                gets as many samples as a device generates at once: `rollout.per_device_batch_size`,
                or the iteration's candidates divided by `row_groups` of the mesh, rounded up, if
                that is less.

        Returns:
            A pair: the number of batches of all candidates, and that of the kept candidates, which
            is 0 if the run does not regenerate. Both are rounded up.
        """
        rollout = self.experiment.config.rollout
        prompts = self.experiment.config.train.num_prompts
        rows = self._sampler.samples_per_device * groups
        return -(-prompts * rollout.candidates // rows), -(
            -prompts * rollout.kept * rollout.regenerate // rows
        )

    def programs(self, phase: str, codes: Any) -> list[Program]:
        """Returns the programs of a phase, in the order in which they are called.

        Args:
            phase: The name of the phase, one of `PHASES`. The plan must include it (`has`).
            codes: The quantized weights that exploration samples with, as `codes` returns them. An
                empty dict if it does not quantize. Phases other than "explore" ignore it.

        Returns:
            One program for most phases. "score" has up to two (decoding, scoring) or none (see
            `_score`). "evaluate" has one that samples, followed by the programs of "score".
        """
        experiment = self.experiment
        rollout = self.experiment.config.rollout
        explore_calls, regenerate_calls = self.num_batches(row_groups(self.mesh))
        match phase:
            case "encode":
                return [self._encode()]
            case "sync":
                return [Program(self.mesh, quantize_policy, self._sync(), 1)]
            case "explore":
                segment = Segment(
                    self._policy(codes), experiment.schedule(rollout.explore.num_steps)
                )
                explorer = experiment.explorer
                segments = explorer.segments(segment, self._policy({}), explorer.format.name)
                return [
                    self._sample(
                        segments,
                        explore_calls,
                        not rollout.regenerate,
                        keep_intermediate=self.continued > 0,
                    )
                ]
            case "regenerate":
                schedule = experiment.schedule(rollout.num_steps).slice_steps(self.continued)
                return [
                    self._sample(
                        (Segment(self._policy({}), schedule),),
                        regenerate_calls,
                        True,
                    )
                ]
            case "score":
                return self._score(sum(self.num_batches(self.mesh.size)))
            case "targets":
                return [self._reward_gradient()]
            case "evaluate":  # not part of an iteration, so the number of calls is 0
                larger = copy.copy(self)
                larger.experiment = experiment.with_size(evaluation_size(experiment.config))
                segments = (
                    Segment(
                        self._policy({}),
                        larger.experiment.schedule(experiment.config.eval.num_steps, None),
                    ),
                )
                return [larger._sample(segments, 0, False), *larger._score(0)]
        return [self._update()]

    def _encodings(self, count: int) -> Any:
        """Returns the shapes of the embeddings of some prompts, replicated on all devices.

        Args:
            count: The number of prompts, which is the first axis of every array.

        Returns:
            The tree that the text encoders return, with ShapeDtypeStructs for arrays.
        """
        with jax.set_mesh(self.rows_mesh):
            out = encode_chunk.eval_shape(*self._encode().arguments)
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                (count, *x.shape[1:]), x.dtype, sharding=self.replicated
            ),
            out,
        )

    def _policy(self, codes: Any) -> Any:
        """Returns the parameters of the transformer that generates samples, as shapes.

        They are the frozen parameters with the trainable parameters of the old policy attached. The
        old policy is a slowly updated copy of the trained policy.

        Args:
            codes: Quantized weights by parameter path, each of which takes the place of the weight
                and its adapter. An empty dict gives the policy in the training precision.

        Returns:
            A tree of ShapeDtypeStructs with shardings.
        """

        def policy(base, adapters, codes):
            return attach(base, adapters, self.experiment.scale, codes)

        return shaped(policy, self.experiment.backbone.transformer, self.state.old, codes)

    def _encode(self) -> Program:
        """Returns the program that encodes one batch of prompts (`TextEncoders.prompts_per_chunk`).

        The number of calls is the number of batches of one iteration's prompts, plus one for the
        empty prompt. A prompt cache (`model.prompt_cache_dir`) does not reduce it.
        """
        backbone = self.experiment.backbone
        model = self.experiment.config.model
        mesh = self.rows_mesh
        encoders = backbone.text_encoders
        tokens = backbone.pipeline.tokenize(
            [""] * encoders.prompts_per_chunk, model.max_sequence_length, backbone.instruction
        )
        token_shapes = abstract(tokens, mesh, sharding.rows(mesh))
        calls = (
            -(-self.experiment.config.train.num_prompts // encoders.prompts_per_chunk) + 1
        )  # and the empty prompt
        return Program(mesh, encode_chunk, (encoders, self.encoders, token_shapes), calls)

    def _sync(self) -> tuple[Any, ...]:
        """Returns the arguments of `quantize_policy`, the program that quantizes the policy.

        It may only be called if exploration quantizes.

        Returns:
            The six arguments in order: the mesh, the frozen parameters, the trainable parameters of
            the old policy (the copy that generates samples), the LoRA scale alpha / rank, the paths
            of the weights to quantize, and the `Quantizer`. Arrays are ShapeDtypeStructs.
        """
        experiment = self.experiment
        explorer = self.experiment.explorer
        base = experiment.backbone.transformer
        assert explorer.format.quantize is not None
        flat = flatten(base)
        weights = {
            path: jax.ShapeDtypeStruct(flat[path].shape, flat[path].dtype)
            for path in explorer.quantized
        }
        quantizer = shaped_quantizer(explorer.explore, Quantizer(explorer.format.quantize), weights)
        quantizer = Quantizer(
            quantizer.quantize, abstract(quantizer.extra_arrays, self.mesh, self.replicated)
        )
        return self.mesh, base, self.state.old, experiment.scale, explorer.quantized, quantizer

    @property
    def _sampler(self) -> Sampler:
        """A sampler of the run. Only its batch size per device and the shape of its latents are
        used.
        """
        return self.experiment.explorer.calibration.sampler

    def _rows(self, mesh: Mesh, shape: tuple[int, ...], dtype: Any) -> Any:
        """Returns a ShapeDtypeStruct, with its sharding, for an array with one row per sample of a
        full batch.

        Args:
            mesh: The mesh whose axes `data` and `fsdp` the samples are split over. In a full batch,
                each part of this split has as many samples as a device generates at once.
            shape: The shape of one row; () for one number per sample.
            dtype: The dtype of the elements, e.g. `jnp.float32`.
        """
        rows = self._sampler.samples_per_device * row_groups(mesh)
        return jax.ShapeDtypeStruct((rows, *shape), dtype, sharding=sharding.rows(mesh))

    def _sample(
        self,
        segments: tuple[Segment, ...],
        calls: int,
        recorded: bool,
        keep_intermediate: bool = False,
    ) -> Program:
        """Returns the program that samples one batch.

        Args:
            segments: The policies that sample, one after another, each with its schedule of solver
                steps. Usually there is one.
            calls: The number of calls per iteration.
            recorded: Whether the program also returns the latents of the recorded steps, or of the
                drawn query step. No effect if the objective trains on neither.
            keep_intermediate: Whether the program also returns the latents after the first segment.
        """
        noise = self._rows(self.mesh, self._sampler.shape, jnp.float32)
        rows = shaped(
            SeedBatch,
            self._rows(self.mesh, (), jnp.int32),
            self._rows(self.mesh, (2,), jnp.uint32),
            noise,
        )
        segments = tuple(
            dataclasses.replace(
                segment, schedule=abstract(segment.schedule, self.mesh, self.replicated)
            )
            for segment in segments
        )
        config = self.experiment.config
        # Counted from the first step that is not taken over from exploration.
        query_steps = shift_steps(self.experiment.query_steps, -self.continued)
        arguments = (
            self.experiment.backbone,
            segments,
            self.conditions,
            rows,
            config.num_recorded_steps if recorded else 0,
            keep_intermediate,
            query_steps if recorded else None,
        )
        return Program(self.mesh, sample_chunk, arguments, calls)

    def _score(self, calls: int) -> list[Program]:
        """Returns the programs that decode and score one batch.

        There is no decoding program if the reward reads no images, and no scoring program if all
        rewards are outside JAX or groupwise. If there are only groupwise rewards of latents, the
        list is empty.

        Args:
            calls: The number of calls of each program per iteration.
        """
        experiment = self.experiment
        reward = self.experiment.reward
        mesh = self.rows_mesh
        latents = self._rows(mesh, self._sampler.shape, jnp.float32)
        shape = pixel_shape(experiment.size)
        first_frame = reward.reads_first_frame_alone and len(shape) == 4
        if first_frame:
            shape = (1, *shape[1:])
        images = self._rows(mesh, shape, jnp.float32)
        decoded = (experiment.backbone.decoder, latents, first_frame)
        decode = [Program(mesh, decode_chunk, decoded, calls)] * reward.needs_images
        if reward.score is None:
            return decode
        inputs = reward.select_inputs(images, latents)
        arguments = (reward, reward.params, inputs, self.prepared, self._rows(mesh, (), jnp.int32))
        return [*decode, Program(mesh, score_images, arguments, calls, other_arrays=latents)]

    def _reward_gradient(self) -> Program:
        """Returns the program that takes the gradient of the reward for one batch of kept samples.

        The number of calls is the number of batches times the number of gradients that the
        objective takes of each sample.
        """
        experiment = self.experiment
        config = experiment.config
        mesh = self.rows_mesh
        num_kept = config.train.num_prompts * config.rollout.kept
        rows = samples_per_call(config, num_kept, mesh.size)
        latents, index = (
            jax.ShapeDtypeStruct((rows, *shape), dtype, sharding=sharding.rows(mesh))
            for shape, dtype in ((self._sampler.shape, jnp.float32), ((), jnp.int32))
        )
        arguments = (
            experiment.reward,
            gradient_decoder(experiment.backbone.decoder),
            experiment.reward.params,
            latents,
            self.prepared,
            index,
        )
        _, gradients = try_targets(config.algorithm)
        return Program(mesh, reward_gradient, arguments, -(-num_kept // rows) * gradients)

    def _update(self) -> Program:
        """Returns the program of the update, which an iteration calls once, on all kept samples."""
        experiment = self.experiment
        config = self.experiment.config
        backbone = experiment.backbone
        schedule = experiment.schedule(config.rollout.num_steps)
        count = config.train.num_prompts * config.rollout.kept

        def per_sample(shape, dtype):
            return jax.ShapeDtypeStruct((count, *shape), dtype, sharding=self.replicated)

        numbers = (
            per_sample(self._sampler.shape, jnp.float32),
            per_sample((), jnp.float32),
            per_sample((), jnp.float32),
            per_sample((), jnp.int32),
        )
        recorded = config.num_recorded_steps
        states = per_sample((recorded + 1, *self._sampler.shape), jnp.float32) if recorded else None
        targets = None
        if self.has("targets"):
            names, _ = try_targets(config.algorithm)
            states = per_sample((2, *self._sampler.shape), jnp.float32)
            targets = {name: per_sample(self._sampler.shape, jnp.float32) for name in names}
        batch = shaped(
            PolicyBatch,
            *numbers,
            per_sample((2,), jnp.uint32),
            self.conditions.cond,
            states,
            targets,
        )
        arguments = (
            backbone,
            config,
            self.state,
            backbone.transformer,
            batch,
            abstract(schedule, self.mesh, self.replicated),
        )
        return Program(self.mesh, update, arguments, 1)
