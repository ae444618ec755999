"""Counts the work of each kernel of a compiled program: arithmetic operations and bytes of memory.

Every instruction of a scheduled computation is a kernel. Fusions state what they compute. Library
functions are known by name: matmuls of cuBLASLt, block-scaled matmuls, convolutions and flash
attention of cuDNN, and kernels written in Pallas.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal

from solrl_jax.planning.hlo import Array, Instruction, Module

# Instructions that only name data, and run no kernel.
FREE = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "after-all",
    "opt-barrier",
    "partition-id",
}
COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "ragged-all-to-all",
)
# They read as much of their first operand as they return.
SLICES = ("slice", "dynamic-slice", "gather")
# A fusion-start runs beside the kernels that follow it.
FUSIONS = ("fusion", "fusion-start")
# In-place updates, with the index of the operand whose size they write.
UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
# The number of matmuls of flash attention. Its gradient computes the scores again, and four
# gradients.
FORWARD = 2
BACKWARD = 5
TPU_KERNEL = "tpu_custom_call"
PALLAS = ("__gpu$xla.gpu.triton", "mosaic_gpu_v2", TPU_KERNEL)
_ATTENTION = re.compile("flash|splash|attention")
# The number of matmuls of the kernels of JAX's attention for TPUs: its two gradients, and the
# forward pass.
_PARTS = {"dkv": 4, "dq": 3, "": 2}
Kind = Literal["products", "attention", "memory"]
Unit = Literal["fp4", "fp8", "int8", "bf16", "tf32", "fp32"]


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel of a compiled program: an instruction that runs on the device.

    Attributes:
        name: The library function, "fusion" with its kind, or the opcode of another instruction.
            Matmuls and convolutions also have the type of their operands, e.g. "__cublas$gemm
            bf16".
        kind: What its time counts as: "attention" (flash attention of cuDNN or Pallas), "products"
            (every other kernel with `operations` above 0) or "memory" (all others).
        unit: The arithmetic unit whose peak rate counts, a field of `targets.Peaks`: "fp4", "fp8",
            "int8", "bf16", "tf32" or "fp32". It means nothing where `operations` is 0.
        result: Type and shape of its first result, e.g. "bf16[2,64]"; "" without a result.
        source: The JAX operation that it comes from; "" if it is not noted.
        times: The number of runs in one call of the program.
        operations: The number of arithmetic operations of one run, for matmuls, convolutions and
            attention; all others have 0. A multiply-add counts as 2.
        moved: The bytes of main memory that one run reads and writes.
    """

    name: str
    kind: Kind
    unit: Unit
    result: str
    source: str
    times: int
    operations: float
    moved: float


def kernels(module: Module) -> list[Kernel]:
    """Returns all kernels of a program except collectives, in the order in which they run.

    Instructions that only name data (`FREE`) and the ends of asynchronous operations are left out,
    too. A kernel in a loop is returned once, with its number of runs.

    Args:
        module: The parsed text of the compiled program, for one device.
    """
    memory = _Memory(module)
    steps = [
        (step, times)
        for step, times in module.executed()
        if step.opcode not in FREE and collective(step.opcode) is None
    ]
    return [
        _kernel(step, times, memory) for step, times in steps if not step.opcode.endswith("-done")
    ]


def collective(opcode: str) -> str | None:
    """Returns the kind of collective that an instruction with this opcode starts, or None.

    Args:
        opcode: The opcode, e.g. "all-gather" or "all-gather-start", for both of which the result is
            "all-gather". An opcode that ends with "-done" gives None.
    """
    name = opcode.removesuffix("-start")
    return name if name in COLLECTIVES else None


def native(all_kernels: Iterable[Kernel]) -> dict[str, int]:
    """Counts how often each library function and each Pallas kernel runs, by its name.

    Matmuls and convolutions that XLA compiles itself, as "dot" and "convolution" outside of
    fusions, are counted too. Fusions and all other kernels that only move memory are not.

    Args:
        all_kernels: The kernels of a program.

    Returns:
        The number of runs in one call of the program by `Kernel.name`.
    """
    counts = Counter[str]()
    for kernel in all_kernels:
        if not kernel.name.startswith("fusion") and (
            kernel.kind != "memory" or kernel.name in PALLAS
        ):
            counts[kernel.name] += kernel.times
    return dict(counts)


