"""What a map writes of its output while it runs: all of it in any order, or its beginning."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from muster.api.maps.publish import parts_of
from muster.base.errors import MusterError
from muster.farm.view import RunView
from muster.pipeline.sinks.formats import SinkSpec
from muster.pipeline.sinks.merge import Ahead
from muster.pipeline.sinks.unordered import Appender, check_growable
from muster.run.folder import RunFolder

_EVERY_S = 2.0


class Growing:
    """``--unordered``: every few seconds, append newly finished chunks to the output.

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
        """What appends to the output. It is opened at the first use, which must be under the run's
        lock: opening it cuts off what another has written only in part.
        """
        if self._appender is None:
            self._appender = Appender(self._sink)
        return self._appender

    def close(self) -> None:
        if self._appender is not None:
            self._appender.close()

    def look(self, view: RunView) -> None:
        """Append new chunks; called with every view of the run."""
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


_LOOK_EVERY_S = 0.25


class CopyingAhead:
    """A thread that copies finished chunks for the output while others are computed, so that little
    is left to do at the end. Where it fails, it leaves nothing, and `publish` copies them all.

    ``shards``: the number of rows of each.
    """

    def __init__(self, folder: RunFolder, sink: SinkSpec, shards: Sequence[int]) -> None:
        self._folder = folder
        self._ahead = Ahead(sink, shards)
        self._num_done = 0
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def look(self, view: RunView) -> None:
        """Called with every view of the run; the first one comes under the run's lock."""
        self._num_done = view.num_done
        if self._thread is None:
            self._thread = threading.Thread(target=self._copy, name="muster-merge", daemon=True)
            self._thread.start()

    def end(self) -> Ahead:
        """Stop; returns what is copied."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()
        return self._ahead

    def _copy(self) -> None:
        try:
            self._copy_finished()
        except (MusterError, OSError):
            self._ahead.discard()
        except BaseException:
            self._ahead.discard()
            raise

    def _copy_finished(self) -> None:
        seen, pause_s = 0, _LOOK_EVERY_S
        while not self._is_over.wait(pause_s):
            if seen == self._num_done:
                continue
            seen, began = self._num_done, time.monotonic()
            parts = parts_of(self._folder)
            # The ledger takes longer the more chunks there are: a tenth of the time at most.
            pause_s = max(_LOOK_EVERY_S, 10 * (time.monotonic() - began))
            for part in parts:
                if self._is_over.is_set():
                    return
                self._ahead.add(part)
            self._ahead.sync()
