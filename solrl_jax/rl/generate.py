"""Seeds to samples to rewards, a chunk at a time: the one function behind exploring, regenerating and evaluating.

Every chunk has the same number of rows on every device; a short chunk is filled up. So each stage compiles one program, a
row runs through the same instructions whatever its batch mates or the number of devices, and the memory is known beforehand.
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
from solrl_jax.diffusion import sampler
from solrl_jax.diffusion.seeds import normal
from solrl_jax.models.backbone import Backbone
from solrl_jax.models.decoder import Decoder
from solrl_jax.models.pipeline import Conditioning
from solrl_jax.parallel import hosts, sharding
from solrl_jax.rewards.division import DividedScoring, divided_scoring
from solrl_jax.rewards.mixture import add_total
from solrl_jax.rewards.protocol import Reward, score_images
from solrl_jax.rl.sampler import Sampler, Segment


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Conditions:
    """Encoded prompts: what the network follows, a row a prompt, and what guidance leads away from, one row."""

    positive: Conditioning
    negative: Conditioning


@dataclasses.dataclass(frozen=True)
class PromptBatch:
    """A set of prompts, encoded for the network and prepared for the reward."""

    prompts: tuple[Prompt, ...]
    conditions: Conditions
    prepared: Any  # what `Reward.prepare` made of the prompts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SeedBatch:
    """The samples to make, one a row."""

    prompt: Int[Array | np.ndarray, " b"]  # which of the prompts
    seeds: UInt32[Array | np.ndarray, "b 2"]
    noise: Float[Array | np.ndarray, "b h w c"] | None = (
        None  # the latents to start from; None: drawn from the seeds
    )

    @classmethod
    def from_seeds(cls, seeds: UInt32[np.ndarray, "p n 2"]) -> "SeedBatch":
        """A row a seed, prompt by prompt."""
        prompts, candidates, _ = seeds.shape
        return cls(np.repeat(np.arange(prompts), candidates), seeds.reshape(-1, 2))

    def __len__(self) -> int:
        return len(self.prompt)


@dataclasses.dataclass(frozen=True)
class Samples:
    """Samples in the order of their rows."""

    latents: Float[np.ndarray, "b h w c"]  # float32
    scores: dict[str, np.ndarray]  # by name; each [b]
    images: Float[np.ndarray, "b H W 3"] | None = None  # in [0, 1], if asked for
    states: Float[np.ndarray, "b states h w c"] | None = (
        None  # before and after each recorded step, one after another
    )
    failed: dict[str, int] = dataclasses.field(
        default_factory=dict
    )  # rows without a score, by reward outside JAX

    @property
    def reward(self) -> Float[np.ndarray, " b"]:
        """The weighted sum that is trained on."""
        return self.scores["reward"]

    def take(self, rows: Int[np.ndarray, "..."]) -> "Samples":
        """The samples of the given rows (any shape; flattened), without pictures."""
        rows = rows.reshape(-1)
        states = None if self.states is None else self.states[rows]
        return Samples(
            self.latents[rows],
            {name: scores[rows] for name, scores in self.scores.items()},
            states=states,
        )


def prepare(
    backbone: Backbone,
    reward: Reward | None,
    prompts: Sequence[Prompt],
    max_tokens: int,
    negative: str = "",
) -> PromptBatch:
    """Encodes prompts once, for any number of samples of each."""
    prepared = None if reward is None else reward.prepare(prompts)
    positive = backbone.encode(prompts, max_tokens)
    away = backbone.encode((negative,), max_tokens, negative=True)
    return PromptBatch(tuple(prompts), Conditions(positive, away), prepared)


def generate(
    backbone: Backbone,
    stage: Sampler,
    prompted: PromptBatch,
    rows: SeedBatch,
    reward: Reward | None = None,
    *,
    keep_images: bool = False,
    progress: Callable[[int], None] = lambda done: None,
) -> Samples:
    """Samples every row of `rows` and scores it against its prompt.

    Args:
      rows: with host arrays; `rows.noise` replaces the noise that the seeds stand for.
      reward: scores the pictures; None: nothing is scored, and pictures are decoded only if `keep_images`.
      progress: called with the number of rows done since the last call.

    Raises RewardError when a reward outside JAX fails and the configuration says that the run stops then.
    """
    chunks = _Chunks(backbone, stage, prompted, rows, reward, keep_images)
    host = None if reward is None else reward.host
    with contextlib.ExitStack() as stack:
        if host is not None:
            of_rows = [prompted.prompts[i] for i in rows.prompt]
            where = sharding.rows(chunks.scoring_mesh)
            chunks.outside = stack.enter_context(
                divided_scoring(host, of_rows, chunks.scored, where)
            )
        for start in range(0, len(rows), chunks.scored):
            chunks.run(start)
            progress(min(chunks.scored, len(rows) - start))
        chunks.fetch(-1)
        scores, failed = ({}, {}) if chunks.outside is None else chunks.outside.finish()

    def join(name):
        return np.concatenate([made[name] for made in chunks.made])[: len(rows)]

    scores |= {
        name: join(name) for name in chunks.made[0] if name not in ("latents", "images", "states")
    }
    return Samples(
        latents=join("latents"),
        scores=scores if host is None else add_total(host.weights, scores),
        images=join("images") if keep_images else None,
        states=join("states") if stage.recorded else None,
        failed=failed,
    )


class _Chunks:
    """The chunks of one `generate`: dispatched to the devices one ahead of what is fetched, for the queue holds memory.

    A chunk is sampled on the mesh and scored on `scoring_mesh`, where the devices of axis `tensor` hold rows too: so several
    sampled chunks may be scored at once.
    """

    def __init__(
        self,
        backbone: Backbone,
        stage: Sampler,
        prompted: PromptBatch,
        rows: SeedBatch,
        reward: Reward | None,
        keep_images: bool,
    ) -> None:
        self.backbone = backbone
        self.stage = stage
        self.prompted = prompted
        self.rows = rows
        self.reward = reward
        self.keep_images = keep_images
        self.mesh = backbone.mesh
        self.scoring_mesh = sharding.rows_only(backbone.mesh)
        self.sampled = stage.chunk * sharding.row_groups(
            self.mesh
        )  # rows of a sampled chunk, on all devices
        self.scored = stage.chunk * self.scoring_mesh.size

        def place(grid):
            return hosts.put(grid, sharding.replicated(self.mesh))

        self.segments = tuple(
            dataclasses.replace(segment, schedule=place(segment.schedule))
            for segment in stage.segments
        )
        self.prepared = hosts.put(prompted.prepared, sharding.replicated(self.scoring_mesh))
        self.outside: DividedScoring | None = None
        self.made: list[dict[str, Any]] = []  # of each chunk: latents, images and scores

    def run(self, start: int) -> None:
        """Samples and scores the rows from `start` on; fetches the chunk before."""
        stop = min(start + self.scored, len(self.rows))
        parts = [
            self._latents(slice(i, min(i + self.sampled, stop)))
            for i in range(start, stop, self.sampled)
        ]
        parts += parts[:1] * (self.scored // self.sampled - len(parts))
        with jax.set_mesh(self.scoring_mesh):
            joined = (
                parts[0] if len(parts) == 1 else jax.tree.map(lambda *x: jnp.concatenate(x), *parts)
            )
            latents, states = jax.device_put(joined, sharding.rows(self.scoring_mesh))
            made: dict[str, Any] = {"latents": latents} | (
                {} if states is None else {"states": states}
            )
            if self.keep_images or (self.reward is not None and self.reward.needs_pictures):
                made["images"] = decode_chunk(self.stage.decoder, latents)
            if self.reward is not None and self.reward.score is not None:
                prompt = self._placed(self.rows.prompt[start:stop], self.scored, self.scoring_mesh)
                seen = self.reward.select_inputs(made.get("images"), latents)
                made |= score_images(self.reward, self.reward.params, seen, self.prepared, prompt)
        if not self.keep_images and self.outside is None:
            made.pop("images", None)
        self.made.append(made)
        if len(self.made) > 1:
            self.fetch(-2)

    def fetch(self, number: int) -> None:
        """Brings chunk `number` to the host, and hands its pictures to the rewards outside JAX."""
        made = self.made[number]
        if self.outside is not None:
            self.outside.add(made["images"])
        if not self.keep_images:
            made.pop("images", None)
        self.made[number] = hosts.fetch(made)

    def _latents(
        self, part: slice
    ) -> tuple[Float[Array, "b h w c"], Float[Array, "b states h w c"] | None]:
        def place(x):
            return self._placed(x[part], self.sampled, self.mesh)

        prompt = place(self.rows.prompt)
        seeds = place(self.rows.seeds)
        with jax.set_mesh(self.mesh):
            noise = (
                draw_noise(seeds, self.stage.shape)
                if self.rows.noise is None
                else place(self.rows.noise)
            )
            rows = SeedBatch(prompt, seeds, noise)
            return sample_chunk(
                self.backbone, self.segments, self.prompted.conditions, rows, self.stage.recorded
            )

    def _placed(self, x: Array | np.ndarray, count: int, mesh: jax.sharding.Mesh) -> Array:
        return hosts.put(sharding.pad_rows(np.asarray(x), count), sharding.rows(mesh))


@partial(sharding.jit, static_argnums=1)
def draw_noise(seeds: UInt32[Array, "b 2"], shape: tuple[int, ...]) -> Float[Array, "b ..."]:
    """The initial noise of each seed, split over the devices."""
    return sharding.split_rows(normal(seeds, "initial", shape))


@partial(sharding.jit, static_argnums=(0, 4))
def sample_chunk(
    backbone: Backbone,
    segments: tuple[Segment, ...],
    conditions: Conditions,
    rows: SeedBatch,
    recorded: int = 0,
) -> tuple[Float[Array, "b h w c"], Float[Array, "b states h w c"] | None]:
    """Noise to clean latents for one chunk, and the states around `recorded` stochastic steps (`sampler.trajectory`)."""
    towards = jax.tree.map(lambda c: c[rows.prompt], conditions.positive)
    away = jax.tree.map(
        lambda c: jnp.broadcast_to(c, (len(rows), *c.shape[1:])), conditions.negative
    )

    def velocity(segment: Segment, x: Array, time: Array) -> Array:
        def follow(conditioning):
            return backbone.velocity(
                segment.policy,
                x,
                conditioning,
                time,
                jnp.asarray(segment.schedule.embedded_guidance),
                segment.fp8_attention,
            )

        if not segment.schedule.guided:
            return follow(towards)
        # classifier-free guidance (arXiv 2207.12598)
        without = follow(away).astype(jnp.float32)
        return without + segment.schedule.guidance_scale * (
            follow(towards).astype(jnp.float32) - without
        )

    noise = sharding.split_rows(jnp.asarray(rows.noise))
    followed = [(partial(velocity, segment), segment.schedule) for segment in segments]
    return sampler.trajectory(followed, noise, jnp.asarray(rows.seeds), recorded)


@sharding.jit
def decode_chunk(decoder: Decoder, latents: Float[Array, "b h w c"]) -> Float[Array, "b H W 3"]:
    """Latents to pictures in [0, 1] for one chunk. Of latents that are not finite, NaN: a decoder's ReLU may make 0 of NaN."""
    sound = jnp.isfinite(latents).all((1, 2, 3), keepdims=True)
    return jnp.where(sound, decoder(latents), jnp.nan)
