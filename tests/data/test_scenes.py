"""Captions and their grammar, the held-out split, and what the verifier needs of images."""

import dataclasses

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pretrain import drawing
from scipy import ndimage

from solrl_jax.data.shapes import scenes
from solrl_jax.data.shapes.scenes import Group, Scene

BACKGROUND = np.asarray(scenes.BACKGROUND, np.float64)

# no deadline: the machine may be busy
unhurried = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])

groups = st.builds(
    Group,
    st.integers(1, 3),
    st.sampled_from([None, *scenes.SIZES]),
    st.sampled_from(scenes.COLORS),
    st.sampled_from(scenes.SHAPES),
)


@st.composite
def any_scene(draw):
    """Any scene that the grammar allows."""
    first = draw(groups)
    if draw(st.booleans()):
        return Scene((first,), None)

    def fits(second):
        try:
            return bool(Scene((first, second), "above"))
        except ValueError:
            return False

    if first.count == 3 and first.size == "large":
        first = dataclasses.replace(first, size="small")
    return Scene((first, draw(groups.filter(fits))), draw(st.sampled_from(scenes.RELATIONS)))


def coverage(image, color):
    """How much `color` covers each pixel, [h, w]; 0 for pixels that are no mixture with it."""
    offset = image - BACKGROUND
    tint = np.asarray(scenes.PALETTE[color]) - BACKGROUND
    share = offset @ tint / (tint @ tint)
    on_line = (
        np.linalg.norm(offset - share[..., None] * tint, axis=-1) < 3
    )  # rounding to bytes: sqrt(3) at most
    return np.where(on_line, share, 0)


@unhurried
@given(any_scene())
def test_parse_is_the_inverse_of_caption(scene):
    text = drawing.caption(scene)
    assert scenes.parse_caption(text) == scene
    assert set(text.split()) <= set(drawing.VOCABULARY)
    spaced = "  " + text.upper().replace(" ", " \t ") + "\n"
    assert scenes.parse_caption(spaced) == scene


def test_captions_read_as_written():
    two = Scene((Group(2, None, "red", "circle"), Group(1, "small", "blue", "square")), "above")
    assert drawing.caption(two) == "two red circles above a small blue square"
    assert (
        drawing.caption(Scene((Group(3, None, "green", "triangle"),), None))
        == "three green triangles"
    )
    assert (
        drawing.caption(Scene((Group(1, "large", "yellow", "circle"),), None))
        == "a large yellow circle"
    )
    assert scenes.parse_caption("one red circle left of one cyan square") == scenes.parse_caption(
        "a red circle left of a cyan square"
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "red",
        "a red",
        "four red circles",
        "two red circle",
        "a red circles",
        "a pink circle",
        "a huge red circle",
        "a red small circle",
        "a red circle above",
        "a red circle beside a blue square",
        "a red circle left a blue square",
        "a red circle a blue square",
        "a red circle above a blue square above a green square",
        "a red circle above a small red circle",
        "three red circles above two blue squares",
        "three large red circles above a blue square",
    ],
)
def test_parse_refuses_and_says_why(text):
    with pytest.raises(ValueError, match="cannot parse the caption") as error:
        scenes.parse_caption(text)
    assert repr(text) in str(error.value)
    assert scenes.GRAMMAR in str(error.value)


def test_scenes_outside_the_world_are_refused():
    red = Group(1, None, "red", "circle")
    blue = Group(1, None, "blue", "circle")
    for members, relation in [
        ((), None),
        ((red,), "above"),
        ((red, blue), None),
        ((red, blue), "near"),
        ((red,) * 3, None),
    ]:
        with pytest.raises(ValueError, match="not a scene"):
            Scene(members, relation)
    for fields in [
        (0, None, "red", "circle"),
        (4, None, "red", "circle"),
        (1, "big", "red", "circle"),
    ]:
        with pytest.raises(ValueError, match="not a group"):
            Group(*fields)


def test_drawn_scenes_are_mostly_pairs_and_use_the_whole_vocabulary():
    rng = np.random.default_rng(0)
    drawn = [drawing.draw_scene(rng) for _ in range(4000)]
    # 0.7 expected; the standard deviation of the mean is 0.007.
    assert abs(np.mean([len(s.groups) == 2 for s in drawn]) - 0.7) < 0.03
    assert max(sum(g.count for g in s.groups) for s in drawn) == scenes.MAX_OBJECTS
    words = {word for s in drawn for word in drawing.caption(s).split()}
    assert words == set(drawing.VOCABULARY) - {"one"}


@pytest.mark.slow
def test_the_split_is_stable_and_about_a_tenth():
    # must never change: captions that were held out from a trained checkpoint stay held out
    frozen = {
        "a red circle": False,
        "two red circles above a small blue square": False,
        "a large yellow circle": True,
        "a small purple triangle left of two cyan squares": False,
    }
    assert {text: drawing.held_out(text) for text in frozen} == frozen
    rng = np.random.default_rng(0)
    texts = {drawing.caption(drawing.draw_scene(rng)) for _ in range(5000)}
    assert (
        abs(np.mean([drawing.held_out(t) for t in texts]) - 0.1) < 0.02
    )  # standard deviation 0.0045
    for text in list(texts)[:200]:
        assert drawing.held_out(text.upper().replace(" ", "  ")) == drawing.held_out(text)
        assert drawing.held_out(text.replace("a ", "one ", 1)) == drawing.held_out(text)


