"""``--memory``: a task that takes more ends alone and says so, and no more run than fit."""

from __future__ import annotations

import json
import sqlite3
import subprocess
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.unit.api.test_lending import facts

import muster
from muster import Run, UsageError
from muster.api.start.lending import Lending
from muster.api.start.options import SweepOptions
from muster.api.start.placing import placement_lines, slots_of, take_devices, would_take
from muster.base.host_memory import host_memory_mib
from muster.base.settings import read_settings
from muster.devices.packing import tasks_that_fit, with_memory
from muster.devices.placement import Placement, Slot
from muster.run.folder import RunFolder
from muster.run.requests import Ask

Main = Callable[..., subprocess.CompletedProcess[str]]

SOURCE = """
import os, pathlib, subprocess, sys, time

HERE = pathlib.Path(__file__).parent
HOLDS = "import time; held = bytearray(300 << 20); time.sleep(60)"

def takes(x: int):
    with (HERE / "began.txt").open("a") as file:
        print(x, file=file)
    if x == 2:
        held = bytearray(300 << 20)
        time.sleep(60)
    if x == 3:  # a child, of a child that has ended
        subprocess.run([sys.executable, "-c", f"import subprocess, sys; "
                        f"subprocess.Popen([sys.executable, '-c', {HOLDS!r}])"])
        time.sleep(60)
    if x == 4 and not (HERE / "again").exists():  # what an earlier task left may be the reason
        (HERE / "again").touch()
        held = bytearray(300 << 20)
        time.sleep(60)
    time.sleep(0.2)
    return {"y": x}
"""
FLAGS = ("--quiet", "--devices", "cpu:1", "--monitor-interval", "0", "--run-dir", "r")
TOOK = "of 200 MiB allowed (--memory)"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "t.py").write_text(SOURCE)
    return tmp_path


def _states(place: Path) -> dict[int, str]:
    return {row["x"]: row["state"] for row in Run(place / "r").results().to_pylist()}


def _outcomes(place: Path) -> Counter[str]:
    with closing(sqlite3.connect(Run(place / "r").folder.ledger)) as database:
        return Counter(outcome for (outcome,) in database.execute("SELECT outcome FROM attempts"))


@pytest.mark.quick
def test_a_task_above_its_limit_fails_alone_and_says_so(place: Path, muster_main: Main) -> None:
    words = ("sweep", *FLAGS, "--memory", "200M", "t.py:takes", "--grid", "x=2,1")
    assert muster_main(*words).returncode == 1
    assert _states(place) == {1: "done", 2: "failed"}
    assert _outcomes(place) == {"ok": 1, "memory_limit": 1}, "alone it would take as much again"
    for looking in ("why", "errors"):
        assert TOOK in muster_main(looking, "r").stdout, looking
    told = json.loads(muster_main("why", "r", "--json").stdout)
    [cause] = told["causes"]
    assert (TOOK in cause["text"], cause["outcome"]) == (True, "memory_limit")
    assert any("--memory" in line for line in told["tries"])
    assert muster_main("report", "r").returncode == 0
    pages = [path.read_text() for path in (place / "r").rglob("*.html")]
    assert any(TOOK in page for page in pages)


def test_what_it_starts_counts_and_a_used_worker_is_no_proof(
    place: Path, muster_main: Main
) -> None:
    words = ("sweep", *FLAGS, "--memory", "200M", "t.py:takes", "--grid", "x=1,3,5,4")
    assert muster_main(*words).returncode == 1
    assert _states(place) == {1: "done", 3: "failed", 4: "done", 5: "done"}
    assert _outcomes(place)["memory_limit"] == 3, "3 and 4 were not the first of their workers"
    assert sorted((place / "began.txt").read_text().split()) == ["1", "3", "3", "4", "4", "5"]


