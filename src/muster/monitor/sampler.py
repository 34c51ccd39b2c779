"""Takes samples: asks the GPUs and the host, and says whose the processes are."""

from __future__ import annotations

import socket

from muster.base.clock import Clock
from muster.devices.nvml_usage import UsageSource
from muster.monitor.host import HostReader
from muster.monitor.sample import Sample
from muster.monitor.work import WorkFinder


class Sampler:
    def __init__(self, source: UsageSource, clock: Clock, host: HostReader | None = None) -> None:
        self._source = source
        self._clock = clock
        self._host = HostReader() if host is None else host
        self._work = WorkFinder()
        self._host_name = socket.gethostname()
        self._start_s = clock.monotonic_s()

    def take(self, *, quick: bool = False) -> Sample:
        """One sample, dated at its beginning. ``quick``: without what takes long (PCIe).

        Raises what ``UsageSource.read`` raises: SetupError for unreadable recorded facts.
        """
        now_s, wall_s = self._clock.monotonic_s(), self._clock.wall_s()
        host = self._host.read(now_s)
        gpus = self._source.read(quick=quick)
        pids = {process.pid for gpu in gpus for process in gpu.processes}
        return Sample(
            time_s=wall_s,
            elapsed_s=now_s - self._start_s,
            host_name=self._host_name,
            host=host,
            gpus=gpus,
            work=self._work.find(pids),
        )
