"""Which linears stand a format, measured by ranks on a tiny pipeline, and the rule that follows."""

from types import SimpleNamespace

import numpy as np
import pytest

from solrl_jax.config.presets import resolve
from solrl_jax.errors import RunError
from solrl_jax.rl import rank, sensitivity
from solrl_jax.rl.experiment import build, fresh_state
from solrl_jax.rl.explore import quantized_layers
from solrl_jax.rl.sensitivity import (
    Sensitivity,
    format_table,
    group_of,
    measure,
    propose_unquantized,
)
from tests.toys import toy_experiment

GROUPS = {"/attn1/", "/ff/"}


@pytest.mark.parametrize(
    ("path", "group"),
    [
        ("transformer_blocks/attn1/to_out/0/kernel", "/attn1/"),
        ("transformer_blocks/0-36/ff/net/2/kernel", "/ff/"),
        ("single_transformer_blocks/proj_mlp/kernel", "/proj_mlp/"),
        ("time_embed/emb/timestep_embedder/linear_1/kernel", "time_embed/"),
    ],
)
def test_a_group_is_a_part_of_its_paths(path, group):
    assert group_of(path) == group
    assert group in path


def test_the_proposal_takes_what_costs_least_for_its_share():
    groups = [
        Sensitivity("/ff/", 8, 0.6, 0.98),
        Sensitivity("/attn/", 8, 0.3, 0.985),
        Sensitivity("/norm1/", 2, 0.1, 0.7),
    ]
    assert propose_unquantized(0.99, groups, 0.97) == ["/norm1/"]
    assert propose_unquantized(0.99, groups, 0.98) == ["/attn/", "/norm1/"]
    assert propose_unquantized(0.99, groups, 0.5) == []
    assert "model.quantization.modules_to_not_convert=[/norm1/]" in format_table(
        0.99, groups, ["/norm1/"]
    )


@pytest.mark.exhaustive
def test_each_group_is_measured_alone(monkeypatch):
    def some(*of):
        return [
            row for row in quantized_layers.report(*of) if group_of(row.path) in GROUPS
        ]  # each is a program to compile

    monkeypatch.setattr(sensitivity, "report", some)
    small = ("train.num_prompts=2", "eval.num_prompts=2", "rollout.candidates=8", "rollout.kept=4")
    config = resolve("tiny", (*small, "rollout.num_steps=2", "rollout.explore.num_steps=2"))
    experiment = build(config)
    exact, groups = measure(experiment, fresh_state(experiment).old, 2, lambda *_: None)
    assert exact == 1.0  # nothing quantized and as many steps: the candidates themselves
    assert sum(group.weight_share for group in groups) == pytest.approx(1)
    assert {group.group for group in groups} == GROUPS
    assert any(group.spearman < 1 for group in groups)
    assert all(-1 <= group.spearman <= 1 for group in groups)


@pytest.mark.parametrize("value", [0.5, float("nan")])
def test_rewards_that_all_tie_rank_nothing(value, monkeypatch):
    toy = toy_experiment("rollout.num_steps=2", "rollout.explore.num_steps=2", "eval.num_prompts=2")
    monkeypatch.setattr(
        rank,
        "generate",
        lambda backbone, sampler, prompts, seeds, *_, **__: SimpleNamespace(
            scores={"reward": np.full(len(seeds), value)}
        ),
    )
    with pytest.raises(
        RunError,
        match=r"^the rewards of all candidates of 2 prompt\(s\) tie, so nothing ranks them; "
        r"take more",
    ):
        measure(toy, fresh_state(toy).old, 2, lambda *_: None)


def test_a_group_whose_rewards_tie_is_not_quantized():
    groups = [Sensitivity("/ff/", 8, 0.6, 0.98), Sensitivity("/attn/", 8, 0.4, float("nan"))]
    assert propose_unquantized(0.99, groups, 0.5) == ["/attn/"]
    assert propose_unquantized(0.99, groups[::-1], 0.5) == ["/attn/"]


def test_a_group_whose_rewards_tie_does_not_change_the_order_of_the_others():
    groups = [
        Sensitivity("/dear/", 1, 0.1, 0.96),
        Sensitivity("/tie/", 1, 0.2, float("nan")),
        Sensitivity("/cheap/", 8, 0.7, 0.98),
    ]
    assert propose_unquantized(0.99, groups, 0.96) == ["/dear/", "/tie/"]
