"""Steps about ranks: NCCL and FSDP with a world of one, and a hang that must be named."""

from __future__ import annotations

import copy
import os
import signal
import socket
import subprocess
import sys
import time

from acceptance.here import Here


def world_of_one(here: Here) -> None:
    """The collectives' code on a card: gradients are the plain model's, shards come back equal."""
    import torch
    import torch.distributed as dist

    from muster.rank.process_group import Council, Gang

    device = torch.device("cuda", 0) if here.device == "cuda" else torch.device("cpu")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    dist.init_process_group(
        "nccl" if here.device == "cuda" else "gloo", init_method=f"tcp://127.0.0.1:{port}",
        rank=0, world_size=1, device_id=device if here.device == "cuda" else None,
    )  # fmt: skip
    gang = Gang(rank=0, local_rank=0, num_ranks=1, device=device, devices=(device,),
                council=Council(0, 1))  # fmt: skip
    try:
        _distributed(here, gang)
        _sharded(here, gang)
    finally:
        dist.destroy_process_group()


def _net(device: object) -> object:
    import torch
    from torch import nn

    torch.manual_seed(3)
    layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x

    return Net().to(device)  # type: ignore[call-overload]


def _distributed(here: Here, gang) -> None:  # type: ignore[no-untyped-def]
    import torch

    from muster.gang.beacon import BEACON
    from muster.rank.replica import DistributedReplica

    model = _net(gang.device)
    plain = copy.deepcopy(model)
    replica = DistributedReplica(model, gang, has_unused=False)
    x = torch.randn(32, 64, device=gang.device)

    def step(release: bool = False) -> bool:
        plain.zero_grad()
        replica.bare.zero_grad()
        plain(x).square().sum().backward()
        replica.begin_window()
        if release:
            replica.release_others()
            replica.renew()
            return True
        with replica.synchronised(True):
            replica.wrapped(x).square().sum().backward()
        pairs = zip(plain.parameters(), replica.bare.parameters(), strict=True)
        return all(torch.equal(a.grad, b.grad) for a, b in pairs)

    same = [step(), step(), step(release=True), step()]
    here.expect("gradients of ddp are the plain model's", same, all(same), "the same bits")
    taken = replica.compute_s()
    here.synchronize()
    here.note("s of a backward by its events", taken)
    here.expect("waits of a GPU that is done", BEACON.own_done(), BEACON.own_done() is None, "None")


def _sharded(here: Here, gang) -> None:  # type: ignore[no-untyped-def]
    import torch

    from muster.rank.checkpoint import CheckpointWriter, Snapshot
    from muster.rank.checkpoint_files import load_state, model_tensors, optimizer_tensors
    from muster.rank.precision import agree_on_precision
    from muster.rank.replica import ShardedReplica

    kind = "bf16" if here.device == "cuda" else "fp32"
    precision = agree_on_precision(kind, gang)

    def fresh():  # type: ignore[no-untyped-def]
        replica = ShardedReplica(_net(gang.device), gang, precision)
        return replica, torch.optim.AdamW(replica.bare.parameters(), lr=0.1)

    replica, optimizer = fresh()
    x = torch.randn(32, 64, device=gang.device)
    norms = []
    for _ in range(2):
        optimizer.zero_grad()
        replica.begin_window()
        with replica.synchronised(True), precision.autocast():
            replica.wrapped(x).float().square().sum().backward()
        norms.append(float(replica.clip(1.0)))
        optimizer.step()
    here.expect("norms of a sharded gradient", norms, all(n > 0 for n in norms), "above 0")
    writer = CheckpointWriter(here.folder, rank=0, num_ranks=1, is_sharded=True, say=print)
    tensors = {**model_tensors(replica.bare), **optimizer_tensors(replica.bare, optimizer)}
    taken = writer.save(Snapshot(step=1, tensors=tensors, extra={}))
    writer.wait()
    here.fast("s that a save of shards takes", taken, at_most=0.5)
    other, its_optimizer = fresh()
    with torch.no_grad():
        for parameter in other.bare.parameters():
            parameter.zero_()
    load_state(here.folder / "step-00000001", other.bare, its_optimizer, {}, None)
    pairs = zip(replica.bare.parameters(), other.bare.parameters(), strict=True)
    same = all(torch.equal(a.full_tensor(), b.full_tensor()) for a, b in pairs)
    here.expect("shards come back", same, same, "equal")


def hang(here: Here) -> None:
    """A kernel that never ends is named, and Ctrl-C leaves nothing on the card."""
    limit_s = here.size(10, 3)
    command = [
        sys.executable, "-m", "muster", "run", "--devices", here.devices, "--stall-timeout",
        str(limit_s), "--grace", "3", "--run-dir", "hang", "-m", "acceptance.programs.hangs",
    ]  # fmt: skip
    process = subprocess.Popen(
        command, cwd=here.folder, env=here.environment(), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    begun_s, named = time.monotonic(), ""
    for line in process.stdout:
        print(line, end="", flush=True)
        if "it hangs now" in line:
            begun_s = time.monotonic()
        if "no rank has moved" in line:
            named = line.strip()
            break
    taken = time.monotonic() - begun_s
    here.expect("how the hang is named", named, "hangs.py" in named, "by its file and line")
    here.expect("s until it is named", taken, taken < limit_s + 10, f"below {limit_s + 10}")
    begun_s = time.monotonic()
    os.kill(process.pid, signal.SIGINT)
    print(process.stdout.read())
    code = process.wait()
    taken = time.monotonic() - begun_s
    here.expect("exit code after Ctrl-C", code, code == 130, "130")
    here.note("s until all is gone", taken)
    if here.device == "cuda":
        import pynvml

        pynvml.nvmlInit()
        card = pynvml.nvmlDeviceGetHandleByIndex(0)
        while pynvml.nvmlDeviceGetComputeRunningProcesses(card):
            if time.monotonic() - begun_s > 15:
                break
            time.sleep(0.1)
        used = pynvml.nvmlDeviceGetMemoryInfo(card).used >> 20
        here.note("MiB used after it, the driver's share included", used)
    here.goal("s until the memory of a killed run is back", time.monotonic() - begun_s)
