"""``muster monitor``: what the GPUs and the host do, now or in a run that was recorded; as rich
renderables, and as words for pipes and logs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from muster.api.look.monitor import Watched, WatchOptions, replay, watch
from muster.base.clock import human_duration
from muster.base.errors import UsageError
from muster.base.flags import Flag
from muster.base.settings import read_settings
from muster.base.shown_text import count, one_line
from muster.cli import output
from muster.cli.flags import JsonFlags
from muster.cli.parse import parse_groups
from muster.cli.values import split_command
from muster.devices.discovery import discover
from muster.devices.inventory import Holder
from muster.devices.nvml_usage import GpuUsage
from muster.monitor.files import DeviceSummary
from muster.monitor.host import HostUsage
from muster.monitor.sample import Sample, Work

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
        f"CPU {percent(host.cpu_percent)}  "
        f"memory {gib(host.memory_used_mib, host.memory_total_mib)}  "
        f"disk r {rate(host.disk_read_mib_s)} w {rate(host.disk_write_mib_s)}  "
        f"net in {rate(host.network_receive_mib_s)} "
        f"out {rate(host.network_send_mib_s)} MiB/s"
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
    pcie = f"{rate(gpu.pcie_receive_mib_s)}/{rate(gpu.pcie_send_mib_s)}"
    clocks = UNKNOWN
    if gpu.sm_clock_mhz is not None:
        clocks = f"{gpu.sm_clock_mhz:,}/{gpu.memory_clock_mhz or 0:,} MHz"
    return {
        "GPU": Text(gpu.label),
        "utilisation": _bar(gpu.utilisation_percent, has_bar=has_bar),
        "memory": Text(gib(gpu.memory_used_mib, gpu.memory_total_mib)),
        "power": Text(watts(gpu.power_w, gpu.power_limit_w)),
        "temp": Text(number(gpu.temperature_c, "°C")),
        "clocks": Text(clocks),
        "PCIe in/out MiB/s": Text(pcie),
        "throttled": Text(throttle(gpu), style="yellow" if gpu.throttle else ""),
        "name": Text(gpu.name),
    }


def _bar(value: float | None, *, has_bar: bool) -> Text:
    if value is None or not has_bar:
        return Text(percent(value))
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
        cells = [gpu.label, *process_cells(process, sample.work.get(process.pid))]
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


_HELP = """Watch the GPUs and the host: utilisation, memory, power, temperature, clocks, processes.

Alone it shows a live view, or a line per sample where there is no terminal, until Ctrl-C. With a
COMMAND after -- it runs that, returns its exit code and sums up at its end. With RUN (a run's
folder, its name below ./runs, or a log file) it sums up what was recorded and draws a figure.

Examples:
  muster monitor
  muster monitor --interval 1 --output gpu_usage.csv --duration 1h
  muster monitor --output gpu_usage.parquet -- python train.py --lr 1e-3
  muster monitor runs/digits-20260131-090500
"""


@dataclass(frozen=True, kw_only=True)
class _Monitor(JsonFlags):
    """What is looked at."""

    run: Annotated[str | None, Flag(is_positional=True)] = None
    """A run's folder or its name below ./runs, or a .csv, .jsonl or .parquet log: sum it up."""
    quiet: bool = False
    """Show nothing but errors."""


def main(argv: list[str]) -> int:
    words, command = split_command(argv)
    groups = {"monitor": _Monitor, "options": WatchOptions}
    parsed = parse_groups(groups, words, "monitor", _HELP)
    flags: _Monitor = parsed.monitor
    if flags.run is not None:
        given = [f"--{said.option.name}" for said in parsed.said if said.option.group == "options"]
        return _replay(flags, flags.run, [*given, *["a command"] * bool(command)])
    options: WatchOptions = parsed.make("options", command=tuple(command))
    with ExitStack() as stack:
        show = _view(flags, options, stack)
        done = watch(options, show=show, say=output.complain)
    _sum_up(flags, options, done)
    return done.exit_code


def _view(flags: _Monitor, options: WatchOptions, stack: ExitStack) -> Callable[[Sample], None]:
    """Where samples are shown: nowhere beside a command, to which the terminal belongs."""
    if flags.quiet or flags.json or options.command:
        return lambda sample: None
    if not output.is_terminal():
        return lambda sample: output.say(plain_line(sample))

    problem = discover(read_settings()).problem
    picture = stack.enter_context(output.LivePicture())

    def show(sample: Sample) -> None:
        width, height = picture.size
        picture.show(render(sample, width, height, problem=problem))

    return show


def _sum_up(flags: _Monitor, options: WatchOptions, done: Watched) -> None:
    if flags.json:
        log = None if options.output is None else str(options.output)
        output.say_json({**asdict(done), "output": log})
        return
    if flags.quiet:
        return
    # What a command has printed stays alone on standard output.
    say = output.remark if options.command else output.say
    for line in output.table_lines(SUMMARY_HEADERS, summary_rows(done.devices)):
        say(line)
    if done.num_missed:
        missed = count(done.num_missed, "sample was", "samples were")
        say(f"{missed} missed: this machine was too busy or asleep")
    if options.output is not None:
        say(f"log: {options.output}")


def _replay(flags: _Monitor, run: str, extra: list[str]) -> int:
    if extra:
        raise UsageError(
            f"{' and '.join(extra)} cannot be given with RUN ({run}), which is only read.",
            hint="leave RUN out to watch this machine.",
        )
    found = replay(run, output.complain)
    if flags.json:
        figure = None if found.figure is None else str(found.figure)
        record: dict[str, Any] = {**asdict(found), "figure": figure}
        output.say_json(record)
    elif not flags.quiet:
        rows = count(found.num_rows, "row")
        output.say(f"{found.name}: {rows}, {found.begin_utc} to {found.end_utc}")
        output.table(SUMMARY_HEADERS, summary_rows(found.devices))
        if found.figure is not None:
            output.say(f"figure: {found.figure}")
    return 0
