"""Builds the objects of a training run with shapes in place of arrays, so that its programs can be
compiled.
"""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from solrl_jax.config.schema import Config
from solrl_jax.config.sizes import largest_training_size, training_sizes
from solrl_jax.data.prompts import Prompt
from solrl_jax.errors import InputError
from solrl_jax.models.backbone import DTYPES, Backbone
from solrl_jax.models.checks import check_tile
from solrl_jax.models.decoder import Decoder
from solrl_jax.models.locate import open_model
from solrl_jax.models.pipeline import Pipeline
from solrl_jax.models.sana.pipeline import MhlaOverride
from solrl_jax.models.text_encoders.encode import TextEncoders
from solrl_jax.parallel import sharding
from solrl_jax.quant.formats import DeviceInfo, scoring_dtypes
from solrl_jax.rewards.protocol import Reward
from solrl_jax.rewards.registry import open_rewards, reward_names
from solrl_jax.rewards.sources import PACKAGED_CONFIGS
from solrl_jax.rl.experiment import (
    Experiment,
    check_guidance,
    check_loaded_objective,
    load_prompt_sets,
    read_instruction,
    reward_gradients_for,
    select_parameters,
)
from solrl_jax.storage import hub


def open_configurations(
    path: str, gradient_checkpointing: str = "none", mhla: MhlaOverride | None = None
) -> Pipeline:
    """Opens a model for planning: its configuration files, without its weights. Downloads nothing.

    Args:
        path: The model, as the field `model.path` names it: the directory of a diffusers pipeline,
            `embedded:NAME` for one of the small pipelines inside this package, or OWNER/NAME of a
            repository of the Hugging Face hub. A repository is read from the local cache of the
            hub, or else from the configurations of released models that this package contains.
        gradient_checkpointing: The activations that the backward pass of the transformer recomputes
            instead of keeping them in memory: "none" (nothing), "matmuls" (everything but the
            outputs of linear layers and of attention) or "blocks" (everything but the inputs of
            blocks). Another value, also "auto", raises KeyError when the transformer is traced.
        mhla: Replaces the linear attention of SANA's blocks by multi-head linear attention. It is
            the result of `mhla_override(config.model)`: the settings of this attention, and the
            image size. None keeps the model's own attention.

    Returns:
        The pipeline, without weights.

    Raises:
        InputError: If there is no such model, if it is incomplete or not supported, or if `mhla` is
            given for a model other than SANA or does not fit the image size.
    """
    if Path(path).is_dir() or not hub.is_name(path):
        return open_model(path, gradient_checkpointing, mhla)
    folder = hub.find_cached(path)
    if folder is None or not (folder / "transformer" / "config.json").is_file():
        folder = hub.CARRIED / path
    if not (folder / "model_index.json").is_file():
        names = sorted(
            str(p.parent.relative_to(hub.CARRIED)) for p in hub.CARRIED.glob("*/*/model_index.json")
        )
        accepted = f"configurations are carried for {', '.join(names)}"
        raise InputError(
            f"model.path={path!r}: no such directory, not in the Hub's cache; {accepted}"
        )
    return open_model(str(folder), gradient_checkpointing, mhla)


