"""`Experiment`: the loaded models, rewards and prompts of a configuration."""

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from functools import cached_property, partial

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import UInt32

from solrl_jax.config.batch import samples_per_device
from solrl_jax.config.schema import Config
from solrl_jax.config.sizes import describe_size, evaluation_size, pixel_shape, training_sizes
from solrl_jax.config.values import ConfigError, Size
from solrl_jax.data.prompts import Prompt, load_instruction, load_prompts
from solrl_jax.diffusion.schedule import Schedule
from solrl_jax.diffusion.seeds import prompt_seeds, run_key
from solrl_jax.errors import InputError, as_input_error
from solrl_jax.models.backbone import DTYPES, Backbone, load_backbone
from solrl_jax.models.loading.weights import Params
from solrl_jax.models.locate import mhla_override, open_model
from solrl_jax.models.pipeline import Pipeline
from solrl_jax.parallel import hosts, sharding
from solrl_jax.quant.formats import DeviceInfo, resolve_format, scoring_dtypes
from solrl_jax.rewards.host import score_gray_images
from solrl_jax.rewards.protocol import Reward, score_samples
from solrl_jax.rewards.registry import open_rewards
from solrl_jax.rl.explore.continuation import find_query_steps
from solrl_jax.rl.explore.explorer import Explorer
from solrl_jax.rl.explore.option import Calibration
from solrl_jax.rl.explore.quantized_layers import quantized_paths
from solrl_jax.rl.generate import PromptBatch, SeedBatch, prepare
from solrl_jax.rl.gradient_checkpointing import open_for_training
from solrl_jax.rl.memory_check import check_memory, device_memory
from solrl_jax.rl.objective import load_objective, make_targets_of
from solrl_jax.rl.sampler import Sampler, Segment, make_schedule
from solrl_jax.rl.state import TrainState, abstract_state, init_state, read_start
from solrl_jax.rl.trainable.trainable import Trainable, TrainedPaths, attach, find_trained_paths

# Training prompts that the options of exploration measure on, with one sample each.
CALIBRATION_PROMPTS = 16


