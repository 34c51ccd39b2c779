"""A worker of a map: the plan it reads, and its stages, which are made and set up once."""

from __future__ import annotations

import atexit
import inspect
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from muster.base.codec import read_json, write_json
from muster.base.errors import TargetError, UsageError
from muster.base.freed_blocks import keep_freed_blocks
from muster.pipeline.batch import Pace, Step
from muster.pipeline.sources.source import Source
from muster.pipeline.sources.table import reopen
from muster.pipeline.stages import METER, REJECTED_IN, StageSpec, make_stage
from muster.run.folder import RunFolder

if TYPE_CHECKING:
    import asyncio

_DEFAULT_BATCH = 32
#: Functions of one record cost little: larger batches keep the journal's share small.
_DEFAULT_ROWS = 256
#: Of freed memory, for the next block of rows.
_KEPT_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True)
class MapPlan:
    """The plan of a map, as a worker reads it.

    ``batch_size`` 0: what the stages ask for. Memory is in MiB of resident set; None: no limit.
    ``keeps_types``: the output has types, so values are not converted to those of JSON.
    ``session``: a number of this start of the run.
    """

    source: Mapping[str, Any]
    stages: tuple[StageSpec, ...]
    base_folder: str
    batch_size: int = 0
    keeps_ids: bool = True
    row_retries: int = 1
    exception_retries: int = 0
    keep_going: bool = False
    keeps_types: bool = False
    max_worker_memory_mib: float | None = None
    session: int = 0


def write_plan(path: Path, plan: MapPlan) -> None:
    write_json(path, plan)


def read_plan(path: Path) -> MapPlan:
    record = read_json(path, "map.json")
    stages = tuple(StageSpec(**stage) for stage in record.pop("stages"))
    return MapPlan(**record, stages=stages)


class TaskContext(Protocol):
    """What a chunk needs of the farm's ``Context``."""

    device: str
    tries: int

    @property
    def run_path(self) -> Path: ...
    @property
    def key(self) -> str: ...
    @property
    def num_waiting(self) -> int: ...
    def divide(self, kept: Mapping[str, Any], given: Sequence[Mapping[str, Any]]) -> None: ...
    def measure(self, text: str, numbers: Mapping[str, float]) -> None: ...
    def retire(self) -> None: ...


class Worker:
    """The stages of a run in this process.

    ``waiting`` are the stages with ``process_one``, ``before`` and ``after`` the others.
    """

    def __init__(self, folder: RunFolder, plan: MapPlan, device: str) -> None:
        _log_to_stderr()
        keep_freed_blocks(_KEPT_BYTES)
        self.folder = folder
        self.plan = plan
        self.device = device
        self.source = _source_of(plan)
        self.stages = [make_stage(spec, Path(plan.base_folder)) for spec in plan.stages]
        self.batch_size = first_batch(self.stages, plan.batch_size)
        is_free = not plan.batch_size and not any(hasattr(s, "process") for s in self.stages)
        self.pace = Pace(self.batch_size) if is_free else None
        self.before: list[Step] = []
        self.after: list[Step] = []
        self.waiting: list[tuple[str, Any]] = []
        for spec, stage in zip(plan.stages, self.stages, strict=True):
            self._sort_in(spec.name, stage)
        self.concurrency = max((_concurrency_of(*one) for one in self.waiting), default=1)
        self.loop = _new_loop() if self._has_coroutines() else None
        self.is_set_up = False
        self.num_rows = self.num_rejected = 0
        # Of these the ones that a journal has: others may be done again, and would count again.
        self.num_stored = self.num_rejects_stored = 0
        self.rejected_in: Counter[str] = Counter()  # failures of records by the names of stages
        self.waited_s = self.busy_s = 0.0

    def numbers(self) -> dict[str, float]:
        """What it has done so far, as a map's status and metrics show it."""
        return {
            "records": float(self.num_stored),
            "rejected": float(self.num_rejects_stored),
            "waited_s": self.waited_s,
            "busy_s": self.busy_s,
            **{f"{REJECTED_IN}{name}": float(n) for name, n in self.rejected_in.items()},
            **METER.read(),
        }

    def set_up(self) -> None:
        """Load models, once. Raises what the stages raise."""
        for stage in self.stages:
            setup = getattr(stage, "setup", None)
            if setup is not None:
                self._wait_for(setup(self.device))
        self.concurrency = max((_concurrency_of(*one) for one in self.waiting), default=1)
        self._declare()
        self.is_set_up = True

    def _declare(self) -> None:
        """Store the column types that stages declare, for the merge; all workers write the same."""
        declared: dict[str, str] = {}
        for spec, stage in zip(self.plan.stages, self.stages, strict=True):
            columns = getattr(stage, "columns", None)
            if columns is not None:
                found = columns()
                if not isinstance(found, Mapping):
                    kind = type(found).__name__
                    raise TargetError(f"columns() of {spec.name} gave {kind}, not a dict of types.")
                declared.update(found)
        if declared and self.plan.keeps_types:  # no other output has types
            from muster.pipeline.sinks.columnar import declared_type

            for name, text in declared.items():
                declared_type(name, str(text), None)
        if declared:
            write_json(self.folder.map_columns, declared)

    def close(self) -> None:
        for stage in self.stages:
            close = getattr(stage, "close", None)
            if close is not None and self.is_set_up:
                self._wait_for(close())
        if self.loop is not None:
            self.loop.close()

    def _wait_for(self, made: Any) -> None:
        if inspect.isawaitable(made):
            assert self.loop is not None
            self.loop.run_until_complete(made)

    def _has_coroutines(self) -> bool:
        return bool(self.waiting) or any(
            inspect.iscoroutinefunction(getattr(stage, name, None))
            for stage in self.stages
            for name in ("setup", "close")
        )

    def _sort_in(self, name: str, stage: Any) -> None:
        if hasattr(stage, "process_one"):
            if self.after:
                # A waiting stage behind others: those run inside the coroutine of each record.
                self.waiting += [(step.name, _Alone(step)) for step in self.after]
                self.after = []
            self.waiting.append((name, stage))
            return
        if hasattr(stage, "process"):
            step = Step(name, many=stage.process, retries=self.plan.exception_retries)
        else:
            step = Step(name, one=stage, retries=self.plan.exception_retries)
        (self.after if self.waiting else self.before).append(step)


