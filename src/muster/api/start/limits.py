"""When a run pauses by itself: after so much work or money, at a time, or when GPUs stand idle.

One implementation for all kinds of runs: a thread beside the loop counts, and asks the run to end
as TERM does, so that what can be saved is saved and the same command goes on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Annotated, NamedTuple

from muster.base.clock import human_duration
from muster.base.codec import read_object, write_json
from muster.base.errors import EXIT_REQUEUE, MusterError, UsageError, check_ranges
from muster.base.flags import Flag, parse_duration
from muster.base.signals import Requests
from muster.run.folder import RunFolder
from muster.run.record import read_run

if TYPE_CHECKING:
    from muster.monitor.sample import Row
    from muster.run.session import Session

_TURN_S, _TAKEN_S = 0.5, 0.02
_WRITE_EVERY_S = 5.0
_LOOK_AT_GPUS_EVERY_S = 10.0
PAUSES = ": the run pauses"
_FIRST_ROWS_BYTES, _MOST_ROWS_BYTES = 1 << 18, 16 << 20
_HOST = "host"
_CLOCK = re.compile(r"\d{1,2}:\d\d")


class LimitReached(MusterError):
    """Nothing was begun: a limit was reached before."""

    exit_code = EXIT_REQUEUE


class Idle(NamedTuple):
    """GPUs that were busy for less than ``percent`` of ``seconds``."""

    percent: float
    seconds: float


class Reached(NamedTuple):
    """Why a run pauses; ``more``: with what it goes on, "" where nothing else has to be said."""

    why: str
    more: str = ""


def parse_until(text: str, flag: str) -> str:
    when_is(text, datetime.now(), flag)
    return text


def when_is(text: str, now: datetime, flag: str = "--until") -> datetime:
    """The next time that the clock shows ``text``, or the date and time that it says.

    >>> when_is("08:00", datetime(2026, 1, 31, 9, 0)).isoformat()
    '2026-02-01T08:00:00'
    """
    try:
        if _CLOCK.fullmatch(text):
            hour, _, minute = text.partition(":")
            found = now.replace(hour=int(hour), minute=int(minute), second=0, microsecond=0)
            return found if found > now else found + timedelta(days=1)
        return datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(
            f"{flag} {text} is not a time.", hint="write 08:00 or 2026-01-31T08:00."
        ) from None


def parse_idle(text: str, flag: str) -> str:
    idle_of(text, flag)
    return text


def idle_of(text: str, flag: str = "--min-utilisation") -> Idle:
    """
    >>> idle_of("10%:1h")
    Idle(percent=10.0, seconds=3600.0)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)%?:(.+)", text)
    if found is None or not 0 < float(found[1]) <= 100:
        raise UsageError(
            f"{flag} {text} is not a share of busy time and a duration.", hint="write 10%:1h."
        )
    seconds = parse_duration(found[2], flag)
    if seconds <= 0:
        raise UsageError(f"{flag} {text} leaves no time to look at.", hint="write 10%:1h.")
    return Idle(float(found[1]), seconds)