@dataclasses.dataclass(frozen=True, eq=False)
class Experiment:
    """The parts of a run that do not change, shared by training, evaluation and ranking.

    Attributes:
        config: The configuration of the run, with `train.num_prompts` and `eval.num_prompts`
            reduced to the prompts that there are. A field that is "auto", such as
            `rollout.explore.precision`, is not resolved in it.
        backbone: The pipeline with the base parameters and the decoder on the mesh. Text encoders
            are loaded when prompts are first encoded.
        reward: The training reward, the weighted sum of the scores in `reward.weights`.
        evaluation_reward: `reward` with the additional scores of `reward.eval_only`, which are
            reported but not part of the sum.
        trained_paths: The paths of the trained parameters, such as
            `transformer_blocks/attn2/to_k/kernel` (one parameter holds all layers of a stack).
            Parameters in `adapted` have LoRA adapters, and those in `whole` are trained in full.
        quantized: The paths of the kernels of the linear layers that exploration may quantize,
            sorted, such as `transformer_blocks/attn2/to_k/kernel`.
        device: The platform, the kind and the CUDA compute capability of the devices of the mesh,
            which are all of one kind.
        train_prompts: The training prompts, distinct and in the order of their file.
        test_prompts: The evaluation prompts, distinct and in the order of their file.
        size: The size of the images, for which the methods and properties of this object make
            schedules and samplers: (height, width) in pixels, or for clips (height, width, number
            of frames).
        exploration_reward: The weighted sum of the scores in `rollout.explore.reward`, which ranks
            the candidates. None: `reward` ranks them as well.
    """

    config: Config
    backbone: Backbone
    reward: Reward
    evaluation_reward: Reward
    trained_paths: TrainedPaths
    quantized: tuple[str, ...]
    device: DeviceInfo
    train_prompts: list[Prompt]
    test_prompts: list[Prompt]
    size: Size
    exploration_reward: Reward | None = None

    @property
    def ranking_reward(self) -> Reward:
        """The reward that ranks candidates: `exploration_reward`, or `reward` if that is None."""
        return self.exploration_reward or self.reward

    @property
    def ranking_weights(self) -> Mapping[str, float]:
        """The weights, by the names of the scores, in the sum that ranks the candidates:
        `rollout.explore.reward`, or `reward.weights` if that is not set.
        """
        return self.config.rollout.explore.reward or self.config.reward.weights

    @property
    def scale(self) -> float:
        """The scale of the adapters, `lora.alpha / lora.rank`: a weight W with the adapter (A, B)
        acts as `W + scale A B`.
        """
        return self.config.lora.alpha / self.config.lora.rank

    @cached_property
    def _by_size(self) -> dict[Size, "Experiment"]:
        """The experiments of other sizes that `with_size` has made from this one, by size."""
        return {}

    def with_size(self, size: Size) -> "Experiment":
        """Returns the same experiment for images of another size.

        The result is cached in this object, together with its explorer and everything that the
        explorer has measured on the base.

        Args:
            size: (height, width) in pixels, or for clips (height, width, number of frames). Whether
                the model supports it is not checked here.

        Returns:
            This object if it has that size already. Otherwise an experiment that shares everything
            but the size and the explorer; repeated calls with one size return the same object. The
            returned experiment has a cache of its own, which does not contain this object.
        """
        if size == self.size:
            return self
        if size not in self._by_size:
            self._by_size[size] = dataclasses.replace(self, size=size)
        return self._by_size[size]

    def for_iteration(self, iteration: int) -> "Experiment":
        """Returns the experiment for images of the size that an iteration trains on.

        The size changes from iteration to iteration: n iterations in a row use each of the n
        configured training sizes once, in a random order that is drawn anew for the next n. The
        order depends on the run's seed alone.

        Args:
            iteration: The number of the iteration, from 1.

        Returns:
            The experiment of that size (`with_size`).

        Raises:
            InputError: If the number is not from 1 to 2**31 - 1.
        """
        if not 1 <= iteration < 2**31:
            raise InputError(f"iteration={iteration}: must be from 1 to {2**31 - 1}")
        sizes = training_sizes(self.config)
        cycle, position = divmod(iteration - 1, len(sizes))
        cycle_key = jax.random.fold_in(run_key(self.config.seed, "sizes"), cycle)
        order = jax.random.permutation(cycle_key, len(sizes))
        return self.with_size(sizes[int(order[position])])

    def policy(self, trained: Trainable) -> Params:
        """Returns the parameters of a policy in the training precision.

        Args:
            trained: The trainable parameters by path, such as
                `transformer_blocks/attn2/to_k/kernel`: LoRA adapters {"a": ..., "b": ...}, or whole
                arrays. An empty mapping gives the base.

        Returns:
            The tree of the base's parameters, which are not copied. Each adapted weight is replaced
            by an unmerged `LowRank` leaf, and each parameter that is trained in full by its whole
            array, cast to the dtype of the base.

        Raises:
            KeyError: If the base has no parameter of a path in `trained`.
        """
        return attach(self.backbone.transformer, trained, self.scale)

    def schedule(self, steps: int, noise_start: int | None = 0) -> Schedule:
        """Returns the schedule of this experiment's model and size: `rl.sampler.make_schedule`.

        Args:
            steps: The number of solver steps, at least 1. The full schedule has
                `rollout.num_steps`.
            noise_start: The first step of the full schedule that adds noise, counted from 0, if
                `rollout.noise_level` is above 0. `rollout.sde_window_size` steps from there on add
                noise, or all if that is None, but never the last step. With fewer `steps`, each
                step adds the noise of the full steps that it covers. With more, `noise_start` and
                the window are counted in steps of the returned schedule. None: no noise.

        Returns:
            The schedule, as arrays on the host.
        """
        pipeline = self.backbone.pipeline
        return make_schedule(self.config.rollout, pipeline, self.size, steps, noise_start)

    @property
    def query_steps(self) -> range | None:
        """The solver steps for training on reward gradients; None for other objectives.

        One of them is drawn for each sample, from its seed. The sample is then trained on the
        latents at the start of that step. The range holds indices, from 0, of the full schedule of
        `rollout.num_steps` steps: its `algorithm.last_steps` last steps or, if that is None, the
        single step that starts nearest to `algorithm.query_sigma`.
        """
        return find_query_steps(self.config, self.backbone.pipeline, self.size)

    def sampler(
        self, name: str, trained: Trainable, steps: int, noise_start: int | None = 0
    ) -> Sampler:
        """Makes a sampler in the training precision, for regeneration, evaluation and calibration.

        Args:
            name: The name of the phase, for progress, e.g. "regenerate" or "evaluate".
            trained: The trainable parameters of the policy by path. An empty mapping gives the
                base.
            steps: The number of solver steps, at least 1.
            noise_start: The first step of the full schedule that adds noise, counted from 0, if
                `rollout.noise_level` is above 0 (`schedule`). None: no noise.

        Returns:
            A sampler that uses the policy for all steps. It records no states (`recorded` is 0 and
            `query_steps` None) and keeps no intermediate latents. Each device generates at once
            `rollout.per_device_batch_size` samples, or its share of all candidates of an iteration
            if that is smaller. The share is their number divided by `data` times `fsdp` (the sizes
            of these mesh axes), rounded up.

        Raises:
            ValueError: If the model does not support the size of the images.
            KeyError: If the base has no parameter of a path in `trained`.
        """
        backbone = self.backbone
        return Sampler(
            name=name,
            segments=(Segment(self.policy(trained), self.schedule(steps, noise_start)),),
            decoder=backbone.decoder,
            shape=backbone.pipeline.latent_shape(*self.size),
            samples_per_device=samples_per_device(self.config, sharding.row_groups(backbone.mesh)),
        )

    @cached_property
    def explorer(self) -> Explorer:
        """The `Explorer` for images of `self.size` with the options of `rollout.explore`. Its
        methods give the schedule, the quantized policy and the sampler of exploration. It is made
        at the first access and kept.

        The options may need measurements on the base, with one sample of each of the first 16
        training prompts. The explorer takes a measurement once, when a method first needs it and
        not at the access. It then also encodes these prompts (`encode_prompts`), so every process
        of a run must call the method. The experiments of other image sizes (`with_size`) have
        explorers of their own, which measure for themselves.

        Raises:
            ValueError: If the model does not support the size of the images.
        """
        config = self.config
        prompts = self.train_prompts[:CALIBRATION_PROMPTS]
        calibration = Calibration(
            backbone=self.backbone,
            sampler=self.sampler("calibrate", {}, config.rollout.num_steps),
            prompts=prompts,
            encode_prompts=partial(self.encode_prompts, prompts),
            seed_batch=SeedBatch.from_seeds(self.seeds("calibration seeds", prompts, 1)),
            micro_batch=config.optimizer.per_device_batch_size,
        )
        return Explorer(
            explore=config.rollout.explore,
            format=resolve_format(config.rollout.explore.precision, self.device),
            quantized=self.quantized,
            scale=self.scale,
            training_precision=config.rollout.precision,
            make_schedule=self.schedule,
            calibration=calibration,
        )

    def prepare_for_ranking(self, prompt_batch: PromptBatch) -> PromptBatch:
        """Returns encoded prompts, prepared for the reward that ranks candidates.

        A reward turns prompts into arrays once (`Reward.prepare`), such as token ids for its own
        text tower. The arrays of `exploration_reward` replace those of `reward`.

        Args:
            prompt_batch: The prompts, prepared for `reward`. It is not changed.

        Returns:
            The same prompts and embeddings, prepared for `exploration_reward`; `prompt_batch`
            itself if there is none, because `reward` then ranks the candidates. Errors of
            `Reward.prepare` pass through.
        """
        if self.exploration_reward is None:
            return prompt_batch
        prepared = self.exploration_reward.prepare(prompt_batch.prompts)
        return dataclasses.replace(prompt_batch, prepared=prepared)

    def encode_prompts(
        self, prompts: Sequence[Prompt], reward: Reward | None = None
    ) -> PromptBatch:
        """Computes the embeddings of prompts, and prepares the prompts for a reward.

        Embeddings come from the cache of prompts on disk (`model.prompt_cache_dir`) if that has
        them. Otherwise this loads the text encoders, leaves them loaded, and writes to the cache if
        there is one. With a cache, the first call may also read the weight files of the text
        encoders, to hash them. Every process of a run must call it with the same arguments.

        Args:
            prompts: The prompts, at least one, each a text with metadata for the reward. The text
                encoders get them after the instruction of `model.instruction`, if it is set, and
                padded or cut to `model.max_sequence_length` tokens. The reward gets them as they
                are.
            reward: The reward that will score images of these prompts. None: they will not be
                scored.

        Returns:
            The prompts, their embeddings and that of the empty prompt (the negative prompt of
            classifier-free guidance) on every device, and the arrays that the reward made from the
            prompts (`Reward.prepare`; None without a reward).

        Raises:
            InputError: If the tokenizer fails or cannot make `model.max_sequence_length` tokens, if
                a file of a text encoder is missing or has other tensors than the network needs, or
                if the folder of the cache cannot be written. Errors of the reward's `prepare` pass
                through.
            FileNotFoundError: If the directory of a tokenizer is missing.
            PermissionError: If a folder of the cache may not be searched.
            RunError: If the disk refuses an entry of the cache, or another process of the run gives
                no answer.
        """
        return prepare(self.backbone, reward, prompts, self.config.model.max_sequence_length)

    def seeds(
        self,
        stream: str,
        prompts: Sequence[str],
        candidates: int,
        *,
        seed: int | None = None,
        iteration: int = 0,
    ) -> UInt32[np.ndarray, "p n 2"]:
        """Returns the seeds of the candidates of each prompt, on the host.

        A seed depends on the root seed, the stream, the iteration, the text of the prompt and the
        index of the candidate, and on nothing else: the same prompt has the same seeds anywhere in
        a list.

        Args:
            stream: The use of the seeds: "candidate" (training), "evaluation", "ranking" or
                "calibration seeds". Each has random numbers of its own.
            prompts: The texts of the p prompts. Equal ones get equal seeds.
            candidates: n, the number of candidates of each prompt.
            seed: The root seed, from 0 to 2**31 - 1. None: the run's `seed` in the configuration,
                for every stream. `eval.seed` is only used if the caller passes it here.
            iteration: The number of the iteration; 0 outside the iterations.

        Returns:
            For each prompt and candidate, the two words of a key.

        Raises:
            KeyError: If `diffusion.seeds.STREAMS` has no such stream.
            OverflowError: If the seed or the iteration is beyond the range of an int32.
        """
        root = self.config.seed if seed is None else seed
        return prompt_seeds(root, stream, prompts, candidates, iteration)


