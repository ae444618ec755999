"""The verifier of the embedded world of clips: does a clip show the object of its caption, and does
the object move as the caption says?

Every frame is judged as an image by the verifier of `data.shapes`. The motion is that of the
centroid of the largest object. Every clip is judged by itself; nothing is summed over the batch, so
the batch axis may be sharded in any way.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from solrl_jax.data.motion import scenes
from solrl_jax.data.shapes import verifier

_DIRECTIONS = np.asarray([scenes.DIRECTIONS[motion] for motion in scenes.MOTIONS], np.float32)
_IS_STILL = np.abs(_DIRECTIONS).sum(-1) == 0
# The weight of the frames in the score. The rest is that of the motion.
_FRAMES_WEIGHT = 0.6
# Lengths in pixels of a clip 32 wide. A moving object covers 8 or more of them.
# Distance along the direction of the caption: the ends of the soft ramp, and the smallest one.
_ALONG_RAMP = (0.0, 6.0)
_ALONG_STRICT = 6.0
# Distance across this direction, of any frame from the first one.
_ACROSS_RAMP = (5.0, 1.0)
_ACROSS_STRICT = 2.5
# Distance of any frame of an object that stays still from the first one.
_STILL_RAMP = (4.0, 0.5)
_STILL_STRICT = 1.5
# Every step between two frames must be more than this share of the mean step, so that a jump
# between two positions is no motion.
_STEADY_STRICT = 0.2
_STEADY_RAMP = (-0.4, 0.6)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ClipTargets:
    """What n captions ask for, as indices. Without the axis n: what one caption asks for. It is a
    pytree.

    Attributes:
        objects: The object, as the `data.shapes.verifier.Targets` of the caption "a COLOR SHAPE".
            Its first group is this one object, of any size (-1). Its second group is absent (count
            0).
        motion: Index into `scenes.MOTIONS`, int32.
    """

    objects: verifier.Targets
    motion: Int[Array, "*n"]


class ClipVerdict(NamedTuple):
    """The judgment of n clips, or of one clip without the axis n.

    Attributes:
        score: Partial credit in [0, 1], float32.
        moves: Whether there is an object in every frame, and the largest one moves as the caption
            says, whatever its color and shape.
        strict: Whether every frame shows exactly the object that the caption asks for and nothing
            else, and `moves`.
    """

    score: Float[Array, "*n"]
    moves: Bool[Array, "*n"]
    strict: Bool[Array, "*n"]


def parse_targets(captions: Sequence[str]) -> ClipTargets:
    """Returns what captions ask for, as indices.

    Args:
        captions: n captions; n may be 0.

    Returns:
        `ClipTargets` with one row per caption.

    Raises:
        ValueError: If a caption does not follow the grammar of `scenes`.
    """
    parsed = [scenes.parse_caption(caption) for caption in captions]
    motion = np.array([scenes.MOTIONS.index(scene.motion) for scene in parsed], np.int32)
    objects = verifier.parse_targets([f"a {scene.color} {scene.shape}" for scene in parsed])
    return ClipTargets(objects, jnp.asarray(motion))


@jax.jit
def verify(clips: Float[Array, "n t h w 3"], targets: ClipTargets) -> ClipVerdict:
    """Judges each clip against what its caption asks for. Compiled for each shape.

    The score is 0.6 times the mean score of the frames, judged as images of the object, plus 0.4
    times how well the largest object of each frame moves as the caption says. The second term is
    multiplied by the smallest presence of this object in a frame, whatever its color: about 0 if it
    is too small for an object, and 1 if it is large enough.

    Args:
        clips: Finite RGB in [0, 1], of any floating-point dtype and size. Thresholds of areas and
            lengths scale with the size of the frames.
        targets: What the captions of the clips ask for, one row per clip.

    Returns:
        For each clip, [n]: `score` in [0, 1] (float32), and two verdicts (bool): `moves` (there is
        an object in every frame, and the largest one moves as the caption says) and `strict` (every
        frame shows exactly the object of the caption, and `moves`).

    Raises:
        ValueError: While tracing, if the clips have fewer than two frames, in which nothing moves.
    """
    if clips.shape[1] < 2:
        raise ValueError(f"clips with {clips.shape[1]} frame(s): judging motion needs 2 or more")

    def judge_frame(
        frame: Float[Array, "h w 3"], target: verifier.Targets
    ) -> tuple[verifier.Verdict, Float[Array, ""], Float[Array, ""], Float[Array, " 2"]]:
        components = verifier.measure(frame.astype(jnp.float32))
        verdict = verifier.judge(components, target)
        # The components are sorted by area, the largest first.
        return verdict, components.present[0], components.area[0], components.centroid[0]

    def verify_one(clip: Float[Array, "t h w 3"], target: ClipTargets) -> ClipVerdict:
        frames, present, area, centroid = jax.vmap(judge_frame, (0, None))(clip, target.objects)
        motion, moves = _judge_motion(centroid, target.motion)
        moves &= (area >= verifier.MIN_AREA).all()
        score = _FRAMES_WEIGHT * frames.score.mean()
        score += (1 - _FRAMES_WEIGHT) * motion * present.min()
        return ClipVerdict(score, moves, frames.strict.all() & moves)

    return jax.vmap(verify_one)(clips, targets)


def _judge_motion(
    centroid: Float[Array, "t 2"], motion: Int[Array, ""]
) -> tuple[Float[Array, ""], Bool[Array, ""]]:
    """Returns two scalars: how well an object moves as a caption says, in [0, 1], and whether it
    does.

    It moves in a direction if it covers more than 6 pixels along it from the first to the last
    frame, is always less than 2.5 pixels beside the line in this direction through its first
    position, and every step along it is more than a fifth of the mean step along it, where a mean
    step below 0.25 pixels counts as 0.25. It stays still if it is always less than 1.5 pixels from
    its first position. How well it moves is the product of soft ramps (`verifier.ramp`) of the same
    measures.

    Args:
        centroid: (x, y) of the centroid of the object in each of two or more frames, in pixels of a
            frame scaled to the area 32 x 32 (at its own aspect ratio), with y growing downwards.
        motion: Index into `scenes.MOTIONS`.
    """
    direction = jnp.asarray(_DIRECTIONS)[motion]
    offset = centroid - centroid[0]
    along = (offset * direction).sum(-1)
    across = jnp.abs((offset * direction[::-1]).sum(-1)).max()
    total = along[-1]
    # Each step as a share of the mean one. A positive bound keeps it finite where nothing moves.
    mean_step = jnp.maximum(total / (len(centroid) - 1), 0.25)
    slowest = jnp.diff(along).min() / mean_step
    moving = (
        verifier.ramp(total, *_ALONG_RAMP)
        * verifier.ramp(across, *_ACROSS_RAMP)
        * verifier.ramp(slowest, *_STEADY_RAMP)
    )
    moves = (total > _ALONG_STRICT) & (across < _ACROSS_STRICT) & (slowest > _STEADY_STRICT)
    distance = jnp.sqrt((offset**2).sum(-1) + 1e-12).max()
    is_still = jnp.asarray(_IS_STILL)[motion]
    return (
        jnp.where(is_still, verifier.ramp(distance, *_STILL_RAMP), moving),
        jnp.where(is_still, distance < _STILL_STRICT, moves),
    )
