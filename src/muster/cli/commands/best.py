"""``muster best``: the best trials of a search, and the commands that run them again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from muster.api.runs import open_run
from muster.api.search_state import again, read_search
from muster.base.errors import UsageError
from muster.base.flags import Flag
from muster.cli import output
from muster.cli.flags import JsonFlags
from muster.cli.parse import RunPlace, parse
from muster.cli.search_wording import goal_of, schedule_lines, setting_text, value_lines

_HELP = """Show the best trials of a search, also while it runs.

Examples:
  muster best runs/run-1a2b3c
  muster best runs/run-1a2b3c -n 5
"""


@dataclass(frozen=True, kw_only=True)
class _Best(RunPlace, JsonFlags):
    """Which run, and how many of its trials."""

    number: Annotated[int | None, Flag(aliases=("n",), metavar="N")] = None
    """How many trials are shown, the best first. Without it one, or with several objectives all
    that no other beats."""


def main(argv: list[str]) -> int:
    words = ["--number" if word == "-n" else word for word in argv]
    flags = parse(_Best, words, "best", _HELP)
    if flags.number is not None and flags.number < 1:
        raise UsageError(f"--number {flags.number} is too small.", hint="write 1 or more.")
    run = open_run(flags.run)
    state = None if run.stored.is_gang else read_search(run.folder)
    if state is None:
        raise UsageError(
            f"{run.path} is not a search, so it has no best trial.",
            hint="a search is begun with `muster sweep … --space … --maximize METRIC`.",
        )
    spec = state.spec
    found = state.unbeaten() if flags.number is None else state.search.best(flags.number)
    target = run.stored.targets[0]
    if flags.json:
        names = [goal.name for goal in spec.objectives]
        output.say_json([
            {
                "trial": one.trial, "params": dict(one.params), "state": one.state,
                "values": dict(zip(names, one.values, strict=True)),
                "spread": dict(zip(names, one.spread, strict=True)),
                "seeds": one.seeds, "step": one.step,
                "command": None if schedule else again(target, spec, one.params),
                "schedule": [
                    {"trial": part.number, "until": until, "params": dict(part.params)}
                    for until, part in schedule or ()
                ],
            }
            for one in found
            for schedule in [state.schedule(one.trial)]
        ])  # fmt: skip
        return 0
    if not found:
        output.say(f"{run.folder.name}: no trial has a value yet ({goal_of(spec)})")
    for place, one in enumerate(found, 1):
        values = ", ".join(value_lines(spec, one))
        state_word = "" if one.state == "done" else f"  ({one.state}, at step {one.step or 0:g})"
        output.say(f"{place}. trial {one.trial}: {values}{state_word}")
        if schedule := state.schedule(one.trial):
            output.say("   its settings changed on the way, so no one command runs it again:")
            for line in schedule_lines(schedule):
                output.say(f"     {line}")
            continue
        output.say(f"   {setting_text(one.params)}")
        output.say(f"   again: {again(target, spec, one.params)}")
    return 0
