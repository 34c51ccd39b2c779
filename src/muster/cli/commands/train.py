"""``muster train``: parse, show, train, sum up; ``muster verify``: do ranks agree on gradients?

The supervisor is started before anything else: it imports torch while the flags are looked at.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from muster.base.errors import EXIT_OK, EXIT_SOME_FAILED, UsageError
from muster.base.flags import wants_help
from muster.cli.values import starts_ranks
from muster.gang.handle import SupervisorHandle, supervising
from muster.gang.topology import read_topology

if TYPE_CHECKING:
    from muster.api.gangs.train import Trained, TrainJob
    from muster.api.slurm.gang import NodeStart, SlurmGang
    from muster.api.start.options import GangOptions
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


def main(argv: list[str]) -> int:
    began = time.monotonic()
    with _supervisor(is_wanted=starts_ranks(argv)) as supervisor:
        return _train(flags_of_train(argv), ("muster", "train", *argv), supervisor, began)


def start(parsed: Parsed, typed: Sequence[str], node: NodeStart | None = None) -> int:
    """Do what the flags say. ``typed``: the command line that goes into the record; ``node``: of
    the job that this command, as it was handed in, has become.
    """
    began = time.monotonic()
    given = parsed.given("options")
    stays_here = node is not None or given.get("executor") != "slurm"
    is_later = parsed.shown.dry_run or given.get("wait_s", 0) > 0 or given.get("hosts")
    with _supervisor(is_wanted=stays_here and not is_later) as supervisor:
        return _train(parsed, typed, supervisor, began, node)


def _supervisor(*, is_wanted: bool) -> AbstractContextManager[SupervisorHandle | None]:
    is_wanted = is_wanted and read_topology() is None
    return supervising(is_wanted=is_wanted, forks=sys.platform == "linux")


def _train(
    flags: Parsed,
    typed: Sequence[str],
    supervisor: SupervisorHandle | None,
    began: float,
    node: NodeStart | None = None,
) -> int:
    from muster.api.fit import train_here
    from muster.api.gangs.train import plan_training, run_training
    from muster.cli import output
    from muster.cli.gang import TrainScreen, show_gang_plan, sum_up_gang
    from muster.cli.train_flags import train_job

    job, options = train_job(flags)
    shown = flags.shown
    if node is not None:
        from muster.api.slurm.gang import options_on_node

        options, typed = options_on_node(node, job.folder, options, job.code), node.argv
    if options.slurm is not None:
        from muster.cli.gang import run_on_slurm

        return run_on_slurm(_on_nodes(job, options, typed, flags), flags)
    topology = read_topology()
    if topology is not None:
        shown.refuse_detach(f"{topology.launcher} waits for its ranks", "leave it out.")
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
    with TrainScreen(job.folder, flags.shown, typed) as screen:
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
    from muster.api.gangs.train import check_job
    from muster.cli.gang import gang_on_slurm

    check_job(job, options)
    return gang_on_slurm(job.work(), options, flags, typed)


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


_VERIFY_HELP = """Compare the gradients of a task on one rank, on several, and with accumulation.

One batch of the training data goes through the task on one rank as a whole, in micro-batches, and
on all ranks; the largest relative difference is shown with the parameter it is in. The types in
which products are really computed are shown too, and the parameters that the loss does not use.
Nothing is trained. Exit code 1 when gradients differ by more than rounding.

Examples:
  muster verify digits --devices cpu:2
  muster verify my_task.py:MyTask --gpus 2 --precision bf16
"""


def verify(argv: list[str]) -> int:
    is_wanted = bool(argv) and not wants_help(argv)
    with supervising(is_wanted=is_wanted, forks=True) as supervisor:
        return _verify(argv, supervisor)


def _verify(argv: list[str], supervisor: Any) -> int:
    from muster.api.gangs.train import verify_task
    from muster.cli import output
    from muster.cli.gang import gang_audience
    from muster.cli.train_flags import flags_of_train, train_job
    from muster.train.config import TrainConfig

    flags = flags_of_train(argv, "verify", _VERIFY_HELP)
    job, options = train_job(flags)
    shown = flags.shown
    if not isinstance(job.config, TrainConfig):
        raise UsageError(
            f"muster verify compares the gradients of a task; {job.name} learns by acting.",
            hint="every update of its training compares the ranks' parameters anyway.",
        )

    def hear(rank: int, line: str) -> None:
        if rank == 0 and shown.level in ("info", "debug"):
            output.say(line)

    given = gang_audience((), all_ranks=False, level=shown.level)
    audience = dataclasses.replace(given, hear=hear)
    ending, findings = verify_task(job, options, audience, supervisor=supervisor)
    for line in ending.report:
        output.remark(line)
    if ending.exit_code != EXIT_OK:
        return ending.exit_code
    is_good = all(finding["is_good"] is not False for finding in findings)
    if shown.json:
        output.say_json({"is_good": is_good, "findings": findings})
    elif not (shown.quiet and is_good):
        words = {True: "same", False: "DIFFERENT", None: "note"}
        rows = [[words[f["is_good"]], f["what"], f["text"]] for f in findings]
        output.table(["", "what", "result"], rows)
    return EXIT_OK if is_good else EXIT_SOME_FAILED
