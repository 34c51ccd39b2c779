"""A training with shuffling, dropout and random augmentation that may be killed in mid-epoch.

    NOTE=FILE KILL_AFTER=73 muster train augmented.py:Augmented …
    NOTE=FILE KILL_AFTER=73 python augmented.py lightning|accelerate FOLDER

Each uses what its documentation says about checkpoints in the middle of an epoch. NOTE gets a line
with the samples of every batch that was trained on, and at the end a digest of the weights; after
KILL_AFTER lines (0: never) the process kills itself with -9.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import muster

SAMPLES, BATCH, EPOCHS, WIDTH, SAVE_EVERY = 1280, 32, 3, 32, 10
STEPS_PER_EPOCH = SAMPLES // BATCH


class Noisy(Dataset[Any]):
    """Sample ``index`` with fresh noise, its target and its number."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self._x = torch.randn(SAMPLES, WIDTH, generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        x = self._x[index]
        return x + 0.1 * torch.randn(WIDTH), x.sum(), index


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 1))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def digest(model: nn.Module) -> str:
    total = hashlib.sha256()
    for _, tensor in sorted(model.state_dict().items()):
        total.update(tensor.detach().contiguous().numpy().tobytes())
    return total.hexdigest()


class Notes:
    """Lines are on the disk (of a process that dies) before the next batch is asked for."""

    def __init__(self) -> None:
        self._path = Path(os.environ["NOTE"])
        self._kill_after = int(os.environ["KILL_AFTER"])
        self._count = 0

    def trained(self, indices: torch.Tensor) -> None:
        """One batch more; the process dies in it when it was the last that it was allowed."""
        with self._path.open("a") as file:
            file.write(json.dumps({"batch": indices.tolist()}) + "\n")
        self._count += 1
        if self._count == self._kill_after:
            os.kill(os.getpid(), signal.SIGKILL)

    def finished(self, model: nn.Module) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"digest": digest(model)}) + "\n")


class Augmented(muster.Task):
    def __init__(self) -> None:
        self._notes = Notes()

    def model(self) -> nn.Module:
        return make_model()

    def dataset(self, split: muster.Split) -> Dataset[Any] | None:
        return Noisy() if split == "train" else None

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        x, y, indices = batch
        losses = (model(x).squeeze(1) - y) ** 2
        if len(indices) == BATCH:  # the rehearsal before the first step has two samples
            self._notes.trained(indices)
        return losses

    def score(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        return {"loss": (model(batch[0]).squeeze(1) - batch[1]) ** 2}

    def finish(self, model: nn.Module, folder: str) -> None:
        self._notes.finished(model)


def train_lightning(folder: Path, notes: Notes) -> None:
    """ModelCheckpoint every few steps; ``ckpt_path="last"`` to go on."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_model()

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            x, y, indices = batch
            loss = ((self.net(x).squeeze(1) - y) ** 2).mean()
            notes.trained(indices)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return make_optimizer(self)

    lightning.seed_everything(0, workers=True)
    module = Module()
    saving = ModelCheckpoint(folder, every_n_train_steps=SAVE_EVERY, save_top_k=-1, save_last=True)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=EPOCHS,
        callbacks=[saving],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(Noisy(), BATCH, shuffle=True)
    is_resumed = (folder / "last.ckpt").exists()
    trainer.fit(
        module, loader, ckpt_path=str(folder / "last.ckpt") if is_resumed else None,
        weights_only=False,
    )  # fmt: skip
    notes.finished(module.net)


def train_accelerate(folder: Path, notes: Notes) -> None:
    """``save_state`` every few steps; ``load_state`` and ``skip_first_batches`` to go on."""
    from accelerate import Accelerator, DataLoaderConfiguration
    from accelerate.utils import ProjectConfiguration, set_seed

    set_seed(0)
    accelerator = Accelerator(
        cpu=True,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
        project_config=ProjectConfiguration(
            project_dir=str(folder), automatic_checkpoint_naming=True
        ),
    )
    model = make_model()
    loader = DataLoader(Noisy(), BATCH, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, make_optimizer(model), loader)
    steps_done = 0
    saved = folder / "checkpoints"
    if saved.exists():
        accelerator.load_state()
        steps_done = SAVE_EVERY * len(list(saved.iterdir()))
        accelerator.project_configuration.iteration = len(list(saved.iterdir()))
    for epoch in range(steps_done // STEPS_PER_EPOCH, EPOCHS):
        loader.set_epoch(epoch)
        skipped = max(0, steps_done - epoch * STEPS_PER_EPOCH)
        batches = accelerator.skip_first_batches(loader, skipped) if skipped else loader
        for number, (x, y, indices) in enumerate(batches, skipped):
            loss = ((model(x).squeeze(1) - y) ** 2).mean()
            notes.trained(indices)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            if (epoch * STEPS_PER_EPOCH + number + 1) % SAVE_EVERY == 0:
                accelerator.save_state()
    notes.finished(accelerator.unwrap_model(model))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("peer", choices=["lightning", "accelerate"])
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    train = {"lightning": train_lightning, "accelerate": train_accelerate}[args.peer]
    train(args.folder, Notes())


if __name__ == "__main__":
    main()
