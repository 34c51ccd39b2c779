"""Problems from a data file: read once, and every number in it is checked."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from muster import UsageError
from muster_recipes.ssm.config import SsmConfig
from muster_recipes.ssm.problem import problems


@pytest.mark.parametrize(
    ("entry", "changes", "message"),
    [
        (
            {"alpha": 1, "w_sequences": [[1, 2, 3, 4], [1, 2, 3, 4]]},
            {},
            "entry 0: w_sequences has 2 sequences, but --num-sequences is 1",
        ),
        (
            {"alpha": [1, 2], "w_sequences": [[1, 2, 3, 4]]},
            {"teacher_ranks": (2, 3)},
            "entry 0: alpha has 2 values, but --teacher-ranks asks for rank 3",
        ),
        ({"alpha": float("nan"), "w_sequences": [[1, 2, 3, 4]]}, {}, "alpha must be a number"),
        ({"alpha": 1, "w_sequences": [[1, 2, 3, float("inf")]]}, {}, "each sequence needs 4"),
        ({"alpha": True, "w_sequences": [[1, 2, 3, 4]]}, {}, "alpha must be a number"),
        ({"alpha": 10**400, "w_sequences": [[1, 2, 3, 4]]}, {}, "alpha must be a number"),
        ({"alpha": [1e200], "w_sequences": [[1, 2, 3, 4]]}, {}, "and their powers finite"),
        ({"alpha": 1, "w_sequences": [[1, 2, 3, 10**400]]}, {}, "each sequence needs 4"),
        ({"alpha": 1, "w_sequences": [[1, 2, 3, 1e200]]}, {}, "each sequence needs 4"),
    ],
)
def test_an_entry_that_does_not_fit_is_named(
    tmp_path: Path, entry: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    path = tmp_path / "data.json"
    path.write_text(json.dumps([entry]))
    with pytest.raises(UsageError, match=message):
        SsmConfig(data_file=path, **changes)


def test_all_problems_are_those_made_one_by_one(tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    path.write_text(
        json.dumps([{"alpha": a, "w_sequences": [[a, 1, 2, 3]]} for a in (0.1, 0.2, 0.3)])
    )
    for config in (
        SsmConfig(seeds=(5, 3), teacher_ranks=(2, 1)),
        SsmConfig(num_seeds=7, data_file=path),
        SsmConfig(num_seeds=2, alpha=0.25, input_e1=True),
    ):
        found = list(problems(config))
        assert [item[:2] for item in found] == [
            (seed, rank) for seed in config.all_seeds for rank in config.teacher_ranks
        ]


def test_teachers_and_data_have_the_stated_spread() -> None:
    drawn = [problem for _, _, problem in problems(SsmConfig(num_seeds=2000))]
    poles = [problem.alpha[0] for problem in drawn]
    entries = [x for problem in drawn for x in problem.w[0]]
    assert statistics.mean(poles) == pytest.approx(0.5, abs=4 * 0.1 / 2000**0.5)
    assert statistics.stdev(poles) == pytest.approx(0.1, rel=0.07)
    assert statistics.mean(entries) == pytest.approx(0.0, abs=4 / 8000**0.5)
    assert statistics.stdev(entries) == pytest.approx(1.0, rel=0.035)
