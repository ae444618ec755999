"""Measures diffusers' transformer with torch.compile, for comparison with scripts/bench_rollout.py.

    python scripts/bench_peer_torch.py flux1_sol_rl_hpsv2 --rows 4
    python scripts/bench_peer_torch.py tiny --rows 2 --mode eager

The weights are random, the shapes are those of the preset, and the dtype is BF16. The script prints
the seconds of one evaluation of the network as JSON. It needs PyTorch and diffusers. JAX stays on
the CPU and only provides shapes.
"""

import argparse
import json
import os
import statistics
import time

os.environ["JAX_PLATFORMS"] = "cpu"

import diffusers
import torch
from bench.random_weights import encoding_shapes

from solrl_jax.config.presets import resolve
from solrl_jax.parallel import sharding
from solrl_jax.planning.abstract import abstract_experiment, open_configurations
from solrl_jax.rl.experiment import first_device_info

MODES = ("eager", "default", "max-autotune-no-cudagraphs", "max-autotune")


def shapes_of(preset: str, overrides: list[str]) -> tuple[dict, dict, tuple[int, ...]]:
    """Returns the shapes that a preset gives the transformer.

    Args:
        preset: The name of the preset.
        overrides: Overrides of the form `key=value`.

    Returns:
        The transformer's config.json, the shape of each encoding of one prompt without its batch
        dimension, and the latent shape [h, w, c].
    """
    config = resolve(preset, tuple(overrides))
    pipeline = open_configurations(config.model.path)
    shapes = abstract_experiment(config, pipeline, first_device_info(), sharding.make_mesh(1, 1))
    encodings = {name: leaf.shape[1:] for name, leaf in encoding_shapes(shapes).items()}
    stored = json.loads((pipeline.transformer.source / "config.json").read_text())
    return stored, encodings, pipeline.latent_shape(*shapes.size)


def inputs(
    stored: dict, encodings: dict, latent: tuple[int, ...], rows: int, device: str
) -> dict[str, torch.Tensor]:
    """Draws the keyword arguments of one call of the network, for a batch of `rows` samples."""

    def draw(*shape):
        return torch.randn(rows, *shape, dtype=torch.bfloat16, device=device)

    height, width, channels = latent
    time = torch.full((rows,), 500.0, device=device)
    text = {"encoder_hidden_states": draw(*encodings["text"])}
    if stored["_class_name"] == "FluxTransformer2DModel":  # a token is 2 x 2 latents
        tokens = height // 2 * (width // 2)
        ids = {
            "img_ids": torch.zeros(tokens, 3, device=device),
            "txt_ids": torch.zeros(encodings["text"][0], 3, device=device),
        }
        guidance = (
            {"guidance": torch.ones(rows, device=device)} if stored["guidance_embeds"] else {}
        )
        pooled = {"pooled_projections": draw(*encodings["pooled"])}
        return (
            {"hidden_states": draw(tokens, 4 * channels), "timestep": time / 1000}
            | ids
            | guidance
            | pooled
            | text
        )
    images = {"hidden_states": draw(channels, height, width), "timestep": time} | text
    if "pooled" in encodings:
        return images | {"pooled_projections": draw(*encodings["pooled"])}
    return images | {
        "encoder_attention_mask": torch.ones(
            rows, *encodings["mask"], dtype=torch.bool, device=device
        )
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("preset")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--rows", type=int, default=4, help="batch size (default: 4)")
    parser.add_argument(
        "--repeat",
        type=int,
        default=5,
        help="number of calls whose median is taken (default: 5)",
    )
    parser.add_argument(
        "--mode", choices=MODES, default="max-autotune-no-cudagraphs", help="mode of torch.compile"
    )
    args = parser.parse_args()
    stored, encodings, latent = shapes_of(args.preset, args.overrides)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        network = (
            getattr(diffusers, stored["_class_name"]).from_config(stored).to(torch.bfloat16).eval()
        )
    run = (
        network if args.mode == "eager" else torch.compile(network, mode=args.mode, fullgraph=True)
    )
    arguments = inputs(stored, encodings, latent, args.rows, device)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    times = []
    with torch.inference_mode():
        for _ in range(args.repeat + 2):  # the first two calls compile and warm up
            wait()
            began = time.perf_counter()
            run(**arguments, return_dict=False)
            wait()
            times.append(time.perf_counter() - began)
    versions = {"torch": torch.__version__, "diffusers": diffusers.__version__}
    print(
        json.dumps(
            {
                "versions": versions,
                "mode": args.mode,
                "rows": args.rows,
                "seconds": statistics.median(times[2:]),
            }
        )
    )


if __name__ == "__main__":
    main()
