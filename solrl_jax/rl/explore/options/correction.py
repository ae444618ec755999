"""`rollout.explore.correction_rank=RANK`: a low-rank branch in full precision beside each matmul.

    y = (x U) (U^T W) + Q(x - x U U^T) Q(W - U U^T W)                 U [n_in, rank], orthonormal

The inputs of a linear layer have most of their energy in few directions, and rounding errors are
proportional to what is rounded. The first term computes these directions in the precision of `x`.
The second is the matmul of the low-precision format, whose operands have become smaller. SVDQuant
(arXiv 2411.05007, equation 4) has such a branch for the largest directions of the weight instead.

U is measured once, on the base, by orthogonal iteration: `U <- orthonormal(X^T X U)`. The gradient
of a network whose weights are `Probe` leaves is `X^T X U` of all linear layers at once. Every
device computes it as a whole, from the same samples in the same order, so U does not depend on the
mesh.
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

# Passes of the orthogonal iteration. Few suffice, because the energy falls off fast.
PASSES = 3
# The iteration runs on this many times `rank` directions, because the smallest of its directions
# converge last. They are dropped in the end.
OVERSAMPLING = 3

# Orthonormal columns for each linear layer, by its parameter path.
Bases: TypeAlias = dict[str, Float[Array | np.ndarray, "... n_in r"]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Corrected(Quantized):
    """A quantized weight W [in, out] with an unquantized low-rank branch: `remainder + U (U^T W)`.

    All arrays may have a leading axis of layers; `matmul` takes a single matrix.

    Attributes:
        output_axes: A class attribute for sharding: the axis of the outputs of each field that has
            one, which is the last one.
        remainder: `W - U U^T W`, a leaf in a low-precision format.
        basis: U, orthonormal columns [in, r] in the training precision.
        basis_weight: `U^T W` [r, out], in the training precision.
    """

    output_axes: ClassVar[Mapping[str, int]] = {"remainder": -1, "basis_weight": -1}

    remainder: Weight
    basis: Float[Array, "... n_in r"]
    basis_weight: Float[Array, "... r n_out"]

    def matmul(self, x: Float[Array, "rows n_in"]) -> Float[Array, "rows n_out"]:
        """Multiplies inputs by the weight W: `(x U) (U^T W)` plus the low-precision matmul of the
        rest `x - x U U^T` with the field `remainder`, the quantized `W - U U^T W`. U and `U^T W`
        are the fields `basis` and `basis_weight`.

        Args:
            x: Inputs of a floating-point dtype.

        Returns:
            An approximation of `x W` in the dtype of `x`. The outputs may stay sharded over the
            mesh axis `tensor`.
        """
        basis = self.basis.astype(x.dtype)
        inner = x @ basis
        along_basis = jnp.dot(inner, basis.T, preferred_element_type=jnp.float32)
        rest = (x.astype(jnp.float32) - along_basis).astype(x.dtype)
        basis_weight = tensor_parallel.shard_weight(self.basis_weight, -1).astype(x.dtype)
        return matmul_sharded(rest, self.remainder) + inner @ basis_weight

    def dequantize(self) -> Float[Array, "... n_in n_out"]:
        """Returns the matrix that the leaf represents, `remainder + basis @ basis_weight`, in
        float32.
        """
        along_basis = self.basis.astype(jnp.float32) @ self.basis_weight.astype(jnp.float32)
        return dequantize(self.remainder) + along_basis


def correct(
    quantize: Callable[[Array], Any], w: Float[Array, "n_in n_out"], basis: Float[Array, "n_in r"]
) -> Corrected:
    """Splits a weight into its part along some input directions, which is kept as it is, and the
    rest, which is quantized.

    It is used under jit on the ambient mesh, and replicates `w` on every device, so that the codes
    do not depend on the mesh.

    Args:
        quantize: Turns a float32 matrix [in, out] into a leaf of the low-precision format.
        w: The weight W [in, out], float32.
        basis: The directions U of the inputs, orthonormal columns in the training precision.

    Returns:
        The leaf with U, `U^T W` in the dtype of U, and the quantized rest: W minus U times this
        rounded `U^T W`.
    """
    exact = basis.astype(jnp.float32)
    w = sharding.replicate(w)
    # Rounded as it is stored before it is subtracted, so that both parts add up to the whole.
    basis_weight = sharding.replicate(exact.swapaxes(-1, -2) @ w).astype(basis.dtype)
    along_basis = sharding.replicate(exact @ basis_weight.astype(jnp.float32))
    return Corrected(quantize(w - along_basis), basis, basis_weight)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Probe(Leaf):
    """A weight that measures the inputs X [rows, in] that it multiplies.

    Its matmul is that of the plain weight. Taking the gradient of any loss with respect to `basis`
    returns `X^T X basis` in place of a derivative; the gradient of `weight` is zero.

    Attributes:
        output_axes: A class attribute for sharding: the axis of each field, the last one, that may
            be sharded over the mesh axis `tensor`.
        weight: The matrix [..., in, out].
        basis: Directions of the inputs [..., in, r], float32.
    """

    output_axes: ClassVar[Mapping[str, int]] = {"weight": -1, "basis": -1}

    weight: Float[Array, "... n_in n_out"]
    basis: Float[Array, "... n_in r"]

    def matmul(self, x: Float[Array, "rows n_in"]) -> Float[Array, "rows n_out"]:
        """Returns `x @ weight` in the dtype of `x`. In the backward pass, `x` gets its true
        gradient, `weight` gets zeros, and `basis` gets `x^T x basis` in float32 in place of a
        gradient.

        Args:
            x: Inputs of a floating-point dtype.
        """
        return _probe(x, self.weight.astype(x.dtype), self.basis)

    def dequantize(self) -> Float[Array, "... n_in n_out"]:
        """Returns the field `weight`, which is not quantized, in float32. The field `basis`, the
        directions for the measurement, plays no part.
        """
        return self.weight.astype(jnp.float32)


@jax.custom_vjp
def _probe(
    x: Float[Array, "rows n_in"], w: Float[Array, "n_in n_out"], basis: Float[Array, "n_in r"]
) -> Float[Array, "rows n_out"]:
    """Returns `x @ w`, with custom gradients.

    In the backward pass, `x` gets its true gradient, `w` gets zeros, and `basis` gets
    `x^T x basis` in float32, whatever the gradient of the result is.

    Args:
        x: Inputs [rows, in] of a floating-point dtype.
        w: A weight [in, out] in the dtype of `x`.
        basis: Directions of the inputs [in, r], float32. They do not affect the result.
    """
    return x @ w


def _probe_forward(x, w, basis):
    """Runs the forward pass of `_probe`, a matmul that measures its inputs in the backward pass.

    Args:
        x: Inputs [rows, n_in].
        w: The weight [n_in, n_out].
        basis: Directions of the inputs [n_in, r].

    Returns:
        `x @ w`, and the three arguments for the backward pass.
    """
    return x @ w, (x, w, basis)


def _probe_backward(residuals, g):
    """Runs the backward pass of `_probe`.

    Args:
        residuals: The arguments (x, w, basis) of the forward pass.
        g: The gradient of the result [rows, n_out].

    Returns:
        The gradient of `x` (`g w^T`); zeros for `w`; and `x^T x basis` [n_in, r] in float32, the
        second moments of the inputs times the basis, in place of the gradient of `basis`.
    """
    x, w, basis = residuals
    # Without these constraints, the partitioner splits a matmul along its contraction, and the sum
    # is rounded differently.
    x32 = sharding.replicate(x.astype(jnp.float32))
    moments = sharding.replicate(x32.T @ sharding.replicate(x32 @ basis))
    return g @ w.T, jnp.zeros_like(w), moments


_probe.defvjp(_probe_forward, _probe_backward)


class Correction(ExplorationOption):
    """Keeps the part of each quantized weight along the principal directions of its inputs in the
    training precision, as a low-rank branch, and quantizes the rest.

    The directions are the `rollout.explore.correction_rank` ones along which the inputs of the
    layer have the largest sum of squares, measured on the base. Formats that quantize nothing are
    not changed.
    """

    def active(self, explore: Explore) -> bool:
        """Returns whether the configuration `explore` has a `correction_rank` above 0."""
        return explore.correction_rank > 0

    def measures(self, explore: Explore, full_steps: int, quantizes: bool) -> bool:
        """Returns whether the format quantizes: then the inputs of the layers are measured.

        Args:
            explore: The section `rollout.explore` of the configuration, which plays no part here.
            full_steps: The number of steps of the regeneration, which plays no part here.
            quantizes: Whether the exploration format quantizes weights.
        """
        return quantizes

    def quantizer(
        self,
        explore: Explore,
        calibration: Calibration,
        paths: tuple[str, ...],
        quantizer: Quantizer,
        schedule: Schedule,
    ) -> Quantizer:
        """Measures the principal input directions of each layer on the base (`principal_inputs`),
        and returns a quantizer that splits each weight along them (`correct`). Every process of a
        run must call it.

        Args:
            explore: The section `rollout.explore` of the configuration. `correction_rank` is the
                number of directions.
            calibration: The base policy and the samples to measure on.
            paths: The parameter paths of the quantized linear layers.
            quantizer: The quantizer of the format. Its function must take a matrix alone, without
                extra arrays; it gets each weight minus the part along the directions. The
                `extra_arrays` of the quantizer, if any, are dropped.
            schedule: The exploration schedule. The inputs are measured at its sigmas.

        Returns:
            The quantizer. For each path it has one extra array, the directions [..., in,
            min(correction_rank, in)] in the dtype of the backbone.

        Raises:
            numpy.linalg.LinAlgError: If an input of a layer is not finite.
            InputError, OSError, RunError: If the prompts of the calibration cannot be encoded.
        """
        bases = principal_inputs(calibration, paths, explore.correction_rank, schedule)
        return Quantizer(
            partial(correct, quantizer.quantize), {path: (basis,) for path, basis in bases.items()}
        )

    def abstract_quantizer(
        self, explore: Explore, weights: dict[str, jax.ShapeDtypeStruct], quantizer: Quantizer
    ) -> Quantizer:
        """Returns the result of the method `quantizer`, with the shapes of the directions in place
        of measured directions.

        Args:
            explore: The section `rollout.explore` of the configuration. `correction_rank` is the
                number of directions.
            weights: The shapes of the quantized weights [..., in, out] by parameter path.
            quantizer: The quantizer of the format. Its function must take a matrix alone, without
                extra arrays; it gets each weight minus the part along the directions. The
                `extra_arrays` of the quantizer, if any, are dropped.

        Returns:
            The quantizer. For each path it has one extra array, the shape [..., in,
            min(correction_rank, in)] of the directions, in the dtype of the weight.
        """

        def basis(w: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            rank = min(explore.correction_rank, w.shape[-2])
            return jax.ShapeDtypeStruct((*w.shape[:-1], rank), w.dtype)

        return Quantizer(
            partial(correct, quantizer.quantize), {path: (basis(w),) for path, w in weights.items()}
        )


def principal_inputs(
    calibration: Calibration, paths: tuple[str, ...], rank: int, schedule: Schedule
) -> Bases:
    """Measures the principal directions of the inputs of linear layers, those with the largest sum
    of squares (the largest eigenvectors of X^T X, not centered).

    Encodes the calibration prompts, samples from the base, and noises the samples to the sigma at
    which each step of the schedule starts. Three passes of orthogonal iteration then find the
    directions for the inputs X of all layers. Each pass differentiates the network, without
    classifier-free guidance. Every process of a run must call it.

    Args:
        calibration: The base and the samples to measure on.
        paths: The paths of the kernels of the linear layers, such as
            `transformer_blocks/attn2/to_k/kernel`.
        rank: The number of directions, at least 1. A layer with fewer inputs has as many directions
            as inputs.
        schedule: The schedule to sample the base on, with its guidance and noise. The inputs at the
            start of each of its steps are measured.

    Returns:
        By path, the directions as orthonormal columns [in, rank] (for a stack of layers [layers,
        in, rank]), the largest first, in the dtype of the backbone, on every device.

    Raises:
        KeyError: If the base has no parameter of a path.
        numpy.linalg.LinAlgError: If an input of a layer is not finite.
        InputError, OSError, RunError: If the prompts of the calibration cannot be encoded.
    """
    backbone = calibration.backbone
    seed_batch = calibration.seed_batch
    prompt_batch = calibration.encode_prompts()
    latents = calibration.generate(schedule, prompt_batch)
    batch_size = math.gcd(len(seed_batch), min(calibration.micro_batch, len(seed_batch)))

    def place(tree: Any) -> Any:
        return hosts.put(tree, sharding.replicated(backbone.mesh))

    conditioning = prompt_batch.conditions.cond
    clean = place(SeedBatch(seed_batch.prompt, seed_batch.seeds, latents))
    bases = _random_directions(backbone.transformer, paths, OVERSAMPLING * rank)
    schedule = place(schedule)
    for _ in range(PASSES):
        with jax.set_mesh(backbone.mesh):
            moments = hosts.fetch(
                input_moments(
                    backbone,
                    batch_size,
                    backbone.transformer,
                    conditioning,
                    place(bases),
                    clean,
                    schedule,
                )
            )
        bases = {path: _orthonormal(moment) for path, moment in moments.items()}
    return place(
        {path: np.asarray(basis[..., :rank], backbone.dtype) for path, basis in bases.items()}
    )


def _random_directions(base: Params, paths: tuple[str, ...], count: int) -> dict[str, np.ndarray]:
    """Draws random orthonormal directions that the orthogonal iteration starts from.

    They are drawn from a constant seed, so they are the same in every run.

    Args:
        base: The parameters of the transformer, whose shapes decide the sizes.
        paths: The paths of the linear layers.
        count: The number of directions. A layer with fewer inputs has as many directions as inputs.

    Returns:
        By path, orthonormal columns [..., in, min(count, in)], float32, on the host.

    Raises:
        KeyError: If the base has no parameter of a path.
    """
    flat = flatten(base)
    rng = np.random.default_rng(0)
    bases = {}
    for path in paths:
        shape = flat[path].shape
        bases[path] = _orthonormal(rng.standard_normal((*shape[:-1], min(count, shape[-2]))))
    return bases


def _orthonormal(x: Float[np.ndarray, "... n r"]) -> Float[np.ndarray, "... n r"]:
    """Computes orthonormal columns with the span of those of `x`, the largest directions first.

    They are the left singular vectors, computed on the host in float64. In jaxlib 0.10, several
    stacks of factorizations in one program can deadlock on few CPU cores.

    Args:
        x: A matrix, or a stack of them, with at most as many columns as rows.

    Returns:
        Columns in the shape of `x`, float32.

    Raises:
        numpy.linalg.LinAlgError: If `x` has values that are not finite.
    """
    return np.linalg.svd(x.astype(np.float64), full_matrices=False)[0].astype(np.float32)


@partial(sharding.jit, static_argnums=(0, 1))
def input_moments(
    backbone: Backbone,
    batch_size: int,
    base: Params,
    conditioning: Conditioning,
    bases: Bases,
    clean: SeedBatch,
    schedule: Schedule,
) -> Bases:
    """Computes `X^T X U` for each linear layer, where X are its inputs for all samples at the start
    of each step of a schedule.

    Each sample is noised to the sigma there, with noise from its seed that differs between steps
    (stream "calibration"). The network, without classifier-free guidance, is differentiated with
    `Probe` leaves as weights, whose gradient is `X^T X U`. The mesh of the backbone must be the
    ambient one.

    Args:
        backbone: The networks; static.
        batch_size: The number of samples that go through the network at once, all of them on every
            device; static. It must divide the number of samples.
        base: The parameters of the transformer.
        conditioning: The prompt embeddings, one row per prompt, without the negative prompt.
        bases: By path, the directions U of each linear layer [..., in, r], float32.
        clean: The samples. The field `noise` holds their clean latents, not noise.
        schedule: The sigmas to which the samples are noised, with the timesteps that the network is
            given there.

    Returns:
        `X^T X U` by path, in the shape of U, float32, on every device.
    """
    flat = flatten(base)
    steps = schedule.steps

    def add(sums: Bases, index: Array) -> tuple[Bases, None]:
        batch = index // steps
        step = index % steps

        def take(x: Any) -> Array:
            part = jax.lax.dynamic_slice_in_dim(x, batch * batch_size, batch_size)
            return sharding.replicate(part)

        x0 = take(clean.noise)
        prompt = take(clean.prompt)
        noise = normal(take(clean.seeds), "calibration", x0.shape[1:], step)
        x = interpolate(x0, noise, jnp.full(batch_size, schedule.sigmas[step]))
        batch_conditioning = jax.tree.map(lambda c: c[prompt], conditioning)

        def summed_velocity(bases: Bases) -> Array:
            leaves = {path: Probe(flat[path], jnp.asarray(basis)) for path, basis in bases.items()}
            v = backbone.velocity(
                replace(base, leaves),
                x,
                batch_conditioning,
                schedule.timesteps[step],
                jnp.asarray(schedule.embedded_guidance),
            )
            return v.astype(jnp.float32).sum()

        return jax.tree.map(jnp.add, sums, jax.grad(summed_velocity)(bases)), None

    num_batches = len(clean) // batch_size
    start = jax.tree.map(jnp.zeros_like, bases)
    sums, _ = jax.lax.scan(add, start, jnp.arange(num_batches * steps))
    return jax.tree.map(sharding.replicate, sums)
