"""What this process knows of its own device: whether torch can use it, and whether it still works.

torch is asked only where the task has imported it, and CUDA only where the task uses it, so that a
task without a GPU pays nothing.
"""

from __future__ import annotations

import sys

from muster.base.device_faults import NO_CUDA_HINT, why_no_cuda

#: With one of these the task may compute on the GPU although its torch cannot.
_OTHER_WAYS = ("jax", "cupy", "tensorflow", "numba.cuda", "pycuda")


def why_unfit() -> str:
    """Why the task would compute on the CPU although its slot is a GPU; "" where it would not."""
    torch = sys.modules.get("torch")
    if torch is None or any(name in sys.modules for name in _OTHER_WAYS):
        return ""
    why = why_no_cuda(torch)
    return f"torch cannot use the GPU of this worker: {why}. {NO_CUDA_HINT}" if why else ""


def is_in_use() -> bool:
    """Whether this process has a CUDA context."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())


def hidden_fault() -> str:
    """What has gone wrong on the device and nobody was told: kernels fail after their launch has
    returned, and a context that has failed once fails whatever runs next. "" where all is well.
    """
    if not is_in_use():
        return ""
    torch = sys.modules["torch"]
    try:
        here = torch.cuda.current_device()
        for index in range(torch.cuda.device_count()):
            # A device that holds nothing has run nothing, and asking it would open a context there.
            if index == here or torch.cuda.memory_reserved(index):
                torch.cuda.synchronize(index)
    except Exception as error:
        return f"{type(error).__name__}: {error}".split("\n", 1)[0]
    return ""
