"""What GPUs do to a sweep, on recorded GPUs: memory that ends, cards that die, broken contexts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.conftest import MusterCli
from tests.programs import read_program
from tests.told import states, told

import muster
from muster.base.codec import to_json
from muster.base.errors import SetupError
from muster.devices.inventory import Device, Inventory

pytestmark = pytest.mark.thorough


@pytest.fixture(autouse=True)
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two GPUs, GPU-0 and GPU-1, and the programs that use them."""
    for name in ("pretend_gpu.py", "no_cuda_task.py"):
        (tmp_path / name).write_text(read_program(name))
    devices = tuple(
        Device(
            index=i, uuid=f"GPU-{i}", name="Recorded", memory_total_mib=80_000, memory_used_mib=1
        )
        for i in range(2)
    )
    (tmp_path / "facts.json").write_bytes(to_json(Inventory(devices=devices)))
    monkeypatch.setenv("MUSTER_DEVICE_FACTS", str(tmp_path / "facts.json"))
    monkeypatch.setenv("MUSTER_LEASE_DIR", str(tmp_path / "leases"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_joint_call_without_memory_is_halved_with_its_memory_given_back() -> None:
    run = muster.sweep("pretend_gpu.py:hungry", grid={"i": range(8)}, devices="1")
    assert states(run) == {"done": 8}
    assert {row["together"] for row in run.results().to_pylist()} == {4}


def test_every_word_for_no_memory_gets_the_task_its_gpu_alone() -> None:
    run = muster.sweep("pretend_gpu.py:short_once", grid={"i": range(6)}, devices="1", per_gpu=2)
    assert states(run) == {"done": 6}
    table = {row["i"]: row["alone"] for row in run.results().to_pylist()}
    assert [table[i] for i in range(6)] == [0, 1, 1, 1, 0, 0]
    assert told(run, "quarantined") == []


def test_a_command_that_ran_out_of_memory_gets_its_gpu_alone(host: Path) -> None:
    (host / "train.sh").write_text(
        'if [ "$1" = 1 ] && mkdir tried 2>/dev/null; then\n'
        '  echo "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB" >&2; exit 1\n'
        "fi\n"
    )
    run = muster.sweep(
        ["sh", str(host / "train.sh"), "{i}"], grid={"i": [1, 2]}, devices="1", per_gpu=2
    )
    assert states(run) == {"done": 2}


@pytest.mark.parametrize("how", ["torch's words", "driver", "own words"])
def test_a_gpu_that_dies_fails_no_task(how: str, host: Path) -> None:
    run = muster.sweep("pretend_gpu.py:dies", grid={"i": range(40), "how": [how]}, devices="2")
    assert states(run) == {"done": 40}
    for reason in told(run, "quarantined"):
        assert reason.startswith("cuda:1: ")
    if how == "driver":  # asked before each start: not even one more task goes there
        assert (host / "flag").read_text() == "4"


@pytest.mark.parametrize("how", ["raises", "returns"])
def test_a_broken_context_is_its_own_tasks_fault(how: str) -> None:
    run = muster.sweep("pretend_gpu.py:poisons", grid={"i": range(8), "how": [how]}, devices="1")
    [failed] = [row for row in run.results().to_pylist() if row["state"] != "done"]
    assert failed["i"] == 3
    assert "illegal memory access" in failed["error"]


def test_a_worker_on_a_gpu_does_not_compute_on_the_cpu() -> None:
    with pytest.raises(SetupError) as refused:
        muster.sweep("no_cuda_task.py:work", grid={"i": range(3)}, devices="1", run_dir="r")
    assert "torch cannot use the GPU of this worker: The NVIDIA driver" in str(refused.value)
    assert "--devices cpu computes on the CPU" in str(refused.value)
    assert states(muster.Run("r")) == {"waiting": 3}


def test_nor_does_one_whose_task_brings_its_torch_later() -> None:
    with pytest.raises(SetupError, match="torch cannot use the GPU of this worker"):
        muster.sweep("pretend_gpu.py:late", grid={"i": range(3)}, devices="1", run_dir="r")
    assert states(muster.Run("r")) == {"waiting": 3}


def mapped(host: Path, stage: str, muster_cli: MusterCli, *words: str, code: int = 0) -> list[int]:
    """The values of the records that came out."""
    (host / "in.jsonl").write_text("".join(f'{{"x": {x}}}\n' for x in range(120)))
    flags = ["--input", "in.jsonl", "--output", "out.jsonl", "--batch-size", "4", *words]
    done = muster_cli("map", f"pretend_gpu.py:{stage}", *flags)
    assert done.returncode == code, done.stdout + done.stderr
    if code == 3:
        return [done.stderr.count("torch cannot use the GPU of this worker")]
    lines = (host / "out.jsonl").read_text().splitlines()
    return [json.loads(line)["x"] for line in lines]


def test_a_gpu_that_dies_costs_a_map_no_record(host: Path, muster_cli: MusterCli) -> None:
    words = ("--devices", "2", "--chunk-rows", "20")
    assert mapped(host, "Fragile", muster_cli, *words) == list(range(120))


def test_a_record_that_breaks_the_context_is_the_only_one_rejected(
    host: Path, muster_cli: MusterCli
) -> None:
    words = ("--devices", "1", "--chunk-rows", "40")
    made = mapped(host, "Poisoned", muster_cli, *words, code=1)
    assert made == [x for x in range(120) if x != 7]


def test_a_map_does_not_compute_on_the_cpu_either(host: Path, muster_cli: MusterCli) -> None:
    assert mapped(host, "OnCpu", muster_cli, "--devices", "1", code=3) != [0]


def test_a_broken_context_ends_no_process_that_is_not_a_workers(
    host: Path, muster_cli: MusterCli
) -> None:
    (host / "in.jsonl").write_text("".join(f'{{"x": {x}}}\n' for x in range(120)))
    flags = ["--input", "in.jsonl", "--output", "out.jsonl", "--batch-size", "4"]
    flags += ["--devices", "1", "--chunk-rows", "40", "--on", "inline", "--run-dir", "r"]
    done = muster_cli("map", "pretend_gpu.py:Poisoned", *flags)
    assert done.returncode in (1, 3), done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert (host / "r/events.jsonl").read_text().count("nothing runs on it in this process") == 1


def test_what_a_record_breaks_is_no_crash_and_strikes_no_gpu_off(
    host: Path, muster_cli: MusterCli
) -> None:
    words = ("--devices", "2", "--chunk-rows", "20", "--run-dir", "r")
    made = mapped(host, "PoisonedOften", muster_cli, *words, code=1)
    assert made == [x for x in range(120) if x % 20 != 7]
    bad = [json.loads(line) for line in (host / "r/errors.jsonl").read_text().splitlines()]
    assert sorted(record["row"] for record in bad) == [7, 27, 47, 67, 87, 107]
    assert {"the GPU context of the worker process broke 2 times" in r["reason"] for r in bad} == {
        True
    }
    events = (host / "r/events.jsonl").read_text()
    assert "quarantined" not in events


def test_the_only_gpu_that_every_record_breaks_ends_the_run_and_rejects_none(
    host: Path, muster_cli: MusterCli
) -> None:
    """It went on for ever, rejecting record after record."""
    (host / "in.jsonl").write_text("".join(f'{{"x": {x}}}\n' for x in range(120)))
    flags = ["--input", "in.jsonl", "--output", "out.jsonl", "--batch-size", "4", "--retries", "0"]
    flags += ["--devices", "1", "--chunk-rows", "40", "--run-dir", "r"]
    done = muster_cli("map", "pretend_gpu.py:BrokenForGood", *flags)
    assert done.returncode == 3, done.stdout + done.stderr
    said = "cuda:0: 8 GPU contexts in a row broke on it without a finished task between them; the "
    assert said in " ".join((host / "r/events.jsonl").read_text().split())
    assert "8 GPU contexts in a row broke" in done.stderr and "is saved" in done.stderr
    (host / "repaired").touch()
    again = muster_cli("map", "pretend_gpu.py:BrokenForGood", *flags)
    assert again.returncode == 0, again.stdout + again.stderr
    lines = (host / "out.jsonl").read_text().splitlines()
    assert [json.loads(line)["x"] for line in lines] == list(range(120))
