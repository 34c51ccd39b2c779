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
    check_campaign(tmp_path, undisturbed, 50, num_kills=3)


#: Rank 0 kills itself once, when its second checkpoint is to get its name, or has just got it.
DIES_AT_A_RENAME = """
import os, signal, sys
from pathlib import Path

seen, is_next = 0, False

def hook(event, arguments):
    global seen, is_next
    if is_next:
        is_next = False
        os.kill(os.getpid(), signal.SIGKILL)
    if event == "os.rename" and Path(os.fsdecode(arguments[0])).name.startswith(".writing-"):
        seen += 1
        if seen == 2 and not Path("killed").exists():
            Path("killed").touch()
            is_next = True
            if WHEN == "before":
                os.kill(os.getpid(), signal.SIGKILL)

if os.environ.get("RANK") == "0":
    sys.addaudithook(hook)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_kill_at_the_rename_of_a_checkpoint_loses_and_doubles_no_step(
    when: str, tmp_path: Path, undisturbed: Training
) -> None:
    program = f"WHEN = {when!r}\n{DIES_AT_A_RENAME}\n{TASK}"
    training = Training(tmp_path, 0, program, WORDS)
    assert training.run_once(num_kills=0) == 0, training.said.read_text()
    said = training.said.read_text()
    assert (tmp_path / "killed").exists()
    resumed = CHECKPOINT_STEPS * (1 if when == "before" else 2)
    assert f"resume     from step {resumed} " in said
    assert losses(training) == losses(undisturbed)
    check_same_weights(training, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 2000, 100))
def test_two_hundred_kills_lose_and_double_no_step(
    seed: int, tmp_path: Path, undisturbed: Training
) -> None:
    check_campaign(tmp_path, undisturbed, seed, num_kills=20)
