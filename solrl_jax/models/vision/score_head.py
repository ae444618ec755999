"""The head of ImageReward (arXiv 2304.05977) and of the LAION aesthetic predictor: one number from
a feature vector.
"""

from flax import nnx
from jaxtyping import Array, Float

from solrl_jax.models.layers.linear import Linear

WIDTHS = (1024, 128, 64, 16, 1)
# The indices of the linear layers in PyTorch's list. The other entries are dropouts.
INDICES = (0, 2, 4, 6, 7)


class ScoreHead(nnx.Module):
    """Five linear layers in a row.

    There is no activation between them, so that the whole is one affine map.
    """

    def __init__(self, features: int, *, rngs: nnx.Rngs):
        layers = {}
        for index, width in zip(INDICES, WIDTHS, strict=True):
            layers[str(index)] = Linear(features, width, rngs=rngs)
            features = width
        self.layers = nnx.Dict(layers)

    def __call__(self, x: Float[Array, "b d"]) -> Float[Array, " b"]:
        for index in INDICES:
            x = self.layers[str(index)](x)
        return x[:, 0]
