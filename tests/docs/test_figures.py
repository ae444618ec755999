"""Figures in README and the pages are those of the records in benchmarks/, to the digit that is
printed.
"""

import json
import math
import re
from collections.abc import Iterable

import numpy as np
import pytest

from solrl_jax.config.presets import resolve
from solrl_jax.study import compare as comparisons
from solrl_jax.study.compare import Course, compare, reward_at_cost
from solrl_jax.study.cost import Prices, find_prices, prices_of
from tests.docs.pages import DOCS, PAGES, ROOT

README = ROOT / "README.md"
TPU_PRICES = ("flux1-tpu-v5e", "sana-tpu-v5e")


def record(name: str) -> dict:
    return json.loads((ROOT / "benchmarks" / f"{name}.json").read_text())


def rows(page, heading: str) -> list[list[str]]:
    """The rows of a page's table whose first line begins with `heading`, cell by cell."""
    match = re.search(
        rf"^\| ?{re.escape(heading)}.*\n\|[-| :]+\n((?:\|.*\n)+)", page.read_text(), re.MULTILINE
    )
    assert match is not None, (page.name, heading)
    return [
        [cell.strip() for cell in line.strip()[1:-1].split("|")] for line in match[1].splitlines()
    ]


def numbers(text: str) -> list[str]:
    return re.findall(r"\d+(?:\.\d+)?", text)


def signed(text: str) -> list[str]:
    """As `numbers`, with the sign of a difference. That of an error, "±", is none."""
    return re.findall(r"[-+]?\d+(?:\.\d+)?", text.replace("± ", ""))


def agrees(printed: str, value: float) -> bool:
    """Whether a printed number is the value, rounded to as many places."""
    places = len(printed.partition(".")[2])
    return abs(float(printed) - value) <= 0.5 * 10**-places + 1e-9


def check(printed: Iterable[str], values: Iterable[float], what: object) -> None:
    for text, value in zip(printed, values, strict=True):
        assert agrees(text, value), (what, text, value)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "benchmarks").glob("*.json")), ids=lambda path: path.stem
)
def test_a_record_says_when_and_where(path):
    contents = json.loads(path.read_text())
    assert {"date", "device"} <= contents.keys()
    assert path.name in "".join(
        page.read_text() for page in (*PAGES, *(ROOT / "scripts").rglob("*.py"))
    )


def test_a_wrong_digit_is_noticed():
    assert agrees("0.824", 0.8236777)
    assert not agrees("0.825", 0.8236777)
    assert agrees("89", 88.6)
    assert not agrees("90", 88.6)


RANKED = {
    (m["model"], m["when"]): {s["explore"]: s for s in m["settings"]}
    for m in record("rank-tiny")["measurements"]
}
CORRELATED = ("spearman", "kendall", "top_k_match")
RANKS = ("true_rank_best", "true_rank_worst")


def test_ranks():
    count = 0
    for first, *cells in rows(DOCS / "exploration.md", "base and prompts"):
        model, when = (re.sub("`", "", part).strip() for part in [*first.split(", "), ""][:2])
        if (model, when) not in RANKED:
            assert first.startswith("a perfect proxy")
            continue
        recipes = RANKED[model, when]
        printed = [number for cell in cells for number in numbers(cell)]
        names = (*CORRELATED, *RANKS, "top_k_regret")
        check(
            printed,
            [recipes[recipe][name] for recipe in ("paper", "best") for name in names],
            first,
        )
        assert {str(recipes[recipe]["prompts"]) for recipe in ("paper", "best")} == {
            numbers(first)[-1]
        }
        count += 1
    assert count == 6


def test_ranks_after_training_in_the_readme():
    for first, *cells in rows(README, "| `explore=paper`"):
        recipes = RANKED[first.strip("`"), "after 20 iterations"]
        values = [
            recipes[recipe][name] for recipe in ("paper", "best") for name in (*CORRELATED, *RANKS)
        ]
        check([number for cell in cells for number in numbers(cell)], values, first)


def test_levers_alone():
    levers = record("rank-levers-alone")
    table = {
        re.sub("`|rollout.explore.", "", first): cells
        for first, *cells in rows(DOCS / "exploration.md", "alone, after")
    }
    again = [
        {s["explore"]: s["spearman"] for s in m["settings"]}
        for m in levers["again"]["measurements"]
    ]
    for name, explore in (
        ("the paper's recipe (NVFP4, 6-step schedule)", "paper"),
        ("correction_rank=32", "correction"),
        ("exact_steps=1", "exact"),
        ("sigmas=first", "first"),
    ):
        check(table.pop(name), [model[explore] for model in again], name)

    def older(group, precision):
        return [
            next(
                s["spearman"]
                for s in levers["settings"][f"{model}-{group}"]
                if (s["precision"], s["exact_steps"]) == (precision, 0)
            )
            for model in ("sana", "flux", "sd3")
            if f"{model}-{group}" in levers["settings"]
            and any(s["precision"] == precision for s in levers["settings"][f"{model}-{group}"])
        ]

    for name, group, precision in (
        ("the same without fitted coefficients", "nofit", "nvfp4"),
        ("four over six in the block scales (removed)", "plain", "nvfp4_46"),
        ("correction ranks chosen by energy (removed)", "corrdeal", "nvfp4"),
        ("BF16, 6-step schedule (no quantization)", "plain", "bf16"),
        ("BF16, 6 steps with sigmas=first", "fit", "bf16"),
    ):
        check(
            [cell for cell in table.pop(name) if cell != "not measured"],
            older(group, precision),
            name,
        )
    assert not table


def test_ranks_of_clips():
    measurements = {
        (row["explore"], row["precision"], row["steps"]): row
        for row in record("rank-wan")["measurements"]
    }
    *formats, (_, *_, best) = rows(DOCS / "exploration.md", "exploration | 3 steps")
    assert [name for name, *_ in formats] == ["NVFP4", "FP8", "INT8", "BF16"]
    for name, *cells in formats:
        for cell, steps in zip(cells, (3, 4, 6), strict=True):
            row = measurements["", name.lower(), steps]
            check(numbers(cell), [row["spearman"], row["spearman_standard_error"]], (name, steps))
    row = measurements["best", "nvfp4", 6]
    check(numbers(best), [row["spearman"], row["spearman_standard_error"]], "best")


