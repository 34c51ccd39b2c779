"""``muster train``: parse, show, train, sum up.

The supervisor is started before anything else: it imports torch while the flags are looked at.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from muster.cli.words import wants_slurm
from muster.gang.launch import SupervisorHandle, start_supervisor
from muster.gang.topology import read_topology

if TYPE_CHECKING:
    from muster.api.options import GangOptions
    from muster.api.slurm_gang import NodeStart, SlurmGang
    from muster.api.train import Trained, TrainJob
    from muster.cli.parse import Parsed

_HELP = """Train one model on every device, with the same result as on one.

TASK is a recipe ({recipes}) or file.py:Class,
a muster.Task; the fields of a task that is a dataclass are flags as well. The same command again
goes on from the last checkpoint, on these or on other devices.

Examples:
  muster train digits
  muster train digits --devices cpu:2 --epochs 5
  muster train har --gpus 4 --global-batch 128 --precision bf16
  muster train my_task.py:MyTask --lr 3e-4 --run-dir runs/first
  muster train har --on slurm --nodes 2 --gpus 4 --time 4:00:00
"""
_NO_START = ("-h", "--help", "--help-all", "--dry-run", "--dry_run")


def main(argv: list[str]) -> int:
    began = time.monotonic()
    stays_here = bool(argv) and not any(word in _NO_START for word in argv)
    with _supervisor(is_wanted=stays_here and not wants_slurm(argv)) as supervisor:
        return _train(flags_of_train(argv), ("muster", "train", *argv), supervisor, began)


def start(parsed: Parsed, typed: Sequence[str], node: NodeStart | None = None) -> int:
    """Do what the flags say. ``typed``: the command line that goes into the record; ``node``: of
    the job that this command, as it was handed in, has become.
    """
    began = time.monotonic()
    stays_here = node is not None or parsed.given("options").get("executor") != "slurm"
    with _supervisor(is_wanted=stays_here and not parsed.shown.dry_run) as supervisor:
        return _train(parsed, typed, supervisor, began, node)


@contextmanager
def _supervisor(*, is_wanted: bool) -> Iterator[SupervisorHandle | None]:
    if not is_wanted or read_topology() is not None:
        yield None
        return
    with start_supervisor(forks=sys.platform == "linux") as supervisor:
        yield supervisor


def _train(
    flags: Parsed,
    typed: Sequence[str],
    supervisor: SupervisorHandle | None,
    began: float,
    node: NodeStart | None = None,
) -> int:
    from muster.api.fit import train_here
    from muster.api.train import plan_training, run_training
    from muster.cli import output
    from muster.cli.gang_screen import TrainScreen, show_gang_plan, sum_up_gang
    from muster.cli.train_flags import train_job

    job, options = train_job(flags)
    shown = flags.shown
    if node is not None:
        from muster.api.slurm_gang import options_on_node

        options, typed = options_on_node(node, job.folder, options, job.code), node.argv
    if options.slurm is not None:
        from muster.cli.gang_screen import run_on_slurm

        return run_on_slurm(_on_nodes(job, options, typed, flags), flags)
    topology = read_topology()
    if shown.dry_run and topology is not None:
        if topology.rank == 0:
            text = f"Would train {job.name} as {topology.world_size} ranks of the launcher's."
            what = {"task": job.name, "world_size": topology.world_size, "path": str(job.folder)}
            output.say_json(what) if shown.json else output.say(text)
        return 0
    if shown.dry_run:
        show_gang_plan(plan_training(job, options), f"train {job.name}", is_json=shown.json)
        return 0
    if topology is not None:
        output.show_events(are_shown=shown.level == "debug")
        is_silent = shown.level in ("nothing", "warning")
        say = (lambda _: None) if is_silent else output.say
        here = train_here(job, topology, say, options)
        if shown.json and here.results is not None and topology.rank == 0:
            _say_outcome(here, time.monotonic() - began)
        return here.exit_code
    with TrainScreen(job.folder, flags, typed) as screen:
        done = run_training(job, options, screen.audience, supervisor=supervisor)
    seconds = time.monotonic() - began
    if shown.json and done.results is not None:
        _say_outcome(done, seconds)
        return done.exit_code
    assert done.ending is not None
    return sum_up_gang(
        done.folder.path, done.ending, seconds, is_quiet=shown.quiet, is_json=shown.json
    )


def flags_of_train(argv: Sequence[str], more: Mapping[str, Any] = MappingProxyType({})) -> Parsed:
    from muster.cli import train_flags

    return train_flags.flags_of_train(argv, "train", _HELP, more)


def slurm_gang(parsed: Parsed) -> SlurmGang:
    """What is sent to SLURM where the flags say so."""
    from muster.cli.train_flags import train_job

    job, options = train_job(parsed)
    return _on_nodes(job, options, parsed.argv(), parsed)


def _on_nodes(
    job: TrainJob, options: GangOptions, typed: Sequence[str], flags: Parsed
) -> SlurmGang:
    from muster.api.slurm_gang import SlurmGang
    from muster.api.train import check_job, renewal_of
    from muster.cli.flags import job_digest

    assert options.slurm is not None
    check_job(job, options)
    return SlurmGang(
        folder=job.folder, request=options.slurm, kind=job.kind, restart=options.restart,
        renew=renewal_of(job, options, typed), of=job_digest(flags),
    )  # fmt: skip


def _say_outcome(done: Trained, seconds: float) -> None:
    from muster.cli import output

    output.say_json(
        {
            "path": str(done.folder.path),
            "seconds": round(seconds, 3),
            "exit_code": done.exit_code,
            "results": done.results,
        }
    )
