"""What exploration is calibrated on, measured once on the base: a preview's solver, and what goes past quantised products.

    samples of the base, step by step -> the steps of a preview that come nearest to the whole schedule's (`flow.solver`)
    samples of the base as it explores -> noised to each sigma it starts from -> orthogonal iteration over the network's
    probes: the principal directions of the inputs of the linears that are quantised (`numerics.principal`)

Both depend on base and configuration alone: a run that goes on finds the ones that it began with. Every device computes
directions whole, from the same rows and in the same order, so that they do not depend on the mesh either.
"""

import math
from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt32

from solrl_jax.backbone.backbone import Backbone, Conditioning, Params
from solrl_jax.explore.linears import most_rank
from solrl_jax.flow.sigmas import first_sigmas
from solrl_jax.flow.solver import PREDICT, STAY, Row, fitted_table
from solrl_jax.numerics.principal import Probe
from solrl_jax.numerics.randomness import stream
from solrl_jax.parallel import hosts, sharding
from solrl_jax.policy.lora import flatten, replace
from solrl_jax.rollout.generate import Grid, Prompted, generate

SAMPLES = 16  # prompts, a picture of each
PASSES = 3  # of the iteration; inputs' energy falls off fast enough
MOST = 2  # times the mean rank, a linear's at most
TURNED = 3  # times the mean rank, the directions that the iteration turns; the last of them are found worst
TOGETHER = 8  # directions are dealt so many at a time, which matrix units multiply at once, where these divide the mean rank

Bases = dict[str, Float[Array, "... n_in r"]]  # by the linear's path, orthonormal columns


def preview_grid(
    backbone: Backbone, whole: Grid, steps: int, prompted: Prompted, seeds: UInt32[np.ndarray, "b 2"], size: tuple[int, int],
    chunk: int,
) -> Grid:  # fmt: skip
    """The grid of a preview of `whole` in `steps` steps: `first_sigmas` of it, and coefficients fitted on the base.

    prompted: a prompt a seed; chunk: rows a device runs at once.
    """

    def one_step(x: np.ndarray | None, sigma: float, row: Row) -> np.ndarray:
        sigmas, table = np.array([sigma, 0.0]), np.array([row], np.float32)
        grid = Grid.from_sigmas(sigmas, table, whole.guidance, whole.guided, scale=whole.scale)
        index = np.arange(len(seeds))
        return generate(backbone, backbone.transformer, grid, prompted, index, seeds, size, chunk, None, noise=x).latents

    predict = lambda x, sigma: one_step(x, sigma, PREDICT)
    noise = one_step(None, 1.0, STAY)
    full = np.append(whole.sigmas, np.float32(0))
    sigmas = first_sigmas(full, steps)
    table = fitted_table(predict, noise, full, whole.table, sigmas)
    return Grid.from_sigmas(sigmas, table, whole.guidance, whole.guided, scale=whole.scale)


def principal_inputs(
    backbone: Backbone, paths: tuple[str, ...], rank: int, grid: Grid, exact: int, prompted: Prompted,
    seeds: UInt32[np.ndarray, "b 2"], size: tuple[int, int], chunk: int, micro_batch: int,
) -> Bases:  # fmt: skip
    """The directions of largest energy of the inputs of each linear in `paths`, in the backbone's dtype: `rank` on average.

    A linear to which none is dealt (`dealt_ranks`) is not among them.
    grid: what the base is sampled on; its first `exact` steps are those in which nothing is quantised. A prompt of `prompted`
    a seed. chunk, micro_batch: rows a device runs at once, without gradients and with them.
    """
    index = np.arange(len(seeds))
    latents = generate(backbone, backbone.transformer, grid, prompted, index, seeds, size, chunk, None).latents
    mesh, rows = backbone.mesh, next(n for n in range(min(micro_batch, len(seeds)), 0, -1) if len(seeds) % n == 0)
    place = lambda tree: hosts.put(tree, sharding.replicated(mesh))
    numbers = place((latents, seeds, grid.sigmas[exact:], grid.times[exact:], np.float32(grid.guidance)))
    bases = _first(backbone, paths, rank)
    whole: dict[str, np.ndarray] = {}  # energy of the inputs in all directions, of each layer
    for _ in range(PASSES):
        with jax.set_mesh(mesh):
            products = hosts.fetch(turn(backbone, rows, backbone.transformer, place(bases), prompted.conditioning, *numbers))
        whole = whole or {path: _trace(bases[path], product) for path, product in products.items()}
        found = {path: _orthonormal(product) for path, product in products.items()}
        bases = {path: columns for path, (columns, _) in found.items()}
    by_layer = {path: energies / whole[path][..., None] for path, (_, energies) in found.items()}
    shares = {path: share.reshape(-1, share.shape[-1]).mean(0) for path, share in by_layer.items()}
    flat = flatten(backbone.transformer)
    ranks = hosts.agreed(lambda: dealt_ranks(shares, {path: flat[path].shape for path in paths}, rank))
    return place({path: bases[path][..., :dealt].astype(backbone.dtype) for path, dealt in ranks.items() if dealt})


