"""What each kernel of a compiled program does: operations of products, and bytes of memory read and written.

Every instruction of a scheduled computation is a kernel. XLA's fusions say what they compute; functions of libraries are known by
name: cuBLASLt's products, cuDNN's block-scaled products, convolutions and flash attention, kernels written in Pallas.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from solrl_jax.planning.hlo import Array, Instruction, Module

Unit = Literal["fp4", "fp8", "bf16", "fp32"]

# no kernels: names for what is there already
FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier", "optimization-barrier",
    "add-dependency", "partition-id", "replica-id",
}  # fmt: skip
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")
SLICES = ("slice", "dynamic-slice", "gather")  # read as much of their first operand as they return
UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # write in place as much as this operand holds
# products of flash attention: the gradient computes the scores again, and has four gradients of products
FORWARD, BACKWARD = 2, 5
PALLAS = ("__gpu$xla.gpu.triton", "mosaic_gpu_v2", "tpu_custom_call")


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel.

    name: the library's function or the kind of fusion, and for products the operand's type; kind: what its time is counted as;
    unit: the type whose peak rate counts; result: type and shape; times: runs in one call of the program; operations and moved
    (bytes of main memory): in each run.
    """

    name: str
    kind: Literal["products", "attention", "memory"]
    unit: Unit
    result: str
    source: str
    times: int
    operations: float
    moved: float


def kernels(module: Module) -> list[Kernel]:
    """All kernels of a program except collectives, in the order in which they run first."""
    reader = _Memory(module)
    return [
        _kernel(step, times, reader)
        for step, times in module.executed()
        if step.opcode not in FREE and not step.opcode.endswith("-done") and collective(step.opcode) is None
    ]


def collective(opcode: str) -> str | None:
    """The collective that an instruction starts, if it starts one."""
    name = opcode.removesuffix("-start")
    return name if name in COLLECTIVES else None


def native(found: Iterable[Kernel]) -> dict[str, int]:
    """How often each function of a library and each kernel in Pallas runs, by name; products by their operands' type too."""
    counts = Counter[str]()
    for kernel in found:
        if not kernel.name.startswith("fusion") and (kernel.kind != "memory" or kernel.name in PALLAS):
            counts[kernel.name] += kernel.times
    return dict(counts)


def _kernel(step: Instruction, times: int, memory: "_Memory") -> Kernel:
    kind: Literal["products", "attention", "memory"] = "memory"
    operations, widest = 0.0, "bf16"
    name = step.opcode
    if step.opcode == "fusion":
        name = " ".join(["fusion", *re.findall(r'"kind":"(__\w+)"', step.attributes)])
        operations, widest = _inside(memory.module.computations[step.called("calls")], memory.module)
    elif step.opcode in ("dot", "convolution"):
        operations, widest = _product(step)
    elif step.opcode == "custom-call":
        name = step.target
        operations, widest = _library(step)
    if "fmha" in name or (name in PALLAS and re.search("flash|splash|attention", step.source)):
        kind = "attention"
    elif operations:
        kind = "products"
        name = f"{name} {widest}"
    shape = step.arrays[0] if step.arrays else Array("token", ())
    result = f"{shape.kind}[{','.join(map(str, shape.shape))}]"
    return Kernel(name, kind, unit(widest), result, step.source, times, operations, memory.moved(step))


def unit(kind: str) -> Unit:
    """The units that multiply elements of this type: of 8 bits and of 4 bits with a type of their own."""
    if kind.startswith("f4"):
        return "fp4"
    if kind.startswith(("f8", "s8", "u8")):
        return "fp8"
    return "fp32" if kind in ("f32", "f64") else "bf16"


# --- operations ---


def _inside(steps: Sequence[Instruction], module: Module) -> tuple[float, str]:
    """Operations of the products in a fusion, and the type of those that have most."""
    found = [_product(step) for step in steps if step.opcode in ("dot", "convolution")]
    inner = [step.called("calls") for step in steps if step.opcode == "fusion"]
    found += [_inside(module.computations[name], module) for name in inner]
    largest = max(found, default=(0.0, "bf16"))
    return sum(operations for operations, _ in found), largest[1]


def _product(step: Instruction) -> tuple[float, str]:
    """Of an instruction `dot` or `convolution`."""
    left, right = (operand.arrays[0] for operand in step.operands[:2])
    if step.opcode == "convolution":
        return _convolution(step, left, right, step.arrays[0]), left.kind
    depth = math.prod(left.shape[i] for i in step.integers("lhs_contracting_dims"))
    return 2.0 * math.prod(step.arrays[0].shape) * depth, left.kind


