"""The gradient of the reward with respect to clean latents, and the targets made from it.

Decoder and reward networks are functions of JAX, so the gradient is one `jax.grad`. It is a program
of its own between regeneration and update, so that its memory does not add to that of the update.

To bound its memory, a device decodes up to four images (or tiles) at a time, which together have at
most `MAX_PIXELS` pixels, but at least one. A clip with more pixels is decoded in chunks of latent
frames. A reward network gets `network.IMAGES_PER_DEVICE` images at a time. The backward pass
evaluates decoder and reward networks again, and the decoder of a clip in chunks twice.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from solrl_jax.config.schema import Algorithm as AlgorithmConfig
from solrl_jax.config.schema import Config
from solrl_jax.models.decoder import Decoder
from solrl_jax.parallel import hosts, sharding
from solrl_jax.rewards.protocol import Reward, score_samples
from solrl_jax.rl.experiment import Experiment
from solrl_jax.rl.generate import PromptBatch, Samples, place_samples
from solrl_jax.rl.objective import load_objective, make_targets_of

# The reward is multiplied by this before the differentiation, and its gradient divided by it after.
# Otherwise, small gradients in reward networks would be lost in FP16.
SCALE = 2.0**10
# The most pixels that a device decodes at once for a gradient: one image of 512 x 512. The gradient
# takes several times the memory of decoding alone.
MAX_PIXELS = 2**18


def add_targets(
    experiment: Experiment,
    prompt_batch: PromptBatch,
    samples: Samples,
    prompt: Int[np.ndarray, " b"],
) -> Samples:
    """Makes the objective's targets from the gradient of the reward. Targets are latents that the
    objective trains on in addition to the samples.

    The objective's `targets` function is called once per chunk of `samples_per_call` samples. Every
    sample is decoded, scored and differentiated, for some objectives several times. Every process
    of a run must call it with the same arguments.

    Args:
        experiment: Its objective makes the targets from the gradient of its reward. The reward must
            be scored inside JAX and compare no candidates.
        prompt_batch: The prompts that `prompt` points to, prepared for the reward.
        samples: The samples, any number from one on. Their `states` [b, 2, ...] must not be None.
            They are two latents per sample: the state before the solver step at which the sample is
            trained (`Sampler.query_steps`), and the clean latents that the old policy predicted
            there. Only the clean latents are read.
        prompt: The index of the prompt of each sample in `prompt_batch`.

    Returns:
        A copy of `samples` with `targets`: float32 latents [b, ...] by the names that the objective
        gave them. The objectives of the package make them NaN or infinite for samples whose reward
        or gradient is not finite.

    Raises:
        InputError: If the objective cannot be imported or has no function that makes targets, or if
            the code of a reward raises or returns no scores. Other exceptions of the `targets`
            function pass through.
    """
    config = experiment.config
    mesh = sharding.row_mesh(experiment.backbone.mesh)
    make_targets = make_targets_of(load_objective(config.algorithm.objective))
    assert samples.states is not None
    anchors = samples.states[:, 1]
    chunk = samples_per_call(config, len(anchors), mesh.size)
    prepared = hosts.put(prompt_batch.prepared, sharding.replicated(mesh))
    decoder = gradient_decoder(experiment.backbone.decoder)
    reward = experiment.reward
    chunks = []
    for start in range(0, len(anchors), chunk):
        part = slice(start, start + chunk)
        with jax.set_mesh(mesh):
            gradient = partial(
                reward_gradient,
                reward,
                decoder,
                reward.params,
                prepared=prepared,
                index=place_samples(prompt[part], chunk, mesh),
            )
            anchor = place_samples(anchors[part], chunk, mesh)
            chunks.append(hosts.fetch(make_targets(gradient, anchor, config.algorithm)))
    targets = {
        name: np.concatenate([rows[name] for rows in chunks])[: len(anchors)] for name in chunks[0]
    }
    return dataclasses.replace(samples, targets=targets)


def gradient_decoder(decoder: Decoder) -> Decoder:
    """Returns a copy of the decoder for differentiation, which decodes fewer images at once.

    As with any decoder, a device decodes up to four images (or tiles) at a time. With the copy,
    they have together at most `MAX_PIXELS` (2^18) pixels. One image, tile or latent frame of a clip
    is decoded even if it has more.

    Args:
        decoder: The decoder that images are scored with. Its tile size, if any, is kept.

    Returns:
        A decoder with the same parameters, which decodes the same images up to rounding.
    """
    return dataclasses.replace(decoder, max_pixels=MAX_PIXELS)


@partial(sharding.jit, static_argnums=0)
def reward_gradient(
    reward: Reward,
    decoder: Decoder,
    params: Any,
    latents: Float[Array, "b ... c"],
    prepared: Any,
    index: Int[Array, " b"],
) -> tuple[Float[Array, " b"], Float[Array, "b ... c"]]:
    """Computes the reward of clean latents, and its gradient with respect to them.

    It is compiled by jit, once per reward object and set of shapes.

    Args:
        reward: The weighted sum of rewards inside JAX, each of which scores an image by itself;
            static.
        decoder: Decodes the latents. It is not used if the reward reads latents alone.
        params: The parameters of the reward: `reward.params`.
        latents: The clean latents, float32. The ambient mesh must have no sequence or tensor
            parallelism (`sharding.row_mesh`), and the number of latents must be a multiple of its
            number of devices.
        prepared: The pytree that `reward.prepare` returned, one row per prompt.
        index: For each sample, the row of its prompt in `prepared`.

    Returns:
        The rewards and their gradients, float32. The results for a sample do not depend on other
        samples. Where the reward is not finite, the gradient is NaN. Decoded pixels beyond [0, 1]
        contribute nothing to the gradient, since they are clipped.

    Raises:
        InputError: If the function `score` of a reward raises or returns no scores.
    """

    def total(latents: Array) -> tuple[Array, Array]:
        images = None
        if reward.needs_images:
            images = decoder(latents, reward.reads_first_frame_alone)
        inputs = reward.select_inputs(images, latents)
        rewards = score_samples(reward, params, inputs, prepared, index)["reward"]
        return SCALE * rewards.sum(), rewards

    gradient, rewards = jax.grad(total, has_aux=True)(latents)
    # A score that is not finite is masked, which gives it a gradient of 0. With that gradient the
    # sample would be trained on.
    finite = jnp.isfinite(rewards).reshape(-1, *(1,) * (gradient.ndim - 1))
    return rewards, jnp.where(finite, gradient / SCALE, jnp.nan)


def samples_per_call(config: Config, count: int, devices: int) -> int:
    """Returns how many samples one call of `reward_gradient` gets, on all devices together.

    Args:
        config: The configuration. Its `rollout.per_device_batch_size` limits the number.
        count: The number of all samples, at least 1.
        devices: The number of devices.

    Returns:
        `devices` times the samples per device, which are `count / devices` rounded up, but at most
        `rollout.per_device_batch_size`. `add_targets` pads the samples of the last call to this
        number.
    """
    return devices * min(config.rollout.per_device_batch_size, -(-count // devices))


def try_targets(algorithm: AlgorithmConfig) -> tuple[tuple[str, ...], int]:
    """Returns the names of an objective's targets and the number of gradients that it takes.

    The objective's `targets` function is called once, with latents of zeros of the shape [1, 1, 1,
    1]. In place of the gradient of the reward, it gets a function that returns the latents
    themselves as their gradient. A user's objective, `module:function`, is imported for this.

    Args:
        algorithm: The algorithm section of the configuration. Its objective must train on reward
            gradients.

    Returns:
        The names of the targets, in the order of the dict that the function returns, and how often
        the gradient is taken for each sample.

    Raises:
        InputError: If the objective cannot be imported, or has no function that makes targets.
            Exceptions of that function pass through.
    """
    calls = 0

    def gradient(latents: Array) -> tuple[Array, Array]:
        nonlocal calls
        calls += 1
        return latents.sum((1, 2, 3)), latents

    make_targets = make_targets_of(load_objective(algorithm.objective))
    targets = make_targets(gradient, jnp.zeros((1, 1, 1, 1)), algorithm)
    return tuple(targets), calls
