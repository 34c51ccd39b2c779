"""What goes along with the work of a run of any kind: trackers, samples of its devices, notices to
people, and the limits at which it pauses.
"""

from __future__ import annotations

import contextlib
import platform
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from muster.api.start.limits import limited
from muster.api.start.notify import (
    MOST_TEXT,
    Cause,
    Failed,
    Message,
    Place,
    read_place,
    send,
)
from muster.api.start.options import GangOptions, SweepOptions
from muster.base import processes
from muster.base.errors import MusterError
from muster.base.settings import Settings
from muster.base.shown_text import count, one_line, safe_line
from muster.base.signals import Interrupted, Requests, stop_code
from muster.run.folder import RunFolder

if TYPE_CHECKING:
    import subprocess

    from muster.run.session import Session

Options = SweepOptions | GangOptions
#: How long the end of a run waits for notices that are not sent yet, and that of one which failed.
END_S, HURRY_S = 10.0, 3.0
_MOST_TRIES, _FIRST_PAUSE_S, _MOST_WAITING = 6, 1.0, 16


def told_in_queue(
    folder: RunFolder, options: Options, warn: Callable[[str], None]
) -> AbstractContextManager[Notifier]:
    """A context in which a run waits for its devices: its end there is one that nobody sees."""
    return notifying(folder, options.notify if options.wait_s else (), warn)


@dataclass(kw_only=True)
class Services:
    """See `run_services`. ``is_urgent``: trackers get little time at the end, as the run goes on
    elsewhere or has to be gone soon."""

    folder: RunFolder
    options: Options
    session: Session
    requests: Requests
    warn: Callable[[str], None]
    notifier: Notifier
    node: int
    is_urgent: bool = False

    def tell(self, cause: Cause, text: str, exit_code: int | None = None) -> None:
        """Send a notice to those whom ``--notify`` names."""
        self.notifier.tell(cause, text, exit_code)

    def limited(self, num_devices: Callable[[], float]) -> AbstractContextManager[None]:
        """A context for the work alone, in which the run pauses at a limit; see `limits.limited`.
        The first node keeps it for all."""
        if self.node:
            return nullcontext()

        def say(line: str) -> None:
            self.tell("budget", line)
            self.warn(line)

        return limited(self.folder, self.options, self.session, self.requests, num_devices, say)


@contextmanager
def run_services(
    folder: RunFolder,
    options: Options,
    session: Session,
    requests: Requests,
    settings: Settings,
    uuids: Callable[[], Collection[str]],
    warn: Callable[[str], None],
    *,
    node: int = 0,
) -> Iterator[Services]:
    """A context of a start of a run, whose folder the caller holds.

    ``uuids``: the GPUs that it has at the moment. ``node``: of a run on several nodes, each samples
    its own devices, and the first does the rest.
    """
    from muster.monitor.recorder import record_run  # here: a dry run has no services

    with ExitStack() as stack:
        if options.log_to and not node:
            from muster.api.trackers.guard import tracking  # here: few runs have a tracker

            stack.enter_context(
                tracking(
                    folder, options.log_to, warn,
                    is_urgent=lambda: bool(requests.reason) or services.is_urgent,
                )
            )  # fmt: skip
        stack.enter_context(
            record_run(folder, uuids, options.monitor_interval_s, settings, warn, node_rank=node)
        )
        notifier = stack.enter_context(notifying(folder, () if node else options.notify, warn))
        services = Services(
            folder=folder, options=options, session=session, requests=requests, warn=warn,
            notifier=notifier, node=node,
        )  # fmt: skip
        yield services


# ---------------------------------------------------------------------- notices

# Each place has a thread of its own, which tries again after growing pauses. A run never waits for
# one while it works, and some seconds at its end; then it says what was not sent.


