from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.base.errors import PlacementError, UsageError
from muster.devices.inventory import (
    Device,
    DeviceRequest,
    Holder,
    Inventory,
    parse_devices,
    parse_gpu_ids,
)
from muster.devices.placement import Placement, busy_reason, place


def gpu(index: int, used_mib: int = 4, **changes: Any) -> Device:
    holders = (Holder(pid=100 + index, user="ada", used_mib=used_mib),) if used_mib > 4 else ()
    fields: dict[str, Any] = {
        "index": index,
        "uuid": f"GPU-{index}{index}",
        "name": "NVIDIA H100",
        "memory_total_mib": 80_000,
        "memory_used_mib": used_mib,
        "holders": holders,
        **changes,
    }
    return Device(**fields)


def host(*devices: Device, **changes: Any) -> Inventory:
    return Inventory(devices=devices, **changes)


FOUR = host(gpu(0), gpu(1), gpu(2), gpu(3), cuda_visible_devices="0,1,2,3")
MIXED = host(gpu(0, used_mib=9000), gpu(1), gpu(2, lost="GPU 2 does not answer"), gpu(3))
NO_GPU = host(problem="No NVIDIA driver was found on this host.")


def placed(request: DeviceRequest | str, inventory: Inventory, **changes: Any) -> Placement:
    options: dict[str, Any] = {
        "per_gpu": 1,
        "gpus_per_task": 1,
        "cpu_count": 16,
        "force": False,
        **changes,
    }
    request = parse_devices(request) if isinstance(request, str) else request
    return place(request, inventory, **options)


def labels(placement: Placement) -> list[str]:
    return [slot.label for slot in placement.slots]


