"""``--per-gpu auto`` goes by the driver, by what tasks report, and by memory that ran out."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.farm.test_decide import Rig, gpus, tasks

from muster.api.start.options import SweepOptions
from muster.api.start.placing import slots_of, would_take
from muster.api.sweeps.housekeeping import PerGpuAuto
from muster.base.codec import to_json
from muster.base.settings import Settings
from muster.devices.inventory import Device, Inventory
from muster.farm.decisions import Decisions
from muster.farm.events import Capacity
from muster.farm.task import Outcome, SlotSpec
from muster.farm.view import Picture, RunView, WorkerLine

SLOTS = tuple(
    SlotSpec(slot_id=i, label=f"cuda:0/{i}" if i else "cuda:0", devices=("GPU-a",), kind="cuda")
    for i in range(8)
)


def settings_of(tmp_path: Path, **device: object) -> Settings:
    facts = tmp_path / "facts.json"
    fields = {"memory_total_mib": 80_000, "memory_used_mib": 0, **device}
    gpu = Device(index=0, uuid="GPU-a", name="NVIDIA A100", **fields)  # type: ignore[arg-type]
    facts.write_bytes(to_json(Inventory(devices=(gpu,))))
    return Settings(device_facts=facts)


def view(num_workers: int, **changes: object) -> RunView:
    def line(number: int, slot: str) -> WorkerLine:
        if number >= num_workers:
            return WorkerLine(slot, "off", "", None, None, "", 0)
        base = WorkerLine(slot, "running", "", None, None, "", 1, 1 << 22)
        return base._replace(**changes)  # type: ignore[arg-type]

    lines = tuple(line(number, slot.label) for number, slot in enumerate(SLOTS))
    return RunView("r", 9, 0, 0, 0, 0, 0, 0.0, None, None, "running", lines, ())


def test_what_tasks_report_is_enough_where_the_driver_lists_nobody(tmp_path: Path) -> None:
    packing = PerGpuAuto(settings_of(tmp_path), SLOTS)
    seen = [packing.sample(view(1, device_peak_mib=10_000.0)) for _ in range(4)]
    limits = [event.workers for [event] in seen[:3] if isinstance(event, Capacity)]
    assert limits == [2, 4, 6]  # 10,700 MiB each of 72,000
    assert seen[3] == []


def test_memory_that_ran_out_takes_workers_away_for_good(tmp_path: Path) -> None:
    packing = PerGpuAuto(settings_of(tmp_path), SLOTS)
    for _ in range(4):
        packing.sample(view(1, device_peak_mib=1_000.0))
    assert packing.sample(view(2, device_peak_mib=1_000.0, num_oom=1)) == [Capacity("GPU-a", 6)]
    assert packing.sample(view(2, device_peak_mib=1_000.0, num_oom=1)) == []
    assert packing.sample(view(3, device_peak_mib=1_000.0, num_oom=1)) == [Capacity("GPU-a", 5)]


def test_nothing_known_is_one_worker(tmp_path: Path) -> None:
    packing = PerGpuAuto(settings_of(tmp_path), SLOTS)
    assert packing.sample(view(1)) == [Capacity("GPU-a", 1)]
    assert packing.sample(view(1)) == []


def test_others_are_looked_at_again(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, memory_used_mib=72_000)
    packing = PerGpuAuto(settings, SLOTS)
    assert packing.sample(view(1, device_peak_mib=9_300.0)) == [Capacity("GPU-a", 1)]
    settings_of(tmp_path, memory_used_mib=10_000)
    assert packing.sample(view(1, device_peak_mib=9_300.0)) == [Capacity("GPU-a", 2)]


def test_a_gpu_that_was_taken_since_the_view_was_made_has_one_worker(tmp_path: Path) -> None:
    packing = PerGpuAuto(settings_of(tmp_path), SLOTS)
    packing.sample(view(1))
    packing.take([SlotSpec(slot_id=8, label="cuda:1", devices=("GPU-b",), kind="cuda")])
    assert packing.sample(view(1)) == [Capacity("GPU-b", 1)]


@pytest.mark.parametrize(("mode", "count"), [("exclusive process", 1), (None, 8)])
def test_an_exclusive_gpu_is_not_packed(tmp_path: Path, mode: str | None, count: int) -> None:
    found = would_take(SweepOptions(per_gpu="auto"), settings_of(tmp_path, compute_mode=mode))
    assert len(found.slots) == count


@pytest.mark.parametrize(("per_gpu", "num_sharing"), [("auto", 1), (3, 3), (1, 1)])
def test_a_worker_is_told_with_how_many_it_shares_from_the_start(
    tmp_path: Path, per_gpu: str | int, num_sharing: int
) -> None:
    options = SweepOptions(per_gpu=per_gpu)  # type: ignore[arg-type]
    slots = slots_of(would_take(options, settings_of(tmp_path)), options)
    assert {slot.num_sharing for slot in slots} == {num_sharing}


@pytest.mark.parametrize(("per_gpu", "num_oom"), [(2, 1), (1, 0)])
def test_a_task_without_memory_beside_nobody_says_nothing_about_packing(
    per_gpu: int, num_oom: int
) -> None:
    rig = Rig(gpus(1, per_gpu=per_gpu), tasks(4))
    rig.ready()
    picture = Picture("r", 4, 0.0)
    picture.note([], Decisions(starts=[(0, rig.worker_on(0))]), 1.0)
    picture.note([], rig.end(rig.worker_on(0), Outcome.DEVICE_OOM), 1.0)
    lines = picture.view(rig.scheduler, 1.0, "running").workers
    assert sum(line.num_oom for line in lines) == num_oom
