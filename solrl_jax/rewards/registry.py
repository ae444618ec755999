"""The registry of rewards. Opens, loads and sums the rewards of a configuration.

To add a reward to the package, write a file with a function that scores images or opens a `Reward`,
and add a line to `REWARDS`. Functions and services of users need no line.
"""

import collections
import dataclasses
import importlib.metadata
import inspect
import sys
import urllib.parse
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from solrl_jax.config import schema as config
from solrl_jax.config.overrides import ENTRY_POINTS
from solrl_jax.config.plugins import search_working_directory
from solrl_jax.config.sizes import describe_size
from solrl_jax.config.values import Size, brief_repr
from solrl_jax.data.prompts import Prompt
from solrl_jax.errors import InputError, as_input_error, first_line
from solrl_jax.rewards.aesthetic import aesthetic
from solrl_jax.rewards.clip import clipscore, hpsv2, pickscore, tiny_clip
from solrl_jax.rewards.host import import_object
from solrl_jax.rewards.imagereward import imagereward
from solrl_jax.rewards.judge.settings import open_judge
from solrl_jax.rewards.mixture import mixture
from solrl_jax.rewards.motion import motion
from solrl_jax.rewards.protocol import (
    MAX_BATCH,
    Check,
    HostReward,
    HostRewards,
    Reward,
    accept,
    check_prompts,
    reward_code,
)
from solrl_jax.rewards.shapes import shapes
from solrl_jax.rewards.sources import SOURCES
from solrl_jax.storage.files import cache_directory

Options = Mapping[str, Any]
# The arguments of a function outside JAX, before its options.
ARGUMENTS = ("images", "prompts", "metadata")
# The arguments of a pairwise function.
PAIR_ARGUMENTS = ("first", "second", "prompts", "metadata")
# The setting that names the rewards of exploration.
EXPLORE = "rollout.explore.reward"
# The name of a judge, and the prefix of the names of further judges.
JUDGE = "judge"
# The most images in one call of a judge. They are requested at once, up to the option concurrency.
JUDGE_BATCH = 64
# A reward whose name begins with one of these is a service, and the name is its address.
SERVICE = ("http://", "https://")


@dataclasses.dataclass(frozen=True)
class JaxEntry:
    """The entry of a reward of the package that is scored inside JAX. It has no options.

    Attributes:
        open: Opens the reward, given the setting `reward.paths`, or for `solrl plan` the constant
            `sources.PACKAGED_CONFIGS` (the configurations in the package). It checks the files and
            downloads missing ones from the hub, but reads no weights. It raises ValueError (or its
            subclass InputError) if a file is missing or does not fit its network.
        others: The names of the scores that the reward returns besides "reward".
        differentiable: Whether the gradient of the score with respect to the image may be trained
            on. It replaces the field of `Reward`, which is known only after the reward is opened.
    """

    open: Callable[[Mapping[str, str]], Reward]
    others: tuple[str, ...] = ()
    differentiable: bool = True


@dataclasses.dataclass(frozen=True)
class HostEntry:
    """The entry of a reward of the package that worker processes score.

    Attributes:
        target: The function, as "module:function".
        others: The names of the scores that the function must return beside "reward".
    """

    target: str
    others: tuple[str, ...] = ()


REWARDS: dict[str, JaxEntry | HostEntry] = {
    "shapes": JaxEntry(shapes, ("strict",), differentiable=False),  # it counts and compares
    "motion": JaxEntry(motion, ("moves", "strict"), differentiable=False),
    "tiny-clip": JaxEntry(tiny_clip),
    "pickscore": JaxEntry(pickscore),
    "clipscore": JaxEntry(clipscore),
    "hpsv2": JaxEntry(hpsv2),
    "imagereward": JaxEntry(imagereward),
    "aesthetic": JaxEntry(aesthetic),
    "ocr": HostEntry("solrl_jax.rewards.ocr:ocr"),
    "geneval": HostEntry("solrl_jax.rewards.geneval:geneval", ("strict",)),
    "jpeg_compressibility": HostEntry("solrl_jax.rewards.jpeg:jpeg_compressibility"),
    "jpeg_incompressibility": HostEntry("solrl_jax.rewards.jpeg:jpeg_incompressibility"),
    # A run may have several judges, "judge-NAME" each. `open_judge_reward` opens all of them.
    JUDGE: HostEntry("solrl_jax.rewards.judge.reward:judge"),
}


