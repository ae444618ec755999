"""The LAION aesthetic predictor: how much people like an image, whatever its prompt.

See arXiv 2210.08402, section 3.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from solrl_jax.models.layers.linear import Linear
from solrl_jax.models.loading.component import Component
from solrl_jax.models.loading.weights import locate_tensors
from solrl_jax.models.vision.clip import CLIPConfig, VisionModel
from solrl_jax.models.vision.image_resize import Preprocessing
from solrl_jax.models.vision.score_head import ScoreHead
from solrl_jax.rewards.clip import unit
from solrl_jax.rewards.network import NetworkReward, open_network, score_in_parts
from solrl_jax.rewards.protocol import Scores
from solrl_jax.rewards.sources import find

# Tensors of CLIP's file that are not read.
TEXT_TENSORS = ("text_model.", "text_projection.", "logit_scale")


class ImageEncoder(nnx.Module):
    """The image half of `models.vision.clip.CLIPModel`: the vision tower and its projection.

    Its parameters have the same paths as there, so that it loads from the files of a whole CLIP.

    Args:
        c: The configuration of the CLIP: `vision_config` has the sizes of the vision tower, and
            `projection_dim` is the length of an embedding. The text tower is left out.
        rngs: Random number generators for the initial parameters.
    """

    def __init__(self, c: CLIPConfig, *, rngs: nnx.Rngs):
        self.vision_model = VisionModel(c.vision_config, rngs=rngs)
        self.visual_projection = Linear(
            c.vision_config.hidden_size, c.projection_dim, bias=False, rngs=rngs
        )

    def __call__(self, pixels: Float[Array, "b h w 3"]) -> Float[Array, "b e"]:
        """Returns the embeddings of images, not normalized, in the dtype of `pixels`.

        Args:
            pixels: Images of the tower's own size, normalized by the mean and the standard
                deviation of CLIP's training images.

        Returns:
            The embeddings [b, `projection_dim`].

        Raises:
            ValueError: If the images have another size or number of channels.
        """
        return self.visual_projection(self.vision_model(pixels))


def aesthetic(paths: Mapping[str, str]) -> NetworkReward:
    """Opens the predictor: a rating of about 1 to 10, whatever the prompt.

    It is an affine function of the direction of the image's embedding in OpenAI's ViT-L/14. Images
    of any size are resized and cropped to the square that the CLIP reads. Missing files of the CLIP
    are downloaded from the hub.

    Args:
        paths: The setting `reward.paths`. "aesthetic" is the converted safetensors file of the head
            or its directory, by default `sac+logos+ava1-l14-linearMSE.safetensors` in `weights/`;
            "aesthetic/clip" is a directory or repository of the CLIP, by default
            openai/clip-vit-large-patch14. `sources.CARRIED` itself opens the configurations in the
            package, without weights.

    Returns:
        The reward with the networks "encoder" and "head". It has no score beside "reward".

    Raises:
        InputError: If a file is missing and cannot be downloaded.
        ValueError: If the configuration of the CLIP is not supported, or a file has other tensors
            or shapes than its network.
    """
    head_file = find("aesthetic", paths)
    folder = find("aesthetic/clip", paths)
    config = CLIPConfig.read(folder)
    encoder = open_network(
        partial(ImageEncoder, config),
        folder,
        partial(locate_tensors, unused=TEXT_TENSORS),
    )
    head = open_network(partial(ScoreHead, config.projection_dim), head_file)
    preprocess = Preprocessing(
        config.vision_config.image_size, "bicubic", eight_bit=True, fit="crop", odd="down"
    )
    score = partial(aesthetic_scores, encoder, head, preprocess)
    return NetworkReward(
        networks={"encoder": encoder, "head": head},
        prepare=placeholder_rows,
        score=partial(score_in_parts, score),
    )


def aesthetic_scores(
    encoder: Component,
    head: Component,
    preprocess: Preprocessing,
    params: dict[str, Any],
    rows: tuple[Float[Array, "b H W 3"], Array],
) -> Scores:
    """Rates images, under jit.

    Args:
        encoder: The `ImageEncoder`, without parameters.
        head: The network that rates an embedding of length 1, without parameters.
        preprocess: Converts images to normalized pixels of the size that the encoder reads.
        params: The parameters of the two networks, under "encoder" and "head": a nested dict of
            arrays each.
        rows: The images in [0, 1], and one placeholder per image, which is not read because prompts
            have no influence.

    Returns:
        "reward": the ratings in float32, one per image.
    """
    images, _ = rows
    embedding = unit(encoder(encoder.gather(params["encoder"]))(preprocess(images)))
    return {"reward": head(head.gather(params["head"]))(embedding)}


def placeholder_rows(prompts: Sequence[str]) -> Float[np.ndarray, " n"]:
    """Returns one float32 zero per prompt, for a reward that does not read prompts.

    Args:
        prompts: The n prompts, whose texts have no effect.
    """
    return np.zeros(len(prompts), np.float32)
