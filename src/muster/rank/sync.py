"""What keeps replicas the same: shared gradients and buffers, and a check that they are equal."""

# No postponed annotations here: DistributedDataParallel reads those of its hook as objects.

import copy
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from muster.base.errors import MusterError
from muster.gang.beacon import BEACON
from muster.rank.process_group import Council

_EXTRA_STATE = "_extra_state"  # as torch has it in a state_dict


class Marks:
    """Events of the last steps, in the order in which a GPU comes to them.

    After a rank's own work of a step comes what waits for the other ranks, then the next step.
    """

    def __init__(self) -> None:
        self._events: deque[tuple[Any, bool]] = deque(maxlen=12)  # a host is few steps ahead

    def add(self, event: Any, *, is_own: bool) -> None:
        """Add an event: if ``is_own`` it follows the rank's own work, else it begins a step."""
        self._events.append((event, is_own))

    def own_done(self) -> bool | None:
        """Whether a GPU that makes no progress waits for other ranks; None where all work is done.

        Any thread may ask.
        """
        for event, is_own in list(self._events):
            if not event.query():
                return not is_own
        return None


class GradientSync:
    """A communication hook for DistributedDataParallel that *adds* gradients over the ranks.

    The loss is a sum divided by the global count already, so nothing is divided again. It keeps
    the layout of the buckets, so that a rank that has run out of memory in the middle of a
    backward can still take part in the collectives the others are waiting in (``finish_empty``),
    and it knows whether it was called at all: a training that goes around its wrapper is seen.

    ``num_searched``: parameters of a model whose unused ones are searched for, else 0; torch then
    adds up, after the buckets, one number per parameter.
    """

    def __init__(self, num_searched: int = 0) -> None:
        self._num_searched = num_searched
        self.num_calls = 0
        self.num_started = 0
        self.last_start_s = 0.0
        self._layout: dict[int, tuple[int, torch.dtype, torch.device]] = {}
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._marks = Marks()
        BEACON.own_done = self.own_done

    def begin_window(self, device: torch.device) -> None:
        """Mark the begin of an optimizer step; call it before the first forward."""
        self.num_started = 0
        if device.type == "cuda":
            # Blocking: a host that waits leaves its core to the data loader and does not look busy.
            make: Any = partial(torch.cuda.Event, enable_timing=True, blocking=True)
            self._events = make(), make()
            self._events[0].record()
            self._marks.add(self._events[0], is_own=False)

    def compute_s(self) -> float | None:
        """Seconds from ``begin_window`` to this rank's last gradients; None on a CPU."""
        if self._events is None:
            return None
        self._events[1].synchronize()
        return float(self._events[0].elapsed_time(self._events[1])) / 1e3

    def own_done(self) -> bool | None:
        """See ``Marks``; None also where that cannot be asked."""
        if self._events is None:
            return None
        try:
            # In a thread of its own a query would else open a context on the first GPU.
            with torch.cuda.device(self._events[0].device):
                return self._marks.own_done()
        except RuntimeError:
            return None

    def hook(
        self,
        state: object,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer()
        index = bucket.index()
        if index == 0:
            self.num_started = 0
        self.num_calls += 1
        self.num_started += 1
        self._layout[index] = (buffer.numel(), buffer.dtype, buffer.device)
        if bucket.is_last():
            for later in [i for i in self._layout if i > index]:
                del self._layout[later]
            if self._events is not None:
                self._events[1].record()
                self._marks.add(self._events[1], is_own=True)
        self.last_start_s = time.perf_counter()
        # Not waited for here: the backward goes on while the bucket travels. DDP waits for all
        # buckets at its end.
        work = dist.all_reduce(buffer, async_op=True)
        # Complex numbers travel as pairs of real ones, and DDP wants its own buffer back.
        result = (lambda _: buffer) if buffer.is_complex() else _first
        future: torch.futures.Future[Tensor] = work.get_future().then(result)
        return future

    def begin(self) -> None:
        """Prepare for a backward that synchronises."""
        self.num_started = 0

    @property
    def is_incomplete(self) -> bool:
        """Whether the last backward has left buckets for which the others wait."""
        return self.num_started < len(self._layout)

    def finish_empty(self) -> None:
        """Take part with zeros in the collectives of this backward that are still to come."""
        # Collectives have no names: they match by their order alone. The others wait in those that
        # this rank did not get to, so it joins each, in order, with the size they expect.
        for index in range(self.num_started, len(self._layout)):
            numel, dtype, device = self._layout[index]
            dist.all_reduce(torch.zeros(numel, dtype=dtype, device=device))
        if self._num_searched and self._layout:
            _, _, device = self._layout[0]
            dist.all_reduce(torch.zeros(self._num_searched, dtype=torch.int32, device=device))
        self.num_started = len(self._layout)


def _first(future: torch.futures.Future[list[Tensor]]) -> Tensor:
    return future.value()[0]


def share_buffers(buffers: Iterable[Tensor]) -> None:
    """Every rank takes rank 0's buffers (BatchNorm's statistics, say), in few broadcasts."""
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for buffer in buffers:
        by_type.setdefault(buffer.dtype, []).append(buffer)
    with torch.no_grad():
        for group in by_type.values():
            flat = torch.cat([buffer.reshape(-1) for buffer in group])
            dist.broadcast(flat.view(torch.uint8), src=0)  # gloo knows few types by their names
            start = 0
            for buffer in group:
                buffer.copy_(flat[start : start + buffer.numel()].view_as(buffer))
                start += buffer.numel()


def share_parameters(model: nn.Module) -> None:
    """Every rank takes rank 0's parameters and buffers."""
    share_buffers([*model.parameters(), *model.buffers()])


@torch.no_grad()
def fingerprint(tensors: Iterable[Tensor]) -> Tensor:
    """One 64-bit checksum per tensor, over its bits; equal tensors have equal ones."""
    sums = [_bits(tensor.detach()).sum(dtype=torch.int64) for tensor in tensors]
    if not sums:
        return torch.zeros(0, dtype=torch.int64)
    return torch.stack(sums).cpu()


def _bits(tensor: Tensor) -> Tensor:
    flat = tensor.contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    if flat.dtype == torch.bool:
        return flat
    num_bytes = flat.numel() * flat.element_size()
    if num_bytes % 8 == 0 and flat.storage_offset() * flat.element_size() % 8 == 0:
        return flat.view(torch.int64)
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return flat.view(kinds[flat.element_size()])


def check_identical(parameters: Mapping[str, Tensor], council: Council, when: str) -> None:
    """MusterError on every rank, with names, when parameters are not the same on all ranks."""
    if council.num_ranks == 1:
        return
    own = fingerprint(parameters.values())
    # max(x) == -max(-x) on every rank exactly when all x are equal. ~x is -x - 1: no overflow.
    both = council.maximum(torch.cat([own, ~own]))
    differs = (both[: len(own)] != ~both[len(own) :]).nonzero().flatten().tolist()
    if differs:
        names = [name for index, name in enumerate(parameters) if index in set(differs)]
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        raise MusterError(
            f"The ranks' parameters are no longer the same {when}: {shown}. "
            "Each rank is training a model of its own.",
            hint="gradients or updates differ between ranks: the loss must call the model that "
            "it is given (not the module inside), and nothing may change parameters on one "
            "rank only.",
        )


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Put the buffers and the extra state of ``model`` back as they were, after a forward that must
    leave no trace.
    """
    kept = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    extra = [(m, copy.deepcopy(m.get_extra_state())) for _, m in modules_with_extra_state(model)]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)
        for module, state in extra:
            module.set_extra_state(state)


def modules_with_extra_state(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Those that keep something beside tensors, with its name in the state of ``model``. One that
    cannot take it back, as torch allows, keeps nothing.
    """
    return [
        (f"{name}.{_EXTRA_STATE}" if name else _EXTRA_STATE, module)
        for name, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
        and type(module).set_extra_state is not nn.Module.set_extra_state
    ]