class Rewards(NamedTuple):
    """The rewards of a run, each a weighted sum.

    Attributes:
        trained: The sum of the scores in `reward.weights`, which is trained on.
        evaluated: The same sum for evaluations, which also records the scores in
            `reward.eval_only` without a weight. If that setting is empty, `evaluated` is `trained`.
        explored: The sum of the scores in `rollout.explore.reward`, which ranks candidates; None if
            it is not set.
    """

    trained: Reward
    evaluated: Reward
    explored: Reward | None


@dataclasses.dataclass(frozen=True)
class OpenedRewards:
    """The rewards of a configuration, with names, options, functions and files checked.

    The parameters of networks are not read yet; `load` does it.

    Attributes:
        settings: The section "reward" of the configuration.
        dtype: The dtype of the matmuls of scoring networks: float32, float16 or bfloat16.
        rewards: The rewards by name, in sorted order: every reward that has a score in
            `settings.weights`, `settings.eval_only` or `explore`. For example, the score
            "geneval/strict" belongs to the reward "geneval".
        explore: `rollout.explore.reward`: the weights of the scores that rank candidates, by name.
            None: the trained reward ranks them.
    """

    settings: config.Reward
    dtype: DTypeLike
    rewards: Mapping[str, Reward | HostReward]
    explore: Mapping[str, float] | None = None

    def load(self, mesh: Mesh | None) -> Rewards:
        """Reads the parameters of the rewards inside JAX, once each, and sums all rewards.

        In `solrl plan` the parameters of networks are abstract (`jax.ShapeDtypeStruct`). No worker
        process starts. Every process of a run must call it.

        Args:
            mesh: The mesh for the parameters, on which images will be scored: that of the run
                without sequence and tensor parallelism (`sharding.row_mesh`). None: networks are
                loaded on JAX's default device, and the arrays of other rewards stay where they are.

        Returns:
            Three weighted sums: `trained`, which is trained on; `evaluated`, which also records the
            scores in `settings.eval_only`; and `explored`, which ranks candidates, or None if the
            field `explore` is None. They share the parameters.

        Raises:
            InputError: If the parameters of a user's reward cannot be placed on the mesh.
            OSError: If a file of a released network cannot be read any more.
            ValueError: If such a file has changed since it was checked and has other tensors or
                shapes than the network.
        """
        loaded: dict[str, Reward | HostReward] = dict(self.rewards)
        for name, reward in self.rewards.items():
            if isinstance(reward, HostReward):
                continue
            if name in REWARDS:
                loaded[name] = reward.load(mesh, self.dtype)
            else:
                with reward_code(name, "params: {}"):
                    loaded[name] = reward.load(mesh, self.dtype)
        weights = self.settings.weights
        failures: collections.Counter[str] = collections.Counter()  # of all three sums together
        trained = self._sum(loaded, failures, weights)
        evaluated = trained
        if self.settings.eval_only:
            evaluated = self._sum(loaded, failures, weights, self.settings.eval_only)
        explored = None
        if self.explore is not None:
            explored = self._sum(loaded, failures, self.explore)
        return Rewards(trained, evaluated, explored)

    def check_sizes(self, sizes: Iterable[Size]) -> None:
        """Checks that no reward of whole clips is used with a size of images.

        Args:
            sizes: The sizes that are scored: (height, width) of images in pixels, or (height,
                width, number of frames) of clips.

        Raises:
            InputError: If a reward gets whole clips and a size is one of images.
        """
        clip_rewards = [name for name, reward in self.rewards.items() if reward.clips]
        images = [size for size in sizes if len(size) == 2]
        if clip_rewards and images:
            raise InputError(
                f"reward '{clip_rewards[0]}': scores whole clips, not {describe_size(images[0])}; "
                "expected a video model, with model.frames=N"
            )

    def check_prompts(
        self, train_prompts: Sequence[Prompt], test_prompts: Sequence[Prompt]
    ) -> None:
        """Checks that the rewards can score all prompts. Nothing is loaded, and no image is scored.

        Args:
            train_prompts: The training prompts, for the rewards in `settings.weights` and
                `explore`.
            test_prompts: The test prompts, for those in `settings.weights` and
                `settings.eval_only`.

        Raises:
            InputError: If a reward refuses a prompt, or its function `check` raises an exception.
                The message names the setting of the prompts, the reward and the first such prompt.
        """
        weights = self.settings.weights
        ranking = self.explore or {}
        trained = self._sum(self.rewards, collections.Counter(), {**weights, **ranking})
        watched = self.settings.eval_only
        evaluated = self._sum(self.rewards, collections.Counter(), weights, watched)
        check_prompts(trained, train_prompts, "prompts.train")
        check_prompts(evaluated, test_prompts, "prompts.test")

    def _sum(
        self,
        rewards: Mapping[str, Reward | HostReward],
        failures: collections.Counter[str],
        weights: Mapping[str, float],
        watched: Sequence[str] = (),
    ) -> Reward:
        """Returns the weighted sum of some rewards, which also records other scores of them.

        Args:
            rewards: The loaded rewards by name. Only those with a score in `weights` or `watched`
                are part of the sum.
            failures: Counts the failed calls in a row of rewards outside JAX, by the name of the
                reward (`HostRewards.failures_in_a_row`).
            weights: The weight of each score, by "REWARD" or "REWARD/OTHER".
            watched: The names of scores that are computed without a weight.

        Returns:
            The sum (`mixture`). Its own `score` is that of the rewards inside JAX that are not
            groupwise; its field `group` is the sum of the groupwise ones; its field `host` has the
            rewards outside JAX. Each of these three fields is None if there are no such rewards.
            Frames, group size, workers, timeout and the treatment of failures are those of the
            field `settings`. The `others` of each reward outside JAX also have its scores in
            `weights` and `watched`, so that a call that does not return all of them fails.
        """
        scores = (*weights, *watched)
        settings = self.settings
        names = reward_names(scores)
        inside: dict[str, Reward] = {}
        groupwise: dict[str, Reward] = {}
        outside = []
        for name, reward in rewards.items():
            if name not in names:
                continue
            if isinstance(reward, Reward):
                (groupwise if reward.groupwise else inside)[name] = reward
            else:
                # Only the scores that the configuration names are known for a user's function.
                named = [
                    score.removeprefix(f"{name}/")
                    for score in scores
                    if reward_name(score) == name and score != name
                ]
                others = tuple(dict.fromkeys((*(reward.others or ()), *named)))
                outside.append(dataclasses.replace(reward, others=others))

        def part_weights(part: Container[str]) -> dict[str, float]:
            return {score: w for score, w in weights.items() if reward_name(score) in part}

        group = None
        if groupwise:
            group = dataclasses.replace(
                mixture(part_weights(groupwise), groupwise, None),
                groupwise=True,
                group_size=settings.group_size,
            )
        host = None
        if outside:
            host = HostRewards(
                rewards=tuple(outside),
                weights=part_weights({reward.name for reward in outside}),
                workers=settings.workers,
                timeout=settings.timeout,
                skip=settings.on_failure == "skip",
                group_size=settings.group_size,
                failures_in_a_row=failures,
            )
        return mixture(part_weights(inside), inside, host, group, settings.frames)


