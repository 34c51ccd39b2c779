"""What rank 0 shows and writes of a training: lines for people, metrics.jsonl, TensorBoard files,
status.json, and the results.
"""

from __future__ import annotations

import json
import math
import os
import platform
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from muster import plotting
from muster.base.atomic_files import replacing
from muster.base.clock import human_duration
from muster.base.codec import write_json
from muster.base.errors import how_to_install
from muster.base.journal import lines_to_draw, read_journal
from muster.base.metric_log import (
    METRICS_FILE,
    PROCESS,
    TIME,
    as_number,
    as_step,
    is_logging,
    logging_to,
)
from muster.base.settings import variable
from muster.base.shown_text import count
from muster.plotting import draw_curves
from muster.rank.life import Results
from muster.rank.meter import peak_memory_mib
from muster.rank.process_group import Gang
from muster.rank.state import Say
from muster.run.folder import RunFolder

#: In the file of a task, the line from which on the lines of this training stand.
_TRAINING = "_training"
_FLUSH_EVERY_S = 1.0
_TENSORBOARD_EVERY_S = 0.25
_BOARD_FLUSHES_EVERY_S = 2
_WITHOUT_NORM = (
    '{"kind": "train", "step": %d, "epoch": %d, "samples": %d, "loss": %r, "lr": %r, "seconds": %r'
    "}\n"
)
_WITH_NORM = _WITHOUT_NORM[:-2] + ', "grad_norm": %r}\n'


class StepLine(NamedTuple):
    """What is recorded of one optimizer step. ``grad_norm`` is None where it is not known."""

    step: int
    epoch: int
    samples: int
    loss: float
    lr: float
    seconds: float
    grad_norm: float | None

    def record(self) -> dict[str, Any]:
        values = {"kind": "train", **self._asdict()}
        if self.grad_norm is None:
            del values["grad_norm"]
        return values


def _words(line: StepLine) -> str:
    """One line of JSON, formatted by hand: that takes a quarter of the time, at every step."""
    norm = line.grad_norm
    if norm is None:
        return _WITHOUT_NORM % line[:-1]
    return (_WITH_NORM % line) if math.isfinite(norm) else json.dumps(line.record()) + "\n"


