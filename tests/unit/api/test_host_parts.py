"""How a start on hosts ends, through far ends of this very machine."""

from __future__ import annotations

import json
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from muster.api.gangs import host_parts
from muster.api.gangs.host_parts import News, Outcome, Part, Watch
from muster.api.gangs.host_plan import Code
from muster.api.gangs.work import GangAudience, GangEnding
from muster.base.errors import EXIT_REQUEUE, MusterError
from muster.base.signals import Requests
from muster.gang.blame import RankEnd
from muster.hosts.connection import Connection
from muster.hosts.names import LOCAL, Host
from muster.run.folder import RunFolder

ENDED = {"event": "ending", "exit_code": EXIT_REQUEUE, "stopped_by": "SIGTERM",
         "word": {"ending": "requeue", "step": 7}}  # fmt: skip
#: A node that saves when it is asked to end.
NODE = f"""
import json, os, signal, sys
from pathlib import Path

def end(*_):
    place = Path(os.environ["PLACE"]) / "run" / "checkpoints" / "step-00000007"
    place.mkdir(parents=True)
    (place / "model").write_bytes(bytes(1 << 18))
    print({json.dumps(ENDED)!r}, flush=True)
    os._exit(0)

signal.signal(signal.SIGTERM, end)
print('[1]\\n7\\nnull\\n{{"event": "line"}}\\n{{"event": "lost", "text": "x"}}', flush=True)
print('{{"event": "say", "text": "ready"}}', flush=True)
while True:
    signal.pause()
"""


class _SlowLink(Connection):
    """Of which a test says how long each piece of a file takes."""

    takes_s = 0.0

    def fetch(
        self, name: str, place: str, position: int, most: int, limit_s: float = 120.0
    ) -> bytes:
        time.sleep(self.takes_s)
        return super().fetch(name, place, position, min(most, 1 << 16), limit_s)


@dataclass
class _Start:
    """A start with one host, whose link may be slow."""

    folder: RunFolder
    connection: _SlowLink
    requests: Requests = field(default_factory=Requests)
    said: list[str] = field(default_factory=list)

    def end(self, *, requests: int) -> Outcome:
        part = Part(0, self.connection, self.folder, Code(()))
        place = self.connection.ask("make", "name")
        self.connection.ask("begin", [sys.executable, "-c", NODE], {"PLACE": str(place)}, 60.0)
        audience = GangAudience(say=self.hear, warn=self.hear)
        session: Any = _Nobody()
        watch = Watch([part], 1, self.folder, audience, self.requests, session, 0.2)

        def ask() -> None:
            self.until("ready")
            self.requests.note(signal.SIGTERM, None)
            if requests > 1:
                self.until("on its way here")
                self.requests.note(signal.SIGTERM, None)

        thread = threading.Thread(target=ask)
        thread.start()
        try:
            return watch.run()
        finally:
            thread.join()

    def hear(self, text: str) -> None:
        self.said.append(text)

    def until(self, words: str) -> None:
        deadline = time.monotonic() + 60
        while not any(words in text for text in self.said):
            assert time.monotonic() < deadline, self.said
            time.sleep(0.01)


class _Nobody:
    def is_cancelled(self) -> bool:
        return False


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Start]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(host_parts, "_NODE_S", 0.5)
    monkeypatch.setattr(host_parts, "_PATIENCE_S", 0.1)
    folder = RunFolder(tmp_path / "run")
    folder.create()
    with _SlowLink(Host(LOCAL)) as connection:
        for module in ("far_program", "far_files"):
            connection.ask("use", f"muster.hosts.{module}")
        connection.takes_s = 0.25
        yield _Start(folder, connection)


def test_what_is_saved_at_a_stop_comes_home_however_long_the_link_takes(start: _Start) -> None:
    outcome = start.end(requests=1)
    saved = start.folder.checkpoints / "step-00000007" / "model"
    assert saved.stat().st_size == 1 << 18
    assert outcome.ending.word["step"] == 7 and not outcome.lost
    assert json.loads(start.folder.ending_json.read_text())["ending"] == "requeue"
    assert any("MiB to come); again to do without it" in text for text in start.said)


