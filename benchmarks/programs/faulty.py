"""A small training by hand in which something goes wrong in rank 1 after a few steps.

    muster run --devices cpu:2 faulty.py FOLDER FAULT

FAULT: exception, kill, stop, sleep (the data loader never gives the next batch), or none. FOLDER
gets the process id of each rank, and ``fault`` with the time at which it happened. A rank that is
left alone ends by itself after two minutes.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

FOLDER, FAULT = Path(sys.argv[1]), sys.argv[2]
RANK = int(os.environ["RANK"])
AT_STEP, LIMIT_S = 20, 120


def go_wrong() -> None:
    (FOLDER / "fault").write_text(repr(time.time()))
    if FAULT == "exception":
        raise ValueError("bad sample 7")
    if FAULT == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if FAULT == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)


class Samples(Dataset):
    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, index: int) -> torch.Tensor:
        if FAULT == "sleep" and RANK == 1 and index == AT_STEP * 8:
            go_wrong()
            time.sleep(LIMIT_S)
        return torch.ones(16)


def main() -> None:
    (FOLDER / f"pid-{RANK}").write_text(str(os.getpid()))
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    deadline = time.monotonic() + LIMIT_S
    for step, batch in enumerate(DataLoader(Samples(), batch_size=8)):
        if step == AT_STEP and RANK == 1 and FAULT in ("exception", "kill", "stop"):
            go_wrong()
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
        (FOLDER / f"step-{RANK}").write_text(str(step))
        time.sleep(0.02)
        if time.monotonic() > deadline:
            break


main()
