"""A jaxpr as one list of steps: calls opened up, what no result needs left out. Bodies of loops and branches stay within."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.core import Literal

BODIES = {"scan", "while", "cond"}
SAME = {"reshape", "squeeze", "expand_dims", "transpose", "copy", "optimization_barrier"}  # what is the same in memory
INNER = ("jaxpr", "call_jaxpr", "fun_jaxpr")  # the parameter of a call that holds what is called


class Value:
    """A value of one step of the flattened program."""

    def __init__(self, aval: Any):
        self.shape, self.dtype = tuple(getattr(aval, "shape", ())), getattr(aval, "dtype", np.dtype(np.int32))
        self.size = math.ceil(math.prod(self.shape) * bits(self.dtype) / 8)


@dataclasses.dataclass(frozen=True)
class Step:
    name: str
    ins: tuple[Value, ...]  # without literals
    outs: tuple[Value, ...]
    params: dict[str, Any]
    operands: tuple[Any, ...]  # abstract values of all inputs, literals among them


def bits(dtype: Any) -> int:
    """Of an element; float4 is packed, as it is wherever there are units for it."""
    return 4 if "float4" in str(dtype) else 8 * dtype.itemsize


def flatten(jaxpr: Any, values: Sequence[Value], steps: list[Step]) -> list[Value | None]:
    """Appends the steps of `jaxpr`, calls opened up, and returns its results (None: a literal)."""
    found: dict[Any, Value] = dict(zip(jaxpr.invars, values, strict=True))
    found |= {v: Value(v.aval) for v in jaxpr.constvars}

    def read(atom: Any) -> Value | None:
        return None if isinstance(atom, Literal) else found[atom]

    for eqn in jaxpr.eqns:
        name, params = eqn.primitive.name, eqn.params
        if name == "cond" and params.get("branches_platforms"):  # of what the platform decides, that which all can do
            inner, operands = params["branches"][-1], eqn.invars[1:]
        else:
            inner = None if name in BODIES else next((params[key] for key in INNER if key in params), None)
            operands = eqn.invars
        if inner is not None:
            open_jaxpr = getattr(inner, "jaxpr", inner)
            given = [Value(a.aval) if isinstance(a, Literal) else found[a] for a in operands]
            outs = flatten(open_jaxpr, given, steps)
            found |= {v: Value(v.aval) if out is None else out for v, out in zip(eqn.outvars, outs, strict=True)}
            continue
        if name in SAME and not any(isinstance(a, Literal) for a in operands):
            found |= {v: found[a] for v, a in zip(eqn.outvars, operands[: len(eqn.outvars)], strict=True)}
            continue
        made = tuple(Value(v.aval) for v in eqn.outvars)
        found |= dict(zip(eqn.outvars, made, strict=True))
        ins = [v for v in map(read, operands) if v is not None]
        steps.append(Step(name, tuple(ins), made, params, tuple(a.aval for a in operands)))
    return [read(atom) for atom in jaxpr.outvars]


def live(steps: list[Step], outs: Sequence[Value | None]) -> list[Step]:
    """The steps that a result depends on."""
    wanted = {v for v in outs if v is not None}
    kept = []
    for step in reversed(steps):
        if wanted.intersection(step.outs):
            wanted.update(step.ins)
            kept.append(step)
    return kept[::-1]