def build(config: Config, *, force: bool = False) -> Experiment:
    """Builds the experiment of a configuration.

    First come the checks that load nothing, then the rewards are loaded, then the model is opened
    and checked against the configuration, and its weights are loaded last. Every process of a run
    must call it with the same arguments.

    Further effects:

    * Functions that the configuration names outside the package are imported. For them, the working
      directory is appended to `sys.path`.
    * Models, files of rewards and prompts may be downloaded from the hub.
    * With several hosts, the first collectives over their devices run. Their processes must have
      called `hosts.initialize` before.
    * Each reward checks all prompts of its set: the test set for `evaluation_reward`, else the
      training set. It is then tried with the first prompt at each image size of the set. Rewards
      inside JAX are only traced. Rewards outside JAX start their worker processes, which keep
      running, and score a gray image, for which judges and services get requests.

    Args:
        config: The configuration, in which "auto" need not be resolved. Where `train.num_prompts`
            or `eval.num_prompts` exceeds the distinct prompts of its set, the experiment has a
            lower number, and a UserWarning says so. A UserWarning is also given if the objective
            trains on reward gradients and `reward.eval_only` is empty.
        force: True skips the check that the largest arrays of the run (latents of all candidates
            of an iteration, latents of an evaluation and the images of its grid, kept samples,
            adapters, a batch of images, parameters trained in full) fit into memory.

    Returns:
        The experiment. Its size is the first of the configured training sizes.

    Raises:
        InputError: If the configuration cannot be run here: a file, model, reward or function is
            missing, unusable or cannot be downloaded (without a network, the hub's cache must have
            it), there are too few devices, the model does not support the image sizes, a reward
            cannot score a prompt, a pattern matches no parameter, or arrays cannot fit into memory.
        ConfigError: If the attribute `trains_on` of an objective `module:function` has an unknown
            value or needs other settings; or if there are fewer distinct training prompts than
            `train.num_prompts`, and every number up to that of the distinct prompts contradicts
            other settings.
        PermissionError: If a parent of the folder of a cache (of prompts or of a judge) may not be
            searched.
        RewardError: If a reward outside JAX fails on the trial image and `reward.on_failure` is
            "stop"; with "skip", a line goes to standard error instead. It is a RunError.
        RunError: If another process of the run gives no answer.
    """
    model = config.model
    rollout = config.rollout
    device = first_device_info()
    check_loaded_objective(config)
    vae_dtype, reward_dtype = scoring_dtypes(rollout.scoring_precision, rollout.precision, device)
    opened_rewards = open_rewards(
        config.reward, reward_dtype, rollout.explore.reward, reward_gradients_for(config)
    )
    opened_rewards.check_sizes((*training_sizes(config), evaluation_size(config)))
    train_prompts, test_prompts = load_prompt_sets(config)
    opened_rewards.check_prompts(train_prompts, test_prompts)
    config, notes = fit_prompt_counts(config, len(train_prompts), len(test_prompts))
    if reward_gradients_for(config) is not None and not config.reward.eval_only:
        notes.append(
            f"algorithm.objective={config.algorithm.objective} follows the gradient of "
            f"{', '.join(config.reward.weights)}, and reward.eval_only watches no other reward, so "
            "that images which only please the reward would go unnoticed"
        )
    for note in notes:
        warnings.warn(note, UserWarning, stacklevel=2)
    instruction = read_instruction(config)
    mesh = open_mesh(config)
    hosts.connect(mesh)
    rewards = opened_rewards.load(sharding.row_mesh(mesh))
    pipeline = open_for_training(
        config, mesh, device_memory(), partial(open_model, model.path, mhla=mhla_override(model))
    )
    for reward in filter(None, (rewards.trained, rewards.explored)):
        for size in set(training_sizes(config)):
            _check_scoring(reward, train_prompts[:1], pipeline, size)
    _check_scoring(rewards.evaluated, test_prompts[:1], pipeline, evaluation_size(config))
    check_guidance(config, pipeline)
    trained_paths, quantized = select_parameters(config, pipeline, device)
    if not force:
        check_memory(config, pipeline, trained_paths, sharding.row_groups(mesh))
    backbone = load_backbone(
        pipeline,
        rollout.precision,
        mesh,
        cache=model.prompt_cache_dir,
        instruction=instruction,
        tile=model.vae_tile_size,
        decoding=vae_dtype,
    )
    return Experiment(
        config=config,
        backbone=backbone,
        reward=rewards.trained,
        evaluation_reward=rewards.evaluated,
        exploration_reward=rewards.explored,
        trained_paths=trained_paths,
        quantized=quantized,
        device=device,
        train_prompts=train_prompts,
        test_prompts=test_prompts,
        size=training_sizes(config)[0],
    )


