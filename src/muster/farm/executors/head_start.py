"""Processes of workers that are begun before their run is opened.

A map reads and cuts its input before it needs a worker, and a worker imports for as long as that
takes. So its processes may be begun first: they import, and wait to be told what they are to do.
Whoever has begun them hands them to an executor or ends them, so that a start that is refused
leaves none.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from muster.farm.executors.worker_process import Begun, begin_worker
from muster.farm.task import SlotSpec


class HeadStart:
    """Processes for ``slots``, which import the module ``imports`` meanwhile.

    ``run_id``: of the run that they will belong to. It must be new, for what carries the id of an
    old one may be ended as left behind by an earlier coordinator.
    """

    def __init__(self, run_id: str, slots: Iterable[SlotSpec] = (), imports: str = "") -> None:
        self.run_id = run_id
        # Another mark each time, or the reaper of a killed coordinator would end our workers too.
        self._mark = f"{run_id}-{os.urandom(4).hex()}"
        # Never written to: when we end, however we end, the kernel kills the groups of workers.
        self._lifeline, self._our_end = os.pipe()
        self._begun: dict[int, Begun] = {}
        if sys.platform == "win32":
            return
        try:
            self._begin(slots, imports)
        except BaseException:  # an interrupt: nobody else knows of those that have begun
            self.close()
            raise

    def _begin(self, slots: Iterable[SlotSpec], imports: str) -> None:
        with suppress(OSError), Path(os.devnull).open("wb") as nowhere:  # what lacks is begun later
            for slot in slots:
                begun = begin_worker(
                    slot, self._mark, nowhere.fileno(), self._lifeline, ahead=imports
                )
                self._begun[slot.slot_id] = begun

    def hand_over(self) -> tuple[str, int, int, dict[int, Begun]]:
        """The mark, both ends of the pipe that they live by, and the processes by slot."""
        found = self._mark, self._lifeline, self._our_end, self._begun
        self._lifeline, self._our_end, self._begun = -1, -1, {}
        return found

    def close(self) -> None:
        """End what was not handed over."""
        for begun in self._begun.values():
            begun.end()
        for descriptor in (self._lifeline, self._our_end):
            if descriptor >= 0:
                os.close(descriptor)
        self._lifeline, self._our_end, self._begun = -1, -1, {}
