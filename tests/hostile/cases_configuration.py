"""Settings on the command line, prompt files, and the configuration that a run directory brings."""

from tests.hostile.harness import Case, folder, link, pipe, sparse

BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]\n" + "".join(
    f"{chr(99 + i)}: &{chr(99 + i)} [{','.join(9 * [f'*{chr(98 + i)}'])}]\n" for i in range(8)
)
VALUES = {  # name: (what is given, a part of the line)
    "nothing": ("seed", "expected key=value"),
    "no key": ("=3", "expected key=value"),
    "an unknown key": ("sead=3", "unknown key"),
    "a section": ("train=3", "train"),
    "text for a number": ("seed=abc", "expected an integer"),
    "a truth for a number": ("seed=true", "expected an integer"),
    "a number of 5000 digits": ("seed=" + 5000 * "9", "seed="),
    "a hexadecimal number of 5000 digits": ("seed=0x" + 5000 * "f", "seed="),
    "a number in base 60": ("seed=1" + 5000 * ":10", "seed="),
    "a number that YAML reads in base 8": ("seed=010", "seed='010': expected an integer"),
    "a number that YAML reads in base 60": (
        "train.iterations=1:30",
        "train.iterations='1:30': expected an integer",
    ),
    "a fraction that YAML reads in base 60": (
        "algorithm.beta=1:30.5",
        "algorithm.beta='1:30.5': expected a number",
    ),
    "a date that is none": ("seed=2024-13-77", "seed="),
    "a negative number": ("seed=-1", "seed=-1"),
    "not a number": ("algorithm.beta=.nan", "finite"),
    "infinity": ("algorithm.beta=.inf", "finite"),
    "nearer to 0 than float32 comes": (
        "algorithm.beta=1e-46",
        "algorithm.beta='1e-46': is nearer to 0 than 1.2e-38",
    ),
    "a shift of 1e-20": ("rollout.shift=1e-20", "rollout.shift='1e-20': must be at least 0.001"),
    "a timeout of 1e30": ("reward.timeout=1e30", "reward.timeout='1e30': must be at most"),
    "a weight twice": ("reward.weights={shapes: 1, shapes: 5}", "the key 'shapes' comes twice"),
    "a carriage return": ("a\rb=3", r"unknown key 'a\rb'"),
    "a line separator": ("a\u2028b=3", r"unknown key 'a\u2028b'"),
    "what a terminal obeys": ("a\x1b]0;b\x07=3", r"unknown key 'a\x1b]0;b\x07'"),
    "more than float32": ("algorithm.beta=1e39", "algorithm.beta"),
    "less than minus float32": ("reward.weights={shapes: -1e39}", "reward.weights"),
    "a weight of 1e39": ("reward.weights={shapes: 1e39}", "reward.weights"),
    "a shift of 1e300": ("rollout.shift=1e300", "rollout.shift"),
    "a learning rate of 1e300": ("optimizer.learning_rate=1e300", "optimizer.learning_rate"),
    "a Python object": ("run.dir=!!python/object/apply:os.system [id]", "YAML"),
    "a Python name": ("run.dir=!!python/name:os.system", "YAML"),
    "a tag": ("run.dir=!mine x", "YAML"),
    "bytes": ("run.dir=!!binary aGVsbG8=", "YAML"),
    "an anchor and aliases": ("reward.options={a: &a [1], b: *a}", "YAML"),
    "an alias of itself": ("reward.options=&a [*a]", "YAML"),
    "deep lists": ("lora.target_modules=" + 5000 * "[" + 5000 * "]", "YAML"),
    "deep mappings": ("reward.options=" + 2000 * "{a: " + 2000 * "}", "YAML"),
    "unbalanced brackets": ("lora.target_modules=[[[", "YAML"),
    "a control character": ("run.dir=\x01", "YAML"),
    "two documents": ("run.dir=a\n---\nb", "YAML"),
    "a regular expression that is none": ("lora.target_modules=['(']", "regular expression"),
    "one of a class that is none": (
        "lora.target_modules=['[[:foo:]]']",
        "must be a regular expression (unknown property",
    ),
    "one of a class in a class": ("lora.target_modules=['[[x]']", "matches no parameter"),
    "one that backtracks": (
        "lora.target_modules=['(\\w|\\w|.)*(\\w|\\w|.)*(\\w|.)*#']",
        "lora.target_modules",
    ),
    "one that repeats without end": ("lora.target_modules=['(.*)*#']", "lora.target_modules"),
    "one that repeats too often": ("lora.target_modules=['a{99999999999}']", "regular expression"),
    "one of deep groups": (
        "lora.target_modules=['" + 2000 * "(" + 2000 * ")" + "']",
        "regular expression",
    ),
    "one for fused linears that backtracks": (
        "model.quantization.fused=['(.|.)*(.|.)*(.|.)*#']",
        "model.quantization.fused",
    ),
    "one that matches nothing": ("lora.target_modules=[nothing]", "matches no parameter"),
    "nothing to train in full": (
        "train.parameters=nothing",
        "train.parameters: 'nothing' matches no parameter",
    ),
    "one of what to train that backtracks": (
        "train.parameters='(.|.)*(.|.)*(.|.)*#'",
        "train.parameters",
    ),
    "blocks that do not divide": (
        "model={attention: mhla, mhla_blocks: 7}",
        "model.mhla_blocks=7: 8 x 8 tokens",
    ),
    "a null path": ("model.path=null", "model.path"),
    "a path with a null byte": ('model.path="a\\0b"', "model.path"),
    "a prompt file with a null byte": ('prompts.train="a\\0b"', "prompts.train"),
    "a directory with a null byte": ('run.dir="a\\0b"', "run.dir"),
    "a lone surrogate": ('run.dir="\\ud800"', "run.dir"),
    "a password in an address": ("reward=http://me:secret@localhost:1/", "netrc"),
    "a token in an address": ("reward=http://localhost:1/?token=secret", "netrc"),
    "an address of another kind": ("reward=ftp://localhost/x", "reward"),
    "a file as an address": ("reward=file:///etc/passwd", "reward"),
    "an address without a host": ("reward=http://", "reward"),
    "a module that is none": ("reward=nowhere:f", "cannot be imported"),
    "a function that is none": ("reward=os:nothing", "cannot be imported"),
    "a value that is no function": ("reward=os:sep", "is no function"),
    "a class of Python": ("reward=builtins:dict", "reward"),
    "the shell": ("reward=os:system", "reward"),
    "an option that nobody takes": ("reward.options={shapes: {a: 1}}", "takes none"),
    "options that are no mapping": ("reward.options=[1]", "reward.options"),
    "a path of no reward": ("reward.paths={a: b}", "reward.paths"),
    "a preset within": ("preset=tiny", "by name"),
    "a choice that is a path": ("explore=../../x", "unknown explore"),
    "an empty reward": ("reward=", "unknown reward"),
    "no weights": ("reward.weights={}", "must not be empty"),
    "a reward twice": ("reward.eval_only=[shapes]", "must not name"),
    "a version": ("version=3", "version"),
    "a mesh of none": ("mesh.data=0", "mesh.data"),
    "a mesh too large": ("mesh.fsdp=7", "mesh"),
    "a key of 5000 parts": (5000 * "a." + "b=1", "unknown key"),
    "a value of 100 kB": ("run.dir=" + 100_000 * "x", "run.dir"),
}
PROMPTS = {
    "no file": (None, "no such file"),
    "a pipe": (pipe, "not a regular file"),
    "a directory": (folder, "cannot be read"),
    "/dev/zero": (link("/dev/zero"), "not a regular file"),
    "a link to itself": (link("p.txt"), "cannot be read"),
    "nothing in it": ("", "holds no prompt"),
    "blanks": (" \n\t\n", "holds no prompt"),
    "binary": (bytes(range(256)), "cannot be read as UTF-8"),
    "UTF-16": ("a red circle".encode("utf-16"), "cannot be read as UTF-8"),
    "100 GB": (sparse(10**11), "bytes"),
    "200 MB of zeros": (bytes(200_000_000), "bytes"),
    "a million words": ("red " * 1_000_000, "line 1"),
    "a million lines": (2**20 * "a\n" + "\n", "more than 1048576 lines"),
    "a null character": ("a red \0 circle\n", "line 1"),
    "what a terminal obeys": ("a \x1b]0;red\x07 circle\n", "line 1"),
}
LINES = {
    "no JSON": ("{", "line 1: not JSON"),
    "no object": ("[1]", "expected an object"),
    "no prompt": ('{"text": "a"}', "expected an object"),
    "a number": ('{"prompt": 3}', "expected an object"),
    "a prompt twice": ('{"prompt": "a", "prompt": "b"}', "the key 'prompt' comes twice"),
    "a million lists": (
        '{"prompt": "a", "tag": [' + 2**20 * "[]," + "[]]}",
        "more than 1048576 lines, or lists and objects",
    ),
    "a lone surrogate": ('{"prompt": "a \\ud800 circle"}', "line 1"),
    "deep": ('{"prompt": "a", "tag": ' + 100_000 * "[" + 100_000 * "]" + "}", "line 1: not JSON"),
    "rather deep": ('{"prompt": "a", "tag": ' + 500 * "[" + 500 * "]" + "}", "line 1: not JSON"),
    "a number of 5000 digits": ('{"prompt": "a", "tag": ' + 5000 * "9" + "}", "line 1: not JSON"),
    "infinity": ('{"prompt": "a", "tag": Infinity}', "line 1: not JSON"),
    "a number too large": ('{"prompt": "a", "tag": 1e999}', "line 1: not JSON"),
    "twice with other metadata": (
        '{"prompt": "a", "t": 1}\n{"prompt": "a", "t": 2}',
        "comes twice",
    ),
}
CONFIG = {  # a run's config.yaml
    "nothing in it": (b"", "config.yaml"),
    "binary": (bytes(range(256)), "config.yaml"),
    "UTF-16": ("seed: 1".encode("utf-16"), "config.yaml"),
    "a number": ("3", "config.yaml"),
    "a list": ("[1, 2]", "config.yaml"),
    "a bomb": (BOMB, "config.yaml"),
    "1 GB of zeros": (sparse(10**9), "config.yaml"),
    "deep": (100_000 * "[", "config.yaml"),
    "a Python object": ("!!python/object/apply:os.system ['touch {dir}/touched']", "config.yaml"),
    "other keys": ("a: 1\nb: 2\n", "config.yaml"),
    "a version to come": ("version: 99\n", "config.yaml"),
    "a version that is a list": ("version: [1]\n", "config.yaml"),
    "an old one of numbers": ("rollout: 3\nseed: {}\n", "config.yaml"),
    "a thousand keys": ("".join(f"k{i}: {i}\n" for i in range(1000)), "config.yaml"),
}
CALLS = {
    "export": "export {run} --out {dir}/x.safetensors",
    "eval": "eval {run}",
    "sample": "sample {run} --prompts embedded:shapes-test --out {dir}/out",
    "linears": "linears {run}",
    "rank": "rank {run} --prompts 1 --out {dir}/out",
}


