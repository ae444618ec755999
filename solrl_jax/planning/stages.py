"""Lists the programs of an iteration, in its order: those that train, with shapes for arrays."""

import copy
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from solrl_jax.config.sizes import evaluation_size
from solrl_jax.models.text_encoders.encode import encode_chunk
from solrl_jax.parallel import sharding
from solrl_jax.parallel.sharding import row_groups
from solrl_jax.planning.abstract import abstract, shaped, text_encoders
from solrl_jax.rewards.protocol import score_images
from solrl_jax.rl.experiment import Experiment, state_shapes
from solrl_jax.rl.explore.options.registry import shaped_quantizer
from solrl_jax.rl.explore.sync import Quantizer, quantize_policy
from solrl_jax.rl.generate import Conditions, SeedBatch, decode_chunk, sample_chunk
from solrl_jax.rl.sampler import Sampler, Segment
from solrl_jax.rl.trainable.trainable import attach, flatten
from solrl_jax.rl.update import PolicyBatch, update

STAGES = ("encode", "sync", "explore", "regenerate", "score", "update", "evaluate")


@dataclasses.dataclass(frozen=True)
class Program:
    """A jitted function and its arguments.

    Attributes:
        mesh: The mesh that the program runs on. Set it with `jax.set_mesh` while the function is
            lowered.
        function: The jitted function, such as `sample_chunk`, which training calls with arrays.
        arguments: Its arguments, with placed shapes in place of arrays.
        calls: The number of calls per iteration. 0 for an evaluation, which is no part of it.
        meanwhile: A tree of other arrays, as placed shapes, that stay in memory during a call.
    """

    mesh: Mesh
    function: Any
    arguments: tuple[Any, ...]
    calls: int
    meanwhile: Any = ()

    @property
    def name(self) -> str:
        """The name of the function, e.g. "sample_chunk"."""
        return self.function.__name__


