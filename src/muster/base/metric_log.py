"""``muster.log``: a program records numbers, wherever it runs.

In a function of a sweep they go to the task at work; in a training to its record; in a command of
a sweep, and in rank 0 of ``muster run``, to the file that ``MUSTER_METRICS`` names; elsewhere
nowhere.
"""

from __future__ import annotations

import json
import operator
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from muster.base.errors import TargetError
from muster.base.settings import kept_environment, variable

#: The environment variable with the file to which a program appends.
METRICS_FILE = "MUSTER_METRICS"
#: Of a line: seconds since 1970, and which process has written it, where an older muster wrote it.
#: A line with nothing but a process is a mark: from there on another start of the program writes.
#: Metrics have other names.
TIME, PROCESS = "_time", "_process"
_MARK = re.compile(rb'\s*\{"_process": "[0-9.]+"\}\s*')
#: The end of the year 9999, beyond which no library has dates.
LATEST_S = 253_402_300_799.0

_at_work: Callable[..., None] | None = None
_of_programs: Callable[[], str] | None = None  # makes the file of what it starts
_open: tuple[str, int, int] | None = None  # name, process, descriptor


def log(step: int, **metrics: Any) -> None:
    """Record numbers of this step, such as ``muster.log(epoch, loss=0.3, accuracy=0.9)``.

    It works in functions and programs of ``muster sweep`` and in rank 0 of ``muster run`` and
    ``muster train``, and does nothing elsewhere, so that a program runs the same without Muster.
    `muster metrics` shows what was recorded.

    A number is a bool, int or float, or a NumPy scalar or tensor without dimensions. Raises
    TargetError for other values.
    """
    if _at_work is not None:
        _at_work(step, **metrics)
        return
    name = variable(METRICS_FILE)
    if not name or variable("RANK") not in (None, "", "0"):
        return
    values = {key: as_number(key, value) for key, value in metrics.items()}
    line = {"step": as_step(step), TIME: time.time(), **values}
    os.write(_file(name), json.dumps(line).encode() + b"\n")  # at once, so that lines do not mix


def is_logging() -> bool:
    """Whether something takes what ``log`` gets in this process."""
    return _at_work is not None


class logging_to:
    """Have ``log`` call ``sink`` meanwhile, in all threads of this process. ``of_programs`` is
    asked for the file to which programs append that belong to what is at work here.
    """

    __slots__ = ("_before", "_now")

    def __init__(
        self, sink: Callable[..., None], of_programs: Callable[[], str] | None = None
    ) -> None:
        self._now = (sink, of_programs)

    def __enter__(self) -> None:
        global _at_work, _of_programs
        self._before, (_at_work, _of_programs) = (_at_work, _of_programs), self._now

    def __exit__(self, *_: object) -> None:
        global _at_work, _of_programs
        _at_work, _of_programs = self._before


@contextmanager
def in_task() -> Iterator[None]:
    """What trainings log that this process does or starts meanwhile is logged by the task of a
    sweep that is at work here, if one is."""
    if _of_programs is None:
        yield
        return
    with kept_environment({METRICS_FILE: _of_programs()}):
        yield


def _file(name: str) -> int:
    global _open
    if _open is None or _open[:2] != (name, os.getpid()):
        handle = os.open(name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        _open = (name, os.getpid(), handle)
    return _open[2]


def mark_start(path: Path) -> None:
    """Say in a file of lines that a program is started again, which may write the same steps.

    What it writes replaces, metric by metric, all from the first step that it logs.
    """
    with suppress(FileNotFoundError):  # it has written nothing yet
        handle = os.open(path, os.O_WRONLY | os.O_APPEND)
        try:  # the line before may be torn
            rest = memoryview(b'\n{"%s": "%.6f"}\n' % (PROCESS.encode(), time.time()))
            while rest:  # a full disk may take a part of it
                rest = rest[os.write(handle, rest) :]
        finally:
            os.close(handle)


def is_mark(line: bytes) -> bool:
    """Whether `mark_start` has written this line."""
    return _MARK.fullmatch(line) is not None


def as_step(step: object) -> int:
    """``step`` as an int of 64 bits. Raises TargetError for what is no whole number."""
    try:
        number = operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        raise TargetError(
            f"log: the step must be a whole number, not {step!r} ({type(step).__name__})."
        ) from None
    if not -(2**63) <= number < 2**63:
        raise TargetError(f"log: the step {number} does not fit into 64 bits.")
    return number


def step_of_line(step: object) -> int:
    """`as_step` of a line, in which some languages write 3.0."""
    return as_step(int(step) if isinstance(step, float) and step.is_integer() else step)


def as_number(name: str, value: Any) -> float:
    """``value`` as a float; a number, or an array or tensor that is one number and has no shape.

    Raises TargetError, with the metric's name and the type of the value, for anything else.
    """
    if name == PROCESS:
        raise TargetError(f"log: no metric is called {PROCESS}, as Muster uses this name itself.")
    try:
        if isinstance(value, float | int):  # a bool is an int
            return float(value)
        if getattr(value, "shape", None) == () and hasattr(value, "item"):
            item = value.item()
            if isinstance(item, float | int):
                return float(item)
    except OverflowError:
        raise TargetError(f"log: {name} is an integer beyond what a float holds.") from None
    shape = getattr(value, "shape", None)
    of_shape = f" of shape {tuple(shape)}" if isinstance(shape, tuple) and shape else ""
    raise TargetError(
        f"log: {name} is a {type(value).__name__}{of_shape}, which is not a number.",
        hint="log numbers: bool, int, float, or a NumPy scalar or tensor without dimensions.",
    )


def read_line(line: bytes, number: int) -> tuple[int, float | None, dict[str, float]] | None:
    """Step, time and numbers of a line that a program has written; None where it is no JSON object.

    A line without a step gets ``number``. What is no number is left out.
    """
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return numbers_of(found, number) if isinstance(found, Mapping) else None


def numbers_of(
    found: Mapping[str, Any], number: int
) -> tuple[int, float | None, dict[str, float]] | None:
    """The same of a line that has been read; None where its step or a number cannot be held.

    The lines of a training have a kind, which names their metrics, as in ``train/loss``.
    """
    step, time_s, kind = found.get("step", number), found.get(TIME), found.get("kind")
    front = f"{kind}/" if isinstance(kind, str) else ""
    try:
        numbers = {
            f"{front}{name}": float(value)
            for name, value in found.items()
            if isinstance(value, float | int) and name not in ("step", TIME, PROCESS)
        }
        written_s = float(time_s) if isinstance(time_s, float | int) else None
        return step_of_line(step), written_s, numbers
    except (OverflowError, TargetError):
        return None
