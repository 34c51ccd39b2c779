from __future__ import annotations

from pathlib import Path

import pytest

from muster.base.codec import to_json
from muster.base.settings import Settings
from muster.devices import nvml
from muster.devices.inventory import Device, Holder, Inventory
from muster.devices.packing import MemorySampler, total_held

HELD: dict[str, dict[int, int | None]] = {"GPU-a": {1: 100, 2: 50, 3: None}, "GPU-b": {1: 30}}


@pytest.mark.parametrize(
    ("pids", "uuids", "mib"),
    [
        ({1}, ["GPU-a"], 100),
        ({1, 2}, ["GPU-a"], 150),
        ({1}, ["GPU-a", "GPU-b"], 130),
        ({9}, ["GPU-a"], 0),
        (set(), ["GPU-a"], 0),
        ({1}, [], 0),
        ({1, 3}, ["GPU-a"], None),
        ({1}, ["GPU-a", "GPU-c"], None),
    ],
)
def test_total_held(pids: set[int], uuids: list[str], mib: int | None) -> None:
    assert total_held(pids, uuids, HELD) == mib


def test_the_sampler_reads_the_recorded_facts_anew_each_time(tmp_path: Path) -> None:
    facts = tmp_path / "facts.json"
    sampler = MemorySampler(Settings(device_facts=facts))
    for used_mib in (400, 900, None):
        holder = Holder(pid=41, used_mib=used_mib)
        device = Device(index=0, uuid="GPU-a", name="T4", holders=(holder,))
        facts.write_bytes(to_json(Inventory(devices=(device,))))
        assert sampler.used_by([41], ["GPU-a"]) == used_mib
        assert sampler.used_by([42], ["GPU-a"]) == 0
        assert sampler.used_by([41], ["GPU-b"]) is None


def test_a_lost_gpu_is_not_an_empty_one(tmp_path: Path) -> None:
    facts = tmp_path / "facts.json"
    facts.write_bytes(to_json(Inventory(devices=(Device(index=0, uuid="G", name="T4", lost="x"),))))
    assert MemorySampler(Settings(device_facts=facts)).used_by([41], ["G"]) is None


def test_without_a_driver_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    import pynvml

    def fail() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    nvml.open_library.cache_clear()
    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    assert MemorySampler(Settings()).used_by([41], ["GPU-a"]) is None
