"""GPU placement end to end on recorded facts: real workers, leases and environment variables."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.conftest import MusterCli

import muster
from muster.base.codec import to_json
from muster.base.errors import PlacementError
from muster.base.settings import read_settings
from muster.devices.inventory import Device, Holder, Inventory
from muster.devices.leases import Lease, acquire

#: How long a worker takes to start is nobody's business: what needs several of them waits for them.
TARGET = """
import os, time
from pathlib import Path

def until(ready):
    limit = time.monotonic() + 120
    while not ready():
        assert time.monotonic() < limit, "it did not happen in time"
        time.sleep(0.01)

def begun(ctx):
    place = Path("begun", ctx.run)
    place.mkdir(parents=True, exist_ok=True)
    (place / str(os.getpid())).touch()
    return len(os.listdir(place))

def f(i: int, ctx, others: int = 1, go: str = "."):
    seen = os.environ["CUDA_VISIBLE_DEVICES"]
    until(lambda: begun(ctx) >= others and os.path.exists(go))
    workers = os.environ["MUSTER_WORKERS_PER_GPU"]
    return {"seen": seen, "device": ctx.device, "pid": os.getpid(), "workers": workers}

def broken(i: int):
    seen = os.environ["CUDA_VISIBLE_DEVICES"]
    if seen == "GPU-1":
        Path(f"failed-{i}").touch()
        time.sleep(0.05)
        raise RuntimeError("this device is broken")
    until(lambda: len(list(Path().glob("failed-*"))) >= 3)
    return {"seen": seen}

def packed(i: int, ctx):
    time.sleep(0.2 if begun(ctx) < 3 else 0)
    return {}
