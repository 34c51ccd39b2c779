"""What a rank of ``muster train`` does when it trains an agent."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from muster.gang.topology import Topology
from muster.rank.life import Results, Start, be_rank, live, memory_explained
from muster.rank.record import open_record
from muster.rl.config import PpoConfig
from muster.rl.loop import AgentTrainer
from muster.rl.reporting import AgentReporter
from muster.rl.setup import prepare
from muster.rl.task import AgentTask, make_agent_task
from muster.rl.update import no_room_error
from muster.run.folder import RunFolder


def run_rank(**params: Any) -> None:
    """One rank of a training, as the launcher starts it; see ``rank.life.be_rank``."""
    be_rank(make_agent_task, PpoConfig, train_agent, **params)


def train_agent(
    task: AgentTask,
    config: PpoConfig,
    folder: RunFolder,
    topology: Topology | None,
    say: Callable[[str], None],
    **how: Any,
) -> Results | None:
    """Train in this process as one rank (``how``: see ``rank.life.live``).

    Returns the results, or None when it was asked to stop.
    """
    return live(partial(_begin, task, config), folder, topology, say, **how)


def _begin(task: AgentTask, config: PpoConfig, start: Start) -> AgentTrainer:
    with memory_explained(partial(no_room_error, config, start.gang.device)):
        run = prepare(task, config, start)
    record = open_record(
        start.gang, start.folder, run.progress.steps, start.say, with_tensorboard=config.tensorboard
    )
    return AgentTrainer(run, AgentReporter(record, start.say))
