"""Counts the work of each kernel of a compiled program: arithmetic operations and bytes of memory.

Every instruction that runs on the device, except for collectives, is one kernel. The text of a
program contains the instructions in each fusion. Library functions are recognized by name: matmuls
of cuBLASLt, block-scaled matmuls, convolutions and flash attention of cuDNN, and kernels written in
Pallas.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal

from solrl_jax.planning.hlo import Instruction, Module, ResultArray

# Instructions that only name data, and run no kernel.
NO_WORK_OPCODES = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "after-all",
    "opt-barrier",
    "partition-id",
    "send",
    "recv",
}
COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "ragged-all-to-all",
)
# Slices, which read only as many bytes of their first operand as they return.
SLICES = ("slice", "dynamic-slice", "gather")
# A fusion-start runs beside the kernels that follow it.
FUSIONS = ("fusion", "fusion-start")
# In-place updates, with the index of the operand whose size they write.
UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
# The number of matmuls of flash attention. Its backward pass has one to compute the scores again,
# and four for gradients.
FORWARD = 2
BACKWARD = 5
TPU_KERNEL = "tpu_custom_call"
PALLAS = ("__gpu$xla.gpu.triton", "mosaic_gpu_v2", TPU_KERNEL)
_ATTENTION = re.compile("flash|splash|attention")
# The number of matmuls in each kernel of JAX's attention for TPUs, by a part of its name: the two
# backward kernels, and the forward kernel.
_PARTS = {"dkv": 4, "dq": 3, "": 2}
Kind = Literal["matmuls", "attention", "memory"]
Unit = Literal["fp4", "fp8", "int8", "bf16", "tf32", "fp32"]


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel of a compiled program: an instruction that runs on the device.

    Attributes:
        name: For a library function, its name (one for all Pallas kernels of a compiler, e.g.
            "tpu_custom_call"). For a fusion, "fusion" and its kind, e.g. "fusion __triton". For any
            other instruction, its opcode, e.g. "copy". The kind "matmuls" appends the type of the
            operands, e.g. "__cublas$gemm bf16".
        kind: The category of its time. "attention": flash attention of cuDNN or Pallas. "matmuls":
            all others with `operations` above 0 (matmuls, convolutions, and Pallas kernels that
            state their operations). "memory": the rest, e.g. copies and elementwise fusions.
        unit: The arithmetic unit that it multiplies on, the name of a peak rate in `targets.Peaks`:
            "fp4", "fp8", "int8", "bf16", "tf32" or "fp32". Meaningless if `operations` is 0.
        result: Type and shape of its first result, e.g. "bf16[2,64]"; "" without a result.
        source: The JAX operation that it was compiled from, e.g. "jit(update)/dot_general"; "" if
            XLA did not record it.
        times: The number of runs in one call of the program.
        operations: The arithmetic operations of one run of a matmul, convolution or attention, with
            2 for a multiply-add, or those that a Pallas kernel states. All other kernels have 0.
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
    """Returns the kernels of a program in the order in which they run.

    Three kinds of instructions are left out: collectives, the ends of asynchronous operations, and
    instructions that do no work, such as parameters and tuples. A kernel in a loop is returned
    once, with its number of runs.

    Args:
        module: The parsed text of the compiled program, for one device.
    """
    memory = _Memory(module)
    steps = [
        (step, times)
        for step, times in module.executed()
        if step.opcode not in NO_WORK_OPCODES and collective(step.opcode) is None
    ]
    return [
        _kernel(step, times, memory) for step, times in steps if not step.opcode.endswith("-done")
    ]


def collective(opcode: str) -> str | None:
    """Returns the kind of collective (one of `COLLECTIVES`) that an instruction is, or None.

    Args:
        opcode: The opcode of the instruction. "all-gather" and "all-gather-start", the start of an
            asynchronous one, both give "all-gather". "all-gather-done", its end, gives None, so
            that each collective is found once.
    """
    name = opcode.removesuffix("-start")
    return name if name in COLLECTIVES else None


def count_library_kernels(all_kernels: Iterable[Kernel]) -> dict[str, int]:
    """Counts the runs of matmuls, convolutions, attention and Pallas kernels that are not fusions.

    They are functions of cuBLAS and cuDNN, Pallas kernels, and matmuls and convolutions of XLA
    itself. A fusion that contains a library function or a Pallas kernel counts as that one. All
    other fusions do not count, even if they contain matmuls.

    Args:
        all_kernels: The kernels of a program.

    Returns:
        The number of runs in one call of the program (`Kernel.times`, which counts the iterations
        of loops), by the name of the kernel (`Kernel.name`).
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
        kind: The type as HLO names it, e.g. "f8e4m3fn"; or "tf32" for float32 that is multiplied in
            lower precision.

    Returns:
        "fp4" and "fp8" for floats of these widths, "int8" (also for "u8"), "tf32", "fp32" (also for
        "f64"), and "bf16" for all other types, float16 included.
    """
    if kind.startswith("f4"):
        return "fp4"
    if kind.startswith("f8"):
        return "fp8"
    if kind in ("s8", "u8"):
        return "int8"
    if kind in ("f32", "f64"):
        return "fp32"
    return "tf32" if kind == "tf32" else "bf16"


def _kernel(step: Instruction, times: int, memory: "_Memory") -> Kernel:
    """Describes the kernel that an instruction runs.

    A fusion that contains a library function is described as that function. An unknown library
    function has 0 operations.

    Args:
        step: The instruction, which is not a collective.
        times: The number of its runs in one call of the program.
        memory: The counter of bytes for the program that the instruction is part of.
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
        kind = "matmuls"
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
        module: The program, in which fusions within the fusion are looked up.

    Returns:
        A pair: the operations of one run, with 2 for a multiply-add, and the operand type of the
        matmul or convolution with most operations, e.g. "tf32" ("bf16" if there is none).
    """
    products = [_product(step) for step in steps if step.opcode in ("dot", "convolution")]
    inner = [step.value("calls") for step in steps if step.opcode == "fusion"]
    products += [_inside(module.computations[name], module) for name in inner]
    return sum((count for count, _ in products), 0.0), max(products, default=(0.0, "bf16"))[1]


def _product(step: Instruction) -> tuple[float, str]:
    """Counts the operations of a matmul or convolution that XLA compiles itself.

    Args:
        step: An instruction with the opcode "dot" or "convolution".

    Returns:
        A pair: the operations of one run, with 2 for a multiply-add, and the type that the operands
        are multiplied in, e.g. "bf16" or "tf32".
    """
    left, right = (operand.arrays[0] for operand in step.operands[:2])
    if step.opcode == "convolution":
        return _convolution(step, left, right, step.arrays[0]), _matmul_type(step, left.kind)
    depth = math.prod(left.shape[i] for i in step.integers("lhs_contracting_dims"))
    return 2.0 * math.prod(step.arrays[0].shape) * depth, _matmul_type(step, left.kind)


def _matmul_type(step: Instruction, kind: str) -> str:
    """Returns the type that a matmul multiplies its operands in.

    Args:
        step: The instruction of the matmul.
        kind: The type of its operands, as HLO names it.

    Returns:
        "tf32" for operands in "f32", unless the text of the attributes contains "highest" (as in
        `operand_precision={highest,highest}`). Otherwise `kind`.
    """
    return "tf32" if kind == "f32" and "highest" not in step.attributes.lower() else kind


def _library(step: Instruction, name: str) -> tuple[float, str]:
    """Counts the operations of a library function or of a Pallas kernel.

    It recognizes matmuls, convolutions and attention of cuBLAS and cuDNN, and JAX's attention for
    TPUs. Any other Pallas kernel has the operations that its `cost_estimate` states, or 0 without
    one. All other functions, and functions without a result, have 0.

    Args:
        step: The instruction that calls the function ("custom-call").
        name: The name of the function, e.g. "__cublas$gemm" or "tpu_custom_call".

    Returns:
        A pair: the operations of one run, with 2 for a multiply-add, and the type that the operands
        are multiplied in ("bf16" without operands).
    """
    if not step.arrays:  # a function that is called for its effect, such as a callback
        return 0.0, "bf16"
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


def _convolution(
    step: Instruction, left: ResultArray, kernel: ResultArray, out: ResultArray
) -> float:
    """Returns the operations of one run of a convolution, with 2 for a multiply-add.

    Multiplications with padding, or with the zeros that dilation inserts, do not count. There are
    many of them in the convolutions that XLA writes for batched matmuls on TPUs.

    Args:
        step: The instruction, whose attributes name the axes of the arrays, the padding and the
            strides.
        left: The type and shape of the input.
        kernel: The type and shape of the filter. With feature groups, it has the input channels of
            one group.
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
    """Counts the multiplications of a convolution along one spatial axis, for one pair of an input
    and an output channel.

    Each output element multiplies each filter element with one input element. Multiplications with
    padding, or with the zeros that dilation inserts, do not count.

    Args:
        sizes: The lengths of input, filter and output along the axis.
        window: The window attributes of the convolution, as HLO writes them: texts with one part
            per spatial axis, joined by "x", e.g. "2x2". The keys are "pad" (low and high, e.g.
            "1_1x0_0"), "stride", "lhs_dilate" (of the input) and "rhs_dilate" (of the filter). A
            missing key means no padding, a stride of 1, or no dilation.
        axis: The index of the spatial axis, from 0.
    """
    low, stride, spread, gap = (
        int(window[key].split("x")[axis].split("_")[0]) if key in window else default
        for key, default in (("pad", 0), ("stride", 1), ("lhs_dilate", 1), ("rhs_dilate", 1))
    )
    reads = (o * stride + k * gap - low for o in range(sizes[2]) for k in range(sizes[1]))
    return sum(0 <= read <= (sizes[0] - 1) * spread and read % spread == 0 for read in reads)


