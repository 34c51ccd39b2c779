"""Looking at what runs in lock-step: what its ranks printed, how they failed, what was measured."""

from __future__ import annotations

from pathlib import Path

from muster.api.report.rank_failures import failed_rank, ranks_in
from muster.base.errors import UsageError
from muster.base.journal import read_journal
from muster.base.shown_text import shell_word
from muster.run.folder import RunFolder
from muster.run.record import RunRecord


def rank_log(folder: RunFolder, rank: str | None) -> tuple[int, Path]:
    """A rank and its log; without ``rank`` the one that failed first, else the first there is.

    Raises UsageError where there is no such rank, or no rank has printed anything.
    """
    known = ranks_in(folder)
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


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:20])) + (", …" if len(ranks) > 20 else "")
