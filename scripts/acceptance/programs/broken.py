"""Tasks on devices that are gone, and tasks that leave a context that nothing can use any more."""

from __future__ import annotations

import os
import time

if os.environ.get("HOW") != "raise":  # a rehearsal needs no torch
    import torch


def adds(i: int) -> dict[str, float]:
    """Fails at once where there is no device; takes a while where there is one."""
    found = float(torch.ones(4, device="cuda").sum())
    time.sleep(0.2)
    return {"i": i, "sum": found}


def poisons(i: int) -> dict[str, float]:
    """The third task ends the context of its process; the others only use it."""
    how = os.environ["HOW"]
    if how == "raise":
        if i == 3:
            raise RuntimeError("CUDA error: device-side assert triggered")
        return {"i": i, "sum": 4.0}
    if i == 3 and how == "assert":
        torch.zeros(4, device="cuda")[torch.tensor([7], device="cuda")]
    elif i == 3:
        from acceptance.programs.bad_kernel import bad_kernel

        bad_kernel[(1,)](torch.zeros(4, device="cuda"), BLOCK=32)
        torch.cuda.synchronize()
    return {"i": i, "sum": float(torch.ones(4, device="cuda").sum())}
