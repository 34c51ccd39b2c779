"""This process's place in the gang: its device, its process groups, and how ranks agree.

All ranks decide together, by small sums over sockets or a gloo group of their own, before anyone
acts: a rank that acted on what it alone knows would leave the others waiting in a collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from muster.base.device_faults import NO_CUDA_HINT, why_no_cuda
from muster.base.errors import MusterError, PlacementError, SetupError
from muster.base.settings import variable
from muster.base.shown_text import count
from muster.gang.beacon import BEACON
from muster.gang.topology import SlotKind, Topology
from muster.rank.peer_sockets import MOST_NUMBERS, connect_peers

_COLLECTIVE = "an agreement"

#: A context that does nothing; made once, as it is entered at every step.
NOTHING: AbstractContextManager[Any] = nullcontext()


@contextmanager
def _waiting() -> Iterator[None]:
    """Tell the watchdog that this rank waits for the others inside."""
    BEACON.collective = _COLLECTIVE
    try:
        yield
    finally:
        BEACON.collective = ""


class Pending:
    """A sum on its way; ``wait`` gives it, in float64. ``end`` returns when it is there."""

    def __init__(self, end: Callable[[], list[float]]) -> None:
        self._end = end

    def wait(self) -> list[float]:
        BEACON.collective = _COLLECTIVE  # once per step: no context manager here
        result = self._end()
        BEACON.collective = ""
        return result


class Council:
    """The ranks' control channel. With one rank every call answers at once.

    Small sums go through sockets where all ranks are on one host, and else through gloo as all the
    rest does, even where gradients travel over NCCL: nothing here waits for a GPU. Its timeout is
    long, because rank 0 may work alone for a while (on a large checkpoint, or in the task's
    ``finish``): a rank that has died is noticed by its connection, and one that hangs by the
    watchdog, which knows which rank is busy saving.
    """

    def __init__(self, rank: int, num_ranks: int, timeout_s: float = 3 * 3600.0) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        # A group of its own: were these sums made in the gradients' group, a rank that is one
        # collective ahead of another would have its sum added to the other's gradients.
        self._group = (
            dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
            if num_ranks > 1
            else None
        )
        self._peers = (
            connect_peers(rank, num_ranks, self.gather, timeout_s) if num_ranks > 1 else None
        )
        self._at_end: list[Callable[[], None]] = []

    def add(self, values: Sequence[float]) -> Pending:
        """Start adding ``values`` over the ranks; every rank gives as many. The sum is waited for
        before the next one is begun.
        """
        if self._group is None:
            return Pending(partial(list, values))
        if self._peers is not None and len(values) <= MOST_NUMBERS:
            return Pending(partial(self._peers.end, self._peers.begin(values)))
        tensor = torch.tensor(values, dtype=torch.float64)
        work: Any = dist.all_reduce(tensor, group=self._group, async_op=True)

        def end() -> list[float]:
            work.wait()
            result: list[float] = tensor.tolist()
            return result

        return Pending(end)

    def at_end(self, call: Callable[[], None]) -> None:
        """Have ``call`` called when the ranks part, while there still are the process groups."""
        self._at_end.append(call)

    def close(self) -> None:
        if self._peers is not None:
            self._peers.close()
        while self._at_end:
            self._at_end.pop()()

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

    def broadcast(self, piece: torch.Tensor) -> None:
        """Fill ``piece``, which is on the CPU, with rank 0's. The watchdog does not hear of it."""
        dist.broadcast(piece, src=0, group=self._group)

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


_TIMEOUT_S = 1800.0


@dataclass(frozen=True, kw_only=True)
class Gang:
    """One rank's view of its gang. ``devices`` are all of this process: several only in dp mode."""

    rank: int
    local_rank: int
    num_ranks: int
    device: torch.device
    devices: tuple[torch.device, ...]
    council: Council
    restart_count: int = 0

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def where(self) -> str:
        """The devices of all ranks in words, as they are here."""
        if self.device.type == "cuda":
            name = torch.cuda.get_device_name(self.device)
            return f"{max(self.num_ranks, len(self.devices))} x {name}"
        threads = torch.get_num_threads()
        many = f"{self.num_ranks} ranks on the CPU" if self.num_ranks > 1 else "the CPU"
        return f"{many}, {count(threads, 'thread')} each"


