import os
import signal
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import TensorDataset

import muster


@dataclass
class Curve(muster.Task):
    dropout: float = 0.0
    double: bool = True
    hungry_mib: int = 0

    def model(self):
        self.count = 0
        kind = torch.float64 if self.double else torch.float32
        return nn.Sequential(
            nn.Linear(8, 64, dtype=kind),
            nn.Tanh(),
            nn.Dropout(self.dropout),
            nn.Linear(64, 1, dtype=kind),
        )

    def dataset(self, split):
        if split == "test":
            return None
        stream = torch.Generator().manual_seed(len(split))
        x = torch.randn(200, 8, generator=stream, dtype=torch.float64)
        x = x if self.double else x.float()
        return TensorDataset(x, torch.sin(x.sum(1)))

    def loss(self, model, batch):
        x, y = batch
        if model.training:
            self.count += 1
            # Not a field: that would make it another training.
            if self.count == int(os.environ.get("STOP_AT", "0")):
                os.kill(os.getpid(), signal.SIGTERM)
        if self.hungry_mib:  # memory in proportion to the samples
            torch.empty(len(x), self.hungry_mib << 20, dtype=torch.uint8, device=x.device)
        return (model(x)[:, 0] - y).square()

    def score(self, model, batch):
        x, y = batch
        return {"loss": (model(x)[:, 0] - y).square()}
