"""Copies of tensors for a checkpoint, where a GPU's driver gives no pinned memory."""

from __future__ import annotations

import contextlib
import types

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from muster.rank.checkpoint import Staging


class Driver:
    """Of CUDA: how much host memory is registered, which is refused above ``limit``."""

    def __init__(self, limit: int) -> None:
        self.held: dict[int, int] = {}
        self.limit = limit

    def cudaHostRegister(self, place: int, size: int, flags: int) -> int:
        if sum(self.held.values()) + size > self.limit:
            return 2
        assert place not in self.held
        self.held[place] = size
        return 0

    def cudaHostUnregister(self, place: int) -> int:
        del self.held[place]
        return 0

    def cudaGetErrorString(self, code: int) -> str:
        return {2: "out of memory"}[code]


def driver(monkeypatch: pytest.MonkeyPatch, limit: int = 1 << 40) -> Driver:
    """Of now on all tensors say that they are on a GPU."""
    found = Driver(limit)
    stream = types.SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: found)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    return found


def state(width: int) -> dict[str, torch.Tensor]:
    """A model's and its optimizer's tensors, none of which has a size of a power of two."""
    model = torch.nn.Sequential(torch.nn.Linear(width, 3 * width + 7), torch.nn.Linear(5, width))
    found = {
        f"{name}.{part}": torch.randn(tensor.shape)
        for name, tensor in model.state_dict().items()
        for part in ("value", "exp_avg", "exp_avg_sq")
    }
    return {
        **found,
        "half": torch.randn(3, width).bfloat16(),
        "step": torch.tensor(7.0, dtype=torch.float64),
        "count": torch.tensor([1, 2, 3]),
        "none": torch.zeros(0, 4),
        "flags": torch.tensor([True, False]),
    }


def test_what_is_pinned_is_what_is_saved_and_the_next_save_has_it_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda, staging = driver(monkeypatch), Staging()
    saved = state(width=300)
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in saved.values())
    for _ in range(3):
        saved = state(width=300)
        copies = staging.copy(saved)
        [pinned] = cuda.held.values()
        assert num_bytes <= pinned <= 1.05 * num_bytes
        assert list(copies) == list(saved)
        for name, tensor in saved.items():
            torch.testing.assert_close(copies[name], tensor, rtol=0, atol=0)
            size = tensor.numel() * tensor.element_size()
            # Else it would be copied once more when it is written.
            assert copies[name].untyped_storage().nbytes() == size
    [before] = cuda.held
    del copies
    staging.copy(state(width=310))
    assert len(cuda.held) == 1
    staging.copy(state(width=310))
    assert len(cuda.held) == 1
    del staging
    assert cuda.held == {} and before


def test_without_pinned_memory_the_copies_are_pageable(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = driver(monkeypatch, limit=1000)
    said: list[str] = []
    staging = Staging(said.append)
    for width in (30, 40, 40):
        saved = state(width)
        copies = staging.copy(saved)
        for name, tensor in saved.items():
            torch.testing.assert_close(copies[name], tensor, rtol=0, atol=0)
    assert cuda.held == {}
    assert said == [
        "note       checkpoints are copied to pageable memory, slower: CUDA error: out of memory"
    ]


def test_all_tensors_and_saves_share_one_mesh_of_the_cpu() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        staging = Staging()
        on_gpus = DeviceMesh("cuda", [0], _init_backend=False)
        found = staging.cpu_mesh(on_gpus)
        assert found.device_type == "cpu" and found.mesh.tolist() == [0]
        assert staging.cpu_mesh(DeviceMesh("cuda", [0], _init_backend=False)) is found
        assert staging.cpu_mesh(found) is found
    finally:
        dist.destroy_process_group()