def quoted(text: str) -> str:
    return "'" + text.replace("'", "'\"'\"'") + "'"


CASES = [
    Case("the last of two rewards", "doctor tiny reward=nowhere:f reward=shapes", "nothing", 0),
    *(
        Case(
            f"a setting: {name}",
            f"train tiny run.dir={{dir}}/run {quoted(given)}",
            said,
            seconds=30,
        )
        for name, (given, said) in VALUES.items()
    ),
    *(
        Case(
            f"prompts: {name}",
            "presets --show tiny prompts.train={dir}/p.txt",
            said,
            files={"{dir}/p.txt": made} if made is not None else {},
        )
        for name, (made, said) in PROMPTS.items()
    ),
    *(
        Case(
            f"prompts of a sample: {name}",
            "sample embedded:tiny-sana --prompts {dir}/p.txt --out {dir}/out",
            said,
            files={"{dir}/p.txt": made} if made is not None else {},
        )
        for name, (made, said) in PROMPTS.items()
    ),
    *(
        Case(
            f"an instruction: {name}",
            "encode tiny model.prompt_cache_dir={dir}/c model.instruction={dir}/p.txt",
            "model.instruction",
            files={"{dir}/p.txt": made} if made is not None else {},
        )
        for name, (made, _) in PROMPTS.items()
    ),
    *(
        Case(
            f"a line of JSON: {name}",
            "presets --show tiny prompts.train={dir}/p.jsonl",
            said,
            files={"{dir}/p.jsonl": made},
        )
        for name, (made, said) in LINES.items()
    ),
    *(
        Case(
            f"a run's configuration, {name}: {command}",
            call,
            said,
            files={"{run}/config.yaml": made},
        )
        for name, (made, said) in CONFIG.items()
        for command, call in CALLS.items()
    ),
    *(
        Case(
            f"a run's configuration is a {name}: {command}",
            call,
            "not a run directory" if command in ("export", "sample") else "",
            files={"{run}/config.yaml": made},
        )
        for name, made in (("pipe", pipe), ("directory", folder))
        for command, call in CALLS.items()
        if command in ("export",)
    ),
]
