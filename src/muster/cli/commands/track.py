"""``muster track RUN --log-to …``: send to trackers what they have not got of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from muster.api.runs import open_run
from muster.api.trackers.guard import track
from muster.api.trackers.tracker import read_trackers
from muster.base.errors import UsageError
from muster.base.flags import Flag
from muster.cli import output
from muster.cli.parse import RunPlace, parse

_HELP = """Send a run's settings, metrics and results to trackers.

They get what they have not got: all of a run that was made without --log-to, or what was left when
a tracker was away. Nothing is sent twice.

Examples:
  muster track runs/train-1a2b3c --log-to wandb
  muster track train-1a2b3c --log-to mlflow,tensorboard
"""


@dataclass(frozen=True, kw_only=True)
class _Track(RunPlace):
    """Where it is sent."""

    log_to: Annotated[
        tuple[str, ...], Flag(metavar="wandb,mlflow,trackio,tensorboard", read=read_trackers)
    ] = ()
    """The trackers, with commas. Their own variables, such as WANDB_MODE or MLFLOW_TRACKING_URI,
    say where they are."""


def main(argv: list[str]) -> int:
    flags = parse(_Track, argv, "track", _HELP)
    if not flags.log_to:
        raise UsageError("--log-to is missing.", hint="write --log-to wandb, mlflow, …")
    run = open_run(flags.run)
    left = track(run.folder, flags.log_to, output.complain)
    for name in flags.log_to:
        if name not in left:
            output.say(f"{name} has all of {run.folder.name}")
    return 1 if left else 0
