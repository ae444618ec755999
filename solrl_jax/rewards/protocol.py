"""The reward protocol: `Reward` is scored inside JAX, `HostReward` by worker processes outside it.

Both go through the same four steps. `check` refuses prompts that the reward cannot score, `load`
puts its parameters on the mesh, `prepare` turns prompts into arrays once, and `score` rates images.
"""

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from solrl_jax.config.values import brief_repr
from solrl_jax.data.prompts import Prompt
from solrl_jax.errors import InputError, in_words, text
from solrl_jax.parallel import hosts, sharding

# Rewards of a larger magnitude count as not finite, because float32 does not hold their squares.
MAX_REWARD = 1e18
# The most images that a function outside JAX gets in one call. Its timeout is for one call.
MAX_BATCH = 16

# Scores by name, one per image. The reward itself has the name "reward".
Scores = dict[str, Float[Array, " b"]]
# Images outside JAX: float32 [n, H, W, 3] in [0, 1]. `check_arguments` checks the shape.
Images = Float[np.ndarray, "..."]
# What a prompt set says about a prompt beside its text.
Metadata = Mapping[str, Any]
Inputs = Literal["pictures", "latents", "both"]
# Raises ValueError with a message of one line for a prompt that the reward cannot score.
Check = Callable[[Prompt], object]


def accept(prompt: Prompt) -> None:
    """The check of a reward that can score any prompt."""


@dataclasses.dataclass(frozen=True)
class HostReward:
    """A reward outside JAX: a function that worker processes import and call.

    The call is f(images, prompts, metadata, **options) with n images (float32 [n, H, W, 3] in
    [0, 1]), n texts and n mappings. It returns n scores, or a mapping of names to n scores in which
    the reward itself has the name "reward". The score of an image must not depend on the other
    images, because n depends on the chunk and on the number of workers.

    Attributes:
        name: The name of the reward in the configuration.
        target: The function, as "module:function".
        options: Its keyword arguments.
        others: The names of the scores that it must return beside "reward". None: they are not
            known before the first call.
        batch: The most images in one call.
        check: Raises ValueError for a prompt that the function cannot score.
    """

    name: str
    target: str
    options: Mapping[str, Any]
    others: tuple[str, ...] | None
    batch: int = MAX_BATCH
    check: Check = accept


@dataclasses.dataclass(frozen=True, eq=False)
class HostRewards:
    """The rewards outside JAX that a run uses, and how their worker processes run.

    Attributes:
        rewards: The rewards.
        weights: The weights of their scores in the weighted sum, e.g. of "ocr" or "geneval/strict".
        workers: The number of worker processes.
        timeout: Seconds that one call may take. A process that takes longer is killed.
        skip: Whether the images of a failed call stay without a score. False: the run stops.
    """

    rewards: tuple[HostReward, ...]
    weights: Mapping[str, float]
    workers: int
    timeout: float
    skip: bool


@dataclasses.dataclass(frozen=True, eq=False)
class Reward:
    """A reward inside JAX, as pure functions.

    Attributes:
        params: The arrays that `score` computes with, any pytree.
        prepare: Turns a list of prompts into a pytree of arrays with one row per prompt. Runs on
            the host.
        score: A function (params, inputs, prepared) -> `Scores`. `inputs` are the images
            [b, H, W, 3] in [0, 1] or what the attribute `inputs` says, and `prepared` has for each
            image the row of its prompt. It is traced by jit with rows divided over the mesh, so
            the score of an image must not depend on the other images. None: nothing is scored
            inside JAX.
        others: Names of the scores beside "reward". They can be watched or trained on too.
        host: Rewards outside JAX that are scored in addition. Only weighted sums have them.
        check: Raises ValueError for a prompt that the reward cannot score. It must be cheap,
            because it is called for every prompt of a run.
        inputs: What `score` gets: "pictures"; "latents", the clean latents [b, h, w, c] in float32
            before decoding; or "both", a pair of images and latents. Nothing is decoded for
            "latents".
    """

    params: Any
    prepare: Callable[[Sequence[str]], Any]
    score: Callable[[Any, Any, Any], Scores] | None
    others: tuple[str, ...] = ()
    host: HostRewards | None = None
    check: Check = accept
    inputs: Inputs = "pictures"

    def __post_init__(self) -> None:
        if self.inputs not in get_args(Inputs):
            raise ValueError(
                f"inputs={brief_repr(self.inputs)}: expected one of {', '.join(get_args(Inputs))}"
            )
        are_names = isinstance(self.others, tuple) and all(
            isinstance(name, str) for name in self.others
        )
        if not are_names:
            raise ValueError(f"others={brief_repr(self.others)}: expected a tuple of names")
        scores_somewhere = callable(self.score) or self.host is not None
        if not (callable(self.prepare) and callable(self.check) and scores_somewhere):
            raise ValueError("prepare, score, check: expected functions")

    @property
    def needs_images(self) -> bool:
        """Whether latents must be decoded to be scored."""
        return self.host is not None or (self.score is not None and self.inputs != "latents")

    def select_inputs(self, images: Any, latents: Any) -> Any:
        """Returns the input of `score` that the field `inputs` asks for.

        Args:
            images: The decoded images.
            latents: Their latents.

        Returns:
            `images` ("pictures"), `latents` ("latents") or the pair of both ("both").
        """
        return {"pictures": images, "latents": latents, "both": (images, latents)}[self.inputs]

    def load(self, mesh: Mesh | None, dtype: DTypeLike) -> "Reward":
        """Returns the reward with its parameters on the devices.

        Args:
            mesh: The mesh that the parameters are placed on. None: they stay where they are.
            dtype: The dtype of the matmuls of networks. Other rewards ignore it.
        """
        if mesh is None:
            return self
        shardings = sharding.parameter_sharding(mesh, self.params)
        return dataclasses.replace(self, params=jax.tree.map(hosts.put, self.params, shardings))


