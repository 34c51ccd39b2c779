"""A recorded driver in place of NVML's own functions: the one stand-in, shared by all tests."""

from __future__ import annotations

from typing import Any

import pynvml
import pytest


class Driver:
    """What a driver says: one dictionary per handle, function name to value, error or function.

    A function gets the arguments after the handle. What no handle names is not supported.
    """

    def __init__(self, *handles: dict[str, Any], init: int | None = None) -> None:
        self.handles = handles
        self.init = init

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def initialise() -> None:
            if self.init is not None:
                raise pynvml.NVMLError(self.init)

        def by_index(index: int) -> dict[str, Any]:
            handle = self.handles[index]
            if "broken" in handle:
                raise pynvml.NVMLError(handle["broken"])
            return handle

        def by_uuid(uuid: str) -> dict[str, Any]:
            for handle in self.handles:
                if handle.get("nvmlDeviceGetUUID") == uuid:
                    return handle
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

        def by_mig_index(handle: dict[str, Any], index: int) -> dict[str, Any]:
            instances: list[dict[str, Any]] = handle["instances"]
            if index >= len(instances):
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
            return instances[index]

        def answer(name: str) -> Any:
            def function(handle: dict[str, Any], *arguments: Any) -> Any:
                value = handle.get(name, pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED))
                if isinstance(value, Exception):
                    raise value
                return value(*arguments) if callable(value) else value

            return function

        functions = {
            "nvmlInit": initialise,
            "nvmlDeviceGetCount": lambda: len(self.handles),
            "nvmlSystemGetDriverVersion": lambda: "550.54.15",
            "nvmlSystemGetCudaDriverVersion": lambda: 12040,
            "nvmlDeviceGetHandleByIndex": by_index,
            "nvmlDeviceGetHandleByUUID": by_uuid,
            "nvmlDeviceGetMigDeviceHandleByIndex": by_mig_index,
        }
        asked = {name for handle in self.handles for name in handle if name.startswith("nvml")}
        for name in (
            *sorted(asked),
            "nvmlDeviceGetUUID",
            "nvmlDeviceGetName",
            "nvmlDeviceGetMemoryInfo",
            "nvmlDeviceGetCudaComputeCapability",
            "nvmlDeviceGetMigMode",
            "nvmlDeviceGetComputeMode",
            "nvmlDeviceGetMaxMigDeviceCount",
            "nvmlDeviceGetGpuInstanceId",
            "nvmlDeviceGetComputeInstanceId",
            "nvmlDeviceGetComputeRunningProcesses",
            "nvmlDeviceGetComputeRunningProcesses_v2",
            "nvmlDeviceGetGraphicsRunningProcesses",
            "nvmlDeviceGetGraphicsRunningProcesses_v2",
        ):
            functions[name] = answer(name)
        for name, function in functions.items():
            monkeypatch.setattr(pynvml, name, function)
