"""`scripts/tpu_cycles.py` finds the bundles of each Pallas kernel, on texts made by hand."""

import pytest
import tpu_cycles

from solrl_jax.planning.hlo import parse
from solrl_jax.planning.targets import TARGETS

CALL = (
    'custom-call(%OPERAND), custom_call_target="tpu_custom_call", '
    'metadata={op_name="jit(f)/NAME/pallas_call"}, '
    'backend_config={"custom_call_config":{"body":"BODY"}}'
)
# Three bundles, and a grid of 50 steps.
BUNDLES = """
   0x1   :  { %s16_s16 = smov 0 }
   0x2   : > { %p13_p7 = scmp.ge.s32.totalorder %s16_s16, 50 /* loop exit test */ }
   0x3   :  { %99 = vsyncpa [#allocation3], 1 }
"""


def call(name, body="first", operand="x", shape="bf16[8,128]{1,0}"):
    """The line of a kernel."""
    text = CALL.replace("OPERAND", operand).replace("NAME", name).replace("BODY", body)
    return f"  %{name} = {shape} {text}\n"


def program(*calls):
    return parse(
        "HloModule p\n\nENTRY %main (x: bf16[8,128], y: bf16[16,128]) -> bf16[8,128] {\n"
        "  %x = bf16[8,128]{1,0} parameter(0)\n"
        "  %y = bf16[16,128]{1,0} parameter(1)\n"
        "  %fast = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} copy(%x)\n"
        + "".join(calls)
        + "  ROOT %z = bf16[8,128]{1,0} copy(%x)\n}\n"
    )


def dumped(folder, *names):
    """Files as the compiler writes them, with others beside them."""
    for name in names:
        (folder / f"17-{name}-01-final_bundles.txt").write_text(BUNDLES)
        (folder / f"17-{name}-00-schedule-analysis_final_bundles.txt").write_text("")
    return list(folder.iterdir())


def test_identical_kernels_have_the_cycles_of_the_one_that_was_dumped(tmp_path):
    module = program(call("pass.1"), call("pass.10"))
    kernels = tpu_cycles.kernel_cycles(module, dumped(tmp_path, "pass.10"))
    assert list(kernels.values()) == [3 * 50]
    row = tpu_cycles.step_cycles(module, kernels, TARGETS["tpu-v5e"], 1)
    assert row["kernels"] == 2 * 150
    assert row["largest"]["kernel pass.1 [8,128]"] == 150


@pytest.mark.parametrize(
    "other",
    [
        {"body": "second"},
        {"operand": "y"},
        {"operand": "fast"},  # in the chip's own memory
        {"shape": "bf16[16,128]{1,0}"},
    ],
    ids=str,
)
def test_a_kernel_that_differs_needs_a_dump_of_its_own(other, tmp_path):
    module = program(call("pass.1"), call("pass.2", **other))
    target = TARGETS["tpu-v5e"]
    kernels = tpu_cycles.kernel_cycles(module, dumped(tmp_path, "pass.1"))
    with pytest.raises(ValueError, match=r"^pass\.2: the compiler wrote no bundles"):
        tpu_cycles.step_cycles(module, kernels, target, 1)
    kernels = tpu_cycles.kernel_cycles(module, dumped(tmp_path, "pass.2"))
    assert tpu_cycles.step_cycles(module, kernels, target, 1)["kernels"] == 300
