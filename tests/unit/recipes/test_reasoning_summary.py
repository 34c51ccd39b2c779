"""The summary in one pass, against counting it all, and its picture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster_recipes.reasoning.grades import WEIGHTS
from muster_recipes.reasoning.summary import NUM_BINS, draw, summarise

_VERDICTS = st.sampled_from(["correct", "wrong", "unparsed", "no_reference"])
#: Thousandths, so that no value is so close to an edge that rounding decides its bin.
_SCORE = st.one_of(st.none(), st.integers(0, 1000).map(lambda n: n / 1000))


@st.composite
def _rows(drawing: st.DrawFn) -> dict[str, Any]:
    scores = drawing(st.one_of(st.none(), st.fixed_dictionaries(dict.fromkeys(WEIGHTS, _SCORE))))
    iterations = drawing(st.integers(0, 2))
    shown = {
        "reasoning": f"try {drawing(st.integers(0, iterations))}",
        "thinking": "",
        "answer": "7",
        "quality": drawing(_SCORE),
        "verification": drawing(_VERDICTS),
    }
    return {
        **shown,
        "scores": scores,
        "ungraded": drawing(st.booleans()),
        "iterations": iterations,
        "versions": [{**shown, "reasoning": f"try {n}"} for n in range(iterations + 1)],
        "tokens": {"prompt": drawing(st.integers(0, 9)), "completion": drawing(st.integers(0, 9))},
    }


@given(st.lists(_rows(), max_size=12))
def test_one_pass_counts_the_same_as_many(rows: list[dict[str, Any]]) -> None:
    found = summarise(iter(rows), threshold=0.7)
    verdicts = [row["verification"] for row in rows]
    accepted = [
        row for row in rows
        if row["quality"] is not None and row["quality"] >= 0.7 and row["verification"] != "wrong"
    ]  # fmt: skip
    qualities = [row["quality"] for row in rows if row["quality"] is not None]
    known = [verdict for verdict in verdicts if verdict != "no_reference"]
    assert found["records"] == len(rows)
    assert found["accepted"] == len(accepted)
    assert found["ungraded"] == sum(row["ungraded"] for row in rows)
    assert found["improved"] == sum(row["reasoning"] != "try 0" for row in rows)
    assert found["rewritten"] == sum(row["iterations"] > 0 for row in rows)
    assert found["verification"] == {
        name: verdicts.count(name) for name in ("correct", "wrong", "unparsed", "no_reference")
    }
    assert found["tokens"] == {
        name: sum(row["tokens"][name] for row in rows) for name in ("prompt", "completion")
    }
    assert found["accepted_share"] == _mean([row in accepted for row in rows])
    assert found["verified_share"] == _mean([verdict == "correct" for verdict in known])
    assert found["mean_quality"] == _mean(qualities)
    for name in WEIGHTS:
        scores = [row["scores"][name] for row in rows if row["scores"]]
        scores = [score for score in scores if score is not None]
        assert found["mean_scores"][name] == _mean(scores)
        assert found["histograms"]["scores"][name] == _histogram(scores)
    for verdict in found["verification"]:
        inside = [row["quality"] for row in rows if row["verification"] == verdict]
        expected = _histogram([value for value in inside if value is not None])
        assert found["histograms"]["quality"][verdict] == expected


def _mean(values: list[Any]) -> Any:
    return pytest.approx(sum(values) / len(values), abs=1e-6) if values else None


def _histogram(values: list[float]) -> list[int]:
    edges = [(n / NUM_BINS, (n + 1) / NUM_BINS) for n in range(NUM_BINS)]
    counts = [
        sum(low <= value < high or (high == 1 and value == 1) for value in values)
        for low, high in edges
    ]
    assert sum(counts) == len(values)
    return counts


@pytest.mark.parametrize("is_graded", [True, False])
def test_the_picture_is_written(tmp_path: Path, is_graded: bool) -> None:
    path = draw(summarise(_many(is_graded)), tmp_path / "scores.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 10_000


def test_nothing_at_all_has_a_picture_too(tmp_path: Path) -> None:
    summary = summarise([])
    assert summary["accepted_share"] is None and summary["verified_share"] is None
    assert draw(summary, tmp_path / "scores.png").exists()


def _many(is_graded: bool) -> Iterator[dict[str, Any]]:
    import random

    stream = random.Random(0)
    for number in range(1000):
        verdict = stream.choice(["correct"] * 6 + ["wrong"] * 2 + ["unparsed", "no_reference"])
        scores = {name: round(stream.betavariate(6, 2), 2) for name in WEIGHTS}
        quality = sum(WEIGHTS[name] * scores[name] for name in WEIGHTS)
        if verdict == "wrong":
            quality = min(quality * 0.7, 0.5)
        shown = {"reasoning": "", "thinking": "", "answer": "", "verification": verdict,
                 "quality": quality if is_graded and number % 50 else None}  # fmt: skip
        if not is_graded:
            shown["quality"] = {"correct": 1.0, "no_reference": None}.get(verdict, 0.0)
        yield {
            **shown,
            "scores": scores if is_graded else None,
            "ungraded": False,
            "iterations": 0,
            "versions": [shown],
            "tokens": {"prompt": 1, "completion": 1},
        }
