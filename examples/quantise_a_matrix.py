"""Quantises a weight matrix to each format, multiplies by it, and prints what that costs.

python examples/quantise_a_matrix.py
"""

import jax
import jax.numpy as jnp

import solrl_jax as solrl


def main() -> None:
    weight_key, input_key = jax.random.split(jax.random.key(0))
    w = jax.random.normal(weight_key, (1024, 512))  # [inputs, outputs]
    x = jax.random.normal(input_key, (64, 1024), jnp.bfloat16)
    exact = x.astype(jnp.float32) @ w

    def relative(error, of):
        return float(jnp.linalg.norm(error) / jnp.linalg.norm(of))

    print(f"{'format':<10}{'bits a weight':>14}{'weight error':>14}{'product error':>15}")
    for name, form in solrl.FORMATS.items():
        if form.quantize is None:
            continue
        leaf = solrl.quantize(w, name)
        weight_error = relative(solrl.dequantize(leaf) - w, w)
        product = jax.jit(solrl.matmul)(x, leaf)  # activations are quantised too, one scale a row
        print(
            f"{name:<10}{8 * leaf.nbytes / w.size:>14.2f}{weight_error:>14.4f}{relative(product - exact, exact):>15.4f}"
        )


if __name__ == "__main__":
    main()
