"""A search joined to a ledger: after any turn another one goes on exactly as the first would."""

from __future__ import annotations

import dataclasses
import json
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.unit.farm.test_decide import TARGETS, cpus
from tests.unit.farm.test_ledger import record

from muster.api.start.placing import gpus_per_worker
from muster.api.sweeps.search_driver import SearchDriver, Setting
from muster.api.sweeps.search_state import _chosen, from_row, to_row
from muster.farm import canonical, metrics
from muster.farm.decide import Scheduler
from muster.farm.decisions import Policy, Stopped
from muster.farm.events import Event, Logged, Reopen, StopTask
from muster.farm.ledger.queries import SearchRow
from muster.farm.ledger.store import Ledger
from muster.farm.results import store_value, with_logged
from muster.farm.steering import Proposed, Steering
from muster.farm.task import NewTask, TaskState
from muster.farm.view import Picture
from muster.run.folder import RunFolder
from muster.search.records import Proposal
from muster.search.space import Space
from muster.search.spec import Budget, Constraint, SearchSpec, Stopping, objectives

SPEC = SearchSpec(
    space=Space.from_texts(["x=uniform(0,1)"]),
    objectives=objectives(maximize=["y"]),
    budget=Budget(trials=9),
    stopping=Stopping.from_text("asha:min=1,max=9,eta=2"),
)


def setting(params: Mapping[str, Any]) -> dict[str, Any] | None:
    return SPEC.space.check(params) if 0 <= params["x"] <= 1 else None


class StillClock:
    now_s = 0.0

    def monotonic_s(self) -> float:
        return self.now_s

    def wall_s(self) -> float:
        return self.now_s


class Bench:
    """A ledger and the driver of its search; ``reborn`` is a coordinator that died."""

    def __init__(self, path: Path, spec: SearchSpec = SPEC) -> None:
        self.spec = spec
        self.clock = StillClock()
        self.folder = RunFolder(path)
        self.ledger = Ledger(path / "ledger.sqlite")
        self.ledger.begin()
        self.target = self.ledger.target_id("f.py:f")
        self.ledger.commit()
        self.orders = self.reborn()

    def reborn(self, setting: Setting = setting, budget: Budget = SPEC.budget) -> list[Event]:
        self.driver = SearchDriver(
            dataclasses.replace(self.spec, budget=budget),
            self.target, "f.py:f", self.folder, self.clock,
            stored=dict, setting=setting, gpus_per_worker=1,
        )  # fmt: skip
        self.ledger.begin()
        orders = self.driver.begin(self.ledger)
        self.ledger.commit()
        return orders

    def record(self) -> None:
        self.ledger.begin()
        self.ledger.record_search(self.driver.take_records())
        self.ledger.commit()

    def ask(self) -> tuple[int, float]:
        """The next task: its number and its x."""
        [proposed] = self.driver.ask(1)
        self.add(proposed)
        task_id, _, _ = self.ledger.standing(proposed.task.key)
        return task_id, canonical.decode(proposed.task.payload)["x"]

    def add(self, proposed: Proposed) -> None:
        self.ledger.begin()
        self.ledger.add_tasks([proposed.task])
        self.ledger.commit()
        self.driver.added(proposed.what, self.ledger.standing(proposed.task.key)[0])
        self.record()

    def hear(self, task_id: int, step: int, value: float, token: int = 1) -> list[Event]:
        body = metrics.encode([("y", step, 0.0, value), ("other", step, 0.0, 7.0)])
        orders = self.driver.heard(Logged(1, task_id, token, step, body))
        self.record()
        return orders

    def stop_really(self) -> None:
        """Stop the first task that waits, in the ledger too."""
        self.ledger.begin()
        [task] = self.ledger.claim(1)
        self.ledger.record_stopped([Stopped(task, None)], [self.driver.last_of(task.task_id)])
        self.ledger.commit()
        self.end(task.task_id, TaskState.STOPPED)

    def end(self, task_id: int, state: TaskState, value: bytes = b"{}") -> list[Event]:
        orders = self.driver.ended(task_id, state, value)
        self.record()
        return orders


