"""Prompt files and the order in which a run goes through them."""

import json
import pickle
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from solrl_jax.data.prompts import Prompt, draw_prompts, load_prompts
from solrl_jax.errors import InputError

KINDS = ("general", "geneval-shapes", "motion", "ocr", "shapes")
SETS = tuple(f"embedded:{kind}-{part}" for kind in KINDS for part in ("test", "train"))
PROMPTS = [f"prompt {i}" for i in range(12)]


def write(tmp_path, content, name="prompts.txt"):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def test_blank_lines_and_spaces_are_dropped_and_order_is_kept(tmp_path):
    path = write(tmp_path, "\n  b cat \n\n\t\na dog\n   \nc bird")
    assert load_prompts(path, "f") == ["b cat", "a dog", "c bird"]


def test_a_prompt_that_comes_twice_is_taken_once_unless_asked_otherwise(tmp_path):
    path = write(tmp_path, "b\na\nb \nc\na\n")
    assert load_prompts(path, "f") == ["b", "a", "c"]
    assert load_prompts(path, "f", distinct=False) == ["b", "a", "b", "c", "a"]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_every_kind_of_line_end_is_read(tmp_path, end):
    assert load_prompts(write(tmp_path, f"a cat{end}ein Kätzchen{end}{end}"), "f") == [
        "a cat",
        "ein Kätzchen",
    ]


def test_a_byte_order_mark_is_no_part_of_a_prompt(tmp_path):
    assert load_prompts(write(tmp_path, b"\xef\xbb\xbfa cat\na dog\n"), "f") == ["a cat", "a dog"]


@pytest.mark.parametrize("inside", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c"])
def test_only_a_line_end_ends_a_prompt(tmp_path, inside):
    assert load_prompts(write(tmp_path, f"a cat{inside}on a mat\na dog\n"), "f") == [
        f"a cat{inside}on a mat",
        "a dog",
    ]


@pytest.mark.parametrize("content", ["", "\n\n", "  \n\t\n", b"\xef\xbb\xbf"])
def test_a_file_without_a_prompt_is_refused(tmp_path, content):
    path = write(tmp_path, content)
    with pytest.raises(
        InputError,
        match=re.escape(f"prompts.train={path!r}: holds no prompt; expected one per line"),
    ):
        load_prompts(path, "prompts.train")


def test_a_file_that_is_not_there_is_refused(tmp_path):
    path = str(tmp_path / "absent.txt")
    with pytest.raises(
        InputError, match=re.escape(f"prompts.train={path!r}: no such file; expected a text file")
    ):
        load_prompts(path, "prompts.train")


@pytest.mark.parametrize(
    "content", [b"a cat\n\xff\xfe\n", "a cat\n".encode("utf-16"), b"caf\xe9\n"]
)
def test_a_file_that_is_not_text_is_refused(tmp_path, content):
    path = write(tmp_path, content)
    with pytest.raises(
        InputError, match=re.escape(f"--prompts={path!r}: cannot be read as UTF-8 text (")
    ) as error:
        load_prompts(path, "--prompts")
    assert "\n" not in str(error.value)


def test_a_directory_is_refused(tmp_path):
    with pytest.raises(
        InputError, match=re.escape(f"f={str(tmp_path)!r}: cannot be read as UTF-8 text (")
    ):
        load_prompts(str(tmp_path), "f")


def test_a_jsonl_file_says_beside_each_prompt_what_rewards_are_told(tmp_path):
    dog = {
        "prompt": " a red dog ",
        "tag": "colors",
        "include": [{"class": "dog", "count": 1, "color": "red"}],
    }
    lines = [dog, {"prompt": "ein Kätzchen"}, dog]
    path = write(tmp_path, "\n\n".join(map(json.dumps, lines)), "geneval.jsonl")
    prompts = load_prompts(path, "f")
    assert prompts == ["a red dog", "ein Kätzchen"]
    assert [p.metadata for p in prompts] == [{"tag": "colors", "include": dog["include"]}, {}]
    assert len(load_prompts(path, "f", distinct=False)) == 3
    drawn = draw_prompts(prompts, 0, 0, 2)
    assert {p: p.metadata for p in drawn} == {p: p.metadata for p in prompts}


def test_a_prompt_is_its_text_wherever_it_goes():
    prompt = Prompt("a dog", {"tag": "single_object"})
    assert {prompt: 1} == {"a dog": 1}
    assert json.dumps(prompt) == '"a dog"'
    assert pickle.loads(pickle.dumps(prompt)).metadata == {"tag": "single_object"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("a red dog", "line 2: not JSON ("),
        ('["a red dog"]', 'line 2: expected an object with the text under "prompt"'),
        ('{"text": "a red dog"}', 'line 2: expected an object with the text under "prompt"'),
        ('{"prompt": " "}', 'line 2: expected an object with the text under "prompt"'),
        ('{"prompt": "a cat", "tag": "colors"}', "'a cat' comes twice, with different metadata"),
    ],
)
def test_a_jsonl_line_that_is_no_prompt_is_refused(tmp_path, line, message):
    path = write(tmp_path, '{"prompt": "a cat"}\n' + line, "prompts.jsonl")
    with pytest.raises(InputError, match=re.escape(f"prompts.train={path!r}: {message}")):
        load_prompts(path, "prompts.train")


