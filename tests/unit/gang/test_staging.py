"""Copies of tensors for a checkpoint, where a GPU's driver gives no pinned memory."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from muster.rank.checkpoint import Staging


def test_without_pinned_memory_the_copies_are_pageable(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = torch.zeros

    def zeros(*args: object, pin_memory: bool = False, **rest: object) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be …")
        found: torch.Tensor = plain(*args, **rest)  # type: ignore[call-overload]
        return found

    monkeypatch.setattr(torch, "zeros", zeros)
    said: list[str] = []
    staging = Staging(said.append)
    for _ in range(3):
        made = staging.make_buffer(torch.Size([2, 3]), torch.float64, pinned=True)
        assert made.shape == (2, 3) and made.dtype == torch.float64 and not made.is_pinned()
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
