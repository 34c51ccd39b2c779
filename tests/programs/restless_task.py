import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

import muster


class Points(Dataset):
    def __init__(self, n):
        self.x = torch.randn(n, 16)  # seeded by muster, the same on all ranks

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        x = self.x[index] + 0.1 * torch.randn(16)  # random augmentation
        return x, self.x[index].sum()


class Restless(muster.Task):
    def model(self):
        Path(os.environ["CHAOS_PIDS"], f"rank-{os.environ.get('RANK', 0)}").write_text(
            str(os.getpid())
        )
        return nn.Sequential(
            nn.Linear(16, 400),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(400, 400),
            nn.ReLU(),
            nn.Linear(400, 1),
        )

    def dataset(self, split):
        return {"train": Points(200), "val": Points(30)}.get(split)

    def loss(self, model, batch):
        time.sleep(0.01)
        if model.training and os.environ.get("RANK", "0") == "0":  # what is done, also in vain
            with Path(os.environ["CHAOS_PIDS"]).with_name("work").open("ab") as work:
                work.write(b".")
        return (model(batch[0])[:, 0] - batch[1]).square()

    def score(self, model, batch):
        return {"loss": self.loss(model, batch)}
