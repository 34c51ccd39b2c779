"""How runs and devices stand, as the first pages and a run's own say it: counts, progress, a
verdict; the devices of this machine at this moment, and what those of a run did lately.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from functools import cache
from threading import Lock
from typing import Any, NamedTuple

import numpy as np

from muster.api.look.listing import held_up_now
from muster.api.look.why import verdict
from muster.api.maps.publish import Tally, tally
from muster.api.report.about import moment
from muster.api.report.map import map_state, stage_folders
from muster.api.runs import Run, Status
from muster.api.sweeps.search_state import read_search
from muster.api.sweeps.search_view import budget
from muster.base.clock import SystemClock
from muster.base.codec import read_object
from muster.base.errors import MusterError
from muster.base.settings import read_settings
from muster.devices.inventory import Holder
from muster.devices.leases import LeaseHeld, holders
from muster.devices.nvml_usage import GpuUsage, usage_source
from muster.monitor.files import last_rows
from muster.monitor.sample import Row, Sample, Sampler
from muster.run.folder import RunFolder
from muster.run.record import RunRecord
from muster.run.session import is_held
from muster.run.state import starts_of
from muster.web.content.curves import decimate
from muster.web.content.plain import finite, line, share
from muster.web.folder import Folder, Folders
from muster.web.query import Query

_ONE_AT_A_TIME = Lock()
#: Of each node's log; about 10,000 samples of a device.
_MOST_BYTES = 2**20
_MOST_OF_RUN, _PX = 256, 300
#: What is further from a sample than this is not known; the monitor looks every 5 s by itself.
_GAP_S = 60.0


def of_devices(folders: Folders, query: Query) -> dict[str, Any]:
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
        for (host, device), rows in sorted(found.items())[:_MOST_OF_RUN]
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
                if row.power_w is not None and (at := _time_of(row)) is not None:
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
        (at, share(row.utilisation_percent)) for row in rows if (at := _time_of(row)) is not None
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


def _time_of(row: Row) -> float | None:
    try:
        return datetime.fromisoformat(row.time_utc).timestamp()
    except (ValueError, TypeError, OverflowError):
        return None


#: How old may be, of a run that goes on, what takes a while: the counts of its records, a search
#: that is replayed, the hours of its devices.
_RECORDS_S, _SEARCH_S, _COST_S = 3.0, 10.0, 10.0
_MOST_DEVICES = 64
_TABS = {
    "sweep": ("overview", "tasks", "errors", "about"),
    "map": ("overview", "map", "tasks", "errors", "about"),
    "train": ("overview", "training", "errors", "about"),
    "agent": ("overview", "training", "errors", "about"),
    "run": ("overview", "training", "errors", "about"),
}


def content(folders: Folders, query: Query) -> dict[str, Any]:
    return {"runs": [_row(folder) for folder in folders.all()]}


def _row(folder: Folder) -> dict[str, Any]:
    """A run that cannot be read says why; it does not hide the others."""
    row: dict[str, Any] = {
        "id": folder.id, "name": folder.path.name, "path": str(folder.path), "kind": None,
        "state": "unreadable", "level": "bad", "verdict": "", "counts": None, "progress": None,
        "eta_s": None, "started": None, "changed": None, "best": None, "devices": [],
        "gpu_hours": None, "bytes": None,
    }  # fmt: skip
    try:
        run = folder.run
        stored, status = run.stored, run.status()
        level, sentence = verdict_of(folder, run, status)
        row |= {
            "kind": kind(stored),
            "state": status.state,
            "level": level,
            "verdict": sentence,
            "counts": counts(folder, run, status),
            "progress": progress(folder, run, status),
            "eta_s": eta_s(picture(folder)) if status.is_running else None,
            "started": stored.created_s,
            "changed": folder.changed_s(),
            "best": best(folder, run, status),
            "bytes": folder.size(),
            **folder.remembered("cost", folder.stamp(), lambda: _cost(folder), _COST_S),
        }
    except MusterError as error:
        row["verdict"] = str(error)
    except OSError as error:
        row["verdict"] = f"Cannot read {error.filename or folder.path}: {error.strerror or error}."
    return row


def tabs(stored: RunRecord) -> list[str]:
    """The pages that say something about a run of this kind."""
    found = list(_TABS[stored.kind])
    if stored.is_search:
        found.insert(1, "search")
    return found


def kind(stored: RunRecord) -> str:
    """A search is a sweep of its own kind."""
    return "search" if stored.is_search else stored.kind


def verdict_of(folder: Folder, run: Run, status: Status) -> tuple[str, str]:
    """A level and a sentence, see `look.why`, and what keeps it from going on."""
    level, text = _verdict_of(folder, run, status)
    if (held := held_up_now(run.folder, status)) is not None:
        return "paused", f"{text} Now {held.sentence}."
    return level, text


def _verdict_of(folder: Folder, run: Run, status: Status) -> tuple[str, str]:
    """A map that runs counts records, not chunks."""
    if not run.stored.is_map:
        return verdict(run, status)

    def found() -> tuple[str, str]:
        level, text = verdict(run, status)
        if status.is_running:
            with suppress(MusterError, LookupError, TypeError, ValueError, AttributeError):
                text = map_state(run, records(folder))[0]
        return level, text

    return folder.remembered("verdict", (folder.stamp(), status.state), found, _RECORDS_S)


def records(folder: Folder) -> list[Tally]:
    """Of a map: what became of its records, stage by stage."""

    def counted() -> list[Tally]:
        return [tally(each) for each in stage_folders(folder.folder)]

    return folder.remembered("records", folder.stamp(), counted, _RECORDS_S)


def counts(folder: Folder, run: Run, status: Status) -> dict[str, int]:
    """Tasks by state; of a map the records of its first stage."""
    found = dict.fromkeys(("done", "failed", "running", "waiting", "stopped", "cancelled"), 0)
    if not run.stored.is_map:
        return {**found, **status.counts, "total": status.total}
    with suppress(MusterError, LookupError, TypeError, ValueError, AttributeError):
        first = records(folder)[0]
        found |= {
            "done": first.num_in + first.num_begun, "failed": first.num_lost,
            "waiting": first.num_open - first.num_begun,
        }  # fmt: skip
    return {**found, "total": sum(found.values())}


def progress(folder: Folder, run: Run, status: Status) -> float | None:
    """From 0 to 1; None where nothing is counted."""
    if run.stored.is_map and (found := counts(folder, run, status))["total"]:
        return (found["done"] + found["failed"]) / found["total"]
    ended = status.num_done
    if ended is None or not status.num_total:
        return 1.0 if status.state == "done" else None
    ended += status.counts["failed"] + status.counts["cancelled"]
    return min(1.0, ended / status.num_total)


def best(folder: Folder, run: Run, status: Status) -> dict[str, Any] | None:
    """Of a search the best trial, of a training the best evaluation."""
    if run.stored.is_search:
        found: dict[str, Any] | None = _search(folder)["best"]
        return found
    known = (status.training or {}).get("best")
    if isinstance(known, Mapping) and finite(known.get("value")) is not None:
        return {"name": line(str(known.get("metric"))), "value": known["value"], "task": None}
    return None


def spending(folder: Folder, run: Run) -> dict[str, Any]:
    """Of a search, what it has spent of each budget that has a limit."""
    if not run.stored.is_search:
        return {}
    parts = _search(folder)["budget"]
    return {name: part for name, part in parts.items() if part["limit"] is not None}


def _search(folder: Folder) -> dict[str, Any]:
    """What the first page and the head of a search say of it; reading it replays it."""

    def read() -> dict[str, Any]:
        state = read_search(folder.folder)
        if state is None:
            return {"best": None, "budget": {}}
        first = next(iter(state.search.best()), None)
        return {
            "budget": budget(state),
            "best": first and {
                "name": line(state.spec.objectives[0].name),
                "value": finite(first.values[0]),
                "task": next(iter(state.tasks.get(first.trial, ())), None),
            },
        }  # fmt: skip

    return folder.remembered("search", folder.stamp(), read, _SEARCH_S)


def _cost(folder: Folder) -> dict[str, Any]:
    """The devices of the last starts, and for how many hours GPUs were held, from the journal. What
    a start without an end has held is not known, unless it holds it now.
    """
    devices: dict[int, list[str]] = {}
    held_s, has_gpus = 0.0, False
    starts = [start for start in starts_of(folder.folder) if start.begin]
    last = {start.node: start for start in starts}
    now_s = SystemClock().wall_s() if is_held(folder.folder) else None
    for start in starts:
        labels = start.begin.get("workers") or start.begin.get("ranks")
        labels = labels if isinstance(labels, list) else []
        devices[start.node] = [line(str(one), 60) for one in labels[:_MOST_DEVICES]]
        num = len({number for one in labels for number in gpus_in(str(one))})
        has_gpus |= num > 0
        begun_s, ended_s = moment(start.begin), moment(start.end)
        if ended_s is None and start is last[start.node]:
            ended_s = now_s
        if begun_s is not None and ended_s is not None:
            held_s += max(0.0, ended_s - begun_s) * num
    return {
        "devices": [one for each in devices.values() for one in each],
        "gpu_hours": held_s / 3600 if has_gpus else None,
    }


def gpus_in(label: str) -> list[str]:
    """The GPUs of a slot.

    >>> gpus_in("cuda:0+1"), gpus_in("cuda:3/2"), gpus_in("cpu:0"), gpus_in("slurm/1")
    (['0', '1'], ['3'], [], [])
    """
    kind, _, numbers = label.partition(":")
    return numbers.partition("/")[0].split("+") if kind == "cuda" else []


def picture(folder: Folder) -> dict[str, Any]:
    """The last picture that the run's own process has drawn of it; empty where there is none."""
    return read_object(folder.folder.status_json)


def eta_s(live: dict[str, Any]) -> list[float] | None:
    """The least and the most that is left; None where that is not known."""
    found = live.get("eta") or live.get("eta_s")
    if isinstance(found, int | float):
        return [float(found), float(found)]
    if isinstance(found, list | tuple) and len(found) == 2:
        return [float(found[0]), float(found[1])]
    return None
