"""Kill -9 of a rank, the agent or the launcher, at any moment: the undisturbed run's weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.chaos.killed_training import Training, campaign, check_same_weights, survive
from tests.programs import read_program

STEPS = 48
CHECKPOINT_STEPS = 4
WORDS = (
    *("task.py:Restless", "--global-batch", "16", "--batch-size", "4", "--max-steps", str(STEPS)),
    *("--epochs", "9", "--checkpoint-interval", f"{CHECKPOINT_STEPS}steps", "--lr", "0.01"),
)

TASK = read_program("restless_task.py")


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


@pytest.mark.slow  # the few kills below are looked at in the same way
@pytest.mark.parametrize("seed", [0, 1])
def test_killed_at_random_it_ends_with_the_same_weights(
    seed: int, tmp_path: Path, undisturbed: Training
) -> None:
    check_chaos(tmp_path, undisturbed, seed)


def check_campaign(folder: Path, undisturbed: Training, seed: int, num_kills: int) -> None:
    def steps(training: Training) -> list[int]:
        assert losses(training) == losses(undisturbed)
        return [step for step, _ in losses(training)]

    damage = campaign(folder, seed, undisturbed, steps, num_kills=num_kills)
    assert (damage.lost, damage.doubled) == (0, 0)
    # A kill costs what came after the last checkpoint, and the one that was being written.
    assert damage.repeated <= damage.kills * 2 * CHECKPOINT_STEPS


@pytest.mark.thorough
def test_a_few_kills_lose_and_double_no_step(tmp_path: Path, undisturbed: Training) -> None:
    check_campaign(tmp_path, undisturbed, 50, num_kills=5)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 2000, 100))
def test_two_hundred_kills_lose_and_double_no_step(
    seed: int, tmp_path: Path, undisturbed: Training
) -> None:
    check_campaign(tmp_path, undisturbed, seed, num_kills=20)
