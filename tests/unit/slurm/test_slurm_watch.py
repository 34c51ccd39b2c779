"""How often SLURM is asked, and about which jobs: a squeue that counts, a clock that jumps."""

from __future__ import annotations

import time
from collections.abc import Collection
from itertools import pairwise
from pathlib import Path

import pytest

from muster.slurm.follow import JobWatch
from muster.slurm.states import JobStatus

_HOUR_S = 3600.0


class Squeue:
    """A program called squeue, first on PATH: it writes its arguments down and prints a file."""

    def __init__(self, folder: Path) -> None:
        self.shown, self._asked = folder / "shown", folder / "asked"
        self.show("7_0 PENDING 0 Priority")
        path = folder / "squeue"
        path.write_text(f'#!/bin/sh\necho "$@" >> {self._asked}\ncat {self.shown}\n')
        path.chmod(0o755)

    def show(self, *lines: str) -> None:
        self.shown.write_text("".join(f"{line}\n" for line in lines))

    @property
    def asked(self) -> list[str]:
        return self._asked.read_text().splitlines() if self._asked.exists() else []


@pytest.fixture
def squeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Squeue:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return Squeue(tmp_path)


def wait(
    watch: JobWatch, begin_s: float, end_s: float, jobs: Collection[int] = (7,)
) -> list[tuple[float, dict[tuple[int, int], JobStatus]]]:
    """Look whenever it is due, from one time of the clock to another; what was answered, when."""
    now, answers = begin_s, []
    while now < end_s:
        if (answer := watch.look(now, jobs)) is not None:
            answers.append((now, dict(answer[1])))
        elif watch.due_s <= now + 0.1:  # it is asked right now, which takes real time
            time.sleep(0.001)
        if watch.due_s > now + 0.1:
            now = watch.due_s
    return answers


def test_who_waits_for_hours_asks_once_a_minute(squeue: Squeue) -> None:
    watch = JobWatch(0.0)
    answers = wait(watch, 0.0, 2 * _HOUR_S)
    watch.close()
    assert len(squeue.asked) <= 2 * 60 + 10
    assert {tuple(found) for _, found in answers} == {((7, 0),)}
    pauses = [late - early for (early, _), (late, _) in pairwise(answers)]
    assert pauses[0] <= 1.1 and max(pauses) <= 60.1
    assert all(late <= 2.1 * max(early, 0.5) for early, late in pairwise(pauses))


@pytest.mark.thorough
def test_a_day_in_the_queue_costs_at_most_1500_questions(squeue: Squeue) -> None:
    watch = JobWatch(0.0)
    wait(watch, 0.0, 24 * _HOUR_S)
    watch.close()
    assert 1400 <= len(squeue.asked) <= 1500


def test_only_the_jobs_of_the_run_are_asked_for(squeue: Squeue) -> None:
    watch = JobWatch(0.0)
    wait(watch, 0.0, 3.0, {12, 7})
    wait(watch, 3.0, 100.0, ())
    watch.close()
    assert squeue.asked
    for line in squeue.asked:
        assert line.split()[-1] == "--jobs=7,12" and "--name" not in line


def test_news_make_it_ask_soon_again(squeue: Squeue) -> None:
    watch = JobWatch(0.0)
    wait(watch, 0.0, 1000.0)
    squeue.show("7_0 RUNNING 0 None")
    answers = wait(watch, 1000.0, 1100.0)
    watch.close()
    [since] = [n for n, (_, found) in enumerate(answers) if found[7, 0].state == "RUNNING"][:1]
    assert answers[since + 1][0] - answers[since][0] <= 1.1


def test_what_a_mailbox_tells_is_looked_into_at_once(squeue: Squeue) -> None:
    watch = JobWatch(0.0)
    wait(watch, 0.0, 1000.0)
    before = len(squeue.asked)
    watch.hurry(1000.0)
    wait(watch, 1000.0, 1001.0)
    watch.close()
    assert len(squeue.asked) > before


def test_a_job_that_squeue_has_forgotten_is_an_answer(squeue: Squeue) -> None:
    path = squeue.shown.parent / "squeue"
    path.write_text(
        "#!/bin/sh\necho 'slurm_load_jobs error: Invalid job id specified' >&2\nexit 1\n"
    )
    watch = JobWatch(0.0)
    answers = wait(watch, 0.0, 2.0)
    watch.close()
    assert answers and all(found == {} for _, found in answers)


def test_a_controller_that_is_away_is_no_answer(squeue: Squeue) -> None:
    path = squeue.shown.parent / "squeue"
    path.write_text("#!/bin/sh\necho 'Unable to contact slurm controller' >&2\nexit 1\n")
    watch = JobWatch(0.0)
    assert wait(watch, 0.0, 10.0) == []
    watch.close()
