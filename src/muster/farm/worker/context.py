"""The context: what a task may ask of Muster while it runs."""

from __future__ import annotations

import io
import math
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from muster.base.atomic_files import sync_tree, write_atomic
from muster.base.metric_log import as_number
from muster.farm import canonical, wire
from muster.farm.metrics import encode, names_in
from muster.farm.results import plain_state, split_logged, with_logged
from muster.farm.task import Order
from muster.farm.worker.files import Folders, task_logger
from muster.farm.worker.gather import Follower, Gatherer, JointGatherer
from muster.farm.worker.inbox import Halt, Line
from muster.run.folder import RunFolder

if TYPE_CHECKING:
    import logging

_REPORT_EVERY_S = 0.2
_JSON, _TORCH = b"J", b"T"
#: Of a context's gatherer: several threads of a task may log their first numbers at once.
_MAKING = threading.Lock()


class MadeRoom(BaseException):
    """A task ends where it may: its worker loses its place, or the task is told to end early.

    Not an Exception, so that code which catches those lets it pass.
    """


class Surroundings(NamedTuple):
    """What all tasks of a worker find; ``pid``: its own."""

    folder: RunFolder
    device: str
    line: Line
    pid: int


class Context:
    """What Muster passes to a function that has a parameter named ``ctx``.

    Attributes
        device: ``"cuda:0"`` or ``"cpu"``; a worker sees only the device of its slot.
        seed: the task's seed, or ``None`` when the sweep has none.
        run, task, attempt: the run's name, the start of the task's key, and the number of this
            attempt from 1, as they stand in logs.
        tries: how many earlier attempts failed through the task's own fault.
        params: the task's parameters.
    """

    # Most tasks ask for nothing, and many are short: what they begin with is set once for all.
    _has_files = False
    _gathering: Gatherer | None = None
    _follower: Follower | None = None
    _joint: JointGatherer | None = None
    _others: Sequence[Context] = ()  # of the other tasks of this call
    _goal = ""
    _rungs: Sequence[float] = ()
    _first_rung = math.inf
    _at_rung: tuple[str, int, float, float] | None = None  # the last point from there on
    _has_restored = False
    _reported_s = 0.0
    _is_retiring = False
    #: The most memory that the processes of a command had, in MiB, for its row.
    command_peak_mib: float | None = None
    #: Whether the task has asked and heard that a search ends it early.
    knows_its_end = False

    def __init__(self, worker: Surroundings, order: Order, params: Mapping[str, Any]) -> None:
        self.params = params
        self._worker = worker
        self._order = order

    @property
    def device(self) -> str:
        return self._worker.device

    @property
    def seed(self) -> int | None:
        return self.params.get("seed")

    @property
    def run(self) -> str:
        return self._worker.folder.name

    @property
    def task(self) -> str:
        return self._order.key[:12]

    @property
    def attempt(self) -> int:
        return self._order.attempt

    @property
    def tries(self) -> int:
        return self._order.tries

    def is_decided_at(self, goal: str, rungs: Sequence[float]) -> None:
        """A search decides at these steps of the metric ``goal`` whether the task goes on."""
        self._goal = goal
        self._rungs = rungs
        self._first_rung = min(rungs, default=math.inf)

    @property
    def _gatherer(self) -> Gatherer:
        """Made when the first numbers are logged: most tasks log none, and many are short."""
        if self._gathering is None:
            with _MAKING:
                if self._gathering is None:
                    order, worker = self._order, self._worker
                    self._gathering = Gatherer(order.task_id, order.token, worker.line, worker.pid)
        return self._gathering

    @property
    def folder(self) -> Path:
        """This attempt's private folder, made on first use.

        It is published by rename under ``artifacts/`` when the result has been accepted, so
        that nobody ever sees the files of a task that did not finish.
        """
        if not self._has_files:
            self._path.mkdir(parents=True, exist_ok=True)
            self._has_files = True
        return self._path

    @cached_property
    def _path(self) -> Path:
        return self._worker.folder.attempt(self._order.key, self._order.token)

    def make_folders(self, folders: Folders) -> tuple[str, str]:
        """Make ``folder``, and the one for what the program of this task saves, which every attempt
        finds again; returns both.
        """
        # As texts: this is done for each command, and a Path costs as much as a system call.
        own = f"{self._worker.folder.attempts}/{self._order.key}.{self._order.token}"
        saved = f"{self._worker.folder.checkpoints}/{self._order.key}"
        folders.make(own)
        self._has_files = True
        os.makedirs(saved, exist_ok=True)  # noqa: PTH103
        return own, saved

    def has_no_files(self) -> None:
        """Note that ``folder`` is gone again, for nothing was written to it."""
        self._has_files = False

    def sync_files(self) -> None:
        """Write the attempt's files through to the disk, before its result can be accepted."""
        if self._has_files:
            sync_tree(self._path)

    @property
    def has_files(self) -> bool:
        """Whether ``folder`` was asked for."""
        return self._has_files

    @property
    def logger(self) -> logging.Logger:
        """A logger for the task's log, with run, task, attempt and process id in every line."""
        return task_logger(self.run, self.task, self.attempt)

    def log(self, step: int, **metrics: Any) -> None:
        """Record numbers of this step, such as ``ctx.log(epoch, loss=0.3, accuracy=0.9)``.

        They are stored in the run like a result: what was logged before a result was accepted, or
        before a checkpoint was saved, is neither lost nor there twice, whatever is killed. Where a
        later attempt logs a step again, it replaces that step and all further ones of the metric.

        A number is a bool, int or float, or a NumPy scalar or tensor without dimensions; reading
        one from a GPU waits for it. NaN and infinities are kept. Raises TargetError, and records
        nothing, for other values and in another process than the task's own. Points are sent twice
        a second; a call costs microseconds, but at a rung of a search it waits until the search has
        decided whether the task goes on.

        In a batched function a metric has a number for each task of the call, in the order of their
        parameters: a list, an array or a tensor of one dimension; a single number is for all.
        """
        if self._joint is not None:
            self._joint.add(step, metrics)
            return
        self._gatherer.add(step, metrics)
        if self._goal in metrics and step >= self._first_rung:
            value = as_number(self._goal, metrics[self._goal])
            self._at_rung = self._goal, step, time.time(), value
        if self._rungs and self._goal in metrics and step >= self._rungs[0]:
            # Half a second later a fast task would be far beyond the rung, and all of it in vain.
            self._rungs = [rung for rung in self._rungs if rung > step]
            self._gatherer.settle()
        if self.halted == "stop":
            raise MadeRoom

    def log_for(self, contexts: Sequence[Context], start: int) -> None:
        """Have ``log`` record for the tasks of all these, which one call computes; ``start`` as in
        `JointGatherer`."""
        self._others = contexts[1:]
        self._joint = JointGatherer([context._gatherer for context in contexts], start)

    def log_mapping(self, step: int, numbers: Mapping[str, float]) -> None:
        """Record numbers that others have found, under names that no keyword can have."""
        self._gatherer.add(step, numbers)

    def follower(self) -> Follower:
        """What forwards the numbers that the program of this attempt writes to a file."""
        return Follower(
            self._worker.folder,
            self._order.key,
            self._order.task_id,
            self._order.token,
            self._worker.line,
        )

    def file_of_programs(self) -> str:
        """A file to which programs of this task append numbers, as one that is a command does."""
        if self._follower is None:
            self._follower = self.follower()
            self._follower.__enter__()
            self._follower.look_regularly()
        return self._follower.place

    def end_log(self) -> None:
        """Send what was logged and has not been sent; called when the task has ended."""
        if self._follower is not None:
            self._follower.__exit__()
        if self._gathering is not None:
            self._gathering.end()

    def report(self, progress: float | str | None = None, message: object = "") -> None:
        """Show progress on the live display: a share from 0 to 1, a message, or both.

        It is cheap: at most five reports a second are sent, the others are dropped. None is stored.
        """
        now = time.monotonic()
        if now - self._reported_s < _REPORT_EVERY_S:
            return
        self._reported_s = now
        if isinstance(progress, str):  # report("epoch 1")
            progress, message = None, f"{progress} {message}"
        share = "" if progress is None else f"{100 * float(progress):.0f} % "
        self._worker.line.progress(self._order.task_id, f"{share}{message}".strip(), {})

    # ------------------------------------------------------------------ long, divisible tasks

    @property
    def run_path(self) -> Path:
        """The run folder."""
        return self._worker.folder.path

    @property
    def key(self) -> str:
        """The task's key, which names it in the ledger and in file names."""
        return self._order.key

    @property
    def num_waiting(self) -> int:
        """How many other workers wait for a part of this task; answer with ``divide``."""
        return self._worker.line.wanted(self._order.task_id)

    def divide(self, kept: Mapping[str, Any], given: Sequence[Mapping[str, Any]]) -> None:
        """Go on with the parameters ``kept`` and make a new task of each item of ``given``.

        ``given`` is empty when too little is left to share. Whichever process is killed at whatever
        moment, the ledger holds either the whole task or all of its pieces.
        """
        self._worker.line.divide(self._order.task_id, self._order.token, kept, given)

    def measure(self, text: str, numbers: Mapping[str, float]) -> None:
        """Send a line for the display, and sums since the worker started, such as of records.

        ``left`` in ``numbers`` is how much of this task remains. For a divisible task each call is
        also the sign of life that ``--timeout`` waits for.
        """
        self._worker.line.progress(self._order.task_id, text, numbers)

    def retire(self) -> None:
        """Have a fresh process take this worker's place after this task."""
        self._is_retiring = True

    @property
    def is_retiring(self) -> bool:
        """Whether ``retire`` was called."""
        return self._is_retiring

    @property
    def should_stop(self) -> bool:
        """Whether this task is to end: on SLURM its job is being preempted or is near its time
        limit, or a search stops it early. Call ``checkpoint`` at once then.
        """
        if self.halted is not None:
            self.knows_its_end = True
            return True
        return self._worker.line.should_stop()

    @property
    def halted(self) -> Halt | None:
        """Whether this task is to end early: at once ("stop") or at a checkpoint ("pause")."""
        return self._worker.line.halted(self._order.task_id)

    def runs(self, pid: int | None, *, passes_on: bool = False) -> None:
        """Note the process of the command that is this task; None: it has ended."""
        self._worker.line.runs(self._order.task_id, pid, passes_on=passes_on)

    def checkpoint(self, state: Mapping[str, Any]) -> None:
        """Replace the saved state by ``state`` atomically, so that a later attempt can go on.

        When ``should_stop`` is true this call does not return: the attempt ends here, and a later
        one goes on from ``restore``. A task that calls this now and then needs to do nothing else.

        Values may be anything that a result may hold, and tensors, which are saved with
        ``torch.save`` and read back with ``weights_only=True``. Raises TargetError for others.
        """
        # Ahead of the state: the next attempt begins behind these points and does not log them.
        for one in (self, *self._others):
            one._gatherer.flush()
        unsafe = [
            (one._order.key, body)
            for one in (self, *self._others)
            for body in one._gatherer.unconfirmed()
        ]
        # One that is told to rest here may be lost before that is known. The next attempt says by
        # this point that it stands where it was to rest, and does not go a step further.
        point = self._at_rung if self.halted == "pause" else None
        if point and not any(self._goal in names_in(body) for _, body in unsafe):
            unsafe.insert(0, (self._order.key, encode([point])))
        logged = b"".join(wire.pack([key], body) for key, body in unsafe)
        path = self._worker.folder.checkpoint(self._order.key)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch = sys.modules.get("torch")
        if torch is not None and _holds_tensor(state, torch):
            buffer = io.BytesIO()
            torch.save(dict(state), buffer)
            write_atomic(path, with_logged(logged, _TORCH + buffer.getvalue()))
        else:
            saved = _JSON + canonical.encode(plain_state(state))
            write_atomic(path, with_logged(logged, saved))
        self._has_restored = True  # what this file says was logged was sent by this attempt
        if self.should_stop:
            raise MadeRoom

    def restore(self) -> dict[str, Any] | None:
        """The state that an attempt of this task saved last, or ``None`` when there is none.

        In a search it does not return where that attempt was to pause with this state, and was lost
        before the pause was recorded: the task pauses now.

        Tensors come back on the CPU. Raises RuntimeError when the state holds tensors and torch has
        not been imported.
        """
        path = self._worker.folder.checkpoint(self._order.key)
        try:
            logged, data = split_logged(path.read_bytes())
        except FileNotFoundError:
            return None
        if logged and not self._has_restored:
            frames = list(wire.unpack(bytearray(logged)))
            for one in (self, *self._others):
                # Older musters named no task: their frames are those of the only one.
                one._gatherer.send_again(
                    [
                        body
                        for head, body in frames
                        if (head or [self._order.key]) == [one._order.key]
                    ]
                )
            if self._first_rung < math.inf:
                self._gatherer.settle()
                if self.halted == "pause":
                    raise MadeRoom
        self._has_restored = True
        if data[:1] == _JSON:
            state: dict[str, Any] = canonical.decode(data[1:])
            return state
        torch = sys.modules.get("torch")
        if torch is None:
            raise RuntimeError(
                f"the checkpoint {path} holds tensors: import torch before ctx.restore()"
            )
        loaded: dict[str, Any] = torch.load(
            io.BytesIO(data[1:]), map_location="cpu", weights_only=True
        )
        return loaded


def _holds_tensor(value: Any, torch: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, Mapping):
        return any(_holds_tensor(item, torch) for item in value.values())
    if isinstance(value, list | tuple):
        return any(_holds_tensor(item, torch) for item in value)
    return False
