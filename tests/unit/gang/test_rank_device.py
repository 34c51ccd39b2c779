"""A rank computes on what it was placed on, or not at all. torch's view of the GPUs is recorded."""

from __future__ import annotations

import pytest
import torch

from muster.base.errors import PlacementError, SetupError
from muster.gang.topology import SLOT, read_topology
from muster.rank.process_group import _device, joined

TOO_OLD = "The NVIDIA driver on your system is too old (found version 12040)."


def see(monkeypatch: pytest.MonkeyPatch, num_gpus: int, visible: str | None = None) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)


def test_a_rank_on_a_gpu_never_computes_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise RuntimeError(TOO_OLD)

    see(monkeypatch, 0)
    monkeypatch.setattr(torch.cuda, "init", refuse)
    with pytest.raises(SetupError) as caught, joined(None, slot="cuda"):
        pass
    assert TOO_OLD in str(caught.value) and "`muster doctor`" in str(caught.value)
    assert caught.value.exit_code == 3


def test_the_launcher_says_what_a_rank_was_placed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch, 0)
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    topology = read_topology({**place, "MASTER_PORT": "29400", SLOT: "cuda"})
    with pytest.raises(SetupError), joined(topology):
        pass
    assert read_topology({**place, "MASTER_PORT": "29400"}) is not None
    with joined(read_topology({**place, "MASTER_PORT": "29400"})) as gang:
        assert gang.device == torch.device("cpu")


def test_a_rank_on_the_cpu_takes_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch, 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: pytest.fail(f"took {device}"))
    with joined(None, slot="cpu") as gang:
        assert gang.device == torch.device("cpu")


def test_a_rank_may_see_its_own_gpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch, 1, "GPU-aaaa")
    assert _device(3, None, shows_own=False) == torch.device("cuda", 0)
    see(monkeypatch, 2, "0,1")
    assert _device(1, "cuda", shows_own=False) == torch.device("cuda", 1)
    for visible in (None, "0,1"):
        see(monkeypatch, 1 if visible is None else 2, visible)
        with pytest.raises(PlacementError, match="Local rank 3 has no GPU"):
            _device(3, None, shows_own=False)


def test_two_ranks_of_one_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "ncclInvalidUsage: …\nLast error:\nDuplicate GPU detected : rank 1 and rank 0 both on 4b"

    def refuse(*_: object, **__: object) -> None:
        raise torch.distributed.DistBackendError(said)

    see(monkeypatch, 1, "0")
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.distributed, "init_process_group", refuse)
    place = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    topology = read_topology({**place, "MASTER_PORT": "29400", SLOT: "cuda"})
    with pytest.raises(PlacementError, match="two ranks use the same, and torch sees 1"):
        with joined(topology):
            pass
