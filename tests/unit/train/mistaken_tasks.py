"""Tasks with one mistake each, in what is called only after an epoch or at the end."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy
import torch
from tests.unit.train.toy_tasks import Points, Toy
from torch import Tensor, nn


@dataclass(kw_only=True)
class TypoInScore(Toy):
    def score(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"loss": modell(batch[0])}  # noqa: F821


@dataclass(kw_only=True)
class WrongShapeInScore(Toy):
    def score(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"loss": model(batch[0]) - torch.zeros(1000)}


@dataclass(kw_only=True)
class NumberFromScore(Toy):
    def score(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return 0.5  # type: ignore[return-value]


@dataclass(kw_only=True)
class NoOptimizer(Toy):
    def optimizer(self, model: nn.Module, lr: float, weight_decay: float) -> Any:
        torch.optim.SGD(model.parameters(), lr=lr)


@dataclass(kw_only=True)
class TypoInSummarise(Toy):
    def summarise(self, columns: Any) -> dict[str, Any]:
        return {"loss": columns["los"].mean()}


@dataclass(kw_only=True)
class DeepTypoInSummarise(Toy):
    def summarise(self, columns: Any) -> dict[str, Any]:
        return {"loss": _mean_of(columns)}


def _mean_of(columns: Any) -> float:
    return columns["loss"].maen()


@dataclass(kw_only=True)
class UnstorableSummary(Toy):
    def summarise(self, columns: Any) -> dict[str, Any]:
        return {"loss": float(columns["loss"].mean()), "all": columns["loss"]}


@dataclass(kw_only=True)
class ListIsMonitored(Toy):
    monitor: ClassVar[str] = "seen"


@dataclass(kw_only=True)
class NothingOfThatName(Toy):
    monitor: ClassVar[str] = "los"


@dataclass(kw_only=True)
class TypoInFinish(Toy):
    def finish(self, model: nn.Module, folder: str) -> None:
        Path(folder, "weights").write_text(modell.state_dict())  # noqa: F821


@dataclass(kw_only=True)
class FinishTakesNoFolder(Toy):
    def finish(self, model: nn.Module) -> None:  # type: ignore[override]
        return


@dataclass(kw_only=True)
class NeedsBothClasses(Toy):
    """As a library's area under the curve: it refuses few samples, and is right to."""

    def summarise(self, columns: Any) -> dict[str, Any]:
        if len(columns["loss"]) < 10:
            raise ValueError("only one class is present")
        return {"loss": columns["loss"].mean()}


class OwnStream(Points):
    """Augments by a generator that nobody else knows."""

    def __init__(self, toy: Toy) -> None:
        super().__init__(toy.samples, 1, toy)
        self.stream = numpy.random.default_rng(0)

    def __getitem__(self, index: int) -> Any:
        x, y, number = super().__getitem__(index)
        return x + 0.1 * float(self.stream.standard_normal()), y, number


@dataclass(kw_only=True)
class HoldsGenerator(Toy):
    def dataset(self, split: str) -> Any:
        return OwnStream(self) if split == "train" else super().dataset(split)


@dataclass(kw_only=True)
class Meddles(Toy):
    """While it is rehearsed, it touches all that it can: generators, buffers, modes, itself."""

    meddles: bool = True
    batchnorm: bool = True
    dropout: float = 0.3

    def score(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        self._meddle(model)
        return super().score(model, batch)

    def summarise(self, columns: Any) -> dict[str, Any]:
        self._meddle(None)
        return super().summarise(columns)

    def finish(self, model: nn.Module, folder: str) -> None:
        self._meddle(model)
        if self.rehearsing:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(7.0)
        Path(folder, "finished").write_text("yes")

    def _meddle(self, model: nn.Module | None) -> None:
        if not (self.rehearsing and self.meddles):
            return
        random.random()
        numpy.random.rand()
        torch.rand(3)
        self.samples += 1
        if model is not None:
            model.train()
            model(torch.ones(4, 3, dtype=torch.float64))