def _library(step: Instruction) -> tuple[float, str]:
    """Of a custom call; 0 if the function multiplies nothing or does not say how much."""
    operands = [operand.arrays[0] for operand in step.operands if operand.arrays]
    result = step.arrays[0]
    if "fmha" in step.target:
        scores = step.attributes.partition("intermediate_tensor_shape")[2]
        shape = [int(n) for n in re.findall(r'"(\d+)"', scores.partition('"dimensions":')[2].partition("]")[0])]
        products = BACKWARD if "Backward" in step.target else FORWARD
        return 2.0 * products * math.prod(shape) * operands[0].shape[-1], operands[0].kind
    if "matmul" in step.target or "blockScaledDot" in step.target:
        (axis,) = step.integers("lhs_contracting_dimensions") or [len(operands[0].shape) - 1]
        return 2.0 * math.prod(result.shape) * operands[0].shape[axis], operands[0].kind
    if step.target.startswith("__cudnn$conv"):
        left, kernel, out = operands[0], operands[1], result
        if "BackwardInput" in step.target:
            left, out = result, operands[0]
        elif "BackwardFilter" in step.target:
            kernel, out = result, operands[1]
        return _convolution(step, left, kernel, out), operands[0].kind
    stated = step.text("flops") if step.target in PALLAS else ""
    return float(stated or 0), operands[0].kind if operands else "bf16"


def _convolution(step: Instruction, left: Array, kernel: Array, out: Array) -> float:
    """Multiplications that read the input, not its padding or the zeros of a dilation (a TPU's batched products are such)."""
    found = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", step.attributes)
    assert found is not None
    at = [dict(zip(labels, array.shape, strict=True)) for labels, array in zip(found.groups(), (left, kernel, out), strict=True)]
    window = dict(re.findall(r"(\w+)=([\dx_\-]+)", step.text_in("window")))
    valid = 1
    for i in range(len(found[1]) - 2):
        part = lambda key, default, i=i: window.get(key, default).split("x")[i] if key in window else default
        low = int(part("pad", "0_0").split("_")[0])
        stride, spread, gaps = (int(part(key, "1")) for key in ("stride", "lhs_dilate", "rhs_dilate"))
        size = (at[0][str(i)] - 1) * spread + 1
        reads = (o * stride + k * gaps - low for o in range(at[2][str(i)]) for k in range(at[1][str(i)]))
        valid *= sum(0 <= read < size and read % spread == 0 for read in reads)
    return 2.0 * valid * at[2]["b"] * at[2]["f"] * at[1]["i"]


# --- memory ---


class _Memory:
    """Bytes of main memory that instructions read and write, in place where they may."""

    def __init__(self, module: Module):
        self.module = module
        self._read: dict[tuple[str, int], float] = {}

    def moved(self, step: Instruction) -> float:
        """What a kernel reads and writes. A library's workspace is not counted."""
        if step.target == "AllocateBuffer":
            return 0.0
        reads = sum(self._reads(step, i) for i in range(len(step.operands)))
        if step.opcode == "custom-call":
            return reads + sum(a.size for i, a in enumerate(step.arrays) if a.space == 0 and (i == 0 or a.kind not in ("s8", "u8")))
        if step.opcode.endswith("-start"):  # the result names its operand too
            return reads + Instruction.size.fget(dataclasses.replace(step, arrays=step.arrays[:1]))
        return reads + self._writes(step)

    def _reads(self, step: Instruction, position: int) -> float:
        """Of one operand: of slices what they return, nothing of what is updated in place."""
        operand = step.operands[position]
        if step.opcode == "fusion":
            return self._parameter(step.called("calls"), position, operand.size)
        if position == 0 and step.opcode.removesuffix("-start") in SLICES:
            return min(operand.size, sum(a.size for a in step.arrays[:1]))
        return 0.0 if position == 0 and step.opcode in UPDATES else operand.size

    def _parameter(self, computation: str, number: int, whole: float) -> float:
        """Of a fusion's parameter, at most the whole once."""
        key = computation, number
        if key not in self._read:
            steps = self.module.computations[computation]
            named = {step for step in steps if step.opcode == "parameter" and step.literal == str(number)}
            total = 0.0
            for step in steps:
                for i, operand in enumerate(step.operands):
                    if operand not in named:
                        continue
                    if step.opcode == "bitcast":
                        named.add(step)
                    elif step.opcode != "tuple":
                        total += self._reads(step, i)
            self._read[key] = total
        return min(whole, self._read[key])

    def _writes(self, step: Instruction) -> float:
        if step.opcode in UPDATES:
            return step.operands[UPDATES[step.opcode]].size
        if step.opcode == "fusion":
            (root,) = [i for i in self.module.computations[step.called("calls")] if i.is_root]
            return min(step.size, self._written(root))
        return step.size

    def _written(self, root: Instruction) -> float:
        """By a fusion's root: of an update in place what it updates."""
        if root.opcode == "tuple":
            return sum(map(self._written, root.operands))
        return self._written(root.operands[0]) if root.opcode == "bitcast" else self._writes(root)