def test_what_tiny_wan_learns():
    first, *_, last = record("train-tiny-wan")["evaluations"]
    text = " ".join((DOCS / "embedded.md").read_text().split())
    for key in ("motion", "motion/moves", "motion/strict"):
        printed = "from {:.3f} ± {:.3f} to {:.3f} ± {:.3f}".format(
            *(
                row[name]
                for row in (first, last)
                for name in (f"eval/{key}", f"eval/{key}/standard_error")
            )
        )
        assert printed in text, printed
    paired = record("train-tiny-wan")["paired"]
    differences = paired["differences, and half of their 95 % intervals"]
    strict, reward = (differences[key] for key in ("motion/strict", "motion"))
    score = (figures["motion/strict"] for figures in (paired["means"], paired["standard_errors"]))
    for printed in (
        f"On {paired['images']} clips with the same noise",
        "strict success is {:.3f} ± {:.3f}, which is {:.3f} above the base".format(
            *score, strict[0]
        ),
        f"over the 18 held-out captions is ± {strict[1]:.3f}",
        "That of the reward is {:.3f} ± {:.3f}.".format(*reward),
    ):
        assert printed in text, printed
    guidance = record("train-tiny-wan")["guidance"]
    for scale, *cells in rows(DOCS / "embedded.md", "guidance scale"):
        check(cells, guidance["scores"][scale.split()[0]].values(), scale)
    none, _, strong = (scores["strict"] for scores in guidance["before"]["scores"].values())
    assert f"strict success of the base was {none:.3f}, and {strong:.3f} at scale 3" in text


def test_what_refining_the_decoder_of_tiny_wan_changes():
    refinement = record("train-tiny-wan")["refinement"]
    before, after = (refinement["reconstructions"][when] for when in ("before", "after"))
    text = " ".join((DOCS / "embedded.md").read_text().split())
    for printed in (
        refinement["command"],
        f"took {refinement['steps']} steps of {refinement['batch']} clips",
        f"among {refinement['reconstructions']['clips']} true clips "
        f"from {before['strict']:.3f} to {after['strict']:.3f}, "
        f"and their reward from {before['reward']:.3f} to {after['reward']:.3f}",
    ):
        assert printed in text, printed


def test_what_quantizing_each_group_costs():
    linears = record("linears-tiny")
    page = DOCS / "exploration.md"
    groups = {group["group"].strip("/"): group for group in linears["groups"]}
    for name, share, spearman in rows(page, "quantized alone"):
        group = groups.pop(name.strip("`"))
        check([numbers(share)[0], spearman], [100 * group["share"], group["spearman"]], name)
    assert not groups
    text = " ".join(page.read_text().split())
    assert f"6 steps in BF16 rank at {linears['exact']:.3f}." in text


def test_what_the_embedded_pipelines_learn():
    runs = record("train-tiny")["runs"]
    page = DOCS / "embedded.md"
    scores = ("eval/reward", "eval/shapes/strict")
    for first, _, reward, strict in rows(page, "name"):
        run = runs[f"889fa5c {first.removeprefix('`tiny-').removesuffix('`')}"]
        for cell, name in zip((reward, strict), scores, strict=True):
            values = [
                run[when][f"{name}{part}"]
                for when in ("before", "after")
                for part in ("", "/standard_error")
            ]
            check(numbers(cell), values, first)
    tried = ["flux-2e3", "flux-4e3", "sd3-2e3", "sd3-4e3", "sd3-1e3-s2", "sd3-96", "sd3-96-s2"]
    for name, (first, *cells) in zip(tried, rows(page, "setting"), strict=True):
        run = runs[f"1578c9f {name}"]
        for cell, score in zip(cells, scores, strict=True):
            check(numbers(cell), [run["before"][score], run["after"][score]], first)


def test_the_tutorial():
    runs = record("tutorial")["runs"]
    text = " ".join((DOCS / "tutorial.md").read_text().split())
    for name, shapes in (
        ("mine", r"falls from (\S+) to (\S+)\."),
        ("both", r"stays: (\S+) before, (\S+) after\."),
    ):
        match = re.search(r"`coverage` rises from (\S+) to (\S+), and `shapes` " + shapes, text)
        assert match is not None, name
        scores = ("eval/my_reward:coverage", "eval/shapes")
        check(
            match.groups(),
            [runs[name][when][score] for score in scores for when in ("0", "20")],
            name,
        )


@pytest.mark.parametrize("page", [README, DOCS / "index.md"], ids=lambda page: page.name)
def test_the_demo(page):
    evaluations = record("demo")["evaluations"]
    text = " ".join(page.read_text().split())
    for name in ("eval/reward", "eval/shapes/strict"):
        values = [
            evaluations[i][f"{name}{part}"] for i in ("0", "30") for part in ("", "/standard_error")
        ]
        estimates = [f"{mean:.3f} ± {error:.3f}" for mean, error in (values[:2], values[2:])]
        assert all(part in text for part in estimates) or (
            page != README and name == "eval/reward"
        ), (
            name,
            estimates,
        )
    others = [
        rows["20"]["eval/shapes/strict"] for rows in record("demo")["other_seeds"]["seeds"].values()
    ]
    at_20 = [evaluations["20"]["eval/shapes/strict"], *others]
    assert (
        page != README
        or "strict success is {:.3f}; seeds 1 and 2 have {:.3f} and {:.3f} there.".format(*at_20)
        in text
    )


def test_what_the_compilers_say():
    results = record("plans")
    names = {
        "FLUX.1-dev": "flux1",
        "FLUX.1-dev on 8 devices": "flux1",
        "FLUX.1-dev on 4 devices": "flux1",
        "SD3.5 Large": "sd3",
        "SD3.5 Large on 8 devices": "sd3",
        "SANA 1.6B": "sana",
        "Z-Image": "zimage",
        "FLUX.2-klein 4B": "flux2-klein-4b",
        "FLUX.2-klein 9B": "flux2-klein-9b",
        "SANA 0.6B at 512 px": "sana-600m",
        "SANA 0.6B at 512 px on 8 devices": "sana-600m",
        "SANA 1.6B on 8 devices": "sana",
        "SANA-1.5 1.6B": "sana-1.5-1.6b",
        "SANA-1.5 1.6B on 8 devices": "sana-1.5-1.6b",
        "SANA-1.5 4.8B": "sana-1.5-4.8b",
        "SANA-1.5 4.8B on 8 devices": "sana-1.5-4.8b",
        "SD3.5 Medium at 512 px": "sd3-medium",
        "SD3.5 Medium at 512 px on 8 devices": "sd3-medium",
        "Qwen-Image at 512 px on 8 devices": "qwen-image",
        "Wan 2.1 1.3B at 480 x 832 x 17": "wan-2.1",
        "Wan 2.2 5B at 704 x 1280 x 17": "wan-2.2",
    }
    for first, *cells in rows(DOCS / "compiled.md", "model and device"):
        model, device, *rule = first.split(", ")
        name = f"{names[model]}-{device.lower()}".replace(" v", "-v")
        if first == "SANA 1.6B on 8 devices, TPU v6e":
            name = "sana-8-tpu-v6e"  # the other record is of one v6e, for tests/targets
        printed = [number for cell in cells for number in numbers(cell)]
        if rule:
            short = results["wider rule"][name]
            check(
                printed,
                [short[k] for k in ("ratio", "ex", "re", "sc", "up", "rolls", "it", "pk", "us")],
                first,
            )
            continue
        plan = results["plans"][name]
        seconds = {phase["name"]: phase["seconds"] for phase in plan["phases"]}
        naive = plan["naive_scaling"]
        rest = seconds["encode"] + seconds["update"]
        rollout = (naive["seconds"] - rest) / (plan["seconds"] - rest)
        phases = [seconds[phase] for phase in ("explore", "regenerate", "score", "update")]
        memory = [plan["peak"] / 1e9, plan["usable"] / 1e9]
        check(printed[1:], [*phases, rollout, naive["seconds"] / plan["seconds"], *memory], first)
    (score,) = (
        phase for phase in results["plans"]["wan-2.1-h200"]["phases"] if phase["name"] == "score"
    )
    (decode,) = (call for call in score["programs"] if call["name"] == "decode_chunk")
    first_frame = decode["calls"] * decode["roofline"]["seconds"]
    every_frame = results["wan-2.1-h200, all frames"]["decode, seconds"]
    sentence = (
        f"For Wan 2.1 on an H200 this takes {first_frame:.0f} s per iteration, where decoding all "
        f"17 frames took {every_frame:.0f} s"
    )
    assert sentence in " ".join((DOCS / "compiled.md").read_text().split())


