"""Each option of exploration changes one thing, and goes with its file: nothing else knows it by
name.
"""

import dataclasses
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import solrl_jax
from solrl_jax.quant.formats import FORMATS
from solrl_jax.quant.low_rank import LowRank
from solrl_jax.quant.nvfp4 import NVFP4Tensor
from solrl_jax.rl.experiment import fresh_state
from solrl_jax.rl.explore.option import Calibration
from solrl_jax.rl.explore.options import registry
from solrl_jax.rl.explore.options.correction import Corrected
from solrl_jax.rl.explore.setting import ExplorationSetting
from solrl_jax.rl.explore.sync import Quantizer, quantize_policy
from solrl_jax.rl.iteration import iterate
from solrl_jax.rl.trainable.trainable import flatten
from tests.toys import KERNELS, toy_experiment

SETTINGS = {
    "preview": "rollout.explore.sigmas=first",
    "exact_steps": "rollout.explore.exact_steps=1",
    "correction": "rollout.explore.correction_rank=4",
    "attention": "rollout.explore.attention=fp8",
}
STEPS = ("rollout.num_steps=6", "rollout.explore.num_steps=4")
FORMAT = ExplorationSetting("nvfp4", 4)
PACKAGE = Path(solrl_jax.__file__).parent
FOLDER = PACKAGE / "rl" / "explore" / "options"


@pytest.fixture(scope="module")
def paper():
    return toy_experiment(*STEPS)


@pytest.fixture(scope="module")
def adapters(paper):
    """Both factors are away from zero, so that merging changes the weights."""
    return jax.tree.map(lambda x: x + 0.1, fresh_state(paper).old)


def with_options(experiment, *names, extra=()):
    """The same experiment with the same backbone and some options."""
    config = toy_experiment(*STEPS, *(SETTINGS[name] for name in names), *extra).config
    return dataclasses.replace(experiment, config=config)


def arrays(tree):
    return [np.asarray(x) for x in jax.tree.leaves(tree)]


def facts(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype), tree)


def same(a, b):
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        map(np.array_equal, arrays(a), arrays(b))
    )


def whole_schedule(sampler):
    """The steps of all segments."""
    return tuple(
        np.concatenate([getattr(segment.schedule, name) for segment in sampler.segments])
        for name in ("sigmas", "timesteps", "table")
    )


def test_the_papers_recipe_has_one_segment_on_the_configured_schedule_in_the_format(
    paper, adapters
):
    explorer = paper.explorer
    assert not explorer.calibrates
    sampler = explorer.sampler(adapters, FORMAT)
    regenerating = paper.sampler("regenerate", adapters, 6)
    (segment,) = sampler.segments
    assert same(segment.schedule, paper.schedule(4))
    flat = flatten(segment.policy)
    assert {path for path in flat if type(flat[path]) is NVFP4Tensor} == set(KERNELS)
    assert (sampler.name, sampler.decoder, sampler.shape, sampler.samples_per_device) == (
        "explore",
        regenerating.decoder,
        regenerating.shape,
        regenerating.samples_per_device,
    )
    (exact,) = regenerating.segments
    assert all(type(flatten(exact.policy)[path]) is LowRank for path in KERNELS)
    assert same(exact.schedule, paper.schedule(6))


@pytest.mark.slow
def test_a_preview_changes_the_schedule_alone(paper, adapters):
    explorer = with_options(paper, "preview").explorer
    sampler = explorer.sampler(adapters, FORMAT)
    plain = paper.explorer.sampler(adapters, FORMAT)
    (segment,) = sampler.segments
    (plain_segment,) = plain.segments
    full = paper.schedule(6)
    np.testing.assert_array_equal(segment.schedule.sigmas, full.sigmas[[0, 1, 2, 4]])
    np.testing.assert_array_equal(segment.schedule.timesteps, full.timesteps[[0, 1, 2, 4]])
    np.testing.assert_array_equal(segment.schedule.table[:2], full.table[:2])
    assert np.abs(segment.schedule.sigmas - plain_segment.schedule.sigmas).max() > 0.05
    assert (
        segment.schedule.embedded_guidance,
        segment.schedule.guidance_scale,
        segment.schedule.guided,
    ) == (
        plain_segment.schedule.embedded_guidance,
        plain_segment.schedule.guidance_scale,
        plain_segment.schedule.guided,
    )
    assert same(segment.policy, plain_segment.policy)
    assert dataclasses.replace(sampler, segments=()) == dataclasses.replace(plain, segments=())
    assert same(
        explorer.sampler(adapters, ExplorationSetting("nvfp4", 6)).segments[0].schedule, full
    )  # with all steps there is nothing to preview
    assert same(
        explorer.sampler(adapters, ExplorationSetting("bf16", 4)).segments[0].schedule,
        segment.schedule,
    )  # and the format is no matter


