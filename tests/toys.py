"""A network of two linears in place of a pipeline: an iteration of it compiles in seconds."""

import contextlib
import dataclasses
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from solrl_jax.config.schema import STOCHASTIC_SOLVERS, Config
from solrl_jax.config.sizes import training_sizes
from solrl_jax.data.prompts import Prompt
from solrl_jax.diffusion.schedule import Schedule
from solrl_jax.diffusion.seeds import candidate_seeds, prompt_uid
from solrl_jax.diffusion.sigmas import make_sigmas
from solrl_jax.diffusion.solver import solver_table
from solrl_jax.models.backbone import Backbone
from solrl_jax.models.decoder import Decoder
from solrl_jax.models.pipeline import Pipeline
from solrl_jax.parallel import hosts, sharding
from solrl_jax.parallel.sharding import make_mesh
from solrl_jax.quant.matmul import matmul
from solrl_jax.rewards.protocol import Reward
from solrl_jax.rl import experiment as experiments
from solrl_jax.rl.experiment import Experiment, first_device_info
from solrl_jax.rl.sampler import Sampler, Segment
from solrl_jax.rl.trainable.trainable import TrainedPaths
from tests.small import small_config

# of a latent; between the linears
SHAPE = (4, 4, 16)
HIDDEN = 32
KERNELS = ("block/kernel", "out/kernel")
# The settings of a run of a toy that name parameters of its model.
TOY = (
    "lora.target_modules=['.*/kernel']",
    "lora.rank=2",
    "lora.alpha=4",
    "model.quantization.modules_to_not_convert=[]",
    "model.quantization.fused=[]",
)


class ToyComponent:
    """The facts of a network that a run records and checks. No directory holds its weights."""

    source = Path("no-such-directory")

    def __init__(self, **shapes: tuple[int, ...]):
        self.shapes = shapes
        self.num_parameters = sum(int(np.prod(shape)) for shape in shapes.values())

    def abstract_params(self, dtype):
        return {
            name: {"kernel": jax.ShapeDtypeStruct(shape, dtype)}
            for name, shape in self.shapes.items()
        }


class ToyPipeline(Pipeline):
    """A pipeline without files: one latent pixel stands for 8 x 8 image pixels."""

    kind = "ToyPipeline"
    compression = 8
    channels = SHAPE[2]
    patch = 1
    gradient_checkpointing = "none"

    def __init__(self):
        """Opens no directory."""
        self.transformer = ToyComponent(block=(SHAPE[-1], HIDDEN), out=(HIDDEN, SHAPE[-1]))
        self.vae = ToyComponent()
        self.text_encoders = {}

    def velocity(self, params, latent, conditioning, timestep, guidance, fp8_attention=False):
        raise NotImplementedError

    def tokenize(self, prompts, max_tokens, instruction=None):
        raise NotImplementedError

    def encode_text(self, params, tokens):
        raise NotImplementedError

    def unscale(self, latent):
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, eq=False)
class ToyBackbone(Backbone):
    """`v = tanh(x W + text + time) V`, and text that is drawn from a prompt's hash."""

    def velocity(self, params, latent, conditioning, timestep, guidance, fp8_attention=False):
        time = jnp.broadcast_to(timestep, latent.shape[:1])[:, None, None, None] / 1000
        text = conditioning["text"][:, None, None, :]
        hidden = jnp.tanh(
            matmul(latent.astype(self.dtype), params["block"]["kernel"])
            + (text + time).astype(self.dtype)
        )
        return guidance.astype(self.dtype) * matmul(hidden, params["out"]["kernel"])

    def encode(self, prompts, max_tokens, *, negative=False):
        def draw(prompt):
            return np.random.default_rng(prompt_uid(prompt)).standard_normal(HIDDEN)

        text = np.stack([draw(prompt) for prompt in prompts]).astype(np.float32)
        return hosts.put({"text": text}, sharding.replicated(self.mesh))

    def parameter_table(self):
        return []


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["params"],
    meta_fields=["pipeline", "dtype", "tile", "max_pixels"],
)
@dataclasses.dataclass(frozen=True)
class ToyDecoder(Decoder):
    """Images of two pixels per latent each way."""

    def __call__(self, latents, first_frame=False):
        return jax.nn.sigmoid(self.params * latents[..., :3]).repeat(2, 1).repeat(2, 2)


