"""What is done beside the loop of a sweep: requests to end, its status file, exports, packing; and
the rehearsal: what a recipe makes of its results is called on the first few of them, so that a
mistake is found early.
"""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

from muster.api.recipe import MapRecipe, Recipe
from muster.api.start.code_watch import ADVICE, EVENT, CodeWatch, When
from muster.api.start.lending import Lending
from muster.api.start.options import SweepOptions
from muster.api.start.services import Services
from muster.base.atomic_files import write_atomic
from muster.base.clock import Clock, SystemClock
from muster.base.codec import check_storable
from muster.base.errors import MusterError, NotTried, TargetError, cause_of
from muster.base.processes import family
from muster.base.settings import Settings
from muster.devices.discovery import discover
from muster.devices.packing import CONTEXT_MIB, MemorySampler, workers_that_fit
from muster.farm.events import Capacity, Event
from muster.farm.plan import Request
from muster.farm.table_writer import TableWriter, exporter
from muster.farm.task import SlotSpec
from muster.farm.view import RunView, WorkerLine
from muster.run.folder import RunFolder
from muster.run.requests import Ask

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


def rehearse_map(recipe: MapRecipe, config: Any, is_jsonl: bool, lines: Iterable[bytes]) -> bool:
    """``summarise`` and ``draw`` of the first records that are written, a line of JSON each."""
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


_STATUS_EVERY_S = 1.0
_LOOK_AT_CODE_EVERY_S = 10.0
#: So long before the last task ends, at the pace of the others, the process that writes the table
#: is begun: earlier it would take a core from them.
_NEAR_S = 0.5


def write_status(folder: RunFolder, view: RunView) -> None:
    """Compact, and without a look at each value: with thousands of workers it is a megabyte."""
    record = {**view._asdict(), "workers": [line._asdict() for line in view.workers]}
    write_atomic(folder.status_json, json.dumps(record).encode())


class Housekeeping:
    """A context: inside it the first request to end drains and the second stops."""

    def __init__(
        self,
        services: Services,
        options: SweepOptions,
        settings: Settings,
        lending: Lending,
        rehearsal: Rehearsal | None,
        code: CodeWatch,
        show: Callable[[RunView], None],
        table: TableWriter | None,
    ) -> None:
        self.clock: Clock = SystemClock()
        self._services = services
        self._folder = services.folder
        self._lending = lending
        self._rehearsal = rehearsal
        self._code = code
        self._show = show
        self._table = table
        self._num_failed_before: int | None = None  # by earlier starts
        self._last: RunView | None = None
        self._for_devices: list[Ask] = []
        self._is_draining = False
        self._context = ExitStack()
        self._status_due_s = 0.0
        self._code_due_s = self.clock.monotonic_s() + _LOOK_AT_CODE_EVERY_S
        self._interval_s = options.export_interval_s
        self._export_due_s = self.clock.monotonic_s() + self._interval_s
        self._exporter: subprocess.Popen[bytes] | None = None
        slots = tuple(lending.slots)
        is_packing = options.per_gpu == "auto" and any(slot.devices for slot in slots)
        self._packing = PerGpuAuto(settings, slots) if is_packing else None

    def __enter__(self) -> Self:
        self._context.enter_context(self._services.requests.watched())
        return self

    def __exit__(self, *_: object) -> None:
        is_done = self._last is not None and self._last.num_ended >= self._last.total
        self._look_at_code("done" if is_done else "later")
        self._context.close()
        self._folder.status_json.unlink(missing_ok=True)
        if self._exporter is not None:
            self._exporter.wait()

    def show(self, view: RunView) -> None:
        """Show how the work stands, and tell of the first task that has failed."""
        self._last = view
        if self._num_failed_before is None:
            self._num_failed_before = view.num_failed
        elif view.num_failed > self._num_failed_before:
            self._services.tell("failure", f"{view.name}: the first task has failed")
        left = view.total - view.num_ended
        if self._table is not None and view.rate and left < _NEAR_S * view.rate:
            self._table.begin()
        self._show(view)

    def num_at_work(self) -> int:
        """The workers that hold their devices; those that start may wait in a queue."""
        lines = () if self._last is None else self._last.workers
        return sum(line.state in ("running", "idle", "ending") for line in lines)

    def requests(self) -> list[Request]:
        """What signals have asked for since the last turn. Called every turn, so it is cheap."""
        signals = self._services.requests
        if not signals.heard:
            return []
        requests = []
        for number in signals.take():
            with suppress(OSError):
                self._services.session.note("asked", by=signal.Signals(number).name)
            requests.append(Request.STOP if self._is_draining else Request.DRAIN)
            self._is_draining = True
        return requests

    def asked(self) -> list[Ask]:
        """What others ask about single tasks; what they ask about devices is done below."""
        asks = self._services.session.asked()
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
                write_status(self._folder, view)
        if now >= self._export_due_s:
            self._export_due_s = now + self._interval_s
            self._start_export()
        if now >= self._code_due_s:
            self._code_due_s = now + _LOOK_AT_CODE_EVERY_S
            self._look_at_code("now")
        requests = [Request.CANCEL] if self._services.session.is_cancelled() else []
        if self._has_failed_rehearsal(view):
            requests.append(Request.DRAIN)  # not a stop: the results of tasks at work are good
        events = self._lend(view)
        events += self._packing.sample(view) if self._packing else []
        return events, requests

    def _look_at_code(self, when: When) -> None:
        if news := self._code.news():
            self._services.warn(f"{news}: {ADVICE[when]}.")
            with suppress(OSError):
                self._services.session.note(EVENT, text=f"{news}.")

    def _lend(self, view: RunView) -> list[Event]:
        asks, self._for_devices = self._for_devices, []
        known = len(self._lending.slots)
        events = [event for ask in asks for event in self._lending.hear(ask, view)]
        if self._packing and len(self._lending.slots) > known:
            self._packing.take(self._lending.slots[known:])
        for line in self._lending.look(view):
            self._services.warn(line)
        return events

    def _has_failed_rehearsal(self, view: RunView) -> bool:
        """Whether the rehearsal has just failed. None is held at the end: the real calls come."""
        if self._rehearsal is None or view.num_ended >= view.total:
            return False
        return self._rehearsal.look(self._folder, view.num_done)

    def _start_export(self) -> None:
        """Export in a process of its own: pyarrow would double the coordinator's memory."""
        if self._exporter is not None and self._exporter.poll() is None:
            return
        argv, environment = exporter(self._folder)
        with suppress(OSError):  # no room for one more process: the next one may have it
            self._exporter = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment,
            )


