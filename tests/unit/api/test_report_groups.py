"""Groups of tasks against sums made another way, and the pictures of them."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples

from muster.api.report.content import Spread, Text, in_words, table_of
from muster.api.report.figures import (
    draw_confusion,
    draw_groups,
    draw_measured,
    drawn,
    why_no_picture,
)
from muster.api.report.groups import Moments, best_first, grouped, shown_rows, whole_rows

Task = tuple[dict[str, Any], dict[str, Any], bool]
finite = st.floats(min_value=-1e6, max_value=1e6)


@given(st.lists(finite, min_size=1, max_size=30))
def test_moments_are_those_of_the_standard_library(values: list[float]) -> None:
    found = Moments()
    for value in values:
        found.add(value)
    assert math.isclose(found.mean, statistics.fmean(values), rel_tol=1e-9, abs_tol=1e-6)
    if len(values) == 1:
        assert found.sd is None
    else:
        assert found.sd is not None
        assert math.isclose(found.sd, statistics.stdev(values), rel_tol=1e-6, abs_tol=1e-4)


@st.composite
def tasks(draw: st.DrawFn) -> list[Task]:
    made: list[Task] = []
    for _ in range(draw(st.integers(0, 25))):
        params = {"lr": draw(st.sampled_from([0.1, 0.2])), "net": draw(st.sampled_from("ab"))}
        params["seed"] = draw(st.integers(0, 5))
        is_done = draw(st.booleans())
        score = draw(st.one_of(finite, st.just(math.nan), st.just(math.inf), st.booleans()))
        made.append((params, {"score": score, "note": "text"} if is_done else {}, is_done))
    return made


@given(tasks())
def test_groups_are_all_tasks_but_for_the_seed(made: list[Task]) -> None:
    by_setting: dict[tuple[Any, Any], list[Task]] = defaultdict(list)
    for task in made:
        by_setting[task[0]["lr"], task[0]["net"]].append(task)
    found = grouped(made)
    assert [(g.params["lr"], g.params["net"]) for g in found.groups] == list(by_setting)
    for group, same in zip(found.groups, by_setting.values(), strict=True):
        scores = [float(task[1]["score"]) for task in same if task[2]]
        usable = [score for score in scores if math.isfinite(score)]
        assert (group.num_runs, group.num_done) == (len(same), len(scores))
        moments = group.results.get("score")
        assert (0 if moments is None else moments.num) == len(usable)
        if moments is not None:
            mean = statistics.fmean(usable)
            assert math.isclose(moments.mean, mean, rel_tol=1e-9, abs_tol=1e-6)
    assert found.num_unusable == sum(not math.isfinite(t[1]["score"]) for t in made if t[2])
    for name in ("lr", "net"):
        assert (name in found.varying) == (len({task[0][name] for task in made}) > 1)
    assert found.others == (("note",) if any(task[2] for task in made) else ())


def some(*settings: dict[str, Any], **results: Any) -> list[Task]:
    return [(setting, dict(results), True) for setting in settings]


def test_what_did_not_run_is_a_dash_and_the_table_says_so() -> None:
    made = some({"lr": 0.1, "seed": 0}, {"lr": 0.1, "seed": 1}, score=2)
    made += [({"lr": 0.2, "seed": 0}, {}, False), ({"lr": 0.2, "seed": 1}, {}, False)]
    first, second = shown_rows(grouped(made))
    assert {name: in_words(value) for name, value in first.items()} == {
        "lr": "0.1", "done": "2 of 2", "score": "2 ± 0",
    }  # fmt: skip
    assert {name: in_words(value) for name, value in second.items()} == {
        "lr": "0.2", "done": "0 of 2", "score": "–",
    }  # fmt: skip
    assert whole_rows(grouped(made))[1] == {
        "lr": 0.2, "num_runs": 2, "num_done": 0, "score_mean": None, "score_sd": None,
        "score_num": 0,
    }  # fmt: skip


def test_a_result_with_the_name_of_a_parameter_has_a_column_of_its_own() -> None:
    made = some({"x": 1}, x=5.0) + some({"x": 2}, x=6.0)
    assert list(shown_rows(grouped(made))[0]) == ["x", "x (result)"]


def test_a_parameter_that_some_tasks_lack_varies() -> None:
    found = grouped(some({"a": 1, "b": 2}, s=1) + some({"a": 1}, s=2))
    assert found.varying == ("b",)
    assert found.fixed == {"a": 1}
    assert [in_words(row["b"]) for row in shown_rows(found)] == ["2", "–"]


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (some({"a": 1}, {"a": 2}, note="x"), "no result is a number"),
        (some({"seed": 1}, {"seed": 2}, s=1), "all tasks have the same parameters"),
        (some({"a": 1, "b": 1, "c": 1}, {"a": 2, "b": 2, "c": 2}, s=1), None),
        (some(*({"a": n} for n in range(501)), s=1), None),
        (some({"a": 1}, {"a": 2}, s=1), None),
    ],
)
def test_why_there_is_no_picture(made: list[Task], reason: str | None) -> None:
    found = why_no_picture(grouped(made))
    assert found is None if reason is None else str(found).startswith(reason)


@pytest.mark.parametrize(
    "made",
    [
        some({"lr": "1e-4"}, {"lr": "1e-2"}, s=1),  # a command's texts, on a logarithmic axis
        some({"net": "a$b"}, {"net": "c_{"}, s=1, t=2, u=3),  # names that look like formulas
        some(*({"a": a, "b": b} for a in (1, 2, 3) for b in ("x", "y")), s=1.5),  # two lines
        some(*({"a": a, "b": b} for a in range(12) for b in range(10)), s=1.5),  # a map of colours
        some({"a": None}, {"a": [1, 2]}, {"a": {"k": 1}}, s=1),
        some({"a": 1}, {"b": 2}, s=1),  # neither has all
        some(*({"a": n, "b": n % 7, "c": "xyz"[n % 3]} for n in range(40)), s=1, t=2),
        some(*({"a": f"name {n}"} for n in range(600)), s=1),  # more names than fit on an axis
        some(*({f"p{k}": n * k for k in range(9)} for n in range(40)), s=1),
    ],
)
def test_pictures_of_all_kinds_of_parameters(made: list[Task], tmp_path: Path) -> None:
    found = grouped(made)
    assert why_no_picture(found) is None
    png, pdf = draw_groups(found, tmp_path / "results", "title")
    assert png.read_bytes().startswith(b"\x89PNG")
    assert pdf.read_bytes().startswith(b"%PDF")


@pytest.mark.parametrize("size", [1e6, 1e300, 1.7e308])
def test_numbers_too_far_apart_cost_a_picture_and_not_the_page(size: float, tmp_path: Path) -> None:
    made: list[Task] = [({"lr": n, "seed": 0}, {"loss": size * (-1) ** n}, True) for n in range(4)]
    paths, remarks = drawn(lambda: draw_groups(grouped(made), tmp_path / "results", "title"))
    assert bool(paths) == (size < 1e308) == (not remarks)
    assert sorted(tmp_path.iterdir()) == sorted(paths)  # nothing half drawn is left
    for remark in remarks:
        assert isinstance(remark, Text) and "cannot draw its numbers" in remark.text


@pytest.mark.thorough
def test_ten_thousand_settings_have_a_picture_and_the_best_are_shown(tmp_path: Path) -> None:
    made = [
        (
            {"lr": 10.0 ** (n % 100 / -20), "width": n // 100, "seed": 0},
            {"loss": abs(n - 7000)},
            True,
        )
        for n in range(10_000)
    ]
    found = grouped(made)
    assert why_no_picture(found) is None
    png, _ = draw_groups(found, tmp_path / "results", "title")
    assert png.stat().st_size < 1_000_000
    best, which = best_first(found)
    assert which == "those with the lowest loss"
    assert [in_words(row["loss"]) for row in shown_rows(best)[:4]] == ["0", "1", "1", "2"]
    table = table_of("Results", shown_rows(best), whole=Path("table.csv"), which=which)
    assert table is not None and len(table.rows) == 300
    assert table.note == (
        "300 of 10,000 rows: those with the lowest loss. All of them are in table.csv."
    )


@pytest.mark.parametrize(
    ("metric", "word"),
    [
        ("loss", "lowest"), ("val_loss", "lowest"), ("seconds", "lowest"), ("error", "lowest"),
        ("accuracy", "highest"), ("test_accuracy", "highest"), ("val.acc", "highest"),
        ("return", "highest"), ("f1", "highest"), ("samples_per_s", "highest"),
        ("underscored", "lowest"), ("y", "lowest"),
    ],
)  # fmt: skip
def test_which_settings_are_the_best_is_said(metric: str, word: str) -> None:
    made: list[Task] = [({"a": n}, {metric: n} if n else {}, True) for n in range(4)]
    best, which = best_first(grouped(made))
    assert which == f"those with the {word} {metric}"
    order = [group.params["a"] for group in best.groups]
    assert order == ([1, 2, 3, 0] if word == "lowest" else [3, 2, 1, 0])


def test_a_confusion_is_drawn_with_an_empty_class(tmp_path: Path) -> None:
    paths = draw_confusion([[3, 1], [0, 0]], ["cat", "d$g"], tmp_path / "confusion-test", "test")
    assert [path.name for path in paths] == ["confusion-test.png", "confusion-test.pdf"]


def test_what_a_training_measured(tmp_path: Path) -> None:
    steps = [
        {"kind": "train", "step": n, "samples": 8 * n, "loss": 1.0, "seconds": 0.5, "lr": 0.1}
        for n in range(1, 5)
    ]
    assert draw_measured(steps[:1], tmp_path / "measured", "loss") == []  # no speed of one step
    assert list(tmp_path.iterdir()) == []
    assert len(draw_measured(steps, tmp_path / "measured", "loss")) == 2


@examples(20)
@given(st.integers(1, 9), st.integers(0, 9))
def test_how_many_of_the_runs_a_mean_is_over(num: int, more: int) -> None:
    text = in_words(Spread(1.0, 0.5, num, num + more))
    assert ("(n =" in text) == (more > 0)
