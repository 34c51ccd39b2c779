"""What the driver says about each GPU, with a recorded driver, and what recorded facts say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from tests.unit.devices.fake_driver import Driver
from tests.unit.monitor.recorded_gpus import LOST, MIB, h100, lost_after

from muster.base.settings import Settings
from muster.devices import nvml
from muster.devices.nvml_usage import throttle_reasons, usage_source


@pytest.fixture(autouse=True)
def _closed_library() -> Iterator[None]:
    nvml.open_library.cache_clear()
    yield
    nvml.open_library.cache_clear()


def test_a_busy_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    Driver(h100(0)).install(monkeypatch)
    (gpu,) = usage_source(Settings()).read()
    assert (gpu.label, gpu.uuid, gpu.name) == ("gpu0", "GPU-0000", "NVIDIA H100 80GB HBM3")
    assert gpu.utilisation_percent == 90.0
    assert (gpu.memory_used_mib, gpu.memory_total_mib) == (1000, 81559)
    assert (gpu.power_w, gpu.power_limit_w, gpu.temperature_c) == (400.0, 700.0, 60)
    assert (gpu.sm_clock_mhz, gpu.memory_clock_mhz) == (1980, 2619)
    assert gpu.throttle == ("power cap",)
    # NVML counts in KB/s: counter 1 is what the GPU receives, 0 what it sends.
    assert (gpu.pcie_receive_mib_s, gpu.pcie_send_mib_s) == (10.0, 2.0)
    (process,) = gpu.processes
    assert process.used_mib == 900
    assert process.command is not None
    assert gpu.lost is None


def test_a_quick_look_leaves_out_what_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    Driver(h100(0, nvmlDeviceGetPcieThroughput=asked.append)).install(monkeypatch)
    (gpu,) = usage_source(Settings()).read(quick=True)
    assert (asked, gpu.pcie_receive_mib_s, gpu.power_w) == ([], None, 400.0)


def test_each_figure_may_be_missing_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    Driver({"nvmlDeviceGetUUID": "GPU-a", "nvmlDeviceGetName": "GB10"}).install(monkeypatch)
    (gpu,) = usage_source(Settings()).read()
    known = {k: v for k, v in vars(gpu).items() if v is not None}
    assert known == {"index": 0, "uuid": "GPU-a", "name": "GB10", "processes": ()}


def test_an_older_driver_has_the_reasons_under_their_older_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unsupported = pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
    Driver(
        h100(
            0,
            nvmlDeviceGetCurrentClocksEventReasons=unsupported,
            nvmlDeviceGetCurrentClocksThrottleReasons=0x60,
        )
    ).install(monkeypatch)
    (gpu,) = usage_source(Settings()).read()
    assert gpu.throttle == ("thermal (software)", "thermal (hardware)")


@pytest.mark.parametrize(
    ("bits", "reasons"),
    [
        (0, ()),
        (0x1, ()),  # an idle GPU is not throttled
        (0x4, ("power cap",)),
        (0x88, ("hardware slowdown", "power brake")),
    ],
)
def test_throttle_reasons(bits: int, reasons: tuple[str, ...]) -> None:
    assert throttle_reasons(bits) == reasons


def test_a_gpu_that_is_lost_in_the_middle_stays_and_may_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = {"lost": False}

    def power() -> int:
        if state["lost"]:
            raise LOST
        return 300_000

    Driver(h100(0), h100(1, nvmlDeviceGetPowerUsage=power), h100(2)).install(monkeypatch)
    source = usage_source(Settings())
    assert [gpu.lost for gpu in source.read()] == [None, None, None]
    state["lost"] = True
    gpus = source.read()
    assert [gpu.label for gpu in gpus] == ["gpu0", "gpu1", "gpu2"]
    assert gpus[1].lost == "GPU is lost"
    assert (gpus[1].uuid, gpus[1].power_w, gpus[1].processes) == ("GPU-0001", None, ())
    assert gpus[2].power_w == 400.002
    state["lost"] = False
    assert source.read()[1].power_w == 300.0


def test_after_a_reset_the_gpu_is_looked_up_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's old handle stays dead; only a new one answers."""
    old = h100(0, nvmlDeviceGetPowerUsage=lost_after(1, 5000))
    Driver(old, h100(1)).install(monkeypatch)
    source = usage_source(Settings())
    assert source.read()[0].power_w == 5.0
    assert source.read()[0].lost == "GPU is lost"
    new = {"GPU-0000": h100(0, nvmlDeviceGetPowerUsage=7000), "GPU-0001": h100(1)}
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", new.__getitem__)
    assert source.read()[0].power_w == 7.0


