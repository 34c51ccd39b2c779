"""Runs of several users that wait for the GPUs of one machine: commands, and processes by hand."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.json_schemas import check_printed
from tests.processes import Commands, command_line, is_gone
from tests.unit.api.test_lending import facts

from muster.base.settings import child_environment

SOURCE = """
import pathlib, time

HERE = pathlib.Path(__file__).parent

def held(seed: int):
    while not (HERE / "go").exists():
        time.sleep(0.01)
    return {"y": seed}

def quick(seed: int):
    return {"y": seed}

def stage(record):
    return {"b": record["a"] + 1}

def same(record):
    return record

STAGES = [stage, same]
"""


class Place(Commands):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        (path / "t.py").write_text(SOURCE)
        (path / "p.py").write_text("print('ran')\n")
        (path / "in.jsonl").write_text('{"a": 1}\n{"a": 2}\n')
        (path / "facts.json").write_bytes(facts(2))

    def hold(self, *words: str) -> subprocess.Popen[bytes]:
        """A sweep that keeps its GPUs until there is a file called go."""
        process = self.begin("sweep", "t.py:held", "--seeds", "2", "--run-dir", "holder", *words)
        count = int(words[words.index("--devices") + 1])
        self.until(lambda: len(list(self.leases.glob("*.claim"))) == count)
        return process

    def queue(self) -> dict[str, Any]:
        found = subprocess.run(
            [sys.executable, "-m", "muster", "queue", "--json"], cwd=self.path,
            capture_output=True, check=True,
        )  # fmt: skip
        shown: dict[str, Any] = check_printed("queue", found.stdout)
        return shown

    @property
    def leases(self) -> Path:
        return self.path / "leases"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MUSTER_LEASE_DIR", str(tmp_path / "leases"))
    monkeypatch.setenv("MUSTER_DEVICE_FACTS", str(tmp_path / "facts.json"))
    with Place(tmp_path) as made:
        yield made


def num_waiting(place: Place) -> int:
    return len(list(place.leases.glob("*.ticket")))


#: What each command that makes a run does with two GPUs.
COMMANDS: dict[str, tuple[str, ...]] = {
    "sweep": ("sweep", "t.py:quick", "--seeds", "2", "--devices", "2"),
    "search": ("sweep", "t.py:quick", "--space", "seed=int(1,9)", "--maximize", "y", "--trials",
               "2"),
    "map": ("map", "t.py:stage", "--input", "in.jsonl", "--output", "o.jsonl"),
    "train": ("train", "digits", "--max-steps", "1", "--gpus", "2"),
    "run": ("run", "--gpus", "2", "p.py"),
}  # fmt: skip


def test_who_waits_is_shown_begins_in_turn_and_has_what_a_killed_run_had(place: Place) -> None:
    holder = place.hold("--devices", "2")
    first = place.begin(*COMMANDS["sweep"], "--wait", "--run-dir", "first")
    place.until(lambda: num_waiting(place) == 1)
    second = place.begin(
        *COMMANDS["map"], "--wait=2h", "--queue-priority", "-1", "--run-dir", "second"
    )
    place.until(lambda: num_waiting(place) == 2)
    shown = place.queue()
    assert [one["run"] for one in shown["waiting"]] == ["first", "second"]
    assert [one["position"] for one in shown["waiting"]] == [1, 2]
    assert {one["uid"] for one in shown["waiting"]} == {os.geteuid()}
    assert {one["run"] for one in shown["held"]} == {"holder"} and len(shown["held"]) == 2
    assert "none is free; run holder of" in shown["waiting"][0]["reason"]
    table = subprocess.run(
        [sys.executable, "-m", "muster", "queue"], cwd=place.path, capture_output=True, text=True
    )
    assert table.returncode == 0 and "0 of 2 GPUs are free" in table.stdout
    refused = subprocess.run(
        [sys.executable, "-m", "muster", *COMMANDS["sweep"], "--run-dir", "third"],
        cwd=place.path, capture_output=True, text=True,
    )  # fmt: skip
    assert refused.returncode == 3 and "leased by run holder" in refused.stderr
    os.kill(holder.pid, signal.SIGKILL)
    assert (first.wait(timeout=300), second.wait(timeout=300)) == (0, 0), place.said
    assert "waiting: 1 of 1 in the queue for at least 1 of 2 GPUs: none is free" in place.said
    assert num_waiting(place) == 0
    shown = place.queue()
    assert (shown["waiting"], shown["held"]) == ([], [])
    assert sum(shown["used_gpu_hours"].values()) > 0


@pytest.mark.parametrize(
    "command",
    [
        command if command in ("sweep", "run") else pytest.param(command, marks=pytest.mark.slow)
        for command in COMMANDS
    ],
)
def test_a_request_to_end_leaves_the_queue_and_the_same_command_waits_again(
    place: Place, command: str
) -> None:
    place.hold("--devices", "2")
    number, code = (signal.SIGTERM, 75) if command in ("sweep", "map") else (signal.SIGINT, 130)
    folder = ("--run-dir", "r") if command != "run" else ()
    process = place.begin(*COMMANDS[command][:1], "--wait", *folder, *COMMANDS[command][1:])
    place.until(lambda: "waiting: 1 of 1" in place.said)
    if command in ("train", "run"):  # a supervisor would keep torch in memory for days
        children = psutil.Process(process.pid).children()
        assert not any("muster.supervisor.main" in command_line(one) for one in children)
    process.send_signal(number)
    assert process.wait(timeout=300) == code, place.said
    assert num_waiting(place) == 0
    assert command == "map" or not (place.path / "r").exists()  # which has read its input by then
    runs = place.path / "runs"
    assert not runs.exists() or not list(runs.iterdir()), "an empty folder is left"


def test_a_stage_that_waits_is_known_by_its_map(place: Place) -> None:
    place.hold("--devices", "2")
    words = ("--input", "in.jsonl", "--output", "o.jsonl", "--stage-by-stage", "--run-dir", "r")
    process = place.begin("map", "t.py:STAGES", *words, "--wait")
    place.until(lambda: num_waiting(place) == 1)
    assert [one["run"] for one in place.queue()["waiting"]] == ["r"]
    status = [sys.executable, "-m", "muster", "status", "r"]
    said = subprocess.run(status, cwd=place.path, capture_output=True, text=True).stderr
    assert f"waits for GPUs, in process {process.pid}" in said
    waiters = [place.begin("wait", "r"), place.begin("status", "r", "--watch")]
    place.until(lambda: place.said.count(f"waits for GPUs, in process {process.pid}") == 2)
    (place.path / "go").touch()
    assert process.wait(timeout=300) == 0, place.said
    assert [one.wait(timeout=300) for one in waiters] == [0, 0], place.said
    assert "r: done" in place.said


def test_whoever_waits_for_a_start_that_never_began_is_told(place: Place) -> None:
    place.hold("--devices", "2")
    start = place.begin(*COMMANDS["sweep"], "--wait", "--run-dir", "r")
    place.until(lambda: num_waiting(place) == 1)
    assert place.begin("wait", "r", "--timeout", "0.1").wait(timeout=300) == 124, place.said
    told, waits = place.said, f"waits for GPUs, in process {start.pid}"
    waiters = [place.begin("wait", "r"), place.begin("status", "r", "--watch")]
    place.until(lambda: place.said.count(waits) == told.count(waits) + 2)
    cancel = [sys.executable, "-m", "muster", "cancel", "r", "--json"]
    cancelled = subprocess.run(cancel, cwd=place.path, capture_output=True, check=True).stdout
    asked = {"run": "r", "asked_coordinator": True, "changed": True}
    assert check_printed("cancel", cancelled) == asked
    assert start.wait(timeout=300) == 75, place.said
    assert [one.wait(timeout=300) for one in waiters] == [75, 0], place.said
    assert place.said.count("r: it left the queue before it began") == 2


def test_a_detached_run_waits_without_a_terminal_and_begins_in_its_turn(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(place.path / "state"))
    place.hold("--devices", "2")
    told = place.begin(*COMMANDS["sweep"], "--wait", "--detach", "--run-dir", "r")
    assert told.wait(timeout=300) == 0, place.said
    assert "1 of 1 in the queue for at least 1 of 2 GPUs" in place.said
    [log] = (place.path / "state" / "muster").glob("waiting-*.log")
    pid = int(log.stem.rpartition("-")[2])
    try:
        assert "  stop:  muster cancel r\n" in place.said and str(log) in place.said
        assert "waiting: 1 of 1" in log.read_text()
        (place.path / "go").touch()
        place.until(lambda: is_gone(pid))
        printed = (place.path / "r" / "logs" / "command.log").read_text()
        assert printed.count("waiting: 1 of 1") == 1 and "2 done" in printed
        assert not log.exists()
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_a_phase_that_waits_is_cancelled_by_its_experiment(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(place.path / "state"))
    place.hold("--devices", "2")
    (place.path / "e.toml").write_text(
        'run_dir = "e"\n'
        '[phase.one]\ncommand = "sweep"\ntarget = "t.py:quick"\nseeds = 2\n'
        'devices = "2"\nwait = "1h"\n'
    )
    start = place.begin("start", "e.toml", "--detach")
    assert start.wait(timeout=300) == 0, place.said
    assert "  stop:  muster cancel e/one\n" in place.said
    [log] = (place.path / "state" / "muster").glob("waiting-*.log")
    pid = int(log.stem.rpartition("-")[2])
    assert place.begin("cancel", "e").wait(timeout=300) == 0, place.said
    assert f"one: told its first start to end, which waited for GPUs in process {pid}" in place.said
    place.until(lambda: is_gone(pid))
    assert num_waiting(place) == 0


def test_a_leased_gpu_is_not_shown_as_free(place: Place) -> None:
    place.hold("--devices", "1")
    show = [sys.executable, "-m", "muster", "devices"]
    said = subprocess.run(show, cwd=place.path, capture_output=True, text=True, check=True).stdout
    states = [line for line in said.splitlines() if line.startswith("cuda:")]
    assert "leased by run holder of" in states[0] and "  free  " in states[1], said
    found = subprocess.run([*show, "--json"], cwd=place.path, capture_output=True, check=True)
    first, second = check_printed("devices", found.stdout)["gpus"]
    assert "leased by run holder of" in first["leased"] and second["leased"] is None


@pytest.mark.slow
def test_a_run_that_was_begun_waits_when_it_is_resumed(place: Place) -> None:
    begun = place.begin(*COMMANDS["sweep"], "--run-dir", "r")
    assert begun.wait(timeout=300) == 0
    place.hold("--devices", "2")
    again = place.begin("resume", "r", "--wait")
    place.until(lambda: num_waiting(place) == 1)
    assert place.begin("cancel", "r").wait(timeout=300) == 0
    assert again.wait(timeout=300) == 75
    assert f"told its next start to end, which waited for GPUs in process {again.pid}" in place.said
    again = place.begin("resume", "r", "--wait")
    place.until(lambda: num_waiting(place) == 1)
    (place.path / "go").touch()
    assert again.wait(timeout=300) == 0, place.said


def test_a_plan_says_that_it_would_wait_and_what_can_never_be_is_refused(place: Place) -> None:
    place.hold("--devices", "2")
    shown = subprocess.run(
        [sys.executable, "-m", "muster", *COMMANDS["sweep"], "--wait", "--dry-run"],
        cwd=place.path, capture_output=True, text=True,
    )  # fmt: skip
    assert shown.returncode == 0 and "so it would wait" in shown.stdout, shown.stderr
    for words, says in ((("--on", "slurm"), "--wait has no effect with --on slurm"),):
        refused = subprocess.run(
            [sys.executable, "-m", "muster", "sweep", "t.py:quick", "--seeds", "2", "--wait",
             *words],
            cwd=place.path, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert refused.returncode in (2, 3) and says in refused.stderr, refused.stderr


# ---------------------------------------------------------------------- many users

#: Forks a process for each run, which becomes its user, waits, holds a GPU for a moment, and tells
#: of it; kills some of them at any time. Says how many each user ran, and what was held twice.
MANY = """
import filelock, json, os, random, signal, sys, time  # users may be unable to read this Python
from pathlib import Path
from muster.base.settings import Settings
from muster.devices.inventory import parse_devices
from muster.devices.leases import Lease
from muster.devices.waiting import Wait, lease_in_turn

