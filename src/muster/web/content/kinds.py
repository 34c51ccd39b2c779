"""What only runs of one kind have a page for. Ranks (a training, an agent, a program): figures,
ranks, checkpoints, evaluations. A map: where its records went, the state of its chunks, and what
was rejected and why. A search: how it went, what it tried, and where trials were ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from muster.api.maps.publish import Tally, read_published, tally
from muster.api.report.about import rejects
from muster.api.report.map import stage_folders
from muster.api.report.rank_failures import rank_failures
from muster.api.report.training import result_tables
from muster.api.runs import Status
from muster.api.sweeps.search_state import SearchState, read_search
from muster.api.sweeps.search_view import importance, view
from muster.base.codec import read_object
from muster.base.errors import UsageError
from muster.farm.ledger.read import LedgerReader
from muster.farm.metrics import Curve
from muster.farm.task import TaskState
from muster.run.folder import RunFolder
from muster.run.record import read_run
from muster.run.state import last_start, starts_of
from muster.web.content.curves import curves_of, in_order
from muster.web.content.plain import block, finite, line, listing
from muster.web.folder import Folder, opened
from muster.web.query import Query

_MOST_EVALUATIONS, _MOST_STACKS, _MOST_RANKS = 500, 16, 1024
_MOST_STACK = 1024 * 1024
#: Shares of time that a training or an agent reports, by what a page calls them.
_PHASES = {
    "data_wait": "waiting for data", "data_wait_share": "waiting for data",
    "communication": "communication", "communication_share": "communication",
    "checkpoint_share": "checkpoints", "acting_share": "acting", "stepping_share": "stepping",
    "learning_share": "learning",
}  # fmt: skip
_FIGURES = {
    "samples_per_s": ("samples", "1/s"), "steps_per_s": ("environment steps", "1/s"),
    "mfu": ("MFU", "share"), "loss": ("loss", ""), "best": ("best", ""), "return": ("return", ""),
    "memory_mib": ("peak memory", "MiB"), "peak_memory_mib": ("peak memory", "MiB"),
    "eta_s": ("left", "s"), "final_loss": ("loss at the end", ""), "parameters": ("parameters", ""),
}  # fmt: skip


def of_training(folder: Folder, query: Query) -> dict[str, Any]:
    run = folder.run
    stored, status = run.stored, run.status()
    if not stored.is_gang:
        raise UsageError(f"{folder.path} is {stored.kind_name}: it has tasks, and no ranks.")
    curves = curves_of(folder)
    results = read_object(folder.folder.training_results)
    said = {**results, **_mapping(results.get("measured")), **(status.training or {})}
    blocks = []
    with suppress(LookupError, TypeError, ValueError, AttributeError):  # a damaged record
        blocks = [block(one) for one in result_tables(folder.folder, results) if one is not None]
    return {
        "curves": in_order(curves),
        "ranks": _ranks(
            folder.folder, status, _sampled(folder.folder) or {0: _phases(said, _seconds(curves))}
        ),
        "stall": _stall(folder.folder),
        "checkpoints": _checkpoints(folder.folder),
        "evaluations": _evaluations(curves),
        "figures": [*_figures(said)],
        "blocks": blocks,
    }


def _ranks(
    folder: RunFolder, status: Status, phases: Mapping[int, Mapping[str, float]]
) -> list[dict[str, Any]]:
    """The ranks of the last start, over all nodes."""
    starts: dict[int, list[str]] = {}
    for start in starts_of(folder):
        if isinstance(ranks := start.begin.get("ranks"), list) and start.node >= 0:
            starts[start.node] = list(map(str, ranks))
    labels = [(node, label) for node in sorted(starts) for label in starts[node]][:_MOST_RANKS]
    errors = rank_failures(folder).errors
    has_nodes = len(starts) > 1
    return [
        {
            "rank": rank,
            "host": line(f"node {node} {label}" if has_nodes else label),
            "state": "failed" if rank in errors else status.state,
            "error": line(f"{errors[rank].type}: {errors[rank].message}")
            if rank in errors
            else None,
            "phases": phases.get(rank, {}),
        }
        for rank, (node, label) in enumerate(labels)
    ]


def _sampled(folder: RunFolder) -> dict[int, dict[str, float]]:
    """What each rank was at, in seconds, as the supervisor saw it once a second: of the last start,
    and in one order for all. Empty where nobody looked."""
    known = {
        int(rank): {line(word): finite(s) or 0.0 for word, s in _mapping(each).items()}
        for rank, each in read_object(folder.rank_phases).items()
        if rank.isdigit()
    }
    total = Counter[str]()
    for each in known.values():
        total.update(each)
    words = [word for word, _ in total.most_common() if word != "the rest"] + ["the rest"]
    return {
        rank: {word: each[word] for word in words if word in each} for rank, each in known.items()
    }


def _phases(said: Mapping[str, Any], seconds: float) -> dict[str, float]:
    """Seconds by phase, from the shares that a training or an agent reports."""
    found = {word: finite(said.get(name)) for name, word in _PHASES.items() if name in said}
    known = {word: share * seconds for word, share in found.items() if share is not None}
    return {**known, "the rest": max(0.0, seconds - sum(known.values()))} if known else {}


def _seconds(curves: Mapping[str, Curve]) -> float:
    """What all steps took together."""
    taken = (curves[name].value for name in ("train/seconds", "update/seconds") if name in curves)
    return float(sum(np.nansum(values) for values in taken))


def _figures(said: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for name, (word, unit) in _FIGURES.items():
        given = said.get(name)
        if isinstance(given, Mapping):  # the best, with its metric and step
            word, given = f"best {line(str(given.get('metric')))}", given.get("value")
        if isinstance(given, list):  # of each rank
            given = max(
                (known for one in given if (known := finite(one)) is not None), default=None
            )
        value = finite(given)
        if value is not None:
            yield {"name": word, "value": value, "unit": unit}


def _stall(folder: RunFolder) -> dict[str, str] | None:
    """What held the last start up, and where its ranks stood."""
    stall = last_start(folder).end.get("stall")
    if not stall:
        return None
    stacks = []
    for path in sorted(folder.logs.glob("rank-*.stack"))[:_MOST_STACKS]:
        with suppress(OSError):
            with opened(folder.path, f"logs/{path.name}") as file:
                text = file.read(_MOST_STACK).decode("utf-8", "replace")
            stacks += [f"{path.stem}\n{text}"] if text.strip() else []
    return {"text": line(str(stall)), "stacks": listing("\n".join(stacks))}


def _checkpoints(folder: RunFolder) -> list[dict[str, Any]]:
    best = read_object(folder.checkpoints / "best.json").get("step")
    found = []
    for path in folder.checkpoints.glob("step-*"):
        number = path.name.removeprefix("step-")
        with suppress(OSError):  # removed meanwhile
            if number.isascii() and number.isdigit():
                sizes = [inner.stat() for inner in path.iterdir()]
                found.append({
                    "step": int(number), "bytes": sum(size.st_size for size in sizes),
                    "when": path.stat().st_mtime, "best": int(number) == best,
                })  # fmt: skip
    return sorted(found, key=lambda one: int(one["step"]))


def _evaluations(curves: Mapping[str, Curve]) -> list[dict[str, Any]]:
    """A row per evaluation, the last ones; names without their kind."""
    rows: dict[int, dict[str, Any]] = {}
    for name, curve in curves.items():
        kind, _, short = name.partition("/")
        if kind == "evaluation":
            for step, value in zip(curve.step.tolist(), curve.value.tolist(), strict=True):
                rows.setdefault(step, {"step": step})[line(short)] = finite(value)
    return [rows[step] for step in sorted(rows)][-_MOST_EVALUATIONS:]


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


_MOST_CELLS, _MOST_REJECTS = 2000, 50
#: What a cell is that stands for chunks in different states: the first of these.
_WORST = ("failed", "running", "waiting", "cancelled", "stopped", "done")


def of_map(folder: Folder, query: Query) -> dict[str, Any]:
    run = folder.run
    if not run.stored.is_map:
        raise UsageError(f"{folder.path} is {run.stored.kind_name}: it has no records.")
    folders = stage_folders(folder.folder)
    status = run.status()
    published = read_published(folder.folder)
    return {
        "stages": [_stage(each, tally(each)) for each in folders],
        "curves": in_order(curves_of(folder)),
        "chunks": _chunks(folder.folder, (status.live or {}).get("num_running", 0)),
        "rejects": [
            {"stage": line(cause.stage), "reason": line(cause.reason), "count": cause.num,
             "sample": listing(cause.example)}
            for each in folders for cause in rejects(each)[:_MOST_REJECTS]
        ],
        "output": published and {
            "path": published.output, "bytes": published.size, "rows": published.rows,
            "notes": [line(note) for note in published.notes],
        },
    }  # fmt: skip


def _stage(folder: RunFolder, counts: Tally) -> dict[str, Any]:
    return {
        "name": line(" → ".join(map(str, read_run(folder).spec.get("stages", ())))),
        "in": counts.num_in,
        "out": counts.num_out,
        "rejected": counts.num_rejected,
        "dropped": counts.num_dropped,
        "lost": counts.num_lost,
        "waiting": counts.num_open,
    }


def _chunks(folder: RunFolder, num_running: int) -> list[dict[str, Any]]:
    """Cells in the order of the input: of many chunks a cell stands for several."""
    if not folder.ledger.exists():
        return []
    with LedgerReader(folder.ledger) as ledger:
        states = ledger.states()
    words = {TaskState.READY: "waiting", TaskState.CLAIMED: "running" if num_running else "waiting"}
    named = [words.get(state) or state.name.lower() for state in states]
    size = -(-len(named) // _MOST_CELLS) or 1
    return [
        {
            "index": at,
            "count": len(named[at : at + size]),
            "state": min(named[at : at + size], key=_WORST.index),
        }
        for at in range(0, len(named), size)
    ]


#: Importance takes seconds: it is asked for, and computed again when as many more have ended.
_KNOWN: WeakKeyDictionary[Folder, tuple[object, dict[str, Any] | None]] = WeakKeyDictionary()
_ONE_AT_A_TIME = Lock()


def of_search(folder: Folder, query: Query) -> dict[str, Any]:
    """``importance=1``: with how much each parameter matters."""
    state = read_search(folder.folder)
    if state is None:
        if folder.run.stored.is_search:
            return {"goals": [], "history": []}  # it has not begun
        raise UsageError(f"{folder.path} is not a search.")
    wanted = query.text("importance") == "1"
    weighed = _importance(folder, state) if wanted else None
    return {
        **view(state),
        "importance": weighed and weighed["values"],
        "weighed": weighed and {"step": weighed["step"], "trials": weighed["trials"]},
    }


def _importance(folder: Folder, state: SearchState) -> dict[str, Any] | None:
    standing = (folder.run.stored.run_id, len(state.ended))  # a run that was begun anew is another
    with _ONE_AT_A_TIME:
        known = _KNOWN.get(folder)
        if known is None or known[0] != standing:
            known = _KNOWN[folder] = (standing, importance(state))
    return known[1]
