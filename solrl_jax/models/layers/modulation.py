"""Modulation of normalised activations."""

from jaxtyping import Array, Float


def modulate(
    x: Float[Array, "... d"], shift: Float[Array, "... d"], scale: Float[Array, "... d"]
) -> Float[Array, "... d"]:
    """`x (1 + scale) + shift`, rounded at each step, as in the released code of SANA and FLUX."""
    return x * (1 + scale) + shift
