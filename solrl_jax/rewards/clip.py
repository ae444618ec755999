"""CLIP rewards: the cosine between the CLIP embeddings of an image and its prompt.

CLIP is arXiv 2103.00020. Each score is on its published scale.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from solrl_jax.models.loading.component import Component
from solrl_jax.models.locate import EMBEDDED_FOLDER
from solrl_jax.models.text_encoders.tokenizers import tokenize
from solrl_jax.models.vision.clip import CLIPConfig, CLIPModel
from solrl_jax.models.vision.image_resize import MEAN, STD, Preprocessing
from solrl_jax.models.vision.open_clip import locate_open_clip_tensors
from solrl_jax.rewards.network import NetworkReward, open_network, score_in_parts
from solrl_jax.rewards.protocol import Scores
from solrl_jax.rewards.sources import find
from solrl_jax.rewards.texts import open_tokenizer, tokenize_as_open_clip

# HPS v2.1 is OpenCLIP's ViT-H-14. Its file does not hold the sizes. `eos_token_id` 2 means that a
# text ends at its highest token id (`models.vision.clip.TextModel.at_end_of_text`).
HPS = CLIPConfig.from_dict(
    {
        "projection_dim": 1024,
        "text_config": {
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "hidden_act": "gelu",
            "eos_token_id": 2,
        },
        "vision_config": {
            "hidden_size": 1280,
            "intermediate_size": 5120,
            "num_hidden_layers": 32,
            "num_attention_heads": 16,
            "hidden_act": "gelu",
            "patch_size": 14,
        },
    }
)

Preprocess = Callable[[Float[Array, "b H W 3"]], Float[Array, "b h w 3"]]


def clipscore(paths: Mapping[str, str]) -> NetworkReward:
    """Opens CLIPScore (arXiv 2104.08718) with OpenAI's CLIP ViT-L/14.

    The score of an image and its prompt is the cosine of their embeddings times
    `exp(logit_scale) / 100`, a factor close to 1. Images of any size are resized bilinearly, as
    PyTorch does it with antialiasing, and center-cropped to a square. Prompts are cut after 77
    tokens. Missing files are downloaded from the Hugging Face hub.

    Args:
        paths: The setting `reward.paths`: where the files are, by key. "clipscore": a directory, or
            the name of a hub repository, with the CLIP and its tokenizer; without it
            openai/clip-vit-large-patch14. In place of the whole mapping, `solrl plan` passes the
            constant `sources.PACKAGED_CONFIGS`, which stands for the configuration in the package,
            without weights.

    Returns:
        The reward with the network "clip", whose parameters are not read yet. Its only score is
        "reward".

    Raises:
        InputError: If a file is missing and cannot be downloaded, or the tokenizer cannot be
            loaded.
        ValueError: If the configuration of the CLIP is not supported, or a file has other tensors
            or shapes than the network.
    """
    folder = find("clipscore", paths)
    config = CLIPConfig.read(folder)
    preprocess = Preprocessing(
        config.vision_config.image_size, "bilinear", eight_bit=False, fit="crop"
    )
    return _clip_reward(folder, folder, config, preprocess, divisor=100)


def pickscore(paths: Mapping[str, str]) -> NetworkReward:
    """Opens PickScore v1 (arXiv 2305.01569), a CLIP ViT-H/14 fine-tuned on human preferences.

    The score of an image and its prompt, about 0.8, is the cosine of their embeddings times
    `exp(logit_scale) / 26`. Images of any size are rounded to 8 bits, resized with Pillow's bicubic
    kernel and center-cropped to a square. Prompts are cut after 77 tokens. Missing files are
    downloaded from the Hugging Face hub.

    Args:
        paths: The setting `reward.paths`: where the files are, by key. Each entry is a directory or
            the name of a hub repository. "pickscore": the network, by default
            yuvalkirstain/PickScore_v1. "pickscore/tokenizer": the tokenizer, by default
            laion/CLIP-ViT-H-14-laion2B-s32B-b79K. In place of the whole mapping, `solrl plan`
            passes the constant `sources.PACKAGED_CONFIGS`, which stands for the configurations in
            the package, without weights.

    Returns:
        The reward with the network "clip", whose parameters are not read yet. Its only score is
        "reward".

    Raises:
        InputError: If a file is missing and cannot be downloaded, or the tokenizer cannot be
            loaded.
        ValueError: If the configuration of the CLIP is not supported, or a file has other tensors
            or shapes than the network.
    """
    folder = find("pickscore", paths)
    config = CLIPConfig.read(folder)
    preprocess = Preprocessing(
        config.vision_config.image_size, "bicubic", eight_bit=True, fit="crop", crop_rounding="down"
    )
    return _clip_reward(folder, find("pickscore/tokenizer", paths), config, preprocess, divisor=26)


def hpsv2(paths: Mapping[str, str], config: CLIPConfig = HPS) -> NetworkReward:
    """Opens HPS v2.1 (arXiv 2306.09341), a CLIP ViT-H/14 fine-tuned on human preferences.

    The score of an image and its prompt is the cosine of their embeddings, about 0.3. Images of any
    size are resized bicubically in float32 and padded to a square with black. The hpsv2 package
    resizes 8-bit images, so scores differ from its scores by up to 1.1e-3. Prompts are cut after 77
    tokens. Missing files of the tokenizer are downloaded from the Hugging Face hub.

    Args:
        paths: The setting `reward.paths`: where the files are, by key. "hpsv2": the converted
            safetensors file (in OpenCLIP's layout) or its directory, by default
            `weights/HPS_v2.1_compressed.safetensors` in the working directory. "hpsv2/tokenizer": a
            directory, or the name of a hub repository, with the tokenizer, by default
            laion/CLIP-ViT-H-14-laion2B-s32B-b79K. In place of the whole mapping, `solrl plan`
            passes the constant `sources.PACKAGED_CONFIGS`, which stands for the files in the
            package, without weights.
        config: The sizes of the network, which its file does not hold. The default is the released
            network.

    Returns:
        The reward with the network "clip", whose parameters are not read yet. Its only score is
        "reward".

    Raises:
        InputError: If a file is missing and cannot be downloaded, or the tokenizer cannot be
            loaded.
        ValueError: If the file has other tensors or shapes than the network.
    """
    file = find("hpsv2", paths)
    tokenizer = find("hpsv2/tokenizer", paths)
    network = open_network(partial(CLIPModel, config), file, locate_open_clip_tensors)
    preprocess = Preprocessing(
        config.vision_config.image_size, "bicubic", eight_bit=False, fit="pad"
    )
    open_tokenizer(tokenizer)
    length = config.text_config.max_position_embeddings
    return NetworkReward(
        networks={"clip": network},
        prepare=partial(tokenize_as_open_clip, tokenizer, length),
        score=partial(score_in_parts, partial(cosine_scores, network, preprocess, None)),
    )


def tiny_clip(paths: Mapping[str, str]) -> NetworkReward:
    """Opens the small CLIP that the package contains, for tests and trials without downloads.

    The score of an image and its prompt is the cosine of their embeddings. Images must have
    32 x 32 pixels; scoring others raises ValueError. Prompts are cut after 24 tokens.

    Args:
        paths: Not read, because the package contains the CLIP.

    Returns:
        The reward with the network "clip", whose parameters are not read yet. Its only score is
        "reward".
    """
    folder = EMBEDDED_FOLDER / "tiny-clip"
    config = CLIPConfig.read(folder)
    network = open_network(partial(CLIPModel, config), folder)
    length = open_tokenizer(folder).model_max_length
    return NetworkReward(
        networks={"clip": network},
        prepare=partial(tokenize, folder, length=length),
        score=partial(score_in_parts, partial(cosine_scores, network, normalize_pixels, None)),
    )


def _clip_reward(
    folder: Path, tokenizer: Path, config: CLIPConfig, preprocess: Preprocess, divisor: float
) -> NetworkReward:
    """Opens a CLIP in the layout of transformers as a reward.

    The score is the cosine of the embeddings of image and prompt times
    `exp(logit_scale) / divisor`, where `logit_scale` is a parameter of the CLIP. Prompts are padded
    or cut to as many tokens as the text tower has positions (`max_position_embeddings`).

    Args:
        folder: The folder of the network, with its safetensors files. In the package's directory of
            configurations, which plans use, no file is needed.
        tokenizer: The folder of its tokenizer.
        config: The sizes of the network, read from the `config.json` in `folder`.
        preprocess: Converts images in [0, 1] to normalized pixels of the size that the CLIP reads.
        divisor: The published scale of the score, above 0: 100 for CLIPScore, 26 for PickScore.

    Returns:
        The reward with the network "clip", whose parameters are not read yet.

    Raises:
        InputError: If the tokenizer cannot be loaded.
        FileNotFoundError: If there is no safetensors file.
        ValueError: If a file has other tensors or shapes than the network.
    """
    network = open_network(partial(CLIPModel, config), folder)
    open_tokenizer(tokenizer)
    length = config.text_config.max_position_embeddings
    return NetworkReward(
        networks={"clip": network},
        prepare=partial(tokenize, tokenizer, length=length),
        score=partial(score_in_parts, partial(cosine_scores, network, preprocess, divisor)),
    )


def cosine_scores(
    network: Component,
    preprocess: Preprocess,
    divisor: float | None,
    params: Any,
    rows: tuple[Float[Array, "b H W 3"], dict[str, Array]],
) -> Scores:
    """Computes the cosine between the CLIP embeddings of images and prompts. For use under jit.

    Args:
        network: The CLIP (`models.vision.clip.CLIPModel`) as a `Component`: its structure, without
            parameters.
        preprocess: Converts images in [0, 1] to normalized pixels of the size that the CLIP reads.
        divisor: None: the score is the cosine itself. A number: the cosine is multiplied by
            `exp(logit_scale) / divisor`, where `logit_scale` is a parameter of the network.
        params: {"clip": the parameters of the network, a nested dict of arrays}.
        rows: A tuple: the images [b, H, W, 3] in [0, 1], and a dict with the tokens of the prompt
            of each image: "ids", int32 [b, length], and "mask", bool [b, length], true where the
            text tower may attend.

    Returns:
        {"reward": the scores, float32 [b]}.

    Raises:
        ValueError: If the pixels do not have the size that the CLIP reads, or if there are more
            tokens than it has positions.
    """
    images, tokens = rows
    model = network(network.gather(params["clip"]))
    image = normalize_vectors(model.encode_image(preprocess(images)))
    text = normalize_vectors(model.encode_text(tokens["ids"], tokens["mask"]))
    cosine = (image * text).sum(-1)
    if divisor is None:
        return {"reward": cosine}
    return {"reward": jnp.exp(model.logit_scale.get_value()) / divisor * cosine}


def normalize_pixels(images: Float[Array, "b H W 3"]) -> Float[Array, "b H W 3"]:
    """Normalizes images by the mean and standard deviation of CLIP's training images.

    There is no resizing.

    Args:
        images: RGB in [0, 1].

    Returns:
        The images less the mean of each channel, divided by its standard deviation.
    """
    return (images - MEAN) / STD


def normalize_vectors(x: Float[Array, "b d"]) -> Float[Array, "b d"]:
    """Divides vectors by their Euclidean lengths.

    Args:
        x: One vector per row.

    Returns:
        Vectors of length 1. A row of zeros becomes NaN.
    """
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)
