"""Data sets by name, by file and by column: read as they are, or refused with what there is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from muster import UsageError
from muster.base.errors import UnknownNameError
from muster.pipeline.stages import Reject
from muster_recipes.arith.problems import split_of
from muster_recipes.reasoning.config import ReasoningConfig
from muster_recipes.reasoning.recipe import read_stage
from muster_recipes.reasoning.rows import LAYOUTS
from muster_recipes.reasoning.sources import (
    DATA_SETS,
    check_columns,
    dataset_info,
    list_datasets,
    source_of,
)
from muster_recipes.reasoning.verify import read_choices

_GSM8K = {"question": "How many?", "answer": "2+2=<<2+2=4>>4 eggs\n#### 1,004"}
_MATH = {"problem": "Find x.", "solution": r"No: \boxed{1}. Yes: $\boxed{\frac{1}{\sqrt{2}}}$."}
_ASDIV = {"body": "Seven apples.", "question": "And two?", "answer": "9 (apples)"}
_AQUA = {"question": "How far?", "options": ["A)21", "B)21.5 km", "C) 1,5"], "correct": "B"}
_MATH_QA = {"Problem": "How far?", "Rationale": "…", "correct": "c",
            "options": "a ) 38 , b ) 27.675 , c ) 1,300 , d ) 3 , e ) none of these"}  # fmt: skip
_NUMINA = {"problem": "Prove.", "answer": "5/2", "solution": r"so \boxed{7}"}


@pytest.mark.parametrize(
    ("key", "row", "problem", "answer"),
    [
        ("gsm8k", _GSM8K, "How many?", "1,004"),
        ("math", _MATH, "Find x.", r"\frac{1}{\sqrt{2}}"),
        ("asdiv", _ASDIV, "Seven apples. And two?", "9"),
        ("numina_math", _NUMINA, "Prove.", "5/2"),
        ("numina_math", {**_NUMINA, "answer": "proof"}, "Prove.", None),
        ("numina_math", {**_NUMINA, "answer": None}, "Prove.", "7"),
        ("numina_math", {**_NUMINA, "answer": "notfound", "solution": None}, "Prove.", None),
        ("arith", {"id": 3, "problem": "3+4", "reference_answer": "7"}, "3+4", "7"),
    ],
)
def test_rows_of_the_known_data_sets(
    key: str, row: dict[str, Any], problem: str, answer: str | None
) -> None:
    [read] = read_stage(ReasoningConfig(dataset=key)).process([{"id": 3, **row}])
    assert read == {"id": 3, "problem": problem, "reference_answer": answer}


@pytest.mark.parametrize(
    ("key", "row", "choices", "letter"),
    [
        ("aqua", _AQUA, {"A": "21", "B": "21.5 km", "C": "1,5"}, "B"),
        ("math_qa", _MATH_QA, {"A": "38", "B": "27.675", "C": "1,300", "D": "3",
                               "E": "none of these"}, "C"),
        ("math_qa", {**_MATH_QA, "options": "['a ) 38', 'b ) 27', 'c ) 8']"},
         {"A": "38", "B": "27", "C": "8"}, "C"),
    ],
)  # fmt: skip
def test_multiple_choice(key: str, row: Any, choices: dict[str, str], letter: str) -> None:
    [read] = read_stage(ReasoningConfig(dataset=key)).process([row])
    assert isinstance(read, dict)
    assert read["reference_answer"] == letter
    assert read["problem"].startswith("How far?\n")
    assert read_choices(read["problem"]) == choices


def test_columns_by_name_come_before_the_table() -> None:
    config = ReasoningConfig(dataset="gsm8k", problem_column="q", answer_column="a")
    rows: list[dict[str, Any]] = [
        {"id": "x", "q": "Why?", "a": r"Because \boxed{5}", "question": "no"},
        {"id": "y", "q": " Why? ", "a": 7},
        {"id": "z", "q": "Why?", "a": None},
    ]
    answers = [made["reference_answer"] for made in map(_made, read_stage(config).process(rows))]
    assert answers == ["5", "7", None]


def test_without_an_answer_column_there_is_no_reference() -> None:
    [read] = read_stage(ReasoningConfig(dataset="x.jsonl")).process([{"problem": "Why?"}])
    assert read == {"problem": "Why?", "reference_answer": None}


@pytest.mark.parametrize(
    ("config", "row", "reason"),
    [
        ({"dataset": "x.csv"}, {"question": "a", "no": 1},
         "there is no column 'problem'; there are: question, no"),
        ({"dataset": "x.csv", "answer_column": "key"}, {"problem": "a"},
         "there is no column 'key'; there are: problem"),
        ({"dataset": "gsm8k"}, {"question": "a"},
         "there is no column 'answer'; there are: question"),
        ({"dataset": "gsm8k"}, {"question": " ", "answer": "1"}, "the column 'question' is empty"),
        ({"dataset": "gsm8k"}, {"question": ["a"], "answer": "1"},
         "the column 'question' holds no text but list"),
        ({"dataset": "aqua"}, {"question": "a", "options": "A)1", "correct": "A"},
         "the column 'options' is not a list but str"),
    ],
)  # fmt: skip
def test_a_row_that_cannot_be_read_says_why(
    config: dict[str, str], row: dict[str, Any], reason: str
) -> None:
    good = {"problem": "p", "question": "q", "answer": "#### 1", "options": ["A)1"], "key": 1,
            "correct": "A"}  # fmt: skip
    read = read_stage(ReasoningConfig(**config)).process([row, good])  # type: ignore[arg-type]
    assert isinstance(read[0], Reject)
    assert str(read[0]) == reason
    assert isinstance(read[1], dict), "its neighbour is not harmed"


def test_the_arith_problems_are_held_out_and_keep_their_number() -> None:
    records = list(_records(ReasoningConfig(num_problems=7, difficulty=2)))
    assert [record["id"] for record in records] == [0, 1, 2, 3, 4, 5, 6]
    assert all(split_of(record["problem"]) == "test" for record in records)
    assert [str(eval(record["problem"])) for record in records] == [
        record["reference_answer"] for record in records
    ]
    again = list(_records(ReasoningConfig(num_problems=5, difficulty=2)))
    assert again == records[:5]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"dataset": "gsm8k"}, ("hf:openai/gsm8k", "main", "train")),
        ({"dataset": "gsm8k", "dataset_config": "socratic", "split": "test"},
         ("hf:openai/gsm8k", "socratic", "test")),
        ({"dataset": "math", "dataset_config": "geometry"},
         ("hf:EleutherAI/hendrycks_math", "geometry", "train")),
        ({"dataset": "asdiv"}, ("hf:EleutherAI/asdiv", "", "validation")),
        ({"dataset": "numina_math"}, ("hf:AI-MO/NuminaMath-1.5", "", "train")),
        ({"dataset": "someone/problems"}, ("hf:someone/problems", "", "train")),
        ({"dataset": "hf:gpqa", "split": "x"}, ("hf:gpqa", "", "x")),
        ({"dataset": "data/problems.jsonl"}, ("data/problems.jsonl", "", "")),
        ({"dataset": "problems.CSV"}, ("problems.CSV", "", "")),
        ({"dataset": "data/*.parquet"}, ("data/*.parquet", "", "")),
        ({"dataset": "./data"}, ("./data", "", "")),
    ],
)  # fmt: skip
def test_what_is_opened(config: dict[str, str], expected: tuple[str, str, str]) -> None:
    found = source_of(ReasoningConfig(**config))  # type: ignore[arg-type]
    assert (found.text, found.config, found.split) == expected
    assert found.records is None


def test_a_folder_that_is_there_is_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine" / "rows").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert source_of(ReasoningConfig(dataset="mine/rows")).text == "mine/rows"


@pytest.mark.parametrize(
    ("config", "kind", "message"),
    [
        ({"dataset": "gsm9k"}, UnknownNameError, "did you mean 'gsm8k'. Known: aqua, arith, asdiv"),
        ({"dataset": "gsm8k", "dataset_config": "hard"}, UnknownNameError, "Known: main, socratic"),
        ({"dataset": "gsm8k", "split": "dev"}, UnknownNameError, "Known: test, train"),
        ({"dataset": "asdiv", "dataset_config": "x"}, UnknownNameError, r"\(only one\)"),
        ({"dataset": "gsm8k", "difficulty": 5}, UsageError, "--difficulty 5 has no meaning"),
        ({"dataset": "x.csv", "split": "test"}, UsageError, "--split test has no meaning"),
        ({"split": "train"}, UsageError, "--split train has no meaning for the data set arith"),
        ({"difficulty": 13}, UsageError, "from 1 to 12"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    config: dict[str, Any], kind: type[UsageError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        source_of(ReasoningConfig(**config))


@pytest.mark.parametrize(
    ("config", "columns", "message"),
    [
        ({"dataset": "gsm8k"}, ["question"], "gsm8k has no column 'answer'"),
        ({"dataset": "a.csv"}, ["q", "a"],
         "no column 'problem'.\nHint: its columns are q, a; name one of them with --problem-"),
        ({"dataset": "a.csv", "problem_column": "q", "answer_column": "b"}, ["q", "a"],
         "no column 'b'.\nHint: its columns are q, a; name one of them with --answer-column"),
    ],
)  # fmt: skip
def test_missing_columns_are_told_before_the_start(
    config: dict[str, str], columns: list[str], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        check_columns(ReasoningConfig(**config), columns)  # type: ignore[arg-type]


def test_columns_that_are_there_are_no_error() -> None:
    check_columns(ReasoningConfig(dataset="math_qa"), ["Problem", "options", "correct"])
    check_columns(ReasoningConfig(dataset="a.csv", problem_column="q"), ["q"])


def test_the_table_can_be_shown() -> None:
    rows = list_datasets()
    assert [row["key"] for row in rows] == list(DATA_SETS)
    assert "896,215" in next(row["splits"] for row in rows if row["key"] == "numina_math")
    assert {item.layout for item in DATA_SETS.values()} == {*LAYOUTS, ""}
    assert len(DATA_SETS["math"].configs) == 7
    assert dataset_info("math")["default"] == "all of them"
    with pytest.raises(UnknownNameError, match=r"Unknown data set 'maths'.*\n.*'math'"):
        dataset_info("maths")


def test_the_command_line_needs_no_heavy_library() -> None:
    code = (
        "import sys; import muster_recipes.reasoning.recipe, muster_recipes.reasoning.summary, "
        "muster_recipes.reasoning.sources, muster_recipes.reasoning.hub; "
        "print([n for n in ('torch', 'transformers', 'datasets', 'sympy', 'matplotlib') "
        "if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def _made(read: dict[str, Any] | Reject) -> dict[str, Any]:
    assert isinstance(read, dict)
    return read


def _records(config: ReasoningConfig) -> list[dict[str, Any]]:
    records = source_of(config).records
    assert records is not None
    return list(records)