def test_exact_steps_change_the_segments_alone(paper, adapters):
    sampler = with_options(paper, "exact_steps").explorer.sampler(adapters, FORMAT)
    plain = paper.explorer.sampler(adapters, FORMAT)
    first, rest = sampler.segments
    assert (first.schedule.steps, rest.schedule.steps) == (1, 3)
    assert same(whole_schedule(sampler), whole_schedule(plain))
    assert same(first.policy, paper.policy(adapters))
    assert same(rest.policy, plain.segments[0].policy)
    assert dataclasses.replace(sampler, segments=()) == dataclasses.replace(plain, segments=())
    others = flatten(first.policy).keys() - set(KERNELS)
    assert all(
        flatten(first.policy)[path] is flatten(rest.policy)[path] for path in others
    )  # held once


def test_attention_marks_the_segments_of_a_format_alone(paper, adapters):
    def marked(sampler):
        return [segment.fp8_attention for segment in sampler.segments]

    sampler, plain = (
        experiment.explorer.sampler(adapters, FORMAT)
        for experiment in (with_options(paper, "attention"), paper)
    )
    assert (marked(sampler), marked(plain)) == ([True], [False])
    assert same(
        sampler.segments,
        tuple(dataclasses.replace(segment, fp8_attention=True) for segment in plain.segments),
    )
    both = with_options(paper, "attention", "exact_steps").explorer
    assert marked(both.sampler(adapters, FORMAT)) == [False, True]
    assert marked(both.sampler(adapters, ExplorationSetting("bf16", 4))) == [False]


@pytest.mark.exhaustive
def test_a_correction_changes_the_leaves_alone(paper, adapters):
    sampler = with_options(paper, "correction").explorer.sampler(adapters, FORMAT)
    plain = paper.explorer.sampler(adapters, FORMAT)
    (segment,) = sampler.segments
    (plain_segment,) = plain.segments
    assert same(segment.schedule, plain_segment.schedule)
    flat = flatten(segment.policy)
    base = flatten(paper.backbone.transformer)
    for path in KERNELS:
        assert type(flat[path]) is Corrected
        assert type(flat[path].remainder) is NVFP4Tensor
        assert flat[path].basis.shape == (base[path].shape[0], 4)
        merged = np.asarray(base[path]) + paper.scale * np.asarray(
            adapters[path]["a"] @ adapters[path]["b"]
        )

        def error(leaf, w=merged):
            return np.linalg.norm(leaf.dequantize() - w) / np.linalg.norm(w)

        assert 0 < error(flat[path]) < error(flatten(plain_segment.policy)[path]) < 0.12
    assert dataclasses.replace(sampler, segments=()) == dataclasses.replace(plain, segments=())


@pytest.mark.slow
def test_options_can_be_combined(paper, adapters):
    sampler = with_options(paper, *SETTINGS).explorer.sampler(adapters, FORMAT)
    first, rest = sampler.segments
    alone = {
        name: with_options(paper, name).explorer.sampler(adapters, FORMAT)
        for name in ("preview", "correction")
    }
    assert same(whole_schedule(sampler), whole_schedule(alone["preview"]))
    assert same(first.policy, paper.policy(adapters))
    for (
        path
    ) in KERNELS:  # measured on the preview's samples: other directions than on the schedule's own
        assert type(flatten(rest.policy)[path]) is Corrected
    assert not same(rest.policy, alone["correction"].segments[0].policy)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_in_a_format_that_quantizes_nothing_correction_and_exact_steps_change_nothing(
    paper, adapters, precision
):
    level = ExplorationSetting(precision, 4)
    sampler = with_options(paper, "exact_steps", "correction").explorer.sampler(adapters, level)
    plain = paper.explorer.sampler(adapters, level)
    assert len(sampler.segments) == 1
    assert same(sampler.segments, plain.segments)
    assert same(sampler.segments[0].policy, paper.policy(adapters))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "extra", "expected"),
    [
        ((), (), False),
        (("exact_steps",), (), False),
        (("preview",), (), True),
        (("preview",), ("rollout.explore.precision=bf16",), True),
        (("preview",), ("rollout.explore.num_steps=6",), False),
        (("correction",), (), True),
        (("correction",), ("rollout.explore.precision=bf16",), False),
        (("correction", "exact_steps"), ("rollout.explore.precision=fp8",), True),
    ],
)
def test_options_calibrate_only_if_they_measure(paper, names, extra, expected, monkeypatch):
    """The prompts are encoded and the base is sampled then, and only then; once."""
    explorer = with_options(paper, *names, extra=extra).explorer
    sampled = []
    original = Calibration.generate
    monkeypatch.setattr(Calibration, "generate", lambda *a: sampled.append(1) or original(*a))
    assert explorer.calibrates == expected
    explorer.calibrate()
    count = len(sampled)
    assert (count > 0) == expected
    explorer.calibrate()
    explorer.sampler(fresh_state(paper).old, explorer.settings[0])
    assert len(sampled) == count
    assert explorer.calibration.prompts == paper.train_prompts[:16]
    assert len(explorer.calibration.seed_batch) == 16