def test_int8_on_tpus():
    page = DOCS / "compiled.md"
    records = {
        (row["device"], row["preset"], *row["overrides"]): row
        for row in record("tpu-cycles")["rows"]
    }
    flux = [
        records[device, "flux1_sol_rl_hpsv2", "mesh.fsdp=8"] for device in ("tpu-v5e", "tpu-v6e")
    ]
    sana = [records["tpu-v5e", "sana_sol_rl_hpsv2", *rule] for rule in (("explore=fast",), ())]
    steps = [*flux, *sana]
    for (name, *cells), row in zip(rows(page, "model and devices"), steps, strict=True):
        explore, regenerate = (row[phase]["cycles"] / 1e6 for phase in ("explore", "regenerate"))
        printed = [number for cell in cells for number in numbers(cell)]
        check(printed, [explore, regenerate, regenerate / explore], name)

    v5e, v6e = (
        {
            name.removeprefix("kernel "): cycles / 1e6
            for name, cycles in row["explore"]["largest"].items()
        }
        for row in flux
    )
    attention = "jit(flash_attention) [12,24,1152,128]"
    sentence = (
        f"attention takes {v5e[attention]:.0f} million cycles of the exploring step on a v5e and "
        f"{v6e[attention]:.0f} million on a v6e"
    )
    assert sentence in " ".join(page.read_text().split())


def test_an_iteration_measured_on_an_h200():
    measurements = record("gpu-h200-flux1")
    steps = measurements["steps-flux1"]["result"]
    rollout = measurements["rollout-flux1"]["result"]
    updates = {
        "nft": measurements["update-flux1-nft"]["result"]["update"],
        "opsd": measurements["update-flux1"]["result"]["update"],
    }
    programs = [
        *((row["step_seconds"], row["step_plan"]) for row in (steps["regenerate"], steps["fp8"])),
        *(
            (rollout[name]["seconds"], rollout[name]["plan"]["seconds"])
            for name in ("decode_chunk", "score_images", "reward_gradient")
        ),
        *(
            (row["micro_batch_seconds"], row["plan"]["seconds"] / row["micro_batches"])
            for row in updates.values()
        ),
    ]
    page = DOCS / "compiled.md"
    tables = page.read_text().split("## Measured on an H200")[1].split("\n## ")[0]
    cells = [
        [cell.strip() for cell in line[1:-1].split("|")]
        for line in tables.splitlines()
        if line.startswith("| ")
    ]
    _, *printed, heading, naive, nft, opsd = cells
    assert heading[0] == "iteration"
    for (name, *row), (seconds, plan) in zip(printed, programs, strict=True):
        values = (1000 * seconds, 1000 * plan, seconds / plan)
        check([number for cell in row for number in numbers(cell)], values, name)

    calls = rollout["decode_chunk"]["calls"]
    image = rollout["decode_chunk"]["seconds"] + rollout["score_images"]["seconds"]
    candidates = steps["fp8"]["calls"]
    explored = [steps[name]["seconds"] * candidates for name in ("regenerate", "fp8")]
    kept = steps["regenerate"]["seconds"] * steps["regenerate"]["calls"]
    gradient = rollout["reward_gradient"]["seconds"] * rollout["reward_gradient"]["calls"]
    learned = {name: row["iteration_seconds"] for name, row in updates.items()}
    phases = [
        (explored[0], candidates * image, learned["nft"]),
        (explored[1], kept, calls * image, learned["nft"]),
        (explored[1], kept, calls * image, gradient, learned["opsd"]),
    ]
    for (name, *row), parts in zip((naive, nft, opsd), phases, strict=True):
        check([number for cell in row for number in numbers(cell)], [*parts, sum(parts)], name)
    sums = [sum(parts) for parts in phases]
    rollouts = [sum(parts[:-1]) for parts in phases[:2]]
    planned_image = sum(
        rollout[name]["plan"]["seconds"] for name in ("decode_chunk", "score_images")
    )
    planned = [
        candidates * (steps["regenerate"]["plan"]["seconds"] + planned_image),
        candidates * steps["fp8"]["plan"]["seconds"]
        + steps["regenerate"]["calls"] * steps["regenerate"]["plan"]["seconds"]
        + calls * planned_image,
    ]
    planned_update = updates["nft"]["iteration_plan"]
    planned_ratios = (
        planned[0] / planned[1],
        (planned[0] + planned_update) / (planned[1] + planned_update),
    )
    text = " ".join(page.read_text().split())
    for phrase in (
        f"makes the rollout {rollouts[0] / rollouts[1]:.2f} times as fast and the iteration "
        f"{sums[0] / sums[1]:.2f} times",
        "The rooflines of the same programs promise {:.2f} and {:.2f}.".format(*planned_ratios),
        f"An iteration of `opsd` takes {sums[2] / sums[1]:.2f} of the time of one of `nft`",
        f"cost {gradient:.0f} s, and the update saves {learned['nft'] - learned['opsd']:.0f} s",
    ):
        assert phrase in text, phrase
    costs = (DOCS / "objectives.md").read_text()
    assert f"an iteration takes {sums[2]:.0f} s, and one of `nft` {sums[1]:.0f} s" in " ".join(
        costs.split()
    )