class Stages:
    """The programs of an experiment of shapes, on the mesh of the experiment.

    Attributes:
        experiment: The experiment, with a ShapeDtypeStruct in place of every array.
        mesh: The mesh of the transformer and of training.
        rows_mesh: The same devices with samples split over all of them, for encoding and scoring.
        state: The shapes of the training state (`rl.state.TrainState`): the trainable parameters
            (adapters, or whole arrays with full training) as they are trained, of the old policy
            that samples, and averaged; and the optimizer's state.
        encoders: The parameters of the text encoders as shapes, by their folder in the pipeline,
            e.g. "text_encoder".
        whole: The sharding of arrays that every device of `mesh` holds completely.
        prepared: What the reward prepares from the prompts of an iteration, as shapes.
        conditions: The embeddings of the prompts of an iteration and of the empty prompt, as
            shapes.
    """

    def __init__(self, experiment: Experiment):
        """Computes the shapes that several programs share. Nothing is compiled.

        Args:
            experiment: The experiment with a ShapeDtypeStruct in place of every array, as
                `abstract.experiment` builds it.
        """
        self.experiment = experiment
        self.mesh = experiment.backbone.mesh
        self.rows_mesh = sharding.rows_only(self.mesh)
        self.state = state_shapes(experiment)
        self.encoders = text_encoders(experiment.backbone)
        self.whole = sharding.replicated(self.mesh)
        everywhere = sharding.replicated(self.rows_mesh)
        self.prepared = abstract(
            experiment.reward.prepare(experiment.train_prompts), self.rows_mesh, everywhere
        )
        self.conditions = shaped(
            Conditions, self._encodings(experiment.config.train.num_prompts), self._encodings(1)
        )

    def has(self, stage: str) -> bool:
        """Returns whether a run has programs of a stage that no other stage has.

        "sync" needs an exploration format that quantizes, "regenerate" needs `rollout.regenerate`,
        and "evaluate" needs evaluation images with more pixels than those of training, since its
        programs are otherwise no larger than those of other stages. All other stages are always
        there.

        Args:
            stage: A name of `STAGES`.
        """
        if stage == "sync":
            return self.experiment.explorer.format.quantize is not None
        if stage == "evaluate":  # else its programs take no more than those of the other stages
            return math.prod(evaluation_size(self.experiment.config)) > math.prod(
                self.experiment.size
            )
        return stage != "regenerate" or self.experiment.config.rollout.regenerate

    def codes(self) -> Any:
        """Returns the result of `sync` as shapes: a dict of the quantized leaves by parameter path,
        e.g. "blocks/attn/to_q/kernel", replicated on every device. An empty dict if the exploration
        format quantizes nothing.
        """
        if not self.has("sync"):
            return {}
        with jax.set_mesh(self.mesh):
            leaves = quantize_policy.eval_shape(*self._sync())
        return abstract(leaves, self.mesh, self.whole)

    def chunks(self, groups: int) -> tuple[int, int]:
        """Returns the numbers of batches that an iteration explores and regenerates.

        Args:
            groups: The number of groups of devices that samples are divided among, at least 1. A
                batch has as many samples as the groups together generate at once: `groups` times
                `chunk` of the sampler (at most `rollout.per_device_batch_size`).

        Returns:
            The number for the candidates of all prompts, and that for the kept ones, which is 0
            without regeneration. A last batch that is not full counts as one.
        """
        rollout = self.experiment.config.rollout
        prompts = self.experiment.config.train.num_prompts
        rows = self._sampler.chunk * groups
        return -(-prompts * rollout.candidates // rows), -(
            -prompts * rollout.kept * rollout.regenerate // rows
        )

    def programs(self, stage: str, codes: Any) -> list[Program]:
        """Returns the programs of a stage.

        "score" has two programs (decoding and scoring), of which a run may lack either, and
        "evaluate" has those of sampling and scoring at the size of the evaluation. Check with `has`
        whether the run has the stage.

        Args:
            stage: A name of `STAGES`: "encode", "sync", "explore", "regenerate", "score", "update"
                or "evaluate". Any other name means "update".
            codes: The quantized copy, as placed shapes, or an empty dict. Only "explore" reads it.

        Returns:
            The programs in the order in which they are called, one except for "score" and
            "evaluate". Those of "evaluate" have 0 calls, because they are no part of an iteration.
        """
        experiment = self.experiment
        rollout = self.experiment.config.rollout
        explore_calls, regenerate_calls = self.chunks(row_groups(self.mesh))
        match stage:
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
                        0 if rollout.regenerate else experiment.config.num_recorded_steps,
                    )
                ]
            case "regenerate":
                return [
                    self._sample(
                        (Segment(self._policy({}), experiment.schedule(rollout.num_steps)),),
                        regenerate_calls,
                        experiment.config.num_recorded_steps,
                    )
                ]
            case "score":
                return self._score(sum(self.chunks(self.mesh.size)))
            case "evaluate":  # no part of an iteration: called no time in it
                larger = copy.copy(self)
                larger.experiment = experiment.with_size(evaluation_size(experiment.config))
                segments = (
                    Segment(
                        self._policy({}),
                        larger.experiment.schedule(experiment.config.eval.num_steps, None),
                    ),
                )
                return [larger._sample(segments, 0, 0), *larger._score(0)]
        return [self._update()]

    def _encodings(self, count: int) -> Any:
        """Returns the conditioning of some prompts, replicated, as shapes.

        Args:
            count: The number of prompts, the leading axis of every array.

        Returns:
            The tree of embeddings that the text encoders give, with `count` as the leading axis of
            each array.
        """
        with jax.set_mesh(self.rows_mesh):
            out = encode_chunk.eval_shape(*self._encode().arguments)
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype, sharding=self.whole), out
        )

    def _policy(self, codes: Any) -> Any:
        """Returns the parameters of the old policy, which samples, as placed shapes.

        They are the parameters of the base with the trainable parameters attached: an adapter lies
        beside its base weight, and a fully trained array takes the place of the base's.

        Args:
            codes: The quantized layers by parameter path. A layer that is among them takes the
                place of its base weight and of its trainable parameters. An empty dict gives the
                policy in the training precision.
        """

        def policy(base, adapters, codes):
            return attach(base, adapters, self.experiment.scale, codes)

        return shaped(policy, self.experiment.backbone.transformer, self.state.old, codes)

    def _encode(self) -> Program:
        """Returns the program that encodes a batch of prompts. Its number of calls is that for the
        prompts of one iteration, and one more for the empty prompt.
        """
        backbone = self.experiment.backbone
        model = self.experiment.config.model
        mesh = self.rows_mesh
        encoders = backbone.text_encoders
        tokens = backbone.pipeline.tokenize(
            [""] * encoders.chunk, model.max_sequence_length, backbone.instruction
        )
        token_shapes = abstract(tokens, mesh, sharding.rows(mesh))
        calls = (
            -(-self.experiment.config.train.num_prompts // encoders.chunk) + 1
        )  # and the empty prompt
        return Program(mesh, encode_chunk, (encoders, self.encoders, token_shapes), calls)

    def _sync(self) -> tuple[Any, ...]:
        """Returns the arguments of `quantize_policy`, the program that merges and quantizes the
        policy.

        The exploration format must quantize.

        Returns:
            The mesh; the base and the trainable parameters of the old policy as placed shapes; the
            LoRA scale alpha / rank; the paths of the layers that are quantized; and the `Quantizer`
            with shapes for its arrays. These are the six parameters of `quantize_policy` in order.
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
            quantizer.quantize, abstract(quantizer.extra_arrays, self.mesh, self.whole)
        )
        return self.mesh, base, self.state.old, experiment.scale, explorer.quantized, quantizer

    @property
    def _sampler(self) -> Sampler:
        """The sampler of regeneration, of which only the batch size per device and the latent shape
        are used.
        """
        return self.experiment.explorer.calibration.sampler

    def _rows(self, mesh: Mesh, shape: tuple[int, ...], dtype: Any) -> Any:
        """Returns the shape of an array with one row per sample of a batch on all devices.

        Args:
            mesh: The mesh over which samples are sharded. A batch has the sampler's chunk size
                times its `row_groups` rows.
            shape: The shape of one row, () for one number per sample.
            dtype: The dtype of the elements, e.g. `jnp.float32`.
        """
        rows = self._sampler.chunk * row_groups(mesh)
        return jax.ShapeDtypeStruct((rows, *shape), dtype, sharding=sharding.rows(mesh))

    def _sample(self, segments: tuple[Segment, ...], calls: int, recorded: int) -> Program:
        """Returns the program that samples one batch.

        Args:
            segments: The parts of a sampling run in their order: each a policy, as placed shapes,
                with the schedule of the steps that it takes.
            calls: The number of calls per iteration.
            recorded: The number of stochastic steps whose states the program returns for training;
                0 returns none.
        """
        noise = self._rows(self.mesh, self._sampler.shape, jnp.float32)
        rows = shaped(
            SeedBatch,
            self._rows(self.mesh, (), jnp.int32),
            self._rows(self.mesh, (2,), jnp.uint32),
            noise,
        )
        segments = tuple(
            dataclasses.replace(segment, schedule=abstract(segment.schedule, self.mesh, self.whole))
            for segment in segments
        )
        arguments = (self.experiment.backbone, segments, self.conditions, rows, recorded)
        return Program(self.mesh, sample_chunk, arguments, calls)

    def _score(self, calls: int) -> list[Program]:
        """Returns the programs that decode and score one batch.

        A reward that reads no images needs no decoding, and a reward outside of JAX has no program
        for scoring. The list may be empty.

        Args:
            calls: The number of calls of each program per iteration.
        """
        experiment = self.experiment
        reward = self.experiment.reward
        mesh = self.rows_mesh
        latents = self._rows(mesh, self._sampler.shape, jnp.float32)
        images = self._rows(mesh, (*experiment.size, 3), jnp.float32)
        decode = [
            Program(mesh, decode_chunk, (experiment.backbone.decoder, latents), calls)
        ] * reward.needs_images
        if reward.score is None:
            return decode
        inputs = reward.select_inputs(images, latents)
        arguments = (reward, reward.params, inputs, self.prepared, self._rows(mesh, (), jnp.int32))
        return [*decode, Program(mesh, score_images, arguments, calls, meanwhile=latents)]

    def _update(self) -> Program:
        """Returns the program of the update on the kept samples of an iteration, which is called
        once.
        """
        experiment = self.experiment
        config = self.experiment.config
        backbone = experiment.backbone
        grid = experiment.schedule(config.rollout.num_steps)
        count = config.train.num_prompts * config.rollout.kept

        def of(shape, dtype):
            return jax.ShapeDtypeStruct((count, *shape), dtype, sharding=self.whole)

        numbers = (
            of(self._sampler.shape, jnp.float32),
            of((), jnp.float32),
            of((), jnp.float32),
            of((), jnp.int32),
        )
        recorded = config.num_recorded_steps
        states = of((recorded + 1, *self._sampler.shape), jnp.float32) if recorded else None
        batch = shaped(
            PolicyBatch, *numbers, of((2,), jnp.uint32), self.conditions.positive, states
        )
        arguments = (
            backbone,
            config,
            self.state,
            backbone.transformer,
            batch,
            abstract(grid, self.mesh, self.whole),
        )
        return Program(self.mesh, update, arguments, 1)
