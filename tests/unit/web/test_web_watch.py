"""A watcher of a run: it outlives a look that fails, and the event loop never waits for it."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, closing
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tests.made_runs import go_on, made_sweep

from muster.base.errors import UsageError
from muster.farm.ledger.store import Ledger
from muster.web import stream
from muster.web.content.index import Defects
from muster.web.folder import Folder, Folders
from muster.web.stream import Watcher, Watchers
from muster.web.watch import Change, RunPoll, RunsPoll


class Looking:
    """A look that tells what is put into ``found``, and waits while it is held."""

    def __init__(self) -> None:
        self.head: dict[str, Any] = {}
        self.found: list[Change | Exception] = []
        self.may_go, self.is_held = threading.Event(), threading.Event()
        self.may_go.set()
        self.prepared: list[Exception] = []
        self.prepare_s, self.num_looks = 0.0, 0

    def prepare(self) -> None:
        time.sleep(self.prepare_s)
        if self.prepared:
            raise self.prepared.pop()

    def look(self, logs: Collection[str]) -> list[Change]:
        self.num_looks += 1
        for _ in range(1000):
            if self.may_go.wait(0.01):
                break
            self.is_held.set()
        if not self.found:
            return []
        if isinstance(first := self.found.pop(0), Exception):
            raise first
        return [first]


def test_a_look_that_fails_is_said_once_and_the_next_one_tells_what_there_is() -> None:
    said: list[str] = []
    look = Looking()
    watcher = Watcher(look, Defects(said.append))

    async def heard() -> bytes:
        async with aclosing(watcher.events(watcher.position(), None, lambda: False)) as events:
            greeting = await anext(events)
            look.prepared = [ValueError("cut\x1b[2J")]
            look.found = [RuntimeError("no"), RuntimeError("no"), Change("rows", {"a": 1})]
            told = await anext(events)
            while len(said) < 2:  # reading ahead comes at its own time
                await asyncio.sleep(0.01)
            return greeting + told

    assert b"event: rows" in asyncio.run(asyncio.wait_for(heard(), 60))
    assert len(said) == 2 and not [line for line in said if "\x1b" in line or "\n" in line]
    assert {"ValueError", "RuntimeError"} == {line.split()[3] for line in said}


@pytest.mark.thorough
def test_the_event_loop_does_not_wait_for_a_look() -> None:
    look = Looking()
    watcher = Watcher(look, Defects(print))

    async def event(events: AsyncIterator[bytes]) -> bytes:
        found = await anext(events)
        while found.startswith(b":"):  # on a busy machine it says meanwhile that it lives
            found = await anext(events)
        return found

    async def while_it_is_held() -> bytes:
        look.found = [Change("rows", {"a": 1}), Change("rows", {"a": 2})]
        after = watcher.position()
        async with aclosing(watcher.events(after, None, lambda: False)) as events:
            await event(events)
            look.may_go.clear()
            while not look.is_held.is_set():
                await asyncio.sleep(0.01)
            # What was found before is told while the next look takes its time.
            found = await event(events)
            assert not look.may_go.is_set()
            look.may_go.set()
            return found

    assert b'{"a":2}' in asyncio.run(asyncio.wait_for(while_it_is_held(), 60))


@pytest.mark.thorough
def test_after_reading_ahead_the_next_look_comes_as_soon_as_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream, "_DUTY", 0.01)
    look = Looking()
    look.prepare_s = 0.7
    watcher = Watcher(look, Defects(print))

    async def told() -> bytes:
        async with aclosing(watcher.events(watcher.position(), None, lambda: False)) as events:
            await anext(events)
            while look.num_looks < 3:
                await asyncio.sleep(0.01)
            look.found = [Change("rows", {"a": 1})]
            while b"rows" not in (found := await anext(events)):
                continue  # a comment
            return found

    assert b"event: rows" in asyncio.run(asyncio.wait_for(told(), 60))


def test_what_is_kept_for_who_comes_back_is_bounded_in_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream, "_KEPT_BYTES", 1000)
    look = Looking()
    watcher = Watcher(look, Defects(print))
    first = watcher.position()
    look.found = [Change("rows", {"text": "x" * 300}) for _ in range(9)]
    ids = [watcher.position() for _ in range(9)]

    async def told(after: str) -> bytes:
        async with aclosing(watcher.events(after, None, lambda: False)) as events:
            greeting = await anext(events)
            return greeting if b"stale" in greeting else await anext(events)

    assert b"event: stale" in asyncio.run(told(first))
    assert asyncio.run(told(ids[-3])).count(b"event: rows") == 2


def test_an_id_that_is_a_huge_number_is_not_known() -> None:
    watcher = Watcher(Looking(), Defects(print))
    epoch = watcher.position().partition("-")[0]
    for number in ("9" * 9999, "²", "1", "-1", ""):
        assert watcher._cursor(f"{epoch}-{number}") is None
    assert watcher._cursor(f"{epoch}-0") == 0


def test_a_run_that_was_made_anew_has_another_watcher(tmp_path: Path) -> None:
    watchers = Watchers(Folders([tmp_path]), Defects(print))
    one, other = Folder(tmp_path), Folder(tmp_path)
    assert watchers.of_run(one) is watchers.of_run(one)
    assert watchers.of_run(other) is not watchers.of_run(one)
    assert watchers.of_all() is watchers.of_all()


def test_a_folder_that_cannot_be_looked_into_ends_no_watcher(tmp_path: Path) -> None:
    """As of another user's run: whether it is there is an error too."""
    folder = Folder(tmp_path / ("x" * 300))
    assert RunPoll(folder).look(["²", "9" * 9999]) == []

    class All(Folders):
        def all(self) -> list[Folder]:
            return [folder]

    assert RunsPoll(All([])).look(()) == []


