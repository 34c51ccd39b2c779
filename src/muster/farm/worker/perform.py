"""Runs tasks, one after another, in this process, and turns whatever happens into a record."""

from __future__ import annotations

import inspect
import os
import sys
import time
import traceback
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from muster.base.device_faults import (
    BrokenContext,
    give_memory_back,
    hidden_fault,
    is_in_use,
    names_of,
    why_unfit,
)
from muster.base.errors import TargetError
from muster.base.metric_log import logging_to
from muster.base.target import TargetRef, load
from muster.farm import canonical
from muster.farm.batched import batch_spec_of
from muster.farm.outcomes import outcome_of_error, outcome_of_output
from muster.farm.parameters import Signature, signature_of, to_call
from muster.farm.results import check_result, keep_beside
from muster.farm.task import FINISHED, Finished, Order, Outcome, TargetSpec
from muster.farm.template import OWN_PROGRAM
from muster.farm.worker.command import CommandFailed, run_command
from muster.farm.worker.context import Context, MadeRoom, Surroundings
from muster.farm.worker.files import Folders, Place, TaskLog
from muster.farm.worker.inbox import Line
from muster.farm.worker.memory import Peak
from muster.farm.worker.seeding import Generators
from muster.run.folder import RunFolder

_TRACE_LIMIT = 20_000


@dataclass(frozen=True)
class _Loaded:
    spec: TargetSpec
    function: Callable[..., Any] | None
    signature: Signature | None
    wants_context: bool


@dataclass(frozen=True)
class _Failure:
    """What is kept of an exception; ``trace``: its traceback, or the end of a command's log."""

    outcome: Outcome
    message: str
    trace: str = ""
    signal: int | None = None
    is_poisoned: bool = False

    def of(self, finished: Finished) -> Finished:
        """The record of a task that has failed in this way."""
        return finished._replace(
            outcome=self.outcome,
            value=b"{}",
            message=self.message,
            trace=self.trace,
            signal=self.signal,
            poisoned=finished.poisoned or self.is_poisoned,
        )


#: What is added to the message of a command, which says with which code it ended.
_OF_A_COMMAND = {
    Outcome.DEVICE_OOM: ": CUDA out of memory",
    Outcome.DEVICE_FAULT: ": its GPU cannot be used",
}


