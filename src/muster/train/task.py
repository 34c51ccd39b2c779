"""What to learn: the only thing a user has to write."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from muster.rank.task import find_class, make

Split = Literal["train", "val", "test"]
#: A column of a whole data set: one entry per sample, in the data set's order.
Columns = dict[str, Tensor]


class Loss(NamedTuple):
    """A sum of losses and what it is a sum over, where that is not the number of samples.

    ``total``: scalar tensor, the sum; ``weight``: how many terms it has (tokens, say).
    """

    total: Tensor
    weight: Tensor | float


class Task(ABC):
    """Model, data, loss and scores. A subclass that is a dataclass gets its fields as flags.

    The four abstract methods are needed; the rest has the usual meaning unless overridden.
    ``model`` in ``loss`` and ``score`` is the wrapped model: call it, and nothing inside it, or
    gradients are not synchronised (which is found on step 1).
    """

    #: Settings of ``TrainConfig`` that suit this task; flags of the command line win.
    defaults: ClassVar[Mapping[str, Any]] = {}
    #: Whether items of the training data are random; None: found out by looking at three of them.
    random_items: ClassVar[bool | None] = None
    #: The metric that decides about the best model and patience, and which way is better.
    monitor: ClassVar[str] = "loss"
    better: ClassVar[Literal["lower", "higher"]] = "lower"
    #: The model whose metrics are the results, and that ``finish`` gets: the best by ``monitor``,
    #: or the last, and then the validation data chooses at most when to stop (patience).
    reported: Literal["best", "last"] = "best"
    #: True while ``score``, ``summarise`` and ``finish`` are called once before the first step, to
    #: find their mistakes: whoever takes long or sends something away does less, or nothing, then.
    rehearsing: bool = False

    @abstractmethod
    def model(self) -> nn.Module:
        """A fresh model, on the CPU. Called with the model seed set, the same on all ranks."""

    @abstractmethod
    def dataset(self, split: Split) -> Dataset[Any] | None:
        """The map-style data set of a split, or None where there is none ("val", "test").

        Items may be random (augmentation): they are seeded per sample and epoch. An item that is
        None is left out of its batch.
        """

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Tensor | Loss:
        """The loss of each sample of ``batch``, shape [n], or a sum with its weight."""

    @abstractmethod
    def score(self, model: nn.Module, batch: Any) -> Mapping[str, Tensor]:
        """Values per sample, each of shape [n, …], from which ``summarise`` makes metrics."""

    def summarise(self, columns: Columns) -> Mapping[str, Any]:
        """Metrics of a data set from the columns of *all* its samples, in its order.

        Numbers may be monitored; other JSON values (a confusion matrix) only go to the results.
        """
        return {name: float(values.double().mean()) for name, values in columns.items()}

    def collate(self, samples: Sequence[Any]) -> Any:
        """Samples to a batch."""
        return default_collate(list(samples))

    def optimizer(self, model: nn.Module, lr: float, weight_decay: float) -> torch.optim.Optimizer:
        """The optimizer; its learning rates follow the schedule in proportion."""
        parameters = list(model.parameters())
        # One kernel for all parameters; on a CPU torch chooses.
        fused = all(each.is_cuda and each.is_floating_point() for each in parameters) or None
        return torch.optim.AdamW(parameters, lr=lr, weight_decay=weight_decay, fused=fused)

    def finish(self, model: nn.Module, folder: str) -> None:  # noqa: B027
        """Called on rank 0 at the end with the reported model, unwrapped, on the CPU.

        And once before the first step, with a copy of the model and a folder that is thrown away;
        ``self.rehearsing`` is True then.
        """


def find_task_class(target: str) -> type[Task]:
    """The class that ``target`` names; TargetError when it is no whole Task."""
    hint = "write class MyTask(muster.Task) with model, dataset, loss and score."
    return find_class(target, Task, hint)  # type: ignore[type-abstract]


def make_task(target: str, config: str | None, values: Mapping[str, Any]) -> Task:
    """A task with its own settings; see ``rank.task.make``."""
    return make(find_task_class(target), target, config, values)
