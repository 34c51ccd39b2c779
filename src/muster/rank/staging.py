"""Copies of tensors in host memory that is kept for them, from which a checkpoint is written."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

#: Where a tensor may begin: as wide as the widest of what is copied at once.
_ALIGNMENT = 64
_FOR_ALL_CONTEXTS = 1


class Staging:
    """One slab of host memory for all tensors of a save; the next save of the same uses it again.

    It is pinned where tensors are on a GPU. torch's own pinned buffers are rounded up to powers of
    two, each of them; a slab that is registered takes what it holds.
    """

    def __init__(self, say: Callable[[str], None] = lambda text: None) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._cpu_meshes: dict[DeviceMesh, DeviceMesh] = {}
        self._say = say
        self._can_pin = True

    def reserve(self, tensors: Mapping[str, Tensor]) -> None:
        """Allocate and touch the memory, so that the first copy costs no more than the others."""
        wanted = {name: _local(tensor) for name, tensor in tensors.items()}
        if _shapes(wanted) == _shapes(self._buffers):
            return
        self._buffers = {}  # frees the old slab before there is a new one
        sizes = [tensor.numel() * tensor.element_size() for tensor in wanted.values()]
        rounded = (-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)
        *begins, total = itertools.accumulate(rounded, initial=0)
        gpu = next((tensor.device for tensor in wanted.values() if tensor.is_cuda), None)
        slab = self._slab(total, gpu)
        for (name, tensor), begin, size in zip(wanted.items(), begins, sizes, strict=True):
            # By numpy, so that each has a storage of its size, which is written without a copy.
            part = torch.from_numpy(slab[begin : begin + size])
            self._buffers[name] = part.view(tensor.dtype).view(tensor.shape)

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """The tensors on the CPU as they are now; sharded ones stay sharded."""
        self.reserve(tensors)
        on_gpu = False
        result: dict[str, Any] = {}
        for name, tensor in tensors.items():
            local, buffer = _local(tensor), self._buffers[name]
            buffer.copy_(local, non_blocking=True)
            on_gpu = on_gpu or local.is_cuda
            result[name] = self._like(tensor, buffer)
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        return result

    def _slab(self, num_bytes: int, gpu: torch.device | None) -> numpy.ndarray[Any, Any]:
        """Zeros on the host; of pageable memory, which is slower, where no more can be pinned."""
        slab = numpy.empty(num_bytes, dtype=numpy.uint8)
        slab.fill(0)
        if gpu is None or not self._can_pin or num_bytes == 0:
            return slab
        cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        place = slab.ctypes.data
        with torch.cuda.device(gpu):  # a thread begins on GPU 0, and would open a context there
            code = cudart.cudaHostRegister(place, num_bytes, _FOR_ALL_CONTEXTS)
            if int(code) == 0:
                weakref.finalize(slab, cudart.cudaHostUnregister, place).atexit = False
                return slab
            with suppress(RuntimeError):
                torch.zeros(1, device=gpu)  # else the next launch is blamed for the error
        self._can_pin = False
        why = f"CUDA error: {cudart.cudaGetErrorString(code)}"
        self._say(f"note       checkpoints are copied to pageable memory, slower: {why}")
        return slab

    def _like(self, tensor: Tensor, buffer: Tensor) -> Tensor:
        """``buffer`` as what ``tensor`` is: the same shard of the same whole, on the CPU."""
        if not isinstance(tensor, DTensor):
            return buffer
        return DTensor.from_local(
            buffer,
            self.cpu_mesh(tensor.device_mesh),
            tensor.placements,
            run_check=False,
            shape=tensor.size(),
            stride=tensor.stride(),
        )

    def cpu_mesh(self, mesh: DeviceMesh) -> DeviceMesh:
        """A mesh of the same ranks on the CPU. It is made once: the ranks must make it together."""
        if mesh.device_type == "cpu":
            return mesh
        if mesh not in self._cpu_meshes:
            self._cpu_meshes[mesh] = DeviceMesh("cpu", mesh.mesh.tolist())
        return self._cpu_meshes[mesh]


def _local(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):
        local: Tensor = tensor.to_local().detach()
        return local
    return tensor.detach()


def _shapes(tensors: Mapping[str, Tensor]) -> list[tuple[str, torch.Size, torch.dtype]]:
    return [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]
