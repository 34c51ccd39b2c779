"""Evaluation that counts every sample once, whatever the number of ranks and the batch size."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from muster.base.device_faults import is_out_of_memory
from muster.base.errors import TargetError
from muster.rank.meter import free_cached
from muster.rank.precision import Precision
from muster.rank.process_group import Gang
from muster.rank.seeding import Untouched
from muster.rank.sync import restored
from muster.rank.task import check_gives, tried
from muster.train.feed import Batch, Fetcher, Order, to_device
from muster.train.items import draws_random_numbers
from muster.train.task import Columns, Task


class Evaluator:
    """Scores one data set, of which each rank takes one stretch.

    The columns are put together in the data set's order on every rank, so that all ranks come to
    the same metrics.
    """

    def __init__(
        self,
        task: Task,
        dataset: Dataset[Any],
        num_samples: int,
        gang: Gang,
        precision: Precision,
        *,
        batch_size: int,
        num_workers: int = 0,
    ) -> None:
        self._task = task
        self._dataset = dataset
        self._num_samples = num_samples
        self._gang = gang
        self._precision = precision
        self._batch_size = batch_size
        self._num_workers = num_workers
        self._is_random = draws_random_numbers(dataset, num_samples)

    def __call__(self, model: nn.Module, *, is_sharded: bool = False) -> dict[str, Any]:
        """Metrics of ``model``, the same on every rank.

        ``is_sharded``: every rank must call the model equally often; a rank without a batch
        repeats one and drops it.
        """
        was_training = model.training
        model.eval()
        try:
            with torch.no_grad(), Untouched():
                parts = self._score_in_memory(model, is_sharded)
        finally:
            model.train(was_training)
        return self._summary(self._together(parts))

    def rehearse(self, model: nn.Module, most: int) -> dict[str, Any]:
        """Metrics of the first samples of the data set, ``most`` at most, on this rank alone.

        Raises TargetError and NotTried (``rank.task``); leaves no trace in ``model``.
        """
        batch = self._first(most)
        was_training = model.training
        model.eval()
        try:
            with (
                torch.no_grad(),
                restored(model),
                self._precision.autocast(),
                tried(self._task.score, is_sure=True),
            ):
                data = to_device(batch.data, self._gang.device)
                columns = self._checked(self._task.score(model, data), batch.size)
        finally:
            model.train(was_training)
        with tried(self._task.summarise):
            return self._summary(columns)

    def _summary(self, columns: Columns) -> dict[str, Any]:
        """The task's metrics, with tensors of one element as Python's numbers."""
        found = self._task.summarise(columns)
        return {name: _number(value) for name, value in found.items()}

    def _score_in_memory(self, model: nn.Module, is_sharded: bool) -> list[dict[str, Tensor]]:
        """Score as ``_score_all`` does, with half the batch after an out-of-memory.

        Scores are per sample, so that changes none of them. No rank waits for another here, unless
        the model is sharded.
        """
        while True:
            try:
                return self._score_all(model, is_sharded)
            except Exception as error:
                if is_sharded or self._batch_size == 1 or not is_out_of_memory(error):
                    raise
            free_cached(self._gang.device)
            self._batch_size = math.ceil(self._batch_size / 2)

    def _score_all(self, model: nn.Module, is_sharded: bool) -> list[dict[str, Tensor]]:
        orders = self._orders()
        parts: list[dict[str, Tensor]] = []
        device = self._gang.device
        for batch in self._batches(orders):
            data = to_device(batch.data, device)
            with self._precision.autocast():
                parts.append(self._checked(self._task.score(model, data), batch.size))
        if is_sharded:
            share = math.ceil(self._num_samples / self._gang.num_ranks)
            self._repeat(model, math.ceil(share / self._batch_size) - len(parts))
        return parts

    def _repeat(self, model: nn.Module, times: int) -> None:
        """Call a sharded model as often as the other ranks do, and drop the results."""
        for _ in range(times):
            with self._precision.autocast():
                self._task.score(model, to_device(self._spare(), self._gang.device))

    def _spare(self) -> Any:
        """A batch of one sample: the first item that is not None."""
        return self._first(1).data

    def _first(self, most: int) -> Batch:
        """A batch of the first samples, beginning at the first item that is not None."""
        fetcher = self._fetcher()
        for index in range(self._num_samples):
            indices = list(range(index, min(index + most, self._num_samples)))
            batch = fetcher[Order(0, index, indices)]
            if batch.size:
                return batch
        raise _nothing_left(self._task)

    def _orders(self) -> list[Order]:
        n, ranks, rank = self._num_samples, self._gang.num_ranks, self._gang.rank
        first, end = n * rank // ranks, n * (rank + 1) // ranks
        return [
            Order(0, start, list(range(start, min(start + self._batch_size, end))))
            for start in range(first, end, self._batch_size)
        ]

    def _fetcher(self) -> Fetcher:
        # Epoch 0 always: a data set that draws random numbers is evaluated the same every time.
        return Fetcher(self._dataset, self._task.collate, 0, is_random=self._is_random)

    def _batches(self, orders: list[Order]) -> Any:
        if self._num_workers == 0:
            return (batch for order in orders if (batch := self._fetcher()[order]).size)
        loader: DataLoader[Batch] = DataLoader(
            self._fetcher(),
            sampler=orders,
            batch_size=None,
            num_workers=self._num_workers,
        )
        return (batch for batch in loader if batch.size)

    def _checked(self, scores: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
        check_gives(self._task.score, scores, Mapping)
        for name, values in scores.items():
            if not isinstance(values, Tensor) or values.dim() == 0 or len(values) != count:
                got = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
                raise TargetError(
                    f"{type(self._task).__name__}.score gave {got} for {name!r} of a batch of "
                    f"{count} samples; means of batches would be wrong for uneven ones.",
                    hint=f"give one value per sample: a tensor of shape ({count}, …).",
                )
        return {name: values.detach().cpu() for name, values in scores.items()}

    def _together(self, parts: list[dict[str, Tensor]]) -> Columns:
        own = (
            {name: torch.cat([part[name] for part in parts]) for name in parts[0]} if parts else {}
        )
        ranks = [columns for columns in self._gang.council.gather(own) if columns]
        if not ranks:
            raise _nothing_left(self._task)
        return {name: torch.cat([columns[name] for columns in ranks]) for name in ranks[0]}


def _number(value: Any) -> Any:
    is_one = getattr(value, "shape", None) == () and hasattr(value, "item")
    return value.item() if is_one else value


def monitored(metrics: Mapping[str, Any], task: Task) -> float:
    """The monitored metric.

    Raises TargetError where the task does not give it, or it is no number.
    """
    name = type(task).__name__
    if task.monitor not in metrics:
        names = [str(metric) for metric in metrics]
        near = [*difflib.get_close_matches(task.monitor, names, n=1), *names, "NAME"][0]
        raise TargetError(
            f"{name} chooses the best model by {task.monitor!r}, and its metrics are "
            f"{', '.join(names) or 'none'}.",
            hint=f"write monitor = {near!r} in the class, and better = 'higher' or 'lower'.",
        )
    value = metrics[task.monitor]
    if not isinstance(value, int | float):
        raise TargetError(
            f"{name}.monitor is {task.monitor!r}, and what {name}.summarise gives for it is a "
            f"{type(value).__name__}, not a number.",
            hint="monitor a metric that is one number.",
        )
    return float(value)


def _nothing_left(task: Task) -> TargetError:
    return TargetError(
        f"All items of a data set that {type(task).__name__} is evaluated on are None.",
        hint="leave out what is not wanted in the data set itself.",
    )
