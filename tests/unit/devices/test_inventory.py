from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.base.codec import to_json
from muster.base.errors import SetupError
from muster.base.settings import Settings
from muster.devices.discovery import apply_visibility, discover
from muster.devices.inventory import Device, Holder, Inventory, from_json

FOUR = Inventory(
    devices=tuple(
        Device(
            index=index,
            uuid=f"GPU-{index}",
            name="NVIDIA H100 80GB HBM3",
            memory_total_mib=81559,
            memory_used_mib=4,
            compute_capability=(9, 0),
        )
        for index in range(4)
    ),
    driver_version="550.54.15",
    cuda_driver_version=(12, 4),
)

texts = st.none() | st.text(max_size=8)
numbers = st.none() | st.integers(0, 200_000)
holders = st.builds(
    Holder, pid=st.integers(1, 4_000_000), user=texts, used_mib=numbers, command=texts
)
devices = st.builds(
    Device,
    index=st.integers(0, 7),
    uuid=st.uuids().map(lambda value: f"GPU-{value}"),
    name=st.text(max_size=8),
    memory_total_mib=numbers,
    memory_used_mib=numbers,
    holders=st.lists(holders, max_size=2).map(tuple),
    compute_capability=st.none() | st.tuples(st.integers(3, 12), st.integers(0, 9)),
    lost=texts,
    parent_uuid=texts,
    gpu_instance=numbers,
    compute_instance=numbers,
)
inventories = st.builds(
    Inventory,
    devices=st.lists(devices, max_size=3, unique_by=lambda device: device.uuid).map(tuple),
    driver_version=texts,
    cuda_driver_version=st.none() | st.tuples(st.integers(10, 13), st.integers(0, 9)),
    problem=texts,
    cuda_visible_devices=texts,
    visibility_note=texts,
)


@given(inventories)
def test_facts_come_back_as_they_were(inventory: Inventory) -> None:
    assert from_json(to_json(inventory), "memory") == inventory


def test_what_is_left_out_is_not_known() -> None:
    data = b'{"devices": [{"index": 0, "uuid": "GPU-a", "name": "T4", "holders": [{"pid": 7}]}]}'
    (device,) = from_json(data, "memory").devices
    assert device == Device(index=0, uuid="GPU-a", name="T4", holders=(Holder(pid=7),))
    assert device.memory_used_mib is None


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"{", "Expecting property name"),
        (b"\xff", "can't decode"),
        (b"[]", "it is [], which is not an object"),
        (b'{"gpus": []}', "it has the unknown key 'gpus' (known: devices, driver_version"),
        (b'{"devices": {}}', "devices is {}, which is not a list"),
        (b'{"devices": [{"index": 0}]}', "devices[0] lacks uuid, name"),
        (
            b'{"devices": [{"index": "0", "uuid": "GPU-a", "name": "T4"}]}',
            "devices[0].index is '0', which is not a whole number",
        ),
        (
            b'{"devices": [{"index": 0, "uuid": "GPU-a", "name": "T4", "memory_used_mib": true}]}',
            "devices[0].memory_used_mib is true, which is not a whole number or null",
        ),
        (
            b'{"devices": [{"index": 0, "uuid": "GPU-a", "name": "T4", "holders": [{}]}]}',
            "devices[0].holders[0] lacks pid",
        ),
        (
            b'{"devices": [{"index": 0, "uuid": "GPU-a", "name": "T4", "kind": "tpu"}]}',
            "devices[0].kind is 'tpu', not one of cuda, cpu",
        ),
        (
            b'{"devices": [{"index": 0, "uuid": "", "name": "T4"}]}',
            "devices[0] has no uuid, which only a lost device may lack",
        ),
        (b'{"cuda_driver_version": [12]}', "cuda_driver_version must have 2 entries, not 1"),
        (
            b'{"devices": [{"index": 0, "uuid": "GPU-a", "name": "T4"},'
            b' {"index": 1, "uuid": "GPU-a", "name": "T4"}]}',
            "two devices have the uuid 'GPU-a'",
        ),
    ],
)
def test_malformed_facts_say_where(data: bytes, what: str) -> None:
    with pytest.raises(SetupError) as caught:
        from_json(data, "facts.json")
    text = str(caught.value)
    assert text.startswith("The device facts in facts.json cannot be used: ")
    assert what in text
    assert text.endswith(
        "Hint: correct the file, or unset MUSTER_DEVICE_FACTS to ask the driver instead."
    )


def test_discover_reads_the_recorded_facts_and_applies_visibility(tmp_path: Path) -> None:
    facts = tmp_path / "facts.json"
    facts.write_bytes(to_json(FOUR))
    found = discover(Settings(device_facts=facts, cuda_visible_devices="2,0"))
    assert [device.index for device in found.devices] == [2, 0]
    assert found.cuda_visible_devices == "2,0"
    assert found.visibility_note is None
    assert found.driver_version == "550.54.15"
    assert discover(Settings(device_facts=facts)) == FOUR


def test_a_missing_facts_file_says_what_named_it(tmp_path: Path) -> None:
    path = tmp_path / "none.json"
    with pytest.raises(SetupError) as caught:
        discover(Settings(device_facts=path))
    assert str(caught.value) == (
        f"Cannot read the device facts in {path}: No such file or directory. "
        "MUSTER_DEVICE_FACTS names that file as the list of this host's GPUs.\n"
        "Hint: correct the path, or unset MUSTER_DEVICE_FACTS to ask the driver instead."
    )


def test_a_cut_list_leaves_a_note() -> None:
    found = apply_visibility(FOUR, "1,7")
    assert [device.index for device in found.devices] == [1]
    assert found.visibility_note is not None
    assert "entry 2 ('7')" in found.visibility_note


def test_a_host_without_gpus_keeps_its_own_problem() -> None:
    found = apply_visibility(Inventory(problem="No driver."), "0")
    assert found == Inventory(problem="No driver.", cuda_visible_devices="0")


def test_lost_gpus_stay_rows_even_without_a_uuid() -> None:
    rows = [
        {"index": 0, "uuid": "", "name": "unknown GPU", "lost": "gone"},
        {"index": 1, "uuid": "", "name": "unknown GPU", "lost": "gone"},
    ]
    inventory = from_json(json.dumps({"devices": rows}).encode(), "memory")
    assert [device.index for device in apply_visibility(inventory, None).devices] == [0, 1]
    assert [device.index for device in apply_visibility(inventory, "1").devices] == [1]


def test_only_gpus_are_counted() -> None:
    cpu = Device(kind="cpu", index=0, uuid="cpu", name="EPYC")
    mixed = Inventory(devices=(cpu, *FOUR.devices))
    assert apply_visibility(mixed, "0").devices == FOUR.devices[:1]


def test_mps_runs_where_its_control_daemon_lives(tmp_path: Path) -> None:
    settings = Settings(mps_folder=tmp_path)
    pid = tmp_path / "nvidia-cuda-mps-control.pid"
    found = []
    for text in (None, str(os.getpid()), str(1 << 22), "?"):
        if text is not None:
            pid.write_text(text)
        found.append(discover(settings).has_mps)
    assert found == [False, True, False, False]
