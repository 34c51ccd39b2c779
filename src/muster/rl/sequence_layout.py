"""How to lay segments of sequences side by side: arithmetic on the host, without tensors."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

#: Calls may end at so many different lengths; more would not pay and take longer to weigh up.
_MAX_CANDIDATES = 16


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Microseconds of running forward and backward.

    A call takes ``call`` + steps x (``step`` + ``row`` x rows); a call of one step, as a cell,
    ``cell`` + ``cell_row`` x rows. Copying to and from segments takes ``copy`` per row and step,
    and ``arrange`` once.
    """

    call: float
    step: float
    row: float
    cell: float
    cell_row: float
    copy: float
    arrange: float

    def of(self, steps: int, rows: int) -> float:
        if steps == 1:
            return self.cell + self.cell_row * rows
        return self.call + steps * (self.step + self.row * rows)


def cpu_costs(num_inputs: int, num_units: int) -> Costs:
    """Measured on 21 November 2026, one core, torch 2.13 (oneDNN), forward and backward, as part
    of a chain of calls with its slices and masks.

    64 units, 64 inputs: call 360 us, row 2.4 us per step; as a cell 180 us + 3 us per row.
    256 units, 64 inputs: call 1,100 us, row 19 us per step; as a cell 450 us + 21 us per row.
    128 steps x 8 rows of 64 units, 46 of the steps with starts: 22 ms in stretches, 6 ms in
    segments (5 calls), 2.5 ms had there been no starts.
    """
    weights = 4e-3 * num_units * (num_inputs + num_units)
    return Costs(
        call=280 + 2.6 * weights,
        step=3 + 0.03 * weights,
        row=0.5 + 0.057 * weights,
        cell=150 + 0.9 * weights,
        cell_row=1 + 0.06 * weights,
        copy=0.002 * (num_inputs + num_units),
        arrange=150,
    )


class Segments(NamedTuple):
    """Parts of rows between starts, the longest first; int64 [S] each.

    Attributes
        env: which row it is part of.
        begin: its first step.
        length: its steps, at least 1.
        is_fresh: bool; it begins with an empty state, not with the one from before step 0.
        shape: steps and rows of the batch.
    """

    env: NDArray[np.int64]
    begin: NDArray[np.int64]
    length: NDArray[np.int64]
    is_fresh: NDArray[np.bool_]
    shape: tuple[int, int]


class Places(NamedTuple):
    """Indices, int64.

    Attributes
        gather: for every place of the flat pieces, which (step x rows + row) it holds.
        scatter: for every (step x rows + row), at which place it is.
        initial: for every segment the row whose state it begins with; ``rows`` for an empty one.
        final: for every row its last segment.
    """

    gather: NDArray[np.int64]
    scatter: NDArray[np.int64]
    initial: NDArray[np.int64]
    final: NDArray[np.int64]


class Layout(NamedTuple):
    """Segments side by side, one row each, the longest first.

    Attributes
        calls: (steps, rows, rows that go on afterwards) of each.
        widths: rows at each step, int64.
        places: where everything is.
    """

    calls: list[tuple[int, int, int]]
    widths: NDArray[np.int64]
    places: Places


def stretches_of(starts: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Begin and end of the stretches in which starts are only at the first step."""
    cuts = [0, *(np.flatnonzero(starts[1:].any(1)) + 1).tolist(), len(starts)]
    return list(itertools.pairwise(cuts))


def segments_of(starts: NDArray[np.bool_]) -> Segments:
    """Every row of ``starts`` [T, B] cut where it is True."""
    steps, rows = starts.shape
    begins = starts.T.copy()
    begins[:, 0] = True
    env, begin = np.nonzero(begins)
    is_last = np.append(env[1:] != env[:-1], True)
    length = np.where(is_last, steps, np.append(begin[1:], steps)) - begin
    order = np.argsort(-length, kind="stable")
    env, begin, length = env[order], begin[order], length[order]
    return Segments(env, begin, length, starts[begin, env], (steps, rows))


def lay_out(segments: Segments, costs: Costs | None, needs_final: bool) -> Layout | None:
    """The cheapest layout, or None where stretches are cheaper; without costs one without padding.

    With ``needs_final`` calls end where the last segment of a row ends.
    """
    lengths, counts = np.unique(segments.length, return_counts=True)
    # How many segments are longer than 0, than lengths[0], ...
    rows_after = np.append(0, counts[::-1].cumsum())[::-1]
    last = segments.begin + segments.length == segments.shape[0]
    if costs is None:
        ends = lengths
    else:
        ends = _cheapest_ends(lengths, rows_after, costs)
        if needs_final:
            ends = np.union1d(ends, segments.length[last])
    begins = np.append(0, ends[:-1])
    rows = rows_after[np.searchsorted(lengths, begins, side="right")]
    left = np.append(rows[1:], 0)
    calls = list(zip((ends - begins).tolist(), rows.tolist(), left.tolist(), strict=True))
    widths = np.repeat(rows, ends - begins)
    if costs is not None and _stretches_cost(segments, costs) <= _segments_cost(calls, costs):
        return None
    return Layout(calls, widths, _places(segments, widths, last))


def _places(segments: Segments, widths: NDArray[np.int64], last: NDArray[np.bool_]) -> Places:
    steps, rows = segments.shape
    step = np.repeat(np.arange(len(widths)), widths)
    segment = np.arange(len(step)) - np.repeat(widths.cumsum() - widths, widths)
    length = segments.length[segment]
    # Past the end of a segment its last step is repeated; nobody looks at the result.
    time = segments.begin[segment] + np.minimum(step, length - 1)
    gather = time * rows + segments.env[segment]
    is_real = step < length
    scatter = np.empty(steps * rows, np.int64)
    scatter[gather[is_real]] = np.flatnonzero(is_real)
    final = np.empty(rows, np.int64)
    final[segments.env[last]] = np.flatnonzero(last)
    initial = np.where(segments.is_fresh, rows, segments.env)
    return Places(gather, scatter, initial, final)


def _cheapest_ends(
    lengths: NDArray[np.int64], rows_after: NDArray[np.int64], costs: Costs
) -> NDArray[np.int64]:
    """The lengths at which calls should end, by a shortest path over the candidates."""
    chosen = np.unique(
        np.linspace(0, len(lengths) - 1, min(len(lengths), _MAX_CANDIDATES)).round().astype(int)
    )
    ends = [0, *lengths[chosen].tolist()]
    rows = rows_after[np.append(0, chosen + 1)].tolist()
    best, came_from = [0.0], [0]
    for j in range(1, len(ends)):
        totals = [best[i] + costs.of(ends[j] - ends[i], rows[i]) for i in range(j)]
        came_from.append(min(range(j), key=totals.__getitem__))
        best.append(totals[came_from[j]])
    path, place = [], len(ends) - 1
    while place > 0:
        path.append(ends[place])
        place = came_from[place]
    return np.array(path[::-1], np.int64)


def _segments_cost(calls: list[tuple[int, int, int]], costs: Costs) -> float:
    running = sum(costs.of(steps, rows) for steps, rows, _ in calls)
    return running + costs.copy * sum(steps * rows for steps, rows, _ in calls) + costs.arrange


def _stretches_cost(segments: Segments, costs: Costs) -> float:
    steps, rows = segments.shape
    cuts = np.unique(np.append(segments.begin, steps))
    return sum(costs.of(length, rows) for length in np.diff(cuts).tolist())
