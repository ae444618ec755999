"""Messages between devices: `planning.links`."""

import pytest

from solrl_jax.planning import hlo
from solrl_jax.planning.links import Collective, collectives
from tests.planning.programs import text

HEAD = "HloModule m\n\nENTRY %main (x: f32[4,8]) -> f32[4,8] {\n  %x = f32[4,8]{1,0} parameter(0)\n"


def one(line: str, devices: int = 8) -> Collective:
    (collective,) = collectives(hlo.parse(f"{HEAD}  ROOT {line}\n}}\n"), devices)
    return collective


def test_the_messages_of_a_sharded_gradient():
    """Five layers [512, 512] in BF16 on 2 x 4 devices: a half of a quarter is gathered, its
    gradient summed over the pairs.
    """
    messages = collectives(hlo.parse(text("train-h200")), 8)
    quarter = 2 * 512 * 512 / 4
    rows = 2 * 8 * 512
    pairs = ((0, 4), (1, 5), (2, 6), (3, 7))
    rings = ((0, 1, 2, 3), (4, 5, 6, 7))
    weights = [c for c in messages if c.groups == pairs]
    assert [(c.kind, c.size, c.times) for c in weights] == [
        ("all-gather", quarter, 5),
        ("all-gather", quarter, 5),
        ("all-reduce", quarter, 5),
    ]
    assert {(c.kind, c.size, c.times) for c in messages if c.groups == rings} == {
        ("all-gather", rows, 5),
        ("reduce-scatter", rows, 5),
    }
    assert {c.overlaps for c in messages} == {False, True}  # those of the first loop wait
    assert [c.overlaps for c in weights] == [False, True, True]


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ("replica_groups={{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("replica_groups=[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("replica_groups=mesh['a'=2,'b'=4] {'b'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("replica_groups=mesh['a'=2,'b'=4] {'b':(2)2}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        (
            "replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}",
            ((0, 1), (2, 3), (4, 5), (6, 7)),
        ),
        ("replica_groups={}", ((0, 1, 2, 3, 4, 5, 6, 7),)),
    ],
)
def test_groups_in_every_notation(groups, expected):
    assert one(f"%r = f32[4,8]{{1,0}} all-reduce(%x), {groups}, to_apply=%add").groups == expected


def test_what_a_device_sends_and_what_leaves_its_host():
    """128 bytes: in a ring of 8 a device sends all but its own share; a sum goes round twice."""
    gathered = one("%g = f32[32,8]{1,0} all-gather(%x), replica_groups=[1,8]<=[8], dimensions={0}")
    assert (gathered.size, gathered.sent, gathered.crossing(8), gathered.crossing(4)) == (
        1024,
        896,
        0,
        128,
    )
    summed = one("%r = f32[4,8]{1,0} all-reduce(%x), replica_groups=[1,8]<=[8], to_apply=%add")
    assert (summed.size, summed.sent, summed.crossing(2)) == (128, 224, 96)
    split = one(
        "%s = f32[1,8]{1,0} reduce-scatter(%x), replica_groups=[2,4]<=[8], dimensions={0}, "
        "to_apply=%add"
    )
    assert (split.size, split.sent, split.crossing(4)) == (128, 96, 0)
    passed = one(
        "%p = f32[4,8]{1,0} collective-permute(%x), source_target_pairs={{0,1},{1,2},{2,0}}"
    )
    assert (passed.sent, passed.crossing(4), passed.crossing(2)) == (128, 0, 128)


def test_nothing_moves_within_groups_of_one():
    text = (
        f"{HEAD}  ROOT %r = f32[4,8]{{1,0}} all-reduce(%x), replica_groups=[8,1]<=[8], "
        "to_apply=%add\n}\n"
    )
    assert collectives(hlo.parse(text), 8) == []


def test_a_collective_overlaps_if_a_kernel_runs_before_its_end_and_it_is_not_marked_synchronous():
    start = (
        "%s = (f32[4,8]{1,0}, f32[8,8]{1,0}) all-gather-start(%x), replica_groups=[4,2]<=[8], "
        "dimensions={0}"
    )
    sync = ', backend_config={"collective_backend_config":{"is_sync":true}}'
    name = "\n  %b = f32[32]{0} bitcast(%x)"
    kernel = "\n  %k = f32[4,8]{1,0} add(%x, %x)"
    end = "\n  %d = f32[8,8]{1,0} all-gather-done(%s)"
    assert one(start + kernel + end).overlaps
    assert not one(start + name + end + kernel).overlaps
    assert not one(start + sync + kernel + end).overlaps
    assert not one(
        "%r = f32[4,8]{1,0} all-reduce(%x), replica_groups=[1,8]<=[8], to_apply=%add"
    ).overlaps


def test_a_send_without_a_start_is_no_collective():
    operations = """%token = token[] after-all()
  %sent = (f32[4,8]{1,0}, u32[], token[]) send(%x, %token), channel_id=1
  %end = token[] send-done(%sent), channel_id=1
  ROOT %r = f32[4,8]{1,0} add(%x, %x)"""
    assert collectives(hlo.parse(f"{HEAD}  {operations}\n}}\n"), 8) == []
    gather = "(f32[4,8]{1,0}, f32[8,8]{1,0}) all-gather-start(%x)"
    operations = f"""%token = token[] after-all()
  %s = {gather}, replica_groups=[4,2]<=[8], dimensions={{0}}
  %sent = (f32[4,8]{{1,0}}, u32[], token[]) send(%x, %token), channel_id=1
  %end = token[] send-done(%sent), channel_id=1
  ROOT %d = f32[8,8]{{1,0}} all-gather-done(%s)"""
    (collective,) = collectives(hlo.parse(f"{HEAD}  {operations}\n}}\n"), 8)
    assert not collective.overlaps  # no kernel runs meanwhile


def test_a_collective_within_an_asynchronous_computation_overlaps():
    text = """HloModule m

%wrapped (y: f32[4,8]) -> f32[4,8] {
  %y = f32[4,8]{1,0} parameter(0)
  ROOT %t = f32[4,8]{1,0} all-to-all(%y), replica_groups=[1,4]<=[4], dimensions={0}
}

ENTRY %main (x: f32[4,8]) -> f32[4,8] {
  %x = f32[4,8]{1,0} parameter(0)
  %s = ((f32[4,8]{1,0}), f32[4,8]{1,0}, s32[]) async-start(%x), calls=%wrapped
  %k = f32[4,8]{1,0} add(%x, %x)
  ROOT %d = f32[4,8]{1,0} async-done(%s)
}
"""
    (collective,) = collectives(hlo.parse(text), 4)
    assert (collective.kind, collective.sent, collective.overlaps) == ("all-to-all", 96, True)