def test_cheaper_iterations():
    seconds = record("plan-flux1-cheaper")["seconds"]
    printed = rows(DOCS / "compiled.md", "setting | explore")
    for (_, *cells), row in zip(printed, seconds.values(), strict=True):
        phases = ("explore", "regenerate", "score", "update", "iteration")
        check(cells, [row[phase] for phase in phases], row)
    text = " ".join((DOCS / "compiled.md").read_text().split())
    match = re.search(r"an iteration of `(explore=best [^`]*)` takes (\d+) s at the prices", text)
    assert match is not None
    config = resolve("flux1_sol_rl_hpsv2", match[1].split())
    steps = config.rollout.explore.num_steps
    price = find_prices("flux1-b200").iteration_seconds(config, "nvfp4", steps)
    check([match[2]], [price], match[1])


def test_the_plan_of_a_clip_on_eight_devices():
    plan = record("plan-wan-sequence")
    phases = plan["phases"]
    text = " ".join((DOCS / "guide.md").read_text().split())
    match = re.search(
        r"needs at most ([\d.]+) of (\d+) GB .* at least (\d+) s: exploration (\d+), .* "
        r"regeneration (\d+), scores (\d+) and the update (\d+), of which attention is (\d+) % "
        r"and collectives that nothing hides (\d+) %",
        text,
    )
    assert match is not None
    update = phases["update"]
    values = [
        max(phase["peak_gb"] for phase in phases.values()),
        plan["usable_gb"],
        plan["seconds"],
        *(phases[name]["seconds"] for name in ("explore", "regenerate", "score", "update")),
        100 * update["attention_share"],
        100 * update["links_share"],
    ]
    check(match.groups(), values, "guide.md")


def test_what_other_pages_say_of_the_plans():
    compiled = {
        first: [numbers(cell)[0] for cell in cells]
        for first, *cells in rows(DOCS / "compiled.md", "model and device")
    }
    flux = compiled["FLUX.1-dev, B200"]

    def prose(page):
        return " ".join(page.read_text().replace("\n>", " ").split())

    match = re.search(
        r"on a B200 these take at least (\d+), (\d+) and (\d+) s",
        choose := prose(DOCS / "choose.md"),
    )
    assert match is not None
    assert [*match.groups()] == [flux[1], flux[2], flux[4]]
    for name, model in (
        ("SANA", "SANA 1.6B"),
        ("FLUX.1", "FLUX.1-dev"),
        ("SD3.5 Large", "SD3.5 Large"),
    ):
        match = re.search(rf"(\d+)(?: to (\d+))? GB for {re.escape(name)}", choose)
        assert match is not None
        assert [*filter(None, match.groups())] == sorted(
            {compiled[f"{model}, {device}"][7] for device in ("B200", "H200")}
        ), name


def test_what_objectives_learn_and_how_an_sde_is_explored():
    results = record("objectives-tiny")
    page = DOCS / "objectives.md"
    paired = {first.strip("`"): cells for first, *cells in rows(page, "objective")}
    for name in ("awm", "mix_grpo", "dance_grpo", "flow_grpo", "dpo"):
        run = results["paired"][name]
        after, gain, errors, interval = paired[name]
        check(numbers(after), [run["mean"]], name)
        check(numbers(gain), [run["gain"], run["paired_standard_error_of_pictures"]], name)
        check(numbers(errors), [run["gain"] / run["paired_standard_error_of_pictures"]], name)
        check(numbers(interval), [run["half_interval_95"]], name)
    explored = results["exploring_an_sde"]["flow_grpo"]
    table = {first: cells for first, *cells in rows(page, "explored with")}
    for first, name in (
        ("NVFP4, 6 steps, the ODE", "nvfp4 6 steps, ODE"),
        (
            "NVFP4, 6 steps, the SDE, draws numbered by its own steps",
            "nvfp4 6 steps, SDE, draws numbered by its own steps",
        ),
        (
            "NVFP4, 6 steps, the SDE on the same Brownian path (what we do)",
            "nvfp4 6 steps, SDE on the same Brownian path",
        ),
        ("NVFP4, 10 steps, the SDE", "nvfp4 10 steps, SDE"),
    ):
        check(table[first], [explored[name][key] for key in ("spearman", *RANKS)], first)


def test_the_strength_of_dpo():
    study = record("study-dpo-beta")
    table = rows(DOCS / "objectives.md", "`beta` | held-out")
    pairs = {pair["against"]: pair["final"] for pair in study["compared"]}
    assert len(table) == len(study["arms"]) == 4
    for beta, after, gain, below, loss in table:
        name = f"beta-{beta}"
        check(numbers(after), study["arms"][name]["scores"]["reward"], name)
        check(numbers(gain), study["arms"][name]["gain"], name)
        check(numbers(below), pairs.get(name, []), name)
        losses = [values[1:] for run, values in study["policy_loss"].items() if run[:-2] == name]
        check(numbers(loss), [sum(map(sum, losses)) / sum(map(len, losses))], name)


def test_the_papers_comparisons():
    study = record("study-paper")
    page = DOCS / "study.md"
    for name, iterations, *cells in rows(page, "arm | iterations"):
        arm = study["arms"][name.strip("`")]
        assert len(arm["seeds"]) == 4
        scores = [
            arm["scores"]["reward"],
            arm["scores"]["shapes/strict"],
            arm["at_equal_cost"]["reward"],
        ]
        for cell, estimate in zip((cells[0], cells[1], cells[4]), scores, strict=True):
            check(numbers(cell), estimate, name)
        check([iterations, cells[2]], [arm["iterations"], arm["cost"]], name)
        assert cells[3] == f"{arm['network_evaluations']:,}"
    pairs = {(pair["arm"], pair["against"]): pair for pair in study["compared"]}
    for names, share, cost, equal, *speed in rows(page, "arm, against"):
        pair = pairs[tuple(re.findall("`(.*?)`", names))]
        assert agrees(cost, pair["cost_share"])
        check(signed(share), [100 * value for value in pair["final_share"]], names)
        check(signed(equal), pair["at_equal_cost"]["reward"], names)
        for cell, estimate in zip(speed, pair["speed_up"].values(), strict=True):
            check(numbers(cell), [] if estimate[0] is None else estimate, names)


