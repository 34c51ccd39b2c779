"""What a tracker is given, and what it is asked: the seam between a run and W&B, MLflow, ….

All of this happens in a process of its own, see `muster.api.trackers.guard`. At the end are the
names of metrics as trackers take them. Each has its own, so that it can be turned back: whatever a
tracker does not take becomes ``-x`` with the character's code and another ``-``, as in
``loss-xb2-`` for ``loss²``. A dash before an x is replaced as well.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from muster.base.errors import TargetError, UnknownNameError, UsageError, how_to_install
from muster.base.modules import check_plugin, load_plugin, plugins
from muster.base.settings import variable

#: How what is tracked has ended; "stopped": it goes on when the run is resumed.
Ending = Literal["done", "failed", "stopped"]
#: Where the tracker's user names no project or experiment.
PROJECT = "muster"
#: What names may have that only have to be shown; no event or row holds a lone surrogate.
PRINTABLE = re.compile(r"[^\x00-\x1f\x7f\ud800-\udfff]")
_PIECE = re.compile(r"-x([0-9a-f]+)-")


class Point(NamedTuple):
    """One number that was logged; ``time_s`` is in seconds since 1970. ``attempt`` grows with every
    attempt, which may log the steps of the one before again."""

    name: str
    step: int
    time_s: float
    value: float
    attempt: int = 0


def rows_of(points: Iterable[Point]) -> Iterator[tuple[int, float, dict[str, float]]]:
    """Step, time and values by name: points of one step that follow each other are one row. Where
    a metric has the step again, another row begins.

    >>> points = [Point("a", 1, 0.0, 5.0), Point("b", 1, 0.0, 6.0), Point("a", 1, 0.0, 7.0)]
    >>> list(rows_of(points))
    [(1, 0.0, {'a': 5.0, 'b': 6.0}), (1, 0.0, {'a': 7.0})]
    """
    row: dict[str, float] = {}
    step, time_s = 0, 0.0
    for point in points:
        if row and (point.step != step or point.name in row):
            yield step, time_s, row
            row = {}
        if not row:
            step, time_s = point.step, point.time_s
        row[point.name] = point.value
    if row:
        yield step, time_s, row


@dataclass(frozen=True, kw_only=True)
class Tracked:
    """What becomes one run of a tracker: a task of a sweep, or a whole map or training.

    ``id`` is the same in every session, and another one in a copy of the run folder. ``folder``:
    the part of a file name that belongs to it, empty for a whole run. ``tags`` are facts such as
    the version of muster.
    """

    id: str
    name: str
    group: str
    folder: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How it has ended, with what it has returned, at ``time_s`` (0: not known)."""

    state: Ending
    result: Mapping[str, Any] = field(default_factory=dict)
    time_s: float = 0.0


class TrackerRun(Protocol):
    """One run in a tracker, open to be written.

    ``last_steps``: of every metric that the tracker had when the run was opened the last step, as
    far as the tracker can tell. Any method may raise what the tracker's library raises: then the
    process ends, and the next one begins where the last accepted batch ended.
    """

    last_steps: Mapping[str, int]

    def log(self, points: Sequence[Point]) -> None:
        """Hand points over; they are sorted by step."""

    def settle(self) -> None:
        """Return when the tracker has accepted all that was logged."""

    def finish(self, ended: Ended) -> None:
        """Say how it has ended; it may be opened again and go on."""

    def leave(self) -> None:
        """Put it aside: others are written now."""


class Tracker(Protocol):
    """A tracker's library. ``most_open``: how many runs of it may be open at a time."""

    most_open: int

    def open(self, tracked: Tracked) -> TrackerRun: ...


class Place(NamedTuple):
    """Where trackers keep what stays on this machine: in the run folder."""

    trackers: Path
    tensorboard: Path


class _Row(NamedTuple):
    package: str  # which is also the name of the extra
    make: str


