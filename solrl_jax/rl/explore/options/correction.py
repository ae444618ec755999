"""`rollout.explore.correction_rank=RANK`: the principal directions of a linear's inputs go past its quantised product.

    y = (x U) (U^T W) + Q(x - x U U^T) Q(W - U U^T W)                 U [n_in, rank], orthonormal

Inputs of a linear hold most of their energy in few directions, and rounding errors are in proportion to what is rounded. The
first product takes these directions in the precision of `x`. The second is the format's own, of remainders that are smaller
on both sides. SVDQuant (arXiv 2411.05007, eq. 4) gives such a branch the largest directions of the weight instead.

U is measured once, on the base, by orthogonal iteration: `U <- orthonormal(X^T X U)`. The gradient of a network whose linears
are `Probe`s is `X^T X U` of all of them at once. Every device computes it whole, from the same rows in the same order, so U
does not depend on the mesh.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from solrl_jax.config.schema import Explore
from solrl_jax.diffusion.sampler import interpolate
from solrl_jax.diffusion.schedule import Schedule
from solrl_jax.diffusion.seeds import normal
from solrl_jax.models.backbone import Backbone
from solrl_jax.models.loading.weights import Params
from solrl_jax.models.pipeline import Conditioning
from solrl_jax.parallel import hosts, sharding
from solrl_jax.quant import tensor_parallel
from solrl_jax.quant.leaf import Leaf, Quantized
from solrl_jax.quant.matmul import Weight, dequantize, matmul_sharded
from solrl_jax.rl.explore.option import Calibration, ExplorationOption
from solrl_jax.rl.explore.sync import Quantizer
from solrl_jax.rl.generate import SeedBatch
from solrl_jax.rl.trainable.trainable import flatten, replace

PASSES = 3  # of the orthogonal iteration; the energy of inputs falls off fast enough
TURNED = 3  # times the rank: directions that are iterated, of which the last are found worst

Bases: TypeAlias = dict[
    str, Float[Array | np.ndarray, "... n_in r"]
]  # by the linear's path, orthonormal columns


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Corrected(Quantized):
    """A quantised weight matrix [in, out] with an exact product of low rank beside it.

    remainder: `W - U U^T W` in a format; basis: U [..., in, r]; carried: `U^T W` [..., r, out], both in the training precision.
    """

    output_axes: ClassVar[Mapping[str, int]] = {"remainder": -1, "carried": -1}

    remainder: Weight
    basis: Float[Array, "... n_in r"]
    carried: Float[Array, "... r n_out"]

    def matmul(self, x: Float[Array, "rows n_in"]) -> Float[Array, "rows n_out"]:
        basis = self.basis.astype(x.dtype)
        inner = x @ basis
        along = jnp.dot(inner, basis.T, preferred_element_type=jnp.float32)
        rest = (x.astype(jnp.float32) - along).astype(x.dtype)
        return matmul_sharded(rest, self.remainder) + inner @ tensor_parallel.shard_weight(
            self.carried, -1
        ).astype(x.dtype)

    def dequantize(self) -> Float[Array, "... n_in n_out"]:
        return dequantize(self.remainder) + self.basis.astype(jnp.float32) @ self.carried.astype(
            jnp.float32
        )


def correct(
    quantize: Callable[[Array], Any], w: Float[Array, "n_in n_out"], basis: Float[Array, "n_in r"]
) -> Corrected:
    """`w` (float32), quantised except for the directions of `basis`, which are kept in the dtype of `basis`.

    For use under jit, on the ambient mesh. Values are whole on every device: divided values would be added up in parts, and a
    sum that is rounded otherwise in its last bit can change a code.
    """
    exact = basis.astype(jnp.float32)
    w = sharding.replicate(w)
    carried = sharding.replicate(exact.swapaxes(-1, -2) @ w).astype(
        basis.dtype
    )  # as stored, so that the parts add up to `x w`
    return Corrected(
        quantize(w - sharding.replicate(exact @ carried.astype(jnp.float32))), basis, carried
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Probe(Leaf):
    """A weight [in, out] whose product is the plain one, and whose `basis` [in, r], float32, has the gradient `X^T X basis`.

    X are all rows that the weight multiplies. This gradient is not a derivative: it is the same for any loss.
    """

    output_axes: ClassVar[Mapping[str, int]] = {"weight": -1, "basis": -1}

    weight: Float[Array, "... n_in n_out"]
    basis: Float[Array, "... n_in r"]

    def matmul(self, x: Float[Array, "rows n_in"]) -> Float[Array, "rows n_out"]:
        return _probe(x, self.weight.astype(x.dtype), self.basis)

    def dequantize(self) -> Float[Array, "... n_in n_out"]:
        return self.weight.astype(jnp.float32)


@jax.custom_vjp
def _probe(
    x: Float[Array, "rows n_in"], w: Float[Array, "n_in n_out"], basis: Float[Array, "n_in r"]
) -> Float[Array, "rows n_out"]:
    return x @ w


def _probe_forward(x, w, basis):
    return x @ w, (x, w, basis)


def _probe_backward(saved, g):
    x, w, basis = saved
    # without these constraints the partitioner divides a product along its contraction, and the sum is rounded otherwise
    rows = sharding.replicate(x.astype(jnp.float32))
    return g @ w.T, jnp.zeros_like(w), sharding.replicate(rows.T @ sharding.replicate(rows @ basis))


_probe.defvjp(_probe_forward, _probe_backward)


class Correction(ExplorationOption):
    """Wraps the quantiser of every linear."""

    def active(self, explore: Explore) -> bool:
        return explore.correction_rank > 0

    def measures(self, explore: Explore, full_steps: int, quantizes: bool) -> bool:
        return quantizes

    def quantizer(
        self,
        explore: Explore,
        calibration: Calibration,
        paths: tuple[str, ...],
        quantizer: Quantizer,
        grid: Schedule,
    ) -> Quantizer:
        bases = principal_inputs(calibration, paths, explore.correction_rank, grid)
        return Quantizer(
            partial(correct, quantizer.quantize), {path: (basis,) for path, basis in bases.items()}
        )

    def abstract_quantizer(
        self, explore: Explore, weights: dict[str, jax.ShapeDtypeStruct], quantizer: Quantizer
    ) -> Quantizer:
        def basis(w):
            return jax.ShapeDtypeStruct(
                (*w.shape[:-1], min(explore.correction_rank, w.shape[-2])), w.dtype
            )

        return Quantizer(
            partial(correct, quantizer.quantize), {path: (basis(w),) for path, w in weights.items()}
        )


def principal_inputs(
    calibration: Calibration, paths: tuple[str, ...], rank: int, grid: Schedule
) -> Bases:
    """The `rank` directions of largest energy of each linear's inputs, in the backbone's dtype, on every device.

    grid: what the base is sampled on; inputs at every sigma of it are measured. Stacks of layers [layers, n_in, n_out] have
    directions [layers, n_in, rank].
    """
    backbone = calibration.backbone
    rows = calibration.rows
    latents = calibration.generate(grid)
    together = math.gcd(len(rows), min(calibration.micro_batch, len(rows)))

    def place(tree):
        return hosts.put(tree, sharding.replicated(backbone.mesh))

    conditioning = calibration.prompt_batch().conditions.positive
    clean = place(SeedBatch(rows.prompt, rows.seeds, latents))
    bases = _random_directions(backbone.transformer, paths, TURNED * rank)
    grid = place(grid)
    for _ in range(PASSES):
        with jax.set_mesh(backbone.mesh):
            products = hosts.fetch(
                probed(
                    backbone,
                    together,
                    backbone.transformer,
                    conditioning,
                    place(bases),
                    clean,
                    grid,
                )
            )
        bases = {path: _orthonormal(product) for path, product in products.items()}
    return place(
        {path: np.asarray(basis[..., :rank], backbone.dtype) for path, basis in bases.items()}
    )


def _random_directions(base: Params, paths: tuple[str, ...], count: int) -> dict[str, np.ndarray]:
    """Where the iteration starts: the same in every run."""
    flat = flatten(base)
    rng = np.random.default_rng(0)

    def directions(shape):
        return rng.standard_normal((*shape[:-1], min(count, shape[-2])))

    return {path: _orthonormal(directions(flat[path].shape)) for path in paths}


def _orthonormal(x: Float[np.ndarray, "... n r"]) -> Float[np.ndarray, "... n r"]:
    """Orthonormal columns that span those of `x`, the largest directions first.

    On the host: in jaxlib 0.10, stacks of factorisations side by side wait for each other for ever on few CPU cores.
    """
    return np.linalg.svd(x.astype(np.float64), full_matrices=False)[0].astype(np.float32)


@partial(sharding.jit, static_argnums=(0, 1))
def probed(
    backbone: Backbone,
    together: int,
    base: Params,
    conditioning: Conditioning,
    bases: Bases,
    clean: SeedBatch,
    grid: Schedule,
) -> Bases:
    """`X^T X U` of each linear, for its inputs X at every sigma of `grid`.

    clean: samples at sigma 0 in the place of noise; `together` of them are noised to one sigma at a time.
    """
    flat = flatten(base)
    steps = grid.steps

    def add(sums: Bases, at: Array) -> tuple[Bases, None]:
        part = at // steps
        step = at % steps

        def take(x):
            return sharding.replicate(jax.lax.dynamic_slice_in_dim(x, part * together, together))

        x0 = take(clean.noise)
        prompt = take(clean.prompt)
        noise = normal(take(clean.seeds), "calibration", x0.shape[1:], step)
        x = interpolate(x0, noise, jnp.full(together, grid.sigmas[step]))
        of_rows = jax.tree.map(lambda c: c[prompt], conditioning)

        def summed_velocity(bases: Bases) -> Array:
            leaves = {path: Probe(flat[path], jnp.asarray(basis)) for path, basis in bases.items()}
            v = backbone.velocity(
                replace(base, leaves),
                x,
                of_rows,
                grid.timesteps[step],
                jnp.asarray(grid.embedded_guidance),
            )
            return v.astype(jnp.float32).sum()

        return jax.tree.map(jnp.add, sums, jax.grad(summed_velocity)(bases)), None

    parts = len(clean) // together
    sums, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, bases), jnp.arange(parts * steps))
    return jax.tree.map(sharding.replicate, sums)