def test_a_pool_under_each_objective():
    for heading, name, count in (
        ("objective, four seeds", "study-objectives", 4),
        ("objective | explored", "study-objectives-quick", 6),
    ):
        study = record(name)
        table = {first.strip("`"): cells for first, *cells in rows(DOCS / "study.md", heading)}
        pairs = {pair["arm"]: pair for pair in study["compared"]}
        assert len(table) == count
        assert table.keys() == pairs.keys() | {"nft"}
        for arm, pair in pairs.items():
            rewards = [study["arms"][of]["scores"]["reward"] for of in (arm, f"{arm}-plain")]
            estimates = [
                *rewards,
                pair["final"],
                [pair["cost_share"]],
                pair["at_equal_cost"]["reward"],
            ]
            for cell, estimate in zip(table[arm], estimates, strict=True):
                check(signed(cell), estimate, (name, arm))
    runs = record("study-paper")["runs"]

    def of_arm(arm):
        return (run for name, run in runs.items() if name.startswith(arm))

    def after_16(arm):
        return np.array([run["reward"][run["iterations"].index(16)] for run in of_arm(arm)])

    explored = after_16("sol_rl")
    plain = after_16("diffusionnft")
    cells = next(
        cells
        for first, *cells in rows(DOCS / "study.md", "objective, four seeds")
        if first == "`nft`"
    )
    for cell, x in zip(cells, (explored, plain, explored - plain), strict=False):
        check(signed(cell), [x.mean(), x.std(ddof=1) / len(x) ** 0.5], "nft")


def test_a_larger_pool():
    study = record("study-pool")
    page = DOCS / "study.md"
    table = list(rows(page, "candidates | held-out"))
    assert [row[0] for row in table] == ["24", "48", "96"]
    for count, *cells in table:
        arm = study["arms"][f"n{count}"]
        assert len(arm["seeds"]) == 4
        fidelity = [[arm["fidelity"]["spearman"][part][0]] for part in ("first", "last")]
        scores = [
            arm["scores"]["reward"],
            arm["scores"]["shapes/strict"],
            [arm["cost"]],
            arm["at_equal_cost"]["reward"],
        ]
        for cell, estimate in zip(cells, scores + fidelity, strict=True):
            check(numbers(cell), estimate, count)
    pairs = {f"{pair['arm'][1:]} over {pair['against'][1:]}": pair for pair in study["compared"]}
    for first, *cells in rows(page, "pools"):
        pair = pairs[first]
        estimates = [
            pair["final"],
            [100 * value for value in pair["final_share"]],
            pair["at_equal_cost"]["reward"],
        ]
        for cell, estimate in zip(cells, estimates, strict=True):
            check(signed(cell), estimate, first)


def arms_of(name: str) -> dict[str, list]:
    """The runs of a study that holds the arm `nft`, by arm, one per seed."""
    study = record(name)
    seeds = study["plan"]["seeds"]
    return {
        arm: [study["runs"][f"{arm}-{seed}"] for seed in seeds] for arm in study["plan"]["arms"]
    }


def gain_over_nft(arms, name: str, key: str, at_equal_cost: bool) -> tuple[float, float]:
    """Mean and standard error, over seeds, of a final score minus that of `nft`: its final score,
    or its score at the cost of the arm.
    """
    others = [
        np.interp(run["cost"][-1], nft["cost"], nft[key]) if at_equal_cost else nft[key][-1]
        for run, nft in zip(arms[name], arms["nft"], strict=True)
    ]
    gains = np.array([run[key][-1] for run in arms[name]]) - others
    return gains.mean(), np.std(gains, ddof=1) / math.sqrt(len(gains))


@pytest.mark.parametrize(
    ("name", "courses", "gains"),
    [
        ("study-learning", "after iteration | `nft`", "against `nft` |"),
        (
            "study-learning-sd3",
            "after iteration, on `tiny-sd3`",
            "against `nft`, on `tiny-sd3`",
        ),
    ],
)
def test_the_tables_of_the_gradient_of_the_reward(name, courses, gains):
    arms = arms_of(name)
    page = DOCS / "study.md"
    table = rows(page, courses)
    assert [int(iteration) for iteration, *_ in table] == arms["nft"][0]["iterations"]
    for i, (_, *cells) in enumerate(table):
        means = [
            np.mean([run[key][i] for run in arms[arm]])
            for arm in ("nft", "opsd", "draft")
            for key in ("cost", "reward", "shapes")
        ]
        check(cells, means, i)
    expected = [(arm, equal) for arm in ("opsd", "draft") for equal in (False, True)]
    for (first, *cells), (arm, equal) in zip(rows(page, gains), expected, strict=True):
        cost = arms[arm][0]["cost"][-1]
        share = cost / arms["nft"][0]["cost"][-1]
        phrase = (
            f"equal cost, {cost:.0f} s" if equal else f"20 iterations, at {share:.3f} of the cost"
        )
        assert first.startswith(f"`{arm}`"), first
        assert phrase in first, first
        for cell, key in zip(cells, ("reward", "shapes"), strict=True):
            check(signed(cell), gain_over_nft(arms, arm, key, equal), (first, key))


def test_the_gradient_of_the_reward():
    study = record("study-learning")
    arms = arms_of("study-learning")
    nft = arms["nft"]
    page = DOCS / "study.md"
    text = " ".join(page.read_text().split())
    iterations = nft[0]["iterations"][-1]
    each = {name: runs_of[0]["cost"][-1] / iterations for name, runs_of in arms.items()}
    share = each["opsd"] / each["nft"]
    reward, shapes = (gain_over_nft(arms, "awm", key, False) for key in ("reward", "shapes"))
    for phrase in (
        f"of `opsd` counts {each['opsd']:.1f} s, {share:.2f} of the {each['nft']:.1f} s of `nft`",
        f"learns the trained reward at {share:.3f} of the cost",
        "rises to {:.3f} ± {:.3f}".format(*study["arms"]["nft"]["scores"]["shapes"]),
        "{:+.3f} ± {:.3f} on the reward, {:+.3f} ± {:.3f} on `shapes`".format(*reward, *shapes),
    ):
        assert phrase in text, phrase


def test_the_reward_followed_through_several_steps():
    results = record("draft-steps")
    one, three = (results["runs"][f"K={k} seed 0"] for k in (1, 3))
    page = DOCS / "objectives.md"
    table = rows(page, "after iteration | K = 1")
    assert [int(iteration) for iteration, *_ in table] == three["iterations"]
    for i, (iteration, *cells) in enumerate(table):
        values = [run[key][i] for run in (one, three) for key in ("reward", "shapes")]
        check(cells, values, iteration)
    change = np.subtract(three["training reward"], one["training reward"])[1:]
    error = np.std(change, ddof=1) / math.sqrt(len(change))
    seconds = results["seconds of an iteration"].values()
    shares = [price["K=3"] / price["K=1"] for price in seconds]
    half = three["iterations"].index(10)
    equal = {
        key: (three[key][half], np.interp(three["cost"][half], one["cost"], one[key]))
        for key in ("reward", "shapes")
    }
    text = " ".join(page.read_text().split())
    for phrase in (
        f"differs by {change.mean():+.4f} ± {error:.4f}",
        f"counts {shares[0]:.2f} times the price",
        f"and {shares[1]:.2f} times with two-stage exploration",
        "{:.3f} against {:.3f} for the reward".format(*equal["reward"]),
        "{:.3f} against {:.3f} for `shapes`".format(*equal["shapes"]),
    ):
        assert phrase in text, phrase


