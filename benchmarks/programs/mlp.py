"""One small network on random data, trained by hand, by muster and by the peers.

    muster train mlp.py:Mlp --devices cpu:2 --batch-size 128 --max-steps 100 --clock FILE
    torchrun --nproc-per-node 2 mlp.py raw --steps 100 --clock FILE

The model, the data set, AdamW and its flags, and the plain ``default_collate`` are the same in
all. A hook of torch's own notes the time after every optimizer step, so nobody counts for itself.

With ``--beside N`` the ranks of ``Mlp`` make N steps of the hand-written loop after every N of
muster's, in the same process: both then meet the same machine, whatever else runs on it.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import muster

LR, WEIGHT_DECAY = 1e-3, 1e-4


def make_model(inputs: int, hidden: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, 10),
    )


def make_data(inputs: int, count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(count, inputs, generator=generator),
        torch.randint(0, 10, (count,), generator=generator),
    )


class Items(Dataset[Any]):
    """The same as a data set that can only give one sample at a time."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors = tensors

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return tuple(tensor[index] for tensor in self.tensors)

    def __len__(self) -> int:
        return len(self.tensors[0])


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)


def start_clock(path: str, steps: int) -> None:
    """Note the time, and the CPU time so far, after every optimizer step of rank 0."""
    if not path or os.environ.get("RANK", "0") != "0":
        return
    times: list[tuple[float, float]] = []

    def note(*_: Any) -> None:
        times.append((time.time(), time.process_time()))
        if len(times) == steps:
            Path(path).write_text(json.dumps(times))

    register_optimizer_step_post_hook(note)


def count_turns(path: str, steps: int, num: int, raw: Iterator[None]) -> None:
    """Make ``num`` steps of ``raw`` after every ``num`` of the others, on every rank.

    Rank 0 writes the pairs (theirs, raw's): processor time of all threads and wall time, in
    seconds per step.
    """
    pairs: list[list[float]] = []
    done, begun, is_raw = 0, (0.0, 0.0), False

    def now() -> tuple[float, float]:
        return time.process_time(), time.perf_counter()

    def note(*_: Any) -> None:
        nonlocal done, begun, is_raw
        if is_raw:
            return
        done += 1
        if done % num:
            return
        between = now()
        is_raw = True
        for _ in islice(raw, num):
            pass
        is_raw = False
        ended = now()
        if done > num:  # nobody's first steps
            theirs = [(b - a) / num for a, b in zip(begun, between, strict=True)]
            pairs.append(theirs + [(b - a) / num for a, b in zip(between, ended, strict=True)])
        if done == steps and os.environ.get("RANK", "0") == "0":
            Path(path).write_text(json.dumps(pairs))
        begun = now()

    register_optimizer_step_post_hook(note)


