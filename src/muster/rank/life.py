"""The life of a rank, from its start to its ending, whatever it trains.

start → join the process group → prepare (the task by its name, its code, a rehearsal, the newest
whole checkpoint) → steps, with evaluations, checkpoints and stops where all ranks have agreed →
results → ending, left in ``ending.json`` where the launcher finds it. Training a model and training
an agent are the same here; what differs is a ``Trainer``.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from muster.base.atomic_files import disk_error, explain_os_error
from muster.base.code import Code
from muster.base.codec import decode, write_json
from muster.base.device_faults import is_out_of_memory
from muster.base.errors import EXIT_REQUEUE, EXIT_SOME_FAILED, MusterError
from muster.gang.beacon import BEACON
from muster.gang.topology import SlotKind, Topology, read_topology
from muster.rank.checkpoint import (
    CheckpointWriter,
    agree_on_best,
    intact_best,
    newest_intact,
    put_back,
)
from muster.rank.checkpoint_files import (
    load_state,
    optimizer_scalars,
    read_extra,
    step_folder,
)
from muster.rank.process_group import Gang, joined
from muster.rank.stop import Interval, StopFlag
from muster.rank.task import check_code, code_of_task
from muster.run.folder import RunFolder

Say = Callable[[str], None]
Results = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Start:
    """What a rank begins with. ``say`` is silent on all ranks but the first."""

    gang: Gang
    folder: RunFolder
    say: Say
    code: Code
    allow_changed_code: bool


class Decision(NamedTuple):
    """What all ranks have agreed to do after a step."""

    stop: bool
    save: bool


class Trainer(ABC):
    """What differs between training a model and training an agent, on one rank.

    Every rank calls the same methods in the same order, so all of them may wait for the others.
    """

    gang: Gang
    checkpoints: CheckpointWriter

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

    ``step`` names checkpoints and lines of the record, ``updates`` is what --checkpoint-steps
    counts. ``total_steps``: None where the end is not given in steps. ``over``: why the training is
    over, None while it is not.
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
        live(what, made, settings, place, read_topology(), print, code=code, **how)


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
    is_cancelled: Callable[[], bool] = lambda: False,
    code: Code | None = None,
    allow_changed_code: bool = False,
) -> Results | None:
    """Train ``task`` in this process as one rank; None when it was asked to stop.

    ``slot``: see ``joined``.
    """
    with (
        joined(topology, num_devices=num_devices, slot=slot) as gang,
        StopFlag(is_cancelled) as stop,
    ):
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
    while (over := trainer.status().over) is None:
        decision = trainer.step(stop, interval)
        if decision is None:
            continue
        is_best = False
        status = trainer.status()
        if status.wants_evaluation:
            BEACON.phase = "evaluation"
            is_best = trainer.evaluate()
        if is_best or decision.save or decision.stop or interval.is_due_at(status.updates):
            trainer.save(is_best=is_best)
            interval.done()
        if decision.stop:
            trainer.checkpoints.wait()
            return Ending("requeue", f"asked to stop ({stop.name or 'on another rank'})")
    trainer.save(is_best=False, at_end=True)
    trainer.checkpoints.wait()
    trainer.gang.council.meet()
    return Ending("finished", over)


def _silent(text: str) -> None:
    return


# ------------------------------------------------------------------------- what trainers share


def newest_state(start: Start) -> tuple[Path | None, Mapping[str, Any]]:
    """The newest whole checkpoint and its JSON values, the same on every rank.

    Raises PlanMismatchError, on every rank, where it is of other code.
    """
    gang, folder, step = start.gang, start.folder.checkpoints, None
    if gang.is_first:
        put_back(folder)
        step = newest_intact(folder, start.say)
    step = gang.council.share(step)
    checkpoint = None if step is None else step_folder(folder, step)
    extra = {} if checkpoint is None else read_extra(checkpoint)
    check_code(
        extra.get("code", {}), start.code, gang, start.folder, start.say,
        allow_changed=start.allow_changed_code,
    )  # fmt: skip
    return checkpoint, extra


def state_record(
    gang: Gang,
    code: Code,
    progress: Any,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None,
) -> dict[str, Any]:
    """The JSON values of every checkpoint, from which ``newest_state`` and ``restore`` go on."""
    return {
        "progress": dataclasses.asdict(progress),  # a copy: it is written later
        "code": code,
        "scaler": scaler.state_dict() if scaler is not None else None,
        "optimizer_scalars": optimizer_scalars(model, optimizer),
        "num_ranks": gang.num_ranks,
    }


def restore(
    start: Start,
    checkpoint: Path,
    extra: Mapping[str, Any],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Bring model, optimizer and loss scaling to the state in ``checkpoint``."""
    load_state(checkpoint, model, optimizer, extra["optimizer_scalars"], group)
    if scaler is not None and extra.get("scaler"):
        scaler.load_state_dict(extra["scaler"])
    if start.gang.is_first:
        progress = extra["progress"]
        agree_on_best(start.folder.checkpoints, progress["best_step"], progress["best"])


def load_best(
    gang: Gang,
    folder: RunFolder,
    say: Say,
    model: torch.nn.Module,
    group: dist.ProcessGroup | None = None,
) -> int | None:
    """Bring ``model`` to the best checkpoint, or leave it as it ended; returns the step."""
    step = gang.council.share(intact_best(folder.checkpoints, say) if gang.is_first else None)
    if step is None:
        return None
    load_state(step_folder(folder.checkpoints, step), model, None, {}, group)
    return int(step)


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


def is_improvement(value: float, best: float | None, *, higher_is_better: bool) -> bool:
    """Whether a monitored value is the best so far; NaN never is."""
    if value != value:
        return False
    return best is None or (value > best if higher_is_better else value < best)


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
