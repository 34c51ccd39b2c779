"""Trains on a million items up to a step, or goes on from there and says when the batch came.

    python million.py FOLDER --until 100           # save at step 100 of 1,000 and end
    python million.py FOLDER --until 100 --probe   # go on from there

The seconds are those from the call to the first batch of the training proper.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

import muster
from muster.run.folder import RunFolder
from muster.train.config import TrainConfig
from muster.train.loop import train

ITEMS, BATCH = 1_000_000, 1_000


class Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> int:
        return index

    def __getitems__(self, indices: Sequence[int]) -> list[int]:
        return list(indices)


class Counting(muster.Task):
    """``first_s``: when the first batch of the training proper came (perf_counter)."""

    first_s = 0.0

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def dataset(self, split: muster.Split) -> Dataset[Any] | None:
        return Numbers() if split == "train" else None

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if len(batch) == BATCH and not self.first_s:
            self.first_s = time.perf_counter()
        return (model(batch[:, None] * 1e-6) ** 2).squeeze(1)

    def score(self, model: nn.Module, batch: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.loss(model, batch)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--until", type=int, required=True)
    parser.add_argument("--probe", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    folder = RunFolder(args.folder)
    folder.create()
    last = args.until + 1 if args.probe else args.until
    config = TrainConfig.of(
        {"epochs": 2, "global_batch": BATCH, "lr": 1e-3, "schedule": "constant",
         "eval_frequency": 0, "tensorboard": False, "max_steps": last}
    )  # fmt: skip
    task = Counting()
    began = time.perf_counter()
    train(task, config, folder, None, lambda _: None, checkpoint_s=None)
    print(json.dumps({"first_batch_s": task.first_s - began}))


if __name__ == "__main__":
    main()
