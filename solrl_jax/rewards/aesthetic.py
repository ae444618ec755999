"""The LAION aesthetic predictor (arXiv 2210.08402, section 3): how much people like a picture, whatever its prompt."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from solrl_jax.models.layers.linear import Linear
from solrl_jax.models.loading.weights import locate_tensors
from solrl_jax.models.vision.clip import CLIPConfig, VisionModel
from solrl_jax.models.vision.image_resize import Preprocessing
from solrl_jax.models.vision.score_head import ScoreHead
from solrl_jax.rewards.clip import unit
from solrl_jax.rewards.network import loader, open_network
from solrl_jax.rewards.protocol import Loader, Scores
from solrl_jax.rewards.sources import find

TEXT_TENSORS = ("text_model.", "text_projection.", "logit_scale")  # in CLIP's file; not read


class ImageEncoder(nnx.Module):
    """The half of `models.vision.clip.CLIPModel` that reads pictures; its parameters have the same names."""

    def __init__(self, c: CLIPConfig, *, rngs: nnx.Rngs):
        self.vision_model = VisionModel(c.vision_config, rngs=rngs)
        self.visual_projection = Linear(
            c.vision_config.hidden_size, c.projection_dim, bias=False, rngs=rngs
        )

    def __call__(self, pixels: Float[Array, "b h w 3"]) -> Float[Array, "b e"]:
        return self.visual_projection(self.vision_model(pixels))


def aesthetic(paths: Mapping[str, str]) -> Loader:
    """A rating of about 1 to 10, from the direction of the picture's vector in OpenAI's ViT-L/14."""
    head_file = find("aesthetic", paths)
    folder = find("aesthetic/clip", paths)
    config = CLIPConfig.read(folder)
    encoder = open_network(
        lambda rngs: ImageEncoder(config, rngs=rngs),
        folder,
        partial(locate_tensors, unused=TEXT_TENSORS),
    )
    head = open_network(lambda rngs: ScoreHead(config.projection_dim, rngs=rngs), head_file)
    preprocess = Preprocessing(
        config.vision_config.image_size, "bicubic", eight_bit=True, fit="crop", odd="down"
    )

    # the prompts are not read, but `score` wants an array with a row a prompt
    def prepare(prompts):
        return np.zeros(len(prompts), np.float32)

    def score(params: dict[str, Any], images: Array, _: Array) -> Scores:
        vector = unit(encoder(encoder.gather(params["encoder"]))(preprocess(images)))
        return {"reward": head(head.gather(params["head"]))(vector)}

    return loader({"encoder": encoder, "head": head}, prepare, score)
