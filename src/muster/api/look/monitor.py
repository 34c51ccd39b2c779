"""Watching GPUs and the host: live, beside a command, beside a run, and afterwards."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Annotated

from muster.api.look.listing import find_run
from muster.base.clock import Clock, SystemClock
from muster.base.errors import EXIT_OK, MusterError, SetupError, TargetError, UsageError
from muster.base.flags import Flag, check_interval, parse_duration
from muster.base.settings import read_settings
from muster.base.signals import ENDING
from muster.devices.nvml_usage import usage_source
from muster.monitor.files import SUFFIXES, DeviceSummary, Summary, read_rows
from muster.monitor.recorder import PASSED_ON, TYPED, Ticker, Waiter, is_at_terminal
from muster.monitor.sample import Row, Sample, Sampler, rows
from muster.monitor.sinks import Sink, open_sink

#: A signal tells that a child has ended; where there is no such signal, we look this often.
_CHILD_S = 1.0
_TYPED = {getattr(signal, name) for name in TYPED if hasattr(signal, name)}


def _ignore(sample: Sample) -> None:
    return


def _say_nothing(line: str) -> None:
    return


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """What is watched, for how long, and where it goes.

    ``command``: is started and watched to its end.
    """

    interval_s: Annotated[float, Flag(name="interval", metavar="TIME", read=parse_duration)] = 5.0
    """Time between two samples: 0.5, 5, 1m."""
    output: Annotated[Path | None, Flag(metavar="FILE")] = None
    """Append the samples to this .csv, .jsonl or .parquet file."""
    duration_s: Annotated[
        float | None, Flag(name="duration", metavar="TIME", read=parse_duration)
    ] = None
    """End after this time: 90, 30m, 1h. A COMMAND goes on to its own end, without samples."""
    command: Annotated[tuple[str, ...], Flag(is_hidden=True)] = ()

    def __post_init__(self) -> None:
        check_interval(self.interval_s, "--interval")
        if self.duration_s is not None and self.duration_s <= 0:
            raise UsageError(f"--duration {self.duration_s} leaves no time to watch.")


@dataclass(frozen=True, kw_only=True)
class Watched:
    """How it ended: a command's own exit code (128 + n where signal n ended it), else 0."""

    exit_code: int
    num_samples: int
    num_missed: int
    devices: tuple[DeviceSummary, ...]


@dataclass(kw_only=True)
class _Log:
    """Where samples go. A disk that is full ends the log, not the command that is watched."""

    sink: Sink | None
    path: Path | None
    is_needed: bool
    say: Callable[[str], None]
    summary: Summary = field(default_factory=Summary)
    num_samples: int = 0

    def add(self, sample: Sample) -> None:
        self.num_samples += 1
        made = rows(sample)
        for row in made:
            self.summary.add(row)
        if self.sink is None:
            return
        try:
            self.sink.write(made)
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        if self.sink is None:
            return
        try:
            self.sink.close()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self.sink = None
        words = f"Cannot write {self.path}: {error.strerror or error}."
        if self.is_needed:
            raise SetupError(words, hint="what was written before is kept.") from error
        self.say(f"{words} The command goes on without a log.")


def watch(
    options: WatchOptions,
    *,
    show: Callable[[Sample], None] = _ignore,
    say: Callable[[str], None] = _say_nothing,
) -> Watched:
    """Take samples until somebody ends this, the time is over, or the command has ended.

    Call it in the main thread. Ctrl-C, TERM and HUP end the watching; with a command they go to
    the command, whose end is then awaited. Raises UsageError for an output that holds something
    else, SetupError where it cannot be written, TargetError for a command that does not start.
    """
    clock = SystemClock()
    has_command = bool(options.command)
    with ExitStack() as stack:
        sampler = Sampler(usage_source(read_settings()), clock)
        sink = _open(options.output)
        log = _Log(sink=sink, path=options.output, is_needed=not has_command, say=say)
        stack.callback(log.close)
        waiter = stack.enter_context(Waiter((*ENDING, *PASSED_ON) if has_command else ENDING))
        child = _start(options.command)
        watching = _Watch(options, sampler, log, show, clock)
        if child is None:
            watching.alone(waiter)
        else:
            watching.beside(child, waiter, say)
    return Watched(
        exit_code=EXIT_OK if child is None else _exit_code(child.returncode),
        num_samples=log.num_samples,
        num_missed=watching.ticker.missed,
        devices=log.summary.devices(),
    )


