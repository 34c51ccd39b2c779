from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.devices.discovery import visible
from muster.devices.inventory import Device

HOST = tuple(
    Device(index=index, uuid=uuid, name="T4")
    for index, uuid in enumerate(["GPU-aa11", "GPU-aa22", "GPU-bb33", "GPU-cc44"])
)
#: GPU 0 is cut into two instances, GPU 1 is whole.
CUT = (
    *(
        Device(
            index=0,
            uuid=uuid,
            name="T4",
            parent_uuid="GPU-aa11",
            gpu_instance=number,
            compute_instance=0,
        )
        for number, uuid in enumerate(["MIG-1111", "MIG-2222"], start=1)
    ),
    Device(index=1, uuid="GPU-bb33", name="T4"),
)


def seen(value: str | None, host: tuple[Device, ...] = HOST) -> list[str]:
    return [device.uuid for device in visible(value, host).devices]


@pytest.mark.parametrize(
    ("value", "numbers"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("  ", []),
        ("-1", []),
        ("-1,0", []),
        ("0", [0]),
        ("3,1", [3, 1]),
        (" 1, 2", [1, 2]),
        ("0,2,-1,1", [0, 2]),
        ("0,4,1", [0]),
        ("4", []),
        ("1gpu2,2x", [1, 2]),
        ("0,,1", [0]),
        ("0,", [0]),
        ("two", []),
        ("1,1", []),
        ("0,1,0", []),
        ("GPU-bb33,GPU-aa11", [2, 0]),
        ("GPU-b,GPU-c", [2, 3]),
        ("GPU-aa", []),
        ("GPU-bb33,GPU-zz,GPU-aa11", [2]),
        ("GPU-bb33,GPU-bb", []),
        ("GPU-bb33,1", [2]),
        ("GPU-bb33, GPU-aa11", [2]),
        ("0,GPU-bb33", [0]),
        ("MIG-1111", []),
        ("NoDevFiles", []),
    ],
)
def test_truth_table(value: str | None, numbers: list[int]) -> None:
    assert [device.index for device in visible(value, HOST).devices] == numbers


@pytest.mark.parametrize(
    ("value", "uuids"),
    [
        (None, ["MIG-1111", "MIG-2222", "GPU-bb33"]),
        ("0", ["MIG-1111", "MIG-2222"]),
        ("1,0", ["GPU-bb33", "MIG-1111", "MIG-2222"]),
        ("GPU-aa11", ["MIG-1111", "MIG-2222"]),
        ("MIG-2222", ["MIG-2222"]),
        ("MIG-GPU-aa11/2/0,MIG-1111", ["MIG-2222", "MIG-1111"]),
        ("MIG-GPU-aa11/9/0", []),
        ("MIG-11", []),
        ("MIG-2222,MIG-GPU-aa11/2/0", []),
        ("MIG-2222,GPU-bb33", ["MIG-2222"]),
    ],
)
def test_mig_instances(value: str | None, uuids: list[str]) -> None:
    assert seen(value, CUT) == uuids


@pytest.mark.parametrize("value", [None, "", "-1", "0,2", "0,-1,1", "GPU-bb33"])
def test_a_value_that_does_what_it_says_is_no_problem(value: str | None) -> None:
    assert visible(value, HOST).problem is None


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (
            "0,9,1",
            "CUDA_VISIBLE_DEVICES=0,9,1: entry 2 ('9') names no GPU of this host, whose GPUs are "
            "numbered 0 to 3, so CUDA ignores it and everything after it; 1 GPU is visible. "
            "Correct the list, or unset the variable.",
        ),
        (
            "1,1",
            "CUDA_VISIBLE_DEVICES=1,1: entry 2 ('1') names a GPU that is already in the list, and "
            "CUDA then shows none at all. Name each GPU once.",
        ),
        (
            "GPU-aa",
            "CUDA_VISIBLE_DEVICES=GPU-aa: entry 1 ('GPU-aa') is the beginning of more than one "
            "GPU's UUID, so CUDA ignores it and everything after it; 0 GPUs are visible. "
            "Correct the list, or unset the variable.",
        ),
        (
            "GPU-bb33,1",
            "CUDA_VISIBLE_DEVICES=GPU-bb33,1: entry 2 ('1') does not start with GPU- as the first "
            "entry does, so CUDA ignores it and everything after it; 1 GPU is visible. "
            "Correct the list, or unset the variable.",
        ),
        (
            "NoDevFiles",
            "CUDA_VISIBLE_DEVICES=NoDevFiles: SLURM gave this job no GPU. "
            "Ask for one when submitting, for example with --gres=gpu:1.",
        ),
    ],
)
def test_what_is_wrong_is_said(value: str, problem: str) -> None:
    assert visible(value, HOST).problem == problem


def test_a_host_without_devices_shows_none_whatever_the_value() -> None:
    assert visible("0", ()).devices == ()
    assert "this host has none" in (visible("0", ()).problem or "")


@given(st.text(alphabet="0123 ,-GPUMIabc/x", max_size=20))
def test_any_text_gives_distinct_devices_of_the_host(value: str) -> None:
    devices = visible(value, HOST).devices
    assert len(set(devices)) == len(devices)
    assert set(devices) <= set(HOST)


@given(st.lists(st.integers(0, 6), max_size=6, unique=True), st.integers(0, 6))
def test_a_shorter_list_shows_a_beginning_of_what_the_longer_shows(
    numbers: list[int], cut: int
) -> None:
    whole = seen(",".join(map(str, numbers)))
    part = seen(",".join(map(str, numbers[:cut])))
    assert whole[: len(part)] == part


@given(st.permutations(range(4)))
def test_numbers_and_uuids_mean_the_same(order: list[int]) -> None:
    assert seen(",".join(map(str, order))) == seen(",".join(HOST[i].uuid for i in order))
