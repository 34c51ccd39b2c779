"""The reading of NVML, with a recorded driver in place of the library's own functions."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from tests.unit.devices.fake_driver import Driver

from muster.devices import nvml

MIB = 1024 * 1024


@pytest.fixture(autouse=True)
def _closed_library() -> Iterator[None]:
    nvml.open_library.cache_clear()
    yield
    nvml.open_library.cache_clear()


def process(pid: int, used_mib: int | None) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, usedGpuMemory=None if used_mib is None else used_mib * MIB)


def healthy(uuid: str, **changes: Any) -> dict[str, Any]:
    return {
        "nvmlDeviceGetUUID": uuid,
        "nvmlDeviceGetName": "NVIDIA H100 80GB HBM3",
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=81559 * MIB, used=1204 * MIB),
        "nvmlDeviceGetCudaComputeCapability": (9, 0),
        "nvmlDeviceGetComputeRunningProcesses": [process(os.getpid(), 1200)],
        "nvmlDeviceGetGraphicsRunningProcesses": [],
        "nvmlDeviceGetMigMode": [0, 0],
        **changes,
    }


def test_a_healthy_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    Driver(healthy("GPU-a")).install(monkeypatch)
    found = nvml.read_inventory()
    (device,) = found.devices
    assert (found.driver_version, found.cuda_driver_version, found.problem) == (
        "550.54.15",
        (12, 4),
        None,
    )
    assert (device.uuid, device.name, device.lost) == ("GPU-a", "NVIDIA H100 80GB HBM3", None)
    assert (device.memory_total_mib, device.memory_used_mib) == (81559, 1204)
    assert device.compute_capability == (9, 0)
    (holder,) = device.holders
    assert (holder.pid, holder.used_mib) == (os.getpid(), 1200)
    assert holder.user is not None
    assert holder.command is not None


def test_each_field_may_fail_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    Driver({"nvmlDeviceGetUUID": "GPU-a", "nvmlDeviceGetName": "GB10"}).install(monkeypatch)
    (device,) = nvml.read_inventory().devices
    assert (device.uuid, device.name, device.lost) == ("GPU-a", "GB10", None)
    assert (device.memory_total_mib, device.memory_used_mib) == (None, None)
    assert (device.compute_capability, device.holders) == (None, ())


@pytest.mark.parametrize(
    "broken",
    [
        {"broken": pynvml.NVML_ERROR_GPU_IS_LOST},
        {
            "nvmlDeviceGetUUID": "GPU-b",
            "nvmlDeviceGetMemoryInfo": pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST),
        },
        {"nvmlDeviceGetUUID": pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)},
    ],
)
def test_a_lost_gpu_stays_a_row(monkeypatch: pytest.MonkeyPatch, broken: dict[str, Any]) -> None:
    Driver(healthy("GPU-a"), broken, healthy("GPU-c")).install(monkeypatch)
    devices = nvml.read_inventory().devices
    assert [device.index for device in devices] == [0, 1, 2]
    assert [device.lost is None for device in devices] == [True, False, True]
    assert devices[1].lost == (
        "GPU 1 does not answer (GPU is lost); it needs a reset or a reboot, and the kernel log "
        "(dmesg | grep Xid) says what happened"
    )


def test_instances_stand_in_the_place_of_a_gpu_cut_by_mig(monkeypatch: pytest.MonkeyPatch) -> None:
    instance = {
        "nvmlDeviceGetUUID": "MIG-1",
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=9856 * MIB, used=0),
        "nvmlDeviceGetGpuInstanceId": 7,
        "nvmlDeviceGetComputeInstanceId": 0,
    }
    cut = healthy(
        "GPU-a",
        nvmlDeviceGetMigMode=[1, 1],
        nvmlDeviceGetMaxMigDeviceCount=7,
        instances=[instance, {**instance, "nvmlDeviceGetUUID": "MIG-2"}],
    )
    Driver(cut, healthy("GPU-b")).install(monkeypatch)
    devices = nvml.read_inventory().devices
    assert [(device.index, device.uuid) for device in devices] == [
        (0, "MIG-1"),
        (0, "MIG-2"),
        (1, "GPU-b"),
    ]
    assert (devices[0].parent_uuid, devices[0].gpu_instance, devices[0].compute_instance) == (
        "GPU-a",
        7,
        0,
    )
    assert devices[0].compute_capability == (9, 0)
    assert devices[0].name == "NVIDIA H100 80GB HBM3 (MIG)"


def test_mig_without_instances_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    Driver(
        healthy(
            "GPU-a", nvmlDeviceGetMigMode=[1, 1], nvmlDeviceGetMaxMigDeviceCount=7, instances=[]
        )
    ).install(monkeypatch)
    (device,) = nvml.read_inventory().devices
    assert device.lost == (
        "GPU 0 is in MIG mode but has no instance; create one with nvidia-smi mig"
    )


@pytest.mark.parametrize(
    ("code", "beginning"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "No NVIDIA driver was found on this host"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "The NVIDIA driver is installed but not loaded"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "The NVIDIA driver was updated while an older"),
        (pynvml.NVML_ERROR_NO_PERMISSION, "The NVIDIA driver does not start (Insufficient Perm"),
    ],
)
def test_no_driver_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, code: int, beginning: str
) -> None:
    Driver(init=code).install(monkeypatch)
    found = nvml.read_inventory()
    assert found.devices == ()
    assert (found.problem or "").startswith(beginning)
    assert nvml.process_memory_mib(["GPU-a"]) == {}


def test_a_driver_without_gpus_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    Driver().install(monkeypatch)
    assert nvml.read_inventory().problem == ("The NVIDIA driver is loaded, but it reports no GPU.")


def test_process_memory_tells_unknown_from_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    Driver(
        healthy(
            "GPU-a",
            nvmlDeviceGetComputeRunningProcesses=[process(7, 300), process(8, None)],
            nvmlDeviceGetGraphicsRunningProcesses=[process(7, 300), process(9, 20)],
        ),
        healthy("GPU-b", nvmlDeviceGetComputeRunningProcesses=[]),
        {"nvmlDeviceGetUUID": "GPU-c"},
    ).install(monkeypatch)
    assert nvml.process_memory_mib(["GPU-a", "GPU-b", "GPU-c", "GPU-d"]) == {
        "GPU-a": {7: 300, 8: None, 9: 20},
        "GPU-b": {},
    }


def test_an_old_driver_is_asked_in_the_old_way(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = healthy(
        "GPU-a",
        nvmlDeviceGetComputeRunningProcesses=pynvml.NVMLLibraryMismatchError("old"),
        nvmlDeviceGetComputeRunningProcesses_v2=[process(7, 300)],
    )
    Driver(handle).install(monkeypatch)
    assert nvml.process_memory_mib(["GPU-a"]) == {"GPU-a": {7: 300}}


def test_a_gpu_that_the_control_group_hides_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = {"broken": pynvml.NVML_ERROR_NO_PERMISSION}
    Driver(hidden, healthy("GPU-b")).install(monkeypatch)
    found = nvml.read_inventory()
    assert [(device.index, device.uuid) for device in found.devices] == [(1, "GPU-b")]


def test_whether_a_gpu_still_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
    Driver(healthy("GPU-a"), healthy("GPU-b", nvmlDeviceGetMemoryInfo=gone)).install(monkeypatch)
    assert nvml.why_lost("GPU-a") == ""
    assert "GPU GPU-b does not answer" in nvml.why_lost("GPU-b")
    assert "the driver has no GPU GPU-c any more" in nvml.why_lost("GPU-c")
    assert nvml.memory_used_mib("GPU-a") == 1204
    assert nvml.memory_used_mib("GPU-b") is None


def test_the_compute_mode_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    Driver(healthy("GPU-a", nvmlDeviceGetComputeMode=3), healthy("GPU-b")).install(monkeypatch)
    modes = [device.compute_mode for device in nvml.read_inventory().devices]
    assert modes == ["exclusive process", None]
