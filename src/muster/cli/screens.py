"""What a terminal shows of a sweep that goes on, as a rich renderable, and of plans, as tables in
which every number has its origin.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from muster.base.clock import human_duration
from muster.base.shown_text import count, one_line
from muster.cli import output
from muster.farm.view import counts_text, left_text, rate_text
from muster.plan.units import Figure, Seconds, weakest

if TYPE_CHECKING:  # a sweep's picture is drawn without what plans are made with
    from muster.api.look.plan import MemoryPlan, SweepPlan, TrainingPlan
    from muster.farm.view import RunView, WorkerLine
    from muster.plan.compare import Comparison, Line
    from muster.plan.scaling import Prediction

_STYLES = {
    "running": "green",
    "starting": "yellow",
    "ending": "yellow",
    "quarantined": "red",
    "idle": "dim",
    "off": "dim",
}


def render(view: RunView, height: int) -> RenderableType:
    """Total progress, counts, notes and a line per worker, cut to ``height`` terminal rows."""
    parts: list[RenderableType] = [_head(view), _bar(view), Text(counts_text(view))]
    for kind, text in view.notes[-3:]:
        note = one_line(f"{kind}: {text}")
        parts.append(Text(note, style="red", overflow="ellipsis", no_wrap=True))
    if view.phase == "draining":
        parts.append(Text("draining: running tasks finish, Ctrl-C again stops now", "yellow"))
    if view.phase != "ending":
        room = max(1, height - len(parts) - 4)
        parts.append(_workers(view.workers, room))
    return Group(*parts)


def _head(view: RunView) -> Text:
    text = Text(one_line(view.name), style="bold")
    elapsed = human_duration(view.elapsed_s)
    rest = [elapsed, rate_text(view.rate), left_text(view)]
    if view.phase == "ending" or view.num_ended >= view.total:
        rest = [elapsed, rate_text(view.rate)]
    text.append("  " + "  ".join(part for part in rest if part), style="cyan")
    return text


def _bar(view: RunView) -> Table:
    grid = Table.grid(padding=(0, 1))
    bar = ProgressBar(total=max(1, view.total), completed=view.num_ended, width=50)
    share = 100 * view.num_ended / view.total if view.total else 100.0
    grid.add_row(bar, f"{view.num_ended:,}/{view.total:,}", f"{share:.0f} %")
    return grid


def _workers(lines: tuple[WorkerLine, ...], room: int) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for header in ("device", "state", "task", "elapsed", "peak", "ended", ""):
        table.add_column(header, justify="right" if header in ("elapsed", "ended") else "left")
    for line in lines[:room]:
        memory = "" if line.memory_mib is None else f"{line.memory_mib:,.0f} MiB"
        elapsed = "" if line.elapsed_s is None else human_duration(line.elapsed_s)
        table.add_row(
            Text(one_line(line.slot)),
            Text(one_line(line.state), style=_STYLES.get(line.state, "")),
            Text(one_line(line.task)),
            elapsed,
            memory,
            f"{line.num_ended:,}" if line.num_ended else "",
            Text(one_line(line.progress, 40)),
        )
    if len(lines) > room:
        table.add_row(f"… and {len(lines) - room} more")
    return table


_COLUMNS: tuple[tuple[str, str], ...] = (
    ("step", "step"),
    ("computing", "compute"),
    ("waits for gradients", "exposed"),
    ("waits for data", "loading"),
    ("samples/s", "samples_per_s"),
    ("speed-up", "speed_up"),
    ("efficiency", "efficiency"),
    ("all steps", "wall"),
    ("energy", "energy"),
    ("cost", "cost"),
)


def show_training(plan: TrainingPlan) -> None:
    devices = ", ".join(f"{g.name} x{g.count}" for g in plan.groups)
    steps = "" if plan.num_steps is None else f", {count(plan.num_steps, 'step')}"
    output.say(
        f"{plan.what} on {devices}: {plan.strategy}, global batch {plan.global_batch:,}{steps}"
    )
    output.say()
    output.table(
        ["input", "value", "origin", "from"],
        [
            [name, _text(figure.value), figure.origin, figure.source]
            for name, figure in plan.inputs.items()
        ],
    )
    output.say()
    if plan.mixed is not None:
        _show_mixed(plan)
    else:
        _show_predictions(plan)
    if plan.memory is not None and plan.memory.memory is not None:
        output.say()
        _show_fit(plan.memory)


def show_memory(plan: MemoryPlan) -> None:
    need = plan.need
    output.say(
        f"{need.parameters.value:,} parameters ({need.parameters.origin}) on "
        f"{plan.group.name} x{plan.group.count}: {need.strategy}, {need.precision}, "
        f"{need.optimizer}, {need.micro_batch} samples at once"
    )
    output.say()
    parts = [*plan.footprint.parts]
    rows = [[part.name, str(part.size.value), part.size.origin] for part in parts]
    total = plan.footprint.total
    at_least = "" if plan.footprint.is_whole else "at least "
    rows.append(["together", f"{at_least}{total.value}", total.origin])
    if plan.memory is not None:
        rows.append([f"{plan.group.name} has", str(plan.memory.value), plan.memory.origin])
    output.table(["per device", "memory", "origin"], rows)
    if not plan.footprint.is_whole:
        output.say(
            "Not counted: activations. Give --activation-mib, a config with --sequence-length, "
            "or measure with --calibrate on a GPU."
        )
    _show_fit(plan)


def show_sweep(plan: SweepPlan) -> None:
    output.say(
        f"{plan.name}: {count(plan.num_measured, 'task')} measured, {plan.mean.value} each, "
        f"the longest {plan.longest.value}"
    )
    if plan.num_assumed:
        others = count(plan.num_assumed, "other is", "others are")
        output.say(f"{others} assumed to take as long as these on average.")
    output.say()
    rows = [
        [
            str(one.num_workers),
            str(one.in_order),
            f"{one.speed_up:.2f}",
            f"{one.efficiency:.0%}",
            str(one.longest_first),
            str(one.least),
            plan.origin,
        ]
        for one in plan.predictions
    ]
    headers = ["workers", "takes", "speed-up", "efficiency", "longest first", "at least"]
    output.table([*headers, "times"], rows)
    output.say("Times as they were when the tasks ran; more workers on one device slow each other.")


def sweep_record(plan: SweepPlan) -> dict[str, Any]:
    rows = []
    for one in plan.predictions:
        values = {name: _plain(value) for name, value in vars(one).items()}
        rows.append(values)
    return {
        "run": plan.name,
        "num_measured": plan.num_measured,
        "num_assumed": plan.num_assumed,
        "mean": plan.mean.record(),
        "longest": plan.longest.record(),
        "origin": plan.origin,
        "predictions": rows,
    }


def show_comparison(name: str, found: Comparison) -> None:
    output.say(f"{name}, {count(found.num_devices, 'device')}: predicted against measured")
    for note in found.notes:
        output.say(f"note: {note}")
    output.say()
    rows = [
        [
            line.name,
            _amount(line, line.predicted),
            line.origin,
            _amount(line, line.measured),
            "" if line.error is None else f"{line.error:+.1%}",
        ]
        for line in found.lines
    ]
    output.table(["", "predicted", "rests on", "measured", "error"], rows)


#: What depends on how fast a device computes, and so is an interval where that is assumed.
_OF_SPEED = ("step", "compute", "samples_per_s", "wall", "energy", "cost")


def _show_predictions(plan: TrainingPlan) -> None:
    if plan.predictions:
        _show_rows(plan)
    if plan.fastest:
        rate = plan.inputs["utilisation"]
        output.say(
            f"Not measured: step times and what follows assume a utilisation {rate.source}. "
            "--calibrate measures it here, --utilisation gives it."
        )
    if plan.too_small:
        counts = ", ".join(map(str, plan.too_small))
        devices = "device" if plan.too_small == (1,) else "devices"
        output.say(f"No row for {counts} {devices}: the model does not fit there.")


def _show_rows(plan: TrainingPlan) -> None:
    predictions = plan.predictions
    columns = [
        (title, name)
        for title, name in _COLUMNS
        if any(getattr(one, name) is not None for one in predictions)
    ]
    rows = []
    for place, one in enumerate(predictions):
        cells = [_cell(name, getattr(one, name)) for _, name in columns]
        if plan.fastest:
            ends = (plan.slowest[place], plan.fastest[place])
            cells = [
                _between(name, *ends) if name in _OF_SPEED else cell
                for cell, (_, name) in zip(cells, columns, strict=True)
            ]
        rows.append([str(one.num_devices), *cells, one.bound])
    origins = [weakest(getattr(one, name) for one in predictions) for _, name in columns]
    rows.append(["rests on", *origins, ""])
    output.table(["devices", *[title for title, _ in columns], "bound by"], rows)


def _between(name: str, slow: Prediction, fast: Prediction) -> str:
    """``1.20 s to 2.40 s``, the smaller number first."""
    figures = [getattr(slow, name), getattr(fast, name)]
    if None in figures:
        return ""
    low, high = sorted(figures, key=lambda figure: figure.value)
    texts = [_cell(name, low), _cell(name, high)]
    return texts[0] if texts[0] == texts[1] else " to ".join(texts)


def _show_mixed(plan: TrainingPlan) -> None:
    assert plan.mixed is not None
    mixed = plan.mixed
    names = [group.name for group in plan.groups for _ in range(group.count)]
    rows = [
        [
            name,
            str(mixed.equal.shares[place]),
            str(mixed.equal.idle[place]),
            str(mixed.balanced.shares[place]),
            str(mixed.balanced.idle[place]),
            mixed.origin,
        ]
        for place, name in enumerate(names)
    ]
    headers = ["device", "equal share", "waits", "balanced share", "waits", "rests on"]
    output.table(headers, rows)
    output.say(
        f"Computing takes {mixed.equal.step} with equal shares and {mixed.balanced.step} with "
        f"balanced ones ({mixed.origin}): equal shares lose {mixed.lost:.0%}."
    )
    if mixed.lost > 0:
        output.say("muster train --balance auto measures the speeds and shares the batch out so.")


def _show_fit(plan: MemoryPlan) -> None:
    if plan.memory is None:
        output.say(
            "Whether it fits is not known: the table of cards has no memory for this device."
        )
        return
    needs = f"{plan.footprint.total.value} of {plan.memory.value} per device"
    rests = weakest([plan.footprint.total, plan.memory])
    if plan.fits is None:
        output.say(f"memory: at least {needs}, activations not counted ({rests})")
    elif plan.fits:
        most = "" if plan.most_samples is None else f"; up to {plan.most_samples:,} samples at once"
        output.say(f"memory: fits, {needs} ({rests}){most}")
    else:
        output.say(f"memory: does NOT fit, {needs} ({rests})")
        so_far = "" if plan.footprint.is_whole else " (activations not counted)"
        for remedy in plan.remedies:
            output.say(f"  would fit{so_far}: {remedy}")
        if not plan.remedies:
            output.say("  nothing that is known here would make it fit")


def _cell(name: str, figure: Figure[Any] | None) -> str:
    if figure is None:
        return ""
    if name == "efficiency":
        return f"{figure.value:.0%}"
    if name == "speed_up":
        return f"{figure.value:.2f}"
    return _text(figure.value)


def _text(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def _plain(value: Any) -> Any:
    """A quantity as its number and unit, anything else as it is."""
    unit = getattr(value, "unit", None)
    if dataclasses.is_dataclass(value) and unit is not None:
        return {"value": getattr(value, "value", None), "unit": unit}
    return value


def _amount(line: Line, value: float) -> str:
    return str(Seconds(value)) if line.unit == "s" else f"{value:,.1f}"