def check_loaded_objective(config: Config) -> None:
    """Imports the objective of a configuration, and checks the settings that it requires.

    Args:
        config: The configuration. `algorithm.objective` may be `module:function`; the working
            directory is then appended to `sys.path` (`load_objective`).

    Raises:
        InputError: If the objective cannot be imported, or trains on reward gradients and has no
            function that makes targets of them.
        ConfigError: If its attribute `trains_on` is none of "samples", "pairs", "transitions" and
            "reward_gradients", or that value needs other settings (`Config.check_objective`).
    """
    objective = load_objective(config.algorithm.objective)
    config.check_objective()
    if config.algorithm.trains_on == "reward_gradients":
        make_targets_of(objective)


def reward_gradients_for(config: Config) -> str | None:
    """Returns the name of the objective if it trains on the gradient of the reward, else None.

    Args:
        config: The configuration. An objective `module:function` is imported.

    Raises:
        ConfigError: If the attribute `trains_on` of the objective has an unknown value.
        InputError: If an objective `module:function` cannot be imported.
    """
    algorithm = config.algorithm
    return algorithm.objective if algorithm.trains_on == "reward_gradients" else None


def fit_prompt_counts(config: Config, num_train: int, num_test: int) -> tuple[Config, list[str]]:
    """Reduces `train.num_prompts` and `eval.num_prompts`, the prompts of one iteration and of one
    evaluation, to the numbers of prompts that the sets have.

    `train.num_prompts` becomes the largest number up to `num_train` that passes the checks of the
    configuration, such as that the samples of an iteration divide among its optimizer steps.

    Args:
        config: A valid configuration.
        num_train: The number of distinct training prompts, at least 1.
        num_test: The number of distinct test prompts, at least 1.

    Returns:
        The configuration with the numbers reduced (`config` itself if neither is too large), and a
        list with one line of text for each number that was reduced, for a warning.

    Raises:
        ConfigError: If the configuration is invalid with every number of training prompts up to
            `num_train`.
    """
    notes = []
    train = config.train
    if train.num_prompts > num_train:
        config = _with_train_prompts(config, num_train)
        notes.append(
            f"train.num_prompts={train.num_prompts}: prompts.train={config.prompts.train!r} has "
            f"{num_train} distinct prompts, so each iteration takes {config.train.num_prompts}"
        )
    evaluation = config.eval
    if evaluation.num_prompts > num_test:
        fitted = dataclasses.replace(evaluation, num_prompts=num_test)
        config = dataclasses.replace(config, eval=fitted)
        notes.append(
            f"eval.num_prompts={evaluation.num_prompts}: prompts.test={config.prompts.test!r} has "
            f"{num_test} distinct prompts, so each evaluation takes {num_test}"
        )
    return config, notes


