"""Takes samples at an interval: beside a run (`Recorder`) or in front of it (`Waiter`)."""

from __future__ import annotations

import math
import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from types import FrameType
from typing import Self

from muster.base.clock import Clock, SystemClock
from muster.base.errors import MusterError
from muster.base.settings import Settings
from muster.base.signals import handled
from muster.devices.nvml_usage import GpuUsage, usage_source
from muster.monitor.sample import Sampler, rows
from muster.monitor.sinks import Sink, open_sink
from muster.run.folder import RunFolder

#: How long the end of a run waits for a sample that is being taken: a driver may hang.
_PATIENCE_S = 2.0
#: Until then a run begins its first tasks, which what is imported here would hold up.
_FIRST_AFTER_S = 0.2


def record_run(
    folder: RunFolder,
    uuids: Callable[[], Collection[str]],
    interval_s: float,
    settings: Settings,
    say: Callable[[str], None],
    *,
    node_rank: int = 0,
) -> AbstractContextManager[object]:
    """A context that samples the host and the run's GPUs into the run's folder. ``uuids`` is asked
    before each sample, because a run may give GPUs back and take others.

    ``interval_s`` 0: nothing is recorded. What goes wrong is said once and ends the recording only.
    """
    if interval_s == 0:
        return nullcontext()
    clock = SystemClock()
    return Recorder(
        lambda: Sampler(_UsageOf(uuids, settings), clock),
        lambda: open_sink(folder.monitor_csv(node_rank)),
        interval_s,
        clock,
        say,
    )


class _UsageOf:
    """The usage of the GPUs that ``uuids`` names when it is asked."""

    def __init__(self, uuids: Callable[[], Collection[str]], settings: Settings) -> None:
        self._uuids, self._settings = uuids, settings
        self._known: frozenset[str] = frozenset()
        self._source = usage_source(settings, ())

    def read(self, *, quick: bool = False) -> tuple[GpuUsage, ...]:
        if (now := frozenset(self._uuids())) != self._known:
            self._source, self._known = usage_source(self._settings, now), now
        return self._source.read(quick=quick)


class Recorder:
    """A context: inside it a thread takes a sample at each interval and one at the end.

    A thread and not the launcher's loop, because a driver takes 40 ms per GPU for its PCIe figures
    and a broken one may never answer. Nothing that goes wrong here ends the run: ``say`` gets one
    line, and no more samples are taken.
    """

    def __init__(
        self,
        make_sampler: Callable[[], Sampler],
        make_sink: Callable[[], Sink],
        interval_s: float,
        clock: Clock,
        say: Callable[[str], None],
    ) -> None:
        self._make_sampler = make_sampler
        self._make_sink = make_sink
        self._interval_s = interval_s
        self._clock = clock
        self._say = say
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="muster-monitor", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(_PATIENCE_S)

    def _run(self) -> None:
        self._stop.wait(_FIRST_AFTER_S)
        try:
            sink = self._make_sink()
            try:
                record(self._make_sampler(), sink, self._interval_s, self._clock, self._stop.wait)
            finally:
                sink.close()
        except (OSError, MusterError) as error:
            self._say(f"no samples are recorded from here on: {error}")


def record(
    sampler: Sampler,
    sink: Sink,
    interval_s: float,
    clock: Clock,
    wait: Callable[[float], bool],
) -> None:
    """A sample now, one at each interval, and one more when ``wait`` says that it is over.

    ``wait``: gets seconds and returns True when there is nothing to wait for any more.
    """
    ticker = Ticker(interval_s, clock.monotonic_s())
    while not wait(ticker.wait_s(clock.monotonic_s())):
        sink.write(rows(sampler.take()))
        ticker.taken(clock.monotonic_s())
    # So a run that is shorter than the interval also says what the host did.
    sink.write(rows(sampler.take(quick=True)))


class Ticker:
    """Computes when samples are due. Pure: the caller passes the time.

    Each due time is computed from the start, so delays do not add up. Samples that were missed (a
    slow disk, a laptop asleep) are skipped and not made up for.
    """

    def __init__(self, interval_s: float, start_s: float) -> None:
        self._interval_s = interval_s
        self._start_s = start_s
        self._number = 0
        self.missed = 0

    @property
    def due_s(self) -> float:
        """When the next sample is due, on the clock of ``start_s``."""
        return self._start_s + self._number * self._interval_s

    def wait_s(self, now_s: float) -> float:
        return max(0.0, self.due_s - now_s)

    def taken(self, now_s: float) -> None:
        """The sample that was due has been taken; the next is the first one after ``now_s``."""
        following = math.floor((now_s - self._start_s) / self._interval_s) + 1
        # Rounding may give the number that has just been served, or one whose time has come.
        while self._start_s + following * self._interval_s <= now_s:
            following += 1
        following = max(following, self._number + 1)
        self.missed += following - self._number - 1
        self._number = following


#: Signals that a command may handle although the monitor does not.
PASSED_ON = ("SIGQUIT", "SIGUSR1", "SIGUSR2")
#: Ctrl-C and Ctrl-\.
TYPED = ("SIGINT", "SIGQUIT")


class Waiter:
    """A context for the main thread: signals become numbers in ``heard``, in their order.

    A signal between looking and waiting is not lost: Python writes a byte into a socket for each
    signal, and waiting ends when there is something in that socket.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self.heard: list[int] = []
        self._names = names
        self._context = ExitStack()
        self._ours, self._theirs = socket.socketpair()

    def __enter__(self) -> Self:
        for end in (self._ours, self._theirs):
            end.setblocking(False)
        self._descriptor = signal.set_wakeup_fd(self._theirs.fileno(), warn_on_full_buffer=False)
        self._context.enter_context(handled(self._names, self._note))
        child = handled((), lambda number, frame: None, always=("SIGCHLD",))
        self._context.enter_context(child)
        return self

    def __exit__(self, *_: object) -> None:
        self._context.close()
        signal.set_wakeup_fd(self._descriptor)
        self._ours.close()
        self._theirs.close()

    def wait(self, seconds: float) -> None:
        """Return after ``seconds``, or sooner when there was a signal or a child has ended."""
        readable, _, _ = select.select([self._ours], [], [], max(0.0, seconds))
        if readable:
            with suppress(BlockingIOError):
                self._ours.recv(4096)

    def take(self) -> list[int]:
        """The signals since the last call."""
        heard, self.heard = self.heard, []
        return heard

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.heard.append(number)


def is_at_terminal() -> bool:
    """Whether this process belongs to the foreground group of a terminal.

    A Ctrl-C or Ctrl-\\ that is typed there, and the hang-up when it closes, go to the whole group
    and so to our children as well. Such a signal that was sent to us alone cannot be told apart.
    """
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | getattr(os, "O_NOCTTY", 0))
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)