def unit(kind: str) -> Unit:
    """Returns the arithmetic unit that multiplies elements of a type.

    Args:
        kind: The type as HLO names it, or "tf32" for float32 that is multiplied in lower precision.

    Returns:
        "fp4" for four-bit floats; "fp8" for eight-bit floats; "int8" for s8 and u8; "tf32" for
        "tf32"; "fp32" for f32 and f64; and "bf16" for everything else, f16 included.
    """
    if kind.startswith("f4"):
        return "fp4"
    if kind.startswith("f8"):
        return "fp8"
    if kind in ("s8", "u8"):
        return "int8"
    return "tf32" if kind == "tf32" else "fp32" if kind in ("f32", "f64") else "bf16"


def _kernel(step: Instruction, times: int, memory: "_Memory") -> Kernel:
    """Describes the kernel of an instruction.

    A fusion around a library function is described as that function.

    Args:
        step: The instruction, which is no collective and runs on the device.
        times: The number of its runs.
        memory: Counts the bytes of the program's instructions.

    Returns:
        The kernel, with its operations and bytes. Those of a function that is not known are counted
        as 0 operations, so that it counts as "memory".
    """
    inside = memory.module.computations[step.value("calls")] if step.opcode in FUSIONS else []
    # XLA of JAX 0.11 may fuse a library function with the slices that it reads and writes.
    work = next((inner for inner in inside if inner.opcode == "custom-call"), step)
    name = work.opcode
    operations = (0.0, "bf16")
    source = work.text("op_name")
    if work.opcode in FUSIONS:
        name = " ".join(["fusion", *re.findall(r'"kind":"(__\w+)"', work.attributes)])
        operations = _inside(inside, memory.module)
    elif work.opcode in ("dot", "convolution"):
        operations = _product(work)
    elif work.opcode == "custom-call":
        name = work.text("custom_call_target")
        operations = _library(work, name)
    count, operand = operations
    kind: Kind = "memory"
    if "fmha" in name or (name in PALLAS and _ATTENTION.search(source)):
        kind = "attention"
    elif count:
        kind = "products"
        name = f"{name} {operand}"
    result = "".join(
        f"{a.kind}[{','.join(map(str, a.shape))}]"
        for a in work.arrays[:1] and [_first_result(work)]
    )
    return Kernel(name, kind, unit(operand), result, source, times, count, memory.moved(step, name))


# --- operations, and the types of the operands of matmuls ---


def _inside(steps: Sequence[Instruction], module: Module) -> tuple[float, str]:
    """Counts the operations of the matmuls and convolutions in a fusion.

    Args:
        steps: The instructions of the fusion.
        module: The program, for fusions within it.

    Returns:
        The operations of one run, a multiply-add counted as 2, and the type of the operands of the
        largest matmul ("bf16" if there is none).
    """
    products = [_product(step) for step in steps if step.opcode in ("dot", "convolution")]
    inner = [step.value("calls") for step in steps if step.opcode == "fusion"]
    products += [_inside(module.computations[name], module) for name in inner]
    return sum((count for count, _ in products), 0.0), max(products, default=(0.0, "bf16"))[1]


def _product(step: Instruction) -> tuple[float, str]:
    """Counts the operations of XLA's own matmul or convolution.

    Args:
        step: An instruction with the opcode "dot" or "convolution".

    Returns:
        The operations of one run, a multiply-add counted as 2, and the type that the operands are
        multiplied in, e.g. "bf16" or "tf32".
    """
    left, right = (operand.arrays[0] for operand in step.operands[:2])
    if step.opcode == "convolution":
        return _convolution(step, left, right, step.arrays[0]), _matmul_type(step, left.kind)
    depth = math.prod(left.shape[i] for i in step.integers("lhs_contracting_dims"))
    return 2.0 * math.prod(step.arrays[0].shape) * depth, _matmul_type(step, left.kind)


def _matmul_type(step: Instruction, kind: str) -> str:
    """Returns the type that operands are multiplied in: "tf32" for "f32" unless the matmul asks for
    the highest precision, and else `kind`.

    Args:
        step: The matmul, whose attributes name its precision.
        kind: The type of the operands.
    """
    return "tf32" if kind == "f32" and "highest" not in step.attributes.lower() else kind


