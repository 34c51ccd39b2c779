"""Samples of the host and of a run's GPUs in the run's own folder, while it runs."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext

from muster.base.clock import SystemClock
from muster.base.run_folder import RunFolder
from muster.base.settings import Settings
from muster.devices.nvml_usage import usage_source
from muster.monitor.recorder import Recorder
from muster.monitor.sampler import Sampler
from muster.monitor.sinks import open_sink


def record_run(
    folder: RunFolder,
    uuids: Collection[str],
    interval_s: float,
    settings: Settings,
    say: Callable[[str], None],
    *,
    node_rank: int = 0,
) -> AbstractContextManager[object]:
    """A context that samples the host and the GPUs ``uuids`` into the run's folder.

    ``interval_s`` 0: nothing is recorded. What goes wrong is said once and ends the recording only.
    """
    if interval_s == 0:
        return nullcontext()
    clock = SystemClock()
    return Recorder(
        lambda: Sampler(usage_source(settings, tuple(uuids)), clock),
        lambda: open_sink(folder.monitor_csv(node_rank)),
        interval_s,
        clock,
        say,
    )
