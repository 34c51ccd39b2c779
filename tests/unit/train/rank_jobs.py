"""Real gloo ranks for tests: one spawn of processes that train many small jobs one by one."""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.connection
import os
import pickle
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.ports import free_port

from muster.rank.record import read_metrics
from muster.rl.config import PpoConfig
from muster.rl.task import AgentTask
from muster.run.folder import RunFolder
from muster.train.config import TrainConfig
from muster.train.task import Task


@dataclass(frozen=True, kw_only=True)
class Job:
    """One start of a training. Jobs of one ``folder`` go on with each other's checkpoints."""

    name: str
    ranks: int
    task: Task | AgentTask
    config: dict[str, Any] = field(default_factory=dict)
    folder: str = ""
    checkpoint_steps: int | None = None
    before: Callable[[Path], None] | None = None

    @property
    def place(self) -> str:
        return self.folder or self.name


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a job came to on one rank.

    ``kinds``: the class of ``error`` and its bases. ``noted``: what the task has put into itself.
    """

    results: dict[str, Any] | None
    error: str | None
    kinds: list[str]
    exit_code: int | None
    trace: str
    said: list[str]
    noted: dict[str, Any]


class Outcomes:
    """All outcomes by job and rank."""

    def __init__(self, root: Path, jobs: Sequence[Job]) -> None:
        self.root = root
        self._jobs = {job.name: job for job in jobs}

    def of(self, name: str, rank: int = 0) -> Outcome:
        path = self.root / f"{name}.{rank}.pickle"
        assert path.exists(), f"{name} had not ended on rank {rank} when time was up"
        outcome: Outcome = pickle.loads(path.read_bytes())
        return outcome

    def folder(self, name: str) -> RunFolder:
        return RunFolder(self.root / self._jobs[name].place)

    def done(self, name: str, rank: int = 0) -> dict[str, Any]:
        outcome = self.of(name, rank)
        assert outcome.error is None, outcome.trace
        assert outcome.results is not None, "it was asked to stop"
        return outcome.results

    def lines(self, name: str, kind: str = "train") -> list[dict[str, Any]]:
        return [line for line in read_metrics(self.folder(name).metrics) if line["kind"] == kind]

    def losses(self, name: str) -> list[float]:
        self.done(name)
        return [line["loss"] for line in self.lines(name)]

    def weights(self, name: str) -> dict[str, Any]:
        """The parameters and buffers at the end, from the last checkpoint."""
        return last_weights(self.folder(name))


def last_weights(folder: RunFolder) -> dict[str, Any]:
    import torch

    from muster.rank.checkpoint_files import find_steps, read_shapes, read_tensors, step_folder

    checkpoint = step_folder(folder.checkpoints, find_steps(folder.checkpoints)[0])
    tensors = {
        name: torch.zeros(shape, dtype=kind)
        for name, (shape, kind) in read_shapes(checkpoint).items()
    }
    read_tensors(checkpoint, tensors, process_group=None)
    return tensors


def run_jobs(root: Path, jobs: Sequence[Job], *, limit_s: float = 300.0) -> Outcomes:
    """Train all ``jobs``, each on its first ranks; returns when all have ended.

    One process imports what ranks need and is then forked into them. ``limit_s``: without a job
    that ended for so long, they hang and are ended. Figures are made and saved, but their files
    are empty: to render them would take as long as many of the trainings.
    """
    mother = multiprocessing.get_context("spawn").Process(
        target=_be_mother, args=(root, list(jobs), limit_s)
    )
    threads = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        mother.start()
    finally:
        if threads is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = threads
    mother.join()
    return Outcomes(root, jobs)


_NEVER_FREED: list[Exception] = []


def _be_mother(root: Path, jobs: list[Job], limit_s: float) -> None:
    import matplotlib.figure
    import torch._dynamo  # noqa: F401  the first step would load it in every rank

    import muster.rl.loop
    import muster.train.loop  # noqa: F401

    matplotlib.figure.Figure.savefig = lambda _, path, **__: Path(path).touch()
    gc.collect()
    gc.freeze()  # or each collection in a rank copies what it shares with the others
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=_be_rank, args=(rank, root, jobs))
        for rank in range(max(job.ranks for job in jobs))
    ]
    for rank in ranks:
        rank.start()
    num_ended, deadline = 0, time.monotonic() + limit_s
    while any(rank.is_alive() for rank in ranks) and time.monotonic() < deadline:
        multiprocessing.connection.wait([r.sentinel for r in ranks if r.is_alive()], 0.5)
        if (ended := len(list(root.glob("*.pickle")))) > num_ended:
            num_ended, deadline = ended, time.monotonic() + limit_s
    for rank in ranks:
        if rank.is_alive():
            rank.kill()
            rank.join()


def _be_rank(rank: int, root: Path, jobs: list[Job]) -> None:
    import faulthandler
    import warnings

    import torch

    # What the suite is started with: a warning is an error, on the ranks too.
    warnings.simplefilter("error")
    faulthandler.enable()
    torch.set_num_threads(1)
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    for job in jobs:
        if rank < job.ranks:
            os.environ.update(
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(job.ranks),
                LOCAL_WORLD_SIZE=str(job.ranks),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=_port(job, rank, root),
            )
            outcome = _train(job, root)
            beside = root / f".{job.name}.{rank}"
            beside.write_bytes(pickle.dumps(outcome))
            beside.rename(root / f"{job.name}.{rank}.pickle")


def _port(job: Job, rank: int, root: Path) -> str:
    """Where the ranks of ``job`` meet: rank 0 looks for it when it is about to listen there, since
    minutes before it another gang may find the same one, and tells the others in a file."""
    told = root / f".{job.name}.port"
    if rank == 0:
        beside = told.with_suffix(".beside")
        beside.write_text(str(free_port()))
        beside.rename(told)
    while not told.exists():
        time.sleep(0.001)
    return told.read_text()


def _train(job: Job, root: Path) -> Outcome:
    from muster.gang.topology import read_topology

    place = RunFolder(root / job.place)
    topology = read_topology()
    assert topology is not None
    if topology.rank == 0:
        place.create()
        if job.before is not None:
            job.before(place.path)
    said: list[str] = []
    results, error, trace = None, None, ""
    kinds: list[str] = []
    exit_code = None
    try:
        results = _trainer(job.task)(
            job.task,
            _config_type(job.task).of(job.task.defaults, **{"tensorboard": False, **job.config}),
            place,
            topology,
            said.append,
            checkpoint_s=None,
            checkpoint_steps=job.checkpoint_steps,
        )
    except Exception as problem:
        error, trace = str(problem), traceback.format_exc()
        kinds = [kind.__name__ for kind in type(problem).__mro__]
        exit_code = getattr(problem, "exit_code", None)
        # Freed here, its frames would end gloo's threads while the interpreter is held, and one of
        # them may wait for it: a rank of a gang leaves without freeing anything.
        _NEVER_FREED.append(problem)
    noted = {k: v for k, v in vars(job.task).items() if isinstance(v, str | int | float)}
    return Outcome(
        results=results,
        error=error,
        kinds=kinds,
        exit_code=exit_code,
        trace=trace,
        said=said,
        noted=noted,
    )


def _trainer(task: Task | AgentTask) -> Callable[..., dict[str, Any] | None]:
    from muster.rl.loop import train_agent
    from muster.train.loop import train

    return train_agent if isinstance(task, AgentTask) else train


def _config_type(task: Task | AgentTask) -> type[TrainConfig] | type[PpoConfig]:
    return PpoConfig if isinstance(task, AgentTask) else TrainConfig
