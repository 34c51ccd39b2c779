"""The health that NVML tells, with the recorded driver in place of the library's functions."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from tests.unit.devices.fake_driver import Driver

from muster.devices import nvml
from muster.devices.nvml_health import GpuHealth, read_health, read_links


@pytest.fixture(autouse=True)
def _closed_library() -> Iterator[None]:
    nvml.open_library.cache_clear()
    yield
    nvml.open_library.cache_clear()


def card(uuid: str, **changes: Any) -> dict[str, Any]:
    ecc = {(0, 0): 7, (1, 0): 2, (1, 1): 5}

    def errors(kind: int, period: int) -> int:
        return ecc[kind, period]

    def link(number: int) -> int:
        if number > 2:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return int(number != 1)

    return {
        "nvmlDeviceGetUUID": uuid,
        "nvmlDeviceGetPciInfo": SimpleNamespace(busId="00000000:3B:00.0"),
        "nvmlDeviceGetTemperature": lambda sensor: 61,
        "nvmlDeviceGetTemperatureThreshold": lambda kind: {0: 92, 1: 89}[kind],
        "nvmlDeviceGetPowerUsage": 301500,
        "nvmlDeviceGetEnforcedPowerLimit": 350000,
        "nvmlDeviceGetPowerManagementDefaultLimit": 400000,
        "nvmlDeviceGetPerformanceState": 0,
        "nvmlDeviceGetCurrentClocksEventReasons": 0x08 | 0x40,
        "nvmlDeviceGetEccMode": [1, 1],
        "nvmlDeviceGetTotalEccErrors": errors,
        "nvmlDeviceGetRemappedRows": (3, 1, 1, 0),
        "nvmlDeviceGetCurrPcieLinkGeneration": 3,
        "nvmlDeviceGetMaxPcieLinkGeneration": 4,
        "nvmlDeviceGetCurrPcieLinkWidth": 8,
        "nvmlDeviceGetMaxPcieLinkWidth": 16,
        "nvmlDeviceGetNvLinkState": link,
        "nvmlDeviceGetNvLinkVersion": lambda number: 3,
        "nvmlDeviceGetPersistenceMode": 1,
        "nvmlDeviceGetComputeMode": 3,
        **changes,
    }


def test_everything_a_driver_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    Driver(card("GPU-a")).install(monkeypatch)
    (found,) = read_health()
    assert found == GpuHealth(
        index=0,
        uuid="GPU-a",
        pci_address="0000:3b:00.0",
        temperature_c=61,
        slowdown_temperature_c=89,
        power_w=301.5,
        power_limit_w=350.0,
        power_limit_default_w=400.0,
        performance_state=0,
        throttle=("hardware slowdown", "thermal (hardware)"),
        ecc_enabled=True,
        ecc_corrected=7,
        ecc_uncorrected=2,
        ecc_uncorrected_total=5,
        rows_pending=True,
        rows_failed=False,
        pcie_generation=3,
        pcie_generation_max=4,
        pcie_width=8,
        pcie_width_max=16,
        nvlinks=(True, False, True),
        nvlink_version=3,
        persistence=True,
        compute_mode="exclusive process",
    )


def test_what_a_card_does_not_tell_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    Driver({"nvmlDeviceGetUUID": "GPU-b"}).install(monkeypatch)
    assert read_health() == (GpuHealth(index=0, uuid="GPU-b"),)


def test_the_older_names_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    old = {
        "nvmlDeviceGetUUID": "GPU-c",
        "nvmlDeviceGetCurrentClocksThrottleReasons": 0x04,
        "nvmlDeviceGetRetiredPagesPendingStatus": 1,
    }
    Driver(old).install(monkeypatch)
    (found,) = read_health()
    assert (found.throttle, found.rows_pending, found.rows_failed) == (("power cap",), True, None)


def test_a_lost_gpu_has_no_health_and_the_others_have(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = {"broken": pynvml.NVML_ERROR_GPU_IS_LOST}
    Driver(card("GPU-a"), lost, card("GPU-c")).install(monkeypatch)
    assert [gpu.index for gpu in read_health()] == [0, 2]
    assert [(link.first, link.second) for link in read_links()] == [(0, 2)]


def test_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    def status(other: dict[str, Any], what: int) -> int:
        return {0: 2, 2: 5}[what]

    one = card(
        "GPU-a",
        nvmlDeviceGetTopologyCommonAncestor=lambda other: 50,
        nvmlDeviceGetP2PStatus=status,
    )
    Driver(one, card("GPU-b")).install(monkeypatch)
    (link,) = read_links()
    assert link.level == "between sockets"
    assert link.peer_read == "the GPU does not support it"
    assert link.is_nvlink is False


def test_without_a_driver_there_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    Driver(init=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND).install(monkeypatch)
    assert (read_health(), read_links()) == ((), ())
