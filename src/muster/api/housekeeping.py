"""What is done beside the loop of a sweep: requests to end, its status file, exports, packing."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack, suppress
from typing import Self

from muster.api.options import SweepOptions
from muster.api.placing import PerGpuAuto
from muster.api.rehearsal import Rehearsal
from muster.base.clock import Clock
from muster.base.codec import write_json
from muster.base.settings import Settings, child_environment
from muster.base.signals import Requests
from muster.farm.coordinator import Request
from muster.farm.events import Event
from muster.farm.task import SlotSpec
from muster.farm.view import RunView
from muster.run.folder import RunFolder
from muster.run.session import Session

_STATUS_EVERY_S = 1.0


class Housekeeping:
    """A context: inside it the first request to end drains and the second stops."""

    def __init__(
        self,
        folder: RunFolder,
        session: Session,
        options: SweepOptions,
        settings: Settings,
        slots: tuple[SlotSpec, ...],
        clock: Clock,
        signals: Requests,
        rehearsal: Rehearsal | None = None,
    ) -> None:
        self.folder = folder
        self.session = session
        self.settings = settings
        self.slots = slots
        self.clock = clock
        self._interval_s = options.export_interval_s
        self._signals = signals
        self._rehearsal = rehearsal
        self._is_draining = False
        self._context = ExitStack()
        self._status_due_s = 0.0
        self._export_due_s = clock.monotonic_s() + self._interval_s
        self._exporter: subprocess.Popen[bytes] | None = None
        is_packing = options.per_gpu == "auto" and any(slot.devices for slot in slots)
        self._packing = PerGpuAuto(settings, slots) if is_packing else None

    def __enter__(self) -> Self:
        self._context.enter_context(self._signals.watched())
        return self

    def __exit__(self, *_: object) -> None:
        self._context.close()
        self.folder.status_json.unlink(missing_ok=True)
        if self._exporter is not None:
            self._exporter.wait()

    def requests(self) -> list[Request]:
        """What signals have asked for since the last turn. Called every turn, so it is cheap."""
        if not self._signals.heard:
            return []
        requests = []
        for _ in self._signals.take():
            requests.append(Request.STOP if self._is_draining else Request.DRAIN)
            self._is_draining = True
        return requests

    def do(self, view: RunView) -> tuple[list[Event], list[Request]]:
        """Look after other processes' requests, status, export and packing. Called twice a second.

        Returns events for the scheduler and requests to the coordinator.
        """
        now = self.clock.monotonic_s()
        if now >= self._status_due_s:
            self._status_due_s = now + _STATUS_EVERY_S
            self._write_status(view)
        if now >= self._export_due_s:
            self._export_due_s = now + self._interval_s
            self._start_export()
        requests = [Request.CANCEL] if self.session.is_cancelled() else []
        if self._has_failed_rehearsal(view):
            requests.append(Request.DRAIN)  # not a stop: the results of tasks at work are good
        events: list[Event] = self._packing.sample(view) if self._packing else []
        return events, requests

    def _has_failed_rehearsal(self, view: RunView) -> bool:
        """Whether the rehearsal has just failed. None is held at the end: the real calls come."""
        if self._rehearsal is None or view.num_ended >= view.total:
            return False
        return self._rehearsal.look(self.folder, view.num_done)

    def _write_status(self, view: RunView) -> None:
        record = view._asdict()
        record["workers"] = [line._asdict() for line in view.workers]
        with suppress(OSError):  # a picture for others; the disk's state shows in the ledger
            write_json(self.folder.status_json, record)

    def _start_export(self) -> None:
        """Export in a process of its own: pyarrow would double the coordinator's memory."""
        if self._exporter is not None and self._exporter.poll() is None:
            return
        self._exporter = subprocess.Popen(
            [sys.executable, "-m", "muster.farm.export", str(self.folder.path), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=child_environment({}),
        )
