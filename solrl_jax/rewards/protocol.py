"""The reward protocol: `Reward` is scored inside JAX, `HostReward` by worker processes outside it.

A `Reward` has four steps. `check` refuses prompts that it cannot score, `load` puts its parameters
on the mesh, `prepare` turns prompts into arrays once, and `score` rates images. A `HostReward` has
`check` and a function that rates images together with their prompts.
"""

import collections
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
from solrl_jax.errors import InputError, text, type_and_message
from solrl_jax.parallel import hosts, sharding
from solrl_jax.rewards.frames import mean_over_frames, repeat_rows, sample_frames

# Rewards of a larger magnitude count as not finite, because float32 does not hold their squares.
MAX_REWARD = 1e18
# The most images that a function outside JAX gets in one call. Its timeout is for one call.
MAX_BATCH = 16
# The most candidates of a prompt that are compared with each other, unless a configuration says
# otherwise.
GROUP_SIZE = 24

# Scores by name, one per image. The reward itself has the name "reward".
Scores = dict[str, Float[Array, " b"]]
# Images outside JAX: float32 [n, H, W, 3] in [0, 1]. `check_arguments` checks the shape.
Images = Float[np.ndarray, "..."]
# The further fields of a prompt in a prompt set, besides its text.
Metadata = Mapping[str, Any]
Inputs = Literal["images", "latents", "both"]
# Raises ValueError with a message of one line for a prompt that the reward cannot score.
Check = Callable[[Prompt], object]


def accept(prompt: Prompt) -> None:
    """The default `check` of a reward, which accepts every prompt.

    Args:
        prompt: Not read.
    """


@dataclasses.dataclass(frozen=True)
class HostReward:
    """A reward outside JAX: a function that worker processes import and call.

    There are three kinds. In each, n is the number of images or pairs in a call.

      - By default it is called as f(images, prompts, metadata, **options), with images float32 [n,
        H, W, 3] in [0, 1], n texts and n mappings. It returns n numbers, or a mapping of names to n
        numbers in which the reward itself has the name "reward". How images are divided into calls
        varies, so the score of an image must not depend on the other images.
      - If `groupwise`, it is called in the same way with all images of a group of candidates of one
        prompt, and their scores may depend on each other.
      - If `pairwise`, it is called as f(first, second, prompts, metadata, **options) with n pairs
        of images of a group, and returns n preferences in [0, 1] for the images in `first`, or a
        mapping that has them under "reward". Other entries of the mapping are ignored.

    If `clips`, it gets whole clips [n, T, H, W, 3] in place of images, in each of the three kinds.
    Otherwise it gets images: for clips, up to `reward.frames` (a setting) frames of each clip.

    Images with a non-finite value score NaN, whatever the function returns. A pairwise function
    does not get them. The constructor checks nothing.

    Attributes:
        name: The name of the reward in the configuration, e.g. "ocr", "module:function" or a URL.
        target: The function, as "module:function".
        options: The keyword arguments of the function, by name. They are pickled.
        others: The names of the scores that it must return besides "reward", which are recorded as
            "NAME/OTHER"; a call without one of them fails. Further ones that it returns are
            recorded likewise. None: they are not known before the first call. If `pairwise`, only
            () or None, because nothing but "reward" is read.
        batch: The most images (if `pairwise`, pairs) in one call, at least 1; 16 (`MAX_BATCH`) by
            default. No effect if `groupwise`.
        check: Is called with each prompt of a run (`Prompt`), and raises ValueError for one that
            the function cannot score. By default every prompt is accepted.
        groupwise: Whether the function scores the images of a group relative to each other.
        pairwise: Whether it compares two images. Each image of a group then scores its win rate:
            the mean preference over the other images, both orders averaged; 0.5 if there are none.
            It wins over `groupwise`.
        clips: Whether the function gets whole clips, float32 [n, T, H, W, 3] in [0, 1] with T
            frames each. `batch` is then a number of clips, or of pairs of them.
    """

    name: str
    target: str
    options: Mapping[str, Any]
    others: tuple[str, ...] | None
    batch: int = MAX_BATCH
    check: Check = accept
    groupwise: bool = False
    pairwise: bool = False
    clips: bool = False

    @property
    def compares(self) -> bool:
        """Whether the reward compares candidates of one prompt: `groupwise` or `pairwise`.

        A worker process then gets a group at once. The candidates of a prompt are one group; if
        they are more than `HostRewards.group_size`, they are divided into as few groups as
        possible, of nearly equal sizes. The process calls a groupwise function with the whole
        group, and a pairwise one with up to `batch` pairs of it.
        """
        return self.groupwise or self.pairwise


