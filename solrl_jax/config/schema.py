"""The configuration of a run: one frozen dataclass per section, with all defaults.

`Config()` is the paper's main setting: Sol-RL on SANA 1.6B with PickScore. `solrl_jax/configs/`
holds what other models, families, objectives and rewards change, and `config.presets` combines
these files and `key=value` overrides into a `Config`.

A field's type states which values it accepts. It is checked when a configuration is read from YAML
or overrides; rules between fields are checked whenever a section is built. All sections are
hashable, because a configuration is a static argument of jit.

Notation of docs/method.md: G prompts per iteration, N candidates per prompt, K of them kept.
Regular expressions match the whole path of a parameter, e.g. `blocks/attn1/to_q/kernel`. Values
come from the public recipes of Sol-RL (arXiv 2604.06916) and DiffusionNFT (arXiv 2509.16117) unless
a comment says that they are ours.
"""

import dataclasses
import importlib
import math
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from solrl_jax.config.migrations import VERSION
from solrl_jax.config.values import (
    MAX_TOKENS,
    Bool,
    ConfigError,
    Decay,
    Integer,
    Json,
    NonNegative,
    NonNegativeInt,
    Number,
    NumSteps,
    PathText,
    Pixels,
    Positive,
    PositiveInt,
    Regex,
    Section,
    Seed,
    Size,
    Sizes,
    Text,
    contains_secret,
    expand_home,
)

# Objectives of the package (`rl/objectives/`) and what each trains on:
# "samples": the kept samples, noised to a sigma of the schedule;
# "pairs": the best sample of a prompt with its worst, the second best with the second worst, and so
# on;
# "transitions": recorded steps of a stochastic solver.
OBJECTIVES = {
    "nft": "samples",
    "awm": "samples",
    "dpo": "pairs",
    "flow_grpo": "transitions",
    "mix_grpo": "transitions",
    "dance_grpo": "transitions",
}

# Number format of an exploration: a name of `quant.formats.FORMATS`, or "auto" for the fastest one
# that the device runs natively.
Precision = Literal["auto", "nvfp4", "fp8", "bf16", "fp32"]
Solver = Literal["euler", "dpm1", "dpm2", "ddim", "flow_sde", "dance_sde"]
STOCHASTIC_SOLVERS = ("ddim", "flow_sde", "dance_sde")


def is_plugin(objective: str) -> bool:
    """Whether the name of an objective is `module:function`, a function outside the package."""
    module, colon, function = objective.partition(":")
    return bool(colon) and function.isidentifier() and all(map(str.isidentifier, module.split(".")))


