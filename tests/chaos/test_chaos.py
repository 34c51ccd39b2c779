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
from pathlib import Path

import psutil
import pytest

NUM_TASKS = 100
IN_FLIGHT = 2 * 2  # two workers; of short tasks each holds the running and the next

TARGET = """
import os, subprocess, time

def note(text):
    handle = os.open(os.environ["CHAOS_NOTES"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(handle, f"{text}\\n".encode())
    os.close(handle)

def work(x: int, ctx):
    note(x)
    (ctx.folder / "made.txt").write_text(f"{x} by attempt {ctx.attempt}")
    if x % 20 == 3:
        subprocess.Popen(["sleep", "300"], start_new_session=True)
    time.sleep(0.01 + 0.05 * (x * 7919 % 13) / 13)
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

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.notes = folder / "notes.txt"
        self.said = folder / "said.txt"
        self.random = random.Random(seed)
        self.kills: Counter[str] = Counter()
        (folder / "target.py").write_text(TARGET)
        (folder / "run.py").write_text(RUN)
        source = str(Path(__file__).parents[2] / "src")
        self.environment = {
            **os.environ, "PYTHONPATH": source, "CHAOS_NOTES": str(self.notes),
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
            names = (b"worker.main", b"warden", b"run.py", b"export")
            found[pid] = next((name.decode() for name in names if name in line), "other")
        return found

    def run_once(self, patience_s: float) -> int | None:
        """Start the sweep and kill something now and then; its exit code, None if killed."""
        with self.said.open("ab") as said:
            process = subprocess.Popen(
                [sys.executable, "run.py", str(NUM_TASKS)],
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
        victims = ("worker.main", "warden", "run.py")
        candidates = [(pid, kind) for pid, kind in self.processes().items() if kind in victims]
        if not candidates:
            return
        kind = self.random.choice(sorted({kind for _, kind in candidates}))
        pid = self.random.choice([p for p, k in candidates if k == kind])
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self.kills[kind] += 1

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
        expected = {x: (x * x, f"task {x}", x / 2, "done") for x in range(NUM_TASKS)}
        assert found == expected, "the results of an undisturbed run"
        assert len(rows) == NUM_TASKS, "none twice"
        made = sorted(
            int(path.read_text().split()[0])
            for path in (self.folder / "r" / "artifacts").rglob("made.txt")
        )
        assert made == list(range(NUM_TASKS)), "each task's files, once"
        runs = Counter(int(line) for line in self.notes.read_text().splitlines())
        assert set(runs) == set(range(NUM_TASKS))
        repeated = runs.total() - NUM_TASKS
        assert repeated <= self.kills.total() * IN_FLIGHT, (repeated, self.kills)
        deadline = time.monotonic() + 2.0
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert self.processes() == {}, "orphans"


def play(folder: Path, seed: int) -> None:
    chaos = Chaos(folder, seed)
    patience_s = 0.5
    for _ in range(100):
        code = chaos.run_once(patience_s)
        if code is None:
            deadline = time.monotonic() + 2.0
            while chaos.processes() and time.monotonic() < deadline:
                time.sleep(0.02)
            left = chaos.processes()
            killed_warden_too = chaos.kills["warden"] and set(left.values()) <= {"other"}
            assert not left or killed_warden_too, f"orphans: {left}"
        elif code == 0:
            chaos.check()
            assert chaos.kills.total() >= 2, "nothing was tested"
            return
        else:
            raise AssertionError(f"exit code {code} after {chaos.kills}: {chaos.why()}")
        patience_s *= 1.1
    raise AssertionError("never came to an end")


@pytest.mark.skipif(sys.platform != "linux", reason="kills are counted through /proc")
@pytest.mark.parametrize("seed", range(4))
def test_killed_at_random_and_resumed(tmp_path: Path, seed: int) -> None:
    play(tmp_path, seed)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="kills are counted through /proc")
@pytest.mark.parametrize("seed", range(100, 130))
def test_killed_at_random_and_resumed_thirty_times(tmp_path: Path, seed: int) -> None:
    play(tmp_path, seed)