def open_rewards(
    settings: config.Reward,
    dtype: DTypeLike = jnp.float32,
    explore: Mapping[str, float] | None = None,
    gradients_for: str | None = None,
) -> OpenedRewards:
    """Opens the rewards of a configuration.

    Checks names, options and files, imports functions outside JAX and users' functions, calls
    users' functions without required parameters, which must return a `Reward`, and downloads
    missing files from the hub to its cache. No weights are read, and no service or judge gets a
    request. Also appends the working directory to `sys.path` if a function is imported.

    Args:
        settings: The section "reward" of the configuration. `solrl plan` replaces its `paths` by
            the constant `sources.PACKAGED_CONFIGS`: the networks get the released configurations
            that the package has, without weights.
        dtype: The dtype of the matmuls of scoring networks: float32, float16 or bfloat16. It takes
            effect in `OpenedRewards.load`.
        explore: `rollout.explore.reward`: the weight of each score that ranks candidates, by name.
            None: the trained reward ranks them.
        gradients_for: The name of the objective that trains on the gradient of the reward, so that
            the rewards in `settings.weights` must have one. None: they need not.

    Returns:
        The opened rewards, which also hold the first three arguments. They have a `Reward` or
        `HostReward` under the name of each reward with a score in `settings.weights`,
        `settings.eval_only` or `explore`. The name decides the kind of a reward:

          - "judge" and "judge-NAME": a judge.
          - another name in `REWARDS`: a reward of the package.
          - "http://..." and "https://...": a service.
          - any other name: an entry point of an installed package, or a user's function
            ("module:function").

    Raises:
        InputError: If a reward cannot be opened: its name is unknown, its options are not accepted,
            its function cannot be imported or called, a package that it needs is not installed, the
            address of its service is no URL, files of its network are missing or do not fit its
            configuration, or the question of a judge cannot be used. Also if `reward.paths` or
            `reward.options` has a key that is not known or not used, if a reward in
            `reward.weights` has no gradient and must have one, or if `reward.frames` is above 1
            although a reward of images compares candidates or all rewards get whole clips.
        PermissionError: If a parent of the directory of a judge's cache may not be searched.
    """
    fields = {
        "reward.weights": tuple(settings.weights),
        "reward.eval_only": settings.eval_only,
        EXPLORE: tuple(explore or ()),
    }
    names = reward_names([score for scores in fields.values() for score in scores])
    _check_names(settings, names, fields)
    rewards: dict[str, Reward | HostReward] = {}
    others: dict[str, tuple[str, ...] | None] = {}
    for name in names:
        entry = REWARDS.get(name)
        options = settings.options.get(name, {})
        if is_judge(name):
            rewards[name] = open_judge_reward(name, options, settings.workers)
            others[name] = rewards[name].others
            continue
        if isinstance(entry, JaxEntry):
            if options:
                raise InputError(
                    f"reward.options.{name}={dict(options)!r}: this reward has no options"
                )
            others[name] = entry.others
            continue
        if isinstance(entry, HostEntry):
            rewards[name] = open_function(name, entry.target, options, entry.others)
        elif name.startswith(SERVICE):
            rewards[name] = open_service(name, options, settings.timeout)
        else:
            rewards[name] = open_plugin(name, options)
        others[name] = rewards[name].others
    _check_scores(fields, others)
    if gradients_for is not None:
        _check_gradients(reward_names(settings.weights), rewards, gradients_for)
    for name in names:
        entry = REWARDS.get(name)
        if isinstance(entry, JaxEntry):
            with as_input_error():  # a configuration or a tensor that does not fit
                rewards[name] = entry.open(settings.paths)
    if settings.frames > 1:
        for name, reward in rewards.items():
            compares = reward.groupwise if isinstance(reward, Reward) else reward.compares
            if compares and not reward.clips:
                raise InputError(
                    f"reward.frames={settings.frames}: must be 1 with the reward '{name}', which "
                    "compares the candidates of a prompt"
                )
        if all(reward.clips for reward in rewards.values()):
            raise InputError(
                f"reward.frames={settings.frames}: must be 1 with {_quoted(names)}, which scores "
                "whole clips"
            )
    return OpenedRewards(settings, dtype, {name: rewards[name] for name in names}, explore)