class Record:
    """One writer per run. After a resume nothing is in it twice: lines past the step are cut.

    Of a training that is a task of a sweep, the same lines are the task's: a search looks at them.
    """

    def __init__(
        self,
        folder: RunFolder,
        step: int,
        *,
        with_tensorboard: bool,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._path = folder.metrics
        has_begun = self._path.exists()
        _cut_after(self._path, step)
        self._lines: deque[StepLine] = deque()
        self._process = os.getpid()
        self._writing = threading.RLock()  # `log` may be called by any thread
        self._files = [os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)]
        task = variable(METRICS_FILE)
        self._told = _Told()
        if task and Path(task).absolute() != self._path.absolute():
            training = str(self._path.absolute())
            if has_begun:  # by ranks before these, maybe in the same attempt
                self._told.read(Path(task), training)
                self._told.at = _last(self._path)
            self._files.append(os.open(task, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666))
            self._write("", json.dumps({_TRAINING: training}) + "\n")
        self._logging = ExitStack()
        if not is_logging():
            self._logging.enter_context(logging_to(self.log))
        self._status = folder.status_json
        self._say = say
        self._leaves_out = False
        self._flush_due_s = self._board_due_s = 0.0
        self._board: Any = _open_tensorboard(folder.tensorboard, step) if with_tensorboard else None
        self.has_tensorboard = self._board is not None

    def step(self, values: StepLine) -> None:
        """Record one optimizer step; TensorBoard gets at most four a second.

        Lines are formatted about once a second: many in a row cost far less than one by one.
        """
        self._lines.append(values)
        now = time.monotonic()
        if self._board is not None:
            self._step_to_board(values, now)
        if now >= self._flush_due_s:
            self._flush_due_s = now + _FLUSH_EVERY_S
            self._write_steps()  # TensorBoard's writer has a clock of its own

    def _step_to_board(self, values: StepLine, now: float) -> None:
        if now >= self._board_due_s:
            self._board_due_s = now + _TENSORBOARD_EVERY_S
            self._to_board("train", values.record())
        elif not self._leaves_out:
            self._leaves_out = True
            self._say("note       TensorBoard gets at most 4 steps a second; metrics.jsonl has all")

    def line(self, kind: str, values: dict[str, Any]) -> None:
        """Record something seldom, such as an evaluation; a ``step`` must be among its values."""
        self._write_steps()
        text = json.dumps({"kind": kind, **values}) + "\n"
        self._write(text, text if self._told.is_new(kind, values["step"]) else "")
        if self._board is not None:
            self._to_board(kind, values)
        self.flush()

    def log(self, step: int, **metrics: Any) -> None:
        """Record what the task itself logs with ``muster.log``."""
        numbers = {name: as_number(name, value) for name, value in metrics.items()}
        text = json.dumps({"step": as_step(step), TIME: time.time(), **numbers}) + "\n"
        with self._writing:
            if os.getpid() == self._process:  # a loader's would write them twice
                self._write_steps()  # `_cut_after` goes by the order of lines
            self._write(text, "" if self._told.has_logged() else text)

    def status(self, values: dict[str, Any]) -> None:
        """Write where the training is, for `muster status`; a full disk does not stop it."""
        beside = self._status.with_suffix(".new")
        with suppress(OSError):
            beside.write_text(json.dumps(values))  # not synced: it is worth nothing after a crash
            beside.replace(self._status)

    def flush(self) -> None:
        self._write_steps()
        if self._board is not None:
            self._board.flush()

    def close(self) -> None:
        self._write_steps()
        self._logging.close()
        for file in self._files:
            os.close(file)
        if self._board is not None:
            self._board.close()
        self._status.unlink(missing_ok=True)

    def _write_steps(self) -> None:
        with self._writing:
            lines = [self._lines.popleft() for _ in range(len(self._lines))]
            if lines:
                words = [*map(_words, lines)]
                new = [self._told.is_new("train", line.step) for line in lines]
                self._write("".join(words), "".join(compress(words, new)))

    def _write(self, text: str, for_task: str) -> None:
        """Add lines in one piece: threads of the task may log meanwhile."""
        for file, part in zip(self._files, (text, for_task), strict=False):
            rest = memoryview(part.encode())
            while rest:
                rest = rest[os.write(file, rest) :]

    def _to_board(self, kind: str, values: dict[str, Any]) -> None:
        step = values["step"]
        for name, value in values.items():
            if (
                name not in ("step", "kind")
                and isinstance(value, int | float)
                and math.isfinite(value)
            ):
                self._board.add_scalar(f"{kind}/{name}", value, step)


def open_record(
    gang: Gang, folder: RunFolder, step: int, say: Callable[[str], None], *, with_tensorboard: bool
) -> Record | None:
    """Rank 0's record, cut after ``step``; None on the others."""
    if not gang.is_first:
        return None
    record = Record(folder, step, with_tensorboard=with_tensorboard, say=say)
    if with_tensorboard and not record.has_tensorboard:
        say(f"note       no TensorBoard files: {how_to_install('tensorboard')}")
    return record


