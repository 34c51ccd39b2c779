"""How much memory this worker has used at its peak, without importing anything for it."""

from __future__ import annotations

import sys

if sys.platform != "win32":
    import resource


def peak_mib() -> float | None:
    """Peak device memory where CUDA is in use, else the process's peak resident set, in MiB.

    ``None`` where neither is known. The resident peak is of the whole process so far, hence an
    upper bound for the task.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        peak = float(torch.cuda.max_memory_reserved()) / 2**20
        torch.cuda.reset_peak_memory_stats()
        return peak
    if sys.platform == "win32":
        return None
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used / 2**20 if sys.platform == "darwin" else used / 2**10
