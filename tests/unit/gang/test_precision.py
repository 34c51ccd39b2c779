"""The ranks compute in one precision: cards of two generations, as torch would tell of them."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from muster.base.errors import MusterError
from muster.rank.precision import agree_on_precision, use_tf32
from muster.rank.process_group import Council, Gang

CARDS = {0: "NVIDIA GeForce RTX 3090", 1: "NVIDIA GeForce RTX 2080 Ti"}


def decide(rank: int, folder: Path) -> None:
    """Be one of two ranks, and write down what it decides."""
    cuda: Any = torch.cuda
    cuda.get_device_name = lambda device: CARDS[rank]
    cuda.is_bf16_supported = lambda including_emulation=True: rank == 0
    cuda.get_device_capability = lambda device: (8, 6) if rank == 0 else (7, 5)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    device = torch.device("cuda", rank)
    council = Council(rank, 2)
    gang = Gang(
        rank=rank, local_rank=rank, num_ranks=2, device=device, devices=(device,), council=council
    )
    said = []
    for wanted in ("auto", "bf16", "tf32", "fp32"):
        try:
            said.append(str(agree_on_precision(wanted, gang)))
        except MusterError as error:
            said.append(f"{error.exit_code}: {error}".partition("\n")[0])
    (folder / f"{rank}.json").write_text(json.dumps(said))
    council.meet()
    dist.destroy_process_group()


@pytest.mark.thorough
def test_the_weakest_card_decides_for_all(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen([sys.executable, __file__, str(rank), str(tmp_path)]) for rank in range(2)
    ]
    assert [rank.wait(300) for rank in ranks] == [0, 0]
    said = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert said[0] == said[1] == [
        "fp16 (auto: NVIDIA GeForce RTX 2080 Ti has no bf16, which decides for all: rank 1)",
        "2: --precision bf16: NVIDIA GeForce RTX 2080 Ti of rank 1 has no bf16.",
        "2: --precision tf32 needs an NVIDIA GPU of the Ampere generation or later; this is "
        "cuda:1.",
        "fp32 (as given)",
    ]  # fmt: skip


def test_no_warning_of_torch_about_tf32_reaches_the_user() -> None:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for is_on in (True, False):
                use_tf32(is_on)
                assert torch.backends.cuda.matmul.allow_tf32 is is_on
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


if __name__ == "__main__":
    decide(int(sys.argv[1]), Path(sys.argv[2]))