@dataclass(frozen=True, kw_only=True)
class LimitOptions:
    """Limits at which the run pauses; with a higher one it goes on later."""

    max_gpu_hours: float | None = None
    """Pause after so many hours of all devices together, counted over all starts that have a limit;
    a worker or rank on CPU cores counts as one device."""
    max_cost: float | None = None
    """Pause when these hours have cost this much, by --price-per-gpu-hour."""
    price_per_gpu_hour: float | None = None
    """What an hour of a GPU, or of a worker on CPU cores, costs, in the money of --max-cost."""
    until: Annotated[str | None, Flag(metavar="08:00", read=parse_until)] = None
    """Pause at this time of the day, or at a date and time such as 2026-01-31T08:00."""
    min_utilisation: Annotated[
        str | None, Flag(metavar="10%:1h", read=parse_idle, aliases=("min-utilization",))
    ] = None
    """Pause when its GPUs were busy for less than this share of this time."""

    def check_limits(self) -> None:
        check_ranges(self, positive=("max_gpu_hours", "max_cost"), not_negative=())
        if self.until is not None:
            parse_until(self.until, "--until")
        if self.min_utilisation is not None:
            parse_idle(self.min_utilisation, "--min-utilisation")

    def check_price(self) -> None:
        """UsageError for a cost without a price; of a run that goes on, another start says it."""
        if self.max_cost is not None and not (self.price_per_gpu_hour or 0) > 0:
            raise UsageError(
                "--max-cost needs to know what an hour costs.", hint="add --price-per-gpu-hour 2.5."
            )

    def check_idle(self, *, has_gpus: bool, records: bool) -> None:
        """UsageError where nobody could see GPUs stand idle; ``records``: into monitor.csv."""
        if self.min_utilisation is not None and not (has_gpus and records):
            why = "--monitor-interval 0 records none" if has_gpus else "the run has no GPUs here"
            raise UsageError(f"--min-utilisation has no effect: {why}.", hint="drop it.")

    @property
    def limits(self) -> dict[str, object]:
        """Those that are given."""
        names = [one.name for one in dataclasses.fields(LimitOptions)]
        return {n: v for n in names if (v := getattr(self, n)) is not None}

    def refuse_limits(self, why: str, hint: str) -> None:
        """UsageError where nobody would keep a limit that is given."""
        for name in self.limits:
            raise UsageError(f"--{name.replace('_', '-')} has no effect: {why}.", hint=hint)


def refuse_to_begin(
    folder: RunFolder, options: LimitOptions, requests: Requests, *, is_new: bool
) -> None:
    """Raise LimitReached where a run would pause at once. ``is_new``: nothing is used by then."""
    if options.limits:
        hours = 0.0 if is_new else spent_hours(folder)
        if found := _reached(options, hours, requests.began_s):
            raise LimitReached(f"{found.why}. Nothing was begun.", hint=_hint(folder, found))


@contextlib.contextmanager
def limited(
    folder: RunFolder,
    options: LimitOptions,
    session: Session,
    requests: Requests,
    num_devices: Callable[[], float],
    say: Callable[[str], None],
) -> Iterator[None]:
    """A context in which the run is asked to end once a limit is reached.

    ``num_devices``: how many count at this moment. It is for the work alone: a request that comes
    while results are written would be nobody's.
    """
    if not options.limits:
        yield
        return
    watch = _LimitWatch(folder, options, session, requests, num_devices, say)
    watch.start()
    try:
        yield
    finally:
        watch.close()


