"""One suite for every executor: what ``executors.base`` promises. Then what only processes can."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import orjson
import psutil
import pytest
from tests.processes import command_line, is_gone
from tests.programs import read_program

from muster.farm import canonical, metrics
from muster.farm.events import (
    Event,
    Logged,
    Progress,
    Results,
    Returned,
    TargetBroken,
    WorkerDied,
    WorkerReady,
)
from muster.farm.executors.base import EXECUTORS, Assignment, Executor
from muster.farm.executors.cluster import CLUSTERS, ClusterRequest
from muster.farm.executors.table import make_executor
from muster.farm.task import Finished, Outcome, SlotSpec, TargetSpec, Task
from muster.run.folder import RunFolder

SOURCE = read_program("executor_tasks.py")

T = TypeVar("T")


class Bench:
    """An executor with one worker, and everything it has said."""

    def __init__(self, name: str, folder: Path) -> None:
        self.folder = RunFolder(folder / "run")
        self.folder.create()
        self.source = folder / "target.py"
        self.source.write_text(SOURCE)
        self.name = name
        # An executor ends what an earlier one of its run has left, wherever it is on the machine.
        self.run_id = "contract" + secrets.token_hex(12)
        self.events: list[Event] = []
        self.executor: Executor | None = None
        self._next = 0

    def start(self, attribute: str, workers: int = 1, location: str = "") -> Executor:
        spec = TargetSpec(
            name=attribute,
            location=location or str(self.source),
            attribute=attribute,
            base_folder=str(self.source.parent),
            max_batch=8 if attribute.startswith("joint") else 0,
        )
        assignment = Assignment(
            folder=self.folder,
            run_id=self.run_id,
            targets={1: spec},
            cluster=ClusterRequest(num_workers=workers),
        )
        self.executor = make_executor(self.name, assignment)
        for number in range(workers):
            slot = SlotSpec(slot_id=number, label=f"cpu{number}", devices=())
            self.executor.start(number + 1, slot)
        return self.executor

    def task(self, x: int) -> Task:
        self._next += 1
        key = self._next.to_bytes(16, "big")
        return Task(self._next, key, 1, canonical.encode({"x": x}), 0, 3)

    def until(self, ready: Callable[[], T], limit_s: float = 300.0) -> T:
        assert self.executor is not None
        limit_s *= 4 if self.name in CLUSTERS else 1  # jobs and actors begin when there is room
        deadline = time.monotonic() + limit_s
        while True:
            found = ready()
            if found:
                return found
            assert time.monotonic() < deadline, f"nothing within {limit_s} s: {self.events}"
            self.events += self.executor.poll(0.05)

    def of(self, kind: type[T]) -> list[T]:
        return [event for event in self.events if isinstance(event, kind)]

    def results(self) -> list[Finished]:
        return [f for event in self.of(Results) for f in event.finished]

    def ready(self, count: int = 1) -> None:
        self.until(lambda: len(self.of(WorkerReady)) >= count)

    def one(self, attribute: str, x: int = 1) -> Finished:
        """Run one task of this function to its result."""
        executor = self.start(attribute)
        self.ready()
        executor.send(1, [self.task(x)], together=attribute.startswith("joint"))
        self.until(self.results)
        return self.results()[0]

    def death(self) -> WorkerDied:
        self.until(lambda: self.of(WorkerDied))
        return self.of(WorkerDied)[0]


@pytest.fixture
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    if request.param == "slurm":
        request.getfixturevalue("slurm")
    elif request.param == "ray":
        request.getfixturevalue("ray_driver")
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    bench = Bench(request.param, tmp_path)
    yield bench
    if bench.executor is not None:
        bench.executor.close()
    left = [c for c in psutil.Process().children(recursive=True) if c.pid not in before]
    assert left == [], "close leaves no process"


every = pytest.mark.parametrize(
    "bench",
    [
        pytest.param(name, marks=[pytest.mark.thorough] if name in CLUSTERS else [])
        for name in sorted(EXECUTORS)
    ],
    indirect=True,
)
local = pytest.mark.parametrize("bench", ["local"], indirect=True)


# ------------------------------------------------------------------ every executor


@every
def test_results_come_back_whole_and_in_order(bench: Bench) -> None:
    executor = bench.start("echo")
    bench.ready()
    tasks = [bench.task(x) for x in range(20)]
    executor.send(1, tasks, together=False)
    bench.until(lambda: len(bench.results()) == 20)
    for task, result in zip(tasks, bench.results(), strict=True):
        assert (result.task_id, result.token, result.outcome) == (task.task_id, 3, Outcome.OK)
        assert canonical.decode(result.value) == {"x": task.task_id - 1}
        assert result.seconds >= 0
    assert bench.of(WorkerDied) == []


@every
def test_numbers_that_json_does_not_know_survive(bench: Bench) -> None:
    value = canonical.decode(bench.one("strange").value)
    assert str(value) == "{'nan': nan, 'up': inf, 'down': -inf, 'list': [1.5, nan]}"


@pytest.mark.parametrize("pauses", [False, True])
@pytest.mark.parametrize(
    "bench",
    [pytest.param(name, marks=[pytest.mark.thorough] if name in CLUSTERS else [])
     for name in sorted({*EXECUTORS} - {"inline"})],
    indirect=True,
)  # fmt: skip
def test_a_task_that_is_told_to_end_does_and_its_worker_goes_on(bench: Bench, pauses: bool) -> None:
    executor = bench.start("steps_until_told")
    bench.ready()
    task = bench.task(1)
    executor.send(1, [task], together=False)
    bench.until(lambda: bench.of(Progress))
    executor.stop_task(1, task.task_id, pauses=pauses)
    bench.until(bench.results)
    [result] = bench.results()
    assert (result.outcome, result.poisoned) == (Outcome.STOPPED, False)
    again = task._replace(token=4)
    executor.send(1, [again], together=False)  # it goes on where it was, on the same worker
    seen = len(bench.of(Progress))
    bench.until(lambda: len(bench.of(Progress)) > seen)
    assert "step 0" not in bench.of(Progress)[seen].text
    assert bench.of(WorkerDied) == []


@every
def test_what_a_task_logs_comes_ahead_of_its_result(bench: Bench) -> None:
    bench.one("logs", 5)
    logged = [event for event in bench.events if isinstance(event, Logged | Results)]
    assert isinstance(logged[-1], Results)
    frames = bench.of(Logged)
    assert {(frame.worker_id, frame.task_id, frame.token) for frame in frames} == {(1, 1, 3)}
    assert [frame.serial for frame in frames] == list(range(1, len(frames) + 1))
    rows = [row for frame in frames for row in metrics.decode(frame.body).rows()]
    assert [(row.name, row.step, row.value) for row in rows] == [("loss", s, 5.0) for s in range(9)]


@every
def test_an_exception_carries_its_traceback_and_the_worker_goes_on(bench: Bench) -> None:
    result = bench.one("boom", 5)
    assert result.outcome is Outcome.EXCEPTION
    assert result.message == "ValueError: no 5"
    assert 'raise ValueError(f"no {x}")' in result.trace
    assert "target.py" in result.trace
    assert "perform.py" not in result.trace, "muster's own frames are not the user's business"
    assert bench.executor is not None
    bench.executor.send(1, [bench.task(6)], together=False)
    bench.until(lambda: len(bench.results()) == 2)


@every
@pytest.mark.parametrize("name", ["rude", "surrogate"])
def test_an_exception_that_cannot_be_shown_is_still_only_an_exception(
    bench: Bench, name: str
) -> None:
    result = bench.one(name)
    assert result.outcome is Outcome.EXCEPTION
    assert {"rude": "Rude", "surrogate": "ValueError"}[name] in result.message
    assert bench.of(WorkerDied) == []


@every
def test_a_joint_call_runs_once_for_all_its_tasks(bench: Bench) -> None:
    executor = bench.start("joint")
    bench.ready()
    executor.send(1, [bench.task(x) for x in (7, 8, 9)], together=True)
    bench.until(lambda: len(bench.results()) == 3)
    values = [canonical.decode(r.value) for r in bench.results()]
    assert values == [{"n": 3, "x": 7}, {"n": 3, "x": 8}, {"n": 3, "x": 9}]


@every
def test_in_a_joint_call_only_the_task_that_raises_fails(bench: Bench) -> None:
    executor = bench.start("joint_boom")
    bench.ready()
    executor.send(1, [bench.task(x) for x in (1, 2, 3, 4)], together=True)
    bench.until(lambda: len(bench.results()) == 4)
    outcomes = {r.task_id: r.outcome for r in bench.results()}
    assert [outcomes[n] for n in (1, 2, 3, 4)] == [
        Outcome.OK, Outcome.EXCEPTION, Outcome.OK, Outcome.OK,
    ]  # fmt: skip


@every
def test_an_exception_among_the_results_of_a_joint_call_fails_its_task_only(bench: Bench) -> None:
    executor = bench.start("joint_mixed")
    bench.ready()
    executor.send(1, [bench.task(x) for x in (1, 2, 3, 4)], together=True)
    bench.until(lambda: len(bench.results()) == 4)
    results = {r.task_id: r for r in bench.results()}
    assert [results[n].outcome for n in (1, 2, 3, 4)] == [
        Outcome.OK, Outcome.EXCEPTION, Outcome.BAD_RESULT, Outcome.OK,
    ]  # fmt: skip
    assert results[2].message == "ValueError: two has no result"
    assert "two has no result" in results[2].trace
    assert results[3].message == "three is wrong"
    for number in (1, 4):  # the call was not repeated in halves
        assert canonical.decode(results[number].value) == {"n": 4, "calls": 1}


@every
def test_a_revoke_returns_exactly_what_has_not_begun(bench: Bench) -> None:
    executor = bench.start("slow")
    bench.ready()
    tasks = [bench.task(x) for x in range(4)]
    executor.send(1, tasks, together=False)
    if bench.name == "local":
        time.sleep(0.15)  # the first has begun
    executor.revoke(1)
    bench.until(lambda: bench.of(Returned))
    back = [i for event in bench.of(Returned) for i in event.task_ids]
    bench.until(lambda: len(bench.results()) + len(back) == 4)
    done = [r.task_id for r in bench.results()]
    assert sorted([*done, *back]) == [t.task_id for t in tasks]
    executor.send(1, [bench.task(9)], together=False)
    bench.until(lambda: len(bench.results()) == len(done) + 1)


@every
def test_a_revoke_returns_a_joint_call_whole_or_not_at_all(bench: Bench) -> None:
    executor = bench.start("joint")
    bench.ready()
    for _ in range(10):
        bench.events.clear()
        calls = [[bench.task(x) for x in range(3)] for _ in range(2)]
        for call in calls:
            executor.send(1, call, together=True)
        executor.revoke(1)
        bench.until(lambda: bench.of(Returned))
        back = {i for event in bench.of(Returned) for i in event.task_ids}
        bench.until(lambda: len(bench.results()) + len(back) == 6)  # noqa: B023
        for call in calls:
            assert len({t.task_id for t in call} & back) in (0, 3)


@every
def test_a_revoke_of_nothing_returns_nothing(bench: Bench) -> None:
    executor = bench.start("echo")
    bench.ready()
    executor.revoke(1)
    bench.until(lambda: bench.of(Returned))
    assert list(bench.of(Returned)[0].task_ids) == []


@every
def test_ending_lets_the_worker_finish_what_it_holds(bench: Bench) -> None:
    executor = bench.start("slow")
    bench.ready()
    executor.send(1, [bench.task(x) for x in range(2)], together=False)
    executor.end(1, kill=False)
    death = bench.death()
    assert [r.outcome for r in bench.results()] == [Outcome.OK, Outcome.OK]
    assert bench.events.index(death) > bench.events.index(bench.of(Results)[-1])
    assert (death.exit_code, death.signal) == (0, None)


@every
def test_killing_is_answered_by_a_death(bench: Bench) -> None:
    executor = bench.start("slow")
    bench.ready()
    executor.send(1, [bench.task(x) for x in range(100)], together=False)
    executor.end(1, kill=True)
    bench.death()
    assert len(bench.results()) < 100
    bench.events.clear()
    for _ in range(3):
        bench.events += executor.poll(0.01)
    assert bench.events == [], "nothing comes after a death"


@every
def test_progress_is_passed_on(bench: Bench) -> None:
    bench.one("telling")
    [progress] = [event for event in bench.of(Progress) if event.task_id]
    assert progress.worker_id == 1
    assert progress.text.startswith("50 % half way")


@every
@pytest.mark.parametrize(
    ("source", "attribute", "words"),
    [
        ("", "missing", ["missing"]),
        ("import no_such_package_here\ndef f(x): pass", "f", ["no_such_package_here"]),
        ("raise RuntimeError('at import')\ndef f(x): pass", "f", ["at import"]),
        ("def f(x:\n", "f", ["bad.py"]),
    ],
)
def test_a_target_that_cannot_be_loaded_is_told_with_its_reason(
    bench: Bench, tmp_path: Path, source: str, attribute: str, words: list[str]
) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text(source)
    bench.start(attribute, location=str(bad))
    bench.until(lambda: bench.of(TargetBroken))
    [broken] = bench.of(TargetBroken)
    assert broken.worker_id == 1
    for word in words:
        assert word in broken.message
    assert bench.of(WorkerReady) == []


@every
def test_two_workers_keep_their_tasks_apart(bench: Bench) -> None:
    executor = bench.start("echo", workers=2)
    bench.ready(2)
    first, second = bench.task(1), bench.task(2)
    executor.send(2, [second], together=False)
    executor.send(1, [first], together=False)
    bench.until(lambda: len(bench.results()) == 2)
    owners = {e.worker_id: e.finished[0].task_id for e in bench.of(Results)}
    assert owners == {1: first.task_id, 2: second.task_id}
    executor.end(1, kill=True)
    assert bench.death().worker_id == 1
    executor.send(2, [bench.task(3)], together=False)
    bench.until(lambda: len(bench.results()) == 3)


@every
def test_orders_for_a_dead_worker_are_dropped(bench: Bench) -> None:
    executor = bench.start("echo")
    bench.ready()
    executor.end(1, kill=False)
    bench.death()
    bench.events.clear()
    executor.send(1, [bench.task(1)], together=False)
    executor.revoke(1)
    executor.end(1, kill=True)
    for _ in range(3):
        bench.events += executor.poll(0.01)
    assert bench.events == []


@every
def test_waiting_for_nothing_takes_the_time_it_was_given(bench: Bench) -> None:
    executor = bench.start("echo")
    bench.ready()
    used, begin = time.process_time(), time.monotonic()
    assert executor.poll(0.3) == []
    assert time.monotonic() - begin >= 0.25
    assert time.process_time() - used < 0.15, "without spinning"


# ------------------------------------------------------------------ processes


@local
@pytest.mark.parametrize(
    ("attribute", "exit_code", "sig", "tail"),
    [
        ("leave", 7, None, "last words"),
        ("killed", None, signal.SIGKILL, ""),
        ("segfault", None, signal.SIGSEGV, "Segmentation fault"),
    ],
)
def test_a_lost_process_is_told_with_its_code_and_last_output(
    bench: Bench, attribute: str, exit_code: int | None, sig: int | None, tail: str
) -> None:
    executor = bench.start(attribute)
    bench.ready()
    executor.send(1, [bench.task(1), bench.task(2)], together=False)
    death = bench.death()
    assert (death.exit_code, death.signal) == (exit_code, sig)
    assert tail in death.trace
    assert not death.host_oom
    assert bench.results() == []
    assert str(exit_code if sig is None else int(sig)) in death.reason


@local
def test_a_worker_that_ignores_term_is_killed(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = tmp_path / "pids"
    monkeypatch.setenv("PIDS", str(pids))
    executor = bench.start("stubborn")
    bench.ready()
    executor.send(1, [bench.task(1)], together=False)
    bench.until(pids.exists)
    executor.end(1, kill=True)
    assert bench.death().signal == signal.SIGKILL
    assert not bench.of(WorkerDied)[0].host_oom


@local
def test_the_next_worker_is_started_beside_a_function_that_does_not_end(bench: Bench) -> None:
    """It has its target, and so the device, only after the other one is dead."""
    executor = bench.start("endless")
    bench.ready()
    before = {child.pid for child in psutil.Process().children()}
    task = bench.task(1)
    executor.send(1, [task], together=False)
    executor.stop_task(1, task.task_id, pauses=False)
    begun = {child.pid for child in psutil.Process().children()} - before
    bench.until(lambda: {child.pid for child in psutil.Process().children()} - before)
    [beside] = {child.pid for child in psutil.Process().children()} - before
    executor.end(1, kill=True)
    bench.death()
    assert begun == set() and len(bench.of(WorkerReady)) == 1
    executor.start(2, SlotSpec(slot_id=0, label="cpu0", devices=()))
    bench.ready(2)
    assert bench.of(WorkerReady)[1].pid == beside
    executor.send(2, [bench.task(0)], together=False)
    bench.until(bench.results)


@local
@pytest.mark.parametrize("how", ["dies", "is killed", "is stopped", "close"])
def test_everything_a_worker_started_goes_with_it(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Children, children in their own session, children that ignore TERM, double forks."""
    file = tmp_path / "pids"
    monkeypatch.setenv("PIDS", str(file))
    executor = bench.start("family", workers=2)
    bench.ready(2)
    x = {"dies": 1, "is killed": 2, "is stopped": 3, "close": 2}[how]
    executor.send(1, [bench.task(x)], together=False)
    bench.until(lambda: file.exists() and len(file.read_text().split()) == 5)
    pids = [int(word) for word in file.read_text().split()]
    if how == "close":
        executor.close()
        bench.executor = None
    else:
        if how == "is killed":
            executor.end(1, kill=True)
        elif how == "is stopped":
            executor.end(1, kill=False)
        bench.death()
        assert [w.worker_id for w in bench.of(WorkerDied)] == [1], "its neighbour lives"
        bench.executor.send(2, [bench.task(3)], together=False)  # type: ignore[union-attr]
        bench.until(bench.results)
    assert [pid for pid in pids if not is_gone(pid)] == []


