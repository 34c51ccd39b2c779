"""Kill -9 of anything at any moment, then the same call again: nothing lost, nothing twice."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

IN_FLIGHT = 2 * 2  # two workers; of short tasks each holds the running and the next
_DEATH_S = 300.0  # a machine under load takes its time to end what is dying

TARGET = """
import os, subprocess, time
from pathlib import Path

def note(text):
    handle = os.open(os.environ["CHAOS_NOTES"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(handle, f"{text}\\n".encode())
    os.close(handle)

def work(x: int, ctx):
    note(x)
    (ctx.folder / "made.txt").write_text(f"{x} by attempt {ctx.attempt}")
    if x % 20 == 3:
        subprocess.Popen(["sleep", "300"], start_new_session=True)
    if x % 10 == 7:
        subprocess.run(["sleep", "0.1"])
    time.sleep(0.01 + 0.05 * (x * 7919 % 13) / 13)
    while x == int(os.environ["CHAOS_LAST"]) and not Path("enough").exists():
        time.sleep(0.01)  # the last one ends when something was killed
    return {"square": x * x, "text": f"task {x}", "half": x / 2}
"""

RUN = """
import sys
import muster

if __name__ == "__main__":
    run = muster.sweep(
        "target.py:work", grid={"x": range(int(sys.argv[1]))}, devices="cpu:2", run_dir="r",
        retries=50,
    )
    run.export("out.jsonl")
    sys.exit(run.exit_code)
"""


class Chaos:
    """One sweep in a folder of its own, and the hand that kills."""

    def __init__(
        self,
        folder: Path,
        seed: int,
        *,
        num_tasks: int = 100,
        num_kills: int,
        max_kills: int = 1000,
    ) -> None:
        self.folder = folder
        self.num_kills = num_kills
        self.max_kills = max_kills
        self.num_tasks = num_tasks
        self.spares_start = True
        self.num_left = 0  # what a killed reaper could not end any more
        self.notes = folder / "notes.txt"
        self.said = folder / "said.txt"
        self.random = random.Random(seed)
        self.kills: Counter[str] = Counter()
        (folder / "target.py").write_text(TARGET)
        (folder / "run.py").write_text(RUN)
        source = str(Path(__file__).parents[2] / "src")
        self.environment = {
            **os.environ, "PYTHONPATH": source, "CHAOS_NOTES": str(self.notes),
            "CHAOS_LAST": str(num_tasks - 1),
        }  # fmt: skip

    def processes(self) -> dict[int, str]:
        """Everything that carries our mark in its environment, by what it is."""
        found = {}
        needle = f"CHAOS_NOTES={self.notes}".encode()
        for pid in psutil.pids():
            try:
                if needle not in Path(f"/proc/{pid}/environ").read_bytes():
                    continue
                line = Path(f"/proc/{pid}/cmdline").read_bytes()
            except OSError:
                continue
            names = (b"worker.main", b"reaper", b"run.py", b"table_process")
            found[pid] = next((name.decode() for name in names if name in line), "other")
        return found

    def run_once(self, patience_s: float) -> int | None:
        """Start the sweep and kill something now and then; its exit code, None if killed."""
        self.spares_start = self.random.random() < 0.8  # or it would seldom get beyond it
        with self.said.open("ab") as said:
            process = subprocess.Popen(
                [sys.executable, "run.py", str(self.num_tasks)],
                cwd=self.folder,
                env=self.environment,
                stdout=said,
                stderr=said,
            )
        while True:
            try:
                code = process.wait(timeout=self.random.uniform(0.05, patience_s))
                return None if code == -signal.SIGKILL else code
            except subprocess.TimeoutExpired:
                self.kill_something()

    def kill_something(self) -> None:
        """One process of some kind, or all but the tasks' own children at the same instant."""
        found = {pid: kind for pid, kind in self.processes().items() if kind != "table_process"}
        kinds = set(found.values())
        if "run.py" not in kinds or self.kills.total() >= self.max_kills:
            return
        if "worker.main" not in kinds and self.spares_start:
            return
        kind = self.random.choice(["all", *sorted(kinds)])
        if kind == "all":
            victims = [pid for pid, own in found.items() if own != "other"]
        else:
            victims = [self.random.choice([pid for pid, own in found.items() if own == kind])]
        for pid in victims:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.kills[kind] += 1
        if self.kills.total() >= self.num_kills:
            (self.folder / "enough").touch()

    def why(self) -> str:
        words = [sys.executable, "-m", "muster", "errors", "r"]
        done = subprocess.run(
            words, cwd=self.folder, env=self.environment, capture_output=True, check=False
        )
        return (done.stdout + done.stderr).decode() + self.said.read_text()

    def check(self) -> None:
        lines = (self.folder / "out.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        found = {row["x"]: (row["square"], row["text"], row["half"], row["state"]) for row in rows}
        numbers = range(self.num_tasks)
        expected = {x: (x * x, f"task {x}", x / 2, "done") for x in numbers}
        runs = Counter(int(line) for line in self.notes.read_text().splitlines())
        repeated = runs.total() - self.num_tasks
        print(
            f"{self.kills.total()} kills {dict(self.kills)}: {len(expected.keys() - found.keys())} "
            f"lost, {len(rows) - len(found)} doubled, {repeated} repeated, {self.num_left} left "
            f"until the next start, {len(self.processes())} orphaned"
        )
        assert found == expected, "the results of an undisturbed run"
        assert len(rows) == self.num_tasks, "none twice"
        made = sorted(
            int(path.read_text().split()[0])
            for path in (self.folder / "r" / "artifacts").rglob("made.txt")
        )
        assert made == list(numbers), "each task's files, once"
        assert set(runs) == set(numbers)
        assert repeated <= self.kills.total() * IN_FLIGHT, (repeated, self.kills)
        deadline = time.monotonic() + _DEATH_S
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert self.processes() == {}, "orphans"


def _have_sessions_of_their_own(pids: dict[int, str]) -> bool:
    for pid in pids:
        with suppress(ProcessLookupError):
            if os.getsid(pid) != pid:
                return False
    return True


def play(
    folder: Path, seed: int, *, num_tasks: int = 100, num_kills: int = 2, max_kills: int = 1000
) -> None:
    """Kill until the sweep is through; then nothing is lost, doubled or left running."""
    chaos = Chaos(folder, seed, num_tasks=num_tasks, num_kills=num_kills, max_kills=max_kills)
    patience_s = 0.5
    for _ in range(100 + num_kills):
        code = chaos.run_once(patience_s)
        if code is None:
            # What has left its worker's session is the reaper's to end, or the next start's.
            no_reaper = bool(chaos.kills["reaper"] or chaos.kills["all"])
            deadline = time.monotonic() + _DEATH_S
            while left := chaos.processes():
                if no_reaper and _have_sessions_of_their_own(left):
                    break
                assert time.monotonic() < deadline, f"orphans: {left}"
                time.sleep(0.05)
            chaos.num_left += len(left)
        elif code == 0:
            chaos.check()
            assert chaos.kills.total() >= num_kills, "too little was tested"
            return
        else:
            raise AssertionError(f"exit code {code} after {chaos.kills}: {chaos.why()}")
        patience_s = min(3.0, patience_s * 1.1)  # for a machine that is slow
    raise AssertionError("never came to an end")


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="kills are counted through /proc")


@pytest.mark.parametrize(
    "seed",
    [
        0,
        pytest.param(1, marks=pytest.mark.thorough),
        *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3)),
    ],
)
def test_killed_at_random_and_resumed(tmp_path: Path, seed: int) -> None:
    play(tmp_path, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 130))
