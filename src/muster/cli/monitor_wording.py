"""Samples and their summaries in words. Pure, and without rich: also for pipes and logs."""

from __future__ import annotations

from collections.abc import Sequence

from muster.base.shown_text import count
from muster.devices.inventory import Holder
from muster.devices.nvml_usage import GpuUsage
from muster.monitor.files import DeviceSummary
from muster.monitor.host import HostUsage
from muster.monitor.sample import Sample, Work

UNKNOWN = "–"


def plain_line(sample: Sample) -> str:
    """One line per sample: the host, then every GPU."""
    parts = [_host_words(sample.host), *(_gpu_words(gpu) for gpu in sample.gpus)]
    return f"{sample.elapsed_s:8.1f} s  " + " | ".join(parts)


def percent(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.0f} %"


def gib(used_mib: int | None, total_mib: int | None) -> str:
    """``12.3/79.6 GiB``."""
    if used_mib is None:
        return UNKNOWN if total_mib is None else f"{UNKNOWN}/{total_mib / 1024:.1f} GiB"
    total = "" if total_mib is None else f"/{total_mib / 1024:.1f}"
    return f"{used_mib / 1024:.1f}{total} GiB"


def watts(power_w: float | None, limit_w: float | None = None) -> str:
    if power_w is None:
        return UNKNOWN
    return f"{power_w:.0f} W" if limit_w is None else f"{power_w:.0f}/{limit_w:.0f} W"


def rate(value_mib_s: float | None) -> str:
    """MiB/s, with a decimal where it is small."""
    if value_mib_s is None:
        return UNKNOWN
    return f"{value_mib_s:.1f}" if value_mib_s < 100 else f"{value_mib_s:,.0f}"


def number(value: float | None, unit: str) -> str:
    return UNKNOWN if value is None else f"{value:,.0f} {unit}"


def throttle(gpu: GpuUsage) -> str:
    if gpu.throttle is None:
        return UNKNOWN
    return ", ".join(gpu.throttle) or "no"


def process_cells(process: Holder, work: Work | None) -> list[str]:
    """pid, user, memory, run and task, command."""
    used = UNKNOWN if process.used_mib is None else f"{process.used_mib:,} MiB"
    what = "" if work is None else work.label
    return [str(process.pid), process.user or UNKNOWN, used, what, process.command or UNKNOWN]


SUMMARY_HEADERS = (
    "device", "samples", "utilisation", "peak", "memory peak", "power", "energy", "hottest",
    "throttled", "",
)  # fmt: skip


def summary_rows(devices: Sequence[DeviceSummary]) -> list[list[str]]:
    """Means unless a header says otherwise; columns as ``SUMMARY_HEADERS``."""
    is_many = len({device.host for device in devices}) > 1
    table = []
    for device in devices:
        name = f"{device.host} {device.device}" if is_many else device.device
        energy = UNKNOWN if device.energy_wh is None else f"{device.energy_wh:,.1f} Wh"
        lost = f"lost in {count(device.num_lost, 'sample')}" if device.num_lost else ""
        table.append(
            [
                name,
                f"{device.num_samples:,}",
                percent(device.mean_utilisation_percent),
                percent(device.max_utilisation_percent),
                gib(device.max_memory_used_mib, device.memory_total_mib),
                watts(device.mean_power_w),
                energy,
                number(device.max_temperature_c, "°C"),
                percent(device.throttled_percent),
                ", ".join(part for part in (device.name or "", lost) if part),
            ]
        )
    return table


def _host_words(host: HostUsage) -> str:
    memory = gib(host.memory_used_mib, host.memory_total_mib)
    return (
        f"cpu {percent(host.cpu_percent)} mem {memory} "
        f"disk r {rate(host.disk_read_mib_s)} w {rate(host.disk_write_mib_s)} "
        f"net in {rate(host.network_receive_mib_s)} out {rate(host.network_send_mib_s)} MiB/s"
    )


def _gpu_words(gpu: GpuUsage) -> str:
    if gpu.lost is not None:
        return f"{gpu.label} LOST"
    parts = [gpu.label]
    if gpu.utilisation_percent is not None:
        parts.append(percent(gpu.utilisation_percent))
    if gpu.memory_used_mib is not None:
        parts.append(gib(gpu.memory_used_mib, gpu.memory_total_mib))
    if gpu.power_w is not None:
        parts.append(watts(gpu.power_w))
    if gpu.temperature_c is not None:
        parts.append(f"{gpu.temperature_c} °C")
    if gpu.throttle:
        parts.append(f"throttled: {', '.join(gpu.throttle)}")
    return " ".join(parts)
