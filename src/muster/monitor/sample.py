"""A sample, and the rows it becomes: one for the host and one per GPU. Values only.

The names of the columns are the names of ``Row``'s fields; a name says its unit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

from muster.devices.model import Holder
from muster.devices.nvml_usage import GpuUsage
from muster.monitor.host import HostUsage

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
    """One look at everything. ``time_s``: seconds since the epoch, ``elapsed_s``: since the start.

    ``work``: for the processes among ``gpus`` that muster has started, by pid.
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
        elapsed_s: since this monitor's start; it begins anew where a later one goes on.
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
        utilisation_percent=_rounded(host.cpu_percent),
        memory_used_mib=host.memory_used_mib,
        memory_total_mib=host.memory_total_mib,
        disk_read_mib_s=_rounded(host.disk_read_mib_s, 3),
        disk_write_mib_s=_rounded(host.disk_write_mib_s, 3),
        network_receive_mib_s=_rounded(host.network_receive_mib_s, 3),
        network_send_mib_s=_rounded(host.network_send_mib_s, 3),
    )
    return (first, *(_gpu_row(when, gpu, sample.work) for gpu in sample.gpus))


def _gpu_row(when: dict[str, Any], gpu: GpuUsage, work: Mapping[int, Work]) -> Row:
    return Row(
        **when,
        device=gpu.label,
        name=_one_line(gpu.name),
        uuid=gpu.uuid or None,
        utilisation_percent=_rounded(gpu.utilisation_percent),
        memory_used_mib=gpu.memory_used_mib,
        memory_total_mib=gpu.memory_total_mib,
        power_w=_rounded(gpu.power_w),
        power_limit_w=_rounded(gpu.power_limit_w),
        temperature_c=gpu.temperature_c,
        sm_clock_mhz=gpu.sm_clock_mhz,
        memory_clock_mhz=gpu.memory_clock_mhz,
        throttle=None if gpu.throttle is None else "+".join(gpu.throttle) or "none",
        pcie_receive_mib_s=_rounded(gpu.pcie_receive_mib_s),
        pcie_send_mib_s=_rounded(gpu.pcie_send_mib_s),
        processes="; ".join(_process(p, work.get(p.pid)) for p in gpu.processes) or None,
        lost=_one_line(gpu.lost),
    )


def _process(process: Holder, work: Work | None) -> str:
    """``pid 41 ada 900 MiB, digits-2026/rank 3``: no command line, which may hold secrets."""
    used = "" if process.used_mib is None else f" {process.used_mib} MiB"
    owner = f" {process.user}" if process.user else ""
    return _one_line(f"pid {process.pid}{owner}{used}" + (f", {work.label}" if work else "")) or ""


def _rounded(value: float | None, digits: int = 1) -> float | None:
    return None if value is None else round(value, digits)


def _one_line(text: str | None) -> str | None:
    """A row is a line: that is how a torn one is recognised."""
    return None if text is None else " ".join(text.split())
