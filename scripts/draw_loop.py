"""Draws docs/loop.svg: the loop of Sol-RL with images of an iteration of `tiny`.

    python scripts/draw_loop.py

The figure adapts to light and dark pages.
"""

import base64
import io
from pathlib import Path

import numpy as np
from PIL import Image

import solrl_jax as solrl
from solrl_jax.data.prompts import draw_prompts
from solrl_jax.rl.generate import SeedBatch, generate

OUT = Path(__file__).parents[1] / "docs" / "loop.svg"
FOLLOWED = 2  # index of the prompt among those of the first iteration
WIDE = 8  # images per row of the pool
SIDE = 32  # pixels of an image
GAP = 4  # pixels between two images

STYLE = """
.loop {
  --ink: #1f2933; --soft: #52606d; --best: #0f766e;
  --worst: #b42318; --line: #9aa5b1; --panel: #f5f7fa;
}
@media (prefers-color-scheme: dark) {
  .loop {
    --ink: #e4e7eb; --soft: #b0bac5; --best: #14b8a6;
    --worst: #f04438; --line: #7b8794; --panel: #27303a;
  }
}
[data-md-color-scheme="default"] .loop {
  --ink: #1f2933; --soft: #52606d; --best: #0f766e;
  --worst: #b42318; --line: #9aa5b1; --panel: #f5f7fa;
}
[data-md-color-scheme="slate"] .loop {
  --ink: #e4e7eb; --soft: #b0bac5; --best: #14b8a6;
  --worst: #f04438; --line: #7b8794; --panel: #27303a;
}
.loop text { font-family: system-ui, sans-serif; font-size: 16px; fill: var(--soft); }
.loop .head { font-size: 19px; font-weight: 600; fill: var(--ink); }
.loop .say { font-size: 17px; font-style: italic; fill: var(--ink); }
.loop .panel { fill: var(--panel); stroke: none; }
.loop .best { fill: none; stroke: var(--best); stroke-width: 3.5; }
.loop .worst { fill: none; stroke: var(--worst); stroke-width: 3.5; }
.loop .way { fill: none; stroke: var(--line); stroke-width: 3; }
.loop .point { fill: var(--line); }
.loop image { image-rendering: pixelated; }
"""


def sample_loop() -> tuple[str, np.ndarray, np.ndarray, np.ndarray]:
    """Explores the candidates of one prompt and regenerates the kept ones.

    Returns:
        The prompt, the explored images [n, h, w, 3], the indices [k] of the kept candidates, best
        first, and the regenerated images [k, h, w, 3].
    """
    experiment = solrl.load("tiny")
    state = solrl.fresh_state(experiment)
    config = experiment.config
    prompts = draw_prompts(experiment.train_prompts, config.seed, 0, config.train.num_prompts)
    seeds = experiment.seeds("candidate", prompts, config.rollout.candidates, iteration=1)[FOLLOWED]
    prompt_batch = experiment.encode_prompts(prompts, experiment.reward)

    def sample(sampler, chosen):
        batch = SeedBatch(np.full(len(chosen), FOLLOWED), seeds[chosen])
        return generate(
            experiment.backbone, sampler, prompt_batch, batch, experiment.reward, keep_images=True
        )

    explorer = experiment.explorer
    explored = sample(explorer.sampler(state.old, explorer.settings[0]), np.arange(len(seeds)))
    order = np.argsort(-explored.reward, kind="stable")
    half = config.rollout.kept // 2
    kept = np.concatenate([order[:half], order[-half:]])
    full_sampler = experiment.sampler("regenerate", state.old, config.rollout.num_steps)
    regenerated = sample(full_sampler, kept)
    assert explored.images is not None
    assert regenerated.images is not None
    return str(prompts[FOLLOWED]), explored.images, kept, regenerated.images