def _library(step: Instruction, name: str) -> tuple[float, str]:
    """Counts the operations of a library function or of a Pallas kernel.

    The forward pass of flash attention has two matmuls, its gradient in cuDNN five; the two
    gradient kernels of JAX's attention for TPUs have four ("dkv") and three ("dq"). A Pallas kernel
    of another kind states its operations in its `cost_estimate`, and has 0 without one.

    Args:
        step: The custom call, with its operands, result and attributes.
        name: The name of the function that it calls, e.g. "__cublas$gemm" or "tpu_custom_call".
            Functions with other names than those above have 0 operations.

    Returns:
        The operations of one run, a multiply-add counted as 2, and the type that the operands are
        multiplied in; "bf16" without operands.
    """
    operands = [operand.arrays[0] for operand in step.operands if operand.arrays]
    result = step.arrays[0]
    kind = _matmul_type(step, operands[0].kind) if operands else "bf16"
    if "fmha" in name:
        scores = (
            step.attributes.partition('"intermediate_tensor_shape"')[2]
            .partition('"dimensions":')[2]
            .partition("]")[0]
        )
        count = math.prod(int(n) for n in re.findall(r"\d+", scores))
        return 2.0 * (BACKWARD if "Backward" in name else FORWARD) * count * operands[0].shape[
            -1
        ], kind
    if "matmul" in name or "blockScaledDot" in name:
        axes = step.integers("lhs_contracting_dimensions") or [len(operands[0].shape) - 1]
        return 2.0 * math.prod(result.shape) * math.prod(operands[0].shape[i] for i in axes), kind
    if name.startswith("__cudnn$conv"):
        arrays = {
            "Input": (result, operands[1], operands[0]),
            "Filter": (operands[0], result, operands[1]),
        }
        backward = name.partition("Backward")[2]
        return _convolution(step, *arrays.get(backward, (operands[0], operands[1], result))), kind
    if name == TPU_KERNEL and _ATTENTION.search(step.text("op_name")):
        q, k = [a for a in operands if len(a.shape) == 4][
            :2
        ]  # [rows, heads, queries or keys, head]
        products = next(count for part, count in _PARTS.items() if part in step.text("op_name"))
        return 2.0 * products * math.prod(q.shape) * k.shape[2], q.kind
    return float(step.text("flops") or 0 if name in PALLAS else 0), kind  # of its `cost_estimate`