place, runs_each, at_once, kills = Path(sys.argv[1]), *map(int, sys.argv[2:5])
settings = Settings(device_facts=place / "facts.json", lease_folder=place / "leases", cpu_count=2)
witness = place / "witness"
witness.mkdir(mode=0o777)
witness.chmod(0o777)
draw = random.Random(4)

def is_alive(pid):
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False

def one_run(uid, width):
    os.setgid(uid)
    os.setuid(uid)
    placement, leases = lease_in_turn(
        parse_devices(str(width)), settings, gpus_per_task=width, run_name=f"of-{uid}",
        wait=Wait(most_s=600),
    )
    mine = [uuid for slot in placement.slots for uuid in slot.device_uuids]
    assert len(mine) == width == len(leases)
    for uuid in mine:
        for old in witness.glob(f"{uuid}@*"):
            if is_alive(int(old.name.rpartition("@")[2])):
                os._exit(3)  # somebody else has it, and lives
    for uuid in mine:
        (witness / f"{uuid}@{os.getpid()}").touch()
    time.sleep(0.02)
    for uuid in mine:
        (witness / f"{uuid}@{os.getpid()}").unlink()
    for lease in leases:
        lease.release()

left = {uid: runs_each for uid in range(4001, 4009)}
done = dict.fromkeys(left, 0)
living, wrong, shots, killed = {}, [], 0, 0
while living or any(left.values()):
    for uid in left:
        while left[uid] and sum(u == uid for u in living.values()) < at_once:
            left[uid] -= 1
            pid = os.fork()
            if pid == 0:
                code = 4
                try:
                    one_run(uid, draw.choice([1, 1, 2]) if uid % 2 else 1)
                    code = 0
                except BaseException as error:
                    print(uid, repr(error), file=sys.stderr)
                finally:
                    os._exit(code)
            living[pid] = uid
            draw.random()
    if shots < kills and draw.random() < 0.3:
        shots += 1
        os.kill(draw.choice(list(living)), signal.SIGKILL)
    pid, status = os.waitpid(-1, os.WNOHANG)
    if pid == 0:
        time.sleep(0.002)
        continue
    uid = living.pop(pid)
    done[uid] += os.WIFEXITED(status)
    killed += os.WIFSIGNALED(status)  # and one that was shot had ended by itself
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        wrong.append([uid, os.WEXITSTATUS(status)])
print(json.dumps({"done": done, "wrong": wrong, "killed": killed}))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes of several users")
@pytest.mark.parametrize(
    "runs_each", [4, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
def test_eight_users_queue_and_no_gpu_is_held_twice_whoever_is_killed(runs_each: int) -> None:
    # Not below tmp_path, into which other users cannot look.
    with tempfile.TemporaryDirectory(prefix="muster-users-") as place:
        folder = Path(place)
        folder.chmod(0o755)
        (folder / "facts.json").write_bytes(facts(4))
        (folder / "leases").mkdir()
        (folder / "leases").chmod(0o1777)
        found = subprocess.run(
            [sys.executable, "-c", MANY, place, str(runs_each), "3", str(runs_each)],
            capture_output=True, text=True, timeout=1800, env=child_environment({}),
        )  # fmt: skip
    assert found.returncode == 0, found.stderr
    said = json.loads(found.stdout)
    assert said["wrong"] == [], found.stderr
    assert said["killed"] > 0
    num_ended = sum(said["done"].values()) + said["killed"]
    assert num_ended == 8 * runs_each, "a run has not come to its turn"
