"""The head that ImageReward (arXiv 2304.05977) and the LAION aesthetic predictor put on one vector: five linears in a row.

Nothing lies between them but dropout, which scoring leaves out: no activation, so the whole is one affine map.
"""

from flax import nnx
from jaxtyping import Array, Float

from solrl_jax.models.layers import Linear

WIDTHS = (1024, 128, 64, 16, 1)
PLACES = (0, 2, 4, 6, 7)  # of the linears in the released list; dropouts have the others


class ScoreHead(nnx.Module):
    def __init__(self, features: int, *, rngs: nnx.Rngs):
        pairs = zip((features, *WIDTHS), WIDTHS, strict=False)
        self.layers = nnx.Dict({str(i): Linear(*pair, rngs=rngs) for i, pair in zip(PLACES, pairs, strict=True)})

    def __call__(self, x: Float[Array, "b d"]) -> Float[Array, " b"]:
        for place in PLACES:
            x = self.layers[str(place)](x)
        return x[:, 0]
