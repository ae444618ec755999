"""Rewards: how well pictures answer their prompts.

A reward is a `Reward`: `prepare` turns prompts into arrays on the host, `score` turns pictures and those arrays into one
number each, inside jit and on the mesh, a row at a time (no picture's score may depend on another's). To add one, write a
function that returns a `Reward` and name it in `REWARDS`.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from solrl_jax import sharding
from solrl_jax.backbone import EMBEDDED_FOLDER
from solrl_jax.files import InputError
from solrl_jax.shapes import verifier

Scores = dict[str, Float[Array, "b"]]


@dataclasses.dataclass(frozen=True, eq=False)
class Reward:
    """prepare(prompts) -> pytree of arrays, a row a prompt; score(params, images [b, H, W, 3] in [0, 1], prepared) -> scores.

    `score` returns the reward itself under "reward" and may add `others` (as "strict", a success or not), to watch or to train
    on as well.
    """

    params: Any
    prepare: Callable[[Sequence[str]], Any]
    score: Callable[[Any, Float[Array, "b H W 3"], Any], Scores]
    others: tuple[str, ...] = ()


def shapes_reward() -> Reward:
    """The verifier of the embedded world: partial credit in [0, 1], strict success beside it."""

    def score(params: None, images: Array, targets: verifier.Targets) -> Scores:
        verdict = verifier.verify(images, targets)
        return {"reward": verdict.score, "strict": verdict.strict.astype(jnp.float32)}

    def prepare(prompts: Sequence[str]) -> verifier.Targets:
        try:
            return verifier.targets(prompts)
        except ValueError as error:
            raise InputError(f"reward 'shapes': {error}") from error

    return Reward(None, prepare, score, others=("strict",))


def tiny_clip_reward() -> Reward:
    """Cosine of picture and prompt in the embedded CLIP (arXiv 2103.00020), about -0.2 to 0.6."""
    from models.clip import CLIPConfig, CLIPModel
    from models.pipeline import Component, load_tokenizer

    folder = EMBEDDED_FOLDER / "tiny-clip"
    clip = Component.of(folder, lambda d: lambda r: CLIPModel(CLIPConfig.from_dict(d), rngs=r))
    length = load_tokenizer(folder).model_max_length
    mean, std = np.array([0.48145466, 0.4578275, 0.40821073]), np.array([0.26862954, 0.26130258, 0.27577711])

    def prepare(prompts: Sequence[str]) -> dict[str, np.ndarray]:
        tokens = load_tokenizer(folder)(
            list(prompts), padding="max_length", max_length=length, truncation=True, return_tensors="np"
        )
        return {"ids": tokens["input_ids"].astype("int32"), "mask": tokens["attention_mask"].astype(bool)}

    def score(params: Any, images: Array, tokens: dict[str, Array]) -> Scores:
        model = clip(params)
        unit = lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True)
        image = unit(model.encode_image((images - mean.astype(np.float32)) / std.astype(np.float32)))
        return {"reward": (image * unit(model.encode_text(tokens["ids"], tokens["mask"]))).sum(-1)}

    return Reward(clip.load(jnp.float32), prepare, score)


REWARDS: dict[str, Callable[[], Reward]] = {"shapes": shapes_reward, "tiny-clip": tiny_clip_reward}


def make_reward(weights: Mapping[str, float]) -> Reward:
    """The weighted sum of named scores as one reward: `shapes` is that reward itself, `shapes/strict` another of its scores.

    Its own scores also hold every part, under these names. Raises InputError for a name that is not known.
    """
    names = sorted({name.split("/")[0] for name in weights})
    if unknown := [name for name in names if name not in REWARDS]:
        raise InputError(f"reward.weights: unknown reward {', '.join(map(repr, unknown))}; there are {', '.join(REWARDS)}")
    parts = {name: REWARDS[name]() for name in names}
    given = [n for name, part in parts.items() for n in (name, *(f"{name}/{other}" for other in part.others))]
    if absent := [name for name in weights if name not in given]:
        raise InputError(f"reward.weights: unknown score {', '.join(map(repr, absent))}; there are {', '.join(given)}")

    def score(params: dict[str, Any], images: Array, prepared: dict[str, Any]) -> Scores:
        out: Scores = {}
        for name, part in parts.items():
            for key, value in part.score(params[name], images, prepared[name]).items():
                out[name if key == "reward" else f"{name}/{key}"] = value
        total = sum((weight * out[name] for name, weight in weights.items()), jnp.zeros(()))
        return out | {"reward": jnp.asarray(total, jnp.float32)}

    return Reward(
        params={name: part.params for name, part in parts.items()},
        prepare=lambda prompts: {name: part.prepare(prompts) for name, part in parts.items()},
        score=score,
        others=tuple(given),
    )


@partial(sharding.jit, static_argnums=0)
def score_images(reward: Reward, params: Any, images: Float[Array, "b H W 3"], prepared: Any, index: Array) -> Scores:
    """Scores of pictures [b], each against the prompt that `index` [b] names among the prepared ones."""
    return reward.score(params, images, jax.tree.map(lambda x: jnp.asarray(x)[index], prepared))
