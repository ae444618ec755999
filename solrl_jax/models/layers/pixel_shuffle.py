"""Moves pixels between the spatial axes and the channels."""

from jaxtyping import Array, Float


def space_to_depth(x: Float[Array, "b h w c"]) -> Float[Array, "b h/2 w/2 4*c"]:
    """Merges each 2 x 2 square of pixels into one. Its channels are ordered (channel, row, column).

    Channel `4 c + 2 row + column` of the result is channel c of the square's pixel (row, column).

    Args:
        x: Images of even height and width.

    Returns:
        Images of half the height and width, with four times the channels.
    """
    b, h, w, c = x.shape
    squares = x.reshape(b, h // 2, 2, w // 2, 2, c).transpose(0, 1, 3, 5, 2, 4)
    return squares.reshape(b, h // 2, w // 2, 4 * c)


def depth_to_space(x: Float[Array, "b h w c4"]) -> Float[Array, "b 2*h 2*w c4/4"]:
    """Splits each pixel into a 2 x 2 square of pixels: the inverse of `space_to_depth`.

    Channel `4 c + 2 row + column` becomes channel c of the square's pixel (row, column).

    Args:
        x: Images. The number of channels is a multiple of 4.

    Returns:
        Images of twice the height and width, with a quarter of the channels.
    """
    b, h, w, c = x.shape
    squares = x.reshape(b, h, w, c // 4, 2, 2).transpose(0, 1, 4, 2, 5, 3)
    return squares.reshape(b, 2 * h, 2 * w, c // 4)
