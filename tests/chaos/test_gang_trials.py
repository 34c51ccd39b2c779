"""Trainings on several ranks as the trials of a search: paused, promoted, killed, and the same."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

import muster

_LIMIT_S = 600.0

TASK = """
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import muster


class Curve(muster.Task):
    def model(self):
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 1))

    def dataset(self, split):
        if split == "test":
            return None
        x = torch.randn(64, 8, generator=torch.Generator().manual_seed(len(split)))
        return TensorDataset(x, torch.sin(x.sum(1)))

    def loss(self, model, batch):
        if model.training:
            time.sleep(float(Path(__file__).with_name("pace").read_text()))
        return (model(batch[0])[:, 0] - batch[1]).square()

    def score(self, model, batch):
        return {"loss": (model(batch[0])[:, 0] - batch[1]).square()}
"""
TRAIN = (
    "train", "task.py:Curve", "--epochs", "8", "--global-batch", "32", "--devices", "cpu:2",
    "--checkpoint-interval", "2steps", "--no-tensorboard", "--num-workers", "1",
)  # fmt: skip


class Hand:
    """A search whose trials are trainings on two ranks, and what kills its processes."""

    def __init__(self, folder: Path, *, trials: int, eta: int, seed: int = 0) -> None:
        (folder / "task.py").write_text(TASK)
        (folder / "pace").write_text("0.1")
        self.folder = folder
        self.random = random.Random(seed)
        self.command = [
            sys.executable, "-m", "muster", "sweep", "--space", "lr=log(1e-3,1e-1)",
            "--minimize", "evaluation/loss", "--trials", str(trials),
            "--stop", f"asha:min=8,max=16,eta={eta}", "--devices", "cpu:1", "--quiet",
            "--retries", "1000", "--run-dir", "runs/it", "--", "muster", *TRAIN, "--lr", "{lr}",
        ]  # fmt: skip
        source = str(Path(__file__).parents[2] / "src")
        self.environment = {**os.environ, "PYTHONPATH": source}

    @property
    def run(self) -> Path:
        return self.folder / "runs" / "it"

    def start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self.command, cwd=self.folder, env=self.environment)

    def num_rows(self) -> int:
        path = self.run / "ledger.sqlite"
        with (
            suppress(sqlite3.Error),
            closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db,
        ):
            return int(db.execute("SELECT count(*) FROM search").fetchone()[0])
        return 0

    def search(self, kills: int) -> None:
        """Run it to its end; ``kills`` times, after a few rows more, something gets kill -9."""
        process = self.start()
        for _ in range(kills):
            goal = self.num_rows() + self.random.randrange(2, 6)
            deadline = time.monotonic() + _LIMIT_S
            while process.poll() is None and self.num_rows() < goal:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            if process.poll() is not None:
                break
            below = psutil.Process(process.pid).children(recursive=True)
            if below and self.random.random() < 0.6:  # a worker, a launcher, a supervisor, a rank
                with suppress(psutil.NoSuchProcess):
                    self.random.choice(below).kill()
                continue
            process.send_signal(signal.SIGKILL)
            process.wait()
            _, alive = psutil.wait_procs(below, timeout=_LIMIT_S)
            assert not alive, "they end with their coordinator"
            process = self.start()
        assert process.wait(timeout=_LIMIT_S) == 0

    def alone(self, lr: str) -> Path:
        """The same training without a search."""
        (self.folder / "pace").write_text("0")
        command = [sys.executable, "-m", "muster", *TRAIN, "--lr", lr, "--run-dir", f"alone-{lr}"]
        subprocess.run(command, cwd=self.folder, env=self.environment, check=True, stdout=-3)
        return self.folder / f"alone-{lr}"


def results_in(folder: Path) -> dict[str, Any]:
    found = json.loads((folder / "training_results.json").read_text())
    return {name: found[name] for name in ("metrics", "best", "final_loss", "steps", "parameters")}


def losses_in(folder: Path) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        found.setdefault(f"{line['kind']}/loss", []).append((line["step"], line["loss"]))
    return found


def check(hand: Hand, trials: int, *, thoroughly: bool) -> None:
    rows = muster.Run(hand.run).results().to_pylist()
    assert [row["state"] for row in rows if row["state"] not in ("done", "stopped")] == []
    assert len(rows) == trials
    done = [row for row in rows if row["state"] == "done"]
    assert done and len(done) < trials, "the best go on, the others do not"
    table = muster.Run(hand.run).metrics().to_pylist()
    for row in rows:
        curves: dict[str, list[tuple[int, float]]] = {"train/loss": [], "evaluation/loss": []}
        for point in table:
            if point["task"] == row["task"] and point["name"] in curves:
                curves[point["name"]].append((point["step"], point["value"]))
        if row["state"] == "stopped":
            [kept] = (hand.run / "checkpoints").glob(f"{row['task']}*/Curve-*")
            assert list(kept.glob("checkpoints/step-*")), "where it would go on"
            assert 8 <= len(curves["train/loss"]) < 16
            whole = losses_in(hand.alone(str(row["lr"])) if thoroughly else kept)
            assert all(points == whole[name][: len(points)] for name, points in curves.items())
            continue
        alone = hand.alone(str(row["lr"]))
        assert curves == losses_in(alone)
        [trained] = (hand.run / row["folder"] / "checkpoint").iterdir()
        assert results_in(trained) == results_in(alone)
        assert row["val.loss"] == results_in(alone)["metrics"]["val"]["loss"]
        assert row["steps"] == 16


def test_a_gang_is_paused_promoted_and_ends_as_it_would_alone(tmp_path: Path) -> None:
    """Of two trials both come to the rung, and one of them is promoted."""
    hand = Hand(tmp_path, trials=2, eta=2)
    hand.search(kills=0)
    check(hand, trials=2, thoroughly=False)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_kills_change_no_number_of_a_gang(seed: int, tmp_path: Path) -> None:
    hand = Hand(tmp_path, trials=6, eta=3, seed=seed)
    hand.search(kills=12)
    check(hand, trials=6, thoroughly=True)