class _Sender(threading.Thread):
    """Sends to one place. ``left``: the causes that are not sent, ``why``: the last failure."""

    def __init__(self, place: Place) -> None:
        super().__init__(name=f"muster-notify-{place.kind}", daemon=True)
        self.place = place
        self.left: list[Cause] = []
        self.why = ""
        self._queue: queue.Queue[Message | None] = queue.Queue(_MOST_WAITING)
        self._is_ending = threading.Event()
        self._is_cut = False
        self._process: subprocess.Popen[bytes] | None = None

    def take(self, message: Message) -> None:
        self.left.append(message.cause)
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(message)

    def finish(self) -> None:
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)
        self._is_ending.set()

    def cut(self) -> None:
        """Let no process that sends outlive the run."""
        self._is_cut = True
        self._hold(self._process)

    def run(self) -> None:
        while not self._is_cut and (message := self._queue.get()) is not None:
            pause_s = _FIRST_PAUSE_S
            for _ in range(_MOST_TRIES):
                if self._is_cut or self._sends(message):
                    break
                if self._is_ending.wait(pause_s):  # a long pause would outlast the end's patience
                    self._is_ending.clear()
                    pause_s = _FIRST_PAUSE_S / 2
                pause_s *= 2

    def _sends(self, message: Message) -> bool:
        """Whether it has been sent, or never will be."""
        try:
            send(self.place, message, self._hold)
        except (Failed, MusterError) as error:
            self.why = one_line(str(error).partition("\n")[0], 200)
            return not isinstance(error, Failed) or error.is_final
        except Exception as error:  # whatever it says may hold the address
            self.why = type(error).__name__
            return True
        self.left.remove(message.cause)
        return True

    def _hold(self, process: subprocess.Popen[bytes] | None) -> None:
        self._process = process  # before the question, or a `cut` in between would miss it
        if self._is_cut and process is not None and process.poll() is None:
            processes.signal_group(process.pid, processes.KILL)


class Notifier:
    """Tells every place of each cause once. ``tell`` returns at once."""

    def __init__(self, folder: RunFolder, places: Sequence[Place]) -> None:
        self._folder = folder
        self._told: set[Cause] = set()
        self._senders = [_Sender(place) for place in places]
        self._host = platform.node()
        for sender in self._senders:
            sender.start()

    def tell(self, cause: Cause, text: str, exit_code: int | None = None) -> None:
        if cause in self._told:
            return
        self._told.add(cause)
        text = safe_line(text, MOST_TEXT)
        whole = RunFolder(self._folder.whole)
        path = str(whole.path.absolute())
        message = Message(cause, one_line(whole.name), path, self._host, text, exit_code)
        for sender in self._senders:
            sender.take(message)

    def close(self, limit_s: float, warn: Callable[[str], None]) -> None:
        """Wait so long for what is not sent, and say what is left then."""
        due_s = time.monotonic() + limit_s
        for sender in self._senders:
            sender.finish()
        for sender in self._senders:
            sender.join(max(0.0, due_s - time.monotonic()))
        for sender in self._senders:
            if left := list(sender.left):
                why = sender.why or "no answer in time"
                sender.cut()
                messages = count(len(left), "message")
                warn(
                    f"--notify {sender.place.text}: {messages} not sent ({', '.join(left)}): {why}"
                )


@contextlib.contextmanager
def notifying(
    folder: RunFolder, texts: Sequence[str], warn: Callable[[str], None]
) -> Iterator[Notifier]:
    """A context of a start of a run; an exception that ends it is told as its end."""
    notifier = Notifier(folder, [read_place(text) for text in texts])
    try:
        yield notifier
    except BaseException as error:
        code = error.exit_code if isinstance(error, MusterError) else None
        text = str(error) or type(error).__name__
        if isinstance(error, Interrupted):
            code, text = stop_code(error.number), f"{error} ended it"
        notifier.tell("ended", f"{folder.whole}: {text}", code)
        notifier.close(HURRY_S, warn)
        raise
    notifier.close(END_S, warn)