def play(bench: Bench, *, dies: bool) -> list[Any]:
    """A run with one worker: every task logs 1 to 9, and ends where it is told to."""
    story: list[Any] = []
    waiting: list[tuple[int, float]] = []
    at: dict[int, int] = {}
    while not bench.driver.is_over() or waiting:
        if dies:
            assert bench.reborn() == [], "nothing was left undone"
        if not waiting:
            found = bench.driver.ask(1)
            if not found:
                break
            bench.add(found[0])
            task_id, _, _ = bench.ledger.standing(found[0].task.key)
            waiting.append((task_id, canonical.decode(found[0].task.payload)["x"]))
            story.append(("asked", *waiting[-1]))
        task_id, x = waiting.pop()
        stopped, reopened = False, set()
        for step in range(at.get(task_id, 0) + 1, 10):
            at[task_id] = step
            orders = bench.hear(task_id, step, x * step)
            story.append((step, orders))
            reopened |= {order.task_id for order in orders if isinstance(order, Reopen)}
            if dies:
                told = [order for order in orders if isinstance(order, StopTask)]
                assert bench.reborn() == told, "it is told again what is still to be done"
                assert bench.hear(task_id, step, x * step) == [], "and hears nothing twice"
            if StopTask(task_id, True) in orders or StopTask(task_id, False) in orders:
                stopped = True
                break
        if stopped:
            assert canonical.decode(bench.driver.last_of(task_id))["y"] == x * at[task_id]
            orders = bench.end(task_id, TaskState.STOPPED)
        else:
            orders = bench.end(task_id, TaskState.DONE, b'{"y":%f}' % x)
        story.append(("ended", task_id, orders))
        reopened |= {order.task_id for order in orders if isinstance(order, Reopen)}
        waiting += [(one, x_of(bench, one)) for one in sorted(reopened)]
    return story


def x_of(bench: Bench, task_id: int) -> float:
    [payload] = [row[2] for row in bench.ledger.tasks_of(bench.target) if row[0] == task_id]
    return float(canonical.decode(payload)["x"])


def test_a_search_that_dies_at_every_turn_decides_the_same(tmp_path: Path) -> None:
    stories = []
    for dies in (False, True):
        folder = tmp_path / str(dies)
        folder.mkdir()
        bench = Bench(folder)
        stories.append(play(bench, dies=dies))
        bench.ledger.close()
    assert stories[0] == stories[1]
    asked = [row for row in stories[0] if row[0] == "asked"]
    assert len(asked) == 9
    orders = [order for row in stories[0] if row[0] != "asked" for order in row[-1]]
    assert {type(order) for order in orders} == {StopTask, Reopen}


def rest(bench: Bench, values: list[float]) -> list[Event]:
    """Trials that come to step 1 and rest there; the orders after the last of them."""
    for value in values:
        task_id, _ = bench.ask()
        assert bench.hear(task_id, 1, value) == [StopTask(task_id, True, saves=True)]
        bench.ledger.begin()
        [task] = bench.ledger.claim(1)
        bench.ledger.record_stopped([Stopped(task, None)], [bench.driver.last_of(task_id)])
        bench.ledger.commit()
        bench.folder.checkpoints.mkdir(exist_ok=True)
        yield_of = f"trial {task_id}".encode()
        bench.folder.checkpoint(task.key.hex()).write_bytes(with_logged(b"its points", yield_of))
        orders = bench.end(task_id, TaskState.STOPPED)
    return orders


POPULATION = dataclasses.replace(SPEC, stopping=Stopping.from_text("pbt:min=1,max=3"))


def test_an_heir_begins_with_what_its_parent_had_saved_when_it_rested(tmp_path: Path) -> None:
    bench = Bench(tmp_path, POPULATION)
    bench.reborn(budget=Budget(trials=3))
    assert rest(bench, [0.5, 0.9, 0.1]) == [Reopen(2), Reopen(1)]
    parent, heir = (bench.driver._search.trials[number] for number in (1, 3))
    assert (heir.parent, heir.start) == (1, 1)
    for is_reborn in (False, True):
        [proposed] = bench.driver.ask(9)
        path = bench.folder.checkpoint(proposed.task.key.hex())
        assert path.read_bytes() == b"trial 2", "without the points, which are its parent's"
        path = bench.folder.checkpoint(bench.ledger.key_of(2).hex())
        path.write_bytes(b"its parent has gone on")
        if not is_reborn:
            assert bench.reborn(budget=Budget(trials=3)) == [Reopen(1), Reopen(2)]
            assert (bench.driver.num_expected, bench.driver.num_at_once) == (3 + 2, 3)
    bench.add(proposed)
    task_id, _, _ = bench.ledger.standing(proposed.task.key)
    _, payload = bench.ledger.made_from(task_id)
    of_grid = canonical.payload_and_key("f.py:f")(canonical.decode(payload))
    assert payload == of_grid[0] and proposed.task.key != of_grid[1], "a grid would not find it"
    assert parent.state == "running"
    [row] = [row for row in bench.ledger.search_rows() if row.task_id == task_id]
    assert from_row(row) == proposed.what
    bench.ledger.close()


