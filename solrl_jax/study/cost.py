"""Prices an iteration by counted work: each network evaluation at its roofline time on a named
device.

The time on this machine says nothing about a method, because a CPU emulates the formats that are
fast elsewhere. The network evaluations of exploration and regeneration, the decoded and scored
images, and the terms of the update are counted. Their prices are roofline seconds of a released
model's compiled programs (`planning`, `solrl plan`).
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from solrl_jax.config.presets import resolve
from solrl_jax.config.schema import Config
from solrl_jax.errors import InputError
from solrl_jax.storage.readers import parse_json, read_text

CARRIED = Path(__file__).parents[1] / "assets" / "prices.json"


@dataclasses.dataclass(frozen=True)
class Prices:
    """Seconds on one device."""

    name: str  # MODEL-DEVICE
    network: Mapping[str, float]  # a network evaluation, by format
    scored: float  # a picture, decoded and scored
    trained: float  # a term of the update: three predictions and a gradient
    synced: float  # merging and quantising the policy, once an iteration

    def of_iteration(self, config: Config, precision: str, steps: int) -> float:
        """Returns the seconds of an iteration; NaN if the exploration format has no price.

        Not counted are text encoders, the cost of a correction, the gain of attention in FP8, and a
        second network evaluation for classifier-free guidance. The update is that of adapters, and
        images have the size of the plan's preset.

        Args:
            config: The configuration.
            precision: The format that the iteration explores in.
            steps: The number of its exploring steps.
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
        synced = 0.0 if precision == rollout.precision else self.synced
        update = kept * config.num_train_sigmas * self.trained
        return (
            explored
            + redone * rollout.num_steps * full
            + (pool + redone) * self.scored
            + update
            + synced
        )


def evaluations(config: Config, steps: int) -> int:
    """Returns the network evaluations of an iteration's exploration and regeneration.

    Args:
        config: The configuration.
        steps: The number of exploring steps.
    """
    rollout = config.rollout
    return config.train.num_prompts * (
        rollout.candidates * steps + rollout.kept * rollout.regenerate * rollout.num_steps
    )


def prices_of(plan: Mapping[str, Any]) -> Prices:
    """Returns the prices of a plan for one device. Whole batches are divided by their number of
    samples.

    Args:
        plan: The plan, as `solrl plan` prints it in JSON.
    """
    config = resolve(plan["preset"])
    rollout = config.rollout
    prompts = config.train.num_prompts
    seconds = {stage["name"]: stage["seconds"] for stage in plan["stages"]}
    pool = prompts * rollout.candidates
    kept = prompts * rollout.kept
    network = {
        plan["exploration"].split()[0]: seconds["explore"] / (pool * rollout.explore.num_steps),
        rollout.precision: seconds["regenerate"] / (kept * rollout.num_steps),
    }
    return Prices(
        f"{config.model.name}-{plan['device']}",
        network,
        seconds["score"] / (pool + kept),
        seconds["update"] / (kept * config.num_train_sigmas),
        seconds.get("sync", 0.0),
    )


def carried() -> dict[str, Prices]:
    """Returns the prices that the package contains, by their names."""
    return {row["name"]: Prices(**row) for row in json.loads(CARRIED.read_text())}


def find_prices(name: str) -> Prices:
    """Returns prices by name.

    Args:
        name: A name of prices in the package, or a file with the JSON of `solrl plan`.

    Raises:
        InputError: If there are no such prices, or if the file is no plan.
    """
    if name in (there := carried()):
        return there[name]
    try:
        prices = prices_of(parse_json(read_text(name)))
        if not (
            min(*prices.network.values(), prices.scored, prices.trained) > 0 and prices.synced >= 0
        ):
            raise ValueError("its seconds must be above 0")
        return prices
    except FileNotFoundError:
        raise InputError(f"prices={name}: no file, and none of {', '.join(there)}") from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise InputError(
            f"prices={name}: not the JSON that `solrl plan` prints ({error})"
        ) from error
