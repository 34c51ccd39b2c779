"""A network that has seen the digits 0 to 4 learns 5 to 9 from few examples of each."""

import functools

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy


@functools.cache  # a worker runs many tasks, and reads the images once
def images(first, last):
    data = load_digits()
    chosen = (data.target >= first) & (data.target <= last)
    return (
        torch.tensor(data.images[chosen], dtype=torch.float32)[:, None] / 16,
        torch.tensor(data.target[chosen]) - first,
    )


def fit(parts, trunk, head, x, y, steps, lr):
    optimizer = torch.optim.Adam([p for part in parts for p in part.parameters()], lr=lr)
    for _ in range(steps):
        chosen = torch.randint(len(x), (64,))
        optimizer.zero_grad()
        cross_entropy(head(trunk(x[chosen])), y[chosen]).backward()
        optimizer.step()


@functools.cache
def pretrained(seed):
    torch.manual_seed(seed)
    trunk = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten(),
    )  # fmt: skip
    head = nn.Linear(32 * 4 * 4, 5)
    fit([trunk, head], trunk, head, *images(0, 4), steps=150, lr=1e-3)
    return trunk.state_dict(), trunk


def run(shots: int, start: str = "fine-tuned", seed: int = 0):
    """``start``: fine-tuned, frozen (only the last layer learns) or scratch."""
    weights, trunk = pretrained(seed)
    trunk.load_state_dict({name: value.clone() for name, value in weights.items()})
    torch.manual_seed(seed)
    if start == "scratch":
        trunk.apply(lambda part: part.reset_parameters() if hasattr(part, "bias") else None)
    head = nn.Linear(32 * 4 * 4, 5)
    x, y = images(5, 9)
    order = torch.randperm(len(x))
    known = torch.cat([order[y[order] == digit][:shots] for digit in range(5)])
    new = order[~torch.isin(order, known)]
    parts = [head] if start == "frozen" else [trunk, head]
    fit(parts, trunk, head, x[known], y[known], steps=60, lr=1e-3)
    with torch.no_grad():
        return {"accuracy": (head(trunk(x[new])).argmax(1) == y[new]).float().mean().item()}