def abstract_experiment(
    config: Config, pipeline: Pipeline, device: DeviceInfo, mesh: Mesh
) -> Experiment:
    """Builds the `Experiment` of a run with a ShapeDtypeStruct in place of every array.

    An `Experiment` holds the networks, the reward and the prompts of a run. The functions of the
    result can be traced and compiled, but it cannot sample or train. No weights and no vocabularies
    are needed: a tokenizer without a vocabulary returns zeros of the right shape. Also imports an
    objective and rewards from outside the package, and reads `model.instruction` and the prompt
    sets, for which it may download data sets of the hub. If the sets cannot be read, empty texts
    replace the prompts (`some_prompts`).

    Three things are simpler than in training. The test prompts are the training prompts. The
    training reward (the weighted sum of `reward.weights`) also ranks candidates and scores
    evaluations. All images have the largest training size.

    Args:
        config: The configuration of the run that is planned.
        pipeline: The opened model, e.g. from `open_configurations`. Its weights are not read.
        device: The kind of device to plan for. It decides what "auto" means, for the exploration
            format and for the precision of scoring.
        mesh: The mesh of the planned devices, with the axes `data`, `fsdp`, `sequence` and
            `tensor`.

    Returns:
        The experiment. Its ShapeDtypeStructs have the shardings of the arrays in training.

    Raises:
        InputError: If the configuration cannot be run, for example because an objective or a reward
            cannot be imported, or the model does not support a setting.
        ConfigError: If the objective does not allow other settings of the configuration.
    """
    check_loaded_objective(config)  # imports an objective outside the package
    model = config.model
    dtype = DTYPES[config.rollout.precision]
    rows = sharding.row_mesh(mesh)
    check_guidance(config, pipeline)
    trained_paths, quantized = select_parameters(config, pipeline, device)
    check_tile(model.vae_tile_size, pipeline)
    encoders = TextEncoders(pipeline, rows, dtype, cache=None)
    instruction = read_instruction(config)
    encoders.check_instruction(instruction)
    decoding, reward_dtype = scoring_dtypes(
        config.rollout.scoring_precision, config.rollout.precision, device
    )
    vae_dtype = decoding or pipeline.vae_dtype or dtype
    decoder = Decoder(
        pipeline.vae.abstract_params(vae_dtype, sharding.parameter_placement(rows)),
        pipeline,
        vae_dtype,
        model.vae_tile_size,
    )
    transformer = pipeline.transformer.abstract_params(dtype, sharding.parameter_placement(mesh))
    backbone = Backbone(pipeline, mesh, dtype, transformer, encoders, decoder, instruction)
    reward = abstract_reward(config, rows, reward_dtype)
    prompts = some_prompts(config)
    return Experiment(
        config=config,
        backbone=backbone,
        reward=reward,
        evaluation_reward=reward,
        trained_paths=trained_paths,
        quantized=quantized,
        device=device,
        train_prompts=prompts,
        test_prompts=prompts,
        size=largest_training_size(config),
    )


def some_prompts(config: Config) -> list[Prompt]:
    """Returns placeholder prompts for a plan, as many as one iteration trains on.

    They are the first training prompts, and copies of the first one if there are too few. If the
    training or test prompts cannot be read, all texts are empty. Data sets of the hub are
    downloaded unless they are in the hub's cache.

    Args:
        config: The configuration. `train.num_prompts` is the number of prompts, and the section
            `prompts` names the files.
    """
    count = config.train.num_prompts
    try:
        prompts = load_prompt_sets(config)[0][:count]
    except InputError:
        prompts = []
    return prompts + [prompts[0] if prompts else Prompt("")] * (count - len(prompts))


def abstract_reward(config: Config, mesh: Mesh, reward_dtype: DTypeLike) -> Reward:
    """Opens the reward of training with shapes in place of the weights of its networks.

    The networks have the sizes of the released models, wherever `reward.paths` points. Also imports
    the functions of rewards from outside the package.

    Args:
        config: The configuration. `reward.weights` gives the names and weights of the rewards that
            are summed, and `reward.options` their options. `reward.eval_only` and
            `rollout.explore.reward` are ignored.
        mesh: The mesh that the networks are placed on.
        reward_dtype: The dtype in which the networks multiply matrices: float32, float16 or
            bfloat16.

    Returns:
        The reward. Its `params` are ShapeDtypeStructs with the shardings of training, so it can be
        traced and compiled, but not computed.

    Raises:
        InputError: If a reward does not exist, cannot be imported, refuses its options, scores
            whole clips while the model generates images, or has no gradient although the objective
            trains on it.
    """
    ignored = set(reward_names((*config.reward.eval_only, *(config.rollout.explore.reward or {}))))
    ignored -= set(reward_names(config.reward.weights))
    settings = dataclasses.replace(
        config.reward,
        paths=PACKAGED_CONFIGS,
        eval_only=(),
        options={
            name: options for name, options in config.reward.options.items() if name not in ignored
        },
    )
    gradients_for = reward_gradients_for(config)
    opened_rewards = open_rewards(settings, reward_dtype, None, gradients_for)
    opened_rewards.check_sizes(training_sizes(config))
    trained = opened_rewards.load(mesh).trained
    return dataclasses.replace(trained, params=abstract(trained.params, mesh))


