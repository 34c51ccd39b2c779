"""This process's place in the gang: device, process groups, and the end of both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from muster.base.errors import PlacementError
from muster.gang.topology import Topology
from muster.rank.agreement import Council

_TIMEOUT_S = 1800.0


@dataclass(frozen=True, kw_only=True)
class Gang:
    """One rank's view. ``devices`` are all devices of this process: several only in dp mode."""

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


@contextmanager
def joined(topology: Topology | None, *, num_devices: int = 1) -> Iterator[Gang]:
    """Join the gang that the launcher has made, or be one rank alone; leaves it at the end.

    ``num_devices``: GPUs that this one process uses itself (dp mode). The device is set before
    anything else, so that no rank opens a context on GPU 0.
    """
    local_rank = 0 if topology is None else topology.local_rank
    num_ranks = 1 if topology is None else topology.world_size
    is_slurm = topology is not None and topology.launcher == "slurm"
    device = _device(local_rank, shows_own=is_slurm)
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
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            timeout=timedelta(seconds=_TIMEOUT_S),
            device_id=device if device.type == "cuda" else None,
            **place,
        )
    has_failed = True
    try:
        yield Gang(
            rank=0 if topology is None else topology.rank,
            local_rank=local_rank,
            num_ranks=num_ranks,
            device=device,
            devices=_devices(device, num_devices),
            council=Council(0 if topology is None else topology.rank, num_ranks),
            restart_count=0 if topology is None else topology.restart_count,
        )
        has_failed = False
    finally:
        # NCCL's end waits for all ranks; after an error the others may be in a collective still,
        # and the error must get out.
        waits_for_others = has_failed and device.type == "cuda"
        if num_ranks > 1 and dist.is_initialized() and not waits_for_others:
            dist.destroy_process_group()


def _device(local_rank: int, *, shows_own: bool) -> torch.device:
    """``shows_own``: the launcher may show each rank its own GPU only."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
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
