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
import math
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from solrl_jax.config.migrations import VERSION
from solrl_jax.config.plugins import import_objective
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
)
from solrl_jax.storage.stores import check_run_dir, expand_home

# Objectives of the package (`rl/objectives/`) and what each trains on:
# "samples": the kept samples, noised to a sigma of the schedule;
# "pairs": the best sample of a prompt with its worst, the second best with the second worst, and so
# on;
# "transitions": recorded steps of a stochastic solver;
# "reward_gradients": one recorded state of each sample's trajectory, with targets made from the
# gradient of the reward with respect to the clean latents that the old policy predicts there.
OBJECTIVES = {
    "nft": "samples",
    "awm": "samples",
    "opsd": "reward_gradients",
    "refl": "reward_gradients",
    "draft": "reward_gradients",
    "dpo": "pairs",
    "flow_grpo": "transitions",
    "mix_grpo": "transitions",
    "dance_grpo": "transitions",
    "flow_cps": "transitions",
    "grpo_guard": "transitions",
    "flow_dppo": "transitions",
}

# Number format of an exploration: a name of `quant.formats.FORMATS`, or "auto" for the fastest one
# that the device runs natively.
Precision = Literal["auto", "nvfp4", "fp8", "int8", "bf16", "fp32"]
Solver = Literal["euler", "dpm1", "dpm2", "ddim", "flow_sde", "dance_sde", "cps"]
Combine = Literal["sum", "advantages"]
STOCHASTIC_SOLVERS = ("ddim", "flow_sde", "dance_sde", "cps")


def is_plugin(objective: str) -> bool:
    """Returns whether the name of an objective is that of a user's function, `module:function`.

    Only the form of the name is checked. Nothing is imported.

    Args:
        objective: The value of `algorithm.objective`.
    """
    module, colon, function = objective.partition(":")
    return bool(colon) and function.isidentifier() and all(map(str.isidentifier, module.split(".")))


