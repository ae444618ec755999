"""What commands may not do to the files of others, and what they say where they cannot go on."""

import json
import zipfile
from pathlib import Path
from typing import Any

from tests.hostile.harness import Case, folder, link, pipe, sparse

GENERATE = "generate embedded:tiny-sana --prompts {dir}/p.txt --num-steps 1 --out {dir}/out"
P = {"{dir}/p.txt": "a red circle\n"}
OUT = ("{dir}/out",)

STUDY = "study {dir}/p --out {dir}/out"
PLAN = (
    "{what: x, preset: tiny, overrides: [], arms: {ARM: []}, seeds: [0], compared: [], sweeps: {}, "
    "quick: {seeds: [0], overrides: []}}\n"
)
PHASES = [{"name": name, "seconds": -1} for name in ("explore", "regenerate", "score", "update")]
PRICES = json.dumps({"preset": "tiny", "phases": PHASES, "exploration": "nvfp4", "device": "mine"})
SYNC = PRICES.replace("-1", "1").replace("}]", '}, {"name": "sync", "seconds": SYNC}]')
GOOD = {"{dir}/p": PLAN.replace("ARM", "a")}
CONVERT = "convert {dir}/a.pt --out {dir}/x.safetensors"


def array(shape: str) -> bytes:
    """The head of a .npy file that claims this shape."""
    return (
        b"\x93NUMPY\1\0v\0"
        + f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".encode().ljust(117)
        + b"\n"
    )


