"""A LightningModule and a Trainer, as they run under torchrun."""

import os
import warnings

warnings.filterwarnings("ignore")

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import muster


class Spiral(L.LightningModule):
    """Which arm of a spiral a point is on."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
        self.head = nn.Linear(32, 2)

    def training_step(self, batch, index):
        points, arms = batch
        loss = nn.functional.cross_entropy(self.head(self.net(points)), arms)
        muster.log(self.global_step, loss=loss.detach())
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


L.seed_everything(0, verbose=False)
arm = torch.arange(1024) % 2
far = torch.rand(1024)
turn = 6 * far + 3.1416 * arm + 0.1 * torch.randn(1024)
points = torch.stack([far * turn.cos(), far * turn.sin()], 1)
trainer = L.Trainer(
    accelerator="auto" if torch.cuda.is_available() else "cpu",
    devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),  # as many as ranks were started
    strategy="ddp",
    max_epochs=8,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
model = Spiral()
trainer.fit(model, DataLoader(TensorDataset(points, arm), batch_size=64, shuffle=True))
weights = trainer.strategy.all_gather(model.head.weight.detach())
assert torch.equal(weights[0], weights[-1]), "the ranks have different weights"
print(f"lightning: rank {trainer.global_rank} of {trainer.world_size}")
