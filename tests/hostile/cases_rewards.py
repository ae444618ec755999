"""Rewards of the user's inside JAX: what they raise, return and hold. It is found before weights
are loaded.
"""

from tests.hostile.harness import Case

WRONG = {  # function of tests/hostile/inside.py, its options, a part of the line
    "raises an assertion": ("raising", "{name: AssertionError}", "AssertionError: no"),
    "raises what has no words": ("raising", "{name: Mute}", "Mute"),
    "ends the process as failed": ("raising", "{name: SystemExit}", "SystemExit: 1"),
    "misspells a name on latents": (
        "raising",
        "{name: NameError, inputs: latents}",
        "NameError: no",
    ),
    "ends the process as it prepares": (
        "raising_when_prepared",
        "{name: SystemExit}",
        "SystemExit: 1",
    ),
    "scores a chunk with one number": (
        "returning",
        "{what: one number}",
        "shape () as 'reward' for 2 images",
    ),
    "scores in a column": (
        "returning",
        "{what: a column}",
        "shape (2, 1) as 'reward' for 2 images",
    ),
    "scores in complex numbers": (
        "returning",
        "{what: a complex number}",
        "expected real numbers [b]",
    ),
    "returns nothing": (
        "returning",
        "{what: nothing}",
        "returned None; expected a dict with 'reward'",
    ),
    "lacks a score on latents": (
        "returning",
        "{what: another name, inputs: latents}",
        "expected a dict with 'reward'",
    ),
    "lacks the score that it names": ("promising", "{}", "expected a dict with 'reward', 'more'"),
    "prepares one row for all": (
        "preparing",
        "{what: one row}",
        "returned shape (1,) for 2 prompts",
    ),
    "prepares objects": ("preparing", "{what: objects}", "returned shape () for 2 prompts"),
    "has no score": (
        "having",
        "{field: score, value: null}",
        "prepare, score, check: expected functions",
    ),
    "has parameters that are words": ("having", "{field: params, value: words}", "params: "),
}

OWN = "tests.hostile.inside"
CASES = [
    Case(
        f"a reward that {name}",
        f"eval embedded:tiny-sana 'reward={OWN}:{function}'"
        f" 'reward.options.{OWN}:{function}={options}'",
        message,
    )
    for name, (function, options, message) in WRONG.items()
]
