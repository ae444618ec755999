"""ImageReward v1.0 (arXiv 2304.05977): human preference, from a fine-tuned BLIP.

The network reads prompt and image together.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from jaxtyping import Array, Float

from solrl_jax.models.loading.component import Component
from solrl_jax.models.loading.weights import locate_tensors
from solrl_jax.models.text_encoders.tokenizers import tokenize
from solrl_jax.models.vision.blip import UNUSED, ImageReward, ImageRewardConfig
from solrl_jax.models.vision.image_resize import Preprocessing
from solrl_jax.rewards.network import NetworkReward, open_network, score_in_parts
from solrl_jax.rewards.protocol import Scores
from solrl_jax.rewards.sources import find
from solrl_jax.rewards.texts import open_image_reward_tokenizer


def imagereward(
    paths: Mapping[str, str], config: ImageRewardConfig = ImageRewardConfig()
) -> NetworkReward:
    """Opens ImageReward. The score is standardized, about -2 to 2.

    Images of any size are rounded to 8 bits, resized with Pillow's bicubic kernel and
    center-cropped to a square. Prompts are padded or cut to `config.prompt_tokens` tokens (35).
    Missing files of the tokenizer are downloaded from the Hugging Face hub. Also adds BLIP's two
    special tokens to the tokenizer object of this folder, which all rewards of the process share.

    Args:
        paths: The setting `reward.paths`: where the files are, by key. "imagereward": the
            safetensors file that `solrl convert` made, or its directory, by default
            `weights/ImageReward.safetensors` in the working directory. "imagereward/tokenizer": a
            directory, or the name of a hub repository, with the tokenizer, by default
            google-bert/bert-base-uncased. In place of the mapping, `solrl plan` passes the constant
            `sources.PACKAGED_CONFIGS`, which stands for the files in the package, without weights.
        config: The sizes of the network, which its file does not hold. The default is the released
            network.

    Returns:
        The reward with the network "blip". Only the header of its file was read, not its
        parameters. Its only score is "reward".

    Raises:
        InputError: If a file is missing and cannot be downloaded, or the tokenizer cannot be
            loaded.
        ValueError: If the file has other tensors or shapes than the network.
    """
    file = find("imagereward", paths)
    network = open_network(
        partial(ImageReward, config), file, partial(locate_tensors, unused=UNUSED)
    )
    tokenizer = find("imagereward/tokenizer", paths)
    open_image_reward_tokenizer(tokenizer)
    preprocess = Preprocessing(config.image_size, "bicubic", eight_bit=True, fit="crop")
    return NetworkReward(
        networks={"blip": network},
        prepare=partial(tokenize, tokenizer, length=config.prompt_tokens),
        score=partial(score_in_parts, partial(image_reward_scores, network, preprocess)),
    )


def image_reward_scores(
    network: Component,
    preprocess: Preprocessing,
    params: Any,
    rows: tuple[Float[Array, "b H W 3"], dict[str, Array]],
) -> Scores:
    """Scores images against their prompts, under jit.

    Args:
        network: The BLIP with its head (`models.vision.blip.ImageReward`) as a `Component`: its
            structure, without parameters.
        preprocess: Converts images to normalized pixels of the size that the network reads.
        params: {"blip": the parameters of the network, a nested dict of arrays}.
        rows: A tuple: the images [b, H, W, 3] in [0, 1], and a dict with the tokens of the prompt
            of each image: "ids", int32 [b, length], and "mask", bool [b, length], false for
            padding.

    Returns:
        {"reward": the standardized scores, float32 [b]}.
    """
    images, tokens = rows
    model = network(network.gather(params["blip"]))
    return {"reward": model(preprocess(images), tokens["ids"], tokens["mask"])}
