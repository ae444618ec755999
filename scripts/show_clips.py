"""Samples `tiny-wan` for its held-out prompts, scores the clips, and draws a sheet of them.

    python scripts/show_clips.py --model embedded:tiny-wan --out clips.png --guidance 1 3

It prints the mean scores of the verifier for each guidance scale. The sheet has one row per prompt
and one column per frame of its first two clips, at the first scale.
"""

import argparse
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from PIL import Image

from solrl_jax import api
from solrl_jax.data.motion import scenes
from solrl_jax.rewards.motion import prepare, score

PROMPTS = Path(__file__).parents[1] / "solrl_jax" / "assets" / "prompt_sets"
SIZE = (32, 32, scenes.FRAMES)
ENLARGED = 2  # pixels of the sheet per pixel


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="embedded:tiny-wan")
    parser.add_argument("--prompts", default="motion-test", help="an embedded prompt set")
    parser.add_argument("--out", type=Path, help="a PNG file (default: none)")
    parser.add_argument("--clips", type=int, default=8, help="number of clips per prompt")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--guidance", type=float, nargs="+", default=[1.0])
    parser.add_argument("--precision", default="bf16")
    args = parser.parse_args()
    captions = (PROMPTS / f"{args.prompts}.txt").read_text().splitlines()
    prompts = [caption for caption in captions for _ in range(args.clips)]
    for number, scale in enumerate(args.guidance):
        clips = api.generate(
            args.model,
            prompts,
            num_steps=args.steps,
            guidance_scale=scale,
            size=SIZE,
            precision=args.precision,
            max_sequence_length=8,
            batch_size=len(prompts),
        )
        scores = score(None, jnp.asarray(clips), prepare(prompts))
        means = " ".join(f"{name} {np.mean(values):.3f}" for name, values in scores.items())
        print(f"guidance {scale}: {means}", flush=True)
        if args.out and number == 0:
            _draw_sheet(clips, args.clips, args.out)


def _draw_sheet(clips: np.ndarray, per_prompt: int, path: Path) -> None:
    """Writes the frames of the first two clips of each prompt, one row per prompt."""
    shown = clips.reshape(-1, per_prompt, *clips.shape[1:])[:, :2]
    rows = shown.reshape(len(shown), -1, *clips.shape[2:])
    sheet = np.concatenate([np.concatenate(list(row), 1) for row in rows])
    sheet = sheet.repeat(ENLARGED, 0).repeat(ENLARGED, 1)
    Image.fromarray(np.rint(sheet * 255).astype(np.uint8)).save(path)


if __name__ == "__main__":
    main()
