"""The peak of a task's memory: measured anew for each, and not measured at all where none came."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from muster.farm.worker.memory import Peak, can_watch, wait_for

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="the kernel cannot forget a peak"
)
_MIB = 2**20


def _of(peak: Peak, num_mib: int) -> float:
    """The peak of a task that fills so much memory and gives it back."""
    peak.begin()
    block = b"1" * (num_mib * _MIB)
    del block
    return _mib(peak)


def _mib(peak: Peak) -> float:
    found, on_device = peak.mib()
    assert found is not None and not on_device
    return found


def test_memory_that_was_given_back_counts_for_its_own_task_alone() -> None:
    peak = Peak()
    before, large, after = _of(peak, 0), _of(peak, 96), _of(peak, 0)
    assert large > before + 95
    assert after < before + 16


def test_memory_that_goes_between_two_tasks_does_not_count_for_the_second() -> None:
    peak = Peak()
    peak.begin()
    block = b"1" * (96 * _MIB)
    large = _mib(peak)
    del block  # as what a task has returned does, once it is sent
    for num_mib in (0, 8):
        assert _of(peak, num_mib) < large - 64


def test_a_task_that_gets_no_memory_has_what_the_kernel_says() -> None:
    peak = Peak()
    for _ in range(20):
        peak.begin()
        found = _mib(peak)
    lines = Path("/proc/self/status").read_text().splitlines()
    [highest] = [int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM")]
    assert abs(found - highest) < 1


def test_a_task_that_takes_the_descriptors_of_others_spoils_no_result() -> None:
    peak = Peak()
    assert peak._size is not None
    with Path("/dev/null").open() as other:
        os.dup2(other.fileno(), peak._size)
    small = _of(peak, 0)
    assert 0 < small and _of(peak, 96) > small


def test_a_task_of_no_time_has_what_it_began_with() -> None:
    peak = Peak()
    peak.begin()
    before = _mib(peak)
    peak.begin()
    block = b"1" * (96 * _MIB)  # as no task can in that time
    found, _ = peak.mib(seconds=1e-5)
    assert block and found is not None and found < before + 16


def test_what_a_task_of_no_time_took_is_not_charged_to_the_next() -> None:
    peak = Peak()
    small = _of(peak, 0)
    peak.begin()
    block = b"1" * (96 * _MIB)
    del block
    peak.mib(seconds=1e-5)
    assert _of(peak, 0) < small + 16


def _never() -> None:
    raise AssertionError("it can be watched")


@pytest.mark.skipif(not can_watch(), reason="nobody tells of the end of a program")
def test_something_is_done_while_a_program_runs_() -> None:
    calls: list[float] = []
    pid = os.posix_spawnp("sleep", ["sleep", "1.4"], os.environ)
    status, peak = wait_for(pid, lambda: calls.append(time.monotonic()), _never)
    assert status == 0
    assert peak is not None and peak > 0
    assert 1 <= len(calls) <= 2, "twice a second"


@pytest.mark.skipif(not can_watch(), reason="nobody tells of the end of a program")
def test_a_program_is_waited_for_where_no_descriptor_is_left() -> None:
    import resource

    calls: list[str] = []
    pid = os.posix_spawnp("sleep", ["sleep", "0.1"], os.environ)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        status, _ = wait_for(pid, _never, lambda: calls.append("unwatched"))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (status, calls) == (0, ["unwatched"])