@pytest.mark.parametrize(
    ("request_", "inventory", "options", "expected"),
    [
        ("auto", FOUR, {}, ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
        ("2", FOUR, {}, ["cuda:0", "cuda:1"]),
        ("3,1", FOUR, {}, ["cuda:3", "cuda:1"]),
        ("GPU-2,0", FOUR, {}, ["cuda:2", "cuda:0"]),
        ("auto", FOUR, {"gpus_per_task": 2}, ["cuda:0+1", "cuda:2+3"]),
        ("auto", FOUR, {"gpus_per_task": 3}, ["cuda:0+1+2"]),
        ("2", FOUR, {"per_gpu": 2}, ["cuda:0", "cuda:1", "cuda:0/1", "cuda:1/1"]),
        ("auto", MIXED, {}, ["cuda:1", "cuda:3"]),
        ("auto", MIXED, {"force": True}, ["cuda:0", "cuda:1", "cuda:3"]),
        ("2", MIXED, {}, ["cuda:1", "cuda:3"]),
        ("2", MIXED, {"force": True}, ["cuda:1", "cuda:3"]),
        ("3", MIXED, {"force": True}, ["cuda:0", "cuda:1", "cuda:3"]),
        ("4", MIXED, {}, ["cuda:1", "cuda:3"]),
        ("0,1", MIXED, {}, ["cuda:1"]),
        ("auto", FOUR, {"leased": {"GPU-00": "leased"}}, ["cuda:1", "cuda:2", "cuda:3"]),
        ("auto", FOUR, {"leased": {"GPU-00": "leased"}, "gpus_per_task": 2}, ["cuda:1+2"]),
        ("auto", NO_GPU, {"cpu_count": 3}, ["cpu:0", "cpu:1", "cpu:2"]),
        ("auto", host(gpu(0, used_mib=9000)), {"cpu_count": 1}, ["cpu:0"]),
        ("cpu", FOUR, {"cpu_count": 2}, ["cpu:0", "cpu:1"]),
        ("cpu:3", FOUR, {}, ["cpu:0", "cpu:1", "cpu:2"]),
    ],
)
def test_which_slots(
    request_: str, inventory: Inventory, options: dict[str, Any], expected: list[str]
) -> None:
    assert labels(placed(request_, inventory, **options)) == expected


@pytest.mark.parametrize(
    ("request_", "options", "threads", "memory_mib"),
    [
        ("auto", {}, 4, 80_000),
        ("auto", {"cpu_count": 3}, 1, 80_000),
        ("2", {"per_gpu": 4}, 2, 20_000),
        ("4", {"gpus_per_task": 2}, 8, 160_000),
        ("cpu", {}, 1, None),
        ("cpu:4", {}, 4, None),
        ("cpu:99", {}, 1, None),
    ],
)
def test_the_share_of_each_slot(
    request_: str, options: dict[str, Any], threads: int, memory_mib: int | None
) -> None:
    slots = placed(request_, FOUR, **options).slots
    assert {(slot.num_threads, slot.memory_mib) for slot in slots} == {(threads, memory_mib)}


def test_workers_see_their_gpus_by_uuid_and_cpu_workers_see_none() -> None:
    pair = placed("auto", FOUR, gpus_per_task=2).slots[1]
    assert (pair.kind, pair.device_uuids) == ("cuda", ("GPU-22", "GPU-33"))
    assert pair.visible_devices == "GPU-22,GPU-33"
    lone = placed("cpu", FOUR).slots[0]
    assert (lone.kind, lone.device_uuids, lone.visible_devices) == ("cpu", (), "")


def test_numbers_are_those_of_cuda_and_not_of_the_host() -> None:
    shown = host(gpu(6), gpu(4), cuda_visible_devices="6,4")
    (slot,) = placed(parse_gpu_ids("0"), shown).slots
    assert (slot.label, slot.device_uuids) == ("cuda:0", ("GPU-66",))


def test_unknown_memory_is_none() -> None:
    inventory = host(gpu(0, memory_total_mib=None, memory_used_mib=None))
    assert placed("auto", inventory).slots[0].memory_mib is None


def test_what_was_left_alone_is_said() -> None:
    skipped = placed("auto", MIXED).skipped
    assert [(item.device, item.reason) for item in skipped] == [
        ("cuda:0", "busy: pid 100 (ada) holds 9000 MiB"),
        ("cuda:2", "lost: GPU 2 does not answer"),
    ]
    leftover = placed("auto", FOUR, gpus_per_task=3).skipped
    assert [(item.device, item.reason) for item in leftover] == [
        ("cuda:3", "left over from groups of 3 GPUs")
    ]


def test_what_has_no_effect_is_noted() -> None:
    assert placed("cpu", FOUR, per_gpu=2).notes == ("--per-gpu 2 has no effect on CPU workers.",)
    assert placed("auto", host(gpu(0, used_mib=9000))).notes == (
        "No GPU is free, so the workers run on the CPU.",
    )
    assert placed("auto", host(gpu(0), visibility_note="The list is cut.")).notes == (
        "The list is cut.",
    )


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        (gpu(0), None),
        (gpu(0, used_mib=500), None),
        (gpu(0, used_mib=501), "busy: pid 100 (ada) holds 501 MiB"),
        (
            gpu(0, used_mib=700, holders=()),
            "busy: 700 MiB are held by processes that the driver does not list",
        ),
        (
            gpu(0, memory_used_mib=None, holders=(Holder(pid=7, used_mib=600),)),
            "busy: pid 7 (unknown user) holds 600 MiB",
        ),
        (gpu(0, memory_used_mib=None, holders=(Holder(pid=7),)), None),
        (
            gpu(0, used_mib=900, holders=(Holder(pid=7, user="bob"),)),
            "busy: pid 7 (bob) holds memory",
        ),
        (
            gpu(
                0,
                used_mib=5000,
                holders=tuple(Holder(pid=pid, user="b", used_mib=pid * 100) for pid in range(1, 6)),
            ),
            "busy: pid 5 (b) holds 500 MiB, pid 4 (b) holds 400 MiB, pid 3 (b) holds 300 MiB "
            "and 2 more processes",
        ),
    ],
)
def test_busy_reason(device: Device, reason: str | None) -> None:
    assert busy_reason(device) == reason