TRACKERS = {
    "tensorboard": _Row("tensorboard", "muster.api.trackers.to_tensorboard:TensorBoard"),
    "wandb": _Row("wandb", "muster.api.trackers.to_wandb:Wandb"),
    "mlflow": _Row("mlflow", "muster.api.trackers.to_mlflow:MLflow"),
    "trackio": _Row("trackio", "muster.api.trackers.to_trackio:Trackio"),
}


def read_trackers(text: str, flag: str) -> tuple[str, ...]:
    """The names in ``wandb,mlflow``, each once; none for an empty text or "none".

    Raises UnknownNameError for an unknown tracker.
    """
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if names == ("none",):
        return ()
    for name in names:
        if name not in TRACKERS and name not in plugins("tracker"):
            raise UnknownNameError(f"tracker of {flag}", name, {*TRACKERS, *plugins("tracker")})
    return names


def check_installed(names: Collection[str]) -> None:
    """UsageError for a tracker whose package is not installed; nothing is imported."""
    for name in names:
        if name not in TRACKERS:
            _check_plugin(name)
            continue
        package = TRACKERS[name].package
        if importlib.util.find_spec(package) is None:
            raise UsageError(
                f"--log-to {name} needs the package {package}, which is not installed.",
                hint=f"{how_to_install(name)}. Nothing was started.",
            )
    has_no_server = "mlflow" in names and not variable("MLFLOW_TRACKING_URI")
    if has_no_server and importlib.util.find_spec("sqlalchemy") is None:  # mlflow-skinny
        raise UsageError(
            "--log-to mlflow without a server needs the whole package mlflow.",
            hint="set MLFLOW_TRACKING_URI, or: pip install mlflow. Nothing was started.",
        )


def make_tracker(name: str, place: Place) -> Tracker:
    """The tracker called ``name``; TargetError for one of a package that is none."""
    if name in TRACKERS:
        module, _, attribute = TRACKERS[name].make.partition(":")
        tracker: Tracker = getattr(importlib.import_module(module), attribute)(place)
        return tracker
    _check_plugin(name)
    tracker = load_plugin("tracker", name)(place)
    if not callable(getattr(tracker, "open", None)) or not hasattr(tracker, "most_open"):
        raise TargetError(
            f"The tracker {name} has no open or no most_open.",
            hint="muster.trackers.Tracker says what a tracker is asked for.",
        )
    return tracker


def _check_plugin(name: str) -> None:
    if name not in plugins("tracker"):  # it may have been uninstalled since the run began
        raise UnknownNameError("tracker", name, {*TRACKERS, *plugins("tracker")})
    check_plugin("tracker", name)


def to_tracker(name: str, allowed: re.Pattern[str], *, taken: frozenset[str] = frozenset()) -> str:
    """``name`` in the characters that ``allowed`` matches one by one; ``taken``: the tracker's own.

    >>> to_tracker("loss²", re.compile("[a-z0-9_]"))
    'loss-xb2-'
    >>> to_tracker("step", re.compile("[a-z]"), taken=frozenset({"step"}))
    'ste-x70-'
    """
    if not name:
        return "-x-"
    following = [*name[1:], ""]
    mapped = "".join(
        character
        if (character == "-" and after != "x")
        or (character != "-" and allowed.fullmatch(character))
        else _piece(character)
        for character, after in zip(name, following, strict=True)
    )
    return mapped[:-1] + _piece(mapped[-1]) if mapped in taken else mapped


def from_tracker(mapped: str) -> str:
    """The name that `to_tracker` was given.

    >>> from_tracker("loss-xb2-")
    'loss²'
    """
    if mapped == "-x-":
        return ""
    return _PIECE.sub(lambda match: chr(int(match[1], 16)), mapped)


def as_utf8(value: object) -> str:
    """A value as a text that UTF-8 can hold, whatever a file name or a program has in it."""
    return str(value).encode("utf-8", "backslashreplace").decode()


def escape_first(mapped: str) -> str:
    """For a name whose first character has a meaning to the tracker.

    >>> from_tracker(escape_first("_step"))
    '_step'
    """
    return _piece(mapped[0]) + mapped[1:]


def _piece(character: str) -> str:
    return f"-x{ord(character):x}-"