def dealt_ranks(
    shares: Mapping[str, Float[np.ndarray, " t"]], shapes: Mapping[str, tuple[int, ...]], rank: int
) -> dict[str, int]:  # fmt: skip
    """Ranks of corrections that take off most, and hold no more numbers in all than the same `rank` everywhere would.

    shares: of the energy of a linear's inputs, what each of its directions has, falling; of a stack, the mean of its layers;
    shapes: of the weights, [..., n_in, n_out]. What a product errs, of itself, goes by the energy that is left to it, so
    directions are worth their share for each number they take, and the worthiest are taken first, `TOGETHER` at a time.
    """
    step = math.gcd(TOGETHER, rank)
    parts, numbers = [], {path: math.prod(shape[:-2]) * sum(shape[-2:]) for path, shape in shapes.items()}
    for path, share in shares.items():
        *_, n_in, n_out = shapes[path]
        most = min(MOST * rank, most_rank(n_in, n_out), len(share)) // step
        worth = share[: most * step].reshape(most, step).sum(-1) / (n_in + n_out)
        parts += [(-float(value), path) for value in worth]
    left, ranks = rank * sum(numbers.values()), dict.fromkeys(shares, 0)
    for _, path in sorted(parts):
        left -= step * numbers[path]
        if left < 0:
            break
        ranks[path] += step
    return ranks


def _first(backbone: Backbone, paths: tuple[str, ...], rank: int) -> dict[str, np.ndarray]:
    """Random directions, the same in every run."""
    flat, rng = flatten(backbone.transformer), np.random.default_rng(0)
    turned = lambda n_in: min(TURNED * rank, n_in)
    return {p: _orthonormal(rng.standard_normal((*flat[p].shape[:-1], turned(flat[p].shape[-2]))))[0] for p in paths}


def _orthonormal(x: Float[np.ndarray, "... n r"]) -> tuple[Float[np.ndarray, "... n r"], Float[np.ndarray, "... r"]]:
    """Orthonormal columns that span those of `x`, the largest directions first, and how large these are.

    On the host: in jaxlib 0.10, stacks of factorisations side by side wait for each other for ever on few CPU cores.
    """
    columns, sizes, _ = np.linalg.svd(x.astype(np.float64), full_matrices=False)
    return columns.astype(np.float32), sizes


def _trace(basis: Float[np.ndarray, "... n r"], product: Float[np.ndarray, "... n r"]) -> Float[np.ndarray, "..."]:
    """The trace of the symmetric matrix that took `basis`, random and orthonormal, to `product` (Hutchinson 1990)."""
    return (basis * product).sum((-1, -2), dtype=np.float64) * (basis.shape[-2] / basis.shape[-1])


@partial(sharding.jit, static_argnums=(0, 1))
def turn(
    backbone: Backbone, rows: int, base: Params, bases: Bases, conditioning: Conditioning,
    latents: Float[Array, "b h w c"], seeds: UInt32[Array, "b 2"], sigmas: Array, times: Array, guidance: Array,
) -> Bases:  # fmt: skip
    """`X^T X U` of each linear, its inputs X at every sigma of the schedule, `rows` samples at one of them after another."""
    flat, steps = flatten(base), len(sigmas)
    parts = len(latents) // rows

    def products(sums: Bases, at: Array) -> tuple[Bases, None]:
        part, step = at // steps, at % steps
        take = lambda x: sharding.whole(jax.lax.dynamic_slice_in_dim(x, part * rows, rows))
        sigma, x0 = sigmas[step], take(latents)
        x = (1 - sigma) * x0 + sigma * jax.vmap(partial(_noise, latents.shape[1:], step))(take(seeds))

        def told(bases: Bases) -> Array:
            probed = {path: Probe(flat[path], basis) for path, basis in bases.items()}
            v = backbone.velocity(replace(base, probed), x, jax.tree.map(take, conditioning), times[step], guidance)
            return v.astype(jnp.float32).sum()

        return jax.tree.map(jnp.add, sums, jax.grad(told)(bases)), None

    sums, _ = jax.lax.scan(products, jax.tree.map(jnp.zeros_like, bases), jnp.arange(parts * steps))
    return jax.tree.map(sharding.whole, sums)


def _noise(shape: tuple[int, ...], step: Array, seed: UInt32[Array, " 2"]) -> Float[Array, "..."]:
    key = jax.random.fold_in(stream(jax.random.wrap_key_data(seed), "calibration"), step)
    return jax.random.normal(key, shape, jnp.float32)
