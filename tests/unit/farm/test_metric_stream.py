"""What tasks log: the bytes, what holds after several attempts, and the way into the ledger."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples

import muster
from muster.base.errors import TargetError
from muster.farm import metrics
from muster.farm.ledger.connect import open_reader
from muster.farm.ledger.read import LedgerReader
from muster.farm.ledger.store import Ledger
from muster.farm.task import Order
from muster.farm.worker.context import Context, Surroundings
from muster.farm.worker.gather import SEND_AT, Gatherer
from muster.run.folder import RunFolder

NAMES = st.sampled_from(["loss", "accuracy", "Verlust/größter", "", "a\nb"])
STEPS = st.integers(-(2**63), 2**63 - 1)
POINTS = st.lists(st.tuples(NAMES, STEPS, st.floats(), st.floats()), max_size=30)


def same(first: float, second: float) -> bool:
    return first == second or (math.isnan(first) and math.isnan(second))


@given(POINTS)
@examples(60)
def test_points_survive_their_bytes(given_points: list[tuple[str, int, float, float]]) -> None:
    found = metrics.decode(metrics.encode(given_points)).rows()
    assert [(p.name, p.step) for p in found] == [(p[0], p[1]) for p in given_points]
    for point, (_, _, time_s, value) in zip(found, given_points, strict=True):
        assert same(point.time_s, time_s) and same(point.value, value)


# ------------------------------------------------------------------ what holds


def reference(frames: Sequence[tuple[int, list[tuple[str, int]]]]) -> dict[str, list[Any]]:
    """Slowly, as the rule reads: attempt by attempt, what comes later replaces from its first."""
    held: dict[str, list[tuple[int, int]]] = {}
    for token in sorted({token for token, _ in frames}):
        mine = [point for number, some in frames if number == token for point in some]
        for name in {name for name, _ in mine}:
            steps = [step for other, step in mine if other == name]
            kept = [(t, s) for t, s in held.get(name, []) if s < min(steps)]
            held[name] = kept + [(token, step) for step in steps]
    return {name: rows for name, rows in held.items() if rows}


FRAMES = st.lists(
    st.tuples(
        st.integers(1, 4),
        st.lists(st.tuples(st.sampled_from(["a", "b", "c"]), st.integers(-3, 12)), max_size=6),
    ),
    max_size=9,
)


@given(FRAMES)
@examples(150)
def test_a_later_attempt_replaces_from_its_first_step(
    frames: list[tuple[int, list[tuple[str, int]]]],
) -> None:
    encoded = [
        (token, metrics.decode(metrics.encode([(name, step, 0.0, token) for name, step in some])))
        for token, some in frames
    ]
    found = {
        name: list(zip(curve.token.tolist(), curve.step.tolist(), strict=True))
        for name, curve in metrics.effective(encoded).items()
    }
    assert found == reference(frames)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 9)), max_size=12))
@examples(100)
def test_a_frame_says_how_often_its_program_was_started_again(
    frames: list[tuple[int, int, int]],
) -> None:
    """A start within an attempt counts like an attempt."""
    found, plain = [], []
    for number, (token, start, step) in enumerate(frames):
        point = ("loss", step, 0.0, float(number))
        body = metrics.encode([point], start)
        assert (metrics.names_in(body), metrics.decode(body).start) == (["loss"], start)
        found.append((token, metrics.decode(body)))
        plain.append((token * 10 + start, metrics.decode(metrics.encode([point]))))
    curves = metrics.effective(found)
    for name, curve in metrics.effective(plain).items():
        assert curves[name].value.tolist() == curve.value.tolist()
        assert curves[name].token.tolist() == [token // 10 for token in curve.token.tolist()]


# ------------------------------------------------------------------ a worker's end


class Sent:
    """The far end of a worker's line: what was sent, and how much of it is said to be safe."""

    has_own_process = True

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.tasks: list[int] = []
        self.safe = 0

    def logged(self, task_id: int, token: int, body: bytes, serial: int | None = None) -> int:
        self.bodies.append(body)
        self.tasks.append(task_id)
        return len(self.bodies)

    def confirmed(self) -> int:
        return self.safe

    def progress(self, task_id: int, text: str, numbers: Mapping[str, float]) -> None: ...

    def wanted(self, task_id: int) -> int:
        return 0

    def should_stop(self) -> bool:
        return False

    def halted(self, task_id: int) -> None:
        return None

    def runs(self, task_id: int, pid: int | None, *, passes_on: bool = False) -> None: ...

    def divide(
        self, task_id: int, token: int, kept: Mapping[str, Any], given: Sequence[Mapping[str, Any]]
    ) -> None: ...

    def rows(self) -> list[tuple[str, int, float]]:
        found = [row for body in self.bodies for row in metrics.decode(body).rows()]
        return [(row.name, row.step, row.value) for row in found]