@dataclasses.dataclass(frozen=True, eq=False)
class HostRewards:
    """The rewards outside JAX that a run uses, and how their worker processes run.

    Two objects are equal only if they are the same object.

    Attributes:
        rewards: The rewards outside JAX, at least one, with different names.
        weights: The weights of their scores in the weighted sum, by the name of the score, e.g.
            "ocr" or "geneval/strict". Scores without a weight are only recorded.
        workers: The number of worker processes on each host, at least 1.
        timeout: Seconds that one call may take. A process that takes longer is killed.
        skip: Whether the run continues after a failed call. True: images without a score get NaN,
            and the run stops (`RewardError`) only if 32 calls of one reward in a row fail without
            any score. False: the first failed call stops the run, even if it scored some images.
        group_size: For rewards that compare images: the most candidates of a prompt in a group, 24
            (`GROUP_SIZE`) by default.
        failures_in_a_row: By the name of the reward, the number of its latest calls in a row that
            failed without any score. Any other call resets it to 0, including a successful one that
            scores every image NaN. It stays 0 if `skip` is false. The weighted sums of one run
            (`registry.Rewards`) share one counter. The default is a new counter.
    """

    rewards: tuple[HostReward, ...]
    weights: Mapping[str, float]
    workers: int
    timeout: float
    skip: bool
    group_size: int = GROUP_SIZE
    failures_in_a_row: collections.Counter[str] = dataclasses.field(
        default_factory=collections.Counter
    )

    def select(self, *, clips: bool) -> "HostRewards | None":
        """Returns the rewards of one kind, or None if there are none.

        All other fields are kept; the counter `failures_in_a_row` is the same object.

        Args:
            clips: True selects the rewards that get whole clips, False those that get images.
        """
        rewards = tuple(reward for reward in self.rewards if reward.clips == clips)
        return dataclasses.replace(self, rewards=rewards) if rewards else None

    def select_strict(self) -> "HostRewards | None":
        """Returns the rewards whose `others` include a score "strict", which marks an image as
        right or wrong, or None if there are none.

        The field `weights` of the result is empty, because these scores are not summed. All other
        fields are kept; the counter `failures_in_a_row` is the same object.
        """
        rewards = tuple(reward for reward in self.rewards if "strict" in (reward.others or ()))
        return dataclasses.replace(self, rewards=rewards, weights={}) if rewards else None


