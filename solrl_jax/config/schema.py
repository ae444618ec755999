"""The configuration: one frozen dataclass a section. No field has a default here: `configs/` has them all.

A field's type says its range and is checked by `presets.resolve`; what must hold between fields is checked whenever a section
is made. Letters (docs/method.md): G prompts an iteration, N candidates and K kept of each. Regexes match a parameter's whole
path, e.g. `transformer_blocks/attn1/to_q/kernel`. Sources: Sol-RL (arXiv 2604.06916) and DiffusionNFT (arXiv 2509.16117).
"""

import dataclasses
import math
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from solrl_jax.config.values import (
    MAX_TOKENS,
    Count,
    Decay,
    Flag,
    Free,
    Integer,
    Json,
    Many,
    Natural,
    NotNegative,
    Number,
    Positive,
    Regex,
    Section,
    Seed,
    Side,
    Size,
    Sizes,
    Steps,
    Text,
    check,
    contains_secret,
)

# `rl/objectives/`, and what each trains on: clean samples, pairs of a prompt's best and worst, recorded steps of an SDE
OBJECTIVES = {
    "nft": "samples",
    "awm": "samples",
    "dpo": "pairs",
    "flow_grpo": "transitions",
    "mix_grpo": "transitions",
    "dance_grpo": "transitions",
}


# of exploration: the formats of `quant/formats.py`; auto: the fastest of them that the device runs natively
Precision = Literal["auto", "nvfp4", "fp8", "bf16", "fp32"]
PreviewSigmas = Literal["default", "first"]


