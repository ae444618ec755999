"""The configurations of released models that come with the package, for tests of networks."""

import json
from typing import Any

from solrl_jax.storage.hub import CARRIED

FLUX = "black-forest-labs/FLUX.1-dev"
SD3 = "stabilityai/stable-diffusion-3.5-large"
FLUX2_4B = "black-forest-labs/FLUX.2-klein-4B"
FLUX2_9B = "black-forest-labs/FLUX.2-klein-9B"
SANA = "Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers"
ZIMAGE = "Tongyi-MAI/Z-Image"


def config(repository: str, component: str = "") -> dict[str, Any]:
    """A `config.json`, without the notes of diffusers, which begin with "_"."""
    fields = json.loads((CARRIED / repository / component / "config.json").read_text())
    return {name: value for name, value in fields.items() if not name.startswith("_")}