"""


def facts(num_gpus: int, holders: dict[int, tuple[Holder, ...]] | None = None) -> bytes:
    held = holders or {}
    return to_json(
        Inventory(
            devices=tuple(
                Device(
                    index=i,
                    uuid=f"GPU-{i}",
                    name="Recorded GPU",
                    memory_total_mib=80_000,
                    memory_used_mib=sum(h.used_mib or 0 for h in held.get(i, ())),
                    holders=held.get(i, ()),
                )
                for i in range(num_gpus)
            )
        )
    )


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "target.py").write_text(TARGET)
    (tmp_path / "facts.json").write_bytes(facts(3))
    monkeypatch.setenv("MUSTER_DEVICE_FACTS", str(tmp_path / "facts.json"))
    monkeypatch.setenv("MUSTER_LEASE_DIR", str(tmp_path / "leases"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rows(run: muster.Run) -> list[dict[str, object]]:
    table: list[dict[str, object]] = run.results().to_pylist()
    return table


def test_each_worker_sees_one_gpu_by_its_uuid(host: Path) -> None:
    run = muster.sweep("target.py:f", grid={"i": range(12), "others": [3]})
    assert {row["seen"] for row in rows(run)} == {"GPU-0", "GPU-1", "GPU-2"}
    assert {row["metric_device"] for row in rows(run)} == {"cuda:0"}
    labels = {(row["seen"], row["device"]) for row in rows(run)}
    assert labels == {("GPU-0", "cuda:0"), ("GPU-1", "cuda:1"), ("GPU-2", "cuda:2")}


@pytest.mark.parametrize("per_gpu", [1, 2])
def test_a_worker_knows_how_many_share_its_gpu(host: Path, per_gpu: int) -> None:
    run = muster.sweep("target.py:f", grid={"i": range(4)}, per_gpu=per_gpu)
    assert {row["workers"] for row in rows(run)} == {str(per_gpu)}


def test_a_task_with_two_gpus_sees_both(host: Path) -> None:
    run = muster.sweep("target.py:f", grid={"i": range(4)}, gpus_per_task=2)
    assert {row["seen"] for row in rows(run)} == {"GPU-0,GPU-1"}


def test_workers_share_a_gpu(host: Path) -> None:
    run = muster.sweep("target.py:f", grid={"i": range(12), "others": [3]}, max_gpus=1, per_gpu=3)
    assert {row["seen"] for row in rows(run)} == {"GPU-0"}
    assert len({row["pid"] for row in rows(run)}) == 3


def test_a_busy_gpu_is_left_alone_unless_forced(host: Path) -> None:
    holder = Holder(pid=4711, user="bob", used_mib=9000)
    (host / "facts.json").write_bytes(facts(2, {1: (holder,)}))
    run = muster.sweep("target.py:f", grid={"i": range(4)}, run_dir="a")
    assert {row["seen"] for row in rows(run)} == {"GPU-0"}
    both = {"i": range(8), "others": [2]}
    run = muster.sweep("target.py:f", grid=both, run_dir="b", force=True)
    assert {row["seen"] for row in rows(run)} == {"GPU-0", "GPU-1"}


def test_two_runs_on_a_host_do_not_share_a_gpu(host: Path) -> None:
    call = (
        "import muster; muster.sweep('target.py:f', grid={'i': range(4), 'go': ['go']}, "
        "devices='2', run_dir='first')"
    )
    first = subprocess.Popen([sys.executable, "-c", call])
    try:
        while len(list((host / "leases").glob("*.claim"))) < 2:
            assert first.poll() is None
            time.sleep(0.02)
        run = muster.sweep("target.py:f", grid={"i": range(4)}, run_dir="second")
    finally:
        (host / "go").touch()
        code = first.wait()
    assert code == 0
    first_seen = {row["seen"] for row in rows(muster.Run("first"))}
    assert first_seen.isdisjoint({row["seen"] for row in rows(run)})


def test_a_gpu_that_fails_everything_is_quarantined_and_its_tasks_run_elsewhere(
    host: Path,
) -> None:
    run = muster.sweep("target.py:broken", grid={"i": range(20)}, devices="2")
    table = rows(run)
    assert {row["state"] for row in table} == {"done"}
    assert {row["seen"] for row in table} == {"GPU-0"}
    events = [json.loads(line) for line in run.folder.events.read_text().splitlines()]
    quarantined = [event["text"] for event in events if event["event"] == "quarantined"]
    assert len(quarantined) == 1
    assert quarantined[0].startswith("cuda:1: it failed")
    assert "3 tasks" in quarantined[0]
    assert "this device is broken" in quarantined[0]


def test_packing_follows_the_memory_that_the_driver_shows(host: Path) -> None:
    """One worker at first; 20,000 MiB each of 80,000 leave room for three (10 % headroom)."""
    stop = threading.Event()

    def driver() -> None:
        while not stop.is_set():
            status = host / "run" / "status.json"
            try:
                workers = json.loads(status.read_bytes())["workers"]
            except (OSError, ValueError):
                workers = []
            pids = [w["pid"] for w in workers if w["pid"]]
            held = tuple(Holder(pid=pid, used_mib=20_000) for pid in pids)
            text = facts(1).decode()
            if held:
                record = json.loads(text)
                record["devices"][0]["holders"] = [
                    {"pid": h.pid, "user": None, "used_mib": h.used_mib, "command": None}
                    for h in held
                ]
                text = json.dumps(record)
            beside = host / "facts.new"
            beside.write_text(text)
            beside.replace(host / "facts.json")
            time.sleep(0.05)

    (host / "facts.json").write_bytes(facts(1))
    thread = threading.Thread(target=driver)
    thread.start()
    try:
        grid = {"i": range(1000)}
        run = muster.sweep("target.py:packed", grid=grid, per_gpu="auto", run_dir="run")
    finally:
        stop.set()
        thread.join()
    workers_seen = {row["device"] for row in rows(run)}
    assert {row["state"] for row in rows(run)} == {"done"}
    assert workers_seen == {"cuda:0", "cuda:0/1", "cuda:0/2"}


def test_more_gpus_than_there_are(host: Path) -> None:
    with pytest.raises(PlacementError, match="this host has 3 visible GPUs"):
        muster.sweep("target.py:f", grid={"i": [1]}, devices="5")


@pytest.mark.parametrize(
    "asked", [["--gpu-ids", "1,2"], ["--gpus", "3"], ["--num-gpus", "3"], ["--nproc-per-node", "3"]]
)
def test_a_gang_never_quietly_takes_fewer(
    asked: list[str], host: Path, muster_main: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    (host / "gang.py").write_text("")
    words = ["run", "--dry-run", *asked, "gang.py"]
    assert muster_main(*words).returncode == 0
    holder = Holder(pid=4711, user="bob", used_mib=9000)
    (host / "facts.json").write_bytes(facts(3, {1: (holder,)}))
    refused = muster_main(*words)
    assert refused.returncode == 3
    assert "cuda:1: busy: pid 4711 (bob) holds 9000 MiB" in refused.stderr
    for choice in ([*asked, "--force"], ["--max-gpus", "3"], []):
        assert muster_main("run", "--dry-run", *choice, "gang.py").returncode == 0


def test_a_gang_is_refused_a_gpu_that_another_run_has_leased(
    host: Path, muster_main: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    (host / "gang.py").write_text("")
    lease = acquire("GPU-2", "theirs", read_settings())
    assert isinstance(lease, Lease)
    with lease:
        refused = muster_main("run", "--gpu-ids", "1,2", "--run-dir", "run", "gang.py")
    assert refused.returncode == 3
    assert "cuda:2: leased by run theirs" in refused.stderr
    assert not (host / "run" / "run.json").exists()


RANK = """
import json, os
names = ("CUDA_VISIBLE_DEVICES", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_DUMP_ON_TIMEOUT",
         "TORCH_FR_DUMP_TEMP_FILE", "TORCH_FR_BUFFER_SIZE")