def _source_of(plan: MapPlan) -> Source:
    try:
        return reopen(plan.source)
    except UsageError as error:  # it will be the same the next time
        raise TargetError(str(error)) from error


def _concurrency_of(name: str, stage: Any) -> int:
    """How many records may be in a stage at once: one where it does not say."""
    found = getattr(stage, "concurrency", 1)
    try:
        number = int(found)
    except (TypeError, ValueError, OverflowError):
        number = 0
    if number < 1:
        raise TargetError(
            f"concurrency of {name} is {found!r}, not a number of records.", hint="write 1 or more."
        )
    return number


class _Alone:
    """A stage for batches between two waiting stages: it gets its records one by one."""

    def __init__(self, step: Step) -> None:
        self._step = step

    async def process_one(self, record: dict[str, Any]) -> Any:
        if self._step.one is not None:
            return self._step.one(record)
        assert self._step.many is not None
        [made] = self._step.many([record])
        if isinstance(made, Exception):
            raise made
        return made


def _new_loop() -> asyncio.AbstractEventLoop:
    import asyncio

    return asyncio.new_event_loop()


def _log_to_stderr() -> None:
    """Send what stages and engines log, from INFO on, to the worker's log."""
    logger = logging.getLogger("muster")
    if not logger.handlers:
        logger.addHandler(logging.StreamHandler())
        logger.setLevel(logging.INFO)


_worker: Worker | None = None
_made_for: tuple[Path, bytes] | None = None


def worker_of(ctx: TaskContext) -> Worker:
    """This process's worker; it is made at its first chunk.

    A program that maps in its own process may change its folder, or begin a run anew, between two
    maps: the same path may then mean another run.
    """
    global _worker, _made_for
    folder = RunFolder(ctx.run_path)
    wanted = (folder.path.absolute(), folder.map_json.read_bytes())
    if _worker is None or _made_for != wanted:
        if _worker is not None:
            _worker.close()
        else:
            atexit.register(_close)
        _worker, _made_for = Worker(folder, read_plan(folder.map_json), ctx.device), wanted
    return _worker


def _close() -> None:
    """Close the stages when the process exits, unless it is killed."""
    if _worker is not None:
        _worker.close()


def first_batch(stages: Sequence[Any], asked: int) -> int:
    """How many rows go in together at first."""
    if asked:
        return asked
    sizes = [getattr(stage, "batch_size", 0) or _DEFAULT_BATCH for stage in stages
             if hasattr(stage, "process")]  # fmt: skip
    return min(sizes) if sizes else _DEFAULT_ROWS
