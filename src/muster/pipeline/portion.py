"""The rows that an attempt has of a shard: how far it is, and what it gives away of them."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from muster.base.errors import TargetError
from muster.base.processes import resident_mib
from muster.pipeline.batch import BatchSize
from muster.pipeline.journal import Journal
from muster.pipeline.recovery import Recovery
from muster.pipeline.sources.source import Shard
from muster.pipeline.stages import METER
from muster.pipeline.worker import TaskContext, Worker

_REPORT_EVERY_S = 0.2
_MEMORY_EVERY_S = 0.5
_ANSWER_EVERY_S = 0.2
_SET_UP_LIMIT_S = 1800.0


class Portion:
    """Rows ``start`` to ``stop`` of a shard, of which ``next`` is the first that has not been read.
    ``stop`` comes nearer when rows are given away. ``size``: that of the batches.
    """

    def __init__(
        self,
        ctx: TaskContext,
        worker: Worker,
        shard: Shard,
        rows: tuple[int, int],
        journal: Journal,
        recovery: Recovery,
        size: BatchSize,
    ) -> None:
        self.start, self.stop = rows
        self.next = self.start
        self._ctx, self._worker, self._shard = ctx, worker, shard
        self._journal, self._recovery, self._size = journal, recovery, size
        self._seen: tuple[int, object] | None = None
        self._reported_s = self._looked_s = 0.0

    @contextmanager
    def sharing(self) -> Iterator[None]:
        """Give idle workers their share of the rows while this one loads its model.

        The thread touches nothing but the end of this chunk, and nobody else does before it ends.
        """
        is_over = threading.Event()

        began = time.monotonic()

        def answer() -> None:
            while not is_over.wait(_ANSWER_EVERY_S):
                others = self._ctx.num_waiting
                if others:
                    self._share(others, grain=self._worker.batch_size)
                if time.monotonic() - began < _SET_UP_LIMIT_S:
                    self.report()  # loading does not count as hanging, up to a limit

        thread = threading.Thread(target=answer, name="muster-sharing", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def between(self, grain: int) -> None:
        """Between two batches: share rows with idle workers, check memory, report progress."""
        others = self._ctx.num_waiting
        if others:
            self._share(others, grain)
        now = time.monotonic()
        limit = self._worker.plan.max_worker_memory_mib
        if limit is not None and now - self._looked_s > _MEMORY_EVERY_S:
            self._looked_s = now
            if resident_mib() > limit:
                self._hand_over(limit)
        if now - self._reported_s > _REPORT_EVERY_S and self._has_moved():
            self.report()

    def _has_moved(self) -> bool:
        """Whether a row or a token was finished since the last call.

        Only that counts as progress and postpones the time limit.
        """
        seen = (self._worker.num_rows, METER.read())
        before, self._seen = self._seen, seen
        return bool(seen != before)

    @property
    def _free_from(self) -> int:
        """The first row that no attempt has touched."""
        return max(self.next, self._journal.end, self._recovery.stop)

    def _share(self, others: int, grain: int) -> None:
        """Keep an even share of the rows to come, at least two batches, and give the rest away."""
        begin, left = self._free_from, self.stop - self._free_from
        pieces = max(1, min(others + 1, left // (2 * max(1, grain)) + 1))
        width = max(1, math.ceil(left / pieces))
        given = list(itertools.pairwise([*range(begin + width, self.stop, width), self.stop]))
        if given:
            self._divide(given[0][0], given)
        else:
            self._ctx.divide({}, [])

    def _hand_over(self, limit_mib: float) -> None:
        """Leave the rest to a fresh process, because this one is over its memory limit."""
        if self._worker.num_rows <= self._worker.batch_size:
            raise TargetError(
                f"The worker holds {resident_mib():,.0f} MiB after its first batch; "
                f"--max-worker-memory allows {limit_mib:,.0f} MiB; a fresh one would hold as much.",
                hint="allow more, or lower --batch-size.",
            )
        begin = self._free_from
        if begin < self.stop:
            self._divide(begin, [(begin, self.stop)])
        self._ctx.retire()

    def _divide(self, stop: int, given: list[tuple[int, int]]) -> None:
        common = {**self._shard._asdict(), "place": list(self._shard.place)}
        self.stop = stop
        kept = {**common, "start": self.start, "stop": stop}
        self._ctx.divide(kept, [{**common, "start": a, "stop": b} for a, b in given])

    def report(self, *, is_last: bool = False) -> None:
        self._reported_s = time.monotonic()
        worker = self._worker
        left = 0 if is_last else self.stop - self.next
        done = self.next - self.start
        text = f"{done:,} of {self.stop - self.start:,} records of shard {self._shard.order}"
        if self._size.now != worker.batch_size:
            text += f", batch {self._size.now}"
        self._ctx.measure(text, {**worker.numbers(), "left": float(left)})
