"""Record the learning curves of a whole grid on the digits: 81 settings for 27 epochs.

    python benchmarks/record_digits_grid.py tests/fixtures/digits_grid.json

All 81 networks (one hidden layer) are trained side by side, as one batch of matrices. The tests of
early stopping run on these curves, which hold how many of the validation images were right.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import torch

from muster_recipes.digits.files import NUM_CLASSES
from muster_recipes.digits.images import embedded_digits, split

EPOCHS = 27
BATCH = 64
GRID = {
    "lr": [0.0003, 0.01, 0.3],
    "momentum": [0.0, 0.7, 0.95],
    "width": [4, 10, 24],
    "weight_decay": [0.0, 0.003, 0.1],
}


def main(target: Path) -> None:
    settings = [
        dict(zip(GRID, values, strict=True)) for values in itertools.product(*GRID.values())
    ]
    rest, held = split(embedded_digits(), 0.2, 0)
    inputs, val = rest.pixels.flatten(1) / 16, held.pixels.flatten(1) / 16
    stream = torch.Generator().manual_seed(0)
    lr, momentum, decay = (
        torch.tensor([s[name] for s in settings])[:, None, None]
        for name in ("lr", "momentum", "weight_decay")
    )
    most = max(GRID["width"])
    widths = torch.tensor([s["width"] for s in settings])
    mask = (torch.arange(most) < widths[:, None]).float()[:, None]
    shapes = ((65, most), (most + 1, NUM_CLASSES))
    weights = [torch.randn(len(settings), *s, generator=stream) * s[0] ** -0.5 for s in shapes]
    speed = [torch.zeros_like(w) for w in weights]

    def forward(x: torch.Tensor) -> torch.Tensor:
        ones = torch.ones(len(settings), x.shape[-2], 1)
        hidden = torch.relu(torch.cat([x.expand(len(settings), -1, -1), ones], 2) @ weights[0])
        return torch.cat([hidden * mask, ones], 2) @ weights[1]

    curves: list[list[int]] = [[] for _ in settings]
    for epoch in range(EPOCHS):
        for chosen in torch.randperm(len(inputs), generator=stream).split(BATCH):
            for weight in weights:
                weight.requires_grad_()
            logits = forward(inputs[chosen])
            labels = rest.labels[chosen].expand(len(settings), -1)
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), labels.flatten(), reduction="none"
            )
            gradients = torch.autograd.grad(loss.view(len(settings), -1).mean(1).sum(), weights)
            for at, gradient in enumerate(gradients):
                weight = weights[at].detach()
                speed[at] = momentum * speed[at] + gradient + decay * weight
                weights[at] = weight - lr * speed[at]
        with torch.no_grad():
            right = (forward(val).argmax(2) == held.labels).sum(1)
        for curve, count in zip(curves, right.tolist(), strict=True):
            curve.append(count)
        print(epoch, int(right.max()), flush=True)
    record = {"images": len(held.labels), "settings": settings, "right": curves}
    target.write_text(json.dumps(record, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
