import os
from pathlib import Path

import torch

from muster.agents import (
    AgentTask,
    BatchedEnv,
    Change,
    Discrete,
    Entry,
    EnvSpec,
    RecurrentPolicy,
    streams,
)


class Recall(BatchedEnv):
    """A bit is shown once and asked for at the end of an episode of random length."""

    def __init__(self, place):
        seen = {"observation": Entry((2,))}
        super().__init__(
            EnvSpec(
                name="recall",
                num_envs=place.num_envs,
                actions=Discrete(2),
                observation=seen,
                extras=("right",),
            ),
            place,
        )

    def fresh(self):
        seed = self.place.seed
        return {
            "bit": streams.integers(seed, 2, self.index, self.episode, 2),
            "left": 3 + streams.integers(seed, 3, self.index, self.episode, 5),
            "first": torch.ones_like(self.index),
        }

    def observe(self):
        shown = (2 * self.rows["bit"] - 1) * self.rows["first"]
        return {"observation": torch.stack([shown, self.rows["left"]], 1).float()}

    def advance(self, actions):
        if self.notes_work:  # what is done, also in vain
            with Path(os.environ["CHAOS_PIDS"]).with_name("work").open("ab") as work:
                work.write(b".")
        left = self.rows["left"] - 1
        over = left == 0
        right = (actions == self.rows["bit"]) & over
        self.rows = {**self.rows, "left": left, "first": torch.zeros_like(left)}
        return Change(right.float(), over, torch.zeros_like(over), {"right": right.float()})


class Recaller(AgentTask):
    defaults = {"num_envs": 8, "rollout_steps": 16, "batch_size": 4}

    def environments(self, split, place):
        made = Recall(place)
        made.notes_work = split == "train" and os.environ.get("RANK", "0") == "0"
        return made

    def policy(self, spec):
        Path(os.environ["CHAOS_PIDS"], f"rank-{os.environ.get('RANK', 0)}").write_text(
            str(os.getpid())
        )
        return RecurrentPolicy(spec, hidden=16, layers=(16,))
