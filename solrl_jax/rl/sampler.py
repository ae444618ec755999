"""`Sampler`: what a phase of an iteration samples with.

Exploration, regeneration and evaluation are three values of this class.
"""

import dataclasses

import jax

from solrl_jax.diffusion.schedule import Schedule
from solrl_jax.models.decoder import Decoder
from solrl_jax.models.loading.weights import Params


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Segment:
    """A policy and the solver steps that it is followed for.

    Attributes:
        policy: The parameters of the transformer: those of the base, with any leaves replaced.
        schedule: The solver steps.
        fp8_attention: Whether the network attends in FP8. Networks without FP8 attention ignore it.
    """

    policy: Params
    schedule: Schedule
    fp8_attention: bool = dataclasses.field(default=False, kw_only=True, metadata={"static": True})


@dataclasses.dataclass(frozen=True)
class Sampler:
    """The policy, the schedule and the decoder that a phase samples with.

    Attributes:
        name: The name of the phase as progress reports it, e.g. "explore", "regenerate" or
            "evaluate".
        segments: The segments of the trajectory, one after another. Nearly always there is one.
        decoder: Decodes latents to images for rewards.
        shape: Height, width and channels of one latent.
        chunk: The largest number of samples that one device generates at once.
        recorded: For how many stochastic steps the states before and after are kept. 0 keeps none.
    """

    name: str
    segments: tuple[Segment, ...]
    decoder: Decoder
    shape: tuple[int, int, int]
    chunk: int
    recorded: int = 0
