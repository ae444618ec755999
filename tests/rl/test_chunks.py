"""From which chunk on a candidate does not depend on it, on a CPU (docs/what-holds.md)."""

import dataclasses

import jax
import numpy as np
import pytest

from solrl_jax.config.presets import resolve
from solrl_jax.rl.experiment import build, fresh_state
from solrl_jax.rl.generate import SeedBatch, generate

LEAST = {"tiny-sana": 1, "tiny-flux": 5, "tiny-sd3": 4, "tiny-wan": 3}  # rows a device
# the verifier's sums round otherwise in other chunks
ROWS = 12
SCORES = 1e-5


@pytest.mark.exhaustive
@pytest.mark.parametrize("phase", ["explore", "regenerate"])
@pytest.mark.parametrize("model", LEAST)
def test_from_this_chunk_on_a_candidate_does_not_depend_on_it(model, phase):
    experiment = build(resolve("tiny", (f"model={model}", "mesh.data=1")))
    old = jax.tree.map(lambda x: x + 0.01, fresh_state(experiment).old)
    explorer = experiment.explorer
    prompts = experiment.train_prompts[:2]
    sampler = (
        explorer.sampler(old, explorer.settings[0])
        if phase == "explore"
        else experiment.sampler(phase, old, 10)
    )
    prompted = experiment.encode_prompts(prompts, experiment.reward)
    rows = SeedBatch.from_seeds(experiment.seeds("candidate", prompts, ROWS // 2))

    def run(chunk):
        return generate(
            experiment.backbone,
            dataclasses.replace(sampler, samples_per_device=chunk),
            prompted,
            rows,
            experiment.reward,
            keep_images=True,
        )

    least = run(LEAST[model])
    most = run(ROWS)
    np.testing.assert_array_equal(least.latents, most.latents)
    np.testing.assert_array_equal(least.images, most.images)
    np.testing.assert_allclose(least.reward, most.reward, atol=SCORES, rtol=0)
    assert np.ptp(most.reward) > 1000 * SCORES
