"""The devices of this machine at this moment: how busy they are, and who holds them."""

from __future__ import annotations

from functools import cache
from threading import Lock
from typing import Any

from muster.base.clock import SystemClock
from muster.base.settings import read_settings
from muster.devices.inventory import Holder
from muster.devices.leases import held_by
from muster.devices.nvml_usage import GpuUsage, usage_source
from muster.monitor.sample import Sample, Sampler
from muster.web.content.plain import line, share
from muster.web.folder import Folders
from muster.web.query import Query

_ONE_AT_A_TIME = Lock()


def content(folders: Folders, query: Query) -> dict[str, Any]:
    """The host first, then its GPUs. Rates of the host are known from the second time on."""
    with _ONE_AT_A_TIME:
        sample = _sampler().take(quick=True)
    return {"devices": [_host(sample), *(_gpu(gpu, sample) for gpu in sample.gpus)]}


@cache
def _sampler() -> Sampler:
    return Sampler(usage_source(read_settings()), SystemClock())


def _host(sample: Sample) -> dict[str, Any]:
    host = sample.host
    return {
        **_device(None, sample.host_name), "busy": share(host.cpu_percent),
        "memory_mib": host.memory_used_mib, "total_mib": host.memory_total_mib,
    }  # fmt: skip


def _gpu(gpu: GpuUsage, sample: Sample) -> dict[str, Any]:
    lease = held_by(gpu.uuid, read_settings()) if gpu.uuid else None
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
