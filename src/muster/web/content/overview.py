"""The pages of a run: its verdict, how far it is, who worked when; what failed, by cause; and how
it was set up: command, code, environment, options and where they come from, plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import is_dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints

from muster.api.look.why import alerts, causes
from muster.api.report.about import environment_blocks, setting_blocks, time_facts
from muster.api.report.content import flat
from muster.api.runs import Run
from muster.api.start.options import GangOptions, SweepOptions
from muster.api.sweeps.adding import shown_additions
from muster.base.clock import SystemClock
from muster.base.codec import read_json, read_object
from muster.base.errors import MusterError
from muster.base.flags import Flag, kind_of_word
from muster.base.shown_text import command_line, hide_secrets
from muster.farm.ledger.read import LedgerReader
from muster.farm.ledger.records import WorkSpan
from muster.run.folder import RunFolder
from muster.run.record import RunRecord, plain_options
from muster.run.session import is_held
from muster.web.content import runs
from muster.web.content.plain import block, finite, line, listing, plain, settings
from muster.web.content.runs import devices_of
from muster.web.folder import Folder
from muster.web.query import Query

_NUM_RECENT, _MOST_ALERTS, _MOST_GROUPS = 10, 20, 200
#: All bars of a picture together, whatever the number of tasks; and its rows.
MOST_BARS, _MOST_SLOTS = 2000, 128
_FAILURE_COLUMNS = 60
#: Slots of a run that goes on are as old as this at most, however many look at them.
_SLOTS_S = 3.0


def head(folder: Folder) -> dict[str, Any]:
    """What every page of a run shows at its top."""
    run = folder.run
    stored, status = run.stored, run.status()
    live = runs.picture(folder) if status.is_running else {}
    ended_s = SystemClock().wall_s() if status.is_running else folder.changed_s()
    level, sentence = runs.verdict_of(folder, run, status)
    return {
        "id": folder.id,
        "name": line(folder.path.name),
        "path": line(str(folder.path)),
        "kind": runs.kind(stored),
        "state": status.state,
        "tabs": runs.tabs(stored),
        "verdict": {
            "level": level,
            "text": sentence,
            "causes": _causes(run),
        },
        "counts": runs.counts(folder, run, status),
        "progress": runs.progress(folder, run, status),
        "rate": live.get("rate"),
        "eta_s": runs.eta_s(live),
        "seconds": ended_s - stored.created_s,
        "best": runs.best(folder, run, status),
    }


def content(folder: Folder, query: Query) -> dict[str, Any]:
    run = folder.run
    has_tasks = not run.stored.is_gang and folder.folder.ledger.exists()
    return {
        **head(folder),
        "slots": _slots(folder) if has_tasks else [],
        "devices": devices_of(folder.folder),
        "alerts": _alerts(folder.folder),
        "budget": runs.spending(folder, run) or None,
        "recent": _recent(folder.folder) if has_tasks else [],
    }  # fmt: skip


def _causes(run: Run) -> list[dict[str, Any]]:
    if run.stored.is_gang or not run.folder.ledger.exists():
        return []
    return [
        {"text": line(group.message or group.outcome), "count": group.num_failed,
         "task": group.tasks[0]}
        for group in run.failures()[:5] if group.num_failed
    ]  # fmt: skip


def _slots(folder: Folder) -> list[dict[str, Any]]:
    # The picture of a process that was killed would say for ever that its tasks run.
    live = runs.picture(folder) if is_held(folder.folder) else {}

    def read() -> list[dict[str, Any]]:
        with LedgerReader(folder.folder.ledger) as ledger:
            return slots(ledger, live, SystemClock().wall_s())

    now = (folder.stamp(), live.get("elapsed_s"))
    return folder.remembered("slots", now, read, _SLOTS_S if live else 0.0)


def _alerts(folder: RunFolder) -> list[dict[str, str]]:
    found = [{"level": level, "text": line(text)} for level, text in alerts(folder)]
    return found[-_MOST_ALERTS:]


def _recent(folder: RunFolder) -> list[dict[str, Any]]:
    with LedgerReader(folder.ledger) as ledger:
        return [
            {"key": one.key, "name": line(one.name, 200), "state": one.state,
             "seconds": one.seconds, "ended": one.ended_s}
            for one in ledger.recent(_NUM_RECENT)
        ]  # fmt: skip


class Bar(NamedTuple):
    """``task``: the key of its task; "" where it stands for several."""

    begin_s: float
    end_s: float
    state: str
    task: str


def slots(ledger: LedgerReader, live: Mapping[str, Any], now_s: float) -> list[dict[str, Any]]:
    """``live``: the last picture of the run's own process, for what runs at this moment."""
    spans = ledger.work_spans(MOST_BARS)
    by_slot = merged(spans, _resolution(spans))
    for worker in live.get("workers") or ():
        elapsed = worker.get("elapsed_s")
        if worker.get("state") == "running" and isinstance(elapsed, int | float):
            bars = by_slot.setdefault(line(worker["slot"]), [])
            bars.append(Bar(now_s - elapsed, now_s, "running", ""))
    return [
        {"label": label, "bars": [list(bar) for bar in bars]}
        for label, bars in [*by_slot.items()][:_MOST_SLOTS]
    ]


