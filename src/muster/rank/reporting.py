"""What a training shows and records on the way, and how its results are kept."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from muster.base.clock import human_duration
from muster.base.codec import write_json
from muster.rank.life import Results, Say
from muster.rank.meter import peak_memory_mib
from muster.rank.process_group import Gang
from muster.rank.record import open_record, read_metrics
from muster.run.folder import RunFolder

_LINE_EVERY_S = 5.0
_STATUS_EVERY_S = 0.5


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
    gang: Gang,
    folder: RunFolder,
    results: Results,
    draw: Callable[[Sequence[dict[str, Any]]], None],
) -> Results:
    """Add what all trainings report to ``results``; rank 0 writes them and draws curves."""
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
        lines = read_metrics(folder.metrics)
        if any(line["kind"] in ("train", "update") for line in lines):
            draw(lines)
    return whole
