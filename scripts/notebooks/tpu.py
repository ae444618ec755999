# %% [markdown]
# # SANA on a free TPU
#
# This notebook post-trains SANA 0.6B at 512 px with Sol-RL, on the TPUs that Kaggle and Colab lend:
# eight v5e chips (Kaggle, accelerator "TPU v5e-8") or one (Colab, runtime "v5e-1 TPU"). The reward
# is PickScore, the prompts come with the package, and the result is a LoRA that diffusers loads.
#
# `solrl plan` compiled the programs of both settings for these chips. The peak is the memory of one
# chip, of which 14.7 of 16 GB are usable. The seconds are a lower bound of one iteration: the work
# of the compiled programs at the chip's public peak rates. Nothing has been run on a TPU.
#
# | device | model | prompts per iteration | exploration | peak memory | one iteration, at least |
# |---|---|---|---|---|---|
# | 8 x v5e (Kaggle) | SANA 0.6B, 512 px | 16 | INT8 | 5.8 of 14.7 GB | 11 s |
# | v5e (Colab) | SANA 0.6B, 512 px | 4 | INT8 | 9.2 of 14.7 GB | 22 s |

# %% [markdown]
# Install the package, which brings JAX for TPUs. The path or the URL of a clone works in place of
# its name. Restart the session if JAX was imported before.

# %% tags=["install"]
# %pip install --quiet "solrl_jax[tpu]"

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
# `BY_CHIPS` holds the settings that depend on the number of chips. Eight chips share one copy of
# the weights (`mesh.fsdp=8`). If `RUN` is on a disk that outlives the session, the next session
# resumes the run.

# %% tags=["parameters"]
PRESET = "sana-600m_sol_rl_pickscore"
RUN = "runs/sana-600m"
SETTINGS = [
    "rollout.explore.precision=auto",
    "rollout.per_device_batch_size=16",
    "optimizer.per_device_batch_size=16",
    "train.iterations=30",
    "eval.every=10",
    "eval.num_prompts=64",
    "run.checkpoint_every=5",
]
BY_CHIPS = {
    8: ["mesh.fsdp=8", "train.num_prompts=16"],
    1: ["train.num_prompts=4"],
}
PROMPTS = [
    "a lighthouse on a cliff at dusk, oil painting",
    "three green bottles on a wooden table",
    "a cat asleep in a bookshop window, morning light",
    'a shop sign that says "OPEN LATE"',
]

# %%
chips = jax.device_count()
assert chips in BY_CHIPS, f"{chips} chips: expected {' or '.join(map(str, BY_CHIPS))}"
settings = [*SETTINGS, *BY_CHIPS[chips], f"run.dir={RUN}"]
print(f"{chips} x {jax.devices()[0].device_kind}")

# %% [markdown]
# ## Train
#
# The first start downloads the weights: 7 GB for SANA and 4 GB for PickScore. The prompts are
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