def open_function(
    name: str, target: str, options: Options, others: tuple[str, ...] | None
) -> HostReward:
    """Opens a function outside JAX. Also imports it in this process, to check its options.

    The function may have an attribute `check`, which is called as check(prompt, metadata,
    **options) and raises ValueError for a prompt that the function cannot score. A true attribute
    `groupwise` says that it scores the candidates of a prompt relative to each other, a true
    `pairwise` that it compares two images, and a true `clips` that it gets whole clips in place of
    images. The working directory is appended to `sys.path` unless it is there.

    Args:
        name: The name of the reward in the configuration, which the result gets.
        target: The function, as "module:function". It is called with (images, prompts, metadata),
            or with (first, second, prompts, metadata) if it is pairwise.
        options: The keyword arguments of the function, by name.
        others: The names of the scores that it must return beside "reward", e.g. ("strict",). None:
            unknown.

    Returns:
        The reward, with at most `MAX_BATCH` (16) images or pairs in a call.

    Raises:
        InputError: If the function cannot be imported, is no function, has no signature, or does
            not accept these arguments with these options; or if it is defined in a notebook or an
            interactive session.
    """
    if target.startswith("__main__:") and not hasattr(sys.modules["__main__"], "__file__"):
        raise InputError(
            f"reward '{name}': worker processes cannot import a function of a notebook or an "
            "interactive session; expected one in a file, module:function"
        )
    function, signature = _import_function(name, target)
    pairwise = bool(getattr(function, "pairwise", False))
    _check_options(name, signature, options, PAIR_ARGUMENTS if pairwise else ARGUMENTS)
    return HostReward(
        name,
        target,
        options,
        others,
        check=_bind_check(function, options),
        groupwise=bool(getattr(function, "groupwise", False)),
        pairwise=pairwise,
        clips=bool(getattr(function, "clips", False)),
    )


