"""Training as a textbook has it: one process, whole batches, no part of the package's loop.

Only the meaning of a seed (initial weights, order of the samples) is taken from the package.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from muster.rank.seeding import MODEL, DataOrder, mix, seed_everything
from muster.train.task import Loss, Task


@dataclass(frozen=True, kw_only=True)
class Plain:
    """``losses``: mean per step; ``seen``: samples per step; ``lrs``: learning rate per step."""

    losses: list[float]
    seen: list[list[int]]
    lrs: list[float]
    norms: list[float]
    model: torch.nn.Module


def train_plainly(
    task: Task,
    *,
    global_batch: int,
    epochs: int,
    lr: float = 1e-3,
    weight_decay: float = 1e-4,
    warmup_epochs: float = 0.0,
    min_lr: float = 1e-6,
    max_grad_norm: float | None = None,
    seed: int = 0,
) -> Plain:
    seed_everything(mix(seed, MODEL))
    model = task.model()
    data: Any = task.dataset("train")
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=weight_decay)
    if type(task).optimizer is not Task.optimizer:
        optimizer = task.optimizer(model, lr, weight_decay)
    per_epoch = math.ceil(len(data) / global_batch)
    warmup, total = round(warmup_epochs * per_epoch), per_epoch * epochs
    losses, seen, lrs, norms = [], [], [], []
    for epoch in range(epochs):
        order = DataOrder(len(data), seed).indices(epoch, 0, len(data))
        for step in range(per_epoch):
            now = epoch * per_epoch + step
            rate = lr * (now + 1) / (warmup + 1)
            if now >= warmup:
                turn = math.pi * (now - warmup) / (total - warmup)
                rate = min_lr + (lr - min_lr) * (1 + math.cos(turn)) / 2
            chosen = order[step * global_batch : (step + 1) * global_batch]
            samples = [data[index] for index in chosen]
            batch = task.collate([sample for sample in samples if sample is not None])
            raw = task.loss(model, batch)
            loss = raw.total / raw.weight if isinstance(raw, Loss) else raw.mean()
            optimizer.zero_grad()
            loss.backward()
            if max_grad_norm is not None:
                norms.append(
                    float(torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm))
                )
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            losses.append(float(loss.detach()))
            seen.append(chosen)
            lrs.append(rate)
    return Plain(losses=losses, seen=seen, lrs=lrs, norms=norms, model=model)