@contextmanager
def joined(
    topology: Topology | None, *, num_devices: int = 1, slot: SlotKind | None = None
) -> Iterator[Gang]:
    """Join the gang that the launcher has made, or be one rank alone; leaves it at the end.

    ``num_devices``: GPUs that this one process uses itself (dp mode). ``slot``: what this process
    was placed on, where no launcher has said it; without either, the GPU if there is one. The
    device is set before anything else, so that no rank opens a context on GPU 0.

    Raises SetupError on a rank that was placed on a GPU which torch cannot use.
    """
    local_rank = 0 if topology is None else topology.local_rank
    num_ranks = 1 if topology is None else topology.world_size
    is_slurm = topology is not None and topology.launcher == "slurm"
    slot = slot or (None if topology is None else topology.slot)
    device = _device(local_rank, slot, shows_own=is_slurm)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if num_ranks > 1:
        place: dict[str, Any] = {}
        if is_slurm and topology is not None:  # it sets no torch variables
            place = {
                "init_method": f"tcp://{topology.master_addr}:{topology.master_port}",
                "rank": topology.rank,
                "world_size": num_ranks,
            }
        try:
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                timeout=timedelta(seconds=_TIMEOUT_S),
                device_id=device if device.type == "cuda" else None,
                **place,
            )
        except dist.DistBackendError as error:
            if "Duplicate GPU detected" not in str(error):
                raise
            # Ranks that see one GPU each see their own, or all the same: NCCL is the first to know.
            raise PlacementError(
                f"Local rank {local_rank} or another one has no GPU of its own: two ranks use the "
                f"same, and torch sees {torch.cuda.device_count()}.",
                hint="start as many ranks per node as it has GPUs.",
            ) from error
    rank = 0 if topology is None else topology.rank
    has_failed = True
    try:
        with closing(Council(rank, num_ranks)) as council:
            yield Gang(
                rank=rank,
                local_rank=local_rank,
                num_ranks=num_ranks,
                device=device,
                devices=_devices(device, num_devices),
                council=council,
                restart_count=0 if topology is None else topology.restart_count,
            )
        has_failed = False
    finally:
        # NCCL's end waits for all ranks; after an error the others may be in a collective still,
        # and the error must get out.
        waits_for_others = has_failed and device.type == "cuda"
        if num_ranks > 1 and dist.is_initialized() and not waits_for_others:
            dist.destroy_process_group()


def _device(local_rank: int, slot: SlotKind | None, *, shows_own: bool) -> torch.device:
    """``shows_own``: the launcher may show each rank its own GPU only."""
    if slot == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        if slot == "cuda":
            raise SetupError(
                "This rank was placed on a GPU, which the driver shows, and torch "
                f"{torch.__version__} cannot use it: {why_no_cuda(torch).rstrip('.')}. On the CPU "
                "it would take many times as long.",
                hint=NO_CUDA_HINT,
            )
        return torch.device("cpu")
    # A launcher of any kind may have left each rank a list of its own.
    listed = variable("CUDA_VISIBLE_DEVICES")
    shows_own = shows_own or (listed is not None and "," not in listed)
    count = torch.cuda.device_count()
    if shows_own and count == 1:
        local_rank = 0
    if local_rank >= count:
        raise PlacementError(
            f"Local rank {local_rank} has no GPU: torch sees {count}.",
            hint="start as many ranks per node as it has GPUs.",
        )
    return torch.device("cuda", local_rank)


def _devices(device: torch.device, num_devices: int) -> tuple[torch.device, ...]:
    if device.type == "cpu" or num_devices == 1:
        return (device,) * num_devices
    return tuple(torch.device("cuda", index) for index in range(num_devices))
