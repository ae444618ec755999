"""Makes the embedded pipelines and `tiny-clip` from nothing, and the prompt sets of coloured shapes.

    python scripts/pretrain_tiny.py                        # everything: hours on 2 cores
    python scripts/pretrain_tiny.py --pipeline tiny-sana   # one pipeline
    python scripts/pretrain_tiny.py --stop 2 --pictures 600 --out runs/tiny   # all trainings, cut short: does the script run?

All networks are trained on rendered pictures of coloured shapes and their captions, never on a held-out caption:

* tiny-clip: a CLIP, every caption beside one that differs in a word;
* tiny-sana: a DC-AE, then a SANA transformer and its Gemma-2 text encoder on the flow-matching loss. It sees all scenes first,
  then those that the prompt sets may ask for, at last with three captions in ten wrong;
* tiny-flux: a KL autoencoder, then a FLUX transformer with CLIP and T5, likewise. It then learns from itself what its guidance
  scale means;
* tiny-sd3: the same autoencoder, then an SD3 transformer with two CLIPs and T5. It learns the velocity of `tiny-flux` under
  guidance.

`pretrain/recipe.py` says for how many steps, and at which learning rates. Each training keeps its state in --work and goes on
from there after an interruption. `--stop 0` writes pipelines as far as their trainings have come.
"""

import argparse
from functools import cache
from pathlib import Path

from pretrain.autoencoders import Latents, dc_latents, kl_latents
from pretrain.clip import train_clip
from pretrain.data import make_dataset, write_prompt_sets
from pretrain.flows import train_pipeline
from pretrain.recipe import RECIPES, Settings

ASSETS = Path(__file__).parents[1] / "solrl_jax" / "assets"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pipeline", choices=["all", "tiny-clip", *RECIPES], default="all")
    parser.add_argument(
        "--work", type=Path, default=Path("runs/pretrain"), help="where states are kept"
    )
    parser.add_argument(
        "--out", type=Path, default=ASSETS, help="where `pipelines` and `prompt_sets` go"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pictures", type=int, default=60_000, help="how many to train on")
    parser.add_argument(
        "--stop", type=int, help="leave every training at this step (default: at its end)"
    )
    args = parser.parse_args(arguments)
    args.work.mkdir(parents=True, exist_ok=True)
    settings = Settings(args.work, args.out / "pipelines", args.seed, args.stop)
    wanted = ["tiny-clip", *RECIPES] if args.pipeline == "all" else [args.pipeline]

    write_prompt_sets(args.seed, args.out / "prompt_sets")
    images, captions = make_dataset(args.pictures, args.seed, args.work)

    @cache
    def shared() -> Latents:
        return kl_latents(settings, images)

    for name in wanted:
        if name == "tiny-clip":
            train_clip(settings, images, captions)
        else:
            latents = dc_latents(settings, images) if name == "tiny-sana" else shared()
            train_pipeline(settings, name, latents, captions)


if __name__ == "__main__":
    main()
