"""Random numbers by address: what a candidate's seed depends on, and values that must never
change.
"""

import hashlib

import jax
import numpy as np
import pytest

from solrl_jax.diffusion.seeds import (
    STREAMS,
    candidate_seeds,
    normal,
    permutations,
    prompt_uid,
    run_key,
    seed_numbers,
    stream,
)

SHAPE = (4, 4, 2)
UIDS = np.array([11, 2**31 + 5, 7], np.uint32)


def seeds(run=0, iteration=0, uids=UIDS, candidates=5, name="candidate"):
    indices = np.arange(candidates) if isinstance(candidates, int) else np.array(candidates)
    return np.asarray(
        candidate_seeds(
            np.int32(run), name, np.int32(iteration), np.asarray(uids, np.uint32), indices
        )
    )


def initial_noise(seeds, shape):
    return normal(seeds, "initial", shape)


def test_golden_values():
    """Runs on disk were made with these values: if they change, every ledger is wrong."""
    uids = [prompt_uid("a red circle"), prompt_uid("a blue square")]
    assert uids == [2158159009, 3970364994]
    golden = seeds(42, 3, uids, 2)
    assert golden.dtype == np.uint32
    assert golden.tolist() == [
        [[53545574, 3790302349], [332310845, 1907559035]],
        [[1357966350, 2137158436], [2542191301, 4291653407]],
    ]
    assert seed_numbers(golden)[0].tolist() == [229976492965850253, 1427264213288684155]
    noise = [
        [[0.9388786, -0.7224079], [1.0302312, 0.8728200]],
        [[-1.2858132, 1.0829600], [-0.1009741, -1.0244855]],
    ]
    np.testing.assert_allclose(initial_noise(golden[0], (2, 2)), noise, atol=1e-6)


def test_a_seed_depends_on_each_part_of_its_address():
    base = seeds()
    variants = [
        base,
        seeds(run=1),
        seeds(iteration=1),
        seeds(uids=UIDS + 1),
        seeds(candidates=range(5, 10)),
    ]
    variants += [seeds(run=2**31 - 1), seeds(iteration=1000)]
    words = np.concatenate([v.reshape(-1, 2) for v in variants])
    assert len(np.unique(seed_numbers(words))) == len(
        words
    )  # all prompts, candidates and variants differ
    assert len(np.unique(words[:, 0])) == len(np.unique(words[:, 1])) == len(words)  # in both words


def test_run_seed_and_iteration_do_not_stand_for_each_other():
    words = np.concatenate(
        [seeds(run, iteration).reshape(-1, 2) for run in range(6) for iteration in range(6)]
    )
    assert len(np.unique(seed_numbers(words))) == 36 * 15


def test_a_seed_depends_on_nothing_but_its_address():
    whole = seeds(3, 4)
    np.testing.assert_array_equal(seeds(3, 4, candidates=3), whole[:, :3])
    np.testing.assert_array_equal(seeds(3, 4, candidates=[4, 0, 2]), whole[:, [4, 0, 2]])
    np.testing.assert_array_equal(seeds(3, 4, UIDS[[2, 0]]), whole[[2, 0]])
    np.testing.assert_array_equal(seeds(3, 4, UIDS[1:2], [3]), whole[1:2, 3:4])
    np.testing.assert_array_equal(seeds(3, 4, np.tile(UIDS, 2)), np.concatenate([whole, whole]))


def test_initial_noise_is_the_same_alone_in_any_batch_and_in_any_order():
    rows = seeds().reshape(-1, 2)
    together = np.asarray(initial_noise(rows, SHAPE))
    compiled = jax.jit(initial_noise, static_argnums=1)
    assert together.dtype == np.float32
    for i in (0, 7, 14):
        np.testing.assert_array_equal(initial_noise(rows[i : i + 1], SHAPE)[0], together[i])
    order = np.random.default_rng(0).permutation(len(rows))
    np.testing.assert_array_equal(initial_noise(rows[order], SHAPE), together[order])
    np.testing.assert_array_equal(compiled(rows, SHAPE), together)
    np.testing.assert_array_equal(compiled(rows[3:5], SHAPE), together[3:5])


def test_initial_noise_is_standard_normal_and_no_two_rows_are_alike():
    noise = np.asarray(initial_noise(seeds(candidates=8).reshape(-1, 2), (16, 16, 4))).reshape(
        24, -1
    )
    assert noise.mean() == pytest.approx(0, abs=0.03)  # 24,576 numbers: 0.0064 is one sigma
    assert noise.std() == pytest.approx(1, abs=0.02)
    assert np.abs(np.corrcoef(noise) - np.eye(24)).max() < 0.2


