"""Builds an `Experiment` of shapes, as `experiment.build` does without weights, vocabularies or
prompts.
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
from solrl_jax.config.sizes import largest_training_size
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
from solrl_jax.rewards.registry import open_rewards
from solrl_jax.rewards.sources import CARRIED
from solrl_jax.rl.experiment import (
    Experiment,
    load_prompt_sets,
    read_instruction,
    select_parameters,
)
from solrl_jax.rl.objective import load_objective
from solrl_jax.storage import hub


def open_configurations(
    path: str, remat: str = "none", mhla: MhlaOverride | None = None
) -> Pipeline:
    """Opens the pipeline of `model.path` for its configurations alone. Nothing is downloaded.

    Args:
        path: A directory, which comes first; `embedded:NAME`; or OWNER/NAME of a hub repository.
            The latter is looked for in the hub's cache, where it counts only with the configuration
            of its transformer, then among the released configurations in the package
            (`hub.CARRIED`).
        remat: What the gradient of the transformer recomputes, a key of
            `models.layers.stack.REMAT`: "none", "matmuls" or "blocks".
        mhla: The sizes of multi-head linear attention that replace the linear attention of SANA's
            blocks, as the section `model` of a configuration gives them. None keeps the model's own
            attention.

    Returns:
        The pipeline, without weights.

    Raises:
        InputError: If there is no such model, it is incomplete or not supported, or `mhla` is given
            for another model than SANA.
    """
    if Path(path).is_dir() or not hub.is_name(path):
        return open_model(path, remat, mhla)
    folder = hub.cached(path)
    if folder is None or not (folder / "transformer" / "config.json").is_file():
        folder = hub.CARRIED / path
    if not (folder / "model_index.json").is_file():
        names = sorted(
            str(p.parent.relative_to(hub.CARRIED)) for p in hub.CARRIED.glob("*/*/model_index.json")
        )
        accepted = f"configurations are carried for {', '.join(names)}"
        raise InputError(
            f"model.path={path!r}: no such directory, not in the hub's cache; {accepted}"
        )
    return open_model(str(folder), remat, mhla)


def experiment(config: Config, pipeline: Pipeline, device: DeviceInfo, mesh: Mesh) -> Experiment:
    """Builds the experiment of a configuration, with a ShapeDtypeStruct in place of every array.

    No prompt, vocabulary or weight needs to be present. The text encoders have no cache, the
    trained reward also evaluates and ranks the candidates (`rollout.explore.reward` is not read),
    the test prompts are the training prompts, and the size is the largest training size. Also
    imports the objective and the trained rewards that the configuration names outside the package.

    Args:
        config: The configuration. Its model, sizes, batches, rewards and trained parameters give
            the shapes.
        pipeline: The opened model, which has its configurations and need not have weights.
        device: The kind of device that is planned for. It decides what "auto" formats mean.
        mesh: The mesh of the planned devices. The transformer and training use it; text encoders,
            decoder and rewards use `sharding.rows_only(mesh)`.

    Returns:
        The experiment. Only its programs' shapes can be used: it cannot sample or train.

    Raises:
        InputError: If the configuration cannot be run: an objective or a reward cannot be imported
            or used, the file of the instruction cannot be read, or the model takes no instruction,
            tile size, guidance, trainable parameters or quantization of this kind.
    """
    load_objective(config.algorithm.objective)  # imports an objective outside the package
    model = config.model
    dtype = DTYPES[config.rollout.precision]
    rows = sharding.rows_only(mesh)
    targets, quantized = select_parameters(config, pipeline, device)
    check_tile(model.vae_tile_size, pipeline)
    encoders = TextEncoders(pipeline, rows, dtype, cache=None)
    instruction = read_instruction(config)
    encoders.check_instruction(instruction)
    decoding, products = scoring_dtypes(
        config.rollout.scoring_precision, config.rollout.precision, device
    )
    vae_dtype = decoding or pipeline.vae_dtype or dtype
    decoder = Decoder(
        pipeline.vae.abstract_params(vae_dtype, sharding.placement(rows)),
        pipeline,
        vae_dtype,
        model.vae_tile_size,
    )
    transformer = pipeline.transformer.abstract_params(dtype, sharding.placement(mesh))
    backbone = Backbone(pipeline, mesh, dtype, transformer, encoders, decoder, instruction)
    scorer = reward(config, rows, products)
    prompts = some_prompts(config)
    return Experiment(
        config,
        backbone,
        scorer,
        scorer,
        targets,
        quantized,
        device,
        prompts,
        prompts,
        largest_training_size(config),
    )


def some_prompts(config: Config) -> list[Prompt]:
    """Returns as many prompts as one iteration has (`train.num_prompts`). Their texts do not
    matter.

    They are the first of the training prompts, filled up with copies of the first one. If a prompt
    file, for training or for tests, cannot be read, they are empty texts.

    Args:
        config: The configuration. `train.num_prompts` is the number, and the section `prompts`
            names the files.
    """
    count = config.train.num_prompts
    try:
        prompts = load_prompt_sets(config)[0][:count]
    except InputError:
        prompts = []
    return prompts + [prompts[0] if prompts else Prompt("")] * (count - len(prompts))


def reward(config: Config, mesh: Mesh, products: DTypeLike) -> Reward:
    """Returns the trained reward with its networks as shapes, in their released configurations.

    `reward.paths`, `reward.eval_only` and `rollout.explore.reward` are not read. Rewards outside of
    JAX are opened too (their functions are imported), but take nothing of a device.

    Args:
        config: The configuration. `reward.weights` names the rewards, with their options in
            `reward.options`.
        mesh: The mesh that the networks are placed on.
        products: The dtype of the matmuls of the reward networks: float32, float16 or bfloat16.

    Returns:
        The reward, whose `params` are placed ShapeDtypeStructs, so that it can be traced but not
        called.

    Raises:
        InputError: If a reward does not exist, cannot be imported or refuses its options, or if the
            arrays of a user's reward inside JAX cannot be placed on the mesh.
    """
    settings = dataclasses.replace(config.reward, paths=CARRIED, eval_only=())
    trained = open_rewards(settings, products).load(mesh).trained
    return dataclasses.replace(trained, params=abstract(trained.params, mesh))


def text_encoders(backbone: Backbone) -> dict[str, Any]:
    """Returns the parameters of the text encoders as placed shapes.

    Args:
        backbone: The networks. Its text encoders' own mesh, dtype and configurations give
            shardings, dtype and shapes.

    Returns:
        By the folder of each text encoder in the pipeline, e.g. "text_encoder", its parameters: a
        tree of ShapeDtypeStructs with shardings.
    """
    encoders = backbone.text_encoders
    place = sharding.placement(encoders.mesh)
    return {
        name: part.abstract_params(encoders.dtype, place)
        for name, part in encoders.pipeline.text_encoders.items()
    }


def abstract(tree: Any, mesh: Mesh, where: NamedSharding | None = None) -> Any:
    """Returns a tree with a placed ShapeDtypeStruct in place of every array.

    The dtypes are those that JAX would use: float64 becomes float32 unless JAX has 64 bits enabled.

    Args:
        tree: Arrays or shapes, also of NumPy.
        mesh: The mesh on which arrays without a NamedSharding are replicated.
        where: The sharding of all results. None: each array keeps its own NamedSharding.
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
    """Returns `make(*trees)` for trees of shapes.

    `make` is called with traced arrays (`jax.eval_shape`), because its annotations require arrays.
    Arguments reappear in the result as the shapes that were passed, with their shardings.

    Args:
        make: A function of the trees that puts their leaves into another structure, e.g. a class.
            It must not compute new arrays.
        trees: Trees of placed shapes, one per argument of `make`.

    Returns:
        The result of `make`, with the shapes in place of traced arrays.
    """
    leaves: list[Any] = []

    def trace(*arguments: Any) -> Any:
        outputs = make(*arguments)
        shapes = dict(zip(map(id, jax.tree.leaves(arguments)), jax.tree.leaves(trees), strict=True))
        leaves.extend(shapes.get(id(x), x) for x in jax.tree.leaves(outputs))
        return outputs

    return jax.tree.unflatten(jax.tree.structure(jax.eval_shape(trace, *trees)), leaves)


def held(tree: Any) -> int:
    """Returns the bytes that one device needs for a tree. Elements of four bits are packed, and
    each array is rounded up to whole bytes.

    Args:
        tree: Shapes or arrays with shardings. A replicated array counts in full. A tree without
            leaves takes 0 bytes.
    """

    def bits(x):
        return jax.dtypes.itemsize_bits(x.dtype) * math.prod(x.sharding.shard_shape(x.shape))

    return sum(-(-bits(x) // 8) for x in jax.tree.leaves(tree))
