"""A sample of a host's devices, how it is taken, and the rows it becomes.

The names of the columns are the names of ``Row``'s fields; a name says its unit. `WorkFinder` says
which run and task of muster a process belongs to: a worker or rank writes into a log of its run's
folder (``logs/worker-3.log``, ``logs/rank-0.log``), and so does what it starts; the run's
status.json says which task a worker is at. Linux only; processes of other users and of other
containers are not seen.
"""

from __future__ import annotations

import dataclasses
import re
import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from muster.base.clock import Clock
from muster.base.codec import read_object
from muster.devices.inventory import Holder
from muster.devices.nvml_usage import GpuUsage, UsageSource
from muster.monitor.host import HostReader, HostUsage
from muster.run.folder import RunFolder

if TYPE_CHECKING:
    import psutil

HOST = "host"


class Work(NamedTuple):
    """What a process does for muster: the run, and its task or rank where that is known."""

    run: str
    task: str = ""

    @property
    def label(self) -> str:
        return f"{self.run}/{self.task}" if self.task else self.run


@dataclass(frozen=True, kw_only=True)
class Sample:
    """All readings of one moment. ``time_s``: seconds since 1970, ``elapsed_s``: since the start.

    ``work``: what the processes on ``gpus`` that muster has started are at, by pid.
    """

    time_s: float
    elapsed_s: float
    host_name: str
    host: HostUsage
    gpus: tuple[GpuUsage, ...] = ()
    work: Mapping[int, Work] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One device at one moment; None: not known, or no such thing on this device.

    Attributes
        time_utc: ISO 8601 with the offset, to the millisecond.
        elapsed_s: since this monitor's start; it begins again where a later one continues the file.
        host, device: the machine, and on it ``host``, ``gpu0``, ``gpu0:mig7``; numbers as in
            nvidia-smi.
        utilisation_percent: of a GPU, the share of time in which a kernel ran; of the host, of
            the cores that muster may use.
        throttle: why clocks are held down, joined by ``+``; ``none`` when they are not.
        pcie_receive_mib_s: to the GPU, over a window of 20 ms.
        disk_*, network_*: of the host, since the sample before.
        processes: what holds memory of the GPU, one after another with their run and task.
        lost: why a GPU gives no figures.
    """

    time_utc: str
    elapsed_s: float
    host: str
    device: str
    name: str | None = None
    uuid: str | None = None
    utilisation_percent: float | None = None
    memory_used_mib: int | None = None
    memory_total_mib: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: int | None = None
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    throttle: str | None = None
    pcie_receive_mib_s: float | None = None
    pcie_send_mib_s: float | None = None
    disk_read_mib_s: float | None = None
    disk_write_mib_s: float | None = None
    network_receive_mib_s: float | None = None
    network_send_mib_s: float | None = None
    processes: str | None = None
    lost: str | None = None

    def values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in COLUMNS}


#: Column → its type, in the order of files.
COLUMNS: dict[str, type] = {
    field.name: next(
        kind for kind in (float, int, str) if str(field.type).startswith(kind.__name__)
    )
    for field in dataclasses.fields(Row)
}


def rows(sample: Sample) -> tuple[Row, ...]:
    """The host's row, then one per GPU in the order of the sample."""
    when: dict[str, Any] = {
        "time_utc": datetime.fromtimestamp(sample.time_s, UTC).isoformat(timespec="milliseconds"),
        "elapsed_s": round(sample.elapsed_s, 3),
        "host": sample.host_name,
    }
    host = sample.host
    first = Row(
        **when,
        device=HOST,
        utilisation_percent=rounded(host.cpu_percent),
        memory_used_mib=host.memory_used_mib,
        memory_total_mib=host.memory_total_mib,
        disk_read_mib_s=rounded(host.disk_read_mib_s, 3),
        disk_write_mib_s=rounded(host.disk_write_mib_s, 3),
        network_receive_mib_s=rounded(host.network_receive_mib_s, 3),
        network_send_mib_s=rounded(host.network_send_mib_s, 3),
    )
    return (first, *(_gpu_row(when, gpu, sample.work) for gpu in sample.gpus))


