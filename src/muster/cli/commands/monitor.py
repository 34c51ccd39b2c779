"""``muster monitor``: what the GPUs and the host do, now or in a run that was recorded."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from muster.api.monitor import Watched, WatchOptions, replay, watch
from muster.base.errors import UsageError
from muster.base.flags import Flag
from muster.base.settings import read_settings
from muster.base.shown_text import count
from muster.cli import output
from muster.cli.flags import JsonFlags
from muster.cli.monitor_display import SUMMARY_HEADERS, plain_line, summary_rows
from muster.cli.parse import parse_groups
from muster.cli.words import split_command
from muster.devices.discovery import discover
from muster.monitor.sample import Sample

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
    from muster.cli.monitor_display import render

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