def _open_tensorboard(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    # What an earlier start wrote beyond this step is hidden by TensorBoard.
    return SummaryWriter(str(folder), purge_step=step + 1, flush_secs=_BOARD_FLUSHES_EVERY_S)


def _cut_after(path: Path, step: int) -> None:
    """Drop lines of later steps, and a torn last one.

    What the task itself logs counts steps of its own: it stays where a line of the training behind
    it stays, for the step that it was logged in.
    """
    if not path.exists():
        return
    with (
        path.open(encoding="utf-8", errors="replace") as lines,
        replacing(path) as beside,
        beside.open("w", encoding="utf-8") as kept,
    ):
        waiting: list[str] = []
        for line in lines:
            with suppress(ValueError, KeyError, TypeError):
                found = json.loads(line)
                number = found["step"]
                waiting.append(line)
                if "kind" in found:
                    if number <= step:
                        kept.writelines(waiting)
                    waiting.clear()


class _Told:
    """What the task has been told by ranks before these, so that it is told nothing twice.

    A line of the training is known by its kind and step, and what the task itself logged by the
    line of the training before it: ranks that begin again come to the same places in the same
    order. ``at``: the last line of the training, from where on these ranks count.
    """

    def __init__(self) -> None:
        self.at: tuple[str, int] | None = None
        self._last: dict[str, int] = {}
        self._logged: Counter[tuple[str, int] | None] = Counter()

    def read(self, path: Path, training: str) -> None:
        """Remember what ``training`` has written to the task's file, which others write as well."""
        at: tuple[str, int] | None = None
        is_its = False
        for line in read_journal(path):
            kind, step, begun = line.get("kind"), line.get("step"), line.get(_TRAINING)
            if isinstance(begun, str):
                is_its = begun == training
            elif not is_its or line.keys() == {PROCESS}:
                continue
            elif not isinstance(kind, str):
                self._logged[at] += 1
            elif isinstance(step, int):
                at = kind, step
                self._last[kind] = max(step, self._last.get(kind, step))

    def is_new(self, kind: str, step: int) -> bool:
        """Whether the task does not have this line of the training, which comes next."""
        self.at = kind, step
        return step > self._last.get(kind, -1)

    def has_logged(self) -> bool:
        """Whether the task has what it logs now."""
        if not self._logged[self.at]:
            return False
        self._logged[self.at] -= 1
        return True


def _last(path: Path) -> tuple[str, int] | None:
    """Kind and step of the last line of a training."""
    found = None
    for line in read_metrics(path):
        found = line["kind"], line["step"]
    return found


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a training in a metrics.jsonl; none when there is no such file."""
    return (line for line in read_journal(path) if isinstance(line.get("kind"), str))


_LINE_EVERY_S = 5.0
_STATUS_EVERY_S = 1.0


class Reporter:
    """Every rank has one and calls it at the same places; only rank 0's speaks and writes.

    ``record``: where rank 0 writes, None on the others. ``fraction``: the part of the training that
    is done, from 0 to 1.
    """

    def __init__(
        self, gang: Gang, folder: RunFolder, step: int, say: Say, *, with_tensorboard: bool
    ) -> None:
        self.record = open_record(gang, folder, step, say, with_tensorboard=with_tensorboard)
        self._say = say
        self._device = gang.device
        self._began_s = self._line_due_s = self._status_due_s = 0.0
        self._done_at_start = 0.0

    def begin(self, text: str, fraction: float) -> None:
        self._say(f"train      {text}")
        self._began_s = time.monotonic()
        self._line_due_s = self._began_s + _LINE_EVERY_S
        self._done_at_start = fraction

    def show(
        self,
        fraction: float,
        picture: Callable[[], dict[str, Any]],
        words: Callable[[], list[str]],
    ) -> None:
        """Say where the training is, from time to time: for `muster status`, and as a line."""
        if self.record is None:
            return
        now = time.monotonic()
        if now >= self._status_due_s:
            self._status_due_s = now + _STATUS_EVERY_S
            eta_s, memory_mib = self._eta_s(fraction), peak_memory_mib(self._device)
            self.record.status({**picture(), "eta_s": eta_s, "memory_mib": memory_mib})
        if now >= self._line_due_s:
            self._line_due_s = now + _LINE_EVERY_S
            parts = words()
            if (memory_mib := peak_memory_mib(self._device)) is not None:
                parts.append(f"{memory_mib:,.0f} MiB")
            if (eta_s := self._eta_s(fraction)) is not None:
                parts.append(f"ETA {human_duration(eta_s)}")
            self._say(" · ".join(parts))

    def evaluated(self, values: dict[str, Any], text: str, *, is_best: bool) -> None:
        if self.record is not None:
            self.record.line("evaluation", values)
            self._say(f"{text}{'  *best' if is_best else ''}")

    def flush(self) -> None:
        if self.record is not None:
            self.record.flush()

    def close(self) -> None:
        if self.record is not None:
            self.record.close()

    def _eta_s(self, fraction: float) -> float | None:
        done = fraction - self._done_at_start
        return (1 - fraction) / done * (time.monotonic() - self._began_s) if done > 0 else None


def write_results(
    gang: Gang, folder: RunFolder, results: Results, *, monitor: str, about: str, say: Say
) -> Results:
    """Add what all trainings report to ``results``; rank 0 writes them and draws curves, which are
    headed by what they are ``about``. It can ``say`` that nothing can draw here.
    """
    memory = gang.council.gather(peak_memory_mib(gang.device))
    whole = {
        **results,
        "num_ranks": gang.num_ranks,
        "device": gang.device.type,
        "measured": {"peak_memory_mib": memory, "machine": platform.node(), **results["measured"]},
        "torch": torch.__version__,
    }
    if gang.is_first:
        write_json(folder.training_results, whole)
        lines = lines_to_draw(folder.metrics)
        if any(line["kind"] in ("train", "update") for line in lines):
            ranks = count(gang.num_ranks, "rank")
            with plotting.or_remark(say):
                draw_curves(folder.curves, lines, monitor, f"{folder.name} · {about}, {ranks}")
    return whole
