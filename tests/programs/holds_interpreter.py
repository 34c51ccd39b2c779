"""One rank computes for seconds and lets no other thread of its process run; the others wait."""

import sys
import time

import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 1:
    sys.setswitchinterval(1000.0)
    end_s = time.monotonic() + 9
    while time.monotonic() < end_s:
        pass
    sys.setswitchinterval(0.005)
dist.barrier()
print("both are here")
