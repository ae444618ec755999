"""Measures how many images per minute the `ocr` reward scores.

    python scripts/bench_ocr.py --out benchmarks/ocr-cpu.json

The script draws the words of the embedded prompt set on plain, noisy and blotchy backgrounds, 512 x
512, and scores them in processes with one engine thread each, as a run does. The first round
(`fresh`) includes the creation of the engines, the second (`warm`) does not. The slower round
should reach 100 images per minute on 2 cores. `cpu_seconds` is processor time, which does not
depend on other work of the machine (`load_average`, before the start).
"""

import argparse
import os
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from bench.report import cores, finish
from PIL import Image, ImageDraw, ImageFont
from scipy.ndimage import gaussian_filter

from solrl_jax.data.prompts import EMBEDDED_FOLDER
from solrl_jax.rewards.ocr import ocr, requested_words

BAR = 100  # images per minute
PIECE = 5  # images per call


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=100, help="number of images (default: 100)")
    parser.add_argument(
        "--size", type=int, default=512, help="height and width in pixels (default: 512)"
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=os.cpu_count(),
        help="number of processes (default: one per core)",
    )
    parser.add_argument("--out", type=Path, help="JSON file for the result, which is also printed")
    args = parser.parse_args()
    prompts = (EMBEDDED_FOLDER / "ocr-train.txt").read_text().splitlines()[: args.images]
    load = round(os.getloadavg()[0], 1)
    images = np.stack([draw(prompt, args.size, i) for i, prompt in enumerate(prompts)])
    with ProcessPoolExecutor(args.processes, mp_context=get_context("spawn")) as pool:
        runs = {name: measure(pool, images, prompts) for name in ("fresh", "warm")}
    slowest = min(run["images_per_minute"] for run in runs.values())
    packages = ("rapidocr", "onnxruntime", "opencv-python-headless", "numpy")
    setting = {
        "load_average": load,
        "images": len(images),
        "size": args.size,
        "processes": args.processes,
    }
    verdict = {
        "bar_images_per_minute": BAR,
        "times_bar": round(slowest / BAR, 2),
        "within_bar": slowest >= BAR,
    }
    finish(setting | {"threads_per_process": 1} | runs | verdict, args.out, cores(), packages)


def draw(prompt: str, size: int, seed: int) -> np.ndarray:
    """Draws the quoted words of a prompt on a plain, a noisy or a blotchy background.

    Args:
        prompt: The prompt.
        size: The height and width in pixels.
        seed: The seed of the colors and positions; modulo 3 it selects the background.

    Returns:
        The image, float32 [size, size, 3] in [0, 1].
    """
    rng = np.random.default_rng(seed)
    ground = np.full((size, size, 3), rng.uniform(0.6, 1.0, 3))
    if seed % 3 == 1:
        ground += rng.normal(0, 0.08, ground.shape)
    elif seed % 3 == 2:
        blotches = gaussian_filter(rng.normal(0, 1, ground.shape), (size / 16, size / 16, 0))
        ground += 0.15 * blotches / blotches.std()
    image = Image.fromarray(np.uint8(255 * np.clip(ground, 0, 1)))
    ink = tuple(int(c) for c in rng.integers(0, 90, 3))
    font = ImageFont.load_default(float(rng.uniform(0.06, 0.1)) * size)
    x, y = (float(middle) for middle in rng.uniform(0.4, 0.6, 2) * size)
    ImageDraw.Draw(image).text(
        (x, y),
        requested_words(prompt, {}).replace(" ", "\n"),
        ink,
        font,
        anchor="mm",
        align="center",
    )
    return np.asarray(image, np.float32) / 255


def measure(pool: ProcessPoolExecutor, images: np.ndarray, prompts: list[str]) -> dict[str, float]:
    """Scores all images [n, size, size, 3] once. Returns times and scores by name."""
    pieces = [slice(start, start + PIECE) for start in range(0, len(images), PIECE)]
    began = time.perf_counter()
    waiting = [pool.submit(score, images[piece], prompts[piece]) for piece in pieces]
    results = [piece.result() for piece in waiting]
    seconds = time.perf_counter() - began
    scores = np.concatenate([scores for scores, _ in results])
    return {
        "seconds": round(seconds, 1),
        "cpu_seconds": round(sum(cpu for _, cpu in results), 1),
        "images_per_minute": round(60 * len(images) / seconds),
        "mean_score": round(float(scores.mean()), 3),
        "share_of_ones": round(float((scores == 1).mean()), 3),
    }


def score(images: np.ndarray, prompts: list[str]) -> tuple[np.ndarray, float]:
    """Scores images in a process of the pool. Returns the scores [n] and the processor seconds."""
    began = time.process_time()
    return ocr(images, prompts, [{}] * len(prompts)), time.process_time() - began


if __name__ == "__main__":
    main()
