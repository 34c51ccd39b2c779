"""A semi-supervised VAE as a careful author writes it by hand, for benchmarks/ssvae_ensemble.py.

Modules, a DataLoader, Adam, one model in one process: the model, objective and schedule of the
recipe `ssvae`, with the sum over the classes as one expanded batch. Nothing of the recipe but its
data and its choice of labels is used.

python plain_ssvae.py tasks.json results.json
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from muster_recipes.ssvae.labels import choose_labels
from muster_recipes.ssvae.pool import load

CLASSES = 10


class Ssvae(nn.Module):
    def __init__(self, pixels: int, style: int, hidden: int = 256) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(pixels, hidden), nn.ReLU())
        self.classifier = nn.Linear(hidden, CLASSES)
        self.mean = nn.Linear(CLASSES + hidden, style)
        self.log_std = nn.Linear(CLASSES + hidden, style)
        self.decoder = nn.Sequential(
            nn.Linear(CLASSES + style, hidden), nn.ReLU(), nn.Linear(hidden, pixels)
        )

    def bounds(self, x: Tensor, hidden: Tensor, samples: int) -> Tensor:
        """[B, C]: of every class."""
        size = len(x)
        y = torch.eye(CLASSES).expand(size, -1, -1)
        given = torch.cat([y, hidden.unsqueeze(1).expand(-1, CLASSES, -1)], -1)
        mean, log_std = self.mean(given), self.log_std(given)
        eps = torch.randn(samples, size, 1, mean.shape[-1])
        z = mean + log_std.exp() * eps
        logits = self.decoder(torch.cat([y.expand(samples, -1, -1, -1), z], -1))
        target = x.unsqueeze(1).expand_as(logits)
        log_p = -F.binary_cross_entropy_with_logits(logits, target, reduction="none").sum(-1)
        ratio = (0.5 * (eps.square() - z.square()) + log_std).sum(-1)
        return (log_p + ratio).mean(0) - math.log(CLASSES)

    def objective(
        self, x: Tensor, label: Tensor, is_labelled: Tensor, alpha: float, samples: int
    ) -> Tensor:
        hidden = self.encoder(x)
        log_q = F.log_softmax(self.classifier(hidden), -1)
        bounds = self.bounds(x, hidden, samples)
        index = label.unsqueeze(1)
        labelled = bounds.gather(1, index) + alpha * log_q.gather(1, index)
        unlabelled = (log_q.exp() * (bounds - log_q)).sum(-1)
        return torch.where(is_labelled, labelled.squeeze(1), unlabelled).mean()


def train(task: dict) -> dict[str, float]:
    torch.manual_seed(task["seed"])
    pool = load(task["dataset"], None, task["split_seed"])
    x, true = pool["train"].x, pool["train"].labels
    chosen = choose_labels(true, task["n_labels"], task["corruption_rate"], task["seed"])
    label, is_labelled = torch.zeros_like(true), torch.zeros(len(x), dtype=torch.bool)
    label[chosen.index], is_labelled[chosen.index] = chosen.given, True
    loader = DataLoader(
        TensorDataset(x, label, is_labelled), batch_size=task["batch_size"], shuffle=True
    )
    model = Ssvae(x.shape[1], task["num_style"])
    optimizer = torch.optim.Adam(model.parameters(), lr=task["lr"])
    for _ in range(task["num_epochs"]):
        for batch in loader:
            optimizer.zero_grad()
            (-model.objective(*batch, task["alpha"], task["num_samples"])).backward()
            optimizer.step()
    with torch.no_grad():
        images, labels = pool["test"].x, pool["test"].labels
        guess = model.classifier(model.encoder(images)).argmax(-1)
    return {"accuracy": float((guess == labels).double().mean())}


if __name__ == "__main__":
    tasks = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps([train(task) for task in tasks]))
