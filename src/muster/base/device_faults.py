"""What the errors of accelerators mean, told by their names and texts. Nothing here imports torch.

The same fault reaches a run as an exception of torch, as one of a library beside torch, and as
the last line of a program's log, so it is known by what it says and not by its class.
"""

from __future__ import annotations

import functools
import gc
import re
import sys
from collections.abc import Collection
from importlib.util import find_spec
from typing import Any

from muster.base.settings import ALLOW_CPU_TORCH, read_settings

#: What a user can do about a torch that cannot use the GPUs that the driver has.
NO_CUDA_HINT = (
    "`muster doctor` says which driver and which build of torch go together; "
    "--devices cpu computes on the CPU."
)
_ALLOW_HINT = f"{ALLOW_CPU_TORCH}=1 is for tasks that use the GPU without torch."
# Texts, which `re` compiles with the first error: every worker imports this.
_NO_DEVICE_MEMORY = (
    r"(CUDA|HIP|XPU|MPS backend) out of memory"
    r"|(CUDA|HIP|CUDA driver) error: out of memory"
    r"|Triton Error \[\w+\]: out of memory"
    r"|RESOURCE_EXHAUSTED: Out of memory"
    r"|cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY"
    # cuBLAS, cuDNN, cuSOLVER, cuSPARSE, cuFFT, cuRAND, and the same of ROCm
    r"|\b(CU|HIP|ROC)[A-Z]+_([A-Z]+_)*ALLOC(ATION)?_FAILED"
)
_NO_MEMORY = re.compile("out of memory|can't allocate memory|not enough memory", re.IGNORECASE)
_LOST_DEVICE = (
    r"No (CUDA|HIP) GPUs are available|CUDA unknown error"
    r"|(CUDA|HIP) (driver )?initialization failed"
    r"|no (CUDA|ROCm)-capable device|-capable device(\(s\) is/are|s are) busy or unavailable"
    r"|(CUDA|HIP) driver error: (unknown|initialization) error"
    r"|fallen off the bus|GPU is lost|uncorrectable (ECC|NVLink) error"
)


class BrokenContext(RuntimeError):
    """Work that is known to be at fault left a context in which nothing runs any more."""


def looks_like_out_of_device_memory(type_names: Collection[str], text: str) -> bool:
    """Whether an error says that an accelerator had no memory left.

    ``type_names``: the names of its class and of those above it.

    >>> looks_like_out_of_device_memory(["RuntimeError"], "cuDNN error: CUDNN_STATUS_ALLOC_FAILED")
    True
    """
    return "OutOfMemoryError" in type_names or re.search(_NO_DEVICE_MEMORY, text) is not None


def looks_like_out_of_memory(type_names: Collection[str], text: str) -> bool:
    """Whether an error says that memory ran out, an accelerator's or the host's.

    >>> looks_like_out_of_memory(["MemoryError"], ""), looks_like_out_of_memory(["ValueError"], "")
    (True, False)
    """
    if "MemoryError" in type_names or looks_like_out_of_device_memory(type_names, text):
        return True
    return "RuntimeError" in type_names and _NO_MEMORY.search(text) is not None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that memory ran out, an accelerator's or the host's."""
    try:
        text = str(error)
    except Exception:  # one of the user's own classes, which is to be told as itself
        text = ""
    return looks_like_out_of_memory(names_of(error), text)


def looks_like_lost_device(text: str) -> bool:
    """Whether an error says that the device cannot be used, whatever a program does with it.

    >>> looks_like_lost_device("RuntimeError: No CUDA GPUs are available")
    True
    """
    return re.search(_LOST_DEVICE, text) is not None and not re.search(_NO_DEVICE_MEMORY, text)


def names_of(error: BaseException) -> set[str]:
    """The names of an error's class and of those above it."""
    return {base.__name__ for base in type(error).__mro__}


def give_memory_back() -> None:
    """Free what Python and torch keep for later. An exception that is still held keeps the tensors
    of its frames: drop it first.
    """
    gc.collect()
    if is_in_use():
        sys.modules["torch"].cuda.empty_cache()


def why_no_cuda(torch: Any) -> str:
    """Why ``torch`` can use no CUDA device, in its own words; "" where it can use one."""
    if torch.cuda.is_available():
        return ""
    try:
        torch.cuda.init()
    except Exception as error:
        return str(error).strip().split("\n", 1)[0] or type(error).__name__
    return "torch.cuda.is_available() is False"


#: Begins what a process says that has itself found its torch unable; no task says so by chance.
_UNFIT = "torch cannot use the GPU of this worker"
#: With one of these a program may compute on the GPU although its torch cannot.
_OTHER_WAYS = (
    "jax", "cupy", "tensorflow", "pycuda", "xgboost", "lightgbm", "catboost", "onnxruntime",
    "tensorrt", "numba.cuda",
)  # fmt: skip


@functools.cache
def _has_other_way() -> bool:
    """Whether one of them is installed: a task may import it only when it runs."""
    whole = [name for name in _OTHER_WAYS if "." not in name]  # a part is found by an import only
    specs = map(find_spec, whole)
    return any(spec is not None and spec.origin is not None for spec in specs)  # no mere folder


def why_unfit() -> str:
    """Why this process, which is given a GPU, would compute on the CPU; "" where it would not.

    torch is asked only where it has been imported and nothing else could use the GPU.
    """
    torch = sys.modules.get("torch")
    if torch is None or any(name in sys.modules for name in _OTHER_WAYS) or _has_other_way():
        return ""
    if read_settings().allows_cpu_torch or not (why := why_no_cuda(torch)):
        return ""
    return f"{_UNFIT}: {why}. {NO_CUDA_HINT} {_ALLOW_HINT}"


def says_unfit(text: str) -> bool:
    """Whether ``text`` is what ``why_unfit`` has found."""
    return text.startswith(_UNFIT)


def is_in_use() -> bool:
    """Whether this process has a CUDA context of torch's; asking costs nothing without torch."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())


def hidden_fault() -> str:
    """What has gone wrong on the device and nobody was told: kernels fail after their launch has
    returned, and a context that has failed once fails whatever runs next. "" where all is well.
    """
    if not is_in_use():
        return ""
    torch = sys.modules["torch"]
    has_context = getattr(getattr(torch, "_C", None), "_cuda_hasPrimaryContext", None)
    try:
        here = torch.cuda.current_device()
        for index in range(torch.cuda.device_count()):
            # Without a context nothing has run there, and asking would open one.
            if has_context is None:
                is_used = index == here or bool(torch.cuda.memory_reserved(index))
            else:
                is_used = has_context(index)
            if is_used:
                torch.cuda.synchronize(index)
    except Exception as error:
        return f"{type(error).__name__}: {error}".split("\n", 1)[0]
    return ""