def test_the_gradient_of_the_reward_on_another_model():
    arms = arms_of("study-learning-sd3")
    page = DOCS / "study.md"
    text = " ".join(page.read_text().split())
    risen = {
        name: [run["shapes"][-1] - run["shapes"][0] for run in runs] for name, runs in arms.items()
    }
    largest = max(abs(value) for name in ("opsd", "draft") for value in risen[name])
    gained = np.mean([run["reward"][-1] - run["reward"][0] for run in arms["nft"]])
    sana = arms_of("study-learning")["nft"]
    sana_gain = np.mean([run["reward"][-1] - run["reward"][0] for run in sana])
    reward, shapes = (gain_over_nft(arms, "awm", key, False) for key in ("reward", "shapes"))
    for phrase in (
        f"stays within {largest:.3f} of the base, and in those of `nft` it rises by "
        f"{np.mean(risen['nft']):.3f}",
        "{:+.3f} ± {:.3f} on the reward, {:+.3f} ± {:.3f} on `shapes`".format(*reward, *shapes),
        f"`nft` gains {gained:.3f} of the trained reward in 20 iterations, where `tiny-sana` gains "
        f"{sana_gain:.3f}",
    ):
        assert phrase in text, phrase


FRONTIER_PRICES = ("compared", *(f"compared at {p}" for p in ("sana-b200", *TPU_PRICES)))


def equal_cost_gain(study: dict, key: str, arm: str, against: str) -> list[float]:
    """Mean and standard error of an arm's reward minus another's at equal cost."""
    (pair,) = (p for p in study[key] if (p["arm"], p["against"]) == (arm, against))
    return pair["at_equal_cost"]["reward"]


def check_frontier(page, heading: str, study: dict) -> None:
    """Checks a table of a frontier: one row per arm, with its gains at each of the prices."""
    table = rows(page, heading)
    assert {name.strip("`") for name, *_ in table} == study["arms"].keys()
    for first, _, *cells in table:
        name = first.strip("`")
        arm = study["arms"][name]
        scores = [number for key in ("reward", "shapes/strict") for number in arm["scores"][key]]
        gains = [
            number
            for key in FRONTIER_PRICES
            if name != "diffusionnft"
            for number in equal_cost_gain(study, key, name, "diffusionnft")
        ]
        printed = [number for cell in cells for number in signed(cell)]
        check(printed, [arm["iterations"], arm["cost"], *scores, *gains], name)


def test_which_changes_pay_at_equal_cost():
    study = record("study-frontier")
    page = DOCS / "study.md"
    check_frontier(page, "arm | setting | iterations", study)

    def against_sol_rl(name: str, key: str) -> str:
        (pair,) = (p for p in study["compared"] if (p["arm"], p["against"]) == (name, "sol_rl"))
        gains = pair["final"] if key == "final" else pair["at_equal_cost"]["reward"]
        return "{:+.3f} ± {:.3f}".format(*gains)

    runs = study["runs"]
    gains = np.array(
        [
            runs[f"combined-{seed}"]["reward"][-1] - runs[f"kept8-{seed}"]["reward"][-1]
            for seed in study["plan"]["seeds"]
        ]
    )
    error = np.std(gains, ddof=1) / math.sqrt(len(gains))
    text = " ".join(page.read_text().split())
    for phrase in (
        f"equally many iterations differs by {against_sol_rl('kl', 'final')}",
        f"({against_sol_rl('clip2', 'equal')} against `sol_rl`)",
        f"exploring steps ({against_sol_rl('steps4', 'equal')} at equal cost)",
        f"rewards differ by {against_sol_rl('best', 'equal')} at equal cost",
        f"ends {gains.mean():+.3f} ± {error:.3f} above `kept8`",
    ):
        assert phrase in text, phrase


def priced_courses(
    study: dict, prices: Prices, precision: str, *overrides: str
) -> dict[str, list[Course]]:
    """The recorded runs of a study by arm, with other prices, as if the exploring arms had explored
    in the format `precision`, and as if iterations of all arms cost what they do with `overrides`.
    """
    courses: dict[str, list[Course]] = {}
    for name, run in study["runs"].items():
        arm, seed = name.rsplit("-", 1)
        config = resolve("tiny", (*study["plan"]["arms"][arm], *overrides))
        explores = config.family == "sol_rl"
        seconds = prices.iteration_seconds(
            config, precision if explores else "bf16", config.rollout.explore.num_steps
        )
        iterations = np.array(run["iterations"])
        scores = {"reward": np.array(run["reward"])}
        course = Course(int(seed), iterations, seconds * iterations, scores, 0, {})
        courses.setdefault(arm, []).append(course)
    return courses


def repriced(
    study: dict, prices: Prices, precision: str, pairs: list[dict], *overrides: str
) -> list[dict]:
    """Compares the recorded runs of a study with the costs of `priced_courses`."""
    courses = priced_courses(study, prices, precision, *overrides)
    return compare(courses, [(pair["arm"], pair["against"]) for pair in pairs])[1]


@pytest.mark.parametrize("name", ["study-frontier", "study-frontier-sd3"])
@pytest.mark.parametrize("key", ["sana-b200", "flux1-tpu-v5e", "sana-tpu-v5e"])
def test_the_frontier_at_other_prices(name, key):
    study = record(name)
    recorded = study[f"compared at {key}"]
    if key.endswith("b200"):
        pairs = repriced(study, find_prices(key), "nvfp4", recorded)
    else:
        prices = prices_of(record("plans")["plans"][key])
        pairs = repriced(study, prices, "int8", recorded)
    for pair, expected in zip(pairs, recorded, strict=True):
        assert pair["cost_share"] == pytest.approx(expected["cost_share"], rel=1e-5)
        gains = (pair["at_equal_cost"]["reward"], expected["at_equal_cost"]["reward"])
        np.testing.assert_allclose(*gains, atol=1e-5)


def branch_share_of_an_iteration() -> float:
    """The unquantized branch of `correction_rank=32` in FLUX.1: 3.1 % of the multiplications of a
    quantized step, in BF16, as a share of an iteration of `combined` on `tiny-sd3`.
    """
    prices = find_prices("flux1-b200")
    config = resolve("tiny", record("study-frontier-sd3")["plan"]["arms"]["combined"])
    steps = config.rollout.explore.num_steps
    quantized = steps - config.rollout.explore.exact_steps
    pool = config.train.num_prompts * config.rollout.candidates
    branch = pool * quantized * 0.031 * prices.network["bf16"]
    return branch / prices.iteration_seconds(config, "nvfp4", steps)


