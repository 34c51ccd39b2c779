"""A program that waits, in a step of its training, for a kernel that does not end."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist


def main() -> None:
    has_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if has_gpu else "gloo")
    print("it hangs now", flush=True)
    if has_gpu:
        loss = torch.ones(1, device="cuda")
        torch.cuda._sleep(10**12)
        print((loss + 1).item())
    else:
        time.sleep(1000)


if __name__ == "__main__":
    main()