# --- memory ---


def _first_result(step: Instruction) -> ResultArray:
    """Returns the first array that an instruction computes.

    The start of an asynchronous operation returns a tuple of its operands and its results, so as
    many arrays as it has operands are skipped. For a copy none is skipped, because its result comes
    first.

    Args:
        step: An instruction with at least one result.
    """
    return step.arrays[
        len(step.operands) if step.opcode.endswith("-start") and step.opcode != "copy-start" else 0
    ]


def _is_workspace(step: Instruction, result: int) -> bool:
    """Returns whether a result of an instruction is only scratch memory of a library function.

    Every 8-bit integer result of a custom call, except the first result, is assumed to be scratch
    memory.

    Args:
        step: The instruction.
        result: The index of the result in `step.arrays`.
    """
    return step.opcode == "custom-call" and result > 0 and step.arrays[result].kind in ("s8", "u8")


class _Memory:
    """Counts the bytes of main memory that the instructions of a program read and write.

    An array that XLA updates in place counts only with its updated part. An array that is sliced
    counts only with the slice. `moved` returns the bytes of one run of a kernel.

    Attributes:
        module: The parsed text of the program.
    """

    def __init__(self, module: Module):
        """Stores the program. Nothing is counted yet.

        Args:
            module: The program whose instructions are counted.
        """
        self.module = module
        self._parameter_reads: dict[tuple[str, int], float] = {}

    def moved(self, step: Instruction, name: str) -> float:
        """Returns the bytes that one run of a kernel reads and writes.

        Scratch memory of library functions does not count. All bytes of an asynchronous operation
        count at the instruction that starts it.

        Args:
            step: The instruction that runs the kernel. It must not be the end of an asynchronous
                operation.
            name: The name of the kernel. "AllocateBuffer", which only reserves memory, has 0 bytes.
        """
        if name == "AllocateBuffer":
            return 0.0
        reads = sum((self._reads(step, i) for i in range(len(step.operands))), 0.0)
        if step.opcode.endswith("-start") and step.opcode not in FUSIONS:
            result = _first_result(step)
            return reads + (result.size if result.space == 0 else 0.0)
        return reads + self._writes(step)

    def _reads(self, step: Instruction, position: int) -> float:
        """Returns the bytes of main memory that an instruction reads of one operand, at most the
        size of the operand.

        A slice reads only as much as it returns. An update in place does not read the array that it
        updates. The reads of a fusion are the sum over the instructions in it.

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
        """Returns the bytes that the instructions of a fusion read of one of its parameters.

        They are summed over these instructions, also those that read it through a bitcast, so the
        result may exceed the size of the parameter.

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
        """Returns the bytes that one run of an instruction writes to main memory.

        An update in place writes only the updated part. Scratch memory of library functions does
        not count.

        Args:
            step: An instruction of the program, or the last instruction of a fusion.
        """
        if step.opcode in UPDATES:
            return step.operands[UPDATES[step.opcode]].size
        if step.opcode in FUSIONS:
            return min(step.size, self._fusion_writes(self.module.root(step.value("calls"))))
        return sum(
            a.size for i, a in enumerate(step.arrays) if a.space == 0 and not _is_workspace(step, i)
        )

    def _fusion_writes(self, root: Instruction) -> float:
        """Returns the bytes that one run of a fusion writes to main memory.

        Args:
            root: The instruction in the fusion whose result is that of the fusion. If it is a
                tuple, the bytes of all elements are summed.
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
