"""The recipe of the embedded pipelines: what it writes is what ships; which captions and rates it
trains with, step by step.
"""

import importlib
import json
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pretrain import drawing
from safetensors.numpy import load_file

from solrl_jax.data.shapes import scenes

ASSETS = Path(__file__).parents[2] / "solrl_jax" / "assets"


@pytest.fixture
def pretrain():
    """Imports a module of scripts/pretrain."""
    return lambda name: importlib.import_module(f"pretrain.{name}")


def without_scale(path: Path) -> dict:
    """A JSON file without the numbers that are measured on the latents."""
    return {
        name: value
        for name, value in json.loads(path.read_text()).items()
        if name not in ("scaling_factor", "shift_factor", "latents_mean", "latents_std")
    }


@pytest.mark.parametrize("name", ["tiny-sana", "tiny-flux", "tiny-sd3", "tiny-wan"])
def test_a_blueprint_writes_the_files_that_ship(pretrain, tmp_path, name):
    pretrain("blueprints").BLUEPRINTS[name].write(tmp_path)
    shipped = {
        file.relative_to(ASSETS / "pipelines" / name)
        for file in (ASSETS / "pipelines" / name).rglob("*.json")
    }
    assert {file.relative_to(tmp_path) for file in tmp_path.rglob("*.json")} == shipped
    for file in shipped:
        assert without_scale(tmp_path / file) == without_scale(
            ASSETS / "pipelines" / name / file
        ), file


def test_clip_is_configured_as_it_ships(pretrain):
    stored = json.loads((ASSETS / "pipelines" / "tiny-clip" / "config.json").read_text())
    assert pretrain("blueprints").CLIP.stored_config == stored


def test_the_prompt_sets_are_those_that_ship(pretrain, tmp_path):
    pretrain("data").write_prompt_sets(0, tmp_path)
    pretrain("clips").write_prompt_sets(tmp_path)
    for file in ("shapes-train.txt", "shapes-test.txt", "motion-train.txt", "motion-test.txt"):
        assert (tmp_path / file).read_text() == (ASSETS / "prompt_sets" / file).read_text()


def test_captions_follow_the_curriculum(pretrain):
    curriculum = pretrain("recipe").Curriculum(stream=1, focus=10, balance=20, wrong=range(30, 40))
    captions = list(drawing.draw_prompts(np.random.default_rng(0), 400, held_out=False))
    draw = pretrain("data").caption_batches(captions, curriculum, batch=64, seed=0)

    def simple_scene(row):
        return (
            len(groups := scenes.parse_caption(captions[row]).groups) == 1
            or sum(g.count for g in groups) == 2
        )

    def pair(row):
        return len(scenes.parse_caption(captions[row]).groups) == 2

    def shares(steps: range) -> list[float]:
        """The shares of scenes that prompt sets may ask for, of pairs among all, of empty prompts,
        of wrong ones.
        """
        rows, prompts = (np.concatenate(parts) for parts in zip(*map(draw, steps), strict=True))
        wrong = (prompts != 0) & (prompts != rows + 1)
        parts = (
            [simple_scene(row) for row in rows],
            [pair(row) for row in rows],
            prompts == 0,
            wrong,
        )
        return [float(np.mean(part)) for part in parts]

    simple_rows = np.array([row for row in range(len(captions)) if simple_scene(row)])
    everything, focused, balanced, erring = map(
        shares, (range(10), range(10, 20), range(20, 30), range(30, 40))
    )
    assert everything[0] == pytest.approx(len(simple_rows) / len(captions), abs=0.06)
    assert everything[0] < 0.9
    assert focused[0] == balanced[0] == erring[0] == 1
    assert focused[1] == pytest.approx(np.mean([pair(row) for row in simple_rows]), abs=0.06)
    assert balanced[1] == pytest.approx(0.5, abs=0.06)
    assert [phase[2] for phase in (everything, focused, balanced, erring)] == pytest.approx(
        [0.1] * 4, abs=0.04
    )
    assert [everything[3], focused[3], balanced[3]] == [0, 0, 0]
    assert erring[3] == pytest.approx(0.3 * 0.9, abs=0.05)


def test_rates_of_a_schedule_with_legs(pretrain):
    schedule = pretrain("recipe").Schedule(1.0, 1000, stop=800, more=(200, 400))
    rate = schedule.learning_rate()
    assert schedule.last == 1400
    assert rate(0) == 0
    assert float(rate(100)) == pytest.approx(1.0)
    assert 0.05 < float(rate(799)) < 0.25  # left before its end, where the rate is a twentieth
    for start, last in ((800, 1000), (1000, 1400)):
        assert float(rate(start)) == pytest.approx(0.5)
        assert float(rate(last - 1)) == pytest.approx(0.1, abs=0.001)


def test_a_wrong_caption_ends_with_the_training(pretrain):
    for recipe in pretrain("recipe").RECIPES.values():
        assert not recipe.curriculum.wrong or recipe.curriculum.wrong.stop == recipe.schedule.last