def sheet(images: np.ndarray, wide: int) -> str:
    """Arranges images in rows of `wide`. Returns one PNG as a data URL."""
    high = -(-len(images) // wide)
    pixels = np.zeros((high * (SIDE + GAP), wide * (SIDE + GAP), 4), np.uint8)
    for i, image in enumerate(images):
        y = (SIDE + GAP) * (i // wide)
        x = (SIDE + GAP) * (i % wide)
        pixels[y : y + SIDE, x : x + SIDE, :3] = np.round(image * 255)
        pixels[y : y + SIDE, x : x + SIDE, 3] = 255
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


def placed(images: np.ndarray, wide: int, x: float, y: float, scale: float) -> str:
    """An SVG image of a sheet at (x, y)."""
    step = (SIDE + GAP) * scale
    size = f'width="{wide * step:g}" height="{-(-len(images) // wide) * step:g}"'
    return f'<image x="{x:g}" y="{y:g}" {size} href="{sheet(images, wide)}"/>'


def frame(kind: str, x: float, y: float, scale: float) -> str:
    """An SVG rectangle around an image at (x, y)."""
    side = f"{SIDE * scale + 2:g}"
    place = f'x="{x - 1:g}" y="{y - 1:g}" width="{side}" height="{side}"'
    return f'<rect class="{kind}" {place} rx="2"/>'


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    """An SVG text. `kind` is a class of `STYLE`."""
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{words}</text>'


def arrow(x: float, y: float, length: float) -> str:
    """An SVG arrow to the right."""
    line = f'<path class="way" d="M{x} {y} h{length - 10}"/>'
    return f'{line}<path class="point" d="M{x + length} {y} l-13 -8 v16 z"/>'


def panel(x: float, y: float, width: float, height: float) -> str:
    """An SVG background panel."""
    place = f'x="{x - 14:g}" y="{y - 12:g}" width="{width:g}" height="{height:g}"'
    return f'<rect class="panel" {place} rx="8"/>'


def wrapped(words: str, most: int) -> list[str]:
    """Wraps text into lines of at most `most` characters."""
    lines = [""]
    for word in words.split():
        if len(lines[-1]) + len(word) > most:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def svg() -> str:
    """Returns the figure."""
    prompt, explored, kept, regenerated = sample_loop()
    half = len(kept) // 2
    parts = [text(20, 40, "A prompt", "head")]
    parts += [
        text(20, 150 + 26 * i, line, "say") for i, line in enumerate(wrapped(f"“{prompt}”", 16))
    ]
    # Explore.
    left = 225
    top = 62
    scale = 1.1
    step = (SIDE + GAP) * scale
    parts += [panel(left, top, WIDE * step + 24, 6 * step + 22)]
    parts += [
        text(left, 40, f"1  Explore {len(explored)} seeds in FP4", "head"),
        placed(explored, WIDE, left, top, scale),
    ]
    for place, candidate in enumerate(kept):
        x = left + step * (candidate % WIDE)
        y = top + step * (candidate // WIDE)
        parts.append(frame("best" if place < half else "worst", x, y, scale))
    parts += [text(left, 336, "6 steps: rough images, good enough to rank")]
    parts += [arrow(left + WIDE * step + 18, 180, 52)]
    # Regenerate.
    left = 640
    scale = 1.5
    step = (SIDE + GAP) * scale
    parts += [panel(left, top, half * step + 24, 241)]
    parts += [text(left, 40, f"2  Regenerate the {half} best and {half} worst", "head")]
    for row, (kind, words) in enumerate((("best", "best"), ("worst", "worst"))):
        y = 96 + row * 108
        parts += [
            text(left, y - 10, words),
            placed(regenerated[row * half : (row + 1) * half], half, left, y, scale),
        ]
        parts += [frame(kind, left + step * i, y, scale) for i in range(half)]
    parts += [text(left, 336, "BF16, 10 steps: only these are trained on")]
    parts += [arrow(left + half * step + 14, 180, 44)]
    # Learn.
    left = 1040
    parts += [text(left, 40, "3  Learn", "head")]
    parts += [panel(left, top, 164, 241)]
    for y, kind, path, first, second in (
        (128, "best", "150 v-40 m-10 12 l10 -13 l10 13", "more like", "the best"),
        (222, "worst", "202 v40 m-10 -12 l10 13 l10 -13", "less like", "the worst"),
    ):
        parts.append(f'<path d="M{left + 8} {path}" class="{kind}"/>')
        parts += [text(left + 32, y, first), text(left + 32, y + 20, second)]
    parts.append('<path class="way" d="M1108 306 v62 q0 14 -14 14 h-700 q-14 0 -14 -14 v-12"/>')
    parts.append('<path class="point" d="M380 346 l-8 13 h16 z"/>')
    parts += [
        text(
            744,
            408,
            "4  The new policy is merged, quantized and explores the next prompts",
            "",
            "middle",
        )
    ]
    label = (
        f"The loop: {len(explored)} candidates of a prompt are explored in four bits, the {half} "
        f"best and the {half} worst are regenerated in BF16, the policy learns from these and "
        "explores again."
    )
    body = "\n".join(parts)
    attributes = 'class="loop" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1200 424"'
    head = f'<svg {attributes} role="img" aria-label="{label}">'
    return f"{head}\n<style>{STYLE}</style>\n{body}\n</svg>\n"


if __name__ == "__main__":
    OUT.write_text(svg())
    print(f"{OUT}: {OUT.stat().st_size / 1e3:.0f} kB")
