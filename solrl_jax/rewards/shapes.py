"""The verifier of the embedded world of shapes as a reward."""

from collections.abc import Mapping, Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float

from solrl_jax.data.shapes import scenes, verifier
from solrl_jax.errors import InputError
from solrl_jax.rewards.protocol import Reward, Scores


def shapes(paths: Mapping[str, str]) -> Reward:
    """Opens the verifier of the embedded world of shapes as a reward.

    "reward" is partial credit in [0, 1] for the objects, their colors, shapes and relation, and the
    absence of other objects (`data.shapes.verifier.verify`). "strict" is 1 if the image shows
    exactly the objects that its caption asks for, and else 0. The field `check` of the reward
    accepts the captions that `data.shapes.scenes.parse_caption` accepts, such as "two small red
    circles".

    Args:
        paths: Not read, because the verifier has no files.

    Returns:
        A reward without parameters, with the scores "reward" and "strict".
    """
    return Reward(None, prepare, score, others=("strict",), check=scenes.parse_caption)


def prepare(prompts: Sequence[str]) -> verifier.Targets:
    """Parses captions into the objects that they ask for.

    Args:
        prompts: The captions; there may be none.

    Returns:
        `Targets` of JAX arrays with one row per caption: int32 [n, 2] for the count, color, shape
        and size of its two groups of objects, and int32 [n] for the relation between them. All but
        the count are indices into lists of `data.shapes.scenes`, e.g. `COLORS`. A missing group has
        the count 0, and 0 for its other values; the size is -1 if any fits, and the relation -1 if
        there is none.

    Raises:
        InputError: If a prompt is no caption of the embedded world.
    """
    try:
        return verifier.parse_targets(prompts)
    except ValueError as error:
        raise InputError(f"reward 'shapes': {error}") from error


def score(params: None, images: Float[Array, "b H W 3"], targets: verifier.Targets) -> Scores:
    """Scores images against the objects that their captions ask for.

    Args:
        params: Not read, because the verifier has no parameters.
        images: The images [b, H, W, 3], in [0, 1].
        targets: The objects that the caption of each image asks for, from `prepare`.

    Returns:
        {"reward": partial credit in [0, 1], "strict": 1 if the image shows exactly the objects that
        the caption asks for, otherwise 0}. Both are float32 [b].
    """
    verdict = verifier.verify(images, targets)
    return {"reward": verdict.score, "strict": verdict.strict.astype(jnp.float32)}
