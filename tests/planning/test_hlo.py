"""Reading the text of compiled programs: `planning.hlo`."""

import pytest

from solrl_jax.planning import hlo
from tests.planning.programs import PROGRAMS, text

MODULE = """HloModule small, is_scheduled=true

%double (a: f32[4]) -> f32[4] {
  %a = f32[4]{0} parameter(0)
  ROOT %twice = f32[4]{0:T(128)S(1)} add(%a, %a)
}

%one (b: (s32[], f32[4])) -> (s32[], f32[4]) {
  %b = (s32[], f32[4]{0}) parameter(0)
  %n = s32[] get-tuple-element(%b), index=0
  %x = f32[4]{0} get-tuple-element(%b), index=1
  %y = f32[4]{0} fusion(%x), kind=kLoop, calls=%double, metadata={op_name="jit(f)/while/add" stack_frame_id=1}
  ROOT %again = (s32[], f32[4]{0}) tuple(%n, %y)
}

%more (c: (s32[], f32[4])) -> pred[] {
  %c = (s32[], f32[4]{0}) parameter(0)
  %counter = s32[] get-tuple-element(%c), index=0
  %limit = s32[] constant(7)
  ROOT %less = pred[] compare(%counter, %limit), direction=LT
}

%small (d: f32[4]) -> f32[1] {
  %d = f32[4]{0} parameter(0)
  ROOT %first = f32[1]{0} slice(%d), slice={[0:1]}
}

%large (e: f32[4]) -> f32[1] {
  %e = f32[4]{0} parameter(0)
  %copied = f32[4]{0} copy(%e)
  ROOT %last = f32[1]{0} slice(%copied), slice={[3:4]}
}

ENTRY %main (p: f32[4], q: pred[]) -> f32[1] {
  %p = f32[4]{0} parameter(0), metadata={op_name="x['a'](b)"}
  %q = pred[] parameter(1)
  %zero = s32[] constant(0)
  %start = (s32[], f32[4]{0}) tuple(%zero, /*index=1*/%p)
  %loop = (s32[], f32[4]{0}) while(%start), condition=%more, body=%one
  %z = f32[4]{0} get-tuple-element(%loop), index=1
  %kernel = f32[4]{0} custom-call(%z), custom_call_target="f$g", frontend_attributes={notes={
"deep":"{a, b}"
}}, metadata={op_name="jit(f)/call"}
  ROOT %chosen = f32[1]{0} conditional(%q, %kernel, %kernel), true_computation=%small, false_computation=%large
}
"""


def test_a_module_is_read_as_it_is_written():
    module = hlo.parse(MODULE)
    assert module.entry == "main"
    assert list(module.computations) == ["double", "one", "more", "small", "large", "main"]
    steps = {step.name: step for steps in module.computations.values() for step in steps}
    assert steps["twice"].arrays == (hlo.ResultArray("f32", (4,), space=1),)
    assert (steps["twice"].size, steps["y"].size) == (0, 16)  # the first is not in main memory
    assert [step.name for step in steps["start"].operands] == ["zero", "p"]
    assert steps["start"].arrays == (hlo.ResultArray("s32", ()), hlo.ResultArray("f32", (4,)))
    assert steps["y"].value("calls") == "double"
    assert steps["y"].value("to_apply") == ""
    assert (steps["kernel"].text("custom_call_target"), steps["kernel"].text("op_name")) == (
        "f$g",
        "jit(f)/call",
    )
    assert module.root("main").opcode == "conditional"


def test_what_runs_is_counted_through_loops_and_along_the_branch_that_writes_more():
    module = hlo.parse(MODULE)
    ran = {step.name: times for step, times in module.executed()}
    assert (ran["y"], ran["kernel"], ran["copied"]) == (7, 1, 1)
    assert "first" not in ran
    assert module.unknown_loops() == 0


def test_a_loop_of_unknown_length_counts_once_and_is_reported():
    module = hlo.parse(MODULE.replace("direction=LT", "direction=NE"))
    assert {step.name: times for step, times in module.executed()}["y"] == 1
    assert module.unknown_loops() == 1
    noted = MODULE.replace("body=%one", 'body=%one, backend_config={"known_trip_count":{"n":"9"}}')
    assert {step.name: times for step, times in hlo.parse(noted).executed()}["y"] == 9


def test_a_loop_of_no_iterations_does_not_run():
    module = hlo.parse(MODULE.replace("constant(7)", "constant(0)"))
    ran = {step.name: times for step, times in module.executed()}
    assert "y" not in ran
    assert ran["kernel"] == 1
    assert module.unknown_loops() == 0


def test_types_say_their_bytes():
    sizes = {
        "pred": 1,
        "bf16": 2,
        "f4e2m1fn": 0.5,
        "f8e8m0fnu": 1,
        "s4": 0.5,
        "u32": 4,
        "c64": 8,
        "token": 0,
    }
    assert {kind: hlo.ResultArray(kind, (2, 3)).size / 6 for kind in sizes} == sizes
    with pytest.raises(ValueError, match="element type 'tuple' is not known"):
        hlo.element_bits("tuple")


def test_what_is_no_module_is_refused():
    with pytest.raises(ValueError, match="no entry computation"):
        hlo.parse("module @jit_f {\n}\n")


@pytest.mark.parametrize("name", PROGRAMS)
def test_texts_of_all_compilers_are_read_whole(name):
    """Every name that a line refers to is an instruction before it, and every loop has a length."""
    module = hlo.parse(text(name))
    for steps in module.computations.values():
        for step in steps:
            assert len(step.operands) == step.literal.count("%"), step.name
    assert module.unknown_loops() == 0
