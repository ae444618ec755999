"""What a reward is: scores of pictures against their prompts, inside JAX (`Reward`) or outside it (`HostReward`)."""

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
from solrl_jax.parallel import sharding

LARGEST = 1e18  # a reward beyond counts as not finite, because float32 does not hold its square
BATCH = (
    16  # pictures that a function outside JAX gets at most in one call; its timeout is for one call
)
Scores = dict[str, Float[Array, " b"]]  # by name; the reward itself is named "reward"
Images = Float[
    np.ndarray, "..."
]  # outside JAX: float32 [n, H, W, 3] in [0, 1], which `check_arguments` checks
Metadata = Mapping[str, Any]  # what a prompt set says about a prompt beside its text
Inputs = Literal["pictures", "latents", "both"]
Check = Callable[
    [Prompt], object
]  # raises ValueError, in one line, for a prompt that the reward cannot score


def accept(prompt: Prompt) -> None:
    """The check of a reward that can score any prompt."""


@contextlib.contextmanager
def calling(name: str, said: str = "{}") -> Iterator[None]:
    """Calls code of a reward in this process: what it prints goes to standard error, and the working directory stays.

    Whatever it raises becomes an InputError in one line that names the reward. `said` goes around its words.
    """
    with contextlib.chdir("."), contextlib.redirect_stdout(sys.stderr):
        try:
            yield
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit, too, and a panic in Rust
            head = f"reward '{name}': "
            words = " ".join(text(error).split()) if isinstance(error, ValueError) else ""
            raise InputError(
                head + said.format(words.removeprefix(head) or in_words(error))
            ) from error


@dataclasses.dataclass(frozen=True)
class HostReward:
    """A reward outside JAX: a function that other processes import and call.

    It is called as f(images float32 [n, H, W, 3] in [0, 1], prompts [n], metadata [n], **options) and returns scores [n], or a
    mapping with scores [n] by name, of which the reward itself is named "reward". The score of a picture must not depend on
    the other pictures: n depends on the chunk and on the number of processes.
    """

    name: str
    target: str  # "module:function"
    options: Mapping[str, Any]
    others: (
        tuple[str, ...] | None
    )  # the scores beside "reward" that must come; None: unknown before the first answer
    batch: int = BATCH
    check: Check = accept


@dataclasses.dataclass(frozen=True, eq=False)
class Host:
    """The rewards outside JAX that belong to a `Reward`, and how they are run."""

    rewards: tuple[HostReward, ...]
    weights: Mapping[str, float]  # in the weighted sum, by score: "ocr", "geneval/strict"
    workers: int  # processes that score
    timeout: float  # seconds for one call; then its process is killed
    skip: bool  # true: if a call fails, its pictures have no score; false: the run stops


@dataclasses.dataclass(frozen=True, eq=False)
class Reward:
    """A reward inside JAX, as pure functions.

    params: arrays that `score` takes, any pytree.
    prepare: (prompts) -> a pytree of arrays with one row a prompt; runs on the host.
    score: (params, images [b, H, W, 3] in [0, 1], rows [b] of what `prepare` returned) -> Scores. It is traced by jit with the
      rows split over the mesh: the score of a picture must not depend on the other pictures. None: all is scored outside JAX.
    inputs: what `score` gets: pictures; the clean latents [b, h, w, c] that they are decoded from, float32, and then nothing is
      decoded for it; or both, as a pair, pictures first.
    others: names of the scores beside "reward". They can be watched or trained on too.
    host: what is scored outside JAX in addition.
    check: raises ValueError for a prompt that the reward cannot score. It is cheap: it gets every prompt of a run.
    """

    params: Any
    prepare: Callable[[Sequence[str]], Any]
    score: Callable[[Any, Any, Any], Scores] | None
    others: tuple[str, ...] = ()
    host: Host | None = None
    check: Check = accept
    inputs: Inputs = "pictures"

    def __post_init__(self) -> None:
        if self.inputs not in get_args(Inputs):
            raise ValueError(
                f"inputs={brief_repr(self.inputs)}: expected one of {', '.join(get_args(Inputs))}"
            )
        if not isinstance(self.others, tuple) or not all(
            isinstance(name, str) for name in self.others
        ):
            raise ValueError(f"others={brief_repr(self.others)}: expected a tuple of names")
        if not (
            callable(self.prepare)
            and callable(self.check)
            and (callable(self.score) or self.host is not None)
        ):
            raise ValueError("prepare, score, check: expected functions")

    @property
    def needs_pictures(self) -> bool:
        """Whether latents must be decoded to be scored."""
        return self.host is not None or (self.score is not None and self.inputs != "latents")

    def select_inputs(self, images: Any, latents: Any) -> Any:
        """Of pictures and latents, what `score` gets."""
        return {"pictures": images, "latents": latents, "both": (images, latents)}[self.inputs]


# reads a reward's weights onto the mesh (None: onto JAX's default device), for products in the dtype
Loader = Callable[[Mesh | None, DTypeLike], Reward]


@partial(sharding.jit, static_argnums=0)
def score_images(reward: Reward, params: Any, seen: Any, prepared: Any, index: Array) -> Scores:
    """The scores of pictures, each against one prompt: `index` [b] is its row in `prepared`. seen: what `reward.select_inputs` says."""
    assert reward.score is not None
    return reward.score(params, seen, jax.tree.map(lambda x: jnp.asarray(x)[index], prepared))


def check_prompts(reward: Reward, prompts: Sequence[Prompt], field: str) -> None:
    """Checks that `reward` can score every prompt. Raises InputError in one line that names `field`, reward and prompt."""
    wrong = []
    for prompt in prompts:
        try:
            reward.check(prompt)
        except ValueError as error:
            wrong.append((prompt, " ".join(str(error).split())))
    if wrong:
        prompt, text = wrong[0]
        quoted = "" if brief_repr(str(prompt)) in text else f"prompt {brief_repr(str(prompt))}: "
        more = (
            f" ({len(wrong)} of {len(prompts)} prompts cannot be scored)" if len(wrong) > 1 else ""
        )
        raise InputError(f"{field}: {quoted}{text}{more}")


def check_arguments(
    reward: str, images: Images, prompts: Sequence[str], metadata: Sequence[Metadata]
) -> None:
    """Raises ValueError in one line unless there are n pictures, n prompts and n mappings of metadata."""
    if images.ndim != 4 or images.shape[-1] != 3:
        raise ValueError(
            f"reward '{reward}': images of shape {images.shape}; expected [n, height, width, 3]"
        )
    if not len(images) == len(prompts) == len(metadata):
        count = (
            f"{len(images)} images, {len(prompts)} prompts, {len(metadata)} mappings of metadata"
        )
        raise ValueError(f"reward '{reward}': {count}; expected as many of each")


def finite(images: Float[np.ndarray, "n H W 3"]) -> Bool[np.ndarray, " n"]:
    """Which pictures have only finite values. The others score NaN, as in JAX, and are not trained on."""
    return np.isfinite(images).all((1, 2, 3))
