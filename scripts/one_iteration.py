# %% [markdown]
# # One iteration, in pictures
#
# This page is a notebook. It walks through one iteration of Sol-RL on the pipeline that comes with the package: seeds,
# candidates as they are explored and as they are regenerated, ranks, what is kept, and what the update does to a picture.
# It takes about three minutes on two CPU cores. [The method](method.md) has the same steps as equations.

# %%
import matplotlib.pyplot as plt
import numpy as np

import solrl_jax as solrl
from solrl_jax.data.prompts import draw_prompts
from solrl_jax.rl.generate import SeedBatch, generate
from solrl_jax.runs.evaluate import sample_grid

experiment = solrl.load("tiny")
start = solrl.fresh_state(experiment)  # adapters that change nothing yet
config = experiment.config
rollout = experiment.config.rollout
print(
    f"{config.train.num_prompts} prompts an iteration, {rollout.candidates} candidates each, {rollout.kept} of them kept"
)

# %% [markdown]
# ## Prompts and seeds
#
# An iteration draws its prompts. Then every candidate gets a seed, and a candidate *is* its seed: the same seed gives the same
# noise, and with the same policy the same picture, on any machine and in any batch.

# %%
prompts = draw_prompts(experiment.train_prompts, config.seed, 0, config.train.num_prompts)
seeds = experiment.seeds("candidate", prompts, rollout.candidates, iteration=1)
for prompt, row in zip(prompts, seeds, strict=True):
    print(f"{prompt!s:55} first seed {row[0]}")

# %% [markdown]
# We follow one of these prompts. The helpers below make pictures with a stage, which is a policy with a grid of steps, and show
# them.

# %%
FOLLOWED = 2
prompted = experiment.encode_prompts(prompts, experiment.reward)


def pictures(stage, candidates):
    """Pictures and rewards of some candidates of the prompt that we follow."""
    rows = SeedBatch(np.full(len(candidates), FOLLOWED), seeds[FOLLOWED, candidates])
    made = generate(experiment.backbone, stage, prompted, rows, experiment.reward, keep_images=True)
    return made.images, made.reward


def show(rows, titles, labels=(), framed=frozenset(), size=0.85):
    """SeedBatch of pictures, with a title each. framed: positions that get a frame."""
    high = len(rows)
    wide = len(rows[0])
    figure, axes = plt.subplots(
        high, wide, figsize=(wide * size, high * (size + 0.22)), squeeze=False
    )
    for (r, c), axis in np.ndenumerate(axes):
        axis.imshow(rows[r][c], interpolation="nearest")
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
# The policy is merged with its adapters and quantised to NVFP4: weights and activations. Six steps take each seed to a
# picture, and the reward scores it. Here is the whole pool of our prompt, best first. The framed pictures are what is kept: the
# best six and the worst six.

# %%
explorer = experiment.explorer
exploring = explorer.sampler(start.old, explorer.settings[0])
everyone = np.arange(rollout.candidates)
explored, proxy = pictures(exploring, everyone)
order = np.argsort(-proxy, kind="stable")
half = rollout.kept // 2
kept = np.concatenate([order[:half], order[-half:]])

print(prompts[FOLLOWED])
WIDE = 12
grid = [order[i : i + WIDE] for i in range(0, len(order), WIDE)]
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
# The kept seeds are sampled again, in BF16 and with all ten steps. Only these pictures are trained on. Compare the two rows:
# the seed decides most of a picture, and four bits and fewer steps change the rest.

# %%
regenerating = experiment.sampler("regenerate", start.old, rollout.num_steps)
regenerated, true = pictures(regenerating, kept)
show(
    [[explored[i] for i in kept], list(regenerated)],
    [[f"{proxy[i]:.2f}" for i in kept], [f"{reward:.2f}" for reward in true]],
    labels=("explored", "regenerated"),
)

# %% [markdown]
# ## Ranks
#
# Selection needs ranks, and nothing else of the proxy. In training only the kept candidates are regenerated. Here we can afford
# all of them, and ask where the kept ones truly stand.

