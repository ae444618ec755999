"""An `Experiment`: a configuration made real. What training, evaluation and ranking share, loaded and checked once."""

import dataclasses
from functools import partial

import numpy as np
from jaxtyping import UInt32

from solrl_jax import sharding
from solrl_jax.backbone import Backbone, Params, load_backbone
from solrl_jax.config import Config
from solrl_jax.files import InputError
from solrl_jax.keys import candidate_seeds, prompt_uid
from solrl_jax.policy.lora import Adapters, attach, matching, merge_and_quantize
from solrl_jax.prompts import load_prompts
from solrl_jax.rewards import Reward, make_reward
from solrl_jax.rollout.generate import Grid
from solrl_jax.sharding import make_mesh

# merged in one program, layer stacks at once; the base is read, never copied
quantize_policy = sharding.jit(merge_and_quantize, static_argnums=(2, 3))


@dataclasses.dataclass(frozen=True)
class Experiment:
    """The parts of a run that never change."""

    config: Config
    backbone: Backbone
    reward: Reward
    targets: tuple[str, ...]  # parameters with an adapter
    quantized: tuple[str, ...]  # parameters held in NVFP4 while exploring in that precision
    train_prompts: list[str]
    test_prompts: list[str]

    @property
    def scale(self) -> float:
        """What the product of an adapter's two factors is multiplied by: alpha / rank."""
        return self.config.lora.alpha / self.config.lora.rank

    @property
    def size(self) -> tuple[int, int]:
        return self.config.model.height, self.config.model.width

    def grid(self, steps: int) -> Grid:
        """The run's solver and schedule with `steps` steps."""
        pipeline = self.backbone.pipeline
        return Grid.of(self.config.rollout, steps, pipeline.image_tokens(*self.size), pipeline.embedded_guidance)

    def policy(self, adapters: Adapters) -> Params:
        """The policy of `adapters`, exactly: the base with the adapters beside it, in the training precision."""
        return attach(self.backbone.transformer, adapters, self.scale)

    def exploring_policy(self, adapters: Adapters, precision: str) -> Params:
        """The policy that explores: the same, or with the quantised linears merged and in NVFP4 ("sync" in the paper)."""
        if precision != "nvfp4":
            return self.policy(adapters)
        codes = quantize_policy(self.backbone.transformer, adapters, self.scale, self.quantized)
        return attach(self.backbone.transformer, adapters, self.scale, codes)

    def seeds(self, root: int, iteration: int, prompts: list[str], candidates: int) -> UInt32[np.ndarray, "p n 2"]:
        """The seeds of `candidates` candidates of each prompt, on the host."""
        uids = np.array([prompt_uid(p) for p in prompts], np.uint32)
        return np.asarray(candidate_seeds(np.int32(root), np.int32(iteration), uids, np.arange(candidates)))


def build(config: Config) -> Experiment:
    """Checks everything that can be checked cheaply, then loads. Raises InputError in one line."""
    reward = make_reward(config.reward.weights)
    train, test = load_prompts(config.prompts.train, "prompts.train"), load_prompts(config.prompts.test, "prompts.test")
    for field, wanted, there in (("train.prompts", config.train.prompts, train), ("eval.prompts", config.eval.prompts, test)):
        if wanted > len(there):
            raise InputError(f"{field}={wanted}: must be at most the {len(there)} distinct prompts of its file")
    reward.prepare(train[:1] + test[:1])  # a prompt the reward cannot read is found before the weights are
    try:
        mesh = make_mesh(config.mesh.data, config.mesh.fsdp)
    except ValueError as error:
        raise InputError(str(error)) from error
    backbone = load_backbone(config.model.path, config.rollout.precision, mesh, config.model.remat)
    match = partial(matching, backbone.transformer)
    try:
        backbone.pipeline.latent_shape(config.model.height, config.model.width)
        targets = match(config.lora.targets, "lora.targets")
        quantized = match(config.model.quantize, "model.quantize")
    except ValueError as error:
        raise InputError(str(error)) from error
    return Experiment(config, backbone, reward, tuple(targets), tuple(quantized), train, test)
