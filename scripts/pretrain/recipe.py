"""The recipe of the embedded pipelines: training lengths, learning rates and captions."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import optax

# Text tokens of `tiny-sana` and `tiny-clip`.
MAX_TOKENS = 24
# Text tokens of `tiny-flux` and `tiny-sd3`, whose networks attend to padding. The longest caption
# has 10 words.
SHORT = 12
# Text tokens of `tiny-wan`. The longest caption has 7 words.
MOTION_TOKENS = 8
MOTION_SHIFT = 3.0  # of the noise levels of `tiny-wan`


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of one run of the script.

    Attributes:
        work: The folder of training states, images and latents.
        out: The folder of finished pipelines.
        seed: The seed of all random numbers.
        stop: The step at which every training stops at the latest. None: its own end.
        seconds: The time limits of some trainings, by name. They include compilation.
    """

    work: Path
    out: Path
    seed: int
    stop: int | None = None
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The steps of a training and their learning rates.

    The first segment warms up to `rate` in 100 steps and decays to 5 % of it at step `steps`, along
    a cosine.

    Attributes:
        rate: The largest learning rate.
        steps: The length of the first segment.
        stop: The step at which the first segment is cut off. None: it is complete.
        more: The lengths of further segments, each of which decays from 50 % to 10 % of `rate`.
    """

    rate: float
    steps: int
    stop: int | None = None
    more: tuple[int, ...] = ()

    @property
    def last(self) -> int:
        """The number of steps of all segments."""
        return (self.steps if self.stop is None else self.stop) + sum(self.more)

    def learning_rate(self) -> optax.Schedule:
        """Returns the learning rate as a function of the step."""
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
    """The images and captions of a batch, by step.

    Wrong captions imitate web data, in which alternative texts are often wrong. The network then
    knows more than it shows, which reinforcement learning can bring out.

    Attributes:
        stream: The stream of random numbers. 0 to 5 belong to the other trainings.
        wrong: The steps in which 30 % of the captions belong to another image.
        focus: For images, the step from which on only scenes are used that the prompt sets may
            hold. Every scene of the clips is in a prompt set.
        balance: For images, the step from which on half of the scenes have two groups and a
            relation, as in the prompt sets. Scenes of clips have one object.
    """

    stream: int
    wrong: range = range(0)
    focus: int = 0
    balance: int = 0


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The joint training of a pipeline's transformer and text encoders.

    Attributes:
        curriculum: The images and captions.
        schedule: The steps and learning rates.
        max_tokens: The number of text tokens.
        teacher: The embedded pipeline whose guided velocity is the target. None: the target is the
            velocity of the images.
        distillation: The schedule of the guidance distillation. None: there is none.
        batch: The number of images or clips in a batch.
        shift: The factor by which noise levels are shifted towards noise, as by the pipeline's
            schedule: it multiplies sigma / (1 - sigma).
    """

    curriculum: Curriculum
    schedule: Schedule
    max_tokens: int
    teacher: str | None = None
    distillation: Schedule | None = None
    batch: int = 64
    shift: float = 1.0


VAE = Schedule(2e-3, 900)
KL = Schedule(2e-3, 1000)
WAN_VAE = Schedule(2e-3, 4000)
WAN_DECODER = Schedule(1e-3, 4000)
WAN_DECODER_BATCH = 2  # clips; small, so that a CPU takes many steps
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
    "tiny-wan": Recipe(
        Curriculum(stream=9, wrong=range(20_000, 24_000)),
        Schedule(1e-3, 20_000, more=(4000,)),
        MOTION_TOKENS,
        batch=256,
        # A large object is seen through much noise, in many latents of all frames, so color, shape
        # and motion are decided at noise levels that the unshifted distribution hardly reaches.
        shift=MOTION_SHIFT,
    ),
}
