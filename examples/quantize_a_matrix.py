"""Quantizes a weight matrix to each format and prints the errors of the weight and of a matmul.

python examples/quantize_a_matrix.py
"""

import jax
import jax.numpy as jnp

import solrl_jax as solrl


def relative_error(approximate: jax.Array, exact: jax.Array) -> float:
    """The norm of the difference divided by the norm of `exact`."""
    return float(jnp.linalg.norm(approximate - exact) / jnp.linalg.norm(exact))


def main() -> None:
    weight_key, input_key = jax.random.split(jax.random.key(0))
    w = jax.random.normal(weight_key, (1024, 512))  # [in, out]
    x = jax.random.normal(input_key, (64, 1024), jnp.bfloat16)
    exact = x.astype(jnp.float32) @ w

    print(f"{'format':<10}{'bits per weight':>17}{'weight error':>14}{'matmul error':>14}")
    for name, form in solrl.FORMATS.items():
        if form.quantize is None:
            continue
        leaf = solrl.quantize(w, name)
        bits = 8 * leaf.nbytes / w.size
        weight_error = relative_error(solrl.dequantize(leaf), w)
        # `matmul` quantizes the activations too, with one scale per row.
        matmul_error = relative_error(jax.jit(solrl.matmul)(x, leaf), exact)
        print(f"{name:<10}{bits:>17.2f}{weight_error:>14.4f}{matmul_error:>14.4f}")


if __name__ == "__main__":
    main()
