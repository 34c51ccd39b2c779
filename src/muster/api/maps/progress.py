"""What a map writes while it runs: how far it has got, counted in records for whoever looks on and
as numbers over time; and its output, all of it in any order, or its beginning.

The numbers are lines of ``metrics.jsonl``, whose steps are records that are done, so that `muster
metrics` and trackers have curves of a map as they have of a training.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import orjson

from muster.api.maps.publish import Tally, parts_of
from muster.base.errors import MusterError
from muster.base.metric_log import TIME, mark_start
from muster.farm.view import Interval, Rate, RunView
from muster.pipeline.journal import Kept
from muster.pipeline.sinks.formats import SinkSpec
from muster.pipeline.sinks.parts_ahead import Ahead, ahead_of
from muster.pipeline.sinks.unordered import Appender, check_growable
from muster.pipeline.stages import REJECTED_IN
from muster.run.folder import RunFolder

#: A line is written each second at first, and later after a part of the time that has passed.
_LEAST_S, _PART = 1.0, 1 / 500


@dataclass
class RecordCount:
    """Turns a view of chunks into a view of records. ``before``: rows that earlier starts
    have done, also in chunks that they did not finish, of which ``rejected_before`` were rejected,
    by however many stages; ``rejected_in``: by this one, by the names of stages."""

    total: int
    before: int = 0
    rejected_before: int = 0
    last: RunView | None = None
    rejected_in: Mapping[str, int] = field(default_factory=dict)
    _rate: Rate = field(default_factory=Rate)
    _tokens: Rate = field(default_factory=Rate)

    def of(self, view: RunView) -> RunView:
        numbers = view.numbers
        now = time.monotonic()
        done = min(self.total, self.before + int(numbers.get("records", 0)))
        if view.num_done and view.num_done == view.total:
            done = self.total  # a worker that died had not told of its last rows
        # Rows that a host took along when it was lost are done, and counted, again.
        rejected = min(done, self.rejected_before + int(numbers.get("rejected", 0)))
        tokens = int(numbers.get("tokens", 0))
        self.rejected_in = {
            name.removeprefix(REJECTED_IN): int(value)
            for name, value in numbers.items()
            if name.startswith(REJECTED_IN)
        }
        self._rate.add(now, done)
        self._tokens.add(now, tokens)
        rate = self._rate.per_second()
        left_s = (self.total - done) / rate if rate else None
        self.last = view._replace(
            total=self.total,
            num_done=done - rejected,
            num_failed=rejected,
            rate=rate,
            eta=None if left_s is None else Interval(left_s, left_s),
        )
        self.last = self.last._replace(name=view.name + self._beside())
        return self.last

    def speeds(self) -> dict[str, float]:
        """Rows and tokens per second, and the share of time that workers wait for input, as far as
        they are known."""
        if self.last is None:
            return {}
        numbers = self.last.numbers
        waited_s = numbers.get("waited_s", 0.0)
        worked_s = waited_s + numbers.get("busy_s", 0.0)
        found = {
            "rows_per_s": self.last.rate,
            "tokens_per_s": self._tokens.per_second() if numbers.get("tokens") else None,
            "waiting": waited_s / worked_s if worked_s > 1.0 else None,
        }
        return {name: value for name, value in found.items() if value is not None}

    def _beside(self) -> str:
        speeds, parts = self.speeds(), []
        if speeds.get("tokens_per_s"):
            parts.append(f"{speeds['tokens_per_s']:,.0f} tokens/s")
        if "waiting" in speeds:
            parts.append(f"{100 * speeds['waiting']:.0f} % waiting for input")
        return "".join(f" · {part}" for part in parts)


@dataclass(frozen=True)
class Rejects:
    """``num_rows``: those with a reject; a row that became several records may have several.
    ``stages``: how many records each has rejected."""

    num_rows: int = 0
    stages: Counter[str] = field(default_factory=Counter)


def rejects_so_far(folder: RunFolder, begun: Sequence[Kept] = ()) -> Rejects:
    """What was rejected, by finished chunks and by those that were ``begun``."""
    files = [(part.errors, -1) for part in parts_of(folder)]
    files += [(kept.bad_path, kept.bad_size) for kept in begun if kept.bad_size]
    num_rows, stages = 0, Counter[str]()
    for path, size in files:
        if path is None:
            continue
        rows = set[int]()
        with suppress(FileNotFoundError), path.open("rb") as file:
            for line in file.read(size).splitlines():
                with suppress(ValueError, KeyError):
                    record = orjson.loads(line)
                    rows.add(record["row"])
                    stages[record["stage"]] += 1
        num_rows += len(rows)
    return Rejects(num_rows, stages)


class ProgressCurve:
    """Writes ``metrics.jsonl``. A start that goes on marks its place there, because rows
    that a lost host took along count again. Made before anything runs."""

    def __init__(
        self, folder: RunFolder, count: RecordCount, before: Rejects, warn: Callable[[str], None]
    ) -> None:
        self._folder = folder
        self._count = count
        self._warn = warn
        self._begun_s = self._due_s = time.monotonic()
        self._written: tuple[int, int, Mapping[str, int]] = (0, 0, {})
        self._is_marked = self._has_failed = False
        self._before = before.stages

    def look(self) -> None:
        """Write a line if it is time, and if records were done since the last. The line of the last
        record is left to the end, which may know more of the rejects."""
        now = time.monotonic()
        view = self._count.last
        is_all = view is not None and view.num_done + view.num_failed >= self._count.total
        if now >= self._due_s and not is_all:
            self._due_s = now + max(_LEAST_S, _PART * (now - self._begun_s))
            self._write()

    def end(self, counts: Tally | None) -> None:
        """Write the last line: with ``counts``, where all is done, as the ledger has it."""
        if counts is None:
            self._write()
        else:
            self._line(counts.num_in, counts.num_rejected, rejects_so_far(self._folder).stages)

    def _write(self) -> None:
        if (view := self._count.last) is not None:
            stages = self._before + Counter(self._count.rejected_in)
            self._line(view.num_done + view.num_failed, view.num_failed, stages)

    def _line(self, step: int, rejected: int, stages: Mapping[str, int]) -> None:
        if self._written == (step, rejected, stages):
            return
        self._written = (step, rejected, stages)
        numbers = {f"rejected/{name}": number for name, number in sorted(stages.items())}
        values = {**self._count.speeds(), "rejected": rejected, **numbers}
        line = json.dumps({"step": step, TIME: time.time(), **values}) + "\n"
        try:
            if not self._is_marked:
                mark_start(self._folder.metrics)
                self._is_marked = True
            with self._folder.metrics.open("a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:  # a map does not fail for its curve
            if not self._has_failed:
                self._has_failed = True
                self._warn(f"the progress curve of this map has gaps: {error}")


_EVERY_S = 2.0


class Growing:
    """``--unordered``: every few seconds, append newly finished chunks to the output.

    Only what is committed is appended, so that the output never holds a chunk that is done again.
    """

    def __init__(self, folder: RunFolder, sink: SinkSpec) -> None:
        check_growable(sink)
        self._sink = sink
        self._appender: Appender | None = None
        self._folder = folder
        self._due_s = 0.0
        self._num_done = -1

    @property
    def appender(self) -> Appender:
        """What appends to the output. It is opened at the first use, which must be under the run's
        lock: opening it cuts off what another has written only in part.
        """
        if self._appender is None:
            self._appender = Appender(self._sink)
        return self._appender

    def close(self) -> None:
        if self._appender is not None:
            self._appender.close()

    def look(self, view: RunView) -> None:
        """Append new chunks; called with every view of the run."""
        now = time.monotonic()
        if now < self._due_s or view.num_done == self._num_done:
            return
        self._num_done = view.num_done
        self.add_all()
        # Reading the ledger takes longer the more chunks there are: a tenth of the time at most.
        self._due_s = time.monotonic() + max(_EVERY_S, 10 * (time.monotonic() - now))

    def add_all(self) -> None:
        for part in parts_of(self._folder):
            self.appender.add(part)


class CopyingAhead:
    """A thread that has finished chunks written to the output while others are computed, so that
    little is left to do at the end. Where it fails, it leaves nothing, and `publish` does it all.

    ``sink``: what the output is, asked for once there is a finished chunk; ``shards``: the number
    of rows of each.
    """

    def __init__(
        self, folder: RunFolder, sink: Callable[[], SinkSpec], shards: Sequence[int]
    ) -> None:
        self._folder = folder
        self._sink, self._shards = sink, shards
        self._ahead: Ahead | None = None
        self._num_done = 0
        self._has_more, self._is_over = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def look(self, view: RunView) -> None:
        """Called with every view of the run, under its lock, by a thread that outlives this."""
        if view.num_done != self._num_done:
            self._num_done = view.num_done
            self._has_more.set()
        if self._thread is None and view.num_done and not self._is_over.is_set():
            try:
                self._ahead = ahead_of(self._sink(), self._shards)
            except (MusterError, OSError):
                self._is_over.set()
                return
            self._thread = threading.Thread(
                target=self._copy, args=(self._ahead,), name="muster-merge", daemon=True
            )
            self._thread.start()

    def end(self) -> Ahead | None:
        """Stop; returns what is written, if it was begun."""
        self._is_over.set()
        self._has_more.set()
        if self._thread is not None:
            self._thread.join()
        return self._ahead

    def _copy(self, ahead: Ahead) -> None:
        try:
            self._copy_finished(ahead)
        except (MusterError, OSError):
            ahead.discard()
        except BaseException:
            ahead.discard()
            raise

    def _copy_finished(self, ahead: Ahead) -> None:
        pause_s = 0.0
        while not self._is_over.wait(pause_s):
            self._has_more.wait()
            self._has_more.clear()
            began = time.monotonic()
            parts = parts_of(self._folder)
            # The ledger takes longer the more chunks there are: a tenth of the time at most.
            pause_s = 10 * (time.monotonic() - began)
            for part in parts:
                if self._is_over.is_set():
                    return
                ahead.add(part)
            ahead.sync()
