"""Candidates decoded by another autoencoder (`rollout.explore.vae`): what it changes, and what it must not."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from solrl_jax.backbone.backbone import EMBEDDED_FOLDER, find_autoencoder
from solrl_jax.config.presets import ConfigError
from solrl_jax.models.weights import Params
from solrl_jax.parallel.sharding import make_mesh
from solrl_jax.planning import devices
from solrl_jax.planning.abstract import open_configurations
from solrl_jax.planning.measure import Planner
from solrl_jax.rollout.generate import decode_chunk, generate, prepare
from solrl_jax.storage.errors import InputError
from solrl_jax.training import experiment as experiments
from solrl_jax.training.iteration import iterate, roll_out
from tests.small import fresh_state, silent, small_config

LIGHT = "rollout.explore.vae=embedded:tiny-light"


@pytest.fixture(scope="module")
def experiment():
    return experiments.build(small_config("unused", LIGHT))


def test_the_light_decoder_shows_candidates_and_nothing_else(experiment):
    """Latents are the same to the bit; so are the scores of whatever is not explored. Nothing of the base is held twice."""
    own = dataclasses.replace(experiment, drafts=experiment.backbone)
    assert experiment.drafts.transformer is experiment.backbone.transformer
    size = lambda params: sum(x.size for x in jax.tree.leaves(params["decoder"]))
    assert size(experiment.drafts.vae) < size(experiment.backbone.vae) / 4
    prompts = experiment.train_prompts[:2]
    prompted = prepare(experiment.backbone, experiment.reward, prompts, experiment.config.model.max_tokens)
    seeds, policy = experiment.seeds(0, 1, prompts, 4), experiment.policy(fresh_state(experiment).old)
    run = lambda there, stage: roll_out(there, policy, there.grid(3), prompted, seeds, stage, silent)
    light, whole = run(experiment, "explore"), run(own, "explore")
    np.testing.assert_array_equal(light.latents, whole.latents)
    difference = np.abs(light.reward - whole.reward)
    print(difference)
    assert 0 < difference.max() < 0.5
    for stage in ("regenerate", "audit"):
        np.testing.assert_array_equal(run(experiment, stage).reward, whole.reward)


def test_the_light_decoder_draws_what_the_models_own_does(experiment):
    """Of latents that the base makes, not of an encoder's; and it is of the same encoder."""
    backbone, prompts = experiment.backbone, experiment.train_prompts[:8]
    prompted = prepare(backbone, None, prompts, experiment.config.model.max_tokens)
    seeds = experiment.seeds(0, 1, prompts, 1)[:, 0]
    sampled = generate(
        backbone,
        backbone.transformer,
        experiment.grid(3),
        prompted,
        np.arange(8),
        seeds,
        experiment.size,
        8,
        None,
        keep_images=True,
    )
    own, light = sampled.images, np.asarray(decode_chunk(experiment.drafts, experiment.drafts.vae, sampled.latents))
    error, spread = np.sqrt(((own - light) ** 2).mean()), np.sqrt(((own - own[::-1]) ** 2).mean())
    print(f"light decoder: {error:.3f}, between pictures {spread:.3f}")
    assert 0 < error < spread / 12
    same = jax.tree.map(np.array_equal, backbone.vae["encoder"], experiment.drafts.vae["encoder"])
    assert all(jax.tree.leaves(same))


def test_an_iteration_trains_on_what_its_own_decoder_shows(experiment):
    """The light one is a program more in the first iteration, and none after; regenerated rewards are the model's own."""
    before = decode_chunk._cache_size()
    state, outcome = iterate(experiment, fresh_state(experiment), 1, silent)
    after = decode_chunk._cache_size()
    _, second = iterate(experiment, state, 2, silent)
    assert decode_chunk._cache_size() == after <= before + 2
    assert second.metrics["seconds/compile"] == 0
    ledger, kept = outcome.ledger, outcome.ledger["kept"]
    own = dataclasses.replace(experiment, drafts=experiment.backbone)
    prompts = list(dict.fromkeys(ledger["prompt"]))
    prompted = prepare(own.backbone, own.reward, prompts, own.config.model.max_tokens)
    seeds = own.seeds(own.config.seed, 1, prompts, own.config.rollout.candidates)
    again = roll_out(
        own, own.policy(fresh_state(own).old), own.grid(own.config.rollout.steps), prompted, seeds, "audit", silent
    )
    np.testing.assert_allclose(ledger["regenerated_reward"][kept].data, again.reward[kept], atol=1e-6)


def test_its_work_and_its_weights_are_planned():
    config, machine = small_config("unused"), devices.machine("h100", 1, 1, None, None, None, None, None)
    planned = {}
    for name, settings in (("own", ()), ("light", (LIGHT,))):
        config = small_config("unused", *settings)
        planner = Planner(config, machine, open_configurations(config.model.path, config.model.remat))
        planned[name] = planner.measure(make_mesh(1, 1), only=("score",))
    flops = {name: sum(measured.stages[0].flops.values()) for name, measured in planned.items()}
    weights = {name: measured.parts["vae"] for name, measured in planned.items()}
    print(flops, weights)
    assert flops["light"] < 0.75 * flops["own"]  # 16 candidates and 8 of them once more: two thirds are a fifth
    assert 1.2 * weights["own"] < weights["light"] < 2 * weights["own"]


def test_what_is_not_there_or_does_not_fit_is_refused_before_anything_is_loaded(monkeypatch, tmp_path):
    def load(*_: object) -> Params:
        raise AssertionError("loaded")

    monkeypatch.setattr(experiments, "load_backbone", load)
    (tmp_path / "kl").mkdir()
    (tmp_path / "kl" / "config.json").write_text(json.dumps({"_class_name": "AutoencoderKL", "latent_channels": 4}))
    (tmp_path / "empty").mkdir()
    light = (EMBEDDED_FOLDER / "tiny-light" / "config.json").read_text()
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text(light)
    for path, message in (
        ("embedded:tiny-lihgt", "rollout.explore.vae='embedded:tiny-lihgt': no config.json in it or in its folder vae"),
        (str(tmp_path / "empty"), "no config.json in it or in its folder vae"),
        (str(tmp_path / "kl"), "rollout.explore.vae=.*: .* latent_channels=4 does not fit the other components, which want 8"),
        (str(tmp_path / "bare"), "rollout.explore.vae=.*: .* expected one .safetensors file or an index of shards, found none"),
    ):
        with pytest.raises(InputError, match=message):
            experiments.build(small_config("unused", f"rollout.explore.vae={path}"))


def test_a_pipeline_stands_for_its_autoencoder():
    assert find_autoencoder("embedded:tiny-flux") == EMBEDDED_FOLDER / "tiny-flux" / "vae"
    assert find_autoencoder("embedded:tiny-light") == EMBEDDED_FOLDER / "tiny-light"


def test_candidates_that_are_trained_on_are_decoded_by_the_model():
    with pytest.raises(ConfigError, match=r"rollout.explore.vae='x': must be null with rollout.regenerate=false"):
        small_config(
            "unused", "family=naive_quant", "rollout.explore.steps=3", "rollout.explore.exact_steps=0", "rollout.explore.vae=x"
        )
