"""The head of ImageReward (arXiv 2304.05977) and of the LAION aesthetic predictor: one number from one vector.

Five linears in a row. Only dropout lies between them, and no activation: the whole is one affine map.
"""

from flax import nnx
from jaxtyping import Array, Float

from solrl_jax.models.layers.linear import Linear

WIDTHS = (1024, 128, 64, 16, 1)
PLACES = (0, 2, 4, 6, 7)  # indices of the linears in PyTorch's list; the others are dropouts


class ScoreHead(nnx.Module):
    """The five linears."""

    def __init__(self, features: int, *, rngs: nnx.Rngs):
        pairs = zip((features, *WIDTHS), WIDTHS, strict=False)
        self.layers = nnx.Dict(
            {str(i): Linear(*pair, rngs=rngs) for i, pair in zip(PLACES, pairs, strict=True)}
        )

    def __call__(self, x: Float[Array, "b d"]) -> Float[Array, " b"]:
        for place in PLACES:
            x = self.layers[str(place)](x)
        return x[:, 0]
