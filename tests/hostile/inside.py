"""Functions that return rewards inside JAX that do not behave. All arguments have defaults, as of
such functions.
"""

import builtins
import os

import numpy as np

from solrl_jax.rewards.protocol import Reward
from tests.hostile.outside import Mute


def _rows(prompts):
    return np.zeros(len(prompts), np.float32)


def _mean(params, images, rows):
    return {"reward": images.mean((1, 2, 3))}


def _raise(error):
    raise error


def raising(name="", inputs="images"):
    error = {"Mute": Mute(), "SystemExit": SystemExit(1)}.get(name) or getattr(builtins, name)("no")
    return Reward(None, _rows, lambda *_: _raise(error), inputs=inputs)


def raising_when_prepared(name=""):
    return Reward(None, lambda prompts: _raise(getattr(builtins, name)(1)), _mean)


def returning(what="", inputs="images"):
    """A reward whose score returns what `what` makes of the mean [b]."""
    scores_of = {
        "one number": lambda mean: {"reward": mean.mean()},
        "a column": lambda mean: {"reward": mean[:, None]},
        "a complex number": lambda mean: {"reward": mean + 1j},
        "another name": lambda mean: {"other": mean},
        "nothing": lambda mean: None,
    }[what]
    return Reward(
        None, _rows, lambda params, images, rows: scores_of(images.mean((1, 2, 3))), inputs=inputs
    )


def bright(least=0.0):
    """The mean; no score for pictures darker than `least`."""
    return Reward(
        None,
        _rows,
        lambda params, images, rows: {"reward": _where_at_least(images.mean((1, 2, 3)), least)},
    )


def _where_at_least(mean, least):
    import jax.numpy as jnp

    return jnp.where(mean >= least, mean, jnp.nan)


def preparing(what=""):
    prepared = {"one row": np.zeros(1), "objects": [object()]}[what]
    return Reward(None, lambda prompts: prepared, _mean)


def having(field="", value=None):
    return Reward(**{"params": None, "prepare": _rows, "score": _mean} | {field: value})


def promising():
    return Reward(None, _rows, _mean, others=("more",))


def loud():
    """Prints and goes elsewhere, whenever it is called."""

    def score(params, images, rows):
        print("traced")
        os.chdir(os.sep)
        return _mean(params, images, rows)

    print("made")
    os.chdir(os.sep)
    return Reward(
        None,
        lambda prompts: print("prepared") or _rows(prompts),
        score,
        check=lambda prompt: print("checked"),
    )