def _with_train_prompts(config: Config, most: int) -> Config:
    """Returns a configuration with the largest `train.num_prompts`, from `most` down to 1, with
    which its checks pass.

    Args:
        config: The configuration. All its other settings are kept.
        most: The largest number of prompts to try, at least 1.

    Raises:
        ConfigError: If the checks fail with every number. The error for `most` itself is raised.
    """
    first_error: ConfigError | None = None
    for count in range(most, 0, -1):
        train = dataclasses.replace(config.train, num_prompts=count)
        try:
            return dataclasses.replace(config, train=train)
        except ConfigError as error:
            first_error = first_error or error
    assert first_error is not None
    raise first_error


def _check_scoring(
    reward: Reward, prompts: Sequence[Prompt], pipeline: Pipeline, size: Size
) -> None:
    """Checks that a reward can score images of a size, by trying it.

    The parts of the reward inside JAX prepare the prompt (`Reward.prepare`) and are then only
    traced, for a batch of two images or clips. The part outside JAX scores one gray image or clip
    (two if a reward compares images), for which its worker processes are started and judges and
    services get requests.

    Args:
        reward: The reward, with its parameters loaded.
        prompts: One prompt of the run, in a list.
        pipeline: Gives the shape of the latents of an image of that size.
        size: Height and width of the images in pixels, and the number of frames of clips.

    Raises:
        InputError: If the tracing fails; the message names the size.
        RewardError: If a call outside JAX fails and `reward.on_failure` is "stop"; with "skip", a
            line goes to standard error instead, and the call counts in
            `HostRewards.failures_in_a_row`.
    """
    for part in filter(None, (reward, reward.group)):
        if part.score is None:
            continue
        prepared = part.prepare([*prompts, *prompts])
        images = jax.ShapeDtypeStruct((2, *pixel_shape(size)), np.float32)
        latents = jax.ShapeDtypeStruct((2, *pipeline.latent_shape(*size)), np.float32)
        inputs = part.select_inputs(images, latents)
        head = f"{describe_size(size)} pixels (model, rollout.size or eval.size): {{}}"
        with as_input_error(head.format):
            jax.eval_shape(
                partial(score_samples, part), part.params, inputs, prepared, np.arange(2)
            )
    if reward.host is not None:
        score_gray_images(reward.host, prompts, size)


