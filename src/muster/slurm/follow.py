"""Following jobs to their end, and asking about them less and less often while nothing is new."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Callable, Collection
from typing import IO

from muster.base.clock import Rhythm
from muster.base.errors import SetupError
from muster.slurm.commands import cancel, elements_of, job_status
from muster.slurm.states import SQUEUE, Elements, JobStatus, never_starts, read_squeue

_LIMIT_S = 30.0
#: A day of waiting is about 1,450 questions; a site's controller serves thousands of users.
_SOON_S, _SELDOM_S = 1.0, 60.0
_LOOK_S = 0.2


class JobWatch:
    """Asks for all array jobs of a run in one call, without waiting for the answer."""

    def __init__(self, now: float) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes] | None = None
        self._asked_s = 0.0
        self._last: Elements | None = None
        # Each pause is as long as all of the silence before it, so pauses double.
        self._rhythm = Rhythm(now, least_s=_SOON_S, most_s=_SELDOM_S, share=1.0)

    @property
    def due_s(self) -> float:
        return self._rhythm.due_s

    def look(self, now: float, jobs: Collection[int]) -> tuple[float, Elements] | None:
        """The time when SLURM was asked, and its answer; None while there is no new one.

        Without ``jobs`` SLURM is not asked.
        """
        if self._process is None:
            if now >= self.due_s:
                self._ask(now, jobs)
            return None
        code = self._process.poll()
        if code is None:
            self._rhythm.due_s = now + 0.02
            if now - self._asked_s > _LIMIT_S:
                self._process.kill()
            return None
        assert self._output is not None
        self._output.seek(0)
        text = self._output.read().decode("utf-8", "replace")
        self._forget()
        # squeue fails when it has forgotten the only job that it was asked for.
        is_answer = code == 0 or "Invalid job id" in text
        found = read_squeue(text) if is_answer else None
        if found is not None and found != self._last:
            self._last = found
            self._rhythm.happened(now)
        self._rhythm.looked(now)
        return None if found is None else (self._asked_s, found)

    def hurry(self, now: float) -> None:
        """Ask again at once: something has changed, and more is expected to."""
        self._rhythm.happened(now)
        self._rhythm.due_s = now

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._forget()

    def _ask(self, now: float, jobs: Collection[int]) -> None:
        if not jobs:
            self._rhythm.due_s = now + _SOON_S
            return
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the answer)
        self._process = subprocess.Popen(
            [*SQUEUE, f"--jobs={','.join(map(str, sorted(jobs)))}"],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
        )
        self._asked_s = now
        self._rhythm.due_s = now + 0.02

    def _forget(self) -> None:
        if self._output is not None:
            self._output.close()
        self._process = self._output = None


def follow_job(job_id: str, read_log: Callable[[], None], say: Callable[[str], None]) -> JobStatus:
    """Stay with a gang's job to its end, which is returned.

    ``read_log`` is called often; ``say`` is told what becomes of the job. A KeyboardInterrupt
    leaves the job as it is. Raises SetupError where SLURM does not answer at first, and where the
    job can never start, which is then cancelled.
    """
    status, told, is_certain = job_status(job_id), "", False
    # A pause is a twentieth of the time so far: whoever watches learns of the end with 5 % delay.
    rhythm = Rhythm(time.monotonic(), least_s=_SOON_S, most_s=_SELDOM_S)
    while True:
        if (now := _news(status)) != told:
            say(f"job {job_id}: {now}")
            told = now
        if not status.is_alive and is_certain:
            return status
        # A job on its way back into the queue may look as if it had ended: two answers must agree.
        is_certain = not status.is_alive
        rhythm.looked(time.monotonic())
        while time.monotonic() < rhythm.due_s:
            time.sleep(_LOOK_S)
            read_log()
        before = status
        try:
            status = job_status(job_id)
        except SetupError:  # a controller that restarts; the job does not mind
            continue
        is_same = status.state == "PENDING" and status[:3] == before[:3]
        if is_same and (error := never_starts(job_id, status.reason)) is not None:
            cancel(job_id)
            raise error


def _news(status: JobStatus) -> str:
    again = f", started again {status.restarts}×" if status.restarts else ""
    if status.state == "PENDING":
        return f"PENDING ({status.reason or 'no reason given'}){again}"
    on = f" on {status.nodes}" if status.state == "RUNNING" and status.nodes else ""
    return f"{status.state}{on}{again}"


def end_all(name: str, *, patience_s: float, limit_s: float) -> None:
    """Wait until no job of this name is left; what has not ended after ``patience_s`` is cancelled.

    Elements that wait in the queue are cancelled at once. Gives up after ``limit_s``: a pilot ends
    of itself when its run is closed.
    """
    began = time.monotonic()
    while time.monotonic() - began < limit_s:
        try:
            there = {key: item for key, item in elements_of(name).items() if item.is_alive}
            if not there:
                return
            is_over = time.monotonic() - began > patience_s
            cancel(*(f"{a}_{n}" for (a, n), item in there.items() if item.waits or is_over))
        except SetupError:  # the controller may be busy or away for a moment
            time.sleep(1.0)
            continue
        time.sleep(min(2.0, max(0.1, (time.monotonic() - began) / 5)))
