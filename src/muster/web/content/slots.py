"""Who worked when: attempts as bars, a row per slot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from muster.farm.ledger.read import LedgerReader, WorkSpan
from muster.web.content.plain import line

#: All bars of a picture together, whatever the number of tasks; and its rows.
MOST_BARS, _MOST_SLOTS = 2000, 128


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
