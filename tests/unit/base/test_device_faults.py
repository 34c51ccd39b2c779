"""One place knows what the errors of accelerators say: memory gone, the device gone, or neither."""

from __future__ import annotations

import doctest

import pytest

from muster.base import device_faults
from muster.base.device_faults import (
    is_out_of_memory,
    looks_like_lost_device,
    looks_like_out_of_device_memory,
    looks_like_out_of_memory,
)

# What torch 2.6 to 2.13, Triton, cuBLAS, cuDNN, cuFFT, JAX and CuPy say.
DEVICE_MEMORY = [
    ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total"),
    ("OutOfMemoryError", "whatever it says"),
    ("RuntimeError", "HIP out of memory. Tried to allocate 20.00 MiB"),
    ("RuntimeError", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ("RuntimeError", "cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    ("RuntimeError", "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    ("RuntimeError", "cuFFT error: CUFFT_ALLOC_FAILED"),
    ("RuntimeError", "CUDA error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate`"),
    ("AcceleratorError", "CUDA error: out of memory\nCUDA kernel errors might be asynchronous"),
    ("RuntimeError", "CUDA driver error: out of memory"),
    ("RuntimeError", "Triton Error [CUDA]: out of memory"),
    ("CUDARuntimeError", "cudaErrorMemoryAllocation: out of memory"),
    ("CudaAPIError", "[2] Call to cuMemAlloc results in CUDA_ERROR_OUT_OF_MEMORY"),
    ("XlaRuntimeError", "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 bytes"),
]
HOST_MEMORY = [
    ("MemoryError", ""),
    ("RuntimeError", "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
    ("RuntimeError", "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: not enough memory: you"),
]
LOST = [
    "No CUDA GPUs are available",
    "CUDA unknown error - this may be due to an incorrectly set up environment",
    "CUDA driver initialization failed, you might not have a CUDA gpu.",
    "CUDA error: no CUDA-capable device is detected",
    "CUDA error: CUDA-capable device(s) is/are busy or unavailable",
    "all CUDA-capable devices are busy or unavailable",
    "CUDA driver error: unknown error",
    "GPU has fallen off the bus",
    "CUDA error: uncorrectable ECC error encountered",
]
NEITHER = [
    ("ValueError", "out of memory of earlier runs"),
    ("RuntimeError", "CUDA error: an illegal memory access was encountered"),
    ("RuntimeError", "CUDA error: device-side assert triggered"),
    ("OutOfResources", "out of resource: shared memory, Required: 140000, Hardware limit: 101376"),
    ("KeyError", "'loss'"),
    ("RuntimeError", "HTTP 503: model server busy or unavailable"),
    ("RuntimeError", "CUDA driver error: invalid argument"),
    ("RuntimeError", "printer driver initialization failed"),
]


@pytest.mark.parametrize(("name", "text"), DEVICE_MEMORY)
def test_memory_of_a_device_that_ran_out(name: str, text: str) -> None:
    assert looks_like_out_of_device_memory([name], text)
    assert looks_like_out_of_memory([name], text)
    assert not looks_like_lost_device(text)


@pytest.mark.parametrize(("name", "text"), HOST_MEMORY)
def test_memory_of_the_host_is_not_that_of_a_device(name: str, text: str) -> None:
    assert looks_like_out_of_memory([name], text)
    assert not looks_like_out_of_device_memory([name], text)


@pytest.mark.parametrize("text", LOST)
def test_a_device_that_is_gone_is_no_matter_of_memory(text: str) -> None:
    assert looks_like_lost_device(text)
    assert not looks_like_out_of_memory(["RuntimeError", "AcceleratorError"], text)


@pytest.mark.parametrize(("name", "text"), NEITHER)
def test_what_a_program_does_wrong_is_its_own(name: str, text: str) -> None:
    assert not looks_like_out_of_memory([name], text)
    assert not looks_like_lost_device(text)


def test_the_examples() -> None:
    assert doctest.testmod(device_faults).failed == 0


def test_an_error_whose_text_cannot_be_had_is_judged_by_its_name() -> None:
    class Textless(Exception):
        def __str__(self) -> str:
            raise ValueError("no text")

    class OutOfMemoryError(Textless):
        pass

    assert not is_out_of_memory(Textless())
    assert is_out_of_memory(OutOfMemoryError())