class Code:
    """An object whose pickle runs a program when it is read."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("touched"),)


def cycle() -> Any:
    tree: dict[str, Any] = {}
    tree["model"] = tree
    return tree


def nested() -> Any:
    tree: Any = {}
    for _ in range(100):
        tree = {"model": tree}
    return tree


def torch_file(make: Any, archive: bool = True, compressed: bool = False) -> Any:
    """A file that torch.save writes; archive: in the form since PyTorch 1.6; compressed: packed
    anew.
    """

    def write(path: Path) -> None:
        import torch

        torch.save(make(torch), path, _use_new_zipfile_serialization=archive)
        if compressed:
            with zipfile.ZipFile(path) as old:
                entries = {entry.filename: old.read(entry) for entry in old.infolist()}
            with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
                for name, content in entries.items():
                    new.writestr(name, content)

    return write


PICKLES = {  # what a pickle holds, and a part of the line
    "a program": (lambda torch: {"a": Code()}, "may run code"),
    "a dictionary within itself": (lambda torch: cycle(), "levels deep"),
    "100 dictionaries": (lambda torch: nested(), "a.pt"),
    "a tensor of 4 TB": (lambda torch: {"a": torch.zeros(1).expand(10**12)}, "claim"),
    "a thousandfold tensor": (lambda torch: {"a": torch.zeros(1000).expand(1000, 1000)}, "claim"),
    "a thousand times one tensor": (
        lambda torch: dict.fromkeys(map(str, range(1000)), torch.zeros(10**5)),
        "claim",
    ),
    "a list": (lambda torch: [torch.zeros(1)], "a.pt"),
    "a complex number": (lambda torch: {"a": 1j}, "a.pt"),
    "a sparse tensor": (lambda torch: {"a": torch.eye(3).to_sparse()}, "a.pt"),
    "a name of a lone surrogate": (lambda torch: {"\ud800": torch.zeros(1)}, "no named tensors"),
    "a name that a header has": (
        lambda torch: {"__metadata__": torch.zeros(1)},
        "no named tensors",
    ),
    "a tensor without data": (lambda torch: {"a": torch.zeros(3, device="meta")}, "a.pt"),
}

CASES = [
    *(
        Case(
            f"convert: {name}, {'archive' if archive else 'old form'}",
            CONVERT,
            message,
            seconds=60,
            kept=("{dir}",),
            files={"{dir}/a.pt": torch_file(make, archive)},
            repeats=not archive and name != "a program",
        )
        for name, (make, message) in PICKLES.items()
        for archive in (True, False)
    ),
    Case(
        "convert: a nested tensor",
        CONVERT,
        "cannot hold",
        files={
            "{dir}/a.pt": torch_file(
                lambda torch: {"a": torch.nested.as_nested_tensor([torch.ones(2)])}
            )
        },
    ),
    Case(
        "convert: a compressed archive",
        CONVERT,
        "compressed",
        files={"{dir}/a.pt": torch_file(lambda torch: {"a": torch.zeros(10**7)}, compressed=True)},
    ),
    # what is there is not written over
    Case(
        "generate: a picture is there",
        GENERATE,
        "--force",
        files=P | {"{dir}/out/00000.png": "mine"},
        kept=OUT,
    ),
    Case(
        "generate: an array is there",
        GENERATE,
        "--force",
        files=P | {"{dir}/out/images.npy": "mine"},
        kept=OUT,
    ),
    Case(
        "generate: a grid is there",
        GENERATE,
        "--force",
        files=P | {"{dir}/out/grid.png": "mine"},
        kept=OUT,
    ),
    Case(
        "generate: another picture is there",
        GENERATE,
        "images in",
        0,
        seconds=90,
        files=P | {"{dir}/out/00077.png": "mine"},
    ),
    Case(
        "generate: out is a file", GENERATE, "is a file", files=P | {"{dir}/out": "mine"}, kept=OUT
    ),
    Case("generate: out is a pipe", GENERATE, "is a file", files=P | {"{dir}/out": pipe}),
    Case(
        "export: the file is there",
        "export {run} --out {dir}/x.safetensors",
        "--force",
        files={"{dir}/x.safetensors": "mine"},
        kept=("{dir}/x.safetensors",),
    ),
    Case(
        "export: a link is there",
        "export {run} --out {dir}/x.safetensors",
        "--force",
        files={"{dir}/x.safetensors": link("/dev/null")},
    ),
    Case(
        "export: peft, an adapter is there",
        "export {run} --format peft --out {dir}/x",
        "--force",
        files={"{dir}/x/adapter_model.safetensors": "mine"},
        kept=("{dir}/x",),
    ),
    Case(
        "export: peft, something is there",
        "export {run} --format peft --out {dir}/x",
        "name another directory",
        files={"{dir}/x/thesis.tex": "mine"},
        kept=("{dir}/x",),
    ),
    Case(
        "export: out is a directory",
        "export {run} --out {dir}/x.safetensors",
        "one file",
        files={"{dir}/x.safetensors": folder},
    ),
    Case(
        "convert: the file is there",
        "convert {dir}/a.pt --out {dir}/x.safetensors",
        "--force",
        files={"{dir}/a.pt": "", "{dir}/x.safetensors": "mine"},
        kept=("{dir}/x.safetensors",),
    ),
    Case(
        "export: a pipe is there",
        "export {run} --out {dir}/x.safetensors --force",
        "no file",
        files={"{dir}/x.safetensors": pipe},
    ),
    Case(
        "export: a name with a null character",
        "export {run} --out 'a\0b.safetensors'",
        "null character",
    ),
    Case(
        "report: a pipe is there",
        "report {run} --out {dir}/x --force",
        "no file",
        files={"{dir}/x": pipe},
    ),
    Case(
        "report: of several, a file is there",
        "report {run} {run}",
        "--force",
        files={"{dir}/report.html": "mine"},
        kept=("{dir}",),
    ),
    Case(
        "report: somebody's is in the run",
        "report {run}",
        "--force",
        files={"{run}/report.html": "mine"},
        kept=("{run}",),
    ),
    Case(
        "rank: a directory is there", "rank {run}", "a directory", files={"{run}/rank.json": folder}
    ),
    # what is converted
    Case(
        "convert: in /proc",
        "convert {dir}/a.pt --out /proc/x.safetensors",
        "cannot be written",
        files={"{dir}/a.pt": ""},
    ),
    Case(
        "convert: a pipe",
        "convert {dir}/a.pt --out {dir}/x.safetensors",
        "no such file",
        files={"{dir}/a.pt": pipe},
    ),
    Case("convert: a directory", "convert {dir} --out {dir}/x.safetensors", "no such file"),
    Case(
        "convert: nothing in it",
        "convert {dir}/a.pt --out {dir}/x.safetensors",
        "not a readable torch file",
        files={"{dir}/a.pt": b""},
    ),
    Case(
        "convert: noise",
        "convert {dir}/a.pt --out {dir}/x.safetensors",
        "a.pt",
        files={"{dir}/a.pt": bytes(range(256)) * 50},
    ),
    Case(
        "convert: zeros",
        "convert {dir}/a.pt --out {dir}/x.safetensors",
        "a.pt",
        files={"{dir}/a.pt": sparse(10**9)},
    ),
    Case(
        "convert: an archive of nothing",
        "convert {dir}/a.pt --out {dir}/x.safetensors",
        "a.pt",
        files={"{dir}/a.pt": b"PK\5\6" + bytes(18)},
    ),
    # run directories of others
    Case(
        "train: a foreign record",
        "train tiny run.dir={dir}",
        "name another directory",
        files={"{dir}/metrics.jsonl": "mine"},
        kept=("{dir}/metrics.jsonl",),
    ),
    Case(
        "train: a foreign run.json",
        "train tiny run.dir={dir}",
        "name another directory",
        files={"{dir}/run.json": "mine"},
        kept=("{dir}/run.json",),
    ),
    Case(
        "train: a foreign ledger",
        "train tiny run.dir={dir}",
        "name another directory",
        files={"{dir}/ledger/mine": "mine"},
        kept=("{dir}/ledger",),
    ),
    Case(
        "train: pictures of somebody",
        "train tiny run.dir={dir}",
        "name another directory",
        files={"{dir}/pictures/me.png": "mine"},
        kept=("{dir}/pictures",),
    ),
    Case(
        "train: a foreign report",
        "train tiny --report run.dir={dir}",
        "name another directory",
        files={"{dir}/report.html": "mine"},
        kept=("{dir}/report.html",),
    ),
    Case(
        "train: the directory is a file",
        "train tiny run.dir={dir}/x",
        "is a file",
        files={"{dir}/x": "mine"},
    ),
    Case(
        "train: the directory is a pipe",
        "train tiny run.dir={dir}/x",
        "is a file",
        files={"{dir}/x": pipe},
    ),
    Case(
        "train: below a file",
        "train tiny run.dir={dir}/x/y",
        "cannot be written",
        files={"{dir}/x": "mine"},
    ),
    Case("train: a name too long", "train tiny run.dir=" + 300 * "x", "cannot be written"),
    Case("train: in /proc", "train tiny run.dir=/proc/1/solrl", "cannot be written"),
    Case(
        "train: the lock is a directory",
        "train tiny run.dir={dir}",
        ".lock",
        1,
        files={"{dir}/.lock": folder},
    ),
    Case(
        "train: the lock is a pipe",
        "train tiny run.dir={dir} seed=x",
        "seed",
        files={"{dir}/.lock": pipe},
    ),
    # strict JSON, on failure too
    Case("study: a plan that is a pipe", STUDY, "cannot be read as YAML", files={"{dir}/p": pipe}),
    Case(
        "study: a plan that is a directory",
        STUDY,
        "cannot be read as YAML",
        files={"{dir}/p": folder},
    ),
    Case(
        "study: a plan of zeros", STUDY, "cannot be read as YAML", files={"{dir}/p": sparse(10**9)}
    ),
    Case(
        "study: a plan that names itself",
        STUDY,
        "aliases are not accepted",
        files={"{dir}/p": "a: &a [*a]\n"},
    ),
    Case(
        "study: a plan with a tag",
        STUDY,
        "tags and aliases",
        files={"{dir}/p": "!!python/object:os.system x\n"},
    ),
    Case(
        "study: an arm that is a path",
        STUDY,
        "arms",
        files={"{dir}/p": PLAN.replace("ARM", "../a")},
        kept=("{dir}",),
    ),
    *(
        Case(
            f"study: {name}",
            STUDY + " --compare-only",
            message,
            files={"{dir}/p": GOOD["{dir}/p"].replace(old, new)},
        )
        for name, old, new, message in (
            (
                "the plan sets a seed",
                "overrides: [],",
                "overrides: [seed=x],",
                "seed=x: a study sets it itself",
            ),
            (
                "an arm sets where it goes",
                "{a: []}",
                "{a: [run.dir=/etc]}",
                "run.dir=/etc: a study sets it itself",
            ),
            ("two arms of one name", "{a: []}", "{a: [], a: [seed=1]}", "the key 'a' comes twice"),
            ("an arm against itself", "compared: []", "compared: [[a, a]]", "'a' with itself"),
        )
    ),
    Case(
        "study: a seed on the command line",
        STUDY + " --compare-only seed=3",
        "seed=3: a study sets it itself",
        files=GOOD,
    ),
    *(
        Case(
            f"study: {name} is there",
            STUDY + " --compare-only",
            "no study wrote it",
            files=GOOD | {f"{{dir}}/out/{name}": "mine"},
            kept=OUT,
        )
        for name in ("study.md", "study.json", "study.png")
    ),
    Case(
        "study: a log is there",
        STUDY,
        "no study wrote it",
        files=GOOD | {"{dir}/out/a-0.log": "mine"},
        kept=OUT,
    ),
    *(
        Case(
            f"study: {name}",
            STUDY + " --compare-only --prices {dir}/z",
            "--prices",
            files=GOOD | {"{dir}/z": prices},
        )
        for name, prices in (
            ("prices below zero", PRICES),
            ("prices of a preset of 60 MB", PRICES.replace("tiny", 60_000_000 * "x")),
            ("prices of 400 digits", PRICES.replace("-1", "1" + 400 * "0")),
            ("a sync below zero", SYNC.replace("SYNC", "-5")),
            ("a sync of text", SYNC.replace("SYNC", '"x"')),
        )
    ),
    Case(
        "rank: rank.json is there",
        "rank tiny --out {dir}",
        "--force",
        files={"{dir}/rank.json": "mine"},
        kept=("{dir}",),
    ),
    Case("layers: 10^9 prompts", "layers tiny --sensitivity 1000000000", "--sensitivity"),
    Case(
        "layers: sensitivity to no quantization",
        "layers tiny --sensitivity 1 rollout.explore.precision=bf16",
        "rollout.explore.precision=bf16: quantizes nothing here",
    ),
    Case("layers: a drop of nothing", "layers tiny --drop 0.1", "--sensitivity"),
    Case("layers: a drop below zero", "layers tiny --sensitivity 1 --drop -1", "--drop"),
    Case("layers: a drop that is no number", "layers tiny --sensitivity 1 --drop nan", "--drop"),
    Case("report: a name too long", "report {run} --out " + 300 * "x", "File name too long"),
    Case(
        "a reward that ends the process",
        "train tiny reward=sys:exit run.dir={dir}/run",
        "SystemExit",
    ),
    Case(
        "a reward that ends it later",
        "train tiny reward=tests.hostile.outside:leaving run.dir={dir}/run",
        "SystemExit: 0",
    ),
    Case(
        "a service at no port",
        "train tiny reward=http://localhost:99999/ run.dir={dir}/run",
        "out of range",
    ),
    Case(
        "a service with a space",
        "train tiny 'reward=http://a b/' run.dir={dir}/run",
        "http://HOST:PORT/PATH",
    ),
    Case(
        "pictures that a reward cannot read",
        "train tiny reward=tiny-clip model.width=40 run.dir={dir}/run",
        "images of 40 x 32",
    ),
    Case("study: out is a file", STUDY, "is a file", files=GOOD | {"{dir}/out": "mine"}, kept=OUT),
    Case(
        "study: prices of zeros",
        STUDY + " --prices {dir}/z",
        "not the JSON",
        files={"{dir}/p": PLAN, "{dir}/z": sparse(10**9)},
    ),
    Case("json: bad input", "train tiny seed=x --json", '"error": "seed=\'x\''),
    Case("json: an unknown option", "train tiny --jsom --json", '"exit_code": 2'),
    Case("json: no run", "export {dir} --out {dir}/x.safetensors --json", '"error": '),
    # options that contradict each other, and paths that are empty
    Case("no command", "", "Usage: solrl", 0),
    Case("layers: two measurements", "layers tiny --errors --sensitivity 1", "--errors: "),
    Case(
        "layers: more prompts than there are",
        "layers tiny --sensitivity 100000",
        "there are 26 held-out prompts",
    ),
    Case(
        "rank: more prompts than there are",
        "rank tiny --prompts 100000",
        "there are 26 held-out prompts",
        kept=("{dir}",),
    ),
    Case(
        "eval: a preset of a preset",
        "eval tiny --preset sana_sol_rl_hpsv2",
        "--preset=sana_sol_rl_hpsv2: tiny is",
    ),
    Case(
        "study: processes that start nothing",
        STUDY + " --compare-only --processes 2",
        "--processes=2",
        files=GOOD,
    ),
    *(
        Case(
            f"an empty path: {call}",
            call,
            f"'{name}': expected a path",
            files=P | GOOD,
            kept=("{dir}",),
        )
        for call, name in (
            ("generate embedded:tiny-sana --prompts {dir}/p.txt --num-steps 1 --out ''", "--out"),
            ("study {dir}/p --compare-only --out=", "--out"),
            ("rank tiny --out ''", "--out"),
            ("plan tiny --hlo ''", "--hlo"),
            ("report {run} ''", "RUN..."),
            ("report {run} --plan ''", "--plan"),
            ("eval {run} {run} --paired --gallery ''", "--gallery"),
            (GENERATE + " --lora ''", "--lora"),
            ("convert {dir}/p.txt --base '' --out {dir}/x", "--base"),
        )
    ),
    *(
        Case(f"rank: {name}", f"rank tiny {options}", message)
        for name, options, message in (
            ("an empty recipe", "--explore ''", "--explore=: expected"),
            ("a recipe of no name", "--explore paper,", "--explore=paper,: expected"),
            (
                "no step of the format",
                "--explore best --steps 1",
                "exact_steps=1: must be less than rollout.explore.num_steps=1",
            ),
            (
                "more steps than the schedule has",
                "--steps 11",
                "rollout.explore.num_steps=11: must be at most rollout.num_steps=10",
            ),
        )
    ),
    *(
        Case(
            f"{command}: a link to a device is there",
            f"{call} --force",
            "is no file",
            files={"{dir}/x.safetensors": link("/dev/null")},
        )
        for command, call in (
            ("export", "export {run} --out {dir}/x.safetensors"),
            ("report", "report {run} --out {dir}/x.safetensors"),
        )
    ),
    Case(
        "report: in /proc",
        "report {run} --out /proc/self/x.html",
        "--out /proc/self cannot be written",
    ),
    Case(
        "a checkpoint in other digits",
        "export {run} --out {dir}/x.safetensors --checkpoint ٢",
        "must be best, latest or",
    ),
    Case(
        "hosts in other digits",
        "train tiny --hosts ٢ --host 0 --coordinator localhost:1",
        "--hosts='٢': expected",
    ),
    Case(
        "convert: a base that is no pipeline",
        CONVERT + " --base {dir}",
        "--base {dir}: ",
        files={"{dir}/a.pt": ""},
    ),
    Case(
        "encode: a directory of no model",
        "encode tiny model.path={dir}",
        "model.path='{dir}': has no model_index.json",
    ),
    Case(
        "train: Weights & Biases is not there",
        "train tiny run.wandb=true run.dir={dir}/r",
        "run.wandb: ",
        kept=("{dir}",),
    ),
    # commands and options
    Case("an unknown command", "trian tiny", "No such command"),
    Case("an unknown option", "train tiny --sed 3", "No such option"),
    Case("an empty preset", "train ''", "unknown preset"),
    Case("a preset with a carriage return", "train 'ti\rny'", r"unknown preset 'ti\rny'"),
    Case("a preset that is a path", "train ../../etc/passwd", "unknown preset"),
    Case("a preset with a null byte", "layers 'a\0b'", "null character"),
    Case("a preset as long as a book", "train " + 5000 * "x", "unknown preset"),
    Case("a host without hosts", "train tiny --host 3", "--host=3: only with a number of hosts"),
    Case("hosts that are no number", "train tiny --hosts many", "expected a number"),
    *(
        Case(
            f"hosts: {name}",
            f"train tiny --host 0 --hosts {count} --coordinator localhost:{port}",
            message,
        )
        for name, count, port, message in (
            ("10^9 of them", 10**9, 1, "expected a number"),
            ("of many digits", 5000 * "9", 1, "expected a number"),
            ("a port of many digits", 2, 5000 * "9", "--coordinator"),
        )
    ),
    Case(
        "a host beyond the last",
        "train tiny --hosts 2 --host 2 --coordinator localhost:1",
        "must be from 0 to 1",
    ),
    Case(
        "a coordinator of no name",
        "train tiny --hosts 2 --host 1 --coordinator a..b:1",
        "--coordinator=a..b:1: expected",
    ),
    Case(
        "a coordinator that is no address",
        "train tiny --hosts 2 --host 1 --coordinator nowhere",
        "--coordinator",
    ),
    Case("no iteration", "train tiny --profile -3", "is no iteration"),
    Case("an iteration of many digits", "train tiny --profile " + 5000 * "9", "--profile"),
    Case(
        "a checkpoint of many digits",
        "export {run} --out {dir}/x.safetensors --checkpoint " + 5000 * "9",
        "checkpoint=",
    ),
    Case(
        "a checkpoint in Arabic digits",
        "export {run} --out {dir}/x.safetensors --checkpoint ٣",
        "checkpoint=",
    ),
    Case("a size of many digits", GENERATE + " --size " + 5000 * "9" + "x8", "--size", files=P),
    Case("a size in superscript", GENERATE + " --size ²x²", "--size", files=P),
    Case("a negative size", GENERATE + " --size -8x8", "--size", files=P),
    Case(
        "pictures that no machine holds",
        GENERATE + " --size 16384x16384",
        "--prompts",
        files={"{dir}/p.txt": 1000 * "a circle\n"},
    ),
    Case(
        "a negative prompt of bytes",
        GENERATE + " --guidance-scale 3 --negative-prompt \udcff",
        "--negative",
        files=P,
    ),
    Case("no guidance", GENERATE + " --guidance-scale nan", "--guidance-scale", files=P),
    Case("endless guidance", GENERATE + " --guidance-scale 1e999", "--guidance", files=P),
    Case(
        "guidance that no float32 holds", GENERATE + " --guidance-scale 1e39", "--guidance", files=P
    ),
    Case("no LoRA there", GENERATE + " --lora {dir}/none", "no such file", files=P),
    Case(
        "a LoRA that is a pipe",
        GENERATE + " --lora {dir}/x",
        "no such file",
        files=P | {"{dir}/x": pipe},
    ),
    Case(
        "a LoRA that is empty",
        GENERATE + " --lora {dir}/x",
        "not a readable safetensors",
        files=P | {"{dir}/x": b""},
    ),
    Case(
        "a LoRA of zeros",
        GENERATE + " --lora {dir}/x",
        "not a readable safetensors",
        files=P | {"{dir}/x": bytes(100)},
    ),
    Case(
        "latents that are no array",
        GENERATE + " --latents {dir}/x",
        "not a readable .npy",
        files=P | {"{dir}/x": "mine"},
    ),
    Case(
        "latents that are a pipe",
        GENERATE + " --latents {dir}/x",
        "not a readable .npy",
        files=P | {"{dir}/x": pipe},
    ),
    Case(
        "latents that are objects",
        GENERATE + " --latents {dir}/x",
        "not a readable .npy",
        files=P
        | {
            "{dir}/x": b"\x93NUMPY\1\0v\0"
            + b"{'descr': '|O', 'fortran_order': False, 'shape': (1, 4, 4, 4), }"
            + 41 * b" "
            + b"\n"
        },
    ),
    *(
        Case(
            f"latents of {shape}",
            GENERATE + " --latents {dir}/x",
            "not a readable .npy",
            files=P | {"{dir}/x": array(shape)},
        )
        for shape in (
            "(1, 4, 250000, 250000)",
            "(1, -32, 8, 8)",
            "(1099511627776, 1099511627776, 8, 8)",
        )
    ),
    Case(
        "eval: a gallery in a file",
        "eval {run} {run} --paired --gallery {dir}/x/y",
        "is a file",
        files={"{dir}/x": "mine"},
    ),
    Case(
        "eval: a gallery that is a directory",
        "eval {run} {run} --paired --gallery {dir} --force",
        "is a directory",
    ),
    Case("eval: a preset for a run", "eval {run} --preset nope", "--preset=nope"),
    Case(
        "eval: a model whose name holds a comment",
        "eval '{dir}/m #2'",
        "m #2",
        files={"{dir}/m #2": folder},
    ),
    Case(
        "eval: a model whose name is a number",
        "eval 123",
        "model_index.json",
        files={"{dir}/123": folder},
    ),
    Case(
        "plan: a text is there",
        "plan tiny --hlo {dir}",
        "--force",
        files={"{dir}/a.hlo": "mine"},
        kept=("{dir}",),
    ),
    Case(
        "doctor: a path with a space",
        "doctor tiny 'model.path=my models/x'",
        "model.path='my models/x': no such",
        1,
    ),
    Case(
        "doctor: a model that is a pipe",
        "doctor tiny model.path={dir}/x",
        "model.path",
        1,
        files={"{dir}/x": pipe},
    ),
    Case(
        "doctor: a cache that is a file",
        "doctor tiny model.prompt_cache_dir={dir}/x",
        "model.prompt_cache_dir",
        1,
        files={"{dir}/x": "mine"},
    ),
    Case(
        "encode: a cache in nobody's home",
        "encode tiny model.prompt_cache_dir=~nobody-at-all/x",
        "model.prompt_cache_dir",
    ),
    Case("presets: settings without one", "presets seed=1", "overrides need --show PRESET"),
    Case(
        "encode: a cache that is a file",
        "encode tiny model.prompt_cache_dir={dir}/x",
        "is a file",
        files={"{dir}/x": "mine"},
    ),
    Case("encode: no cache", "encode tiny model.prompt_cache_dir=null", "expected a directory"),
    Case("rank: no format", "rank tiny --formats nvfp4,,", "--formats", 2),
    Case("rank: a number with an underscore", "rank tiny --steps 1_0", "--steps"),
    Case("rank: a number of many digits", "rank tiny --steps " + 5000 * "9", "--steps"),
]