# %%
_, all_true = pictures(regenerating, everyone)
true_rank = np.argsort(np.argsort(-all_true, kind="stable"), kind="stable") + 1
best = kept[:half]
worst = kept[half:]
figure, axis = plt.subplots(figsize=(4.6, 3.6))
for chosen, colour, label in (
    (np.setdiff1d(everyone, kept), "#9aa5b1", "left out"),
    (best, "#2a9d8f", "kept as best"),
    (worst, "#d1495b", "kept as worst"),
):
    axis.scatter(proxy[chosen], all_true[chosen], s=18, color=colour, label=label)
axis.set(xlabel="proxy reward: NVFP4, 6 steps", ylabel="true reward: BF16, 10 steps")
axis.legend(fontsize=8)
figure.tight_layout()
plt.show()
perfect = (half + 1) / 2
print(f"mean true rank of the best six:  {true_rank[best].mean():.1f}  (perfect: {perfect})")
print(
    f"mean true rank of the worst six: {true_rank[worst].mean():.1f} (perfect: {rollout.candidates + 1 - perfect})"
)

# %% [markdown]
# ## Advantages
#
# A kept picture is compared with the mean of its prompt's kept pictures, by its *regenerated* reward. What explored well and
# regenerated badly counts as bad. An advantage becomes the probability that a sample is one to imitate. (In training, rewards
# are divided by the deviation over all prompts of the iteration; here by that of the prompt we follow.)

# %%
advantage = np.asarray(
    solrl.advantages(true[None], clip=config.algorithm.adv_clip_max, global_std=True, mode="all")
)
probability = np.asarray(solrl.optimality(advantage, config.algorithm.adv_clip_max))[0]
for candidate, reward, q in zip(kept, true, probability, strict=True):
    print(
        f"candidate {candidate:2}: proxy {proxy[candidate]:.2f}, regenerated {reward:.2f}, imitate with {q:.2f}"
    )

# %% [markdown]
# ## Update
#
# `iterate` does all of this for every prompt, and updates the adapters once. One update changes a picture very little: the last
# row has the difference, ten times as strong. (`iterate` uses up the state that it is given, so it gets one of its own here.)

# %%
before, reward_before = pictures(regenerating, kept[:6])
state, outcome = solrl.iterate(experiment, solrl.fresh_state(experiment), 1)
print(
    {
        name: round(value, 4)
        for name, value in outcome.metrics.items()
        if name in ("loss", "pool/reward", "kept/reward")
    }
)
after, reward_after = pictures(
    experiment.sampler("regenerate", state.adapters, rollout.num_steps), kept[:6]
)
show(
    [list(before), list(after), list(np.clip(0.5 + 10 * (after - before), 0, 1))],
    [[f"{r:.2f}" for r in reward_before], [f"{r:.2f}" for r in reward_after], [""] * 6],
    labels=("before", "after 1", "10 x change"),
    size=1.1,
)

# %% [markdown]
# The other iterations change what the policy draws, also for prompts that it was never trained on:

# %%
for iteration in range(2, config.train.iterations + 1):
    state, outcome = solrl.iterate(experiment, state, iteration)
first = sample_grid(experiment, start.ema)
last = sample_grid(experiment, state.ema)
for grid, when in ((first, "before"), (last, f"after {iteration}")):
    print(
        f"right, by the verifier: {grid.right.sum()} of {grid.right.size} held-out pictures {when}"
    )
for prompt, *pair in zip(
    first.prompts, first.images, last.images, first.right, last.right, strict=True
):
    print(prompt)
    show(
        pair[:2],
        [["right" if mark else "wrong" for mark in marks] for marks in pair[2:]],
        ("before", f"after {iteration}"),
    )

# %% [markdown]
# Four prompts are few. `solrl train tiny` measures all 260 held-out pictures, with standard errors, and its report shows them.
# [The tutorial](tutorial.md) starts there.
