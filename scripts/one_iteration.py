# %% [markdown]
# # One iteration, in images
#
# This page is a notebook. It follows one iteration of Sol-RL on the embedded pipeline: seeds,
# explored and regenerated candidates, ranks, selection, advantages and the update. It runs in about
# three minutes on two CPU cores. [The method](method.md) states the same steps as equations.

# %%
import matplotlib.pyplot as plt
import numpy as np

import solrl_jax as solrl
from solrl_jax.data.prompts import draw_prompts
from solrl_jax.rl.generate import SeedBatch, generate
from solrl_jax.runs.evaluate import sample_grid

experiment = solrl.load("tiny")
start = solrl.fresh_state(experiment)  # the adapters are zero: the policy is the base model
config = experiment.config
rollout = config.rollout
print(f"{config.train.num_prompts} prompts per iteration")
print(f"{rollout.candidates} candidates per prompt, of which {rollout.kept} are kept")

# %% [markdown]
# ## Prompts and seeds
#
# An iteration draws its prompts and gives every candidate a seed. A candidate *is* its seed: the
# seed alone determines the initial noise, and with the same policy it yields the same image in any
# batch and on any mesh.

# %%
prompts = draw_prompts(experiment.train_prompts, config.seed, 0, config.train.num_prompts)
seeds = experiment.seeds("candidate", prompts, rollout.candidates, iteration=1)
for prompt, candidate_seeds in zip(prompts, seeds, strict=True):
    print(f"{prompt!s:55} first seed {candidate_seeds[0]}")

# %% [markdown]
# We follow one of these prompts. The first helper generates images with a sampler, which combines a
# policy, a schedule and a decoder. The second one plots them.

# %%
FOLLOWED = 2
prompt_batch = experiment.encode_prompts(prompts, experiment.reward)


def sample(sampler, candidates):
    """Generates and scores some candidates of the followed prompt. Returns images and rewards."""
    batch = SeedBatch(np.full(len(candidates), FOLLOWED), seeds[FOLLOWED, candidates])
    samples = generate(
        experiment.backbone, sampler, prompt_batch, batch, experiment.reward, keep_images=True
    )
    return samples.images, samples.reward


def show(images, titles, labels=(), framed=frozenset(), size=0.85):
    """Plots a grid of images with one title each. `framed` holds the positions (row, column)
    that get a frame, and `labels` the names of the rows."""
    height = len(images)
    width = len(images[0])
    figure, axes = plt.subplots(
        height, width, figsize=(width * size, height * (size + 0.22)), squeeze=False
    )
    for (r, c), axis in np.ndenumerate(axes):
        axis.imshow(images[r][c], interpolation="nearest")
        axis.set_title(titles[r][c], fontsize=7, pad=2)
        axis.set(xticks=[], yticks=[])
        for edge in axis.spines.values():
            edge.set(visible=(r, c) in framed, color="#d1495b", linewidth=3)
    for axis, label in zip(axes[:, 0], labels, strict=False):
        axis.set_ylabel(label, fontsize=8)
    figure.tight_layout(pad=0.4)
    plt.show()


# %% [markdown]
# ## Explore in four bits
#
# The old policy's adapters are merged into the base, and weights and activations are quantized to
# NVFP4. Six solver steps turn each seed into an image, and the reward scores it. The figure shows
# all candidates of our prompt, best first. The six best and the six worst, which are framed, are
# kept.

# %%
explorer = experiment.explorer
explore_sampler = explorer.sampler(start.old, explorer.settings[0])
pool = np.arange(rollout.candidates)
explored, proxy = sample(explore_sampler, pool)
order = np.argsort(-proxy, kind="stable")
half = rollout.kept // 2
kept = np.concatenate([order[:half], order[-half:]])

print(prompts[FOLLOWED])
COLUMNS = 12
grid = [order[i : i + COLUMNS] for i in range(0, len(order), COLUMNS)]
frames = {
    (r, c) for r, row in enumerate(grid) for c, candidate in enumerate(row) if candidate in kept
}
show(
    [[explored[i] for i in row] for row in grid],
    [[f"{proxy[i]:.2f}" for i in row] for row in grid],
    framed=frames,
)

# %% [markdown]
# ## Regenerate in BF16
#
# The kept seeds are generated again in BF16 with all ten steps. The policy is trained on these
# images alone. Compare the two rows: the seed determines most of an image; four bits and fewer
# steps change the details.

