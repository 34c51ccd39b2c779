"""Runs a probe as a child process that can neither hang the doctor nor outlive it.

A probe (`muster.doctor.probes.report`) prints one JSON object on standard output and, on standard
error, lines ``at: …`` before each thing that may hang. It runs in a session of its own, which is
killed whole at the limit, when it has been silent for too long, and when it has ended.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from muster.base.codec import decode
from muster.base.processes import KILL, signal_group
from muster.base.settings import child_environment
from muster.doctor.facts import Run

T = TypeVar("T")

_POLL_S = 0.02
#: A process in uninterruptible sleep (a dead disk, a dead GPU) cannot be killed: it is left.
_GOODBYE_S = 2.0
_TAIL_LINES, _TAIL_CHARS = 12, 1500
_PROGRESS = "at: "
PROBES = (sys.executable, "-m", "muster.doctor.probes.report")
#: Devices are numbered as the driver numbers them, so that both numbers mean the same card.
_SETTINGS = {"PYTHONUNBUFFERED": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a probe ended, and ``value``, its JSON object; {} where there is none.

    The last object counts that a probe prints, so that one that hangs later does not lose what it
    has measured.
    """

    run: Run
    value: dict[str, Any] = field(default_factory=dict)


def run_probe(
    name: str,
    arguments: Sequence[str],
    *,
    limit_s: float,
    silence_s: float | None = None,
    settings: Mapping[str, str] | None = None,
    hear: Callable[[str], None] | None = None,
    program: Sequence[str] = PROBES,
) -> Outcome:
    """Run the probe ``name`` for at most ``limit_s`` seconds; it raises nothing itself.

    ``silence_s``: also cut off after this long without a line of progress. ``settings``: variables
    on top of the environment. ``hear``: called in this process with each line of progress.
    ``program``: another program that follows the same conventions.
    """
    with tempfile.TemporaryDirectory(prefix="muster-doctor-", ignore_cleanup_errors=True) as here:
        out, error = Path(here) / "out", Path(here) / "error"
        began_s = time.monotonic()
        try:
            with out.open("wb") as out_file, error.open("wb") as error_file:
                process = subprocess.Popen(
                    [*program, name, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=out_file,
                    stderr=error_file,
                    # What a probe leaves in its own temporary folders goes with this one.
                    env=child_environment({**_SETTINGS, "TMPDIR": here, **(settings or {})}),
                    start_new_session=True,
                )
        except OSError as problem:
            return Outcome(run=Run(status="failed", error=str(problem)))
        is_hung = True
        try:
            is_hung = _watch(process, error, began_s + limit_s, silence_s, hear)
        finally:
            _end(process)
        run = _judge(process.returncode, is_hung, error, time.monotonic() - began_s)
        value = _last_object(out)
        if run.status == "ok" and value is None:
            run = Run(status="failed", seconds=run.seconds, error="it printed no result")
        return Outcome(run=run, value=value or {})


def _watch(
    process: subprocess.Popen[bytes],
    error: Path,
    deadline_s: float,
    silence_s: float | None,
    hear: Callable[[str], None] | None,
) -> bool:
    """Wait for the end; True when the deadline or too long a silence came first."""
    num_heard, heard_s = 0, time.monotonic()
    while process.poll() is None:
        now_s = time.monotonic()
        if now_s > deadline_s:
            return True
        places = _places(error)
        if len(places) > num_heard:
            for place in places[num_heard:] if hear else ():
                hear(place)  # type: ignore[misc]
            num_heard, heard_s = len(places), now_s
        elif silence_s is not None and num_heard and now_s - heard_s > silence_s:
            return True
        time.sleep(_POLL_S)
    return False


def _places(error: Path) -> list[str]:
    """The whole lines of progress so far."""
    lines = error.read_text(errors="replace").splitlines(keepends=True)
    whole = [line.rstrip("\n") for line in lines if line.endswith("\n")]
    return [line.removeprefix(_PROGRESS) for line in whole if line.startswith(_PROGRESS)]


def _end(process: subprocess.Popen[bytes]) -> None:
    # Also after a good end: a rank that the probe has left behind goes with its group.
    signal_group(process.pid, KILL)
    try:
        process.wait(_GOODBYE_S)
    except subprocess.TimeoutExpired:
        return


def _judge(code: int | None, is_hung: bool, error: Path, seconds: float) -> Run:
    lines = error.read_text(errors="replace").splitlines()
    places = _places(error)
    at = places[-1] if places else None
    rest = [line for line in lines if line.strip() and not line.startswith(_PROGRESS)]
    tail = "\n".join(rest[-_TAIL_LINES:])[-_TAIL_CHARS:]
    if is_hung:
        return Run(status="hung", seconds=seconds, at=at, error=tail or None)
    if code != 0:
        why = tail or (f"ended by signal {-code}" if code and code < 0 else f"exit code {code}")
        return Run(status="failed", seconds=seconds, at=at, error=why)
    return Run(status="ok", seconds=seconds)


def _last_object(out: Path) -> dict[str, Any] | None:
    for line in reversed(out.read_text(errors="replace").splitlines()):
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            return value
    return None


def read_answer(
    outcome: Outcome, otherwise: T, *, given: Mapping[str, Any] | None = None, **how: bool
) -> tuple[T, Run]:
    """Read the probe's answer as a value of ``otherwise``'s class, and say how the probe ran.

    ``given`` holds fields that the probe does not answer. An answer of another shape is a failure
    of the probe; ``otherwise`` is returned then.
    """
    try:
        return decode(type(otherwise), {**(given or {}), **outcome.value}, **how), outcome.run
    except ValueError as error:
        run = outcome.run
        if run.status == "ok":
            run = replace(run, status="failed", error=f"its answer makes no sense: {error}")
        return otherwise, run
