"""The configurations of released models that come with the package, for tests of networks."""

import json
from typing import Any

from solrl_jax.storage.hub import CARRIED

FLUX = "black-forest-labs/FLUX.1-dev"
SD3 = "stabilityai/stable-diffusion-3.5-large"
FLUX2_4B = "black-forest-labs/FLUX.2-klein-4B"
FLUX2_9B = "black-forest-labs/FLUX.2-klein-9B"
SD3_MEDIUM = "stabilityai/stable-diffusion-3.5-medium"
SANA = "Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers"
SANA_600M = "Efficient-Large-Model/Sana_600M_512px_diffusers"
SANA15_1600M = "Efficient-Large-Model/SANA1.5_1.6B_1024px_diffusers"
SANA15_4800M = "Efficient-Large-Model/SANA1.5_4.8B_1024px_diffusers"
QWEN_IMAGE = "Qwen/Qwen-Image"
WAN = "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
WAN22 = "Wan-AI/Wan2.2-TI2V-5B-Diffusers"
ZIMAGE = "Tongyi-MAI/Z-Image"


def config(repository: str, component: str = "") -> dict[str, Any]:
    """A `config.json`, without the notes of diffusers, which begin with "_"."""
    fields = json.loads((CARRIED / repository / component / "config.json").read_text())
    return {name: value for name, value in fields.items() if not name.startswith("_")}
