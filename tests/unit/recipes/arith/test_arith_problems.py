"""Generated problems say the truth, stay in range, and belong to one split."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster_recipes.arith.problems import draw, make, prompt, read_answer, split_of

_SEEDS = st.integers(0, 2**32)


@given(_SEEDS, st.integers(1, 12), st.integers(9, 9999))
def test_the_answer_and_every_step_equal_pythons(
    seed: int, difficulty: int, max_value: int
) -> None:
    problem = draw(random.Random(seed), difficulty, max_value)
    assert eval(problem.text) == problem.answer
    assert len(problem.steps) == difficulty
    results = []
    for step in problem.steps:
        expression, result = step.split("=")
        assert eval(expression) == int(result)
        assert 0 <= int(result) <= max_value
        results.append(result)
    # Each step goes on from the result before it, and the last one gives the answer.
    starts = [step[: len(result)] for step, result in zip(problem.steps[1:], results, strict=False)]
    assert starts == results[:-1]
    assert results[-1] == str(problem.answer)


@given(_SEEDS, st.sampled_from(["train", "val", "test"]), st.integers(0, 1000), st.integers(1, 5))
def test_a_problem_is_a_function_of_its_place_and_in_its_split(
    seed: int, split: str, index: int, difficulty: int
) -> None:
    problem = make(seed, split, index, difficulty)
    assert problem == make(seed, split, index, difficulty)
    assert split_of(problem.text) == split


def test_no_problem_is_in_two_splits_even_with_other_seeds() -> None:
    texts = {
        split: {make(seed, split, i, 1).text for seed in range(3) for i in range(300)}
        for split in ("train", "val", "test")
    }
    assert not texts["train"] & texts["test"]
    assert not texts["train"] & texts["val"]
    assert not texts["val"] & texts["test"]


def test_problems_of_a_split_differ() -> None:
    assert len({make(0, "train", i, 3).text for i in range(500)}) > 490


@given(_SEEDS, st.integers(1, 12))
def test_the_answer_is_read_from_the_solution(seed: int, difficulty: int) -> None:
    problem = draw(random.Random(seed), difficulty, 99)
    assert read_answer(problem.solution) == problem.answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [("#### 12", 12), ("1+1=2\n#### -3 ok", -3), ("#### 1\n#### 2", 2), ("####7", 7),
     ("12", None), ("####", None), ("#### x", None), ("", None)],
)  # fmt: skip
def test_an_answer_that_is_not_there_is_none(text: str, answer: int | None) -> None:
    assert read_answer(text) == answer


def test_the_example_of_the_docstring_has_its_form() -> None:
    assert prompt("(17+25-8)*2") == "Q: (17+25-8)*2\nA: "
