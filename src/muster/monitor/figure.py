"""The picture of a run's samples: time to the right, a line per device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from muster import plotting
from muster.monitor.sample import HOST, Row

_MOST_POINTS = 1500

#: A panel: its title, the unit, and what to draw of a GPU and of the host.
_Read = Callable[[Row], float | None]
_PANELS: tuple[tuple[str, str, _Read | None, dict[str, _Read]], ...] = (
    ("utilisation", "%", lambda r: r.utilisation_percent, {"CPU": lambda r: r.utilisation_percent}),
    ("memory used", "%", lambda r: _share(r), {"host": lambda r: _share(r)}),
    ("power", "W", lambda r: r.power_w, {}),
    ("temperature", "°C", lambda r: r.temperature_c, {}),
    (
        "disk and network",
        "MiB/s",
        None,
        {
            "disk read": lambda r: r.disk_read_mib_s,
            "disk write": lambda r: r.disk_write_mib_s,
            "network in": lambda r: r.network_receive_mib_s,
            "network out": lambda r: r.network_send_mib_s,
        },
    ),
)


def draw(path: Path, rows: Sequence[Row], title: str) -> None:
    """Write a PNG: time to the right, a panel per quantity that is known, a line per device.

    A gap in the samples is a gap in the line; a cross on the zero line marks a lost GPU.
    """
    lines = _by_device(rows)
    panels = [panel for panel in _PANELS if _curves(panel, lines)]
    if not panels:
        panels = list(_PANELS[:1])
    start_s = _seconds(rows[0]) if rows else 0.0
    unit, scale = _time_unit(_seconds(rows[-1]) - start_s if rows else 0.0)
    figure, axes = plotting.panels(len(panels), 1, (10, 1.0 + 1.7 * len(panels)), sharex=True)
    for axis, panel in zip(axes, panels, strict=True):
        for label, style, curve, read in _curves(panel, lines):
            x, y = _points(curve, read)
            axis.plot([(value - start_s) / scale for value in x], y, label=label, **style)
        if panel[0] == "utilisation":
            _mark_lost(axis, lines, start_s, scale)
        _finish(axis, panel)
    axes[-1].set_xlabel(f"{unit} since {rows[0].time_utc[:19]} UTC" if rows else unit)
    figure.suptitle(title, fontsize=10)
    plotting.save(figure, path)


def _curves(panel: Any, lines: dict[str, list[Row]]) -> list[tuple[str, Any, list[Row], _Read]]:
    """Label, style, rows and reader of each line of a panel that has anything to show."""
    _, _, of_gpu, of_host = panel
    found: list[tuple[str, Any, list[Row], _Read]] = []
    gpus = [name for name in lines if not name.endswith(HOST)]
    for number, name in enumerate(gpus):
        if of_gpu is not None:
            found.append((name, {"color": f"C{number % 10}", "lw": 1.1}, lines[name], of_gpu))
    for name in lines:
        if name.endswith(HOST):
            for number, (label, read) in enumerate(of_host.items()):
                color = "0.35" if of_gpu is not None else f"C{number}"
                style = {"color": color, "lw": 1.0, "ls": "--" if of_gpu is not None else "-"}
                where = name.removesuffix(HOST)
                found.append((f"{where}{label}", style, lines[name], read))
    return [curve for curve in found if any(curve[3](row) is not None for row in curve[2])]


def _by_device(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows per device; the machine's name is part of it where there are several."""
    rows = list(rows)
    is_many = len({row.host for row in rows}) > 1
    lines: dict[str, list[Row]] = {}
    for row in rows:
        lines.setdefault(f"{row.host} {row.device}" if is_many else row.device, []).append(row)
    return lines


def _points(rows: Sequence[Row], read: _Read) -> tuple[list[float], list[float]]:
    """Times and values; NaN, which draws nothing, where a value is missing or a gap begins."""
    size = max(1, len(rows) // _MOST_POINTS)
    x: list[float] = []
    y: list[float] = []
    for begin in range(0, len(rows), size):
        some = rows[begin : begin + size]
        if begin and some[0].elapsed_s <= rows[begin - 1].elapsed_s:
            x.append(_seconds(some[0]))
            y.append(float("nan"))
        known = [value for value in map(read, some) if value is not None]
        x.append(sum(map(_seconds, some)) / len(some))
        y.append(sum(known) / len(known) if known else float("nan"))
    return x, y


def _mark_lost(axis: Any, lines: dict[str, list[Row]], start_s: float, scale: float) -> None:
    gpus = [name for name in lines if not name.endswith(HOST)]
    for number, name in enumerate(gpus):
        lost = [row for row in lines[name] if row.lost is not None]
        if lost:
            thin = lost[:: max(1, len(lost) // 12)]
            x = [(_seconds(row) - start_s) / scale for row in thin]
            color = f"C{number % 10}"
            axis.plot(x, [0.0] * len(x), "x", ms=5, color=color, label=f"{name} lost")


def _finish(axis: Any, panel: Any) -> None:
    title, unit, _, _ = panel
    plotting.dress(axis, title=title, y=unit)
    if unit == "%":
        axis.set_ylim(-4, 104)
    else:
        axis.set_ylim(bottom=0)
    plotting.legend(axis, fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _time_unit(duration_s: float) -> tuple[str, float]:
    if duration_s < 180:
        return "seconds", 1.0
    return ("minutes", 60.0) if duration_s < 3 * 3600 else ("hours", 3600.0)


def _seconds(row: Row) -> float:
    return datetime.fromisoformat(row.time_utc).timestamp()


def _share(row: Row) -> float | None:
    if row.memory_used_mib is None or not row.memory_total_mib:
        return None
    return 100 * row.memory_used_mib / row.memory_total_mib