def _check_objective(name: str) -> str:
    """Returns the name of an objective. Raises ValueError if it is neither built in nor
    `module:function`.
    """
    if name not in OBJECTIVES and not is_plugin(name):
        raise ValueError(f"expected one of {', '.join(OBJECTIVES)}, or module:function")
    return name


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantization(Section):
    """Which linear layers a quantizing format converts (`rl/explore/quantized_layers.py`).

    A linear layer is quantized unless one of the first two rules keeps it in the training
    precision. The defaults are the authors' rules for SANA, in the parameter names of diffusers.
    """

    # Parts of parameter paths. A linear layer whose path contains one of them stays in the training
    # precision.
    modules_to_not_convert: tuple[Text, ...] = (
        "time_embed",
        "caption_projection",
        "proj_out",
        "attn1/to_q",
        "attn1/to_k",
        "attn1/to_v",
    )
    # Smallest width, as a multiple of the width of the network's blocks. A linear layer whose
    # larger side is at most this wide stays in the training precision. 0 converts layers of any
    # width.
    min_width_ratio: NonNegative = 1.0
    # Linear layers that `min_width_ratio` measures as one layer with joined outputs, because the
    # authors' code fuses them. Those of one module that match the same expression are joined.
    fused: tuple[Regex, ...] = ("transformer_blocks/attn2/to_[kv]/kernel",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model(Section):
    """The pipeline that is post-trained, and how it is held in memory.

    The defaults are those of SANA 1.6B.
    """

    # Name of the model's file in `configs/model/`. Presets and recipes use it; for other models any
    # text will do.
    name: Text = "sana"
    # A directory in the layout of diffusers, the name of a repository on the Hugging Face hub, or
    # "embedded:NAME" for a pipeline that is shipped with the package.
    path: PathText = "Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers"
    # Image size in pixels, up to 16384. Training and evaluation use it unless `rollout.size` and
    # `eval.size` are set.
    height: Pixels = 1024
    width: Pixels = 1024
    # Length in tokens to which prompts are padded or cut.
    max_sequence_length: Annotated[Integer, Field(ge=1, le=MAX_TOKENS)] = 300
    # Text file with an instruction that precedes every prompt (SANA's `complex_human_instruction`).
    # None: no instruction.
    instruction: PathText | None = None
    # Directory that keeps encoded prompts, so that text encoders are loaded only for new prompts.
    # "": the user's own cache, ~/.cache/solrl_jax/prompts. None: prompts are encoded anew in every
    # iteration. A prompt takes 1 to 2 MB. Ours.
    prompt_cache_dir: Annotated[str, AfterValidator(expand_home)] | None = ""
    # Side in pixels of the tiles in which latents are decoded, which saves memory. Neighbouring
    # tiles overlap by a quarter. None: whole images. Ours.
    vae_tile_size: Pixels | None = None
    # Attention among the image tokens. "default": the released network's. "mhla": token-level
    # multi-head linear attention (arXiv 2601.07832) in place of SANA's linear attention, with the
    # three settings below.
    attention: Literal["default", "mhla"] = "default"
    # Number of equal blocks that the tokens of an image are divided into (M of the paper).
    mhla_blocks: Annotated[Integer, Field(ge=1, le=2**12)] = 16
    # True: the variant of the authors' released code. False: the paper's.
    mhla_released: Bool = False
    # Whether queries and keys are normalised where the released network does not do it.
    mhla_norm: Bool = False
    # What the backward pass recomputes. "none": nothing, every intermediate is kept. "matmuls": the
    # outputs of linear layers and of attention are kept, the rest is recomputed. "blocks": only the
    # input of each block is kept. "auto": "matmuls" if that fits into 75 % of a device's memory,
    # else "blocks".
    gradient_checkpointing: Literal["auto", "none", "matmuls", "blocks"] = "auto"
    # Which linear layers are quantized for exploration.
    quantization: Quantization = Quantization()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explore(Section):
    """How the N candidates of a prompt are generated for ranking. The defaults are the paper's."""

    # Format in which the transformer runs.
    precision: Precision = "nvfp4"
    # Solver steps. At most `rollout.num_steps`.
    num_steps: NumSteps = 6
    # Noise levels of the steps. "default": a schedule of its own with `num_steps` steps. "first":
    # the first half of the steps follows the full schedule, the others divide what is left of it
    # and have coefficients fitted to the network.
    sigmas: Literal["default", "first"] = "default"
    # Number of steps at the beginning that run in `rollout.precision`. Less than `num_steps`.
    exact_steps: NonNegativeInt = 0
    # Rank of the unquantized low-rank branch beside each quantized matmul (as in SVDQuant). 0
    # disables it.
    correction_rank: Annotated[Integer, Field(ge=0, le=2**12)] = 0
    # "fp8": softmax attention without a mask runs in E4M3 (FLUX.1, FLUX.2 and SD3). "default": in
    # the training precision.
    attention: Literal["default", "fp8"] = "default"
    # Smallest acceptable Spearman correlation, in [-1, 1], of explored and regenerated rewards over
    # the kept samples. While its median over three iterations is lower, the run explores with more
    # steps, then in finer formats. None: the correlation is only recorded. Ours.
    min_rank_correlation: Annotated[Number, Field(ge=-1, le=1)] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rollout(Section):
    """How samples are generated: explore N candidates per prompt, keep K and regenerate these."""

    # N, the candidates per prompt.
    candidates: PositiveInt = 96
    # K, the candidates per prompt that are trained on. At least 2 and at most `candidates`.
    kept: Annotated[Integer, Field(ge=2)] = 24
    # Which candidates are kept, by their explored reward. "best_worst": the K/2 best and the K/2
    # worst. "best_random": the K/2 best and a random choice of the others. "random": a random
    # choice. "best": the K best.
    selection: Literal["best_worst", "best_random", "random", "best"] = "best_worst"
    explore: Explore = Explore()
    # Size of the images that are trained on: [height, width] in pixels, or a list of sizes. An
    # iteration uses one of them, and as many iterations as there are sizes go through all of them
    # in random order. None: the model's size.
    size: Sizes | None = None
    # True: the kept seeds are regenerated in `precision` with `num_steps` steps. False: the
    # explored samples are trained on.
    regenerate: Bool = True
    # Solver steps of the regeneration and of the schedule at whose sigmas the update trains.
    num_steps: NumSteps = 10
    # ODE solvers "euler", "dpm1" and "dpm2" (DPM-Solver++ of first and second order), and the
    # stochastic "ddim", "flow_sde" (Flow-GRPO) and "dance_sde" (DanceGRPO). Evaluations run a
    # stochastic solver without noise.
    solver: Solver = "euler"
    # Strength in [0, 1] of the noise that a stochastic solver adds (eta of DDIM and DanceGRPO). 0
    # with other solvers.
    noise_level: Annotated[Number, Field(ge=0, le=1)] = 0.0
    # Number of consecutive steps that add noise; the others are deterministic (MixGRPO). None: all
    # but the last.
    sde_window_size: NumSteps | None = None
    # Iterations after which that window moves on by one step. After the last step it starts again
    # at the first.
    sde_window_every: PositiveInt = 25
    # Sigmas of the model family. "linear": equally spaced, then shifted. "sd3": as in the released
    # SD3 scheduler. "flux": equally spaced, with a shift that follows from the image size.
    schedule: Literal["linear", "sd3", "flux"] = "linear"
    # Shift of the sigmas towards high noise, from 0.001 to 1000; 1 does not shift. "flux" computes
    # its own instead.
    shift: Annotated[Number, Field(ge=1e-3, le=1e3)] = 1.0
    # Classifier-free guidance scale; at most 1 disables it, as in diffusers. For models with
    # embedded guidance (FLUX.1) the scale that the network is given.
    guidance_scale: NonNegative = 1.0
    # Classifier-free guidance scale for models with embedded guidance. At most 1 disables it;
    # other models accept only 1.
    true_cfg_scale: NonNegative = 1.0
    # Largest number of samples that one device generates at once. Fewer take less memory.
    per_device_batch_size: PositiveInt = 16
    # Precision of regeneration, update and evaluation.
    precision: Literal["bf16", "fp32"] = "bf16"
    # Precision of decoding and of reward networks. "half": BF16 for decoding and FP16 for rewards
    # (BF16 on TPUs). "fp32": float32 for both. "auto": "half" where the device computes in BF16 and
    # `precision` is "bf16". Ours.
    scoring_precision: Literal["auto", "half", "fp32"] = "auto"

    def __post_init__(self) -> None:
        self._check_selection()
        self._check_steps()
        self._check_noise()

    def _check_selection(self) -> None:
        """Raises ConfigError if `kept` does not fit `candidates`, `selection` and `regenerate`."""
        if self.kept > self.candidates:
            accepted = f"must be at most rollout.candidates={self.candidates}"
            raise ConfigError.of_field("rollout.kept", self.kept, accepted)
        if self.selection == "best_worst" and self.kept % 2:
            accepted = "must be even with rollout.selection=best_worst"
            raise ConfigError.of_field("rollout.kept", self.kept, accepted)
        if not self.regenerate and self.explore.min_rank_correlation is not None:
            field = "rollout.explore.min_rank_correlation"
            accepted = (
                "must be null with rollout.regenerate=false, which has no samples to compare with"
            )
            raise ConfigError.of_field(field, self.explore.min_rank_correlation, accepted)

    def _check_steps(self) -> None:
        """Raises ConfigError if the numbers of steps of exploration and regeneration do not fit."""
        field = "rollout.explore.num_steps"
        explored = self.explore.num_steps
        if self.regenerate and explored > self.num_steps:
            accepted = f"must be at most rollout.num_steps={self.num_steps}"
            raise ConfigError.of_field(field, explored, accepted)
        # The update trains at the sigmas of the full schedule. Samples that are not regenerated
        # must have followed it.
        if not self.regenerate and explored != self.num_steps:
            accepted = (
                f"must equal rollout.num_steps={self.num_steps} with rollout.regenerate=false"
            )
            raise ConfigError.of_field(field, explored, accepted)
        if self.explore.exact_steps >= explored:
            accepted = f"must be less than {field}={explored}"
            raise ConfigError.of_field(
                "rollout.explore.exact_steps", self.explore.exact_steps, accepted
            )

    def _check_noise(self) -> None:
        """Raises ConfigError if `noise_level` or `sde_window_size` does not fit solver and
        steps.
        """
        if self.noise_level and self.solver not in STOCHASTIC_SOLVERS:
            accepted = f"must be 0 with rollout.solver={self.solver}"
            raise ConfigError.of_field("rollout.noise_level", self.noise_level, accepted)
        if self.noise_level and self.explore.sigmas == "first":
            accepted = "must be 0 with rollout.explore.sigmas=first"
            raise ConfigError.of_field("rollout.noise_level", self.noise_level, accepted)
        if self.sde_window_size is not None and self.sde_window_size >= self.num_steps:
            accepted = f"must be less than rollout.num_steps={self.num_steps}"
            raise ConfigError.of_field("rollout.sde_window_size", self.sde_window_size, accepted)

    @property
    def num_sde_steps(self) -> int:
        """Number of steps of the full schedule that add noise. They are consecutive."""
        if self.noise_level == 0:
            return 0
        return self.sde_window_size or self.num_steps - 1

    def window_start(self, iteration: int) -> int:
        """The index of the first step that adds noise.

        Args:
          iteration: the iteration of the run, counted from 1.
        """
        if self.sde_window_size is None:
            return 0
        moves = (iteration - 1) // self.sde_window_every
        return moves % (self.num_steps - self.sde_window_size)


def _default_weights() -> dict[str, float]:
    """Returns the weight of each reward by default: PickScore alone."""
    return {"pickscore": 1.0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reward(Section):
    """The reward: a weighted sum of named scores (`rewards/mixture.py`).

    A name is one of `rewards.registry.REWARDS`, a function `module:function`, or the URL of a
    service.
    """

    # Weight of each score by its name. The mappings of this section are compared but not hashed.
    weights: Annotated[dict[str, Number], Field(min_length=1)] = dataclasses.field(
        default_factory=_default_weights, hash=False
    )
    # Directories or hub names of released reward models, by the names of `rewards/sources.py`.
    # Others come from the hub.
    paths: dict[str, PathText] = dataclasses.field(default_factory=dict, hash=False)
    # Keyword arguments of functions and of rewards outside JAX, by the name of the reward.
    options: dict[str, dict[str, Json]] = dataclasses.field(default_factory=dict, hash=False)
    # Scores that evaluations record but that are never trained on, to notice reward hacking.
    eval_only: tuple[Text, ...] = ()
    # Number of processes that score images. This and the next two fields are for rewards outside
    # JAX, and are ours.
    workers: Annotated[Integer, Field(ge=1, le=2**8)] = 2
    # Seconds that a process may take for one batch of images.
    timeout: Annotated[Positive, Field(le=1e6)] = 120.0
    # What a failed call leads to. "stop": the run ends. "skip": its images have no score and are
    # not trained on.
    on_failure: Literal["stop", "skip"] = "stop"

    def __post_init__(self) -> None:
        for name in (*self.weights, *self.eval_only, *self.options):
            if contains_secret(name):
                raise ConfigError(
                    "reward: the URL of a service must contain no user name, password or token,"
                    " because a run records it; put credentials into ~/.netrc"
                )
        if both := [name for name in self.eval_only if name in self.weights]:
            accepted = "must not name scores of reward.weights, which are trained on"
            raise ConfigError.of_field("reward.eval_only", both, accepted)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Algorithm(Section):
    """The objective, the advantages it is given, and the two slowly moving copies of the policy."""

    # A name of `OBJECTIVES`, or `module:function` for an objective of yours (`rl/objective.py`).
    # The files of `configs/objective/` set the other fields as the objective's paper does.
    objective: Annotated[str, AfterValidator(_check_objective)] = "nft"
    # nft: how far the implicit positive policy leans from the old policy to the trained one. dpo:
    # strength of the preference, which stands for the KL penalty. Other objectives do not read it.
    beta: Positive = 1.0
    # Weight of the distance to the base model: of velocities, or of the means of stochastic steps
    # (beta of Flow-GRPO and TRL).
    kl_coef: NonNegative = 1e-4
    # flow_grpo, mix_grpo, dance_grpo and awm: the probability ratio of trained to old policy is
    # clipped to 1 +- this.
    clip_range: Positive = 1e-4
    # Advantages are clipped to +- this, in standard deviations.
    adv_clip_max: Positive = 5.0
    # What is made of the advantages. "all": nothing. "positive_only", "negative_only": the other
    # sign becomes 0. "one_only": 1 where positive, else 0. "binary": their sign.
    adv_mode: Literal["all", "positive_only", "negative_only", "one_only", "binary"] = "all"
    # True: rewards are divided by their standard deviation over the whole iteration. False: over
    # their own prompt.
    global_std: Bool = True
    # Share in (0, 1] of the schedule's sigmas at which each sample is trained.
    timestep_fraction: Annotated[Number, Field(gt=0, le=1)] = 0.6
    # How slowly the old policy, which generates the samples, follows the trained one
    # (DiffusionNFT). 0: at once. 1: its decay grows by 0.001 per optimizer step up to 0.5. 2: from
    # step 75 on by 0.0075 per step up to 0.999. 3: as 1, but up to 0.3 (AWM).
    decay_type: Annotated[Integer, Field(ge=0, le=3)] = 1
    # Decay in [0, 1) of the exponential moving average of the policy, which is evaluated.
    ema_decay: Decay = 0.9

    @property
    def trains_on(self) -> str:
        """What the objective trains on: "samples", "pairs" or "transitions" (see `OBJECTIVES`).

        For an objective `module:function` the module is imported, and the attribute `trains_on` of
        the function says it; without this attribute it is "samples".
        """
        if not is_plugin(self.objective):
            return OBJECTIVES[self.objective]
        module, _, function = self.objective.partition(":")
        kind = getattr(getattr(importlib.import_module(module), function), "trains_on", "samples")
        if kind not in OBJECTIVES.values():
            accepted = f"trains_on={kind!r}; expected 'samples', 'pairs' or 'transitions'"
            raise ConfigError.of_field("algorithm.objective", self.objective, accepted)
        return kind


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lora(Section):
    """The LoRA adapters: `W + alpha / rank * A B` for each kernel W that a target matches."""

    # Rank of A and B.
    rank: Annotated[Integer, Field(ge=1, le=2**12)] = 32
    # Scale of the adapters, divided by the rank.
    alpha: Positive = 64.0
    # The kernels that get an adapter. The default matches the attention of SANA.
    target_modules: Annotated[tuple[Regex, ...], Field(min_length=1)] = (
        "transformer_blocks/attn[12]/to_[qkv]/kernel",
        "transformer_blocks/attn[12]/to_out/0/kernel",
    )
    # LoRA file or directory to start from, of diffusers, PEFT, kohya, ai-toolkit or ComfyUI. None:
    # start from the base model.
    path: PathText | None = None
    # Whether adapters of text encoders in that file are left out. Otherwise such a file is refused.
    skip_text_encoders: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimizer(Section):
    """AdamW, and how an iteration's terms are divided among its steps.

    A term is one sample at one sigma.
    """

    learning_rate: Positive = 3e-4
    # Optimizer steps over which the learning rate falls linearly to 0. 0: it is constant.
    decay_steps: NonNegativeInt = 0
    # Decay rates of the first and second moments.
    beta1: Decay = 0.9
    beta2: Decay = 0.999
    # Added to the root of the second moment.
    eps: Positive = 1e-8
    weight_decay: NonNegative = 1e-4
    # Largest global norm of the gradient; larger gradients are scaled down to it.
    max_grad_norm: Positive = 1.0
    # Optimizer steps per iteration. Must divide the number of terms.
    steps_per_iteration: PositiveInt = 1
    # Largest number of terms that one device differentiates at once; gradients are accumulated over
    # the rest.
    per_device_batch_size: PositiveInt = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompts(Section):
    """The prompt sets (`data/prompts.py`).

    A text file with one prompt per line, a .json, .jsonl, .csv, .tsv or .parquet file with
    metadata, "FILE:COLUMN" to name the column of its prompts, or "embedded:NAME".
    """

    # Files, relative to the directory in which the run is started.
    train: PathText = "prompts/pickscore/train.txt"
    test: PathText = "prompts/pickscore/test.txt"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train(Section):
    """The length of a run and what it trains."""

    # Number of iterations: generate, select, update. Ours.
    iterations: PositiveInt = 1000
    # G, the prompts per iteration.
    num_prompts: PositiveInt = 48
    # What is trained. "adapters": the adapters of `lora`. "all": all parameters. A regular
    # expression: the parameters that it matches are trained themselves, and adapters on others.
    parameters: Annotated[Regex, Field(min_length=1)] = "adapters"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eval(Section):
    """The evaluation of the averaged policy on the test prompts.

    The defaults are ours, but for `num_steps`.
    """

    # Iterations between two evaluations. 0: only before and after the run.
    every: NonNegativeInt = 50
    # [height, width] in pixels. None: the model's size.
    size: Size | None = None
    # Solver steps.
    num_steps: NumSteps = 40
    # Number of test prompts, the first of the set, and of images for each of them.
    num_prompts: PositiveInt = 512
    num_images_per_prompt: PositiveInt = 1
    # Seed of the initial noise, apart from the run's seed so that runs can be compared image by
    # image.
    seed: Seed = 0
    # Number of images, four per prompt, in the image grid that every evaluation writes. 0: no grid.
    num_grid_images: Annotated[Integer, Field(ge=0, le=2**10)] = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mesh(Section):
    """The device mesh: the number of devices along each of its three axes."""

    # Axis that divides the samples and replicates the parameters. -1: all devices that the other
    # two axes leave.
    data: Integer = -1
    # Axis that divides the samples and the parameters (fully sharded data parallelism).
    fsdp: PositiveInt = 1
    # Axis that divides each matmul (tensor parallelism).
    tensor: PositiveInt = 1

    def __post_init__(self) -> None:
        if self.data < 1 and self.data != -1:
            accepted = "must be at least 1, or -1 for all devices that are left"
            raise ConfigError.of_field("mesh.data", self.data, accepted)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run(Section):
    """Where a run is written, and what is kept of it. The defaults are ours."""

    # The run directory. "": presets use runs/<preset>-<family>-seed<seed>.
    dir: Annotated[str, AfterValidator(expand_home)] = ""
    # Iterations between two checkpoints. They are written while the next iteration runs; with 1,
    # before it starts.
    checkpoint_every: PositiveInt = 10
    # Number of checkpoints that are kept, the newest.
    keep_checkpoints: PositiveInt = 3
    # Number of checkpoints with the highest eval/reward that are kept beside them. Above 0, every
    # evaluation saves a checkpoint.
    keep_best: NonNegativeInt = 0
    # Whether metrics are also written for TensorBoard and sent to Weights & Biases.
    tensorboard: Bool = True
    wandb: Bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Section):
    """The whole configuration of a run."""

    # Layout of the configuration. Files of the previous version are translated
    # (`config.migrations`).
    version: Literal[3] = VERSION
    # Seed of all random draws but those of evaluations. Ours.
    seed: Seed = 0
    # Names of the preset and of the family that the configuration was made from, for the record.
    # Nothing else depends on them, except which settings `explore=NAME` changes.
    preset: Text = "sana_sol_rl_pickscore"
    family: Text = "sol_rl"
    model: Model = Model()
    rollout: Rollout = Rollout()
    reward: Reward = Reward()
    algorithm: Algorithm = Algorithm()
    lora: Lora = Lora()
    optimizer: Optimizer = Optimizer()
    prompts: Prompts = Prompts()
    train: Train = Train()
    eval: Eval = Eval()
    mesh: Mesh = Mesh()
    run: Run = Run()

    def __post_init__(self) -> None:
        self._check_terms()
        self._check_old_policy()
        if not is_plugin(self.algorithm.objective):
            self.check_objective()

    def _check_terms(self) -> None:
        """Raises ConfigError if no sigma is trained, or if the terms do not divide among the
        steps.
        """
        if self.num_train_sigmas < 1:
            smallest = 1 / self.rollout.num_steps
            accepted = f"must be at least 1 / rollout.num_steps = {smallest:.3g}"
            raise ConfigError.of_field(
                "algorithm.timestep_fraction", self.algorithm.timestep_fraction, accepted
            )
        if self.num_terms % self.optimizer.steps_per_iteration:
            accepted = (
                f"must divide train.num_prompts * rollout.kept * trained sigmas = {self.num_terms}"
            )
            raise ConfigError.of_field(
                "optimizer.steps_per_iteration", self.optimizer.steps_per_iteration, accepted
            )

    def _check_old_policy(self) -> None:
        """Raises ConfigError if the old policy would be rounded away in BF16."""
        only_adapters = self.train.parameters == "adapters" and self.model.attention != "mhla"
        # With a decay of 0.999 the old policy moves by a thousandth of the difference, which BF16
        # weights round away.
        if (
            not only_adapters
            and self.algorithm.decay_type == 2
            and self.rollout.precision == "bf16"
        ):
            accepted = (
                "must be 0, 1 or 3, or rollout.precision=fp32, where whole parameters are trained"
            )
            raise ConfigError.of_field("algorithm.decay_type", 2, accepted)

    def check_objective(self) -> None:
        """Checks the settings that the samples of the objective require. Raises ConfigError.

        `Algorithm.trains_on` says what the objective trains on: "samples" require nothing more,
        "pairs" and "transitions" do. Built-in objectives are checked whenever a configuration is
        built. For an objective `module:function` this imports the module, so whoever loads the
        objective calls it.
        """
        match self.algorithm.trains_on:
            case "pairs":
                self._check_pairs()
            case "transitions":
                self._check_transitions()

    def _check_pairs(self) -> None:
        """Raises ConfigError if an objective that trains on pairs would get half a pair."""
        purpose = f"for the pairs of algorithm.objective={self.algorithm.objective}"
        batch_size = self.optimizer.per_device_batch_size
        steps = self.optimizer.steps_per_iteration
        if self.rollout.kept % 2:
            raise ConfigError.of_field("rollout.kept", self.rollout.kept, f"must be even {purpose}")
        if batch_size % 2:
            field = "optimizer.per_device_batch_size"
            raise ConfigError.of_field(field, batch_size, f"must be even {purpose}")
        if self.num_terms // steps % 2:
            accepted = f"must leave an even number of terms per step {purpose}"
            raise ConfigError.of_field("optimizer.steps_per_iteration", steps, accepted)

    def _check_transitions(self) -> None:
        """Raises ConfigError if an objective that trains on SDE transitions would get too few or
        none.
        """
        rollout = self.rollout
        purpose = (
            f"for the transitions that algorithm.objective={self.algorithm.objective} trains on"
        )
        if rollout.num_sde_steps == 0:
            accepted = f"must be above 0 {purpose}, with a stochastic rollout.solver"
            raise ConfigError.of_field("rollout.noise_level", rollout.noise_level, accepted)
        if not rollout.regenerate and rollout.explore.precision not in ("bf16", "fp32"):
            accepted = f"must be true, or rollout.explore.precision=bf16, {purpose}"
            raise ConfigError.of_field("rollout.regenerate", False, accepted)
        if self.num_train_sigmas > rollout.num_sde_steps:
            largest = rollout.num_sde_steps / rollout.num_steps
            accepted = f"must be at most {largest:g} {purpose}"
            raise ConfigError.of_field(
                "algorithm.timestep_fraction", self.algorithm.timestep_fraction, accepted
            )

    @property
    def num_train_sigmas(self) -> int:
        """Number of sigmas at which each kept sample is trained.

        `floor(timestep_fraction * num_steps)` in exact arithmetic.
        """
        # Rounding first makes 0.29 of 100 steps 29, although 0.29 * 100 is just below it in
        # floating point.
        product = round(self.algorithm.timestep_fraction * self.rollout.num_steps, 9)
        return math.floor(product)

    @property
    def num_terms(self) -> int:
        """Number of terms of an iteration's loss: prompts * kept samples * sigmas."""
        return self.train.num_prompts * self.rollout.kept * self.num_train_sigmas

    @property
    def num_recorded_steps(self) -> int:
        """Number of stochastic steps whose states are recorded for each sample.

        0 unless the objective trains on transitions.
        """
        return self.rollout.num_sde_steps if self.algorithm.trains_on == "transitions" else 0