def test_exploration_pays_on_tiny_sd3():
    study = record("study-frontier-sd3")
    page = DOCS / "study.md"
    check_frontier(page, "arm, on `tiny-sd3`", study)

    def gain(key: str, arm: str, against: str = "diffusionnft") -> list[float]:
        return equal_cost_gain(study, key, arm, against)

    def interval(key: str, arm: str, against: str = "diffusionnft") -> str:
        """The 95 % interval of four seeds, by Student's t with three degrees of freedom."""
        mean, error = gain(key, arm, against)
        return f"{mean - 3.182 * error:+.3f} to {mean + 3.182 * error:+.3f}"

    def times_as_expensive(key: str) -> str:
        (pair,) = (p for p in study[key] if (p["arm"], p["against"]) == ("sol_rl", "diffusionnft"))
        iterations = [study["arms"][arm]["iterations"] for arm in ("diffusionnft", "sol_rl")]
        return f"{pair['cost_share'] * iterations[0] / iterations[1]:.2f} times"

    b200, sana, v5e, _ = FRONTIER_PRICES
    mean, error = gain(sana, "sol_rl")
    slower, runs = study["one seed with another learning rate"], study["runs"]
    ends = {
        arm: [f"{run['reward'][-1]:.3f}" for run in (slower[arm], runs[f"{arm}-0"])]
        for arm in ("sol_rl", "diffusionnft")
    }
    ranks = {
        arm: f"{study['arms'][arm]['fidelity']['spearman']['last'][0]:.2f}"
        for arm in ("sol_rl", "combined", "combined12", "combined8")
    }
    options = ("nvfp4", study["compared"], "algorithm.kl_fraction=0.25")
    cheaper_penalty = {"compared": repriced(study, find_prices("flux1-b200"), *options)}

    def against_small_groups(study: dict, key: str) -> list[str]:
        """The gains of `combined12` over DiffusionNFT with groups of 8 and of 12."""
        return [
            "{:+.3f} ± {:.3f}".format(*equal_cost_gain(study, key, "combined12", plain))
            for plain in ("diffusionnft8", "diffusionnft12")
        ]

    groups_of_8, groups_of_12 = against_small_groups(study, b200)
    text = " ".join(page.read_text().split())
    for phrase in (
        f"`combined12` is {groups_of_8} ahead of `diffusionnft8` and "
        "{:+.3f} ± {:.3f} ahead of `diffusionnft`.".format(*gain(b200, "combined12")),
        f"the intervals are {interval(b200, 'combined12', 'diffusionnft8')} and "
        f"{interval(b200, 'combined12')}.",
        f"{groups_of_12}, with an interval of {interval(b200, 'combined12', 'diffusionnft12')}.",
        "would be {} ahead of `diffusionnft8` and {} ahead of `diffusionnft12`".format(
            *against_small_groups(cheaper_penalty, "compared")
        ),
        "On a v5e, `combined12` is {} ahead of `diffusionnft8` and {} ahead of `diff".format(
            *against_small_groups(study, v5e)
        ),
        "on a B200 it is at {} and {} against them".format(*against_small_groups(study, sana)),
        f"is behind `diffusionnft` by {abs(mean / error):.1f} standard errors",
        f"of `sol_rl` {times_as_expensive(b200)} as expensive",
        f"and {times_as_expensive(sana)} at SANA's",
        "`diffusionnft12` is {:+.3f} ± {:.3f} ahead of".format(*gain(b200, "diffusionnft12")),
        "and `diffusionnft8` {:+.3f} ± {:.3f}.".format(*gain(b200, "diffusionnft8")),
        "at {:+.3f} ± {:.3f} against `diffusionnft8`".format(
            *gain(b200, "combined8", "diffusionnft8")
        ),
        f"falls to {ranks['combined8']} in the last quarter of the iterations, that of "
        f"`combined12` to {ranks['combined12']}.",
        "on a B200 by {:.3f} ± {:.3f} (".format(*gain(b200, "combined"))
        + f"{interval(b200, 'combined')} with",
        "on a v5e by {:.3f} ± {:.3f}.".format(*gain(v5e, "combined")),
        "on a B200 by {:.3f} ± {:.3f} and in all four seeds".format(*gain(b200, "sol_rl")),
        f"its interval, {interval(b200, 'sol_rl')}, includes 0",
        "`combined` gains {:+.3f} ± {:.3f} over".format(*gain(b200, "combined", "sol_rl")),
        f"correlation is {ranks['combined']} in the last quarter of the iterations, that of "
        f"`sol_rl` {ranks['sol_rl']}",
        f"`sol_rl` ends at {ends['sol_rl'][0]} and `diffusionnft` at {ends['diffusionnft'][0]}. "
        f"With 2e-3, the same seed ends at {ends['sol_rl'][1]} and {ends['diffusionnft'][1]}",
    ):
        assert phrase in text, phrase
    assert 0.015 < branch_share_of_an_iteration() < 0.025
    advice = " ".join((DOCS / "choose.md").read_text().split())
    over_the_best = gain(b200, "combined12", "diffusionnft8")
    assert "it is {:.3f} ± {:.3f} of held-out".format(*over_the_best) in advice
    plain, *others = (
        [study["runs"][f"{arm}-{seed}"]["reward"][-1] for seed in study["plan"]["seeds"]]
        for arm in ("diffusionnft", "sol_rl", "combined")
    )
    assert all(np.greater(rewards, plain).all() for rewards in others)


def test_groups_of_8_with_and_without_exploration_on_tiny_sana():
    study = record("study-frontier-sana8")
    courses = priced_courses(study, find_prices("flux1-b200"), "nvfp4")
    (pair,) = study["compared"]
    gains = [
        reward_at_cost(exploring, 0.75 * pair["at_equal_cost"]["cost"])
        - reward_at_cost(plain, 0.75 * pair["at_equal_cost"]["cost"])
        for exploring, plain in zip(courses["combined8"], courses["diffusionnft8"], strict=True)
    ]
    ends = {
        arm: "{:.3f} ± {:.3f}".format(*study["arms"][arm]["scores"]["reward"]) for arm in courses
    }
    fallen = min((course.reward for course in courses["combined8"]), key=lambda r: r[-1])
    text = " ".join((DOCS / "study.md").read_text().split())
    for phrase in (
        f"ends at {ends['combined8']} after 40 iterations, and `diffusionnft8` at "
        f"{ends['diffusionnft8']}.",
        "is {:+.3f} ± {:.3f} at equal cost, and".format(*pair["at_equal_cost"]["reward"]),
        "and {:+.3f} ± {:.3f} after three quarters of it".format(*comparisons.estimate(gains)),
        f"falls from {fallen[-2]:.3f} to {fallen[-1]:.3f} in",
    ):
        assert phrase in text, phrase


