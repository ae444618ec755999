"""Seeds to samples to rewards, a chunk at a time: the one function behind exploring, regenerating and evaluating.

A chunk is `chunk` rows on every device, always: a shorter one is filled up. So one program is compiled a stage, each row
goes through the same instructions whatever its batch mates or the number of devices, and memory is known beforehand.
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

from solrl_jax.backbone.backbone import Backbone, Conditioning, Params
from solrl_jax.conditioning.prompts import Prompt
from solrl_jax.flow import sampler
from solrl_jax.flow.sigmas import make_sigmas
from solrl_jax.flow.solver import solver_table
from solrl_jax.numerics.randomness import initial_noise
from solrl_jax.parallel import hosts, sharding
from solrl_jax.rewards.division import divided_scoring
from solrl_jax.rewards.host import total
from solrl_jax.rewards.protocol import Reward, score_images


@dataclasses.dataclass(frozen=True)
class Grid:
    """A schedule and a solver, as arrays: another number of steps is another shape, nothing else is compiled in.

    sigmas [steps]: where steps start; times [steps]: what the network is told (0..1000); table [steps, 5]: the solver.
    guidance: what the network is told of it, if it is told; scale: of classifier-free guidance, read if there is any.
    """

    sigmas: Float[np.ndarray, " steps"]
    times: Float[np.ndarray, " steps"]
    table: Float[np.ndarray, "steps 5"]
    guidance: float
    scale: float
    guided: bool  # classifier-free: two evaluations a step

    @classmethod
    def of(cls, rollout: Any, steps: int, tokens: int, embedded_guidance: bool) -> "Grid":
        """The grid of a `config.Rollout` with `steps` steps for latents of `tokens` image tokens.

        embedded_guidance: the network is told `guidance`, so that classifier-free is `true_guidance`.
        """
        sigmas = make_sigmas(rollout.schedule, steps, rollout.shift, tokens)
        table = solver_table(rollout.solver, sigmas, rollout.eta)
        scale = rollout.true_guidance if embedded_guidance else rollout.guidance
        return cls.from_sigmas(sigmas, table, rollout.guidance, scale != 1.0, scale=scale)

    @classmethod
    def from_sigmas(
        cls, sigmas: np.ndarray, table: np.ndarray, guidance: float, guided: bool, times: np.ndarray | None = None,
        scale: float | None = None,
    ) -> "Grid":  # fmt: skip
        """times: 1000 `sigmas` if None; scale: `guidance` if None."""
        starts = sigmas[:-1].astype(np.float32)
        times = 1000 * starts if times is None else times.astype(np.float32)
        return cls(starts, times, table, guidance, guidance if scale is None else scale, guided)


@partial(jax.tree_util.register_dataclass, data_fields=["first", "rest"], meta_fields=["steps"])
@dataclasses.dataclass(frozen=True)
class Relay:
    """A policy for the first `steps` steps of a sample, and one for the others. Leaves that both have are held once."""

    first: Params
    rest: Params
    steps: int


@dataclasses.dataclass(frozen=True)
class Prompted:
    """Everything a set of prompts means to the networks: what conditions them, what rewards compare with."""

    prompts: tuple[Prompt, ...]
    conditioning: Conditioning
    negative: Conditioning  # what guidance leads away from: one row
    prepared: Any


@dataclasses.dataclass(frozen=True)
class Samples:
    """Rows in the order asked for. latents: float32 [b, h, w, c]; scores: name -> [b]; images [b, H, W, 3] if kept.

    failed: of each reward outside JAX, how many rows it could not score; their scores are NaN.
    """

    latents: Float[np.ndarray, "b h w c"]
    scores: dict[str, np.ndarray]
    images: Float[np.ndarray, "b H W 3"] | None
    failed: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def reward(self) -> Float[np.ndarray, " b"]:
        return self.scores["reward"]


def prepare(
    backbone: Backbone, reward: Reward | None, prompts: Sequence[Prompt], max_tokens: int, negative: str = ""
) -> Prompted:
    """Encodes prompts once, for any number of samples of each."""
    prepared = None if reward is None else reward.prepare(prompts)
    conditioning = backbone.encode(prompts, max_tokens)
    return Prompted(tuple(prompts), conditioning, backbone.encode((negative,), max_tokens, negative=True), prepared)


def generate(
    backbone: Backbone,
    params: Params | Relay,
    grid: Grid,
    prompted: Prompted,
    index: Int[np.ndarray, " b"],
    seeds: UInt32[np.ndarray, "b 2"],
    size: tuple[int, int],
    chunk: int,
    reward: Reward | None,
    *,
    noise: Float[np.ndarray, "b h w c"] | None = None,
    keep_images: bool = False,
    progress: Callable[[int], None] = lambda rows: None,
) -> Samples:
    """Samples each row: the prompt `index` names, from the noise its seed stands for (or from `noise` if given).

    params: the policy, whatever its leaves. chunk: rows a device runs at once. progress: told of rows done.
    Rewards outside JAX score a chunk while the next one is made; RewardError when one fails and the run is to stop then.
    """
    mesh, shape = backbone.mesh, backbone.pipeline.latent_shape(*size)
    scoring_mesh = sharding.rows_only(mesh)  # decodes and scores as many rows as its larger number of devices take at once
    rows, scored = chunk * sharding.row_groups(mesh), chunk * scoring_mesh.size
    place = lambda x, where=mesh: hosts.put(x, sharding.rows(where))
    whole = lambda x, where=mesh: hosts.put(x, sharding.replicated(where))
    arrays = whole((grid.sigmas, grid.times, grid.table, np.float32(grid.guidance), np.float32(grid.scale)))
    prepared = whole(prompted.prepared, scoring_mesh)
    collected: list[tuple[Array, dict[str, Array], Array | None]] = []
    host = None if reward is None else reward.host
    with contextlib.ExitStack() as stack:
        beside = None
        if host is not None:
            of_rows, where = [prompted.prompts[i] for i in index], sharding.rows(scoring_mesh)
            beside = stack.enter_context(divided_scoring(host, of_rows, scored, where))

        def fetch(number: int) -> None:
            latents, scores, images = collected[number]
            if beside is not None and images is not None:
                beside.add(images)
            collected[number] = hosts.fetch((latents, scores, images if keep_images else None))

        def latents_of(part: slice) -> Float[Array, "rows h w c"]:
            chunk_index, chunk_seeds = (place(sharding.pad_rows(x[part], rows)) for x in (index, seeds))
            with jax.set_mesh(mesh):
                initial = draw_noise(chunk_seeds, shape) if noise is None else place(sharding.pad_rows(noise[part], rows))
                return sample_chunk(
                    backbone, grid.guided, params, prompted.conditioning, prompted.negative, chunk_index, chunk_seeds, initial,
                    *arrays,
                )  # fmt: skip

        for start in range(0, len(index), scored):
            parts = [latents_of(slice(i, i + rows)) for i in range(start, min(start + scored, len(index)), rows)]
            parts += parts[:1] * (scored // rows - len(parts))
            with jax.set_mesh(scoring_mesh):
                latents = parts[0] if len(parts) == 1 else jnp.concatenate(parts)
                latents = jax.device_put(latents, sharding.rows(scoring_mesh))
                images = decode_chunk(backbone, backbone.vae, latents) if reward is not None or keep_images else None
                scores: dict[str, Array] = {}
                if images is not None and reward is not None and reward.score is not None:
                    of_prompt = place(sharding.pad_rows(index[start : start + scored], scored), scoring_mesh)
                    scores = score_images(reward, reward.params, images, prepared, of_prompt)
            collected.append((latents, scores, images if keep_images or beside is not None else None))
            if len(collected) > 1:  # one chunk ahead of the device, no more: the queue holds memory
                fetch(-2)
            progress(len(index[start : start + scored]))
        fetch(-1)
        outside, failed = ({}, {}) if beside is None else beside.finish()
    join = lambda parts: np.concatenate(parts)[: len(index)]
    joined = {name: join([c[1][name] for c in collected]) for name in collected[0][1]} | outside
    return Samples(
        latents=join([c[0] for c in collected]),
        scores=joined if host is None else total(host, joined),
        images=join([c[2] for c in collected]) if keep_images else None,
        failed=failed,
    )


@partial(sharding.jit, static_argnums=1)
def draw_noise(seeds: UInt32[Array, "b 2"], shape: tuple[int, ...]) -> Float[Array, "b ..."]:
    return sharding.split_rows(initial_noise(seeds, shape))


@partial(sharding.jit, static_argnums=(0, 1))
def sample_chunk(
    backbone: Backbone, guided: bool, params: Params | Relay, conditioning: Conditioning, negative: Conditioning,
    index: Int[Array, " b"], seeds: UInt32[Array, "b 2"], noise: Float[Array, "b h w c"],
    sigmas: Array, times: Array, table: Array, guidance: Array, scale: Array,
) -> Float[Array, "b h w c"]:  # fmt: skip
    """Noise to clean latents for one chunk."""
    of_rows = jax.tree.map(lambda c: c[index], conditioning)
    opposite = jax.tree.map(lambda c: jnp.broadcast_to(c, (len(index), *c.shape[1:])), negative)

    def velocity(params: Params, x: Array, time: Array) -> Array:
        prompt = backbone.velocity(params, x, of_rows, time, guidance)
        if not guided:
            return prompt
        # classifier-free guidance (arXiv 2207.12598)
        away = backbone.velocity(params, x, opposite, time, guidance).astype(jnp.float32)
        return away + scale * (prompt.astype(jnp.float32) - away)

    relay = params if isinstance(params, Relay) else Relay(params, params, 0)
    first = (partial(velocity, relay.first), relay.steps) if relay.steps else None
    return sampler.sample(partial(velocity, relay.rest), sharding.split_rows(noise), sigmas, times, table, seeds, first)


@partial(sharding.jit, static_argnums=0)
def decode_chunk(backbone: Backbone, params: Params, latents: Float[Array, "b h w c"]) -> Float[Array, "b H W 3"]:
    return backbone.decode(params, latents)
