"""GPUs as a driver reports them, for the one stand-in of the driver, and a clock that is told."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pynvml

MIB = 1024 * 1024
LOST = pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)


@dataclass
class ToldClock:
    """Time passes only when somebody says so."""

    now_s: float = 1000.0

    def monotonic_s(self) -> float:
        return self.now_s

    def wall_s(self) -> float:
        return 1_700_000_000.0 + self.now_s


def h100(number: int, **changes: Any) -> dict[str, Any]:
    """An H100 under load, with one process."""
    return {
        "nvmlDeviceGetUUID": f"GPU-{number:04d}",
        "nvmlDeviceGetName": "NVIDIA H100 80GB HBM3",
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=81559 * MIB, used=(1000 + number) * MIB),
        "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=90 + number, memory=40),
        "nvmlDeviceGetPowerUsage": 400_000 + number,
        "nvmlDeviceGetEnforcedPowerLimit": 700_000,
        "nvmlDeviceGetTemperature": 60 + number,
        "nvmlDeviceGetClockInfo": lambda kind: {1: 1980, 2: 2619}[kind],
        "nvmlDeviceGetCurrentClocksEventReasons": 0x4,
        "nvmlDeviceGetPcieThroughput": lambda counter: {0: 2048, 1: 10240}[counter],
        "nvmlDeviceGetComputeRunningProcesses": [
            SimpleNamespace(pid=os.getpid(), usedGpuMemory=900 * MIB)
        ],
        "nvmlDeviceGetGraphicsRunningProcesses": [],
        "nvmlDeviceGetMigMode": [0, 0],
        **changes,
    }


def lost_after(num_answers: int, value: Any) -> Callable[..., Any]:
    """An answer of the driver that is ``value`` so often, and then that the GPU is lost."""
    left = iter(range(num_answers))

    def answer(*arguments: Any) -> Any:
        if next(left, None) is None:
            raise LOST
        return value

    return answer