def test_a_proxy_reward():
    study = record("study-proxy")
    page = DOCS / "judges.md"
    names = ("trained_reward", "proxy_reward", "unexplored")
    table = rows(page, "candidates ranked by | images")
    for name, (first, _, *cells) in zip(names, table, strict=True):
        scores = study["arms"][name]["scores"]
        for cell, score in zip(cells, ("reward", "shapes/strict"), strict=True):
            check(numbers(cell), scores[score], first)
    differences = [pair["final"] for pair in study["compared"]]
    text = page.read_text()
    for mean, error in differences:
        assert f"{mean:+.3f} ± {error:.3f}" in text
    settings = study["ranks"]["settings"]
    *ranked, perfect = rows(page, "candidates ranked by | explored in")
    for setting, (first, form, *cells) in zip(settings, ranked, strict=True):
        assert first.startswith(f"`{setting['ranked_by']}`")
        assert form == f"{setting['precision'].upper()}, {setting['steps']} steps"
        keys = ("spearman", "true_rank_best", "true_rank_worst")
        check(cells, [setting[key] for key in keys], first)
    assert perfect[3:] == [str(settings[0][f"perfect_rank_{end}"]) for end in ("best", "worst")]
    for name in names[:2]:
        for mean, _ in study["arms"][name]["fidelity"]["spearman"].values():
            assert f"{mean:.3f}" in text


def test_more_devices():
    def place(row):
        return (row["device"], row["devices"], *sorted(row["mesh"].items()))

    records = {place(row): row for row in record("scaling")["rows"]}
    for first, mesh, *cells in rows(DOCS / "compiled.md", "devices"):
        *count, device = first.replace("TPU v", "tpu-v").split()
        total = math.prod(int(part) for part in count if part != "x")
        axes = sorted((part.split()[0], int(part.split()[1])) for part in mesh.split(", ") if part)
        row = records[(device.lower(), total, *axes)]
        for cell, phase in zip(cells[:3], ("explore", "regenerate", "update"), strict=True):
            costs = row["phases"][phase]
            busy = 100 * costs["messages"]["seconds"] / costs["seconds"]
            printed = numbers(cell)
            check(printed, [costs["seconds"], busy][: len(printed)], (first, phase))


def test_pool_sizes_by_prompt():
    pools = record("exploration-tried")["pools"]
    equal = pools["equal"]["spread"]
    first, *others = rows(DOCS / "exploration.md", "pool sizes")
    check(numbers(first[1]), pools["equal"].values(), "equal pools")
    names = ("proportional", "inverse", "random")
    for (name, spread, against), key in zip(others, names, strict=True):
        values = pools["differences"][key]
        check(numbers(spread), [equal + values["difference"]], name)
        check(signed(against), values.values(), name)
    text = " ".join((DOCS / "exploration.md").read_text().split())
    match = re.search(r"the best 6 of 48 have (\S+) on average and the worst (\S+)\. ", text)
    assert match is not None
    check(match.groups(), [pools["widest third"][end] for end in ("best", "worst")], "widest")


def test_rungs_of_exploration():
    rungs = record("exploration-tried")["rungs"]
    page = DOCS / "exploration.md"
    prices = ("flux1-b200", "sana-b200")
    for (name, spread, *against), row in zip(
        rows(page, "candidates and steps"), rungs["rows"], strict=True
    ):
        assert numbers(name) == [str(number) for rung in row["rungs"] for number in rung]
        first = row["flux1-b200"]
        check(numbers(spread), [first[key] for key in ("spread", *RANKS)], name)
        for cell, price in zip(against, prices, strict=True):
            values = row[price]
            pool = min(values["pool"], 96)
            check(signed(cell), [pool, values["difference"], values["standard_error"]], name)
            assert ("*" in cell) == (values["pool"] > 96)
    text = " ".join(page.read_text().split())
    match = re.search(r"rounds of 96 and 36 add (\S+) ± (\S+) to it", text)
    assert match is not None
    check(match.groups(), rungs["[[96, 3], [36, 3]] minus [[96, 4]]"].values(), "rungs")
    match = re.search(r"ranks at (\S+), (\S+) and (\S+), and after all six at (\S+) \(S", text)
    assert match is not None
    correlations = [row["spearman"] for row in rungs["spearman after steps"].values()]
    check(match.groups(), correlations, "Spearman")


def test_sizes_of_exploration():
    sizes = record("exploration-tried")["sizes"]
    page = DOCS / "exploration.md"
    pipelines = [sizes["pipelines"][name] for name in ("tiny-sana", "tiny-flux", "tiny-sd3")]
    count = 0
    for name, cost, *cells in rows(page, "exploration in BF16"):
        steps, side, _ = map(int, numbers(name))
        check([cost], [steps / 10 * (side / 32) ** 2], name)
        for cell, pipeline in zip(cells, pipelines, strict=True):
            values = pipeline[name]
            check(signed(cell), [values["spearman"], values["standard_error"]], name)
        count += 1
    assert count == 6
    text = " ".join(page.read_text().split())
    match = re.search(r"averaged down to 16 x 16, rank at (\d\.\d+)\. ", text)
    assert match is not None
    check(match.groups(), [sizes["averaged down"]["16 x 16"]["spearman"]], "averaged down")


def test_frames_of_exploration():
    explorations = record("exploration-tried")["frames"]["explored"]
    table = rows(DOCS / "exploration.md", "exploration | latent frames times steps")
    assert [name for name, *_ in table] == list(explorations)
    for name, work, cell in table:
        frames, steps = (int(number) for number in re.findall(r"\d+", name)[:2])
        latent_frames = (frames + 1) // 2
        assert int(work) == latent_frames * steps, name
        check(signed(cell), explorations[name].values(), name)


def test_the_monitor():
    runs = record("monitor")["runs"]
    text = " ".join((DOCS / "exploration.md").read_text().split())
    late = {name: run["spearman"][8:] for name, run in runs.items()}
    means, least = (
        [f(late[name]) for name in ("with", "without")] for f in (lambda x: sum(x) / len(x), min)
    )
    match = re.search(
        r"mean correlation is (\S+) with the floor and (\S+) without; "
        r"the smallest is (\S+) and (\S+)\.",
        text,
    )
    assert match is not None
    check(match.groups(), [*means, *least], "monitor")
