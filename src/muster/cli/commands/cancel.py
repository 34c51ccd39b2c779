"""``muster cancel``: cancel what has not ended of a run, or single tasks of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from muster.api.experiments.experiment import find_experiment
from muster.api.experiments.watching import latest, open_watched
from muster.api.look.listing import array_of, job_of, word_of
from muster.api.runs import Run
from muster.base.flags import Flag
from muster.base.shown_text import shell_word
from muster.cli import output
from muster.cli.flags import LookFlags
from muster.cli.parse import parse


@dataclass(frozen=True, kw_only=True)
class _Cancel(LookFlags):
    """Which run, and which of its tasks."""

    task: Annotated[tuple[str, ...], Flag(metavar="N")] = ()
    """Cancel only these tasks of a sweep or a search, each named by its number or the start of its
    key; the others go on. One that runs is told to end, and killed if it does not."""


_CANCEL = """Cancel what has not ended; what is finished is kept.

Examples:
  muster cancel runs/train-1a2b3c
  muster cancel runs/train-1a2b3c --task 12 40
"""


def main(argv: list[str]) -> int:
    flags = parse(_Cancel, argv, "cancel", _CANCEL)
    if (experiment := find_experiment(flags.run)) is not None:
        from muster.cli import experiment_look

        run = experiment_look.cancel(experiment)
    else:
        run = latest(open_watched(flags.run))
    if flags.task:
        return _cancel_tasks(run, flags)
    is_gang, job = run.stored.is_gang, job_of(run)
    asked = run.cancel()
    array = array_of(run, asks_slurm=True)
    if flags.json:
        record = {"run": run.folder.name, "asked_coordinator": bool(asked)}
        output.say_json({**record, "changed": asked is not None})
    elif asked is None:
        state = word_of(run.status(), array)
        output.say(f"{run.folder.name}: nothing to cancel here, it is {state}")
    elif array is not None:
        output.say(f"{run.folder.name}: asked the elements at work to cancel what has not ended")
    elif asked and job is not None and job[1].waits:
        output.say(f"{run.folder.name}: cancelled SLURM job {job[0]}, which waited in the queue")
    elif asked and is_gang:
        output.say(f"{run.folder.name}: asked its ranks to save what they can and to end")
    elif asked:
        output.say(f"{run.folder.name}: asked its coordinator to cancel what has not ended")
    else:
        output.say(f"{run.folder.name}: cancelled what had not ended")
    if array is not None and array.num_queued and not flags.json:
        output.say("  elements that wait in SLURM's queue are not reached: end them with scancel")
    return 0


_OF_CANCELLED = {
    "cancelled": "cancelled",
    "told": "told to end; it is cancelled as soon as it has ended",
    "together": "goes on: it runs in one call with others, and cannot be ended without them",
}


def _cancel_tasks(run: Run, flags: _Cancel) -> int:
    words = run.cancel_tasks(flags.task)
    if flags.json:
        changed = any(word in ("cancelled", "told") for word in words.values())
        output.say_json({"run": run.folder.name, "changed": changed, "tasks": words})
        return 0
    for number, word in words.items():
        already = f"nothing to cancel, it is {word.removeprefix('was ')} already"
        output.say(f"{run.folder.name}: task {number}: {_OF_CANCELLED.get(word, already)}")
    if any(word in ("cancelled", "told") for word in words.values()):
        output.say(f"  run them after all: muster retry {shell_word(run.path)} --cancelled")
    return 0
