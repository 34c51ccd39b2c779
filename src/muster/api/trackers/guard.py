"""Keeps a process for each tracker beside a run, which never waits for it while it works.

A tracker may hang, die or refuse: its process is started again after growing pauses, and at the
end of the run it gets some time for what is left. It never changes how the run ends.
"""

from __future__ import annotations

import itertools
import math
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from muster.api.trackers.feed import DONE, Position, PositionTaken, feed, read_position
from muster.api.trackers.tracker import (
    Place,
    Tracked,
    Tracker,
    TrackerRun,
    check_installed,
    make_tracker,
)
from muster.base.errors import MusterError, SetupError, UsageError
from muster.base.processes import RUN_MARKER, end_marked, family
from muster.base.settings import child_environment, secrets, variable
from muster.base.shown_text import count, one_line, shell_word, without_secrets
from muster.run.folder import RunFolder
from muster.run.record import own_id, read_run
from muster.run.session import is_held

#: How long a run that has ended waits for its trackers, and one that was told to end.
END_S, HURRY_S = 30.0, 5.0
_FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
_LOOK_EVERY_S = 0.1
_LONGEST_LINE = 1 << 20  # of what a tracker prints, before its start is written
#: What libraries do besides logging, unless the user has said something.
_QUIET = {
    "WANDB_SILENT": "true", "MLFLOW_DISABLE_TELEMETRY": "true", "HF_HUB_DISABLE_TELEMETRY": "1",
    "DISABLE_TELEMETRY": "1", "GIT_PYTHON_REFRESH": "quiet",
}  # fmt: skip


def wanted(folder: RunFolder, names: Sequence[str]) -> list[str]:
    """Those of ``names`` that need a process: a training writes TensorBoard's files itself, unless
    it was told not to."""
    config = read_run(folder).spec.get("config") if "tensorboard" in names else None
    writes_itself = isinstance(config, dict) and config.get("tensorboard") is True
    return [name for name in names if name != "tensorboard" or not writes_itself]


def track(folder: RunFolder, names: Sequence[str], warn: Callable[[str], None]) -> list[str]:
    """Send a run that nobody works on, for as long as it takes; each tracker is tried three times.

    Returns the names of those that have not got everything. Raises UsageError for a run that is
    under way, whose end nobody knows yet.
    """
    check_installed(names)
    if is_held(folder):
        raise UsageError(
            f"{folder.path} is running, and only its own process can say how it ends.",
            hint="give --log-to to the command that runs it, or come back when it has ended.",
        )
    for name in names:
        _check_writable(folder, name)
    with tracking(folder, names, warn, limit_s=math.inf, most_tries=3) as threads:
        pass
    return [thread.tracker for thread in threads if not thread.is_done]


def _check_writable(folder: RunFolder, tracker: str) -> None:
    """Raise SetupError where nobody can note how far the tracker is: it does not get better."""
    as_who = os.access in os.supports_effective_ids
    for path in (folder.tracker_log(tracker), folder.tracker_position(tracker)):
        place = path
        while not place.exists():
            place = place.parent
        # A file that is there is appended to or replaced, which needs the right on its folder.
        for needed in {place, path.parent if path.parent.exists() else place}:
            if not os.access(needed, os.W_OK, effective_ids=as_who):
                raise SetupError(
                    f"Cannot send {folder.path} to {tracker}: you may not write to {needed}, where "
                    "is noted what has been sent.",
                    hint=f"have the run's owner send it, or send a copy: cp -r "
                    f"{shell_word(folder.path)} MY_COPY",
                )


@contextmanager
def tracking(
    folder: RunFolder,
    names: Sequence[str],
    warn: Callable[[str], None],
    *,
    is_urgent: Callable[[], bool] = lambda: False,
    limit_s: float = END_S,
    most_tries: int | None = None,
    longest_pause_s: float = LONGEST_PAUSE_S,
) -> Iterator[Sequence[TrackerThread]]:
    """A context in which these trackers follow the run in ``folder``, which the caller holds.

    At its end they get ``limit_s``, or less where ``is_urgent``; ``warn`` gets a line for each that
    has not got everything by then.
    """
    if not names:
        yield []
        return
    run_id = own_id(folder).text
    threads = [
        TrackerThread(
            folder, run_id, name, warn, most_tries=most_tries, longest_pause_s=longest_pause_s
        )
        for name in wanted(folder, names)
    ]
    has_failed = True
    try:
        for thread in threads:
            thread.start()
        yield threads
        has_failed = False
    finally:
        try:
            _see_out(
                threads, lambda: min(HURRY_S, limit_s) if has_failed or is_urgent() else limit_s
            )
        finally:
            for thread in threads:
                thread.close()
        for thread in threads:
            if not thread.is_done:
                warn(thread.what_is_left())