@pytest.mark.parametrize(
    ("request_", "inventory", "options", "message"),
    [
        (
            "16",
            FOUR,
            {"gpus_per_task": 2},
            "Cannot place 8 tasks of 2 GPUs: this host has 4 visible GPUs "
            "(CUDA_VISIBLE_DEVICES=0,1,2,3).\n"
            "Hint: use --gpus-per-task 1.",
        ),
        (
            "8",
            host(gpu(0)),
            {},
            "Cannot place 8 tasks of 1 GPU: this host has 1 visible GPU "
            "(CUDA_VISIBLE_DEVICES is not set).\n"
            "Hint: use --devices 1, or --per-gpu to share them.",
        ),
        (
            "1",
            NO_GPU,
            {},
            "Cannot place 1 task of 1 GPU: this host has no visible GPU "
            "(No NVIDIA driver was found on this host).\n"
            "Hint: write --devices cpu to run on the CPU.",
        ),
        (
            "auto",
            host(gpu(0)),
            {"gpus_per_task": 2},
            "Cannot place a task of 2 GPUs (--devices auto): this host has 1 visible GPU "
            "(CUDA_VISIBLE_DEVICES is not set).\n"
            "Hint: use --gpus-per-task 1.",
        ),
        (
            "0,7",
            FOUR,
            {},
            "--devices 0,7: there is no GPU 7; this host has 4 visible GPUs "
            "(CUDA_VISIBLE_DEVICES=0,1,2,3).\n"
            "Hint: they are numbered 0 to 3, in the order in which CUDA shows them.",
        ),
        (
            "GPU-",
            FOUR,
            {},
            "--devices GPU-: entry 1 ('GPU-') is neither a GPU number nor a UUID.\n"
            "Hint: write numbers (0,2,3) or UUIDs (GPU-8932f937,…), separated by commas.",
        ),
        (
            "GPU-9",
            host(gpu(0)),
            {},
            "--devices GPU-9: there is no GPU-9; this host has 1 visible GPU "
            "(CUDA_VISIBLE_DEVICES is not set).\n"
            "Hint: nvidia-smi -L lists the GPUs of this host with their UUIDs.",
        ),
        (
            "GPU-0",
            host(gpu(0, uuid="GPU-01"), gpu(1, uuid="GPU-02")),
            {},
            "--devices GPU-0: GPU-0 is the beginning of 2 UUIDs (cuda:0, cuda:1).\n"
            "Hint: write more of the UUID, or the GPU's number.",
        ),
        (
            "0,GPU-00",
            FOUR,
            {},
            "--devices 0,GPU-00: GPU-00 is cuda:0, which is already in the list.\n"
            "Hint: list each GPU once; --per-gpu 2 puts two workers on each.",
        ),
        (
            "0,2",
            MIXED,
            {},
            "Cannot place a task of 1 GPU (--devices 0,2): no GPU is free.\n"
            "  cuda:0: busy: pid 100 (ada) holds 9000 MiB\n"
            "  cuda:2: lost: GPU 2 does not answer\n"
            "Hint: wait (--wait), choose other GPUs, or use --force to run beside what is there.",
        ),
        (
            "GPU-22",
            MIXED,
            {"force": True},
            "Cannot place a task of 1 GPU (--devices GPU-22): no GPU is free.\n"
            "  cuda:2: lost: GPU 2 does not answer\n"
            "Hint: choose other GPUs, or write --devices cpu to run on the CPU.",
        ),
        (
            "0,1",
            MIXED,
            {"gpus_per_task": 2},
            "Cannot place a task of 2 GPUs (--devices 0,1): only 1 GPU can be used.\n"
            "  cuda:0: busy: pid 100 (ada) holds 9000 MiB\n"
            "Hint: wait (--wait), choose other GPUs, or use --force to run beside what is there.",
        ),
        (
            "3",
            FOUR,
            {"gpus_per_task": 2},
            "--devices 3 names 3 GPUs, which is not divisible by --gpus-per-task 2: "
            "1 would stay idle.\n"
            "Hint: ask for a multiple, or for --devices auto.",
        ),
        (
            "auto",
            FOUR,
            {"gpus_per_task": 2, "per_gpu": 2},
            "--per-gpu 2 shares a GPU between tasks and --gpus-per-task 2 gives a task several: "
            "the two cannot be combined.\n"
            "Hint: leave one of them out.",
        ),
        ("auto", FOUR, {"per_gpu": 0}, "--per-gpu must be at least 1, not 0."),
    ],
)
def test_what_cannot_be_placed_says_why(
    request_: str, inventory: Inventory, options: dict[str, Any], message: str
) -> None:
    with pytest.raises((PlacementError, UsageError)) as caught:
        placed(request_, inventory, **options)
    assert str(caught.value) == message


