"""Prices an iteration by counted work: each network evaluation at its roofline time on a named
device.

The time on this machine says nothing about a method, because a CPU emulates the formats that are
fast elsewhere. The network evaluations of exploration and regeneration, the decoded and scored
images, the gradients of the reward, and the terms of the update are counted. Their prices are
roofline seconds of a released model's compiled programs (`planning`, `solrl plan`).
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from solrl_jax.config.presets import resolve
from solrl_jax.config.schema import Config, is_plugin
from solrl_jax.errors import InputError
from solrl_jax.rl.explore.continuation import continued_steps
from solrl_jax.rl.reward_gradient import try_targets
from solrl_jax.storage.readers import parse_json, read_text

PRICES_FILE = Path(__file__).parents[1] / "assets" / "prices.json"


@dataclasses.dataclass(frozen=True)
class Prices:
    """Roofline seconds of each kind of work of one model on one device.

    Attributes:
        name: MODEL-DEVICE, e.g. "flux1-b200".
        network: The seconds of one evaluation of the network for one image, by the name of the
            number format, e.g. "bf16" and "nvfp4". Other formats have no price.
        scored: The seconds to decode and score one image.
        trained: The seconds of one training term: the loss of one image at one noise level, which
            takes three predictions (of the trained, the old and the reference policy) and a
            gradient.
        synced: The seconds to make the low-precision copy of the policy for exploration (merge its
            adapters and quantize it), once per iteration.
        differentiated: The seconds of one gradient of the reward of one image. None: four times
            `scored` (the roofline of FLUX.1 with PickScore on an H200 has 4.1 times).
    """

    name: str
    network: Mapping[str, float]
    scored: float
    trained: float
    synced: float
    differentiated: float | None = None

    def iteration_seconds(
        self, config: Config, precision: str, steps: int, continued: int | None = None
    ) -> float:
        """Returns the price of one iteration in seconds: the sum of its counted work.

        The sum covers exploration, regeneration, the decoding and scoring of both, the gradients of
        the reward (for objectives that train on them), the update (at the price `trained` per term,
        whichever parameters `config` trains) and, if `precision` is not `rollout.precision`, the
        sync (making the low-precision copy of the policy). The first `rollout.explore.exact_steps`
        exploring steps are priced in `rollout.precision`, and regeneration takes `rollout.num_steps
        - continued` steps. Only the fraction `algorithm.kl_fraction` of the training terms takes a
        prediction of the reference. If `algorithm.kl_coef` is 0, the terms of most objectives take
        none (`_skips_reference`). The sum leaves out text encoders, classifier-free guidance,
        `rollout.explore.correction_rank`, attention in FP8 and `rollout.explore.reward`. The image
        size is that of the plan that the prices come from.

        Args:
            config: The configuration, from which the numbers of prompts, candidates, kept
                candidates, regeneration steps and training terms are read.
            precision: The number format that the iteration explores in, a key of
                `quant.formats.FORMATS`.
            steps: The number of all exploring steps per candidate, the exact ones included. It must
                be larger than `rollout.explore.exact_steps`.
            continued: The number of steps that regeneration took over from exploration. None: the
                number that `continued_steps` gives for the configuration without `query_steps`,
                i.e. for an objective that records no state of the regeneration.

        Returns:
            The seconds; NaN if the attribute `network` lacks `precision` or `rollout.precision`.

        Raises:
            KeyError: If there is no format `precision` and `continued` is None.
            InputError: If an objective `module:function` cannot be imported.
            ConfigError: If its attribute `trains_on` has an unknown value.
        """
        rollout = config.rollout
        prompts = config.train.num_prompts
        nan = float("nan")
        exact = rollout.explore.exact_steps
        full = self.network.get(rollout.precision, nan)
        pool = prompts * rollout.candidates
        kept = prompts * rollout.kept
        redone = kept * rollout.regenerate
        explored = pool * ((steps - exact) * self.network.get(precision, nan) + exact * full)
        if continued is None:
            continued = continued_steps(rollout, precision, steps)
        synced = 0.0 if precision == rollout.precision else self.synced
        # One of the three predictions of a term is the reference's.
        skipped = full if _skips_reference(config) else (1 - config.algorithm.kl_fraction) * full
        update = kept * config.num_train_sigmas * (self.trained - skipped)
        targets = 0.0
        if config.algorithm.trains_on == "reward_gradients":
            _, gradients = try_targets(config.algorithm)
            each = 4 * self.scored if self.differentiated is None else self.differentiated
            targets = kept * gradients * each
        return (
            explored
            + redone * (rollout.num_steps - continued) * full
            + (pool + redone) * self.scored
            + targets
            + update
            + synced
        )


def _skips_reference(config: Config) -> bool:
    """Returns whether the update needs no prediction of the reference policy.

    It needs one if `algorithm.kl_coef` is above 0. If that is 0, dpo is the only objective of the
    package that needs one. An objective `module:function` counts as needing one too, unless it
    trains on reward gradients.

    Args:
        config: The configuration. An objective `module:function` is imported for its attribute
            `trains_on`; if it cannot be imported, InputError is raised.
    """
    algorithm = config.algorithm
    if is_plugin(algorithm.objective):
        reads_always = algorithm.trains_on != "reward_gradients"
    else:
        reads_always = algorithm.objective == "dpo"
    return algorithm.kl_coef == 0 and not reads_always


def count_network_evaluations(
    config: Config, precision: str, steps: int, continued: int | None = None
) -> int:
    """Returns the number of network evaluations for an iteration's exploration and regeneration.

    Those of the update, and the second evaluation of classifier-free guidance, are not counted.

    Args:
        config: The configuration, from which the numbers of prompts, candidates, kept candidates
            and regeneration steps are read. Without regeneration only exploration counts.
        precision: The format that the iteration explores in, a key of `quant.formats.FORMATS`. It
            matters only if `continued` is None.
        steps: The number of all exploring steps per candidate, those in the training precision
            (`rollout.explore.exact_steps`) included.
        continued: The number of steps that regeneration took over from exploration. None: the
            number that `continued_steps` gives for the configuration without `query_steps`, i.e.
            for an objective that records no state of the regeneration.

    Raises:
        KeyError: If there is no format `precision` and `continued` is None.
    """
    rollout = config.rollout
    if continued is None:
        continued = continued_steps(rollout, precision, steps)
    regenerated = rollout.num_steps - continued
    return config.train.num_prompts * (
        rollout.candidates * steps + rollout.kept * rollout.regenerate * regenerated
    )


def prices_of(plan: Mapping[str, Any]) -> Prices:
    """Returns the prices of one model on one device, from the plan of an iteration.

    A plan has the seconds of each phase of an iteration of a preset with overrides. They are
    divided by the configuration's numbers of samples, steps and training terms. For an objective on
    reward gradients, the phase "targets" gives the price of a gradient of the reward. If the plan
    is for several devices, the prices are elapsed seconds with all of them at work (not multiplied
    by their number).

    Args:
        plan: The plan, as `solrl plan` prints it in JSON. It has the keys "preset" (its name),
            "overrides" (a list of `key=value`), "device", "exploration" (a text whose first word is
            the number format) and "phases", a list of dicts with "name" and "seconds". The phases
            are "explore", "regenerate", "update" and possibly "score", "sync" and "targets".
            Without "score" or "sync", that price is 0. Plans of older versions have no "overrides";
            if they have a phase "targets", their key "objective" (by default "opsd") names the
            objective. If exploration runs in the training precision too, the price of its format
            comes from "regenerate".

    Returns:
        The prices, whose name is that of the preset's model (`model.name`) and the device.

    Raises:
        ConfigError: If there is no such preset, or an override is invalid.
        InputError: If the plan has an objective `module:function`, or if its
            `rollout.explore.exact_steps` is not 0 or its `algorithm.kl_fraction` not 1, because its
            seconds then do not divide into prices.
        KeyError: If an entry or a phase is missing, e.g. "regenerate".
        TypeError: If an entry is of another type. Other malformed plans raise ValueError,
            AttributeError or IndexError.
    """
    seconds = {phase["name"]: phase["seconds"] for phase in plan["phases"]}
    overrides = plan.get("overrides")
    if overrides is None:  # a plan of an older version, which names the objective alone
        overrides = [f"objective={plan.get('objective', 'opsd')}"] if "targets" in seconds else []
    config = resolve(plan["preset"], tuple(overrides))
    rollout = config.rollout
    # A plan may be a stranger's file, so no function that it names is imported.
    if is_plugin(config.algorithm.objective):
        raise InputError(
            f"algorithm.objective={config.algorithm.objective}: expected a plan of an objective of "
            "the package"
        )
    for field, value, default in (
        ("rollout.explore.exact_steps", rollout.explore.exact_steps, 0),
        ("algorithm.kl_fraction", config.algorithm.kl_fraction, 1),
    ):
        if value != default:
            raise InputError(
                f"{field}={value}: expected a plan with {default}; the prices do not depend on it"
            )
    prompts = config.train.num_prompts
    pool = prompts * rollout.candidates
    kept = prompts * rollout.kept
    network = {
        plan["exploration"].split()[0]: seconds["explore"] / (pool * rollout.explore.num_steps),
        rollout.precision: seconds["regenerate"] / (kept * rollout.num_steps),
    }
    trained = seconds["update"] / (kept * config.num_train_sigmas)
    differentiated = None
    if "targets" in seconds:
        _, gradients = try_targets(config.algorithm)
        differentiated = seconds["targets"] / (kept * gradients)
    if _skips_reference(config):  # `trained` has a prediction of the reference
        trained += network[rollout.precision]
    return Prices(
        f"{config.model.name}-{plan['device']}",
        network,
        seconds.get("score", 0.0) / (pool + kept),
        trained,
        seconds.get("sync", 0.0),
        differentiated,
    )


def packaged_prices() -> dict[str, Prices]:
    """Returns the prices that the package contains (`assets/prices.json`).

    Returns:
        The `Prices` by their names, MODEL-DEVICE, e.g. "flux1-b200".
    """
    return {row["name"]: Prices(**row) for row in json.loads(PRICES_FILE.read_text())}


def find_prices(name: str) -> Prices:
    """Returns the prices that a user names.

    Args:
        name: The name of prices in the package, e.g. "flux1-b200", or else a file with the JSON of
            `solrl plan PRESET --json`. A name in the package wins over a file.

    Returns:
        The seconds of each kind of work of one model on one device.

    Raises:
        InputError: If there are no such prices, if the file is not a plan that `prices_of` accepts,
            or if one of the seconds is not above 0 ("sync" may be 0).
    """
    if name in (packaged := packaged_prices()):
        return packaged[name]
    try:
        prices = prices_of(parse_json(read_text(name)))
        positive = [*prices.network.values(), prices.scored, prices.trained]
        if prices.differentiated is not None:
            positive.append(prices.differentiated)
        if not (min(positive) > 0 and prices.synced >= 0):
            raise ValueError("its seconds must be above 0")
        return prices
    except InputError as error:
        raise InputError(f"prices={name}: {error}") from error
    except FileNotFoundError:
        raise InputError(f"prices={name}: no file, and none of {', '.join(packaged)}") from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise InputError(
            f"prices={name}: not the JSON that `solrl plan` prints ({error})"
        ) from error