def merged(spans: Iterable[WorkSpan], gap_s: float) -> dict[str, list[Bar]]:
    """Bars by slot; attempts that follow each other within ``gap_s`` and ended alike are one."""
    found: dict[str, list[Bar]] = {}
    for span in spans:
        bars = found.setdefault(line(span.slot), [])
        bar = Bar(span.begin_s, span.end_s, span.state, span.task if span.num == 1 else "")
        if bars and bars[-1].state == bar.state and bar.begin_s - bars[-1].end_s <= gap_s:
            bars[-1] = bars[-1]._replace(end_s=max(bar.end_s, bars[-1].end_s), task="")
        else:
            bars.append(bar)
    return found


def _resolution(spans: list[WorkSpan]) -> float:
    """Less than this cannot be seen; nothing is joined where every attempt has a bar of its own."""
    if all(span.num == 1 for span in spans):
        return -1.0
    return (max(span.end_s for span in spans) - min(span.begin_s for span in spans)) / MOST_BARS


def errors(folder: Folder, query: Query) -> dict[str, Any]:
    """``count``: attempts, records or ranks; ``failed``: tasks that stay failed; ``times``: how
    many attempts failed in each part of the time from ``since`` to ``until``."""
    since, until, times = _failure_times(folder)
    groups = [
        {
            "text": line(one.text), "count": one.num, "unit": one.unit, "failed": one.failed,
            "first": one.first_s, "last": one.last_s, "tasks": list(one.tasks),
            "trace": listing(one.trace), "times": times.get(one.number or 0),
        }
        for one in causes(folder.run)
    ]  # fmt: skip
    return {"groups": groups[:_MOST_GROUPS], "left_out": max(0, len(groups) - _MOST_GROUPS),
            "since": since, "until": until}  # fmt: skip


def _failure_times(folder: Folder) -> tuple[float, float, dict[int, list[int]]]:
    if not folder.folder.ledger.exists():
        return 0.0, 0.0, {}
    with LedgerReader(folder.folder.ledger) as ledger:
        since, until, times = ledger.failure_times(_FAILURE_COLUMNS)
        return since, until, times


_MOST_FINDINGS, _MOST_CODE = 200, 4 * 2**20


def about(folder: Folder, query: Query) -> dict[str, Any]:
    stored = folder.run.stored
    spec = {name: value for name, value in stored.spec.items() if name != "program"}
    added = shown_additions(folder.folder)
    blocks = [
        *setting_blocks({"What was run": {**(spec or stored.spec), **added}}),
        *environment_blocks(stored, {})[2:],
        time_facts(folder.folder),
    ]
    return {
        "command": line(command_line(stored.argv), 5000),
        "cwd": line(stored.cwd),
        "created": stored.created_s,
        "code": [
            {"name": line(name), "hash": digest, "since": _since(Path(stored.cwd), name, digest)}
            for name, digest in stored.code.items()
            if digest
        ],
        "environment": settings(stored.environment),
        "options": options(stored),
        "doctor": _verified(folder.folder.verify_json),
        "plan": _compared(folder.folder.plan_error_json) or _planned(folder.folder.plan_json),
        "blocks": [block(one) for one in blocks if one is not None],
    }


