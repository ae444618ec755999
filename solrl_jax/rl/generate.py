"""Generates samples from their seeds and scores them, for exploration, regeneration and evaluation.

Samples are generated in chunks that have the same number of samples on every device; a short chunk
is padded. Each phase therefore compiles one program, a sample goes through the same instructions
whatever else is in its batch and however many devices there are, and the memory is known in
advance.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from solrl_jax.data.prompts import Prompt
from solrl_jax.diffusion.sampler import trajectory
from solrl_jax.diffusion.seeds import normal
from solrl_jax.models.backbone import Backbone
from solrl_jax.models.decoder import Decoder
from solrl_jax.models.pipeline import Conditioning
from solrl_jax.parallel import hosts, sharding
from solrl_jax.rewards.division import SampleScoring, sample_scoring
from solrl_jax.rewards.group_scoring import GroupScoring
from solrl_jax.rewards.mixture import add_total
from solrl_jax.rewards.protocol import Reward, score_images
from solrl_jax.rl.sampler import Sampler, Segment

# The clean latents of some samples; their recorded states, if there are any; and their latents
# after the first segment, if they are kept.
SampledChunk = tuple[
    Float[Array, "b ... c"],
    Float[Array, "b states ... c"] | None,
    Float[Array, "b ... c"] | None,
]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Conditions:
    """The prompt embeddings that a batch of samples is generated with.

    Attributes:
        cond: The embeddings of the prompts: arrays by the names that the pipeline's network
            takes, each with one row per prompt, on every device of the mesh.
        uncond: The embedding of the negative prompt of classifier-free guidance (never None, also
            without guidance): arrays by the names in `cond`, with one row each, on every device.
    """

    cond: Conditioning
    uncond: Conditioning


@dataclasses.dataclass(frozen=True)
class PromptBatch:
    """Prompts, encoded for sampling and prepared for scoring.

    Attributes:
        prompts: The p prompts, with their metadata.
        conditions: The network's inputs: the embeddings of the prompts, with one row per prompt in
            their order, and the embedding of the negative prompt, with a single row (also without
            guidance). They are on every device.
        prepared: The reward's inputs, such as token ids for its own text tower: the result of
            `Reward.prepare`, a tree of arrays with one row per prompt in their order. None without
            a reward.
    """

    prompts: tuple[Prompt, ...]
    conditions: Conditions
    prepared: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SeedBatch:
    """The samples to generate: one prompt and one seed per row.

    Attributes:
        prompt: For each sample, the index of its prompt in the `PromptBatch`.
        seeds: The seed of each sample, the two words of a threefry key of JAX. The noise of
            stochastic steps, the query step (`Sampler.query_steps`) and, without `noise`, the
            initial noise are drawn from it.
        noise: The latents that sampling starts from, float32. None: they are drawn from the seeds
            when samples are generated.
    """

    prompt: Int[Array | np.ndarray, " b"]
    seeds: UInt32[Array | np.ndarray, "b 2"]
    noise: Float[Array | np.ndarray, "b ... c"] | None = None

    @classmethod
    def from_seeds(cls, seeds: UInt32[np.ndarray, "p n 2"]) -> "SeedBatch":
        """Makes a batch of one row per seed, prompt by prompt, whose noise is drawn from the seeds.

        Args:
            seeds: The seeds of the n candidates of each of the p prompts.

        Returns:
            A batch of p * n samples: first all candidates of the first prompt.
        """
        prompts, candidates, _ = seeds.shape
        return cls(np.repeat(np.arange(prompts), candidates), seeds.reshape(-1, 2))

    def __len__(self) -> int:
        """Returns the number of samples."""
        return len(self.prompt)


@dataclasses.dataclass(frozen=True)
class Samples:
    """Generated samples and their scores, on the host, in the order of their `SeedBatch`.

    Attributes:
        latents: The clean latents that the samples end at, float32.
        scores: The scores by name ("NAME" of a reward, "NAME/OTHER" of its further scores), one
            number per sample. The weighted sum, with the weights of the reward that scored them,
            has the name "reward". Samples that could not be scored have NaN. Empty if nothing was
            scored.
        images: The images [b, H, W, 3] or clips [b, T, H, W, 3] in [0, 1], float32; all NaN for
            samples with non-finite latents. None unless they were asked for.
        states: The intermediate latents for objectives that train on solver steps, float32: those
            before the first recorded step and after each recorded step (`Sampler.recorded`); or
            those before the query step and the clean latents that were predicted there
            (`Sampler.query_steps`). None if no step was recorded.
        intermediate: The latents after the first segment of the sampler, float32. None unless the
            sampler keeps them (`Sampler.keep_intermediate`).
        targets: The latents that the objective has made from the gradient of the reward, by name,
            float32. None from `generate`; `add_targets` adds them if the objective trains on reward
            gradients.
        failed: The number of images that each reward outside JAX could not score, by the name of
            the reward; 0 if none failed. For rewards that score frames of clips, frames are
            counted. Empty without rewards outside JAX.
        usage: The costs of rewards outside JAX, by "REWARD/COUNTER": the sum of each counter that a
            reward reports, such as requests or tokens. Rewards that report a counter also have
            "REWARD/seconds_waited", the seconds that all hosts together waited for the reward.
            Empty if no reward reports a counter.
    """

    latents: Float[np.ndarray, "b ... c"]
    scores: dict[str, np.ndarray]
    images: Float[np.ndarray, "b ... 3"] | None = None
    states: Float[np.ndarray, "b states ... c"] | None = None
    intermediate: Float[np.ndarray, "b ... c"] | None = None
    targets: dict[str, Float[np.ndarray, "b ... c"]] | None = None
    failed: dict[str, int] = dataclasses.field(default_factory=dict)
    usage: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def reward(self) -> Float[np.ndarray, " b"]:
        """The weighted sum of the scores, with the weights of the reward that scored the samples.
        Raises KeyError if `scores` has no "reward", for example because nothing was scored.
        """
        return self.scores["reward"]

    def take(self, indices: Int[np.ndarray, "..."]) -> "Samples":
        """Returns a selection of the samples, without their images, intermediate latents, targets,
        failure counts and costs.

        Args:
            indices: Indices of samples in an array of any shape, which is flattened. An index may
                be repeated, and negative ones count from the end.

        Returns:
            Copies of the latents, scores and recorded states, in the order of the indices.

        Raises:
            IndexError: If an index is out of range.
        """
        indices = indices.reshape(-1)
        states = None if self.states is None else self.states[indices]
        return Samples(
            self.latents[indices],
            {name: scores[indices] for name, scores in self.scores.items()},
            states=states,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Chunk:
    """One chunk of samples: arrays on the devices, or NumPy arrays once it has been fetched.

    Attributes:
        latents: The clean latents, float32. The last rows of this and of the other arrays may be
            padding.
        states: The recorded states, as `Samples.states`. None if no step is recorded.
        intermediate: The latents after the first segment. None if they are not kept.
        images: The images or clips. None if they were not decoded, or if they are not kept and no
            reward will read them.
        host_inputs: The inputs of the rewards outside JAX (`SampleScoring.select`). None if there
            are no such rewards, or once the inputs have been passed on to them.
        scores: The scores that are computed one chunk at a time inside JAX, by name.
    """

    latents: Float[Any, "b ... c"]
    states: Float[Any, "b states ... c"] | None
    intermediate: Float[Any, "b ... c"] | None
    images: Float[Any, "b ... 3"] | None
    host_inputs: list[Float[Array, "_ ... 3"]] | None
    scores: dict[str, Float[Any, " b"]]


def prepare(
    backbone: Backbone,
    reward: Reward | None,
    prompts: Sequence[Prompt],
    max_tokens: int,
    negative: str = "",
) -> PromptBatch:
    """Encodes prompts once, for any number of samples of each.

    Embeddings come from the backbone's cache of prompts on disk if that has them. Otherwise this
    loads the text encoders, leaves them loaded, and writes to the cache if there is one. With a
    cache, the first call may also read the weight files of the text encoders, to hash them. Every
    process of a run must call it with the same arguments.

    Args:
        backbone: The model, with its tokenizers, text encoders and cache of prompts.
        reward: The reward that will score images of these prompts. None: they will not be scored.
        prompts: The prompts, at least one. They are encoded with the backbone's instruction, if it
            has one.
        max_tokens: The number of tokens that prompts are padded or truncated to.
        negative: The negative prompt of classifier-free guidance. It is always encoded, even
            without guidance, and never with the instruction. The default is the empty prompt.

    Returns:
        The prompts; their embeddings and that of the negative prompt, on every device; and the
        arrays that the reward made from the prompts, as `Reward.prepare` returned them (None
        without a reward).

    Raises:
        InputError: If the tokenizer fails or cannot make `max_tokens` tokens, if a file of a text
            encoder is missing or has other tensors than the network needs, or if the folder of the
            cache cannot be written. Errors of the reward's `prepare` pass through.
        FileNotFoundError: If the directory of a tokenizer is missing.
        PermissionError: If a folder of the cache may not be searched.
        RunError: If the disk refuses an entry of the cache, or another process of the run gives no
            answer.
    """
    prepared = None if reward is None else reward.prepare(prompts)
    cond = backbone.encode(prompts, max_tokens)
    uncond = backbone.encode((negative,), max_tokens, negative=True)
    return PromptBatch(tuple(prompts), Conditions(cond, uncond), prepared)


def generate(
    backbone: Backbone,
    sampler: Sampler,
    prompt_batch: PromptBatch,
    seed_batch: SeedBatch,
    reward: Reward | None = None,
    *,
    keep_images: bool = False,
    for_display: bool = False,
    progress: Callable[[int], None] = lambda count: None,
) -> Samples:
    """Generates one sample per row of `seed_batch` and scores it against its prompt.

    The samples are generated in chunks of `sampler.samples_per_device` samples per device; a
    shorter last one is padded here, and the padding is dropped from the result. A chunk is scored,
    and copied to the host, while the devices compute the next one. Every process of a run must call
    it with the same arguments, and each gets all samples.

    Args:
        backbone: The networks, and the mesh that they are on.
        sampler: How to sample: the policy, the schedule, the decoder, the chunk size and the number
            of recorded steps.
        prompt_batch: The prompts that `seed_batch.prompt` points to. They must have been prepared
            for `reward`.
        seed_batch: The samples to generate, at least one, as arrays on the host. With rewards that
            compare the candidates of a prompt, all rows of one prompt must follow each other.
        reward: Scores the images or the latents, inside JAX, in worker processes or both. None:
            nothing is scored, and images are decoded only with `keep_images`.
        keep_images: Whether the result has the images too; otherwise its `images` are None.
        for_display: Whether the images are only shown to the user, so that costly scores can be
            left out. If True, the only rewards outside JAX that are called are those that mark an
            image as right or wrong (`HostRewards.select_strict`), and rewards that compare
            candidates inside JAX are skipped. "reward" is then the weighted sum of the remaining
            scores inside JAX; it is missing if none of these has a weight.
        progress: Called once per chunk, after the chunk has been queued on the devices, with its
            number of samples, not counting padding. An exception that it raises passes through. The
            default does nothing.

    Returns:
        The samples, in the order of `seed_batch`: latents, scores by name (empty without a reward),
        images if `keep_images` is set, recorded states and latents after the first segment if the
        sampler asks for them, and the failures and costs of rewards outside JAX.

    Raises:
        RewardError: If a reward outside JAX fails and `reward.on_failure` is "stop". With "skip",
            the scores of these samples are NaN, one line for each such reward goes to standard
            error at the end, and the error is raised only after 32 failed calls of a reward in a
            row. It is a RunError.
        RunError: If there are rewards outside JAX and another process gives no answer.
        InputError: If the code of a reward inside JAX raises or returns no scores.
        ValueError: While tracing, if the network does not support the size of the latents, or has
            no FP8 attention and a segment asks for it.
        IndexError: If `seed_batch` is empty.
    """
    scoring_mesh = sharding.row_mesh(backbone.mesh)
    # A chunk is sampled on the mesh and scored on `scoring_mesh`, where the devices of the axes
    # `sequence` and `tensor` hold samples as well. Several sampled chunks can therefore make one
    # scored chunk.
    samples_per_chunk = sampler.samples_per_device * scoring_mesh.size
    segments = _place_schedules(sampler.segments, backbone.mesh)
    prepared = hosts.put(prompt_batch.prepared, sharding.replicated(scoring_mesh))
    host = None if reward is None else reward.host
    group = None if reward is None else reward.group
    if for_display:
        host = None if host is None else host.select_strict()
        group = None
    chunks: list[_Chunk] = []
    with contextlib.ExitStack() as stack:
        scoring = None
        if reward is not None and host is not None:
            prompts = [prompt_batch.prompts[i] for i in seed_batch.prompt]
            frames = min(sampler.frames, reward.frames)
            placement = sharding.rows(scoring_mesh)
            scoring = stack.enter_context(
                sample_scoring(host, prompts, samples_per_chunk, frames, placement)
            )
        groups = None
        if group is not None:
            groups = GroupScoring(group, prepared, seed_batch.prompt.tolist(), scoring_mesh)
        for start in range(0, len(seed_batch), samples_per_chunk):
            stop = min(start + samples_per_chunk, len(seed_batch))
            parts = _sample_parts(
                backbone, sampler, segments, prompt_batch.conditions, seed_batch, start, stop
            )
            index = place_samples(seed_batch.prompt[start:stop], samples_per_chunk, scoring_mesh)
            with jax.set_mesh(scoring_mesh):
                sampled = _join_parts(parts, scoring_mesh)
                chunks.append(
                    _score_chunk(
                        sampled, sampler.decoder, reward, prepared, index, scoring, keep_images
                    )
                )
            # The previous chunk is fetched only now, so that one chunk runs ahead on the devices.
            # More are not queued, because queued chunks hold memory.
            if len(chunks) > 1:
                chunks[-2] = _fetch_chunk(chunks[-2], scoring, groups, keep_images)
            progress(stop - start)
        chunks[-1] = _fetch_chunk(chunks[-1], scoring, groups, keep_images)
        scores, failed, usage = ({}, {}, {}) if scoring is None else scoring.finish()
    all_samples = _join_chunks(chunks, len(seed_batch))
    scores |= all_samples.scores
    if groups is not None:
        group_scores = groups.finish()
        total = group_scores.pop("reward", None)
        if total is not None:
            group_scores["reward"] = total + scores.get("reward", np.float32(0))
        scores |= group_scores
    return Samples(
        latents=all_samples.latents,
        scores=scores if host is None else add_total(host.weights, scores),
        images=all_samples.images,
        states=all_samples.states,
        intermediate=all_samples.intermediate,
        failed=failed,
        usage=usage,
    )


def _place_schedules(segments: tuple[Segment, ...], mesh: jax.sharding.Mesh) -> tuple[Segment, ...]:
    """Copies the arrays of schedules to every device. Every process must call it.

    Args:
        segments: The segments whose schedules are copied.
        mesh: The mesh of the devices.

    Returns:
        The segments in their order, with schedules whose arrays are on every device of the mesh.
        Their policies are the same objects.
    """
    return tuple(
        dataclasses.replace(
            segment, schedule=hosts.put(segment.schedule, sharding.replicated(mesh))
        )
        for segment in segments
    )


def place_samples(x: Array | np.ndarray, count: int, mesh: jax.sharding.Mesh) -> Array:
    """Pads an array to a number of samples and shards the samples over a mesh. Every process must
    call it.

    Args:
        x: An array with one row per sample, 1 to `count` rows, equal in every process.
        count: The number of samples of the result, a multiple of the devices along `data` and
            `fsdp`.
        mesh: The mesh of the devices.

    Returns:
        An array of `count` rows on the mesh, divided over its axes `data` and `fsdp`. Missing rows
        are copies of the first one.
    """
    return hosts.put(sharding.pad_rows(np.asarray(x), count), sharding.rows(mesh))


def _sample_parts(
    backbone: Backbone,
    sampler: Sampler,
    segments: tuple[Segment, ...],
    conditions: Conditions,
    seed_batch: SeedBatch,
    start: int,
    stop: int,
) -> list[SampledChunk]:
    """Generates the samples `start` to `stop` of `seed_batch`, in parts that fit the devices.

    A part is the batch that the mesh samples at once: `sampler.samples_per_device` samples per
    device. Devices along the mesh axes `sequence` and `tensor` work on the same samples and count
    as one. For scoring, each of these devices has samples of its own, so n parts are scored
    together as one chunk, where n is the product of the sizes of the axes `sequence` and `tensor`.
    Every process must call it.

    Args:
        backbone: The networks, and the mesh that they sample on.
        sampler: Gives the shape of one latent, the number of samples per device, which steps are
            recorded (`recorded` and `query_steps`), and whether the latents after the first segment
            are returned. Its segments are not used.
        segments: The segments of `sampler`, with their schedules placed on the mesh.
        conditions: The embeddings of the prompts that `seed_batch.prompt` points to, and of the
            negative prompt.
        seed_batch: The samples to generate. Its noise is used if it has one.
        start: The index of the first sample in `seed_batch`.
        stop: The index after the last sample, above `start`. The samples must fit into n parts.

    Returns:
        A list of n tuples, one per part, with float32 arrays on the mesh: the clean latents; the
        recorded states, as `Samples.states` (None if nothing is recorded); and the latents after
        the first segment (None if they are not kept). A part with too few samples is filled up with
        copies of its first sample. In place of a part without samples, the first part is returned
        again.
    """
    mesh = backbone.mesh
    samples_per_part = sampler.samples_per_device * sharding.row_groups(mesh)
    parts = []
    for first in range(start, stop, samples_per_part):
        part = slice(first, min(first + samples_per_part, stop))
        prompt = place_samples(seed_batch.prompt[part], samples_per_part, mesh)
        seeds = place_samples(seed_batch.seeds[part], samples_per_part, mesh)
        with jax.set_mesh(mesh):
            if seed_batch.noise is None:
                noise = draw_noise(seeds, sampler.shape)
            else:
                noise = place_samples(seed_batch.noise[part], samples_per_part, mesh)
            batch = SeedBatch(prompt, seeds, noise)
            parts.append(
                sample_chunk(
                    backbone,
                    segments,
                    conditions,
                    batch,
                    sampler.recorded,
                    sampler.keep_intermediate,
                    sampler.query_steps,
                )
            )
    parts_per_chunk = sampler.samples_per_device * sharding.row_mesh(mesh).size // samples_per_part
    return parts + parts[:1] * (parts_per_chunk - len(parts))


def _join_parts(parts: list[Any], scoring_mesh: jax.sharding.Mesh) -> Any:
    """Concatenates arrays along their first axis, the samples, and shards it over all devices of a
    mesh.

    Args:
        parts: Trees of equal structure, each with the arrays of some samples; at least one. The
            number of all samples together is a multiple of the number of devices.
        scoring_mesh: The mesh that the samples are scored on, whose axes `sequence` and `tensor`
            have size 1.

    Returns:
        One such tree, with the samples of all parts in order.
    """
    if len(parts) == 1:
        samples = parts[0]
    else:
        samples = jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *parts)
    return jax.device_put(samples, sharding.rows(scoring_mesh))


def _score_chunk(
    sampled: SampledChunk,
    decoder: Decoder,
    reward: Reward | None,
    prepared: Any,
    index: Int[Array, " b"],
    scoring: SampleScoring | None,
    keep_images: bool,
) -> _Chunk:
    """Decodes a chunk of latents and scores it inside JAX, on the ambient mesh. Does not wait for
    the devices.

    Args:
        sampled: The latents, the recorded states and the intermediate latents of the chunk.
        decoder: Decodes the latents, if images are kept or the reward needs them.
        reward: The reward. Its parts outside JAX (`host`) and those that compare the candidates of
            a prompt (`group`) are not scored here. None: nothing is scored.
        prepared: The result of `reward.prepare`, on every device.
        index: The row of `prepared` of each sample.
        scoring: Selects the inputs of rewards outside JAX. None: there are none.
        keep_images: Whether images are decoded even if the reward does not need them, and clips
            with all frames even if the reward reads only the first one.

    Returns:
        The arrays of the chunk on the devices. To save memory, it has its images only if they are
        kept or if there are rewards inside JAX that compare candidates.

    Raises:
        InputError: If the code of a reward inside JAX raises or returns no scores.
    """
    latents, states, intermediate = sampled
    images = None
    if keep_images or (reward is not None and reward.needs_images):
        first_frame = not keep_images and reward is not None and reward.reads_first_frame_alone
        # One program decodes images, whether they are kept or not.
        images = decode_chunk(decoder, latents, first_frame and latents.ndim == 5)
    host_inputs = None
    if scoring is not None:
        assert images is not None  # rewards outside JAX need images
        host_inputs = scoring.select(images)
    scores: dict[str, Array] = {}
    if reward is not None and reward.score is not None:
        inputs = reward.select_inputs(images, latents)
        scores = score_images(reward, reward.params, inputs, prepared, index)
    if not keep_images and (reward is None or reward.group is None):
        images = None
    return _Chunk(latents, states, intermediate, images, host_inputs, scores)


def _fetch_chunk(
    chunk: _Chunk,
    scoring: SampleScoring | None,
    groups: GroupScoring | None,
    keep_images: bool,
) -> _Chunk:
    """Copies the arrays of a chunk to the host. Also passes its images on to the rewards outside
    JAX, and its images and latents to rewards inside JAX that compare the candidates of a prompt.

    Waits until the devices have computed the chunk. Every process of a run must call it.

    Args:
        chunk: The chunk on the devices.
        scoring: Collects samples for the rewards outside JAX; the chunk must then have
            `host_inputs`. None: there are none.
        groups: Collects samples for rewards inside JAX that compare candidates. None: there are
            none.
        keep_images: Whether the result has the images of the chunk. Otherwise they are dropped.

    Returns:
        The chunk with NumPy arrays and without `host_inputs`. Rows of padding are included.

    Raises:
        RewardError: If an earlier call of a reward outside JAX has failed and `reward.on_failure`
            is "stop", or was the 32nd in a row. With several processes, `scoring.finish` raises it
            instead.
        InputError: If the code of a reward that compares candidates inside JAX raises or returns no
            scores.
    """
    if scoring is not None:
        assert chunk.host_inputs is not None
        scoring.add(chunk.host_inputs)
    host_chunk = hosts.fetch(dataclasses.replace(chunk, host_inputs=None))
    if groups is not None:
        groups.add(host_chunk.images, host_chunk.latents)
    return host_chunk if keep_images else dataclasses.replace(host_chunk, images=None)


def _join_chunks(chunks: list[_Chunk], count: int) -> _Chunk:
    """Concatenates chunks on the host and drops the padding.

    Args:
        chunks: The chunks, at least one, with NumPy arrays.
        count: The number of samples. Rows beyond it are padding of the last chunk.

    Returns:
        One chunk of `count` samples.
    """
    return jax.tree.map(lambda *arrays: np.concatenate(arrays)[:count], *chunks)


@partial(sharding.jit, static_argnums=1)
def draw_noise(seeds: UInt32[Array, "b 2"], shape: tuple[int, ...]) -> Float[Array, "b ..."]:
    """Draws the initial noise of each seed, divided over `data` and `fsdp` of the ambient mesh.

    Args:
        seeds: The seeds, the two words of a key per row. Their number is a multiple of the number
            of devices along `data` and `fsdp`.
        shape: The shape of one latent, (height, width, channels) or (frames, height, width,
            channels); static.

    Returns:
        Standard normal numbers [b, *shape], float32. Each row is drawn from the stream "initial" of
        its own seed and depends on nothing else.
    """
    return sharding.split_rows(normal(seeds, "initial", shape))


@partial(sharding.jit, static_argnums=(0, 4, 5, 6))
def sample_chunk(
    backbone: Backbone,
    segments: tuple[Segment, ...],
    conditions: Conditions,
    seed_batch: SeedBatch,
    recorded_steps: int = 0,
    keep_intermediate: bool = False,
    query_steps: range | None = None,
) -> SampledChunk:
    """Samples one chunk of latents from noise, on the ambient mesh (`jax.set_mesh`).

    With a guided schedule (a classifier-free scale above 1), every step evaluates the network for
    the negative prompt and for the prompt, and the pipeline combines both (`Pipeline.guide`).

    Args:
        backbone: The networks, which predict the velocities; static.
        segments: The policies, each with the consecutive solver steps that it takes, in order.
        conditions: The embeddings of the prompts that `seed_batch.prompt` points to, and of the
            negative prompt, which only guided schedules use.
        seed_batch: The prompt, the seed and the initial noise of each sample of the chunk. The
            noise must not be None. The number of samples is a multiple of the number of devices
            along the mesh axes `data` and `fsdp`.
        recorded_steps: How many steps to record, from the first step that adds noise on; static.
            All of them must add noise. 0 records nothing. Ignored with `query_steps`.
        keep_intermediate: Whether to return the latents after the first segment; static.
        query_steps: Consecutive steps, counted from 0 over all segments; static. One of them is
            drawn for each sample from its seed (`draw_steps` draws the same ones again), and two
            latents of that step are returned in place of recorded steps. None: none is drawn.

    Returns:
        A tuple of three float32 arrays:

        * The clean latents [b, ...].
        * The recorded states [b, states, ...]: the latents before the first recorded step and after
            each recorded step, or with `query_steps` the latents before the drawn step and the
            clean latents that are predicted there. None if nothing is recorded.
        * The latents after the first segment [b, ...]. None without `keep_intermediate`.

    Raises:
        ValueError: While tracing, if the network does not support the size of the latents, or has
            no FP8 attention and a segment asks for it.
    """
    cond = jax.tree.map(lambda c: c[seed_batch.prompt], conditions.cond)
    uncond = jax.tree.map(
        lambda c: jnp.broadcast_to(c, (len(seed_batch), *c.shape[1:])), conditions.uncond
    )

    def velocity(segment: Segment, x: Array, timestep: Array) -> Array:
        predict = partial(
            backbone.velocity,
            segment.policy,
            x,
            timestep=timestep,
            guidance=jnp.asarray(segment.schedule.embedded_guidance),
            fp8_attention=segment.fp8_attention,
        )
        if not segment.schedule.guided:
            return predict(cond)
        v_uncond = predict(uncond).astype(jnp.float32)
        v_cond = predict(cond).astype(jnp.float32)
        scale = jnp.asarray(segment.schedule.guidance_scale)
        return backbone.pipeline.guide(v_cond, v_uncond, scale)

    noise = sharding.split_rows(jnp.asarray(seed_batch.noise))
    fields = [(partial(velocity, segment), segment.schedule) for segment in segments]
    latents, states, intermediate = trajectory(
        fields, noise, jnp.asarray(seed_batch.seeds), recorded_steps, query_steps
    )
    return latents, states, intermediate if keep_intermediate else None


@partial(sharding.jit, static_argnums=2)
def decode_chunk(
    decoder: Decoder, latents: Float[Array, "b ... c"], first_frame: bool = False
) -> Float[Array, "b ... 3"]:
    """Decodes one chunk of latents to images or clips in [0, 1].

    One non-finite number in a latent makes all of its image NaN. The decoder alone would not ensure
    that, because its ReLU may turn NaN into 0.

    Args:
        decoder: The decoder of the pipeline with its parameters.
        latents: Clean latents. Their number is a multiple of the number of devices of the ambient
            mesh.
        first_frame: Whether only the first frame of each clip is decoded; static. No effect on
            images.

    Returns:
        The images [b, H, W, 3] or clips [b, T, H, W, 3] (T is 1 with `first_frame`), float32.
    """
    finite = jnp.isfinite(latents).all(tuple(range(1, latents.ndim)), keepdims=True)
    return jnp.where(finite, decoder(latents, first_frame), jnp.nan)