class _LimitWatch(threading.Thread):
    def __init__(
        self,
        folder: RunFolder,
        options: LimitOptions,
        session: Session,
        requests: Requests,
        num_devices: Callable[[], float],
        say: Callable[[str], None],
    ) -> None:
        super().__init__(name="muster-limits", daemon=True)
        self._folder, self._options, self._session = folder, options, session
        self._requests, self._num_devices, self._say = requests, num_devices, say
        self._is_over = threading.Event()
        self._hours = spent_hours(folder)
        self._began = time.time()
        self._idle = None if options.min_utilisation is None else idle_of(options.min_utilisation)
        self._gpus_due = 0.0
        self._rows_bytes = _FIRST_ROWS_BYTES

    def run(self) -> None:
        last = written = time.monotonic()
        asked: Reached | None = None
        is_told = False
        # Sooner where it waits to be taken: a kill in between would leave a pause without a reason.
        while not self._is_over.wait(_TURN_S if asked is None or is_told else _TAKEN_S):
            now = time.monotonic()
            self._hours += self._num_devices() * (now - last) / 3600
            last = now
            if now - written > _WRITE_EVERY_S:
                written = now
                self._write()
            if asked is None and (found := self._look()) and self._requests.ask(signal.SIGTERM):
                asked = found  # else it ends already, or nobody would hear it
            if asked is not None and not is_told and self._requests.is_taken:
                is_told = True
                self._tell(asked)
        if asked is not None and not is_told and self._requests.is_taken:
            self._tell(asked)  # it has ended in the turn in which it was asked

    def close(self) -> None:
        self._is_over.set()
        self.join()
        self._requests.withdraw()
        self._write()

    def _look(self) -> Reached | None:
        now, idle = time.time(), self._idle
        found = _reached(self._options, self._hours, self._requests.began_s)
        if found is None and idle is not None and now - self._began >= idle.seconds:
            return self._stand_idle(idle, now)
        return found

    def _stand_idle(self, idle: Idle, now: float) -> Reached | None:
        if now < self._gpus_due:
            return None
        self._gpus_due = now + min(_LOOK_AT_GPUS_EVERY_S, idle.seconds / 2)
        busy = []
        with contextlib.suppress(MusterError, OSError, ValueError):
            for age_s, row in self._rows_since(idle.seconds, now):
                if row.device != _HOST and 0 <= age_s <= idle.seconds:
                    busy += [] if row.utilisation_percent is None else [row.utilisation_percent]
        if not busy or sum(busy) / len(busy) >= idle.percent:
            return None
        return Reached(
            f"Its GPUs were busy for {sum(busy) / len(busy):.1f} % of the last "
            f"{human_duration(idle.seconds)}, less than --min-utilisation {idle.percent:g}%"
        )

    def _rows_since(self, seconds: float, now: float) -> list[tuple[float, Row]]:
        """The newest rows of the log with their ages: as much of it as holds this time."""
        from muster.monitor.files import last_rows  # here: a dry run samples nothing

        path = self._folder.monitor_csv()
        while True:
            rows = [
                (now - datetime.fromisoformat(row.time_utc).timestamp(), row)
                for row in last_rows(path, self._rows_bytes)
            ]
            is_all = self._rows_bytes >= min(path.stat().st_size, _MOST_ROWS_BYTES)
            if is_all or (rows and rows[0][0] > seconds):
                return rows
            self._rows_bytes *= 2

    def _tell(self, found: Reached) -> None:
        """Once the run acts upon it: one that has finished before pauses nowhere."""
        text = f"{found.why}{PAUSES} when what it has in hand is done or saved, if more is left"
        with contextlib.suppress(OSError):
            self._session.note("limit", text=f"{text}.")
        self._say(f"{text}. {_hint(self._folder, found)}")

    def _write(self) -> None:
        with contextlib.suppress(OSError):
            write_json(self._folder.spent_json, {"gpu_hours": self._hours})


def _reached(options: LimitOptions, hours: float, began_s: float) -> Reached | None:
    """What is reached of work, money and time; ``began_s``: when the command began, after which a
    time of the day comes."""
    if options.max_gpu_hours is not None and hours >= options.max_gpu_hours:
        used = f"{hours:.3g}" if hours < 100 else f"{hours:,.0f}"
        return Reached(
            f"{used} GPU hours are used, of --max-gpu-hours {options.max_gpu_hours:g}",
            " with a higher --max-gpu-hours",
        )
    cost = hours * (options.price_per_gpu_hour or 0)
    if options.max_cost is not None and cost >= options.max_cost:
        why = f"It has cost {cost:.2f}, of --max-cost {options.max_cost:g}"
        return Reached(why, " with a higher --max-cost")
    until = options.until
    if until is None or time.time() < when_is(until, datetime.fromtimestamp(began_s)).timestamp():
        return None
    more = "" if _CLOCK.fullmatch(until) else " with a later --until"
    return Reached(f"It is --until {until}", more)


def _hint(folder: RunFolder, found: Reached) -> str:
    how = "the same command"
    with contextlib.suppress(MusterError):
        how = read_run(folder).how_it_goes_on(folder) if folder.exists() else how
    return f"To go on{found.more}: {how}"


def spent_hours(folder: RunFolder) -> float:
    """The device hours that starts with a limit have used."""
    hours = read_object(folder.spent_json).get("gpu_hours")
    return float(hours) if isinstance(hours, int | float) and hours >= 0 else 0.0
