"""``muster.fit``, and trainings in this process: on one device, or as another launcher's rank."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muster.api.gangs.gang import GangPlan
from muster.api.gangs.train import (
    ENTRIES,
    Trained,
    TrainJob,
    check_job,
    job_of_target,
    plan_training,
    run_training,
    tell_task,
)
from muster.api.gangs.work import GangAudience
from muster.api.start.earlier_work import move_aside
from muster.api.start.options import DeviceOptions, GangOptions, KeptOptions, as_trackers
from muster.api.trackers.guard import tracking
from muster.api.trackers.tracker import check_installed
from muster.base.errors import EXIT_OK, MusterError, UsageError
from muster.base.metric_log import in_task
from muster.base.signals import stop_code
from muster.base.target import ref_of, refuse_while_imported
from muster.gang.topology import SlotKind, Topology, read_topology
from muster.run.session import open_run
from muster.train.config import TrainConfig

if TYPE_CHECKING:
    from muster.rank.life import Results, StopFlag, Trainable
    from muster.train.task import Task

#: What `fit` takes for its ranks, beside the settings of the training.
_FOR_RANKS = {
    "hosts", "hosts_python", "hosts_setup",
    *(one.name for kind in (DeviceOptions, KeptOptions) for one in dataclasses.fields(kind)),
}  # fmt: skip


def fit(
    task: Task | type[Task] | str,
    config: TrainConfig | None = None,
    *,
    run_dir: str | Path | None = None,
    checkpoint_interval_s: float = 60.0,
    say: Callable[[str], None] = print,
    **settings: Any,
) -> Trained:
    """Train ``task`` on every device, or go on where an earlier call stopped.

    Args:
        task: a task, its class, or ``"file.py:Class"``. On several devices every rank makes its
            own from the class and the fields, so both must be reachable by name: a dataclass at
            the top level of a file.
        config: all settings; without it the task's own defaults with ``settings`` on top.
        run_dir: the run folder; ``runs/<task>-<hash>`` without it.
        checkpoint_interval_s: seconds between checkpoints.
        say: gets the lines that rank 0 prints.
        settings: fields of ``TrainConfig`` (``epochs=3``), ``DeviceOptions`` (``devices="cpu:2"``)
            and ``KeptOptions`` (``restart=True``), or ``hosts="a,b:0-3"``.

    Returns:
        The folder and the results; none where it was asked to end, and has saved: then the exit
        code is 75, or 130 after Ctrl-C and `muster cancel`. Inside a launcher (torchrun,
        ``muster run``) this process is taken as one of its ranks.

    Raises:
        UsageError, TargetError: the call or the task is wrong. PlanMismatchError: the folder holds
        another training, or one of another code. MusterError: the training failed.
    """
    refuse_while_imported("muster.fit")
    how = {name: settings.pop(name) for name in _FOR_RANKS & settings.keys()}
    if "log_to" in how:
        how["log_to"] = as_trackers(how["log_to"])
    if config is not None and settings:
        raise UsageError("fit takes a whole config or single settings, not both.")
    kind, made = _task_of(task)
    wanted = config or TrainConfig.of(kind.defaults, **settings)
    place = None if run_dir is None else Path(run_dir)
    options = GangOptions(max_restarts=3, run_dir=place, **how)
    values = _fields_of(made)
    job = job_of_target(
        str(ref_of(kind)), values, wanted, checkpoint_s=checkpoint_interval_s, run_dir=place
    )
    topology = read_topology()
    if topology is not None:
        return train_here(job, topology, say, options, task=made)
    plan = None if options.hosts is not None else plan_training(job, options)

    def hear(rank: int, line: str) -> None:
        if rank == 0:
            say(line)

    with in_task():
        if isinstance(plan, GangPlan) and [slot.kind for slot in plan.slots] == ["cpu"]:
            return train_here(job, None, say, options, task=made, slot="cpu")
        done = run_training(job, options, GangAudience(hear=hear, say=say, warn=say))
    if done.exit_code != EXIT_OK and done.ending is not None and done.ending.report:
        raise MusterError("\n".join(done.ending.report))
    return done


def train_here(
    job: TrainJob,
    topology: Topology | None,
    say: Callable[[str], None] = print,
    options: GangOptions | None = None,
    *,
    task: Any = None,
    slot: SlotKind | None = None,
) -> Trained:
    """Be one rank of a gang that another launcher has started, or the only one.

    ``task``: the task that the job names, if it is made already; ``slot``: what the job was placed
    on. Raises what ``fit`` raises.
    """
    options = options or GangOptions()
    options.refuse_watching("this process was not started by Muster's launcher", "drop it.")
    check_installed(options.log_to)
    check_job(job, options)
    folder = job.folder
    if options.restart and topology is not None:
        raise UsageError(
            f"--restart has no place inside {topology.launcher}, which may start this program "
            "again and again: each time the training would begin anew.",
            hint="choose another --run-dir, or move the old one aside first.",
        )
    from muster.rank.life import StopFlag, live

    what: Trainable = import_module(ENTRIES[type(job.config)]).TRAINABLE
    if task is None:
        task = what.make(job.target, job.settings, job.values)
    train = partial(
        live, what, task, job.config, folder,
        topology, say, checkpoint_s=job.checkpoint_s, checkpoint_steps=job.checkpoint_steps,
        code=job.code, allow_changed_code=options.allow_changed_code, slot=slot,
    )  # fmt: skip
    if topology is not None and topology.rank > 0:
        stop = StopFlag()
        code = _code(train(stop=stop), stop)
        return Trained(folder=folder, exit_code=code, ending=None, results=None)
    if options.restart:
        move_aside(folder, job.kind, say)
    renew = job.work().renewal(GangOptions(), ())
    with open_run(folder, renew, node=0) as session:
        num_ranks = 1 if topology is None else topology.world_size
        session.begin(ranks=[f"rank {rank}" for rank in range(num_ranks)])
        stop = StopFlag(session.is_cancelled, is_callers=topology is None)
        with tracking(folder, options.log_to, say):
            results = train(stop=stop)
            by = {"stopped_by": stop.name} if results is None else {}
            session.end(exit_code=_code(results, stop), **by)
    tell_task(results)
    code = _code(results, stop)
    return Trained(folder=folder, exit_code=code, ending=None, results=results)


def _code(results: Results | None, stop: StopFlag) -> int:
    """A training that was asked to stop has no results and must not be taken for a finished one."""
    return EXIT_OK if results is not None else stop_code(getattr(signal, stop.name, 0))


def _task_of(task: Any) -> tuple[Any, Any]:
    if isinstance(task, str):
        from muster.train.task import find_task_class, make_task

        return find_task_class(task), make_task(task, None, {})
    if isinstance(task, type):
        return task, task()
    return type(task), task


def _fields_of(task: Any) -> dict[str, Any]:
    if not dataclasses.is_dataclass(task):
        return {}
    return {field.name: getattr(task, field.name) for field in dataclasses.fields(task)}