def open_plugin(name: str, options: Options) -> Reward | HostReward:
    """Opens a function of a user, which is imported in this process.

    The signature decides its kind. A function with a parameter that has no default (*args and
    **kwargs do not count) is itself a scorer outside JAX, called in worker processes. Any other
    function is a factory: it is called here with the options and must return a `Reward` inside JAX.
    The working directory is appended to `sys.path` unless it is there.

    Args:
        name: The name of an entry point of an installed package in the group "solrl_jax.rewards",
            or "module:function". An entry point of this name wins.
        options: The keyword arguments of the function.

    Returns:
        A `HostReward`, whose `others` are None (not known before the first call), or the `Reward`
        that the factory returned.

    Raises:
        InputError: If the function cannot be imported, is no function, has no signature or does not
            accept the options; or if the factory raises, returns no `Reward`, or returns a weighted
            sum (with `host` or `group`).
    """
    target = entry_points().get(name, name)
    function, signature = _import_function(name, target)
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for parameter in signature.parameters.values():
        if parameter.default is parameter.empty and parameter.kind not in variadic:
            return open_function(name, target, options, None)
    _check_options(name, signature, options, ())
    with reward_code(name):
        reward = function(**options)
        if not isinstance(reward, Reward):
            raise ValueError(
                f"returned {brief_repr(reward)}: expected a solrl_jax.rewards.protocol.Reward; "
                f"a function outside JAX takes ({', '.join(ARGUMENTS)})"
            )
        if reward.host is not None:
            raise ValueError(
                f"host={brief_repr(reward.host)}: expected None; name a function outside JAX in "
                "reward.weights"
            )
        if reward.group is not None:
            raise ValueError(
                f"group={brief_repr(reward.group)}: expected None; a reward that compares images "
                "has groupwise=True, and reward.weights names each reward"
            )
    return reward


