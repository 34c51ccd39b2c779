"""The life of a rank, from its start to its ending, whatever it trains.

start → join the process group → prepare (the task by its name, its code, a rehearsal, the newest
whole checkpoint) → steps, with evaluations, checkpoints and stops where all ranks have agreed →
results → ending, left in ``ending.json`` where the launcher finds it. Training a model and training
an agent are the same here; what differs is a ``Trainer``.
"""

from __future__ import annotations

import math
import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NamedTuple, Self

from muster.base.atomic_files import disk_error, explain_os_error
from muster.base.code import Code
from muster.base.codec import decode, write_json
from muster.base.device_faults import is_out_of_memory
from muster.base.errors import EXIT_REQUEUE, EXIT_SOME_FAILED, MusterError
from muster.base.signals import CANCEL, ENDING, WARNING, handled
from muster.gang.account import give_account
from muster.gang.beacon import BEACON
from muster.gang.topology import SlotKind, Topology, read_topology
from muster.rank.process_group import Gang, joined
from muster.rank.state import Say, Start, State
from muster.rank.task import code_of_task
from muster.run.folder import RunFolder

Results = dict[str, Any]


class Decision(NamedTuple):
    """What all ranks have agreed to do after a step."""

    stop: bool
    save: bool


class Trainer(ABC):
    """What differs between training a model and training an agent, on one rank.

    Every rank calls the same methods in the same order, so all of them may wait for the others.
    """

    gang: Gang
    state: State

    @abstractmethod
    def begin(self) -> None:
        """Prepare; it is called once, before the first step of this start."""

    @abstractmethod
    def status(self) -> Status:
        """Where the training is."""

    @abstractmethod
    def step(self, stop: StopFlag, interval: Interval) -> Decision | None:
        """Train one step, and agree on what follows.

        None: the step must be made again, in smaller parts, because memory ran out on some rank.
        """

    @abstractmethod
    def evaluate(self) -> bool:
        """Evaluate on the validation data; True when it is the best so far."""

    @abstractmethod
    def save(self, *, is_best: bool, at_end: bool = False) -> None:
        """Keep the state as it is now; it is written in the background."""

    @abstractmethod
    def sum_up(self, why: str) -> Results:
        """Evaluate what is reported once more, and write the results; the same on every rank."""

    @abstractmethod
    def headlines(self, results: Results) -> Iterable[str]:
        """Lines that show a person the results."""

    @abstractmethod
    def explain(self, error: BaseException) -> MusterError:
        """The error for memory that has run out and could not be recovered from."""

    @abstractmethod
    def close(self) -> None:
        """Free what is held; it is called once, whatever has happened."""


class Status(NamedTuple):
    """Where a training is after a step.

    ``step`` names checkpoints and lines of the record, ``updates`` is what
    ``--checkpoint-interval 500steps`` counts. ``total_steps``: None where the end is not given in
    steps. ``over``: why the training is over, None while it is not.
    """

    step: int
    updates: int
    total_steps: int | None
    over: str | None
    wants_evaluation: bool


class Trainable(NamedTuple):
    """What can be trained: a model or an agent.

    ``config``: the class of its settings; ``make``: its task from target, class of settings and
    values; ``begin``: all that comes before the first step, from task and settings.
    """

    config: type[Any]
    make: Callable[[str, str | None, Mapping[str, Any]], Any]
    begin: Callable[[Any, Any, Start], Trainer]


def be_rank(
    what: Trainable,
    *,
    task: str,
    task_config: str | None,
    task_values: Mapping[str, Any],
    config: Mapping[str, Any],
    folder: str,
    **how: Any,
) -> None:
    """One rank as the launcher starts it: everything it needs is JSON.

    A user's mistake ends the rank with exit code 2 or 3 and is written where the launcher finds
    it, without a traceback.
    """
    place = RunFolder(Path(folder))
    with refusals_told(place):
        code = code_of_task(task)  # before it is imported: it is the code that will run
        made = what.make(task, task_config, task_values)
        settings = decode(what.config, config, ignore_unknown=True)
        topology = read_topology()
        told = failure_told(place, 0 if topology is None else topology.rank)
        live(what, made, settings, place, topology, print, code=code, told=told, **how)


