"""Grades are read strictly: what is not a number from 0 to 1 is no grade, and never 0."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster_recipes.reasoning.grades import (
    WEIGHTS,
    WRONG_CAP,
    parse_grades,
    quality_of,
    quality_without_grades,
)

_SCORES = st.fixed_dictionaries({name: st.floats(0, 1) for name in WEIGHTS})
_WORDS = st.text(alphabet="abc .\n", max_size=20)
_WRONG = st.one_of(
    st.none(),
    st.booleans(),
    st.text(max_size=4),
    st.floats(allow_nan=True).filter(lambda x: not 0 <= x <= 1),
    st.integers().filter(lambda x: x not in (0, 1)),
    st.just([0.5]),
)


def test_the_weights_are_those_of_the_specification() -> None:
    assert list(WEIGHTS.values()) == [0.4, 0.2, 0.2, 0.2]


@given(scores=_SCORES, before=_WORDS, after=_WORDS, form=st.sampled_from(["%s", "```json\n%s```"]))
def test_complete_grades_come_back(
    scores: dict[str, float], before: str, after: str, form: str
) -> None:
    text = f"{before}\n{form % json.dumps({**scores, 'feedback': 'fine'})}\n{after}"
    grades = parse_grades(text)
    assert grades.scores == scores
    assert grades.is_complete
    assert grades.feedback == "fine"


@given(scores=_SCORES, name=st.sampled_from(list(WEIGHTS)), value=_WRONG)
def test_a_grade_that_is_none_is_null_and_leaves_no_quality(
    scores: dict[str, float], name: str, value: Any
) -> None:
    grades = parse_grades(json.dumps({**scores, name: value}))
    assert grades.scores == {**scores, name: None}
    assert not grades.is_complete
    assert quality_of(grades.scores, "correct") is None


@given(st.text(alphabet='{}[]":,0.5 correctness_truenull\n`', max_size=60))
def test_any_text_is_read_without_an_error(text: str) -> None:
    grades = parse_grades(text)
    assert list(grades.scores) == list(WEIGHTS)


@pytest.mark.parametrize(
    ("text", "correctness", "feedback"),
    [
        ("", None, ""),
        ("I like it: 0.9", None, "I like it: 0.9"),
        ('{"correctness": "0.9"}', None, ""),
        ('{"correctness": 0.9', None, '{"correctness": 0.9'),
        ('{"scores": {"correctness": 0.9}}', 0.9, '{"scores":\n}'),
        ('Form: {"correctness": 0.1} Mine: {"correctness": 0.9} done', 0.9,
         'Form: {"correctness": 0.1} Mine:\ndone'),
        ('{"correctness": 1}', 1.0, ""),
        ("{" * 3000, None, "{" * 3000),
    ],
)  # fmt: skip
def test_what_models_write(text: str, correctness: float | None, feedback: str) -> None:
    grades = parse_grades(text)
    assert grades.scores["correctness"] == correctness
    assert grades.feedback == feedback


@given(scores=_SCORES)
def test_quality_is_the_weighted_sum_and_capped_for_a_wrong_answer(
    scores: dict[str, float],
) -> None:
    total = sum(scores[name] * weight for name, weight in WEIGHTS.items())
    assert quality_of(scores, "correct") == pytest.approx(total, abs=1e-4)
    wrong = quality_of(scores, "wrong")
    assert wrong is not None and wrong <= WRONG_CAP
    assert wrong == pytest.approx(min(total, 0.5), abs=1e-4)


def test_without_grades_only_the_verdict_counts() -> None:
    verdicts = ("correct", "wrong", "unparsed", "no_reference")
    assert [quality_without_grades(v) for v in verdicts] == [1.0, 0.0, 0.0, None]
