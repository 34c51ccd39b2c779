"""A small GPT that learns to write sums, such as 17+25=042, letter by letter."""

from dataclasses import dataclass

import torch
from torch import nn

import muster

LETTERS = "0123456789+=\n"


def sums(split):
    """The 10,000 sums of two numbers below 100; every tenth validates and tests."""
    numbers = [n for n in range(10_000) if (n % 10 == 7) == (split != "train")]
    texts = [f"{n // 100:02d}+{n % 100:02d}={n // 100 + n % 100:03d}\n" for n in numbers]
    return torch.tensor([[LETTERS.index(letter) for letter in text] for text in texts])


class GPT(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.token = nn.Embedding(len(LETTERS), width)
        self.place = nn.Embedding(16, width)
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(block, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, len(LETTERS))

    def forward(self, tokens):
        x = self.token(tokens) + self.place.weight[: tokens.shape[1]]
        mask = torch.full((x.shape[1], x.shape[1]), -torch.inf, device=x.device).triu(1)
        return self.head(self.blocks(x, mask=mask, is_causal=True))


@dataclass
class NanoGPT(muster.Task):
    """Sums, letter by letter."""

    width: int = 64
    depth: int = 2
    defaults = {"epochs": 3, "batch_size": 64, "base_lr": 2e-3}
    monitor, better = "right", "higher"

    def model(self):
        return GPT(self.width, self.depth)

    def dataset(self, split):
        return sums(split)

    def loss(self, model, batch):
        # The sum alone: what comes before it is chance.
        logits = model(batch[:, :-1]).mT[:, :, 5:]
        return nn.functional.cross_entropy(logits, batch[:, 6:], reduction="none").mean(1)

    def score(self, model, batch):
        guess = model(batch[:, :-1]).argmax(2)[:, 5:]
        return {"right": (guess == batch[:, 6:]).all(1).float()}
