"""Reading what tasks have logged: as it comes in, or the points that hold in the end.

A task may have had several attempts, and each may have logged the same steps again. What holds:
metric by metric, a later attempt replaces everything of earlier ones from the first step that it
logs. An attempt that goes on from a checkpoint therefore continues the curve, and one that starts
afresh replaces it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from muster.farm.points import Points, decode

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from muster.farm.ledger.read import LedgerReader


class Frame(NamedTuple):
    """What one attempt of a task has sent at once.

    ``frame_id`` grows with every frame of the run; ``token`` with every attempt of the task.
    """

    frame_id: int
    task_id: int
    token: int
    points: Points


class Curve(NamedTuple):
    """The points of one metric of one task that hold, as columns of equal length.

    They are in the order in which they were logged; ``token`` names the attempt of each.
    """

    step: NDArray[np.int64]
    time_s: NDArray[np.float64]
    value: NDArray[np.float64]
    token: NDArray[np.int64]


def frames_above(reader: LedgerReader, last_id: int = 0) -> Iterator[Frame]:
    """What was recorded after frame ``last_id``, in the order of recording.

    Whoever follows a run asks again with the highest ``frame_id`` it has seen: it gets every frame
    exactly once. A frame may repeat steps of an earlier attempt; ``effective`` says what holds.
    """
    for row in reader.metrics(above=last_id):
        yield Frame(row.frame_id, row.task_id, row.token, decode(row.body))


def curves_of(reader: LedgerReader, task_id: int) -> dict[str, Curve]:
    """What holds of one task: a curve for each metric, in the order of their first points."""
    return effective((row.token, decode(row.body)) for row in reader.metrics(task_id=task_id))


def effective(frames: Iterable[tuple[int, Points]]) -> dict[str, Curve]:
    """The points that hold of one task whose frames these are: token and points, in any order
    of tokens, but those of one token in the order in which they were sent.
    """
    import numpy as np

    parts: dict[str, dict[int, list[Curve]]] = {}
    for token, points in frames:
        for number, name in enumerate(points.names):
            mine = points.which == number
            step = points.step[mine]
            columns = (step, points.time_s[mine], points.value[mine])
            part = Curve(*columns, np.full(len(step), token, np.int64))
            parts.setdefault(name, {}).setdefault(token, []).append(part)
    return {name: _cut(by_token) for name, by_token in parts.items()}


def _cut(by_token: dict[int, list[Curve]]) -> Curve:
    """From the last attempt to the first: of each what lies below all steps of later ones."""
    import numpy as np

    kept: list[Curve] = []
    bound: int | None = None
    for token in sorted(by_token, reverse=True):
        whole = _joined(by_token[token])
        if not len(whole.step):
            continue
        holds = np.ones(len(whole.step), bool) if bound is None else whole.step < bound
        kept.append(Curve._make(column[holds] for column in whole))
        first = int(whole.step.min())
        bound = first if bound is None else min(bound, first)
    return _joined(kept[::-1])


def _joined(parts: list[Curve]) -> Curve:
    import numpy as np

    return Curve._make(np.concatenate(columns) for columns in zip(*parts, strict=True))
