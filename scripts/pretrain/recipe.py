"""The recipe of the embedded pipelines: how long each network is trained, at which learning rates, on which captions."""

import dataclasses
from pathlib import Path

import optax

MAX_TOKENS = 24  # of `tiny-sana` and `tiny-clip`
SHORT = 12  # of `tiny-flux` and `tiny-sd3`, whose networks attend to padding too: the longest caption has 10 words


@dataclasses.dataclass(frozen=True)
class Settings:
    """Where one run of the script keeps its files, and the seed of its random numbers."""

    work: Path  # states of unfinished trainings, pictures, latents
    out: Path  # finished pipelines
    seed: int
    stop: int | None = None  # leave every training at this step at the latest


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Steps of a training and their learning rates.

    The first segment warms up to `rate` in 100 steps and falls to a twentieth of it, by a cosine, at step `steps`.
    """

    rate: float
    steps: int
    stop: int | None = None  # the step at which the first segment is left before its end
    more: tuple[
        int, ...
    ] = ()  # lengths of further segments, each of which falls from half of `rate` to a tenth of it

    @property
    def last(self) -> int:
        """The number of steps of all segments."""
        return (self.steps if self.stop is None else self.stop) + sum(self.more)

    def learning_rate(self) -> optax.Schedule:
        schedule = optax.warmup_cosine_decay_schedule(
            0.0, self.rate, 100, self.steps, self.rate / 20
        )
        start = self.last - sum(self.more)
        for segment in self.more:
            schedule = optax.join_schedules(
                [schedule, optax.cosine_decay_schedule(self.rate / 2, segment, 0.2)], [start]
            )
            start += segment
        return schedule


@dataclasses.dataclass(frozen=True)
class Curriculum:
    """Which pictures a batch holds, and which captions, by step.

    Wrong captions stand for the web's, where alt texts are often wrong. The network then knows more than it shows, and
    reinforcement learning has something to bring out.
    """

    stream: int  # of random numbers; 0 to 5 are those of the other trainings
    focus: int  # from this step on, only scenes that the prompt sets may ask for
    balance: int  # from this step on, every second scene has two groups and a relation, as in the prompt sets
    wrong: range = range(0)  # the steps in which three captions in ten are another picture's


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a pipeline's transformer and text encoders are trained, together."""

    curriculum: Curriculum
    schedule: Schedule
    max_tokens: int
    teacher: str | None = (
        None  # the embedded pipeline whose velocity under guidance is the target, instead of the pictures' own
    )
    distillation: Schedule | None = (
        None  # of guidance, by which the network learns what its guidance scale means
    )


VAE = Schedule(2e-3, 900)
KL = Schedule(2e-3, 1000)
CLIP = Schedule(1e-3, 500)
RECIPES = {
    "tiny-sana": Recipe(
        Curriculum(stream=2, focus=2600, balance=4800, wrong=range(7000, 7700)),
        Schedule(1e-3, 4000, stop=3700, more=(4000,)),
        MAX_TOKENS,
    ),
    "tiny-flux": Recipe(
        Curriculum(stream=6, focus=500, balance=900, wrong=range(8000, 8800)),
        Schedule(1e-3, 8000, more=(800,)),
        SHORT,
        distillation=Schedule(3e-4, 600),
    ),
    "tiny-sd3": Recipe(
        Curriculum(stream=7, focus=200, balance=500),
        Schedule(1e-3, 2500, more=(1600, 4000)),
        SHORT,
        teacher="tiny-flux",
    ),
}
