"""A training that goes wrong in one way, at one step of rank 1, where its other ranks go on."""

import os
import threading
import time
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import TensorDataset

import muster

#: Calls of the loss: a rehearsal makes some, and then every step one for each micro-batch.
AT = 9


class Refuses(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        raise ValueError("there is no such gradient")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)
        self.is_short = False

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        return hidden.sum(1) if self.is_short else self.second(hidden)[:, 0]


@dataclass
class Losing(muster.Task):
    how: str = ""
    holds: bool = False
    """Whether a thread goes on beside it, as those that prefetch or log."""

    def model(self):
        self.made, self.calls = Net(), 0
        return self.made

    def dataset(self, split):
        x = torch.randn(64, 4)
        return TensorDataset(x, x.sum(1)) if split == "train" else None

    def loss(self, model, batch):
        self.calls += 1
        x, y = batch
        is_due = self.calls >= AT and os.environ.get("RANK") == "1"
        how = self.how if is_due else ""
        if how and self.holds:
            threading.Thread(target=time.sleep, args=(600,)).start()
            self.left_open = open("left.txt", "w")
            self.left_open.write("all of it")
        self.made.is_short = how == "unused"
        if how == "raises-deep":
            x = Refuses.apply(x.requires_grad_())
        with torch.set_grad_enabled(how != "no-grad"):
            out = model(x)
        if how == "raises":
            torch.distributed.destroy_process_group = part
            out = Refuses.apply(out)
        if how == "hook":
            out.register_hook(refuse)
        if how == "detached":
            out = out.detach()
        if how == "input-only":
            out = out.detach() + x.requires_grad_().sum(1)
        losses = (out - y).square()
        if how == "nan":
            return losses * float("nan")
        if how.startswith("weight"):
            return muster.Loss(losses.sum(), float(how.partition("=")[2]))
        return {"none": None, "mean": losses.mean(), "number": 0.5}.get(how, losses)

    def score(self, model, batch):
        return {"loss": (model(batch[0]) - batch[1]).square()}


@dataclass
class Skipping(Losing):
    skips_parameters = True


def refuse(gradient):
    raise ValueError("there is no such gradient")


def part(destroy=torch.distributed.destroy_process_group):
    print("the ranks part", flush=True)
    destroy()