def open_service(url: str, options: Options, timeout: float) -> HostReward:
    """Opens a reward service: a program that scores images over HTTP. No request is sent.

    Args:
        url: The address of the service, http://HOST:PORT/PATH or https://HOST:PORT/PATH.
        options: May have one key, "batch": the most images in one request, an integer of at least
            1; 16 (`MAX_BATCH`) without it.
        timeout: Seconds that one call may take (`reward.timeout`), above 0.

    Returns:
        The reward, named by the address: the function `rewards.http.http` with the options `url`
        and `timeout`. It accepts every prompt and has no scores beside "reward".

    Raises:
        InputError: If the address has no host, has white space or an impossible port, or if there
            is another option or another value of "batch". The scheme is not checked.
    """
    with as_input_error(lambda message: f"reward {url!r}: {message}"):
        address = urllib.parse.urlsplit(url)
        if not address.hostname or address.port == 0 or url.split() != [url]:
            raise ValueError("expected http://HOST:PORT/PATH")
    unknown = [option for option in options if option != "batch"]
    if unknown:
        raise InputError(f"reward.options.{url}: unknown option '{unknown[0]}'; there is batch")
    batch = options.get("batch", MAX_BATCH)
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
        raise InputError(
            f"reward.options.{url}.batch={brief_repr(batch)}: expected an integer of at least 1"
        )
    arguments = {"url": url, "timeout": timeout}
    return HostReward(url, "solrl_jax.rewards.http:http", arguments, (), batch)


def open_judge_reward(name: str, options: Options, workers: int) -> HostReward:
    """Opens a judge. Reads its question, but sends no request and creates no cache.

    Args:
        name: "judge" or "judge-NAME".
        options: Values of JSON by the name of a field of `judge.settings.JudgeSettings`; "base_url"
            and "model" are required.
        workers: The number of worker processes, at least 1. Each may send an equal part of the
            option `concurrency` (16 by default), rounded down, as concurrent requests.

    Returns:
        A reward whose calls have up to `JUDGE_BATCH` (64) images, or pairs if it compares images
        (`pairwise`). It accepts every prompt, and its `others` are the criteria if there are
        several.

    Raises:
        InputError: If an option is missing, unknown or not accepted, if `concurrency` is less than
            `workers`, if the question cannot be read, if the package openai or httpx2 is not
            installed, or if the directory of the cache is a file or needs a home directory that the
            user does not have.
        PermissionError: If a parent of that directory may not be searched.
    """
    missing = [package for package in ("openai", "httpx2") if not find_spec(package)]
    if missing:
        raise InputError(
            f"reward '{name}' needs {', '.join(missing)}: pip install 'solrl_jax[judge]'"
        )
    judge = open_judge(name, options)
    concurrency = judge.settings.concurrency
    if concurrency < workers:
        raise InputError(
            f"reward.options.{name}.concurrency={concurrency}: must be at least "
            f"reward.workers={workers}, because each worker process has a request of its own"
        )
    cache_directory(judge.settings.cache, "judge", f"reward.options.{name}.cache")
    arguments = {
        "options": judge.to_json(),
        "concurrency": concurrency // workers,
    }
    function = "compare" if judge.compares else "judge"
    target = f"solrl_jax.rewards.judge.reward:{function}"
    return HostReward(name, target, arguments, judge.others, JUDGE_BATCH, pairwise=judge.compares)


def is_judge(name: str) -> bool:
    """Returns whether the name of a reward is that of a judge: "judge" or "judge-NAME".

    Args:
        name: The name of a reward, any text. NAME may be empty.
    """
    return name == JUDGE or name.startswith(f"{JUDGE}-")


def reward_name(score: str) -> str:
    """Returns the name of the reward that a score belongs to.

    Args:
        score: The name of a score: that of a reward, or "REWARD/OTHER" for another score of it.

    Returns:
        The part before the first slash, e.g. "geneval" for "geneval/strict". The whole text if it
        begins with "http://" or "https://", because a service has only one score.
    """
    return score if score.startswith(SERVICE) else score.split("/")[0]


def reward_names(scores: Iterable[str]) -> list[str]:
    """Returns the names of the rewards that scores belong to (`reward_name`), sorted, each once.

    Args:
        scores: The names of scores, such as "geneval/strict", which belongs to "geneval". The name
            of a service, a URL, is not divided. Without any scores, the result is empty.
    """
    return sorted({reward_name(score) for score in scores})


