"""RL post-training of text-to-image flow models in JAX: explore in FP4, train in BF16 (Sol-RL).

    import solrl_jax as solrl

    experiment = solrl.load("tiny", "run.dir=runs/mine")
    state = solrl.fresh_state(experiment)
    for i in range(1, 21):
        state, outcome = solrl.iterate(experiment, state, i)

    images = solrl.generate("runs/demo", ["a red circle", "two blue squares"], seed=1)

Every public name is listed in `__all__`. A name is imported when it is first used, so importing the
package is quick. The method is that of arXiv 2604.06916.
"""

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from solrl_jax.api import TrainingInterrupted as TrainingInterrupted
    from solrl_jax.api import export as export
    from solrl_jax.api import export_lora as export_lora
    from solrl_jax.api import export_transformer as export_transformer
    from solrl_jax.api import generate as generate
    from solrl_jax.api import generate_with_latents as generate_with_latents
    from solrl_jax.api import import_lora as import_lora
    from solrl_jax.api import load as load
    from solrl_jax.api import open_policy as open_policy
    from solrl_jax.api import quantize as quantize
    from solrl_jax.api import rank as rank
    from solrl_jax.api import train as train
    from solrl_jax.config.presets import preset_names as preset_names
    from solrl_jax.config.presets import resolve as resolve
    from solrl_jax.config.schema import Config as Config
    from solrl_jax.config.values import ConfigError as ConfigError
    from solrl_jax.errors import InputError as InputError
    from solrl_jax.errors import RunError as RunError
    from solrl_jax.planning.preset import plan as plan
    from solrl_jax.quant.formats import FORMATS as FORMATS
    from solrl_jax.quant.matmul import dequantize as dequantize
    from solrl_jax.quant.matmul import matmul as matmul
    from solrl_jax.rewards.protocol import Reward as Reward
    from solrl_jax.rl.advantages import advantages as advantages
    from solrl_jax.rl.advantages import optimality as optimality
    from solrl_jax.rl.experiment import Experiment as Experiment
    from solrl_jax.rl.experiment import fresh_state as fresh_state
    from solrl_jax.rl.iteration import iterate as iterate
    from solrl_jax.rl.objectives.nft import nft_loss as nft_loss
    from solrl_jax.rl.select import select as select
    from solrl_jax.runs.evaluate import evaluate as evaluate
    from solrl_jax.testing import assert_block_error as assert_block_error
    from solrl_jax.testing import assert_ranking_preserved as assert_ranking_preserved
    from solrl_jax.testing import assert_selection_range as assert_selection_range
    from solrl_jax.testing import assert_top_k_regret as assert_top_k_regret

_WHERE = {
    "api": (
        "TrainingInterrupted",
        "export",
        "export_lora",
        "export_transformer",
        "generate",
        "generate_with_latents",
        "import_lora",
        "load",
        "open_policy",
        "quantize",
        "rank",
        "train",
    ),
    "config.presets": ("preset_names", "resolve"),
    "config.schema": ("Config",),
    "config.values": ("ConfigError",),
    "planning.preset": ("plan",),
    "quant.formats": ("FORMATS",),
    "quant.matmul": ("dequantize", "matmul"),
    "rl.advantages": ("advantages", "optimality"),
    "rl.objectives.nft": ("nft_loss",),
    "rewards.protocol": ("Reward",),
    "rl.select": ("select",),
    "errors": ("InputError", "RunError"),
    "testing": (
        "assert_block_error",
        "assert_ranking_preserved",
        "assert_selection_range",
        "assert_top_k_regret",
    ),
    "runs.evaluate": ("evaluate",),
    "rl.experiment": ("Experiment", "fresh_state"),
    "rl.iteration": ("iterate",),
}
_MODULES = {name: module for module, names in _WHERE.items() for name in names}
__all__ = [*sorted(_MODULES), "__version__"]


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used, and keeps it as a global of the package.

    "__version__" is not kept, but read anew from the installed distribution each time.

    Args:
        name: A name of `__all__`.

    Returns:
        The object of this name; for "__version__" the version as text.

    Raises:
        AttributeError: If `name` is not in `__all__`.
    """
    if name == "__version__":
        return importlib.metadata.version("solrl_jax")
    if name not in _MODULES:
        raise AttributeError(
            f"module 'solrl_jax' has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    value = getattr(importlib.import_module(f"solrl_jax.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Returns the public names, `__all__`, also those that have not been imported yet."""
    return __all__
