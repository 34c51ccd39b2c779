"""What a screen is told about the time left: only workers that are there will do the work."""

from __future__ import annotations

import pytest
from tests.unit.farm.test_decide import Rig, cpus, tasks

from muster.farm.decisions import Decisions
from muster.farm.events import Progress, WorkerReady
from muster.farm.view import Interval, Picture, RunView, WorkerLine, eta_text, left_text


@pytest.mark.parametrize(
    ("num_slots", "num_at_work"), [(1, 1), (4, 4), (4, 1), (1000, 3), (1000, 400), (50, 0)]
)
def test_the_time_left_counts_workers_that_take_tasks(num_slots: int, num_at_work: int) -> None:
    """Tasks of 5 s each, 1,200 of them: the pilots that wait in the queue shorten nothing."""
    rig = Rig(cpus(num_slots), tasks(1200))
    at_work = list(rig.holds)[:num_at_work]
    picture = Picture("run", 1200, 0.0)
    rig.step(*(WorkerReady(worker_id, 100 + worker_id) for worker_id in at_work))
    num_done = max(60, num_at_work) if at_work else 0
    for n in range(num_done):
        picture.note([], rig.end(at_work[n % num_at_work]), rig.now)
    view = picture.view(rig.scheduler, rig.now, "running")
    if not num_at_work:
        assert view.eta is None and left_text(view) == ""
        return
    assert view.eta is not None
    assert view.eta.low_s >= 0.9 * 5.0 * (1200 - num_done) / num_at_work
    suffix = "" if num_at_work == num_slots else f" with {num_at_work} of {num_slots:,} workers"
    assert left_text(view) == eta_text(view.eta) + suffix


def test_slots_that_are_off_are_not_waited_for() -> None:
    states = ["running", "idle", "starting", "off", "quarantined"]
    lines = tuple(WorkerLine(f"cpu/{n}", s, "", None, None, "", 0) for n, s in enumerate(states))
    view = RunView("run", 9, 1, 0, 0, 1, 0, 1.0, None, Interval(60.0, 120.0), "running", lines, ())
    assert left_text(view) == "left 1 min 00 s to 2 min 00 s with 2 of 3 workers"


def test_what_an_adopted_worker_had_done_before_does_not_count_again() -> None:
    """Rows of a map that its earlier start has counted; the sums of a worker know of no start."""
    rig = Rig(cpus(2), tasks(2))
    picture = Picture("run", 2, 0.0)
    picture.adopt([1])

    def sums(*told: tuple[int, float]) -> float:
        events = [Progress(worker, 1, "", {"records": num}) for worker, num in told]
        picture.note(events, Decisions(), 0.0)
        return picture.view(rig.scheduler, 0.0, "running").numbers["records"]

    assert sums((1, 70.0), (2, 5.0)) == 5.0
    assert sums((1, 90.0), (2, 6.0)) == 26.0
