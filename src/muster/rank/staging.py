"""Host memory that is kept for copies of a training's state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class Staging:
    """Buffers by name, pinned where the source is on a GPU, made once and reused."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def reserve(self, tensors: Mapping[str, Tensor]) -> None:
        """Make and touch the buffers, so that the first copy costs no more than the others."""
        for name, tensor in tensors.items():
            self._buffer(name, tensor)

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """The tensors on the CPU as they are now; sharded ones stay sharded."""
        on_gpu = False
        result: dict[str, Any] = {}
        for name, tensor in tensors.items():
            local = _local(tensor)
            buffer = self._buffer(name, tensor)
            buffer.copy_(local, non_blocking=True)
            on_gpu = on_gpu or local.is_cuda
            result[name] = _like(tensor, buffer)
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        return result

    def _buffer(self, name: str, tensor: Tensor) -> Tensor:
        local = _local(tensor)
        kept = self._buffers.get(name)
        if kept is None or kept.shape != local.shape or kept.dtype != local.dtype:
            kept = torch.zeros(
                local.shape, dtype=local.dtype, device="cpu", pin_memory=local.is_cuda
            )
            self._buffers[name] = kept
        return kept


def _local(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):
        local: Tensor = tensor.to_local().detach()
        return local
    return tensor.detach()


def _like(tensor: Tensor, buffer: Tensor) -> Tensor:
    """``buffer`` as what ``tensor`` is: the same shard of the same whole, on the CPU."""
    if not isinstance(tensor, DTensor):
        return buffer
    mesh = tensor.device_mesh
    cpu_mesh = (
        mesh
        if mesh.device_type == "cpu"
        else torch.distributed.device_mesh.DeviceMesh("cpu", mesh.mesh.tolist())
    )
    return DTensor.from_local(
        buffer,
        cpu_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.size(),
        stride=tensor.stride(),
    )
