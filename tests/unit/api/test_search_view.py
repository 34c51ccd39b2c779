"""What pictures of a search show, as values: on searches that were simulated, not run."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.simulated_search import simulate

from muster.api.report.search import _commands
from muster.api.sweeps.search_state import SearchState, numbers_of, state_of, to_row
from muster.api.sweeps.search_view import (
    _comparable,
    budget,
    history,
    importance,
    parallel,
    pareto,
    rungs,
    view,
)
from muster.base.errors import MissingPackageError
from muster.cli.search_wording import state_lines
from muster.farm import canonical
from muster.farm.ledger.queries import SearchRow
from muster.search.records import Ended, Ending, Heard, Point, Proposal, Record
from muster.search.space import Space
from muster.search.spec import Budget, Constraint, SearchSpec, Stopping, objectives

SPACE = Space.from_texts(
    ["lr=log(1e-4,1)", "opt=choice(adam,sgd)", "momentum=uniform(0,0.99) if opt=sgd"]
)


def curve(params: Mapping[str, Any], seed: int | None) -> list[float]:
    far = abs(math.log10(params["lr"]) + 2)
    return [1 - far / 4 - 1 / (step + 1) for step in range(1, 10)]


def rows_of(records: list[Record]) -> tuple[list[SearchRow], dict[int, bytes]]:
    """As a ledger would hold them: task n has the key n, and a decision the second it was made."""
    numbers: dict[tuple[int, int | None], int] = {}
    rows = []
    for at, record in enumerate(records):
        if isinstance(record, Proposal):
            numbers[record.trial, record.seed] = len(numbers) + 1
            rows.append(to_row(record, len(numbers), spent_s=float(at)))
        elif isinstance(record, Heard | Ended):
            rows.append(to_row(record, numbers[record.trial, record.seed]))
        else:
            rows.append(to_row(record, None, time_s=1000.0 + at))
    return rows, {number: number.to_bytes(32) for number in numbers.values()}


def state_after(spec: SearchSpec, records: list[Record], hours: float = 0.5) -> SearchState:
    rows, keys = rows_of(records)
    return state_of(spec, rows, keys, hours)


def asha(trials: int = 27) -> SearchState:
    spec = SearchSpec(
        space=SPACE,
        objectives=objectives(maximize=["accuracy"]),
        budget=Budget(trials=trials, gpu_hours=2.0),
        stopping=Stopping.from_text("asha:min=1,max=9"),
    )
    return state_after(spec, simulate(spec, curve, workers=3).records)


def test_a_search_of_which_nothing_was_whole_says_what_it_takes() -> None:
    note = (
        "note: no trial came to the last step, 9: with 2 rungs before it and one in 3 promoted "
        "from each, it takes 9 trials, or a later first rung: --stop asha:min=3,max=9,eta=3"
    )
    assert state_lines(asha(6))[-1] == note
    assert not any("note: " in line for line in state_lines(asha(27)))


def test_a_rule_that_nobody_logged_for_says_so() -> None:
    spec = SearchSpec(
        space=SPACE,
        objectives=objectives(maximize=["accuracy"]),
        budget=Budget(trials=4),
        stopping=Stopping.from_text("asha:min=1,max=9"),
    )
    first = simulate(spec, curve, workers=1).records[0]
    assert isinstance(first, Proposal)
    ended = Ended(first.trial, first.seed, Ending("done", {"accuracy": 0.5}))
    assert state_lines(state_after(spec, [first, ended]))[-1].startswith(
        "note: no trial has logged accuracy, so --stop asha had nothing to compare"
    )


def test_the_view_is_json_with_the_parts_of_the_dashboard() -> None:
    found = json.loads(json.dumps(view(asha()), allow_nan=False))
    assert list(found) == ["goals", "history", "parallel", "pareto", "rungs", "budget"]
    assert found["goals"] == [{"name": "accuracy", "direction": "maximize"}]
    assert found["pareto"] == []


def test_the_last_best_of_the_history_is_the_best_trial() -> None:
    state = asha()
    rows = history(state)
    [best] = state.search.best()
    assert len(rows) == 27 and [row["n"] for row in rows] == list(range(1, 28))
    assert rows[-1]["best"] == best.values[0]
    known = [row["best"] for row in rows if row["best"] is not None]
    assert known == sorted(known), "the best only improves"
    assert {row["state"] for row in rows} == {"done", "paused"}
    [own] = [row for row in rows if row["trial"] == best.trial]
    assert own["task"] == state.tasks[best.trial][0] and len(own["task"]) == 12


def test_a_search_without_a_finished_trial_has_a_best_all_the_same() -> None:
    spec = SearchSpec(
        space=SPACE, objectives=objectives(minimize=["loss"]),
        stopping=Stopping.from_text("asha-stop:max=9"), budget=Budget(trials=2),
    )  # fmt: skip
    params = {"lr": 0.1, "opt": "adam"}
    records: list[Record] = [
        Proposal(0, None, params),
        Heard(0, None, (Point("loss", 1, 0.5),)),
        Ended(0, None, Ending("stopped")),
        Proposal(1, None, params | {"lr": 0.2}),
    ]
    [row] = history(state_after(spec, records))
    assert (row["value"], row["best"], row["state"]) == (0.5, 0.5, "running")


def test_what_failed_or_breaks_a_constraint_is_never_the_best() -> None:
    spec = SearchSpec(
        space=Space.from_texts(["x=int(0,9)"]), objectives=objectives(minimize=["loss"]),
        constraints=(Constraint("ms", "<=", 5),), budget=Budget(trials=9),
    )  # fmt: skip
    records: list[Record] = []
    for n, (loss, ms) in enumerate([(0.1, 9), (0.5, 1), (math.nan, 1), (0.7, 1)]):
        records += [Proposal(n, None, {"x": n}),
                    Ended(n, None, Ending("done", {"loss": loss, "ms": ms}))]  # fmt: skip
    records += [Proposal(4, None, {"x": 4}), Ended(4, None, Ending("failed"))]
    rows = history(state_after(spec, records))
    assert [(row["value"], row["best"]) for row in rows] == [(0.1, None), (0.5, 0.5), (0.7, 0.5)]


def test_rungs_balance_and_say_who_when_and_why() -> None:
    state = asha()
    found = rungs(state)
    assert [rung["step"] for rung in found] == [1, 3]
    assert found[0]["reached"] == 27
    for rung, above in itertools.pairwise(found):
        assert rung["reached"] == rung["stopped"] + rung["promoted"]
        assert above["reached"] == rung["promoted"]
    done = [trial for trial in state.search.trials if trial.state == "done"]
    assert found[-1]["promoted"] == len(done), "the last step ends a trial and is no rung"
    assert {rung["step"]: rung["stopped"] for rung in found if rung["stopped"]} == state.num_by_rung
    for rung in found:
        for row in rung["rows"]:
            assert row["decision"] in ("pause", "promote") and row["when"] > 1000
            assert row["value"] == row["evidence"]["value"]
            assert row["task"] in state.tasks[row["trial"]]


def test_a_decision_of_an_older_ledger_has_no_time() -> None:
    state = asha()
    rows, keys = rows_of(simulate(state.spec, curve).records)
    old = [row if row.kind != "decision" else row._replace(body=_without_time(row)) for row in rows]
    found = rungs(state_of(state.spec, old, keys, 0.0))
    assert {row["when"] for rung in found for row in rung["rows"]} == {None}


def _without_time(row: SearchRow) -> bytes:
    body = json.loads(row.body)
    del body["time_s"]
    return json.dumps(body).encode()


def test_parallel_rows_fit_their_axes_and_a_missing_parameter_is_none() -> None:
    found = parallel(asha())
    lr, opt, momentum = found["dims"]
    assert lr == {"name": "lr", "kind": "float", "range": [1e-4, 1.0], "log": True}
    assert opt == {"name": "opt", "kind": "choice", "values": ["adam", "sgd"], "log": False}
    assert momentum["kind"] == "float" and not momentum["log"]
    assert len(found["rows"]) == 27
    for row in found["rows"]:
        assert lr["range"][0] <= row["cells"][0] <= lr["range"][1]
        assert (row["cells"][2] is None) == (row["cells"][1] == "adam")


def test_a_secret_parameter_is_no_axis() -> None:
    spec = SearchSpec(
        space=Space.from_texts(["x=int(0,9)", "api_key=choice(abcdefgh,ijklmnop)"]),
        objectives=objectives(minimize=["loss"]),
    )
    records: list[Record] = [Proposal(0, None, {"x": 1, "api_key": "abcdefgh"})]
    assert "abcdefgh" not in json.dumps(view(state_after(spec, records)))


def test_the_front_of_two_goals_holds_what_nothing_beats() -> None:
    spec = SearchSpec(
        space=Space.from_texts(["x=int(0,9)"]),
        objectives=objectives(minimize=["loss"], maximize=["speed"]), budget=Budget(trials=9),
    )  # fmt: skip
    records: list[Record] = []
    for n, (loss, speed) in enumerate([(1, 1), (2, 5), (3, 4)]):
        records += [Proposal(n, None, {"x": n}),
                    Ended(n, None, Ending("done", {"loss": loss, "speed": speed}))]  # fmt: skip
    state = state_after(spec, records)
    assert pareto(state) == [state.tasks[0][0], state.tasks[1][0]]
    assert [row["values"] for row in history(state)] == [[1, 1], [2, 5], [3, 4]]
    assert [row["bests"] for row in history(state)] == [[1, 1], [1, 5], [1, 5]]


def test_the_budget_says_what_is_spent_and_left() -> None:
    found = budget(asha(27))
    assert found["trials"] == {"limit": 27, "spent": 27, "left": 0}
    assert found["gpu_hours"] == {"limit": 2.0, "spent": 0.5, "left": 1.5}
    assert found["seconds"]["limit"] is None and found["seconds"]["left"] is None
    assert found["seconds"]["spent"] > 0


def test_trials_of_different_brackets_are_compared_at_one_step() -> None:
    spec = SearchSpec(
        space=SPACE, objectives=objectives(maximize=["accuracy"]), budget=Budget(trials=22),
        stopping=Stopping.from_text("hyperband:min=1,max=9"),
    )  # fmt: skip
    state = state_after(spec, simulate(spec, curve, workers=3).records)
    step, compared = _comparable(state)
    reports = {trial.number: {r.step: r.value for r in trial.reports} for trial, _ in compared}
    assert step is not None and len(reports) > 5
    assert all(reports[trial.number][step] == value for trial, value in compared)


def test_the_command_in_a_report_hides_a_secret_choice() -> None:
    spec = SearchSpec(
        space=Space.from_texts(["x=int(0,9)", "api_key=choice(abcdefgh,ijklmnop)"]),
        objectives=objectives(minimize=["loss"]),
    )
    records: list[Record] = [
        Proposal(0, None, {"x": 1, "api_key": "abcdefgh"}),
        Ended(0, None, Ending("done", {"loss": 1.0})),
    ]
    target = {"kind": "function", "name": "f.py:f"}
    [listing] = _commands(target, state_after(spec, records))
    assert listing.text == "muster sweep f.py:f --grid x=1 --grid api_key=…"


def test_no_optuna_is_no_importance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert importance(asha()) is None


@pytest.mark.thorough
def test_many_rungs_and_hostile_names_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from muster.api.report import search_figures as draw

    spec = SearchSpec(
        space=Space.from_values({"a": Space.choice("$x^", "<b>", "x" * 300), "n": Space.int(1, 9)}),
        objectives=objectives(minimize=["$loss$ {"]), budget=Budget(trials=20),
        stopping=Stopping.from_text("median:min=1,every=1,startup=2"),
    )  # fmt: skip

    def flat(params: Mapping[str, Any], seed: int | None) -> list[float]:
        return [params["n"] + 1 / (step + 1) for step in range(60)]

    found = view(state_after(spec, simulate(spec, flat, workers=4).records))
    values = {row["trial"]: row["values"] for row in found["history"]}
    rows = [row | {"values": values[row["trial"]]} for row in found["parallel"]["rows"]]
    dims, goals = found["parallel"]["dims"], found["goals"]
    assert len(found["rungs"]) > 20
    made = [
        *draw.draw_rungs(found["rungs"], tmp_path / "rungs"),
        *draw.draw_history(found["history"], goals, 0, tmp_path / "history"),
        *draw.draw_parallel(dims, rows, goals, tmp_path / "parallel", [0]),
        *draw.draw_slice(dims, 0, rows, goals, 0, tmp_path / "slice"),
    ]
    assert all(path.stat().st_size > 5000 for path in made)


@pytest.mark.thorough
def test_the_importance_of_a_search_that_ends_trials_early_is_that_at_the_first_rung() -> None:
    pytest.importorskip("sklearn")
    found = importance(asha(200))
    assert found is not None
    assert (found["step"], found["trials"]) == (1, 200)
    assert [row["name"] for row in found["values"]] == ["lr", "opt"]
    assert found["values"][0]["value"] > 0.8


@pytest.mark.parametrize("direction", ["minimize", "maximize"])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 1.7e308, -1.7e308])
def test_a_setting_that_diverges_leaves_the_views_whole(value: float, direction: str) -> None:
    def diverging(params: Mapping[str, Any], seed: int | None) -> list[float]:
        if params["lr"] < 0.1:
            return curve(params, seed)
        return [value if seed or step > 4 else -value for step in range(1, 10)]

    spec = SearchSpec(
        space=SPACE, objectives=objectives(**{direction: ["accuracy"]}), seeds=(0, 1),
        budget=Budget(trials=20), stopping=Stopping.from_text("asha:min=1,max=9"),
    )  # fmt: skip
    state = state_after(spec, simulate(spec, diverging, workers=3).records)
    json.dumps(view(state), allow_nan=False)
    with contextlib.suppress(MissingPackageError):
        json.dumps(importance(state), allow_nan=False)
    assert not any(math.isnan(number) for one in state.search.best(99) for number in one.values)


def test_a_whole_number_beyond_all_floats_is_no_result_to_compare() -> None:
    assert numbers_of(canonical.encode({"loss": 10**400, "ok": 2**70, "is": True})) == {
        "ok": float(2**70), "is": 1.0,
    }  # fmt: skip
