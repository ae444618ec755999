"""The verifier of the embedded world of clips as a reward."""

from collections.abc import Mapping, Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float

from solrl_jax.data.motion import scenes, verifier
from solrl_jax.errors import InputError
from solrl_jax.rewards.protocol import Reward, Scores


def motion(paths: Mapping[str, str]) -> Reward:
    """Opens the verifier of the embedded world of clips as a reward of whole clips.

    Clips may have any size, with values in [0, 1] and at least two frames; scoring shorter ones
    raises ValueError.

    "reward" is partial credit in [0, 1], 0.6 for the object in each frame and 0.4 for its motion
    (`data.motion.verifier.verify`). "moves" is 1 if there is an object in every frame and the
    largest one, whatever its color and shape, moves as the caption says, else 0. "strict" is 1 if
    "moves" is 1 and every frame shows exactly the object of the caption, else 0. The field `check`
    of the reward accepts the captions that `data.motion.scenes.parse_caption` accepts, such as "a
    red circle moves left to right".

    Args:
        paths: Not read, because the verifier has no files.

    Returns:
        A reward without parameters, with the scores "reward", "moves" and "strict".
    """
    return Reward(
        None, prepare, score, others=("moves", "strict"), check=scenes.parse_caption, clips=True
    )


def prepare(prompts: Sequence[str]) -> verifier.ClipTargets:
    """Parses captions into the object and the motion that they ask for.

    Args:
        prompts: The captions; there may be none.

    Returns:
        `ClipTargets` with one row per caption: `objects`, the `data.shapes.verifier.Targets` of "a
        COLOR SHAPE" (one object of any size), and `motion`, int32 [n] indices into
        `data.motion.scenes.MOTIONS`.

    Raises:
        InputError: If a prompt is no caption of the embedded world of clips.
    """
    try:
        return verifier.parse_targets(prompts)
    except ValueError as error:
        raise InputError(f"reward 'motion': {error}") from error


def score(params: None, clips: Float[Array, "b T H W 3"], targets: verifier.ClipTargets) -> Scores:
    """Scores clips against the objects and motions that their captions ask for.

    Args:
        params: Not read, because the verifier has no parameters.
        clips: The clips [b, T, H, W, 3], in [0, 1], of two or more frames.
        targets: The object and the motion that the caption of each clip asks for, from `prepare`.

    Returns:
        A dict of float32 arrays [b]. "reward": partial credit in [0, 1]. "moves": 1 if every frame
        has an object and the largest one moves as the caption says, else 0. "strict": 1 if "moves"
        is 1 and every frame shows exactly the object of the caption, else 0.

    Raises:
        ValueError: While tracing, if the clips have fewer than two frames.
    """
    verdict = verifier.verify(clips, targets)
    return {
        "reward": verdict.score,
        "moves": verdict.moves.astype(jnp.float32),
        "strict": verdict.strict.astype(jnp.float32),
    }
