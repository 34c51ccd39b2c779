"""The same training by a loop of one's own, by Accelerate and by Lightning, as users write it.

python -m acceptance.programs.peers raw|accelerate|lightning Gpt|Mlp BATCH STEPS cpu|cuda
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from acceptance.programs.tasks import Gpt, Mlp


def _optimizer(model: nn.Module, device: str) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device == "cuda" or None)


def _loader(task: Gpt, batch_size: int, device: str) -> DataLoader[Any]:
    data = task.dataset("train")
    assert data is not None
    return DataLoader(data, batch_size, shuffle=True, pin_memory=device == "cuda")


def raw(task: Gpt, batch_size: int, num_steps: int, device: str) -> None:
    """As a textbook has it: one loop, the same optimizer and precision."""
    torch.manual_seed(0)
    model = task.model().to(device)
    optimizer, steps = _optimizer(model, device), 0
    while True:
        for batch in _loader(task, batch_size, device):
            moved = [part.to(device, non_blocking=True) for part in batch]
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
                loss = task.loss(model, moved).mean()
            loss.backward()
            optimizer.step()
            steps += 1
            if steps == num_steps:
                return


def accelerate(task: Gpt, batch_size: int, num_steps: int, device: str) -> None:
    """As in Accelerate's quick tour."""
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    set_seed(0)
    is_card = device == "cuda"
    accelerator = Accelerator(cpu=not is_card, mixed_precision="bf16" if is_card else "no")
    model = task.model()
    model, optimizer, loader = accelerator.prepare(
        model, _optimizer(model, device), _loader(task, batch_size, device)
    )
    steps = 0
    while True:
        for batch in loader:
            optimizer.zero_grad()
            with accelerator.autocast():
                loss = task.loss(model, batch).mean()
            accelerator.backward(loss)
            optimizer.step()
            steps += 1
            if steps == num_steps:
                return


def lightning(task: Gpt, batch_size: int, num_steps: int, device: str) -> None:
    """A LightningModule and a Trainer without what can be switched off."""
    import lightning as package

    class Module(package.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = task.model()

        def training_step(self, batch: Any, _: int) -> Tensor:
            return task.loss(self.net, batch).mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return _optimizer(self.net, device)

    package.seed_everything(0, verbose=False)
    is_card = device == "cuda"
    trainer = package.Trainer(
        accelerator="gpu" if is_card else "cpu", devices=1, max_steps=num_steps, max_epochs=-1,
        precision="bf16-mixed" if is_card else "32-true", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), _loader(task, batch_size, device))


if __name__ == "__main__":
    _, way, kind, batch_size, num_steps, device = sys.argv
    made = {"Gpt": Gpt, "Mlp": Mlp}[kind](small=device == "cpu")
    run = {"raw": raw, "accelerate": accelerate, "lightning": lightning}[way]
    run(made, int(batch_size), int(num_steps), device)
