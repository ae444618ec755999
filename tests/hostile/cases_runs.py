"""Run directories that are damaged, or bring what they should not."""

import struct
import zlib
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from tests.hostile.harness import (
    Case,
    Maker,
    Replaced,
    folder,
    link,
    nothing,
    one_quick,
    pipe,
    sparse,
)

TRAIN = (
    "train tiny SMALL rollout.schedule=sd3 train.iterations=2 eval.num_grid_images=0 run.dir={run}"
)
EXPORT = "export {run} --out {dir}/x.safetensors"
GENERATE = "generate {run} --prompts {dir}/p.txt --num-steps 1 --out {dir}/out"
REPORT = "report {run} --out {dir}/x.html"
P = {"{dir}/p.txt": "a red circle\n"}
NEWEST = "{run}/checkpoints/000002"
META = NEWEST + "/meta.json"
BAD = {
    "absent": nothing,
    "empty": b"",
    "binary": bytes(range(256)),
    "a list": "[1]",
    "a number": "3",
    "deep": 100_000 * "[",
    "a directory": folder,
    "a pipe": pipe,
    "UTF-16": "{}".encode("utf-16"),
    "/dev/zero": link("/dev/zero"),
}
EVIL = (
    "open('touched', 'w')\n\n\n"
    "def score(images, prompts, metadata):\n    return [0.0] * len(images)\n"
)
REWARDS = {
    "a function": "os:system",
    "a program": "subprocess:run",
    "a service": "http://127.0.0.1:9/",
    "a module of the directory": "evil:score",
}


def sheet(cells: str, size: int = 9, mode: str = "RGB") -> Maker:
    """A picture whose metadata say where its images are."""

    def make(path: Path) -> None:
        info = PngInfo()
        info.add_text("Cells", cells)
        Image.new(mode, (size, size)).save(path, pnginfo=info)

    return make


def png(width: int, height: int) -> bytes:
    """The head of a PNG file that claims to be of this size."""

    def part(kind, data):
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + part(b"IHDR", head)
        + part(b"IDAT", zlib.compress(bytes(1000)))
        + part(b"IEND", b"")
    )


PICTURE = "{run}/pictures/iteration-000000.png"
PICTURES = {
    "a pipe": pipe,
    "binary": bytes(range(256)),
    "of 60000 pixels a side": png(60_000, 60_000),
    "cut beyond its edge": sheet('[{"box": [0, 0, 1000000, 1000000]}]'),
    "cut a thousand times": sheet("[" + ",".join(1000 * ['{"box": [0, 0, 9, 9]}']) + "]"),
    "deep": sheet(100_000 * "["),
    "cut without end": sheet('[{"box": [0, 0, 1e999, 1]}]'),
    "of no colors": sheet('[{"box": [0, 0, 9, 9]}]', mode="I;16"),
}
ROW = '{"iteration": 0, "pool/reward": 1}\n'
NUMBERS = {
    "a number of 400 digits": ROW + '{"iteration": 1, "pool/reward": 1' + 400 * "0" + "}\n" + ROW,
    "an iteration of 400 digits": ROW
    + '{"iteration": 1'
    + 400 * "0"
    + ', "pool/reward": 1}\n'
    + ROW,
    "numbers at both ends": ROW
    + '{"iteration": 1, "pool/reward": 1e308}\n{"iteration": 2, "pool/reward": -1e308}\n',
}
PLAN = """{"phases": [{"name": "a", "seconds": 1, "peak": 1, "programs": [
    {"calls": 3000000000, "roofline": {"split": {"matmuls": "x"}}}]}]}"""
