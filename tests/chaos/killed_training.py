"""A training whose processes are killed at random moments."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest
import torch
from tests.unit.train.rank_jobs import last_weights

from muster.run.folder import RunFolder


class Training:
    """One training in a folder of its own, and the hand that kills.

    ``program`` becomes task.py; its ranks write their pid to $CHAOS_PIDS/rank-<rank>. ``words``:
    what follows ``muster train``.
    """

    def __init__(self, folder: Path, seed: int, program: str, words: Sequence[str]) -> None:
        self.folder = folder
        self.words = words
        self.program = program
        self.pids = folder / "pids"
        self.said = folder / "said.txt"
        self.random = random.Random(seed)
        self.kills: Counter[str] = Counter()
        self.pids.mkdir()
        (folder / "task.py").write_text(program)
        source = str(Path(__file__).parents[2] / "src")
        self.environment = {**os.environ, "PYTHONPATH": source, "CHAOS_PIDS": str(self.pids)}

    @property
    def work(self) -> int:
        """How much rank 0 has done, in what the program counts; also what was lost by a kill."""
        return (self.folder / "work").stat().st_size

    @property
    def run_folder(self) -> RunFolder:
        return RunFolder(self.folder / "run")

    def start(self) -> subprocess.Popen[bytes]:
        command = [
            *(sys.executable, "-m", "muster", "train", *self.words),
            *("--devices", "cpu:2", "--no-tensorboard", "--run-dir", "run"),
        ]
        with self.said.open("ab") as said:
            return subprocess.Popen(
                command, cwd=self.folder, env=self.environment, stdout=said, stderr=said
            )

    def run_once(self, *, num_kills: int) -> int:
        """Start it, kill something ``num_kills`` times at random moments; its exit code."""
        process = self.start()
        for _ in range(num_kills):
            if self.random.random() < 0.4:
                self.await_a_checkpoint(process)
            else:
                time.sleep(self.random.uniform(0.3, 4.0))
            self.kill_something(process)
        return process.wait(timeout=600)

    def await_a_checkpoint(self, process: subprocess.Popen[bytes]) -> None:
        """Return in the middle of the writing of the next checkpoint."""
        folder = self.run_folder.checkpoints
        known = set(folder.glob("*"))
        while process.poll() is None and not set(folder.glob("*")) - known:
            time.sleep(0.001)
        time.sleep(self.random.uniform(0.0, 0.02))

    def kill_something(self, launcher: subprocess.Popen[bytes]) -> None:
        victims = {"launcher": launcher.pid}
        for path in self.pids.iterdir():
            if pid := path.read_text():  # a file is there a moment before what is in it
                victims["rank"] = victims[path.name] = int(pid)
        for child in _descendants(launcher.pid):
            if child.pid not in victims.values():
                victims["between"] = child.pid
        kind = self.random.choice(sorted(victims))
        if launcher.poll() is None and victims[kind] in {launcher.pid, *self.alive()}:
            os.kill(victims[kind], signal.SIGKILL)
            self.kills[kind] += 1

    def alive(self) -> set[int]:
        """All processes that carry our mark in their environment."""
        needle = f"CHAOS_PIDS={self.pids}".encode()
        found = set()
        for pid in psutil.pids():
            try:
                if needle in Path(f"/proc/{pid}/environ").read_bytes():
                    found.add(pid)
            except OSError:
                continue
        return found

    def nothing_is_left(self) -> bool:
        deadline = time.monotonic() + 300
        while (left := self.alive()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return not left


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def survive(training: Training) -> None:
    """Start and kill until it ends by itself, with nothing left over and something killed."""
    for start in range(12):
        code = training.run_once(num_kills=2 if start < 4 else 0)
        assert training.nothing_is_left(), training.alive()
        if code == 0:
            break
    else:
        pytest.fail(f"it never ended: {training.said.read_text()[-4000:]}")
    assert training.kills, "nothing was killed"


@dataclasses.dataclass
class Damage:
    """What kills have done to trainings: steps without a line, with several, done once more."""

    kills: int = 0
    trainings: int = 0
    lost: int = 0
    doubled: int = 0
    repeated: float = 0.0


def campaign(
    folder: Path,
    seed: int,
    undisturbed: Training,
    steps_of: Callable[[Training], list[int]],
    *,
    num_kills: int,
) -> Damage:
    """Trainings of the same program until so many kills; each ends with the undisturbed weights."""
    damage = Damage()
    wanted = steps_of(undisturbed)
    while damage.kills < num_kills:
        here = folder / f"training-{damage.trainings}"
        here.mkdir()
        training = Training(here, seed + damage.trainings, undisturbed.program, undisturbed.words)
        survive(training)
        found = steps_of(training)
        check_same_weights(training, undisturbed)
        damage.kills += training.kills.total()
        damage.trainings += 1
        damage.lost += len(set(wanted) - set(found))
        damage.doubled += len(found) - len(set(found))
        damage.repeated += (training.work / undisturbed.work - 1) * len(wanted)
    print(f"seed {seed}: {damage}")
    return damage


def check_same_weights(training: Training, undisturbed: Training) -> None:
    """The last checkpoints hold the same bits."""
    wanted, found = last_weights(undisturbed.run_folder), last_weights(training.run_folder)
    assert wanted.keys() == found.keys()
    assert [name for name in wanted if not torch.equal(wanted[name], found[name])] == []
