"""The recorder beside a run: it samples, and whatever becomes of it the run goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from muster.base.clock import SystemClock
from muster.base.errors import SetupError
from muster.devices.nvml_usage import GpuUsage, UsageSource
from muster.monitor import recorder
from muster.monitor.files import read_rows
from muster.monitor.recorder import Recorder
from muster.monitor.sample import Sampler
from muster.monitor.sinks import open_sink


class Scripted:
    """A source of GPU figures at the edge, where the driver is."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act

    def read(self, *, quick: bool = False) -> tuple[GpuUsage, ...]:
        self._act()
        return ()


def recorder_of(source: UsageSource, path: Path, said: list[str]) -> Recorder:
    clock = SystemClock()
    return Recorder(
        lambda: Sampler(source, clock), lambda: open_sink(path), 0.05, clock, said.append
    )


def test_it_samples_and_ends_with_a_last_one(tmp_path: Path) -> None:
    seen = threading.Semaphore(0)
    said: list[str] = []
    with recorder_of(Scripted(seen.release), tmp_path / "a.csv", said):
        for _ in range(3):
            seen.acquire()
    rows = list(read_rows(tmp_path / "a.csv"))
    assert len(rows) >= 4
    assert said == []


def test_an_error_is_said_once_and_ends_the_recording_only(tmp_path: Path) -> None:
    said: list[str] = []

    def fail() -> None:
        raise SetupError("the facts are gone")

    with recorder_of(Scripted(fail), tmp_path / "a.csv", said) as running:
        running._thread.join()
    assert said == ["no samples are recorded from here on: the facts are gone"]


def test_a_driver_that_never_answers_does_not_hold_up_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "_PATIENCE_S", 0.05)
    began, answer = threading.Event(), threading.Event()

    def hang() -> None:
        began.set()
        answer.wait()

    with recorder_of(Scripted(hang), tmp_path / "a.csv", []) as running:
        began.wait()
    assert running._thread.is_alive()
    answer.set()
    running._thread.join()