def test_a_member_that_was_lost_before_it_had_saved_rests_when_it_comes_there_again(
    tmp_path: Path,
) -> None:
    bench = Bench(tmp_path, POPULATION)
    bench.reborn(budget=Budget(trials=2))
    task_id, _ = bench.ask()
    to_rest = StopTask(task_id, True, saves=True)
    assert bench.hear(task_id, 1, 0.5) == [to_rest]
    assert bench.hear(task_id, 1, 0.5) == [], "the same attempt has heard it"
    for token in (2, 3):
        assert bench.hear(task_id, 0, 0.7, token) == [], "it is not there yet"
        assert bench.hear(task_id, 1, 0.5, token) == [to_rest]
        assert bench.reborn(budget=Budget(trials=2)) == [to_rest], "it may be with a worker"
        bench.ledger.begin()
        assert Steering(bench.driver, bench.ledger, bench.folder).stop_waiting([to_rest]) == []
        bench.ledger.commit()
    assert bench.ledger.standing(bench.ledger.key_of(task_id))[1] is TaskState.READY
    assert len([row for row in bench.ledger.search_rows() if row.kind == "decision"]) == 1
    bench.ledger.close()


def test_a_population_that_saves_nothing_ends(tmp_path: Path) -> None:
    bench = Bench(tmp_path, POPULATION)
    bench.reborn(budget=Budget(trials=2))
    rest(bench, [0.5])
    bench.folder.checkpoint(bench.ledger.key_of(1).hex()).unlink()
    rest(bench, [0.1])
    for _ in range(2):
        assert "Trial 0 has left no checkpoint" in str(bench.driver.problem)
        bench.reborn(budget=Budget(trials=2))
    bench.ledger.close()


def test_a_trial_in_whose_place_there_is_another_is_not_cancelled(tmp_path: Path) -> None:
    bench = Bench(tmp_path, POPULATION)
    bench.reborn(budget=Budget(trials=2))
    rest(bench, [0.5, 0.1])
    assert [bench.ledger.is_paused(task_id) for task_id in (1, 2)] == [True, False]
    assert bench.ledger.cancel_one(2) is TaskState.STOPPED
    bench.ledger.close()