@dataclass
class Mlp(muster.Task):
    inputs: int = 784
    hidden: int = 512
    samples: int = 12_800
    clock: str = ""
    clock_steps: int = 0
    clock_batch: int = 0
    items: bool = False
    own_optimizer: bool = False
    beside: int = 0

    def model(self) -> nn.Module:
        if self.beside:
            raw = raw_steps(self.inputs, self.hidden, self.samples, self.clock_batch)
            count_turns(self.clock, self.clock_steps, self.beside, raw)
        else:
            start_clock(self.clock, self.clock_steps)
        return make_model(self.inputs, self.hidden)

    def dataset(self, split: muster.Split) -> Dataset[Any] | None:
        data: Dataset[Any] = make_data(self.inputs, self.samples)
        if self.items:
            data = Items(*make_data(self.inputs, self.samples).tensors)
        return data if split == "train" else None

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    def optimizer(self, model: nn.Module, lr: float, weight_decay: float) -> torch.optim.Optimizer:
        if self.own_optimizer:
            return super().optimizer(model, lr, weight_decay)
        return make_optimizer(model)

    def score(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")}


def raw_steps(
    inputs: int, hidden: int, samples: int, batch: int, log: Any = None
) -> Iterator[None]:
    """What one writes by hand: DistributedDataParallel, a sampler, a loop. Without an end."""
    is_many = torch.distributed.is_initialized()
    model: nn.Module = make_model(inputs, hidden)
    dataset = make_data(inputs, samples)
    if is_many:
        model = nn.parallel.DistributedDataParallel(model)
    sampler = DistributedSampler(dataset) if is_many else None
    loader = DataLoader(dataset, batch, shuffle=sampler is None, sampler=sampler)
    optimizer = make_optimizer(model)
    step = epoch = 0
    while True:
        if sampler is not None:
            sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            step += 1
            if log is not None:
                log.write(json.dumps({"step": step, "epoch": epoch, "loss": loss.item()}) + "\n")
            yield
        epoch += 1


def train_raw(args: argparse.Namespace, *, is_logging: bool = False) -> None:
    if "RANK" in os.environ:
        torch.distributed.init_process_group("gloo")
    log = (Path(args.clock).with_suffix(".log")).open("w") if is_logging else None
    steps = raw_steps(args.inputs, args.hidden, args.samples, args.batch, log)
    for _ in islice(steps, args.steps):
        pass


def train_accelerate(args: argparse.Namespace) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = make_model(args.inputs, args.hidden)
    loader = DataLoader(make_data(args.inputs, args.samples), args.batch, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, make_optimizer(model), loader)
    step = 0
    while step < args.steps:
        for x, y in loader:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            step += 1
            if step == args.steps:
                break
    accelerator.end_training()


def train_fabric(args: argparse.Namespace) -> None:
    from lightning.fabric import Fabric

    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    fabric = Fabric(accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto")
    fabric.launch()
    model = make_model(args.inputs, args.hidden)
    model, optimizer = fabric.setup(model, make_optimizer(model))
    data = make_data(args.inputs, args.samples)
    loader = fabric.setup_dataloaders(DataLoader(data, args.batch, shuffle=True))
    step = 0
    while step < args.steps:
        for x, y in loader:
            optimizer.zero_grad()
            fabric.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            step += 1
            if step == args.steps:
                break


def train_lightning(args: argparse.Namespace) -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_model(args.inputs, args.hidden)

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return make_optimizer(self)

    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        max_steps=args.steps,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = make_data(args.inputs, args.samples)
    trainer.fit(Module(), DataLoader(data, args.batch, shuffle=True))


def train_hf(args: argparse.Namespace) -> None:
    from torch.utils.data import default_collate
    from transformers import Trainer, TrainingArguments

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_model(args.inputs, args.hidden)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": nn.functional.cross_entropy(self.net(x), labels)}

    def collate(samples: list[Any]) -> dict[str, torch.Tensor]:
        x, y = default_collate(samples)
        return {"x": x, "labels": y}

    model = Model()
    optimizer = make_optimizer(model)
    options = TrainingArguments(
        output_dir=str(Path(args.clock).parent / "hf"),
        per_device_train_batch_size=args.batch,
        max_steps=args.steps,
        max_grad_norm=0.0,
        use_cpu=True,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
    )
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    Trainer(
        model=model,
        args=options,
        train_dataset=make_data(args.inputs, args.samples),
        data_collator=collate,
        optimizers=(optimizer, constant),
    ).train()


def main() -> None:
    peers = {
        "raw": train_raw,
        "raw-log": lambda args: train_raw(args, is_logging=True),
        "accelerate": train_accelerate,
        "fabric": train_fabric,
        "lightning": train_lightning,
        "hf": train_hf,
    }
    parser = argparse.ArgumentParser()
    parser.add_argument("peer", choices=peers)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--inputs", type=int, default=784)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--samples", type=int, default=12_800)
    parser.add_argument("--clock", default="")
    args = parser.parse_args()
    torch.manual_seed(0)
    start_clock(args.clock, args.steps)
    peers[args.peer](args)
    if torch.distributed.is_initialized():
        # Not all peers leave together; gloo aborts in a rank whose peer has gone.
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