def _since(cwd: Path, name: str, digest: str) -> str:
    """Whether a file is still what the run began with; "" for what is not found where it began."""
    path = cwd / name
    with suppress(OSError, ValueError):
        if ".." not in path.parts and 0 < path.stat().st_size <= _MOST_CODE and path.is_file():
            same = sha256(path.read_bytes()).hexdigest() == digest
            return "unchanged" if same else "changed since"
    return ""


def _flags(kind: type, before: str = "") -> dict[str, set[str]]:
    """The flags of each field of an options dataclass, with their aliases, and of those in it."""
    found: dict[str, set[str]] = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        marks = [one for one in getattr(hint, "__metadata__", ()) if isinstance(one, Flag)]
        mark = marks[0] if marks else Flag()
        others = [one if isinstance(one, str) else one.name for one in mark.aliases]
        names = [mark.name or name.replace("_", "-"), *others]
        found[before + name] = {f"--{no}{one}" for one in names for no in ("", "no-")}
        inner = [hint, *get_args(hint), *(deep for one in get_args(hint) for deep in get_args(one))]
        for one in inner:
            if isinstance(one, type) and is_dataclass(one):
                found |= _flags(one, f"{before}{name}.")
    return found


def options(stored: RunRecord) -> list[dict[str, Any]]:
    """Each option with its value and its origin: the command line, the call or recipe that chose
    it, or the default."""
    kind: type = GangOptions if stored.is_gang else SweepOptions
    default, flags = dict(flat("", plain_options(kind()))), _flags(kind)
    words = {word.partition("=")[0] for word in stored.argv if kind_of_word(word) == "flag"}
    found = []
    for name, value in flat("", hide_secrets(stored.options)):
        if words & flags.get(name, set()):
            origin = "command line"
        else:
            origin = "default" if default.get(name, value) == value else "call or recipe"
        found.append({"name": line(name), "value": plain(value), "origin": origin})
    order = ("command line", "call or recipe", "default")
    return sorted(found, key=lambda one: order.index(one["origin"]))


def _compared(path: Path) -> list[dict[str, Any]]:
    """What was predicted beside what the run took; empty where nothing was, or nothing ended."""
    lines = read_object(path).get("lines")
    return [
        {
            "name": line(str(one.get("name"))),
            "unit": line(str(one.get("unit", ""))),
            "origin": line(str(one.get("origin", ""))),
            **{name: finite(one.get(name)) for name in ("predicted", "measured", "error")},
        }
        for one in (lines if isinstance(lines, list) else ())
        if isinstance(one, Mapping)
    ]


def _planned(path: Path) -> list[dict[str, Any]]:
    """What `muster plan` has predicted for a run that has not ended, by number of devices."""
    rows = read_object(path).get("predictions")
    return [
        {"devices": plain(one.get("num_devices")), "name": line(name), "predicted": plain(value)}
        for one in (rows if isinstance(rows, list) else ())
        if isinstance(one, Mapping)
        for name, value in flat("", {k: v for k, v in one.items() if k != "num_devices"})
        if value is not None
    ][:_MOST_FINDINGS]


def _verified(path: Path) -> list[dict[str, Any]]:
    """What `muster verify` has found: a row for each finding."""
    found = None
    with suppress(MusterError):
        found = read_json(path, path.name)
    rows = found if isinstance(found, list) else []
    return [
        {line(str(name)): plain(value) for name, value in hide_secrets(one).items()}
        for one in rows[:_MOST_FINDINGS]
        if isinstance(one, Mapping)
    ]
