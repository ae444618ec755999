"""Generates images with a diffusers directory, in BF16 and in NVFP4 from the same noise.

python examples/sample_a_directory.py [DIRECTORY]        (default: the embedded tiny-sana)
"""

import sys
from pathlib import Path

import numpy as np

import solrl_jax as solrl

PROMPTS = ["a red circle", "two blue squares", "a green triangle above a yellow circle"]


def main(directory: str = "embedded:tiny-sana", out: str = "out") -> None:
    folder = Path(out)
    folder.mkdir(exist_ok=True)
    (folder / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    images = {}
    for precision in ("bf16", "nvfp4"):
        made = solrl.sample(
            directory,
            folder / "prompts.txt",
            folder / precision,
            precision=precision,
            steps=10,
            seed=1,
        )
        images[precision] = np.load(
            folder / precision / "images.npy"
        )  # [n, height, width, 3] in [0, 1]
        print(f"{made['images']} images in {made['out']}: {made['precision']}")
    difference = np.abs(images["bf16"] - images["nvfp4"]).mean(axis=(1, 2, 3))
    print("mean difference of a pixel:", np.round(difference, 3))


if __name__ == "__main__":
    main(*sys.argv[1:])
