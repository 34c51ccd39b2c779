"""What a recipe needs to train an agent with recurrent PPO; see docs/ppo.md.

class MyAgent(AgentTask):
    def environments(self, split, place): return MyEnv(place)
    def policy(self, spec): return RecurrentPolicy(spec)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from muster.rank.freed_memory import bytes_to_keep
from muster.rl import streams
from muster.rl.distributions import distribution, draw
from muster.rl.environment import (
    ACTION_MASK,
    BatchedEnv,
    Change,
    Continuous,
    Discrete,
    Entry,
    EnvSpec,
    Observation,
    Outcome,
    Place,
    Split,
    VectorEnv,
)
from muster.rl.evaluation import Episodes, play, summary
from muster.rl.policy import (
    ActorCritic,
    Policy,
    PolicyOutput,
    RecurrentPolicy,
    State,
    orthogonal_lstm,
)
from muster.rl.sequences import SequencePlan, lstm_outputs, plan_sequences, run_lstm, step_lstm
from muster.rl.statistics import Interval, Normaliser, interval, median_interval
from muster.rl.task import AgentTask

if TYPE_CHECKING:
    from muster.rl.gymnasium_envs import EnvFace as EnvFace
    from muster.rl.gymnasium_envs import Maker as Maker
    from muster.rl.gymnasium_envs import VectorEnvFace as VectorEnvFace
    from muster.rl.gymnasium_envs import make_gymnasium as make_gymnasium
    from muster.rl.gymnasium_vector import GymnasiumEnvs as GymnasiumEnvs

#: Imported on first use: they need Gymnasium.
_WITH_GYMNASIUM = {
    "EnvFace": "muster.rl.gymnasium_envs",
    "GymnasiumEnvs": "muster.rl.gymnasium_vector",
    "Maker": "muster.rl.gymnasium_envs",
    "VectorEnvFace": "muster.rl.gymnasium_envs",
    "make_gymnasium": "muster.rl.gymnasium_envs",
}

__all__ = [
    "ACTION_MASK",
    "ActorCritic",
    "AgentTask",
    "BatchedEnv",
    "Change",
    "Continuous",
    "Discrete",
    "Entry",
    "EnvFace",
    "EnvSpec",
    "Episodes",
    "GymnasiumEnvs",
    "Interval",
    "Maker",
    "Normaliser",
    "Observation",
    "Outcome",
    "Place",
    "Policy",
    "PolicyOutput",
    "RecurrentPolicy",
    "SequencePlan",
    "Split",
    "State",
    "VectorEnv",
    "VectorEnvFace",
    "bytes_to_keep",
    "distribution",
    "draw",
    "interval",
    "lstm_outputs",
    "make_gymnasium",
    "median_interval",
    "orthogonal_lstm",
    "plan_sequences",
    "play",
    "run_lstm",
    "step_lstm",
    "streams",
    "summary",
]


def __getattr__(name: str) -> Any:
    try:
        module = _WITH_GYMNASIUM[name]
    except KeyError:
        raise AttributeError(f"module 'muster.agents' has no attribute {name!r}") from None
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_WITH_GYMNASIUM])
