"""A sweep on a CUDA device: where it computes, memory that ends, broken contexts, a dead card."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from tests.programs import read_program
from tests.told import states, told

import muster
from muster.base.codec import to_json
from muster.base.settings import read_settings
from muster.devices.discovery import discover
from muster.devices.inventory import Device

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "gpu_tasks.py").write_text(read_program("gpu_tasks.py"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_worker_computes_on_the_one_card_that_it_sees() -> None:
    run = muster.sweep("gpu_tasks.py:product", grid={"i": range(4)}, devices="1")
    rows = run.results().to_pylist()
    assert [(row["state"], row["sum"], row["cards"]) for row in rows] == [("done", 256.0**3, 1)] * 4
    assert all(row["peak_mib"] < 4096 for row in rows)  # of the card, not of the process


def test_a_joint_call_without_memory_is_halved() -> None:
    run = muster.sweep("gpu_tasks.py:hungry", grid={"i": range(16)}, devices="1")
    assert states(run) == {"done": 16}
    assert {row["together"] for row in run.results().to_pylist()} == {4}


def test_what_is_too_much_for_two_workers_runs_alone() -> None:
    run = muster.sweep(
        "gpu_tasks.py:too_much_for_two", grid={"i": range(4)}, devices="1", per_gpu=2
    )
    assert states(run) == {"done": 4}


def test_small_tasks_are_packed_and_large_ones_are_not() -> None:
    many = muster.sweep(
        "gpu_tasks.py:small", grid={"i": range(40)}, max_gpus=1, per_gpu="auto", run_dir="small"
    )
    assert states(many) == {"done": 40}
    assert len({row["device"] for row in many.results().to_pylist()}) > 1
    few = muster.sweep(
        "gpu_tasks.py:too_much_for_two",
        grid={"i": range(6)}, max_gpus=1, per_gpu="auto", run_dir="large",
    )  # fmt: skip
    assert {row["device"] for row in few.results().to_pylist()} == {"cuda:0"}


def test_a_kernel_that_fails_after_its_task_has_returned_is_that_tasks_failure() -> None:
    run = muster.sweep("gpu_tasks.py:breaks", grid={"i": range(8)}, devices="1")
    [failed] = [row for row in run.results().to_pylist() if row["state"] != "done"]
    assert failed["i"] == 3
    assert "device-side assert" in failed["error"]


def test_a_card_that_no_program_can_use_gets_no_task(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver lists it, CUDA does not have it."""
    found = discover(read_settings())
    whole = found.devices[0]
    bogus = Device(index=99, uuid="GPU-00000000-dead-dead-dead-000000000000", name=whole.name)
    facts = dataclasses.replace(found, devices=(dataclasses.replace(whole, holders=()), bogus))
    (place / "facts.json").write_bytes(to_json(facts))
    monkeypatch.setenv("MUSTER_DEVICE_FACTS", str(place / "facts.json"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    run = muster.sweep("gpu_tasks.py:product", grid={"i": range(200)}, devices="2")
    assert states(run) == {"done": 200}
    assert {row["device"] for row in run.results().to_pylist()} == {"cuda:0"}
    for reason in told(run, "quarantined"):
        assert "torch cannot use the GPU of this worker" in reason