class PerGpuAuto:
    """Starts with one worker per GPU; after finished tasks grows to what their peaks allow.

    What a worker holds is what the driver lists for its processes, or what its tasks report of
    torch's memory with a context beside it, whichever is more: in some containers the driver lists
    no processes. After a task that found no memory beside others its GPU has one worker fewer for
    the rest of the run; one that was alone there says nothing about how many fit.
    """

    def __init__(self, settings: Settings, slots: tuple[SlotSpec, ...]) -> None:
        self._sampler = MemorySampler(settings)
        self._shares: dict[str, list[SlotSpec]] = {}
        self._totals = {
            device.uuid: device.memory_total_mib for device in discover(settings).devices
        }
        self._others: dict[str, int] = {}
        self._allowed: dict[str, int] = {}
        self._most: dict[str, int] = {}
        self._num_oom: dict[str, int] = {}
        self._peaks: dict[str, int] = {}
        self.take(slots)

    def take(self, slots: Iterable[SlotSpec]) -> None:
        """Look after the devices of these slots as well."""
        new: dict[str, list[SlotSpec]] = {}
        for slot in slots:
            new.setdefault(slot.device_key, []).append(slot)
        for key, shares in new.items():
            self._shares[key] = shares
            self._others[key] = self._sampler.in_use(shares[0].devices) or 0
            self._most[key] = len(shares)
            self._allowed[key] = self._num_oom[key] = self._peaks[key] = 0

    def sample(self, view: RunView) -> list[Event]:
        """Events that set new limits, where the peaks allow more workers or force fewer."""
        lines = {line.slot: line for line in view.workers}
        events: list[Event] = []
        for key, slots in self._shares.items():
            shown = [lines[slot.label] for slot in slots if slot.label in lines]
            now = self._fitting(key, slots[0].devices, shown)
            if now != self._allowed[key]:
                self._allowed[key] = now
                events.append(Capacity(key, now))
        return events

    def _fitting(self, key: str, uuids: Sequence[str], lines: Sequence[WorkerLine]) -> int:
        held = {line.slot: self._sampler.used_by(_family(line), uuids) or 0 for line in lines}
        # A slot that was taken since the view was made has no line in it.
        self._peaks[key] = max([self._peaks[key], *map(_known_mib, lines), *held.values()])
        current = max(1, self._allowed[key])
        num_oom = sum(line.num_oom for line in lines)
        if num_oom > self._num_oom[key]:
            self._most[key] = max(1, current - (num_oom - self._num_oom[key]))
            self._num_oom[key] = num_oom
        if current == 1 and not any(line.num_ended for line in lines):
            return 1
        in_use = self._sampler.in_use(uuids)
        if in_use is not None:
            alive = [line for line in lines if line.pid is not None]
            ours = sum(held.values()) or sum(map(_known_mib, alive))
            self._others[key] = max(0, in_use - ours)
        totals = [self._totals.get(uuid) for uuid in uuids]
        known = [total for total in totals if total is not None]
        return workers_that_fit(
            peaks_mib=[self._peaks[key]],
            total_mib=sum(known) if len(known) == len(uuids) else None,
            others_mib=self._others[key],
            current=current,
            cap=self._most[key],
        )


def _family(line: WorkerLine) -> set[int]:
    return set() if line.pid is None else family(line.pid)


def _known_mib(line: WorkerLine) -> int:
    """What a worker has held by its own account, and the context that it does not count."""
    return 0 if line.device_peak_mib is None else int(line.device_peak_mib) + CONTEXT_MIB