def check_guidance(config: Config, pipeline: Pipeline) -> None:
    """Checks that the scales of guidance have an effect on the model (`Pipeline.check_guidance`),
    and that an objective that trains on recorded states has no classifier-free guidance.

    Objectives on transitions and on reward gradients train on recorded states. With guidance, the
    steps at these states would not be predicted by the trained policy alone.

    Args:
        config: The configuration of the run. An objective `module:function` is imported.
        pipeline: The pipeline of the model. It decides which setting is the classifier-free scale:
            `rollout.true_cfg_scale` if its network takes the guidance scale as an input (FLUX.1),
            else `rollout.guidance_scale`.

    Raises:
        InputError: If a scale has no effect, such an objective is combined with a classifier-free
            scale above 1, or an objective cannot be imported.
        ConfigError: If the attribute `trains_on` of the objective has an unknown value.
    """
    rollout = config.rollout
    pipeline.check_guidance(rollout.guidance_scale, rollout.true_cfg_scale, "rollout.")
    field = "true_cfg_scale" if pipeline.embedded_guidance else "guidance_scale"
    scale = getattr(rollout, field)
    if config.algorithm.trains_on in ("transitions", "reward_gradients") and scale > 1:
        objective = config.algorithm.objective
        raise InputError(
            f"rollout.{field}={scale}: must be 1 with algorithm.objective={objective}, "
            "whose steps are the trained policy's own"
        )