def _objective(name: str) -> str:
    if name not in OBJECTIVES:
        raise ValueError(f"expected one of {', '.join(OBJECTIVES)}")
    return name


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantization(Section):
    """Which linears a format that quantises leaves in the training precision; all others it takes (`rl/explore/linears.py`)."""

    modules_to_not_convert: tuple[Text, ...]  # parts of their paths
    min_width_ratio: NotNegative  # those whose larger side is at most this many times the width of the network's blocks
    fused: tuple[
        Regex, ...
    ]  # linears of one module that count as one, outputs together, as the rule's authors hold them


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model(Section):
    """The pipeline that is post-trained."""

    name: Text
    path: (
        Text  # a directory, a hub name, or 'embedded:NAME' for a pipeline shipped with the package
    )
    height: Side
    width: Side
    max_sequence_length: Annotated[
        Integer, Field(ge=1, le=MAX_TOKENS)
    ]  # length of the text that conditions it
    instruction: (
        Text | None
    )  # a file with the text that goes before every prompt (SANA); null: none
    prompt_cache_dir: (
        Free | None
    )  # a directory that keeps what prompts were encoded to; '': the user's own; null: nothing is kept
    vae_tile_size: (
        Side | None
    )  # pixels a side of what is decoded at once, neighbours sharing a quarter; null: whole images
    attention: Literal[
        "default", "mhla"
    ]  # mhla: in place of SANA's (`models/layers/mhla.py`), which reads the next three
    mhla_blocks: Annotated[
        Integer, Field(ge=1, le=2**12)
    ]  # equal ones that an image's tokens are divided into
    mhla_released: Flag  # the variant of the authors' released code; false: the paper's
    mhla_norm: Flag  # normalise queries and keys, where the network does not
    gradient_checkpointing: Literal[
        "auto", "none", "products", "blocks"
    ]  # what gradients compute again; auto: by the device's memory
    quantization: Quantization


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explore(Section):
    """How the N candidates are explored. The paper's recipe is `configs/explore/paper.yaml`."""

    precision: Precision  # a format of `quant/formats.py`; auto: the fastest format that the device runs natively
    num_steps: Steps
    sigmas: PreviewSigmas  # own: the schedule's own with so many steps; first: half are the full schedule's first
    exact_steps: Natural  # the first steps that the policy in `rollout.precision` takes; 0: none
    correction_rank: Annotated[
        Integer, Field(ge=0, le=2**12)
    ]  # rank of what goes past each quantised product; 0: nothing
    attention: Literal[
        "default", "fp8"
    ]  # fp8: softmax attention without a mask is in E4M3, of FLUX.1, FLUX.2 and SD3
    min_rank_correlation: (
        Annotated[Number, Field(ge=-1, le=1)] | None
    )  # of the Spearman correlation over kept samples; null: not watched


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rollout(Section):
    """Explore N candidates a prompt, keep K, and regenerate these or train on them as they are."""

    candidates: Many  # N
    kept: Annotated[Integer, Field(ge=2)]  # K
    # best_worst: K/2 from either end; best_random: the K/2 best and a draw from the others
    selection: Literal["best_worst", "best_random", "random", "best"]
    explore: Explore
    size: (
        Sizes | None
    )  # of what is trained on: [height, width], or several, of which an iteration takes one; null: the model's
    regenerate: Flag  # false: the explored samples themselves are trained on
    num_steps: (
        Steps  # full step count: of the regeneration, and of the schedule that the update trains on
    )
    solver: Literal[
        "euler", "dpm1", "dpm2", "ddim", "flow_sde", "dance_sde"
    ]  # evaluation takes a stochastic one without noise
    noise_level: Annotated[Number, Field(ge=0, le=1)]  # noise level of a stochastic solver
    sde_window_size: (
        Steps | None
    )  # steps in a row that add noise, the others add none; null: all but the last
    sde_window_every: (
        Count  # iterations after which the window moves on by a step; past the end it starts again
    )
    schedule: Literal["linear", "sd3", "flux"]
    shift: Annotated[
        Number, Field(ge=1e-3, le=1e3)
    ]  # of the sigmas; not read by 'flux', whose shift is of the resolution
    guidance_scale: NotNegative  # 1.0: no classifier-free guidance; FLUX.1: the embedded guidance
    true_cfg_scale: NotNegative  # classifier-free guidance where `guidance` is embedded; 1.0: none
    per_device_batch_size: Count  # rows that a device runs at once, at most
    precision: Literal["bf16", "fp32"]  # of regeneration, update and evaluation
    scoring_precision: Literal[
        "auto", "half", "fp32"
    ]  # decoding in BF16 and scoring in FP16, or both in float32; auto: by the device

    def __post_init__(self) -> None:
        n = self.candidates
        k = self.kept
        explored = self.explore.num_steps
        field = "rollout.explore.num_steps"
        full = f"rollout.num_steps={self.num_steps}"
        floor = self.explore.min_rank_correlation
        exact = self.explore.exact_steps
        compared = "must be null with rollout.regenerate=false, which has nothing to compare with"
        even = self.selection != "best_worst" or k % 2 == 0
        own = self.explore.sigmas == "default"
        stochastic = self.solver in ("ddim", "flow_sde", "dance_sde")
        check(
            (k <= n, "rollout.kept", k, f"must be at most rollout.candidates={n}"),
            (even or k > n, "rollout.kept", k, "must be even with rollout.selection=best_worst"),
            (
                not self.regenerate or explored <= self.num_steps,
                field,
                explored,
                f"must be at most {full}",
            ),
            (
                exact < explored,
                "rollout.explore.exact_steps",
                exact,
                f"must be less than {field}={explored}",
            ),
            (
                self.regenerate or floor is None,
                "rollout.explore.min_rank_correlation",
                floor,
                compared,
            ),
            # The update trains at the sigmas of the full schedule: samples that are not regenerated must have followed it.
            (
                self.regenerate or explored == self.num_steps,
                field,
                explored,
                f"must equal {full} with rollout.regenerate=false",
            ),
            (
                self.noise_level == 0 or stochastic,
                "rollout.noise_level",
                self.noise_level,
                f"must be 0 with rollout.solver={self.solver}",
            ),
            (
                self.noise_level == 0 or own,
                "rollout.noise_level",
                self.noise_level,
                "must be 0 with rollout.explore.sigmas=first",
            ),
            (
                (self.sde_window_size or 0) < self.num_steps,
                "rollout.sde_window_size",
                self.sde_window_size,
                f"must be less than {full}",
            ),
        )

    @property
    def num_sde_steps(self) -> int:
        """How many steps of the full schedule add noise. They follow each other."""
        return 0 if self.noise_level == 0 else self.sde_window_size or self.num_steps - 1

    def window_start(self, iteration: int) -> int:
        """The first step that adds noise, in an iteration counted from 1."""
        return (
            0
            if self.sde_window_size is None
            else (iteration - 1) // self.sde_window_every % (self.num_steps - self.sde_window_size)
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reward(Section):
    """The reward is the weighted sum of the named ones (`rewards/mixture.py`)."""

    # compared but not hashed: a configuration is a static argument of jit
    weights: Annotated[dict[str, Number], Field(min_length=1)] = dataclasses.field(hash=False)
    # where files of released rewards are, by the names of `rewards/sources.py`; those that are not named: the hub, `weights/`
    paths: dict[str, Text] = dataclasses.field(hash=False)
    options: dict[str, dict[str, Json]] = dataclasses.field(
        hash=False
    )  # keywords of plug-ins and of rewards outside JAX
    eval_only: tuple[Text, ...]  # scored at evaluations, never trained on
    # of rewards outside JAX:
    workers: Annotated[Integer, Field(ge=1, le=2**8)]  # processes that score
    timeout: Annotated[
        Positive, Field(le=1e6)
    ]  # seconds that a process may take for the pictures it is given at once
    on_failure: Literal["stop", "skip"]  # skip: pictures whose scoring fails have no score

    def __post_init__(self) -> None:
        # what a run records, everybody reads who reads the run
        secret = sum(
            contains_secret(name) for name in (*self.weights, *self.eval_only, *self.options)
        )
        rule = "must hold no user, password or token, which are recorded; put them into ~/.netrc"
        check((not secret, "reward.weights", "the address of a service", rule))
        both = [name for name in self.eval_only if name in self.weights]
        check((not both, "reward.eval_only", both, "must not name what reward.weights trains on"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Algorithm(Section):
    """The loss, its advantages, and the two slow copies of the policy."""

    objective: Annotated[
        str, AfterValidator(_objective)
    ]  # of `rl/objectives/`; `configs/objective/` has their settings
    beta: Positive  # nft: how far the implicit positive policy leans to the trained one; dpo: how much a preference weighs
    kl_coef: NotNegative  # of the distance to the base model: of velocities, or of the means of an SDE's steps
    clip_range: Positive  # of grpo and awm: how far from 1 the ratio of probabilities, trained to old, has a gradient
    adv_clip_max: Positive  # standard deviations
    adv_mode: Literal["all", "positive_only", "negative_only", "one_only", "binary"]
    global_std: Flag  # true: one standard deviation over the iteration; false: one a prompt
    timestep_fraction: Annotated[
        Number, Field(gt=0, le=1)
    ]  # share of the schedule's sigmas that a sample is trained at
    decay_type: Annotated[
        Integer, Field(ge=0, le=2)
    ]  # schedule of the decay of `old`, the policy that samples the rollouts
    ema_decay: Decay  # of the policy that is evaluated

    @property
    def trains_on(self) -> str:
        """What the objective is given: `samples`, `pairs` or `transitions`."""
        return OBJECTIVES[self.objective]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lora(Section):
    """The adapters: `W + alpha / rank * A B` for each kernel that a target matches."""

    rank: Annotated[Integer, Field(ge=1, le=2**12)]
    alpha: Positive
    target_modules: Annotated[tuple[Regex, ...], Field(min_length=1)]
    path: Text | None  # a LoRA of diffusers or PEFT to start from; null: start from the base


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimizer(Section):
    """AdamW."""

    learning_rate: Positive
    decay_steps: (
        Natural  # optimiser steps over which the rate falls linearly to 0; 0: it never falls
    )
    beta1: Decay
    beta2: Decay
    eps: Positive
    weight_decay: NotNegative
    max_grad_norm: Positive  # global norm that gradients are clipped to
    steps_per_iteration: Count
    per_device_batch_size: Count  # rows that a device differentiates at once, at most


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompts(Section):
    """Text files of one prompt a line, or 'embedded:NAME' for one shipped with the package."""

    train: Text
    test: Text


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train(Section):
    """The length of a run, the prompt groups of an iteration, and what is trained."""

    iterations: Count
    num_prompts: Count  # G
    # adapters: those of `lora`; a regex: what it matches is trained in full, beside adapters on others; all: all in full
    parameters: Annotated[Regex, Field(min_length=1)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eval(Section):
    """The evaluation on the test prompts."""

    every: Natural  # iterations; 0: only before and after the run
    size: Size | None  # [height, width]; null: the model's
    num_steps: Steps
    num_prompts: Count
    num_images_per_prompt: Many
    seed: Seed
    num_grid_images: Annotated[
        Integer, Field(ge=0, le=2**10)
    ]  # images in the picture of fixed prompts; 0: no picture


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mesh(Section):
    """How many devices share the rows, how many of these also share the parameters, and how many share each product."""

    data: Integer  # -1: all the devices that are left
    fsdp: Count
    tensor: Count

    def __post_init__(self) -> None:
        check(
            (
                self.data == -1 or self.data >= 1,
                "mesh.data",
                self.data,
                "must be at least 1, or -1 for all devices left",
            )
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run(Section):
    """Where a run is written and who is told."""

    dir: Free  # '' becomes runs/<preset>-<family>-seed<seed>
    checkpoint_every: Count  # iterations; written beside the next one, but for 1: then it is whole before the next begins
    keep_checkpoints: Count  # the newest
    keep_best: Natural  # beside them, those with the highest eval/reward: what is evaluated is then saved too; 0: none
    tensorboard: Flag
    wandb: Flag


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Section):
    """A run. `preset` and `family` are for the record: what they stand for is in the sections."""

    version: Literal[3]  # of this layout; `config.migrations` reads older ones
    seed: Seed
    preset: Text
    family: Text
    model: Model
    rollout: Rollout
    reward: Reward
    algorithm: Algorithm
    lora: Lora
    optimizer: Optimizer
    prompts: Prompts
    train: Train
    eval: Eval
    mesh: Mesh
    run: Run

    def __post_init__(self) -> None:
        steps = self.optimizer.steps_per_iteration
        fraction = self.algorithm.timestep_fraction
        terms = self.train.num_prompts * self.rollout.kept * self.num_train_sigmas
        least = 1 / self.rollout.num_steps
        enough = f"must be at least 1 / rollout.num_steps = {least:.3g}"
        whole = self.train.parameters != "adapters" or self.model.attention == "mhla"
        slow = self.algorithm.decay_type == 2
        # a step of 0.001 of the way is less than half a digit of BF16: the old policy would never move
        follows = not (whole and slow and self.rollout.precision == "bf16")
        other = "must be 0 or 1, or rollout.precision=fp32, where parameters are trained in full"
        even = f"must divide train.num_prompts * rollout.kept * trained sigmas = {terms}"
        check(
            (self.num_train_sigmas >= 1, "algorithm.timestep_fraction", fraction, enough),
            (follows, "algorithm.decay_type", 2, other),
            (terms % steps == 0, "optimizer.steps_per_iteration", steps, even),
            *self._what_the_objective_needs(),
        )

    def _what_the_objective_needs(self) -> list[tuple[bool, str, Any, str]]:
        rollout = self.rollout
        explore = self.rollout.explore
        steps = self.optimizer.steps_per_iteration
        match self.algorithm.trains_on:
            case "pairs":
                terms = self.train.num_prompts * rollout.kept * self.num_train_sigmas // steps
                field = "optimizer.per_device_batch_size"
                needs = f"for the pairs of algorithm.objective={self.algorithm.objective}"
                return [
                    (rollout.kept % 2 == 0, "rollout.kept", rollout.kept, f"must be even {needs}"),
                    (
                        self.optimizer.per_device_batch_size % 2 == 0,
                        field,
                        self.optimizer.per_device_batch_size,
                        f"must be even {needs}",
                    ),
                    (
                        terms % 2 == 0,
                        "optimizer.steps_per_iteration",
                        steps,
                        f"must leave an even number of terms {needs}",
                    ),
                ]
            case "transitions":
                needs = f"for the transitions that algorithm.objective={self.algorithm.objective} trains on"
                exact = rollout.regenerate or explore.precision in ("bf16", "fp32")
                most = rollout.num_sde_steps
                field = "algorithm.timestep_fraction"
                fraction = self.algorithm.timestep_fraction
                enough = f"must be at most {most / rollout.num_steps:g} {needs}"
                return [
                    (
                        most > 0,
                        "rollout.noise_level",
                        rollout.noise_level,
                        f"must be above 0 {needs}, with a stochastic rollout.solver",
                    ),
                    (
                        exact,
                        "rollout.regenerate",
                        False,
                        f"must be true, or rollout.explore.precision=bf16, {needs}",
                    ),
                    (self.num_train_sigmas <= (most or rollout.num_steps), field, fraction, enough),
                ]
        return []

    @property
    def num_train_sigmas(self) -> int:
        """Sigmas of the schedule at which each kept sample is trained: `floor(timestep_fraction * steps)`."""
        # HalfPrecisionWeight first, so that 0.29 of 100 steps is 29 although 0.29 * 100 is just below it.
        return math.floor(round(self.algorithm.timestep_fraction * self.rollout.num_steps, 9))

    @property
    def num_recorded_steps(self) -> int:
        """Stochastic steps of each trained sample whose states are kept: all, of an objective that trains on transitions."""
        return self.rollout.num_sde_steps if self.algorithm.trains_on == "transitions" else 0