def test_a_program_and_a_retry_that_allows_more(place: Path, muster_main: Main) -> None:
    (place / "p.py").write_text(
        "import pathlib, sys, time\nheld = bytearray(int(sys.argv[1]) << 20)\n"
        "while len(held) > 200 << 20 and not pathlib.Path('allowed').exists():\n"
        "    time.sleep(0.05)\n"
    )
    line = ("--", "python3", "p.py", "{x}")
    words = ("sweep", *FLAGS, "--memory", "200M", "--grid", "x=1,300", *line)
    assert muster_main(*words).returncode == 1
    assert _outcomes(place)["memory_limit"] == 2, "once more as the first of a worker"
    (place / "allowed").touch()
    again = muster_main("retry", "r", "--memory", "600M")
    assert again.returncode == 0, again.stderr
    assert Run(place / "r").stored.options["memory_mib"] == 600


def test_a_start_above_the_limit_names_it(place: Path, muster_main: Main) -> None:
    # It is looked at now and then, so that a start goes on until it has been.
    begin = "import time\nheld = bytearray(300 << 20)\ntime.sleep(60)\n"
    (place / "t.py").write_text(f"{begin}{SOURCE}")
    done = muster_main("sweep", *FLAGS, "--memory", "200M", "t.py:takes", "--grid", "x=1")
    assert done.returncode == 3
    assert "with a higher --memory" in done.stderr


_SWEEP = ("sweep", "t.py:takes", "--grid", "x=1", "--memory")
REFUSED = {
    "no amount": ((*_SWEEP, "lots"), "write 8G, 900M"),
    "nothing": ((*_SWEEP, "0"), "is not an amount"),
    "more than there is": ((*_SWEEP, "900T"), "is more than this machine has"),
    "in this process": ((*_SWEEP, "1G", "--on", "inline"), "no effect"),
    "less of SLURM": ((*_SWEEP, "2G", "--on", "slurm", "--mem", "1G"), "allows a task 2 GiB"),
    "no more of SLURM": ((*_SWEEP, "2G", "--on", "slurm", "--mem", "2G"), "beside 256 MiB"),
    "two ways of SLURM": (
        (*_SWEEP, "2G", "--on", "slurm", "--mem", "4G", "--slurm-arg", "mem-per-cpu=4G"),
        "exclude each other",
    ),
    "a map": (("map", "t.py:takes", "--memory", "1G"), "--max-worker-memory"),
    "a training": (("train", "digits", "--memory", "1G"), "MemoryMax"),
    "a program on many devices": (("run", "--memory", "1G", "t.py"), "MemoryMax"),
}  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize("what", REFUSED)
def test_refusals(what: str, place: Path, muster_main: Main) -> None:
    words, said = REFUSED[what]
    done = muster_main(*words)
    assert done.returncode == 2, done
    assert said in done.stderr and "Traceback" not in done.stderr


@pytest.mark.quick
def test_a_map_from_python_is_refused_too(place: Path) -> None:
    with pytest.raises(UsageError, match="max_worker_memory_mib"):
        muster.map(_same, [{"a": 1}], place / "out.jsonl", memory_mib=100)


def _same(record: dict[str, int]) -> dict[str, int]:
    return record


# ---------------------------------------------------------------------- how many at once


def _placed(*devices: str) -> Placement:
    return Placement(
        slots=tuple(
            Slot(slot_id=at, label=f"s{at}", kind="cuda" if name else "cpu", num_threads=2,
                 device_uuids=(name,) if name else ())
            for at, name in enumerate(devices)
        )
    )  # fmt: skip