def _convolution(step: Instruction, left: Array, kernel: Array, out: Array) -> float:
    """Returns the operations of a convolution on elements of the input, a multiply-add counted as
    2.

    Padding and the zeros of dilation are not counted; batched matmuls on TPUs have many of them.

    Args:
        step: The convolution, whose attributes name the axes and the window.
        left: The type and shape of the input.
        kernel: The type and shape of the filter.
        out: The type and shape of the output.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", step.attributes)
    assert labels is not None
    arrays = zip(labels.groups(), (left, kernel, out), strict=True)
    sizes = [dict(zip(names, array.shape, strict=True)) for names, array in arrays]
    text = re.search(r"\bwindow=\{([^}]*)\}", step.attributes)
    window = dict(re.findall(r"(\w+)=(\S+)", text[1])) if text else {}
    taps = math.prod(
        _taps([size[str(i)] for size in sizes], window, i) for i in range(len(labels[1]) - 2)
    )
    return 2.0 * taps * sizes[2]["b"] * sizes[2]["f"] * sizes[1]["i"]


def _taps(sizes: Sequence[int], window: dict[str, str], axis: int) -> int:
    """Counts the pairs of an output and a tap of the filter that meet an element of the input,
    along one axis.

    Args:
        sizes: The sizes of input, filter and output along the axis.
        window: The attributes of the window by name, one value per spatial axis joined by "x":
            "pad", "stride", "lhs_dilate" and "rhs_dilate". An absent one has no effect.
        axis: The number of the spatial axis, from 0.

    Returns:
        The number of pairs. Pairs that meet padding or a zero of dilation are not counted.
    """
    low, stride, spread, gap = (
        int(window[key].split("x")[axis].split("_")[0]) if key in window else default
        for key, default in (("pad", 0), ("stride", 1), ("lhs_dilate", 1), ("rhs_dilate", 1))
    )
    reads = (o * stride + k * gap - low for o in range(sizes[2]) for k in range(sizes[1]))
    return sum(0 <= read <= (sizes[0] - 1) * spread and read % spread == 0 for read in reads)


# --- memory ---


def _first_result(step: Instruction) -> Array:
    """Returns the first result of an instruction, or the later result of an asynchronous start.

    Args:
        step: An instruction with at least one result. The tuple of a start repeats the operands
            before the result; a "copy-start" has them after it.
    """
    return step.arrays[
        len(step.operands) if step.opcode.endswith("-start") and step.opcode != "copy-start" else 0
    ]


def _is_workspace(step: Instruction, result: int) -> bool:
    """Returns whether a result of an instruction is a library's workspace, which nothing reads: a
    result of bytes, other than the first one, of a custom call.

    Args:
        step: The instruction, of any opcode.
        result: The index of the result.
    """
    return step.opcode == "custom-call" and result > 0 and step.arrays[result].kind in ("s8", "u8")


class _Memory:
    """Counts the bytes of main memory that instructions read and write, in place where possible.

    Keeps the counts of the parameters of fusions.

    Attributes:
        module: The compiled program, whose instructions are counted.
    """

    def __init__(self, module: Module):
        """Stores the program. Nothing is counted yet.

        Args:
            module: The program whose instructions are counted.
        """
        self.module = module
        self._parameter_reads: dict[tuple[str, int], float] = {}

    def moved(self, step: Instruction, name: str) -> float:
        """Returns the bytes that a kernel reads and writes, without a library's workspace.

        An asynchronous start, such as a copy, counts for the whole operation.

        Args:
            step: The instruction of the program that is the kernel.
            name: The name of the kernel. "AllocateBuffer" moves nothing.
        """
        if name == "AllocateBuffer":
            return 0.0
        reads = sum((self._reads(step, i) for i in range(len(step.operands))), 0.0)
        if step.opcode.endswith("-start") and step.opcode not in FUSIONS:
            result = _first_result(step)
            return reads + (result.size if result.space == 0 else 0.0)
        return reads + self._writes(step)

    def _reads(self, step: Instruction, position: int) -> float:
        """Returns the bytes that an instruction reads of one operand.

        A slice or a gather reads as much of its first operand as it returns, at most all of it. An
        update reads nothing of the array that it updates in place. A fusion reads what its
        instructions read.

        Args:
            step: An instruction of the program or of one of its fusions.
            position: The index of the operand.
        """
        operand = step.operands[position]
        if step.opcode in FUSIONS:
            return min(operand.size, self._parameter(step.value("calls"), position))
        if position == 0 and step.opcode.removesuffix("-start") in SLICES:
            return min(operand.size, _first_result(step).size)
        return 0.0 if position == 0 and step.opcode in UPDATES else operand.size

    def _parameter(self, computation: str, number: int) -> float:
        """Returns the bytes that all readers within a fusion read of one of its parameters, added
        up.

        The result may exceed the size of the parameter. It is kept for the next call.

        Args:
            computation: The name of the fusion's computation.
            number: The number of the parameter, from 0.
        """
        key = computation, number
        if key not in self._parameter_reads:
            steps = self.module.computations[computation]
            total = 0.0
            names = {
                step for step in steps if step.opcode == "parameter" and step.literal == str(number)
            }
            for step in steps:
                at = [i for i, operand in enumerate(step.operands) if operand in names]
                if at and step.opcode == "bitcast":
                    names.add(step)
                elif step.opcode != "tuple":
                    total += sum(self._reads(step, i) for i in at)
            self._parameter_reads[key] = total
        return self._parameter_reads[key]

    def _writes(self, step: Instruction) -> float:
        """Returns the bytes that an instruction writes to main memory, without a library's
        workspace.

        An update in place writes only the updated part, also as the root of a fusion.

        Args:
            step: An instruction of the program, or the root of a fusion.
        """
        if step.opcode in UPDATES:
            return step.operands[UPDATES[step.opcode]].size
        if step.opcode in FUSIONS:
            return min(step.size, self._fusion_writes(self.module.root(step.value("calls"))))
        return sum(
            a.size for i, a in enumerate(step.arrays) if a.space == 0 and not _is_workspace(step, i)
        )

    def _fusion_writes(self, root: Instruction) -> float:
        """Returns the bytes that a fusion writes, given its root.

        Args:
            root: The instruction whose result is that of the fusion. Of a tuple, all parts count; a
                bitcast counts as its operand; a library's workspace counts as 0.
        """
        if root.opcode == "tuple":
            return sum(map(self._fusion_writes, root.operands), 0.0)
        if root.opcode == "get-tuple-element" and _is_workspace(
            root.operands[0], int(root.value("index"))
        ):
            return 0.0
        return (
            self._fusion_writes(root.operands[0])
            if root.opcode == "bitcast"
            else self._writes(root)
        )