def _see_out(threads: Sequence[TrackerThread], limit_s: Callable[[], float]) -> None:
    """Tell them that the run is over, and wait for those that are not done."""
    begun_s = time.monotonic()
    for thread in threads:
        thread.over.set()
    for thread in threads:
        while thread.is_alive() and time.monotonic() - begun_s <= limit_s():
            thread.join(_LOOK_EVERY_S)


class TrackerThread(threading.Thread):
    """One tracker. ``is_done``: it has got everything, and said so."""

    def __init__(
        self,
        folder: RunFolder,
        run_id: str,
        name: str,
        warn: Callable[[str], None],
        *,
        most_tries: int | None,
        longest_pause_s: float,
    ) -> None:
        super().__init__(name=f"muster-tracker-{name}", daemon=True)
        self.tracker = name
        self.over = threading.Event()
        self.is_done = False
        self._folder = folder
        self._run_id = run_id
        self._most_tries = most_tries
        self._longest_pause_s = longest_pause_s
        self._warn = warn
        self._closed = threading.Event()
        self._mark = f"tracker-{uuid.uuid4().hex[:16]}"
        self._secrets = secrets()
        self._last_line = ""
        self._unfinished = b""

    def run(self) -> None:
        first_s = pause_s = min(_FIRST_PAUSE_S, self._longest_pause_s)
        for number in itertools.count(1):
            begun, was_over = time.monotonic(), self.over.is_set()
            try:
                code = self._once()
            except (OSError, ValueError) as error:  # of its start, or of its log
                code, self._last_line = -1, one_line(str(error), 300)
            self.is_done = code == DONE and self.over.is_set()
            if self.is_done or self._closed.is_set() or number == self._most_tries:
                return
            if number == 1:
                why = self._last_line or f"exit code {code}"
                self._warn(f"{self.tracker}: {why}; it will be tried again, and the run goes on")
            if time.monotonic() - begun > LONGEST_PAUSE_S:
                pause_s = first_s  # it had worked
            is_awaited = self._pause(pause_s, ends_when_over=not was_over)
            pause_s = first_s if is_awaited else min(2 * pause_s, self._longest_pause_s)

    def _pause(self, seconds: float, *, ends_when_over: bool) -> bool:
        """Whether it was cut short, as the run is over and waits for this tracker."""
        due_s = time.monotonic() + seconds
        while time.monotonic() < due_s and not self._closed.wait(_LOOK_EVERY_S):
            if ends_when_over and self.over.is_set():
                return True
        return False

    def close(self) -> None:
        """End whatever there is of it."""
        self._closed.set()
        self.join()

    def what_is_left(self) -> str:
        from muster.api.trackers.sources import source_of

        what = "not everything has been sent"
        with suppress(MusterError, OSError):
            path = self._folder.tracker_position(self.tracker)
            mark = read_position(path, self._run_id)[0]
            left = source_of(self._folder, self._run_id).num_after(mark)
            points = f"{count(left, 'point')} {'is' if left == 1 else 'are'} not sent"
            what = points if left else "the run's end is not reported"
        why = f" ({self._last_line})" if self._last_line else ""
        return (
            f"{self.tracker}: {what} yet{why}. Nothing is lost; to send it: "
            f"muster track {shell_word(self._folder.path)} --log-to {self.tracker}"
        )

    def _once(self) -> int:
        """Start the process, hear what it prints, and return how it has ended."""
        words = [str(self._folder.path.absolute()), self._run_id, self.tracker]
        quiet = {name: value for name, value in _QUIET.items() if variable(name) is None}
        with subprocess.Popen(
            [sys.executable, "-P", "-m", "muster.api.trackers.guard", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            bufsize=0,
            env=child_environment({**quiet, RUN_MARKER: self._mark}),
        ) as process:
            try:
                self._attend(process)
            finally:
                if process.poll() is None:
                    process.kill()
                process.wait()  # first: who collects it next would hide how it has ended
                end_marked(self._mark, [process.pid])
            return process.wait()

    def _attend(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None and process.stdout is not None
        was_told, output = False, process.stdout.fileno()
        with (
            self._folder.tracker_log(self.tracker).open("a", encoding="utf-8") as log,
            selectors.PollSelector() as selector,  # `select` refuses numbers of files from 1024 on
        ):
            selector.register(output, selectors.EVENT_READ)
            while not self._closed.is_set():
                if self.over.is_set() and not was_told:
                    was_told = True
                    with suppress(BrokenPipeError):
                        process.stdin.write(b"over\n")
                has_ended = process.poll() is not None
                ready = selector.select(0.0 if has_ended else _LOOK_EVERY_S)
                data = os.read(output, 1 << 16) if ready else b""
                if data:
                    self._hear(data, log)
                elif has_ended:
                    break
                elif ready:  # it has closed its output, and may go on
                    self._closed.wait(_LOOK_EVERY_S)
            self._hear(b"", log, is_over=True)

    def _hear(self, data: bytes, log: IO[str], *, is_over: bool = False) -> None:
        """Write whole lines to the log, so that no secret in them is cut in two."""
        data = self._unfinished + data
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        end = len(data) if is_over or len(data) - end > _LONGEST_LINE else end
        data, self._unfinished = data[:end], data[end:]
        text = data.decode("utf-8", "replace")
        for secret in self._secrets:
            text = text.replace(secret, "…")
        text = without_secrets(text)
        log.write(text)
        log.flush()
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        if lines:
            self._last_line = one_line(lines[-1], 300)


_ASK_EVERY_S = 1.0
_NICE = 10


def main(argv: list[str]) -> int:
    """The process of one tracker: ``python -m muster.api.trackers.guard FOLDER RUN_ID NAME``.

    Its standard input belongs to whoever started it: a line says that the run is over, and when the
    other end is gone without a line, this process has nothing to do here any more.
    """
    from muster.api.trackers.sources import source_of  # which reads ledgers, as the guard does not

    folder, run_id, name = RunFolder(Path(argv[0])), argv[1], argv[2]
    is_over = threading.Event()
    threading.Thread(target=_listen, args=(is_over,), daemon=True).start()
    os.nice(_NICE)  # the work of the run comes first
    try:
        with Position(folder.tracker_position(name), run_id) as position:
            place = Place(folder.trackers, folder.tensorboard)
            source = source_of(folder, run_id)

            def wait(took_s: float) -> bool:  # a tenth of the time at most goes into looking
                return is_over.wait(max(_ASK_EVERY_S, 10 * took_s))

            tracker = _ComingSecond(make_tracker(name, place), is_over)
            feed(source, tracker, position, wait)
    except (PositionTaken, MusterError) as error:
        sys.stderr.write(f"{' '.join(str(error).split())}\n")  # the last line is shown
        return 1
    return DONE


class _ComingSecond:
    """A tracker that comes behind the work of the run once its library is there, which takes some
    seconds of a processor, and with it the helpers that its first run begins, such as W&B's."""

    def __init__(self, tracker: Tracker, is_over: threading.Event) -> None:
        self.most_open = tracker.most_open
        self._tracker = tracker
        self._is_over = is_over
        self._is_first = True

    def open(self, tracked: Tracked) -> TrackerRun:
        run = self._tracker.open(tracked)
        if self._is_first:
            self._is_first = False
            _weigh_sessions(family(os.getpid()), _NICE)
            if self._is_over.is_set():  # perhaps only now: the run waits for us
                _weigh_sessions(family(os.getpid()), 0)
        return run


def _weigh_sessions(pids: Iterable[int], nice: int) -> None:
    """Say how nice the sessions of these processes are to others. Linux weighs sessions against
    each other, and niceness only within one, unless it was told not to: those of a tracker would
    have as much of a core as the run's workers.
    """
    for path in [Path(f"/proc/{pid}/autogroup") for pid in pids]:
        for _ in range(3):
            try:
                if not path.read_text().endswith(f" {nice}\n"):
                    path.write_text(str(nice))
                break
            except BlockingIOError:  # all users together may change one in a tenth of a second
                time.sleep(0.1)
            except OSError:  # it has ended, or there are no such groups here
                break


def _listen(is_over: threading.Event) -> None:
    if sys.stdin.readline():
        is_over.set()
        _weigh_sessions(family(os.getpid()), 0)  # the run waits for us now
        sys.stdin.read()
    # A library may hang, and one that has threads of its own would keep this process.
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(70)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
