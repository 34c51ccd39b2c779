"""All ranks decide together: small sums over a gloo group of their own, before anyone acts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from muster.base.errors import MusterError
from muster.gang.beacon import BEACON

_COLLECTIVE = "an agreement"


@contextmanager
def _waiting() -> Iterator[None]:
    """What the watchdog is told while this rank waits for the others."""
    BEACON.collective = _COLLECTIVE
    try:
        yield
    finally:
        BEACON.collective = ""


class Pending:
    """A sum on its way; ``wait`` gives it, in float64."""

    def __init__(self, values: torch.Tensor | list[float], work: Any) -> None:
        self._values = values
        self._work = work

    def wait(self) -> list[float]:
        if isinstance(self._values, list):
            return self._values
        BEACON.collective = _COLLECTIVE  # once per step: no context manager here
        self._work.wait()
        BEACON.collective = ""
        result: list[float] = self._values.tolist()
        return result


class Council:
    """The ranks' control channel. With one rank every call answers at once.

    The group is gloo even where gradients travel over NCCL, so that nothing here waits for a
    GPU. Its timeout is long, because rank 0 may work alone for a while (a large checkpoint, the
    task's last word): a rank that has died is noticed by its connection, and one that hangs by
    the watchdog, which knows who is busy saving.
    """

    def __init__(self, rank: int, num_ranks: int, timeout_s: float = 3 * 3600.0) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self._group = (
            dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
            if num_ranks > 1
            else None
        )

    def add(self, values: Sequence[float]) -> Pending:
        """Start adding ``values`` over the ranks; every rank gives as many."""
        if self._group is None:
            return Pending(list(values), None)
        tensor = torch.tensor(values, dtype=torch.float64)
        return Pending(tensor, dist.all_reduce(tensor, group=self._group, async_op=True))

    def any(self, flag: bool) -> bool:
        return self.add([float(flag)]).wait()[0] > 0

    def maximum(self, values: torch.Tensor) -> torch.Tensor:
        """Elementwise maximum over the ranks of an integer or float tensor on the CPU."""
        result = values.clone()
        if self._group is not None:
            with _waiting():
                dist.all_reduce(result, dist.ReduceOp.MAX, group=self._group)
        return result

    def gather(self, value: Any) -> list[Any]:
        """Every rank's ``value``, in the order of ranks, on every rank."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.num_ranks
        with _waiting():
            dist.all_gather_object(values, value, group=self._group)
        return values

    def share(self, value: Any) -> Any:
        """Rank 0's ``value`` on every rank."""
        if self._group is None:
            return value
        box = [value]
        with _waiting():
            dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def meet(self) -> None:
        """Return when every rank has come here."""
        self.any(False)

    def check_same(self, what: str, value: Any) -> None:
        """MusterError on every rank when ``value`` is not the same on all of them."""
        values = self.gather(value)
        if any(other != values[0] for other in values):
            listing = ", ".join(f"rank {rank}: {other}" for rank, other in enumerate(values))
            raise MusterError(
                f"The ranks disagree about {what} ({listing}); they would wait for each other "
                "for ever or learn different things.",
                hint="make it depend on nothing but the task's own settings.",
            )
