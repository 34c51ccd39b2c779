"""Why the ranks of a start failed, from what they and the launcher have written down."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from muster.base.errors import EXIT_OK
from muster.gang.blame import RankError, read_rank_error
from muster.run.folder import RunFolder
from muster.run.state import last_ending, last_report

_LOG = re.compile(r"rank-(\d+)\.log")
_RANK = re.compile(r"\brank (\d+)\b")


class RankFailures(NamedTuple):
    """``report``: what the launcher said at the end; ``errors``: what ranks wrote down; ``first``:
    the rank that made the others fail."""

    report: tuple[str, ...]
    errors: dict[int, RankError]
    first: int | None = None

    def who(self, rank: int) -> str:
        """A rank as the subject of what it has raised: whether another one is the cause of that."""
        name = self.errors[rank].follows
        is_cause = rank == self.first or self.first is None or name is None
        return f"rank {rank}" if is_cause else f"rank {rank} ended because of it ({name})"


def rank_failures(folder: RunFolder) -> RankFailures:
    """Why the last start failed, the rank that failed first before the others."""
    if last_ending(folder) == EXIT_OK:
        return RankFailures((), {})
    errors = _errors(folder)
    first = failed_rank(folder)
    order = sorted(errors, key=lambda rank: (rank != first, errors[rank].time_s))
    return RankFailures(last_report(folder), {rank: errors[rank] for rank in order}, first)


def failed_rank(folder: RunFolder) -> int | None:
    """The rank that made the last start fail; None where no rank did."""
    found = [_RANK.search(line) for line in last_report(folder)[:1]]
    if found and found[0] is not None:
        return int(found[0].group(1))
    errors = {} if last_ending(folder) == EXIT_OK else _errors(folder)
    return min(errors, key=lambda rank: errors[rank].time_s, default=None)


def ranks_in(folder: RunFolder) -> list[int]:
    """The ranks that have printed anything."""
    found = (_LOG.fullmatch(path.name) for path in _entries(folder.logs))
    return sorted(int(match.group(1)) for match in found if match is not None)


def _errors(folder: RunFolder) -> dict[int, RankError]:
    found = {rank: read_rank_error(folder.rank_error(rank)) for rank in ranks_in(folder)}
    return {rank: error for rank, error in found.items() if error is not None}


def _entries(folder: Path) -> Iterator[Path]:
    try:
        yield from folder.iterdir()
    except OSError:
        return
