"""What a search was told and has decided, as rows of the ledger and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from muster.farm import canonical
from muster.farm.ledger.queries import SearchRow
from muster.search.records import Decision, Ended, Ending, Heard, Point, Proposal, Record


def to_row(record: Record, task_id: int | None, **more: Any) -> SearchRow:
    """``more`` goes into the row and is not part of the record."""
    match record:
        case Proposal():
            kind, body = "proposal", _without(asdict(record), "parent", "step")
        case Heard(trial, seed, points):
            short = [[point.name, point.step, point.value] for point in points]
            kind, body = "heard", {"trial": trial, "seed": seed, "points": short}
        case Ended(trial, seed, ending):
            values = dict(ending.values)
            state = ending.state
            kind, body = "ended", {"trial": trial, "seed": seed, "state": state, "values": values}
        case Decision():
            kind, body = "decision", _without(asdict(record), "parent", "params", "heir")
    return SearchRow(kind, task_id, canonical.encode({**body, **more}))


def _without(body: dict[str, Any], *of_heirs: str) -> dict[str, Any]:
    """Without what only the heirs of a population have, where this is none."""
    return {
        name: value for name, value in body.items() if value is not None or name not in of_heirs
    }


def from_row(row: SearchRow) -> Record:
    body = canonical.decode(row.body)
    match row.kind:
        case "proposal":
            return Proposal(**{f.name: body[f.name] for f in fields(Proposal) if f.name in body})
        case "heard":
            points = tuple(Point(*point) for point in body["points"])
            return Heard(body["trial"], body["seed"], points)
        case "ended":
            return Ended(body["trial"], body["seed"], Ending(body["state"], body["values"]))
    return Decision(**{f.name: body[f.name] for f in fields(Decision) if f.name in body})


def seconds_in(row: SearchRow) -> float:
    """How long the search had been at work, as a proposal and an end say."""
    return float(canonical.decode(row.body).get("spent_s", 0.0))


def moment_of(row: SearchRow) -> float | None:
    """When a decision was made (seconds since 1970); an older muster did not write it down."""
    found: float | None = canonical.decode(row.body).get("time_s")
    return found


def gpus_per_worker(options: Mapping[str, Any], *, has_gpus: bool) -> float:
    """What an hour of a worker counts in GPU hours. ``options``: as a run's record has them.

    ``has_gpus``: whether workers have GPUs of this machine, which ``--devices auto`` does not tell.
    A worker on CPU cores counts as one GPU, and so does each with ``--per-gpu auto``, where nobody
    knows before how many share one.
    """
    of_cluster = (options.get("cluster") or {}).get("gpus_per_worker")
    per_gpu = options.get("per_gpu", 1)
    if of_cluster or per_gpu == "auto" or not has_gpus:
        return float(of_cluster or 1)
    return float(options.get("gpus_per_task", 1) / per_gpu)


def numbers_of(value: bytes) -> dict[str, float]:
    """The numbers among the fields of an encoded result."""
    found = canonical.decode(value)
    return {name: float(item) for name, item in found.items() if isinstance(item, int | float)}
