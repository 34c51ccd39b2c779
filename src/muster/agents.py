"""What a recipe needs to train an agent with recurrent PPO; see docs/ppo.md.

class MyAgent(AgentTask):
    def environments(self, split, place): return MyEnv(place)
    def policy(self, spec): return RecurrentPolicy(spec)
"""

from __future__ import annotations

from muster.gang.seeding import mix
from muster.rl import streams
from muster.rl.actor_critic import ActorCritic
from muster.rl.batched import BatchedEnv, Change
from muster.rl.distributions import distribution, draw
from muster.rl.environment import (
    ACTION_MASK,
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
from muster.rl.intervals import Interval, interval, median_interval
from muster.rl.policy import Policy, PolicyOutput, State
from muster.rl.recurrent_policy import RecurrentPolicy
from muster.rl.sequences import SequencePlan, lstm_outputs, plan_sequences, run_lstm, step_lstm
from muster.rl.statistics import Normaliser
from muster.rl.task import AgentTask

__all__ = [
    "ACTION_MASK",
    "ActorCritic",
    "AgentTask",
    "BatchedEnv",
    "Change",
    "Continuous",
    "Discrete",
    "Entry",
    "EnvSpec",
    "Episodes",
    "Interval",
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
    "distribution",
    "draw",
    "interval",
    "lstm_outputs",
    "median_interval",
    "mix",
    "plan_sequences",
    "play",
    "run_lstm",
    "step_lstm",
    "streams",
    "summary",
]
