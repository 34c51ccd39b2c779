"""Looking at what runs in lock-step: what its ranks printed, how they failed, what was measured."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from muster.base.errors import EXIT_OK, UsageError
from muster.base.journal import read_journal
from muster.base.shown_text import shell_word
from muster.gang.blame import RankError, read_rank_error
from muster.run.folder import RunFolder
from muster.run.record import RunRecord
from muster.run.state import last_ending, last_report

_LOG = re.compile(r"rank-(\d+)\.log")
_RANK = re.compile(r"\brank (\d+)\b")


class RankFailures(NamedTuple):
    """``report``: what the launcher said at the end; ``errors``: what ranks wrote down."""

    report: tuple[str, ...]
    errors: dict[int, RankError]


def rank_log(folder: RunFolder, rank: str | None) -> tuple[int, Path]:
    """A rank and its log; without ``rank`` the one that failed first, else the first there is.

    Raises UsageError where there is no such rank, or no rank has printed anything.
    """
    known = _ranks(folder)
    if not known:
        begun = folder.metrics.exists()
        raise UsageError(
            f"No rank of {folder.path} has printed anything.",
            hint="muster.fit prints in the process that calls it."
            if begun
            else "it has not begun.",
        )
    if rank is None:
        chosen = failed_rank(folder)
        chosen = chosen if chosen in known else known[0]
    elif not rank.isascii() or not rank.isdigit() or int(rank) not in known:
        shown = f"0 to {known[-1]}" if known == list(range(known[-1] + 1)) else _listed(known)
        hint = f"its ranks are {shown}." if len(known) > 1 else f"it has only rank {known[0]}."
        raise UsageError(f"There is no rank {rank!r} in {folder.path}.", hint=hint)
    else:
        chosen = int(rank)
    return chosen, folder.rank_log(chosen)


def failed_rank(folder: RunFolder) -> int | None:
    """The rank that made the last start fail; None where no rank did."""
    found = [_RANK.search(line) for line in last_report(folder)[:1]]
    if found and found[0] is not None:
        return int(found[0].group(1))
    errors = {} if last_ending(folder) == EXIT_OK else _errors(folder)
    return min(errors, key=lambda rank: errors[rank].time_s, default=None)


def rank_failures(folder: RunFolder) -> RankFailures:
    """Why the last start failed, the rank that failed first before the others."""
    if last_ending(folder) == EXIT_OK:
        return RankFailures((), {})
    errors = _errors(folder)
    first = failed_rank(folder)
    order = sorted(errors, key=lambda rank: (rank != first, errors[rank].time_s))
    return RankFailures(last_report(folder), {rank: errors[rank] for rank in order})


def export_metrics(folder: RunFolder, stored: RunRecord, target: Path) -> int:
    """Write what a training has recorded, one row per line of its metrics; returns their number.

    Raises UsageError for a program, and where no step was recorded.
    """
    if stored.is_program:
        raise UsageError(
            f"{folder.path} is {stored.kind_name}: it has no table of muster's.",
            hint=f"what its ranks printed is in {folder.logs}.",
        )
    from muster.farm.export import export_records

    num_lines = export_records(lambda: read_journal(folder.metrics), target)
    if not num_lines:
        raise UsageError(
            f"{folder.path} has no table yet: no step of the training was recorded.",
            hint=f"see how it stands: muster status {shell_word(folder.path)}",
        )
    return num_lines


def _ranks(folder: RunFolder) -> list[int]:
    found = (_LOG.fullmatch(path.name) for path in _entries(folder.logs))
    return sorted(int(match.group(1)) for match in found if match is not None)


def _entries(folder: Path) -> Iterator[Path]:
    try:
        yield from folder.iterdir()
    except OSError:
        return


def _errors(folder: RunFolder) -> dict[int, RankError]:
    found = {rank: read_rank_error(folder.rank_error(rank)) for rank in _ranks(folder)}
    return {rank: error for rank, error in found.items() if error is not None}


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:20])) + (", …" if len(ranks) > 20 else "")