@pytest.mark.parametrize("name", SETS)
def test_embedded_sets_are_text_without_repetition(name):
    prompts = load_prompts(name, "f")
    assert prompts == load_prompts(name, "f", distinct=False)
    assert all(p == p.strip() and p.isascii() for p in prompts)


@pytest.mark.parametrize("kind", KINDS)
def test_the_embedded_test_prompts_are_not_trained_on(kind):
    test, train = (set(load_prompts(f"embedded:{kind}-{part}", "f")) for part in ("test", "train"))
    assert not test & train


def words(prompt):
    """The words of a prompt that carry its meaning."""
    little = {"a", "an", "the", "of", "in", "on", "at", "with", "and", "to", "its", "by", "from"}
    return set(re.findall(r"\w+", prompt.lower())) - little


@pytest.mark.slow
def test_the_general_sets_are_varied_and_none_resembles_another():
    train, test = (load_prompts(f"embedded:general-{part}", "f") for part in ("train", "test"))
    assert len(train) >= 400
    assert len(test) >= 100
    for prompts in (train, test):
        lengths = sorted(len(prompt.split()) for prompt in prompts)
        assert 3 <= lengths[0] <= 5
        assert 40 <= lengths[-1] <= 60
    for prompt in test:
        for other in train:
            shared = words(prompt) & words(other)
            together = words(prompt) | words(other)
            assert len(shared) <= len(together) / 2, (prompt, other)


def test_an_embedded_set_that_is_not_there_is_refused_with_those_that_are():
    names = ", ".join(SETS)
    message = f"prompts.test='embedded:cats': no such embedded prompt set; expected one of {names}"
    with pytest.raises(InputError, match=re.escape(message)):
        load_prompts("embedded:cats", "prompts.test")


def draw(iterations, count, seed=0):
    """The prompts of these iterations, one after another."""
    return [p for i in iterations for p in draw_prompts(PROMPTS, seed, i, count)]


def test_an_epoch_visits_every_prompt_once():
    for epoch in range(3):
        assert sorted(draw(range(4 * epoch, 4 * epoch + 4), 3)) == sorted(PROMPTS)
    assert [len(draw([i], 3)) for i in range(8)] == [3] * 8


def test_every_epoch_has_an_order_of_its_own():
    epochs = [draw(range(4 * e, 4 * e + 4), 3) for e in range(4)]
    assert len({tuple(e) for e in epochs}) == 4
    assert epochs[0] != PROMPTS


@settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(1, 12), st.integers(0, 50), st.integers(0, 2**31 - 1))
def test_iterations_of_an_epoch_are_disjoint_and_no_iteration_repeats_a_prompt(count, epoch, seed):
    an_epoch = len(PROMPTS) // count
    drawn = draw(range(epoch * an_epoch, (epoch + 1) * an_epoch), count, seed)
    assert len(drawn) == len(set(drawn)) == an_epoch * count  # what is left of an epoch is dropped
    assert set(drawn) <= set(PROMPTS)


def test_a_draw_is_a_function_of_its_arguments():
    assert draw([7, 2, 7], 3) == draw([7], 3) + draw([2], 3) + draw([7], 3)
    assert draw(range(4), 3) != draw(range(4), 3, seed=1)
    assert draw([0], 12) != PROMPTS


def test_over_many_epochs_what_is_dropped_is_not_always_the_same():
    """With twelve prompts and five per iteration, every epoch leaves out two, in turn."""
    drawn = draw(range(2 * 600), 5)
    counts = [drawn.count(p) for p in PROMPTS]
    assert counts == pytest.approx([500] * 12, abs=40)  # a standard deviation is 9
