"""SeedBatch to samples: a row does not depend on its chunk, its batch mates or the mesh, and
follows its own prompt and seed.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from solrl_jax.data.prompts import Prompt
from solrl_jax.diffusion.seeds import normal
from solrl_jax.parallel import sharding
from solrl_jax.rewards.mixture import mixture
from solrl_jax.rewards.protocol import Reward
from solrl_jax.rl import generate as rollouts
from solrl_jax.rl.generate import (
    Samples,
    SeedBatch,
    decode_chunk,
    draw_noise,
    generate,
    prepare,
    sample_chunk,
)
from solrl_jax.rl.sampler import Segment
from tests.cases import first_is_quick
from tests.toys import (
    SHAPE,
    ToyDecoder,
    toy_backbone,
    toy_grid,
    toy_reward,
    toy_sampler,
    toy_seeds,
)

TOLERANCE = 1e-5
PROMPTS = tuple(map(Prompt, ("a red circle", "two blue squares", "nothing")))
EACH = 4  # samples of each prompt: twelve rows
MESHES = {"one": (1, 1), "data=2 fsdp=2": (2, 2), "data=2 tensor=2": (2, 1, 2)}


@pytest.fixture(scope="module")
def backbones():
    return {name: toy_backbone(*mesh) for name, mesh in MESHES.items()}


@pytest.fixture
def backbone(backbones):
    return backbones["one"]


def run(backbone, chunk=4, rows=None, reward=None, segments=(), prompts=PROMPTS, **options):
    prompted = prepare(backbone, reward, prompts, 8)
    rows = SeedBatch.from_seeds(toy_seeds(prompts, EACH)) if rows is None else rows
    return generate(
        backbone, toy_sampler(backbone, chunk, *segments), prompted, rows, reward, **options
    )


def largest(x):
    return float(np.abs(np.asarray(x)).max())


def test_rows_are_candidates_prompt_by_prompt():
    seeds = toy_seeds(PROMPTS, EACH)
    rows = SeedBatch.from_seeds(seeds)
    assert len(rows) == 12
    assert rows.prompt.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    np.testing.assert_array_equal(rows.seeds[4:8], seeds[1])
    assert rows.noise is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "chunk"),
    [
        ("data=2 tensor=2", 5),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in [("data=2 fsdp=2", 5), *(("one", n) for n in (1, 3, 5, 7, 12, 100))]
        ),
    ],
)
def test_a_chunk_is_an_upper_limit_that_need_not_divide_the_rows(backbones, mesh, chunk):
    """Twelve rows in chunks that are filled up, against chunks of four on one device."""
    reward = toy_reward()
    counted = []
    want = run(backbones["one"], 4, reward=reward, keep_images=True)
    got = run(backbones[mesh], chunk, reward=reward, keep_images=True, progress=counted.append)
    assert got.latents.shape == (12, *SHAPE)
    assert got.latents.dtype == np.float32
    np.testing.assert_allclose(got.latents, want.latents, atol=TOLERANCE)
    np.testing.assert_allclose(got.images, want.images, atol=TOLERANCE)
    assert got.scores.keys() == want.scores.keys() == {"reward", "mean"}
    for name, scores in want.scores.items():
        np.testing.assert_allclose(got.scores[name], scores, atol=TOLERANCE)
        assert np.ptp(scores) > 1e3 * TOLERANCE
    assert sum(counted) == 12
    assert all(0 < count <= chunk * backbones[mesh].mesh.size for count in counted)
    assert (
        min(largest(want.latents[i] - want.latents[j]) for i in range(12) for j in range(i))
        > 1e3 * TOLERANCE
    )


@pytest.mark.slow
@pytest.mark.parametrize("mesh", first_is_quick(MESHES))
def test_every_chunk_runs_the_same_program(backbones, mesh):
    """However many rows there are (one, some that a chunk takes, or more), and whether images are
    kept.
    """
    backbone = backbones[mesh]
    seeds = toy_seeds(PROMPTS, 40).reshape(-1, 2)
    programs = (sample_chunk, decode_chunk, draw_noise, rollouts.score_images)
    counts = []
    reward = toy_reward()
    prompted = prepare(backbone, None, PROMPTS, 8)
    prompted = dataclasses.replace(prompted, prepared=reward.prepare(PROMPTS))
    sampler = toy_sampler(backbone, 3)
    for count, keep_images in ((12, False), (1, True), (5, False), (40, False)):
        rows = SeedBatch(np.arange(count) % 3, seeds[:count])
        generate(backbone, sampler, prompted, rows, reward, keep_images=keep_images)
        counts.append([program._cache_size() for program in programs])
    assert counts == counts[:1] * 4


def test_a_sample_is_the_same_alone_in_company_and_in_any_order(backbone):
    everyone = run(backbone, reward=toy_reward())
    seeds = toy_seeds(PROMPTS, EACH).reshape(-1, 2)
    for rows in ([7], [11, 0, 7], [5, 5, 5, 5, 5]):
        prompt = np.array(rows) // EACH
        reward = toy_reward()
        got = run(backbone, rows=SeedBatch(prompt, seeds[rows]), reward=reward)
        np.testing.assert_allclose(got.latents, everyone.latents[rows], atol=TOLERANCE)
        np.testing.assert_allclose(got.reward, everyone.reward[rows], atol=TOLERANCE)


def test_a_row_follows_its_own_prompt_and_is_scored_against_it(backbone):
    seed = toy_seeds(PROMPTS, 1)[:1, 0].repeat(3, 0)
    reward = toy_reward()
    got = run(backbone, rows=SeedBatch(np.arange(3), seed), reward=reward)
    assert (
        min(largest(got.latents[i] - got.latents[j]) for i in range(3) for j in range(i))
        > 1e3 * TOLERANCE
    )
    np.testing.assert_allclose(
        got.reward,
        1 - np.abs(got.scores["mean"] - reward.prepare(PROMPTS)),
        atol=TOLERANCE,
    )
    turned = run(
        backbone,
        rows=SeedBatch(np.array([1, 2, 0]), seed),
        reward=reward,
        prompts=(PROMPTS[2], *PROMPTS[:2]),
    )
    np.testing.assert_allclose(turned.latents, got.latents, atol=TOLERANCE)
    np.testing.assert_allclose(turned.reward, got.reward, atol=TOLERANCE)


@pytest.mark.slow
def test_given_noise_takes_the_place_of_what_the_seeds_stand_for(backbone):
    rows = SeedBatch.from_seeds(toy_seeds(PROMPTS, EACH))
    seed_latents = run(backbone).latents
    noise = np.asarray(normal(rows.seeds, "initial", SHAPE))
    np.testing.assert_allclose(
        run(backbone, 5, dataclasses.replace(rows, noise=noise)).latents,
        seed_latents,
        atol=TOLERANCE,
    )
    other = run(backbone, 5, dataclasses.replace(rows, noise=noise[::-1].copy())).latents
    assert largest(other - seed_latents) > 0.1
    # the noise that a solver adds is still the seeds'
    segment = Segment(backbone.transformer, toy_grid(solver="ddim"))
    stochastic = [
        run(backbone, 5, SeedBatch(rows.prompt, seeds, noise), segments=(segment,)).latents
        for seeds in (rows.seeds, rows.seeds[::-1])
    ]
    assert largest(stochastic[0] - stochastic[1]) > 0.1


def test_nothing_is_decoded_or_scored_that_nobody_asks_for(backbone, monkeypatch):
    calls = []
    monkeypatch.setattr(
        ToyDecoder,
        "__call__",
        lambda self, latents, first_frame: calls.append(1) or jnp.zeros((len(latents), 8, 8, 3)),
    )
    jax.clear_caches()
    got = run(backbone)
    assert (got.scores, got.images, got.failed, calls) == ({}, None, {}, [])
    got = run(backbone, keep_images=True)
    assert (got.scores, got.images.shape, calls) == ({}, (12, 8, 8, 3), [1])
    assert run(backbone, reward=toy_reward()).images is None
    jax.clear_caches()  # of what the false decoder was traced into


def largest_latent():
    def score(params, latents, prepared):
        return {"reward": jnp.abs(latents).max((1, 2, 3)) - prepared}

    return Reward(None, toy_reward().prepare, score, inputs="latents")


@pytest.mark.slow
def test_a_reward_on_latents_decodes_nothing(backbone, monkeypatch):
    monkeypatch.setattr(rollouts, "decode_chunk", lambda *_: pytest.fail("decoded"))
    reward = largest_latent()
    got = run(backbone, 5, reward=reward)
    prepared = np.repeat(reward.prepare(PROMPTS), EACH)
    np.testing.assert_allclose(
        got.reward, np.abs(got.latents).max((1, 2, 3)) - prepared, atol=TOLERANCE
    )
    assert np.ptp(got.reward) > 1e3 * TOLERANCE


def test_rewards_on_latents_and_on_pictures_add_up(backbone):
    parts = {"mean": toy_reward(), "largest": largest_latent()}
    both = run(backbone, 5, reward=mixture({"mean": 1.0, "largest": 0.5}, parts, None))
    alone = {name: run(backbone, 5, reward=part).reward for name, part in parts.items()}
    np.testing.assert_allclose(both.reward, alone["mean"] + 0.5 * alone["largest"], atol=TOLERANCE)
    np.testing.assert_allclose(both.scores["largest"], alone["largest"], atol=TOLERANCE)


def test_a_reward_may_have_the_name_of_an_array_of_the_samples(backbone):
    parts = {"images": toy_reward(), "latents": largest_latent()}
    mixed = run(backbone, 5, reward=mixture({"images": 1.0, "latents": 0.5}, parts, None))
    alone = run(backbone, 5, reward=parts["latents"])
    np.testing.assert_array_equal(mixed.latents, alone.latents)
    np.testing.assert_allclose(mixed.scores["latents"], alone.reward, atol=TOLERANCE)


def test_the_next_chunk_is_dispatched_before_the_last_one_is_waited_for(backbone, monkeypatch):
    """So a device never waits for the host: it has the next chunk's steps while scores of the one
    before are fetched.
    """
    order = []
    for module, name in (
        (rollouts, "sample_chunk"),
        (rollouts, "score_images"),
        (rollouts.hosts, "fetch"),
    ):
        called = getattr(module, name)
        monkeypatch.setattr(
            module,
            name,
            lambda *args, called=called, name=name: (order.append(name), called(*args))[1],
        )
    run(backbone, 4, reward=toy_reward())
    assert order == [
        "sample_chunk",
        "score_images",
        *["sample_chunk", "score_images", "fetch"] * 2,
        "fetch",
    ]


def test_pictures_are_what_the_decoder_of_the_sampler_shows(backbone):
    got = run(backbone, keep_images=True)
    np.testing.assert_allclose(
        got.images, backbone.decoder(jnp.asarray(got.latents)), atol=TOLERANCE
    )
    other = dataclasses.replace(backbone.decoder, params=jnp.float32(-0.7))
    prompted = prepare(backbone, None, PROMPTS, 8)
    rows = SeedBatch.from_seeds(toy_seeds(PROMPTS, EACH))
    sampler = dataclasses.replace(toy_sampler(backbone, 4), decoder=other)
    pictures = generate(backbone, sampler, prompted, rows, keep_images=True)
    np.testing.assert_array_equal(pictures.latents, got.latents)
    np.testing.assert_allclose(pictures.images, 1 - got.images, atol=TOLERANCE)


def by_hand(backbone, segments, noise, positive, negative):
    """Euler steps, one row after another."""
    out = []
    for x, text in zip(noise, positive, strict=True):
        x = jnp.asarray(x)[None]
        for segment in segments:
            grid = segment.schedule
            for sigma, after, time in zip(
                grid.sigmas, [*grid.sigmas[1:], None], grid.timesteps, strict=True
            ):
                v, away = (
                    backbone.velocity(
                        segment.policy,
                        x,
                        {"text": jnp.asarray(t)[None]},
                        jnp.float32(time),
                        jnp.asarray(grid.embedded_guidance),
                    )
                    for t in (text, negative)
                )
                v = away + grid.guidance_scale * (v - away) if grid.guided else v
                x = x + ((after if after is not None else segment.end) - sigma) * v
        out.append(x[0])
    return np.stack(out)


@dataclasses.dataclass(frozen=True)
class Part(Segment):
    end: float  # sigma where it stops


@pytest.mark.parametrize(("guidance", "scale"), [(1.0, 1.0), (0.5, 1.0), (1.0, 3.0), (0.5, 3.0)])
@pytest.mark.parametrize("cut", first_is_quick([None, 1, 2]))
def test_samples_are_the_loop_over_legs_with_and_without_guidance(backbone, guidance, scale, cut):
    grid = toy_grid(3, guidance=guidance, scale=scale)
    other = toy_backbone(seed=1).transformer
    parts = (
        [(backbone.transformer, grid)]
        if cut is None
        else [(backbone.transformer, grid.slice_steps(0, cut)), (other, grid.slice_steps(cut))]
    )
    ends = [float(part.sigmas[0]) for _, part in parts[1:]] + [0.0]
    rows = SeedBatch.from_seeds(toy_seeds(PROMPTS, EACH))
    prompted = prepare(backbone, None, PROMPTS, 8)
    got = run(backbone, 5, segments=tuple(Segment(*part) for part in parts)).latents
    texts = np.asarray(prompted.conditions.cond["text"])[rows.prompt]
    segments = [Part(*part, end) for part, end in zip(parts, ends, strict=True)]
    noise = normal(rows.seeds, "initial", SHAPE)
    want = by_hand(
        backbone,
        segments,
        noise,
        texts,
        np.asarray(prompted.conditions.uncond["text"])[0],
    )
    np.testing.assert_allclose(got, want, atol=TOLERANCE)
    if scale != 1.0 or cut is not None or guidance != 1.0:
        assert largest(want - run(backbone, 5).latents) > 1e3 * TOLERANCE


def test_samples_of_some_rows_keep_their_scores_and_leave_their_pictures():
    latents = np.arange(6.0, dtype=np.float32).reshape(6, 1, 1, 1)
    scores = {"reward": np.arange(6.0), "other": -np.arange(6.0)}
    samples = Samples(latents, scores, np.zeros((6, 2, 2, 3), np.float32))
    some = samples.take(np.array([[5, 1], [2, 2]]))
    assert some.latents.ravel().tolist() == some.reward.tolist() == [5, 1, 2, 2]
    assert some.scores["other"].tolist() == [-5, -1, -2, -2]
    assert some.images is None


@pytest.mark.parametrize("mesh", first_is_quick(reversed(MESHES)))
def test_noise_is_split_over_the_devices_and_is_that_of_the_seeds(backbones, mesh):
    seeds = toy_seeds(PROMPTS, EACH).reshape(-1, 2)
    where = backbones[mesh].mesh
    with jax.set_mesh(where):
        noise = draw_noise(jax.device_put(seeds, sharding.rows(where)), SHAPE)
    assert noise.addressable_shards[0].data.shape[0] == 12 // sharding.row_groups(where)
    np.testing.assert_array_equal(noise, normal(seeds, "initial", SHAPE))


@pytest.mark.parametrize(
    ("mesh", "chunk"),
    first_is_quick([("one", 4), ("one", 5), *((name, 5) for name in [*MESHES][1:])]),
)
def test_states_are_recorded_if_the_sampler_asks(backbones, mesh, chunk):
    """Row by row, whatever the chunk and the mesh; the last leads to the sample by a step without
    noise.
    """
    backbone = backbones[mesh]
    rows = SeedBatch.from_seeds(toy_seeds(PROMPTS, EACH))
    sampler = toy_sampler(
        backbone, chunk, Segment(backbone.transformer, toy_grid(3, solver="flow_sde"))
    )
    prompted = prepare(backbone, None, PROMPTS, 8)
    got = generate(backbone, dataclasses.replace(sampler, recorded=2), prompted, rows)
    assert got.states.shape == (12, 3, *SHAPE)
    np.testing.assert_array_equal(got.states[:, 0], normal(rows.seeds, "initial", SHAPE))
    np.testing.assert_allclose(
        got.latents, generate(backbone, sampler, prompted, rows).latents, atol=TOLERANCE
    )
    selection = got.take(np.array([[7, 2]]))
    np.testing.assert_array_equal(selection.states, got.states[[7, 2]])
    alone = run(
        backbones["one"],
        12,
        segments=(Segment(backbones["one"].transformer, toy_grid(3, solver="flow_sde")),),
    )
    np.testing.assert_allclose(got.latents, alone.latents, atol=TOLERANCE)
    assert largest(got.states[:, 1:] - got.states[:, :-1]) > 0.1
    assert generate(backbone, sampler, prompted, rows).states is None