inventories = st.lists(
    st.tuples(st.sampled_from([4, 9000]), st.sampled_from([None, None, "gone"])), max_size=5
).map(
    lambda rows: host(
        *(gpu(index, used_mib=used, lost=lost) for index, (used, lost) in enumerate(rows))
    )
)
requests = st.one_of(
    st.just("auto"),
    st.integers(1, 6).map(str),
    st.lists(st.integers(0, 5), min_size=2, max_size=5, unique=True).map(
        lambda ids: ",".join(map(str, ids))
    ),
    st.integers(1, 6).map(lambda count: f"cpu:{count}"),
)


@given(
    inventory=inventories,
    request_=requests,
    per_gpu=st.integers(1, 3),
    gpus_per_task=st.integers(1, 3),
    cpu_count=st.integers(1, 9),
    force=st.booleans(),
    leased=st.sets(st.integers(0, 4)),
)
def test_whatever_is_asked_the_placement_is_sound(
    inventory: Inventory,
    request_: str,
    per_gpu: int,
    gpus_per_task: int,
    cpu_count: int,
    force: bool,
    leased: set[int],
) -> None:
    options: dict[str, Any] = {
        "per_gpu": per_gpu,
        "gpus_per_task": gpus_per_task,
        "cpu_count": cpu_count,
        "force": force,
        "leased": {f"GPU-{index}{index}": "leased" for index in leased},
    }
    try:
        result = placed(request_, inventory, **options)
    except (PlacementError, UsageError):
        return
    assert result == placed(request_, inventory, **options)
    assert result.slots
    assert [slot.slot_id for slot in result.slots] == list(range(len(result.slots)))
    assert len(set(labels(result))) == len(result.slots)
    uses = Counter(uuid for slot in result.slots for uuid in slot.device_uuids)
    assert all(count <= per_gpu for count in uses.values())
    lost = {device.uuid for device in inventory.devices if device.lost}
    taken = {f"GPU-{index}{index}" for index in leased}
    busy = {device.uuid for device in inventory.devices if busy_reason(device)}
    assert not uses.keys() & lost
    if not force:
        assert not uses.keys() & (busy | taken)
    for slot in result.slots:
        assert len(slot.device_uuids) == (gpus_per_task if slot.kind == "cuda" else 0)
        assert slot.num_threads >= 1
    if any(slot.kind == "cuda" for slot in result.slots):
        assert sum(slot.num_threads for slot in result.slots) <= max(cpu_count, len(result.slots))


EXACT = st.one_of(
    st.integers(1, 6).map(lambda count: parse_devices(str(count))),
    st.lists(st.integers(0, 5), min_size=1, max_size=5, unique=True).map(
        lambda ids: parse_gpu_ids(",".join(map(str, ids)))
    ),
)


@given(
    inventory=inventories, request_=EXACT, force=st.booleans(), leased=st.sets(st.integers(0, 4))
)
def test_a_gang_gets_what_it_asked_for_or_nothing(
    inventory: Inventory, request_: DeviceRequest, force: bool, leased: set[int]
) -> None:
    held = {f"GPU-{index}{index}": "leased" for index in leased}
    exact = dataclasses.replace(request_, is_exact=True)
    asked = len(request_.ids) or request_.count
    try:
        result = placed(exact, inventory, force=force, leased=held)
    except PlacementError:
        with contextlib.suppress(PlacementError):
            fewer = placed(request_, inventory, force=force, leased=held)
            assert len(fewer.slots) != asked
    else:
        assert len(result.slots) == asked


