"""A check of ``muster doctor``: a function of the facts that yields findings."""

from collections.abc import Iterator

from muster.checks import Facts, Finding, ok, warning

LEAST_MIB = 1000


def scratch(facts: Facts) -> Iterator[Finding]:
    """There is room where runs are written. Nothing is said where that is not known."""
    free = facts.disk.free_mib if facts.disk is not None else None
    if free is None:
        return
    if free >= LEAST_MIB:
        yield ok(f"{free} MiB are free where runs are written.")
    else:
        yield warning(
            what=f"Only {free} MiB are free where runs are written.",
            why="A run ends when its disk is full.",
            fix="Name another folder with --run-dir.",
        )
