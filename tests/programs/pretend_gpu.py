"""Tasks on a GPU that is pretended: its memory, how it dies, and what a torch would say of it."""

import json
import os
import signal
import sys
import time
import types
from pathlib import Path

from muster import batched

SECOND = "GPU-1"  # the GPU of the recorded host on which things happen
HERE = os.environ.get("CUDA_VISIBLE_DEVICES")


class OutOfMemoryError(RuntimeError):
    pass


class AcceleratorError(RuntimeError):
    pass


class Buffer:
    """Units of the device's 100, held for as long as somebody holds this."""

    held = 0

    def __init__(self, units):
        self.units = 0
        if Buffer.held + units > 100:
            raise OutOfMemoryError(f"CUDA out of memory: asked {units}, held {Buffer.held} of 100")
        self.units = units
        Buffer.held += units

    def __del__(self):
        Buffer.held -= self.units


@batched(max_batch=8)
def hungry(tasks):
    weights = Buffer(60)
    activations = Buffer(10 * len(tasks))
    return [{"together": len(tasks), "held": weights.units + activations.units} for _ in tasks]


def short_once(i: int, ctx):
    """Two workers share a GPU: what is too much beside another one is enough alone."""
    time.sleep(0.1)
    if ctx.attempt > 1:
        return {"alone": 1}
    if i == 1:
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`")
    if i == 2:
        raise AcceleratorError("CUDA error: out of memory")
    if i == 3:
        raise RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED")
    return {"alone": 0}


def until(ready):
    limit = time.monotonic() + 120
    while not ready():
        assert time.monotonic() < limit, "it did not happen in time"
        time.sleep(0.01)


def dies(i: int, how: str):
    """The second GPU works three times, then falls off the bus and never works again.

    It does so once the first has begun its second task, so that one is known to be done; and the
    first does not end that one before, or it would do all while the other's worker starts.
    """
    flag = Path("flag")

    def uses():
        return int(flag.read_text() or 0) if flag.exists() else 0

    if HERE != SECOND and Path("first").exists():
        Path("first-again").touch()
        until(lambda: uses() > 3)
    elif HERE != SECOND:
        Path("first").touch()
    else:
        count = uses()
        flag.write_text(str(count + 1))
        if count == 3:
            until(Path("first-again").exists)
            if how == "driver":
                facts = Path(os.environ["MUSTER_DEVICE_FACTS"])
                beside = facts.with_suffix(".new")
                known = json.loads(facts.read_text())
                known["devices"][1]["lost"] = "GPU 1 does not answer (GPU is lost)"
                beside.write_text(json.dumps(known))
                beside.replace(facts)
            if how != "own words":
                os.kill(os.getpid(), signal.SIGABRT)
        if count > 3 and how == "own words":
            raise RuntimeError("the model cannot be built")
        if count > 3:
            raise RuntimeError("No CUDA GPUs are available")
    time.sleep(0.05)
    return {"here": HERE}


def pretend_torch(*, works=True):
    """What the worker asks of torch. ``kernel_failed``: from then on no synchronisation works."""
    cuda = types.SimpleNamespace(kernel_failed=False)

    def init():
        if not works:
            raise RuntimeError("The NVIDIA driver on your system is too old (found version 12040)")

    def synchronize(index=None):
        if cuda.kernel_failed:
            raise AcceleratorError("CUDA error: an illegal memory access was encountered")

    cuda.init, cuda.synchronize, cuda.set_device = init, synchronize, synchronize
    cuda.is_available = cuda.is_initialized = lambda: works
    cuda.device_count = lambda: int(works)
    cuda.current_device = lambda: 0
    cuda.memory_reserved = lambda index: 0
    cuda.max_memory_reserved = lambda: 2 << 30
    cuda.reset_peak_memory_stats = cuda.empty_cache = lambda: None
    module = types.ModuleType("torch")
    module.cuda, module.manual_seed, module.Tensor = cuda, lambda seed: None, type("Tensor", (), {})
    sys.modules["torch"] = module
    return module


def poisons(i: int, how: str):
    """Task 3 leaves a context in which nothing works any more; its worker runs on."""
    torch = sys.modules.get("torch") or pretend_torch()
    if torch.cuda.kernel_failed:
        torch.cuda.synchronize()
    if i == 3:
        torch.cuda.kernel_failed = True
        if how == "raises":
            raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")
    return {"ok": 1}


def late(i: int):
    """Imports its torch only when it runs, and would then compute on the CPU."""
    pretend_torch(works=False)
    return {"device": "cpu"}


class Fragile:
    """A stage on the second GPU: it works three times, then the card is gone."""

    def setup(self, device):
        if HERE == SECOND and Path("gone").exists():
            raise RuntimeError("No CUDA GPUs are available")

    def process(self, batch):
        time.sleep(0.02)
        if HERE == SECOND:
            with Path("flag").open("a") as flag:
                flag.write("x")
            if Path("flag").stat().st_size > 3:
                Path("gone").touch()
                raise RuntimeError("CUDA error: no CUDA-capable device is detected")
        return batch


class Poisoned:
    """One record breaks the context; those after it in the same process fail as well."""

    every = 1000

    def setup(self, device):
        pretend_torch()

    def process(self, batch):
        cuda = sys.modules["torch"].cuda
        cuda.synchronize()
        if any(record["x"] % self.every == 7 for record in batch):
            cuda.kernel_failed = True
            raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")
        return batch


class PoisonedOften(Poisoned):
    """One record of each chunk does."""

    every = 20


class BrokenForGood(Poisoned):
    """From row 31 on every record does, until the GPU is repaired."""

    def process(self, batch):
        if Path("repaired").exists() or batch[0]["x"] < 31:
            return batch
        sys.modules["torch"].cuda.kernel_failed = True
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")


class OnCpu:
    def setup(self, device):
        pretend_torch(works=False)

    def process(self, batch):
        return batch
