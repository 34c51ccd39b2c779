"""Processes of workers that are begun before their run is opened."""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from tests.processes import is_gone
from tests.ray_cluster import wait_for

from muster.farm.events import Event, Results, WorkerReady
from muster.farm.executors.base import Assignment
from muster.farm.executors.head_start import HeadStart
from muster.farm.executors.local import LocalExecutor
from muster.farm.task import SlotSpec, TargetSpec, Task
from muster.run.folder import RunFolder

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(sys.platform == "win32", reason="there, none is begun ahead"),
]

SOURCE = """
import json, os, sys

def tell():
    print("printed", flush=True)
    return {"pid": os.getpid(), "is_ahead": "fractions" in sys.modules}
"""
CPU = SlotSpec(slot_id=0, label="cpu0", devices=())
TASK = Task(task_id=1, key=b"k" * 16, target_id=1, payload=b"{}", group=0, token=1)


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


def until(executor: LocalExecutor, is_it: Callable[[Event], bool]) -> Event:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for event in executor.poll(0.1):
            if is_it(event):
                return event
    raise AssertionError("nothing came")


@pytest.fixture
def assignment(tmp_path: Path) -> Assignment:
    (tmp_path / "told.py").write_text(SOURCE)
    spec = TargetSpec(name="f", location="told.py", attribute="tell", base_folder=str(tmp_path))
    folder = RunFolder(tmp_path / "run")
    folder.create()
    return Assignment(folder=folder, run_id="ahead" + secrets.token_hex(12), targets={1: spec})


def told(executor: LocalExecutor, slot: SlotSpec = CPU) -> tuple[int, bytes]:
    """The process id of the worker that an executor has in a slot, and what its task gave."""
    executor.start(1, slot)
    ready = until(executor, lambda event: isinstance(event, WorkerReady))
    assert isinstance(ready, WorkerReady)
    executor.send(1, [TASK], together=False)
    results = until(executor, lambda event: isinstance(event, Results))
    assert isinstance(results, Results)
    return ready.pid, results.finished[0].value


def with_start(assignment: Assignment, head_start: HeadStart) -> LocalExecutor:
    return LocalExecutor(
        Assignment(
            folder=assignment.folder, run_id=assignment.run_id, targets=assignment.targets,
            head_start=head_start,
        )
    )  # fmt: skip


def test_a_process_begun_ahead_becomes_the_worker_and_prints_to_its_log(
    assignment: Assignment,
) -> None:
    before = children()  # what tests before this one have left running for others
    with closing(HeadStart(assignment.run_id, [CPU], imports="fractions")) as head_start:
        [begun] = children() - before
        executor = with_start(assignment, head_start)
    try:
        pid, value = told(executor)
        assert pid == begun
        assert b'"is_ahead":true' in value
        assert "printed" in assignment.folder.worker_log(0).read_text()
    finally:
        executor.close()
    assert begun not in children()


@pytest.mark.parametrize("why", ["of another run", "for another slot", "killed"])
def test_one_that_does_not_fit_is_ended_and_another_is_begun(
    assignment: Assignment, why: str
) -> None:
    run_id = "other" + secrets.token_hex(12) if why == "of another run" else assignment.run_id
    slot = CPU if why != "for another slot" else SlotSpec(
        slot_id=0, label="cpu0", devices=(), num_threads=2
    )  # fmt: skip
    before = children()
    with closing(HeadStart(run_id, [CPU], imports="fractions")) as head_start:
        [begun] = children() - before
        if why == "killed":
            psutil.Process(begun).kill()
            wait_for(lambda: is_gone(begun))
        executor = with_start(assignment, head_start)
    try:
        pid, value = told(executor, slot)
        assert pid != begun
        assert b'"is_ahead":false' in value
        assert begun not in children()
    finally:
        executor.close()


def test_what_nobody_takes_over_ends_with_the_context() -> None:
    before = children()
    with closing(HeadStart("none" + secrets.token_hex(12), [CPU], imports="fractions")):
        [begun] = children() - before
    assert begun not in children()


def test_an_interrupt_while_they_are_begun_ends_those_that_have_begun() -> None:
    before = children()

    def interrupted() -> Iterator[SlotSpec]:
        yield CPU
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        HeadStart("ahead" + secrets.token_hex(12), interrupted(), imports="fractions")
    assert children() <= before
