import os
import time
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import Dataset

import muster


class Points(Dataset):
    def __init__(self, task):
        self.task, self.x, self.fetched = task, torch.randn(320, 4), 0

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        self.fetched += 1
        if self.task.sleep_after and self.fetched > self.task.sleep_after:
            if os.environ.get("RANK") == "1":
                time.sleep(600)
        return self.x[index], self.x[index].sum()


@dataclass
class Slow(muster.Task):
    pause: float = 0.02
    sleep_after: int = 0
    fail_after: int = 0

    def model(self):
        self.calls = 0
        return nn.Linear(4, 1)

    def dataset(self, split):
        return Points(self) if split == "train" else None

    def loss(self, model, batch):
        # Not a field: that would make it another training.
        time.sleep(0.2 if os.path.exists("slowly") else self.pause)
        self.calls += 1
        if self.fail_after and self.calls > self.fail_after and os.environ.get("RANK") == "1":
            raise KeyError("no such column: heart_rate")
        return (model(batch[0])[:, 0] - batch[1]).square()

    def score(self, model, batch):
        return {"loss": self.loss(model, batch)}
