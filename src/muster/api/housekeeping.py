"""What is done beside the loop of a sweep: requests to end, its status file, exports, packing, and
the rehearsal of what a recipe makes of the results.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

from muster.api.lending import Lending
from muster.api.options import SweepOptions
from muster.api.placing import PerGpuAuto
from muster.api.recipe import MapRecipe, Recipe
from muster.base.atomic_files import write_atomic
from muster.base.clock import Clock
from muster.base.codec import check_storable
from muster.base.errors import MusterError, NotTried, TargetError, cause_of
from muster.base.settings import Settings, child_environment
from muster.base.signals import Requests
from muster.farm.events import Event
from muster.farm.plan import Request
from muster.farm.task import SlotSpec
from muster.farm.view import RunView
from muster.run.folder import RunFolder
from muster.run.requests import Ask
from muster.run.session import Session

_STATUS_EVERY_S = 1.0


def write_status(folder: RunFolder, view: RunView) -> None:
    """Compact, and without a look at each value: with thousands of workers it is a megabyte."""
    record = {**view._asdict(), "workers": [line._asdict() for line in view.workers]}
    write_atomic(folder.status_json, json.dumps(record).encode())


class Housekeeping:
    """A context: inside it the first request to end drains and the second stops."""

    def __init__(
        self,
        folder: RunFolder,
        session: Session,
        options: SweepOptions,
        settings: Settings,
        slots: tuple[SlotSpec, ...],
        clock: Clock,
        signals: Requests,
        rehearsal: Rehearsal | None = None,
        lending: Lending | None = None,
    ) -> None:
        self.folder = folder
        self.session = session
        self.settings = settings
        self.slots = slots
        self.clock = clock
        self._interval_s = options.export_interval_s
        self._signals = signals
        self._rehearsal = rehearsal
        self._lending = lending
        self._for_devices: list[Ask] = []
        self._is_draining = False
        self._context = ExitStack()
        self._status_due_s = 0.0
        self._export_due_s = clock.monotonic_s() + self._interval_s
        self._exporter: subprocess.Popen[bytes] | None = None
        is_packing = options.per_gpu == "auto" and any(slot.devices for slot in slots)
        self._packing = PerGpuAuto(settings, slots) if is_packing else None

    def __enter__(self) -> Self:
        self._context.enter_context(self._signals.watched())
        return self

    def __exit__(self, *_: object) -> None:
        self._context.close()
        self.folder.status_json.unlink(missing_ok=True)
        if self._exporter is not None:
            self._exporter.wait()

    def requests(self) -> list[Request]:
        """What signals have asked for since the last turn. Called every turn, so it is cheap."""
        if not self._signals.heard:
            return []
        requests = []
        for _ in self._signals.take():
            requests.append(Request.STOP if self._is_draining else Request.DRAIN)
            self._is_draining = True
        return requests

    def asked(self) -> list[Ask]:
        """What others ask about single tasks; what they ask about devices is done below."""
        asks = self.session.asked()
        self._for_devices += [ask for ask in asks if "devices" in ask.what]
        return [ask for ask in asks if "devices" not in ask.what]

    def do(self, view: RunView) -> tuple[list[Event], list[Request]]:
        """Look after other processes' requests, status, export and packing. Called twice a second.

        Returns events for the scheduler and requests to the coordinator.
        """
        now = self.clock.monotonic_s()
        if now >= self._status_due_s:
            self._status_due_s = now + _STATUS_EVERY_S
            with suppress(OSError):  # a picture for others; the disk's state shows in the ledger
                write_status(self.folder, view)
        if now >= self._export_due_s:
            self._export_due_s = now + self._interval_s
            self._start_export()
        requests = [Request.CANCEL] if self.session.is_cancelled() else []
        if self._has_failed_rehearsal(view):
            requests.append(Request.DRAIN)  # not a stop: the results of tasks at work are good
        events = self._lend(view)
        events += self._packing.sample(view) if self._packing else []
        return events, requests

    def _lend(self, view: RunView) -> list[Event]:
        if self._lending is None:
            return []
        asks, self._for_devices = self._for_devices, []
        known = len(self._lending.slots)
        events = [event for ask in asks for event in self._lending.hear(ask, view)]
        if self._packing and len(self._lending.slots) > known:
            self._packing.take(self._lending.slots[known:])
        self._lending.look(view)
        return events

    def _has_failed_rehearsal(self, view: RunView) -> bool:
        """Whether the rehearsal has just failed. None is held at the end: the real calls come."""
        if self._rehearsal is None or view.num_ended >= view.total:
            return False
        return self._rehearsal.look(self.folder, view.num_done)

    def _start_export(self) -> None:
        """Export in a process of its own: pyarrow would double the coordinator's memory."""
        if self._exporter is not None and self._exporter.poll() is None:
            return
        self._exporter = subprocess.Popen(
            [sys.executable, "-m", "muster.farm.export", str(self.folder.path), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=child_environment({}),
        )


_FEW = 8
_HINT = (
    "what has been done is saved. Correct it and start the same command again, with "
    "--allow-changed-code where the tasks are in the same file."
)
_SURE = (NameError, AttributeError, ImportError, TypeError, NotImplementedError, SyntaxError)


class MissingColumn(KeyError):
    """A row was asked for a column that it does not have, and will not have at the end."""


class _Row(dict[str, Any]):
    def __missing__(self, name: str) -> Any:
        raise MissingColumn(name)


@dataclass
class Rehearsal:
    """What a recipe makes of its results, called once on the first few of them, leaving no trace.

    A mistake in it ends a sweep or a map after its first task instead of after its last. An error
    that may be due to having only a part of the results is merely noted.

    ``call`` is given the run folder; False: there is nothing to call it with yet.

    ``error``: a mistake that is sure to come again at the end.
    """

    call: Callable[[RunFolder], bool]
    say: Callable[[str], None]
    error: MusterError | None = None
    _due_at: int = 1

    def look(self, folder: RunFolder, num_done: int) -> bool:
        """Call it once, when the first results are there. True: the run is to end."""
        if not self._due_at or num_done < self._due_at:
            return False
        try:
            self._due_at = 0 if self.call(folder) else 2 * num_done
        except NotTried as reason:
            self._due_at = 0
            self.say(f"note       {reason}; it is called on all results at the end")
        except TargetError as error:
            self._due_at = 0
            self.error = error
            self.say(f"{str(error).splitlines()[0]} The run ends when the work in hand is done.")
        return self.error is not None


def rehearse_sweep(recipe: Recipe, config: Any, folder: RunFolder) -> bool:
    """``summarise`` and ``draw`` of the first tasks that are done."""
    from muster.farm.rows import done_rows

    rows = [
        _Row({**params, **metrics, **system})
        for params, metrics, system in itertools.islice(done_rows(folder), _FEW)
    ]
    if not rows:
        return False
    name = f"summarise of the recipe {recipe.name}"
    with _tried(name, recipe.summarise):
        table = recipe.summarise(config, iter(rows))
    if not isinstance(table, list) or not all(isinstance(row, dict) for row in table):
        raise _wrong(name, table, "a list of dicts, one for each row of the table")
    check_storable(name, table)
    _draw(recipe, lambda place: recipe.draw(config, table, place))
    return True


def rehearse_map(recipe: MapRecipe, config: Any, is_jsonl: bool, folder: RunFolder) -> bool:
    """``summarise`` and ``draw`` of the first records that are written."""
    from muster.api.map_publish import parts_of

    lines = (line for part in parts_of(folder) for line in _lines(part.rows))
    # Another format gives every record every column.
    kind = _Row if is_jsonl else dict
    records = [kind(json.loads(line)) for line in itertools.islice(lines, _FEW)]
    if not records:
        return False
    if recipe.summarise is not None:
        name = f"summarise of the recipe {recipe.name}"
        with _tried(name, recipe.summarise):
            numbers = recipe.summarise(config, iter(records))
        if not isinstance(numbers, Mapping):
            raise _wrong(name, numbers, "a dict of numbers by name")
        check_storable(name, numbers)
    if (draw := recipe.draw) is not None:
        _draw(recipe, lambda place: draw(config, iter(records), place))
    return True


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            yield from file
    except FileNotFoundError:  # it has been put into the output
        return


def _draw(recipe: Recipe | MapRecipe, draw: Callable[[Path], list[Path]]) -> None:
    assert recipe.draw is not None
    name = f"draw of the recipe {recipe.name}"
    with TemporaryDirectory(prefix="muster-rehearsal-") as place, _tried(name, recipe.draw):
        made = draw(Path(place))
        if not isinstance(made, list | tuple):
            raise _wrong(name, made, "a list of the paths that it has written")


@contextmanager
def _tried(name: str, hook: Callable[..., Any]) -> Iterator[None]:
    try:
        yield
    except TargetError:
        raise
    except Exception as error:
        if isinstance(error, ImportError) and (error.name or "").startswith("matplotlib"):
            return  # there will be a remark instead of figures
        cause = cause_of(error, hook)
        if not _is_sure(error):
            raise NotTried(f"{name} could not be rehearsed ({cause})") from None
        raise TargetError(
            f"{name} failed on the first results: {cause}.",
            hint=_HINT,
        ) from error


def _is_sure(error: Exception) -> bool:
    """Whether all results would meet the error too: it is not due to their number or to a None."""
    if isinstance(error, UnboundLocalError) or "NoneType" in str(error):
        return False
    return isinstance(error, (*_SURE, MissingColumn))


def _wrong(name: str, what: Any, wanted: str) -> TargetError:
    return TargetError(
        f"{name} gives {type(what).__name__}, not {wanted}.",
        hint=_HINT,
    )