class Performer:
    """Holds the loaded targets; ``run`` and ``run_together`` never raise for a task's fault."""

    def __init__(
        self,
        targets: Mapping[int, TargetSpec],
        folder: RunFolder,
        device: str,
        *,
        log: Path | None,
        line: Line,
        spare: Path | None = None,
    ) -> None:
        """``spare``: what the names of folders begin with that are kept for commands; see
        `Folders`.
        """
        self.device = device
        self._around = Surroundings(folder, device, line, os.getpid())
        self._targets = {number: _load(spec) for number, spec in targets.items()}
        # After the targets: what they set on import is theirs to keep.
        self._log = TaskLog(log)
        self._place = Place()
        self._peak = Peak()
        self._folders = Folders(spare)
        self.generators = Generators()
        self._is_fit = False  # torch is known to use the GPU of this slot

    def run(self, order: Order) -> Finished:
        started, begin = time.time(), time.perf_counter()
        log_start = self._log.begin()
        loaded = self._targets[order.target_id]
        function = loaded.function
        if function is not None:
            self._peak.begin(begin)
        context: Context | None = None
        value = b"{}"
        failure: _Failure | None = None
        try:
            params = canonical.decode(order.payload)
            context = self._context(order, params)
            if function is None:
                value = run_command(loaded.spec, params, context, self._log, self._folders)
                # A program that was told to end may end well with a part of its result; a gang of
                # ours says by another exit code that it is not done.
                if context.halted is not None and loaded.spec.argv[0] != OWN_PROGRAM:
                    raise MadeRoom
            else:
                self.generators.fix(order.key)
                call = params if loaded.signature is None else to_call(loaded.signature, params)
                if loaded.wants_context:
                    call = {**call, "ctx": context}
                with logging_to(context.log, context.file_of_programs):
                    returned = function(**call)
                if context.knows_its_end:
                    raise MadeRoom  # it was told to end, so this need not be all of its result
                value = _store(returned, context, self._log)
            context.sync_files()
        except BaseException as error:  # user code may raise anything; only its task fails
            failure = self._explain(error, context)
        if context is not None:
            context.end_log()  # ahead of the result
        if failure is not None or "torch" in sys.modules:
            failure = self._ask_device(failure)
        seconds = time.perf_counter() - begin
        if function is not None:
            peak, on_device = self._peak.mib(seconds)
        else:
            peak, on_device = context.command_peak_mib if context is not None else None, False
        retires, has_files = False, False
        if context is not None:
            retires, has_files = context.is_retiring, context.has_files
        finished = FINISHED(
            (order.task_id, order.token, Outcome.OK, started, seconds, log_start, self._end(), peak,
             value, "", "", None, retires, has_files, on_device)
        )  # fmt: skip
        return finished if failure is None else failure.of(finished)

    def run_together(self, orders: Sequence[Order]) -> list[Finished]:
        """One call of a batched target; if it raises, halves find the task that is to blame.

        An exception among the results fails its own task only.
        """
        finished: list[Finished] = []
        calls = [(list(orders), 0)]
        while calls:
            # The error of a call that failed is gone by now: its frames would keep its tensors.
            call, start = calls.pop()
            ended, has_raised = self._call(call, start)
            if has_raised and len(call) > 1 and not ended[0].poisoned:
                half = len(call) // 2
                calls += [(call[half:], start + 1), (call[:half], start + 1)]
            else:
                finished += ended
        return finished

    def _call(self, orders: Sequence[Order], start: int) -> tuple[list[Finished], bool]:
        """Call the target once; returns how each task ended, and whether the call itself raised.

        ``start``: how many calls that had these tasks have raised before.
        """
        loaded = self._targets[orders[0].target_id]
        assert loaded.function is not None
        started, begin = time.time(), time.perf_counter()
        log_start = self._log.begin()
        self._peak.begin()
        values: list[Any] = []
        contexts: list[Context] = []
        failure: _Failure | None = None
        try:
            params = [canonical.decode(order.payload) for order in orders]
            self.generators.fix(orders[0].key)
            contexts = list(map(self._context, orders, params))
            context = contexts[0]
            context.log_for(contexts, start)
            call = {"ctx": context} if loaded.wants_context else {}
            with logging_to(context.log):
                returned = loaded.function(params, **call)
            values = _check_batch(returned, len(orders))
        except BaseException as error:
            failure = self._explain(error)
        for one in contexts:
            one.end_log()  # ahead of the results
        failure = self._ask_device(failure)
        seconds = (time.perf_counter() - begin) / len(orders)
        peak, on_device = self._peak.mib()
        log_end = self._end()
        base = [
            Finished(
                order.task_id, order.token, Outcome.OK, started, seconds, log_start, log_end, peak,
                on_device=on_device,
            )
            for order in orders
        ]  # fmt: skip
        if failure is not None:
            return [failure.of(finished) for finished in base], True
        # What the call wrote into its folder belongs to the first of its tasks.
        return list(map(self._take, base, values, contexts)), False

    def _take(self, finished: Finished, value: Any, context: Context) -> Finished:
        """The record of a task whose joint call returned ``value`` for it."""
        try:
            if isinstance(value, Exception):
                raise value
            encoded = _store(value, context, self._log)
            context.sync_files()
        except Exception as error:
            return self._explain(error).of(finished._replace(files=context.has_files))
        return finished._replace(value=encoded, files=context.has_files)

    def _explain(self, error: BaseException, context: Context | None = None) -> _Failure:
        if context is not None and context.halted is not None:
            is_command = isinstance(error, CommandFailed) and bool(error.signal or error.code)
            if isinstance(error, MadeRoom) or is_command:
                return _Failure(Outcome.STOPPED, "it was told to end early")
        if isinstance(error, MadeRoom):
            said = "it saved its state because its worker is about to be stopped"
            return _Failure(Outcome.PREEMPTED, said, is_poisoned=True)
        if isinstance(error, TargetError):
            return _Failure(Outcome.BAD_RESULT, str(error))
        if isinstance(error, BrokenContext):
            message, trace = str(error).split("\n", 1)[0], _user_trace(error)
            return _Failure(Outcome.BROKEN_CONTEXT, message, trace, None, True)
        on_gpu = self.device != "cpu"
        if isinstance(error, CommandFailed):
            tail = self._log.tail()
            outcome = Outcome.CRASH if error.signal else Outcome.EXCEPTION
            if error.code:
                outcome = outcome_of_output(tail, on_gpu=on_gpu)
            message = f"{error}{_OF_A_COMMAND.get(outcome, '')}"
            is_poisoned = outcome is Outcome.DEVICE_FAULT
            return _Failure(outcome, message, tail, error.signal, is_poisoned)
        names, text = names_of(error), describe(error)
        message = text.split("\n", 1)[0][:2000]
        outcome = outcome_of_error(names, text, on_gpu=on_gpu)
        if isinstance(error, SystemExit):
            message = f"the task called sys.exit({error.code!r})"
        # torch names some faults after which nothing works; others show when the device is asked.
        has_fault = "AcceleratorError" in names or "CUDA error" in message
        is_poisoned = outcome is Outcome.DEVICE_FAULT or (
            outcome is Outcome.EXCEPTION and has_fault
        )
        return _Failure(outcome, message, _user_trace(error), None, is_poisoned)

    def _ask_device(self, failure: _Failure | None) -> _Failure | None:
        """Look at the device after a task; returns the task's failure, or None.

        A CUDA error may show only at a later call. Asking here charges it to this task, and not to
        the next one.
        """
        if fault := hidden_fault():
            if failure is not None:
                return replace(failure, is_poisoned=True)
            outcome = outcome_of_error((), fault)
            return _Failure(
                outcome, f"on the GPU, after the task had ended: {fault}", "", None, True
            )
        if self.device != "cpu" and not self._is_fit and "torch" in sys.modules:
            if unfit := why_unfit():
                return _Failure(Outcome.DEVICE_FAULT, unfit, is_poisoned=True)
            self._is_fit = True
        if failure is not None and (failure.outcome is Outcome.DEVICE_OOM or is_in_use()):
            give_memory_back()  # others may share the device
        return failure

    def _end(self) -> int:
        """Restore the folder and the output for the next task; returns where this one's ends."""
        self._place.restore()
        return self._log.end()

    def is_batched(self, target_id: int) -> bool:
        return self._targets[target_id].spec.is_batched

    def _context(self, order: Order, params: dict[str, Any]) -> Context:
        context, spec = Context(self._around, order, params), self._targets[order.target_id].spec
        if spec.goal:
            context.is_decided_at(spec.goal, spec.rungs)
        return context