def text_encoders(backbone: Backbone) -> dict[str, Any]:
    """Returns the shapes, dtypes and shardings of the text encoders' parameters.

    Args:
        backbone: The networks of an experiment, among them its text encoders.

    Returns:
        A dict with one tree of ShapeDtypeStructs per text encoder. Its key is the folder of the
        encoder in the pipeline, e.g. "text_encoder_2".
    """
    encoders = backbone.text_encoders
    place = sharding.parameter_placement(encoders.mesh)
    return {
        name: part.abstract_params(encoders.dtype, place)
        for name, part in encoders.pipeline.text_encoders.items()
    }


def abstract(tree: Any, mesh: Mesh, where: NamedSharding | None = None) -> Any:
    """Replaces every array of a tree by a ShapeDtypeStruct with a sharding.

    The dtypes are those that JAX would use, e.g. float32 for NumPy's float64.

    Args:
        tree: A tree of JAX arrays, NumPy arrays or ShapeDtypeStructs.
        mesh: The mesh of the shardings. An array that has no NamedSharding becomes replicated on
            it.
        where: The sharding of all results. None: each array keeps its own NamedSharding.

    Returns:
        A tree of the same structure.
    """

    def one(x: Any) -> jax.ShapeDtypeStruct:
        placement = where or (
            x.sharding
            if isinstance(getattr(x, "sharding", None), NamedSharding)
            else sharding.replicated(mesh)
        )
        return jax.ShapeDtypeStruct(
            x.shape, jax.dtypes.canonicalize_dtype(x.dtype), sharding=placement
        )

    return jax.tree.map(one, tree)


def shaped(make: Callable[..., Any], *trees: Any) -> Any:
    """Builds a structure that holds ShapeDtypeStructs where its class asks for arrays.

    Calling `make(*trees)` directly would fail, because the types of the arguments are checked. So
    `make` is called with traced arrays (`jax.eval_shape`), which are then replaced by the leaves of
    `trees`.

    Args:
        make: The class or function that builds the structure. It must only rearrange its arguments,
            and compute no new arrays.
        *trees: The arguments of `make`, with ShapeDtypeStructs in place of arrays.

    Returns:
        The result of `make`. Its leaves are the ShapeDtypeStruct objects of `trees` themselves,
        including their shardings.
    """
    leaves: list[Any] = []

    def trace(*arguments: Any) -> Any:
        outputs = make(*arguments)
        shapes = dict(zip(map(id, jax.tree.leaves(arguments)), jax.tree.leaves(trees), strict=True))
        leaves.extend(shapes.get(id(x), x) for x in jax.tree.leaves(outputs))
        return outputs

    return jax.tree.unflatten(jax.tree.structure(jax.eval_shape(trace, *trees)), leaves)


def bytes_per_device(tree: Any) -> int:
    """Returns the bytes that a tree of arrays takes in the memory of one device.

    Args:
        tree: Arrays or ShapeDtypeStructs, each of which must have a sharding. A device has only its
            part of a sharded array, and all of a replicated one. Two elements of four bits take one
            byte.
    """

    def bits(x):
        return jax.dtypes.itemsize_bits(x.dtype) * math.prod(x.sharding.shard_shape(x.shape))

    return sum(-(-bits(x) // 8) for x in jax.tree.leaves(tree))
