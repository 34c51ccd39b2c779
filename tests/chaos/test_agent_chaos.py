"""Kill -9 of a rank, the agent or the launcher while a policy learns: the same curve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.chaos.killed_training import Training, campaign, check_same_weights, survive
from tests.programs import read_program

AGENT = read_program("recall_agent.py")

UPDATES = 16
CHECKPOINT_UPDATES = 2
WORDS = (
    *("task.py:Recaller", "--num-steps", str(UPDATES * 2 * 8 * 16), "--eval-frequency", "4"),
    *(
        "--checkpoint-interval",
        f"{CHECKPOINT_UPDATES}steps",
        "--normalize-rewards",
        "--target-kl",
        "0.05",
    ),
)
CLOCKS = ("seconds", "steps_per_s", "acting_share", "stepping_share", "learning_share")


def lines(training: Training) -> list[dict[str, Any]]:
    """The whole curve without what a clock says."""
    found = map(json.loads, training.run_folder.metrics.read_text().splitlines())
    return [{k: v for k, v in line.items() if k not in CLOCKS} for line in found]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Training:
    training = Training(tmp_path_factory.mktemp("undisturbed"), 0, AGENT, WORDS)
    assert training.run_once(num_kills=0) == 0, training.said.read_text()
    assert [line["update"] for line in lines(training) if line["kind"] == "update"] == list(
        range(1, UPDATES + 1)
    )
    return training


def check_chaos(folder: Path, undisturbed: Training, seed: int) -> None:
    training = Training(folder, seed, AGENT, WORDS)
    survive(training)
    assert lines(training) == lines(undisturbed)
    check_same_weights(training, undisturbed)
    print(f"seed {seed}: {dict(training.kills)}")


@pytest.mark.slow  # the few kills below are looked at in the same way
def test_killed_at_random_it_draws_the_same_curve(tmp_path: Path, undisturbed: Training) -> None:
    check_chaos(tmp_path, undisturbed, 1)


def check_campaign(folder: Path, undisturbed: Training, seed: int, num_kills: int) -> None:
    def updates(training: Training) -> list[int]:
        assert lines(training) == lines(undisturbed)
        return [line["update"] for line in lines(training) if line["kind"] == "update"]

    damage = campaign(folder, seed, undisturbed, updates, num_kills=num_kills)
    assert (damage.lost, damage.doubled) == (0, 0)
    assert damage.repeated <= damage.kills * 2 * CHECKPOINT_UPDATES


@pytest.mark.thorough
def test_a_few_kills_lose_and_double_no_update(tmp_path: Path, undisturbed: Training) -> None:
    check_campaign(tmp_path, undisturbed, 60, num_kills=3)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2000, 3000, 100))
def test_two_hundred_kills_lose_and_double_no_update(
    seed: int, tmp_path: Path, undisturbed: Training
) -> None:
    check_campaign(tmp_path, undisturbed, seed, num_kills=20)
