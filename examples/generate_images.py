"""Generates images with a diffusers directory, in BF16 and in NVFP4 from the same noise.

python examples/generate_images.py [DIRECTORY]        (default: the embedded tiny-sana)
"""

import sys

import numpy as np

import solrl_jax as solrl

PROMPTS = ["a red circle", "two blue squares", "a green triangle above a yellow circle"]


def main(directory: str = "embedded:tiny-sana") -> None:
    images = {
        precision: solrl.generate(directory, PROMPTS, precision=precision, num_steps=10, seed=1)
        for precision in ("bf16", "nvfp4")
    }
    difference = np.abs(images["bf16"] - images["nvfp4"]).mean(axis=(1, 2, 3))
    print("images:", images["nvfp4"].shape)  # [n, height, width, 3], in [0, 1]
    print("mean difference of a pixel:", np.round(difference, 3))


if __name__ == "__main__":
    main(*sys.argv[1:])
