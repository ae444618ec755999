"""The report: its numbers are the ledger's and the record's, what a run says never becomes markup,
and a browser shows it.
"""

import base64
import io
import json
import re
import shutil
import subprocess
import weakref
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from solrl_jax.config.serialization import to_yaml
from solrl_jax.errors import InputError
from solrl_jax.runs import image_files, ledger, metrics, report
from solrl_jax.runs.metrics import Metrics
from solrl_jax.runs.report_figures import Line, curves
from tests.small import small_config

HOSTILE = "</script><script>document.title='owned'</script><b>a red & blue circle</b>"
PROMPTS = (HOSTILE, "two <i>small</i> squares")
N = 8
KEPT = 4
SETTING = (
    "2 prompts (sha256 0123456789ab) x 3 pictures of 32 x 32;"
    " euler, 10 steps, guidance 1, bf16, seed 0"
)
PLANS = Path(__file__).parents[2] / "benchmarks" / "plans.json"


def make_run(
    folder: Path, *, seed: int = 0, iterations: int = 3, overrides: tuple[str, ...] = ()
) -> Path:
    """A run directory as training leaves it, of drawn numbers."""
    rng = np.random.default_rng(seed)
    folder.mkdir()
    (folder / "config.yaml").write_text(
        to_yaml(small_config(folder, f"seed={seed}", "reward.eval_only=['tiny-clip']", *overrides))
    )
    (folder / "run.json").write_text(
        json.dumps({"devices": "1 x <cpu>", "packages": {"jax": "1"}, "evaluation": SETTING})
    )
    with Metrics(folder, resume_after=-1) as record:
        record.log(0, evaluation(rng))
        for iteration in range(1, iterations + 1):
            row = {
                "pool/reward": rng.random(),
                "kept/reward": rng.random(),
                "fidelity/spearman": rng.random(),
            }
            row |= {
                "seconds": 1.5,
                "seconds/explore": 1.0,
                "seconds/update": 0.5,
                "images_per_second/explore": 96.0,
            }
            row |= {
                "skipped_micro_batches": 1.0,
                "nonfinite_rewards": 2.0,
                "loss/kl": np.nan if iteration == 2 else 0.1,
            }
            record.log(iteration, row | (evaluation(rng) if iteration == iterations else {}))
            columns = candidates(rng, iteration)
            ledger.write(folder / "ledger", iteration, columns)
    for iteration in (0, iterations):
        cells = [{"prompt": prompt, "right": bool(i % 2)} for prompt in PROMPTS for i in range(2)]
        save(folder / "pictures" / f"iteration-{iteration:06d}.png", rng, cells)
    rank = columns["rank"].reshape(2, N)
    cells = [
        {
            "prompt": prompt,
            "candidate": int(np.flatnonzero(rank[row] == place)[0]),
            "phase": phase,
            "right": place == 0,
        }
        for row, prompt in enumerate(PROMPTS)
        for phase in ("explored", "regenerated")
        for place in (0, N - 1)
    ]
    save(folder / "pictures" / f"pool-{iterations:06d}.png", rng, cells)
    return folder


def evaluation(rng) -> dict[str, float]:
    names = ("reward", "shapes", "shapes/strict", "tiny-clip")
    return {
        f"eval/{name}{what}": rng.random() for name in names for what in ("", "/standard_error")
    }


def candidates(rng, iteration: int) -> dict:
    proxy = rng.random((2, N), np.float32)
    rank = np.argsort(np.argsort(-proxy, 1), 1)
    proxy.reshape(-1)[rank.reshape(-1) == N - 1] = np.nan
    kept = ((rank < KEPT / 2) | (rank >= N - KEPT / 2)).reshape(-1)
    return {
        "prompt": np.repeat(PROMPTS, N),
        "prompt_uid": np.repeat([1, 2], N),
        "candidate": np.tile(np.arange(N), 2),
        "seed": rng.integers(2**63, 2**64, 2 * N, np.uint64),
        "precision": "nvfp4",
        "steps": 6,
        "proxy_reward": proxy.reshape(-1),
        "rank": rank.reshape(-1),
        "kept": kept,
        "regenerated_reward": np.ma.masked_array(rng.random(2 * N, np.float32), ~kept),
        "advantage": np.ma.masked_array(rng.standard_normal(2 * N), ~kept),
        "policy_revision": iteration,
    }


