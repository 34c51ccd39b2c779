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

from muster.web.content.index import Defects
from muster.web.content.plain import to_json
from muster.web.folder import Folder, Folders
from muster.web.watch import RunLook, RunsLook, Told

_EVERY_S = 0.25
#: Looks may take this share of the time: where one takes long, they are rarer.
_DUTY = 0.05
_COMMENT_S = 15.0
_KEPT_EVENTS = 400
_KEPT_BYTES = 4_000_000
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
    name: str
    log: str | None
    written: bytes


class Watcher:
    """Looks while it has viewers, and at most one look at a time; one that fails is tried again."""

    def __init__(self, look: Look, defects: Defects) -> None:
        self._look = look
        self._defects = defects
        self._epoch = secrets.token_hex(4)
        self._events: deque[Event] = deque()
        self._num_bytes = 0
        self._last = 0
        # The first is held while files are read, so never by the event loop; the second only while
        # events are put down or taken.
        self._looking, self._lock = threading.Lock(), threading.Lock()
        self._viewers: dict[asyncio.Event, str | None] = {}
        self._task: asyncio.Task[None] | None = None

    @property
    def has_viewers(self) -> bool:
        return bool(self._viewers)

    def position(self) -> str:
        """The id of what a page shows that is made after this call; looks once."""
        self._look_now()
        return self._id(self._last)

    def _look_now(self) -> None:
        with self._looking:
            logs = {log for log in list(self._viewers.values()) if log is not None}
            try:
                found = [
                    Event(number, told.name, told.log, _text(self._id(number), *told[:2]))
                    for number, told in enumerate(self._look.look(logs), self._last + 1)
                ]
            except Exception as error:
                self._defects.note(error)
                return
            self._keep(found)

    def _keep(self, new: list[Event]) -> None:
        with self._lock:
            self._last += len(new)
            self._events += new
            self._num_bytes += sum(len(event.written) for event in new)
            while len(self._events) > _KEPT_EVENTS or self._num_bytes > _KEPT_BYTES:
                self._num_bytes -= len(self._events.popleft().written)

    def _prepare(self) -> None:
        try:
            self._look.prepare()
        except Exception as error:
            self._defects.note(error)

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
            await run_in_threadpool(self._look_now)
            cursor = self._cursor(after)
            greeting = b"retry: 1000\n\n"
            if cursor is None:
                cursor = self._last
                greeting += self._newest(cursor, is_stale=bool(after))
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
        with self._lock:
            first = self._events[0].number if self._events else self._last + 1
            last = self._last
        # A longer one is not ours, and may be huge.
        known = len(number) <= len(str(last)) and first - 1 <= int(number) <= last
        return int(number) if known else None

    def _since(self, cursor: int, log: str | None) -> tuple[bytes, int]:
        """What came after ``cursor``. Who has fallen behind gets the newest state instead, and of
        several pictures of the whole run only the last.
        """
        with self._lock:
            new = [event for event in self._events if event.number > cursor]
            last = self._last
        if len(new) > _MOST_BEHIND or last - cursor > len(new):
            return self._newest(last, is_stale=True), last
        pictures = [event.number for event in new if event.name == "counts"]
        kept = [
            event.written for event in new
            if (event.name != "counts" or event.number == pictures[-1])
            and event.log in (None, log)
        ]  # fmt: skip
        return b"".join(kept), last

    def _newest(self, number: int, *, is_stale: bool) -> bytes:
        at = self._id(number)
        found = _text(at, "counts", self._look.head) if self._look.head else b""
        return found + (_text(at, "stale", {}) if is_stale else b"")

    async def _watch(self) -> None:
        prepare_s = 0.0  # when reading ahead may begin again, which does not make looks rarer
        while self._viewers:
            if (begin_s := time.monotonic()) >= prepare_s:
                await run_in_threadpool(self._prepare)
                prepare_s = time.monotonic() + (time.monotonic() - begin_s) / _DUTY
            begin_s, before = time.monotonic(), self._last
            await run_in_threadpool(self._look_now)
            if self._last != before:
                for viewer in self._viewers:
                    viewer.set()
            took_s = time.monotonic() - begin_s
            await asyncio.sleep(max(_EVERY_S, took_s / _DUTY))


class Watchers:
    """A watcher for each run, and one for all of them; those not needed are forgotten at last."""

    def __init__(self, folders: Folders, defects: Defects) -> None:
        self._folders = folders
        self._defects = defects
        self._known: dict[str, tuple[object, Watcher]] = {}
        self._lock = threading.Lock()

    def of_run(self, folder: Folder) -> Watcher:
        return self._kept(folder.id, folder, lambda: RunLook(folder))

    def of_all(self) -> Watcher:
        return self._kept("", self._folders, lambda: RunsLook(self._folders))

    def _kept(self, name: str, of: object, make: Callable[[], Look]) -> Watcher:
        """``of``: what is watched; a run that was removed and made anew is another one."""
        with self._lock:
            known = self._known.pop(name, None)
            is_same = known is not None and known[0] is of
            found = known[1] if known and is_same else Watcher(make(), self._defects)
            self._known[name] = of, found
            for other, (_, watcher) in list(self._known.items()):
                if len(self._known) <= _KEPT_WATCHERS:
                    break
                if not watcher.has_viewers and other != name:
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
