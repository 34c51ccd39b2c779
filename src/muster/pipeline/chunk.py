"""One chunk: a range of rows of a shard, read, run through the stages and journaled.

``run_chunk`` is the target of a map's tasks. It may be killed at any moment and called again: the
rows in the journal are not read again, and a row that kills its worker is found and rejected.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from muster.base.atomic_files import disk_error, explain_os_error
from muster.base.device_faults import (
    BrokenContext,
    give_memory_back,
    hidden_fault,
    looks_like_lost_device,
    why_unfit,
)
from muster.base.errors import TargetError
from muster.pipeline.batch import (
    BatchSize,
    Failure,
    OutOfMemory,
    Row,
    Step,
    Usual,
    are_usual,
    failure_of,
    outcomes,
    settle,
    wait_for,
)
from muster.pipeline.journal import Journal
from muster.pipeline.portion import Portion
from muster.pipeline.recovery import InProgress, Kind, recovery
from muster.pipeline.sources.source import BLANK, ArrowRow, BadRow, Shard
from muster.pipeline.stages import EngineError
from muster.pipeline.worker import TaskContext, Worker, worker_of
from muster.pipeline.writing import RowWriter

if TYPE_CHECKING:
    import asyncio

_LOOK_EVERY_S = 0.2
_Read = tuple[int, dict[str, Any] | BadRow | None]
Numbered = Iterator[_Read]


def run_chunk(
    ctx: Any, order: int, first: int, count: int, file: int, place: list[int], start: int, stop: int
) -> dict[str, Any]:
    """Process rows ``start`` to ``stop`` of the shard; returns what the ledger keeps of them."""
    worker = worker_of(ctx)
    shard = Shard(order, first, count, file, tuple(place))
    parts = worker.folder.parts_of(order)
    try:
        journal = Journal(parts, ctx.key, worker.plan.session)
        try:
            return Chunk(ctx, worker, shard, journal, start, stop).run()
        finally:
            journal.close()
    except OSError as error:
        if disk_error(error) is None:
            raise
        # Trying again at once would not help; the next start of the run does.
        raise TargetError(str(explain_os_error(error, "write to", parts))) from error


class Chunk:
    def __init__(
        self,
        ctx: TaskContext,
        worker: Worker,
        shard: Shard,
        journal: Journal,
        start: int,
        stop: int,
    ) -> None:
        self._ctx = ctx
        self._worker = worker
        self._shard = shard
        self._journal = journal
        self._keeps_ids = worker.plan.keeps_ids
        self._size = BatchSize(worker.batch_size)
        self._recovery = recovery(journal.in_progress(), ctx.tries, worker.plan.row_retries)
        self._portion = Portion(
            ctx, worker, shard, (start, stop), journal, self._recovery, self._size
        )
        self._in_flight: set[int] = set()
        self._doubted: list[Row] = []  # rows that killed their workers, not stored yet
        self._num_blank = 0
        self._row_of = worker.source.row_of(shard)
        #: Whether no row of this chunk was found to kill its worker.
        self._is_healthy = self._recovery.row < 0
        self._writer = RowWriter(worker, journal, self._row_of)

    def run(self) -> dict[str, Any]:
        before = self._blank_before()
        self._set_up()
        rows = self._read()
        if self._worker.waiting:
            assert self._worker.loop is not None
            self._worker.loop.run_until_complete(self._run_waiting(rows))
        else:
            self._run_batches(rows)
        self._store_doubted()
        self._writer.end()
        num_blank = self._num_blank + before
        start, stop, done = self._portion.start, self._portion.stop, self._journal.num_done
        if done != stop - start or any(self._journal.missing(start, stop)):
            raise AssertionError(f"{done} rows stored of {start} to {stop}")
        totals = self._journal.finish()
        self._portion.report(is_last=True)
        return {
            "order": self._shard.order,
            "start": start,
            "stop": stop,
            "rows_in": stop - start,
            "rows_out": totals.num_rows,
            "rejected": totals.num_rejects,
            "dropped": totals.num_dropped - num_blank,
            "blank": num_blank,
            "bytes": totals.size,
            "sha256": totals.sha256,
            "errors_bytes": totals.bad_size,
            "own_ids": self._writer.has_own_ids,
            "ids": self._writer.ids.ends,
        }

    def _set_up(self) -> None:
        if self._worker.is_set_up:
            return
        if self._recovery.num_starts > self._worker.plan.row_retries + 2:
            raise TargetError(
                f"The worker died {self._recovery.num_starts} times while it set up its stages.",
                hint="the log of the worker has its last lines: muster errors RUN.",
            )
        self._journal.begin(self._recovery.starting(self._ctx.tries))
        try:
            with self._portion.sharing():
                self._worker.set_up()
        except EngineError:
            self._ctx.retire()
            raise
        except Exception as error:
            # Most causes (a wrong path, a missing package) are there the next time as well.
            failure = failure_of("setup", error)
            if self._ctx.device != "cpu" and looks_like_lost_device(failure.reason):
                self._blame_nobody()
                raise
            raise TargetError(f"The stages cannot be set up: {failure.reason}") from error
        if self._ctx.device != "cpu" and (unfit := why_unfit()):
            self._blame_nobody()
            raise RuntimeError(unfit)

    # ------------------------------------------------------------------ reading

    def _blank_before(self) -> int:
        """Count the blank lines of earlier attempts, which the journal keeps as dropped rows."""
        if self._worker.plan.source["kind"] not in ("jsonl", "csv", "tsv"):
            return 0
        return sum(
            row is BLANK
            for start, stop in self._journal.stored(self._portion.start, self._portion.stop)
            for _, row in self._worker.source.read(self._shard, start, stop)
        )

    def _read(self) -> Numbered:
        """Read the rows that are not in the journal yet, in order."""
        missing = list(self._journal.missing(self._portion.start, self._portion.stop))
        read = self._worker.source.read
        return itertools.chain.from_iterable(read(self._shard, *rows) for rows in missing)

    def _take(self, rows: Numbered, most: int) -> list[_Read]:
        """The next rows, up to the chunk's end, which sharing may have moved.

        Where an earlier attempt has died, it is one row at a time.
        """
        portion = self._portion
        most = 1 if portion.next < self._recovery.stop else most
        most = min(most, portion.stop - portion.next)
        taken = list(itertools.islice(rows, most)) if most > 0 else []
        while taken and taken[-1][0] >= portion.stop:  # rows before it were in the journal
            taken.pop()
        if not taken:
            portion.next = max(portion.next, portion.stop)
            return taken
        portion.next = taken[-1][0] + 1
        self._in_flight.update([number for number, _ in taken])
        self._journal.begin(self._note())
        return taken

    def _note(self) -> InProgress:
        doubted = self._doubted[0].number if self._doubted else -1
        first, end = min(self._in_flight), self._portion.next
        return self._recovery.note(first, end, self._ctx.tries, doubted)

    def _rows(self, taken: Sequence[_Read]) -> list[Row]:
        return [self._row(number, record) for number, record in taken]

    def _usual(self, taken: Sequence[_Read]) -> Usual | None:
        """The rows as a whole; None where one of them takes more care, as `_row` does it."""
        first, count = taken[0][0], len(taken)
        records: list[Any] = [record for _, record in taken]
        # An ArrowRow is no dict in this sense.
        if taken[-1][0] - first != count - 1 or not are_usual(records, keeps_ids=False):
            return None
        if not self._is_healthy:
            return None
        if self._keeps_ids and are_usual(records, keeps_ids=True):
            return Usual(first, [record["id"] for record in records], records)
        ids = list(map(self._row_of, range(first, first + count)))
        if self._keeps_ids:
            records = [
                record if "id" in record else {"id": own, **record}
                for own, record in zip(ids, records, strict=True)
            ]
            ids = [record["id"] for record in records]
        return Usual(first, ids, records)

    def _row(self, number: int, record: dict[str, Any] | BadRow | None) -> Row:
        absolute = self._row_of(number)
        if self._recovery.has_verdict(number):
            return Row(number, absolute, [], [self._recovery.verdict])
        if isinstance(record, dict):
            source = record if isinstance(record, ArrowRow) else None
            if not self._keeps_ids:
                return Row(number, absolute, [record], [], source)
            if "id" not in record:
                record = {"id": absolute, **record}
            return Row(number, record["id"], [record], [], source)
        if record is BLANK:
            self._num_blank += 1
        elif isinstance(record, BadRow):
            return Row(number, absolute, [], [Failure("read", f"{record.where}: {record.reason}")])
        return Row(number, absolute, [], [])

    # ------------------------------------------------------------------ stages for batches

    def _run_batches(self, rows: Numbered) -> None:
        pace = self._worker.pace
        while True:
            began = time.perf_counter()
            taken = self._take(rows, self._size.now if pace is None else pace.now)
            if not taken:
                break
            batch = self._usual(taken) or self._rows(taken)
            read = time.perf_counter()
            self._worker.waited_s += read - began
            done = self._through(self._worker.before, batch)
            seconds = time.perf_counter() - read
            self._store(done)
            self._worker.busy_s += time.perf_counter() - read
            if pace is not None:
                pace.took(seconds)
            self._portion.between(grain=self._size.now if pace is None else pace.now)

    def _through(self, steps: Sequence[Any], batch: Usual | list[Row]) -> Usual | list[Row]:
        """Run all steps on the batch, in pieces if memory does not hold it; returns what became of
        it, as objects where that is not usual any more.
        """
        for position, step in enumerate(steps):
            try:
                batch = self._after(step, batch)
                continue
            except OutOfMemory as error:
                reason = str(error)
            # After the handler: the error's frames may hold what the step made of other records.
            rows = batch.rows() if isinstance(batch, Usual) else batch
            self._in_pieces(steps[position:], rows, reason)
            return rows
        self._size.good()
        return batch

    def _after(self, step: Step, batch: Usual | list[Row]) -> Usual | list[Row]:
        if isinstance(batch, Usual):
            made = outcomes(step, batch.records)
            if are_usual(made, keeps_ids=self._keeps_ids):
                return batch._replace(records=made)
            batch = batch.rows()
        else:
            made = outcomes(step, [record for row in batch for record in row.records])
        settle(batch, made, keeps_ids=self._keeps_ids)
        return batch

    def _in_pieces(self, steps: Sequence[Any], batch: list[Row], reason: str) -> None:
        give_memory_back()
        if len(batch) == 1:
            reason = f"out of memory with this record alone: {reason}"
            batch[0].failures.append(Failure(steps[0].name, reason))
            batch[0].records = []
            return
        self._size.shrink(len(batch))
        while batch:  # the size may change with every piece
            piece, batch = batch[: self._size.now], batch[self._size.now :]
            self._through(steps, piece)

    # ------------------------------------------------------------------ stages that wait

    async def _run_waiting(self, rows: Numbered) -> None:
        """Keep ``concurrency`` rows in the waiting stages, and store each when it is done."""
        import asyncio  # which costs a worker that waits for nothing a third of its start

        ready: list[Row] = []
        running: set[asyncio.Task[Row]] = set()
        is_over = False
        try:
            while True:
                is_wary = self._portion.next < self._recovery.stop
                room = 1 if is_wary else self._worker.concurrency
                while not is_over and len(running) < room:
                    if not ready:
                        began = time.perf_counter()
                        ready = self._rows(self._take(rows, min(self._size.now, room)))
                        self._worker.waited_s += time.perf_counter() - began
                        ready.reverse()
                        self._through(self._worker.before, ready)
                        is_over = not ready
                    if ready:
                        running.add(asyncio.create_task(self._waited(ready.pop())))
                    if ready and self._recovery.is_suspect(ready[-1].number):
                        break
                if not running:
                    return
                began = time.perf_counter()
                done, running = await asyncio.wait(
                    running, timeout=_LOOK_EVERY_S, return_when=asyncio.FIRST_COMPLETED
                )
                batch = sorted((task.result() for task in done), key=lambda row: row.number)
                if batch:
                    self._through(self._worker.after, batch)
                    self._store(batch)
                self._worker.busy_s += time.perf_counter() - began
                self._portion.between(grain=self._worker.concurrency)
        except EngineError:
            self._blame_nobody()
            self._ctx.retire()
            raise
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _waited(self, row: Row) -> Row:
        retries = self._worker.plan.exception_retries
        await wait_for(self._worker.waiting, row, keeps_ids=self._keeps_ids, retries=retries)
        return row

    def _store(self, batch: Usual | list[Row]) -> None:
        if isinstance(batch, Usual):
            # No doubt is left: where one of the chunk's rows has a verdict, none is usual.
            self._in_flight.difference_update(range(batch.first, batch.first + len(batch.ids)))
            if not self._writer.store_usual(batch):
                self._writer.store(batch.rows())
            return
        if self._ctx.device != "cpu":
            self._check_device([failure for row in batch for failure in row.failures])
        self._in_flight.difference_update([row.number for row in batch])
        if self._recovery.row >= 0:
            has_verdict = self._recovery.has_verdict
            self._doubted += [row for row in batch if has_verdict(row.number)]
            batch = [row for row in batch if not has_verdict(row.number)]
        if batch:
            self._store_doubted()  # now that this worker has lived through others
            self._writer.store(batch)

    def _store_doubted(self) -> None:
        judged, self._doubted = self._doubted, []
        if judged:
            self._writer.store(judged, is_certain=True)

    def _check_device(self, failures: Sequence[Failure]) -> None:
        """Raise where the device is gone or broken: no record is at fault, and none is stored."""
        for failure in failures:
            if failure.trace and looks_like_lost_device(failure.reason):  # no stage rejected it so
                self._blame_nobody()
                raise RuntimeError(failure.reason)  # and the farm stops believing the device
        if failures and (fault := hidden_fault()):
            # One of the rows broke the device; it is found like a row that ends the process.
            self._journal.begin(self._note().broken())
            said = f"{fault}: no kernel runs in this process now."
            raise BrokenContext(f"{said}\n{failures[0].trace}")

    def _blame_nobody(self) -> None:
        """Let a fresh process do the rows in flight, which count as not begun."""
        self._journal.begin(InProgress(0, 0, self._ctx.tries, Kind.NOTHING, 0))
