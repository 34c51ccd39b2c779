"""How often a step reads from a tensor: on a GPU each such read makes the host wait for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.train.toy_tasks import Toy
from torch import Tensor
from torch.overrides import TorchFunctionMode

from muster.run.folder import RunFolder
from muster.train.config import TrainConfig
from muster.train.loop import train
from muster.train.task import Loss

_READS = {"item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__", "__index__"}


class Reads(TorchFunctionMode):
    """Counts what takes a value out of a tensor."""

    def __init__(self) -> None:
        self.count = 0

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        is_read = getattr(function, "__name__", "") in _READS
        # The order of the samples is of whole numbers and always on the host.
        self.count += is_read and args[0].dtype != torch.int64
        return function(*args, **(kwargs or {}))


@dataclass(kw_only=True)
class Watched(Toy):
    """SGD, which reads nothing itself, as the fused AdamW of a GPU."""

    def optimizer(
        self, model: torch.nn.Module, lr: float, weight_decay: float
    ) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=lr)

    def loss(self, model: torch.nn.Module, batch: Any) -> Any:
        if model.training and not self.rehearsing:
            SEEN.append(READS.count)
        return super().loss(model, batch)


class CountsTerms(Watched):
    """Its losses are sums whose number of terms is a tensor, as of tokens that are not padding."""

    def loss(self, model: torch.nn.Module, batch: Any) -> Any:
        losses = super().loss(model, batch)
        return Loss(losses.sum(), torch.isfinite(losses).sum().to(torch.float32))


READS, SEEN = Reads(), list[int]()


@pytest.mark.parametrize(("max_grad_norm", "most"), [(None, 1), (1.0, 2)])
def test_a_step_reads_its_loss_and_a_logged_norm_and_nothing_else(
    max_grad_norm: float | None, most: int, tmp_path: Path
) -> None:
    SEEN.clear()
    config = TrainConfig(
        global_batch=8, epochs=1, max_steps=12, eval_frequency=0, max_grad_norm=max_grad_norm,
        tensorboard=False, log_every=1,
    )  # fmt: skip
    with READS:
        assert float(torch.ones(1)) == 1.0 and READS.count > 0  # it does see them
        train(Watched(samples=96, val=0), config, RunFolder(tmp_path), None, lambda line: None)
    assert len(SEEN) >= 12
    # After the first step the ranks compare more.
    per_step = [after - before for before, after in pairwise(SEEN[-11:])]
    assert max(per_step) <= most, per_step
    assert min(per_step) >= 1, "the reads of the loss are no longer seen"


@pytest.mark.parametrize("micro_batch", [2, 8])
def test_a_weight_that_is_a_tensor_is_read_once_a_step(micro_batch: int, tmp_path: Path) -> None:
    SEEN.clear()
    config = TrainConfig(
        global_batch=8, batch_size=micro_batch, epochs=1, max_steps=12, eval_frequency=0,
        max_grad_norm=None, tensorboard=False, log_every=1,
    )  # fmt: skip
    before = READS.count
    with READS:
        train(CountsTerms(samples=96, val=0), config, RunFolder(tmp_path), None, lambda line: None)
    rounds = 8 // micro_batch
    reads = [later - now for now, later in pairwise([before, *SEEN][-8 * rounds - 1 :: rounds])]
    assert len(reads) == 8 and set(reads) == {2}, reads  # the weight's and the loss's


def test_a_read_is_seen_whatever_its_way() -> None:
    for read in (Tensor.item, Tensor.tolist, Tensor.cpu, Tensor.numpy, float, int, bool):
        before = READS.count
        with READS:
            read(torch.ones(()))  # type: ignore[operator]
        assert READS.count == before + 1, read