def test_a_grid_is_the_start_of_a_search(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    make = canonical.payload_and_key("f.py:f")
    bench.ledger.begin()
    for x in (0.5, 0.25, 7.0):
        payload, key = make({"x": x})
        bench.ledger.add_tasks([NewTask(key, bench.target, payload)])
    tasks = bench.ledger.claim(3)
    done = [record(task) for task in tasks if task.task_id != 2]
    bench.ledger.record_done(done, [(b'{"y":%d}' % r.task_id, None) for r in done])
    bench.ledger.recover()
    bench.ledger.commit()
    bench.reborn()
    bench.record()
    [best] = bench.driver._search.best()
    assert (best.params, best.values) == ({"x": 0.5}, (1.0,)), "7 is outside of the space"
    kinds = [(row.kind, row.task_id) for row in bench.ledger.search_rows()]
    assert kinds == [("proposal", 1), ("proposal", 2), ("ended", 1)]
    bench.reborn()
    bench.record()
    assert len(bench.ledger.search_rows()) == 3, "they are taken over once"
    assert json.loads(bench.ledger.meta("search") or "")["space"] == {"x": "uniform(0.0,1.0)"}
    bench.ledger.close()


def test_a_grid_with_the_missing_seed_of_a_trial_belongs_to_this_trial(tmp_path: Path) -> None:
    bench = Bench(tmp_path, dataclasses.replace(SPEC, seeds=(0, 1), stopping=Stopping()))
    first, x = bench.ask()
    bench.ledger.begin()
    payload, key = canonical.payload_and_key("f.py:f")({"x": x, "seed": 1})
    bench.ledger.add_tasks([NewTask(key, bench.target, payload)])
    tasks = {task.task_id: task for task in bench.ledger.claim(2)}
    second = max(tasks)
    bench.ledger.record_done([record(tasks[second])], [(b'{"y":0.5}', None)])
    bench.ledger.commit()
    for _ in range(2):
        bench.reborn()
        bench.record()
        assert len(bench.driver._search.trials) == 1
    bench.end(first, TaskState.DONE, b'{"y":1.5}')
    [best] = bench.driver._search.best()
    assert (best.trial, best.values, best.seeds) == (0, (1.0,), 2)
    [proposed] = bench.driver.ask(1)
    assert (proposed.what.trial, proposed.what.seed) == (1, 0)
    rows = [row for row in bench.ledger.search_rows() if row.kind == "proposal"]
    assert [row.task_id for row in rows] == [first, second]
    bench.ledger.close()


def test_a_grid_beside_an_heir_that_was_not_asked_for_yet_is_another_trial(tmp_path: Path) -> None:
    bench = Bench(tmp_path, POPULATION)
    bench.reborn(budget=Budget(trials=2))
    rest(bench, [0.5, 0.1])
    bench.ledger.begin()
    payload, key = canonical.payload_and_key("f.py:f")({"x": 0.123})
    bench.ledger.add_tasks([NewTask(key, bench.target, payload)])
    bench.ledger.commit()
    bench.reborn(budget=Budget(trials=2))
    assert [trial.by for trial in bench.driver._search.trials] == [
        "random", "random", "pbt", "given"
    ]  # fmt: skip
    [proposed] = bench.driver.ask(9)
    assert (proposed.what.trial, proposed.what.by) == (2, "pbt")
    bench.ledger.close()


def test_a_task_that_finished_although_it_was_to_pause_is_not_opened(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    first, second = bench.ask()[0], bench.ask()[0]
    assert bench.hear(first, 1, 0.9) == [StopTask(first, True)]
    bench.end(first, TaskState.DONE, b'{"y":0.95}')
    assert bench.hear(second, 1, 0.5) == [StopTask(second, True)]
    assert bench.reborn() == [StopTask(second, True)]
    [best] = bench.driver._search.best()
    assert (best.state, best.values) == ("done", (0.95,))
    bench.ledger.close()


def test_a_promotion_that_was_recorded_and_not_carried_out_is_carried_out(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    first, second = bench.ask()[0], bench.ask()[0]
    assert bench.hear(first, 1, 0.9) == [StopTask(first, True)]
    bench.stop_really()
    assert bench.hear(second, 1, 0.5) == [StopTask(second, True), Reopen(first)]
    assert bench.reborn() == [StopTask(second, True), Reopen(first)]
    assert bench.reborn() == [StopTask(second, True), Reopen(first)], "until it is done"
    bench.ledger.begin()
    bench.ledger.reopen_stopped([first])
    bench.ledger.commit()
    assert bench.reborn() == [StopTask(second, True)]
    assert bench.driver._search.trials[0].state == "running"
    bench.ledger.close()


def test_the_time_of_the_last_tasks_stays_spent(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    task_id, _ = bench.ask()
    bench.clock.now_s = 50.0
    bench.end(task_id, TaskState.DONE, b'{"y":1}')
    bench.reborn()
    assert bench.driver._seconds() == 50.0
    bench.ledger.close()


def test_a_retried_trial_that_a_pilot_brought_in_counts(tmp_path: Path) -> None:
    """It failed, `muster retry` has opened it, and it was done while there was no coordinator."""
    bench = Bench(tmp_path)
    task_id, _ = bench.ask()
    bench.end(task_id, TaskState.FAILED)
    assert bench.reborn() == []
    bench.ledger.begin()
    [task] = bench.ledger.claim(1)
    bench.ledger.record_done([record(task)], [(b'{"y":0.5}', None)])
    bench.ledger.commit()
    for _ in range(2):
        assert bench.reborn() == []
        bench.record()
        [best] = bench.driver._search.best()
        assert (best.state, best.values) == ("done", (0.5,))
    ends = [row for row in bench.ledger.search_rows() if row.kind == "ended"]
    assert len(ends) == 2, "once failed, once done"
    bench.ledger.close()


@pytest.mark.parametrize(
    ("value", "is_in_vain"),
    [(b'{"y":1}', False), (b'{"y":{"$float":"nan"}}', False), (b'{"other":1}', True)],
)
def test_a_trial_that_finishes_without_the_goal_ends_a_search_that_has_no_value(
    value: bytes, is_in_vain: bool, tmp_path: Path
) -> None:
    bench = Bench(tmp_path)
    first, second = bench.ask()[0], bench.ask()[0]
    bench.driver.heard(Logged(1, first, 1, 1, metrics.encode([("z", 1, 0.0, 7.0)])))
    assert bench.driver.problem is None, "it may log its goal later"
    bench.end(first, TaskState.DONE, value)
    if is_in_vain:
        assert "finished now logged or returned other, z" in str(bench.driver.problem)
        bench.reborn()
        assert bench.driver.problem is None, "the same command tries one more"
    bench.hear(second, 9, 0.5)
    bench.end(bench.ask()[0], TaskState.DONE, b"{}")
    assert bench.driver.problem is None, "one trial has it, so it has the right name"
    bench.ledger.close()


def test_a_later_trial_that_shows_the_goal_lets_the_search_go_on(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    first, second = bench.ask()[0], bench.ask()[0]
    bench.end(first, TaskState.DONE)
    assert bench.driver.problem is not None
    bench.hear(second, 9, 0.5)
    assert bench.driver.problem is None
    bench.ledger.close()


def test_a_constraint_that_was_heard_is_not_recorded_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    spec = dataclasses.replace(SPEC, constraints=(Constraint("m", "<=", 9),))

    def heard() -> list[SearchRow]:
        driver = SearchDriver(
            spec, bench.target, "f.py:f", bench.folder, bench.clock,
            stored=dict, setting=setting, gpus_per_worker=1,
        )  # fmt: skip
        bench.ledger.begin()
        driver.begin(bench.ledger)
        for step in (1, 2):
            driver.heard(Logged(1, task_id, 1, step, metrics.encode([("m", step, 0.0, 7.0)])))
        rows = list(driver.take_records())
        bench.ledger.record_search(rows)
        bench.ledger.commit()
        return rows

    task_id, _ = bench.ask()
    assert [row.kind for row in heard()] == ["heard", "heard"]
    assert heard() == []
    bench.ledger.close()


def test_a_trial_whose_program_was_started_again_shows_its_steps_once(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    task_id, _ = bench.ask()
    for start in (0, 1):
        body = metrics.encode([("y", 1 + start, 0.0, 0.5), ("y", 1, 0.0, 0.25)], start)
        bench.driver.heard(Logged(1, task_id, 1, start, body))
    heard = [from_row(row) for row in bench.driver.take_records() if row.kind == "heard"]
    assert [point.step for record in heard for point in record.points] == [1, 2]
    assert json.loads(bench.driver.last_of(task_id)) == {"y": 0.25}
    bench.ledger.close()


def test_money_ends_a_search_and_more_of_it_goes_on(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.reborn(budget=Budget(cost=10, price_per_gpu_hour=4))
    bench.ask()
    bench.ledger.begin()
    [task] = bench.ledger.claim(1)
    bench.ledger.record_done([record(task, seconds=2.5 * 3600)], [(b'{"y":1}', None)])
    bench.ledger.commit()
    bench.end(task.task_id, TaskState.DONE, b'{"y":1}')
    assert bench.driver.ask(1) == []
    assert bench.driver.is_over()
    bench.reborn(budget=Budget(cost=10.5, price_per_gpu_hour=4))
    assert len(bench.driver.ask(1)) == 1
    bench.ledger.close()


def test_a_grid_in_the_folder_uses_up_no_budget(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    make = canonical.payload_and_key("f.py:f")
    bench.ledger.begin()
    for x in (0.5, 7.0):  # a trial that is given, and a task outside of the space
        payload, key = make({"x": x})
        bench.ledger.add_tasks([NewTask(key, bench.target, payload)])
    done = [record(task, seconds=9 * 3600) for task in bench.ledger.claim(2)]
    bench.ledger.record_done(done, [(b'{"y":1}', None)] * 2)
    bench.ledger.commit()
    bench.reborn(budget=Budget(gpu_hours=3))
    bench.record()
    task_id, _ = bench.ask()
    bench.ledger.begin()
    [task] = bench.ledger.claim(1)
    bench.ledger.record_done([record(task, seconds=2 * 3600)], [(b'{"y":1}', None)])
    bench.ledger.commit()
    bench.end(task_id, TaskState.DONE, b'{"y":1}')
    for _ in range(2):
        assert (bench.driver._spent().gpu_hours, bench.driver.is_over()) == (2.0, False)
        bench.reborn(budget=Budget(gpu_hours=3))
    own = [row.task_id for row in bench.ledger.search_rows() if row.kind == "proposal"]
    assert len(own) == 2 and list(_chosen(bench.ledger.search_rows())) == [task_id]
    bench.ledger.close()


def test_a_trial_that_goes_on_is_paid_for_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.reborn(budget=Budget(gpu_hours=9))
    first, second = bench.ask()[0], bench.ask()[0]
    bench.hear(first, 1, 0.9)
    tasks = {task.task_id: task for task in _claimed(bench, 2)}
    _stopped(bench, tasks[first])
    assert bench.driver._spent().gpu_hours == 1.0
    assert Reopen(first) in bench.hear(second, 1, 0.5)
    bench.ledger.begin()
    bench.ledger.reopen_stopped([first])
    [task] = bench.ledger.claim(1)
    bench.ledger.record_done([record(task, seconds=3600)], [(b'{"y":1}', None)])
    bench.ledger.commit()
    bench.end(first, TaskState.DONE, b'{"y":1}')
    assert bench.driver._spent().gpu_hours == 2.0
    bench.ledger.close()


def _claimed(bench: Bench, count: int) -> list[Any]:
    bench.ledger.begin()
    tasks = bench.ledger.claim(count)
    bench.ledger.commit()
    return tasks


def _stopped(bench: Bench, task: Any) -> None:
    """A worker has stopped it after an hour."""
    bench.ledger.begin()
    stopped = Stopped(task, record(task, seconds=3600))
    bench.ledger.record_stopped([stopped], [bench.driver.last_of(task.task_id)])
    bench.ledger.commit()
    bench.end(task.task_id, TaskState.STOPPED)


@pytest.mark.parametrize(
    ("options", "gpus"),
    [
        ({"per_gpu": 4, "gpus_per_task": 1, "devices": "auto"}, 0.25),
        ({"per_gpu": 1, "gpus_per_task": 2, "devices": "cuda:4"}, 2),
        ({"per_gpu": "auto"}, 1),
        ({"cluster": {"gpus_per_worker": 2}, "executor": "slurm"}, 2),
        ({}, 1),
    ],
)
def test_gpu_hours_are_those_of_gpus(options: dict[str, Any], gpus: float) -> None:
    assert gpus_per_worker(options, has_gpus="cluster" not in options) == gpus


@pytest.mark.parametrize("devices", ["cpu:4", "auto"])
def test_a_worker_on_a_cpu_counts_as_one_gpu_whatever_would_share_one(devices: str) -> None:
    assert gpus_per_worker({"per_gpu": 3, "devices": devices}, has_gpus=False) == 1


def test_a_large_result_that_a_pilot_brought_in_is_read_from_its_file(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.ask()
    bench.ledger.begin()
    [task] = bench.ledger.claim(1)
    bench.ledger.record_done([record(task)], [(None, "0" * 64)])
    bench.ledger.commit()
    path = bench.folder.value(task.key.hex())
    path.parent.mkdir(parents=True)
    path.write_bytes(b'{"y":0.25}')
    bench.reborn()
    assert bench.driver._search.best()[0].values == (0.25,)
    bench.ledger.close()


def test_the_large_result_of_a_task_that_was_done_before_it_was_asked_for_counts(
    tmp_path: Path,
) -> None:
    bench = Bench(tmp_path)
    _, x = bench.ask()
    bench.ledger.begin()
    [task] = bench.ledger.claim(1)
    stored = store_value(bench.folder, task.key.hex(), b'{"y":0.25,"text":"%s"}' % (b"a" * 9999))
    assert stored[0] is None
    bench.ledger.record_done([record(task)], [stored])
    bench.ledger.commit()
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as database:
        database.execute("DELETE FROM search")  # another search has chosen it
        database.commit()
    bench.reborn(lambda params: None)
    steering = Steering(bench.driver, bench.ledger, bench.folder)
    bench.ledger.begin()
    steering.choose(Scheduler(Policy(asks_ahead=False), cpus(1), TARGETS), Picture("it", 9, 0.0))
    bench.ledger.commit()
    [best] = bench.driver._search.best()
    assert (best.params, best.values) == ({"x": x}, (0.25,))
    bench.ledger.close()


def test_a_proposal_comes_back_from_its_row_with_and_without_a_limit() -> None:
    proposal = Proposal(3, None, {"x": 0.5}, "tpe", limit=9)
    row = to_row(proposal, 1, spent_s=2.0)
    assert from_row(row) == proposal
    body = canonical.decode(row.body)
    del body["limit"]
    assert from_row(SearchRow("proposal", 1, canonical.encode(body))) == Proposal(
        3, None, {"x": 0.5}, "tpe"
    )
