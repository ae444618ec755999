"""Checks of a configuration against the model that it names."""

from solrl_jax.config.schema import Config
from solrl_jax.config.sizes import evaluation_size, model_size, training_sizes
from solrl_jax.errors import InputError, as_input_error
from solrl_jax.models.pipeline import Pipeline


def check_tile(tile: int | None, pipeline: Pipeline) -> None:
    """Checks the tile size of tiled decoding, `model.vae_tile_size`.

    Args:
        tile: side of a tile in pixels, a positive integer (not checked). None: images are decoded
            whole; always accepted.
        pipeline: the model. Its `compression` (image pixels per latent pixel) must divide the tile.

    Raises:
        InputError: `pipeline.compression` does not divide `tile`.
    """
    if tile is not None and tile % pipeline.compression:
        raise InputError(
            f"model.vae_tile_size={tile}: must be null or a multiple of {pipeline.compression}, "
            "the pixels per latent pixel"
        )


def check_sizes(config: Config, pipeline: Pipeline) -> None:
    """Checks that the model supports all image sizes of a configuration.

    They are `model.height` and `model.width`, every size in the list `rollout.size`, and
    `eval.size`. Where `rollout.size` or `eval.size` is not set, it is the size of `model`. A size
    is (height, width) or, for clips, (height, width, frames), with `model.frames` if it has none.

    Args:
        config: the configuration.
        pipeline: the model, whose `latent_shape` checks each size: height and width must be
            multiples of the two numbers of pixels in `size_multiples()`, and at most `largest_side`
            unless that is None; a clip has 1 frame plus a multiple of `temporal_compression`.

    Raises:
        InputError: the model does not support a size. The message begins with "model",
            "rollout.size" or "eval.size", and describes only the first such size in this order. An
            unsupported, missing or superfluous number of frames counts too.
    """
    sizes = [("model", model_size(config))]
    sizes += [("rollout.size", size) for size in training_sizes(config)]
    sizes += [("eval.size", evaluation_size(config))]
    for field, size in sizes:
        with as_input_error(f"{field}: {{}}".format):
            pipeline.latent_shape(*size)


def check_attention(config: Config, pipeline: Pipeline) -> None:
    """Checks whether the model has the attention that `rollout.explore.attention` asks for.

    Only the value "fp8" is checked; the only other value, "default", passes.

    Args:
        config: the configuration. Only `rollout.explore.attention` counts.
        pipeline: the model. Its `attends_in_fp8` says whether its softmax attention can run in FP8.

    Raises:
        InputError: FP8 attention is configured, but the model has none.
    """
    if config.rollout.explore.attention == "fp8" and not pipeline.attends_in_fp8:
        raise InputError(
            f"rollout.explore.attention=fp8: not available for {pipeline.kind}, "
            "whose attention is masked or linear"
        )
