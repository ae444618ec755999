"""Prompt sets that are smaller than an iteration or an evaluation asks for."""

import pytest

from solrl_jax.cli.presets import describe_prompts
from solrl_jax.config.presets import preset_names, resolve
from solrl_jax.config.values import ConfigError
from solrl_jax.data.prompts import load_prompts
from solrl_jax.rl.experiment import build, fit_prompt_counts
from solrl_jax.runs import trainer
from solrl_jax.runs.directory import read_run
from solrl_jax.runs.progress import TerminalProgress
from tests.toys import toy_config


def test_enough_prompts_change_nothing():
    config = resolve("tiny")
    assert fit_prompt_counts(config, 6, 26) == (config, [])


def test_a_small_set_is_taken_whole_with_a_line_that_says_so():
    config, lines = fit_prompt_counts(resolve("tiny"), 4, 25)
    assert (config.train.num_prompts, config.eval.num_prompts) == (4, 25)
    assert lines == [
        "train.num_prompts=6: prompts.train='embedded:shapes-train' has 4 distinct prompts, so "
        "each iteration takes 4",
        "eval.num_prompts=26: prompts.test='embedded:shapes-test' has 25 distinct prompts, so each "
        "evaluation takes 25",
    ]
    assert fit_prompt_counts(config, 4, 25) == (config, [])


def test_the_terms_still_divide_among_the_optimizer_steps():
    config = resolve("tiny", ("optimizer.steps_per_iteration=144",))  # 6 prompts x 12 kept x ...
    fitted, (line,) = fit_prompt_counts(config, 5, 26)
    assert fitted.train.num_prompts < 5
    assert fitted.num_terms % 144 == 0
    assert line.endswith(f"has 5 distinct prompts, so each iteration takes "
                         f"{fitted.train.num_prompts}")  # fmt: skip
    with pytest.raises(ConfigError, match="steps_per_iteration=144: must divide"):
        fit_prompt_counts(config, 1, 26)


def test_the_prompts_that_presets_show_are_those_that_a_run_draws(tmp_path):
    (tmp_path / "five.txt").write_text("".join(f"circle {i}\n" for i in range(5)))
    changes = (f"prompts.train={tmp_path}/five.txt", "optimizer.steps_per_iteration=144")
    config = resolve("tiny", changes)
    fitted, _ = fit_prompt_counts(config, 5, 26)
    assert len(describe_prompts(config)["first"]) == fitted.train.num_prompts < 5


def test_every_released_preset_has_its_prompts():
    sets = {resolve(name).prompts for name in preset_names() if name != "tiny"}
    (prompts,) = sets
    assert len(load_prompts(prompts.train, "prompts.train")) >= 48
    load_prompts(prompts.test, "prompts.test")


@pytest.mark.exhaustive
@pytest.mark.usefixtures("toy_model")
def test_a_run_on_one_prompt_records_it_and_goes_on(tmp_path, capsys):
    (tmp_path / "one.txt").write_text("a red circle\n")
    changes = [f"prompts.{part}={tmp_path / 'one.txt'}" for part in ("train", "test")]
    run = tmp_path / "run"
    for iterations in (1, 2):
        config = toy_config(
            run, *changes, "reward=tests.outside:in_jax", f"train.iterations={iterations}"
        )
        with TerminalProgress(bars=False) as progress:
            assert trainer.run(config, progress)["iterations"] == iterations
        output = capsys.readouterr().err
        assert "train.num_prompts=2: " in output
        assert "eval.num_prompts=2: " in output
    assert (read_run(run).train.num_prompts, read_run(run).eval.num_prompts) == (1, 1)
    with pytest.warns(UserWarning, match=r"train.num_prompts=2: .* takes 1"):
        experiment = build(config)
    assert experiment.config.train.num_prompts == 1
