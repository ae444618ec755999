"""The head of ImageReward and of the LAION aesthetic predictor: one number per feature vector.

ImageReward is arXiv 2304.05977.
"""

from flax import nnx
from jaxtyping import Array, Float

from solrl_jax.models.layers.linear import Linear

WIDTHS = (1024, 128, 64, 16, 1)
# The indices of the linear layers in PyTorch's list. The other entries are dropouts.
INDICES = (0, 2, 4, 6, 7)


class ScoreHead(nnx.Module):
    """Five linear layers in a row, with 1024, 128, 64, 16 and 1 output features.

    There is no activation between them, so together they are one affine map.

    Args:
        features: Number of features of the input.
        rngs: Random number generators for the initial weights.
    """

    def __init__(self, features: int, *, rngs: nnx.Rngs):
        layers = {}
        for index, width in zip(INDICES, WIDTHS, strict=True):
            layers[str(index)] = Linear(features, width, rngs=rngs)
            features = width
        self.layers = nnx.Dict(layers)

    def __call__(self, x: Float[Array, "b d"]) -> Float[Array, " b"]:
        """Maps each feature vector to one number, in the dtype of `x`.

        Args:
            x: The feature vectors, one per row.

        Returns:
            One number per vector, [b].
        """
        for index in INDICES:
            x = self.layers[str(index)](x)
        return x[:, 0]