@pytest.mark.slow
def test_drawn_prompts_are_distinct_and_of_their_split():
    train, test = (
        drawing.draw_prompts(np.random.default_rng(1), 400, held_out=h) for h in (False, True)
    )
    for prompts, held_out in ((train, False), (test, True)):
        assert len(prompts) == len(set(prompts)) == 400
        assert all(drawing.held_out(p) == held_out for p in prompts)
    assert not set(train) & set(test)
    assert drawing.draw_prompts(np.random.default_rng(1), 400, held_out=False) == train
    assert drawing.draw_prompts(np.random.default_rng(1), 0, held_out=True) == []


def test_too_many_prompts_are_refused(monkeypatch):
    monkeypatch.setattr(
        drawing, "draw_scene", lambda rng: Scene((Group(1, None, "red", "circle"),), None)
    )
    with pytest.raises(ValueError, match="cannot draw 2 distinct captions"):
        drawing.draw_prompts(np.random.default_rng(0), 2, held_out=drawing.held_out("a red circle"))


@pytest.mark.slow
@unhurried
@given(any_scene(), st.integers(0, 2**32 - 1), st.sampled_from([32, 48, 64]))
def test_images_hold_whole_separate_objects_in_the_asked_relation(scene, seed, size):
    image = drawing.render(scene, np.random.default_rng(seed), size).astype(np.float64)
    assert image.shape == (size, size, 3)
    everything = sum(coverage(image, c) for c in {g.color for g in scene.groups})
    # each pixel is the background, or on the line from it to one of the asked colors
    assert np.abs(image - BACKGROUND)[everything < 0.02].max() < 8
    boxes = _object_boxes(everything > 0.02)
    assert len(boxes) == sum(g.count for g in scene.groups)
    assert boxes.min() >= 0
    assert boxes.max() <= size
    if scene.relation is None:
        side = (
            boxes[:, 1] - boxes[:, 0]
        ).min()  # up to two pixels too long, because of pixels that are partly covered
        assert abs(everything.sum() - _area(scene.groups[0], boxes)) / everything.sum() < 4 / side
        return
    colors = [g.color for g in scene.groups]
    if colors[0] == colors[1]:
        return  # only their shapes differ
    first, second = (_object_boxes(coverage(image, c) > 0.02) for c in colors)
    axis = int(scene.relation in ("above", "below"))
    if scene.relation in ("below", "right of"):
        first, second = second, first
    assert (
        first[:, 1, axis].max() < second[:, 0, axis].min() + 1
    )  # a gap of 2 pixels, at whose rims pixels may be partly covered
    apart = np.abs(first.mean((0, 1)) - second.mean((0, 1)))
    assert apart[axis] > apart[1 - axis]


def _object_boxes(covered):
    """Bounding boxes of the 4-connected components, [objects, (low, high), (x, y)]."""
    pieces = ndimage.find_objects(ndimage.label(covered)[0])
    return np.asarray([[(x.start, y.start), (x.stop, y.stop)] for y, x in pieces])


def _area(group, boxes):
    """Area of the group's shapes, from their bounding boxes, which are up to one pixel too wide."""
    share = {"circle": np.pi / 4, "square": 1.0, "triangle": 0.5}[group.shape]
    return sum(share * np.prod(box[1] - box[0] - 0.5) for box in boxes)


@pytest.mark.parametrize("shape", scenes.SHAPES)
@pytest.mark.parametrize("size", scenes.SIZES)
def test_sizes_and_shapes_cover_the_area_they_should(size, shape):
    share = {"circle": np.pi / 4, "square": 1.0, "triangle": 0.5}[shape]
    rng = np.random.default_rng(0)
    group = Group(1, size, "blue", shape)
    areas = [coverage(drawing.render(Scene((group,), None), rng), "blue").sum() for _ in range(200)]
    want = share * np.asarray(scenes.DIAMETERS[size]) ** 2
    # supersampling by eight and rounding to bytes: 3 % of a small triangle
    nearest = np.abs(np.subtract.outer(areas, want)).min(1)
    assert nearest.max() < 0.03 * want.min()
    assert len({int(np.argmin(np.abs(a - want))) for a in areas}) == len(want)


def test_triangles_point_up():
    image = drawing.render(
        Scene((Group(1, "large", "red", "triangle"),), None), np.random.default_rng(0)
    )
    rows = coverage(image, "red").sum(1)
    rows = rows[rows > 0.5]
    assert np.all(np.diff(rows[:-1]) > 0)  # the last row may be half covered


def test_rendering_follows_the_generator():
    scene = scenes.parse_caption("two red circles above a blue square")
    once, again, other = (drawing.render(scene, np.random.default_rng(seed)) for seed in (3, 3, 4))
    assert once.dtype == np.uint8
    np.testing.assert_array_equal(once, again)
    assert (once != other).any()


def test_an_open_size_is_drawn_both_ways():
    rng = np.random.default_rng(0)
    scene = scenes.parse_caption("a green square")
    areas = np.asarray([coverage(drawing.render(scene, rng), "green").sum() for _ in range(200)])
    assert 60 < (areas > 72).sum() < 140  # 100 expected, standard deviation 7