@pytest.mark.quick
def test_the_first_of_every_device_comes_before_the_second_of_any() -> None:
    whole = _placed("A", "A", "A", "B", "B", "C")
    assert with_memory(whole, None, 10.0, 12) == whole == with_memory(whole, 6, 10.0, 12)
    for most, kept in ((4, "AABC"), (3, "ABC"), (2, "AB"), (1, "A")):
        found = with_memory(whole, most, 10.0, 12)
        assert "".join(slot.device_uuids[0] for slot in found.slots) == kept
        assert [slot.slot_id for slot in found.slots] == list(range(most))
        assert all(slot.num_threads == 12 // most for slot in found.slots)
        assert f"{most} fit" in found.notes[-1]
    on_cpu = with_memory(_placed(*[""] * 40), 2, 10.0, 2)
    assert [slot.num_threads for slot in on_cpu.slots] == [1, 1], "no more than there are cores"


@pytest.mark.quick
def test_no_more_run_at_once_than_the_memory_allows(place: Path, muster_main: Main) -> None:
    free_mib = host_memory_mib().available_mib
    assert free_mib is not None
    assert tasks_that_fit(None) is None
    each = f"{int(free_mib / 2.5)}M"
    words = ("sweep", *FLAGS, "--devices", "cpu:40", "--memory", each, "t.py:takes")
    done = muster_main(*words, "--grid", "x=1,5", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "2 workers" in done.stdout and "(--memory), and 2 fit" in done.stdout


def test_a_run_starts_no_more_workers_than_fit(place: Path, muster_main: Main) -> None:
    free_mib = host_memory_mib().available_mib
    assert free_mib is not None
    each = f"{int(free_mib / 2.5)}M"
    flags = [word.replace("cpu:1", "cpu:40") for word in FLAGS]
    done = muster_main("sweep", *flags, "--memory", each, "t.py:takes", "--grid", "x=1,5,6,7,8")
    assert done.returncode == 0, done.stderr
    with closing(sqlite3.connect(Run(place / "r").folder.ledger)) as database:
        assert [*database.execute("SELECT count(*) FROM workers")] == [(2,)]


@pytest.mark.quick
def test_gpus_that_get_no_worker_are_left_to_others(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "facts.json").write_bytes(facts(4))
    monkeypatch.setenv("MUSTER_DEVICE_FACTS", str(place / "facts.json"))
    monkeypatch.setenv("MUSTER_LEASE_DIR", str(place / "leases"))
    free_mib = host_memory_mib().available_mib
    assert free_mib is not None
    shared = SweepOptions(devices="auto", per_gpu="auto", memory_mib=free_mib / 6.5)
    assert "up to 2 on each" in placement_lines(would_take(shared, read_settings()), shared)[0]
    options = SweepOptions(devices="auto", per_gpu=2, memory_mib=free_mib / 2.5)
    placement, leases = take_devices(options, "one", read_settings())
    assert [slot.label for slot in placement.slots] == ["cuda:0", "cuda:1"]
    assert {lease.uuid for lease in leases} == {"GPU-0", "GPU-1"}
    specs = slots_of(placement, options)
    assert {(spec.most_host_mib, spec.num_sharing) for spec in specs} == {(free_mib / 2.5, 1)}
    others, more = take_devices(SweepOptions(devices="2"), "two", read_settings())
    assert {lease.uuid for lease in more} == {"GPU-2", "GPU-3"} and len(others.slots) == 2
    lending = Lending(RunFolder(place / "r"), options, read_settings(), specs, leases)
    for lease in more:
        lease.release()
    said: list[dict[str, Any]] = []
    asked = Ask({"devices": {"add": 2}}, lambda what: said.append(dict(what)))
    assert lending.hear(asked) == []
    assert "has room for 2" in said[0]["refused"]
    lending.close()


@pytest.mark.quick
def test_slurm_is_asked_for_what_a_task_may_take(place: Path, muster_main: Main) -> None:
    words = ("sweep", "t.py:takes", "--grid", "x=1", "--on", "slurm", "--memory", "2G")
    assert "--mem=2304M" in muster_main(*words, "--dry-run").stdout
    assert "--mem=4G" in muster_main(*words, "--mem", "4G", "--dry-run").stdout
    parts = muster_main(*words, "--slurm-arg", "mem-per-cpu=4G", "--dry-run").stdout
    assert "--mem-per-cpu=4G" in parts and "--mem=" not in parts
