"""A model and an agent that say in files how far they are."""

import phases
import torch
from torch import nn
from torch.utils.data import TensorDataset

import muster
from muster.agents import (
    AgentTask,
    BatchedEnv,
    Change,
    Discrete,
    Entry,
    EnvSpec,
    RecurrentPolicy,
)


class Model(muster.Task):
    defaults = {"batch_size": 8, "epochs": 3, "eval_frequency": 1}

    def model(self):
        self.calls = 0
        return nn.Linear(4, 1)

    def dataset(self, split):
        x = torch.randn(64, 4)
        return TensorDataset(x, x.sum(1)) if split == "train" else None

    def loss(self, model, batch):
        self.calls += 1
        if self.calls == 10:
            phases.tell_of_request()
            phases.reach("middle")
        return (model(batch[0])[:, 0] - batch[1]).square()

    def score(self, model, batch):
        return {"loss": (model(batch[0])[:, 0] - batch[1]).square()}

    def finish(self, model, folder):
        phases.finish()


class Steps(BatchedEnv):
    def __init__(self, place):
        seen = {"observation": Entry((1,))}
        spec = EnvSpec(name="steps", num_envs=place.num_envs, actions=Discrete(2), observation=seen)
        super().__init__(spec, place)
        self.num_steps = 0

    def fresh(self):
        return {"left": torch.full_like(self.index, 5)}

    def observe(self):
        return {"observation": self.rows["left"][:, None].float()}

    def advance(self, actions):
        left = self.rows["left"] - 1
        self.num_steps += 1
        if self.num_steps == 60:  # more than a rehearsal makes
            phases.tell_of_request()
            phases.reach("middle")
        self.rows = {"left": left}
        over = left == 0
        return Change(actions.float(), over, torch.zeros_like(over), {})


class Agent(AgentTask):
    defaults = {"num_envs": 2, "rollout_steps": 16, "batch_size": 2, "num_steps": 160}

    def environments(self, split, place):
        return Steps(place)

    def policy(self, spec):
        return RecurrentPolicy(spec, hidden=8, layers=(8,))

    def finish(self, policy, device, seed, figures):
        phases.finish()
