"""What keeps replicas the same: shared gradients, buffers and extra states."""

# No postponed annotations here: DistributedDataParallel reads those of its hook as objects.

import copy
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from muster.base.codec import to_json
from muster.gang.beacon import BEACON
from muster.rank.process_group import Gang

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
    """A communication hook for DistributedDataParallel that *adds* gradients over the ranks, and
    the context for the forward and backward that it is for: behind it the gradients are added up.

    The loss is a sum divided by the global count already, so nothing is divided again. It keeps
    the layout of the buckets, so that a rank that has run out of memory in the middle of a
    backward can still take part in the collectives the others are waiting in (``finish_empty``),
    and it knows whether it was called at all: a training that goes around its wrapper is seen.
    ``is_complete``: the last backward has left no bucket for which the others wait. ``at_last``: is
    called in the next backward, once its last bucket travels.

    ``num_searched``: parameters of a model whose unused ones are searched for, else 0; torch then
    adds up, after the buckets, one number per parameter.
    """

    def __init__(self) -> None:
        self.num_searched = 0
        self.num_calls = 0
        self.num_started = 0
        self.is_complete = False
        self.at_last: Callable[[], None] | None = None
        self.last_start_s = 0.0
        self._layout: dict[int, tuple[int, torch.dtype, torch.device]] = {}
        self._travelling: list[Any] = []  # what gloo has begun
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
            self.is_complete = True
            for later in [i for i in self._layout if i > index]:
                del self._layout[later]
            if self._events is not None:
                self._events[1].record()
                self._marks.add(self._events[1], is_own=True)
        self.last_start_s = time.perf_counter()
        # Not waited for here: the backward goes on while the bucket travels.
        work = dist.all_reduce(buffer, async_op=True)
        if bucket.is_last() and self.at_last is not None:
            call, self.at_last = self.at_last, None
            call()
        future: torch.futures.Future[Tensor]
        if buffer.device.type == "cpu":
            # The gradients are views of the buffer, in which gloo adds: DDP, which waits for a
            # bucket only to copy it, may go on, and the wait is at the end of this context. A
            # callback would have gloo's thread wait for the interpreter, 3 % of a small step.
            self._travelling.append(work)
            future = torch.futures.Future()
            future.set_result(buffer)
            return future
        # Complex numbers travel as pairs of real ones, and DDP wants its own buffer back.
        result = (lambda _: buffer) if buffer.is_complex() else _first
        future = work.get_future().then(result)
        return future

    def __enter__(self) -> None:
        self.num_started, self.is_complete, self.at_last = 0, False, None

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        travelling, self._travelling = self._travelling, []  # which hold their buckets
        if kind is None:  # else the other ranks may never come to them
            for work in travelling:
                work.wait()

    def finish_empty(self) -> None:
        """Take part with zeros in the collectives of this backward that are still to come."""
        self.at_last = None
        # Collectives have no names: they match by their order alone. The others wait in those that
        # this rank did not get to, so it joins each, in order, with the size they expect.
        for index in range(self.num_started, len(self._layout)):
            numel, dtype, device = self._layout[index]
            dist.all_reduce(torch.zeros(numel, dtype=dtype, device=device))
        if self.num_searched and self._layout:
            _, _, device = self._layout[0]
            dist.all_reduce(torch.zeros(self.num_searched, dtype=torch.int32, device=device))
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


def share_extra_states(modules: Sequence[nn.Module], gang: Gang) -> None:
    """Every rank takes the extra states of rank 0's modules, as it does its buffers.

    What no checkpoint can hold stays as it is: a training that keeps it is refused.
    """
    if not modules or gang.num_ranks == 1:
        return
    states = [_sent(each.get_extra_state()) for each in modules] if gang.is_first else None
    for module, state in zip(modules, gang.council.share(states), strict=True):
        if state is not None and not gang.is_first:
            value, kind = state
            module.set_extra_state(value.to(gang.device) if kind == gang.device.type else value)


def _sent(state: Any) -> tuple[Any, str | None] | None:
    """A module's state, and the kind of device on which it is; None for what cannot be kept."""
    if isinstance(state, Tensor):  # from the CPU: another rank has not this rank's GPU
        return state.detach().cpu(), state.device.type
    return (state, None) if kept_text(state) is not None else None


def kept_text(value: Any) -> bytes | None:
    """The JSON of ``value`` that a checkpoint has; None for what it cannot hold."""
    try:
        return to_json(value)
    except (TypeError, ValueError, RecursionError):
        return None


def share_parameters(model: nn.Module) -> None:
    """Every rank takes rank 0's parameters and buffers."""
    share_buffers([*model.parameters(), *model.buffers()])


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
    """Those that give and take something beside their tensors, with its name in the state of
    ``model``. What cannot be taken back, a version say, need not be kept.
    """
    return [
        (f"{name}.{_EXTRA_STATE}" if name else _EXTRA_STATE, module)
        for name, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
        and type(module).set_extra_state is not nn.Module.set_extra_state
    ]


def is_extra_state(name: str) -> bool:
    """Whether an entry in the state of a model is what a module gives beside its tensors."""
    return name.replace("/", ".").rpartition(".")[2] == _EXTRA_STATE
