"""End to end with a real model: the one that ships with muster, on problems it has never seen."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.unit.recipes.map_driver import good

from muster_recipes.arith.problems import read_answer
from muster_recipes.reasoning.config import ReasoningConfig
from muster_recipes.reasoning.recipe import stages
from muster_recipes.reasoning.sources import source_of
from muster_recipes.reasoning.summary import summarise

pytestmark = pytest.mark.thorough


def _run(at_once: int = 16, **flags: Any) -> list[dict[str, Any]]:
    config = ReasoningConfig(max_tokens=200, **flags)
    config.check()
    records = source_of(config).records
    assert records is not None
    return good(stages(config), list(records), at_once)


def test_nine_in_ten_are_verified_at_the_training_difficulty() -> None:
    rows = _run(difficulty=3, num_problems=60)
    summary = summarise(rows)
    assert summary["verified_share"] >= 0.9
    assert summary["accepted_share"] == summary["verified_share"]
    assert summary["tokens"]["completion"] > 60 * 10
    for row in rows:
        expected = str(read_answer(row["reasoning"])) == row["reference_answer"]
        assert (row["verification"] == "correct") == expected
        assert str(eval(row["problem"])) == row["reference_answer"]


@pytest.mark.parametrize(("difficulty", "temperature"), [(4, 1.6), (5, 1.3)])
def test_improvement_never_makes_a_record_worse(difficulty: int, temperature: float) -> None:
    """On problems with more operations, and a temperature that lets the model try other ways."""
    rows = _run(difficulty=difficulty, temperature=temperature, num_problems=40)
    for row in rows:
        first = row["versions"][0]
        assert row["quality"] >= first["quality"]
        assert row["iterations"] == 0 or first["quality"] < 0.8
        assert len(row["versions"]) == row["iterations"] + 1
    before = sum(row["versions"][0]["verification"] == "correct" for row in rows)
    after = sum(row["verification"] == "correct" for row in rows)
    assert any(row["iterations"] for row in rows), "there is something to improve"
    assert after >= before
    if difficulty == 4:
        assert after > before, "what is nearly right is put right by another try"


def test_the_output_does_not_depend_on_what_runs_beside() -> None:
    flags: dict[str, Any] = {"difficulty": 4, "temperature": 1.6, "num_problems": 8}
    rows = _run(1, **flags)
    assert json.dumps(_run(8, **flags)) == json.dumps(rows)
    assert _run(8, seed=1, **flags) != rows
