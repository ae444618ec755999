"""What a program costs a device, read off its jaxpr: operations, bytes of memory read and written, and most bytes live at once.

The CPU's compiler cannot be asked: it multiplies BF16 as float32, holds attention's scores and fuses as suits a CPU. So this
walks the program as it is written, once over every loop's body, and assumes of the target's compiler what all of them do:

* a product, a convolution, a sort, a loop or flash attention finds its operands in memory, and leaves its results there;
* all else (arithmetic, conversions, slices, padding, joins, reductions' inputs) is fused into what reads it. Such a value takes
  memory when an operation of the first kind wants it or when it is read before and after one, conversions and slices excepted;
  and when it can take the place of what it alone still needs;
* reshapes and transposes are free; a product gets a copy of a loop's slice, a weight of one layer, say;
* loops and donated arguments are updated in place; a value dies with its last reader.

Arguments are not counted: what they hold is the caller's. Flash attention is what `models.flash` stands in for. Shapes are one
device's: trace for a mesh of one, with that device's rows.

That is what a compiler that fuses well needs. In float32, where it can be compared, the CPU's takes 1.2 to 2.6 times as much
for the stages of FLUX.1 and SANA, transposed weights of whole layers and what it does not fuse; no other has been compared.
"""

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr
from jax.sharding import PartitionSpec

from solrl_jax.parallel.sharding import SMALLEST_SHARDED
from solrl_jax.planning.program import Step, Value, bits, flatten, live

