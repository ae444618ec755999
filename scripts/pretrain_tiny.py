"""Pretrains the embedded pipelines and `tiny-clip`, and writes the prompt sets of both worlds.

    python scripts/pretrain_tiny.py                        # everything, hours on 2 cores
    python scripts/pretrain_tiny.py --pipeline tiny-sana   # one pipeline
    python scripts/pretrain_tiny.py --stop 2 --pictures 600 --out runs/tiny   # a quick check

All networks are trained on rendered images or clips of colored shapes and their captions, never on
a held-out caption:

* tiny-clip: a CLIP; each caption is contrasted with one that differs in one word.
* tiny-sana: a DC-AE, then a SANA transformer and its Gemma 2 text encoder with the flow-matching
  loss. They are trained on all scenes first, then on those that prompt sets may ask for, and
  finally with 30 % wrong captions.
* tiny-flux: a KL autoencoder, then a FLUX transformer with CLIP and T5 in the same way, which is
  then distilled for its embedded guidance scale.
* tiny-sd3: the same autoencoder, then an SD3 transformer with two CLIPs and T5, distilled from the
  guided velocity of `tiny-flux`.
* tiny-wan: Wan's autoencoder on clips of one moving object, then its decoder alone on noisy
  latents, then a Wan transformer and its UMT5, finally with 30 % wrong captions.

`pretrain/recipe.py` sets the steps and learning rates. Each training saves its state in `--work`
and resumes from there. `--stop 0` writes the pipelines in their current state. `--seconds` limits
the time of a training, as it is printed:

    python scripts/pretrain_tiny.py --pipeline tiny-wan --seconds wan-vae=80 \\
      --seconds wan-decoder=80 --seconds tiny-wan=160

`--refine` reads a `tiny-wan` and trains only the decoder of its autoencoder further (the training
`wan-refine`):

    python scripts/pretrain_tiny.py --refine solrl_jax/assets/pipelines/tiny-wan --clips 3000
"""

import argparse
from functools import cache
from pathlib import Path

import numpy as np
from pretrain import clips
from pretrain.autoencoders import Latents, dc_latents, kl_latents, refine_pipeline, wan_latents
from pretrain.clip import train_clip
from pretrain.data import caption_batches, clip_batches, make_dataset, write_prompt_sets
from pretrain.flows import train_pipeline
from pretrain.recipe import RECIPES, Settings

# Names of the trainings, whose time `--seconds` limits.
TRAININGS = (
    "vae",
    "kl",
    "wan-vae",
    "wan-decoder",
    "wan-refine",
    "clip",
    *RECIPES,
    "tiny-flux-guided",
)
ASSETS = Path(__file__).parents[1] / "solrl_jax" / "assets"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pipeline", choices=["all", "tiny-clip", *RECIPES], default="all")
    parser.add_argument(
        "--work", type=Path, default=Path("runs/pretrain"), help="folder of the training states"
    )
    parser.add_argument(
        "--out", type=Path, default=ASSETS, help="folder for `pipelines` and `prompt_sets`"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pictures", type=int, default=60_000, help="number of training images")
    parser.add_argument("--clips", type=int, default=24_000, help="number of training clips")
    parser.add_argument(
        "--refine",
        type=Path,
        metavar="DIRECTORY",
        help="instead of pretraining, train the decoder of this tiny-wan further",
    )
    parser.add_argument(
        "--seconds",
        type=_limit,
        action="append",
        default=[],
        metavar="NAME=SECONDS",
        help="limit the time of one training (default: none)",
    )
    parser.add_argument(
        "--stop", type=int, help="stop every training at this step (default: its end)"
    )
    args = parser.parse_args(arguments)
    for name, _ in args.seconds:
        if name not in TRAININGS:
            parser.error(f"--seconds {name}: expected one of {', '.join(TRAININGS)}")
    if args.refine and args.pipeline != "all":
        parser.error("--pipeline: --refine names the pipeline")
    args.work.mkdir(parents=True, exist_ok=True)
    settings = Settings(args.work, args.out / "pipelines", args.seed, args.stop, dict(args.seconds))
    if args.refine:
        refine_pipeline(settings, args.refine, clips.make_clips(args.clips, args.seed)[0])
        return
    wanted = ["tiny-clip", *RECIPES] if args.pipeline == "all" else [args.pipeline]

    @cache
    def pictures() -> tuple[np.ndarray, list[str]]:
        write_prompt_sets(args.seed, args.out / "prompt_sets")
        return make_dataset(args.pictures, args.seed, args.work)

    @cache
    def shared() -> Latents:
        return kl_latents(settings, pictures()[0])

    for name in wanted:
        if name == "tiny-clip":
            train_clip(settings, *pictures())
            continue
        curriculum = RECIPES[name].curriculum
        batch = RECIPES[name].batch
        if name == "tiny-wan":
            clips.write_prompt_sets(args.out / "prompt_sets")
            videos, captions = clips.make_clips(args.clips, args.seed)
            latents = wan_latents(settings, videos)
            draw = clip_batches(len(captions), curriculum, batch, args.seed)
        else:
            images, captions = pictures()
            latents = dc_latents(settings, images) if name == "tiny-sana" else shared()
            draw = caption_batches(captions, curriculum, batch, args.seed)
        train_pipeline(settings, name, latents, captions, draw)


def _limit(text: str) -> tuple[str, float]:
    """Parses NAME=SECONDS. Raises ValueError for another form."""
    name, seconds = text.split("=")
    return name, float(seconds)


if __name__ == "__main__":
    main()