def test_numbers_of_all_kinds_are_logged() -> None:
    line = Sent()
    gatherer = Gatherer(1, 1, line)
    values: dict[str, Any] = {
        "a": True, "b": 3, "c": 0.5, "d": np.float32(0.25), "e": np.int64(7), "f": np.array(2),
        "g": torch.tensor(1.5), "h": torch.tensor(2.5, dtype=torch.bfloat16), "i": math.nan,
        "j": -math.inf, "k": np.bool_(True),
    }  # fmt: skip
    gatherer.add(np.int32(4), values)  # type: ignore[arg-type]
    gatherer.end()
    assert line.rows()[:8] == [
        ("a", 4, 1.0), ("b", 4, 3.0), ("c", 4, 0.5), ("d", 4, 0.25), ("e", 4, 7.0), ("f", 4, 2.0),
        ("g", 4, 1.5), ("h", 4, 2.5),
    ]  # fmt: skip
    assert math.isnan(line.rows()[8][2]) and line.rows()[9][2] == -math.inf
    assert line.rows()[10] == ("k", 4, 1.0)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("0.3", "loss is a str, which is not a number"),
        (torch.zeros(2, 3), "loss is a Tensor of shape (2, 3), which is not a number"),
        (np.zeros(1), "loss is a ndarray of shape (1,), which is not a number"),
        (None, "loss is a NoneType"),
        (1j, "loss is a complex"),
        (torch.tensor(1j), "loss is a Tensor"),
        (10**400, "loss is an integer beyond what a float holds"),
    ],
)
def test_what_is_no_number_is_refused_and_nothing_of_the_call_is_kept(
    value: object, says: str
) -> None:
    line = Sent()
    gatherer = Gatherer(1, 1, line)
    with pytest.raises(TargetError) as caught:
        gatherer.add(1, {"fine": 1.0, "loss": value})
    assert says in str(caught.value)
    gatherer.end()
    assert line.bodies == []


@pytest.mark.parametrize("step", [1.0, "3", None, 2**63])
def test_a_step_is_a_whole_number(step: Any) -> None:
    gatherer = Gatherer(1, 1, Sent())
    with pytest.raises(TargetError, match="the step"):
        gatherer.add(step, {"loss": 1.0})


def test_many_points_are_sent_at_once_and_the_rest_by_time() -> None:
    line = Sent()
    gatherer = Gatherer(1, 1, line)
    for step in range(SEND_AT):
        gatherer.add(step, {"loss": 1.0})
    assert SEND_AT in [len(metrics.decode(body)) for body in line.bodies] or len(line.bodies) > 1
    gatherer.add(SEND_AT, {"loss": 1.0})
    deadline = time.monotonic() + 60
    while len(line.rows()) <= SEND_AT and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [step for _, step, _ in line.rows()] == list(range(SEND_AT + 1))
    gatherer.end()
    assert "muster-metrics" not in {thread.name for thread in threading.enumerate()}


def test_only_what_is_confirmed_is_forgotten() -> None:
    line = Sent()
    gatherer = Gatherer(1, 1, line)
    for step in range(3):
        gatherer.add(step, {"loss": 1.0})
        gatherer.flush()
    line.safe = 2
    [left] = gatherer.unconfirmed()
    assert [row.step for row in metrics.decode(left).rows()] == [2]
    gatherer.end()


# ------------------------------------------------------------------ the ledger


