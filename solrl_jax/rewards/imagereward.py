"""ImageReward v1.0 (arXiv 2304.05977): human preference, by a fine-tuned BLIP that reads prompt and picture together."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from jaxtyping import Array

from solrl_jax.models.loading.weights import locate_tensors
from solrl_jax.models.vision.blip import UNUSED, ImageReward, ImageRewardConfig
from solrl_jax.models.vision.image_resize import Preprocessing
from solrl_jax.rewards.network import loader, open_network
from solrl_jax.rewards.protocol import Loader, Scores
from solrl_jax.rewards.sources import find
from solrl_jax.rewards.texts import image_reward_texts


def imagereward(
    paths: Mapping[str, str], config: ImageRewardConfig = ImageRewardConfig()
) -> Loader:
    """The standardised reward, about -2 to 2. Pictures are resized and cropped as Pillow and torchvision do it."""

    def build(rngs):
        return ImageReward(config, rngs=rngs)

    network = open_network(
        build, find("imagereward", paths), partial(locate_tensors, unused=UNUSED)
    )
    preprocess = Preprocessing(config.image_size, "bicubic", eight_bit=True, fit="crop")
    tokenize = image_reward_texts(find("imagereward/tokenizer", paths), config.tokens)

    def score(params: Any, images: Array, tokens: dict[str, Array]) -> Scores:
        return {
            "reward": network(network.gather(params))(
                preprocess(images), tokens["ids"], tokens["mask"]
            )
        }

    return loader(network, tokenize, score)
