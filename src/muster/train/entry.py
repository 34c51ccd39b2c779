"""What a rank of ``muster train`` and of ``muster verify`` does when it trains a model."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from muster.base.codec import decode, write_json
from muster.gang.topology import read_topology
from muster.rank.life import Start, Trainable, be_rank, live, memory_explained, refusals_told
from muster.rank.process_group import joined
from muster.run.folder import RunFolder
from muster.train.config import TrainConfig
from muster.train.diagnose import no_room_error
from muster.train.loop import ModelTrainer
from muster.train.setup import prepare
from muster.train.task import Task, make_task
from muster.train.verify import verify


def _begin(task: Task, config: TrainConfig, start: Start) -> ModelTrainer:
    with memory_explained(partial(no_room_error, start.gang.device)):
        return ModelTrainer(prepare(task, config, start))


TRAINABLE = Trainable(TrainConfig, make_task, _begin)
#: See ``rank.life``: a rank as the launcher starts it, and one in this process.
run_rank, train = partial(be_rank, TRAINABLE), partial(live, TRAINABLE)


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
