"""``--unordered``: finished chunks go into the output while the map runs."""

from __future__ import annotations

import time

from muster.api.map_publish import parts_of
from muster.farm.view import RunView
from muster.pipeline.sinks.model import SinkSpec
from muster.pipeline.sinks.unordered import Appender, check_growable
from muster.run.folder import RunFolder

_EVERY_S = 2.0


class Growing:
    """Asks the ledger every few seconds for chunks that are not in the output yet.

    Only what is committed is appended, so that the output never holds a chunk that is done again.
    """

    def __init__(self, folder: RunFolder, sink: SinkSpec) -> None:
        check_growable(sink)
        self._sink = sink
        self._appender: Appender | None = None
        self._folder = folder
        self._due_s = 0.0
        self._num_done = -1

    @property
    def appender(self) -> Appender:
        """Opened at the first use, which must be under the run's lock: opening one cuts off what
        another has not finished.
        """
        if self._appender is None:
            self._appender = Appender(self._sink)
        return self._appender

    def close(self) -> None:
        if self._appender is not None:
            self._appender.close()

    def look(self, view: RunView) -> None:
        """Called with every picture of the run; does something when chunks have ended."""
        now = time.monotonic()
        if now < self._due_s or view.num_done == self._num_done:
            return
        self._num_done = view.num_done
        self.add_all()
        # Reading the ledger takes longer the more chunks there are: a tenth of the time at most.
        self._due_s = time.monotonic() + max(_EVERY_S, 10 * (time.monotonic() - now))

    def add_all(self) -> None:
        for part in parts_of(self._folder):
            self.appender.add(part)
