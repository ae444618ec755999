"""Overrides, prompt files, and the configuration in a run directory: one case per kind."""

from tests.hostile.harness import Case, folder, pipe, sparse

# By name: an override of `solrl train tiny`, and a part of the line that refuses it.
OVERRIDES = {
    "no value": ("seed", "expected key=value"),
    "an unknown key": ("sead=3", "unknown key"),
    "a value in place of a section": ("train=3", "train"),
    "text in place of a number": ("seed=abc", "expected an integer"),
    "a date that does not exist": ("seed=2024-13-77", "seed="),
    "not a number": ("algorithm.beta=.nan", "finite"),
    "a weight twice": ("reward.weights={shapes: 1, shapes: 5}", "shapes"),
    "a control character of terminals": ("a\x1b]0;b\x07=3", r"unknown key 'a\x1b]0;b\x07'"),
    "a Python object": ("run.dir=!!python/object/apply:os.system [id]", "YAML"),
    "unbalanced brackets": ("lora.target_modules=[[[", "YAML"),
    "two documents": ("run.dir=a\n---\nb", "YAML"),
    "a wrong regular expression": ("lora.target_modules=['(']", "regular expression"),
    "adapters on nothing": ("lora.target_modules=[nothing]", "matches no parameter"),
    "nothing to train": ("train.parameters=nothing", "'nothing' matches no parameter"),
    "blocks that do not divide": (
        "model={attention: mhla, mhla_blocks: 7}",
        "model.mhla_blocks=7: 8 x 8 tokens",
    ),
    "a password in a URL": ("reward=http://me:secret@localhost:1/", "netrc"),
    "a URL of another kind": ("reward=ftp://localhost/x", "reward"),
    "a module that does not exist": ("reward=nowhere:f", "cannot be imported"),
    "a value that is no function": ("reward=os:sep", "is no function"),
    "an option that the reward does not have": (
        "reward.options={shapes: {a: 1}}",
        "this reward has no options",
    ),
    "a choice that is a path": ("explore=../../x", "unknown explore"),
    "no weights": ("reward.weights={}", "must not be empty"),
    "a version": ("version=4", "version"),
    "more devices than there are": ("mesh.fsdp=7", "mesh"),
}
# By name: the content of a prompt file or what makes it (None: no file), and a part of the line.
PROMPTS = {
    "no file": (None, "no such file"),
    "a pipe": (pipe, "not a regular file"),
    "a directory": (folder, "cannot be read"),
    "nothing in it": (" \n\t\n", "holds no prompt"),
    "binary": (bytes(range(256)), "cannot be read as UTF-8"),
    "100 GB": (sparse(10**11), "bytes"),
    "a million words in a line": ("red " * 1_000_000, "line 1"),
    "a control character of terminals": ("a \x1b]0;red\x07 circle\n", "line 1"),
}
# By name: the content of a .jsonl prompt file, and a part of the line.
JSON_LINES = {
    "no JSON": ("{", "line 1: not JSON"),
    "no object": ("[1]", "expected an object"),
    "no prompt": ('{"words": "a"}', "expected an object"),
    "twice with other metadata": (
        '{"prompt": "a", "t": 1}\n{"prompt": "a", "t": 2}',
        "different metadata",
    ),
}
# By name: the content of a run's config.yaml. Every command that reads runs refuses it in a line
# with the file's name.
CONFIG_FILES = {
    "nothing in it": b"",
    "binary": bytes(range(256)),
    "a list": "[1, 2]",
    "1 GB of zeros": sparse(10**9),
    "a Python object": "!!python/object/apply:os.system ['touch {dir}/touched']",
    "other keys": "a: 1\nb: 2\n",
    "a version to come": "version: 99\n",
}
COMMANDS = {
    "export": "export {run} --out {dir}/x.safetensors",
    "eval": "eval {run}",
}


def quoted(text: str) -> str:
    return "'" + text.replace("'", "'\"'\"'") + "'"


CASES = [
    Case("the last of two rewards", "doctor tiny reward=nowhere:f reward=shapes", "nothing", 0),
    *(
        Case(
            f"an override: {name}",
            f"train tiny run.dir={{dir}}/run {quoted(override)}",
            message,
            seconds=30,
        )
        for name, (override, message) in OVERRIDES.items()
    ),
    *(
        Case(
            f"prompts: {name}",
            "presets --show tiny prompts.train={dir}/p.txt",
            message,
            files={"{dir}/p.txt": content} if content is not None else {},
        )
        for name, (content, message) in PROMPTS.items()
    ),
    Case(
        "an instruction that is binary",
        "encode tiny model.prompt_cache_dir={dir}/c model.instruction={dir}/p.txt",
        "model.instruction",
        files={"{dir}/p.txt": bytes(range(256))},
    ),
    *(
        Case(
            f"a line of JSON: {name}",
            "presets --show tiny prompts.train={dir}/p.jsonl",
            message,
            files={"{dir}/p.jsonl": content},
        )
        for name, (content, message) in JSON_LINES.items()
    ),
    *(
        Case(
            f"a run's configuration, {name}: {command}",
            arguments,
            "config.yaml",
            files={"{run}/config.yaml": content},
            repeats=command != "export",
        )
        for name, content in CONFIG_FILES.items()
        for command, arguments in COMMANDS.items()
    ),
    Case(
        "a run's configuration is a pipe",
        COMMANDS["export"],
        "not a run directory",
        files={"{run}/config.yaml": pipe},
    ),
]
