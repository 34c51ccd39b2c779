"""Live pages: one watcher for each run that somebody looks at, and its events to every viewer.

An event has a number, and its id says by which watcher it was counted: a browser that comes back
with the last id it saw gets what came after, each event once, or is told that its page is stale.
A watcher keeps what it has told when its last viewer goes, and looks at nothing until the next.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection
from typing import Any, NamedTuple, Protocol

from starlette.concurrency import run_in_threadpool

from muster.web.encoding import to_json
from muster.web.folder import Folder, Folders
from muster.web.watch import RunLook, RunsLook, Told

_EVERY_S = 0.25
#: A look may take this part of the time; who takes long looks less often.
_DUTY = 0.05
_COMMENT_S = 15.0
_KEPT_EVENTS = 400
_MOST_BEHIND = 50
_KEPT_WATCHERS = 50
#: At most this long until a stream notices that the server is about to end.
_NOTICE_S = 0.5


class Look(Protocol):
    """``prepare`` may take long and run beside a look; a look is short."""

    head: dict[str, Any]

    def prepare(self) -> None: ...

    def look(self, logs: Collection[str]) -> list[Told]: ...


class Event(NamedTuple):
    number: int
    told: Told


class Watcher:
    """Looks while it has viewers, and at most one look at a time."""

    def __init__(self, look: Look) -> None:
        self._look = look
        self._epoch = secrets.token_hex(4)
        self._events: deque[Event] = deque(maxlen=_KEPT_EVENTS)
        self._last = 0
        self._lock = threading.Lock()
        self._viewers: dict[asyncio.Event, str | None] = {}
        self._task: asyncio.Task[None] | None = None

    @property
    def has_viewers(self) -> bool:
        return bool(self._viewers)

    def position(self) -> str:
        """The id of what a page shows that is made after this call; looks once."""
        with self._lock:
            self._look_now()
            return self._id(self._last)

    def _look_now(self) -> None:
        logs = {log for log in self._viewers.values() if log is not None}
        for told in self._look.look(logs):
            self._last += 1
            self._events.append(Event(self._last, told))

    def _look_locked(self) -> None:
        with self._lock:
            self._look_now()

    def _id(self, number: int) -> str:
        return f"{self._epoch}-{number}"

    async def events(
        self, after: str, log: str | None, is_over: Callable[[], bool]
    ) -> AsyncIterator[bytes]:
        """Server-sent events until ``is_over``; a comment where there is none for a while."""
        woken = asyncio.Event()
        self._viewers[woken] = log
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._watch())
        try:
            await run_in_threadpool(self._look_locked)
            cursor = self._cursor(after)
            greeting = b"retry: 1000\n\n"
            if cursor is None:
                cursor = self._last
                greeting += self._newest(is_stale=bool(after))
            yield greeting
            said_s = time.monotonic()
            while not is_over():
                woken.clear()
                chunk, cursor = self._since(cursor, log)
                if not chunk and time.monotonic() - said_s >= _COMMENT_S:
                    chunk = b": still here\n\n"
                if chunk:
                    said_s = time.monotonic()
                    yield chunk
                else:
                    await _either(woken)
        finally:
            del self._viewers[woken]

    def _cursor(self, after: str) -> int | None:
        """The number of the last event that was seen; None where that is unknown here."""
        epoch, _, number = after.rpartition("-")
        if epoch != self._epoch or not (number.isascii() and number.isdigit()):
            return None
        first = self._events[0].number if self._events else self._last + 1
        return int(number) if first - 1 <= int(number) <= self._last else None

    def _since(self, cursor: int, log: str | None) -> tuple[bytes, int]:
        """What came after ``cursor``. Who has fallen behind gets the newest state instead, and of
        several pictures of the whole run only the last.
        """
        with self._lock:
            new = [event for event in self._events if event.number > cursor]
            last = self._last
        if len(new) > _MOST_BEHIND or last - cursor > len(new):
            return self._newest(is_stale=True), last
        pictures = [event.number for event in new if event.told.name == "counts"]
        kept = [
            event for event in new
            if (event.told.name != "counts" or event.number == pictures[-1])
            and event.told.log in (None, log)
        ]  # fmt: skip
        return b"".join(self._written(event) for event in kept), last

    def _written(self, event: Event) -> bytes:
        return _text(self._id(event.number), event.told.name, event.told.data)

    def _newest(self, *, is_stale: bool) -> bytes:
        at = self._id(self._last)
        found = _text(at, "counts", self._look.head) if self._look.head else b""
        return found + (_text(at, "stale", {}) if is_stale else b"")

    async def _watch(self) -> None:
        while self._viewers:
            await run_in_threadpool(self._look.prepare)
            begin_s, before = time.monotonic(), self._last
            await run_in_threadpool(self._look_locked)
            if self._last != before:
                for viewer in self._viewers:
                    viewer.set()
            took_s = time.monotonic() - begin_s
            await asyncio.sleep(max(_EVERY_S, took_s / _DUTY))


class Watchers:
    """A watcher for each run, and one for all of them; those not needed are forgotten at last."""

    def __init__(self, folders: Folders) -> None:
        self._folders = folders
        self._known: dict[str, Watcher] = {}
        self._lock = threading.Lock()

    def of_run(self, folder: Folder) -> Watcher:
        return self._kept(folder.id, lambda: Watcher(RunLook(folder)))

    def of_all(self) -> Watcher:
        return self._kept("", lambda: Watcher(RunsLook(self._folders)))

    def _kept(self, name: str, make: Callable[[], Watcher]) -> Watcher:
        with self._lock:
            found = self._known.pop(name, None) or make()
            self._known[name] = found
            for other in list(self._known):
                if len(self._known) <= _KEPT_WATCHERS:
                    break
                if not self._known[other].has_viewers and other != name:
                    del self._known[other]
            return found


def _text(at: str, name: str, data: object) -> bytes:
    return b"id: %s\nevent: %s\ndata: %s\n\n" % (at.encode(), name.encode(), to_json(data))


async def _either(woken: asyncio.Event) -> None:
    """Until there is something new, or it is time to see whether the server ends."""
    try:
        await asyncio.wait_for(woken.wait(), _NOTICE_S)
    except TimeoutError:
        return