def test_a_gpu_that_does_not_even_say_who_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    Driver(h100(0), {"broken": pynvml.NVML_ERROR_GPU_IS_LOST}).install(monkeypatch)
    gpus = usage_source(Settings()).read()
    assert [gpu.label for gpu in gpus] == ["gpu0", "gpu1"]
    assert gpus[1].lost == "GPU is lost"


def test_only_visible_gpus_are_watched_and_of_a_run_only_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Driver(*(h100(number) for number in range(4))).install(monkeypatch)
    labels = [gpu.label for gpu in usage_source(Settings(cuda_visible_devices="2,0")).read()]
    assert labels == ["gpu2", "gpu0"]
    (own,) = usage_source(Settings(), ["GPU-0003"]).read()
    assert own.label == "gpu3"


def test_a_run_on_the_cpu_does_not_ask_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    Driver(h100(0, nvmlDeviceGetName=lambda: asked.append("name"))).install(monkeypatch)
    assert usage_source(Settings(), ()).read() == ()
    assert asked == []


def test_instances_of_a_gpu_cut_by_mig(monkeypatch: pytest.MonkeyPatch) -> None:
    instance = {
        "nvmlDeviceGetUUID": "MIG-1",
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=9856 * MIB, used=5 * MIB),
        "nvmlDeviceGetGpuInstanceId": 7,
        "nvmlDeviceGetComputeInstanceId": 0,
    }
    cut = h100(
        0,
        nvmlDeviceGetMigMode=[1, 1],
        nvmlDeviceGetMaxMigDeviceCount=7,
        instances=[instance],
    )
    driver = Driver(cut)
    driver.install(monkeypatch)
    source = usage_source(Settings())
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", {"MIG-1": instance}.__getitem__)
    (gpu,) = source.read()
    assert (gpu.label, gpu.memory_used_mib, gpu.utilisation_percent) == ("gpu0:mig7", 5, None)


def test_a_driver_that_stops_working_loses_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    Driver(
        h100(0, nvmlDeviceGetMemoryInfo=lost_after(2, SimpleNamespace(total=1, used=1)))
    ).install(monkeypatch)
    source = usage_source(Settings())
    assert source.read()[0].lost is None
    assert source.read()[0].lost == "GPU is lost"


def facts(path: Path, *devices: dict[str, Any]) -> Settings:
    path.write_text(json.dumps({"devices": devices}))
    return Settings(device_facts=path)


def test_recorded_facts_are_replayed_as_far_as_they_go(tmp_path: Path) -> None:
    first = {"index": 0, "uuid": "GPU-a", "name": "A40", "memory_used_mib": 10}
    holder = {"pid": 7, "user": "ada", "used_mib": 9, "command": "python"}
    settings = facts(tmp_path / "f.json", {**first, "holders": [holder]})
    source = usage_source(settings)
    (gpu,) = source.read()
    assert (gpu.memory_used_mib, gpu.processes[0].user, gpu.power_w) == (10, "ada", None)
    facts(tmp_path / "f.json", {**first, "lost": "fell off the bus"})
    assert source.read()[0].lost == "fell off the bus"
    facts(tmp_path / "f.json")
    assert source.read()[0].lost == "it is no longer in the recorded facts"
