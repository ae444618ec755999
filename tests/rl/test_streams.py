"""Every use of random numbers has a stream of its own: what one draws, no other draws again."""

import itertools

import jax
import numpy as np
import pytest

from solrl_jax.diffusion.seeds import run_key, seed_numbers
from solrl_jax.rl import iteration as iterations
from solrl_jax.rl import rank
from solrl_jax.rl.experiment import fresh_state
from solrl_jax.rl.explore.setting import ExplorationSetting
from solrl_jax.rl.iteration import iterate
from solrl_jax.rl.trainable.trainable import init_adapters
from solrl_jax.runs import evaluate as evaluation
from solrl_jax.runs.evaluate import evaluate, sample_grid
from tests.toys import toy_experiment, toy_seeds

SEED = 3


@pytest.fixture(scope="module")
def toy():
    return toy_experiment(f"seed={SEED}", f"eval.seed={SEED}")


@pytest.fixture
def drawn(monkeypatch):
    """The seeds of every rollout, in order."""
    seeds = []
    for module in (evaluation, iterations, rank):
        original = module.generate

        def spy(*a, original=original, **k):
            return seeds.append(np.asarray(a[3].seeds)) or original(*a, **k)

        monkeypatch.setattr(module, "generate", spy)
    return seeds


def numbers(seeds):
    return set(seed_numbers(np.asarray(seeds).reshape(-1, 2)).tolist())


@pytest.mark.slow
def test_candidates_are_drawn_by_iteration_and_regenerated_from_the_same_seeds(toy, drawn):
    for iteration in (1, 2):
        _, outcome = iterate(toy, fresh_state(toy), iteration)
        explored, regenerated = drawn[-2:]
        prompts = outcome.ledger["prompt"][::8]
        np.testing.assert_array_equal(
            explored, toy_seeds(prompts, 8, SEED, iteration=iteration).reshape(-1, 2)
        )
        np.testing.assert_array_equal(regenerated, explored[outcome.ledger["kept"]])
    assert not numbers(drawn[0]) & numbers(drawn[2])


def test_an_evaluation_and_its_picture_draw_from_their_own_seed_and_stream(toy, drawn):
    adapters = fresh_state(toy).ema
    evaluate(toy, adapters)
    np.testing.assert_array_equal(
        drawn[-1], toy_seeds(toy.test_prompts[:2], 2, SEED, "evaluation", 0).reshape(-1, 2)
    )
    sample_grid(toy, adapters)
    np.testing.assert_array_equal(
        drawn[-1], toy_seeds(toy.test_prompts[:1], 4, SEED, "evaluation", 0).reshape(-1, 2)
    )
    assert numbers(drawn[-1][:2]) < numbers(
        drawn[-2]
    )  # the first pictures of a prompt are those that are scored
    other = toy_experiment("seed=77", f"eval.seed={SEED}")  # the run's seed has no say
    evaluate(other, fresh_state(other).ema)
    np.testing.assert_array_equal(drawn[-1], drawn[0])


@pytest.mark.slow
def test_a_ranking_draws_from_its_own_stream(toy, drawn):
    settings = [ExplorationSetting("nvfp4", 2), ExplorationSetting("nvfp4", 3)]
    rank.explore_and_regenerate(toy, fresh_state(toy).ema, 2, settings, iterations.no_progress)
    candidates = toy.config.rollout.candidates
    want = toy_seeds(toy.test_prompts[:2], candidates, SEED, "ranking", 0).reshape(-1, 2)
    assert len(drawn) == 3
    for seeds in drawn:  # explored and regenerated from the same
        np.testing.assert_array_equal(seeds, want)


def test_a_calibration_draws_from_its_own_stream(toy):
    rows = toy.explorer.calibration.seed_batch
    prompts = toy.train_prompts[:16]
    np.testing.assert_array_equal(
        rows.seeds, toy_seeds(prompts, 1, SEED, "calibration seeds", 0)[:, 0]
    )
    assert rows.prompt.tolist() == list(range(16))


def test_adapters_start_from_their_own_stream(toy):
    lora = toy.config.lora
    base = toy.backbone.transformer
    want = init_adapters(
        run_key(SEED, "adapters"), base, list(toy.trained_paths.adapted), lora.rank
    )
    state = fresh_state(toy)
    for adapters in (state.adapters, state.old, state.ema):
        jax.tree.map(np.testing.assert_array_equal, adapters, want)
    plain = init_adapters(jax.random.key(SEED), base, list(toy.trained_paths.adapted), lora.rank)
    assert all(np.abs(plain[path]["a"] - want[path]["a"]).max() > 0.1 for path in want)


def test_no_two_uses_have_a_seed_in_common(toy):
    """For the same run, prompts and candidates; iterations count from 1, and what is of no
    iteration has 0.
    """
    prompts = toy.test_prompts
    uses = {}
    for stream in ("candidate", "evaluation", "ranking", "calibration seeds"):
        for iteration in (0, 1):
            uses[stream, iteration] = numbers(toy_seeds(prompts, 12, SEED, stream, iteration))
    assert all(len(seeds) == 12 * len(prompts) for seeds in uses.values())
    assert not [pair for pair in itertools.combinations(uses, 2) if uses[pair[0]] & uses[pair[1]]]