def _load(spec: TargetSpec) -> _Loaded:
    if spec.kind == "command":
        return _Loaded(spec, None, None, False)
    location = spec.location
    is_file = location.endswith(".py")
    ref = TargetRef("file" if is_file else "module", location, spec.attribute)
    function = load(ref, Path(spec.base_folder))
    wants = "ctx" in inspect.signature(function).parameters
    if batch_spec_of(function) is not None:
        return _Loaded(spec, function, None, wants)
    return _Loaded(spec, function, signature_of(function), wants)


def _store(returned: object, context: Context, log: TaskLog) -> bytes:
    """Encode what a task returned; a value that becomes no column is kept in a file."""

    def keep(name: str, value: object) -> str:
        file = keep_beside(context.folder, name, value)
        log.say(f"muster: {canonical.shown_type(value)} has no column: {name} is the file {file}")
        return file

    try:
        return canonical.encode(check_result(returned, keep))
    except TargetError as error:
        if isinstance(returned, Generator | Coroutine):
            raise
        file = context.folder / keep("result", returned)
        raise TargetError(f"{error}\nWhat it returned is in {file}.") from error


def _check_batch(returned: Any, expected: int) -> list[Any]:
    if not isinstance(returned, list | tuple) or len(returned) != expected:
        what = f"{len(returned)} results" if isinstance(returned, list | tuple) else repr(returned)
        raise TargetError(
            f"A batched function got {expected} parameter sets and returned {what[:200]}.",
            hint="return a list with one result per parameter set, in the same order.",
        )
    return list(returned)


def describe(error: BaseException) -> str:
    """The type and the text of an error, whose ``__str__`` may itself raise."""
    try:
        text = str(error)
    except Exception as inner:
        text = f"<its text cannot be had: {type(inner).__name__}>"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _user_trace(error: BaseException) -> str:
    """The traceback from the first frame that is not muster's own."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    lines = traceback.format_exception(type(error), error, frames or error.__traceback__)
    return "".join(lines)[-_TRACE_LIMIT:]