def test_streams_are_distinct():
    assert len(set(STREAMS.values())) == len(STREAMS)
    old = {
        "candidate": 0,
        "initial": 1,
        "solver": 2,
        "sigmas": 3,
        "training": 4,
        "calibration": 5,
    }  # of runs on disk
    new = {
        "evaluation": 6,
        "ranking": 7,
        "calibration seeds": 8,
        "adapters": 9,
        "sizes": 10,
        "reference": 11,
        "query": 12,
    }
    assert {**old, **new} == STREAMS
    root = jax.random.wrap_key_data(seeds()[0, 0])
    draws = np.stack(
        [jax.random.normal(stream(root, name), (512,)) for name in STREAMS]
        + [jax.random.normal(root, (512,))]
    )
    assert np.abs(np.corrcoef(draws) - np.eye(len(STREAMS) + 1)).max() < 0.2
    with pytest.raises(KeyError, match="other"):
        stream(root, "other")


@pytest.mark.slow
def test_each_use_has_seeds_of_its_own():
    """Candidates of training, evaluation, ranking and calibration share no seed, and no seed is the
    key of the adapters.
    """
    uses = [
        name
        for name in STREAMS
        if name in ("candidate", "evaluation", "ranking", "calibration seeds")
    ]
    words = [seeds(name=name).reshape(-1, 2) for name in uses]
    words += [
        np.asarray(jax.random.key_data(run_key(0, name)))[None] for name in (*uses, "adapters")
    ]
    assert len(np.unique(seed_numbers(np.concatenate(words)))) == 4 * 15 + 5


def test_every_draw_has_the_bits_that_runs_on_disk_were_made_with():
    """Written out with `jax.random` alone: the stream's number is folded into the seed, then the
    number of the draw.
    """
    rows = seeds().reshape(-1, 2)[:3]
    fold = np.array([0, 5, 2])
    for name, folds in (
        ("initial", [None] * 3),
        ("solver", [4] * 3),
        ("training", fold),
        ("calibration", fold),
    ):
        roots = [jax.random.fold_in(jax.random.wrap_key_data(seed), STREAMS[name]) for seed in rows]
        keys = [
            root if number is None else jax.random.fold_in(root, number)
            for root, number in zip(roots, folds, strict=True)
        ]
        want = np.stack([jax.random.normal(k, SHAPE) for k in keys])
        numbers = {"initial": None, "solver": 4}.get(name, folds)
        np.testing.assert_array_equal(normal(rows, name, SHAPE, numbers), want)
        np.testing.assert_array_equal(
            jax.jit(normal, static_argnums=(1, 2))(rows, name, SHAPE, numbers), want
        )
        assert len(np.unique(want)) == want.size
    orders = [
        jax.random.permutation(stream(jax.random.wrap_key_data(seed), "sigmas"), 10)
        for seed in rows
    ]
    np.testing.assert_array_equal(permutations(rows, "sigmas", 10), np.stack(orders))
    np.testing.assert_array_equal(
        jax.random.key_data(run_key(7, "adapters")),
        jax.random.key_data(stream(jax.random.key(7), "adapters")),
    )


def test_seed_numbers_can_be_read_back():
    words = np.concatenate(
        [seeds().reshape(-1, 2), np.array([[0, 0], [0, 1], [1, 0], [2**32 - 1] * 2], np.uint32)]
    )
    numbers = seed_numbers(words)
    assert numbers.dtype == np.uint64
    np.testing.assert_array_equal(
        np.stack([numbers >> np.uint64(32), numbers & np.uint64(2**32 - 1)], -1), words
    )
    assert numbers[-4:].tolist() == [0, 1, 2**32, 2**64 - 1]
    assert seed_numbers(seeds()).shape == (3, 5)


def test_a_prompts_uid_is_of_its_text_alone():
    for text in ("a cat", "a Cat", "a cat ", "", "ein Kätzchen"):
        assert prompt_uid(text) == int.from_bytes(
            hashlib.sha256(text.encode()).digest()[:4], "little"
        )
        assert 0 <= prompt_uid(text) < 2**32
    assert len({prompt_uid(t) for t in ("a cat", "a Cat", "a cat ", "")}) == 4
