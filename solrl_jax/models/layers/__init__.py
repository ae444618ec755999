"""The layers that the networks are built from.

Four conventions hold for all networks:

* A layer computes in the dtype of its input. The caller chooses the precision by the dtype of the
  input and by the leaves that represent the weights (`solrl_jax.quant.matmul`). No layer has a
  dtype of its own. Normalization computes in float32.
* Images are `[batch, height, width, channels]`, tokens are `[batch, length, features]`.
* Attributes have the names of the PyTorch module that a network ports, so that published
  checkpoints load by name. The metadata of each parameter holds the last part of its PyTorch name
  and its axis order there (`models.layers.parameter`). `models.loading.weights` needs no other
  description of a network.
* Some layers return an `Activation` that is computed by the layer that reads it
  (`models.layers.activation`). A network only passes such a value on to other layers.
"""