class ToyTextEncoders:
    """Nothing is encoded ahead, because drawing an embedding takes no time."""

    def encode_ahead(self, prompts, max_tokens, instruction, show):
        pass


def toy_backbone(
    *mesh: int, dtype: str = "float32", seed: int = 0, devices: Mesh | None = None
) -> ToyBackbone:
    """mesh: sizes of the axes data, fsdp and tensor; one device if none is given. devices: a mesh
    that takes their place.
    """
    rng = np.random.default_rng(seed)

    def weight(*shape):
        return jnp.asarray(rng.standard_normal(shape) / shape[0] ** 0.5, dtype)

    params = {
        "block": {"kernel": weight(SHAPE[-1], HIDDEN)},
        "out": {"kernel": weight(HIDDEN, SHAPE[-1])},
    }
    mesh_ = devices or make_mesh(*(mesh or (1, 1)))
    pipeline = ToyPipeline()
    decoder = ToyDecoder(jnp.float32(0.7), pipeline, jnp.dtype("float32"))
    return ToyBackbone(pipeline, mesh_, jnp.dtype(dtype), params, ToyTextEncoders(), decoder)


def toy_grid(
    steps: int = 3, *, guidance: float = 1.0, scale: float = 1.0, solver: str = "euler"
) -> Schedule:
    sigmas = make_sigmas("linear", steps, 1.0, 256)
    table = solver_table(solver, sigmas, 1.0 if solver in STOCHASTIC_SOLVERS else 0.0)
    return Schedule.from_sigmas(sigmas, table, embedded_guidance=guidance, guidance_scale=scale)


def toy_sampler(backbone: Backbone, chunk: int, *segments: Segment) -> Sampler:
    return Sampler(
        "explore",
        segments or (Segment(backbone.transformer, toy_grid()),),
        backbone.decoder,
        SHAPE,
        chunk,
    )


def toy_seeds(
    prompts, candidates: int, root: int = 0, stream: str = "candidate", iteration: int = 1
) -> np.ndarray:
    uids = np.array([prompt_uid(prompt) for prompt in prompts], np.uint32)
    return np.asarray(candidate_seeds(root, stream, iteration, uids, np.arange(candidates)))


def toy_reward() -> Reward:
    """How near a picture's mean is to a number of its prompt; and the mean itself."""

    def score(params, images, targets):
        mean = images.mean((1, 2, 3))
        return {"reward": params - jnp.abs(mean - targets), "mean": mean}

    def prepare(prompts):
        return np.array([prompt_uid(prompt) / 2**32 for prompt in prompts], np.float32)

    return Reward(jnp.float32(1.0), prepare, score, ("mean",))


def toy_config(run_dir: Path | str, *overrides: str) -> Config:
    """The configuration of a run of a toy, which starts within `toy_model`."""
    return small_config(run_dir, *TOY, *overrides)


def toy_experiment(*overrides: str, mesh: tuple[int, ...] = (1, 1)) -> Experiment:
    """All parts of a run on the smallest settings of `tiny` (`tests.small`) with other
    overrides.
    """
    config = toy_config("unused", *overrides)
    backbone = toy_backbone(*mesh)
    reward = toy_reward()
    size = training_sizes(config)[0]
    train, test = (
        [Prompt(f"{name} {i}") for i in range(count)]
        for name, count in (("to train on", 20), ("to test on", 6))
    )
    return Experiment(
        config,
        backbone,
        reward,
        reward,
        TrainedPaths(KERNELS),
        KERNELS,
        first_device_info(),
        train,
        test,
        size,
    )


@contextlib.contextmanager
def toy_model() -> Iterator[None]:
    """Lets `rl.experiment.build` open a toy in place of the configured model.

    All else is as in a run of a user: the prompts, the rewards and their trial, the loop, and the
    files. A run of a toy compiles in a tenth of the time of one of `tiny`.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiments, "open_for_training", lambda *_: ToyPipeline())
        patch.setattr(experiments, "select_parameters", lambda *_: (TrainedPaths(KERNELS), KERNELS))
        patch.setattr(
            experiments,
            "load_backbone",
            lambda pipeline, precision, mesh, **_: toy_backbone(devices=mesh),
        )
        yield