# no arithmetic: what they are made of is read in their place, however often
MOVES = ("broadcast_in_dim", "iota", "slice", "dynamic_slice", "split", "pad", "concatenate", "gather", "rev")
CHEAP = {"convert_element_type", *MOVES}
# of `models.flash`: how many products; the gradient makes the scores again
FLASH = {"flash_attention": 2, "flash_attention_gradient": 5}
REDUCTIONS = {"reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "argmax", "argmin"}
IN_MEMORY = {"dot_general", "conv_general_dilated", "scaled_dot", "scan", "while", "cond", "sort", "top_k", "cumsum", *FLASH}


@dataclasses.dataclass
class Cost:
    """Of a program on one device."""

    flops: Counter[str] = dataclasses.field(default_factory=Counter)  # by the kind of what is multiplied
    traffic: float = 0.0  # bytes of memory
    peak: int = 0  # bytes beside the arguments
    kept: int = 0  # bytes of the results
    flash: bool = False  # whether there is flash attention

    def add(self, other: "Cost", times: int) -> None:
        """Counts what another program does, `times` times; not its memory."""
        self.flops.update({kind: count * times for kind, count in other.flops.items()})
        self.traffic += other.traffic * times
        self.flash |= other.flash


def cost(program: ClosedJaxpr, *, gathers: bool, native: bool, donated: Sequence[int] = ()) -> Cost:
    """gathers: parameters come in shards, so that gathering one makes a copy; native: block-scaled products have units;
    donated: the numbers of arguments whose memory is the program's to use again."""
    return _Walk(gathers, native).program(program, donated, count_owned=False)


class _Walk:
    def __init__(self, gathers: bool, native: bool):
        self.gathers, self.native = gathers, native
        self._memo: dict[tuple[int, tuple[int, ...], tuple[int, ...]], tuple[Any, Cost]] = {}

    def program(
        self, closed: ClosedJaxpr, owned: Sequence[int], sliced: Sequence[int] = (), *, count_owned: bool = True
    ) -> Cost:
        """owned: arguments that die here; count_owned: whether the peak holds them, too; sliced: parts of larger arrays."""
        key = (id(closed), tuple(owned), tuple(sliced))
        if key not in self._memo:  # it holds the jaxpr, so that no other gets its id
            values = [Value(v.aval) for v in closed.jaxpr.invars]
            steps: list[Step] = []
            outs = flatten(closed.jaxpr, values, steps)
            memory = _Memory([values[i] for i in owned], [values[i] for i in sliced], count_owned)
            self._memo[key] = closed, self._run(memory, live(steps, outs), outs)
        return self._memo[key][1]

    def _run(self, memory: "_Memory", steps: list[Step], outs: list[Value | None]) -> Cost:
        last: dict[Value, int] = {v: i for i, step in enumerate(steps) for v in step.ins}
        last |= {v: len(steps) for v in outs if v is not None}
        memory.release(*(v for v in list(memory.roots) if v not in last))
        total = memory.cost
        read: set[Value] = set()
        cheap: set[Value] = set()
        for i, step in enumerate(steps):
            dying = [v for v in dict.fromkeys(step.ins) if last[v] == i]
            gathered = self.gathers and step.name == "sharding_constraint" and _is_gathered(step, memory)
            if step.name == "sharding_constraint" and not gathered:
                memory.alias(step.outs[0], step.ins[0])
                memory.release(*dying)
            elif step.name in IN_MEMORY or gathered:
                for v in step.ins:
                    memory.realise(v)
                for v in [v for v in memory.virtual if v in read and v not in cheap and last[v] > i]:
                    memory.realise(v)
                self._operation(step, memory, dying)
                memory.release(*dying)
            elif step.name in REDUCTIONS:
                memory.read(*step.ins)
                memory.make(*step.outs)
                memory.release(*dying)
            else:
                memory.fuse(step, dying)
            read.update(step.ins)
            if step.name in CHEAP:
                cheap.update(step.outs)
            memory.release(*(out for out in step.outs if out not in last))
        results = [v for v in outs if v is not None]
        for v in results:
            memory.realise(v)
        total.kept = sum(v.size for v in results)
        return total

    def _operation(self, step: Step, memory: "_Memory", dying: list[Value]) -> None:
        """Counts an operation whose operands are in memory, and makes its results."""
        total = memory.cost
        if step.name == "scan":
            return self._scan(step, memory, dying)
        if step.name in ("cond", "while"):  # the dearest branch; of a loop of unknown length, one turn
            bodies = step.params["branches"] if step.name == "cond" else (step.params["body_jaxpr"],)
            costs = [self.program(body, ()) for body in bodies]
            total.add(max(costs, key=lambda c: (sum(c.flops.values()), c.traffic)), 1)
            memory.passing(max(c.peak for c in costs) - sum(v.size for v in step.outs))
        elif step.name == "dot_general":
            (contracted, _), _ = step.params["dimension_numbers"]
            depth = math.prod(step.operands[0].shape[i] for i in contracted)
            total.flops[_kind(step.operands)] += 2 * math.prod(step.outs[0].shape) * depth
        elif step.name == "scaled_dot":
            self._scaled_dot(step, memory)
        elif step.name == "conv_general_dilated":
            kernel = step.operands[1].shape
            outputs = kernel[step.params["dimension_numbers"].rhs_spec[0]]
            total.flops[_kind(step.operands)] += 2 * math.prod(step.outs[0].shape) * math.prod(kernel) // outputs
        elif step.name in FLASH:
            (batch, t, heads, head), s = step.operands[0].shape, step.operands[1].shape[1]
            total.flash = True
            total.flops[_kind(step.operands)] += 2 * FLASH[step.name] * batch * heads * t * s * head
        memory.read(*step.ins)
        memory.make(*step.outs)

    def _scaled_dot(self, step: Step, memory: "_Memory") -> None:
        left, right = step.operands[:2]
        (contracted, _), _ = step.params["dimension_numbers"]
        depth = math.prod(left.shape[i] for i in contracted)
        kind = "bf16"
        if self.native:
            kind = "fp4" if bits(left.dtype) == 4 else "fp8"
        else:  # expanded: both operands in BF16
            memory.passing(2 * (math.prod(left.shape) + math.prod(right.shape)))
        memory.cost.flops[kind] += 2 * math.prod(step.outs[0].shape) * depth

    def _scan(self, step: Step, memory: "_Memory", dying: list[Value]) -> None:
        """The carry is in place: the body has it among its own, and what it began as may be overwritten."""
        closed = step.params["jaxpr"]
        consts, carried, sliced = _scanned(step)
        xs = consts + carried
        body = self.program(closed, range(consts, xs), range(xs, xs + sliced))
        stacked = step.outs[carried:]
        memory.make(*stacked)
        memory.release(*dying)
        memory.passing(body.peak)
        memory.make(*step.outs[:carried], written=False)
        memory.cost.add(body, step.params["length"])


class _Memory:
    """Buffers that are live, and which of them each value is in, or is made of."""

    def __init__(self, owned: Sequence[Value], sliced: Sequence[Value], counted: bool):
        self.cost = Cost()
        self.live = 0
        self.roots: dict[Value, frozenset[int]] = {}  # the buffers that a value needs; arguments need none
        self.virtual: set[Value] = set(sliced)  # values that are in no buffer
        self._sizes: dict[int, int] = {}
        self._users: Counter[int] = Counter()
        self._names = itertools.count()
        for v in owned:
            self._bind(v)
        if not counted:
            self.live -= sum(v.size for v in owned)
        self.cost.peak = max(self.live, 0)

    def passing(self, size: int) -> None:
        """Bytes that are live beside the others for a moment."""
        self.cost.peak = max(self.cost.peak, self.live + size)

    def read(self, *values: Value) -> None:
        for v in dict.fromkeys(values):
            made_of = sum(self._sizes[b] for b in self.roots.get(v, ()))
            self.cost.traffic += (v in self.virtual and made_of) or v.size

    def make(self, *values: Value, written: bool = True) -> None:
        """New buffers for values."""
        for v in values:
            self._bind(v)
            self.cost.traffic += v.size * written
        self.passing(0)

    def alias(self, value: Value, of: Value) -> None:
        self._use(value, self.roots.get(of, frozenset()))
        if of in self.virtual:
            self.virtual.add(value)

    def realise(self, v: Value) -> None:
        """Puts a value into memory, if it is not there."""
        if v in self.virtual:
            self.read(v)
            self.virtual.discard(v)
            before = self.roots.pop(v, frozenset())
            if sum(self._sizes[b] for b in before if self._users[b] == 1) == v.size:  # overwritten as it is read
                self._drop(before)
                self.make(v)
            else:
                self.make(v)
                self._drop(before)

    def fuse(self, step: Step, dying: Sequence[Value]) -> None:
        """Values that are made where they are read; they need what they are made of, or the place of what they alone need."""
        needed = frozenset().union(*(self.roots.get(v, frozenset()) for v in step.ins))
        made = sum(out.size for out in step.outs)
        self.cost.traffic += sum(min(v.size, made) for v in step.ins if v not in self.roots)  # arguments
        for out in step.outs:
            self._use(out, needed)
        self.release(*dying)
        alone = [self._sizes[b] for b in needed if self._users[b] == len(step.outs)]
        if 0 < made <= sum(alone):
            if made not in alone:  # of another size, it is written beside it
                self.passing(made)
            self.release(*step.outs)
            self.make(*step.outs, written=False)
        self.virtual.update(step.outs)

    def release(self, *values: Value) -> None:
        for v in values:
            self.virtual.discard(v)
            self._drop(self.roots.pop(v, frozenset()))

    def _bind(self, v: Value) -> None:
        buffer = next(self._names)
        self._sizes[buffer] = v.size
        self.live += v.size
        self._use(v, frozenset((buffer,)))

    def _use(self, v: Value, buffers: frozenset[int]) -> None:
        self.roots[v] = buffers
        self._users.update(buffers)

    def _drop(self, buffers: frozenset[int]) -> None:
        for b in buffers:
            self._users[b] -= 1
            if not self._users[b]:
                self.live -= self._sizes.pop(b)
                del self._users[b]


def _scanned(step: Step) -> tuple[int, int, int]:
    """How many inputs of a scan each turn is given as they are, how many it carries, and of how many it is given a slice.

    By the axis that its body does not see: the parameters that count them are other ones in jax 0.10 and in 0.11.
    """
    rank = lambda values: [len(getattr(v.aval, "shape", ())) for v in values]
    body = step.params["jaxpr"].jaxpr
    inputs, outputs = rank(body.invars), rank(body.outvars)
    sliced = sum(len(a.shape) > n for a, n in zip(step.operands, inputs, strict=True))
    carried = sum(len(v.shape) == n for v, n in zip(step.outs, outputs, strict=True))
    return len(inputs) - carried - sliced, carried, sliced


def _is_gathered(step: Step, memory: _Memory) -> bool:
    """Whether a constraint makes a parameter whole: it names no axis, and what it is of is an argument or a slice of one."""
    (v,) = step.ins
    whole = getattr(step.params["sharding"], "spec", None) == PartitionSpec()
    return whole and not memory.roots.get(v) and math.prod(v.shape) >= SMALLEST_SHARDED


def _kind(operands: Sequence[Any]) -> str:
    """The units that multiply such operands: those of the wider."""
    widest = max(bits(a.dtype) for a in operands[:2])
    return {8: "fp8", 16: "bf16"}.get(widest, "fp32")
