"""Devices: those of this machine at this moment, and what those of a run did lately."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from functools import cache
from threading import Lock
from typing import Any, NamedTuple

import numpy as np

from muster.base.clock import SystemClock
from muster.base.errors import MusterError
from muster.base.settings import read_settings
from muster.devices.inventory import Holder
from muster.devices.leases import LeaseHeld, holders
from muster.devices.nvml_usage import GpuUsage, usage_source
from muster.monitor.files import last_rows
from muster.monitor.sample import Row, Sample, Sampler
from muster.run.folder import RunFolder
from muster.web.content.curves import decimate
from muster.web.content.plain import finite, line, share
from muster.web.folder import Folders
from muster.web.query import Query

_ONE_AT_A_TIME = Lock()
#: Of each node's log; about 10,000 samples of a device.
_MOST_BYTES = 2**20
_MOST_DEVICES, _PX = 256, 300
#: What is further from a sample than this is not known; the monitor looks every 5 s by itself.
_GAP_S = 60.0


def content(folders: Folders, query: Query) -> dict[str, Any]:
    """The host first, then its GPUs. Rates of the host are known from the second time on."""
    with _ONE_AT_A_TIME:
        sample = _sampler().take(quick=True)
    leased = holders(read_settings()) if sample.gpus else {}
    return {"devices": [_host(sample), *(_gpu(gpu, sample, leased) for gpu in sample.gpus)]}


@cache
def _sampler() -> Sampler:
    return Sampler(usage_source(read_settings()), SystemClock())


def _host(sample: Sample) -> dict[str, Any]:
    host = sample.host
    return {
        **_device(None, sample.host_name), "busy": share(host.cpu_percent),
        "memory_mib": host.memory_used_mib, "total_mib": host.memory_total_mib,
    }  # fmt: skip


def _gpu(gpu: GpuUsage, sample: Sample, leased: Mapping[str, LeaseHeld]) -> dict[str, Any]:
    lease = leased.get(gpu.uuid) if gpu.uuid else None
    return {
        **_device(gpu.index, gpu.name),
        "label": gpu.label,
        "busy": share(gpu.utilisation_percent),
        "memory_mib": gpu.memory_used_mib,
        "total_mib": gpu.memory_total_mib,
        "temperature": gpu.temperature_c,
        "power_w": gpu.power_w,
        "throttle": None if gpu.throttle is None else list(gpu.throttle),
        "lost": gpu.lost and line(gpu.lost),
        "processes": [_process(one, sample) for one in gpu.processes],
        "lease": None if lease is None else line(str(lease)),
    }


def _process(one: Holder, sample: Sample) -> dict[str, Any]:
    """What muster knows of it, else its command: without arguments, which may hold secrets."""
    work = sample.work.get(one.pid)
    program = (one.command or "").partition(" ")[0]
    return {
        "pid": one.pid,
        "user": one.user and line(one.user),
        "command": line(work.label if work else program),
        "mib": one.used_mib,
    }


def _device(index: int | None, name: str) -> dict[str, Any]:
    return {
        "index": index, "label": "host", "name": line(name), "busy": None, "memory_mib": None,
        "total_mib": None, "temperature": None, "power_w": None, "throttle": None, "lost": None,
        "processes": [], "lease": None,
    }  # fmt: skip


def devices_of(folder: RunFolder) -> list[dict[str, Any]]:
    """A row per device, with its last sample and how busy it was, from 0 to 1."""
    found: dict[tuple[str, str], list[Row]] = {}
    for log in folder.monitor_logs():
        try:
            for row in last_rows(log, _MOST_BYTES):
                found.setdefault((row.host, row.device), []).append(row)
        except MusterError:
            continue
    has_hosts = len({host for host, _ in found}) > 1
    return [
        _of_run(f"{host} {device}" if has_hosts else device, rows)
        for (host, device), rows in sorted(found.items())[:_MOST_DEVICES]
    ]


class GpuTime(NamedTuple):
    """GPUs of a host that something had for itself; ``labels`` such as gpu0."""

    host: str
    labels: tuple[str, ...]
    begin_s: float
    end_s: float


def energy_wh(folder: RunFolder, spans: Iterable[GpuTime]) -> float | None:
    """Watt-hours by the samples of the run's monitor; None where they do not cover all of it."""
    powers: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for log in folder.monitor_logs():
        with suppress(MusterError):
            for row in last_rows(log, _MOST_BYTES):
                if row.power_w is not None and (at := _seconds(row)) is not None:
                    powers.setdefault((row.host, row.device), []).append((at, row.power_w))
    total_ws = 0.0
    for span in spans:
        for label in span.labels:
            times, watts = np.array(sorted(powers.get((span.host, label), ()))).reshape(-1, 2).T
            known = times[(times >= span.begin_s - _GAP_S) & (times <= span.end_s + _GAP_S)]
            edges = np.array([span.begin_s, *known, span.end_s]).clip(span.begin_s, span.end_s)
            if not len(known) or np.diff(edges).max() > _GAP_S:
                return None
            total_ws += np.trapezoid(np.interp(edges, times, watts), edges)
    return finite(float(total_ws) / 3600)


def _of_run(label: str, rows: list[Row]) -> dict[str, Any]:
    last = rows[-1]
    known = [
        (at, share(row.utilisation_percent)) for row in rows if (at := _seconds(row)) is not None
    ]
    x, y = (
        np.array([np.nan if value is None else value for value in column], float)
        for column in (zip(*known, strict=True) if known else ((), ()))
    )
    drawn = decimate(x, y, _PX)
    return {
        "label": line(label),
        "name": last.name and line(last.name),
        "busy": share(last.utilisation_percent),
        "memory_mib": last.memory_used_mib,
        "total_mib": last.memory_total_mib,
        "power_w": last.power_w,
        "temperature": last.temperature_c,
        "lost": last.lost and line(last.lost),
        "history": [list(point) for point in zip(drawn.x, drawn.y, strict=True)],
    }


def _seconds(row: Row) -> float | None:
    try:
        return datetime.fromisoformat(row.time_utc).timestamp()
    except (ValueError, TypeError, OverflowError):
        return None