def test_who_does_without_it_is_told_of_what_and_none_of_it_is_claimed(start: _Start) -> None:
    start.connection.takes_s = 1.5
    outcome = start.end(requests=2)
    assert not start.folder.ending_json.exists() and not outcome.ending.word
    assert not list(start.folder.checkpoints.glob("step-*"))
    assert any("is lost: checkpoints/step-00000007" in text for text in start.said)


def test_an_answer_that_is_none_ends_the_start(start: _Start) -> None:
    """Somebody waits for the thread that gets it."""
    news: News = queue.Queue()
    start.connection.ask = lambda *_, **__: None  # type: ignore[method-assign]
    Part(0, start.connection, start.folder, Code(())).follow(news)
    assert news.get_nowait()[1]["event"] == "broken"


def _watch(start: _Start, parts: list[Part]) -> Watch:
    nobody: Any = _Nobody()
    audience = GangAudience(say=start.hear, warn=start.hear)
    return Watch(parts, 2, start.folder, audience, start.requests, nobody, 0.2)


def test_the_reason_is_the_first_and_not_that_of_the_first_host(start: _Start) -> None:
    parts = [Part(n, start.connection, start.folder, Code(())) for n in range(2)]
    watch = _watch(start, parts)
    watch._take(parts[1], {"event": "error", "text": "no GPU 1", "exit_code": 3})
    watch._take(parts[0], {"event": "error", "text": "nobody has joined", "exit_code": 3})
    with pytest.raises(MusterError, match="no GPU 1"):
        watch._outcome()


def test_what_ranks_have_to_begin_counts_from_when_they_are_watched(start: _Start) -> None:
    watch = _watch(start, [])
    watch.back = lambda: ("b",)
    watch.run()
    assert not watch._back
    watch._obey()
    assert not watch._back
    watch._settled_s = 0.0
    watch._obey()
    assert watch._back == ("b",)


def test_whose_rank_failed_first_is_known_by_its_host(start: _Start) -> None:
    parts = [Part(n, start.connection, start.folder, Code(())) for n in range(2)]
    watch = _watch(start, parts)
    assert not watch._culprit()
    parts[1].connection = _Named("b")  # type: ignore[assignment]
    parts[0].ending = GangEnding(exit_code=1, ends=(RankEnd(rank=0, code=1, time_s=9.0),))
    parts[1].ending = GangEnding(exit_code=1, ends=(RankEnd(rank=1, code=1, time_s=2.0),))
    assert watch._culprit() == "b"


class _Named:
    def __init__(self, name: str) -> None:
        self.host = Host(name)


def test_a_warning_after_which_ranks_have_saved_is_what_ended_them(start: _Start) -> None:
    """Unless they have saved for a host that is back, with which they go on."""
    watch, saved = _watch(start, []), GangEnding(exit_code=EXIT_REQUEUE)
    assert watch._together([saved]).stopped_by == ""
    watch._is_warned = True
    assert watch._together([saved]).stopped_by == "SIGUSR1"
    watch._back = ("b",)
    assert watch._together([saved]).stopped_by == ""


@pytest.mark.parametrize(
    ("code", "word", "stopped_by"),
    [(0, "finished", ""), (75, "requeue", "SIGHUP"), (130, "", "SIGHUP"), (0, "", "SIGHUP")],
)
def test_a_request_that_came_when_all_was_done_has_ended_nothing(
    code: int, word: str, stopped_by: str
) -> None:
    """What a program that ends with 0 had done by then, nobody knows."""
    ending = GangEnding(exit_code=code, stopped_by="SIGHUP", word={"ending": word})
    assert ending.without_late_request().stopped_by == stopped_by