def test_a_commit_that_could_not_be_read_when_its_log_had_changed_is_told(tmp_path: Path) -> None:
    """SQLite writes into its log, and then lets others read it: whoever looks in between sees that
    something has changed, and reads what was there before. Nothing may follow.
    """
    run = made_sweep(tmp_path / "run", 10, num_curves=1, num_points=10, num_open=100)
    log = tmp_path / "run/ledger.sqlite-wal"
    with closing(Ledger(run.ledger)) as ledger:
        for step in range(100, 1000, 100):
            go_on(ledger, step)
        ledger._db.execute("PRAGMA wal_checkpoint(PASSIVE)")  # what comes next fits in its place
        look = RunPoll(Folder(run.path))
        look.look(())
        before = look.head["counts"]["done"]
        os.utime(log, ns=(10**18, 10**18))  # its log has changed
        size = log.stat().st_size
        look.look(())
        assert look.head["counts"]["done"] == before
        go_on(ledger, 1000)
        os.utime(log, ns=(10**18, 10**18))
        assert log.stat().st_size == size
        told = look.look(())
    assert [one.data["counts"]["done"] for one in told if one.name == "counts"] == [before + 10]


def test_what_is_explained_already_is_no_defect() -> None:
    said: list[str] = []
    defects = Defects(said.append)
    for error in (None, UsageError("no such run"), FileNotFoundError("gone")):
        defects.note(error)
    assert said == []


def test_viewers_who_ask_the_same_get_one_answer_until_the_next_event() -> None:
    look = Looking()
    watcher = Watcher(look, Defects(print))
    numbers = count()

    def make() -> bytes:
        number = next(numbers)
        time.sleep(0.05)  # others ask meanwhile
        return b"%d" % number

    def asked_by_ten() -> set[bytes]:
        with ThreadPoolExecutor(10) as pool:
            return set(pool.map(lambda _: watcher.shared("/tasks?sort=a", make), range(10)))

    assert len(asked_by_ten()) == 10, "nobody listens, so nobody would be told to ask again"

    async def viewing() -> None:
        async with aclosing(watcher.events("", None, lambda: False)) as events:
            await anext(events)
            ask = asyncio.to_thread
            [first] = await ask(asked_by_ten)
            assert await ask(asked_by_ten) == {first}
            assert await ask(watcher.shared, "/tasks?sort=b", make) != first
            look.found.append(Change("counts", {"done": 1}))
            await anext(events)
            [second] = await ask(asked_by_ten)
            assert second != first, "the event said that there is something new"

    asyncio.run(viewing())