def _check_objective(name: str) -> str:
    """Returns the name of an objective unchanged if it is accepted, as a pydantic validator.

    Args:
        name: The name of an objective of the package, e.g. "nft", or a user's function
            `module:function`.

    Raises:
        ValueError: If it is neither.
    """
    if name not in OBJECTIVES and not is_plugin(name):
        raise ValueError(f"expected one of {', '.join(OBJECTIVES)}, or module:function")
    return name


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantization(Section):
    """Which linear layers are quantized for exploration, if its number format quantizes.

    A layer is quantized unless one of the first two fields excludes it. The defaults are those of
    the authors of Sol-RL for SANA.

    Attributes:
        modules_to_not_convert: Texts. A layer whose parameter path contains one of them is not
            quantized. Each must be in the path of a layer.
        min_width_ratio: Excludes narrow layers, at least 0. A layer is not quantized if its width,
            the larger of its numbers of inputs and outputs, is at most this factor times that of
            the narrowest layer in the transformer's blocks (without regard to `fused`). 0 excludes
            none.
        fused: Regular expressions of parameter paths, each of which must match a layer. Layers of
            one module that match the same expression count as one layer with all their outputs for
            `min_width_ratio`, because the authors' code fuses them, e.g. keys and values.
    """

    modules_to_not_convert: tuple[Text, ...] = (
        "time_embed",
        "caption_projection",
        "proj_out",
        "attn1/to_q",
        "attn1/to_k",
        "attn1/to_v",
    )
    min_width_ratio: NonNegative = 1.0
    fused: tuple[Regex, ...] = ("transformer_blocks/attn2/to_[kv]/kernel",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model(Section):
    """The pipeline that is post-trained, and how it is held in memory. The defaults are for SANA
    1.6B.

    A leading `~` is expanded in all paths of the configuration.

    Attributes:
        name: The name of the model's file in `configs/model/`, e.g. "sana". `explore=NAME` and
            `mesh=auto` look up the settings of the model by this name. Any other text is accepted
            for a model without a file, for which there are no such settings.
        path: The weights: a directory in the layout of diffusers, the name of a repository on the
            Hugging Face Hub, which is downloaded unless it is in the hub's cache, or
            "embedded:NAME" for a pipeline inside this package.
        height: Image height in pixels, 1 to 16384. `rollout.size` replaces height and width in
            training, and `eval.size` in evaluations.
        width: Image width in pixels, 1 to 16384.
        frames: The number of frames of clips, 1 to 16384, where a size gives only height and width.
            Video models require it. None: the model makes images.
        max_sequence_length: The number of tokens that prompts are padded or cut to, 1 to 2048.
        instruction: A text file with an instruction that precedes every prompt (the
            `complex_human_instruction` of SANA). None: no instruction.
        prompt_cache_dir: A directory that keeps the embeddings of prompts, so that the text
            encoders are loaded only for new prompts. "": a directory in the user's cache (~/.cache
            by default). None: prompts are encoded again in every iteration, by text encoders that
            stay in memory.
        vae_tile_size: The side in pixels, 1 to 16384, of the overlapping tiles in which latents are
            decoded, to save memory; a multiple of the side in pixels of one latent pixel (32 for
            SANA). None: whole images are decoded. Long clips are decoded in chunks of frames in
            either case.
        attention: The attention among image tokens. "default": that of the released network.
            "mhla": multi-head linear attention (arXiv 2601.07832), for SANA only.
        mhla_blocks: For "mhla": the number of equal blocks that the grid of tokens of an image must
            divide into, M in its paper, 1 to 4096.
        mhla_released: For "mhla": True for the variant in its authors' code, False for that in
            their paper.
        mhla_norm: For "mhla": whether queries and keys are normalized even if the released network
            does not normalize them.
        gradient_checkpointing: What the backward pass computes again to save memory. "none":
            nothing. "matmuls": everything but the outputs of linear layers and of attention.
            "blocks": everything but the inputs of blocks. "auto": "matmuls" if it is estimated to
            take at most 75 % of a device's memory, else "blocks".
        quantization: Which linear layers are quantized for exploration.
    """

    name: Text = "sana"
    path: PathText = "Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers"
    height: Pixels = 1024
    width: Pixels = 1024
    frames: Pixels | None = None
    max_sequence_length: Annotated[Integer, Field(ge=1, le=MAX_TOKENS)] = 300
    instruction: PathText | None = None
    prompt_cache_dir: Annotated[str, AfterValidator(expand_home)] | None = ""
    vae_tile_size: Pixels | None = None
    attention: Literal["default", "mhla"] = "default"
    mhla_blocks: Annotated[Integer, Field(ge=1, le=2**12)] = 16
    mhla_released: Bool = False
    mhla_norm: Bool = False
    gradient_checkpointing: Literal["auto", "none", "matmuls", "blocks"] = "auto"
    quantization: Quantization = Quantization()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explore(Section):
    """How the candidates of a prompt are generated for ranking. The defaults are the paper's.

    Attributes:
        precision: The number format in which the transformer runs: "nvfp4", "fp8", "int8", "bf16"
            or "fp32"; "auto" is the fastest one that the device supports natively.
        num_steps: The number of solver steps, 1 to `rollout.num_steps`. It must equal that number
            if `rollout.regenerate` is False.
        sigmas: The noise levels of the steps. "default": the schedule `rollout.schedule` with
            `num_steps` steps. "first": half of the steps (rounded down) are the first ones of the
            schedule with `rollout.num_steps` steps; the others skip evenly through the rest of it,
            and their solver coefficients are fitted to samples of the base model.
        exact_steps: The number of steps at the beginning that run in `rollout.precision` instead,
            at least 0 and less than `num_steps`. No effect if `precision` does not quantize. If
            regeneration has the same first steps and `rollout.noise_level` is 0, it starts from the
            latents after these steps. It starts from noise nevertheless if they are two or more
            steps of the solver "dpm2", or if a state within them may be trained on
            (`rl.explore.continuation`).
        correction_rank: The rank of an unquantized low-rank branch beside each quantized matmul, as
            in SVDQuant, 0 to 4096. 0: no branch.
        attention: "default": softmax attention runs in the training precision. "fp8": it runs in
            FP8 (E4M3) if `precision` quantizes. Only FLUX.1, FLUX.2, SD3 and Wan accept "fp8".
        min_rank_correlation: The smallest accepted Spearman correlation, from -1 to 1, between the
            rewards of a prompt's kept samples in exploration and after regeneration, averaged over
            the prompts of an iteration. If the median over the last 3 iterations is below it, the
            run makes exploration more faithful: first with all solver steps, then in FP8 (if that
            is finer than `precision`), then in the training precision, one change at a time. After
            10 iterations with the same setting, if the median is high enough, the run undoes the
            last change as a trial. Each time that a trial fails, the number of iterations before
            the next one doubles. None: nothing is changed. It needs `rollout.regenerate`, and
            `reward` None.
        reward: Weights of other scores that rank the candidates, by name, for use if those in
            `reward.weights` are too slow or too expensive for all candidates. The kept samples are
            scored by `reward.weights` in any case. None: `reward.weights` ranks the candidates. It
            needs `rollout.regenerate`.
    """

    precision: Precision = "nvfp4"
    num_steps: NumSteps = 6
    sigmas: Literal["default", "first"] = "default"
    exact_steps: NonNegativeInt = 0
    correction_rank: Annotated[Integer, Field(ge=0, le=2**12)] = 0
    attention: Literal["default", "fp8"] = "default"
    min_rank_correlation: Annotated[Number, Field(ge=-1, le=1)] | None = None
    reward: Annotated[dict[str, Number], Field(min_length=1)] | None = dataclasses.field(
        default=None, hash=False
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rollout(Section):
    """How samples are generated: explore candidates cheaply, keep some, and regenerate these
    exactly.

    Attributes:
        candidates: N, the number of candidates per prompt, at least `kept`.
        kept: K, the number of candidates per prompt that are trained on, from 2 to `candidates`. It
            must be even with "best_worst".
        selection: Which candidates are kept, by their explored reward. "best_worst": the K/2 best
            and the K/2 worst. "best_random": the K/2 best (rounded down) and random others.
            "random": random ones. "best": the K best.
        explore: How candidates are generated: number format, steps and noise levels.
        size: The (height, width) in pixels of the images for training, or a tuple of several sizes.
            With n sizes, every block of n iterations uses each of them once, in an order that is
            drawn anew for each block from `seed`. A size of clips may have a number of frames as a
            third entry. None: the size in the section `model`.
        regenerate: True: the kept samples are generated again from the same noise, in `precision`
            with `num_steps` steps. False: the explored samples are trained on.
        num_steps: The number of solver steps of regeneration, 1 to 1000. The update trains at the
            sigmas of the same schedule.
        solver: An ODE solver: "euler", or "dpm1" and "dpm2" (DPM-Solver++ of first and second
            order). Or a stochastic one: "ddim", "flow_sde" (Flow-GRPO), "dance_sde" (DanceGRPO) or
            "cps" (Flow-CPS). Evaluations add no noise.
        noise_level: How much noise a stochastic solver adds, from 0 for none to 1 (eta in DDIM).
            Must be 0 with an ODE solver, and with `explore.sigmas="first"`.
        sde_window_size: The number of consecutive steps that add noise (the window of MixGRPO), at
            least 1 and less than `num_steps`. None: all steps but the last add noise.
        sde_window_every: The number of iterations after which the window moves on by one step, at
            least 1. From its last place, where it ends before the last step, it moves back to the
            first step.
        schedule: How sigmas (noise levels, from 1 for pure noise down to 0) are spaced: "linear"
            equally and then shifted; "sd3" as the released scheduler of SD3 does, which shifts
            twice; "flux" equally, with a shift that follows from the image size.
        shift: The factor k of the shift, which maps a sigma s to k s / (1 + (k - 1) s), from 0.001
            to 1000. Above 1 it moves sigmas towards high noise. "flux" does not use it.
        guidance_scale: The scale of classifier-free guidance, at least 0; up to 1 there is none, as
            in diffusers. FLUX.1-dev is given the scale as an input. FLUX.1-schnell and distilled
            FLUX.2-klein take none, so that it is at most 1.
        true_cfg_scale: The scale of classifier-free guidance for FLUX.1 and distilled FLUX.2-klein,
            at least 0; up to 1 there is none. Other models accept only 1.
        per_device_batch_size: The largest number of samples that one device generates at once, at
            least 1.
        precision: The number format of regeneration, update and evaluation: "bf16" or "fp32".
        scoring_precision: The number format of the decoder and of reward networks. "half": BF16 for
            the decoder and FP16 (on TPUs BF16) for rewards. "fp32": float32. "auto": "half" if
            `precision` is "bf16" and the device computes in BF16; else the dtype that the decoder
            was released for, and float32 for rewards.

    Raises:
        ConfigError: If two fields contradict each other.
    """

    candidates: PositiveInt = 96
    kept: Annotated[Integer, Field(ge=2)] = 24
    selection: Literal["best_worst", "best_random", "random", "best"] = "best_worst"
    explore: Explore = Explore()
    size: Sizes | None = None
    regenerate: Bool = True
    num_steps: NumSteps = 10
    solver: Solver = "euler"
    noise_level: Annotated[Number, Field(ge=0, le=1)] = 0.0
    sde_window_size: NumSteps | None = None
    sde_window_every: PositiveInt = 25
    schedule: Literal["linear", "sd3", "flux"] = "linear"
    shift: Annotated[Number, Field(ge=1e-3, le=1e3)] = 1.0
    guidance_scale: NonNegative = 1.0
    true_cfg_scale: NonNegative = 1.0
    per_device_batch_size: PositiveInt = 16
    precision: Literal["bf16", "fp32"] = "bf16"
    scoring_precision: Literal["auto", "half", "fp32"] = "auto"

    def __post_init__(self) -> None:
        """Checks the fields against each other and against those of `explore`.

        Raises:
            ConfigError: For the first broken rule, in this order: `kept`,
                `explore.min_rank_correlation` and `explore.reward`; the numbers of steps;
                `noise_level` and `sde_window_size`.
            ValueError: If a name in `explore.reward` contains "://" but is no valid URL.
        """
        self._check_selection()
        self._check_steps()
        self._check_noise()

    def _check_selection(self) -> None:
        """Checks `kept`, `explore.min_rank_correlation` and `explore.reward` against other fields.

        Raises:
            ConfigError: If `kept` is above `candidates`, or odd with `selection="best_worst"`; if
                one of these two fields of `explore` is set without `regenerate`, or both are set;
                or if a name in `explore.reward` is a URL with a user name, a password or a token.
            ValueError: If such a name is an invalid URL.
        """
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
        if self.explore.reward is not None:
            self._check_proxy_reward(self.explore.reward)

    def _check_proxy_reward(self, weights: dict[str, float]) -> None:
        """Checks that the candidates can be ranked by other scores than those of training.

        Args:
            weights: The value of `explore.reward`: the weight of each score by its name.

        Raises:
            ConfigError: If samples are not regenerated, `explore.min_rank_correlation` is set, or a
                name is a URL with a user name, a password or a token.
            ValueError: If a name is an invalid URL.
        """
        field = "rollout.explore.reward"
        if not self.regenerate:
            accepted = (
                "must be null with rollout.regenerate=false, where the explored rewards are trained"
                " on"
            )
            raise ConfigError.of_field(field, weights, accepted)
        if self.explore.min_rank_correlation is not None:
            accepted = (
                "must be null with rollout.explore.min_rank_correlation: finer exploration does not"
                " make two rewards agree"
            )
            raise ConfigError.of_field(field, weights, accepted)
        if any(contains_secret(name) for name in weights):
            raise ConfigError(
                f"{field}: the URL of a service must contain no user name, password or token"
            )

    def _check_steps(self) -> None:
        """Checks the numbers of solver steps of exploration.

        Raises:
            ConfigError: If exploration has more steps than regeneration; if samples are not
                regenerated and exploration has another number of steps than `num_steps`; or if
                `explore.exact_steps` is not less than the number of exploration steps.
        """
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
        """Checks that the noise of stochastic steps suits the solver.

        Raises:
            ConfigError: If `noise_level` is not 0 with an ODE solver or with
                `explore.sigmas="first"`; or if `sde_window_size` is not less than `num_steps`.
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
        """The number of the `num_steps` solver steps that add noise: `sde_window_size`, or all but
        the last if that is None; 0 if `noise_level` is 0. They are consecutive.
        """
        if self.noise_level == 0:
            return 0
        return self.sde_window_size or self.num_steps - 1

    def window_start(self, iteration: int) -> int:
        """Returns the index, from 0, of the first solver step that adds noise in an iteration.

        It grows by one after every `sde_window_every` iterations, and starts again at 0 when the
        window would include the last step: its largest value is `num_steps - sde_window_size - 1`.
        It is always 0 without a window (`sde_window_size` is None) or without noise (`noise_level`
        is 0).

        Args:
            iteration: The number of the iteration, from 1.
        """
        if self.sde_window_size is None or self.noise_level == 0:
            return 0
        moves = (iteration - 1) // self.sde_window_every
        return moves % (self.num_steps - self.sde_window_size)


def _fraction_of(sigmas: int, num_steps: int) -> float:
    """Returns the `algorithm.timestep_fraction` that trains so many sigmas.

    Args:
        sigmas: The number of sigmas, from 1 to `num_steps`.
        num_steps: `rollout.num_steps`, at most 1000.

    Returns:
        sigmas / num_steps, rounded up to six decimals. Rounded to the nearest, it could be less and
        train one sigma fewer.
    """
    return math.ceil(sigmas * 10**6 / num_steps) / 10**6


def _default_weights() -> dict[str, float]:
    """Returns the default of `reward.weights`, a new {"pickscore": 1.0}."""
    return {"pickscore": 1.0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reward(Section):
    """The reward: a weighted sum of named scores, and how they are computed.

    A score is named by its reward: a name in the package such as "pickscore", a judge "judge" or
    "judge-NAME", a function `module:function`, an entry point of another package, or the URL of a
    service. If a reward has several scores, one has the name of the reward, and the others are
    named "REWARD/SCORE", e.g. "geneval/strict". Services, judges, functions that score images
    (functions without required arguments build a `solrl_jax.Reward` inside JAX instead), and "ocr",
    "geneval" and the "jpeg_" rewards of the package are rewards outside JAX, which worker processes
    compute.

    Attributes:
        weights: The weight of each score by its name, at least one; {"pickscore": 1.0} by default.
            Weights may be negative.
        paths: Directories or hub repositories of released reward models, by the name of the reward,
            or of a part of it such as "pickscore/tokenizer". Without an entry, it is the released
            repository, or for "hpsv2", "imagereward" and "aesthetic" a file in the working
            directory's folder `weights` that `solrl convert` makes from a released pickle.
            Repositories are downloaded unless they are in the hub's cache.
        options: Keyword arguments of users' functions and of rewards outside JAX, by the name of
            the reward, e.g. {"ocr": {"threads": 2}}.
        eval_only: Names of scores that evaluations compute in addition and that are not trained on.
            They reveal reward hacking.
        workers: The number of processes per host, 1 to 256, that compute rewards outside JAX.
        timeout: The seconds that a reward outside JAX may take for one batch of images, above 0 and
            at most 1e6.
        on_failure: What happens if a call of a reward outside JAX fails. "stop": the run ends.
            "skip": its images have no score, so they are not trained on and not counted in
            evaluations; the run ends after 32 calls of one reward in a row without any score.
        group_size: For rewards that compare images with each other: the largest number of
            candidates of a prompt that they compare at once, 2 to 4096. More candidates are divided
            into groups.
        frames: The number of frames of a clip that rewards score as images, at least 1 (all of
            them, if the clip has fewer). 1: the first frame, and no other is decoded in rollouts.
            More are equally spaced from the first to the last, and the score of the clip is the
            mean over them. No effect on rewards of whole clips. It must be 1 if all rewards are of
            whole clips, or if one compares images with each other.
        combine: How several scores are combined into one ranking and one advantage. "sum": by their
            weighted sum. "advantages": each score is first normalized over the candidates of its
            prompt, so that its scale does not matter (MixGRPO, GDPO); this needs at least two
            scores.

    Raises:
        ConfigError: If a name is a URL with a user name, a password or a token, a score is both in
            `weights` and `eval_only`, or "advantages" has only one score.
        ValueError: If a name is an invalid URL.
    """

    weights: Annotated[dict[str, Number], Field(min_length=1)] = dataclasses.field(
        default_factory=_default_weights, hash=False
    )
    paths: dict[str, PathText] = dataclasses.field(default_factory=dict, hash=False)
    options: dict[str, dict[str, Json]] = dataclasses.field(default_factory=dict, hash=False)
    eval_only: tuple[Text, ...] = ()
    workers: Annotated[Integer, Field(ge=1, le=2**8)] = 2
    timeout: Annotated[Positive, Field(le=1e6)] = 120.0
    on_failure: Literal["stop", "skip"] = "stop"
    group_size: Annotated[Integer, Field(ge=2, le=2**12)] = 24
    frames: PositiveInt = 1
    combine: Combine = "sum"

    def __post_init__(self) -> None:
        """Checks the names of scores, and that `combine` has as many scores as it needs.

        Raises:
            ConfigError: If a name in `weights`, `eval_only` or `options` is a URL with credentials,
                if `eval_only` names a score of `weights`, or if `combine` is "advantages" and
                `weights` has one score.
            ValueError: If a name contains "://" but is no valid URL.
        """
        for name in (*self.weights, *self.eval_only, *self.options):
            if contains_secret(name):
                raise ConfigError(
                    "reward: the URL of a service must contain no user name, password or token,"
                    " because a run records it; put credentials into ~/.netrc"
                )
        if both := [name for name in self.eval_only if name in self.weights]:
            accepted = "must not name scores of reward.weights, which are trained on"
            raise ConfigError.of_field("reward.eval_only", both, accepted)
        if self.combine == "advantages" and len(self.weights) < 2:
            accepted = f"must be sum with one score in reward.weights ({', '.join(self.weights)})"
            raise ConfigError.of_field("reward.combine", self.combine, accepted)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Algorithm(Section):
    """The loss, the advantages it is given, and the two slowly moving copies of the policy.

    These copies are the old policy, which generates the samples, and the EMA, which is evaluated
    and exported.

    Attributes:
        objective: The loss: "nft", "awm", "opsd", "refl", "draft", "dpo", "flow_grpo", "mix_grpo",
            "dance_grpo", "flow_cps", "grpo_guard" or "flow_dppo", or a function of yours as
            `module:function`.
        beta: Above 0, for three objectives. nft and opsd: if v and v_old are the velocities that
            the trained and the old policy predict, `v_old + beta * (v - v_old)` is fitted to good
            samples or targets, and `v_old - beta * (v - v_old)` to bad ones. dpo: the strength of
            the preference.
        kl_coef: The weight in the loss, at least 0, of the distance to the base model (usually the
            mean squared difference of the predicted velocities).
        kl_fraction: The fraction of the loss terms, above 0 and at most 1, for which the distance
            to the base model is computed, to save time. These terms are drawn at random, and their
            distances are scaled up. Their number in a micro-batch of
            `optimizer.per_device_batch_size` terms is rounded up. For example, 0.25 computes the
            distance for one term in micro-batches of 2, and for every term in micro-batches of 1.
            Must be 1 with dpo and with functions of yours.
        clip_range: Above 0, for flow_grpo, mix_grpo, dance_grpo, flow_cps, grpo_guard and awm: the
            probability ratio of the trained to the old policy is clipped to 1 +- this.
        kl_mask_threshold: Above 0, for flow_dppo: where the divergence of the trained from the old
            policy is at least this, terms that would increase it further are left out.
        query_sigma: Above 0 and at most 1, for objectives on reward gradients (opsd, refl, or
            yours): each sample is trained at the state of its trajectory with the nearest noise
            level. Ignored if `last_steps` is set.
        last_steps: At least 1 and at most `rollout.num_steps`, for objectives on reward gradients
            (opsd, refl, draft, or yours): each sample is trained at the beginning of one of this
            many last steps of its trajectory, drawn at random. Must be 1 for draft (the override
            `objective=draft` of a preset sets it, the field `algorithm.objective` alone does not).
            None: at the state that `query_sigma` selects.
        target_radius: Above 0, for opsd: how far the targets lie from the clean latents that the
            old policy predicts, as a fraction of their norm.
        target_steps: At least 1, for opsd: the number of steps along the gradient of the reward in
            which each target is reached.
        adv_clip_max: Advantages, in standard deviations of the reward, are clipped to +- this;
            above 0.
        adv_mode: How the clipped advantages are changed. "all": not at all. "positive_only",
            "negative_only": those of the other sign become 0. "one_only": positive ones become 1,
            others 0. "binary": they are replaced by their sign.
        global_std: Whether rewards, less the mean of their prompt, are divided by the standard
            deviation over the kept samples of the whole iteration (True) or of their own prompt
            (False). With `reward.combine="advantages"`, each score is always divided by the
            standard deviation of its own prompt; True then also divides the weighted sum of the
            scores by its root mean square over the iteration.
        timestep_fraction: The share of the schedule's sigmas at which each sample is trained, above
            0 and at most 1. At least one sigma must result. They are drawn at random for each
            sample. Objectives on transitions (flow_grpo, mix_grpo, dance_grpo, flow_cps,
            grpo_guard, flow_dppo, or yours) draw only from the steps that add noise. opsd, refl and
            draft do not read it.
        decay_type: How slowly the old policy follows the trained one, 0 to 3. After each iteration
            the old policy becomes `d * old + (1 - d) * trained`, with a decay rate d. 0: d is 0, so
            the old policy becomes the trained one. 1: d grows by 0.001 per optimizer step of the
            run up to 0.5. 2: d is 0 up to step 75 and then grows by 0.0075 per step up to 0.999. 3:
            as 1, but up to 0.3.
        ema_decay: The decay rate of the EMA (an exponential moving average of the policy) per
            optimizer step, at least 0 and below 1. At step t, from 1, it is at most (1 + t) / (10 +
            t).

    Raises:
        ConfigError: If `kl_fraction` is below 1 with dpo or a function of yours.
    """

    objective: Annotated[str, AfterValidator(_check_objective)] = "nft"
    beta: Positive = 1.0
    kl_coef: NonNegative = 1e-4
    kl_fraction: Annotated[Number, Field(gt=0, le=1)] = 1.0
    clip_range: Positive = 1e-4
    kl_mask_threshold: Positive = 1e-5
    query_sigma: Annotated[Number, Field(gt=0, le=1)] = 0.278
    last_steps: PositiveInt | None = None
    target_radius: Positive = 0.1
    target_steps: PositiveInt = 2
    adv_clip_max: Positive = 5.0
    adv_mode: Literal["all", "positive_only", "negative_only", "one_only", "binary"] = "all"
    global_std: Bool = True
    timestep_fraction: Annotated[Number, Field(gt=0, le=1)] = 0.6
    decay_type: Annotated[Integer, Field(ge=0, le=3)] = 1
    ema_decay: Decay = 0.9

    def __post_init__(self) -> None:
        """Checks `kl_fraction` against the objective.

        Raises:
            ConfigError: If `kl_fraction` is below 1 and the objective is dpo or `module:function`,
                because these may read the base model's velocity of every term.
        """
        if self.kl_fraction < 1 and (self.objective == "dpo" or is_plugin(self.objective)):
            accepted = (
                f"must be 1 with algorithm.objective={self.objective}, "
                "which may read the base model's velocity of every term"
            )
            raise ConfigError.of_field("algorithm.kl_fraction", self.kl_fraction, accepted)

    @property
    def trains_on(self) -> str:
        """What the objective is computed on: "samples", "pairs", "transitions" or
        "reward_gradients".

        "samples": kept samples, to which noise is added. "pairs": a good and a bad sample of the
        same prompt. "transitions": recorded steps of a stochastic solver. "reward_gradients": one
        recorded state of each sample, with targets that are made from the gradient of the reward. A
        user's function is imported, and its attribute `trains_on` gives this text ("samples" if it
        has none).

        Raises:
            ConfigError: If that attribute has another value.
            InputError: If the function cannot be imported (`import_objective`).
        """
        if not is_plugin(self.objective):
            return OBJECTIVES[self.objective]
        kind = getattr(import_objective(self.objective), "trains_on", "samples")
        if kind not in OBJECTIVES.values():
            kinds = ", ".join(map(repr, dict.fromkeys(OBJECTIVES.values())))
            accepted = f"trains_on={kind!r}; expected one of {kinds}"
            raise ConfigError.of_field("algorithm.objective", self.objective, accepted)
        return kind


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lora(Section):
    """The LoRA adapters. A weight W that has one becomes `W + alpha / rank * A B`.

    Attributes:
        rank: The rank of A and B, 1 to 4096.
        alpha: Adapters are scaled by alpha / rank; above 0.
        target_modules: Regular expressions of parameter paths, at least one. A linear layer gets an
            adapter if the whole path of its kernel matches one of them. Each must match at least
            one such kernel, and no other parameter. The default is for SANA.
        path: A LoRA file or directory to start from, of diffusers, PEFT, kohya, ai-toolkit or
            ComfyUI, with the same rank and alpha. None: training starts from the base model.
        skip_text_encoders: Whether adapters of text encoders in the file `path` are ignored. If
            not, a file with such adapters is refused.
    """

    rank: Annotated[Integer, Field(ge=1, le=2**12)] = 32
    alpha: Positive = 64.0
    target_modules: Annotated[tuple[Regex, ...], Field(min_length=1)] = (
        "transformer_blocks/attn[12]/to_[qkv]/kernel",
        "transformer_blocks/attn[12]/to_out/0/kernel",
    )
    path: PathText | None = None
    skip_text_encoders: Bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimizer(Section):
    """AdamW, and how the loss of an iteration is divided among its steps.

    The loss has one term per kept sample and trained sigma. Each step minimizes the mean of its
    terms.

    Attributes:
        learning_rate: The learning rate of the first step, above 0.
        decay_steps: The number of optimizer steps, at least 0, over which the learning rate falls
            linearly to 0, where it stays. 0: it is constant.
        beta1: The decay rate of the first moment, at least 0 and below 1.
        beta2: The decay rate of the second moment, at least 0 and below 1.
        eps: Added to the root of the second moment, above 0.
        weight_decay: The coefficient of the decoupled weight decay, at least 0. Each step subtracts
            it times the learning rate times the parameter.
        max_grad_norm: The gradient of an optimizer step is scaled down to this global norm if its
            own is larger; above 0.
        steps_per_iteration: The number of optimizer steps per iteration, at least 1. It must divide
            the number of terms.
        per_device_batch_size: The largest number of terms whose gradient one device computes at
            once, at least 1. The gradients of the others are accumulated.
    """

    learning_rate: Positive = 3e-4
    decay_steps: NonNegativeInt = 0
    beta1: Decay = 0.9
    beta2: Decay = 0.999
    eps: Positive = 1e-8
    weight_decay: NonNegative = 1e-4
    max_grad_norm: Positive = 1.0
    steps_per_iteration: PositiveInt = 1
    per_device_batch_size: PositiveInt = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompts(Section):
    """The prompt sets.

    A set is one of these: a text file with one prompt per line; a .json, .jsonl, .ndjson,
    .jsonlines, .csv, .tsv or .parquet file; "embedded:NAME" for a set of this package; or
    `hub:OWNER/DATASET[:SPLIT][:COLUMN]` for a data set on the Hugging Face Hub, by default with the
    split "train" or, without it, the only one. "FILE:COLUMN" names the column of the prompts in a
    file. By default it is the first of "prompt", "Prompt", "Prompts", "caption" and "text" that the
    file has. A repeated prompt counts once. Relative paths start at the working directory.

    Attributes:
        train: The prompts to train on.
        test: The prompts of evaluations.
    """

    train: PathText = "embedded:general-train"
    test: PathText = "embedded:general-test"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train(Section):
    """The length of a run, and what it trains.

    Attributes:
        iterations: The number of iterations, at least 1. Each generates samples, selects some, and
            updates the policy.
        num_prompts: The number of prompts per iteration, at least 1. If the prompt set has fewer,
            it is reduced to the largest number, up to the size of the set, with which the
            configuration is valid: `optimizer.steps_per_iteration` must divide the number of terms,
            for instance.
        parameters: What is trained. "adapters": the LoRA adapters. "all": all parameters of the
            transformer, without adapters. Any other text is a regular expression. Parameters (at
            least one) whose whole path matches it are trained in full, and the other targets of
            `lora` get adapters. A path such as "transformer_blocks/attn2/to_k/kernel" stands for
            the layers of all blocks. Parameters that `model.attention="mhla"` adds are trained in
            full in any case.
    """

    iterations: PositiveInt = 1000
    num_prompts: PositiveInt = 48
    parameters: Annotated[Regex, Field(min_length=1)] = "adapters"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eval(Section):
    """The evaluation of the EMA policy on the test prompts.

    Attributes:
        every: The number of iterations between two evaluations, at least 0. The policy is also
            evaluated before the first and after the last iteration. 0: only then.
        size: The (height, width) of the images in pixels, or (height, width, frames) for clips,
            where `model.frames` replaces a missing number of frames. None: the size in the section
            `model`.
        num_steps: The number of solver steps, 1 to 1000.
        num_prompts: The number of test prompts, from the first one on, at least 1. If the set has
            fewer, all of them are used.
        num_images_per_prompt: The number of images per prompt, at least 1.
        seed: The seed of the initial noise, from 0 to 2^31 - 1. Runs with equal seeds can be
            compared image by image.
        num_grid_images: Each evaluation writes a grid of its images, and one of kept candidates of
            the training iteration that it follows. This is the largest number of images in the
            first and of candidates in the second, 0 to 1024, with up to four per prompt in each. 0:
            no grids.
    """

    every: NonNegativeInt = 50
    size: Size | None = None
    num_steps: NumSteps = 40
    num_prompts: PositiveInt = 512
    num_images_per_prompt: PositiveInt = 1
    seed: Seed = 0
    num_grid_images: Annotated[Integer, Field(ge=0, le=2**10)] = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mesh(Section):
    """The device mesh: the number of devices along each of its four axes.

    Attributes:
        data: The number of devices along the axis whose devices have different samples and the same
            parameters. At least 1, or -1 to use all devices; the product of the other axes must
            then divide their number. Devices that the mesh does not need stay unused, but it must
            contain at least one of each process.
        fsdp: The number of devices along the axis whose devices have different samples and share
            the parameters (fully sharded data parallelism), at least 1.
        tensor: The number of devices along the axis whose devices share each matmul (tensor
            parallelism), at least 1.
        sequence: The number of devices along the axis whose devices share the tokens of each sample
            (sequence parallelism), at least 1. It must divide the tokens of every size.

    Raises:
        ConfigError: If `data` is below 1 and not -1.
    """

    data: Integer = -1
    fsdp: PositiveInt = 1
    tensor: PositiveInt = 1
    sequence: PositiveInt = 1

    def __post_init__(self) -> None:
        """Checks `data`, which is a number of devices, or -1 for all that are left.

        Raises:
            ConfigError: If `data` is below 1 and not -1.
        """
        if self.data < 1 and self.data != -1:
            accepted = "must be at least 1, or -1 for all devices that are left"
            raise ConfigError.of_field("mesh.data", self.data, accepted)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run(Section):
    """The directory of a run, its checkpoints and its records.

    Attributes:
        dir: The run directory: a path, gs://BUCKET/DIRECTORY or s3://BUCKET/DIRECTORY. "": presets
            use runs/PRESET-FAMILY-seedSEED.
        checkpoint_every: The number of iterations between two checkpoints, at least 1. The last
            iteration also saves one.
        keep_checkpoints: The number of checkpoints that are kept, the newest ones, at least 1.
        keep_best: The number of checkpoints with the best "eval/reward" that are kept in addition,
            at least 0. Above 0, every evaluation but that before training saves a checkpoint.
        tensorboard: Whether metrics are also written for TensorBoard.
        wandb: Whether metrics are also sent to Weights & Biases, to the project "solrl_jax".
    """

    dir: Annotated[str, AfterValidator(expand_home), AfterValidator(check_run_dir)] = ""
    checkpoint_every: PositiveInt = 10
    keep_checkpoints: PositiveInt = 3
    keep_best: NonNegativeInt = 0
    tensorboard: Bool = True
    wandb: Bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Section):
    """The whole configuration of a run.

    `Config()` is Sol-RL on SANA 1.6B with PickScore. Calling it checks only rules between fields;
    `config.validation.build_config` also checks the value of each field.

    Attributes:
        version: The version of the layout of the configuration, 3.
        seed: The seed of all random draws except those of evaluations, from 0 to 2^31 - 1.
        preset: The name of the preset that the configuration was made from, for the record.
        family: The name of the preset's family, e.g. "sol_rl", for the record.
        model: The pipeline that is post-trained.
        rollout: How samples are generated.
        reward: The scores and their weights.
        algorithm: The loss, the advantages, and the old policy and the EMA.
        lora: The LoRA adapters.
        optimizer: AdamW, and how the loss is divided among its steps.
        prompts: The prompts for training and for evaluations.
        train: The length of the run, and what it trains.
        eval: How often the policy is evaluated, and on what.
        mesh: The number of devices along each axis of the mesh.
        run: The run directory, its checkpoints and records.

    Raises:
        ConfigError: If fields of different sections contradict each other, for example if the
            optimizer steps do not divide the loss evenly.
    """

    version: Literal[3] = VERSION
    seed: Seed = 0
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
        """Checks the rules between sections, without importing an objective `module:function`.

        Raises:
            ConfigError: From the first check that fails, in this order: `_check_terms`,
                `_check_old_policy`, `_check_sequence` and, for an objective of the package,
                `check_objective`.
        """
        self._check_terms()
        self._check_old_policy()
        self._check_sequence()
        if not is_plugin(self.algorithm.objective):
            self.check_objective()

    def _check_terms(self) -> None:
        """Checks that the loss has terms, and that they divide evenly among the optimizer steps.

        Raises:
            ConfigError: If `algorithm.timestep_fraction` is so small that no sigma is trained, or
                if `optimizer.steps_per_iteration` does not divide `num_terms`.
        """
        if self.num_train_sigmas < 1:
            smallest = _fraction_of(1, self.rollout.num_steps)
            accepted = (
                f"must be at least {smallest:g}, so that one of rollout.num_steps="
                f"{self.rollout.num_steps} sigmas is trained"
            )
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
        """Checks that the old policy can follow the trained one in BF16.

        Raises:
            ConfigError: If `algorithm.decay_type` is 2 while parameters are trained in full (also
                those that `model.attention="mhla"` adds) and `rollout.precision` is "bf16", where
                the small moves of the old policy would be rounded away.
        """
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

    def _check_sequence(self) -> None:
        """Checks that devices that share tokens train adapters alone, or in float32.

        The gradient of a whole parameter is a sum over tokens in the dtype of the network. In BF16,
        the part of each device would be rounded before they are added.

        Raises:
            ConfigError: If `mesh.sequence` is above 1 while `train.parameters` trains parameters in
                full in BF16. Those that `model.attention="mhla"` adds are not considered, because
                SANA refuses "mhla" with sequence parallelism when it is traced.
        """
        in_full = self.train.parameters != "adapters"
        if self.mesh.sequence > 1 and in_full and self.rollout.precision == "bf16":
            accepted = "must be 1 where whole parameters are trained, or rollout.precision=fp32"
            raise ConfigError.of_field("mesh.sequence", self.mesh.sequence, accepted)

    def check_objective(self) -> None:
        """Checks the settings that the objective requires, by what it trains on
        (`Algorithm.trains_on`).

        A user's function is imported for this. Creating a `Config` therefore checks only objectives
        of the package, and this method must be called to check a function.

        Raises:
            ConfigError: If a requirement of the objective is not met, or the attribute `trains_on`
                of a function has an unknown value. An objective on pairs needs an even
                `rollout.kept`, an even `optimizer.per_device_batch_size` and an even number of
                terms per optimizer step. One on transitions needs enough steps that add noise. One
                on reward gradients needs `reward.combine` "sum", a suitable `algorithm.last_steps`
                and (for a function) a single sigma. Without regeneration, the last two kinds also
                need `rollout.explore.precision` "bf16" or "fp32".
            InputError: If the function cannot be imported.
        """
        match self.algorithm.trains_on:
            case "pairs":
                self._check_pairs()
            case "transitions":
                self._check_transitions()
            case "reward_gradients":
                self._check_reward_gradients()

    def _check_pairs(self) -> None:
        """Checks that an objective on pairs of samples gets whole pairs.

        Whether the objective is on pairs is not checked. Terms are those of the loss (`num_terms`).

        Raises:
            ConfigError: If `rollout.kept`, `optimizer.per_device_batch_size` or the number of terms
                per optimizer step is odd.
        """
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
        """Checks that an objective on transitions, i.e. recorded steps of a stochastic solver, gets
        enough steps that add noise.

        Whether the objective is on transitions is not checked.

        Raises:
            ConfigError: If there is only one step, no step adds noise, more sigmas are trained than
                steps add noise, or the samples come from a quantized exploration.
        """
        rollout = self.rollout
        purpose = (
            f"for the transitions that algorithm.objective={self.algorithm.objective} trains on"
        )
        if rollout.num_steps == 1:
            accepted = f"must be at least 2 {purpose}, because the last step adds no noise"
            raise ConfigError.of_field("rollout.num_steps", 1, accepted)
        if rollout.num_sde_steps == 0:
            accepted = f"must be above 0 {purpose}, with a stochastic rollout.solver"
            raise ConfigError.of_field("rollout.noise_level", rollout.noise_level, accepted)
        self._check_recording(purpose)
        if self.num_train_sigmas > rollout.num_sde_steps:
            largest = _fraction_of(rollout.num_sde_steps, rollout.num_steps)
            accepted = f"must be at most {largest:g} {purpose}"
            raise ConfigError.of_field(
                "algorithm.timestep_fraction", self.algorithm.timestep_fraction, accepted
            )

    def _check_recording(self, purpose: str) -> None:
        """Checks that recorded states come from a policy in the training precision.

        Args:
            purpose: The end of the message, which says what they are for.

        Raises:
            ConfigError: If samples are not regenerated and `rollout.explore.precision` is not
                "bf16" or "fp32" ("auto" is refused too).
        """
        rollout = self.rollout
        if not rollout.regenerate and rollout.explore.precision not in ("bf16", "fp32"):
            accepted = f"must be true, or rollout.explore.precision=bf16, {purpose}"
            raise ConfigError.of_field("rollout.regenerate", False, accepted)

    def _check_reward_gradients(self) -> None:
        """Checks that the gradient of the reward can be trained on.

        Whether the objective trains on this gradient is not checked.

        Raises:
            ConfigError: If `rollout.regenerate` is false and `rollout.explore.precision` is not
                "bf16" or "fp32"; if `reward.combine` is not "sum", the only one whose gradient is
                taken; if `algorithm.last_steps` exceeds `rollout.num_steps`, or is not 1 for draft;
                or if an objective `module:function` trains at more than one sigma, by
                `algorithm.timestep_fraction` (those of the package always train at one).
        """
        purpose = f"for the reward gradients of algorithm.objective={self.algorithm.objective}"
        self._check_recording(purpose)
        if self.reward.combine != "sum":
            raise ConfigError.of_field(
                "reward.combine", self.reward.combine, f"must be sum {purpose}"
            )
        last_steps = self.algorithm.last_steps
        if self.algorithm.objective == "draft" and last_steps != 1:
            accepted = (
                "must be 1 with algorithm.objective=draft, whose gradient goes through the last "
                "step alone, since further steps did not pay (docs/objectives.md); refl draws from "
                "several last steps"
            )
            raise ConfigError.of_field("algorithm.last_steps", last_steps, accepted)
        if last_steps is not None and last_steps > self.rollout.num_steps:
            accepted = f"must be at most rollout.num_steps={self.rollout.num_steps} {purpose}"
            raise ConfigError.of_field("algorithm.last_steps", last_steps, accepted)
        if self.num_train_sigmas != 1:
            one = _fraction_of(1, self.rollout.num_steps)
            accepted = f"must be {one:g} {purpose}, taken at one sigma"
            raise ConfigError.of_field(
                "algorithm.timestep_fraction", self.algorithm.timestep_fraction, accepted
            )

    @property
    def num_train_sigmas(self) -> int:
        """The number of sigmas at which each kept sample is trained.

        It is `algorithm.timestep_fraction` times `rollout.num_steps`, rounded down; 1 for
        objectives of the package that train on reward gradients.
        """
        if OBJECTIVES.get(self.algorithm.objective) == "reward_gradients":
            return 1
        # Rounding first makes 0.29 of 100 steps 29, although 0.29 * 100 is just below it in
        # floating point.
        product = round(self.algorithm.timestep_fraction * self.rollout.num_steps, 9)
        return math.floor(product)

    @property
    def training_scores(self) -> tuple[str, ...]:
        """The names of the scores that a training iteration computes.

        They are those in `reward.weights`, and then those in `rollout.explore.reward`, each once.
        """
        return tuple(dict.fromkeys((*self.reward.weights, *(self.rollout.explore.reward or ()))))

    @property
    def num_terms(self) -> int:
        """The number of terms in the loss of an iteration: prompts times kept samples times trained
        sigmas.
        """
        return self.train.num_prompts * self.rollout.kept * self.num_train_sigmas

    @property
    def num_recorded_steps(self) -> int:
        """The number of solver steps that are recorded for training: the latents before the first
        one and after each.

        It is the number of steps that add noise if the objective trains on transitions, and else 0;
        the one state that reward gradients need is not counted. A user's function
        (`algorithm.objective`) is imported for this.

        Raises:
            ConfigError: If the function's attribute `trains_on` has an unknown value.
            InputError: If the function cannot be imported.
        """
        return self.rollout.num_sde_steps if self.algorithm.trains_on == "transitions" else 0
