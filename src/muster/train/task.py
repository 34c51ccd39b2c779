"""The task of a training, the only thing that a user has to write: what is learnt, from what."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate, get_worker_info

from muster.rank.replica import may_fuse
from muster.rank.task import find_class, make

Split = Literal["train", "val", "test"]
#: A column of a whole data set: one entry per sample, in the data set's order.
Columns = dict[str, Tensor]


class Loss(NamedTuple):
    """A sum of losses over something else than samples, such as tokens.

    ``total``: the sum, a scalar tensor with gradients; ``weight``: the number of its terms.
    """

    total: Tensor
    weight: Tensor | float


def is_strided(value: Any) -> bool:
    """Whether it is a tensor of numbers that lie in memory one after the other."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return False
    return not (value.is_nested or value.is_quantized)


def stacked(samples: Sequence[Any]) -> list[Tensor] | None:
    """The columns of samples that are tuples of plain tensors, as ``default_collate`` makes them in
    this process, in half the time; None for anything else, or in a loader's process.
    """
    first = samples[0]
    is_plain = type(first) is tuple and all(
        type(part) is Tensor and is_strided(part) for part in first
    )
    if not is_plain or not first or get_worker_info() is not None:
        return None
    try:
        return [torch.stack(column) for column in zip(*samples, strict=True)]
    except (TypeError, ValueError, RuntimeError):
        return None  # default_collate says what is wrong with them


class Task(ABC):
    """Model, data, loss and scores. A subclass that is a dataclass gets its fields as flags.

    The four abstract methods are needed; the others have usual defaults. ``model`` in ``loss`` and
    ``score`` is the wrapped model: call it, and nothing inside it, or gradients are not
    synchronised (the rehearsal before step 1 finds that and ends the training).
    """

    #: Settings of ``TrainConfig`` that suit this task; flags of the command line win.
    defaults: ClassVar[Mapping[str, Any]] = {}
    #: Whether items of the training data are random; None: Muster looks at three of them.
    random_items: ClassVar[bool | None] = None
    #: Whether the loss may leave out parameters in some steps, as a mixture of experts does; those
    #: that it never uses are found by themselves.
    skips_parameters: ClassVar[bool] = False
    #: The metric that decides about the best model and patience, and which way is better.
    monitor: ClassVar[str] = "loss"
    better: ClassVar[Literal["lower", "higher"]] = "lower"
    #: The model whose metrics are the results, and that ``finish`` gets: the best by ``monitor``,
    #: or the last, and then the validation data chooses at most when to stop (patience).
    reported: Literal["best", "last"] = "best"
    #: True while ``score``, ``summarise`` and ``finish`` are called once before the first step, to
    #: find their mistakes: a method that takes long or sends something away should do less then.
    rehearsing: bool = False

    @abstractmethod
    def model(self) -> nn.Module:
        """Make a new model, on the CPU. It is called with the same seed set on all ranks."""

    @abstractmethod
    def dataset(self, split: Split) -> Dataset[Any] | None:
        """The map-style data set of a split, or None where there is none ("val", "test").

        Items may be random (augmentation): they are seeded per sample and epoch. An item that is
        None is left out of its batch.
        """

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Tensor | Loss:
        """The loss of each of the n samples of ``batch``, of shape [n], or a `Loss`.

        ``batch`` is what ``collate`` made, on the rank's device.
        """

    @abstractmethod
    def score(self, model: nn.Module, batch: Any) -> Mapping[str, Tensor]:
        """Values per sample by name, of shape [n, …], from which ``summarise`` makes metrics."""

    def summarise(self, columns: Columns) -> Mapping[str, Any]:
        """Metrics of a data set from the columns of *all* its samples, in its order.

        ``columns``: tensors of shape [num_samples, …] by the names of ``score``. By default each
        metric is the mean of a column. Numbers may be monitored; other JSON values (a confusion
        matrix) only go to the results.
        """
        return {name: float(values.double().mean()) for name, values in columns.items()}

    def collate(self, samples: Sequence[Any]) -> Any:
        """Make a batch of samples, which are items of the data set; torch's default otherwise."""
        return stacked(samples) or default_collate(list(samples))

    def optimizer(self, model: nn.Module, lr: float, weight_decay: float) -> torch.optim.Optimizer:
        """Make the optimizer, AdamW by default; its rates follow the schedule in proportion."""
        parameters = list(model.parameters())
        fused = may_fuse(parameters) or None  # one pass over all parameters; None: torch chooses
        return torch.optim.AdamW(parameters, lr=lr, weight_decay=weight_decay, fused=fused)

    def finish(self, model: nn.Module, folder: str) -> None:  # noqa: B027
        """Do what is left at the end: called on rank 0 with the reported model, on the CPU.

        The model is not wrapped; files go to ``folder``. It is called once before the first step as
        well, with a copy of the model and a folder that is removed; ``self.rehearsing`` is True
        then.
        """


def find_task_class(target: str) -> type[Task]:
    """The class that ``target`` names. Raises TargetError where it is not a complete Task."""
    hint = "write class MyTask(muster.Task) with model, dataset, loss and score."
    return find_class(target, Task, hint)  # type: ignore[type-abstract]


def make_task(target: str, config: str | None, values: Mapping[str, Any]) -> Task:
    """Make a task from its own settings; see ``rank.task.make``."""
    return make(find_task_class(target), target, config, values)