# %%
full_sampler = experiment.sampler("regenerate", start.old, rollout.num_steps)
regenerated, true = sample(full_sampler, kept)
show(
    [[explored[i] for i in kept], list(regenerated)],
    [[f"{proxy[i]:.2f}" for i in kept], [f"{reward:.2f}" for reward in true]],
    labels=("explored", "regenerated"),
)

# %% [markdown]
# ## Ranks
#
# Selection uses only the ranks of the proxy rewards. Training regenerates the kept candidates
# alone. Here we regenerate the whole pool, which shows the true ranks of the kept candidates.

# %%
_, all_true = sample(full_sampler, pool)
true_rank = np.argsort(np.argsort(-all_true, kind="stable"), kind="stable") + 1
best = kept[:half]
worst = kept[half:]
figure, axis = plt.subplots(figsize=(4.6, 3.6))
for chosen, color, label in (
    (np.setdiff1d(pool, kept), "#9aa5b1", "not kept"),
    (best, "#2a9d8f", "kept as best"),
    (worst, "#d1495b", "kept as worst"),
):
    axis.scatter(proxy[chosen], all_true[chosen], s=18, color=color, label=label)
axis.set(xlabel="proxy reward: NVFP4, 6 steps", ylabel="true reward: BF16, 10 steps")
axis.legend(fontsize=8)
figure.tight_layout()
plt.show()
perfect = (half + 1) / 2
for name, chosen, ideal in (
    ("best", best, perfect),
    ("worst", worst, rollout.candidates + 1 - perfect),
):
    print(f"mean true rank of the six {name}: {true_rank[chosen].mean():.1f} (perfect: {ideal})")

# %% [markdown]
# ## Advantages
#
# The advantage of a kept candidate is its *regenerated* reward minus the mean over the prompt's
# kept candidates, divided by the standard deviation. A candidate with a high proxy reward and a low
# regenerated reward therefore counts as bad. The advantage is then mapped to an optimality
# probability, which weights the sample in the loss. (Training divides by the standard deviation
# over all prompts of the iteration; here it is that of the followed prompt.)

# %%
advantage = np.asarray(
    solrl.advantages(true[None], clip=config.algorithm.adv_clip_max, global_std=True, mode="all")
)
probability = np.asarray(solrl.optimality(advantage, config.algorithm.adv_clip_max))[0]
for candidate, reward, q in zip(kept, true, probability, strict=True):
    rewards = f"proxy {proxy[candidate]:.2f}, regenerated {reward:.2f}"
    print(f"candidate {candidate:2}: {rewards}, optimality {q:.2f}")

# %% [markdown]
# ## Update
#
# `iterate` runs all of these steps for every prompt and updates the adapters once. One update
# changes an image very little; the last row shows the difference, amplified ten times. (`iterate`
# donates the state it is given, so this call gets a fresh one.)

# %%
before, reward_before = sample(full_sampler, kept[:6])
state, outcome = solrl.iterate(experiment, solrl.fresh_state(experiment), 1)
for name in ("loss", "pool/reward", "kept/reward"):
    print(f"{name}: {outcome.metrics[name]:.4f}")
trained_sampler = experiment.sampler("regenerate", state.adapters, rollout.num_steps)
after, reward_after = sample(trained_sampler, kept[:6])
show(
    [list(before), list(after), list(np.clip(0.5 + 10 * (after - before), 0, 1))],
    [[f"{r:.2f}" for r in reward_before], [f"{r:.2f}" for r in reward_after], [""] * 6],
    labels=("before", "after 1", "10 x change"),
    size=1.1,
)

# %% [markdown]
# The remaining iterations visibly change the images, also for prompts that were never trained on:

# %%
for iteration in range(2, config.train.iterations + 1):
    state, outcome = solrl.iterate(experiment, state, iteration)
first = sample_grid(experiment, start.ema)
last = sample_grid(experiment, state.ema)
for grid, when in ((first, "before"), (last, f"after {iteration}")):
    print(f"correct {when}: {grid.accepted.sum()} of {grid.accepted.size} held-out images")
for prompt, *pair in zip(
    first.prompts, first.images, last.images, first.accepted, last.accepted, strict=True
):
    print(prompt)
    show(
        pair[:2],
        [["correct" if mark else "wrong" for mark in marks] for marks in pair[2:]],
        ("before", f"after {iteration}"),
    )

# %% [markdown]
# Four prompts are a small sample. `solrl train tiny` evaluates 260 held-out images and reports
# standard errors. [The tutorial](tutorial.md) starts there.