def entry_points() -> dict[str, str]:
    """Returns the rewards that installed packages name in the group "solrl_jax.rewards".

    Returns:
        The function, as "module:function", by the name of the entry point. Nothing is imported.
    """
    points = importlib.metadata.entry_points(group=ENTRY_POINTS)
    return {point.name: point.value for point in points}


def _check_names(
    settings: config.Reward, names: Sequence[str], fields: Mapping[str, Sequence[str]]
) -> None:
    """Checks that the configuration names only known rewards and known files. Imports nothing.

    Args:
        settings: The section "reward" of the configuration, of which the keys of `paths` (files)
            and `options` (rewards) are checked.
        names: The names of all rewards that the configuration uses, such as "geneval". A name is
            known if it is in `REWARDS`, an entry point, "judge", "judge-NAME", or has a colon, as
            "module:function" and URLs have.
        fields: For messages: the names of scores in each setting, by the setting's dotted name,
            e.g. {"reward.weights": ("geneval/strict",)}.

    Raises:
        InputError: If `reward.paths` has a key that is not in `SOURCES`, a name in `names` is not
            known, or `reward.options` has a key that is not in `names`; the first of these that
            applies. The message lists the unknown names and the known ones.
    """
    unknown_paths = [name for name in settings.paths if name not in SOURCES]
    if unknown_paths:
        raise InputError(
            f"reward.paths: unknown name {_quoted(unknown_paths)}; available: {', '.join(SOURCES)}"
        )
    others = [
        name for name in names if name not in REWARDS and not is_judge(name) and ":" not in name
    ]
    if others:
        installed = entry_points()
        unknown = [name for name in others if name not in installed]
        if unknown:
            known = ", ".join((*REWARDS, *installed))
            raise InputError(
                f"{_field(fields, unknown)}: unknown reward {_quoted(unknown)}; "
                f"available: {known}, module.path:function and http://HOST:PORT/PATH"
            )
    unused = [name for name in settings.options if name not in names]
    if unused:
        raise InputError(
            f"reward.options: no reward {_quoted(unused)}; available: {', '.join(names)}"
        )


def _check_scores(
    fields: Mapping[str, Sequence[str]], others: Mapping[str, tuple[str, ...] | None]
) -> None:
    """Checks that settings name only scores that their reward has.

    Args:
        fields: The names of the scores in each setting, by its dotted name, e.g. {"reward.weights":
            ("geneval/strict", "pickscore")}. All of them are checked.
        others: By the name of each reward that these scores belong to, the names of its scores
            beside "reward", e.g. {"geneval": ("strict",), "pickscore": ()}. None: unknown, so that
            every score of this reward passes.

    Raises:
        InputError: If a setting names an unknown score. The message names the first such setting,
            and lists the unknown scores of all settings and the known ones.
    """
    known = []
    for name, other_names in others.items():
        known += [name, *(f"{name}/{other}" for other in other_names or ())]
    unknown = [
        score
        for scores in fields.values()
        for score in scores
        if score not in known and others[reward_name(score)] is not None
    ]
    if unknown:
        raise InputError(
            f"{_field(fields, unknown)}: unknown score {_quoted(unknown)}; available: "
            f"{', '.join(known)}"
        )


def _check_gradients(
    names: Sequence[str], opened: Mapping[str, Reward | HostReward], objective: str
) -> None:
    """Checks that the gradients of rewards with respect to the image can be trained on.

    Args:
        names: The names of the rewards that are trained on.
        opened: The rewards that are already open, by name. Rewards of the package that are scored
            inside JAX are missing; their entries in `REWARDS` are used instead.
        objective: The name of the objective that needs the gradients, for the message.

    Raises:
        InputError: For the first reward that is scored outside JAX, compares candidates, or is not
            declared to be differentiable, by the field `differentiable` of its entry in `REWARDS`
            or of an opened `Reward`.
    """
    for name in names:
        entry = REWARDS.get(name)
        reward = opened.get(name)
        if isinstance(entry, JaxEntry) and entry.differentiable:
            continue
        if isinstance(reward, Reward) and reward.differentiable and not reward.groupwise:
            continue
        if isinstance(reward, HostReward):
            reason = "is scored outside JAX"
        elif reward is not None and reward.groupwise:
            reason = "compares the candidates of a prompt"
        else:
            reason = "is not declared differentiable"
        known = [
            name
            for name, entry in REWARDS.items()
            if isinstance(entry, JaxEntry) and entry.differentiable
        ]
        raise InputError(
            f"reward.weights: {name!r} {reason}, and algorithm.objective={objective} needs its "
            f"gradient; available: {', '.join(known)}, and solrl_jax.Reward(..., "
            "differentiable=True)"
        )


