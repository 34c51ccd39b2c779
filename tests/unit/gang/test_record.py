"""What rank 0 writes down is JSON, whatever the numbers are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import muster
from muster.base.metric_log import read_line
from muster.rank.record import Record, StepLine, read_metrics
from muster.run.folder import RunFolder

FINITE = st.floats(allow_nan=False, allow_infinity=False)


@given(
    lines=st.lists(
        st.builds(
            StepLine, step=st.integers(0, 2**40), epoch=st.integers(0, 999),
            samples=st.integers(0, 2**50), loss=FINITE, lr=FINITE, seconds=FINITE,
            grad_norm=st.none() | st.floats(),
        ),
        max_size=5,
    )
)  # fmt: skip
def test_every_line_comes_back(tmp_path_factory: object, lines: list[StepLine]) -> None:
    folder = RunFolder(Path(tmp_path_factory.mktemp("run")))  # type: ignore[attr-defined]
    record = Record(folder, 0, with_tensorboard=False)
    for line in lines:
        record.step(line)
    record.close()
    found = [*read_metrics(folder.metrics)]
    assert json.dumps(found) == json.dumps([line.record() for line in lines])


def test_what_a_task_logs_is_cut_with_the_step_that_it_was_logged_in(tmp_path: Path) -> None:
    """It counts steps of its own, such as samples, or epochs."""
    folder = RunFolder(tmp_path)
    record = Record(folder, 0, with_tensorboard=False)
    for step in (1, 2, 3):
        muster.log(100 * step, samples=step)
        muster.log(0, epochs=step)
        record.step(StepLine(step, 0, 8, 0.5, 0.1, 0.01, None))
    record.close()
    before = folder.metrics.read_text().splitlines()
    assert [json.loads(line)["step"] for line in before] == [100, 0, 1, 200, 0, 2, 300, 0, 3]
    with folder.metrics.open("a") as file:
        file.write('{"step": 3, "torn')
    Record(folder, 2, with_tensorboard=False).close()
    assert folder.metrics.read_text().splitlines() == before[:6]


def test_the_numbers_of_a_training_are_those_of_the_task_that_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And with both those that its task logs by itself; outside of Muster they go nowhere."""
    stream = tmp_path / "stream.jsonl"
    monkeypatch.setenv("MUSTER_METRICS", str(stream))
    record = Record(RunFolder(tmp_path), 0, with_tensorboard=False)
    record.step(StepLine(1, 0, 8, 0.5, 0.1, 0.01, None))
    record.line("evaluation", {"step": 1, "loss": 0.25})
    muster.log(2, entropy=0.75)
    record.close()
    monkeypatch.delenv("MUSTER_METRICS")
    muster.log(3, entropy=9.0)
    whose, told = stream.read_bytes().split(b"\n", 1)
    assert (told, read_line(whose, 0)) == (RunFolder(tmp_path).metrics.read_bytes(), (0, None, {}))
    found = [read_line(line, 0) for line in told.splitlines()]
    assert [(line[0], line[2]) for line in found if line] == [
        (1, {"train/epoch": 0, "train/samples": 8, "train/loss": 0.5, "train/lr": 0.1,
             "train/seconds": 0.01}),
        (1, {"evaluation/loss": 0.25}),
        (2, {"entropy": 0.75}),
    ]  # fmt: skip


def test_ranks_that_begin_again_tell_their_task_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another training of the same task is told from its first step, and may begin again as well;
    and the next attempt is told of both from where they go on."""
    stream = tmp_path / "stream.jsonl"
    monkeypatch.setenv("MUSTER_METRICS", str(stream))
    for place, first, last in (("a", 1, 3), ("a", 2, 4), ("b", 1, 2), ("b", 2, 3)):
        folder = RunFolder(tmp_path / place)
        folder.path.mkdir(exist_ok=True)
        record = Record(folder, first - 1, with_tensorboard=False)
        for step in range(first, last + 1):
            for number in range(step % 3):
                muster.log(number, before=10 * step)  # folds have the same steps
            record.step(StepLine(step, 0, 8, 0.5, 0.1, 0.01, None))
            muster.log(step, between=10 * step)
            record.line("evaluation", {"step": step, "loss": 0.25})
        if place == "a":
            muster.log(0, before=10 * (last + 1))  # and then they were killed
        record.close()
        assert [line["step"] for line in read_metrics(folder.metrics)][::2] == [*range(1, last + 1)]
    told = [line["step"] for line in read_metrics(stream) if line["kind"] == "train"]
    assert told == [1, 2, 3, 4, 1, 2, 3]
    assert len([*read_metrics(stream)]) == 2 * len(told)
    lines = [json.loads(line) for line in stream.read_text().splitlines()]
    assert [line["between"] for line in lines if "between" in line] == [10, 20, 30, 40, 10, 20, 30]
    before = [(line["step"], line["before"]) for line in lines if "before" in line]
    assert before == [(0, 10), (0, 20), (1, 20), (0, 40), (0, 50), (0, 10), (0, 20), (1, 20)]
    again = tmp_path / "again.jsonl"
    monkeypatch.setenv("MUSTER_METRICS", str(again))
    for place, steps in (("a", (5, 6)), ("b", (4, 5))):
        record = Record(RunFolder(tmp_path / place), steps[0] - 1, with_tensorboard=False)
        for step in steps:
            record.line("train", {"step": step})
        record.close()
    assert [line["step"] for line in read_metrics(again)] == [5, 6, 4, 5]
