"""The live picture of the monitor as rich renderables. Pure: a sample in, a renderable out."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from muster.base.clock import human_duration
from muster.base.shown_text import one_line
from muster.cli import monitor_wording as words
from muster.devices.nvml_usage import GpuUsage
from muster.monitor.host import HostUsage
from muster.monitor.sample import Sample

#: What a narrow terminal goes without, the first to go first.
_DISPENSABLE = ("PCIe in/out MiB/s", "clocks", "name")
_BAR = 10
_BAR_FROM_WIDTH = 100
#: What the last column, a name or a command, is not cut below.
_LEAST_LAST = 12


def render(
    sample: Sample, width: int, height: int, *, problem: str | None = None
) -> RenderableType:
    """The host, a row per GPU and the processes on them, cut to the terminal.

    ``problem``: why there is no GPU.
    """
    parts: list[RenderableType] = [_head(sample), _host(sample.host)]
    if sample.gpus:
        parts.append(_gpus(sample.gpus, width))
    elif problem:
        parts.append(Text(one_line(f"No GPU: {problem}"), style="dim"))
    for gpu in sample.gpus:
        if gpu.lost is not None:
            parts.append(Text(one_line(f"{gpu.label} is lost: {gpu.lost}"), style="red"))
    room = height - len(parts) - len(sample.gpus) - 4
    if any(gpu.processes for gpu in sample.gpus) and room > 0:
        parts.append(_processes(sample, width, room))
    parts.append(Text("Ctrl-C ends the watching", style="dim"))
    return Group(*parts)


def _head(sample: Sample) -> Text:
    text = Text(one_line(sample.host_name), style="bold")
    text.append(f"  watched for {human_duration(sample.elapsed_s)}", style="cyan")
    return text


def _host(host: HostUsage) -> Text:
    text = (
        f"CPU {words.percent(host.cpu_percent)}  "
        f"memory {words.gib(host.memory_used_mib, host.memory_total_mib)}  "
        f"disk r {words.rate(host.disk_read_mib_s)} w {words.rate(host.disk_write_mib_s)}  "
        f"net in {words.rate(host.network_receive_mib_s)} "
        f"out {words.rate(host.network_send_mib_s)} MiB/s"
    )
    return Text(text, no_wrap=True, overflow="ellipsis")


def _gpus(gpus: tuple[GpuUsage, ...], width: int) -> Table:
    rows = [_cells(gpu, has_bar=width >= _BAR_FROM_WIDTH) for gpu in gpus]
    return _table(rows, width)


def _cells(gpu: GpuUsage, *, has_bar: bool) -> dict[str, Text]:
    if gpu.lost is not None:
        cells = dict.fromkeys(
            ("memory", "power", "temp", "clocks", "PCIe in/out MiB/s", "throttled"), Text("")
        )
        return {
            "GPU": Text(gpu.label, style="red"),
            "utilisation": Text("lost", style="bold red"),
            "name": Text(gpu.name, style="red"),
            **cells,
        }
    pcie = f"{words.rate(gpu.pcie_receive_mib_s)}/{words.rate(gpu.pcie_send_mib_s)}"
    clocks = words.UNKNOWN
    if gpu.sm_clock_mhz is not None:
        clocks = f"{gpu.sm_clock_mhz:,}/{gpu.memory_clock_mhz or 0:,} MHz"
    return {
        "GPU": Text(gpu.label),
        "utilisation": _bar(gpu.utilisation_percent, has_bar=has_bar),
        "memory": Text(words.gib(gpu.memory_used_mib, gpu.memory_total_mib)),
        "power": Text(words.watts(gpu.power_w, gpu.power_limit_w)),
        "temp": Text(words.number(gpu.temperature_c, "°C")),
        "clocks": Text(clocks),
        "PCIe in/out MiB/s": Text(pcie),
        "throttled": Text(words.throttle(gpu), style="yellow" if gpu.throttle else ""),
        "name": Text(gpu.name),
    }


def _bar(value: float | None, *, has_bar: bool) -> Text:
    if value is None or not has_bar:
        return Text(words.percent(value))
    full = round(_BAR * value / 100)
    text = Text("█" * full, style="green")
    text.append("░" * (_BAR - full), style="dim")
    text.append(f" {value:3.0f} %", style="default")
    return text


def _processes(sample: Sample, width: int, room: int) -> RenderableType:
    headers = ("GPU", "pid", "user", "memory", "run/task", "command")
    lines = [(gpu, process) for gpu in sample.gpus for process in gpu.processes]
    # Ours first where not all of them fit.
    lines.sort(key=lambda line: line[1].pid not in sample.work)
    rows = []
    for gpu, process in lines[:room]:
        cells = [gpu.label, *words.process_cells(process, sample.work.get(process.pid))]
        rows.append(dict(zip(headers, map(Text, map(one_line, cells)), strict=True)))
    table = _table(rows, width)
    left = len(lines) - room
    return Group(table, Text(f"… and {left} more", style="dim")) if left > 0 else table


def _table(rows: list[dict[str, Text]], width: int) -> Table:
    """Columns as wide as what is in them, the last one cut; what does not fit is left out."""
    widths = {
        header: max(len(header), *(row[header].cell_len for row in rows)) for header in rows[0]
    }
    shown = list(widths)
    for dispensable in _DISPENSABLE:
        *fixed, last = shown
        needed = sum(widths[h] + 2 for h in fixed) + min(_LEAST_LAST, widths[last])
        if needed > width and dispensable in shown:
            shown.remove(dispensable)
    room = width - sum(widths[header] + 2 for header in shown[:-1])
    widths[shown[-1]] = max(1, min(widths[shown[-1]], room))
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for header in shown:
        table.add_column(header, no_wrap=True, overflow="ellipsis", width=widths[header])
    for row in rows:
        table.add_row(*(row[header] for header in shown))
    return table
