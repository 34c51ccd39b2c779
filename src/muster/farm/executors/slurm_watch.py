"""Watching and ending jobs with SLURM's own commands: squeue, scontrol and scancel."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Collection, Mapping
from typing import IO

from muster.base.errors import SetupError
from muster.farm.executors.mailbox import PilotBox
from muster.farm.executors.slurm_states import SQUEUE, Element, read_squeue, was_preempted
from muster.slurm.commands import no_answer

_LIMIT_S = 30.0
#: How long to wait before asking again: twice as long each time that nothing is new. Who waits
#: for a day asks about 1,450 times; a site's controller serves thousands of such.
_SOON_S, _SELDOM_S = 1.0, 60.0

Elements = Mapping[tuple[int, int], Element]


class JobWatch:
    """Asks for the jobs of a run, all in one call, without waiting for the answer."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes] | None = None
        self._asked_s = 0.0
        self._pause_s = _SOON_S
        self._last: Elements | None = None
        self.due_s = 0.0

    def look(self, now: float, jobs: Collection[int]) -> tuple[float, Elements] | None:
        """When the answer that has come was asked for, and the answer; None: there is none.

        Without ``jobs`` nobody is asked.
        """
        if self._process is None:
            if now >= self.due_s:
                self._ask(now, jobs)
            return None
        code = self._process.poll()
        if code is None:
            self.due_s = now + 0.02
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
        is_news = found is not None and found != self._last
        self._pause_s = _SOON_S if is_news else min(2 * self._pause_s, _SELDOM_S)
        self._last = found if found is not None else self._last
        self.due_s = now + self._pause_s
        return None if found is None else (self._asked_s, found)

    def hurry(self, now: float) -> None:
        """Something has changed, and more is expected to."""
        self._pause_s = _SOON_S / 2
        self.due_s = min(self.due_s, now)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._forget()

    def _ask(self, now: float, jobs: Collection[int]) -> None:
        if not jobs:
            self.due_s = now + _SOON_S
            return
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the answer)
        self._process = subprocess.Popen(
            [*SQUEUE, f"--jobs={','.join(map(str, sorted(jobs)))}"],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
        )
        self._asked_s = now
        self.due_s = now + 0.02

    def _forget(self) -> None:
        if self._output is not None:
            self._output.close()
        self._process = self._output = None


def elements_now(name: str) -> Elements:
    """The elements of all jobs of this name; waits for the answer.

    Raises SetupError where SLURM cannot be asked.
    """
    command = [*SQUEUE, f"--name={name}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S)
    except FileNotFoundError:
        raise SetupError(
            "SLURM is not here: there is no command squeue.",
            hint="run this on a login node of the cluster, or without --on slurm.",
        ) from None
    except subprocess.TimeoutExpired:
        raise no_answer(f"squeue has waited for {_LIMIT_S:g} s", "squeue") from None
    if done.returncode:
        raise no_answer(done.stderr, "squeue")
    return read_squeue(done.stdout)


def may_serve(box: PilotBox, found: Elements) -> bool:
    """Whether the pilot of this box may be at work, by what SLURM shows of its element."""
    element = found.get((box.job_id, box.slot_id))
    if element is None or not element.is_there or element.restarts > box.restart:
        return False
    return not box.is_over  # what is at its end is still shown


def preempted(job: str) -> bool:
    """Whether SLURM knows of a preemption of this job; False when it does not answer."""
    try:
        done = subprocess.run(
            ["scontrol", "show", "job", job], capture_output=True, text=True, timeout=5.0
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return was_preempted(done.stdout)


def cancel(jobs: Collection[str]) -> None:
    """End these jobs, such as ``812_3``; those that have ended are no error."""
    if jobs:
        subprocess.run(["scancel", "--quiet", *sorted(jobs)], capture_output=True, timeout=_LIMIT_S)


def end_all(name: str, *, patience_s: float, limit_s: float) -> None:
    """Wait until no job of this name is left; what has not ended after ``patience_s`` is cancelled.

    Elements that wait in the queue are cancelled at once. Gives up after ``limit_s``: a pilot ends
    of itself when its run is closed.
    """
    began = time.monotonic()
    while time.monotonic() - began < limit_s:
        try:
            found = elements_now(name)
        except SetupError:  # the controller may be busy or away for a moment
            time.sleep(1.0)
            continue
        there = {key: item for key, item in found.items() if item.is_there}
        if not there:
            return
        is_over = time.monotonic() - began > patience_s
        cancel([f"{a}_{n}" for (a, n), item in there.items() if item.waits or is_over])
        time.sleep(min(2.0, max(0.1, (time.monotonic() - began) / 5)))