def live(
    what: Trainable,
    task: Any,
    config: Any,
    folder: RunFolder,
    topology: Topology | None,
    say: Say,
    *,
    checkpoint_s: float | None = 60.0,
    checkpoint_steps: int | None = None,
    num_devices: int = 1,
    slot: SlotKind | None = None,
    stop: StopFlag | None = None,
    code: Code | None = None,
    allow_changed_code: bool = False,
    told: AbstractContextManager[None] | None = None,
) -> Results | None:
    """Train ``task`` in this process as one rank; None when it was asked to stop.

    ``slot``: see ``joined``; ``stop``: knows afterwards who has asked, on whatever rank; ``told``:
    tells of what is raised inside, before the ranks part.
    """
    stop, told = stop or StopFlag(), told or nullcontext()
    with joined(topology, num_devices=num_devices, slot=slot) as gang, told, stop:
        say = say if gang.is_first else _silent
        BEACON.phase = "setup"
        if gang.is_first:  # an earlier start has written it
            folder.ending_json.unlink(missing_ok=True)
        start = Start(
            gang=gang,
            folder=folder,
            say=say,
            code=code or {},
            allow_changed_code=allow_changed_code,
        )
        trainer = what.begin(task, config, start)
        interval = Interval(seconds=checkpoint_s, steps=checkpoint_steps, is_first=gang.is_first)
        try:
            with memory_explained(trainer.explain):
                ending = _train(trainer, stop, interval)
        except BaseException:
            BEACON.phase, BEACON.collective = "ending", ""  # it waits for nobody any more
            raise
        finally:
            trainer.close()
        if ending.kind == "requeue":
            step = trainer.status().step
            _tell_requeue(folder, gang, trainer.status())
            say(f"stopped    at step {step:,}, saved: {ending.why}")
            return None
        BEACON.phase = "finish"
        results = trainer.sum_up(ending.why)
        if gang.is_first:  # a signal that comes from now on has nothing left to interrupt
            write_json(folder.ending_json, {"ending": "finished"})
        for line in trainer.headlines(results):
            say(line)
        return results


def _train(trainer: Trainer, stop: StopFlag, interval: Interval) -> Ending:
    """Train until the end, or until any rank is asked to stop; every rank returns the same.

    A rank never acts on a signal, a clock or a shortage of its own: it brings them to the sum that
    ends every step, and all ranks act on that sum. So they save and stop at the same step.
    """
    trainer.begin()
    status = trainer.status()
    while status.over is None:
        decision = trainer.step(stop, interval)
        if decision is None:
            continue
        is_best = False
        status = trainer.status()
        if status.wants_evaluation:
            BEACON.phase = "evaluation"
            is_best = trainer.evaluate()
            status = trainer.status()  # it may have been the last that patience allows
        if is_best or decision.save or decision.stop or interval.is_due_at(status.updates):
            BEACON.phase = "checkpoint"
            trainer.save(is_best=is_best)
            interval.done()
        if decision.stop:
            stop.name = next(filter(None, trainer.gang.council.gather(stop.name)), "")
            trainer.state.wait()
            return Ending("requeue", f"asked to stop ({stop.word})")
    BEACON.phase = "checkpoint"
    trainer.save(is_best=False, at_end=True)
    trainer.state.wait()
    trainer.gang.council.meet()
    return Ending("finished", status.over)


def _silent(text: str) -> None:
    return


@contextmanager
def memory_explained(explain: Callable[[BaseException], MusterError]) -> Iterator[None]:
    """Raise the error that ``explain`` makes of memory that runs out inside."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise explain(error) from None


# ------------------------------------------------------------------------------------- endings


class Ending(NamedTuple):
    """``finished``: the training is over; ``requeue``: it was asked to stop and has saved."""

    kind: Literal["finished", "requeue"]
    why: str


class StartAgain(MusterError):
    """The training is not over: the launcher starts the gang again."""


class NonFinite(MusterError):
    """A loss, a parameter or an input is infinite or not a number."""

    exit_code = EXIT_SOME_FAILED


@contextmanager
def refusals_told(folder: RunFolder) -> Iterator[None]:
    """Write a user's mistake to where the launcher finds it, without a traceback."""
    try:
        yield
    except MusterError as error:
        _tell(folder, error)
        raise SystemExit(error.exit_code) from None
    except Exception as error:
        found = disk_error(error)
        if found is None:
            raise
        place = Path(found.filename) if isinstance(found.filename, str) else folder.path
        explained = explain_os_error(found, "write", place)
        _tell(folder, explained)
        raise SystemExit(explained.exit_code) from error