def select_parameters(
    config: Config, pipeline: Pipeline, device: DeviceInfo
) -> tuple[TrainedPaths, tuple[str, ...]]:
    """Finds the trained parameters of the transformer, and the layers that may be quantized.

    Args:
        config: `train.parameters` and `lora.target_modules` name the parameters to train, and
            `model.quantization` has the rules for quantizing. If `rollout.explore.precision`
            quantizes, the rules must leave at least one layer to quantize.
        pipeline: The pipeline of the model. Only its shapes and names are used; no weight needs to
            be loaded.
        device: The kind of device, which decides the exploration format that "auto" stands for.

    Returns:
        A pair: the paths of the trained parameters (those with LoRA adapters, and those trained in
        full), and the sorted paths of the linear layers that no rule of `model.quantization` keeps
        in the training precision, such as `transformer_blocks/attn2/to_k/kernel`. The latter are
        returned even if the format quantizes nothing.

    Raises:
        InputError: If a pattern or rule matches no parameter; if one of `lora.target_modules`
            matches a parameter that is not the kernel of a linear layer; or if the format of
            exploration quantizes and the rules leave it no linear layer.
    """
    model = config.model
    rollout = config.rollout
    shapes = pipeline.transformer.abstract_params(DTYPES[rollout.precision])
    explore_format = resolve_format(rollout.explore.precision, device)
    with as_input_error():
        trained_paths = find_trained_paths(pipeline.transformer, config)
        return trained_paths, quantized_paths(shapes, model.quantization, explore_format)


def first_device_info() -> DeviceInfo:
    """Reads the properties of the first device that JAX lists (of any host). Also starts JAX's
    backend if nothing has done so before.

    Returns:
        The platform, the kind and the CUDA compute capability of the device; (0, 0) if it has none.
    """
    return DeviceInfo.from_jax(jax.devices()[0])


def load_prompt_sets(config: Config) -> tuple[list[Prompt], list[Prompt]]:
    """Reads the prompts to train on and the prompts to test on.

    The newest revision of a data set of the Hugging Face hub is downloaded unless it is in the
    hub's cache; without a network, the newest one in the cache is read.

    Args:
        config: `prompts.train` and `prompts.test` name the sets, as for
            `data.prompts.load_prompts`: FILE[:COLUMN], "embedded:NAME" for a set that is shipped
            with the package, or "hub:OWNER/DATASET[:SPLIT][:COLUMN]".

    Returns:
        A pair (train, test): the distinct prompts of each set, with their metadata, in the order of
        its file. A prompt may be in both.

    Raises:
        InputError: If a file is missing, cannot be read or downloaded, holds no prompt or more than
            2**20, has a prompt that is blank, over 20,000 characters or with control characters, or
            repeats a prompt with other metadata (in .csv, .tsv and .parquet files and data sets of
            the hub, the first row counts instead).
    """
    return load_prompts(config.prompts.train, "prompts.train"), load_prompts(
        config.prompts.test, "prompts.test"
    )