def test_rows_are_followed_by_their_ids(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(path)
    with LedgerReader(path) as reader:
        assert list(metrics.frames_above(reader)) == []
        ledger.begin()
        ledger.record_metrics([(1, 1, 0, metrics.encode([("loss", 0, 0.0, 1.0)]))])
        ledger.roll_back()
        for step in range(3):
            ledger.begin()
            frame = (1 + step % 2, 1, step, metrics.encode([("loss", step, 0.0, 1.0)]))
            assert ledger.record_metrics([frame, frame]) == [frame], "heard twice"
            ledger.commit()
        assert [f.frame_id for f in metrics.frames_above(reader)] == [1, 2, 3]
        [last] = metrics.frames_above(reader, 2)
        assert (last.task_id, last.points.rows()[0].step) == (1, 2)
        assert metrics.curves_of(reader, 1)["loss"].step.tolist() == [0, 2]
    ledger.close()


def test_a_run_that_logs_nothing_has_no_table(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.close()
    database = open_reader(tmp_path / "ledger.sqlite")
    tables = database.execute("SELECT name FROM sqlite_master WHERE name LIKE 'metrics%'")
    assert tables.fetchall() == []
    database.close()


def context(tmp_path: Path, line: Sent, token: int, task_id: int = 1) -> Context:
    around = Surroundings(RunFolder(tmp_path), "cpu", line, os.getpid())
    order = Order(task_id, token, 1, f"{task_id - 1}" * 32, token, b"{}")
    return Context(around, order, {})


@pytest.mark.parametrize("value", [1, torch.ones(2)])
@pytest.mark.parametrize("safe", [0, 1, 2])
def test_a_checkpoint_holds_what_is_not_known_to_be_safe(
    value: Any, safe: int, tmp_path: Path
) -> None:
    """Its coordinator is killed with the first attempt; of its frames ``safe`` were recorded."""
    first, second = Sent(), Sent()
    ctx = context(tmp_path, first, 1)
    for step in range(2):
        ctx.log(step, loss=0.1)
        ctx.checkpoint({"step": step})
    first.safe = safe
    ctx.checkpoint({"value": value})
    again = context(tmp_path, second, 2)
    for _ in range(2):  # asking twice sends them once
        state = again.restore()
        assert state is not None and list(state) == ["value"]
    again.log(2, loss=0.1)
    again.end_log()
    ctx.end_log()
    frames = [(1, metrics.decode(body)) for body in first.bodies[:safe]]
    frames += [(2, metrics.decode(body)) for body in second.bodies]
    assert metrics.effective(frames)["loss"].step.tolist() == [0, 1, 2]
    assert [step for _, step, _ in second.rows()] == list(range(safe, 3))


@pytest.mark.parametrize("num_calls", [1, 2])
def test_a_joint_call_that_goes_on_has_every_point_of_all_tasks_once(
    num_calls: int, tmp_path: Path
) -> None:
    """Nothing of the first attempt was recorded; of the second one, the first call raises."""
    first, second = Sent(), Sent()

    def call(line: Sent, token: int, start: int) -> None:
        contexts = [context(tmp_path, line, token, task_id) for task_id in (1, 2)]
        contexts[0].log_for(contexts, start)
        step = contexts[0].restore() or {"next": 0}
        contexts[0].log(step["next"], loss=[1.0, 2.0])
        if line is first:
            contexts[0].checkpoint({"next": 1})
        for one in contexts:
            one.end_log()

    call(first, 1, 0)
    for start in range(num_calls):
        call(second, 2, start)
    for task in (1, 2):
        sent = zip(second.tasks, second.bodies, strict=True)
        frames = [(2, metrics.decode(body)) for task_id, body in sent if task_id == task]
        curve = metrics.effective(frames)["loss"]
        assert (curve.step.tolist(), set(curve.value.tolist())) == ([0, 1], {float(task)})


def test_an_attempt_that_reads_its_own_checkpoint_sends_nothing_twice(tmp_path: Path) -> None:
    line = Sent()
    ctx = context(tmp_path, line, 1)
    ctx.log(0, loss=0.1)
    ctx.checkpoint({"step": 0})
    assert ctx.restore() == {"step": 0}
    ctx.end_log()
    assert line.rows() == [("loss", 0, 0.1)]


def test_a_checkpoint_of_an_earlier_muster_is_read(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    ctx = context(tmp_path, Sent(), 1)
    RunFolder(tmp_path).checkpoint("0" * 32).parent.mkdir(exist_ok=True)
    RunFolder(tmp_path).checkpoint("0" * 32).write_bytes(b'J{"step":3}')
    assert ctx.restore() == {"step": 3}


TARGET = """
def train(lr: float, ctx):
    for step in range(5):
        ctx.log(step, loss=lr * step)
    return {"lr": lr}

def wrong(lr: float, ctx):
    ctx.log(0, loss="low")
"""


def curves(run: Any, task_id: int) -> dict[str, list[tuple[int, float]]]:
    with LedgerReader(RunFolder(run.path).ledger) as reader:
        found = metrics.curves_of(reader, task_id)
    return {
        name: list(zip(curve.step.tolist(), curve.value.tolist(), strict=True))
        for name, curve in found.items()
    }


@pytest.mark.parametrize("where", ["local", "inline"])
def test_what_a_task_logs_is_in_the_ledger(where: str, tmp_path: Path) -> None:
    (tmp_path / "target.py").write_text(TARGET)
    target, grid = f"{tmp_path}/target.py:train", {"lr": [1.0, 2.0]}
    run = muster.sweep(target, grid=grid, run_dir=tmp_path / "run", executor=where)
    assert curves(run, 2) == {"loss": [(step, 2.0 * step) for step in range(5)]}


JOINT = """
import muster
import numpy as np

@muster.batched(max_batch=8)
def joint(items, ctx):
    numbers = [item["x"] for item in items]
    for step in range(2100):  # more than is sent at once
        ctx.log(step, loss=np.array(numbers) * step, lr=0.5)
    muster.log(step, late=numbers, calls=len(items))
    if 5 in numbers:
        if len(items) > 1:
            raise ValueError("not together")
        muster.log(0, loss=[1.0, 2.0])
    return [{"x": x} for x in numbers]
"""


def test_a_joint_call_logs_a_number_for_each_task(tmp_path: Path) -> None:
    """Of the calls that failed nothing is left, as the smaller ones that follow log it again."""
    (tmp_path / "target.py").write_text(JOINT)
    run = muster.sweep(
        f"{tmp_path}/target.py:joint", grid={"x": [*range(6)]}, run_dir=tmp_path / "run",
        executor="inline", retries=0,
    )  # fmt: skip
    num_calls = []
    for number in range(6):
        found = curves(run, number + 1)
        assert found["loss"] == [(s, float(number * s)) for s in range(2100)]
        assert {value for _, value in found["lr"]} == {0.5} and len(found["lr"]) == 2100
        assert found["late"] == [(2099, float(number))]
        num_calls.append(found["calls"][0][1])
    assert num_calls[-1] == 1 < max(num_calls)
    error = run.results().to_pylist()[-1]["error"]
    assert "loss has 2 numbers, but this call computes 1 tasks" in error


def test_a_wrong_value_fails_the_task_and_names_metric_and_type(tmp_path: Path) -> None:
    (tmp_path / "target.py").write_text(TARGET)
    target, grid = f"{tmp_path}/target.py:wrong", {"lr": [1.0]}
    run = muster.sweep(target, grid=grid, run_dir=tmp_path / "run", executor="inline")
    [row] = run.results().to_pylist()
    assert "loss is a str, which is not a number" in str(row)


def test_threads_that_log_the_first_numbers_at_once_lose_none(tmp_path: Path) -> None:
    for _ in range(50):
        line = Sent()
        task, begin = context(tmp_path, line, 1), threading.Barrier(4)

        def log(name: str, task: Context = task, begin: threading.Barrier = begin) -> None:
            begin.wait()
            task.log(0, **{name: 1.0})

        threads = [threading.Thread(target=log, args=(name,)) for name in "abcd"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        task.end_log()
        assert sorted(name for name, _, _ in line.rows()) == ["a", "b", "c", "d"]


def test_a_process_of_the_task_cannot_log_the_first_numbers_either(tmp_path: Path) -> None:
    task = context(tmp_path, Sent(), 1)
    pid = os.fork()
    if pid == 0:
        try:
            task.log(0, loss=1.0)
        except TargetError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
