"""Whose memory a look shows, and that the coordinator does not wait for one."""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from muster.farm.canonical import payload_and_key
from muster.farm.events import Results, WorkerDied, WorkerReady
from muster.farm.executors import memory_limits
from muster.farm.executors.base import Assignment
from muster.farm.executors.local import LocalExecutor
from muster.farm.task import Outcome, SlotSpec, TargetSpec, Task
from muster.run.folder import RunFolder

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

SOURCE = """
import ctypes, time

kept = []
libc = ctypes.PyDLL(None)  # whose calls hold the interpreter
libc.malloc.restype = ctypes.c_void_p
libc.memset.argtypes = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t

def takes(mib: int, s: float):
    if s < 0:
        libc.memset(libc.malloc(ctypes.c_size_t(mib << 20)), 1, mib << 20)
    kept.append(bytearray(mib << 20))
    time.sleep(s)
"""


@pytest.fixture
def executor(tmp_path: Path) -> Iterator[LocalExecutor]:
    (tmp_path / "t.py").write_text(SOURCE)
    spec = TargetSpec(name="f", location="t.py", attribute="takes", base_folder=str(tmp_path))
    folder = RunFolder(tmp_path / "run")
    folder.create()
    made = LocalExecutor(
        Assignment(folder=folder, run_id="watch" + secrets.token_hex(12), targets={1: spec})
    )
    made.start(1, SlotSpec(slot_id=0, label="cpu0", devices=(), most_host_mib=300.0))
    try:
        yield made
    finally:
        made.close()


def _until(executor: LocalExecutor, kind: type, most_s: float = 60.0) -> object:
    until = time.monotonic() + most_s
    while time.monotonic() < until:
        for event in executor.poll(0.1):
            if isinstance(event, kind):
                return event
    raise AssertionError(f"no {kind.__name__}")


def _task(number: int, mib: int, s: float) -> Task:
    payload, key = payload_and_key("f")({"mib": mib, "s": s})
    return Task(number, key, 1, payload, 0, 1)


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_task_is_not_blamed_for_a_look_that_began_before_it(
    executor: LocalExecutor, has_ended: bool
) -> None:
    _until(executor, WorkerReady)
    first = _task(1, 400, 0.5 if has_ended else 60.0)
    with memory_limits._ASKING:  # a look that takes long
        executor.send(1, [first, _task(2, 0, 60.0)], together=False)
        if has_ended:
            _until(executor, Results)
        begin_s = time.monotonic()
        executor.poll(0.0)
        assert time.monotonic() - begin_s < 20.0
        time.sleep(0.2)
    death = _until(executor, WorkerDied)
    assert isinstance(death, WorkerDied)
    assert death.outcome is (Outcome.LOST if has_ended else Outcome.MEMORY_LIMIT)
    assert "of 300 MiB allowed (--memory)" in death.reason


def test_a_result_that_waited_while_the_next_task_took_memory_excuses_nobody(
    executor: LocalExecutor,
) -> None:
    """Those before had ended when the look began. The result of the last, behind which the next
    task held the interpreter, was found in the memory of the killed worker, and counted as one
    that had ended since.
    """
    _until(executor, WorkerReady)
    quick = [_task(number, 0, 0.0) for number in range(1, 41)]
    executor.send(1, [*quick, _task(41, 1024, -1.0)], together=False)
    events: list[object] = []
    until = time.monotonic() + 60.0
    while not any(isinstance(event, WorkerDied) for event in events):
        assert time.monotonic() < until
        events += executor.poll(0.1)
    [death] = [event for event in events if isinstance(event, WorkerDied)]
    assert death.outcome is Outcome.MEMORY_LIMIT
    told = [one.task_id for event in events if isinstance(event, Results) for one in event.finished]
    assert told == [*range(1, 41)]
