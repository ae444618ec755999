# %% [markdown]
# # SANA on one GPU
#
# This notebook post-trains SANA 1.6B with Sol-RL on one NVIDIA GPU of 24, 40 or 80 GB. The reward
# is PickScore, the prompts come with the package, and the result is a LoRA that diffusers loads.
#
# `solrl plan` compiled the programs of each setting for the named card. The peak is compared with
# the usable memory, 92 % of the card's. The seconds are a lower bound of one iteration: the work of
# the compiled programs at the card's public peak rates. On an H100, measured times were 1.4 to 1.7
# times such bounds.
#
# | device | model | prompts per iteration | exploration | peak memory | one iteration, at least |
# |---|---|---|---|---|---|
# | L4, 24 GB | SANA 1.6B, 512 px | 4 | FP8 | 11.5 of 21.8 GB | 101 s |
# | A100, 40 GB | SANA 1.6B, 1024 px | 8 | INT8 | 17.2 of 38.9 GB | 181 s |
# | H100, 80 GB | SANA 1.6B, 1024 px | 16 | FP8 | 28.2 of 78.2 GB | 127 s |

# %% [markdown]
# Install the package, which brings JAX for CUDA 13 (`cuda12` for drivers older than 580). The path
# or the URL of a clone works in place of its name. JAX takes 75 % of a GPU unless told otherwise.
# Restart the session if JAX was imported before.

# %% tags=["install"]
# %pip install --quiet "solrl_jax[cuda13]"
# %env XLA_PYTHON_CLIENT_MEM_FRACTION=0.92

# %%
import json
from pathlib import Path

import jax
import matplotlib.pyplot as plt
from PIL import Image

import solrl_jax as solrl

# %% [markdown]
# ## Settings
#
# `BY_CARD` holds the settings that depend on the memory of the card in GB. If `RUN` is on a disk
# that outlives the session, the next session resumes the run.

# %% tags=["parameters"]
PRESET = "sana_sol_rl_pickscore"
RUN = "runs/sana"
SETTINGS = [
    "rollout.explore.precision=auto",
    "train.iterations=30",
    "eval.every=10",
    "eval.num_prompts=64",
    "run.checkpoint_every=5",
]
BY_CARD = {
    24: [
        "model.height=512",
        "model.width=512",
        "rollout.per_device_batch_size=8",
        "optimizer.per_device_batch_size=8",
        "train.num_prompts=4",
    ],
    40: [
        "rollout.per_device_batch_size=8",
        "optimizer.per_device_batch_size=8",
        "train.num_prompts=8",
    ],
    80: ["train.num_prompts=16"],
}
PROMPTS = [
    "a lighthouse on a cliff at dusk, oil painting",
    "three green bottles on a wooden table",
    "a cat asleep in a bookshop window, morning light",
    'a shop sign that says "OPEN LATE"',
]

# %%
device = jax.local_devices()[0]
limit = (device.memory_stats() or {}).get("bytes_limit", 0) / 1e9
card = max((size for size in BY_CARD if 0.85 * size <= limit), default=min(BY_CARD))
settings = [*SETTINGS, *BY_CARD[card], f"run.dir={RUN}"]
print(f"{device.device_kind}: settings for {card} GB")

# %% [markdown]
# ## Train
#
# The first start downloads the weights: 9 GB for SANA and 4 GB for PickScore. The prompts are
# encoded once, then the text encoder is released. The first iteration also compiles, which takes
# some minutes. If the cell is interrupted, the run is saved, and the same call resumes it.

# %%
summary = solrl.train(PRESET, *settings)
for moment in ("before", "after"):
    print(f"held-out reward {moment}: {summary[moment]['eval/reward']:.3f}")

# %% [markdown]
# ## Curves
#
# The mean reward of all candidates of an iteration, and of the kept ones, half of which are the
# best and half the worst.

# %%
rows = [json.loads(line) for line in Path(RUN, "metrics.jsonl").read_text().splitlines()]
rows = [row for row in rows if "pool/reward" in row]
figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
for name, label in (("pool/reward", "all candidates"), ("kept/reward", "kept candidates")):
    axes.plot([row["iteration"] for row in rows], [row[name] for row in rows], label=label)
axes.set_xlabel("iteration")
axes.set_ylabel("reward")
axes.legend()
plt.show()

# %% [markdown]
# ## Before and after
#
# The base model and the trained one on held-out prompts, from the same noise.

# %%
before_after = Image.open(Path(RUN, "pictures", "before-after.png"))
figure, axes = plt.subplots(figsize=(10, 10 * before_after.height / before_after.width))
axes.imshow(before_after)
axes.axis("off")
plt.show()

# %% [markdown]
# ## Generate
#
# The EMA policy of the run, with prompts of your own.

# %%
images = solrl.generate(RUN, PROMPTS, seed=1, batch_size=len(PROMPTS))
figure, row = plt.subplots(1, len(PROMPTS), figsize=(3 * len(PROMPTS), 3.2), layout="constrained")
for axes, image, prompt in zip(row, images, PROMPTS, strict=True):
    axes.imshow(image)
    axes.set_title(prompt, fontsize=6)
    axes.axis("off")
plt.show()

# %% [markdown]
# ## A LoRA for diffusers
#
# `SanaPipeline.load_lora_weights` reads this file.

# %%
print(solrl.export(RUN, f"{RUN}/lora.safetensors", force=True))
