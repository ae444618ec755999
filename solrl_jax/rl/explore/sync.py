"""Sync: merges the old policy into the base and quantizes it, for the next exploration.

See docs/method.md, sections 1 and 7.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from solrl_jax.models.backbone import Backbone
from solrl_jax.parallel import sharding
from solrl_jax.quant.matmul import Quantized
from solrl_jax.rl.trainable.trainable import Params, Trainable, attach, flatten, map_layers


@partial(jax.tree_util.register_dataclass, data_fields=["extra_arrays"], meta_fields=["quantize"])
@dataclasses.dataclass(frozen=True)
class Quantizer:
    """How linear layers are quantized: a function, and the arrays that it needs for each layer.

    A quantizer is a pytree: the extra arrays are its leaves, and the function is static.

    Attributes:
        quantize: (weight [in, out] in float32, *extra arrays of its path) -> quantized leaf. It is
            static: a new function object recompiles the programs that quantize, so all iterations
            of a run use one object.
        extra_arrays: By parameter path, the arrays that `quantize` takes after the weight, or their
            shapes. For a stack of layers they have a leading axis of layers too. A path without an
            entry has none. Empty by default.
    """

    quantize: Callable[..., Quantized]
    extra_arrays: Mapping[str, tuple[jax.Array | jax.ShapeDtypeStruct, ...]] = dataclasses.field(
        default_factory=dict
    )


@partial(sharding.jit, static_argnums=(0, 3, 4))
def quantize_policy(
    mesh: Mesh,
    base: Params,
    adapters: Trainable,
    scale: float,
    paths: Sequence[str],
    quantizer: Quantizer,
) -> dict[str, Quantized]:
    """Merges adapters in float32 and quantizes the result: `quantize(W + scale A B)`.

    The base is not copied. A stack is processed one layer at a time, because a merged stack in
    float32 would take twice the memory of the base.

    Args:
        mesh: The mesh, which must also be the ambient mesh; static. The codes are sharded over it
            as the weights are.
        base: The parameters of the base.
        adapters: The trainable parameters of the policy by path: an adapter is merged into the
            base's array, and an array that is trained in full takes its place. A layer without
            either is quantized as it is in the base. Parameters that are not in `paths` are
            ignored.
        scale: The factor of the product of LoRA factors, alpha / rank; static.
        paths: The paths of the linear layers to quantize, as a tuple; static.
        quantizer: The function that quantizes each weight, and its extra arrays by path.

    Returns:
        The quantized leaves by path, one for each of `paths`.

    Raises:
        KeyError: If the base has no parameter of a path.
    """
    flat = flatten(base)
    codes: dict[str, Any] = {
        path: map_layers(
            quantizer.quantize,
            flat[path],
            adapters.get(path),
            scale,
            *map(jnp.asarray, quantizer.extra_arrays.get(path, ())),
        )
        for path in paths
    }
    return jax.lax.with_sharding_constraint(codes, sharding.parameter_sharding(mesh, codes))


def sync_policy(
    backbone: Backbone,
    adapters: Trainable,
    scale: float,
    paths: Sequence[str],
    quantizer: Quantizer | None,
) -> Params:
    """Returns the parameters of a policy, with some linear layers merged and quantized.

    Every process of a run must call it.

    Args:
        backbone: The base and its mesh, which is the ambient mesh during this call.
        adapters: The trainable parameters of the policy by path.
        scale: The factor of the product of LoRA factors, alpha / rank.
        paths: The paths of the kernels to quantize, such as `transformer_blocks/attn2/to_k/kernel`.
        quantizer: The function that quantizes each weight, and its extra arrays by path. None:
            nothing is merged or quantized, and `paths` is not read.

    Returns:
        A tree of the structure of the base. At `paths` it has `Quantized` leaves; at other trained
        paths `LowRank` leaves (the base's array and the float32 adapter, unmerged) or the arrays
        that are trained in full, in the dtype of the base; elsewhere the arrays of the base, not
        copied.

    Raises:
        KeyError: If the base has no parameter of a path in `paths` or `adapters`.
    """
    codes = None
    if quantizer is not None:
        with jax.set_mesh(backbone.mesh):
            codes = quantize_policy(
                backbone.mesh, backbone.transformer, adapters, scale, tuple(paths), quantizer
            )
    return attach(backbone.transformer, adapters, scale, codes)
