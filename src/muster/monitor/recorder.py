"""Records samples in the folder of a run, beside what runs there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Self

from muster.base.clock import Clock, SystemClock
from muster.base.errors import MusterError
from muster.base.settings import Settings
from muster.devices.nvml_usage import usage_source
from muster.monitor.sample import rows
from muster.monitor.sampler import Sampler
from muster.monitor.sinks import Sink, open_sink
from muster.monitor.ticker import Ticker
from muster.run.folder import RunFolder

#: How long the end of a run waits for a sample that is being taken: a driver may hang.
_PATIENCE_S = 2.0


def record_run(
    folder: RunFolder,
    uuids: Collection[str],
    interval_s: float,
    settings: Settings,
    say: Callable[[str], None],
    *,
    node_rank: int = 0,
) -> AbstractContextManager[object]:
    """A context that samples the host and the GPUs ``uuids`` into the run's folder.

    ``interval_s`` 0: nothing is recorded. What goes wrong is said once and ends the recording only.
    """
    if interval_s == 0:
        return nullcontext()
    clock = SystemClock()
    return Recorder(
        lambda: Sampler(usage_source(settings, tuple(uuids)), clock),
        lambda: open_sink(folder.monitor_csv(node_rank)),
        interval_s,
        clock,
        say,
    )


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
    # Also a run that is shorter than the interval says what the host did.
    sink.write(rows(sampler.take(quick=True)))
