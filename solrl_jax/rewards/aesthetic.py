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
from solrl_jax.rewards.clip import normalize_vectors
from solrl_jax.rewards.network import NetworkReward, open_network, score_in_parts
from solrl_jax.rewards.protocol import Scores
from solrl_jax.rewards.sources import find

# Tensors of CLIP's file that are not read.
TEXT_TENSORS = ("text_model.", "text_projection.", "logit_scale")


class ImageEncoder(nnx.Module):
    """The image half of a CLIP: the vision tower and the projection of its output.

    The modules have the same names as in `models.vision.clip.CLIPModel`, so this network loads from
    the files of a whole CLIP, whose text tensors are not read.

    Args:
        c: The configuration of the CLIP. Only `vision_config` (the sizes of the vision tower) and
            `projection_dim` (the length of an embedding) are used.
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
    """Opens the LAION aesthetic predictor. An image is rated about 1 to 10; prompts have no effect.

    The image is rounded to 8 bits, resized with Pillow's bicubic kernel and center-cropped to the
    square input of OpenAI's CLIP ViT-L/14. The rating is an affine function of its embedding,
    normalized to length 1. Missing files of the CLIP are downloaded from the Hugging Face hub.

    Args:
        paths: The setting `reward.paths`: where the files are, by key. Both keys are optional.
            "aesthetic": the safetensors file of the rating head, which `solrl convert` makes and
            which is never downloaded, or its directory; by default
            `weights/sac+logos+ava1-l14-linearMSE.safetensors` in the working directory.
            "aesthetic/clip": a directory, or the name of a hub repository, with the CLIP, by
            default openai/clip-vit-large-patch14. In place of the whole mapping, `solrl plan`
            passes the constant `sources.PACKAGED_CONFIGS`, which stands for the configurations in
            the package, without weights.

    Returns:
        The reward with the networks "encoder" and "head", whose parameters are not read yet. Its
        only score is "reward".

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
        config.vision_config.image_size, "bicubic", eight_bit=True, fit="crop", crop_rounding="down"
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
    """Rates images. For use under jit.

    Args:
        encoder: The `ImageEncoder` as a `Component`: the structure of a network, without
            parameters.
        head: The network that rates one embedding vector of unit norm, as a `Component` too.
        preprocess: Converts images to normalized pixels of the size that the encoder reads.
        params: The parameters of the two networks: {"encoder": ..., "head": ...}, each value a
            nested dict of float32 arrays, in which a weight with a 16-bit matmul is a
            `HalfPrecisionWeight`.
        rows: A tuple: the images [b, H, W, 3] in [0, 1], and the array [b] of `placeholder_rows`,
            which stands in for the prompts and is not read.

    Returns:
        {"reward": the ratings, about 1 to 10, float32 [b]}.
    """
    images, _ = rows
    embedding = normalize_vectors(encoder(encoder.gather(params["encoder"]))(preprocess(images)))
    return {"reward": head(head.gather(params["head"]))(embedding)}


def placeholder_rows(prompts: Sequence[str]) -> Float[np.ndarray, " n"]:
    """Returns one float32 zero per prompt: the `prepare` of a reward that does not read prompts.

    Args:
        prompts: The n prompts, whose texts have no effect.
    """
    return np.zeros(len(prompts), np.float32)
