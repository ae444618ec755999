"""Connected components of an image whose pixels are classified by color."""

import math

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from solrl_jax.data.shapes import scenes

# Rounds of label propagation in an image 32 wide; each doubling of the width takes one more. Ragged
# blobs are labeled in two or three, nearly all random percolation clusters in four. A component
# that needs more stays in pieces and matches no shape anyway.
_LABEL_ROUNDS = 4
_NEIGHBORS = ((-1, 0), (1, 0), (0, -1), (0, 1))


def label_components(pixel_color: Int[Array, "h w"]) -> Int[Array, "h w"]:
    """Labels each 4-connected component of equal color.

    The label of a component is the largest flat index (`row * w + column`) of its pixels. Labels
    spread in a fixed number of rounds: 4 up to a longer side of 32, and one more for each further
    doubling, rounded up. A round takes over the labels of neighbors and follows chains of labels
    (pointer jumping). A component with very long winding arms may still stay in several pieces,
    each with a label of its own.

    Args:
        pixel_color: The index of each pixel's color, -1 for the background. The background is
            labeled too.

    Returns:
        The label of each pixel, int32 [h, w].
    """
    labels = jnp.arange(pixel_color.size).reshape(pixel_color.shape)
    connected = [pixel_color == _shift(pixel_color, dy, dx, -2) for dy, dx in _NEIGHBORS]
    doublings = math.ceil(math.log2(max(pixel_color.shape) / scenes.BASE))
    for _ in range(_LABEL_ROUNDS + max(0, doublings)):
        best = labels
        for (dy, dx), same in zip(_NEIGHBORS, connected, strict=True):
            best = jnp.maximum(best, jnp.where(same, _shift(best, dy, dx, 0), 0))
        # Hooking: when a pixel gets a larger label, so does the pixel that its old label names.
        # Otherwise labels would move by one pixel per round along a ragged edge, where every tooth
        # is a local maximum. Pointer jumping then shortens paths.
        flat = best.ravel().at[labels.ravel()].max(best.ravel())
        flat = flat[flat]
        labels = flat[flat].reshape(pixel_color.shape)
    return labels


def largest_components(
    labels: Int[Array, "h w"], covered: Bool[Array, "h w"], count: int
) -> tuple[Int[Array, " k"], Int[Array, " k"]]:
    """Returns the areas and the labels of the largest components, the largest first.

    Among components of equal area, the one with the larger label comes first.

    Args:
        labels: The label of each pixel's component, from `label_components`.
        covered: Which pixels have a color. Background pixels do not count.
        count: The number k of components to return, at least 1.

    Returns:
        Areas in pixels and labels, int32 [k] each. If the image has fewer components, the further
        areas are 0 (-1 for a count beyond the number of pixels), and their labels have no meaning.
    """
    counts = covered.ravel().astype(jnp.int32)
    remaining = jnp.zeros(labels.size, jnp.int32).at[labels.ravel()].add(counts)
    index = jnp.arange(labels.size)
    areas = []
    roots = []
    for _ in range(count):  # a few maxima cost less than a general top_k
        area = remaining.max()
        root = jnp.where(remaining == area, index, 0).max()  # among equal ones the last
        remaining = jnp.where(index == root, -1, remaining)
        areas.append(area)
        roots.append(root)
    return jnp.stack(areas), jnp.stack(roots)


def dilate(mask: Bool[Array, "k h w"]) -> Bool[Array, "k h w"]:
    """Grows each mask by one pixel in all eight directions.

    Args:
        mask: Boolean masks, one per component.

    Returns:
        Masks that are true where `mask` is true at the pixel or at one of its eight neighbors.
    """
    rows = mask | _shift(mask, -1, 0, 0) | _shift(mask, 1, 0, 0)
    return rows | _shift(rows, 0, -1, 0) | _shift(rows, 0, 1, 0)


def _shift(x: Array, dy: int, dx: int, fill: int) -> Array:
    """Shifts images: the result at row i and column j is `x[..., i + dy, j + dx]`.

    Args:
        x: The images, [..., h, w], of any dtype.
        dy: The shift in rows: -1, 0 or 1.
        dx: The shift in columns: -1, 0 or 1.
        fill: The value where the index lies beyond the edge.

    Returns:
        An array of the shape and dtype of `x`.
    """
    h, w = x.shape[-2:]
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(1, 1), (1, 1)], constant_values=fill)
    return padded[..., 1 + dy : 1 + dy + h, 1 + dx : 1 + dx + w]
