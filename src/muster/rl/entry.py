"""What a rank of ``muster train`` does when it trains an agent."""

from __future__ import annotations

from functools import partial

from muster.rank.life import Start, Trainable, be_rank, live, memory_explained
from muster.rl.config import PpoConfig
from muster.rl.loop import AgentTrainer
from muster.rl.setup import prepare
from muster.rl.task import AgentTask, make_agent_task
from muster.rl.update import no_room_error


def _begin(task: AgentTask, config: PpoConfig, start: Start) -> AgentTrainer:
    with memory_explained(partial(no_room_error, config, start.gang.device)):
        return AgentTrainer(prepare(task, config, start))


TRAINABLE = Trainable(PpoConfig, make_agent_task, _begin)
#: See ``rank.life``: a rank as the launcher starts it, and one in this process.
run_rank, train_agent = partial(be_rank, TRAINABLE), partial(live, TRAINABLE)