class _Watch:
    """Samples when they are due, and between them whatever a signal or a child wants."""

    def __init__(
        self,
        options: WatchOptions,
        sampler: Sampler,
        log: _Log,
        show: Callable[[Sample], None],
        clock: Clock,
    ) -> None:
        self._sampler = sampler
        self._log = log
        self._show = show
        self._clock = clock
        self.ticker = Ticker(options.interval_s, clock.monotonic_s())
        duration_s = options.duration_s
        # Rounding must not lose the sample that is due at the very end.
        self._end_s = inf if duration_s is None else self.ticker.due_s + duration_s + 1e-6

    def alone(self, waiter: Waiter) -> None:
        while True:
            self._sample_if_due()
            left_s = self._end_s - self._clock.monotonic_s()
            if waiter.take() or left_s <= 0:
                return
            waiter.wait(min(left_s, self._until_sample_s()))

    def beside(
        self, child: subprocess.Popen[bytes], waiter: Waiter, say: Callable[[str], None]
    ) -> None:
        """Stay with ``child`` to its end, whatever becomes of the samples."""
        was_at_terminal = is_at_terminal()
        while True:
            try:
                self._sample_if_due()
            except MusterError as error:
                self._stop_sampling(error, say)
            if child.poll() is not None:
                break
            for number in waiter.take():
                is_hung_up = number == getattr(signal, "SIGHUP", 0)
                # A terminal that hangs up can no longer be asked whether we were there.
                child_knows = was_at_terminal if is_hung_up else _was_typed(number)
                if not child_knows:
                    child.send_signal(number)
            waiter.wait(min(_CHILD_S, self._until_sample_s()))
        if self._until_sample_s() == inf:
            return  # a last one, long after the others, would stand for the time between
        try:
            self._log.add(self._sampler.take(quick=True))  # a short command is seen as well
        except MusterError as error:
            self._stop_sampling(error, say)

    def _stop_sampling(self, error: MusterError, say: Callable[[str], None]) -> None:
        if self._end_s > -inf:
            say(f"There are no more samples: {error}")
        self._end_s = -inf

    def _sample_if_due(self) -> None:
        if self._until_sample_s() > 0:
            return
        sample = self._sampler.take()
        self._log.add(sample)
        self._show(sample)
        self.ticker.taken(self._clock.monotonic_s())

    def _until_sample_s(self) -> float:
        is_over = self.ticker.due_s > self._end_s
        return inf if is_over else self.ticker.wait_s(self._clock.monotonic_s())


def _was_typed(number: int) -> bool:
    return number in _TYPED and is_at_terminal()


def _open(path: Path | None) -> Sink | None:
    if path is None:
        return None
    try:
        return open_sink(path)
    except OSError as error:
        raise SetupError(
            f"Cannot write --output {path}: {error.strerror or error}.",
            hint="choose another place.",
        ) from None


def _start(command: tuple[str, ...]) -> subprocess.Popen[bytes] | None:
    """Start it in our own process group, where it keeps the terminal and gets a typed Ctrl-C."""
    if not command:
        return None
    try:
        return subprocess.Popen(command)
    except OSError as error:
        raise TargetError(
            f"Cannot start {command[0]!r}: {error.strerror or error}.",
            hint="the words after -- are a program and its arguments, not a line for a shell.",
        ) from None


def _exit_code(returncode: int) -> int:
    return returncode if returncode >= 0 else 128 - returncode


# ---------------------------------------------------------------------- afterwards


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What a log says: its summary per device, and the picture that was made of it, if one was."""

    name: str
    begin_utc: str
    end_utc: str
    num_rows: int
    devices: tuple[DeviceSummary, ...]
    figure: Path | None


def replay(text: str, say: Callable[[str], None]) -> Replay:
    """Read the samples of a run (its folder, or its name below ./runs) or of a log file.

    Draws them into ``monitor.png`` in the run's folder, or into a .png beside the log file; where
    nothing can draw or it cannot be written, it can ``say`` so.
    Raises UsageError for a run that does not exist, SetupError where there are no samples.
    """
    from muster import plotting
    from muster.monitor.figure import draw

    name, logs, place = _logs_of(text)
    figure: Path | None = None
    found = [row for log in logs for row in read_rows(log)]
    found.sort(key=lambda row: row.time_utc)
    if not found:
        raise SetupError(f"There are no samples yet in {', '.join(map(str, logs))}.")
    try:
        with plotting.or_remark(say):
            draw(place, found, _title(name, found))
            figure = place
    except OSError as error:  # the numbers can be shown all the same
        say(f"Cannot write {place}: {error.strerror or error}. No figure was made.")
    return Replay(
        name=name,
        begin_utc=found[0].time_utc,
        end_utc=found[-1].time_utc,
        num_rows=len(found),
        devices=Summary(found).devices(),
        figure=figure,
    )


def _logs_of(text: str) -> tuple[str, list[Path], Path]:
    """Name, logs and the place of the figure."""
    path = Path(text)
    if path.suffix.lower() in SUFFIXES and not path.is_dir():
        return path.name, [path], path.with_suffix(".png")
    folder = find_run(text).folder
    logs = folder.monitor_logs()
    if not logs:
        raise SetupError(
            f"{folder.path} holds no samples.",
            hint="it ran with --monitor-interval 0 or before muster recorded them.",
        )
    return folder.name, logs, folder.monitor_png


def _title(name: str, found: list[Row]) -> str:
    hosts = sorted({row.host for row in found})
    return f"{name} on {', '.join(hosts)}"


__all__ = [
    "Replay",
    "WatchOptions",
    "Watched",
    "replay",
    "watch",
]