@contextmanager
def failure_told(folder: RunFolder, rank: int) -> Iterator[None]:
    """The same, and of any other error: the traceback and its record. To part from the others may
    take long, and they fail by it: whoever writes nothing down before that looks like their victim.
    """
    with refusals_told(folder):
        try:
            yield
        except Exception as error:
            if not isinstance(error, MusterError) and disk_error(error) is None:
                give_account(error, folder, rank)
            raise


def _tell(folder: RunFolder, error: MusterError) -> None:
    kind = "restart" if isinstance(error, StartAgain) else "refused"
    phase = "setup" if BEACON.step < 0 else BEACON.phase  # what a rehearsal says is not meant
    word = {"message": str(error), "exit_code": error.exit_code, "phase": phase}
    with suppress(OSError):  # the disk may be too full even for this
        write_json(folder.ending_json, {"ending": kind, **word})


def _tell_requeue(folder: RunFolder, gang: Gang, status: Status) -> None:
    """Tell the launcher that this was no failure and no end: the same command goes on."""
    if gang.is_first:
        values = {"ending": "requeue", "step": status.step, "total_steps": status.total_steps}
        write_json(folder.ending_json, {**values, "exit": EXIT_REQUEUE})
    gang.council.meet()


# -------------------------------------------------- asked to stop, and when a checkpoint is due

#: A batch system signals all processes, and the launcher passes the same signal on.
_ECHO_S = 3.0


class StopFlag:
    """A context: inside it SIGTERM, SIGUSR1, SIGINT and SIGHUP ask for a stop at the next step.

    So does ``is_cancelled``, which is asked at every step. A second signal ends the process at
    once; in one of the caller's own (``is_callers``) it is KeyboardInterrupt there.
    ``name``: what has asked first, a signal or `CANCEL`; "" before.
    """

    def __init__(
        self, is_cancelled: Callable[[], bool] = lambda: False, *, is_callers: bool = False
    ) -> None:
        self.name = ""
        self._is_set = False
        self._is_cancelled = is_cancelled
        self._is_callers = is_callers
        self._ending_since_s: float | None = None
        self._context = ExitStack()

    def __enter__(self) -> Self:
        # TERM and USR1 come from our launcher, whatever its own caller has ignored.
        taken = handled(ENDING, self._on_signal, always=("SIGTERM", WARNING))
        self._context.enter_context(taken)
        return self

    def __exit__(self, *_: object) -> None:
        self._context.close()

    @property
    def is_set(self) -> bool:
        if not self._is_set and self._is_cancelled():
            self._is_set, self.name, self._ending_since_s = True, CANCEL, 0.0
        return self._is_set

    @property
    def word(self) -> str:
        """What has asked, for people."""
        return "muster cancel" if self.name == CANCEL else self.name

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # USR1 only warns: it is neither the first of two nor the second, which ends a rank at once.
        if number != getattr(signal, WARNING, None):
            now_s = time.monotonic()
            if self._ending_since_s is None:
                self._ending_since_s = now_s
            elif self._is_callers:
                # Nobody passes a caller's Ctrl-C on: a second one is meant, however soon it comes.
                if number == signal.SIGINT or now_s - self._ending_since_s > _ECHO_S:
                    raise KeyboardInterrupt
            elif now_s - self._ending_since_s > _ECHO_S:
                os._exit(128 + number)
        if not self._is_set:
            self._is_set, self.name = True, signal.Signals(number).name


class Interval:
    """When a checkpoint is due: every so many seconds (as rank 0 counts) or steps."""

    def __init__(self, *, seconds: float | None, steps: int | None, is_first: bool) -> None:
        self._seconds = seconds if is_first else None
        self._steps = steps
        self._due_s = math.inf if self._seconds is None else time.monotonic() + self._seconds

    def is_due(self) -> bool:
        """Whether the time has come; it is only ever true on rank 0, whose clock counts for all."""
        return time.monotonic() >= self._due_s

    def is_due_at(self, step: int) -> bool:
        return self._steps is not None and step % self._steps == 0

    def done(self) -> None:
        if self._seconds is not None:
            self._due_s = time.monotonic() + self._seconds
