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
    """Whether the name of an objective is `module:function`, a function outside the package.

    Only the form is checked, and nothing is imported: a dotted module of Python identifiers, one
    colon, and an identifier.

    Args:
        objective: The value of `algorithm.objective`.
    """
    module, colon, function = objective.partition(":")
    return bool(colon) and function.isidentifier() and all(map(str.isidentifier, module.split(".")))


def _check_objective(name: str) -> str:
    """Returns the name of an objective unchanged.

    Args:
        name: "nft", "awm", "dpo" or another key of `OBJECTIVES`, or `module:function`.

    Raises:
        ValueError: If it is neither. The message lists the accepted values.
    """
    if name not in OBJECTIVES and not is_plugin(name):
        raise ValueError(f"expected one of {', '.join(OBJECTIVES)}, or module:function")
    return name


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantization(Section):
    """Which linear layers a quantizing format converts (`rl/explore/quantized_layers.py`).

    A linear layer is quantized unless `modules_to_not_convert` or `min_width_ratio` keeps it in the
    training precision. The defaults are the authors' rules for SANA, in the parameter names of
    diffusers.

    Attributes:
        modules_to_not_convert: Parts of parameter paths, not empty (plain text, no expressions). A
            linear layer whose path contains one of them stays in the training precision.
        min_width_ratio: At least 0. The width of a linear layer is the larger of its numbers of
            inputs and outputs, and the width of the network that of its narrowest layer in the
            blocks. A layer whose width is at most `min_width_ratio` times that of the network stays
            in the training precision. 0 converts layers of any width.
        fused: Regular expressions of parameter paths, for layers that the authors' code fuses, such
            as keys and values. Linear layers of one module that match the same expression have one
            width for `min_width_ratio`: that of a layer with the outputs of all of them.
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
    """The pipeline that is post-trained, and how it is held in memory.

    The defaults are those of SANA 1.6B.

    Attributes:
        name: Name of the model's file in `configs/model/`. Presets and recipes use it; for other
            models any text will do that is not empty.
        path: A directory in the layout of diffusers, the name of a repository on the Hugging Face
            hub, or "embedded:NAME" for a pipeline that is shipped with the package. A leading `~`
            is expanded, here and in all other paths.
        height: Image height in pixels, 1 to 16384. Training and evaluation use it unless
            `rollout.size` and `eval.size` are set.
        width: Image width in pixels, 1 to 16384. Training and evaluation use it unless
            `rollout.size` and `eval.size` are set.
        max_sequence_length: Length in tokens to which prompts are padded or cut, 1 to 2048.
        instruction: Text file with an instruction that precedes every prompt (SANA's
            `complex_human_instruction`). None: no instruction.
        prompt_cache_dir: Directory that keeps encoded prompts, so that text encoders are loaded
            only for new prompts. "": `solrl_jax/prompts` in the user's cache directory
            (XDG_CACHE_HOME, by default ~/.cache). None: prompts are encoded anew in every
            iteration. A prompt takes 1 to 2 MB. Ours.
        vae_tile_size: Side in pixels, 1 to 16384, of the tiles in which latents are decoded, which
            saves memory. Neighbouring tiles overlap by a quarter. None: whole images. Ours.
        attention: Attention among the image tokens. "default": the released network's. "mhla":
            token-level multi-head linear attention (arXiv 2601.07832) in place of SANA's linear
            attention. The three `mhla_*` settings have an effect only with "mhla".
        mhla_blocks: Number of equal blocks that the tokens of an image are divided into (M of the
            paper), 1 to 4096.
        mhla_released: True: the variant of the authors' released code. False: the paper's.
        mhla_norm: Whether multi-head linear attention normalises queries and keys where the
            released network does not do it.
        gradient_checkpointing: What the backward pass recomputes. "none": nothing, every
            intermediate is kept. "matmuls": the outputs of linear layers and of attention are kept,
            the rest is recomputed. "blocks": only the input of each block is kept. "auto":
            "matmuls" if the base model and the outputs that it keeps take at most 75 % of a
            device's memory, by an estimate from the shapes, else "blocks".
        quantization: Which linear layers are quantized for exploration, in formats that quantize.
    """

    name: Text = "sana"
    path: PathText = "Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers"
    height: Pixels = 1024
    width: Pixels = 1024
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
    """How the N candidates of a prompt are generated for ranking. The defaults are the paper's.

    Attributes:
        precision: Number format in which the transformer runs: a name of `quant.formats.FORMATS`
            ("nvfp4", "fp8", "int8", "bf16" or "fp32"), or "auto" for the fastest one that the
            device runs natively.
        num_steps: Solver steps, 1 to 1000. At most `rollout.num_steps`, and equal to it with
            `rollout.regenerate=false`.
        sigmas: Noise levels of the steps. "default": the schedule of `rollout.schedule` with
            `num_steps` steps. "first": the first `num_steps` / 2 steps (rounded down) are the first
            ones of the schedule with `rollout.num_steps` steps; the others divide the rest of
            it, with solver coefficients that are fitted to the base model.
        exact_steps: Number of steps at the beginning that run in `rollout.precision`. At least 0
            and less than `num_steps`.
        correction_rank: Rank of the unquantized low-rank branch beside each quantized matmul (as in
            SVDQuant), 0 to 4096. 0 disables it.
        attention: "fp8": softmax attention without a mask runs in E4M3 (FLUX.1, FLUX.2 and SD3; a
            run with another model is refused). It has no effect in formats that quantize nothing.
            On TPUs, on GPUs before Hopper and for some sizes of heads only its inputs and results
            are rounded. "default": in the training precision.
        min_rank_correlation: Smallest acceptable Spearman correlation, in [-1, 1], of explored and
            regenerated rewards over the kept samples. While its median over three iterations is
            lower, the run explores with more steps, then in finer formats. None: the correlation is
            only recorded. Must be None with `rollout.regenerate=false` or with `reward`. Ours.
        reward: Weights of the scores that rank the candidates, by name, where the scores of
            `reward.weights` are too slow or too dear for all of them; at least one. The kept
            candidates are scored by `reward.weights` in any case. None: these rank the candidates
            as well. Must be None with `rollout.regenerate=false`. Compared, but not hashed. Ours.
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
    """How samples are generated: explore N candidates per prompt, keep K and regenerate these.

    Attributes:
        candidates: N, the candidates per prompt; at least 1.
        kept: K, the candidates per prompt that are trained on. At least 2 and at most `candidates`;
            even with "best_worst".
        selection: Which candidates are kept, by their explored reward. "best_worst": the K/2 best
            and the K/2 worst. "best_random": the K/2 best (rounded down) and a random choice of the
            others. "random": a random choice. "best": the K best.
        explore: How the candidates are generated: format, steps and noise levels.
        size: Size of the images that are trained on: (height, width) in pixels, or several sizes
            (YAML takes one size without the outer list). An iteration uses one of them, and as many
            iterations as there are sizes go through all of them in random order. None: the model's
            size.
        regenerate: True: the kept seeds are regenerated in `precision` with `num_steps` steps.
            False: the explored samples are trained on.
        num_steps: Solver steps, 1 to 1000, of the regeneration and of the schedule at whose sigmas
            the update trains.
        solver: ODE solvers "euler", "dpm1" and "dpm2" (DPM-Solver++ of first and second order), and
            the stochastic "ddim", "flow_sde" (Flow-GRPO), "dance_sde" (DanceGRPO) and "cps"
            (Flow-CPS). Evaluations run a stochastic solver without noise.
        noise_level: Strength in [0, 1] of the noise that a stochastic solver adds (eta of DDIM,
            DanceGRPO and Flow-CPS). Must be 0 with other solvers, and with
            `explore.sigmas="first"`.
        sde_window_size: Number of consecutive steps that add noise; the steps before and after them
            are deterministic (MixGRPO). At least 1 and less than `num_steps`. None: all steps but
            the last add noise.
        sde_window_every: Iterations after which that window moves on by one step; at least 1. After
            its last place it starts again at the first step. No effect without `sde_window_size`.
        schedule: Sigmas of the model family. "linear": equally spaced, then shifted. "sd3": equally
            spaced between ends that are shifted already, then shifted again, as in the released
            scheduler. "flux": equally spaced, with a shift that follows from the image size.
        shift: Factor k of the shift k s / (1 + (k - 1) s) of a sigma s, from 0.001 to 1000. Above 1
            it shifts towards high noise, 1 does not shift. "flux" computes its own instead.
        guidance_scale: Classifier-free guidance scale, at least 0; at most 1 disables it, as in
            diffusers. For models with embedded guidance (FLUX.1) the scale that the network is
            given.
        true_cfg_scale: Classifier-free guidance scale for models with embedded guidance, at least
            0. At most 1 disables it; other models accept only 1.
        per_device_batch_size: Largest number of samples that one device generates at once; at least
            1. Fewer take less memory.
        precision: "bf16" or "fp32", of regeneration, update and evaluation.
        scoring_precision: Precision of decoding and of reward networks. "half": BF16 for decoding
            and FP16 for rewards (BF16 on TPUs). "fp32": float32 for both. "auto": "half" where the
            device computes in BF16 and `precision` is "bf16". Ours.

    Raises:
        ConfigError: If `kept`, `explore`, `noise_level` or `sde_window_size` breaks a rule above.
            The first broken rule is reported.
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
        """Checks `kept` and two fields of `explore` against the other fields.

        Raises:
            ConfigError: If `kept` is above `candidates`, or is odd with `selection="best_worst"`;
                if `explore.min_rank_correlation` is set without `regenerate`; or if
                `explore.reward` is set without `regenerate`, together with
                `explore.min_rank_correlation`, or with a URL that has credentials.
            ValueError: If a name in `explore.reward` contains "://" but is no valid URL.
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
        """Checks that the candidates can be ranked by a reward of their own.

        Args:
            weights: `explore.reward`: the weight of each score by its name.

        Raises:
            ConfigError: If samples are not regenerated (`regenerate`), if
                `explore.min_rank_correlation` is set, or if a name is a URL with credentials.
            ValueError: If a name contains "://" but is no valid URL.
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
        """Checks the numbers of steps of exploration against those of regeneration.

        Raises:
            ConfigError: If `explore.num_steps` is above `num_steps` with `regenerate`, or differs
                from it without; or if `explore.exact_steps` is not less than `explore.num_steps`.
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
        """Checks `noise_level` and `sde_window_size` against solver, sigmas and steps.

        Raises:
            ConfigError: If `noise_level` is not 0 although the solver is not stochastic or
                `explore.sigmas` is "first"; or if `sde_window_size` is not less than `num_steps`.
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
        """Number of steps of the full schedule that add noise. They are consecutive.

        0 if `noise_level` is 0; else `sde_window_size`, or if that is None all steps but the last.
        """
        if self.noise_level == 0:
            return 0
        return self.sde_window_size or self.num_steps - 1

    def window_start(self, iteration: int) -> int:
        """The index, from 0, of the first step that adds noise in an iteration.

        Args:
            iteration: The iteration of the run, counted from 1.

        Returns:
            0 in the first `sde_window_every` iterations, then 1 in as many, and so on; after
            `num_steps - sde_window_size - 1` it starts again at 0, so that the last step never adds
            noise. Always 0 if `sde_window_size` is None. `noise_level` is not read.
        """
        if self.sde_window_size is None:
            return 0
        moves = (iteration - 1) // self.sde_window_every
        return moves % (self.num_steps - self.sde_window_size)


def _default_weights() -> dict[str, float]:
    """Returns the weight of each reward by default, a new dict: PickScore alone, with weight 1."""
    return {"pickscore": 1.0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reward(Section):
    """The reward: a weighted sum of named scores (`rewards/mixture.py`).

    A name is one of `rewards.registry.REWARDS`, "judge-NAME" for a further judge, an entry point of
    another package, a function `module:function`, or the URL of a service. "REWARD/OTHER" is
    another score of a reward, such as "geneval/strict". Whether it exists is not checked here. The
    mappings are compared, but not hashed.

    Attributes:
        weights: Weight of each score by its name: finite numbers, also negative ones; at least one
            entry.
        paths: Directories or hub names of released reward models, by the keys of
            `rewards.sources.SOURCES`, e.g. "pickscore" or "pickscore/tokenizer". Without an entry
            the released repository of the hub is used, or a converted file in `weights/`.
        options: Keyword arguments (values of JSON) of functions and of rewards outside JAX, by the
            name of the reward, e.g. {"ocr": {"threads": 2}}.
        eval_only: Names of scores that evaluations record but that are never trained on, to notice
            reward hacking.
        workers: Number of processes on each host that score images, 1 to 256. This and the next two
            fields are for rewards outside JAX, and are ours.
        timeout: Seconds that a process may take for one batch of images, or for a group with all
            its pairs; above 0 and at most 1e6.
        on_failure: What a failed call leads to. "stop": the run ends. "skip": its images have no
            score and are not trained on; after 32 calls of one reward in a row without any score
            the run ends.
        group_size: Most candidates of a prompt that a groupwise or pairwise reward compares with
            each other, 2 to 4096. Larger pools are divided into groups of nearly equal size. A
            pairwise reward compares a group of g images in g (g - 1) pairs, both orders included.
            The default is the paper's number of kept candidates.
        combine: How several scores make one ranking and one advantage (`rl/combine.py`). "sum": by
            their weighted sum. "advantages": each is normalised over the candidates of its prompt,
            and the results are summed with the weights (MixGRPO, GDPO), so that the scale of a
            score does not matter; `weights` needs at least two scores. It also ranks by the scores
            of `rollout.explore.reward`. The metric "reward" is the weighted sum in any case.

    Raises:
        ConfigError: If a name in `weights`, `eval_only` or `options` is a URL with credentials, if
            `eval_only` names a score of `weights`, or if `combine` is "advantages" and `weights`
            has one score.
        ValueError: If a name contains "://" but is no valid URL.
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
    """The objective, the advantages it is given, and the two slowly moving copies of the policy.

    Attributes:
        objective: "nft", "awm", "dpo", "flow_grpo", "mix_grpo", "dance_grpo", "flow_cps",
            "grpo_guard" or "flow_dppo" (`OBJECTIVES`), or `module:function` for an objective of
            yours (`rl/objective.py`). The files of `configs/objective/` set the other fields as the
            objective's paper does.
        beta: Above 0. nft: how far the implicit positive policy leans from the old policy to the
            trained one. dpo: strength of the preference, which stands for the KL penalty. Other
            objectives of the package do not read it; one of yours may.
        kl_coef: Weight, at least 0, of the distance to the base model in the loss: the mean squared
            difference of both velocities, or, in some objectives on transitions, of the means of
            stochastic steps over their variance (beta of Flow-GRPO and TRL).
        kl_fraction: Fraction in (0, 1] of the terms at which that distance is computed, drawn at
            random and rounded up to whole terms of a micro-batch; the others skip the base model.
            The distance is scaled up, so its mean has the same expectation. Must be 1 with dpo and
            with objectives of yours. Ours.
        clip_range: Above 0. flow_grpo, mix_grpo, dance_grpo, flow_cps, grpo_guard and awm: the
            probability ratio of trained to old policy is clipped to 1 +- this. Other objectives of
            the package do not read it; one of yours may.
        kl_mask_threshold: Above 0. flow_dppo: the divergence of trained and old policy at a step,
            as the mean over dimensions, from which on terms that increase it are left out. Other
            objectives of the package do not read it; one of yours may.
        adv_clip_max: Advantages are clipped to +- this, in standard deviations; above 0.
        adv_mode: What is made of the advantages. "all": nothing. "positive_only", "negative_only":
            the other sign becomes 0. "one_only": 1 where positive, else 0. "binary": their sign.
        global_std: True: rewards are divided by their standard deviation over the whole iteration.
            False: over their own prompt. With `reward.combine=advantages`, each score is divided by
            its standard deviation over the prompt in any case, and True also divides the sum by
            that of all sums of the iteration.
        timestep_fraction: Share in (0, 1] of the schedule's sigmas at which each sample is trained.
            At least 1 / `rollout.num_steps`, so that there is one.
        decay_type: How slowly the old policy, which generates the samples, follows the trained one
            (DiffusionNFT). 0: at once. 1: its decay grows by 0.001 per optimizer step up to 0.5. 2:
            0 up to step 75, from there on it grows by 0.0075 per step up to 0.999. 3: as 1, but up
            to 0.3 (AWM).
        ema_decay: Decay in [0, 1) of the exponential moving average of the policy, which is
            evaluated.

    Raises:
        ConfigError: If `kl_fraction` is below 1 with dpo or an objective of yours.
    """

    objective: Annotated[str, AfterValidator(_check_objective)] = "nft"
    beta: Positive = 1.0
    kl_coef: NonNegative = 1e-4
    kl_fraction: Annotated[Number, Field(gt=0, le=1)] = 1.0
    clip_range: Positive = 1e-4
    kl_mask_threshold: Positive = 1e-5
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
        """What the objective trains on: "samples", "pairs" or "transitions".

        "samples" are the kept samples, noised to a sigma of the schedule; "pairs" the best sample
        of a prompt with its worst, the second best with the second worst, and so on; "transitions"
        recorded steps of a stochastic solver. For an objective `module:function` the module is
        imported, and the attribute `trains_on` of the function says it; without this attribute it
        is "samples".

        Raises:
            ConfigError: If that attribute is none of the three.
            ImportError, AttributeError: If the module or the function does not exist.
            KeyError: If the objective is neither built in nor of the form `module:function`.
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
    """The LoRA adapters: `W + alpha / rank * A B` for each kernel W that a target matches.

    Attributes:
        rank: Rank of A and B, 1 to 4096.
        alpha: Scale of the adapters before it is divided by the rank; above 0.
        target_modules: Regular expressions, at least one, of the whole paths of the kernels that
            get an adapter. The default matches the attention of SANA.
        path: LoRA file or directory to start from, of diffusers, PEFT, kohya, ai-toolkit or
            ComfyUI. Its rank and alpha must equal those above, and it may adapt only kernels that
            the run adapts. None: start from the base model.
        skip_text_encoders: Whether adapters of text encoders in that file are left out. Otherwise
            such a file is refused.
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
    """AdamW, and how an iteration's terms are divided among its steps.

    A term is one sample at one sigma.

    Attributes:
        learning_rate: Learning rate of the first step; above 0.
        decay_steps: Optimizer steps over which the learning rate falls linearly to 0; at least 0.
            0: it is constant.
        beta1: Decay rate of the first moment, in [0, 1).
        beta2: Decay rate of the second moment, in [0, 1).
        eps: Added to the root of the second moment; above 0.
        weight_decay: Coefficient of the decoupled weight decay, at least 0.
        max_grad_norm: Largest global norm of the gradient, above 0; larger gradients are scaled
            down to it.
        steps_per_iteration: Optimizer steps per iteration, at least 1. Must divide the number of
            terms.
        per_device_batch_size: Largest number of terms that one device differentiates at once, at
            least 1; gradients are accumulated over the rest.
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
    """The prompt sets (`data/prompts.py`).

    Each is a text file with one prompt per line, a .json, .jsonl, .csv, .tsv or .parquet file with
    metadata, "FILE:COLUMN" to name the column of its prompts, "embedded:NAME" for a set of this
    package, or "hub:OWNER/DATASET[:SPLIT][:COLUMN]" for a data set of the hub. Relative paths start
    at the directory in which the run is started; nothing is read here. The defaults are ours.

    Attributes:
        train: The prompts that are trained on.
        test: The prompts that evaluations generate.
    """

    train: PathText = "embedded:general-train"
    test: PathText = "embedded:general-test"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train(Section):
    """The length of a run and what it trains.

    Attributes:
        iterations: Number of iterations: generate, select, update. At least 1. Ours.
        num_prompts: G, the prompts per iteration; at least 1. A run with fewer prompts takes all.
        parameters: What is trained. "adapters": the adapters of `lora`. "all": all parameters. A
            regular expression (not empty): the parameters whose whole path it matches are trained
            themselves, and the adapters of `lora` on its other targets. Parameters that
            `model.attention="mhla"` adds are always trained themselves.
    """

    iterations: PositiveInt = 1000
    num_prompts: PositiveInt = 48
    parameters: Annotated[Regex, Field(min_length=1)] = "adapters"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eval(Section):
    """The evaluation of the averaged policy on the test prompts.

    The defaults are ours, but for `num_steps`.

    Attributes:
        every: Iterations between two evaluations; at least 0. 0: only before and after the run.
        size: (height, width) in pixels. None: the model's size.
        num_steps: Solver steps, 1 to 1000.
        num_prompts: Number of test prompts, the first of the set; at least 1. If there are fewer,
            all are taken.
        num_images_per_prompt: Number of images for each of these prompts; at least 1.
        seed: Seed of the initial noise, from 0 to 2^31 - 1. It is apart from the run's seed, so
            that runs can be compared image by image.
        num_grid_images: Largest number of images, four per prompt, in the image grid that every
            evaluation writes; 0 to 1024. It is rounded down to whole prompts. 0: no grid.
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
    """The device mesh: the number of devices along each of its three axes.

    Whether their product equals the number of devices is not checked here.

    Attributes:
        data: Axis that divides the samples and replicates the parameters. At least 1, or -1: all
            devices that the other two axes leave.
        fsdp: Axis that divides the samples and the parameters (fully sharded data parallelism); at
            least 1.
        tensor: Axis that divides each matmul (tensor parallelism); at least 1.

    Raises:
        ConfigError: If `data` is below 1 and not -1.
    """

    data: Integer = -1
    fsdp: PositiveInt = 1
    tensor: PositiveInt = 1

    def __post_init__(self) -> None:
        """Checks `data`, which is the only field with two kinds of values.

        Raises:
            ConfigError: If `data` is below 1 and not -1.
        """
        if self.data < 1 and self.data != -1:
            accepted = "must be at least 1, or -1 for all devices that are left"
            raise ConfigError.of_field("mesh.data", self.data, accepted)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run(Section):
    """The directory of a run, and its checkpoints and records. The defaults are ours.

    Attributes:
        dir: The run directory. "": presets use runs/<preset>-<family>-seed<seed>.
        checkpoint_every: Iterations between two checkpoints, at least 1. They are written while the
            next iteration runs; with 1, before it starts.
        keep_checkpoints: Number of checkpoints that are kept, the newest; at least 1.
        keep_best: Number of checkpoints with the highest eval/reward that are kept beside them; at
            least 0. Above 0, every evaluation saves a checkpoint.
        tensorboard: Whether metrics are also written for TensorBoard.
        wandb: Whether metrics are also sent to Weights & Biases.
    """

    dir: Annotated[str, AfterValidator(expand_home)] = ""
    checkpoint_every: PositiveInt = 10
    keep_checkpoints: PositiveInt = 3
    keep_best: NonNegativeInt = 0
    tensorboard: Bool = True
    wandb: Bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Section):
    """The whole configuration of a run: a frozen, hashable dataclass of sections.

    `Config()` is Sol-RL on SANA 1.6B with PickScore. Values that are passed directly are not
    checked against the fields' types; `config.validation.build_config` does so. Rules between
    fields are checked always.

    Attributes:
        version: Layout of the configuration, 3. Files of version 2 are translated
            (`config.migrations`).
        seed: Seed of all random draws but those of evaluations, from 0 to 2^31 - 1. Ours.
        preset: Name of the preset that the configuration was made from, for the record; nothing
            else depends on it, except the default of `run.dir`.
        family: Name of the family that the configuration was made from, for the record; nothing
            else depends on it, except the default of `run.dir` and which settings `explore=NAME`
            changes.
        model: The pipeline that is post-trained: its weights, image size and memory.
        rollout: How samples are generated: candidates, selection, solver and precision.
        reward: The scores with their weights, and how they are computed.
        algorithm: The objective, the advantages, and the decay of the old and the averaged policy.
        lora: The adapters. No effect with `train.parameters="all"`.
        optimizer: AdamW, and how the terms of an iteration are divided among its steps.
        prompts: The prompts for training and for evaluations.
        train: The length of the run and what it trains.
        eval: How often and on what the averaged policy is evaluated.
        mesh: The number of devices along each axis of the mesh.
        run: The run directory, and its checkpoints and records.

    Raises:
        ConfigError: For the first rule between sections that is broken: no sigma is trained; terms
            do not divide among the optimizer steps; the old policy would be rounded away in BF16;
            or, with an objective of the package, pairs are split by an odd number of samples or
            terms, or transitions lack noise (`check_objective`).
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
            ConfigError: For the first broken rule, in this order: a sigma is trained, and terms
                divide among the optimizer steps; BF16 does not round the old policy's moves away;
                and, with an objective of the package, its pairs are whole or its transitions have
                noise.
        """
        self._check_terms()
        self._check_old_policy()
        if not is_plugin(self.algorithm.objective):
            self.check_objective()

    def _check_terms(self) -> None:
        """Checks that there are terms, and that they divide among the optimizer steps.

        Raises:
            ConfigError: If `algorithm.timestep_fraction` is below 1 / `rollout.num_steps`, so that
                no sigma is trained; or if `optimizer.steps_per_iteration` does not divide
                `num_terms`.
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
        """Checks that BF16 does not round the moves of the old policy away.

        Raises:
            ConfigError: If `algorithm.decay_type` is 2 and `rollout.precision` is "bf16" while more
                than adapters is trained: `train.parameters` is not "adapters", or `model.attention`
                is "mhla".
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

    def check_objective(self) -> None:
        """Checks the settings that the objective requires.

        `Algorithm.trains_on` says what the objective trains on: "samples" require nothing more,
        "pairs" and "transitions" do. Built-in objectives are checked whenever a configuration is
        built. For an objective `module:function` this imports the module, so whoever loads the
        objective calls it.

        Raises:
            ConfigError: For "pairs": if `rollout.kept`, `optimizer.per_device_batch_size` or the
                number of terms per optimizer step is odd. For "transitions": if no step adds noise,
                samples come from a quantized exploration, or more sigmas are trained than steps add
                noise. Also if the function's `trains_on` is none of the three.
            ImportError, AttributeError: If the module or function of the objective does not exist.
        """
        match self.algorithm.trains_on:
            case "pairs":
                self._check_pairs()
            case "transitions":
                self._check_transitions()

    def _check_pairs(self) -> None:
        """Checks that an objective that trains on pairs gets whole pairs.

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
        """Checks that an objective that trains on stochastic transitions gets enough of them.

        Raises:
            ConfigError: If no step adds noise (`rollout.num_sde_steps` is 0); if samples are not
                regenerated and `rollout.explore.precision` is not "bf16" or "fp32"; or if more
                sigmas are trained (`num_train_sigmas`) than steps add noise.
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

        `floor(timestep_fraction * num_steps)` in decimal arithmetic: 0.29 of 100 steps are 29. At
        least 1 in a valid configuration.
        """
        # Rounding first makes 0.29 of 100 steps 29, although 0.29 * 100 is just below it in
        # floating point.
        product = round(self.algorithm.timestep_fraction * self.rollout.num_steps, 9)
        return math.floor(product)

    @property
    def training_scores(self) -> tuple[str, ...]:
        """The names of the scores that training depends on, each once.

        Those of `reward.weights`, then those that only rank candidates (`rollout.explore.reward`).
        Scores that are only watched (`reward.eval_only`) are not among them.
        """
        return tuple(dict.fromkeys((*self.reward.weights, *(self.rollout.explore.reward or ()))))

    @property
    def num_terms(self) -> int:
        """Number of terms of an iteration's loss: prompts * kept samples per prompt * sigmas."""
        return self.train.num_prompts * self.rollout.kept * self.num_train_sigmas

    @property
    def num_recorded_steps(self) -> int:
        """Number of stochastic steps whose states are recorded for each sample.

        `rollout.num_sde_steps` if the objective trains on transitions, else 0. For an objective
        `module:function` this imports the module.

        Raises:
            ConfigError: If the objective's attribute `trains_on` has an unknown value.
            ImportError, AttributeError: If its module or function does not exist.
        """
        return self.rollout.num_sde_steps if self.algorithm.trains_on == "transitions" else 0
