"""Runs tasks, one after another, in this process, and turns whatever happens into a record."""

from __future__ import annotations

import gc
import inspect
import random
import sys
import time
import traceback
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muster.base.errors import TargetError
from muster.base.target import TargetRef, load
from muster.farm import canonical
from muster.farm.batched import batch_spec_of
from muster.farm.lifecycle import ends_in_device_oom
from muster.farm.parameters import Signature, signature_of, to_call
from muster.farm.results import check_result, keep_beside
from muster.farm.task import Finished, Outcome, TargetSpec
from muster.farm.worker.command import CommandFailed, run_command
from muster.farm.worker.context import Context, MadeRoom
from muster.farm.worker.inbox import Line
from muster.farm.worker.logs import Place, TaskLog
from muster.farm.worker.memory import begin_peak, peak_mib
from muster.run.folder import RunFolder

_TRACE_LIMIT = 20_000


@dataclass(frozen=True)
class Order:
    """A task as it reaches a worker."""

    task_id: int
    token: int
    target_id: int
    key: str
    attempt: int
    payload: bytes
    tries: int = 0


@dataclass(frozen=True)
class _Loaded:
    spec: TargetSpec
    function: Callable[..., Any] | None
    signature: Signature | None
    wants_context: bool


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
    ) -> None:
        self._folder = folder
        self._device = device
        self._line = line
        self._targets = {number: _load(spec) for number, spec in targets.items()}
        # After the targets: what they set on import is theirs to keep.
        self._log = TaskLog(log)
        self._place = Place()

    def run(self, order: Order) -> Finished:
        started, begin = time.time(), time.perf_counter()
        log_start = self._log.begin()
        begin_peak()
        context: Context | None = None
        value, message, trace, sig, poisoned = b"{}", "", "", None, False
        outcome = Outcome.OK
        loaded = self._targets[order.target_id]
        is_command = loaded.function is None
        try:
            params = canonical.decode(order.payload)
            _seed_everything(order.key)
            context = self._context(order, params)
            if loaded.function is None:
                value = run_command(loaded.spec, params, context)
            else:
                call = params if loaded.signature is None else to_call(loaded.signature, params)
                if loaded.wants_context:
                    call = {**call, "ctx": context}
                value = _store(loaded.function(**call), context, self._log)
            context.sync_files()
        except BaseException as error:  # user code may raise anything; only its task fails
            outcome, message, trace, sig, poisoned = _explain(error, self._log)
        return Finished(
            order.task_id,
            order.token,
            outcome,
            started,
            time.perf_counter() - begin,
            log_start,
            self._end(),
            peak_mib() if context is None or not is_command else context.command_peak_mib,
            value,
            message,
            trace,
            sig,
            poisoned or (context is not None and context.is_retiring),
            context is not None and context.has_files,
        )

    def run_together(self, orders: Sequence[Order]) -> list[Finished]:
        """One call of a batched target; if it raises, halves find the task that is to blame.

        An exception among the results fails its own task only.
        """
        loaded = self._targets[orders[0].target_id]
        assert loaded.function is not None
        started, begin = time.time(), time.perf_counter()
        log_start = self._log.begin()
        begin_peak()
        try:
            params = [canonical.decode(order.payload) for order in orders]
            _seed_everything(orders[0].key)
            context = self._context(orders[0], params[0])
            call = {"ctx": context} if loaded.wants_context else {}
            returned = loaded.function(params, **call)
            values = _check_batch(returned, len(orders))
        except BaseException as error:
            outcome, message, trace, sig, poisoned = _explain(error, self._log)
            if len(orders) > 1 and not poisoned:
                half = len(orders) // 2
                return self.run_together(orders[:half]) + self.run_together(orders[half:])
            seconds = (time.perf_counter() - begin) / len(orders)
            log_end = self._end()
            return [
                Finished(
                    o.task_id, o.token, outcome, started, seconds, log_start, log_end, peak_mib(),
                    b"{}", message, trace, sig, poisoned,
                )
                for o in orders
            ]  # fmt: skip
        seconds = (time.perf_counter() - begin) / len(orders)
        log_end = self._end()
        peak = peak_mib()
        finished = []
        for order, own, item in zip(orders, params, values, strict=True):
            outcome, message, trace, sig, poisoned, value = Outcome.OK, "", "", None, False, b"{}"
            # What the call wrote into its folder belongs to the first of its tasks.
            mine = context if order is orders[0] else self._context(order, own)
            try:
                if isinstance(item, Exception):
                    raise item
                value = _store(item, mine, self._log)
                mine.sync_files()
            except Exception as error:
                outcome, message, trace, sig, poisoned = _explain(error, self._log)
            finished.append(
                Finished(
                    order.task_id, order.token, outcome, started, seconds, log_start, log_end,
                    peak, value, message, trace, sig, poisoned,
                    files=mine.has_files,
                )
            )  # fmt: skip
        return finished

    def _end(self) -> int:
        """Where the task's output ends; the next one finds folder and output as this one did."""
        self._place.restore()
        return self._log.end()

    def is_batched(self, target_id: int) -> bool:
        return self._targets[target_id].spec.is_batched

    def _context(self, order: Order, params: dict[str, Any]) -> Context:
        return Context(
            folder=self._folder,
            task_id=order.task_id,
            key=order.key,
            token=order.token,
            attempt=order.attempt,
            tries=order.tries,
            device=self._device,
            params=params,
            line=self._line,
        )


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
    """The encoded fields; what has no column, or as a whole no fields, is kept in a file."""

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


def _seed_everything(key: str) -> None:
    """Fix the global generators from the task's key.

    A worker runs many tasks; without this a result that draws from a global generator would
    depend on which tasks the same worker happened to run before.
    """
    seed = int(key[:8], 16)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(seed)


def _explain(error: BaseException, log: TaskLog) -> tuple[Outcome, str, str, int | None, bool]:
    """Outcome, one line, traceback or log tail, signal, and whether the device is poisoned."""
    if isinstance(error, MadeRoom):
        return Outcome.PREEMPTED, "it saved its state to make room for another job", "", None, True
    if isinstance(error, CommandFailed):
        tail = log.tail()
        if error.code and ends_in_device_oom(tail):
            return Outcome.DEVICE_OOM, f"{error}: CUDA out of memory", tail, None, False
        outcome = Outcome.CRASH if error.signal else Outcome.EXCEPTION
        return outcome, str(error), tail, error.signal, False
    if isinstance(error, TargetError):
        return Outcome.BAD_RESULT, str(error), "", None, False
    names = {base.__name__ for base in type(error).__mro__}
    trace = _user_trace(error)
    message = describe(error).split("\n", 1)[0][:2000]
    if names & {"OutOfMemoryError"}:
        _give_memory_back()
        return Outcome.DEVICE_OOM, message, trace, None, False
    is_cuda = "AcceleratorError" in names or "CUDA error" in message
    if isinstance(error, SystemExit):
        message = f"the task called sys.exit({error.code!r})"
    return Outcome.EXCEPTION, message, trace, None, is_cuda


def describe(error: BaseException) -> str:
    """Type and text of an error, whose ``__str__`` may itself raise."""
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


def _give_memory_back() -> None:
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
