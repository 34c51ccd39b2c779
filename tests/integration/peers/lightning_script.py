"""A LightningModule and a Trainer, as they run under torchrun."""

import warnings

warnings.filterwarnings("ignore")

import lightning as L  # noqa: E402
import torch  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, index):
        inputs, targets = batch
        return torch.nn.functional.mse_loss(self.layer(inputs), targets)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


L.seed_everything(0)
data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
trainer = L.Trainer(
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    max_epochs=2,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
model = Model()
trainer.fit(model, DataLoader(data, batch_size=8))
weights = trainer.strategy.all_gather(model.layer.weight.detach())
assert weights.shape[0] == 2 and torch.equal(weights[0], weights[1])
print(f"lightning: rank {trainer.global_rank} of {trainer.world_size}")
