"""Notes that ask a run at work for further tasks: another process has written them, perhaps another
version, perhaps an enemy."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.hostile_texts import HOSTILE

from muster.farm import canonical
from muster.farm.decide import Scheduler
from muster.farm.decisions import Decisions, Policy
from muster.farm.ledger.store import Ledger
from muster.farm.plan import Plan
from muster.farm.steering import Asked
from muster.farm.task import SlotSpec, TargetSpec, TaskState
from muster.farm.view import Picture
from muster.run.folder import RunFolder
from muster.run.requests import Ask

SPEC = TargetSpec(name="t.py:f", location="t.py", attribute="f")


class Run:
    def __init__(self, path: Path) -> None:
        self.folder = RunFolder(path)
        self.folder.create()
        self.ledger = Ledger(self.folder.ledger)
        self.ledger.begin()
        self.number = self.ledger.target_id(SPEC.name)
        self.ledger.commit()
        slots = (SlotSpec(slot_id=0, label="cpu0", devices=()),)
        targets = {self.number: SPEC}
        plan = Plan(
            folder=self.folder, targets=targets, slots=slots, policy=Policy(), total=0,
            feed=iter(()), plan_id="p",
        )  # fmt: skip
        self.scheduler = Scheduler(Policy(), slots, targets)
        self.scheduler.backlog.exhausted = True
        self.asked = Asked(self.ledger, plan)

    def ask(self, *notes: object) -> list[Mapping[str, Any]]:
        """What is answered to each, all in one turn."""
        answers: list[Mapping[str, Any]] = []
        self.asked.hear([Ask({"add": note}, answers.append) for note in notes])
        self.ledger.begin()
        self.asked.record(self.scheduler, Decisions(), Picture("r", 0, 0.0))
        assert not answers, "only what is on disk is answered"
        self.ledger.commit()
        self.asked.answer()
        return answers

    def num_tasks(self) -> int:
        return self.ledger.counts()[TaskState.READY]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path / "r")
    yield made
    made.ledger.close()


def note(*tasks: object, **changes: object) -> dict[str, Any]:
    return {"plan": "p", "tasks": list(tasks), "said": ["--seeds", "3"], **changes}


GOOD = [SPEC.name, '{"x":1}', 0, 0]
DEEP = "[" * 100_000
WRONG: dict[str, object] = {
    "nothing": None,
    "a text": "add",
    "a list": [GOOD],
    "another plan": note(GOOD, plan="q"),
    "no plan": {"tasks": [GOOD], "said": []},
    "no tasks": {"plan": "p", "said": []},
    "tasks that are none": note(GOOD, tasks=7),
    "words that are none": note(GOOD, said=None),
    "another target": note(GOOD, ["os:system", '{"x":1}', 0, 0]),
    "a target that is none": note(GOOD, [7, '{"x":1}', 0, 0]),
    "too short": note(GOOD, [SPEC.name, '{"x":1}', 0]),
    "too long": note(GOOD, [*GOOD, 0]),
    "no JSON": note(GOOD, [SPEC.name, "{", 0, 0]),
    "no parameters": note(GOOD, [SPEC.name, "7", 0, 0]),
    "an unknown tag": note(GOOD, [SPEC.name, '{"x":{"$new":1}}', 0, 0]),
    "a tag that is none": note(GOOD, [SPEC.name, '{"x":{"$int":[]}}', 0, 0]),
    "half a character": note(GOOD, [SPEC.name, '{"x":"\udcff"}', 0, 0]),
    "too deep": note(GOOD, [SPEC.name, DEEP, 0, 0]),
    "deep parameters": note(GOOD, [SPEC.name, '{"$x":' + "[" * 999 + "]" * 999 + "}", 0, 0]),
    "deep tags": note(
        GOOD, [SPEC.name, '{"x":' + "[" * 999 + '{"$int":"1"}' + "]" * 999 + "}", 0, 0]
    ),
    "a number that no ledger holds": note(GOOD, [SPEC.name, '{"x":1}', 0, 1 << 63]),
    "a number that is none": note(GOOD, [SPEC.name, '{"x":1}', 0, "high"]),
    "a switch": note(GOOD, [SPEC.name, '{"x":1}', True, 0]),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_note_adds_nothing_and_is_answered(what: str, run: Run) -> None:
    [answer] = run.ask(WRONG[what])
    assert list(answer) == ["refused"], answer
    assert run.num_tasks() == 0 and run.ledger.added() == []
    assert run.scheduler.backlog.exhausted
    assert run.ask(note(GOOD)) == [{"added": 1}], "it goes on hearing"
    assert not run.scheduler.backlog.exhausted


def test_hostile_texts_are_parameters_like_any(run: Run) -> None:
    payloads = [canonical.encode({"x": text}) for text in HOSTILE.values() if len(text) < 10_000]
    tasks = [[SPEC.name, payload.decode(), 0, 0] for payload in payloads]
    asked = json.loads(json.dumps(note(*tasks, said=list(HOSTILE.values()))))
    assert run.ask(asked) == [{"added": len(payloads)}]
    known = {canonical.encode(canonical.decode(row[2])) for row in run.ledger.tasks_of(run.number)}
    assert known == set(payloads)
    assert [part.said for part in run.ledger.added()] == [tuple(HOSTILE.values())]


def test_two_in_one_turn_and_one_again(run: Run) -> None:
    other = [SPEC.name, '{"x":2}', 0, 5]
    assert run.ask(note(GOOD), note(other, GOOD)) == [{"added": 1}, {"added": 1}]
    assert run.ask(note(GOOD, other), note()) == [{"added": 0}, {"added": 0}]
    assert [(part.first, part.last) for part in run.ledger.added()] == [(1, 1), (2, 2)]
    run.ledger.begin()
    assert [task.task_id for task in run.ledger.claim(9)] == [2, 1], "the most urgent first"
    run.ledger.commit()


def test_what_is_rolled_back_is_not_there(run: Run) -> None:
    """As where the coordinator dies before its commit."""
    answers: list[object] = []
    run.asked.hear([Ask({"add": note(GOOD)}, answers.append)])
    run.ledger.begin()
    run.asked.record(run.scheduler, Decisions(), Picture("r", 0, 0.0))
    run.ledger.roll_back()
    assert run.num_tasks() == 0 and run.ledger.added() == [] and answers == []


@pytest.mark.parametrize(("priority", "gives_back"), [(-1, True), (-5, False), (-9, False)])
def test_what_was_claimed_gives_way_to_what_is_more_urgent(
    priority: int, gives_back: bool, run: Run
) -> None:
    run.ask(note([SPEC.name, '{"x":1}', 0, -5]))
    run.ledger.begin()
    run.scheduler.backlog.queue.extend(run.ledger.claim(9))
    run.ledger.commit()
    run.ask(note([SPEC.name, '{"x":2}', 0, priority]))
    assert len(run.scheduler.backlog.queue) == (not gives_back)
    assert run.num_tasks() == 1 + gives_back
