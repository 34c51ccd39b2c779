"""Thinking, solution and final answer in what a model wrote."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster_recipes.reasoning.answers import find_answer, last_boxed, separate_thinking

_PLAIN = st.text(alphabet="ab01 +=\n", max_size=8)
#: Text whose braces balance; escaped braces are characters.
_BALANCED = st.recursive(
    st.one_of(_PLAIN, st.sampled_from([r"\{", r"\}", r"\frac", r"\\"])),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join), inner.map(lambda text: "{" + text + "}")
    ),
    max_leaves=8,
)


def _reference_boxes(text: str) -> list[str]:
    """By counting, one character at a time, from every box that is not inside another."""
    boxes, place = [], 0
    while (start := text.find(r"\boxed{", place)) >= 0:
        begin = position = start + len(r"\boxed{")
        depth = 1
        while position < len(text) and depth:
            if text[position] == "\\":
                position += 1
            elif text[position] in "{}":
                depth += 1 if text[position] == "{" else -1
            position += 1
        if depth:
            place = begin
        else:
            boxes.append(text[begin : position - 1].strip())
            place = position
    return boxes


@given(before=_BALANCED, content=_BALANCED, after=_PLAIN)
def test_a_balanced_box_comes_back_whole(before: str, content: str, after: str) -> None:
    assert last_boxed(rf"{before} \boxed{{{content}}} {after}") == content.strip()


@given(
    st.lists(
        st.one_of(st.sampled_from([r"\boxed{", "{", "}", r"\{", r"\}", r"\\", " "]), _PLAIN),
        max_size=14,
    ).map("".join)
)
def test_any_text_has_the_box_that_counting_finds(text: str) -> None:
    boxes = _reference_boxes(text)
    assert last_boxed(text) == (boxes[-1] if boxes else None)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{1} no, \boxed{2}", "2"),
        (r"\boxed{1} and then \boxed{\frac{3", "1"),
        (r"\boxed{\text{two \} braces}}", r"\text{two \} braces}"),
        (r"\boxed 7", "7"),
        (r"\fbox{8}", "8"),
        (r"\boxed{}", None),
        ("17+25=42\n#### 42", "42"),
        ("#### 1\nwrong\n#### 1,234\nthanks", "1,234"),
        ("#### 5 \\boxed{6}", "6"),
        ("####", None),
        ("the answer is 5", None),
        ("", None),
    ],
)
def test_the_final_answer(text: str, answer: str | None) -> None:
    assert find_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "reasoning", "thinking"),
    [
        ("<think>hm</think>so 5", "so 5", "hm"),
        ("hm</think>so 5", "so 5", "hm"),
        ("<think>hm, \\boxed{3}", "", "hm, \\boxed{3}"),
        ("a <think>b</think> c <think>d</think> e", "a  c  e", "b\n\nd"),
        ("<THINKING>x</THINKING>y", "y", "x"),
        ("plain", "plain", ""),
        ("<think></think>plain", "plain", ""),
    ],
)
def test_thinking_is_separated(text: str, reasoning: str, thinking: str) -> None:
    assert separate_thinking(text) == (reasoning, thinking)


@given(st.lists(st.one_of(st.sampled_from(["<think>", "</think>"]), _PLAIN), max_size=9))
def test_thinking_is_not_deleted(pieces: list[str]) -> None:
    written = separate_thinking("".join(pieces))
    together = written.reasoning + written.thinking
    kept = "".join(pieces).replace("<think>", "").replace("</think>", "")
    assert sorted("".join(together.split())) == sorted("".join(kept.split()))
    assert "<" not in together
