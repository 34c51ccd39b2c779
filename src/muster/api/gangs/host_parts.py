"""The hosts of a gang over SSH during one start: what they say, and how all of it ended."""

from __future__ import annotations

import dataclasses
import json
import queue
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from muster.api.gangs.host_files import Shared
from muster.api.gangs.host_plan import Code
from muster.api.gangs.work import GangAudience, GangEnding
from muster.base.codec import decode, write_json
from muster.base.errors import (
    EXIT_OK,
    EXIT_REQUEUE,
    EXIT_SOME_FAILED,
    MusterError,
    SetupError,
)
from muster.base.shown_text import clean_text
from muster.base.signals import WARNING, Requests, stop_code, stopped_by
from muster.gang.blame import find_culprit, report
from muster.hosts.check import clock_skew_s
from muster.hosts.connection import Connection
from muster.run.folder import RunFolder
from muster.run.session import Session

_LOOK_S, _BRING_S = 0.1, 0.5
#: How long ranks must have worked before they are interrupted for a host that is back: what begins
#: has nothing to save yet.
_SETTLED_S = 10.0
#: What the other nodes have to end by themselves when one has failed, before they are asked to.
_NOTICE_S = 20.0
#: Beyond its grace, what a node may take to end itself. What it takes to bring home what it has
#: written has no limit.
_NODE_S = 25.0
#: Whoever has asked for an end, and waits so long for what is still to come, is told.
_PATIENCE_S = 3.0
#: Words of the ranks that say nothing of what is saved.
_OF_ITSELF = ("refused", "restart")
#: What a part may say, and the fields by which that is told from other lines of JSON.
_FIELDS: Mapping[str, Mapping[str, type]] = {
    "line": {"rank": int, "text": str},
    "say": {"text": str},
    "warn": {"text": str},
    "error": {"text": str, "exit_code": int},
    "ending": {"exit_code": int},
}


class Part:
    """One host's part during a start, as node ``number``. ``ended_s``: since when its program has
    ended, 0.0 before; ``is_home``: all that it has written is here; ``lost``: why its host is, ""
    where not; ``places``: folders there, and what they are here, for what is told of them;
    ``skew_s``: how far its clock is ahead of this one.

    A thread of its own asks the host what is new, and says it in ``news``.
    """

    def __init__(self, number: int, connection: Connection, folder: RunFolder, code: Code) -> None:
        self.number, self.connection = number, connection
        self.shared = Shared(folder, connection, number, code)
        self.signals: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.ending: GangEnding | None = None
        self.error: MusterError | None = None
        self.failed_s = 0.0  # when it had the error
        self.is_over = False
        self.ended_s = 0.0
        self.is_home = False
        self.lost = ""
        self.places: Mapping[str, str] = {}
        self.skew_s = 0.0
        self._position = 0
        self._complaint = ""

    def fail(self, error: MusterError) -> None:
        error.host = self.name
        self.error, self.failed_s = error, time.monotonic()

    @property
    def name(self) -> str:
        return self.connection.host.name

    def learn(self) -> None:
        """Have the far end know how to run a part."""
        for module in ("muster.hosts.far_program", "muster.hosts.far_files"):
            self.connection.ask("use", module, limit_s=60.0)
        self.skew_s = clock_skew_s(self.connection)

    def follow(self, news: News) -> None:
        """To the end of its program, and until all that it has written is here."""
        try:
            self.shared.warn = lambda text: news.put((self, {"event": "warn", "text": text}))
            code, due_s = None, 0.0
            while code is None:
                code = self._turn(news, _LOOK_S)
                if code is not None or time.monotonic() > due_s:
                    for _ in self.shared.bring():
                        code = self._turn(news, 0.0) if code is None else code
                    due_s = time.monotonic() + _BRING_S
            news.put((self, {"event": "ended"}))
            for _ in chain(self.shared.bring(), self.shared.check()):
                self._turn(news, 0.0)  # a host that hears nothing ends its part
            news.put((self, {"event": "over", "code": code, "text": self._complaint}))
        except MusterError as error:
            news.put((self, {"event": "lost", "text": str(error).partition("\n")[0]}))
        except Exception as error:  # the driver's disk, or an answer that is none; it is waited for
            said = str(error) or type(error).__name__
            news.put((self, {"event": "broken", "text": clean_text(said)}))

    def _turn(self, news: News, wait_s: float) -> int | None:
        with suppress(queue.Empty):
            while True:
                self.connection.ask("signal", self.signals.get_nowait())
        found = self.connection.ask("look", self._position, wait_s, limit_s=60.0)
        self._position += found["size"]
        for told in found["text"].splitlines():
            line = told
            for there, here in self.places.items():
                line = line.replace(json.dumps(there)[1:-1], json.dumps(here)[1:-1])
            with suppress(ValueError):
                event = json.loads(line)
                if _is_event(event):
                    news.put((self, event))
        self._complaint = clean_text(" ".join(found["err"].split()))[-400:]
        return None if found["text"] else found["code"]


