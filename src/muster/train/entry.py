"""What a rank of ``muster train`` and of ``muster verify`` does when it trains a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from muster.base.codec import decode, write_json
from muster.gang.topology import Topology, read_topology
from muster.rank.life import Results, Start, be_rank, live, memory_explained, refusals_told
from muster.rank.process_group import joined
from muster.rank.record import open_record
from muster.run.folder import RunFolder
from muster.train.config import TrainConfig
from muster.train.diagnose import no_room_error
from muster.train.loop import ModelTrainer
from muster.train.reporting import Reporter
from muster.train.setup import prepare
from muster.train.task import Task, make_task
from muster.train.verify import verify


def run_rank(**params: Any) -> None:
    """One rank of a training, as the launcher starts it; see ``rank.life.be_rank``."""
    be_rank(make_task, TrainConfig, train, **params)


def train(
    task: Task,
    config: TrainConfig,
    folder: RunFolder,
    topology: Topology | None,
    say: Callable[[str], None],
    **how: Any,
) -> Results | None:
    """Train in this process as one rank (``how``: see ``rank.life.live``).

    Returns the results, or None when it was asked to stop.
    """
    return live(partial(_begin, task, config), folder, topology, say, **how)


def _begin(task: Task, config: TrainConfig, start: Start) -> ModelTrainer:
    with memory_explained(partial(no_room_error, start.gang.device)):
        run = prepare(task, config, start)
    record = open_record(
        start.gang, start.folder, run.progress.step, start.say, with_tensorboard=config.tensorboard
    )
    return ModelTrainer(run, Reporter(record, start.say))


def verify_rank(
    *,
    task: str,
    task_config: str | None,
    task_values: Mapping[str, Any],
    config: Mapping[str, Any],
    folder: str,
    **_: Any,
) -> None:
    """One rank of ``muster verify``; rank 0 leaves the findings in the folder."""
    place = RunFolder(Path(folder))
    with refusals_told(place), joined(read_topology()) as gang:
        made = make_task(task, task_config, task_values)
        say = print if gang.is_first else _silent
        findings = verify(made, decode(TrainConfig, config, ignore_unknown=True), gang, say)
        if gang.is_first:
            write_json(place.verify_json, findings)


def _silent(text: str) -> None:
    return