@pytest.mark.slow
def test_guidance_is_learned_by_a_network_that_already_says_it(pretrain):
    """A linear network v = scale * text: its guided velocity is known, and the loss of a network
    that says it is 0.
    """
    flows = pretrain("flows")

    def velocity(weight, x, text, sigma, scale):
        return (weight(scale) * text)[:, None, None, None] * jnp.ones_like(x)

    text = jnp.linspace(2.0, 3.0, 64)
    empty = jnp.ones(64)

    def plain(scale):
        return jnp.ones_like(scale)

    def guided(scale):
        return (empty + scale * (text - empty)) / text

    loss = flows.guidance_loss(velocity)
    batch = (jnp.zeros((64, 2, 2, 1)), text, empty, plain)
    assert float(loss(guided, batch, jax.random.key(0))) == pytest.approx(0, abs=1e-10)
    assert float(loss(plain, batch, jax.random.key(0))) > 0.1


def test_noised_latents_lie_between_picture_and_noise(pretrain):
    x0 = jax.random.normal(jax.random.key(1), (4000, 1, 1, 1))
    x, sigma, velocity = pretrain("flows").noised(x0, jax.random.key(0))
    at = sigma[:, None, None, None]
    np.testing.assert_allclose(x - at * velocity, x0, atol=1e-5)
    np.testing.assert_allclose(
        np.quantile(sigma, [0.1587, 0.5, 0.8413]), [0.2689, 0.5, 0.7311], atol=0.02
    )  # logistic of -1, 0, 1


@pytest.mark.slow
def test_shifted_noise_levels_have_multiplied_odds(pretrain):
    noised = pretrain("flows").noised
    x0 = jnp.zeros((100, 3, 2, 2, 1))  # clips
    _, sigma, _ = noised(x0, jax.random.key(0))
    _, shifted, _ = noised(x0, jax.random.key(0), 3.0)
    np.testing.assert_allclose(shifted / (1 - shifted), 3 * sigma / (1 - sigma), rtol=1e-4)


def test_wrong_captions_of_clips_belong_to_other_clips(pretrain):
    curriculum = pretrain("recipe").Curriculum(stream=1, wrong=range(1, 2))
    draw = pretrain("data").clip_batches(1000, curriculum, batch=4000, seed=0)
    for step, share in ((0, 0.0), (1, 0.3)):
        rows, prompts = draw(step)
        assert len(rows) == 4000
        assert np.mean(prompts == 0) == pytest.approx(0.1, abs=0.02)
        wrong = (prompts != 0) & (prompts != rows + 1)
        assert np.mean(wrong) == pytest.approx(share * 0.9, abs=0.03)


@pytest.mark.exhaustive
def test_refinement_changes_only_the_decoder(pretrain, tmp_path):
    source = ASSETS / "pipelines" / "tiny-wan"
    videos, _ = pretrain("clips").make_clips(8, seed=0)
    settings = pretrain("recipe").Settings(tmp_path, tmp_path / "out", seed=0, stop=2)
    pretrain("autoencoders").refine_pipeline(settings, source, videos)
    files = [file.relative_to(source) for file in source.rglob("*") if file.is_file()]
    weights = Path("vae", "diffusion_pytorch_model.safetensors")
    for file in set(files) - {weights}:
        assert (tmp_path / "out" / "tiny-wan" / file).read_bytes() == (source / file).read_bytes()
    old, new = (load_file(folder / weights) for folder in (source, tmp_path / "out" / "tiny-wan"))
    assert old.keys() == new.keys()
    for name, tensor in old.items():
        trained = name.startswith(("decoder.", "post_quant_conv."))
        assert trained or np.array_equal(new[name], tensor), name
    assert any(not np.array_equal(new[name], tensor) for name, tensor in old.items())


class Fit:
    """The fit of one number to one of 1000 values per step, and the steps whose values were asked
    for.
    """

    def __init__(self, pretrain, folder, **settings):
        self.steps: list[int] = []
        self._train = pretrain("training").train
        self._schedule = pretrain("recipe").Schedule(1e-2, 1000)
        self._settings = pretrain("recipe").Settings(folder, folder, 0, **settings)

    def batch(self, step: int) -> np.ndarray:
        self.steps.append(step)
        return np.asarray([step % 7])

    def __call__(self) -> float:
        def loss(params, values, rows, key):
            return ((params["x"] - values[rows] - 0.1 * jax.random.normal(key)) ** 2).mean()

        values = np.linspace(1, 2, 7, dtype=np.float32)
        zero = {"x": np.float32(0)}
        result = self._train("fit", zero, loss, values, self.batch, self._schedule, self._settings)
        return float(result["x"])


@pytest.mark.slow
def test_a_time_limit_spreads_the_steps_over_the_schedule(pretrain, tmp_path, monkeypatch):
    fit = Fit(pretrain, tmp_path, seconds={"fit": 20.0})
    # One second passes per batch, so 20 of the 1000 steps fit.
    clock = SimpleNamespace(time=lambda: float(len(fit.steps)))
    monkeypatch.setattr(pretrain("training"), "time", clock)
    fit()
    assert len(fit.steps) == 20
    assert fit.steps[0] == 0
    # The first two steps precede the measurement.
    np.testing.assert_allclose(np.diff(fit.steps[2:]), 50, atol=1)
    assert fit.steps[-1] >= 940


def test_an_interrupted_training_gives_the_same_result(pretrain, tmp_path):
    folders = [tmp_path / name for name in ("whole", "parts")]
    for folder in folders:
        folder.mkdir()
    whole = Fit(pretrain, folders[0], stop=12)()
    first = Fit(pretrain, folders[1], stop=5)
    second = Fit(pretrain, folders[1], stop=12)
    assert first() != whole
    assert second() == whole
    assert (first.steps, second.steps) == ([*range(5)], [*range(5, 12)])
