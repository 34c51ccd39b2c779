"""What is trained: a GPT of 124 million parameters and a small perceptron.

Whoever trains them, the time of the same steps is taken, each round between two synchronizes, and
written to the file that CLOCK names.
"""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import muster


class Clock:
    """``tick`` is called at the begin of every step; ROUNDS of STEPS steps are timed after WARM.

    A program that has a place in the folder TURNS waits before each round for its turn, so that
    several are timed in turns on one card; the first SETTLE steps of a round are not counted.
    """

    def __init__(self) -> None:
        warm, self._steps, self._settle, self._rounds = (
            int(os.environ.get(name, "0")) for name in ("WARM", "STEPS", "SETTLE", "ROUNDS")
        )
        self._count = 0
        self._next = warm + 1 if self._rounds else 0  # the step at which something is due
        self._has_turn = "TURNS" not in os.environ
        self._begin_s: float | None = None
        self._seconds: list[float] = []

    def tick(self) -> None:
        self._count += 1
        if self._count != self._next:
            return
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        if self._begin_s is not None:
            self._seconds.append(time.perf_counter() - self._begin_s)
            _write(Path(os.environ["CLOCK"]), json.dumps(self._seconds))
            self._begin_s, self._has_turn = None, "TURNS" not in os.environ
            if len(self._seconds) == self._rounds:
                return
        if self._has_turn:
            self._next += self._steps
            self._begin_s = time.perf_counter()
        else:
            _wait_for_turn(len(self._seconds))
            self._next += self._settle
            self._has_turn = True


def _write(path: Path, text: str) -> None:
    beside = path.with_suffix(".new")
    beside.write_text(text)
    beside.replace(path)


def _wait_for_turn(number: int) -> None:
    folder, name = Path(os.environ["TURNS"]), os.environ["WAY"]
    (folder / f"{name}-ready").touch()
    limit_s = time.monotonic() + 300
    while not (folder / f"{name}-{number}").exists():
        if time.monotonic() > limit_s:
            raise TimeoutError(f"{name} waited 300 s for round {number}")
        time.sleep(0.005)


class Block(nn.Module):
    """A layer of GPT-2."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        parts = self.attention(self.before(x)).view(n, length, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(n, length, width))
        return x + self.down(F.gelu(self.up(self.after(x)), approximate="tanh"))


class GptNet(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, length: int, words: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(self.norm(x))
        return out


@dataclass(kw_only=True)
class Gpt(muster.Task):
    """``small``: in a form for a rehearsal."""

    small: bool = False

    def model(self) -> nn.Module:
        self.clock = Clock()
        return GptNet(2, 32, 2, 16, 64) if self.small else GptNet(12, 768, 12, 1024, 50304)

    def dataset(self, split: str) -> Dataset[Any] | None:
        if split != "train":
            return None
        length, words, count = (16, 64, 64) if self.small else (1024, 50304, 1600)
        stream = torch.Generator().manual_seed(1)
        return TensorDataset(torch.randint(words, (count, length + 1), generator=stream))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if model.training and not self.rehearsing:
            self.clock.tick()
        [tokens] = batch
        out = model(tokens[:, :-1])
        return F.cross_entropy(out.transpose(1, 2), tokens[:, 1:], reduction="none").mean(1)

    def score(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        raise NotImplementedError


@dataclass(kw_only=True)
class Mlp(Gpt):
    """784-512-512-10, which keeps the host busier than the card."""

    def model(self) -> nn.Module:
        self.clock = Clock()
        width = 16 if self.small else 512
        return nn.Sequential(
            nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
            nn.Linear(width, 10),
        )  # fmt: skip

    def dataset(self, split: str) -> Dataset[Any] | None:
        if split != "train":
            return None
        stream = torch.Generator().manual_seed(1)
        count = 512 if self.small else 20_480
        x = torch.randn(count, 784, generator=stream)
        return TensorDataset(x, torch.randint(10, (count,), generator=stream))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if model.training and not self.rehearsing:
            self.clock.tick()
        x, y = batch
        return F.cross_entropy(model(x), y, reduction="none")


class Curve(muster.Task):
    """A small regression in float64, with dropout; it tells itself to end at step STOP_AT."""

    def model(self) -> nn.Module:
        self.count = 0
        first, last = nn.Linear(8, 64, dtype=torch.float64), nn.Linear(64, 1, dtype=torch.float64)
        return nn.Sequential(first, nn.Tanh(), nn.Dropout(0.3), last)

    def dataset(self, split: str) -> Dataset[Any] | None:
        if split != "train":
            return None
        stream = torch.Generator().manual_seed(1)
        x = torch.randn(200, 8, generator=stream, dtype=torch.float64)
        return TensorDataset(x, torch.sin(x.sum(1)))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.count += not self.rehearsing
        if self.count == int(os.environ.get("STOP_AT", "0")) and not self.rehearsing:
            os.kill(os.getpid(), signal.SIGTERM)
        x, y = batch
        return (model(x)[:, 0] - y).square()

    def score(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        raise NotImplementedError
