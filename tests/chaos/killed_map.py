"""A map whose processes are killed at random moments."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from tests.programs import read_program

NUM_ROWS = 600
BATCH = 5

STAGE = read_program("chaos_stages.py")


class Place:
    """A map in a folder of its own, and the hand that kills."""

    #: What is read and written, as words of the command.
    source: tuple[str, ...] = ("in.jsonl",)
    sink: tuple[str, ...] = ("out.jsonl",)

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.notes = folder / "notes"
        self.random = random.Random(seed)
        self.kills: Counter[str] = Counter()
        self.num_workers: Iterator[int] = itertools.repeat(2)
        folder.mkdir(exist_ok=True)
        (folder / "stage.py").write_text(STAGE)
        lines = (json.dumps({"n": n, "text": f"row {n} " * 5}) + "\n" for n in range(NUM_ROWS))
        (folder / "in.jsonl").write_text("".join(lines))
        self.environment = {**os.environ, "CHAOS_NOTES": str(self.notes)}

    def start(self, kind: str, *words: str, num_workers: int = 2) -> subprocess.Popen[bytes]:
        command = [
            sys.executable, "-m", "muster", "map", f"stage.py:{kind}", "--input", *self.source,
            "--output", *self.sink, "--batch-size", str(BATCH), "--chunk-rows", "90",
            "--devices", f"cpu:{num_workers}", "--monitor-interval", "0", "--run-dir", "run",
            *words,
        ]  # fmt: skip
        with (self.folder / "said").open("ab") as said:
            return subprocess.Popen(
                command, cwd=self.folder, env=self.environment, stdout=said, stderr=said
            )

    def processes(self) -> dict[int, str]:
        """Everything that carries our mark in its environment, by what it is."""
        found = {}
        needle = f"CHAOS_NOTES={self.notes}".encode()
        for pid in psutil.pids():
            with contextlib.suppress(OSError):
                if needle in Path(f"/proc/{pid}/environ").read_bytes():
                    line = Path(f"/proc/{pid}/cmdline").read_bytes()
                    names = (b"worker.main", b"reaper", b"muster\0map")
                    found[pid] = next((n.decode() for n in names if n in line), "other")
        return found

    def kill_something(self) -> None:
        able = [(pid, kind) for pid, kind in self.processes().items() if kind != "other"]
        if able:
            kind = self.random.choice(sorted({kind for _, kind in able}))
            pid = self.random.choice([pid for pid, its in able if its == kind])
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                self.kills[kind] += 1

    def storm(self, kind: str) -> int:
        """Start it again and again under kills until it comes to its end; the exit code."""
        for patience_s in (0.6, 0.8, 1.0, 1.5, 2.0, 3.0, 60.0):
            process = self.start(kind)
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = process.wait(timeout=self.random.uniform(0.1, patience_s))
                    break
                self.kill_something()
            if code >= 0:
                return code
        return self.start(kind).wait(timeout=300)  # slow machine: it never got beyond its start

    def records(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines()]

    def storm_at_work(self, kind: str, most: int) -> int:
        """As `storm`, with kills in the midst of the rows only, ``most`` at the most."""
        while True:
            process = self.start(kind, num_workers=next(self.num_workers))
            while process.poll() is None:
                until = self.num_seen() + self.random.randint(1, 80)
                while process.poll() is None and self.num_seen() < until:
                    time.sleep(0.003)
                if process.poll() is None and sum(self.kills.values()) < most:
                    self.kill_something()
            if process.returncode >= 0:
                return process.returncode

    def said(self) -> str:
        return (self.folder / "said").read_text()[-4000:]

    def output(self) -> dict[str, str]:
        """The hashes of all files of the output, and of the rejects."""
        out = self.folder / self.sink[0]
        files = sorted(out.iterdir()) if out.is_dir() else [out]
        files.append(self.folder / "run" / "errors.jsonl")
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}

    def num_seen(self) -> int:
        return self.notes.read_bytes().count(b"\n") if self.notes.exists() else 0