print(json.dumps({name: os.environ.get(name) for name in names}))
"""


def test_a_training_on_gpus_that_torch_cannot_use_does_not_begin(
    host: Path, muster_cli: MusterCli
) -> None:
    (host / "runs").mkdir()
    done = muster_cli("train", "digits", "--devices", "2", "--max-steps", "3")
    assert done.returncode == 3, done.stdout + done.stderr
    assert "This rank was placed on a GPU" in done.stderr and "muster doctor" in done.stderr
    assert "Traceback" not in done.stderr and "on the CPU, " not in done.stdout


def test_nccl_writes_into_the_run_folder_and_the_users_settings_stay(
    host: Path, muster_cli: MusterCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    (host / "look.py").write_text(RANK)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "7")
    done = muster_cli("run", "--devices", "1", "--run-dir", "r", "look.py")
    assert done.returncode == 0, done.stderr
    seen = json.loads((host / "r/logs/rank-0.log").read_text().splitlines()[-1])
    assert seen["CUDA_VISIBLE_DEVICES"] == "GPU-0"
    assert seen["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "2"
    assert (seen["TORCH_NCCL_DUMP_ON_TIMEOUT"], seen["TORCH_FR_BUFFER_SIZE"]) == ("1", "7")
    assert seen["TORCH_FR_DUMP_TEMP_FILE"] == str(host / "r/logs/nccl-rank-")


def test_a_gang_that_is_a_task_gets_the_gpus_of_its_task(host: Path) -> None:
    (host / "rank.py").write_text(
        "import os, pathlib, time\n"
        "where = pathlib.Path(os.environ['MUSTER_TASK_DIR'], 'rank-' + os.environ['RANK'])\n"
        "where.write_text(os.environ['CUDA_VISIBLE_DEVICES'])\n"
        # Neither task ends before the other one has begun: both could be had by one worker.
        "limit = time.monotonic() + 120\n"
        "while len(list(where.parents[1].glob('*/rank-*'))) < 4:\n"
        "    assert time.monotonic() < limit\n"
        "    time.sleep(0.02)\n"
    )
    (host / "facts.json").write_bytes(facts(4))
    run = muster.sweep(
        ["muster", "run", "rank.py", "{x}"], grid={"x": [1, 2]}, gpus_per_task=2, run_dir="g"
    )
    seen = [
        {path.name: path.read_text() for path in sorted((run.path / row["folder"]).glob("rank-*"))}
        for row in run.results().to_pylist()
    ]
    assert sorted(map(str, seen)) == [
        str({"rank-0": gpus, "rank-1": gpus}) for gpus in ("GPU-0,GPU-1", "GPU-2,GPU-3")
    ]
