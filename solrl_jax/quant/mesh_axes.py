"""The mesh axes over which the transformer is sharded inside a sample, and their sizes."""

import jax

TENSOR = "tensor"  # shards the outputs of matmuls (`quant.tensor_parallel`)
SEQUENCE = "sequence"  # shards tokens (`quant.sequence_parallel`)


def axis_size(name: str) -> int:
    """Returns the size of an axis of the mesh that `jax.set_mesh` has set.

    Args:
        name: The name of the axis.

    Returns:
        The number of devices along it; 1 without a mesh or without that axis.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else mesh.shape.get(name, 1)
