"""What many samples come to, per device: means, peaks, energy. Needs no more memory than that."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from muster.monitor.sample import Row

#: Held clocks that somebody wanted so: no reason to worry.
_WANTED = {"none", "clocks set by user", "sync boost", "display clocks"}


@dataclass(frozen=True, kw_only=True)
class DeviceSummary:
    """One device of one machine; None: never known.

    ``energy_wh``: power over time by the trapezoid rule, without the times between two monitors.
    ``throttled_percent``: of the samples that know, those held down by power, heat or hardware.
    ``num_lost``: samples in which the GPU gave no figures.
    """

    host: str
    device: str
    name: str | None
    num_samples: int
    num_lost: int
    duration_s: float
    mean_utilisation_percent: float | None
    max_utilisation_percent: float | None
    max_memory_used_mib: int | None
    memory_total_mib: int | None
    mean_power_w: float | None
    energy_wh: float | None
    max_temperature_c: int | None
    throttled_percent: float | None


@dataclass
class _Mean:
    total: float = 0.0
    count: int = 0
    highest: float | None = None

    def add(self, value: float | None) -> None:
        if value is not None:
            self.total += value
            self.count += 1
            self.highest = value if self.highest is None else max(self.highest, value)

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None


@dataclass
class _Device:
    name: str | None = None
    num_samples: int = 0
    num_lost: int = 0
    duration_s: float = 0.0
    energy_ws: float = 0.0
    utilisation: _Mean = field(default_factory=_Mean)
    memory: _Mean = field(default_factory=_Mean)
    power: _Mean = field(default_factory=_Mean)
    temperature: _Mean = field(default_factory=_Mean)
    throttled: _Mean = field(default_factory=_Mean)
    memory_total_mib: int | None = None
    before: tuple[float, float | None] | None = None  # elapsed_s and power_w of the row before


class Summary:
    """Add rows as they come; ask at any time."""

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self._devices: dict[tuple[str, str], _Device] = {}
        for row in rows:
            self.add(row)

    def add(self, row: Row) -> None:
        device = self._devices.setdefault((row.host, row.device), _Device())
        device.name = row.name or device.name
        device.num_samples += 1
        device.num_lost += row.lost is not None
        device.memory_total_mib = row.memory_total_mib or device.memory_total_mib
        device.utilisation.add(row.utilisation_percent)
        device.memory.add(row.memory_used_mib)
        device.power.add(row.power_w)
        device.temperature.add(row.temperature_c)
        if row.throttle is not None:
            device.throttled.add(100.0 * bool(set(row.throttle.split("+")) - _WANTED))
        self._add_time(device, row)

    def _add_time(self, device: _Device, row: Row) -> None:
        before, device.before = device.before, (row.elapsed_s, row.power_w)
        if before is None or row.elapsed_s <= before[0]:
            return  # the first one of another monitor: what was between nobody knows
        seconds = row.elapsed_s - before[0]
        device.duration_s += seconds
        if before[1] is not None and row.power_w is not None:
            device.energy_ws += seconds * (before[1] + row.power_w) / 2

    def devices(self) -> tuple[DeviceSummary, ...]:
        """In the order in which devices were first seen."""
        return tuple(_summed(host, name, d) for (host, name), d in self._devices.items())


def _summed(host: str, label: str, device: _Device) -> DeviceSummary:
    return DeviceSummary(
        host=host,
        device=label,
        name=device.name,
        num_samples=device.num_samples,
        num_lost=device.num_lost,
        duration_s=round(device.duration_s, 3),
        mean_utilisation_percent=_rounded(device.utilisation.mean),
        max_utilisation_percent=device.utilisation.highest,
        max_memory_used_mib=_whole(device.memory.highest),
        memory_total_mib=device.memory_total_mib,
        mean_power_w=_rounded(device.power.mean),
        energy_wh=round(device.energy_ws / 3600, 4) if device.power.count > 1 else None,
        max_temperature_c=_whole(device.temperature.highest),
        throttled_percent=_rounded(device.throttled.mean),
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
