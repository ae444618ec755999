"""Sync: the old policy merged into the base and quantised, for the next exploration (docs/method.md, sections 1 and 7)."""

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


@partial(jax.tree_util.register_dataclass, data_fields=["beside"], meta_fields=["quantize"])
@dataclasses.dataclass(frozen=True)
class Quantizer:
    """How the linears are quantised.

    quantize(w [in, out] float32, *arrays) -> leaf. It is static: one function object for the whole run, or programs are
    compiled anew. beside: by path, the arrays that `quantize` takes after the weight; a stack of layers has them stacked.
    """

    quantize: Callable[..., Quantized]
    beside: Mapping[str, tuple[jax.Array | jax.ShapeDtypeStruct, ...]] = dataclasses.field(
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
    """Quantised copies of the linears at `paths`, adapters merged in float32 first: `quantize(W + scale A B)`.

    One program. The base is read and never copied; codes are split over devices as the weights are. The other linears keep
    the base's array and the adapter beside it, which is exact and takes no memory. Stacks are done a layer at a time: merged
    whole, in float32, a stack would take twice the base's memory.
    """
    flat = flatten(base)
    codes: dict[str, Any] = {
        path: map_layers(
            quantizer.quantize,
            flat[path],
            adapters.get(path),
            scale,
            *map(jnp.asarray, quantizer.beside.get(path, ())),
        )
        for path in paths
    }
    return jax.lax.with_sharding_constraint(codes, sharding.parameter_sharding(mesh, codes))


def merged(
    backbone: Backbone,
    adapters: Trainable,
    scale: float,
    paths: Sequence[str],
    quantizer: Quantizer,
) -> Params:
    """The policy of `adapters` with the linears at `paths` merged and quantised."""
    with jax.set_mesh(backbone.mesh):
        codes = quantize_policy(
            backbone.mesh, backbone.transformer, adapters, scale, tuple(paths), quantizer
        )
    return attach(backbone.transformer, adapters, scale, codes)