def test_quantizers_are_one_object_so_that_nothing_is_traced_again(paper, adapters):
    explorer = with_options(paper, "correction").explorer
    assert explorer.quantizer("nvfp4") is explorer.quantizer("nvfp4")
    assert explorer.schedule(4) is explorer.schedule(4) is explorer.schedule(4, 0)
    explorer.policy(adapters, "nvfp4")
    before = quantize_policy._cache_size()
    for _ in range(2):
        explorer.policy(jax.tree.map(lambda x: x + 0.1, adapters), "nvfp4")
    assert quantize_policy._cache_size() == before


def test_shapes_stand_for_arrays_where_nothing_is_measured(paper, adapters):
    """For plans and reports: the leaves that a recipe makes, without calibration."""
    for names in ((), ("exact_steps", "preview"), ("correction",), tuple(SETTINGS)):
        explorer = with_options(paper, *names).explorer
        weights = {
            path: jax.ShapeDtypeStruct(x.shape, x.dtype)
            for path, x in flatten(paper.backbone.transformer).items()
        }
        quantizer = registry.shaped_quantizer(
            explorer.explore, Quantizer(FORMATS["nvfp4"].quantize), weights
        )
        leaves = flatten(explorer.policy(adapters, "nvfp4"))
        for path, weight in weights.items():
            single = jax.ShapeDtypeStruct(weight.shape, jnp.float32)
            shaped = jax.eval_shape(
                quantizer.quantize, single, *quantizer.extra_arrays.get(path, ())
            )
            assert facts(shaped) == facts(leaves[path])


# --- an option is its file and its line in the registry ---


@pytest.fixture
def without(monkeypatch):
    """Removes options from the registry, by the names of their files."""

    def take(*names):
        kept = tuple(option for option in registry.OPTIONS if file_of(option) not in names)
        monkeypatch.setattr(registry, "OPTIONS", kept)

    return take


def file_of(option):
    return type(option).__module__.rpartition(".")[2]


def test_the_registry_lists_the_files_of_the_folder():
    files = {path.stem for path in FOLDER.glob("*.py")} - {"__init__", "registry"}
    assert files == set(SETTINGS)
    assert {file_of(option) for option in registry.OPTIONS} == files


@pytest.mark.parametrize("name", SETTINGS)
def test_without_one_option_the_others_work(paper, adapters, without, name):
    others = tuple(other for other in SETTINGS if other != name)
    want = with_options(paper, *others).explorer.sampler(adapters, FORMAT)
    without(name)
    assert len(registry.OPTIONS) == len(SETTINGS) - 1
    got = with_options(paper, *others).explorer.sampler(adapters, FORMAT)
    assert same(got.segments, want.segments)
    # An option that is configured but not registered changes nothing.
    still = with_options(paper, *SETTINGS).explorer.sampler(adapters, FORMAT)
    assert same(still.segments, want.segments)


@pytest.mark.exhaustive
def test_without_any_option_an_iteration_is_the_papers(paper, without):
    state, outcome = iterate(paper, fresh_state(paper), 1)
    without(*SETTINGS)
    bare = with_options(paper)
    again, same_outcome = iterate(bare, fresh_state(bare), 1)
    assert same(again, state)
    np.testing.assert_array_equal(
        same_outcome.ledger["proxy_reward"], outcome.ledger["proxy_reward"]
    )


def test_nothing_else_knows_an_option_by_name():
    """Neither the loop nor the iteration, the experiment, the rollout or the ranking; and nobody
    imports a option's file.
    """
    name = re.compile(
        r"\b(exact_steps|correction_rank|preview|fitted_table|Corrected|Probe)\b|explore\.sigmas =="
    )
    readers = [PACKAGE / "runs" / "trainer.py", PACKAGE / "runs" / "record.py"]
    readers += [path for room in ("rl", "diffusion") for path in (PACKAGE / room).glob("*.py")]
    assert len(readers) > 15
    mentions = {
        path.name: match.group() for path in readers if (match := name.search(path.read_text()))
    }
    assert not mentions
    imported = re.compile(r"explore\.options(\.| import )(preview|exact_steps|correction)")
    assert imported.search(Path(__file__).read_text())
    importers = {path.name for path in PACKAGE.rglob("*.py") if imported.search(path.read_text())}
    assert importers == {"registry.py"}