@partial(sharding.jit, static_argnums=0)
def score_images(reward: Reward, params: Any, inputs: Any, prepared: Any, index: Array) -> Scores:
    """Scores images, each against one prompt.

    Args:
        reward: A reward with a function `score`; static.
        params: `reward.params`.
        inputs: The images, the latents or both, from `reward.select_inputs`.
        prepared: What `reward.prepare` returned, one row per prompt.
        index: For each image, int32 [b], the row of its prompt in `prepared`.

    Raises:
        ValueError: If the images are not RGB.
    """
    assert reward.score is not None
    if reward.inputs != "latents":
        images = inputs[0] if reward.inputs == "both" else inputs
        check_rgb(images.shape)
    rows = jax.tree.map(lambda x: jnp.asarray(x)[index], prepared)
    return reward.score(params, inputs, rows)


@contextlib.contextmanager
def reward_code(name: str, template: str = "{}") -> Iterator[None]:
    """Runs code of a reward in the body, in this process.

    What the code prints goes to standard error, and the working directory is restored.

    Args:
        name: The name of the reward, for messages.
        template: The message after the name, with "{}" in place of the error's own message.

    Raises:
        InputError: If the body raises anything but KeyboardInterrupt, in one line that names the
            reward.
    """
    with contextlib.chdir("."), contextlib.redirect_stdout(sys.stderr):
        try:
            yield
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # also SystemExit, and a panic in Rust
            prefix = f"reward '{name}': "
            message = " ".join(text(error).split()) if isinstance(error, ValueError) else ""
            message = message.removeprefix(prefix) or in_words(error)
            raise InputError(prefix + template.format(message)) from error


def check_prompts(reward: Reward, prompts: Sequence[Prompt], field: str) -> None:
    """Checks that a reward can score every prompt.

    Args:
        reward: The reward.
        prompts: The prompts.
        field: The setting that names their file, for messages.

    Raises:
        InputError: If it cannot. The message names the first such prompt and their number.
    """
    refused = []
    for prompt in prompts:
        try:
            reward.check(prompt)
        except ValueError as error:
            refused.append((prompt, " ".join(str(error).split())))
    if refused:
        prompt, message = refused[0]
        shown = brief_repr(str(prompt))
        if shown not in message:
            message = f"prompt {shown}: {message}"
        if len(refused) > 1:
            message += f" ({len(refused)} of {len(prompts)} prompts cannot be scored)"
        raise InputError(f"{field}: {message}")


def check_arguments(
    reward: str, images: Images, prompts: Sequence[str], metadata: Sequence[Metadata]
) -> None:
    """Checks the arguments of a function outside JAX.

    Args:
        reward: The name of the reward, for messages.
        images: Must have the shape [n, height, width, 3].
        prompts: Must be n texts.
        metadata: Must be n mappings.

    Raises:
        ValueError: If they do not fit, in one line.
    """
    try:
        check_rgb(images.shape)
    except ValueError as error:
        raise ValueError(f"reward '{reward}': {error}") from None
    if not len(images) == len(prompts) == len(metadata):
        counts = (
            f"{len(images)} images, {len(prompts)} prompts, {len(metadata)} mappings of metadata"
        )
        raise ValueError(f"reward '{reward}': {counts}; expected as many of each")


def check_rgb(shape: tuple[int, ...]) -> None:
    """Raises ValueError unless `shape` is that of RGB images, [n, height, width, 3]."""
    if len(shape) == 4 and shape[-1] == 3:
        return
    message = f"images of shape {shape}; expected [n, height, width, 3]"
    if len(shape) == 4 and shape[-1] == 4:
        message += ", so composite RGBA images on a background, such as white, first"
    raise ValueError(message)


def finite_images(images: Float[np.ndarray, "n H W 3"]) -> Bool[np.ndarray, " n"]:
    """Returns which images have only finite values.

    The others score NaN, as inside JAX, and are not trained on.
    """
    return np.isfinite(images).all((1, 2, 3))