def read_instruction(config: Config) -> str | None:
    """Reads the text that precedes every prompt but the negative one, from the file
    `model.instruction`.

    Args:
        config: `model.instruction` is the path of the file (a relative one starts at the working
            directory), or None.

    Returns:
        The text without one line feed at its end; None if the configuration names no file.

    Raises:
        InputError: If the file is missing, blank or not text, or has more than 20,000 characters or
            control characters other than white space.
    """
    path = config.model.instruction
    return None if path is None else load_instruction(path, "model.instruction")


def open_mesh(config: Config, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Makes the mesh of a run.

    Args:
        config: Its section `mesh` has the number of devices along each axis.
        devices: The devices to choose from, the first ones first. None: all that JAX has.

    Returns:
        A mesh with the axes `data`, `fsdp`, `sequence` and `tensor`, in the configured sizes. With
        `mesh.data` of -1, the size of `data` is the number of devices divided by the product of the
        others.

    Raises:
        InputError: If there are too few devices, `mesh.data` is -1 and some would be left over, or
            `devices` is None and a process of the run has none in the mesh.
    """
    with as_input_error():
        mesh = sharding.make_mesh(**dataclasses.asdict(config.mesh), devices=devices)
    if devices is None:
        check_processes(mesh, jax.process_count())
    return mesh


def check_processes(mesh: Mesh, count: int) -> None:
    """Checks that each process of a run has a device in the mesh.

    Args:
        mesh: The mesh.
        count: The number of processes.

    Raises:
        InputError: If a process has none.
    """
    idle = set(range(count)) - {device.process_index for device in mesh.devices.flat}
    if idle:
        sizes = ", ".join(f"mesh.{axis}={size}" for axis, size in mesh.shape.items())
        raise InputError(
            f"{sizes}: leaves process {', '.join(map(str, sorted(idle)))} without a device; start "
            "fewer processes, or use all devices"
        )


def fresh_state(experiment: Experiment) -> TrainState:
    """Makes the state before the first iteration: the base or, if `lora.path` is set, the base with
    the adapters in that file or directory on disk (a LoRA of diffusers, PEFT, kohya, ai-toolkit or
    ComfyUI). Every process of a run must call it.

    Args:
        experiment: The run. The initial adapters are drawn from its seed.

    Returns:
        The state on the devices, with step 0. Adapters that `lora.path` does not have get a random
        factor A and a factor B of zero, so they change nothing. In adapters that it has, a rank
        whose column of A and row of B are both zero is initialized likewise. Parameters that are
        trained in full equal those of the base.

    Raises:
        InputError: If the file of `lora.path` cannot be read, has adapters on parameters that the
            run does not adapt, or has another rank or alpha than the run.
    """
    config = experiment.config
    backbone = experiment.backbone
    trained_paths = experiment.trained_paths
    start = read_start(config.lora, trained_paths.adapted, backbone.parameter_table())
    root = run_key(config.seed, "adapters")
    return init_state(
        root,
        backbone.transformer,
        trained_paths,
        config.lora,
        config.optimizer,
        backbone.mesh,
        start=start,
    )


def state_shapes(experiment: Experiment) -> TrainState:
    """Returns the shapes, dtypes and shardings of a run's training state. Nothing is allocated.

    Args:
        experiment: The run. Its network, trained paths, `lora.rank`, optimizer and mesh decide the
            shapes.

    Returns:
        A state with a `jax.ShapeDtypeStruct`, which has a sharding, in place of each array.
    """
    config = experiment.config
    backbone = experiment.backbone
    return abstract_state(
        backbone.transformer, experiment.trained_paths, config.lora, config.optimizer, backbone.mesh
    )
