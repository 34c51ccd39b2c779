"""Kill -9 of a rank, the agent or the launcher, at any moment: the undisturbed run's weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.chaos.killed_training import Training, check_same_weights, survive

STEPS = 48
WORDS = (
    *("task.py:Restless", "--global-batch", "16", "--batch-size", "4", "--max-steps", str(STEPS)),
    *("--epochs", "9", "--checkpoint-interval", "4steps", "--lr", "0.01"),
)

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


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Training:
    training = Training(tmp_path_factory.mktemp("undisturbed"), 0, TASK, WORDS)
    assert training.run_once(num_kills=0) == 0, training.said.read_text()
    return training


def losses(training: Training) -> list[tuple[int, float]]:
    lines = map(json.loads, training.run_folder.metrics.read_text().splitlines())
    return [(line["step"], line["loss"]) for line in lines if line["kind"] == "train"]


def check_chaos(folder: Path, undisturbed: Training, seed: int) -> None:
    training = Training(folder, seed, TASK, WORDS)
    survive(training)
    assert losses(training) == losses(undisturbed)
    check_same_weights(training, undisturbed)
    print(f"seed {seed}: {dict(training.kills)}")


@pytest.mark.parametrize("seed", range(2))
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
