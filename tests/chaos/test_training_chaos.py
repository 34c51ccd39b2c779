"""Kill -9 of a rank, the agent or the launcher, at any moment: the undisturbed run's weights."""

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
import torch
from tests.unit.train.rank_jobs import last_weights

from muster.base.run_folder import RunFolder

STEPS = 48

TASK = """
import os, time
import torch, muster
from pathlib import Path
from torch import nn
from torch.utils.data import Dataset

class Points(Dataset):
    def __init__(self, n):
        self.x = torch.randn(n, 16)  # seeded by muster, the same on all ranks
    def __len__(self):
        return len(self.x)
    def __getitem__(self, index):
        x = self.x[index] + 0.1 * torch.randn(16)  # random augmentation
        return x, self.x[index].sum()

class Restless(muster.Task):
    def model(self):
        Path(os.environ["CHAOS_PIDS"], f"rank-{os.environ.get('RANK', 0)}").write_text(
            str(os.getpid()))
        return nn.Sequential(
            nn.Linear(16, 400), nn.ReLU(), nn.Dropout(0.2), nn.Linear(400, 400), nn.ReLU(),
            nn.Linear(400, 1))
    def dataset(self, split):
        return {"train": Points(200), "val": Points(30)}.get(split)
    def loss(self, model, batch):
        time.sleep(0.01)
        return (model(batch[0])[:, 0] - batch[1]).square()
    def score(self, model, batch):
        return {"loss": self.loss(model, batch)}
"""


class Training:
    """One training in a folder of its own, and the hand that kills."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.pids = folder / "pids"
        self.said = folder / "said.txt"
        self.random = random.Random(seed)
        self.kills: Counter[str] = Counter()
        self.pids.mkdir()
        (folder / "task.py").write_text(TASK)
        source = str(Path(__file__).parents[2] / "src")
        self.environment = {**os.environ, "PYTHONPATH": source, "CHAOS_PIDS": str(self.pids)}

    @property
    def run_folder(self) -> RunFolder:
        return RunFolder(self.folder / "run")

    def start(self) -> subprocess.Popen[bytes]:
        command = [
            *(sys.executable, "-m", "muster", "train", "task.py:Restless", "--devices", "cpu:2"),
            *("--global-batch", "16", "--batch-size", "4", "--max-steps", str(STEPS)),
            *("--epochs", "9", "--checkpoint-interval", "4steps", "--no-tensorboard"),
            *("--lr", "0.01", "--run-dir", "run"),
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
        return process.wait(timeout=120)

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
            victims["rank"] = victims[path.name] = int(path.read_text())
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
        deadline = time.monotonic() + 15.0
        while (left := self.alive()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return not left


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Training:
    training = Training(tmp_path_factory.mktemp("undisturbed"), 0)
    assert training.run_once(num_kills=0) == 0, training.said.read_text()
    return training


def losses(training: Training) -> list[tuple[int, float]]:
    lines = map(json.loads, training.run_folder.metrics.read_text().splitlines())
    return [(line["step"], line["loss"]) for line in lines if line["kind"] == "train"]


def check_chaos(folder: Path, undisturbed: Training, seed: int) -> None:
    training = Training(folder, seed)
    for start in range(12):
        code = training.run_once(num_kills=2 if start < 4 else 0)
        assert training.nothing_is_left(), f"seed {seed}: {training.alive()}"
        if code == 0:
            break
    else:
        pytest.fail(f"seed {seed} never ended: {training.said.read_text()[-4000:]}")
    assert training.kills, "nothing was killed"
    assert losses(training) == losses(undisturbed)
    wanted, found = last_weights(undisturbed.run_folder), last_weights(training.run_folder)
    assert [name for name in wanted if not torch.equal(wanted[name], found[name])] == []
    print(f"seed {seed}: {dict(training.kills)}")


@pytest.mark.parametrize("seed", range(3))
def test_killed_at_random_it_ends_with_the_same_weights(
    seed: int, tmp_path: Path, undisturbed: Training
) -> None:
    check_chaos(tmp_path, undisturbed, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 120))
def test_killed_twenty_times_it_ends_with_the_same_weights(
    seed: int, tmp_path: Path, undisturbed: Training
) -> None:
    check_chaos(tmp_path, undisturbed, seed)