def _field(fields: Mapping[str, Sequence[str]], names: Sequence[str]) -> str:
    """Returns the name of the first setting that uses any of the given rewards or scores.

    Args:
        fields: The names of the scores in each setting, by the setting's dotted name, e.g.
            {"reward.weights": ("geneval/strict",)}.
        names: Names of rewards or of scores, e.g. "geneval" or "geneval/strict". A setting uses a
            reward if it has any score of it. At least one setting must use one of the names.

    Returns:
        The name of the setting, e.g. "reward.weights".
    """
    return next(
        field
        for field, scores in fields.items()
        if not {*scores, *reward_names(scores)}.isdisjoint(names)
    )


def _bind_check(function: Callable[..., Any], options: Options) -> Check:
    """Returns the function that checks prompts for a reward outside JAX.

    Args:
        function: The function of the reward. Its attribute `check`, if it has one, is the check,
            called as check(text, metadata, **options).
        options: The options of the reward, which the check gets as keyword arguments.

    Returns:
        A function of a `Prompt` that calls the attribute `check`, whose errors of any type pass
        through. Without this attribute, one that accepts every prompt.
    """
    check_function = getattr(function, "check", None)
    if check_function is None:
        return accept

    def check(prompt: Prompt) -> None:
        check_function(str(prompt), prompt.metadata, **options)

    return check


def _import_function(name: str, target: str) -> tuple[Callable[..., Any], inspect.Signature]:
    """Imports a function, also from the working directory.

    Also appends the working directory to the end of `sys.path`, which worker processes inherit,
    unless it is there. The standard output of the module goes to standard error.

    Args:
        name: The name of the reward, for messages.
        target: The function, as "module:function". The part after the colon may have dots, e.g.
            "module:Class.method".

    Returns:
        The function and its signature.

    Raises:
        InputError: If the import raises anything but KeyboardInterrupt, if `target` has no colon or
            there is no such object, or if the object cannot be called or has no signature.
    """
    search_working_directory()
    template = "cannot be imported ({})"
    if ":" in name:
        template += "; expected module.path:function"
    with reward_code(name, template):
        function = import_object(target)
    if not callable(function):
        raise InputError(f"reward '{name}': {brief_repr(function)} is no function")
    try:
        return function, inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise InputError(f"reward '{name}': {first_line(error)}") from error


def _check_options(
    name: str, signature: inspect.Signature, options: Options, arguments: tuple[str, ...]
) -> None:
    """Checks by its signature that a function can be called. Values are not checked.

    Args:
        name: The name of the reward, for messages.
        signature: The signature of the function.
        options: The keyword arguments of the call.
        arguments: The names of the positional arguments of the call, e.g. ("images", "prompts",
            "metadata"); () without any.

    Raises:
        InputError: If an argument is missing, unknown or passed twice. The message has the call and
            the accepted signature.
    """
    try:
        signature.bind(*arguments, **options)
    except TypeError as error:
        keywords = (f"{key}={brief_repr(value)}" for key, value in options.items())
        call = ", ".join((*arguments, *keywords))
        problem = str(error).replace(" keyword-only", "")  # Python 3.12 and 3.13 differ
        raise InputError(
            f"reward.options.{name}: called as ({call}): {problem}; accepted: {signature}"
        ) from None


def _quoted(names: Sequence[str]) -> str:
    """Returns names as Python literals, separated by ", ", such as "'ocr', 'geneval'".

    Args:
        names: The names, in the order of the result.
    """
    return ", ".join(map(repr, names))
