"""``muster collect``: bring the results of an array's elements together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from muster.api.array import collect
from muster.api.runs import open_run
from muster.base.errors import EXIT_SOME_FAILED
from muster.base.shown_text import count
from muster.cli import output
from muster.cli.flags import LookFlags
from muster.cli.parse import parse
from muster.farm.collect import LastWords

_HELP = """Merge what the elements of `muster sweep … --on slurm --array N` have done.

Call it while they run, and again when they have ended: what is there stays, what is new is added.

Example:
  muster collect runs/train-1a2b3c
"""
_MAX_NAMED, _MAX_REASONS = 20, 5


def main(argv: list[str]) -> int:
    flags = parse(LookFlags, argv, "collect", _HELP)
    run, found = collect(open_run(flags.run).path)
    counts = run.status().counts
    # What an element said does not matter once all results are there.
    ended = found.ended if counts["waiting"] else {}
    is_whole = not found.missing and not counts["waiting"]
    exit_code = run.exit_code if is_whole else EXIT_SOME_FAILED
    if flags.json:
        output.say_json(
            {
                "counts": dict(counts),
                "new": found.num_new,
                "known": found.num_known,
                "missing_elements": found.missing,
                "ended_elements": {number: words.text for number, words in ended.items()},
                "results": str(run.folder.results_parquet),
                "exit_code": exit_code,
            }
        )
        return exit_code
    output.say(
        f"{run.folder.name}: {count(found.num_new, 'new result')}; "
        f"{counts['done']:,} done, "
        f"{counts['failed']:,} failed, {counts['waiting']:,} not there yet"
    )
    missing = [number for number in found.missing if number not in ended]
    if missing:
        named = _named(missing)
        output.say(f"{count(len(missing), 'element has', 'elements have')} not begun: {named}")
    for line in _ending_lines(ended):
        output.say(line)
    output.say(f"table: {run.folder.results_csv}")
    return exit_code


def _named(numbers: Sequence[int]) -> str:
    more = ", …" if len(numbers) > _MAX_NAMED else ""
    return ", ".join(map(str, numbers[:_MAX_NAMED])) + more


def _ending_lines(ended: Mapping[int, LastWords]) -> list[str]:
    """A line for each reason, with the elements that gave it and the output of one of them."""
    by_reason: dict[str, list[int]] = {}
    for number, words in ended.items():
        # Which element it was in is no other reason.
        reason = words.text.replace(f"/elements/{number}", "/elements/N")
        by_reason.setdefault(reason, []).append(number)
    lines = []
    for reason, numbers in list(by_reason.items())[:_MAX_REASONS]:
        who = f"{len(numbers)} elements ({_named(numbers)})"
        who = who if len(numbers) > 1 else f"element {numbers[0]}"
        lines.append(f"{who} ended with: {reason} (all of it: {ended[numbers[0]].path})")
    return lines