def save(path: Path, rng, cells) -> None:
    image_files.save_grid(
        path, rng.random((len(cells), 16, 16, 3)), 2, [cell["prompt"] for cell in cells], cells
    )


class Page(HTMLParser):
    """The scripts of a page as a browser separates them, and whatever it would load."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.scripts = []
        self.tags = []
        self.loads = []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.loads += [value for name, value in attributes if name in ("src", "href")]
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data):
        if self.tags and self.tags[-1] == "script":
            self.scripts[-1] += data

    @property
    def data(self) -> dict:
        return json.loads(self.scripts[0])


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = make_run(tmp_path_factory.mktemp("runs") / "demo")
    (folder / "plan.json").write_text(
        json.dumps(json.loads(PLANS.read_text())["plans"]["flux1-b200"])
    )
    report.write([folder], folder / report.NAME, plan=folder / "plan.json")
    return folder


def test_the_numbers_are_the_ledgers_and_the_records(run):
    (run_data,) = Page(run / report.NAME).data["runs"]
    assert {pictured["size"] for pictured in (*run_data["grids"], *run_data["pools"])} == {
        "16 x 16"
    }
    rows = metrics.read(run)
    for name, column in run_data["metrics"].items():
        assert column == [row.get(name) for row in rows], name
    table = pq.read_table(run / "ledger")
    columns = run_data["ledger"]["columns"]
    texts = run_data["ledger"]["texts"]
    assert len(table) == 3 * 2 * N
    for name, shown_column in columns.items():
        for ours, value in zip(shown_column, table[name].to_pylist(), strict=True):
            if name in ("prompt", "precision"):
                assert texts[ours] == value
            elif name == "seed":
                assert ours == str(value)
            elif isinstance(value, float) and np.isnan(value):
                assert ours == "nan"
            else:
                assert ours == value or np.float32(ours) == np.float32(value), name
    assert run_data["ledger"]["iterations"] == [1, 2, 3]
    figures = {
        figure["metric"]: figure["lines"] for figure in Page(run / report.NAME).data["figures"]
    }
    assert figures["loss/kl"][0]["x"] == [1, 3]  # what is not finite is left out
    assert figures["eval/reward"][0]["y"] == [row["eval/reward"] for row in (rows[0], rows[3])]
    assert figures["eval/reward"][0]["error"] == [
        row["eval/reward/standard_error"] for row in (rows[0], rows[3])
    ]
    assert "eval/shapes" not in figures  # the reward itself
    assert {
        "eval/shapes/strict",
        "eval/tiny-clip",
        "fidelity/spearman",
        "images_per_second/explore",
    } <= figures.keys()


def test_a_picture_is_the_one_that_was_saved(run):
    (run_data,) = Page(run / report.NAME).data["runs"]
    assert [grid["iteration"] for grid in run_data["grids"]] == [0, 3]
    sheet = np.asarray(Image.open(run / "pictures" / "iteration-000003.png"))
    cell = run_data["grids"][1]["cells"][1]
    assert (cell["prompt"], cell["right"]) == (PROMPTS[0], True)
    pixels = np.asarray(image_of(cell))
    assert (pixels == sheet[4:20, 24:40]).all()
    assert [cell["phase"] for cell in run_data["pools"][0]["cells"]] == [
        "explored",
        "explored",
        "regenerated",
        "regenerated",
    ] * 2


def test_a_grid_of_an_earlier_run_names_its_phases(tmp_path):
    path = tmp_path / "pool-000001.png"
    save(path, np.random.default_rng(0), [{"prompt": "a", "stage": "explored", "right": True}])
    (cell,) = report._read_cells(path)["cells"]
    assert cell["phase"] == "explored"
    assert "stage" not in cell


def test_clips_move(run, tmp_path):
    """Each shows 24 of its 40 frames in the time of all; images beside them stay still."""
    folder = shutil.copytree(run, tmp_path / "clips")
    brightness = np.linspace(0, 1, 40)
    clips = np.stack([brightness, 1 - brightness])[..., None, None, None] * np.ones((16, 200, 3))
    path = folder / "pictures" / "iteration-000003.png"
    image_files.save_grid(
        path, clips, 2, ["a", "b"], [{"prompt": "a"}, {"prompt": "b"}], frames_per_second=16
    )
    report.write([folder], folder / report.NAME)
    (run_data,) = Page(folder / report.NAME).data["runs"]
    still, moving = run_data["grids"]
    assert moving["size"] == "16 x 200"
    with image_of(still["cells"][0]) as image:
        assert not image.is_animated
    for cell, ends in zip(moving["cells"], [(0, 255), (255, 0)], strict=True):
        with image_of(cell) as image:
            assert (image.n_frames, image.size, image.info["loop"]) == (24, (160, 13), 0)
            for frame, value in zip((0, 23), ends, strict=True):
                image.seek(frame)
                pixels = np.asarray(image.convert("RGB")).astype(int)
                assert abs(pixels - value).max() <= 4  # twice lossy
                assert image.info["duration"] == round(40 * round(1000 / 16) / 24)
    path.with_suffix(".webp").write_bytes(b"RIFF")
    with pytest.raises(InputError, match=r"iteration-000003\.webp: not a whole image"):
        report.write([folder], folder / report.NAME)


def test_a_clip_that_stands_still_takes_its_time(run, tmp_path):
    """Equal frames in a row are one frame of the file."""
    folder = shutil.copytree(run, tmp_path / "clips")
    clips = np.zeros((1, 32, 16, 16, 3))
    clips[:, 24:] = 1
    path = folder / "pictures" / "iteration-000003.png"
    facts = [{"prompt": "a"}]
    image_files.save_grid(path, clips, 1, ["a"], facts, frames_per_second=24)
    report.write([folder], folder / report.NAME)
    (run_data,) = Page(folder / report.NAME).data["runs"]
    durations = []
    with image_of(run_data["grids"][1]["cells"][0]) as image:
        for number in range(image.n_frames):
            image.seek(number)
            image.load()
            durations.append(image.info["duration"])
    assert len(durations) == 2
    assert sum(durations) == pytest.approx(32 * round(1000 / 24), rel=0.02)
    assert durations[0] / sum(durations) == pytest.approx(0.75, abs=0.05)


def image_of(cell: dict) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(cell["src"].partition(",")[2])))


def test_what_a_run_says_never_becomes_markup(run):
    page = Page(run / report.NAME)
    assert page.tags.count("script") == 2
    assert "b" not in page.tags
    assert HOSTILE in page.data["runs"][0]["ledger"]["texts"]
    svg, _ = curves([Line(0, "<script>&", [0, 1], [0.0, 1.0], [])], "f")
    assert "<script>" not in svg
    assert "&lt;script&gt;&amp;" in svg


def test_nothing_is_loaded(run):
    page = Page(run / report.NAME)
    assert page.loads == []
    text = (run / report.NAME).read_text()
    assert "default-src 'none'" in text
    assert set(re.findall(r"https?://[^\"'\\ ]+", text)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }


def test_a_figure_takes_the_pages_colors_and_shows_its_axis():
    lines = [Line(0, "a", [0, 10], [0.0, 1.0], [0.1, 0.1]), Line(1, "b", [5, 20], [1.0, 1.0], [])]
    svg, axis = curves(lines, "f7")
    assert axis == [0, 20, 40, 380 - 18 - 7]
    assert not re.search(r"#0[0-9a-f]{5}", svg)
    assert {"var(--run-0)", "var(--run-1)", "var(--muted)"} <= set(re.findall(r"var\([^)]*\)", svg))
    assert all(name.startswith("f7-") for name in re.findall(r'id="([^"]*)"', svg))
    heights = [float(y) for y in re.findall(r'<text[^>]* y="([\d.]+)"[^>]*>[ab]<', svg)]
    assert abs(heights[0] - heights[1]) >= 12  # both lines end at 1: the labels are kept apart


def test_runs_lie_over_each_other_under_names_of_their_own(run, tmp_path):
    (tmp_path / "other").mkdir()
    other = make_run(tmp_path / "other" / "demo", seed=1, overrides=("rollout.num_steps=4",))
    report.write([run, other], tmp_path / "both.html")
    data = Page(tmp_path / "both.html").data
    assert [run_data["name"] for run_data in data["runs"]] == [str(run), str(other)]
    assert all([line["run"] for line in figure["lines"]] == [0, 1] for figure in data["figures"])
    assert [run_data["config"]["rollout.num_steps"] for run_data in data["runs"]] == [3, 4]


def test_a_score_that_one_run_trains_on_and_another_watches_has_a_figure():
    def described(trained, watched):
        scores = [f"eval/{name}" for name in ("reward", trained, watched)]
        metrics = {*scores, *(f"{score}/standard_error" for score in scores)}
        return {"metrics": metrics, "trained": [trained], "watched": [watched]}

    def scores(*runs):
        return {key for _, key, _ in report._titles(runs) if key.startswith("eval/")}

    assert scores(described("x", "y")) == {"eval/reward", "eval/y"}
    both = scores(described("x", "y"), described("y", "x"))
    assert both == {"eval/reward", "eval/x", "eval/y"}


def test_an_infinite_option_of_a_reward_is_shown_as_none(tmp_path):
    folder = make_run(tmp_path / "run", overrides=("reward.options={shapes: {scale: .inf}}",))
    report.write([folder], folder / report.NAME)
    (run_data,) = Page(folder / report.NAME).data["runs"]
    assert run_data["config"]["reward.options.shapes.scale"] is None


@pytest.mark.parametrize("limit", [{"MAX_ROWS": 2 * 2 * N}, {"MOST_TEXT": 5000}], ids=str)
def test_of_a_long_ledger_the_newest_iterations_are_shown(limit, run, monkeypatch, tmp_path):
    for name, most in limit.items():
        monkeypatch.setattr(report, name, most)
    report.write([run], tmp_path / "page.html")
    (run_data,) = Page(tmp_path / "page.html").data["runs"]
    assert (run_data["ledger"]["shown"], run_data["ledger"]["iterations"]) == (2, [1, 2, 3])
    assert set(run_data["ledger"]["columns"]["iteration"]) == {2, 3}


def damage_nothing_yet(folder):
    (folder / "metrics.jsonl").write_text("")


def damage_record(folder):
    (folder / "metrics.jsonl").write_text('nonsense\n{"iteration": "one"}\n')


def damage_ledger(folder):
    path = ledger.path_of(folder / "ledger", 2)
    path.write_bytes(path.read_bytes()[:100])


def damage_columns(folder):
    pq.write_table(
        pq.read_table(ledger.path_of(folder / "ledger", 2)).drop(["seed"]),
        ledger.path_of(folder / "ledger", 2),
    )


def damage_keys(folder):
    """So many metrics that a table of them would fill the memory."""
    with (folder / "metrics.jsonl").open("a") as stream:
        stream.writelines(
            json.dumps({"iteration": 4 + i} | {f"{i}-{j}": 0 for j in range(100)}) + "\n"
            for i in range(300)
        )


def damage_picture(folder):
    path = folder / "pictures" / "iteration-000003.png"
    path.write_bytes(path.read_bytes()[:-200])


def damage_facts(folder):
    (folder / "run.json").write_text("{")


def damage_all(folder):
    (folder / "config.yaml").unlink()


DAMAGES = {
    damage_nothing_yet: "nothing to report yet",
    damage_record: "nothing to report yet",
    damage_ledger: "iteration-000002.parquet: cannot be read",
    damage_columns: "iteration-000002.parquet: its columns",
    damage_keys: "a report has at most",
    damage_picture: "iteration-000003.png: not a whole image",
    damage_facts: "run.json: cannot be read",
    damage_all: "not a run directory",
}


@pytest.mark.parametrize(
    ("damage", "words"), DAMAGES.items(), ids=lambda x: getattr(x, "__name__", "")
)
def test_a_damaged_run_is_one_line(tmp_path, damage, words):
    folder = make_run(tmp_path / "run")
    damage(folder)
    with pytest.raises(InputError) as error:
        report.write([folder], tmp_path / "page.html")
    assert words in str(error.value)
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "page.html").exists()


def test_pictures_are_in_memory_one_by_one(run, monkeypatch, tmp_path):
    references = []

    def read(path):
        assert all(image() is None for image in references)
        grid = image_files.read_grid(path)
        references.extend(weakref.ref(image) for image, _ in grid)
        return grid

    monkeypatch.setattr(report, "read_grid", read)
    report.write([run], tmp_path / "page.html")
    assert len(references) == 16


def test_the_plan_is_of_the_device(run, tmp_path):
    plan = json.loads((run / "plan.json").read_text())
    plan_data = Page(run / report.NAME).data["plan"]
    assert [phase[0] for phase in plan_data["phases"]] == [
        phase["name"] for phase in plan["phases"]
    ]
    for (_, seconds, *split, peak), phase in zip(plan_data["phases"], plan["phases"], strict=True):
        assert (seconds, peak) == (phase["seconds"], phase["peak"])
        assert sum(split) == pytest.approx(seconds, rel=1e-12)
    (tmp_path / "no-plan.json").write_text('{"phases": 1}')
    (tmp_path / "texts.json").write_text(json.dumps(plan | {"seconds": "5"}))
    for name in ("no-plan.json", "none.json", "texts.json"):
        with pytest.raises(InputError, match=f"{name}: not the JSON that `solrl plan` prints"):
            report.write([run], tmp_path / "page.html", plan=tmp_path / name)
    assert not (tmp_path / "page.html").exists()


def test_a_live_report_takes_its_share_of_the_time_and_no_more(run, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(report.time, "monotonic", lambda: clock[0])
    times = []

    def write(folders, out, live):
        times.append(clock[0])
        clock[0] += 3.0

    monkeypatch.setattr(report, "write", write)
    live = report.HtmlReport(run)
    for _ in range(2000):
        clock[0] += 1.0
        assert live.refresh() is None
    spent = 3.0 * len(times)
    assert len(times) >= 3
    assert spent <= report.MAX_TIME_FRACTION * clock[0]
    live.refresh(last=True)
    assert times[-1] == clock[0] - 3.0


def test_a_live_report_that_fails_does_not_end_the_run(tmp_path):
    problem = report.HtmlReport(tmp_path).refresh(last=True)
    assert problem.startswith("no report: ")
    assert "not a run directory" in problem


def chromium() -> str:
    """A headless browser on this machine; skips, with the reason, where there is none."""
    for name in ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"):
        if path := shutil.which(name):
            return path
    pytest.skip("no Chromium or Chrome on this machine (Debian: apt-get install chromium)")


BEFORE = """<script>
window.problems = [];
addEventListener("error", event => problems.push(event.message));
addEventListener("securitypolicyviolation", event => problems.push(event.blockedURI));
console.error = console.warn = (...words) => problems.push(words.join(" "));
</script>"""

# moves sliders and types as a user does, and leaves what the page then shows as JSON in its title
AFTER = """<script>
const all = (what, root = document) => [...root.querySelectorAll(what)];
const texts = (what, root) => all(what, root).map(element => element.textContent);
const send = (input, value) => { input.value = value; input.dispatchEvent(new Event("input")); };
const move = (id, value) => send(document.getElementById(id), value);
const output = section => texts(`${section} .controls output`)[0];
const observations = {problems};
try {
  observations.figures = all("[data-metric]").map(
    f => [f.dataset.metric, all("svg path", f).length, texts("output", f)[0]]);
  const plot = document.querySelector("[data-metric='eval/reward'] [role=img]");
  plot.dispatchEvent(new KeyboardEvent("keydown", {key: "Home"}));
  observations.first = texts("[data-metric='eval/reward'] output")[0];
  observations.pictures = [0, 1].map(i => {
    move("seeds-at", i);
    const sources = all("#seeds img").map(image => image.src);
    return [output("#seeds"), sources, texts("#seeds .yes, #seeds .no")];
  });
  observations.pools = [0, 2].map(i => {
    move("pools-at", i);
    return [output("#pools"), texts("#pools h3"), texts("#pools td"), all("#pools img").length];
  });
  observations.rows = all("#ledger tbody tr").length;
  send(document.querySelector("#ledger input[type=search]"), "SMALL squares");
  all("#ledger th button")[texts("#ledger th button").indexOf("Proxy reward")].click();
  observations.matches = [
    texts("#ledger output")[0], all("#ledger tbody tr").map(row => texts("td", row))];
  observations.tiles = Object.fromEntries(
    all(".tiles div").map(tile => [texts("dt", tile)[0], texts("dd", tile)]));
  observations.note = texts("#overview .note")[0];
  observations.plan = [texts("#plan .note")[0], texts("#plan tbody tr")];
  observations.wide = document.body.scrollWidth - document.body.clientWidth;
} catch (error) {
  problems.push(String(error.stack));
}
document.body.replaceChildren(document.createElement("pre"));
document.querySelector("pre").textContent = JSON.stringify(observations);
</script></body>"""


@pytest.fixture(scope="module", params=[390, 1440])
def observations(run, request, tmp_path_factory) -> dict:
    """What the page showed to a real browser, driven by events."""
    browser = chromium()
    folder = tmp_path_factory.mktemp("browser")
    page = (run / report.NAME).read_text()
    driven = folder / "driven.html"
    # no window is narrower than 500 pixels
    narrow = f"<style>body {{ width: {request.param}px }}</style>"
    for tag, instead in (
        ("<head>", "<head>" + BEFORE),
        ("</head>", narrow + "</head>"),
        ("</body>", AFTER),
    ):
        page = page.replace(tag, instead)
    driven.write_text(page)
    flags = (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-sync",
    )
    flags += (
        "--disable-background-networking",
        "--disable-component-update",
        f"--user-data-dir={folder / 'profile'}",
    )
    command = [browser, *flags, f"--window-size={request.param},900", "--dump-dom", driven.as_uri()]
    process = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    match = re.search(r"<pre>(.*)</pre>", process.stdout, re.DOTALL)
    assert match, process.stderr[-2000:]
    return json.loads(HTMLText(match[1]).text)


class HTMLText(HTMLParser):
    """The text of markup."""

    def __init__(self, markup: str) -> None:
        super().__init__()
        self.text = ""
        self.feed(markup)
        self.close()

    def handle_data(self, data):
        self.text += data


def test_a_browser_shows_it_without_an_error(observations, run):
    assert observations["problems"] == []
    assert observations["wide"] <= 0  # nothing is wider than the screen
    rows = metrics.read(run)
    drawn = {metric: (paths, text) for metric, paths, text in observations["figures"]}
    assert drawn.keys() == {figure["metric"] for figure in Page(run / report.NAME).data["figures"]}
    assert all(paths >= 3 for paths, _ in drawn.values())
    last = f"{rows[3]['eval/reward']:.3f} ± {rows[3]['eval/reward/standard_error']:.3f}"
    assert drawn["eval/reward"][1] == f"Iteration 3: {last}"
    first = f"{rows[0]['eval/reward']:.3f} ± {rows[0]['eval/reward/standard_error']:.3f}"
    assert observations["first"] == f"Iteration 0: {first}"
    assert observations["note"] == f"Held-out: {SETTING}; averaged policy."
    assert observations["plan"][0].startswith(
        "flux1_sol_rl_hpsv2 on 1 × 1 b200, compiled, not run: exploration in nvfp4 "
    )
    plan = json.loads(PLANS.read_text())["plans"]["flux1-b200"]
    ours = plan["seconds"]
    naive = plan["naive_scaling"]["seconds"]
    sentence = (
        f"takes {ours:.0f} s at the public peaks, no less."
        f" naive_scaling would take {naive:.0f} s, {naive / ours:.3f} times"
    )
    assert sentence in observations["plan"][0]
    assert [row[:7] for row in observations["plan"][1]] == [
        "encode0",
        "sync0.0",
        "explore",
        "regener",
        "score10",
        "update1",
    ]
    assert observations["tiles"]["Skipped"][0] == "3"
    assert observations["tiles"]["Not finite"][0] == "6"
    assert (
        observations["tiles"]["Held-out reward"][0]
        == f"{rows[0]['eval/reward']:.3f} → {rows[3]['eval/reward']:.3f}"
    )


def test_the_sliders_change_what_is_shown(observations, run):
    (run_data,) = Page(run / report.NAME).data["runs"]
    for (label, sources, marks), grid in zip(
        observations["pictures"], run_data["grids"], strict=True
    ):
        when = f"after iteration {grid['iteration']}" if grid["iteration"] else "before training"
        assert label == f"{when}, {grid['size']} pixels: 2 of 4 right"
        assert sources == [cell["src"] for cell in grid["cells"]]
        assert marks == ["✗ wrong", "✓ right"] * 2
    table = pq.read_table(run / "ledger").to_pylist()
    for (label, prompts, values, images), iteration in zip(
        observations["pools"], (1, 3), strict=True
    ):
        assert label.startswith(
            f"iteration {iteration}, {'16 x 16 pixels, ' * (iteration == 3)}rewards "
        )
        assert prompts == list(PROMPTS)
        assert images == (8 if iteration == 3 else 0)
        rows = [row for row in table if row["iteration"] == iteration and row["kept"]]
        expected = []
        for prompt in PROMPTS:
            kept = sorted(
                (row for row in rows if row["prompt"] == prompt), key=lambda row: row["rank"]
            )
            if iteration == 3:
                kept = [kept[0], kept[-1]]  # those with pictures
            marks = (" ✓ right", " ✗ wrong") if iteration == 3 else [""] * len(kept)

            def text(value):
                return "nan" if np.isnan(value) else f"{value:.3f}"

            for name in ("proxy_reward", "regenerated_reward"):
                expected += [text(row[name]) + mark for row, mark in zip(kept, marks, strict=True)]
        assert values == expected


def test_the_ledger_is_searched_and_sorted(observations, run):
    table = [
        row for row in pq.read_table(run / "ledger").to_pylist() if row["prompt"] == PROMPTS[1]
    ]
    assert observations["rows"] == 25
    assert observations["matches"][0] == f"1 to {len(table)} of {len(table)}"
    table.sort(
        key=lambda row: -np.inf if np.isnan(row["proxy_reward"]) else row["proxy_reward"],
        reverse=True,
    )
    proxies = [
        "nan" if np.isnan(row["proxy_reward"]) else f"{row['proxy_reward']:.4f}" for row in table
    ]
    assert [row[4] for row in observations["matches"][1]] == proxies
    finite = len(table) - 3
    assert [row[10] for row in observations["matches"][1]][:finite] == [
        str(row["seed"]) for row in table
    ][:finite]
