"""Makes what is embedded from nothing, in `solrl_jax/pipelines`: `tiny-sana`, `-clip`, `-flux`, `-sd3` and `-light`.

    python scripts/pretrain_tiny.py                 # all stages, hours on 2 cores
    python scripts/pretrain_tiny.py --stage flow    # one stage, and those that it builds on

Networks are trained on rendered pictures of coloured shapes and their captions, never on a held-out caption:

* vae: a small DC-AE, 32 x 32 pixels to 8 x 8 latents of 8 channels (L1 + L2, and noise on the latents so that the decoder
  forgives a flow that is not quite there);
* flow: a SANA transformer and its Gemma-2 text encoder, together, on the flow-matching loss, with one prompt in ten left empty
  so that guidance has something to lean on; on all scenes first, then on those that the prompt sets ask for, and at last
  with three captions in ten wrong, as those of the web are: it then knows more than it shows, and reinforcement learning has
  something to bring out;
* light: a decoder with a fifth of the arithmetic, that learns to draw what that of `vae` draws, for candidates
  (`rollout.explore.vae=embedded:tiny-light`);
* clip: a CLIP on the same pairs, every caption beside one that differs in a word;
* kl: a small KL autoencoder, 32 x 32 pixels to 8 x 8 latents of 8 channels, for both of the next;
* flux, sd3: a FLUX and an SD3 transformer, each with its CLIPs and T5, in the way of `flow`; FLUX then learns from itself what
  its guidance scale means, and SD3 learns FLUX's velocity under guidance;
* straight-sana, straight-flux, straight-sd3: their transformers once more, SD3's twice, on couples of noise and what they draw
  from it, so that paths are straighter (reflow).

Everything is drawn from --seed. Each stage keeps its state in --work and goes on from there after an interruption. A stage
whose state is past its last step is not trained but exported, so that `--flow-stop 0 --flow-more` writes a pipeline as far
as it has come.
"""

import argparse
from pathlib import Path

from pretrain.data import make_dataset
from pretrain.export import export_clip, export_prompts, export_sana
from pretrain.joint import curved, encode_kl, train_joint, train_kl
from pretrain.light import train_light
from pretrain.networks import networks
from pretrain.stages import encode_all, train_clip, train_flow, train_vae
from pretrain.straight import straighten

PIPELINES = Path(__file__).parents[1] / "solrl_jax" / "assets" / "pipelines"
STAGES = ("vae", "flow", "straight-sana", "light", "clip", "kl", "flux", "straight-flux", "sd3", "straight-sd3")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", choices=["all", *STAGES], default="all")
    parser.add_argument("--work", type=Path, default=Path("runs/pretrain"), help="where states are kept")
    parser.add_argument("--out", type=Path, default=PIPELINES, help="where pipelines go; prompt sets go beside it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pictures", type=int, default=60_000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--vae-steps", type=int, default=900)
    parser.add_argument("--light-steps", type=int, default=2000)
    parser.add_argument("--kl-steps", type=int, default=1000)
    parser.add_argument("--clip-steps", type=int, default=500)
    for stage, steps, focus, balance, noise, stop, more in (
        ("flow", 4000, 2600, 4800, [7000], 3700, [4000]),
        ("flux", 8000, 500, 900, [8000, 8800], 8000, [800]),
        ("sd3", 2500, 200, 500, [], 2500, [1600, 4000]),
    ):
        parser.add_argument(f"--{stage}-steps", type=int, default=steps)
        parser.add_argument(
            f"--{stage}-focus", type=int, default=focus, help="from here on, only scenes that the prompt sets ask for"
        )
        parser.add_argument(f"--{stage}-balance", type=int, default=balance, help="from here on, half of them of two groups")
        parser.add_argument(
            f"--{stage}-noise", type=int, nargs="*", default=noise, help="from the first on, to the second, captions are wrong"
        )
        parser.add_argument(f"--{stage}-stop", type=int, default=stop, help="where it leaves its schedule, before its end")
        parser.add_argument(
            f"--{stage}-more", type=int, nargs="*", default=more, help="steps of further legs, each from where the last ended"
        )
    for stage, guided, teacher in (("flux", 600, None), ("sd3", 0, "tiny-flux")):
        parser.add_argument(
            f"--{stage}-guided", type=int, default=guided, help="steps in which it is taught what its guidance scale means"
        )
        parser.add_argument(
            f"--{stage}-teacher", default=teacher, help="the pipeline whose velocity it learns, not the pictures' own"
        )
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    args.work.mkdir(parents=True, exist_ok=True)
    wanted = lambda *stages: args.stage in ("all", *stages)

    export_prompts(args.seed, args.out.parent / "prompt_sets")
    nets = networks()
    images, captions = make_dataset(args.pictures, args.seed, args.work)
    if wanted("vae", "flow"):
        vae = train_vae(args, nets, images)
    if wanted("flow"):
        encode = lambda x: nets["vae"][0](vae).encode(x)
        latents = encode_all(encode, images, args.work / "latents.npy", args.work / "vae.safetensors")
        scale = round(float(1 / latents.std()), 5)  # the flow sees latents of unit size
        flow = train_flow(args, nets, latents * scale, captions)
        export_sana(nets, vae, flow, scale, curved(args, "tiny-sana"))
    if wanted("straight-sana"):
        straighten(args, "tiny-sana", captions)
    if wanted("light"):
        train_light(args, images)
    if wanted("clip"):
        export_clip(nets, train_clip(args, nets, images, captions), args.out / "tiny-clip")
    if wanted("kl", "flux", "sd3"):
        kl = train_kl(args, images)
    if wanted("flux", "sd3"):
        kl_latents = encode_kl(args, kl, images)
    for stage in ("flux", "sd3"):
        if wanted(stage):
            train_joint(args, f"tiny-{stage}", kl_latents, captions)
        if wanted(f"straight-{stage}"):
            straighten(args, f"tiny-{stage}", captions)


if __name__ == "__main__":
    main()