def _gpu_row(when: dict[str, Any], gpu: GpuUsage, work: Mapping[int, Work]) -> Row:
    return Row(
        **when,
        device=gpu.label,
        name=_one_line(gpu.name),
        uuid=gpu.uuid or None,
        utilisation_percent=rounded(gpu.utilisation_percent),
        memory_used_mib=gpu.memory_used_mib,
        memory_total_mib=gpu.memory_total_mib,
        power_w=rounded(gpu.power_w),
        power_limit_w=rounded(gpu.power_limit_w),
        temperature_c=gpu.temperature_c,
        sm_clock_mhz=gpu.sm_clock_mhz,
        memory_clock_mhz=gpu.memory_clock_mhz,
        throttle=None if gpu.throttle is None else "+".join(gpu.throttle) or "none",
        pcie_receive_mib_s=rounded(gpu.pcie_receive_mib_s),
        pcie_send_mib_s=rounded(gpu.pcie_send_mib_s),
        processes="; ".join(_process(p, work.get(p.pid)) for p in gpu.processes) or None,
        lost=_one_line(gpu.lost),
    )


def _process(process: Holder, work: Work | None) -> str:
    """``pid 41 ada 900 MiB, digits-2026/rank 3``: no command line, which may hold secrets."""
    used = "" if process.used_mib is None else f" {process.used_mib} MiB"
    owner = f" {process.user}" if process.user else ""
    return _one_line(f"pid {process.pid}{owner}{used}" + (f", {work.label}" if work else "")) or ""


def rounded(value: float | None, digits: int = 1) -> float | None:
    return None if value is None else round(value, digits)


def _one_line(text: str | None) -> str | None:
    """``text`` in one line: a row must be a line, so that a torn one is recognised."""
    return None if text is None else " ".join(text.split())


class Sampler:
    def __init__(self, source: UsageSource, clock: Clock, host: HostReader | None = None) -> None:
        self._source = source
        self._clock = clock
        self._host = HostReader() if host is None else host
        self._work = WorkFinder()
        self._host_name = socket.gethostname()
        self._start_s = clock.monotonic_s()

    def take(self, *, quick: bool = False) -> Sample:
        """Take a sample, dated at its beginning. ``quick``: without what takes long (PCIe).

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


_LOG = re.compile(r"(?P<run>/.+)/logs/(?P<kind>worker|rank)-(?P<number>\d+)\.log")


class _Place(NamedTuple):
    folder: RunFolder
    kind: str
    number: int


class WorkFinder:
    """Finds the run and task of a process, and remembers the run, which does not change."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._known: dict[psutil.Process, _Place | None] = {}  # the same number later is another

    def find(self, pids: Iterable[int]) -> dict[int, Work]:
        """The processes among ``pids`` that muster has started, directly or not."""
        import psutil

        if len(self._known) > 10_000:
            self._known.clear()
        live: dict[Path, dict[int, str]] = {}
        found: dict[int, Work] = {}
        for pid in pids:
            with suppress(psutil.Error, OSError, RuntimeError):  # ended, or not ours to see
                process = psutil.Process(pid)
                line = [pid, *(parent.pid for parent in process.parents())]
                if process not in self._known:
                    places = (place_of(self._proc, one) for one in line)
                    self._known[process] = next((p for p in places if p is not None), None)
                place = self._known[process]
                if place is None:
                    continue
                if place.kind == "rank":
                    found[pid] = Work(place.folder.name, f"rank {place.number}")
                    continue
                if place.folder.path not in live:
                    live[place.folder.path] = tasks_by_pid(place.folder)
                tasks = live[place.folder.path]
                task = next((tasks[one] for one in line if one in tasks), "")
                found[pid] = Work(place.folder.name, task)
        return found


def place_of(proc: Path, pid: int) -> _Place | None:
    """The run whose log is this process's standard output or error.

    psutil lists open files only all together, and tells no descriptors of them.
    """
    for descriptor in (1, 2):
        try:
            target = str((proc / str(pid) / "fd" / str(descriptor)).readlink())
        except OSError:
            continue
        match = _LOG.fullmatch(target)
        if match:
            folder = RunFolder(Path(match["run"]))
            if folder.exists():
                return _Place(folder, match["kind"], int(match["number"]))
    return None


def tasks_by_pid(folder: RunFolder) -> dict[int, str]:
    """Worker's pid → the task it was at a second ago, from the picture of a running sweep."""
    try:
        workers = read_object(folder.status_json)["workers"]
        return {line["pid"]: line["task"] for line in workers if line.get("pid")}
    except (LookupError, TypeError, AttributeError):
        return {}
