"""What torch says of itself and of the devices it sees."""

from __future__ import annotations

import warnings
from typing import Any

from muster.doctor.probes.report import Tell, one_line, progress


def main(words: list[str], tell: Tell) -> None:
    progress("importing torch")
    import torch

    value: dict[str, Any] = {
        "version": str(torch.__version__),
        "cuda_build": torch.version.cuda,
        "hip_build": torch.version.hip,
        "cpu_threads": torch.get_num_threads(),
    }
    value |= _distributed()
    tell(value)
    progress("starting the accelerator")
    value |= _accelerator(torch)
    tell(value)
    if torch.cuda.is_available():
        progress("asking for the devices")
        value |= _cuda(torch)
        tell(value)


def _distributed() -> dict[str, Any]:
    import torch.distributed as dist

    if not dist.is_available():
        return {"is_distributed": False, "backends": []}
    known = {
        "gloo": dist.is_gloo_available,
        "nccl": dist.is_nccl_available,
        "mpi": dist.is_mpi_available,
        "ucc": dist.is_ucc_available,
    }
    backends = [name for name, is_available in known.items() if is_available()]
    if getattr(dist, "is_xccl_available", lambda: False)():
        backends.append("xccl")
    return {"is_distributed": True, "backends": backends}


def _accelerator(torch: Any) -> dict[str, Any]:
    """``torch.accelerator`` names CUDA, ROCm (as cuda), XPU and MPS alike."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        is_cuda = torch.cuda.is_available()
        count = torch.cuda.device_count()
        # Without the check a build for XPU would name it on a host that has none.
        is_there = torch.accelerator.is_available()
        accelerator = torch.accelerator.current_accelerator() if is_there else None
    value: dict[str, Any] = {
        "is_cuda_available": is_cuda,
        "device_count": count,
        "accelerator": None if accelerator is None else accelerator.type,
        "accelerator_count": torch.accelerator.device_count() if is_there else 0,
    }
    if said and not is_cuda:
        value["cuda_error"] = str(said[-1].message).split("\n")[0][:400]
    return value


def _cuda(torch: Any) -> dict[str, Any]:
    value: dict[str, Any] = {"arch_list": torch.cuda.get_arch_list()}
    indices = range(torch.cuda.device_count())
    try:
        value["device_names"] = [torch.cuda.get_device_name(index) for index in indices]
        value["capabilities"] = [torch.cuda.get_device_capability(index) for index in indices]
        if torch.distributed.is_nccl_available():
            value["nccl_version"] = ".".join(map(str, torch.cuda.nccl.version()))
    except Exception as error:  # whatever it is, it is what a program would meet
        value["cuda_error"] = one_line(error)
    return value