def _is_event(event: Any) -> bool:
    """What a library prints there may be JSON too."""
    fields = _FIELDS.get(str(event.get("event"))) if isinstance(event, dict) else None
    return fields is not None and all(type(event.get(k)) is kind for k, kind in fields.items())


def _has_failed(ending: GangEnding) -> bool:
    return ending.exit_code not in (EXIT_OK, EXIT_REQUEUE) and not ending.stopped_by


def _by_our_clock(ending: GangEnding, skew_s: float) -> GangEnding:
    """Which rank failed first is asked of those of all hosts together."""

    def moved(of: Any) -> Any:
        return None if of is None else dataclasses.replace(of, time_s=of.time_s - skew_s)

    ends = tuple(dataclasses.replace(moved(end), error=moved(end.error)) for end in ending.ends)
    return dataclasses.replace(ending, ends=ends)


News = queue.Queue[tuple[Part, dict[str, Any]]]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a start ended. ``lost``: hosts by their names, and why each. ``back``: those for which
    the ranks have ended, to begin again with them. ``failed``: hosts that were back and with which
    nothing could be done after all. ``has_run``: ranks have begun. ``culprit``: the host of the
    rank that failed first, "" for none."""

    ending: GangEnding
    lost: Mapping[str, str]
    back: Sequence[str] = ()
    failed: Mapping[str, str] = field(default_factory=dict)
    has_run: bool = True
    culprit: str = ""


@dataclass
class Watch:
    """A start, from when all parts have begun until all have ended. ``back``: hosts that were lost
    before it, and can be used again: the ranks are asked to end for them."""

    parts: Sequence[Part]
    num_ranks: int
    folder: RunFolder
    audience: GangAudience
    requests: Requests
    session: Session
    grace_s: float
    back: Callable[[], Sequence[str]] = tuple
    _back: Sequence[str] = ()
    _said: set[str] = field(default_factory=set)
    _stopped_by: int = 0
    _is_cancelled: bool = False
    _is_urgent: bool = False
    _is_warned: bool = False
    _settled_s: float = 0.0
    _stop_at_s: float | None = None
    _kill_at_s: float | None = None

    def run(self) -> Outcome:
        """Raises what a host could not begin for."""
        news: News = queue.Queue()
        self._settled_s = time.monotonic() + _SETTLED_S
        with self.requests.watched():
            for one in self.parts:
                threading.Thread(
                    target=one.follow, args=(news,), name=f"muster-{one.name}", daemon=True
                ).start()
            while not all(one.is_over for one in self.parts):
                with suppress(queue.Empty):
                    self._take(*news.get(timeout=0.05))
                self._obey()
        return self._outcome()

    def _take(self, part: Part, event: Mapping[str, Any]) -> None:
        now_s = time.monotonic()
        if part.is_over:  # it was hung up on, and says so
            return
        match event["event"]:
            case "line":
                self.audience.hear(event["rank"], event["text"])
            case "say":
                self.audience.say(f"{part.name}: {event['text']}")
            case "warn":
                self._warn(part, event["text"])
            case "ended":
                part.ended_s = part.ended_s or now_s
            case "ending":
                part.ended_s = now_s
                values = {name: value for name, value in event.items() if name != "event"}
                part.ending = _by_our_clock(
                    decode(GangEnding, values, ignore_unknown=True), part.skew_s
                )
                if part.ending.exit_code not in (EXIT_OK, EXIT_REQUEUE):
                    self._stop_at_s = min(self._stop_at_s or now_s + _NOTICE_S, now_s + _NOTICE_S)
            case "error":
                part.ended_s = now_s
                error = MusterError(f"{part.name}: {event['text']}")
                error.exit_code = event["exit_code"]
                part.fail(error)
                self._stop_at_s = now_s  # the others would wait for it to join them
            case "lost":
                part.lost, part.is_over, self._stop_at_s = event["text"], True, now_s
                self.audience.warn(f"{part.name} was lost: {part.lost}")
            case "broken":
                part.fail(SetupError(f"{part.name}: {event['text']}"))
                part.is_over = True
                self._stop_at_s = now_s
            case "over":
                part.is_over = part.is_home = True
                if part.ending is None and part.error is None:
                    said = event["text"] or "it says nothing"
                    part.fail(SetupError(
                        f"{part.name}: its part has ended with exit code {event['code']}: {said}"
                    ))  # fmt: skip
                    self._stop_at_s = now_s

    def _warn(self, part: Part, text: str) -> None:
        """What all nodes say is said once."""
        self._say_once(text if part.number == 0 else f"{part.name}: {text}", key=text)

    def _say_once(self, text: str, *, key: str) -> None:
        if key not in self._said:
            self._said.add(key)
            self.audience.warn(text)

    def _obey(self) -> None:
        if not self._stopped_by and self.session.is_cancelled():
            self._is_cancelled = True
            self.requests.note(signal.SIGINT, None)
        now_s = time.monotonic()
        is_settled = now_s > self._settled_s
        if is_settled and not (self._back or self._stopped_by or self._stop_at_s) and self.back():
            self._back, self._stop_at_s = self.back(), now_s
            self.audience.warn(
                f"{' and '.join(self._back)}: back again; the ranks save, and go on with it"
            )
        for number in self.requests.take():
            self._send(number)
            if number == getattr(signal, WARNING, None):
                self._is_warned = True
                continue
            if not self._stopped_by:
                if self._is_cancelled:
                    self._said.add(self._of_stop(number))  # as the launchers there will say it
                self._warn(self.parts[0], self._of_stop(number, is_cancelled=self._is_cancelled))
                self._stopped_by = number
                self._kill_at_s = now_s + self.grace_s + _NODE_S
            else:
                self._stopped_by = signal.SIGINT if number == signal.SIGINT else self._stopped_by
                self._is_urgent = True
                self._kill_at_s = now_s + _NODE_S / 5
        if self._stop_at_s is not None and now_s > self._stop_at_s and self._kill_at_s is None:
            self._send(signal.SIGTERM)
            self._said.add(self._of_stop(signal.SIGTERM))  # nobody has asked for it
            self._kill_at_s = now_s + self.grace_s + _NODE_S
        if self._kill_at_s is not None:
            for part in self.parts:
                if not part.is_over:
                    self._await(part, now_s, self._kill_at_s)

    def _await(self, part: Part, now_s: float, kill_at_s: float) -> None:
        """Hang up on a part that does not end, but not while it sends what it has written, unless
        that is asked for."""
        shared = part.shared
        if now_s > kill_at_s and (self._is_urgent or not part.ended_s):
            part.is_over = True  # what still runs there ends with the connection
            part.connection.hang_up()
            if part.ended_s:
                names = ", ".join(map(clean_text, shared.awaited[:5])) or "the last of its files"
                more = f" and {len(shared.awaited) - 5} more" if len(shared.awaited) > 5 else ""
                self.audience.warn(f"{part.name}: has not come home, and is lost: {names}{more}")
        elif part.ended_s and now_s > part.ended_s + _PATIENCE_S:
            self._say_once(
                f"{part.name}: its ranks have ended, and what they have written is on its way here"
                f" ({max(0, shared.left) / (1 << 20):.1f} MiB to come); "
                + ("again" if self._stopped_by else "two requests to end")
                + " to do without it",
                key=f"awaits {part.name}",
            )

    def _of_stop(self, number: int, *, is_cancelled: bool = False) -> str:
        """What the launchers say as well."""
        name = "muster cancel" if is_cancelled else signal.Signals(number).name
        return (
            f"{name}: the ranks are asked to end and killed after "
            f"{self.grace_s:.0f} s; again to kill them now"
        )

    def _send(self, number: int) -> None:
        for part in self.parts:
            if not part.is_over:
                part.signals.put(number)

    # ------------------------------------------------------------ how it ended

    def _outcome(self) -> Outcome:
        lost = {part.name: part.lost for part in self.parts if part.lost}
        by_age = sorted(self.parts, key=lambda part: part.failed_s)  # others follow the first
        errors = [part.error for part in by_age if part.error is not None]
        if errors and not lost and not self._stopped_by and not self._back:
            raise errors[0]
        endings = [part.ending for part in self.parts if part.ending is not None]
        ending = self._together(endings)
        if ending.word:
            write_json(self.folder.ending_json, ending.word)
        is_done = any(one.exit_code == EXIT_OK for one in endings)
        back = () if is_done or any(map(_has_failed, endings)) else self._back
        return Outcome(ending=ending, lost=lost, back=back, culprit=self._culprit())

    def _together(self, endings: Sequence[GangEnding]) -> GangEnding:
        # That something is saved holds where it is here.
        words = [
            part.ending.word for part in self.parts
            if part.ending and (part.is_home or part.ending.word.get("ending") in _OF_ITSELF)
        ]  # fmt: skip
        words = [word for word in words if word]
        own = [word for word in words if word.get("ending") in _OF_ITSELF]
        found = GangEnding(
            exit_code=EXIT_OK,
            restarts=max((one.restarts for one in endings), default=0),
            stopped_by=stopped_by(self._stopped_by, is_cancelled=self._is_cancelled),
            word=[*own, *words, {}][0],
        )
        how: dict[str, Any] = {"report": self._report(endings)}
        failed = [one for one in endings if _has_failed(one)]
        codes = [one.exit_code for one in endings]
        if self._stopped_by:
            how["exit_code"] = codes[0] if codes else stop_code(self._stopped_by)
        elif failed:
            stalled = next((one for one in failed if one.stall), None)
            how["exit_code"] = min(one.exit_code for one in failed)
            if stalled is not None:
                how |= {"report": stalled.report, "stall": stalled.stall}
            how["report"] = how["report"] or next(one.report for one in failed)
        elif len(endings) < len(self.parts):
            how["exit_code"] = EXIT_SOME_FAILED
        elif EXIT_REQUEUE in codes:
            how["exit_code"] = EXIT_REQUEUE
            how["stopped_by"] = WARNING if self._is_warned and not self._back else ""
        return dataclasses.replace(found, **how)

    def _culprit(self) -> str:
        ends = {id(end): part for part in self.parts if part.ending for end in part.ending.ends}
        culprit = find_culprit([e for p in self.parts if p.ending for e in p.ending.ends])
        return "" if culprit is None else ends[id(culprit)].name

    def _report(self, endings: Sequence[GangEnding]) -> tuple[str, ...]:
        """Whose fault it was among the ranks of all hosts."""
        ends = [end for one in endings for end in one.ends]
        culprit = find_culprit(ends)
        if culprit is None:
            return ()
        log = self.folder.rank_log(culprit.rank)
        return report(ends, world_size=self.num_ranks, log=log)