def test_killed_at_random_and_resumed_thirty_times(tmp_path: Path, seed: int) -> None:
    play(tmp_path, seed)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_hundred_kills_of_one_sweep(tmp_path: Path) -> None:
    play(tmp_path, 7, num_tasks=12_000, num_kills=200, max_kills=200)


def test_a_command_dies_when_coordinator_and_reaper_are_killed_at_once(tmp_path: Path) -> None:
    """Nobody is left to end it but the kernel."""
    chaos = Chaos(tmp_path, 0, num_kills=0)
    words = [sys.executable, "-m", "muster", "sweep", "--grid", "x=1,2", "--run-dir", "r"]
    with subprocess.Popen(
        [*words, "--devices", "cpu:2", "--quiet", "--", "sleep", "30{x}"],
        cwd=tmp_path,
        env=chaos.environment,
    ) as coordinator:
        while Counter(chaos.processes().values())["other"] < 3:  # it and its two commands
            assert coordinator.poll() is None
            time.sleep(0.05)
        os.kill(coordinator.pid, signal.SIGSTOP)  # or it would start another reaper
        for pid, kind in chaos.processes().items():
            if kind == "reaper":
                os.kill(pid, signal.SIGKILL)
        coordinator.kill()
    deadline = time.monotonic() + 300
    while chaos.processes():
        assert time.monotonic() < deadline, chaos.processes()
        time.sleep(0.02)
