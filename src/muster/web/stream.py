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
from muster.web.watch import Change, RunPoll, RunsPoll

_EVERY_S, _MOST_S, _MOST_OF_LOG_S = 0.25, 10.0, 1.0
#: The server may take this share of a processor for looks and for what pages ask because of them,
#: and looks this share of the time, in which a slow disk or file server is kept busy: where that is
#: more, looks are rarer, up to the longest pause.
_DUTY, _DUTY_OF_DISKS = 0.01, 0.05
_COMMENT_S = 15.0
_KEPT_EVENTS = 400
_KEPT_BYTES = 4_000_000
_MOST_BEHIND = 50
_KEPT_WATCHERS = 50
#: So many answers are shared, each for so long at most: some say how long something has taken.
_SHARED_ANSWERS, _SHARED_S = 8, 2.0
#: At most this long until a stream notices that the server is about to end.
_NOTICE_S = 0.5


class Poll(Protocol):
    """``prepare`` may take long and run beside a look; a look is short."""

    head: dict[str, Any]

    def prepare(self) -> None: ...

    def look(self, logs: Collection[str]) -> list[Change]: ...


class Event(NamedTuple):
    number: int
    name: str
    log: str | None
    written: bytes


class _Answer:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.body: bytes | None = None
        self.last, self.made_s = 0, 0.0


class Watcher:
    """Looks while it has viewers, and at most one look at a time; one that fails is tried again."""

    def __init__(self, look: Poll, defects: Defects) -> None:
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
        self._answers: dict[str, _Answer] = {}
        self._task: asyncio.Task[None] | None = None
        self._looked_s = float("-inf")

    @property
    def has_viewers(self) -> bool:
        return bool(self._viewers)

    def position(self) -> str:
        """The id of what a page shows that is made after this call."""
        self._look_now(for_newcomer=True)
        return self._id(self._last)

    def _look_now(self, *, for_newcomer: bool = False) -> None:
        with self._looking:
            # Where others are told what happens, one more hears it with them.
            if for_newcomer and self._task and time.monotonic() - self._looked_s < _MOST_S:
                return
            self._looked_s = time.monotonic()
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

    def shared(self, asked: str, make: Callable[[], bytes]) -> bytes:
        """What ``make`` makes. While there are viewers, those who ask the same get one answer until
        the next event, which tells them to ask again. May be called from any thread.
        """
        if not self._viewers:
            return make()
        with self._lock:
            one = self._answers.pop(asked, None) or _Answer()
            self._answers[asked] = one
            while len(self._answers) > _SHARED_ANSWERS:
                del self._answers[next(iter(self._answers))]
        asked_s = time.monotonic()
        with one.lock:
            last, now_s = self._last, time.monotonic()
            # One that was begun after this was asked for is new enough, however long it took.
            is_new = one.made_s >= asked_s or now_s - one.made_s <= _SHARED_S
            if one.body is None or one.last != last or not is_new:
                # The number from before: what is told meanwhile may be missing in the answer.
                one.body, one.last, one.made_s = make(), last, now_s
            return one.body

    def _prepare(self) -> float:
        """Read ahead; returns how many seconds it is until that may go on."""
        begin_s, used_s = time.monotonic(), time.thread_time()
        try:
            self._look.prepare()
        except Exception as error:
            self._defects.note(error)
        by_disks_s = (time.monotonic() - begin_s) / _DUTY_OF_DISKS
        return max(by_disks_s, (time.thread_time() - used_s) / _DUTY)

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
            # What a log has so far is looked at for him alone.
            await run_in_threadpool(lambda: self._look_now(for_newcomer=log is None))
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
            if time.monotonic() >= prepare_s:
                prepare_s = await run_in_threadpool(self._prepare) + time.monotonic()
            begin_s, used_s, before = time.monotonic(), time.process_time(), self._last
            await run_in_threadpool(self._look_now)
            if self._last != before:
                for viewer in self._viewers:
                    viewer.set()
            # What pages ask meanwhile counts too; who reads a log is not made to wait for others.
            by_disks_s = (time.monotonic() - begin_s) / _DUTY_OF_DISKS
            pause_s = _EVERY_S
            while pause_s > 0:
                await asyncio.sleep(min(pause_s, _EVERY_S))
                most_s = _MOST_S if not any(self._viewers.values()) else _MOST_OF_LOG_S
                by_processor_s = (time.process_time() - used_s) / _DUTY
                due_s = max(by_disks_s, min(most_s, by_processor_s))
                pause_s = begin_s + due_s - time.monotonic()
        with self._lock:
            self._answers.clear()
        self._task = None


class Watchers:
    """A watcher for each run, and one for all of them; those not needed are forgotten at last."""

    def __init__(self, folders: Folders, defects: Defects) -> None:
        self._folders = folders
        self._defects = defects
        self._known: dict[str, tuple[object, Watcher]] = {}
        self._lock = threading.Lock()

    def of_run(self, folder: Folder) -> Watcher:
        return self._kept(folder.id, folder, lambda: RunPoll(folder))

    def of_all(self) -> Watcher:
        return self._kept("", self._folders, lambda: RunsPoll(self._folders))

    def _kept(self, name: str, of: object, make: Callable[[], Poll]) -> Watcher:
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