WATCHED = Replaced("eval_only: []", "eval_only: ['http://127.0.0.1:9']")
DETECTOR = Replaced(
    "    shapes: 1.0\n  paths: {}\n  options: {}",
    "    geneval: 1.0\n  paths: {}\n  options: {geneval: {detector: 'evil:score'}}",
)
LEDGER = "{run}/ledger/iteration-000002.parquet"
CASES = [
    # what is reported of it
    Case(
        "report: a file is there",
        REPORT,
        "--force",
        files={"{dir}/x.html": "mine"},
        kept=("{dir}",),
    ),
    *one_quick(
        Case(f"report: run.json is {name}", REPORT, "run.json", files={"{run}/run.json": content})
        for name, content in BAD.items()
        if name not in ("absent", "UTF-16")
    ),
    *one_quick(
        Case(f"report: the ledger is {name}", REPORT, "", files={LEDGER: content})
        for name, content in BAD.items()
        if name != "absent"
    ),
    *one_quick(
        Case(
            f"report: metrics.jsonl is {name}",
            REPORT,
            "nothing to report",
            files={"{run}/metrics.jsonl": content},
        )
        for name, content in (BAD | {"of 3 GB": sparse(3 * 10**9)}).items()
    ),
    *(
        Case(f"report: a picture is {name}", REPORT, "not a whole image", files={PICTURE: content})
        for name, content in PICTURES.items()
    ),
    *(
        Case(
            f"report: the record has {name}",
            REPORT,
            "x.html",
            0,
            files={"{run}/metrics.jsonl": content},
        )
        for name, content in NUMBERS.items()
    ),
    # goes on without what it does not need
    *(
        Case(
            f"run.json is {name}",
            TRAIN,
            "gained: ",
            0,
            files={"{run}/run.json": content},
            seconds=60,
        )
        for name, content in BAD.items()
        if name not in ("a directory",)
    ),
    *(
        Case(
            f"metrics.jsonl is {name}",
            TRAIN,
            "gained: ",
            0,
            files={"{run}/metrics.jsonl": content},
            seconds=60,
        )
        for name, content in BAD.items()
        if name not in ("a directory", "a pipe", "/dev/zero")
    ),
    Case(
        "metrics.jsonl has infinity",
        TRAIN,
        "gained: ",
        0,
        files={"{run}/metrics.jsonl": '{"iteration": 0, "a": Infinity}\n{"iteration": 1}\n'},
        seconds=60,
    ),
    Case(
        "metrics.jsonl has an iteration of text",
        TRAIN,
        "gained: ",
        0,
        files={"{run}/metrics.jsonl": '{"iteration": "a"}\n{"iteration": 1}\n'},
        seconds=60,
    ),
    Case(
        "metrics.jsonl has an endless iteration",
        TRAIN,
        "gained: ",
        0,
        files={"{run}/metrics.jsonl": '{"iteration": 1e999}\n{"iteration": 1}\n'},
        seconds=60,
    ),
    Case(
        "metrics.jsonl has nested nonsense",
        TRAIN,
        "gained: ",
        0,
        files={
            "{run}/metrics.jsonl": '{"iteration": {"a": [1]}}\n'
            '{"iteration": 1, "eval/reward": [3]}\n'
        },
        seconds=60,
    ),
    Case(
        "metrics.jsonl lacks its iterations",
        TRAIN,
        "metrics.jsonl lacks 2 of 2 iterations, and continues without them",
        0,
        files={"{run}/metrics.jsonl": ROW},
        seconds=60,
    ),
    *(
        Case(
            f"a stray file in {name}",
            TRAIN,
            "gained: ",
            0,
            files={f"{{run}}/{name}/stray": "x"},
            seconds=60,
        )
        for name in ("ledger", "checkpoints", "pictures")
    ),
    Case(
        "a ledger of another",
        TRAIN,
        "gained: ",
        0,
        files={"{run}/ledger/iteration-000009.parquet": "x"},
        seconds=60,
    ),
    # cannot go on
    Case(
        "the checkpoints are gone",
        TRAIN,
        "checkpoint",
        2,
        files={"{run}/checkpoints/000001": nothing, "{run}/checkpoints/000002": nothing},
        kept=("{run}/metrics.jsonl", "{run}/ledger"),
    ),
    Case(
        "no checkpoints folder",
        TRAIN,
        "checkpoint",
        2,
        files={"{run}/checkpoints": nothing},
        kept=("{run}/metrics.jsonl", "{run}/ledger"),
    ),
    Case(
        "checkpoints is a file",
        TRAIN,
        "checkpoint",
        2,
        files={"{run}/checkpoints": lambda p: p.write_text("x")},
        kept=("{run}/metrics.jsonl",),
    ),
    Case("another seed", TRAIN + " seed=7", "holds another run", kept=("{run}",)),
    Case("another reward", TRAIN + " reward=tiny-clip", "holds another run", kept=("{run}",)),
    *one_quick(
        Case(
            f"the last meta.json is {name}",
            EXPORT,
            "iteration 1" if name != "x" else "",
            0,
            files={META: content},
            seconds=60,
        )
        for name, content in BAD.items()
        if name not in ("/dev/zero",)
    ),
    *one_quick(
        Case(
            f"the named meta.json is {name}",
            EXPORT + " --checkpoint 2",
            "checkpoints/000002",
            1,
            files={META: content},
            seconds=60,
        )
        for name, content in BAD.items()
        if name not in ("/dev/zero",)
    ),
    *one_quick(
        Case(
            f"the best meta.json is {name}",
            EXPORT + " --checkpoint best",
            "no checkpoint in",
            files={META: content, "{run}/checkpoints/000001/meta.json": content},
            seconds=60,
        )
        for name, content in BAD.items()
        if name not in ("/dev/zero",)
    ),
    *one_quick(
        Case(
            f"the named manifest is {name}",
            EXPORT + " --checkpoint 2",
            "checkpoints/000002",
            1,
            files={"{run}/checkpoints/000002/manifest.json": content},
            seconds=60,
        )
        for name, content in BAD.items()
    ),
    # rewards that a run directory names
    *(
        Case(
            f"{command} of a run that names {name}",
            call,
            "--trust-run",
            kept=("{dir}",),
            repeats=command != "eval" and name != "a function",
            files={
                "{run}/config.yaml": Replaced("shapes: 1.0", f"'{target}': 1.0"),
                "{run}/evil.py": EVIL,
            },
        )
        for name, target in REWARDS.items()
        for command, call in (
            ("eval", "eval {run}"),
            ("rank", "rank {run} --prompts 1"),
            ("sensitivity", "layers {run} --sensitivity 1"),
        )
    ),
    *(
        Case(
            f"{command} of a run that names a detector",
            call,
            "scores with evil:score",
            kept=("{dir}",),
            files={"{run}/config.yaml": DETECTOR, "{dir}/evil.py": EVIL},
        )
        for command, call in (("eval", "eval {run}"), ("rank", "rank {run} --prompts 1"))
    ),
    Case(
        "eval of a run whose service is the beginning of another",
        "eval {run} 'reward.weights={\"http://127.0.0.1:9000/\": 1}'",
        "scores with http://127.0.0.1:9, ",
        files={"{run}/config.yaml": WATCHED},
    ),
    Case(
        "eval of a run whose function is named",
        "eval {run} reward=nowhere:f",
        "reward 'nowhere:f': cannot be imported",
        files={"{run}/config.yaml": Replaced("shapes: 1.0", "nowhere:f: 1.0")},
    ),
    # what is no regular file, or the user's own
    *(
        Case(
            f"a file of the named checkpoint is {name}",
            EXPORT + " --checkpoint 2",
            "x is no regular file",
            1,
            files={
                NEWEST + "/manifest.json": {"x": {"size": 0, "sha256": ""}},
                NEWEST + "/x": content,
            },
        )
        for name, content in (
            ("a pipe", pipe),
            ("/dev/zero", link("/dev/zero")),
            ("a link", link("meta.json")),
        )
    ),
    Case(
        "export: out is a link to a directory",
        "export {run} --format peft --out {dir}/l",
        "is a link",
        files={"{dir}/d": folder, "{dir}/l": link("d")},
    ),
    Case(
        "export: out is a link to nothing",
        "export {run} --format peft --out {dir}/l --force",
        "is a link, to nothing; name the directory itself",
        files={"{dir}/l": link("none")},
    ),
    Case(
        "export: the folder to publish is a link to nothing",
        "export {run} --hub me/lora --dry-run --out {dir}/l --force",
        "is a link, to nothing; name the directory itself",
        files={"{dir}/l": link("none")},
    ),
    Case(
        "rank: the run has somebody's rank.json",
        "rank {run}",
        "--force",
        files={"{run}/rank.json": "{}"},
        kept=("{run}",),
    ),
    Case(
        "train: the run has somebody's report",
        TRAIN + " --report",
        "--report: ",
        files={"{run}/report.html": "mine"},
        kept=("{run}",),
    ),
    Case(
        "report: a plan of texts",
        REPORT + " --plan {dir}/p",
        "'x' is no number",
        files={"{dir}/p": PLAN},
    ),
    *one_quick(
        Case(
            f"{command} of a run that watches {name}",
            call,
            "--trust-run",
            kept=("{dir}",),
            files={
                "{run}/config.yaml": Replaced("eval_only: []", f"eval_only: ['{target}']"),
                "{run}/evil.py": EVIL,
            },
        )
        for name, target in REWARDS.items()
        for command, call in (("eval", "eval {run}"),)
    ),
    *(
        Case(
            f"{command} of a run that names {name}",
            call,
            "",
            0,
            files=P
            | {
                "{run}/config.yaml": Replaced("shapes: 1.0", f"'{target}': 1.0"),
                "{run}/evil.py": EVIL,
            },
            repeats=name != "a function",
            seconds=60,
        )
        for name, target in REWARDS.items()
        if name != "x"
        for command, call in (("export", EXPORT), ("layers", "layers {run}"))
    ),
]
