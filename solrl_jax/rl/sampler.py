"""`Sampler`: what a stage of an iteration rolls out with. Exploring, regenerating and evaluating are three values of it."""

import dataclasses

import jax

from solrl_jax.diffusion.schedule import Schedule
from solrl_jax.models.decoder import Decoder
from solrl_jax.models.loading.weights import Params


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Segment:
    """A policy and the steps that it samples."""

    policy: Params  # the base with any of its leaves replaced
    schedule: Schedule
    # its attention, in networks that can
    fp8_attention: bool = dataclasses.field(default=False, kw_only=True, metadata={"static": True})


@dataclasses.dataclass(frozen=True)
class Sampler:
    """The policy and the grid of a stage, and the decoder that shows its latents to a reward."""

    name: str  # "explore", "regenerate", "evaluate", ...; as progress is reported
    segments: tuple[Segment, ...]  # one after another; nearly always a single one
    decoder: Decoder
    shape: tuple[int, int, int]  # of one latent: height, width, channels
    chunk: int  # rows that each device runs at once, at most
    recorded: int = 0  # stochastic steps of which the states before and after are kept
