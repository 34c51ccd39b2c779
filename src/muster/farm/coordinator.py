"""The loop of a run: hears what happened, asks the scheduler, records, then acts.

It is the only writer of the ledger. One turn is one transaction: everything that has arrived is
recorded together with the claims for what is sent next, committed, and only then acted upon.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence

from muster.base.collector import collecting_rarely
from muster.base.errors import MusterError, TargetError
from muster.base.journal import Journal
from muster.farm.decide import Scheduler
from muster.farm.decisions import Decisions
from muster.farm.dispatch import may_wait
from muster.farm.events import (
    Drain,
    Event,
    Fetched,
    Logged,
    Note,
    Results,
    TargetBroken,
    WorkerDied,
    WorkerReady,
)
from muster.farm.executors.base import Executor
from muster.farm.ledger.store import Ledger
from muster.farm.plan import FIRST_CHUNK, Beside, Ending, Listing, Plan, Request, imbalance_of_tasks
from muster.farm.results import INLINE_BYTES, publish, publish_after_crash, store_value
from muster.farm.steering import Asked, Steering
from muster.farm.task import AttemptRecord, Task, TaskState
from muster.farm.view import Picture

#: Results that arrive within this time share one commit, or so many of them.
GATHER_S, _FULL_COMMIT = 0.004, 256
_MOST_GATHERED = 3  # times as long, of results that come one by one
_VIEW_EVERY_S = 0.1
_VIEW_PER_SLOT_S = 1e-4  # a line of it takes a twentieth of that to make
_HOUSEKEEPING_EVERY_S = 0.5
_GOODBYE_S = 5.0
_MAX_REASONS = 3
_SNAPSHOT_EVERY_S = 60.0  # of a ledger that does not live in its run folder


class Coordinator:
    def __init__(
        self, plan: Plan, ledger: Ledger, executor: Executor, journal: Journal, beside: Beside
    ) -> None:
        self._plan = plan
        self._ledger = ledger
        self._executor = executor
        self._journal = journal
        self._beside = beside
        counts = ledger.counts()
        ended = sum(count for state, count in counts.items() if state.is_final)
        self._steering: Steering | None = None
        self._problem: MusterError | None = None  # why nothing more is begun
        total = at_once = plan.total
        if plan.driver is not None:
            self._steering = Steering(plan.driver, ledger, plan.folder)
            self._steering.begin()
            total, at_once = self._steering.num_expected, self._steering.num_at_once
        self._scheduler = Scheduler(
            plan.policy,
            plan.slots,
            plan.targets,
            expected=max(0, max(at_once, sum(counts.values())) - ended),
            first_worker_id=ledger.next_worker_id(),
        )
        self._scheduler.pace.remember(ledger.lengths())
        for slot_id, held in plan.held.items():
            self._scheduler.roster.adopt(slot_id, held, beside.clock.monotonic_s())
        self._picture = Picture(plan.folder.name, total, beside.clock.monotonic_s())
        self._picture.adopt(held.worker_id for held in plan.held.values())
        self._listing = Listing(plan, ledger)
        self._early: list[Event] = []  # heard while tasks were listed
        self._heard: list[Request] = []
        self._refetch = False
        self._num_short = 0  # tasks that were asked for and did not come
        self._asked = Asked(ledger, plan)
        self._is_to_cancel = False  # once all tasks are known
        self._cancelling = False
        self._stopping = False
        self._interrupted = False
        self._host = socket.gethostname()
        self._next_view_s = 0.0
        self._next_housekeeping_s = 0.0
        self._next_snapshot_s = beside.clock.monotonic_s() + _SNAPSHOT_EVERY_S

    def run(self) -> Ending:
        """Work until nothing is left or somebody wants it to end. Leaves no process behind."""
        with collecting_rarely():
            return self._run()

    def _run(self) -> Ending:
        self._picture.start(self._ledger.counts())
        try:
            # After the tasks that were to be stopped are: their folders are kept.
            publish_after_crash(self._plan.folder, self._ledger.accepted)
            if self._ledger.is_away:
                # A snapshot that knows every task makes the shipped results complete.
                self._feed_rest()
                self._ledger.snapshot()
            self._loop()
        except BaseException:
            self._ledger.roll_back()
            raise
        finally:
            self._executor.close()
        return self._end()

    # ------------------------------------------------------------------ the loop

    def _loop(self) -> None:
        goodbye_s: float | None = None
        if not self._is_asked():  # to end, while its tasks were listed
            events, self._early = self._early, []
            # Processes start while a first picture is made and written.
            self._turn(events, self._now())
        while not self._stopping:
            events, self._early = self._early, []
            events += self._executor.poll(self._patience_s())
            # Not where all is done and workers end: no result is about to arrive.
            may_gather = not (self._listing.goes_on or self._scheduler.is_finished)
            if events and may_gather and not self._fills_commit(events):
                events += self._gather(events)
            now = self._now()
            events += self._outside(now)
            self._turn(events, now)
            if not self._scheduler.is_finished or self._listing.goes_on or self._is_to_cancel:
                goodbye_s = None  # tasks may be added while workers say goodbye
                continue
            if goodbye_s is None:
                goodbye_s = now + _GOODBYE_S
                # Now: what comes after the last task can begin while workers leave.
                self._beside.show(self._picture.view(self._scheduler, now, "ending"))
            if not self._scheduler.roster.workers or now > goodbye_s:
                return

    def _fills_commit(self, events: list[Event]) -> bool:
        """Whether these are many results, or a worker waits: for its first task or a joint call."""
        if any(isinstance(event, WorkerReady) for event in events):
            return True
        workers = self._scheduler.roster.workers
        if sum(len(e.finished) for e in events if isinstance(e, Results)) >= _FULL_COMMIT:
            return True
        return any(
            isinstance(event, Results)
            and (worker := workers.get(event.worker_id)) is not None
            and 1 < len(worker.in_flight) <= len(event.finished)
            and worker.together
            for event in events
        )

    def _gather(self, events: list[Event]) -> list[Event]:
        """Let results that are about to arrive join this commit."""
        found: list[Event] = []
        for _ in range(_MOST_GATHERED):
            time.sleep(GATHER_S)
            found += self._executor.poll(0.0)
            if not may_wait([*events, *found], self._scheduler.roster, self._scheduler.pace):
                break
        return found

    def _turn(self, events: list[Event], now: float) -> None:
        steering = self._steering
        orders = [] if steering is None else steering.take_orders()
        decisions = self._scheduler.step([*events, *orders], now)
        decisions.notes += [event for event in events if isinstance(event, Note)]
        if steering is not None:
            orders += steering.tell(events, decisions, self._scheduler, now)
            self._doubt(steering.problem, decisions)
            self._refetch |= bool(orders or decisions.done or decisions.failed or decisions.stopped)
            self._refetch |= bool(decisions.cancelled or self._asked.has_news)
        has_records = bool(
            decisions.done or decisions.failed or decisions.tried or decisions.retokened
            or decisions.reopened or decisions.divided or decisions.late or decisions.fetch
            or decisions.starts or decisions.stopped or decisions.promoted
            or decisions.cancelled or self._asked.has_news
        )  # fmt: skip
        deaths = [event for event in events if isinstance(event, WorkerDied)]
        broken = [event for event in events if isinstance(event, TargetBroken)]
        logged = [event for event in events if isinstance(event, Logged)]
        has_news = bool(has_records or deaths or broken or logged or orders)
        if has_news or self._listing.goes_on or self._refetch or self._cancelling:
            self._ledger.begin()
            self._record(decisions, deaths, logged, orders)
            fetched = self._fetch(decisions.fetch)
            self._ledger.commit()
            self._asked.answer()
            self._publish(decisions)
            if broken:  # what came with it has been recorded
                raise TargetError(broken[0].message)
            if self._problem is not None and not self._scheduler.open_tasks():
                raise self._problem  # what ran has ended, and has not changed it
            self._obey(decisions, now)
            # Last: a task that waits at a rung has heard by then that it is to end.
            own = sorted((e.worker_id, e.serial) for e in logged if e.serial > 0)
            for worker_id, serial in dict(own).items():  # the highest; no one asks for others
                self._executor.confirm(worker_id, serial)
            if fetched is not None:
                self._obey_next(fetched, now)
        else:
            self._obey(decisions, now)
        self._picture.note(events, decisions, now)

    def _doubt(self, problem: MusterError | None, decisions: Decisions) -> None:
        """Let what runs go on where more would be in vain: it may show otherwise."""
        if problem is not None and problem is not self._problem:
            why = str(problem).partition("\n")[0]
            decisions.notes.append(("waiting", f"{why} Nothing more begins; what runs goes on."))
        self._problem = problem

    def _obey_next(self, fetched: Fetched, now: float) -> None:
        """Fresh claims are committed: hand them out without waiting for another event."""
        decisions = self._scheduler.step([fetched], now)
        if decisions.fetch:
            # Asked again at once only when the first answer fell short; the next turn serves it.
            # A driver that has nothing to say is asked again when something has happened.
            self._refetch = self._steering is None or bool(fetched.tasks)
            self._num_short = decisions.fetch
        if decisions.starts:
            self._ledger.begin()
            self._record_starts(decisions)
            self._ledger.commit()
        self._act(decisions)
        self._picture.note([], decisions, now)

    def _obey(self, decisions: Decisions, now: float) -> None:
        self._act(decisions)
        for kind, text in decisions.notes:
            self._journal.write(kind, text=text)

    def _act(self, decisions: Decisions) -> None:
        for worker_id, tasks, together in decisions.sends:
            self._executor.send(worker_id, tasks, together=together)
        for worker_id, task_id, others in decisions.shares:
            self._executor.share(worker_id, task_id, others)
        for worker_id, task_id, pauses in decisions.halts:
            self._executor.stop_task(worker_id, task_id, pauses=pauses)
        for worker_id in decisions.revokes:
            self._executor.revoke(worker_id)
        for worker_id, _reason in decisions.kills:
            self._executor.end(worker_id, kill=True)
        for worker_id in decisions.stops:
            self._executor.end(worker_id, kill=False)

    # ------------------------------------------------------------------ recording

    def _record(
        self,
        decisions: Decisions,
        deaths: list[WorkerDied],
        logged: list[Logged],
        orders: list[Event],
    ) -> None:
        ledger = self._ledger
        self._record_starts(decisions)  # first: processes start while the rest is recorded
        if self._listing.goes_on:
            self._feed()
        if logged:
            ledger.record_metrics([(e.task_id, e.token, e.serial, e.body) for e in logged])
        for division in decisions.divided:
            task = division.task
            given = [(key, payload) for payload, key in division.given]
            # With the smaller task or not at all, and ahead of its result.
            self._picture.added(ledger.divide(task, task.payload, given))
        if decisions.done:
            ledger.record_done(decisions.done, self._store_values(decisions.done))
        if decisions.failed:
            ledger.record_failed(decisions.failed)
        if decisions.tried:
            ledger.record_tried(decisions.tried)
        if decisions.retokened:
            ledger.retoken(decisions.retokened)
        if decisions.reopened:
            ledger.retoken(decisions.reopened)
        # After the new tokens: a task may have lost its worker and be stopped in one turn.
        if decisions.stopped:
            assert self._steering is not None
            last = [self._steering.last_of(task.task_id) for task, _ in decisions.stopped]
            ledger.record_stopped(decisions.stopped, last)
        if decisions.promoted:
            ledger.reopen_stopped(decisions.promoted)
        for worker_id, finished in decisions.late:
            ledger.record_late(worker_id, finished)
        for death in deaths:
            ledger.worker_ended(death.worker_id, death.reason)
        waited = self._asked.record(self._scheduler, decisions, self._picture)
        if self._steering is not None:
            self._steering.cancelled(waited)
            decisions.stopped += self._steering.stop_waiting(orders)
            self._steering.record()

    def _record_starts(self, decisions: Decisions) -> None:
        for slot_id, worker_id in decisions.starts:
            slot = self._scheduler.roster.spec_of(slot_id)
            log = self._executor.start(worker_id, slot)
            self._ledger.worker_started(worker_id, slot, self._host, log, self._plan.code)

    def _store_values(self, done: Sequence[AttemptRecord]) -> list[tuple[bytes | None, str | None]]:
        """What the ledger holds of each result; a large one gets a file of its own."""
        folder, key_of = self._plan.folder, self._ledger.key_of
        return [
            (value, None)
            if len(value := record.finished.value) <= INLINE_BYTES
            else store_value(folder, key_of(record.task_id).hex(), value)
            for record in done
        ]

    def _publish(self, decisions: Decisions) -> None:
        folder = self._plan.folder
        has_checkpoints = bool(decisions.done) and (
            folder.checkpoints.exists() or folder.points.exists()
        )
        for record in decisions.done:
            if record.finished.files or has_checkpoints:
                key = self._ledger.key_of(record.task_id).hex()
                publish(folder, key, record.token)
        for task, ended in decisions.stopped:
            if ended is not None:
                publish(folder, task.key.hex(), ended.token, may_go_on=True)

    def _feed(self) -> None:
        self._picture.added(self._listing.add(self._is_asked, self._hear_early))
        if not self._listing.goes_on:
            self._journal.write("enqueued", tasks=self._picture.known)

    def _fetch(self, count: int) -> Fetched | None:
        if self._cancelling:
            self._picture.cancelled(self._ledger.cancel_open())
            self._listing.end()
            self._stopping = True
            return None
        if not (count or self._refetch):
            return None
        self._refetch = False
        if self._steering is not None:
            is_ending = self._scheduler.draining or self._scheduler.paused or self._problem
            return None if is_ending else self._steering.choose(self._scheduler, self._picture)
        count = count or self._num_short or FIRST_CHUNK
        tasks: list[Task] = self._ledger.claim(count)
        return Fetched(tasks, exhausted=len(tasks) < count and not self._listing.goes_on)

    # ------------------------------------------------------------------ outside

    def _outside(self, now: float) -> list[Event]:
        events: list[Event] = []
        requests, self._heard = [*self._heard, *self._beside.requests()], []
        if now >= self._next_view_s:
            num_slots = len(self._scheduler.roster.slots)
            self._next_view_s = now + max(_VIEW_EVERY_S, num_slots * _VIEW_PER_SLOT_S)
            view = self._picture.view(self._scheduler, now, self._phase())
            self._beside.show(view)
            events += self._asked.hear(self._beside.asked())
            if now >= self._next_snapshot_s:
                self._next_snapshot_s = now + _SNAPSHOT_EVERY_S
                self._ledger.snapshot()
            if now >= self._next_housekeeping_s:
                self._next_housekeeping_s = now + _HOUSEKEEPING_EVERY_S
                self._refetch |= self._steering is not None  # its time may be up
                happened, asked = self._beside.do(view)
                events += happened
                requests += asked
        for request in requests:
            if request is Request.CANCEL and self._is_to_cancel:
                continue  # who cancels leaves a mark, which is seen twice a second
            self._journal.write("wish", what=request.value)  # old journals hold this word
            match request:
                case Request.DRAIN:
                    self._interrupted = True
                    self._listing.goes_on &= self._is_to_cancel
                    events.append(Drain())
                case Request.STOP:
                    self._interrupted = True
                    self._stopping = True
                    events.append(Drain())  # nothing more begins in its last turn
                case Request.CANCEL:
                    # All of its tasks must be known, to say that they are cancelled. They are
                    # listed turn by turn: a million takes seconds, and who stops is to be heard.
                    self._is_to_cancel = True
                    self._listing.go_on()
                    events += [Drain()] * self._listing.goes_on
        self._cancelling = self._is_to_cancel and not self._listing.goes_on
        return events

    def _is_asked(self) -> bool:
        self._heard += self._beside.requests()
        return bool(self._heard)

    def _feed_rest(self) -> None:
        """List all tasks before any is begun, unless a signal comes."""
        while self._listing.goes_on and not self._is_asked():
            self._ledger.begin()
            self._feed()
            self._ledger.commit()
            self._hear_early()

    def _hear_early(self) -> None:
        """Hear what happens while tasks are listed, which also shows that this goes on."""
        self._early += self._executor.poll(0.0)

    def _phase(self) -> str:
        if self._scheduler.draining:
            return "draining"
        if self._scheduler.paused:
            return "paused"
        return "running"

    def _patience_s(self) -> float:
        if self._listing.goes_on or self._refetch:
            return 0.0
        due = self._scheduler.next_deadline()
        wait_s = _VIEW_EVERY_S if due is None else min(_VIEW_EVERY_S, due - self._now())
        return max(0.0, wait_s)

    def _now(self) -> float:
        return self._beside.clock.monotonic_s()

    def _end(self) -> Ending:
        """Give back what was claimed, so that the ledger says `ready` and not `claimed`."""
        scheduler = self._scheduler
        self._ledger.begin()
        if not self._cancelling:
            self._ledger.release(scheduler.open_tasks())
        if self._steering is not None and self._steering.is_over:
            self._listing.end()
        self._ledger.index_keys()  # where the listing was stopped: older musters read it then
        self._ledger.commit()
        self._ledger.snapshot()
        why = [slot.quarantined for slot in scheduler.roster.slots if slot.quarantined]
        unusable = "" if scheduler.roster.usable() else _reasons(why)
        self._beside.show(self._picture.view(scheduler, self._now(), "ending"))
        counts = self._ledger.counts()
        is_listed = self._listing.is_listed
        planned = self._plan.total if is_listed else 0
        is_left = not is_listed or any(n for state, n in counts.items() if not state.is_final)
        return Ending(
            counts=counts,
            paused=scheduler.paused,
            interrupted=self._interrupted and is_left,
            # Asked after the last task had ended, it has cancelled nothing: finished is finished.
            cancelled=self._cancelling and bool(counts[TaskState.CANCELLED]),
            unusable=unusable,
            imbalance=imbalance_of_tasks(planned, counts, self._ledger.num_results()),
            notes=self._picture.notes,
        )


def _reasons(reasons: list[str]) -> str:
    """The first few: a hundred workers mostly have one and the same."""
    more = f"; and {len(reasons) - _MAX_REASONS} more" if len(reasons) > _MAX_REASONS else ""
    return "; ".join(reasons[:_MAX_REASONS]) + more