def test_who_is_in_the_way_of_a_gang_is_named() -> None:
    exact = dataclasses.replace(parse_gpu_ids("1,0,2"), is_exact=True)
    with pytest.raises(PlacementError) as caught:
        placed(exact, MIXED)
    text = str(caught.value)
    assert "Cannot start 3 ranks (--gpu-ids 1,0,2): 1 of the GPUs can be used (cuda:1)" in text
    assert "cuda:0: busy: pid 100 (ada) holds 9000 MiB" in text
    assert "cuda:2: lost: GPU 2 does not answer" in text
    assert "--force" in text


def slice_(index: int, **changes: Any) -> Device:
    return gpu(index, name="NVIDIA H100 MIG 3g.40gb", parent_uuid="GPU-p", **changes)


GANG = {"is_exact": True}


@pytest.mark.parametrize(
    ("request_", "inventory", "expected"),
    [
        (DeviceRequest(kind="auto", **GANG), host(slice_(0), slice_(1)), ["cuda:0"]),
        (DeviceRequest(kind="auto", **GANG), host(slice_(0), gpu(1), gpu(2)), ["cuda:1", "cuda:2"]),
        (DeviceRequest(kind="count", count=1, **GANG), host(slice_(0), slice_(1)), ["cuda:0"]),
        (
            DeviceRequest(kind="auto", **GANG),
            host(slice_(0, used_mib=9000), slice_(1)),
            ["cuda:1"],
        ),
        (DeviceRequest(kind="auto"), host(slice_(0), slice_(1)), ["cuda:0", "cuda:1"]),
    ],
)
def test_a_gang_has_one_mig_instance_and_tasks_have_one_each(
    request_: DeviceRequest, inventory: Inventory, expected: list[str]
) -> None:
    assert labels(placed(request_, inventory)) == expected


def test_several_mig_instances_in_one_process_are_refused() -> None:
    two = host(slice_(0), slice_(1))
    why = "cuda:1: a MIG instance: one process sees a single one of them"
    with pytest.raises(PlacementError, match=why):
        placed(DeviceRequest(kind="count", count=2, text="--devices 2", **GANG), two)
    with pytest.raises(PlacementError, match=why):
        placed("auto", two, gpus_per_task=2)


def test_what_this_process_and_its_parents_hold_is_no_reason_to_leave_a_gpu_alone() -> None:
    mine = gpu(0, used_mib=620)
    assert labels(placed("1", host(mine), own_pids={100})) == ["cuda:0"]
    beside = dataclasses.replace(
        mine, memory_used_mib=9620, holders=(*mine.holders, Holder(pid=7, used_mib=9000))
    )
    assert busy_reason(beside, own_pids={100}) == "busy: pid 7 (unknown user) holds 9000 MiB"
    hidden = dataclasses.replace(mine, holders=(Holder(pid=100, used_mib=None),))
    assert busy_reason(hidden, own_pids={100}) is None
    assert busy_reason(hidden) is not None


def test_an_exclusive_gpu_takes_one_worker_unless_mps_serves_it() -> None:
    alone = gpu(0, compute_mode="exclusive process")
    assert labels(placed("auto", host(alone))) == ["cuda:0"]
    with pytest.raises(PlacementError, match="cuda:0 is in compute mode EXCLUSIVE_PROCESS"):
        placed("auto", host(alone), per_gpu=2)
    shared = placed("auto", host(alone, has_mps=True), per_gpu=2)
    assert labels(shared) == ["cuda:0", "cuda:0/1"]
    assert shared.notes == ("NVIDIA MPS runs here: the workers of a GPU compute side by side.",)


def test_a_gpu_that_no_program_may_use_is_left_alone() -> None:
    forbidden = gpu(0, compute_mode="prohibited")
    assert labels(placed("auto", host(forbidden, gpu(1)))) == ["cuda:1"]