@local
def test_a_forked_child_that_holds_the_socket_does_not_hide_the_death(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "pids"
    monkeypatch.setenv("PIDS", str(file))
    executor = bench.start("forked")
    bench.ready()
    executor.send(1, [bench.task(1)], together=False)
    assert bench.death().signal == signal.SIGKILL
    assert is_gone(int(file.read_text()))


@local
def test_orphans_of_finished_tasks_are_collected(bench: Bench) -> None:
    executor = bench.start("orphans")
    bench.ready()
    executor.send(1, [bench.task(x) for x in range(20)], together=False)
    bench.until(lambda: len(bench.results()) == 20)

    # Of the worker's session: an exit that another test of this process has not read is not ours.
    (worker,) = [event.pid for event in bench.of(WorkerReady)]

    def zombies() -> list[int]:
        children = psutil.Process().children()
        dead = [c.pid for c in children if c.status() == psutil.STATUS_ZOMBIE]
        return [pid for pid in dead if os.getsid(pid) == worker]

    bench.until(lambda: not zombies())


@local
def test_a_thread_left_behind_does_not_keep_a_worker_from_ending(bench: Bench) -> None:
    executor = bench.start("lingering")
    bench.ready()
    executor.send(1, [bench.task(1)], together=False)
    bench.until(bench.results)
    executor.end(1, kill=False)
    bench.until(lambda: bench.of(WorkerDied))


@local
def test_log_offsets_cut_out_what_each_task_printed(bench: Bench) -> None:
    executor = bench.start("echo")
    bench.ready()
    executor.send(1, [bench.task(x) for x in range(5)], together=False)
    bench.until(lambda: len(bench.results()) == 5)
    log = bench.folder.worker_log(0).read_bytes()
    parts = [log[r.log_start : r.log_end].decode() for r in bench.results()]
    assert parts == [f"task {x} speaks\n" for x in range(5)]


@local
def test_what_an_earlier_coordinator_left_is_ended_before_anything_starts(bench: Bench) -> None:
    environment = {**os.environ, "MUSTER_RUN_MARK": f"{bench.run_id}-old"}
    start = ["sh", "-c", "setsid sleep 60 >/dev/null 2>&1 & echo $!"]
    pid = int(subprocess.run(start, env=environment, capture_output=True, check=True).stdout)
    # In the middle of an exec a process has no environment that anybody could read.
    while psutil.Process(pid).name() != "sleep":
        time.sleep(0.01)
    bench.start("echo")
    assert is_gone(pid)
    bench.ready()


@local
def test_a_killed_reaper_is_replaced_and_the_run_goes_on(bench: Bench) -> None:
    executor = bench.start("echo")
    bench.ready()

    def reapers() -> list[psutil.Process]:
        return [c for c in psutil.Process().children() if "reaper" in command_line(c)]

    bench.until(reapers)  # a process has its words a moment after it has begun
    [first] = reapers()
    first.kill()
    bench.until(lambda: [w for w in reapers() if w.pid != first.pid])
    executor.send(1, [bench.task(1)], together=False)
    bench.until(bench.results)


@local
def test_more_orders_than_the_socket_holds_do_not_block(bench: Bench) -> None:
    executor = bench.start("slow")
    bench.ready()
    big = orjson.dumps({"x": 1, "pad": "y" * 100_000})
    tasks = [bench.task(1)._replace(payload=big) for _ in range(50)]
    begin = time.monotonic()
    executor.send(1, tasks, together=False)
    assert time.monotonic() - begin < 7.5, "half of what the tasks take one after the other"
    executor.revoke(1)
    bench.until(lambda: bench.of(Returned))
    bench.until(
        lambda: len(bench.results()) + sum(len(e.task_ids) for e in bench.of(Returned)) == 50
    )
