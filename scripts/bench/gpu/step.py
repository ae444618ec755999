"""Runs one step in this process: `python -m bench.gpu.step TASK`, where TASK is `Task.to_json`.

A step is a generator of names and functions. The result of a function is a figure of the record,
which is written after each of them. A function that raises is recorded with the first line of its
error, and the next one is called.
"""

import importlib
import sys
import traceback

from bench.gpu.record import DONE, FAILED, SKIPPED, Record, Skipped, Task, in_words

# By step: the module that has a function of this name.
MODULES = {
    "facts": "facts",
    "checks": "checks",
    "kernels": "kernels",
    "rewards": "parity",
    "parity": "parity",
    "products": "products",
    "steps": "phases",
    "rollout": "phases",
    "update": "phases",
}


def run(task: Task) -> Record:
    """Runs a step. Returns its record, which is also written."""
    record = Record(task.name)
    record.write(task.path)
    try:
        for name, find in getattr(
            importlib.import_module(f"bench.gpu.{MODULES[task.step]}"), task.step
        )(task):
            try:
                record.result[name] = find()
            except Exception as error:
                traceback.print_exc()
                record.result[name] = {"error": in_words(error)}
                record.reason = record.reason or f"{name}: {in_words(error)}"
            record.write(task.path)
        record.state = FAILED if record.reason else DONE
    except Skipped as error:
        record.state = SKIPPED
        record.reason = str(error)
    except Exception as error:
        traceback.print_exc()
        record.state = FAILED
        record.reason = in_words(error)
    record.write(task.path)
    return record


if __name__ == "__main__":
    run(Task.from_json(sys.argv[1]))