@dataclasses.dataclass(frozen=True, eq=False)
class Reward:
    """A reward inside JAX, as pure functions, or a weighted sum of several rewards.

    Two objects are equal only if they are the same object. Programs that take a reward as a static
    argument are therefore compiled anew for a copy.

    Attributes:
        params: The parameters for `score`: any pytree of arrays, or None.
        prepare: Turns a sequence of prompts into a pytree of arrays with one row per prompt. It
            runs on the host, in every process, before images of these prompts are generated.
        score: A function (params, inputs, prepared) -> dict of arrays [b] with the key "reward" and
            the keys in `others`. A weighted sum returns the scores of its parts by name, and
            "reward" only if it has weights. `params` is the field; `inputs` are images or latents,
            as the field `inputs` says; `prepared` has one row per image: the row of its prompt. The
            function is traced by jit with rows divided over the mesh, so the score of an image must
            not depend on the other images, unless `groupwise` is set. None only for a weighted sum
            that has no rewards of its own inside JAX.
        others: Names of the scores besides "reward", which can also be recorded or trained on.
        host: Only for weighted sums: the rewards outside JAX that belong to the sum, or None.
        check: Is called with every prompt of a run (`Prompt`), and raises ValueError if the reward
            cannot score it. By default every prompt is accepted.
        inputs: The kind of `inputs` that `score` gets. "images": images [b, H, W, 3] in [0, 1], or
            whole clips (see `clips`). "latents": the clean latents in float32 before decoding,
            [b, h, w, c], or [b, t, h, w, c] for clips. "both": a pair (images, latents).
        clips: Whether `score` gets whole clips [b, T, H, W, 3] in [0, 1], with T frames each, where
            `inputs` says images. False: it gets frames of clips as images. In a weighted sum:
            whether any part gets whole clips.
        groupwise: Whether `score` is called with one whole group, replicated on every device. A
            group is the candidates of one prompt, or a part of them (`group_size`). Its scores may
            depend on each other, such as ranks or win rates (`rewards.groups.round_robin`).
        group: Only for weighted sums: the weighted sum of the groupwise rewards that belong to it,
            or None.
        group_size: Only for the weighted sum in a field `group`: the most candidates of a prompt in
            a group (`reward.group_size` of the configuration), 24 (`GROUP_SIZE`) by default.
        differentiable: Whether the gradient of `score` with respect to its inputs may be trained
            on, as the objectives "opsd", "refl" and "draft" do. It is a promise: a score that
            counts or rounds has a gradient of zero. False by default.
        frames: The number of frames of each clip to score (`reward.frames` of the configuration).
            1, the default: the first frame. More: frames equally spaced from the first to the last.
            `score` gets each frame as an image, and the score of the clip is the mean over these
            frames. In a weighted sum, the value of the sum applies, and those of its parts are
            ignored. No effect on rewards of whole clips (`clips`) or of latents alone.
        is_sum: Whether the reward is a weighted sum (`mixture`). The `score` of a sum gets images
            or clips as they were decoded, and passes each part the inputs that this part reads.
            False by default.

    Raises:
        ValueError: If a field fails the checks of `__post_init__`.
    """

    params: Any
    prepare: Callable[[Sequence[str]], Any]
    score: Callable[[Any, Any, Any], Scores] | None
    others: tuple[str, ...] = ()
    host: HostRewards | None = None
    check: Check = accept
    inputs: Inputs = "images"
    groupwise: bool = False
    group: "Reward | None" = None
    group_size: int = GROUP_SIZE
    differentiable: bool = False
    frames: int = 1
    clips: bool = False
    is_sum: bool = False

    def __post_init__(self) -> None:
        """Checks the fields, except `params`, `host`, `group`, `group_size`, `frames` and `is_sum`.

        Raises:
            ValueError: Unless `inputs` is "images", "latents" or "both", `others` is a tuple of
                strings, `groupwise`, `differentiable` and `clips` are bools, and `prepare` and
                `check` are functions. Also if `clips` is set and `inputs` is "latents", or if
                `score` cannot be called and both `host` and `group` are None.
        """
        if self.inputs not in get_args(Inputs):
            raise ValueError(
                f"inputs={brief_repr(self.inputs)}: expected one of {', '.join(get_args(Inputs))}"
            )
        are_names = isinstance(self.others, tuple) and all(
            isinstance(name, str) for name in self.others
        )
        if not are_names:
            raise ValueError(f"others={brief_repr(self.others)}: expected a tuple of names")
        for name in ("groupwise", "differentiable", "clips"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ValueError(f"{name}={brief_repr(value)}: expected True or False")
        if self.clips and self.inputs == "latents":
            raise ValueError("clips=True: must be False with inputs='latents', which are no images")
        scores_somewhere = callable(self.score) or self.host is not None or self.group is not None
        if not (callable(self.prepare) and callable(self.check) and scores_somewhere):
            raise ValueError("prepare, score, check: expected functions")

    @property
    def needs_images(self) -> bool:
        """Whether latents must be decoded to be scored.

        True if there are rewards outside JAX (`host`), or if there is a function `score` whose
        `inputs` are not "latents", here or in the nested sum of groupwise rewards (`group`).
        """
        if self.host is not None or (self.score is not None and self.inputs != "latents"):
            return True
        return self.group is not None and self.group.needs_images

    @property
    def reads_first_frame_alone(self) -> bool:
        """Whether no frame of a clip but the first is scored, so the others need not be decoded.

        True if `frames` is 1 and no reward gets whole clips, here, in `host` or in `group`. This
        includes rewards that read latents alone.
        """
        if self.frames != 1 or self.clips:
            return False
        if self.host is not None and any(reward.clips for reward in self.host.rewards):
            return False
        return self.group is None or self.group.reads_first_frame_alone

    def select_inputs(self, images: Any, latents: Any) -> Any:
        """Returns the input of `score` that the field `inputs` asks for, without a copy.

        Args:
            images: The decoded images [b, H, W, 3] or clips [b, T, H, W, 3] in [0, 1]. Any value,
                such as None, if `inputs` is "latents".
            latents: The latents of the images, [b, h, w, c], or of the clips, [b, t, h, w, c]. Any
                value if `inputs` is "images".

        Returns:
            `images` ("images"), `latents` ("latents") or the tuple (images, latents) ("both").
        """
        return {"images": images, "latents": latents, "both": (images, latents)}[self.inputs]

    def load(self, mesh: Mesh | None, dtype: DTypeLike) -> "Reward":
        """Returns the reward with its parameters on the devices.

        In a run of several processes, each calls it, with equal parameters.

        Args:
            mesh: The mesh that the parameters are placed on: arrays of at least 4096 elements are
                split over its axes by the rules of `sharding.parameter_sharding`; smaller ones are
                on every device. None: the parameters stay where they are.
            dtype: No effect here. In `NetworkReward`, which overrides this method, it is the dtype
                of the matmuls of its networks.

        Returns:
            A copy of the reward with placed `params` (those of the nested reward in the field
            `group` stay where they are); the reward itself if `mesh` is None.

        Raises:
            AttributeError: If there is a mesh and a leaf of `params` is not an array.
        """
        if mesh is None:
            return self
        shardings = sharding.parameter_sharding(mesh, self.params)
        return dataclasses.replace(self, params=jax.tree.map(hosts.put, self.params, shardings))


def score_samples(reward: Reward, params: Any, inputs: Any, prepared: Any, index: Array) -> Scores:
    """Scores images or clips, each against one prompt. For use under jit.

    The score of a clip is the mean over `reward.frames` equally spaced frames (the first one if
    that is 1, all frames if the clip has fewer), each scored as an image. A reward with `clips` set
    gets whole clips, and one that reads latents alone gets those of the clip once. In a weighted
    sum, this holds for each part.

    Args:
        reward: A reward whose `score` is not None.
        params: The parameters for `reward.score`.
        inputs: The images [b, H, W, 3] or clips [b, T, H, W, 3] in [0, 1], their latents, or the
            pair (images, latents), as `reward.select_inputs` returns them. If the reward reads
            both, each frame is scored with the latents of the whole clip.
        prepared: The pytree that `reward.prepare` returned, one row per prompt.
        index: For each sample, int32 [b], the row of its prompt in `prepared`. It must be in range.

    Returns:
        Arrays [b] by the name of the score, as `reward.score` names them. A sample has NaN where
        the reward, or the part of a sum, has read a non-finite value.

    Raises:
        ValueError: If the images are not of the shape [b, H, W, 3] or [b, T, H, W, 3], or if they
            are not clips and `reward.clips` is set (latents are not checked); or if `reward.score`
            returns no scores of the required names and shapes (TypeError if one is no array).
        InputError: If `reward` is a weighted sum (`mixture`), in place of these errors and of those
            that the code of a part raises.
    """
    assert reward.score is not None
    rows = jax.tree.map(lambda x: jnp.asarray(x)[index], prepared)
    if reward.is_sum:
        return reward.score(params, inputs, rows)
    return score_frames(reward, params, inputs, rows, reward.frames)


def score_frames(reward: Reward, params: Any, inputs: Any, rows: Any, frames: int) -> Scores:
    """Scores images or clips with one reward that is no weighted sum. For use under jit.

    Args:
        reward: The reward, whose `inputs` and `clips` say what its `score` gets.
        params: The parameters for `reward.score`.
        inputs: The images [b, H, W, 3] or clips [b, T, H, W, 3] in [0, 1], their latents, or the
            pair (images, latents), as `reward.select_inputs` returns them. If the reward reads
            both, each frame is scored with the latents of the whole clip.
        rows: The prepared prompt of each sample: the tree of arrays that `reward.prepare` returned,
            but with one row per sample, that of its prompt.
        frames: The number of frames of each clip to score, at least 1. 1: the first frame. More:
            frames equally spaced from the first to the last, or all frames if a clip has fewer. No
            effect on images, on latents alone, and if `reward.clips` is set.

    Returns:
        Arrays [b] by the name of the score; for clips, the means over the scored frames. The score
        of a sample is NaN if `reward.score` got a non-finite value for it. Frames that are not
        scored have no effect.

    Raises:
        ValueError: If the images are not of the shape [b, H, W, 3] or [b, T, H, W, 3], or if they
            are not clips and `reward.clips` is set (latents are not checked); or if `reward.score`
            returns no scores of the required names and shapes (TypeError if one is no array).
    """
    assert reward.score is not None
    inputs, rows, count = _sample_inputs(reward, inputs, rows, frames)
    arrays = jax.tree.leaves(inputs)
    is_finite = jnp.stack([jnp.isfinite(x).all(tuple(range(1, x.ndim))) for x in arrays]).all(0)
    scores = reward.score(params, inputs, rows)
    _check_scores(scores, reward.others, len(is_finite))
    masked = {name: jnp.where(is_finite, value, jnp.nan) for name, value in scores.items()}
    return mean_over_frames(masked, count)


def _sample_inputs(reward: Reward, inputs: Any, rows: Any, frames: int) -> tuple[Any, Any, int]:
    """Replaces clips by some of their frames, unless the reward gets whole clips. For use under
    jit.

    Args:
        reward: The reward, whose `inputs` and `clips` say what its `score` gets.
        inputs: The images [b, H, W, 3] or clips [b, T, H, W, 3] in [0, 1], their latents, or the
            pair (images, latents), as `reward.select_inputs` returns them.
        rows: A tree of arrays with one row per sample.
        frames: The number of frames of each clip to score, at least 1. 1: the first frame. More:
            frames equally spaced from the first to the last, or all frames if a clip has fewer.

    Returns:
        A tuple of three:
          1. The inputs of `reward.score`, in which the frames of the first clip come first. In a
              pair, the latents of a clip are repeated for each of its frames.
          2. `rows`, repeated to one row for each image, clip or latent of these inputs.
          3. The number of images per sample, 1 unless several frames were sampled.

    Raises:
        ValueError: If the images are not of the shape [b, H, W, 3] or [b, T, H, W, 3], or if they
            are not clips and `reward.clips` is set. Latents are not checked.
    """
    if reward.inputs == "latents":
        return inputs, rows, 1
    images, latents = inputs if reward.inputs == "both" else (inputs, None)
    if reward.clips:
        if images.ndim != 5 or images.shape[-1] != 3:
            raise ValueError(
                f"images of shape {images.shape}; expected clips [n, frames, height, width, 3]"
            )
        return inputs, rows, 1
    count = 1
    if images.ndim == 5:
        count = min(images.shape[1], frames)
        images = sample_frames(images, count)
    check_rgb(images.shape)
    selected = reward.select_inputs(images, repeat_rows(latents, count))
    return selected, repeat_rows(rows, count), count


def _check_scores(scores: Any, others: Sequence[str], count: int) -> None:
    """Checks the names and shapes of the scores that the function `score` of a reward returned.

    Values are not checked: NaN and infinities pass.

    Args:
        scores: The returned value: a mapping of names to arrays [count] of real numbers (integers
            and Booleans too). Names beyond the required ones pass; their arrays are checked too.
        others: The names that are required beside "reward".
        count: The number of images.

    Raises:
        ValueError: If `scores` is no mapping, lacks "reward" or one of `others`, or has a complex
            array or one of another shape. The message is one line.
        TypeError: If a value cannot be converted to an array, such as text.
    """
    expected = ("reward", *others)
    if not isinstance(scores, Mapping) or not {*expected} <= scores.keys():
        names = ", ".join(map(repr, expected))
        raise ValueError(f"score returned {brief_repr(scores)}; expected a dict with {names}")
    for name, value in scores.items():
        array = jnp.asarray(value)
        if array.shape != (count,) or jnp.iscomplexobj(array):
            raise ValueError(
                f"score returned {array.dtype} of shape {array.shape} as {name!r} for {count} "
                "images; expected real numbers [b], one for each image"
            )


@partial(sharding.jit, static_argnums=0)
def score_images(reward: Reward, params: Any, inputs: Any, prepared: Any, index: Array) -> Scores:
    """`score_samples` as a program of its own, which is compiled once per reward object and set of
    shapes.

    Arguments, result and errors are those of `score_samples`. The caller sets the mesh
    (`jax.set_mesh`) over which the arguments are divided or replicated.

    Args:
        reward: A reward whose `score` is not None; static.
        params: `reward.params`, which are traced.
        inputs: Images [b, H, W, 3] or clips [b, T, H, W, 3] in [0, 1], their latents, or the pair
            (images, latents), as `reward.select_inputs` returns them.
        prepared: The result of `reward.prepare`, one row per prompt.
        index: For each sample, int32 [b], the row of its prompt in `prepared`.

    Returns:
        Arrays [b] by the name of the score.
    """
    return score_samples(reward, params, inputs, prepared, index)


@contextlib.contextmanager
def reward_code(name: str, template: str = "{}") -> Iterator[None]:
    """A context manager for a body that runs a reward's code in this process.

    It turns errors of the body into InputErrors that name the reward. Standard output of the body
    goes to standard error, and the working directory is restored at the end.

    Args:
        name: The name of the reward, for messages.
        template: The message after the name, for `str.format`, with "{}" in place of the error's
            own message.

    Yields:
        None.

    Raises:
        InputError: If the body raises anything but KeyboardInterrupt, even SystemExit. The message
            is one line: "reward 'NAME': ", then the filled template. The error's own message is
            preceded by the name of its type, unless the error is a ValueError with a message. If
            such a message begins with "reward 'NAME': " already, the prefix is not repeated.
    """
    with contextlib.chdir("."), contextlib.redirect_stdout(sys.stderr):
        try:
            yield
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # also SystemExit, and a panic in Rust
            prefix = f"reward '{name}': "
            message = " ".join(text(error).split()) if isinstance(error, ValueError) else ""
            message = message.removeprefix(prefix) or type_and_message(error)
            raise InputError(prefix + template.format(message)) from error


def check_prompts(reward: Reward, prompts: Sequence[Prompt], field: str) -> None:
    """Checks that a reward can score every prompt, by calling `reward.check` with each.

    Args:
        reward: The reward, of which only the field `check` is called.
        prompts: The prompts. Without any, nothing is checked.
        field: The setting that names their file, for messages, e.g. "prompts.train".

    Raises:
        InputError: If `reward.check` raises ValueError for a prompt. The message has the first such
            prompt and its error and, if there are several, their number. Errors of other types are
            raised as they are.
    """
    refused = []
    for prompt in prompts:
        try:
            reward.check(prompt)
        except ValueError as error:
            refused.append((prompt, " ".join(str(error).split())))
    if refused:
        prompt, message = refused[0]
        quoted_prompt = brief_repr(str(prompt))
        if quoted_prompt not in message:
            message = f"prompt {quoted_prompt}: {message}"
        if len(refused) > 1:
            message += f" ({len(refused)} of {len(prompts)} prompts cannot be scored)"
        raise InputError(f"{field}: {message}")


def check_arguments(
    reward: str, images: Images, prompts: Sequence[str], metadata: Sequence[Metadata]
) -> None:
    """Checks shape and lengths of the arguments of a function outside JAX, not their values.

    Args:
        reward: The name of the reward, for messages.
        images: Must have the shape [n, height, width, 3]; n may be 0.
        prompts: The texts of the prompts. Their number must be n.
        metadata: The metadata of the prompts. Their number must be n.

    Raises:
        ValueError: If the shape is another one, or if the three lengths differ. The message is one
            line that begins with the name of the reward.
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
    """Checks that a shape is that of RGB images, [n, height, width, 3], of any number and size.

    Args:
        shape: The shape of an array of images.

    Raises:
        ValueError: If there are not four axes, or if the last one has not the length 3. For a
            length of 4 the message advises to composite RGBA images on a background.
    """
    if len(shape) == 4 and shape[-1] == 3:
        return
    message = f"images of shape {shape}; expected [n, height, width, 3]"
    if len(shape) == 4 and shape[-1] == 4:
        message += ", so composite RGBA images on a background, such as white, first"
    raise ValueError(message)


def finite_images(images: Float[np.ndarray, "n ... 3"]) -> Bool[np.ndarray, " n"]:
    """Returns which images have only finite values.

    Callers give the other images the score NaN, as `score_frames` does for rewards inside JAX.
    Images with the score NaN are not trained on.

    Args:
        images: Any number n of images [n, H, W, 3] or clips [n, T, H, W, 3], also 0.

    Returns:
        Bool [n], false for an image or clip with a NaN or an infinity anywhere.
    """
    return np.isfinite(images).all(tuple(range(1, images.ndim)))
